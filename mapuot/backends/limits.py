"""Limits that every backend gives its kernels (mapuot_limits of src_c/common/record.h).

src_c/limits.c states the numbers; this module fills its arguments from a problem and its options.
"""

import math
from typing import Any

import numpy as np

from .._core import ffi, lib
from ..contract import Options
from .records import COMMON

STORAGES = ("float64", "float32")  # mapuot_dtype, in order


def fill(limits: Any, problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> None:
    """Fill the limits of one problem or a batch.

    ``noise``: the error of a marginal in float32 passes; ``reg``: replaces the problem's own reg.
    """
    rows, cols = problem.rows, problem.cols
    soft = dict.fromkeys(("kl", "tv", "l2", None), 0.0)
    hard_sides = 0
    for side in (rows, cols):
        soft[side.kind.rounds] += side.largest_soft_rho
        hard_sides += side.penalty == "range" or side.rho_range[1] == math.inf
    path = 2.0 * min(rows.n_points, cols.n_points)
    missed = 1.0
    if options.last and cols.demands and not problem.misses:
        missed = path
    elif options.by_paths and problem.misses:
        missed = path / 2 if rows.rho_range[0] == math.inf else path  # if all is hard, what is missed ends both ways
    terms = ffi.new(
        "mapuot_terms *",
        (
            problem.reg if reg is None else reg, math.nan if rows.scalar_rho is None else rows.scalar_rho,
            math.nan if cols.scalar_rho is None else cols.scalar_rho, max(rows.largest_soft_rho, cols.largest_soft_rho),
            soft["kl"], soft["tv"], soft["l2"], hard_sides, noise,
            options.tol, options.tol_gap, options.translate, options.anderson_depth, options.in_place,
            STORAGES.index(dtype),
            path * cols.kind.kinks, missed, options.symmetric,
        ),
    )  # fmt: skip
    lib.mapuot_limits_of(terms, ffi.addressof(limits))


def limits_of(problem: Any, options: Options, dtype: str, noise: float, reg: float | None = None) -> Any:
    limits = ffi.new("mapuot_limits *")
    fill(limits[0], problem, options, dtype, noise, reg)
    return np.frombuffer(ffi.buffer(limits), COMMON["mapuot_limits"])[0]
