"""Every event of a solve has one outcome, and no other module of Python sets a status."""

import ast
from pathlib import Path

import numpy as np
import pytest

import mapuot
from mapuot import outcome as outcomes
from mapuot.contract import Stats
from mapuot.outcome import CANCELLED, CONVERGED, OUTCOMES, RUNNING, SPENT, Outcome
from mapuot.status import STATUSES

ROOT = Path(mapuot.__file__).parent
SETTERS = {"outcome.py", "backends/reference.py"}  # the oracle judges its own passes


def passed(status="running", error=0.5):
    return Stats(1, 0.0, error, 0.0, 1.0, 0.0, False, status)


def set_statuses(source):
    """Return the lines that assign a word of STATUSES to a variable or an attribute named status."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if isinstance(node, ast.Assign):
            targets = node.targets
        else:
            targets = [node.target]
        named = [x for target in targets for x in ast.walk(target)]
        words = [x.value for x in ast.walk(node.value or node.target) if isinstance(x, ast.Constant)]
        names = {getattr(x, "id", getattr(x, "attr", None)) for x in named}
        if "status" in names and set(STATUSES) & {word for word in words if isinstance(word, str)}:
            yield node.lineno


def test_no_other_module_sets_a_status():
    source = "x.status = 'stalled'\nstatus, b = 'running', 1\nstatus = x.status\nif status == 'running': pass"
    assert list(set_statuses(source)) == [1, 2]
    found = {
        str(path.relative_to(ROOT)): list(set_statuses(path.read_text(encoding="utf-8"))) for path in ROOT.rglob("*.py")
    }
    assert {path for path, lines in found.items() if lines} == SETTERS


@pytest.mark.parametrize("status", STATUSES)
def test_each_status_has_a_reason(status):
    assert OUTCOMES[status].status == status
    assert OUTCOMES[status].reason


@pytest.mark.parametrize(("verdict", "is_cancelled", "is_spent", "right"), [
    ("running", False, False, "running"), ("absorb", False, False, "absorb"), ("running", True, True, "cancelled"),
    ("absorb", False, True, "max_passes"), ("converged", True, True, "converged"), ("stalled", True, False, "stalled"),
    ("underflow", False, True, "underflow"),
])  # fmt: skip
def test_after_a_pass(verdict, is_cancelled, is_spent, right):
    """A verdict that ends the solve counts more than a wish to end it, which counts more than the limit."""
    assert outcomes.after_pass(verdict, is_cancelled, is_spent).status == right


@pytest.mark.parametrize(("holds", "gives_up", "is_spent", "right"), [
    (True, True, True, "converged"), (False, True, True, "stalled"), (False, False, True, "max_passes"),
    (False, False, False, "running"),
])  # fmt: skip
def test_after_newtons_step(holds, gives_up, is_spent, right):
    stat = passed("stalled")
    assert outcomes.after_newton_step(stat, holds, gives_up, is_spent).status == right
    assert stat.status == ("converged" if holds else "running")


@pytest.mark.parametrize(("status", "is_met", "right"), [
    ("max_passes", True, "converged"), ("max_passes", False, "max_passes"), ("converged", False, "running"),
    ("running", False, "running"),
])  # fmt: skip
def test_after_the_pass_behind_newtons_step(status, is_met, right):
    """The verdict of the pass itself does not count: Newton's step has moved its error."""
    stat = passed()
    assert outcomes.after_newton_pass(stat, OUTCOMES[status], is_met).status == right
    assert stat.status == ("converged" if is_met else "running")


@pytest.mark.parametrize(("is_certified", "is_spent", "right"), [
    (True, True, "converged"), (False, True, "max_passes"), (False, False, "running"),
])  # fmt: skip
def test_after_a_few_passes(is_certified, is_spent, right):
    stat = passed("running")
    assert outcomes.after_few_passes(stat, is_certified, is_spent).status == right
    assert stat.status == ("converged" if is_certified else "running")


@pytest.mark.parametrize(("verdict", "is_cancelled", "is_spent", "right"), [
    ("converged", True, False, "cancelled"), ("converged", False, True, "max_passes"),
    ("absorb", False, False, "absorb"), ("absorb", True, False, "cancelled"), ("running", False, False, "running"),
])  # fmt: skip
def test_after_steps_that_certify_nothing(verdict, is_cancelled, is_spent, right):
    """The verdict of the pass itself does not count: it knows nothing of the hard columns."""
    stat = passed(verdict)
    assert outcomes.after_open_steps(stat, is_cancelled, is_spent).status == right
    assert stat.status != "converged"


def test_one_more_pass():
    stalled = OUTCOMES["stalled"]
    assert outcomes.after_fresh_kernel(CONVERGED, RUNNING) is RUNNING
    assert outcomes.after_fresh_kernel(stalled, RUNNING) is stalled
    assert outcomes.after_fresh_kernel(stalled, CONVERGED) is CONVERGED
    assert outcomes.after_dropped_step(SPENT, CONVERGED, is_certified_later=False) is CONVERGED
    assert outcomes.after_dropped_step(SPENT, CONVERGED, is_certified_later=True) is SPENT
    assert outcomes.after_dropped_step(SPENT, RUNNING, is_certified_later=False) is SPENT


def test_the_end():
    stat = passed("converged")
    assert outcomes.after_certificate(stat, SPENT) is CONVERGED
    assert outcomes.after_certificate(stat, CANCELLED) is CANCELLED
    assert outcomes.at_end(passed(), SPENT, is_certified=False) is SPENT
    assert outcomes.at_end(passed(), SPENT, is_certified=True) is CONVERGED
    stat = passed("converged")
    assert outcomes.without_certificate(stat, CANCELLED) is CANCELLED
    assert stat.status == "converged"
    assert outcomes.without_certificate(stat, CONVERGED) is SPENT
    assert stat.status == "running"


def test_stages():
    stalled = OUTCOMES["stalled"]
    stat = passed("converged")
    assert outcomes.before_factored_steps(stat).status == "stalled"
    assert stat.status == "running"
    assert outcomes.after_one_call(True) is CONVERGED
    assert outcomes.after_one_call(False).status == "stalled"
    assert outcomes.at_start(stalled, factors_follow=False) is RUNNING
    assert outcomes.at_start(stalled, factors_follow=True) is stalled
    assert outcomes.after_rough_stage().status == outcomes.after_far_start().status == "running"
    assert outcomes.after_own_stage(SPENT, is_cancelled=False, is_spent=True) is SPENT
    assert outcomes.after_own_stage(SPENT, is_cancelled=False, is_spent=False).status == "stalled"
    assert outcomes.after_own_stage(CONVERGED, is_cancelled=True, is_spent=False) is CANCELLED
    assert isinstance(outcomes.before_newton_step(False), Outcome)
    assert outcomes.before_newton_step(True) is SPENT


def test_batches():
    together = np.array(["running", "converged", "stalled"])
    assert outcomes.after_passes_together(together, True, True).tolist() == ["max_passes", "converged", "stalled"]
    assert outcomes.after_passes_together(together, False, True).tolist() == ["absorb", "converged", "stalled"]
    assert outcomes.after_passes_together(together, True, False).tolist() == ["absorb"] * 3
    found = outcomes.after_core_calls(np.array([True, False, False]), np.array([False, True, False]))
    assert found.tolist() == ["converged", "stalled", "max_passes"]
