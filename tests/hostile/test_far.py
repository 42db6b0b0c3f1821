"""Points far from all others: rows and columns that no plan near the optimum uses, and some that it uses."""

import numpy as np
import pytest
from judge import claim_of, is_false, judge

import mapuot
from hostile.problem import Problem

WAYS = {}, {"form": None}, {"truncate": 30.0}, {"metric": "cityblock", "form": None}
KINDS = ("kl", "kl"), ("kl", "kl"), ("kl", "balanced"), ("balanced", "kl"), ("tv", "kl"), ("kl", "tv"), ("l2", "kl")


def draw(seed):
    """Draw costs between few points, with some rows and columns 1e2 to 1e14 times as far away as the others."""
    rng = np.random.default_rng([2026, seed])
    (m, n) = rng.integers(2, 7, 2)
    kinds = KINDS[rng.integers(len(KINDS))]
    reg = 10 ** rng.uniform(-2, 0)
    rho = 10 ** rng.uniform(-1, 2.5, 2)
    M = rng.random((m, n))
    far_rows, far_cols = (rng.random(k) < rng.choice([0.0, 0.3, 0.6]) for k in (m, n))
    M *= np.where(far_rows, 10 ** rng.uniform(2, 14, m), 1.0)[:, None]
    M *= np.where(far_cols, 10 ** rng.uniform(2, 14, n), 1.0)
    if rng.random() < 0.3:  # two far points that are near each other, or not too far
        M[rng.integers(m), rng.integers(n)] = 10 ** rng.uniform(-1, 4)
    a, b = (rng.random(k) * 10 ** rng.uniform(-3, 3) for k in (m, n))
    reg_m = tuple(np.inf if kind == "balanced" else float(x) for kind, x in zip(kinds, rho, strict=True))
    return Problem(M, a, b, reg, reg_m, kinds)


def solved(problem, how):
    words = {"reg": problem.reg, "reg_m": problem.reg_m, "penalty": problem.penalty}
    if how == "batch":
        both = (np.stack([x, x]) for x in (problem.M, problem.a, problem.b))
        return mapuot.solve_batch(*both, **words)[1]
    options = {"float64": {"precision": "float64"}, "rows": {}, "ordinary": {"threads": 2}}.get(how, {})
    M = (lambda i, j: problem.M[i:j]) if how == "rows" else problem.M
    return mapuot.solve(M, problem.a, problem.b, **words, **options)


def untrue(seed, how):
    problem = draw(seed)
    result = solved(problem, how)
    failures, figures = judge(problem, claim_of(result), {})
    return [f for f in failures if is_false(f.kind)], figures, result


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning", "ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("how", ["plain", "float64", "rows", "ordinary", "batch"])
def test_claims_are_true(how):
    for seed in range(12):
        failures, _, result = untrue(seed, how)
        assert not failures, (seed, failures, result)


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("times", [1e4, 1e6, 1e9])
@pytest.mark.parametrize("words", WAYS, ids=str)
def test_one_point_far_away_costs_no_certificate(words, times):
    rng = np.random.default_rng(4)
    x = rng.random((120, 3))
    y = rng.random((90, 3))
    reg, reg_m = 0.05, 1.0
    near = mapuot.solve_sample(x, y, reg=reg, reg_m=reg_m, **words)
    x[7] *= times
    far = mapuot.solve_sample(x, y, reg=reg, reg_m=reg_m, **words)
    assert far.converged
    assert far.n_passes <= 2 * near.n_passes + 5
    assert far.row_marginal[7] == 0.0
    rest = np.arange(120) != 7
    alone = mapuot.solve_sample(x[rest], y, np.full(119, 1 / 120), reg=reg, reg_m=reg_m, tol=1e-9, **words)
    assert np.abs(far.plan[rest] - alone.plan).sum() <= (far.error_bound + 1e-9) * far.mass
    assert far.dual <= alone.objective + (reg + reg_m) / 120 <= far.objective + 1e-9


def test_exponents_count_the_distance_to_the_least_cost():
    """With log u = log v = 0 and costs of -1e6 to 1e6, costs up to 0 have entries: 1e6 / reg above the least cost."""
    x = np.array([[1e3], [-1e3]])
    zeros = np.zeros(2)
    cloud = mapuot.PointCloud(x, x, "inner", addends=(zeros, zeros))
    problem = mapuot.solve(cloud, reg=1e-2, reg_m=1e6, max_passes=1).problem
    assert (problem.M_min, problem.M_max) == (-1e6, 1e6)
    of_costs = problem.cost.error(0.0) / 1e-2
    assert problem.exponent_error(zeros, zeros) >= 2.0**-50 * 1e6 / 1e-2 + 0.999 * of_costs


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning", "ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("kinds", [("kl", "kl"), ("tv", "kl"), ("tv", "tv"), ("l2", "kl")])
@pytest.mark.parametrize("far", [26.0, 26.4, 50.0, 1e4])
def test_costs_far_above_reg_m_have_the_value_of_a_plan_that_moves_nothing(kinds, far, backend):
    """Passes end at a plan without mass in float64: its value is known, whichever side has paid the costs so far."""
    rng = np.random.default_rng(0)
    x = rng.random((6, 2))
    y = rng.random((5, 2)) + far
    a = rng.dirichlet(np.ones(6))
    b = rng.dirichlet(np.ones(5))
    M = ((x[:, None] - y) ** 2).sum(2)
    reg = 0.05
    rho = (1.0, 0.7)
    left = [r * 0.5 * (w**2).sum() if kind == "l2" else r for kind, r, w in zip(kinds, rho, (a, b), strict=True)]
    call = {"reg": reg, "reg_m": rho, "penalty": kinds, "backend": backend}
    one = mapuot.solve(M, a, b, **call)
    many = mapuot.solve_batch(M, np.stack([a, a]), b, **call)
    for found in (one, many, many[1]):
        np.testing.assert_allclose(found.dual, sum(left) + reg, rtol=1e-9)
        np.testing.assert_allclose(found.objective, sum(left) + reg, rtol=1e-9)
        assert np.all(found.mass < 1e-200)
        assert np.all(found.gap >= found.objective - found.dual)


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning", "ignore::mapuot.ScalingWarning")
def test_divergences_between_far_clouds_do_not_fall():
    """The unbalanced divergence of clouds tends to its value without transport, and stays there."""
    x = np.random.default_rng(0).random((6, 2))
    near, far, farthest = (mapuot.pairwise([x, x + k], reg=0.05, reg_m=1.0)[0, 1] for k in (10.0, 50.0, 1e3))
    np.testing.assert_allclose([far, farthest], near, rtol=1e-6)
