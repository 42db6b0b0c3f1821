"""Plans to start Gromov-Wasserstein from, since its objective is not convex."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..answer.result import Result
from ..api.solve import solve
from ..errors import muted
from ..penalties import F64
from ..problem import validate
from ..problem.clouds import PointCloud
from .distances import Space
from .steps import LOOSE, GromovResult, best_of, descend
from .task import Plan, Task

STARTS = "independent", "axes", "rows", "noise", "coarse"
SOME = 500  # points of each space that a coarse start is found between
COARSE = 40, 1e-2, 1e-3  # steps there at most, tol, inner_tol
FIRST = 5, 1e-2, 1e-2  # steps from each direction of the axes, tol, inner_tol
SIGNS = 8  # directions of the axes that are tried
LEVELS = 64  # quantiles of a row of distances
NOISE = 0.3  # standard deviation of the logarithm of a noisy plan's entries
BLOCK = 1 << 22  # distances that are sorted at once


def starts(task: Task, init: Any, options: dict[str, Any]) -> list[tuple[Plan, GromovResult | None]]:
    """Return the plans to start from, with the answer between some of the points where a plan is lifted from there."""
    if isinstance(init, str) and validate.as_choice(init, "init", ("auto", *STARTS)) == "auto":
        init = usual(task)
    found: list[tuple[Plan, GromovResult | None]] = []
    for one in init if isinstance(init, list) else [init]:
        if not isinstance(one, str):
            found.append((task.given(one), None))
        elif validate.as_choice(one, "init", STARTS) == "coarse":
            found.append(between_some(task, options))
        else:
            makers = {"axes": by_axes, "rows": by_rows, "noise": by_noise}
            plans = makers[one](task, options) if one in makers else [task.independent()]
            found += [(plan, None) for plan in plans]
    if not found:
        if init == []:
            raise ValueError("init must name a start, got []")
        task.check_mass(0.0)
    return found


def usual(task: Task) -> list[str]:
    """Return the starts that are tried where none is given."""
    many = max(task.X.count, task.Y.count) > 2 * SOME
    if task.X.phi is not None and task.Y.phi is not None:
        return ["coarse"] if many else ["independent", "axes"]
    return ["independent", "rows"] if many else ["independent", "rows", "noise"]


def between_some(task: Task, options: dict[str, Any]) -> tuple[Plan, GromovResult]:
    """Return the best plan between some of the points, lifted, and its answer."""
    (rows, a), (cols, b) = drawn(task.a), drawn(task.b)
    part = task.part((rows, a), (cols, b))
    best = best_of([descend(part, plan, *COARSE, options) for plan, _ in starts(part, "auto", options)])
    return task.lifted(best._plan, rows, cols), best


def drawn(mass: F64) -> tuple[Any, F64]:
    """Draw SOME points by their masses, the same in every call, and return their numbers and masses."""
    order = np.random.default_rng(0).permutation(len(mass))
    ends, total = np.cumsum(mass[order]), float(mass.sum())
    if len(mass) <= SOME:
        return np.flatnonzero(mass), mass[mass > 0]
    at = np.searchsorted(ends, (np.arange(SOME) + 0.5) / SOME * ends[-1])
    chosen, count = np.unique(order[at], return_counts=True)
    return chosen, np.asarray(count * (total / SOME), np.float64)


def by_axes(task: Task, options: dict[str, Any]) -> list[Plan]:
    """Return the best plan after a few steps from points on the principal axes of both clouds, in several directions.

    Before these steps the objectives tell little: outliers turn the axes.
    """
    if task.X.phi is None or task.Y.phi is None:
        raise ValueError("init must not be 'axes' where a metric is 'precomputed': there are no axes")
    clouds = []
    for space, w in ((task.X, task.a), (task.Y, task.b)):
        x = space.phi[:, 2:]
        x = x - w @ x / w.sum()
        axes = np.linalg.svd(x * np.sqrt(w)[:, None], full_matrices=False)[2]
        z = x @ axes.T
        third = np.sign(w @ z**3)
        clouds.append(z * np.where(third == 0, 1.0, third))
    k = min(z.shape[1] for z in clouds)
    x, y = (z[:, :k] for z in clouds)
    scale = float(task.a @ (x**2).sum(1) / task.a.sum())
    found = []
    for flips in range(min(SIGNS, 2**k)):
        signs = np.where((flips >> np.arange(k)) & 1, -1.0, 1.0)
        result = between(task, x * signs, y, scale, options)
        if result.mass > 0:
            found.append(descend(task, task.fitted(task.answer(result)), *FIRST, options))
    return [best_of(found)._plan] if found else []


def between(task: Task, x: F64, y: F64, scale: float, options: dict[str, Any]) -> Result:
    """Return a loose answer between points that stand for those of both spaces, with squared distances of this size."""
    scale = scale or 1.0  # all mass lies in one point
    rho = tuple(np.inf if p == math.inf else scale for p in task.rho)
    with muted():
        return solve(PointCloud(x, y), task.a, task.b, reg=0.05 * scale, reg_m=rho, tol=LOOSE, **options)


def by_rows(task: Task, options: dict[str, Any]) -> list[Plan]:
    """Return a plan between points whose distances to all others are alike, with noise that parts equal ones.

    Its cost is the third lower bound of Memoli, Gromov-Wasserstein distances and the metric approach to object
    matching, 2011: the transport between the distances of i and those of j, on a line.
    """
    x, y = sorted_rows(task.X, task.a), sorted_rows(task.Y, task.b)
    means = [w @ z / w.sum() for w, z in ((task.a, x), (task.b, y))]
    scale = sum(float(w @ (z**2).sum(1)) / w.sum() for w, z in ((task.a, x), (task.b, y))) - 2 * means[0] @ means[1]
    result = between(task, x, y, max(0.0, float(scale)), options)
    plan = np.asarray(result.plan, np.float64) if result.mass > 0 else np.zeros(0)
    return [task.given(noisy(plan))] if plan.any() else []


def sorted_rows(space: Space, w: F64) -> F64:
    """Return quantiles of the distances of each point to all others, by their masses w."""
    levels = (np.arange(LEVELS) + 0.5) / LEVELS * w.sum()
    found, step = np.empty((space.count, LEVELS)), max(1, BLOCK // space.count)
    for i in range(0, space.count, step):
        for k, row in enumerate(space.rows(i, i + step)):
            order = np.argsort(row)
            at = np.searchsorted(np.cumsum(w[order]), levels)
            found[i + k] = row[order[np.minimum(at, len(w) - 1)]]
    return found / math.sqrt(LEVELS)


def by_noise(task: Task, options: dict[str, Any]) -> list[Plan]:
    return [task.given(noisy(np.outer(task.a, task.b)))]


def noisy(plan: F64) -> F64:
    """Return the plan times lognormal numbers, the same in every call."""
    return np.asarray(plan * np.exp(NOISE * np.random.default_rng(0).normal(size=plan.shape)))
