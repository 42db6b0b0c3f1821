"""Unbalanced entropic barycenters, POT's functions over the iteration of mapuot.barycenter, right at small reg."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from tqdm import tqdm

from ..backends import host
from ..barycenter import Core, as_weights
from ..errors import ConvergenceWarning
from ..validate import as_array, as_count, as_positive
from .arrays import give, take, threshold


def barycenter_unbalanced(
    A: Any,
    M: Any,
    reg: float,
    reg_m: float,
    method: str = "sinkhorn",
    weights: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
    *,
    tau: float | None = None,
) -> Any:
    """Barycenter of unnormalised histograms: the q of least weighted unbalanced entropic cost to all of them.

    Parameters
    ----------
    A : (n, k) array
        k histograms in columns, zeros allowed.
    M : (n, n) array
        Costs.
    reg : float
        Entropic regularisation, > 0, in units of M (reference measure: ones, as in POT).
    reg_m : float
        Marginal penalty, in units of M; inf: the balanced barycenter.
    method : str
        "sinkhorn" or "sinkhorn_stabilized" (any case): the same iteration from POT's two starts, v = 1 or 1 /
        n, q looked at in every or every tenth iteration (where POT absorbs, it may make ten more).
        "sinkhorn_reg_scaling", "sinkhorn_translation_invariant": "sinkhorn", with a warning, as in POT.
    weights : (k,) array, optional
        Weights of the histograms, >= 0, default 1 / k.
    numItermax : int
    stopThr : float
        Stop when ``max|q - q_before| / max(max q, max q_before, 1)`` is below.
    verbose : bool
        A progress bar on standard error.
    log : bool
    tau : float, optional
        POT's threshold of "sinkhorn_stabilized"; accepted, nothing overflows here.

    Returns
    -------
    q : (n,) array in A's dtype
    log : dict
        Only with ``log=True``: err, niter (POT's: the index of the last iteration), logu, logv (n, k).

    Raises
    ------
    ValueError, TypeError
        Bad argument, unknown method, unknown keyword.
    NotImplementedError
        A tensor requires grad.

    Warns
    -----
    ConvergenceWarning
        stopThr was not reached.
    """
    name = method.lower() if isinstance(method, str) else method
    if name in ("sinkhorn_reg_scaling", "sinkhorn_translation_invariant"):
        warnings.warn("Method not implemented yet. Running 'sinkhorn' instead", stacklevel=2)
        name = "sinkhorn"
    rest = {"weights": weights, "numItermax": numItermax, "stopThr": stopThr, "verbose": verbose, "log": log}
    if name == "sinkhorn_stabilized":
        return barycenter_unbalanced_stabilized(A, M, reg, reg_m, tau=1e3 if tau is None else tau, **rest)
    if name != "sinkhorn":
        raise ValueError(f"Unknown method {method!r}: must be 'sinkhorn' or 'sinkhorn_stabilized'")
    if tau is not None:
        raise TypeError(f"tau is an argument of method 'sinkhorn_stabilized' only, not of {method!r}")
    return barycenter_unbalanced_sinkhorn(A, M, reg, reg_m, **rest)


def barycenter_unbalanced_sinkhorn(
    A: Any,
    M: Any,
    reg: float,
    reg_m: float,
    weights: Any = None,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """`barycenter_unbalanced` with method "sinkhorn"; at least twelve iterations, as in POT."""
    solver = Barycenter(A, M, reg, reg_m, weights)
    return solver.run(0.0, 1, 11, as_count(numItermax, "numItermax"), stopThr, verbose, log)


def barycenter_unbalanced_stabilized(
    A: Any,
    M: Any,
    reg: float,
    reg_m: float,
    weights: Any = None,
    tau: float = 1000,
    numItermax: int = 1000,
    stopThr: float = 1e-6,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """`barycenter_unbalanced` with method "sinkhorn_stabilized"; ``tau`` is checked and accepted."""
    as_positive(tau, "tau")
    solver = Barycenter(A, M, reg, reg_m, weights)
    return solver.run(-np.log(len(solver.core.q)), 10, 0, as_count(numItermax, "numItermax"), stopThr, verbose, log)


class Barycenter:
    """One problem of POT and its iteration."""

    def __init__(self, A: Any, M: Any, reg: Any, reg_m: Any, weights: Any) -> None:
        self.like = A
        A, M = as_array(host(take(A, "A")), "A"), host(take(M, "M"))
        self.dtype = np.float32 if A.dtype == np.float32 else np.float64
        shape = np.shape(M)
        if A.ndim != 2 or len(shape) != 2 or A.shape[0] != shape[0] or shape[0] != shape[1] or A.shape[1] == 0:
            raise ValueError(f"A must be (n, k) and M (n, n), got {A.shape} and {shape}")
        self.core = Core(A.T, M, reg, reg_m, as_weights(take(weights, "weights"), A.shape[1]))

    def run(self, log_v: float, every: int, least: int, max_iter: int, stop: float, progress: bool, log: bool) -> Any:
        core, err, stop = self.core, [], threshold(stop)
        core.log_v, q = np.full(core.log_v.shape, log_v), np.exp(np.full(core.q.shape, log_v))
        for k in tqdm(range(max_iter), desc="barycenter", unit="pass", disable=not progress):
            core.iterate()
            if k % every == 0:
                err.append(float(np.abs(core.q - q).max() / max(core.q.max(), q.max(), 1.0)))
                if err[-1] < stop and k >= least:
                    break
            q = core.q
        else:
            if stop > 0:
                warnings.warn(
                    f"barycenter not converged after {max_iter} iterations: last change {err[-1]:.2e}, "
                    f"stopThr {stop:.2e}; raise numItermax, reg or stopThr",
                    ConvergenceWarning,
                    stacklevel=4,
                )
        out = [give(x.astype(self.dtype), self.like) for x in (core.q[:, 0], core.log_u[:, 0], core.log_v[:, 0])]
        return (out[0], {"err": err, "niter": k, "logu": out[1], "logv": out[2]}) if log else out[0]
