"""Launches of streams over M on the device: its extrema, sums, maxima and products along the rows, and entries.

Twin of src_c/streams.c; the kernels are in src_cuda/stream.cu.
"""

from __future__ import annotations

import math
from typing import Any

import cupy as cp
import numpy as np

from ...problem.cost import Dense
from ...problem.mask import Masked
from ..cpu.operator import extrema as extrema_on_host
from ..cpu.operator import is_symmetric as on_host
from ..records import put
from .arrays import Carrier, most_bytes
from .kernels import STORES, VIEW, Job, by_value, kernel


def view_of(M: Any, c: Any, alpha: Any, beta: Any, reg: float) -> Any:
    """The View record of stream.cu."""
    view = np.zeros((), VIEW)
    view["m"], view["n"] = M.shape
    if isinstance(c, Masked):
        put(view["mask"], c.words())
        c = c.given
    for name, array in (("M", M), ("c", c)):
        if array is not None:
            view[name] = array.data.ptr
            view[name + "_row"], view[name + "_col"] = (s // array.itemsize for s in array.strides)
    if alpha is not None:
        view["alpha"], view["beta"] = alpha.data.ptr, beta.data.ptr
    view["inv_reg"] = 1 / reg
    return by_value(view)


def stream_job(function: str, M: Any, c: Any, store: int = 0) -> Job:
    """The kernel for arrays, or costs, of these dtypes."""
    cost, reference = (int(x.dtype == np.float32) for x in (M, M if c is None else c))
    options = {"STORE": store, "COST": cost, "REFERENCE": reference, "MASKED": int(isinstance(c, Masked))}
    return "stream.cu", function, options


def stream(function: str, M: Any, c: Any, store: int = 0) -> Any:
    file, function, options = stream_job(function, M, c, store)
    return kernel(file, function, **options)


def parts(rows: int, columns: int) -> tuple[int, int]:
    """Grid of a stream: blocks of 32 rows, and enough parts of the columns to fill the device."""
    blocks = -(-rows // 32)
    return blocks, max(1, min(-(-columns // 32), 2048 // blocks))


def is_symmetric(M: Any) -> bool:
    """Tell whether a matrix, wherever it lies, is its transpose."""
    return on_host(M) if isinstance(M, np.ndarray) else bool((M == M.T).all())


def extrema(M: Any, threads: int | None = None) -> tuple[Any, ...]:
    if isinstance(M, np.ndarray):
        return extrema_on_host(M, threads)  # it would take longer to move
    found = [np.array([[np.inf, -np.inf, 0.0, 0.0, 0.0]])]
    stage = Carrier()
    for _, _, rows, _ in Dense(M).blocks(most=most_bytes(M)):
        block = stage(rows)
        grid = parts(*block.shape)
        out = cp.empty((grid[0] * grid[1], 5))
        stream("extrema", block, None)(grid, (256,), (view_of(block, None, None, None, 1.0), out))
        found.append(out.get())
    out = np.concatenate(found)
    low, high = float(out[:, 0].min()), float(out[:, 1].max())
    low, high = (low, high) if math.isfinite(low) else (0.0, 0.0)
    bad, infinite, lopsided = out[:, 2:].sum(0).tolist()
    return low, high, int(bad), int(infinite), int(lopsided)


def fill_rows(out: Any, dtype: str, M: Any, c: Any, alpha: Any, beta: Any, reg: float, flush: float = 0.0) -> None:
    """c exp(alpha_i + beta_j - M_ij / reg) into rows on the device that are padded with zeros; below ``flush`` 0."""
    rows, columns = out.shape
    run, view = stream("build_kernel", M, c, STORES[dtype]), view_of(M, c, alpha, beta, reg)
    run(parts(rows, columns), (256,), (view, out, np.int64(columns), np.float64(flush)))


def reduce_rows(function: str, M: Any, c: Any, alpha: Any, beta: Any, reg: float, outputs: int) -> list[Any]:
    """row_max or plan_sums over the rows of device matrices."""
    grid = parts(*M.shape)
    out = [cp.empty((grid[1], M.shape[0])) for _ in range(outputs)]
    stream(function, M, c)(grid, (256,), (view_of(M, c, alpha, beta, reg), *out))
    return [x.max(0) if function == "row_max" else x.sum(0) for x in out]


def apply_rows(M: Any, c: Any, alpha: Any, beta: Any, reg: float, X: Any) -> Any:
    """Products of the rows with the columns of X."""
    (m, n), d = M.shape, X.shape[1]
    grid = parts(m, n)
    out, view = cp.empty((grid[1], m, d)), view_of(M, c, alpha, beta, reg)
    for x0 in range(0, d, 4):
        stream("apply", M, c)(grid, (256,), (view, X, np.int64(d), np.int64(x0), out))
    return out.sum(0)
