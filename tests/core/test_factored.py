"""Newton's steps with a factor converge where passes stall, give true answers, and use the Hessian."""

import re
from threading import Event

import numpy as np
import pytest
from oracle import compiler
from problems import Case, clouds, verify

from mapuot.backends import factored
from mapuot.backends.cpu import blas, core_solve
from mapuot.backends.cpu.factored import HostPlans
from mapuot.backends.settings import FACTORS
from mapuot.threads import new_thread

needs_oracle = pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")


def clusters(m, n, reg, reg_m=np.inf, seed=0, equal=True):
    """Return points of clusters with unequal widths and heavy tails; equal masses, or random ones."""
    rng = np.random.default_rng([seed, m, n])
    centres = rng.normal(size=(6, 3))
    widths = 10 ** rng.uniform(-2, -0.3, 6)
    x, y = (
        centres[k] + widths[k, None] * rng.standard_t(4, (len(k), 3))
        for k in (rng.integers(0, 6, m), rng.integers(0, 6, n))
    )
    M = ((x[:, None] - y) ** 2).sum(-1)
    if equal:
        a = np.full(m, 1 / m)
    else:
        a = rng.dirichlet(np.ones(m))
    if equal:
        b = np.full(n, 1 / n)
    else:
        b = rng.dirichlet(np.ones(n))
    return Case(M / M.max(), a, b, reg, reg_m)


def lattice(n, reg, seed):
    """Return points of a lattice: many equal costs, and groups that exchange nothing."""
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(0, 12, (n, 2)).astype(float) for _ in "xy")
    M = ((x[:, None] - y) ** 2).sum(-1)
    return Case(M / M.max(), np.full(n, 1 / n), np.full(n, 1 / n), reg, np.inf)


def wide_masses(m, n, reg, seed):
    """Return random points with masses over 290 decades: some entries of the plan underflow."""
    rng = np.random.default_rng([seed, m, n])
    M = ((rng.random((m, 2))[:, None] - rng.random((n, 2))) ** 2).sum(-1)
    a = 10 ** rng.uniform(-290, 0, m)
    b = 10 ** rng.uniform(-290, 0, n)
    return Case(M, a, b * (a.sum() / b.sum()), reg, np.inf)


@pytest.fixture
def soon(monkeypatch, using):
    """Limit the passes, so that the steps begin far from the answer."""
    using(FACTORS, most_patience=0)
    monkeypatch.setattr(core_solve, "kept", [])  # records that were filled with the usual patience


CASES = {  # of few points: the long-double oracle takes seconds
    "clusters": clusters(14, 14, 1e-4),
    "more rows": clusters(16, 11, 1e-4),
    "more columns": clusters(11, 16, 1e-4),
    "random masses": clusters(14, 12, 3e-5, equal=False),
    "rows hard": clusters(40, 30, 1e-4, (np.inf, 1.0)),
    "columns hard": clusters(40, 30, 1e-4, (1.0, np.inf)),
    "soft": clusters(40, 30, 1e-4, 30.0),
    "unequal totals": clouds(40, 30, 1e-4, 1.0, ratio=3.0),
    "lattice": lattice(12, 1e-5, 0),
    "one row": clusters(1, 9, 1e-4),
    "one column": clusters(9, 1, 1e-4, (np.inf, 5.0)),
}


@needs_oracle
@pytest.mark.parametrize("name", CASES)
def test_answers_are_true(name, soon):
    case = CASES[name]
    result = case.solve()
    assert result.converged, result
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("seed", [2, 4, 9, 13])
def test_masses_that_underflow_do_not_count(seed):
    """A hard column with a marginal that underflows adds its mass to the bound, which once stayed at 2."""
    case = wide_masses(14, 12, 1e-4, seed)
    result = case.solve()
    assert result.converged
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("reg_m", [np.inf, (np.inf, 0.5)])
def test_forbidden_pairs_and_points_without_mass(reg_m, soon):
    case = clusters(16, 16, 1e-3, reg_m)
    M = case.M.copy()
    a = case.a.copy()
    b = case.b.copy()
    M[np.random.default_rng(0).random(M.shape) < 0.3] = np.inf
    a[3] = b[5] = b[6] = 0
    a = a / a.sum()
    b = b / b.sum()
    case = case.replace(M=M, a=a, b=b)
    result = case.solve()
    assert "factor" in result.how
    assert result.converged
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("reference", ["uniform", "matrix"])
def test_references(reference, soon):
    case = clusters(12, 14, 1e-3)
    if reference == "matrix":
        c = np.random.default_rng(1).uniform(0.5, 2, case.M.shape)
    else:
        c = reference
    case = case.replace(reference=c)
    result = case.solve()
    assert "factor" in result.how
    assert result.converged
    verify(result, case)


def posed(case, level):
    """Return the plans of a balanced problem, and potentials of 0 as a start at ``level`` times its reg."""
    (m, n) = case.M.shape
    log_c = (np.log(case.a)[None], np.log(case.b)[None])
    sides = tuple(factored.Margin("balanced", x[None], np.zeros((1, len(x)))) for x in (case.a, case.b))
    work = HostPlans(case.M[None] / case.reg, log_c, sides, np.zeros((1, m)), np.zeros((1, n)))
    return work, factored.LevelStart(level, np.zeros((1, m)), np.zeros((1, n)))


def test_a_group_that_larger_regs_do_not_see_takes_a_second_path():
    """One of 300 points lies in the other group, 1e6 reg away; the first path of larger regs overlooks it."""
    rng = np.random.default_rng(0)
    x = rng.random((300, 2))
    y = rng.random((300, 2))
    x[:150, 0] += 100
    y[:151, 0] += 100
    M = ((x[:, None] - y) ** 2).sum(-1)
    work, start = posed(Case(M, np.full(300, 1 / 300), np.full(300, 1 / 300), 0.01, np.inf), 256.0)
    allowed = np.full(1, 1e-9)
    with np.errstate(all="ignore"):
        factors = factored.improve(work, allowed, [start], float(np.ptp(M)) / 0.01)
        log_u, log_v = work.best
        plan = np.exp(log_u[0][:, None] + log_v[0] - M / 0.01) / 300**2
    assert factors < 300
    assert abs(plan.sum(0) - 1 / 300).sum() < 1e-8
    assert abs(plan.sum(1) - 1 / 300).sum() < 1e-8


def test_steps_that_lead_nowhere_end():
    """Mass 20 more than the columns', which reg_m / reg of 1e13 holds in place: 696 factors once came no nearer."""
    rng = np.random.default_rng(3)
    a = rng.integers(1, 5, 8) * 1.0
    b = rng.dirichlet(np.ones(11)) * a.sum() / 21
    case = Case(rng.random((8, 11)), a, b, 1e-4, (1.7e9, 3.9e9), ("balanced", "tv"))
    result = case.solve(max_passes=3000)
    assert not result.converged
    assert int(re.search(r"by (\d+) factors", result.how)[1]) < 100


@pytest.mark.parametrize("n", [10, 30, 60])
@pytest.mark.parametrize("reg", [1e-5, 1e-6])
def test_small_problems_at_tiny_reg_converge(n, reg):
    """Small problems at tiny reg converge; lattices, the hardest, once ended at a bound of 2 after 10,000 passes."""
    for seed in range(3):
        assert lattice(n, reg, seed).solve().converged
        assert clusters(n, n, reg, seed=seed).solve().converged


def test_clusters_with_equal_masses_converge():
    """Clusters with equal masses converge; they once stalled at 5e-5 after 37,000 products."""
    result = clusters(400, 400, 1e-4).solve(threads=1)
    assert result.converged
    assert "factor" in result.how
    assert result.n_passes < 1000


@pytest.mark.parametrize("rho", [(np.inf, np.inf), (np.inf, 2.0), (0.5, np.inf), (0.5, 2.0)])
def test_the_step_is_newtons(rho):
    """Near the optimum one step squares the columns' marginal error, and the predicted gain is the true one."""
    case = clusters(12, 9, 0.05)
    k = [np.full((1, size), case.reg / r) for size, r in zip(case.M.shape, rho, strict=True)]
    sides = tuple(factored.Margin("kl", x[None], rate) for x, rate in zip((case.a, case.b), k, strict=True))
    log_c = np.log(case.a)[None], np.log(case.b)[None]
    first = np.zeros(1, int)
    only = np.ones(1)
    work = HostPlans(case.M[None] / case.reg, log_c, sides, np.zeros((1, 12)), np.zeros((1, 9)))
    assert factored.descend(work, first, np.full(1, 1e-13))[0] <= 1e-13

    def value():
        parts = []
        for log, mass, rate in ((work.log_u, case.a, k[0]), (work.log_v, case.b, k[1])):
            soft = rate[0] > 0
            parts.append(mass @ np.where(soft, -np.expm1(-rate * log) / np.where(soft, rate, 1), log)[0])
        return sum(parts) - work.r.sum()

    def moved(y):
        """Move log v by y; return the numbers of the workspace, and the dual value."""
        work.y[:] = y
        judged = work.trial(first, only)
        work.accept(first)
        return judged, value()

    here = value()
    optimum = work.log_v.copy()
    far, there = moved(0.5)
    assert far.gain == pytest.approx(there - here, rel=1e-9, abs=1e-12)
    work.log_v[:] = optimum
    factored.begin(work, first)
    near, there = moved(1e-4 * np.random.default_rng(0).normal(size=(1, 9)))
    assert near.gain == pytest.approx(there - here, rel=1e-3, abs=1e-13)
    step, _ = factored.find_step(work, first, np.zeros(1))
    assert work.trial(first, step.length).missed < 1e-3 * near.missed


def test_max_passes_is_kept():
    """Steps with a factor begin after a number of passes; a smaller limit of passes gives passes alone."""
    result = clusters(60, 60, 1e-5).solve(max_passes=7)
    assert result.status == "max_passes"
    assert result.n_passes <= 8
    assert "factor" not in result.how


def blas_threads():
    return [library.num_threads for library in blas.libraries().lib_controllers]


@pytest.mark.parametrize("serial", [0, 1000])
def test_factors_use_the_threads_asked_for(serial, soon, monkeypatch, using):
    """OpenBLAS took all cores whatever ``threads`` said, and two busy cores took ten times as long as one."""
    if not blas.libraries().lib_controllers:
        pytest.skip("this BLAS has no control of its threads")
    before = blas_threads()
    seen = set()
    solve = HostPlans.solve

    def watched(self, *asked):
        seen.update(blas_threads())
        return solve(self, *asked)

    monkeypatch.setattr(HostPlans, "solve", watched)
    using(FACTORS, serial_unknowns=serial)
    assert clusters(14, 14, 1e-4).solve(threads=2).converged
    assert seen == {1 if serial else 2}
    assert blas_threads() == before


def test_solves_at_the_same_time_restore_the_threads_once():
    """A second solve that begins during the first must not restore the limit of the first as the number of threads."""
    before = blas_threads()
    with blas.limited(1), blas.limited(2):
        assert blas_threads() == [1] * len(before)
    assert blas_threads() == before


def test_a_thread_that_ends_last_leaves_the_threads_as_they_were():
    """The last of several solves removed the limit of the first, from another thread: BLAS kept one thread."""
    before = blas_threads()
    is_set, may_end, has_ended = Event(), Event(), Event()

    def first():
        with blas.limited(1):
            is_set.set()
            may_end.wait(10)
        has_ended.set()

    new_thread(first)
    assert is_set.wait(10)
    with blas.limited(2):
        assert blas_threads() == [1] * len(before)
        may_end.set()
        assert has_ended.wait(10)
    assert blas_threads() == before
    with blas.limited(1):
        assert blas_threads() == [1] * len(before)
    assert blas_threads() == before


KINKS = {
    "range": clusters(14, 12, 1e-4).replace(penalty="range", reg_m=0.3),
    "a range and a balanced side": clusters(14, 12, 1e-4).replace(penalty=("balanced", "range"), reg_m=(np.inf, 1e-6)),
    "total variation": clusters(14, 12, 1e-4).replace(penalty="tv", reg_m=0.2),
    "total variation and a range": clusters(12, 14, 1e-4).replace(penalty=("tv", "range"), reg_m=(1.0, 0.1)),
    "squares": clusters(14, 12, 1e-4).replace(penalty=("balanced", "l2"), reg_m=(np.inf, 50.0)),
    "squares of masses of 1e-160": clusters(12, 14, 1e-3).replace(penalty=("l2", "balanced"), reg_m=(1e160, np.inf)),
    "points without mass": clusters(14, 12, 1e-3).replace(penalty=("range", "tv"), reg_m=(0.5, 1.0)),
}  # fmt: skip


@needs_oracle
@pytest.mark.parametrize("name", KINKS)
def test_penalties_with_kinks(name, soon):
    """Ranges and total variation ended at bounds of .1 to 30 after all passes: their kinks mislead extrapolation."""
    case = KINKS[name]
    if "1e-160" in name:
        case = case.replace(a=case.a * 1e-160, b=case.b * 1e-160)
    if "without" in name:
        case = case.replace(a=np.where(np.arange(14) == 3, 0, case.a), b=np.where(np.arange(12) == 5, 0, case.b))
    result = case.solve()
    assert "factor" in result.how
    assert result.converged
    verify(result, case)


@needs_oracle
def test_a_plan_beneath_the_range_of_k_is_found():
    """All costs are 16,000 reg: the first K is 0, and a solve ended "underflow" though columns demand their mass."""
    case = clusters(5, 7, 0.05).replace(penalty=("kl", "range"), reg_m=(0.02, 0.9))
    case = case.replace(M=case.M + 16_000 * case.reg)
    result = case.solve()
    assert "factor" in result.how
    assert result.converged
    verify(result, case)
