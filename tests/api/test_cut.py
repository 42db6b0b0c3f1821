"""Masses that forbidden pairs leave without a plan: told by the points that show it, never where there is one."""

import itertools
import re

import numpy as np
import pytest
from scipy import sparse

import mapuot
from mapuot.backends import pick
from mapuot.problem.cut import check_cut
from mapuot.problem.problem import Problem

M = np.arange(20.0).reshape(4, 5) % 7 / 7
A, B = np.full(4, 0.25), np.array([0.1, 0.1, 0.2, 0.3, 0.3])
CUT = np.ones((4, 5), bool)
CUT[:2, 3:] = False  # b[3] and b[4] need .6, of a[2] and a[3], which have .5
TOLD = "connect b[3], b[4] with a[2], a[3] only, where 0.6 must be transported and 0.5 may be"
FORBIDDEN = np.where(CUT, M, np.inf)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("method", ["auto", "sinkhorn"])
def test_the_points_are_named(method, backend):
    call = {"reg": 0.1, "reg_m": np.inf, "method": method, "backend": backend, "max_passes": 500}
    with pytest.raises(mapuot.InfeasibleError, match=re.escape("M " + TOLD.replace("connect", "connects"))):
        mapuot.solve(FORBIDDEN, A, B, **call)
    with pytest.raises(mapuot.InfeasibleError, match=re.escape(TOLD)):
        mapuot.solve(M, A, B, reference=CUT, **call)
    rows = "M connects a[3], a[4] with b[2], b[3] only, where"
    with pytest.raises(mapuot.InfeasibleError, match=re.escape(rows)):
        mapuot.solve(FORBIDDEN.T, B, 0.73 * A, **call | {"reg_m": (np.inf, 0.5), "penalty": ("balanced", "range")})


def test_every_kind_of_cost():
    call = {"reg": 0.1, "reg_m": np.inf, "max_passes": 1000}
    x, y = np.random.default_rng(0).random((4, 2)), np.random.default_rng(1).random((5, 2))
    for cost in (mapuot.PointCloud(x, y, form=None), mapuot.PointCloud(x, y), lambda i0, i1: M[i0:i1]):
        with pytest.raises(mapuot.InfeasibleError, match=re.escape(TOLD)):
            mapuot.solve(cost, A, B, reference=CUT, **call)
    stored = sparse.csr_array(np.where(CUT, M + 1, 0))
    with pytest.raises(mapuot.InfeasibleError, match=re.escape("M " + TOLD.replace("connect", "connects"))):
        mapuot.solve(stored, A, B, **call)
    even = np.full(5, 0.2)
    with pytest.raises(mapuot.InfeasibleError, match=re.escape("problem 1: M connects b[3], b[4] with")):
        mapuot.solve_batch(FORBIDDEN, A, np.stack([even, B]), **call)
    mask = mapuot.SeededMask(0.3, 2)
    with pytest.raises(mapuot.InfeasibleError, match="M and the reference connect"):
        mapuot.solve(np.zeros((40, 40)), np.append(np.ones(39), 961), np.full(40, 25.0), mask=mask, **call)


def most_wanting(allowed, rows, cols):
    sets = itertools.product((False, True), repeat=len(cols))
    return max(cols[list(s)].sum() - rows[allowed[:, list(s)].any(1)].sum() for s in sets)


def test_told_where_and_only_where_there_is_no_plan():
    """Of 150 random problems, by all sets of columns; from any potentials nothing is told of a problem with a plan."""
    told = 0
    for seed in range(150):
        rng = np.random.default_rng([36, seed])
        m, n = rng.integers(2, 6, 2)
        allowed = rng.random((m, n)) < 0.6
        allowed[np.arange(max(m, n)) % m, np.arange(max(m, n)) % n] = True
        a, b = rng.integers(1, 5, m) * 1.0, rng.integers(1, 5, n) * 1.0
        b *= a.sum() / b.sum()
        M = np.where(allowed, rng.random((m, n)), np.inf)
        if most_wanting(allowed, a, b) > 1e-9:
            told += 1
            with pytest.raises(mapuot.InfeasibleError, match="must be transported"):
                mapuot.solve(M, a, b, reg=0.2, reg_m=np.inf)
            continue
        problem = Problem.from_arrays(M, a, b, 0.2, np.inf, "kl", "product", pick("cpu"))
        for _ in range(20):
            check_cut(problem, *(10 * rng.standard_normal(k) for k in (m, n)))
    assert 25 < told < 125
