"""Statuses of a pass and of a solve, and the text that tells a user why a solve did not converge."""

import math
from typing import Any, NamedTuple

import numpy as np

from .arrays import host
from .errors import FOR_VALUE, MUTED, ConvergenceWarning, warn

# The first six have the numbers of mapuot_status (src_c/common/record.h); files of answers hold the index of a status.
STATUSES = ("running", "converged", "absorb", "stalled", "not finite", "underflow", "max_passes", "cancelled")
GOES_ON = ("running", "absorb")  # statuses of a pass that is followed by another
FAILED = ("not finite", "underflow")  # statuses of solves without an answer
UNREACHED = ("stalled", "max_passes", *FAILED)  # statuses of unmet marginals: perhaps no plan meets them
FAR_LOGS = 4.0  # ranges of M / reg: larger log scalings come of the masses, and not of M
LEAST_REG = 1e-290  # values are products of reg and masses: near 1e-308 float64 has no digits for them
LEAST_UNIT = 1e-280  # mass times reg: where less mass underflows, the cause is the mass, and not M
MASSES_TOO_SMALL = "the masses are near the least number of float64, which holds no plan below 1e-290"
VALUE_KNOWN = 1e-4  # below this relative gap a warning mentions tol_gap


class Words(NamedTuple):
    """The caller's names of the pass limit and of the requested certified error."""

    passes: str = "max_passes"
    tol: str = "tol"


OURS = Words()


def describe_bound(error: float, name: str = "error") -> str:
    """Describe a certified relative plan error; an error of 1 or more says nothing about the plan."""
    if error < 1:
        return f"{name} {error:.1e}"
    return "nothing certified yet"


def describe_miss(error: float, tol: float, words: Words = OURS) -> str:
    """Describe a certified error above ``tol``."""
    if error < 1:
        return f"certified relative plan error {error:.2e} > {words.tol} {tol:.2e}"
    return f"certified relative plan error above 1, so far nothing is known of the plan ({words.tol} {tol:.2e})"


def not_converged(result: Any, tol: float, more: str = "", words: Words = OURS) -> str:
    """Say why a solve did not reach ``tol``, and name a cure; ``more``: options that may get nearer, in words."""
    missed = result._missed
    forbidden = getattr(result.problem, "forbidden", False)
    nearer = "raise reg or reg_m, bring the costs nearer 0 (as scale_cost='median' does), or rescale the masses"
    if more:
        stalled = f"this way it gets no nearer: use {more}, or a larger {words.tol}"
        least_lost = tol
    else:
        stalled = f"rounding allows no better: ask for a larger {words.tol}"
        least_lost = tol / 4
    longer = f"raise {words.passes}, reg or {words.tol}"
    lost = lost_digits(result)
    is_lost = lost > least_lost
    if is_lost:
        stalled = f"{beyond_float64(result, lost)}, or ask for a larger {words.tol}"
    if missed > 1e-6 and not (is_lost and lost > missed):
        stalled = f"row or column sums differ from a or b by {missed:.1e} of the mass"
        if more:
            stalled += f"; use {more}"
        stalled += "; perhaps the allowed pairs cannot carry these masses" * bool(forbidden)
        longer += f"; {stalled}" * forbidden
    too_small = f"{MASSES_TOO_SMALL}: multiply a and b by the same large number"
    if has_tiny_masses(result.problem):
        stalled = too_small
    if np.min(result.problem.reg) < LEAST_REG:
        underflow = "reg is near the least number of float64: multiply M, reg and reg_m by the same large number"
    elif has_tiny_masses(result.problem):
        underflow = too_small
    else:
        underflow = f"M is so far above reg_m that float64 cannot hold the plan: {nearer}"
        if moves_nothing(result):
            underflow += "; the value, of a plan that moves nothing, is known"
    cure = {
        "max_passes": longer,
        "stalled": stalled,
        "underflow": underflow,
        "not finite": f"the plan, or a scaling, overflows: {nearer}",
    }.get(result.status, nearer)
    if result.status == "max_passes":
        why = words.passes
    else:
        why = result.status
    told = describe_miss(result.error_bound, tol, words)
    return f"not converged ({why}) after {result.n_passes} passes: {told}; {cure}{value_known(result)}"


def moves_nothing(result: Any) -> bool:
    """Tell whether a solve ended at a plan that moves nothing in float64, so that its value is known."""
    return bool(result.status == "underflow" and result.gap < math.inf)


def is_told(result: Any) -> bool:
    """Tell whether a warning is due for an answer that has not converged: a loss needs the value only."""
    return not MUTED.get() and not (FOR_VALUE.get() and moves_nothing(result))


def has_tiny_masses(problem: Any) -> bool:
    """Tell whether products of masses, K and reg leave float64 because the masses are small."""
    sides = getattr(problem, "sides", ())
    least = min((side.mass for side in sides), default=1.0)
    return bool(least * min(1.0, np.min(problem.reg)) < LEAST_UNIT)


def beyond_float64(result: Any, lost: float) -> str:
    """Name the cause of exponents so large that their rounding hides a part ``lost`` of the plan; name cures."""
    if lost < 1:
        part = f"some {lost:.0e} of the plan"
    else:
        part = "the whole plan"
    size = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in map(host, result.own_logs))
    if size > FAR_LOGS * result.problem.range_over_reg:
        why = f"log scalings reach {size:.0e}, since the masses of both sides differ where reg_m / reg is large"
        return f"{why}, and their rounding leaves {part} unknown: bring the masses nearer each other, lower reg_m"
    why = f"reg is so small beside M that rounding of M / reg alone leaves {part} unknown"
    return f"{why}: raise reg, bring the costs nearer 0, lower reg_m"


def lost_digits(result: Any) -> float:
    """Estimate the smallest plan error that the rounding of exponents allows; 0 if it is not known."""
    problem = result.problem
    if not hasattr(problem, "exponent_error") or problem.ranks.size > 1 or result.status in FAILED:
        return 0.0
    units = (float(side.weight.max()) ** (side.kind.degree - 1) for side in problem.sides)
    stiff = max(side.largest_soft_rho * unit for side, unit in zip(problem.sides, units, strict=True)) / problem.reg
    idle = problem.idle_points(*problem.exponents(*result.own_logs))
    return float(problem.exponent_error(*result.own_logs, idle) * (1 + math.sqrt(stiff)))


def value_known(result: Any) -> str:
    """Say that the value is already accurate if the gap is small, for users who do not need the plan."""
    if result.trace:
        dual = result.trace[-1].dual
    else:
        dual = 0.0
    if 0 < abs(dual) < math.inf:
        relative = result.gap / abs(dual)
    else:
        relative = math.inf
    if not relative <= VALUE_KNOWN:
        return ""
    return f"; the value is certified to {relative:.1e} of itself: where that is enough, stop by tol_gap instead"


def warn_not_converged(text: str) -> None:
    """Issue one ConvergenceWarning at the caller's line, unless the caller reports it itself."""
    if not MUTED.get():
        warn(text, ConvergenceWarning)
