"""The rules of a pass, by the C library, for drivers that make passes outside it.

src_c/common/rules.h states each rule once: the guard that drops a step, the certificate, when a solve may end, when it
has stalled. A driver that makes its own passes fills the records of these rules and calls them. The C library is loaded
at the first call, so that importing this module does not need it.
"""

import math
from functools import cache
from typing import Any

from ..contract import Stats
from .records import STATUS, put

NEUTRAL = {"tol_gap": -1.0, "scale_limit": math.inf, "most_scale": math.inf, "flush_tol": math.inf}
START = {"best_dual": -math.inf, "progress_dual": -math.inf, "best_error": math.inf, "kappa": 1.0}


@cache
def core() -> tuple[Any, Any]:
    from .._core import ffi, lib  # noqa: PLC0415 - import mapuot does not need it

    return ffi, lib


def plan_error(d: float) -> float:
    """Bound |P - P*|_1 / mass, where ``d = gap / (reg mass)``."""
    return float(core()[1].mapuot_plan_error(d))


class Judge:
    """The records that the rules work on, for one solve.

    ``limits`` names members of mapuot_limits: ``tol``, ``tol_gap`` (-1: none), ``dual_scale``, ``memory`` and so on.
    The caller may change ``progress`` and ``limits`` between passes; the rules read and write both.
    """

    def __init__(self, **limits: float) -> None:
        ffi = core()[0]
        self.limits = ffi.new("mapuot_limits *")
        self.progress = ffi.new("mapuot_progress *")
        self.stats = ffi.new("mapuot_stats *")
        put(self.limits, NEUTRAL | limits)
        put(self.progress, START)

    def settle(self, dual: float, mass: float) -> bool:
        """Tell whether the guard drops the extrapolated step that led to this state.

        Afterwards ``progress.step`` and ``progress.extrapolated`` tell how to choose the next state.
        """
        put(self.stats, {"dual": dual, "mass": mass})
        core()[1].mapuot_settle(self.limits, self.progress, self.stats)
        return bool(self.stats.rejected > 0)

    def judge(self, stat: Stats) -> str:
        """Set and return the status after a pass; a sum outside the range of float64 voids the certificate.

        The rules treat K as fresh: a mass that underflows ends the solve.
        """
        self.read(stat)
        self.progress.since_absorb = 0
        status = core()[1].mapuot_judge(self.limits, self.progress, self.stats, 1.0, 1.0)
        self.write(stat)
        stat.status = STATUS[status]
        return stat.status

    def again(self, stat: Stats, extra_error: float, extra_gap: float, moved: float) -> bool:
        """Add errors that were found after `judge` to the numbers of a pass; tell whether the solve may still end.

        ``moved``: how far rounding may have moved the dual value of the pass, mapuot_progress.moved.
        """
        put(self.limits, {"extra_error": extra_error, "extra_gap": extra_gap})
        self.progress.moved = moved
        self.read(stat)
        enough = core()[1].mapuot_judge_again(self.limits, self.progress, self.stats)
        self.write(stat)
        return bool(enough)

    def read(self, stat: Stats) -> None:
        """Copy the numbers of a pass into the record."""
        for name in ("gap", "error", "dual", "mass", "residual", "rejected"):
            setattr(self.stats, name, getattr(stat, name))

    def write(self, stat: Stats) -> None:
        """Copy the numbers that a rule may change back from the record."""
        for name in ("gap", "error", "dual", "mass"):
            setattr(stat, name, getattr(self.stats, name))
