"""Plain problems solved whole by the core (src_c/solve.c), one foreign call for one problem or for many.

The records that a call fills are kept for the next one: to make them takes longer than to solve 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..._core import ffi, lib
from ...penalties import F64
from ...problem.cost import Dense
from ...problem.problem import EXPONENT_ROUNDING, VANISHING, BatchProblem
from ...problem.validate import MASS_TOLERANCE
from ..contract import Options, memory_of
from ..records import STATS
from ..workspace import FAR, STORAGE
from .native import CODES, DTYPES, SERIAL, check, empty, pointer, pool_for
from .workspace import NARROW_NOISE, SAFE_SPREAD, SCALES

CALL_ENTRIES = 1 << 28  # of K read by one call, some .2 s: Ctrl-C waits for it
MOST_PASSES = 10_000  # of one call
KEPT_BYTES = 1 << 23  # of scratch between two calls
KEPT_CALLS = 16  # of hundreds of threads, some 9 MB each
CONVERGED, OUT_OF_PASSES = lib.MAPUOT_CONVERGED, lib.MAPUOT_RUNNING

CALL_PROBLEMS = 8  # of one call and thread: some have thousands of passes to make
MEMBERS = {"double": np.float64, "int64_t": np.int64, "mapuot_stats": STATS}  # and pointers, of 8 bytes, too
PROBLEM: Any = np.dtype(
    [(name, MEMBERS.get(field.type.cname, np.int64)) for name, field in ffi.typeof("mapuot_problem").fields]
)

# mapuot_stage: (reg in units of the problem's, tol, least range(M) / reg, passes at its end, one potential)
Ladder = Callable[[Options, int], list[tuple[float, float, float, int, bool]]]

kept: list[Call] = []  # of calls that are over; one under way has taken its own out


class Found(NamedTuple):
    """Answer of one call; ``numbers`` holds log u, log v, r, s and the exponents of the plan, one after the other."""

    converged: bool
    numbers: Any
    passes: bytes  # the records of all passes
    mass: float
    masses: tuple[float, float]
    low: float
    high: float
    forbidden: bool
    larger: int  # regs than the one asked for, which came before it
    symmetric: bool  # passes were those of one potential
    products: int  # for Newton's step towards hard columns


class Call:
    """The records of one foreign call, and what they were last filled for."""

    stages: Any = None
    shape: Any = None
    options: Any = None
    penalties: Any = None

    def __init__(self) -> None:
        self.task, self.problem = ffi.new("mapuot_task *"), ffi.new("mapuot_problem *")
        self.terms = self.task.terms
        self.trace = ffi.new("mapuot_stats[]", MOST_PASSES + 8)
        self.task.trace = self.trace
        self.scratch = empty(0)
        self.at = pointer(self.scratch, "void *")

    def prepare(self, shape: tuple[int, ...], dtype: str, options: Options, max_passes: int, ladder: Ladder) -> None:
        """Fill what stays from call to call of one kind."""
        strides = shape[1], 1
        self.stages = fill_task(self.task, shape, strides, dtype, options, max_passes, ladder)
        wanted = lib.mapuot_solve_bytes(self.task) // 8
        if wanted > len(self.scratch):
            self.scratch = empty(wanted)
            self.at = pointer(self.scratch, "void *")
        self.shape, self.options = (shape, dtype, max_passes), options


def fill_task(
    task: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, options: Options, max_passes: int,
    ladder: Ladder,
) -> Any:  # fmt: skip
    """Fill in all but reg and reg_m, and return the stages, which must live as long as the task.

    ``strides``: of M in entries.
    """
    most = min(MOST_PASSES, max(1, CALL_ENTRIES // (shape[0] * shape[1])))
    rows = [(reg, tol, spread, min(passes, most), one) for reg, tol, spread, passes, one in ladder(options, max_passes)]
    stages = ffi.new("mapuot_stage[]", rows)
    task.stages, task.count, task.max_passes = stages, len(rows), max_passes
    task.m, task.n = shape
    task.M.row_stride, task.M.col_stride, task.M.dtype = *strides, CODES[dtype]
    task.safe_spread, task.far = SAFE_SPREAD[options.precision], FAR
    task.mass_tolerance, task.exponent_rounding, task.vanishing = MASS_TOLERANCE, EXPONENT_ROUNDING, VANISHING
    task.scale_limit, task.most_scale = SCALES["scale_limit"], SCALES["most_scale"]
    terms, itemsize = task.terms, np.dtype(STORAGE[options.precision]).itemsize
    memory = memory_of(options.memory, shape[0], itemsize)
    terms.tol, terms.tol_gap, terms.translate, terms.memory, terms.dtype, terms.noise = (
        options.tol, options.tol_gap, options.translate, memory, DTYPES[options.precision], NARROW_NOISE,
    )  # fmt: skip
    return stages


def fill_penalties(terms: Any, reg: float, rho: tuple[Any, Any]) -> None:
    terms.reg = reg
    terms.rho_rows, terms.rho_cols = rho
    soft = [x for x in rho if x < np.inf]
    terms.largest_rho, terms.rho_kl, terms.hard_sides = max(soft, default=0.0), sum(soft), 2 - len(soft)


def solve(
    cost: Dense, a: Any, b: Any, reg: float, rho: tuple[float, float], options: Options, max_passes: int,
    ladder: Ladder, plan: Any,
) -> Found | None:  # fmt: skip
    """Solve a problem of a C-contiguous array, and fill ``plan`` if it is an array; None: it is not plain after all."""
    try:
        call = kept.pop()
    except IndexError:  # asked first, another thread could take the last one meanwhile
        call = Call()
    M = cost.array
    shape, dtype = M.shape, M.dtype.char
    if call.options is not options or call.shape != (shape, dtype, max_passes):
        call.prepare(shape, dtype, options, max_passes, ladder)
    (m, n), problem = shape, call.problem
    problem.made = 0
    if call.penalties != (reg, rho):
        fill_penalties(call.terms, reg, rho)
        call.penalties = reg, rho
    call.task.cost_error = cost.error(float(np.max(M, where=np.inf > M, initial=0.0))) if cost.cloud else 0.0
    numbers = np.empty(3 * (m + n))
    at = ffi.from_buffer("double *", numbers)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_a, log_b = np.log(a), np.log(b)
        problem.mass_a, problem.mass_b = np.add.reduce(a), np.add.reduce(b)  # as a.sum() does, in half the time
    problem.M, problem.a, problem.b = ffi.from_buffer(M), ffi.from_buffer("double *", a), ffi.from_buffer("double *", b)
    problem.log_a, problem.log_b = ffi.from_buffer("double *", log_a), ffi.from_buffer("double *", log_b)
    problem.log_u, problem.log_v = at, at + m
    problem.row_marginal, problem.col_marginal = at + (m + n), at + (2 * m + n)
    problem.alpha, problem.beta = at + 2 * (m + n), at + (3 * m + 2 * n)
    problem.plan = ffi.NULL if plan is None else ffi.from_buffer(plan)
    check(lib.mapuot_solve(SERIAL, call.task, 1, problem, call.at))
    status, made = problem.status, problem.made
    found = None
    if status in (CONVERGED, OUT_OF_PASSES):
        passes = bytes(ffi.buffer(call.trace, made * STATS.itemsize))
        masses, seen = (problem.mass_a, problem.mass_b), (problem.low, problem.high, bool(problem.forbidden))
        way = problem.larger, bool(problem.symmetric), problem.products
        found = Found(status == CONVERGED, numbers, passes, problem.last.mass, masses, *seen, *way)
    if call.scratch.nbytes <= KEPT_BYTES and len(kept) < KEPT_CALLS:
        kept.append(call)
    return found


def solve_many(
    task: BatchProblem, which: Any, starts: F64, spent: Any, options: Options, max_passes: int, ladder: Ladder
) -> Iterator[tuple[Any, Any, list[F64]]]:
    """Problems ``which`` of a batch, some at a time: (their numbers, their records, [log u, log v, r, s]).

    ``starts``: log v, one row for each of them; ``spent``: the passes that each has made already. The records
    of those that are not plain after all have another status than CONVERGED and OUT_OF_PASSES.
    """
    (m, n), M = task.shape, task.M
    pool = pool_for(options.threads, len(which) * m * n)
    threads, call = lib.mapuot_pool_threads(pool), ffi.new("mapuot_task *")
    strides = tuple(s // M.itemsize for s in M.strides[-2:])
    _stages = fill_task(call, (m, n), strides, M.dtype.char, options, max_passes, ladder)
    fill_penalties(call.terms, task.reg, (task.rows.scalar_rho, task.cols.scalar_rho))
    call.cost_error = task.cost.error(task.M_max)
    scratch = empty(threads * lib.mapuot_solve_bytes(call) // 8)
    first, step = M.__array_interface__["data"][0], M.strides[0] if M.ndim == 3 else 0
    for i0 in range(0, len(which), CALL_PROBLEMS * threads):
        part = which[i0 : i0 + CALL_PROBLEMS * threads]
        records = np.zeros(len(part), PROBLEM)
        records["M"], records["made"] = first + step * part, spent[i0 : i0 + len(part)]
        A, B = (np.ascontiguousarray(x[part]) for x in (task.A, task.B))
        with np.errstate(divide="ignore"):
            log_a, log_b = np.log(A), np.log(B)
        records["mass_a"], records["mass_b"] = A.sum(1), B.sum(1)
        found = [np.empty((len(part), k)) for k in (m, n, m, n)]
        tables = dict(zip(("log_u", "log_v", "row_marginal", "col_marginal"), found, strict=True))
        tables |= {"a": A, "b": B, "log_a": log_a, "log_b": log_b, "start": starts[i0 : i0 + len(part)]}
        tables |= {"alpha": np.empty(A.shape), "beta": np.empty(B.shape)}
        for name, table in tables.items():
            records[name] = table.__array_interface__["data"][0] + table.strides[0] * np.arange(len(part))
        records["start"] *= tables["start"].any(1)  # NULL: by way of larger regs
        check(lib.mapuot_solve(pool, call, len(part), pointer(records, "mapuot_problem *"), pointer(scratch, "void *")))
        yield part, records, found


def form_plan(M: Any, reg: float, exponents: Any, out: Any) -> None:
    """The plan of these exponents, the last m + n of ``Found.numbers``, of a C-contiguous M."""
    m, n = M.shape
    view = ffi.new("mapuot_matrix *", (ffi.from_buffer(M), n, 1, CODES[M.dtype.char]))
    at, code = ffi.from_buffer("double *", exponents), CODES[out.dtype.char]
    check(lib.mapuot_form_plan(SERIAL, m, n, view[0], NONE, reg, at, at + m, code, ffi.from_buffer(out), n))


NONE = ffi.new("mapuot_matrix *")[0]
