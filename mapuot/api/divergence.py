"""The debiased unbalanced Sinkhorn divergence between histograms or clouds, one pair or many.

    S(a, b) = OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2 + reg / 2 (|a| - |b|)^2

with OT the value of `solve` for the reference a b^T and |.| the mass. For a symmetric cost with positive definite
exp(-M / reg), for example squared distances, S >= 0, and S = 0 only for a = b. Source: Sejourne, Feydy, Vialard,
Trouve, Peyre, Sinkhorn divergences for unbalanced optimal transport, 2019.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike, MarginalPenalty, MassStatistic
from ..answer.slopes import dual_value
from ..answer.standard_error import error_of_divergence, self_slope
from ..arrays import host, namespace, refuse_other
from ..backends import pick
from ..errors import OF_BATCH, for_value, renamed, shown
from ..problem.clouds import PointCloud
from ..problem.cost import as_vectors
from ..problem.grid import Grid
from ..problem.kinds import as_costs
from ..problem.symmetry import differs
from ..problem.validate import shape_of
from ..route.options import options_of_value
from ..synonyms import REQUIRED, hinted
from .batch import of_problems, solve_batch
from .entry import entry

# why losses and divergences take no scale_mass: their values and slopes are in the unit of the given masses
MASS_CURE = "divide a and b by sqrt(|a| |b|) in the call"


def costs_of(given: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the costs of the arguments of `sinkhorn_divergence` and their masses, for the statistic of the costs."""
    check_options(given, given["reg_m"])
    with renamed(OF_BATCH):
        return of_problems(as_costs(given["M"], pick("auto", given["M"])), given, given["a"], given["b"])


@hinted
@entry(costs=costs_of)
def sinkhorn_divergence(
    M: CostLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: MassStatistic | None = None,
    scale_each: bool = False,
    M_a: CostLike | None = None,
    M_b: CostLike | None = None,
    standard_error: Any = False,
    **options: Any,
) -> Any:
    """Compute the debiased Sinkhorn divergence ``OT(a, b) - (OT(a, a) + OT(b, b)) / 2 + reg / 2 (sum a - sum b)^2``.

    It is 0 for a = b. ``OT(a, a)`` alone is not 0, because entropy blurs the plan.

    Parameters
    ----------
    M : (m, n) or (p, m, n) array, PointCloud or Grid
        Costs between the points of a and the points of b. A PointCloud may hold many pairs of clouds of any sizes.
    a, b : (m,), (n,) or (p, m), (p, n) arrays, optional
        Masses, >= 0; one vector serves all problems of a batch. Default: equal masses that add up to 1.
    reg, reg_m, scale_cost, scale_each
        As in `solve_batch`, for all problems or for each. ``scale_cost`` is taken from M and serves all three values;
        reg_m is the same on both sides.
    M_a, M_b : (m, m), (n, n) arrays, or (p, m, m), (p, n, n), optional
        Costs between the points of a, and between the points of b. A PointCloud computes them. Without M_a and M_b any
        other M must be symmetric, and takes their place.
    standard_error : bool, or pair of integers
        Return the standard error, too, for points that are samples, or for histograms of so many draws: see
        `Result.standard_error`. For equal distributions the divergence is no normal variable: its error is then far
        below the divergence, which is above 0 by chance.
    **options
        Further arguments of `solve_batch`, without reference, mask, penalty, warm_start and scale_mass. If both sides
        are balanced, ``tol_gap`` is 1e-5 by default, or 10 tol if that is less: the value is wanted, not the plan.

    Returns
    -------
    divergence : float, or (p,) array
        In units of M times mass. Each of the three values is at most its ``gap`` below the optimum, about
        ``reg * mass * tol^2``. A balanced value belongs to masses that differ from b by at most ``tol_gap`` of the
        mass; its error grows as the square of this difference. With ``standard_error`` a pair: the divergence and its
        standard error.

    See Also
    --------
    pairwise, mapuot.torch.sinkhorn_divergence, mapuot.torch.SamplesLoss

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> t = np.linspace(0, 1, 50)
    >>> M, a = (t[:, None] - t) ** 2, np.exp(-((t - 0.3) ** 2) / 0.01)
    >>> a, b = a / a.sum(), np.roll(a, 20) / a.sum()
    >>> abs(mapuot.sinkhorn_divergence(M, a, a, reg=0.01, reg_m=1.0)) < 1e-9
    True
    >>> round(mapuot.sinkhorn_divergence(M, a, b, reg=0.01, reg_m=1.0), 3)
    0.156
    """
    check_options(options, reg_m)
    if scale_each:
        raise ValueError("scale_each needs scale_cost, the unit of each problem's costs")
    M_a, M_b = self_costs(M, M_a, M_b)
    a, b, _ = as_vectors(M, a, b, None)
    options = options_of_value(options, reg_m)
    three = ((M, "M"), (a, "a"), (b, "b")), ((M_a, "M_a"), (a, "a"), (a, "a")), ((M_b, "M_b"), (b, "b"), (b, "b"))
    ab, aa, bb = (named_batch(*one, reg=reg, reg_m=reg_m, **options) for one in three)
    mass_a, mass_b = ab.problem.masses
    w_ab, w_aa, w_bb = (host(dual_value(result)) for result in (ab, aa, bb))
    value = w_ab - 0.5 * (w_aa + w_bb) + 0.5 * ab.problem.regs * (mass_a - mass_b) ** 2
    found = [value]
    if standard_error is not False:
        draws = None
        if standard_error is not True:
            draws = standard_error
        found.append(error_of_divergence(ab, self_slope(aa), self_slope(bb), draws))
    dimensions: list[tuple[Any, int]] = [(M, 3), (a, 2), (b, 2)]
    batched = any(np.ndim(x) == d for x, d in dimensions)
    if not batched:
        found = [float(x[0]) for x in found]
    if standard_error is False:
        return found[0]
    return tuple(found)


def named_batch(M: Any, A: Any, B: Any, **options: Any) -> Any:
    """Solve a batch; each argument is a pair (array, the caller's name), and errors use the caller's names."""
    with for_value({"M": M[1], "A": A[1], "B": B[1]}):
        return solve_batch(M[0], A[0], B[0], **options)


def check_options(options: dict[str, Any], reg_m: Any) -> None:
    for name in ("reference", "mask", "penalty", "warm_start"):
        if name in options:
            if name == "mask":
                what = "it compares whole problems"
            else:
                what = "its reference is a b^T, its penalty KL"
            raise TypeError(f"{name} is not an option of the divergence: {what}")
    if "scale_mass" in options:
        raise TypeError(f"scale_mass is not an option of the divergence: {MASS_CURE}")
    shape = shape_of(reg_m)
    if shape is None or (shape and not (len(shape) == 1 and shape[0] > 2) and shape[1:] != (1,)):
        raise ValueError(f"reg_m must be one number for a divergence, the same on both sides, got {shown(reg_m)}")


def self_costs(M: Any, M_a: Any, M_b: Any) -> tuple[Any, Any]:
    """Return (M_a, M_b), or (M, M) for a symmetric M."""
    if (M_a is None) != (M_b is None):
        raise ValueError("M_a and M_b must be given together")
    if M_a is not None:
        for name, x in (("M_a", M_a), ("M_b", M_b)):
            if np.shape(x)[-1:] != np.shape(x)[-2:-1]:
                raise ValueError(f"{name} must be square, got shape {tuple(np.shape(x))}")
        return M_a, M_b
    if isinstance(M, PointCloud):
        return M.within()
    refuse_other(M, "M")
    shape = tuple(np.shape(M))
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"M_a and M_b, costs within each side, must be given where M is not square, got shape {shape}")
    if isinstance(M, Grid):
        if M._cost.symmetric():
            return M, M
        raise ValueError("M_a and M_b must be given where M is a grid with a target or an offset")
    values = M.detach() if hasattr(M, "detach") else M if namespace(M) is not np else np.asarray(M)
    turned = values.swapaxes(-1, -2)
    with np.errstate(invalid="ignore"):  # inf - inf
        wrong = None if (values == turned).all() else differs(values, turned)
    if wrong is not None and wrong.any():
        at = np.argwhere(np.asarray(host(wrong.cpu() if hasattr(wrong, "cpu") else wrong)))[0].tolist()
        pair = f"{float(values[tuple(at)])} at {at} and {float(turned[tuple(at)])} across the diagonal"
        raise ValueError(f"M_a and M_b must be given where M is not symmetric, got {pair}")
    return M, M
