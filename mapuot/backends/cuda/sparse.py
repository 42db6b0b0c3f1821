"""Sparse costs on the device: the stored pairs twice, row by row and column by column, and K in both orders.

So every sum of a pass runs along a row of one of the two, in an order of its own: no atomic additions, and the same
bits each time. A pair takes 4 or 8 bytes of M, as many of K, and an index of 2 where rows and columns have so short
numbers, else 4, all of it twice. From sm_90 on, up to 65536 rows and columns, many passes are one cooperative launch
(``iterate_pairs`` of src_cuda/iterate.cu); else, over ranks, and where no pair connects parts of M, whose image is
translated part by part, they are those of the portable kernels, with a row half of their own: src_cuda/sparse.cuh.
Twin: backends/cpu/workspace.py, src_c/sparse.h.
"""

from __future__ import annotations

import weakref
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ...problem.problem import Problem
from ...problem.sparse import Sparse
from .. import records
from ..contract import MEMORY
from ..records import put
from ..workspace import STORAGE
from .arrays import need_memory, on_device
from .kernels import ITEMSIZE, STORES, Shape, by_value, kernel, line, ring_offset, shape_options
from .kernels import THREADS as ALL_THREADS
from .launch import GRAPH_PASSES, SHARE, TRACE_PASSES, Iterate, Persistent, device_limits, switches
from .stream import DevicePlan
from .workspace import Workspace

RUNS, HALF = (records.read("common/record.h", "sparse.cuh")[name] for name in ("Runs", "Half"))
PAIRS = records.read("common/record.h", "sparse_stream.cu")["Pairs"]
THREADS = 256  # RUN_THREADS of sparse.cuh
EACH = 8  # entries of a row that a thread has, in the mean: AHEAD of sparse.cuh
LONG = 64  # and at most: a longer row gets a block
RESIDENT = 4  # blocks a multiprocessor of a pass, each of which leaves scalars for others to join
SHORT = 1 << 16  # rows and columns, up to here, whose numbers have 16 bits
PIECE = 256  # columns of a part that a warp sums
OF_BYTES = {size: name for name, size in ITEMSIZE.items()}
ROW_SCALARS = 5  # NEXT_B of state.cuh
BESIDE = 1 << 15  # bytes of shared memory for all else, at most
HELD = 64  # entries of a row in the mean from which on what they meet is read from shared memory
KERNELS = ("sparse_rows", "sparse_columns", "part_sums", "part_moves", "finish_first", "finish_join", "finish_second")


def lanes_of(mean: float) -> int:
    """Threads of a row of so many entries in the mean."""
    return min(32, 1 << max(0, int(np.ceil(np.log2(max(1.0, mean / EACH))))))


class Runs:
    """The stored pairs row by row, of M or of its transpose: ``Runs`` of sparse.cuh for all rows or for some."""

    def __init__(self, start: Any, index: Any, M: Any, c: Any) -> None:
        self.start, self.index, self.M, self.c = start, index, M, c
        self.count = len(start) - 1
        self.lanes = lanes_of(len(index) / max(1, self.count))
        self.most = LONG * self.lanes
        self.long = cp.flatnonzero(cp.diff(start) > self.most).astype(np.int64)

    def records(self, i0: int = 0, i1: int | None = None, threads: int = THREADS) -> list[tuple[Any, Any]]:
        """(record, list or None) of the rows [i0, i1) that are short, and of the others where there are any.

        ``threads``: of a block, which has one of the others.
        """
        long = self.long
        if i1 is None:
            i1 = self.count
        elif len(long):
            long = long[(long >= i0) & (long < i1)] - i0
        found = []
        for count, lanes, rows in ((i1 - i0, self.lanes, None), (len(long), threads, long)):
            record = np.zeros((), RUNS)
            put(record, {"count": count, "lanes": lanes, "most": self.most, "index": self.index.data.ptr})
            put(record, {"start": self.start[i0:].data.ptr, "list": 0 if rows is None else rows.data.ptr})
            found.append((record, rows))
        return found if len(long) else found[:1]

    def launch(
        self, function: str, exponents: tuple[Any, Any, float], *arguments: Any, i0: int = 0, i1: int | None = None
    ) -> None:
        """A stream over the rows [i0, i1); ``exponents``: alpha, whose first number is of row i0, beta and reg."""
        alpha, beta, reg = exponents
        pairs = np.zeros((), PAIRS)
        put(pairs, {"M": self.M.data.ptr, "c": 0 if self.c is None else self.c.data.ptr, "inv_reg": 1 / reg})
        put(pairs, {"alpha": alpha.data.ptr, "beta": beta.data.ptr})
        store = "float64" if function != "sparse_entries" else OF_BYTES[arguments[0].itemsize]
        kinds = {"COST": int(self.M.dtype == np.float32), "SHORT_INDEX": int(self.index.itemsize == 2)}
        run = kernel("sparse_stream.cu", function, STORE=STORES[store], **kinds)
        for record, _ in self.records(i0, i1):
            run((blocks_for(record),), (THREADS,), (by_value(pairs), by_value(record), *arguments))


def index_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of an index, a number of a row or a column."""
    return 2 if max(shape) <= SHORT else 4


def blocks_for(record: Any, most: int = 1 << 20) -> int:
    return max(1, min(most, -(-int(record["count"]) // (THREADS // int(record["lanes"])))))


class DevicePairs:
    """A sparse M, and c on its places, on the device; ``rows`` and ``cols``."""

    def __init__(self, cost: Sparse, c: Sparse | None) -> None:
        m, n = cost.shape
        start = cp.asarray(cost.start - cost.start[0])
        column, M = cp.asarray(cost.column), cp.asarray(cost.data)
        shares = None if c is None else cp.asarray(c.data)
        index = np.uint16 if index_bytes(cost.shape) == 2 else np.int32
        self.rows = Runs(start, column.astype(index, copy=False), M, shares)
        row = cp.searchsorted(start, cp.arange(cost.size), side="right") - 1
        key = column.astype(np.int64) * m + row  # no two are equal: any sort gives this order
        order = cp.argsort(key)
        ends = cp.cumsum(cp.bincount(column, minlength=n)).astype(np.int64)
        turned = cp.concatenate([cp.zeros(1, np.int64), ends])
        self.cols = Runs(turned, row[order].astype(index), M[order], None if shares is None else shares[order])


class Last:
    """The pairs used last stay on the device while their cost lives: solves at one reg after another read them."""

    held: tuple[Any, Any, int, DevicePairs] | None = None  # weak references to the cost and to c, the device


def pairs_of(problem: Problem) -> DevicePairs:
    cost, c, device, held = problem.cost, problem.c, cp.cuda.Device().id, Last.held
    assert isinstance(cost, Sparse)
    assert c is None or isinstance(c, Sparse)
    if held is not None and held[0]() is cost and held[1]() is c and held[2] == device:
        return held[3]
    Last.held = held = None  # their memory first
    pairs = DevicePairs(cost, c)
    Last.held = weakref.ref(cost, forget), (lambda: None) if c is None else weakref.ref(c, forget), device, pairs
    return pairs


def forget(gone: Any) -> None:
    """Either of both: a c that is no more must not pass for none."""
    if Last.held is not None and gone in Last.held[:2]:
        Last.held = None


def halves_of(pairs: DevicePairs, kernels: tuple[Any, Any], threads: int) -> list[Any]:
    """Return the records HALF, from which rows and columns are summed by blocks of so many threads."""
    halves = []
    for runs, K in zip((pairs.rows, pairs.cols), kernels, strict=True):
        half = np.zeros((), HALF)
        for name, (record, _) in zip(("runs", "long_runs"), runs.records(threads=threads), strict=False):
            half[name] = record
        half["K"], half["long_runs"]["lanes"] = K.data.ptr, threads
        halves.append(half)
    return halves


class PairPasses(Persistent):
    """Passes over stored pairs in one cooperative launch, a block a multiprocessor: ``iterate_pairs`` of iterate.cu."""

    def __init__(self, pairs: DevicePairs, share: int, dtype: str, kl: tuple[bool, bool], memory: int) -> None:
        """``share``: columns of a block, which it has in hand at once."""
        _, self.blocks, most = device_limits(cp.cuda.Device().id)
        sides = pairs.rows, pairs.cols
        own = MEMORY[0] if memory == MEMORY[0] else next(d for d in (5, 10, 20) if share * memory <= ALL_THREADS * d)
        options = shape_options(Shape(16, 8, 2), dtype, kl, MEMORY=memory, OWN_DIFFERENCES=own)
        longest = max(runs.count for runs in sides)
        held = 8 * longest + BESIDE <= most and len(pairs.rows.index) >= HELD * longest
        options |= {"SPARSE": 1, "SHORT_INDEX": int(pairs.rows.index.itemsize == 2), "HELD": int(held)}
        self.run = kernel("iterate.cu", "iterate_pairs", **options)
        self.shared = ring_offset("iterate.cu", **options) + held * (8 * longest + 16)
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)

    def take(self, pairs: DevicePairs, kernels: tuple[Any, Any]) -> None:
        """The entries of K row by row and column by column."""
        self.sides = halves_of(pairs, kernels, ALL_THREADS)

    def __call__(self, state: Any, first: int, count: int, mode: int) -> None:
        halves = map(by_value, self.sides)
        words = by_value(state), *halves, np.int32(first), np.int32(count)
        self.run((self.blocks,), (ALL_THREADS,), words, shared_mem=self.shared)


class SparseIterate(Iterate):
    """Passes over stored pairs: one launch for many, or rows, columns and the finish, five launches or seven."""

    def __init__(
        self, state: Any, shape: tuple[int, int, int], dtype: str, kl: tuple[bool, bool], pairs: DevicePairs,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """``shape``: of the rank with the most rows, whose numbers may be longer than those of the own ``pairs``.

        ``alone``: no ranks share the rows, and all of M is one part.
        """
        self.at_once: PairPasses | None = None
        self.several, self.alone, self.pairs, self.short = False, alone, pairs, int(pairs.rows.index.itemsize == 2)
        super().__init__(state, shape, dtype, kl, in_place=False, portable=True)

    def fit_portable(self, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Few blocks in the finish, where columns are many: each of them joins what all have left."""
        newer = device_limits(cp.cuda.Device().id)[0] >= 90 and "portable" not in switches()
        if self.alone and newer and max(self.m, self.n) <= SHORT:
            self.split_columns(min(self.processors, -(-self.n // SHARE)))
            if self.share <= ALL_THREADS:
                self.wide = self.at_once = PairPasses(self.pairs, self.share, dtype, kl, self.memory)
                self.persistent, self.most = True, TRACE_PASSES
                return
        self.split_columns(min(-(-self.n // line(self.memory)), RESIDENT * self.processors))
        self.most = GRAPH_PASSES
        options = shape_options(Shape(1, 8, 2), dtype, kl, MEMORY=self.memory)
        options |= {"SPARSE": 1, "SHORT_INDEX": self.short}
        self.kernels = {name: kernel("portable.cu", name, **options) for name in KERNELS}

    def take(self, pairs: DevicePairs, kernels: tuple[Any, Any]) -> None:
        """The entries of K row by row and column by column."""
        self.graphs, self.K, self.pairs = {}, kernels, pairs
        if self.at_once is not None:
            self.at_once.take(pairs, kernels)
            return
        most = RESIDENT * self.processors
        self.sides = halves_of(pairs, kernels, THREADS)
        self.blocks = [max(blocks_for(half[name], most) for name in ("runs", "long_runs")) for half in self.sides]
        self.scalars = cp.zeros(self.blocks[0] * ROW_SCALARS)

    def row_kernels(self) -> None:
        parity, (rows, cols), (blocks, others) = np.int32(self.parity), self.sides, self.blocks
        self.launch("sparse_rows", (blocks,), THREADS, parity, by_value(rows), self.scalars)
        self.launch("sparse_columns", (others,), THREADS, parity, by_value(cols), self.scalars, np.int32(blocks))

    def gather(self) -> None:
        """Nothing: the sums of a pass are in ``total`` already."""

    def finish_kernels(self, total: int = 0) -> None:
        """The half that needs the columns' whole sums begins with the parts."""
        if self.several:
            for name, count in (("part_sums", "pieces"), ("part_moves", "count")):
                warps = int(self.state["apart"][count])
                self.launch(name, (-(-warps // (THREADS // 32)),), THREADS, np.int32(self.parity))
        super().finish_kernels(int(self.state["total"]))


class SparseWorkspace(Workspace):
    """Workspace of a solve of a sparse M."""

    launch: SparseIterate

    def find_room(self, stores: list[str]) -> None:
        m, cost = self.problem.shape[0], self.problem.cost
        self.dtype, self.some = stores[0], 0
        entry = ITEMSIZE[self.dtype] + cost.dtype.itemsize + index_bytes(cost.shape) + 8 * (self.problem.c is not None)
        pairs = 2 * cost.size * entry + 8 * (8 * m + (30 + 2 * MEMORY[1]) * self.ld)
        need_memory(pairs + 24 * cost.size, self.dtype)  # 24: to sort the pairs by columns

    def make_room(self) -> None:
        n, cost = self.problem.shape[1], self.problem.cost
        self.pairs = pairs_of(self.problem)
        self.K = tuple(cp.empty(cost.size, STORAGE[self.dtype]) for _ in range(2))
        alone = self.problem.ranks.size == 1 and self.problem.parts is None
        self.launch = SparseIterate(self.state, (self.most, n, self.ld), self.dtype, self.kl, self.pairs, alone)
        self.launch.take(self.pairs, self.K)

    def constants(self) -> None:
        super().constants()
        self.take_parts()

    def take_parts(self) -> None:
        """Point the state at the part of each column, where M has parts: each has a translation of its own."""
        parts, limits = self.problem.parts, self.state["limits"]
        if parts is None or not limits["mu_rate"] > 0:
            return
        limits["lam_rate"] = 0.0
        length = np.bincount(parts.cols, minlength=parts.count + 1)  # the last: points without a partner
        first = np.concatenate([[0], np.cumsum(-(-length // PIECE))])
        begin = np.cumsum(length) - length
        piece = np.repeat(begin - PIECE * first[:-1], np.diff(first)) + PIECE * np.arange(first[-1])
        words = {"part": parts.cols, "order": np.argsort(parts.cols, kind="stable"), "first": first}
        words["piece"] = np.append(piece, len(parts.cols))
        self.parts = {name: cp.asarray(values.astype(np.int64)) for name, values in words.items()}
        self.parts |= {"sums": cp.zeros(2 * len(piece)), "move": cp.zeros(len(length))}
        put(self.state["apart"], {"count": len(length), "pieces": len(piece)})
        put(self.state["apart"], {name: array.data.ptr for name, array in self.parts.items()})
        self.launch.several = True

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        limits = self.state["limits"]
        limits["exponent_error"] = error
        a, b = on_device(alpha, beta)
        for runs, own, other, K in ((self.pairs.rows, a, b, self.K[0]), (self.pairs.cols, b, a, self.K[1])):
            flush = np.float64(limits["flush"])
            runs.launch("sparse_entries", (own, other, self.problem.reg), K, np.int64(0), flush)

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        alpha = np.where(out_u, np.inf, -self.tops(self.pairs.rows, np.zeros(len(out_u)), plan_v))
        used = np.where(np.isposinf(alpha), -np.inf, alpha)
        return alpha, self.column_scaling(plan_v, self.tops(self.pairs.cols, plan_v, used))

    def tops(self, runs: Runs, own: F64, other: F64) -> F64:
        """The largest logarithm of an entry of each row."""
        out, (alpha, beta) = cp.empty(runs.count), on_device(own, other)
        runs.launch("sparse_max", (alpha, beta, self.problem.reg), out)
        found: F64 = out.get()
        return found

    def close(self) -> None:
        """Give K back at once; the potentials stay."""
        del self.K
        del self.launch.K, self.launch.pairs
        self.launch.graphs.clear()


class SparseStream(DevicePlan):
    """The plan of given potentials on the stored pairs, made from M in float64; CuPy where M is CuPy's, else numpy."""

    def __init__(self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None) -> None:
        assert isinstance(problem.cost, Sparse)
        self.problem, self.cost, self.dtype = problem, problem.cost, problem.cost.dtype
        self.alpha, self.beta = on_device(*problem.exponents(log_u, log_v))

    def along(self, rows: bool) -> tuple[Runs, Any, Any]:
        """The pairs row by row, or column by column, and the exponents of these and of what they meet."""
        pairs = pairs_of(self.problem)
        return (pairs.rows, self.alpha, self.beta) if rows else (pairs.cols, self.beta, self.alpha)

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        """Rows i0 to i1 as a CSR array, with an entry for every stored pair."""
        runs, alpha, beta = self.along(True)
        before, end = (int(self.cost.start[i] - self.cost.start[0]) for i in (i0, i1))
        values = cp.empty(end - before, self.dtype)
        if end > before:
            made = alpha[i0:], beta, self.problem.reg
            runs.launch("sparse_entries", made, values, np.int64(before), np.float64(0.0), i0=i0, i1=i1)
        return self.cost.read(i0, i1).with_data(self.back(values))

    def product(self, X: Any, turned: bool) -> Any:
        runs, own, other = self.along(not turned)
        d = X.shape[1]
        out = cp.empty((runs.count, d))
        for x0 in range(0, d, 4):
            runs.launch("sparse_apply", (own, other, self.problem.reg), X, np.int64(d), np.int64(x0), out)
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        found = []
        for rows in (True, False):
            runs, own, other = self.along(rows)
            out, paid = cp.empty(runs.count), cp.empty(runs.count)
            runs.launch("sparse_sums", (own, other, self.problem.reg), out, paid)
            found.append((out.get(), float(paid.sum())))
        (row, cost), (col, _) = found
        return cost, row, col
