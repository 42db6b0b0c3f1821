"""Metric "inner": minus the product of two points, with addends of rows and columns, and its certificates."""

import math

import numpy as np
import pytest
from conftest import CUDA
from problems import Case, verify

import mapuot


def drawn(seed):
    """A cloud of any size, dimension and distance from the origin, and the same problem in arrays."""
    rng = np.random.default_rng([43, seed])
    (m, n), d = rng.integers(1, 50, 2), rng.integers(1, 20)
    away = 10.0 ** rng.integers(-1, 3) * rng.integers(0, 2)
    x, y = (rng.normal(size=(k, d)) + away * rng.normal(size=d) for k in (m, n))
    r, c = rng.normal(size=m), rng.normal(size=n)
    if seed % 3 == 0:
        r, c = (x**2).sum(1) / 2, (y**2).sum(1) / 2  # squared distances, whose terms cancel
    scale, weights = 10.0 ** rng.uniform(-1, 1), rng.random(d) + 0.1 if seed % 4 == 1 else np.ones(d)
    r = r - float((r[:, None] + c - (x * weights) @ y.T).min())
    M = scale * (r[:, None] + c - (x * weights) @ y.T)
    span = float(np.ptp(M)) or 1.0
    a, b = rng.random(m) + 0.1, rng.random(n) + 0.1
    reg_m = tuple(span * 10.0 ** rng.uniform(-2, 1) if rng.random() < 0.8 else math.inf for _ in range(2))
    b *= a.sum() / b.sum() if min(reg_m) == math.inf else 1.0
    form, given = (None, "auto")[seed % 2], weights if seed % 4 == 1 else None
    cloud = mapuot.PointCloud(x, y, "inner", scale, given, form=form, addends=(r, c))
    return cloud, Case(M, a, b, span * 10.0 ** rng.uniform(-2.2, 0), reg_m)


@pytest.mark.parametrize("backend", ["cpu", *CUDA])
@pytest.mark.parametrize("part", range(4))
def test_certificates_of_random_problems_are_true(backend, part):
    for seed in range(10 * part, 10 * part + (10 if backend == "cpu" else 3)):
        cloud, case = drawn(seed)
        np.testing.assert_allclose(np.asarray(cloud), case.M, atol=1e-11 * cloud.scale * np.abs(cloud.x).max() ** 2)
        precision, tol = ("auto", "float64")[seed % 2], 10.0 ** -(2 + seed % 7)
        result = case.replace(M=cloud).solve(backend=backend, precision=precision, tol=tol)
        assert result.converged, result
        worth = 4e-13 * float(sum(np.abs(z).max() for z in (*cloud.addends, cloud.x)) ** 2) / case.reg
        if worth < 1e-9:  # else the costs in float64 are another problem than those that the oracle reads
            verify(result, case)


def test_turned_clouds_and_parts_have_the_same_costs():
    """But for their rounding: a BLAS may add up the products of matrices of other shapes in another order."""
    cloud, case = drawn(5)
    for one, right in ((cloud.transpose(), np.asarray(cloud).T), (cloud[1:], np.asarray(cloud)[1:])):
        np.testing.assert_allclose(np.asarray(one), right, rtol=0, atol=2 * cloud._cost.error(0.0))
    assert not cloud._cost.symmetric(None)
    for given, kept in zip(cloud.transpose().transpose().addends, cloud.addends, strict=True):
        np.testing.assert_array_equal(given, kept)
    assert cloud.addends[0].shape == (len(case.a),)


def test_a_number_serves_all_rows():
    x, y = np.eye(3), np.ones((4, 3))
    cloud = mapuot.PointCloud(x, y, "inner", 2.0, addends=(1.0, np.arange(4.0)))
    np.testing.assert_allclose(np.asarray(cloud), 2 * (1 + np.arange(4.0) - x @ y.T))
