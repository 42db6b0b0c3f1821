"""The driver: carry out the stages of a route over one `Run`, and describe them in `Result.how`."""

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from .. import outcome as outcomes
from ..answer.result import Result
from ..arrays import host, namespace
from ..backends.boxes import SortedPoints, Truncation
from ..backends.factored import LevelStart
from ..contract import Options
from ..outcome import Outcome
from ..penalties import F64
from ..problem.cut import find_cut
from ..problem.points import FormedCosts
from ..problem.problem import Problem
from ..problem.translation import without_translation
from ..problem.validate import as_start
from ..status import FAILED
from .factored import factored_start
from .kept import KeptPairs
from .loop import Run
from .settings import PAIRS
from .stages import FORMED, NO_ANSWER, UNDONE, Route, Stage, choose_route, in_words, newton_words
from .truncation import begin_skipping, end_skipping, in_boxes


def start_potentials(warm_start: Any, problem: Problem) -> tuple[F64, F64]:
    """Return the first (log u, log v): zeros, or the warm start; of a Result of any reg, f / reg and g / reg."""
    if warm_start is None:
        return np.zeros(problem.shape[0]), np.zeros(problem.shape[1])
    shapes = problem.shape[:1], problem.shape[1:]
    if isinstance(warm_start, Result):
        with np.errstate(over="ignore"):
            moved = zip(warm_start.own_logs, warm_start.problem.translations, strict=True)
            logs = [warm_start.problem.reg * (x + t) / problem.reg for x, t in moved]
            given = as_start(logs, shapes)
    else:
        given = less_constant(as_start(warm_start, shapes), problem)
    return problem.project(*given)


def less_constant(logs: tuple[Any, Any], problem: Any) -> tuple[Any, Any]:
    """Return a user's start for M as a start for M less the problem's constant; a log scaling of 0 stays 0."""
    if not np.any(problem.constant):
        return logs
    xp = namespace(*logs)
    shifts = (c / getattr(problem, "regs", problem.reg) for c in problem.constants)
    shifts = (xp.asarray(c)[:, None] if np.ndim(c) else c for c in shifts)
    log_u, log_v = (xp.where(x != 0, x - c, 0.0) for x, c in zip(logs, shifts, strict=True))
    return log_u, log_v


class StageRecord(NamedTuple):
    stage: Stage
    before: str  # the status before the stage
    reads: str  # the form of K that its passes read, in words
    clusters: int  # number of clusters that corrected its passes
    share: float  # of all pairs that its passes read; 0 where they read all pairs


def carry_out(run: Run, problem: Problem, options: Options, start: tuple[F64, F64], escalate: bool) -> Result:
    """Solve a problem, without its translation, by the stages of its route; ``run`` counts and records the passes.

    ``start``: (log u, log v); ``escalate``: K may be stored in a finer type than the options name.
    """
    if options.tol_gap >= 0:  # scaled masses have another dual value
        return carry_out_stages(run, problem, options, start, escalate)
    translated = without_translation(problem)
    if translated.task is problem:
        return carry_out_stages(run, problem, options, start, escalate)
    found = carry_out_stages(run, translated.task, options, translated.to_task(start, problem.translation), escalate)
    problem = dataclasses.replace(translated.problem, cost=found.problem.cost)
    potentials = translated.to_problem(found._logs)
    more = found._marginals, found.trace, found.status, found._threads, found.how, found.skipped
    return Result(problem, run.backend, potentials, *more)


def carry_out_stages(
    run: Run, problem: Problem, options: Options, start: tuple[F64, F64], escalate: bool
) -> Result:  # fmt: skip
    """Solve a problem by the stages of its route."""
    given = bool(start[0].any()), bool(start[1].any())
    saves = bool(run.saves)
    called = run.n_passes
    route = choose_route(problem, options, run.max_passes, run.backend, given=given, escalate=escalate, saves=saves)
    task = problem
    if route.turned:
        task = problem.transpose()
        start = start[::-1]
    if options.symmetric:
        if all(given) and problem.ranks.size == 1:
            mean = 0.5 * (start[0] + start[1])
        else:
            mean = start[1]
        start = mean[problem.own], mean
    skip: Truncation | None = None
    boxed: SortedPoints | None = None
    factors_follow = route.nats is None and route.stages[-1].with_factors
    run.outcome = outcomes.at_start(run.outcome, factors_follow)
    run.potentials = start
    with run.shown():
        log_v = start[1]
        if route.nats is not None:
            task, boxed = in_boxes(run.backend.to_device(task), route.turned, run.backend.least_box, options.threads)
            task = run.backend.to_device(task)
            solve = functools.partial(between_all, run, escalate)
            log_v, skip = begin_skipping(
                task, boxed, options, start if route.warm else None, route.nats, solve, run.backend
            )
        elif task.rows.there and not run.backend.stores_kernel(task, options):
            task = run.backend.to_device(task)
            xp = namespace(task.rows.weight)
            if any(given):
                log_v = xp.asarray(log_v)
            else:
                log_v = xp.zeros(len(log_v))
        done, skip = all_stages(run, task, route, log_v, skip)
    how = describe(route, done, problem, skip, run, called)
    potentials = run.potentials
    marginals = run.marginals
    skipped = None
    if boxed:
        skipped = end_skipping(boxed, skip)
        potentials = boxed.back(potentials)
        marginals = boxed.back(marginals)
    if route.turned:
        potentials = potentials[::-1]
        marginals = marginals[::-1]
    if (
        isinstance(problem.cost, FormedCosts) and namespace(problem.cost.array) is not np
    ):  # the host forms a plan of points
        problem = dataclasses.replace(problem, cost=problem.cost.cloud)
    return Result(
        problem,
        run.backend,
        potentials,
        marginals,
        run.trace,
        run.outcome.status,
        options.threads,
        how=how,
        skipped=skipped,
    )


def all_stages(
    run: Run, task: Any, route: Route, log_v: F64, skip: Truncation | None = None
) -> tuple[list[StageRecord], Truncation | None]:  # fmt: skip
    """Carry out the stages of a route; return these stages, and the pairs that the last stage skipped."""
    done = list[StageRecord]()
    starts: dict[float, LevelStart] = {}  # for steps with a factor, by reg over the reg asked for
    if route.stages[-1].with_factors:
        starts[1.0] = LevelStart(1.0, *run.potentials)
    kept: KeptPairs | None = None
    for stage in route.stages:
        if run.outcome.status not in stage.after:
            continue
        if stage.from_zeros:
            log_v = np.zeros_like(log_v)
            skip = None
        before = run.outcome.status
        was_cancelled = run.is_cancelled
        is_rough = stage.on_kept_pairs or stage.symmetric or stage.reg != task.reg
        if is_rough and (was_cancelled or run.n_passes >= stage.most):
            continue
        now = stage
        if was_cancelled:  # one pass at the requested reg, which makes its potentials
            now = stage._replace(certifies=True, most=run.n_passes + 1)
        if stage.with_factors:
            skip = None
            now, log_v = after_steps(run, task, now, route.options, log_v, starts)
        if stage.on_kept_pairs:
            kept = kept or KeptPairs(run, route.options.threads)
        found = one_stage(run, task, now, route.options, log_v, skip, kept)
        if found is None:
            continue
        log_v = found
        done.append(StageRecord(now, before, run.reads, run.clusters, run.share))
        run.outcome = outcome_of_stage(run, task, stage, starts, was_cancelled)
    return done, skip


def after_steps(
    run: Run, task: Any, stage: Stage, options: Options, log_v: F64, starts: dict[float, LevelStart]
) -> tuple[Stage, F64]:  # fmt: skip
    """Make Newton's steps with a factor; return the stage of the passes that follow, and the log v for them."""
    if find_cut(task, *map(host, run.potentials)):  # one pass is enough, as no plan exists
        return stage._replace(with_factors=False, patience=1), log_v
    found, factors = factored_start(run.backend, task, options, [starts[level] for level in sorted(starts)])
    run.factors += factors
    return stage, namespace(task.rows.weight).asarray(found)


def note_start(run: Run, task: Any, stage: Stage, starts: dict[float, LevelStart]) -> None:
    """Keep what passes have reached for steps with a factor; passes that certify nothing leave the solve to these."""
    if run.outcome.status not in FAILED:
        level = stage.reg / task.reg
        starts[level] = LevelStart(level, *run.potentials)
    is_last = run.is_cancelled or run.n_passes >= run.max_passes  # the loop has certified it
    if run.outcome.status == "converged" and not stage.certifies and not is_last and task.misses:
        run.outcome = outcomes.before_factored_steps(run.trace[-1])


def outcome_of_stage(
    run: Run, task: Any, stage: Stage, starts: dict[float, LevelStart], was_cancelled: bool
) -> Outcome:
    """Return the outcome that the next stages test; ``was_cancelled``: before this stage began."""
    if starts:
        note_start(run, task, stage, starts)
    is_larger = stage.reg != task.reg
    is_converged = run.outcome.status == "converged"
    is_left = stage.symmetric and run.outcome.status in ("max_passes", *NO_ANSWER)
    if is_larger or (stage.on_kept_pairs and not is_converged) or (is_left and run.n_passes < run.max_passes):
        return outcomes.after_rough_stage()
    is_cancelled = was_cancelled or (run.is_cancelled and not is_converged)
    is_spent = run.n_passes >= min(stage.most, run.max_passes)
    return outcomes.after_own_stage(run.outcome, is_cancelled, is_spent)


def one_stage(
    run: Run, task: Any, stage: Stage, options: Options, log_v: F64, skip: Truncation | None, kept: KeptPairs | None
) -> F64 | None:  # fmt: skip
    """Make the passes of one stage; the given and the returned log v belong to the requested reg.

    Return None where a stage over kept pairs was left out because too many pairs matter.
    """
    run.limit = min(stage.most, run.n_passes + stage.patience)
    # products of Newton's steps are few where steps with a factor may follow
    run.budget = stage.products or (stage.patience if stage.patience < sys.maxsize else 0)
    options = stage.options(options)
    ratio = float(stage.reg / task.reg)
    run.share = 0.0
    if kept:
        kept.skip = skip
    if ratio == 1.0:
        if kept and stage.on_kept_pairs:
            return kept.solve(task, options, log_v)
        return run.run(task, options, log_v, stage.leave_above, skip)
    task, log_v = dataclasses.replace(task, reg=stage.reg), log_v * (task.reg / stage.reg)
    options = dataclasses.replace(options, last=stage.certifies and task.balanced)
    found = None
    if kept and stage.on_kept_pairs:
        found = kept.make_passes(task, dataclasses.replace(options, tol=PAIRS.rung_tol), log_v)
    return (run.run(task, options, log_v, stage.leave_above, skip) if found is None else found) * ratio


def between_all(
    run: Run, escalate: bool, problem: Problem, options: Options, start: tuple[F64, F64] | None = None,
    most: int = sys.maxsize,
) -> Result:  # fmt: skip
    """Solve an auxiliary problem in at most ``most`` passes; the passes are not counted."""
    start = start or (np.zeros(problem.shape[0]), np.zeros(problem.shape[1]))
    return carry_out(Run(run.backend, min(most, run.max_passes), ranks=run.ranks), problem, options, start, escalate)


def describe(
    route: Route, done: list[StageRecord], problem: Problem, skip: Truncation | None, run: Run, called: int
) -> str:
    """Return the text of `Result.how`; ``called``: passes of the single call that made the start, or 0."""
    own = [x for x in done if x.stage.reg == problem.reg]
    first = [x for x in own if x.stage.after is UNDONE] or own[:1]
    together = [x for x in first if x.stage.symmetric]
    more = [FORMED] if isinstance(problem.cost, FormedCosts) else []
    more += ["turned"] if route.turned else []
    if together:
        more.append("one potential" if first == together else "one potential left")
    if skip and skip.kept:
        more.append(f"{100 * skip.kept.share:.2g} % of the pairs")
    if route.warm:
        if called:
            start = f"a start of {called} passes in one call"
        else:
            start = "a warm start"
        more.append(f"from {start}" if len(first) <= 1 + len(together) else f"{start} left")
    if clusters := max([x.clusters for x in own]):
        more.append(f"corrected by {clusters} clusters")
    if skip and skip.corrections:
        more.append("corrected by groups of points")
    for x in own[len(first) :]:
        more.append(f"after {x.before!r} {x.reads}" + " without extrapolation" * (x.stage.anderson_depth == 0))
    if shares := [x.share for x in done if x.share]:
        more.append(f"{100 * max(shares):.2g} % of the pairs kept" + f" in {len(shares)} stages" * (len(shares) > 1))
    more += newton_words(run.products, run.factors)
    if problem.ranks.size > 1:
        more.append(f"on {problem.ranks.size} ranks")
    return in_words(first[-1].reads, len(done) - len(own), *more)
