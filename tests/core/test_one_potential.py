"""Problems whose rows and columns are the same: one potential for both, on every kind of cost, and where it is left."""

import numpy as np
import pytest
from problems import Case, csr_of, relative_error, verify

import mapuot
from mapuot import Grid, PointCloud, solve, solve_batch

TOGETHER = "one potential"


def cloud(n=90, d=2, seed=0):
    """Points of the unit cube and masses of sum 1."""
    rng = np.random.default_rng([seed, n, d])
    a = rng.random(n) + 0.01
    return rng.random((n, d)), a / a.sum()


def squared(x):
    return ((x[:, None] - x) ** 2).sum(-1)


def own(x, a, reg, reg_m, **more):
    M = squared(x)
    return Case(M, a, a, reg * M.max(), reg_m * M.max(), **more)


def indefinite(n, seed, forbidden=0.0):
    """A random symmetric M, of which exp(-M / reg) is not positive; some pairs are forbidden."""
    rng = np.random.default_rng([seed, n])
    M = rng.random((n, n))
    M = 0.5 * (M + M.T)
    out = rng.random((n, n)) < forbidden
    M[(out | out.T) & ~np.eye(n, dtype=bool)] = np.inf
    a = rng.random(n) + 0.01
    return Case(M, a, a, 0.03, 1.0)


def neighbours(x, k=8):
    """The squared distances to k neighbours, from either side, as a sparse matrix."""
    M = squared(x)
    near = np.sort(M, 1)[:, k : k + 1] >= M
    return csr_of(np.where(near | near.T, M, np.inf))


def each_kind(x, reg_m):
    """(name, M) of one problem after the other."""
    M, nodes = squared(x), (10, 9)
    return {"array": M, "float32": M.astype(np.float32), "points": PointCloud(x),
            "the same points twice": PointCloud(x, x.copy(), metric="euclidean"), "pairs": neighbours(x),
            "grid": Grid(nodes, spacing=0.1)}  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("reg_m", [0.1, np.inf])
@pytest.mark.parametrize("reg", [0.1, 1e-3, 1e-5])
def test_takes_twelve_passes_at_most(reg, reg_m, backend):
    x, a = cloud()
    for name, M in each_kind(x, reg_m).items():
        if backend == "reference" and name in ("grid", "the same points twice"):
            continue
        result = solve(M, a, a, reg=reg, reg_m=reg_m, backend=backend, callback=lambda stats: None)
        assert result.converged, name
        assert TOGETHER in result.how, name
        assert result.n_passes <= 12, name
        np.testing.assert_allclose(result.log_u, result.log_v, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(result.row_marginal, result.col_marginal, rtol=1e-12)


@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("reg_m", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("reg", [0.5, 0.02, 1e-3])
def test_answers_are_those_of_the_oracle(reg, reg_m, tol):
    x, a = cloud(25, seed=3)
    a[4] = 0.0
    case = own(x, 3 * a, reg, reg_m)
    for options in ({}, {"callback": lambda stats: None}, {"precision": "float64"}):
        result = case.solve(tol=tol, **options)
        assert TOGETHER in result.how
        verify(result, case, options.get("precision", "auto"))


@pytest.mark.parametrize("seed", range(6))
def test_one_point_far_from_all_others(seed):
    """Its scalings leave the digits of float32, in which early passes make K: rows and columns must lose the same."""
    rng = np.random.default_rng(seed)
    x, a = rng.standard_t(2, (30, 8)), rng.random(30) + 0.1
    x[0] *= 300
    M = np.asarray(PointCloud(x))
    reg = float(np.median(M)) * 1e-3
    found = solve(PointCloud(x, form=None), a, a, reg=reg, reg_m=100 * reg)
    exact = solve(M, a, a, reg=reg, reg_m=100 * reg, symmetric=False, tol=1e-10, precision="float64")
    assert TOGETHER in found.how
    assert np.abs(found.plan - exact.plan).sum() <= (found.error_bound + exact.error_bound) * found.plan.sum()


SIDES = {
    **{kind: {"penalty": kind, "reg_m": (0.3, 0.3)} for kind in ("kl", "tv", "l2")},
    "balanced": {"penalty": "balanced", "reg_m": np.inf}, "range": {"penalty": "range", "reg_m": (0.3, 0.3)},
    "one reg_m a point": {"reg_m": (np.linspace(0.1, 3, 20), np.linspace(0.1, 3, 20))},
    "a reference": {"reg_m": 1.0, "reference": squared(cloud(20, seed=6)[0]) + 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_certificates_are_those_of_the_oracle(name):
    """Pass by pass: both sides are as far from their optimum, and the next potential lies between two."""
    x, a = cloud(20, seed=5)
    case = Case(squared(x), a, a, 0.05, **SIDES[name])
    found, right = (case.solve(backend=backend, max_passes=6, tol=1e-14) for backend in ("cpu", "reference"))
    assert TOGETHER in found.how
    for one, other in zip(found.trace, right.trace, strict=True):
        for number in ("error", "gap", "dual", "mass"):
            assert getattr(one, number) == pytest.approx(getattr(other, number), rel=1e-6), number


@pytest.mark.parametrize("forbidden", [0.0, 0.3, 0.8])
def test_kernels_that_are_not_positive(forbidden):
    """Answers are certified whether one potential serves or ordinary passes go on."""
    left = 0
    for seed in range(12):
        case = indefinite(2 + seed, seed, forbidden)
        for options in ({}, {"callback": lambda stats: None}):
            result = case.solve(tol=1e-7, precision="float64", **options)
            left += "potential left" in result.how
            assert TOGETHER in result.how
            assert result.converged
            verify(result, case)


def test_a_kernel_that_alternates_is_left():
    """Mass that goes back and forth between two halves: the averages creep, ordinary passes go on where they were."""
    rng = np.random.default_rng(0)
    M = np.full((40, 40), np.inf)
    M[:20, 20:] = rng.random((20, 20))
    M[20:, :20] = M[:20, 20:].T
    a = rng.random(40)
    result = solve(M, a, a, reg=1e-3, reg_m=0.5, tol=1e-9)
    assert "one potential left" in result.how
    assert result.converged
    verify(result, Case(M, a, a, 1e-3, 0.5))


def test_marginals_of_a_solve_that_ends_far_from_its_kernel():
    """The last steps were dropped, and the potentials before them are beyond what K can hold."""
    M = np.array([[np.inf, 2, 2, 2], [2, np.inf, 2, 1], [2, 2, np.inf, 1], [2, 1, 1, np.inf]])
    a = np.array([0.13, 0.18, 0.02, 0.93])
    options = {"reg": 3.0, "reg_m": 1e8, "penalty": "l2", "reference": "uniform", "precision": "float64"}
    with pytest.warns(mapuot.ConvergenceWarning):
        result = solve(M, a, a, max_passes=11, **options)
    np.testing.assert_allclose(result.row_marginal, result.plan.sum(1), rtol=1e-9)


@pytest.mark.parametrize("tol", [1e-4, 1.6e-5, 1e-6])
def test_hard_sides_of_a_kernel_that_is_left_by_newtons_step(tol):
    """A dropped step ends one potential, Newton's step from there the solve: no pass follows that is not certified."""
    lower = [[0.13], [0.49, 0.99], [0.27, 0.55, 0.34], [0.3, 0.49, 0.28, 0.56], [0, 0.27, 0.17, 0.07, 0.62]]
    lower.append([0.13, 0.65, 0.35, 0.34, 0.71, 1.11])
    M = np.array([row + [0.0] * (6 - len(row)) for row in lower])
    M, a = np.maximum(M, M.T), np.array([0.58, 0.46, 0.81, 0.45, 0.5, 0.63])
    found = list(
        mapuot.path(M, a, a, regs=[6e-4, 2.7e-3], reg_ms=np.inf, tol=tol, precision="float64", max_passes=3000)
    )
    assert "one potential, from a warm start, Newton's step" in found[1].how
    for result, reg in zip(found, (6e-4, 2.7e-3), strict=True):
        verify(result, Case(M, a, a, reg, np.inf), "float64")


def test_what_differs_is_solved_as_ever():
    x, a = cloud(30)
    M = squared(x)
    other = M.copy()
    other[20, 3] *= 1 + 1e-15
    calls = {"M": (other, a, a, {}), "masses, reg_m or penalty": (M, a, a[::-1].copy(), {}),
             "reg_m": (M, a, a, {"reg_m": (1.0, 2.0)}), "penalty": (M, a, a, {"penalty": ("kl", "tv")}),
             "reference": (M, a, a, {"reference": np.random.default_rng(0).random(M.shape)}),
             "mask": (M, a, a, {"mask": mapuot.SeededMask(keep=0.5, seed=0)}),
             "method": (M, a, a, {"method": "sinkhorn", "tol": 0.5})}  # fmt: skip
    for name, (costs, p, q, more) in calls.items():
        options = {"reg": 0.05, "reg_m": 1.0} | more
        assert TOGETHER not in solve(costs, p, q, **options).how, name
        with pytest.raises(ValueError, match="symmetric must be None"):
            solve(costs, p, q, symmetric=True, **options)
    with pytest.raises(TypeError, match="symmetric"):
        solve(M, a, a, reg=0.05, reg_m=1.0, symmetric="yes")
    assert TOGETHER in solve(M, a, a, reg=0.05, reg_m=1.0, symmetric=True).how
    assert TOGETHER not in solve(M, a, a, reg=0.05, reg_m=1.0, symmetric=False).how


@pytest.mark.parametrize("reg_m", [0.3, np.inf])
@pytest.mark.parametrize("reg", [0.05, 1e-4])
def test_batches(reg, reg_m):
    x, _ = cloud(40)
    M, A = squared(x), np.random.default_rng(1).random((6, 40))
    for costs in (M, np.stack([M * (1 + k) for k in range(6)]), PointCloud(x), [neighbours(x)] * 6):
        batch = solve_batch(costs, A, A, reg=reg, reg_m=reg_m)
        assert batch.converged.all()
        assert all(TOGETHER in how for how in batch.how)
        assert batch.n_passes.max() <= 12
        np.testing.assert_allclose(batch.log_u, batch.log_v, rtol=1e-12, atol=1e-12)
    alone = solve(M, A[2], A[2], reg=reg, reg_m=reg_m, tol=1e-9)
    one = solve_batch(M, A, A, reg=reg, reg_m=reg_m)[2]
    assert relative_error(one.plan, alone.plan) <= 20 * (one.error_bound + alone.error_bound)


def test_a_batch_of_kernels_that_are_not_positive():
    cases = [indefinite(15, seed, 0.3 * (seed % 2)) for seed in range(6)]
    M, A = np.stack([case.M for case in cases]), np.stack([case.a for case in cases])
    for costs, masses in ((M[::2], A[::2]), (M, A)):
        batch = solve_batch(costs, masses, masses, reg=0.003, reg_m=1.0, tol=1e-7)
        assert batch.converged.all()
        for one, C, a in zip(batch, costs, masses, strict=True):
            verify(one, Case(C, a, a, 0.003, 1.0))


def test_starts():
    x, a = cloud(60)
    M = squared(x)
    first = solve(M, a, a, reg=0.01, reg_m=np.inf, tol=1e-9, symmetric=False)
    again = solve(M, a, a, reg=0.01, reg_m=np.inf, warm_start=(first.log_u + 700.0, first.log_v - 700.0))
    assert TOGETHER in again.how
    assert again.n_passes <= 2
    assert relative_error(again.plan, first.plan) < 1e-5


@pytest.mark.parametrize("kind", ["array", "turned", "points"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_half_of_a_kernel_stands_for_all_of_it(kind, threads):
    """The marginal of the first pass, made around zeros, on both sides of all lines of the diagonal."""
    for n in (1, 15, 16, 17, 33, 64, 130, 400):
        x, a = cloud(n, seed=n)
        M = PointCloud(x, form=None) if kind == "points" else squared(x).T if kind == "turned" else squared(x)
        for precision in ("float64", "mixed"):
            options = {"precision": precision, "threads": threads, "callback": lambda stats: None}
            result = solve(M, a, a, reg=0.05, reg_m=1.0, max_passes=1, tol=1e-12, **options)
            right = a * (np.exp(-squared(x) / 0.05) @ a)
            np.testing.assert_allclose(result.row_marginal, right, rtol=1e-12 if precision == "float64" else 2e-5)


@pytest.mark.parametrize("reg_m", [0.1, np.inf])
@pytest.mark.parametrize(("n", "d", "reg"), [(300, 2, 2e-3), (333, 1, 1e-4), (260, 3, 1e-3)])
def test_pairs_are_skipped_by_one_potential(n, d, reg, reg_m):
    x, a = cloud(n, d, seed=1)
    result = solve(PointCloud(x, truncate=10.0, form=None), a, a, reg=reg, reg_m=reg_m)
    exact = solve(squared(x), a, a, reg=reg, reg_m=reg_m, tol=1e-8, precision="float64")
    assert result.converged
    assert TOGETHER in result.how
    assert "% of the pairs" in result.how
    bounds = result.error_bound + exact.error_bound
    assert np.abs(result.plan - exact.plan).sum() <= bounds * exact.plan.sum()
    assert np.abs(result.log_u - result.log_v).max() < 1e-12 * np.abs(result.log_u).max()
