"""Plans and equations of Newton's steps with a factor, by NumPy and LAPACK; twin of backends/cuda/factored.py."""

from typing import Any

import numpy as np

from ...penalties import F64
from ..factored import CONSTANT, EXPONENT_ROUNDING, GAIN_ROUNDING, RESIDUAL, Judged, Sides, Solved


class HostPlans:
    """A `FactoredPlans` of backends/factored.py.

    Parameters
    ----------
    costs : (p, m, n) array
        M / reg; inf forbids a pair.
    log_c : pair of arrays
        Logarithms of the reference: a term of each row (p, m) and one of each column (p, n).
    sides : Sides
    log_u, log_v : (p, m), (p, n) arrays
        Where to start; -inf at points that are left out.
    """

    def __init__(self, costs: F64, log_c: tuple[F64, F64], sides: Sides, log_u: F64, log_v: F64) -> None:
        self.costs, self.asked = costs, sides
        self.count, self.m, self.n = costs.shape
        self.log_c = log_c[0][:, :, None] + log_c[1][:, None, :]
        self.all_hard = not ((sides.k_rows > 0).any() or (sides.k_cols > 0).any())
        self.exponents = np.empty_like(costs)
        self.plan = np.empty_like(costs)
        self.log_u = log_u.copy()
        self.log_v = log_v.copy()
        self.r = np.zeros_like(log_u)
        self.s = np.zeros_like(log_v)
        self.q = np.zeros_like(log_v)
        self.next = [x.copy() for x in self.own]  # of the last trials
        self.best = self.log_u.copy(), self.log_v.copy()
        self.y = np.zeros_like(log_v)
        self.set_level(1.0)

    @property
    def own(self) -> list[F64]:
        return [self.log_u, self.log_v, self.r, self.s, self.q]

    def of(self, places: Any) -> Any:
        """Return an index of these problems: all of them as a slice, which copies nothing."""
        return slice(None) if len(places) == self.count else places

    def set_level(self, level: float) -> None:
        a, b, k_rows, k_cols = self.asked
        self.sides = Sides(a, b, level * k_rows, level * k_cols)
        self.fi = 1.0 / (1.0 + self.sides.k_rows)
        np.multiply(self.costs, -1.0 / level, out=self.exponents)
        self.exponents += self.log_c

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        for x, given in ((self.log_u, log_u), (self.log_v, log_v)):
            x[places] = np.where(np.isfinite(x[places]), np.where(np.isfinite(given), given, 0.0), -np.inf)

    def scale(self, places: Any, factor: float) -> None:
        self.log_u[places] *= factor
        self.log_v[places] *= factor

    def keep(self, places: Any) -> None:
        for x, own in zip(self.best, (self.log_u, self.log_v), strict=True):
            x[places] = own[places]

    def meet_columns(self, places: Any) -> None:
        which = self.of(places)
        _, b, _, k_cols = self.sides.of(which)
        exponents = self.exponents[which] + self.log_u[which][:, :, None]
        top = exponents.max(1)
        top = np.where(np.isfinite(top), top, 0.0)
        exponents -= top[:, None, :]
        sums = np.exp(exponents, out=exponents).sum(1)
        found = (np.log(b) - np.log(sums) - top) / (1.0 + k_cols)
        self.log_v[which] = np.where((b > 0) & (sums > 0), found, self.log_v[which])

    def trial(self, places: Any, lengths: F64) -> Judged:
        which = self.of(places)
        a, b, k_rows, k_cols = self.sides.of(which)
        log_u, log_v, r, _, q = (x[which] for x in self.own)
        new_v = log_v + np.where(lengths > 0, lengths, 0.0)[:, None] * self.y[which]
        plan = self.exponents[which] + new_v[:, None, :]
        plan += log_u[:, :, None]
        top = plan.max(2)
        top = np.where(np.isfinite(top), top, 0.0)
        plan -= top[:, :, None]
        np.exp(plan, out=plan)
        sums = plan.sum(2)
        change = self.fi[which] * (np.log(a) - k_rows * log_u - np.log(sums) - top)
        change = np.where((a > 0) & (sums > 0), change, 0.0)
        scale = np.exp(top + change)
        plan *= scale[:, :, None]
        new_q = np.where(b > 0, b * np.exp(-k_cols * new_v), 0.0)
        new = log_u + change, new_v, sums * scale, plan.sum(1), new_q
        self.plan[which] = plan
        for x, y in zip(self.next, new, strict=True):
            x[which] = y
        rows = gain_of(r, k_rows, difference(new[0], log_u), 1.0)
        cols = gain_of(q, k_cols, difference(new_v, log_v), 0.0)
        size = abs(rows).sum(1) + abs(cols).sum(1) + r.sum(1)
        missed = abs(new_q - new[3]).sum(1) / new[2].sum(1)
        rounding = EXPONENT_ROUNDING * (largest(new[0]) + largest(new_v))
        noise = GAIN_ROUNDING * size + rounding * r.sum(1)
        return Judged(missed, rows.sum(1) + cols.sum(1), noise, rounding)

    def accept(self, places: Any) -> None:
        which = self.of(places)
        for x, y in zip(self.own, self.next, strict=True):
            x[which] = y[which]

    def form_equations(self, places: Any) -> None:
        which = self.of(places)
        plan, r, s, q = (x[which] for x in (self.plan, self.r, self.s, self.q))
        fi, k_cols = self.fi[which], self.sides.k_cols[which]
        weighed = plan * np.sqrt(np.where(r > 0, fi / r, 0.0))[:, :, None]
        S = np.matmul(weighed.swapaxes(1, 2), weighed)
        S *= -1.0
        diagonal_of(S)[:] = 0.0
        own = -S.sum(2) + k_cols * q  # a sum of positive terms: s - P^2 / r would cancel
        if not self.all_hard:
            own += np.matmul((1.0 - fi)[:, None, :], plan)[:, 0]
        size = np.maximum(s, q) + k_cols * q  # a column that gets nothing moves by 1 / shift
        used = size > 0
        diagonal_of(S)[:] = np.where(used, own, 1.0)
        if self.all_hard:
            S += (CONSTANT / size.sum(1))[:, None, None] * (size[:, :, None] * size[:, None, :])
        self.S = S
        self.size = np.where(used, size, 1.0)
        self.right = np.where(used, q - s, 0.0)
        self.place_of = np.zeros(self.count, int)  # of each problem in S
        self.place_of[places] = np.arange(len(places))

    def solve(self, places: Any, shifts: F64) -> Solved:
        at = self.place_of[places]
        S, right = self.S[at], self.right[at]
        added = shifts[:, None] * self.size[at]
        y = np.full(right.shape, np.nan)
        for i, matrix in enumerate(S):
            shifted = matrix.copy()
            shifted.flat[:: self.n + 1] += added[i]
            y[i] = solution(shifted, right[i])
        self.y[places] = y
        rest = right - np.matmul(S, y[:, :, None])[:, :, 0] - added * y
        solved = (rest**2).sum(1) <= RESIDUAL**2 * (right**2).sum(1)
        return Solved(solved, abs(y).max(1), (y * right).sum(1))


def solution(S: F64, x: F64) -> Any:
    """Solve positive definite equations, whose matrix is overwritten; NaN if the matrix is not positive definite."""
    from scipy.linalg.lapack import dposv  # noqa: PLC0415 - on first use

    _, y, failed = dposv(S.T, x, lower=True, overwrite_a=True)
    return np.nan if failed else y


def largest(log_x: F64) -> F64:
    """Return the largest finite size of each row."""
    return np.asarray(np.where(np.isfinite(log_x), abs(log_x), 0.0).max(1))


def diagonal_of(S: F64) -> F64:
    """Return the diagonals of contiguous matrices (p, n, n) as a view (p, n)."""
    p, n, _ = S.shape
    return S.reshape(p, n * n)[:, :: n + 1]


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
