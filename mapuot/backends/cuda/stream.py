"""Launches of kernels that stream over M on the device: extrema, sums, maxima and products of rows, and entries.

Twin of src_c/streams.c; the kernels are in src_cuda/plan/stream.cu.
"""

import math
import struct
from typing import Any

import cupy as cp
import numpy as np

from ...arrays import any_of
from ...problem.cost import Dense
from ...problem.mask import MaskedReference
from ..cpu.operator import ARRAYS
from ..records import put
from .arrays import Carrier, most_bytes
from .kernels import STORES, VIEW, Job, by_value, kernel

VIEW_WORDS = struct.Struct("2q2Q4q2Qd6q")  # of VIEW
EMPTY = np.array([[np.inf, -np.inf, 0.0, 0.0, 0.0]])  # extrema of no entries
PLAIN = {"STORE": 0, "COST": 0, "REFERENCE": 0, "MASKED": 0}  # options of kernels that read no M


def view_of(M: Any, c: Any, alpha: Any, beta: Any, reg: float) -> Any:
    """Pack the View record of stream.cu, member by member in its order; NumPy takes 12 us to set them by name."""
    if isinstance(c, MaskedReference):
        given = c.given
    else:
        given = c
    (at_M, *M_steps), (at_c, *c_steps) = map(place_of, (M, given))
    if alpha is None:
        ends = 0, 0
    else:
        ends = alpha.data.ptr, beta.data.ptr
    words = VIEW_WORDS.pack(*M.shape, at_M, at_c, *M_steps, *c_steps, *ends, 1 / reg, *(0,) * 6)
    if not isinstance(c, MaskedReference):
        return np.frombuffer(words, f"V{VIEW.itemsize}").reshape(())
    view = np.frombuffer(words, VIEW).reshape(()).copy()
    put(view["mask"], c.words())
    return by_value(view)


def place_of(array: Any) -> tuple[int, ...]:
    """Return the address of a matrix, and the strides of its rows and columns in entries."""
    if array is None:
        return 0, 0, 0
    return (array.data.ptr, *(s // array.itemsize for s in array.strides))


def stream_job(function: str, M: Any, c: Any, store: int = 0) -> Job:
    """Return the job of a kernel for arrays or costs of these dtypes."""
    cost, reference = (int(x.dtype == np.float32) for x in (M, M if c is None else c))
    options = {"STORE": store, "COST": cost, "REFERENCE": reference, "MASKED": int(isinstance(c, MaskedReference))}
    return "stream.cu", function, options


def stream(function: str, M: Any, c: Any, store: int = 0) -> Any:
    file, function, options = stream_job(function, M, c, store)
    return kernel(file, function, **options)


def parts(rows: int, columns: int, least: int = 32) -> tuple[int, int]:
    """Return the grid: blocks of 32 rows, and enough parts of ``least`` columns or more to fill the device."""
    blocks = -(-rows // 32)
    return blocks, max(1, min(-(-columns // least), 2048 // blocks))


def is_symmetric(M: Any) -> bool:
    """Tell whether a matrix on the host or device, or each in a stack on the device, equals its transpose."""
    if isinstance(M, cp.ndarray):
        return not any_of(M.swapaxes(-1, -2) != M)
    return ARRAYS.is_symmetric(M)


def extrema(M: Any, threads: int | None = None) -> tuple[Any, ...]:
    if isinstance(M, np.ndarray):
        return ARRAYS.extrema(M, threads)  # moving M would take longer
    found = [EMPTY]
    stage = Carrier()
    for _, _, rows, _ in Dense(M).blocks(most=most_bytes(M)):
        block = stage(rows)
        grid = parts(len(block), block.shape[1], 128)
        out = cp.empty((grid[0] * grid[1], 5))
        stream("extrema", block, None)(grid, (256,), (view_of(block, None, None, None, 1.0), out))
        found.append(out.get())
    if len(found) == 2:
        out = found[1]
    else:
        out = np.concatenate(found)
    low = float(out[:, 0].min())
    high = float(out[:, 1].max())
    if not math.isfinite(low):
        low, high = 0.0, 0.0
    bad, infinite, lopsided = out[:, 2:].sum(0).tolist()
    return low, high, int(bad), int(infinite), int(lopsided)


def fill_rows(out: Any, dtype: str, M: Any, c: Any, alpha: Any, beta: Any, reg: float, flush: float = 0.0) -> None:
    """Fill ``out`` on the device with c exp(alpha_i + beta_j - M_ij / reg); 0 in the padding and below ``flush``."""
    rows, columns = out.shape
    run = stream("build_kernel", M, c, STORES[dtype])
    view = view_of(M, c, alpha, beta, reg)
    run(parts(rows, columns), (256,), (view, out, np.int64(columns), np.float64(flush)))


def joined(function: str, found: Any, out: Any = None, more: bool = False) -> Any:
    """Join parts (parts, ...) of sums, or of the maxima of row_max; ``more``: include the values in ``out``."""
    if len(found) == 1 and out is None:
        return found[0]
    if out is None:
        out = cp.empty(found.shape[1:])
    if function != "row_max":
        how = 0
    elif more:
        how = 2
    else:
        how = 1
    run = kernel("stream.cu", "join_parts", **PLAIN)
    count = out.size
    sizes = np.int64(count), np.int32(len(found)), np.int32(how)
    run((-(-count // 256),), (256,), (found, *sizes, out))
    return out


def reduce_rows(function: str, M: Any, c: Any, alpha: Any, beta: Any, reg: float, outputs: int = 1) -> list[Any]:
    """Return parts of row_max or plan_sums over the rows of device matrices, for `joined`."""
    grid = parts(*M.shape)
    out = [cp.empty((grid[1], M.shape[0])) for _ in range(outputs)]
    stream(function, M, c)(grid, (256,), (view_of(M, c, alpha, beta, reg), *out))
    return out


def apply_rows(M: Any, c: Any, alpha: Any, beta: Any, reg: float, X: Any) -> Any:
    """Return the products of the rows with the columns of X."""
    m, n = M.shape
    d = X.shape[1]
    grid = parts(m, n)
    out = cp.empty((grid[1], m, d))
    view = view_of(M, c, alpha, beta, reg)
    for x0 in range(0, d, 4):
        stream("apply", M, c)(grid, (256,), (view, X, np.int64(d), np.int64(x0), out))
    return joined("apply", out)
