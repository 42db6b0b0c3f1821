"""Passes over the stored pairs of a sparse M on the device (pairs.py): one launch for many passes, or a few for each.

From sm_80 on, up to 65536 rows and columns, one cooperative launch makes many passes (``iterate_pairs`` of
dense/iterate.cu). Otherwise, over ranks, and where M has disconnected parts, which are translated one by one, the
portable kernels make the passes, with the row half of src_cuda/sparse/sparse.cuh. Twin of src_c/sparse.h.
"""

from typing import Any

import cupy as cp
import numpy as np

from ...arrays import any_of
from ...contract import ANDERSON_DEPTHS, Stats
from .. import records
from ..records import put
from .arrays import need_memory
from .kernels import BLOCKS, ITEMSIZE, Shape, by_value, kernel, line, ring_offset, shape_options
from .kernels import THREADS as ALL_THREADS
from .launch import BULK, GRAPH_PASSES, PERSISTENT, SHARE, TRACE_PASSES, Iterate, Persistent, device_limits, switches
from .pairs import THREADS, DevicePairs, PairOperator, blocks_for, index_bytes
from .settings import DEVICE_PAIRS
from .workspace import DeviceWorkspace

HALF = records.read("common/record.h", "sparse.cuh")["Half"]
RESIDENT = 4  # blocks on a multiprocessor in a pass; each block writes scalars that other blocks add up
PIECE = 256  # columns of a part that one warp sums
ROW_SCALARS = 5  # NEXT_B of state.cuh
BESIDE = 1 << 15  # bytes of shared memory left for other uses
OWN = {
    ANDERSON_DEPTHS[0]: (5,),
    ANDERSON_DEPTHS[1]: (5, 10, 20),
}  # by Anderson depth: numbers of differences that a thread may keep
CLUSTER = 8  # blocks of a cluster, which synchronise fastest
LEAP = ("equation", "y", "vd", "Sd", "mid", "factor", "sums")  # vectors of Leap in state.cuh
MOST_PRODUCTS = 300  # most products of one Newton's step: MAPUOT_MOST_PRODUCTS
KERNELS = ("sparse_rows", "sparse_columns", "part_sums", "part_moves")


def many_at_once(shape: tuple[int, int]) -> bool:
    """Tell whether one launch can make many passes over stored pairs."""
    newer = device_limits(cp.cuda.Device().id)[0] >= PERSISTENT and "portable" not in switches()
    return newer and max(shape) <= DEVICE_PAIRS.short_points


def keeps_pairs(problem: Any) -> bool:
    """Tell whether passes over only the pairs that may carry mass save time, for an M on the device.

    They do not where both sides are hard: the host then drives the products of Newton's steps.
    """
    clusters = device_limits(cp.cuda.Device().id)[0] >= BULK
    here = (
        clusters
        and problem.cost.xp is cp
        and many_at_once(problem.shape)
        and problem.size >= DEVICE_PAIRS.least_entries
    )
    sharp = problem.cost.operator == "tiles" and problem.reg < DEVICE_PAIRS.most_reg * (problem.M_max - problem.M_min)
    return here and sharp and not all(any_of(side.hard) for side in problem.sides)


def halves_of(pairs: DevicePairs, kernels: tuple[Any, Any], threads: int) -> list[Any]:
    """Return the records HALF of rows and columns, for sums by blocks of ``threads`` threads."""
    halves = []
    for runs, K in zip((pairs.rows, pairs.cols), kernels, strict=True):
        half = np.zeros((), HALF)
        for name, (record, _) in zip(("runs", "long_runs"), runs.records(threads=threads), strict=False):
            half[name] = record
        half["K"], half["long_runs"]["lanes"] = K.data.ptr, threads
        halves.append(half)
    return halves


def pair_options(
    dtype: str, kl: tuple[bool, bool], depth: int, own: int, short: bool = True, held: bool = True, **more: int
) -> dict[str, int]:
    """Return the options of ``iterate_pairs``; own: differences that a thread keeps; held: vectors in shared memory."""
    options = shape_options(Shape(16, 8, 2), dtype, kl, ANDERSON_DEPTH=depth, OWN_DIFFERENCES=own)
    return options | {"SPARSE": 1, "SHORT_INDEX": int(short), "HELD": int(held)} | more


class PairPasses(Persistent):
    """Passes over stored pairs by one cooperative launch of ``iterate_pairs`` (iterate.cu), a block a multiprocessor.

    With Newton's steps between passes (``leaps``) over few pairs, the grid is one cluster, which synchronises faster.
    """

    def __init__(
        self, pairs: DevicePairs, share: int, dtype: str, kl: tuple[bool, bool], depth: int, leaps: bool, cluster: int
    ) -> None:
        """``share``: columns of a block; it works on all of them at once, or with ``leaps`` on some."""
        processors, most = device_limits(cp.cuda.Device().id)[1:]
        self.blocks = processors if cluster == 1 else cluster
        sides = pairs.rows, pairs.cols
        own = next(d for d in OWN[depth] if depth == ANDERSON_DEPTHS[0] or share * depth <= ALL_THREADS * d)
        longest = max(runs.count for runs in sides)
        held = 8 * longest + BESIDE <= most and len(pairs.rows.index) >= DEVICE_PAIRS.held_entries * longest
        if leaps:
            more = {"CLUSTER": cluster, "LEAPS": 1}
        else:
            more = {}
        options = pair_options(dtype, kl, depth, own, pairs.rows.index.itemsize == 2, held, **more)
        self.run = kernel("iterate.cu", "iterate_pairs", **options)
        self.shared = ring_offset("iterate.cu", **options) + held * (8 * longest + 16)
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)

    def set_pairs(self, pairs: DevicePairs, kernels: tuple[Any, Any]) -> None:
        """Take the entries of K, row by row and column by column."""
        self.sides = halves_of(pairs, kernels, ALL_THREADS)

    def __call__(self, state: Any, first: int, count: int, mode: int) -> None:
        halves = map(by_value, self.sides)
        words = by_value(state), *halves, np.int32(first), np.int32(count)
        self.run((self.blocks,), (ALL_THREADS,), words, shared_mem=self.shared)


class SparseIterate(Iterate):
    """Passes over stored pairs: one launch for many passes, or three to five launches for each pass."""

    def __init__(
        self, state: Any, shape: tuple[int, int, int], dtype: str, kl: tuple[bool, bool], pairs: DevicePairs,
        alone: bool = False, leaps: bool = False,
    ) -> None:  # fmt: skip
        """``shape``: sizes of the rank with the most rows, which may exceed this rank's ``pairs``.

        ``alone``: no ranks share the rows, and M is one part or ``leaps`` (Newton's steps between passes) handle the
        parts.
        """
        self.at_once: PairPasses | None = None
        self.leaps = leaps
        self.several = False
        self.alone = alone
        self.pairs = pairs
        self.short = int(pairs.rows.index.itemsize == 2)
        super().__init__(state, shape, dtype, kl, in_place=False, portable=True)

    def fit_portable(self, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Choose the grid. Few blocks make the finish: each block adds up the scalars of all blocks."""
        if self.alone and many_at_once((self.m, self.n)):
            if self.leaps and len(self.pairs.rows.index) <= DEVICE_PAIRS.cluster_pairs:
                cluster = CLUSTER
            else:
                cluster = 1
            self.anderson_depth = ANDERSON_DEPTHS[0] if self.leaps else self.anderson_depth
            self.split_columns(min(cluster if cluster > 1 else self.processors, -(-self.n // SHARE)))
            if self.leaps or self.share <= ALL_THREADS:
                kind = dtype, kl, self.anderson_depth, self.leaps, cluster
                self.wide = self.at_once = PairPasses(self.pairs, self.share, *kind)
                self.persistent, self.most = True, TRACE_PASSES
                return
        self.split_columns(min(-(-self.n // line(self.anderson_depth)), self.processors))
        self.most = GRAPH_PASSES
        options = shape_options(Shape(1, 8, 2), dtype, kl, ANDERSON_DEPTH=self.anderson_depth)
        self.take_kernels(options | {"SPARSE": 1, "SHORT_INDEX": self.short}, *KERNELS)

    def set_pairs(self, pairs: DevicePairs, kernels: tuple[Any, Any]) -> None:
        self.graphs = {}
        self.K = kernels
        self.pairs = pairs
        if self.at_once is not None:
            self.at_once.set_pairs(pairs, kernels)
            return
        most = RESIDENT * self.processors
        self.sides = halves_of(pairs, kernels, THREADS)
        self.blocks = [max(blocks_for(half[name], most) for name in ("runs", "long_runs")) for half in self.sides]
        self.scalars = cp.zeros(self.blocks[0] * ROW_SCALARS)

    def row_kernels(self) -> None:
        parity = np.int32(self.parity)
        rows, cols = self.sides
        blocks, others = self.blocks
        self.launch("sparse_rows", (blocks,), THREADS, parity, by_value(rows), self.scalars)
        self.launch("sparse_columns", (others,), THREADS, parity, by_value(cols), self.scalars, np.int32(blocks))

    def gather(self) -> None:
        """Do nothing: ``total`` has the sums of a pass already."""

    def finish_kernels(self, total: int = 0) -> None:
        """Translate the parts first, where M has several, then launch the column half."""
        if self.several:
            for name, count in (("part_sums", "pieces"), ("part_moves", "count")):
                warps = int(self.state["apart"][count])
                self.launch(name, (-(-warps // (THREADS // 32)),), THREADS, np.int32(self.parity))
        super().finish_kernels(int(self.state["total"]))


class SparseWorkspace(DeviceWorkspace):
    operator_class = PairOperator
    launch: SparseIterate
    counted = 0  # products of Newton's steps that `leap` has reported

    def find_room(self, stores: list[str]) -> None:
        m = self.problem.shape[0]
        cost = self.problem.cost
        self.dtype = stores[0]
        self.block_rows = 0
        entry = ITEMSIZE[self.dtype] + cost.dtype.itemsize + index_bytes(cost.shape) + 8 * (self.problem.c is not None)
        pairs = 2 * cost.size * entry + 8 * (8 * m + (30 + 2 * ANDERSON_DEPTHS[1]) * self.ld)
        need_memory(pairs + 24 * cost.size, self.dtype)  # 24: to sort the pairs by columns

    def make_room(self) -> None:
        n = self.problem.shape[1]
        operator = self.operator
        self.pairs = operator.pairs  # kept as long as the workspace lives
        operator.store(self.dtype)
        leaps = self.leaps_within = self.options.leaps
        if leaps:
            self.apart = self.pairs.parts()
        else:
            self.apart = self.problem.parts
        alone = self.problem.ranks.size == 1 and (leaps or self.apart is None)
        self.launch = SparseIterate(self.state, (self.most, n, self.ld), self.dtype, self.kl, self.pairs, alone, leaps)
        self.launch.set_pairs(self.pairs, operator.K)

    def constants(self) -> None:
        super().constants()
        self.take_parts()
        if not self.options.leaps:
            return
        m = self.problem.shape[0]
        rows, cols = self.problem.sides
        columns = cp.zeros((7, self.ld))
        other = cp.zeros((2, m + m % 2))
        self.steps = columns, other, cp.zeros(2 * BLOCKS * 8)
        places = [columns, *columns[4:], *other, self.steps[2]]
        even = rows.rho[0] == np.inf and bool((cols.hard | (cols.weight == 0)).all())
        put(self.state["leap"], {**dict(zip(LEAP, places, strict=True)), "most": MOST_PRODUCTS, "even": even})

    def leap(self, stat: Stats, on: bool) -> int:
        made = int(self.progress["products"]) - self.counted
        self.counted = int(self.progress["products"])
        return made

    def take_parts(self) -> None:
        """Point the state at the part of each column where M has disconnected parts: each is translated on its own."""
        parts = self.apart
        limits = self.state["limits"]
        if parts is None or not limits["mu_rate"] > 0:
            return
        limits["lam_rate"] = 0.0
        length = np.bincount(parts.cols, minlength=parts.count + 1)  # last part: points without a partner
        first = np.concatenate([[0], np.cumsum(-(-length // PIECE))])
        begin = np.cumsum(length) - length
        piece = np.repeat(begin - PIECE * first[:-1], np.diff(first)) + PIECE * np.arange(first[-1])
        words = {"part": parts.cols, "order": np.argsort(parts.cols, kind="stable"), "first": first}
        words["piece"] = np.append(piece, len(parts.cols))
        self.parts = {name: cp.asarray(values.astype(np.int64)) for name, values in words.items()}
        self.parts |= {"sums": cp.zeros(2 * len(piece)), "move": cp.zeros(len(length))}
        put(self.state["apart"], {**self.parts, "count": len(length), "pieces": len(piece)})
        self.launch.several = True

    def close(self) -> None:
        self.operator.close()
        del self.launch.K, self.launch.pairs
        self.launch.graphs.clear()
