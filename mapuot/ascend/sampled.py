"""The start of a solve between very many points: a solve from some of the rows to all columns.

Its passes make one pair of `SAMPLES.share`, and its log v serves the whole problem. The masses of the chosen rows are
scaled to the mass of all rows. log v then errs by the root of the number of chosen rows that reach a column, so that
the first pass of the whole problem begins where some later pass would have begun. A bad start costs time only: the
first pass certifies its own error, and a start with a large one is dropped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..contract import Backend, Options
from ..penalties import F64
from ..problem.problem import Problem
from ..status import FAILED
from .settings import SAMPLES


def samples(problem: Problem, options: Options, backend: Backend) -> bool:
    """Tell whether a solve from some of the rows pays before passes over all pairs."""
    cost = problem.cost
    if cost.operator != "points" or cost.size < backend.samples_from or problem.ranks.size > 1 or problem.forbidden:
        return False
    if problem.unmasked != "product" or problem.masked is not None or not options.memory or options.symmetric:
        return False
    both = problem.rows.logarithmic and problem.cols.logarithmic
    return both and not backend.stores_kernel(problem, options)


def sampled_start(task: Problem, options: Options, solve: Callable[..., Any]) -> F64 | None:
    """Return log v of the problem of some rows, on its device; None if it has no answer.

    ``solve(problem, options)``: solves an auxiliary problem.
    """
    m = task.shape[0]
    chosen = np.sort(np.random.default_rng(0).choice(m, -(-m // SAMPLES.share), replace=False))
    weight = task.rows.weight[chosen]
    mass = float(weight.sum())
    if not mass > 0:
        return None
    rows = dataclasses.replace(task.rows, weight=weight * (task.rows.mass / mass), rho=task.rows.rho[chosen])
    cost: Any = task.cost
    some = dataclasses.replace(task, cost=cost[chosen], rows=rows)
    found = solve(some, dataclasses.replace(options, tol=max(options.tol, SAMPLES.tol), tol_gap=-1.0))
    if found.status in FAILED:
        return None
    log_v: F64 = found._logs[1]
    return log_v
