"""Many small problems of Gromov-Wasserstein at a time: one call of `solve_batch` solves a step of all of them.

Each problem has its own `steps_to_minimum`, and distances as matrices. Smaller spaces are padded by points without
mass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..api.batch import solve_batch
from ..arrays import host
from ..errors import muted
from ..penalties import F64
from .answer import LastStep
from .starts import loose_penalties, scale_of_rows, with_noise
from .steps import LOOSE, FirstPlan, Limits, steps_to_minimum
from .task import Plan, Task


class SmallProblem(NamedTuple):
    """A dense problem of `solve` between the spaces of a task, to be solved beside others."""

    task: Task
    M: F64
    reg: float
    reg_m: tuple[float, ...]
    tol: float
    start: tuple[F64, F64] | None = None


class SmallAnswer:
    """Answer of one problem of a batch, without padding, with the members of a `Result` that a step reads."""

    def __init__(self, padded: Result, M: F64, plan: F64, f: F64, g: F64) -> None:
        self.problem = padded.problem
        self.error_bound = padded.error_bound
        self.n_passes = padded.n_passes
        self.plan = plan
        self.potentials = self.f, self.g = f, g
        self.own_logs = f / self.problem.reg, g / self.problem.reg
        r = plan.sum(1)
        self._sums = float((plan * M).sum()), r, plan.sum(0)
        self.mass = float(r.sum())

    def apply(self, Z: F64) -> F64:
        return np.asarray(self.plan @ Z)


def solve_small(problems: list[SmallProblem], options: dict[str, Any]) -> list[SmallAnswer]:
    """Solve problems in one batch, to the least ``tol`` of them."""
    m, n = (max(problem.M.shape[k] for problem in problems) for k in range(2))
    M = stacked([problem.M for problem in problems], (m, n))
    A = stacked([problem.task.a for problem in problems], (m,))
    B = stacked([problem.task.b for problem in problems], (n,))
    reg = np.array([problem.reg for problem in problems])
    starts = [problem.start for problem in problems if problem.start is not None]
    logs = None
    if len(starts) == len(problems):
        rows, cols = zip(*starts, strict=True)
        logs = stacked(rows, (m,), -np.inf), stacked(cols, (n,), -np.inf)
    with muted():  # warnings are muted: only the certificates of the last steps count
        found = solve_batch(
            M, A, B, reg=reg, reg_m=np.array([problem.reg_m for problem in problems]),
            tol=min(problem.tol for problem in problems), warm_start=logs, **options,
        )  # fmt: skip
    f = host(found.f)
    g = host(found.g)
    exponents = (f[:, :, None] + g[:, None, :] - M) / reg[:, None, None]
    plans = A[:, :, None] * np.exp(exponents) * B[:, None, :]
    answers = []
    for k, problem in enumerate(problems):
        i, j = problem.M.shape
        answers.append(SmallAnswer(found[k], problem.M, plans[k, :i, :j], f[k, :i], g[k, :j]))
    return answers


def stacked(arrays: Any, shape: tuple[int, ...], padding: float = 0.0) -> F64:
    """Return arrays of up to this shape as one array, padded at the ends."""
    found = np.full((len(arrays), *shape), padding)
    for own, x in zip(found, arrays, strict=True):
        own[tuple(slice(k) for k in x.shape)] = x
    return found


def descend_together(
    tasks: list[Task], begins: list[FirstPlan], limits: Limits, options: dict[str, Any]
) -> list[LastStep]:
    """Take steps of each problem from its start until it settles."""
    paths = [steps_to_minimum(task, start, limits) for task, start in zip(tasks, begins, strict=True)]
    posed = {k: next(path) for k, path in enumerate(paths)}
    ends: dict[int, LastStep] = {}
    while posed:
        problems = [SmallProblem(tasks[k], step.cost.posed(), *step[1:]) for k, step in posed.items()]
        for k, answer in zip([*posed], solve_small(problems, options), strict=True):
            try:
                posed[k] = paths[k].send(answer)
            except StopIteration as end:
                ends[k] = end.value
                del posed[k]
    return [ends[k] for k in range(len(tasks))]


def starts_by_rows(tasks: list[Task], rows: dict[int, F64], options: dict[str, Any]) -> list[list[Plan]]:
    """Return the plans of `by_rows` for each problem; ``rows``: sorted rows of each space by its id."""
    problems = []
    for task in tasks:
        x = rows[id(task.X)]
        y = rows[id(task.Y)]
        M = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
        reg, reg_m = loose_penalties(task, scale_of_rows(task, x, y))
        problems.append(SmallProblem(task, M, reg, reg_m, LOOSE))
    answers = solve_small(problems, options)
    return [with_noise(task, answer.plan) for task, answer in zip(tasks, answers, strict=True)]
