"""Launches of passes: the persistent cooperative kernel on sm_80 and later, else the portable kernels.

The persistent kernel streams K through shared memory and makes many passes without the host. Before sm_90, which has
clusters and bulk copies, it needs a block that covers a row. It is compiled twice, for float32 sums (narrow) and for
float64 sums (wide). Both are launched one after the other: the narrow kernel stops where float64 must take over. The
portable kernels are two or four launches a pass; the last launch is the finish. All write the same record.
The environment variable MAPUOT_CUDA may hold "portable", "ordered" (sums in a fixed order: bitwise repeatable answers)
and "racecheck" (see RACECHECK in common.cuh). Twin of src_c/solver.c (mapuot_iterate).
"""

import ctypes
import os
import weakref
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import cupy as cp
import numpy as np

from ...arrays import PAD
from .kernels import (
    ITEMSIZE,
    MAIL,
    MAX_SLOTS,
    SOLO_COLUMNS,
    THREADS,
    Job,
    Shape,
    anderson_depth_for,
    by_value,
    kernel,
    line,
    portable_jobs,
    portable_shape,
    ring_offset,
    shape_for,
    shape_options,
    together,
)
from .settings import DEVICE_LAUNCHES

PERSISTENT, BULK = 80, 90  # least compute capabilities for persistent kernels, and for bulk copies
TRACE_PASSES = 256  # passes that the record of one launch holds
GRAPH_PASSES = 18  # passes of a captured graph: a multiple of the period 6 of the buffers
FIRST_PASSES = 6  # passes before the capture of a graph, which takes 1 ms
SHARE, SMALL_SHARE = 128, 64  # least columns of a block; least columns if there are few in all
FEW_COLUMNS = 1024  # up to here a smaller grid is faster: synchronisation costs more than reading
RING_BYTES = 1 << 16  # of shared memory for tiles that stream through; the rest keeps tiles
PORTABLE_CLUSTER = 8  # largest number of blocks of a cluster that every device supports
ROWS, FINISH, BOTH = 1, 2, 3  # halves of a pass
COOPERATIVE_LAUNCH = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
ROW_KERNELS = {True: ("row_pass",), False: ("row_sums", "join_rows", "column_sums")}  # portable; a block covers a row?


class LaunchLayout(NamedTuple):
    """Numbers of a launch that determine the lengths of vectors."""

    parts: int
    copies: int
    anderson_depth: int
    slab: int
    ordered: bool


def switches() -> frozenset[str]:
    """Return the words in MAPUOT_CUDA."""
    return words_of(os.environ.get("MAPUOT_CUDA", ""))


@cache
def words_of(text: str) -> frozenset[str]:
    words = frozenset(text.replace(",", " ").split())
    if not words <= {"portable", "ordered", "racecheck"}:
        raise ValueError(f"MAPUOT_CUDA may hold 'portable', 'ordered' and 'racecheck', got {sorted(words)}")
    return words


@cache
def device_limits(device: int) -> tuple[int, int, int]:
    """Return (compute capability, multiprocessors, shared memory of a block)."""
    major, minor, processors, shared = (cp.cuda.runtime.deviceGetAttribute(a, device) for a in (75, 76, 16, 97))
    return 10 * major + minor, processors, shared


class LaunchConfig(ctypes.Structure):
    _fields_: ClassVar[Any] = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


@cache
def libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Launch:
    """A kernel with its arguments laid out in advance, but for the words of a call: CuPy takes 10 us for the layout."""

    def __init__(self, run: Any, shared: int, arguments: tuple[Any, ...], cooperative: bool = False) -> None:
        """``arguments``: records and numbers, None where the call gives a number.

        ``cooperative``: blocks may wait for each other.
        """
        driver = cp.cuda.driver
        if cooperative:
            self.run = driver.launchCooperativeKernel
        else:
            self.run = driver.launchKernel
        self.cooperative = cooperative
        self.more = (0,) * (not cooperative)  # one more argument of launchKernel
        self.given = np.zeros(sum(x is None for x in arguments), np.uint64)
        cells = iter(self.given.reshape(-1, 1))
        self.arguments = run, [next(cells) if x is None else np.asarray(x) for x in arguments]
        self.places = (ctypes.c_void_p * len(arguments))(*(x.__array_interface__["data"][0] for x in self.arguments[1]))
        self.function = run.kernel.ptr
        self.shared = shared
        self.address = ctypes.addressof(self.places)

    def __call__(self, blocks: int, threads: int, stream: int, *given: int) -> None:
        """Launch the kernel; only one thread at a time may do so."""
        if given:
            self.given[:] = given
        self.run(self.function, blocks, 1, 1, threads, 1, 1, self.shared, stream, self.address, *self.more)


class Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_: ClassVar[Any] = [
        ("function", ctypes.c_void_p), *LaunchConfig._fields_[:7],
        *((name, ctypes.c_void_p) for name in ("arguments", "extra")),
    ]  # fmt: skip


class Chain:
    """Launches in sequence as one CUDA graph: five launches take the host as long as one.

    Without a driver, as in an emulation, launch them one by one.
    """

    graph = run = None

    def __init__(self, *parts: tuple[Launch, int, int]) -> None:
        """``parts``: launches, their blocks, and the threads of a block."""
        self.parts = parts
        self.nodes = []
        try:
            driver = libcuda()
        except OSError:
            return
        self.graph = ctypes.c_void_p()
        self.run = ctypes.c_void_p()
        before = None
        self.set, self.launch = driver.cuGraphExecKernelNodeSetParams, driver.cuGraphLaunch
        check(driver.cuGraphCreate(ctypes.byref(self.graph), 0))
        for one, blocks, threads in parts:
            words = Node(one.function, blocks, 1, 1, threads, 1, 1, one.shared, one.address)
            node = ctypes.c_void_p()
            count = int(before is not None)
            cooperative = (ctypes.c_uint * 16)(one.cooperative)
            if before is None:
                last: Any = None
            else:
                last = ctypes.byref(before)
            check(driver.cuGraphAddKernelNode(ctypes.byref(node), self.graph, last, count, ctypes.byref(words)))
            check(driver.cuGraphKernelNodeSetAttribute(node, COOPERATIVE_LAUNCH, cooperative))
            self.nodes.append((node, ctypes.pointer(words)))
            before = node
        check(driver.cuGraphInstantiateWithFlags(ctypes.byref(self.run), self.graph, ctypes.c_ulonglong(0)))
        weakref.finalize(self, drop, driver, self.run, self.graph).atexit = False  # at exit the driver may be gone

    def __call__(self, stream: int, *given: tuple[int, ...], step: int = 1) -> None:
        """``given``: the words of every ``step``-th launch; the graph keeps the words of the other launches."""
        for (one, *_), words in zip(self.parts[::step], given, strict=True):
            if words:
                one.given[:] = words
        if self.run is None:
            for one, blocks, threads in self.parts:
                one(blocks, threads, stream)
            return
        for node, now in self.nodes[::step]:
            check(self.set(self.run, node, now))
        check(self.launch(self.run, ctypes.c_void_p(stream)))


def drop(driver: Any, run: Any, graph: Any) -> None:
    """Destroy a graph and its executable."""
    driver.cuGraphExecDestroy(run)
    driver.cuGraphDestroy(graph)


def check(status: int) -> None:
    """Raise an error if a status of the driver reports one."""
    if status:
        raise cp.cuda.driver.CUDADriverError(status)


def resident_clusters(function: Any, cluster: int, blocks: int, shared: int) -> int:
    """Ask the driver how many clusters the device holds at once."""
    attribute = (ctypes.c_uint * 18)(4, 0, cluster, 1, 1)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    config = LaunchConfig(blocks, 1, 1, THREADS, 1, 1, shared, None, ctypes.addressof(attribute), 1)
    count = ctypes.c_int()
    driver = libcuda()
    handle = ctypes.c_void_p(function.kernel.ptr)
    if cluster > PORTABLE_CLUSTER and driver.cuFuncSetAttribute(handle, 14, 1):
        return 0  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    status = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), handle, ctypes.byref(config))
    if status == 0:
        return count.value
    return 0


def pass_options(
    shape: Shape, dtype: str, kl: tuple[bool, bool], narrow: bool, depth: int, bulk: bool
) -> dict[str, int]:  # fmt: skip
    """Return the compiler's options for passes; ``bulk``: the device has bulk copies."""
    words = {"ORDERED": int("ordered" in switches()), "RACECHECK": int("racecheck" in switches())}
    words |= {} if bulk else {"BULK": 0}
    return shape_options(shape, dtype, kl, NARROW=int(narrow), ANDERSON_DEPTH=depth, **words)


def shapes_for(ld: int, dtype: str, bulk: bool) -> tuple[Shape | None, Shape | None]:
    """Return the shapes of wide and of narrow passes; a device without ``bulk`` copies has no clusters either."""
    found = shape_for(ld, dtype), None if dtype == "float64" else shape_for(ld, dtype, True)
    wide, narrow = (shape if shape and (bulk or shape.CLUSTER == 1) else None for shape in found)
    return wide, narrow if wide else None


def persistent_jobs(m: int, n: int, dtype: str, kl: tuple[bool, bool], bulk: bool) -> list[Job]:
    """List the kernels of passes over such a K on a device that can run the persistent kernel."""
    depth = anderson_depth_for(m, n, ITEMSIZE[dtype])
    found = enumerate(shapes_for(-(-n // PAD) * PAD, dtype, bulk))
    options = [pass_options(shape, dtype, kl, bool(k), depth, bulk) for k, shape in found if shape is not None]
    return [("iterate.cu", function, macros) for macros in options for function in ("iterate", "ring_offset")]


class Persistent:
    """A compiled persistent kernel and its grid; ``parts`` is 0 if it does not fit the device."""

    def __init__(
        self, shape: Shape, m: int, ld: int, dtype: str, kl: tuple[bool, bool], narrow: bool, depth: int
    ) -> None:
        capability, processors, shared = device_limits(cp.cuda.Device().id)
        options = pass_options(shape, dtype, kl, narrow, depth, capability >= BULK)
        self.shape = shape
        self.run = kernel("iterate.cu", "iterate", **options)
        self.options = options
        offset = ring_offset("iterate.cu", **options)
        self.parts = self.slabs = 0
        if shape.SPREAD:
            self.shared = self.run.max_dynamic_shared_size_bytes = shared
            self.spread(m, ld, ITEMSIZE[dtype], min(processors, DEVICE_LAUNCHES.most_blocks), shared - offset)
            return
        tile = shape.tile_bytes(ld, ITEMSIZE[dtype])
        tiles = -(-m // shape.R)
        most = min(
            processors,
            DEVICE_LAUNCHES.most_blocks,
            64 if ld <= FEW_COLUMNS and m <= FEW_COLUMNS else DEVICE_LAUNCHES.most_blocks,
        )
        want = -(-tiles // shape.groups) * shape.CLUSTER
        self.parts = min(most, want) // shape.CLUSTER * shape.CLUSTER
        self.slots = min(MAX_SLOTS, (shared - offset) // (shape.groups * tile))
        if self.slots < 2:
            self.parts = 0
            return
        each = -(-tiles // (self.parts // shape.CLUSTER * shape.groups))
        self.slots = max(2, min(self.slots, each))
        self.shared = offset + shape.groups * self.slots * tile
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)
        if shape.CLUSTER > 1:
            fits = resident_clusters(self.run, shape.CLUSTER, self.parts, self.shared)
            self.parts = min(self.parts, fits * shape.CLUSTER)
        each = -(-tiles // max(1, self.parts // shape.CLUSTER * shape.groups))
        if shape.CLUSTER == 1:
            ring = max(2, RING_BYTES // (shape.groups * tile))
        else:
            ring = self.slots
        if each <= self.slots:
            self.kept = each
        else:
            self.kept = max(0, self.slots - ring)
        self.slabs = self.parts // shape.CLUSTER

    def spread(self, m: int, ld: int, itemsize: int, blocks: int, room: int) -> None:
        """Choose a grid of clusters that fills the device; rings take all shared memory, the lag all slots but two."""
        shape = self.shape
        blocks -= blocks % shape.CLUSTER
        blocks = min(blocks, shape.CLUSTER * resident_clusters(self.run, shape.CLUSTER, blocks, self.shared))
        streams, strips, columns = shape.spread(m, ld, itemsize, blocks)
        room -= 32 * shape.CPT * itemsize  # a warp reads beyond its last row
        self.slots = min(MAIL, room // max(1, -(-strips // shape.CLUSTER) * shape.R * columns * itemsize))
        if streams == 0 or self.slots < (3 if shape.R > 1 else 2):
            return
        self.parts = streams * shape.CLUSTER
        self.kept = max(min(2, self.slots - 1), self.slots - 2)
        self.slabs = streams

    def __call__(self, state: Any, first: int, count: int, mode: int) -> None:
        sizes = (self.slots, self.kept, first, count, mode)
        self.run((self.parts,), (THREADS,), (by_value(state), *map(np.int32, sizes)), shared_mem=self.shared)

    def gather(self, state: Any, n: int) -> None:
        run = kernel("iterate.cu", "gather_sums", **self.options)
        run((-(-n // 256),), (256,), (by_value(state), np.int32(self.parts), np.int32(0)))


@lru_cache(maxsize=256)
def fitted(device: int, words: frozenset[str], shape: Shape, *given: Any) -> Persistent:
    """Make Persistent(shape, *given) once for these words of MAPUOT_CUDA; use flatter tiles if two do not fit."""
    one = Persistent(shape, *given)
    if one.parts or shape.R == 1:
        return one
    return fitted(device, words, replace(shape, R=shape.R // 2), *given)


READY: set[tuple[Any, ...]] = set()  # keys (device, kind of passes) of kernels that are compiled


class Iterate:
    """Launch passes on one state."""

    def __init__(
        self, state: Any, shape: tuple[int, int, int], dtype: str, kl: tuple[bool, bool], in_place: bool,
        beside: tuple[Job, ...] = (), portable: bool = False,
    ) -> None:  # fmt: skip
        """``beside``: the caller's next kernels, compiled in parallel; portable: use only the portable kernels."""
        self.state, self.most = state, TRACE_PASSES
        (self.m, self.n, ld), self.in_place = shape, in_place
        self.anderson_depth = anderson_depth_for(self.m, self.n, ITEMSIZE[dtype])
        self.parity = 0
        self.graphs: dict[int, Any] = {}
        self.begun = False  # have these kernels made passes?
        self.wide: Persistent | None = None
        self.narrow: Persistent | None = None
        self.parts, self.copies, self.slab, self.solo = 0, 1, 1, False
        self.ordered = "ordered" in switches()
        capability, self.processors, _ = device_limits(cp.cuda.Device().id)
        if capability >= PERSISTENT and not (in_place or portable or "portable" in switches()):
            self.fit(ld, dtype, kl, beside, capability >= BULK)
        self.persistent = self.wide is not None
        if not self.persistent:
            self.fit_portable(ld, dtype, kl)

    @property
    def layout(self) -> LaunchLayout:
        return LaunchLayout(self.parts, self.copies, self.anderson_depth, self.slab, self.ordered)

    def fit(self, ld: int, dtype: str, kl: tuple[bool, bool], beside: tuple[Job, ...], bulk: bool) -> None:
        """Take the two persistent kernels, if they fit."""
        made: list[Persistent | None] = []
        here = cp.cuda.runtime.getDevice(), switches()
        shapes = shapes_for(ld, dtype, bulk)
        kind = *here, shapes, dtype, kl, self.anderson_depth
        if kind not in READY:
            together([*persistent_jobs(self.m, self.n, dtype, kl, bulk), *beside])
            READY.add(kind)
        for narrow, shape in zip((False, True), shapes, strict=True):
            given = self.m, ld, dtype, kl, narrow, self.anderson_depth
            if shape is None:
                one = None
            else:
                one = fitted(*here, shape, *given)
            made.append(one if one is not None and one.parts > 0 else None)
        self.wide, self.narrow = made
        if self.wide is None:
            return
        grids = [one.parts for one in made if one is not None]
        self.solo = self.n <= SOLO_COLUMNS
        self.copies = max(grids) if self.solo else 1
        if self.n <= FEW_COLUMNS:
            share = SMALL_SHARE
        else:
            share = SHARE
        if self.solo:
            self.split_columns(1)
        else:
            self.split_columns(min([*grids, -(-self.n // share)]))
        self.slab = max(one.slabs for one in made if one is not None)

    def split_columns(self, most: int) -> None:
        """Give each block whole warps of columns, for at most ``most`` blocks."""
        self.share = -(-self.n // (32 * most)) * 32
        self.parts = -(-self.n // self.share)

    def __call__(self, count: int, first: int) -> None:
        """Launch at most ``count`` passes; ``first`` passes were made before."""
        if self.wide is None:
            self.portable(count)
            return
        for one in (self.narrow, self.wide):
            if one is not None:
                one(self.state, first, count, BOTH)

    def rows(self, first: int, narrow: bool) -> None:
        """Launch a row_pass, and gather this device's column sums and row scalars in ``total``."""
        one = self.narrow if narrow else self.wide
        if one is not None:
            one(self.state, first, 1, ROWS)
            one.gather(self.state, self.n)
        else:
            self.row_kernels()
            self.gather()

    def gather(self) -> None:
        self.launch("gather_sums", (-(-self.n // 256),), 256, np.int32(1), np.int32(self.parity))

    def finish(self, first: int, narrow: bool, total: int) -> None:
        """Launch a finish_pass on the sums in ``total``."""
        one = self.narrow if narrow else self.wide
        if one is not None:
            one(self.state, first, 1, FINISH)
        else:
            self.finish_kernels(total)
            self.parity = 1 - self.parity

    # ---- portable

    def fit_portable(self, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Compile the portable kernels: one read of K where a block covers a row, else two."""
        shape = portable_shape(ld, dtype)
        self.split_columns(min(DEVICE_LAUNCHES.most_blocks, self.processors, -(-self.n // line(self.anderson_depth))))
        self.copies = self.slab = 1
        self.most = GRAPH_PASSES
        self.take_shape(shape or Shape(8, 8, 4), shape is not None, ld, dtype, kl)

    def take_shape(self, shape: Shape, fused: bool, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """Take the portable kernels of this shape; fused: a block covers a row."""
        self.shape = shape
        self.graphs = {}
        options = shape_options(shape, dtype, kl, ANDERSON_DEPTH=self.anderson_depth) | (
            {"IN_PLACE": 1} if self.in_place else {}
        )
        self.halves = ROW_KERNELS[fused]
        self.take_kernels(options, *self.halves, "gather_sums")
        blocks = self.processors * shape.groups, -(-self.m // shape.R)
        chunk = 32 * shape.GW * (16 // ITEMSIZE[dtype])
        chunks = -(-ld // chunk)
        many = 8 * self.processors
        columns = chunks, max(1, min(self.m, many // chunks))
        self.grids: tuple[tuple[int, ...], ...] = (min(blocks),), columns
        self.splits = max(1, min(chunks // 4, -(-many // blocks[1])))  # parts of the columns, if rows are few
        if self.halves[0] == "row_sums":
            self.grids = (min(many, blocks[1]), self.splits), (-(-self.m // 256),), columns
            self.row_parts = cp.empty(self.splits * max(1, self.m))

    def take_kernels(self, options: dict[str, int], *names: str) -> None:
        """Load kernels of portable.cu, and the finish of their passes."""
        jobs = portable_jobs(options, *names)
        together(jobs)
        self.kernels = {name: kernel(file, name, **own) for file, name, own in jobs}
        self.finish_run = self.kernels["finish"]
        self.finish_shared = ring_offset("finish.cu", **jobs[-1][2])

    def launch(self, name: str, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        self.kernels[name](grid, (threads,), (by_value(self.state), *arguments))

    def row_kernels(self) -> None:
        self.pass_over_rows(self.state)

    def pass_over_rows(self, state: Any) -> None:
        """Pass over the rows that ``state`` points at, and add their sums to the totals."""
        for name, grid in zip(self.halves, self.grids, strict=False):
            threads = 32 * self.shape.GW
            arguments = [by_value(state), np.int32(self.parity)]
            if name == "row_sums":
                arguments.append(self.row_parts)
            elif name == "join_rows":
                threads = 256
                arguments = [*arguments, self.row_parts, np.int32(self.splits), np.uint64(0), np.uint64(0)]
            self.kernels[name](grid, (threads,), tuple(arguments))

    def finish_kernels(self, total: int = 0) -> None:
        """Launch the finish; ``total``: address of the sums, 0 for this device's own."""
        parity = np.int32(self.parity)
        source = np.uint64(total)
        words = by_value(self.state), parity, source
        self.finish_run((self.parts,), (THREADS,), words, shared_mem=self.finish_shared)

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.row_kernels()
            self.finish_kernels()
            self.parity = 1 - self.parity

    def portable(self, count: int) -> None:
        """Launch passes, which alternate between the halves of progress; a captured graph has GRAPH_PASSES passes."""
        if count < GRAPH_PASSES or not self.begun:
            self.passes(min(count, FIRST_PASSES))
            self.begun = True
            return
        if self.parity not in self.graphs:
            with cp.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                self.passes(GRAPH_PASSES)
                self.graphs[self.parity] = stream.end_capture()
        self.graphs[self.parity].launch(cp.cuda.get_current_stream())
