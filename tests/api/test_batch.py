"""solve_batch: every problem is the answer of `solve`, certified, in any company; odd problems are solved alone."""

from importlib import import_module

import numpy as np
import pytest
from numpy.testing import assert_allclose
from problems import histograms

import mapuot
from mapuot import solve, solve_batch
from mapuot.backends.cpu import batch as cpu_batch


@pytest.mark.parametrize("dtype", ["float64", "mixed"])
def test_answers_do_not_depend_on_company(isa, dtype):
    """Problem by problem the same numbers, bit for bit, alone in the batch, in two chunks and on two threads."""
    M, A, B = histograms(p=21, m=30, n=45)
    result = solve_batch(M, A, B, reg=0.05, reg_m=1.0, precision=dtype)
    again = solve_batch(M, A, B, reg=0.05, reg_m=1.0, precision=dtype, threads=2)
    assert (result.log_u == again.log_u).all()
    for i in (0, 7, 20):
        alone = solve_batch(M, A[i : i + 1], B[i : i + 1], reg=0.05, reg_m=1.0, precision=dtype)
        assert (alone.log_u == result.log_u[i]).all()
        assert alone.n_passes == result.n_passes[i]


def test_chunks(monkeypatch):
    M, A, B = histograms(p=11)
    result = solve_batch(M, A, B, reg=0.05, reg_m=1.0)
    monkeypatch.setattr(cpu_batch, "CHUNK_BYTES", 4 * cpu_batch.bytes_each(result.problem, 8, "float64"))
    assert (solve_batch(M, A, B, reg=0.05, reg_m=1.0).log_u == result.log_u).all()


def minibatches(p=7, m=21, n=18, dtype=float):
    """A cost each, unscaled squared distances: beyond one K at small reg."""
    rng = np.random.default_rng(p)
    x, y = rng.normal(size=(p, m, 2)), rng.normal(size=(p, n, 2)) + 0.5
    A, B = rng.random((p, m)) + 0.1, rng.random((p, n)) + 0.1
    A[1, ::3], B[2, 1::4] = 0, 0
    return ((x[:, :, None] - y[:, None]) ** 2).sum(-1).astype(dtype), A / A.sum(1)[:, None], B / B.sum(1)[:, None]


def assert_as_alone(result, M, A, B, reg, reg_m, **options):
    for i in range(len(result)):
        one = solve(M if M.ndim == 2 else M[i], A[i], B[i], reg=reg, reg_m=reg_m, tol=1e-10, precision="float64")
        apart = np.abs(result[i].plan.astype(float) - one.plan).sum() / one.mass
        assert result.converged[i]
        assert apart <= result.error_bound[i] + one.error_bound + 1e-6 * (M.dtype == "f4")
        assert result.error_bound[i] <= options.get("tol", 1e-6)
        assert_allclose(result[i].objective, one.objective, rtol=1e-5)


@pytest.mark.parametrize("reg", [0.3, 0.05, 2e-3])
@pytest.mark.parametrize("reg_m", [1.0, (0.3, 30.0), (np.inf, 1.0), (2.0, np.inf)])
@pytest.mark.parametrize("options", [{}, {"precision": "mixed", "threads": 2}, {"tol": 1e-9}], ids=str)
def test_small_reg_stays_in_the_core(reg, reg_m, options, monkeypatch):
    """Beyond what one K holds, absorptions and larger regs are made in the core, too, problem by problem."""
    monkeypatch.setattr(mapuot.api.batch.BatchRun, "alone", None)
    for M, A, B in (minibatches(), minibatches(dtype="f4"), (minibatches()[0][0], *minibatches()[1:])):
        result = solve_batch(M, A, B, reg=reg, reg_m=reg_m, **options)
        assert_as_alone(result, M, A, B, reg, reg_m, **options)


def test_what_a_long_problem_leaves_is_solved_alone(monkeypatch):
    core = import_module("mapuot.backends.cpu.plain")
    monkeypatch.setattr(core, "MOST_PASSES", 6)
    M, A, B = minibatches()
    assert_as_alone(solve_batch(M, A, B, reg=0.02, reg_m=1.0), M, A, B, 0.02, 1.0)


def test_result_is_a_sequence():
    M, A, B = histograms()
    result = solve_batch(M, A, B, reg=0.05, reg_m=1.0)
    assert len(result) == 5
    assert [r.mass for r in result] == pytest.approx(result.mass)
    assert result[-1].gap == result.gap[4]
    assert len(result[1:3]) == 2
    assert_allclose(result[2].plan.sum(1), result.row_marginal[2], rtol=1e-12)
    weights = np.linspace(-1, 1, 5)
    assert_allclose(result.plan_sum(weights), sum(w * result[i].plan for i, w in enumerate(weights)), atol=1e-15)
    assert_allclose(result.f, 0.05 * result.log_u)
    assert "5 problems 37x53" in repr(result)
    with pytest.raises(IndexError):
        result[5]
