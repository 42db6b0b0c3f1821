"""Passes over the stored pairs of a sparse M on the device (pairs.py), a launch for many or a few launches each.

From sm_80 on, up to 65536 rows and columns, many passes are one cooperative launch (``iterate_pairs`` of
src_cuda/iterate.cu); else, over ranks, and where no pair connects parts of M, whose image is translated part by part,
they are those of the portable kernels, with a row half of their own: src_cuda/sparse.cuh. Twin of src_c/sparse.h.
"""

from typing import Any

import cupy as cp
import numpy as np

from .. import records
from ..contract import MEMORY, Stats, any_of
from ..records import put
from .arrays import need_memory
from .kernels import BLOCKS, ITEMSIZE, Shape, by_value, kernel, line, ring_offset, shape_options
from .kernels import THREADS as ALL_THREADS
from .launch import BULK, GRAPH_PASSES, PERSISTENT, SHARE, TRACE_PASSES, Iterate, Persistent, device_limits, switches
from .pairs import SHORT, THREADS, DevicePairs, PairOperator, blocks_for, index_bytes
from .workspace import DeviceWorkspace

HALF = records.read("common/record.h", "sparse.cuh")["Half"]
RESIDENT = 4  # blocks a multiprocessor of a pass, each of which leaves scalars for others to join
PIECE = 256  # columns of a part that a warp sums
ROW_SCALARS = 5  # NEXT_B of state.cuh
BESIDE = 1 << 15  # bytes of shared memory for all else, at most
HELD = 64  # entries of a row in the mean from which on what they meet is read from shared memory
OWN = {MEMORY[0]: (5,), MEMORY[1]: (5, 10, 20)}  # differences that a thread may keep of so many
CLUSTER, CLUSTER_PAIRS = 8, 1 << 15  # blocks that meet soonest, and pairs up to which they read as fast as they meet
KEPT_SIZE, KEPT_REG = 1 << 22, 5e-6  # pairs, and reg / range(M): of fewer, and above, passes over all take less time
LEAP = "equation", "y", "vd", "Sd", "mid", "factor", "sums"  # vectors of Leap in state.cuh
MOST_PRODUCTS = 300  # of one of Newton's steps: MAPUOT_MOST_PRODUCTS
KERNELS = "sparse_rows", "sparse_columns", "part_sums", "part_moves"


def many_at_once(shape: tuple[int, int]) -> bool:
    """Tell whether many passes over stored pairs are one launch."""
    newer = device_limits(cp.cuda.Device().id)[0] >= PERSISTENT and "portable" not in switches()
    return newer and max(shape) <= SHORT


def keeps_pairs(problem: Any) -> bool:
    """Tell whether passes over pairs that may carry mass pay, where M lies on the device.

    Not where both sides are hard: products of Newton's steps towards them are asked for by the host.
    """
    clusters = device_limits(cp.cuda.Device().id)[0] >= BULK
    here = clusters and problem.cost.xp is cp and many_at_once(problem.shape) and problem.size >= KEPT_SIZE
    sharp = problem.cost.operator == "tiles" and problem.reg < KEPT_REG * (problem.M_max - problem.M_min)
    return here and sharp and not all(any_of(side.hard) for side in problem.sides)


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


def pair_options(
    dtype: str, kl: tuple[bool, bool], memory: int, own: int, short: bool = True, held: bool = True, **more: int
) -> dict[str, int]:
    """Options of ``iterate_pairs``; own: differences that a thread keeps; held: vectors lie in shared memory."""
    options = shape_options(Shape(16, 8, 2), dtype, kl, MEMORY=memory, OWN_DIFFERENCES=own)
    return options | {"SPARSE": 1, "SHORT_INDEX": int(short), "HELD": int(held)} | more


class PairPasses(Persistent):
    """Passes over stored pairs in one cooperative launch of ``iterate_pairs`` (iterate.cu), a block a multiprocessor.

    Where Newton's steps lead from pass to pass (``leaps``) over few pairs it is one cluster, whose blocks meet sooner.
    """

    def __init__(
        self, pairs: DevicePairs, share: int, dtype: str, kl: tuple[bool, bool], memory: int, leaps: bool, cluster: int
    ) -> None:
        """``share``: columns of a block, all of which it has in hand at once, or some where there are ``leaps``."""
        processors, most = device_limits(cp.cuda.Device().id)[1:]
        self.blocks = processors if cluster == 1 else cluster
        sides = pairs.rows, pairs.cols
        own = next(d for d in OWN[memory] if memory == MEMORY[0] or share * memory <= ALL_THREADS * d)
        longest = max(runs.count for runs in sides)
        held = 8 * longest + BESIDE <= most and len(pairs.rows.index) >= HELD * longest
        more = {"CLUSTER": cluster, "LEAPS": 1} if leaps else {}
        options = pair_options(dtype, kl, memory, own, pairs.rows.index.itemsize == 2, held, **more)
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
    """Passes over stored pairs: one launch for many, or rows, columns and the finish, three launches or five."""

    def __init__(
        self, state: Any, shape: tuple[int, int, int], dtype: str, kl: tuple[bool, bool], pairs: DevicePairs,
        alone: bool = False, leaps: bool = False,
    ) -> None:  # fmt: skip
        """``shape``: of the rank with the most rows, whose numbers may be longer than those of the own ``pairs``.

        ``alone``: no ranks share the rows, and all of M is one part, or those are known to passes with ``leaps``,
        Newton's steps between them.
        """
        self.at_once: PairPasses | None = None
        self.leaps = leaps
        self.several, self.alone, self.pairs, self.short = False, alone, pairs, int(pairs.rows.index.itemsize == 2)
        super().__init__(state, shape, dtype, kl, in_place=False, portable=True)

    def fit_portable(self, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Few blocks in the finish, where columns are many: each of them joins what all have left."""
        if self.alone and many_at_once((self.m, self.n)):
            cluster = CLUSTER if self.leaps and len(self.pairs.rows.index) <= CLUSTER_PAIRS else 1
            self.memory = MEMORY[0] if self.leaps else self.memory
            self.split_columns(min(cluster if cluster > 1 else self.processors, -(-self.n // SHARE)))
            if self.leaps or self.share <= ALL_THREADS:
                kind = dtype, kl, self.memory, self.leaps, cluster
                self.wide = self.at_once = PairPasses(self.pairs, self.share, *kind)
                self.persistent, self.most = True, TRACE_PASSES
                return
        self.split_columns(min(-(-self.n // line(self.memory)), self.processors))
        self.most = GRAPH_PASSES
        options = shape_options(Shape(1, 8, 2), dtype, kl, MEMORY=self.memory)
        self.take_kernels(options | {"SPARSE": 1, "SHORT_INDEX": self.short}, *KERNELS)

    def take(self, pairs: DevicePairs, kernels: tuple[Any, Any]) -> None:
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
        """Do nothing: the sums of a pass are in ``total`` already."""

    def finish_kernels(self, total: int = 0) -> None:
        """The half that needs the columns' whole sums begins with the parts."""
        if self.several:
            for name, count in (("part_sums", "pieces"), ("part_moves", "count")):
                warps = int(self.state["apart"][count])
                self.launch(name, (-(-warps // (THREADS // 32)),), THREADS, np.int32(self.parity))
        super().finish_kernels(int(self.state["total"]))


class SparseWorkspace(DeviceWorkspace):
    makes = PairOperator
    launch: SparseIterate
    counted = 0  # products of Newton's steps that the loop knows of

    def find_room(self, stores: list[str]) -> None:
        m, cost = self.problem.shape[0], self.problem.cost
        self.dtype, self.some = stores[0], 0
        entry = ITEMSIZE[self.dtype] + cost.dtype.itemsize + index_bytes(cost.shape) + 8 * (self.problem.c is not None)
        pairs = 2 * cost.size * entry + 8 * (8 * m + (30 + 2 * MEMORY[1]) * self.ld)
        need_memory(pairs + 24 * cost.size, self.dtype)  # 24: to sort the pairs by columns

    def make_room(self) -> None:
        n, operator = self.problem.shape[1], self.operator
        self.pairs = operator.pairs  # as long as the workspace lives
        operator.store(self.dtype)
        leaps = self.leaps_within = self.options.leaps
        self.apart = self.pairs.parts() if leaps else self.problem.parts
        alone = self.problem.ranks.size == 1 and (leaps or self.apart is None)
        self.launch = SparseIterate(self.state, (self.most, n, self.ld), self.dtype, self.kl, self.pairs, alone, leaps)
        self.launch.take(self.pairs, operator.K)

    def constants(self) -> None:
        super().constants()
        self.take_parts()
        if not self.options.leaps:
            return
        m, (rows, cols) = self.problem.shape[0], self.problem.sides
        columns, other = cp.zeros((7, self.ld)), cp.zeros((2, m + m % 2))
        self.steps = columns, other, cp.zeros(2 * BLOCKS * 8)
        places = [columns, *columns[4:], *other, self.steps[2]]
        even = rows.rho[0] == np.inf and bool((cols.hard | (cols.weight == 0)).all())
        put(self.state["leap"], {**dict(zip(LEAP, places, strict=True)), "most": MOST_PRODUCTS, "even": even})

    def leap(self, stat: Stats, on: bool) -> int:
        made, self.counted = int(self.progress["products"]) - self.counted, int(self.progress["products"])
        return made

    def take_parts(self) -> None:
        """Point the state at the part of each column, where M has parts: each has a translation of its own."""
        parts, limits = self.apart, self.state["limits"]
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
        put(self.state["apart"], {**self.parts, "count": len(length), "pieces": len(piece)})
        self.launch.several = True

    def close(self) -> None:
        self.operator.close()
        del self.launch.K, self.launch.pairs
        self.launch.graphs.clear()
