"""Symmetric problems: one potential serves both sides on every kind of cost, and is given up where it fails."""

import numpy as np
import pytest
from conftest import CUDA
from matrix import array_of
from problems import Case, csr_of, relative_error, verify

import mapuot
from mapuot import Grid, PointCloud, solve, solve_batch

TOGETHER = "one potential"
DEVICES = ["cpu", *CUDA]


def cloud(n=90, d=2, seed=0):
    """Return points of the unit cube and masses of sum 1."""
    rng = np.random.default_rng([seed, n, d])
    a = rng.random(n) + 0.01
    return rng.random((n, d)), a / a.sum()


def squared(x):
    return ((x[:, None] - x) ** 2).sum(-1)


def indefinite(n):
    """Return a random symmetric M; exp(-M / reg) is not positive definite."""
    M = np.random.default_rng([0, n]).random((n, n))
    return 0.5 * (M + M.T)


def given(kind, x):
    """Return M as the library gets it, and as an array; pairs join 8 neighbours, from either side."""
    M = squared(x)
    if kind == "grid":
        return Grid((10, 6), spacing=0.1), squared(0.1 * np.argwhere(np.ones((10, 6))))
    if kind in ("pairs", "forbidden"):
        near = np.sort(M, 1)[:, 8:9] >= M
        M = np.where(near | near.T, M, np.inf)
    if kind.startswith("points"):
        return (PointCloud(x, x.copy()) if kind == "points twice" else PointCloud(x, form=None)), M
    M = M.astype(np.float32 if kind == "float32" else float)
    return csr_of(M) if kind == "pairs" else M, M.astype(float)


KINDS = ["array", "float32", "float64", "forbidden", "points", "points twice", "points in 13 dimensions", "pairs",
         "grid", "tv", "l2"]  # fmt: skip


@pytest.mark.parametrize("reg", [0.1, 1e-3, 1e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_two_potentials_after_few_passes(kind, reg, backend):
    """Few passes reach the answer of two potentials, in one call of the core and in passes with a callback."""
    x, a = cloud(60, 13 if "13" in kind else 2)
    a[3] = 0.0
    (M, array) = given(kind, x)
    if kind in ("tv", "l2"):
        penalty = kind
    else:
        penalty = "kl"
    if (backend, kind) == ("reference", "grid"):
        pytest.skip("the reference knows no grid")
    for reg_m in (0.3, np.inf) if penalty == "kl" else (0.3,):
        options = {"reg": reg, "reg_m": reg_m, "penalty": penalty}
        right = solve(array, a, a, tol=1e-9, symmetric=False, **options)
        options |= {"precision": "float64"} if kind == "float64" else {}
        for callback in (None, lambda stats: None):
            found = solve(M, a, a, backend=backend, callback=callback, **options)
            assert found.converged
            assert TOGETHER in found.how
            assert found.n_passes <= (12 if penalty == "kl" else 25)
            np.testing.assert_allclose(found.log_u, found.log_v, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.row_marginal, found.col_marginal, rtol=1e-9)
            error = relative_error(array_of(found.plan), right.plan) - 2.0**-24 * (kind == "float32")
            assert error <= found.error_bound + right.error_bound
            assert found.dual == pytest.approx(right.dual, rel=1e-6)


SIDES = {
    **{kind: {"penalty": kind, "reg_m": (0.3, 0.3)} for kind in ("kl", "tv", "l2")},
    "balanced": {"penalty": "balanced", "reg_m": np.inf}, "range": {"penalty": "range", "reg_m": (0.3, 0.3)},
    "one reg_m a point": {"reg_m": (np.linspace(0.1, 3, 20), np.linspace(0.1, 3, 20))},
    "a reference": {"reg_m": 1.0, "reference": squared(cloud(20, seed=6)[0]) + 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize(
    "way", ["cpu", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("cuda", "portable") if CUDA)]
)
def test_certificates_are_those_of_the_oracle(way, name, monkeypatch):
    """Pass by pass both sides are equally far from their optimum, and the next potential lies between two."""
    if way == "portable":
        monkeypatch.setenv("MAPUOT_CUDA", "portable")
    x, a = cloud(20, seed=5)
    case = Case(squared(x), a, a, 0.05, **SIDES[name])
    options = {"max_passes": 5, "tol": 1e-14, "precision": "float64"}
    found = case.solve(backend="cpu" if way == "cpu" else "cuda", **options)
    right = case.solve(backend="reference", **options)
    assert TOGETHER in found.how
    for one, other in zip(found.trace, right.trace, strict=True):
        for number in ("error", "gap", "dual", "mass"):
            near = 1e-6 if way == "cpu" else 1e-3
            assert getattr(one, number) == pytest.approx(getattr(other, number), rel=near), number


def test_a_kernel_that_alternates_is_left():
    """If mass swings between two halves, the averages creep, and ordinary passes continue from there."""
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
    """The guard dropped the last steps; the potentials before them, which are the answer, exceed the range of K."""
    M = np.array([[np.inf, 2, 2, 2], [2, np.inf, 2, 1], [2, 2, np.inf, 1], [2, 1, 1, np.inf]])
    a = np.array([0.13, 0.18, 0.02, 0.93])
    options = {"reg": 3.0, "reg_m": 1e8, "penalty": "l2", "reference": "uniform", "precision": "float64"}
    with pytest.warns(mapuot.ConvergenceWarning):
        result = solve(M, a, a, max_passes=11, **options)
    np.testing.assert_allclose(result.row_marginal, result.plan.sum(1), rtol=1e-9)


@pytest.mark.parametrize("tol", [1e-4, 1.6e-5, 1e-6])
def test_hard_sides_of_a_kernel_that_is_left_by_newtons_step(tol):
    """One potential ends with a dropped step; Newton's step from there ends the solve with a certificate."""
    lower = [[0.13], [0.49, 0.99], [0.27, 0.55, 0.34], [0.3, 0.49, 0.28, 0.56], [0, 0.27, 0.17, 0.07, 0.62]]
    lower.append([0.13, 0.65, 0.35, 0.34, 0.71, 1.11])
    M = np.array([row + [0.0] * (6 - len(row)) for row in lower])
    M = np.maximum(M, M.T)
    a = np.array([0.58, 0.46, 0.81, 0.45, 0.5, 0.63])
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


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("reg_m", [0.3, np.inf])
@pytest.mark.parametrize("reg", [0.1, 1e-3])
@pytest.mark.parametrize("n", [40, 130])
def test_batches(n, reg, reg_m, backend):
    """Batches with one cost and with a cost each agree; an indefinite kernel of a random M takes both potentials."""
    (x, _) = cloud(n)
    A = np.random.default_rng(1).random((3, n)) + 0.01
    M = squared(x)
    every = [np.stack([M, 2 * M, 3 * M if reg_m == np.inf else indefinite(n)]), M, PointCloud(x)]
    every += [[given("pairs", x)[0]] * 3] if backend == "cpu" else []
    A[1, 3] = 0.0
    for costs in every:
        found = solve_batch(costs, A, A, reg=reg, reg_m=reg_m, backend=backend)
        right = solve_batch(costs, A, A, reg=reg, reg_m=reg_m, tol=1e-9, symmetric=False, backend="cpu")
        assert found.converged.all()
        assert all(TOGETHER in how for how in found.how)
        assert found.n_passes[:2].max() <= 14
        used = A[:2] > 0
        if reg_m < np.inf:  # hard sides: between points far apart a common factor of u and 1 / v is free
            np.testing.assert_allclose(found.log_u[:2][used], found.log_v[:2][used], rtol=1e-9, atol=1e-9)
        for one, other in zip(found, right, strict=True):
            assert relative_error(array_of(one.plan), array_of(other.plan)) <= one.error_bound + other.error_bound


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
    """The first pass around zeros has its marginal right on both sides of all tile edges at the diagonal."""
    for n in (1, 15, 16, 17, 33, 64, 130, 400):
        x, a = cloud(n, seed=n)
        if kind == "points":
            M = PointCloud(x, form=None)
        elif kind == "turned":
            M = squared(x).T
        else:
            M = squared(x)
        for precision in ("float64", "mixed"):
            options = {"precision": precision, "threads": threads, "callback": lambda stats: None}
            result = solve(M, a, a, reg=0.05, reg_m=1.0, max_passes=1, tol=1e-12, **options)
            right = a * (np.exp(-squared(x) / 0.05) @ a)
            np.testing.assert_allclose(result.row_marginal, right, rtol=1e-12 if precision == "float64" else 2e-5)
