"""The loop of a solve: make passes until the certificate holds; rebuild K when the scalings outgrow it."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np

from ..arrays import host
from ..backends.boxes import Truncation
from ..backends.newton import GIVES_UP, HOLDS, OPEN
from ..backends.workspace import Workspace
from ..contract import SECONDS_A_CALL, Backend, Options, Stats
from ..errors import shown
from ..files import Checkpoint
from ..penalties import F64
from ..problem.problem import Problem
from ..progress import bar as progress_bar
from ..ranks import ALONE, Ranks
from ..status import FAILED, GOES_ON, told_bound

MOST_A_CALL = 512  # passes in one call of the core


class Run:
    """The loop of a solve, with its clock, the stats of its passes, and the potentials of its last workspace."""

    stopped: Callable[[], bool] = staticmethod(lambda: False)  # asked after each call of the core; True: cancel

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
        self.bar = progress_bar(True, **options) if progress else None
        self.limit = max_passes
        self.caller = np.geterr()
        self.status = "running"
        self.reads, self.clusters = "", 0  # of the last run: form of K in words; clusters that corrected it
        self.certified: Stats | None = None  # the last pass that Newton's step certified
        self.next_meet = 0  # number of the pass from which Newton's step is tried again
        self.products = 0  # products of Newton's steps towards hard columns so far
        self.budget = 0  # most products of Newton's steps; 0: no limit
        self.factors = 0  # factorisations by Newton's steps
        self.trace = trace or []
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
    def n_passes(self) -> int:
        if self.trace:
            return self.trace[-1].n_pass
        return 0

    def run(
        self, problem: Any, options: Options, log_v: F64, leave: float = math.inf, skip: Truncation | None = None
    ) -> F64:
        """Make passes until one is certified, the solve is cancelled, or the limit is reached; return the next log v.

        If the certified error of the first pass is above ``leave``, stop after this pass with the status "running".
        ``skip``: the pairs of points to skip.
        """
        tol = skip.tol if skip else options.tol
        self.lift = getattr(problem, "least_lift", 0.0)  # many marginals keep their constant
        with closing(self.backend.workspace(problem, options, skip)) as workspace:
            newton = workspace.newton() if options.last else None
            if newton:
                newton.record.all_products, newton.record.budget = self.products, self.budget
            workspace.absorb(log_v)
            fresh, reads = True, workspace.reads
            single = self.heard or (options.leaps and not workspace.leaps_within)
            quick = not single and self.ranks.max(problem.size) <= self.backend.quick_entries
            count = self.backend.quick_passes if quick and leave == math.inf else 1
            while True:
                begun = time.perf_counter()
                stats = workspace.iterate(self.next_passes(workspace, count))
                self.status = self.record(stats)
                if stats[0].error > leave and self.status in GOES_ON:
                    self.status = "running"
                    break
                leave = math.inf
                ended = self.status not in (*GOES_ON, *FAILED)
                if ended and options.in_place and not (fresh and len(stats) == 1):
                    self.status = self.check_in_place(workspace)
                self.status = self.stepped(workspace, newton, tol)
                fresh = self.renewed(workspace, skip, self.trace[-1])
                if self.status != "running" and not fresh:
                    break
                if self.saves and self.ranks.max(bool(self.checkpoint and self.checkpoint.due)):
                    self.save(workspace, problem)
                seconds = self.ranks.max(time.perf_counter() - begun)
                fits = int(len(stats) * SECONDS_A_CALL / max(seconds, 1e-6))
                count = 1 if single else max(1, min(2 * len(stats), MOST_A_CALL, fits))
            if stats[-1].rejected and self.status != "converged":  # else Newton's step may have certified it
                ended_as = self.status
                self.leave_rejected(workspace, stats[-1])
                if newton and newton.needed:
                    self.status = ended_as  # not certified yet
            self.end(workspace, newton, tol)
            if self.saves:
                self.save(workspace, problem)
            self.note_answer(workspace, reads)
            following: F64 = workspace.next_log_v.copy()
            return following

    def check_in_place(self, workspace: Workspace) -> str:
        """Make one more pass on a fresh K, since a plan in place cannot count lost mass; return the status."""
        before = self.status
        log_v = self.backend.to_numpy(workspace.potentials()[1])
        workspace.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
        status = self.record(workspace.iterate(1))
        return status if "converged" in (status, before) else before

    def note_answer(self, workspace: Workspace, reads: str) -> None:
        """Note the potentials, the marginals and how they were found; ``reads``: the matrix that passes read first."""
        self.reads = reads
        if workspace.reads != reads:
            self.reads = f"{reads}, then {workspace.reads}"
        coarse = workspace.coarse
        self.clusters = coarse.count if coarse and coarse.corrected else 0
        self.potentials = workspace.potentials()
        self.marginals = workspace.marginals()

    def stepped(self, workspace: Workspace, newton: Any, tol: float) -> str:
        """Make Newton's step after the last pass if a step is due; return the status."""
        if newton and (self.status == "stalled" or (self.status == "converged" and newton.needed)):
            if self.n_passes >= self.next_meet or workspace.options.has_value(self.trace[-1]):
                return self.meet(workspace, newton, tol)
            if self.n_passes < self.limit:
                self.status = "running"
            else:
                self.status = "max_passes"
        if workspace.options.leaps:
            self.products += workspace.leap(self.trace[-1], self.status == "running")
        return self.status

    def meet(self, workspace: Workspace, newton: Any, tol: float) -> str:
        """Certify a pass that nearly meets its hard columns by Newton's step, or restart from it; return the status."""
        last = self.trace[-1]
        has_value = workspace.options.has_value
        found = newton.step(workspace, self.backend, last, tol)
        self.products = newton.products
        self.certified = last
        if found == HOLDS or has_value(last):
            last.status = "converged"
            return "converged"
        last.status = "running"
        if found == GIVES_UP or self.n_passes >= self.limit:
            if found == GIVES_UP:
                return "stalled"
            return "max_passes"
        self.next_meet = self.n_passes + newton.wait
        workspace.restart(newton.start(workspace, self.backend))
        if found == OPEN:
            return "running"
        status = self.record(workspace.iterate(1))
        last = self.trace[-1]
        if status in ("running", "converged", "max_passes"):
            last.error, self.certified = newton.error_after(last.error), last
            last.status = "converged" if last.error <= tol or has_value(last) else "running"
            status = status if last.status == "running" and status == "max_passes" else last.status
        return status

    def end(self, workspace: Workspace, newton: Any, tol: float) -> None:
        """Set the final status; certify the last pass if the solve was cancelled or misses its hard columns."""
        if workspace.estimates and self.status == "cancelled":
            workspace.widen()
            self.record(workspace.iterate(1))
        last = self.trace[-1]
        workspace.conclude(last)
        open_ = self.status not in (*FAILED, "converged") and self.certified is not last
        if newton and newton.needed and open_:
            if newton.step(workspace, self.backend, last, tol) == HOLDS or workspace.options.has_value(last):
                self.status = last.status = "converged"
            self.products = newton.products
        elif last.status == "converged" and self.status != "cancelled":
            self.status = "converged"

    def renewed(self, workspace: Workspace, skip: Truncation | None, stat: Stats) -> bool:
        """Restart from a correction by groups, or rebuild K, if either is due; return whether K was rebuilt."""
        goes_on = self.status in (*GOES_ON, *FAILED)
        if skip and goes_on:
            log_v = workspace.corrected(stat)
        else:
            log_v = None
        if self.status == "absorb" or (skip and log_v is not None and not skip.correct):
            workspace.absorb(log_v)
            return True
        if log_v is not None:
            workspace.restart(log_v)
        return False

    def leave_rejected(self, workspace: Workspace, last: Stats) -> None:
        """Make one more pass, from the state before the step that the guard dropped: this state is the answer."""
        if last.status == "absorb":
            workspace.absorb()
        status = self.record(workspace.iterate(1))
        self.status = "converged" if status == "converged" else self.status

    def save(self, workspace: Workspace, problem: Problem) -> None:
        if self.checkpoint:
            log_v = host(workspace.next_log_v) + problem.constants[1] / problem.reg
            self.checkpoint.save(problem.cols.name, log_v, problem.reg, self.n_passes)

    def record(self, stats: list[Stats]) -> str:
        """Append passes to the trace, call the callback, and return the status that the loop acts on."""
        done = self.n_passes
        now = time.perf_counter() - self.start
        cancelled = self.stopped()
        for i, stat in enumerate(stats, 1):
            stat.n_pass = done + i
            stat.seconds = now
            stat.dual = stat.dual + self.lift
            self.trace.append(stat)
            cancelled = cancelled or bool(self.callback and self.told(stat))
        if self.bar:
            self.bar.update(len(stats))
            self.bar.set_postfix_str(told_bound(stats[-1].error), refresh=False)
        cancelled = self.ranks.max(cancelled)
        status = stats[-1].status
        if status in GOES_ON:
            if cancelled:
                return "cancelled"
            if self.n_passes >= self.limit:
                return "max_passes"
        return status

    def told(self, stat: Stats) -> bool:
        """Call the callback with a copy that it may keep; return whether it asks to cancel."""
        assert self.callback
        with np.errstate(**self.caller):
            answer = self.callback(dataclasses.replace(stat))
        try:
            return bool(answer)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"callback must return a truth value, or None to go on, got {shown(answer)}") from error

    def next_passes(self, workspace: Workspace, count: int) -> int:
        """Return how many of ``count`` passes the limit allows; turn wide for the last pass, which must certify."""
        left = self.limit - self.n_passes
        if workspace.estimates and left <= 1:
            workspace.widen()
        return max(1, min(count, left - workspace.estimates))
