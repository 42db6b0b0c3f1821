"""Derivatives by masses and by a cost matrix, single answers and batches, against differences of objectives."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.sparse import csr_array

import mapuot

STEP = 1e-4
SIDES = [1.0, (0.5, 2.0), (np.inf, 1.0), (1.0, np.inf), np.inf]


def case(zeros):
    rng = np.random.default_rng(3)
    M = rng.random((5, 6))
    a = rng.random(5) + 0.2
    b = rng.random(6) + 0.2
    if zeros:
        a[1] = b[2] = 0.0
    return M, a / a.sum(), b / b.sum()


def objective(M, a, b, reg_m, **options):
    return mapuot.solve(M, a, b, reg=0.2, reg_m=reg_m, tol=1e-11, precision="float64", **options).objective


@pytest.mark.parametrize("zeros", [False, True], ids=["", "points without mass"])
@pytest.mark.parametrize("reg_m", SIDES, ids=str)
def test_by_the_masses(reg_m, zeros):
    """Between two hard sides mass can move within a side only, so slopes are compared up to a constant."""
    M, a, b = case(zeros)
    result = mapuot.solve(M, a, b, reg=0.2, reg_m=reg_m, tol=1e-11)
    slope = result.gradient()
    assert slope.x is slope.y is None
    for name, weight in (("a", a), ("b", b)):
        found = getattr(slope, name)
        assert found.shape == weight.shape
        for k in np.flatnonzero(weight > 0)[1:]:
            move = np.zeros_like(weight)
            move[k], move[0] = STEP, -STEP
            pairs = [(a + z, b) if name == "a" else (a, b + z) for z in (move, -move)]
            values = [objective(M, *pair, reg_m) for pair in pairs]
            assert (values[0] - values[1]) / (2 * STEP) == pytest.approx(found[k] - found[0], abs=1e-5)


@pytest.mark.parametrize("reg_m", [1.0, (0.5, 2.0)], ids=str)
def test_by_a_mass_of_zero(reg_m):
    """At a point without mass the slope is one-sided: the point can only gain mass."""
    M, a, b = case(True)
    slope = mapuot.solve(M, a, b, reg=0.2, reg_m=reg_m, tol=1e-11).gradient()
    for name, k in (("a", 1), ("b", 2)):
        weight = {"a": a, "b": b}[name]
        values = []
        for step in (0.0, STEP, 2 * STEP):
            moved = weight.copy()
            moved[k] += step
            values.append(objective(M, moved if name == "a" else a, moved if name == "b" else b, reg_m))
        forward = (4 * values[1] - 3 * values[0] - values[2]) / (2 * STEP)
        assert getattr(slope, name)[k] == pytest.approx(forward, abs=1e-5)


@pytest.mark.parametrize("reg_m", SIDES, ids=str)
def test_by_the_costs(reg_m):
    M, a, b = case(True)
    result = mapuot.solve(M, a, b, reg=0.2, reg_m=reg_m, tol=1e-6)
    slope = result.gradient()
    exact = mapuot.solve(M, a, b, reg=0.2, reg_m=reg_m, tol=1e-12).plan
    assert np.abs(slope.M - exact).sum() <= slope.error
    move = np.random.default_rng(0).normal(size=M.shape)
    values = [objective(M + s * STEP * move, a, b, reg_m) for s in (1, -1)]
    assert (values[0] - values[1]) / (2 * STEP) == pytest.approx((slope.M * move).sum(), abs=1e-5)


def test_of_other_costs():
    M, a, b = case(True)
    options = {"reg": 0.2, "reg_m": (1.0, 2.0), "tol": 1e-10}
    dense = mapuot.solve(M, a, b, **options).gradient()
    columns = np.tile(np.arange(6), 5)
    sparse = csr_array((M.ravel(), columns, np.arange(0, 31, 6)), shape=M.shape)
    pairs = mapuot.solve(sparse, a, b, **options).gradient()
    assert_allclose(pairs.M.toarray(), dense.M, rtol=1e-8)
    lifted = mapuot.solve(M + 1e7, a, b, **options | {"reg_m": (1.0, np.inf)}).gradient()
    level = mapuot.solve(M, a, b, **options | {"reg_m": (1.0, np.inf)}).gradient()
    assert_allclose(lifted.b - 1e7, level.b, atol=1e-6)
    for found in (pairs, mapuot.solve(M.astype("f4"), a, b, **options | {"precision": "float64"}).gradient()):
        assert_allclose(found.a, dense.a, atol=1e-6)
        assert_allclose(found.b, dense.b, atol=1e-6)
    grid = mapuot.solve(mapuot.Grid((2, 3)), np.full((2, 3), 1 / 6), reg=0.5, reg_m=1.0).gradient()
    matrix = mapuot.solve(np.asarray(mapuot.Grid((2, 3))), reg=0.5, reg_m=1.0).gradient()
    assert grid.M is None
    assert_allclose(np.ravel(grid.a), matrix.a, atol=1e-6)


@pytest.mark.parametrize("kind", ["one cost", "own costs", "own regs", "own constants", "masked", "sparse"])
def test_of_a_batch(kind):
    rng = np.random.default_rng(1)
    M = rng.random((3, 5, 6))
    A = rng.random((3, 5))
    B = rng.random((3, 6))
    A[1, 2] = B[2, 4] = 0.0
    options = {"reg": 0.2, "reg_m": (1.0, 2.0), "tol": 1e-10}
    costs = [*M]
    if kind == "own regs":
        options |= {"reg": np.array([0.1, 0.2, 0.4])}
    if kind == "own constants":
        M = M + np.array([0.0, 1e6, 3e5])[:, None, None]
        costs = [*M]
        options |= {"reg_m": (1.0, np.inf)}
        A, B = (z / z.sum(1, keepdims=True) for z in (A, B))
    if kind == "masked":
        options |= {"mask": mapuot.SeededMask(0.7, 1)}
    if kind in ("one cost", "masked"):
        M = M[0]
        costs = [M] * 3
    if kind == "sparse":
        costs = [csr_array(M[0])] * 3
        M = costs[0]
    batch = mapuot.solve_batch(M, A, B, **options)
    found = batch.gradient()
    assert found.error.shape == (3,)
    for i in range(3):
        reg = np.broadcast_to(options["reg"], 3)[i]
        one = mapuot.solve(costs[i], A[i], B[i], **options | {"reg": reg}).gradient()
        for mine, own in ((found, one), (batch[i].gradient(), one)):
            index = i if mine is found else ...
            assert_allclose(mine.a[index], own.a, atol=1e-7)
            assert_allclose(mine.b[index], own.b, atol=1e-7)
        if kind == "sparse":
            whole = found.M[i].toarray()
        else:
            whole = found.M[i]
        assert_allclose(whole, own.M.toarray() if kind == "sparse" else own.M, atol=1e-8)
