"""What holds for every problem, searched with hypothesis: no false certificate, and an answer is where a solve ends."""

import warnings

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Case, optimum, relative_error, verify, with_forbidden, with_zeros

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


@settings(max_examples=200)
@given(
    case=cases(), precision=st.sampled_from(list(TOLS)), threads=st.sampled_from([1, 2, 5]),
    backend=st.sampled_from(["cpu", "cpu", "reference"]), data=st.data(),
)  # fmt: skip
def test_no_certificate_is_false(case, precision, threads, backend, data):
    """Stopped anywhere: true error <= bound, objective - dual = gap >= 0, all marginals those of the plan."""
    method = data.draw(st.sampled_from(["auto", "auto", "translation_invariant", "sinkhorn"]))
    passes = data.draw(st.sampled_from([1, 2, 3, 7, 20, 3000]))
    precision = "float64" if backend == "reference" else precision
    options = {"precision": precision, "method": method, "tol": TOLS[precision], "threads": threads}
    result = quietly(case, max_passes=passes, backend=backend, **options)
    assert result.error_bound >= 0
    assert not result.trace[-1].rejected
    report = verify(result, case, precision)
    assert np.isfinite(result.error_bound)
    if passes == 3000 and method == "auto":
        assert result.converged
        assert report.error < 30 * TOLS[precision]


@given(case=cases(hard=False, largest=16), precision=st.sampled_from(list(TOLS)))
def test_warm_start_from_the_answer_is_an_answer(case, precision):
    best = optimum(case)
    exact = best.log_u, best.log_v
    result = quietly(case, warm_start=exact, tol=TOLS[precision], precision=precision)
    assert result.n_passes <= 8  # some of them in float32, which resolve less
    assert relative_error(result.plan, best.plan) <= TOLS[precision] * 1.01
