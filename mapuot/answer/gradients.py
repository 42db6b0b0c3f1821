"""Derivatives of the loss by its masses, from the potentials; what `mapuot.torch` and `mapuot.jax` share.

The value is the dual optimum W(a, b, M) of `solve` with the reference a b^T. By the envelope theorem, with potentials
f and g, |.| the mass and P the plan (rho = inf: e^(-f / rho) = 1, rho (1 - e^(-f / rho)) = f):

    dW/da_i = rho1 (1 - e^(-f_i / rho1)) + reg (|b| - e^(-f_i / rho1)),    dW/db alike,    dW/dM = P

The second term is that of the reference: a_i is in c = a b^T, and sum_j P_ij / a_i = e^(-f_i / rho1). Where a_i = 0 the
potential is continued by its fixed point, f_i = -reg fi1 log sum_j b_j e^((g_j - M_ij) / reg). Of a masked problem,
whose reference is a_i b_j w_ij, sum_j w_ij b_j stands for |b|, and w_ij b_j for b_j.
Sources: Feydy et al. 2019, Sejourne et al. 2019.
"""

from typing import Any

import numpy as np

from ..api.batch import BatchResult
from ..api.log_matmul import log_matmul
from ..backends import namespace
from ..penalties import mass_slope
from ..problem.problem import BatchProblem
from ..problem.sparse import log_sums
from .result import Result


def dual_value(result: BatchResult | Result) -> Any:
    """Return the dual values, (p,) or one; `Result.dual` takes off a bound of their rounding, which jumps."""
    problem, xp = result.problem, namespace(result.log_u)
    A, B = (problem.A, problem.B) if isinstance(problem, BatchProblem) else (problem.rows.weight, problem.cols.weight)
    if xp is not np and isinstance(result, BatchResult) and isinstance(problem.reference, str):
        return problem.reg * (problem.c_mass - result.mass) + result._closed[0]
    total = problem.reg * (xp.asarray(problem.c_mass) - xp.asarray(result.mass))
    for side, weight, f in ((problem.rows, A, result.f), (problem.cols, B, result.g)):
        rho = float(side.rho[0])
        with np.errstate(over="ignore", invalid="ignore"):
            term = weight * f if np.isinf(rho) else -rho * (weight * xp.expm1(-f / rho))
        total = total + xp.where(weight > 0, term, 0.0).sum(-1)
    return total


def marginal_gradient(result: BatchResult | Result, name: str) -> Any:
    """Return dW/da (name "rows") or dW/db ("cols"), (p, m) or (p, n), or (m,) or (n,) of one Result with masses > 0."""
    rows = name == "rows"
    if isinstance(result, Result):
        one = result.problem
        own, across = one.sides if rows else one.sides[::-1]
        return mass_slope(result.f if rows else result.g, float(own.rho[0]), one.reg, across.mass)
    problem = result.problem
    side, other = (problem.rows, problem.B) if rows else (problem.cols, problem.A)
    mass = other.sum(1)[:, None] if problem.masked is None else problem.shares(result._backend, other.T, rows).T
    return mass_slope(continued(result, rows), float(side.rho[0]), problem.reg, mass)


def continued(result: BatchResult, rows: bool) -> Any:
    """Return f (or g) at every point; where the weight is 0 the fixed point gives it."""
    p = result.problem
    f, side, weight = (result.f, p.rows, p.A) if rows else (result.g, p.cols, p.B)
    log_v, other = (result.log_v, p.B) if rows else (result.log_u, p.A)
    if (weight > 0).all():
        return f
    xp, rho = namespace(weight), float(side.rho[0])
    fi = 1.0 if np.isinf(rho) else 1 / (1 + p.reg / rho)
    with np.errstate(divide="ignore"):
        log_w = xp.where(other > 0, log_v + xp.log(other), -np.inf)
    if p.cost.operator == "pairs":
        costs = p.cost if rows else p.cost.transpose()
        log_s = np.stack([log_sums(costs.of(i), x, p.reg) for i, x in enumerate(log_w)])
        return np.where(weight > 0, f, -p.reg * fi * log_s)
    cost = xp.asarray(p.M if rows else p.M.swapaxes(-1, -2), dtype=np.float64) / -p.reg
    if p.masked is not None:
        with np.errstate(divide="ignore"):
            cost = cost + xp.asarray(np.log(np.asarray(p.masked if rows else p.masked.T)))
    log_s = log_matmul(cost, log_w.T).T if cost.ndim == 2 else log_matmul(cost, log_w[:, :, None])[:, :, 0]
    return xp.where(weight > 0, f, -p.reg * fi * log_s)
