"""The short path for small plain problems gives the ordinary path's answer, pass by pass."""

from importlib import import_module

import numpy as np
import pytest
from problems import clouds, with_forbidden, with_zeros

import mapuot
from mapuot.backends.settings import CALLS
from mapuot.route.front import Start
from mapuot.route.plain import PlainResult


def ordinary(monkeypatch, case, **options):
    with monkeypatch.context() as patch:
        patch.setattr(import_module("mapuot.api.solve"), "in_one_call", lambda *_: Start())
        return case.solve(**options)


def compare(ours, theirs):
    """Assert equal bits, except in sums over masses, which the iteration does not use."""
    assert isinstance(ours, PlainResult)
    assert not isinstance(theirs, PlainResult)
    assert (ours.status, ours.n_passes) == (theirs.status, theirs.n_passes)
    assert ours.how == f"{theirs.how}, one call of the core"
    for x, y in zip(ours.trace, theirs.trace, strict=True):
        assert (x.n_pass, x.status, x.rejected, x.mass) == (y.n_pass, y.status, y.rejected, y.mass)
        for name in ("gap", "error", "dual", "residual"):
            assert getattr(x, name) == pytest.approx(getattr(y, name), rel=1e-12, abs=1e-15)
    for name in ("log_u", "log_v", "row_marginal", "col_marginal", "plan"):
        x = getattr(ours, name)
        y = getattr(theirs, name)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    compare_problems(ours.problem, theirs.problem)


def compare_problems(p, q):
    assert (p.M_min, p.M_max, p.forbidden, p.reg, p.reference) == (q.M_min, q.M_max, q.forbidden, q.reg, q.reference)
    assert p.c_mass == q.c_mass
    for x, y in ((p.rows, q.rows), (p.cols, q.cols)):
        assert (x.name, x.penalty) == (y.name, y.penalty)
        np.testing.assert_array_equal(x.weight, y.weight)
        np.testing.assert_array_equal(x.rho, y.rho)


def with_one_far(case):
    """Return the case with a point far from all others; larger regs ignore it."""
    M = case.M.copy()
    M[7] *= 1e3
    return with_zeros(case.replace(M=M))


OPTIONS = [{"method": "translation_invariant"}, {"method": "sinkhorn"}, {"precision": "float64"},
           {"precision": "mixed", "tol": 6e-7}, {"tol": 1e-10}, {"tol_gap": 1e-3}, {"max_passes": 1}, {"max_passes": 2},
           {"max_passes": 7}, {"max_passes": 20}, {"threads": 1, "backend": "cpu"}]  # fmt: skip
CHANGES = {"zeros": with_zeros, "forbidden": with_forbidden, "far": with_one_far, "plain": lambda case: case}
CASES = {
    **{f"{reg_m}-{reg}-{m}x{n}": (clouds(m, n, reg=reg, reg_m=reg_m, ratio=1.7, seed=3), {})
       for m, n in [(1, 1), (7, 5), (64, 64), (33, 129), (130, 17)] for reg in [0.5, 0.05, 2e-3, 2e-4]
       for reg_m in [1.0, (0.3, 5.0), (np.inf, 1.0), min(200.0, 1e4 * reg)]},
    **{f"{reg}-{options}": (clouds(40, 50, reg=reg, seed=5), options) for reg in [0.1, 1e-3] for options in OPTIONS},
    **{f"{reg}-{name}-{dtype}": (case.replace(M=case.M.astype(dtype)), {}) for name, change in CHANGES.items()
       for reg in [0.2, 2e-3] for case in [change(clouds(60, 45, reg=reg, seed=2))] for dtype in ["f4", "f8"]},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_the_ordinary_way_pass_by_pass(name, monkeypatch):
    case, options = CASES[name]
    compare(case.solve(**options), ordinary(monkeypatch, case, **options))


def point_apart(case):
    """A single row with only forbidden pairs has no mass where soft and makes the problem infeasible where hard."""
    M = case.M.copy()
    M[2] = np.inf
    return case.replace(M=M)


LEFT = {  # to the ordinary way
    "a point that nothing reaches": (point_apart(clouds(9, 8)), {}),
    "columns balanced alone": (clouds(9, 8, reg_m=(1.0, np.inf)), {}),
    "masses that differ at a large reg_m": (clouds(9, 8, reg=1e-3, reg_m=200.0, ratio=1.7), {}),
    "masses that differ at a large reg_m of one side": (clouds(9, 8, reg=1e-3, reg_m=(np.inf, 200.0), ratio=1.7), {}),
    "total variation": (clouds(9, 8, penalty="tv"), {}),
    "a reference": (clouds(9, 8, reference="uniform"), {}),
    "one reg_m a point": (clouds(9, 8, reg_m=(np.ones(9), 1.0)), {}),
    "in place": (clouds(9, 8), {"method": "map-uot"}),
    "threads": (clouds(9, 8), {"threads": 2}),
    "reference backend": (clouds(9, 8), {"backend": "reference"}),
    "a callback": (clouds(9, 8), {"callback": lambda stats: None}),
    "a start": (clouds(9, 8), {"warm_start": (np.zeros(9), np.zeros(8))}),
    "a stall": (clouds(9, 8), {"tol": 1e-17}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_ordinary_way(name):
    case, options = LEFT[name]
    result = case.solve(**options)
    assert type(result) is mapuot.Result
    assert result.status == ("stalled" if name == "a stall" else "converged")


def test_masses_are_copied_and_read_in_any_type():
    case = clouds(12, 9)
    a = np.repeat(case.a, 2)[::2].astype("f4")
    result = case.replace(a=a, b=case.b[::-1]).solve()
    assert isinstance(result, PlainResult)
    expected = case.replace(a=a.astype(float), b=case.b[::-1].copy()).solve().plan
    np.testing.assert_array_equal(result.plan, expected)
    a[:] = 0
    assert result.problem.rows.weight.sum() == pytest.approx(1.0, rel=1e-6)
    assert case.replace(a=None).solve().problem.rows.weight == pytest.approx(np.full(12, 1 / 12))


@pytest.mark.parametrize(
    "options", [{"tol": True}, {"max_passes": True}, {"max_passes": 2.0}, {"threads": 1.0}], ids=str
)
def test_options_that_only_equal_good_ones(options):
    case = clouds(9, 8)
    case.solve(tol=1.0, max_passes=1, threads=1)
    case.solve(max_passes=2)
    if "tol" in options:
        assert case.solve(**options).error_bound <= 1.0
    else:
        with pytest.raises(ValueError, match="integer"):
            case.solve(**options)


def test_a_call_that_would_take_long_is_left(monkeypatch, using):
    """A solve that would keep the core busy for longer than Ctrl-C may wait takes the ordinary path to the same end."""
    core = import_module("mapuot.backends.cpu.core_solve")
    using(CALLS, most_passes=5)
    monkeypatch.setattr(core, "kept", [])
    case = clouds(16, 16, reg=0.01)
    result = case.solve()
    assert type(result) is mapuot.Result
    assert result.converged
    assert result.n_passes > 5
