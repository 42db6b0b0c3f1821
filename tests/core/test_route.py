"""The path of a solve: `choose_route` as a pure function, and `Result.how`, which names the path taken."""

import dataclasses
import math
import pickle
import re

import numpy as np
import pytest
from problems import clouds
from scipy import sparse

import mapuot
from mapuot.ascend.settings import STAGES
from mapuot.ascend.stages import UNDONE, choose_route, larger_regs
from mapuot.backends.cpu import backend as cpu
from mapuot.contract import Backend
from mapuot.problem.problem import Problem
from mapuot.problem.settings import POINTS
from mapuot.route.options import make_options


class Factoring(Backend):
    most_factored = 100


def way(case, method="auto", precision="auto", tol=1e-6, backend=None, **given):
    problem = Problem.from_arrays(case.M, case.a, case.b, case.reg, case.reg_m, case.penalty, case.reference, cpu)
    options = make_options(method, precision, tol, None, 1)
    return choose_route(problem, options, 100, backend or Backend(), escalate=precision == "auto", **given)


def told(found):
    return [(stage.from_zeros, round(stage.reg, 9), stage.storage, stage.anderson_depth > 0) for stage in found.stages]


def test_larger_regs():
    assert larger_regs(1.0, 3e-3) == []
    assert larger_regs(1.0, 2.9e-3) == pytest.approx([4 * 2.9e-3])
    assert larger_regs(10.0, 1e-4) == pytest.approx([1e-4 * 4**k for k in (5, 4, 3, 2, 1)])


def test_a_cold_start():
    """A cold start begins at zeros, with larger regs where reg is small, and in float64 where float32 is not enough."""
    easy = (True, 0.1, "float32", True)
    finer = (False, 0.1, "float64", True)
    assert told(way(clouds(9, 8, reg=0.1))) == [easy, finer]
    assert told(way(clouds(9, 8, reg=0.1), precision="mixed")) == [easy]
    assert told(way(clouds(9, 8, reg=0.1), method="sinkhorn")) == [(*x[:3], False) for x in (easy, finer)]
    hard = way(clouds(9, 8, reg=1e-3), precision="float64").stages
    assert [stage.from_zeros for stage in hard] == [True] + [False] * (len(hard) - 1)
    assert [stage.tol for stage in hard] == [STAGES.coarse_tol] * (len(hard) - 1) + [1e-6]
    assert [stage.most for stage in hard] == [50] * (len(hard) - 1) + [100]
    assert all(stage.after == UNDONE for stage in hard)


def test_a_warm_start_is_left_where_it_is_of_no_use():
    found = way(clouds(9, 8, reg=1e-3), given=(True, True)).stages
    assert (found[0].from_zeros, found[0].leave_above, found[1].from_zeros) == (False, 1.0, True)
    assert way(clouds(9, 8, reg=0.1), given=(True, True)).stages[0].leave_above == math.inf


def test_kinks_are_solved_again_without_extrapolation():
    found = told(way(clouds(9, 8, reg=0.1, penalty="tv")))
    assert [x[2:] for x in found] == [("float32", True), ("float32", False), ("float64", True), ("float64", False)]


def test_kinks_are_left_to_factored_steps():
    found = way(clouds(9, 8, reg=0.1, penalty="tv"), backend=Factoring())
    assert [stage.anderson_depth > 0 for stage in found.stages] == [True] * 3
    assert [stage.with_factors for stage in found.stages] == [False, False, True]


def test_balanced_columns_are_turned():
    assert way(clouds(9, 8, reg_m=(1.0, np.inf))).turned
    assert not way(clouds(9, 8, reg_m=(np.inf, np.inf))).turned
    assert not way(clouds(9, 8, reg_m=(1.0, np.inf)), method="sinkhorn").turned


def points(m=600, n=500):
    rng = np.random.default_rng(0)
    return rng.random((m, 2)), rng.random((n, 2)), np.full(m, 1 / m), np.full(n, 1 / n)


HOW = {
    "plain": (clouds(30, 20, reg=0.1), {}, "float32 tiles, one call of the core"),
    "small reg": (clouds(30, 20, reg=2e-3), {}, r"float32 tiles, \d larger regs?, one call of the core"),
    "threads": (clouds(30, 20, reg=2e-3), {"threads": 2}, r"float32 tiles, \d larger regs?"),
    "turned": (clouds(30, 20, reg_m=(1.0, np.inf)), {}, "float32 tiles, turned"),
    "in place": (clouds(30, 20, reg=0.1), {"method": "map-uot"}, "float64 tiles"),
    "reference": (clouds(30, 20, reg=0.1), {"backend": "reference"}, "float64 logarithms"),
    "warm": (clouds(30, 20, reg=0.1), {"warm_start": (np.ones(30), np.ones(20))}, "float32 tiles, from a warm start"),
    "escalated": (
        clouds(30, 20, reg=0.05, penalty="tv"), {"tol": 1e-17},
        r"float64 tiles, after 'stalled' float64 tiles.*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOW)
def test_how(name, tmp_path):
    case, options, how = HOW[name]
    result = case.solve(**options)
    assert re.fullmatch(how, result.how), result.how
    assert str(result) == f"{result!r}\n{result.how}"
    assert pickle.loads(pickle.dumps(result)).how == result.how
    result.save(tmp_path / "answer.npz")
    assert mapuot.load(tmp_path / "answer.npz").how == result.how


def test_how_of_other_costs():
    x, y, a, b = points()
    M = ((x[:, None] - y) ** 2).sum(-1)
    given = {
        "float32 points, then float64 points": mapuot.PointCloud(x, y, form=None),
        "float32 tiles, the matrix of the points, one call of the core": mapuot.PointCloud(x, y, form=16 * 600 * 500),
        "float64 points": mapuot.PointCloud(x, y, "wfr", form=16 * 600 * 500 - 1),
        "float32 pairs": sparse.csr_array(np.where(M < 0.5, M + 1e-3, 0)),
        "float32 tiles": lambda i0, i1: M[i0:i1],
    }
    for how, cost in given.items():
        assert mapuot.solve(cost, a, b, reg=0.05, reg_m=1.0).how == how
    skips = mapuot.solve(mapuot.PointCloud(x, y, truncate=4.0), a, b, reg=1e-3, reg_m=1.0)
    assert f", {100 * skips.skipped.kept.share:.2g} % of the pairs" in skips.how
    small = mapuot.solve(mapuot.PointCloud(x[:9], y[:8]), reg=0.1, reg_m=1.0)
    assert small.how == "float32 tiles, the matrix of the points, one call of the core"
    rng = np.random.default_rng(0)
    assert mapuot.solve(mapuot.Grid((9, 8)), *rng.random((2, 9, 8)), reg=1.0, reg_m=1.0).how == "float64 products"


def test_how_of_a_batch():
    x, y, a, b = points(60, 50)
    M = ((x[:, None] - y) ** 2).sum(-1)
    A = np.stack([a, 2 * a])
    B = np.stack([b, b])
    easy = mapuot.solve_batch(M, A, B, reg=0.05, reg_m=1.0)
    assert easy.how.tolist() == ["float64 tiles, 2 problems together"] * 2
    assert easy[1].how == easy.how[1]
    hard = mapuot.solve_batch(M, A, B, reg=1e-4, reg_m=1.0)
    assert all("larger regs, one call of the core for some problems" in how for how in hard.how)
    alone = mapuot.solve_batch(M, A, B, reg=1e-3, reg_m=0.5, penalty="tv")
    assert all(how.endswith("alone") for how in alone.how)


def test_nothing_of_a_solve_stays_in_the_cost():
    x, y, a, b = points()
    cloud = mapuot.PointCloud(x, y, truncate=4.0)
    before = set(vars(cloud))
    result = mapuot.solve(cloud, a, b, reg=1e-3, reg_m=1.0)
    assert result.skipped is not None
    assert set(vars(cloud)) == before


def with_one_far(distance, m=700, n=640):
    x, y, a, b = points(m, n)
    x[7] = distance
    return x, y, a, b


@pytest.mark.parametrize("form", [None, "auto"])
@pytest.mark.parametrize("reg", [0.01, 0.001])
def test_one_far_point_costs_no_passes(form, reg):
    """A point 100 times as far as the others adds no larger regs, and as many passes stay in float32."""
    passes = []
    for distance in (0.5, 5.0, 100.0):
        x, y, a, b = with_one_far(distance)
        result = mapuot.solve(mapuot.PointCloud(x, y, form=form), a, b, reg=reg, reg_m=1.0, threads=1)
        assert result.converged
        assert ("float64 points" in result.how) == (form is None)
        passes.append((result.n_passes, result.how.count("larger reg"), result.how.startswith("float32")))
    assert all(x[0] <= 1.1 * passes[0][0] + 2 and x[1:] == passes[0][1:] for x in passes), passes


def test_one_potential_does_not_ask_for_the_extent():
    x = with_one_far(100.0)[0]
    problem = Problem.from_arrays(((x[:, None] - x) ** 2).sum(-1), None, None, 0.001, 1.0, "kl", "product", cpu)
    options = make_options("auto", "auto", 1e-6, None, 1)
    found = choose_route(problem, dataclasses.replace(options, symmetric=True), 100, Backend())
    assert "extent" not in vars(problem)
    assert found.stages[0].symmetric
    assert len(found.stages) > len(choose_route(problem, options, 100, Backend()).stages) + 2


def test_the_extent_leaves_out_few_points_and_no_tails():
    rng = np.random.default_rng(0)
    x = rng.standard_t(2, (900, 3))
    tails = ((x[:, None] - x[::-1]) ** 2).sum(-1)
    for M, share in ((tails, 0.05), (rng.random((900, 900)), 1.0), (1 - np.eye(900), 1.0)):
        problem = Problem.from_arrays(M, None, None, 0.1, 1.0, "kl", "product", cpu)
        assert share * (M.max() - M.min()) <= problem.extent <= M.max() - M.min()
    sparse_M = sparse.csr_array(np.eye(900) + 1)
    assert Problem.from_arrays(sparse_M, None, None, 0.1, 1.0, "kl", "product", cpu).extent == 1.0


def test_a_backend_says_from_how_many_pairs_auto_skips_some(monkeypatch, using):
    """A GPU passes over 2^28 pairs faster than its host can choose pairs to skip; a user may still ask for skipping."""
    x, y, a, b = points()
    using(POINTS, auto_entries=1)
    for truncate, skips_from, skips in (("auto", 0, True), ("auto", x.shape[0] * len(y), True),
                                        ("auto", x.shape[0] * len(y) + 1, False), (4.0, 1 << 40, True)):  # fmt: skip
        monkeypatch.setattr(cpu, "skips_from", skips_from)
        result = mapuot.solve(mapuot.PointCloud(x, y, truncate=truncate, form=None), a, b, reg=1e-3, reg_m=1.0)
        assert (result.skipped is not None) == skips
        assert result.converged
