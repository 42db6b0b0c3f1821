"""The answer of `gromov`: the `Result` of the last step, with the value of the whole problem and all steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..answer.result import Result
from ..answer.sharpness import CLEAR, x_log_x
from ..answer.slopes import Gradient, mass_slope
from .task import Plan, Task, Terms


class Step(NamedTuple):
    """One step: the change from the plan before it to its answer, the objective, the mass, the inner certificate."""

    change: float
    objective: float
    mass: float
    error_bound: float
    n_passes: int


class LastStep(NamedTuple):
    """The answer and the plan of the last step, the terms of its objective, all steps, and whether they settled."""

    result: Any
    plan: Plan
    parts: Terms
    steps: list[Step]
    settled: bool


class GromovResult(Result):
    """Answer of `gromov`: the `Result` of the last inner problem, with the value of the outer problem.

    The members of a `Result` (``plan``, ``apply``, ``top_k``, ``sparse``, ``sample``, ``barycentric_map``, ``save``)
    describe the plan. ``error_bound``, ``gap``, ``dual``, ``objective`` and ``cost`` belong to the last inner problem;
    this problem is convex, and its certificate holds. The outer problem is not convex: no number bounds the distance
    from the plan to the best plan, but `lower_bound` bounds its value.

    Attributes
    ----------
    reg, reg_m : float, (float, float)
        reg and reg_m of the problem, in the units of the call; found where ``mass`` or ``sharpness`` asks for them.
    value, parts : float, Terms
        Objective of `gromov` at the plan, and the terms that add up to it: ``structure``, ``features``, ``rows``,
        ``columns``, ``entropy``.
    steps : list of Step
        One entry for each step of the best start: ``change``, ``objective``, ``mass``, and ``error_bound`` and
        ``n_passes`` of the inner solve. ``change`` bounds ``|Q - P|_1 / mass`` for the plan Q before the step and the
        exact answer P of the step; the bound includes ``error_bound``. It is inf if the step starts from an
        extrapolation of earlier plans, or from a plan lifted from some of the points.
    values : list of float
        Final objectives of all starts; the answer has the least of them.
    settled : bool
        Whether the last change was at most ``tol``.
    value_error : float
        Bound on ``value`` less the objective with the true distances, at the plan, which is not negative. It is 0 where
        steps have all distances. It is positive where both spaces are approximated by coordinates (metric "euclidean",
        more than 2000 points), and inf for geodesics between more than 2000 points.
    misfit : (float, float)
        Root mean square of the error of such coordinates' distances, over the root mean square of the distances, in X
        and in Y; ``value`` has 8 times as many landmarks as the steps. For geodesics it is measured at 32 points.
    lower_bound : float or None
        Certified lower bound on the objective of every plan with these marginals, if ``bound_tol`` asks for it. A
        plan misses its marginals by up to ``inner_tol``, so that near the minimum ``value`` may lie slightly below.
    is_independent : bool
        Whether the plan is nearly the product of its marginals (``sharpness`` below .05). Such a plan matches no
        points: reg is too large, or every start has ended near a saddle.
    coarse : GromovResult or None
        The answer between some of the points, if this answer starts from it. It may have a ``coarse`` of its own; the
        ``values`` of the smallest problem are the final objectives of its starts.

    See Also
    --------
    gromov : Makes it.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    >>> result = mapuot.gromov(x, x[:, ::-1], reg=0.5, reg_m=np.inf)
    >>> result.plan.argmax(1)
    array([0, 1, 2])
    >>> result.settled, bool(abs(sum(result.parts) - result.value) < 1e-12)
    (True, True)
    """

    reg: float
    reg_m: tuple[float, float]
    value: float
    parts: Terms
    steps: list[Step]
    values: list[float]
    settled: bool
    coarse: GromovResult | None = None
    lower_bound: float | None = None
    value_error: float = 0.0
    misfit: tuple[float, float] = (0.0, 0.0)
    _task: Task
    _plan: Plan

    def gradient(self) -> Gradient:
        """Return the derivatives of ``value`` with respect to points and masses, at a settled plan.

        By the envelope theorem, the change of a settled plan does not contribute. Both spaces must be given as points.
        If both sides are hard, the derivatives with respect to the masses are known up to a constant.

        Returns
        -------
        Gradient
            ``x`` (m, d), ``y`` (n, e), ``a`` (m,), ``b`` (n,); ``error`` is inf, since nothing bounds the distance from
            the plan to a fixed point of the steps.
        """
        task = self._task
        plan = self._plan
        X, Y = task.X, task.Y
        if not (X.has_points and Y.has_points):
            raise NotImplementedError("gradient is for metric 'sqeuclidean' on both sides: distances have no points")
        if not task.reg:
            raise NotImplementedError("gradient is for a positive reg")
        if not task.is_joint:
            raise NotImplementedError("gradient is for reg_mode 'joint'")
        sides = (X, Y, plan.r, self.apply(Y.phi)), (Y, X, plan.s, self.apply_transpose(X.phi))
        x, y = (own.slope(own, w[:, None] * own.phi) - own.slope(other, Z) for own, other, w, Z in sides)
        (low, A), (high, B), (reg, whole) = task.prices
        mass = plan.mass
        paid = zip(task.prices, plan.logs, strict=True)
        more = sum(rho * z for (rho, _), z in paid if rho < math.inf)  # derivative of the log terms by the mass
        rows = reg * B * (whole - mass) + (more if low == math.inf else -low * plan.over[0])
        cols = reg * A * (whole - mass) + (more if high == math.inf else -high * plan.over[1])
        a = mass_slope(self, True) + rows
        b = mass_slope(self, False) + cols
        return Gradient(8 * task.alpha * x, 8 * task.alpha * y, 2 * a, 2 * b, math.inf)

    @property
    def is_independent(self) -> bool:
        """Whether the plan is nearly the product of its marginals."""
        plan, mass = self._plan, self._plan.mass
        least = min(-float(x_log_x(w / mass).sum()) for w in (plan.r, plan.s))
        information = (plan.logs[2] - plan.logs[0] - plan.logs[1]) / mass + math.log(mass)
        return information < CLEAR * least

    def __repr__(self) -> str:
        m, n = self.problem.shape
        state = "settled" if self.settled else "not settled"
        place = " near the independent plan" * bool(self.is_independent)
        return f"<mapuot.GromovResult {m}x{n} {state}{place} after {len(self.steps)} steps, value {self.value:.6g}>"


def answer_of(task: Task, end: LastStep) -> GromovResult:
    """Return a `GromovResult` with the last step's answer, and the members that a lazy Result has computed."""
    result: Result = end.result
    potentials = result.own_logs
    marginals = result.row_marginal, result.col_marginal
    own = result.problem, result._backend, potentials, marginals, result.trace, result.status, result._threads
    answer = GromovResult(*own, result.how, result.skipped)
    members = {"parts": end.parts, "steps": end.steps, "settled": end.settled, "value": sum(end.parts), "values": []}
    vars(answer).update(vars(result) | vars(answer) | members | {"_task": task, "_plan": end.plan})
    return answer


def in_order(answers: list[GromovResult]) -> list[GromovResult]:
    """Return the answers by their objectives, the least first, and set their ``values`` to all objectives as given."""
    values = [answer.value for answer in answers]
    for answer in answers:
        answer.values = values
    return sorted(answers, key=lambda answer: answer.value if math.isfinite(answer.value) else math.inf)


def best_of(answers: list[GromovResult]) -> GromovResult:
    """Return the answer with the least objective, and set its ``values`` to the objectives of all answers."""
    return in_order(answers)[0]
