"""The passes of a barycenter of p histograms, and their certificate.

    u_s = (A_s / K v_s)^fi,  q = d^(1 / fi) (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi

With d = 1 and fi < 1 these v are feasible for the dual, sum_s w_s v_s^(-reg / rho) = 1, and its value is
sum_s w_s rho (|A_s| - sum A_s u_s^(-reg / rho)) - reg |q|, less what no pass changes. Plans P_s = diag(u_s) K diag(v_s)
then miss the optimum by gap = rho sum_s w_s KL(P_s 1 | A_s u_s^(-reg / rho)). Formulas: docs/mathematics.md,
"Barycenters".
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.kernel import UNIT
from ..backends.rules import plan_error
from ..errors import InfeasibleError
from ..penalties import F64
from .passes import Body, PassCertificate


def scaled(fi: float, log_t: F64, log_s: F64) -> F64:
    """Return fi (log t - log s), log u of points with mass t that see s; -inf (u = 0) where t or s is 0."""
    found = fi * (log_t - log_s)
    finite = np.isfinite(found)
    if not finite.all():
        found[~finite] = -np.inf
    return np.asarray(found)


@dataclass
class Means:
    """The plans of a pass, log u and log v (p, n), and their q (n,)."""

    log_u: F64
    log_v: F64
    q: F64
    log_s: F64  # log K^T u
    amount: float = 0.0  # sum_s w_s |asked_s|
    log_kv: F64 | None = None  # log K v: of plans that are whole

    @property
    def mass(self) -> float:
        return float(self.q.sum())

    @property
    def whole(self) -> bool:
        return self.log_kv is not None


class Barycenter(Body):
    """The body of passes (passes.Body) of p histograms A (p, n) and one weighting; a state is log v, 0 where v is 0.

    ``operator`` has products with K and its transpose on logarithms, (p, n) -> (p, n). Balanced or debiased passes are
    not certified: they end when one changes q by ``tol_change`` at most, and ``lacking(q)`` of its mass is not missing.
    """

    kept: Means | None = None  # of the last pass that was no dropped step
    change, lacks = math.inf, 0.0  # of q in the last pass, relative, in L1

    def __init__(
        self, A: F64, operator: Any, rho: float, weights: F64, debiased: bool, tol_change: float, lacking: Any
    ) -> None:
        self.A, self.operator, self.rho, self.weights = A.astype(np.float64), operator, rho, weights
        self.reg = reg = operator.reg
        rounding = 4 * UNIT * sum(map(abs, operator.ends))
        self.error = operator.apart(rounding) or rounding + UNIT * (A.shape[1] + 16)  # of sums
        self.fi, self.debiased, self.tol_change, self.lacking = 1 / (1 + reg / rho), debiased, tol_change, lacking
        self.certifies = rho < math.inf and not debiased
        with np.errstate(divide="ignore"):
            self.log_a, self.log_w = np.log(self.A), np.log(weights)[:, None]
        self.size, self.ends, self.width = A.size, [A.size], A.shape[1]
        kind = operator.cost.operator
        self.reads = "dense K" if kind == "tiles" else kind
        self.held, self.log_d = np.ones(A.shape, bool), np.zeros(self.width)
        self.terms = self.rho * float(weights @ self.A.sum(1))  # the size of the dual's terms

    def start(self, state: F64) -> F64:
        """Return the state; debiased d goes with it, sum_s w_s v_s^(-reg / rho) = d^(-reg / rho)."""
        log_v, rate = state.reshape(self.A.shape), self.reg / self.rho
        if self.debiased:
            self.log_d = shares(self.log_w - rate * log_v)[0] / -rate if rate else self.weights @ log_v
        return state

    def newton(self) -> None:
        """Return None: a pass that is certified misses no hard marginal."""

    def find(self, state: F64, narrow: bool) -> Means:
        """Make a pass from log v: u, q and v by their formulas, on logarithms."""
        log_v, fi, products = state.reshape(self.A.shape), self.fi, self.operator.log_products
        log_kv = products(log_v if self.held.all() else np.where(self.held, log_v, -np.inf))
        if fi == 1:
            self.check_reachable(log_kv)
        log_u, amount = scaled(fi, self.log_a, log_kv), 0.0
        log_s = products(log_u, True)
        if self.certifies:
            log_u, log_s, log_q, amount = self.translated(log_u, log_s)
        else:
            log_q = self.log_mean(log_s) + self.log_d / fi
        if self.debiased:
            self.log_d = 0.5 * (self.log_d + scaled(fi, log_q, products(self.log_d[None])[0]))
        self.last = Means(log_u, scaled(fi, log_q, log_s), np.exp(log_q), log_s, amount)
        return self.last

    def log_mean(self, log_s: F64) -> F64:
        """Log q of the sums s = K^T u: their mean of power 1 - fi, which is the geometric one for fi = 1."""
        if self.fi == 1:
            return np.asarray(self.weights @ np.where(self.weights[:, None] > 0, log_s, 0.0))
        return np.asarray(shares((1 - self.fi) * log_s + self.log_w)[0] / (1 - self.fi))

    def check_reachable(self, log_kv: F64) -> None:
        """Raise where balanced mass has nowhere to go."""
        stuck = np.isneginf(log_kv) & (self.A > 0) & (self.weights > 0)[:, None]
        if stuck.any():
            s, i = np.unravel_index(int(stuck.argmax()), stuck.shape)
            raise InfeasibleError(f"M connects A[{s}, {i}], which must be transported, with no point that all A reach")

    def completed(self) -> Means:
        self.last.log_kv = self.operator.log_products(self.last.log_v)
        return self.last

    def image(self, found: Means, exact: bool) -> F64:
        """Return log v; what it changes of q is counted."""
        before = self.kept.q if self.kept else 0.0
        mass = found.mass  # 0 in the first passes at small reg, where log q is far away
        change = float(np.abs(found.q - before).sum()) / mass if mass > 0 else math.inf
        self.lacks = self.lacking(found.q) if self.lacking else 0.0
        self.kept, self.change, self.held = found, max(change, self.lacks), np.isfinite(found.log_v)
        return np.where(self.held, found.log_v, 0.0).ravel()

    def guess(self, residual: F64, found: Means) -> tuple[float, float]:
        """Guess the gap: that of the columns before v moved, rho KL of sums off by residual / fi, to second order."""
        return 0.5 * self.rho * float(self.metric(found) @ residual**2) / self.fi**2, 0.0

    def metric(self, found: Means) -> F64:
        """Weigh the entries of a state by the mass of the columns."""
        column = np.exp(np.where(self.held, found.log_v + found.log_s, -np.inf)) * self.weights[:, None]
        return np.asarray(column.ravel())

    def asked(self, log_u: F64) -> F64:
        """Return A u^(-reg / rho), the rows that the potentials ask for; none where nothing reaches a row."""
        return np.asarray(self.A * np.exp(-self.reg / self.rho * np.where(np.isfinite(log_u), log_u, np.inf)))

    def translated(self, log_u: F64, log_s: F64) -> tuple[F64, F64, F64, float]:
        """Move each log u_s by a number that raises the dual value; return log u, log s, log q and sum_s w_s |asked_s|.

        With log u_s + N y_s, N = 1 / (1 - fi), the value is - rho sum_s B_s e^(-y_s / fi) - reg sum_j (sum_s w_s e^y_s
        s_sj^(1 - fi))^N, B_s = w_s |asked_s|: the best common y, then a step of Newton's method, if that raises it.
        """
        N, kappa, B = 1 / (1 - self.fi), 1 / self.fi, self.weights * self.asked(log_u).sum(1)
        terms = (1 - self.fi) * log_s + self.log_w
        top, share = shares(terms)
        highest = N * top.max()
        least = float(np.exp(N * top - highest).sum())  # |q| may lie beyond float64 in a first pass
        if not (0 < least < math.inf and 0 < B.sum() < math.inf):
            return log_u, log_s, N * top, float(B.sum())
        common = (math.log(B.sum() / least) - highest) / (N + kappa)
        B, top = B * math.exp(-kappa * common), top + common
        q = np.exp(N * top)
        held = q * share
        sums = held.sum(1)
        hessian = (N - 1) * share @ held.T + np.diag(np.where(self.weights > 0, kappa * B + sums, 1.0))
        step = np.linalg.solve(hessian, B - sums)
        fewer, moved = B * np.exp(-kappa * step), top + np.log(np.exp(step) @ share)
        if self.rho * fewer.sum() + self.reg * np.exp(N * moved).sum() <= self.rho * B.sum() + self.reg * q.sum():
            B, top, common = fewer, moved, common + step
        move = N * np.broadcast_to(common, B.shape)[:, None]
        return log_u + move, log_s + move, N * top, float(B.sum())

    def certified(self, found: Means, allowed: float) -> PassCertificate:
        """Certify the plans of log u and log v; the dual value lacks its constant part.

        ``delta`` bounds the relative rounding of sums and entries, ``slip`` that of v as a point of the dual's domain.
        """
        mass, log_u, log_kv = found.mass, found.log_u, found.log_kv
        dual = self.terms - self.rho * found.amount - self.reg * mass
        value = PassCertificate(dual=dual, moved=0.0, terms=self.terms)
        if log_kv is None or not math.isfinite(dual):
            return value
        asked = self.asked(log_u)
        t = log_u / self.fi + log_kv - self.log_a  # log of r / asked
        t[~np.isfinite(t)] = 0.0
        grown = np.expm1(t)
        kl = float(self.weights @ (asked * (t * grown - (grown - t))).sum(1))  # KL(r | asked)
        both = float(self.weights @ (asked * (2 + grown)).sum(1))
        sizes = largest(log_u) + largest(found.log_v) + largest(log_kv)
        delta = self.error + UNIT * (4 * sizes + 4 * largest(self.log_a) + 16)
        slip = 8 * UNIT * (self.rho / self.reg + largest(found.log_v) + 1)
        root = math.sqrt(self.rho) * (math.sqrt(max(kl, 0.0)) + 2 * delta * math.sqrt(both + mass))
        if root < math.inf and mass > 0 and delta + slip < 0.1:
            value.gap = root * root
            value.error = plan_error(root * root / (self.reg * mass)) * (1 + 4 * delta) + 2 * delta + slip
        return value


def largest(x: F64) -> float:
    return float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))


def shares(x: F64) -> tuple[F64, F64]:
    """Return log sum_s e^x_s of each column, -inf where all are, and each term's share of that sum."""
    top = x.max(axis=0)
    top[np.isneginf(top)] = 0.0
    terms = np.exp(x - top)
    total = terms.sum(0)
    return np.log(total) + top, terms / np.where(total > 0, total, 1.0)
