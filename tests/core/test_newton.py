"""Newton's step towards hard columns (src_c/newton.c) solves the dense equations and gives true bounds.

The optimum is known beforehand: it is chosen, and the plan under test is a pass away from it.
"""

import numpy as np
import pytest
from mapuot._core import ffi, lib
from problems import clouds, relative_error, verify, with_zeros

import mapuot
from mapuot.ascend.loop import StagePasses
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.newton import GIVES_UP, HOLDS, ColumnsNewton, Newton
from mapuot.penalties import plan_error
from mapuot.problem.problem import Problem

VECTORS = "asked", "diagonal", "rate", "left", "y", "d", "t"
REG = 0.3
BOTH = pytest.mark.parametrize("rho", [np.inf, 2.0])


def near_optimum(seed, rho, apart, m=9, n=12):
    """Return (P after a pass from log v apart from the best one, this log v, P*, fi of the rows)."""
    rng = np.random.default_rng(seed)
    K = np.exp(-3 * rng.random((m, n)))
    log_u = rng.normal(size=m)
    log_v = rng.normal(size=n)
    best = np.exp(log_u)[:, None] * K * np.exp(log_v)
    fi = 1 / (1 + REG / rho)
    log_v = log_v + apart * rng.normal(size=n)
    s = K @ np.exp(log_v)
    masses = np.exp(log_u / fi) * best.sum(1) / np.exp(log_u)
    return (masses / s)[:, None] ** fi * K * np.exp(log_v), log_v, best, fi


def step(P, log_v, b, fi, tol, rho=None, symmetric=False, extra=0.0, rough=0.0, enough=300):
    """Return the verdict on a plan with exact rows, the record, and the vectors of the step."""
    n = P.shape[1]
    s = P.sum(0)
    # it may hold anything
    w = ffi.new("mapuot_newton *")
    room = np.full(lib.mapuot_newton_room(n), np.nan)
    lib.mapuot_newton_place(w, n, ffi.from_buffer("double *", room))
    kept = s, b, np.full(n, np.inf) if rho is None else rho, log_v
    w.marginal, *vectors = (ffi.from_buffer("double *", x) for x in kept)
    (w.m, w.n) = P.shape
    w.reg = REG
    w.hard_rows = fi == 1
    w.tol = tol
    w.least = 0.0 if symmetric else 1 - fi
    w.symmetric, hard, w.rough, w.enough = symmetric, np.isinf(kept[2]), rough, enough
    w.found = (1 + symmetric) * np.abs(s - b)[hard].sum() / s.sum() + extra
    verdict = lib.mapuot_newton_begin(w, *vectors, ffi.NULL, 1)
    at = {name: np.frombuffer(ffi.buffer(getattr(w, name), 8 * n)) for name in VECTORS}
    while verdict == lib.MAPUOT_ASKS:
        if symmetric:
            at["t"][:] = -P @ at["d"]
        else:
            at["t"][:] = P.T @ (fi / P.sum(1) * (P @ at["d"]))
        verdict = lib.mapuot_newton_next(w)
    return verdict, w, {name: x.copy() for name, x in at.items()}


@pytest.mark.parametrize("rho", [0.2, 50.0])
def test_a_rough_step_leaves_the_share_it_is_told(rho):
    """A rough step leaves the given share of its equations, with soft columns, too, or ends after so many products."""
    P, log_v, best, fi = near_optimum(3, rho, 2.0)
    rates = np.full(P.shape[1], REG / rho)
    b = best.sum(0) * np.exp(rates * log_v)
    for rough, enough in ((0.5, 300), (1e-3, 300), (1e-9, 2)):
        verdict, w, at = step(P, log_v, b, fi, 0.0, np.full(P.shape[1], rho), rough=rough, enough=enough)
        D = P.sum(0) + rates * b * np.exp(-rates * log_v)
        asked = b * np.exp(-rates * log_v) - P.sum(0)
        left = asked - D * at["y"] + P.T @ (P @ at["y"] * fi / P.sum(1))
        size, first = (np.sqrt((x**2 / D).sum()) for x in (left, asked))
        assert verdict == lib.MAPUOT_OPEN
        assert (size <= 1.001 * rough * first) == (w.products < enough)
        assert w.products == enough or size > 1e-3 * rough * first


def bounds(P, log_v, b, fi, rho, symmetric, extra, y):
    """Return (bound of the plan, bound after the step), every term from its definition."""
    s = P.sum(0)
    sides = 1 + symmetric
    mass = s.sum()
    hard = np.isinf(rho)
    rate = REG / rho
    asked = b * np.exp(-rate * log_v)
    apart = extra
    if hard.all() and fi == 1 and not symmetric:
        asked = b * (mass / b.sum())
        apart = extra + abs(mass - b.sum()) / mass
    D = s + rate * asked
    S = np.diag(D) + (P if symmetric else -P.T @ (P * (fi / P.sum(1))[:, None]))
    left = asked - s - S @ y
    energy = sides * (y @ S @ y) / mass
    if symmetric:
        spread = 2 * np.abs(y).max()
    elif fi == 1:
        spread = np.ptp(y)
    else:
        spread = np.ptp(np.append(y, 0.0))
    most = max(spread, (rate * np.abs(y)).max())
    share = 2e-16 * (8 + np.sqrt(len(P)))
    noise = sides * share
    paths = (1 if hard.all() and fi == 1 else 2) * min(P.shape) * (sides * np.abs(left).sum() / mass + noise)
    here = after = np.inf
    if most <= 0.9:
        here = plan_error(energy / (1 - most) / 2) + paths
        after = plan_error(most**2 * energy / 8 / (1 - most)) + paths
    if fi < 1 and not symmetric:  # S^-1 is at most D^-1 / (1 - fi), in energy and point by point
        tail = (max(1, rate.max()) * (np.abs(left) / D).max() + share) / (1 - fi)
        more = (sides * (left**2 / D).sum() / mass + share * noise) / (1 - fi)
        if most + tail <= 0.9:
            roots = np.sqrt(most**2 * energy / 8) + np.sqrt(more / 2)
            here = min(here, plan_error((energy + more) / 2 / (1 - most - tail)))
            after = min(after, plan_error(roots**2 / (1 - most - tail)))
    hidden = 1 + noise / max(sides * np.abs(asked - s).sum() / mass, noise / 16)
    found = min(here * hidden, 1 + b.sum() / mass if hard.all() else np.inf)
    return apart + found * (1 + 2 * apart), after * hidden


@pytest.mark.parametrize("tol", [0.3, 1e-2, 1e-4, 1e-300])
@pytest.mark.parametrize("apart", [3.0, 0.2, 1e-3, 1e-9, 1e-15])
@pytest.mark.parametrize("extra", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize(
    "kind", ["hard rows", "nearly hard rows", "soft rows", "soft columns", "some soft columns", "symmetric"]
)
def test_a_bound_has_all_its_terms(kind, extra, apart, tol):
    for seed in range(3):
        rho_rows = {"soft rows": 2.0, "nearly hard rows": 1e12}.get(kind, np.inf)
        P, log_v, best, fi = near_optimum(seed, rho_rows, apart)
        b = best.sum(0) * (1 + 1e-5 * (kind == "hard rows"))
        symmetric = kind == "symmetric"
        if kind == "soft rows":  # all columns ask for more, or for less
            b *= np.exp(2 * apart * (-1) ** seed)
        rho = np.full(12, 0.7 if kind == "soft columns" else np.inf)
        if "soft columns" in kind:
            rho[::3] = 0.4
        else:
            rho[::3] = np.inf
        if symmetric:
            P, b = P.T @ P, (P.T @ P).sum(0) * np.exp(0.1 * apart * log_v)
        verdict, w, at = step(P, log_v, b, fi, tol, rho, symmetric, extra)
        assert (verdict == lib.MAPUOT_HOLDS) == (w.error <= tol)
        error, after = bounds(P, log_v, b, fi, rho, symmetric, extra, at["y"])
        # only rounding is left
        if apart > 1e-12:
            near = {"rel": 1e-6, "abs": 1e-14}
        else:
            near = {"rel": 0.3, "abs": 0}
        assert w.error == pytest.approx(error, **near)
        assert w.after == pytest.approx(after, **near)


def test_no_step_follows_a_pass_that_certifies_nothing():
    P, log_v, best, fi = near_optimum(0, np.inf, 0.1)
    verdict, w, _ = step(P, log_v, best.sum(0), fi, 1e-3, extra=np.inf)
    assert (verdict, w.products, w.error, w.after) == (lib.MAPUOT_GIVES_UP, 0, np.inf, np.inf)


@pytest.mark.parametrize("size", [-960, -530, 960])
@pytest.mark.parametrize("apart", [0.2, 1e-3, 1e-9])
@pytest.mark.parametrize("kind", ["hard rows", "soft rows", "symmetric"])
def test_a_bound_does_not_depend_on_the_unit_of_mass(kind, apart, size):
    """Squares of masses of 1e-160 are 0, which once hid the marginal error; squares of 1e160 are infinite."""
    P, log_v, best, fi = near_optimum(1, 2.0 if kind == "soft rows" else np.inf, apart)
    b = best.sum(0)
    symmetric = kind == "symmetric"
    if symmetric:
        P, b = P.T @ P, (P.T @ P).sum(0) * np.exp(0.1 * apart * log_v)
    of_one, of_size = (step(x * P, log_v, x * b, fi, 1e-300, None, symmetric)[1] for x in (1.0, 2.0**size))
    assert of_size.error == of_one.error > 0
    assert of_size.after == of_one.after


@pytest.mark.parametrize("size", [-900, -530, 400])
@pytest.mark.parametrize("reg_m", [np.inf, (2.0, np.inf), (np.inf, 2.0)], ids=["both", "cols", "rows"])
def test_bounds_are_true_of_tiny_and_of_large_masses(reg_m, size, backend):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        M = rng.random((6, 7))
        a = rng.dirichlet(np.ones(6))
        b = rng.dirichlet(np.ones(7))
        call = {"reg": 10 ** rng.uniform(-2.0, -1), "reg_m": reg_m, "reference": "uniform"}  # the unit drops out
        exact = mapuot.solve(M, a, b, **call, tol=1e-10)
        found = mapuot.solve(M, 2.0**size * a, 2.0**size * b, **call, tol=1e-3, backend=backend)
        assert found.converged
        assert relative_error(found.plan, 2.0**size * exact.plan) <= found.error_bound + 1e-9


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_the_step_solves_the_dense_equations(seed, rho):
    P, log_v, best, fi = near_optimum(seed, rho, 1e-6)
    s = P.sum(0)
    b = best.sum(0)
    S = np.diag(s) - P.T @ (P * (fi / P.sum(1))[:, None])
    want = np.linalg.lstsq(S, b - s, rcond=1e-12)[0]
    verdict, w, at = step(P, log_v, b, fi, 1e-10)
    change = at["y"] - want
    change -= change.mean() if rho == np.inf else 0.0  # a common translation is in the null space
    assert verdict == lib.MAPUOT_HOLDS_AFTER
    assert np.abs(change).max() < 1e-2 * np.abs(want).max()
    assert 1 < w.products <= P.shape[1]


@BOTH
@pytest.mark.parametrize("apart", [0.05, 1e-3, 1e-6])
@pytest.mark.parametrize("seed", range(8))
def test_both_bounds_hold_and_are_near(seed, apart, rho):
    P, log_v, best, fi = near_optimum(seed, rho, apart)
    _, w, at = step(P, log_v, best.sum(0), fi, 1e-300)
    error = np.abs(P - best).sum() / P.sum()
    assert error <= w.error <= 6 * error
    x = -fi * (P @ at["y"]) / P.sum(1)
    after = P * np.exp(x[:, None] + at["y"])
    error_after = np.abs(after - best).sum() / P.sum()
    assert error_after <= w.after <= max(apart, 1e-9)


def test_what_cannot_be_met_is_not_certified():
    P = np.array([[0.5, 1e-30], [1e-30, 0.5]])
    verdict, w, _ = step(P, np.zeros(2), np.array([0.6, 0.4]), 1.0, 1e-6)
    assert verdict in (lib.MAPUOT_OPEN, lib.MAPUOT_GIVES_UP)
    assert w.error >= 0.2  # the best plan has .1 in a pair where this one has nothing
    verdict, *_ = step(np.array([[0.5, 0.0], [0.5, 0.0]]), np.zeros(2), np.array([0.9, 0.1]), 1.0, 1e-6)
    assert verdict == lib.MAPUOT_GIVES_UP  # a column without mass is in no equation
    P = np.array([[0.5, 0.3, 0.0], [0.3, 0.5, 0.0]])
    b = np.array([0.8 + 1e-9, 0.8 - 1e-9, 0.2])
    verdict, *_ = step(P, np.zeros(3), b, 0.5, 1e-3)
    assert verdict == lib.MAPUOT_GIVES_UP  # nor where the others are met, and rows need not have its mass


def least_ritz(A, start, count):
    """Return the least eigenvalue that conjugate gradients find: of A on the Krylov space of as many directions."""
    basis = np.zeros((len(A), 0))
    for _ in range(count):
        start = start / np.linalg.norm(start)
        basis = np.linalg.qr(np.column_stack([basis, start]))[0]
        start = A @ basis[:, -1]
    return np.linalg.eigvalsh(basis.T @ A @ basis)[0]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("tol", [0.1, 1e-4, 1e-300])
@pytest.mark.parametrize("apart", [0.3, 1e-3, 1e-6])
def test_a_bound_of_many_marginals_has_all_its_terms(apart, tol, soft):
    """For two marginals, half the least curvature met by the directions bounds S^-1."""
    for seed in range(4):
        P, log_v, best, _ = near_optimum(seed, np.inf, apart, 5, 6)
        s = np.concatenate([P.sum(1), P.sum(0)])
        n = 11
        extra = 1e-4
        share = 1e-9
        log = np.concatenate([np.zeros(5), log_v])
        rho = np.where(soft & (np.arange(n) < 5), 0.7, np.inf)
        rate = REG / rho
        hard = np.isinf(rho)
        weight = np.where(hard, np.concatenate([best.sum(1), best.sum(0)]), s * np.exp(0.1 * apart))
        # it may hold anything
        w = ffi.new("mapuot_newton *")
        room = np.full(lib.mapuot_newton_room(n), np.nan)
        lib.mapuot_newton_place(w, n, ffi.from_buffer("double *", room))
        w.n, w.reg, w.tol, w.marginals, w.rounding = n, REG, tol, 2, share
        starts = ffi.new("int64_t[]", [0, 5, n])
        kept = (s, weight, rho, log)
        w.start, (w.marginal, *vectors) = starts, [ffi.from_buffer("double *", x) for x in kept]
        w.found = np.abs(weight - s)[hard].sum() / P.sum() + extra
        at = {name: np.frombuffer(ffi.buffer(getattr(w, name), 8 * n)) for name in VECTORS}
        verdict = lib.mapuot_newton_begin(w, *vectors, ffi.NULL, 1)
        while verdict == lib.MAPUOT_ASKS:
            at["t"][:] = -np.concatenate([P @ at["d"][5:], P.T @ at["d"][:5]])
            verdict = lib.mapuot_newton_next(w)
        asked = weight * np.exp(-rate * log)
        mass = P.sum()
        y = at["y"]
        D = s + rate * asked
        S = np.diag(D) + np.block([[np.zeros((5, 5)), P], [P.T, np.zeros((6, 6))]])
        left = asked - s - S @ y
        root = np.sqrt(D)
        least = least_ritz(S / root[:, None] / root, (asked - s) / root, w.products)
        assert least / 1.06 <= w.curvature <= least * (1 + 1e-9)
        pairs = y[:5, None] + y[5:]
        most = max(np.abs(pairs).max(), (rate * np.abs(y)).max())
        rest = 2 * np.sqrt(((left**2 / D).sum() / mass + share**2) / w.curvature)
        if w.products < 2 or most > 0.9:
            assert w.error >= 1
            continue
        energy = y @ (asked - s - left) / mass
        noise = share * mass
        hidden = 1 + noise / max(np.abs(asked - s).sum(), noise / 16)
        here = (plan_error(energy / (1 - most) / 2) + rest) * hidden
        error = extra + here * (1 + 2 * extra)
        assert w.error == pytest.approx(error, rel=1e-6)
        assert w.after == pytest.approx((plan_error(most**2 * energy / 8 / (1 - most)) + rest) * hidden, rel=1e-6)
        assert (verdict == lib.MAPUOT_HOLDS) == (w.error <= tol)


@pytest.mark.parametrize("method", ["auto", "translation_invariant", "sinkhorn", "map-uot"])
@pytest.mark.parametrize("reg_m", [np.inf, (2.0, np.inf), (np.inf, 2.0)], ids=["both", "cols", "rows"])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
def test_error_bound_is_true_of_every_method(method, reg_m, tol, backend):
    if backend == "reference" and tol < 1e-3 and method in ("sinkhorn", "map-uot"):
        pytest.skip("thousands of its passes")
    for seed, change in enumerate((clouds, lambda *a, **k: with_zeros(clouds(*a, **k)))):
        case = change(13, 17, reg=0.02, reg_m=reg_m, ratio=1.0, seed=seed)
        case = case.replace(b=case.b * (case.a.sum() / case.b.sum()))
        found = case.solve(method=method, tol=tol, max_passes=100_000, backend=backend)
        assert found.converged
        assert verify(found, case) <= found.error_bound <= tol


def test_the_least_curvature_is_that_of_the_stiffest_row():
    case = clouds(9, 7, reg=0.5)
    for rho, least, hard in ((np.linspace(1, 5, 9), 1 / 11, 0), (np.full(9, np.inf), 0.0, 1)):
        problem = Problem.from_arrays(case.M, case.a, case.b, 0.5, (rho, np.inf), "kl", "product", cpu)
        found = ColumnsNewton(problem).record
        assert (found.least, found.hard_rows) == (pytest.approx(least), hard)


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_after_a_dropped_step_is_certified_too(seed):
    """At a limit where the guard dropped the last step, the pass after it misses hard columns, and is certified."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.random(22))
    y = np.sort(rng.random(22))
    E = (x[:, None] - y) ** 2 / 10 ** rng.uniform(-4.5, -3)
    P = np.exp(rng.normal(size=22)[:, None] + rng.normal(size=22) - E)
    P *= ((rng.random(22) + 0.05) / P.sum(1))[:, None] / P.sum()
    for most in (10, 14, 18, 22):
        found = mapuot.solve(
            E, P.sum(1), P.sum(0) * (P.sum() / P.sum(0).sum()), reg=1.0, reg_m=np.inf, tol=0.1, max_passes=most
        )
        assert np.abs(found.plan - P).sum() <= found.error_bound * found.plan.sum() + 1e-12


@pytest.mark.parametrize("seed", [0, 1, 9])
def test_passes_go_on_where_a_step_proves_too_little(seed, backend):
    """After a step that misses columns by less than tol while the plan is too far off, more passes follow."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, (24, 2))
    y = rng.standard_t(2, (20, 2))
    M = ((x[:, None] - y) ** 2).sum(2)
    a = rng.random(24) + 0.1
    b = rng.random(20) + 0.1
    b *= a.sum() / b.sum()
    call = {"reg": 3e-3 * np.median(M), "reg_m": np.inf}
    found = mapuot.solve(M, a, b, **call, tol=1e-3, backend=backend)
    exact = mapuot.solve(M, a, b, **call, tol=1e-9)
    assert found.converged
    assert relative_error(found.plan, exact.plan) <= found.error_bound + 1e-8


@pytest.mark.parametrize(("weight", "verdict"), [(1e-9, HOLDS), (1e-5, GIVES_UP)])
def test_columns_that_underflow_cost_their_masses(weight, verdict):
    """A hard column without a marginal adds 2 min(m, n) of its mass to the bound, if that is far below tol."""
    newton = Newton(1.0, np.array([0.5, 0.5, weight]), np.full(3, np.inf))
    newton.record.m = 3
    newton.record.hard_rows = True
    newton.record.budget = newton.record.all_products = 1  # the budget is used up
    assert newton.solve(0.0, 1e-6, np.zeros(3), np.array([0.5, 0.5, 0.0]), lambda d: d) == verdict
    if verdict == HOLDS:
        assert 6e-9 <= newton.record.error < 1e-7


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
@pytest.mark.parametrize("seed", range(32))
def test_steps_over_a_float32_kernel_are_in_float64(seed):
    """A kernel stored in float32 has float32 passes; the products of a step are float64, and the bound holds."""
    rng = np.random.default_rng(seed)
    m, n = rng.integers(5, 40, 2)
    M = rng.random((m, n))
    a = rng.dirichlet(np.ones(m))
    b = rng.dirichlet(np.ones(n))
    reg = 10 ** rng.uniform(-2.5, -0.5)
    if seed % 2:
        rho = np.inf
    else:
        rho = 10 ** rng.uniform(-1, 2)
    given = {"reg": reg, "reg_m": (rho, np.inf)}
    found = mapuot.solve(M, a, b, precision="mixed", tol=10 ** rng.uniform(-7, -3), **given)
    exact = mapuot.solve(M, a, b, precision="float64", tol=1e-12, **given)
    assert "float32" in found.how
    assert np.abs(found.plan - exact.plan).sum() / found.mass <= found.error_bound + exact.error_bound


def test_newtons_step_waits_for_a_pass_that_ends(monkeypatch):
    """Newton's step follows only a pass that would end the solve as converged or stalled."""
    statuses = []
    meet = StagePasses.meet

    def recorded(self, newton):
        statuses.append(self.run.trace[-1].status)
        return meet(self, newton)

    monkeypatch.setattr(StagePasses, "meet", recorded)
    case = clouds(30, 20, reg=0.02, reg_m=np.inf)
    b = case.b * (case.a.sum() / case.b.sum())
    assert case.replace(b=b).solve(threads=2).converged
    assert statuses
    assert {*statuses} <= {"converged", "stalled"}


@pytest.mark.parametrize("most", [3, 5, 12])
def test_a_solve_that_ends_before_its_steps_is_certified(monkeypatch, most):
    """Where steps with a factor follow few passes, as on a GPU, passes certify nothing, except the last of all."""
    monkeypatch.setattr(type(cpu), "few_passes", 150)
    case = clouds(40, 40, reg=0.02).replace(reg_m=np.inf)
    case = case.replace(b=case.b * (case.a.sum() / case.b.sum()))
    best = case.solve(tol=1e-11)
    with pytest.warns(mapuot.ConvergenceWarning, match="max_passes"):
        found = case.solve(tol=1e-9, max_passes=most, callback=lambda _: None)  # not in one call
    missed = np.abs(found.plan.sum(0) - case.b).sum() / found.mass
    error = np.abs(found.plan - best.plan).sum() / found.mass
    assert missed < error <= found.error_bound
