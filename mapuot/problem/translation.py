"""The common translation of log u and log v, taken out of a problem by scaled masses.

Let fi = rho / (rho + reg) at each point, and t a number. The problem with the masses

    a' = a e^(t (1 - fi1)),    b' = b e^(-t (1 - fi2))        (c = a b^T; else a e^(t reg / rho1), b e^(-t reg / rho2))

has the same optimal plan; its objective differs by a constant for plans that meet the hard points, and log u + t and
log v - t are its scalings, up to the factors in c. Where the masses of both sides differ and rho / reg is large, log u
is some rho / reg, and its rounding would hide the plan. With t = log(|b| / |a|) / (1 - fi1 + 1 - fi2) both sides have
equal masses, and log scalings are as large as M / reg makes them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import namespace
from .side import Side

if TYPE_CHECKING:
    from .problem import Problem

LEAST_TRANSLATION = 1e4  # nats: log scalings of this size round a plan by 1e-12, times sqrt(rho / reg)
DOUBLINGS, HALVINGS = 60, 100  # of the interval that holds the translation, where points have their own rho
LEAST_MASS = float(np.log(np.finfo(np.float64).tiny))  # logarithm: below it float64 loses digits, and points
OFFSET_ROUNDING = 2.0**-48  # relative to the sizes of the terms of the offset


class Translated(NamedTuple):
    """A problem without its translation."""

    problem: Problem  # the problem given, which knows its translation
    task: Problem  # the same plan, from scaled masses
    logs: tuple[Any, Any]  # log u and log v of ``problem`` (`Result.own_logs`) less these of ``task``

    def to_task(self, start: tuple[Any, Any], known: float) -> tuple[Any, Any]:
        """Return scalings as of ``task``, zeros as they are; ``known``: the translation that is left out of them."""
        t = self.problem.translation - known
        ways = zip(start, self.logs, (t, -t), strict=True)
        log_u, log_v = (np.where(x.any(), x - log + way, x) for x, log, way in ways)
        return log_u, log_v

    def to_problem(self, potentials: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return scalings of ``task`` as `Result.own_logs`."""
        if self.task is self.problem:
            return potentials
        xp = namespace(*potentials)
        log_u, log_v = (x + xp.asarray(log) for x, log in zip(potentials, self.logs, strict=True))
        return log_u, log_v


def rates(side: Side, reg: float, is_product: bool) -> Any:
    """Return the growth of log masses with the translation, one number if all points share it; 0 of hard points."""
    rho: Any = side.scalar_rho
    if rho is None:
        rho = side.rho
    return rate_of(rho, reg, is_product)


def rate_of(rho: Any, reg: float, is_product: bool) -> Any:
    """Return `rates` of points with these rho."""
    if is_product:
        return reg / (rho + reg)
    return reg / rho


def translation_of(rows: Side, cols: Side, reg: float, is_product: bool) -> float:
    """Return the translation at which both sides have equal masses, 0 where it is small or the sides have none."""
    if not (rows.logarithmic and cols.logarithmic) or not (0 < rows.mass < math.inf and 0 < cols.mass < math.inf):
        return 0.0
    least = rate_of(rows.rho_range[1], reg, is_product) + rate_of(cols.rho_range[1], reg, is_product)
    t = common_translation(rows.mass, cols.mass, least)
    both_hard = rows.scalar_rho == cols.scalar_rho == math.inf
    if t == 0.0 and (least > 0 or both_hard):  # the usual case, decided without reading vectors of a device
        return 0.0
    of_sides = [rates(side, reg, is_product) for side in (rows, cols)]
    if any(map(np.ndim, of_sides)):
        if rows.ranks.size > 1:
            return 0.0
        t = balancing(rows, cols, of_sides)
    t *= min(part_kept(side, way * x) for side, way, x in zip((rows, cols), (t, -t), of_sides, strict=True))
    if LEAST_TRANSLATION < abs(t) < math.inf:
        return t
    return 0.0


def part_kept(side: Side, log: Any) -> float:
    """Return the largest part of a change of log masses that leaves all digits to every mass; 1 at most.

    A light point matters where a small rho, or a cost far below the others, lets it receive more than its mass: with a
    mass of 0 it would be left out.
    """
    falls = (side.weight > 0) & (log < 0)
    with np.errstate(divide="ignore", over="ignore"):
        parts = np.divide(LEAST_MASS - side.log_weight, log, where=falls, out=np.ones(len(side.weight)))
    return float(np.clip(side.ranks.min(parts.min(initial=1.0)), 0.0, 1.0))


def common_translation(mass_a: float, mass_b: float, rate: float) -> float:
    """Return the translation of positive masses that grow and fall by these `rates` in sum.

    It is 0 where it is small, where float64 cannot hold it, and between hard sides, whose masses do not change.
    """
    if rate == 0:
        return 0.0
    t = (math.log(mass_b) - math.log(mass_a)) / rate
    if LEAST_TRANSLATION < abs(t) < math.inf:
        return t
    return 0.0


def balancing(rows: Side, cols: Side, of_sides: list[Any]) -> float:
    """Return the translation of points with their own rho by bisection, 0 if no translation makes masses equal."""
    logs = rows.log_weight, cols.log_weight

    def excess(t: float) -> float:
        sums = (np.logaddexp.reduce(log + x) for log, x in zip(logs, (t * of_sides[0], -t * of_sides[1]), strict=True))
        return float(np.subtract(*sums))

    way = -np.sign(excess(0.0))
    low, high = 0.0, 1.0
    for _ in range(DOUBLINGS):
        if way * excess(way * high) >= 0:
            break
        low, high = high, 2.0 * high
    else:
        return 0.0
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if way * excess(way * middle) >= 0:
            high = middle
        else:
            low = middle
    return float(way * high)


def without_translation(problem: Problem) -> Translated:
    """Return a problem with scaled masses; the problem itself where its translation is small."""
    is_product = problem.unmasked == "product"
    t = 0.0
    if not (is_product and problem.masked is not None):  # the mass of c would be a sum over all pairs
        t = translation_of(problem.rows, problem.cols, problem.reg, is_product)
    if t == 0.0:
        return Translated(problem, problem, (0.0, 0.0))
    sides = list[Side]()
    logs = list[Any]()
    c_mass = problem.c_mass
    value = 0.0
    size = 0.0
    for side, way in ((problem.rows, t), (problem.cols, -t)):
        log = way * rates(side, problem.reg, is_product)
        half = np.exp(0.5 * np.where(side.weight > 0, log, 0.0))  # its square may overflow where the mass does not
        scaled = dataclasses.replace(side, weight=side.weight * half * half)
        with np.errstate(over="ignore", invalid="ignore"):
            terms = side.soft_rho * (side.weight - scaled.weight)
            terms -= problem.reg * way * np.where(side.hard, side.weight, 0.0)
            value += float(side.ranks.sum(terms.sum()))
            size += side.dual_scale + scaled.dual_scale + problem.reg * abs(t) * side.mass
        sides.append(scaled)
        logs.append(log)
    if not is_product:
        logs = [0.0, 0.0]
    else:
        c_mass = sides[0].mass * sides[1].mass
    value += problem.reg * (problem.c_mass - c_mass)
    size += problem.reg * (problem.c_mass + c_mass)
    if not math.isfinite(value + size):  # the value cannot be told from that of the scaled problem
        return Translated(problem, problem, (0.0, 0.0))
    offset = value - OFFSET_ROUNDING * size
    task = dataclasses.replace(problem, rows=sides[0], cols=sides[1], c_mass=c_mass, translation=0.0, offset=offset)
    return Translated(dataclasses.replace(problem, translation=t), task, (logs[0], logs[1]))
