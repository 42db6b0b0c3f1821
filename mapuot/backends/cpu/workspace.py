"""The CPU backend: numpy owns the memory, src_c does the work, no foreign call holds the GIL.

``iterate`` is one foreign call for many passes. K's rows are padded to 64 bytes and first touched by the
thread that will read them. Twin: backends/cuda/workspace.py; oracle: backends/reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import penalties
from ..._core import ffi, lib
from ...penalties import F64
from ...problem import Problem, Side
from ...processor import SERIAL_ENTRIES
from ...rows import Rows, row_blocks
from .. import FAR, Options, Stats, shifted
from ..limits import START, limits_of, narrow_floor
from ..records import STATS, put, told
from .native import DTYPES, SCALARS, TILE, check, empty, filled, leading_dimension, matrix, padded, pointer, pool_for

STORAGE = {"float64": np.float64, "float32": np.float32, "bfloat16": np.uint16}
NARROW_NOISE = 1e-7  # some 3e-8 in a marginal, from runs of up to 64 rows in float32
SCALES = {"scale_limit": 1e150, "most_scale": 1e300}  # squares stay finite; the vectors' exp ends at 8e307
QUICK_ENTRIES, QUICK_PASSES = 1 << 20, 16  # K up to so large (1 ms a pass) makes so many before the first is timed
SAFE_SPREAD = {"float64": 500.0, "float32": 60.0, "bfloat16": 60.0}  # range(M) / reg that K holds unbalanced


class Workspace:
    """One solve: K, the two sides, the column sums, Anderson's history, and the C state that points at them."""

    def __init__(self, problem: Problem, options: Options) -> None:
        m, n = problem.shape
        self.problem, self.options, self.dtype = problem, options, options.precision
        self.pool = pool_for(options.threads, m * n)
        threads, size = lib.mapuot_pool_threads(self.pool), padded(n)
        self.ld = leading_dimension(n, np.dtype(STORAGE[self.dtype]).itemsize)
        self.K = empty(m * self.ld, STORAGE[self.dtype])
        self.sums = filled([], size + SCALARS)
        self.partial = empty((size + SCALARS) * threads if threads > 1 else 1)
        self.work, self.history = filled([], 3 * size), filled([], (2 * options.memory + 2) * size)
        self.log_reference = problem.log_reference
        self.in_grid = problem.cols.ranks.size > 1
        state = self.state = ffi.new("mapuot_state *")
        state.m, state.n, state.ld, state.dtype = m, n, self.ld, DTYPES[self.dtype]
        state.kernel = pointer(self.K, "void *")
        state.sums, state.partial = pointer(self.sums), pointer(self.partial)
        state.work, state.history = pointer(self.work), pointer(self.history)
        self.limits, self.progress = state.limits, state.progress
        put(self.limits, limits_of(problem, options, self.dtype) | SCALES)
        put(self.progress, START)
        self.limits.narrow_floor = narrow_floor(problem, NARROW_NOISE)
        narrow = self.dtype != "float64" and not options.in_place and not self.in_grid
        self.progress.narrow = narrow
        self.narrow_v = empty(size if narrow else 1, np.float32)
        self.run = empty(size * threads if narrow else 1, np.float32)
        self.run.fill(0)
        state.narrow_v, state.run = pointer(self.narrow_v, "float *"), pointer(self.run, "float *")
        state.piped = -1 if m * n > SERIAL_ENTRIES else 0
        self.streamed = isinstance(problem.M, Rows)
        if not self.streamed:
            self.matrices = matrix(problem.M), matrix(problem.reference_matrix)
            state.M, state.c = self.matrices
        self.tile = empty(threads * TILE * self.ld if self.limits.finer else 0)
        state.tile = pointer(self.tile) if self.limits.finer else ffi.NULL
        self.row_side = self.side(problem.rows, m, state.rows)
        self.col_side = self.side(problem.cols, size, state.cols)

    def side(self, side: Side, size: int, out: Any) -> dict[str, F64]:
        """Fill the C view of one marginal; ``size`` is its padded length."""
        soft = side.penalty == "kl" and bool(np.isfinite(side.rho).all())
        fast = soft or side.penalty == "balanced"
        names = ["weight", "rho", "absorbed", "log_scale", "scale", "marginal"]
        names += ["fi", "base"] if fast else []
        names += ["upper"] if side.upper is not None else []
        stride, count = padded(size), len(side.weight)
        block = filled([], len(names) * stride)
        arrays = {name: block[k * stride : k * stride + size] for k, name in enumerate(names)}
        arrays["rho"][:] = 1.0
        arrays["rho"][:count] = side.rho
        if fast:
            arrays["fi"][:] = 1.0
            finite = np.isfinite(side.rho)
            arrays["fi"][:count][finite] = side.rho[finite] / (side.rho[finite] + self.problem.reg)
        if side.upper is not None:
            arrays["upper"][:count] = side.upper
        out.len, out.penalty = count, penalties.KINDS[side.penalty]
        for k, name in enumerate(names):
            setattr(out, name, pointer(block) + k * stride)
        return arrays

    def absorb(self, log_v: F64 | None = None) -> None:
        """Build K with alpha, beta such that it is at most 1 and each row and column in use has an entry 1."""
        problem, state = self.problem, self.state
        la, lb = self.log_reference
        out_u, out_v = problem.left_out
        if log_v is None:
            log_v = self.col_side["log_scale"][: problem.shape[1]].copy()  # log v + shift: the shift stays
        else:
            log_v, self.progress.shift = shifted(problem, log_v)
        with np.errstate(invalid="ignore"):
            plan_v = np.where(out_v, -np.inf, log_v + lb)
        far = problem.cols.ranks.max(float(np.abs(log_v).max()))
        safe = far <= FAR and (problem.M_max - problem.M_min) / problem.reg + far <= SAFE_SPREAD[self.dtype]
        if safe and not problem.forbidden and problem.reference_matrix is None:
            alpha = np.full(len(la), problem.M_min / problem.reg)
            beta = np.zeros(len(lb))
        else:
            alpha, beta = self.balance(out_u, plan_v)
        dead_u, dead_v = np.isposinf(alpha) & ~out_u, np.isposinf(beta) & ~out_v
        alpha, beta = np.where(out_u | dead_u, -np.inf, alpha), np.where(out_v | dead_v, -np.inf, beta)
        for i0, i1, matrices in self.blocks():
            check(
                lib.mapuot_build_kernel(
                    self.pool, i1 - i0, problem.shape[1], *matrices, problem.reg, pointer(alpha[i0:i1]), pointer(beta),
                    state.dtype, ffi.cast("char *", state.kernel) + i0 * self.ld * self.K.itemsize, self.ld,
                )
            )  # fmt: skip
        self.alpha, self.beta = alpha, beta
        self.limits.exponent_error = problem.exponent_error(alpha, beta)
        state.alpha, state.beta = pointer(alpha), pointer(beta)
        with np.errstate(invalid="ignore"):
            self.set_side(problem.rows, self.row_side, alpha - la, out_u | dead_u)
            self.set_side(problem.cols, self.col_side, beta - lb, out_v | dead_v)
        self.set_log_v(log_v, out_v | dead_v)
        self.dead_u, self.dead_v = dead_u, dead_v
        self.set_constants()

    def blocks(self) -> Iterator[tuple[int, int, tuple[Any, Any]]]:
        """(i0, i1, (M, c)) for the core: all rows at once, or those of a streamed M block by block."""
        if not self.streamed:
            yield 0, self.problem.shape[0], self.matrices
            return
        for i0, i1, M, c in row_blocks(self.problem.M, self.problem.reference_matrix):
            yield i0, i1, (matrix(M), matrix(c))

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """alpha_i = -max_j(log v_j - M_ij/reg), beta_j = -max_i(alpha_i - M_ij/reg); +inf where none."""
        problem = self.problem
        alpha, top = np.where(out_u, -np.inf, 0.0), np.full(len(plan_v), -np.inf)
        plan_v, col_max = np.ascontiguousarray(plan_v), np.empty(len(plan_v))
        for i0, i1, matrices in self.blocks():
            check(
                lib.mapuot_balance(
                    self.pool, i1 - i0, len(plan_v), *matrices, problem.reg,
                    pointer(plan_v), pointer(alpha[i0:i1]), pointer(col_max),
                )
            )  # fmt: skip
            np.maximum(top, col_max, out=top)
        if self.in_grid:
            alpha = -problem.cols.ranks.max(-alpha)
            top = self.column_tops(np.where(np.isposinf(alpha), -np.inf, alpha), plan_v)
        col_max = problem.rows.ranks.max(top)
        with np.errstate(invalid="ignore"):
            return alpha, np.where(np.isneginf(col_max), np.inf, plan_v - col_max)

    def column_tops(self, alpha: F64, plan_v: F64) -> F64:
        """max_i (alpha_i + log v_j - M_ij/reg), alpha being known of the whole rows: balance on the transpose."""
        problem, n = self.problem, len(plan_v)
        top = np.full(n, -np.inf)
        for i0, i1, M, c in row_blocks(problem.M, problem.reference_matrix):
            least, unused, part = np.zeros(n), np.empty(i1 - i0), alpha[i0:i1]
            matrices = matrix(M.T), matrix(None if c is None else c.T)
            check(
                lib.mapuot_balance(
                    self.pool, n, i1 - i0, *matrices, problem.reg, pointer(part), pointer(least), pointer(unused)
                )
            )
            np.maximum(top, plan_v - least, out=top)
        return top

    def set_side(self, side: Side, arrays: dict[str, F64], absorbed: F64, out: Any) -> None:
        """What K absorbed, the weights in use, and the constant part of the KL prox."""
        count = len(side.weight)
        d = np.where(out, np.inf, absorbed)
        arrays["absorbed"][:] = np.inf
        arrays["absorbed"][:count] = d
        arrays["weight"][:count] = np.where(out, 0.0, side.weight)
        if "fi" in arrays:
            fi = arrays["fi"][:count]
            with np.errstate(invalid="ignore"):
                base = fi * side.log_weight - (1 - fi) * absorbed
            arrays["base"][:count] = np.where(out, 0.0, base)

    def set_log_v(self, log_v: F64, out: Any) -> None:
        n = len(log_v)
        cols = self.col_side
        cols["log_scale"][:n] = np.where(out, 0.0, log_v)
        with np.errstate(over="ignore"):
            cols["scale"][:n] = np.where(out, 0.0, np.exp(cols["log_scale"][:n] - cols["absorbed"][:n]))
        self.progress.since_absorb = 0
        if self.options.in_place:
            self.history[: len(cols["scale"])] = cols["scale"]
            self.row_side["scale"][:] = 1.0

    def set_constants(self) -> None:
        """Dual terms that no pass changes: reg |c| and the points that no mass can reach."""
        problem = self.problem
        total, scale = problem.reg * problem.c_mass, 0.0
        for side, dead in ((problem.rows, self.dead_u), (problem.cols, self.dead_v)):
            terms = 0.0
            if dead.any():
                problem.check_reachable(self.dead_u, self.dead_v)
                terms = side.dead_terms(dead)
            soft = np.isfinite(side.rho)
            total += side.ranks.sum(terms)
            scale += side.ranks.sum(float(side.rho[soft] @ side.weight[soft]))
        self.limits.dual_constant, self.limits.dual_scale = total, scale

    def iterate(self, count: int) -> list[Stats]:
        table, made = np.empty(count, STATS), ffi.new("int64_t *")
        stats = pointer(table, "mapuot_stats *")
        if self.problem.ranks.size > 1 or (self.streamed and self.tile.size):
            made[0] = self.passes(count, stats)
        else:
            check(lib.mapuot_iterate(self.pool, self.state, count, stats, made))
        return told(table[: made[0]], self.progress.passes - made[0] + 1)

    def passes(self, count: int, stats: Any) -> int:
        """mapuot_iterate where the ranks meet between row_pass and finish_pass, or M is streamed."""
        made, status = 0, lib.MAPUOT_RUNNING
        while made < count and status == lib.MAPUOT_RUNNING:
            if self.in_grid:
                status = self.grid_pass(stats + made)
            else:
                with self.problem.ranks.adding(self.sums):
                    self.row_pass(lib.mapuot_row_pass)
                status = check(lib.mapuot_finish_pass(self.pool, self.state, stats + made))
            made += 1
        return made

    def grid_pass(self, stats: Any) -> int:
        """One pass where rows and columns are shared: the ranks meet for s, for K^T u and after each sweep."""
        rows, cols, finish = self.problem.rows.ranks, self.problem.cols.ranks, ffi.new("mapuot_finish *")
        found = np.frombuffer(ffi.buffer(finish.sums))
        with cols.adding(self.row_side["marginal"]):
            self.row_pass(lib.mapuot_row_dots)
        with rows.adding(self.sums):
            self.row_pass(lib.mapuot_row_sums)
            self.sums[-SCALARS:] *= cols.rank == 0  # each row counts once
        for step in range(4):
            check(lib.mapuot_finish_step(self.pool, self.state, finish, stats, step))
            cols.fold(found, top=step == 2)
        return check(lib.mapuot_finish_step(self.pool, self.state, finish, stats, 4))

    def row_pass(self, call: Any) -> None:
        """row_pass or one of its halves; where an exact one needs a streamed M, block by block."""
        if not (self.state.exact and self.streamed):
            check(call(self.pool, self.state))
            return
        total = np.zeros_like(self.sums)
        for i0, i1, matrices in self.blocks():
            check(call(self.pool, self.part(i0, i1, matrices)))
            total += self.sums
        self.sums[:] = total

    def part(self, i0: int, i1: int, matrices: tuple[Any, Any]) -> Any:
        """The state of rows i0 to i1, with their costs at hand, for an exact pass."""
        part = ffi.new("mapuot_state *", self.state[0])
        part.m = part.rows.len = i1 - i0
        part.M, part.c = matrices
        part.alpha = pointer(self.alpha[i0:i1])
        for name, array in self.row_side.items():
            setattr(part.rows, name, pointer(array[i0:i1]))
        return part

    @property
    def next_log_v(self) -> F64:
        """log v after the last pass: what the next one would start from, in POT's order (u_k, v_k)."""
        return self.full_log_v(self.col_side["log_scale"])

    def full_log_v(self, vector: F64) -> F64:
        n = self.problem.shape[1]
        with np.errstate(invalid="ignore"):  # of a start that overflowed
            log_v = vector[:n] - self.progress.shift
        return np.where(self.problem.left_out[1], -np.inf, np.where(self.dead_v, np.inf, log_v))

    def potentials(self) -> tuple[F64, F64]:
        rows, progress = self.row_side, self.progress
        with np.errstate(invalid="ignore"):
            log_u = rows["log_scale"] + rows["absorbed"] + progress.shift + progress.offset
        log_u = np.where(self.problem.left_out[0], -np.inf, np.where(self.dead_u, np.inf, log_u))
        return log_u, self.full_log_v(self.work)

    def marginals(self) -> tuple[F64, F64]:
        n = self.problem.shape[1]
        return self.row_side["marginal"] * self.progress.kappa, self.col_side["marginal"][:n].copy()

    def close(self) -> None:
        """Give K back at once; the potentials stay."""
        del self.K
        self.state.kernel = ffi.NULL
