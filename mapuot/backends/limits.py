"""What every backend tells its kernels of a solve (mapuot_limits in src_c/common/record.h), and where one begins."""

from __future__ import annotations

import math
from typing import Any

from .contract import Options

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9}
FLUSH_LOG = {"float64": -708.0, "float32": -87.3, "bfloat16": -87.3}  # entries of K below e^this are zero
MEMORY = 5, 20  # Anderson differences where they cost time beside a pass, and where they do not
START = {"best_dual": -math.inf, "progress_dual": -math.inf, "best_error": math.inf, "kappa": 1.0}


def limits_of(problem: Any, options: Options, dtype: str, reg: float | None = None) -> dict[str, float]:
    """The members that depend on the problem (one or a batch), the options and the storage of K; reg: not its own."""
    reg = problem.reg if reg is None else reg
    rates = problem.rows.scalar_rho, problem.cols.scalar_rho
    k1, k2 = (0.0 if rho is None else reg / rho for rho in rates)
    fi1, fi2 = 1 / (1 + k1), 1 / (1 + k2)
    translate = options.translate and None not in rates and k1 + k2 > 0
    rounding, largest = ROUNDING[dtype], {"rho_kl": 0.0, "rho_tv": 0.0, "rho_l2": 0.0}
    for side in (problem.rows, problem.cols):
        kind = "rho_kl" if side.logarithmic else f"rho_{side.penalty}"
        if kind in largest:
            largest[kind] += side.largest_soft_rho
    hard = sum(side.penalty == "range" or side.rho_range[1] == math.inf for side in (problem.rows, problem.cols))
    return {
        "reg": reg, "inv_reg": 1 / reg, "fi_rows": fi1, "rate_cols": k2,
        "rho_rows": reg / k1 if k1 > 0 else 0.0, "rho_cols": reg / k2 if k2 > 0 else 0.0,
        "lam_rate": 1 / (fi1 * k1 + k2) if translate else 0.0,
        "mu_rate": fi2 / (k1 + fi2 * k2) if translate else 0.0,
        "tol": options.tol, "tol_gap": options.tol_gap, "memory": options.memory, "in_place": options.in_place,
        "storage_error": rounding, "flush": math.exp(FLUSH_LOG[dtype]),
        "flush_tol": max(1e-12, min(1e-8, options.tol / 100)),
        "finer": options.tol < 12 * rounding and not options.in_place and dtype != "float64",
        "hard_sides": hard, **largest,
    }  # fmt: skip


def memory_of(most: int, m: int, itemsize: int) -> int:
    """Anderson differences for a K of m rows: d of them move 16 d bytes a column, at most a tenth of what K does."""
    least, deepest = MEMORY
    return min(most, max(least, min(deepest, m * itemsize // 160)))


def narrow_floor(problem: Any, noise: float) -> float:
    """Certified error that float32 passes still resolve: their noise in a marginal, amplified by sqrt(rho / reg)."""
    largest = max(problem.rows.largest_soft_rho, problem.cols.largest_soft_rho)
    return noise * math.sqrt(1 + largest / problem.reg)
