"""METRICS: the properties of each metric between points.

src_c/points.h, and for CUDA src_c/common/metric.h, have the formulas of a pass. The fields here determine bounds and
derivatives of costs. The C twins of `wfr` and `REACH` are there and in src_c/common/reach.h.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..enums import members

REACH = math.pi / 2 - 2.0**-13  # of "wfr": nearer to pi / 2 a cost has errors above 1e-12
NUMBERS = members("mapuot_metric")


@dataclass(frozen=True)
class Metric:
    """One metric; the cost is distance ** degree if degree is not 0."""

    number: int  # mapuot_metric
    norm: float  # norm of the distance: 1, 2 or inf
    degree: int  # 0: no power of the distance; ``of_distance`` is the cost
    form: str | None  # mapuot_narrow_form, the terms of float32 passes; None: all passes are float64
    cdist: str  # SciPy's name of the cost, or of the distance if degree is 0
    skips: bool = True  # the least cost between two boxes is known (boxes_tmpl.c), so that pairs may be skipped
    unit: bool = False  # points are put on the unit sphere, and the cost is half their squared distance
    reach: float = math.inf  # pairs this far apart and farther are forbidden
    of_distance: Callable[[Any], Any] | None = None
    inner: bool = False  # negative inner product, not a distance; with addends

    def between(self, x: Any, y: Any) -> Any:
        """Return the costs between pairs of points (..., d)."""
        if self.inner:
            return -(x * y).sum(-1)
        with np.errstate(over="ignore"):  # inf between labels that forbid a pair
            t = x - y
            if self.norm != 2:
                if self.norm == 1:
                    return np.abs(t).sum(-1)
                return np.abs(t).max(-1)
            squares = (t * t).sum(-1)
        if self.degree == 2:
            return squares
        return self.after(np.sqrt(squares))

    def matrix(self, x: Any, y: Any) -> Any:
        """Return the costs between all points of two clouds, (m, d) and (n, d), by SciPy."""
        from scipy.spatial.distance import cdist  # noqa: PLC0415 - takes 90 ms, and few form the matrix

        if self.inner:
            return -(x @ y.T)
        return self.after(cdist(x, y, self.cdist))

    def after(self, found: Any) -> Any:
        """Return the costs, given distances, or given squares if the cost is the square."""
        if self.of_distance is None:
            return found
        return self.of_distance(found)

    def steep(self, distance: Any) -> Any:
        """Return the derivative of the cost by the distance, for metrics with degree 0 or 1."""
        if self.degree:
            return 1.0
        return 2 * np.tan(distance)

    def scaled(self, factor: Any) -> Any:
        """Return the factor of coordinates that multiplies the costs by ``factor``."""
        if self.degree == 2 or self.inner:
            return np.sqrt(factor)
        return factor

    def label(self, across: float) -> float:
        """Return the size of a label coordinate for which different labels add ``across`` to the metric."""
        if self.degree != self.norm or self.unit:
            raise NotImplementedError(
                "labels take a finite across with metric 'sqeuclidean' or 'cityblock', and inf with any but 'inner'"
            )
        return float(self.scaled(0.5 * across))

    def weighted(self, weights: Any) -> Any:
        """Return factors of the coordinates equivalent to ``weights`` of SciPy's ``cdist``."""
        if self.norm == 2:
            return np.sqrt(weights)
        return weights


def wfr(distance: Any) -> Any:
    """Return -2 log cos of a distance, inf from REACH on."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance < REACH, -2 * np.log(np.cos(distance)), np.inf)


SQUARES = NUMBERS["sqeuclidean"]
METRICS = {
    "sqeuclidean": Metric(SQUARES, 2, 2, "squares", "sqeuclidean"),
    "euclidean": Metric(NUMBERS["euclidean"], 2, 1, "roots", "euclidean"),
    "cityblock": Metric(NUMBERS["cityblock"], 1, 1, "sizes", "cityblock"),
    "cosine": Metric(SQUARES, 2, 2, "squares", "sqeuclidean", unit=True),
    "wfr": Metric(NUMBERS["wfr"], 2, 0, None, "euclidean", skips=False, reach=REACH, of_distance=wfr),
    "inner": Metric(NUMBERS["inner"], 2, 0, "products", "", skips=False, inner=True),
}
