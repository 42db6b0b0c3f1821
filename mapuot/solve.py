"""The one loop of the package: passes until the certificate holds, rebuilding K when the scalings outgrow it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from .backends import Options, Stats, Workspace, closing, host, pick
from .files import Checkpoint, opened
from .penalties import F64
from .problem import Problem, as_cost, as_pair, as_positive
from .ranks import ALONE, Ranks, join, process_grid
from .result import Result, warn_not_converged
from .rows import Rows, kind_of, rows_of

METHODS = {  # name: (translation, Anderson memory, in place)
    "auto": (True, 5, False),
    "translation_invariant": (True, 0, False),
    "sinkhorn": (False, 0, False),
    "map-uot": (False, 0, True),
}
PRECISIONS = {"float64": "float64", "mixed": "float32", "bfloat16": "bfloat16"}
MIXED_TOL = 5e-7  # a float32 K cannot certify less: its rounding alone accounts for 3 * 2^-24
SCALING_BELOW = 3e-3  # reg / range(M) under which reg is lowered in steps
SCALING_STEP = 4.0
COARSE_TOL = 0.1  # certified error at which a larger reg has done its work
MOST_THREADS = 4096  # more than any host has cores
MOST_A_CALL = 512  # passes that the core makes before Python looks again
FAILED = ("not finite", "underflow")  # a warm start that ends so is dropped
SECONDS_A_CALL = 0.2  # how long the core may keep control: Ctrl-C and the progress bar wait for it


def solve(
    M: Any,
    a: Any,
    b: Any,
    reg: float,
    reg_m: Any,
    *,
    method: str = "auto",
    penalty: Any = "kl",
    reference: Any = "product",
    tol: float = 1e-6,
    tol_gap: float | None = None,
    max_passes: int = 10_000,
    precision: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    warm_start: Any = None,
    callback: Callable[[Stats], Any] | None = None,
    progress: bool = False,
    comm: Any = None,
    split: Any = "rows",
    checkpoint: Any = None,
) -> Result:
    """Solve entropic unbalanced optimal transport, with a certificate.

    ``min_P <P, M> + reg KL(P | c) + reg_m[0] D(P 1 | a) + reg_m[1] D(P^T 1 | b)``

    Parameters
    ----------
    M : (m, n) array, function or path
        Costs; float32 or float64 in any memory layout (others are converted); +inf forbids a pair. A function
        ``M(i0, i1)`` of rows or a file (.npy, .npz, HDF5, Zarr) is read block by block and never held.
    a, b : (m,), (n,) arrays
        Masses, >= 0; None or empty means uniform with mass 1.
    reg : float
        Entropic regularisation, > 0, in units of M.
    reg_m : float, inf, or a pair of them or of per-point vectors
        Marginal penalty, in units of M; inf is the balanced constraint. ``penalty="range"``: the relative slack.
    method : {"auto", "translation_invariant", "sinkhorn", "map-uot"}
        "auto" is the translation-invariant iteration with guarded Anderson acceleration (memory 5), "sinkhorn"
        makes POT's iterates, "map-uot" rescales one buffer in place (arXiv 2412.11079) and carries the scalings.
    penalty : {"kl", "balanced", "tv", "l2", "range"} or a pair of them
    reference : {"product", "uniform"} or (m, n) array
        c: a b^T, ones, or the given matrix (zeros forbid pairs).
    tol : float
        Stop when the certified relative plan error ``|P - P*|_1 / mass`` is at most this. Of a side that is balanced,
        in part, too, or has penalty "range" no such bound is known: it counts by its violation, ``|P^T 1 - b|_1 /
        mass``, and the plan's error can be some times that (3 or 4 were seen). Balanced columns beside soft rows
        have a true bound in one process with method "auto", which turns the problem round.
    tol_gap : float, optional
        Stop also when ``gap <= tol_gap * |dual|`` and hard columns (balanced, range) miss at most ``tol_gap * mass``.
    max_passes : int
        Reads of K at most (and one more where the last was an extrapolation that the guard dropped, or in place).
    precision : {"auto", "float64", "mixed", "bfloat16"}
        Storage of K. Sums and potentials are float64 always; "auto" is "mixed" (float32 K) for tol >= 5e-7, but
        "float64" for method "map-uot", whose plan is rounded in every pass: in float32 the bound grows by 2e-7 each.
    backend : {"auto", "cpu", "cuda", "reference"}
    threads : int, optional
        CPU threads; default: the cores this process may use, one for small problems.
    warm_start : Result or (log_u, log_v), optional
    callback : callable, optional
        ``callback(stats)`` after every pass; a true return value stops the solve.
    progress : bool
        Show a progress bar on standard error.
    comm : mpi4py communicator, optional
        Solve over its ranks, each with its own rows of M, a, reg_m[0] and reference (none, too); b whole on all. What
        fails here on one rank raises on all; start programs as ``mpiexec -n P python -m mpi4py program.py``, then what
        fails elsewhere ends the job, too.
        A function or file M is that of the whole matrix. The Result is distributed alike, see there. On GPUs each
        rank has one, that of its arrays or, by its number on the host, of those it sees; the column sums go through
        NCCL (``mapuot[nccl]``), else through the host; environment MAPUOT_CUDA_MPI=1: through a
        CUDA-aware MPI. A problem with balanced columns only, which one process solves transposed, is solved as
        given over ranks and from a streamed M: the same plan, in more passes.
    split : {"rows", "grid", "auto"} or (R, C)
        How M lies over the ranks. In a grid of R x C, rank r C + c has block (r, c), and of b, reg_m[1] and log_v, too,
        its own part only (:func:`mapuot.ranks.own_block` tells which); a function is called as ``M(i0, i1, j0, j1)``.
        A grid reads K twice a pass, but shares the O(n) half of it: for few rows a rank (some 40), or vectors of n
        numbers (some 30 are held) that are too large for one. "grid" is as square as it can be; "auto", for a file,
        compares the times of a pass (:func:`mapuot.ranks.pass_time`). CPU backend; not for method "map-uot".
    checkpoint : path, optional
        Write the potentials to this file every minute (see :func:`mapuot.files.load_checkpoint`).

    Returns
    -------
    Result

    Raises
    ------
    ValueError, TypeError
        An argument is out of range or of the wrong kind; the message names it.
    InfeasibleError
        A balanced point cannot be reached.

    Warns
    -----
    ConvergenceWarning
        The certified error reached is above tol.
    """
    ranks = join(comm)
    with ranks.together():
        if method not in [*METHODS]:
            raise ValueError(f"Unknown method {method!r}: must be one of {sorted(METHODS)}")
        if precision not in ("auto", *PRECISIONS):
            raise ValueError(f"precision must be one of {['auto', *PRECISIONS]}, got {precision!r}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable, got {callback!r}")
        module = pick(backend, M, a, b)
        ranks.place(module.__name__, M, a, b)
        M = opened(M)
        shape = M.shape if isinstance(M, Rows) else None
        ranks.arrange(grid_of(split, ranks.size, shape, method, module.__name__.rpartition(".")[2]))
        ranks.same(
            method=method, penalty=penalty, tol=tol, tol_gap=tol_gap, max_passes=max_passes, precision=precision,
            backend=module.__name__, reg=reg, M=kind_of(M),
            reference=reference if isinstance(reference, str) else kind_of(reference),
        )  # fmt: skip
        rho = as_pair(reg_m, "reg_m")
        ranks.rows.same(b=b, **{"reg_m[0]": "one a row" if np.ndim(rho[0]) else rho[0], "reg_m[1]": rho[1]})
        ranks.cols.same(a=a, **{"reg_m[0]": rho[0], "reg_m[1]": "one a column" if np.ndim(rho[1]) else rho[1]})
        M = as_cost(rows_of(M, a, b, ranks), module, ranks)
        reference = rows_of(reference, a, b, ranks) if isinstance(reference, Rows) else reference
        threads = ranks.threads(None if threads is None else as_count(threads, "threads", MOST_THREADS), M.size)
        problem = Problem.from_arrays(M, a, b, reg, reg_m, penalty, reference, module, ranks, threads)
        options = make_options(method, precision, tol, tol_gap, threads)
        start = start_potentials(warm_start, problem)
        ranks.rows.same(warm_start=start[1])
        run = Run(module, as_count(max_passes, "max_passes"), callback, progress, ranks, checkpoint)
        result = run.solve(problem, options, start, escalate=precision == "auto")
    if not result.converged and result.status != "cancelled" and ranks.rank == 0:
        warn_not_converged(result, tol, options.precision if precision != "auto" else "float64")
    return result


def grid_of(split: Any, size: int, shape: tuple[int, int] | None, method: str, backend: str) -> tuple[int, int]:
    """process_grid for this method and backend: "auto" is rows where a grid cannot be."""
    in_place = METHODS[method][2]
    if split == "auto" and (in_place or backend != "cpu"):
        split = "rows"
    grid = process_grid(split, size, shape)
    if grid[1] > 1 and backend != "cpu":
        raise NotImplementedError(f"split={split!r} needs backend='cpu', got {backend!r}")
    if grid[1] > 1 and in_place:
        raise NotImplementedError(f"method {method!r} keeps whole rows on a rank: split must be 'rows', got {split!r}")
    return grid


def make_options(method: str, precision: str, tol: Any, tol_gap: Any, threads: Any) -> Options:
    translate, memory, in_place = METHODS[method]
    tol = as_positive(tol, "tol")
    tol_gap = -1.0 if tol_gap is None else as_positive(tol_gap, "tol_gap")
    if precision == "auto":
        precision = "mixed" if tol >= MIXED_TOL and not in_place else "float64"  # a plan is rounded in every pass
    if in_place and precision == "bfloat16":
        raise ValueError("precision 'bfloat16' cannot hold the in-place plan of method 'map-uot'")
    threads = None if threads is None else as_count(threads, "threads", MOST_THREADS)
    return Options(translate, memory, in_place, PRECISIONS[precision], tol, tol_gap, threads)


def as_count(value: Any, name: str, most: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def start_potentials(warm_start: Any, problem: Problem) -> tuple[F64, F64]:
    """(log u, log v) to start from: zeros, or a warm start (a Result's potentials f, g are kept if reg changed)."""
    m, n = problem.shape
    if warm_start is None:
        return np.zeros(m), np.zeros(n)
    if isinstance(warm_start, Result):
        warm_start = warm_start.f / problem.reg, warm_start.g / problem.reg
    try:
        log_u, log_v = (np.asarray(host(x)).astype(np.float64, casting="same_kind") for x in warm_start)
    except (TypeError, ValueError) as error:
        raise TypeError("warm_start must be a Result or a pair (log_u, log_v)") from error
    if log_u.shape != (m,) or log_v.shape != (n,):
        raise ValueError(f"warm_start must have shapes ({m},), ({n},), got {log_u.shape}, {log_v.shape}")
    if np.isnan(log_u).any() or np.isnan(log_v).any():
        raise ValueError("warm_start must not hold NaN")
    return problem.project(np.where(np.isfinite(log_u), log_u, 0.0), np.where(np.isfinite(log_v), log_v, 0.0))


class Run:
    """One solve under way: the loop, its clock, its trace."""

    def __init__(
        self,
        module: ModuleType,
        max_passes: int,
        callback: Callable[[Stats], Any] | None,
        progress: bool,
        ranks: Ranks = ALONE,
        checkpoint: Any = None,
    ) -> None:
        self.module, self.max_passes, self.callback, self.ranks = module, max_passes, callback, ranks
        self.heard = ranks.max(bool(callback))  # by some rank, after every pass
        self.checkpoint = Checkpoint(checkpoint) if checkpoint is not None and ranks.rank == 0 else None
        self.saves = ranks.max(self.checkpoint is not None)
        progress = progress and ranks.rank == 0
        # neither a share nor a time to go: how many passes it takes, nobody knows
        form = "{desc}: {n_fmt} of at most {total_fmt} passes [{elapsed}, {rate_fmt}{postfix}]"
        options = {"total": max_passes, "desc": "mapuot", "unit": "pass", "disable": False, "bar_format": form}
        self.bar = tqdm(**options) if progress else None
        self.limit = max_passes
        self.status = "running"
        self.trace: list[Stats] = []
        self.potentials: tuple[F64, F64]
        self.marginals: tuple[F64, F64]
        self.start = time.perf_counter()

    def solve(self, problem: Problem, options: Options, start: tuple[F64, F64], escalate: bool) -> Result:
        """Solve the problem as given, or turned where only its columns are balanced.

        The row side is exact in every pass, so that the gap of the free side then certifies the plan.
        """
        turned = problem.turns and problem.cols.penalty == "balanced" != problem.rows.penalty and options.memory > 0
        task, log_v = (problem.transpose(), start[0]) if turned else (problem, start[1])
        with self.bar or nullcontext():
            warm = self.ranks.max(bool(log_v.any()))
            log_v = self.approach(task, options, log_v, warm)
            if warm and self.status in FAILED:
                log_v = self.approach(task, options, np.zeros_like(log_v), False)
            if self.status == "stalled" and options.memory and {task.rows.penalty, task.cols.penalty} & {"tv", "range"}:
                options = dataclasses.replace(options, memory=0)  # kinks mislead the extrapolation
                log_v = self.run(task, options, log_v)
            if self.status in ("stalled", "underflow") and escalate and options.precision == "float32":
                log_v = self.run(task, dataclasses.replace(options, precision="float64"), log_v)
        if turned:
            self.potentials, self.marginals = self.potentials[::-1], self.marginals[::-1]
        return Result(problem, self.module, self.potentials, self.marginals, self.trace, self.status, options.threads)

    def approach(self, task: Problem, options: Options, log_v: F64, warm: bool) -> F64:
        """The reg asked for, by way of larger ones from a cold start where it is small."""
        for reg in reg_steps(task, options, warm):
            self.limit = self.max_passes // 2  # the rest is for the reg asked for
            if self.n_passes >= self.limit:
                break
            coarse = dataclasses.replace(options, tol=max(options.tol, COARSE_TOL))
            log_v = self.run(dataclasses.replace(task, reg=reg), coarse, log_v * (task.reg / reg))
            log_v *= reg / task.reg
            if self.status == "cancelled":
                break
        cancelled = self.status == "cancelled"
        self.limit = self.n_passes + 1 if cancelled else self.max_passes  # one, for potentials of the reg asked
        log_v = self.run(task, options, log_v)
        self.status = "cancelled" if cancelled else self.status
        return log_v

    def run(self, problem: Problem, options: Options, log_v: F64) -> F64:
        """Pass until certified, cancelled or out of passes; returns the log v to go on from."""
        with closing(self.module.Workspace(problem, options)) as workspace:
            workspace.absorb(log_v)
            fresh = True
            quick = not self.heard and self.ranks.max(problem.M.size) <= self.module.QUICK_ENTRIES
            count = self.module.QUICK_PASSES if quick else 1
            while True:
                begun = time.perf_counter()
                stats = workspace.iterate(max(1, min(count, self.limit - self.n_passes)))
                self.status = self.record(stats)
                ended = self.status not in ("running", "absorb", *FAILED)
                if ended and options.in_place and not (fresh and len(stats) == 1):
                    self.certify_in_place(workspace)
                if fresh := self.status == "absorb":
                    workspace.absorb()
                elif self.status != "running":
                    break
                if self.saves and self.ranks.max(bool(self.checkpoint and self.checkpoint.due)):
                    self.save(workspace, problem)
                count = self.next_count(len(stats), self.ranks.max(time.perf_counter() - begun))
            if stats[-1].rejected:
                self.leave_rejected(workspace, stats[-1])
            if self.saves:
                self.save(workspace, problem)
            self.potentials, self.marginals = workspace.potentials(), workspace.marginals()
            return np.array(workspace.next_log_v)

    def certify_in_place(self, workspace: Workspace) -> None:
        """Repeat the last pass on a fresh K: what the plan lost while it was rescaled, it does not know itself."""
        log_v = self.module.to_numpy(workspace.potentials()[1])
        workspace.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
        status = self.record(workspace.iterate(1))
        if "converged" in (status, self.status):
            self.status = status

    def leave_rejected(self, workspace: Workspace, last: Stats) -> None:
        """Make one pass more where the last was a dropped step: its state is no answer, the image before it is."""
        if last.status == "absorb":
            workspace.absorb()
        status = self.record(workspace.iterate(1))
        self.status = "converged" if status == "converged" else self.status

    def save(self, workspace: Workspace, problem: Problem) -> None:
        log_v = self.ranks.gather(workspace.next_log_v, 0, "cols")
        if self.checkpoint:
            self.checkpoint.save(problem.cols.name, log_v, problem.reg, self.n_passes)

    @property
    def n_passes(self) -> int:
        return self.trace[-1].n_pass if self.trace else 0

    def record(self, stats: list[Stats]) -> str:
        """Append to the trace, tell the callback; the status that the loop acts on."""
        done, now = self.n_passes, time.perf_counter() - self.start
        cancelled = False
        for i, stat in enumerate(stats, 1):
            stat.n_pass, stat.seconds = done + i, now
            self.trace.append(stat)
            cancelled = cancelled or bool(self.callback and self.callback(stat))
        if self.bar:
            self.bar.update(len(stats))
            self.bar.set_postfix_str(f"error {stats[-1].error:.1e}", refresh=False)
        cancelled = self.ranks.max(cancelled)
        status = stats[-1].status
        if status in ("running", "absorb"):
            if cancelled:
                return "cancelled"
            if self.n_passes >= self.limit:
                return "max_passes"
        return status

    def next_count(self, made: int, seconds: float) -> int:
        """Passes to ask of the core next: one where someone listens, else what fits SECONDS_A_CALL."""
        if self.heard:
            return 1
        return max(1, min(2 * made, MOST_A_CALL, int(made * SECONDS_A_CALL / max(seconds, 1e-6))))


def reg_steps(problem: Problem, options: Options, warm: bool) -> list[float]:
    """Larger regs to pass through first where reg is far below the range of M; none for the named methods."""
    spread = problem.M_max - problem.M_min
    if warm or options.memory == 0 or problem.reg >= SCALING_BELOW * spread:
        return []
    count = math.ceil(math.log(SCALING_BELOW * spread / problem.reg, SCALING_STEP))
    return [problem.reg * SCALING_STEP**k for k in range(count, 0, -1)]
