"""Unbalanced entropic barycenters, POT's functions, right at small reg: the scalings live in the log domain.

    u_s = (A_s / K v_s)^fi,  q = (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi

with K = exp(-M / reg), fi = reg_m / (reg_m + reg); for reg_m = inf, q is the geometric mean prod_s (K^T
u_s)^w_s. Source: Chizat, Peyre, Schmitzer, Vialard, Scaling algorithms for unbalanced optimal transport
problems, 2018.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy.special import logsumexp
from tqdm import tqdm

from ..backends import pick
from ..errors import ConvergenceWarning
from ..penalties import F64
from ..problem import as_cost, as_positive
from ..solve import as_count
from .arrays import give, take

SAFE = 600.0  # exponents within this of the largest do not underflow in a float64 product
BLOCK_ENTRIES = 1 << 18  # entries of M that the log-domain product holds at once


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
        n, q looked at in every or every tenth iteration. "sinkhorn_reg_scaling",
        "sinkhorn_translation_invariant": "sinkhorn", with a warning, as in POT.
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
    return solver.run(-np.log(len(solver.q)), 10, 0, as_count(numItermax, "numItermax"), stopThr, verbose, log)


class Barycenter:
    """One problem and its iterate: log u, log v (n, k) and q (n,), in float64."""

    def __init__(self, A: Any, M: Any, reg: Any, reg_m: Any, weights: Any) -> None:
        self.like = A
        host = [x.get() if hasattr(x, "get") else x for x in (take(A, "A"), take(M, "M"))]
        A, M = np.asarray(host[0]), as_cost(host[1], pick("reference"))
        self.dtype = np.float32 if A.dtype == np.float32 else np.float64
        if A.ndim != 2 or A.shape[0] != len(M) or M.shape[0] != M.shape[1] or A.shape[1] == 0:
            raise ValueError(f"A must be (n, k) and M (n, n), got {A.shape} and {M.shape}")
        if not np.isfinite(A).all() or (A < 0).any() or not (A.sum(0) > 0).all():
            raise ValueError("A must be finite and >= 0 with positive mass in each column")
        if not np.isfinite(M).all():
            raise ValueError("M must be finite")
        self.reg = as_positive(reg, "reg")
        self.fi = 1.0 if reg_m == np.inf else (rho := as_positive(reg_m, "reg_m")) / (rho + self.reg)
        with np.errstate(divide="ignore"):
            self.log_a = np.log(A.astype(np.float64))
        self.weights = as_weights(take(weights, "weights"), A.shape[1])
        self.M, self.q = M, np.zeros(len(M))
        self.log_u = self.log_v = np.zeros(A.shape)
        self.kernel = Kernel(M, self.reg)

    def iterate(self) -> None:
        """The three formulas above, on logarithms."""
        self.log_u = self.fi * (self.log_a - self.kernel.log_dot(self.log_v))
        log_s = self.kernel.log_dot_transpose(self.log_u)
        if self.fi == 1:
            log_q = log_s @ self.weights
        else:
            log_q = logsumexp((1 - self.fi) * log_s, axis=1, b=self.weights) / (1 - self.fi)
        self.q = np.exp(log_q)
        self.log_v = self.fi * (log_q[:, None] - log_s)

    def run(self, log_v: float, every: int, least: int, max_iter: int, stop: float, progress: bool, log: bool) -> Any:
        self.log_v, err = np.full(self.log_a.shape, log_v), []
        q = np.exp(np.full(len(self.q), log_v))
        for k in tqdm(range(max_iter), desc="barycenter", unit="pass", disable=not progress):
            self.iterate()
            if k % every == 0:
                err.append(float(np.abs(self.q - q).max() / max(self.q.max(), q.max(), 1.0)))
                if err[-1] < stop and k >= least:
                    break
            q = self.q
        else:
            if stop > 0:
                warnings.warn(
                    f"barycenter not converged after {max_iter} iterations: last change {err[-1]:.2e}, "
                    f"stopThr {stop:.2e}; raise numItermax, reg or stopThr",
                    ConvergenceWarning,
                    stacklevel=4,
                )
        out = [give(x.astype(self.dtype), self.like) for x in (self.q, self.log_u, self.log_v)]
        return (out[0], {"err": err, "niter": k, "logu": out[1], "logv": out[2]}) if log else out[0]


class Kernel:
    """log(K e^x), log(K^T e^x) for K = exp(-M / reg): a product, or log-sum-exp where it underflows."""

    def __init__(self, M: Any, reg: float) -> None:
        self.M, self.reg = M, reg
        self.low = float(M.min())
        self.spread = (float(M.max()) - self.low) / reg
        self.K = np.exp((self.low - M.astype(np.float64)) / reg) if self.spread < SAFE else None

    def log_dot(self, x: F64) -> F64:
        return self._log_product(x, self.K, self.M)

    def log_dot_transpose(self, x: F64) -> F64:
        return self._log_product(x, None if self.K is None else self.K.T, self.M.T)

    def _log_product(self, x: F64, K: F64 | None, M: Any) -> F64:
        top = x.max(axis=0)
        finite = np.where(np.isneginf(x), top, x)
        if K is not None and (top - finite.min(axis=0)).max() + self.spread < SAFE:
            return np.asarray(np.log(K @ np.exp(x - top)) + top - self.low / self.reg)
        out = np.empty((len(M), x.shape[1]))
        step = max(1, BLOCK_ENTRIES // M.shape[1])
        for i in range(0, len(M), step):
            block = -M[i : i + step].astype(np.float64) / self.reg
            for j in range(x.shape[1]):
                out[i : i + step, j] = logsumexp(block + x[:, j], axis=1)
        return out


def as_weights(value: Any, count: int) -> F64:
    weights = np.full(count, 1.0 / count) if value is None else np.asarray(value, dtype=np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights must be ({count},), finite, >= 0 and not all zero, got {value!r}")
    return weights
