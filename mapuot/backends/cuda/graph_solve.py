"""Plain problems solved whole on a device: the host sends one record, and reads one when the passes have ended.

No launch waits for the host: ``begin`` (dense/plain.cu) finds the range of M, builds K and sets the state before the
first pass; `Iterate` makes the passes; ``tell`` writes the answer to the host's memory. With one potential each pass is
a launch, and the host checks the status every TOGETHER_AT_ONCE passes. Everything that depends only on the sides, reg
and the options is kept for the next call; K is not. Twin: backends/cpu/core_solve.py.
"""

import copy
import math
import weakref
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from ...contract import ANDERSON_DEPTHS, Options
from ...problem.cost import Dense
from ...problem.metrics import METRICS
from ...problem.points import SquareRounding
from ...problem.problem import EXPONENT_ROUNDING, VANISHING, Problem
from ...problem.side import Side
from ..records import CONVERGED, RUNNING, STATS, put
from . import backend
from .arrays import COSTS, on_device, pinned
from .kernels import BLOCKS, PLAIN, POSTS, STORES, THREADS, Job, by_value, kernel
from .launch import BOTH, TRACE_PASSES, Chain, Launch, device_limits, switches
from .settings import DEVICE_CALLS
from .stream import stream, view_of
from .workspace import IDLE_WORDS, MOST_IDLE, SAFE_RANGE, DeviceWorkspace

TOGETHER_AT_ONCE = 8  # passes of one potential between two status checks: most solves take 5 to 10
BLOCK_ENTRIES = 1 << 11  # least entries of M for a block of ``begin``: a smaller grid synchronises faster
HEAD = 8  # words of an answer before its trace
LOGS_AT = HEAD + TRACE_PASSES * STATS.itemsize // 8  # the place of log u, log v and the marginals in an answer
PASS_WORDS = STATS.itemsize // 8  # of a record of the trace
MASS = list(STATS.names or ()).index("mass")  # the place of a pass's mass
WARP_BYTES = 32  # of shared memory for each warp of ``begin``
FEW_POSTS = 32  # POSTS of state.cuh, if passes keep few differences
MOST_BUFFERS = 16  # buffers with a graph of their own: an allocator returns few different ones
LEFT_AFTER = 3  # end a call after 3 times the passes that finding clusters costs: most solves end before
ALIGNED = 16  # bytes; M must begin at a multiple
NARROW_SHARES, NARROW_PAIRS = 1, 2  # kinds of stream.cu: places are float32, pairs are int32


class DeviceAnswer(NamedTuple):
    """Answer of one call."""

    numbers: Any  # log u, log v and the marginals, one after the other, on the host
    exponents: Any  # log u + log a, log v + log b and the marginal of the rows, on the device
    passes: bytes  # the records of all passes
    mass: float
    range: tuple[float, float]  # of M
    prepared: Any  # `SolveLaunches`, which draws from the plan


def costs_of(m: int, n: int, d: int, dtype: str) -> tuple[Launch, int, int]:
    """Return the launch of `distances` for these sizes, its blocks and their threads."""
    options = {"METRIC": METRICS["sqeuclidean"].number, "PLAN": 0, "STORE": 0, "COST": int(dtype == "f")}
    run = kernel("point_costs.cu", "point_costs", **options)
    nothing = (np.uint64(0),) * 5
    words = None, None, *map(np.int64, (d, 1, m, n, d)), np.float64(1), None, *nothing
    return Launch(run, 0, words), -(-m // COSTS) * -(-n // COSTS), 256


def distances(x: Any, y: Any) -> Any:
    """Return the squared distances, in float64, of points in C order on the current device."""
    if x.shape[1:] != y.shape[1:] or not x.size or not y.size:
        raise ValueError(f"the two clouds must have points of as many dimensions, got shapes {x.shape} and {y.shape}")
    if x.dtype.char not in "fd" or x.dtype != y.dtype:
        x, y = (z.astype(np.float64) for z in (x, y))
    out = cp.empty((len(x), len(y)))
    launch, blocks, threads = costs_of(len(x), len(y), x.shape[1], x.dtype.char)
    launch(blocks, threads, cp.cuda.get_current_stream().ptr, x.data.ptr, y.data.ptr, out.data.ptr)
    return out


def buffer_of(words: int) -> tuple[Any, int]:
    """Return the buffer of a solve between points, and the handle of the stream."""
    return cp.empty(words), cp.cuda.get_current_stream().ptr


def current() -> tuple[int, int]:
    """Return the current device and the handle of its stream."""
    return cp.cuda.runtime.getDevice(), cp.cuda.get_current_stream().ptr


def zeros(m: int, n: int) -> Any:
    """Return costs of 0 on the current device: a template for `SolveLaunches`."""
    return cp.zeros((m, n))


class LaunchedSolve:
    """A solve that is running on the device; the kernel ``tell`` ends it."""

    def __init__(self, prepared: Any, exponents: Any) -> None:
        self.prepared = prepared
        self.numbers = pinned(prepared.words)
        self.exponents = exponents
        self.ended = cp.cuda.Event(disable_timing=True)
        # wait before the memory that the device writes to is reused, but not at exit, when the device may be gone
        weakref.finalize(self, self.ended.synchronize).atexit = False

    @property
    def status(self) -> int:
        """Wait for the status."""
        self.ended.synchronize()
        return int(self.numbers[0])

    @property
    def mass(self) -> float:
        """Wait for the mass of the plan; NaN unless the solve has converged."""
        if self.status == CONVERGED:
            return float(self.numbers[self.end - PASS_WORDS + MASS])
        return math.nan

    @property
    def end(self) -> int:
        """Return the index of the word behind the trace."""
        return HEAD + int(self.numbers[1]) * PASS_WORDS

    def copied(self, prepared: Any, exponents: Any) -> "LaunchedSolve":
        """Wait for the solve, then copy its numbers out of the shared buffer."""
        self.ended.synchronize()
        one = copy.copy(self)
        one.prepared = prepared
        one.numbers = self.numbers.copy()
        one.exponents = exponents
        return one

    def answer(self) -> DeviceAnswer:
        """Return the answer. For an unfinished solve only log v and the passes are valid."""
        low, high = self.numbers[2:4].tolist()
        trace = self.numbers[HEAD : self.end].tobytes()
        return DeviceAnswer(self.numbers[LOGS_AT:], self.exponents, trace, self.mass, (low, high), self.prepared)


def jobs(cost: Any, dtype: str) -> list[Job]:
    """List the kernels to compile in addition to the passes."""
    options = {"STORE": STORES[dtype], "COST": int(cost == np.float32)}
    return [("plain.cu", function, options) for function in ("begin", "tell")]


class PointInputs(NamedTuple):
    """The points of a captured solve: their squared distances are its costs."""

    dim: int
    dtype: str  # of the coordinates: "d" or "f"
    n_pairs: int  # to draw from the plan


class SolveLaunches:
    """The launches of solves that differ in M only: kernels, their arguments, and vectors on the device."""

    ended: Any = None  # an event behind the last launch

    def __init__(
        self, M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, most_range: float,
        points: PointInputs | None = None,
    ) -> None:  # fmt: skip
        """``most``: most passes; ``most_range``: largest range(M) / reg without stages at larger regs.

        ``points``: set if the launches also form M from points, and draw pairs.
        """
        self.lock = Lock()  # held while the arguments of a call are in these records
        self.sides = rows, cols  # kept alive: keys of PREPARED contain the ids of the sides
        self.reg = reg
        problem = Problem(Dense(M), rows, cols, reg, "product", 0.0, 0.0, False, rows.mass * cols.mass)
        workspace = DeviceWorkspace(problem, options, beside=jobs(M.dtype, options.precision))
        fits = workspace.launch.persistent or options.symmetric
        self.fits = fits and not workspace.block_rows and workspace.memory.size <= IDLE_WORDS
        if not self.fits:
            return
        workspace.absorb(np.zeros(M.shape[1]))  # for costs of 0; ``begin`` recomputes everything that depends on M
        coarse = workspace.coarse  # a call ends before corrections pay: clusters cost as much as ``due`` passes
        if coarse.wanted:
            most = min(most, LEFT_AFTER * coarse.due)
        self.most = np.int32(min(most, backend.quick_passes))
        self.fill(workspace, problem, most_range)
        self.K = (M.shape[0], workspace.ld), workspace.operator.K.dtype
        workspace.close()
        workspace.operator = workspace.problem = workspace.coarse = None  # type: ignore[assignment]  # they hold M
        self.workspace, self.state = workspace, workspace.state
        self.compile(M, workspace.dtype, points)
        words = -(-math.prod(self.K[0]) * self.K[1].itemsize // 16) * 2
        # where K, M and the exponents end in the buffer of a solve between points, in words
        self.buffer_ends = words, words + M.size, words + M.size + 2 * len(M) + M.shape[1]

    def fill(self, workspace: DeviceWorkspace, problem: Problem, most_range: float) -> None:
        """Fill the record of ``begin``."""
        (m, n), rows, cols, launch = problem.shape, problem.rows, problem.cols, workspace.launch
        self.shape = m, n
        self.words = 2 * (m + n) + LOGS_AT
        self.logs = on_device(rows.log_weight, cols.log_weight)
        self.start = cp.asarray(np.frombuffer(workspace.progress.tobytes(), np.float64))
        self.beside = cp.zeros(4 * (BLOCKS + 1) + n)
        self.record = np.zeros((), PLAIN)
        symmetric = workspace.options.symmetric
        arrays = workspace.arrays
        if symmetric:
            soft = 0.0
        else:
            soft = float((rows.soft_rho * rows.weight).sum())
        addresses = {"alpha": arrays["alpha"], "beta": arrays["beta"], "log_a": self.logs[0], "log_b": self.logs[1]}
        addresses |= {"range": self.beside, "tops": self.beside[4 * (BLOCKS + 1) :], "start": self.start}
        numbers = {"safe_range": SAFE_RANGE, "most_range": most_range, "log_size": rows.log_size + cols.log_size}
        numbers |= {"rounding": EXPONENT_ROUNDING, "vanishing": VANISHING, "mass": cols.mass}
        numbers |= {"dual_constant": workspace.dual_constants()[0] + soft}
        numbers |= {"alike": problem.alike and m == n and not symmetric}
        numbers |= {"posts": POSTS if launch.anderson_depth > ANDERSON_DEPTHS[0] else FEW_POSTS}
        put(self.record, {**addresses, **numbers})

    def compile(self, M: Any, dtype: str, points: PointInputs | None) -> None:
        """Make the launches, except for arguments that depend on M."""
        m, n = self.shape
        processors = device_limits(cp.cuda.Device().id)[1]
        of = self.workspace.launch
        begin, tell = (kernel(file, function, **options) for file, function, options in jobs(M.dtype, dtype))
        records = by_value(self.state), by_value(self.record)
        blocks = max(1, min(processors, BLOCKS, -(-m * n // BLOCK_ENTRIES)))
        parts = [(Launch(begin, THREADS // 32 * WARP_BYTES, records, True), blocks, THREADS)]
        for one in (of.narrow, of.wide):
            if one is not None:
                words = records[0], *map(np.int32, (one.slots, one.kept, 0)), self.most, np.int32(BOTH)
                parts.append((Launch(one.run, one.shared, words, True), one.parts, THREADS))
        self.unchanged = [()] * len(parts)  # launches without words from a call
        self.tell = Launch(tell, 0, (*records, None, None, None)), max(1, min(processors, (m + n) // THREADS)), THREADS
        self.view = np.frombuffer(bytearray(view_of(M, None, None, None, self.reg)), np.uint64)
        words = self.view, None, None, None, None, None, np.int64(0), None, None, None
        self.draw = Launch(stream("draw", M, None), 0, words)
        if of.persistent:
            parts.append(self.tell)
        if points:
            parts = [costs_of(m, n, points.dim, points.dtype), *parts, (self.draw, -(-points.n_pairs // 8), 256)]
            # by address of a buffer: the graph and the solve that use it
            self.buffer_graphs: dict[int, tuple[Chain, LaunchedSolve]] = {}
        self.chain = Chain(*parts)

    def draw_words(
        self, M: int, exponents: int, pairs: tuple[int, int], size: int, seed: int,
        shares: tuple[int, int] = (0, 0), kinds: int = 0,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the words that the launch of ``draw`` takes; the row masses lie behind the exponents.

        ``pairs``: addresses of the rows and of the columns; ``shares``: of the shares of cumulated mass, for rows and
        columns; without them the seed draws. ``kinds``: NARROW_SHARES and NARROW_PAIRS.
        """
        m, n = self.shape
        self.view[2] = M
        self.view[8] = exponents
        self.view[9] = exponents + 8 * m  # View: M, alpha and beta
        return exponents + 8 * (m + n), *shares, seed, pairs[0], size, pairs[1], kinds

    def draw_pairs(self, M: Any, exponents: Any, size: int, seed: int) -> Any:
        """Draw pairs from the plan, (2, size)."""
        pairs = cp.empty((2, size), np.int64)
        with self.lock:
            to = pairs[0].data.ptr, pairs[1].data.ptr
            given = self.draw_words(M.data.ptr, exponents.data.ptr, to, size, seed)
            self.draw(-(-size // 8), 256, cp.cuda.get_current_stream().ptr, *given)
        return pairs

    def set_rounding(self, rate: float, rest: float, formed: Any) -> None:
        """Set the rounding of costs; ``formed``: the rounding of their matrix, a number or a `SquareRounding`."""
        if isinstance(formed, SquareRounding):
            beside = formed.sizes.data.ptr, formed.rate
        else:
            beside = 0, 0.0
            rest += formed
        self.record["cost_rate"], self.record["cost_rest"] = rate, rest
        self.record["sizes"], self.record["size_rate"] = beside

    def wait(self, on_stream: int) -> None:
        """Make this stream wait for earlier launches, which may have been on another stream with the same handle."""
        if self.ended and on_stream:  # stream 0 is always the same stream; a wait takes 10 us
            cp.cuda.runtime.streamWaitEvent(on_stream, self.ended.ptr)

    def set_addresses(self, M: int, K: int, exponents: int, solve: LaunchedSolve) -> tuple[int, ...]:
        """Set the addresses of a call; return the words that the launch of ``tell`` takes."""
        self.state["kernel"], self.record["M"] = K, M
        return 0, solve.numbers.__array_interface__["data"][0], exponents

    def mark_end(self, solve: LaunchedSolve, on_stream: int) -> LaunchedSolve:
        """Record the end of the solve launched last on this stream, and return the solve."""
        self.ended = solve.ended
        cp.cuda.runtime.eventRecord(self.ended.ptr, on_stream)
        return solve

    def __call__(self, M: Any, on_stream: int, rounding: tuple[float, float, Any]) -> LaunchedSolve | None:
        """Launch a solve on this stream; None if memory is short. With one potential wait for its end."""
        m, n = self.shape
        try:
            K = cp.empty(*self.K)
            solve = LaunchedSolve(self, cp.empty(2 * m + n))
        except MemoryError:  # the ordinary solve may fit with a coarser storage
            return None
        with self.lock:
            self.set_rounding(*rounding)
            tell_words = self.set_addresses(M.data.ptr, K.data.ptr, solve.exponents.data.ptr, solve)
            self.wait(on_stream)
            launch = self.workspace.launch
            passes = 0
            if launch.persistent:
                self.chain(on_stream, *self.unchanged, tell_words)
                return self.mark_end(solve, on_stream)
            self.chain(on_stream, *self.unchanged)
            launch.parity = 0
            while True:
                count = min(TOGETHER_AT_ONCE, int(self.most) - passes)
                launch.passes(count)
                passes += count
                tell, *grid = self.tell
                tell(*grid, on_stream, launch.parity, *tell_words[1:])
                self.mark_end(solve, on_stream)
                if passes >= self.most or solve.status != RUNNING:
                    return solve

    def between(
        self, points: tuple[int, int], buffer: int, pairs: tuple[int, int], size: int, seed: int, on_stream: int,
        shares: tuple[int, int] = (0, 0), kinds: int = 0,
    ) -> LaunchedSolve:  # fmt: skip
        """Launch a solve between points and a draw of pairs from its plan, as `draw_words` says.

        All but size, seed and kinds are addresses.

        If an earlier answer used the same buffer, update only the first and the last launch of its graph.
        """
        M = buffer + 8 * self.buffer_ends[0]
        exponents = buffer + 8 * self.buffer_ends[1]
        with self.lock:
            self.wait(on_stream)
            costs = (*points, M)
            draw = self.draw_words(M, exponents, pairs, size, seed, shares, kinds)
            if buffer in self.buffer_graphs:
                chain, solve = self.buffer_graphs[buffer]
                chain(on_stream, costs, draw, step=len(chain.parts) - 1)
                return self.mark_end(solve, on_stream)
            solve = LaunchedSolve(self, None)
            kept = self.chain.run and len(self.buffer_graphs) < MOST_BUFFERS
            if kept:
                chain = Chain(*self.chain.parts)
            else:
                chain = self.chain
            chain(on_stream, costs, *self.unchanged, self.set_addresses(M, buffer, exponents, solve), draw)
            if kept:
                self.buffer_graphs[buffer] = chain, solve
                solve.prepared = None  # a cycle would keep all until it is collected
            return self.mark_end(solve, on_stream)

    def views(self, buffer: Any) -> tuple[Any, Any]:
        """Return the costs and the exponents in the buffer of a solve between points."""
        _, M, exponents = (buffer[i:j] for i, j in zip((0, *self.buffer_ends), self.buffer_ends, strict=False))
        return M.reshape(self.shape), exponents


MOST_SEEN = 64
SEEN: OrderedDict[Any, None] = OrderedDict()  # keys of calls with masses that came once
PREPARED: OrderedDict[Any, SolveLaunches] = OrderedDict()  # of calls that have returned; their launches may still run


def is_even(side: Side) -> bool:
    """Tell whether all masses of a side are equal, as in calls without masses."""
    return bool(side.weight.min() == side.weight.max())


def begin(
    M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, most_range: float,
    rounding: tuple[float, float, Any],
) -> LaunchedSolve | None:  # fmt: skip
    """Launch a solve of a C-contiguous array on the device; None: it does not fit, or its masses are new.

    ``most``: most passes; ``most_range``: largest range(M) / reg without stages at larger regs; ``rounding``: (p, q, r)
    such that costs round by at most p x + q + r, x the largest cost; r may be on the device (`SquareRounding`).
    """
    if M.size > DEVICE_CALLS.most_entries or M.data.ptr % ALIGNED:
        return None
    here = cp.cuda.runtime.getDevice(), cp.cuda.get_current_stream().ptr, switches()
    key = *here, M.shape, M.dtype.char, id(rows), id(cols), reg, options, most
    prepared = PREPARED.pop(key, None)
    if prepared is None:
        if DEVICE_CALLS.sees_masses_first and key not in SEEN and not (is_even(rows) and is_even(cols)):
            SEEN[key] = None
            if len(SEEN) > MOST_SEEN:
                SEEN.popitem(last=False)
            return None
        prepared = SolveLaunches(M, rows, cols, reg, options, most, most_range)
    if prepared.fits:
        solve = prepared(M, here[1], rounding)
    else:
        solve = None
    PREPARED[key] = prepared
    if len(PREPARED) > MOST_IDLE:
        PREPARED.popitem(last=False)
    return solve
