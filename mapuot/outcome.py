"""Outcomes of passes, stages and solves: a status and its reason. Python sets a status here and nowhere else.

The rules judge a pass by its numbers (src_c/common/rules.h; for many marginals backends/rules.py). The functions below
say what follows from that verdict, from Newton's step towards hard columns, and from the end of a stage.
"""

from typing import Any, NamedTuple

import numpy as np

from .contract import Stats
from .status import GOES_ON


class Outcome(NamedTuple):
    """The status of a solve, and the reason for it."""

    status: str  # of status.STATUSES
    reason: str


# by its status: the outcome of a pass, of an earlier solve, or of a single call of the core
OUTCOMES = {
    status: Outcome(status, reason)
    for status, reason in {
        "running": "the error is not certified yet",
        "converged": "the error is certified",
        "absorb": "the scalings outgrew K",
        "stalled": "rounding allows no smaller error",
        "not finite": "the plan or a scaling overflows",
        "underflow": "the mass of the plan vanishes",
        "max_passes": "the limit on the passes is reached",
        "cancelled": "the callback or another thread ended the solve",
    }.items()
}
RUNNING = OUTCOMES["running"]
CONVERGED = OUTCOMES["converged"]
CANCELLED = OUTCOMES["cancelled"]
SPENT = OUTCOMES["max_passes"]


# ---- a pass


def request_kernel(stat: Stats) -> None:
    """Set the status "absorb": K, or the mask of pairs, must be made anew before the next pass."""
    stat.status = "absorb"


def after_last_change(stat: Stats, is_small: bool) -> None:
    """Set the status of a pass without a certificate: it ends the solve if the potentials hardly move."""
    if is_small:
        stat.status = "converged"
    else:
        stat.status = "running"


def after_late_certificate(stat: Stats, is_certified: bool) -> None:
    """Set the status of the last pass, which got its certificate after it was judged."""
    if is_certified:
        stat.status = "converged"


def after_few_passes(stat: Stats, is_certified: bool, is_spent: bool) -> Outcome:
    """Set the status of the last pass of one call of the core, which others may follow; return the outcome."""
    if is_certified:
        stat.status = "converged"
        return CONVERGED
    return SPENT if is_spent else RUNNING


# ---- the loop


def after_pass(verdict: str, is_cancelled: bool, is_spent: bool) -> Outcome:
    """Return what follows from a pass; ``is_spent``: no pass is left."""
    if verdict in GOES_ON and is_cancelled:
        return CANCELLED
    if verdict in GOES_ON and is_spent:
        return SPENT
    return OUTCOMES[verdict]


def after_far_start() -> Outcome:
    """Return the outcome of a first pass with too large an error: another start is better."""
    return Outcome("running", "the start is too far from the optimum")


def after_fresh_kernel(before: Outcome, again: Outcome) -> Outcome:
    """Return the outcome of a solve in place after one more pass on a fresh K."""
    if "converged" in (before.status, again.status):
        return again
    return before


def before_newton_step(is_spent: bool) -> Outcome:
    """Return the outcome of a pass that Newton's step does not follow yet: it is not worth its products."""
    if is_spent:
        return SPENT
    return Outcome("running", "Newton's step waits for more passes")


def after_open_steps(stat: Stats, is_cancelled: bool, is_spent: bool) -> Outcome:
    """Return the outcome of steps with two levels after a last pass without a certificate.

    Its own verdict does not count what its hard columns miss.
    """
    if stat.status == "absorb" and not is_cancelled:
        return OUTCOMES["absorb"]
    if stat.status == "converged":
        stat.status = "running"
    if is_cancelled:
        return CANCELLED
    return before_newton_step(is_spent)


def after_newton_step(stat: Stats, holds: bool, gives_up: bool, is_spent: bool) -> Outcome:
    """Set the status of a pass that Newton's step has judged; return the outcome. ``holds``: it is certified."""
    if holds:
        stat.status = "converged"
        return CONVERGED
    stat.status = "running"
    if gives_up:
        return Outcome("stalled", "Newton's steps do not meet the hard marginals")
    if is_spent:
        return SPENT
    return RUNNING


def after_newton_pass(stat: Stats, outcome: Outcome, is_met: bool) -> Outcome:
    """Set the status of the pass that follows Newton's step; ``is_met``: its error, or its value, is certified."""
    if is_met:
        stat.status = "converged"
        return CONVERGED
    stat.status = "running"
    if outcome.status == "max_passes":
        return outcome
    return RUNNING


def after_dropped_step(before: Outcome, again: Outcome, is_certified_later: bool) -> Outcome:
    """Return the outcome after one more pass from the state before a step that the guard dropped."""
    if again.status == "converged" and not is_certified_later:
        return again
    return before


def without_certificate(stat: Stats, outcome: Outcome) -> Outcome:
    """Return the outcome of a last pass with hard columns that were not judged; it is not certified."""
    if outcome.status == "converged":
        stat.status = "running"
        return SPENT
    return outcome


def at_end(stat: Stats, outcome: Outcome, is_certified: bool) -> Outcome:
    """Return the last outcome; ``is_certified``: Newton's step has just certified the pass."""
    if is_certified:
        stat.status = "converged"
        return CONVERGED
    return outcome


def after_certificate(stat: Stats, outcome: Outcome) -> Outcome:
    """Return the last outcome of passes that need no Newton step: the certificate of the last pass counts."""
    if stat.status == "converged" and outcome.status != "cancelled":
        return CONVERGED
    return outcome


# ---- stages


def after_one_call(is_certified: bool) -> Outcome:
    """Return the outcome of a solve in one call on a device; Newton's step has judged its hard columns."""
    if is_certified:
        return CONVERGED
    return Outcome("stalled", "Newton's step leaves the hard marginals too far")


def at_start(outcome: Outcome, factors_follow: bool) -> Outcome:
    """Return the first outcome of the stages. After a stalled call steps with a factor follow, or none."""
    if outcome.status == "stalled" and not factors_follow:
        return RUNNING
    return outcome


def before_factored_steps(stat: Stats) -> Outcome:
    """Return the outcome of passes that only prepare Newton's steps with a factor, which certify the plan."""
    stat.status = "running"
    return Outcome("stalled", "steps with a factor follow, and certify")


def after_rough_stage() -> Outcome:
    """Return the outcome of a stage at a larger reg, over fewer pairs, or of one potential that did not converge."""
    return Outcome("running", "the stage certifies nothing of the whole problem")


def after_own_stage(outcome: Outcome, is_cancelled: bool, is_spent: bool) -> Outcome:
    """Return the outcome of a stage at the requested reg.

    ``is_cancelled``: the solve was cancelled in a stage before; ``is_spent``: no pass of the solve, or of the stage, is
    left.
    """
    if is_cancelled:
        return CANCELLED
    if outcome.status == "max_passes" and not is_spent:
        return Outcome("stalled", "the passes of the stage are used up")
    return outcome


# ---- batches


def unsolved(count: int) -> Any:
    """Return the statuses of problems that no passes have solved yet."""
    return np.full(count, "absorb", dtype="U12")


def after_passes_together(statuses: Any, is_spent: bool, certifies: bool) -> Any:
    """Return the statuses of problems after their passes together; "absorb": the problem goes on alone.

    ``certifies``: the passes certify hard columns, too.
    """
    if not certifies:
        return unsolved(len(statuses))
    return np.where(statuses == "running", "max_passes" if is_spent else "absorb", statuses)


def after_core_calls(is_converged: Any, is_stalled: Any) -> Any:
    """Return the statuses of problems that the core has solved in one call each."""
    return np.where(is_converged, "converged", np.where(is_stalled, "stalled", "max_passes"))
