"""A large constant in M costs no digit where a side is hard: the answer is the one of M less the constant."""

import pickle

import judge
import numpy as np
import pytest
from oracle import compiler
from problems import Case, clouds, csr_of, with_forbidden
from scipy import sparse

import mapuot
from mapuot.arrays import host
from mapuot.files import load_checkpoint

CONSTANTS = 1e9, -1e12
HARD = {"both": np.inf, "rows": (np.inf, 1.0), "columns": (1.0, np.inf)}


def raised(case: Case, constant: float) -> tuple[Case, Case]:
    """Return two cases: one with costs M + constant, and one with M rounded as that sum rounds it."""
    M = case.M + constant
    return case.replace(M=M), case.replace(M=M - constant)


def lift(case: Case, constant: float) -> float:
    """Return the constant's part of a value: constant times the mass of the hard side."""
    return constant * float((case.b if case.reg_m == HARD["columns"] else case.a).sum())


def near(x, y, scale):
    np.testing.assert_allclose(x, y, atol=4 * 2.0**-52 * abs(scale), rtol=0)


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("sides", HARD)
def test_every_number_is_for_the_given_cost(sides, constant, backend):
    case, plain = raised(clouds(30, 25, 0.01, HARD[sides]), constant)
    found, alone = (x.solve(tol=1e-9, backend=backend) for x in (case, plain))
    assert found.converged
    assert alone.converged
    np.testing.assert_allclose(host(found.plan), host(alone.plan), atol=2e-9)
    value = lift(case, constant)
    for name in ("objective", "dual"):
        near(getattr(found, name), getattr(alone, name) + value, 2 * value)
    near(found.cost, alone.cost + constant * found.row_marginal.sum(), 2 * value)
    assert max(found.dual, found.trace[-1].dual) <= found.objective
    both = found.f[:, None] + found.g
    of_one = alone.f[:, None] + alone.g
    near(both, of_one + constant, 2 * constant)
    assert found.log_u[:, None] + found.log_v == pytest.approx(both / case.reg, rel=1e-12)
    if backend != "reference":
        low, _ = found.unregularised_bounds()
        near(low, alone.unregularised_bounds()[0] + value, 4 * value)
        assert low <= alone.objective + value


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
@pytest.mark.parametrize("sides", HARD)
def test_certificates_are_true(sides):
    for reg in (0.1, 1e-3):
        case = raised(clouds(9, 7, reg, HARD[sides]), 1e9)[0]
        found = case.solve(tol=1e-7)
        failures, _ = judge.judge(case, judge.claim_of(found), {"tol": 1e-7})
        assert found.converged
        assert not failures, failures


def test_soft_sides_keep_it():
    case = clouds(6, 5, 0.1, 1.0)
    assert case.replace(M=case.M + 1e5).solve(max_passes=3).problem.constant == 0


def test_kinds_of_cost():
    case, plain = raised(with_forbidden(clouds(20, 18, 0.02, HARD["rows"])), 1e9)
    alone = plain.solve(tol=1e-8).plan
    forms = {"sparse": csr_of(case.M), "rows": lambda i0, i1: case.M[i0:i1], "turned": np.asfortranarray(case.M)}
    for name, M in forms.items():
        found = case.replace(M=M).solve(tol=1e-8)
        if sparse.issparse(found.plan):
            plan = found.plan.toarray()
        else:
            plan = found.plan
        assert found.converged, name
        np.testing.assert_allclose(plan, alone, atol=2e-8, err_msg=name)
    single = (case.M + 1e9).astype(np.float32)
    assert case.replace(M=single).solve().plan.dtype == np.float32


def test_batches(backend):
    case, plain = raised(clouds(20, 18, 0.02, np.inf), 1e9)
    A = np.stack([case.a, np.full(20, 1 / 20)])
    B = np.stack([case.b, np.full(18, 1 / 18)])
    for M, N in ((case.M, plain.M), (np.stack([case.M] * 2), np.stack([plain.M] * 2))):
        found, alone = (mapuot.solve_batch(x, A, B, reg=0.02, reg_m=np.inf, tol=1e-8, backend=backend) for x in (M, N))
        assert found.converged.all()
        np.testing.assert_allclose(found.plan, alone.plan, atol=2e-8)
        for name in ("objective", "dual"):
            near(getattr(found, name), getattr(alone, name) + 1e9, 2e9)
        np.testing.assert_allclose(found.cost, alone.cost + 1e9, rtol=1e-9)
        near(found.f[:, :, None] + found.g[:, None], alone.f[:, :, None] + alone.g[:, None] + 1e9, 2e9)
        assert found[1].cost == pytest.approx(found.cost[1], rel=1e-15)
        again = mapuot.solve_batch(M, A, B, reg=0.02, reg_m=np.inf, tol=1e-8, backend=backend, warm_start=found)
        assert again.converged.all()
        assert again.n_passes.max() <= found.n_passes.max() // 2
        weighed = found.plan_sum(np.ones(2))
        np.testing.assert_allclose(weighed, alone.plan_sum(np.ones(2)), atol=4e-8)


REGS = np.array([0.02, 0.01, 0.05])
MIXED = np.array([np.inf, 1.0, np.inf])  # the second problem is soft: its constant moves mass, and stays in M
OWN = {  # reg, reg_m, constants, and the form of the costs of a batch
    "own constants": (0.02, np.inf, (1e9, 1e3, -2e8), np.stack),
    "own reg": (REGS, (np.inf, 1.0), (1e9, 1e3, -2e8), np.stack),
    "one cost, own reg": (REGS, np.inf, (2e8, 2e8, 2e8), lambda costs: costs[0]),
    "hard and soft problems": (0.02, MIXED, (1e9, 0.0, -2e8), np.stack),
    "sparse": (0.02, (1.0, np.inf), (1e9, 1e3, -2e8), lambda costs: [csr_of(x) for x in costs]),
}


@pytest.mark.parametrize("name", OWN)
def test_batches_with_own_numbers(name):
    """Problems with their own reg or constant once lost digits to a constant of 1e9: the plan was off by 3e-3."""
    reg, reg_m, constants, form = OWN[name]
    case = clouds(20, 18, 0.02, np.inf)
    costs = [case.M + constant for constant in constants]
    A = np.stack([case.a, np.full(20, 1 / 20), case.a])
    B = np.stack([case.b, np.full(18, 1 / 18), case.b])
    options = {"reg": reg, "reg_m": reg_m, "tol": 1e-8, "backend": "cpu"}
    found = mapuot.solve_batch(form(costs), A, B, **options)
    for i, one in enumerate(found):
        own = float(np.broadcast_to(reg, 3)[i])
        if reg_m is not MIXED:
            rho = reg_m
        else:
            rho = float(MIXED[i])
        alone = mapuot.solve(costs[i], A[i], B[i], reg=own, reg_m=rho, tol=1e-8)
        assert one.converged
        assert alone.converged
        if sparse.issparse(one.plan):
            plan = one.plan.toarray()
        else:
            plan = one.plan
        np.testing.assert_allclose(plan, alone.plan, atol=4e-8)
        for number in ("objective", "dual", "cost"):
            near(getattr(found, number)[i], getattr(alone, number), 2e9)
            near(getattr(one, number), getattr(found, number)[i], 2e9)
        near(found.f[i][:, None] + found.g[i], alone.f[:, None] + alone.g, 2e9)
        near(one.f[:, None] + one.g, alone.f[:, None] + alone.g, 2e9)
        near(own * (found.log_u[i][:, None] + found.log_v[i]), alone.f[:, None] + alone.g, 2e9)
    again = mapuot.solve_batch(form(costs), A, B, **options, warm_start=found)
    assert again.n_passes.max() < 0.5 * found.n_passes.max()


def test_a_cost_of_hard_and_soft_problems():
    """One cost serves hard and soft problems: its constant is taken out of the hard problems only."""
    case = clouds(20, 18, 0.02, np.inf)
    found = mapuot.solve_batch(case.M + 1e9, case.a, case.b, reg=0.02, reg_m=MIXED, tol=1e-8, max_passes=50)
    alone = (case.M + 1e9 - 1e9 for _ in range(3))
    for i, M in enumerate(alone):
        if MIXED[i] == np.inf:
            np.testing.assert_allclose(found[i].plan, case.replace(M=M).solve(tol=1e-8).plan, atol=4e-8)
    assert list(found.problem.constant != 0) == [True, False, True]


def test_starts_files_and_copies(tmp_path):
    case, plain = raised(clouds(20, 18, 0.02, np.inf), 1e9)
    found = case.solve(tol=1e-8)
    for start in (found, plain.solve(tol=1e-8), (found.log_u, found.log_v)):
        assert case.solve(tol=1e-6, warm_start=start).n_passes <= 3
    assert plain.solve(tol=1e-6, warm_start=found).n_passes <= 3
    found.save(tmp_path / "answer.npz")
    told = [mapuot.load(tmp_path / "answer.npz", case.M), pickle.loads(pickle.dumps(found))]
    for other in told:
        np.testing.assert_array_equal(other.plan, found.plan)
        assert (other.cost, other.dual) == (found.cost, found.dual)
        np.testing.assert_array_equal(other.f, found.f)
    case.solve(tol=1e-8, checkpoint=tmp_path / "state.npz", max_passes=20, callback=lambda stat: None)


def test_resumed_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPUOT_CHECKPOINT_SECONDS", "0")
    case = raised(clouds(20, 18, 0.02, np.inf), 1e9)[0]
    whole = case.solve(tol=1e-6, checkpoint=tmp_path / "state.npz")
    start = load_checkpoint(tmp_path / "state.npz", 20, 18, 0.02)
    assert case.solve(tol=1e-6, warm_start=start).n_passes < whole.n_passes / 2


def test_a_missing_pair_is_found():
    case, plain = raised(clouds(20, 18, 0.05, np.inf), 1e9)
    some = np.argsort(np.argsort(plain.M, axis=None)).reshape(20, 18) < 250
    some[np.arange(20), np.arange(20) % 18] = some[np.arange(18) % 20, np.arange(18)] = True
    found = [mapuot.certify(x.replace(M=csr_of(np.where(some, x.M, np.inf))).solve(), x.M) for x in (case, plain)]
    assert found[0].missing == pytest.approx(found[1].missing, rel=1e-5)
    assert found[0].error_bound == pytest.approx(found[1].error_bound, rel=1e-3)


@pytest.mark.parametrize("most", [1, 2, 10_000])
def test_the_objective_is_that_of_the_plan_where_hard_columns_are_missed(most):
    """The constant is paid by the mass of the plan, not by the mass that was asked for."""
    rng = np.random.default_rng(0)
    M = rng.random((5, 6)) + 1e6
    a = rng.random(5)
    b = 2 * rng.random(6)
    known = {"reg": 0.1, "reg_m": (1.0, np.inf), "method": "sinkhorn", "max_passes": most}
    batch = mapuot.solve_batch(np.stack([M, M]), a, b, **known)
    for result in (mapuot.solve(M, a, b, **known), batch[1]):
        P = result.plan
        paid = sum(
            (x * np.log(x / t) - x + t).sum() * rho for x, t, rho in ((P, np.outer(a, b), 0.1), (P.sum(1), a, 1))
        )
        if result.converged:  # the mass that was asked for: the gap stays small beside the constant
            assert abs(result.objective - result.dual) <= result.gap + 1e-12 * abs(result.dual)
        else:
            assert result.objective == pytest.approx((P * M).sum() + paid, rel=1e-13)
    np.testing.assert_allclose(batch.objective, result.objective, rtol=1e-12)


def test_the_objective_is_within_its_gap_of_the_dual_value():
    M = np.random.default_rng(1).integers(0, 4096, (12, 13)) / 4096 + 2.0**30
    result = mapuot.solve(M, reg=0.05, reg_m=(1.0, np.inf))
    assert result.converged
    assert result.objective - result.dual <= result.gap + 1e-14 * abs(result.dual)
