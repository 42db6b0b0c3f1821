"""Plans and equations of Newton's steps with a factor, by NumPy and LAPACK; twin of backends/cuda/factored.py."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...penalties import F64
from ..factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Judged, Margin, Solved
from .blas import SERIAL_UNKNOWNS, limited
from .margins import margin_of

LEAST_LOG = -700.0  # exponents below count as this one and give 0: NumPy takes 10 times as long where they underflow
MOST_DOUBLINGS, HALVINGS = 40, 60  # of a translation of 1 nat, and of the interval that holds the best one
SUM_ROUNDING = 1e-13  # of sums of marginals
NEAR_KINK = 0.1  # nats, and the share of the mass that columns miss: the reach of a kink
BEYOND_KINK = 1e-9  # nats, or part of a shift: a point that crosses a kink stops at it
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
    sides : pair of Margin
        Rows and columns.
    log_u, log_v : (p, m), (p, n) arrays
        Where to start; -inf at points that are left out.
    threads : int
        Most threads of BLAS.
    """

    def __init__(
        self, costs: F64, log_c: tuple[F64, F64], sides: tuple[Margin, Margin], log_u: F64, log_v: F64,
        threads: int = 1,
    ) -> None:  # fmt: skip
        self.threads = threads
        self.costs = costs
        self.log_c = log_c
        self.rows, self.cols = map(margin_of, sides)
        self.all_hard = all(side.penalty in ("kl", "balanced") and not (side.k > 0).any() for side in sides)
        self.has_kinks = any(side.penalty in ("tv", "range") for side in sides)
        self.count, self.m, self.n = costs.shape
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
        self.translation = np.zeros(self.count)  # of log v as a whole, beside y
        self.set_level(1.0)

    @property
    def own(self) -> list[F64]:
        return [self.log_u, self.log_v, self.r, self.s, self.q]

    def set_level(self, level: float) -> None:
        self.rows.at(level)
        self.cols.at(level)
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
        log_v = self.log_v[places]
        top, sums = np.empty((2, *log_v.shape))
        for k, i in enumerate(places):
            top[k], sums[k] = self.weigh(i, (self.log_u[i] + self.log_c[0][i])[:, None], 0)
        found = self.cols.of(places).change(np.zeros_like(log_v), np.log(sums) + top + self.log_c[1][places])
        self.log_v[places] = np.where(np.isfinite(log_v) & (sums > 0), found, log_v)
        if not self.all_hard:
            c = self.translations(places)[:, None]
            self.log_u[places] -= c
            self.log_v[places] += c

    def working(self) -> AbstractContextManager[None]:
        if min(self.m, self.n) <= SERIAL_UNKNOWNS:
            return limited(1)
        return limited(self.threads)

    def trial(self, places: Any, lengths: F64) -> Judged:
        rows, cols = self.rows.of(places), self.cols.of(places)
        log_u, log_v, r, s, q = (x[places] for x in self.own)
        log_c = self.log_c[0][places]
        step = np.where(lengths > 0, lengths, 0.0)[:, None] * self.y[places]
        new_v = cols.bounded(log_v, log_v + step, s)
        top, sums = np.empty((2, *log_u.shape))
        for k, i in enumerate(places):
            top[k], sums[k] = self.weigh(i, new_v[k] + self.log_c[1][i], 1)
        used = np.isfinite(log_u)
        top += np.where(used, log_u + log_c, -np.inf)
        change = np.where(used & (sums > 0), rows.change(log_u, np.log(sums) + top), 0.0)
        scale = np.exp(top + change)
        self.scale_of[places] = scale
        new_r = sums * scale
        new_s = np.stack([scale[k] @ self.weights[i] for k, i in enumerate(places)])
        new_q = np.where(np.isfinite(new_v), cols.asked(new_v, new_s), 0.0)
        new = log_u + change, new_v, new_r, new_s, new_q
        for x, y in zip(self.next, new, strict=True):
            x[places] = y
        moved = difference(new_v, log_v)
        of_rows = rows.lift(log_u, change, r) - rows.growth(r, new_r, change)
        of_cols = cols.lift(log_v, moved, q)
        size = abs(of_rows).sum(1) + abs(of_cols).sum(1) + r.sum(1)
        missed = abs(new_q - new_s).sum(1) / new_r.sum(1)
        rounding = EXPONENT_ROUNDING * (largest(new[0]) + largest(new_v))
        noise = GAIN_ROUNDING * size + rounding * r.sum(1)
        return Judged(missed, of_rows.sum(1) + of_cols.sum(1), noise, rounding, (moved * (q - s)).sum(1))

    def accept(self, places: Any) -> None:
        for x, y in zip(self.own, self.next, strict=True):
            x[places] = y[places]

    def form_equations(self, places: Any) -> None:
        from scipy.linalg.blas import dsymv, dsyr, dsyrk  # noqa: PLC0415 - on first use

        margins = self.rows.of(places), self.cols.of(places)
        log_u, log_v, r, s, q = (x[places] for x in self.own)
        fi = margins[0].fall(log_u, r)
        roots = np.sqrt(np.where(r > 0, fi / r, 0.0))
        steepness = margins[1].steepness(log_v, q)
        sizes = np.maximum(s, q) + steepness  # a column that gets nothing moves by 1 / shift
        stays = margins[1].stays(log_v, s) | ~(sizes > 0)
        right = np.where(stays, 0.0, q - s)
        missed = abs(right).sum(1, keepdims=True) / r.sum(1, keepdims=True)
        # Bertsekas: the direction ascends if points that it would stop at once are moved by their own equations
        held = stays | margins[1].nears(log_v, right, np.minimum(missed, NEAR_KINK))
        is_singular = ~((r > 0) & (fi < 1.0)).any(1) & ~(steepness > 0).any(1) & ~(held & (sizes > 0)).any(1)
        self.size[places] = np.where(stays, 1.0, sizes)
        self.right[places] = right
        self.translation[places] = 0.0
        if self.has_kinks and is_singular.any():  # the plan stays, and its value is linear between kinks
            c = self.translations(places[is_singular])
            self.translation[places[is_singular]] = c + BEYOND_KINK * np.copysign(np.maximum(abs(c), c != 0), c)
        for k, i in enumerate(places):
            np.multiply(self.weights[i], (self.scale_of[i] * roots[k])[:, None], out=self.scaled)
            S = self.S[i].T
            dsyrk(-1.0, self.scaled.T, c=S, lower=True, overwrite_c=True)
            diagonal = self.S[i].reshape(-1)[:: self.n + 1]
            diagonal[:] = 0.0
            own = steepness[k] - dsymv(1.0, S, np.ones(self.n), lower=True)  # positive: s - P^2 / r would cancel
            own += ((1.0 - fi[k]) * self.scale_of[i]) @ self.weights[i]
            if held[k].any():
                self.S[i][held[k]] = 0.0
                self.S[i][:, held[k]] = 0.0
            diagonal[:] = np.where(stays[k], 1.0, own)
            if is_singular[k]:
                dsyr(CONSTANT / sizes[k].sum(), sizes[k], a=S, lower=True, overwrite_a=True)

    def translations(self, places: Any) -> F64:
        """Return the best growth c of log v and fall of log u, for the dual value: a pass without K."""
        rows, cols = self.rows.of(places), self.cols.of(places)
        log_u, log_v, r, s, _ = (x[places] for x in self.own)
        used = np.isfinite(log_u), np.isfinite(log_v)

        def slope(c: F64) -> F64:
            asked = rows.asked(log_u - c[:, None], r), cols.asked(log_v + c[:, None], s)
            of_rows, of_cols = (np.where(mask, x, 0.0).sum(1) for mask, x in zip(used, asked, strict=True))
            found = of_cols - of_rows
            return np.where(abs(found) < SUM_ROUNDING * (of_cols + of_rows), 0.0, found)

        none = np.zeros(len(places))
        way = np.sign(slope(none))
        high = np.ones(len(places))
        low = none
        for _ in range(MOST_DOUBLINGS):
            rises = slope(way * high) * way > 0
            low = np.where(rises, high, low)
            high = np.where(rises, 2.0 * high, high)
        has_end = (way != 0) & ~(slope(way * high) * way > 0)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            rises = slope(way * middle) * way > 0
            low, high = np.where(rises, middle, low), np.where(rises, high, middle)
        return np.where(has_end, way * high, 0.0)

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
        self.y[places] += self.translation[places, None]
        solved = (rest**2).sum(1) <= RESIDUAL**2 * (right**2).sum(1)
        return Solved(solved, abs(y).max(1))


def largest(log_x: F64) -> F64:
    """Return the largest finite size of each row."""
    return np.asarray(np.where(np.isfinite(log_x), abs(log_x), 0.0).max(1))


def difference(x: F64, y: F64) -> F64:
    """Return x - y, 0 at points that are left out, where both are -inf."""
    return np.where(np.isfinite(y), x - y, 0.0)
