"""Bounds on the optimal value of the problem without entropy, from a plan with entropy.

    f_i = min_j (M_ij - g_j),   then g_j = min_i (M_ij - f_i):   f_i + g_j <= M_ij for all pairs

This (f, g) is feasible for the dual without entropy and is computed from any g by one read of M; its value is a lower
bound. The plan is feasible for the primal without entropy, unless hard marginals miss their masses; its objective
without the entropy term is an upper bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import penalties
from ..arrays import host
from ..problem.problem import EXPONENT_ROUNDING
from ..status import FAILED

ROUNDING = 2.0**-50  # relative rounding of a sum's terms: 8 roundings


def unregularised_bounds(result: Any) -> tuple[float, float]:
    """Bound the optimal value of the problem without entropy, from below and from above.

    The problem without entropy has the same cost, masses and penalties, and ``reg = 0``; it allows pairs that the
    reference forbids. Both bounds hold for every answer; they are close if ``reg * mass * log(n)`` is small relative to
    the value. M is read twice. `mapuot.pot.mm_unbalanced` solves the problem without entropy.

    Returns
    -------
    low, high : float
        In units of the objective. ``high`` is inf if a side is hard, since the plan may miss its marginal. ``low`` may
        be -inf if a side with penalty "tv" or "l2" has points of mass 0: only the plan without entropy may use these.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = (np.linspace(0, 1, 50)[:, None] - np.linspace(0.1, 1.2, 40)) ** 2
    >>> for reg in (1e-2, 1e-4, 1e-6):
    ...     low, high = mapuot.solve(M, reg=reg, reg_m=1.0).unregularised_bounds()
    ...     print(f"{low:.6f} to {high:.6f}")
    0.017260 to 0.022044
    0.017447 to 0.017461
    0.017460 to 0.017460
    """
    if result.problem.ranks.size > 1:
        raise NotImplementedError("unregularised_bounds is for one process: gather M and solve there")
    if result.status in FAILED:
        return -np.inf, np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        return lowest(result), highest(result)


def lowest(result: Any) -> float:
    """Return the dual value without entropy of the point (f, g) that is computed from g."""
    p, reg = result.problem, result.problem.reg
    operator = result._backend.operator_of(p.cost, reg, None, p.ranks, result._threads)
    # points that the problem without entropy leaves out: c, which may forbid more, plays no part
    out_u, out_v = (side.left_out(np.zeros(len(side.weight))) for side in (p.rows, p.cols))
    log_v = host(result.own_logs[1])
    x = np.where(out_v, -np.inf, np.where(np.isfinite(log_v), log_v, 0.0))
    alpha = np.where(out_u, -np.inf, 0.0)
    top = operator.balance(alpha, x)
    known = np.abs(np.concatenate([y[np.isfinite(y)] for y in (alpha, x)])).max(initial=0.0)
    largest = max(abs(p.M_min), abs(p.M_max))
    slack = 2 * EXPONENT_ROUNDING * (2 * known + largest / reg) * reg + p.cost.error(p.M_max)
    low = size = 0.0
    for side, y, out in ((p.rows, alpha, out_u), (p.cols, x - top, out_v)):
        f = np.where(out, -np.inf, reg * y - slack)
        term = penalties.dual_term(side.penalty, f, side.weight, side.rho, side.upper)
        low = low + float(term.sum())
        size = size + float(np.abs(term).sum())
    low += p.least_lift - ROUNDING * size
    return -np.inf if np.isnan(low) else low


def highest(result: Any) -> float:
    """Return the plan's objective without entropy; inf if a side is hard, since the plan may miss its marginal."""
    p = result.problem
    if p.rows.demands or p.cols.demands:
        return np.inf
    mass, sides = result._values()
    cost = size = float(result.cost)
    size = abs(size) + 2 * max(0.0, -p.M_min) * mass
    for side, t, _, r in sides:
        term = penalties.divergence(side.penalty, r, t, side.rho, side.upper)
        cost += float(term.sum())
        size += float(np.abs(term).sum())
    cost += ROUNDING * size + p.cost.error(p.M_max) * mass
    return np.inf if np.isnan(cost) else cost
