"""Costs of points and grid nodes equal SciPy's matrix; first and second derivatives match finite differences."""

import math
import pickle
import warnings

import numpy as np
import pytest
from conftest import CUDA
from matrix import distances
from numpy.testing import assert_allclose
from problems import Case, verify

import mapuot
from mapuot.answer import curvature
from mapuot.answer.settings import CURVATURE
from mapuot.answer.slopes import slope_error
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu.grid import GridOperator
from mapuot.problem.metrics import METRICS
from mapuot.problem.points import PointCosts
from mapuot.problem.settings import POINTS


def clouds(m, n, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((m, d)) + 0.1, rng.random((n, d)) * 0.9 + 0.2, rng.random(m) + 0.1, rng.random(n) + 0.1


@pytest.mark.parametrize("metric", METRICS)
def test_costs_of_every_instruction_set(isa, metric):
    for d in (1, 2, 5, 40):
        x, y, *_ = clouds(1, 41, d)
        for j, want in enumerate(distances(x, y, metric)[0]):
            if np.isfinite(want):
                low = cpu.extrema(mapuot.PointCloud(x, y[j : j + 1], metric)._cost)[0]
                assert low == pytest.approx(want, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "wfr"])
def test_weights_keep_the_digits_of_large_coordinates(metric):
    """Costs far from the origin equal the costs near it: transposed, for some rows, and to other points."""
    x, y, a, b = clouds(30, 40, 3)
    far = 2.0**27
    weights = [0.3, 1.0, 1.7]
    there = mapuot.PointCloud(x + far, y + far, metric, weights=weights)
    near = mapuot.PointCloud((x + far) - far, (y + far) - far, metric, weights=weights)
    for got, want in ((there, near), (there.transpose(), near.transpose()), (there[3:9], near[3:9])):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-11, atol=1e-15)
        largest = float(np.asarray(want).max())
        assert got._cost.error(largest) == pytest.approx(want._cost.error(largest), rel=1e-6)
    beside = there._cost.beside(there.x[:4], "points")
    np.testing.assert_allclose(np.asarray(beside), np.asarray(near)[:4], rtol=1e-11, atol=1e-15)
    assert mapuot.solve(there, a, b, reg=0.05, reg_m=1.0).converged


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner"])
@pytest.mark.parametrize("weights", [None, "some"])
@pytest.mark.parametrize("far", [0.0, 1e3, 1e9])
@pytest.mark.parametrize("one", [False, True])
def test_costs_formed_as_products_are_within_their_rounding(metric, weights, far, one):
    """Costs match 80-bit sums of the core's coordinates in many dimensions; differences serve where products cancel."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 60)) * 10 ** rng.uniform(-2, 2, 60) + far
    if one:
        y = x
    else:
        y = rng.normal(size=(70, 60)) + far
    cloud = mapuot.PointCloud(x, y, metric, 0.7, rng.random(60) if weights else None)._cost
    M, rounding = cpu.formed(cloud)
    wide = cloud.rows.astype(np.longdouble)
    there = cloud.columns[:, : len(y)].T.astype(np.longdouble)
    exact = cloud.core[1] * cloud.core[0].between(wide[:, None], there)
    assert abs(M - exact).max() <= rounding + cloud.error(float(abs(exact).max()))
    if metric != "inner":
        assert rounding <= 1e-10 * float(exact.mean())
        assert M.min() >= 0
        np.testing.assert_array_equal(M.T[: 1 if not one else None], M[:, :1].T if not one else M)


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "inner", "euclidean", "cityblock"])
def test_solves_of_many_dimensions_are_those_of_made_costs(metric):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(90, 48))
    y = rng.normal(size=(80, 48)) + 0.2
    M = np.asarray(mapuot.PointCloud(x, y, metric))
    options = {"reg": 0.05 * float(M.std()), "reg_m": float(abs(M).max()), "penalty": ("tv", "kl")}
    formed, made = (mapuot.solve(mapuot.PointCloud(x, y, metric, form=form), **options) for form in ("auto", None))
    assert "the matrix of the points" in formed.how
    assert formed.converged == made.converged
    apart = float(abs(formed.plan - made.plan).sum())
    assert apart <= formed.error_bound * formed.mass + made.error_bound * made.mass


def test_memory_is_that_of_the_points():
    x = np.random.default_rng(0).random((20_000, 2))
    cloud = mapuot.PointCloud(x, x, form=None)
    assert cloud._cost.rows.nbytes + cloud._cost.columns.nbytes < 1 << 20
    assert len(pickle.dumps(cloud)) < 2 << 20
    result = mapuot.solve(mapuot.PointCloud(x[:9], x[:9], form=None), reg=0.1, reg_m=1.0)
    with pytest.raises(MemoryError, match=r"rows of the plan need 6.71e\+07 GiB"):
        result._stream.rows_of_plan(10**15)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("reg_m", [0.8, (0.5, math.inf)])
def test_gradient_against_differences(metric, reg_m):
    x, y, a, b = clouds(6, 5, 2)
    x = x * 0.5
    y = y * 0.6
    weights = np.array([0.7, 1.3])

    def solved(x, y, a, b):
        if metric == "inner":
            addends = (np.linspace(0, 1, 6), np.linspace(1, 0, 5))
        else:
            addends = None
        cloud = mapuot.PointCloud(x, y, metric, 1.3, weights, addends=addends)
        return mapuot.solve(cloud, a, b, reg=0.2, reg_m=reg_m, tol=1e-12)

    found = solved(x, y, a, b).gradient()
    step = 1e-5
    for which, (point, slope) in enumerate(zip((x, y, a, b), found[:4], strict=True)):
        for index in np.ndindex(point.shape):
            values = []
            for sign in (1, -1):
                moved = [z.copy() for z in (x, y, a, b)]
                moved[which][index] += sign * step
                values.append(solved(*moved).dual)
            assert slope[index] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-6)
    assert found.error >= 0


@pytest.mark.parametrize("metric", METRICS)
def test_the_error_of_a_gradient_is_true(metric):
    if metric != "wfr":
        shape = (40, 30, 3)
        reg = 0.05
    else:
        shape = (6, 5, 2)
        reg = 0.2
    x, y, a, b = clouds(*shape)
    exact, *rough = (
        mapuot.solve(mapuot.PointCloud(x, y, metric), a, b, reg=reg, reg_m=1.0, tol=tol).gradient()
        for tol in (1e-12, 1e-2, 1e-6)
    )
    for found in rough:
        assert found.error < np.inf
        for k in (0, 1):
            assert np.linalg.norm(found[k] - exact[k], axis=1).sum() <= found.error + exact.error


@pytest.mark.parametrize("weights", [None, np.array([0.3, 2.0, 1.1])])
@pytest.mark.parametrize("metric", METRICS)
def test_the_error_of_a_slope_is_reached(metric, weights):
    """The bound covers two points where rounding of the cost can spoil a whole plan, and sums of as many terms."""
    rng = np.random.default_rng(0)
    tightest = 0.0
    for _ in range(60):
        x = rng.random((1, 3))
        y = 0.7 * rng.random((1, 3))
        cost = [
            [np.asarray(mapuot.PointCloud(x + s * step, y, metric, 1.3, weights)[:1]).item() for s in (-1, 0, 1)]
            for step in 1e-6 * np.eye(3)
        ]
        if np.isfinite(cost).all():
            slope = float(np.linalg.norm([(after - before) / 2e-6 for before, _, after in cost]))
            cloud = PointCosts(x, y, metric, 1.3, weights)
            bound = slope_error(cloud, 1.0, cost[0][1])
            tightest = max(tightest, slope / bound)
            assert slope <= bound * (1 + 1e-8)
            assert slope_error(cloud, 0.0, cost[0][1]) >= 2.0**-52 * slope
    assert tightest > 0.8


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_error_of_the_gradient_counts_what_rounding_takes(metric, dtype):
    """Clouds far from the origin, and float32 clouds with a float32 plan, agree with the same cloud near the origin."""
    x, y, a, b = clouds(7, 6, 2)
    x, y = (np.round(z * 64).astype(dtype) / 64 for z in (x, y))
    far = dtype(2.0**27 if dtype == np.float64 else 2.0**12)
    near, moved = (
        mapuot.solve(mapuot.PointCloud(*points, metric, 1.3), a, b, reg=0.3, reg_m=1.0, tol=1e-11)
        for points in ((x.astype(float), y.astype(float)), (x + far, y + far))
    )
    right = near.gradient()
    found = moved.gradient()
    assert found.error < 1e-9
    for k in (0, 1):
        off = np.linalg.norm(found[k] - right[k], axis=1).sum()
        assert off <= found.error + right.error


def test_slopes_between_points_whose_squares_underflow():
    y = np.array([[1.0, 0.0], [0.0, 2.0]])
    a = np.ones(1)
    b = np.ones(2)
    results = [
        mapuot.solve(mapuot.PointCloud([[0.0, 0.0]], y * z, "euclidean", 1 / z), a, b, reg=1.0, reg_m=1.0)
        for z in (1.0, 2.0**-531)
    ]
    right, found = (result.gradient().x * z for result, z in zip(results, (1.0, 2.0**-531), strict=True))
    np.testing.assert_allclose(found, right, rtol=0.05)


def test_slopes_of_float32_points_at_a_large_scale():
    """Slopes are right where scale times an entry of the plan exceeds float32."""
    x, y, a, b = (z.astype(np.float32) for z in clouds(5, 4, 2))
    found = mapuot.solve(mapuot.PointCloud(x, y, "cityblock", 1e60), a, b, reg=1e60, reg_m=1e60).gradient()
    assert all(np.isfinite(slope).all() for slope in (found.x, found.y))


def test_potential_at_the_points_and_beyond():
    x, y, a, b = clouds(12, 9, 2)
    result = mapuot.solve(mapuot.PointCloud(x, y), a, b, reg=0.1, reg_m=1.0, tol=1e-10)
    np.testing.assert_allclose(result.potential(x), result.f, atol=1e-8)
    np.testing.assert_allclose(result.potential(y, side="cols"), result.g, atol=1e-8)
    more = mapuot.PointCloud(np.vstack([x, [[5.0, 5.0]]]), y)
    weightless = mapuot.solve(more, np.append(a, 1e-12), b, reg=0.1, reg_m=1.0, tol=1e-10)
    assert weightless.f[-1] == pytest.approx(result.potential([[5.0, 5.0]])[0], abs=1e-6)
    with_zero = mapuot.solve(more, np.append(a, 0.0), b, reg=0.1, reg_m=1.0, tol=1e-10)
    assert np.isfinite(with_zero.gradient().a).all()


def test_the_cost_is_that_of_the_call():
    """Points and weights changed in place after construction change no cost."""
    x = np.random.default_rng(0).random((9, 2))
    weights = np.array([1.0, 3.0])
    cloud = mapuot.PointCloud(x, x, weights=weights)
    want = np.asarray(cloud)
    x[:], weights[:] = 7.0, 2.0
    np.testing.assert_array_equal(np.asarray(cloud), want)
    np.testing.assert_array_equal(np.asarray(cloud._cost.beside(cloud.x, "points")), want)


def test_some_rows():
    x, y, *_ = clouds(7, 11, 3)
    cloud = mapuot.PointCloud(x, y)
    every = np.arange(7) % 2 == 0
    slices = slice(2, 5), slice(-3, None), slice(5, 2), slice(1, 7, 2), slice(None, None, -1)
    for rows in (*slices, [4, -1, 4], every, []):
        part = cloud[rows]
        wanted = np.asarray(cloud)[rows]
        assert part.shape == wanted.shape
        np.testing.assert_allclose(np.asarray(part), wanted, rtol=1e-15)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_ranges_of_many_pairs_are_bounds(metric, dim, monkeypatch, using):
    """Ranges are bounds near the true ones for clouds of any shape, and certify the answers."""
    rng = np.random.default_rng(dim)
    for apart in (0.0, 3.0):
        x = rng.normal(size=(900, dim))
        y = rng.normal(size=(800, dim)) + apart
        cloud = mapuot.PointCloud(x, y, metric, scale=0.3, truncate=None, form=None)
        low, high, *odd = cloud._cost.range(cpu)
        using(POINTS, auto_entries=1)
        bounds = cloud._cost.range(cpu)
        assert odd == [0, 0] == list(bounds[2:])
        assert bounds[0] <= low * (1 + 1e-12)
        assert high * (1 - 1e-12) <= bounds[1] <= 2 * high
        a = np.full(900, 1 / 900)
        b = np.full(800, 1.1 / 800)
        reg = 0.03 * high
        got = mapuot.solve(cloud, a, b, reg=reg, reg_m=high)
        monkeypatch.undo()
        want = mapuot.solve(cloud, a, b, reg=reg, reg_m=high, tol=1e-9)
        assert abs(got.n_passes - mapuot.solve(cloud, a, b, reg=reg, reg_m=high).n_passes) <= 2
        assert np.abs(got.plan - want.plan).sum() <= (got.error_bound + want.error_bound) * want.mass


@pytest.mark.parametrize("d", [1, 2, 3])
def test_wfr_forbids_what_rounding_would_price(backend, d):
    """Points about pi / 2 apart on a lattice cost 72, 74 or inf, depending on their last digits."""
    k = 3
    x = np.arange(-k, k + 1)[:, None] * np.eye(d)[:1] * (math.pi / 2 / k)
    cloud = mapuot.PointCloud(x, x * (1 - 2.0**-53), "wfr")
    M = np.asarray(cloud)
    steps = np.abs(np.arange(-k, k + 1)[:, None] - np.arange(-k, k + 1))
    np.testing.assert_array_equal(np.isfinite(M), steps < k)
    result = mapuot.solve(cloud, reg=2.0, reg_m=5.0, tol=1e-9, backend=backend)
    np.testing.assert_array_equal(result.plan > 0, steps < k)
    assert result.converged
    assert cloud._cost.error(18.02) < 1e-10


def test_the_error_of_costs_below_their_coordinates():
    """Where weights or squares leave no digit of a cost, its error estimate is not 0, however small the cost is."""
    near = mapuot.PointCloud([[1e8]], [[1e8 + 2.0**-26]], "sqeuclidean", 1e16, [0.3])
    assert abs(np.asarray(near)[0, 0] - 0.3e16 * 2.0**-52) <= near._cost.error(float(np.asarray(near)[0, 0]))
    tiny = mapuot.PointCloud([[0.0]], [[1e-170]], "sqeuclidean", 1e300)
    assert tiny._cost.error(0.0) >= 1e-40
    assert mapuot.PointCloud([[0.0]], [[1e-170]], "euclidean", 1e160)._cost.error(0.0) >= 1e-10
    assert mapuot.PointCloud([[0.0]], [[1.0]], scale=1e200)._cost.error(1e200) < 1e186


@pytest.mark.parametrize("kind", ["cosine", "weights"])
def test_scaled_clouds_count_the_roundings_of_unit_vectors_and_weights(kind):
    """Clouds scaled for each problem hold small differences of coordinates that were rounded at their own size."""
    rng = np.random.default_rng(7)
    x = 1e3 + 1e-2 * rng.random((30, 3))
    y = 1e3 + 1e-2 * rng.random((40, 3))
    weights = np.array([0.3, 1.7, 1e-4])
    given = {"metric": "cosine"} if kind == "cosine" else {"weights": weights}
    factor = np.array([1e9, 1e3])
    scaled = mapuot.PointCloud([x, x], [y, y], **given)._cost.scaled(factor, 1.0)
    (X, Y) = (np.longdouble(z) for z in (x, y))
    if kind == "cosine":
        X, Y = (z / np.sqrt((z**2).sum(1, keepdims=True)) for z in (X, Y))
        weights = np.array([0.5, 0.5, 0.5])
    exact = ((X[:, None] - Y) ** 2 * np.longdouble(weights)).sum(2)
    for i in (0, 1):
        M = np.asarray(scaled.of(i))
        assert np.abs(M - factor[i] * exact).max() <= scaled.error(float(M.max()))


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_cosine_of_lengths_beyond_float64(scale):
    """Where squares of coordinates overflow or underflow, directions equal the directions of the same points near 1."""
    x, y, a, b = clouds(6, 5, 2)
    near, far = (
        mapuot.solve(mapuot.PointCloud(z * x, z * y, "cosine", form=None), a, b, reg=0.1, reg_m=1.0)
        for z in (1.0, scale)
    )
    np.testing.assert_allclose(far.plan, near.plan, rtol=1e-12)
    right = near.gradient()
    found = far.gradient()
    np.testing.assert_allclose(found.x * scale, right.x, rtol=1e-9, atol=1e-15)
    assert found.error * scale == pytest.approx(right.error, rel=1e-6)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine", "wfr"])
@pytest.mark.parametrize(("m", "n", "d"), [(1, 1, 1), (9, 17, 3), (130, 1100, 20)])
def test_a_cloud_that_is_formed_is_solved_as_its_matrix(isa, metric, m, n, d):
    """A formed cloud takes as many passes as its matrix, to equal potentials and no smaller bound."""
    x, y, a, b = clouds(m, n, d)
    cloud = mapuot.PointCloud(x / np.sqrt(d), y / np.sqrt(d), metric, 0.3)
    M = cpu.costs(cloud._cost, 1)
    np.testing.assert_allclose(M, np.asarray(cloud), rtol=1e-13, atol=1e-16)
    assert cpu.costs(cloud._cost, 2).tobytes() == M.tobytes()
    for reg_m, tol in ((1.0, 1e-6), ((np.inf, 0.5), 1e-9), ((0.5, np.inf), 1e-3)):
        options = {"reg": 0.05, "reg_m": reg_m, "tol": tol, "threads": 1}
        got, want = (mapuot.solve(cost, a, b, **options) for cost in (cloud, M))
        assert got.n_passes == want.n_passes
        assert "the matrix of the points" in got.how
        np.testing.assert_allclose(got.plan, want.plan, rtol=1e-10, atol=1e-300)
        assert want.error_bound <= got.error_bound <= want.error_bound * (1 + 1e-6) + 1e-10
        np.testing.assert_allclose(got.log_v, want.log_v, rtol=1e-12, atol=1e-12)


def test_the_rounding_of_formed_costs_is_in_the_certificate():
    """A cost of 1e12 reg has no digit below its rounding, so nothing may be certified."""
    x = np.array([[0.0, 0.1]])
    y = np.array([[1e6, 0.3], [1e6, 0.7]])
    a = np.ones(1)
    b = np.ones(2) / 2
    cloud = mapuot.PointCloud(x, y)
    M = np.asarray(mapuot.PointCloud(x, y))
    for options in ({}, {"penalty": ("kl", "tv")}):
        given = {"reg": 1.0, "reg_m": (np.inf, 1.0), "max_passes": 50} | options
        found = mapuot.solve(cloud, a, b, **given)
        known = mapuot.solve(M, a, b, **given)
        assert found.error_bound > known.error_bound + 1e-4


def test_what_a_formed_cloud_keeps():
    x, y, a, b = clouds(9, 7, 2)
    narrow = mapuot.PointCloud(x.astype(np.float32), y.astype(np.float32))
    result = mapuot.solve(narrow, a, b, reg=0.1, reg_m=1.0, out=(out := np.empty((9, 7), np.float32)))
    assert result.plan is out
    want = mapuot.solve(mapuot.PointCloud(narrow.x, narrow.y, form=None), a, b, reg=0.1, reg_m=1.0)
    np.testing.assert_allclose(out, want.plan, rtol=2e-6)
    np.testing.assert_allclose(result.gradient().x, want.gradient().x, rtol=1e-5, atol=1e-9)
    again = pickle.loads(pickle.dumps(result))
    assert again.problem.cost is again.problem.cost.cloud  # the points alone
    np.testing.assert_allclose(again.plan, out, rtol=1e-6)
    batch = mapuot.solve_batch(narrow, np.stack([a, 2 * a]), b, reg=0.1, reg_m=1.0)
    assert all("2 problems together" in how for how in batch.how)
    np.testing.assert_allclose(batch[0].plan, out, rtol=2e-6)


def test_when_a_cloud_is_formed(monkeypatch):
    monkeypatch.setattr("mapuot.backends.cpu.memory_bytes", lambda: 1 << 33)
    x, y, _, _ = clouds(9, 7, 2)
    whole = 16 * 9 * 7
    for options, formed in (
        ({}, True), ({"form": None}, False), ({"form": whole}, True), ({"form": whole - 1}, False),
        ({"truncate": 3.0}, False), ({"truncate": None}, True),
    ):  # fmt: skip
        result = mapuot.solve(mapuot.PointCloud(x, y, **options), reg=0.1, reg_m=1.0)
        assert ("tiles" in result.how) == formed
    for dim, most in ((1, 1 << 19), (2, 1 << 21), (31, 1 << 26), (32, 1 << 27)):
        for rows, formed in ((most >> 12, True), ((most >> 12) + 1, False)):
            cloud = mapuot.PointCloud(np.zeros((rows, dim)), np.ones((1 << 12, dim)))._cost
            assert cloud.forms(cpu.form_bytes(cloud)) == formed


@pytest.mark.parametrize("end", ["max_passes", "cancelled"])
def test_no_solve_ends_on_float32_passes(end):
    """Float32 passes count a mean rounding, which ignores a far pair: bounds once were 31 times too small."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        d = int(rng.integers(1, 6))
        x = rng.random((34, d))
        y = rng.random((24, d))
        far = 10 ** rng.uniform(1, 2.3)
        x[0], y[0] = far, far + 0.01 * rng.random(d)
        cloud = mapuot.PointCloud(x, y, form=None)
        regs = {"reg": 0.01, "reg_m": (0.3, 0.03)}
        exact = mapuot.solve(np.asarray(cloud), tol=1e-10, precision="float64", **regs)
        for most in (1, 2, 5):
            if end == "max_passes":
                limit = {"max_passes": most}
            else:
                limit = {"callback": lambda s, most=most: s.n_pass >= most}
            found = mapuot.solve(cloud, **regs, **limit)
            error = np.abs(found.plan - exact.plan).sum() / found.mass
            assert error <= found.error_bound + exact.error_bound
            assert found.objective - exact.dual <= found.gap * (1 + 1e-9) + 1e-10 * abs(exact.dual)


LABELLED = [("sqeuclidean", 0.7), ("cityblock", 0.7), *((name, math.inf) for name in METRICS if name != "inner")]


@pytest.mark.parametrize(("metric", "across"), LABELLED)
@pytest.mark.parametrize("weights", [None, (0.4, 1.3)])
@pytest.mark.parametrize("form", ["auto", None])
def test_labels_cost_across(metric, across, weights, form):
    x, y, a, b = clouds(40, 50, 2)
    rng = np.random.default_rng(1)
    kinds = rng.choice(["b", "c", "e"], 40), rng.choice(["b", "c", "d"], 50)
    cloud = mapuot.PointCloud(x, y, metric, 2.0, weights, form=form, labels=kinds, across=across)
    apart = np.where(kinds[0][:, None] != kinds[1], across, 0.0)
    M = np.asarray(mapuot.PointCloud(x, y, metric, 2.0, weights)) + apart
    finite = apart < math.inf
    got = np.asarray(cloud)
    assert np.array_equal(np.isfinite(got), finite)
    assert np.abs(got[finite] - M[finite]).max() <= 2 * cloud._cost.error(float(M[finite].max()))
    for one, want in ((cloud, M), (cloud.transpose(), M.T), (cloud[5:20], M[5:20])):
        if one.shape == M.shape:
            weight = (a, b)
        elif one is not cloud and len(one) == 50:
            weight = (b, a)
        else:
            weight = (a[5:20], b)
        result, exact = (mapuot.solve(z, *weight, reg=0.1, reg_m=1.0, tol=1e-8) for z in (one, want))
        assert np.abs(result.plan - exact.plan).sum() < 3e-8 * exact.mass
    assert mapuot.solve(cloud, a, b, reg=0.1, reg_m=1.0).converged


def test_labels_that_differ_make_another_side():
    """Points paired with themselves are a one-potential problem if and only if their labels are equal."""
    x = np.random.default_rng(0).random((30, 2))
    labels = np.arange(30) % 3
    for other, alike in ((labels.copy(), True), (np.roll(labels, 1), False), (np.zeros(30), False)):
        cloud = mapuot.PointCloud(x, labels=(labels, other), across=0.5, form=None)
        assert ("one potential" in mapuot.solve(cloud, reg=0.1, reg_m=1.0).how) == alike


def test_labels_of_many_points_whose_pairs_are_skipped():
    rng = np.random.default_rng(2)
    x = rng.random((1500, 2))
    y = rng.random((1400, 2))
    kinds = rng.integers(0, 3, 1500)
    cloud = mapuot.PointCloud(x, y, truncate=30.0, labels=(kinds, kinds[:1400]), across=0.3)
    result = mapuot.solve(cloud, reg=0.004, reg_m=1.0)
    assert "of the pairs" in result.how
    exact = mapuot.solve(np.asarray(cloud), reg=0.004, reg_m=1.0, tol=1e-9)
    assert np.abs(result.plan - exact.plan).sum() <= result.error_bound * exact.mass * 1.01


def with_labels(m, n, d, seed, count=3):
    """Return two clouds, masses, labels that both sides share, and costs with inf between different labels."""
    x, y, a, b = clouds(m, n, d, seed)
    a = a / a.sum()
    b = b / b.sum()
    labels = tuple(np.random.default_rng(seed).permutation(np.arange(k) % count) for k in (m, n))
    return x, y, a, b, labels, np.where(labels[0][:, None] == labels[1], 0.0, np.inf)


LABEL_WAYS = {
    "formed": {}, "points": {"form": None}, "float64": {"form": None, "precision": "float64"},
    "boxes": {"truncate": 30.0}, "far boxes": {"truncate": 30.0, "reg": 0.01},
    "balanced": {"form": None, "reg_m": np.inf}, "penalties": {"form": None, "penalty": ("tv", "l2")},
}  # fmt: skip


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "inner"])
@pytest.mark.parametrize("d", [2, 7])
@pytest.mark.parametrize("way", LABEL_WAYS)
def test_labels_that_forbid_pairs_give_the_plan_of_costs_of_inf(metric, d, way):
    if metric == "wfr" and "boxes" in way:
        pytest.skip("its pairs are not skipped")
    x, y, a, b, labels, M = with_labels(300, 280, d, 5)
    words = {"reg": 0.1, "reg_m": 1.0, **LABEL_WAYS[way]}
    if way == "balanced":
        for k in range(3):
            b[labels[1] == k] *= a[labels[0] == k].sum() / b[labels[1] == k].sum()
    how = {name: words.pop(name) for name in ("form", "truncate") if name in words}
    cloud = mapuot.PointCloud(x, y, metric, labels=labels, across=math.inf, **how)
    M = M + np.asarray(mapuot.PointCloud(x, y, metric))
    assert np.array_equal(np.isfinite(np.asarray(cloud)), np.isfinite(M))
    result = mapuot.solve(cloud, a, b, **words)
    exact = mapuot.solve(M, a, b, **words | {"tol": 1e-9, "precision": "float64"})
    assert result.converged
    assert np.abs(result.plan - exact.plan).sum() <= (result.error_bound + exact.error_bound) * exact.mass
    assert result.dual <= exact.objective + 1e-9
    assert not result.plan[~np.isfinite(M)].any()
    if way != "penalties":
        slopes = result.gradient()
        one = mapuot.PointCloud(x, y, metric, form=None)
        assert slopes.x.shape == x.shape
        assert np.isfinite(slopes.x).all()
        assert np.isfinite(slopes.error)
        assert one._cost.error(1.0) <= cloud._cost.error(1.0)
    if way == "balanced":
        other = b * np.where(labels[1] == 0, 0.5, 1.0)
        with pytest.raises(mapuot.InfeasibleError, match="only, where"):
            mapuot.solve(cloud, a, other * (a.sum() / other.sum()), **words)


def test_labels_of_many_clouds_that_forbid_pairs():
    x, y, a, b, labels, M = with_labels(40, 30, 3, 6)
    xs = np.stack([x, x + 0.1])
    ys = np.stack([y, y])
    for kinds in ((np.stack([labels[0]] * 2), [labels[1]] * 2), ([labels[0]] * 2, np.concatenate([labels[1]] * 2))):
        cloud = mapuot.PointCloud(xs, ys, labels=kinds, across=math.inf)
        batch = mapuot.solve_batch(cloud, np.stack([a, a]), np.stack([b, b]), reg=0.1, reg_m=1.0)
        assert batch.converged.all()
        for k, result in enumerate(batch):
            costs = M + np.asarray(mapuot.PointCloud(xs[k], ys[k]))
            exact = mapuot.solve(costs, a, b, reg=0.1, reg_m=1.0, tol=1e-9)
            assert np.abs(result.plan - exact.plan).sum() <= (result.error_bound + exact.error_bound) * exact.mass
        assert batch.gradient().x.shape == xs.shape
    with pytest.raises(NotImplementedError, match="across=inf"):
        mapuot.PointCloud(xs, ys, labels=kinds, across=1.0)


def test_labels_of_a_cloud_with_itself_that_forbid_pairs():
    x = np.random.default_rng(0).random((60, 2))
    labels = np.arange(60) % 3
    for other, alike in ((labels, True), (np.roll(labels, 1), False)):
        cloud = mapuot.PointCloud(x, labels=(labels, other), across=math.inf, form=None)
        result = mapuot.solve(cloud, reg=0.1, reg_m=1.0)
        exact = mapuot.solve(np.asarray(cloud), reg=0.1, reg_m=1.0, tol=1e-9)
        assert ("one potential" in result.how) == alike
        assert np.abs(result.plan - exact.plan).sum() <= result.error_bound * exact.mass * 1.01
        with pytest.raises(NotImplementedError, match="new ones have no label"):
            result.map(x + 0.1)


# ---- the second derivative


REG_M = [1.0, (0.3, 5.0), (np.inf, 0.5), (0.5, np.inf), np.inf]


def cloud_pair(m=9, n=7, d=2):
    x, y, a, b = clouds(m, n, d)
    return x + 5, y + 5, a / a.sum(), b / b.sum()


def solved(x, y, a, b, reg, reg_m, weights=None, tol=1e-12, **options):
    cloud = mapuot.PointCloud(x, y, scale=0.7, weights=weights)
    return mapuot.solve(cloud, a, b, reg=reg, reg_m=reg_m, tol=tol, precision="float64", threads=1, **options)


@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("reg", [0.5, 0.05, 0.01])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5)], ids=["plain", "weighted"])
@pytest.mark.parametrize("first", [0, 1000], ids=["by a factor", "by products"])
def test_it_is_the_derivative_of_the_gradient(weights, reg, reg_m, first, using):
    using(CURVATURE, first_steps=first)
    x, y, a, b = cloud_pair(d=3 if weights else 2)
    a[2], b[3] = 0.0, 0.0  # which do not count
    a = a / a.sum()
    b = b / b.sum()
    w = np.random.default_rng(1).normal(size=x.shape)
    h = 1e-5
    there, back = (solved(x + t * w, y, a, b, reg, reg_m, weights).gradient().x for t in (h, -h))
    got = solved(x, y, a, b, reg, reg_m, weights).hvp(w, tol=1e-10)
    want = (there - back) / (2 * h)
    assert (got[2] == 0).all()
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("m", "n"), [(40, 55), (55, 40)])
@pytest.mark.parametrize("reg_m", [np.inf, (np.inf, 0.5)], ids=str)
def test_clusters_that_hardly_exchange_mass(m, n, reg_m):
    """Conjugate gradients once took 2000 steps for such clusters, and warned."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 3, (k, 1)) + 0.02 * rng.normal(size=(k, 2)) for k in (m, n))
    result = solved(x, y, np.full(m, 1 / m), np.full(n, 1 / n), 2e-3, reg_m)
    rows = rng.normal(size=m) / m
    cols = rng.normal(size=n) / n
    cols -= (cols.sum() - rows.sum()) / n
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        df, dg = curvature.potentials_moved(result, rows, cols, False, 1e-9, 1000)
    P = result.plan
    rates = [0.002 / rho for rho in np.broadcast_to(reg_m, 2)]
    diagonals = (np.diag((1 + k) * z) for k, z in zip(rates, (P.sum(1), P.sum(0)), strict=True))
    image = np.block([[next(diagonals), P], [P.T, next(diagonals)]]) @ np.r_[df, dg]
    assert np.abs(image - np.r_[rows, cols]).max() <= 1e-9 * np.abs(np.r_[rows, cols]).max()


def test_it_is_symmetric_and_a_loose_tol_is_nearly_right(using):
    using(CURVATURE, most_factored=0)
    x, y, a, b = cloud_pair(80, 60)
    result = solved(x, y, a, b, 0.01, 10.0, tol=1e-10)
    v, w = np.random.default_rng(2).normal(size=(2, *x.shape))
    exact, loose = (result.hvp(w, tol=tol) for tol in (1e-10, 1e-3))
    size = np.linalg.norm(v) * np.linalg.norm(exact)
    assert (v * exact).sum() == pytest.approx((w * result.hvp(v, tol=1e-10)).sum(), abs=1e-8 * size)
    assert np.abs(loose - exact).max() <= 1e-2 * np.abs(exact).max()
    assert np.abs(result.hvp(np.zeros_like(x))).max() == 0.0
    with pytest.warns(mapuot.ConvergenceWarning, match="max_steps"):
        result.hvp(x, tol=1e-12, max_steps=1)


@pytest.mark.parametrize("symmetric", [None, False])
@pytest.mark.parametrize("reg_m", [1.0, 0.02, np.inf])
@pytest.mark.parametrize("reg", [0.5, 0.02, 1e-3])
def test_both_sides_of_a_cloud_with_itself_move(reg, reg_m, symmetric):
    x, _, a, _ = cloud_pair(14)
    a[3] = 0.0
    w = np.random.default_rng(1).normal(size=x.shape)
    h = 1e-6 if reg < 0.01 else 1e-5
    moved = (x + t * w for t in (0.0, h, -h))
    result, there, back = (solved(z, z.copy(), a, a, reg, reg_m, symmetric=symmetric) for z in moved)
    want = (there.gradient().x + there.gradient().y - back.gradient().x - back.gradient().y) / (2 * h)
    got = result.hvp(w, tol=1e-10, both=True)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
    slope = result.gradient()
    value = [2 * (w * z.gradient().x).sum() for z in (there, back)]
    assert (there.dual - back.dual) / (2 * h) == pytest.approx(np.mean(value), rel=1e-4, abs=1e-9)
    np.testing.assert_array_equal(slope.x, slope.y)


# ---- metric "inner": minus the product of two points, with addends of rows and columns


def drawn(seed):
    """Return a cloud of any size, dimension and distance from the origin, and the same problem in arrays."""
    rng = np.random.default_rng([43, seed])
    (m, n) = rng.integers(1, 50, 2)
    d = rng.integers(1, 20)
    away = 10.0 ** rng.integers(-1, 3) * rng.integers(0, 2)
    x, y = (rng.normal(size=(k, d)) + away * rng.normal(size=d) for k in (m, n))
    r = rng.normal(size=m)
    c = rng.normal(size=n)
    if seed % 3 == 0:
        # squared distances: their terms cancel
        r = (x**2).sum(1) / 2
        c = (y**2).sum(1) / 2
    scale = 10.0 ** rng.uniform(-1, 1)
    if seed % 4 == 1:
        weights = rng.random(d) + 0.1
    else:
        weights = np.ones(d)
    r = r - float((r[:, None] + c - (x * weights) @ y.T).min())
    M = scale * (r[:, None] + c - (x * weights) @ y.T)
    span = float(np.ptp(M)) or 1.0
    a = rng.random(m) + 0.1
    b = rng.random(n) + 0.1
    reg_m = tuple(span * 10.0 ** rng.uniform(-2, 1) if rng.random() < 0.8 else math.inf for _ in range(2))
    b *= a.sum() / b.sum() if min(reg_m) == math.inf else 1.0
    form = (None, "auto")[seed % 2]
    given = weights if seed % 4 == 1 else None
    cloud = mapuot.PointCloud(x, y, "inner", scale, given, form=form, addends=(r, c))
    return cloud, Case(M, a, b, span * 10.0 ** rng.uniform(-2.2, 0), reg_m)


@pytest.mark.parametrize("backend", ["cpu", *CUDA])
@pytest.mark.parametrize("part", range(4))
def test_certificates_of_random_problems_are_true(backend, part):
    for seed in range(10 * part, 10 * part + (10 if backend == "cpu" else 3)):
        cloud, case = drawn(seed)
        np.testing.assert_allclose(np.asarray(cloud), case.M, atol=1e-11 * cloud.scale * np.abs(cloud.x).max() ** 2)
        precision = ("auto", "float64")[seed % 2]
        tol = 10.0 ** -(2 + seed % 7)
        result = case.replace(M=cloud).solve(backend=backend, precision=precision, tol=tol)
        assert result.converged, result
        worth = 4e-13 * float(sum(np.abs(z).max() for z in (*cloud.addends, cloud.x)) ** 2) / case.reg
        if worth < 1e-9:  # else the costs in float64 differ from the costs that the oracle reads
            verify(result, case)


def test_turned_clouds_and_parts_have_the_same_costs():
    """Transposed clouds and parts have equal costs up to rounding: BLAS may sum other shapes in another order."""
    cloud, _ = drawn(5)
    for one, right in ((cloud.transpose(), np.asarray(cloud).T), (cloud[1:], np.asarray(cloud)[1:])):
        np.testing.assert_allclose(np.asarray(one), right, rtol=0, atol=2 * cloud._cost.error(0.0))
    assert not cloud._cost.symmetric(None)
    for given, kept in zip(cloud.transpose().transpose().addends, cloud.addends, strict=True):
        np.testing.assert_array_equal(given, kept)
    numbers = mapuot.PointCloud(np.eye(3), np.ones((4, 3)), "inner", 2.0, addends=(1.0, np.arange(4.0)))
    np.testing.assert_allclose(np.asarray(numbers), np.tile(2 * np.arange(4.0), (3, 1)))


# ---- costs between the nodes of grids: the answers of the matrix, one axis after the other


GRIDS = {"line": mapuot.Grid(17, 0.1, 2.0, target=23, offset=0.45), "image": mapuot.Grid((6, 7), (0.2, 0.15)),
         "volume": mapuot.Grid((3, 4, 5), 0.3, target=(4, 2, 3), offset=(0.1, -0.4, 0.2))}  # fmt: skip


@pytest.fixture(params=GRIDS)
def grid(request):
    return GRIDS[request.param]


def masses(grid, ratio=1.3, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.random(nodes) + 0.1 for nodes in grid.nodes)
    return a / a.sum(), ratio * b / b.sum()


@pytest.mark.parametrize("reg", [1.0, 1e-2, 1e-5])
def test_sums_are_within_their_bound(grid, reg):
    """Sums with weights over 1e-300 to 1 are within their bound of long-double sums of logarithms over all pairs."""
    rng = np.random.default_rng(0)
    t = rng.uniform(-690, 0, grid.shape[1])
    products = GridOperator(grid._cost, reg, threads=1)
    terms = t.astype(np.longdouble) - np.asarray(grid).astype(np.longdouble) / np.longdouble(reg)
    top = terms.max(1)
    want = top + np.log(np.exp(terms - top[:, None]).sum(1))
    exponents = 2.0**-50 * (float(np.asarray(grid).max()) / reg + 690) + grid._cost.error(np.asarray(grid).max()) / reg
    assert np.abs(products.log_dot(t) - want).max() <= products.apart(exponents)
    assert_allclose(products.log_dot(t, 0), np.log((np.exp(terms - top[:, None]) * grid._cost.axes[0][
        np.unravel_index(np.arange(grid.shape[0]), grid.nodes[0])[0]
    ][:, np.unravel_index(np.arange(grid.shape[1]), grid.nodes[1])[0]]).sum(1)) + top, rtol=1e-9)  # fmt: skip


def test_what_rounding_hides_is_no_certificate():
    """Row and column sums that round differently limit tol; the solver soon reports that it cannot reach less."""
    grid = mapuot.Grid((6, 7), 0.2)
    a, b = masses(grid)
    with pytest.warns(mapuot.ConvergenceWarning, match="rounding"):
        result = mapuot.solve(grid, a, b, reg=1e-3, reg_m=1e3, tol=1e-13)
    assert (result.status, result.converged) == ("stalled", False)
    assert 1e-13 < result.error_bound < 1e-6
    assert result.n_passes < 400
    known = mapuot.solve(grid, a, b, reg=1e-3, reg_m=1e3, tol=1e-13, tol_gap=1e-9)
    assert known.converged
    assert known.gap <= 1e-9 * abs(known.dual)


def test_what_is_too_large_is_refused_before_it_is_made():
    grid = mapuot.Grid((100, 100, 100))
    result = mapuot.solve(grid, reg=1e4, reg_m=1e4, tol=1.0)
    for call, name in (
        (lambda: result.plan, "rows of the plan"), (lambda: result.top_k(1), "top_k makes all"),
        (lambda: result.sparse(0.0), "sparse makes all"), (lambda: result.sparse(keep=0.5), "sparse makes all"),
        (lambda: result.sample(2, 0, replace=False), r"sample\(replace=False\) makes all"),
    ):  # fmt: skip
        with pytest.raises(MemoryError, match=f"{name}.*barycentric_map"):
            call()
    assert result.rows(5, 7).shape == (2, 1_000_000)
    assert result.sample(2, 0)[1].shape == (2,)  # of two rows
