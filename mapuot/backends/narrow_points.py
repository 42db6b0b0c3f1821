"""Points as float32 passes need them to make their rows, for src_c/narrow_points.h and src_cuda/points.cuh.

    K_ij = 2^(row_i + col_j - c_ij)

Rounding row and col would cost digits that no pass gets back: potentials of 1000 reg leave 6e-5 in an entry. But which
scalings K absorbs is free within its range: they are moved by up to GRID / 2, to where row and col are whole multiples
of GRID and their sum is exact. Coordinates are centred on the mean of y, the same on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..enums import members
from ..penalties import F64
from ..problem.points import PointCosts
from ..problem.problem import Problem
from .boxes import Truncation
from .contract import namespace

GRID = 2.0**-8
MOST_COST = 1e4  # largest cost / reg: row and col are then below 2^15, and their sums exact
MOST_ERROR = 0.05  # of an entry, beyond which they tell nothing
DIFFERENCES = 4  # dimensions up to which squares are summed of differences: more exact, twice the work
CORRECTED = 1e-4  # floor of float32 passes that are corrected: a float64 one falls to that of their rounding at once
LEFT_OUT = -(2.0**15)  # of a point without mass: 0 beside any other
FORMS = members("mapuot_narrow_form")
LOG2_E = 1 / math.log(2)


class NarrowPoints:
    """The arrays of one solve, and the scalings that suit them.

    x (m, d) and y (d, n padded) hold coordinates, row (m,) and col (n padded,) what belongs to a point alone.
    """

    def __init__(self, cloud: PointCosts, reg: float, exact: tuple[F64, F64] | None = None) -> None:
        """``exact``: what `centred` tells, where that is known."""
        form = cloud.core[0].form
        products = form == "squares" and cloud.dim > DIFFERENCES
        self.form = FORMS["products" if products else form or "squares"]
        x, y = centred(cloud, reg) if exact is None else exact
        x, self.y = x.astype(np.float32), y.astype(np.float32)
        self.square_x: Any
        self.square_y: Any
        self.square_x, self.square_y = squares(x, self.y[:, : cloud.shape[1]]) if products else (0.0, 0.0)
        self.x, xp = x + x if products else x, namespace(x)
        self.row, self.col = xp.empty(len(x), np.float32), xp.empty(self.y.shape[1], np.float32)

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64] | None:
        """The scalings nearest to these that float32 holds, which row and col then hold; None: they are too large."""
        row, col = (
            np.rint((x * LOG2_E - square) / GRID) * GRID
            for x, square in ((alpha, self.square_x), (beta, self.square_y))
        )
        used = row[np.isfinite(row)]
        common = float(np.round(np.median(used) / GRID) * GRID) if used.size else 0.0
        self.col[len(beta) :] = LEFT_OUT
        for power, out, moved in ((row, self.row, -common), (col, self.col[: len(beta)], common)):
            out[:] = np.maximum(power + moved, LEFT_OUT)
            if (np.isfinite(power) & (np.abs(power + moved) >= -LEFT_OUT)).any():
                return None
        return (row + self.square_x) / LOG2_E, (col + self.square_y) / LOG2_E


def centred(cloud: PointCosts, reg: float, xp: Any = np) -> tuple[F64, F64]:
    """Coordinates (m, d) and (d, n padded) from the mean of y on, scaled so that costs are powers of 2.

    ``xp``: NumPy or CuPy, whose arrays they are.
    """
    metric, scale = cloud.core
    factor = metric.scaled(scale * LOG2_E / reg)
    rows, columns = cloud.coordinates(xp)
    first = columns[:, :1]  # taken off before the mean is: that of coordinates of 1e8 is rounded to 1e-8
    x, y = rows - first[:, 0], columns - first
    centre = y[:, : cloud.shape[1]].mean(1)
    x -= centre  # in place: they may be large
    y -= centre[:, None]
    x *= factor
    y *= factor
    return x, y


def squares(x: Any, y: Any) -> tuple[F64, F64]:
    """|x|^2 and |y|^2 of points (m, d) and (d, n), in float64."""
    return np.square(x, dtype=np.float64).sum(1), np.square(y, dtype=np.float64).sum(0)


def product_error(problem: Problem) -> float:
    """Bound on the relative error of entries whose squares float64 passes expand, beside that of log u and log v.

    With c the largest cost / reg and u = 2^-53: |x| is at most sqrt(c), |y| 2 sqrt(c), as the centre is y's mean.
    Coordinates err by 3 u and 6 u of sqrt(c), which is 18 u of c; the factor and its root by 2; d products of 4 c by
    4 d; the squares, of c and 4 c, by 5 d. These are taken off log u and log v, and the three are added up: 5 u of c
    three times.
    """
    assert isinstance(problem.cost, PointCosts)
    return float(2.0**-53 * (9 * problem.cost.dim + 40) * problem.M_max / problem.reg)


def suits(problem: Problem, skip: Truncation | None = None) -> bool:
    """Tell whether float32 passes can make this problem's rows."""
    known = isinstance(problem.cost, PointCosts) and problem.cost.core[0].form is not None and problem.c is None
    small = problem.M_max <= MOST_COST * problem.reg and entry_error(problem, skip) <= MOST_ERROR
    return known and small


def entry_error(problem: Problem, skip: Truncation | None = None) -> float:
    """Bound on the relative error of their entries, which only counts until passes are float64 ones.

    By the roundings of d sums, of at most twice the largest cost c each where they are of products, and of coordinates,
    which lie within 3 sqrt(c) of the centre; by that of 2^t. Of kept pairs, whose squares are of differences, only the
    roundings of coordinates count with their size.
    """
    cloud = problem.cost
    if not isinstance(cloud, PointCosts):
        return math.inf
    d = cloud.dim
    if skip and skip.boxes and skip.kept and cloud.core[0].degree == 2 and d <= DIFFERENCES:
        near, far = skip.boxes.reaches(skip.kept)
        return float(2.0**-24 * ((d + 4) * near**2 + 2 * near * far + 100))
    return 2.0**-24 * ((4 * d + 10) * problem.M_max / problem.reg + 8)


def limits(problem: Problem, floor: float, tol: float, skip: Truncation | None = None) -> dict[str, float]:
    """Return the limits of float32 passes, which give way to float64 ones at a floor, or where tol is reached."""
    error = entry_error(problem, skip)
    floor = CORRECTED if skip and skip.correct else floor
    return {"storage_error": error, "narrow_floor": max(floor, tol) + 3 * error, "finer": 0}
