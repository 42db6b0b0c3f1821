"""Properties that hold for every problem, searched with hypothesis: no false certificate, symmetry, scaling, bounds."""

import warnings

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Case, measure, optimum, relative_error, verify, with_forbidden, with_zeros

import mapuot

REG = st.sampled_from([1.0, 0.3, 0.1, 0.03, 0.01, 0.003])
REG_M = st.one_of(st.sampled_from([0.05, 1.0, 20.0]), st.floats(0.01, 100))
TOLS = {"float64": 1e-9, "mixed": 1e-6}


@st.composite
def cases(draw, hard=True, largest=24):
    """A random problem: clouds or noise, unequal masses, zeros, forbidden pairs, any reference."""
    m, n = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    M = rng.random((m, n)) if draw(st.booleans()) else np.abs(rng.random((m, 1)) - rng.random((1, n)))
    M = M * draw(st.sampled_from([1.0, 1.0, 5.0])) - draw(st.sampled_from([0.0, 0.0, 0.5]))
    a, b = rng.uniform(0.05, 1, m), rng.uniform(0.05, 1, n)
    a, b = a / a.sum(), draw(st.sampled_from([0.2, 1.0, 1.0, 3.0])) * b / b.sum()
    reg_m = draw(REG_M), draw(REG_M)
    side = draw(st.sampled_from([None, None, None, 0, 1])) if hard else None
    if side is not None:
        reg_m = tuple(np.inf if k == side else rho for k, rho in enumerate(reg_m))
    c = draw(st.sampled_from(["product", "product", "uniform", "matrix"]))
    case = Case(M, a, b, draw(REG), reg_m, reference=rng.uniform(0.01, 1, (m, n)) if c == "matrix" else c)
    if draw(st.integers(0, 3)) == 0 and min(m, n) > 2:
        case = with_zeros(case)
    if draw(st.integers(0, 3)) == 0:
        case = with_forbidden(case, seed=m)
    return case


def quietly(case, **options):
    """Solve; a warning that it did not converge is part of the answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
        try:
            return case.solve(**options)
        except mapuot.InfeasibleError:  # a hard point whose every partner has no mass
            assume(False)


@settings(max_examples=150)
@given(case=cases(), precision=st.sampled_from(list(TOLS)), data=st.data())
def test_no_certificate_is_false(case, precision, data):
    """Stopped anywhere: true error <= bound, objective - dual = gap >= 0, all marginals those of the plan."""
    method = data.draw(st.sampled_from(["auto", "auto", "translation_invariant", "sinkhorn"]))
    passes = data.draw(st.sampled_from([1, 2, 3, 7, 20, 3000]))
    result = quietly(case, precision=precision, method=method, max_passes=passes, tol=TOLS[precision])
    assert result.error_bound >= 0
    assert not result.trace[-1].rejected
    report = verify(result, case, precision)
    assert np.isfinite(result.error_bound)
    if passes == 3000 and method == "auto":
        assert result.converged
        assert report.error < 30 * TOLS[precision]


@given(case=cases(), threads=st.sampled_from([1, 2, 5]))
def test_cpu_and_reference_agree(case, threads):
    one = quietly(case, tol=1e-9, threads=threads)
    two = quietly(case, tol=1e-9, backend="reference")
    assert one.converged
    assert two.converged
    assert relative_error(one.plan, two.plan) < 5e-8
    scale = measure(case, one.log_u, one.log_v).scale
    np.testing.assert_allclose(one.objective, two.objective, rtol=0, atol=1e-8 * scale)


@given(case=cases())
def test_roles_of_rows_and_columns_are_symmetric(case):
    one, two = quietly(case, tol=1e-9), quietly(case.transposed(), tol=1e-9)
    assert relative_error(two.plan.T, one.plan) < 5e-8


@given(case=cases(), seed=st.integers(0, 1000))
def test_order_of_points_does_not_matter(case, seed):
    rng = np.random.default_rng(seed)
    i, j = rng.permutation(len(case.a)), rng.permutation(len(case.b))
    c = case.reference if isinstance(case.reference, str) else case.reference[np.ix_(i, j)]
    other = case.replace(M=case.M[np.ix_(i, j)], a=case.a[i], b=case.b[j], reference=c)
    one, two = quietly(case, tol=1e-9), quietly(other, tol=1e-9)
    assert relative_error(two.plan, one.plan[np.ix_(i, j)]) < 5e-8


@given(case=cases(), scale=st.sampled_from([1e-6, 0.25, 3.0, 1e5]))
def test_units_of_cost_leave_the_plan(case, scale):
    reg_m = tuple(scale * rho for rho in case.reg_m)
    other = case.replace(M=scale * case.M, reg=scale * case.reg, reg_m=reg_m)
    one, two = quietly(case, tol=1e-9), quietly(other, tol=1e-9)
    assert relative_error(two.plan, one.plan) < 5e-8
    np.testing.assert_allclose(two.objective, scale * one.objective, rtol=1e-7, atol=1e-9 * scale)


@given(case=cases(hard=False), shift=st.sampled_from([-1.0, 0.5, 100.0]))
def test_constant_in_a_balanced_cost_changes_nothing(case, shift):
    total = case.b.sum() / case.a.sum()
    case = case.replace(a=case.a * total, reg_m=np.inf)
    assume(not np.isinf(case.M).any() and (case.a > 0).any() and (case.b > 0).any())
    one = quietly(case, tol=1e-8, max_passes=3000)
    two = quietly(case.replace(M=case.M + shift), tol=1e-8, max_passes=3000)
    assume(one.converged and two.converged)  # small reg may take more
    assert relative_error(two.plan, one.plan) < 1e-5


@given(case=cases(hard=False))
def test_bounds_on_the_mass(case):
    """At the optimum rho1 sum a (1 - e^(-f/rho1)) = rho1 (sum a - mass): both sides transport the same mass."""
    result = quietly(case, tol=1e-9)
    (_, a, rho1), (_, b, rho2) = case.side(0), case.side(1)
    r, s = result.row_marginal, result.col_marginal
    np.testing.assert_allclose(r.sum(), s.sum(), rtol=1e-9)
    used = np.isfinite(result.log_u)
    np.testing.assert_allclose(r[used], a[used] * np.exp(-result.f / rho1)[used], rtol=1e-6)
    used = np.isfinite(result.log_v)
    right = b[used] * np.exp(-result.g / rho2)[used]
    np.testing.assert_allclose(s[used], right, rtol=1e-4, atol=1e-7 * s.sum())
    # no plan is better than doing nothing but the reference: objective <= that of P = 0
    nothing = case.reg * case.c.sum() + rho1[0] * a.sum() + rho2[0] * b.sum()
    assert result.objective <= nothing * (1 + 1e-12)
    assert result.dual <= result.objective + 1e-13 * measure(case, result.log_u, result.log_v).scale


@given(case=cases(hard=False, largest=12), seed=st.integers(0, 1000))
def test_no_other_plan_is_better(case, seed):
    """The objective of the answer against that of random multiples of it: a minimum, from the definition."""
    result = quietly(case, tol=1e-10)
    best = measure(case, result.log_u, result.log_v)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 0.1, 1.0):
        x, y = (np.where(np.isfinite(v), v + size * rng.normal(size=len(v)), v) for v in (result.log_u, result.log_v))
        other = measure(case, x, y)
        assert other.objective >= best.objective - 1e-12 * best.scale
        assert other.dual <= best.dual + 1e-12 * best.scale


@given(case=cases(hard=False, largest=16), precision=st.sampled_from(list(TOLS)))
def test_warm_start_from_the_answer_is_an_answer(case, precision):
    best = optimum(case)
    exact = best.log_u, best.log_v
    result = quietly(case, warm_start=exact, tol=TOLS[precision], precision=precision)
    assert result.n_passes <= 8  # some of them in float32, which resolve less
    assert relative_error(result.plan, best.plan) <= TOLS[precision] * 1.01
