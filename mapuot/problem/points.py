"""Costs between the points of two clouds, without forming the cost matrix.

The metrics are metrics of SciPy's ``cdist``, and the Wasserstein-Fisher-Rao cost of Chizat, Peyre, Schmitzer, Vialard
2018. C side: src_c/points.h.
"""

import copy
import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import PAD, any_of, arithmetic, host, import_cupy, is_on_device, laid, largest, longest, namespace, taken
from ..contract import Backend
from ..errors import shown
from ..penalties import F64
from ..ranks import ALONE, Ranks
from ..tensors import array_of, is_tensor
from .cost import Cost, Dense, Range, Tell
from .labels import coordinates, signs
from .metrics import METRICS, Metric
from .parts import Parts
from .settings import POINTS
from .validate import as_array, as_choice, as_float, as_numbers, as_positive, check_kind, copied_to_host

FORM_BYTES = 1 << 30  # host memory that "auto" allows for a formed matrix and its K
PAIR_BYTES = 16  # bytes of a pair in a formed matrix and in its K
EACH = 1024  # points that a device thread reads
FEW_DIMENSIONS = 4  # up to this dimension boxes around all points bound the cost range well
LEAST_NORMAL = float(np.finfo(np.float64).tiny)
MADE = ("x", "y", "rows", "columns")  # made on first use, for sorted points or points on a GPU


class KeptBoxes(NamedTuple):
    """Kept pairs of points, by boxes: the runs of columns kept for each box of rows."""

    unit: int  # points of a box
    first: Any  # (boxes + 1,) int64: index of the first run of a box
    run: Any  # start and end of each run, int32
    width: int  # largest number of columns of a box
    nats: float  # a pair of boxes is skipped if its bound is below e^-nats of the product of their masses
    share: float  # kept share of the pairs


class SquareRounding(NamedTuple):
    """Bound on the rounding of squared distances by a product: ``rate`` times the sum of two numbers on a device.

    A solve on the device reads the numbers there, so that the host need not wait for them.
    """

    rate: float
    sizes: Any  # (2,): the largest squares of both clouds, relative to the origin of the product

    def __float__(self) -> float:
        return self.rate * float(host(self.sizes).sum())


class PointCosts(Cost):
    """The `Cost` of a `PointCloud`; every pass computes it from coordinates.

    Points given on a GPU in the core's coordinates stay there, as ``there``; host code gets a copy on first use.
    """

    dim: int  # of the points
    middle: F64  # (d,), the centre of y, if there are weights
    held = at_hand = True
    operator = "points"
    remade = True
    on_device = False  # whether points came from a GPU: "auto" then solves there
    there: tuple[Any, Any] | None = None  # (rows, columns) on a device
    x: Any  # (m, d)
    y: Any  # (n, d)
    rows: Any  # (m, d)
    columns: Any  # (d, n padded)
    alone = False  # whether x and y are the same points
    unit = 0  # points of a box, if they are sorted into boxes
    label = 0.0  # the coordinate of a label
    before = 0  # index of the first row in the whole cloud
    bits = 0  # number of trailing coordinates that encode labels, if unequal labels are forbidden
    apart = 0  # number of leading coordinates for addends, with product -1: (-r_i, 1) of a row, (1, -c_j) of a column

    def __init__(
        self, x: Any, y: Any = None, metric: str = "sqeuclidean", scale: float = 1.0, weights: Any = None,
        truncate: Any = "auto", form: Any = "auto", labels: Any = None, across: Any = None, addends: Any = None,
    ) -> None:  # fmt: skip
        self.metric = as_choice(metric, "metric", METRICS)
        self.scale = as_positive(scale, "scale")
        self.on_device = any(map(is_on_device, (x, y)))
        self.weights = weights
        stays = self.on_device and labels is None and self.has_given_coordinates
        apart = None
        points = [self._read(x, "x", stays)]
        points.append(points[0] if y is None or y is x else self._read(y, "y", stays))
        if points[0].shape[1] != points[1].shape[1]:
            raise ValueError(f"x and y must have equally many columns, got {points[0].shape[1]}, {points[1].shape[1]}")
        self.dtype = np.dtype(np.float32 if all(p.dtype == np.float32 for p in points) else np.float64)
        if weights is not None:
            weights = as_weights(weights, points[0].shape[1])
        if labels is not None:
            apart, more = self._labelled(points, labels, across)
            if weights is not None:
                weights = np.append(weights, np.ones(more))
        self.truncate = as_auto(truncate, "truncate", "nats")
        self.form = as_auto(form, "form", "bytes")
        self.weights = weights
        self.alone = points[0] is points[1]
        if addends is not None:
            addends = as_addends(addends, self.metric, (len(points[0]), len(points[1])))
        if stays and self._take(points[0], points[1], addends):
            return
        x = copied(points[0])  # the caller may change x and y
        y = x if self.alone else copied(points[1])
        self.x, self.y = x, y
        if self.weights is not None:
            low, high = corners(self.y)
            self.middle = 0.5 * low + 0.5 * high  # of the columns, equal on all ranks
        rows, targets = (self._scaled(p, name) for p, name in ((self.x, "x"), (self.y, "y")))
        if addends is not None:
            self.apart = 2
            rows, targets = self._beside(rows, targets, addends)
        if apart is not None:
            self.bits = apart[0].shape[1]
            self.alone = self.alone and np.array_equal(apart[0], apart[1])
            rows, targets = (np.hstack(both) for both in zip((rows, targets), apart, strict=True))
        self._set(rows, targets)

    def _labelled(self, points: list[Any], labels: Any, across: Any) -> tuple[list[F64] | None, int]:
        """Append columns for a finite ``across`` to the points, or return columns of the core for inf."""
        metric = METRICS[self.metric]
        sizes = [*map(len, points)]
        across = as_float(across, "across", "a number, what different labels cost, or inf")
        if not across >= 0:
            raise ValueError(f"across must be >= 0, got {across}")
        if across == math.inf and not metric.product:
            return [metric.forbidding * sign for sign in signs(labels, sizes)], 0
        self.label = metric.label(across / self.scale)
        columns = coordinates(labels, sizes, self.label)
        same = points[0] is points[1]
        points[0] = np.hstack([points[0], columns[0]])
        if same and columns[0] is columns[1]:
            points[1] = points[0]
        else:
            points[1] = np.hstack([points[1], columns[1]])
        return None, columns[0].shape[1]

    @staticmethod
    def _read(value: Any, name: str, stays: bool) -> Any:
        """Return the points as an array, on the current device if ``stays``."""
        return as_points(value, name, stays)

    def _take(self, x: Any, y: Any, addends: tuple[F64, F64] | None) -> bool:
        """Copy points to tables on their device by one launch; raise if a point is not finite."""
        whole = x, y
        if addends is not None:
            self.apart = 2
            whole = self._beside(x, y, addends)
        rows, columns, odd = arithmetic(x).take_points(*whole)
        for points, name, is_odd in zip((x, y), "xy", odd, strict=True):
            if is_odd:
                check_finite(host(points), name)
        self.shape = len(x), len(y)
        self.dim = rows.shape[1]
        self.there = rows, columns
        return True

    def _scaled(self, points: F64, name: str) -> F64:
        """Return the core's coordinates: weighted, and for "cosine" scaled to unit vectors.

        Weights multiply differences from the middle; points far from the origin lose no digits.
        """
        metric = METRICS[self.metric]
        if metric.unit:
            points = points / size_of(points)
        if self.weights is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                if metric.unit or metric.product:
                    moved = points
                else:
                    moved = points - self.middle
                points = moved * metric.weighted(self.weights)
            if not np.isfinite(points).all():
                raise ValueError(f"weights must leave {name} finite, got weights up to {self.weights.max()}")
        if metric.unit:
            points = points / size_of(points)
            zero = ~(points != 0).any(1)
            if zero.any():
                which = int(np.argmax(zero))
                raise ValueError(f"{name} must hold no zero vector for metric {self.metric!r}, {which} is one")
            points = points / np.sqrt((points**2).sum(1, keepdims=True))
        scaled: F64 = namespace(points).ascontiguousarray(points)
        return scaled

    def _set(self, rows: F64, columns: F64) -> None:
        """Take points (m, d) and (n, d); row numbers of a mask begin at 0."""
        self.shape = len(rows), len(columns)
        self.dim = rows.shape[1]
        xp = namespace(rows)
        n = len(columns)
        self.before = 0
        table = laid(xp.empty((self.dim, n + -n % PAD)), columns.T)  # the core reads PAD entries at once
        if xp is np:
            self.rows, self.columns = rows, table
        else:
            self.there = rows, table

    def __getattr__(self, name: str) -> Any:
        """Copy points from the device to the host on first use, and keep the copy."""
        if name not in MADE or self.there is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "y":
            if self.alone:
                found = self.x
            else:
                found = np.ascontiguousarray(self.columns[self.apart :, : self.shape[1]].T)
        elif name == "x":
            found = np.ascontiguousarray(self.rows[:, self.apart :])
        else:
            found = host(self.there[name == "columns"])
        vars(self)[name] = found
        return found

    @property
    def root_weights(self) -> Any:
        """The factors of the coordinates that the weights of squares stand for; 1 without weights."""
        if self.weights is None:
            return 1.0
        return np.sqrt(self.weights)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, with points on the host."""
        state = dict(vars(self))
        if self.there:
            state.update({name: getattr(self, name) for name in MADE}, there=None)
        return state

    def _other(self, kind: "type[PointCosts] | None" = None, **own: Any) -> "PointCosts":
        """Return a copy of this cloud without its points, and with the attributes ``own``."""
        other = object.__new__(kind or PointCosts)
        vars(other).update({name: x for name, x in vars(self).items() if name not in (*MADE, "there", "alone")}, **own)
        return other

    @property
    def here(self) -> tuple[Any, Any] | None:
        """The coordinates of rows and columns, if they lie on the current device."""
        there = self.there
        if there and there[0].device == namespace(there[0]).cuda.Device():
            return there
        return None

    @property
    def kind(self) -> str:
        return f"points in {self.dim - self.apart - self.bits} dimensions, metric {self.metric!r}"

    @property
    def core(self) -> tuple[Metric, float]:
        """Return the (metric, scale) of ``rows`` and ``columns``: |x - y|^2 / 2 of unit vectors is 1 - cos."""
        metric = METRICS[self.metric]
        return metric, 0.5 * self.scale if metric.unit and metric.square else self.scale

    def _beside(self, rows: F64, columns: F64, addends: tuple[F64, F64]) -> tuple[F64, F64]:
        """Put the coordinates of addends, whose product costs r_i + c_j, in front of the other coordinates."""
        one = np.ones(1)
        factor = 1 / METRICS[self.metric].product
        r, c = (factor * own for own in addends)
        first = np.column_stack(np.broadcast_arrays(r, one)), np.column_stack(np.broadcast_arrays(one, c))
        xp = namespace(rows)
        found = (xp.concatenate([xp.asarray(own), z], axis=1) for own, z in zip(first, (rows, columns), strict=True))
        return tuple(found)

    @property
    def addends(self) -> tuple[F64, F64] | None:
        """Return the costs of each row and of each column, without the scale."""
        if not self.apart:
            return None
        factor = METRICS[self.metric].product
        return factor * self.rows[:, 0], factor * self.columns[1, : self.shape[1]]

    def symmetric(self, backend: Backend) -> bool:
        if self.shape[0] != self.shape[1] or self.core[0].product:  # float32 passes move the columns only
            return False
        if self.there:
            return self.alone or not any_of(self.there[0] != self.there[1][:, : self.shape[1]].T)
        return (self.x is self.y and not self.bits) or not any_of(self.rows != self.targets)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> "PointCosts":
        """Return the costs of some rows: a slice (no copy if it has no step), numbers or booleans."""
        rows = as_rows(rows, len(self))
        if self.there:
            xp = namespace(self.there[0])
            own = xp.ascontiguousarray(self.there[0][rows if isinstance(rows, slice) else xp.asarray(rows)])
            part = self._other(there=(own, self.there[1]))
        else:
            own = np.ascontiguousarray(self.rows[rows])
            part = self._other(x=self.x[rows], y=self.y, rows=own, columns=self.columns)
        part.shape = len(own), self.shape[1]
        if isinstance(rows, slice):
            part.before = self.before + rows.start
        else:
            part.before = 0
        return part

    def beside(self, points: F64, name: str) -> "PointCosts":
        """Return the costs of other points to the same columns."""
        if self.apart:
            raise NotImplementedError(f"{name} must have no costs of their own: those of new points are in no addends")
        if self.bits:
            raise NotImplementedError(f"{name} must be points of x or y where across is inf: new ones have no label")
        if points.shape[1] != self.dim:
            raise ValueError(f"{name} must have {self.dim} columns, as x and y have, got {points.shape[1]}")
        other = self._other(x=points, y=self.y)
        other._set(self._scaled(points, name), self.targets)
        return other

    def within(self) -> "PointCosts":
        if self.apart:
            raise NotImplementedError("addends are for costs between two clouds: those within one have others")
        if self.there:
            alone = self._other(type(self), alone=True)
            rows = self.there[0]
        else:
            alone = self._other(type(self), x=self.x, y=self.x, alone=True)
            rows = self.rows
        alone._set(rows, rows)
        return alone

    def read(self, i0: int, i1: int) -> "PointCosts":
        if i1 - i0 == self.shape[0]:
            return self
        return self[i0:i1]

    def sorted(self, rows: Any, cols: Any) -> "SortedCosts":
        return SortedCosts(self, rows, cols)

    @property
    def has_given_coordinates(self) -> bool:
        """Tell whether the core's coordinates are the given ones."""
        return self.weights is None and not METRICS[self.metric].unit and not self.apart and not self.bits

    @property
    def targets(self) -> F64:
        if self.has_given_coordinates:
            found: F64 = self.y
        else:
            found = self.columns[:, : self.shape[1]].T
        return found

    def coordinates(self, xp: ModuleType = np) -> tuple[Any, Any]:
        if xp is not np and (here := self.here):
            return here
        return xp.asarray(self.rows), xp.asarray(self.columns)

    def truncates(self, pairs: int) -> bool:
        """Tell whether pairs may be skipped, given the number of pairs of all ranks."""
        can_skip = METRICS[self.metric].skips
        return isinstance(self.truncate, float) or (can_skip and bool(self.truncate) and pairs >= POINTS.auto_entries)

    @property
    def cloud(self) -> "PointCosts":
        return self

    def forms(self, most: float) -> bool:
        """Tell whether the matrix may be formed; ``most``: bytes that the backend allows for "auto"."""
        if self.form != "auto":
            most = float(self.form or 0)
        return self.size * PAIR_BYTES <= most and not isinstance(self.truncate, float)

    def at(self, row: Any, column: Any) -> Any:
        metric, scale = self.core
        rows, columns = self.there or (self.rows, self.columns)
        return scale * metric.between(picked(rows, row), picked(columns.T, column))

    def transpose(self) -> "PointCosts":
        if self.there:
            turned = self._other(alone=self.alone)
            xp = namespace(self.there[0])
            rows, columns = self.there[1][:, : self.shape[1]].T, self.there[0]
            if self.apart:  # (1, -c_j) and (-r_i, 1) change places
                order = xp.asarray([1, 0, *range(2, self.dim)])
                rows, columns = (z[:, order] for z in (rows, columns))
            turned._set(xp.ascontiguousarray(rows), columns)
            return turned
        turned = self._other(x=self.y, y=self.x, alone=self.alone)
        rows = np.ascontiguousarray(self.targets)
        columns = self.rows
        if self.apart:
            own = (rows[:, 1], columns[:, 0])
            factor = METRICS[self.metric].product
            rows, columns = (z[:, self.apart :] for z in (rows, columns))
            rows, columns = self._beside(rows, columns, (factor * own[0], factor * own[1]))
        turned._set(rows, columns)
        return turned

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        """Return the range as every cost does, or bounds if reading all pairs would take longer than the solve."""
        tight = self.dim <= FEW_DIMENSIONS or self.truncates(self.size)
        metric = METRICS[self.metric]
        if tight and self.size >= POINTS.auto_entries and metric.degree > 0:
            return self.reached(self._bounds())
        return self.reached(super().range(backend, threads, tell))

    def reached(self, found: Range) -> Range:
        """Return the range ``found``; raise if a pair costs inf and the metric forbids no pairs."""
        if found[3] and METRICS[self.metric].reach == math.inf and not self.bits:
            raise ValueError(f"x and y must be so near each other that their {self.metric} costs are finite")
        return found

    def _bounds(self) -> Range:
        """Bound the costs by boxes around all points, and the largest cost also by balls around the middle of y."""
        metric, scale = self.core
        x, columns = self.there or (self.rows, self.columns)
        n_numeric = self.dim - self.bits
        x = x[:, :n_numeric]
        y = columns[:n_numeric, : self.shape[1]]
        x_low, x_high = corners(x)
        y_low, y_high = corners(y.T)
        order = metric.norm
        with np.errstate(over="ignore"):
            middle = 0.5 * (y_low + y_high)
            radii = farthest(x.T, middle, order) + farthest(y, middle, order)
            most = np.maximum(x_high - y_low, y_high - x_low)
            least = np.maximum(0.0, np.maximum(x_low - y_high, y_low - x_high))
            apart = np.array([np.linalg.norm(least, order), min(np.linalg.norm(most, order), radii * (1 + 1e-12))])
            low, high = (scale * metric.after(apart)).tolist()
        if math.isfinite(high):
            return low, high, 0, self._forbidden()
        return 0.0, 0.0, 0, self.size

    def _codes(self) -> tuple[Any, Any]:
        """Return the number of the label of each row and of each column."""
        powers = 1 << np.arange(self.bits)
        signs = self.rows[:, self.dim - self.bits :], self.columns[self.dim - self.bits :, : self.shape[1]].T
        rows, columns = ((sign > 0) @ powers for sign in signs)
        return rows, columns

    def _forbidden(self) -> int:
        """Return the number of pairs that labels forbid."""
        if not self.bits:
            return 0
        counts = (np.bincount(code, minlength=1 << self.bits) for code in self._codes())
        return self.size - int(np.prod([*counts], 0).sum())

    def parts_between(self, out_rows: Any, out_cols: Any, ranks: Ranks = ALONE) -> Any:
        """Return the points of each label as parts, if labels forbid pairs."""
        if not self.bits:
            return None
        rows, cols = self._codes()
        common = np.intersect1d(np.concatenate(ranks.all(np.unique(rows))), cols)
        found = (np.where(np.isin(z, common), np.searchsorted(common, z), len(common)) for z in (rows, cols))
        return Parts(len(common), *found)

    def error(self, largest: float) -> float:
        """Bound the rounding of a cost: d + 4 roundings, and the roundings of scaled coordinates.

        The terms of a product may cancel, so its roundings are relative to the terms, with 6 more for each product for
        weights. Other metrics bound their slope up to the largest cost. A term that passes flush to 0 counts as the
        least normal number.
        """
        metric, scale = self.core
        d = self.dim
        unit = 2.0**-53
        if metric.product:
            apart = self.apart
            rows, columns = self.there or (self.rows, self.columns)
            size = scale * abs(metric.product)
            terms = longest(rows[:, apart:].T) * longest(columns[apart:])
            if apart:
                terms += longest(rows[:, :1].T) + longest(columns[1:2])
            return float((d + 10) * unit * (size * terms) + d * size * LEAST_NORMAL + math.ulp(0.0))
        moved = self.displacement()
        if metric.norm == math.inf:
            least = 0.0
        else:
            least = (d * LEAST_NORMAL) ** (1 / metric.norm)
        if metric.square:
            slope = 2 * math.sqrt(scale) * math.sqrt(largest) + scale * moved
            return float((d + 4) * unit * largest + slope * moved + scale * d * LEAST_NORMAL + math.ulp(0.0))
        steep = metric.up_to(largest / scale)
        if not metric.degree:
            moved += (d + 4) * unit * steep.distance
        elif metric.degree > 1:
            steep = metric.up_to((steep.distance + moved + least) ** metric.degree)
        return float((d + 4) * unit * largest + scale * steep.slope * (moved + least) + math.ulp(0.0))

    def displacement(self) -> float:
        """Bound the rounding of the distance between two points that is due to their coordinates."""
        metric, _ = self.core
        d = self.dim
        unit = 2.0**-53
        if metric.unit:
            return (d + 6) * unit
        if self.weights is None:
            return 4 * unit * self.label
        numeric = slice(0, d - self.bits)
        points = self.rows[:, numeric], self.columns[numeric].T
        sizes = (np.linalg.norm(p, metric.norm, 1).max(initial=0.0) for p in points)
        return 3 * unit * float(sum(sizes))  # roundings of the difference from the middle, the root, the product

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> "PointCosts":
        """Return the cloud with points on the host: each rank passes its own block, and ranks choose a device."""
        if ranks.size == 1 or not self.there:
            return self
        return self._other(**{name: getattr(self, name) for name in MADE})

    def sum(self) -> float:
        raise TypeError("reference must be 'product', 'uniform' or a matrix, got a PointCloud")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        metric, scale = self.core
        costs = metric.matrix(self.rows, self.columns[:, : self.shape[1]].T)
        return (scale * costs).astype(dtype or np.float64, copy=False)


class FormedCosts(Dense):
    """A cloud with its formed matrix, used if passes over the matrix take less time."""

    def __init__(self, cloud: PointCosts, array: Any, rounding: Any = 0.0) -> None:
        """Hold the matrix; ``rounding``: error of its entries beyond the error of the cloud's costs.

        It is a number or a `SquareRounding`.
        """
        super().__init__(array)
        self.cloud, self.dtype = cloud, cloud.dtype  # of the plan; entries are float64
        self.rounding = rounding

    def __reduce__(self) -> Any:
        return copy.copy, (self.cloud,)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return str(self.cloud.kind)

    def symmetric(self, backend: Backend) -> bool:
        return bool(self.cloud.symmetric(backend))

    def less(self, constant: float) -> None:
        """Return None: the plan is made from the points."""

    def transpose(self) -> "FormedCosts":
        return FormedCosts(self.cloud.transpose(), self.array.T, self.rounding)

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        found: Range = self.cloud.reached(super().range(backend, threads, tell))
        self.lopsided = False  # ask the cloud: products on a GPU may round (i, j) and (j, i) differently
        return found

    def error(self, largest: float) -> float:
        return float(self.cloud.error(largest)) + float(self.rounding)


class SortedCosts(PointCosts):
    """A cloud with permuted points; the permutation is applied on first use."""

    def __init__(self, whole: PointCosts, rows: Any, cols: Any) -> None:
        own = vars(whole).items()
        vars(self).update({name: value for name, value in own if name not in (*MADE, "there")})
        self.whole = whole
        self.order = rows, cols
        self.before = 0

    def __getattr__(self, name: str) -> Any:
        """Make x, y, rows and columns on first use, and keep them."""
        if name not in MADE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows, cols = map(host, self.order)
        if name in ("x", "y"):
            found = getattr(self.whole, name).take(rows if name == "x" else cols, 0)
        elif name == "rows":
            if self.has_given_coordinates:
                found = self.x
            else:
                found = self.whole.rows.take(rows, 0)
        elif self.has_given_coordinates:  # read along the rows of y
            found = np.ascontiguousarray(padded(self.y).T)
        else:
            found = self.whole.columns.take(padded(cols), 1)
        vars(self)[name] = found
        return found

    def coordinates(self, xp: ModuleType = np) -> tuple[Any, Any]:
        if xp is np:
            return self.rows, self.columns
        if self.there is not None:
            return self.there
        rows, columns = self.whole.coordinates(xp)
        cols = taken(columns.T, self.order[1], xp).T
        return taken(rows, self.order[0], xp), laid(xp.empty(columns.shape), cols)

    def placed(self, xp: ModuleType) -> "SortedCosts":
        """Return a cloud that holds its coordinates on a device."""
        found = SortedCosts(self.whole, *self.order)
        found.unit = self.unit
        found.there = self.coordinates(xp)
        return found

    def __getitem__(self, rows: Any) -> PointCosts:
        self.coordinates()
        return super().__getitem__(rows)

    def transpose(self) -> PointCosts:
        self.coordinates()
        return super().transpose()


def softened(cloud: PointCosts, rows: Any, columns: Any) -> tuple[Any, Any]:
    """Return coordinates for boxes and clusters: labels as far apart as the points y, so that no pair costs more."""
    if not cloud.bits:
        return rows, columns
    n_numeric = cloud.dim - cloud.bits
    n = cloud.shape[1]
    low, high = corners(columns[:n_numeric, :n].T)
    far = float(np.max(high - low)) or 1.0
    rows = rows.copy()
    columns = columns.copy()
    rows[:, n_numeric:] = far * np.sign(rows[:, n_numeric:])
    columns[n_numeric:] = far * np.sign(columns[n_numeric:])
    return rows, columns


def copied(points: Any) -> Any:
    """Return the points in new memory, in float64, laid out by coordinates."""
    return laid(namespace(points).empty(points.shape).T, points.T).T


def padded(table: Any) -> Any:
    """Repeat the last entry up to a multiple of PAD, which the core reads at once."""
    behind = -len(table) % PAD
    if behind:
        return np.pad(table, ((0, behind), *[(0, 0)] * (table.ndim - 1)), mode="edge")
    return table


def farthest(points: Any, middle: F64, order: float) -> float:
    """Return the largest distance of points (d, n) from ``middle``, in blocks that fit in cache."""
    powers = order not in (1, math.inf)
    if (xp := arithmetic(points)) is not np:
        apart = np.abs(xp.asarray(points).T - xp.asarray(middle))
        most = largest(apart.max(1) if order == math.inf else (apart**order if powers else apart).sum(1))
        if powers:
            return float(most ** (1 / order))
        return most
    most = 0.0
    step = 1 << 13
    for i in range(0, points.shape[1], step):
        total: Any = 0.0
        for row, m in zip(points, middle, strict=True):
            part = np.abs(row[i : i + step] - m)
            if order == 2:
                part = part * part
            else:
                part = part**order if powers else part
            if order == math.inf:
                total = np.maximum(total, part)
            else:
                total = total + part
        most = max(most, float(np.max(total)))
    if powers:
        return float(most ** (1 / order))
    return most


def picked(points: Any, at: Any) -> Any:
    """Return some points, (..., d), on the host."""
    if (xp := arithmetic(points)) is np:
        return points[at]
    at = np.asarray(at, np.int64)
    return host(taken(points, at.ravel(), xp)).reshape(*at.shape, points.shape[1])


def size_of(points: F64) -> F64:
    """Return each point's largest coordinate, (m, 1), or 1; dividing by it keeps squares within float64."""
    size = np.abs(points).max(1, keepdims=True)
    return np.where(size > 0, size, 1.0)


def corners(points: F64) -> tuple[F64, F64]:
    """Return the least and the largest coordinates (d,) of points (m, d).

    NumPy reads rows of about 4096 numbers: rows of 3 numbers take ten times as long. On a device each thread reads EACH
    points.
    """
    m, d = points.shape
    if (xp := arithmetic(points)) is not np:
        starts = xp.asarray(np.arange(0, m, EACH))
        low, high = (host(xp.merged(ufunc, points, starts)) for ufunc in (np.minimum, np.maximum))
        return low.min(0), high.max(0)
    if not points.flags.c_contiguous:  # a view of columns
        return points.T.min(1), points.T.max(1)
    together = max(1, min(m, 4096 // d))
    whole = m // together * together
    long = points[:whole].reshape(-1, together * d)
    rest = points[whole:]
    low = long.min(0).reshape(together, d)
    high = long.max(0).reshape(together, d)
    return np.concatenate([low, rest]).min(0), np.concatenate([high, rest]).max(0)


def as_points(value: Any, name: str, stays: bool = False) -> Any:
    """Check points, (m, d), and return them on the host; with ``stays`` on the current device, numbers unchecked."""
    if stays:
        points = as_array(value, name, there)
    else:
        points = as_array(value, name, on_host)
    check_kind(points, name)
    if points.ndim != 2 or 0 in points.shape:
        if points.ndim == 1:
            cure = f": points on a line are {name}[:, None]"
        elif points.ndim == 3 and points.shape[2] in (3, 4):
            cure = f": the pixels of an image, as points, are {name}.reshape(-1, {points.shape[2]})"
        else:
            cure = ""
        raise ValueError(f"{name} must be a non-empty matrix of points (m, d), got shape {points.shape}{cure}")
    if not stays:
        check_finite(points, name)
    return points


def on_host(value: Any) -> Any:
    """Return an array on the host."""
    if is_tensor(value):
        value = array_of(value)
    return copied_to_host(value)


def check_finite(points: Any, name: str) -> None:
    finite = np.isfinite(points).all(1)
    if not finite.all():
        raise ValueError(f"{name} must be finite, got NaN or inf in point {int(np.argmin(finite))}")


def there(value: Any) -> Any:
    """Return an array on the current device; a tensor is detached."""
    cupy = import_cupy()
    if is_tensor(value):
        value = array_of(value)
    array = cupy.asarray(value)
    if array.device == cupy.cuda.Device():
        return array
    return cupy.asarray(array.get())


def as_rows(value: Any, m: int) -> Any:
    """Read an index into m rows: return a slice of step 1, or row numbers."""
    if isinstance(value, slice):
        i0, i1, step = value.indices(m)
        if step == 1:
            return slice(i0, max(i0, i1))
        return np.arange(i0, i1, step)
    rows = np.asarray(host(value))
    if rows.dtype == bool and rows.shape == (m,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        allowed = f"a slice, (k,) integers or ({m},) booleans"
        raise TypeError(f"rows of a PointCloud must be {allowed}, got {shown(value)}")
    if rows.size and not (rows.min() >= -m and rows.max() < m):
        raise IndexError(f"rows of a PointCloud must be in [-{m}, {m}), got {shown(value)}")
    return rows.astype(np.int64)


def as_auto(value: Any, name: str, unit: str) -> str | float | None:
    """Check an argument that is a positive number of a unit, "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, str):
        raise ValueError(f"{name} must be 'auto', None or a number of {unit}, got {value!r}")
    return as_positive(value, name)


def as_addends(value: Any, metric: str, shape: tuple[int, int]) -> tuple[F64, F64]:
    """Check addends: a pair of finite vectors, or of one number for all points of a side."""
    if not METRICS[metric].product:
        raise ValueError(f"addends must be None but for metric 'inner', got some with {metric!r}")
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"addends must be a pair of vectors (m,) and (n,), got {shown(value)}")
    told = "a finite number or ({},) of them"
    both = ((as_numbers(host(z), f"addends[{k}]", told.format(n), (), (n,)), n)
            for k, (z, n) in enumerate(zip(value, shape, strict=True)))  # fmt: skip
    r, c = (np.array(np.broadcast_to(z, (n,)), np.float64) for z, n in both)
    return r, c


def as_weights(value: Any, d: int) -> F64:
    weights = as_numbers(value, "weights", f"{d} finite numbers >= 0, not all 0", (d,), least=0.0)
    if not weights.any():
        raise ValueError(f"weights must be {d} finite numbers >= 0, not all 0, got {value!r}")
    return np.array(weights, np.float64)
