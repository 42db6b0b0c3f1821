"""Solves between points that skip pairs: the order of the points, and where such a solve begins.

The mask, its bounds and what it costs: backends/boxes.py. Points are sorted into boxes; the first mask is made of the
potentials of a rough solve, of all pairs where these are few, else between groups of points, which also correct the
passes: groups.py.
"""

import dataclasses
from types import ModuleType
from typing import Any

from ..backends import boxes
from ..backends.boxes import Iterated, Sorted, Truncation, expected, order
from ..backends.contract import Options, namespace
from ..penalties import F64
from ..problem.problem import Problem
from ..problem.side import Side
from .groups import Groups, units_of


def in_boxes(problem: Problem, turned: bool, least: int, threads: int | None = None) -> Sorted:
    """Return the problem with its points sorted into boxes of at least ``least`` points."""
    cloud = problem.cost.cloud
    unit = boxes.unit_of(whole_shape(problem), least)
    at = order(cloud.rows, unit, threads), order(cloud.targets, unit, threads)
    sides = [picked(side, k) for side, k in zip((problem.rows, problem.cols), at, strict=True)]
    moved = cloud.sorted(*at)
    moved.unit = unit
    return Sorted(dataclasses.replace(problem, cost=moved, rows=sides[0], cols=sides[1]), at, turned)


def whole_shape(problem: Problem) -> tuple[int, int]:
    """Return the number of rows of all ranks, and of columns."""
    return int(problem.rows.ranks.sum(problem.shape[0])), problem.shape[1]


def picked(side: Side, at: Any) -> Side:
    """Return a side with its points in the order ``at``."""
    upper = None if side.upper is None else side.upper[at]
    rho = side.rho if side.scalar_rho is not None else side.rho[at]
    return dataclasses.replace(side, weight=side.weight[at], rho=rho, upper=upper)


def begun(
    found: Sorted, options: Options, start: tuple[F64, F64] | None, nats: float, solve: Any, backend: ModuleType
) -> tuple[Problem, F64, Truncation]:
    """Return the problem and the log v that a solve which skips pairs starts from, and the state of these pairs.

    ``solve`` is that of `Groups`. The points and vectors of the problem lie where the backend works on them.
    """
    held = getattr(backend, "held", None)
    problem = held(found.problem) if held else found.problem
    groups = Groups(problem, found.problem, units_of(whole_shape(problem)), options, solve, backend)
    rough = start is None
    if start is not None:
        log_u, log_v = (x[at] for x, at in zip(start, found.order, strict=True))
    else:
        log_u, log_v = groups.start()
        rough = max(groups.units) > 1
    together, correct = options.symmetric, None if options.symmetric else groups.correct
    if together:
        log_u = log_v = 0.5 * (log_u + log_v)
    log_u, log_v = map(namespace(problem.rows.weight).asarray, (log_u, log_v))
    sides = (problem.rows, log_u), (problem.cols, log_v)
    state = Iterated(log_u, log_v, *(expected(side, x, problem.reg) for side, x in sides))
    skip = Truncation(problem, state, options.tol, options.tol_gap, nats, rough, correct, groups.pairs, together)
    return problem, log_v, skip


def ended(found: Sorted, skip: Truncation | None) -> Sorted | None:
    """Return what a Result has to know of the pairs that its solve skipped, None where it skipped none in the end."""
    return found._replace(kept=skip.kept, hidden=skip.hidden) if skip and skip.kept else None
