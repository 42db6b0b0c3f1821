"""Answers of a batch on a GPU equal the single answers, and stay there."""

import threading
import warnings

import cupy as cp
import numpy as np
import pytest
from batches import P, assert_each, batch_of, values
from numpy.testing import assert_allclose, assert_array_equal

import mapuot
import mapuot.groups
from mapuot.api.pairwise import PairTask
from mapuot.arrays import host
from mapuot.problem.settings import STATISTICS

pytestmark = pytest.mark.gpu


@pytest.fixture(
    scope="module",
    params=["one cost", "own costs", "float32", "forbidden", "own regs", "total variation", "clouds", "ragged"],
)
def batch(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mapuot.ScalingWarning)
        return batch_of(request.param, cp.asarray)


def lies_there(found, batch):
    return all(isinstance(x, cp.ndarray) for x in (found if batch.problem.ragged else [found]))


def test_products(batch):
    X = values(batch, 1, (3,))
    Y = values(batch, 0, (3,))
    moved = batch.apply(X)
    assert lies_there(moved, batch)
    assert_each(moved, batch, lambda i, one: one.apply(X[i]))
    assert_each(batch.apply_transpose(Y), batch, lambda i, one: one.apply_transpose(Y[i]))
    assert_each(batch.barycentric_map(X), batch, lambda i, one: one.barycentric_map(X[i]))
    images = batch.barycentric_map([cp.asarray(x) for x in Y], "cols")
    assert lies_there(images, batch)
    assert_each(images, batch, lambda i, one: one.barycentric_map(Y[i], "cols"))


def test_entries_labels_and_bounds(batch):
    index, value = batch.top_k(2)
    assert lies_there(index, batch)
    assert_each(index, batch, lambda i, one: one.top_k(2)[0])
    assert_each(value, batch, lambda i, one: one.top_k(2)[1], rtol=3e-7)
    labels = [np.arange(one.problem.shape[0]) % 2 for one in batch]
    assert_each(batch.push(labels)[1], batch, lambda i, one: one.push(labels[i])[1])
    low, high = batch.unregularised_bounds()
    assert_allclose(low, [one.unregularised_bounds()[0] for one in batch], rtol=1e-9)
    assert_allclose(high, [one.unregularised_bounds()[1] for one in batch], rtol=1e-9)
    assert_allclose(batch.cost, [one.cost for one in batch], rtol=1e-9)


def test_draws(batch):
    rows, columns = batch.sample(500, seed=1)
    assert isinstance(columns, cp.ndarray)
    assert_array_equal(host(columns), host(batch.sample(500, seed=1)[1]))
    for i, one in enumerate(batch):
        plan = host(one.apply(np.eye(one.problem.shape[1])))
        found = np.zeros(plan.shape)
        np.add.at(found, (host(rows)[i], host(columns)[i]), 1 / 500)
        assert np.abs(found - plan / plan.sum()).max() < 5 * np.sqrt(0.25 / 500)


@pytest.mark.parametrize("kind", ["clouds", "cosine", "ragged"])
@pytest.mark.parametrize("side", ["rows", "cols"])
def test_maps_of_new_points(kind, side):
    batch = batch_of(kind, cp.asarray)
    new = np.random.default_rng(9).normal(size=(P, 4, 2))
    found = batch.map(cp.asarray(new), side=side)
    assert found.shape == (P, 4, 2)
    assert_each(found, batch, lambda i, one: one.map(new[i], side=side))


def test_arrays_of_the_host_come_back_to_it():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(k, 2)) for k in (3, 8)]
    y = [rng.normal(size=(k, 2)) for k in (5, 4)]
    batch = mapuot.solve_batch(mapuot.PointCloud(x, y), reg=0.1, reg_m=1.0, backend="cuda")
    found = batch.barycentric_map(y)
    assert all(isinstance(z, np.ndarray) for z in found)
    assert_each(found, batch, lambda i, one: one.barycentric_map(y[i]))


@pytest.mark.parametrize("name", ["median", "mean", "std", "max"])
def test_units_of_each_pair_are_found_on_the_device(name, using):
    """Many small clouds are formed together there, and have the units that the host finds one by one."""
    using(STATISTICS, costs_at_once=100)
    rng = np.random.default_rng(0)
    clouds = [rng.normal(size=(k, 2)) * k for k in (4, 9, 6)]
    there = [cp.asarray(x) for x in clouds]
    how = {"reg": 0.1, "reg_m": 1.0, "scale_cost": name, "scale_each": True}
    found = mapuot.solve_batch(mapuot.PointCloud(there, there[::-1]), **how)
    assert_allclose(found.scale_cost, mapuot.solve_batch(mapuot.PointCloud(clouds, clouds[::-1]), **how).scale_cost)
    assert_allclose(mapuot.pairwise(there, **how), mapuot.pairwise(clouds, **how), rtol=1e-5)
    using(STATISTICS, all_costs=5)
    far = mapuot.solve_batch(mapuot.PointCloud(there, there[::-1]), **how)
    assert np.isfinite(far.scale_cost).all()


def test_a_reference_of_low_rank():
    rng = np.random.default_rng(0)
    x, y, U, V = (rng.random((k, 2)) for k in (7, 9, 7, 9))
    want = mapuot.solve(mapuot.PointCloud(x, y), reg=0.1, reg_m=1.0, reference=U @ V.T, tol=1e-8)
    cloud = mapuot.PointCloud(cp.asarray(x), cp.asarray(y))
    found = mapuot.solve(cloud, reg=0.1, reg_m=1.0, reference=mapuot.LowRankReference(U, V), tol=1e-8)
    assert found.converged
    assert_allclose(host(found.plan), want.plan, atol=1e-7)


@pytest.fixture
def two_devices(monkeypatch):
    """Return a set of the devices that solve pairs; both must have begun before either goes on."""
    monkeypatch.setenv("EMULATED_GPUS", "2")
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    used = set()
    both = threading.Barrier(2)
    solve = PairTask.solve

    def watched(task, *args):
        here = cp.cuda.Device().id
        if here not in used:
            used.add(here)
            both.wait(120)
        return solve(task, *args)

    monkeypatch.setattr(PairTask, "solve", watched)
    return used


@pytest.mark.parametrize("kind", ["on a GPU", "on the host", "common costs", "groups"])
def test_devices_share_the_pairs(kind, two_devices):
    """Each device solves batches of pairs in a thread of its own; the answers equal the answers of one device."""
    rng = np.random.default_rng(3)
    clouds = [rng.normal(size=(n, 2)) + n / 20 for n in (9, 14, 11, 7)]
    given = {"reg": 0.3, "reg_m": 2.0, "standard_error": True}
    call = mapuot.pairwise
    if kind == "common costs":
        M = np.abs(np.subtract.outer(np.arange(12.0), np.arange(12.0)))
        args = M, rng.dirichlet(np.ones(12), 5)
    elif kind == "groups":
        pytest.importorskip("pandas")
        call = mapuot.groups.pairwise
        args = np.concatenate(clouds), np.repeat([*"abcd"], [*map(len, clouds)])
        given |= {"scale_cost": "std", "scale_each": True}
    else:
        args = ([*map(cp.asarray, clouds)] if kind == "on a GPU" else clouds,)
    found = call(*args, devices=[1, 0], **given)
    assert two_devices == {0, 1}
    right = call(*(args if kind != "on a GPU" else (clouds,)), backend="cpu", **given)
    for mine, other in zip(found, right, strict=True):
        assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-4, atol=1e-9)


def test_devices_are_numbers_of_gpus():
    clouds = [np.zeros((2, 1)), np.ones((3, 1))]
    for devices, error in (
        ([], TypeError),
        ("01", TypeError),
        ([0, 0], ValueError),
        ([99], ValueError),
        ([-1], ValueError),
    ):
        with pytest.raises(error, match="devices must be"):
            mapuot.pairwise(clouds, reg=1.0, reg_m=1.0, devices=devices)
    with pytest.raises(ValueError, match="backend must be 'auto' or 'cuda'"):
        mapuot.pairwise(clouds, reg=1.0, reg_m=1.0, devices=[0], backend="cpu")
