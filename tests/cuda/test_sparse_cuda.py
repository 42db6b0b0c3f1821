"""Sparse costs on a GPU: passes match the CPU, whole solves match the dense M with inf elsewhere."""

import gc
from itertools import product

import numpy as np
import pytest
from cupyx.scipy import sparse as device_sparse
from problems import csr_of, pairs
from scipy import sparse

import mapuot
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cuda import backend as cuda
from mapuot.backends.cuda import pairs as stored
from mapuot.backends.cuda import sparse as on_gpu
from mapuot.backends.cuda.settings import DEVICE_PAIRS
from mapuot.problem.problem import Problem
from mapuot.route.options import make_options

pytestmark = pytest.mark.gpu


def of_problem(problem):
    return stored.pairs_of(problem.cost, problem.c)


def passes(module, S, a, b, precision, reg_m, reference, count=8, penalty="kl", together=None):
    """Return (stats, potentials, marginals) after so many passes; ``together``: in one launch."""
    problem = Problem.from_arrays(S, a, b, 0.1, reg_m, penalty, reference, module)
    workspace = module.workspace(problem, make_options("auto", precision, 1e-13, None, 1))
    assert together is None or workspace.launch.persistent == together
    workspace.absorb(np.linspace(-1, 1, len(b)))
    stats = []
    while len(stats) < count and (not stats or stats[-1].status == "running"):
        stats += workspace.iterate(count - len(stats))
    return stats, *workspace.potentials(), *workspace.marginals()


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("parts", [1, 3])
def test_passes_are_those_of_the_cpu(parts, precision):
    """Passes over a coarse K match float64 passes on the CPU, which recompute none of its entries."""
    S, M, a, b = pairs(45, 60, 0.2, parts=parts)
    c = np.random.default_rng(1).random(M.shape)
    for reference in ("product", "uniform", c):
        for reg_m in ((1.0, 0.7), (np.inf, 0.7))[: 3 - min(parts, 2)]:  # a hard row needs a partner
            got = passes(cuda, S, a, b, precision, reg_m, reference)
            want = passes(cpu, S, a, b, "float64", reg_m, reference)
            tol = {"float64": 1e-9, "mixed": 1e-5}[precision]
            assert len(got[0]) == len(want[0])
            for one, other in zip(got[0], want[0], strict=True):
                assert one.mass == pytest.approx(other.mass, rel=tol)
                assert one.dual == pytest.approx(other.dual, rel=tol, abs=tol)
            for found, right in zip(got[1:], want[1:], strict=True):
                np.testing.assert_allclose(found, right, rtol=10 * tol, atol=10 * tol)


def full_and_empty(rng, m, n, share):
    """Return (M, S): a share of all pairs, dense and stored; a full and an empty row and column."""
    M = np.where(rng.random((m, n)) < share, rng.random((m, n)), np.inf)
    M[17], M[:, 1234], M[40], M[:, 5] = rng.random(n), rng.random(m), np.inf, np.inf
    return M, csr_of(M)


@pytest.mark.parametrize(
    ("held", "precision", "penalty"),
    [
        pytest.param(*case, marks=() if case in [(0, "mixed", "kl"), (1 << 40, "float64", "l2")] else pytest.mark.slow)
        for case in product((0, 1 << 40), ("float64", "mixed"), ("kl", "l2"))
    ],
)
def test_one_launch_makes_the_passes_of_many(held, precision, penalty, monkeypatch, using):
    """Passes agree with and without row sums in shared memory; rows of a block, of several turns, and empty rows."""
    rng = np.random.default_rng(4)
    m = 300
    n = 1400
    S = full_and_empty(rng, m, n, 0.05)[1]
    words = S, rng.random(m) + 0.1, rng.random(n) + 0.1, precision, 0.5, "product", 20, penalty
    using(DEVICE_PAIRS, held_entries=held)
    got = passes(cuda, *words, together=True)
    for again, same in zip(passes(cuda, *words, together=True)[1:], got[1:], strict=True):
        np.testing.assert_array_equal(again, same)
    monkeypatch.setenv("MAPUOT_CUDA", "portable")
    want = passes(cuda, *words, together=False)
    assert len(got[0]) == len(want[0])
    for one, other in zip(got[0], want[0], strict=True):
        assert one.mass == pytest.approx(other.mass, rel=1e-10)
        assert one.error == pytest.approx(other.error, rel=1e-5, abs=1e-12)
    for found, right in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9)


def test_a_barycenter_is_the_hosts_of_a_matrix_from_the_device_too():
    """The answer equals an array's; the error once named a backend, which the function does not take."""
    S = sparse.csr_matrix(np.random.default_rng(0).random((8, 8)))
    A = np.random.default_rng(1).random((2, 8))
    got, want = (mapuot.barycenter(M, A, reg=0.1, reg_m=1.0) for M in (device_sparse.csr_matrix(S), S))
    np.testing.assert_array_equal(got.q, want.q)


@pytest.mark.parametrize("short", [1 << 16, 1 << 8])
def test_rows_of_every_length(short, using):
    """Passes agree for empty rows, rows for a few threads, rows for a block, and a row of all pairs."""
    using(DEVICE_PAIRS, short_points=short)
    rng = np.random.default_rng(0)
    m = 70
    n = 3000
    M, S = full_and_empty(rng, m, n, 0.01)
    a = rng.random(m) + 0.1
    b = rng.random(n) + 0.1
    got = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-9, backend="cuda")
    want = mapuot.solve(M, a, b, reg=0.1, reg_m=1.0, tol=1e-9, backend="cpu")
    kept = of_problem(got.problem)
    assert len(kept.rows.long) == 1
    assert kept.rows.index.itemsize == kept.cols.index.itemsize == (2 if short > n else 4)
    assert np.abs(got.plan.toarray() - want.plan).sum() <= 1e-8 * want.mass
    np.testing.assert_allclose(got.rows(15, 19).toarray(), want.plan[15:19], rtol=1e-7, atol=1e-15)
    np.testing.assert_allclose(got.apply_transpose(np.ones(m)), want.plan.sum(0), rtol=1e-7, atol=1e-15)


def test_the_pairs_used_last_are_given_back():
    S, _, a, b = pairs(20, 30, 0.3)
    result = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, backend="cuda")
    assert len(stored.LAST) == 1
    assert of_problem(result.problem) is of_problem(result.problem)
    del result
    gc.collect()
    assert len(stored.LAST) == 0


def test_pairs_of_a_reference_that_is_gone_are_not_those_of_none():
    S, _, a, b = pairs(20, 30, 0.3)
    c = np.random.default_rng(0).random(S.shape) + 0.5
    plain = Problem.from_arrays(S, a, b, 0.1, 1.0, "kl", "product", cuda)
    given = Problem.from_cost(plain.cost, a, b, 0.1, 1.0, "kl", c, cuda)
    assert given.cost is plain.cost
    assert of_problem(given).rows.c is not None
    del given
    gc.collect()
    assert of_problem(plain).rows.c is None


@pytest.mark.parametrize("limit", [30, 60])
def test_passes_read_numbers_as_long_as_the_pairs_hold_them(limit, monkeypatch, using):
    """Where only some ranks could use short indices, all ranks compile kernels for the largest rank."""
    S, _, a, b = pairs(20, 30, 0.3)
    want = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-9, backend="cpu")
    using(DEVICE_PAIRS, short_points=limit)
    take = on_gpu.SparseWorkspace.take_kernel

    def among_others(self):
        """Return the limit as with another rank of 80 rows."""
        with monkeypatch.context() as patch:
            patch.setattr(type(self.problem.ranks), "max", lambda ranks, x: max(x, 80) if x == 20 else x)
            take(self)
        assert self.most == 80

    monkeypatch.setattr(on_gpu.SparseWorkspace, "take_kernel", among_others)
    got = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-9, backend="cuda")
    np.testing.assert_allclose(got.plan.data, want.plan.data, rtol=1e-6)
