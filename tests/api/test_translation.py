"""Masses that differ where reg_m / reg is large: a common translation of 1e5 to 1e13 nats costs a plan no digit."""

import judge
import numpy as np
import pytest
from oracle import compiler
from problems import Case, clouds
from scipy import sparse

import mapuot
from mapuot.arrays import host
from mapuot.problem.translation import common_translation, without_translation

PAIRS = {
    "soft": (1e6, 1e8), "alike": (1e9, 1e9), "hard rows": (np.inf, 1e10), "hard columns": (1e12, np.inf),
    "largest": (1e13, 1e12),
}  # fmt: skip


def drawn(pair, reference: str = "product", ratio: float = 3.0) -> Case:
    """Return a problem of unlike masses; ``pair``: reg_m over reg."""
    case = clouds(12, 9, 0.02, 1.0)
    reg_m = tuple(case.reg * np.asarray(rho) for rho in pair)
    return case.replace(b=ratio * case.a.sum() / case.b.sum() * case.b, reg_m=reg_m, reference=reference)


def test_only_masses_that_grow_have_a_translation():
    """Between two hard sides there is none: it was infinite, and dropped by its caller."""
    assert common_translation(1.0, np.exp(2.0), 1e-6) == pytest.approx(2e6)
    assert common_translation(np.exp(2.0), 1.0, 1e-6) == pytest.approx(-2e6)
    for rate in (1e-3, 0.0, 5e-324):  # small, of hard sides, beyond float64
        assert common_translation(1.0, np.exp(2.0), rate) == 0.0


def failures_of(case, found, tol):
    return judge.judge(case, judge.claim_of(found), {"tol": tol})[0]


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
@pytest.mark.parametrize("reference", ["product", "uniform"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_claim_is_true(pair, reference):
    case = drawn(PAIRS[pair], reference)
    found = case.solve(tol=1e-6)
    assert found.converged
    assert not failures_of(case, found, 1e-6)
    known = reference == "product"  # else log u has a constant of its own
    ratio = np.log(3.0) / sum(1 / (1 + rho) if known else 1 / rho for rho in PAIRS[pair])
    np.testing.assert_allclose(-found.log_u, ratio, rtol=1e-2)


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
def test_points_may_have_their_own_rho():
    rho = 10.0 ** np.random.default_rng(0).uniform(6, 10, 12)
    case = drawn((rho, 1e9))
    found = case.solve(tol=1e-6)
    assert found.converged
    assert found.problem.translation > 1e4
    assert not failures_of(case, found, 1e-6)


@pytest.mark.parametrize("refine", [False, True])
def test_certify_where_points_have_their_own_rho(refine):
    case = drawn((10.0 ** np.random.default_rng(0).uniform(6, 10, 12), 1e9))
    far = np.quantile(case.M, 0.8)
    few = sparse.csr_array(np.where(far < case.M, 0.0, case.M))
    result = mapuot.solve(few, case.a, case.b, reg=case.reg, reg_m=case.reg_m, tol=1e-7)
    found = mapuot.certify(result, case.M, refine=refine, tol=1e-5)
    assert found.result.problem.translation > 1e4
    whole = case.solve(tol=1e-8)
    stored = found.result.plan.toarray()
    assert np.abs(stored - whole.plan).sum() <= (found.error_bound + 1e-8) * stored.sum()
    assert found.dual <= whole.objective


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
@pytest.mark.parametrize("reference", ["product", "uniform"])
@pytest.mark.parametrize(("low", "rho"), [(-2e4, 1.0), (-4e4, 0.01), (-2e4, 100.0)])
def test_a_point_with_a_small_rho_stays_where_its_scaled_mass_would_be_zero(low, rho, reference):
    # scaled by e^(-12432 reg / (rho + reg)), the mass of a_0 underflows, but its low costs draw most of the mass to it
    M = np.array([[low, low], [0.0, 1.0]])
    case = Case(M, np.ones(2), np.full(2, 1e-3), 1.0, (np.array([rho, 4e3]), 4e3), reference=reference)
    found = case.solve(tol=1e-6)
    assert found.converged
    assert not failures_of(case, found, 1e-6)


def test_a_point_without_mass_stays_without():
    rho = np.where(np.arange(12) == 3, 0.1, 1e8)
    case = drawn((rho, 1e8), ratio=1e6)
    case = case.replace(a=np.where(np.arange(12) == 3, 0.0, case.a))
    found = case.solve(tol=1e-7)
    left = case.replace(
        M=np.delete(case.M, 3, 0), a=np.delete(case.a, 3), reg_m=(np.delete(case.reg_m[0], 3), case.reg_m[1])
    )
    alone = left.solve(tol=1e-7)
    assert found.converged
    assert np.isneginf(found.log_u[3])
    np.testing.assert_allclose(np.delete(found.plan, 3, 0), alone.plan, atol=2e-7 * alone.mass)
    np.testing.assert_allclose([found.dual, found.objective], alone.objective, rtol=1e-9)


@pytest.mark.parametrize("lightest", [1e-300, 5e-324])
def test_no_mass_loses_digits(lightest):
    case = drawn((1e6, 1e8), ratio=1e-30)
    case = case.replace(a=np.where(np.arange(12) == 3, lightest, case.a))
    whole = case.solve(max_passes=1).problem
    scaled = without_translation(whole).task.rows.weight
    log = np.log(scaled / case.a)
    np.testing.assert_allclose(log, log[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pair", ["soft", "hard columns"])
def test_batches(pair, backend):
    if backend == "reference":
        pytest.skip("solves no batch")
    cases = [drawn(PAIRS[pair], ratio=ratio) for ratio in (3.0, 1.0, 0.2)]
    tables = (np.stack([case.a for case in cases]), np.stack([case.b for case in cases]))
    found = mapuot.solve_batch(cases[0].M, *tables, reg=cases[0].reg, reg_m=cases[0].reg_m, tol=1e-7, backend=backend)
    assert found.converged.all()
    for i, case in enumerate(cases):
        alone = case.solve(tol=1e-7, backend=backend)
        np.testing.assert_allclose(host(found[i].plan), host(alone.plan), atol=3e-7 * alone.mass)
        np.testing.assert_allclose(host(found.log_u[i]), host(alone.log_u), rtol=1e-6, atol=1e-2)
        np.testing.assert_allclose(found.objective[i], alone.objective, rtol=1e-9)
        assert found.dual[i] <= found.objective[i] * (1 + 1e-7)


def test_a_file_and_a_start_keep_it(tmp_path):
    case = drawn(PAIRS["largest"])
    found = case.solve(tol=1e-7)
    found.save(tmp_path / "answer.npz")
    again = mapuot.load(tmp_path / "answer.npz", case.M)
    np.testing.assert_array_equal(again.plan, found.plan)
    np.testing.assert_array_equal(again.f, found.f)
    assert max(np.abs(found.own_logs[0]).max(), np.abs(found.own_logs[1]).max()) < 1e4
    assert np.abs(found.log_u).min() > 1e11
    for start in (found, (found.log_u, found.log_v)):
        warm = case.solve(tol=1e-7, warm_start=start)
        assert warm.converged
        np.testing.assert_allclose(warm.plan, found.plan, atol=4e-7 * found.mass)


def test_the_potential_of_other_points_has_it():
    case = drawn(PAIRS["soft"])
    rng = np.random.default_rng(1)
    x = rng.random((12, 2))
    y = rng.random((9, 2))
    found = mapuot.solve(mapuot.PointCloud(x, y), case.a, case.b, reg=case.reg, reg_m=case.reg_m, tol=1e-9)
    np.testing.assert_allclose(found.potential(x), found.f, rtol=1e-12)
