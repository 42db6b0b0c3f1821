"""Starting plans of Gromov-Wasserstein; several are tried, since its objective is not convex."""

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
from .answer import GromovResult, best_of, in_order
from .distances import Space
from .settings import SPACES
from .steps import LOOSE, FirstPlan, Limits, descend
from .task import Plan, Task

STARTS = "independent", "axes", "rows", "noise", "coarse"
COARSE = Limits(40, 1e-2, 1e-3)  # of a coarse start
FIRST = Limits(5, 1e-2, 1e-2)  # of each plan that is compared with others
CONTENDERS = 4  # plans of the smallest problem of a coarse start that the next larger problem compares
SIGNS = 8  # most combinations of directions of the axes that are tried
LEVELS = 64  # number of quantiles of a row of distances
NOISE = 0.3  # standard deviation of the logarithm of a noisy plan's entries
BLOCK = 1 << 22  # distances that one block of rows has


def best_answer(task: Task, init: Any, limits: Limits, options: dict[str, Any]) -> GromovResult:
    """Take steps from each start, and return the best answer."""
    return best_of([descend(task, start, limits, options) for start in starts(task, init, options)])


def few_best(task: Task, plans: list[FirstPlan], most: int, options: dict[str, Any]) -> list[GromovResult]:
    """Take a few steps from each plan, and return at most ``most`` answers, those with the least objectives."""
    return in_order([descend(task, plan, FIRST, options) for plan in plans])[:most]


def starts(task: Task, init: Any, options: dict[str, Any], most: int = 1) -> list[FirstPlan]:
    """Return the plans to start from; ``most``: number of directions of the axes among them."""
    if isinstance(init, str) and validate.as_choice(init, "init", ("auto", *STARTS)) == "auto":
        init = usual(task)
    found: list[FirstPlan] = []
    for one in init if isinstance(init, list) else [init]:
        if isinstance(one, FirstPlan):
            found.append(one)
        elif not isinstance(one, str):
            found.append(FirstPlan(task.given(one)))
        elif validate.as_choice(one, "init", STARTS) == "coarse":
            found += between_some(task, options, 1)
        elif one == "independent":
            found.append(FirstPlan(task.independent(), is_symmetric=True))
        elif one == "axes":
            found += [FirstPlan(best._plan) for best in few_best(task, by_axes(task, options), most, options)]
        else:
            make = {"rows": by_rows, "noise": by_noise}[one]
            found += [FirstPlan(plan) for plan in make(task, options)]
    if not found:
        if init == []:
            raise ValueError("init must name a start, got []")
        task.check_mass(0.0)
    return found


def usual(task: Task) -> list[str]:
    """Return the names of the starts that init="auto" tries."""
    if task.X.phi is not None and task.Y.phi is not None:
        if is_large(task):
            return ["coarse"]
        if task.X.has_points and task.Y.has_points:
            return ["independent", "axes"]
        return ["independent", "axes", "rows"]
    if is_large(task):
        return ["independent", "rows"]
    return ["independent", "rows", "noise"]


def is_large(task: Task) -> bool:
    return bool(max(task.X.count, task.Y.count) > 2 * SPACES.start_points)


def between_some(task: Task, options: dict[str, Any], most: int) -> list[FirstPlan]:
    """Solve between some of the points; return at most ``most`` good plans, lifted to all points, and their answers.

    The problem between these points starts in the same way, between fewer points, until they are few. Values between
    few points do not tell some directions of the axes apart: the second smallest problem compares the best ones.
    """
    task.X.find_axes(task.a)
    task.Y.find_axes(task.b)
    rows, a = drawn(task.a)
    cols, b = drawn(task.b)
    part = task.restrict((rows, a), (cols, b))
    if is_large(part):
        first = between_some(part, options, CONTENDERS)
        if len(first) > 1:
            first = [FirstPlan(best._plan, best.coarse) for best in few_best(part, first, 1, options)]
        found = [best_of([descend(part, start, COARSE, options) for start in first])]
    elif most == 1:
        found = [best_answer(part, "auto", COARSE, options)]
    else:
        found = few_best(part, starts(part, "auto", options, most), most, options)
    return [FirstPlan(task.lifted(best._plan, rows, cols), best) for best in found]


def drawn(mass: F64) -> tuple[Any, F64]:
    """Draw some points by their masses, with a fixed seed; return their indices and masses."""
    order = np.random.default_rng(0).permutation(len(mass))
    ends = np.cumsum(mass[order])
    total = float(mass.sum())
    most = max(SPACES.start_points, len(mass) // SPACES.fewer)
    if len(mass) <= most:
        return np.flatnonzero(mass), mass[mass > 0]
    at = np.searchsorted(ends, (np.arange(most) + 0.5) / most * ends[-1])
    chosen, count = np.unique(order[at], return_counts=True)
    return chosen, np.asarray(count * (total / most), np.float64)


def by_axes(task: Task, options: dict[str, Any]) -> list[FirstPlan]:
    """Match both clouds along their principal axes, in several directions.

    Compare their objectives after a few steps only, since outliers turn the axes.
    """
    if task.X.phi is None or task.Y.phi is None:
        raise ValueError("init must not be 'axes' where distances are a matrix: there are no axes")
    clouds = []
    for space, w in ((task.X, task.a), (task.Y, task.b)):
        space.find_axes(w)
        x = space.phi[:, 2:]
        clouds.append((x - w @ x / w.sum()) @ space.axes.T)
    k = min(z.shape[1] for z in clouds)
    x, y = (z[:, :k] for z in clouds)
    scale = float(task.a @ (x**2).sum(1) / task.a.sum())
    found = []
    for flips in range(min(SIGNS, 2**k)):
        signs = np.where((flips >> np.arange(k)) & 1, -1.0, 1.0)
        result = between(task, x * signs, y, scale, options)
        if result.mass > 0:
            found.append(FirstPlan(task.fitted(task.answer(result))))
    return found


def between(task: Task, x: F64, y: F64, scale: float, options: dict[str, Any]) -> Result:
    """Solve loosely between features x, y of both spaces' points; ``scale``: a typical squared distance of them."""
    reg, reg_m = loose_penalties(task, scale)
    with muted():
        return solve(PointCloud(x, y), task.a, task.b, reg=reg, reg_m=reg_m, tol=LOOSE, **options)


def loose_penalties(task: Task, scale: float) -> tuple[float, tuple[float, ...]]:
    """Return reg and reg_m for squared distances of this typical size between features."""
    scale = scale or 1.0  # 0 if all mass lies in one point
    return 0.05 * scale, tuple(np.inf if p == math.inf else scale for p in task.rho)


def by_rows(task: Task, options: dict[str, Any]) -> list[Plan]:
    """Return a plan between points with similar distances to all other points, with noise that breaks ties.

    The cost of (i, j) is the transport on a line between the distances from i and the distances from j: the third lower
    bound of Memoli, Gromov-Wasserstein distances and the metric approach to object matching, 2011.
    """
    x = sorted_rows(task.X, task.a)
    y = sorted_rows(task.Y, task.b)
    result = between(task, x, y, scale_of_rows(task, x, y), options)
    return with_noise(task, np.asarray(result.plan, np.float64) if result.mass > 0 else np.zeros(0))


def scale_of_rows(task: Task, x: F64, y: F64) -> float:
    """Return the mean squared distance between the sorted rows of both spaces, by the masses of the points."""
    sides = (task.a, x), (task.b, y)
    means = [w @ z / w.sum() for w, z in sides]
    squares = [float(w @ (z**2).sum(1) / w.sum()) for w, z in sides]
    return max(0.0, sum(squares) - 2 * float(means[0] @ means[1]))


def with_noise(task: Task, plan: F64) -> list[Plan]:
    """Return a plan times noise, or nothing if it has no mass."""
    if plan.any():
        return [task.given(noisy(plan))]
    return []


def sorted_rows(space: Space, w: F64) -> F64:
    """Return the quantiles of the distances from each point to all points, weighted by their masses w."""
    levels = (np.arange(LEVELS) + 0.5) / LEVELS * w.sum()
    found = np.empty((space.count, LEVELS))
    step = max(1, BLOCK // space.count)
    for i in range(0, space.count, step):
        for k, row in enumerate(space.rows(i, i + step)):
            order = np.argsort(row)
            at = np.searchsorted(np.cumsum(w[order]), levels)
            found[i + k] = row[order[np.minimum(at, len(w) - 1)]]
    return found / math.sqrt(LEVELS)


def by_noise(task: Task, options: dict[str, Any]) -> list[Plan]:
    return [task.given(noisy(np.outer(task.a, task.b)))]


def noisy(plan: F64) -> F64:
    """Return the plan times lognormal numbers from a fixed seed."""
    return np.asarray(plan * np.exp(NOISE * np.random.default_rng(0).normal(size=plan.shape)))
