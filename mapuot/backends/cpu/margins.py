"""Marginal penalties in Newton steps with a factor: for each, its prox, its dual term and their slopes.

All arrays are (p, points), log x is log u or log v, and dual values are over reg. ``reg`` is that of the level: `at` is
called before. docs/mathematics.md, "Other penalties", has the prox of each penalty.
"""

from typing import Any

import numpy as np

from ...penalties import F64
from ..factored import Margin


class LogarithmicMargin:
    """KL with k = reg / rho, or hard with k = 0; the optimal marginal at log x is q = t e^(-k log x)."""

    def __init__(self, given: Margin) -> None:
        self.given = given

    def at(self, level: float) -> None:
        """Multiply the reg asked for by ``level``."""
        self.k = level * self.given.k

    def of(self, places: Any) -> "LogarithmicMargin":
        """Return the margin of some problems."""
        part: LogarithmicMargin = object.__new__(type(self))
        vars(part).update({name: x[places] if isinstance(x, np.ndarray) else x for name, x in vars(self).items()})
        penalty, *arrays = self.given
        part.given = Margin(penalty, *(x if x is None else x[places] for x in arrays))
        return part

    def change(self, log_x: F64, log_sum: F64) -> F64:
        """Return by how much log x must grow to be the prox; ``log_sum``: logarithm of the marginal at log x."""
        return np.asarray((np.log(self.given.weight) - self.k * log_x - log_sum) / (1.0 + self.k))

    def fall(self, log_x: F64, marginal: F64) -> F64:
        """Return -d prox / d log sum, from 0 to 1."""
        return np.asarray(1.0 / (1.0 + self.k))

    def asked(self, log_x: F64, marginal: F64) -> F64:
        """Return the optimal marginal at log x; at a kink, of all the nearest one."""
        weight = self.given.weight
        return np.where(weight > 0, weight * np.exp(-self.k * log_x), 0.0)

    def steepness(self, log_x: F64, asked: F64) -> F64:
        """Return -d asked / d log x."""
        return np.asarray(self.k * asked)

    def lift(self, log_x: F64, change: F64, asked: F64) -> F64:
        """Return what each point adds to the dual value; ``asked``: at log x."""
        soft = self.k > 0
        return np.asarray(asked * np.where(soft, -np.expm1(-self.k * change) / np.where(soft, self.k, 1.0), change))

    def growth(self, before: F64, after: F64, change: F64) -> F64:
        """Return the growth of marginals that are asked for, before and after a change of log x."""
        return np.asarray(before * np.expm1(-self.k * change))

    def bounded(self, log_x: F64, moved: F64, marginal: F64) -> F64:
        """Return ``moved``, stopped at the first kink or bound on the way from log x, where the marginal is given."""
        return moved

    def stays(self, log_x: F64, marginal: F64) -> Any:
        """Return the points at a kink or bound that their marginals do not move from it."""
        return np.zeros(log_x.shape, bool)

    def nears(self, log_x: F64, gradient: F64, reach: F64) -> Any:
        """Return the points that the gradient moves to a kink or bound no farther than ``reach``."""
        return np.zeros(log_x.shape, bool)


class SquaresMargin(LogarithmicMargin):
    """Squares, q = max(t - k log x, 0)."""

    def change(self, log_x: F64, log_sum: F64) -> F64:
        from scipy.special import wrightomega  # noqa: PLC0415 - on first use

        x = log_sum - log_x - np.log(self.k)
        most = self.given.weight / self.k
        omega = np.real(wrightomega(x + most))
        return np.asarray(np.where(most < np.abs(x), most - omega, np.log(omega) - x) - log_x)

    def fall(self, log_x: F64, marginal: F64) -> F64:
        return np.asarray(marginal / (marginal + self.k))

    def asked(self, log_x: F64, marginal: F64) -> F64:
        return np.maximum(self.given.weight - self.k * np.where(np.isfinite(log_x), log_x, 0.0), 0.0)

    def steepness(self, log_x: F64, asked: F64) -> F64:
        return np.where(asked > 0, self.k, 0.0)

    def lift(self, log_x: F64, change: F64, asked: F64) -> F64:
        weight = self.given.weight
        most = weight / self.k
        before = np.minimum(np.where(np.isfinite(log_x), log_x, 0.0), most)
        after = np.minimum(before + change, most)
        return np.asarray((after - before) * (weight - 0.5 * self.k * (after + before)))

    def growth(self, before: F64, after: F64, change: F64) -> F64:
        return after - before


class TotalVariationMargin(LogarithmicMargin):
    """Total variation: q = t where ``|log x| <= rho / reg``; at the upper bound less, at the lower one more."""

    def at(self, level: float) -> None:
        super().at(level)
        self.bound = 1.0 / self.k

    def change(self, log_x: F64, log_sum: F64) -> F64:
        return np.clip(log_x + (np.log(self.given.weight) - log_sum), -self.bound, self.bound) - log_x

    def fall(self, log_x: F64, marginal: F64) -> F64:
        return np.where(np.abs(log_x) < self.bound, 1.0, 0.0)

    def asked(self, log_x: F64, marginal: F64) -> F64:
        weight = self.given.weight
        low = np.where(log_x >= self.bound, 0.0, weight)
        return np.clip(marginal, low, np.where(log_x <= -self.bound, np.inf, weight))

    def steepness(self, log_x: F64, asked: F64) -> F64:
        return np.zeros(log_x.shape)

    def lift(self, log_x: F64, change: F64, asked: F64) -> F64:
        return self.given.weight * change

    def growth(self, before: F64, after: F64, change: F64) -> F64:
        return after - before

    def bounded(self, log_x: F64, moved: F64, marginal: F64) -> F64:
        return np.where(np.isfinite(moved), np.clip(moved, -self.bound, self.bound), moved)

    def stays(self, log_x: F64, marginal: F64) -> Any:
        weight = self.given.weight
        return ((log_x >= self.bound) & (marginal <= weight)) | ((log_x <= -self.bound) & (marginal >= weight))

    def nears(self, log_x: F64, gradient: F64, reach: F64) -> Any:
        return self.bound - np.copysign(1.0, gradient) * log_x <= np.where(gradient != 0, reach, -1.0)


class RangeMargin(LogarithmicMargin):
    """A range: q is its upper end where log x < 0, its lower end where log x > 0, all of it at the kink 0."""

    def change(self, log_x: F64, log_sum: F64) -> F64:
        _, _, _, low, high = self.given
        return np.clip(0.0, log_x + (np.log(low) - log_sum), log_x + (np.log(high) - log_sum)) - log_x

    def fall(self, log_x: F64, marginal: F64) -> F64:
        return np.where(log_x == 0.0, 0.0, 1.0)

    def asked(self, log_x: F64, marginal: F64) -> F64:
        _, _, _, low, high = self.given
        return np.clip(marginal, np.where(log_x < 0, high, low), np.where(log_x > 0, low, high))

    def steepness(self, log_x: F64, asked: F64) -> F64:
        return np.zeros(log_x.shape)

    def lift(self, log_x: F64, change: F64, asked: F64) -> F64:
        _, _, _, low, high = self.given
        before = np.where(np.isfinite(log_x), log_x, 0.0)
        after = before + change
        up = np.maximum(after, 0.0) - np.maximum(before, 0.0)
        return np.asarray(low * up + high * (change - up))

    def growth(self, before: F64, after: F64, change: F64) -> F64:
        return after - before

    def bounded(self, log_x: F64, moved: F64, marginal: F64) -> F64:
        _, _, _, low, high = self.given
        leaves = np.where(moved > 0, marginal < low, marginal > high)
        return np.where(log_x == 0, np.where(leaves, moved, 0.0), np.where(log_x * moved < 0, 0.0, moved))

    def stays(self, log_x: F64, marginal: F64) -> Any:
        _, _, _, low, high = self.given
        return (log_x == 0.0) & (marginal >= low) & (marginal <= high)

    def nears(self, log_x: F64, gradient: F64, reach: F64) -> Any:
        return (abs(log_x) <= reach) & (log_x * np.sign(gradient) < 0)


MARGINS = {
    "kl": LogarithmicMargin, "balanced": LogarithmicMargin, "l2": SquaresMargin, "tv": TotalVariationMargin,
    "range": RangeMargin,
}  # fmt: skip


def margin_of(given: Margin) -> LogarithmicMargin:
    """Return the penalty of a side."""
    return MARGINS[given.penalty](given)
