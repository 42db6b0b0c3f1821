"""Plans and equations of Newton's steps with a factor, by NumPy and LAPACK; twin of backends/cuda/factored.py."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...penalties import F64
from ..factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Judged, Sides, Solved
from .blas import SERIAL_UNKNOWNS, limited

LEAST_LOG = -700.0  # exponents below count as this one and give 0: NumPy takes 10 times as long where they underflow
LEAST_WEIGHT = np.exp(np.full(8, LEAST_LOG))[0]  # by the same vectors


class HostPlans:
    """A `FactoredPlans` of backends/factored.py.

    A plan is kept as ``scale_i weights_ij``, where the largest weight of a row is 1. Matrices of n x n are symmetric;
    their lower triangles are used, in Fortran's order.

    Parameters
    ----------
    costs : (p, m, n) array
        M / reg; inf forbids a pair.
    log_c : pair of arrays
        Logarithms of the reference: a term of each row (p, m) and one of each column (p, n).
    sides : Sides
    log_u, log_v : (p, m), (p, n) arrays
        Where to start; -inf at points that are left out.
    threads : int
        Most threads of BLAS.
    """

    def __init__(
        self, costs: F64, log_c: tuple[F64, F64], sides: Sides, log_u: F64, log_v: F64, threads: int = 1
    ) -> None:
        self.threads = threads
        self.costs = costs
        self.log_c = log_c
        self.asked = sides
        self.count, self.m, self.n = costs.shape
        self.all_hard = not ((sides.k_rows > 0).any() or (sides.k_cols > 0).any())
        self.weights = np.empty_like(costs)
        self.scaled = np.empty(costs.shape[1:])  # matrices of one problem, for a product or a factor
        self.S = np.empty((self.count, self.n, self.n))
        self.scale_of = np.zeros_like(log_u)
        self.log_u = log_u.copy()
        self.log_v = log_v.copy()
        self.r = np.zeros_like(log_u)
        self.s = np.zeros_like(log_v)
        self.q = np.zeros_like(log_v)
        self.next = [x.copy() for x in self.own]  # of the last trials
        self.best = self.log_u.copy(), self.log_v.copy()
        self.y = np.zeros_like(log_v)
        self.size = np.ones_like(log_v)
        self.right = np.zeros_like(log_v)
        self.set_level(1.0)

    @property
    def own(self) -> list[F64]:
        return [self.log_u, self.log_v, self.r, self.s, self.q]

    def set_level(self, level: float) -> None:
        a, b, k_rows, k_cols = self.asked
        self.sides = Sides(a, b, level * k_rows, level * k_cols)
        self.fi = 1.0 / (1.0 + self.sides.k_rows)
        self.level = level

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        for x, given in ((self.log_u, log_u), (self.log_v, log_v)):
            x[places] = np.where(np.isfinite(x[places]), np.where(np.isfinite(given), given, 0.0), -np.inf)

    def scale(self, places: Any, factor: float) -> None:
        self.log_u[places] *= factor
        self.log_v[places] *= factor

    def keep(self, places: Any) -> None:
        for x, own in zip(self.best, (self.log_u, self.log_v), strict=True):
            x[places] = own[places]

    def weigh(self, place: int, log_x: F64, axis: int) -> tuple[F64, F64]:
        """Set the weights of a problem to e^(log_x - costs / level - top); return top and the sums along an axis.

        ``log_x``: of the points of that axis; ``top``: the largest exponents along it, 0 where no pair is allowed.
        """
        costs = self.costs[place]
        weights = self.weights[place]
        if self.level != 1.0:
            costs = np.divide(costs, self.level, out=weights)
        np.subtract(log_x, costs, out=weights)
        top = weights.max(axis, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        weights -= top
        np.maximum(weights, LEAST_LOG, out=weights)
        np.exp(weights, out=weights)
        weights -= LEAST_WEIGHT
        return top.ravel(), weights.sum(axis)

    def meet_columns(self, places: Any) -> None:
        for i in places:
            top, sums = self.weigh(i, (self.log_u[i] + self.log_c[0][i])[:, None], 0)
            b = self.sides.b[i]
            found = (np.log(b) - np.log(sums) - top - self.log_c[1][i]) / (1.0 + self.sides.k_cols[i])
            self.log_v[i] = np.where((b > 0) & (sums > 0), found, self.log_v[i])

    def working(self) -> AbstractContextManager[None]:
        if min(self.m, self.n) <= SERIAL_UNKNOWNS:
            return limited(1)
        return limited(self.threads)

    def trial(self, places: Any, lengths: F64) -> Judged:
        a, b, k_rows, k_cols = self.sides.of(places)
        log_u, log_v, r, _, q = (x[places] for x in self.own)
        log_c = self.log_c[0][places]
        new_v = log_v + np.where(lengths > 0, lengths, 0.0)[:, None] * self.y[places]
        top, sums = np.empty((2, *log_u.shape))
        for k, i in enumerate(places):
            top[k], sums[k] = self.weigh(i, new_v[k] + self.log_c[1][i], 1)
        top += np.where(np.isfinite(log_u), log_u + log_c, -np.inf)
        change = self.fi[places] * (np.log(a) - k_rows * log_u - np.log(sums) - top)
        change = np.where((a > 0) & (sums > 0), change, 0.0)
        scale = np.exp(top + change)
        self.scale_of[places] = scale
        new_s = np.stack([scale[k] @ self.weights[i] for k, i in enumerate(places)])
        new_q = np.where(b > 0, b * np.exp(-k_cols * new_v), 0.0)
        new = log_u + change, new_v, sums * scale, new_s, new_q
        for x, y in zip(self.next, new, strict=True):
            x[places] = y
        rows = gain_of(r, k_rows, difference(new[0], log_u), 1.0)
        cols = gain_of(q, k_cols, difference(new_v, log_v), 0.0)
        size = abs(rows).sum(1) + abs(cols).sum(1) + r.sum(1)
        missed = abs(new_q - new_s).sum(1) / new[2].sum(1)
        rounding = EXPONENT_ROUNDING * (largest(new[0]) + largest(new_v))
        noise = GAIN_ROUNDING * size + rounding * r.sum(1)
        return Judged(missed, rows.sum(1) + cols.sum(1), noise, rounding)

    def accept(self, places: Any) -> None:
        for x, y in zip(self.own, self.next, strict=True):
            x[places] = y[places]

    def form_equations(self, places: Any) -> None:
        from scipy.linalg.blas import dsymv, dsyr, dsyrk  # noqa: PLC0415 - on first use

        for i in places:
            r, s, q = (x[i] for x in (self.r, self.s, self.q))
            fi, k_cols = self.fi[i], self.sides.k_cols[i]
            root = np.sqrt(np.where(r > 0, fi / r, 0.0))
            np.multiply(self.weights[i], (self.scale_of[i] * root)[:, None], out=self.scaled)
            S = self.S[i].T
            dsyrk(-1.0, self.scaled.T, c=S, lower=True, overwrite_c=True)
            diagonal = self.S[i].reshape(-1)[:: self.n + 1]
            diagonal[:] = 0.0
            own = k_cols * q - dsymv(1.0, S, np.ones(self.n), lower=True)  # positive terms: s - P^2 / r would cancel
            if not self.all_hard:
                own += ((1.0 - fi) * self.scale_of[i]) @ self.weights[i]
            size = np.maximum(s, q) + k_cols * q  # a column that gets nothing moves by 1 / shift
            used = size > 0
            diagonal[:] = np.where(used, own, 1.0)
            if self.all_hard:
                dsyr(CONSTANT / size.sum(), size, a=S, lower=True, overwrite_a=True)
            self.size[i] = np.where(used, size, 1.0)
            self.right[i] = np.where(used, q - s, 0.0)

    def solve(self, places: Any, shifts: F64) -> Solved:
        from scipy.linalg.blas import dsymv  # noqa: PLC0415 - on first use
        from scipy.linalg.lapack import dposv  # noqa: PLC0415

        right = self.right[places]
        added = shifts[:, None] * self.size[places]
        rest = np.empty_like(right)
        shifted = self.scaled if self.m >= self.n else np.empty((self.n, self.n))
        shifted = shifted.reshape(-1)[: self.n**2].reshape(self.n, self.n)
        for k, i in enumerate(places):
            shifted[:] = self.S[i]
            shifted.reshape(-1)[:: self.n + 1] += added[k]
            _, y, failed = dposv(shifted.T, right[k], lower=True, overwrite_a=True)
            self.y[i] = np.nan if failed else y
            rest[k] = right[k] - dsymv(1.0, self.S[i].T, self.y[i], lower=True) - added[k] * self.y[i]
        y = self.y[places]
        solved = (rest**2).sum(1) <= RESIDUAL**2 * (right**2).sum(1)
        return Solved(solved, abs(y).max(1), (y * right).sum(1))


def largest(log_x: F64) -> F64:
    """Return the largest finite size of each row."""
    return np.asarray(np.where(np.isfinite(log_x), abs(log_x), 0.0).max(1))


def difference(x: F64, y: F64) -> F64:
    """Return x - y, 0 at points that are left out, where both are -inf."""
    return np.where(np.isfinite(y), x - y, 0.0)


def gain_of(marginal: F64, k: F64, change: F64, mass: float) -> F64:
    """Return what each point adds to the dual value over reg: rho q (1 - e^(-k change)) / reg, of hard ones q change.

    ``mass``: 1.0 where the plan's mass changes with the side, which then counts against it.
    """
    soft = k > 0
    grown = -np.expm1(-k * change)
    return np.asarray(marginal * np.where(soft, grown * (1.0 / np.where(soft, k, 1.0) + mass), change))
