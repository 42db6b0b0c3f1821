"""The CPU's batch: p problems with one K, or one K each, set up at once and iterated in few foreign calls.

K = exp((M_min - M) / reg) absorbs no potentials, so that all problems can share it, and needs no larger regs. If the
scalings of a problem outgrow K, the problem stops with status "absorb", and the caller solves it alone.
C side: src_c/batch.c. Twin: backends/cuda/batch.py.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from ... import penalties
from ..._core import ffi, lib
from ...contract import SECONDS_A_CALL, SMALL_ENTRIES, BatchEngine, Options
from ...penalties import F64
from ...problem.problem import EXPONENT_ROUNDING, BatchProblem
from ...problem.side import Side, largest_log
from ..factored import patience
from ..limits import fill
from ..records import STATS, STATUS, put
from ..rules import START
from ..settings import CALLS
from ..workspace import STORAGE, anderson_depth_of
from . import native
from .native import check, empty, matrix, padded, pointer, zeros
from .workspace import SAFE_RANGE, SCALES

EXACT_TOL = 7.2e-7  # least error that a float32 K certifies without exact passes: 12 roundings
SLOTS = 16  # problems that a thread works on in turn
SLOT_BYTES = 1 << 19  # bytes of their column vectors: half of an L2 cache
CALL_PASSES = 64  # most passes of each problem in a foreign call; fewer if they take longer than SECONDS_A_CALL


class HostBatch:
    """The states of p problems, and the arrays that their records point at, one row for each problem."""

    meets = True  # Newton's step follows passes that nearly meet the hard columns

    def __init__(self, task: BatchProblem, options: Options, log_v: F64 | None) -> None:
        m, n = task.shape
        p = len(task)
        self.task, self.p = task, p
        self.count = max(1, min(CALL_PASSES, CALLS.work // (p * m * n)))
        self.pool = native.pool_for(options.threads, p * m * n)
        np_ = padded(n)
        dtype = options.precision
        itemsize = np.dtype(STORAGE[dtype]).itemsize
        options = replace(options, anderson_depth=anderson_depth_of(options.anderson_depth, m, itemsize))
        self.ld = lib.mapuot_leading(n, itemsize)
        self.K = empty((1 if task.one_cost else p) * m * self.ld, STORAGE[dtype])
        self.sums = table(p, np_ + native.SCALARS)
        self.work = table(p, 3 * np_)
        self.history = table(p, lib.mapuot_history(options.anderson_depth, n))
        self.states = ffi.new("mapuot_state[]", p)
        self.stats = np.zeros(p, STATS)
        state = self.states[0]
        state.m = m
        state.n = n
        state.ld = self.ld
        state.dtype = native.DTYPES[dtype]
        state.kernel = ffi.from_buffer("void *", self.K)
        state.sums, state.work, state.history = (pointer(x) for x in (self.sums, self.work, self.history))
        if log_v is None:
            reach = 0.0
        else:
            reach = float(np.abs(log_v).max())
        logs = abs(task.M_min) / task.reg + reach + sum(map(largest_log, task.log_reference))
        rounding = EXPONENT_ROUNDING * (task.range_over_reg + logs) + task.cost.error(task.M_max) / task.reg
        fill(state.limits, task, options, dtype, 0.0)
        put(state.limits, SCALES | {"exponent_error": rounding, "finer": 0})
        put(state.progress, START)
        log_a, log_b = task.log_reference
        low = task.M_min / task.reg
        of_cols = 0.5 * low if options.symmetric else 0.0  # with one potential each side absorbs half of it
        self.rows = self.side(task.rows, task.A, low - of_cols - log_a, state.rows)
        self.cols = self.side(task.cols, task.B, of_cols - log_b, state.cols)
        self.set_start(log_v)
        check(lib.mapuot_batch_spread(p, task.one_cost, self.states))
        if task.misses:
            self.newton = ffi.new("mapuot_newton[]", p)
        else:
            self.newton = ffi.NULL
        for k in range(
            p if self.newton and options.anderson_depth else 0
        ):  # stalled problems get Newton's steps by a factor
            self.newton[k].budget = patience(task.shape, task.balanced)
        self.set_constants()
        self.build()

    def set_start(self, log_v: F64 | None) -> None:
        """Set the scales of the columns from a start; zeros for None."""
        cols = self.task.cols
        start: Any = 0.0
        if log_v is not None:
            start = penalties.project(cols.penalty, log_v, cols.rho, self.task.reg)
        own = slice(self.task.shape[1])
        self.cols["log_scale"][:, own] = np.where(np.isposinf(self.cols["absorbed"][:, own]), 0.0, start)
        with np.errstate(invalid="ignore"):
            self.cols["scale"][:] = np.exp(self.cols["log_scale"] - self.cols["absorbed"])

    def side(self, side: Side, weight: F64, absorbed: F64, out: Any) -> dict[str, F64]:
        """Make the arrays of one marginal for all problems; the problems share rho, fi and upper."""
        (p, count), reg = weight.shape, self.task.reg
        left_out = np.isposinf(absorbed) | ((weight == 0) & side.kind.strict)
        arrays = {name: table(p, padded(count)) for name in ("weight", "absorbed", "log_scale", "scale", "marginal")}
        arrays["absorbed"][:] = np.inf
        arrays["absorbed"][:, :count] = np.where(left_out, np.inf, absorbed)
        arrays["weight"][:, :count] = np.where(left_out, 0.0, weight)
        arrays["rho"] = np.ones(padded(count))
        arrays["rho"][:count] = side.rho
        if side.uniform:
            arrays["fi"] = np.ones(padded(count))
            arrays["base"] = table(p, padded(count))
            fi = np.where(np.isinf(side.rho), 1.0, 1 / (1 + reg / side.rho))
            arrays["fi"][:count] = fi
            with np.errstate(divide="ignore", invalid="ignore"):
                base = fi * np.log(weight) - (1 - fi) * absorbed
            arrays["base"][:, :count] = np.where(left_out, 0.0, base)
        if side.upper is not None:
            arrays["upper"] = np.ones(padded(count))
            arrays["upper"][:count] = side.upper
        out.len, out.penalty = count, side.kind.number
        for name, array in arrays.items():
            setattr(out, name, pointer(array))
        return arrays

    def set_constants(self) -> None:
        """Set, for each problem, reg |c| and the scale of the dual's rounding error."""
        task = self.task
        scale = np.zeros(self.p)
        for side, weight in ((task.rows, task.A), (task.cols, task.B)):
            scale += side.dual_sizes(weight)
        values = zip(self.states, task.reg * task.c_mass, scale, self.rows["weight"].sum(1), strict=True)
        for state, constant, size, weight in values:
            limits = state.limits
            limits.dual_constant, limits.dual_scale, limits.row_weight = constant, size, weight

    def build(self) -> None:
        M = self.task.M.reshape(-1, self.task.shape[1])
        state = self.states[0]
        alpha = np.full(len(M), self.task.M_min / self.task.reg)
        beta = np.zeros(M.shape[1])
        given = self.pool, *M.shape, matrix(M), matrix(None), self.task.reg, pointer(alpha), pointer(beta), 0
        check(lib.mapuot_build_kernel(*given, state.dtype, state.kernel, self.ld))

    def iterate(self, passes: int) -> int:
        """Make at most ``passes`` passes of each running problem; return how many problems still run afterwards."""
        count = min(self.count, passes)
        begun = time.perf_counter()
        slots = max(4, min(SLOTS, SLOT_BYTES // (16 * padded(self.task.shape[1]))))
        stats = ffi.from_buffer("mapuot_stats *", self.stats)
        work = self.pool, self.p, self.task.one_cost, slots, self.states
        check(lib.mapuot_batch_iterate(*work, count, stats, self.newton))
        if self.newton and count == passes:  # a call of 0 passes certifies the last pass of problems that still run
            check(lib.mapuot_batch_iterate(*work, 0, stats, self.newton))
        fits = count * SECONDS_A_CALL / max(time.perf_counter() - begun, 1e-6)
        self.count = max(1, min(2 * count, CALL_PASSES, int(fits)))
        return int((self.stats["status"] == lib.MAPUOT_RUNNING).sum())

    def status(self) -> Any:
        return np.array(STATUS)[self.stats["status"].astype(np.int64)]

    def field(self, name: str) -> Any:
        return np.array([getattr(state.progress, name) for state in self.states])

    def potentials(self) -> tuple[F64, F64]:
        """Return (log u, log v) of the last certified iterates, (p, m) and (p, n); -inf where left out."""
        m, n = self.task.shape
        shift = self.field("shift")[:, None]
        offset = self.field("offset")[:, None]
        out_u, out_v = (np.isposinf(x["absorbed"][:, :k]) for x, k in ((self.rows, m), (self.cols, n)))
        log_u = self.rows["log_scale"][:, :m] + self.rows["absorbed"][:, :m] + shift + offset
        return np.where(out_u, -np.inf, log_u), np.where(out_v, -np.inf, self.work[:, :n] - shift)

    def marginals(self) -> tuple[F64, F64]:
        m, n = self.task.shape
        return self.rows["marginal"][:, :m] * np.exp(self.field("offset"))[:, None], self.cols["marginal"][:, :n]


class HostBatches(BatchEngine):
    """Batches of the C core: one K that no problem outgrows serves all of them."""

    has_one_potential = True

    def storage(self, task: BatchProblem, asked: str | None, tol: float, reach: float) -> str | None:
        """Choose the storage of one K for all problems; None if no storage holds it.

        float32 is chosen only where K outgrows the cache, so that it saves memory traffic. ``reach`` is the largest
        |log v| of the start.
        """
        plain = task.rows.scalar_rho is not None or not task.rows.logarithmic
        small = tol < EXACT_TOL or task.cost.size <= SMALL_ENTRIES
        dtype = asked or ("float64" if small else "float32")
        fits = plain and task.range_over_reg + reach <= SAFE_RANGE[dtype]
        fits = fits and not (dtype == "float32" and tol < EXACT_TOL)
        return dtype if fits else None

    def bytes_each(self, task: BatchProblem, depth: int, precision: str) -> int:
        m, n = task.shape
        itemsize = np.dtype(STORAGE[precision]).itemsize
        if task.one_cost:
            own = 0
        else:
            own = m * lib.mapuot_leading(n, 8) * itemsize
        depth = anderson_depth_of(depth, m, itemsize)
        return int(own + 8 * (6 * padded(m) + (2 * depth + 14) * padded(n)))

    def workspace(self, task: BatchProblem, options: Options, log_v: F64 | None) -> HostBatch:
        return HostBatch(task, options, log_v)


def table(p: int, length: int) -> F64:
    """Return (p, length) zeros, the first entry aligned to 64 bytes."""
    return zeros(p * length).reshape(p, length)
