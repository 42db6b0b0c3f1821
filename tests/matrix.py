"""The matrix: each kind of cost by each door of the library, for each pair of penalties, one small problem a cell.

A kind says how a cost is given, a door which function solves; test_matrix.py adds the backends and mpi/cases.py the
ranks. Every cell must converge and pass the judge, so that a new kind, door or penalty is one entry of a table here.
"""

import functools
import itertools

import judge
import numpy as np
from problems import clouds, csr_of, optimum, with_forbidden
from scipy import sparse

import mapuot

REG_M = {"kl": 0.5, "balanced": np.inf, "tv": 0.25, "l2": 3.0, "range": 0.1}
PAIRS = list(itertools.product(REG_M, REG_M))
TOLS = {"float64": 1e-9, "auto": 1e-6}
MASK = mapuot.SeededMask(0.7, 5)


def problem(m, n, pair, seed=0):
    """Two clouds whose masses differ unless no plan could bridge the difference."""
    hard = all(p in ("balanced", "range") for p in pair)
    ratio = 1.4 if not hard else 1.05 if "range" in pair else 1.0
    return clouds(m, n, 0.05, tuple(REG_M[p] for p in pair), ratio, seed, penalty=pair)


# ---- kinds of cost: (the cost as it is given, the same problem in arrays, options)


def dense(case):
    return case.M, case, {}


def single(case):
    M = case.M.astype(np.float32)
    return M, case.replace(M=M.astype(float)), {}


def function(case):
    return (lambda i0, i1: case.M[i0:i1]), case, {}


def pairs(case):
    case = with_forbidden(case)
    return csr_of(case.M), case, {}


def points(case, **options):
    rng = np.random.default_rng(3)
    x, y = rng.random((len(case.a), 3)), rng.random((len(case.b), 3)) + 0.1
    M = ((x[:, None] - y) ** 2).sum(2)
    return mapuot.PointCloud(x, y, **{"form": None} | options), case.replace(M=M), {}


def formed(case):
    return points(case, form="auto")


def boxes(case):
    """Points of three groups far apart, most of whose pairs may be skipped."""
    rng = np.random.default_rng(4)
    x, y = (rng.random((len(t), 2)) * 0.2 + np.arange(len(t))[:, None] * 3 // len(t) for t in (case.a, case.b))
    return mapuot.PointCloud(x, y, truncate=8.0), case.replace(M=((x[:, None] - y) ** 2).sum(2)), {}


def grid(case):
    x = np.stack(np.meshgrid(np.arange(4.0), np.arange(5.0), indexing="ij"), -1).reshape(-1, 2)
    M = ((x[:, None] - x) ** 2).sum(2) / 25
    rng = np.random.default_rng(5)
    a, b = rng.random(20) + 0.2, rng.random(20) + 0.2
    a, b = a * case.a.sum() / a.sum(), b * case.b.sum() / b.sum()
    return mapuot.Grid((4, 5), scale=1 / 25), case.replace(M=M, a=a, b=b), {}


def masked(case):
    m, n = case.M.shape
    kept = MASK.kept(np.arange(m)[:, None], np.arange(n)) / MASK.keep
    return case.M, case.replace(reference=case.c * kept), {"mask": MASK}


def uniform(case):
    return case.M, case.replace(reference="uniform"), {"reference": "uniform"}


def given(case):
    """A matrix for a reference, 0 for some pairs."""
    c = np.where(np.isinf(with_forbidden(case, 0.2, 1).M), 0.0, 0.5 + case.M)
    return case.M, case.replace(reference=c), {"reference": c}


def stored(case):
    """Stored pairs with a reference that stores others."""
    M, case, _ = pairs(case)
    _, case, options = given(case.replace(M=np.where(np.isinf(case.M), 1.0, case.M)))
    return M, case.replace(M=with_forbidden(case).M), {"reference": sparse.csr_array(options["reference"])}


KINDS = {
    f.__name__: f for f in (dense, single, function, pairs, points, formed, boxes, grid, masked, uniform, given, stored)
}  # fmt: skip


# ---- doors: the claim about one problem


def solve(M, case, **options):
    return mapuot.solve(M, case.a, case.b, reg=case.reg, reg_m=case.reg_m, penalty=case.penalty, **options)


def sinkhorn(M, case, **options):
    return solve(M, case, method="sinkhorn", **options)


def invariant(M, case, **options):
    return solve(M, case, method="translation_invariant", **options)


def warm(M, case, **options):
    return solve(M, case, warm_start=solve(M, case.replace(reg=2 * case.reg), **options), **options)


def path(M, case, **options):
    steps = {"regs": [4 * case.reg, case.reg], "reg_ms": [case.reg_m] * 2, "penalty": case.penalty}
    return list(mapuot.path(M, case.a, case.b, **steps, **options))[-1]


def batch(M, case, **options):
    A, B = np.stack([case.a, case.a[::-1]]), np.stack([case.b, case.b])
    return mapuot.solve_batch(M, A, B, reg=case.reg, reg_m=case.reg_m, penalty=case.penalty, **options)[0]


def marginals(M, case, precision="auto", **options):
    """Two marginals of many: the same problem."""
    return mapuot.multimarginal({(0, 1): M}, [case.a, case.b], reg=case.reg, reg_m=case.reg_m, **options)


DOORS = {f.__name__: f for f in (solve, sinkhorn, invariant, warm, path, batch, marginals)}
REFUSED = {
    ("batch", "function"), ("batch", "grid"), ("batch", "boxes"), ("marginals", "function"), ("marginals", "boxes"),
    ("marginals", "masked"),
}  # fmt: skip
REFERENCES = "uniform", "given", "stored"
KL = {("kl", "kl"), ("kl", "balanced"), ("balanced", "kl"), ("balanced", "balanced")}


def stated(kind, door, pair):
    """Whether a cell is one that the library takes, and that no other states."""
    if (door, kind) in REFUSED or (kind in REFERENCES and door not in ("solve", "invariant", "batch")):
        return False
    if kind == "grid" or door in ("sinkhorn", "invariant", "marginals"):
        return pair in KL
    return door == "solve" or "kl" in pair or pair[0] == pair[1]


CELLS = [cell for cell in itertools.product(KINDS, DOORS, PAIRS) if stated(*cell)]


def claim_of(result, door):
    if door != "marginals":
        return judge.claim_of(result, strict=False)
    plan = result.pair(0, 1)
    plan = plan.toarray() if hasattr(plan, "toarray") else np.asarray(plan)
    return judge.Claim(
        bool(result.converged), str(result.status), plan, *result.log_u, gap=result.gap, error_bound=result.error_bound,
        dual=result.dual, objective=result.objective, mass=result.mass, strict=False,
    )  # fmt: skip


@functools.cache
def posed(kind, pair):
    """(the cost as given, the problem in arrays, options)."""
    return KINDS[kind](problem(20, 17, pair))


@functools.cache
def best_of(kind, pair):
    return optimum(posed(kind, pair)[1])


def check(kind, door, pair, precision, backend):
    """Solve the problem of a cell and judge every number that the library claims of it."""
    M, case, options = posed(kind, pair)
    tol = TOLS[precision]
    found = DOORS[door](M, case, precision=precision, backend=backend, tol=tol, max_passes=50_000, **options)
    claim = claim_of(found, door)
    failures, _ = judge.judge(case, claim, {"precision": precision, "tol": tol}, best_of(kind, pair))
    assert not failures, failures
    assert claim.converged, claim.status
