"""POT's unbalanced entropic barycenters, computed by the certified passes of `mapuot.barycenter`."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike
from ..api.barycenter import as_weights, barycenter
from ..arrays import host
from ..errors import ConvergenceWarning, warn
from ..problem.validate import as_array, as_count, as_float, as_positive
from .arrays import give, lowered, to_array
from .sinkhorn import DEFAULT_ITER, LEAST_TOL, demand, muted


def barycenter_unbalanced(
    A: ArrayLike,
    M: CostLike,
    reg: float,
    reg_m: float,
    method: str = "sinkhorn",
    weights: ArrayLike | None = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Compute the unbalanced barycenter of histograms: ``ot.unbalanced.barycenter_unbalanced`` on mapuot.

    Parameters
    ----------
    A, M : (n, k) and (n, n) arrays
        k histograms in columns, zeros allowed; costs between their points.
    reg, reg_m : float
        Entropic regularisation and marginal penalty, in units of M; reg_m=inf is the balanced barycenter. The reference
        measure is ones, as in POT.
    method : str
        "sinkhorn" or "sinkhorn_stabilized" (in any case), with the same answer. "sinkhorn_reg_scaling" and
        "sinkhorn_translation_invariant" warn and stand for "sinkhorn", as in POT.
    weights : (k,) array, optional
        Weights of the histograms, >= 0, default 1 / k.
    numItermax, stopThr, verbose, log, tau
        As in `mapuot.pot.sinkhorn_unbalanced` with a named method: the certified error of q is at most the error at
        which POT's method would stop.

    Returns
    -------
    q : (n,) array in A's dtype
    log : dict
        Only with ``log=True``. err: a list of one number, the certified error of q (balanced: its last change). niter:
        the number of passes. logu, logv: (n, k).

    Raises
    ------
    NotImplementedError
        A tensor requires a gradient.

    Warns
    -----
    ConvergenceWarning
        stopThr was not reached.

    See Also
    --------
    mapuot.barycenter : mapuot's own function, with sparse costs, images and debiasing

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> t = np.linspace(0, 1, 21)
    >>> A = np.exp(-((t[:, None] - [0.3, 0.7]) ** 2) / 0.01)  # a histogram in each column
    >>> q = mapuot.pot.barycenter_unbalanced(A, (t[:, None] - t) ** 2, reg=0.01, reg_m=1.0)
    >>> round(float(t[q.argmax()]), 2)
    0.5
    """
    name = lowered(method)
    if name in ("sinkhorn_reg_scaling", "sinkhorn_translation_invariant"):
        warn("Method not implemented yet. Running 'sinkhorn' instead")
    elif name not in ("sinkhorn", "sinkhorn_stabilized"):
        raise ValueError(f"Unknown method {method!r}: must be 'sinkhorn' or 'sinkhorn_stabilized'")
    if tau is not None:
        as_positive(tau, "tau")
        if name != "sinkhorn_stabilized":
            raise TypeError(f"tau is an argument of method 'sinkhorn_stabilized' only, not of {method!r}")
    histograms = as_array(to_array(A, "A"), "A")
    costs: Any = host(to_array(M, "M"))
    shape = np.shape(histograms)
    if len(shape) != 2 or np.shape(costs) != (shape[0], shape[0]) or shape[1] == 0:
        raise ValueError(f"A must be (n, k) and M (n, n), got {shape} and {np.shape(costs)}")
    weights = as_weights(to_array(weights, "weights"), shape[1])
    if weights.ndim != 1:
        raise ValueError(f"weights must be ({shape[1]},), got {weights.shape}")
    stop = as_float(stopThr, "stopThr")
    most = as_count(numItermax, "numItermax")
    rho = as_float(reg_m, "reg_m")
    tol = demand(as_positive(reg, "reg"), rho, rho, max(stop, LEAST_TOL), "sinkhorn")
    with muted():
        found = barycenter(
            costs, histograms.T, reg=reg, reg_m=reg_m, weights=weights, tol=tol, tol_change=max(stop, LEAST_TOL),
            max_passes=max(most, DEFAULT_ITER), progress=verbose,
        )  # fmt: skip
    if found.error_bound < np.inf:
        reached = found.error_bound
    else:
        reached = found.change
    if stop > 0 and not (found.converged or reached <= stop):
        why = f"last change {reached:.2e} >= stopThr {stop:.2e}; raise numItermax, reg or stopThr"
        warn(f"barycenter not converged after {found.n_passes} iterations: {why}", ConvergenceWarning)
    dtype = np.float32 if histograms.dtype == np.float32 else np.float64
    q, log_u, log_v = (give(x.astype(dtype), A) for x in (found.q, found.log_u.T, found.log_v.T))
    if log:
        return q, {"err": [reached], "niter": found.n_passes, "logu": log_u, "logv": log_v}
    return q
