"""Passes over the pairs that may carry mass: the choice of pairs, the conditions of this path, and its true answers."""

import dataclasses
import itertools
from importlib import import_module

import numpy as np
import pytest
from conftest import CUDA, ISAS, available
from oracle import compiler
from problems import clouds, relative_error, verify
from scipy import sparse

import mapuot
from mapuot.arrays import host
from mapuot.ascend import kept, stages
from mapuot.ascend.settings import PAIRS, STAGES
from mapuot.backends import pick
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.problem.cost import Dense
from mapuot.problem.problem import Problem
from mapuot.problem.sparse import Sparse
from mapuot.route.options import make_options

needs_oracle = pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
WAY = r"pairs kept"
BACKENDS = pytest.mark.parametrize("backend", ["cpu", *CUDA])


@pytest.fixture
def small(using):
    """Let small problems keep pairs, however many matter; on a GPU at any small reg."""
    using(STAGES, kept_entries=0)
    using(PAIRS, most_share=1.0)
    if CUDA:
        using(import_module("mapuot.backends.cuda.settings").DEVICE_PAIRS, least_entries=0, most_reg=1.0)


def placed(M, backend):
    """Return an array on the backend's device."""
    if backend == "cpu":
        return M
    return import_module("cupy").asarray(M)


def grid(side, reg, reg_m, **more):
    """Return a grid against itself: costs with many ties."""
    x = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2) / side
    M = ((x[:, None] - x) ** 2).sum(-1)
    return clouds(side**2, side**2, reg, reg_m, seed=3, **more).replace(M=M / M.max())


def tails(reg, reg_m):
    """Return points with heavy tails, masses over six decades."""
    rng = np.random.default_rng(5)
    x = rng.standard_t(1.5, (40, 2))
    y = rng.standard_t(1.5, (35, 2))
    M = ((x[:, None] - y) ** 2).sum(-1)
    case = clouds(40, 35, reg, reg_m)
    return case.replace(M=M / M.max(), a=10.0 ** rng.uniform(-6, 0, 40), b=10.0 ** rng.uniform(-6, 0, 35))


CASES = {  # sides that tests/hostile hardly draws; the last ones take too long on an emulated GPU
    "few": clouds(12, 11, 2e-4, 1.0),
    "semi-relaxed": clouds(60, 50, 1e-4, (np.inf, 0.3), ratio=1.2),
    "turned": clouds(60, 50, 1e-4, (0.3, np.inf), ratio=1.2),
    "ties": grid(7, 2e-5, 1.0),
    "tails": tails(1e-5, 0.5),
    "sharp": clouds(30, 25, 1e-7, 1.0),
}


@needs_oracle
@BACKENDS
@pytest.mark.parametrize("name", ["few", *(pytest.param(x, marks=pytest.mark.slow) for x in CASES if x != "few")])
def test_answers_are_true(name, backend, small):
    case = CASES[name]
    result = case.replace(M=placed(case.M, backend)).solve(symmetric=False)
    assert WAY in result.how
    assert result.converged
    verify(result, case)


@needs_oracle
@pytest.mark.parametrize("nats", [0.5, 3.0])
def test_pairs_that_were_missed_are_found(nats, small, using):
    """Too few pairs give a wrong answer, which no pass over all pairs certifies; the missing pairs are then found."""
    using(PAIRS, nats=nats, moved_nats=0.0)
    for seed in range(3):
        case = clouds(30, 25, 1e-4, 1.0, seed=seed)
        result = case.solve(symmetric=False)
        assert result.converged
        verify(result, case)


@pytest.mark.parametrize("reg_m", [1.0, (np.inf, 0.3)])
def test_pairs_that_are_kept_certify_nothing_of_the_others(reg_m, small, monkeypatch, using):
    """Kept pairs that lack every second one are solved to the end; a pass over all pairs alone ends the solve."""
    whole = kept.KeptPairs.choose

    def found(self, task, log_v):
        pairs = whole(self, task, log_v)
        start = pairs.cost.start - pairs.cost.start[0]
        some = np.arange(pairs.cost.size) % 2 == 0
        some[start[:-1][np.diff(start) > 0]] = True  # each row has a pair
        ends = np.concatenate([[0], np.cumsum(some)])[start]
        cost = Sparse(pairs.cost.data[some], pairs.cost.column[some], ends, pairs.cost.shape)
        self.task = dataclasses.replace(pairs, cost=cost)
        return self.task

    case = clouds(40, 30, 1e-4, reg_m)
    wanted = case.solve(symmetric=False)
    assert WAY in wanted.how
    monkeypatch.setattr(kept.KeptPairs, "choose", found)
    using(PAIRS, selection_passes=1000)
    result = case.solve(symmetric=False)
    assert result.converged
    assert relative_error(result.plan, wanted.plan) <= result.error_bound + wanted.error_bound


def test_the_way_is_left_where_many_pairs_matter():
    """The path is left where many pairs matter, a solve is small, begins warm, or has one potential."""
    rng = np.random.default_rng(0)
    line = rng.random((2, 700, 1))
    cube = rng.random((2, 700, 3))
    for (x, y), reg, taken in ((line, 1e-3, False), (line, 1e-6, True), (cube, 1e-3, False), (cube, 1e-5, True)):
        M = ((x[:, None] - y) ** 2).sum(-1)
        result = mapuot.solve(M, reg=reg * M.max(), reg_m=1.0, threads=1)
        assert result.converged
        assert (WAY in result.how) == taken, (reg, result.how)
    again = mapuot.solve(M, reg=1e-5 * M.max(), reg_m=1.0, threads=1, warm_start=result)
    assert WAY not in again.how
    assert WAY not in mapuot.solve(M[:300, :300], reg=1e-5, reg_m=1.0, callback=lambda _: None).how
    assert WAY not in mapuot.solve(((x[:, None] - x) ** 2).sum(-1), reg=1e-5, reg_m=1.0).how


@needs_oracle
@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
@pytest.mark.parametrize(
    "options", [{"max_passes": 20}, {"max_passes": 90}, {"callback": lambda stats: stats.n_pass > 40}]
)
def test_it_ends_where_it_is_told_to(options, small):
    """A solve that is stopped gets its certificate from a pass over all pairs, at the reg asked for."""
    case = clouds(40, 30, 2e-6, 1.0)
    result = case.solve(symmetric=False, **options)
    assert result.status in ("max_passes", "cancelled")
    assert result.n_passes <= options.get("max_passes", 41) + 2
    verify(result, case)


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
def test_pairs_that_leave_no_mass_are_found_once(small):
    """Pairs without mass are searched once, since no others would have any, either."""
    case = clouds(40, 30, 1e-5, 0.01)
    result = case.replace(M=case.M + 100).solve(symmetric=False, max_passes=400)
    assert WAY in result.how
    assert result.status == "underflow"
    assert result.n_passes < 30


def test_potentials_that_pairs_led_astray_are_left():
    """Passes over all pairs would not recover from the far potentials; these are dropped, and the solve converges."""
    x, y = np.random.default_rng(0).random((2, 700, 3))
    M = ((x[:, None] - y) ** 2).sum(-1)
    result = mapuot.solve(M, reg=1e-5 * M.max(), reg_m=(1.0, np.inf), threads=1, max_passes=5000)
    assert WAY in result.how
    assert result.converged


@BACKENDS
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_kept_pairs(order, dtype, backend):
    """Return, in order, the pairs with exponents at most so far below 0, and their costs; None for too many pairs."""
    rng = np.random.default_rng(1)
    module = pick(backend)
    M = np.asarray(rng.random((37, 531)), dtype, order)
    c = np.asarray(rng.uniform(0.1, 1, (37, 531)), order=order)
    M[rng.random(M.shape) < 0.1], c[rng.random(M.shape) < 0.1] = np.inf, 0
    alpha = rng.standard_normal(37)
    beta = rng.standard_normal(531)
    alpha[3], beta[5] = -np.inf, -np.inf
    if backend == "cpu":
        ways = itertools.product(filter(available, ISAS), (1, 2, 3, 40))
    else:
        ways = [("auto", None)]
    for (isa, threads), share in itertools.product(ways, (np.ones(M.shape), c)):
        native.set_isa(isa)
        with np.errstate(divide="ignore"):
            right = np.log(share) + alpha[:, None] + beta - M.astype(float) / 0.2 >= -3.0
        if share is c:
            given = Dense(placed(c, backend))
        else:
            given = None
        operator = module.operator_of(Dense(placed(M, backend)), 0.2, given, **{"threads": threads} if threads else {})
        found = operator.kept_pairs(alpha, beta, 3.0, int(right.sum()))
        want = [*np.nonzero(right), M[right]]
        for have, values in zip((found.row_numbers(), found.column, found.data), want, strict=True):
            assert np.array_equal(host(have), values)
        assert given is None or np.array_equal(host(found.taken_from(given).data), c[right])
        assert operator.kept_pairs(alpha, beta, 3.0, int(right.sum()) - 1) is None
    native.set_isa("auto")


@pytest.fixture
def on_gpu():
    if not CUDA:
        pytest.skip("needs a GPU")
    from mapuot.backends.cuda import pairs, sparse

    return pairs, sparse


@pytest.mark.gpu
def test_parts(on_gpu):
    """The parts equal SciPy's up to their order; a row or column without pairs belongs to none."""
    rng = np.random.default_rng(0)
    for share in (0.01, 0.03, 0.1):
        M = np.where(rng.random((61, 47)) < share, 1.0, 0.0)
        M[3], M[:, 5] = 0, 0
        cost = Sparse.of_matrix(sparse.csr_array(M))
        want = cost.parts_between(np.zeros(61, bool), np.zeros(47, bool))
        found = on_gpu[0].DevicePairs(cost, None).parts()
        assert want.count == (1 if found is None else found.count)
        if found is not None:
            assert len({*zip(found.cols, want.cols, strict=True)}) == len({*want.cols}) == len({*found.cols})
            assert found.cols[5] == found.count


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [0, 1 << 15])
@pytest.mark.parametrize("apart", [0.0, 1.0])
@pytest.mark.parametrize("reg_m", [1.0, (np.inf, 0.3)])
def test_steps_are_those_of_the_cpu(reg_m, apart, cluster, using, on_gpu):
    """Two passes with a step between them agree, of one part and of two, by one cluster of blocks and by all."""
    using(on_gpu[1].DEVICE_PAIRS, cluster_pairs=cluster)
    case = clouds(40, 33, 1e-2, reg_m)
    case.M[20:, :17] += apart
    case.M[:20, 17:] += apart
    options = dataclasses.replace(make_options("auto", "float64", 1e-13, None, 1), leaps=True)
    found = []
    for name, module in (("cpu", cpu), ("cuda", pick("cuda"))):
        task = Problem.from_arrays(placed(case.M, name), case.a, case.b, case.reg, case.reg_m, "kl", "product", module)
        operator = module.operator_of(task.cost, task.reg)
        alpha = np.zeros(40)
        beta = np.zeros(33)
        beta -= operator.balance(alpha, beta)
        task = dataclasses.replace(task, cost=operator.kept_pairs(alpha, beta, 12.0, task.size), forbidden=True)
        workspace = module.workspace(task, options)
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


@pytest.mark.gpu
def test_the_way_is_for_sharp_plans_of_large_matrices_on_the_device(monkeypatch, on_gpu):
    """The path over kept pairs is for sharp plans of large matrices on the device with a side that is not hard."""

    cuda = pick("cuda")
    options = make_options("auto", "auto", 1e-6, None, 1)

    def keeps(M, reg=2e-6, reg_m=1.0):
        task = Problem.from_arrays(M, None, None, reg, reg_m, "kl", "product", cuda)
        return any(stage.on_kept_pairs for stage in stages.choose_route(task, options, 100, cuda).stages)

    x, y = np.random.default_rng(0).random((2, 2048, 1))
    M = placed(np.abs(x - y.T), "cuda")
    assert keeps(M)
    assert keeps(M, reg_m=(np.inf, 1.0))
    assert not any((keeps(M.get()), keeps(M[:2000]), keeps(M, 1e-5), keeps(M, reg_m=np.inf)))
    monkeypatch.setenv("MAPUOT_CUDA", "portable")
    assert not keeps(M)
