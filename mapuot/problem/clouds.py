"""`PointCloud`, which takes the place of a cost matrix, and `Clouds`, the `Cost` of a batch of clouds of any sizes.

The points of a batch are concatenated; a problem is one range of the rows' points and one range of the columns' points.
No matrix is kept: the core forms the matrix of a problem when it solves the problem. A GPU computes the costs in every
pass, or forms the matrices of many problems at once. Points given on a GPU stay there, unless they have weights or are
scaled to unit length first; host code reads a copy, made on first use.
"""

import copy
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import MetricName
from ..arrays import any_of, host, is_data_set, is_on_device, namespace
from ..cached import cached_property
from ..contract import Backend
from ..penalties import F64
from ..processor import SERIAL_ENTRIES
from ..synonyms import hinted
from .cost import Cost, Range, Tell, UserCost, joint_range
from .metrics import METRICS
from .points import PAIR_BYTES, PointCosts, as_points, there
from .validate import as_array


class PointCloud(UserCost):
    """Cost ``scale * metric(x_i, y_j)`` between two clouds of points, which takes the place of M in every solver.

    Parameters
    ----------
    x, y : (m, d), (n, d) arrays
        Points, one in a row, real and finite; NumPy, CuPy or PyTorch (no gradient is followed). They are copied.
        Without y the costs are between the points of x. With ``comm``, x is the rank's own block and y is whole. For
        `solve_batch`, the points of p problems: (p, m, d), or lists of p clouds of any sizes; one (n, d) array may
        serve all problems.
    metric : {"sqeuclidean", "euclidean", "cityblock", "cosine", "wfr", "inner"}
        As in ``scipy.spatial.distance.cdist``. "wfr", the Wasserstein-Fisher-Rao cost, is ``-2 log cos |x - y|``: scale
        the points so that pi / 2 is the largest distance that mass may travel. Pairs pi / 2 - 2^-13 or more apart are
        forbidden, because their costs, 18 and more, depend on the last digits of the coordinates. "inner" is
        ``-<x, y>``, the negative inner product, of any sign; see ``addends``. "cosine" of unit vectors in three
        dimensions is half the squared chord of the sphere. Any other metric is a function ``M(i0, i1)`` of rows, or a
        matrix, in the place of the cloud (guide, "My points are places").
    scale, weights : float > 0; (d,) array >= 0, optional
        Factor of the metric, and one for each dimension, as ``w`` of ``cdist``.
    truncate : "auto", float or None
        Skip pairs whose share of the plan is provably negligible beside ``tol``; the certificate includes a bound on
        the mass of the skipped pairs. "auto" does so from 2^26 pairs on (on a GPU from 2^30), if the median cost is at
        least 30 reg. A number t skips pairs with an entry below ``exp(-t) a_i b_j``, or fewer pairs if ``tol`` asks
        for it, for any number of pairs. None takes all pairs. Pairs are skipped only with ``reference="product"`` and
        a metric other than "wfr" and "inner".
    form : "auto", float or None
        Form the matrix in `solve` and `solve_batch` if reading it is faster than computing its costs, and if matrix and
        K together take at most this many bytes, 16 for each pair. On a CPU "auto" allows 2^26 pairs (1 GiB),
        2^(17 + 2 d) pairs in d < 5 dimensions, and a quarter of the memory in 32 dimensions or more. On a GPU it allows
        a quarter of the free memory. None never forms the matrix. It is not formed either over several ranks, or if
        ``truncate`` is a number. In many dimensions squared distances and inner products are computed as matrix
        products.
    starts : (p + 1,) integers, or a tuple of two such arrays, optional
        For clouds concatenated in one array: the index of the first point of each of p clouds in x and in y, and the
        end of the last cloud. In a tuple, None marks a cloud that serves all problems.
    labels : pair of (m,) and (n,) arrays, optional
        A label for each point of x and of y, of any kind that can be sorted. Pairs with different labels cost
        ``across`` more. For many clouds (p, m) and (p, n) arrays, or lists of one array a cloud.
    across : float or inf
        Added cost of a pair with different labels, in units of the cost. inf forbids the pair, for every metric except
        "inner". A finite number needs "sqeuclidean" or "cityblock" and one cloud. Over ranks y must have every label.
    addends : pair of (m,) and (n,) arrays, optional
        For metric "inner", costs r_i of each row and c_j of each column: the cost is then
        ``scale * (r_i + c_j - <x_i, y_j>)``. Finite numbers of any sign; one number serves all points of a side. New
        points have no addend, so `Result.map` and `Result.potential` refuse them.

    Attributes
    ----------
    x, y : (m, d), (n, d) float64 arrays
        The points, on the host; CuPy arrays if many clouds lie on a GPU. Labels with a finite ``across`` add columns
        after the coordinates, one for each label in sorted order; derivatives by the points, maps and interpolated
        points have these columns, too.
    metric, scale, weights, truncate, form, addends, shape, size, ndim, dtype
        The arguments as given, and shape, size, ndim and dtype of the matrix. Many clouds have shape (p, m, n), with m
        and n of the largest clouds.

    See Also
    --------
    solve_sample, Grid, knn_cost

    Notes
    -----
    Memory holds the points, and the matrix if it is formed; a Result then keeps the matrix. Otherwise each pass
    computes the costs: in float32 while the error is large (except for "wfr"), in float64 in passes that certify. Costs
    are computed from differences of coordinates, so that no digits are lost far from the origin. On a GPU, in many
    dimensions, a formed matrix of squared distances is a float64 product of coordinates relative to one of the points.
    The certificate counts the rounding of these products, and of "inner", where terms may cancel.
    ``numpy.asarray(cloud)`` forms the matrix. ``backend="auto"`` solves on the GPU if the points are on one.

    Points on a GPU stay there; with ``weights``, or for "cosine", their coordinates are scaled on the host first. A
    batch of clouds of up to 128 points, in more than 12 dimensions, or with "wfr" forms its matrices, 4 GiB at once.
    Any other batch takes the memory of its points, of some 40 vectors of the columns and, for derivatives, 1 GiB of
    plans.

    If pairs are skipped, the plan is 0 there in every quantity of the Result: ``plan``, ``apply``, ``cost``,
    ``objective``, marginals and mass belong to this truncated plan. ``error_bound`` bounds its distance from the
    optimal plan of all pairs, and ``dual`` is a lower bound for all pairs.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((500, 3)), rng.random((400, 3))
    >>> result = mapuot.solve(mapuot.PointCloud(x, y), reg=0.05, reg_m=1.0)
    >>> result.converged
    True
    """

    _cost: Any  # `PointCosts`, or `Clouds` for many problems

    @hinted
    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        metric: MetricName = "sqeuclidean",
        scale: float = 1.0,
        weights: ArrayLike | None = None,
        truncate: float | Literal["auto"] | None = "auto",
        form: float | Literal["auto"] | None = "auto",
        starts: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        across: float | None = None,
        addends: Any = None,
    ) -> None:
        how = metric, scale, weights, truncate, form
        many = starts is not None or is_many(x) or is_many(y)
        if many and labels is not None:
            if across != np.inf:
                raise NotImplementedError("labels of many clouds take across=inf: a finite one is for one cloud")
            if isinstance(labels, (tuple, list)):
                labels = tuple(map(in_a_row, labels))
        if many and (metric == "inner" or addends is not None):
            raise NotImplementedError("metric 'inner' and addends are for one cloud: call solve for each problem")
        if many:
            super().__init__(Clouds(x, y, *how, labels, across, starts=starts))
            return
        super().__init__(PointCosts(x, y, *how, labels, across, addends))

    def _hold(self, cost: Any) -> None:
        super()._hold(cost)
        one = getattr(cost, "whole", cost)
        self.metric, self.scale = one.metric, one.scale
        self.weights, self.truncate, self.form, self.addends = one.weights, one.truncate, one.form, one.addends
        if cost.ndim == 3:
            self.shape = (len(cost), *cost.shape)

    @property
    def x(self) -> Any:
        """Points of the rows, as they were given."""
        return getattr(self._cost, "whole", self._cost).x

    @property
    def y(self) -> Any:
        """Points of the columns, as they were given."""
        return getattr(self._cost, "whole", self._cost).y

    def __getitem__(self, rows: Any) -> "PointCloud":
        """Return the costs of some rows: a slice (no copy if it has no step), numbers or booleans.

        With many clouds, ``rows`` is the number of a problem, or a slice of problems.
        """
        part: PointCloud = self._of(self._cost.of(rows) if self.ndim == 3 else self._cost[rows])
        return part

    def within(self) -> "tuple[PointCloud, PointCloud]":
        """Return two costs: between the points of the rows, and between the points of the columns."""
        return self._of(self._cost.within()), self._of(self._cost.transpose().within())


class Places(NamedTuple):
    """Range of each problem's points in the batch: index of the first point and number of points, (p,) each."""

    first: Any
    count: Any

    def run(self, i: int) -> slice:
        return slice(int(self.first[i]), int(self.first[i] + self.count[i]))


class AllPoints(PointCosts):
    """The points of all problems of a batch, checked and scaled together."""

    @staticmethod
    def _read(value: Any, name: str, stays: bool) -> Any:
        return value  # `as_flat` has checked it

    def _take(self, x: Any, y: Any, addends: Any) -> bool:
        return False  # the points of many clouds are used as they are given

    def _set(self, rows: F64, columns: F64) -> None:
        self.shape = len(rows), len(columns)
        self.dim = rows.shape[1]
        self.rows, self.columns = rows, columns.T


class Clouds(Cost):
    """The `Cost` of a `PointCloud` of many problems, (p, m, n) with the numbers of points of the largest one.

    ``factors``: of the costs of each problem, (p,), if their units differ. Passes multiply costs by them; points are
    not changed.
    """

    ndim = 3
    operator = "points"
    remade = True
    factors: F64 | None = None
    ranges_of_each: Any = None  # least and largest costs of each problem, without factors, once a device found them

    def __init__(self, x: Any, y: Any, metric: str, scale: float, weights: Any, *how: Any, starts: Any = None) -> None:
        if isinstance(starts, tuple):
            first, second = starts
        else:
            first, second = starts, starts
        on_device = any(is_on_device(z[0] if is_list(z) else z) for z in (x, y))
        read = array_in
        if on_device and weights is None and metric in METRICS and not METRICS[metric].unit:
            read = there
        rows, row_places = as_flat(x, "x", first, read)
        same = y is None or y is x
        if same:
            columns, col_places = None, row_places
        else:
            columns, col_places = as_flat(y, "y", second, read)
        whole = AllPoints(rows, columns, metric, scale, weights, *how)
        whole.on_device = on_device
        sizes = {len(places.first) for places in (row_places, col_places)} - {1}
        if len(sizes) > 1:
            raise ValueError(f"x and y must hold equally many clouds, got {len(row_places[0])}, {len(col_places[0])}")
        p = max(sizes, default=1)
        self._hold(whole, *(Places(*(np.broadcast_to(k, (p,)) for k in places)) for places in (row_places, col_places)))

    def _hold(self, whole: PointCosts, rows: Places, cols: Places) -> "Clouds":
        self.whole = whole
        self.places = rows, cols
        self.dtype = whole.dtype
        self.shape = int(rows.count.max()), int(cols.count.max())
        return self

    def _of(self, whole: PointCosts, rows: Places, cols: Places) -> "Clouds":
        """Return the same problems between other points."""
        found = object.__new__(Clouds)._hold(whole, rows, cols)
        found.factors = self.factors
        return found

    def placed(self, xp: ModuleType) -> "Clouds":
        if namespace(self.whole.x) is xp:
            return self
        return self.read_by(host if xp is np else xp.asarray)

    def here(self) -> "Clouds":
        """Return the costs with points of a GPU on the current one."""
        if self.on_device and namespace(self.whole.x) is not np:
            return self.read_by(there)
        return self

    def read_by(self, read: Callable[[Any], Any]) -> "Clouds":
        whole = self.whole
        x = read(whole.x)
        rows = read(whole.rows)
        if whole.x is whole.y:
            y, targets = x, rows
        else:
            y = read(whole.y)
            targets = read(self.targets)
        found = whole._other(AllPoints, x=x, y=y)
        found._set(rows, targets)
        return self._of(found, *self.places)

    @cached_property
    def at_home(self) -> "Clouds":
        return self.placed(np)

    def __len__(self) -> int:
        return len(self.places[0].first)

    @property
    def kind(self) -> str:
        return f"clouds of {self.whole.kind}"

    @property
    def on_device(self) -> bool:
        return self.whole.on_device

    @property
    def where(self) -> Any:
        if self.on_device:
            return self.whole.x
        return self

    @property
    def pairs_of_each(self) -> Any:
        rows, cols = self.places
        return rows.count * cols.count

    @property
    def all_pairs(self) -> int:
        return int(self.pairs_of_each.sum())

    @property
    def ragged(self) -> bool:
        return any(bool((places.count != k).any()) for places, k in zip(self.places, self.shape, strict=True))

    def forms(self, most: float) -> bool:
        """Return False: no matrix is kept."""
        return False

    @property
    def solved_whole(self) -> Any:
        """Mask of the problems that one core may form and solve alone, (p,)."""
        return (self.pairs_of_each <= SERIAL_ENTRIES) & self.may_form

    @property
    def may_form(self) -> Any:
        """Mask of the problems with a matrix small enough to be formed, (p,)."""
        whole = self.whole
        if whole.form == "auto":
            most = np.inf
        else:
            most = float(whole.form or 0)
        return (self.pairs_of_each * PAIR_BYTES <= most) & (not isinstance(whole.truncate, float))

    @cached_property
    def places_there(self) -> Any:
        """First row, number of rows, first column, number of columns of each problem, (p, 4), beside the points."""
        rows, cols = self.places
        table = np.ascontiguousarray(np.stack([*rows, *cols], 1), np.int64)
        return namespace(self.whole.x).asarray(table)

    @property
    def targets(self) -> F64:
        """Points of the columns, concatenated, in the core's coordinates."""
        columns: F64 = self.whole.columns.T
        return columns

    @property
    def scalable(self) -> bool:  # type: ignore[override]
        metric = self.whole.core[0]
        return not self.whole.bits and bool(metric.square or (metric.degree and not metric.unit) or metric.product)

    def scaled(self, factor: Any, largest: float) -> "Clouds":
        """Multiply the costs of each problem by its own factor."""
        found = copy.copy(self)
        vars(found).pop("at_home", None)  # these costs have other factors
        found.factors = self.own_factors * factor
        return found

    @property
    def own_factors(self) -> F64:
        """The factor of the costs of each problem, (p,)."""
        if self.factors is None:
            return np.ones(len(self))
        return self.factors

    def gathered(self, points: Any, axis: int) -> Any:
        """Return the points of all problems one behind the other, from points in the order of the rows or columns."""
        first, count = self.places[axis]
        ends = np.cumsum(count)
        index = np.arange(ends[-1]) + np.repeat(first - (ends - count), count)
        return points[namespace(points).asarray(index)]

    def beside(self, points: Any, name: str) -> "Clouds":
        """Return the costs of other points, (k, d) for all problems or a cloud for each, to the same columns."""
        xp = namespace(self.whole.x)
        has_given_coordinates = self.whole.has_given_coordinates
        rows, places = as_flat(points, name, None, there if has_given_coordinates and xp is not np else array_in)
        if len(places.first) not in (1, len(self)):
            raise ValueError(f"{name} must hold a cloud for each of {len(self)} problems, got {len(places.first)}")
        if has_given_coordinates and rows.shape[1] == self.whole.dim:
            rows = xp.asarray(rows, dtype=np.float64)
            scaled = rows
        else:
            scaled = xp.asarray(self.at_home.whole.beside(np.asarray(rows, np.float64), name).rows)
        whole = self.whole._other(AllPoints, x=xp.asarray(rows), y=self.whole.y)
        whole._set(scaled, self.targets)
        here = (np.broadcast_to(k, (len(self),)) for k in places)
        return self._of(whole, Places(*here), self.places[1])

    def of(self, i: Any) -> Any:
        if isinstance(i, (slice, np.ndarray)):
            if isinstance(i, slice) and i.indices(len(self)) == (0, len(self), 1):
                return self
            parts = (Places(places.first[i], places.count[i]) for places in self.places)
            found = self._of(self.whole, *parts)
            if self.factors is not None:
                found.factors = self.factors[i]
            if self.ranges_of_each is not None:
                found.ranges_of_each = self.ranges_of_each[:, i]
            return found
        if self.at_home is not self:
            return self.at_home.of(i)
        whole = self.whole
        rows, cols = (places.run(i) for places in self.places)
        one = whole._other(x=whole.x[rows], y=whole.y[cols], scale=whole.scale * float(self.own_factors[i]))
        if whole.x is whole.y and rows == cols:
            one.y = one.x
        one._set(whole.rows[rows], self.targets[cols])
        return one

    def symmetric(self, backend: Backend) -> bool:
        rows, cols = self.places
        same = np.array_equal(rows.first, cols.first) and np.array_equal(rows.count, cols.count)
        return same and self.whole.symmetric(backend)

    def transpose(self) -> "Clouds":
        turned = self.whole._other(AllPoints, x=self.whole.y, y=self.whole.x)
        turned._set(self.targets, self.whole.rows)
        return self._of(turned, *self.places[::-1])

    def within(self) -> "Clouds":
        return self._of(self.whole.within(), self.places[0], self.places[0])

    def own_block(self, a: Any, b: Any, ranks: Any) -> "Clouds":
        """Return the costs unchanged: a batch is solved by one process."""
        return self

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        """Return bounds for all problems if the metric has them; the core finds the range of each problem."""
        factors = self.own_factors
        if not METRICS[self.whole.metric].degree or self.whole.bits:
            bounds = 0.0, 0.0, 0, 1
        elif namespace(self.whole.x) is np or METRICS[self.whole.metric].norm not in (1, 2):
            low, high, bad, infinite = self.whole._bounds()
            bounds = low * float(factors.min()), high * float(factors.max()), bad, infinite
        else:
            if self.ranges_of_each is None:
                self.ranges_of_each = backend.ranges_of_clouds(self)
            low, high = self.ranges_of_each * factors
            bounds = float(low.min()), float(high.max()), 0, 0
        if not bounds[3]:
            return bounds
        return joint_range((one.range(backend, threads), one.all_pairs) for one in map(self.of, range(len(self))))

    def error(self, largest: float) -> float:
        """Bound the rounding of a cost up to ``largest``.

        The bound of the cloud is at most linear in its largest cost: the largest factor has the largest bound. Each
        product with a factor is one more rounding, and the smallest may flush to 0.
        """
        if self.factors is None:
            return self.whole.error(largest)
        most = float(self.factors.max())
        return most * self.whole.error(largest / most) + 2.0**-52 * largest + math.ulp(0.0)

    def flattened(self, a: Any, b: Any, reg_m: Any) -> tuple[Any, Any, Any]:
        """Return masses as tables, (p, m) and (p, n); smaller clouds are padded with zeros."""
        rows, cols = self.places
        table = self.table(a, "A", 0)
        alike = a is b and all(np.array_equal(x, y) for x, y in zip(rows, cols, strict=True))
        return table, table if alike else self.table(b, "B", 1), reg_m

    def table(self, masses: Any, name: str, axis: int) -> Any:
        """Return the masses of rows (``axis`` 0) or columns as a table; one vector may serve clouds of one size."""
        count = self.places[axis].count
        most = self.shape[axis]
        equal = bool((count == most).all())
        if masses is None:
            if equal:
                return None
            return self.inside(axis) / count[:, None]
        first = masses[0] if is_list(masses) else masses
        read = there if is_on_device(first) else array_in
        if is_list(masses):
            parts = [as_array(part, f"{name}[{i}]", read).ravel() for i, part in enumerate(masses)]
            if [*map(len, parts)] != count.tolist():
                raise ValueError(f"{name} must hold one mass for each point of each cloud")
            masses = namespace(*parts).concatenate(parts)
        elif np.ndim(masses) != 1 or len(masses) != count.sum() or (len(masses) == most and len(count) > 1):
            if not equal:
                inside = self.inside(axis)
                masses = as_array(masses, name, read)
                if masses.shape != inside.shape or any_of((masses != 0) & namespace(masses).asarray(~inside)):
                    raise ValueError(f"{name} must hold one mass for each point of each cloud")
            return masses
        return self.to_table(as_array(masses, name, read), axis)

    def to_table(self, flat: Any, axis: int) -> Any:
        """Turn concatenated per-point values into tables (p, m, ...), padded with zeros."""
        count = self.places[axis].count
        most = self.shape[axis]
        xp = namespace(flat)
        if (count == most).all():
            return flat.reshape(len(count), most, *flat.shape[1:])
        first = xp.asarray(np.cumsum(count) - count)[:, None]
        ends = xp.asarray(count)[:, None]
        place = xp.arange(most)[None]
        table = flat[xp.minimum(first + place, len(flat) - 1)]
        return xp.where((place < ends).reshape(*table.shape[:2], *[1] * (flat.ndim - 1)), table, 0.0)

    def flat_of(self, table: Any, axis: int) -> Any:
        """Turn tables (p, m, ...) into concatenated per-point values, without padding."""
        flat = table.reshape(-1, *table.shape[2:])
        if (self.places[axis].count == self.shape[axis]).all():
            return flat
        return flat[namespace(table).asarray(np.flatnonzero(self.inside(axis)))]

    def inside(self, axis: int) -> Any:
        """Mask of the table entries that are points, not padding, (p, m) or (p, n)."""
        return np.arange(self.shape[axis]) < self.places[axis].count[:, None]

    def split(self, flat: Any, axis: int) -> Any:
        """Split concatenated per-point values by problem: (p, m, ...), or a list if sizes differ."""
        if not self.ragged:
            return flat.reshape(len(self), -1, *flat.shape[1:])
        ends = np.cumsum(self.places[axis].count).tolist()
        return [flat[end - k : end] for end, k in zip(ends, self.places[axis].count.tolist(), strict=True)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.ragged:
            raise ValueError("clouds of several sizes have no common array: form that of each, cloud[i]")
        return np.stack([np.asarray(self.of(i), dtype) for i in range(len(self))])


def is_list(value: Any) -> bool:
    """Tell whether a value is a list of arrays, or a nested tensor."""
    return isinstance(value, (list, tuple)) or getattr(value, "is_nested", False)


def is_many(value: Any) -> bool:
    """Tell whether points form many clouds: (p, m, d), a list of clouds or a nested tensor."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and (is_data_set(value[0]) or np.ndim(value[0]) == 2)
    if is_data_set(value):
        return False
    return bool(getattr(value, "is_nested", False)) or np.ndim(value) == 3


def in_a_row(labels: Any) -> Any:
    """Concatenate the labels of all clouds, from a list of arrays or a table (p, m)."""
    if not (is_list(labels) and np.ndim(labels[0])):
        return np.ravel(host(labels))
    return np.concatenate([np.ravel(host(x)) for x in labels])


def array_in(value: Any) -> Any:
    if type(value).__module__ == "torch":
        return value.detach().cpu().numpy()
    return host(value)


def as_flat(value: Any, name: str, starts: Any, read: Callable[[Any], Any]) -> tuple[Any, Places]:
    """Concatenate the points of all clouds, and return them with their places; one cloud may serve all problems.

    ``read`` makes an array of a value; points on a device are checked to be finite when their range is found.
    """
    if starts is not None:
        starts = np.asarray(host(starts))
        points = as_points(value, name, read is there)
        rising = starts.ndim == 1 and len(starts) > 1 and starts.dtype.kind in "iu" and (np.diff(starts) > 0).all()
        if not (rising and starts[0] == 0 and starts[-1] == len(points)):
            raise ValueError(f"starts of {name} must be integers that rise from 0 to its {len(points)} points")
        return points, Places(starts[:-1].astype(np.int64), np.diff(starts).astype(np.int64))
    if is_list(value):
        parts = [as_points(part, f"{name}[{i}]", read is there) for i, part in enumerate(value)]
        if len({part.shape[1] for part in parts}) != 1:
            raise ValueError(f"{name} must hold clouds of points with equally many coordinates")
        count = np.array([len(part) for part in parts], np.int64)
        return namespace(*parts).concatenate(parts), Places(np.cumsum(count) - count, count)
    points = as_array(value, name, read)
    if points.ndim == 3 and 0 not in points.shape:
        p, m, d = points.shape
        return as_points(points.reshape(-1, d), name, read is there), Places(m * np.arange(p), np.full(p, m))
    points = as_points(points, name, read is there)
    return points, Places(np.zeros(1, np.int64), np.array([len(points)]))
