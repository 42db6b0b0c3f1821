"""Entropic barycenters of histograms on common points: unbalanced or balanced, debiased or not, many at once.

    u_s = (A_s / K v_s)^fi,  q = d^(1 / fi) (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi

with K = exp(-M / reg), fi = reg_m / (reg_m + reg); for reg_m = inf, q is d times the geometric mean of the K^T u_s.
d = 1, or, debiased, the scaling of OT(q, q): d <- sqrt(d (q / K d)^fi), which takes the blur of width sqrt(reg) from q.
All on logarithms. Sources: Chizat, Peyre, Schmitzer, Vialard 2018 (scaling algorithms); Janati, Cuturi, Gramfort 2020
(debiased, balanced). The unbalanced d follows from q's optimality: sum_s w_s v_s^(-reg / reg_m) = d^(-reg / reg_m).
Of a sparse M K has entries at stored pairs only; scalings are 0 at points without mass, or that no pair reaches.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import load, pick
from ..cached import cached_property
from ..errors import ConvergenceWarning, InfeasibleError, shown
from ..penalties import F64
from ..problem.cost import Dense
from ..problem.kinds import as_cost, as_whole_cost, stores_pairs
from ..problem.sparse import Sparse, log_sums, on_host
from ..problem.validate import (
    MASS_TOLERANCE,
    as_array,
    as_count,
    as_float,
    as_positive,
    told_points,
)
from ..progress import bar as progress_bar
from .log_matmul import log_matmul

SAFE = 600.0  # exponents within this of the largest do not underflow in a float64 product


@dataclass(frozen=True)
class BarycenterResult:
    """Barycenters and how far their iteration came."""

    q: F64  # (n,), or (r, n) for r vectors of weights; units of mass
    log_u: F64  # (p, n) or (r, p, n): P_s = diag(u_s) exp(-M / reg) diag(v_s), rows A_s, columns q
    log_v: F64
    reg: float
    n_passes: int
    change: float  # of the last pass: max over barycenters of |q - q_before|_1 / |q|_1; sparse M: at least what q lacks
    status: str  # "converged": change <= tol_change; or "max_passes"
    how: str  # what the passes read: "dense K" or "pairs"

    @property
    def converged(self) -> bool:
        return self.status == "converged"

    @property
    def potentials(self) -> tuple[F64, F64]:
        """The pair (f, g) of each histogram with q, ``reg * log_u`` and ``reg * log_v``, in units of M."""
        return self.reg * self.log_u, self.reg * self.log_v

    def __repr__(self) -> str:
        p, n = self.log_u.shape[-2:]
        several = f"{len(self.q)} barycenters" if self.q.ndim == 2 else "barycenter"
        state = "converged" if self.converged else "not converged"
        mass = self.q.sum(-1)
        masses = f"mass {mass:.6g}" if mass.ndim == 0 else f"masses {mass.min():.6g} to {mass.max():.6g}"
        return (
            f"<mapuot.BarycenterResult {several} of {p} histograms on {n} points, {state} after "
            f"{self.n_passes} passes, last change {self.change:.1e}, {masses}>"
        )


def barycenter(
    M: Any,
    A: Any,
    *,
    reg: float,
    reg_m: float = np.inf,
    weights: Any = None,
    debiased: bool = False,
    tol_change: float = 1e-6,
    max_passes: int = 10_000,
    progress: bool = False,
) -> BarycenterResult:
    """Barycenter of p histograms: the q of least weighted entropic transport cost to all of them.

    Parameters
    ----------
    M : (n, n) array, or a matrix of scipy.sparse
        Costs, finite; symmetric, with positive definite exp(-M / reg), if debiased: squared distances are. Of a sparse
        one the stored entries are costs, and all other pairs are forbidden and never visited.
    A : (p, n) array
        Histograms in rows, >= 0, zeros allowed.
    reg : float
        Entropic regularisation, > 0, in units of M (reference measure: ones).
    reg_m : float or inf
        Marginal penalty, in units of M, on both sides of every plan; inf: the balanced barycenter, whose
        histograms should have equal masses (q has their geometric mean).
    weights : (p,) or (r, p) array, optional
        >= 0, scaled to sum 1; r vectors make r barycenters at once. Default: equal.
    debiased : bool
        Subtract OT(q, q) / 2, which sharpens q. With one histogram, q is that histogram.
    tol_change : float
        Stop when a pass changes no q by more than this, relative, in L1. This is no bound on the error. Balanced over a
        sparse M q must also have the histograms' mass, to this: where M connects too few points, no q can.
    max_passes : int
    progress : bool
        Show a progress bar on standard error.

    Returns
    -------
    BarycenterResult

    Raises
    ------
    ValueError, TypeError
        Bad argument; the message names it.
    InfeasibleError
        Balanced, and a sparse M connects a point that has mass with none that all histograms reach, or no pair leads
        out of a part of it where the histograms have other shares of their mass.

    Warns
    -----
    ConvergenceWarning
        tol_change was not reached.

    Examples
    --------
    Halfway between two bumps lies one bump:

    >>> import numpy as np, mapuot
    >>> t = np.linspace(0, 1, 101)
    >>> A = np.exp(-((t - np.array([[0.2], [0.6]])) ** 2) / 0.002)
    >>> A /= A.sum(1, keepdims=True)
    >>> found = mapuot.barycenter((t[:, None] - t) ** 2, A, reg=1e-3, debiased=True)
    >>> found.converged, round(float(t[found.q.argmax()]), 2)
    (True, 0.4)
    """
    A, max_passes = as_array(A, "A"), as_count(max_passes, "max_passes")
    tol = as_positive(tol_change, "tol_change")
    if A.ndim != 2 or 0 in A.shape:
        raise ValueError(f"A must be a non-empty (p, n) array, got shape {A.shape}")
    table = as_weights(weights, len(A))
    table = table / table.sum(-1, keepdims=True)
    core = Core(A, M, reg, reg_m, table, debiased)
    change, lacks, n_passes = np.inf, 0.0, 0
    with progress_bar(progress, total=max_passes, desc="barycenter", unit="pass") as bar:
        while change > tol and n_passes < max_passes:
            before = core.q
            core.iterate()
            mass = core.q.sum(0)  # 0 in the first passes at small reg, where log q is far away
            change = float((np.abs(core.q - before).sum(0) / mass).max()) if mass.all() else np.inf
            lacks = core.lacking()
            change = max(change, lacks)
            n_passes += 1
            bar.update()
    if not change <= tol:
        few = f", q lacks {lacks:.1e} of its mass where M may connect too few points" if lacks > tol else ""
        warnings.warn(
            f"barycenter not converged after {n_passes} passes: last change {change:.2e} > tol_change {tol:.2e}{few}; "
            f"raise max_passes, reg or tol_change",
            ConvergenceWarning,
            stacklevel=2,
        )
    q, log_u, log_v = core.q.T, core.log_u.transpose(1, 2, 0), core.log_v.transpose(1, 2, 0)
    if weights is None or np.ndim(weights) == 1:
        q, log_u, log_v = q[0], log_u[0], log_v[0]
    status, how = "converged" if change <= tol else "max_passes", "pairs" if core.pairs else "dense K"
    return BarycenterResult(q, log_u, log_v, core.reg, n_passes, change, status, how)


class Core:
    """The iterate for r weightings of p histograms: log u, log v (n, r, p), log d and q (n, r), in float64."""

    def __init__(self, A: Any, M: Any, reg: Any, reg_m: Any, weights: F64, debiased: bool = False) -> None:
        A, M, self.reg, self.fi = checked(A, M, reg, reg_m, pairs=True)
        if debiased and not symmetric(M):
            raise ValueError("M must be symmetric for a debiased barycenter")
        with np.errstate(divide="ignore"):
            self.log_a = np.log(A.T.astype(np.float64))[:, None]
        self.weights, self.debiased = np.atleast_2d(weights), debiased
        shape = A.shape[1], *self.weights.shape
        self.log_u, self.log_v = np.zeros(shape), np.zeros(shape)
        self.log_d, self.q = np.zeros(shape[:2]), np.zeros(shape[:2])
        self.pairs = isinstance(M, Sparse)
        costs, self.operator = (
            M.data if self.pairs else M,
            load("cpu").operator_of(M if self.pairs else Dense(M), self.reg),
        )
        self.low = float(costs.min()) / self.reg
        self.spread = float(costs.max()) / self.reg - self.low
        self.wanted = self.masses(M, A) if self.pairs and self.fi == 1 else None

    def iterate(self) -> None:
        """The formulas above, on logarithms."""
        from scipy.special import logsumexp  # noqa: PLC0415 - on first use

        log_kv = self.log_dot(self.log_v)
        if self.fi == 1:
            self.check_reachable(log_kv)
        self.log_u = scaled(self.fi, self.log_a, log_kv)
        log_s = self.log_dot(self.log_u, turned=True)
        if self.fi == 1:
            log_q = (np.where(self.weights > 0, log_s, 0.0) * self.weights).sum(2)
        else:
            log_q = logsumexp((1 - self.fi) * log_s, axis=2, b=self.weights) / (1 - self.fi)
        log_q = log_q + self.log_d / self.fi
        if self.debiased:
            self.log_d = 0.5 * (self.log_d + scaled(self.fi, log_q, self.log_dot(self.log_d)))
        self.q = np.exp(log_q)
        self.log_v = scaled(self.fi, log_q[:, :, None], log_s)

    @cached_property
    def K(self) -> Any:  # noqa: N802 - the word of the formulas
        """K but for a factor, so that its largest entry is 1."""
        n = len(self.log_a)
        self.operator.open("float64")
        self.operator.store("float64")
        self.operator.build(np.full(n, self.low), np.zeros(n))
        return self.operator.matrix

    @cached_property
    def costs(self) -> tuple[Any, Any]:
        """The costs by row and by column, of an array as logarithms of K."""
        cost = self.operator.cost
        costs = cost if self.pairs else np.concatenate([L for _, _, L in self.operator.logarithms(cost)])
        return costs, costs.transpose()

    def log_dot(self, x: F64, turned: bool = False) -> F64:
        """Return log(K e^x), or log(K^T e^x), of x (n, ...): by a product, or by maxima of sums where that underflows.

        It is -inf where no pair ends.
        """
        columns = x.reshape(len(x), -1)
        top = columns.max(axis=0)
        top = np.where(np.isneginf(top), 0.0, top)
        finite = np.where(np.isneginf(columns), top, columns)
        if (top - finite.min(axis=0)).max() + self.spread < SAFE:
            with np.errstate(divide="ignore"):
                product = np.log((self.K.T if turned else self.K) @ np.exp(columns - top)) + top - self.low
        elif self.pairs:
            product = np.stack([log_sums(self.costs[turned], x, self.reg) for x in columns.T], axis=1)
        else:
            product = log_matmul(self.costs[turned], columns)
        return np.asarray(product.reshape(x.shape))

    def masses(self, M: Sparse, A: Any) -> F64:
        """The mass of each q in each part of M, (parts, r): the geometric mean of the histograms' there."""
        nobody = np.zeros(len(M), bool)
        self.parts = M.parts_between(nobody, nobody)
        held = [np.bincount(self.parts.rows, a, self.parts.count + 1)[: self.parts.count] for a in A]
        self.check_shares(np.transpose(held) / A.sum(1))
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(self.weights > 0, np.log(np.transpose(held))[:, None], 0.0)
        return np.asarray(np.exp((logs * self.weights).sum(2)))

    def check_shares(self, shares: F64) -> None:
        """Raise where balanced histograms have other shares of their mass in a part of M, (parts, p)."""
        for weights in self.weights:
            used = np.flatnonzero(weights > 0)
            some = shares[:, used]
            wrong = np.ptp(some, axis=1) > MASS_TOLERANCE
            if wrong.any():
                k = int(wrong.argmax())
                s, t = used[some[k].argmax()], used[some[k].argmin()]
                points = told_points(f"A[{s}]", self.parts.rows == k)
                held = f"{shares[k, s]:.6g} of A[{s}], but {shares[k, t]:.6g} of A[{t}]"
                raise InfeasibleError(f"M connects {points} with no other points, and there is {held}")

    def lacking(self) -> float:
        """The largest share of that mass by which a q misses it."""
        if self.wanted is None:
            return 0.0
        count = self.parts.count
        found = np.transpose([np.bincount(self.parts.cols, q, count + 1)[:count] for q in self.q.T])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(self.wanted > 0, np.abs(found / self.wanted - 1), 0.0).max(initial=0.0))

    def check_reachable(self, log_kv: F64) -> None:
        """Raise where balanced mass has nowhere to go."""
        stuck = np.isneginf(log_kv) & ~np.isneginf(self.log_a) & (self.weights > 0)
        if stuck.any():
            i, _, s = np.unravel_index(int(stuck.argmax()), stuck.shape)
            raise InfeasibleError(f"M connects A[{s}, {i}], which must be transported, with no point that all A reach")


def scaled(fi: float, log_t: F64, log_s: F64) -> F64:
    """fi (log t - log s), the scaling of points with mass t that see s; 0 (-inf) where they have or see nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(log_t) | np.isneginf(log_s), -np.inf, fi * (log_t - log_s))


def symmetric(M: Any) -> bool:
    turned = M.transpose()
    if not isinstance(M, Sparse):
        return bool(np.allclose(M, turned, rtol=1e-5))
    same = all(map(np.array_equal, (M.start - M.start[0], M.column), (turned.start, turned.column)))
    return same and bool(np.allclose(M.data, turned.data, rtol=1e-5))


def checked(A: Any, M: Any, reg: Any, reg_m: Any, pairs: bool = False) -> tuple[Any, Any, float, float]:
    """(A, M, reg, fi): p histograms and a finite square cost, an array or, where ``pairs``, a `Sparse` one, too."""
    stored = pairs and stores_pairs(M)
    M = as_cost(on_host(M), pick("reference")) if stored else as_whole_cost(M, pick("reference")).array
    costs = M.data if stored else M
    if A.shape[1] != M.shape[0] or M.shape[0] != M.shape[1]:
        raise ValueError(f"A must be (p, n) and M (n, n), got {A.shape} and {M.shape}")
    if A.dtype.kind not in "fiub":
        raise TypeError(f"A must hold real numbers, got dtype {A.dtype}")
    if not np.isfinite(A).all() or (A < 0).any() or not (A.sum(1) > 0).all():
        raise ValueError("A must be finite and >= 0 with positive mass in each histogram")
    if not np.isfinite(costs).all():
        raise ValueError("M must be finite")
    if not costs.size:
        raise ValueError("M must store a pair, got a sparse matrix with none")
    reg = as_positive(reg, "reg")
    rho = as_float(reg_m, "reg_m")
    return A, M, reg, 1.0 if rho == np.inf else as_positive(rho, "reg_m") / (rho + reg)


def as_weights(value: Any, count: int) -> F64:
    """(count,) or (r, count) weights as given; equal ones of sum 1 for None."""
    weights = np.full(count, 1.0 / count) if value is None else as_array(value, "weights")
    if weights.dtype.kind not in "fiub":
        raise TypeError(f"weights must hold real numbers, got dtype {weights.dtype}")
    fits = weights.ndim in (1, 2) and weights.shape[-1:] == (count,) and weights.size > 0
    if not fits or not np.isfinite(weights).all() or (weights < 0).any() or not (weights.sum(-1) > 0).all():
        raise ValueError(
            f"weights must be ({count},) or (r, {count}), finite, >= 0 and not all zero, got {shown(value)}"
        )
    return weights.astype(np.float64)
