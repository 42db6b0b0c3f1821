"""Kept pairs of a dense M or of points: where reg is small, most pairs carry no mass, and passes need not read them.

The potentials of a larger reg tell the pairs that may matter: a pair is kept if its exponent at this reg is near the
largest exponent of its row or of its column. The kept pairs form a sparse problem (problem/sparse.py) with cheap
Newton's steps. The sparse problem proves nothing about M. Therefore the pairs are selected anew every few passes:
potentials are too high where a pair was missed. At the end a pass over all pairs certifies the answer, or the search
goes on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .. import outcome as outcomes
from ..backends.boxes import PassState, Truncation
from ..backends.operator import parts_of
from ..backends.settings import BOXES
from ..contract import Options
from ..penalties import F64
from ..problem.problem import Problem, heavy
from ..status import FAILED
from .loop import Run
from .settings import PAIRS, STAGES


class KeptPairs:
    """Runs of passes over kept pairs: `choose` the pairs of a run, `settle` its numbers, `conclude` over all pairs.

    These are steps of the policies in backends/pairs.py, which also says why kept pairs are no such policy. Between the
    passes of a run, its workspace makes Newton's steps (`leap`).
    """

    def __init__(self, run: Run, threads: int | None) -> None:
        self.run, self.threads = run, threads
        self.skip: Truncation | None = None  # the pairs of points that the current stage skips
        self.task: Problem | None = None  # the sparse problem of the last kept pairs

    def make_passes(self, task: Problem, options: Options, log_v: F64) -> F64 | None:
        """Make the passes of a stage over kept pairs; return the next log v, or None if too many pairs matter."""
        run, limit = self.run, self.run.limit
        most = min(limit, run.n_passes + PAIRS.most_passes)
        own = dataclasses.replace(options, precision="float64", leaps=True)
        made = False
        while run.n_passes < most and (pairs := self.choose(task, log_v)) is not None:
            if not made:
                run.share = pairs.size / task.size
            made = True
            run.limit = min(most, run.n_passes + PAIRS.selection_passes)
            log_v = run.run(pairs, own, log_v)
            self.settle()
            if run.outcome.status in ("converged", "cancelled", *FAILED):
                break
        run.limit = limit
        return log_v if made else None

    def solve(self, task: Problem, options: Options, log_v: F64) -> F64 | None:
        """Solve at the requested reg by `make_passes`; only a pass over all pairs can set the status "converged".

        Return the given log v if the last pass over all pairs has an error above ``STAGES.warm_error``.
        """
        run, answer = self.run, None
        inner = dataclasses.replace(options, tol=STAGES.inner_share * options.tol)
        exact = dataclasses.replace(options, precision="float64" if task.misses else "made")
        if self.skip:
            if self.skip.correct or self.are_many(task, column_exponents(task, log_v), PAIRS.nats):
                return None
            log_v = self.approach(task, options, log_v)
        for _ in range(PAIRS.rounds):
            if run.outcome.status == "cancelled":
                break
            found = self.make_passes(task, inner, log_v if answer is None else answer)
            if found is None:  # too many pairs matter
                break
            answer = found
            if run.outcome.status == "cancelled":
                break
            answer = self.conclude(task, exact, found)
            if run.outcome.status != "running":
                break
        if answer is None:
            return log_v if self.skip else None
        if run.trace[-1].error > STAGES.warm_error:
            return log_v
        return answer

    def approach(self, task: Problem, options: Options, log_v: F64) -> F64:
        """Make passes that skip boxes of points until their error is ``PAIRS.start_tol``.

        Before, a start by groups of points is off by hundreds of nats, too far for a choice of pairs.
        """
        run, skip = self.run, self.skip
        assert skip
        asked = skip.tol, skip.tol_gap
        skip.aim(PAIRS.start_tol, -1.0)
        log_v = run.run(task, dataclasses.replace(options, tol=PAIRS.start_tol, tol_gap=-1.0), log_v, skip=skip)
        skip.aim(*asked)
        if run.outcome.status == "converged":
            run.outcome = outcomes.after_rough_stage()
        return log_v

    def settle(self) -> None:
        """Hand the last state to the policy of skipped boxes; its own state is farther from the optimum."""
        run, skip = self.run, self.skip
        error = run.trace[-1].error
        if skip and error < 1:
            skip.state = PassState(*run.potentials, *run.marginals)
            skip.has_marginals = True
            skip.rough = error > BOXES.rough_error

    def conclude(self, task: Problem, options: Options, log_v: F64) -> F64:
        """Make passes over all pairs, which certify; a first pass with an error above tol ends them."""
        return self.run.run(task, options, log_v, leave_above=options.tol, skip=self.skip)

    def choose(self, task: Problem, log_v: F64) -> Problem | None:
        """Return the sparse problem of the pairs that may carry mass near log v; None if there are too many."""
        before = self.task
        is_new_reg = before is None or before.reg != task.reg
        nats = PAIRS.nats
        if is_new_reg and not self.skip:  # potentials of another reg have to move
            nats += PAIRS.moved_nats
        x = column_exponents(task, log_v)
        if is_new_reg and self.are_many(task, x, nats):
            return None
        if before is None:
            pattern = task
        else:
            pattern = dataclasses.replace(before, reg=task.reg)
        found = self.find_pairs(task, x, nats, int(2 * PAIRS.most_share * task.size), pattern)
        if found is None:
            return None
        self.task = found
        return found

    def find_pairs(self, task: Problem, x: F64, nats: float, most: int, pattern: Problem) -> Problem | None:
        """Keep at most ``most`` pairs near column exponents x; the pairs of ``pattern`` give the row exponents."""
        backend = self.run.backend
        operator = backend.operator_of(*parts_of(task), self.threads)
        if self.skip:
            operator.kept = self.skip.renew(operator.pool, nats=nats)
        if pattern is task:
            of_pattern = operator
        else:
            of_pattern = backend.operator_of(*parts_of(pattern), self.threads)
        alpha = np.where(task.left_out[0], -np.inf, 0.0)
        beta = x - of_pattern.balance(alpha, x)
        for exponents in alpha, beta:
            exponents[~np.isfinite(exponents)] = -np.inf
        pairs = operator.kept_pairs(alpha, beta, nats, most)
        if pairs is None:
            return None
        if task.c is None:
            reference: Any = task.reference
        else:
            reference = pairs.taken_from(task.c)
        return dataclasses.replace(task, cost=pairs, reference=reference, forbidden=True)

    def are_many(self, task: Problem, x: F64, nats: float) -> bool:
        """Estimate from a few heavy rows whether too many pairs matter at these column exponents."""
        some = x - task.cost.at(heavy(task.rows.weight)[:, None], np.arange(len(x))) / task.reg
        below = some.max(1, keepdims=True) - some
        return bool(np.mean(below < nats) > PAIRS.most_share)


def column_exponents(task: Problem, log_v: F64) -> F64:
    """Return log v plus the log reference of the columns; non-finite log v counts as 0, left out columns as -inf."""
    log_mass: F64 = np.where(np.isfinite(log_v), log_v, 0.0) + task.log_reference[1]
    return np.where(task.left_out[1], -np.inf, log_mass)
