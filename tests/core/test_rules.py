"""The rules that Python asks of the C library: they are those of a pass, and what the caller adds is counted."""

import math

import pytest

from mapuot import penalties
from mapuot.backends.contract import Stats
from mapuot.backends.rules import Judge, plan_error


def a_pass(number=1, error=1.0, gap=1.0, dual=1.0, mass=1.0):
    return Stats(number, gap, error, dual, mass, 1e-3, False, "running")


@pytest.mark.parametrize("d", [0.0, 1e-300, 1e-9, 0.3, 1e99, math.inf])
def test_plan_error_is_that_of_the_oracle(d):
    assert plan_error(d) == pytest.approx(penalties.plan_error(d), rel=1e-15)


def test_ends():
    judge = Judge(tol=1e-6)
    assert judge.judge(a_pass(error=2e-6)) == "running"
    assert judge.judge(a_pass(error=1e-6)) == "converged"
    assert Judge(tol=1e-6).judge(a_pass(mass=1e-300)) == "underflow"
    lost = a_pass(mass=math.nan)
    assert Judge(tol=1e-6).judge(lost) == "not finite"
    assert (lost.gap, lost.error, lost.dual) == (math.inf, math.inf, -math.inf)
    small = Judge(tol=1e-9, tol_gap=1e-3)
    assert small.judge(a_pass(gap=2e-3)) == "running"
    assert small.judge(a_pass(gap=1e-3)) == "converged"
    small.progress.moved = 0.5
    assert small.judge(a_pass(gap=1e-3)) == "running"  # the dual value may be half of what it seems


def test_stalls():
    judge = Judge(tol=1e-6)
    found = [judge.judge(a_pass(i, error=1e-3)) for i in range(1, 252)]
    assert found == [*["running"] * 250, "stalled"]
    floor = Judge(tol=1e-6, extra_error=1e-4)
    assert floor.judge(a_pass(error=3e-4)) == "running"
    assert floor.judge(a_pass(error=2e-4)) == "stalled"  # half of it will not fall


def test_guard_drops_steps_that_lower_the_dual_value():
    judge = Judge(tol=1e-6, memory=5)
    assert not judge.settle(1.0, 1.0)
    assert not judge.settle(2.0, 1.0)
    assert judge.progress.extrapolated
    assert judge.settle(1.5, 1.0)
    assert not judge.progress.extrapolated
    assert not judge.settle(1.4, 1.0)  # an image is no extrapolated step


def test_what_is_known_later_counts():
    judge, stat = Judge(tol=1e-6), a_pass(error=9e-7, gap=1e-7)
    assert judge.judge(stat) == "converged"
    assert not judge.again(stat, 2e-7, 0.5, 0.0)
    assert (stat.error, stat.gap, stat.dual) == (pytest.approx(1.1e-6), pytest.approx(0.5), 0.5)
