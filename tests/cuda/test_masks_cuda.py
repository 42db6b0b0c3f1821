"""Random masks on a GPU: the pairs that numpy keeps, in every stream and between points."""

import dataclasses

import numpy as np
import pytest

import mapuot
from mapuot.problem import mask as masks
from mapuot.problem.cost import Dense
from mapuot.problem.problem import Problem

cp = pytest.importorskip("cupy", reason="needs CuPy")
if not cp.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mapuot.backends import cuda  # noqa: E402

pytestmark = pytest.mark.gpu
MASK = mapuot.SeededMask(keep=0.3, seed=2**63 + 5)


def by_numpy(mask, shape, row=0, col=0):
    kept = mask.kept(row + np.arange(shape[0])[:, None], col + np.arange(shape[1]))
    return np.where(kept, 1 / mask.keep, 0.0)


def weights_of(mask, shape, row, col):
    c = masks.Masked("uniform", mask, shape, row, col)
    task = Problem.from_cost(
        Dense(np.broadcast_to(np.zeros(1), shape)), *map(np.ones, shape), 1.0, 1.0, "kl", "uniform", cuda
    )
    return cuda.PlanStream(dataclasses.replace(task, reference=c), *map(np.zeros, shape)).plan(0, shape[0])


@pytest.mark.parametrize("shape", [(1, 1), (33, 70)])
def test_the_entries_are_those_of_numpy(shape):
    for row, col in ((0, 0), (3, 2**32 - 7), (2**40, 5)):
        wanted = by_numpy(MASK, shape, row, col)
        np.testing.assert_array_equal(weights_of(MASK, shape, row, col), wanted)
        np.testing.assert_array_equal(weights_of(MASK.T, shape[::-1], col, row), wanted.T)


@pytest.mark.parametrize("where", ["host", "device", "turned", "float32", "matrix"])
def test_a_solve_is_that_of_a_reference_matrix(where):
    rng = np.random.default_rng(0)
    M, a, b = rng.random((37, 45)), rng.random(37) + 0.1, 2 * rng.random(45) + 0.1
    base = rng.random((37, 45)) + 0.1 if where == "matrix" else "product"
    c = by_numpy(MASK, M.shape) * (base if where == "matrix" else np.outer(a, b))
    given = {
        "host": M, "matrix": M, "device": cp.asarray(M), "turned": cp.asarray(M.T.copy()).T,
        "float32": cp.asarray(M, np.float32),
    }[where]  # fmt: skip
    for reg_m in (1.0, (1.0, np.inf)):
        got = mapuot.solve(given, a, b, reg=0.1, reg_m=reg_m, reference=base, mask=MASK, backend="cuda")
        want = mapuot.solve(M.astype(given.dtype), a, b, reg=0.1, reg_m=reg_m, reference=c, tol=1e-9, backend="cpu")
        assert got.converged
        P = cuda.to_numpy(got.plan)
        np.testing.assert_array_equal(P > 0, want.plan > 0)
        assert np.abs(P - want.plan).sum() <= (3 * got.error_bound + 1e-6) * want.mass
        for name in ("cost", "objective", "dual"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6, abs=1e-9)
        np.testing.assert_allclose(cuda.to_numpy(got.apply_transpose(np.ones(37))), P.sum(0), rtol=1e-5)


@pytest.mark.parametrize("metric", ["sqeuclidean", "wfr"])
def test_points(metric):
    rng = np.random.default_rng(1)
    x, y, a, b = rng.random((30, 3)), rng.random((41, 3)), rng.random(30) + 0.1, rng.random(41) + 0.1
    got, want = (
        mapuot.solve(mapuot.PointCloud(x, y, metric), a, b, reg=0.1, reg_m=1.0, mask=MASK, backend=name)
        for name in ("cuda", "cpu")
    )
    assert got.converged
    np.testing.assert_array_equal(got.plan > 0, want.plan > 0)
    assert np.abs(got.plan - want.plan).sum() <= (got.error_bound + want.error_bound) * want.mass
    assert got.dual == pytest.approx(want.dual, rel=1e-9)
