"""solve_batch and the torch losses on a GPU against the CPU."""

import cupy as cp
import numpy as np
import oracle
import pytest
from judge import measure
from numpy.testing import assert_allclose
from problems import Case, histograms, totals_far_apart, verify

from mapuot import PointCloud, gromov_pairwise, solve, solve_batch
from mapuot.arrays import host
from mapuot.backends.cuda import batch as cuda_batch
from mapuot.backends.cuda.settings import DEVICE_BATCHES

pytestmark = pytest.mark.gpu
REG_M = [1.0, (0.5, 3.0), np.inf, (np.inf, 1.0), (1.0, np.inf)]
SIZES = [(37, 53), (128, 128), (1, 1), (3, 17), (100, 100), (128, 1), pytest.param((150, 200), marks=pytest.mark.slow)]


def batch_of(size, ratio, own):
    M, A, B = histograms(p=5, m=size[0], n=size[1], ratio=ratio, zeros=min(size) > 3)
    M = M / max(M.max(), 1e-300)
    return (M * np.linspace(0.5, 1, 5)[:, None, None] if own else M), A, B


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_problem_is_certified(size, reg_m, own):
    M, A, B = batch_of(size, 1.0 if np.isinf(reg_m).all() else 1.5, own)
    for reg in (1.0, 0.05):
        result = solve_batch(cp.asarray(M), cp.asarray(A), cp.asarray(B), reg=reg, reg_m=reg_m)
        assert isinstance(result.log_u, cp.ndarray)
        right = solve_batch(M, A, B, reg=reg, reg_m=reg_m, tol=1e-9)
        assert result.converged.all()
        for name in ("objective", "dual", "cost", "mass"):
            assert_allclose(getattr(result, name), getattr(right, name), rtol=1e-5)
        for i in range(len(right)):
            assert np.abs(result[i].plan.get() - right[i].plan).sum() <= 3e-6 * right.mass[i]


@pytest.mark.parametrize("reg", [0.01, 1e-3, 1e-4])
def test_small_reg_needs_no_help(reg, monkeypatch):
    """The kernel rebuilds K: no problem is solved alone, and none is NaN."""
    M, A, B = batch_of((40, 50), 1.5, False)
    monkeypatch.setattr("mapuot.route.batch.BatchRun.alone", None)
    result = solve_batch(M, A, B, reg=reg, reg_m=1.0, backend="cuda")
    assert isinstance(result.log_u, np.ndarray)
    assert result.converged.all()
    for one, a, b in zip(result, A, B, strict=True):
        verify(one, Case(M, a, b, reg, 1.0))
    assert not np.isnan(result.log_u).any()


@pytest.mark.parametrize(("symmetric", "start", "mass"), [(True, 1000.0, 1.0), (False, 0.0, 1e14)])
def test_scales_beyond_float32_go_to_float64_passes(symmetric, start, mass):
    """Potentials with scales beyond any K go to float64 passes; else K would be rebuilt for ever."""
    M = np.array([[0.7, 0.7], [0.7, 0.8]])
    A = mass * np.array([[0.04, 0.51], [0.69, 0.92]])
    options = {"reg": 7e-4, "reg_m": 0.3, "reference": "uniform", "tol": 1e-6, "symmetric": symmetric}
    result = solve_batch(M, A, A, warm_start=(np.full((2, 2), start),) * 2, backend="cuda", **options)
    for one, a in zip(result, A, strict=True):
        verify(one, Case(M, a, a, 7e-4, 0.3, reference="uniform"))


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
def test_a_dual_value_counts_what_large_potentials_round(own):
    """With masses 1000 times apart and reg far below reg_m, potentials reach 300 reg, and rho (a - r) is rounded."""
    rng = np.random.default_rng(4)
    M = 190 * rng.random((9, 3, 30))
    A = rng.random((9, 3))
    B = 0.005 * rng.random((9, 30)) / 30
    options = {"reg": 900.0, "reg_m": (6e5, 4e4), "reference": "uniform"}
    M = M if own else M[0]
    result = solve_batch(M, A, B, backend="cuda", precision="float64", tol=1e-9, method="sinkhorn", **options)
    for k, a in enumerate(A):
        case = Case(M[k] if own else M, a, B[k], options["reg"], options["reg_m"], reference="uniform")
        assert result.dual[k] <= measure(case, result.log_u[k], result.log_v[k]).dual


@pytest.mark.parametrize("depth", [5, 12])
def test_float64_passes_are_those_of_the_oracle(depth, monkeypatch):
    """float64 passes equal the oracle's with as many Anderson differences; more differences take fewer passes."""
    M, A, B = batch_of((60, 50), 1.5, False)
    monkeypatch.setattr(cuda_batch, "BATCH_DEPTH", depth)
    monkeypatch.setattr("mapuot.backends.reference.anderson_depth_of", lambda most, m, itemsize: depth)
    result = solve_batch(M, A, B, reg=4e-3, reg_m=1.0, backend="cuda", precision="float64", tol=1e-9)
    for i in range(len(A)):
        right = solve(M, A[i], B[i], reg=4e-3, reg_m=1.0, backend="reference", precision="float64", tol=1e-9)
        assert abs(int(result.n_passes[i]) - right.n_passes) <= 1 + right.n_passes // 20
        used = np.isfinite(right.log_u)
        assert_allclose(result[i].log_u[used], right.log_u[used], atol=1e-6)


def clouds_of(sizes, d, seed=3):
    """Return clouds of one dimension, and masses with one 0 on either side."""
    rng = np.random.default_rng(seed)
    x, y = ([np.sqrt(3 / d) * rng.random((k, d)) for k in side] for side in sizes)
    a, b = ([rng.uniform(0.1, 1, len(z)) for z in side] for side in (x, y))
    a[0][0] = b[-1][min(2, len(b[-1]) - 1)] = 0.0
    a, b = ([weights / weights.sum() for weights in side] for side in (a, b))
    return x, y, a, b


def assert_clouds_solved(result, cloud, A, B, reg, reg_m):
    """Assert that each problem of a batch is within its bound and agrees with its own matrix, as on the CPU."""
    assert result.converged.all()
    for k in range(len(result)):
        right = solve(np.asarray(cloud[k]), A[k], B[k], reg=reg, reg_m=reg_m, tol=1e-9)
        off = np.abs(result[k].plan - right.plan).sum() / right.mass
        assert off <= result.error_bound[k] + right.error_bound


SEVERAL = ((5, 300, 129, 17, 200, 64, 31), (257, 8, 130, 40, 128, 192, 33))


@pytest.mark.parametrize(
    ("d", "metric", "reg", "reg_m"),
    [(2, "euclidean", 0.05, 1.0), (3, "cityblock", 0.05, 1.0), (64, "sqeuclidean", 0.05, 1.0), (5, "cosine", 0.05, 1.0),
     (3, "sqeuclidean", 0.004, 1.0), (3, "sqeuclidean", 0.004, np.inf)],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [((150,), (140,)), ((20, 45), (30, 11)), SEVERAL])
def test_clouds_are_solved_on_the_device(d, metric, reg, reg_m, sizes):
    """One cloud and clouds of very different sizes agree, with points without mass, and symmetric; both precisions."""
    x, y, a, b = clouds_of(sizes, d)
    for precision in ("auto", "float64"):
        for cloud, A, B, one in ((PointCloud(x, y, metric), a, b, ""), (PointCloud(x, metric=metric), a, a, "one pot")):
            result = solve_batch(cloud, A, B, reg=reg, reg_m=(reg_m, reg_m), backend="cuda", precision=precision)
            if reg_m < np.inf:
                assert all("together" in how and one in how for how in result.how)
            assert_clouds_solved(result, cloud, A, B, reg, reg_m)


@pytest.mark.parametrize("sizes", [((140, 140), (150, 150)), ((20, 145), (130, 11)), ((20, 25), (30, 11))])
@pytest.mark.parametrize("d", [3, 20])
def test_clouds_on_the_device_stay_there(d, sizes, monkeypatch):
    """Coordinates, masses, potentials and derivatives stay on the device; NumPy input gives equal host arrays."""
    x, y, a, b = clouds_of(sizes, d)
    a[0][0] = b[-1][min(2, len(b[-1]) - 1)] = 0.1
    known = {"reg": 0.05, "reg_m": 1.0, "tol": 1e-9}
    there = [[cp.asarray(part) for part in side] for side in (x, y, a, b)]
    for with_self in (False, True):
        right = solve_batch(PointCloud(x, None if with_self else y), a, a if with_self else b, **known)
        cloud = PointCloud(there[0], None if with_self else there[1])
        if with_self:
            masses = there[2:3] * 2
        else:
            masses = there[2:]
        with monkeypatch.context() as patch:
            patch.setattr("mapuot.problem.clouds.Clouds.at_home", property(lambda self: pytest.fail("on the host")))
            found = solve_batch(cloud, *masses, **known)
            assert isinstance(found.log_u, cp.ndarray)
            slopes = found._backend.slopes(found.problem, None, found._closed[1:], (True, True), None)
        gradient = found.gradient()
        wanted = right.gradient()
        assert_allclose(slopes[0].get(), np.concatenate([*wanted.x]), atol=1e-8)
        same = solve_batch(PointCloud(x, None if with_self else y), a, a if with_self else b, backend="cuda", **known)
        for name in ("x", "y", "a", "b"):
            parts = (getattr(g, name) for g in (gradient, same.gradient(), wanted))
            for ours, on_host, other in zip(*parts, strict=True):
                assert isinstance(ours, cp.ndarray)
                assert not isinstance(on_host, cp.ndarray)
                assert_allclose(ours.get(), other, atol=1e-8)
                assert_allclose(on_host, other, atol=1e-8)


def test_points_that_are_not_finite_are_refused_on_the_device():
    x = cp.asarray(np.random.default_rng(0).random((2, 20, 3)))
    for bad in (np.nan, np.inf, 1e200):
        x[1, 3, 2] = bad
        with pytest.raises(ValueError, match=r"x and y must be finite and so near .* problem 1 is not"):
            solve_batch(PointCloud(x), reg=0.1, reg_m=1.0)


def test_last_pass_is_a_float64_one():
    """A solve that max_passes ends reports a bound that float32 passes cannot reach."""
    x, y, a, b = clouds_of(((150, 131), (140, 133)), 3)
    cloud = PointCloud(x, y)
    for most in (1, 2, 7):
        with pytest.warns(UserWarning, match="2 of 2 problems not converged"):
            result = solve_batch(cloud, a, b, reg=0.01, reg_m=1.0, backend="cuda", max_passes=most, method="sinkhorn")
        assert (result.n_passes == most).all()
        for k in range(2):
            right = solve(np.asarray(cloud[k]), a[k], b[k], reg=0.01, reg_m=1.0, tol=1e-9)
            off = np.abs(result[k].plan - right.plan).sum() / right.mass
            assert off <= result.error_bound[k] + right.error_bound
            assert result.dual[k] <= right.dual + right.gap <= result.dual[k] + result.gap[k] + 1e-12 + right.gap


def test_vectors_outside_of_shared_memory(using):
    x, y, a, b = clouds_of(((150, 131), (140, 133)), 3)
    cloud = PointCloud(x, y)
    known = {"reg": 0.01, "reg_m": 1.0, "backend": "cuda"}
    inside = solve_batch(cloud, a, b, **known)
    using(DEVICE_BATCHES, shared_room=0)
    outside = solve_batch(cloud, a, b, **known)
    assert (outside.n_passes == inside.n_passes).all()
    assert_allclose(outside.dual, inside.dual, rtol=1e-12)
    using(DEVICE_BATCHES, room=0)  # no block has room: each problem is solved alone
    alone = solve_batch(cloud, a, b, **known)
    assert not any("together" in how for how in alone.how)
    assert_allclose(alone.dual, inside.dual, rtol=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("own", "reg", "unused"), [(True, 0.05, "plainly"), (True, 1e-3, "plainly"), (False, 2e-3, "alone")]
)
def test_batches_of_more_than_128_points(own, reg, unused, on_device, monkeypatch):
    """Batches above 128 points run on the device with a cost each; with one cost in the C core, .2 ms each, not 4."""
    M, A, B = batch_of((150, 140), 1.5, own)
    monkeypatch.setattr(f"mapuot.route.batch.BatchRun.{unused}", None)
    given = [cp.asarray(x) if on_device else x for x in (M, A, B)]
    result = solve_batch(*given, reg=reg, reg_m=1.0, backend="cuda")
    monkeypatch.undo()
    assert isinstance(result.log_u, cp.ndarray if on_device else np.ndarray)
    right = solve_batch(M, A, B, reg=reg, reg_m=1.0, tol=1e-9)
    assert result.converged.all()
    off = np.abs(host(result.plan) - right.plan).sum((1, 2))
    assert (off <= (result.error_bound + right.error_bound) * right.mass).all()


def test_shapes_cover_every_size():
    for m in range(1, 129):
        for narrow in (False, True):
            o = cuda_batch.small_options((m, 129 - m), narrow)
            assert o["GROUPS"] * o["RT"] >= m
            assert 16 * o["CT"] >= 129 - m


# ---- torch


def test_torch_losses_stay_on_the_device():
    torch = pytest.importorskip("torch")
    from mapuot.torch import sinkhorn_loss

    M, A, B = batch_of((40, 50), 1.5, False)
    for costs in (M, M * np.linspace(0.5, 1, 5)[:, None, None]):
        for dtype, tol in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
            slopes = []
            for device in ("cpu", "cuda"):
                tensors = [torch.tensor(x, dtype=dtype, device=device, requires_grad=True) for x in (costs, A, B)]
                value = sinkhorn_loss(*tensors, reg=0.05, reg_m=1.0, tol=1e-9)
                assert value.device.type == device
                weights = torch.arange(1.0, 6.0, device=device, dtype=dtype)
                slopes.append([value, *torch.autograd.grad((value * weights).sum(), tensors)])
            for x, y in zip(*slopes, strict=True):
                assert y.device.type == "cuda"
                assert y.dtype == dtype
                assert_allclose(y.detach().cpu(), x.detach(), rtol=tol, atol=tol)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("sizes", [((140, 140), (150, 150)), ((20, 145), (130, 11)), ((20, 25), (12,))])
def test_torch_losses_of_clouds_stay_on_the_device(sizes, debias):
    """Ragged clouds and a shared cloud have the values, potentials and derivatives of the CPU."""
    torch = pytest.importorskip("torch")
    from mapuot.torch import SamplesLoss

    x, y, a, b = clouds_of(sizes, 3)
    found = []
    for device in ("cpu", "cuda"):
        x_, y_, a_, b_ = ([torch.tensor(z, device=device, requires_grad=True) for z in side] for side in (x, y, a, b))
        if len(y_) == 1:
            second = (b_[0], y_[0])
        else:
            second = (b_, y_)
        known = {"p": 2, "blur": 0.1, "reach": 0.5, "debias": debias, "tol": 1e-9}
        value = SamplesLoss(**known)(a_, x_, *second)
        grads = torch.autograd.grad(value.sum(), [*x_, *y_, *a_, *b_])
        f, g = SamplesLoss(**known, potentials=True)(a_, x_, *second)
        found.append([value.detach(), *grads, *f, *g])
        assert all(z.device.type == device for z in found[-1])
    for ours, right in zip(*found, strict=True):
        assert_allclose(right.cpu(), ours.cpu(), atol=1e-7)


def test_torch_streams_and_gradcheck():
    torch = pytest.importorskip("torch")
    from mapuot.torch import sinkhorn_divergence as divergence
    from mapuot.torch import sinkhorn_loss

    rng = np.random.default_rng(0)
    made = [rng.uniform(0.3, 1, (2, 4)), rng.uniform(0.3, 1.2, (2, 5)), rng.random((4, 5))]
    tensors = [torch.tensor(x, device="cuda", requires_grad=True) for x in made]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.autograd.gradcheck(
            lambda a, b, M: sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, tol=1e-10),
            tensors,
            eps=1e-6,
            atol=2e-6,
            rtol=1e-5,
        )
    x = torch.linspace(0, 1, 20, device="cuda")
    M = (x[:, None] - x) ** 2
    a = torch.softmax(-((x - 0.3) ** 2) / 0.01, 0).requires_grad_()
    value = divergence(M, a, torch.softmax(-((x - 0.7) ** 2) / 0.01, 0), reg=0.01, reg_m=1.0)
    value.backward()
    assert torch.isfinite(a.grad).all()
    assert float(value.detach()) > 0


@pytest.mark.parametrize("rho_b", [np.inf, 3.0])
def test_totals_far_apart_are_certified_truly(rho_b):
    """A problem with e^(-k x) or e^(k shift) beyond float64 leaves the batch: their product would be a wrong q."""
    judged = 0
    for seed in (465, 707, 1131, 2011):
        case = totals_far_apart(seed, rho_b)
        masses = case.a[None], case.b[None]
        found = solve_batch(cp.asarray(case.M), *masses, reg=case.reg, reg_m=case.reg_m, max_passes=300)[0]
        best = oracle.answer(case, host(found.log_v) if found.converged else None)
        if best is not None and found.error_bound < np.inf:
            judged += 1
            error = np.abs(host(found.plan) - best.plan).sum() / best.mass
            assert error <= found.error_bound * (1 + 1e-6) + best.error + 1e-12
            assert found.gap >= 0
    assert judged >= 2


@pytest.mark.parametrize("reg_m", ["shared", "own", "as reg", "hard"])
@pytest.mark.parametrize("kind", ["one cost", "own costs", "clouds", "euclidean", "large"])
def test_own_reg_and_reg_m(kind, reg_m):
    """Problems with their own reg, scaled to one batch where reg_m is proportional, have the answers of the CPU."""
    p = 5
    rng = np.random.default_rng(8)
    regs = 10 ** rng.uniform(-1.5, 0, p)
    rho = {"shared": 0.6, "own": 10 ** rng.uniform(-1, 1, p), "as reg": 7 * regs, "hard": np.inf}[reg_m]
    if kind in ("one cost", "own costs"):
        M, A, B = batch_of((20, 31), 1.0, kind == "own costs")
        there = cp.asarray(M)
    else:
        if kind == "large":
            sizes = (150, 140)
        else:
            sizes = (12, 17)
        x = [rng.normal(size=(sizes[0] - i, 3)) + 100 for i in range(p)]
        y = [rng.normal(size=(sizes[1] - 2 * i, 3)) + 100 for i in range(p)]
        if kind == "euclidean":
            metric = "euclidean"
        else:
            metric = "sqeuclidean"
        M = PointCloud(x, y, metric)
        A = None
        B = None
        there = PointCloud([*map(cp.asarray, x)], [*map(cp.asarray, y)], metric)
    result = solve_batch(there, A, B, reg=regs, reg_m=rho, backend="cuda")
    right = solve_batch(M, A, B, reg=regs, reg_m=rho, tol=1e-9)
    assert result.converged.all()
    for name in ("objective", "dual", "cost", "mass"):
        assert_allclose(getattr(result, name), getattr(right, name), rtol=1e-5, atol=1e-7)
    for i in range(p):
        apart = np.abs(host(result[i].plan) - right[i].plan).sum() / right.mass[i]
        assert apart <= result.error_bound[i] + right.error_bound[i]
    if kind in ("clouds", "euclidean"):
        found = result.gradient()
        want = right.gradient()
        for name in "xy" if reg_m == "hard" else "xyab":  # potentials of hard sides have a constant to choose
            for mine, other in zip(getattr(found, name), getattr(want, name), strict=True):
                assert_allclose(host(mine), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["one reg", "own regs"])
@pytest.mark.parametrize("reg_m", [1.0, np.inf], ids=str)
def test_chunks_of_smaller_clouds(own, reg_m, monkeypatch):
    """A chunk without the largest cloud has narrower tables, and reg_m of as many points."""
    monkeypatch.setattr(cuda_batch.DeviceBatches, "chunk_bytes", 1)
    rng = np.random.default_rng(0)
    x, y = ([rng.normal(size=(k, 2)) for k in sizes] for sizes in ((9, 12, 7), (11, 8, 14)))
    if own:
        reg = np.array([0.3, 0.4, 0.5])
    else:
        reg = 0.3
    found = solve_batch(PointCloud(x, y), reg=reg, reg_m=reg_m, backend="cuda", tol=1e-7)
    right = solve_batch(PointCloud(x, y), reg=reg, reg_m=reg_m, tol=1e-9)
    assert found.converged.all()
    assert all("1 problems together" in how for how in found.how)
    for mine, other in zip(found, right, strict=True):
        assert_allclose(host(mine.plan), other.plan, atol=2e-7)


@pytest.mark.parametrize("sizes", [(20,) * 4, (9, 31, 12, 20), pytest.param((140, 150), marks=pytest.mark.slow)])
def test_balanced_problems_with_themselves_are_solved_together(sizes, monkeypatch):
    """One potential meets both sides of most; none is left to the host's core or solved alone."""
    for name in ("plainly", "alone"):
        monkeypatch.setattr(f"mapuot.route.batch.BatchRun.{name}", None)
    rng = np.random.default_rng(0)
    x = [cp.asarray(rng.normal(size=(k, 3))) for k in sizes]
    reg = np.geomspace(0.03, 1, len(x))
    found = solve_batch(PointCloud(x), reg=reg, reg_m=np.inf, tol=1e-5)
    assert found.converged.all()
    assert all("one potential" in how and "together" in how for how in found.how)
    for k, one in enumerate(found):
        right = solve(PointCloud(host(x[k])), reg=reg[k], reg_m=np.inf, tol=1e-9)
        apart = np.abs(host(one.plan) - right.plan).sum()
        assert apart <= found.error_bound[k] + right.error_bound
        assert_allclose(one.dual, right.dual, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sizes", [(12, 17), (12, 140)], ids=["registers", "made"])
def test_passes_certify_what_hard_columns_miss(sizes, monkeypatch):
    """Where passes nearly meet the columns no steps are made; the bound counts the missed mass along paths."""
    monkeypatch.setattr("mapuot.route.batch.factored_batch", None)
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=(4, size, 2)) for size in sizes)
    found = solve_batch(PointCloud(cp.asarray(x), cp.asarray(y)), reg=0.5, reg_m=np.inf, tol=1e-3)
    assert found.converged.all()
    for k, one in enumerate(found):
        right = solve(PointCloud(x[k], y[k]), reg=0.5, reg_m=np.inf, tol=1e-10)
        plan = host(one.plan)
        missed = np.abs(plan.sum(0) - 1 / sizes[1]).sum() / plan.sum()
        assert np.abs(plan - right.plan).sum() / plan.sum() <= found.error_bound[k] + right.error_bound
        assert 1e-12 < min(sizes) * missed <= found.error_bound[k] * (1 + 1e-9) <= 1e-3


def test_certified_error_counts_masses_that_differ_by_rounding():
    """From one row the plan between hard sides is b, scaled to the mass of the row."""
    rng = np.random.default_rng(0)
    b = rng.dirichlet((1, 1), 400)
    uneven = b * (1 + 9e-15 * rng.choice([-1, 1], (400, 1)))
    found = solve_batch(cp.asarray(rng.random((400, 1, 2)) / 1e3), cp.ones((400, 1)), cp.asarray(uneven),
                        reg=1.0, reg_m=np.inf, tol=1e-7)  # fmt: skip
    apart = np.abs(host(found.plan)[:, 0] - uneven / uneven.sum(1, keepdims=True)).sum(1)
    assert found.converged.all()
    assert (apart > 1e-12).any()
    assert (apart <= found.error_bound + 4e-16).all()


@pytest.mark.parametrize("sizes", [(12, 10), (12, 140)], ids=["registers", "made"])
def test_no_gap_is_known_while_hard_columns_miss_more_than_tol_gap(sizes):
    rng = np.random.default_rng(1)
    M = rng.random((3, *sizes))
    found = solve_batch(cp.asarray(M), reg=0.05, reg_m=np.inf, tol=0.05, tol_gap=1e-9)
    missed = np.array([np.abs(host(one.plan).sum(0) - 1 / sizes[1]).sum() for one in found])
    assert found.converged.all()
    assert (missed > 1e-9).any()
    assert np.isinf(found.gap[missed > 1e-9]).all()


def test_pairs_of_spaces_are_those_of_the_cpu():
    rng = np.random.default_rng(0)
    shapes = [rng.normal(size=(n, 3)) * [3.0, 2.0, 1.0] for n in (9, 12, 7)]
    options = {"reg": 0.5, "metric": "euclidean", "tol": 1e-5, "inner_tol": 1e-8}
    for reg_m in (np.inf, 3.0):
        here, there = (gromov_pairwise(shapes, reg_m=reg_m, backend=name, **options) for name in ("cpu", "cuda"))
        np.testing.assert_allclose(there.value, here.value, rtol=1e-6)
        assert there.settled.all()
        assert there.error_bound.max() <= 1e-8
