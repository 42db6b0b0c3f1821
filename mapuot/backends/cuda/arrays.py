"""Matrices on the device: CuPy arrays and DLPack tensors are used in place, numpy arrays are sent in row blocks."""

import dataclasses
import itertools
from typing import Any

import numpy as np

try:
    import cupy as cp
except ImportError as error:  # pragma: no cover
    raise ImportError("backend 'cuda' needs CuPy: pip install 'mapuot[gpu]', for CUDA 12 'mapuot[gpu12]'") from error

from ...penalties import F64
from ...problem.points import PAIR_BYTES, PointCosts, SortedCosts, SquareRounding
from ...problem.problem import Problem
from ...problem.settings import POINTS
from ...problem.side import Side
from ...problem.validate import check_columns
from . import vectors
from .kernels import ITEMSIZE, STORES, kernel
from .settings import DEVICE_ARRAYS
from .vectors import pinned

COSTS = 64  # rows and columns that a block of point_costs.cu makes
CANDIDATES = 8  # points of y; point_tables.cu makes one of them the origin of a product
FACTORS = 32  # points a block of point_tables.cu, to compute their factors
MANY = 16  # dimensions; from here on a matrix product may form costs faster than differences do
TALL = 512  # dimensions; from here on a few points take .18 ms and more by differences, as a product does (H200)
FEW = 12  # dimensions; up to here a pass over 20,000 points is faster than a pass that reads their K


def need_device() -> None:
    """Raise a RuntimeError with one clear sentence on a machine without a GPU or driver."""
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"backend 'cuda' needs a GPU and its driver, found none ({error})") from error
    if count == 0:
        raise RuntimeError("backend 'cuda' needs a GPU, found none")


def free_memory(enough: int) -> int:
    """Return the free bytes of CuPy's pool, plus the free bytes of the device if the pool has less than ``enough``."""
    free: int = cp.get_default_memory_pool().free_bytes()
    if free < enough:
        free += cp.cuda.runtime.memGetInfo()[0]
    return free


def rows_at_once(M: Any) -> int:
    """Return the rows of a block: all rows of a matrix on the device, else as many as `DEVICE_ARRAYS` allows."""
    m, n = M.shape
    if isinstance(M, cp.ndarray):
        most: int = m
    else:
        most = max(1, DEVICE_ARRAYS.block_bytes // (n * M.dtype.itemsize))
    return most


def block_bytes(M: Any, rows: int) -> int:
    """Return the bytes of blocks that need memory on the device: one block of an array, two if rows are made there."""
    if M is None or isinstance(M, cp.ndarray) or not any(getattr(M, "strides", (1,))):
        return 0
    blocks = 1 if isinstance(M, np.ndarray) else 2
    return int(min(blocks * rows, M.shape[0]) * M.shape[1] * M.dtype.itemsize)


def need_memory(kernel: int, precision: str, beside: int = 0) -> None:
    """Raise a MemoryError, before any allocation, unless K and ``beside`` further bytes fit."""
    needed = kernel + beside
    free = free_memory(needed)
    if needed <= free:
        return
    smaller = [p for p in STORES if kernel * ITEMSIZE[p] / ITEMSIZE[precision] + beside <= free]
    names = {"float64": "float64", "float32": "mixed"}
    if smaller:
        advice = f"; precision {names[smaller[0]]!r} would fit"
    else:
        advice = "; no precision of K fits"
    raise MemoryError(f"K needs {needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free{advice}")


def asarray(x: Any) -> Any:
    """Return numpy arrays as they are; turn device arrays and DLPack tensors into CuPy arrays without a copy."""
    if isinstance(x, cp.ndarray):
        array = x
    else:
        need_device()
        if hasattr(x, "__cuda_array_interface__"):
            array = cp.asarray(x)
        elif hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] == 2:
            array = cp.from_dlpack(x)
        else:
            return np.asarray(x)
    if array.device.id != (here := cp.cuda.runtime.getDevice()):
        raise ValueError(f"arrays must be on the current device {here}, got one on {array.device.id}")
    return array


def to_numpy(x: Any) -> Any:
    x = asarray(x)
    return x.get() if isinstance(x, cp.ndarray) else x


def on_device(*vectors: Any) -> list[Any]:
    count = sum(map(len, vectors))
    room = cp.empty(count)
    room.set(np.concatenate(vectors))
    ends = itertools.accumulate(map(len, vectors))
    return [room[end - len(x) : end] for x, end in zip(vectors, ends, strict=True)]


def to_device(problem: Problem) -> Problem:
    """Return the problem with the vectors of its sides, and its sorted points, on the device.

    Over ranks the vectors stay on the host, which sums them over the ranks.
    """
    sides = problem.rows, problem.cols
    if problem.ranks.size == 1:
        rows, cols = map(held_side, sides)
    else:
        rows, cols = sides
    cost = problem.cost
    if isinstance(cost, SortedCosts):
        cost = cost.placed(vectors)
    return dataclasses.replace(problem, cost=cost, rows=rows, cols=cols)


def held_side(side: Side) -> Side:
    """Copy a side to the device; its scalar properties stay as computed on the host."""
    if side.there or isinstance(side.weight, cp.ndarray):
        return side.there or side
    if side.upper is None:
        upper = None
    else:
        upper = vectors.asarray(side.upper)
    there = dataclasses.replace(side, weight=vectors.asarray(side.weight), rho=vectors.asarray(side.rho), upper=upper)
    return side.share_numbers(there)


def most_bytes(M: Any) -> int | None:
    """Return the bytes of M to move to the device at once; None if M is there."""
    if isinstance(M, cp.ndarray):
        return None
    return DEVICE_ARRAYS.block_bytes


class Room:
    """Vectors one behind the other on the device, with a pinned buffer of the same layout on the host."""

    def __init__(self, sizes: dict[str, int]) -> None:
        ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
        self.at = {name: slice(end - sizes[name], end) for name, end in ends.items()}
        total = sum(sizes.values())
        self.there = cp.zeros(total)
        self.here = pinned(total)

    def __getitem__(self, name: str) -> F64:
        part: F64 = self.here[self.at[name]]
        return part

    def send(self, **vectors: F64) -> None:
        """Send vectors that are neighbours in the buffer; a shorter vector fills only the beginning of its part.

        The copy is asynchronous: it has ended after the next `bring`.
        """
        for name, x in vectors.items():
            self[name][: len(x)] = x
        part = self.span(*vectors)
        self.there[part].set(self.here[part], stream=cp.cuda.get_current_stream())

    def bring(self, *names: str) -> None:
        """Read vectors that are neighbours in the buffer into pinned memory, once the device has filled them."""
        part = self.span(*names)
        self.there[part].get(out=self.here[part])

    def span(self, *names: str) -> slice:
        return slice(self.at[names[0]].start, self.at[names[-1]].stop)

    def address(self, name: str) -> int:
        return int(self.there[self.at[name]].data.ptr)


class Carrier:
    """Brings M to the device block by block, through one buffer; the first block is the largest. Makes costs of points.

    The next block is copied when the stream has read the last: a second buffer would take memory from K.
    """

    room: Any = None
    columns: Any = None

    def __call__(self, M: Any) -> Any:
        if isinstance(M, PointCosts):
            if self.columns is None:
                if M.here:
                    self.columns = M.here[1]
                else:
                    self.columns = cp.asarray(M.columns)
            return costs(M, columns=self.columns)
        if isinstance(M, cp.ndarray):
            return M
        if not any(M.strides):
            return cp.broadcast_to(cp.asarray(M[:1, :1]), M.shape)
        if self.room is None or self.room.size < M.nbytes:
            self.room = None
            self.room = cp.empty(M.nbytes, np.uint8)
        block = self.room[: M.nbytes].view(M.dtype).reshape(M.shape)
        stream = cp.cuda.get_current_stream()
        block.set(np.ascontiguousarray(M), stream=stream)
        stream.synchronize()  # the source of M may write its next rows to the same memory
        return block


def form_bytes(cloud: PointCosts) -> int:
    """Return how many bytes a formed matrix of points and its K may take if the caller sets no limit.

    For many points in few dimensions, a pass that makes the costs is faster than a pass that reads K.
    """
    if cloud.dim <= FEW and cloud.size > POINTS.auto_entries:
        return 0
    return free_memory(4 * PAIR_BYTES * cloud.size) // 4


def costs(cloud: PointCosts, threads: int | None = None, columns: Any = None) -> Any:
    """Form the cost matrix of points in float64; ``columns``: coordinates of y, if they are on the device.

    Inner products of many coordinates are one product of matrices, on tensor cores.
    """
    (m, n), (metric, scale) = cloud.shape, cloud.core
    rows, own = cloud.here or (cloud.rows, cloud.columns if columns is None else columns)
    if metric.product and cloud.dim >= MANY:
        return cp.ascontiguousarray((cp.asarray(rows) * (metric.product * scale) @ cp.asarray(own))[:, :n])
    return tables(rows, cp.asarray(own), metric.number, scale, cp.empty((m, n)))


def formed(cloud: PointCosts, threads: int | None = None) -> tuple[Any, Any]:
    """Form the cost matrix of points; return it and a bound on its rounding in excess of the rounding of `costs`.

    In many dimensions one float64 product of matrices makes squared distances |x|^2 + |y|^2 - 2 <x, y>, relative to a
    point of y in the midst of some others. The host waits for no number of the points.
    Let u = 2^-53 and s = max |x|^2 + max |y|^2. A sum of d + 2 terms of size 2 s errs by (d + 2) u 2 s; the squares err
    by (d + 1) u s. Coordinates err by 6.3 u sqrt(s), which adds 18 u s; their factor adds 8 u s.
    """
    (m, n), d, (metric, scale) = cloud.shape, cloud.dim, cloud.core
    if not metric.square or cloud.bits or d < MANY or (d < TALL and m * n * d < DEVICE_ARRAYS.many_terms):
        return costs(cloud), 0.0
    rows, columns = map(cp.asarray, cloud.here or (cloud.rows, cloud.columns))
    options = {"STORE": 0, "COST": 0}
    ld, count, dim = map(np.int64, (columns.shape[1], n, d))
    parts = -(-d // 256)
    some, apart, sizes = cp.empty((CANDIDATES, d)), cp.empty(parts * CANDIDATES * (CANDIDATES - 1) // 2), cp.empty(2)
    left, right = cp.empty((m, d + 2)), cp.empty((d + 2, n))
    kernel("point_tables.cu", "take_candidates", **options)(
        (parts,), (256,), (columns, ld, count, dim, some, apart, sizes)
    )
    given = rows, columns, ld, np.int64(m), count, dim, some, apart, np.int32(parts), np.float64(metric.scaled(scale))
    run = kernel("point_tables.cu", "square_factors", **options)
    run((-(-n // FACTORS) + -(-m // FACTORS),), (1024,), (*given, left, right, sizes))
    return cp.matmul(left, right), SquareRounding(2.0**-53 * (3 * d + 40), sizes)


def tables(
    rows: Any, columns: Any, metric: int, scale: float, out: Any, places: Any = None, factors: Any = None,
    plan: Any = None,
) -> Any:  # fmt: skip
    """Fill (m, n) costs, or (p, m, n) for many clouds; ``places``, (p, 4): first row, rows, first column, columns.

    ``factors``: (p,) factors of the costs of each problem. ``plan``: row exponents (p, m), column exponents (p, n) and
    reg of each problem, (p,); fill plans instead of costs.
    """
    m, n = out.shape[-2:]
    grid = (1, *out.shape)[-3]
    run = kernel("point_costs.cu", "point_costs", METRIC=metric, PLAN=int(plan is not None), STORE=0)
    sizes = tuple(map(np.int64, (1, columns.shape[1], m, n, len(columns))))
    points = cp.ascontiguousarray(cp.asarray(rows)), columns
    nowhere = np.uint64(0)
    own = (nowhere if x is None else x for x in (places, factors))
    last = np.float64(scale), out, *own, *(plan or (nowhere,) * 3)
    run((-(-m // COSTS) * -(-n // COSTS), grid), (256,), (*points, *sizes, *last))
    return out


def clouds_tables(clouds: Any, plan: Any = None, shape: tuple[int, int] | None = None) -> Any:
    """Form the costs, or plans, of many clouds, (p, m, n); a smaller cloud is padded with its last point.

    ``shape``: (m, n), by default that of the largest cloud.
    """
    metric, scale = clouds.whole.core
    columns = cp.ascontiguousarray(clouds.whole.columns)
    out = cp.empty((len(clouds), *(shape or clouds.shape)))
    factors = None if clouds.factors is None else cp.asarray(clouds.factors)
    return tables(clouds.whole.rows, columns, metric.number, scale, out, clouds.places_there, factors, plan)


def as_columns(X: Any, length: int, name: str) -> tuple[Any, bool]:
    """Return X as (length, d) float64 on the device, in C order, and whether it was one vector."""
    if isinstance(X, np.ndarray) and X.dtype == np.float64 and X.flags.c_contiguous:
        check_columns(X, length, name)
        there = on_device(X.ravel())[0]
        return there.reshape(len(X), *X.shape[1:] or (1,)), X.ndim == 1
    X = cp.asarray(asarray(X), dtype=np.float64)
    check_columns(X, length, name)
    return cp.ascontiguousarray(X[:, None] if X.ndim == 1 else X), X.ndim == 1
