"""Uses of a result (sharpness, maps, interpolation, pairs) match independent formulas."""

import contextlib
import pickle
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from conftest import CUDA
from judge import divergence
from problems import clouds
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import chisquare

import mapuot
from mapuot.api.tune import secants
from mapuot.flow import OTPlanSampler

RNG = np.random.default_rng(0)
X = RNG.random((30, 2))
Y = RNG.random((40, 2)) + 0.1
COSTS = {"dense": ((X[:, None] - Y) ** 2).sum(-1), "points": mapuot.PointCloud(X, Y),
         "sparse": sparse.csr_array(((X[:, None] - Y) ** 2).sum(-1) * (RNG.random((30, 40)) < 0.5)),
         "grid": mapuot.Grid((5, 6), spacing=0.2)}  # fmt: skip


def entropy(p):
    return -(p[p > 0] * np.log(p[p > 0])).sum()


@pytest.mark.parametrize("reference", ["product", "uniform", "matrix"])
@pytest.mark.parametrize("kind", COSTS)
def test_sharpness_is_the_share_of_the_entropy_that_the_plan_lacks(kind, reference):
    if reference == "matrix" and kind in ("sparse", "grid"):
        pytest.skip("takes a reference of its own kind, or none")
    M = COSTS[kind]
    if reference == "matrix":
        c = RNG.random(M.shape)
    else:
        c = reference
    result = mapuot.solve(M, RNG.random(M.shape[0]), reg=0.02, reg_m=(1.0, 0.1), reference=c)
    if kind == "sparse":
        P = result.plan.toarray()
    else:
        P = np.asarray(result.plan)
    P = P / P.sum()
    both = entropy(P.sum(0)), entropy(P.sum(1))
    assert abs(result.sharpness - (sum(both) - entropy(P)) / min(both)) < 1e-9


def test_sharpness_of_the_extremes():
    M = 1.0 - np.eye(8)
    sharp, blurred = (mapuot.solve(M, reg=reg, reg_m=1.0) for reg in (1e-3, 1e4))
    assert abs(sharp.sharpness - 1) < 1e-9
    assert blurred.sharpness < 1e-6
    assert "a smaller reg" in blurred._repr_html_()
    assert "a smaller reg" not in sharp._repr_html_()
    assert mapuot.solve(M[:1], reg=1.0, reg_m=1.0).sharpness == 1


@pytest.mark.parametrize("light", [1e-9, 1e-14, 1e-18, 1e-40, 1e-200])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_sharpness_where_one_point_has_nearly_all_mass(kind, light):
    """Sharpness is right where one mass of two columns hides all entropies: entries one by one, in logarithms."""
    M = COSTS["dense"][:, :2]
    b = np.array([1.0, light])
    result = mapuot.solve(sparse.csr_array(M) if kind == "sparse" else M, b=b, reg=0.02, reg_m=1e3, tol=1e-9)
    log = (result.log_u + np.log(1 / 30))[:, None] + result.log_v + np.log(b) - M / 0.02
    log -= np.log(np.exp(log).sum())
    log_r = np.log(np.exp(log).sum(1))
    small = np.exp(log[:, 1])
    of_small = small @ (
        log[:, 1] - log_r - np.log(small.sum())
    )  # the light column; the next line has the other column, P = r - small
    of_large = np.exp(log[:, 0]) @ (np.log1p(-small / np.exp(log_r)) - np.log1p(-small.sum()))
    least = -small.sum() * np.log(small.sum()) - (1 - small.sum()) * np.log1p(-small.sum())
    assert result.sharpness == pytest.approx((of_small + of_large) / least, rel=1e-3)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine", "wfr"])
@pytest.mark.parametrize("side", ["rows", "cols"])
def test_the_map_at_the_sample_is_the_barycentric_map(metric, side):
    result = mapuot.solve(mapuot.PointCloud(X, Y, metric, weights=[1.0, 2.0]), reg=0.03, reg_m=(1.0, 0.5))
    P = np.asarray(result.plan)
    if side == "rows":
        here, there = X, Y
    else:
        here, there, P = Y, X, P.T
    np.testing.assert_allclose(result.map(here, side=side), P @ there / P.sum(1)[:, None], atol=1e-9)
    np.testing.assert_allclose(result.map(here, there[:, 0], side), P @ there[:, 0] / P.sum(1), atol=1e-9)


@pytest.mark.parametrize("metric", ["sqeuclidean", "wfr"])
def test_what_lies_between_begins_at_a_and_ends_at_b(metric):
    a = RNG.random(30)
    b = RNG.random(40)
    far = np.vstack([X, [[9.0, 9.0]]])  # sends nothing, by "wfr" or by its price
    result = mapuot.solve(mapuot.PointCloud(far, Y, metric), np.append(a, 0.3), b, reg=0.02, reg_m=0.5)
    for t, points, masses in ((0.0, far, np.append(a, 0.3)), (1.0, Y, b)):
        found = result.interpolate(t, keep=1.0)
        for k, point in enumerate(points):
            here = np.abs(found.points - point).max(1) < 1e-12
            assert abs(found.masses[here].sum() - masses[k]) < 1e-9


def test_between_two_points_is_the_geodesic_of_two_masses():
    d, m0, m1 = 1.1, 0.7, 1.9
    result = mapuot.solve(mapuot.PointCloud([[0.2]], [[0.2 + d]], "wfr"), [m0], [m1], reg=1e-3, reg_m=1.0)
    step = 1e-5
    length = m0 + m1 - 2 * np.sqrt(m0 * m1) * np.cos(d)
    for t in (0.1, 0.45, 0.8):
        before, now, after = (result.interpolate(s) for s in (t - step, t, t + step))
        # a straight line of the plane in polar coordinates: the radius is the root of the mass, the angle the way
        z = (1 - t) * np.sqrt(m0) + t * np.sqrt(m1) * np.exp(1j * d)
        np.testing.assert_allclose(now.masses, abs(z) ** 2, rtol=1e-12)
        np.testing.assert_allclose(now.points[:, 0], 0.2 + np.angle(z), rtol=1e-12)
        np.testing.assert_allclose(now.velocity[:, 0], (after.points - before.points)[:, 0] / (2 * step), rtol=1e-6)
        np.testing.assert_allclose(now.growth, np.log(after.masses / before.masses) / (2 * step), rtol=1e-6)
        speed = now.masses * (now.velocity[:, 0] ** 2 + now.growth**2 / 4)  # squared; the same all the way
        np.testing.assert_allclose(speed, length, rtol=1e-9)


def test_pairs_without_replacement_are_drawn_one_after_the_other():
    result = mapuot.solve(((np.arange(3.0)[:, None] - np.arange(2)) ** 2), reg=1.0, reg_m=1.0)
    p = np.asarray(result.plan).ravel() / result.plan.sum()
    wanted = np.array([[0 if i == j else p[i] * p[j] / (1 - p[i]) for j in range(6)] for i in range(6)])
    seen = np.zeros((6, 6))
    rng = np.random.default_rng(1)
    for _ in range(4000):
        i, j = result.sample(2, rng, replace=False)
        first, second = 2 * i + j
        seen[first, second] += 1
    off = ~np.eye(6, dtype=bool)
    assert not seen[~off].any()
    assert chisquare(seen[off], 4000 * wanted[off]).pvalue > 1e-3
    i, j = result.sample(6, 0, replace=False)
    assert {*zip(i.tolist(), j.tolist(), strict=True)} == {(i, j) for i in range(3) for j in range(2)}


@pytest.mark.parametrize(("mass", "sharpness"), [(0.9, 0.6), (0.5, 0.3)])
@pytest.mark.parametrize("kind", ["dense", "points", "grid"])
def test_tune_finds_the_mass_and_the_sharpness(kind, mass, sharpness):
    a = np.full(30, 2 / 30)
    found = mapuot.tune(COSTS[kind], a, mass=mass, sharpness=sharpness)
    again = mapuot.solve(COSTS[kind], a, reg=found.reg, reg_m=found.reg_m)
    assert abs(again.mass / np.sqrt(2) - mass) < 0.01 * mass
    assert abs(again.sharpness - sharpness) < 0.01 * sharpness
    assert found.result.converged
    assert len(found.curve) > 3


def odds_apart(x, wanted):
    return abs(np.log(x / (1 - x)) - np.log(wanted / (1 - wanted)))


@pytest.mark.parametrize(("penalty", "tries", "least"), [("kl", 8, 6), ("l2", 6, 4), ("tv", 3, 1)])
def test_tune_returns_what_was_asked_or_names_the_nearest(penalty, tries, least):
    """The odds are within 1 % of the given odds; a share that jumps, or that no plan has, is an error."""
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(tries):
        x = rng.integers(0, 4, (rng.integers(2, 20), 2))
        y = rng.normal(size=(rng.integers(2, 20), 2))
        M = ((x[:, None] - y) ** 2).sum(-1) * 10 ** rng.uniform(-3, 3)
        a = rng.dirichlet(np.ones(len(x)))
        b = rng.dirichlet(np.ones(len(y)))
        mass, sharpness = rng.uniform(0.2, 0.95, 2)
        tuned = None
        with contextlib.suppress(ValueError):
            tuned = mapuot.tune(M, a, b, mass=mass, sharpness=sharpness, penalty=penalty, max_passes=500)
        if tuned is None:
            continue
        found += 1
        assert odds_apart(tuned.result.mass, mass) <= 0.01
        assert odds_apart(tuned.result.sharpness, sharpness) <= 0.01
        assert tuned.result.status not in ("underflow", "not finite")
    assert found >= least


def test_tune_tells_where_a_share_jumps():
    """As reg_m grows, all mass leaves a single pair at once: no reg_m moves half of it."""
    M = np.array([[1.0]])
    with pytest.raises(ValueError, match=r"mass must be a share .* reg 1e-05, got 0\.3: the nearest found are"):
        mapuot.tune(M, mass=0.3, reg=1e-5, penalty="tv")


def test_tune_returns_no_solve_that_failed(monkeypatch):
    monkeypatch.setattr(sys.modules["mapuot.api.tune"], "FAILED", ("converged",))
    with pytest.raises(ValueError, match=r"the nearest that was found has mass 0\.\d+ and .* ended 'converged'"):
        mapuot.tune(COSTS["dense"], mass=0.9, sharpness=0.6)


def test_secants_end_where_both_functions_are_zero_alone():
    root = np.array([0.3, -0.2])
    jump = np.array([0.5, 0.5])
    x = secants(lambda x: 2 * (np.array(x) - root) + 0.1 * (np.array(x) - root) ** 2, (0.0, 0.0))
    np.testing.assert_allclose(x, root, atol=2e-3)
    assert secants(lambda x: np.array(x) - root + jump * np.sign(np.array(x) - root), (0.0, 0.0)) is None


def test_tune_keeps_what_is_given():
    assert mapuot.tune(COSTS["dense"], sharpness=0.5, reg_m=0.3).reg_m == pytest.approx(0.3)
    found = mapuot.tune(COSTS["dense"], mass=0.7, reg=0.05)
    assert found.reg == pytest.approx(0.05)
    assert found.result.mass == pytest.approx(0.7, rel=0.01)


def scaled_calls():
    M = ((X[:, None] - X) ** 2).sum(-1)
    clouds = [X[:9], X[9:14] + 1, X[14:]]
    A = RNG.random((3, 30))
    several = RNG.random((3, 30, 40))
    points = np.concatenate(clouds)
    pairs = [COSTS["sparse"], 2 * COSTS["sparse"]]
    of_clouds = mapuot.PointCloud(clouds, Y)
    tree = {(0, 1): M, (1, 2): 3 * M}
    calls = {
        "batch": (M, lambda **x: mapuot.solve_batch(M, A, **x)),
        "costs each": (several, lambda **x: mapuot.solve_batch(several, **x)),
        "sparse each": (np.concatenate([one.data for one in pairs]), lambda **x: mapuot.solve_batch(pairs, **x)),
        "clouds": (((points[:, None] - Y) ** 2).sum(-1), lambda **x: mapuot.solve_batch(of_clouds, **x)),
        "divergence": (M, lambda **x: mapuot.sinkhorn_divergence(M, A[0], A[1], **x)),
        "pairwise": (((points[:, None] - points) ** 2).sum(-1), lambda **x: mapuot.pairwise(clouds, **x)),
        "barycenter": (M, lambda **x: mapuot.barycenter(M, A, **x)),
        "tree": (np.stack([*tree.values()]), lambda **x: mapuot.multimarginal(tree, [A[0], None, A[1]], **x)),
        "array": (several, lambda **x: mapuot.multimarginal(several, [np.ones(k) for k in (3, 30, 40)], **x)),
        **{name: (cost.data if name == "sparse" else np.asarray(cost), partial(mapuot.solve, cost))
           for name, cost in COSTS.items()},
        "path": (M, lambda reg, **x: [*mapuot.path(M, regs=[4 * reg, reg], reg_ms=x.pop("reg_m"), **x)][1]),
    }  # fmt: skip
    return [pytest.param(*call, id=name) for name, call in calls.items()]


@pytest.mark.parametrize("how", ["median", "mean", "std", "max"])
@pytest.mark.parametrize("size", [1e-200, 1e300])
def test_a_unit_of_costs_near_the_limits_of_float64(how, size):
    """The squares of such costs are 0 or inf, and the std was refused as 0."""
    costs = RNG.random((6, 7))
    found = mapuot.solve(size * costs, reg=0.1, reg_m=1.0, scale_cost=how)
    assert found.converged
    assert found.scale_cost == pytest.approx(size * getattr(np, how)(costs), rel=1e-12)
    x, y = RNG.random((2, 3, 4, 2))
    each = mapuot.solve_batch(
        mapuot.PointCloud(x * size**0.5, y * size**0.5), reg=0.1, reg_m=1.0, scale_cost=how, scale_each=True
    )
    wanted = [size * getattr(np, how)(np.square(p[:, None] - q).sum(-1)) for p, q in zip(x, y, strict=True)]
    np.testing.assert_allclose(each.scale_cost, wanted, rtol=1e-9)


@pytest.mark.parametrize("across", [0.0, -1.0, np.nan])
def test_a_sampler_tells_what_across_may_be(across):
    with pytest.raises(ValueError, match="across must be > 0, or inf, got"):
        OTPlanSampler("sinkhorn", across=across)


@pytest.mark.parametrize("how", ["median", "mean", "max"])
@pytest.mark.parametrize(("costs", "call"), scaled_calls())
def test_every_call_that_takes_reg_takes_scale_cost(costs, call, how):
    scale = float(getattr(np, how)(costs))
    found = call(reg=0.1, reg_m=2.0, scale_cost=how)
    wanted = call(reg=0.1 * scale, reg_m=2.0 * scale)
    if isinstance(found, (float, np.ndarray)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9 * scale)
        return
    assert found.scale_cost == pickle.loads(pickle.dumps(found)).scale_cost == pytest.approx(scale)
    for one, other in zip(found.log_u, wanted.log_u, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    if isinstance(found, mapuot.BatchResult):
        assert found[0].scale_cost == found.scale_cost


@pytest.mark.parametrize("how", ["median", "mean"])
@pytest.mark.parametrize("kind", ["dense", "sparse", "points"])
def test_weighted_scales_do_not_see_merged_points(how, kind):
    """Points with counts have the scale of the points one by one."""
    rng = np.random.default_rng(3)
    x = rng.random((9, 2))
    y = rng.random((8, 2))
    counts = rng.integers(1, 5, 9)
    others = rng.integers(1, 5, 8)

    def cost(x, y):
        M = ((x[:, None] - y) ** 2).sum(-1)
        return {"dense": M, "sparse": sparse.csr_array(M * (M > 0.05)), "points": mapuot.PointCloud(x, y)}[kind]

    numbers = {"reg": 0.1, "reg_m": 1.0}
    merged = mapuot.solve(cost(x, y), counts / 20, others / 20, scale_cost=f"weighted_{how}", **numbers)
    one_by_one = mapuot.solve(cost(x.repeat(counts, 0), y.repeat(others, 0)), scale_cost=how, **numbers)
    assert merged.scale_cost == pytest.approx(one_by_one.scale_cost, rel=1e-12)
    alike = mapuot.solve(cost(x, y), scale_cost=f"weighted_{how}", **numbers)
    assert alike.scale_cost == pytest.approx(mapuot.solve(cost(x, y), scale_cost=how, **numbers).scale_cost, rel=1e-12)
    assert merged.scale_cost != pytest.approx(alike.scale_cost, rel=1e-3)


def test_maps_know_the_points_of_both_sides():
    """Without targets, the map of points and of grids takes the points of the other side."""
    rng = np.random.default_rng(2)
    x, y = rng.random((7, 2)), rng.random((5, 2))
    grid = mapuot.Grid((3, 4), 0.3, target=(2, 5), offset=(0.1, -0.2))
    for cost, rows, cols in ((mapuot.PointCloud(x, y), x, y), (grid, grid.points(), grid.points("cols"))):
        result = mapuot.solve(cost, reg=0.1, reg_m=1.0)
        np.testing.assert_allclose(
            result.barycentric_map(), result.plan @ cols / result.plan.sum(1)[:, None], rtol=1e-9
        )
        back = result.plan.T @ rows / result.plan.sum(0)[:, None]
        np.testing.assert_allclose(result.barycentric_map(side="cols"), back, rtol=1e-9)
    with pytest.raises(TypeError, match="Y must be given, the points of the columns, for an array"):
        mapuot.solve(np.ones((3, 4)), reg=0.1, reg_m=1.0).barycentric_map()


def test_a_grid_is_interpolated_as_its_points():
    rng = np.random.default_rng(4)
    a, b = rng.random((4, 5)) / 20, rng.random((4, 5)) / 20
    grid = mapuot.Grid((4, 5), 0.5)
    way = mapuot.solve(grid, a, b, reg=0.1, reg_m=1.0, tol=1e-10).interpolate(0.3)
    cloud = mapuot.PointCloud(grid.points(), grid.points())
    right = mapuot.solve(cloud, a.ravel(), b.ravel(), reg=0.1, reg_m=1.0, tol=1e-10).interpolate(0.3)
    assert way.masses.sum() == pytest.approx(0.7 * a.sum() + 0.3 * b.sum(), rel=1e-12)
    for power in (1, 2):  # moments, since the pairs come in another order
        np.testing.assert_allclose(way.masses @ way.points**power, right.masses @ right.points**power, rtol=1e-6)


@pytest.mark.parametrize("how", ["weighted_median", "weighted_mean"])
def test_weighted_scales_of_batches(how):
    """A batch has the scale of its points one by one; with scale_each each problem has the scale of its own solve."""
    rng = np.random.default_rng(5)
    x = rng.random((3, 9, 2))
    y = rng.random((3, 8, 2))
    A = rng.integers(0, 5, (3, 9)) / 20
    B = rng.integers(1, 5, (3, 8)) / 20
    M = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)
    numbers = {"reg": 0.1, "reg_m": 1.0, "scale_cost": how}
    lists = [*x[:, :7]], [*y]  # clouds of one size, and of two
    lists[0][1] = x[1]
    masses = [A[0, :7], A[1], A[2, :7]]
    for costs, weights, single in (
        (M, A, M), (mapuot.PointCloud(x, y), A, M), (mapuot.PointCloud(*lists), masses, None),
        ([sparse.csr_array(one) for one in M], A, M),
    ):  # fmt: skip
        each = mapuot.solve_batch(costs, weights, B, scale_each=True, **numbers)
        rows = lists[0] if single is None else x
        right = [mapuot.solve_sample(*z, **numbers).scale_cost for z in zip(rows, y, weights, B, strict=True)]
        np.testing.assert_allclose(each.scale_cost, right, rtol=1e-12)
        whole = mapuot.solve_batch(costs, weights, B, **numbers)
        spread = [np.outer(a, b).ravel() for a, b in zip(weights, B, strict=True)]
        values = [((r[:, None] - c) ** 2).sum(-1).ravel() for r, c in zip(rows, y, strict=True)]
        counted = np.repeat(np.concatenate(values), np.rint(400 * np.concatenate(spread)).astype(int))
        if how == "weighted_median":
            right = np.median(counted)
        else:
            right = counted.mean()
        assert whole.scale_cost == pytest.approx(right, rel=1e-12)
    shared = mapuot.solve_batch(M[0], A, B[0], scale_each=True, **numbers)
    right = [mapuot.solve(M[0], a, B[0], **numbers).scale_cost for a in A]
    np.testing.assert_allclose(shared.scale_cost, right, rtol=1e-12)


COUNTS = 2, 9, 8  # problems, rows and columns


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"A": np.ones((2, 4))}, ValueError, r"A must have shape \(p, 9\) or \(9,\), got \(2, 4\)"),
        ({"A": np.full((2, 9), np.nan)}, ValueError, "A must be finite, problem 0 is not"),
        ({"B": -np.ones((2, 8))}, ValueError, "B must be >= 0, problem 0 is not"),
        ({"A": "words"}, TypeError, "A must hold real numbers"),
        ({"A": np.arange(2.0)[:, None] * np.ones(9)}, ValueError, "costs of problem 0 must be a positive finite"),
        ({"reg": [0.1, 0.1, 0.1]}, ValueError, r"reg must be a positive number, or one for each problem, \(2,\)"),
        ({"reg": [0.1, -0.1]}, ValueError, "problem 1 has -0.1"),
        ({"reg_m": "words"}, TypeError, "reg_m must be a number, inf"),
        ({"reg_m": np.ones(3)}, NotImplementedError, r"reg_m must be one number .* got shape \(3,\)"),
        ({"scale_cost": "mode"}, ValueError, "scale_cost must be one of .*'weighted_mean'"),
    ],
)
def test_mistakes_with_weighted_scales_are_named(arguments, kind, text):
    M = np.random.default_rng(0).random(COUNTS)
    given = {"reg": 0.1, "reg_m": 1.0, "scale_cost": "weighted_mean", "scale_each": True}
    with pytest.raises(kind, match=text):
        mapuot.solve_batch(M, **given | arguments)


@pytest.mark.parametrize("units", [{}, {"scale_cost": "mean", "scale_each": True}], ids=["alike", "each"])
def test_balanced_sides_take_no_reg_m_beside_own_ones(units):
    """A balanced side has reg_m None, while the other side has one reg_m for each problem."""
    rng = np.random.default_rng(0)
    M = rng.random(COUNTS)
    penalty = "balanced", "kl"
    batch = mapuot.solve_batch(M, reg=0.1, reg_m=(None, np.array([[1.0], [2.0]])), penalty=penalty, **units)
    for k, rho in enumerate((1.0, 2.0)):
        how = units.get("scale_cost")
        alone = mapuot.solve(M[k], reg=0.1, reg_m=(None, rho), penalty=penalty, scale_cost=how)
        assert batch.objective[k] == pytest.approx(alone.objective, rel=1e-6)


def test_clouds_of_several_sizes_may_have_no_mass():
    rng = np.random.default_rng(0)
    x = [rng.random((k, 2)) for k in (4, 5, 6)]
    masses = [np.zeros(4), np.ones(5), rng.random(6)]
    batch = mapuot.solve_batch(mapuot.PointCloud(x, x), masses, None, reg=0.1, reg_m=1.0)
    assert batch.mass[0] == 0
    for k in (1, 2):
        alone = mapuot.solve(mapuot.PointCloud(x[k], x[k]), masses[k], None, reg=0.1, reg_m=1.0)
        assert batch.objective[k] == pytest.approx(alone.objective, rel=1e-6)
    assert np.isfinite(mapuot.pairwise(x, masses, reg=0.1, reg_m=1.0)).all()


@pytest.mark.parametrize(
    ("masses", "kind", "text"),
    [
        ("words", TypeError, "masses must be a vector for each cloud, got 'words'"),
        ([np.ones(3), np.ones(5)], ValueError, "masses must hold one mass for each point"),
        ([np.ones(4), -np.ones(5)], ValueError, "masses must be >= 0, those of cloud 1 are not"),
        ([np.ones(4), np.full(5, np.inf)], ValueError, "masses must be finite, those of cloud 1 are not"),
    ],
)
def test_mistakes_in_masses_of_clouds_are_named(masses, kind, text):
    x = [np.random.default_rng(0).random((k, 2)) for k in (4, 5)]
    for units in ({}, {"scale_cost": "weighted_mean"}, {"scale_cost": "weighted_mean", "scale_each": True}):
        with pytest.raises(kind, match=text):
            mapuot.pairwise(x, masses, reg=0.1, reg_m=1.0, **units)


def test_weighted_scales_of_divergences_and_spaces():
    rng = np.random.default_rng(6)
    x = rng.random((6, 2))
    w = np.array([0.0, 1, 2, 1, 4, 2]) / 10
    M = ((x[:, None] - x) ** 2).sum(-1)
    numbers = {"reg": 0.1, "reg_m": 1.0}
    v = w[::-1].copy()
    unit = float(w @ M @ v)
    found = mapuot.sinkhorn_divergence(M, w, v, scale_cost="weighted_mean", **numbers)
    assert found == pytest.approx(mapuot.sinkhorn_divergence(M, w, v, reg=0.1 * unit, reg_m=unit), rel=1e-9)
    clouds = [x, x[:4] + 0.1]
    masses = [w, w[1:5] / w[1:5].sum()]
    both = np.vstack(clouds)
    all_w = np.concatenate(masses)
    D = ((both[:, None] - both) ** 2).sum(-1)
    unit = float(all_w @ D @ all_w) / 4
    found = mapuot.pairwise(clouds, masses, scale_cost="weighted_mean", **numbers)
    np.testing.assert_allclose(found, mapuot.pairwise(clouds, masses, reg=0.1 * unit, reg_m=unit), rtol=1e-9)
    unit = float(masses[0] @ D[:6, 6:] @ masses[1])
    found = mapuot.pairwise(clouds, masses, scale_cost="weighted_mean", scale_each=True, **numbers)
    np.testing.assert_allclose(found, mapuot.pairwise(clouds, masses, reg=0.1 * unit, reg_m=unit), rtol=1e-9)
    alone = mapuot.gromov(x[1:], x[:4], w[1:], None, scale_cost="weighted_median", **numbers)
    beside = mapuot.gromov(x, x[:4], w, None, scale_cost="weighted_median", **numbers)  # x[0] has no mass
    assert alone.scale_cost == pytest.approx(beside.scale_cost, rel=1e-12)
    with pytest.raises(ValueError, match="a must be >= 0, problem 0 is not"):
        mapuot.sinkhorn_divergence(M, -w, v, scale_cost="weighted_mean", **numbers)
    with pytest.raises(ValueError, match="got 'weighted_mean': its costs belong to no pair of given masses"):
        mapuot.barycenter(M, np.stack([w, w]), reg=0.1, scale_cost="weighted_mean")


def test_weighted_scales_of_some_rows_weigh_the_rows_read():
    """If there are too many costs, only drawn rows are read; a row without mass counts nothing."""
    x = np.random.default_rng(1).random((2500, 2))
    a = np.where(np.arange(2500) < 1250, 1 / 1250, 0.0)
    x[1250:] += 10
    result = mapuot.solve(mapuot.PointCloud(x, x[:1250]), a, reg=1.0, reg_m=1.0, scale_cost="weighted_median")
    assert result.scale_cost == pytest.approx(np.median(((x[:1250, None] - x[:1250]) ** 2).sum(-1)), rel=0.03)


def test_ranges_have_no_scale():
    found = mapuot.solve(COSTS["dense"], reg=0.1, reg_m=(1.0, 0.2), penalty=("kl", "range"), scale_cost="max")
    assert np.abs(found.col_marginal * 40 - 1).max() < 0.2 + 1e-5


def test_the_scale_of_many_costs_is_that_of_some_rows():
    x = np.random.default_rng(1).random((3000, 2))
    result = mapuot.solve(mapuot.PointCloud(x), reg=0.1, reg_m=1.0, scale_cost="median")
    assert result.scale_cost == pytest.approx(np.median(((x[:, None] - x) ** 2).sum(-1)), rel=0.02)


# ---- bounds of the value without entropy


def linear(M, a, b, rho):
    """Return the optimum with total variation at rho, or balanced, by a linear program."""
    m, n = M.shape
    into = np.vstack([np.kron(np.eye(m), np.ones(n)), np.kron(np.ones(m), np.eye(n))])
    cost = M.ravel()
    A = into
    if np.isfinite(rho):
        cost = np.r_[cost, np.full(2 * (m + n), rho)]
        A = np.hstack([into, np.eye(m + n), -np.eye(m + n)])
    return linprog(cost, A_eq=A, b_eq=np.r_[a, b], method="highs").fun


def kl(ot, case, rho):
    """Return an upper bound on the optimum with Kullback-Leibler penalties: POT's value."""
    P = ot.unbalanced.mm_unbalanced(case.a, case.b, case.M, rho, div="kl", numItermax=20_000, stopThr=1e-12)
    return (P * case.M).sum() + sum(divergence("kl", P.sum(1 - k), (case.a, case.b)[k], rho).sum() for k in (0, 1))


@pytest.mark.parametrize("reg", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("rho", [0.05, 1.0, 5.0])
def test_bounds_beside_pot(reg, rho):
    ot = pytest.importorskip("ot")
    case = clouds(20, 15, reg, rho, ratio=1.3)
    low, high = case.solve().unregularised_bounds()
    right = kl(ot, case, rho)
    assert low <= right * (1 + 1e-12)
    assert right <= high * (1 + 1e-3)  # POT's plan is near the optimum, not at it
    assert high - low <= 8 * reg * case.b.sum()


@pytest.mark.parametrize("reg", [1e-2, 1e-5])
@pytest.mark.parametrize("rho", [0.05, 0.4, np.inf])
def test_bounds_beside_linear_programs(reg, rho):
    case = clouds(15, 12, reg, rho, ratio=1.0 if np.isinf(rho) else 1.3, penalty="tv" if np.isfinite(rho) else "kl")
    low, high = case.solve().unregularised_bounds()
    right = linear(case.M, case.a, case.b, rho)
    assert low <= right * (1 + 1e-9) <= high * (1 + 2e-9)
    assert right - low <= 8 * reg
    assert np.isinf(high) == np.isinf(rho)


@pytest.mark.parametrize("most", [1, 5, 20])
@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
def test_any_answer_gives_true_bounds(most):
    """Stopped solves, points, sparse costs and masses of 0 give true bounds."""
    case = clouds(15, 12, 1e-3, 0.4, penalty="tv")
    low, high = case.solve(max_passes=most).unregularised_bounds()
    assert low <= linear(case.M, case.a, case.b, 0.4) <= high
    rng = np.random.default_rng(1)
    x = rng.random((30, 2))
    y = rng.random((20, 2))
    a = np.r_[np.zeros(5), np.full(25, 0.04)]
    M = ((x[:, None] - y) ** 2).sum(-1)
    options = {"reg": 1e-3, "reg_m": 0.5, "max_passes": most}
    of_array = mapuot.solve(M, a, **options).unregularised_bounds()
    of_points = mapuot.solve(mapuot.PointCloud(x, y, form=None), a, **options).unregularised_bounds()
    of_pairs = mapuot.solve(sparse.csr_array(M), a, **options).unregularised_bounds()
    best = mapuot.solve(M, a, reg=1e-6, reg_m=0.5).unregularised_bounds()
    for low, high in (of_array, of_points, of_pairs):
        assert low <= best[1]
        assert high >= best[0]


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning", "ignore::mapuot.ConvergenceWarning")
def test_a_lower_bound_counts_its_rounding():
    """For one pair of given mass the bounds enclose its cost to the last digit."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        c = 10 ** rng.uniform(-2, 8)
        reg = 10 ** rng.uniform(-6, 0)
        low, high = mapuot.solve([[c]], [1.0], [1.0], reg=reg, reg_m=np.inf).unregularised_bounds()
        assert low <= c
        assert c - low <= 1e-12 * c
        assert high == np.inf


def test_a_lower_bound_counts_the_rounding_of_costs():
    """For two vectors in nearly one direction 1 - cos has few digits in float64, and the lower bound counts this."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = rng.random((1, 3)) + 0.1
        y = x + 1e-6 * rng.standard_normal((1, 3))
        cloud = mapuot.PointCloud(x, y, "cosine", form=None if seed % 2 else "auto")
        low, _ = mapuot.solve(cloud, reg=1e-3, reg_m=np.inf).unregularised_bounds()
        first, second = (z.astype(np.longdouble) / np.sqrt((z.astype(np.longdouble) ** 2).sum()) for z in (x, y))
        assert low <= 0.5 * ((first - second) ** 2).sum()


@pytest.mark.parametrize("reg_m", [(np.inf, 0.4), (0.4, np.inf), (np.inf, np.r_[np.full(11, 0.4), np.inf])])
def test_no_upper_bound_where_some_mass_is_given(reg_m):
    case = clouds(15, 12, 1e-3, reg_m)
    assert case.solve().unregularised_bounds()[1] == np.inf


def test_a_dual_value_counts_the_pairs_that_are_skipped():
    rng = np.random.default_rng(3)
    x = rng.random((700, 2))
    y = rng.random((600, 2))
    reg = 0.003
    rho = 0.5
    result = mapuot.solve(mapuot.PointCloud(x, y, truncate=10.0), reg=reg, reg_m=rho, tol=1e-2)
    assert result.skipped.hidden > 1e-9 * result.mass
    M = np.asarray(mapuot.PointCloud(x, y))
    a = 1 / 700
    b = 1 / 600
    mass = np.exp(result.log_u[:, None] + result.log_v - M / reg).sum() * a * b
    sides = (rho * t * -np.expm1(-reg * log / rho).sum() for t, log in ((a, result.log_u), (b, result.log_v)))
    assert mass > result.mass
    assert result.dual <= reg * (1 - mass) + sum(sides)


@pytest.mark.parametrize("penalty", ["tv", "l2"])
def test_points_without_mass_may_take_some_without_entropy(penalty):
    """With entropy the reference a b^T forbids the second row; without entropy all mass goes there, for .2 at most."""
    M = np.array([[10.0], [0.0]])
    a = np.array([1.0, 0.0])
    b = np.ones(1)
    result = mapuot.solve(M, a, b, reg=1e-3, reg_m=(0.1, 100.0), penalty=(penalty, "kl"))
    low, high = result.unregularised_bounds()
    assert low <= 0.2
    assert high > 9


# ---- pairs for flows: torchcfm's interface


@pytest.mark.parametrize("device", ["cpu", *CUDA])
@pytest.mark.parametrize(("method", "reg_m"), [("sinkhorn", np.inf), ("unbalanced", 0.5)])
def test_pairs_come_in_proportion_to_the_plan(method, reg_m, device):
    x0 = RNG.random((2000, 1)).round()
    x1 = RNG.random((2000, 1)).round() + 0.5
    M = (x0 - x1.T) ** 2
    P = mapuot.solve(M, reg=0.5, reg_m=reg_m).plan
    left, right = (np.eye(2)[(x - x.min()).astype(int)[:, 0]] for x in (x0, x1))
    wanted = left.T @ P @ right / P.sum()
    if device == "cuda":
        x0, x1 = (pytest.importorskip("torch").tensor(x, device=device) for x in (x0, x1))
    found = OTPlanSampler(method, 0.5, reg_m, seed=1).sample_plan_with_labels(x0, x1, x0[:, 0], x1[:, 0])
    x, y, i, j = (z.cpu().numpy() if device == "cuda" else z for z in found)
    np.testing.assert_array_equal((x[:, 0], y[:, 0]), (i, j))
    seen = [[((i == k) & (j == m + 0.5)).sum() for m in (0, 1)] for k in (0, 1)]
    assert chisquare(np.ravel(seen), 2000 * wanted.ravel()).pvalue > 1e-3


@pytest.mark.parametrize(("n", "d"), [(1, 2), (40, 1), (60, 2), (50, 20)])
def test_exact_pairs_are_the_cheapest_permutation(n, d):
    x0 = RNG.normal(size=(n, d))
    x1 = RNG.normal(size=(n, d)) + 0.5
    M = ((x0[:, None] - x1) ** 2).sum(-1)
    sampler = OTPlanSampler("exact", seed=0)
    j = sampler.assigned(x0, x1)
    assert sorted(j) == list(range(n))
    assert M[range(n), j].sum() == pytest.approx(M[linear_sum_assignment(M)].sum(), rel=1e-12)
    np.testing.assert_allclose(sampler.get_map(x0, x1) * n, np.eye(n)[j])
    x, y = sampler.sample_plan(x0, x1, replace=False)
    np.testing.assert_array_equal(np.sort(x, 0), np.sort(x0, 0))
    assert ((x - y) ** 2).sum() == pytest.approx(M[range(n), j].sum())
    torch = pytest.importorskip("torch")
    x, y = sampler.sample_plan(torch.tensor(x0), torch.tensor(x1))
    assert all(((x0[:, None] == z).all(-1)).any() for z in x.numpy())
    with pytest.raises(ValueError, match="x1 must hold 3 points"):
        sampler.assigned(np.zeros((3, 2)), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="method 'exact' has no entropic plan"):
        sampler.solved(x0, x1)


@pytest.mark.parametrize("kind", ["arrays", "tensors", "table"])
@pytest.mark.parametrize("method", ["sinkhorn", "unbalanced", "exact"])
def test_pairs_of_one_condition(method, kind):
    """With across=inf each label has its plan alone, with its share of x0; a finite across is a cost."""
    torch = pytest.importorskip("torch")
    x0 = RNG.normal(size=(30, 2))
    x1 = RNG.normal(size=(30, 2)) + 0.5
    y0 = np.repeat([3, 1, 2], [5, 10, 15])
    y1 = RNG.permutation(y0 if method == "exact" else np.repeat([3, 1, 2], [4, 20, 6]))
    given = x0, x1, y0, y1
    if kind == "tensors":
        given = tuple(map(torch.tensor, given))
    elif kind == "table":
        given = (*given[:2], *(np.stack([y, np.ones_like(y)], 1) for y in (y0, y1)))
    sampler = OTPlanSampler(method, 0.2, 1.0, across=np.inf, seed=0)
    P = sampler.get_map(*given)
    assert (P[y0[:, None] != y1] == 0).all()
    if method == "unbalanced":
        M = np.where(y0[:, None] == y1, ((x0[:, None] - x1) ** 2).sum(-1), np.inf)
        np.testing.assert_allclose(P, mapuot.solve(M, reg=0.2, reg_m=1.0).plan, atol=1e-6)
    else:
        for k in (1, 2, 3):
            own = np.ix_(y0 == k, y1 == k)
            alone = OTPlanSampler(method, 0.2).get_map(x0[own[0][:, 0]], x1[own[1][0]])
            np.testing.assert_allclose(P[own], alone * (y0 == k).mean(), atol=1e-6)
    i, j = (np.asarray(y).reshape(30, -1)[:, 0] for y in sampler.sample_plan_with_labels(*given)[2:])
    np.testing.assert_array_equal(i, j)
    near = OTPlanSampler(method, 0.2, 1.0, across=0.7, normalize_cost=True)
    M = ((x0[:, None] - x1) ** 2).sum(-1)
    M = M / M.max() + 0.7 * (y0[:, None] != y1)
    if method == "exact":
        assert M[range(30), near.assigned(*given)].sum() == pytest.approx(M[linear_sum_assignment(M)].sum())
    else:
        wanted = mapuot.solve(M, reg=0.2, reg_m=np.inf if method == "sinkhorn" else 1.0).plan
        np.testing.assert_allclose(near.get_map(*given), wanted, atol=1e-6)


def test_conditions_that_no_pair_can_meet():
    x = RNG.normal(size=(4, 2))
    for method, needs in (("sinkhorn", "some points"), ("exact", "equally many points")):
        sampler = OTPlanSampler(method, across=np.inf)
        with pytest.raises(ValueError, match=f"must have {needs} of each label .* got 1 and 0 points of label 'b'"):
            sampler.sample_plan_with_labels(x, x, ["a", "a", "b", "c"], ["a", "a", "c", "c"])
        with pytest.raises(ValueError, match="y0 and y1 must be given where across is"):
            sampler.sample_plan(x, x)
    with pytest.raises(ValueError, match=r"y1 must not lack labels, got 1 None or NaN, first at 2"):
        OTPlanSampler("sinkhorn", across=np.inf).get_map(x, x, np.arange(4.0), [0.0, 1.0, np.nan, 3.0])
    with pytest.raises(ValueError, match="across must be > 0, or inf, got"):
        OTPlanSampler("sinkhorn", across=0.0)
    assert repr(OTPlanSampler("exact", across=np.inf)) == "OTPlanSampler('exact', across=inf)"


def test_exact_pairs_of_equal_points():
    assert sorted(OTPlanSampler("exact").assigned(np.zeros((4, 2)), np.zeros((4, 2)))) == [0, 1, 2, 3]


def test_images_labels_and_normalised_costs():
    x0 = RNG.random((16, 3, 4))
    x1 = RNG.random((16, 3, 4))
    sampler = OTPlanSampler("unbalanced", 0.05, 1.0, normalize_cost=True, seed=0)
    assert repr(sampler) == "OTPlanSampler('unbalanced', reg=0.05, reg_m=1.0, normalize_cost=True)"
    with pytest.raises(TypeError, match=r"OTPlanSampler\(\) has no sampler: it takes method, reg, reg_m"):
        OTPlanSampler("sinkhorn", sampler=1)
    M = ((x0.reshape(16, 1, -1) - x1.reshape(16, -1)) ** 2).sum(-1)
    P = sampler.get_map(x0, x1)
    np.testing.assert_allclose(P, mapuot.solve(M / M.max(), reg=0.05, reg_m=1.0).plan, atol=1e-6)
    x, y = sampler.sample_plan(x0, x1, replace=False)
    assert x.shape == y.shape == (16, 3, 4)
    assert len(np.unique(np.c_[x.reshape(16, -1), y.reshape(16, -1)], axis=0)) == 16
    i, j = sampler.sample_map(P, 8)
    assert len(i) == len(j) == 8


def test_trajectories_follow_the_plans():
    start = np.arange(12.0)[:, None]
    X = np.stack([start, RNG.permutation(start) + 0.1, RNG.permutation(start) + 0.2], 1)
    paths = OTPlanSampler("sinkhorn", 0.01, seed=0).sample_trajectory(X)
    np.testing.assert_allclose(paths[:, :, 0], start + np.array([0.0, 0.1, 0.2]), atol=1e-9)


@pytest.mark.gpu
def test_a_solve_that_goes_on_tells_what_is_wrong_when_it_is_asked():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, y = (torch.rand(300, 2, generator=torch.Generator().manual_seed(k)).cuda() for k in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = OTPlanSampler("unbalanced", 1e-3, 1.0, max_passes=3)
        late = sampler.solved(x, y)
        bad = sampler.solved(x, y * torch.nan)
    with pytest.warns(mapuot.ConvergenceWarning):
        assert late.status == "max_passes"
    assert late.sample(5)[0].is_cuda
    with pytest.raises(ValueError, match="M must"):
        bad.sample(5)
    with (
        pytest.raises(RuntimeError, match="a CUDA graph cannot hold a solve"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sampler.solved(x, y)
    for reg_m in (1.0, (1.0, np.inf)):  # hard columns are solved when the Result is asked
        sampler = OTPlanSampler("unbalanced", 0.1, reg_m)
        result = sampler.solved(x, y)
        drawn, others = (result.sample(300, sampler.rng)[0] for _ in range(2))
        assert len(drawn) == 300
        assert not drawn.equal(others)
        assert len(result.sample(7, 0)[1]) == 7


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
def test_tune_passes_regs_that_cannot_move_the_share():
    """At the first reg no reg_m moves as little as asked for; at the reg of the wanted sharpness one does."""
    rng = np.random.default_rng(0)
    M = ((rng.normal(size=(12, 1, 2)) - rng.normal(size=(20, 2))) ** 2).sum(-1)
    found = mapuot.tune(M, None, np.full(20, 0.3), mass=0.9, sharpness=0.1)
    assert found.result.mass / np.sqrt(6) == pytest.approx(0.9, abs=1e-3)
    assert found.result.sharpness == pytest.approx(0.1, abs=1e-3)
    with pytest.raises(ValueError, match=r"the nearest that was found has mass 0\.897.* and sharpness 0\.1"):
        mapuot.tune(M, None, np.full(20, 0.3), mass=0.5, sharpness=0.1)
