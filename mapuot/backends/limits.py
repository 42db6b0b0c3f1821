"""What every backend tells its kernels of a solve (mapuot_limits in src_c/common/record.h), and where one begins.

The numbers are stated in src_c/limits.c; here the members of a problem and of the options go into its arguments.
"""

from __future__ import annotations

import math
from typing import Any

from .._core import ffi, lib
from .contract import Options

STORAGES = ("float64", "float32", "bfloat16")  # mapuot_dtype, in order
MEMORY = 5, 20  # Anderson differences where they cost time beside a pass, and where they do not
START = {"best_dual": -math.inf, "progress_dual": -math.inf, "best_error": math.inf, "kappa": 1.0}


def fill(limits: Any, problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> None:
    """The record of one problem or a batch; ``noise``: of float32 passes in a marginal; reg: not its own."""
    sides = problem.rows, problem.cols
    rates = (math.nan if side.scalar_rho is None else side.scalar_rho for side in sides)
    largest = {"rho_kl": 0.0, "rho_tv": 0.0, "rho_l2": 0.0}
    for side in sides:
        kind = "rho_kl" if side.logarithmic else f"rho_{side.penalty}"
        if kind in largest:
            largest[kind] += side.largest_soft_rho
    hard = sum(side.penalty == "range" or side.rho_range[1] == math.inf for side in sides)
    terms = ffi.new(
        "mapuot_terms *",
        (
            problem.reg if reg is None else reg, *rates, max(side.largest_soft_rho for side in sides),
            *largest.values(), hard, noise, options.tol, options.tol_gap, options.translate, options.memory,
            options.in_place, STORAGES.index(dtype),
        ),
    )  # fmt: skip
    lib.mapuot_limits_of(terms, ffi.addressof(limits))


def limits_of(problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> dict[str, float]:
    """The same by name."""
    limits = ffi.new("mapuot_limits *")
    fill(limits[0], problem, options, dtype, noise, reg)
    return {name: getattr(limits, name) for name, _ in ffi.typeof("mapuot_limits").fields}


def memory_of(most: int, m: int, itemsize: int) -> int:
    """Anderson differences for a K of m rows: d of them move 16 d bytes a column, at most a tenth of what K does."""
    least, deepest = MEMORY
    return min(most, max(least, min(deepest, m * itemsize // 160)))
