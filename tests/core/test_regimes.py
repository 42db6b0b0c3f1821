"""Cases where other solvers fail converge: tiny reg, huge reg_m, unequal masses, extreme scales, zeros, large sizes."""

import warnings

import numpy as np
import pytest
from problems import clouds, verify, with_forbidden, with_zeros

import mapuot


def checked(case, backend="cpu", precision="float64", tol=1e-9, below=None, **options):
    """Solve, insist on convergence without a warning, verify; return the Result."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", mapuot.ScalingWarning)  # some regimes are about this warning
        result = case.solve(backend=backend, tol=tol, precision=precision, **options)
    error = verify(result, case, precision)
    assert result.converged
    assert error <= (tol * 1.01 + 1e-12 if below is None else below)
    return result


@pytest.mark.parametrize("reg", [1.0, 0.1, 0.01, 1e-3, 1e-4])
@pytest.mark.parametrize("reg_m", [0.1, 10.0, (0.1, 100.0), (np.inf, 1.0), (1.0, np.inf)])
def test_every_reg(reg, reg_m):
    for case in (clouds(24, 19, reg=reg, reg_m=reg_m, ratio=1.5), clouds(19, 24, reg=reg, reg_m=reg_m, ratio=0.2)):
        checked(case, tol=1e-8, below=1e-7)
        checked(case, precision="mixed", tol=1e-6, below=2e-6)


def apart(one, two):
    """Return two problems in one matrix, every pair between them forbidden."""
    M = np.full(np.add(one.M.shape, two.M.shape), np.inf)
    M[: len(one.M), : one.M.shape[1]], M[len(one.M) :, one.M.shape[1] :] = one.M, two.M
    return one.replace(M=M, a=np.r_[one.a, two.a], b=np.r_[one.b, two.b])


def scaled(case, a=1.0, b=1.0, cost=1.0, shift=0.0):
    """Return the problem in other units of mass or cost, or with a constant added to every cost."""
    units = {"reg": cost * case.reg, "reg_m": tuple(cost * rho for rho in case.reg_m)}
    return case.replace(M=cost * case.M + shift, a=a * case.a, b=b * case.b, **units)


def unreached(case):
    """Return a problem with a row and a column of forbidden pairs only."""
    M = case.M.copy()
    M[3], M[:, 5] = np.inf, np.inf
    return case.replace(M=M)


PLAIN = clouds(20, 15, reg=0.05, reg_m=(0.7, 2.0), ratio=1.5)
MOST_ZERO = with_zeros(clouds(30, 30, reg=1e-3, reg_m=1.0, ratio=2.0), every=2)
REGIMES = {  # POT fails in the first few cases
    "masses 1:3, reg .01, reg_m 100": clouds(30, 25, reg=0.01, reg_m=100.0, ratio=3.0),
    "masses 3:1, reg .01, reg_m 100": clouds(30, 25, reg=0.01, reg_m=100.0, ratio=1 / 3),
    "reg .001, reg_m 10": clouds(30, 25, reg=0.001, reg_m=10.0),
    "reg .001, reg_m 10, masses 1:2": clouds(30, 25, reg=0.001, reg_m=10.0, ratio=2.0),
    "reg_m1 != reg_m2": clouds(30, 25, reg=0.05, reg_m=(0.3, 8.0), ratio=1.5),
    "zeros in a": with_zeros(clouds(30, 25, reg=0.05), every=2),
    "zeros in a, small reg": with_zeros(clouds(30, 25, reg=0.001, reg_m=10.0), every=2),
    "more zeros, small reg": MOST_ZERO.replace(b=np.where(np.arange(30) % 4 == 3, 0.0, MOST_ZERO.b)),
    **{f"a times {z}, b times {y}": scaled(PLAIN, z, y) for x in (1e-12, 1e-6, 1e6, 1e12)
       for z, y in ((x, x), (x, 1), (1, x))},
    **{f"masses times {z}, reg_m 1e4 reg": scaled(PLAIN.replace(reg_m=(500.0, 500.0)), z, z) for z in (1e-12, 1e12)},
    **{f"masses and c times {z}": scaled(PLAIN, z, z).replace(reference=z * (PLAIN.M + 0.1)) for z in (1e-10, 1e10)},
    **{f"costs times {z}": scaled(PLAIN, cost=z) for z in (1e-200, 1e-12, 1e12, 1e200)},
    **{f"costs and {z}": scaled(PLAIN.replace(reg_m=(30.0, 30.0)), shift=z) for z in (-3.0, -0.5, 10.0, 1e4)},
    **{f"costs and {z}, balanced": scaled(clouds(16, 18, reg_m=(np.inf, np.inf)), shift=z) for z in (-3.0, 1e4)},
    **{f"{m} x {n}, all costs {z}": clouds(m, n, reg=0.1, reg_m=(0.5, 2.0), ratio=3.0).replace(M=np.full((m, n), z))
       for m, n in ((1, 1), (1, 5), (5, 1), (6, 7)) for z in (0.0, 1.0, -2.0)},
    **{f"a kernel that is outgrown, {seed}": with_forbidden(clouds(m, n, reg=1e-3, reg_m=np.inf, seed=seed), 0.2, seed)
       for seed, m, n in ((27, 9, 8), (44, 6, 7), (65, 6, 7), (70, 6, 7))},
    "c over 87 decades": PLAIN.replace(reference=np.exp(np.random.default_rng(3).uniform(-100, 100, PLAIN.shape))),
    "points that nothing reaches": unreached(clouds(12, 14, reg_m=(0.6, 1.5))),
    "parts": apart(clouds(9, 8, reg=0.02), scaled(clouds(7, 10, reg_m=(1.0, 1.0), ratio=1e-3, seed=1), a=1e-3)),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_regime(backend, name, precision):
    if backend == "reference" and precision == "mixed":
        pytest.skip("the oracle has one precision")
    tol = 1e-9 if precision == "float64" else 1e-6
    case = REGIMES[name]
    result = checked(case, backend, precision, tol, below=10 * tol)
    assert np.isfinite(result.plan).all()
    assert result.mass > 0
    assert np.isneginf(result.log_u[case.a == 0]).all()
    assert np.isneginf(result.log_v[case.b == 0]).all()
    for log, M in ((result.log_u, case.M), (result.log_v, case.M.T)):
        assert np.isposinf(log[np.isinf(M).all(1)]).all()


SMALL = np.random.default_rng(0).random((4, 5)), np.full(4, 0.25), np.full(5, 0.2)


@pytest.mark.parametrize("precision", ["mixed", "auto"])
def test_a_step_that_outgrows_its_kernel_is_still_guarded(backend, precision):
    """An extrapolation that leaves the range of K is repeated on a fresh K, lowers the dual value and is dropped."""
    rng = np.random.default_rng(1027)
    M = rng.random(rng.integers(3, 40, 2))
    result = mapuot.solve(M, reg=6.74e-4, reg_m=(60.7, 0.871), precision=precision, backend=backend)
    assert result.converged
    assert result.n_passes < 120


@pytest.mark.parametrize("method", ["auto", "sinkhorn", "map-uot"])
@pytest.mark.parametrize("case", ["masses", "costs", "equal costs"])
def test_plan_below_the_range_of_float64_is_no_answer(backend, method, case):
    M, a, b = SMALL
    M = {"masses": M, "costs": 1e4 * (1 + M), "equal costs": np.full((4, 5), 1e4)}[case]
    if case == "masses":
        a = 1e-300 * a
        b = 1e-300 * b
    if case == "masses":
        cure = "masses are near the least number of float64"
    else:
        cure = "raise reg"
    with pytest.warns(mapuot.ConvergenceWarning, match=rf"underflow.*{cure}"):
        result = mapuot.solve(M, a, b, reg=1.0, reg_m=0.1, method=method, backend=backend)
    assert result.status == "underflow"
    assert result.error_bound == np.inf
    assert result.n_passes < 20
