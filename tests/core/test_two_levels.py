"""Newton's steps with two levels between hard sides of clouds: true bounds, few products, and equations as by NumPy."""

import dataclasses

import numpy as np
import pytest

import mapuot
from mapuot.ascend import two_levels
from mapuot.ascend.settings import LEVELS
from mapuot.backends import pick
from mapuot.problem.problem import Problem

REG = 0.0025


def cloud(n, seed, clusters=12):
    """Return points in clusters of many widths with heavy tails."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).random((clusters, 3))
    widths = np.geomspace(0.01, 0.2, clusters)
    of = rng.choice(clusters, n)
    return centres[of] + widths[of, None] * rng.standard_t(3, (n, 3))


def costs(x, y):
    return 0.5 * ((x[:, None] - y) ** 2).sum(-1)


@pytest.mark.parametrize("masses", ["equal", "random"])
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_bounds_are_true_and_products_are_few(masses, tol):
    x = cloud(500, 1)
    y = cloud(540, 2)
    rng = np.random.default_rng(3)
    if masses == "equal":
        a, b = np.full(500, 1 / 500), np.full(540, 1 / 540)
    else:
        a, b = rng.dirichlet(np.ones(500)), rng.dirichlet(np.ones(540))
    exact = mapuot.solve(costs(x, y), a, b, reg=REG, reg_m=np.inf, tol=1e-9)
    with LEVELS.using(least_in_group=2):
        found = mapuot.solve(mapuot.PointCloud(x, y, scale=0.5, truncate=1.0), a, b, reg=REG, reg_m=np.inf, tol=tol)
    assert exact.converged
    assert found.converged
    assert np.abs(found.plan - exact.plan).sum() <= found.error_bound + exact.error_bound
    assert 0 < int(found.how.split("steps by ")[1].split()[0]) < 150


def groups_of(x, y, log_u, log_v):
    """Return the groups of a cloud with the plan's mass between them, and the matrix of that plan."""
    m, n = len(x), len(y)
    backend = pick("cpu")
    a, b = np.full(m, 1 / m), np.full(n, 1 / n)
    cost = mapuot.PointCloud(x, y, scale=0.5)._cost
    problem = Problem.from_arrays(cost, a, b, REG, np.inf, "kl", "product", backend)
    groups = two_levels.CoarseLevel(backend, problem, 1e9, 1)
    groups.sum_plan(log_u, log_v)
    return groups, np.exp(log_u[:, None] + log_v - costs(x, y) / REG) / (m * n)


def schur(P, rows, cols):
    """Return S between groups of columns, by NumPy."""
    T = np.add.reduceat(np.add.reduceat(P, rows, axis=0), cols, axis=1)
    S = -(T / T.sum(1)[:, None]).T @ T
    np.fill_diagonal(S, 0)
    return S - np.diag(S.sum(1))


def test_equations_between_groups():
    rng = np.random.default_rng(0)
    x, y = 0.1 * rng.random((90, 3)), 0.1 * rng.random((70, 3))
    log_u, log_v = rng.normal(size=90), rng.normal(size=70)
    with LEVELS.using(least_in_group=5, rows_of_group=1000):
        groups, P = groups_of(x, y, log_u, log_v)
        assert 5 < len(groups.first[0]) < 40
        groups.form(log_u, log_v)
        np.testing.assert_allclose(np.tril(groups.S), np.tril(schur(P, *groups.first)), rtol=1e-12, atol=1e-18)
        steps = [rng.normal(size=len(first)) for first in groups.first]
        label = np.searchsorted(groups.first[0], np.arange(90), side="right") - 1
        moved = log_u + steps[0][label], log_v + steps[1][groups.label]
        groups.form(*moved)  # potentials that move with their groups need no new sums
        P *= np.exp(steps[0][label][:, None] + steps[1][groups.label])
        np.testing.assert_allclose(np.tril(groups.S), np.tril(schur(P, *groups.first)), rtol=1e-10, atol=1e-18)


def test_few_rows_stand_for_their_group():
    rng = np.random.default_rng(1)
    x, y = 0.1 * rng.random((200, 3)), 0.1 * rng.random((160, 3))
    with LEVELS.using(least_in_group=10, rows_of_group=2):
        groups, P = groups_of(x, y, np.zeros(200), np.zeros(160))
        groups.form(np.zeros(200), np.zeros(160))
        exact = np.diag(schur(P, *groups.first))
    np.testing.assert_allclose(np.diag(groups.S), exact, rtol=0.2)


def test_steps_end_with_the_passes_that_are_left():
    x = cloud(300, 1)
    y = cloud(300, 2)
    found = mapuot.solve(
        mapuot.PointCloud(x, y, scale=0.5, truncate=1.0), reg=REG, reg_m=np.inf, tol=1e-6, max_passes=9
    )
    assert found.n_passes == 9
    assert found.status == "max_passes"


def test_one_soft_side_and_ranks_take_other_ways():
    x = cloud(60, 1)
    backend = pick("cpu")
    a = np.full(60, 1 / 60)
    cost = mapuot.PointCloud(x, x + 0.1, scale=0.5)._cost
    soft = Problem.from_arrays(cost, a, a, REG, (np.inf, 1.0), "kl", "product", backend)
    hard = Problem.from_arrays(cost, a, a, REG, np.inf, "kl", "product", backend)
    options = mapuot.route.options.make_options("auto", "float64", 1e-6, None, 1)
    assert two_levels.serves(hard, options, skip=True)
    assert not two_levels.serves(hard, options, skip=None)
    assert not two_levels.serves(soft, options, skip=True)
    assert not two_levels.serves(hard, dataclasses.replace(options, symmetric=True), skip=True)
