"""The meaning of the marginal penalties, their formulas, and every reference measure."""

import compiled
import numpy as np
import pytest
from judge import divergence, dual_term, missed
from problems import Case, clouds, measure, optimum, relative_error, verify

import mapuot
from mapuot import penalties

SOFT = {"kl": 0.5, "tv": 0.25, "l2": 3.0, "range": 0.1}
LAW = {"balanced": "kl"}  # the judge's name of it
SIDES = ["kl", "balanced", "tv", "l2", "range"]


# ---- certificates ----


def solve_as_batch(case, **options):
    M = case.M
    a = np.asarray(case.a)[None]
    b = np.asarray(case.b)[None]
    return mapuot.solve_batch(M, a, b, reg=case.reg, reg_m=case.reg_m, penalty=case.penalty, **options)[0]


def test_extrapolation_stays_where_the_dual_is_finite(backend):
    """A column potential beneath -rho has no dual value, however well the plan fits b."""
    M = np.array([[0.7, 0.1, 0.4], [0.7, 0.6, 0.6], [0.4, 0.5, 0.9]])
    case = Case(M, np.ones(3), np.array([0.2, 0.2, 0.1]), 0.1, 1.3, ("kl", "tv"))
    best = optimum(case)
    below = np.zeros(3), np.full(3, -100.0)
    results = [case.solve(backend=backend), case.solve(backend=backend, warm_start=below), solve_as_batch(case)]
    results += [solve_as_batch(case, warm_start=tuple(x[None] for x in below))]
    for result in results:
        assert relative_error(result.plan, best.plan) <= result.error_bound + 1e-6
        assert abs(result.dual - best.dual) < 1e-9
        assert np.abs(result.g).max() <= 1.3 * (1 + 1e-12)


@pytest.mark.parametrize("reg_m", [1e-9, 1e-6, 1e-3])
def test_rounding_leaves_the_dual_finite(backend, reg_m):
    """Costs of 1e3 leave 1e-13 in a potential: more than the precision of its bound."""
    case = clouds(30, 20, reg_m=reg_m, penalty="tv")
    case = case.replace(M=1e3 * case.M, reg=30.0, a=1e3 * case.a, b=1e3 * case.b)
    for result in (case.solve(backend=backend), solve_as_batch(case, backend=backend)):
        np.testing.assert_allclose(result.dual, result.objective, rtol=1e-6)
        verify(result, case, "mixed")


@pytest.mark.parametrize("method", ["auto", "sinkhorn"])
@pytest.mark.parametrize("seed", range(4))
def test_total_variation_where_every_pair_is_too_dear(backend, method, seed):
    """The plan is e^-300 and less of the masses, each potential at its bound up to rounding."""
    case = clouds(14, 11, reg=0.08 + 0.003 * seed, reg_m=(0.026, 23.0), penalty="tv", ratio=2.0, seed=seed)
    result = case.replace(M=50 + 10 * case.M).solve(backend=backend, method=method, tol=1e-6, precision="float64")
    assert result.converged
    assert 0 < result.mass < 1e-100


@pytest.mark.parametrize("kind", ["balanced", "columns", "range", "mixed"])
def test_tol_gap_waits_for_hard_columns(backend, kind):
    """Where the columns miss their hard marginal, a gap is no bound: none is reported."""
    some = np.where(np.arange(15) % 2, np.inf, 0.5)
    reg_m = {"balanced": np.inf, "columns": (1.0, np.inf), "range": (1.0, 0.1), "mixed": (0.5, some)}[kind]
    case = clouds(12, 15, reg=0.02, reg_m=reg_m, penalty=("kl", "range") if kind == "range" else "kl")
    for method in ("auto", "sinkhorn"):
        options = {"method": method, "tol": 1e-12, "tol_gap": 1e-5}
        for result in (case.solve(backend=backend, **options), solve_as_batch(case, backend=backend, **options)):
            report = measure(case, result.log_u, result.log_v)
            assert result.converged
            assert 0 <= result.gap <= 1e-5 * abs(result.dual)
            assert report.violation <= 1e-5 * (1 + 1e-6)
            assert abs(report.dual - optimum(case).dual) <= 1e-4 * abs(report.dual)
    early = case.solve(backend=backend, method="sinkhorn", callback=lambda stats: True)
    assert measure(case, early.log_u, early.log_v).violation > 1e-6
    assert early.gap == np.inf


@pytest.mark.parametrize("tol_gap", [1e-4, 1e-6, 1e-7])
def test_a_tol_gap_below_tol_ends_a_balanced_solve(tol_gap):
    """Passes that meet their columns to tol end; they once went on for a plan that rounding leaves open and stalled."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    y = rng.normal(size=(200, 4))
    M = ((x[:, None] - y) ** 2).sum(-1)
    options = {"reg": 3e-3 * np.median(M), "reg_m": np.inf, "tol_gap": tol_gap, "precision": "float64"}
    for result in (mapuot.solve(M, **options), mapuot.solve_batch(M[None], **options)[0]):
        assert result.converged
        assert result.gap <= tol_gap * abs(result.dual)
        missed = np.abs(result.row_marginal - 1 / 200).sum() + np.abs(result.col_marginal - 1 / 200).sum()
        assert missed <= 1.01 * tol_gap * result.mass


def test_a_cancelled_solve_whose_value_is_known_has_converged(backend):
    case = clouds(12, 15, reg=0.02, reg_m=np.inf)
    few = case.solve(backend=backend, tol_gap=1e-5).n_passes
    last = case.solve(backend=backend, tol_gap=1e-5, callback=lambda stats: stats.n_pass == few)
    assert last.converged
    assert not case.solve(backend=backend, tol_gap=1e-5, callback=lambda stats: True).converged


# ---- the formulas themselves ----


LAWS = {"python": penalties, "c": compiled.Penalties()}


@pytest.fixture(params=LAWS)
def formulas(request):
    return LAWS[request.param]


@pytest.mark.parametrize("kind", SIDES)
def test_penalty_formulas(kind, formulas):
    """prox, dual term, violation and gap term follow from the definition of D(r | t)."""
    law = LAW.get(kind, kind)
    rho = np.full(9, SOFT.get(kind, np.inf))
    t = np.linspace(0.2, 3, 9)
    reg = 0.3
    if kind != "range":
        given, upper = rho, None
    else:
        given = 1 - rho
        upper = 1 + rho
    log_s = np.linspace(-3, 3, 9)
    x = formulas.prox(kind, log_s, t, given, upper, reg)
    r = np.exp(x + log_s)
    # x maximises the dual at that point: dual_term(f) - reg e^(f/reg) s
    best = dual_term(law, reg * x, t, rho) - reg * r
    for step in (-1e-3, 1e-3):
        assert (dual_term(law, reg * (x + step), t, rho) - reg * np.exp(x + step + log_s) < best).all()
    f = np.linspace(-0.4, 0.6, 9)[:, None] * ([1.0] if kind == "tv" else [1.0, 5.0, 30.0])
    t, rho, given, upper = (x if x is None else x[:, None] for x in (t, rho, given, upper))
    np.testing.assert_allclose(
        formulas.dual_term(kind, f, t, given, upper), dual_term(law, f, t, rho), rtol=1e-14, atol=1e-14
    )
    for share in (0.0, 0.7, 0.95, 1.02, 1.3):
        r = share * t
        np.testing.assert_allclose(formulas.violation(kind, r, t, given, upper), missed(law, r, t, rho), atol=1e-15)
        if kind == "range":
            inside = np.clip(r, t * (1 - rho), t * (1 + rho))
        else:
            inside = r
        right = divergence(law, inside, t, rho) - dual_term(law, f, t, rho) + f * inside
        if kind == "balanced":
            right = np.zeros_like(f)
        np.testing.assert_allclose(formulas.gap_term(kind, f, r, t, given, upper), right, rtol=1e-12, atol=1e-13)
        paid = penalties.divergence(kind, inside, t, given, upper)
        np.testing.assert_allclose(paid, divergence(law, inside, t, rho), rtol=1e-14, atol=1e-14)
    if kind == "kl":  # a point that is left out
        assert (formulas.gap_term(kind, np.full_like(t, -np.inf), 0 * t, 0 * t, given, upper) == 0).all()


def test_the_gap_of_kl_keeps_its_digits():
    """x e^x - e^x + 1 keeps its digits at all x, as a series and as written, and at r = 1e-9 of the best r."""
    x = np.array([-20.0, -3.0, -1.0, -0.2501, -0.2499, -0.1, -0.01, 0.01, 0.1, 0.2499, 0.2501, 1.0, 2.4, 5.0])
    r = np.exp(x)
    exact = np.log(np.asarray(r, np.longdouble))
    exact = exact * r - r + 1
    found = LAWS["c"].gap_term("kl", 0 * r, r, np.ones(len(r)), 3.0, None)
    np.testing.assert_allclose(found, np.asarray(3 * exact, float), rtol=1e-13)
    price = LAWS["c"].dual_term("kl", -690e-27, 1e-300, 1e-27, None)  # rho t is below all numbers, its factor is not
    np.testing.assert_allclose(price, -1e-27 * (1e-300 * np.expm1(690)), rtol=1e-12)


@pytest.mark.parametrize("reg", [0.01, 1.0, 50.0])
def test_the_l2_prox_is_that_of_scipy(reg):
    """The Wright omega function is exact from e^z far below 0 to z - log z, also where terms cancel for small log u."""
    log_s = np.concatenate([np.linspace(-60, 60, 41), [-700.0, 500.0]])
    t = 1.7
    rho = np.float64(0.9)
    found, right = (law.prox("l2", log_s, np.full(43, t), rho, None, reg) for law in LAWS.values())
    np.testing.assert_allclose(found, right, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["tv", "range"])
def test_misfit_is_the_distance_from_what_has_no_gap(kind, formulas):
    """The misfit is the distance to the nearest r, on a fine grid, without a Fenchel-Young gap at f."""
    grid, t, rho, upper = np.linspace(0, 6, 6001), 2.0, *((0.5, None) if kind == "tv" else (0.5, np.float64(1.5)))
    every = np.full(len(grid), rho)
    for f in (-0.7, -0.5 * (1 - 4e-16), -0.5, -0.3, 0.0, 0.2, 0.5 * (1 - 4e-16), 0.5, 0.5 * (1 + 4e-16), 0.7):
        gap = formulas.gap_term(kind, np.full(len(grid), f), grid, np.full(len(grid), t), every, upper)
        inside = (formulas.violation(kind, grid, np.full(len(grid), t), every, upper) == 0) & (gap <= 1e-12)
        for r in (0.0, 0.9, 1.0, 2.0, 2.7, 3.0, 5.5):
            found = float(formulas.misfit(kind, *map(np.array, (f, r, t, rho)), upper))
            right = np.abs(grid[inside] - r).min(initial=np.inf)
            assert found == right or abs(found - right) < 1e-3, (f, r)


def test_conjugate_is_a_minimum():
    """The test's own formula matches a search over r."""
    r = np.linspace(0, 20, 2_000_001)
    for kind in SIDES:
        rho = SOFT.get(kind, np.inf)
        t = 1.3
        law = LAW.get(kind, kind)
        for f in (-0.2, 0.0, 0.15, 1.0 if kind in ("kl", "l2") else 0.2):
            allowed = {"balanced": r == r[130_000], "range": np.abs(r - t) <= rho * t + 1e-9}.get(kind, r >= 0)
            values = divergence(law, r[allowed], t, np.float64(rho)) + f * r[allowed]
            np.testing.assert_allclose(dual_term(law, f, t, np.float64(rho)), values.min(), atol=1e-6)


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_squares_of_large_and_small_masses(size):
    """Squares are in units of reg_m times mass: sums of rho t^2 overflowed, and no error was ever certified."""
    case = clouds(8, 6, 0.1, (5.0, np.inf)).replace(penalty=("l2", "balanced"), reference="uniform")
    scaled = case.replace(a=size * case.a, b=size * case.b, reg_m=(5.0 / size, np.inf))
    found, plain = scaled.solve(tol=1e-9), case.solve(tol=1e-9)
    assert found.converged
    np.testing.assert_allclose(found.plan / size, plain.plan, atol=2e-9)
