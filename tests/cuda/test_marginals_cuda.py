"""Many marginals on a GPU: a read of K equals plain products; solves agree with Newton's method and the CPU."""

import functools
import warnings

import cupy as cp
import numpy as np
import pytest
from marginals import STORED, check, drifting, edge_by_edge, problem
from scipy.sparse import csr_array

import mapuot
from mapuot.arrays import host
from mapuot.backends.cpu import marginals as cpu_marginals
from mapuot.backends.cuda import marginals, operator
from mapuot.backends.cuda.kernels import Strips
from mapuot.backends.settings import KERNELS
from mapuot.marginals.settings import TREES
from mapuot.problem.cost import Dense

pytestmark = pytest.mark.gpu


def made(m, n, dtype, shape=None):
    """Return a kernel of random costs and its passes in that shape."""
    cost = Dense(np.random.default_rng([m, n]).random((m, n)))
    made = operator.DeviceOperator(cost, 0.1)
    assert made.open(dtype) == dtype
    made.store(dtype)
    made.build(np.zeros(m), np.zeros(n))
    if shape is not None:
        made.lay_out(shape)
        made.strips = shape
    return made


def compare(made, passes=3):
    """Passes, which sweep forth and back, equal products in float64 with K as it is stored."""
    (m, n) = made.shape
    rng = np.random.default_rng(0)
    K = made.K.get()[:, :n].astype(np.float64)
    assert not made.K.get()[:, n:].any()
    for fi in np.linspace(0.7, 1.0, passes):
        v = rng.random(n)
        base = rng.normal(size=m)
        log_s, sums, largest = made.fused(v, base, fi, False)
        s = K @ v
        u = np.exp(base) * s**-fi
        np.testing.assert_allclose(log_s, np.log(s), rtol=0, atol=1e-13)
        np.testing.assert_allclose(host(sums), u @ K, rtol=1e-12)
        np.testing.assert_allclose(largest, u.max(), rtol=1e-12)
    np.testing.assert_allclose(made.dots(v), s, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("m", "n"),
    [
        (1, 1), (5, 7), (3, 2100), (37, 77), (9, 513),
        *(pytest.param(*x, marks=pytest.mark.slow)
          for x in [(300, 7 * 1001), (128, 128 * 128), (17, 500_001), (20_000, 77), (5000, 5000)]),
    ],
)  # fmt: skip
def test_one_read_is_two_products(m, n, dtype):
    compare(made(m, n, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("m", "n", "shape"),
    [
        (41, 200, Strips(128, 4, 2, 3, 80, 2, 3)),  # a ring of three tiles, a stream of 10 and one of 11, half a tile
        (50, 130, Strips(128, 8, 4, 9, 16, 1, 4)),  # more strips than lanes of a row
        (67, 600, Strips(128, 16, 8, 1, 608, 3, 3)),
        (23, 1100, Strips(256, 4, 1, 8, 144, 1, 5)),
    ],
)
def test_tiles_of_all_shapes(m, n, shape, dtype):
    compare(made(m, n, dtype, shape), passes=2)


def test_stored_pairs_are_refused():
    with pytest.raises(NotImplementedError, match=r"'cuda' takes no sparse costs\[0, 1\]"):
        mapuot.multimarginal({(0, 1): csr_array(np.eye(3))}, [np.ones(3)] * 2, reg=1, reg_m=1, backend="cuda")


def test_rows_too_wide_are_read_twice(monkeypatch):
    monkeypatch.setattr(operator, "strips_for", lambda *size: None)
    found = operator.DeviceOperator(Dense(np.ones((3, 50))), 0.1)
    assert found.open("float32") == "float64"
    found.store("float64")
    found.build(np.zeros(3), np.zeros(50))
    compare(found)


def test_kernels_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("mapuot.backends.cuda.operator.free_memory", lambda enough: 1000)
    with pytest.raises(MemoryError, match=r"the kernel of 10 x 120 costs needs .* GiB on the device"):
        mapuot.multimarginal(
            np.ones((10, 10, 12)), [np.ones(10), np.ones(10), np.ones(12)], reg=1.0, reg_m=1.0, backend="cuda"
        )


@pytest.fixture
def narrow(using):
    """Kernels of any size are in float32 where tol allows it."""
    using(TREES, small_entries=0)


@pytest.mark.parametrize("shape", ["array", "triangle"])
def test_turns_on_the_device_are_those_on_the_host(shape, using):
    """An array, or a triangle, that is too large to come back in each pass agrees with the host."""
    costs, masses = problem(shape, 3, 6)
    masses[1] = None
    here = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=[1.0, 1.0, np.inf], backend="cuda")
    using(KERNELS, host_entries=0)
    masses = [x if x is None else cp.asarray(x) for x in masses]  # may lie there, too
    there = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=[1.0, 1.0, np.inf], backend="cuda")
    assert there._body.left.there
    assert not here._body.left.there
    assert there.n_passes == here.n_passes
    for k in range(3):
        np.testing.assert_allclose(there.marginal(k), here.marginal(k), rtol=1e-9)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("odd", [0.0, np.nan, np.inf, -1e5])
def test_sums_over_points_are_those_of_the_host(parts, hard, odd):
    """Points operations match the host, alone and after a pass."""
    shape = (5, 1100, 40, 33)
    edges = [(0, 2), (1, 2), (2, 3)]
    reg = 0.05
    rng = np.random.default_rng(7)
    rho = np.array([2.0, np.inf if hard else 0.3, 0.0, 50.0])
    owner = np.repeat(np.arange(4), shape)
    log_weight = np.where(owner == 2, 0.0, rng.normal(size=len(owner)))
    given = shape, log_weight, np.exp(log_weight), rho, reg, edges
    here = cpu_marginals.Points(*given)
    there = marginals.DevicePoints(*given)
    labels = [rng.permutation(np.arange(n) % parts) for n in shape]
    for points in (here, there) if parts > 1 else ():
        points.set_parts(parts, owner * parts + np.concatenate(labels))
    out = {name: rng.normal(size=len(owner)) for name in ("near", "late", "log_u")}
    out["up"], state = rng.normal(size=(2, here.message[-1]))
    out["late"][3] += odd
    device = {name: cp.asarray(x) for name, x in out.items()}
    there.close(3, 0.9, device, cp.asarray(state))
    with np.errstate(invalid="ignore", over="ignore"):
        here.close(3, 0.9, out, state)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
    found = here.read()
    log_u, lam = found.log_u, found.lam
    with np.errstate(invalid="ignore"):
        for x, y in zip(vars(there.read()).values(), vars(found).values(), strict=True):
            if np.isfinite(y).all():
                close(host(x), y)
            else:
                assert not np.isfinite(host(x)).all()
    log_s = out["late"] - log_u
    x = there.worth(cp.asarray(log_u), cp.asarray(log_s))
    y = here.worth(log_u, log_s)
    sound = np.isfinite(y[0])
    np.testing.assert_array_equal(np.isfinite(x[0]), sound)
    close(x[:, sound], y[:, sound])
    if np.isfinite(log_s).all():
        close(there.log_amounts(cp.asarray(log_s)), here.log_amounts(log_s))
    np.testing.assert_array_equal(host(there.moved(cp.asarray(log_s), lam)), here.moved(log_s, lam))


@pytest.mark.parametrize("edges", ["one call", "some read twice", "each its own"])
@pytest.mark.parametrize("shape", ["chain", "star", "tree"])
@pytest.mark.parametrize(("reg", "tol"), [(0.1, 1e-9), (0.01, 1e-7), (0.1, 1e-6)])
def test_passes_are_those_of_the_cpu(shape, edges, reg, tol, narrow, monkeypatch):
    """Passes equal the CPU's by vectors that stay on the device, and by products for any subset of edges."""
    costs, masses = problem(shape, 4, 6)
    given = {"reg": reg, "reg_m": [1.0, 0.3, 0.02, 30.0], "tol": tol}
    strips_for = operator.strips_for
    cpu = mapuot.multimarginal(costs, masses, **given)
    if edges == "some read twice":
        monkeypatch.setattr(operator, "strips_for", lambda m, *size: None if m == 7 else strips_for(m, *size))
    if edges == "each its own":
        edge_by_edge(monkeypatch)
    found = mapuot.multimarginal(costs, masses, backend="cuda", **given)
    assert found.converged
    assert abs(found.n_passes - cpu.n_passes) <= 2 + 0.1 * cpu.n_passes
    check(found, costs, masses, reg, given["reg_m"], storage=3 * STORED * (tol > 1e-7))
    for k in range(4):
        np.testing.assert_allclose(found.marginal(k), cpu.marginal(k), atol=10 * tol)


@pytest.mark.parametrize(("reg_m", "at"), [(1.0, "host"), (np.inf, "device")])
def test_steps_are_corrected_as_on_the_cpu(reg_m, at, using):
    using(TREES, device_passes=0, corrected_entries=0, cheap=np.inf)
    costs, masses = drifting(reg_m, 60, 3)
    if at == "device":
        given = {pair: cp.asarray(M) for pair, M in costs.items()}
    else:
        given = costs
    found = mapuot.multimarginal(given, masses, reg=0.005, reg_m=reg_m, backend="cuda")
    cpu = mapuot.multimarginal(costs, masses, reg=0.005, reg_m=reg_m)
    assert found._body.coarse.on
    assert found.converged
    assert found.n_passes <= 1.2 * cpu.n_passes + 2
    for k in range(3):
        apart = np.abs(found.marginal(k) - cpu.marginal(k)).sum()
        assert apart <= 1.01 * (found.error_bound + cpu.error_bound) * cpu.mass + 1e-12


@pytest.mark.parametrize("shape", ["array", "chain", "triangle"])
@pytest.mark.parametrize("forbidden", [False, True])
def test_costs_on_the_device_stay_there(shape, forbidden, monkeypatch):
    costs, masses = problem(shape, 3, 6)
    if forbidden:
        (costs if shape == "array" else costs[0, 1] if (0, 1) in costs else costs[1, 0])[2] = np.inf
        masses[1][0] = 0.0
    if shape == "array":
        there = cp.asarray(costs)
    else:
        there = {pair: cp.asarray(M) for pair, M in costs.items()}
    want = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0, backend="cuda")
    if not forbidden:  # where inf or masses leave points out, the host looks for them
        monkeypatch.setattr("mapuot.marginals.slabs.host", None)
        monkeypatch.setattr("mapuot.problem.cost.host", None)
    result = mapuot.multimarginal(there, masses, reg=0.05, reg_m=1.0)
    monkeypatch.undo()
    for k in range(3):
        np.testing.assert_allclose(result.marginal(k), want.marginal(k), rtol=1e-12)
    np.testing.assert_allclose(result.cost, want.cost, rtol=1e-12)
    check(result, costs, masses, 0.05, [1.0] * 3)


@pytest.mark.parametrize("reg_m", [1.0, np.inf])
@pytest.mark.parametrize("debiased", [False, True])
def test_barycenters_on_the_device_are_those_of_the_host(reg_m, debiased):
    """A dense M and images on a Grid: the same q and bounds, by products on the device."""
    rng = np.random.default_rng(0)
    x = rng.random((420, 2))
    M = ((x[:, None] - x) ** 2).sum(-1)
    grid = mapuot.Grid((24, 24))
    call = {"reg_m": reg_m, "debiased": debiased, "max_passes": 12}
    for cost, there, A, reg in (
        (M, cp.asarray(M), rng.random((4, 420)), 0.05),
        (grid, grid, rng.random((2, 24, 24)), 9.0),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
            want = mapuot.barycenter(cost, A, reg, **call)
            got = mapuot.barycenter(there, cp.asarray(A), reg, **call)
        np.testing.assert_allclose(got.q, want.q, rtol=1e-11)
        np.testing.assert_allclose((got.gap, got.error_bound), (want.gap, want.error_bound), rtol=1e-3)


def test_a_barycenter_on_the_device_at_a_small_reg():
    """Sums that underflow a product are made from logarithms, on the device, too."""
    rng = np.random.default_rng(1)
    x = rng.random((420, 1))
    M = (x - x.T) ** 2
    A = rng.random((4, 420)) * (rng.random((4, 420)) < 0.1)
    want, got = (mapuot.barycenter(cost, A, reg=5e-4, reg_m=1.0) for cost in (M, cp.asarray(M)))
    assert max(got.error_bound, want.error_bound) <= 1e-6
    assert np.abs(got.q - want.q).sum() <= (got.error_bound + want.error_bound) * want.q.sum()


def test_products_of_barycenters_run_on_the_device(monkeypatch):
    """A large M on the device is multiplied there, a small one by one call on the host."""
    called = []
    times = operator.DeviceOperator.times
    monkeypatch.setattr(operator.DeviceOperator, "times", lambda *x: called.append(x) or times(*x))
    for n in (30, 800):
        x = np.random.default_rng(2).random((n, 1))
        mapuot.barycenter(cp.asarray((x - x.T) ** 2), np.ones((2, n)) + x.T, reg=0.1, reg_m=1.0)
        assert bool(called) == (n == 800)
