"""The passes of a barycenter of p histograms: translation, Anderson's step behind the guard, certificate.

    u_s = (A_s / K v_s)^fi,  q = d^(1 / fi) (sum_s w_s (K^T u_s)^(1 - fi))^(1 / (1 - fi)),  v_s = (q / K^T u_s)^fi

With d = 1 and fi < 1 these v are feasible for the dual, sum_s w_s v_s^(-reg / rho) = 1, and its value is
sum_s w_s rho (|A_s| - sum A_s u_s^(-reg / rho)) - reg |q|, less what no pass changes. Plans P_s = diag(u_s) K diag(v_s)
then miss the optimum by gap = rho sum_s w_s KL(P_s 1 | A_s u_s^(-reg / rho)). Guard and stopping rule are those of
src_c/common/rules.h. Formulas: docs/mathematics.md, "Barycenters".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends import Stats, load
from ..backends.contract import memory_of
from ..backends.kernel import UNIT
from ..backends.rules import Judge, plan_error
from ..errors import InfeasibleError
from ..penalties import F64

DEPTH = 20  # of Anderson's differences
WHOLE_PASSES = 25  # after so many the plans are certified, near or not
MOST_RATIO = 30.0  # of a certified error to the guess before it


def scaled(fi: float, log_t: F64, log_s: F64) -> F64:
    """fi (log t - log s), the scaling of points with mass t that see s; 0 (-inf) where they have or see nothing."""
    found = fi * (log_t - log_s)
    finite = np.isfinite(found)
    if not finite.all():
        found[~finite] = -np.inf
    return np.asarray(found)


class PlainPasses:
    """The iterate for p histograms and one weighting, log u and log v (p, n), log d and q (n,): formulas alone.

    ``A`` (p, n); ``kernel`` has products with K and its transpose on logarithms, (p, n) -> (p, n).
    """

    gap = error = math.inf  # nothing is certified

    def __init__(self, A: F64, kernel: Any, reg: float, fi: float, weights: F64, debiased: bool = False) -> None:
        self.A, self.kernel, self.reg, self.fi = A.astype(np.float64), kernel, reg, fi
        self.weights, self.debiased = weights, debiased
        with np.errstate(divide="ignore"):
            self.log_a, self.log_w = np.log(self.A), np.log(weights)[:, None]
        self.log_u, self.log_v = np.zeros(A.shape), np.zeros(A.shape)
        self.log_d, self.q = np.zeros(A.shape[1]), np.zeros(A.shape[1])
        self.change = math.inf  # of q in the last pass, relative, in L1

    def one_pass(self) -> None:
        """Make a pass from log v: u, q and v by their formulas, on logarithms."""
        log_kv = self.kernel.log_dot(self.log_v)
        if self.fi == 1:
            self.check_reachable(log_kv)
        self.log_u = scaled(self.fi, self.log_a, log_kv)
        log_s = self.kernel.log_dot_transpose(self.log_u)
        log_q = self.log_mean(log_s) + self.log_d / self.fi
        if self.debiased:
            self.log_d = 0.5 * (self.log_d + scaled(self.fi, log_q, self.kernel.log_dot(self.log_d[None])[0]))
        self.move(log_q, log_s)

    def move(self, log_q: F64, log_s: F64) -> None:
        """Take q and the v that belong to it."""
        before, self.q, self.log_v = self.q, np.exp(log_q), scaled(self.fi, log_q, log_s)
        mass = float(self.q.sum())  # 0 in the first passes at small reg, where log q is far away
        self.change = float(np.abs(self.q - before).sum()) / mass if mass > 0 else math.inf

    def log_mean(self, log_s: F64) -> F64:
        """Log q of the sums s = K^T u: their mean of power 1 - fi, which is the geometric one for fi = 1."""
        if self.fi == 1:
            return np.asarray(self.weights @ np.where(self.weights[:, None] > 0, log_s, 0.0))
        return shares((1 - self.fi) * log_s + self.log_w)[0] / (1 - self.fi)

    def check_reachable(self, log_kv: F64) -> None:
        """Raise where balanced mass has nowhere to go."""
        stuck = np.isneginf(log_kv) & (self.A > 0) & (self.weights > 0)[:, None]
        if stuck.any():
            s, i = np.unravel_index(int(stuck.argmax()), stuck.shape)
            raise InfeasibleError(f"M connects A[{s}, {i}], which must be transported, with no point that all A reach")


class CertifiedPasses(PlainPasses):
    """The same for fi < 1 and d = 1: accelerated, and certified where the last state was no extrapolated one."""

    def __init__(self, A: F64, kernel: Any, reg: float, fi: float, weights: F64, tol: float) -> None:
        super().__init__(A, kernel, reg, fi, weights)
        self.rho, self.tol = fi * reg / (1 - fi), tol
        self.terms = self.rho * float(weights @ self.A.sum(1))  # the size of the dual's terms
        self.judge = Judge(tol=tol, reg=reg, dual_scale=self.terms)
        self.history = load("cpu").History(memory_of(DEPTH, A.shape[1], 8), [A.size])
        self.log_x, self.extrapolated, self.made = self.log_v, False, False
        self.number, self.since_whole, self.ratio, self.guessed = 0, 0, 1.0, math.inf

    def next_pass(self) -> str:
        """Make a pass from log x, the last v or a combination of it with those before; return the status.

        Where log x is the last v, K log x tells what the plans of the last u and v are worth.
        """
        self.number += 1
        log_kv = self.kernel.log_dot(self.log_x)
        if self.made and not self.extrapolated:
            self.gap, self.error = self.certified(log_kv)
            if self.error <= self.tol:
                return "converged"
        state = self.log_u, self.log_v, self.q, self.gap, self.error
        self.log_u = scaled(self.fi, self.log_a, log_kv)
        log_s, log_q, amounts = self.translated(self.kernel.log_dot_transpose(self.log_u))
        self.move(log_q, log_s)
        mass = float(self.q.sum())
        dual = self.terms - self.rho * float(amounts.sum()) - self.reg * mass  # but for what no pass changes
        stat = Stats(self.number, self.gap, self.error, dual, mass, self.change, False, "running")
        self.judge.progress.extrapolated = self.extrapolated
        if self.judge.settle(dual, mass):
            self.log_u, self.log_v, self.q, self.gap, self.error = state
            self.log_x, self.extrapolated, stat.rejected = self.log_v, False, True
            self.history.clear()
        else:
            self.made, self.gap, self.error = True, math.inf, math.inf
            self.advance(log_s)
        return self.judge.judge(stat)

    def advance(self, log_s: F64) -> None:
        """Choose the next log x: Anderson's, or log v where the plans may be good enough to be certified."""
        image, before = self.log_v, self.log_x
        held = np.isfinite(image)
        if not held.all():
            image, before, log_s = (np.where(held, x, 0.0) for x in (image, before, log_s))
        residual, column = image - before, np.exp(image + log_s) * (held * self.weights[:, None])
        # the gap of the columns before v moved, to second order: rho KL of sums that are off by residual / fi
        guess, mass = 0.5 * self.rho * float((column * residual**2).sum()) / self.fi**2, float(column.sum())
        self.guessed = plan_error(guess / (self.reg * mass)) if mass > 0 else math.inf
        self.since_whole += 1
        self.extrapolated = self.history.add(residual.ravel(), image.ravel())
        if self.guessed * self.ratio <= self.tol or self.since_whole >= WHOLE_PASSES:
            self.extrapolated, self.since_whole = False, 0
        self.log_x = self.log_v
        if self.extrapolated:
            step = self.history.next(column.ravel(), 0.0)[0].reshape(image.shape)
            self.log_x = step if held.all() else np.where(held, step, -np.inf)

    def asked(self) -> F64:
        """Return A u^(-reg / rho), the rows that the potentials ask for; none where nothing reaches a row."""
        return np.asarray(self.A * np.exp(-self.reg / self.rho * np.where(np.isfinite(self.log_u), self.log_u, np.inf)))

    def translated(self, log_s: F64) -> tuple[F64, F64, F64]:
        """Move each log u_s by a number that raises the dual value; return log s, log q and w_s |asked_s| after it.

        With log u_s + N y_s, N = 1 / (1 - fi), the value is - rho sum_s B_s e^(-y_s / fi) - reg sum_j (sum_s w_s e^y_s
        s_sj^(1 - fi))^N, B_s = w_s |asked_s|: the best common y, then a step of Newton's method, if that raises it.
        """
        N, kappa, B = 1 / (1 - self.fi), 1 / self.fi, self.weights * self.asked().sum(1)
        terms = (1 - self.fi) * log_s + self.log_w
        top, share = shares(terms)
        highest = N * top.max()
        least = float(np.exp(N * top - highest).sum())  # |q| may lie beyond float64 in a first pass
        if not (0 < least < math.inf and 0 < B.sum() < math.inf):
            return log_s, N * top, B
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
        self.log_u = self.log_u + move
        return log_s + move, N * top, B

    def certified(self, log_kv: F64) -> tuple[float, float]:
        """Return the gap and the certified relative error of the plans of log u and log v, where log_kv = log K v.

        ``delta`` bounds the relative rounding of sums and entries, ``slip`` that of v as a point of the dual's domain.
        """
        asked, mass = self.asked(), float(self.q.sum())
        t = self.log_u / self.fi + log_kv - self.log_a  # log of r / asked
        t[~np.isfinite(t)] = 0.0
        grown = np.expm1(t)
        kl = float(self.weights @ (asked * (t * grown - (grown - t))).sum(1))  # KL(r | asked)
        both = float(self.weights @ (asked * (2 + grown)).sum(1))
        sizes = largest(self.log_u) + largest(self.log_v) + largest(log_kv)
        delta = self.kernel.error + UNIT * (4 * sizes + 4 * largest(self.log_a) + 16)
        slip = 8 * UNIT * (self.rho / self.reg + largest(self.log_v) + 1)
        root = math.sqrt(self.rho) * (math.sqrt(max(kl, 0.0)) + 2 * delta * math.sqrt(both + mass))
        if not (root < math.inf and mass > 0 and delta + slip < 0.1):
            return math.inf, math.inf
        error = plan_error(root * root / (self.reg * mass)) * (1 + 4 * delta) + 2 * delta + slip
        if 0 < self.guessed < math.inf:
            self.ratio = min(MOST_RATIO, max(1 / MOST_RATIO, error / self.guessed))
        return root * root, error

    def conclude(self) -> None:
        """Certify the plans that the last pass left, if that has not been done."""
        if self.made and self.error == math.inf:
            self.gap, self.error = self.certified(self.kernel.log_dot(self.log_v))


def largest(x: F64) -> float:
    """Return the largest finite size in x."""
    return float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))


def shares(x: F64) -> tuple[F64, F64]:
    """Return log sum_s e^x_s of each column, -inf where all are, and each term's share of that sum."""
    top = x.max(axis=0)
    top[np.isneginf(top)] = 0.0
    terms = np.exp(x - top)
    total = terms.sum(0)
    return np.log(total) + top, terms / np.where(total > 0, total, 1.0)
