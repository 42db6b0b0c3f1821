"""Sides of a problem: the masses of the rows (a) or of the columns (b), with their penalty."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import any_of, host, largest
from ..cached import cached_property
from ..penalties import F64, PENALTIES, Penalty, dual_term
from ..ranks import ALONE, Ranks


class Numbers:
    """Numbers of a side, which depend neither on the order of its points nor on their device.

    `numbers_of` computes all of them when one is first asked for; over ranks every rank must then ask.
    """

    n_points: int  # of all ranks together
    mass: float
    log_size: float  # largest |log t| of the weights
    scalar_rho: float | None  # the common rho of a KL or balanced side; None: other sides have no translation
    rho_range: tuple[float, float]
    largest_soft_rho: float
    dual_scale: float  # size of this side's dual terms, summed over all ranks; it bounds their rounding
    uniform: bool  # whether one logarithmic formula serves every point: balanced, or KL without a hard point
    demands: bool  # whether some points of this rank must receive mass


NUMBERS = tuple(Numbers.__annotations__)


class Kind:
    """Members that the penalty of a side decides; they are set with the side."""

    kind: Penalty
    logarithmic: bool  # whether the prox is a multiple of a logarithm: KL, or its limit, balanced


def largest_log(log_weight: F64) -> float:
    """Return max |log t| over weights above e^-46 (1e-20) of the largest; lighter points cause no rounding."""
    top = largest(log_weight, -math.inf)
    return largest(np.where(log_weight > top - 46, np.abs(log_weight), 0.0))


def equal(x: Any, y: Any) -> bool:
    """Tell whether two vectors are equal, or both None."""
    return x is y or (x is not None and y is not None and x.shape == y.shape and not any_of(x != y))


@dataclass(frozen=True)
class Side(Numbers, Kind):
    """Side of a problem: rows (a) or columns (b); every array is float64 of length ``len(weight)``."""

    name: str  # "a" or "b", for messages
    weight: F64
    penalty: str
    rho: F64  # reg_m per point, inf = hard; "range": the lower factor
    upper: F64 | None = None  # "range": the upper factor
    ranks: Ranks = ALONE  # they share this side's points
    there = None  # this side on a device; the host copies weight and rho on first use

    def __post_init__(self) -> None:
        vars(self).update(kind=PENALTIES[self.penalty], logarithmic=self.penalty in ("kl", "balanced"))

    def hosted(self) -> "Side":
        """Return the host's view of this side, which lies on a device."""
        found: Side = object.__new__(Side)
        own = {name: getattr(self, name) for name in ("name", "penalty", "ranks", "kind", "logarithmic", *NUMBERS)}
        vars(found).update(own, there=self, upper=host(self.upper))
        return found

    def __getattr__(self, name: str) -> Any:
        if name in NUMBERS:
            vars(self).update(numbers_of(self))
        elif name in ("weight", "rho") and self.there is not None:
            vars(self)[name] = host(getattr(self.there, name))
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"weight": self.weight, "rho": self.rho, **vars(self), "there": None}

    def ordered(self, at: Any) -> "Side":
        """Return the side with its points in the order ``at``."""
        if self.upper is None:
            upper = None
        else:
            upper = self.upper[at]
        if self.scalar_rho is not None:
            rho = self.rho
        else:
            rho = self.rho[at]
        return self.share_numbers(replace(self, weight=self.weight[at], rho=rho, upper=upper))

    def share_numbers(self, other: "Side") -> "Side":
        """Copy this side's cached numbers to another side with the same points, and return it."""
        vars(other).update({name: getattr(self, name) for name in NUMBERS})
        return other

    def of(self, weight: F64) -> "Side":
        """Return the side of another problem of its batch, which may have fewer points."""
        k = len(weight)
        return replace(self, weight=weight, rho=self.rho[:k], upper=None if self.upper is None else self.upper[:k])

    @cached_property
    def log_weight(self) -> F64:
        with np.errstate(divide="ignore"):
            return np.log(self.weight)

    @property
    def may_stay(self) -> bool:
        """Tell whether a point may keep all its mass at a finite slope, which bounds its potential."""
        return not self.logarithmic

    @cached_property
    def hard(self) -> Any:
        return np.isinf(self.rho)

    def alike(self, other: "Side", own: slice = slice(None)) -> bool:
        """Tell whether another side, or its points ``own``, has the same masses and the same penalty."""
        if self.there and other.there:
            return self.there.alike(other.there, own)
        vectors = (self.weight, other.weight), (self.rho, other.rho), (self.upper, other.upper)
        return self.penalty == other.penalty and all(equal(x, y if y is None else y[own]) for x, y in vectors)

    @cached_property
    def soft_rho(self) -> F64:
        return np.where(np.isinf(self.rho), 0.0, self.rho)

    def dual_sizes(self, weight: Any) -> Any:
        """Sum rho t^degree over the points, for weights with one problem a row."""
        if self.kind.degree == 2:
            return (self.soft_rho * weight * weight).sum(-1)  # squares of 1e160 overflow
        if isinstance(self.soft_rho, np.ndarray):
            return weight @ self.soft_rho
        return (weight * self.soft_rho).sum()

    @property
    def limits(self) -> tuple[F64, F64]:
        """Return the least and the largest mass of each point; both are the weight of a hard point."""
        if self.penalty == "range":
            assert self.upper is not None
            return self.rho * self.weight, self.upper * self.weight
        none = (self.weight == 0) & self.kind.strict
        return np.where(self.hard, self.weight, 0.0), np.where(self.hard | none, self.weight, np.inf)

    def left_out(self, log_reference: F64) -> Any:
        """Mask of the points with scaling 0: no reference mass, or a weight 0 that forbids mass."""
        return (log_reference == -np.inf) | ((self.weight == 0) & self.kind.strict)

    def dead_terms(self, dead: Any) -> float:
        """Return the dual terms of this rank's points that no mass can reach (f is inf)."""
        if self.penalty == "range":
            return 0.0
        weight = self.weight[dead]
        return float(dual_term(self.penalty, np.full_like(weight, np.inf), weight, self.rho[dead], None).sum())


def numbers_of(side: Side) -> dict[str, Any]:
    """Return the `Numbers` of a side; over ranks, of the points of all ranks, except ``log_size`` and ``demands``."""
    with np.errstate(over="ignore"):
        mass = float(side.weight.sum())
        dual_scale = float(side.dual_sizes(side.weight))
    log_size = largest_log(side.log_weight)
    least_rho = -largest(-side.rho, -math.inf)
    largest_rho = largest(side.rho)
    hard = largest_rho == math.inf
    own = len(side.weight), mass, dual_scale, least_rho, largest_rho, largest(side.soft_rho)
    lengths, masses, dual_scales, least_rhos, largest_rhos, soft_rhos = zip(*side.ranks.all(own), strict=True)
    low = min(least_rhos)
    high = max(largest_rhos)
    return {
        "n_points": sum(lengths),
        "mass": float(sum(masses)),
        "log_size": log_size,
        "scalar_rho": float(low) if side.logarithmic and low == high else None,
        "rho_range": (low, high),
        "largest_soft_rho": float(max(soft_rhos)),
        "dual_scale": float(sum(dual_scales)),
        "uniform": side.penalty == "balanced" or (side.penalty == "kl" and not hard),
        "demands": side.penalty == "range" or hard,
    }
