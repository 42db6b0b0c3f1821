"""The CUDA backend: CuPy owns the memory, src_cuda does the work; matrices stay where the caller has them.

CuPy arrays and DLPack tensors are used in place; a numpy M goes to the device in row blocks, so that only K has to fit.
Vectors come back as numpy arrays; plans and products have the type of M. Everything runs on the current device and
stream. One or two launches and one read of a few numbers make up to TRACE_PASSES passes. Where ranks share the rows, a
pass is row_pass, the sum over the ranks and finish_pass, and up to PASSES_A_READ passes are enqueued at once. All ranks
finish on the same sums with the same grid, so all take the same decisions. Twin: backends/cpu/workspace.py.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# first, for its clear error without CuPy
from . import vectors  # isort: skip
from .arrays import Carrier, block_bytes, free_memory, need_memory, pinned, rows_at_once  # isort: skip
import cupy as cp

from ...arrays import PAD, formula, host, largest
from ...contract import ANDERSON_DEPTHS, Options, Stats
from ...penalties import F64
from ...problem.mask import MaskedReference
from ...problem.problem import Problem
from ..boxes import Truncation
from ..limits import limits_of
from ..operator import parts_of
from ..pairs import ALL_PAIRS
from ..records import ABSORB, COARSE, CONVERGED, STALLED, put, stats_of
from ..rules import START
from ..workspace import LARGEST_LOG, Workspace, anderson_depth_of, for_users
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
    anderson_depth_for,
    begin,
)
from .launch import TRACE_PASSES, Iterate, LaunchLayout, switches
from .operator import DeviceOperator
from .settings import DEVICE_ARRAYS
from .stream import stream_job

SCALES = {"scale_limit": 1e30, "most_scale": 8e36}  # finite in float32 even times WIDEN; e^BOUND of common.cuh
WIDE_SCALES = {"scale_limit": 1e150, "most_scale": 1e300}  # for a float64 K
SAFE_RANGE = 40.0  # largest range(M) / reg of an unbalanced K: the scalings stay below e^85
NARROW_NOISE = 2e-6  # as on a CPU; at 3e-7, float32's rounding, a tenth of the passes gained little near that floor
NARROW_LIMIT = 1e20  # float32 passes start only if the largest v is smaller
ANY_PASS = 1 << 30  # pass number for launches of one half of a pass, which stop at no number
PASSES_A_READ = 32  # most passes of ranks a read: a read idles the device for 140 us, a superfluous pass takes 20 us
POINTERS = {name for name, (kind, *_) in (STATE.fields or {}).items() if kind == np.uint64}
COLUMN_VECTORS = ("weight", "log_weight", "rho", "upper", "absorbed", "fi", "rate")
MOST_WORDS = 1 << 15  # up to this many words of vectors are read with each report: 20 us
STREAM_WORDS = 1 << 17  # words for the partial row sums of streams over M, and for the rounding up of CuPy's pool
MOST_IDLE = 8  # most workspaces kept for later solves
IDLE_WORDS = 1 << 20  # most words of vectors of a kept workspace


def whole_lines(count: int) -> int:
    """Round a number of words up to whole cache lines."""
    return -(-count // 32) * 32


class Layout(NamedTuple):
    """The places of a workspace's vectors in one allocation, in words, and the places of their addresses in a State."""

    places: dict[str, tuple[int, int]]  # (first word, number of words); "up", "down" and "left" span several vectors
    size: int
    slots: Any  # indices of the words of a State that are addresses
    offsets: Any  # for each address: bytes from the start of the allocation


@lru_cache(maxsize=256)
def layout(m: int, ld: int, in_place: bool, launch: LaunchLayout) -> Layout:
    """Lay out the vectors of a solve, so that the vectors written by absorb are contiguous, and the results, too."""
    copies = launch.copies
    parts = max(BLOCKS, launch.parts)
    report = (2 * PROGRESS.itemsize + TRACE_PASSES * TRACE.itemsize) // 8
    words = {"u_log": m, "r": m, "x": ld, "s": ld, "x_next": copies * ld, "report": report}
    words |= {"alpha": m, "beta": ld} | dict.fromkeys(("v_scale", "narrow_v"), copies * ld)
    words |= {"cols": len(COLUMN_VECTORS) * whole_lines(ld), "point": 4 * m}
    words |= {"scalars": 2 * parts * SCALARS, "sums": 3 * ld}
    words |= dict.fromkeys(("image", "residual"), copies * ld)
    words |= dict.fromkeys(("dF", "dG"), copies * launch.anderson_depth * ld)
    words |= {"u_scale": m * (1 + in_place), "ratio": ld * in_place}
    words |= {"work": 2 * ld, "next_v": 2 * ld, "total": ld + SCALARS}
    words |= {"slab": launch.slab * ld * launch.ordered, "partial": 2 * parts * POSTS, "barrier": 32}
    places = {}
    at = 0
    for name, count in words.items():
        places[name] = at, count
        at += whole_lines(count)
    # up: written by absorb; down: read after a launch; left: passes add to it
    several = ("up", "x_next", "scalars", SCALARS), ("down", "u_log", "report", 0), ("left", "scalars", "sums", 0)
    for name, first, last, words_of_last in several:
        at_first = places[first][0]
        at_last, all_of = places[last]
        places[name] = at_first, at_last + (words_of_last or all_of) - at_first
    fields: Any = STATE.fields
    address = {fields[name][1]: 8 * first for name, (first, count) in places.items() if count and name in POINTERS}
    cols, at_cols = fields["cols"]
    progress = 8 * places["report"][0]
    for k, name in enumerate(COLUMN_VECTORS):
        address[at_cols + cols.fields[name][1]] = 8 * (places["cols"][0] + k * whole_lines(ld))
    address |= {fields["progress"][1]: progress, fields["trace"][1]: progress + 2 * PROGRESS.itemsize}
    slots = np.array([*address], np.int64) // 8
    offsets = np.array([*address.values()], np.uint64)
    return Layout(places, at, slots, offsets)


class Views(dict[str, Any]):
    """Named parts of one array; a view is made at first use, as it takes CuPy 5 us."""

    def __init__(self, block: Any, places: dict[str, tuple[int, int]], before: int = 0) -> None:
        """``before``: index of the block's first word in the layout."""
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
    """Return the data of the prox of KL rows, four numbers a row: see row_of in row_prox.cuh."""
    fi = 1 / (1 + reg / rho)
    base = np.where(np.isinf(d), -np.inf, fi * log_weight - (1 - fi) * d)
    return base, fi, -soft_rho, np.where(hard & ~off, reg * weight, 0.0)


@formula
def columns(
    e: F64, off: Any, x: F64, weight: F64, log_weight: F64, rho: F64, upper: Any, reg: float
) -> tuple[F64, ...]:  # fmt: skip
    """Return the `COLUMN_VECTORS`, log v + shift, v, and v clipped for float32."""
    rate = reg / rho
    x = np.minimum(x, e + LARGEST_LOG)  # clip log v with v, so that both agree
    v = np.exp(x - e)  # 0 where e is inf
    used = np.where(off, 0.0, weight)
    log_weight = np.where(np.isinf(e), 0.0, log_weight)
    return used, log_weight, rho, upper, e, 1 / (1 + rate), rate, x, v, np.minimum(v, NARROW_LIMIT)


@formula
def weighed(weight: F64, x: F64, rate: float) -> F64:
    return weight * np.exp(-rate * x)


class DeviceWorkspace(Workspace):
    """One solve: both sides, the column sums, Anderson's history, and the State that points at them and at K.

    If K does not fit on the device, in the storage asked for or a coarser one, every pass makes it again,
    ``block_rows`` rows at once.
    """

    block_rows = 0  # rows of K that a pass makes at once; 0: K is stored
    unbuilt = False  # alpha and beta are staged, but K is not built from them yet
    operator_class = DeviceOperator
    key: Any = None  # key in IDLE: a later solve finds this workspace by it
    sides: Any = None  # kept alive: the key contains the ids of the sides
    read_all = False  # True: nothing is running on the device

    def __init__(
        self, problem: Problem, options: Options, skip: Truncation | None = None, beside: Iterable[Job] = ()
    ) -> None:  # fmt: skip
        """``beside``: further kernels of the caller, compiled in parallel."""
        self.problem, self.options, self.policy = problem, options, skip or ALL_PAIRS
        self.dtype = options.precision
        begin(beside)
        self.safe_range = SAFE_RANGE
        # reading K is faster than making it
        if self.dtype == "made":
            self.dtype = "float64"
        self.ld = -(-problem.shape[1] // PAD) * PAD
        self.on_device = isinstance(problem.rows.weight, cp.ndarray)  # the vectors of the problem
        self.kl = problem.rows.logarithmic, problem.cols.logarithmic
        self.state = np.zeros((), STATE)
        self.downloaded: Views | None
        self.operator = self.operator_class(*parts_of(problem))
        self.take_kernel()
        self.allocate()
        self.constants()
        self.start()
        self.open_coarse()

    def open_coarse(self) -> None:
        """Make the coarse correction of passes."""
        corrects = (
            self.launch.anderson_depth > ANDERSON_DEPTHS[0]
            and not self.block_rows
            and self.problem.cost.operator == "tiles"
        )
        if corrects:
            depth = int(self.state["limits"]["anderson_depth"])
        else:
            depth = 0
        self.coarse = DeviceCoarse(self, self.problem, depth)

    def load(self, problem: Problem) -> None:
        """Take another M between the same sides, and allocate its K."""
        self.problem = problem
        self.operator = self.operator_class(*parts_of(problem))
        self.make_K()
        self.launch.graphs.clear()  # they hold the state as it was
        self.launch.parity, self.fresh = 0, False
        self.start()
        self.open_coarse()

    @property
    def reads(self) -> str:
        """Name the matrix that passes read now, and the kind of kernels."""
        if self.block_rows:
            what = "float64 rows"
        else:
            what = super().reads
        if type(self) is DeviceWorkspace and not self.block_rows:
            what = f"{self.dtype} tiles"
        return f"{what} on a GPU, {'persistent' if self.launch.persistent else 'portable'}"

    def take_kernel(self) -> None:
        """Allocate K in the storage that `find_room` chooses, and take kernels for the rank with the most rows."""
        self.most = int(self.problem.ranks.max(self.problem.shape[0]))
        self.find_room(list(STORES)[list(STORES).index(self.dtype) :])
        self.make_room()

    def make_room(self) -> None:
        """Allocate K, and take the kernels of passes."""
        n = self.problem.shape[1]
        self.make_K()
        build = stream_job("build_kernel", self.problem.cost, self.problem.c, STORES[self.dtype])
        given = (self.block_rows or self.most, n, self.ld), self.dtype, self.kl, self.options.in_place, (build,)
        self.launch = Iterate(self.state, *given, portable=self.block_rows > 0 or self.options.symmetric)

    def make_K(self) -> None:  # noqa: N802
        self.operator.store(self.dtype, self.block_rows or self.problem.shape[0])
        self.operator.stages = Carrier(), Carrier()
        self.state["kernel"] = self.operator.K.data.ptr

    def find_room(self, stores: list[str]) -> None:
        """Choose the first of these storages of K that fits on all ranks; else make blocks of rows in float64."""
        m = self.problem.shape[0]
        ranks = self.problem.ranks
        sizes = [m * self.ld * ITEMSIZE[name] for name in stores]
        beside = [self.beside(name) for name in stores]
        free = free_memory(max(map(sum, zip(sizes, beside, strict=True)), default=0))
        fits = next((k for k, size in enumerate(sizes) if size + beside[k] <= free), len(sizes))
        if self.options.in_place:
            need_memory(sizes[0], self.dtype, beside[0])
        elif (found := int(ranks.max(fits))) < len(sizes):
            self.dtype = stores[found]
            self.block_rows = 0
        else:
            self.dtype = "float64"
            self.block_rows = max(1, min(self.most, DEVICE_ARRAYS.block_bytes // (8 * self.ld)))
            need_memory(0, self.dtype, self.beside("float64") + 8 * self.block_rows * self.ld)
            self.options = replace(self.options, symmetric=False)  # kernels cannot map rows of a block to v

    def beside(self, dtype: str) -> int:
        """Bound the bytes of a solve without K, for any grid of its kernels."""
        (m, n), M, c = self.problem.shape, self.problem.M, self.problem.c
        depth = anderson_depth_for(self.most, n, ITEMSIZE[dtype])
        ordered = "ordered" in switches()
        most = self.layout(LaunchLayout(BLOCKS, BLOCKS if n <= SOLO_COLUMNS else 1, depth, BLOCKS, ordered))
        count = most.size + 2 * (m + n) + 2 * max(m, n) + STREAM_WORDS
        count += words_of_clusters(m, n, self.ld) * (depth > ANDERSON_DEPTHS[0])
        if isinstance(c, MaskedReference):
            given = c.given
        elif c is None:
            given = None
        else:
            given = c.array
        return 8 * count + sum(block_bytes(x, rows_at_once(M)) for x in (M, given))

    def layout(self, launch: LaunchLayout) -> Layout:
        return layout(self.problem.shape[0], self.ld, self.options.in_place, launch)

    def allocate(self) -> None:
        self.memory = self.layout(self.launch.layout)
        if self.on_device:
            zeros = vectors.zeros
        else:
            zeros = cp.zeros
        self.arrays = Views(zeros(self.memory.size), self.memory.places)
        self.downloaded = None
        self.fresh = True
        first, count = self.memory.places["up"]
        if self.on_device:
            self.staged = self.arrays
        else:
            self.staged = Views(pinned(count), self.memory.places, first)
        if not self.on_device:
            self.staged.block[:] = 0
        address = np.uint64(self.arrays.block.data.ptr)
        self.state.reshape(1).view(np.uint64)[self.memory.slots] = address + self.memory.offsets

    def constants(self) -> None:
        problem, options, state = self.problem, self.options, self.state
        state["m"], state["n"], state["ld"] = *problem.shape, self.ld
        state["parts"], state["share"], state["solo"] = self.launch.parts, self.launch.share, self.launch.solo
        if self.dtype == "float64":
            scales = WIDE_SCALES
        else:
            scales = SCALES
        depth = min(
            anderson_depth_of(options.anderson_depth, self.most, ITEMSIZE[self.dtype]), self.launch.anderson_depth
        )
        state["limits"] = limits_of(problem, options, self.dtype, NARROW_NOISE)
        put(state["limits"], scales | {"anderson_depth": depth})
        for name, side in (("rows", problem.rows), ("cols", problem.cols)):
            state[name]["penalty"] = side.kind.number

    def refine(self) -> None:
        """Switch K to float64, or to the finest storage that fits."""
        log_v = self.next_log_v
        progress = self.progress.copy()
        coarse = self.dtype
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

    @property
    def correcting(self) -> bool:
        return bool(self.progress["coarse"])

    def put(self, name: str, values: F64) -> None:
        first, count = self.memory.places["up"]
        sent = self.on_device or first <= self.memory.places[name][0] < first + count
        part = (self.staged if sent else self.arrays)[name][: len(values)]
        if sent:
            part[:] = values
        elif len(values):
            part.set(np.ascontiguousarray(values, part.dtype))

    def shifted_log_v(self) -> F64:
        x: F64 = self.answers["x_next"][: self.problem.shape[1]]
        return x

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        """Stage alpha and beta; K is built when `set_cols` has sent them."""
        self.progress["exponent_error"] = error
        self.put("alpha", alpha)
        self.put("beta", beta)
        self.unbuilt = True

    def set_dual_constants(self, d: F64, off: Any) -> None:
        """Set the dual's constants, and rho a of KL rows; passes add reg a (log u - d) for hard rows: add reg a d."""
        rows = self.problem.rows
        terms = hard_mass = 0.0
        if self.kl[0] and not self.options.symmetric:
            used = np.where(off, 0.0, rows.weight)
            hard = np.where(rows.hard, used, 0.0)
            terms = float((rows.soft_rho * used).sum())
            hard_mass = float(hard.sum())
            if hard_mass:
                terms += self.problem.reg * float((hard * np.where(hard > 0, d, 0.0)).sum())
        total, scale = self.dual_constants()
        self.progress["dual_constant"] = total + rows.ranks.sum(terms)
        self.state["limits"]["dual_scale"] = scale
        self.state["hard_weight"] = rows.ranks.sum(hard_mass)
        self.launch.graphs.clear()  # graphs contain a copy of the old state

    def set_rows(self, d: F64, off: Any) -> None:
        """Set the data of the prox of rows, four numbers a row: see row_of in row_prox.cuh."""
        self.set_dual_constants(d, off)
        side, reg = self.problem.rows, self.problem.reg
        self.d = d
        point = self.staged["point"].reshape(-1, 4)
        if self.kl[0]:
            inputs = d, off, side.weight, side.log_weight, side.rho, side.soft_rho, side.hard, reg
            kl_rows(*inputs, into=[point[:, k] for k in range(4)])
            return
        used = np.where(off, 0.0, side.weight)
        for k, values in enumerate((d, used, side.rho, 0.0 if side.upper is None else side.upper)):
            point[:, k] = values

    def set_cols(self, e: F64, off: Any, x: F64, shift: float | None) -> None:
        if shift is not None:
            self.progress["shift"] = shift
        side = self.problem.cols
        n = self.problem.shape[1]
        reg = self.problem.reg
        upper = 0.0 if side.upper is None else side.upper
        cols = self.staged["cols"].reshape(len(COLUMN_VECTORS), -1)
        cols[COLUMN_VECTORS.index("absorbed"), n:] = np.inf
        x_next, v, narrow_v = (self.staged[name][:n] for name in ("x_next", "v_scale", "narrow_v"))
        inputs = e, off, x, side.weight, side.log_weight, side.rho, upper, reg
        columns(*inputs, into=[*(row[:n] for row in cols), x_next, v, narrow_v])
        if self.options.in_place:  # the plan starts as K: u = v = 1
            self.put("ratio", v)
            self.arrays["u_scale"].fill(1)
        if not self.fresh:  # before the scalars are written: vectors of the problem on the device share its memory
            self.arrays["left"].fill(0)
        scaled = weighed(cols[0][:n], x_next, float(self.state["limits"]["rate_cols"]))
        for k, value in enumerate((float(scaled.sum()), float(v.sum())), SCALARS - 2):
            self.staged["scalars"][k] = value
        self.progress["narrow"] *= 1 / NARROW_LIMIT <= largest(v) <= NARROW_LIMIT
        put(self.progress, dict.fromkeys(("turn", "since_absorb", "status", "leaps"), 0))
        self.fresh, self.downloaded = False, None
        self.send_progress()

    def send_progress(self) -> None:
        """Send progress and all staged vectors; mark all posts of blocks as unset."""
        self.read_all = False
        vectors.fill(self.arrays["partial"], UNSET)
        if self.on_device:
            self.send_report()
            return
        self.staged["report"][: 2 * PROGRESS.itemsize] = self.report
        self.arrays["up"].set(self.staged.block, stream=cp.cuda.get_current_stream())
        if self.unbuilt:
            self.operator.build(
                self.arrays["alpha"], self.arrays["beta"], float(self.state["limits"]["flush"]), not self.block_rows
            )
            self.unbuilt = False

    def resume(self) -> None:
        """Clear a status that stops the kernels, so that passes can follow: Newton's steps may need more."""
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
        """Enqueue at most ``count`` passes; ``before``: passes enqueued since the last read.

        Passes after the end, or after the last float32 pass, change nothing. A finer K is made here, not earlier: until
        then the answer is the result of the last pass on the coarse K. Clear a status that stops the kernels first.
        """
        ranks, self.read_all = self.problem.ranks, False
        if self.progress["status"] in (CONVERGED, STALLED) and not before:
            self.resume()
        if self.progress["status"] == COARSE:
            self.refine()
        if ranks.size == 1 and not self.block_rows:
            self.downloaded = None
            self.launch(min(count, self.launch.most), int(self.progress["passes"]) + before)
            return
        for _ in range(1 if self.block_rows else min(count, PASSES_A_READ)):
            with ranks.adding(self.sums):
                self.row_pass()
            self.finish_pass()

    @property
    def sums(self) -> Any:
        """Return the sums that row_pass leaves on the device for finish_pass: K^T u (ld numbers), row scalars."""
        return self.arrays["total"]

    def row_pass(self) -> None:
        """Launch the row half of a pass; if ranks share the rows, the caller adds up ``sums`` before finish_pass."""
        if not self.block_rows:
            self.launch.rows(ANY_PASS, bool(self.progress["narrow"]))
            return
        for i0, i1, M, c in self.operator.blocks(most=self.block_rows):
            self.operator.fill(i0, i1, M, c, float(self.state["limits"]["flush"]))
            part = self.state.copy()
            part["m"] = i1 - i0
            for name, numbers in (("point", 4), ("u_log", 1), ("r", 1), ("u_scale", 1)):
                part[name] += 8 * numbers * i0
            self.launch.pass_over_rows(part)
        self.launch.gather()

    def finish_pass(self) -> None:
        """Launch the O(n) half of a pass."""
        self.downloaded = None
        self.launch.finish(ANY_PASS, bool(self.progress["narrow"]), self.arrays["total"].data.ptr)

    def read(self) -> list[Stats]:
        """Read progress and trace after a launch."""
        self.problem.ranks.all(None)  # ranks learn here of a failed rank, before they wait for their GPUs
        if not self.on_device and self.memory.places["down"][1] <= MOST_WORDS:
            self.downloaded = self.download()
        if self.downloaded is None:
            there = self.arrays
        else:
            there = self.downloaded
        report = host(there["report"])
        size = PROGRESS.itemsize
        self.read_all = True
        before = int(self.progress["passes"])
        half = self.launch.parity
        self.progress = report[half * size : (half + 1) * size].view(PROGRESS)[0].copy()
        trace = report[2 * size :].view(TRACE)
        status = int(self.progress["status"])
        passes = int(self.progress["passes"])
        if status == ABSORB and passes == before:
            self.absorb()  # this K does not allow the next pass
        return stats_of(trace[np.arange(before, passes) % TRACE_PASSES], before + 1)

    @property
    def answers(self) -> Views:
        """Return u_log, r, x, s and x_next where the sides' vectors are; one transfer brings them to the host."""
        if self.on_device:
            return self.arrays
        if self.downloaded is None:
            self.downloaded = self.download()
        return self.downloaded

    def download(self) -> Views:
        first, count = self.memory.places["down"]
        return Views(self.arrays["down"].get(out=pinned(count)), self.memory.places, first)

    def potentials(self) -> tuple[F64, F64]:
        with np.errstate(invalid="ignore"):
            log_u = self.answers["u_log"] + self.d + float(self.progress["shift"] + self.progress["offset"])
        (out_u, out_v), (dead_u, dead_v) = self.problem.left_out, self.dead
        log_v = self.answers["x"][: self.problem.shape[1]]
        return for_users(log_u, out_u, dead_u), for_users(log_v, out_v, dead_v)

    def marginals(self) -> tuple[F64, F64]:
        r = self.answers["r"] * float(self.progress["kappa"])
        return r, self.answers["s"][: self.problem.shape[1]].copy()

    def close(self) -> None:
        """Free K at once; keep the rest for a later solve if it is small and nothing is running."""
        self.operator.close()
        self.state["kernel"] = 0
        if self.key is not None and self.read_all:
            del self.problem, self.coarse, self.operator  # they hold the caller's M
            IDLE[self.key] = self
            if len(IDLE) > MOST_IDLE:
                IDLE.popitem(last=False)


IDLE: OrderedDict[Any, DeviceWorkspace] = OrderedDict()  # by device, stream, reg, options and ids of the sides


def workspace_of(problem: Problem, options: Options, skip: Truncation | None = None) -> DeviceWorkspace:
    """Return an idle workspace of the same sides, reg and options, or a new one.

    For a small problem (`IDLE_WORDS`) the setup without K takes longer than the passes: .35 of a call.
    """
    key: Any = None
    if skip is None and problem.c is None and problem.ranks.size == 1:
        here = cp.cuda.runtime.getDevice(), cp.cuda.get_current_stream().ptr, switches()
        key = *here, problem.reg, problem.reference, options, id(problem.rows), id(problem.cols)
    if (idle := IDLE.pop(key, None)) is not None:
        try:
            idle.load(problem)
            return idle
        except MemoryError:  # a new workspace may fit with a coarser storage
            pass
    made = DeviceWorkspace(problem, options, skip)
    if not (made.block_rows or made.on_device) and made.memory.size <= IDLE_WORDS:
        made.key = key
        made.sides = problem.rows, problem.cols
    return made
