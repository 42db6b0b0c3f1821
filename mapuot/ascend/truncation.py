"""Solves between points that skip pairs: the order of the points, and where such a solve begins.

The mask, its bounds and what it costs: backends/boxes.py. Points are sorted into boxes; the first mask is made of the
potentials of a rough solve, of all pairs where these are few, else between groups of points, which also correct the
passes: groups.py.
"""

from types import ModuleType
from typing import Any

from ..backends import boxes
from ..backends.boxes import Iterated, Sorted, Truncation, expected, order
from ..backends.contract import Options, namespace
from ..penalties import F64
from ..problem.points import softened
from ..problem.problem import Problem
from .groups import Groups, units_of


def in_boxes(problem: Problem, turned: bool, least: int, threads: int | None = None) -> tuple[Problem, Sorted]:
    """Return the problem with its points sorted into boxes of at least ``least`` points, and their order."""
    cloud, xp = problem.cost.cloud, namespace(problem.rows.weight)
    unit = boxes.unit_of(whole_shape(problem), least)
    rows, columns = softened(cloud, cloud.rows, cloud.columns)
    targets = columns[:, : cloud.shape[1]].T if cloud.bits else cloud.targets
    at = (xp.asarray(order(points, unit, threads)) for points in (rows, targets))
    found = Sorted((next(at), next(at)), unit, turned)
    return found.problem(problem), found


def whole_shape(problem: Problem) -> tuple[int, int]:
    """Return the number of rows of all ranks, and of columns."""
    return int(problem.rows.ranks.sum(problem.shape[0])), problem.shape[1]


def begun(
    problem: Problem, found: Sorted, options: Options, start: tuple[F64, F64] | None, nats: float, solve: Any,
    backend: ModuleType,
) -> tuple[F64, Truncation]:  # fmt: skip
    """Return the log v that a solve which skips pairs starts from, and the state of these pairs.

    ``problem``: sorted as ``found`` tells; ``solve``: that of `Groups`.
    """
    groups = Groups(problem, units_of(whole_shape(problem)), options, solve, backend)
    xp, rough = namespace(problem.rows.weight), start is None
    if start is not None:
        log_u, log_v = (xp.asarray(x)[at] for x, at in zip(start, found.order, strict=True))
    else:
        log_u, log_v = map(xp.asarray, groups.start())
        rough = max(groups.units) > 1
    together, correct = options.symmetric, None if options.symmetric else groups.correct
    if together:
        log_u = log_v = 0.5 * (log_u + log_v)
    sides = (problem.rows, log_u), (problem.cols, log_v)
    state = Iterated(log_u, log_v, *(expected(side, x, problem.reg) for side, x in sides))
    skip = Truncation(problem, state, options.tol, options.tol_gap, nats, rough, correct, groups.pairs, together)
    return log_v, skip


def ended(found: Sorted, skip: Truncation | None) -> Sorted | None:
    """Return what a Result has to know of the pairs that its solve skipped, None where it skipped none in the end."""
    return found._replace(kept=skip.kept, hidden=skip.hidden) if skip and skip.kept else None
