"""Plain problems solved whole by the core (src_c/solve.c), one foreign call for one problem or for many.

The records of a call are kept for the next call: making them takes longer than solving a 64 x 64 problem.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..._core import ffi, lib
from ...contract import Options
from ...penalties import F64
from ...problem.cost import Dense
from ...problem.problem import EXPONENT_ROUNDING, VANISHING, BatchProblem
from ...problem.validate import MASS_TOLERANCE
from ..factored import STIFF, patience
from ..records import STATS
from ..settings import CALLS
from ..workspace import FAR_LOG, STORAGE, anderson_depth_of
from .native import CODES, DTYPES, SERIAL, check, empty, pool_for
from .workspace import NARROW_NOISE, SAFE_RANGE, SCALES

CALL_ENTRIES = 1 << 28  # entries of K that one call reads at most, some .2 s: Ctrl-C waits for the call
USUAL_PASSES = 16  # passes that each of many problems makes at least: decides how many threads are worth waking
KEPT_BYTES = 1 << 23  # largest scratch memory that is kept between two calls
KEPT_CALLS = 16  # calls that are kept, of some 9 MB each; programs may have hundreds of threads
CONVERGED, OUT_OF_PASSES, STALLED = lib.MAPUOT_CONVERGED, lib.MAPUOT_RUNNING, lib.MAPUOT_STALLED

# least problems and pairs of a call per thread: some need thousands of passes
CALL_PROBLEMS = 8
CALL_PAIRS = 1 << 18
MEMBERS = {
    "double": np.float64,
    "int64_t": np.int64,
    "mapuot_stats": STATS,
}  # all other members are pointers of 8 bytes
PROBLEM: Any = np.dtype(
    [(name, MEMBERS.get(field.type.cname, np.int64)) for name, field in ffi.typeof("mapuot_problem").fields]
)

# mapuot_stage: (reg in units of the problem's reg, tol, tol of hard sides, least range(M) / reg, passes at its end,
# one potential)
Ladder = Callable[[Options, int], list[tuple[float, float, float, float, int, bool]]]

kept: "list[CoreCall]" = []  # records of calls that are over; a call takes its own out of the list while it runs


class CoreAnswer(NamedTuple):
    """Answer of one call; ``numbers`` holds log u, log v, r, s and the exponents of the plan, one after the other."""

    status: int  # CONVERGED, OUT_OF_PASSES, or STALLED: potentials to go on from
    numbers: Any
    passes: bytes  # the records of all passes
    mass: float
    masses: tuple[float, float]
    low: float
    high: float
    forbidden: bool
    n_larger: int  # number of stages at larger regs that came first
    symmetric: bool  # passes used one potential
    products: int  # for Newton's step towards hard columns


class CoreCall:
    """The records of one foreign call, and the arguments that they were last filled for."""

    stages: Any = None
    shape: Any = None
    options: Any = None
    penalties: Any = None

    def __init__(self) -> None:
        self.task, self.problem = ffi.new("mapuot_task *"), ffi.new("mapuot_problem *")
        self.terms = self.task.terms
        self.trace = ffi.new("mapuot_stats[]", CALLS.most_passes + 8)
        self.task.trace = self.trace
        self.scratch = empty(0)
        self.at = ffi.from_buffer("void *", self.scratch)

    def prepare(self, shape: tuple[int, ...], dtype: str, options: Options, max_passes: int, ladder: Ladder) -> None:
        """Fill the members that stay the same for all calls with these arguments."""
        strides = shape[1], 1
        self.stages = fill_task(self.task, shape, strides, dtype, options, max_passes, ladder)
        wanted = lib.mapuot_solve_bytes(self.task) // 8
        if wanted > len(self.scratch):
            self.scratch = empty(wanted)
            self.at = ffi.from_buffer("void *", self.scratch)
        self.shape = (shape, dtype, max_passes)
        self.options = options
        self.penalties = None  # compute them anew: the passes before a factorisation depend on the shape
        self.problem.m, self.problem.n = shape


def fill_task(
    task: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, options: Options, max_passes: int,
    ladder: Ladder,
) -> Any:  # fmt: skip
    """Fill all members but reg and reg_m; return the stages, which must live as long as the task.

    ``strides``: strides of M in entries.
    """
    most = min(CALLS.most_passes, max(1, CALL_ENTRIES // (shape[0] * shape[1])))
    rows = ladder(options, max_passes)
    stages = ffi.new("mapuot_stage[]", [(*terms, min(passes, most), one) for *terms, passes, one in rows])
    task.stages, task.count, task.max_passes = stages, len(rows), max_passes
    task.m, task.n = shape
    task.M.row_stride, task.M.col_stride, task.M.dtype = *strides, CODES[dtype]
    task.safe_range = SAFE_RANGE[options.precision]
    task.far = FAR_LOG
    task.mass_tolerance, task.exponent_rounding, task.vanishing = MASS_TOLERANCE, EXPONENT_ROUNDING, VANISHING
    task.scale_limit = SCALES["scale_limit"]
    task.most_scale = SCALES["most_scale"]
    terms, itemsize = task.terms, np.dtype(STORAGE[options.precision]).itemsize
    depth = anderson_depth_of(options.anderson_depth, shape[0], itemsize)
    terms.tol = options.tol
    terms.tol_gap = options.tol_gap
    terms.translate = options.translate
    terms.anderson_depth = depth
    terms.dtype = DTYPES[options.precision]
    terms.noise = NARROW_NOISE
    return stages


def terms_of(task: BatchProblem) -> tuple[Any, Any, Any]:
    """Return reg and the reg_m of both sides: numbers, or (p,) where problems have their own."""
    return task.regs, task.rhos(True), task.rhos(False)


def fill_penalties(task: Any, reg: float, rho: tuple[Any, Any]) -> None:
    task.hard_passes = fill_terms(task.terms, (task.m, task.n), reg, rho)


def fill_terms(terms: Any, shape: tuple[int, int], reg: float, rho: tuple[Any, Any]) -> int:
    """Set reg and the penalties of some terms; return the most passes before a factorisation is faster, 0: never."""
    terms.reg = reg
    terms.rho_rows, terms.rho_cols = rho
    soft = [x for x in rho if x < np.inf]
    terms.largest_rho, terms.rho_kl, terms.hard_sides = max(soft, default=0.0), sum(soft), 2 - len(soft)
    if terms.anderson_depth > 0 and max(rho) >= STIFF * reg:
        return patience(shape, min(rho) == np.inf)
    return 0


def solve(
    cost: Dense, a: Any, b: Any, reg: float, rho: tuple[float, float], options: Options, max_passes: int,
    ladder: Ladder, plan: Any, compare: Callable[[], bool],
) -> CoreAnswer | None:  # fmt: skip
    """Solve a problem with a C-contiguous M, and fill ``plan`` if it is an array; None: the problem is not plain.

    ``compare`` raises an error if forbidden pairs leave no plan between hard sides, and tells whether the masses of the
    parts are equal on both sides. It is called only if pairs are forbidden.
    """
    try:
        call = kept.pop()
    except IndexError:  # a test before pop would be a race: another thread could take the last call in between
        call = CoreCall()
    M = cost.array
    shape, dtype = M.shape, M.dtype.char
    if call.options is not options or call.shape != (shape, dtype, max_passes):
        call.prepare(shape, dtype, options, max_passes, ladder)
    (m, n), problem = shape, call.problem
    problem.made = problem.forbidden = 0
    if call.penalties != (reg, rho):
        fill_penalties(call.task, reg, rho)
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
    if problem.forbidden and call.terms.hard_sides == 2 and problem.status not in (CONVERGED, OUT_OF_PASSES):
        if not compare():
            return None
        check(lib.mapuot_solve(SERIAL, call.task, 1, problem, call.at))
    status, made = problem.status, problem.made
    found = None
    goes_on = status == STALLED and call.task.hard_passes > 0  # with a factor
    if status in (CONVERGED, OUT_OF_PASSES) or goes_on:
        passes = bytes(ffi.buffer(call.trace, made * STATS.itemsize))
        masses, seen = (problem.mass_a, problem.mass_b), (problem.low, problem.high, bool(problem.forbidden))
        way = problem.larger, bool(problem.symmetric), problem.products
        found = CoreAnswer(status, numbers, passes, problem.last.mass, masses, *seen, *way)
    if call.scratch.nbytes <= KEPT_BYTES and len(kept) < KEPT_CALLS:
        kept.append(call)
    return found


def solve_many(
    task: BatchProblem, which: Any, starts: F64, spent: Any, options: Options, max_passes: int, ladder: Ladder
) -> Iterator[tuple[Any, Any, list[F64]]]:
    """Solve the problems ``which`` of a batch; yield (their indices, their records, [log u, log v, r, s]) in parts.

    ``starts``: log v, one row for each problem; ``spent``: passes that each problem has made already. A problem that
    turns out not to be plain has a status other than CONVERGED and OUT_OF_PASSES. Steps with a factor follow STALLED
    where ``hard_passes`` is above 0.
    """
    many = Many(task, which, options, max_passes, ladder)
    (m, n), most = many.shape, many.most
    for i0 in range(0, len(which), most):
        part = which[i0 : i0 + most]
        records = many.records(part)
        records["made"] = spent[i0 : i0 + len(part)]
        A, B = (np.ascontiguousarray(x[part, :k]) for x, k in ((task.A, m), (task.B, n)))
        with np.errstate(divide="ignore"):
            log_a = np.log(A)
            log_b = np.log(B)
        records["mass_a"], records["mass_b"] = A.sum(1), B.sum(1)
        # points behind the end of a smaller cloud have no mass: log u = -inf, and a marginal of 0
        found = [np.full((len(part), k), left_out) for left_out in (-np.inf, 0.0) for k in (m, n)]
        tables = dict(zip(("log_u", "log_v", "row_marginal", "col_marginal"), found, strict=True))
        tables |= {"a": A, "b": B, "log_a": log_a, "log_b": log_b}
        tables |= {"start": np.ascontiguousarray(starts[i0 : i0 + len(part), :n])}
        tables |= {"alpha": np.empty(A.shape), "beta": np.empty(B.shape)}
        point(records, tables)
        records["start"] *= tables["start"].any(1)  # NULL: a cold start, which begins with stages at larger regs
        many.call(lib.mapuot_solve, records)
        yield part, records, found


def slopes(task: BatchProblem, which: Any, exponents: Any, wanted: Any, threads: int | None) -> list[Any]:
    """Return derivatives by x and by y for problems between points, one problem behind the other; None if not wanted.

    ``exponents``: log u + log a and log v + log b of all problems. The metric must be a squared distance.
    """
    options = Options(True, 0, False, "float64", 1.0, -1.0, threads)
    many, clouds = Many(task, which, options, 1, lambda *_: []), task.several
    counts = [places.count[which] for places in clouds.places]
    sizes = [(int(count.sum()), clouds.whole.dim) for count in counts]
    out = [np.empty(size) if want else None for size, want in zip(sizes, wanted, strict=True)]
    ends = [np.cumsum(count) for count in counts]
    for i0 in range(0, len(which), many.most):
        part = slice(i0, i0 + many.most)
        records = many.records(which[part])
        alpha, beta = (np.ascontiguousarray(x[which[part]]) for x in exponents)
        point(records, {"alpha": alpha, "beta": beta})
        for name, table, end, count in zip(("x_slope", "y_slope"), out, ends, counts, strict=True):
            if table is not None:
                records[name] = address(table) + table.strides[0] * (end - count)[part]
        many.call(lib.mapuot_slopes, records)
    return out


class Many:
    """Calls of the core for the problems ``which`` of a batch; one thread works on each problem."""

    def __init__(self, task: BatchProblem, which: Any, options: Options, max_passes: int, ladder: Ladder) -> None:
        self.clouds = clouds = task.several
        if clouds:
            counts = [places.count[which] for places in clouds.places]
        else:
            counts = [[k] for k in task.shape]
        self.shape = m, n = int(max(counts[0])), int(max(counts[1]))
        self.pool = pool_for(options.threads, USUAL_PASSES * len(which) * m * n)
        threads = lib.mapuot_pool_threads(self.pool)
        self.task = ffi.new("mapuot_task *")
        if clouds:
            strides = (n, 1)
            dtype = "d"
            points, (metric, scale) = self.task.M.points, clouds.whole.core
            points.d, points.metric, points.scale = clouds.whole.dim, metric.number, scale
            self.points = clouds.whole.rows, np.ascontiguousarray(clouds.targets)
        else:
            self.M = task.M
            strides = tuple(s // self.M.itemsize for s in self.M.strides[-2:])
            dtype = self.M.dtype.char
        self.stages = fill_task(self.task, self.shape, strides, dtype, options, max_passes, ladder)
        fill_penalties(self.task, task.reg, (task.rows.scalar_rho, task.cols.scalar_rho))
        self.own: Any = None
        if task.each is not None:
            self.own = np.stack(np.broadcast_arrays(*terms_of(task)), 1)
        self.task.cost_error = task.cost.error(task.M_max)
        self.scratch = empty(threads * lib.mapuot_solve_bytes(self.task) // 8)
        self.most = max(CALL_PROBLEMS, CALL_PAIRS // (m * n)) * threads

    def records(self, part: Any) -> Any:
        records = np.zeros(len(part), PROBLEM)
        records["forbidden"] = 1  # `BatchProblem.check_parts` has compared the masses already
        records["hard_passes"] = self.task.hard_passes
        if self.own is not None:  # each problem has terms of its own
            self.terms = ffi.new("mapuot_terms[]", len(part))
            for k, (reg, *rho) in enumerate(self.own[part].tolist()):
                self.terms[k] = self.task.terms
                records["hard_passes"][k] = fill_terms(self.terms[k], self.shape, reg, (rho[0], rho[1]))
            first = int(ffi.cast("intptr_t", self.terms))
            records["terms"] = first + ffi.sizeof("mapuot_terms") * np.arange(len(part))
        if self.clouds:
            for names, places, points in zip(("mx", "ny"), self.clouds.places, self.points, strict=True):
                records[names[0]] = places.count[part]
                records[names[1]] = address(points) + points.strides[0] * places.first[part]
        else:
            records["m"], records["n"] = self.shape
            records["M"] = address(self.M) + (self.M.strides[0] if self.M.ndim == 3 else 0) * part
        return records

    def call(self, function: Any, records: Any) -> None:
        problems = ffi.from_buffer("mapuot_problem *", records)
        check(function(self.pool, self.task, len(records), problems, ffi.from_buffer("void *", self.scratch)))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def point(records: Any, tables: dict[str, Any]) -> None:
    """Set the pointers in each record to its rows of these tables."""
    for name, table in tables.items():
        records[name] = address(table) + table.strides[0] * np.arange(len(records))


def form_plan(M: Any, reg: float, exponents: Any, out: Any) -> None:
    """Form the plan of a C-contiguous M from ``exponents``, the last m + n of ``CoreAnswer.numbers``."""
    m, n = M.shape
    view = ffi.new("mapuot_matrix *", (ffi.from_buffer(M), n, 1, CODES[M.dtype.char]))
    at = ffi.from_buffer("double *", exponents)
    code = CODES[out.dtype.char]
    check(lib.mapuot_form_plan(SERIAL, m, n, view[0], NONE, reg, at, at + m, code, ffi.from_buffer(out), n))


NONE = ffi.new("mapuot_matrix *")[0]
