"""Solves between points that skip pairs: sort the points, and make the start of such a solve.

Points are sorted into boxes. The first mask of pairs comes from the potentials of a rough solve. The rough solve reads
all pairs where there are few, else all pairs of groups of points, which also correct the passes (groups.py).
backends/boxes.py has the mask, its bounds and its cost.
"""

from typing import Any

from ..arrays import namespace
from ..backends import boxes
from ..backends.boxes import PassState, SortedPoints, Truncation, expected, order
from ..contract import Backend, Options
from ..penalties import F64
from ..problem.points import softened
from ..problem.problem import Problem
from .groups import Groups, units_of


def in_boxes(problem: Problem, turned: bool, least: int, threads: int | None = None) -> tuple[Problem, SortedPoints]:
    """Return the problem with its points sorted into boxes of at least ``least`` points, and their order."""
    cloud = problem.cost.cloud
    xp = namespace(problem.rows.weight)
    unit = boxes.unit_of(whole_shape(problem), least)
    rows, columns = softened(cloud, cloud.rows, cloud.columns)
    if cloud.bits:
        targets = columns[:, : cloud.shape[1]].T
    else:
        targets = cloud.targets
    at = (xp.asarray(order(points, unit, threads)) for points in (rows, targets))
    found = SortedPoints((next(at), next(at)), unit, turned)
    return found.problem(problem), found


def whole_shape(problem: Problem) -> tuple[int, int]:
    """Return the number of rows on all ranks together, and the number of columns."""
    return problem.rows.n_points, problem.cols.n_points


def begin_skipping(
    problem: Problem, found: SortedPoints, options: Options, start: tuple[F64, F64] | None, nats: float, solve: Any,
    backend: Backend,
) -> tuple[F64, Truncation]:  # fmt: skip
    """Return the first log v of a solve that skips pairs, and the state of the skipped pairs.

    ``problem``: with its points in the order ``found``; ``solve``: as in `Groups`.
    """
    groups = Groups(problem, units_of(whole_shape(problem)), options, solve, backend)
    xp = namespace(problem.rows.weight)
    if start is not None:
        log_u, log_v = (xp.asarray(x)[at] for x, at in zip(start, found.order, strict=True))
        is_rough = False
    else:
        log_u, log_v = map(xp.asarray, groups.start())
        is_rough = max(groups.units) > 1
    if options.symmetric:
        log_u = log_v = 0.5 * (log_u + log_v)
        correct = None
    else:
        correct = groups.correct
    sides = (problem.rows, log_u), (problem.cols, log_v)
    state = PassState(log_u, log_v, *(expected(side, x, problem.reg) for side, x in sides))
    skip = Truncation(
        problem, state, options.tol, options.tol_gap, nats, is_rough, correct, groups.pairs, options.symmetric
    )
    return log_v, skip


def end_skipping(found: SortedPoints, skip: Truncation | None) -> SortedPoints | None:
    """Return the skipped pairs for the Result, with their order of points; None if the last stage skipped no pair."""
    if skip and skip.kept:
        return found._replace(kept=skip.kept, hidden=skip.hidden)
    return None
