"""Result.hvp against differences of the gradient: every pair of penalties, weighted axes, points without mass."""

import numpy as np
import pytest

import mapuot

REG_M = [1.0, (0.3, 5.0), (np.inf, 0.5), (0.5, np.inf), np.inf]


def clouds(m=9, n=7, d=2, far=5.0, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.random(m) + 0.1, rng.random(n) + 0.1
    return rng.random((m, d)) + far, rng.random((n, d)) + far + 0.2, a / a.sum(), b / b.sum()


def solved(x, y, a, b, reg, reg_m, weights=None, tol=1e-12):
    cloud = mapuot.PointCloud(x, y, scale=0.7, weights=weights)
    return mapuot.solve(cloud, a, b, reg=reg, reg_m=reg_m, tol=tol, precision="float64", threads=1)


@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("reg", [0.5, 0.05, 0.01])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5)], ids=["plain", "weighted"])
def test_it_is_the_derivative_of_the_gradient(weights, reg, reg_m):
    x, y, a, b = clouds(d=3 if weights else 2)
    a[2], b[3] = 0.0, 0.0  # which do not count
    a, b = a / a.sum(), b / b.sum()
    w, h = np.random.default_rng(1).normal(size=x.shape), 1e-5
    there, back = (solved(x + t * w, y, a, b, reg, reg_m, weights).gradient().x for t in (h, -h))
    got = solved(x, y, a, b, reg, reg_m, weights).hvp(w, tol=1e-10)
    want = (there - back) / (2 * h)
    assert (got[2] == 0).all()
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_it_is_symmetric_and_a_loose_tol_is_nearly_right():
    x, y, a, b = clouds(80, 60)
    result = solved(x, y, a, b, 0.01, 10.0, tol=1e-10)
    v, w = np.random.default_rng(2).normal(size=(2, *x.shape))
    exact, loose = (result.hvp(w, tol=tol) for tol in (1e-10, 1e-3))
    size = np.linalg.norm(v) * np.linalg.norm(exact)
    assert (v * exact).sum() == pytest.approx((w * result.hvp(v, tol=1e-10)).sum(), abs=1e-8 * size)
    assert np.abs(loose - exact).max() <= 1e-2 * np.abs(exact).max()
    assert np.abs(result.hvp(np.zeros_like(x))).max() == 0.0
    with pytest.warns(mapuot.ConvergenceWarning, match="max_steps"):
        result.hvp(x, tol=1e-12, max_steps=1)


def alone(x, a, reg, reg_m, **options):
    """The problem of a cloud with itself; y is another array, so that both sides can be told apart."""
    cloud = mapuot.PointCloud(x, x.copy(), scale=0.7)
    return mapuot.solve(cloud, a, a, reg=reg, reg_m=reg_m, tol=1e-12, precision="float64", threads=1, **options)


@pytest.mark.parametrize("symmetric", [None, False])
@pytest.mark.parametrize("reg_m", [1.0, 0.02, np.inf])
@pytest.mark.parametrize("reg", [0.5, 0.02, 1e-3])
def test_both_sides_of_a_cloud_with_itself_move(reg, reg_m, symmetric):
    x, _, a, _ = clouds(14)
    a[3] = 0.0
    w, h = np.random.default_rng(1).normal(size=x.shape), 1e-6 if reg < 0.01 else 1e-5
    result, there, back = (alone(x + t * w, a, reg, reg_m, symmetric=symmetric) for t in (0.0, h, -h))
    want = (there.gradient().x + there.gradient().y - back.gradient().x - back.gradient().y) / (2 * h)
    got = result.hvp(w, tol=1e-10, both=True)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
    slope, value = result.gradient(), [2 * (w * z.gradient().x).sum() for z in (there, back)]
    assert (there.dual - back.dual) / (2 * h) == pytest.approx(np.mean(value), rel=1e-4, abs=1e-9)
    np.testing.assert_array_equal(slope.x, slope.y)
