"""Points as float32 passes need them to make their rows, for src_c/narrow_points.h and src_cuda/points.cuh.

    K_ij = 2^(row_i + col_j - c_ij)

Rounding row and col would cost digits that no pass gets back: potentials of 1000 reg leave 6e-5 in an entry. But
which scalings K absorbs is free within its range: they are moved by up to GRID / 2, to where row and col are whole
multiples of GRID, whose sum is exact up to 2^15; a point so far away that its own is larger has fewer digits.
Coordinates are centred where most of y lies, the same on all ranks; of inner products y alone. How many digits are
left is a mean over masses: a point far from all others carries none or little.
"""

import math
import weakref
from typing import Any

import numpy as np

from ..enums import members
from ..penalties import F64
from ..problem.points import PointCosts, softened
from ..problem.problem import Problem
from ..problem.side import Side
from .boxes import Truncation
from .contract import any_of, host, median, namespace
from .tables import copied, laid, squares

GRID = 2.0**-8
MOST_POWER = 2.0**26  # of row and col: an exponent is then off by some units, all of them of one point
MOST_ERROR = 0.05  # of an entry, beyond which they tell nothing
DIFFERENCES = 4  # dimensions up to which squares are summed of differences: more exact, twice the work
SAMPLE, LEAST = 1 << 14, 256  # coordinates, and points, that tell the middle of a cloud and their sizes
TAIL_MOST = 10.0  # times their median that sizes count with at most
SLACK = 10.0  # that a cost with mass may lie above what the scalings of K tell, in powers of 2
PARTIAL = 6.0  # roundings of the squares that a sum of products has, by their size: those of many sums cancel
CORRECTED = 1e-4  # floor of float32 passes that are corrected: a float64 one falls to that of their rounding at once
HIDDEN = 2.0**60  # coordinates of labels that forbid a pair: 2^-(2^61) is 0
LEFT_OUT = -(2.0**28)  # of a point without mass: 0 beside any other
FORMS = members("mapuot_narrow_form")
LOG2_E = 1 / math.log(2)
MIDDLES: weakref.WeakKeyDictionary[PointCosts, F64] = weakref.WeakKeyDictionary()  # by cost: its points never change


class NarrowPoints:
    """The arrays of one solve, the scalings that suit them, and the limits of passes with these.

    x (m, d) and y (d, n padded) hold coordinates, row (m,) and col (n padded,) what belongs to a point alone; ``error``
    is that of an entry.
    """

    error = 0.0

    def __init__(self, problem: Problem, size: float, exact: tuple[F64, F64] | None = None) -> None:
        """``size``: what `fitting` tells; ``exact``: what `centred` tells of points on a GPU, which stay in float64."""
        cloud, reg = problem.cost.cloud, problem.reg
        self.problem, self.size, (_, self.form) = problem, size, form_of(cloud)
        form, expands = cloud.core[0].form, expands_squares(cloud)
        points: Any = exact or [p.astype(np.float32) for p in centred(cloud, reg)]
        x, self.y = points
        self.own_x: Any = 0.0  # what the costs have of one point alone: squares, or addends
        self.own_y: Any = 0.0
        if expands:
            self.own_x, self.own_y = squares(x.T, True), squares(self.y[:, : cloud.shape[1]], True)
        elif form == "products":
            self.own_x, self.own_y = addends(cloud, reg, namespace(x))
        self.x, xp = x + x if expands and exact is None else x, namespace(problem.rows.weight)
        if xp is np:  # potentials are the host's, wherever points lie
            self.own_x, self.own_y = host(self.own_x), host(self.own_y)
        self.row, self.col = xp.empty(len(x), np.float32), xp.empty(self.y.shape[1], np.float32)

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64] | None:
        """The scalings nearest to these that float32 holds, which row and col then hold; None: they are too large."""
        row, col = (np.rint((x * LOG2_E - own) / GRID) * GRID for x, own in ((alpha, self.own_x), (beta, self.own_y)))
        used = row[np.isfinite(row)] if not np.may_share_memory(alpha, beta) else row[:0]  # of one potential: equal
        ranks = self.problem.ranks  # which must all hold the same columns
        middles = [x for x in ranks.all(median(used) if used.size else None) if x is not None]
        common = float(np.round(np.median(middles) / GRID) * GRID) if middles else 0.0
        self.col[len(beta) :] = LEFT_OUT
        moves = (row, self.row, -common), (col, self.col[: len(beta)], common)
        if ranks.max(any(any_of(np.isfinite(x) & (np.abs(x + moved) >= MOST_POWER)) for x, _, moved in moves)):
            return None
        for power, out, moved in moves:
            out[:] = np.maximum(power + moved, LEFT_OUT)
            power[:] = np.where(np.isfinite(power), out.astype(np.float64) - moved, power)  # as float32 has a far point
        scalings = (row + self.own_x) / LOG2_E, (col + self.own_y) / LOG2_E
        self.error = entry_error(self.problem, self.size, scalings)
        return scalings

    def limits(self, floor: float, skip: Truncation | None) -> dict[str, float]:
        """Return the limits of passes, which give way to float64 ones at a floor, or where tol is reached."""
        floor = CORRECTED if skip and skip.correct else floor
        return {"storage_error": self.error, "narrow_floor": floor + 3 * self.error, "finer": 0, "made": 1}


def expands_squares(cloud: PointCosts) -> bool:
    """Tell whether float32 passes expand squared distances."""
    return cloud.core[0].form == "squares" and cloud.dim > DIFFERENCES and not cloud.bits


def form_of(cloud: PointCosts) -> tuple[int, int]:
    """Return the dimensions and the form of float32 passes."""
    form = "products" if expands_squares(cloud) else cloud.core[0].form or "squares"
    return cloud.dim - cloud.apart, FORMS[form]


def centred(cloud: PointCosts, reg: float, xp: Any = np) -> tuple[F64, F64]:
    """Return coordinates (m, d) and (d, n padded) from the middle of y on, scaled so that costs are powers of 2.

    ``xp``: NumPy or CuPy, whose arrays they are.
    """
    metric, scale = cloud.core
    factor = metric.scaled(scale * LOG2_E / reg)
    rows, columns = softened(cloud, *cloud.coordinates(xp))
    if metric.inner:
        return rows[:, cloud.apart :] * factor, (columns[cloud.apart :] - origin(cloud, xp)) * factor
    moved = columns[:, :1], middle(cloud, xp)[:, None], factor
    x, y = laid(xp.empty(rows.shape).T, rows.T, *moved).T, laid(xp.empty(columns.shape), columns, *moved)
    known = cloud.dim - cloud.bits
    x[:, known:], y[known:] = HIDDEN * np.sign(rows[:, known:]), HIDDEN * np.sign(columns[known:])
    return x, y


def origin(cloud: PointCosts, xp: Any) -> Any:
    """Return where most of the points y lie, (d, 1)."""
    return cloud.coordinates(xp)[1][cloud.apart :, :1] + xp.asarray(middle(cloud, xp))[:, None]


def addends(cloud: PointCosts, reg: float, xp: Any) -> tuple[Any, Any]:
    """Return what rows and columns cost by themselves where costs are inner products, in powers of 2.

    With q the `origin` of y: r_i + c_j - <x_i, y_j> = (r_i - <x_i, q>) + c_j - <x_i, y_j - q>.
    """
    rows, columns = cloud.coordinates(xp)
    n, apart, factor = cloud.shape[1], cloud.apart, cloud.core[1] * LOG2_E / reg
    own_x = -(rows[:, apart:] @ origin(cloud, xp)[:, 0])
    if not apart:
        return factor * own_x, 0.0
    return factor * (own_x - rows[:, 0]), -factor * columns[1, :n]


def some(points: Any, along: int = 1) -> F64:
    """Return some of the points (m, d), or numbers (m,) of points with ``along`` coordinates, on the host."""
    count = max(LEAST, SAMPLE // (points.shape[1] if points.ndim > 1 else along))
    found = points[:: max(1, len(points) // count)]
    return copied(found) if found.ndim > 1 else copied(found[None])[0]


def middle(cloud: PointCosts, xp: Any) -> F64:
    """Return where most of the points y lie, from the first of them: means of 1e8 are off by 1e-8.

    It is the mean of the half of them that is nearest to their median: between points of y, and no outlier moves it.
    """
    if cloud not in MIDDLES:
        y = softened(cloud, *cloud.coordinates(xp))[1][cloud.apart :, : cloud.shape[1]]
        points = some(y.T) - copied(y[:, :1])[:, 0]
        apart = np.abs(points - np.median(points, 0)).sum(1)
        MIDDLES[cloud] = points[apart <= np.median(apart)].mean(0)
    return MIDDLES[cloud]


def sizes(problem: Problem) -> list[float]:
    """Return the mean sizes of the coordinates of rows and of columns, centred and scaled as `centred` has them."""
    cloud, found = problem.cost.cloud, list[float]()
    xp = namespace(*(cloud.here or (problem.rows.weight,)))
    (metric, scale), (rows, columns) = cloud.core, softened(cloud, *cloud.coordinates(xp))
    factor, y = metric.scaled(scale * LOG2_E / problem.reg), columns[cloud.apart :, : cloud.shape[1]]
    centre, along = middle(cloud, xp) + copied(y[:, :1])[:, 0], len(y)
    for points, side in ((rows[:, cloud.apart :], problem.rows), (y.T, problem.cols)):
        beside = 0.0 if metric.inner and side is problem.rows else centre
        size, mass = factor * np.linalg.norm(some(points) - beside, metric.norm, 1), some(side.weight, along)
        most = side.ranks.max(TAIL_MOST * float(np.median(size)) if len(size) else 0.0)
        total = float(side.ranks.sum(mass.sum()))
        found.append(float(side.ranks.sum((mass * np.minimum(size, most)).sum())) / total if total else most)
    return found


def product_error(problem: Problem) -> float:
    """Bound on the relative error of entries whose squares float64 passes expand, beside that of log u and log v.

    With c the largest cost / reg and u = 2^-53: |x| is at most sqrt(c), |y| 2 sqrt(c): the centre is a mean of some y.
    Coordinates err by 3 u and 6 u of sqrt(c), which is 18 u of c; the factor and its root by 2; d products of 4 c by
    4 d; the squares, of c and 4 c, by 5 d. These are taken off log u and log v, and the three are added up: 5 u of c
    three times.
    """
    return float(2.0**-53 * (9 * problem.cost.cloud.dim + 40) * problem.M_max / problem.reg)


def fitting(problem: Problem) -> float | None:
    """Return the sum of ``sizes`` where float32 passes can make this problem's rows, else None."""
    if problem.cost.operator != "points" or problem.c is not None or problem.cost.cloud.core[0].form is None:
        return None
    size = sum(sizes(problem))
    return size if entry_error(problem, size) <= MOST_ERROR else None


def entry_error(problem: Problem, size: float, scalings: tuple[F64, F64] | None = None) -> float:
    """Estimate the relative error of the entries that carry mass, which only counts until passes are float64 ones.

    ``size``: of coordinates, the sum of ``sizes``. ``scalings``: alpha and beta of K, whose means over the masses tell
    the mean cost c of these entries: the largest of K are 1. Beside the roundings of c count those of coordinates; of
    sums of products those of the squares.
    """
    metric, d = problem.cost.cloud.core[0], problem.cost.cloud.dim
    c = SLACK
    if scalings is not None:
        sides = zip((problem.rows, problem.cols), scalings, strict=True)
        c += max(0.0, LOG2_E * sum(mean_over(side, log) for side, log in sides))
    if metric.degree == 1:
        return float(2.0**-24 * ((d + 4) * c + size))
    if d > DIFFERENCES or metric.inner:
        return float(2.0**-24 * PARTIAL * size**2)
    return float(2.0**-24 * ((d + 4) * c + 2 * math.sqrt(c) * size))


def mean_over(side: Side, log: F64) -> float:
    """Return the mean of a vector over the masses of a side, without points that have none."""
    used = side.weight * np.isfinite(log)
    total = float(side.ranks.sum(used.sum()))
    return float(side.ranks.sum((used * np.where(np.isfinite(log), log, 0.0)).sum())) / total if total else 0.0
