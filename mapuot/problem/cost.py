"""Kinds of cost: an array (`Dense`), rows of a function or a file (`Streamed`), or points (points.py).

A cost yields its rows in blocks, (i0, i1, M, c), beside the same rows of a reference matrix c, which is a cost, too. A
matrix in memory is one block and is not copied. Any other cost comes in blocks of ``BLOCKS.cost_bytes``, so that a cost
larger than memory takes only the memory of its K. All readers of M use this interface; a new kind of cost is a class.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import host, namespace
from ..contract import Backend
from ..penalties import F64
from ..ranks import ALONE, Ranks, own_rows
from .settings import BLOCKS

LANDMARKS = 16  # rows (columns) of M that serve as features of its columns (rows)
RANGE_BYTES = 1 << 28  # bytes of one read of the range: Ctrl-C waits up to 30 ms
DEVICE_RANGE_BYTES = 1 << 34  # the same on a device: up to 5 ms


Range = tuple[float, float, int, int]  # smallest, largest finite entry, number of NaN or -inf, of +inf
Blocks = Iterator[tuple[int, int, Any, Any]]  # (k0, k1, rows of M, rows of c or None)
Tell = Callable[[int], Any] | None  # called with the number of rows of each block that was read


class Cost:
    """Interface of a cost: a matrix (m, n) of float32 or float64."""

    ndim = 2
    held = False  # whether it is one array, which a backend reads in place
    operator = "tiles"  # source of K in a pass: stored "tiles" or "pairs", "points", or "products" along axes
    remade = False  # whether every pass computes the entries, which is faster than reading a stored K
    cloud: Any = None  # the points (`PointCosts`), for costs between points
    pairs: Any = None  # the cost itself, if it stores some pairs only (`Sparse`)
    lopsided = False  # whether it is known to be unsymmetric
    wide = False  # whether passes are always float64
    at_hand = False  # whether ``at`` can return single entries
    shape: tuple[int, int]
    dtype: Any
    read: Callable[[int, int], Any]  # the rows i0 to i1 as an array
    at: Callable[[Any, Any], Any]  # these entries on the host
    transpose: Callable[[], Any]
    own_block: Callable[[Any, Any, Ranks], Any]  # this rank's block of a whole matrix, located by its masses or None
    landmarks: Callable[[], tuple[Any, Any]]  # LANDMARKS rows and columns, the features for clustering

    @property
    def array(self) -> Any:
        """The array, or an object that ``numpy.asarray`` converts; ``Problem.M`` returns it."""
        return self

    @property
    def where(self) -> Any:
        """An array on the device of a batch's answers, or an object without a device."""
        return self.array

    @property
    def xp(self) -> Any:
        """NumPy, or CuPy if rows of the plan lie on a device."""
        return namespace(self.array)

    @property
    def kind(self) -> str:
        """Name of this kind of cost in messages; the same on all ranks."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def all_pairs(self) -> int:
        """Number of pairs, stored or not."""
        return self.shape[0] * self.shape[1]

    def symmetric(self, backend: Backend) -> bool:
        """Tell whether the matrix equals its transpose; the check stops at the first difference."""
        return False

    @property
    def turns(self) -> bool:
        """Tell whether ``transpose`` costs nothing."""
        return self.held

    def place(self, i: int, ld: int) -> int:
        """Return the index of the first entry of row i of K; a row of a dense K has ``ld`` entries."""
        return i * ld

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return host(self.read(0, self.shape[0])).astype(dtype or self.dtype, copy=False)

    def blocks(self, c: "Cost | None" = None, i0: int = 0, i1: int | None = None, most: int | None = None) -> Blocks:
        """Yield (k0, k1, rows of M, rows of c or None) over the rows i0 to i1, in blocks of ``most`` bytes of M.

        By default an array is one block, and other costs come in blocks of ``BLOCKS.cost_bytes``.
        """
        m, n = self.shape
        i1 = m if i1 is None else i1
        if self.held and most is None:
            step = max(1, m)
        else:
            step = max(1, (most or BLOCKS.cost_bytes) // (n * self.dtype.itemsize))
        for k0 in range(i0, i1, step):
            k1 = min(k0 + step, i1)
            yield k0, k1, self.read(k0, k1), None if c is None else c.read(k0, k1)

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        """Return the `Range` of all entries; low and high are 0 if none is finite."""
        low = math.inf
        high = -math.inf
        bad = infinite = 0
        there = namespace(self.array) is not np or (self.remade and backend.makes_costs)
        if there:
            most = DEVICE_RANGE_BYTES
        else:
            most = RANGE_BYTES
        for i0, i1, M, _ in Cost.blocks(self, most=most if self.held else None):
            found = backend.extrema(M, threads)
            if not self.held:
                self.note(i0, M)
            self.lopsided = any(found[4:]) and M.shape == self.shape
            if tell:
                tell(i1 - i0)
            bad += found[2]
            infinite += found[3]
            if found[2] + found[3] < M.size:
                low = min(low, found[0])
                high = max(high, found[1])
        if low <= high:
            return low, high, bad, infinite
        return 0.0, 0.0, bad, infinite

    def first(self, is_wrong: Callable[[Any], Any]) -> tuple[int, ...]:
        """Return the place of the first wrong entry; ``is_wrong`` makes a mask of costs, and at least one is wrong."""
        for i0, _, M, _ in Cost.blocks(self, most=RANGE_BYTES):
            wrong = is_wrong(host(M))
            if wrong.any():
                first, *others = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                return int(first) + i0, *map(int, others)
        raise ValueError("M holds NaN where the core makes it, and none where Python does: the core lacks this cost")

    def finite_range(self, backend: Backend, threads: int | None = None) -> Range:
        """Return the range of a reference: pairs that are not stored are 0."""
        return self.range(backend, threads)

    def note(self, i0: int, M: Any) -> None:
        """Keep the parts of M, rows from i0 on, that later calls need; ``range`` calls it for each block."""

    def error(self, largest: float) -> float:
        """Bound the rounding of an entry, given the largest entry; costs given as numbers have no rounding."""
        return 0.0

    def of(self, i: Any) -> Any:
        """Return the cost of problem i of a batch, or of some: a slice, or numbers. By default one cost serves all."""
        return self

    scalable = False  # whether `scaled` multiplies the costs of each problem of a batch

    def scaled(self, factor: Any, largest: float) -> Any:
        """Multiply the costs of each problem of a batch, at most ``largest`` in size, by its factor, (p,)."""
        raise NotImplementedError

    @property
    def flat(self) -> Any:
        """Costs of a batch, stacked along the rows."""
        return self

    def less(self, constant: float) -> "Cost | None":
        """Return the costs less a constant; None for costs that are computed, from points say."""
        return None

    def ranges(self) -> "tuple[F64, F64] | None":
        """Return the least and the largest finite cost of each problem of a batch; None: they have no constants."""
        return None

    def less_each(self, constants: F64) -> Any:
        """Return the costs of a batch, or of one problem for each constant, less a constant for each problem."""
        raise NotImplementedError

    def sum(self) -> float:
        """Add up all entries; inf if the sum is beyond float64."""
        with np.errstate(over="ignore"):
            return sum(float(M.sum(dtype="float64")) for _, _, M, _ in self.blocks())

    def flattened(self, a: Any, b: Any, reg_m: Any) -> tuple[Any, Any, Any]:
        """Return masses and penalties as vectors; a grid flattens arrays of its shape."""
        return a, b, reg_m

    def parts_between(self, out_rows: Any, out_cols: Any, ranks: Ranks = ALONE) -> Any:
        """Return the parts of M that no pair connects (`Parts`), or None if the caller must read all pairs."""
        return None

    def check_listed(self, name: str) -> None:
        """Raise if listing the plan would take too long; ``name`` is the method that lists it."""


def joint_range(found: Iterable[tuple[Range, int]]) -> Range:
    """Return the joint range of several costs; ``found`` has the range and the number of pairs of each."""
    ranges = [*found]
    seen = [x[:2] for x, pairs in ranges if x[2] + x[3] < pairs] or [(0.0, 0.0)]
    low = min(x for x, _ in seen)
    high = max(x for _, x in seen)
    return low, high, sum(x[2] for x, _ in ranges), sum(x[3] for x, _ in ranges)


class UserCost:
    """Base of `PointCloud` and `Grid`, which users pass as M; ``_cost`` is the `Cost` that the solver reads."""

    ndim = 2
    _cost: Any

    if not TYPE_CHECKING:  # so that checkers of types find unknown attributes

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("matrix", "cost_matrix", "costs", "M", "values", "to_numpy", "toarray"):
                text += ": numpy.asarray(cost) is its matrix"
            raise AttributeError(text, name=name, obj=self)

    def __init__(self, cost: Cost) -> None:
        self._hold(cost)

    def _hold(self, cost: Cost) -> None:
        self._cost, self.shape, self.size, self.dtype = cost, cost.shape, cost.size, cost.dtype
        self.ndim = cost.ndim

    def _of(self, cost: Cost) -> Any:
        """Return an object of this class with another cost."""
        other = object.__new__(type(self))
        other._hold(cost)
        return other

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<mapuot.{type(self).__name__} {' x '.join(map(str, self.shape))}: {self._cost.kind}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._cost, dtype)

    def transpose(self) -> Any:
        """Return the costs with rows and columns exchanged."""
        return self._of(self._cost.transpose())


def cost_of(M: Any) -> Any:
    """Return the `Cost` that a `PointCloud` or a `Grid` holds, and anything else as it is."""
    return M._cost if isinstance(M, UserCost) else M


class Dense(Cost):
    """An array of any strides, in memory or on a device; (p, m, n) for a batch, one matrix for each problem."""

    held = at_hand = True
    kind = "an array"
    scalable = True
    array: Any = None  # set for each object
    size = 0  # likewise
    rounding: Any = 0.0  # of its entries, beyond the rounding of the costs that they stand for

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape[-2:]
        self.size = array.shape[-2] * array.shape[-1]
        self.dtype = array.dtype

    def read(self, i0: int, i1: int) -> Any:
        if i1 - i0 == self.shape[0]:
            return self.array
        return self.array[i0:i1]

    def at(self, row: Any, column: Any) -> Any:
        """Return some entries; on a device read whole rows or columns: CuPy takes 0.4 ms to index by both."""
        if np.size(column) < np.size(row):
            few, axis = (column, 1)
        else:
            few, axis = (row, 0)
        if self.xp is np or np.size(few) > LANDMARKS:
            return host(self.array[row, column])
        lines = host(self.array.take(np.ravel(few), axis))
        place = np.arange(np.size(few)).reshape(np.shape(few))
        if axis:
            return lines[row, place]
        return lines[place, column]

    def landmarks(self) -> tuple[Any, Any]:
        rows, columns = some_of(self.shape)
        return self.array[rows], self.array[:, columns]

    def symmetric(self, backend: Backend) -> bool:
        m, n = self.shape
        # a device reads all
        if self.array.ndim == 3 and self.xp is np:
            matrices = self.array
        else:
            matrices = [self.array]
        return m == n and not self.lopsided and all(backend.is_symmetric(M) for M in matrices)

    def transpose(self) -> "Dense":
        return Dense(self.array.swapaxes(-1, -2))

    def less(self, constant: float) -> "Dense | None":
        return Dense(self.array - constant)

    def ranges(self) -> tuple[F64, F64]:
        entries = self.array.reshape(len(self.array), -1)
        finite = self.xp.where(self.xp.isinf(entries), -np.inf, entries)
        low, high = (np.asarray(host(x), np.float64) for x in (entries.min(1), finite.max(1)))
        return low, high

    def less_each(self, constants: F64) -> "Dense":
        return Dense(self.array - self.xp.asarray(constants, dtype=self.dtype)[:, None, None])

    def of(self, i: Any) -> "Dense":
        if self.array.ndim == 2:
            return self
        return Dense(self.array[i])

    def scaled(self, factor: Any, largest: float) -> "Dense":
        array = self.array * self.xp.asarray(factor, dtype=np.float64)[:, None, None]
        return RescaledCosts(array, 2.0**-53 * largest * float(np.max(factor)))

    @property
    def flat(self) -> "Dense":
        if self.array.ndim == 2:
            return self
        return Dense(self.array.reshape(-1, self.shape[1]))

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> "Dense":
        """Return the cost unchanged: each rank passes its own block."""
        return self


class RescaledCosts(Dense):
    """An array whose entries were rounded by at most ``rounding``."""

    def __init__(self, array: Any, rounding: float) -> None:
        super().__init__(array)
        self.rounding = rounding

    def error(self, largest: float) -> float:
        return float(self.rounding)

    def transpose(self) -> "Dense":
        return RescaledCosts(self.array.swapaxes(-1, -2), self.rounding)

    def of(self, i: Any) -> "Dense":
        return RescaledCosts(self.array[i], self.rounding)

    @property
    def flat(self) -> "Dense":
        if self.array.ndim == 2:
            return self
        return RescaledCosts(self.array.reshape(-1, self.shape[1]), self.rounding)


class Streamed(Cost):
    """Rows ``start`` to ``start + m`` of a matrix that is read lazily; ``numpy.asarray`` reads them all.

    ``function(i0, i1)`` returns rows of the whole matrix, (i1 - i0, n), in any real dtype. ``convert`` turns them into
    arrays of the backend: rows made on a GPU stay there. The sweep that finds the range also stores the landmarks.
    """

    noted: tuple[Any, Any] | None = None

    def __init__(
        self, function: Callable[..., Any], shape: tuple[int, int], dtype: Any, start: int = 0,
        convert: Callable[[Any], Any] = np.asarray,
    ) -> None:  # fmt: skip
        self.function, self.shape, self.start, self.convert = function, shape, start, convert
        self.dtype = held_type(dtype)

    @classmethod
    def made(cls, function: Callable[..., Any], a: Any, b: Any, ranks: Ranks, convert: Any = np.asarray) -> "Streamed":
        """Make this rank's block of a matrix given by a function; a and b determine its shape."""
        if b is None or np.size(b) == 0:
            raise ValueError("b must be given where M is a function: it tells the number of columns")
        count = 0 if a is None else len(a)
        if not ranks.sum(count):
            raise ValueError("a must be given where M is a function: it tells the number of rows")
        i0 = ranks.before(count)
        probe = convert(function(i0, i0 + min(1, count)))
        return cls(function, (count, len(b)), probe.dtype, i0, convert)

    @property
    def kind(self) -> str:
        return f"a file of {self.shape}"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "Streamed":
        i0, i1, _ = rows.indices(self.shape[0])
        shape = max(0, i1 - i0), self.shape[1]
        return Streamed(self.function, shape, self.dtype, self.start + i0, self.convert)

    def less(self, constant: float) -> "Streamed":
        function = functools.partial(read_less, self.function, self.convert, constant)
        found = Streamed(function, self.shape, self.dtype, self.start)
        found.noted = self.noted and (self.noted[0] - constant, self.noted[1] - constant)
        return found

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> "Streamed":
        return self[slice(*own_part(a, self.shape[0], ranks))]

    def blocks(self, c: Cost | None = None, i0: int = 0, i1: int | None = None, most: int | None = None) -> Blocks:
        """Yield blocks as every cost does, and check each: a second read may return NaN."""
        for k0, k1, M, c_rows in super().blocks(c, i0, i1, most):
            for block, name in ((M, "M"), (getattr(c_rows, "given", c_rows), "reference")):
                if block is not None and block.size and not block.min() > -np.inf:  # NaN is the minimum of its block
                    bad = block.size - int((block > -np.inf).sum())
                    text = f"{name} must not hold NaN or -inf, got {bad} such entries in the rows {k0} to {k1}"
                    raise ValueError(f"{text}, where there were none before")
            yield k0, k1, M, c_rows

    def note(self, i0: int, M: Any) -> None:
        rows, columns = some_of(self.shape)
        if self.noted is None:
            self.noted = np.empty((len(rows), self.shape[1])), np.empty((self.shape[0], len(columns)))
        at = (rows >= i0) & (rows < i0 + len(M))
        self.noted[0][at] = host(M[rows[at] - i0])
        self.noted[1][i0 : i0 + len(M)] = host(M[:, columns])

    def landmarks(self) -> tuple[Any, Any]:
        if self.noted is None:
            for i0, _, M, _ in self.blocks():
                self.note(i0, M)
        assert self.noted is not None
        return self.noted

    def read(self, i0: int, i1: int) -> Any:
        shape = (i1 - i0, self.shape[1])
        i0 += self.start
        i1 += self.start
        block = self.convert(self.function(i0, i1))
        if block.shape != shape:
            raise ValueError(f"M must give shape {shape} for rows {i0} to {i1}, got {block.shape}")
        if block.dtype.kind not in "fiu":
            raise TypeError(f"M must hold real numbers, got dtype {block.dtype}")
        held = namespace(block).asarray(block, dtype=self.dtype, order="C")
        if self.dtype == np.float32 and held_type(block.dtype) != np.float32 and not bool((held == block).all()):
            raise TypeError(f"costs must be of one dtype, got {self.dtype} at first, {block.dtype} in {i0} to {i1}")
        return held


def read_less(function: Callable[..., Any], convert: Callable[[Any], Any], constant: float, i0: int, i1: int) -> Any:
    return convert(function(i0, i1)) - constant


def lowered(cost: Cost, constant: float) -> Cost:
    """Return any cost less a constant; costs between points become rows that are read."""
    if not constant:
        return cost
    read = functools.partial(read_less, cost.read, np.asarray, constant)
    return cost.less(constant) or Streamed(read, cost.shape, cost.dtype)


def held_type(dtype: Any) -> Any:
    """Return the dtype of costs in memory: float32 if no digit is lost, else float64."""
    if np.dtype(dtype).name in ("float32", "float16"):
        return np.dtype(np.float32)
    return np.dtype(np.float64)


def some_of(shape: tuple[int, int]) -> list[Any]:
    """Choose some rows and some columns at random, with a fixed seed."""
    rng = np.random.default_rng(0)
    return [rng.choice(k, min(k, LANDMARKS), replace=False) for k in shape]


def as_vectors(M: Any, a: Any, b: Any, reg_m: Any) -> tuple[Any, Any, Any]:
    """Return a, b and reg_m; if M is a `Cost` of a grid or of clouds, in the shapes that the solver reads."""
    M = cost_of(M)
    if isinstance(M, Cost):
        return M.flattened(a, b, reg_m)
    return a, b, reg_m


def own_part(a: Any, total: int, ranks: Ranks) -> tuple[int, int]:
    """Return the rows [i0, i1) of this rank: as the blocks of ``a`` lie, or an even split without ``a``."""
    if a is None or np.size(a) == 0:
        given = None
    else:
        given = len(a)
    if not ranks.max(given is not None):
        return own_rows(total, ranks.rank, ranks.size)
    start = ranks.before(given or 0)
    count = ranks.sum(given or 0)
    if count != total:
        raise ValueError(f"M has {total} rows, but the blocks of a have {count}")
    return start, start + (given or 0)
