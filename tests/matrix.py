"""The matrix: each kind of cost by each door of the library, for each pair of penalties, one small problem a cell.

A kind says how a cost is given, a door which function solves. test_matrix.py adds the backends and mpi/cases.py the
ranks. Further properties of a problem are its traits. A cell takes one value of each, so that all cells together have
every two values of different axes that can meet. Every cell must converge and pass the judge, and its answer's numbers
must be the plan's numbers. A new kind, door, penalty or trait is one entry of a table here.
"""

import functools
import itertools
import pickle
import random
from typing import NamedTuple

import judge
import numpy as np
from problems import clouds, csr_of, optimum, with_forbidden, with_zeros
from scipy import sparse
from scipy.spatial.distance import cdist

import mapuot
from mapuot.problem.metrics import REACH

REG_M = {"kl": 0.5, "balanced": np.inf, "tv": 0.25, "l2": 3.0, "range": 0.1}
PAIRS = list(itertools.product(REG_M, REG_M))
KL = {("kl", "kl"), ("kl", "balanced"), ("balanced", "kl"), ("balanced", "balanced")}
TOLS = {"float64": 1e-9, "auto": 1e-6}
MASK = mapuot.SeededMask(0.7, 5)
SHAPES = {"usual": (12, 17), "wide": (9, 33), "row": (1, 12), "column": (12, 1), "one": (1, 1), "boxes": (32, 32)}


class Traits(NamedTuple):
    """One value on each axis of the matrix of tests; the first value of an axis is the plain problem's."""

    shape: str = "usual"
    rho: str = "number"
    masses: str = "all"
    pairs: str = "open"
    dtype: str = "float64"
    reference: str = "product"
    mask: str = "no mask"
    start: str = "cold"
    reg: float = 0.05


TRAITS = {
    "shape": ["usual", "wide", "row", "column", "one"], "rho": ["number", "one a point"], "masses": ["all", "zeros"],
    "pairs": ["open", "forbidden", "apart"], "dtype": ["float64", "float32"],
    "reference": ["product", "uniform", "given", "given as pairs"], "mask": ["no mask", "mask"],
    "start": ["cold", "an answer", "far"], "reg": [0.05, 0.5, 0.008],
}  # fmt: skip
PLAIN = Traits()


def problem(pair, traits=PLAIN, seed=0):
    """Two clouds with different masses, unless no plan could bridge the difference."""
    m, n = SHAPES[traits.shape]
    hard = all(p in ("balanced", "range") for p in pair)
    if not hard:
        ratio = 1.4
    elif "range" in pair:
        ratio = 1.05
    else:
        ratio = 1.0
    reg_m = [REG_M[p] for p in pair]
    if traits.rho == "one a point":
        reg_m = [rho * np.linspace(0.6, 1.4, k) for rho, k in zip(reg_m, (m, n), strict=True)]
    case = clouds(m, n, traits.reg, tuple(reg_m), ratio, seed, penalty=pair)
    if traits.masses == "zeros":
        case = with_zeros(case)
        case = case.replace(a=case.a / case.a.sum(), b=ratio * case.b / case.b.sum())
    if traits.pairs != "open":
        case = with_forbidden(case)
    if traits.pairs == "apart":
        case.M[m // 2] = case.M[:, n // 3] = np.inf
    return case


# ---- kinds of cost: (the cost as it is given, the same problem in arrays)


def dense(case, dtype):
    M = case.M.astype(dtype)
    return M, case.replace(M=M.astype(float))


def strided(case, dtype):
    """Return every other row and column of a matrix in Fortran order, the columns backwards."""
    M, case = dense(case, dtype)
    whole = np.full((2 * len(M), 2 * M.shape[1]), np.nan, dtype, order="F")
    view = whole[::2, ::-2]
    view[:] = M
    return view, case


def function(case, dtype):
    M, case = dense(case, dtype)
    return (lambda i0, i1: M[i0:i1]), case


def pairs(case, dtype):
    M, case = dense(case, dtype)
    return csr_of(M), case


def points(case, dtype, metric="sqeuclidean", form=None):
    """Return points of 1 to 40 coordinates, each with a weight."""
    rng = np.random.default_rng(3)
    (m, n) = case.shape
    d = {12: 3, 9: 17, 1: 40}[m] if n > 1 else 1
    x = (rng.random((m, d)) + 0.1).astype(dtype)
    y = (rng.random((n, d)) * 0.9 + 0.2).astype(dtype)
    weights = np.linspace(0.3, 1.0, d) * 3 / d
    M = 0.7 * distances(x.astype(float), y.astype(float), metric, weights)
    return mapuot.PointCloud(x, y, metric, 0.7, weights, form=form), case.replace(M=M)


def distances(x, y, metric="sqeuclidean", weights=None):
    """Return the costs by SciPy, written out where it has none."""
    if weights is None:
        w = np.ones(x.shape[1])
    else:
        w = weights
    if metric == "inner":
        return -(x * w) @ y.T
    if metric != "wfr":
        return cdist(x, y, metric, w=w)
    distance = cdist(x, y, w=w)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(distance < REACH, -2 * np.log(np.cos(distance)), np.inf)


def inner(case, dtype):
    """Return costs of any sign, with addends."""
    cloud, case = points(case, dtype, "inner")
    r, c = (np.linspace(-0.4, 0.9, k) for k in case.shape)
    cloud = mapuot.PointCloud(cloud.x, cloud.y, "inner", 0.7, cloud.weights, form=None, addends=(r, c))
    return cloud, case.replace(M=case.M + 0.7 * (r[:, None] + c))


def boxes(case, dtype):
    """Points of two groups far apart; the solver skips the pairs between them."""
    rng = np.random.default_rng(4)
    x, y = (rng.random((32, 2)) * 0.2 + 2.0 * (np.arange(32)[:, None] >= 16) for _ in range(2))
    x = x.astype(dtype)
    y = y.astype(dtype)
    return mapuot.PointCloud(x, y, truncate=8.0), case.replace(M=distances(x.astype(float), y.astype(float)))


def grid(case, dtype):
    """Return costs from a grid with one node a row to a grid with one node a column."""
    nodes = {12: (3, 2, 2), 17: (1, 17, 1), 9: (3, 1, 3), 33: (3, 1, 11), 1: (1, 1, 1)}
    shapes = [nodes[len(t)] for t in (case.a, case.b)]
    spacing = np.array([0.2, 0.1, 0.3])
    offset = (0.05, -0.1, 0.2)
    x, y = (np.argwhere(np.ones(shape)) * spacing for shape in shapes)
    cost = mapuot.Grid(shapes[0], tuple(spacing), 0.7, target=shapes[1], offset=offset)
    return cost, case.replace(M=0.7 * distances(x, y + offset))


METRICS = "euclidean", "cityblock", "cosine", "wfr"
KINDS = {
    **{f.__name__: f for f in (dense, strided, function, pairs, points)},
    "formed": functools.partial(points, form="auto"), **{x: functools.partial(points, metric=x) for x in METRICS},
    **{f.__name__: f for f in (inner, boxes, grid)},
}  # fmt: skip
ARRAYS = "dense", "strided", "function"
BY_SOLVE = "formed", *METRICS, "inner"
POINTS = "points", *BY_SOLVE


@functools.cache
def posed(kind, pair, traits=PLAIN):
    """Return (the cost as given, the problem in arrays, options)."""
    M, case = KINDS[kind](problem(pair, traits), traits.dtype)
    options = {}
    if traits.reference == "uniform":
        case = case.replace(reference="uniform")
        options = {"reference": "uniform"}
    elif traits.reference != "product":  # a matrix, 0 for some pairs
        c = np.where(np.isinf(with_forbidden(case.replace(M=np.ones(case.shape)), 0.2, 1).M), 0.0, 0.5)
        c += (c > 0) * np.linspace(0, 1, case.shape[1])
        case = case.replace(reference=c)
        options = {"reference": c if traits.reference == "given" else sparse.csr_array(c)}
    if traits.mask == "mask":
        m, n = case.shape
        case = case.replace(reference=case.c * MASK.kept(np.arange(m)[:, None], np.arange(n)) / MASK.keep)
        options["mask"] = MASK
    return M, case, options


@functools.cache
def best_of(kind, pair, traits=PLAIN):
    return optimum(posed(kind, pair, traits)[1])


# ---- doors: the answer to one problem


def solve(M, case, **options):
    return mapuot.solve(M, case.a, case.b, reg=case.reg, reg_m=case.reg_m, penalty=case.penalty, **options)


def path(M, case, **options):
    steps = {"regs": [4 * case.reg, case.reg], "reg_ms": [case.reg_m] * 2, "penalty": case.penalty}
    return list(mapuot.path(M, case.a, case.b, **steps, **options))[-1]


def batch(M, case, warm_start=None, **options):
    """Solve a batch and return its last problem of three; the others have the rows' masses in another order."""
    A = np.stack([case.a[::-1], (case.a + case.a[::-1]) / 2, case.a])
    B = np.stack([case.b] * 3)
    if warm_start is not None:
        if isinstance(warm_start, tuple):
            pair = warm_start
        else:
            pair = (warm_start.log_u, warm_start.log_v)
        warm_start = tuple(np.stack([x] * 3) for x in pair)
    named = {"reg": case.reg, "reg_m": case.reg_m, "penalty": case.penalty, "warm_start": warm_start}
    return mapuot.solve_batch(M, A, B, **named, **options)[2]


def batch_of_costs(M, case, **options):
    """Solve a batch with a cost for each problem."""
    return batch([M + M, M + M, M] if hasattr(M, "indptr") else np.stack([2 * M, M + 1, M]), case, **options)


def marginals(M, case, precision="auto", **options):
    """Solve the problem as one of many marginals with two of them."""
    return mapuot.multimarginal({(0, 1): M}, [case.a, case.b], reg=case.reg, reg_m=case.reg_m, **options)


METHODS = {"sinkhorn": "sinkhorn", "invariant": "translation_invariant", "in_place": "map-uot"}
DOORS = {"solve": solve, **{name: functools.partial(solve, method=method) for name, method in METHODS.items()}}
DOORS |= {f.__name__: f for f in (path, batch, batch_of_costs, marginals)}
REFUSED = {
    ("batch", "function"), ("batch", "boxes"), ("marginals", "function"), ("marginals", "boxes"),
    *itertools.product(("in_place",), set(KINDS) - {"dense", "strided"}),
    *itertools.product(("batch_of_costs",), set(KINDS) - {"dense", "strided", "pairs"}),
}  # fmt: skip


def stated(kind, door, pair):
    """Return whether the library takes this kind of cost by this door, and no other cell covers it."""
    if (door, kind) in REFUSED or (kind in BY_SOLVE and door != "solve"):
        return False
    if kind == "boxes" and set(pair) <= {"range", "balanced"}:
        return False  # their bounds stall, or skip nothing
    if pair == ("balanced", "balanced") and door != "solve" and kind not in ("dense", "pairs"):
        return False  # of these the oracle takes seconds
    if kind == "grid" or door in ("sinkhorn", "invariant", "in_place", "marginals"):
        return pair in KL
    return door == "solve" or "kl" in pair or pair[0] == pair[1]


def allowed(kind, door, pair, t):
    """Return whether such a problem exists, is accepted, and has a plan."""
    hard = [p in ("balanced", "range") for p in pair]
    taken = [kind in (*ARRAYS, "pairs") or t.pairs == "open",
             kind != "pairs" or (t.pairs != "open" and t.mask == "no mask"),
             kind == "pairs" or t.reference != "given as pairs", (kind == "boxes") == (t.shape == "boxes"),
             kind != "boxes" or (t.reference, t.mask) == ("product", "no mask"),
             kind != "grid" or (t.mask == "no mask" and t.dtype == "float64" and t.reference in ("product", "uniform")),
             door != "marginals" or (t.mask == "no mask" and t.reference == "product" and t.rho == "number"),
             door not in ("path", "marginals") or t.start == "cold",
             "balanced" not in pair or pair[0] != pair[1] or t.rho == "number"]  # fmt: skip
    hopeless = [
        t.pairs == "apart" and t.shape not in ("usual", "wide"), {"range", "tv"} & {*pair} and t.reg < 0.05,
        kind == "boxes" and "range" in pair and (t.start, t.masses) != ("cold", "all"),
        kind == "boxes" and t.reg > 0.05,
    ]  # fmt: skip
    thinned = [
        t.pairs != "open" and kind != "pairs", t.masses == "zeros", t.reference.startswith("given"), t.mask == "mask",
        t.shape not in ("usual", "boxes"), kind == "wfr",
    ]  # fmt: skip
    feasible = not any(hard) or (t.pairs != "apart" and sum(thinned) <= (0 if all(hard) and kind == "pairs" else 1))
    return all(taken) and feasible and not any(hopeless)


# ---- cells


class Cell(NamedTuple):
    kind: str
    door: str
    pair: tuple
    traits: Traits

    def __str__(self):
        unusual = [str(x) for x, plain in zip(self.traits, PLAIN, strict=True) if x != plain]
        return "-".join([self.kind, self.door, *self.pair, *unusual])

    def meetings(self):
        return set(itertools.combinations(zip(AXES, (*self[:3], *self.traits), strict=True), 2))


AXES = "kind", "door", "pair", *TRAITS


def draw_traits(rng, kind, door, pair):
    """Draw allowed traits, half of them plain."""
    while True:
        traits = Traits(*(rng.choice(x) if rng.random() < 0.5 else x[0] for x in TRAITS.values()))
        if kind == "pairs" and traits.pairs == "open":
            traits = traits._replace(pairs="forbidden")
        if kind == "boxes":
            traits = traits._replace(shape="boxes")
        if allowed(kind, door, pair, traits):
            return traits


@functools.cache
def cells():
    """Return a cell of each kind, door and pair with the random traits that join most values; then the rest."""
    rng = random.Random(5)
    met = set()
    found = []
    for least, kind, door, pair in itertools.product((0, 1, 1), KINDS, DOORS, PAIRS):
        if stated(kind, door, pair):
            drawn = [Cell(kind, door, pair, draw_traits(rng, kind, door, pair)) for _ in range(16)]
            cell = max(drawn, key=lambda cell: len(cell.meetings() - met))
            if len(cell.meetings() - met) >= least:
                found.append(cell)
                met |= cell.meetings()
    return found


# ---- checks


def claim_of(result, door):
    if door != "marginals":
        return judge.claim_of(result)
    return judge.Claim(
        bool(result.converged), str(result.status), array_of(result.pair(0, 1)), *result.log_u, gap=result.gap,
        error_bound=result.error_bound, dual=result.dual, objective=result.objective, mass=result.mass, bounds=False,
    )  # fmt: skip


class Hosted:
    """An answer with arrays on a GPU, presented as an answer with host arrays."""

    def __init__(self, result):
        self.result = result

    def __getattr__(self, name):
        return hosted(getattr(vars(self)["result"], name))

    def __repr__(self):
        return repr(self.result)

    def __reduce__(self):
        return Hosted, (self.result,)


def hosted(x):
    if callable(x):
        return lambda *given, **named: hosted(x(*given, **named))
    if type(x) is tuple:
        return tuple(map(hosted, x))
    if hasattr(x, "get"):
        return x.get()
    return x


def check(cell, precision, backend, place=None):
    """Solve the problem of a cell, let ``place`` move its cost, and judge every number that the library claims."""
    kind, door, pair, traits = cell
    M, case, options = posed(kind, pair, traits)
    tol = TOLS[precision]
    options = {**options, "precision": precision, "backend": backend, "tol": tol, "max_passes": 50_000}
    if traits.start == "an answer":
        options["warm_start"] = solve(M, case.replace(reg=2 * case.reg), **options)
    elif traits.start == "far":
        rng = np.random.default_rng(7)
        options["warm_start"] = tuple(30 * rng.standard_normal(k) for k in case.shape)
    if place:
        found = Hosted(DOORS[door](place(M), case, **options))
    else:
        found = DOORS[door](M, case, **options)
    claim = claim_of(found, door)
    failures, _ = judge.judge(case, claim, {"precision": precision, "tol": tol}, best_of(kind, pair, traits))
    assert not failures, failures
    assert claim.converged, claim.status
    assert (kind, backend) != ("boxes", "cpu") or traits.start == "far" or found.skipped is not None
    if door != "marginals":
        check_plan(found, claim.plan, case)


def check_plan(result, P, case):
    """A Result's functions of its plan, most of them computed without the plan, equal the plan's."""
    (m, n) = P.shape
    rng = np.random.default_rng(1)
    mass = P.sum(dtype=float)
    near = {"rtol": 3e-6 if P.dtype == np.float32 else 1e-9, "atol": 1e-12 * mass}
    X = rng.random((n, 17))
    y = rng.random(m)
    finite = np.where(np.isfinite(case.M), case.M, 0)
    with np.errstate(invalid="ignore"):
        expected = [P @ X, P @ X, P @ X[:, 0], P.T @ y, (P @ X) / P.sum(1)[:, None], (P * finite).sum()]
    found = [result.apply(X), result.apply(np.asfortranarray(X)[::-1][::-1]), result.apply(X[:, 0].tolist())]
    found += [result.apply_transpose(y), result.barycentric_map(X), result.cost]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **near)
    np.testing.assert_array_equal([*result.f, *result.g], case.reg * np.r_[result.log_u, result.log_v])
    assert result.gap == result.trace[-1].gap
    assert isinstance(result.cost, float)
    assert repr(result).startswith(f"<mapuot.Result {m}x{n} converged after ")
    i0 = m // 3
    i1 = m // 2 + 1
    np.testing.assert_allclose(array_of(result.rows(i0, i1)), P[i0:i1], **near)
    check_entries(result, P, near)
    labels = [["a", "b", "c"], [3, 1, 2], [True, False, True]][m % 3]
    for moved, right in ((result.push, P.T), (result.pull, P)):
        own = np.array([labels[k % 3] for k in range(right.shape[1])])
        classes, shares = moved(list(own))
        np.testing.assert_array_equal(classes, np.unique(own))
        with np.errstate(invalid="ignore"):
            wanted = np.stack([right[:, own == x].sum(1) / right.sum(1) for x in classes], axis=1)
        np.testing.assert_allclose(shares, np.nan_to_num(wanted), rtol=1e-5, atol=1e-9)
    if not callable(getattr(result.problem.cost, "function", None)):  # which no pickle holds
        again = pickle.loads(pickle.dumps(result))
        np.testing.assert_array_equal(again.log_u, result.log_u)
        np.testing.assert_allclose(again.apply_transpose(y), expected[3], **near)


def array_of(P):
    if sparse.issparse(P):
        return P.toarray()
    return np.asarray(P)


def check_entries(result, P, near):
    """Largest entries of rows, entries above a threshold, the fewest that hold a share, and random ones are right."""
    index, value = result.top_k((P.shape[1] + 1) // 2)
    np.testing.assert_allclose(value, -np.sort(-P, axis=1)[:, : value.shape[1]], **near)
    np.testing.assert_allclose(np.where(index < 0, 0, np.take_along_axis(P, index, 1)), value, **near)
    for threshold in (0.0, float(np.median(P)), float(P.max())):
        np.testing.assert_allclose(result.sparse(threshold).toarray(), np.where(threshold < P, P, 0), **near)
    for keep in (0.3, 0.999):
        kept = result.sparse(keep=keep)
        assert kept.data.sum(dtype=float) >= keep * P.sum(dtype=float) * (1 - 1e-6)
        np.testing.assert_allclose(kept.toarray(), np.where(kept.toarray() > 0, P, 0), **near)
        least = kept.data.min()
        assert (least * (1 + 1e-5) < P).sum() <= kept.nnz  # no larger entry was left out
        assert P[least * (1 + 1e-5) < P].sum() < keep * P.sum() * (1 + 1e-6)  # the least ones are needed
    assert (P[result.sample(50, seed=0)] > 0).all()
