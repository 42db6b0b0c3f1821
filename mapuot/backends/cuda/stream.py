"""Streams over M on the device: its extrema, sums and maxima along the rows, and the plan of given potentials.

Twin of src_c/streams.c; the kernels are in src_cuda/stream.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ...problem.cost import Dense
from ...problem.mask import Masked
from ...problem.problem import Problem
from ..cpu.stream import extrema as extrema_on_host
from ..records import put
from ..stream import StreamedPlan, runs
from .arrays import Stage, as_columns, free_memory, most_bytes, on_device
from .kernels import STORES, VIEW, Job, by_value, kernel

Stages = tuple[Stage, Stage]  # for M and c


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


def blocks_of(
    problem: Problem, i0: int = 0, i1: int | None = None, most: int | None = None, stages: Stages | None = None
) -> Iterator[tuple[int, int, Any, Any]]:
    """(k0, k1, M, c) of row blocks on the device, c None without a reference matrix.

    ``most`` rows at once; by default all where M is there. ``stages``: those of an earlier sweep.
    """
    size = most_bytes(problem.M) if most is None else most * problem.shape[1] * problem.cost.dtype.itemsize
    stage, stage_c = stages or (Stage(), Stage())
    for k0, k1, M, c in problem.blocks(i0, i1, size):
        yield k0, k1, stage(M), c.with_given(stage_c) if isinstance(c, Masked) else None if c is None else stage_c(c)


def extrema(M: Any, threads: int | None = None) -> tuple[float, float, int, int]:
    if isinstance(M, np.ndarray):
        return extrema_on_host(M, threads)  # it would take longer to move
    found = [np.array([[np.inf, -np.inf, 0.0, 0.0]])]
    stage = Stage()
    for _, _, rows, _ in Dense(M).blocks(most=most_bytes(M)):
        block = stage(rows)
        grid = parts(*block.shape)
        out = cp.empty((grid[0] * grid[1], 4))
        stream("extrema", block, None)(grid, (256,), (view_of(block, None, None, None, 1.0), out))
        found.append(out.get())
    out = np.concatenate(found)
    low, high = float(out[:, 0].min()), float(out[:, 1].max())
    low, high = (low, high) if math.isfinite(low) else (0.0, 0.0)
    return low, high, int(out[:, 2].sum()), int(out[:, 3].sum())


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


class DevicePlan(StreamedPlan):
    """A plan whose products are made on the device; they come back as numpy where M is numpy."""

    as_columns = staticmethod(as_columns)

    def back(self, x: Any) -> Any:
        return x if self.problem.cost.xp is cp else x.get()

    def over_ranks(self, x: Any) -> Any:
        return cp.asarray(self.problem.ranks.sum(x.get())) if self.problem.ranks.size > 1 else x


class PlanStream(DevicePlan):
    """The plan of given potentials, made from M in float64, block by block; numpy where M is numpy, else CuPy."""

    def __init__(self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None) -> None:
        self.problem, self.dtype = problem, problem.cost.dtype
        self.alpha, self.beta = on_device(*problem.exponents(log_u, log_v))

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        n, p = self.problem.shape[1], self.problem
        dtype, stays = self.dtype, isinstance(p.M, cp.ndarray)
        needed = stays * (out is None) * (i1 - i0) * n * dtype.itemsize
        if needed > (free := free_memory(needed)):
            text = f"{needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free: Result.rows makes fewer"
            raise MemoryError(f"{i1 - i0} rows of the plan need {text}")
        out = (cp if stays else np).empty((i1 - i0, n), dtype) if out is None else out
        for k0, k1, M, c in blocks_of(p, i0, i1):
            block = out[k0 - i0 : k1 - i0] if stays else cp.empty((k1 - k0, n), dtype)
            fill_rows(block, dtype.name, M, c, self.alpha[k0:k1], self.beta, p.reg)
            if not stays:
                block.get(out=out[k0 - i0 : k1 - i0])
        return out

    def draw(self, rows: Any, at: F64) -> tuple[Any, Any]:
        """As `Drawn.draw`, a warp for each pair, which makes its row as it adds it up."""
        (m, n), here = self.problem.shape, self.problem.cost.xp is cp
        order = slice(None) if here else np.argsort(rows, kind="stable")
        rows = rows[order].astype(np.int64)
        wanted, at = on_device(rows.view(np.float64), at[order])
        wanted, found = wanted.view(np.int64), cp.empty(len(rows), np.int64)
        for i0, i1 in [(0, m)] if here else runs(np.unique(rows), n):
            for k0, k1, M, c in blocks_of(self.problem, i0, i1):
                some = slice(None) if here else slice(*np.searchsorted(rows, (k0, k1)))
                if count := len(rows[some]):
                    view = view_of(M, c, self.alpha[k0:k1], self.beta, self.problem.reg)
                    sizes = np.int64(k0), np.int64(count)
                    stream("draw", M, c)((-(-count // 8),), (256,), (view, wanted[some], at[some], *sizes, found[some]))
        if here:
            return wanted, found
        given = np.empty((2, len(rows)), np.int64)
        given[:, order] = rows, found.get()
        return given[0], given[1]

    def block_product(self, M: Any, c: Any, alpha: Any, beta: Any, X: Any) -> Any:
        (m, n), d = M.shape, X.shape[1]
        grid = parts(m, n)
        out, view = cp.empty((grid[1], m, d)), view_of(M, c, alpha, beta, self.problem.reg)
        for x0 in range(0, d, 4):
            stream("apply", M, c)(grid, (256,), (view, X, np.int64(d), np.int64(x0), out))
        return out.sum(0)

    def product(self, X: Any, turned: bool) -> Any:
        m, n = self.problem.shape
        out = cp.zeros((n if turned else m, X.shape[1]))
        for i0, i1, M, c in blocks_of(self.problem):
            if turned:
                out += self.block_product(M.T, None if c is None else c.T, self.beta, self.alpha[i0:i1], X[i0:i1])
            else:
                out[i0:i1] = self.block_product(M, c, self.alpha[i0:i1], self.beta, X)
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        (m, n), reg = self.problem.shape, self.problem.reg
        row, col, cost = cp.empty(m), cp.zeros(n), 0.0
        for i0, i1, M, c in blocks_of(self.problem):
            row[i0:i1], paid = reduce_rows("plan_sums", M, c, self.alpha[i0:i1], self.beta, reg, 2)
            turned = None if c is None else c.T
            col += reduce_rows("plan_sums", M.T, turned, self.beta, self.alpha[i0:i1], reg, 2)[0]
            cost += float(paid.sum())
        return cost, row.get(), col.get()
