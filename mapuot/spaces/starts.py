"""Plans to start Gromov-Wasserstein from, since its objective is not convex."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..api.solve import solve
from ..errors import muted
from ..penalties import F64
from ..problem import validate
from ..problem.clouds import PointCloud
from .steps import LOOSE, GromovResult, best_of, descend
from .task import Plan, Task

STARTS = "independent", "axes", "coarse"
SOME = 500  # points of each space that a coarse start is found between
COARSE = 40, 1e-2, 1e-3  # steps there at most, tol, inner_tol
FIRST = 5, 1e-2, 1e-2  # steps from each direction of the axes, tol, inner_tol
SIGNS = 8  # directions of the axes that are tried


def starts(task: Task, init: Any, options: dict[str, Any]) -> list[tuple[Plan, GromovResult | None]]:
    """Return the plans to start from, with the answer between some of the points where a plan is lifted from there."""
    points, many = task.X.phi is not None and task.Y.phi is not None, max(task.X.count, task.Y.count) > 2 * SOME
    if isinstance(init, str) and validate.as_choice(init, "init", ("auto", *STARTS)) == "auto":
        init = ["independent"] if not points else ["coarse"] if many else ["independent", "axes"]
    found: list[tuple[Plan, GromovResult | None]] = []
    for one in init if isinstance(init, list) else [init]:
        if not isinstance(one, str):
            found.append((task.given(one), None))
        elif validate.as_choice(one, "init", STARTS) == "independent":
            found.append((task.independent(), None))
        elif one == "coarse":
            (rows, a), (cols, b) = drawn(task.a), drawn(task.b)  # the best plan between some of the points, lifted
            part = task.part((rows, a), (cols, b))
            best = best_of([descend(part, plan, *COARSE, options) for plan, _ in starts(part, "auto", options)])
            found.append((task.lifted(best._plan, rows, cols), best))
        elif points:
            found += [(plan, None) for plan in by_axes(task, options)]
        else:
            raise ValueError("init must not be 'axes' where a metric is 'precomputed': there are no axes")
    if not found:
        if init == []:
            raise ValueError("init must name a start, got []")
        task.check_mass(0.0)
    return found


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
    scale = float(task.a @ (x**2).sum(1) / task.a.sum()) or 1.0  # all mass lies in one point
    rho = tuple(np.inf if p == math.inf else scale for p in task.rho)
    found = []
    for flips in range(min(SIGNS, 2**k)):
        signs = np.where((flips >> np.arange(k)) & 1, -1.0, 1.0)
        with muted():
            result = solve(PointCloud(x * signs, y), task.a, task.b, reg=0.05 * scale, reg_m=rho, tol=LOOSE, **options)
        if result.mass > 0:
            found.append(descend(task, task.fitted(task.answer(result)), *FIRST, options))
    return [best_of(found)._plan] if found else []
