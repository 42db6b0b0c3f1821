"""Conditional plans of points far from all others are right although their mass is below float64's range."""

import numpy as np
import pytest
from conftest import CUDA
from scipy import sparse

import mapuot

REG = 0.05
CPU_AND_GPU = ["cpu", *CUDA]


def far_clouds(far=80.0, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 2))
    y = rng.normal(size=(50, 2))
    x[5], y[7] = [far, 0.0], [0.0, -far]
    return x, y, ((x[:, None] - y) ** 2).sum(-1)


def cost_of(kind, x, y, C):
    if kind == "sparse":
        return sparse.csr_array(np.where(np.random.default_rng(1).random(C.shape) < 0.5, C, 0.0))
    return {
        "dense": C, "float32": C.astype(np.float32), "turned": np.asfortranarray(C), "forbidden": forbidden(C),
        "points": mapuot.PointCloud(x, y, form=None), "boxes": mapuot.PointCloud(x, y, truncate=30.0),
    }[kind]  # fmt: skip


def forbidden(C):
    return np.where(np.random.default_rng(2).random(C.shape) < 0.3, np.inf, C)


def logs_of(kind, r, C):
    """Return the logarithms of the plan from its potentials."""
    if kind in ("dense", "float32", "turned", "forbidden"):
        M = np.asarray(r.problem.M)
    else:
        M = C
    if kind == "sparse":
        M = np.where(cost_of(kind, None, None, C).toarray() > 0, C, np.inf)
    p = r.problem
    return (r.log_u + p.log_reference[0])[:, None] + r.log_v + p.log_reference[1] - M.astype(float) / REG


def softmax(log, axis):
    weights = np.exp(log - log.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


@pytest.mark.parametrize("backend", [*CPU_AND_GPU, "reference"])
@pytest.mark.parametrize("kind", ["dense", "float32", "turned", "forbidden", "sparse", "points", "boxes"])
def test_points_whose_mass_underflows_have_their_partners(kind, backend):
    x, y, C = far_clouds()
    if backend == "reference" and kind == "boxes":
        pytest.skip("skips no pairs")
    r = mapuot.solve(cost_of(kind, x, y, C), reg=REG, reg_m=(1.0, 2.0), backend=backend)
    log = logs_of(kind, r, C)
    assert r.row_marginal[5] == 0
    assert r.col_marginal[7] == 0
    near = {"rtol": 2e-5 if kind == "float32" else 1e-8, "atol": 1e-8}
    np.testing.assert_allclose(r.barycentric_map(y), softmax(log, 1) @ y, **near)
    np.testing.assert_allclose(r.barycentric_map(x, "cols"), softmax(log, 0).T @ x, **near)
    if kind in ("points", "boxes") and backend != "reference":
        np.testing.assert_allclose(r.map(x), r.barycentric_map(y), **near)
    index, value = r.top_k(3)
    wanted = np.argsort(-log, 1)[:, :3]
    np.testing.assert_array_equal(index[5], wanted[5])
    np.testing.assert_array_equal(index[:, 0], wanted[:, 0])
    np.testing.assert_allclose(value[:, 0], np.exp(log.max(1)), rtol=1e-5, atol=1e-30)
    own = np.arange(40) % 3
    np.testing.assert_allclose(r.push(own)[1], softmax(log, 0).T @ np.eye(3)[own], **near)
    own = np.arange(50) % 3
    np.testing.assert_allclose(r.pull(own)[1], softmax(log, 1) @ np.eye(3)[own], **near)
    i, j = r.sample(40, 0, method="rows")
    np.testing.assert_array_equal(i, np.arange(40))
    assert softmax(log, 1)[5, j[5]] > 1e-6


def test_a_far_row_of_a_float32_matrix_has_its_partner():
    """A row with mass 7e-47, below float32's range only, has its partner."""
    C = far_clouds(20.0)[2]
    C = (C / np.median(C)).astype(np.float32)
    r = mapuot.solve(C, reg=REG, reg_m=(1.0, 50.0))
    assert 0 < r.row_marginal[5] < 1e-38
    assert r.top_k(1)[0][5, 0] == np.argmax(r.log_v - C[5].astype(float) / REG)


@pytest.mark.parametrize("backend", CPU_AND_GPU)
def test_nodes_of_a_grid_whose_mass_underflows(backend):
    grid = mapuot.Grid(9, target=(12,), offset=(40.0,), spacing=1.0)
    r = mapuot.solve(grid, reg=REG, reg_m=0.5, backend=backend)
    y = np.arange(12.0) + 40.0
    log = (r.log_u + np.log(1 / 9))[:, None] + r.log_v + np.log(1 / 12) - (np.arange(9.0)[:, None] - y) ** 2 / REG
    assert (r.row_marginal == 0).any()
    np.testing.assert_allclose(r.barycentric_map(y), softmax(log, 1) @ y, rtol=1e-9)
    np.testing.assert_array_equal(r.top_k(2)[0], np.argsort(-log, 1)[:, :2])
    own = np.arange(9) % 2
    np.testing.assert_allclose(r.push(own)[1], softmax(log, 0).T @ np.eye(2)[own], atol=1e-9)


@pytest.mark.parametrize("backend", CPU_AND_GPU)
@pytest.mark.parametrize(("penalty", "reg_m"), [("tv", 0.5), ("l2", 0.5), ("range", 1.0)])
@pytest.mark.parametrize("kind", ["dense", "float32", "sparse", "points", "boxes"])
def test_rows_that_keep_all_their_mass_have_no_partner(kind, penalty, reg_m, backend):
    x, y, C = far_clouds()
    if kind == "boxes" and penalty != "tv":
        pytest.skip("no pairs are skipped at ranges, and squares take 10,000 passes")
    r = mapuot.solve(cost_of(kind, x, y, C), reg=REG, reg_m=reg_m, penalty=penalty, backend=backend)
    index, value = r.top_k(2)
    assert r.row_marginal[5] == 0
    np.testing.assert_array_equal(index[5], [-1, -1])
    np.testing.assert_array_equal(value[5], [0, 0])
    assert (index[np.arange(40) != 5, 0] >= 0).all()
    image = r.barycentric_map(y)
    shares = r.pull(np.arange(50) % 2)[1]
    assert np.isnan(image[5]).all()
    assert (shares[5] == 0).all()
    assert np.isfinite(np.delete(image, 5, 0)).all()
    assert 5 not in r.sample(40, 0, method="rows")[0]


@pytest.mark.parametrize("k", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("shape", [(5, 30), (3, 997), (2, 4096)])
def test_largest_entries_of_every_width(shape, k):
    rng = np.random.default_rng(k)
    M = np.round(rng.random(shape), 2)
    M[:, ::3] = np.inf
    r = mapuot.solve(M, reg=REG, reg_m=1.0)
    index, value = r.top_k(k)
    P = r.plan
    np.testing.assert_allclose(value, -np.sort(-P, 1)[:, :k], rtol=1e-12)
    there = index >= 0
    np.testing.assert_array_equal(there, value > 0)
    np.testing.assert_allclose(np.take_along_axis(P, np.maximum(index, 0), 1)[there], value[there], rtol=1e-12)
    assert all(len({*row[row >= 0]}) == (row >= 0).sum() for row in index)


def test_points_of_no_mass_send_nothing():
    _, y, C = far_clouds()
    a = np.full(40, 1 / 40)
    a[3] = 0
    r = mapuot.solve(C, a, reg=REG, reg_m=1.0)
    assert np.isnan(r.barycentric_map(y)[3]).all()
    np.testing.assert_array_equal(r.top_k(2)[0][3], [-1, -1])
    assert (r.pull(np.arange(50) % 2)[1][3] == 0).all()
