"""Plain problems solved whole on a device: the host sends one record, and reads one when the passes have ended.

Launches of which none waits for the host: ``begin`` (src_cuda/plain.cu) finds the range of M, builds K and sets the
state before the first pass; the passes are those of `Iterate`; ``tell`` leaves the answer in memory of the host. Of
one potential, whose passes are launches, there are TOGETHER_AT_ONCE between two looks at it. What belongs to the sides,
reg and the options is kept for the next call, but not K. Twin: backends/cpu/plain.py.
"""

from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from ...problem.cost import Dense
from ...problem.metrics import METRICS
from ...problem.points import AUTO_ENTRIES
from ...problem.problem import EXPONENT_ROUNDING, VANISHING, Problem
from ...problem.side import Side
from ..contract import MEMORY, Options
from ..records import CONVERGED, RUNNING, STATS, put
from .arrays import COSTS, on_device, pinned
from .kernels import BLOCKS, PLAIN, POSTS, STORES, THREADS, Job, by_value, kernel
from .launch import BOTH, TRACE_PASSES, Launch, device_limits, switches
from .stream import stream, view_of
from .workspace import IDLE_WORDS, MOST_IDLE, QUICK_PASSES, SAFE_SPREAD, DeviceWorkspace

MOST_ENTRIES = AUTO_ENTRIES  # of M: a larger one takes longer than what the host does before and after
TOGETHER_AT_ONCE = 8  # passes of one potential from one look to the next: most solves take 5 to 10
BLOCK_ENTRIES = 1 << 11  # of M that a block of ``begin`` looks at at least: a smaller grid meets sooner
HEAD = 8  # words of an answer before its trace
TOLD = HEAD + TRACE_PASSES * STATS.itemsize // 8  # and before log u, log v and the marginals
TRACED, MASS = STATS.itemsize // 8, list(STATS.names or ()).index("mass")  # words of a pass, and which is its mass
WARP_BYTES = 32  # of shared memory, that a warp of ``begin`` takes
FEW_POSTS = 32  # POSTS of state.cuh, where passes keep few differences
ALIGNED = 16  # bytes, at a multiple of which M must begin


class Told(NamedTuple):
    """Answer of one call."""

    numbers: Any  # log u, log v and the marginals, one after the other, on the host
    exponents: Any  # log u + log a, log v + log b and the marginal of the rows, on the device
    passes: bytes  # the records of all passes
    mass: float
    range: tuple[float, float]  # of M
    prepared: Any  # what draws from the plan


@lru_cache(maxsize=64)
def formed(device: int, m: int, n: int, d: int, dtype: str) -> tuple[Launch, int]:
    """Return the launch of `distances` of these sizes, and its blocks."""
    options = {"METRIC": METRICS["sqeuclidean"].number, "PLAN": 0, "STORE": 0, "COST": int(dtype == "f")}
    run = kernel("point_costs.cu", "point_costs", **options)
    nothing = np.uint64(0), np.uint64(0), np.uint64(0), np.float64(0)
    words = None, None, *map(np.int64, (d, 1, m, n, d)), np.float64(1), None, *nothing
    return Launch(run, 0, words), -(-m // COSTS) * -(-n // COSTS)


def distances(x: Any, y: Any) -> tuple[Any, Any]:
    """Return the squared distances, in float64, of points in C order on the current device, and their event."""
    if x.shape[1:] != y.shape[1:] or not x.size or not y.size:
        raise ValueError(f"the two clouds must have points of as many dimensions, got shapes {x.shape} and {y.shape}")
    (m, d), n = x.shape, len(y)
    if x.dtype.char not in "fd" or x.dtype != y.dtype:
        x, y = (z.astype(np.float64) for z in (x, y))
    launch, blocks = formed(cp.cuda.runtime.getDevice(), m, n, d, x.dtype.char)
    out = cp.empty((m, n))
    launch(blocks, 256, cp.cuda.get_current_stream().ptr, x.data.ptr, y.data.ptr, out.data.ptr)
    ended = cp.cuda.Event(disable_timing=True)
    ended.record()
    return out, ended


class Sent:
    """A solve under way on the device, which `tell` ends."""

    def __init__(self, prepared: Any, numbers: Any, exponents: Any) -> None:
        self.prepared, self.numbers, self.exponents = prepared, numbers, exponents
        self.ended = cp.cuda.Event(disable_timing=True)
        self.ended.record()

    @property
    def status(self) -> int:
        """Wait for the status."""
        self.ended.synchronize()
        return int(self.numbers[0])

    def told(self) -> Told | None:
        """Wait for the answer; None where the problem is not plain, or not solved yet."""
        if self.status != CONVERGED:
            return None
        passes, low, high = self.numbers[1:4].tolist()
        trace = self.numbers[HEAD : HEAD + int(passes) * STATS.itemsize // 8]
        mass = float(trace[MASS - TRACED])
        return Told(self.numbers[TOLD:], self.exponents, trace.tobytes(), mass, (low, high), self.prepared)

    def __del__(self) -> None:
        self.ended.synchronize()  # before others have the room that the device writes to


def jobs(cost: Any, dtype: str) -> list[Job]:
    """List what is compiled beside the passes."""
    options = {"STORE": STORES[dtype], "COST": int(cost == np.float32)}
    return [("plain.cu", function, options) for function in ("begin", "tell")]


class Prepared:
    """The launches of calls that have all but M in common."""

    ended: Any = None  # an event behind the last of them

    def __init__(
        self, M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, spread: float
    ) -> None:  # fmt: skip
        """``most``: passes; ``spread``: range(M) / reg above which larger regs come first."""
        self.sides, self.reg = (rows, cols), reg  # whose ids a key names: they stay what they are
        problem = Problem(Dense(M), rows, cols, reg, "product", 0.0, 0.0, False, rows.mass * cols.mass)
        workspace = DeviceWorkspace(problem, options, beside=jobs(M.dtype, options.precision))
        fits = workspace.launch.persistent or options.symmetric
        self.fits = fits and not workspace.some and workspace.lies.size <= IDLE_WORDS
        if not self.fits:
            return
        workspace.absorb(np.zeros(M.shape[1]))  # of a range 0: what depends on M, ``begin`` makes anew
        coarse = workspace.coarse  # which takes as long as ``due`` passes, and as long again before it is of use
        self.most = np.int32(min(most, QUICK_PASSES, 2 * coarse.due if coarse.wanted else most))
        self.fill(workspace, problem, spread)
        self.K = (M.shape[0], workspace.ld), workspace.operator.K.dtype
        workspace.close()
        workspace.operator = workspace.problem = workspace.coarse = None  # type: ignore[assignment]  # they hold M
        self.workspace, self.state = workspace, workspace.state
        self.compile(M, workspace.dtype)

    def fill(self, workspace: DeviceWorkspace, problem: Problem, spread: float) -> None:
        """Fill the record of ``begin``."""
        (m, n), rows, cols, launch = problem.shape, problem.rows, problem.cols, workspace.launch
        self.shape, self.words = (m, n), 2 * (m + n) + TOLD
        self.logs = on_device(rows.log_weight, cols.log_weight)
        self.start = cp.asarray(np.frombuffer(workspace.progress.tobytes(), np.float64))
        self.beside = cp.zeros(4 * (BLOCKS + 1) + n)
        self.record = np.zeros((), PLAIN)
        symmetric = workspace.options.symmetric
        arrays, soft = workspace.arrays, 0.0 if symmetric else float((rows.soft_rho * rows.weight).sum())
        addresses = {"alpha": arrays["alpha"], "beta": arrays["beta"], "log_a": self.logs[0], "log_b": self.logs[1]}
        addresses |= {"range": self.beside, "tops": self.beside[4 * (BLOCKS + 1) :], "start": self.start}
        numbers = {"safe_spread": SAFE_SPREAD, "most_spread": spread, "log_size": rows.log_size + cols.log_size}
        numbers |= {"rounding": EXPONENT_ROUNDING, "vanishing": VANISHING, "mass": cols.mass}
        numbers |= {"dual_constant": workspace.dual_constants()[0] + soft}
        numbers |= {"alike": problem.alike and m == n and not symmetric}
        numbers |= {"posts": POSTS if launch.memory > MEMORY[0] else FEW_POSTS}
        put(self.record, {**addresses, **numbers})

    def compile(self, M: Any, dtype: str) -> None:
        """Make the launches, as far as M does not matter."""
        (m, n), processors = self.shape, device_limits(cp.cuda.Device().id)[1]
        begin, tell = (kernel(file, function, **options) for file, function, options in jobs(M.dtype, dtype))
        records = by_value(self.state), by_value(self.record)
        self.launches = [(Launch(begin, THREADS // 32 * WARP_BYTES, records, True),
                          max(1, min(processors, BLOCKS, -(-m * n // BLOCK_ENTRIES))))]  # fmt: skip
        for one in (self.workspace.launch.narrow, self.workspace.launch.wide):
            if one is not None:
                words = records[0], *map(np.int32, (one.slots, one.kept, 0)), self.most, np.int32(BOTH)
                self.launches.append((Launch(one.run, one.shared, words, True), one.parts))
        self.tell = Launch(tell, 0, (*records, None, None, None)), max(1, min(processors, (m + n) // THREADS))
        self.view, nothing = np.frombuffer(bytearray(view_of(M, None, None, None, self.reg)), np.uint64), np.uint64(0)
        words = self.view, None, nothing, nothing, None, None, np.int64(0), None, None
        self.draw = Launch(stream("draw", M, None), 0, words)

    def drawn(self, M: Any, exponents: Any, size: int, seed: int) -> tuple[Any, Any]:
        """Draw pairs from the plan of these exponents, behind which are the masses of the rows."""
        m, n = self.shape
        pairs, at = cp.empty((2, size), np.int64), exponents.data.ptr
        to = pairs.data.ptr
        with self.draw.lock:
            self.view[VIEWED] = M.data.ptr, at, at + 8 * m
            given = at + 8 * (m + n), seed, to, size, to + 8 * size
            self.draw(-(-size // 8), 256, cp.cuda.get_current_stream().ptr, *given)
        return pairs[0], pairs[1]

    def __call__(self, M: Any, on: int, rounding: tuple[float, float]) -> Sent | None:
        """Launch a solve on this stream, of one potential to its end; None where it has no room."""
        m, n = self.shape
        try:
            K, exponents, numbers = cp.empty(*self.K), cp.empty(2 * m + n), pinned(self.words)
        except MemoryError:  # the ordinary way may find room in a coarser storage
            return None
        self.state["kernel"], self.record["M"] = K.data.ptr, M.data.ptr
        self.record["cost_rate"], self.record["cost_rest"] = rounding
        of, passes, (tell, parts) = self.workspace.launch, 0, self.tell
        of.parity = 0
        for launch, blocks in self.launches:
            launch(blocks, THREADS, on)
        while True:
            if not of.persistent:
                count = min(TOGETHER_AT_ONCE, int(self.most) - passes)
                of.passes(count)
                passes += count
            tell(parts, THREADS, on, of.parity, numbers.__array_interface__["data"][0], exponents.data.ptr)
            sent = Sent(self, numbers, exponents)
            if of.persistent or passes >= self.most or sent.status != RUNNING:
                return sent


VIEWED = [2, 8, 9]  # words of a View: M, alpha and beta
ONCE = True  # masses that come for the first time go the ordinary way: to prepare takes as long as such a solve
MOST_SEEN = 64
SEEN: OrderedDict[Any, None] = OrderedDict()  # keys of calls whose masses came once
KEPT: OrderedDict[Any, Prepared] = OrderedDict()  # of calls that are over, or go on without the host


def is_even(side: Side) -> bool:
    """Tell whether all masses of a side are equal, as those of calls that give none."""
    return bool(side.weight.min() == side.weight.max())


def begin(
    M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, spread: float,
    rounding: tuple[float, float],
) -> Sent | None:  # fmt: skip
    """Launch a solve of a C-contiguous array on the device; None: it is not plain after all, or came once.

    ``most``: passes; ``spread``: range(M) / reg above which larger regs come first; ``rounding``: (p, q), where that of
    a cost is p x + q at most, x the largest one.
    """
    if M.size > MOST_ENTRIES or M.data.ptr % ALIGNED:
        return None
    here = cp.cuda.runtime.getDevice(), cp.cuda.get_current_stream().ptr, switches()
    key = *here, M.shape, M.dtype.char, id(rows), id(cols), reg, options, most
    prepared = KEPT.pop(key, None)
    if prepared is None:
        if ONCE and key not in SEEN and not (is_even(rows) and is_even(cols)):
            SEEN[key] = None
            if len(SEEN) > MOST_SEEN:
                SEEN.popitem(last=False)
            return None
        prepared = Prepared(M, rows, cols, reg, options, most, spread)
    elif prepared.ended:  # a handle of a stream may be that of another thread's, or of one that is gone
        cp.cuda.get_current_stream().wait_event(prepared.ended)
    sent = prepared(M, here[1], rounding) if prepared.fits else None
    prepared.ended = sent.ended if sent else None
    KEPT[key] = prepared
    if len(KEPT) > MOST_IDLE:
        KEPT.popitem(last=False)
    return sent
