"""Bounds of the value without entropy, against exact solvers of that problem."""

import numpy as np
import pytest
from problems import clouds
from scipy import sparse
from scipy.optimize import linprog

import mapuot


def linear(M, a, b, rho):
    """The optimum with total variation at rho, or balanced: a linear program in the plan and both sides of |r - t|."""
    m, n = M.shape
    into = np.vstack([np.kron(np.eye(m), np.ones(n)), np.kron(np.ones(m), np.eye(n))])
    cost, A = M.ravel(), into
    if np.isfinite(rho):
        cost, A = np.r_[cost, np.full(2 * (m + n), rho)], np.hstack([into, np.eye(m + n), -np.eye(m + n)])
    return linprog(cost, A_eq=A, b_eq=np.r_[a, b], method="highs").fun


def kl(ot, case, rho):
    """The optimum with Kullback-Leibler penalties, from above, by POT."""
    P = ot.unbalanced.mm_unbalanced(case.a, case.b, case.M, rho, div="kl", numItermax=20_000, stopThr=1e-12)
    pairs = (P.sum(1), case.a), (P.sum(0), case.b)
    return (P * case.M).sum() + rho * sum((r * np.log(r / t) - r + t).sum() for r, t in pairs)


@pytest.mark.parametrize("reg", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("rho", [0.05, 1.0, 5.0])
def test_bounds_beside_pot(reg, rho):
    ot = pytest.importorskip("ot")
    case = clouds(20, 15, reg, rho, ratio=1.3)
    low, high = case.solve().unregularised_bounds()
    right = kl(ot, case, rho)
    assert low <= right * (1 + 1e-12)
    assert right <= high * (1 + 1e-3)  # POT's plan is near the best one only
    assert high - low <= 8 * reg * case.b.sum()


@pytest.mark.parametrize("reg", [1e-2, 1e-5])
@pytest.mark.parametrize("rho", [0.05, 0.4, np.inf])
def test_bounds_beside_linear_programs(reg, rho):
    case = clouds(15, 12, reg, rho, ratio=1.0 if np.isinf(rho) else 1.3, penalty="tv" if np.isfinite(rho) else "kl")
    low, high = case.solve().unregularised_bounds()
    right = linear(case.M, case.a, case.b, rho)
    assert low <= right * (1 + 1e-9) <= high * (1 + 2e-9)
    assert right - low <= 8 * reg
    assert np.isinf(high) == np.isinf(rho)


@pytest.mark.parametrize("most", [1, 5, 20])
@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
def test_any_answer_gives_true_bounds(most):
    """Of a solve that was stopped, of points, of a sparse cost, of masses that are 0."""
    case = clouds(15, 12, 1e-3, 0.4, penalty="tv")
    low, high = case.solve(max_passes=most).unregularised_bounds()
    assert low <= linear(case.M, case.a, case.b, 0.4) <= high
    rng = np.random.default_rng(1)
    x, y, a = rng.random((30, 2)), rng.random((20, 2)), np.r_[np.zeros(5), np.full(25, 0.04)]
    M = ((x[:, None] - y) ** 2).sum(-1)
    options = {"reg": 1e-3, "reg_m": 0.5, "max_passes": most}
    of_array = mapuot.solve(M, a, **options).unregularised_bounds()
    of_points = mapuot.solve(mapuot.PointCloud(x, y, form=None), a, **options).unregularised_bounds()
    of_pairs = mapuot.solve(sparse.csr_array(M), a, **options).unregularised_bounds()
    best = mapuot.solve(M, a, reg=1e-6, reg_m=0.5).unregularised_bounds()
    for low, high in (of_array, of_points, of_pairs):
        assert low <= best[1]
        assert high >= best[0]


@pytest.mark.parametrize("penalty", ["tv", "l2"])
def test_points_without_mass_may_take_some_without_entropy(penalty):
    """The product of the masses forbids them: here all mass would go to the second row, at a cost of .2 at most."""
    M, a, b = np.array([[10.0], [0.0]]), np.array([1.0, 0.0]), np.ones(1)
    result = mapuot.solve(M, a, b, reg=1e-3, reg_m=(0.1, 100.0), penalty=(penalty, "kl"))
    low, high = result.unregularised_bounds()
    assert low <= 0.2
    assert high > 9
