"""solve_batch: every problem has the certified answer of `solve`, whatever else the batch holds, also for clouds."""

from contextlib import nullcontext

import numpy as np
import pytest
from numpy.testing import assert_allclose
from problems import clouds as case_of
from problems import histograms

import mapuot
from mapuot import PointCloud, solve, solve_batch
from mapuot.backends.cpu.batch import HostBatches
from mapuot.backends.settings import CALLS


@pytest.mark.parametrize("dtype", ["float64", "mixed"])
def test_answers_do_not_depend_on_company(isa, dtype, monkeypatch):
    """A problem has the same bits alone, in the batch, in chunks of four and on two threads."""
    M, A, B = histograms(p=21, m=30, n=45)
    result = solve_batch(M, A, B, reg=0.05, reg_m=1.0, precision=dtype)
    again = solve_batch(M, A, B, reg=0.05, reg_m=1.0, precision=dtype, threads=2)
    assert (result.log_u == again.log_u).all()
    for i in (0, 7, 20):
        alone = solve_batch(M, A[i : i + 1], B[i : i + 1], reg=0.05, reg_m=1.0, precision=dtype)
        assert (alone.log_u == result.log_u[i]).all()
        assert alone.n_passes == result.n_passes[i]
    most = 4 * HostBatches().bytes_each(result.problem, 8, "float64")
    monkeypatch.setattr(HostBatches, "chunk_bytes", most)
    assert (solve_batch(M, A, B, reg=0.05, reg_m=1.0, precision=dtype).log_u == result.log_u).all()


def minibatches(p=7, m=21, n=18, dtype=float):
    """Return a matrix of squared distances for each problem; at a small reg one K cannot hold them."""
    rng = np.random.default_rng(p)
    x = rng.normal(size=(p, m, 2))
    y = rng.normal(size=(p, n, 2)) + 0.5
    A = rng.random((p, m)) + 0.1
    B = rng.random((p, n)) + 0.1
    A[1, ::3], B[2, 1::4] = 0, 0
    return ((x[:, :, None] - y[:, None]) ** 2).sum(-1).astype(dtype), A / A.sum(1)[:, None], B / B.sum(1)[:, None]


def assert_as_alone(result, costs, A, B, which=None, tol=1e-6, storage=0.0, **options):
    """The plans of a batch and their reported costs agree with single solves within both bounds."""
    for i in range(len(result)) if which is None else which:
        one = solve(costs[i], A[i], B[i], tol=1e-10, precision="float64", **options)
        single = 1.0 * (one.plan.dtype == np.float32)
        assert result[i].plan.shape == one.plan.shape
        apart = np.abs(result[i].plan.astype(float) - one.plan).sum() / one.mass
        assert apart <= result.error_bound[i] + one.error_bound + 1e-6 * single
        assert result.status[i] == result[i].status == "converged"
        assert result.error_bound[i] <= tol
        assert_allclose(result[i].row_marginal, result.row_marginal[i][: one.plan.shape[0]])
        rounding = (1e-9 + storage + 1e-5 * single) * abs(one.dual)
        assert abs(result.dual[i] - one.dual) <= result.gap[i] + one.gap + rounding


@pytest.mark.parametrize("reg", [0.3, 0.05, 2e-3])
@pytest.mark.parametrize("reg_m", [1.0, (0.3, 30.0), (np.inf, 1.0), (2.0, np.inf)])
@pytest.mark.parametrize("options", [{}, {"precision": "mixed", "threads": 2}, {"tol": 1e-9}], ids=str)
def test_small_reg_stays_in_the_core(reg, reg_m, options, monkeypatch):
    """Where one K cannot hold a problem, the core absorbs and anneals reg for each problem of the batch by itself."""
    monkeypatch.setattr(mapuot.route.batch.BatchRun, "alone", None)
    for M, A, B in (minibatches(), minibatches(dtype="f4"), (minibatches()[0][0], *minibatches()[1:])):
        result = solve_batch(M, A, B, reg=reg, reg_m=reg_m, **options)
        costs = [M] * len(A) if M.ndim == 2 else M
        exact = {"tol": options.get("tol", 1e-6), "storage": 2.0**-23 * ("precision" in options)}
        assert_as_alone(result, costs, A, B, reg=reg, reg_m=reg_m, **exact)


def test_what_a_long_problem_leaves_is_solved_alone(using):
    using(CALLS, most_passes=6)
    M, A, B = minibatches()
    assert_as_alone(solve_batch(M, A, B, reg=0.02, reg_m=1.0), M, A, B, reg=0.02, reg_m=1.0)


def test_result_is_a_sequence():
    M, A, B = histograms()
    result = solve_batch(M, A, B, reg=0.05, reg_m=1.0)
    assert (len(result), len(result[1:3]), result[-1].gap) == (5, 2, result.gap[4])
    weights = np.linspace(-1, 1, 5)
    assert_allclose(result.plan_sum(weights), sum(w * result[i].plan for i, w in enumerate(weights)), atol=1e-15)
    assert_allclose(result.f, 0.05 * result.log_u)
    assert "5 problems 37x53" in repr(result)
    with pytest.raises(IndexError):
        result[5]


def batch_of(kind):
    rng = np.random.default_rng(0)
    x, y = ([rng.random((k, 2)) for k in sizes] for sizes in ((20, 31, 25), (30, 12, 18)))
    A, B = (rng.uniform(0.5, 1, (3, k)) / k for k in (4, 5))
    case = case_of(4, 5)
    if kind == "clouds":
        return mapuot.PointCloud(x, y), None, None
    if kind == "one cost":
        return (case.M, A, B)
    return (np.stack([case.M, 2 * case.M, 3 * case.M]), A[0], None)


@pytest.mark.parametrize("kind", ["clouds", "one cost", "own costs"])
def test_a_batch_goes_from_answer_to_answer(kind, monkeypatch):
    """Each problem of a chain starts from the answer before it and takes fewer passes than from zeros."""
    M, a, b = batch_of(kind)
    regs = [0.2, 0.19, 0.185]
    answers = list(mapuot.path(M, a, b, regs=regs, reg_ms=1.0, tol=1e-8))
    for reg, answer in zip(regs, answers, strict=True):
        cold = mapuot.solve_batch(M, a, b, reg=reg, reg_m=1.0, tol=1e-8)
        assert isinstance(answer, mapuot.BatchResult)
        assert answer.converged.all()
        np.testing.assert_allclose(answer.dual, cold.dual, rtol=1e-7)
        assert reg == regs[0] or answer.n_passes.sum() < cold.n_passes.sum()


# ---- many clouds

SIDES = [(1.0, 2.0), (np.inf, 1.0), (1.0, np.inf), np.inf]


def pairs_of(x, y, metric="sqeuclidean"):
    return [PointCloud(*pair, metric) for pair in zip(x, y, strict=True)]


def clouds(p, d=2, most=60, seed=0, alike=False):
    """Return (x, y, a, b) of p problems between clouds of 5 to ``most`` points, with masses of equal sums."""
    rng = np.random.default_rng(seed)
    if alike:
        sizes = np.full((2, p), most)
    else:
        sizes = rng.integers(5, most + 1, (2, p))
    points = [[rng.random((k, d)) for k in count] for count in sizes]
    masses = [[rng.random(k) + 0.1 for k in count] for count in sizes]
    return *points, *([w / w.sum() for w in side] for side in masses)


@pytest.mark.parametrize(
    ("p", "d", "metric", "reg_m"),
    [*((p, d, "sqeuclidean", 1.0) for p in (1, 7, 256) for d in (2, 3, 64)),
     *((5, 3, metric, reg_m) for metric in ("sqeuclidean", "euclidean", "cosine", "wfr") for reg_m in SIDES)],
)  # fmt: skip
def test_clouds_of_many_sizes(p, d, metric, reg_m):
    x, y, a, b = clouds(p, d)
    reg = 0.05 * d / 2 if p != 5 else 0.02
    result = solve_batch(PointCloud(x, y, metric), a, b, reg=reg, reg_m=reg_m, threads=2)
    for how in ({"form": None}, {"truncate": 40.0}) if (p, metric) == (7, "sqeuclidean") else ():
        made = solve_batch(PointCloud(x, y, metric, **how), a, b, reg=reg, reg_m=reg_m)
        assert not any("the matrix of the points" in how for how in made.how)
        assert_allclose(made.dual, result.dual, rtol=1e-6)
    assert_as_alone(result, pairs_of(x, y, metric), a, b, range(0, p, 1 + p // 8), reg=reg, reg_m=reg_m)


def test_sizes_from_five_to_two_thousand():
    """The driver of single solves takes the problems that are too large for the core's own memory."""
    x, y, a, b = clouds(4, 2, 40, seed=1)
    rng = np.random.default_rng(2)
    x[1], y[1] = rng.random((2000, 2)), rng.random((900, 2))
    a[1], b[1] = np.full(2000, 1 / 2000), np.full(900, 1 / 900)
    result = solve_batch(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    assert ["alone" in how for how in result.how] == [False, True, False, False]
    assert_as_alone(result, pairs_of(x, y), a, b, reg=0.05, reg_m=1.0)


def test_every_form_of_the_arguments():
    x, y, a, b = clouds(6, 3, 11, alike=True)
    want = solve_batch(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    tables = [np.stack(z) for z in (x, y, a, b)]
    starts = 11 * np.arange(7)
    flat = PointCloud(np.concatenate(x), np.concatenate(y), starts=starts)
    for M, A, B in (
        (PointCloud(*tables[:2]), *tables[2:]), (flat, np.concatenate(a), np.concatenate(b)), (flat, a, b),
        (PointCloud(tables[0], y, starts=None), tables[2], b),
    ):  # fmt: skip
        np.testing.assert_array_equal(solve_batch(M, A, B, reg=0.05, reg_m=1.0).log_u, want.log_u)
    assert (flat.shape, flat.ndim, len(flat), flat[2].shape) == ((6, 11, 11), 3, 6, (11, 11))
    assert_allclose(np.asarray(flat)[3], np.asarray(PointCloud(x[3], y[3])))
    equal = solve_batch(flat, reg=0.05, reg_m=1.0)
    assert_allclose(equal.problem.A, 1 / 11)
    x[2] = x[2][:4]
    ragged = solve_batch(PointCloud(x, tables[1][0]), reg=0.05, reg_m=1.0)
    assert_as_alone(ragged, pairs_of(x, [y[0]] * 6), [None] * 6, [None] * 6, reg=0.05, reg_m=1.0)
    assert ragged.log_u.shape == (6, 11)
    assert (ragged.log_u[2, 4:] == -np.inf).all()


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5]], ids=str)
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine"])
def test_gradients(metric, weights):
    x, y, a, b = clouds(6, 3, 30, seed=7)
    a[1][2], b[2][:3] = 0.0, 0.0
    more = {"reg": 0.05, "reg_m": (1.0, 2.0), "tol": 1e-10}
    found = solve_batch(PointCloud(x, y, metric, weights=weights), a, b, **more).gradient()
    for i in range(6):
        one = solve(PointCloud(x[i], y[i], metric, weights=weights), a[i], b[i], **more).gradient()
        for got, want in zip((part[i] for part in found[:4]), one[:4], strict=True):
            assert_allclose(got, want, atol=1e-8 * np.abs(want).max())
        assert found.error[i] < 1e-6
    same = solve_batch(PointCloud(np.stack([x[0]] * 3), y[0]), reg=0.05, reg_m=1.0).gradient()
    assert (same.x.shape, same.b.shape) == ((3, *x[0].shape), (3, len(y[0])))


def test_divergence_of_clouds():
    x, y, a, b = clouds(4, 2, 20)
    values = mapuot.sinkhorn_divergence(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    for i in range(4):
        want = mapuot.sinkhorn_divergence(PointCloud(x[i], y[i]), a[i], b[i], reg=0.05, reg_m=1.0)
        assert values[i] == pytest.approx(want, abs=1e-8)
    assert_allclose(mapuot.sinkhorn_divergence(PointCloud(x), a, a, reg=0.05, reg_m=1.0), 0.0, atol=1e-9)


def test_all_pairs():
    x, _, a, _ = clouds(7, 2, 30, seed=4)
    a[3] = 2 * a[3]
    x[6], a[6] = np.concatenate([x[6], x[5]]), np.concatenate([a[6], a[5]]) / 2  # the largest is no row
    D = mapuot.pairwise(x, a, reg=0.05, reg_m=1.0, metric="euclidean")
    assert (D == D.T).all()
    assert (np.diag(D) == 0).all()
    for i, j in ((0, 1), (2, 3), (6, 3), (5, 4)):
        M = PointCloud(x[i], x[j], "euclidean")
        want = mapuot.sinkhorn_divergence(M, a[i], a[j], reg=0.05, reg_m=1.0)
        assert D[i, j] == pytest.approx(want, abs=1e-8)
    equal = mapuot.pairwise(np.stack([z[:5] for z in x]), reg=0.05, reg_m=np.inf)
    assert (equal[~np.eye(7, dtype=bool)] > 0).all()


def test_costs_of_plans_beyond_float64_are_those_of_single_solves():
    """A plan of e^1e6 costs -inf without a NaN or a NumPy warning; a plan that fits has its product with M as cost."""
    rng = np.random.default_rng(0)
    A = rng.random((3, 4))
    B = rng.random((3, 5))
    A[:, 0] = 0
    for far in (0.0, 30.0, 1e6):
        M = rng.random((4, 5)) - far
        found = solve_batch(M, A, B, reg=0.02, reg_m=0.04)
        alone = [solve(M, a, b, reg=0.02, reg_m=0.04).cost for a, b in zip(A, B, strict=True)]
        with np.errstate(all="raise"):
            assert_allclose(found.cost, alone, rtol=1e-6)
        assert np.isneginf(found.cost).all() == (far == 1e6)


@pytest.mark.parametrize("penalty", ["kl", "tv", "l2"])
def test_a_side_without_mass_moves_nothing(penalty):
    """A problem with a side without mass once ended the whole batch, though its answer is known."""
    M = np.random.default_rng(0).random((5, 6))
    A = np.full((3, 5), 0.2)
    B = np.full((3, 6), 1 / 6)
    A[1] = 0.0
    call = {"reg": 0.1, "reg_m": 2.0, "penalty": penalty}
    batch = mapuot.solve_batch(M, A, B, **call)
    with pytest.warns(mapuot.ScalingWarning) if penalty == "kl" else nullcontext():
        least = mapuot.solve_batch(M, np.maximum(A, 1e-14), B, **call)
    assert batch.converged.all()
    np.testing.assert_allclose(batch.objective, least.objective, rtol=1e-5)
    np.testing.assert_allclose(batch.dual[1], batch.objective[1])
    assert batch.mass[1] == batch.cost[1] == batch.error_bound[1] == 0
    assert not batch[1].plan.any()
    assert not batch.plan[1].any()
    np.testing.assert_allclose(batch.plan[[0, 2]], mapuot.solve_batch(M, A[[0, 2]], B[[0, 2]], **call).plan, rtol=1e-12)
    shared = mapuot.solve_batch(M, A, B[0], **call)
    np.testing.assert_allclose(shared.objective, batch.objective)
    own = mapuot.solve_batch(np.stack([M] * 3), A, **call)
    np.testing.assert_allclose(own.objective, batch.objective)
    with pytest.raises(mapuot.InfeasibleError, match=r"problem 1: B\[1\] must be transported"):
        mapuot.solve_batch(M, A, B, reg=0.1, reg_m=(1.0, np.inf))
    if penalty != "kl":  # with such a penalty a plan may have mass where A has none
        with pytest.raises(ValueError, match="A must be of positive mass"):
            mapuot.solve_batch(M, A, B, reference="uniform", **call)


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning", "ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("reg_m", [np.inf, (1.0, np.inf)])
def test_bounds_of_hard_columns_are_true_in_a_batch(reg_m):
    """The mass that hard columns miss is less than the plan's error: Newton's step must find the bound."""
    rng = np.random.default_rng(8)
    M = rng.random((20, 30)) ** 3
    A, B = (rng.random((60, k)) ** 4 + 1e-6 for k in M.shape)
    A, B = (x / x.sum(1, keepdims=True) for x in (A, B))
    for tol in (1e-2, 1e-3):
        found = mapuot.solve_batch(M, A, B, reg=0.01, reg_m=reg_m, tol=tol)
        exact = mapuot.solve_batch(M, A, B, reg=0.01, reg_m=reg_m, tol=1e-9)
        assert exact.converged.all()
        for one, best in zip(found, exact, strict=True):
            assert np.abs(one.plan - best.plan).sum() <= (one.error_bound + best.error_bound) * best.mass


OWN = {
    "soft": lambda p, draw: 10 ** draw.uniform(-1, 1, p),
    "hard": lambda p, draw: np.full((p, 1), np.inf),
    "columns hard": lambda p, draw: (10 ** draw.uniform(-1, 1, (p, 1)), np.inf),
    "some hard": lambda p, draw: np.where(draw.random((p, 2)) < 0.5, np.inf, 10 ** draw.uniform(-1, 1, (p, 2))),
    "shared": lambda p, draw: 0.7,
}


def sides_of(reg_m, i):
    """Return the reg_m of both sides of problem i."""
    if isinstance(reg_m, tuple):
        return tuple(float(x[i, 0]) if np.ndim(x) else x for x in reg_m)
    return tuple(np.broadcast_to(reg_m[i] if np.ndim(reg_m) else reg_m, 2))


@pytest.mark.parametrize("kind", ["one cost", "own costs", "clouds"])
@pytest.mark.parametrize("own", OWN)
def test_each_problem_may_have_its_own_reg_and_reg_m(kind, own):
    """Answers, values, derivatives and warm starts equal single solves."""
    p = 7
    draw = np.random.default_rng(3)
    regs = 10 ** draw.uniform(-2.5, 0.5, p)
    reg_m = OWN[own](p, draw)
    if kind == "clouds":
        sizes = draw.integers(3, 25, (p, 2))
        xs, ys = ([draw.normal(size=(k, 2)) for k in sizes[:, side]] for side in (0, 1))
        costs = [PointCloud(x, y) for x, y in zip(xs, ys, strict=True)]
        M = PointCloud(xs, ys)
        A, B = ([z / z.sum() for z in map(draw.random, sizes[:, side])] for side in (0, 1))
    else:
        M = draw.random((p, 18, 21))
        A = draw.random((p, 18))
        B = draw.random((p, 21))
        A = A / A.sum(1)[:, None]
        B = B / B.sum(1)[:, None]
        A[2, ::3] = 0
        A[2] /= A[2].sum()
        M = M[0] if kind == "one cost" else M
        if kind == "one cost":
            costs = [M] * p
        else:
            costs = [*M]
    result = solve_batch(M, A, B, reg=regs, reg_m=reg_m)
    assert result.converged.all()
    again = solve_batch(M, A, B, reg=regs * 1.1, reg_m=reg_m, warm_start=result)
    assert again.converged.all()
    for i in range(p):
        sides = sides_of(reg_m, i)
        one = solve(costs[i], A[i], B[i], reg=regs[i], reg_m=sides, tol=1e-9)
        assert np.abs(result[i].plan - one.plan).sum() <= (result.error_bound[i] + one.error_bound) * one.mass * 1.001
        assert result[i].problem.reg == regs[i]
        for name in ("objective", "cost", "mass"):
            assert_allclose(getattr(result, name)[i], getattr(one, name), rtol=1e-5, atol=1e-9)
            assert_allclose(getattr(result[i], name), getattr(one, name), rtol=1e-5, atol=1e-9)
        assert abs(result.dual[i] - one.dual) <= result.gap[i] + one.gap + 1e-9 * abs(one.dual) + 1e-12
    if kind == "clouds":
        found = result.gradient()
        for i in range(p):
            for name in "xyab":
                assert_allclose(getattr(found, name)[i], getattr(result[i].gradient(), name), rtol=1e-7, atol=1e-9)
    if kind == "one cost":
        total = result.plan_sum(np.arange(p) + 1.0)
        assert_allclose(total, sum((i + 1) * result[i].plan for i in range(p)), rtol=1e-10, atol=1e-15)


def test_several_temperatures_of_one_problem():
    M = np.random.default_rng(0).random((30, 30))
    result = solve_batch(M, reg=[0.02, 0.2, 1.0], reg_m=1.0)
    for i, reg in enumerate((0.02, 0.2, 1.0)):
        assert_allclose(result.objective[i], solve(M, reg=reg, reg_m=1.0).objective, rtol=1e-6)
    assert result.f.shape == (3, 30)
    assert_allclose(result.f[1], result[1].f)


@pytest.mark.parametrize("reg_m", [np.ones((3, 1)), np.ones((3, 2)), (np.ones((3, 1)), np.ones((3, 1)))])
def test_balanced_sides_need_no_reg_m_of_each_problem(reg_m):
    """A side with the penalty "balanced" is hard, whatever reg_m its problems have; it was once taken as soft."""
    M = np.random.default_rng(0).random((3, 5, 4))
    both = solve_batch(M, reg=0.1, reg_m=reg_m, penalty="balanced")
    np.testing.assert_allclose(both.col_marginal, 0.25, rtol=1e-5)
    np.testing.assert_allclose(both.row_marginal, 0.2, rtol=1e-5)
    cols = solve_batch(M, reg=0.1, reg_m=reg_m, penalty=("kl", "balanced"))
    np.testing.assert_allclose(cols.col_marginal, 0.25, rtol=1e-5)
    assert abs(cols.row_marginal - 0.2).max() > 1e-3


@pytest.mark.parametrize("reg_m", [1.0, (2.0, np.inf), np.inf])
@pytest.mark.parametrize("name", ["median", "std"])
def test_scale_each_takes_the_unit_of_each_problem(name, reg_m):
    rng = np.random.default_rng(1)
    M = rng.random((4, 15, 12)) * np.array([1.0, 30.0, 1e-3, 1e4])[:, None, None]
    result = solve_batch(M, reg=0.05, reg_m=reg_m, scale_cost=name, scale_each=True)
    for i in range(4):
        one = solve(M[i], reg=0.05, reg_m=reg_m, scale_cost=name)
        assert one.scale_cost == result[i].scale_cost == result.scale_cost[i]
        assert_allclose(result.objective[i], one.objective, rtol=1e-6)
    with pytest.raises(ValueError, match="scale_each needs scale_cost"):
        solve_batch(M, reg=0.05, reg_m=reg_m, scale_each=True)


@pytest.mark.parametrize("wrong", [
    {"reg": [0.1, -1.0, 1.0]}, {"reg": [0.1, np.nan, 1.0]}, {"reg": [0.1, 0.2]}, {"reg_m": [1.0, 0.0, 1.0]},
    {"reg_m": [[1.0], [np.nan], [2.0]]}, {"reg_m": np.ones((3, 1)), "penalty": "range"}, {"reg_m": np.ones((4, 1))},
], ids=str)  # fmt: skip
def test_own_numbers_are_checked(wrong):
    with pytest.raises((ValueError, NotImplementedError), match="reg"):
        solve_batch(np.ones((3, 4, 5)), **{"reg": 0.1, "reg_m": 1.0} | wrong)


def test_a_tuple_is_a_pair_of_sides():
    """A tuple holds the penalties of the two sides, even for two problems of lone points."""
    A = np.array([[6.0], [7.0]])
    B = np.array([[0.1], [0.2]])
    rho = np.array([0.3]), np.array([5.0])
    batch = mapuot.solve_batch(np.ones((1, 1)), A, B, reg=0.2, reg_m=rho, tol=1e-9)
    own = mapuot.solve_batch(np.ones((1, 1)), A, B, reg=0.2, reg_m=[[0.3], [5.0]], tol=1e-9)
    for i in (0, 1):
        one = mapuot.solve(np.ones((1, 1)), A[i], B[i], reg=0.2, reg_m=rho, tol=1e-9)
        np.testing.assert_allclose(batch[i].plan, one.plan, rtol=1e-8)
        each = mapuot.solve(np.ones((1, 1)), A[i], B[i], reg=0.2, reg_m=float(rho[i][0]), tol=1e-9)
        np.testing.assert_allclose(own[i].plan, each.plan, rtol=1e-8)


def test_wrong_indices_and_flags_are_named():
    M = np.random.default_rng(0).random((2, 4, 5))
    batch = solve_batch(M, reg=0.1, reg_m=1.0)
    assert_allclose(batch[np.int64(1)].plan, batch.plan[1])
    for wrong in (1.5, "a", None, np.array([0, 1])):
        with pytest.raises(TypeError, match="have integers and slices as indices"):
            batch[wrong]
    clouds = np.random.default_rng(0).random((3, 5, 2))
    for wrong in ("no", 1, None):
        with pytest.raises(TypeError, match="scale_each must be True or False, got"):
            solve_batch(M, reg=0.1, reg_m=1.0, scale_cost="mean", scale_each=wrong)
        with pytest.raises(TypeError, match="scale_each must be True or False, got"):
            mapuot.pairwise(clouds, reg=0.1, reg_m=1.0, scale_cost="mean", scale_each=wrong)


def test_patterns_of_hard_sides_warn_once():
    """Problems that are solved apart, by their hard sides, keep their numbers in the one warning."""
    M = np.random.default_rng(0).random((3, 6, 7))
    reg = [1.0, 1e-4, 1.0]
    with pytest.warns(mapuot.ConvergenceWarning) as caught:
        found = mapuot.solve_batch(M, reg=reg, reg_m=[1.0, np.inf, 1.0], max_passes=60)
    assert found.converged.tolist() == [True, False, True]
    assert [str(x.message)[:56] for x in caught] == ["1 of 3 problems not converged; problem 1, the farthest: "]
