"""Calls of the C core: aligned memory, pointers, matrices, thread pools and status codes."""

import functools
import itertools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...arrays import PAD
from ...errors import shown
from ...penalties import F64
from ...problem.cost import Cost
from ...problem.mask import MaskedReference
from ...problem.points import KeptBoxes, PointCosts
from ...problem.settings import BLOCKS
from ...problem.sparse import Sparse
from ...processor import core_count, default_threads, isa
from ...threads import each, kept_thread
from ..records import put
from ..settings import CALLS

TILE = 8
EXP_WORK = 16  # multiply-adds that take as long as one exponential
SCALARS = int(lib.mapuot_scalars())
DTYPES = {"float64": lib.MAPUOT_F64, "float32": lib.MAPUOT_F32}
CODES = {"d": lib.MAPUOT_F64, "f": lib.MAPUOT_F32}  # by the character of a dtype: its name takes numpy 5 us


pointer = functools.partial(ffi.from_buffer, "double *")  # .ctypes.data costs 1 us more, and a solve takes 40 pointers


def set_isa(name: str) -> None:
    """Lower the instruction set, or restore the best with "auto" (as MAPUOT_ISA does at start)."""
    if lib.mapuot_set_isa(name.encode()) != 0:
        raise ValueError(f"isa must be one that this machine has, got {name!r} where {isa()!r} is in use")


def check(status: int) -> int:
    """Turn the negative codes of the core into exceptions."""
    if status < 0:
        if status == lib.MAPUOT_NO_MEMORY:
            raise MemoryError("out of memory")
        raise RuntimeError("bad argument")
    return status


def interruptible(call: Callable[[Any], int], work: float) -> int:
    """Return ``check(call(stop))``; run a long call in another thread, so that Ctrl-C in this one can set ``stop``."""
    if work < CALLS.work or threading.get_ident() != threading.main_thread().ident:
        return check(call(ffi.NULL))
    stop = ffi.new("int32_t *")
    found = list[int]()

    def end() -> None:
        stop[0] = 1

    each(lambda _: found.append(call(stop)), [None], end, start=kept_thread)
    return check(found[0])


def call_bytes(pool: Any, cost: Cost, d: int = 1) -> int | None:
    """Return how many bytes of M a call may read if it makes an exponential and d products of each entry; None: all.

    The limit counts operations and not seconds: so the order of the sums in a block is fixed, and results are
    reproducible bit for bit.
    """
    threads = lib.mapuot_pool_threads(pool)
    each = EXP_WORK + d
    if cost.size * each <= CALLS.work * threads and cost.held:
        return None
    rows = max(1, CALLS.work // (each * cost.shape[1] * TILE)) * TILE * threads
    most = rows * cost.shape[1] * int(cost.dtype.itemsize)
    if cost.held:
        return most
    return min(most, BLOCKS.cost_bytes)


def padded(n: int) -> int:
    return -(-n // PAD) * PAD


def empty(count: int, dtype: Any = np.float64) -> Any:
    """Return an uninitialised vector aligned to 64 bytes; its memory is not touched."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(count * itemsize + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + count * itemsize].view(dtype)


def zeros(count: int) -> F64:
    vector: F64 = empty(count)
    vector[:] = 0.0
    return vector


def vectors(*lengths: int) -> list[F64]:
    """Return vectors of zeros aligned to 64 bytes in one allocation: five allocations cost a small solve 40 us."""
    *starts, total = itertools.accumulate(map(padded, lengths), initial=0)
    block = empty(total)
    block.fill(0.0)
    found = []
    for start, length in zip(starts, lengths, strict=True):
        found.append(block[start : start + length])
    return found


def matrix(array: Any, kept: KeptBoxes | None = None) -> Any:
    """Fill a mapuot_matrix from a 2-D array, points, stored pairs or a masked reference; leave it empty for None.

    ``kept``: the pairs of points that count, where some are skipped.
    """
    view = ffi.new("mapuot_matrix *")
    if isinstance(array, MaskedReference):
        put(view.mask, array.words())
        array = array.given
    if isinstance(array, PointCosts):
        points, (metric, scale) = view.points, array.core
        points.x = pointer(array.rows)
        points.y = pointer(array.columns)
        points.d, points.ld = array.columns.shape
        points.metric, points.scale = metric.number, scale
        if kept is not None:
            points.kept.rows, points.kept.before, points.kept.width = kept.unit, array.before, kept.width
            points.kept.first = ffi.from_buffer("int64_t *", kept.first)
            points.kept.run = ffi.from_buffer("int32_t *", kept.run)
    elif isinstance(array, Sparse):
        view.data = ffi.from_buffer("void *", array.data)
        view.dtype = CODES[array.dtype.char]
        view.start = ffi.from_buffer("int64_t *", array.start)
        view.column = ffi.from_buffer("int32_t *", array.column)
    elif array is not None:
        view.data = ffi.cast("void *", array.__array_interface__["data"][0])
        rows, columns = array.strides
        view.row_stride = rows // array.itemsize
        view.col_stride = columns // array.itemsize
        view.dtype = CODES[array.dtype.char]
    return view[0]


def split(X: F64, count: int) -> Any:
    """Label the rows of X by 0 ... count - 1, a power of 2: median splits along the widest column."""
    X, label, order = np.ascontiguousarray(X), np.empty(len(X), np.int64), np.empty(len(X), np.int64)
    check(
        lib.mapuot_split(
            *X.shape, pointer(X), count, ffi.from_buffer("int64_t *", order), ffi.from_buffer("int64_t *", label)
        )
    )
    return label


def pool_for(threads: int | None, entries: int) -> Any:
    """Choose a pool of the process: one thread for small problems unless ``threads`` is given."""
    if threads is None:
        threads = default_threads(entries)
    if threads == 1:
        return SERIAL
    return pool_of(threads)


@functools.lru_cache(maxsize=4)
def pool_of(threads: int) -> Any:
    """Make a pool and keep it: its threads sleep on cores of their own; new ones start on the caller's."""
    pool = lib.mapuot_pool_new(threads, core_count())
    if pool == ffi.NULL:
        raise MemoryError(f"threads: could not start {threads} threads")
    return ffi.gc(pool, lib.mapuot_pool_free)


os.register_at_fork(after_in_child=pool_of.cache_clear)  # a forked child inherits no threads
asked = os.environ.get("MAPUOT_ISA") or "auto"
if asked not in ("auto", isa()):
    warnings.warn(
        f"MAPUOT_ISA must be auto, scalar, avx2 or avx512, as this machine has it, got {shown(asked)}: {isa()} is used",
        RuntimeWarning,
        stacklevel=2,
    )
SERIAL = ffi.gc(lib.mapuot_pool_new(1, 1), lib.mapuot_pool_free)  # has no threads and no state: all callers share it
