"""Balanced masses may differ by float32 rounding: every door scales one side to the other's sum."""

import numpy as np
import pytest
from scipy import sparse

import mapuot
from mapuot import PointCloud, multimarginal, solve, solve_batch


def softmax(rng, size):
    x = np.exp(10 * rng.random(size).astype(np.float32))
    return x / x.sum()


def drawn(seed=76):
    rng = np.random.default_rng(seed)
    a = softmax(rng, 300)
    b = softmax(rng, 2)
    return rng.random((300, 2)), a, b


def in_parts(seed):
    """Return two parts that no pair connects, each of half the mass up to rounding."""
    rng = np.random.default_rng(seed)
    M = np.full((200, 6), np.inf)
    a = np.zeros(200, np.float32)
    b = np.zeros(6, np.float32)
    for k in (0, 1):
        a[k::2], b[k::2], M[k::2, k::2] = softmax(rng, 100) / 2, softmax(rng, 3) / 2, rng.random((100, 3)) + 1e-3
    return M, a, b


CALL = {"reg": 1e-3, "reg_m": np.inf}
DOORS = {
    "solve": lambda M, a, b: [solve(M, a, b, **CALL)],
    "turned": lambda M, a, b: [solve(M.T.copy(), b, a, **CALL)],
    "float32": lambda M, a, b: [solve(M.astype(np.float32), a, b, **CALL)],
    "rows": lambda M, a, b: [solve(lambda i0, i1: M[i0:i1], a, b, **CALL)],
    "callback": lambda M, a, b: [solve(M, a, b, **CALL, callback=lambda stats: None)],
    "sparse": lambda M, a, b: [solve(sparse.csr_array(M), a, b, **CALL)],
    "batch": lambda M, a, b: list(solve_batch(M, np.stack([a, a]), np.stack([b, b]), **CALL)),
    "path": lambda M, a, b: mapuot.path(M, a, b, regs=[1e-2, 1e-3], reg_ms=[np.inf, np.inf]),
    "points": lambda M, a, b: [solve(PointCloud(np.cumsum(M, 0)[:, :1] / 150, np.array([[0.2], [0.7]])), a, b, **CALL)],
}


@pytest.mark.parametrize("door", DOORS)
def test_sums_that_differ_by_rounding_have_a_plan(door):
    M, a, b = drawn()
    assert abs(float(a.astype(float).sum() - b.astype(float).sum())) > 1e-8
    for found in DOORS[door](M, a, b):
        assert found.converged
        assert np.abs(found.log_u[np.isfinite(found.log_u)]).max() < 1e5


@pytest.mark.parametrize("form", ["dense", "sparse", "batch"])
def test_parts_whose_sums_differ_by_rounding_have_a_plan(form):
    for seed in range(12):
        M, a, b = in_parts(seed)
        if form == "batch":
            found = solve_batch(M, a[None], b[None], **CALL)[0]
        else:
            if form == "sparse":
                given = sparse.csr_array(np.where(np.isfinite(M), M, 0.0))
            else:
                given = M
            found = solve(given, a, b, **CALL)
        assert found.converged


def test_the_answer_is_that_of_masses_that_agree():
    M, a, b = drawn(0)
    a = a.astype(float)
    b = b.astype(float)
    found = solve(M, a, b, **CALL)
    even = solve(M, a, b * (a.sum() / b.sum()), **CALL)
    assert np.abs(found.plan - even.plan).sum() < 1e-12
    np.testing.assert_allclose(found.problem.cols.mass, a.sum(), rtol=1e-14)


def test_many_marginals_that_differ_by_rounding():
    M, a, b = drawn()
    assert multimarginal({(0, 1): M, (1, 2): np.eye(2)}, [a, b, b], reg=0.05, reg_m=np.inf).converged


def test_unbalanced_masses_stay_as_they_are():
    M, a, b = drawn()
    assert solve(M, a, b, reg=1e-2, reg_m=(1.0, np.inf)).problem.cols.mass == b.astype(float).sum()
