"""`gromov`: a plan between two spaces that share no coordinates, entropic, unbalanced or balanced, fused or not.

With the plan Q of the step before, the next plan P solves an unbalanced problem of its own, whose cost is

    C_ij = alpha sum_kl (X_ik - Y_jl)^2 Q_kl + (1 - alpha) F_ij / 2 + k,
    k = rho_1 <Q 1, log(Q 1 / a)> + rho_2 <Q^T 1, log(Q^T 1 / b)> + reg <Q, log(Q / a b^T)>,

and whose reg and reg_m are multiplied by the mass of Q; P is then multiplied by sqrt(mass Q / mass P), unless a side is
hard. Source: Sejourne, Vialard, Peyre 2021, algorithm 1. The sum is (X^2 Q 1)_i + (Y^2 Q^T 1)_j - 2 (X Q Y^T)_ij. Of
squared distances between points X = L R^T with the rows (|x|^2, 1, x) of L: its squares are moments, and the last term
is an inner product of as many coordinates as the smaller space has, and two more. No matrix of pairs is then formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..errors import muted, shown
from ..penalties import F64
from ..problem.clouds import PointCloud
from ..problem.points import as_points
from ..problem.sparse import is_sparse
from ..problem.validate import as_array, as_choice, as_count, as_float, as_pair, as_positive, check_kind
from ..status import Words, not_converged, warn_not_converged
from .solve import solve

KINDS = "sqeuclidean", "precomputed"
STARTS = "independent", "axes"
LOOSE = 1e-2  # tol of the first inner solve; later ones follow the change of the plan, by SHARE of it
SHARE = 0.1
SIGNS = 8  # directions of the axes that are tried
ROUNDING = 2.0**-50  # of the terms of a value
OPTIONS = "threads", "backend", "precision", "max_passes"  # of `solve`, which a user may give


class Step(NamedTuple):
    """One step: how far the plan before it lay from its answer, the objective, the mass, the inner certificate."""

    change: float
    objective: float
    mass: float
    error_bound: float
    n_passes: int


class Terms(NamedTuple):
    """Terms of the objective, in its units: of the structures, the features, both marginals and the entropy."""

    structure: float
    features: float
    rows: float
    columns: float
    entropy: float


class GromovResult(Result):
    """Answer of `gromov`: a `Result` of the last inner problem, and what is known of the outer one.

    Whatever a `Result` tells (``plan``, ``apply``, ``top_k``, ``sparse``, ``sample``, ``barycentric_map``, ``save``) is
    told of the plan; ``error_bound``, ``gap``, ``dual``, ``objective`` and ``cost`` are those of the last inner
    problem, which is convex and whose certificate is true. The outer problem is not convex: no number bounds how far
    the plan is from its best one.

    Attributes
    ----------
    value : float
        Objective of `gromov` at the plan.
    parts : Terms
        Its terms: ``structure``, ``features``, ``rows``, ``columns``, ``entropy``, whose sum it is.
    steps : list of Step
        One entry a step of the start that was kept: ``change``, ``objective``, ``mass``, and of the inner solve
        ``error_bound`` and ``n_passes``. ``change`` bounds ``|Q - P|_1 / mass`` for the plan Q before and the exact
        answer P of the step.
    values : list of float
        Objectives that all starts came to, by which the best was kept.
    settled : bool
        Whether the last change was at most ``tol``.

    See Also
    --------
    gromov : Makes it.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    >>> result = mapuot.gromov(x, x[:, ::-1], reg=0.5, reg_m=np.inf)
    >>> result.plan.argmax(1)
    array([0, 1, 2])
    >>> result.settled, bool(abs(sum(result.parts) - result.value) < 1e-12)
    (True, True)
    """

    value: float
    parts: Terms
    steps: list[Step]
    values: list[float]
    settled: bool

    def __repr__(self) -> str:
        (m, n), state = self.problem.shape, "settled" if self.settled else "not settled"
        return f"<mapuot.GromovResult {m}x{n} {state} after {len(self.steps)} steps, value {self.value:.6g}>"


class Space:
    """The distances within one space, as points or as a matrix, and what a step asks of them."""

    def __init__(self, given: Any, kind: str, name: str) -> None:
        self.matrix: Any = None
        if kind == "sqeuclidean":
            points = np.asarray(as_points(given, name), np.float64)
            self.x = points - points.mean(0)
            square = (self.x**2).sum(1)
            self.phi = np.column_stack([square, np.ones(len(points)), self.x])
            self.count = len(points)
            return
        A = given if is_sparse(given) else as_array(given, name)
        check_kind(A, name, "fiu")
        if A.ndim != 2 or A.shape[0] != A.shape[1] or 0 in A.shape:
            raise ValueError(f"{name} must be a square matrix of distances for metric 'precomputed', got {A.shape}")
        if not np.isfinite(A.data if is_sparse(A) else A).all() or abs(A - A.T).max() > 1e-12 * abs(A).max():
            raise ValueError(f"{name} must be finite and symmetric for metric 'precomputed'")
        self.matrix = A.tocsr().astype(np.float64) if is_sparse(A) else np.asarray(A, np.float64)
        self.squares = self.matrix.multiply(self.matrix).tocsr() if is_sparse(A) else self.matrix**2
        self.count = A.shape[0]

    def square_means(self, w: F64) -> F64:
        """Return sum_k X_ik^2 w_k of every i."""
        if self.matrix is not None:
            return np.asarray(self.squares @ w)
        q, x = self.phi[:, 0], self.x
        second, first, third = x.T @ (x * w[:, None]), w @ x, (w * q) @ x
        rest = w @ q**2 + 2 * q * (w @ q) - 4 * q * (x @ first) - 4 * (x @ third)
        return np.asarray(q**2 * w.sum() + rest + 4 * ((x @ second) * x).sum(1))

    def by(self, phi: F64) -> F64:
        """Return R of X = L R^T times columns (k,) of moments: (|x|^2, 1, x) become (1, |x|^2, -2 x)."""
        return np.concatenate([phi[1:2], phi[:1], -2 * phi[2:]])


class Known(NamedTuple):
    """What a step needs of a plan: its product, marginals, and <P, log(P / a b^T)>."""

    apply: Callable[[F64], F64]
    apply_transpose: Callable[[F64], F64]
    whole: Callable[[], F64]
    r: F64
    s: F64
    entropy: float

    def scaled(self, factor: float) -> Known:
        """Return the state of the plan times a number."""
        mass, f = float(self.r.sum()), factor
        products = (lambda Z: f * self.apply(Z)), (lambda Z: f * self.apply_transpose(Z)), (lambda: f * self.whole())
        return Known(*products, f * self.r, f * self.s, f * (self.entropy + mass * math.log(f)))


class Task:
    """A problem of `gromov`: both spaces, masses and penalties, and the costs of a step."""

    def __init__(
        self, X: Space, Y: Space, a: F64, b: F64, reg: float, rho: tuple[float, float], features: Any, alpha: float
    ) -> None:
        self.X, self.Y, self.a, self.b, self.reg, self.rho, self.alpha = X, Y, a, b, reg, rho, alpha
        self.hard = math.inf in rho
        self.F: Any = None
        self.features: Any = None
        if isinstance(features, tuple):
            middle = features[0].mean(0)
            self.features = features[0] - middle, features[1] - middle
        elif features is not None:
            self.F = features

    def independent(self) -> Known:
        """Return the state of the plan a b^T, times a number where a side is hard."""
        return self.of_product(self.a, self.b)

    def of_product(self, a: F64, b: F64) -> Known:
        total = math.sqrt(a.sum() * b.sum()) if not self.hard else 1 / (b if self.rho[0] == math.inf else a).sum()
        f = total / (a.sum() * b.sum()) if not self.hard else total
        plan = Known(
            lambda Z: np.multiply.outer(a, b @ Z), lambda Z: np.multiply.outer(b, a @ Z), lambda: np.outer(a, b),
            a * b.sum(), b * a.sum(), 0.0,
        )  # fmt: skip
        return plan.scaled(f)

    def given(self, P: Any) -> Known:
        """Return the state of a plan, (m, n)."""
        P = P.plan if isinstance(P, Result) else P
        P = P.toarray() if is_sparse(P) else as_array(P, "init")
        shape = self.X.count, self.Y.count
        if P.shape != shape or not np.isfinite(P).all() or (P < 0).any() or not P.sum() > 0:
            raise ValueError(f"init must be a plan {shape} of finite numbers >= 0, not all 0, got shape {P.shape}")
        P, c = np.asarray(P, np.float64), np.outer(self.a, self.b)
        if (P[c == 0] > 0).any():
            raise ValueError("init must have no mass where a or b has none")
        entropy = relative_entropy(P, c)
        state = Known(lambda Z: P @ Z, lambda Z: P.T @ Z, lambda: P, P.sum(1), P.sum(0), entropy)
        if not self.hard:
            return state
        return state.scaled(float((self.a if self.rho[0] == math.inf else self.b).sum() / P.sum()))

    def divergences(self, state: Known) -> tuple[float, float]:
        """Return <r, log(r / a)> and <s, log(s / b)>."""
        sides = (state.r, self.a), (state.s, self.b)
        x, y = (relative_entropy(p, q) for p, q in sides)
        return x, y

    def cost(self, state: Known) -> StepCost:
        """Return the cost of the step after a plan."""
        X, Y, alpha = self.X, self.Y, self.alpha
        r, c = alpha * X.square_means(state.r), alpha * Y.square_means(state.s)
        if not self.hard:
            x, y = self.divergences(state)
            r = r + self.rho[0] * x + self.rho[1] * y + self.reg * state.entropy
        M, left, right = self.F, np.empty((X.count, 0)), np.empty((Y.count, 0))
        if M is not None:
            M = 0.5 * (1 - alpha) * M
        if X.matrix is None and Y.matrix is None:
            H = X.phi.T @ state.apply(Y.phi)
            G = Y.by(X.by(H).T).T  # (dX + 2, dY + 2)
            left, right = (X.phi, Y.phi @ G.T) if X.phi.shape[1] <= Y.phi.shape[1] else (X.phi @ G, Y.phi)
        elif X.matrix is None:
            left, right = X.phi, X.by((Y.matrix @ state.apply_transpose(X.phi)).T).T
        elif Y.matrix is None:
            left, right = Y.by((X.matrix @ state.apply(Y.phi)).T).T, Y.phi
        else:
            product = X.matrix @ (Y.matrix @ state.whole().T).T
            M = -2 * alpha * product if M is None else M - 2 * alpha * product
        left = 2 * alpha * left
        if self.features is not None:
            part, (f, g) = 1 - alpha, self.features
            left, right = np.hstack([left, part * f]), np.hstack([right, g])
            r, c = r + 0.5 * part * (f**2).sum(1), c + 0.5 * part * (g**2).sum(1)
        return StepCost(r, c, left, right, M)

    def parts(self, state: Known) -> Terms:
        """Return the terms of the objective at a plan."""
        cost = self.plain.cost(state).paid(state)
        mass, (x, y) = float(state.r.sum()), self.divergences(state)
        features = 0.0
        if self.F is not None:
            features = float((state.whole() * self.F).sum())
        elif self.features is not None:
            f, g = self.features
            features = float(state.r @ (f**2).sum(1) + state.s @ (g**2).sum(1) - 2 * (f * state.apply(g)).sum())
        rows, columns = (
            0.0 if rho == math.inf else rho * (2 * mass * (z - mass + w.sum()) + (mass - w.sum()) ** 2)
            for rho, z, w in zip(self.rho, (x, y), (self.a, self.b), strict=True)
        )
        whole = float(self.a.sum() * self.b.sum())
        entropy = self.reg * (2 * mass * (state.entropy - mass + whole) + (mass - whole) ** 2)
        return Terms(float(cost), (1 - self.alpha) * features, float(rows), float(columns), entropy)

    @property
    def plain(self) -> Task:
        """The task without features and constants, whose cost is that of the structures."""
        return Task(self.X, self.Y, self.a, self.b, self.reg, (math.inf, math.inf), None, self.alpha)

    def excess(self, state: Known, cost: StepCost, dual: float, weight: float) -> float:
        """Bound how much more a plan costs than the least of the step's problem, whose dual value is given."""
        mass, (x, y) = float(state.r.sum()), self.divergences(state)
        value = cost.paid(state) + weight * self.reg * (state.entropy - mass + float(self.a.sum() * self.b.sum()))
        for rho, z, w in zip(self.rho, (x, y), (self.a, self.b), strict=True):
            value += 0.0 if rho == math.inf else weight * rho * (z - mass + w.sum())
        size = float(np.abs(cost.r) @ state.r + np.abs(cost.c) @ state.s) + abs(value)
        return max(0.0, value - dual) + ROUNDING * size


class StepCost(NamedTuple):
    """The cost of a step: r_i + c_j - <left_i, right_j> + M_ij."""

    r: F64
    c: F64
    left: F64
    right: F64
    M: Any

    def paid(self, state: Known) -> float:
        """Return what a plan pays."""
        value = float(self.r @ state.r + self.c @ state.s)
        if self.left.shape[1]:
            value -= float((self.left * state.apply(self.right)).sum())
        return value if self.M is None else value + float((self.M * state.whole()).sum())

    def posed(self) -> Any:
        """Return M for `solve`: points, or an array where a part of it is one."""
        if self.M is not None:
            return self.r[:, None] + self.c + self.M - self.left @ self.right.T
        size = [np.sqrt((z**2).mean(0)) for z in (self.left, self.right)]
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.sqrt(size[1] / size[0])
        factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
        return PointCloud(self.left * factor, self.right / factor, "inner", addends=(self.r, self.c))


def gromov(
    X: Any, Y: Any, a: Any = None, b: Any = None, *, reg: float, reg_m: Any, metric: Any = "sqeuclidean",
    features: Any = None, alpha: float = 0.5, init: Any = "auto", max_iter: int = 100, tol: float = 1e-4,
    inner_tol: float = 1e-6, **options: Any,
) -> GromovResult:  # fmt: skip
    """Solve entropic Gromov-Wasserstein between two spaces, unbalanced, semi-relaxed or balanced, fused with features.

    The objective of a plan P, with X and Y the distances within the spaces and KL of products of measures, is

    ``alpha sum (X_ik - Y_jl)^2 P_ij P_kl + (1 - alpha) <F, P> + reg KL(P x P | ab x ab)
    + reg_m[0] KL(P1 x P1 | a x a) + reg_m[1] KL(P^T 1 x P^T 1 | b x b)``.

    It is not convex. Steps go down to a plan that answers its own step; several starts are tried, and the best kept.

    Parameters
    ----------
    X, Y : (m, d), (n, e) arrays, or (m, m), (n, n) arrays or matrices of scipy.sparse
        Points, whose distances are squared Euclidean ones and are never formed; for ``metric="precomputed"`` distances,
        symmetric, where entries that a sparse matrix does not store are 0.
    a, b : (m,), (n,) arrays, optional
        Masses, >= 0; left out: equal masses of sum 1.
    reg : float
        Entropic regularisation, > 0, in units of squared distances (of points: of the fourth power of a length). Half
        of ``epsilon`` of POT's balanced functions, and all of that of its unbalanced one.
    reg_m : float, inf, or a pair of them
        Marginal penalty, in units of reg; inf is the balanced constraint.
    metric : {"sqeuclidean", "precomputed"} or a pair of them
    features : pair of (m, k) and (n, k) arrays, or (m, n) array, optional
        What both spaces share: points, whose costs F are squared distances, or F itself.
    alpha : float
        Share of the structures, in (0, 1], beside the features; 1 where there are none.
    init : {"auto", "independent", "axes"}, (m, n) plan, Result, or a list of them
        Where to start: from a b^T, from points laid on each other by the principal axes of both clouds, in up to 8
        directions of these, or from a plan. "auto" tries both of points, and the first otherwise.
    max_iter : int
        Steps at most.
    tol : float
        Stop when the plan changes by at most this share of its mass, see ``steps`` of the answer.
    inner_tol : float
        ``tol`` of `solve` for the last steps; those before follow the change of the plan.
    **options
        ``threads``, ``backend``, ``precision`` and ``max_passes`` of :func:`solve`.

    Returns
    -------
    GromovResult
        A `Result` of the last step's problem, with the value of the objective and the steps.

    Warns
    -----
    ConvergenceWarning
        ``max_iter`` steps did not settle the plan, or the last step's problem ended above its tolerance.

    References
    ----------
    Sejourne, Vialard, Peyre: The unbalanced Gromov Wasserstein distance, 2021. Thual et al.: Aligning individual brains
    with fused unbalanced Gromov Wasserstein, 2022.

    See Also
    --------
    solve : One step's problem.

    Examples
    --------
    A cloud is found again that was turned and shuffled:

    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(60, 3)) * [3.0, 2.0, 1.0]
    >>> turn, order = np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.permutation(60)
    >>> result = mapuot.gromov(x, (x @ turn)[order], reg=0.5, reg_m=np.inf)
    >>> result.settled, bool((order[result.top_k(1)[0][:, 0]] == np.arange(60)).mean() > 0.95)
    (True, True)
    """
    kinds = metric if isinstance(metric, tuple) else (metric, metric)
    spaces = [Space(z, as_choice(k, "metric", KINDS), name) for z, k, name in zip((X, Y), kinds, "XY", strict=True)]
    given = options.keys() - set(OPTIONS)
    if given:
        raise TypeError(f"options must be of {OPTIONS}, got {sorted(given)}")
    reg, tol, max_iter = as_positive(reg, "reg"), as_positive(tol, "tol"), as_count(max_iter, "max_iter")
    low, high = (as_positive_or_inf(x, f"reg_m[{k}]") for k, x in enumerate(as_pair(reg_m, "reg_m")))
    a, b = (as_masses(w, space.count, name) for w, space, name in ((a, spaces[0], "a"), (b, spaces[1], "b")))
    features = as_features(features, spaces[0].count, spaces[1].count)
    alpha = 1.0 if features is None else as_float(alpha, "alpha")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    task = Task(spaces[0], spaces[1], a, b, reg, (low, high), features, alpha)
    inner_tol = as_positive(inner_tol, "inner_tol")
    found = [descend(task, start, max_iter, tol, inner_tol, options) for start in starts(task, init, options)]
    best = min(found, key=lambda one: one.value if math.isfinite(one.value) else math.inf)
    best.values = [one.value for one in found]
    if not best.converged:
        warn_not_converged("gromov, the last step: " + not_converged(best, inner_tol, words=Words(tol="inner_tol")))
    if not best.settled:
        change = best.steps[-1].change
        warn_not_converged(f"gromov: the plan still changes by {change:.1e} after {max_iter} steps (tol {tol:.1e})")
    return best


def relative_entropy(p: F64, q: F64) -> float:
    """Return <p, log(p / q)>, where p is 0 wherever q is."""
    used = p > 0
    return float((p[used] * np.log(p[used] / q[used])).sum())


def descend(
    task: Task, state: Known, max_iter: int, tol: float, inner_tol: float, options: dict[str, Any]
) -> GromovResult:
    """Take steps from a plan until it changes no more."""
    steps: list[Step] = []
    start: Any = None
    settled, close, parts, result = False, LOOSE, Terms(*[math.nan] * 5), None
    while len(steps) < max_iter and not settled:
        weight = float(state.r.sum())
        cost = task.cost(state)
        reg, reg_m = task.reg * weight, tuple(rho * weight for rho in task.rho)
        start = start and (start[0] / reg, start[1] / reg)
        with muted():  # each step has its certificate, and only the last one counts
            result = solve(
                cost.posed(), task.a, task.b, reg=reg, reg_m=reg_m, tol=close, warm_start=start, **options
            )  # fmt: skip
        if not result.mass > 0 or not math.isfinite(result.mass):
            raise ValueError(f"reg and reg_m must leave a plan with mass, got {shown(task.reg)} and {shown(task.rho)}")
        start = result.potentials  # in units of costs, as reg follows the mass
        over = task.excess(state, cost, result.dual, weight) / reg
        change = math.sqrt((2 * weight + 4 * result.mass) / 3 * over) / result.mass  # Pinsker, of measures of any mass
        state = state_of(task, result, reg)
        parts = task.parts(state)
        steps.append(Step(change, sum(parts), result.mass, result.error_bound, result.n_passes))
        settled = change <= tol and close <= inner_tol
        close = max(inner_tol, min(close, SHARE * change))
        if change <= tol:
            close = inner_tol
        if not task.hard:
            state = state.scaled(math.sqrt(weight / result.mass))
    found = GromovResult.__new__(GromovResult)
    vars(found).update(vars(result))
    found.value, found.parts, found.steps, found.settled, found.values = sum(parts), parts, steps, settled, []
    return found


def state_of(task: Task, result: Result, reg: float) -> Known:
    """Return the state of an answer; <P, log(P / a b^T)> is that of its potentials and its cost."""
    cost, *sums = result._sums  # of the plan itself: marginals of the last pass may lag behind it
    r, s = (np.asarray(z, np.float64) for z in sums)
    logs = (np.where(w > 0, z, 0.0) for w, z in ((r, result.log_u), (s, result.log_v)))
    entropy = sum(float(w @ z) for w, z in zip((r, s), logs, strict=True)) - cost / reg
    return Known(result.apply, result.apply_transpose, lambda: np.asarray(result.plan, np.float64), r, s, entropy)


def starts(task: Task, init: Any, options: dict[str, Any]) -> list[Known]:
    """Return the states to start from."""
    points = task.X.matrix is None and task.Y.matrix is None
    if isinstance(init, str) and init == "auto":
        init = [*STARTS] if points else ["independent"]
    found = []
    for one in init if isinstance(init, list) else [init]:
        if not isinstance(one, str):
            found.append(task.given(one))
        elif as_choice(one, "init", STARTS) == "independent":
            found.append(task.independent())
        elif points:
            found += by_axes(task, options)
        else:
            raise ValueError("init must not be 'axes' where a metric is 'precomputed': there are no axes")
    if not found:
        raise ValueError("init must name a start, got []")
    return found


def by_axes(task: Task, options: dict[str, Any]) -> list[Known]:
    """Return the best plan between points on the principal axes of both clouds, in several directions of the axes."""
    clouds = []
    for space, w in ((task.X, task.a), (task.Y, task.b)):
        x = space.x - w @ space.x / w.sum()
        axes = np.linalg.svd(x * np.sqrt(w)[:, None], full_matrices=False)[2]
        z = x @ axes.T
        third = np.sign(w @ z**3)
        clouds.append(z * np.where(third == 0, 1.0, third))
    k = min(z.shape[1] for z in clouds)
    x, y = (z[:, :k] for z in clouds)
    scale = float(task.a @ (x**2).sum(1) / task.a.sum())
    rho = tuple(np.inf if p == math.inf else scale for p in task.rho)
    found = []
    for flips in range(min(SIGNS, 2**k)):
        signs = np.where((flips >> np.arange(k)) & 1, -1.0, 1.0)
        with muted():
            result = solve(PointCloud(x * signs, y), task.a, task.b, reg=0.05 * scale, reg_m=rho, tol=LOOSE, **options)
        if result.mass > 0:
            found.append(state_of(task, result, 0.05 * scale))
    return [min(found, key=lambda state: sum(task.parts(state)))] if found else []


def as_masses(value: Any, count: int, name: str) -> F64:
    """Check the masses of a space, finite and >= 0."""
    if value is None:
        return np.full(count, 1 / count)
    w = as_array(value, name)
    check_kind(w, name, "fiu")
    if w.shape != (count,) or not np.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise ValueError(f"{name} must be ({count},) finite numbers >= 0, not all 0, got {shown(value)}")
    return np.asarray(w, np.float64)


def as_positive_or_inf(value: Any, name: str) -> float:
    """Check a penalty of a side: one number > 0, or inf."""
    if np.ndim(value):
        raise ValueError(f"{name} must be one number, > 0 or inf, got a vector: products of measures have one")
    found = as_float(value, name)
    if not found > 0:
        raise ValueError(f"{name} must be > 0, or inf, got {shown(value)}")
    return found


def as_features(value: Any, m: int, n: int) -> Any:
    """Check what both spaces share: a pair of points with equally many columns, or a matrix of costs."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        f, g = (np.asarray(as_points(z, f"features[{k}]"), np.float64) for k, z in enumerate(value))
        if (len(f), len(g)) != (m, n) or f.shape[1] != g.shape[1]:
            raise ValueError(f"features must be ({m}, k) and ({n}, k) arrays, got shapes {f.shape} and {g.shape}")
        return f, g
    F = as_array(value, "features")
    check_kind(F, "features", "fiu")
    if F.shape != (m, n) or not np.isfinite(F).all():
        raise ValueError(f"features must be a pair of arrays or a finite matrix ({m}, {n}), got shape {F.shape}")
    return np.asarray(F, np.float64)
