"""POT's `mm_unbalanced`, unbalanced transport without entropy, by proximal steps of the entropic solver, certified.

    P_k+1 = argmin <P, M> + eps_k KL(P | P_k) + rho_1 KL(P 1 | a) + rho_2 KL(P^T 1 | b)

Each step is a solve with the previous plan as reference measure; eps falls, and the plans converge to an optimal plan.
The certificate belongs to the problem without entropy: f = -rho log(P 1 / a) and its transforms g_j = min_i M_ij - f_i,
f_i = min_j M_ij - g_j are feasible for the dual. Its value is rho sum a (1 - e^(-f / rho)) plus the same term for g.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike, MarginalPenalty
from ..api.solve import solve
from ..arrays import namespace
from ..errors import ConvergenceWarning, warn
from ..problem.validate import as_array, as_choice, as_count, as_float, as_pair, as_positive
from ..status import FAILED
from .arrays import give, to_array
from .sinkhorn import muted

FIRST_STEP, FALL, LAST = 0.05, 0.5, 2e-4  # eps in units of the costs: first, factor, last
STEP_TOL = 1e-4  # tolerance of the plan of a step
LEAST_GAP = 1e-12  # smallest gap that stopThr can ask for


class BoundedPlan(NamedTuple):
    """A plan, potentials feasible for the dual, and both values."""

    plan: Any
    f: Any
    g: Any
    primal: float
    dual: float

    @property
    def gap(self) -> float:
        return max(0.0, self.primal - self.dual)


def mm_unbalanced(
    a: ArrayLike,
    b: ArrayLike,
    M: CostLike,
    reg_m: MarginalPenalty,
    c: ArrayLike | None = None,
    reg: float = 0,
    div: str = "kl",
    G0: ArrayLike | None = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Compute an unbalanced transport plan without entropy, with a certificate: ``ot.unbalanced.mm_unbalanced``.

    ``min_P <P, M> + reg_m[0] KL(P 1 | a) + reg_m[1] KL(P^T 1 | b) + reg KL(P | c)``

    Parameters
    ----------
    a, b, M, reg_m
        As in `mapuot.pot.sinkhorn_unbalanced`, for one dense M, in which inf forbids a pair, and finite reg_m.
    c, reg : (m, n) array, float >= 0
        A positive reg makes it the entropic problem of `mapuot.solve` with reference c (default a b^T) and tol stopThr.
    div, G0 : {"kl"}; array, optional
        div: the penalty; POT's own function also has "l2". G0: POT's starting plan, not needed for a convex problem.
    numItermax, stopThr : int, float
        Largest number of steps; a step does more work than an iteration of POT. stopThr is the certified gap to reach,
        ``primal - dual <= stopThr * primal``; in POT it is a change of the plan.
    verbose, log : bool
        Show a progress bar (for positive reg only); return the log, too.

    Returns
    -------
    plan : (m, n) array in M's dtype
        For float32 the log describes the plan before rounding.
    log : dict
        Only with ``log=True``. cost: ``<P, M>``. total_cost: the objective, at most ``gap`` above the optimum. f, g:
        potentials with ``f_i + g_j <= M_ij`` (for reg > 0, the potentials of the entropic problem).

    Warns
    -----
    ConvergenceWarning
        stopThr was not reached.

    See Also
    --------
    mapuot.solve : with entropy

    Examples
    --------
    >>> import mapuot
    >>> plan, log = mapuot.pot.mm_unbalanced([0.5, 0.5], [0.5, 0.5], [[1.0, 36.0], [9.0, 4.0]], 5.0, log=True)
    >>> plan.round(2)
    array([[0.45, 0.  ],
           [0.  , 0.34]])
    >>> log["gap"] <= 1e-6 * log["total_cost"]
    True
    """
    as_choice(div, "div", ("kl",))
    costs = to_array(M, "M")
    if namespace(costs) is np:
        costs = as_array(costs, "M")
    xp = namespace(costs)
    if costs.dtype.kind == "f":
        dtype = costs.dtype
    else:
        dtype = np.float64
    masses = []
    given: tuple[Any, Any] = (a, b)
    for x, k, name in zip(given, costs.shape, "ab", strict=True):
        if x is None or len(x) == 0:
            masses.append(xp.full(k, 1 / k))
        else:
            masses.append(xp.asarray(to_array(x, name), np.float64))
    a, b = masses
    rho = tuple(as_positive(x, "reg_m") for x in as_pair(reg_m, "reg_m"))
    tol = as_positive(stopThr, "stopThr")
    most = as_count(numItermax, "numItermax")
    epsilon = as_float(reg, "reg")
    if epsilon:
        if c is None:
            kind = "product"
        else:
            kind = to_array(c, "c")
        result = solve(costs, a, b, reg=epsilon, reg_m=rho, reference=kind, tol=tol, progress=bool(verbose))
        found = BoundedPlan(result.plan, result.f, result.g, result.objective, result.dual)
        cost = result.cost
    else:
        found = steps(xp.asarray(costs, np.float64), a, b, rho, max(tol, LEAST_GAP), most)
        cost = float(paid(found.plan, costs))
    plan = give(found.plan.astype(dtype, copy=False), M)
    values = {"cost": cost, "total_cost": found.primal, "gap": found.gap}
    if log:
        return plan, values | {"f": give(found.f, M), "g": give(found.g, M)}
    return plan


def steps(M: Any, a: Any, b: Any, rho: Any, tol: float, most: int) -> BoundedPlan:
    """Take steps until the gap is small; return the best plan."""
    xp = namespace(M)
    finite = M[xp.isfinite(M)]
    unit = min(float(abs(finite).mean()) if finite.size else 1.0, *rho) or 1.0
    best = None
    plan = a[:, None] * b
    eps = FIRST_STEP * unit
    zeros = np.zeros(M.shape[0]), np.zeros(M.shape[1])
    for k in range(most):
        with muted():
            result = solve(
                M, a, b, reg=eps, reg_m=rho, reference=plan, tol=STEP_TOL, precision="float64",
                warm_start=zeros if k else None,
            )  # fmt: skip
        if result.status in FAILED and best is not None:
            break
        plan = result.plan
        eps = max(FALL * eps, LAST * unit)
        state = certified(plan, M, a, b, rho)
        if best is None or state.gap < best.gap:
            best = state
        if best.gap <= tol * abs(best.primal):
            return best
    assert best is not None
    if best.primal:
        share = best.gap / abs(best.primal)
    else:
        share = math.inf
    warn(f"mm_unbalanced not converged: gap {share:.1e} > stopThr {tol:.1e}; raise numItermax", ConvergenceWarning)
    return best


def certified(plan: Any, M: Any, a: Any, b: Any, rho: Any) -> BoundedPlan:
    xp = namespace(M)
    r = plan.sum(1)
    s = plan.sum(0)
    allowed = xp.isfinite(M)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        f = xp.where(r > 0, -rho[0] * xp.log(r / a), -np.inf)  # rows without mass do not constrain columns
        g = xp.where(allowed, M - f[:, None], np.inf).min(0)  # the largest feasible potential
        f = xp.where(allowed, M - g, np.inf).min(1)
        duals = (t * (x * -xp.expm1(-y / t))[x > 0].sum() for t, x, y in zip(rho, (a, b), (f, g), strict=True))
        primal = paid(plan, M) + sum(t * divergence(x, y) for t, x, y in zip(rho, (r, s), (a, b), strict=True))
        return BoundedPlan(plan, f, g, float(primal), float(sum(duals)))


def paid(plan: Any, M: Any) -> Any:
    """Return <P, M>; a forbidden pair without mass costs 0."""
    xp = namespace(M)
    return (plan * xp.where(plan > 0, M, 0.0)).sum()


def divergence(p: Any, q: Any) -> Any:
    xp = namespace(p)
    used = p > 0
    return xp.where(used, p * xp.log(xp.where(used, p, 1.0) / xp.where(used, q, 1.0)), 0.0).sum() - p.sum() + q.sum()
