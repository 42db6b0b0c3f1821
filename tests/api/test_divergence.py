"""The Sinkhorn divergence follows its definition, is zero for equal measures only, and refuses bad arguments."""

import warnings

import numpy as np
import problems
import pytest
from numpy.testing import assert_allclose

from mapuot import (
    ConvergenceWarning,
    Grid,
    PointCloud,
    ScalingWarning,
    pairwise,
    sinkhorn_divergence,
    solve,
    solve_batch,
)


def clouds(m=20, n=25, seed=0):
    """Return points, masses, and the three squared distances of two clouds in the plane."""
    rng = np.random.default_rng(seed)
    x = rng.random((m, 2))
    y = rng.random((n, 2)) + np.array([0.3, 0.0])
    a = rng.uniform(0.2, 1, m)
    b = rng.uniform(0.2, 1, n)

    def cost(p, q):
        return ((p[:, None] - q) ** 2).sum(-1)

    return a / a.sum(), b / b.sum(), cost(x, y), cost(x, x), cost(y, y)


@pytest.mark.parametrize("reg_m", [0.1, 100.0, np.inf])
@pytest.mark.parametrize("reg", [1.0, 1e-3])
def test_definition(reg, reg_m):
    a, b, M, M_a, M_b = clouds()
    b = b if np.isinf(reg_m) else 2 * b
    value = sinkhorn_divergence(M, a, b, reg=reg, reg_m=reg_m, M_a=M_a, M_b=M_b, tol=1e-8)
    assert isinstance(value, float)
    parts = []
    for C, p, q in ((M, a, b), (M_a, a, a), (M_b, b, b)):
        r = solve(C, p, q, reg=reg, reg_m=reg_m, tol=1e-9, backend="reference")
        parts.append(problems.measure(problems.Case(C, p, q, reg, reg_m), r.log_u, r.log_v).dual)
    right = parts[0] - 0.5 * (parts[1] + parts[2]) + 0.5 * reg * (a.sum() - b.sum()) ** 2
    assert_allclose(value, right, atol=1e-7)
    assert value > 0


@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
@pytest.mark.parametrize("door", [pairwise, sinkhorn_divergence])
def test_a_plan_that_moves_nothing_has_a_known_value(door):
    """A divergence of far clouds is certified, without the warning that `solve_batch` gives: no mass moves."""
    x, y = np.random.default_rng(0).random((2, 5, 2))
    y += 1e3
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        if door is pairwise:
            value = pairwise([x, y], reg=0.02, reg_m=0.04)[0, 1]
        else:
            value = sinkhorn_divergence(PointCloud(x, y), reg=0.02, reg_m=0.04)
    own = [solve(PointCloud(z, z), reg=0.02, reg_m=0.04, tol=1e-9).objective for z in (x, y)]
    assert_allclose(value, 0.02 + 2 * 0.04 - 0.5 * sum(own), rtol=1e-9)
    with pytest.warns(ConvergenceWarning, match="nothing is known of the plan"):
        solve_batch(PointCloud(x, y), reg=0.02, reg_m=0.04)


@pytest.mark.parametrize("door", [solve_batch, sinkhorn_divergence])
def test_the_unit_of_mass_is_told_with_what_the_call_takes(door):
    """A divergence has no scale_mass, and once advised it."""
    M = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
    masses = {solve_batch: "A", sinkhorn_divergence: "a"}[door]
    with pytest.warns(ScalingWarning, match="the unit of mass counts") as told:
        door(
            M,
            **{masses: np.full(4, 1e9), masses.replace("A", "B").replace("a", "b"): np.full(4, 1e9)},
            reg=0.5,
            reg_m=1.0,
        )
    assert all(("scale_mass" in str(one.message)) == (door is solve_batch) for one in told)


def three_costs(kind, x, y, metric):
    """Return the costs between x and y, within x and within y, as one kind of M."""
    pairs = (x, y), (x, x), (y, y)
    if kind == "grid":
        return (Grid((5, len(x) // 5), spacing=0.3),) * 3
    found = tuple(PointCloud(p, q, metric=metric, form=None) for p, q in pairs)
    if kind == "points":
        return found
    return tuple(map(np.asarray, found))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", ["array", "points", "grid", "batch"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.filterwarnings("ignore::mapuot.ScalingWarning")
def test_never_below_its_certified_error_and_within_it_for_equal_measures(balanced, kind, backend):
    """Measures that are equal, also in another order, have divergence 0; nearly equal and other ones a positive one."""
    if (kind, backend) == ("grid", "reference"):
        pytest.skip("grids have no reference")
    rng = np.random.default_rng([len(kind), balanced])
    for trial in range(4):
        n = 5 * int(rng.integers(1, 7))
        way = ("equal", "turned round", "near", "other")[trial % 4]
        x = rng.random((n, 2)) * 10.0 ** rng.uniform(-1, 1)
        a = rng.random(n) ** 3 + 1e-3
        y = x + 1e-6 * (way == "near") * rng.standard_normal(x.shape)
        b = a.copy()
        if way == "turned round":
            y = x[::-1]
            b = a[::-1]
        elif way == "other":
            y = rng.random((n + 5 * (kind != "grid"), 2))
            b = rng.random(n + 5 * (kind != "grid"))
        if kind == "grid":
            b = a if way != "other" else b
        if kind == "batch":
            a = a * np.array([[1.0], [30.0], [0.01]])
            b = b * np.array([[1.0], [30.0], [0.01]])
        if balanced:
            b = b * (a.sum(-1) / b.sum(-1))[..., None]
        costs = three_costs(kind, x, y, str(rng.choice(["sqeuclidean", "euclidean", "cityblock"])))
        reg = 10.0 ** rng.uniform(-4, 0)
        given = {"reg": reg, "reg_m": np.inf if balanced else reg * 10.0 ** rng.uniform(-1, 4)}
        given |= {"tol": 10.0 ** rng.uniform(-8, -2), "backend": backend}
        p = a
        q = b
        own = {"M_a": costs[1], "M_b": costs[2]}
        if kind == "grid":  # images: the grid gives the costs within each of them
            p = a.reshape(5, -1)
            q = b.reshape(5, -1)
            own = {}
        value = np.atleast_1d(sinkhorn_divergence(costs[0], p, q, **own, **given))
        off = np.zeros(len(value))
        for M, p, q in zip(costs, (a, a, b), (b, a, b), strict=True):
            found = solve_batch(M, p, q, **given)
            off += found.gap + balanced * reg * found.mass * found.error_bound
            off += reg * (p.sum(-1) + q.sum(-1)) * (1e-13 + 6e-8 * any("float32" in how for how in found.how))
            off += 1e-14 * abs(found.dual)
        assert (value >= -off).all(), way
        assert way in ("near", "other") or (value <= off).all(), way


def test_each_divergence_may_have_its_own_reg_m():
    rng = np.random.default_rng(0)
    M = rng.random((3, 6, 6))
    M = M + M.swapaxes(1, 2)
    a = rng.random((3, 6))
    rhos = [1.0, 2.0, 3.0]
    found = sinkhorn_divergence(M, a, a[::-1], reg=0.5, reg_m=rhos)
    each = zip(M, a, a[::-1], rhos, strict=True)
    alone = [sinkhorn_divergence(*one, reg=0.5, reg_m=rho) for *one, rho in each]
    np.testing.assert_allclose(found, alone, rtol=1e-6)


def ring(n):
    """Return the distances along a ring of n nodes."""
    steps = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.minimum(steps, n - steps).astype(float)


@pytest.mark.parametrize("reg_m", [0.7, np.inf], ids=str)
@pytest.mark.parametrize("unit", [None, "mean"])
def test_histograms_share_costs(reg_m, unit):
    M = ring(12)
    masses = np.random.default_rng(5).random((4, 12))
    masses /= masses.sum(1, keepdims=True)
    masses[0, 3:] = 0.0
    masses[0] /= masses[0].sum()
    known = {"reg": 0.2, "reg_m": reg_m, "scale_cost": unit, "tol": 1e-9}
    table, errors = pairwise(M, masses, standard_error=True, **known)
    assert_allclose(table, table.T)
    assert not table.diagonal().any()
    for i in range(4):
        for j in range(i):
            right = sinkhorn_divergence(M, masses[i], masses[j], standard_error=True, **known)
            assert_allclose((table[i, j], errors[i, j]), right, rtol=1e-6, atol=1e-8)


def test_histograms_share_a_grid_or_have_own_reg():
    grid = Grid((4, 3))
    masses = np.random.default_rng(6).random((3, 12))
    found = pairwise(grid, masses, reg=0.3, reg_m=1.0, tol=1e-9)
    assert_allclose(found, pairwise(np.asarray(grid), masses, reg=0.3, reg_m=1.0, tol=1e-9), rtol=1e-6, atol=1e-9)
    regs = np.array([[0, 0.2, 0.4], [0, 0, 0.8], [0, 0, 0]])
    table = pairwise(ring(12), masses, reg=regs, reg_m=1.0, tol=1e-9)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        right = sinkhorn_divergence(ring(12), masses[i], masses[j], reg=regs[i, j], reg_m=1.0, tol=1e-9)
        assert_allclose(table[i, j], right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("unit", [None, "weighted_mean"])
def test_histograms_may_be_tensors_or_a_list(unit):
    torch = pytest.importorskip("torch")
    masses = np.random.default_rng(7).random((3, 6))
    known = {"reg": 0.2, "reg_m": 1.0, "scale_cost": unit}
    right = pairwise(ring(6), masses, **known)
    assert_allclose(pairwise(torch.tensor(ring(6)), torch.tensor(masses), **known), right)
    assert_allclose(pairwise(ring(6), [*masses], **known), right)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": "euclidean", "scale_each": True, "scale_cost": "mean"}, "metric and scale_each must be left out"),
        ({"masses": np.ones((3, 4))}, "masses must have 5 columns"),
        ({"masses": -np.ones((3, 5))}, "masses must be >= 0"),
        ({"clouds": np.triu(ring(5))}, "not symmetric"),
        ({"clouds": np.ones((5, 4))}, "not square"),
    ],
)
def test_histograms_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        pairwise(**({"clouds": ring(5), "masses": np.ones((3, 5)), "reg": 0.1, "reg_m": 1.0} | given))
