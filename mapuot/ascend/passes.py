"""Passes of a body (a problem other than one K between two sides): Anderson's step, the guard, and certificates.

A body (a tree or an array of many marginals, the histograms of a barycenter) computes the plan of a state, the plan's
dual value, and the next state. A certificate may need products beyond the products of a pass. Therefore a plan is
certified only when a guess by the last change is small enough. src_c/common/rules.h has the guard and the stopping
rule.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import Options, Stats, load
from ..backends.kernel import StaleError, largest_of
from ..backends.rules import Judge, plan_error
from ..backends.workspace import anderson_depth_of
from ..contract import LEAST_MASS, Backend
from ..outcome import after_last_change, after_late_certificate
from ..penalties import F64

DEPTH = 20  # number of Anderson's differences
NARROW_FLOOR = 2e-6  # least error that passes in float32 resolve
RATE_PASSES = 4  # window over which the rate is measured to estimate the passes left
COMPLETED_AFTER = 25  # certify a plan after this many passes, whatever the guess
RATIO, LEAST_RATIO, MOST_RATIO = 0.75, 0.02, 30.0  # certified error / guess before it: at first, least, most


@dataclass
class PassCertificate:
    gap: float = math.inf
    error: float = math.inf
    dual: float = -math.inf  # a lower bound of the optimum
    moved: float = math.inf  # bound on the rounding error of the dual value
    terms: float = math.inf  # sum of the absolute terms of the dual value
    rounding: tuple[float, float] = (math.inf, math.inf)  # rounding of the plan; of marginals (Newton's step)


class Body:
    """Base class: the passes of one problem. Its plans have the attributes ``mass`` and ``is_complete``.

    A plan is complete when all products that its certificate needs have been made. Subclasses define these methods:

    start(state)               prepare for passes from a state, and return the state
    find(state, narrow)        make a pass: the translated plan of a state; narrow: sums may be in float32
    completed()                complete the last plan, and return it
    certified(found, allowed)  the `PassCertificate` of a plan; hard marginals may miss ``allowed`` of the mass; if the
                               plan is not complete, only the dual value is set
    image(found, exact)        the next state; exact: computed from a complete plan
    guess(residual, found)     guess (gap, missed mass of hard marginals) from the last change of the state
    metric(found)              weights of the state's entries, for Anderson's step
    newton()                   Newton's steps that certify plans with hard marginals; None if no step can
    """

    reg: float
    certifies = True  # else passes end when ``change`` <= ``tol_change``; ``bounds()``: gap and error
    ends: list[int]  # end of each part of a state
    alone = 0.0  # share of own Anderson weights of each part, until the guard drops a step
    coarse: Any = None  # the coarse correction of its steps, if there is one
    reads: str  # the form of its kernels, in words
    narrow = False  # whether its first passes may sum in float32
    rough = 0.0  # the largest rho / reg: noise of float32 sums grows with it
    width: int  # number of points of its largest part
    xp: Any = np  # numpy or CuPy: the module of its states

    def changed(self, image: F64, state: F64) -> tuple[F64, float]:
        """Return the change from a state to its image, and its largest absolute entry."""
        change = image - state
        return change, largest_of(change)


def passes_left(guesses: list[float], tol: float) -> float:
    """Estimate the passes left until ``tol`` from the rate of the last passes; 0 while the rate is unknown."""
    first = guesses[-min(len(guesses), 1 + RATE_PASSES)]
    last = guesses[-1]
    if len(guesses) <= RATE_PASSES or not tol < last < math.inf:
        return 0.0
    if last < first < math.inf:
        return math.log(last / tol) * RATE_PASSES / math.log(first / last)
    return math.inf


class Ascent:
    """The passes of one body, with the interface of backends.workspace.Workspace that loop.Run uses."""

    estimates = False

    def __init__(self, body: Any, options: Options) -> None:
        self.body, self.options, self.reads, self.coarse, self.number = body, options, body.reads, body.coarse, 0
        self.history = load("cpu" if body.xp is np else "cuda").history(
            anderson_depth_of(DEPTH, body.width, 8), body.ends
        )
        floor = max(NARROW_FLOOR * math.sqrt(1 + body.rough), 10 * options.tol)
        self.judge = Judge(tol=options.tol, tol_gap=options.tol_gap, reg=body.reg, narrow_floor=floor)
        self.alone = body.alone
        self.exact = self.extrapolated = False  # exact: every plan is completed before the next pass
        self.found: Any = None
        self.narrow, self.ratio, self.guessed, self.since_complete = body.narrow, RATIO, math.inf, 0
        self.guesses: list[float] = []
        self.residual = math.inf

    def absorb(self, log_v: F64 | None = None) -> None:
        """Build kernels around a state; the next pass starts from it."""
        xp = self.body.xp
        start = xp.asarray(np.zeros(1) if log_v is None else log_v)
        self.next_log_v = self.body.start(xp.broadcast_to(start, (self.body.ends[-1],)).copy())

    def iterate(self, count: int) -> list[Stats]:
        made: list[Stats] = []
        while len(made) < count and (not made or made[-1].status == "running"):
            made.append(self.one_pass())
        return made

    def restart(self, state: F64) -> None:
        """Start the next pass from this state; the guard may reject it."""
        self.next_log_v = self.body.xp.asarray(state)
        self.extrapolated = True
        self.history.clear()

    def newton(self) -> Any:
        return self.body.newton()

    def potentials(self) -> tuple[Any, Body]:
        """Return the last plan or None, and the body, which multiplies by the plan."""
        return self.found, self.body

    def marginals(self) -> None:
        """Return None: the plan's marginals are made on request."""

    def close(self) -> None:
        """Do nothing: products with the plan need the kernels, and the kernels of the next reg reuse their memory."""

    def one_pass(self) -> Stats:
        """Make a pass: compute the plan of the state, apply the guard to its dual value, and find the next state."""
        body, narrow, progress = self.body, self.narrow, self.judge.progress
        self.number += 1
        try:
            found = body.find(self.next_log_v, narrow)
        except StaleError:  # even kernels made for this very state fail
            return self.failed(0.0)
        if not body.certifies:
            self.found = found
            self.next_log_v = body.image(found, False)
            self.residual = body.change
            stat = self.stats_of(PassCertificate(), found.mass)
            after_last_change(stat, self.residual <= body.tol_change)
            return stat
        least, most = (f(body.reg, 1.0) * found.mass for f in (min, max))
        if not LEAST_MASS <= least <= most < math.inf:  # reg times the mass, the unit of gaps, must be a normal number
            return self.failed(0.0 if least < LEAST_MASS else most)
        value = body.certified(found, self.options.allowed)
        progress.narrow, progress.extrapolated, self.judge.limits.dual_scale = narrow, 1, value.terms
        fallen = self.judge.settle(value.dual, found.mass)
        rejected = fallen and self.extrapolated
        if body.coarse:
            body.coarse.judge(rejected)
        if rejected:
            self.next_log_v = self.history.image
            self.history.clear()
            self.extrapolated, self.alone = False, 0.0
            return self.stats_of(value, found.mass, True)
        if fallen:
            progress.best_dual = value.dual
            if not self.exact:  # late messages may diverge: use none from here on
                self.exact = True
                self.history.clear()
        self.found = found
        return self.advanced(value)

    def advanced(self, value: PassCertificate) -> Stats:
        """Find the state after the last plan, certify this plan if a certificate is due, and judge the pass."""
        if self.exact and not self.found.is_complete:
            value = self.completed()
        image = self.body.image(self.found, self.exact)
        change, self.residual = self.body.changed(image, self.next_log_v)
        if not math.isfinite(self.residual):
            return self.failed(math.nan)
        if (self.narrow or not self.found.is_complete) and self.is_due(value, change) and not self.found.is_complete:
            value = self.completed()
        self.next_log_v = self.extrapolate(change, image)
        stat = self.stats_of(value, self.found.mass)
        progress = self.judge.progress
        progress.moved = value.moved
        judged = stat
        if self.narrow:
            judged = dataclasses.replace(stat, error=self.guessed)
        stat.status = self.judge.judge(judged)
        if self.narrow and not progress.narrow:  # compare guesses of passes of the same precision only
            self.narrow = False
            self.guesses = []
        return stat

    def stats_of(self, value: PassCertificate, mass: float, rejected: bool = False) -> Stats:
        return Stats(self.number, value.gap, value.error, value.dual, mass, self.residual, rejected, "running")

    def is_due(self, value: PassCertificate, residual: F64) -> bool:
        """Guess from the last change whether the plan meets the tolerance; record the guess."""
        gap, hard = self.body.guess(residual, self.found)
        mass = self.found.mass
        options = self.options
        self.guessed = plan_error(gap / mass / self.body.reg) + hard / mass
        self.since_complete += 1
        self.guesses = [*self.guesses[-RATE_PASSES:], self.guessed]
        if self.coarse:
            self.coarse.expects(passes_left(self.guesses, options.tol))
        if self.narrow:
            return False
        small = gap * self.ratio**2 <= options.tol_gap * abs(value.dual)
        good = self.guessed * self.ratio <= options.tol or small
        return good or self.since_complete >= COMPLETED_AFTER

    def completed(self) -> PassCertificate:
        """Complete the last plan and certify it; the ratio of its error to the guess scales later guesses."""
        self.found = self.body.completed()
        self.since_complete = 0
        value: PassCertificate = self.body.certified(self.found, self.options.allowed)
        if 0 < self.guessed < math.inf and value.error < math.inf:
            self.ratio = min(MOST_RATIO, max(LEAST_RATIO, value.error / self.guessed))
        return value

    def conclude(self, stat: Stats) -> None:
        """Certify the last pass of a run if it has no certificate yet."""
        if self.body.certifies and self.found is not None and not self.found.is_complete:
            value = self.completed()
            stat.gap, stat.error, stat.dual = value.gap, value.error, value.dual
            self.judge.progress.moved = value.moved
        elif not self.body.certifies:
            stat.gap, stat.error = self.body.bounds()
            return
        after_late_certificate(stat, self.judge.again(stat, 0.0, 0.0, self.judge.progress.moved))

    def failed(self, mass: float) -> Stats:
        if not (self.found is not None and self.found.is_complete):
            self.found = None
        self.next_log_v = self.body.xp.zeros(self.body.ends[-1])
        self.residual = math.inf
        stat = self.stats_of(PassCertificate(), mass)
        self.judge.judge(stat)
        return stat

    def extrapolate(self, residual: F64, image: F64) -> F64:
        """Return the next state: Anderson's combination, or the image without history, plus the coarse correction."""
        self.extrapolated = self.history.add(residual, image)
        if self.extrapolated:
            image, residual = self.history.next(self.body.metric(self.found), self.alone)
        if self.coarse and self.coarse.on and not self.exact:
            self.extrapolated = True
            image = image + self.body.xp.asarray(self.coarse.step(residual))
        return image


class Engine(Backend):
    """The backend of a `Run` over a body: it makes the workspaces of the body.

    ``make(problem, before)`` makes a body. It reuses the memory of ``before``, the body of another reg, or None.
    """

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self.make, self.body = make, None

    def workspace(self, problem: Any, options: Options, skip: None = None) -> Ascent:
        self.body = self.make(problem, self.body)
        return Ascent(self.body, options)
