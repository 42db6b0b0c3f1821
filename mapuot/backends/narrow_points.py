"""Float32 points for passes that make the rows of K, for src_c/narrow_points.h and src_cuda/points/points.cuh.

    K_ij = 2^(row_i + col_j - c_ij)

Rounding row and col to float32 would lose digits for good: with potentials of 1000 reg an entry errs by 6e-5. But K may
absorb any nearby scalings: move them by up to GRID / 2, so that row and col are multiples of GRID, and their sum is
exact up to 2^15. A far point with larger values has fewer digits. Coordinates are centred at the bulk of y, the same on
all ranks; for inner products only y is centred. The error is estimated as a mean over masses, since a point far from
all others carries little mass.
"""

import math
import weakref
from typing import Any

import numpy as np

from ..arrays import any_of, copied, host, laid, longest, median, namespace, squares
from ..enums import members
from ..penalties import F64
from ..problem.points import PointCosts, softened
from ..problem.problem import Problem
from ..problem.side import Side
from .pairs import AllPairs
from .settings import NARROW

GRID = 2.0**-8
MOST_POWER = 2.0**26  # largest |row| and |col|: exponents then err by a few units, equal for all pairs of a point
DIFFERENCES = 4  # dimensions; up to here sum squares of differences: more exact, twice the work
TAIL_MOST = 10.0  # cap on sizes, in units of their median
SLACK = 10.0  # allowance, in powers of 2, for costs of pairs with mass above the estimate from the scalings of K
PARTIAL = 6.0  # rounding of a sum of products, in units of 2^-24 size^2: roundings of many terms partly cancel
ROUNDED = 2.0**-14  # error of an entry by points rounded to float16, in units of size and the root of the cost
CORRECTED = 1e-4  # narrow_floor of corrected float32 passes: the next float64 pass drops to the rounding error at once
HIDDEN = 2.0**60  # coordinates of labels that forbid a pair: 2^-(2^61) is 0
LEFT_OUT = -(2.0**28)  # row or col of a point without mass: its entries underflow to 0
FORMS = members("mapuot_narrow_form")
LOG2_E = 1 / math.log(2)
MIDDLES: weakref.WeakKeyDictionary[PointCosts, F64] = weakref.WeakKeyDictionary()  # by cost: its points never change


class NarrowPoints:
    """The arrays of one solve, the scalings of K that suit them, and the limits of passes.

    x (m, d) and y (d, n padded) hold coordinates, row (m,) and col (n padded,) the terms that depend on one point;
    ``error`` is the estimated relative error of an entry, ``rounded_error`` that of points rounded to float16.
    """

    error = 0.0
    rounded_error = 0.0

    def __init__(self, problem: Problem, size: float, exact: tuple[F64, F64] | None = None) -> None:
        """``size``: result of `fitting`; ``exact``: result of `centred` for points on a GPU, kept in float64."""
        cloud, reg = problem.cost.cloud, problem.reg
        self.problem, self.size, (_, self.form) = problem, size, form_of(cloud)
        form = cloud.core[0].form
        expands = expands_squares(cloud)
        points: Any = exact or [p.astype(np.float32) for p in centred(cloud, reg)]
        x, self.y = points
        self.own_x: Any = 0.0  # terms of the costs that depend on one point: squares, or addends
        self.own_y: Any = 0.0
        if expands:
            self.own_x, self.own_y = squares(x.T, True), squares(self.y[:, : cloud.shape[1]], True)
        elif form == "products":
            self.own_x, self.own_y = addends(cloud, reg, namespace(x))
        self.x, xp = x + x if expands and exact is None else x, namespace(problem.rows.weight)
        if xp is np:  # potentials are on the host, wherever points are
            self.own_x, self.own_y = host(self.own_x), host(self.own_y)
        self.row, self.col = xp.empty(len(x), np.float32), xp.empty(self.y.shape[1], np.float32)

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64] | None:
        """Round the scalings to float32's grid, store them in row and col, and return them; None if too large."""
        row, col = (np.rint((x * LOG2_E - own) / GRID) * GRID for x, own in ((alpha, self.own_x), (beta, self.own_y)))
        # one potential: row = col
        if not np.may_share_memory(alpha, beta):
            used = row[np.isfinite(row)]
        else:
            used = row[:0]
        ranks = self.problem.ranks  # col must be the same on all ranks
        middles = [x for x in ranks.all(median(used) if used.size else None) if x is not None]
        if middles:
            common = float(np.round(np.median(middles) / GRID) * GRID)
        else:
            common = 0.0
        self.col[len(beta) :] = LEFT_OUT
        moves = (row, self.row, -common), (col, self.col[: len(beta)], common)
        if ranks.max(any(any_of(np.isfinite(x) & (np.abs(x + moved) >= MOST_POWER)) for x, _, moved in moves)):
            return None
        for power, out, moved in moves:
            out[:] = np.maximum(power + moved, LEFT_OUT)
            power[:] = np.where(np.isfinite(power), out.astype(np.float64) - moved, power)  # far points are rounded
        scalings = (row + self.own_x) / LOG2_E, (col + self.own_y) / LOG2_E
        self.error = entry_error(self.problem, self.size, scalings)
        self.rounded_error = rounded_error(self.problem, self.size, scalings)
        return scalings

    def limits(self, floor: float, pairs: AllPairs) -> dict[str, float]:
        """Return the limits of float32 passes; float64 passes follow at ``floor``, or once tol is reached."""
        floor = CORRECTED if pairs.correct else floor
        return {"storage_error": self.error, "narrow_floor": floor + 3 * self.error, "finer": 0, "made": 1}


def expands_squares(cloud: PointCosts) -> bool:
    """Tell whether float32 passes expand squared distances."""
    return cloud.core[0].form == "squares" and cloud.dim > DIFFERENCES and not cloud.bits


def form_of(cloud: PointCosts) -> tuple[int, int]:
    """Return the dimensions and the form of float32 passes."""
    if expands_squares(cloud):
        form = "products"
    else:
        form = cloud.core[0].form or "squares"
    return cloud.dim - cloud.apart, FORMS[form]


def centred(cloud: PointCosts, reg: float, xp: Any = np) -> tuple[F64, F64]:
    """Return coordinates (m, d) and (d, n padded), centred and scaled: costs are exponents of 2.

    ``xp``: NumPy or CuPy, the library of the arrays returned.
    """
    metric, scale = cloud.core
    factor = metric.scaled(scale * LOG2_E / reg)
    rows, columns = softened(cloud, *cloud.coordinates(xp))
    if metric.product:
        return rows[:, cloud.apart :] * factor, (columns[cloud.apart :] - origin(cloud, xp)) * factor
    moved = columns[:, :1], middle(cloud, xp)[:, None], factor
    x = laid(xp.empty(rows.shape).T, rows.T, *moved).T
    y = laid(xp.empty(columns.shape), columns, *moved)
    n_numeric = cloud.dim - cloud.bits
    if cloud.bits:
        x[:, n_numeric:] = HIDDEN * np.sign(rows[:, n_numeric:])
        y[n_numeric:] = HIDDEN * np.sign(columns[n_numeric:])
    return x, y


def origin(cloud: PointCosts, xp: Any) -> Any:
    """Return a robust centre of the points y, (d, 1)."""
    return cloud.coordinates(xp)[1][cloud.apart :, :1] + xp.asarray(middle(cloud, xp))[:, None]


def addends(cloud: PointCosts, reg: float, xp: Any) -> tuple[Any, Any]:
    """Return the terms of rows and of columns in costs by inner products, as exponents of 2.

    With q the `origin` of y: r_i + c_j - <x_i, y_j> = (r_i - <x_i, q>) + c_j - <x_i, y_j - q>.
    """
    rows, columns = cloud.coordinates(xp)
    n = cloud.shape[1]
    apart = cloud.apart
    factor = cloud.core[1] * LOG2_E / reg
    own_x = -(rows[:, apart:] @ origin(cloud, xp)[:, 0])
    if not apart:
        return factor * own_x, 0.0
    return factor * (own_x - rows[:, 0]), -factor * columns[1, :n]


def some(points: Any, along: int = 1) -> F64:
    """Sample the points (m, d), or numbers (m,) that belong to points with ``along`` coordinates; on the host."""
    count = max(NARROW.least_sample, NARROW.sample // (points.shape[1] if points.ndim > 1 else along))
    found: F64 = points[:: max(1, len(points) // count)]
    if found.ndim > 1:
        whole: F64 = copied(found)
    else:
        whole = copied(found[None])[0]
    return whole


def middle(cloud: PointCosts, xp: Any) -> F64:
    """Return a robust centre of y relative to y[0]: near 1e8 a plain mean rounds to 1e-8.

    The centre is the mean of the half of the sampled points nearest to their median: no outlier moves it.
    """
    if cloud not in MIDDLES:
        y = softened(cloud, *cloud.coordinates(xp))[1][cloud.apart :, : cloud.shape[1]]
        points = some(y.T) - copied(y[:, :1])[:, 0]
        apart = np.abs(points - np.median(points, 0)).sum(1)
        MIDDLES[cloud] = points[apart <= np.median(apart)].mean(0)
    return MIDDLES[cloud]


def sizes(problem: Problem) -> list[float]:
    """Return the mean norms of the points of rows and of columns, centred and scaled as in `centred`."""
    cloud = problem.cost.cloud
    found = list[float]()
    xp = namespace(*(cloud.here or (problem.rows.weight,)))
    metric, scale = cloud.core
    rows, columns = softened(cloud, *cloud.coordinates(xp))
    factor = metric.scaled(scale * LOG2_E / problem.reg)
    y = columns[cloud.apart :, : cloud.shape[1]]
    centre = middle(cloud, xp) + copied(y[:, :1])[:, 0]
    along = len(y)
    for points, side in ((rows[:, cloud.apart :], problem.rows), (y.T, problem.cols)):
        if metric.product and side is problem.rows:
            beside: Any = 0.0
        else:
            beside = centre
        size = factor * np.linalg.norm(some(points) - beside, metric.norm, 1)
        mass = some(side.weight, along)
        most = side.ranks.max(TAIL_MOST * float(np.median(size)) if len(size) else 0.0)
        total = float(side.ranks.sum(mass.sum()))
        found.append(float(side.ranks.sum((mass * np.minimum(size, most)).sum())) / total if total else most)
    return found


def product_error(problem: Problem) -> float:
    """Bound the relative error of entries if float64 passes expand costs into products of coordinates.

    The errors of log u and log v are counted elsewhere. The bound is inf for costs that are no such products.

    Squared distances: let c be the largest cost / reg and u = 2^-53. The centre is a mean of some y, so |x| <= sqrt(c),
    |y| <= 2 sqrt(c). In units of u c: coordinates err by 3 u sqrt(c) and 6 u sqrt(c), which adds 18; the factor and its
    root add 2; d products of size 4 c add 4 d; the squares, of size c and 4 c, add 5 d. The squares are subtracted from
    log u and log v, and the three terms added: this adds three times 5.

    Inner products: let c be the sum of the largest sizes of all terms in `addends` and <x, y - q>. Coordinates and
    factors err by 12 u of a product's size at most. The d products are added to log u + log v less the own terms, a sum
    of at most 2 c beside the exponent: this adds 2 d. <x, q> adds d + 6, and the differences and sums of own terms 8.
    """
    cloud = problem.cost.cloud
    metric, scale = cloud.core
    unit = 2.0**-53 / problem.reg
    if metric.square:
        return float(unit * (9 * cloud.dim + 40) * problem.M_max)
    if not metric.product:
        return math.inf
    xp = namespace(*(cloud.here or (problem.rows.weight,)))
    rows, columns = cloud.coordinates(xp)
    apart = cloud.apart
    y = columns[:, : cloud.shape[1]]
    centre = origin(cloud, xp)
    far = longest(rows[:, apart:].T)
    terms = far * (longest(y[apart:] - centre) + longest(centre))
    if apart:
        terms += longest(rows[:, :1].T) + longest(y[1:2])
    return float(unit * (3 * cloud.dim + 40) * scale * problem.ranks.max(terms))


def fitting(problem: Problem) -> float | None:
    """Return the sum of ``sizes`` if float32 passes can make this problem's rows, else None."""
    if problem.cost.operator != "points" or problem.c is not None or problem.cost.cloud.core[0].form is None:
        return None
    size = sum(sizes(problem))
    if entry_error(problem, size) <= NARROW.most_error:
        return size
    return None


def entry_error(problem: Problem, size: float, scalings: tuple[F64, F64] | None = None) -> float:
    """Estimate the relative error of entries that carry mass. It matters only until passes are in float64.

    ``size``: the sum of ``sizes``. ``scalings``: alpha and beta of K; since its largest entries are 1, the means of
    alpha and beta over the masses estimate the mean cost c of these entries. The error has the rounding of c and of the
    coordinates; for sums of products it has the rounding of the squares.
    """
    metric = problem.cost.cloud.core[0]
    d = problem.cost.cloud.dim
    c = mean_cost(problem, scalings)
    if metric.degree == 1:
        return float(2.0**-24 * ((d + 4) * c + size))
    if d > DIFFERENCES or metric.product:
        return float(2.0**-24 * PARTIAL * size**2)
    return float(2.0**-24 * ((d + 4) * c + 2 * math.sqrt(c) * size))


def rounded_error(problem: Problem, size: float, scalings: tuple[F64, F64] | None = None) -> float:
    """Estimate the relative error of entries that carry mass, between points rounded to float16.

    A coordinate errs by 2^-12.3 of itself in the root mean square. These errors have random signs, so that the terms
    2 (x - y).(dx - dy) partly cancel: in 10 to 256 dimensions with falling variances .3 to .7 of the estimate was left.
    """
    return ROUNDED * math.sqrt(mean_cost(problem, scalings)) * size


def mean_cost(problem: Problem, scalings: tuple[F64, F64] | None) -> float:
    """Estimate the mean cost of entries that carry mass, as an exponent of 2."""
    c = SLACK
    if scalings is not None:
        sides = zip((problem.rows, problem.cols), scalings, strict=True)
        c += max(0.0, LOG2_E * sum(mean_over(side, log) for side, log in sides))
    return c


def mean_over(side: Side, log: F64) -> float:
    """Return the mean of the finite numbers of a vector, weighted by the masses of a side."""
    used = side.weight * np.isfinite(log)
    total = float(side.ranks.sum(used.sum()))
    if total:
        return float(side.ranks.sum((used * np.where(np.isfinite(log), log, 0.0)).sum())) / total
    return 0.0
