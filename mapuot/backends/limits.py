"""What every backend tells its kernels of a solve (mapuot_limits in src_c/common/record.h), and where one begins.

The numbers are stated in src_c/limits.c; here the members of a problem and of the options go into its arguments.
"""

from __future__ import annotations

import math
from typing import Any

from .._core import ffi, lib
from .contract import Options

STORAGES = ("float64", "float32", "bfloat16")  # mapuot_dtype, in order
START = {"best_dual": -math.inf, "progress_dual": -math.inf, "best_error": math.inf, "kappa": 1.0}


def fill(limits: Any, problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> None:
    """The record of one problem or a batch; ``noise``: of float32 passes in a marginal; reg: not its own."""
    rows, cols = problem.rows, problem.cols
    rates = (math.nan if rho is None else rho for rho in (rows.scalar_rho, cols.scalar_rho))
    terms = ffi.new(
        "mapuot_terms *",
        (
            problem.reg if reg is None else reg, *rates, max(rows.largest_soft_rho, cols.largest_soft_rho), noise,
            options.tol, options.tol_gap, options.translate, options.memory, options.in_place, STORAGES.index(dtype),
        ),
    )  # fmt: skip
    lib.mapuot_limits_of(terms, ffi.addressof(limits))


def limits_of(problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> dict[str, float]:
    """The same by name."""
    limits = ffi.new("mapuot_limits *")
    fill(limits[0], problem, options, dtype, noise, reg)
    return {name: getattr(limits, name) for name, _ in ffi.typeof("mapuot_limits").fields}
