"""Newton's method for hard sides by a factor of its matrix, where passes and conjugate gradients stall.

Rows are always met, as u is their prox. The dual value is then a concave function of log v with the gradient q - s, and

    S = diag(s + k2 q) - P^T diag(fi1 / r) P,    k = reg / rho (0 where hard),  fi = 1 / (1 + k),  q = b e^(-k2 log v)

is minus its Hessian. A step solves (S + shift diag(s + k2 q)) y = q - s by Cholesky (Levenberg-Marquardt). Groups
of points that hardly exchange mass give S eigenvalues below its rounding: a larger shift bounds the step between
groups and changes nothing within them. A line search on the dual value halves the step, or doubles one between groups.

With other penalties the prox of the rows has a slope fi of its own, and q may jump where log v is at a kink
(margins.py): a column stays at its kink while s is among the optimal marginals there.

A start far away is left for a path of regs, each half of the one before: two steps at each are usual. The path begins
at the least reg where passes have come near, or at a large one. Steps certify nothing; the pass that follows does
(newton.c).

This module decides; a `FactoredPlans` computes, for the problems of a batch at once (array_plans.py, cpu/factored.py,
cuda/factored.py). For large clouds conjugate gradients stand in for the factor (ascend/two_levels.py). Numbers of each
problem (misses, lengths of steps, shifts) are on the host.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..penalties import F64
from .settings import FACTORS

LEAST_SHIFT = 1e-14  # of the diagonal: the rounding of Cholesky's method
FIRST_SHIFT = 1e-4  # of the diagonal, times the share that columns miss; from LEAST_SHIFT a start takes up to 9 factors
MOST_SHIFT = 0.1  # of the diagonal: with a larger shift the step is cut instead
SHIFT_GROWS = 20.0  # factor of a shift that is too small, at least
SHIFT_FALLS = 1e-3  # factor of the shift from one step to the next
SLOW_FALL = 0.1  # the same after a step that leaves more than SLOW of what columns miss: the shift is needed again
SLOW = 0.3
LONGEST = 100.0  # nats that a step may move a potential: 30 take 1.2 to 1.6 times the factors, 10 more steps too
FARTHEST = 1e7  # nats that a doubled step may move a potential: without a plan the dual value has no bound
BETWEEN_GROUPS = 3.0  # nats: a longer step is also tried at twice its length
CONSTANT = 1e-3  # of the diagonal, along constants, where S is singular if all points are hard
RESIDUAL = 1e-3  # of the equations' right side, beyond this the factor was not positive definite
ARMIJO = 1e-4  # of the slope: gain that a step must bring
GAIN_ROUNDING = 1e-15  # of the terms of a gain, and of the mass: changes of log u are logarithms of sums
SHORTEST = 1e-6  # smallest part of a step that is tried
NEAR = 1e-2  # of the mass: a start that misses less needs no larger reg
START_TOL = 5e-3  # certified error at a larger reg: below it the potentials are near
LEVEL_MISS = 1e-2  # of the mass: where a larger reg has done its work
FINE_MISS = 1e-4  # the same on a second path, at most, as a group of less mass was not seen on the first
FINER = 0.1  # part of the miss at the end of the first path: the same
FIRST_LEVEL = 30.0  # range of the costs over the largest reg
MOST_LEVEL = 2.0**100  # largest reg over the reg asked for
EXPONENT_ROUNDING = 2.0**-54  # of log u + log v: half of it, as entries round apart
LEAST_MISS = 1e-14  # of the mass: rounding of sums
STIFF = 1e3  # rho / reg: with a larger one passes may crawl
STEP_ENTRIES = 40_000_000  # entries of K that passes read in 10 ms; small problems need 10 ms for all their steps
SOFT_PATIENCE = 4  # times as many where a side is soft: such passes come nearer
MOST_STEPS = 60  # at one reg: clustered points took 20 at most, lattices 30
MOST_FACTORS = 600  # of a problem on one path: paths that ended well took 320 at most
MOST_COARSE_STEPS = 30  # the same at larger regs of a first path
SLOWEST = 20  # steps in which what columns miss halves, at least: 696 factors for 8 x 11 points ended as these begin
HOPELESS_MISS = 1.0  # of the mass, at a larger reg: no path leads on from there


class Margin(NamedTuple):
    """A side of the plans: its penalty, its masses (p, points) and k = reg / rho, 0 where hard.

    ``low``, ``high``: the least and the largest masses of a range.
    """

    penalty: str
    weight: Any
    k: Any
    low: Any = None
    high: Any = None


class TrialNumbers(NamedTuple):
    """Numbers of trial plans, one of each for every requested problem."""

    missed: F64  # distance of s from q, as a share of the plan's mass
    gain: F64  # growth of the dual value over reg, from the potentials accepted last
    noise: F64  # rounding of the gain
    rounding: F64  # of exponents, relative to an entry of the plan: no step misses less
    promise: F64  # growth of the dual value over reg that the gradient promises: columns stop at kinks on the way


class StepNumbers(NamedTuple):
    """Numbers of the solutions y of shifted equations, one of each for every requested problem."""

    solved: Any  # whether y solves them
    far: F64  # largest |y_j|


class SteppedPlans(Protocol):
    """Potentials and plans of p problems at one reg; ``places`` are indices of some of them, in order.

    A plan is ``c exp(log u_i + log v_j - costs / level)`` with the reference c. The plan of a trial takes the place of
    the plan before it; its potentials are the problem's own once they are accepted.
    """

    def meet_columns(self, places: Any) -> None:
        """Set log v by the columns' prox for log u: a point of little mass is otherwise far from its potential."""

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        """Form the plans of log v + length y that meet their rows."""

    def accept(self, places: Any) -> None:
        """Take over the potentials of the last trials."""

    def form_equations(self, places: Any) -> None:
        """Form S and q - s of the plans accepted last."""

    def solve(self, places: Any, shifts: F64) -> StepNumbers:
        """Solve (S + shift diag(s + k2 q)) y = q - s for some of the problems whose equations were formed last."""


class FactoredPlans(SteppedPlans, Protocol):
    """Such plans at any reg."""

    count: int  # p
    best: tuple[Any, Any]  # log u and log v that were kept last
    all_hard: bool  # whether every point of both sides is hard

    def set_level(self, level: float) -> None:
        """Multiply the reg asked for by ``level``."""

    def place(self, places: Any, log_u: Any, log_v: Any) -> None:
        """Set the potentials of these problems; a point without mass keeps -inf."""

    def scale(self, places: Any, factor: float) -> None:
        """Multiply the potentials."""

    def keep(self, places: Any) -> None:
        """Copy the potentials to the arrays of answers."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context of all work: at its end the work has ended."""


class LevelStart(NamedTuple):
    """Potentials (p, m) and (p, n) at ``level`` times the reg asked for, a power of 2."""

    level: float
    log_u: Any
    log_v: Any


def improve(work: FactoredPlans, allowed: F64, starts: list[LevelStart], range_over_reg: float) -> int:
    """Keep potentials whose columns miss at most ``allowed``, (p,), of the mass, or the best; return the factors made.

    ``starts``: potentials of earlier passes, the least level first; a near one spares the levels above it.
    ``range_over_reg``: range of the costs over reg.
    """
    first_level = 2.0 ** math.ceil(math.log2(min(max(range_over_reg / FIRST_LEVEL, 1.0), MOST_LEVEL)))
    every = np.arange(work.count)
    missed = np.full(work.count, np.inf)
    enough = allowed.copy()
    levels = np.full(work.count, first_level)  # of the start of each problem
    far = every
    for start in starts:
        if not len(far) or start.level > first_level:
            break
        work.set_level(start.level)
        work.place(far, start.log_u[far], start.log_v[far])
        found = begin(work, far).missed
        if start.level == 1.0:
            missed[far] = found
            work.keep(far)
        levels[far[found <= NEAR]] = start.level
        far = far[~(found <= NEAR)]
    factors = 0
    for again in (False, True):
        if again:
            far = every
        if len(far):
            work.place(far, 0.0, 0.0)
            levels[far] = first_level
        left = every[~(missed <= enough)]
        if not len(left):
            break
        level_miss = np.full(len(left), LEVEL_MISS)
        if again:
            level_miss = np.maximum(np.minimum(FINER * missed[left], FINE_MISS), allowed[left])
        reached = follow_path(work, left, levels[left], allowed[left], level_miss, again)
        factors += reached.factors
        better = ~(missed[left] <= reached.missed)  # NaN is no miss to keep
        missed[left[better]] = reached.missed[better]
        enough[left[better]] = np.maximum(allowed[left], reached.rounding)[better]
        work.keep(left[better])
    return factors


class Descent(NamedTuple):
    """The share of the mass that columns miss and its rounding, for each problem; the number of factorisations."""

    missed: F64
    rounding: F64
    factors: int


def follow_path(
    work: FactoredPlans, places: Any, levels: F64, allowed: F64, level_miss: F64, again: bool
) -> Descent:  # fmt: skip
    """Make steps at regs that halve, for each problem from its level on, where its potentials are.

    ``level_miss``: the share of the mass that columns may miss at larger regs. A problem that misses more leaves the
    path, and its miss is inf; on a path that is followed ``again``, one that misses more than HOPELESS_MISS.
    """
    level = float(levels.max())
    missed, rounding = np.full((2, len(places)), np.inf)
    follows = np.ones(len(places), bool)
    factors = 0
    while True:
        work.set_level(level)
        active = np.flatnonzero(follows & (levels >= level))
        if len(active):
            if level == 1.0:
                wanted = allowed[active]
            else:
                wanted = level_miss[active]
            found = descend(work, places[active], wanted, MOST_STEPS if again or level == 1.0 else MOST_COARSE_STEPS)
            factors += found.factors
            if level == 1.0:
                missed[active] = found.missed
                rounding[active] = found.rounding
            else:
                most = np.maximum(wanted, HOPELESS_MISS if again else 0.0)
                follows[active] = found.missed <= np.maximum(most, found.rounding)
        if level == 1.0 or not follows.any() or factors > MOST_FACTORS * len(places):
            return Descent(missed, rounding, factors)
        lower = max(1.0, level / 2)
        work.scale(places[active], level / lower)
        level = lower


def begin(work: SteppedPlans, places: Any) -> TrialNumbers:
    """Form the plans of the potentials, and judge them."""
    judged = work.trial(places, np.zeros(len(places)))
    work.accept(places)
    return judged


def descend(work: SteppedPlans, places: Any, allowed: F64, most: int = MOST_STEPS) -> Descent:
    """Make steps until columns miss at most ``allowed`` of the mass, or no step gains, or SLOWEST gain too little."""
    work.meet_columns(places)
    missed, _, _, rounding, _ = begin(work, places)
    shifts = FIRST_SHIFT * np.where(missed < 1.0, missed, 1.0)  # of the next step
    moves = np.ones(len(places), bool)
    to_halve = missed.copy()
    slow = np.zeros(len(places), int)  # steps since the miss has halved
    factors = 0
    for _ in range(most):
        left = np.flatnonzero(moves & ~(missed <= np.maximum(allowed, rounding)))
        if not len(left):
            break
        before = missed[left]
        step, made = find_step(work, places[left], shifts[left])
        factors += step.factors
        gains, reached = search(work, places[left], step)
        halves = reached.missed <= 0.5 * to_halve[left]
        to_halve[left[halves]] = reached.missed[halves]
        slow[left] = np.where(halves, 0, slow[left] + 1)
        moves[left] = gains & (slow[left] < SLOWEST)
        missed[left[gains]] = reached.missed[gains]
        rounding[left[gains]] = reached.rounding[gains]
        shifts[left] = made * np.where(missed[left] > SLOW * before, SLOW_FALL, SHIFT_FALLS)
        work.accept(places[left[gains]])
    return Descent(missed, rounding, factors)


class NewtonStep(NamedTuple):
    """Steps length * y of log v, at most LONGEST; length 0 where no shift solves the equations."""

    length: F64
    far: F64
    factors: int


def find_step(work: SteppedPlans, places: Any, shifts: F64) -> tuple[NewtonStep, F64]:
    """Return the steps, and the shifts of the diagonal that keep them so short."""
    work.form_equations(places)
    shifts = np.maximum(shifts, LEAST_SHIFT)
    length, far = np.zeros((2, len(places)))
    todo = np.arange(len(places))
    factors = 0
    while len(todo):
        solved, found_far = work.solve(places[todo], shifts[todo])
        factors += len(todo)
        good = solved & ((found_far <= LONGEST) | (shifts[todo] >= MOST_SHIFT))
        ends = todo[good]
        far[ends] = found_far[good]
        length[ends] = LONGEST / np.maximum(found_far[good], LONGEST)
        grown = np.full(len(todo), SHIFT_GROWS)
        grown[solved] = np.maximum(1.5 * found_far[solved] / LONGEST, SHIFT_GROWS)
        shifts[todo[~good]] *= grown[~good]
        todo = todo[~good & (shifts[todo] <= grown)]
    return NewtonStep(length, far, factors), shifts


def search(work: SteppedPlans, places: Any, step: NewtonStep) -> tuple[Any, TrialNumbers]:
    """Form the best plans along the steps; return which of them gain, and their numbers."""
    length = step.length.copy()
    judged = work.trial(places, length)
    _, gain, noise, _, promise = judged

    def try_length(some: Any) -> None:
        for own, new in zip(judged, work.trial(places[some], length[some]), strict=True):
            own[some] = new

    def is_short_of(some: Any) -> Any:
        enough = ARMIJO * np.maximum(promise[some], 0.0) - noise[some]
        return ~((gain[some] >= enough) & np.isfinite(noise[some]))  # where the plan overflows, noise is inf

    short = np.flatnonzero((length > 0) & is_short_of(slice(None)))
    while len(short):
        length[short] *= 0.5
        try_length(short)
        short = short[is_short_of(short) & (length[short] > SHORTEST * step.length[short])]
    best = gain.copy()
    long = np.flatnonzero((length > 0) & (length == step.length) & (length * step.far > BETWEEN_GROUPS))
    while len(long):
        length[long] *= 2.0
        try_length(long)
        better = gain[long] > best[long] + noise[long]
        worse = long[~better]
        if len(worse):
            length[worse] *= 0.5
            try_length(worse)
        long = long[better]
        best[long] = gain[long]
        long = long[length[long] * step.far[long] < FARTHEST]
    return (length > 0) & (best >= -noise), judged


def allowed_miss(tol: float, shape: tuple[int, int], both_hard: bool) -> float:
    """Return the share of the mass that columns may miss for a pass to certify ``tol``, and half as much for rounding.

    A plan that is optimal for other masses lies at most min(m, n) times their distance away, where one side is soft
    twice that (docs/mathematics.md, "Hard marginals").
    """
    paths = (1 if both_hard else 2) * min(shape)
    return max(0.5 * tol / paths, LEAST_MISS)


def patience(shape: tuple[int, int], both_hard: bool) -> int:
    """Return how many passes are made before steps with a factor follow, some six times as long as one such step.

    On one core a pass takes .3 ns a pair; a step takes .05 ns m n min(m, n), and a millisecond whatever the size.
    """
    m, n = shape
    return (1 if both_hard else SOFT_PATIENCE) * (min(shape) // 2 + min(FACTORS.most_patience, STEP_ENTRIES // (m * n)))
