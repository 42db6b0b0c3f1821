"""Plain problems solved whole by the core (src_c/solve.c), one foreign call for one problem or for many.

The records that a call fills are kept for the next one: to make them takes longer than to solve 64 x 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..._core import ffi, lib
from ...problem import EXPONENT_ROUNDING
from ...validate import MASS_TOLERANCE
from ..contract import Options
from ..records import STATS
from ..workspace import FAR
from .native import CODES, DTYPES, SERIAL, check, empty, pointer
from .workspace import NARROW_NOISE, SAFE_SPREAD, SCALES

CALL_ENTRIES = 1 << 28  # of K read by one call, some .2 s: Ctrl-C waits for it
MOST_PASSES = 10_000  # of one call
KEPT_BYTES = 1 << 23  # of scratch between two calls
CONVERGED, OUT_OF_PASSES = lib.MAPUOT_CONVERGED, lib.MAPUOT_RUNNING

kept: list[Call] = []  # of calls that are over; one under way has taken its own out


class Found(NamedTuple):
    """What one call tells; ``numbers``: log u, log v, r, s and the exponents of the plan, one behind the other."""

    converged: bool
    numbers: Any
    passes: bytes  # the records of all passes
    low: float
    high: float
    forbidden: bool


class Call:
    """The records of one foreign call."""

    def __init__(self) -> None:
        self.task, self.problem = ffi.new("mapuot_task *"), ffi.new("mapuot_problem *")
        self.terms = self.task.terms
        self.trace = ffi.new("mapuot_stats[]", MOST_PASSES + 8)
        self.scratch = empty(0)
        self.at = pointer(self.scratch, "void *")
        self.shape: Any = None
        self.options: Any = None
        task = self.task
        task.trace, task.M.col_stride = self.trace, 1
        task.mass_tolerance, task.exponent_rounding, task.far = MASS_TOLERANCE, EXPONENT_ROUNDING, FAR
        task.scale_limit, task.most_scale = SCALES["scale_limit"], SCALES["most_scale"]
        self.terms.noise = NARROW_NOISE

    def prepare(self, shape: tuple[int, ...], dtype: str, options: Options, max_passes: int, steps: Any) -> None:
        """What stays from call to call of one kind."""
        task, terms = self.task, self.terms
        task.m, task.n = shape
        task.M.row_stride, task.M.dtype = shape[1], CODES[dtype]
        task.max_passes, task.most = max_passes, min(MOST_PASSES, max(1, CALL_ENTRIES // (shape[0] * shape[1])))
        task.scaling_below, task.scaling_step, task.coarse_tol = steps
        task.safe_spread = SAFE_SPREAD[options.precision]
        terms.tol, terms.tol_gap, terms.translate, terms.memory, terms.dtype = (
            options.tol, options.tol_gap, options.translate, options.memory, DTYPES[options.precision],
        )  # fmt: skip
        wanted = lib.mapuot_solve_bytes(task) // 8
        if wanted > len(self.scratch):
            self.scratch = empty(wanted)
            self.at = pointer(self.scratch, "void *")
        self.shape, self.options = (shape, dtype, max_passes), options


def solve(
    M: Any, a: Any, b: Any, reg: float, rho: tuple[float, float], options: Options, max_passes: int,
    steps: tuple[float, float, float], plan: Any,
) -> Found | None:  # fmt: skip
    """One problem of C-contiguous arrays; ``plan`` is filled where it is an array. None: it is not plain after all."""
    call = kept.pop() if kept else Call()
    shape, dtype = M.shape, M.dtype.char
    if call.options is not options or call.shape != (shape, dtype, max_passes):
        call.prepare(shape, dtype, options, max_passes, steps)
    (m, n), terms, problem = shape, call.terms, call.problem
    terms.reg = reg
    terms.rho_rows, terms.rho_cols = rho
    terms.largest_rho = max((x for x in rho if x < np.inf), default=0.0)
    numbers = np.empty(3 * (m + n))
    at = ffi.from_buffer("double *", numbers)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_a, log_b = np.log(a), np.log(b)
        problem.mass_a, problem.mass_b = a.sum(), b.sum()
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
        found = Found(status == CONVERGED, numbers, passes, problem.low, problem.high, bool(problem.forbidden))
    if call.scratch.nbytes <= KEPT_BYTES:
        kept.append(call)
    return found


def form_plan(M: Any, reg: float, exponents: Any, out: Any) -> None:
    """The plan of these exponents, the last m + n of ``Found.numbers``, of a C-contiguous M."""
    m, n = M.shape
    view = ffi.new("mapuot_matrix *", (ffi.from_buffer(M), n, 1, CODES[M.dtype.char]))
    at = ffi.from_buffer("double *", exponents)
    check(
        lib.mapuot_form_plan(SERIAL, m, n, view[0], NONE, reg, at, at + m, CODES[M.dtype.char], ffi.from_buffer(out), n)
    )


NONE = ffi.new("mapuot_matrix *")[0]
