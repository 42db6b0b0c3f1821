"""Newton's steps with a factor on a GPU equal the host's, step by step."""

import cupy as cp
import numpy as np
import pytest

import mapuot
from mapuot.arrays import host
from mapuot.backends import factored
from mapuot.backends.cpu.factored import HostPlans
from mapuot.backends.cuda.factored import DeviceArrayPlans, DevicePlans
from mapuot.backends.settings import FACTORS

pytestmark = pytest.mark.gpu


def posed(p, m, n, rho, forbidden):
    """Return the arguments of a workspace for p problems between clusters of unequal width, at reg 1e-3."""
    rng = np.random.default_rng([p, m, n])
    x, y = (rng.normal(size=(p, k, 2)) * 10 ** rng.uniform(-2, 0, (p, k, 1)) for k in (m, n))
    costs = ((x[:, :, None] - y[:, None]) ** 2).sum(-1) / 1e-3
    a = np.ones((p, m))
    b = np.ones((p, n))
    if forbidden:
        costs[:, ::5, ::3] = np.inf
        a[:, 2] = b[:, 5] = 0
    a, b = (w / w.sum(1, keepdims=True) for w in (a, b))
    rates = (np.full((p, k), 1e-3 / r) for k, r in ((m, rho[0]), (n, rho[1])))
    with np.errstate(divide="ignore"):
        log_c = np.log(a), np.log(b)
    start = (np.where(w > 0, 0.0, -np.inf) for w in (a, b))
    sides = tuple(factored.Margin("kl", *side) for side in zip((a, b), rates, strict=True))
    return costs, log_c, sides, *start


def compare_plans(here, there, costs, log_c):
    """Assert equal plans; the potentials of groups that exchange no mass may shift."""
    plans = []
    for log_u, log_v in (here.best, [x.get() for x in there.best]):
        logs = log_u + log_c[0], log_v + log_c[1]
        plans.append(np.exp(logs[0][:, :, None] + logs[1][:, None] - costs))
    assert plans[0].sum() > 0.1
    np.testing.assert_allclose(*plans, atol=1e-9)


def points(seed):
    """Return two clouds of clusters of unequal width."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, 2))
    widths = 10 ** rng.uniform(-2, 0, 5)
    of = rng.integers(0, 5, (2, 30))
    return centres[of] + widths[of][:, :, None] * rng.standard_t(4, (2, 30, 2))


def clustered(seed):
    x, y = points(seed)
    return 1e3 * ((x[:, None] - y) ** 2).sum(-1)


@pytest.mark.parametrize(
    ("p", "m", "n", "rho", "forbidden"),
    [
        (1, 9, 7, (np.inf, np.inf), False),
        (3, 70, 40, (np.inf, np.inf), False),
        (6, 50, 70, (np.inf, np.inf), False),
        (5, 33, 64, (1.0, np.inf), True),
        (2, 40, 33, (10.0, np.inf), True),
        (2, 40, 33, (np.inf, 0.01), True),
        (2, 30, 30, (0.1, 0.05), False),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_are_those_of_the_host(p, m, n, rho, forbidden):
    costs, log_c, sides, *start = posed(p, m, n, rho, forbidden)
    here = HostPlans(costs, log_c, sides, *start)
    sent = [tuple(map(cp.asarray, x)) for x in (log_c, start)]
    there_sides = [factored.Margin("kl", cp.asarray(side.weight), cp.asarray(side.k)) for side in sides]
    there = DevicePlans(cp.asarray(costs), sent[0], there_sides, *sent[1])
    allowed = np.full(p, 1e-10)
    spread = float(np.ptp(costs[np.isfinite(costs)]))
    # shifts depend on the rounding
    assert factored.improve(there, allowed, [], spread) <= 1.5 * factored.improve(here, allowed, [], spread)
    compare_plans(here, there, costs, log_c)


@pytest.mark.parametrize(
    ("names", "reg_m"),
    [
        (("range", "range"), (0.3, 0.3)),
        (("balanced", "range"), (np.inf, 1e-6)),
        (("tv", "tv"), (0.2, 0.2)),
        (("tv", "range"), (1.0, 0.1)),
        (("balanced", "l2"), (np.inf, 50.0)),
        (("l2", "kl"), (20.0, 1.0)),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_for_other_penalties(names, reg_m):
    p, m, n = 2, 14, 12
    costs, log_c, sides, *start = posed(p, m, n, (1.0, 1.0), False)
    given = []
    for name, rho, side in zip(names, reg_m, sides, strict=True):
        weight = side.weight
        if name == "range":
            given.append(factored.Margin(name, weight, 0 * weight, max(0.0, 1 - rho) * weight, (1 + rho) * weight))
        else:
            given.append(factored.Margin(name, weight, 1e-3 / rho + 0 * weight))
    here = HostPlans(costs, log_c, tuple(given), *start)
    log_there, start_there = (tuple(map(cp.asarray, x)) for x in (log_c, start))
    sides_there = [factored.Margin(x.penalty, *(None if y is None else cp.asarray(y) for y in x[1:])) for x in given]
    there = DeviceArrayPlans(cp.asarray(costs), log_there, tuple(sides_there), *start_there)
    allowed = np.full(p, 1e-10)
    spread = float(np.ptp(costs))
    assert factored.improve(there, allowed, [], spread) <= 1.5 * factored.improve(here, allowed, [], spread)
    compare_plans(here, there, costs, log_c)


def test_penalties_with_kinks_converge_on_the_device():
    costs, *_ = posed(1, 14, 12, (1.0, 1.0), False)
    for penalty, reg_m in ((("balanced", "range"), (np.inf, 1e-6)), ("tv", 0.2 / 1e-3), ("l2", 20 / 1e-3)):
        known = {"reg": 1.0, "reg_m": reg_m, "penalty": penalty}
        found = mapuot.solve(cp.asarray(costs[0]), **known)
        exact = mapuot.solve(costs[0], tol=1e-9, **known)
        assert found.converged
        assert np.abs(host(found.plan) - exact.plan).sum() <= (found.error_bound + exact.error_bound) * exact.mass


def test_a_balanced_batch_of_clusters_is_certified_on_the_device():
    costs, *_ = posed(3, 40, 40, (np.inf, np.inf), False)
    found = mapuot.solve_batch(cp.asarray(costs), reg=1.0, reg_m=np.inf, max_passes=2000)
    assert found.converged.all()
    for result, M in zip(found, costs, strict=True):
        exact = mapuot.solve(M, reg=1.0, reg_m=np.inf, tol=1e-9)
        assert np.abs(result.plan.get() - exact.plan).sum() <= (result.error_bound + exact.error_bound)


@pytest.mark.parametrize("most", [1, 4, 30])
def test_bounds_are_true_where_passes_end_before_the_steps(most):
    """Passes that leave the certificate to steps are certified where no pass is left for these."""
    for seed in range(4):
        M = clustered(seed)
        exact = mapuot.solve(M, reg=1.0, reg_m=np.inf, tol=1e-9)
        for cost in (cp.asarray(M), mapuot.PointCloud(*points(seed), scale=1e3)):
            result = mapuot.solve(cost, reg=1.0, reg_m=np.inf, max_passes=most, backend="cuda")
            error = np.abs(host(result.plan) - exact.plan).sum() / exact.plan.sum()
            assert error <= result.error_bound + exact.error_bound
            assert result.n_passes <= most


def test_ragged_clouds_in_several_chunks(using):
    """A chunk without the largest cloud has the shape of all."""
    using(FACTORS, chunk_bytes=1)
    clouds = [points(seed)[:, : 30 - 5 * seed] for seed in range(3)]
    known = {"reg": 1.0, "reg_m": np.inf}
    found = mapuot.solve_batch(mapuot.PointCloud(*zip(*clouds, strict=True), scale=1e3), backend="cuda", **known)
    assert found.converged.all()
    for result, (x, y) in zip(found, clouds, strict=True):
        exact = mapuot.solve(mapuot.PointCloud(x, y, scale=1e3), tol=1e-9, **known)
        assert np.abs(host(result.plan) - exact.plan).sum() <= result.error_bound + exact.error_bound


@pytest.mark.parametrize("most", [1, 3, 10])
def test_a_batch_keeps_to_max_passes(most):
    costs = np.stack([clustered(seed) for seed in range(3)])
    found = mapuot.solve_batch(cp.asarray(costs), reg=1.0, reg_m=np.inf, max_passes=most)
    assert max(result.n_passes for result in found) <= most + 1


@pytest.mark.parametrize("at", [1, 20, 60])
def test_a_callback_ends_a_solve_whose_passes_certify_nothing(at):
    M = clustered(0)
    exact = mapuot.solve(M, reg=1.0, reg_m=np.inf, tol=1e-9)
    calls = []

    def stop(stats):
        calls.append(stats)
        return len(calls) == at

    result = mapuot.solve(cp.asarray(M), reg=1.0, reg_m=np.inf, callback=stop)
    assert result.n_passes <= at + 2
    assert np.abs(host(result.plan) - exact.plan).sum() <= result.error_bound + exact.error_bound


def test_clouds_on_the_device_are_solved_by_steps():
    x, y = points(0)
    result = mapuot.solve(mapuot.PointCloud(cp.asarray(x), cp.asarray(y), scale=1e3, form=None), reg=1.0, reg_m=np.inf)
    assert result.converged
