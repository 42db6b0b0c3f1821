"""Answers of a batch as one: each product, map, draw and bound equals the single answers."""

import warnings
from unittest import mock

import numpy as np
import pytest
from batches import KINDS, P, assert_each, batch_of, values
from numpy.testing import assert_allclose, assert_array_equal

import mapuot
from mapuot import PointCloud
from mapuot.answer.settings import BATCH_PLANS


@pytest.fixture(scope="module", params=KINDS)
def batch(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mapuot.ScalingWarning)
        return batch_of(request.param)


@pytest.mark.parametrize("width", [(), (3,)], ids=["vector", "columns"])
def test_products(batch, width):
    X = values(batch, 1, width)
    Y = values(batch, 0, width)
    assert_each(batch.apply(X), batch, lambda i, one: one.apply(X[i]))
    assert_each(batch.apply_transpose(Y), batch, lambda i, one: one.apply_transpose(Y[i]))
    if not batch.problem.ragged:
        assert_each(batch.apply(X[0]), batch, lambda i, one: one.apply(X[0]))
    assert_each(batch.barycentric_map(X), batch, lambda i, one: one.barycentric_map(X[i]))
    assert_each(batch.barycentric_map(Y, "cols"), batch, lambda i, one: one.barycentric_map(Y[i], "cols"))


@pytest.mark.parametrize("name", ["objective", "dual", "cost", "mass", "gap", "error_bound"])
def test_values(batch, name):
    assert_each(getattr(batch, name), batch, lambda i, one: np.float64(getattr(one, name)), rtol=1e-9)


@pytest.mark.parametrize("options", [{"max_passes": 1}, {"max_passes": 3}, {"tol": 0.3}], ids=str)
@pytest.mark.parametrize("precision", ["mixed", "float64"])
@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
def test_values_of_rough_passes(precision, options):
    """A batch once told the dual value of its last pass, up to 32 % below `batch[i].dual`."""
    rng = np.random.default_rng(4)
    A, B = rng.random((2, 3, 9))
    for M in (rng.random((9, 9)), rng.random((3, 9, 9)), PointCloud(*rng.random((2, 3, 9, 2)))):
        for reg_m in (30.0, (np.inf, 100.0)):
            batch = mapuot.solve_batch(M, A, 2 * B, reg=0.02, reg_m=reg_m, precision=precision, **options)
            for name in ("objective", "dual", "cost", "mass"):
                single = [getattr(one, name) for one in batch]
                assert_allclose(getattr(batch, name), single, rtol=1e-11, err_msg=name)


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
def test_plans_are_summed_when_somebody_asks():
    """The plan of every problem that its last pass proved nothing of was once summed before the call returned."""
    A, B = np.full((2, 4, 5), 0.2)
    with mock.patch.object(mapuot.Result, "_new_stream", autospec=True, side_effect=mapuot.Result._new_stream) as made:
        with pytest.warns(mapuot.ConvergenceWarning, match="4 of 4 problems"):
            batch = mapuot.solve_batch(np.full((5, 5), 1e4), A, B, reg=0.02, reg_m=0.04)
        assert (batch.status == "underflow").all()
        assert made.call_count <= 1  # of the problem that the warning tells of
        assert_allclose(batch.row_marginal, 0.0)
        assert made.call_count >= 4
    assert_allclose(batch.objective, [one.objective for one in batch])
    assert_allclose(batch.dual, [one.dual for one in batch])
    assert np.isfinite(batch.f).all()


@pytest.mark.parametrize("k", [1, 2])
def test_largest_entries(batch, k):
    if batch.problem.cost.dtype == np.float32:
        rounding = 3e-7
    else:
        rounding = 1e-9
    index, value = batch.top_k(k)
    assert_each(value, batch, lambda i, one: one.top_k(k)[1], rtol=rounding)
    assert_each(index, batch, lambda i, one: one.top_k(k)[0])


def test_labels_move_with_the_mass(batch):
    rng = np.random.default_rng(0)
    for move, axis in (("push", 0), ("pull", 1)):
        labels = [rng.choice(["a", "b", "c"], one.problem.shape[axis]) for one in batch]
        labels[0][:] = "b"
        classes, shares = getattr(batch, move)(labels)
        assert classes.tolist() == ["a", "b", "c"]

        def want(i, one, move=move, labels=labels, classes=classes):
            own, found = getattr(one, move)(labels[i])
            out = np.zeros((len(found), 3))
            out[:, np.searchsorted(classes, own)] = found
            return out

        assert_each(shares, batch, want)


@pytest.mark.parametrize("method", ["independent", "systematic", "rows"])
def test_draws_have_the_shares_of_the_plan(batch, method):
    size = 4000
    rows, columns = batch.sample(size, seed=1, method=method)
    assert rows.shape == columns.shape == (P, size)
    again = batch.sample(size, seed=1, method=method)
    assert_array_equal(again[1], columns)
    for i, one in enumerate(batch):
        plan = one.apply(np.eye(one.problem.shape[1]))
        found = np.zeros(plan.shape)
        np.add.at(found, (rows[i], columns[i]), 1 / size)
        wanted = plan / plan.sum(1, keepdims=True).clip(1e-300) * found.sum(1, keepdims=True)
        assert np.abs(found - wanted).max() < 5 * np.sqrt(0.25 / size)
        assert not found[plan == 0].any()
        if method == "independent":
            assert np.abs(found.sum(1) - plan.sum(1) / plan.sum()).max() < 5 * np.sqrt(0.25 / size)


def test_bounds_without_entropy(batch):
    low, high = batch.unregularised_bounds()
    for i, one in enumerate(batch):
        least, most = one.unregularised_bounds()
        size = max(abs(least), 1.0)
        assert low[i] == least or abs(low[i] - least) <= 1e-9 * size
        assert high[i] == most or abs(high[i] - most) <= 1e-9 * size
    assert (low <= high).all()


def test_costs_and_marginals(batch):
    assert_allclose(batch.cost, [one.cost for one in batch], rtol=1e-9, atol=1e-13)
    r, s = batch.marginals
    assert r.shape == batch.log_u.shape
    assert s.shape == batch.log_v.shape


@pytest.mark.parametrize("kind", ["clouds", "cosine", "ragged"])
@pytest.mark.parametrize("side", ["rows", "cols"])
def test_maps_of_new_points(kind, side):
    batch = batch_of(kind)
    rng = np.random.default_rng(9)
    axis = int(side == "rows")
    new = rng.normal(size=(4, 2))
    assert_each(batch.map(new, side=side), batch, lambda i, one: one.map(new, side=side))
    clouds = [rng.normal(size=(k + 1, 2)) for k in range(P)]
    own = [rng.normal(size=one.problem.shape[axis]) for one in batch]
    assert_each(batch.map(clouds, own, side), batch, lambda i, one: one.map(clouds[i], own[i], side))
    with pytest.raises(ValueError, match="points must hold a cloud for each of 5 problems, got 2"):
        batch.map(clouds[:2])
    with pytest.raises(ValueError, match="columns"):
        batch.map(rng.normal(size=(4, 3)))


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
def test_rows_beyond_float64_have_their_conditional_plan():
    rng = np.random.default_rng(0)
    M = rng.random((2, 6, 7))
    M[1, 2] += 5000.0
    batch = mapuot.solve_batch(M, reg=0.5, reg_m=0.1)
    Y = rng.normal(size=(7, 2))
    assert batch.row_marginal[1, 2] == 0
    found = batch.barycentric_map(Y)
    assert np.isfinite(found).all()
    assert_allclose(found[1], batch[1].barycentric_map(Y), rtol=1e-9)


def test_large_problems_are_computed_alone(using):
    batch = batch_of("ragged")
    X = values(batch, 1, (2,))
    _, columns = batch.sample(50, seed=0)
    low, _ = batch.unregularised_bounds()
    using(BATCH_PLANS, largest_entries=50)
    assert_each(batch.apply(X), batch, lambda i, one: one.apply(X[i]))
    assert_each(batch.top_k(2)[0], batch, lambda i, one: one.top_k(2)[0])
    assert_array_equal(batch.sample(50, seed=0)[1], columns)
    assert_allclose(batch.unregularised_bounds()[0], low, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "args", "error", "match"), [
    ("apply", (np.ones(5),), ValueError, r"X must have shape \(11,\), \(11, d\) or \(5, 11, d\), got \(5,\)"),
    ("apply", (np.ones((11, 0)),), ValueError, "X must have a column"),
    ("apply", ([np.ones(11)] * 4,), ValueError, "X must hold one array for each of 5 problems"),
    ("apply", (np.full(11, 1j),), TypeError, "X must hold real numbers"),
    ("barycentric_map", (np.ones(9), "row"), ValueError, "side must be"),
    ("top_k", (0,), ValueError, r"k must be in 1\.\.11"),
    ("top_k", (12,), ValueError, r"k must be in 1\.\.11"),
    ("sample", (0,), ValueError, "size must be"),
    ("push", (["a"] * 4,), ValueError, "labels must have shape"),
    ("push", ([["a"] * 9] * 3,), ValueError, "labels must hold an array for each of 5 problems, got 3"),
    ("map", (np.ones((2, 2)),), TypeError, "map needs M to be a PointCloud of many clouds"),
])  # fmt: skip
def test_wrong_arguments_are_named(name, args, error, match):
    with pytest.raises(error, match=match):
        getattr(batch_of("own costs"), name)(*args)


def test_ragged_values_are_lists():
    batch = batch_of("ragged")
    with pytest.raises(ValueError, match="X must have shape those of a list of 5 arrays"):
        batch.apply(np.ones(3))
    with pytest.raises(ValueError, match="labels must be a list"):
        batch.push(["a"] * 3)


def test_tensors_in_tensors_out():
    torch = pytest.importorskip("torch")
    x = torch.rand(3, 8, 2)
    y = torch.rand(3, 9, 2)
    batch = mapuot.solve_batch(PointCloud(x, y), torch.full((3, 8), 1 / 8), reg=0.1, reg_m=1.0)
    found = batch.barycentric_map(y)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (3, 8, 2)
    _, columns = batch.sample(5, seed=torch.Generator().manual_seed(1))
    assert isinstance(columns, torch.Tensor)
