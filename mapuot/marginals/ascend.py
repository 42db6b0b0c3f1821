"""The iteration of all shapes: passes, translation, certificate, guard and Anderson's step, until one is certified.

A body (`Tree`, `Blocks`) gives the plan of a state and the state that follows; here is what they share. Formulas:
docs/mathematics.md, "Many marginals". For two marginals these are the rules of src_c/common/rules.h.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..backends import Stats, load
from ..backends.contract import LEAST_MASS, memory_of
from ..backends.kernel import StaleError, largest_of
from ..penalties import F64, plan_error
from .coarse import Coarse
from .problem import MultiProblem
from .state import State

STALL_PASSES = 250
UNIT = 2.0**-53
DEPTH = 20  # of Anderson's differences
HOST_ENTRIES = 8000  # of a state, whose differences the host has added up before a GPU has taken them
NARROW_NOISE = 1e-7  # of the terms of a dual value, by passes in float32
NARROW_FLOOR = 2e-6  # of the error that they still tell
NARROW_NEAR = 100.0  # times that: from here on they end where the error falls no more
RATE_PASSES = 4  # by which it is told how many are left
WHOLE_PASSES = 25  # after so many a plan is certified, near or not
RATIO, LEAST_RATIO, MOST_RATIO = 0.75, 0.02, 30.0  # of a certified error to the guess before it: at first, and within


class Body(Protocol):
    problem: MultiProblem
    ends: list[int]  # of the parts of a state
    alone: float  # how little they know of each other, 0 to 1
    coarse: Coarse | None  # what corrects steps

    def start(self, state: F64 | None = None) -> F64: ...
    def sweep(self, state: F64, narrow: bool) -> State:
        """A pass; narrow: its sums may be in float32."""

    def complete(self, found: State) -> None:
        """Marginals of the last pass, where that has left them out."""

    def translated(self, state: State, lam: F64) -> State: ...
    def image(self, found: State, lam: F64, exact: bool) -> F64:
        """The state that follows a plan, which ``lam`` has moved; exact: without what is late, of a whole one."""

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        """(gap, mass that hard marginals miss) of a plan that is not whole, to the order."""

    def metric(self, found: State) -> F64: ...


@dataclass(frozen=True)
class Rules:
    tol: float
    tol_gap: float | None
    max_passes: int
    callback: Callable[[Stats], Any] | None = None

    @property
    def allowed(self) -> float:
        """Share of the mass that hard marginals may miss while a gap still tells something."""
        return self.tol if self.tol_gap is None else self.tol_gap


def translation(problem: MultiProblem, state: State) -> F64:
    """The best common shifts lam of log u: A_k e^(-lam_k reg / rho_k) = c for all, which is the mass of the plan, too.

    A_k = sum a_k u_k^(-reg / rho_k). With R_k = rho_k / reg, log c = (log mass + sum R_k log A_k) / (1 + sum R_k), but
    the mass of a hard marginal where there is one. A row for each marginal, a column for each part of the problem.
    """
    log_mass, R, hard = state.log_masses, problem.ratios, problem.hard
    log_A = problem.points.log_amounts(state.log_u.flat)
    with np.errstate(invalid="ignore", over="ignore"):
        log_c = log_A[hard[0]] if hard else (log_mass + (R * log_A).sum(0)) / (1 + R.sum())
        lam: F64 = R * (log_A - log_c)
        if hard:
            lam[hard[0]] = log_c - log_mass - lam.sum(0)
    return lam if np.isfinite(lam).all() else np.where(np.isfinite(lam).all(0), lam, 0.0)


@dataclass
class Certificate:
    gap: float
    error: float
    dual: float  # a lower bound of the optimum
    moved: float  # what rounding may have added to the dual value
    mass: float
    terms: float = math.inf  # the sizes of all terms of the dual value


def certify(problem: MultiProblem, state: State, lam: F64, allowed: float) -> Certificate:
    """What the plan of a state is worth, with everything that rounding may hide counted against it.

    ``delta`` bounds the relative error of every r_k and of the plan's entries, ``slip`` that of q_k = a_k u_k^(-reg /
    rho_k). A hard marginal that was met last is missed by delta: divided by that it is met, and the others move by
    delta once more. ``eta``, of stored kernels, is the same in all sums: they see the plan of costs that are off by
    reg eta, which is one for the true costs, too, and KL(it | the plan) <= eta^2 / 2. Of a state that is not whole only
    the dual value is known.
    """
    reg, mass, soft, hard = problem.reg, state.mass, problem.soft, problem.hard
    if out_of_range(reg, mass):
        return Certificate(math.inf, math.inf, -math.inf, math.inf, mass)
    dual = reg * (problem.reference_mass - mass) + problem.constant
    terms = reg * (problem.reference_mass + mass) + problem.constant
    worth = problem.points.worth(state.log_u.flat, state.log_s.flat if state.log_s else None)
    sizes, values, value_sizes, amounts, gaps, boths, misses = worth.tolist()  # inf, where exponentials leave float64
    logs = float(np.abs(lam).max(1).sum()) + sum(sizes) + problem.log_sizes + problem.largest / reg
    delta = growth(state.rounding + 4 * UNIT * logs + problem.cost_error / reg)
    eta = growth(state.storage)
    slips = [growth(8 * UNIT * (1 + sizes[k] * rate)) for k, _, rate in soft]
    slip = max(slips, default=0.0)
    slipped = sum(rho * amounts[k] * x for (k, rho, _), x in zip(soft, slips, strict=True))
    gap, kl = sum(rho * gaps[k] for k, rho, _ in soft), sum(rho * boths[k] for k, rho, _ in soft)
    price, missed = reg * sum(sizes[k] for k in hard), sum(misses[k] for k in hard)
    dual, terms = dual + sum(values), terms + sum(value_sizes)
    noise = (64 + problem.log_sizes) * terms  # of masses, and then of their sums
    noise += sum(n * size for n, size in zip(problem.shape, value_sizes, strict=True))
    moved, weight = reg * mass * delta + slipped + UNIT * noise, reg * mass * (1 - delta)
    sound = state.whole and 0 <= gap < math.inf and kl < math.inf and delta < 0.1
    root = math.sqrt(gap) + (2 * delta + slip) * math.sqrt(kl) if sound else math.inf
    d = (root * root * (1 + 6 * delta) / weight if sound else math.inf) + eta * eta * (0.5 + eta)
    error = (plan_error(d) + missed / mass) * (1 + 4 * delta + 2 * eta) + 2 * delta
    root += eta * math.sqrt(kl) if sound else 0.0  # of the plan itself, by the costs as they are
    whole = root * root * (1 + 6 * delta) + (delta + eta) * mass * price + moved + 2 * eta * reg * mass
    if not (math.isfinite(dual) and moved < math.inf and (error < math.inf or not state.whole)):
        return Certificate(math.inf, math.inf, -math.inf, math.inf, mass)
    gap = math.inf if missed > allowed * mass else whole
    return Certificate(gap, error, dual - moved - eta * reg * mass, moved, mass, terms)


def out_of_range(reg: float, mass: float) -> str:
    """The status where a mass, or reg times it, which gaps are measured by, leaves float64; else nothing."""
    if min(reg, 1.0) * mass < LEAST_MASS:
        return "underflow"
    return "" if max(reg, 1.0) * mass < math.inf else "not finite"


def growth(x: float) -> float:
    """e^x - 1 at most; beyond x = 1 no digit is left."""
    return x * (1 + x) if x <= 1 else math.inf


def passes_left(guesses: list[float], tol: float) -> float:
    """Until an error is tol, at the rate of the last; none while that is not known."""
    first, last = guesses[-min(len(guesses), 1 + RATE_PASSES)], guesses[-1]
    if len(guesses) <= RATE_PASSES or not tol < last < math.inf:
        return 0.0
    return math.log(last / tol) * RATE_PASSES / math.log(first / last) if last < first < math.inf else math.inf


def history_of(body: Body) -> Any:
    """Of a body's states, on its device where they are large."""
    problem, entries = body.problem, body.ends[-1]
    there = problem.xp is not np and entries > HOST_ENTRIES
    return load("cuda" if there else "cpu").History(memory_of(DEPTH, max(problem.shape), 8), body.ends)


class Ascent:
    """Passes of one body from a state on; ``passes``: made before, with a larger reg."""

    def __init__(self, body: Body, rules: Rules, trace: list[Stats], begin: float, passes: int = 0) -> None:
        self.body, self.rules, self.trace, self.begin, self.passes = body, rules, trace, begin, passes
        self.history = history_of(body)
        self.alone = body.alone  # until a step is dropped
        self.exact = False  # whether each pass is made whole before the next begins
        self.best_dual, self.extrapolated = -math.inf, False
        self.best_error, self.progress_dual, self.since_best = math.inf, -math.inf, 0
        self.found: State | None = None
        self.narrow, self.ratio, self.guessed, self.since_whole = body.problem.narrow, RATIO, math.inf, 0
        self.guesses: list[float] = []

    def run(self, state: F64) -> str:
        """Passes until the status is final; the plan of the last is ``found``, the next state ``state``."""
        self.state, status = state, "running"
        while status == "running":
            status = self.one_pass()
            last = self.trace[-1]
            cancelled = self.rules.callback is not None and self.rules.callback(last)
            if status == "running" and cancelled and not last.rejected:
                status = "cancelled"
            elif status == "running" and last.n_pass >= self.rules.max_passes and not last.rejected:
                status = "max_passes"
            if status in ("cancelled", "stalled"):
                self.complete_last()
            if status == "stalled" and last.error <= self.rules.tol:
                status = last.status = "converged"  # by its certificate, which it had not looked at
        return status

    def one_pass(self) -> str:
        body, problem, before, narrow = self.body, self.body.problem, self.state, self.narrow
        number = self.trace[-1].n_pass + 1 if self.trace else self.passes + 1
        try:
            raw = body.sweep(before, narrow)
        except StaleError:  # in kernels made for this very state, too
            return self.fail(number, "underflow")
        if not math.isfinite(raw.log_mass):
            return self.fail(number, "not finite" if raw.log_mass > 0 or math.isnan(raw.log_mass) else "underflow")
        lam = translation(problem, raw)
        found = body.translated(raw, lam)
        value = certify(problem, found, lam, self.rules.allowed)
        if status := out_of_range(problem.reg, value.mass):
            return self.fail(number, status)
        slack = 1e-13 * abs(self.best_dual) + (NARROW_NOISE * value.terms if narrow else 2 * value.moved)
        fallen = not value.dual >= self.best_dual - slack
        rejected = self.extrapolated and fallen
        if body.coarse:
            body.coarse.judge(rejected)
        if rejected:
            residual = self.trace[-1].residual
            self.state = self.history.image
            self.history.clear()
            self.extrapolated, self.alone = False, 0.0
        else:
            self.found, self.last = found, (raw, lam)
            if fallen and not self.exact:  # late messages may lead away: from here on there are none
                self.exact = True
                self.history.clear()
            if self.exact and not found.whole:
                value, found = self.completed()
            image = body.image(found, lam, self.exact)
            change = image - before
            residual = largest_of(change)
            if not math.isfinite(residual):
                return self.fail(number, "not finite")
            due = (narrow or not found.whole) and self.is_due(number, value, change, found)
            if due and not found.whole:
                value, found = self.completed()
            self.best_dual = max(self.best_dual, value.dual) if self.extrapolated else value.dual
            self.state = self.extrapolate(change, image, found)
        status = "running" if rejected else self.status(value)
        self.trace.append(self.stats(number, value, residual, rejected, status))
        return status

    def is_due(self, number: int, value: Certificate, residual: F64, found: State) -> bool:
        """Whether this plan may be good enough to be certified, by what is known of it; when passes turn wide, too."""
        with np.errstate(over="ignore", invalid="ignore"):
            gap, hard = self.body.guess(residual, found)
        reg, rules = self.body.problem.reg, self.rules
        self.guessed, self.since_whole = plan_error(gap / (reg * value.mass)) + hard / value.mass, self.since_whole + 1
        rough = max((x.rho / reg for x in self.body.problem.marginals if x.rho < math.inf), default=0.0)
        floor = max(NARROW_FLOOR * math.sqrt(1 + rough), 10 * rules.tol)
        stays = self.guessed < NARROW_NEAR * floor and self.guessed >= (self.guesses or [math.inf])[-1]
        narrow, self.narrow = self.narrow, self.narrow and self.guessed > floor and not stays
        self.guesses = [*self.guesses[-RATE_PASSES:], self.guessed] if narrow == self.narrow else []  # by passes alike
        if self.body.coarse and self.guesses:
            self.body.coarse.expects(min(passes_left(self.guesses, rules.tol), rules.max_passes - number))
        if self.narrow:
            return number >= rules.max_passes
        small = rules.tol_gap is not None and gap * self.ratio**2 <= rules.tol_gap * abs(value.dual)
        good = self.guessed * self.ratio <= rules.tol or small
        return (good and not narrow) or self.since_whole >= WHOLE_PASSES or number >= rules.max_passes

    def completed(self) -> tuple[Certificate, State]:
        """The certificate of the last plan, made whole; by it the next guess is scaled."""
        raw, lam = self.last
        self.body.complete(raw)
        self.found, self.since_whole = self.body.translated(raw, lam), 0
        value = certify(self.body.problem, self.found, lam, self.rules.allowed)
        if 0 < self.guessed < math.inf and value.error < math.inf:
            self.ratio = min(MOST_RATIO, max(LEAST_RATIO, value.error / self.guessed))
        return value, self.found

    def complete_last(self) -> None:
        """The same for a solve that ends here."""
        if self.found is not None and not self.found.whole:
            last, (value, _) = self.trace[-1], self.completed()
            last.gap, last.error, last.dual = value.gap, value.error, value.dual

    def stats(self, number: int, value: Certificate, residual: float, rejected: bool, status: str) -> Stats:
        seconds = time.perf_counter() - self.begin
        return Stats(number, value.gap, value.error, value.dual, value.mass, residual, rejected, status, seconds)

    def fail(self, number: int, status: str) -> str:
        self.found = self.found if self.found is not None and self.found.whole else None
        nothing = Certificate(math.inf, math.inf, -math.inf, math.inf, math.inf)
        self.trace.append(self.stats(number, nothing, math.inf, False, status))
        return status

    def extrapolate(self, residual: F64, image: F64, found: State) -> F64:
        """The next state: Anderson's, or the image where there is no past, and what clusters add to it."""
        self.extrapolated, coarse = self.history.add(residual, image), self.body.coarse
        if self.extrapolated:
            image, residual = self.history.next(self.body.metric(found), self.alone)
        if coarse and coarse.on and not self.exact:
            self.extrapolated = True
            image = image + coarse.step(residual)
        return image

    def status(self, value: Certificate) -> str:
        small = self.rules.tol_gap is not None and value.gap <= self.rules.tol_gap * (abs(value.dual) - value.moved)
        if value.error <= self.rules.tol or (small and value.gap < math.inf):
            return "converged"
        self.since_best += 1
        if value.error < self.best_error * (1 - 1e-3) or value.dual > self.progress_dual + 1e-9 * abs(value.dual):
            self.best_error = min(self.best_error, value.error)
            self.progress_dual = max(self.progress_dual, value.dual)
            self.since_best = 0
        return "stalled" if self.since_best >= STALL_PASSES else "running"
