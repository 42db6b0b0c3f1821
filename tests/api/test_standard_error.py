"""Standard errors from the derivatives by the masses cover the true value as often as they say."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mapuot
from mapuot import PointCloud

DRAWS = 1000
COUNT = 100, 80
REG = 0.5
MOST_GROWTH = 0.99  # a skewed number: 97 to 98 % of 100 draws, 94 to 96 % of 400
COVERED = 0.92, 0.98  # of 95 %: 3 standard deviations of 1000 trials are 2 %, and 100 draws are not many


def population():
    """Return the values and probabilities of two discrete distributions in the plane."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, 2))
    y = rng.normal(size=(10, 2)) + 0.7
    return x, rng.dirichlet(np.full(12, 3.0)), y, rng.dirichlet(np.full(10, 3.0))


@pytest.fixture(scope="module")
def samples():
    """Return the indices of 1000 samples of each distribution."""
    rng = np.random.default_rng(2)
    return [rng.choice(len(w), (DRAWS, n), p=w) for w, n in zip(population()[1::2], COUNT, strict=True)]


def coverage(value, error, right):
    """Return how often a value is within 1.96 standard errors of the right one."""
    return (np.abs(value - right) < 1.96 * error).mean()


@pytest.mark.parametrize("reg_m", [1.0, (0.5, 3.0), np.inf, (1.0, np.inf)], ids=str)
def test_coverage_of_the_value(samples, reg_m):
    x, p, y, q = population()
    options = {"reg": REG, "reg_m": reg_m}
    right = mapuot.solve(PointCloud(x, y), p, q, tol=1e-9, **options).objective
    i, j = samples
    batch = mapuot.solve_batch(PointCloud(x[i], y[j]), **options)
    error = batch.standard_error()
    assert COVERED[0] < coverage(batch.objective, error, right) < COVERED[1]
    assert error.mean() == pytest.approx(batch.objective.std(), rel=0.1)
    one = mapuot.solve(PointCloud(x[i[3]], y[j[3]]), **options).standard_error()
    assert one == pytest.approx(error[3], rel=1e-4)
    A, B = (np.stack([np.bincount(k, minlength=len(w)) for k in z]) for z, w in ((i, p), (j, q)))
    histograms = mapuot.solve_batch(np.asarray(PointCloud(x, y)), A / COUNT[0], B / COUNT[1], **options)
    assert_allclose(histograms.standard_error(COUNT), error, rtol=1e-4)


@pytest.mark.parametrize("reg_m", [1.0, np.inf], ids=str)
def test_coverage_of_the_divergence(samples, reg_m):
    x, p, y, q = population()
    options = {"reg": REG, "reg_m": reg_m}
    right = mapuot.sinkhorn_divergence(PointCloud(x, y), p, q, tol=1e-9, **options)
    i, j = samples
    value, error = mapuot.sinkhorn_divergence(PointCloud(x[i], y[j]), standard_error=True, **options)
    assert COVERED[0] < coverage(value, error, right) < COVERED[1]
    assert error.mean() == pytest.approx(value.std(), rel=0.1)
    one = mapuot.sinkhorn_divergence(PointCloud(x[i[3]], y[j[3]]), standard_error=True, **options)
    assert one == pytest.approx((value[3], error[3]), rel=1e-4)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own units"])
def test_errors_of_all_pairs(own):
    rng = np.random.default_rng(0)
    clouds = [rng.normal(size=(k, 2)) + shift for k, shift in ((20, 0.0), (35, 1.0), (15, 2.0))]
    if own:
        how = {"scale_cost": "std", "scale_each": True}
    else:
        how = {}
    D, E = mapuot.pairwise(clouds, reg=0.1, reg_m=1.0, standard_error=True, **how)
    assert_allclose(D, mapuot.pairwise(clouds, reg=0.1, reg_m=1.0, **how), rtol=1e-12)
    assert (E == E.T).all()
    assert not np.diag(E).any()
    for i, j in ((0, 1), (1, 2), (0, 2)):
        M = PointCloud(clouds[i], clouds[j])
        unit = np.std(np.asarray(M)) if own else 1.0
        want = mapuot.sinkhorn_divergence(M, reg=0.1 * unit, reg_m=unit, standard_error=True)
        assert (D[i, j], E[i, j]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("reg_m", [1.0, (0.5, 3.0), np.inf, (1.0, np.inf)], ids=str)
def test_coverage_of_transitions(samples, reg_m):
    """Masses between labels, shares of them and growth: 95 % of the intervals contain the population's."""
    x, p, y, q = population()
    options = {"reg": REG, "reg_m": reg_m}
    rows, cols = np.arange(len(x)) % 2, np.arange(len(y)) % 3 == 0
    right = mapuot.solve(PointCloud(x, y), p, q, tol=1e-9, **options).transitions(rows, cols)
    i, j = samples
    batch = mapuot.solve_batch(PointCloud(x[i], y[j]), **options)
    found = [one.transitions(rows[i[k]], cols[j[k]]) for k, one in enumerate(batch)]
    for name in ("mass", "shares", "growth"):
        value, error = (np.stack([getattr(one, name)[k] for one in found]) for k in (0, 1))
        want = getattr(right, name).value
        if name == "growth" and np.isinf(np.ravel(reg_m)[0]):
            assert np.abs(value - want).max() < 1e-4
            continue
        inside = (np.abs(value - want) < 1.96 * error).mean(0)
        assert (inside > COVERED[0]).all()
        assert (inside < (MOST_GROWTH if name == "growth" else COVERED[1])).all()
        assert_allclose(error.mean(0), value.std(0), rtol=0.06)
    A, B = (np.bincount(k[3], minlength=len(w)) / n for k, w, n in zip((i, j), (p, q), COUNT, strict=True))
    histograms = mapuot.solve(np.asarray(PointCloud(x, y)), A, B, **options).transitions(rows, cols, COUNT)
    assert_allclose(histograms.mass.error, found[3].mass.error, rtol=1e-4)


@pytest.mark.parametrize("cloud", [False, True], ids=["matrix", "points"])
def test_transitions_are_sums_of_the_plan(cloud):
    rng = np.random.default_rng(0)
    x, y, a = rng.normal(size=(9, 2)), rng.normal(size=(7, 2)), rng.random(9)
    a[2] = 0.0
    M = PointCloud(x, y)
    rows, cols = np.array(list("aabbbccca")), np.array([1, 0, 1, 0, 1, 1, 0])
    result = mapuot.solve(M if cloud else np.asarray(M), a, reg=0.3, reg_m=(1.0, 2.0), tol=1e-9)
    found = result.transitions(rows, cols)
    assert found.rows.tolist() == ["a", "b", "c"]
    assert found.cols.tolist() == [0, 1]
    mass = [[result.plan[np.ix_(rows == r, cols == c)].sum() for c in found.cols] for r in found.rows]
    assert_allclose(found.mass.value, mass, rtol=1e-9)
    assert_allclose(found.shares.value.sum(1), 1.0)
    assert_allclose(found.growth.value, [result.plan[rows == r].sum() / a[rows == r].sum() for r in found.rows])
    with pytest.raises(ValueError, match="row_labels"):
        result.transitions(rows[:3], cols)
    with pytest.raises(ValueError, match="one number"):
        mapuot.solve(np.ones((9, 7)), reg=1.0, reg_m=0.3, penalty="tv").transitions(rows, cols)


def test_masses_count_as_weights():
    """Points without mass do not count as draws; a side with one draw has no variance."""
    rng = np.random.default_rng(0)
    M = rng.random((6, 5))
    a = np.array([0.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    error = mapuot.solve(M, a, reg=0.2, reg_m=1.0).standard_error()
    assert error == pytest.approx(mapuot.solve(M[1:], a[1:], reg=0.2, reg_m=1.0).standard_error(), rel=1e-5)
    doubled = mapuot.solve_batch(M, np.stack([a, 2 * a]), reg=0.2, reg_m=1.0).standard_error()
    assert doubled.shape == (2,)
    assert doubled[0] == pytest.approx(error, rel=1e-5)
    assert mapuot.solve(M[:1], reg=0.2, reg_m=1.0).standard_error() == np.inf


@pytest.mark.parametrize("draws", [3, (3,), (3, 1), (3.0, 4), "ab"], ids=str)
def test_wrong_draws_are_refused(draws):
    with pytest.raises(ValueError, match="draws must be a pair of integers >= 2"):
        mapuot.solve(np.ones((3, 4)), reg=1.0, reg_m=1.0).standard_error(draws)
    with pytest.raises(ValueError, match=r"reg_m\[0\] must be one number"):
        mapuot.solve(np.ones((3, 4)), reg=1.0, reg_m=0.3, penalty="tv").standard_error()


@pytest.mark.parametrize("unit", [1e-150, 1e170])
def test_the_units_of_cost_and_mass(unit):
    """Squares of slopes of 1e170 overflow, and squares of 1e-170 are 0: the error was inf, or 0."""
    rng = np.random.default_rng(0)
    M = rng.random((5, 6))
    a, b = rng.random(5), rng.random(6)
    one = mapuot.solve(M, a, b, reg=0.1, reg_m=1.0)
    found = mapuot.solve(unit * M, a, b, reg=0.1 * unit, reg_m=unit)
    many = mapuot.solve_batch(unit * M, a[None], b[None], reg=0.1 * unit, reg_m=unit)
    for draws in (None, (9, 9)):
        np.testing.assert_allclose(found.standard_error(draws), unit * one.standard_error(draws), rtol=1e-5)
        np.testing.assert_allclose(many.standard_error(draws), unit * one.standard_error(draws), rtol=1e-5)
