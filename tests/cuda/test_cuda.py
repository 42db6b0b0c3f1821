"""The CUDA backend equals the oracle: iterates, certificate and plan."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import ahead
import cupy as cp
import numpy as np
import pytest
from cupyx.scipy import sparse as device_sparse
from matrix import ARRAYS, TOLS, cells, check
from problems import pairs
from scipy import sparse

from mapuot import ConvergenceWarning, InfeasibleError, PointCloud, SeededMask, pairwise, solve, solve_batch
from mapuot.answer.slopes import dual_value, marginal_gradient
from mapuot.arrays import host
from mapuot.ascend.settings import STAGES
from mapuot.backends import Options
from mapuot.backends.cuda import arrays as cuda_arrays
from mapuot.backends.cuda import backend as cuda
from mapuot.backends.cuda import coarse as cuda_coarse
from mapuot.backends.cuda import kernels, warm_up
from mapuot.backends.cuda import operator as cuda_operator
from mapuot.backends.cuda.settings import DEVICE_ARRAYS, DEVICE_CALLS, DEVICE_LAUNCHES
from mapuot.backends.reference import backend as reference
from mapuot.backends.settings import COARSE
from mapuot.files import load_checkpoint
from mapuot.problem.problem import Problem
from mapuot.route.on_device import between, distances, one_call

pytestmark, SLOW = pytest.mark.gpu, pytest.mark.slow


def cost(m, n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random((m, 3))
    y = rng.random((n, 3))
    M = ((x[:, None] - y[None]) ** 2).sum(-1)
    return M / M.max(), rng.random(m) + 0.1, rng.random(n) + 0.1


def weighted(m, n, seed=0, mass=1.3):
    """Return costs and masses; the columns' masses add up to ``mass``, the rows' masses to 1."""
    M, a, b = cost(m, n, seed)
    return M, a / a.sum(), mass * b / b.sum()


def run(
    module,
    M,
    a,
    b,
    reg,
    reg_m,
    penalty,
    precision,
    passes,
    anderson_depth=5,
    translate=True,
    where="product",
    exact=False,
):
    """Return (stats, potentials, marginals) after that many passes."""
    problem = Problem.from_arrays(M, a, b, reg, reg_m, penalty, where, module)
    workspace = module.workspace(problem, Options(translate, anderson_depth, False, precision, 1e-13, -1.0, None))
    if module is cuda:
        workspace.state["limits"]["finer"] = 0  # the storage asked for to the end
        if exact:
            workspace.progress["narrow"] = 0
    workspace.absorb(np.zeros(M.shape[1]))
    stats = []
    while len(stats) < passes:
        stats += workspace.iterate(passes - len(stats))
        if stats[-1].status == "absorb":
            workspace.absorb(workspace.next_log_v)
        elif stats[-1].status != "running":
            break
    return stats, workspace.potentials(), workspace.marginals()


def check_passes(shape, precision, narrow, count, reg=0.05, reg_m=(1.0, 3.0), penalty="kl", mass=1.3, **more):
    """Assert that so many passes equal the oracle's; return both."""
    M, a, b = weighted(*shape, mass=mass)
    expected = run(reference, M, a, b, reg, reg_m, penalty, precision, count, **more)
    found = run(cuda, M, a, b, reg, reg_m, penalty, precision, count, exact=not narrow, **more)
    tol = {"float64": 1e-11 if penalty == "kl" else 1e-9, "float32": 2e-5 if narrow else 1e-6}[precision]
    assert len(found[0]) == len(expected[0]) or precision != "float64"
    # rounding of float32 sums
    if narrow:
        slack = 1e-6 * mass * (reg + 2 * sum(reg_m))
    else:
        slack = 0.0
    np.testing.assert_allclose(found[0][-1].dual, expected[0][-1].dual, rtol=tol, atol=slack)
    if precision == "float64" and not narrow:  # except for each core's own estimate of exponent rounding
        for one, other in zip(found[0], expected[0], strict=True):
            np.testing.assert_allclose([one.error, one.gap], [other.error, other.gap], rtol=1e-4, atol=1e-9)
    for x, y in zip(found[1] + found[2], expected[1] + expected[2], strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)
    return found, expected


@pytest.fixture(params=["persistent", "older", "portable"])
def path(request, monkeypatch):
    """Emulate an older GPU: no clusters, no bulk copies, little shared memory a block."""
    if request.param == "portable":
        monkeypatch.setenv("MAPUOT_CUDA", "portable")
    elif request.param == "older":
        launch = import_module("mapuot.backends.cuda.launch")
        processors = launch.device_limits(cp.cuda.Device().id)[1]
        monkeypatch.setattr(launch, "device_limits", lambda device: (86, processors, 99 << 10))
        monkeypatch.setattr(launch, "fitted", launch.fitted.__wrapped__)
    return request.param


@pytest.fixture
def spread(request, using):
    """Rows of more than 512 columns lie on the warps of clusters of so many blocks."""
    if int(cp.cuda.Device().compute_capability) < 90:
        pytest.skip("the persistent kernel needs sm_90")
    using(DEVICE_LAUNCHES, spread_columns=512, spread_clusters=(request.param,))


SHAPES = [(1, 1), (97, 131), (300, 515), (70, 1030), (40, 4100), (33, 9000), (9, 20001), (9, 65000)]
WIDE = [(33, 9000), (9, 65000)]
CASES = [
    *(pytest.param("float32", shape, marks=pytest.mark.slow if shape in WIDE else ()) for shape in SHAPES),
    *(("float64", shape) for shape in [(1, 1), (3, 17), (70, 1030), (33, 9000)]),
]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("precision", "shape"), CASES)
def test_passes_equal_the_oracle(path, precision, shape, narrow):
    check_passes(shape, precision, narrow, 5)


def test_portable_blocks_do_columns_in_rounds(monkeypatch, using):
    """Rows too wide for a block are read 4 at a time, and 3 blocks finish 9001 columns in rounds."""
    monkeypatch.setenv("MAPUOT_CUDA", "portable")
    using(DEVICE_LAUNCHES, most_blocks=3)
    check_passes((13, 9001), "float64", False, 6)


@pytest.mark.parametrize(
    ("spread", "precision", "shape", "narrow"),
    [
        (2, "float32", (45, 1310), True), (2, "float32", (45, 1310), False), (4, "float32", (20, 3001), True),
        (8, "float64", (1, 700), False),
    ],
    indirect=["spread"],
)  # fmt: skip
def test_spread_rows_equal_the_oracle(spread, precision, shape, narrow):
    """Three sweeps, forth and back, are right over rings that are shorter than a stream."""
    check_passes(shape, precision, narrow, 3)


def test_deep_memory_equals_the_oracle(path):
    """Run with twenty differences, four threads a column, and enough passes to replace the oldest difference."""
    found, expected = check_passes((400, 530), "float64", False, 25, reg=0.01, anderson_depth=20)
    assert not any(stat.rejected for stat in expected[0] + found[0])
    for x, y in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(x.error, y.error, rtol=1e-5, atol=1e-10)


@pytest.fixture
def corrected(monkeypatch, using):
    """Build a matrix after the first passes of any K and every 8 passes, and record the factors found for each M."""
    using(cuda_coarse.DEVICE_COARSE, sharp=0.0, least_entries=0, every=8)
    device = cuda_coarse.DeviceCoarse
    found = []
    find = device.find
    monkeypatch.setattr(device, "find", lambda self: found.append(find(self)) or found[-1])
    return found


def test_a_wrong_correction_is_dropped(path, corrected):
    """The guard ends the launch and the correction, which begins again with a new matrix after some passes."""
    M, a, b = weighted(300, 530)
    problem = Problem.from_arrays(M, a, b, 0.005, (1.0, 3.0), "kl", "product", cuda)
    workspace = cuda.workspace(problem, Options(True, 20, False, "float64", 1e-13, -1.0, None))
    workspace.absorb(np.zeros(530))
    assert len(workspace.iterate(5)) == 5
    assert workspace.correcting
    workspace.coarse.arrays["matrix"][: 64 * 64 : 65] += 30.0
    stats = [workspace.iterate(1)[0] for _ in range(2)]
    assert [stat.rejected for stat in stats] == [False, True]
    assert not workspace.correcting
    assert not any(stat.rejected for stat in workspace.iterate(COARSE.wait - 1))
    assert not workspace.correcting
    workspace.iterate(3)
    assert workspace.correcting


def test_a_pass_that_makes_a_matrix_follows_a_certificate(path, corrected):
    """Newton's step asks for passes after the kernels rest at "converged", also for the pass of a new matrix."""
    M, a, b = weighted(300, 530)
    problem = Problem.from_arrays(M, a, b, 0.05, (np.inf, 3.0), "kl", "product", cuda)
    workspace = cuda.workspace(problem, Options(True, 5, False, "float64", 1e-2, -1.0, None))
    workspace.absorb(np.zeros(530))
    assert workspace.iterate(50)[-1].status == "converged"
    assert workspace.coarse.renewed(1)


@pytest.mark.parametrize(("where", "precision"), [("host", "float64"), ("device", "auto")])
def test_corrected_solves_are_certified(path, precision, where, corrected):
    """Every row and column has a cluster, and the matrix between clusters saves passes."""
    M, a, b = weighted(310, 520, 1, mass=1.2)
    a[7], b[11] = 0.0, 0.0
    exact = solve(M, a, b, reg=0.01, reg_m=1.0, backend="cpu", tol=1e-11, precision="float64")
    if where == "device":
        given = cp.asarray(M)
    else:
        given = M
    options = {"reg": 0.01, "reg_m": 1.0, "precision": precision}
    found = solve(given, a, b, backend="cuda", **options)
    order, first, label = (x.get() for x in corrected[0])
    assert len(np.unique(label)) == len(np.unique(first)) - 1 == 64
    np.testing.assert_array_equal(np.sort(order), np.arange(310))
    assert found.converged
    error = np.abs(cuda.to_numpy(found.plan) - exact.plan).sum() / exact.plan.sum()
    assert error <= found.error_bound + exact.error_bound <= 1.1e-6
    assert found.n_passes <= 20  # 23 without
    assert "corrected by 64 clusters" in found.how


@pytest.mark.parametrize(
    ("penalty", "reg_m", "mass", "count"),
    [
        ("kl", 1.0, 1.3, 8), ("kl", (np.inf, 5.0), 1.3, 8), ("kl", (5.0, np.inf), 1.3, 8), ("balanced", 1.0, 1.0, 8),
        ("tv", 0.3, 1.3, 8), ("l2", 0.3, 1.3, 8), ("range", 0.1, 1.0, 8), (("kl", "tv"), 0.5, 1.1, 8),
        (("l2", "kl"), 0.5, 1.1, 8), *(("kl", reg_m, 30.0, k) for reg_m in [(1.0, 3.0), (np.inf, 3.0)] for k in (1, 2)),
    ],
)  # fmt: skip
def test_every_penalty_equals_the_oracle(path, penalty, reg_m, mass, count):
    """Every penalty equals the oracle, also for masses far apart in first passes, where the translation is large."""
    # kinks amplify rounding
    if {"tv", "l2", "range"}.isdisjoint([penalty, *penalty]):
        anderson_depth = 5
    else:
        anderson_depth = 0
    check_passes((128, 66), "float64", False, count, 0.1, reg_m, penalty, mass, anderson_depth=anderson_depth)


@pytest.fixture
def turning(monkeypatch):
    """Rows of more than 64 columns count as long; the shapes of K follow."""
    made = []
    workspace = cuda.workspace
    monkeypatch.setattr(cuda, "long_rows", 64)
    monkeypatch.setattr(cuda, "workspace", lambda *given: made.append(given[0].shape) or workspace(*given))
    return made


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ({}, True), ({"penalty": ("tv", "kl")}, True), ({"penalty": ("kl", "l2")}, True),
        ({"reg_m": (1.0, np.inf)}, True), ({"reg_m": (np.inf, 1.0)}, False),
        ({"method": "translation_invariant"}, False), ({"reference": "matrix"}, True),
        ({"penalty": ("range", "kl"), "reg_m": (0.2, 1.0)}, False),
    ],
)  # fmt: skip
def test_long_rows_are_read_as_columns(turning, given, turns):
    """A wide M on the device has the plan and sides of its transpose; hard rows stay rows."""
    M, a, b = weighted(19, 90)
    given = {"reg_m": (0.7, 2.0), **given}
    if "reference" in given:
        c = np.random.default_rng(1).random(M.shape)
        given["reference"] = np.where(c < 0.1, 0.0, c)
    expected = solve(M, a, b, reg=0.05, backend="reference", tol=1e-9, **given)
    if "reference" in given:
        given["reference"] = cp.asarray(given["reference"])
    found = solve(cp.asarray(M), a, b, reg=0.05, tol=1e-9, **given)
    assert set(turning) == {(90, 19) if turns else (19, 90)}
    assert found.converged
    error = np.abs(cuda.to_numpy(found.plan) - expected.plan).sum() / expected.plan.sum()
    assert error <= found.error_bound + expected.error_bound
    np.testing.assert_allclose(found.row_marginal, expected.row_marginal, rtol=1e-6)
    np.testing.assert_allclose(found.col_marginal, expected.col_marginal, rtol=1e-6)
    np.testing.assert_allclose(found.g - found.g[0], expected.g - expected.g[0], atol=1e-6)
    assert found.dual <= found.objective


def test_long_rows_and_what_is_known_of_an_answer(turning, tmp_path):
    """Warm starts of both sides or of one, a checkpoint of the transposed side, and M in host memory are accepted."""
    M, a, b = weighted(19, 90)
    cold = solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0)
    again = solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0, warm_start=cold)
    assert again.n_passes <= 2 < cold.n_passes
    assert solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0, warm_start=(cold.log_u, 0 * cold.log_v)).n_passes <= 2
    assert set(turning) == {(90, 19)}
    assert solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0, warm_start=(0 * cold.log_u, cold.log_v)).n_passes <= 2
    assert turning[-1] == (19, 90)
    solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0, checkpoint=tmp_path / "on")
    resumed = load_checkpoint(tmp_path / "on", 19, 90, 0.05)
    assert solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0, warm_start=resumed).n_passes <= 2
    assert turning[-1] == (90, 19)
    solve(M, a, b, reg=0.05, reg_m=1.0, backend="cuda")
    solve(cp.asarray(M[:, :60]), a, b[:60], reg=0.05, reg_m=1.0, symmetric=False)  # not by one call
    solve(cp.asarray(M.T.copy()), b, a, reg=0.05, reg_m=1.0, symmetric=False)
    assert turning[-3:] == [(19, 90), (19, 60), (90, 19)]


def on_device(M):
    """Return a cost on the device where its kind allows: rows backwards, columns apart, in Fortran order, as pairs."""
    if callable(M):
        return lambda i0, i1: cp.asarray(M(i0, i1))
    if sparse.issparse(M):
        return device_sparse.csr_matrix(sparse.csr_matrix(M))
    if M.flags.c_contiguous:
        return cp.asarray(M)
    return cp.asarray(np.repeat(M[::-1, ::-1].T, 2, axis=0).copy())[::-2].T[::-1]


ON_DEVICE = [cell for cell in cells() if cell.kind in (*ARRAYS, "pairs") and "kl" in cell.pair
             and cell.traits.reference in ("product", "uniform") and cell[:2] != ("pairs", "marginals")]  # fmt: skip


@pytest.mark.parametrize("precision", TOLS)
@pytest.mark.parametrize("cell", ON_DEVICE, ids=str)
def test_cells_of_costs_on_the_device(cell, precision):
    check(cell, precision, "cuda", on_device)


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning", "ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("many", [False, True])
def test_numbers_fit_the_plan_where_scalings_are_clipped(many):
    """Costs far below 0 ask for more mass than float32 scalings hold: an answer before the end has its plan's mass."""
    M, a, b = cost(4, 5)
    call = {"reg": 0.4, "reg_m": 1.0, "precision": "mixed", "max_passes": 6, "backend": "cuda"}
    if many:
        found = solve_batch(M - 400, a[None], b[None], **call)
    else:
        found = solve(M - 400, a, b, **call)
    plan, c = host((found[0] if many else found).plan), np.outer(a, b)
    np.testing.assert_allclose(found.mass, plan.sum(), rtol=1e-6)
    np.testing.assert_allclose(host(found.row_marginal).ravel(), plan.sum(1), rtol=1e-6)
    terms = [(plan, c, 0.4), (plan.sum(1), a, 1.0), (plan.sum(0), b, 1.0)]
    value = (plan * (M - 400)).sum() + sum(rho * (p * np.log(p / q) - p + q).sum() for p, q, rho in terms)
    np.testing.assert_allclose(found.objective, value, rtol=1e-3)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("reference", ["uniform", "matrix"])
@pytest.mark.parametrize("mass", [1e34, 1e60])
def test_masses_beyond_float32(where, reference, mass):
    """The scalings beside a float32 K end at e^85; a plan of more mass needs a float64 K."""
    M, a, b = cost(7, 5)
    if reference == "uniform":
        c = "uniform"
    else:
        c = np.random.default_rng(0).random(M.shape) + 0.1
    call = {"reg": 0.1, "reg_m": 1.0, "reference": c}
    if where == "device":
        given = cp.asarray(M)
    else:
        given = M
    found = solve(given, mass * a, mass * b, precision="mixed", **call, backend="cuda")
    right = solve(M, mass * a, mass * b, **call, backend="cpu")
    assert found.converged
    plan = host(found.plan)
    total = right.mass
    assert np.abs(plan / total - right.plan / total).sum() <= found.error_bound + right.error_bound
    assert float(found.mass) == pytest.approx(plan.sum(), rel=1e-6)
    assert float(found.objective) == pytest.approx(right.objective, rel=1e-9)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "array"])
def test_answers_lie_where_the_cost_does(form):
    """Host and device costs in one batch have device answers; pairs on the device are not moved to the CPU unasked."""
    (S, M, a, b) = pairs(20, 30, 0.3, dtype=np.float32)
    of_csr = form != "array"
    if of_csr:
        host = getattr(sparse, f"{form}_matrix")(S)
    else:
        host = M
    if of_csr:
        there = getattr(device_sparse, f"{form}_matrix")(host)
    else:
        there = cp.asarray(M)
    array = (cp.ndarray, np.ndarray)
    if of_csr:
        plan = (device_sparse.csr_matrix, sparse.csr_array)
    else:
        plan = None
    for cost, k in ((there, 0), (host, 1)):
        found = solve(cost, a, b, reg=0.1, reg_m=1.0, backend="cuda" if k else "auto")
        for x in (*found.top_k(2), *found.sample(9, 0), found.apply(b), found.apply_transpose(a)):
            assert isinstance(x, array[k])
        shares = found.push(cp.asarray(labels := np.arange(20) % 3))[1]
        np.testing.assert_array_equal(found.push(labels)[1], shares.get())
        for x in (found.plan, found.rows(4, 9)):
            assert isinstance(x, (plan or array)[k])
            assert x.dtype == np.float32
    batch = solve_batch([there, host] if of_csr else there, np.stack([a, a]), b, reg=0.1, reg_m=1.0)
    assert isinstance(batch.plan[0], (plan or array)[0])
    for function, M in ((solve, there), (solve_batch, [there] * 2)) if of_csr else ():
        with pytest.raises(TypeError, match="M must not lie on a GPU for backend 'cpu'"):
            function(M, a, b, reg=0.1, reg_m=1.0, backend="cpu")


@pytest.mark.parametrize("kind", ["C", pytest.param("F", marks=SLOW), "masked", "reference", "one call"])
def test_pairs_are_drawn_where_the_cost_is(kind):
    """Drawn pairs pass a chi-square test against the plan, 37 x 71; one call draws them with the device's numbers."""
    rng = np.random.default_rng(0)
    size = 20_000
    M = ((rng.random((37, 1, 2)) - rng.random((71, 2))) ** 2).sum(-1)
    if kind != "one call":
        M[3, 5:40] = np.inf
    more = {"masked": {"mask": SeededMask(0.7, seed=3)}, "reference": {"reference": cp.asarray(rng.random(M.shape))}}
    found = solve(cp.asarray(M, order="F" if kind == "F" else "C"), reg=0.1, reg_m=1.0, **more.get(kind, {}))
    share = found.plan.get() / found.plan.get().sum() * size
    for method in ("independent", "systematic"):
        count = np.zeros(M.shape)
        used = share >= 5
        np.add.at(count, tuple(k.get() for k in found.sample(size, 1, method=method)), 1)
        assert count[share == 0].sum() == 0
        assert ((count - share)[used] ** 2 / share[used]).mean() < 1.15  # 1 +- .04 for independent draws
    i, _ = found.sample(2 * 37, 1, method="rows")
    np.testing.assert_array_equal(i.get(), np.repeat(np.arange(37), 2))


ONE_CALL = {  # how the costs and options differ from plain ones, and whether one call solves them
    "plain": (lambda M: M, {}, True),
    "balanced first": (lambda M: 12 * M - 3, {}, True),  # range(M) / reg exceeds an unscaled K
    "hard rows": (lambda M: 12 * M, {"reg_m": (np.inf, 1.0)}, True),
    "float64": (lambda M: 9 * M, {"tol": 1e-9}, True),
    "float32 costs": (lambda M: M.astype(np.float32), {}, True),
    "a forbidden pair": (lambda M: np.where(np.arange(M.size).reshape(M.shape) == 7, np.inf, M), {}, False),
    "one potential": (lambda M: M + M.T, {}, False),
    "larger regs": (lambda M: 400 * M, {}, False),
    "hard columns": (lambda M: M, {"reg_m": (1.0, np.inf)}, False),
    "hard sides": (lambda M: M, {"reg_m": np.inf}, True),
    "hard sides in float32": (lambda M: M, {"reg_m": np.inf, "precision": "mixed"}, False),
    "few passes": (lambda M: M, {"max_passes": 2}, False),
    "columns apart": (np.asfortranarray, {}, False),
}


@pytest.mark.parametrize("case", ONE_CALL)
def test_a_plain_problem_is_solved_in_one_call(monkeypatch, using, case):
    """A solve in one call makes no Problem and no workspace; other cases take the ordinary path; all are right."""
    if cp.cuda.runtime.deviceGetAttribute(75, 0) < 9:
        pytest.skip("takes persistent kernels")
    change, given, whole = ONE_CALL[case]
    M, a, _ = cost(60, 60, 2)
    M = change(M / M.max())
    made = []
    workspace = cuda.workspace
    monkeypatch.setattr(cuda, "workspace", lambda *words: made.append(words) or workspace(*words))
    using(DEVICE_CALLS, sees_masses_first=False)
    given = {"reg": 0.05, "reg_m": 1.0, **given}
    found = solve(cp.asarray(M), a, a, **given)
    assert bool(made) == (not whole)
    exact = solve(np.ascontiguousarray(M), a, a, **given | {"tol": 1e-11, "precision": "float64", "max_passes": 9999})
    assert found.converged == ("max_passes" not in given)
    plan = np.exp(found.log_u[:, None] + found.log_v - M / given["reg"]) * np.outer(a, a)
    assert np.abs(plan - exact.plan).sum() <= (found.error_bound + exact.error_bound) * exact.plan.sum()
    assert found.dual <= exact.objective
    with pytest.raises(InfeasibleError, match="a and b must have equal masses"):
        solve(cp.asarray(M), a, 2 * a, reg=0.05, reg_m=np.inf)


@pytest.mark.parametrize("times", [1e5, 1e12])
def test_one_row_far_away_costs_no_certificate(times):
    M, a, _ = cost(60, 60, 2)
    M = np.where(np.arange(60)[:, None] == 7, times * M.max(), M / M.max())
    words = {"reg": 0.05, "reg_m": 1.0}
    exact = solve(M, a, a, **words, tol=1e-10)
    for found in (solve(cp.asarray(M), a, a, **words), *solve_batch(cp.asarray(M), a, [a], **words)):
        assert found.converged
        assert found.row_marginal[7] == 0.0
        assert np.abs(host(found.plan) - exact.plan).sum() <= (found.error_bound + 1e-10) * exact.mass
        assert found.n_passes < 60


def test_parts_with_unlike_masses_are_told_before_a_pass(monkeypatch):
    first = np.arange(40) < 20
    rest = np.arange(60) < 30
    M = cp.asarray(np.where(first[:, None] == rest, cost(40, 60, 2)[0], np.inf))
    a = np.full(40, 1 / 40)
    b = np.where(rest, 0.8, 1.2) / 60
    monkeypatch.setattr("mapuot.api.solve.check_cut", None)
    for given in (M, M.astype(np.float32), M.T.copy().T):
        with pytest.raises(InfeasibleError, match=r"M connects .* only, where .* must be transported"):
            solve(given, a, b, reg=0.2, reg_m=np.inf)
        with pytest.raises(InfeasibleError, match=r"problem 0: M connects .* only, where"):
            solve_batch(given, np.stack([a, a]), b, reg=0.2, reg_m=np.inf)


@pytest.mark.parametrize("kind", ["KL", "one potential", "and no longer", "hard sides", "larger regs"])
def test_what_one_call_leaves_is_gone_on_with(monkeypatch, using, kind):
    """After three passes, which count, the ordinary path continues; where none is left, it restarts from zeros."""
    if cp.cuda.runtime.deviceGetAttribute(75, 0) < 9:
        pytest.skip("takes persistent kernels")
    calls = import_module("mapuot.backends.cuda.graph_solve")
    calls.PREPARED.clear()
    monkeypatch.setattr(cuda, "quick_passes", 3)
    if kind == "and no longer":
        using(STAGES, most_together=3)
    M = cost(70, 70, 2)[0] * (15 if kind == "larger regs" else 1)
    there = cp.asarray(M)
    if kind in ("one potential", "and no longer"):
        x = np.random.default_rng(5).random((70, 2))
        there = PointCloud(cp.asarray(x))
        M = ((x[:, None] - x) ** 2).sum(-1)
    given = {"reg": 0.02, "reg_m": np.inf if kind == "hard sides" else 1.0}
    found = solve(there, **given)
    cold = solve(there, **given, callback=lambda stat: None)
    exact = solve(M, **given, tol=1e-11, precision="float64")
    assert ("3 passes in one call left" if kind == "larger regs" else "from a start of 3 passes") in found.how
    assert found.trace[3].dual != pytest.approx(
        found.trace[2].dual, rel=1e-12
    )  # equal values would mean that a pass was repeated
    assert ("one potential" in found.how) == (kind == "one potential")
    assert found.converged
    assert found.error_bound <= 1e-6
    assert [stat.n_pass for stat in found.trace] == list(range(1, found.n_passes + 1))
    assert found.n_passes <= cold.n_passes + 6
    assert np.all(np.diff([stat.seconds for stat in found.trace]) >= 0)
    error = np.abs(cuda.to_numpy(found.plan) - exact.plan).sum() / exact.plan.sum()
    assert error <= found.error_bound + exact.error_bound
    few = solve(there, **given, max_passes=3)
    assert (few.n_passes, few.status, "one call" in few.how) == (3, "max_passes", False)
    calls.PREPARED.clear()


@pytest.mark.parametrize(
    ("dtype", "reg", "reg_m", "tol"),
    [(np.float32, 0.3, 1.0, 1e-9), (np.float64, 0.3, 1.0, 1e-9), (np.float32, 3.0, np.inf, 1e-6)],
)
def test_solves_go_on_until_they_are_asked(dtype, reg, reg_m, tol):
    """Several solves of one shape, between points on the device, keep their own answers in any order; one is dropped.

    Solves that form their costs and draw pairs do so, too, as do later ones in the same buffers.
    """
    if cp.cuda.runtime.deviceGetAttribute(75, 0) < 9:
        pytest.skip("takes persistent kernels")
    drawn = [[np.random.default_rng(k).normal(size=(n, d)) for n in (40, 33)] for k, d in enumerate((1, 2, 9))]
    turns = [between((0, 0, None), 40, 33, d, np.dtype(dtype).itemsize, reg, reg_m, tol=tol)
             for d in (1, 2, 9)]  # fmt: skip
    rooms = [cp.empty(turn.words) for turn in turns]
    pairs = cp.empty((3, 2, 40), np.int64)
    before = []
    for scale in (1, 0.5):
        points = [[(scale * z).astype(dtype) for z in both] for both in drawn]
        given = [[*map(cp.asarray, both)] for both in points]
        costs = [distances(*both) for both in given]
        places = [(tuple(z.data.ptr for z in both), room.data.ptr, tuple(z.data.ptr for z in to), 40, 5, 0)
                  for both, room, to in zip(given, rooms, pairs, strict=True)]  # fmt: skip
        begun = [one_call(M, None, None, reg, reg_m, tol=tol) for M in costs]
        later = [turn.begin(*place) for turn, place in zip(turns, places, strict=True)]
        del begun[1]
        for k in (2, 0):
            x, y = (z.astype(np.float64) for z in points[k])
            M = ((x[:, None] - y) ** 2).sum(-1)
            np.testing.assert_allclose(costs[k].get(), M, rtol=1e-13, atol=1e-14)
            right = solve(M, reg=reg, reg_m=reg_m, tol=0.1 * tol)
            own, costs_there = turns[k].result(later[k], rooms[k])
            np.testing.assert_array_equal(costs_there.get(), costs[k].get())
            assert later[k].certain == (reg_m < np.inf)
            for found in (begun.pop()(), own):
                assert np.abs(found.plan.get() - right.plan).sum() <= 2 * tol * right.mass
                assert found._stream.alpha.data.ptr == found._found.exponents.data.ptr  # its plan
                assert found.mass == found.trace[-1].mass
            again = own._found.prepared.draw_pairs(costs_there, own._found.exponents, 40, 5)
            np.testing.assert_array_equal(pairs[k].get(), [z.get() for z in again])
            before.append((own.log_u, own.log_u.copy()))
    for now, then in before:
        np.testing.assert_array_equal(now, then)
    with pytest.raises(ValueError, match="as many dimensions"):
        distances(*(given[k][0] for k in (1, 2)))


@pytest.mark.parametrize("reg_m", [1.0, (np.inf, 1.0), (0.3, 2.0)])
def test_what_a_loss_takes_of_one_call(monkeypatch, reg_m):
    """torch's loss of one matrix takes one call; its value and slopes equal a batch of one problem."""
    if cp.cuda.runtime.deviceGetAttribute(75, 0) < 9:
        pytest.skip("takes persistent kernels")
    M, a, b = cost(40, 30, int(10 * np.sum(np.minimum(reg_m, 9))))  # with masses of its own
    given = cp.asarray(M), cp.asarray(a), cp.asarray(b)
    assert one_call(*given, 0.05, reg_m, tol=1e-9)() is None  # which came for the first time
    assert one_call(*given, 0.05, reg_m, mask=SeededMask(0.5, 1))() is None
    one = one_call(*given, 0.05, reg_m, tol=1e-9)()
    batch = solve_batch(*given, reg=0.05, reg_m=reg_m, tol=1e-9, precision="float64")
    np.testing.assert_allclose(dual_value(one), host(dual_value(batch))[0], rtol=1e-12)
    for name in ("rows", "cols"):
        np.testing.assert_allclose(marginal_gradient(one, name), host(marginal_gradient(batch, name))[0], atol=1e-8)
    np.testing.assert_allclose(host(one.plan), host(batch.plan_sum(cp.ones(1))), atol=1e-8)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("words", "shape", "reg_m"),
    [("ordered", (40, 60), 1.0), ("ordered", (40, 60), (np.inf, 0.5)), ("ordered", (90, 130), 1.0),
     ("portable", (40, 60), 1.0), ("portable", (40, 60), (np.inf, 0.5))],
)  # fmt: skip
def test_a_workspace_serves_one_cost_after_another(monkeypatch, using, words, shape, reg_m, whole):
    """One workspace serves costs of several scales, some balanced first, then threads, and a solve after a stopped one.

    The answers equal the answers of new workspaces, to the bit where sums are ordered, and no cost outlives its solve.
    """
    monkeypatch.setenv("MAPUOT_CUDA", words)
    if shape[0] > 40:  # clusters correct its passes
        using(cuda_coarse.DEVICE_COARSE, sharp=0.0, least_entries=0)
    module, calls = (import_module(f"mapuot.backends.cuda.{name}") for name in ("workspace", "graph_solve"))
    M, *masses = map(cp.asarray, cost(*shape, 2))
    using(DEVICE_CALLS, sees_masses_first=False)
    if whole and words == "ordered":
        symmetric = None
    else:
        symmetric = False
    if symmetric is None:
        kept = calls.PREPARED
    else:
        kept = module.IDLE
    most = module.MOST_IDLE
    scales = 1, 0.3, 8, 1, 1e-3, 1, 0.5
    costs = [(scale * M + k).astype((float, np.float32)[k % 2]) for k, scale in enumerate(scales)]

    def answer(M, afresh=False):
        if afresh:
            kept.clear()
        found = solve(M, *masses, reg=0.05, reg_m=reg_m, max_passes=60, symmetric=symmetric)
        return np.concatenate([[found.error_bound], found.log_u, found.log_v, found.col_marginal])

    def compare(found, want):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 if words == "portable" else 0)

    want = [answer(M, afresh=True) for M in costs]
    compare([answer(M) for M in costs], want)
    assert 0 < len(kept) <= most
    with ThreadPoolExecutor(1 if "cuda_on_cpu" in cp.__file__ else 3) as pool:
        compare(list(pool.map(answer, costs)), want)
    workspaces = [getattr(x, "workspace", x) for x in kept.values()]
    assert not any(vars(x).get(name) for x in workspaces for name in ("problem", "operator", "coarse"))
    kept.clear()
    if symmetric is None:
        stopped = (calls.SolveLaunches, "__call__")
    else:
        stopped = (module.DeviceWorkspace, "read")
    with monkeypatch.context() as patch:
        patch.setattr(*stopped, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            answer(costs[0])
    assert not kept
    compare(answer(costs[0]), want[0])


def test_memory_is_counted_first():
    free = cp.cuda.runtime.memGetInfo()[0] + cp.get_default_memory_pool().free_bytes()
    with pytest.raises(MemoryError, match="GiB are free; precision 'mixed' would fit"):
        cuda_arrays.need_memory(free + 1, "float64")
    with pytest.raises(MemoryError, match="no precision"):
        cuda_arrays.need_memory(1 << 60, "float64")
    with pytest.raises(MemoryError, match="no precision"):  # other buffers than K are no smaller in float32
        cuda_arrays.need_memory(2, "float64", free)


@pytest.mark.parametrize("place", ["host", "device", "function"])
@pytest.mark.parametrize(
    ("rows", "precision", "tol", "held"),
    [(1.5, "mixed", 1e-6, ["float32"]), (0.1, "auto", 1e-6, ["float64"]),
     (1.5, "float64", 1e-8, ["float32", "float64"]),
     (0.1, "float64", 1e-6, ["float64"])],
)  # fmt: skip
def test_a_matrix_larger_than_memory(monkeypatch, using, place, rows, precision, tol, held):
    """Memory decides the storage: the first that fits, else K rebuilt in every pass, 32 rows at once."""
    M, a, b = cost(130, 70, 2)
    module = import_module("mapuot.backends.cuda.workspace")
    exact = solve(M, a, b, reg=0.05, reg_m=1.0, backend="reference", tol=1e-10, precision="float64")
    using(DEVICE_ARRAYS, block_bytes=80 * 8 * 32)
    beside = 1 << 20
    stores = []
    module.IDLE.clear()  # an idle workspace would be used again without asking for memory
    using(DEVICE_CALLS, most_entries=0)  # calls are for small M
    monkeypatch.setattr(module.DeviceWorkspace, "beside", lambda self, dtype: beside)
    monkeypatch.setattr(module, "free_memory", lambda enough: beside + rows * 4 * 130 * 80)
    monkeypatch.setattr(cuda_arrays, "free_memory", lambda enough: 1 << 40)
    make_room = module.DeviceWorkspace.make_room
    monkeypatch.setattr(module.DeviceWorkspace, "make_room", lambda self: stores.append(self.dtype) or make_room(self))
    on_device = cp.asarray(M)
    given = {"host": M, "device": on_device, "function": lambda i0, i1: on_device[i0:i1]}[place]
    found = solve(given, a, b, reg=0.05, reg_m=1.0, backend="cuda", tol=tol, precision=precision)
    assert stores == held
    assert found.converged
    error = np.abs(cuda.to_numpy(found.plan) - exact.plan).sum() / exact.plan.sum()
    assert error <= found.error_bound <= tol
    np.testing.assert_allclose(found.row_marginal, exact.row_marginal, rtol=1e-4)


@pytest.mark.parametrize(
    ("place", "shape", "reg", "precision"),
    [("host", (12, 20_000), 0.05, "mixed"), pytest.param("host", (10_000, 150), 0.05, "mixed", marks=SLOW),
     pytest.param("device", (400, 1500), 0.001, "float64", marks=SLOW),
     pytest.param("host", (6000, 20_000), 0.05, "mixed", marks=SLOW)],
)  # fmt: skip
def test_no_more_memory_is_taken_than_counted(monkeypatch, using, place, shape, reg, precision):
    """No more memory is taken than counted: several blocks, a device matrix, each with a reference, and a large one."""
    large = shape[0] * shape[1] > 10**7
    counted = []
    pool = cp.cuda.MemoryPool()
    if not large:
        using(DEVICE_ARRAYS, block_bytes=1 << 20)
    module = import_module("mapuot.backends.cuda.workspace")
    monkeypatch.setattr(module, "free_memory", lambda enough: counted.append(enough) or 1 << 40)
    rng = np.random.default_rng(0)
    if place == "device":
        move = cp.asarray
    else:
        move = np.asarray
    M = move(rng.random(shape, dtype=np.float32))
    if large:
        c = "product"
    else:
        c = move(rng.random(shape))
    with cp.cuda.using_allocator(pool.malloc):
        solve(M, reg=reg, reg_m=1.0, backend="cuda", reference=c, precision=precision, max_passes=4)
    assert counted[0] / 2 - (1 << 25 if large else 1 << 20) < pool.total_bytes() <= counted[0] + large * (1 << 22)


def test_current_stream_is_used():
    M, a, b = cost(200, 300, 4)
    expected = solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0).plan.get()
    with cp.cuda.Stream(non_blocking=True) as stream:
        found = solve(cp.asarray(M), a, b, reg=0.05, reg_m=1.0).plan
        stream.synchronize()
        np.testing.assert_allclose(found.get(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [(30, 520), *(pytest.param(x, marks=pytest.mark.slow) for x in [(300, 1030), (40, 9000)])]
)
def test_ordered_sums_repeat_to_the_bit(monkeypatch, shape):
    """Sums of most groups are joined in float32 passes and, at 520 columns, in float64 ones."""
    monkeypatch.setenv("MAPUOT_CUDA", "ordered")
    M, a, b = weighted(*shape)
    for exact in (False, True):
        first, again = (run(cuda, M, a, b, 0.05, 1.0, "kl", "float32", 12, exact=exact) for _ in range(2))
        for x, y in zip(first[1] + first[2], again[1] + again[2], strict=True):
            np.testing.assert_array_equal(x, y)


def test_captured_passes_know_of_a_rebuilt_kernel(monkeypatch):
    """With balanced rows the dual value's constant contains K's absorbed scaling, so a captured graph must renew it."""
    monkeypatch.setenv("MAPUOT_CUDA", "portable")
    M, a, b = weighted(60, 80)
    problem = Problem.from_arrays(M, a, b, 0.01, (np.inf, 1.0), "kl", "product", cuda)
    duals = []
    for count in (18, 1):  # 18 passes at once are captured, single ones are not
        workspace = cuda.workspace(problem, Options(True, 0, False, "float64", 1e-13, -1.0, None))
        workspace.absorb(np.zeros(80))
        for _ in range(2):
            made = []
            while len(made) < 18:
                made += workspace.iterate(min(count, 18 - len(made)))
            workspace.absorb()
        duals.append(made[-1].dual)
    np.testing.assert_allclose(duals[0], duals[1], rtol=1e-10)


def test_a_plan_that_does_not_fit(monkeypatch):
    M, a, b = weighted(30, 40)
    result = solve(cp.asarray(M), a, b, reg=0.1, reg_m=1.0)
    monkeypatch.setattr(cuda_operator, "free_memory", lambda enough: 1000)
    with pytest.raises(MemoryError, match=r"30 rows of the plan need .* GiB are free: Result"):
        result.plan  # noqa: B018
    assert result.rows(3, 5).shape == (2, 40)


FIRST = [
    ((300, 515), "array"),
    ((64, 64), "batch"),
    ((64, 3), "clouds"),
    ((140, 2), "clouds"),
    ((64, 64), "hard"),
    *(((97, 131), what) for what in ("array", "sparse", 3, 50)),
]


@pytest.mark.parametrize(("shape", "what"), FIRST)
def test_warm_up_compiles_what_a_first_solve_needs(monkeypatch, shape, what):
    M, a, b = weighted(*shape)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(kernels, "LOADED", {})
    monkeypatch.setattr(kernels, "MODULES", {})
    monkeypatch.setattr(import_module("mapuot.backends.cuda.launch"), "READY", set())
    if what == "batch":
        result = solve_batch(cp.asarray(M), np.stack([a, a]), np.stack([b, b]), reg=0.05, reg_m=1.0)
        assert result.converged.all()
    elif what == "clouds":
        assert pairwise([cp.asarray(rng.random(shape)) for _ in range(3)], reg=0.05, reg_m=1.0).shape == (3, 3)
    elif what == "hard":
        assert solve(cp.asarray(M), reg=0.001, reg_m=np.inf).converged
    else:
        if isinstance(what, int):
            x = [rng.random((n, what)) for n in shape]
        else:
            x = ()
        if x:
            M = PointCloud(*x, form=None)
        elif what == "sparse":
            M = sparse.csr_array(M)
        else:
            M = cp.asarray(M)
        assert solve(M, a, b, reg=0.05, reg_m=1.0, backend="cuda").marginals[0].shape == shape[:1]
    jobs = warm_up.jobs(90)
    known = {kernels.module_key(0, file, function, *sorted(options.items())) for file, function, options in jobs}
    assert len(kernels.MODULES) > 1
    assert set(kernels.MODULES) <= known


def test_a_device_takes_what_was_compiled_ahead(monkeypatch, tmp_path):
    if "cuda_on_cpu" in cp.__file__:
        pytest.skip("binaries are for GPUs")
    nvrtc = ahead.library() or pytest.skip("needs NVRTC 13")
    arch = int(cp.cuda.Device().compute_capability)
    job = file, part, options = "point_costs.cu", "", (("METRIC", 0), ("PLAN", 0), ("STORE", 0))
    flags = [*kernels.flags_of(options), "-ftz=true", f"-arch=sm_{arch}"]
    binary, _ = ahead.compiled(nvrtc, kernels.source_of(file, part), flags)
    ahead.pack(tmp_path, {(arch, file, part): {kernels.key_of(*job): binary}})
    for name, value in (("LOADED", {}), ("MODULES", {}), ("AHEAD", tmp_path)):
        monkeypatch.setattr(kernels, name, value)
    cloud = PointCloud(*np.random.default_rng(0).random((2, 70, 3)))
    assert solve(cloud, reg=0.1, reg_m=1.0, backend="cuda").converged
    assert kernels.kernel(file, "point_costs", **dict(options)).file_path is not None
    assert kernels.loaded(b"no binary", False) is None


def test_unknown_switch(monkeypatch):
    monkeypatch.setenv("MAPUOT_CUDA", "fast")
    with pytest.raises(ValueError, match=r"'portable', 'ordered' and 'racecheck', got \['fast'\]"):
        solve(cp.ones((3, 3)), reg=1.0, reg_m=1.0)


def test_wrong_device(monkeypatch):
    M = cp.ones((4, 4))
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 7)
    with pytest.raises(ValueError, match="arrays must be on the current device 7, got one on 0"):
        cuda.asarray(M)


def test_log_scalings_that_lie_on_a_device_have_the_constant_of_the_costs():
    """A tensor's log_u is made of the device's vector: it lacked the part of a large constant in M."""
    rng = np.random.default_rng(3)
    M, a, b = rng.random((12, 15)), np.full(12, 1 / 12), np.full(15, 1 / 15)
    result = solve(M + 1e9, a, b, reg=0.05, reg_m=(np.inf, 1.0), backend="cuda")
    right = result.log_u, result.log_v
    assert abs(right[0]).max() > 1e8
    result._logs = tuple(map(cp.asarray, result._logs))
    for name, log_x in zip(("log_u", "log_v"), right, strict=True):
        np.testing.assert_array_equal(host(result._there[name]), log_x)


@pytest.mark.parametrize("unit", [1e-130, 1e130])
def test_the_unit_of_costs_does_not_change_the_dual_value(unit):
    """Float32 passes sum rho and reg times masses in float64: in units of 1e-120 the dual value was too large."""
    rng = np.random.default_rng(4)
    M, a, b = rng.random((5, 4)), rng.random(5), 2 * rng.random(4)
    for reg_m in ((20.0, 3.0), (np.inf, 3.0)):
        given = {"precision": "mixed", "method": "sinkhorn", "max_passes": 3, "backend": "cuda"}
        with pytest.warns(ConvergenceWarning):
            one = solve(M, a, b, reg=0.5, reg_m=reg_m, **given)
        with pytest.warns(ConvergenceWarning):
            other = solve(unit * M, a, b, reg=0.5 * unit, reg_m=tuple(unit * x for x in reg_m), **given)
        assert "float32" in one.how
        assert other.trace[-1].dual == pytest.approx(unit * one.trace[-1].dual, rel=1e-5, abs=0.0)
        assert other.trace[-1].dual <= other.objective
