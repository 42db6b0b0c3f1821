"""Kept pairs on a GPU: which they are, Newton's steps between passes over them, and that answers are true."""

import dataclasses

import numpy as np
import pytest
from core.test_kept import CASES, WAY, needs_oracle, small  # noqa: F401 - a fixture
from problems import clouds, verify
from scipy import sparse

from mapuot.backends import cpu
from mapuot.problem.cost import Dense
from mapuot.problem.problem import Problem
from mapuot.problem.sparse import Sparse
from mapuot.route.options import make_options
from mapuot.route.stages import route

cp = pytest.importorskip("cupy", reason="needs CuPy")
if not cp.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mapuot.backends import cuda  # noqa: E402
from mapuot.backends.cuda import pairs as stored  # noqa: E402
from mapuot.backends.cuda import sparse as on_gpu  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def at_once(small, monkeypatch):  # noqa: F811
    """Let small problems take the way at any small reg."""
    monkeypatch.setattr(on_gpu, "KEPT_SIZE", 0)
    monkeypatch.setattr(on_gpu, "KEPT_REG", 1.0)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_near_pairs(order, dtype):
    """All with exponents so far below 0 at most, in their order, with their costs; None where they are too many."""
    rng = np.random.default_rng(1)
    M, c = np.asarray(rng.random((37, 131)), dtype, order), rng.uniform(0.1, 1, (37, 131))
    M[rng.random(M.shape) < 0.1], c[rng.random(M.shape) < 0.1] = np.inf, 0
    alpha, beta = rng.standard_normal(37), rng.standard_normal(131)
    alpha[3], beta[5] = -np.inf, -np.inf
    for reference in (None, c):
        with np.errstate(divide="ignore"):
            exponents = alpha[:, None] + beta - M.astype(float) / 0.2 + (0 if reference is None else np.log(c))
        right = exponents >= -3.0
        given = None if reference is None else Dense(cp.asarray(c))
        operator = cuda.operator_of(Dense(cp.asarray(M)), 0.2, given)
        found = operator.near(alpha, beta, 3.0, int(right.sum()))
        want = [*np.nonzero(right), M[right]]
        for have, values in zip((found.row_numbers(), found.column, found.data), want, strict=True):
            assert np.array_equal(have.get(), values)
        assert given is None or np.array_equal(found.taken_from(given).data.get(), c[right])
        assert operator.near(alpha, beta, 3.0, int(right.sum()) - 1) is None


def test_parts():
    """Those that SciPy finds, but for their order; a row and a column without pairs are in none."""
    rng = np.random.default_rng(0)
    for share in (0.01, 0.03, 0.1):
        M = np.where(rng.random((61, 47)) < share, 1.0, 0.0)
        M[3], M[:, 5] = 0, 0
        cost = Sparse.of_matrix(sparse.csr_array(M))
        want, found = cost.parts_between(np.zeros(61, bool), np.zeros(47, bool)), stored.DevicePairs(cost, None).parts()
        assert want.count == (1 if found is None else found.count)
        if found is not None:
            assert len({*zip(found.cols, want.cols, strict=True)}) == len({*want.cols}) == len({*found.cols})
            assert found.cols[5] == found.count


@pytest.mark.parametrize("cluster", [0, 1 << 15])
@pytest.mark.parametrize("apart", [0.0, 1.0])
@pytest.mark.parametrize("reg_m", [1.0, (np.inf, 0.3)])
def test_steps_are_those_of_the_cpu(reg_m, apart, cluster, monkeypatch):
    """Two passes with a step between them, of one part and of two, by one cluster of blocks and by all."""
    monkeypatch.setattr(on_gpu, "CLUSTER_PAIRS", cluster)
    case = clouds(40, 33, 1e-2, reg_m)
    case.M[20:, :17] += apart
    case.M[:20, 17:] += apart
    options, found = dataclasses.replace(make_options("auto", "float64", 1e-13, None, 1), leaps=True), []
    for module, array in ((cpu, np.asarray), (cuda, cp.asarray)):
        task = Problem.from_arrays(array(case.M), case.a, case.b, case.reg, case.reg_m, "kl", "product", module)
        operator, alpha, beta = module.operator_of(task.cost, task.reg), np.zeros(40), np.zeros(33)
        beta -= operator.balance(alpha, beta)
        task = dataclasses.replace(task, cost=operator.near(alpha, beta, 12.0, task.size), forbidden=True)
        workspace = module.Workspace(task, options)
        workspace.absorb(np.zeros(33))
        stats = workspace.iterate(1)
        products = workspace.leap(stats[-1], True)
        stats += workspace.iterate(1)
        products += workspace.leap(stats[-1], False)
        found.append((products, stats[1].dual, stats[1].mass, *workspace.potentials(), *workspace.marginals()))
        assert stats[1].dual > stats[0].dual
    assert found[0][0] == found[1][0] > 3
    for have, want in zip(found[1][1:], found[0][1:], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-7, atol=1e-7)


SLOW = "soft", "unequal", "semi-relaxed", "turned", "forbidden", "zeros", "ties", "tails"  # without a GPU


@needs_oracle
@pytest.mark.parametrize("name", ["few", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_answers_are_true(name, at_once):
    case = clouds(12, 11, 2e-4, 1.0) if name == "few" else CASES[name]
    result = case.replace(M=cp.asarray(case.M)).solve(symmetric=False)
    assert WAY in result.how
    assert result.converged
    verify(result, case)


def test_the_way_is_for_sharp_plans_of_large_matrices_on_the_device(monkeypatch):
    """Whose sides are not both hard."""

    def kept(M, reg=2e-6, reg_m=1.0):
        task = Problem.from_arrays(M, None, None, reg, reg_m, "kl", "product", cuda)
        return any(stage.kept for stage in route(task, make_options("auto", "auto", 1e-6, None, 1), 100, cuda).stages)

    x, y = np.random.default_rng(0).random((2, 2048, 1))
    M = cp.asarray(np.abs(x - y.T))
    assert kept(M)
    assert kept(M, reg_m=(np.inf, 1.0))
    assert not any((kept(M.get()), kept(M[:2000]), kept(M, 1e-5), kept(M, reg_m=np.inf)))
    monkeypatch.setenv("MAPUOT_CUDA", "portable")
    assert not kept(M)
