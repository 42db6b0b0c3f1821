"""Unbalanced entropic barycenters, POT's functions over the iteration of mapuot.barycenter, right at small reg."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..api import barycenter as shared
from ..api.barycenter import as_weights, checked
from ..backends import host, pick
from ..errors import warn
from ..problem.validate import as_array, as_count, as_positive
from ..progress import bar as progress_bar
from .arrays import give, take, threshold
from .caller import WORDS, warn_not_stopped


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
        warn("Method not implemented yet. Running 'sinkhorn' instead")
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
    return solver.run(-np.log(len(solver.M)), 10, 0, as_count(numItermax, "numItermax"), stopThr, verbose, log)


class Barycenter:
    """One problem of POT, validated as `mapuot.barycenter` does it."""

    def __init__(self, A: Any, M: Any, reg: Any, reg_m: Any, weights: Any) -> None:
        self.like = A
        A, M = as_array(host(take(A, "A")), "A"), host(take(M, "M"))
        self.dtype = np.float32 if A.dtype == np.float32 else np.float64
        shape = np.shape(M)
        if A.ndim != 2 or len(shape) != 2 or A.shape[0] != shape[0] or shape[0] != shape[1] or A.shape[1] == 0:
            raise ValueError(f"A must be (n, k) and M (n, n), got {A.shape} and {shape}")
        weights = as_weights(take(weights, "weights"), A.shape[1])
        self.A, self.M, self.reg, self.fi = checked(A.T, M, reg, reg_m)
        if weights.ndim != 1:
            raise ValueError(f"weights must be ({A.shape[1]},), got {weights.shape}")
        self.weights = weights

    def run(self, start: float, every: int, least: int, max_iter: int, stop: float, progress: bool, log: bool) -> Any:
        pick("cpu")  # tells where the C library is not built
        from . import core  # noqa: PLC0415

        stop = threshold(stop)
        with progress_bar(progress, total=max_iter, desc="barycenter", unit="pass") as bar:
            q, log_u, log_v, err, made, converged = core.barycenter(
                self.A, self.M, self.reg, self.fi, self.weights, start, every, least, max_iter, stop, shared.SAFE,
                bar.update,
            )  # fmt: skip
        if not converged and stop > 0:
            warn_not_stopped("barycenter", max_iter, err[-1], stop, WORDS)
        out = [give(x.astype(self.dtype), self.like) for x in (q, log_u.T, log_v.T)]
        return (out[0], {"err": err, "niter": made - 1, "logu": out[1], "logv": out[2]}) if log else out[0]
