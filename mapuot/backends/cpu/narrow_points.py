"""What float32 passes between points make their rows of, for src_c/narrow_points.h.

    K_ij = 2^(row_i + col_j - c_ij)

Rounding row and col would cost digits that no pass gets back: potentials of 1000 reg leave 6e-5 in an entry. But which
scalings K absorbs is free within its range: they are moved by up to GRID / 2, to where row and col are whole multiples
of GRID and their sum is exact. Coordinates are centred on the mean of y, the same on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..._core import lib
from ...penalties import F64
from ...points import PointCloud
from ...problem import Problem
from ..contract import PAD
from .native import empty, pointer

GRID = 2.0**-8
MOST_COST = 1e4  # largest cost / reg: row and col are then below 2^15, and their sums exact
MOST_ERROR = 0.05  # of an entry, beyond which they tell nothing
DIFFERENCES = 4  # dimensions up to which squares are summed of differences: more exact, twice the work
LEFT_OUT = -(2.0**15)  # of a point without mass: 0 beside any other
LOG2_E = 1 / math.log(2)


class NarrowPoints:
    """The arrays of one solve, and the scalings that suit them."""

    def __init__(self, cloud: PointCloud, reg: float, state: Any) -> None:
        metric, scale = cloud.core
        d, ld = cloud.columns.shape
        squared = metric == "sqeuclidean"
        self.products = squared and d > DIFFERENCES
        factor = scale * LOG2_E / reg
        factor = math.sqrt(factor) if squared else factor
        first = cloud.columns[:, :1]  # taken off before the mean is: that of coordinates of 1e8 is rounded to 1e-8
        centre = (cloud.columns[:, : cloud.shape[1]] - first).mean(1)
        x = (factor * (cloud.rows - first[:, 0] - centre)).astype(np.float32)
        y = (factor * (cloud.columns - first - centre[:, None])).astype(np.float32)
        self.square_x, self.square_y = (
            ((z.astype(np.float64) ** 2).sum(axis) if self.products else 0.0)
            for z, axis in ((x, 1), (y[:, : cloud.shape[1]], 0))
        )
        self.x = np.ascontiguousarray(x + x if self.products else x)
        self.y = empty(d * ld, np.float32)
        self.y.reshape(ld // PAD, d, PAD)[:] = y.reshape(d, ld // PAD, PAD).swapaxes(0, 1)
        self.row, self.col = empty(len(x), np.float32), empty(ld, np.float32)
        view = state.narrow_points
        view.d, view.form = d, form_of(metric, self.products)
        for name in ("x", "y", "row", "col"):
            setattr(view, name, pointer(getattr(self, name), "float *"))

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64] | None:
        """The scalings nearest to these that float32 holds, told to the core, too; None: they are too large."""
        row, col = (
            np.round((x * LOG2_E - square) / GRID) * GRID
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


def form_of(metric: str, products: bool) -> int:
    forms = {"euclidean": lib.MAPUOT_ROOTS, "cityblock": lib.MAPUOT_SIZES}
    return int(lib.MAPUOT_PRODUCTS if products else forms.get(metric, lib.MAPUOT_SQUARES))


def suits(problem: Problem) -> bool:
    """Whether float32 passes can make this problem's rows."""
    known = isinstance(problem.cost, PointCloud) and problem.cost.metric != "wfr" and problem.c is None
    small = problem.M_max <= MOST_COST * problem.reg and entry_error(problem) <= MOST_ERROR
    return known and problem.cols.ranks.size == 1 and small


def entry_error(problem: Problem) -> float:
    """Bound on the relative error of their entries, which only counts until passes are float64 ones.

    By the roundings of d sums, of at most twice the largest cost c each where they are of products, and of coordinates,
    which lie within 3 sqrt(c) of the centre; by that of 2^t.
    """
    d = problem.cost.columns.shape[0] if isinstance(problem.cost, PointCloud) else 0
    return 2.0**-24 * ((4 * d + 10) * problem.M_max / problem.reg + 8)
