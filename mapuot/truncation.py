"""Solves between points that skip pairs: whether, where from, and in which order of the points.

The mask, its bounds and what it costs: backends/boxes.py. Points are sorted into boxes; the first mask is made of the
potentials of a rough solve, of all pairs where these are few, else between the means of groups of points.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .backends import boxes
from .backends.boxes import INNER, ROUGH, Sorted, State, Truncation, expected, order
from .backends.contract import Options
from .penalties import F64
from .points import PointCloud
from .problem import Problem
from .side import Side

FAR = 30.0  # range(M) / reg below which "auto" skips nothing: most pairs count
GROUPS = 8192  # points of a side between which all pairs are taken for the first mask


def nats_of(problem: Problem, saves: bool) -> float | None:
    """How far below its share a pair must be to be skipped, at least; None: none is."""
    cloud, ranks = problem.cost, problem.ranks
    if not isinstance(cloud, PointCloud):
        return None
    ranks.same(truncate=repr(cloud.truncate))
    if not cloud.truncates(ranks.sum(cloud.size)):
        return None
    found = {
        "metric 'wfr'": cloud.metric == "wfr",
        "a reference other than 'product'": problem.reference != "product",
        "a grid of ranks": problem.cols.ranks.size > 1,
        "checkpoint": saves,
    }
    reasons = [word for word, is_so in found.items() if is_so]
    if cloud.truncate != "auto":
        if reasons:
            raise NotImplementedError(f"truncate is not for {reasons[0]}: give truncate=None")
        return float(cloud.truncate)  # type: ignore[arg-type]
    return None if reasons or problem.spread < FAR else 0.0


def in_boxes(problem: Problem, turned: bool, least: int) -> Sorted:
    """The problem with its points in the order of boxes, of ``least`` points or more."""
    cloud = problem.cost
    assert isinstance(cloud, PointCloud)
    unit = boxes.unit_of(whole_shape(problem), least)
    at = order(cloud.rows, unit), order(cloud.columns[:, : cloud.shape[1]].T, unit)
    sides = [picked(side, k) for side, k in zip((problem.rows, problem.cols), at, strict=True)]
    moved = cloud.sorted(*at)
    moved.unit = unit
    return Sorted(dataclasses.replace(problem, cost=moved, rows=sides[0], cols=sides[1]), at, turned)


def whole_shape(problem: Problem) -> tuple[int, int]:
    """Rows of all ranks, and columns."""
    return int(problem.rows.ranks.sum(problem.shape[0])), problem.shape[1]


def picked(side: Side, at: Any) -> Side:
    upper = None if side.upper is None else side.upper[at]
    return dataclasses.replace(side, weight=side.weight[at], rho=side.rho[at], upper=upper)


def begun(found: Sorted, options: Options, start: tuple[F64, F64] | None, nats: float, solve: Any) -> F64:
    """Tell the cloud what to skip from here on; log v to start from. ``solve(problem, options)``: of all pairs."""
    problem = found.problem
    cloud = problem.cost
    assert isinstance(cloud, PointCloud)
    rough = start is None
    if start is not None:
        log_u, log_v = (x[at] for x, at in zip(start, found.order, strict=True))
    else:
        log_u, log_v = rough_start(problem, options, solve)
        rough = max(whole_shape(problem)) > GROUPS
    sides = (problem.rows, log_u), (problem.cols, log_v)
    state = State(log_u, log_v, *(expected(side, x, problem.reg) for side, x in sides))
    cloud.truncation = Truncation(problem, state, options.tol, options.tol_gap, nats, rough)
    found_v: F64 = log_v
    return found_v


def inner(options: Options) -> Options:
    """What the kept pairs must reach, so that there is room for the others."""
    tol_gap = options.tol_gap * INNER if options.tol_gap >= 0 else options.tol_gap
    return dataclasses.replace(options, tol=INNER * options.tol, tol_gap=tol_gap)


def rough_start(problem: Problem, options: Options, solve: Any) -> tuple[F64, F64]:
    """Potentials by a solve between groups of points, all pairs of them taken."""
    units = [-(-k // GROUPS) for k in whole_shape(problem)]
    rough = dataclasses.replace(options, tol=max(options.tol, ROUGH), tol_gap=-1.0)
    small = grouped(problem, units)
    result = solve(small, rough)
    logs = [np.where(np.isfinite(x), x, 0.0) for x in (result.log_u, result.log_v)]
    if units == [1, 1]:
        return logs[0], logs[1]
    cloud, means = problem.cost, small.cost
    assert isinstance(cloud, PointCloud)
    assert isinstance(means, PointCloud)
    points = (cloud.rows, means.rows), (cloud.columns[:, : cloud.shape[1]].T, means.columns[:, : means.shape[1]].T)
    images = (result.barycentric_map(points[1][1]), slope_back(result, points[0][1]))
    factor = 2 * cloud.core[1] / problem.reg if cloud.core[0] == "sqeuclidean" else 0.0
    out = []
    for (fine, mean), log, image, unit in zip(points, logs, images, units, strict=True):
        at = np.arange(len(fine)) // unit
        steep = factor * np.where(np.isfinite(image), mean - image, 0.0)
        out.append(log[at] + ((fine - mean[at]) * steep[at]).sum(1))
    return out[0], out[1]


def slope_back(result: Any, x: F64) -> F64:
    """The image of each column point: the mean of x over its column of the plan."""
    moved = result.apply_transpose(np.column_stack([x, np.ones(len(x))]))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(moved[:, :-1] / moved[:, -1:])


def grouped(problem: Problem, units: list[int]) -> Problem:
    """The problem between the means of ``units`` neighbours each, all pairs of which count."""
    cloud = problem.cost
    assert isinstance(cloud, PointCloud)
    sides, means = [], []
    for side, points, unit in ((problem.rows, cloud.x, units[0]), (problem.cols, cloud.y, units[1])):
        first = np.arange(0, len(points), unit)
        count = np.diff(np.append(first, len(points)))
        weight = np.add.reduceat(side.weight, first)
        least = np.where(weight > 0, 0.0, 1.0)[np.arange(len(points)) // unit]  # of groups without mass: plain means
        share = side.weight + least
        total = np.add.reduceat(share, first)
        means.append(np.add.reduceat(points * share[:, None], first) / total[:, None])
        rho = np.add.reduceat(side.rho, first) / count
        rho = rho / count if side.penalty == "l2" else rho
        upper = None if side.upper is None else np.add.reduceat(side.upper, first) / count
        sides.append(dataclasses.replace(side, weight=weight, rho=rho, upper=upper))
    some = means[0] if len(means[0]) else means[1][:1]  # of a rank without rows
    small = PointCloud(some, means[1], cloud.metric, cloud.scale, cloud.weights, truncate=None)[: len(means[0])]
    return dataclasses.replace(problem, cost=small, rows=sides[0], cols=sides[1])
