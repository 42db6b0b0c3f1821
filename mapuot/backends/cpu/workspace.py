"""The CPU backend: numpy owns the memory, src_c does the work, no foreign call holds the GIL.

One foreign call makes many passes. K's rows are padded to 64 bytes; the thread that will read a row touches it first.
Twin: backends/cuda/workspace.py; oracle: backends/reference.py.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...arrays import PAD
from ...contract import Options, Stats
from ...penalties import F64
from ...problem.problem import Problem
from ...problem.side import Side
from .. import narrow_points
from ..boxes import Truncation
from ..coarse import Coarse, Labels
from ..limits import fill, limits_of
from ..pairs import ALL_PAIRS
from ..records import STATS, put, stats_of
from ..rules import START
from ..settings import CALLS
from ..workspace import STORAGE, Workspace, anderson_depth_of, for_users
from . import native
from .native import check, empty, matrix, padded, pointer
from .operator import HostOperator

NARROW_NOISE = 2e-6  # marginals err by 3e-8; near the floor set by a noise of 1e-7 a tenth of the passes gained little
SCALES = {"scale_limit": 1e150, "most_scale": 1e300}  # squares stay finite; the vectors' exp ends at 8e307
REACH = 3.0  # nats that a rough Newton's step moves a column at most: farther away its direction means nothing
ROUGH = 0.1  # largest relative residual of the equations of a rough Newton's step
SAFE_RANGE = {"float64": 500.0, "float32": 60.0}  # range(M) / reg that K holds unbalanced


class HostWorkspace(Workspace):
    """One solve: the two sides, Anderson's history, and the C state that points at them and at an operator's K."""

    def __init__(
        self, problem: Problem, options: Options, skip: Truncation | None = None, operator: Any = None
    ) -> None:
        """Choose the storage of K; ``operator``: replaces the operator that has K in memory."""
        self.problem, self.options, self.policy = problem, options, skip or ALL_PAIRS
        m, n = problem.shape
        # made: every pass makes the rows of K, in float32 or, if it is exact, in float64
        self.made = problem.cost.remade or options.precision == "made"
        pairs = problem.cost.operator == "pairs"
        self.dtype = self.storage()
        depth = anderson_depth_of(options.anderson_depth, problem.ranks.min(m), np.dtype(STORAGE[self.dtype]).itemsize)
        self.safe_range = SAFE_RANGE[self.dtype]
        self.operator = operator or HostOperator(problem.cost, problem.reg, problem.c, problem.ranks, options.threads)
        self.pool = self.operator.pool
        threads = lib.mapuot_pool_threads(self.pool)
        size = padded(n)
        lengths = size + native.SCALARS, 3 * size, lib.mapuot_history(depth, n)
        self.sums, self.work, self.history = native.vectors(*lengths)
        narrow = self.dtype != "float64" and not options.in_place and not pairs
        state = self.state = self.operator.passes(narrow, self.sums)
        self.operator.store(self.dtype, self.made)
        shared = threads > 1 and options.schedule == "auto" and not pairs
        if shared:
            self.shares = state.shares = ffi.new("mapuot_share[]", threads)
        else:
            self.shares = state.shares = ffi.NULL
        state.work = pointer(self.work)
        state.history = pointer(self.history)
        state.before = problem.ranks.before(m)
        self.limits, self.progress = state.limits, state.progress
        fill(self.limits, problem, options, self.dtype, NARROW_NOISE)
        put(self.limits, SCALES | {"anderson_depth": depth})
        put(self.progress, START)
        self.progress.narrow = narrow
        if problem.cost.held:
            state.M = matrix(problem.M)
            state.c = matrix(None if problem.c is None else problem.c.array)
        self.parts = self.part_columns(problem) if pairs else None
        state.exact = self.made and not narrow
        if narrow and self.size is not None:
            self.narrow_points = self.float32_points(self.size, state)
        else:
            self.narrow_points = None
        if self.limits.finer and not self.made:
            self.operator.open_tile()
        self.coarse = Coarse(self, problem, depth)
        self.leaps: Any = None  # record of rough Newton's steps, and its workspace
        self.reach = REACH  # nats that the next rough step may move a column
        self.makes_products = not (self.operator.summed or options.in_place)
        self.row_side = self.open_side(problem.rows, m, state.rows)
        self.col_side = self.open_side(problem.cols, size, state.cols)

    @property
    def reads(self) -> str:
        """Name the matrix that passes read now: "rows" that they make, where the storage of K is too coarse."""
        made = self.problem.cost.operator == "tiles" and self.state.exact
        return f"{'float64' if self.state.exact else self.dtype} {'rows' if made else self.problem.cost.operator}"

    def storage(self) -> str:
        """Return the storage of K, which may differ from the storage asked for."""
        problem, kind = self.problem, self.problem.cost.operator
        if self.options.precision == "made":
            dtype = "float64"
        else:
            dtype = self.options.precision
        self.size = None
        if dtype != "float64" and kind == "points":
            self.size = narrow_points.fitting(problem)
        coarse = kind == "points" and self.size is None
        if coarse or (kind == "pairs" and limits_of(problem, self.options, dtype, NARROW_NOISE)["finer"]):
            return "float64"  # exact passes do not exist for stored pairs
        return dtype

    def part_columns(self, problem: Problem) -> tuple[Any, F64] | None:
        """Give the core the part of M that each column belongs to; passes translate each part on its own."""
        parts = problem.parts
        if parts is None or not self.limits.mu_rate > 0:
            return None
        self.limits.lam_rate = 0.0
        found = np.ascontiguousarray(parts.cols, np.int32), np.empty(2 * (parts.count + 1))
        self.state.parts = parts.count + 1  # points without a partner form one more part
        self.state.part = ffi.from_buffer("int32_t *", found[0])
        self.state.part_sums = pointer(found[1])
        return found

    def float32_points(self, size: float, state: Any) -> narrow_points.NarrowPoints:
        """Give the core the float32 points for the rows of narrow passes; ``size``: see `narrow_points.fitting`."""
        points = narrow_points.NarrowPoints(self.problem, size)
        d, ld = points.y.shape
        self.packed = np.ascontiguousarray(points.y.reshape(d, ld // PAD, PAD).swapaxes(0, 1))
        state.narrow_points.d, state.narrow_points.form = d, points.form
        for name, array in (("x", points.x), ("y", self.packed), ("row", points.row), ("col", points.col)):
            setattr(state.narrow_points, name, ffi.from_buffer("float *", array))
        self.floor = float(self.limits.narrow_floor)
        return points

    def open_side(self, side: Side, size: int, out: Any) -> dict[str, F64]:
        """Allocate the vectors of one marginal, and fill its C view; ``size``: their length, padded for columns."""
        names = ["weight", "rho", "absorbed", "log_scale", "scale", "marginal"]
        if side.uniform:  # for the quick prox, where one formula holds for all points
            names += ["fi", "base"]
        if side.upper is not None:
            names.append("upper")
        count = len(side.weight)
        arrays = dict(zip(names, native.vectors(*[size] * len(names)), strict=True))
        for name, array in arrays.items():
            setattr(out, name, pointer(array))
        arrays["rho"][:] = 1.0
        arrays["rho"][:count] = side.rho
        if "fi" in arrays:
            arrays["fi"][:] = 1.0
            if side.penalty != "balanced":
                arrays["fi"][:count] = side.rho / (side.rho + self.problem.reg)
        if side.upper is not None:
            arrays["upper"][:count] = side.upper
        out.len, out.penalty = count, side.kind.number
        return arrays

    def shifted_log_v(self) -> F64:
        return self.col_side["log_scale"][: self.problem.shape[1]]

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64]:
        points: narrow_points.NarrowPoints = self.narrow_points
        if self.progress.narrow:
            found = points.fitted(alpha, beta)
        else:
            found = None
        if self.problem.ranks.max(found is None):  # all ranks go on in float64
            self.progress.narrow = 0
            self.take_float64()
            return alpha, beta
        put(self.limits, points.limits(self.floor, self.policy))
        assert found
        return found

    def take_float64(self) -> None:
        self.state.exact = 1
        put(self.limits, {"storage_error": 0.0, "flush": np.finfo(np.float64).tiny})

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        """Build K, and set limits for operators with row and column sums that err by ``apart``, relative to K.

        The marginals r of a pass then err by apart r. With rho = rho_rows + rho_cols, sqrt(gap) of the plan may be
        larger by apart sqrt(rho mass / 2), and the error by apart sqrt(rho / reg): this is ``extra_error``.
        """
        self.operator.build(alpha, beta)
        apart = self.operator.apart(error)
        self.limits.exponent_error = error + 3 * apart
        if apart:
            self.limits.extra_error = 1.1 * apart * math.sqrt(self.limits.rho_kl / self.problem.reg)

    def set_rows(self, d: F64, off: Any) -> None:
        self.limits.dual_constant, self.limits.dual_scale = self.dual_constants()
        rows = self.problem.rows
        self.limits.row_weight = rows.ranks.sum(float(rows.weight[~off].sum()))
        self.set_side(self.problem.rows, self.row_side, self.state.rows, d)

    def set_side(self, side: Side, arrays: dict[str, F64], state: Any, d: F64) -> None:
        """Set the absorbed potential of a side, the weights in use, and the constant part of the KL prox."""
        arrays["absorbed"][: len(d)] = d
        arrays["absorbed"][len(d) :] = np.inf
        lib.mapuot_set_side(ffi.addressof(state), pointer(side.weight), pointer(side.log_weight))

    def set_cols(self, e: F64, off: Any, x: F64, shift: float | None) -> None:
        n = len(x)
        cols = self.col_side
        if shift is not None:
            self.progress.shift = shift
        self.set_side(self.problem.cols, cols, self.state.cols, e)
        cols["log_scale"][:n] = x
        lib.mapuot_set_scale(self.state)
        self.progress.since_absorb = 0
        if self.options.in_place:
            self.history[: len(cols["scale"])] = cols["scale"]
            self.row_side["scale"][:] = 1.0

    def progress_of(self, name: str) -> float:
        return float(getattr(self.progress, name))

    @property
    def correcting(self) -> bool:
        return bool(self.progress.coarse)

    def take_mask(self, pairs: Truncation) -> None:
        self.operator.keep(pairs.renew(self.pool))
        put(self.progress, START)

    split = staticmethod(native.split)

    def labelled_pass(self, labels: Labels) -> list[Stats]:
        """Make a pass that finds the plan's mass between the clusters of all ranks and the columns."""
        coarse, ranks = self.state.coarse, self.problem.ranks
        if not coarse.clusters:
            self.open_coarse(labels, ranks.all(labels.clusters))
        coarse.labelled = True
        stats = self.make_passes(1)
        coarse.labelled = False
        if ranks.size > 1:
            for name, found in zip(("blocks", "mass"), zip(*ranks.all(self.own_blocks), strict=True), strict=True):
                self.coarse_arrays[name][:] = np.concatenate(found)
        return stats

    def open_coarse(self, labels: Labels, counts: list[int]) -> None:
        """Allocate the arrays of the correction; ``counts``: the clusters of each rank."""
        coarse, ranks = self.state.coarse, self.problem.ranks
        size = padded(self.problem.shape[1])
        own = counts[ranks.rank]
        count = sum(counts)
        coarse.clusters, coarse.own = count, own
        coarse.order = ffi.from_buffer("int64_t *", labels.order)
        coarse.first = ffi.from_buffer("int64_t *", labels.first)
        threads = lib.mapuot_pool_threads(self.pool)
        names = {"mass": count, "part": count, "root": size, "matrix": count * count, "step": count}
        names["sums"] = threads * max(len(self.sums), count)
        self.coarse_arrays = dict(zip(names, native.vectors(*names.values()), strict=True))
        for name, array in self.coarse_arrays.items():
            setattr(coarse, name, pointer(array))
        for name in ("blocks", "weights"):
            array = self.coarse_arrays[name] = empty(count * size, np.float32).reshape(count, size)
            setattr(coarse, name, ffi.from_buffer("float *", array))
        before = sum(counts[: ranks.rank])
        here = slice(before, before + own)
        self.own_blocks = self.coarse_arrays["blocks"][here], self.coarse_arrays["mass"][here]
        coarse.own_blocks = ffi.from_buffer("float *", self.own_blocks[0])
        coarse.own_mass = pointer(self.own_blocks[1])

    def correct(self, fi: float) -> None:
        """Make the matrix of the last labelled pass; it corrects all later steps."""
        check(lib.mapuot_coarse_matrix(self.pool, self.state, fi))

    def make_passes(self, count: int) -> list[Stats]:
        table = np.empty(count, STATS)
        made = ffi.new("int64_t *")
        stats = ffi.from_buffer("mapuot_stats *", table)
        streamed = (self.made or self.limits.finer or self.state.exact) and not self.problem.cost.held
        if self.problem.ranks.size > 1 or self.operator.summed or streamed:
            made[0] = self.passes(count, stats)
        else:
            check(lib.mapuot_iterate(self.pool, self.state, count, stats, made))
        return stats_of(table[: made[0]], self.progress.passes - made[0] + 1)

    def passes(self, count: int, stats: Any) -> int:
        """Do the work of mapuot_iterate step by step, where ranks add sums inside a pass, or M is streamed."""
        made, status = 0, lib.MAPUOT_RUNNING
        while made < count and status == lib.MAPUOT_RUNNING:
            with self.problem.ranks.adding(self.sums):
                self.row_pass()
            status = check(lib.mapuot_finish_pass(self.pool, self.state, stats + made))
            made += 1
        return made

    def row_pass(self) -> None:
        self.operator.row_pass(self.row_side, self.col_side)

    def newton_product(self) -> Callable[[F64], F64]:
        """Return the product for Newton's step from the last pass: a pass with factors instead of the prox.

        A pass writes its u, here K (v d) times the factors, to a vector of its own: a product made later from the same
        pass reads the u of that pass.
        """
        n = self.problem.shape[1]
        state = self.state
        size = len(self.col_side["scale"])
        room = len(self.row_side["scale"])
        factor, scale, v, vd = native.vectors(room, room, size, size)
        lib.mapuot_newton_factors(state, pointer(factor), pointer(v))
        symmetric = self.options.symmetric
        rows = self.row_side | {"factor": factor, "scale": scale}
        if symmetric:  # a pass of one potential writes K v over the marginal's buffer, which must survive
            rows["marginal"] = factor

        def product(d: F64) -> F64:
            before = state.rows.marginal, state.rows.scale, state.cols.scale, self.progress.narrow
            vd[:n] = v[:n] * d
            state.rows.factor = pointer(factor)
            state.rows.marginal = pointer(rows["marginal"])
            state.rows.scale = pointer(scale)
            state.cols.scale = pointer(vd)
            self.progress.narrow = 0
            with self.problem.ranks.adding(self.sums):
                self.operator.row_pass(rows, self.col_side)
            state.rows.marginal, state.rows.scale, state.cols.scale, self.progress.narrow = before
            state.rows.factor = ffi.NULL
            return np.asarray((-v[:n] if symmetric else v[:n]) * self.sums[:n])

        return product

    def leap(self, stat: Stats, on: bool) -> int:
        """Make a rough Newton's step; halve its reach when the guard drops a step, else let it grow by half."""
        (m, n), state = self.problem.shape, self.state
        if stat.rejected:
            self.reach = 0.5 * self.reach
        else:
            self.reach = min(REACH, 1.5 * self.reach)
        if stat.rejected or not on or self.reach < 0:
            return 0
        newton, room = self.leaps = self.leaps or (ffi.new("mapuot_newton *"), native.zeros(lib.mapuot_meet_room(m, n)))
        newton.rough = min(ROUGH, math.sqrt(stat.error))
        newton.enough = max(1, CALLS.work // self.problem.size)
        if lib.mapuot_newton_solve(self.pool, state, newton, pointer(room)) == lib.MAPUOT_GIVES_UP:
            self.reach = -math.inf
            return int(newton.products)
        y = np.frombuffer(ffi.buffer(newton.y, 8 * n))
        self.restart(self.work[:n] - self.progress.shift + np.clip(y, -self.reach, self.reach), guarded=True)
        return int(newton.products)

    def potentials(self) -> tuple[F64, F64]:
        rows, progress = self.row_side, self.progress
        with np.errstate(invalid="ignore"):
            log_u = rows["log_scale"] + rows["absorbed"] + progress.shift + progress.offset
            log_v = self.work[: self.problem.shape[1]] - progress.shift
        (out_u, out_v), (dead_u, dead_v) = self.problem.left_out, self.dead
        return for_users(log_u, out_u, dead_u), for_users(log_v, out_v, dead_v)

    def marginals(self) -> tuple[F64, F64]:
        n = self.problem.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):  # a solve may have ended "not finite"
            return self.row_side["marginal"] * self.progress.kappa, self.col_side["marginal"][:n].copy()

    def close(self) -> None:
        self.operator.close()
