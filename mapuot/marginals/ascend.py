"""The passes of a problem of many marginals: translation, certificate, and Anderson's step.

A body (`Tree`, `JointBlocks`) gives the plan of a state and the state that follows; the guard and the stopping rule are
those of src_c/common/rules.h. Formulas: docs/mathematics.md, "Many marginals".
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..backends import Options, Stats, load
from ..backends.contract import LEAST_MASS, memory_of
from ..backends.kernel import UNIT, StaleError, largest_of
from ..backends.rules import Judge, plan_error
from ..penalties import F64
from .blocks import JointBlocks
from .problem import MultiProblem
from .state import State, translation
from .tree import Tree

DEPTH = 20  # of Anderson's differences
HOST_ENTRIES = 8000  # of a state, whose differences the host has added up before a GPU has taken them
NARROW_FLOOR = 2e-6  # of the error that passes in float32 still tell
RATE_PASSES = 4  # by which it is told how many are left
WHOLE_PASSES = 25  # after so many a plan is certified, near or not
RATIO, LEAST_RATIO, MOST_RATIO = 0.75, 0.02, 30.0  # of a certified error to the guess before it: at first, and within


@dataclass
class PassCertificate:
    gap: float = math.inf
    error: float = math.inf
    dual: float = -math.inf  # a lower bound of the optimum
    moved: float = math.inf  # what rounding may have added to the dual value
    terms: float = math.inf  # the sizes of all terms of the dual value


def certify(problem: MultiProblem, state: State, lam: F64, allowed: float) -> PassCertificate:
    """Certify the plan of a state, with everything that rounding may hide counted against it.

    ``delta`` bounds the relative error of every r_k and of the plan's entries, ``slip`` that of q_k = a_k u_k^(-reg /
    rho_k). A hard marginal that was met last is missed by delta: divided by that it is met, and the others move by
    delta once more. ``eta``, of stored kernels, is the same in all sums: they see the plan of costs that are off by
    reg eta, which is one for the true costs, too, and KL(it | the plan) <= eta^2 / 2. Of a state that is not whole only
    the dual value is known.
    """
    reg, mass, soft, hard = problem.reg, state.mass, problem.soft, problem.hard
    worth = problem.points.worth(state.log_u.flat, state.log_s.flat if state.log_s else None)
    sizes, values, value_sizes, amounts, gaps, boths, misses = worth.tolist()  # inf, where exponentials leave float64
    rho = [x.rho for x in problem.marginals]
    dual = reg * (problem.reference_mass - mass) + problem.constant + sum(values)
    terms = reg * (problem.reference_mass + mass) + problem.constant + sum(value_sizes)
    logs = float(np.abs(lam).max(1).sum()) + sum(sizes) + problem.log_sizes + problem.largest / reg
    delta = growth(state.rounding + 4 * UNIT * logs + problem.cost_error / reg)
    eta = growth(state.storage)
    slips = {k: growth(8 * UNIT * (1 + sizes[k] * reg / rho[k])) for k in soft}
    slip, slipped = max(slips.values(), default=0.0), sum(rho[k] * amounts[k] * x for k, x in slips.items())
    gap, kl = (sum(rho[k] * x[k] for k in soft) for x in (gaps, boths))
    price, missed = reg * sum(sizes[k] for k in hard), sum(misses[k] for k in hard)
    noise = (64 + problem.log_sizes) * terms  # of masses, and then of their sums
    noise += sum(n * size for n, size in zip(problem.shape, value_sizes, strict=True))
    moved = reg * mass * delta + slipped + UNIT * noise
    sound = state.whole and 0 <= gap < math.inf and kl < math.inf and delta < 0.1
    root = math.sqrt(gap) + (2 * delta + slip) * math.sqrt(kl) if sound else math.inf
    d = root * root * (1 + 6 * delta) / (reg * mass * (1 - delta)) if sound else math.inf
    error = (plan_error(d + eta * eta * (0.5 + eta)) + missed / mass) * (1 + 4 * delta + 2 * eta) + 2 * delta
    root += eta * math.sqrt(kl) if sound else 0.0  # of the plan itself, by the costs as they are
    whole = root * root * (1 + 6 * delta) + (delta + eta) * mass * price + moved + 2 * eta * reg * mass
    if not (math.isfinite(dual) and moved < math.inf and (error < math.inf or not state.whole)):
        return PassCertificate()
    gap = math.inf if missed > allowed * mass else whole
    return PassCertificate(gap, error, dual - moved - eta * reg * mass, moved, terms)


def growth(x: float) -> float:
    """Bound e^x - 1; beyond x = 1 no digit is left."""
    return x * (1 + x) if x <= 1 else math.inf


def passes_left(guesses: list[float], tol: float) -> float:
    """Estimate how many passes it takes to ``tol`` at the rate of the last ones; none while that is not known."""
    first, last = guesses[-min(len(guesses), 1 + RATE_PASSES)], guesses[-1]
    if len(guesses) <= RATE_PASSES or not tol < last < math.inf:
        return 0.0
    return math.log(last / tol) * RATE_PASSES / math.log(first / last) if last < first < math.inf else math.inf


class Ascent:
    """The passes of one body, as mapuot.ascend.loop.Run asks for them (backends.contract.Workspace)."""

    def __init__(self, body: Tree | JointBlocks, options: Options) -> None:
        self.reads, self.coarse = body.problem.reads, body.coarse
        problem, self.body, self.options, self.number = body.problem, body, options, 0
        there = problem.xp is not np and body.ends[-1] > HOST_ENTRIES  # a large state's differences
        History = load("cuda" if there else "cpu").History
        self.history = History(memory_of(DEPTH, max(problem.shape), 8), body.ends)
        rough = problem.rho[problem.soft].max(initial=0.0) / problem.reg
        floor = max(NARROW_FLOOR * math.sqrt(1 + rough), 10 * options.tol)
        self.judge = Judge(tol=options.tol, tol_gap=options.tol_gap, reg=problem.reg, narrow_floor=floor)
        self.alone = body.alone  # until a step is dropped
        self.exact = self.extrapolated = False  # exact: each pass is made whole before the next begins
        self.found: State | None = None
        self.narrow, self.ratio, self.guessed, self.since_whole = problem.narrow, RATIO, math.inf, 0
        self.guesses: list[float] = []
        self.residual = math.inf

    def absorb(self, log_v: F64 | None = None) -> None:
        """Make kernels around a state, from which passes go on."""
        start = np.zeros(1) if log_v is None else log_v
        self.next_log_v = self.body.start(np.broadcast_to(start, self.body.ends[-1:]).copy())

    def iterate(self, count: int) -> list[Stats]:
        made: list[Stats] = []
        while len(made) < count and (not made or made[-1].status == "running"):
            made.append(self.one_pass())
        return made

    def potentials(self) -> tuple[State | None, Tree | JointBlocks]:
        """Return the last plan, if there is one, and the body, which makes products of it."""
        return self.found, self.body

    def marginals(self) -> None:
        """Nothing, as those of the plan are made on request."""

    def close(self) -> None:
        """Keep the kernels: those of the next reg lie in their memory, and products of the plan are made by them."""

    def one_pass(self) -> Stats:
        """Make a pass: the plan of the state and what it is worth, and the state that follows, if the guard lets it."""
        problem, narrow, progress = self.body.problem, self.narrow, self.judge.progress
        self.number += 1
        try:
            raw = self.body.sweep(self.next_log_v, narrow)
        except StaleError:  # in kernels made for this very state, too
            return self.failed(0.0)
        lam = translation(problem, raw)
        found = self.body.translated(raw, lam)
        least, most = (f(problem.reg, 1.0) * found.mass for f in (min, max))
        if not LEAST_MASS <= least <= most < math.inf:  # gaps are measured by reg times the mass
            return self.failed(0.0 if least < LEAST_MASS else most)
        value = certify(problem, found, lam, self.options.allowed)
        progress.narrow, progress.extrapolated, self.judge.limits.dual_scale = narrow, 1, value.terms
        fallen = self.judge.settle(value.dual, found.mass)
        rejected = fallen and self.extrapolated
        if self.body.coarse:
            self.body.coarse.judge(rejected)
        if rejected:
            self.next_log_v = self.history.image
            self.history.clear()
            self.extrapolated, self.alone = False, 0.0
            return self.told(value, found.mass, True)
        if fallen:
            progress.best_dual = value.dual
            if not self.exact:  # late messages may lead away: from here on there are none
                self.exact = True
                self.history.clear()
        self.found, self.last = found, (raw, lam)
        return self.advanced(value, lam)

    def advanced(self, value: PassCertificate, lam: F64) -> Stats:
        """Find the state that follows the last plan, certify that where it is due, and judge the pass."""
        assert self.found is not None
        if self.exact and not self.found.whole:
            value = self.completed()
        image = self.body.image(self.found, lam, self.exact)
        change = image - self.next_log_v
        self.residual = largest_of(change)
        if not math.isfinite(self.residual):
            return self.failed(math.nan)
        if (self.narrow or not self.found.whole) and self.is_due(value, change, self.found):
            value = value if self.found.whole else self.completed()
        self.next_log_v = self.extrapolate(change, image, self.found)
        stat, progress = self.told(value, self.found.mass), self.judge.progress
        progress.moved = value.moved
        stat.status = self.judge.judge(dataclasses.replace(stat, error=self.guessed) if self.narrow else stat)
        if self.narrow and not progress.narrow:  # guesses are compared with those of passes alike
            self.narrow, self.guesses = False, []
        return stat

    def told(self, value: PassCertificate, mass: float, rejected: bool = False) -> Stats:
        """The numbers of a pass."""
        return Stats(self.number, value.gap, value.error, value.dual, mass, self.residual, rejected, "running")

    def is_due(self, value: PassCertificate, residual: F64, found: State) -> bool:
        """Tell whether a plan may be good enough to be certified, by the last changes; decide when passes turn wide."""
        gap, hard = self.body.guess(residual, found)
        problem, options = self.body.problem, self.options
        self.guessed = plan_error(gap / (problem.reg * found.mass)) + hard / found.mass
        self.since_whole += 1
        self.guesses = [*self.guesses[-RATE_PASSES:], self.guessed]
        if self.body.coarse:
            self.body.coarse.expects(passes_left(self.guesses, options.tol))
        if self.narrow:
            return False
        small = gap * self.ratio**2 <= options.tol_gap * abs(value.dual)
        good = self.guessed * self.ratio <= options.tol or small
        return good or self.since_whole >= WHOLE_PASSES

    def completed(self) -> PassCertificate:
        """Make the last plan whole and certify it; by its error the next guess is scaled."""
        raw, lam = self.last
        self.body.complete(raw)
        self.found, self.since_whole = self.body.translated(raw, lam), 0
        value = certify(self.body.problem, self.found, lam, self.options.allowed)
        if 0 < self.guessed < math.inf and value.error < math.inf:
            self.ratio = min(MOST_RATIO, max(LEAST_RATIO, value.error / self.guessed))
        return value

    def conclude(self, stat: Stats) -> None:
        """Certify the last pass of a run, which may have left that out."""
        if self.found is not None and not self.found.whole:
            value = self.completed()
            stat.gap, stat.error, stat.dual = value.gap, value.error, value.dual
            self.judge.progress.moved = value.moved
        if self.judge.again(stat, 0.0, 0.0, self.judge.progress.moved):
            stat.status = "converged"

    def failed(self, mass: float) -> Stats:
        """End with a pass that found no plan of which certificates can be made."""
        self.found = self.found if self.found is not None and self.found.whole else None
        self.next_log_v = np.zeros(self.body.ends[-1])
        self.residual = math.inf
        stat = self.told(PassCertificate(), mass)
        self.judge.judge(stat)
        return stat

    def extrapolate(self, residual: F64, image: F64, found: State) -> F64:
        """Return the next state: Anderson's, or the image where there is no past, and what clusters add to it."""
        self.extrapolated, coarse = self.history.add(residual, image), self.body.coarse
        if self.extrapolated:
            image, residual = self.history.next(self.body.metric(found), self.alone)
        if coarse and coarse.on and not self.exact:
            self.extrapolated = True
            image = image + coarse.step(residual)
        return image
