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
from ..penalties import F64
from ..problem.problem import EXPONENT_ROUNDING
from ..status import FAILED
from .batch_plan import BatchPlan

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
    out_u, out_v = outside(p)
    x = started(host(result.own_logs[1]) + p.translations[1], out_v)
    alpha = np.where(out_u, -np.inf, 0.0)
    top = operator.balance(alpha, x)
    return value_of_potentials(p, (reg * alpha, reg * (x - top)), reg * x)


def outside(p: Any) -> list[Any]:
    """Return the points of both sides that the problem without entropy leaves out; c plays no part."""
    return [side.left_out(np.zeros(len(side.weight))) for side in (p.rows, p.cols)]


def started(log_v: F64, out: Any) -> F64:
    """Return log v where the column takes part, 0 where it is not known, -inf elsewhere."""
    return np.where(out, -np.inf, np.where(np.isfinite(log_v), log_v, 0.0))


def value_of_potentials(p: Any, potentials: Any, start: F64) -> float:
    """Return the dual value without entropy of (f, g), less a bound on its rounding; ``start``: g before."""
    largest_log = np.abs(np.concatenate([y[np.isfinite(y)] for y in (potentials[0], start)])).max(initial=0.0)
    largest = max(abs(p.M_min), abs(p.M_max))
    slack = 2 * EXPONENT_ROUNDING * (2 * largest_log + largest) + p.cost.error(p.M_max)
    low = size = 0.0
    for side, y, out in zip((p.rows, p.cols), potentials, outside(p), strict=True):
        f = np.where(out, -np.inf, y - slack)
        term = penalties.dual_term(side.penalty, f, side.weight, side.rho, side.upper)
        low = low + float(term.sum())
        size = size + float(np.abs(term).sum())
    low += p.least_lift - ROUNDING * size
    return -np.inf if np.isnan(low) else low


def highest(result: Any) -> float:
    """Return the plan's objective without entropy; inf if a side is hard, since the plan may miss its marginal."""
    if result.problem.rows.demands or result.problem.cols.demands:
        return np.inf
    mass, sides = result._values()
    return value_of_plan(result.problem, float(result.cost), mass, sides)


def value_of_plan(p: Any, cost: float, mass: float, sides: Any) -> float:
    """Return the objective without entropy of a plan; ``sides``: (side, weight, _, marginal) of both."""
    size = cost
    size = abs(size) + 2 * max(0.0, -p.M_min) * mass
    for side, t, _, r in sides:
        term = penalties.divergence(side.penalty, r, t, side.rho, side.upper)
        cost += float(term.sum())
        size += float(np.abs(term).sum())
    cost += ROUNDING * size + p.cost.error(p.M_max) * mass
    return np.inf if np.isnan(cost) else cost


def bounds_of_batch(result: Any) -> tuple[F64, F64]:
    """Return `unregularised_bounds` of all problems of a batch, (p,) each."""
    problem = result.problem
    p = len(problem)
    plan = BatchPlan(result)
    out = [left_out_of_batch(problem, axis) for axis in (0, 1)]
    log_v = host(result.own_logs[1]) + np.reshape(problem.translations[1], (-1, 1))
    start = np.reshape(problem.regs, (-1, 1)) * started(log_v, out[1])
    f, g, is_computed = plan.transforms(start, *out)
    cost = result.cost
    known = result._sums.known
    low = np.full(p, -np.inf)
    high = np.full(p, np.inf)
    for i in np.flatnonzero(~np.isin(result.status, FAILED)):
        one = problem[i]
        m, n = one.shape
        sides = (one.rows, one.rows.weight, None, known.r[i, :m]), (one.cols, one.cols.weight, None, known.s[i, :n])
        with np.errstate(invalid="ignore", over="ignore"):
            if is_computed[i]:
                low[i] = value_of_potentials(one, (f[i, :m], g[i, :n]), start[i, :n])
            else:
                low[i] = lowest(result[i])
            if not (one.rows.demands or one.cols.demands):
                high[i] = value_of_plan(one, cost[i], float(known.mass[i]), sides)
    return low, high


def left_out_of_batch(problem: Any, axis: int) -> Any:
    """Return the points of one side of a batch that the problem without entropy leaves out, padding among them."""
    if axis == 0:
        side, weight = problem.rows, host(problem.A)
    else:
        side, weight = problem.cols, host(problem.B)
    out = (weight == 0) & side.kind.strict
    if problem.several:
        out |= ~problem.several.inside(axis)
    return out
