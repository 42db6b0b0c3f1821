"""The iterations that POT names, with POT's meaning of numItermax, stopThr and err.

After k iterations POT holds (u_k, v_k): our row state and the next log v. On the CPU the C core makes them (core.py);
here is the same for other backends, an iteration at a time. Sources: Chizat, Peyre, Schmitzer, Vialard 2018 (scaling
algorithm); Sejourne, Vialard, Peyre 2022 (translation invariance).
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np

from ..answer.result import Result
from ..backends import Options, Stats, Workspace, closing, name_of
from ..errors import warn
from ..penalties import F64
from ..problem.problem import Problem
from ..progress import bar as progress_bar
from ..status import Words
from .caller import warn_not_stopped

NAMED = {  # name: (translation, iterations between two looks at err, err of u alone)
    "sinkhorn": (False, 1, False),
    "sinkhorn_stabilized": (False, 10, True),
    "sinkhorn_translation_invariant": (True, 1, False),
}
TINY = float(np.finfo(np.float64).tiny)

State = tuple[F64, F64]
Outcome = tuple[list[State], list[Any], list[float], str, int]  # states, traces, err, status, iterations


def iterate(
    problems: list[Problem],
    module: ModuleType,
    method: str,
    starts: list[State],
    max_iter: int,
    stop: float,
    progress: bool,
    words: Words,
) -> tuple[list[Result], list[float]]:
    """Run the named iteration of problems that stop together; the Results of (u_k, v_k), POT's err at every look."""
    precision = "float32" if problems[0].M.dtype.name == "float32" else "float64"
    options = Options(NAMED[method][0], 0, False, precision, TINY, -1.0, None, by_parts=False)
    with progress_bar(progress, total=max_iter, desc=method, unit="pass") as bar, ExitStack() as stack:
        workspaces = [stack.enter_context(closing(module.Workspace(problem, options))) for problem in problems]
        run = by_core if name_of(module) == "cpu" else by_python
        states, traces, err, status, made = run(problems, module, workspaces, method, starts, max_iter, stop, bar)
    if status == "not finite":
        warn(f"Numerical errors at iteration {made}")
    elif status == "max_passes" and stop > 0:
        warn_not_stopped(
            f"method {method!r}", max_iter, err[-1], stop, words, "name no method for the accelerated one, or "
        )
    results = [
        Result(problem, module, state, None, trace, status, None)
        for problem, state, trace in zip(problems, states, traces, strict=True)
    ]
    return results, err


def by_core(
    problems: list[Problem],
    module: ModuleType,
    workspaces: list[Any],
    method: str,
    starts: list[State],
    max_iter: int,
    stop: float,
    bar: Any,
) -> Outcome:
    """In the C core."""
    from .core import SinkhornRun, Trace  # noqa: PLC0415 - not without the C library, which the reference does without

    begun = time.perf_counter()
    run = SinkhornRun(workspaces, starts, *NAMED[method][1:], stop)
    status, tables, seconds = "running", [], []
    while status in ("running", "absorb") and run.made < max_iter:
        status, table = run.iterate(max_iter - run.made)
        tables.append(table)
        seconds += [time.perf_counter() - begun] * len(table)
        bar.update(len(table))
    status = "max_passes" if status in ("running", "absorb") else status
    whole = np.concatenate(tables)
    traces = [Trace(whole[:, q], seconds) for q in range(len(problems))]
    ends = zip(workspaces, run.log_u, run.log_v, strict=True)
    states = [(workspace.limited(log_u, 0), workspace.limited(log_v, 1)) for workspace, log_u, log_v in ends]
    return states, traces, run.err, status, run.made


def by_python(
    problems: list[Problem],
    module: ModuleType,
    workspaces: list[Workspace],
    method: str,
    starts: list[State],
    max_iter: int,
    stop: float,
    bar: Any,
) -> Outcome:
    """An iteration at a time, on any backend."""
    translate, every, only_u = NAMED[method]
    states, begun = starts, time.perf_counter()
    err: list[float] = []
    traces: list[list[Stats]] = [[] for _ in problems]
    for workspace, start in zip(workspaces, starts, strict=True):
        workspace.absorb(start[1])
    for k in range(max_iter):
        made = [one_iteration(p, module, w, translate) for p, w in zip(problems, workspaces, strict=True)]
        if any(stat.status == "not finite" for stat, _ in made):
            return states, traces, err, "not finite", k
        for trace, (stat, _) in zip(traces, made, strict=True):
            trace.append(dataclasses.replace(stat, n_pass=k + 1, seconds=time.perf_counter() - begun))
        bar.update()
        if k % every == 0:
            new, old = (tuple(map(np.concatenate, zip(*x, strict=True))) for x in ([s for _, s in made], states))
            changes = [relative_change(*pair) for pair in zip(new, old, strict=True)]
            err.append(changes[0] if only_u else 0.5 * sum(changes))
        states = [state for _, state in made]
        if err[-1] < stop:
            return states, traces, err, "converged", k + 1
    return states, traces, err, "max_passes", max_iter


def one_iteration(problem: Problem, module: ModuleType, workspace: Workspace, translate: bool) -> tuple[Stats, State]:
    """One pass and POT's state after it: (log u_k, log v_k); a pass that shows K to be outgrown is repeated."""
    stat = workspace.iterate(1)[-1]
    while stat.rejected and stat.status == "absorb":
        workspace.absorb()
        stat = workspace.iterate(1)[-1]
    log_u, old_log_v = (module.to_numpy(x) for x in workspace.potentials())
    log_v = np.array(module.to_numpy(workspace.next_log_v))
    if translate:
        log_u = log_u - row_shift(problem, old_log_v, log_v, module.to_numpy(workspace.marginals()[1]))
    if stat.status == "absorb":
        workspace.absorb()
    return stat, (np.array(log_u), log_v)


def row_shift(problem: Problem, old_log_v: F64, log_v: F64, col_marginal: F64) -> float:
    """mu of log v = fi2 (log b - log K^T u) + fi2 mu: the translated pair is (u e^(-mu), v).

    Here log K^T u = log(col marginal) - old log v, so that no pass is needed.
    """
    rho, b = problem.cols.scalar_rho, problem.cols.weight
    fi = 1.0 if rho is None or np.isinf(rho) else rho / (rho + problem.reg)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = log_v / fi - (np.log(b) - np.log(col_marginal) + old_log_v)
    used = np.isfinite(mu)
    return float(np.average(mu[used], weights=b[used])) if used.any() else 0.0


def relative_change(log_new: F64, log_old: F64) -> float:
    """max|x - x'| / max(max x, max x', 1) of x = exp(log_new), x' = exp(log_old), without overflow."""
    both = np.concatenate([log_new, log_old, [0.0]])
    top = both[~np.isposinf(both)].max()
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.abs(np.exp(log_new - top) - np.exp(log_old - top))
    return float(change[np.isfinite(change)].max(initial=0.0))
