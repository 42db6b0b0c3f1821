"""One random problem, drawn from everything that the arguments of ``solve`` allow, and its meaning in long double.

Masses from 1e-12 to 1e12, reg from 1e-4 to 1e3 of range(M), reg_m from 1e-3 to 1e9 of reg. ``usual`` turns such a
problem into a typical one of users; ``extreme`` into one with numbers near the limits of float64. Every draw is a
function of the generator only, so that a seed names a problem. Nothing here calls the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import LONG, spread
from problems import Case

PENALTIES = ("kl", "balanced", "tv", "l2", "range")
ODDS = {"all": [0.45, 0.15, 0.15, 0.15, 0.1], "hard": [0.15, 0.4, 0.1, 0.1, 0.25], "plain": [0.85, 0.15, 0.0, 0.0, 0.0]}


@dataclass(frozen=True)
class Problem(Case):
    """The mathematical arguments of one solve; reg_m a pair of numbers or vectors, penalty a pair."""

    points: Any = None  # (x, y, metric, scale); M holds the costs between x and y
    grid: Any = None  # (nodes, spacing, scale, target, offset) of the two grids with costs M

    def replace(self, **changes: Any) -> Problem:
        """A new M drops the points and the grid, unless these are given with it."""
        if "M" in changes:
            changes = {"points": None, "grid": None, **changes}
        return dataclasses.replace(self, **changes)

    def feasible(self) -> Problem:
        """Scale b where both sides are balanced."""
        if not (self.exactly_balanced(0) and self.exactly_balanced(1)):
            return self
        return self.replace(b=self.b * (self.a.sum() / self.b.sum()))

    def itself(self) -> Problem:
        """Return a symmetric problem: its rows transported to themselves."""
        if self.grid is not None:
            nodes, spacing, scale, _, _ = self.grid
            grid = nodes, spacing, scale, nodes, (0.0,) * len(nodes)
            return self.replace(M=grid_costs(*grid), grid=grid, b=self.a, reg_m=(self.reg_m[0],) * 2)
        k = min(self.shape)
        M = self.M[:k, :k]
        c = self.reference
        more: dict[str, Any] = {
            "M": np.minimum(M, M.T),
            "reference": c if isinstance(c, str) else c[:k, :k] + c[:k, :k].T,
        }
        if self.points is not None:
            x, metric, scale = self.points[0][:k], *self.points[2:]
            more |= {"points": (x, x, metric, scale), "M": distances(x, x, metric, scale)}
        if np.ndim(self.reg_m[0]) == 0:
            own = [self.reg_m[0]] * 2
        else:
            own = [self.reg_m[0][..., :k]] * 2
        a = self.a[:k] if self.a[:k].any() else np.ones(k)
        return self.replace(a=a, b=a, reg_m=tuple(own), penalty=(self.penalty[0],) * 2, **more)

    def cut(self, k: int) -> Problem:
        """Return the problem of the first k rows and columns."""
        if isinstance(self.reference, str):
            c = self.reference
        else:
            c = self.reference[:k, :k]
        reg_m = tuple(r if np.ndim(r) == 0 else r[..., :k] for r in self.reg_m)
        points = self.points and (self.points[0][:k], self.points[1][:k], *self.points[2:])
        return self.replace(
            M=self.M[:k, :k], a=self.a[:k], b=self.b[:k], reference=c, reg_m=reg_m, points=points, grid=self.grid
        )

    def priced(self, reg: float, rise: float, masses: tuple[float, float]) -> Problem:
        """Return the problem of this reg, and of reg_m times ``rise``; a range keeps its share.

        ``masses``: the factor by which masses have grown; reg_m of "l2" is divided by it.
        """
        sides = zip(self.penalty, self.reg_m, masses, strict=True)
        reg_m = tuple(r if kind == "range" else r * (rise / (t if kind == "l2" else 1.0)) for kind, r, t in sides)
        reg_m = tuple(np.minimum(r, 1e300) if k == "l2" else r for k, r in zip(self.penalty, reg_m, strict=True))
        return self.replace(reg=reg, reg_m=reg_m).feasible()

    @property
    def cost_rounding(self) -> float:
        """Return the float64 cost between points where no number is given."""
        if self.grid is not None:
            nodes, spacing, scale, target, offset = self.grid
            sides = zip(nodes, target, spacing, offset, strict=True)
            return 2.0**-50 * scale * sum((h * max(m, n) + abs(o)) ** 2 for m, n, h, o in sides)
        if self.points is None:
            return 0.0
        x, _, metric, scale = self.points
        unit = 2.0**-53 * (x.shape[1] + 8)
        largest = float(self.M[np.isfinite(self.M)].max())
        if metric == "inner":
            unit *= scale * float(np.prod([np.sqrt((np.asarray(z, LONG) ** 2).sum(1)).max() for z in self.points[:2]]))
            return unit
        if metric in ("cosine", "wfr"):  # absolute: of angles
            return 4 * scale * unit * (1 if metric == "cosine" else float(np.exp(min(40.0, largest / (2 * scale)))))
        return unit * largest


def draw_size(rng: Any, largest: int) -> int:
    kind = rng.random()
    if kind < 0.35:
        low, high = (1, 5)
    elif kind < 0.8:
        low, high = (2, 9)
    else:
        low = 5
        high = max(6, largest + 1)
    return min(largest, int(rng.integers(low, high)))


def squared_distances(rng: Any, m: int, n: int) -> Any:
    x = rng.random((m, 2))
    y = rng.random((n, 2)) * rng.uniform(0.2, 3) + rng.uniform(-1, 1)
    return ((x[:, None] - y) ** 2).sum(2)


def constant(rng: Any, m: int, n: int) -> Any:
    return np.full((m, n), rng.choice([0.0, 1.0, -2.0, 1e4])) + rng.choice([0.0, 1e-9]) * rng.random((m, n))


def with_sentinels(rng: Any, M: Any) -> Any:
    """Raise some entries, or a row, far above the range that ``reg`` was drawn for."""
    where = rng.random(M.shape) < rng.choice([0.05, 0.3, 0.7])
    if rng.random() < 0.2:
        where[rng.integers(0, len(M))] = True
    far = np.asarray(spread(M) * 10.0 ** rng.uniform(1, 12), M.dtype)
    return np.where(where & np.isfinite(M), far, M)


COSTS: tuple[Callable[[Any, int, int], Any], ...] = (
    *[lambda rng, m, n: rng.random((m, n))] * 3,
    *[squared_distances] * 2,
    lambda rng, m, n: rng.integers(0, 4, (m, n)).astype(float),
    constant,
    lambda rng, m, n: 10.0 ** rng.uniform(-3, 3, (m, n)),
    lambda rng, m, n: rng.standard_normal((m, n)),
    lambda rng, m, n: np.where(rng.random((m, n)) < 0.3, 10.0 ** rng.uniform(1, 6), rng.random((m, n))),
)


def draw_cost(rng: Any, m: int, n: int) -> Any:
    """Draw costs of any scale and offset, now and then with equal rows or columns, or forbidden pairs."""
    M = COSTS[rng.integers(0, len(COSTS))](rng, m, n)
    if rng.random() < 0.1:
        M = M * 10.0 ** rng.uniform(-8, 8)
    if rng.random() < 0.12:
        M = M + rng.choice([-1, 1]) * spread(M) * 10.0 ** rng.uniform(0, 6)
    if rng.random() < 0.1 and m > 1:
        M[rng.integers(0, m)] = M[rng.integers(0, m)]
    if rng.random() < 0.1 and n > 1:
        M[:, rng.integers(0, n)] = M[:, rng.integers(0, n)]
    if rng.random() < 0.12:
        M[rng.random((m, n)) < rng.choice([0.1, 0.3, 0.6])] = np.inf
        if rng.random() < 0.7 or not np.isfinite(M).any():
            k = np.arange(max(m, n))
            M[k % m, k % n] = 0.0
    return M


SENTINELS = 0.07  # share of the problems
METRICS = ("sqeuclidean", "euclidean", "cityblock", "cosine", "wfr")


def distances(x: Any, y: Any, metric: str, scale: float) -> Any:
    """Return the costs by their definitions, in long double, rounded once."""
    x = np.asarray(x, LONG)
    y = np.asarray(y, LONG)
    if metric == "inner":
        return np.asarray(-LONG(scale) * (x @ y.T), float)
    if metric == "cosine":
        x, y = (z / np.sqrt((z**2).sum(1, keepdims=True)) for z in (x, y))
    apart = np.array([np.abs(z - y).sum(1) if metric == "cityblock" else ((z - y) ** 2).sum(1) for z in x])
    if metric == "cosine":
        apart = apart / 2
    elif metric in ("euclidean", "wfr"):
        apart = np.sqrt(apart)
    if metric == "wfr":
        near = apart < np.arctan(LONG(1)) * 2 - LONG(2) ** -13
        apart = np.where(near, -2 * np.log(np.cos(np.where(near, apart, 0))), np.inf)
    return np.asarray(LONG(scale) * apart, float)


def draw_cloud(rng: Any, m: int, n: int) -> tuple[Any, Any]:
    """Draw points of any dimension: normal, in groups, on a line, doubled, all equal, far from the origin."""
    d = int(rng.choice([1, 1, 2, 2, 3, 3, 5, 10, 33, 64, 512]))
    x = rng.standard_normal((m, d))
    y = rng.standard_normal((n, d)) * rng.uniform(0.2, 2) + rng.uniform(-1, 1)
    kind = rng.integers(0, 10)
    if kind == 0:
        x, y = (np.outer(rng.standard_normal(k), np.linspace(1, 2, d)) for k in (m, n))
    elif kind == 1:
        x = x[rng.integers(0, m, m)]
        y = y[rng.integers(0, n, n)]
    elif kind == 2:
        x, y = np.tile(x[:1], (m, 1)), np.tile(x[:1] + rng.choice([0.0, 1.0]), (n, 1))
    elif kind == 3:
        x = x + 10.0 * rng.integers(0, 3, (m, 1))
        y = y + 10.0 * rng.integers(0, 3, (n, 1))
    elif kind == 4:
        x, y = (np.round(z * 2) / 2 + rng.choice([1e4, 1e8]) for z in (x, y))
    x = x / np.sqrt(d)
    y = y / np.sqrt(d)
    if rng.random() < 0.3:
        return (x.astype(np.float32), y.astype(np.float32))
    return (x, y)


def draw_uneven(rng: Any, m: int, n: int) -> tuple[Any, Any]:
    """Draw clouds as users have them: uneven clusters, heavy tails, an outlier, whole numbers, a spiral."""
    d = int(rng.choice([1, 2, 2, 3, 3, 5, 10, 50]))
    kind = int(rng.integers(0, 7))
    centres = 3 * rng.random((6, d))
    widths = rng.permutation(np.geomspace(0.01, 1, 6))

    def cloud(k: int) -> Any:
        points = rng.random((k, d))
        if kind < 3:
            which = rng.choice(6, k, p=rng.dirichlet(np.ones(6)))
            if kind == 1:
                noise = rng.standard_t(3, (k, d))
            else:
                noise = rng.standard_normal((k, d))
            if kind == 2:
                return rng.standard_t(2, (k, d))
            return centres[which] + widths[which, None] * noise
        if kind == 3:
            points[0] = 100
        elif kind == 6:
            angle = 3 * np.pi * np.sqrt(points[:, :1])
            points = np.hstack([angle * np.cos(angle), angle * np.sin(angle), points])[:, :d]
        return {4: np.rint(8 * points), 5: 1e6 + points}.get(kind, points)

    return cloud(m), cloud(n)


def usual(rng: Any, problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Make problems of one shape and kind typical: equal masses on as many points of a cloud each.

    Half of the time a plain matrix M gets clusters, heavy tails or an outlier.
    """
    first = problems[0]
    k = min(first.shape)
    if not first.grid:
        problems = tuple(p.cut(min(p.shape)) for p in problems)
    if first.points is None and first.grid is None and rng.random() < 0.5:
        x, y = draw_uneven(rng, k, k)
        if all(np.array_equal(p.M, p.M.T) for p in problems):
            y = x
        D = ((x[:, None] - y) ** 2).sum(2)
        unit = float(np.median(D)) or spread(D)
        problems = tuple(
            p.replace(M=np.where(np.isfinite(p.M), D * (spread(p.M) / unit), p.M).astype(p.M.dtype)) for p in problems
        )
    total = 1.0 if rng.random() < 0.7 else float(k)
    masses = tuple(float(total / len(t) / t.max()) for t in (problems[0].a, problems[0].b))
    equal = [{name: np.full(n, total / n) for name, n in zip("ab", p.shape, strict=True)} for p in problems]
    return tuple(p.replace(**sides).priced(p.reg, 1.0, masses) for p, sides in zip(problems, equal, strict=True))


def extreme(rng: Any, problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Take problems of one kind to the limits of float64: masses, their ratio, costs, reg and reg_m."""
    first = problems[0]
    changes = rng.random(5)
    if changes[0] < 0.6:
        size = 10.0 ** rng.uniform(-300, 200)
    else:
        size = 1.0
    unit = 1.0
    if changes[1] < 0.2 and first.points is None and first.grid is None and first.M.dtype == np.float64:
        unit = 10.0 ** rng.uniform(*np.clip([-280 - np.log10(size), 250 - np.log10(size)], -250, 250))
    ratio = min(10.0 ** rng.uniform(-40, 40) if changes[2] < 0.4 else 1.0, size * 1e300)  # both sides have mass
    if changes[3] < 0.6:
        small = spread(first.M) * 10.0 ** rng.uniform(-7, 1)
    else:
        small = first.reg
    if changes[4] < 0.4:
        rise = 10.0 ** rng.uniform(0, 16)
    else:
        rise = 1.0
    if np.isfinite(first.M * unit).sum() != np.isfinite(first.M).sum() or not small * unit > 1e-290:
        unit = 1.0
    sides = zip(first.penalty, first.reg_m, strict=True)
    known = [float(np.max(r)) for kind, r in sides if kind in ("kl", "tv") and np.isfinite(r).all()]
    if rise > 1 and known:
        rise = rise * small / max(known)
    else:
        rise = small / first.reg
    found = []
    for p in problems:
        one = p if unit == 1 else p.replace(M=p.M * unit)
        one = one.replace(a=p.a * size, b=p.b * (size / ratio))
        found.append(one.priced(p.reg * (small / first.reg) * unit, rise * unit, (size, size / ratio)))
    return tuple(found)


def draw_points(rng: Any, largest: int) -> Problem:
    """Return a problem with costs between points."""
    while True:
        problem = draw(rng, largest)
        (m, n) = problem.shape
        metric = str(rng.choice(METRICS))
        x, y = draw_cloud(rng, m, n)
        scale = float(rng.choice([1.0, 1.0, 10.0 ** rng.uniform(-3, 3)]))
        if metric == "cosine" and not all((np.abs(z) > 0).any(1).all() for z in (x, y)):
            continue
        M = distances(x, y, metric, scale)
        if not np.isfinite(M).any() or (metric == "cosine" and spread(M) < 1e-12 * scale):  # rounding alone
            continue
        reg = spread(M) * 10.0 ** rng.uniform(-4, 2)
        ratio = reg / problem.reg
        reg_m = tuple(
            r if kind == "range" else r * ratio for r, kind in zip(problem.reg_m, problem.penalty, strict=True)
        )
        return problem.replace(M=M, points=(x, y, metric, scale), reg=float(reg), reg_m=reg_m)


def draw_embeddings(rng: Any, largest: int) -> Problem:
    """Return a problem between vectors in 1 to 600 dimensions, of a metric with costs by inner products.

    Some have more points than a tile of the kernels for products.
    """
    while True:
        most = largest * int(rng.choice([1, 3, 6, 12], p=[0.7, 0.2, 0.07, 0.03]))
        m, n = (int(k) for k in rng.integers(1, most + 1, 2))
        d = draw_dimension(rng)
        metric = str(rng.choice(("sqeuclidean", "euclidean", "cosine", "inner"), p=[0.4, 0.2, 0.2, 0.2]))
        x, y = draw_vectors(rng, m, n, d)
        if metric == "cosine" and not all((np.abs(z) > 0).any(1).all() for z in (x, y)):
            continue
        scale = float(rng.choice([1.0, 1.0, 10.0 ** rng.uniform(-3, 3)]))
        M = distances(x, y, metric, scale)
        if metric in ("cosine", "inner") and np.ptp(M) < 1e-12 * np.abs(M).max(initial=scale):  # rounding alone
            continue
        reg = float(spread(M) * 10.0 ** rng.uniform(-3.5, 1))
        a, b = (draw_masses(rng, len(z)) for z in (x, y))
        if rng.random() < 0.3:
            b = b * 10.0 ** rng.uniform(-3, 3)
        penalty, reg_m = draw_penalties(rng, reg, a, b, bool(rng.random() < 0.6))
        if rng.random() < 0.8:
            reference = "product"
        else:
            reference = "uniform"
        return Problem(M, a, b, reg, reg_m, penalty, reference, points=(x, y, metric, scale)).feasible()


def draw_dimension(rng: Any) -> int:
    """Draw 1 to 600 dimensions; small ones, and those where kernels change, are frequent."""
    kind = rng.random()
    if kind < 0.35:
        return int(rng.integers(1, 9))
    if kind < 0.65:
        return int(rng.choice(EDGES))
    return round(600.0 ** rng.random())


EDGES = 1, 4, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256, 511, 512, 600  # dimensions at which kernels change


def draw_vectors(rng: Any, m: int, n: int, d: int) -> tuple[Any, Any]:
    """Draw vectors in clusters, some twice or far from the origin, in any precision; one array for both at times.

    Float32 arrays of bfloat16 numbers stand for bfloat16.
    """
    centres = rng.standard_normal((4, d)) * rng.choice([0.0, 1.0, 5.0])
    if rng.random() < 0.5:
        widths = 1 / np.sqrt(1 + np.arange(d))
    else:
        widths = np.full(d, 1 / np.sqrt(d))
    x, y = (centres[rng.integers(0, 4, k)] + widths * rng.standard_normal((k, d)) for k in (m, n))
    if rng.random() < 0.3:
        x, y = x[rng.integers(0, m, m)], np.vstack([x, y])[rng.integers(0, m + n, n)]
    x, y = (z * size for size in [10.0 ** rng.uniform(-2, 2) if rng.random() < 0.3 else 1.0] for z in (x, y))
    kind = str(rng.choice(["float64", "float32", "float16", "bfloat16"]))
    if rng.random() < 0.3:
        if kind == "float16":  # up to 65504
            size = 1e4
        else:
            size = rng.choice([1e4, 1e4, 1e5, 1e6])
        far = size * (rng.choice([-1, 1], d) if rng.random() < 0.5 else np.ones(d))
        x = x + far
        y = y + far
    x, y = (to_bfloat16(z) if kind == "bfloat16" else z.astype(kind) for z in (x, y))
    return (x, x) if rng.random() < 0.1 else (x, y)


def to_bfloat16(x: Any) -> Any:
    """Round to the nearest bfloat16 numbers, as a float32 array."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def draw_boxes(rng: Any, uneven: bool = False, sizes: tuple[int, int] = (17, 41)) -> Problem:
    """Return a problem between points in a few boxes, at a reg so small that some pairs of boxes carry almost no mass.

    ``uneven``: draw clouds as users have them, of any metric; ``sizes``: a range for the numbers of points.
    """
    while True:
        m, n = (int(k) for k in rng.integers(*sizes, 2))
        d = int(rng.choice([1, 1, 2, 2, 3, 5]))
        metric = str(rng.choice(METRICS[:4], p=[0.4, 0.2, 0.2, 0.2]))
        x = rng.standard_normal((m, d))
        y = rng.standard_normal((n, d)) * rng.uniform(0.3, 1.5)
        y = y + rng.choice([0.0, 0.0, 1.0, 10.0])
        if rng.random() < 0.2:
            x, y = draw_cloud(rng, m, n)
        if rng.random() < 0.6:
            x = x + 4.0 * rng.integers(0, 3, (m, 1))
            y = y + 4.0 * rng.integers(0, 3, (n, 1))
        if uneven:
            metric = str(rng.choice(METRICS))
            (x, y) = draw_uneven(rng, m, n)
        x = np.asarray(x, float)
        y = np.asarray(y, float)
        if metric == "cosine" and not all((np.abs(z) > 0).any(1).all() for z in (x, y)):
            continue
        M = distances(x, y, metric, 1.0)
        finite = M[np.isfinite(M)]
        if not finite.size or np.ptp(finite) <= 1e-12 * finite.max():
            continue
        if uneven:
            unit = max(float(np.median(finite)), 1e-6 * float(np.ptp(finite)))
        else:
            unit = float(np.ptp(finite))
        reg = unit * 10.0 ** rng.uniform(-3.7, -1.7)
        a = draw_masses(rng, m)
        b = draw_masses(rng, n)
        if rng.random() < 0.3:
            b = b * 10.0 ** rng.uniform(-3, 3)
        penalty, reg_m = draw_penalties(rng, reg, a, b, bool(rng.random() < 0.6))
        return Problem(M, a, b, reg, reg_m, penalty, points=(x, y, metric, 1.0)).feasible()


def grid_costs(nodes: Any, spacing: Any, scale: float, target: Any, offset: Any) -> Any:
    """Return the costs between the nodes of two grids, by their definition."""
    x, y = (
        np.stack(np.meshgrid(*(LONG(h) * np.arange(k) + LONG(o) for k, h, o in parts), indexing="ij"), -1).reshape(
            -1, len(nodes)
        )
        for parts in (zip(nodes, spacing, (0,) * len(nodes), strict=True), zip(target, spacing, offset, strict=True))
    )
    return distances(x, y, "sqeuclidean", scale)


def draw_grid(rng: Any, largest: int) -> Problem:
    """Return a problem with costs between the nodes of two grids, in one to three dimensions, near or far."""
    d = int(rng.choice([1, 2, 2, 3]))
    most = {1: 20, 2: 6, 3: 4}[d]
    nodes = tuple(rng.integers(1, most, d).tolist())
    if rng.random() < 0.5:
        target = nodes
    else:
        target = tuple(rng.integers(1, most, d).tolist())
    spacing = tuple((10.0 ** rng.uniform(-1, 1) * 10.0 ** rng.uniform(-0.5, 0.5, d)).tolist())
    far = float(rng.choice([0.0, 0.0, 1.0, 1e4]))
    offset = tuple((far * rng.uniform(-3, 3, d) * spacing).tolist())
    scale = float(rng.choice([1.0, 10.0 ** rng.uniform(-3, 3)]))
    M = grid_costs(nodes, spacing, scale, target, offset)
    problem = draw(rng, largest, plain=True)
    a = draw_masses(rng, M.shape[0]) * problem.a.mean()
    b = draw_masses(rng, M.shape[1]) * problem.b.mean()
    reg = spread(M) * 10.0 ** rng.uniform(-4, 2)
    reg_m = tuple(
        np.inf if np.isinf(r).any() else draw_rho(rng, "kl", reg, t) for r, t in zip(problem.reg_m, (a, b), strict=True)
    )
    if isinstance(problem.reference, str):
        reference = problem.reference
    else:
        reference = "product"
    grid = nodes, spacing, scale, target, offset
    return Problem(M, a, b, float(reg), reg_m, ("kl", "kl"), reference, grid=grid).feasible()


def draw_pairs(rng: Any, largest: int) -> Problem:
    """Return a problem with mostly forbidden pairs: at random, in parts that nothing connects, or along a band."""
    while True:
        problem = draw(rng, largest)
        if (problem.hard(0) or problem.hard(1)) and rng.random() < 0.7:  # most of these have no plan
            continue
        m, n = problem.shape
        i = np.arange(m)[:, None]
        j = np.arange(n)
        kind = rng.integers(0, 4)
        parts = int(rng.integers(1, 5))
        width = int(rng.integers(1, 4))
        kept = rng.random((m, n)) < rng.uniform(0.1, 0.8)
        if kind >= 2:
            kept |= abs(i * n - j * m) <= width * max(m, n)
        if kind >= 1:
            kept &= i * parts // m == j * parts // n
        if kind == 0 and rng.random() < 0.2:
            kept[rng.integers(0, m)] = kept[:, rng.integers(0, n)] = False
        M = np.where(kept, problem.M, np.inf).astype(problem.M.dtype)
        if np.isfinite(M).any():
            return problem.replace(M=M)


def draw_own(rng: Any, problem: Problem, own_cost: bool) -> tuple[Problem, ...]:
    """Return problems with their own masses, reg and reg_m; some sides are hard, and some share reg or reg_m.

    Each side has one number as penalty, and none is a range: a batch of own penalties takes no others.
    """
    kinds = tuple("kl" if kind in ("balanced", "range") else kind for kind in problem.penalty)
    shares_reg = rng.random() < 0.2
    shares_rho = rng.random() < 0.2
    hard = rng.choice([0.0, 0.3, 1.0])
    found: list[Problem] = []
    for k in range(int(rng.integers(1, 7))):
        M = problem.M
        (a, b) = (draw_masses(rng, size) for size in problem.shape)
        if own_cost and k:
            M = np.asarray(M, float) + spread(M) * rng.random(M.shape)
        if shares_reg:
            reg = problem.reg
        else:
            reg = problem.reg * 10.0 ** rng.uniform(-1.5, 1)
        a, b = (t * 10.0 ** rng.uniform(-1, 1) for t in (a * problem.a.mean(), b * problem.b.mean()))
        rhos = tuple(
            np.inf if kind == "kl" and rng.random() < hard else float(np.max(draw_rho(rng, kind, reg, t)))
            for kind, t in zip(kinds, (a, b), strict=True)
        )
        if shares_rho and found:
            rhos = found[0].reg_m
        one = problem.replace(M=M.astype(problem.M.dtype), a=a, b=b, reg=float(reg), reg_m=rhos, penalty=kinds)
        found.append(one.feasible())
    return tuple(found)


def draw_ragged(rng: Any, largest: int) -> tuple[Problem, ...]:
    """Return the problems of a batch of points of any kind."""
    if rng.random() < 0.3:
        return draw_clouds(rng, draw_boxes(rng, uneven=bool(rng.random() < 0.5)), largest)
    return draw_clouds(rng, draw_points(rng, largest), largest)


def draw_clouds(rng: Any, base: Problem, largest: int) -> tuple[Problem, ...]:
    """Return problems between some points of ``base``, of several sizes, with their own reg and reg_m."""
    if not isinstance(base.reference, str):
        base = base.replace(reference="product", points=base.points)
    x, y, metric, scale = base.points
    found: list[Problem] = []
    for one in draw_own(rng, base, False):
        rows, cols = (z[rng.integers(0, len(z), draw_size(rng, largest))] for z in (x, y))
        M = distances(rows, cols, metric, scale)
        if not np.isfinite(M).any():
            rows, cols, M = x, y, base.M
        a, b = (t.mean() * draw_masses(rng, k) for t, k in zip((one.a, one.b), M.shape, strict=True))
        found.append(one.replace(M=M, a=a, b=b, points=(rows, cols, metric, scale)).feasible())
    return tuple(found)


def draw_masses(rng: Any, size: int) -> Any:
    kind = rng.integers(0, 6)
    if kind == 0:
        t = np.ones(size)
    elif kind <= 2:
        t = rng.uniform(0.2, 1.0, size)
    elif kind == 3:
        t = 10.0 ** rng.uniform(-rng.uniform(0, 6), 0, size)
    elif kind == 4:
        t = rng.dirichlet(np.full(size, rng.choice([0.1, 1.0]))) + 1e-300
    else:
        t = rng.integers(1, 5, size).astype(float)
    if rng.random() < 0.12 and size > 1:
        t[rng.random(size) < 0.4] = 0.0
        t[rng.integers(0, size)] = 1.0
    return t


def draw_rho(rng: Any, kind: str, reg: float, t: Any) -> Any:
    """Draw a number or one per point."""
    size = len(t)
    if kind == "range":
        rho = float(rng.choice([0.0, 1e-6, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 3.0]))
    elif rng.random() < 0.5:
        rho = reg * 10.0 ** rng.uniform(-1, 3)
    else:
        rho = reg * 10.0 ** rng.uniform(-3, 9)
    if kind == "l2":  # rho t / reg decides
        rho /= t.max() if rng.random() < 0.8 else 1.0
        rho *= 10.0 ** rng.uniform(-2, 4) if rng.random() < 0.3 else 1.0
    if rng.random() < 0.15:
        vector = rho * 10.0 ** rng.uniform(-rng.uniform(0, 2), 0, size)
        if kind == "kl" and rng.random() < 0.25:
            vector[rng.random(size) < 0.3] = np.inf
        return vector
    return float(rho)


def draw(rng: Any, largest: int = 12, plain: bool = False) -> Problem:
    """``plain``: KL and balanced sides with a reference of its own kind, as POT's functions take them."""
    m = draw_size(rng, largest)
    n = draw_size(rng, largest)
    if rng.random() < 0.04:
        m = int(rng.integers(1, 4))
        n = int(rng.integers(16, 48))
    if rng.random() < 0.04:
        m = int(rng.integers(16, 48))
        n = int(rng.integers(1, 4))
    M = draw_cost(rng, m, n)
    reg = spread(M) * 10.0 ** (rng.uniform(-2, 1) if rng.random() < 0.5 else rng.uniform(-4, 3))
    if rng.random() < 0.15:
        M = M.astype(np.float32)
    a = draw_masses(rng, m)
    b = draw_masses(rng, n)
    if rng.random() < 0.25:
        scale = 10.0 ** rng.uniform(-12, 12)
        a = a * scale
        b = b * scale
    if rng.random() < 0.35:
        b = b * 10.0 ** rng.uniform(-rng.uniform(0.3, 8), rng.uniform(0.3, 8))
    penalty, reg_m = draw_penalties(rng, reg, a, b, plain)
    found = Problem(M, a, b, float(reg), reg_m, penalty, draw_reference(rng, m, n)).feasible()
    if rng.random() < SENTINELS:
        found = found.replace(M=with_sentinels(rng, M))
    return found


def draw_penalties(rng: Any, reg: float, a: Any, b: Any, plain: bool) -> tuple[tuple[str, str], tuple[Any, Any]]:
    odds = ODDS["plain" if plain else "all"]
    first, second = (str(rng.choice(PENALTIES, p=odds)) for _ in range(2))
    if rng.random() < 0.4:
        penalty = (first, first)
    else:
        penalty = (first, second)
    reg_m = (draw_rho(rng, penalty[0], reg, a), draw_rho(rng, penalty[1], reg, b))
    if penalty[0] == penalty[1] and rng.random() < 0.4 and np.ndim(reg_m[0]) == 0:
        reg_m = (reg_m[0], reg_m[0])
    if plain:
        reg_m = tuple(np.inf if p == "balanced" else float(np.min(r)) for p, r in zip(penalty, reg_m, strict=True))
        penalty = ("kl", "kl")
    return penalty, reg_m


def draw_reference(rng: Any, m: int, n: int) -> Any:
    reference: Any = "product" if rng.random() < 0.65 else "uniform"
    if rng.random() < 0.15:
        reference = rng.random((m, n)) * 10.0 ** rng.uniform(-3, 3)
        if rng.random() < 0.5:
            reference[rng.random((m, n)) < 0.3] = 0.0
        reference[rng.integers(0, m), rng.integers(0, n)] = 1.0
    return reference
