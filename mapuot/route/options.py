"""Make the options that a workspace reads from the arguments of a user (method, precision, tol)."""

import dataclasses
from typing import Any

import numpy as np

from ..contract import ANDERSON_DEPTHS, SMALL_ENTRIES, Options
from ..problem.validate import as_pair, as_positive, as_threads

METHODS = {  # name: (translation, Anderson depth, in place)
    "auto": (True, ANDERSON_DEPTHS[1], False),
    "translation_invariant": (True, 0, False),
    "sinkhorn": (False, 0, False),
    "map-uot": (False, 0, True),
}
PRECISIONS = {"float64": "float64", "mixed": "float32"}
SCHEDULES = "auto", "static"
# Relative mass that balanced columns may miss if only the value is wanted. 8 clouds of 256 points in 4
# dimensions at blur .05 take 400 passes, and 4300 passes at 1e-6; the values differ by 4e-9, relative. The plan would
# take 36,000 products of Newton's steps.
VALUE_TOL_GAP = 1e-5
MIXED_TOL = 5e-7  # a float32 K cannot certify less: its rounding alone accounts for 3 * 2^-24


def options_of_value(options: dict[str, Any], reg_m: Any) -> dict[str, Any]:
    """Return the options of a solve for the value and its derivatives only.

    Between balanced sides, rounding may keep the plan from its tolerance while the value and its derivatives are known.
    Columns may then miss b by ``tol_gap``, relative; the value and derivatives are exact for the masses that are met.
    """
    if np.ndim(reg_m) == 2 or (np.ndim(reg_m) == 1 and len(reg_m) > 2):  # of each problem
        rhos: Any = [reg_m]
    else:
        rhos = as_pair(reg_m, "reg_m")
    if options.get("tol_gap") is not None or not all(np.isinf(rho).all() for rho in rhos):
        return options
    return options | {"tol_gap": min(VALUE_TOL_GAP, 10 * as_positive(options.get("tol", 1e-6), "tol"))}


def make_options(
    method: str, precision: str, tol: Any, tol_gap: Any, threads: Any, schedule: str = "auto", made: bool = False
) -> Options:
    """Make the options of a solve; ``made``: no K is stored, so float32 does not limit the accuracy."""
    translate, depth, in_place = METHODS[method]
    tol = as_positive(tol, "tol")
    if tol_gap is None:
        tol_gap = -1.0
    else:
        tol_gap = as_positive(tol_gap, "tol_gap")
    if precision == "auto":  # map-uot rounds the plan in every pass
        if made or (tol >= MIXED_TOL and not in_place):
            precision = "mixed"
        else:
            precision = "float64"
    return Options(translate, depth, in_place, PRECISIONS[precision], tol, tol_gap, as_threads(threads), schedule)


def options_alone(options: Options, precision: str, entries: int) -> Options:
    """Return the options of a problem that its batch could not solve: one thread, float64 if K fits the cache."""
    small = precision == "auto" and entries <= SMALL_ENTRIES
    return dataclasses.replace(options, threads=1, precision="float64" if small else options.precision)


def nearer_options(options: Options, precision: str, method: str) -> str:
    """Name the options that may lower the error of a stalled solve; "auto" has tried all of them."""
    found = []
    if precision not in ("auto", "float64") and options.precision != "float64":
        found.append("precision='float64'")
    if METHODS[method][1] == 0:
        found.append("method='auto', which makes Newton's steps")
    return " and ".join(found)
