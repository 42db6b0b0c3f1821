"""How a problem is brought to its answer: which method, precision and way of reading it, and what is tried next.

A solve is a list of attempts, each made where the one before ended in a status that calls for it; each may begin with
larger regs. A batch takes the same steps for all of its problems together, and what is left of it, one by one, here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..ascend.loop import Run
from ..ascend.truncation import begun, in_boxes, inner, nats_of
from ..backends.contract import MEMORY, SMALL_ENTRIES, Options
from ..penalties import F64
from ..problem.problem import Common, Problem
from ..problem.validate import as_positive, as_start, as_threads
from ..status import FAILED

METHODS = {  # name: (translation, Anderson memory, in place)
    "auto": (True, MEMORY[1], False),
    "translation_invariant": (True, 0, False),
    "sinkhorn": (False, 0, False),
    "map-uot": (False, 0, True),
}
PRECISIONS = {"float64": "float64", "mixed": "float32"}
SCHEDULES = "auto", "static"
MIXED_TOL = 5e-7  # a float32 K cannot certify less: its rounding alone accounts for 3 * 2^-24
SCALING_BELOW = 3e-3  # reg / range(M) under which reg is lowered in steps
SCALING_STEP = 4.0
COARSE_TOL = 0.5  # certified error at which a larger reg has done its work
WARM_ERROR = 1.0  # of a first pass: a warm start above it is left, where a cold one goes by way of larger regs


def make_options(
    method: str, precision: str, tol: Any, tol_gap: Any, threads: Any, schedule: str = "auto"
) -> Options:  # fmt: skip
    translate, memory, in_place = METHODS[method]
    tol = as_positive(tol, "tol")
    tol_gap = -1.0 if tol_gap is None else as_positive(tol_gap, "tol_gap")
    if precision == "auto":
        precision = "mixed" if tol >= MIXED_TOL and not in_place else "float64"  # a plan is rounded in every pass
    storage, threads = PRECISIONS[precision], as_threads(threads)
    return Options(translate, memory, in_place, storage, tol, tol_gap, threads, schedule)


def options_alone(options: Options, precision: str, entries: int) -> Options:
    """Those of one problem that its batch gave up: one thread, and float64 where K stays in cache."""
    small = precision == "auto" and entries <= SMALL_ENTRIES
    return dataclasses.replace(options, threads=1, precision="float64" if small else options.precision)


def start_potentials(warm_start: Any, problem: Problem) -> tuple[F64, F64]:
    """(log u, log v) to start from: zeros, or a warm start (a Result's potentials f, g are kept if reg changed)."""
    if warm_start is None:
        return np.zeros(problem.shape[0]), np.zeros(problem.shape[1])
    if isinstance(warm_start, Result):
        with np.errstate(over="ignore"):
            warm_start = warm_start.f / problem.reg, warm_start.g / problem.reg
    return problem.project(*as_start(warm_start, problem.shape))


def turned(problem: Common, options: Options) -> bool:
    """Whether the columns are better read as rows: they alone are balanced.

    The row side is exact in every pass, so that the gap of the free side then certifies the plan.
    """
    return turned_sides(problem.rows.penalty == "balanced", problem.cols.penalty == "balanced", options)


def turned_sides(balanced_rows: bool, balanced_cols: bool, options: Options) -> bool:
    return balanced_cols and not balanced_rows and options.memory > 0


def quicker(run: Run, problem: Problem, options: Options, start: tuple[F64, F64]) -> bool:
    """Whether the backend would rather read the columns as rows, and nothing but time tells the two ways apart.

    Rows that must be met stay rows, whose marginal is exact. A start of log v alone (a checkpoint's) stays one.
    """
    wanted = getattr(run.module, "quicker_turned", None)
    free = options.memory > 0 and not problem.rows.demands and (start[0].any() or not start[1].any())
    return bool(free and wanted and wanted(problem.cost))


def coarse_steps(problem: Common, options: Options, warm: bool) -> Iterator[tuple[float, Options]]:
    """Larger regs to pass through first where reg is far below the range of M; none for the named methods."""
    spread = problem.M_max - problem.M_min
    if warm or options.memory == 0 or problem.reg >= SCALING_BELOW * spread:
        return
    coarse = dataclasses.replace(options, tol=max(options.tol, COARSE_TOL))
    for k in range(math.ceil(math.log(SCALING_BELOW * spread / problem.reg, SCALING_STEP)), 0, -1):
        yield problem.reg * SCALING_STEP**k, coarse


class Attempt(NamedTuple):
    """One more run: where the status is in ``after``, with these options changed for good."""

    after: tuple[str, ...]
    changes: dict[str, Any]
    begin: str  # "start": as given; "zeros": cold, by way of larger regs; "here": where the last one ended


def attempts(problem: Problem, options: Options, warm: bool, escalate: bool) -> list[Attempt]:
    """What may be tried, in order."""
    found = [Attempt(("running",), {}, "start" if warm else "zeros")]
    if warm:
        found.append(Attempt(("running", *FAILED), {}, "zeros"))
    if options.memory and {problem.rows.penalty, problem.cols.penalty} & {"tv", "range"}:
        found.append(Attempt(("stalled",), {"memory": 0}, "here"))  # kinks mislead the extrapolation
    if escalate and options.precision == "float32" and not problem.cost.wide:
        found.append(Attempt(("stalled", *FAILED), {"precision": "float64"}, "here"))
    return found


def carry_out(run: Run, problem: Problem, options: Options, start: tuple[F64, F64], escalate: bool) -> Result:
    """All attempts that it takes, on the problem as given or turned."""
    turns = problem.turns and (turned(problem, options) or quicker(run, problem, options, start))
    task, log_v = (problem.transpose(), start[0]) if turns else (problem, start[1])
    nats = nats_of(task, bool(run.saves))
    boxed = in_boxes(task, bool(turns), run.module.LEAST_BOX, options.threads) if nats is not None else None
    asked = options
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")  # of what is no answer: the status says so
    with run.bar or nullcontext(), quiet:
        warm = run.ranks.max(bool(log_v.any()))
        if boxed is not None and nats is not None:
            known = (start[::-1] if turns else start) if warm else None
            task, log_v = begun(boxed, options, known, nats, functools.partial(between_all, run, escalate), run.module)
            options, warm = inner(options), True
        for attempt in attempts(task, options, warm, escalate):
            if run.status not in attempt.after:
                continue
            options = dataclasses.replace(options, **attempt.changes) if attempt.changes else options
            if attempt.begin == "zeros":
                if boxed:  # all pairs
                    task = boxed.problem
                    task.cost.truncation = task.cost.kept = None
                log_v = approach(run, task, options, np.zeros(task.shape[1]))
            else:
                in_steps = attempt.begin == "start" and not boxed and any(coarse_steps(task, options, False))
                log_v = run.run(task, options, log_v, WARM_ERROR if in_steps else math.inf)
    hidden = 0.0
    if boxed:
        hidden = task.cost.truncation.hidden if task.cost.truncation else 0.0
        task.cost.truncation = task.cost.there = None
        run.potentials, run.marginals = boxed.back(run.potentials), boxed.back(run.marginals)
    if turns:
        run.potentials, run.marginals = run.potentials[::-1], run.marginals[::-1]
    result = Result(problem, run.module, run.potentials, run.marginals, run.trace, run.status, asked.threads)
    if boxed and boxed.problem.cost.kept:
        result.sorted, result.hidden = boxed, hidden
    return result


def between_all(
    run: Run, escalate: bool, problem: Problem, options: Options, start: tuple[F64, F64] | None = None,
    most: int = sys.maxsize,
) -> Result:  # fmt: skip
    """Another problem on the way to this one, its passes not counted, ``most`` of them at most."""
    start = start or (np.zeros(problem.shape[0]), np.zeros(problem.shape[1]))
    return carry_out(Run(run.module, min(most, run.max_passes), ranks=run.ranks), problem, options, start, escalate)


def approach(run: Run, task: Problem, options: Options, log_v: F64) -> F64:
    """The reg asked for, by way of larger ones where it is small."""
    for reg, coarse in coarse_steps(task, options, False):
        run.limit = run.max_passes // 2  # the rest is for the reg asked for
        if run.n_passes >= run.limit:
            break
        log_v = run.run(dataclasses.replace(task, reg=reg), coarse, log_v * (task.reg / reg))
        log_v *= reg / task.reg
        if run.status == "cancelled":
            break
    cancelled = run.status == "cancelled"
    run.limit = run.n_passes + 1 if cancelled else run.max_passes  # one, for potentials of the reg asked
    log_v = run.run(task, options, log_v)
    run.status = "cancelled" if cancelled else run.status
    return log_v
