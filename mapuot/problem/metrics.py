"""METRICS: the properties of each metric between points.

src_c/points.h, and for CUDA src_c/common/metric.h, have the formulas of a pass. The fields here determine bounds and
derivatives of costs. The C twins of `wfr` and `REACH` are there and in src_c/common/reach.h.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..enums import members

REACH = math.pi / 2 - 2.0**-13  # of "wfr": nearer to pi / 2 a cost has errors above 1e-12
NUMBERS = members("mapuot_metric")


class Steep(NamedTuple):
    """Bounds on a function of the distance, up to a given cost."""

    distance: float  # the largest distance
    slope: float  # the largest derivative of the cost by the distance
    sizes: float  # factor by which a relative error of the distance moves that derivative, at least the derivative


@dataclass(frozen=True)
class Metric:
    """One metric: a power of a norm (degree >= 1), a function of a norm (degree 0), or a product of points.

    Code that needs a property which a metric lacks raises NotImplementedError by the name of the metric.
    """

    number: int  # mapuot_metric
    norm: float  # p of the distance, the p-norm of x - y: from 1 to inf
    degree: int  # the cost is distance ** degree; 0: the cost is ``of_distance`` or a product
    form: str | None  # mapuot_narrow_form, the terms of float32 passes; None: all passes are float64
    cdist: str  # SciPy's name of the cost, or of the distance if degree is 0; "minkowski" takes p from ``norm``
    skips: bool = False  # pairs may be skipped: boxes_tmpl.c and boxes.cu have the least cost between two boxes
    unit: bool = False  # points are put on the unit sphere; the square of their distance is halved
    reach: float = math.inf  # pairs this far apart and farther are forbidden
    of_distance: Callable[[Any], Any] | None = None  # the cost, given the distance
    slope: Callable[[Any], Any] | None = None  # its derivative
    steepest: Callable[[float], Steep] | None = None  # bounds up to a cost: the certificate counts rounding by them
    product: float = 0.0  # not 0: the cost is this times the inner product of the points, and may have addends

    def __post_init__(self) -> None:
        if not self.degree and not self.product and (self.of_distance is None or self.steepest is None):
            raise TypeError("a metric of degree 0 is a product, or has of_distance and steepest")
        if self.form == "products" and self.product != -1:
            raise TypeError("the form 'products' is for product=-1")

    @property
    def square(self) -> bool:
        """Whether the cost is the squared Euclidean distance of the core's coordinates."""
        return self.norm == self.degree == 2

    def is_scipys(self, name: str) -> bool:
        """Whether SciPy's ``cdist`` makes the same costs by this name of the metric."""
        return (self.unit and self.square) or (self.cdist == name and self.norm in (1, 2, math.inf))

    def between(self, x: Any, y: Any) -> Any:
        """Return the costs between pairs of points (..., d)."""
        if self.product:
            return self.product * (x * y).sum(-1)
        with np.errstate(over="ignore"):  # inf between labels that forbid a pair
            t = x - y
            if self.square:
                return (t * t).sum(-1)
            if self.norm == 2:
                distance = np.sqrt((t * t).sum(-1))
            elif self.norm in (1, math.inf):
                if self.norm == 1:
                    distance = np.abs(t).sum(-1)
                else:
                    distance = np.abs(t).max(-1)
            else:
                distance = (np.abs(t) ** self.norm).sum(-1) ** (1 / self.norm)
            return self.after(distance)

    def matrix(self, x: Any, y: Any) -> Any:
        """Return the costs between all points of two clouds, (m, d) and (n, d), by SciPy."""
        if self.product:
            return self.product * (x @ y.T)
        from scipy.spatial.distance import cdist  # noqa: PLC0415 - takes 90 ms, and few form the matrix

        found = cdist(x, y, self.cdist, **({"p": self.norm} if self.cdist == "minkowski" else {}))
        if self.square:
            return found
        return self.after(found)

    def after(self, distance: Any) -> Any:
        """Return the costs, given distances."""
        if self.of_distance is not None:
            return self.of_distance(distance)
        if self.degree == 1:
            return distance
        return distance**self.degree

    def up_to(self, cost: float) -> Steep:
        """Bound distance and slope up to a cost, both without a scale."""
        if self.steepest is not None:
            return self.steepest(cost)
        far = cost ** (1 / self.degree)
        slope = self.degree * far ** (self.degree - 1)
        return Steep(far, slope, slope * max(1, self.degree - 1))

    def slopes(self, distance: Any, name: str) -> Any:
        """Return the derivative of the cost by the distance; ``name`` of the metric, for the error."""
        if self.degree:
            return self.degree * distance ** (self.degree - 1)
        if self.slope is None:
            raise NotImplementedError(f"slopes by the points are not known for metric {name!r}: it has no slope")
        return self.slope(distance)

    def scaled(self, factor: Any) -> Any:
        """Return the factor of coordinates that multiplies the costs by ``factor``."""
        root = self.degree or (2 if self.product else 1)
        if root == 2:
            return np.sqrt(factor)
        return factor ** (1 / root)

    def label(self, across: float) -> float:
        """Return the size of a label coordinate for which different labels add ``across`` to the metric."""
        if self.degree != self.norm or self.unit:
            raise NotImplementedError(
                "labels take a finite across with metric 'sqeuclidean' or 'cityblock', and inf with any but 'inner'"
            )
        return float(self.scaled(0.5 * across))

    @property
    def forbidding(self) -> float:
        """A coordinate of labels: between two points of opposite sign the distance is inf."""
        return float(10.0 ** min(308.0, 310 / self.norm))

    def weighted(self, weights: Any) -> Any:
        """Return factors of the coordinates equivalent to ``weights`` of SciPy's ``cdist``."""
        if self.norm == 2:
            return np.sqrt(weights)
        if self.norm < math.inf:
            return weights ** (1 / self.norm)
        return weights


def wfr(distance: Any) -> Any:
    """Return -2 log cos of a distance, inf from REACH on."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance < REACH, -2 * np.log(np.cos(distance)), np.inf)


def steepest_wfr(cost: float) -> Steep:
    """Bound the slope 2 tan of "wfr": exp(-cost / 2) is the cosine of the distance."""
    inverse = float(np.exp(0.5 * cost))
    return Steep(math.pi / 2, 2 * inverse, 2 * inverse**2)


SQUARES = NUMBERS["sqeuclidean"]
METRICS = {
    "sqeuclidean": Metric(SQUARES, 2, 2, "squares", "sqeuclidean", skips=True),
    "euclidean": Metric(NUMBERS["euclidean"], 2, 1, "roots", "euclidean", skips=True),
    "cityblock": Metric(NUMBERS["cityblock"], 1, 1, "sizes", "cityblock", skips=True),
    "cosine": Metric(SQUARES, 2, 2, "squares", "sqeuclidean", skips=True, unit=True),
    "wfr": Metric(
        NUMBERS["wfr"], 2, 0, None, "euclidean", reach=REACH, of_distance=wfr, slope=lambda x: 2 * np.tan(x),
        steepest=steepest_wfr,
    ),
    "inner": Metric(NUMBERS["inner"], 2, 0, "products", "", product=-1.0),
}  # fmt: skip
