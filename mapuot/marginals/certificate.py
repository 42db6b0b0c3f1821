"""Certificates of plans of many marginals, and the methods of `mapuot.ascend.passes.Body` for trees and arrays alike.

Formulas: docs/mathematics.md, "Many marginals".
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ascend.passes import Body, PassCertificate
from ..backends import Stats
from ..backends.kernel import UNIT
from ..backends.newton import GIVES_UP, HOLDS_AFTER, OPEN, Newton
from ..backends.rules import core, plan_error
from ..penalties import F64
from .problem import MultiProblem
from .state import State

GAP_LEAST = 1e-316  # rounding of a gap near the least float64: some 1e7 terms of 5e-324


def certify(problem: MultiProblem, state: State, lam: F64, allowed: float) -> PassCertificate:
    """Certify the plan of a state; all bounds include rounding.

    ``delta`` bounds the relative error of every r_k and of the plan's entries. ``slip`` bounds the relative error of
    q_k = a_k u_k^(-reg / rho_k). The hard marginal that a pass met last is off by up to delta; rescaling the plan to
    meet it moves the other marginals by delta once more. ``eta`` bounds the relative error of stored kernels. All sums
    share this error: they belong to a plan P' of costs that are off by reg eta. P' is feasible for the true costs, too,
    and KL(P' | plan of log_u) <= eta^2 / 2. A state that is not complete has a dual value only.
    """
    reg, mass, soft, hard = problem.reg, state.mass, problem.soft, problem.hard
    worth = state.worth
    if state.log_s:
        log_s = state.log_s.flat
    else:
        log_s = None
    if worth is None:
        worth = problem.points.worth(state.log_u.flat, log_s)
    sizes, values, value_sizes, amounts, gaps, boths, misses = worth.tolist()  # inf where exponentials overflow float64
    rho = [x.rho for x in problem.marginals]
    dual = reg * (problem.reference_mass - mass) + problem.constant + sum(values)
    terms = reg * (problem.reference_mass + mass) + problem.constant + sum(value_sizes)
    logs = float(np.abs(lam).max(1).sum()) + sum(sizes) + problem.log_sizes + problem.largest / reg
    delta = growth(state.rounding + 4 * UNIT * logs + problem.cost_error / reg)
    eta = growth(state.storage)
    slips = {k: growth(8 * UNIT * (1 + sizes[k] * reg / rho[k])) for k in soft}
    slip = max(slips.values(), default=0.0)
    slipped = sum(rho[k] * amounts[k] * x for k, x in slips.items())
    gap, kl = (sum(rho[k] * x[k] for k in soft) for x in (gaps, boths))
    gap += GAP_LEAST * (1 + max((rho[k] for k in soft), default=0.0))
    price = reg * sum(sizes[k] for k in hard)
    missed = sum(misses[k] for k in hard)
    noise = (64 + problem.log_sizes) * terms  # rounding of masses; the next line adds the rounding of sums
    noise += sum(n * size for n, size in zip(problem.shape, value_sizes, strict=True))
    moved = reg * mass * delta + slipped + UNIT * noise
    sound = state.is_complete and 0 <= gap < math.inf and kl < math.inf and delta < 0.1
    if sound:
        root = math.sqrt(gap) + (2 * delta + slip) * math.sqrt(kl)
        d = root * root * (1 + 6 * delta) / (1 - delta) / mass / reg
    else:
        root = math.inf
        d = math.inf
    stored = eta * eta * (0.5 + eta)
    error = (plan_error(d + stored) + missed / mass) * (1 + 4 * delta + 2 * eta) + 2 * delta
    root += eta * math.sqrt(kl) if sound else 0.0  # for the plan itself, with the true costs
    all_terms = root * root * (1 + 6 * delta) + (delta + eta) * mass * price + moved + 2 * eta * reg * mass
    if not (math.isfinite(dual) and moved < math.inf and (error < math.inf or not state.is_complete)):
        return PassCertificate()
    gap = math.inf if missed > allowed * mass else all_terms
    rounding = plan_error(stored) + 2 * delta, 2 * (delta + slip) * math.sqrt(len(problem.shape))
    return PassCertificate(gap, error, dual - moved - eta * reg * mass, moved, terms, rounding)


def growth(x: float) -> float:
    """Bound e^x - 1 from above; inf beyond x = 1, where no digit is left."""
    if x <= 1:
        return x * (1 + x)
    return math.inf


class CertifiedBody(Body):
    """Base of trees and blocks: translates and certifies the plan of a pass.

    For Newton's steps subclasses define these methods:

    tangent(found)     the map d -> sum over l != k of P_kl d_l at the points of all k, for a complete plan
    stepped(found, y)  the state after a step y of all log u, to first order
    """

    sweep: Callable[[F64, bool], State]  # (state, narrow): make a pass; narrow: sums may be in float32

    def __init__(self, problem: MultiProblem) -> None:
        self.problem, self.reg, self.reads, self.narrow = problem, problem.reg, problem.reads, problem.narrow
        self.rough = float(problem.rho[problem.soft].max(initial=0.0) / problem.reg)
        self.width = max(problem.shape)

    def find(self, state: F64, narrow: bool) -> State:
        """Make a pass from a state, and translate its plan."""
        self.last = self.sweep(state, narrow)
        self.lam = self.problem.points.translation(self.last.log_masses, self.last.log_u.flat)
        return self.translated(self.last, self.lam)

    def completed(self) -> State:
        """Complete the plan of the last pass."""
        self.complete(self.last)
        return self.translated(self.last, self.lam)

    def certified(self, found: State, allowed: float) -> PassCertificate:
        return certify(self.problem, found, self.lam, allowed)

    def translated(self, state: State, lam: F64) -> State:
        """Add to the potentials of each marginal its number in ``lam``."""
        return state.translated(self.problem, lam)

    def newton(self) -> "MarginalsNewton | None":
        """Return Newton's steps, for hard marginals or gaps near rounding; None if all marginals are free."""
        if all(x.free for x in self.problem.marginals):
            return None
        return MarginalsNewton(self.problem)

    def complete(self, found: State) -> None:
        """Do nothing: each pass finds all marginals; `Tree` overrides this."""


class MarginalsNewton(Newton):
    """Newton's steps of potentials that are not free, towards all hard marginals; they certify complete plans only."""

    def __init__(self, problem: MultiProblem) -> None:
        given = [k for k, x in enumerate(problem.marginals) if not x.free]
        self.at = np.concatenate([np.r_[problem.places[k]] for k in given])
        weight, self.uneven = evened(problem)
        self.size = sum(problem.shape)
        super().__init__(problem.reg, weight[self.at], np.repeat(problem.rho, problem.shape)[self.at])
        self.needed = len(problem.hard) > 1
        self.hard = np.isinf(self.rho)
        self.ends = np.cumsum([0, *(problem.shape[k] for k in given)], dtype=np.int64)
        self.record.marginals = len(given)
        self.record.start = core()[0].from_buffer("int64_t *", self.ends)

    def step(self, workspace: Any, backend: Any, stat: Stats, tol: float) -> str:
        """Find the step from the last pass; set ``stat.error`` to its bound, which replaces the missed mass."""
        if workspace.found is None:
            return GIVES_UP
        if not workspace.found.is_complete:
            workspace.conclude(stat)
        body, record = workspace.body, self.record
        value = body.certified(workspace.found, math.inf)
        found = workspace.found.brought()
        r = found.marginals(body.problem)[self.at]
        missed = float(np.abs(self.weight - r)[self.hard].sum()) + self.uneven
        apart, record.rounding = value.rounding
        product = body.tangent(found)

        def negative(d: F64) -> F64:
            return np.asarray(-product(self.to_points(d))[self.at])

        verdict = self.solve(apart + missed / found.mass, tol, found.log_u.flat[self.at], r, negative)
        stat.error = float(record.error)
        return OPEN if verdict == HOLDS_AFTER else verdict  # the state after the step is right only to first order

    def start(self, workspace: Any, backend: Any) -> F64:
        """Return the state from which the next pass starts."""
        return np.asarray(workspace.body.stepped(workspace.found.brought(), self.to_points(self.y)))

    def to_points(self, d: F64) -> F64:
        """Extend numbers of points of marginals that are not free to all points, with 0 elsewhere."""
        out = np.zeros(self.size)
        out[self.at] = d
        return out


def evened(problem: MultiProblem) -> tuple[F64, float]:
    weight = problem.weight.copy()
    uneven = 0.0
    labels = problem.labels or [np.zeros(n, int) for n in problem.shape]
    masses = {k: np.bincount(labels[k], weight[problem.places[k]], problem.parts) for k in problem.hard}
    for k, mass in masses.items():
        wanted = masses[problem.hard[0]]
        weight[problem.places[k]] *= (wanted / mass)[labels[k]]
        uneven += float(np.abs(wanted - mass).sum())
    return weight, uneven
