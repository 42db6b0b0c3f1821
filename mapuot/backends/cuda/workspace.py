"""The CUDA backend: CuPy owns the memory, src_cuda does the work; matrices stay where the caller has them.

CuPy arrays (and what speaks DLPack) are used in place; a numpy M goes to the device in row blocks, so that only K has
to fit. Vectors come back as numpy, plans and products as what M is. Everything runs on the current device and stream;
``iterate`` is one or two launches and one read of a few numbers for up to TRACE_PASSES passes. Where ranks share the
rows, a pass is row_pass, the sum over the ranks and finish_pass, and up to PASSES_A_READ are enqueued at once: every
rank finishes on the same sums with the same grid, so that all make the same decisions. Twin: backends/cpu/workspace.py.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# the clear error without CuPy comes first
from . import arrays, vectors  # isort: skip
from .arrays import Carrier, block_bytes, free_memory, need_memory, pinned, rows_at_once  # isort: skip
import cupy as cp

from ...penalties import F64
from ...problem.mask import Masked
from ...problem.problem import Problem
from ..boxes import Truncation
from ..contract import MEMORY, PAD, Options, Stats, host, largest, memory_of
from ..limits import limits_of
from ..operator import parts_of
from ..records import ABSORB, COARSE, CONVERGED, STALLED, put, told
from ..rules import START
from ..tables import formula
from ..workspace import LARGEST_LOG, Workspace
from .coarse import DeviceCoarse, words_of_clusters
from .kernels import (
    BLOCKS,
    ITEMSIZE,
    POSTS,
    PROGRESS,
    SCALARS,
    SOLO_COLUMNS,
    STATE,
    STORES,
    TRACE,
    UNSET,
    Job,
    begin,
    memory_for,
)
from .launch import TRACE_PASSES, Iterate, Lie, switches
from .operator import DeviceOperator
from .stream import stream_job

SCALES = {"scale_limit": 1e30, "most_scale": 8e36}  # times WIDEN they stay finite; e^BOUND of common.cuh
WIDE_SCALES = {"scale_limit": 1e150, "most_scale": 1e300}  # of a float64 K
QUICK_ENTRIES, QUICK_PASSES = 1 << 30, 64  # K up to so large (2 ms a pass) makes so many before the first is timed
SAFE_SPREAD = 40.0  # range(M) / reg that K holds unbalanced: the scalings stay below e^85
NARROW_NOISE = 2e-6  # as on a CPU; at 3e-7, float32's rounding, a tenth of the passes crept near that floor
NARROW_LIMIT = 1e20  # largest v that float32 passes start from
ANY_PASS = 1 << 30  # halves of a pass have no number to stop at
PASSES_A_READ = 32  # at most, of ranks: in a read the device waits for 140 us, a pass after the end takes it 20 us
POINTERS = {name for name, (kind, *_) in (STATE.fields or {}).items() if kind == np.uint64}
COLUMN_VECTORS = ("weight", "log_weight", "rho", "upper", "absorbed", "fi", "rate")
MOST_WORDS = 1 << 15  # of vectors that are read with each report: 20 us
STREAM_WORDS = 1 << 17  # of the parts of a row's sum that streams over M leave, and of what the pool rounds up
MOST_IDLE, IDLE_WORDS = 8, 1 << 20  # workspaces that are kept for a later solve, and words of the vectors of one


def whole_lines(count: int) -> int:
    """Round a number of words up to a line of the cache."""
    return -(-count // 32) * 32


class Layout(NamedTuple):
    """The places of the vectors of a workspace in one allocation, in words, and of their addresses in a State."""

    places: dict[str, tuple[int, int]]  # first word and how many; "up", "down" and "left" are of several vectors
    size: int
    slots: Any  # words of a State that are addresses
    offsets: Any  # bytes from the first word to what they point at


@lru_cache(maxsize=256)
def layout(m: int, ld: int, in_place: bool, lie: Lie) -> Layout:
    """Lay out the vectors of a solve, so that what absorb writes is one piece, and what is read at the end."""
    copies, parts = lie.copies, max(BLOCKS, lie.parts)
    report = (2 * PROGRESS.itemsize + TRACE_PASSES * TRACE.itemsize) // 8
    words = {"u_log": m, "r": m, "x": ld, "s": ld, "x_next": copies * ld, "report": report}
    words |= {"alpha": m, "beta": ld} | dict.fromkeys(("v_scale", "narrow_v"), copies * ld)
    words |= {"cols": len(COLUMN_VECTORS) * whole_lines(ld), "point": 4 * m}
    words |= {"scalars": 2 * parts * SCALARS, "sums": 3 * ld}
    words |= dict.fromkeys(("image", "residual"), copies * ld)
    words |= dict.fromkeys(("dF", "dG"), copies * lie.memory * ld)
    words |= {"u_scale": m * (1 + in_place), "ratio": ld * in_place}
    words |= {"work": 2 * ld, "next_v": 2 * ld, "total": ld + SCALARS}
    words |= {"slab": lie.slab * ld * lie.ordered, "partial": 2 * parts * POSTS, "barrier": 32}
    places, at = {}, 0
    for name, count in words.items():
        places[name] = at, count
        at += whole_lines(count)
    # that absorb writes, that a launch is read by, that passes add to
    several = ("up", "x_next", "scalars", SCALARS), ("down", "u_log", "report", 0), ("left", "scalars", "sums", 0)
    for name, first, last, some in several:
        at_first, (at_last, all_of) = places[first][0], places[last]
        places[name] = at_first, at_last + (some or all_of) - at_first
    fields: Any = STATE.fields
    address = {fields[name][1]: 8 * first for name, (first, count) in places.items() if count and name in POINTERS}
    (cols, at_cols), progress = fields["cols"], 8 * places["report"][0]
    for k, name in enumerate(COLUMN_VECTORS):
        address[at_cols + cols.fields[name][1]] = 8 * (places["cols"][0] + k * whole_lines(ld))
    address |= {fields["progress"][1]: progress, fields["trace"][1]: progress + 2 * PROGRESS.itemsize}
    slots, offsets = np.array([*address], np.int64) // 8, np.array([*address.values()], np.uint64)
    return Layout(places, at, slots, offsets)


class Views(dict[str, Any]):
    """Named parts of one array, views made when they are first asked for: one takes CuPy 5 us."""

    def __init__(self, block: Any, places: dict[str, tuple[int, int]], before: int = 0) -> None:
        """``before``: the first word of the block."""
        self.block, self.places, self.before = block, places, before

    def __missing__(self, name: str) -> Any:
        at, count = self.places[name]
        dtype = {"narrow_v": np.float32, "report": np.uint8, "partial": np.uint64}.get(name, np.float64)
        part = self[name] = self.block[at - self.before : at - self.before + count].view(dtype)
        return part


@formula
def kl_rows(
    d: F64, off: Any, weight: F64, log_weight: F64, rho: F64, soft_rho: F64, hard: Any, reg: float
) -> tuple[F64, ...]:  # fmt: skip
    """Return what the prox of a KL row needs, four numbers a row: see row_of in row_prox.cuh."""
    fi = 1 / (1 + reg / rho)
    base = np.where(np.isinf(d), -np.inf, fi * log_weight - (1 - fi) * d)
    return base, fi, -soft_rho, np.where(hard & ~off, reg * weight, 0.0)


@formula
def columns(
    e: F64, off: Any, x: F64, weight: F64, log_weight: F64, rho: F64, upper: Any, reg: float
) -> tuple[F64, ...]:  # fmt: skip
    """Return the `COLUMN_VECTORS`, log v + shift, v and a v that float32 holds."""
    rate = reg / rho
    x = np.minimum(x, e + LARGEST_LOG)  # the v that passes have is the one that is told
    v = np.exp(x - e)  # 0 where e is inf
    used, log_weight = np.where(off, 0.0, weight), np.where(np.isinf(e), 0.0, log_weight)
    return used, log_weight, rho, upper, e, 1 / (1 + rate), rate, x, v, np.minimum(v, NARROW_LIMIT)


@formula
def weighed(weight: F64, x: F64, rate: float) -> F64:
    return weight * np.exp(-rate * x)


class DeviceWorkspace(Workspace):
    """One solve: both sides, the column sums, Anderson's history, and the State that points at them and at K.

    A K that the device has no room for, in the storage asked for or a coarser one, is made anew in every pass, ``some``
    rows at once.
    """

    some = 0
    unbuilt = False  # alpha and beta are staged, and K is not made of them yet
    makes = DeviceOperator
    key: Any = None  # of IDLE, by which a later solve finds this workspace
    sides: Any = None  # which the key names by their ids, kept for them to stay what they are
    read_all = False  # nothing is under way on the device

    def __init__(
        self, problem: Problem, options: Options, skip: Truncation | None = None, beside: Iterable[Job] = ()
    ) -> None:  # fmt: skip
        """``beside``: what else the caller needs, compiled at the same time."""
        super().__init__(problem, options, skip)
        begin(beside)
        self.safe_spread = SAFE_SPREAD
        self.dtype = "float64" if self.dtype == "made" else self.dtype  # K is read sooner than it is made
        self.ld = -(-problem.shape[1] // PAD) * PAD
        self.held = isinstance(problem.rows.weight, cp.ndarray)  # its vectors, and what is made of them
        self.kl = problem.rows.logarithmic, problem.cols.logarithmic
        self.state = np.zeros((), STATE)
        self.downloaded: Views | None
        self.operator = self.makes(*parts_of(problem))
        self.take_kernel()
        self.allocate()
        self.constants()
        self.start()
        self.open_coarse()

    def open_coarse(self) -> None:
        """Passes that clusters may correct."""
        corrects = self.launch.memory > MEMORY[0] and not self.some and self.problem.cost.operator == "tiles"
        self.coarse = DeviceCoarse(self, self.problem, int(self.state["limits"]["memory"]) if corrects else 0)

    def take(self, problem: Problem) -> None:
        """Serve another M between the same sides, with a K of its own."""
        self.problem = problem
        self.operator = self.makes(*parts_of(problem))
        self.make_K()
        self.launch.graphs.clear()  # they hold the state as it was
        self.launch.parity, self.fresh = 0, False
        self.start()
        self.open_coarse()

    @property
    def reads(self) -> str:
        """Name what passes read now, and by which kernels."""
        what = "float64 rows" if self.some else super().reads
        what = f"{self.dtype} tiles" if type(self) is DeviceWorkspace and not self.some else what
        return f"{what} on a GPU, {'persistent' if self.launch.persistent else 'portable'}"

    def take_kernel(self) -> None:
        """Memory for K as ``find_room`` says, and the kernels for it, on the grid of the rank with the most rows."""
        self.most = int(self.problem.ranks.max(self.problem.shape[0]))
        self.find_room(list(STORES)[list(STORES).index(self.dtype) :])
        self.make_room()

    def make_room(self) -> None:
        """K, and what passes over it."""
        n = self.problem.shape[1]
        self.make_K()
        build = stream_job("build_kernel", self.problem.cost, self.problem.c, STORES[self.dtype])
        lie = (self.some or self.most, n, self.ld), self.dtype, self.kl, self.options.in_place, (build,)
        self.launch = Iterate(self.state, *lie, portable=self.some > 0 or self.options.symmetric)

    def make_K(self) -> None:  # noqa: N802
        self.operator.store(self.dtype, self.some or self.problem.shape[0])
        self.operator.stages = Carrier(), Carrier()
        self.state["kernel"] = self.operator.K.data.ptr

    def find_room(self, stores: list[str]) -> None:
        """The first of these storages of K that all ranks have room for; else ``some`` rows at once, in float64."""
        m, ranks = self.problem.shape[0], self.problem.ranks
        sizes = [m * self.ld * ITEMSIZE[name] for name in stores]
        beside = [self.beside(name) for name in stores]
        free = free_memory(max(map(sum, zip(sizes, beside, strict=True)), default=0))
        fits = next((k for k, size in enumerate(sizes) if size + beside[k] <= free), len(sizes))
        if self.options.in_place:
            need_memory(sizes[0], self.dtype, beside[0])
        elif (found := int(ranks.max(fits))) < len(sizes):
            self.dtype, self.some = stores[found], 0
        else:
            self.dtype, self.some = "float64", max(1, min(self.most, arrays.BLOCK_BYTES // (8 * self.ld)))
            need_memory(0, self.dtype, self.beside("float64") + 8 * self.some * self.ld)
            self.options = replace(self.options, symmetric=False)  # a row's v is not found by its place in a block

    def beside(self, dtype: str) -> int:
        """Bytes that a solve takes beside K at most, whatever grid its kernels get."""
        (m, n), M, c = self.problem.shape, self.problem.M, self.problem.c
        memory, ordered = memory_for(self.most, n, ITEMSIZE[dtype]), "ordered" in switches()
        most = self.layout(Lie(BLOCKS, BLOCKS if n <= SOLO_COLUMNS else 1, memory, BLOCKS, ordered))
        count = most.size + 2 * (m + n) + 2 * max(m, n) + STREAM_WORDS
        count += words_of_clusters(m, n, self.ld) * (memory > MEMORY[0])
        given = c.given if isinstance(c, Masked) else None if c is None else c.array
        return 8 * count + sum(block_bytes(x, rows_at_once(M)) for x in (M, given))

    def layout(self, lie: Lie) -> Layout:
        return layout(self.problem.shape[0], self.ld, self.options.in_place, lie)

    def allocate(self) -> None:
        self.lies = self.layout(self.launch.lie)
        zeros = vectors.zeros if self.held else cp.zeros
        self.arrays, self.downloaded, self.fresh = Views(zeros(self.lies.size), self.lies.places), None, True
        first, count = self.lies.places["up"]
        self.staged = self.arrays if self.held else Views(pinned(count), self.lies.places, first)
        if not self.held:
            self.staged.block[:] = 0
        address = np.uint64(self.arrays.block.data.ptr)
        self.state.reshape(1).view(np.uint64)[self.lies.slots] = address + self.lies.offsets

    def constants(self) -> None:
        problem, options, state = self.problem, self.options, self.state
        state["m"], state["n"], state["ld"] = *problem.shape, self.ld
        state["parts"], state["share"], state["solo"] = self.launch.parts, self.launch.share, self.launch.solo
        scales = WIDE_SCALES if self.dtype == "float64" else SCALES
        memory = min(memory_of(options.memory, self.most, ITEMSIZE[self.dtype]), self.launch.memory)
        state["limits"] = limits_of(problem, options, self.dtype, NARROW_NOISE)
        put(state["limits"], scales | {"memory": memory})
        for name, side in (("rows", problem.rows), ("cols", problem.cols)):
            state[name]["penalty"] = side.kind.number

    def refine(self) -> None:
        """K in float64 from here on, or in the finest storage that there is room for."""
        log_v, progress, coarse = self.next_log_v, self.progress.copy(), self.dtype
        self.operator.close()
        self.key = None
        self.find_room(list(STORES)[: list(STORES).index(coarse)])
        self.make_room()
        self.allocate()
        self.constants()
        self.start()
        for name in ("passes", "best_error", "progress_dual"):
            self.progress[name] = progress[name]
        self.absorb(log_v)

    def start(self) -> None:
        self.progress = np.zeros((), PROGRESS)
        put(self.progress, START)
        self.progress["narrow"] = self.launch.narrow is not None

    def progress_of(self, name: str) -> float:
        return float(self.progress[name])

    def put(self, name: str, values: F64) -> None:
        first, count = self.lies.places["up"]
        sent = self.held or first <= self.lies.places[name][0] < first + count
        part = (self.staged if sent else self.arrays)[name][: len(values)]
        if sent:
            part[:] = values
        elif len(values):
            part.set(np.ascontiguousarray(values, part.dtype))

    def shifted_log_v(self) -> F64:
        x: F64 = self.answers["x_next"][: self.problem.shape[1]]
        return x

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        """Send alpha and beta with all that ``set_cols`` sends; K is made of them then."""
        self.progress["exponent_error"] = error
        self.put("alpha", alpha)
        self.put("beta", beta)
        self.unbuilt = True

    def set_dual_constants(self, d: F64, off: Any) -> None:
        """Set every backend's constants, and rho a of KL rows; hard rows add reg a (log u - d), not reg a log u."""
        rows = self.problem.rows
        terms = held = 0.0
        if self.kl[0] and not self.options.symmetric:
            used = np.where(off, 0.0, rows.weight)
            hard = np.where(rows.hard, used, 0.0)
            terms, held = float((rows.soft_rho * used).sum()), float(hard.sum())
            if held:
                terms += self.problem.reg * float((hard * np.where(hard > 0, d, 0.0)).sum())
        total, scale = self.dual_constants()
        self.progress["dual_constant"] = total + rows.ranks.sum(terms)
        self.state["limits"]["dual_scale"] = scale
        self.state["hard_weight"] = rows.ranks.sum(held)
        self.launch.graphs.clear()  # they hold the state as it was

    def set_rows(self, d: F64, off: Any) -> None:
        """Set what the prox of a row needs, four numbers a row: see row_of in row_prox.cuh."""
        side, reg = self.problem.rows, self.problem.reg
        self.d, point = d, self.staged["point"].reshape(-1, 4)
        if self.kl[0]:
            known = d, off, side.weight, side.log_weight, side.rho, side.soft_rho, side.hard, reg
            kl_rows(*known, into=[point[:, k] for k in range(4)])
            return
        used = np.where(off, 0.0, side.weight)
        for k, values in enumerate((d, used, side.rho, 0.0 if side.upper is None else side.upper)):
            point[:, k] = values

    def set_cols(self, e: F64, off: Any, x: F64, shift: float | None) -> None:
        self.progress["shift"] = self.progress["shift"] if shift is None else shift
        side, n, reg = self.problem.cols, self.problem.shape[1], self.problem.reg
        upper = 0.0 if side.upper is None else side.upper
        cols = self.staged["cols"].reshape(len(COLUMN_VECTORS), -1)
        cols[COLUMN_VECTORS.index("absorbed"), n:] = np.inf
        x_next, v, narrow_v = (self.staged[name][:n] for name in ("x_next", "v_scale", "narrow_v"))
        known = e, off, x, side.weight, side.log_weight, side.rho, upper, reg
        columns(*known, into=[*(row[:n] for row in cols), x_next, v, narrow_v])
        if self.options.in_place:  # the plan starts as K: u = v = 1
            self.put("ratio", v)
            self.arrays["u_scale"].fill(1)
        scaled = weighed(cols[0][:n], x_next, float(self.state["limits"]["rate_cols"]))
        for k, value in enumerate((float(scaled.sum()), float(v.sum())), SCALARS - 2):
            self.staged["scalars"][k] = value
        self.progress["narrow"] *= 1 / NARROW_LIMIT <= largest(v) <= NARROW_LIMIT
        put(self.progress, dict.fromkeys(("turn", "since_absorb", "status", "leaps"), 0))
        if not self.fresh:
            self.arrays["left"].fill(0)
        self.fresh, self.downloaded = False, None
        self.send_progress()

    def send_progress(self) -> None:
        """Progress as it is here, with all that is staged; nothing is posted yet."""
        self.read_all = False
        vectors.fill(self.arrays["partial"], UNSET)
        if self.held:
            self.send_report()
            return
        self.staged["report"][: 2 * PROGRESS.itemsize] = self.report
        self.arrays["up"].set(self.staged.block, stream=cp.cuda.get_current_stream())
        if self.unbuilt:
            self.operator.build(
                self.arrays["alpha"], self.arrays["beta"], float(self.state["limits"]["flush"]), not self.some
            )
            self.unbuilt = False

    def resume(self) -> None:
        """Let passes follow a status at which the kernels rest: where columns are hard, Newton's step asks for more."""
        self.progress["status"] = 0.0
        self.send_report()

    @property
    def report(self) -> Any:
        """Return both halves of progress, as bytes."""
        return np.frombuffer(self.progress.tobytes() * 2, np.uint8)

    def send_report(self) -> None:
        self.arrays["report"][: 2 * PROGRESS.itemsize].set(self.report)

    def make_passes(self, count: int) -> list[Stats]:
        done: list[Stats] = []
        while len(done) < count and (not done or done[-1].status == "running"):
            self.passes(count - len(done))
            done += self.read()
        return done

    def passes(self, count: int, before: int = 0) -> None:
        """Enqueue at most so many, after ``before`` that no read has told of.

        Those after the end, or after the last one in float32, change nothing. A finer K is made only now: until then
        the answer is that of the last pass on the coarse one. A status at which the kernels rest is cleared first.
        """
        ranks, self.read_all = self.problem.ranks, False
        if self.progress["status"] in (CONVERGED, STALLED) and not before:
            self.resume()
        if self.progress["status"] == COARSE:
            self.refine()
        if ranks.size == 1 and not self.some:
            self.downloaded = None
            self.launch(min(count, self.launch.most), int(self.progress["passes"]) + before)
            return
        for _ in range(1 if self.some else min(count, PASSES_A_READ)):
            with ranks.adding(self.sums):
                self.row_pass()
            self.finish_pass()

    @property
    def sums(self) -> Any:
        """Sums that row_pass leaves on the device for finish_pass: K^T u (ld numbers), then the row scalars."""
        return self.arrays["total"]

    def row_pass(self) -> None:
        """The row half of one pass; with rows on several devices, sum ``sums`` over them before finish_pass."""
        if not self.some:
            self.launch.rows(ANY_PASS, bool(self.progress["narrow"]))
            return
        for i0, i1, M, c in self.operator.blocks(most=self.some):
            self.operator.fill(i0, i1, M, c, float(self.state["limits"]["flush"]))
            part = self.state.copy()
            part["m"] = i1 - i0
            for name, numbers in (("point", 4), ("u_log", 1), ("r", 1), ("u_scale", 1)):
                part[name] += 8 * numbers * i0
            self.launch.some_rows(part)
        self.launch.gather()

    def finish_pass(self) -> None:
        """The O(n) half."""
        self.downloaded = None
        self.launch.finish(ANY_PASS, bool(self.progress["narrow"]), self.arrays["total"].data.ptr)

    def read(self) -> list[Stats]:
        """The one read of a launch: progress and trace."""
        self.problem.ranks.all(None)  # a rank that failed meets the others here, before they wait for their GPUs
        if not self.held and self.lies.places["down"][1] <= MOST_WORDS:
            self.downloaded = self.download()
        there = self.arrays if self.downloaded is None else self.downloaded
        report, size = host(there["report"]), PROGRESS.itemsize
        self.read_all = True
        before, half = int(self.progress["passes"]), self.launch.parity
        self.progress = report[half * size : (half + 1) * size].view(PROGRESS)[0].copy()
        trace = report[2 * size :].view(TRACE)
        status, passes = int(self.progress["status"]), int(self.progress["passes"])
        if status == ABSORB and passes == before:
            self.absorb()  # the next pass could not be made on this K
        return told(trace[np.arange(before, passes) % TRACE_PASSES], before + 1)

    @property
    def answers(self) -> Views:
        """u_log, r, x, s and x_next, where the vectors of the sides are: on the host by one transfer."""
        if self.held:
            return self.arrays
        if self.downloaded is None:
            self.downloaded = self.download()
        return self.downloaded

    def download(self) -> Views:
        first, count = self.lies.places["down"]
        return Views(self.arrays["down"].get(out=pinned(count)), self.lies.places, first)

    def potentials(self) -> tuple[F64, F64]:
        with np.errstate(invalid="ignore"):
            log_u = self.answers["u_log"] + self.d + float(self.progress["shift"] + self.progress["offset"])
        return self.limited(log_u, 0), self.limited(self.answers["x"][: self.problem.shape[1]], 1)

    def marginals(self) -> tuple[F64, F64]:
        r = self.answers["r"] * float(self.progress["kappa"])
        return r, self.answers["s"][: self.problem.shape[1]].copy()

    def close(self) -> None:
        """Give K back at once, and lay the rest aside for a later solve if it is small and at rest."""
        self.operator.close()
        self.state["kernel"] = 0
        if self.key is not None and self.read_all:
            del self.problem, self.coarse, self.operator  # which hold the caller's M
            IDLE[self.key] = self
            if len(IDLE) > MOST_IDLE:
                IDLE.popitem(last=False)


IDLE: OrderedDict[Any, DeviceWorkspace] = OrderedDict()  # by what they have in common with a problem that they serve


def workspace_of(problem: Problem, options: Options, skip: Truncation | None = None) -> DeviceWorkspace:
    """Return an idle workspace of the same sides, reg and options, or a new one.

    Of a small problem all but K takes longer to set up than the passes (`IDLE_WORDS`): .35 of a call.
    """
    key: Any = None
    if skip is None and problem.c is None and problem.ranks.size == 1:
        here = cp.cuda.runtime.getDevice(), cp.cuda.get_current_stream().ptr, switches()
        key = *here, problem.reg, problem.reference, options, id(problem.rows), id(problem.cols)
    if (idle := IDLE.pop(key, None)) is not None:
        try:
            idle.take(problem)
            return idle
        except MemoryError:  # a new one may find room in a coarser storage
            pass
    made = DeviceWorkspace(problem, options, skip)
    if not (made.some or made.held) and made.lies.size <= IDLE_WORDS:
        made.key, made.sides = key, (problem.rows, problem.cols)
    return made
