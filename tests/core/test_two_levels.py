"""Newton's steps with two levels between hard sides of clouds: true bounds, few products, and equations as by NumPy."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import mapuot
from mapuot.ascend import two_levels
from mapuot.ascend.settings import LEVELS
from mapuot.ascend.stages import levels_serve
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
    """Return the groups of a cloud with the plan's mass between them, and that plan in the order of the groups."""
    m, n = len(x), len(y)
    backend = pick("cpu")
    a, b = np.full(m, 1 / m), np.full(n, 1 / n)
    cost = mapuot.PointCloud(x, y, scale=0.5)._cost
    problem = Problem.from_arrays(cost, a, b, REG, np.inf, "kl", "product", backend)
    groups = two_levels.CoarseLevel(backend, problem, 1e9, 1)
    groups.sum_plan(log_u, log_v)
    P = np.exp(log_u[:, None] + log_v - costs(x, y) / REG) / (m * n)
    return groups, P[np.ix_(*groups.order)]


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
        assert 5 < len(groups.rows.first) < 40
        groups.form(log_u, log_v)
        np.testing.assert_allclose(
            np.tril(groups.equations.S), np.tril(schur(P, groups.rows.first, groups.cols.first)), rtol=1e-12, atol=1e-18
        )
        steps = [rng.normal(size=len(first)) for first in (groups.rows.first, groups.cols.first)]
        moved = log_u.copy(), log_v.copy()
        for log, step, own, at in zip(moved, steps, (groups.rows, groups.cols), groups.order, strict=True):
            log[at] += step[own.label]
        groups.form(*moved)  # potentials that move with their groups need no new sums
        P *= np.exp(steps[0][groups.rows.label][:, None] + steps[1][groups.cols.label])
        np.testing.assert_allclose(
            np.tril(groups.equations.S), np.tril(schur(P, groups.rows.first, groups.cols.first)), rtol=1e-10, atol=1e-18
        )


def test_few_rows_stand_for_their_group():
    rng = np.random.default_rng(1)
    x, y = 0.1 * rng.random((200, 3)), 0.1 * rng.random((160, 3))
    with LEVELS.using(least_in_group=10, rows_of_group=2):
        groups, P = groups_of(x, y, np.zeros(200), np.zeros(160))
        groups.form(np.zeros(200), np.zeros(160))
        exact = np.diag(schur(P, groups.rows.first, groups.cols.first))
    np.testing.assert_allclose(np.diag(groups.equations.S), exact, rtol=0.2)


def test_steps_end_with_the_passes_that_are_left():
    x = cloud(300, 1)
    y = cloud(300, 2)
    found = mapuot.solve(
        mapuot.PointCloud(x, y, scale=0.5, truncate=1.0), reg=REG, reg_m=np.inf, tol=1e-6, max_passes=9
    )
    assert found.n_passes == 9
    assert found.status == "max_passes"


def test_one_soft_side_and_small_clouds_take_other_ways(monkeypatch):
    x = cloud(60, 1)
    backend = pick("cpu")
    a = np.full(60, 1 / 60)
    cost = mapuot.PointCloud(x, x + 0.1, scale=0.5)._cost
    soft = Problem.from_arrays(cost, a, a, REG, (np.inf, 1.0), "kl", "product", backend)
    hard = Problem.from_arrays(cost, a, a, REG, np.inf, "kl", "product", backend)
    assert levels_serve(hard, backend, skips=True)
    assert not levels_serve(hard, backend, skips=False)
    assert not levels_serve(soft, backend, skips=True)
    monkeypatch.setattr(type(backend), "most_factored", 59)
    assert levels_serve(hard, backend, skips=False)
    assert not levels_serve(soft, backend, skips=False)
    options = mapuot.route.options.make_options("auto", "float64", 1e-6, None, 1)
    passes = SimpleNamespace(makes_products=True)
    assert two_levels.serves(passes, hard, options, backend, skips=True)
    assert not two_levels.serves(passes, hard, dataclasses.replace(options, symmetric=True), backend, skips=True)
    assert not two_levels.serves(SimpleNamespace(makes_products=False), hard, options, backend, skips=True)


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_clouds_without_skipped_pairs(monkeypatch, tol):
    """Clouds too large for a factor take such steps, too: they ended after 80 and 104 products."""
    monkeypatch.setattr(type(pick("cpu")), "most_factored", 0)
    x = cloud(500, 1)
    y = cloud(540, 2)
    exact = mapuot.solve(costs(x, y), reg=REG, reg_m=np.inf, tol=1e-9)
    with LEVELS.using(least_in_group=2):
        found = mapuot.solve(
            mapuot.PointCloud(x, y, scale=0.5, truncate=None, form=None), reg=REG, reg_m=np.inf, tol=tol
        )
    assert found.converged
    assert np.abs(found.plan - exact.plan).sum() <= found.error_bound + exact.error_bound
    assert 0 < int(found.how.split("steps by ")[1].split()[0]) < 200


@pytest.mark.parametrize("truncate", [1.0, None], ids=["kept pairs", "all pairs"])
@pytest.mark.parametrize("ends", ["callback", "max_passes"])
def test_bounds_of_unfinished_steps_are_true(monkeypatch, truncate, ends):
    """After products that no pass followed, and after a verdict on rows alone, bounds were .6 and .3 of the error."""
    x = cloud(150, 1)
    y = cloud(160, 2)
    exact = mapuot.solve(costs(x, y), reg=REG, reg_m=np.inf, tol=1e-9)
    monkeypatch.setattr(type(pick("cpu")), "most_factored", 0)
    made = 0
    for n_passes in range(4, 60):
        if ends == "callback":
            more = {"callback": lambda stats, last=n_passes: stats.n_pass >= last}
        else:
            more = {"max_passes": n_passes}
        points = mapuot.PointCloud(x, y, scale=0.5, truncate=truncate, form=None)
        found = mapuot.solve(points, reg=REG, reg_m=np.inf, tol=1e-3, **more)
        assert np.abs(found.plan - exact.plan).sum() <= found.error_bound + exact.error_bound
        made += "product" in found.how
        if found.converged:
            break
    assert made > 3
