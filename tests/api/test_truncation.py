"""Solves that skip pairs of points have true bounds, and all their numbers are of one plan."""

import math

import numpy as np
import pytest
from conftest import CUDA

import mapuot
from mapuot.ascend import carry_out as driver
from mapuot.ascend import groups
from mapuot.ascend.settings import GROUPS
from mapuot.ascend.truncation import in_boxes
from mapuot.backends import boxes
from mapuot.backends.boxes import Boxes, PassState
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.backends.settings import BOXES
from mapuot.problem.problem import Problem
from mapuot.problem.settings import POINTS


def clouds(m=260, n=220, d=2):
    rng = np.random.default_rng(0)
    return rng.random((m, d)), rng.random((n, d)) * 0.9 + 0.2, rng.random(m) + 0.1, 1.3 * (rng.random(n) + 0.1)


def compare(x, y, a, b, reg, reg_m=1.0, penalty="kl", tol=1e-6, least=1.0, metric="sqeuclidean", near=None, **options):
    """A truncated solve agrees with a solve over all pairs; ``least``: the largest share of pairs that may be kept.

    ``near``: distance of the start from the answer; None starts from zeros.
    """
    exact = mapuot.PointCloud(x, y, metric, truncate=None)
    want = mapuot.solve(exact, a, b, reg=reg, reg_m=reg_m, penalty=penalty, tol=1e-10)
    cloud = mapuot.PointCloud(x, y, metric, truncate=3.0)
    if near is None:
        options["warm_start"] = None
    else:
        options["warm_start"] = (want.log_u + near, want.log_v - 2 * near)
    got = mapuot.solve(cloud, a, b, reg=reg, reg_m=reg_m, penalty=penalty, tol=tol, **options)
    if got.skipped:
        share = got.skipped.kept.share
    else:
        share = 1.0
    assert share <= least
    off = np.abs(got.plan - want.plan).sum()
    penalties = {got.problem.rows.penalty, got.problem.cols.penalty}
    strict = penalties <= {"kl", "l2"}
    hard = 4 * want.error_bound * bool(penalties & {"balanced", "range"})
    assert off <= (got.error_bound * (1 if strict else 5) + want.error_bound * 1.01) * got.mass
    assert got.dual <= want.objective + (1e-12 + hard) * abs(want.objective)  # without hard marginal errors
    if "larger regs" not in got.how:
        own = got.trace
    else:
        own = got.trace[-1:]
    assert all(stat.dual <= want.objective + (1e-12 + hard) * abs(want.objective) for stat in own)
    assert got.objective - got.dual <= got.gap + 1e-9 * abs(got.objective)
    return got, want


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_bound_is_true(isa, d, threads):
    if isa == "scalar" and threads > 1:
        pytest.skip("slow, and like the others")
    m, n = (260, 220) if d < 3 else (900, 700)
    got, _ = compare(*clouds(m, n, d), reg=5e-4 if d < 3 else 1e-3, least=0.7, threads=threads, tol=1e-4)
    assert got.converged


@pytest.mark.parametrize("penalty", ["kl", ("kl", "balanced"), ("balanced", "kl"), "l2", "tv", ("range", "kl")])
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
def test_every_penalty_and_metric(penalty, metric):
    x, y, a, b = clouds()
    compare(x, y, a, b, 5e-4 if metric in ("sqeuclidean", "cosine") else 8e-3, 0.4, penalty, 1e-4, metric=metric)


@pytest.mark.parametrize("reg_m", [1.0, (1.0, math.inf)])
@pytest.mark.parametrize("rows", [slice(130, 390), slice(-260, None), slice(1, None, 2)])
def test_a_part_of_a_cloud_is_a_cloud(rows, reg_m):
    """A part of a cloud is solved like a cloud of its own: the core once read the rows in front of the part."""
    x, y, a, b = clouds(520)
    options = {"reg": 5e-4, "reg_m": reg_m, "tol": 1e-4}
    part = mapuot.solve(mapuot.PointCloud(x, y, truncate=3.0)[rows], a[rows], b, **options)
    want = mapuot.solve(mapuot.PointCloud(x[rows], y, truncate=3.0), a[rows], b, **options)
    assert part.skipped is not None
    np.testing.assert_array_equal(part.plan, want.plan)
    assert part.error_bound == want.error_bound


@pytest.mark.parametrize("backend", ["cpu", *CUDA])
@pytest.mark.parametrize("precision", ["auto", "float64"])
def test_sums_of_kept_pairs_are_those_of_a_matrix_that_forbids_the_others(backend, precision):
    """Sums of kept pairs equal a matrix that forbids the others; on a line boxes of 128 points keep half of all."""
    if backend == "cpu":
        x, y, a, b = clouds()
    else:
        x, y, a, b = clouds(700, 600, 1)
    a[10:140] = 0.0
    if backend == "cpu":
        reg = 5e-4
        options = {}
    else:
        reg = 2e-4
        options = {"near": 0.01, "backend": backend}
    got, _ = compare(x, y, a, b, reg, least=0.6, precision=precision, **options)
    M = np.where(got.plan > 0, np.asarray(got.problem.cost), np.inf)
    slopes = got.gradient()
    P = got.plan
    assert np.abs(slopes.x - 2 * (P.sum(1)[:, None] * x - P @ y)).max() <= 1e-9
    np.testing.assert_allclose(got.apply(y), P @ y, rtol=1e-9)
    np.testing.assert_allclose(got.col_marginal, P.sum(0), rtol=1e-6)
    forbidden = mapuot.solve(M, a, b, reg=got.problem.reg, reg_m=1.0, tol=1e-9)
    assert np.abs(P - forbidden.plan).sum() <= 1e-6 * got.mass


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock"])
@pytest.mark.parametrize("far", [0.0, 40.0, 3000.0])
def test_bounds_between_boxes_are_above_the_sums(isa, metric, far):
    x, y, a, b = clouds(150, 130, 3)
    y += far / 1000
    if metric == "sqeuclidean":
        reg = 1e-3
    else:
        reg = 0.02
    problem = Problem.from_arrays(mapuot.PointCloud(x, y, metric, truncate=2.0), a, b, reg, 1.0, "kl", "product", cpu)
    task = in_boxes(problem, False, 16)[0]
    rng = np.random.default_rng(3)
    M = np.asarray(task.cost) / reg
    log_u = M.min(1) + rng.normal(size=150) + 0.5 * far
    log_v = (M - log_u[:, None]).min(0) + rng.normal(size=130)
    P = np.exp(log_u[:, None] + log_v - M) * task.rows.weight[:, None] * task.cols.weight
    state = PassState(log_u, log_v, P.sum(1), P.sum(0))
    found = Boxes(task, native.SERIAL)
    for goal in (0.5, 1e-3, 1e-9):
        kept = found.make(state, goal, 1.0)
        if kept is None:
            continue
        skipped = np.ones(P.shape, bool)
        for i in range(len(kept.first) - 1):
            for start, stop in kept.run[2 * kept.first[i] : 2 * kept.first[i + 1]].reshape(-1, 2):
                skipped[i * kept.unit : (i + 1) * kept.unit, start:stop] = False
        hidden = np.where(skipped, P, 0.0)
        *sides, arrays = found.tilt(state)
        _, row_mass, col_mass = found.sweep(arrays, kept)
        for half, side, bound, axis in ((found.rows, sides[0], row_mass, 1), (found.cols, sides[1], col_mass, 0)):
            t = found.mass * half.share_out(bound, side.shares)
            assert (t >= hidden.sum(axis) * (1 - 1e-12)).all()
        share = found.skipped(state, kept)
        assert hidden.sum() <= share.mass
        assert share.error <= goal
        assert not skipped.all(1).any()
        assert not skipped.all(0).any()


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.nightly) for d in (2, 3))])
def test_groups_correct_passes(monkeypatch, d, using):
    """Balanced sides and points without mass take a handful of passes, far fewer than without the correction."""
    using(GROUPS, usual_groups=800 if d > 1 else 200)
    using(BOXES, correction_passes=math.inf)  # of so few points no groups are cheap
    reg = {1: 5e-4, 2: 5e-3, 3: 2e-2}[d]
    passes = []
    correct = groups.Groups.correct
    for reg_m in (1.0, (1.0, math.inf), (math.inf, math.inf), (0.3, 20.0)):
        x, y, a, b = clouds(1500, 1300, d)
        a[:40] = 0.0
        if reg_m == (math.inf, math.inf):
            b = b * (a.sum() / b.sum())
        want = mapuot.solve(mapuot.PointCloud(x, y, truncate=None), a, b, reg=reg, reg_m=reg_m, tol=1e-9)
        for way in (correct, None):
            monkeypatch.setattr(groups.Groups, "correct", way)
            got = mapuot.solve(mapuot.PointCloud(x, y, truncate=3.0), a, b, reg=reg, reg_m=reg_m, tol=1e-6)
            assert got.converged
            assert np.abs(got.plan - want.plan).sum() <= (2 * got.error_bound + want.error_bound) * want.mass
            passes.append(got.n_passes)
    corrected = passes[::2]
    plain = passes[1::2]
    assert max(corrected) <= 8  # between hard sides trials of Newton's steps are among them, with groups or without
    del corrected[2], plain[2]
    assert sum(corrected) <= 0.65 * sum(plain)


def test_a_correction_that_misleads_is_taken_back(monkeypatch, using):
    """A correction that raises the error, or makes it infinite or NaN, is undone, and the passes go on without any."""
    using(BOXES, correction_passes=math.inf)
    using(GROUPS, most_spread=math.inf, usual_groups=60)
    for wrong in (3.0, 300.0, math.nan):
        monkeypatch.setattr(
            "mapuot.ascend.groups.Groups.corrected",
            lambda self, state, error, w=wrong: state.log_v + w * np.sin(state.log_v),
        )
        got, _ = compare(*clouds(), 5e-3)
        assert got.converged


def test_groups_of_opposite_directions(using):
    """Opposite directions have no mean direction: groups of "cosine" lie between unit vectors, off the sphere."""
    using(GROUPS, usual_groups=16)
    x, y = (np.where(np.arange(100) < k, -1.0, 1.0)[:, None] for k in (44, 36))
    ones = np.ones(100)
    got, _ = compare(x, y, ones, ones, 0.05, metric="cosine")
    assert got.converged


def test_a_correction_that_cannot_be_met_ends(monkeypatch, using):
    """Hard columns may need more mass than all groups of rows have: such problems once took 10,000 passes."""
    using(BOXES, correction_passes=math.inf)
    using(GROUPS, most_spread=math.inf, usual_groups=150)
    found = []
    carry_out = driver.carry_out
    monkeypatch.setattr(driver, "carry_out", lambda *args: found.append(carry_out(*args)) or found[-1])
    x, y, *_ = clouds(700, 600)
    hard = y[:, 0] < 0.8
    b = np.where(hard, 0.999999 / hard.sum(), 1e-6 / (~hard).sum())
    reg_m = math.inf, np.where(hard, math.inf, 0.5)
    assert mapuot.solve(mapuot.PointCloud(x, y, truncate=3.0), None, b, reg=5e-3, reg_m=reg_m, tol=1e-6).converged
    assert max(result.n_passes for result in found) <= GROUPS.most_passes + 1  # one more behind a dropped step


@pytest.mark.parametrize("method", ["sinkhorn", "translation_invariant"])
def test_named_methods_make_plain_passes(method, using):
    """Named methods pass over all pairs that are not skipped, and no group correction follows."""
    using(BOXES, correction_passes=math.inf)
    using(GROUPS, most_spread=math.inf, usual_groups=60)
    x, y, a, b = clouds()
    start = mapuot.solve(mapuot.PointCloud(x, y), a, b, reg=1e-3, reg_m=1.0, tol=0.5)
    errors = []
    options = {"method": method, "precision": "float64", "max_passes": 20, "warm_start": (start.log_u, start.log_v)}
    for truncate in (3.0, None):
        with pytest.warns(mapuot.ConvergenceWarning):
            result = mapuot.solve(mapuot.PointCloud(x, y, truncate=truncate), a, b, reg=1e-3, reg_m=1.0, **options)
        errors.append([stat.error for stat in result.trace])
    np.testing.assert_allclose(*errors, rtol=1e-4)


def test_almost_no_mass_makes_no_bound_small():
    """reg times almost no mass rounds to 0, as does the growth of KL: only the skipped mass itself gives a bound."""
    x, y, a, b = clouds()
    cloud = mapuot.PointCloud(x, y, truncate=3.0)
    problem = in_boxes(Problem.from_arrays(cloud, a, b, 0.2, 1.0, "kl", "product", cpu), False, 16)[0]
    m, n = problem.shape
    r, s = (np.where(np.arange(k) == 0, 5e-324, 0.0) for k in (m, n))
    found = Boxes(problem, native.SERIAL)
    *sides, _ = found.tilt(PassState(np.full(m, -745.0), np.zeros(n), r, s))
    assert problem.reg * found.mass == 0
    row = np.full(found.rows.boxes, 1e-4)
    col = np.full(found.cols.boxes, 1e-4)
    share = found.share(row, col, found.growths(PassState(np.full(m, -745.0), np.zeros(n), r, s), sides))
    assert share.error >= np.sqrt(2 * row.sum())


def test_auto_skips_pairs_of_large_clouds(monkeypatch, using):
    using(POINTS, auto_entries=1 << 12)
    x, y, a, b = clouds()
    cloud = mapuot.PointCloud(x, y, form=None)
    got = mapuot.solve(cloud, a, b, reg=5e-4, reg_m=1.0)
    assert got.skipped is not None
    want = mapuot.solve_sample(x, y, a, b, reg=5e-4, reg_m=1.0, truncate=None, tol=1e-9)
    assert np.abs(got.plan - want.plan).sum() <= (got.error_bound + want.error_bound) * want.mass
    assert mapuot.solve(cloud, a, b, reg=0.5, reg_m=1.0).skipped is None
    assert boxes.unit_of((10**6, 10)) == 64
    monkeypatch.undo()
    assert mapuot.solve_sample(x, y, a, b, reg=5e-4, reg_m=1.0).skipped is None
