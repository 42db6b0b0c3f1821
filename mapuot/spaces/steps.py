"""Steps of Gromov-Wasserstein: each is a problem of `solve`; they end when a step returns the plan it starts from.

A step needs only linear functions of a plan. Hence a step may start from Anderson's extrapolation of the previous plans
(Pratapa, Suryanarayana, Pask 2016); the extrapolation is dropped if the objective rises. Without entropy steps are
proximal (Xu, Luo, Zha, Carin 2019): the previous plan Q is the reference measure. -reg log(Q / a b^T), a sum of earlier
costs and potentials, is added to the cost C.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from ..api.solve import solve
from ..errors import muted
from ..penalties import F64
from .answer import GromovResult, LastStep, Step, answer_of
from .task import Factors, Plan, StepCost, Task

LOOSE = 1e-2  # tol of the first inner solve; tol of later ones is SHARE times the change of the plan
SHARE = 0.1
MOST_CHANGE = 0.1  # largest share of the mass that a step moves before an extrapolation
LEAST_REACH, REST = 0.3, 5  # least length of an extrapolation, in steps; plain steps after one that failed
LEAP, ALIGNED = 8.0, 0.95  # length of an extrapolation away from a saddle; least cosine of its last two steps
LEAST_MOVE = 1e-2  # singular values of the differences of moves below this share of the largest count as 0
RISE, MOST_OVERSHOOTS = 1e-3, 2  # after so many steps that raise the objective by this share, steps go half as far
LEAST_SHARE = 1 / 16
MOST_MOVED = 0.5  # largest share of the mass that an extrapolation moves
TILT, TIE = 0.1, 1e-6  # correlations that tilts add to a settled plan and to the start of proximal steps
SIGHTS = 8  # points; their distances make a tilt


class StepProblem(NamedTuple):
    """The problem of `solve` that a step poses: cost, penalties, ``tol``, and (log u, log v) to start from."""

    cost: StepCost
    reg: float
    reg_m: tuple[float, ...]
    tol: float
    start: tuple[F64, F64] | None


class FirstPlan(NamedTuple):
    """A plan to start from.

    ``coarse``: the answer between some of the points, if the plan is lifted from it. ``is_symmetric``: the plan has all
    symmetries of both spaces.
    """

    plan: Plan
    coarse: GromovResult | None = None
    is_symmetric: bool = False


class Limits(NamedTuple):
    """Largest number of steps, the change that ends them, and ``tol`` of the last inner solve."""

    max_iter: int
    tol: float
    inner_tol: float

    def next_inner_tol(self, change: float, last: float) -> float:
        """Return ``tol`` of the next inner solve, given the last one and the change of the plan since."""
        if change <= self.tol:
            return self.inner_tol
        return max(self.inner_tol, min(last, SHARE * change))


def descend(task: Task, start: FirstPlan, limits: Limits, options: dict[str, Any]) -> GromovResult:
    """Take steps until the plan settles; see `steps_to_minimum`."""
    steps = steps_to_minimum(task, start, limits)
    step = next(steps)
    while True:
        with muted():  # warnings are muted: only the certificate of the last step counts
            result = solve(
                step.cost.posed(), task.a, task.b, reg=step.reg, reg_m=step.reg_m, tol=step.tol, warm_start=step.start,
                **options,
            )  # fmt: skip
        try:
            step = steps.send(result)
        except StopIteration as end:
            answer = answer_of(task, end.value)
            answer.coarse = start.coarse
            return answer


def steps_to_minimum(task: Task, start: FirstPlan, limits: Limits) -> Generator[StepProblem, Any, LastStep]:
    """Yield the problem of each step and receive its `Result`, until the plan settles.

    From a symmetric start the plan may settle at a saddle. Therefore steps start again from the settled plan, tilted.
    They lead back to it, or to a better plan. Proximal steps have a reg that falls; their start is tilted, by so little
    that it decides between symmetric plans only.
    """
    first = start.plan
    if start.is_symmetric and not task.reg:
        first = tilted(task, first, TIE)
    end = yield from steps_from(task, first, limits, measures_first=start.coarse is None)
    left = limits._replace(max_iter=limits.max_iter - len(end.steps))
    if not (start.is_symmetric and task.reg and end.settled and left.max_iter):
        return end
    other = yield from steps_from(task, tilted(task, end.plan, TILT), left, measures_first=False)
    value = sum(end.parts)
    if not other.settled:  # by rough steps, which miss hard marginals, the objective may be too low
        value -= RISE * abs(value)
    if not sum(other.parts) < value:
        return end
    return other._replace(steps=[*end.steps, *other.steps])


def tilted(task: Task, plan: Plan, correlation: float) -> Plan:
    """Return P + correlation (r u) (s v)^T / mass for functions u and v of the points with mean 0 and mean square 1.

    The marginals are those of P. u and v are random sums of the distances from some points. They break every symmetry
    that moves one of these points.
    """
    rng = np.random.default_rng(0)
    mass = plan.mass
    factors = []
    for space, w in ((task.X, plan.r), (task.Y, plan.s)):
        chosen = rng.choice(space.count, SIGHTS, p=w / w.sum())
        u = sum(weight * space.rows(k, k + 1)[0] for k, weight in zip(chosen, rng.normal(size=SIGHTS), strict=True))
        u = u - w @ u / mass
        size = math.sqrt(w @ u**2 / mass)
        factors.append(w * u / (size or 1.0))
    P = Factors(correlation / mass * factors[0][:, None], factors[1][None])
    more = task.plan(P, 0 * plan.r, 0 * plan.s, [(0.0, 0.0, 0.0)] * 3)
    names = "cross", "moved", "features"
    return plan._replace(**{name: getattr(plan, name) + getattr(more, name) for name in names})


def steps_from(task: Task, plan: Plan, limits: Limits, measures_first: bool) -> Generator[StepProblem, Any, LastStep]:
    """Yield the problem of each step and receive its `Result`, until the plan settles.

    ``measures_first``: measure the change of the first plan; a lifted or tilted plan has none to measure.
    """
    steps: list[Step] = []
    path = Path(task, limits.tol)
    potentials: Any = None  # of the last answer, in units of costs
    proximal: tuple[StepCost, float] | None = None  # -reg log(Q / a b^T) of the last plan Q, and its reg
    inner_tol = LOOSE
    settled = False
    while True:
        cost = task.cost(plan)
        reg = task.step_reg(len(steps), plan.mass)
        reg_m = tuple(rho * plan.mass for rho in task.rho)
        posed = cost
        if proximal is not None:
            posed = cost.plus(proximal[0], reg / proximal[1])
        logs = potentials and (potentials[0] / reg, potentials[1] / reg)
        result = yield StepProblem(posed, reg, reg_m, inner_tol, logs)
        task.check_mass(result.mass)
        potentials = next_potentials(task, result)
        after = task.answer(result)
        change = math.inf
        if (measures_first or steps) and not path.is_ahead:
            change = task.distance(plan, cost, result, after.mass, proximal is not None) / after.mass
        parts = task.parts(after)
        steps.append(Step(change, sum(parts), after.mass, result.error_bound, result.n_passes))
        settled = change <= limits.tol and inner_tol <= limits.inner_tol
        log = mass_correction(task, plan, after, is_first=len(steps) == 1)
        after = after.scaled(log)
        if settled or len(steps) == limits.max_iter:
            return LastStep(result, after, parts, steps, settled)
        if not task.reg:
            proximal = posed.of_plan(result, log), reg
        plan = path.next_plan(plan, after, sum(parts), change)
        inner_tol = limits.next_inner_tol(path.change, inner_tol)


class Path:
    """The last steps of a descent, and the plan that the next step starts from.

    This plan is the last answer, a plan on the way to it (`Stride`), or an extrapolation (`ahead`). If a step from an
    extrapolation raises the objective, steps return to the plan before it. A step from an extrapolation has no change,
    only an estimate from the length of its move; once this is at most ``tol``, the next step is from an answer.
    """

    before_leap: Plan | None = None  # the plan before an extrapolation
    value = math.inf  # objective of the last answer
    change = math.inf  # of the last step, measured or estimated
    unit = math.inf  # the last measured change over the length of its move
    n_plain = 0  # steps that must come before the next extrapolation

    def __init__(self, task: Task, tol: float) -> None:
        self.task = task
        self.tol = tol
        self.trail: list[tuple[Plan, Plan]] = []  # the last steps: (plan before, plan after)
        self.stride = Stride()

    @property
    def is_ahead(self) -> bool:
        """Whether the next step starts from an extrapolation."""
        return self.before_leap is not None

    def next_plan(self, before: Plan, after: Plan, value: float, change: float) -> Plan:
        """Return the plan after the step from ``before`` to ``after``, with this objective and change."""
        rise = value - self.value
        most_rise = RISE * abs(self.value)
        self.value = value
        self.trail = [*self.trail[-self.task.depth :], (before, after)]
        self.n_plain -= 1
        self.change = change
        if not self.task.reg:
            return after
        self.change = self.estimate(before, after, change)
        plan = after
        before_leap, self.before_leap = self.before_leap, None
        if before_leap is not None and not rise <= 0:  # the extrapolation failed
            self.trail = []
            self.n_plain = REST
            return before_leap
        if before_leap is None:
            plan = self.stride.next_plan(before, after, rise, most_rise)
        far = None
        if self.n_plain <= 0 and self.change > self.tol:
            far = ahead(self.task, self.trail, self.change, before_leap is None)
        if far is None:
            return plan
        self.before_leap = plan
        return far

    def estimate(self, before: Plan, after: Plan, change: float) -> float:
        """Return the change of a step, or an estimate if it is inf: as long moves changed as much before."""
        length = float(np.linalg.norm(self.task.vector(after) - self.task.vector(before)))
        if change == math.inf:
            return self.unit * length if length else math.inf
        if length:
            self.unit = change / length
        return change


class Stride:
    """The share of the way from a plan to its step's answer that steps go.

    Full steps can alternate between two plans for ever, if one side is soft: the squared distances of a marginal that
    may change are not concave.
    """

    share = 1.0
    overshoots = 0

    def next_plan(self, before: Plan, after: Plan, rise: float, most: float) -> Plan:
        """Return the next plan; ``rise`` of the objective above ``most`` for MOST_OVERSHOOTS steps halves the share."""
        if rise > most:
            self.overshoots += 1
        if self.overshoots == MOST_OVERSHOOTS:
            self.overshoots = 0
            self.share = max(0.5 * self.share, LEAST_SHARE)
        if self.share == 1:
            return after
        return after.mixed([before], np.array([1 - self.share]))


def next_potentials(task: Task, result: Any) -> tuple[F64, F64]:
    """Return the potentials that the next step starts from, in units of costs: reg changes; 0 without entropy."""
    if not task.reg:
        return 0.0 * task.a, 0.0 * task.b
    f, g = result.potentials
    return f, g


def mass_correction(task: Task, before: Plan, after: Plan, is_first: bool) -> float:
    """Return the log of the factor sqrt(mass of ``before`` / mass of ``after``) for the next plan.

    The first plan for a firm problem has a mass that is not its step's: from it, the factor would make k a share of
    rho, which swamps the costs.
    """
    if task.hard or (task.is_firm and is_first):
        return 0.0
    return 0.5 * task.log_ratio(before, after)


def ahead(task: Task, trail: list[tuple[Plan, Plan]], change: float, leaves_saddles: bool = True) -> Plan | None:
    """Return an extrapolation of the last plans, or None if it is not at least LEAST_REACH steps ahead.

    ``change``: share of the mass that the last step moved. ``leaves_saddles``: steps may grow. The extrapolation moves
    at most MOST_MOVED of the mass. It is Anderson's where steps become shorter. Where they grow in one direction, the
    plan leaves a saddle, and the extrapolation goes LEAP steps further in this direction: Anderson's leads back to the
    saddle. While steps are large there is none, since it may lead to another local minimum.
    """
    if len(trail) < 3 or change > MOST_CHANGE:
        return None
    before, after = (np.stack([task.vector(plan) for plan in plans]) for plans in zip(*trail, strict=True))
    left = after - before
    sizes = np.linalg.norm(left, axis=1)
    *plans, last = (plan for _, plan in trail)
    if sizes[-1] >= sizes[-2]:
        if not (leaves_saddles and left[-1] @ left[-2] > ALIGNED * sizes[-1] * sizes[-2]):
            return None
        plans = [trail[-1][0]]
        share = np.array([-LEAP])
        far = LEAP
    elif (np.diff(sizes) >= 0).any():
        return None
    else:
        moves = left[-1] - left[:-1]
        share = np.linalg.pinv(moves @ moves.T, rcond=LEAST_MOVE**2, hermitian=True) @ (moves @ left[-1])
        far = float(np.linalg.norm(share @ (after[-1] - after[:-1])) / sizes[-1])
        if not LEAST_REACH <= far < math.inf:
            return None
    mixed = last.mixed(plans, share * min(1.0, MOST_MOVED / change / far))
    if mixed.mass > MOST_MOVED * last.mass:
        return mixed
    return None
