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

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64]:
        """The scalings nearest to these that float32 holds, told to the core, too."""
        self.col[len(beta) :] = LEFT_OUT
        return self.on_grid(alpha, self.square_x, self.row), self.on_grid(beta, self.square_y, self.col[: len(beta)])

    @staticmethod
    def on_grid(log_scale: F64, square: Any, out: Any) -> F64:
        power = np.round((log_scale * LOG2_E - square) / GRID) * GRID
        out[:] = np.maximum(power, LEFT_OUT)
        return np.asarray((power + square) / LOG2_E)


def form_of(metric: str, products: bool) -> int:
    forms = {"euclidean": lib.MAPUOT_ROOTS, "cityblock": lib.MAPUOT_SIZES}
    return int(lib.MAPUOT_PRODUCTS if products else forms.get(metric, lib.MAPUOT_SQUARES))


def suits(problem: Problem) -> bool:
    """Whether float32 passes can make this problem's rows."""
    known = isinstance(problem.cost, PointCloud) and problem.cost.metric != "wfr" and problem.c is None
    return known and problem.cols.ranks.size == 1 and problem.M_max <= MOST_COST * problem.reg
