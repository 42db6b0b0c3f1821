"""Derivatives of the plan itself by costs and masses, by the implicit function theorem.

With the reference a b^T the plan is P_ij = a_i b_j e^((f_i + g_j - M_ij) / reg), and its potentials f and g satisfy
r = a e^(-f / rho1) and s = b e^(-g / rho2). For a function L of the plan with G_ij = dL/dP_ij and W = G o P
(entrywise), the system of curvature.py gives all slopes:

    (1 + reg / rho1) r p + P q = W 1,        P^T p + (1 + reg / rho2) s q = W^T 1
    dL/dM_ij = (P_ij (p_i + q_j) - W_ij) / reg,    dL/da_i = (1 + reg / rho1) e^(-f_i / rho1) p_i,    dL/db alike

Where a_i = 0 the first equation is divided by r_i; its right side is the mean of G_ij - q_j over the shares of row i.
"""

from typing import Any

import numpy as np

from .. import penalties
from ..arrays import host
from ..penalties import F64
from .curvature import potentials_moved
from .slopes import rho_of

TOL, MOST_STEPS = 1e-9, 2000  # tolerance and most steps of the conjugate gradients


def plan_slopes(result: Any, weights: F64) -> tuple[F64, F64, F64]:
    """Return the slopes of ``sum_ij weights_ij P_ij`` by a, b and M for one `Result` with a dense M.

    ``weights``: (m, n), constant. Both sides must be KL or balanced with one reg_m each, and the reference a b^T.
    """
    reg = result.problem.reg
    P = host(result.plan).astype(np.float64)
    W = weights * P
    p, q = potentials_moved(result, W.sum(1), W.sum(0), False, TOL, MOST_STEPS, "the gradient of the plan")
    by_cost = (P * (p[:, None] + q) - W) / reg
    return slope_of_side(result, True, weights, p, q), slope_of_side(result, False, weights.T, q, p), by_cost


def slope_of_side(result: Any, rows: bool, weights: F64, own: F64, other: F64) -> F64:
    """Return (1 + reg / rho) e^(-f / rho) p of one side; ``own``: p, valid at the points with mass only."""
    p = result.problem
    side = p.rows if rows else p.cols
    rho = rho_of(side)
    empty = ~(host(side.weight) > 0)
    stiff = 1 + p.reg / rho
    if empty.any():
        shares, _ = conditional(result, rows, empty)
        own = own.copy()
        own[empty] = (shares * (weights[empty] - other)).sum(1) / stiff
    return np.asarray(stiff * np.exp(-potential_of_side(result, rows) / rho) * own)


def conditional(result: Any, rows: bool, which: Any) -> tuple[F64, F64]:
    """Return the conditional plan of some points, (k, n), and log sum_j b_j e^(y_j - M_ij / reg), (k,).

    A point without an allowed pair has 0 and -inf.
    """
    p = result.problem
    if rows:
        M = p.M
        log = result.own_logs[1]
        weight = p.cols.weight
    else:
        M = p.M.T
        log = result.own_logs[0]
        weight = p.rows.weight
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.where(host(weight) > 0, host(log) + np.log(host(weight)), -np.inf)
        exponents = exponents - host(M)[which].astype(np.float64) / p.reg
        most = exponents.max(1, keepdims=True)
        shares = np.exp(exponents - np.where(np.isfinite(most), most, 0.0))
        total = shares.sum(1, keepdims=True)
        return np.where(total > 0, shares / total, 0.0), (most + np.log(total))[:, 0]


def potential_of_side(result: Any, rows: bool) -> F64:
    """Return f or g; where the mass is 0, compute it by the fixed-point equation."""
    p = result.problem
    side = p.rows if rows else p.cols
    f = host(result.f if rows else result.g)
    empty = ~(host(side.weight) > 0)
    if empty.any():
        f = f.copy()
        log_sum = conditional(result, rows, empty)[1] + p.translations[rows]
        f[empty] = p.cost_constants[not rows] - p.reg / (1 + p.reg / rho_of(side)) * log_sum
    return np.asarray(f)


def value_slopes(result: Any) -> tuple[F64, F64, F64]:
    """Return the slopes of the objective by a, b and M (slopes.py) for one `Result` with a dense M."""
    p = result.problem
    by_a, by_b = (
        penalties.mass_slope(potential_of_side(result, rows), rho_of(side), p.reg, other.mass)
        for rows, side, other in ((True, p.rows, p.cols), (False, p.cols, p.rows))
    )
    return by_a, by_b, host(result.plan).astype(np.float64)
