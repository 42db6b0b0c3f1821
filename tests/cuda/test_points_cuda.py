"""Points on a GPU: float32 and float64 passes match the oracle, whole solves match the CPU."""

import dataclasses
import itertools
import math
import pickle
from contextlib import closing

import cupy as cp
import numpy as np
import pytest
from problems import Case, relative_error, verify
from scipy.spatial.distance import cdist

import mapuot
from mapuot.answer.slopes import point_slopes
from mapuot.arrays import host
from mapuot.ascend.settings import GROUPS
from mapuot.ascend.truncation import in_boxes
from mapuot.backends.boxes import Boxes, PassState
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.backends.cuda import arrays, vectors
from mapuot.backends.cuda import backend as cuda
from mapuot.backends.cuda.boxes import DeviceBoxes
from mapuot.backends.cuda.settings import DEVICE_ARRAYS, DEVICE_CALLS, DEVICE_LAUNCHES
from mapuot.backends.narrow_points import LOG2_E, centred
from mapuot.backends.settings import BOXES, NARROW
from mapuot.fugw import FUGW
from mapuot.problem.cost import Dense
from mapuot.problem.problem import Problem
from mapuot.problem.settings import BLOCKS, EXTENT, POINTS
from mapuot.route import on_device
from mapuot.route.options import make_options
from mapuot.spaces.embedding import PointDistances
from mapuot.spaces.settings import SPACES

pytestmark, SLOW = pytest.mark.gpu, pytest.mark.slow
WIDE = [pytest.param(shape, marks=SLOW) for shape in [(300, 40, 2), (257, 129, 21), (1, 2, 40)]]
LABEL_WAYS = {}, {"form": None}, {"form": None, "precision": "float64"}, {"truncate": 30.0}
SHAPES = [(33, 300, 3), (20, 30, 13), (131, 300, 5), *WIDE]


def clouds(m, n, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((m, d)) + 0.1, rng.random((n, d)) * 0.9 + 0.2, rng.random(m) + 0.1, rng.random(n) + 0.1


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "wfr"])
@pytest.mark.parametrize("d", [2, 6, 20])
@pytest.mark.parametrize("words", LABEL_WAYS, ids=str)
def test_labels_that_forbid_pairs_give_the_plan_of_costs_of_inf(metric, d, words):
    if metric == "wfr" and "truncate" in words:
        pytest.skip("its pairs are not skipped")
    (x, y, a, b) = clouds(70, 90, d)
    words = dict(words)
    x = x / d
    y = y / d
    labels = (np.arange(70) % 3, np.arange(90) % 3)
    how = {name: words.pop(name) for name in ("form", "truncate") if name in words}
    cloud = mapuot.PointCloud(x, y, metric, **how, labels=labels, across=math.inf)
    M = np.asarray(mapuot.PointCloud(x, y, metric)) + np.where(labels[0][:, None] == labels[1], 0.0, np.inf)
    a = a / a.sum()
    b = b / b.sum()
    result = mapuot.solve(cloud, a, b, reg=0.02, reg_m=1.0, backend="cuda", **words)
    exact = mapuot.solve(M, a, b, reg=0.02, reg_m=1.0, tol=1e-9, backend="cpu")
    assert result.converged
    plan = np.asarray(host(result.plan))
    assert np.abs(plan - exact.plan).sum() <= (result.error_bound + exact.error_bound) * exact.mass
    assert not plan[~np.isfinite(M)].any()


def begun(cloud, a, b, precision="mixed", reg_m=(1.0, 2.0), tol=1e-6, module=cuda, **more):
    """Return a workspace with a K already built."""
    problem = Problem.from_arrays(cloud, a, b, 0.05, reg_m, "kl", "product", module)
    options = dataclasses.replace(make_options("auto", precision, tol, None, 1), **more)
    workspace = module.workspace(problem, options)
    workspace.absorb(np.linspace(-1, 1, len(b)))
    return workspace


def passes(module, cloud, a, b, precision, count=3, tol=1e-13):
    """Return (stats, potentials, marginals) after so many passes."""
    workspace = begun(cloud, a, b, precision, tol=tol, module=module)
    stats = []
    while len(stats) < count and (not stats or stats[-1].status == "running"):
        stats += workspace.iterate(count - len(stats))
    return stats, *workspace.potentials(), *workspace.marginals()


class Tensor(np.ndarray):
    """An array that claims, as a tensor of torch does, to lie on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("d", [3, 6])
@pytest.mark.parametrize("metric", ["sqeuclidean", "cityblock", "wfr"])
def test_balancing_finds_the_largest_exponents(metric, d):
    """alpha_i = -max_j(x_j - M_ij / reg), beta_j = -max_i(alpha_i - M_ij / reg), +inf where no pair is allowed."""
    x, y, a, b = clouds(37, 60, d)
    x[5], a[7], b[50] = 30.0, 0.0, 0.0  # one that "wfr" leaves without a partner, and two without mass
    cloud = mapuot.PointCloud(x, y, metric)
    workspace = begun(cloud, a, b, "float64", tol=1e-9)
    log = np.where(b > 0, np.linspace(-9, 9, len(b)), -np.inf)
    with np.errstate(invalid="ignore"):
        alpha, beta = workspace.balance(a == 0, log)
    exponents = -np.asarray(cloud) / 0.05
    high = (log + exponents).max(1)
    np.testing.assert_allclose(alpha, np.where(a > 0, -high, -np.inf), rtol=1e-9)
    used = np.where(np.isfinite(alpha), alpha, -np.inf)
    np.testing.assert_allclose(beta, np.where(b > 0, -(used[:, None] + exponents).max(0), np.inf), rtol=1e-9)


@pytest.mark.parametrize("on_gpu", [(True, True), (False, True), (False, False)])
def test_points_that_lie_on_a_gpu_are_solved_there(on_gpu):
    x, y = (p.view(Tensor) if there else p for p, there in zip(clouds(20, 9, 2)[:2], on_gpu, strict=True))
    assert ("GPU" in mapuot.solve(mapuot.PointCloud(x, y), reg=0.1, reg_m=1.0).how) == any(on_gpu)


@pytest.mark.parametrize("form", [None, "auto"])
@pytest.mark.parametrize(("metric", "d"), [("sqeuclidean", 3), ("sqeuclidean", 21), ("cosine", 18), ("cityblock", 5)])
def test_where_points_lie_changes_no_answer(using, metric, d, form):
    """Whole clouds, some rows, transposed clouds and a single set of points."""
    using(POINTS, stays_from=0)
    x, y, _, _ = clouds(60, 45, d)
    words = {"reg": 0.05, "reg_m": 1.0, "backend": "cuda"}
    there, here = (mapuot.PointCloud(put(x), put(y), metric, form=form) for put in (cp.asarray, np.asarray))
    alone = [mapuot.PointCloud(put(x), metric=metric, form=form) for put in (cp.asarray, np.asarray)]
    pairs = [(there, here), (there[7:40], here[7:40]), (there[::3], here[::3]), alone]
    pairs += [(there.transpose(), here.transpose()), (there.within()[0], alone[1])]
    for one, other in [*pairs, (pickle.loads(pickle.dumps(there)), here)]:
        found, known = (mapuot.solve(cloud, **words) for cloud in (one, other))
        np.testing.assert_allclose(found.log_u, known.log_u, atol=1e-5)
        assert found.converged
        assert found.how == known.how
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    np.testing.assert_array_equal(there.x, x)
    np.testing.assert_array_equal(there.y, y)


@pytest.mark.parametrize("truncate", [None, 3.0])
def test_vectors_stay_where_points_lie(monkeypatch, using, truncate):
    """Masses, reg_m, potentials and marginals stay on the device; the host sees n coordinates and orders to sort."""
    using(GROUPS, usual_groups=60)
    using(NARROW, least_sample=9, sample=9)
    using(EXTENT, most_far=99)
    using(POINTS, stays_from=0, auto_entries=1)
    n = 320
    x, y, a, b = clouds(n, n, 2)
    a[5:9], b[7:60] = 0.0, 0.0
    given = [x, y, a, b, np.linspace(0.1, 0.9, n)], [*map(cp.asarray, (x, y, a, b, np.linspace(0.1, 0.9, n)))]
    seen = []
    get = cp.ndarray.get
    put = cp.ndarray.set
    asarray = cp.asarray
    looked = lambda z: seen.append(np.size(z)) or z  # noqa: E731
    monkeypatch.setattr(cp.ndarray, "get", lambda z, *more, **words: get(looked(z), *more, **words))
    monkeypatch.setattr(cp.ndarray, "set", lambda z, *more, **words: put(looked(z), *more, **words))
    sent = lambda z, *more, **words: asarray(z if isinstance(z, cp.ndarray) else looked(z), *more, **words)  # noqa: E731
    monkeypatch.setattr(cp, "asarray", sent)
    found = []
    for x, y, a, b, rho in given:
        seen.clear()
        cloud = mapuot.PointCloud(x, y, truncate=truncate, form=None)
        found.append(mapuot.solve(cloud, a, b, reg=0.004, reg_m=(rho, 0.5), tol=1e-6, backend="cuda"))
    assert sorted(k for k in seen if k // n in (1, 2, 3)) == ([n, n, 2 * n, 2 * n] if truncate else [])
    assert found[0].how == found[1].how
    np.testing.assert_allclose(found[1].problem.usual, found[0].problem.usual)
    assert sorted(found[1]._there) == ["col_marginal", "log_u", "log_v", "row_marginal"]
    kept = pickle.loads(pickle.dumps(found[1]))
    np.testing.assert_array_equal(kept.problem.rows.weight, given[0][2])
    for name in found[1]._there:  # which float32 passes leave to the tolerance
        np.testing.assert_allclose(getattr(kept, name), getattr(found[0], name), atol=1e-4)


def test_float32_passes_go_on_after_a_new_k(using):
    """A new K, and a restart on the same K, begin with the sums over v: with 0 in their place passes became float64.

    A restart with a v beyond float32's range builds a new K.
    """
    using(POINTS, stays_from=0)
    x, y, a, b = clouds(40, 33, 3)
    errors = []
    for put in (np.asarray, cp.asarray):
        cloud = mapuot.PointCloud(put(x), put(y), form=None)
        problem = Problem.from_arrays(cloud, put(a), put(b), 0.05, 1.0, "kl", "product", cuda)
        if put is cp.asarray:
            problem = cuda.to_device(problem)
        with closing(cuda.workspace(problem, make_options("auto", "mixed", 1e-6, None, 1))) as workspace:
            workspace.absorb(np.zeros(33) if put is np.asarray else vectors.zeros(33))
            found = workspace.iterate(2)
            workspace.absorb()
            found += workspace.iterate(2)
            workspace.restart(workspace.next_log_v)
            found += workspace.iterate(2)
            far = workspace.next_log_v
            far[5:6] = 60.0  # a v of e^60 on this K ended float32 passes
            workspace.restart(far)
            found += workspace.iterate(2)
            assert workspace.progress["narrow"] > 0
        errors.append([stat.error for stat in found])
    np.testing.assert_allclose(*errors, rtol=1e-2)


@pytest.mark.parametrize(
    ("d", "reg_m", "put"), [(3, (np.inf, 1.0), cp.asarray), (20, 2.0, np.asarray)], ids=["3", "20"]
)
def test_float32_passes_follow_a_float64_pass_that_corrects_their_sums(d, reg_m, put, using):
    """Fewer passes are float64 ones, and these certify the same plan.

    How many rounds of both there are depends on the digits of a machine's float32 products.
    """
    using(POINTS, stays_from=0)
    x, y, a, b = clouds(90, 110, d)
    a[4] = b[7] = 0.0
    reg = 0.06 if d == 3 else 0.1
    want = mapuot.solve(mapuot.PointCloud(x, y, truncate=None), a, b, reg=reg, reg_m=reg_m, tol=1e-10, backend="cpu")
    counts = []
    for least in (2**60, 1):
        using(DEVICE_LAUNCHES, least_corrected=least)
        cloud = mapuot.PointCloud(put(x), put(y), form=None, truncate=None)
        problem = Problem.from_arrays(cloud, put(a), put(b), reg, reg_m, "kl", "product", cuda)
        problem = cuda.to_device(problem) if put is cp.asarray else problem
        narrow = []
        with closing(cuda.workspace(problem, make_options("auto", "mixed", 1e-7, None, 1))) as workspace:
            workspace.absorb(np.zeros(110) if put is np.asarray else vectors.zeros(110))
            while len(narrow) < 200:
                narrow.append(workspace.progress["narrow"] > 0)
                last = workspace.iterate(1)[-1]
                if last.status != "running":
                    break
            assert last.status == "converged"
            assert not narrow[-1]
            assert last.error <= 1e-7
            u, v = (np.exp(host(z)) for z in workspace.potentials())
        plan = a[:, None] * u[:, None] * np.exp(-cdist(x, y, "sqeuclidean") / reg) * v * b
        assert relative_error(plan, want.plan) <= last.error + want.error_bound
        counts.append(len(narrow) - sum(narrow))
    assert counts[1] < counts[0]


def test_float32_passes_are_corrected_before_their_noise_exceeds_tol(using):
    """Two float64 passes: the first, with rough powers, corrects, and only the last, with better ones, certifies."""
    using(DEVICE_LAUNCHES, least_corrected=1)
    x, y, a, b = clouds(90, 110, 20)
    cloud = mapuot.PointCloud(x, y, form=None, truncate=None)
    problem = Problem.from_arrays(cloud, a, b, 0.1, 2.0, "kl", "product", cuda)
    found = []
    with closing(cuda.workspace(problem, make_options("auto", "mixed", 1e-6, None, 1))) as workspace:
        workspace.absorb(np.zeros(110))
        floor = workspace.floor + 3 * workspace.narrow_points.error
        while not found or found[-1][-1].status == "running":
            powers = workspace.powers * (workspace.progress["narrow"] == 0)
            found.append((powers, workspace.iterate(1)[-1]))
    assert [powers for powers, _ in found if powers] == [2, 1]
    before = [stat.error for powers, stat in found[: [powers for powers, _ in found].index(2)]]
    assert before[-1] > 1.5 * floor
    assert found[-1][1].status == "converged"
    assert found[-1][1].error <= 1e-6


def test_a_float64_pass_comes_where_the_next_pass_may_be_the_last(using):
    """At some tol the last float32 pass lies above it, and one float64 pass certifies; this costs no pass."""
    x, y, a, b = clouds(90, 110, 20)
    problem = Problem.from_arrays(mapuot.PointCloud(x, y, form=None), a, b, 0.1, 2.0, "kl", "product", cuda)
    saved = []
    for tol in (1e-3, 2e-3, 3e-3, 5e-3):
        found = []
        for least in (2**60, 1):
            using(DEVICE_LAUNCHES, least_corrected=least)
            rows = []
            with closing(cuda.workspace(problem, make_options("auto", "mixed", tol, None, 1))) as workspace:
                workspace.absorb(np.zeros(110))
                while not rows or rows[-1][1].status == "running":
                    rows.append((workspace.progress["narrow"] > 0, workspace.iterate(1)[-1]))
            assert rows[-1][1].status == "converged"
            assert not rows[-1][0]
            found.append([stat.error for narrow, stat in rows if narrow])
        assert len(found[1]) <= len(found[0])
        saved.append(len(found[1]) < len(found[0]) and found[1][-1] > tol)
    assert any(saved)


def test_corrected_sums_end_with_their_k(using):
    """A new K has other errors of entries, so that float64 passes go on to the end."""
    using(DEVICE_LAUNCHES, least_corrected=1)
    x, y, a, b = clouds(60, 70, 3)
    cloud = mapuot.PointCloud(x, y, form=None, truncate=None)
    problem = Problem.from_arrays(cloud, a, b, 0.05, 2.0, "kl", "product", cuda)
    with closing(cuda.workspace(problem, make_options("auto", "mixed", 1e-7, None, 1))) as workspace:
        workspace.absorb(np.zeros(70))
        while workspace.spare is None or not workspace.progress["narrow"] > 0:
            assert workspace.iterate(1)[-1].status == "running"
        workspace.absorb(workspace.next_log_v)
        found = [workspace.iterate(1)[-1]]
        while found[-1].status == "running":
            assert not workspace.progress["narrow"] > 0
            found += workspace.iterate(1)
    assert found[-1].status == "converged"
    assert found[-1].error <= 1e-7


def test_vectors_are_checked_where_they_are(using):
    """A GPU has no objects and no other order of bytes: the host refuses or converts them before they go there."""
    using(POINTS, stays_from=0)
    x, y, a, b = clouds(20, 9, 2)
    found = lambda a, reg_m=1.0: mapuot.solve(  # noqa: E731
        mapuot.PointCloud(cp.asarray(x), cp.asarray(y), form=None), a, b, reg=0.1, reg_m=reg_m, backend="cuda"
    )
    odd = found(a.astype(">f8"), (a.astype(np.longdouble), 1.0))
    np.testing.assert_array_equal(odd.log_u, found(a, (a, 1.0)).log_u)
    with pytest.raises(TypeError, match="a must hold real numbers, got dtype object"):
        found(a.astype(object))
    with pytest.raises(TypeError, match="must be a positive number, inf, or one per point, got None"):
        found(a, (None, 1.0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_points_on_a_gpu_that_are_not_finite_are_named(value):
    x, y, _, _ = clouds(20, 9, 2)
    x[7, 1] = value
    with pytest.raises(ValueError, match="x must be finite, got NaN or inf in point 7"):
        mapuot.PointCloud(cp.asarray(x), cp.asarray(y))
    with pytest.raises(ValueError, match="y must be finite, got NaN or inf in point 7"):
        mapuot.PointCloud(cp.asarray(y), cp.asarray(x))


@pytest.mark.parametrize(("d", "far", "outlier"), [(16, 0.0, 0.0), (40, 1e6, 0.0), (300, 0.0, 1e4), (64, 1e8, 1e3)])
def test_a_matrix_of_products_errs_by_what_is_told(using, d, far, outlier):
    using(DEVICE_ARRAYS, many_terms=0)
    x, y, _, _ = clouds(50, 40, d)
    x[3] += outlier
    y[0] -= outlier  # the centre is no outlier
    x = x + far
    y = y + far
    cloud = mapuot.PointCloud(x, y, scale=3.0)._cost
    M, rounding = cuda.formed(cloud)
    wide = x.astype(np.longdouble)[:, None] - y.astype(np.longdouble)
    error = np.abs(host(M).astype(np.longdouble) - 3 * (wide * wide).sum(-1)).max()
    assert error <= float(rounding)
    assert 0 < float(rounding) <= 1e-15 * (6 * d + 80) * cloud.range(cuda)[1]


@pytest.mark.parametrize(("d", "most_terms"), [(3, 0), (20, 0), (20, 1 << 20)])
def test_a_cloud_is_solved_and_drawn_from_as_its_matrix_is(monkeypatch, using, d, most_terms):
    """The host launches two or three kernels more than for the matrix, reads no point, and the pairs once."""
    using(DEVICE_ARRAYS, many_terms=most_terms)
    x, y = (cp.asarray(z.astype(np.float32)) for z in clouds(50, 40, d)[:2])
    words = {"reg": 0.05 * d, "reg_m": 1.0 * d}
    mapuot.solve(mapuot.PointCloud(x, y), **words)  # prepares the launches of such calls
    launched = []
    read = []
    get = cp.ndarray.get
    for module in (arrays, vectors):
        counted = lambda *job, kernel=module.kernel, **options: launched.append(job) or kernel(*job, **options)  # noqa: E731
        monkeypatch.setattr(module, "kernel", counted)
    monkeypatch.setattr(cp.ndarray, "get", lambda z, *more, **own: read.append(z.shape) or get(z, *more, **own))
    found = mapuot.solve(mapuot.PointCloud(x, y), **words)
    pairs = found.sample(30, 5)
    product = d == 20 and not most_terms
    formed = [("point_tables.cu", "take_candidates"), ("point_tables.cu", "square_factors")]
    if not product:
        formed = [("point_costs.cu", "point_costs")]
    assert launched == [("point_tables.cu", "take_points"), *formed]
    assert read == [(2, 30)]
    M, _ = cuda.formed(mapuot.PointCloud(x, y)._cost)
    right = mapuot.solve(M, **words)
    np.testing.assert_allclose(found.log_u, right.log_u, rtol=1e-6)  # sums of blocks come in any order
    for one, other in zip(pairs, right.sample(30, 5), strict=True):
        assert type(one) is np.ndarray
        np.testing.assert_array_equal(one, other.get())
    for method in ("systematic", "rows"):
        for one, other in zip(*(z.sample(70, 5, method=method) for z in (found, right)), strict=True):
            np.testing.assert_array_equal(one, other.get())
    np.testing.assert_allclose(found.apply(np.ones(40)), right.apply(cp.ones(40)).get(), rtol=1e-6)


def test_rounding_that_stays_on_the_device_counts(monkeypatch, using):
    """The certificate counts the rounding of a product, whether the host or the device reads it."""
    using(DEVICE_ARRAYS, many_terms=0)
    x, y = map(cp.asarray, clouds(50, 40, 20)[:2])
    cloud = mapuot.PointCloud(x, y)
    errors = []
    M, rounding = cuda.formed(cloud._cost)
    rounding = rounding._replace(rate=1e7 * rounding.rate)
    for told in (rounding, float(rounding), 0.0):
        monkeypatch.setattr(cuda, "formed", lambda *_, told=told: (M, told), raising=False)
        errors.append(mapuot.solve(cloud, reg=1.0, reg_m=20.0, tol=1e-3).error_bound)
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    assert errors[0] > errors[2] + 0.9 * float(rounding)


def test_rows_are_drawn_from_points_that_are_made_once(using):
    using(BLOCKS, plan_entries=4 * 40)
    x, y, a, b = clouds(50, 40, 3)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 50, 90)
    at = rng.random(90)
    for put in (cp.asarray, np.asarray):
        found = mapuot.solve(mapuot.PointCloud(put(x), put(y), form=None), a, b, reg=0.05, reg_m=1.0, backend="cuda")
        plan = found._stream
        M = Dense(cp.asarray(np.asarray(found.problem.cost)))
        right = cuda.operator_of(M, 0.05).set_exponents(plan.alpha, plan.beta).draw(rows, at)
        for one, other in zip(plan.draw(rows, at), right, strict=True):
            np.testing.assert_array_equal(one, other.get())


def test_a_restart_far_from_its_kernel_has_the_v_that_it_tells():
    """A v above the kernels' range was clipped but reported in full: error 3.4e-2 was certified to 9.2e-3."""
    x, y, a, b = clouds(20, 9, 2)
    workspace = begun(mapuot.PointCloud(x, y), a, b, "float64", (np.inf, 2.0), 1e-13)
    workspace.iterate(1)
    workspace.restart(workspace.potentials()[1] + np.array([120.0, *8 * [0.0]]))
    workspace.iterate(1)
    plan = cpu.plan_of(workspace.problem, *map(np.asarray, workspace.potentials())).plan(0, 20)
    for axis, marginal in zip((1, 0), workspace.marginals(), strict=True):
        np.testing.assert_allclose(plan.sum(axis), np.asarray(marginal), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", ["mixed", "float64"])
@pytest.mark.parametrize("metric", mapuot.problem.metrics.METRICS)
@pytest.mark.parametrize("shape", SHAPES)
def test_passes_are_those_of_the_cpu(shape, metric, precision):
    x, y, a, b = clouds(*shape)
    cloud = mapuot.PointCloud(x, y, metric, weights=np.full(shape[2], 0.5 / shape[2]), form=None)
    got, want = (passes(module, cloud, a, b, precision) for module in (cuda, cpu))
    if precision == "mixed" and metric != "wfr":
        tol = 1e-4
    else:
        tol = 1e-9
    assert [s.status for s in got[0]] == [s.status for s in want[0]]
    assert got[0][-1].mass == pytest.approx(want[0][-1].mass, rel=tol)
    for found, right in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(found, right, rtol=tol, atol=tol)


@pytest.mark.parametrize(("n", "d"), [(1100, 2), *(pytest.param(*x, marks=SLOW) for x in [(1024, 1), (2333, 4)])])
@pytest.mark.parametrize("kind", ["narrow", "quick", "float64"])
def test_half_of_the_pairs_stand_for_all_by_one_potential(monkeypatch, n, d, kind):
    """Above the 1024 points of one block, an entry counts for both of its points."""
    if kind != "narrow":
        monkeypatch.setattr("mapuot.backends.narrow_points.fitting", lambda *given: None)
    x, _, a, _ = clouds(n, 1, d)
    cloud = mapuot.PointCloud(x, weights=np.full(d, 1 / d), truncate=None, form=None)
    workspace = begun(cloud, a, a, "float64" if kind == "float64" else "mixed", 1.0, symmetric=True)
    launch = workspace.launch
    assert launch.halved
    launch.row_kernels()
    p, q = (side.to[:d, :n].get().T.astype(np.float64) for side in launch.sides)
    log = launch.sides[0].log[:n].get().astype(np.float64)
    if kind == "quick":
        c = -p @ q.T
    else:
        c = cdist(p, q, "sqeuclidean") * launch.factor
    v = workspace.arrays["narrow_v" if kind == "narrow" else "v_scale"][:n].get()
    right = (np.exp if kind == "float64" else np.exp2)(log[:, None] + log - c) @ v
    np.testing.assert_allclose(launch.out[:n].get(), right, rtol={"quick": 3e-9, "float64": 1e-12}.get(kind, 3e-5))


@pytest.mark.parametrize(
    ("kind", "d"),
    [("narrow", 3), ("narrow", 21), ("narrow", 70), ("narrow", 130), ("quick", 3), ("quick", 21), ("quick", 140)],
)
def test_rows_and_columns_have_the_same_bits(monkeypatch, kind, d):
    """K_ij alone has the same bits as a sum over its row and over its column, with zero weights elsewhere."""
    if kind == "quick":
        monkeypatch.setattr("mapuot.backends.narrow_points.fitting", lambda *given: None)
    x, y, a, b = clouds(45, 70, d)
    cloud = mapuot.PointCloud(x, y, weights=np.full(d, 1 / d), truncate=None, form=None)
    workspace = begun(cloud, a, b, reg_m=1.0)
    launch = workspace.launch
    found = []
    run = launch.launch

    def spy(name, *words):
        run(name, *words)
        if name == launch.sums:
            k = len(found) % 2
            found.append(launch.out[: launch.slabs[k] * (45, 70)[k]].get().reshape(launch.slabs[k], -1).sum(0))

    monkeypatch.setattr(launch, "launch", spy)
    if kind == "quick":
        dtype = np.float64
    else:
        dtype = np.float32
    for i, j in [(0, 0), (7, 69), (44, 33), (20, 20), (31, 64)]:
        launch.weights = [cp.asarray(np.eye(1, 128, at, dtype=dtype)[0]) for at in (j, i)]
        launch.row_kernels()
        row, col = found[-2:]
        assert row[i] == col[j] > 0


@pytest.mark.parametrize(
    ("metric", "d"), [("sqeuclidean", 7), ("sqeuclidean", 40), ("inner", 33), ("sqeuclidean", 100)]
)
def test_products_on_tensor_cores_are_those_of_float64(metric, d):
    """Sums over rows and columns by one, three, five and nine steps of 16 coordinates, nine not all in registers."""
    x, y, a, b = clouds(45, 330, d)
    a[3], b[40:90] = 0.0, 0.0
    cloud = mapuot.PointCloud(x, y, metric, scale=1 / d, truncate=None, form=None)
    workspace = begun(cloud, a, b, reg_m=1.0)
    launch, (rows, cols) = workspace.launch, workspace.launch.sides
    assert launch.sums == "product_sums"
    powers = workspace.narrow_points
    M = np.asarray(cloud) * LOG2_E / 0.05
    own_x, own_y = (np.broadcast_to(host(z), len(w)) for z, w in ((powers.own_x, a), (powers.own_y, b)))
    known = (rows.log[:45].get() + own_x.astype(float))[:, None] + cols.log[:330].get() + own_y
    K = np.exp2(np.where((a > 0)[:, None] & (b > 0), known - M, -np.inf))
    rng = np.random.default_rng(2)
    for k, (size, of) in enumerate(((330, K), (45, K.T))):
        w = rng.random(size)
        weights = cp.asarray(np.append(w, np.full(-size % 16, np.nan)).astype(np.float32))
        np.testing.assert_allclose(launch.sum_over(k, weights).sum(0).get(), of @ w, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("metric", "d", "tol"),
    [
        ("sqeuclidean", 20, 1e-6), ("sqeuclidean", 60, 1e-6), ("sqeuclidean", 20, 1e-3), ("inner", 60, 1e-6),
        ("inner", 99, 1e-6), ("sqeuclidean", 150, 1e-6),
    ],
)  # fmt: skip
def test_float64_products_on_tensor_cores_have_quick_powers(monkeypatch, metric, d, tol):
    """Sums over rows and columns by tiles of 64, of 32 and of 16 points, and by chunks; addends are in no product."""
    monkeypatch.setattr("mapuot.backends.narrow_points.fitting", lambda *given: None)
    x, y, a, b = clouds(45, 100, d)
    a[3], b[40:70] = 0.0, 0.0
    addends = (np.linspace(-3.0, 5.0, 45), np.linspace(7.0, 2.0, 100)) if metric == "inner" else None
    cloud = mapuot.PointCloud(x, y, metric, scale=1 / d, truncate=None, form=None, addends=addends)
    workspace = begun(cloud, a, b, reg_m=1.0, tol=tol)
    launch = workspace.launch
    assert launch.sums == "wide_product_sums"
    log = (side.log[:k].get() + own for side, own, k in zip(launch.sides, workspace.own, (45, 100), strict=True))
    rows, cols = log
    K = np.exp2(rows[:, None] + cols - np.asarray(cloud) * LOG2_E / 0.05)
    w = np.random.default_rng(2).random(100)
    for k, of in enumerate((K, K.T)):
        weights = cp.asarray(np.append(w[: of.shape[1]], np.full(-of.shape[1] % 16, np.nan)))
        found = launch.sum_over(k, weights).sum(0).get()
        right = of @ w[: of.shape[1]]
        np.testing.assert_allclose(found, right, rtol=workspace.state["limits"]["storage_error"], atol=1e-300)
        assert (np.abs(found - right) > 1e-8 * right).any() == (tol == 1e-3)


@pytest.mark.parametrize("d", [9, 40, pytest.param(130, marks=SLOW)])
def test_passes_over_rounded_points_have_the_sums_of_these_points(d, using):
    """One step, three steps in registers, and chunk by chunk; the largest exponents are those of these points, too."""
    using(DEVICE_LAUNCHES, least_corrected=1)
    x, y, a, b = clouds(45, 70, d)
    b[50] = 0.0
    workspace = begun(mapuot.PointCloud(x / np.sqrt(d), y / np.sqrt(d), form=None), a, b)
    assert workspace.rounds
    launch = workspace.launch
    rows, columns = (np.asarray(host(z)) for z in centred(workspace.cloud, 0.05, cp))
    moved = rows, columns[:, :70].T
    near = [z.astype(np.float32).astype(np.float16).astype(float) for z in moved]
    logs = [side.log[: side.count].get().astype(float) for side in launch.sides]
    lost = [(z**2).sum(1) - (w**2).sum(1) for z, w in zip(moved, near, strict=True)]
    known = workspace.narrow_points.row, workspace.narrow_points.col[:70]
    for log, before, more in zip(logs, known, lost, strict=True):
        np.testing.assert_allclose(log, before + more, rtol=1e-6, atol=1e-6)
    K = np.exp2(logs[0][:, None] + logs[1] + 2 * near[0] @ near[1].T)
    weights = np.random.default_rng(2).random(256).astype(np.float32)
    for k, of in enumerate((K, K.T)):
        found = launch.sum_over(k, cp.asarray(weights)).sum(0).get()
        np.testing.assert_allclose(found, of @ weights[: of.shape[1]], rtol=1e-4)
    apart = cdist(*near, "sqeuclidean")
    alpha, beta = workspace.balance(a == 0, np.where(b > 0, 0.0, -np.inf))
    np.testing.assert_allclose(alpha, apart[:, b > 0].min(1) / LOG2_E, rtol=1e-4)
    used = apart / LOG2_E - alpha[:, None]
    np.testing.assert_allclose(beta[b > 0], used.min(0)[b > 0], atol=1e-3)


def test_one_pass_with_both_pieces_corrects_those_over_rounded_points(using):
    """All other passes before float64 are over rounded points, and no more passes are made than without these."""
    using(DEVICE_LAUNCHES, least_corrected=1)
    x, y, a, b = clouds(90, 110, 20)
    a[4] = b[7] = 0.0
    for tol in (1e-3, 1e-6):
        counts = []
        want = mapuot.solve(mapuot.PointCloud(x, y), a, b, reg=0.1, reg_m=2.0, tol=1e-10, backend="cpu")
        for worth in (1.0, 0.0):
            using(DEVICE_LAUNCHES, rounded_worth=worth)
            problem = Problem.from_arrays(mapuot.PointCloud(x, y, form=None), a, b, 0.1, 2.0, "kl", "product", cuda)
            kinds = []
            status = "running"
            with closing(cuda.workspace(problem, make_options("auto", "mixed", tol, None, 1))) as workspace:
                workspace.absorb(np.zeros(110))
                while status == "running":
                    narrow = workspace.progress["narrow"] > 0
                    kinds.append(int(narrow) + int(narrow and workspace.rounds))
                    last = workspace.iterate(1)[-1]
                    status = last.status
                u, v = (np.exp(host(z)) for z in workspace.potentials())
            assert status == "converged"
            plan = a[:, None] * u[:, None] * np.exp(-cdist(x, y, "sqeuclidean") / 0.1) * v * b
            assert relative_error(plan, want.plan) <= last.error + want.error_bound
            counts.append(kinds)
        assert counts[0].count(1) == 1
        assert counts[1].count(2) == 0
        assert len(counts[0]) <= len(counts[1]) + 1


def test_far_points_and_rough_ones_are_not_rounded(using):
    using(DEVICE_LAUNCHES, least_corrected=1)
    x, y, a, b = clouds(45, 70, 9)
    assert begun(mapuot.PointCloud(x, y, form=None), a, b).rounds
    x[5] += 6.0  # 2^-8 of its square is more than 16
    assert not begun(mapuot.PointCloud(x, y, form=None), a, b).rounds
    x[5] -= 6.0
    using(DEVICE_LAUNCHES, rounded_worth=1e-4)
    assert not begun(mapuot.PointCloud(x, y, form=None), a, b).rounds
    using(DEVICE_LAUNCHES, rounded_worth=1.0)
    assert not begun(mapuot.PointCloud(x, y, "inner", form=None), a, b).rounds


@pytest.mark.parametrize("metric", ["sqeuclidean", "inner"])
def test_products_on_tensor_cores_balance_nearly(metric):
    x, y, a, b = clouds(45, 70, 9)
    x[5], a[7], b[50] = 3.0, 0.0, 0.0
    workspace = begun(mapuot.PointCloud(x, y, metric, form=None), a, b)
    log = np.where(b > 0, np.linspace(-9, 9, len(b)), -np.inf)
    (alpha, beta) = workspace.balance(a == 0, log)
    split = workspace.split
    workspace.split = None
    for found, right in zip((alpha, beta), workspace.balance(a == 0, log), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-2)
    assert split is not None


@pytest.mark.parametrize("far", [0.0, 9.0])
def test_some_columns_balance_rows(using, far):
    """K has no entry above 1, and one of 1 in each row and column, though rows see one tile; far: unless v is large."""
    using(DEVICE_LAUNCHES, least_tops=40)
    x, y, a, b = clouds(45, 330, 9)
    a[7], b[50] = 0.0, 0.0
    x[5:9] += far  # near columns that no row sees
    y[200:210] += far
    workspace = begun(mapuot.PointCloud(x, y, form=None), a, b)
    rows = []
    spy = workspace.launch.tops
    workspace.launch.tops = lambda k, *words: rows.append((k, workspace.launch.factor)) or spy(k, *words)
    log = np.where(b > 0, np.linspace(-1, 1, len(b)), -np.inf)
    alpha, beta = workspace.balance(a == 0, log)
    assert rows == [(0, 8.0), (1, 1.0), (0, 1.0), (1, 1.0)][: 4 if far else 2]
    K = alpha[a > 0, None] + beta[b > 0] - np.asarray(workspace.problem.cost.cloud)[a > 0][:, b > 0] / 0.05
    for axis in (0, 1):
        np.testing.assert_allclose(K.max(axis), 0.0, atol=1e-2)


def test_coordinates_beyond_float16_take_no_tensor_cores(using):
    using(NARROW, most_error=np.inf)
    x, y, a, b = clouds(45, 70, 9)
    for far, sums in ((0.0, "product_sums"), (1e5, "tile_sums")):
        x[5] += far
        assert begun(mapuot.PointCloud(x, y, form=None), a, b).launch.sums == sums


@pytest.mark.parametrize(
    ("metric", "tol"),
    [(name, 1e-6) for name in ("sqeuclidean", "euclidean", "cityblock", "wfr")]
    + [("sqeuclidean", 1e-3), ("wfr", 1e-3)],
)
def test_quick_powers_are_within_their_error(monkeypatch, metric, tol):
    """Float64 passes with short powers are exact enough for tol; left out and distant points count nothing."""
    monkeypatch.setattr("mapuot.backends.narrow_points.fitting", lambda *given: None)
    x, y, a, b = clouds(40, 37, 3)
    x[7] += 1.0 if metric == "wfr" else 1e4
    y[9] = x[7] + 0.1
    a[:3] = b[5:9] = 0.0
    cloud = mapuot.PointCloud(x, y, metric, weights=np.full(3, 0.3), form=None)
    got, want = (passes(module, cloud, a, b, "mixed", tol=tol) for module in (cuda, cpu))
    exact = passes(cuda, cloud, a, b, "float64")
    for found, right in zip(exact[1:], want[1:], strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-11)
    off = [np.nanmax(np.abs(found[np.isfinite(right)] - right[np.isfinite(right)]))
           for found, right in zip(got[1:], want[1:], strict=True)]  # fmt: skip
    largest = [np.abs(right[np.isfinite(right)]).max() for right in want[1:]]
    assert 0 < max(off) < (1e-7 if tol < 1e-4 else 2e-6) * max(1.0, *largest)


def test_what_a_gpu_does_not_take_is_said():
    x, y, a, b = clouds(5, 4, 2)
    with pytest.raises(NotImplementedError, match="reference"):
        mapuot.solve(
            mapuot.PointCloud(x, y, form=None), a, b, reg=0.1, reg_m=1.0, reference=np.ones((5, 4)), backend="cuda"
        )


@pytest.mark.parametrize("name", sorted({*vectors.OPERATIONS} - {"place"}))
def test_vectors_compute_as_numpy_does(name):
    """Operations are right for tables in any layout, rows of them, and numbers, of each type that they accept."""
    x = np.random.default_rng(0).normal(size=(6, 9))
    function = getattr(np, name)
    x[0, :4] = np.nan, np.inf, -np.inf, -0.0
    masks = [x[::2, 1:] > 0, x[1, 1:] < 0]
    few = [x[::2, 1:], x[0, 1:].astype(np.float32), np.arange(24).reshape(8, 3).T - 5, -2.5, 3]
    if name.startswith(("bitwise", "invert")):
        few = [*masks, True]
    for operands in itertools.product(*([masks, few, few] if name == "where" else [few] * function.nin)):
        if any(map(np.ndim, operands)):
            with np.errstate(all="ignore"):
                want = function(*operands)
            got = function(*(vectors.asarray(z) if np.ndim(z) else z for z in operands))
            assert (got.dtype == bool) == (want.dtype == bool)
            np.testing.assert_allclose(got.get(), want, rtol=1e-6 if want.dtype == np.float32 else 1e-15)


def test_vectors_are_indexed_and_merged_as_numpy_does():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    at = rng.permutation(40)[:11]
    starts = np.array([0, 1, 7, 30])
    mask, there, where = x[:, 0] > 0.3, *map(vectors.asarray, (x, at))
    for merge in (np.add, np.minimum, np.maximum):
        got = merge.reduceat(there, vectors.asarray(starts))
        np.testing.assert_allclose(got.get(), merge.reduceat(x, starts), rtol=1e-14)
    np.testing.assert_array_equal(there[where].get(), x[at])
    np.testing.assert_array_equal(there[:, 1][vectors.asarray(mask)].get(), x[mask, 1])
    np.testing.assert_array_equal(vectors.asarray(mask).astype(np.int8).get(), mask)
    together = np.concatenate([there[:, 0], there[3:, 1]])
    np.testing.assert_array_equal(together.get(), np.concatenate([x[:, 0], x[3:, 1]]))
    np.testing.assert_allclose(there.sum(1).get(), x.sum(1), rtol=1e-14)
    there[where], x[at] = there[:11] + 1, x[:11] + 1
    there[2::5, 1:], x[2::5, 1:] = 7, 7
    there[-1], x[-1] = 5, 5
    there[:, 0][vectors.asarray(mask)] = np.inf
    x[mask, 0] = np.inf
    np.testing.assert_array_equal(there.get(), x)
    with pytest.raises(ValueError, match="broadcast"):
        there[:, 0] + there[:5, 0]
    with pytest.raises(TypeError, match="host"):
        np.add(there, x)
    for places in (vectors.cp.asarray(at.astype(np.int32)), where[::2]):
        with pytest.raises(TypeError, match="int64"):
            there[places]


def test_groups_correct_passes(monkeypatch, using):
    using(GROUPS, usual_groups=100)
    using(BOXES, correction_passes=math.inf)
    x, y, a, b = clouds(700, 600, 1)
    a[10:40] = 0.0
    exact = mapuot.solve(
        mapuot.PointCloud(x, y, truncate=None, form=None), a, b, reg=4e-4, reg_m=1.0, tol=1e-10, backend="cpu"
    )
    asked = set()
    ufunc = cp.ndarray.__array_ufunc__
    monkeypatch.setattr(cp.ndarray, "__array_ufunc__", lambda x, which, how, *y, **more: (
        asked.add(how), ufunc(x, which, how, *y, **more))[1])  # fmt: skip
    got = mapuot.solve(
        mapuot.PointCloud(x, y, truncate=3.0, form=None), a, b, reg=4e-4, reg_m=1.0, tol=1e-7, backend="cuda"
    )
    assert asked <= {"reduce"}  # CuPy would compile a kernel for each further operation
    assert got.converged
    assert got.n_passes <= 12  # 70 without
    assert got.skipped.kept.share <= 0.4
    assert np.abs(got.plan - exact.plan).sum() <= (got.error_bound + exact.error_bound) * exact.mass


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock"])
@pytest.mark.parametrize("unit", [4, 64])
def test_boxes_keep_what_those_of_the_cpu_keep(metric, unit):
    """Runs of both sides are right over words that end within a run and behind it, and bounds."""
    x, y, a, b = clouds(300, 700, 2 if unit < 64 else 1)
    a[5:70] = 0.0
    if metric == "sqeuclidean":
        reg = 2e-4
    else:
        reg = 4e-3
    problem = Problem.from_arrays(
        mapuot.PointCloud(x, y, metric, truncate=2.0, form=None), a, b, reg, 1.0, "kl", "product", cpu
    )
    task = in_boxes(problem, False, unit)[0]
    task.cost.unit = unit
    M = np.asarray(task.cost) / reg
    log_u = M.min(1) + 0.1
    log_v = (M - log_u[:, None]).min(0)
    P = np.exp(log_u[:, None] + log_v - M) * task.rows.weight[:, None] * task.cols.weight
    state = PassState(log_u, log_v, P.sum(1), P.sum(0))
    there = DeviceBoxes(task, native.SERIAL)
    here = Boxes(task, native.SERIAL)
    for goal in (1e-2, 1e-6):
        got = there.make(state, goal, 1.0)
        want = here.make(state, goal, 1.0)
        assert 0 < want.share < 1
        assert got.share == want.share
        np.testing.assert_array_equal(got.first, want.first)
        np.testing.assert_array_equal(got.run, want.run)
        for mine, right in zip(there.skipped(state, got), here.skipped(state, want), strict=True):
            assert mine == pytest.approx(right, rel=1e-9)
        kept = np.zeros((here.rows.boxes, here.cols.boxes), bool)
        for turned, ((*lists, _), table) in enumerate(zip(there.lists, (kept, np.zeros_like(kept.T)), strict=True)):
            first, run, order = (part.get() for part in lists)
            for i in range(len(first) - 1):
                for start, stop in run[2 * first[i] : 2 * first[i + 1]].reshape(-1, 2):
                    assert start % unit == 0
                    table[i, start // unit : -(-stop // unit)] = True
            assert table.sum() == round(want.share * kept.size)
            np.testing.assert_array_equal(np.sort(order), np.arange(len(table)))
            assert (np.diff(table.sum(1)[order]) <= 0).all()
            if turned:
                np.testing.assert_array_equal(table, kept.T)


def test_sums_over_kept_pairs_hold_in_any_number_of_parts(using):
    """Sums agree in one part and in two; a part gets a share of a long run of pairs, or a whole short run."""
    using(GROUPS, usual_groups=60)
    using(BOXES, most_kept_share=0.9)
    x, y, a, b = clouds(200, 270, 2)
    x[:80] *= 0.1  # a dense cluster: its boxes keep more pairs
    y[:140] *= 0.1
    exact = mapuot.solve(mapuot.PointCloud(x, y, truncate=None), a, b, reg=0.005, reg_m=1.0, tol=1e-9, backend="cpu")
    for slabs in (1, 2):
        using(DEVICE_LAUNCHES, most_parts=slabs)
        cloud = mapuot.PointCloud(x, y, truncate=3.0)
        found = mapuot.solve(cloud, a, b, reg=0.005, reg_m=1.0, tol=1e-4, precision="mixed", backend="cuda")
        assert found.skipped is not None
        assert relative_error(host(found.plan), exact.plan) <= found.error_bound + exact.error_bound <= 2e-4


@pytest.mark.parametrize("metric", ["sqeuclidean", "cityblock", "cosine", "inner"])
def test_points_whose_matrix_has_no_room_are_stored_as_k(metric):
    """A float32 K takes 4 bytes a pair, made from points block by block; matrix and K together would take 16."""
    x, y, a, b = clouds(45, 37, 14)
    a[7] = b[3] = 0.0
    size = len(a) * len(b)
    cloud = mapuot.PointCloud(x, y, metric, form=4 * size)
    for reg_m, tol in (((1.0, 2.0), 1e-6), ((math.inf, 2.0), 1e-3)):
        result = mapuot.solve(cloud, a, b, reg=0.05, reg_m=reg_m, tol=tol, backend="cuda")
        assert result.how.startswith("float32 tiles on a GPU")
        assert result.converged
        verify(result, Case(np.asarray(cloud), a, b, 0.05, reg_m))
        Z = np.hstack([y, y])  # of more columns than a row of the plan is multiplied by as it is made
        np.testing.assert_allclose(result.apply(Z), result.plan @ Z, atol=1e-13)
        np.testing.assert_allclose(result.apply_transpose(x), result.plan.T @ x, atol=1e-13)
    for other in (mapuot.PointCloud(x, y, metric, form=4 * size - 1), mapuot.PointCloud(x, y, metric, form=None)):
        assert "points" in mapuot.solve(other, a, b, reg=0.05, reg_m=1.0, tol=0.1, backend="cuda").how
    assert "points" in mapuot.solve(cloud, a, b, reg=0.05, reg_m=1.0, tol=1e-8, backend="cuda").how


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine", "inner"])
def test_slopes_by_points_of_the_host(metric):
    """Products of the plan lie on the GPU, and the points on the host: NumPy was to read them unasked."""
    rng = np.random.default_rng(0)
    x, y = rng.random((9, 3)), rng.random((7, 3))
    for put in (np.asarray, cp.asarray):
        cloud = mapuot.PointCloud(put(x), put(y), metric)
        found, wanted = (
            point_slopes(mapuot.solve(one, reg=0.1, reg_m=1.0, tol=1e-9, backend=name))
            for one, name in ((cloud, "cuda"), (mapuot.PointCloud(x, y, metric), "cpu"))
        )
        for here, there in zip(wanted, found, strict=True):
            np.testing.assert_allclose(host(there), here, atol=1e-9)


def test_gromov_is_that_of_the_cpu():
    x, y, a, b = clouds(30, 25, 3)
    y = np.hstack([y, y[:, :1] ** 2])
    given = {"a": a / a.sum(), "b": b / b.sum(), "reg": 0.02, "reg_m": 0.2, "init": "independent"}
    here, there = (mapuot.gromov(x, y, backend=name, **given) for name in ("cpu", "cuda"))
    assert there.settled
    assert there.value == pytest.approx(here.value, rel=1e-7)
    np.testing.assert_allclose(there.gradient().x, here.gradient().x, atol=1e-4 * np.abs(here.gradient().x).max())


@pytest.mark.parametrize("power", [1.0, 1.4])
def test_products_with_true_distances_are_made_on_the_device(power, using):
    using(SPACES, formed_points=10, device_entries=150)
    x, y, a, b = clouds(30, 25, 3)
    given = {"a": a / a.sum(), "b": b / b.sum(), "reg": 0.05, "reg_m": 0.5, "init": "independent"}
    given |= {"metric": "euclidean", "power": power, "landmarks": 8}
    here, there = (mapuot.gromov(x, y, backend=name, **given) for name in ("cpu", "cuda"))
    assert there.settled
    assert there.value == pytest.approx(here.value, rel=1e-6)
    assert there.value_error == pytest.approx(here.value_error, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
@pytest.mark.parametrize(("reg", "reg_m"), [(2.0, 0.3), (1e-3, 0.3), (0.01, np.inf)])
def test_points_on_the_device_are_solved_in_one_call(monkeypatch, using, dim, tol, reg, reg_m):
    """Points are solved in one call, symmetric or without a larger reg; a call that ends too soon is repeated."""
    using(DEVICE_CALLS, sees_masses_first=False)
    rng = np.random.default_rng(3)
    x = rng.random((60, dim))
    y = rng.random((50, dim))
    a = rng.dirichlet(np.full(60, 3.0))
    given = {"reg": reg, "reg_m": reg_m, "tol": tol}
    solved = on_device.PendingSolve.result
    whole = []
    monkeypatch.setattr(on_device.PendingSolve, "result", lambda sent: whole.append(solved(sent)) or whole[-1])
    for z, b in ((None, a), (y, a[:50] * a.sum() / a[:50].sum())):
        there = None if z is None else cp.asarray(z)
        found = mapuot.solve(mapuot.PointCloud(cp.asarray(x), there), a, b, **given)
        right = mapuot.solve(mapuot.PointCloud(x, z), a, b, **given | {"tol": 1e-10}, precision="float64")
        assert found.converged
        assert ("one potential" in found.how) == (z is None)
        bound = found.error_bound + right.error_bound
        assert relative_error(host(found.plan), right.plan) <= bound <= 2 * tol
        for own, other in zip(found.gradient()[:2], right.gradient()[:2], strict=True):
            assert np.abs(own - other).sum() <= found.gradient().error + right.gradient().error
    assert whole[0] is not None
    if np.isfinite(reg_m):  # of balanced ones some need a larger reg, or more than one of Newton's steps
        assert (whole[1] is not None) == (reg == 2.0)
    for count in (2, 9):  # the second look is after fewer passes than the first
        few = mapuot.solve(mapuot.PointCloud(cp.asarray(x)), a, a, **given | {"max_passes": count, "tol": 1e-17})
        assert (few.n_passes, few.status) == (count, "max_passes")


@pytest.mark.parametrize("power", [1.0, 1.7])
def test_tiles_of_true_distances_lie_on_the_device(power, monkeypatch):
    monkeypatch.setattr(SPACES, "device_entries", 900)  # tiles of 24 points and less
    rng = np.random.default_rng(0)
    x, Z, w = rng.normal(size=(70, 3)), rng.normal(size=(70, 5)), rng.random(70)
    here, there = (PointDistances(x, "X", power, backend) for backend in ("cpu", "cuda"))
    assert all(isinstance(block, cp.ndarray) for *_, block in there.tiles())
    np.testing.assert_allclose(there.times(Z), here.times(Z), atol=1e-11)
    np.testing.assert_allclose(there.square_means(w), here.square_means(w), atol=1e-11)


@pytest.mark.parametrize(("d", "form"), [(18, None), (18, "auto"), (3, None)])
def test_sums_and_products_are_of_one_plan(d, form, monkeypatch):
    """Tiles of 24 points and less; row 3 has no mass."""
    monkeypatch.setattr(DEVICE_ARRAYS, "block_bytes", 8 * 24 * 24)
    rng = np.random.default_rng(0)
    m, n = 70, 53
    x, y, a, b = rng.normal(size=(m, d)), rng.normal(size=(n, d)), rng.random(m), rng.random(n)
    a[3] = 0
    cloud = mapuot.PointCloud(x, y, "inner", addends=(rng.normal(size=m), rng.normal(size=n)), form=form)
    result = mapuot.solve(cloud, a, b, reg=2.0, reg_m=3.0, backend="cuda")
    X, Y = rng.normal(size=(n, 5)), rng.normal(size=(m, 4))
    (cost, r, s), *products = result._sums_and_products(X, Y)
    P = result.plan
    assert isinstance(products[0], cp.ndarray)
    assert cost == pytest.approx((P * np.asarray(cloud)).sum(), rel=1e-12)
    for found, known in zip((r, s, *map(host, products)), (P.sum(1), P.sum(0), P @ X, P.T @ Y), strict=True):
        np.testing.assert_allclose(found, known, atol=1e-12)


@pytest.mark.parametrize("form", [None, "auto"])
@pytest.mark.parametrize("reg_m", [3.0, (np.inf, 3.0), (3.0, np.inf)])
def test_points_of_a_gpu_with_addends_stay_there(form, reg_m):
    rng = np.random.default_rng(0)
    m, n = 40, 31
    x, y, addends = rng.normal(size=(m, 18)), rng.normal(size=(n, 18)), (rng.normal(size=m), rng.normal(size=n))
    a, b = np.full(m, 1 / m), np.full(n, 1 / n)
    given = (x, y), map(cp.asarray, (x, y))
    here, there = (mapuot.PointCloud(*points, "inner", form=form, addends=addends) for points in given)
    assert there._cost.here
    for cost, known in ((there._cost, here._cost), (there._cost.transpose(), here._cost.transpose())):
        np.testing.assert_allclose(np.asarray(cost), np.asarray(known), atol=1e-13)
        np.testing.assert_array_equal(cost.x, known.x)
        np.testing.assert_array_equal(cost.y, known.y)
        assert cost.error(1.0) == pytest.approx(known.error(1.0))
    one, other = (mapuot.solve(M, a, b, reg=2.0, reg_m=reg_m, backend="cuda") for M in (here, there))
    assert isinstance(other.plan, np.ndarray)
    np.testing.assert_allclose(other.plan, one.plan, atol=1e-12)
    with pytest.raises(ValueError, match="x must"):
        mapuot.PointCloud(cp.full((3, 2), np.inf), cp.ones((2, 2)), "inner", addends=(0.0, 0.0))


def test_fugw_on_a_gpu_has_the_plan_of_the_host():
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=(n, 3)) * [3.0, 2.0, 1.0] for n in (16, 13))
    f, g = rng.random((2, 16)), rng.random((2, 13))
    models = [
        FUGW(alpha=0.5, rho=2.0, eps=0.05, metric="euclidean", options={"backend": backend}).fit(f, g, x, y)
        for backend in ("cpu", "cuda")
    ]
    here, there = models
    np.testing.assert_allclose(there.pi, here.pi, atol=1e-6)
    np.testing.assert_allclose(there.transform(f), here.transform(f), atol=1e-5)
    assert there.loss == pytest.approx(here.loss, rel=1e-9)


@pytest.mark.parametrize("features", [False, True])
def test_gromov_with_true_distances_has_the_values_of_the_host(features, using):
    using(SPACES, formed_points=20, device_entries=400)
    using(DEVICE_ARRAYS, block_bytes=8 * 20 * 20)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(26, 4)), rng.normal(size=(24, 4))
    given = {"metric": "euclidean", "reg": 0.1, "reg_m": 1.0, "landmarks": 2, "init": "independent", "max_iter": 2}
    if features:
        given |= {"features": (x[:, :2], y[:, :2]), "alpha": 0.7}
    with pytest.warns(mapuot.ConvergenceWarning):
        one, other = (mapuot.gromov(x, y, **given, backend=backend) for backend in ("cpu", "cuda"))
    assert isinstance(other._plan.cross, cp.ndarray)
    assert isinstance(other.plan, np.ndarray)
    for name in ("value", "value_error"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6)
    assert other.misfit == pytest.approx(one.misfit, rel=1e-6)
