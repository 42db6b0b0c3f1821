"""Marginal penalties in Newton steps with a factor: for each, its prox, its dual term and their slopes.

All arrays are (p, points), log x is log u or log v, and dual values are over reg. ``reg`` is of the level: `at` is
called before. docs/mathematics.md, "Other penalties", has the prox of each penalty.
"""

from typing import Any

import numpy as np

from .factored import Margin

OMEGA_STEPS = 3  # of Halley's method
LEAST_OMEGA = -36.0  # below it e^z is the solution
MOST_OMEGA = 1e15  # above it z - log z is


def wright_omega(z: Any) -> Any:
    """Solve w + log w = z; twin: src_c/common/penalty.h."""
    high = np.maximum(z, 1.0)
    from_above = high - np.log(high)
    z_used = np.clip(z, LEAST_OMEGA, MOST_OMEGA)
    from_below = np.exp(np.where(z < -1.0, z_used, 0.5 * np.minimum(z_used, 1.0) - 0.5))
    w = np.where(z > 1.0, np.minimum(from_above, MOST_OMEGA), from_below)
    for _ in range(OMEGA_STEPS):
        left = z_used - w - np.log(w)
        most = 2.0 * (1.0 + w) * (1.0 + w + 2.0 * left / 3.0)
        w = w * (1.0 + left / (1.0 + w) * (most - left) / (most - 2.0 * left))
    w = np.where(z > MOST_OMEGA, from_above, w)
    return np.where(z < LEAST_OMEGA, np.exp(np.minimum(z, 0.0)), w)


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
        vars(part).update({name: x[places] if np.ndim(x) else x for name, x in vars(self).items() if name != "given"})
        penalty, *arrays = self.given
        part.given = Margin(penalty, *(x if x is None else x[places] for x in arrays))
        return part

    def change(self, log_x: Any, log_sum: Any) -> Any:
        """Return by how much log x must grow to be the prox; ``log_sum``: logarithm of the marginal at log x."""
        return (np.log(self.given.weight) - self.k * log_x - log_sum) / (1.0 + self.k)

    def fall(self, log_x: Any, marginal: Any) -> Any:
        """Return -d prox / d log sum, from 0 to 1."""
        return 1.0 / (1.0 + self.k)

    def asked(self, log_x: Any, marginal: Any) -> Any:
        """Return the optimal marginal at log x; at a kink, of all the nearest one."""
        weight = self.given.weight
        return np.where(weight > 0, weight * np.exp(-self.k * log_x), 0.0)

    def steepness(self, log_x: Any, asked: Any) -> Any:
        """Return -d asked / d log x."""
        return self.k * asked

    def lift(self, log_x: Any, change: Any, asked: Any) -> Any:
        """Return what each point adds to the dual value; ``asked``: at log x."""
        soft = self.k > 0
        return asked * np.where(soft, -np.expm1(-self.k * change) / np.where(soft, self.k, 1.0), change)

    def growth(self, before: Any, after: Any, change: Any) -> Any:
        """Return the growth of marginals that are asked for, before and after a change of log x."""
        return before * np.expm1(-self.k * change)

    def bounded(self, log_x: Any, moved: Any, marginal: Any) -> Any:
        """Return ``moved``, or the first kink or bound between log x and it; ``marginal``: at log x."""
        return moved

    def stays(self, log_x: Any, marginal: Any) -> Any:
        """Return the points at a kink or bound that their marginals do not move from it."""
        return np.zeros_like(log_x, dtype=bool)

    def nears(self, log_x: Any, gradient: Any, reach: Any) -> Any:
        """Return the points that the gradient moves to a kink or bound no farther than ``reach``."""
        return np.zeros_like(log_x, dtype=bool)


class SquaresMargin(LogarithmicMargin):
    """Squares, q = max(t - k log x, 0)."""

    def change(self, log_x: Any, log_sum: Any) -> Any:
        x = log_sum - log_x - np.log(self.k)
        most = self.given.weight / self.k
        omega = wright_omega(x + most)
        return np.where(most < np.abs(x), most - omega, np.log(omega) - x) - log_x

    def fall(self, log_x: Any, marginal: Any) -> Any:
        return marginal / (marginal + self.k)

    def asked(self, log_x: Any, marginal: Any) -> Any:
        return np.maximum(self.given.weight - self.k * np.where(np.isfinite(log_x), log_x, 0.0), 0.0)

    def steepness(self, log_x: Any, asked: Any) -> Any:
        return np.where(asked > 0, self.k, 0.0)

    def lift(self, log_x: Any, change: Any, asked: Any) -> Any:
        weight = self.given.weight
        most = weight / self.k
        before = np.minimum(np.where(np.isfinite(log_x), log_x, 0.0), most)
        after = np.minimum(before + change, most)
        return (after - before) * (weight - 0.5 * self.k * (after + before))

    def growth(self, before: Any, after: Any, change: Any) -> Any:
        return after - before


class TotalVariationMargin(LogarithmicMargin):
    """Total variation: q = t where ``|log x| <= rho / reg``; at the upper bound less, at the lower one more."""

    def at(self, level: float) -> None:
        super().at(level)
        self.bound = 1.0 / self.k

    def change(self, log_x: Any, log_sum: Any) -> Any:
        return np.clip(log_x + (np.log(self.given.weight) - log_sum), -self.bound, self.bound) - log_x

    def fall(self, log_x: Any, marginal: Any) -> Any:
        return np.where(np.abs(log_x) < self.bound, 1.0, 0.0)

    def asked(self, log_x: Any, marginal: Any) -> Any:
        weight = self.given.weight
        low = np.where(log_x >= self.bound, 0.0, weight)
        return np.clip(marginal, low, np.where(log_x <= -self.bound, np.inf, weight))

    def steepness(self, log_x: Any, asked: Any) -> Any:
        return np.zeros_like(log_x)

    def lift(self, log_x: Any, change: Any, asked: Any) -> Any:
        return self.given.weight * change

    def growth(self, before: Any, after: Any, change: Any) -> Any:
        return after - before

    def bounded(self, log_x: Any, moved: Any, marginal: Any) -> Any:
        return np.where(np.isfinite(moved), np.clip(moved, -self.bound, self.bound), moved)

    def stays(self, log_x: Any, marginal: Any) -> Any:
        weight = self.given.weight
        return ((log_x >= self.bound) & (marginal <= weight)) | ((log_x <= -self.bound) & (marginal >= weight))

    def nears(self, log_x: Any, gradient: Any, reach: Any) -> Any:
        return self.bound - np.copysign(1.0, gradient) * log_x <= np.where(gradient != 0, reach, -1.0)


class RangeMargin(LogarithmicMargin):
    """A range: q is its upper end where log x < 0, its lower end where log x > 0, all of it at the kink 0."""

    def change(self, log_x: Any, log_sum: Any) -> Any:
        _, _, _, low, high = self.given
        least = log_x + (np.log(low) - log_sum)
        most = log_x + (np.log(high) - log_sum)
        return np.maximum(np.minimum(most, 0.0), least) - log_x

    def fall(self, log_x: Any, marginal: Any) -> Any:
        return np.where(log_x == 0.0, 0.0, 1.0)

    def asked(self, log_x: Any, marginal: Any) -> Any:
        _, _, _, low, high = self.given
        return np.clip(marginal, np.where(log_x < 0, high, low), np.where(log_x > 0, low, high))

    def steepness(self, log_x: Any, asked: Any) -> Any:
        return np.zeros_like(log_x)

    def lift(self, log_x: Any, change: Any, asked: Any) -> Any:
        _, _, _, low, high = self.given
        before = np.where(np.isfinite(log_x), log_x, 0.0)
        after = before + change
        up = np.maximum(after, 0.0) - np.maximum(before, 0.0)
        return low * up + high * (change - up)

    def growth(self, before: Any, after: Any, change: Any) -> Any:
        return after - before

    def bounded(self, log_x: Any, moved: Any, marginal: Any) -> Any:
        _, _, _, low, high = self.given
        leaves = np.where(moved > 0, marginal < low, marginal > high)
        return np.where(log_x == 0, np.where(leaves, moved, 0.0), np.where(log_x * moved < 0, 0.0, moved))

    def stays(self, log_x: Any, marginal: Any) -> Any:
        _, _, _, low, high = self.given
        return (log_x == 0.0) & (marginal >= low) & (marginal <= high)

    def nears(self, log_x: Any, gradient: Any, reach: Any) -> Any:
        return (abs(log_x) <= reach) & (log_x * np.sign(gradient) < 0)


MARGINS = {
    "kl": LogarithmicMargin, "balanced": LogarithmicMargin, "l2": SquaresMargin, "tv": TotalVariationMargin,
    "range": RangeMargin,
}  # fmt: skip


def margin_of(given: Margin) -> LogarithmicMargin:
    """Return the penalty of a side."""
    return MARGINS[given.penalty](given)
