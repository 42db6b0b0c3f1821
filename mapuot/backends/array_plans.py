"""Plans and equations of Newton's steps with a factor, for all penalties, by arrays of the host or of a GPU.

A backend adds the exponential, the products and the factors (cpu/factored.py, cuda/factored.py). On a GPU problems with
KL and hard sides have kernels of their own instead.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..penalties import F64
from .factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Margin, StepNumbers, TrialNumbers
from .margins import margin_of

MOST_DOUBLINGS, HALVINGS = 40, 60  # of a translation of 1 nat, and of the interval that holds the best one
SUM_ROUNDING = 1e-13  # of sums of marginals
NEAR_KINK = 0.1  # nats, and the share of the mass that columns miss: the reach of a kink
BEYOND_KINK = 1e-9  # nats, or part of a shift: a point that crosses a kink stops at it


class ArrayPlans:
    """A `FactoredPlans` of backends/factored.py, but for the methods of a backend.

    A plan is kept as ``scale_i weights_ij``, where the largest weight of a row is 1. Matrices of n x n are symmetric.

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
    """

    def __init__(
        self, costs: Any, log_c: tuple[Any, Any], sides: tuple[Margin, Margin], log_u: Any, log_v: Any
    ) -> None:  # fmt: skip
        xp = self.xp = namespace(costs)
        self.costs = costs
        self.log_c = log_c
        self.rows, self.cols = map(margin_of, sides)
        self.all_hard = all(side.penalty in ("kl", "balanced") and not (host(side.k) > 0).any() for side in sides)
        self.has_kinks = any(side.penalty in ("tv", "range") for side in sides)
        self.count, self.m, self.n = costs.shape
        self.weights = xp.empty_like(costs)
        self.scaled = xp.empty(costs.shape[1:])  # matrices of one problem, for a product or a factor
        self.S = xp.empty((self.count, self.n, self.n))
        self.scale_of = xp.zeros_like(log_u)
        self.log_u = log_u.copy()
        self.log_v = log_v.copy()
        self.r = xp.zeros_like(log_u)
        self.s = xp.zeros_like(log_v)
        self.q = xp.zeros_like(log_v)
        self.next = [x.copy() for x in self.own]  # of the last trials
        self.best = self.log_u.copy(), self.log_v.copy()
        self.y = xp.zeros_like(log_v)
        self.size = xp.ones_like(log_v)
        self.right = xp.zeros_like(log_v)
        self.translation = xp.zeros(self.count)  # of log v as a whole, beside y
        self.set_level(1.0)

    # ---- a backend's

    def exponentiate(self, weights: Any) -> None:
        """Replace exponents <= 0 by their exponentials."""
        raise NotImplementedError

    def working(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def form_product(self, place: int) -> Any:
        """Set S of a problem to -scaled^T scaled with a diagonal of 0; return the sums of its rows."""
        raise NotImplementedError

    def add_square(self, place: int, x: Any, factor: float) -> None:
        """Add ``factor`` x x^T to S of a problem."""
        raise NotImplementedError

    def solve_one(self, place: int, added: Any) -> Any:
        """Solve (S + diag(added)) y = right of a problem, set y, and return what it leaves of the right side."""
        raise NotImplementedError

    # ---- potentials

    @property
    def own(self) -> list[Any]:
        return [self.log_u, self.log_v, self.r, self.s, self.q]

    def set_level(self, level: float) -> None:
        self.rows.at(level)
        self.cols.at(level)
        self.level = level

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        at = self.xp.asarray(places)
        for x, given in ((self.log_u, self.xp.asarray(log_u)), (self.log_v, self.xp.asarray(log_v))):
            x[at] = np.where(np.isfinite(x[at]), np.where(np.isfinite(given), given, 0.0), -np.inf)

    def scale(self, places: Any, factor: float) -> None:
        at = self.xp.asarray(places)
        self.log_u[at] *= factor
        self.log_v[at] *= factor

    def keep(self, places: Any) -> None:
        at = self.xp.asarray(places)
        for x, own in zip(self.best, (self.log_u, self.log_v), strict=True):
            x[at] = own[at]

    # ---- plans

    def weigh(self, place: int, log_x: Any, axis: int) -> tuple[Any, Any]:
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
        self.exponentiate(weights)
        return top.ravel(), weights.sum(axis)

    def meet_columns(self, places: Any) -> None:
        at = self.xp.asarray(places)
        log_v = self.log_v[at]
        top, sums = self.xp.empty((2, *log_v.shape))
        for k, i in enumerate(places):
            top[k], sums[k] = self.weigh(i, (self.log_u[i] + self.log_c[0][i])[:, None], 0)
        found = self.cols.of(at).change(np.zeros_like(log_v), np.log(sums) + top + self.log_c[1][at])
        self.log_v[at] = np.where(np.isfinite(log_v) & (sums > 0), found, log_v)
        if not self.all_hard:
            c = self.translations(at)[:, None]
            self.log_u[at] -= c
            self.log_v[at] += c

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        at = self.xp.asarray(places)
        rows, cols = self.rows.of(at), self.cols.of(at)
        log_u, log_v, r, s, q = (x[at] for x in self.own)
        log_c = self.log_c[0][at]
        step = self.xp.asarray(np.where(lengths > 0, lengths, 0.0))[:, None] * self.y[at]
        new_v = cols.bounded(log_v, log_v + step, s)
        top, sums = self.xp.empty((2, *log_u.shape))
        for k, i in enumerate(places):
            top[k], sums[k] = self.weigh(i, new_v[k] + self.log_c[1][i], 1)
        used = np.isfinite(log_u)
        top += np.where(used, log_u + log_c, -np.inf)
        change = np.where(used & (sums > 0), rows.change(log_u, np.log(sums) + top), 0.0)
        scale = np.exp(top + change)
        self.scale_of[at] = scale
        new_r = sums * scale
        new_s = np.stack([scale[k] @ self.weights[i] for k, i in enumerate(places)])
        new_q = np.where(np.isfinite(new_v), cols.asked(new_v, new_s), 0.0)
        new = log_u + change, new_v, new_r, new_s, new_q
        for x, y in zip(self.next, new, strict=True):
            x[at] = y
        moved = difference(new_v, log_v)
        of_rows = rows.lift(log_u, change, r) - rows.growth(r, new_r, change)
        of_cols = cols.lift(log_v, moved, q)
        size = abs(of_rows).sum(1) + abs(of_cols).sum(1) + r.sum(1)
        missed = abs(new_q - new_s).sum(1) / new_r.sum(1)
        rounding = EXPONENT_ROUNDING * (largest(new[0]) + largest(new_v))
        noise = GAIN_ROUNDING * size + rounding * r.sum(1)
        gain = of_rows.sum(1) + of_cols.sum(1)
        promise = (moved * (q - s)).sum(1)
        return TrialNumbers(*host(np.stack([missed, gain, noise, rounding, promise])))

    def accept(self, places: Any) -> None:
        at = self.xp.asarray(places)
        for x, y in zip(self.own, self.next, strict=True):
            x[at] = y[at]

    # ---- equations

    def form_equations(self, places: Any) -> None:
        at = self.xp.asarray(places)
        margins = self.rows.of(at), self.cols.of(at)
        log_u, log_v, r, s, q = (x[at] for x in self.own)
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
        is_singular &= (sizes > 0).any(1)  # else no column takes part, and S is the identity
        self.size[at] = np.where(stays, 1.0, sizes)
        self.right[at] = right
        self.translation[at] = 0.0
        some_singular, some_held = map(host, (is_singular, held.any(1)))
        if self.has_kinks and some_singular.any():  # the plan stays, and its value is linear between kinks
            which = at[is_singular]
            c = self.translations(which)
            self.translation[which] = c + BEYOND_KINK * np.copysign(np.maximum(abs(c), c != 0), c)
        for k, i in enumerate(places):
            np.multiply(self.weights[i], (self.scale_of[i] * roots[k])[:, None], out=self.scaled)
            own = steepness[k] - self.form_product(i)  # positive: s - P^2 / r would cancel
            own += ((1.0 - fi[k]) * self.scale_of[i]) @ self.weights[i]
            if some_held[k]:
                free = ~held[k]
                self.S[i] *= free[:, None] & free
            self.S[i].reshape(-1)[:: self.n + 1] = np.where(stays[k], 1.0, own)
            if some_singular[k]:
                self.add_square(i, sizes[k], CONSTANT / float(sizes[k].sum()))

    def translations(self, at: Any) -> Any:
        """Return the best growth c of log v and fall of log u, for the dual value: a pass without K."""
        rows, cols = self.rows.of(at), self.cols.of(at)
        log_u, log_v, r, s, _ = (x[at] for x in self.own)
        used = np.isfinite(log_u), np.isfinite(log_v)

        def slope(c: Any) -> Any:
            asked = rows.asked(log_u - c[:, None], r), cols.asked(log_v + c[:, None], s)
            of_rows, of_cols = (np.where(mask, x, 0.0).sum(1) for mask, x in zip(used, asked, strict=True))
            found = of_cols - of_rows
            return np.where(abs(found) < SUM_ROUNDING * (of_cols + of_rows), 0.0, found)

        low = self.xp.zeros(len(at))
        high = self.xp.ones(len(at))
        way = np.sign(slope(low))
        for _ in range(MOST_DOUBLINGS):
            rises = slope(way * high) * way > 0
            low = np.where(rises, high, low)
            high = np.where(rises, 2.0 * high, high)
        has_end = (way != 0) & ~(slope(way * high) * way > 0)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            rises = slope(way * middle) * way > 0
            low = np.where(rises, middle, low)
            high = np.where(rises, high, middle)
        return np.where(has_end, way * high, 0.0)

    def solve(self, places: Any, shifts: F64) -> StepNumbers:
        at = self.xp.asarray(places)
        right = self.right[at]
        added = self.xp.asarray(shifts)[:, None] * self.size[at]
        rest = np.stack([self.solve_one(i, added[k]) for k, i in enumerate(places)])
        y = self.y[at]
        self.y[at] += self.translation[at, None]
        left, asked, far = host(np.stack([(rest**2).sum(1), (right**2).sum(1), abs(y).max(1)]))
        return StepNumbers(left <= RESIDUAL**2 * asked, far)


def largest(log_x: Any) -> Any:
    """Return the largest finite size of each row."""
    return np.where(np.isfinite(log_x), abs(log_x), 0.0).max(1)


def difference(x: Any, y: Any) -> Any:
    """Return x - y, 0 at points that are left out, where both are -inf."""
    return np.where(np.isfinite(y), x - y, 0.0)
