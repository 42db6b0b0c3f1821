"""The loop of a solve: make passes until the certificate holds; rebuild K when the scalings outgrow it."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np

from .. import outcome as outcomes
from ..arrays import host
from ..backends.boxes import Truncation
from ..backends.factored import START_TOL
from ..backends.newton import GIVES_UP, HOLDS, OPEN
from ..backends.pairs import ALL_PAIRS
from ..backends.workspace import Workspace
from ..contract import SECONDS_A_CALL, Backend, Options, Stats
from ..errors import shown
from ..files import Checkpoint
from ..outcome import Outcome
from ..penalties import F64
from ..problem.problem import Problem
from ..progress import bar as progress_bar
from ..ranks import ALONE, Ranks
from ..status import FAILED, GOES_ON, describe_bound
from . import two_levels
from .settings import LEVELS

MOST_A_CALL = 512  # passes in one call of the core


class Run:
    """The loop of a solve, with its clock, the stats of its passes, and the potentials of its last workspace."""

    stopped: Callable[[], bool] | None = None  # asked after each call of the core; True: cancel

    def __init__(
        self, backend: Backend, max_passes: int, callback: Callable[[Stats], Any] | None = None, progress: bool = False,
        ranks: Ranks = ALONE, checkpoint: Any = None, trace: list[Stats] | None = None,
    ) -> None:  # fmt: skip
        """``trace``: stats of passes that a single call of the backend has made before."""
        self.backend, self.max_passes, self.callback, self.ranks = backend, max_passes, callback, ranks
        self.heard = ranks.max(bool(callback))  # some rank has a callback, called after every pass
        self.checkpoint: Checkpoint | None = None
        if checkpoint is not None and ranks.rank == 0:
            self.checkpoint = Checkpoint(checkpoint)
        self.saves = ranks.max(self.checkpoint is not None)
        progress = progress and ranks.rank == 0
        # no percentage and no remaining time: the number of passes is unknown
        form = "{desc}: {n_fmt} of at most {total_fmt} passes [{elapsed}, {rate_fmt}{postfix}]"
        options = {"total": max_passes, "desc": "mapuot", "unit": "pass", "bar_format": form}
        if progress:
            self.bar = progress_bar(True, **options)
        else:
            self.bar = None
        self.limit = max_passes
        self.caller = np.geterr()
        self.outcome = outcomes.RUNNING
        self.reads, self.clusters = "", 0  # of the last run: form of K in words; clusters that corrected it
        self.share = 0.0  # of all pairs that were kept at the start of the last stage; 0: it read all pairs
        self.certified: Stats | None = None  # the last pass that Newton's step certified
        self.next_meet = 0  # Newton's step is tried again from this pass on
        self.products = 0  # products of Newton's steps towards hard columns so far
        self.budget = 0  # most products of Newton's steps; 0: no limit
        self.is_cancelled = False  # the callback or another thread has asked to end
        self.factors = 0  # factorisations by Newton's steps
        self.trace = trace or []
        self.n_passes = self.trace[-1].n_pass if self.trace else 0
        self.lift = 0.0  # of the dual values: the value of the constant that was taken out of M
        self.potentials: Any
        self.marginals: Any
        self.start = time.perf_counter() - (self.trace[-1].seconds if self.trace else 0.0)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar, and silence NumPy's warnings: the status of a pass reports numbers beyond float64."""
        with self.bar or nullcontext(), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            yield

    @property
    def is_spent(self) -> bool:
        """Tell whether the stage has no pass left."""
        return self.n_passes >= self.limit

    def run(
        self, problem: Any, options: Options, log_v: F64, leave_above: float = math.inf, skip: Truncation | None = None
    ) -> F64:
        """Make passes until one is certified, the solve is cancelled, or the limit is reached; return the next log v.

        Stop after the first pass, with the status "running", if its certified error is above ``leave_above``.
        ``skip``: the pairs of points to skip. Numbers in brackets name the formulas of docs/mathematics.md.
        """
        with closing(self.backend.workspace(problem, options, skip)) as workspace:
            # K_ij = exp(alpha_i + beta_j - M_ij / reg) <= 1, (11), times c_ij unless c = a b^T (see `absorb`)
            passes = StagePasses(self, workspace, problem, options, log_v, leave_above, skip)
            while True:
                # u = (a / K v)^fi1, v = (b / K^T u)^fi2, (3), translated by (5) and (6), extrapolated by Anderson
                stats = passes.step()
                # gap = rho2 KL(s | q), (9), and |P - P*|_1 / |P| <= d/3 + sqrt(2 d + d^2/9), (10); Newton's step
                self.outcome = passes.judge(stats)
                # K around the new potentials, (11), or a correction by groups of points
                if not passes.act():
                    break
            self.outcome = passes.conclude(stats[-1])
            following: F64 = workspace.next_log_v.copy()
            return following

    def save(self, workspace: Workspace, problem: Problem) -> None:
        if self.checkpoint:
            log_v = host(workspace.next_log_v) + problem.constants[1] / problem.reg
            self.checkpoint.save(problem.cols.name, log_v, problem.reg, self.n_passes)

    def record(self, stats: list[Stats]) -> Outcome:
        """Append passes to the trace, call the callback, and return the outcome that the loop acts on."""
        now = time.perf_counter() - self.start
        cancelled = bool(self.stopped and self.stopped())
        for stat in stats:
            self.n_passes += 1
            stat.n_pass = self.n_passes
            stat.seconds = now
            stat.dual = stat.dual + self.lift
            self.trace.append(stat)
            cancelled = cancelled or bool(self.callback and self.call_back(stat))
        if self.bar:
            self.bar.update(len(stats))
            self.bar.set_postfix_str(describe_bound(stats[-1].error), refresh=False)
        if self.heard:
            cancelled = bool(self.ranks.max(cancelled))
        self.is_cancelled = self.is_cancelled or cancelled
        return outcomes.after_pass(stats[-1].status, cancelled, self.is_spent)

    def call_back(self, stat: Stats) -> bool:
        """Call the callback with a copy that it may keep; return whether it asks to cancel."""
        assert self.callback
        with np.errstate(**self.caller):
            answer = self.callback(dataclasses.replace(stat))
        try:
            return bool(answer)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"callback must return a truth value, or None to go on, got {shown(answer)}") from error


class StagePasses:
    """The passes of one stage: turns of `step`, `judge` and `act`, then `conclude`."""

    def __init__(
        self, run: Run, workspace: Workspace, problem: Any, options: Options, log_v: F64, leave_above: float,
        skip: Truncation | None,
    ) -> None:  # fmt: skip
        """Build K around log v, and choose how many passes the first call makes."""
        self.run, self.workspace, self.problem, self.options = run, workspace, problem, options
        self.leave_above, self.policy = leave_above, skip or ALL_PAIRS
        self.tol = skip.tol if skip else options.tol
        if options.last:
            self.newton = workspace.newton()
        else:
            self.newton = None
        if self.newton:
            self.newton.record.all_products, self.newton.record.budget = run.products, run.budget
        self.rounds = 0
        if self.newton and two_levels.serves(workspace, problem, options, run.backend, bool(skip)):
            self.rounds = LEVELS.rounds
        run.lift = getattr(problem, "least_lift", 0.0)  # many marginals keep their constant
        self.is_fresh = True  # K was built just before the passes
        self.is_left = False  # the first pass has an error above ``leave_above``
        self.n_made = 0  # passes of the last call
        self.begun = 0.0  # when the last call began
        workspace.absorb(log_v)
        self.reads = workspace.reads  # the matrix that the first passes read, in words
        self.single = run.heard or (options.leaps and not workspace.leaps_within)  # one pass a call
        is_quick = not self.single and run.ranks.max(problem.size) <= run.backend.quick_entries
        if is_quick and leave_above == math.inf:
            self.count = run.backend.quick_passes  # passes of the next call
        else:
            self.count = 1

    # ---- one turn

    def step(self) -> list[Stats]:
        """Make some passes in one call of the core: `count`, or fewer where the limit allows no more."""
        count = self.count
        left = self.run.limit - self.run.n_passes
        if left <= count:
            count = self.last_passes(left)
        self.begun = time.perf_counter()
        stats = self.workspace.iterate(count)
        self.n_made = len(stats)
        return stats

    def judge(self, stats: list[Stats]) -> Outcome:
        """Record the passes, and return what follows from them: by their certificate, or by Newton's step."""
        outcome = self.run.record(stats)
        if stats[0].error > self.leave_above and outcome.status in GOES_ON:
            self.is_left = True
            return outcomes.after_far_start()
        self.leave_above = math.inf
        has_ended = outcome.status not in (*GOES_ON, *FAILED)
        if has_ended and self.options.in_place and not (self.is_fresh and len(stats) == 1):
            outcome = self.check_in_place(outcome)
        newton = self.newton
        is_near = stats[-1].error <= START_TOL and outcome.status in GOES_ON
        if newton and self.rounds and (is_near or outcome.status in ("stalled", "converged")):
            return self.approach(newton)
        if newton and (outcome.status == "stalled" or (outcome.status == "converged" and newton.needed)):
            if self.run.n_passes >= self.run.next_meet or self.options.has_value(self.run.trace[-1]):
                return self.meet(newton)
            outcome = outcomes.before_newton_step(self.run.is_spent)
        if self.options.leaps:
            self.run.products += self.workspace.leap(self.run.trace[-1], outcome.status == "running")
        return outcome

    def act(self) -> bool:
        """Prepare the next passes; return whether there are any."""
        run = self.run
        if self.is_left:
            return False
        self.is_fresh = (self.policy.skips or run.outcome.status == "absorb") and self.renew()
        if run.outcome.status != "running" and not self.is_fresh:
            return False
        if run.saves and run.ranks.max(bool(run.checkpoint and run.checkpoint.due)):
            run.save(self.workspace, self.problem)
        seconds = run.ranks.max(time.perf_counter() - self.begun)
        fits = int(self.n_made * SECONDS_A_CALL / max(seconds, 1e-6))
        if self.single:
            self.count = 1
        else:
            self.count = max(1, min(2 * self.n_made, MOST_A_CALL, fits))
        return True

    def conclude(self, last: Stats) -> Outcome:
        """Certify the last pass, note the answer, and return the outcome of the stage; ``last``: of the last call."""
        run, workspace = self.run, self.workspace
        if last.rejected and run.outcome.status != "converged":  # else Newton's step may have certified it
            run.outcome = self.undo_rejected(last)
        run.outcome = self.certify_last()
        if run.saves:
            run.save(workspace, self.problem)
        run.reads = self.reads
        if workspace.reads != self.reads:
            run.reads = f"{self.reads}, then {workspace.reads}"
        run.clusters = 0
        coarse = workspace.coarse
        if coarse and coarse.corrected:
            run.clusters = coarse.count
        run.potentials = workspace.potentials()
        run.marginals = workspace.marginals()
        return run.outcome

    # ---- parts of a turn

    def last_passes(self, left: int) -> int:
        """Return how many of the passes ``left`` to make now; turn wide for the last pass, which must certify."""
        workspace = self.workspace
        estimates: bool = workspace.estimates
        if estimates and left <= 1:
            workspace.widen()
        return max(1, min(self.count, left - estimates))

    def check_in_place(self, outcome: Outcome) -> Outcome:
        """Make one more pass on a fresh K, since a plan in place cannot count lost mass; return the outcome."""
        workspace = self.workspace
        log_v = self.run.backend.to_numpy(workspace.potentials()[1])
        workspace.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
        return outcomes.after_fresh_kernel(outcome, self.run.record(workspace.iterate(1)))

    def approach(self, newton: Any) -> Outcome:
        """Make Newton's steps with two levels; return the outcome of the pass after them."""
        run = self.run
        self.rounds -= 1
        two_levels.approach(run, self.workspace, self.problem, self.options, self.tol)
        newton.record.all_products = run.products
        last = run.trace[-1]
        if newton.judge(self.workspace, last, self.tol) or self.options.has_value(last):
            run.certified = last
            return outcomes.after_newton_step(last, True, False, run.is_spent)
        return outcomes.after_open_steps(last, run.is_cancelled, run.is_spent)

    def meet(self, newton: Any) -> Outcome:
        """Certify a pass that nearly meets its hard columns by Newton's step, or restart from it."""
        run, workspace = self.run, self.workspace
        last = run.trace[-1]
        has_value = self.options.has_value
        verdict = newton.step(workspace, run.backend, last, self.tol)
        run.products = newton.products
        run.certified = last
        holds = verdict == HOLDS or has_value(last)
        outcome = outcomes.after_newton_step(last, holds, verdict == GIVES_UP, run.is_spent)
        if outcome.status != "running":
            return outcome
        if run.is_cancelled:
            return outcomes.CANCELLED
        run.next_meet = run.n_passes + newton.wait
        workspace.restart(newton.start(workspace, run.backend))
        if verdict == OPEN:
            return outcome
        outcome = run.record(workspace.iterate(1))
        last = run.trace[-1]
        if outcome.status in ("running", "converged", "max_passes"):
            last.error = newton.error_after(last.error)
            run.certified = last
            is_met = last.error <= self.tol or has_value(last)
            return outcomes.after_newton_pass(last, outcome, is_met)
        return outcome

    def renew(self) -> bool:
        """Restart from a correction by groups, or rebuild K, if either is due; return whether K was rebuilt."""
        run = self.run
        log_v = None
        if run.outcome.status in (*GOES_ON, *FAILED):
            log_v = self.policy.go_on(self.workspace, run.trace[-1])
        if run.outcome.status == "absorb" or (log_v is not None and not self.policy.correct):
            self.workspace.absorb(log_v)
            return True
        if log_v is not None:
            self.workspace.restart(log_v)
        return False

    # ---- parts of the end

    def undo_rejected(self, last: Stats) -> Outcome:
        """Make one more pass, from the state before the step that the guard dropped: this state is the answer."""
        if last.status == "absorb":
            self.workspace.absorb()
        again = self.run.record(self.workspace.iterate(1))
        needed = bool(self.newton and self.newton.needed)
        return outcomes.after_dropped_step(self.run.outcome, again, is_certified_later=needed)

    def certify_last(self) -> Outcome:
        """Certify the last pass if the solve was cancelled or misses its hard columns; return the outcome."""
        run, workspace = self.run, self.workspace
        if run.outcome.status == "cancelled" and workspace.estimates:
            workspace.widen()
            run.record(workspace.iterate(1))
        last = run.trace[-1]
        workspace.conclude(last)
        newton = self.newton
        if newton is None and (run.is_cancelled or run.n_passes >= run.max_passes):
            newton = workspace.newton()  # the stages that would certify are left out
            if newton:
                run.outcome = outcomes.without_certificate(last, run.outcome)
        is_open = run.outcome.status not in (*FAILED, "converged") and run.certified is not last
        if not (newton and newton.needed and is_open):
            return outcomes.after_certificate(last, run.outcome)
        verdict = newton.step(workspace, run.backend, last, self.tol)
        run.products = newton.products
        return outcomes.at_end(last, run.outcome, verdict == HOLDS or self.options.has_value(last))
