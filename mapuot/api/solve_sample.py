"""`solve_sample`: points in, a Result out; `solve` on their `PointCloud`, in the name that POT has for it."""

from __future__ import annotations

from typing import Any

from ..answer.result import Result
from ..problem.points import PointCloud
from .solve import solve


def solve_sample(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    reg: float,
    reg_m: Any,
    metric: str = "sqeuclidean",
    scale: float = 1.0,
    weights: Any = None,
    truncate: Any = "auto",
    form: Any = "auto",
    **options: Any,
) -> Result:
    """Solve entropic unbalanced optimal transport between two clouds of points.

    Points, ``metric``, ``scale``, ``weights``, ``truncate`` and ``form`` are those of a :class:`PointCloud`, whose cost
    is ``scale * metric(x_i, y_j)``; masses, ``reg`` and ``reg_m``, in units of the cost, and all options are those of
    :func:`solve`.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> result = mapuot.solve_sample(rng.random((300, 2)), rng.random((200, 2)), reg=0.05, reg_m=1.0)
    >>> result.converged
    True
    """
    return solve(PointCloud(x, y, metric, scale, weights, truncate, form), a, b, reg=reg, reg_m=reg_m, **options)
