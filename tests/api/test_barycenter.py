"""Barycenters equal their formulas and POT's limit."""

import re
from types import SimpleNamespace

import barycenters
import numpy as np
import ot
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse
from scipy.optimize import linprog
from scipy.special import logsumexp

import mapuot
from mapuot import pot
from mapuot.ascend.barycenters import Barycenter, DebiasedBarycenter
from mapuot.ascend.loop import Run
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.operator import least_eigenvalue
from mapuot.penalties import plan_error
from mapuot.problem.kinds import as_cost

pytestmark = pytest.mark.filterwarnings("ignore:Stabilized Unbalanced", "ignore:invalid value")


def histograms(n=20, k=3, seed=0):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 1, n)
    A = rng.random((n, k)) + 0.05
    return A * np.arange(1, k + 1), (x[:, None] - x) ** 2


def by_formulas(A, log_k, reg, reg_m, count, weights=None, log_v=0.0):
    """Return q, log u and log v after so many iterations, by sums of logarithms; log K is -inf for forbidden pairs."""
    if weights is None:
        weights = np.full(A.shape[1], 1 / A.shape[1])
    if np.isinf(reg_m):
        fi = 1.0
    else:
        fi = reg_m / (reg_m + reg)
    v = np.full(A.shape, log_v)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(count):
            u = fi * (np.log(A) - logsumexp(log_k[:, :, None] + v[None], axis=1))
            u[(A == 0) | np.isposinf(u)] = -np.inf
            log_s = logsumexp(log_k[:, :, None] + u[:, None], axis=0)
            if fi == 1:
                log_q = log_s @ weights
            else:
                log_q = logsumexp((1 - fi) * log_s, axis=1, b=weights) / (1 - fi)
            v = np.where(np.isneginf(log_s), -np.inf, fi * (log_q[:, None] - log_s))
    return np.exp(log_q), u, v


@pytest.mark.parametrize("seed", range(8))
def test_the_certificate_holds(seed):
    """Bounds on plans and q hold with zeros in A, masses 100 times apart, one histogram, and any tol."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    p = int(rng.integers(1, 5))
    x = rng.random((n, 2))
    A = rng.random((p, n)) ** 3 * (rng.random((p, n)) < 0.8)
    A[:, 0] += 0.01
    A *= 10 ** rng.uniform(-1, 1, (p, 1))
    M = ((x[:, None] - x) ** 2).sum(2)
    w = rng.dirichlet(np.ones(p))
    reg = 10 ** rng.uniform(-2, 0)
    reg_m = reg * 10 ** rng.uniform(-1, 1.2)
    near = mapuot.barycenter(M, A, reg=reg, reg_m=reg_m, weights=w, tol=1e-10)
    q, u, v = by_formulas(A.T, -M / reg, reg, reg_m, 600, w, near.log_v.T)
    limit = SimpleNamespace(q=q, log_u=u.T, log_v=v.T)
    for tol in (1e-2, 1e-6):
        found = mapuot.barycenter(M, A, reg=reg, reg_m=reg_m, weights=w, tol=tol)
        assert found.converged
        with np.errstate(invalid="ignore"):
            P, Q = (np.exp(x.log_u[:, :, None] - M / reg + x.log_v[:, None, :]) for x in (found, limit))
        apart = max(np.abs(P - Q).sum((1, 2)) @ w, np.abs(found.q - q).sum()) / found.q.sum()
        assert apart <= found.error_bound <= tol


def test_no_random_barycenter_is_further_off_than_its_bound():
    """Newton's method confirms every bound: any kind of cost, masses of 1e-120 to 1e120, and reg_m up to 1e16 reg."""
    totals, failures = barycenters.run(seed=3, count=60)
    assert failures == []
    assert totals["judged"] > 50
    assert totals["converged"] > 48


@pytest.mark.parametrize("form", ["array", "Grid", "stored pairs"])
@pytest.mark.parametrize("reg", [1e-2, 1e-3, 3e-4])
def test_a_balanced_mean_keeps_the_mass_and_the_mean(reg, form):
    """Passes over two far bumps of unequal mass may move potentials but not q; the solve must go on."""
    t = np.linspace(0, 1, 101)
    M = (t[:, None] - t) ** 2
    bumps = np.exp(-((t - np.array([[0.2], [0.8], [0.25], [0.75]])) ** 2) / 0.0018)
    A = np.array([[0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 0.1, 0.9]]) @ (bumps / bumps.sum(1, keepdims=True))
    M = {"array": M, "Grid": mapuot.Grid((101,), spacing=0.01), "stored pairs": sparse.csr_array(M + 1e-300)}[form]
    found = mapuot.barycenter(M, A, reg=reg)
    assert found.converged
    assert_allclose([found.q.sum(), found.q @ t], [1.0, 0.5 * (A @ t).sum()], atol=1e-6)
    assert found.n_passes < 100
    assert 0 <= found.gap <= 1e-12 * reg + 1e-13


@pytest.mark.parametrize("reg_m", [1e3, 1e8, 1e12, 1e15, 1e16])
def test_a_large_penalty_tends_to_the_balanced_mean(reg_m):
    A, M = histograms()
    A = A / A.sum(0)
    hard = mapuot.barycenter(M, A.T, reg=0.1, tol=1e-9)
    soft = mapuot.barycenter(M, A.T, reg=0.1, reg_m=reg_m, tol=1e-9)
    assert soft.converged
    assert hard.converged
    assert np.abs(soft.q - hard.q).sum() <= 1.0 / reg_m + 2e-9


@pytest.mark.parametrize("reg_m", [np.inf, 1e4])
def test_masses_below_the_least_plan_are_named(reg_m):
    """A plan of less than 1e-290 has no digits in float64: `barycenter` and `solve` say so, and name the cure."""
    A, M = histograms()
    A = (A / A.sum(0)).T
    with pytest.warns(mapuot.ConvergenceWarning, match=r"the masses are near the least .*: multiply A by a large"):
        assert mapuot.barycenter(M, 1e-295 * A, reg=0.1, reg_m=reg_m, callback=lambda _: None).status == "underflow"
    with pytest.warns(mapuot.ConvergenceWarning, match=r"the masses are near the least .*: multiply a and b"):
        assert mapuot.solve(M, *(1e-295 * A[:2]), reg=0.1, reg_m=reg_m).status == "underflow"
    assert mapuot.barycenter(M, 1e-280 * A, reg=0.1, reg_m=reg_m).converged


@pytest.mark.parametrize(("reg_m", "form"), [(np.inf, "array"), (0.5, "array"), (0.05, "array"), (0.5, "pairs")])
def test_the_value_of_a_debiased_mean_is_bounded(reg_m, form):
    """No q improves on the answer by more than its gap: neither later passes nor random ones."""
    A, M = histograms()
    A = (A / A.sum(0)).T
    reg = 0.01
    rng = np.random.default_rng(0)
    A *= 1.0 if np.isinf(reg_m) else np.array([[0.5], [1.0], [1.5]])
    if form != "array":
        M = banded(20, 20, 2)

    def value(q):
        costs = mapuot.solve_batch(M, np.vstack([A, q]), q, reg=reg, reg_m=reg_m, reference="uniform", tol=1e-10).dual
        return costs @ [1 / 3, 1 / 3, 1 / 3, -0.5]

    with pytest.warns(mapuot.ConvergenceWarning, match="the value is at most .* above the optimum"):
        last = mapuot.barycenter(M, A, reg=reg, reg_m=reg_m, debiased=True, tol_change=1e-14)
    assert last.n_passes == 1000
    others = [last.q, *(q / q.sum() for q in A.mean(0) * rng.uniform(0.5, 2, (20, 20)))]
    best = min(map(value, others))
    for passes in (1, 3, 10, 30, 100):
        with pytest.warns(mapuot.ConvergenceWarning):
            found = mapuot.barycenter(M, A, reg=reg, reg_m=reg_m, debiased=True, tol_change=1e-14, max_passes=passes)
        assert value(found.q) - best <= found.gap < np.inf
    assert last.gap < 0.3 * found.gap


@pytest.mark.parametrize("seed", range(6))
def test_one_call_makes_the_passes_that_a_callback_hears_of(seed):
    """Small soft problems end in one call of the core, with the answer and the certificate of single passes."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    p = int(rng.integers(1, 5))
    M = rng.random((n, n)) + seed
    A = rng.random((p, n)) ** 3 * (rng.random((p, n)) < 0.8) * 10.0 ** rng.uniform(-2, 2)
    A[:, 0] += 0.01
    call = {"reg": 10 ** rng.uniform(-2.5, 0), "reg_m": 10 ** rng.uniform(-1, 2), "weights": rng.dirichlet(np.ones(p))}
    if seed % 2:
        start = mapuot.barycenter(M, A, max_passes=2, tol=1e-15, **call)
    else:
        start = None
    heard = []
    each = mapuot.barycenter(M, A, tol=1e-8, callback=heard.append, warm_start=start, **call)
    once = mapuot.barycenter(M, A, tol=1e-8, warm_start=start, **call)
    assert len(heard) == each.n_passes
    assert once.converged
    assert once.n_passes <= 2 + 1.5 * each.n_passes
    assert np.abs(once.q - each.q).sum() <= (once.error_bound + each.error_bound) * once.q.sum()
    assert_allclose(once.gap, each.gap, atol=1e-12 * once.q.sum(), rtol=1e3)
    assert_array_equal(np.isneginf(once.log_u), A == 0)
    assert once.change < 1e-3 or once.n_passes == 1
    with pytest.warns(mapuot.ConvergenceWarning, match="after 2 passes"):
        few = mapuot.barycenter(M, A, tol=1e-14, max_passes=2, **call)
    assert few.n_passes == 2


@pytest.mark.parametrize(("far", "few"), [(1.0, True), (400.0, True), (2000.0, False)])
def test_one_call_is_enough_unless_a_sum_underflows(far, few, monkeypatch):
    """Passes that take out maxima follow only where K has a row of zeros."""
    others = []
    run = Run.run
    monkeypatch.setattr(Run, "run", lambda *words: others.append(words) or run(*words))
    x = np.array([0.0, 0.1, np.sqrt(far)])
    M = (x[:, None] - x) ** 2
    M[2, 2] = far
    assert mapuot.barycenter(M, np.ones((2, 3)), reg=1.0, reg_m=30.0).converged
    assert bool(others) != few


@pytest.mark.parametrize("far", [300.0, 600.0, 2000.0])
def test_passes_where_entries_of_k_underflow(far):
    """Products with K are right where some entries underflow, or all terms of a sum; in one call and pass by pass."""
    x = np.concatenate([np.linspace(0, 1, 10), np.linspace(0, 1, 10) + np.sqrt(far)])
    A = np.array([[1.0] * 10 + [0.01] * 10, [0.02] * 10 + [1.0] * 10])
    M = (x[:, None] - x) ** 2
    call = {"reg": 1.0, "reg_m": 30.0, "tol": 1e-9}
    found = mapuot.barycenter(M, A, **call)
    each = mapuot.barycenter(M, A, callback=lambda _: None, **call)
    q, _, _ = by_formulas(A.T, -M, 1.0, 30.0, 300, log_v=found.log_v.T)
    for answer in (found, each):
        assert answer.converged
        assert_allclose(answer.q, q, rtol=0, atol=2e-9 * q.sum())


@pytest.mark.parametrize("reg_m", [0.05, 1.0, np.inf])
def test_a_certificate_has_all_its_terms(reg_m):
    """Compare each term with its definition, for a rounding error of 1 % of each sum."""
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 7)
    w = np.array([0.2, 0.3, 0.5])
    reg = 0.02
    k = 0.02 / reg_m
    A = rng.dirichlet(np.ones(7), 3) * (1.0 if np.isinf(reg_m) else np.array([[0.5], [1.0], [2.0]]))
    body = Barycenter(A, cpu.operator_of(as_cost((x[:, None] - x) ** 2, cpu), reg), reg_m, w)
    state = body.start(np.zeros(A.size))
    for _ in range(3):
        state = body.image(body.find(state, False), False)
    body.error = 0.01
    found = body.completed()
    K = np.exp(-((x[:, None] - x) ** 2) / reg)
    u = np.exp(found.log_u)
    mass = found.q.sum()
    value = body.certified(found, 0.1)
    rows = u * (np.exp(found.log_v) @ K)
    moved = 0.01 * reg * mass
    if np.isinf(reg_m):
        terms = reg * A * found.log_u
        error = w @ np.abs(rows - A).sum(1) / mass
    else:
        asked = A * u**-k
        terms = reg_m * A * (1 - u**-k)
        kl = w @ (rows * np.log(rows / asked) - rows + asked).sum(1)
        root = (np.sqrt(kl) + 0.02 * np.sqrt(w @ (rows + asked).sum(1) + mass)) * np.sqrt(reg_m)
        error = plan_error(root**2 / reg / mass)
        assert value.gap == pytest.approx(root**2 + moved, rel=1e-8)
    assert value.error == pytest.approx(1.04 * error + 0.02, rel=1e-8)
    assert value.rounding == pytest.approx((0.02, 0.04), rel=1e-8)
    assert value.moved == pytest.approx(moved, rel=1e-8)
    assert value.dual == pytest.approx(w @ terms.sum(1) - reg * mass - moved, rel=1e-8)
    assert value.terms == pytest.approx(w @ np.abs(terms).sum(1) + reg * mass, rel=1e-8)
    assert (value.gap == np.inf) == np.isinf(reg_m)


def test_a_singular_kernel_is_definite_up_to_rounding():
    """The bound counts n (n + 2) roundings of a Cholesky factor, and the error of the entries of a row."""
    for n, error in ((5, 0.0), (5, 1e-6), (30, 1e-9)):
        right = -2 * (4 * 2.0**-53 * n * (n + 2) * 3 + error * n * 3)
        assert least_eigenvalue(3 * np.ones((n, n)), error) == pytest.approx(right, rel=1e-9)


def debiased_body(reg_m, passes=15, seed=0):
    """Return a body of three histograms after some passes; a rounding error of 1 % shows in its bounds."""
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 1, 7)
    A = rng.dirichlet(np.ones(7), 3) * (1.0 if np.isinf(reg_m) else np.array([[0.5], [1.0], [2.0]]))
    operator = cpu.operator_of(as_cost((x[:, None] - x) ** 2, cpu), 0.02)
    body = DebiasedBarycenter(A, operator, reg_m, np.array([0.2, 0.3, 0.5]), 1e-9)
    state = body.start(np.zeros(A.size))
    for _ in range(passes):
        state = body.image(body.find(state, False), False)
    body.error = 0.01
    return body, A, np.exp(-((x[:, None] - x) ** 2) / 0.02), np.exp(body.before), np.exp(body.last.log_u)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("least", [0.3, 1e-9, 0.0, -0.02])
def test_bounds_of_balanced_debiased_means_have_all_their_terms(least, seed):
    body, A, K, d, u = debiased_body(np.inf, seed=seed)
    w = body.weights
    reg = 0.02
    spread = 1.0
    s = u @ K
    scale = 1 / (d @ K @ d)
    t = d * (K @ d) * scale
    log_z = np.log(K @ d * scale) - w @ np.log(s)
    rows = u * ((t / s) @ K)
    missed = w @ np.abs(rows - A).sum(1)
    gap, error = body.hard_bounds(least, 0.5)
    rounding = body.rounding(np.log(t))
    assert rounding == pytest.approx(0.01, rel=1e-10)
    right = reg * (t @ log_z - log_z.min() + 0.04) + spread * (missed + 0.04) + 4 * reg * max(-least, 0.0)
    assert gap == pytest.approx(right, rel=1e-10)
    kl = gap / reg
    far = 2 * kl / 3 + np.sqrt(4 * kl**2 / 9 + 2 * kl)
    if least > 0:
        far += np.sqrt(2 * kl / least) * np.linalg.norm(K @ d * np.sqrt(scale))
    right = (far + 0.01) * 1.04
    assert error == (pytest.approx(right, rel=1e-10) if least > 0 and right < 2 else np.inf)


def test_the_error_of_a_balanced_debiased_mean_has_all_its_terms():
    body, _, K, d, _ = debiased_body(np.inf)
    body.error, body.highest = 1e-3, 1e-6
    gap, error = body.hard_bounds(0.9, 1.0)
    kl = gap / 0.02
    smooth = np.linalg.norm(K @ d / np.sqrt(d @ K @ d))
    far = 2 * kl / 3 + np.sqrt(4 * kl**2 / 9 + 2 * kl) + np.sqrt(2 * kl / 0.9) * smooth
    assert error < 2
    assert error == pytest.approx((far + 1e-3) * 1.004, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("indefinite", [0.0, 0.05])
@pytest.mark.parametrize("reg_m", [0.05, 1.0])
def test_bounds_of_soft_debiased_values_have_all_their_terms(reg_m, indefinite, seed):
    body, A, K, d, u = debiased_body(reg_m, seed=seed)
    w = body.weights
    reg = 0.02
    k = 0.02 / reg_m
    power = k / (1 + k)
    s = u @ K
    p = (w @ s**power) ** (1 / power)
    c = d * p
    t = d * (K @ d)
    least = (K @ d / p).min()
    asked = A * (u * least) ** -k
    rows = u * ((c * (s / p) ** power / s) @ K)
    kl = w @ (rows * np.log(rows / asked) - rows + asked).sum(1)
    mass = c.sum() + t.sum()
    rounding = 0.01
    root = np.sqrt(kl) + 2 * rounding * np.sqrt(w @ (rows + asked).sum(1) + mass)
    right = reg_m * root**2 + reg * (c * np.log(c / t) - c + t + c * np.log(K @ d / p / least)).sum()
    right += reg * rounding * (4 * mass + w @ asked.sum(1))
    if indefinite:
        most = 2 * (reg_m * (w @ asked.sum(1)) / reg + mass) / 0.9
        right += reg * 0.05 * (most + mass)
    assert body.soft_gap(indefinite) == pytest.approx(right, rel=1e-9)
    assert body.soft_gap(0.2) == np.inf


def test_random_debiased_barycenters():
    """Later passes and random q refute neither gap nor error_bound, also where K has negative eigenvalues."""
    totals, failures = barycenters.run(seed=1, count=25, largest=6, debiased=True)
    assert not failures
    assert totals["known"] < 25
    assert totals["judged"] > 10 < 5 * totals["located"]


def test_an_indefinite_kernel_bounds_no_debiased_value():
    """If K has a negative eigenvalue, passes may stand still at a q that another q beats."""
    rng = np.random.default_rng(0)
    M = rng.random((4, 4))
    M = (M + M.T) / 2
    reg = 0.1
    A = rng.dirichlet(np.ones(4), 2)
    assert np.linalg.eigvalsh(np.exp(-M / reg))[0] < -0.01
    found = mapuot.barycenter(M, A, reg=reg, debiased=True)
    assert found.converged
    assert (found.gap, found.error_bound) == (np.inf, np.inf)

    def value(q):
        return mapuot.solve_batch(M, np.vstack([A, q]), q, reg=reg, reg_m=np.inf, reference="uniform").dual @ [
            0.5,
            0.5,
            -0.5,
        ]

    assert min(value(q) for q in rng.dirichlet(np.ones(4), 300)) < value(found.q) - 0.01


def test_a_kernel_without_a_diagonal_bounds_no_debiased_value():
    """If exp(-M[i, i] / reg) underflows, no bound is known."""
    M = np.array([[0.0, 3000.0, 1.0], [3000.0, 3000.0, 3000.0], [1.0, 3000.0, 0.0]])
    found = mapuot.barycenter(M, np.ones((2, 3)), reg=1.0, reg_m=1.0, debiased=True)
    assert (found.gap, found.error_bound) == (np.inf, np.inf)


def test_a_debiased_mean_is_located_where_neighbours_are_apart():
    """A balanced q has a bound if reg is about the squared distance of neighbours, on arrays and grids alike."""
    grid = mapuot.Grid((4, 3), spacing=0.2)
    rng = np.random.default_rng(0)
    A = rng.dirichlet(np.ones(12), 3).reshape(3, 4, 3)
    reg = 0.05
    exact = mapuot.barycenter(grid, A, reg=reg, debiased=True, tol_change=1e-13, max_passes=10_000)
    assert exact.error_bound < 1e-3
    for cost in (grid, np.asarray(grid)):
        for tol_change in (1e-1, 1e-3, 1e-6):
            found = mapuot.barycenter(cost, A.reshape(3, -1), reg=reg, debiased=True, tol_change=tol_change)
            assert np.abs(found.q.ravel() - exact.q.ravel()).sum() <= found.error_bound + exact.error_bound
        assert found.error_bound < 0.1
    assert mapuot.barycenter(grid, A, reg=1.0, debiased=True).error_bound == np.inf


@pytest.mark.parametrize("reg", [1e-3, 0.02, 0.05, 0.3])
def test_least_eigenvalues(reg):
    """The bound on K's least eigenvalue is below it, and near it if it is above rounding."""
    rng = np.random.default_rng(0)
    grid = mapuot.Grid((5, 4), spacing=(0.2, 0.25))
    x = rng.random((20, 3))
    for M in (np.asarray(grid), ((x[:, None] - x) ** 2).sum(2)):
        K = np.exp(-M / reg)
        least = np.linalg.eigvalsh(K)[0]
        bound, diagonal = cpu.operator_of(as_cost(M, cpu), reg).spectrum
        assert diagonal == 1
        assert bound <= least + 1e-14
        assert bound >= 0.5 * least - 1e-11
    bound, _ = cpu.operator_of(as_cost(grid, cpu), reg).spectrum
    assert 0 < bound <= np.linalg.eigvalsh(np.exp(-np.asarray(grid) / reg))[0] + 1e-15
    signs = np.where(rng.random((20, 20)) < 0.5, 0.0, 1.0)
    assert cpu.operator_of(as_cost(signs + signs.T, cpu), reg).spectrum[0] == -np.inf


@pytest.mark.parametrize(("reg_m", "debiased"), [(1.0, False), (1.0, True), (np.inf, False)])
def test_passes_are_told_stopped_and_gone_on_with(reg_m, debiased):
    """A callback sees every pass and may stop the solve; warm starts, also from a larger reg, save passes."""
    A, M = histograms()
    A = A / A.sum(0) if np.isinf(reg_m) else A
    call = {"reg": 0.05 if debiased else 0.01, "reg_m": reg_m, "debiased": debiased, "tol_change": 1e-4}
    heard = []
    cold = mapuot.barycenter(M, A.T, callback=heard.append, **call)
    assert [stat.n_pass for stat in heard] == [*range(1, cold.n_passes + 1)]
    assert heard[-1].error == cold.error_bound or np.isinf(reg_m)  # which Newton's step certifies afterwards
    stopped = mapuot.barycenter(M, A.T, callback=lambda stat: stat.n_pass == 3, **call)
    assert (stopped.status, stopped.n_passes) == ("cancelled", 3)
    again = mapuot.barycenter(M, A.T, warm_start=cold, **call)
    assert again.n_passes <= 2 + 10 * debiased < cold.n_passes
    assert_allclose(again.q, cold.q, rtol=1e-3 if debiased else 1e-4)
    with pytest.raises(ValueError, match="warm_start must be of 2 histograms on 20 points"):
        mapuot.barycenter(M, A.T[:2], warm_start=cold, **call)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("reg_m", [1.0, np.inf])
def test_images_on_a_grid(reg_m, debiased):
    """Products along the axes give the whole matrix's barycenter, in the shape of the images."""
    grid = mapuot.Grid((5, 4), spacing=0.2)
    rng = np.random.default_rng(0)
    A = rng.dirichlet(np.ones(20), 3).reshape(3, 5, 4)
    call = {"reg": 0.05, "reg_m": reg_m, "debiased": debiased, "weights": [0.2, 0.3, 0.5], "tol_change": 1e-5}
    image = mapuot.barycenter(grid, A, **call)
    whole = mapuot.barycenter(np.asarray(grid), A.reshape(3, 20), **call)
    assert image.q.shape == (5, 4)
    assert image.log_u.shape == (3, 5, 4)
    assert_allclose(image.q.ravel(), whole.q, rtol=1e-3)
    table = np.array([[1, 1, 2], [1, 0, 0]])
    several = mapuot.barycenter(grid, A, **call | {"weights": table})
    assert several.log_u.shape == (2, 3, 5, 4)
    for weights, q in zip(table, several.q, strict=True):
        assert_allclose(q, mapuot.barycenter(grid, A, **call | {"weights": weights}).q, rtol=1e-3)
    assert "Result barycenter of 3 histograms on 20 points" in repr(image)
    assert "Result 2 barycenters of 3 histograms on 20 points" in repr(several)


@pytest.mark.parametrize("method", ["sinkhorn", "Sinkhorn_Stabilized"])
@pytest.mark.parametrize("weights", [None, np.array([0.2, 0.3, 0.5])], ids=["even", "weights"])
def test_pots_barycenter_is_answered(method, weights):
    """Functions, keys and dtypes are POT's; the answer is nearer to the limit than POT's own."""
    A, M = histograms()
    call = {"reg": 0.05, "reg_m": 0.7, "method": method, "weights": weights, "log": True}
    theirs, log = ot.unbalanced.barycenter_unbalanced(A, M, **call)
    q, ours = pot.barycenter_unbalanced(A, M, **call)
    with pytest.warns(UserWarning, match="Method not implemented yet"):
        assert pot.barycenter_unbalanced(A.astype("f4"), M.astype("f4"), 1, 1, "sinkhorn_reg_scaling").dtype == "f4"
    limit = by_formulas(A, -M / 0.05, 0.05, 0.7, 500, weights)[0]
    assert list(ours) == list(log)
    assert np.abs(q - limit).sum() <= max(np.abs(theirs - limit).sum(), ours["err"][-1] * limit.sum())
    assert_allclose(pot.barycenter_unbalanced(A.tolist(), M.tolist(), **call | {"log": False}), q, rtol=1e-14)


@pytest.mark.parametrize("reg_m", [np.inf, 1.0])
def test_barycenter_whose_first_pass_underflows(reg_m):
    A = np.eye(3)[[0, 2]]
    x = np.arange(3.0)
    result = mapuot.barycenter((x[:, None] - x) ** 2, A, reg=1e-6, reg_m=reg_m, tol=1e-4)  # rounding allows 3e-5
    assert result.converged
    # two points 2 apart: their middle, or, where that costs more than half the mass, the two themselves
    if reg_m == np.inf:
        right = [0, 1, 0]
    else:
        right = [0.25, 0, 0.25]
    assert_allclose(result.q, right, atol=0.01)


def banded(n, width, parts=1):
    """Return squared distances of near points, within parts of consecutive points."""
    x = np.arange(n)
    part = np.arange(n) * parts // n
    i, j = np.nonzero((np.abs(x[:, None] - x) <= width) & (part[:, None] == part))
    return sparse.csr_array((((i - j) / n) ** 2, (i, j)), shape=(n, n))


@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("reg", [0.02, 1e-3])
def test_barycenter_over_stored_pairs_by_its_formulas(reg, parts, width):
    """Points may lack a partner, and a histogram may not reach all points; q is right also where K underflows."""
    rng = np.random.default_rng(width)
    S = banded(20, width, parts)
    A = rng.random((3, 20)) * (rng.random((3, 20)) < 0.6)
    w = np.array([0.2, 0.3, 0.5])
    S = S.tolil()
    S[7], S[:, 7] = 0, 0
    S = sparse.csr_array(S)
    S.eliminate_zeros()
    found = mapuot.barycenter(S, A, reg=reg, reg_m=0.5, weights=w, tol=1e-8)
    log_k = np.full(S.shape, -np.inf)
    log_k[S.nonzero()] = -S.data / reg
    q, u, v = by_formulas(A.T, log_k, reg, 0.5, 1, w, log_v=found.log_v.T)
    assert found.converged
    assert_allclose(found.q, q, rtol=0, atol=1e-7 * q.sum())
    assert_array_equal(np.isneginf(found.log_u), np.isneginf(u.T))
    assert_array_equal(np.isneginf(found.log_v), np.isneginf(v.T))


@pytest.mark.parametrize("form", ["array", "stored pairs"])
@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("reg_m", [0.5, np.inf])
def test_barycenter_is_optimal(reg_m, debiased, form):
    """No small change of q lowers the sum of its costs to A, as `solve` computes them; stored pairs form two parts."""
    parts = 1 if form == "array" else 2
    reg = 0.005
    # K is positive definite
    S = banded(12, 12 if debiased or parts == 1 else 4, parts)
    rng = np.random.default_rng(0)
    M = S.toarray() if form == "array" else S
    A = rng.uniform(0.2, 1, (2, parts, 12 // parts))
    if parts == 1:
        masses = [[[1.0]]]
    else:
        masses = [[[0.4], [1.1]]]
    A = (A / A.sum(2, keepdims=True) * masses if np.isinf(reg_m) else A).reshape(2, 12)
    found = mapuot.barycenter(M, A, reg=reg, reg_m=reg_m, weights=[0.3, 0.7], debiased=debiased, tol=1e-9,
                              tol_change=1e-12, max_passes=10_000)  # fmt: skip
    assert found.converged

    def value(q):
        costs = mapuot.solve_batch(M, np.vstack([A, q]), q, reg=reg, reg_m=reg_m, reference="uniform", tol=1e-9).dual
        return costs @ [0.3, 0.7, -0.5 * debiased]

    best = value(found.q)
    for _ in range(20):
        step = 1e-3 * rng.normal(size=(parts, 12 // parts))
        step -= step.mean(1, keepdims=True) if np.isinf(reg_m) else 0.0
        assert value(found.q + step.ravel()) > best - 1e-12


def test_barycenter_that_too_few_pairs_allow():
    """Mass far from every common point is an error if a point has none in reach, and a warning if it has too little."""
    ends = np.eye(5)[[0, 4]]
    near = banded(5, 1)
    with pytest.raises(mapuot.InfeasibleError, match=r"M connects A\[0, 0\], which must be transported, with no point"):
        mapuot.barycenter(near, ends, reg=0.1)
    apart = "M connects A[0][0], A[0][1] with no other points, and there is 0.75 of A[0], but 0.25 of A[1]"
    with pytest.raises(mapuot.InfeasibleError, match=re.escape(apart)):
        mapuot.barycenter(banded(4, 1, 2), [[2.0, 1.0, 1.0, 0.0], [0.5, 0.5, 3.0, 0.0]], reg=0.1)
    some = 0.999 * ends + 0.0002
    with pytest.warns(mapuot.ConvergenceWarning, match="plans miss .* of the mass, where M may connect too few points"):
        assert not mapuot.barycenter(near, some, reg=0.1, max_passes=500).converged
    free = mapuot.barycenter(near, ends, reg=0.1, reg_m=1.0)
    assert free.converged
    assert_allclose(free.q[[0, 4]], free.q[0])
    assert free.q[2] == 0 < free.q[1] < free.q[0]


def reachable(S, A):
    """Return whether some q can be reached by all histograms, by linear programming."""
    (p, n) = A.shape
    (i, j) = S.nonzero()
    leave, arrive = (sparse.csr_array((np.ones(S.nnz), (k, np.arange(S.nnz))), shape=(n, S.nnz)) for k in (i, j))
    each = np.eye(p)
    q = sparse.kron(np.ones((p, 1)), -sparse.csr_array(np.eye(n)))
    rows = sparse.hstack([sparse.kron(each, leave), sparse.csr_array((p * n, n))])
    system = sparse.vstack([rows, sparse.hstack([sparse.kron(each, arrive), q])])
    return (
        linprog(np.zeros(system.shape[1]), A_eq=system, b_eq=np.concatenate([A.ravel(), np.zeros(p * n)])).status == 0
    )


def test_no_balanced_barycenter_that_no_plans_can_have():
    rng = np.random.default_rng(5)
    seen = []
    for _ in range(30):
        n = rng.integers(2, 8)
        p = rng.integers(2, 4)
        S = sparse.csr_array(
            rng.random((n, n)) * ((rng.random((n, n)) < rng.uniform(0.2, 0.9)) | np.eye(n, dtype=bool))
        )
        A = rng.random((p, n)) ** 3 * (rng.random((p, n)) < 0.8) + 1e-3 * (np.arange(n) == 0)
        A /= A.sum(1, keepdims=True)
        try:
            found = mapuot.barycenter(S, A, reg=0.1, tol_change=1e-5, max_passes=1000).converged
        except mapuot.InfeasibleError:
            found = False
        seen.append((found, reachable(S, A)))
    assert not any(found and not can for found, can in seen)
    assert sum(found for found, _ in seen) >= sum(can for _, can in seen) - 1 > 9, seen
