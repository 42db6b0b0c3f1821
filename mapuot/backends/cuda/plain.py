"""Plain problems solved whole on a device: the host sends one record, and reads one when the passes have ended.

Four launches, of which none waits for the host: ``begin`` (src_cuda/plain.cu) finds the range of M, builds K and sets
the state before the first pass; the passes are those of `Iterate`; ``tell`` leaves the answer in memory of the host.
What belongs to the sides, reg and the options is kept for the next call, but not K. Twin: backends/cpu/plain.py.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from ...problem.cost import Dense
from ...problem.problem import EXPONENT_ROUNDING, VANISHING, Problem
from ...problem.side import Side
from ..contract import MEMORY, Options
from ..records import CONVERGED, STATS
from .arrays import on_device, pinned
from .kernels import BLOCKS, PLAIN, POSTS, STORES, THREADS, Job, by_value, kernel
from .launch import BOTH, TRACE_PASSES, device_limits, switches
from .workspace import IDLE_WORDS, MOST_IDLE, QUICK_PASSES, SAFE_SPREAD, DeviceWorkspace

MOST_ENTRIES = 1 << 24  # of M: a larger one takes longer than what the host does before and after
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
    exponents: Any  # log u + log a and log v + log b, on the device
    passes: bytes  # the records of all passes
    mass: float
    range: tuple[float, float]  # of M


def jobs(cost: Any, dtype: str) -> list[Job]:
    """List what is compiled beside the passes."""
    options = {"STORE": STORES[dtype], "COST": int(cost == np.float32)}
    return [("plain.cu", function, options) for function in ("begin", "tell")]


class Prepared:
    """The launches of calls that have all but M in common."""

    def __init__(
        self, M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, spread: float
    ) -> None:  # fmt: skip
        """``most``: passes; ``spread``: range(M) / reg above which larger regs come first."""
        self.sides = rows, cols  # whose ids a key names: they stay what they are
        problem = Problem(Dense(M), rows, cols, reg, "product", 0.0, 0.0, False, rows.mass * cols.mass)
        workspace = DeviceWorkspace(problem, options, beside=jobs(M.dtype, options.precision))
        self.fits = not workspace.some and workspace.launch.persistent and workspace.lies.size <= IDLE_WORDS
        if not self.fits:
            return
        workspace.absorb(np.zeros(M.shape[1]))  # of a range 0: what depends on M, ``begin`` makes anew
        coarse = workspace.coarse  # which takes as long as so many passes, before it is of use
        self.most = np.int32(min(most, QUICK_PASSES, coarse.due if coarse.wanted else most))
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
        arrays, soft = workspace.arrays, float((rows.soft_rho * rows.weight).sum())
        addresses = {"alpha": arrays["alpha"], "beta": arrays["beta"], "log_a": self.logs[0], "log_b": self.logs[1]}
        addresses |= {"range": self.beside, "tops": self.beside[4 * (BLOCKS + 1) :], "start": self.start}
        numbers = {"safe_spread": SAFE_SPREAD, "most_spread": spread, "log_size": rows.log_size + cols.log_size}
        numbers |= {"rounding": EXPONENT_ROUNDING, "vanishing": VANISHING, "mass": cols.mass}
        numbers |= {"dual_constant": workspace.dual_constants()[0] + soft, "alike": problem.alike and m == n}
        numbers["posts"] = POSTS if launch.memory > MEMORY[0] else FEW_POSTS
        for name, value in ({k: x.data.ptr for k, x in addresses.items()} | numbers).items():
            self.record[name] = value

    def compile(self, M: Any, dtype: str) -> None:
        """Make the launches, as far as M does not matter."""
        (m, n), processors = self.shape, device_limits(cp.cuda.Device().id)[1]
        self.begin, self.tell = (kernel(file, function, **options) for file, function, options in jobs(M.dtype, dtype))
        self.grid = (max(1, min(processors, BLOCKS, -(-m * n // BLOCK_ENTRIES))),)
        self.tell_grid = (max(1, min(processors, (m + n) // THREADS)),)
        self.records = by_value(self.state), by_value(self.record)
        launch = self.workspace.launch
        self.passes = [
            (one.run, (one.parts,), one.shared, (self.records[0], *map(np.int32, (one.slots, one.kept, 0)), self.most))
            for one in (launch.narrow, launch.wide)
            if one is not None
        ]

    def __call__(self, M: Any) -> Told | None:
        """Solve; None where the problem is not plain, or not solved yet."""
        m, n = self.shape
        try:
            K, exponents, numbers = cp.empty(*self.K), cp.empty(m + n), pinned(self.words)
        except MemoryError:  # the ordinary way may find room in a coarser storage
            return None
        self.state["kernel"], self.record["M"] = K.data.ptr, M.data.ptr
        self.begin(self.grid, (THREADS,), self.records, shared_mem=THREADS // 32 * WARP_BYTES)
        for run, grid, shared, arguments in self.passes:
            run(grid, (THREADS,), (*arguments, ALL), shared_mem=shared)
        to = np.uint64(numbers.__array_interface__["data"][0])
        self.tell(self.tell_grid, (THREADS,), (*self.records, to, exponents))
        cp.cuda.get_current_stream().synchronize()
        status, passes, low, high = numbers[:4].tolist()
        if status != CONVERGED:
            return None
        trace = numbers[HEAD : HEAD + int(passes) * STATS.itemsize // 8]
        return Told(numbers[TOLD:], exponents, trace.tobytes(), float(trace[MASS - TRACED]), (low, high))


ALL = np.int32(BOTH)
ONCE = True  # masses that come for the first time go the ordinary way: to prepare takes as long as such a solve
MOST_SEEN = 64
SEEN: OrderedDict[Any, None] = OrderedDict()  # keys of calls whose masses came once
KEPT: OrderedDict[Any, Prepared] = OrderedDict()  # of calls that are over; one under way has taken its own out


def is_even(side: Side) -> bool:
    """Tell whether all masses of a side are equal, as those of calls that give none."""
    return bool(side.weight.min() == side.weight.max())


def solve(
    M: Any, rows: Side, cols: Side, reg: float, options: Options, most: int, spread: float
) -> Told | None:  # fmt: skip
    """Solve a problem of a C-contiguous array on the device; None: it is not plain after all, needs more, or came once.

    ``most``: passes; ``spread``: range(M) / reg above which larger regs come first.
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
    found = prepared(M) if prepared.fits else None
    KEPT[key] = prepared
    if len(KEPT) > MOST_IDLE:
        KEPT.popitem(last=False)
    return found
