"""The debiased unbalanced Sinkhorn divergence between histograms, one pair or many, or all pairs of many clouds.

    S(a, b) = OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2 + reg / 2 (|a| - |b|)^2

with OT the value of `solve` for the reference a b^T and |.| the mass. For a symmetric cost with positive definite
exp(-M / reg), for example squared distances, S >= 0, and S = 0 only for a = b. Source: Sejourne, Feydy, Vialard,
Trouve, Peyre, Sinkhorn divergences for unbalanced optimal transport, 2019.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike, MarginalPenalty
from ..answer.slopes import dual_value
from ..arrays import host, namespace, refuse_data_set
from ..backends import pick
from ..errors import renamed
from ..penalties import F64
from ..problem.clouds import Clouds, Places, PointCloud
from ..problem.cost import as_vectors
from ..problem.grid import Grid
from ..problem.kinds import as_costs
from ..problem.scale import scales_of
from ..problem.symmetry import differs
from ..problem.validate import as_array
from ..progress import bar as progress_bar
from ..ranks import join
from ..route.options import options_of_value
from ..synonyms import REQUIRED, hinted
from .batch import of_problems, solve_batch
from .entry import entry

CHUNK_BYTES = 1 << 26  # vectors of the problems that `pairwise` solves in one batch


def costs_of(given: dict[str, Any]) -> list[Any]:
    """Return the costs of the arguments of `sinkhorn_divergence`, for their statistic."""
    check_options(given, given["reg_m"])
    return of_problems(as_costs(given["M"], pick("auto", given["M"])), given["scale_each"])


@hinted
@entry(costs=costs_of)
def sinkhorn_divergence(
    M: CostLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: str | None = None,
    scale_each: bool = False,
    M_a: CostLike | None = None,
    M_b: CostLike | None = None,
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
    **options
        Further arguments of `solve_batch`, without reference, mask, penalty and warm_start. If both sides are balanced,
        ``tol_gap`` is 1e-5 by default, or 10 tol if that is less: the value is wanted, not the plan.

    Returns
    -------
    divergence : float, or (p,) array
        In units of M times mass. Each of the three values is at most its ``gap`` below the optimum, about
        ``reg * mass * tol^2``. A balanced value belongs to masses that differ from b by at most ``tol_gap`` of the
        mass; its error grows as the square of this difference.

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
    dimensions: list[tuple[Any, int]] = [(M, 3), (a, 2), (b, 2)]
    batched = any(np.ndim(x) == d for x, d in dimensions)
    if batched:
        return value
    return float(value[0])


def named_batch(M: Any, A: Any, B: Any, **options: Any) -> Any:
    """Solve a batch; each argument is a pair (array, the caller's name), and errors use the caller's names."""
    with renamed({"M": M[1], "A": A[1], "B": B[1]}):
        return solve_batch(M[0], A[0], B[0], **options)


def check_options(options: dict[str, Any], reg_m: Any) -> None:
    for name in ("reference", "mask", "penalty", "warm_start"):
        if name in options:
            if name == "mask":
                what = "it compares whole problems"
            else:
                what = "its reference is a b^T, its penalty KL"
            raise TypeError(f"{name} is not an option of the divergence: {what}")
    shape = np.shape(reg_m)
    if shape and not (len(shape) == 1 and shape[0] > 2) and shape[1:] != (1,):
        raise ValueError(f"reg_m must be one number for a divergence, the same on both sides, got {reg_m!r}")


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
    refuse_data_set(M, "M")
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


def as_clouds(clouds: Any, metric: Any, scale: Any, weights: Any) -> PointCloud:
    """Return several clouds of points as one `PointCloud`."""
    cloud = PointCloud(clouds, metric=metric, scale=scale, weights=weights)
    if cloud.ndim != 3:
        raise ValueError(f"clouds must hold several clouds of points, got one of shape {cloud.shape}")
    return cloud


def costs_of_clouds(given: dict[str, Any]) -> list[Any]:
    """Return the costs of the arguments of `pairwise`, for their statistic."""
    check_options(given, given["reg_m"])
    return [as_clouds(given["clouds"], given["metric"], given["scale"], given["weights"])._cost.whole]


@hinted
@entry(costs=costs_of_clouds, each=False)
def pairwise(
    clouds: Any,
    masses: Any = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: str | None = None,
    scale_each: bool = False,
    metric: str = "sqeuclidean",
    scale: float = 1.0,
    weights: ArrayLike | None = None,
    comm: Any = None,
    progress: bool = False,
    **options: Any,
) -> F64:
    """Compute the debiased Sinkhorn divergences between all pairs of k clouds of points.

    Parameters
    ----------
    clouds : (k, n, d) array, or list of k arrays (n_i, d)
        Points, one in a row; clouds may have any sizes.
    masses : (k, n) array, or list of k vectors, optional
        Masses of the points, >= 0. Default: equal masses that add up to 1 in each cloud.
    reg, reg_m : float, or (k, k) array; float or inf, or (k, k) array
        As in `sinkhorn_divergence`, for all pairs or for each; the entries above the diagonal are read.
    scale_cost, scale_each : {"median", "mean", "std", "max"}, optional; bool
        The unit of reg and reg_m: a statistic of the costs between the points of all clouds. With ``scale_each`` each
        pair has the unit of the costs between its two clouds.
    metric, scale, weights
        The cost, as in `PointCloud`.
    comm : mpi4py communicator, optional
        Its ranks share the pairs. Each rank passes all clouds and receives all divergences.
    progress : bool
        Show a bar with the number of solved pairs.
    **options
        tol, tol_gap (by default as in `sinkhorn_divergence`), max_passes, precision, threads and backend, as in
        `solve_batch`.

    Returns
    -------
    divergence : (k, k) array
        Symmetric, with zeros on its diagonal; in units of the cost times mass.

    See Also
    --------
    sinkhorn_divergence, solve_batch

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> clouds = [rng.random((n, 2)) + shift for n, shift in ((30, 0.0), (40, 0.0), (50, 2.0))]
    >>> D = mapuot.pairwise(clouds, reg=0.01, reg_m=1.0)
    >>> bool(D[0, 1] < 0.05 < D[0, 2])
    True
    """
    regs, rhos = (as_of_pairs(x, name, len(clouds)) for x, name in ((reg, "reg"), (reg_m, "reg_m")))
    shared = not (scale_each or np.ndim(regs) or np.ndim(rhos))
    check_options(options, reg_m if shared else 1.0)
    if scale_each and scale_cost is None:
        raise ValueError("scale_each needs scale_cost, the unit of each pair's costs")
    ranks = join(comm)
    cloud = as_clouds(clouds, metric, scale, weights)
    options = options_of_value(options, reg_m if shared else np.ravel(rhos)[:, None])
    table = cloud._cost.flattened(masses, None, None)[0]
    k = len(cloud)
    if table is None:
        table = np.full(cloud.shape[:2], 1.0 / cloud.shape[1])
    else:
        table = host(np.asarray(table, np.float64))
    value = np.zeros((k, k))
    total = table.sum(1)
    pairs = np.stack(np.triu_indices(k, 1), 1)
    pairs = pairs[np.argsort(-cloud._cost.places[0].count[pairs].prod(1), kind="stable")]  # like sizes together
    own = pairs[ranks.rank :: ranks.size]
    alone = np.arange(k)[ranks.rank :: ranks.size]
    step = max(1, CHUNK_BYTES // (16 * 8 * cloud.shape[1]))
    shown = progress_bar(progress and ranks.rank == 0, total=len(own), desc="mapuot", unit="pair")

    def duals(i: Any, j: Any, reg: Any, reg_m: Any) -> F64:
        both = between(cloud, i, j)
        m, n = both._cost.shape
        found: F64 = solve_batch(both, table[i, :m], table[j, :n], reg=reg, reg_m=reg_m, **options).dual
        return found

    with ranks.together(), shown as bar:
        for these, told in ((np.stack([alone, alone], 1)[: len(alone) * shared], 0), (own, 1)):
            for i0 in range(0, len(these), step):
                i, j = these[i0 : i0 + step].T
                if shared:
                    value[i, j] = duals(i, j, reg, reg_m)
                else:
                    unit = scales_of(between(cloud, i, j)._cost, scale_cost) if scale_each else 1.0
                    terms = (unit * np.broadcast_to(x, (k, k))[i, j] for x in (regs, rhos))
                    mine = next(terms)
                    penalty = next(terms)[:, None]
                    value[i, j] = duals(i, j, mine, penalty) + 0.5 * mine * (total[i] - total[j]) ** 2
                    value[i, j] -= 0.5 * (duals(i, i, mine, penalty) + duals(j, j, mine, penalty))
                bar.update(told * len(i))
    value = np.asarray(ranks.sum(value))
    if shared:
        selves = np.diag(value)
        apart = total[:, None] - total
        value = value - 0.5 * (selves[:, None] + selves) + 0.5 * np.asarray(reg) * apart**2
    upper: F64 = np.triu(value, 1)
    return upper + upper.T


def as_of_pairs(value: Any, name: str, k: int) -> Any:
    """Check a number, or (k, k) of them; the entries above the diagonal count."""
    if np.ndim(value) == 0:
        return value
    table = as_array(value, name).astype(np.float64)
    if table.shape != (k, k):
        raise ValueError(
            f"{name} must be one number, or one for each pair of clouds, ({k}, {k}), got shape {table.shape}"
        )
    upper = table[np.triu_indices(k, 1)]
    if not (upper > 0).all():
        raise ValueError(f"{name} must be > 0 for each pair of clouds, got {upper[~(upper > 0)][0]}")
    return table


def between(cloud: PointCloud, i: Any, j: Any) -> PointCloud:
    """Return the costs between clouds i and clouds j; points are not copied."""
    places = (Places(*(x[which] for x in cloud._cost.places[0])) for which in (i, j))
    found: PointCloud = cloud._of(object.__new__(Clouds)._hold(cloud._cost.whole, *places))
    return found
