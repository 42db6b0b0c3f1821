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

from ..backends import Stats
from ..backends.contract import LEAST_MASS, memory_of
from ..penalties import F64, kl_divergence
from .problem import MultiProblem
from .state import State

STALL_PASSES = 250
UNIT = 2.0**-53
RIDGE = 1e-10  # of Anderson's normal equations, whose columns are normalised
DEPTH = 20


class UnderflowError(ArithmeticError):
    """A point is so far from all mass that its sums leave float64, in kernels made for this very state, too."""


class Body(Protocol):
    problem: MultiProblem

    def start(self, state: F64 | None = None) -> F64: ...
    def sweep(self, state: F64) -> State: ...
    def image(self, state: State, lam: F64) -> F64: ...
    def metric(self, state: State) -> F64: ...


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


def log_sum(x: F64) -> float:
    top = float(x.max())
    return top + math.log(float(np.exp(x - top).sum())) if math.isfinite(top) else top


def translation(problem: MultiProblem, state: State, log_mass: float) -> F64:
    """The best common shifts lam of log u: A_k e^(-lam_k reg / rho_k) = c for all, which is the mass of the plan, too.

    A_k = sum a_k u_k^(-reg / rho_k). With R_k = rho_k / reg, log c = (log mass + sum R_k log A_k) / (1 + sum R_k), but
    the mass of a hard marginal where there is one.
    """
    lam = np.zeros(len(problem.marginals))
    soft = {k: x.rho / problem.reg for k, x in enumerate(problem.marginals) if not (x.free or x.hard)}
    hard = [k for k, x in enumerate(problem.marginals) if x.hard]
    log_A = {k: log_sum(problem.marginals[k].log_weight - state.log_u[k] / R) for k, R in soft.items()}
    if hard:
        log_c = math.log(problem.marginals[hard[0]].mass)
    else:
        log_c = (log_mass + sum(R * log_A[k] for k, R in soft.items())) / (1 + sum(soft.values()))
    for k, R in soft.items():
        lam[k] = R * (log_A[k] - log_c)
    if hard:
        lam[hard[0]] = log_c - log_mass - lam.sum()
    return lam if np.isfinite(lam).all() else np.zeros_like(lam)


def plan_error(d: float) -> float:
    """|P - P*|_1 / mass from d >= KL(P* | P) / mass, see docs/mathematics.md (10)."""
    return d / 3 + math.sqrt(2 * d + d * d / 9) if d >= 0 else math.inf


@dataclass
class Certificate:
    gap: float
    error: float
    dual: float  # a lower bound of the optimum
    moved: float  # what rounding may have added to the dual value
    mass: float


def certify(problem: MultiProblem, state: State, lam: F64, allowed: float) -> Certificate:
    """What the plan of a state is worth, with everything that rounding may hide counted against it.

    ``delta`` bounds the relative error of every r_k and of the plan's entries, ``slip`` that of q_k = a_k u_k^(-reg /
    rho_k). A hard marginal that was met last is missed by delta: divided by that it is met, and the others move by
    delta once more.
    """
    reg, gap, hard, kl, price, slipped = problem.reg, 0.0, 0.0, 0.0, 0.0, 0.0
    mass = float(state.marginal(problem, 0).sum())
    if not LEAST_MASS <= mass < math.inf:
        return Certificate(math.inf, math.inf, -math.inf, math.inf, mass)
    dual = reg * (problem.reference_mass - mass) + problem.constant
    terms = reg * (problem.reference_mass + mass) + problem.constant
    sizes = [float(np.abs(x).max()) for x in state.log_u]
    logs = float(np.abs(lam).sum()) + sum(sizes) + log_sizes(problem) + problem.largest / reg
    delta, slip = growth(state.rounding + 4 * UNIT * logs + problem.cost_error / reg), 0.0
    for k, x in enumerate(problem.marginals):
        if x.free:
            continue
        r, log_u = state.marginal(problem, k), state.log_u[k]
        if x.hard:
            value, missed = reg * log_u * x.weight, float(np.abs(r - x.weight).sum())
            hard, price = hard + missed, price + sizes[k] * reg
        else:
            y = log_u * (reg / x.rho)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                q, value = x.weight * np.exp(-y), -x.rho * x.weight * np.expm1(-y)
                gap += x.rho * float(kl_divergence(r, q).sum())
            own = growth(8 * UNIT * (1 + float(np.abs(y).max())))
            slip, kl, slipped = (
                max(slip, own),
                kl + x.rho * float((r + q).sum()),
                slipped + x.rho * own * float(q.sum()),
            )
        dual, terms = dual + float(value.sum()), terms + float(np.abs(value).sum())
    moved = reg * mass * delta + slipped + 64 * UNIT * terms
    with np.errstate(over="ignore", invalid="ignore"):
        sound = 0 <= gap < math.inf and kl < math.inf and delta < 0.1
        root = math.sqrt(gap) + (2 * delta + slip) * math.sqrt(kl) if sound else math.inf
        whole = root * root * (1 + 6 * delta)
        error = (plan_error(whole / (reg * mass * (1 - delta))) + hard / mass) * (1 + 4 * delta) + 2 * delta
        whole += delta * mass * price
    if not (math.isfinite(dual) and math.isfinite(mass) and error < math.inf and moved < math.inf):
        return Certificate(math.inf, math.inf, -math.inf, math.inf, mass)
    return Certificate(math.inf if hard > allowed * mass else whole, error, dual - moved, moved, mass)


def growth(x: float) -> float:
    """e^x - 1 at most; beyond x = 1 no digit is left."""
    return x * (1 + x) if x <= 1 else math.inf


def log_sizes(problem: MultiProblem) -> float:
    return sum(float(np.abs(x.log_weight).max()) for x in problem.marginals)


class Ascent:
    """Passes of one body from a state on; ``passes``: made before, with a larger reg."""

    def __init__(self, body: Body, rules: Rules, trace: list[Stats], begin: float, passes: int = 0) -> None:
        self.body, self.rules, self.trace, self.begin, self.passes = body, rules, trace, begin, passes
        self.depth = memory_of(DEPTH, max(body.problem.shape), 8)
        self.history: list[tuple[F64, F64]] = []
        self.best_dual, self.extrapolated = -math.inf, False
        self.best_error, self.progress_dual, self.since_best = math.inf, -math.inf, 0
        self.found: State | None = None

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
        return status

    def one_pass(self) -> str:
        body, problem, before = self.body, self.body.problem, self.state
        number = self.trace[-1].n_pass + 1 if self.trace else self.passes + 1
        try:
            raw = body.sweep(before)
        except UnderflowError:
            return self.fail(number, "underflow")
        log_mass = log_sum(problem.marginals[0].log_weight + raw.log_u[0] + raw.log_s[0])
        if not math.isfinite(log_mass):
            return self.fail(number, "not finite" if log_mass > 0 or math.isnan(log_mass) else "underflow")
        lam = translation(problem, raw, log_mass)
        found = raw.translated(lam)
        value = certify(problem, found, lam, self.rules.allowed)
        if not LEAST_MASS <= value.mass < math.inf:
            return self.fail(number, "underflow" if value.mass < LEAST_MASS else "not finite")
        slack = 1e-13 * abs(self.best_dual) + 2 * value.moved
        rejected = self.extrapolated and not value.dual >= self.best_dual - slack
        if rejected:
            residual = self.trace[-1].residual
            self.state = self.history[-1][1]
            self.history.clear()
            self.extrapolated = False
        else:
            self.found = found
            self.best_dual = max(self.best_dual, value.dual) if self.extrapolated else value.dual
            image = body.image(found, lam)
            residual = float(np.abs(image - before).max(initial=0.0))
            if not math.isfinite(residual):
                return self.fail(number, "not finite")
            self.state = self.extrapolate(image - before, image, body.metric(found))
        status = "running" if rejected else self.status(value)
        self.trace.append(self.stats(number, value, residual, rejected, status))
        return status

    def stats(self, number: int, value: Certificate, residual: float, rejected: bool, status: str) -> Stats:
        seconds = time.perf_counter() - self.begin
        return Stats(number, value.gap, value.error, value.dual, value.mass, residual, rejected, status, seconds)

    def fail(self, number: int, status: str) -> str:
        nothing = Certificate(math.inf, math.inf, -math.inf, math.inf, math.inf)
        self.trace.append(self.stats(number, nothing, math.inf, False, status))
        return status

    def extrapolate(self, residual: F64, image: F64, weight: F64) -> F64:
        """x_next = G - sum gamma_i dG_i, gamma = argmin |F - sum gamma_i dF_i| in the norm of ``weight``."""
        self.history.append((residual, image))
        del self.history[: -self.depth - 1]
        self.extrapolated = len(self.history) > 1
        if not self.extrapolated:
            return image
        dF, dG = (np.diff([x[k] for x in self.history], axis=0) for k in (0, 1))
        gram = (dF * weight) @ dF.T
        scale = 1 / np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
        system = gram * scale[:, None] * scale + RIDGE * np.eye(len(dF))
        gamma = scale * np.linalg.solve(system, scale * ((dF * weight) @ residual))
        return np.asarray(image - gamma @ dG)

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
