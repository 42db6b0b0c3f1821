"""Newton's steps between hard sides of clouds that are too large for a factor, by passes and conjugate gradients.

A pass over the kept pairs is a trial of a step; one pass with factors is a product with S. The entropic plan is smooth:
potentials within the reach of the kernel converge in a few products, and all others vary between groups of points. The
preconditioner is therefore the diagonal plus a coarse level, S between groups of columns (additive Schwarz with two
levels: Toselli, Widlund 2005):

    M^-1 = D^-1 + Z E^-1 Z^T,     E = Z^T D Z - T^T diag(1 / r) T,     T: the plan's mass between groups,

where Z labels the group of each column. E is the Schur complement of the Laplacian of the groups. Any groups are
correct; wide ones take more products. backends/factored.py decides the steps. They certify nothing; the pass that
follows does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.blas import dsymv, dsyr, dsyrk

from ..arrays import host, namespace
from ..backends import factored
from ..backends.factored import EXPONENT_ROUNDING, GAIN_ROUNDING, StepNumbers, TrialNumbers
from ..contract import Backend, Options
from ..penalties import F64
from ..problem.points import softened
from ..problem.problem import Problem
from ..ranks import ALONE
from ..status import FAILED
from .groups import grouping
from .settings import LEVELS

MOST_CHANGE = 100.0  # nats of a group's potential since the plan was summed
FAR = 1.0  # nats between the marginal of a column and its mass: Newton's step takes a nat at a time
ONLY = np.zeros(1, np.int64)  # the place of the one problem


def serves(problem: Problem, options: Options, skip: Any) -> bool:
    """Tell whether steps with two levels serve: both sides are hard, and the points are sorted into boxes."""
    return bool(skip) and problem.balanced and problem.ranks.size == 1 and not options.symmetric and options.tol > 0


def approach(run: Any, workspace: Any, problem: Problem, options: Options, tol: float) -> None:
    """Make steps from the last pass until a pass can certify its plan with an error of ``tol``, or no step gains."""
    if workspace.estimates:
        workspace.widen()
    allowed = factored.allowed_miss(tol, problem.shape, both_hard=True)
    work = PassPlans(run, workspace, problem, options)
    factored.descend(work, ONLY, np.array([allowed]), LEVELS.most_steps)


class PassPlans:
    """A `SteppedPlans` of backends/factored.py for one problem, by passes of its workspace."""

    def __init__(self, run: Any, workspace: Any, problem: Problem, options: Options) -> None:
        self.run, self.workspace, self.problem, self.options = run, workspace, problem, options
        self.a, self.b = (host(side.weight) for side in problem.sides)
        self.y = np.zeros(problem.shape[1])
        self.groups: CoarseLevel | None = None
        self.own = self.next = self.read()

    def read(self) -> tuple[F64, F64, F64]:
        """Return log u, log v and the column marginal of the last pass."""
        log_u, log_v = map(host, self.workspace.potentials())
        return log_u, log_v, host(self.workspace.marginals()[1])

    def meet_columns(self, places: Any) -> None:
        """Do nothing: a trial does it for columns that are far from their mass."""

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        none = np.full(1, np.inf)
        if self.run.is_spent or self.run.is_cancelled:
            return TrialNumbers(none, -none, none, none, none)
        _, log_v, s = self.own
        length = float(lengths[0])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            status = self.make_pass(np.where(np.isfinite(log_v), log_v + length * self.y, log_v))
            self.next = self.read()
            behind = np.where((self.b > 0) & (self.next[2] > 0), np.log(self.b / self.next[2]), 0.0)
            far = np.abs(behind) > FAR
            if far.any() and status not in FAILED:  # such columns are met by themselves
                status = self.make_pass(self.next[1] + np.where(far, behind, 0.0))
                self.next = self.read()
            moved = [np.where(np.isfinite(x), y - x, 0.0) for x, y in zip(self.own[:2], self.next[:2], strict=True)]
            terms = self.a * moved[0], self.b * moved[1]
            mass = float(self.a.sum())
            missed = float(np.abs(self.b - self.next[2]).sum()) / mass
            reach = sum(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in self.next[:2])
            noise = GAIN_ROUNDING * (sum(float(np.abs(x).sum()) for x in terms) + mass)
            noise += EXPONENT_ROUNDING * reach * mass
            gain = float(sum(x.sum() for x in terms))
            promise = length * float(self.y @ (self.b - s))
        if status in FAILED or not np.isfinite(missed):
            return TrialNumbers(none, -none, none, none, none)
        rounding = factored.LEAST_MISS + EXPONENT_ROUNDING * reach
        return TrialNumbers(*(np.array([x]) for x in (missed, gain, noise, rounding, promise)))

    def make_pass(self, log_v: F64) -> str:
        """Make a pass from log v; if K or the mask of pairs is to be made anew, make it, and another pass."""
        workspace = self.workspace
        workspace.restart(log_v)
        status = self.run.record(workspace.iterate(1)).status
        if status == "absorb":
            xp = namespace(self.problem.rows.weight)
            workspace.absorb(xp.asarray(np.where(np.isfinite(log_v), log_v, 0.0)))
            if workspace.estimates:
                workspace.widen()
            status = self.run.record(workspace.iterate(1)).status
        return str(status)

    def accept(self, places: Any) -> None:
        self.own = self.next

    def form_equations(self, places: Any) -> None:
        log_u, log_v, s = self.own
        self.s = s
        self.size = np.where(s > 0, np.maximum(s, self.b), 1.0)  # of the shift: a column that gets nothing moves little
        right = np.where(s > 0, self.b - s, 0.0)
        self.right = right - s * (right.sum() / s.sum())
        self.product = self.workspace.newton_product()
        if self.groups is None:
            kept = self.workspace.policy.kept
            pairs = self.problem.size * (kept.share if kept else 1.0)
            self.groups = CoarseLevel(self.run.backend, self.problem, pairs, self.options.threads)
            self.groups.sum_plan(log_u, log_v)
        self.groups.form(log_u, log_v)

    def solve(self, places: Any, shifts: F64) -> StepNumbers:
        """Solve by conjugate gradients until the residual is a small part of the right side."""
        assert self.groups
        shift = float(shifts[0])
        self.groups.factor(shift * self.size, self.size)
        left = self.right.copy()
        diagonal = np.where(self.s > 0, self.s, 1.0) + shift * self.size
        enough = LEVELS.residual * float(np.abs(left).sum())
        y, d = np.zeros((2, len(left)))
        before = 0.0
        for _ in range(LEVELS.most_products):
            z = left / diagonal + self.groups.solve(left)
            along = float(left @ z)
            d = z + (along / before if before else 0.0) * d
            before = along
            t = diagonal * d - self.product(d)
            self.run.products += 1
            curved = float(d @ t)
            if not curved > 0:
                break
            y += along / curved * d
            left -= along / curved * t
            if not float(np.abs(left).sum()) > enough:
                break
        self.y = y - float(self.s @ y) / float(self.s.sum())
        return StepNumbers(np.array([bool(np.isfinite(y).all())]), np.array([float(np.abs(self.y).max())]))


class CoarseLevel:
    """The groups of both sides, and the equations between groups of columns."""

    def __init__(self, backend: Backend, problem: Problem, pairs: float, threads: int | None) -> None:
        """``pairs``: kept ones; a factor takes as long as a few products."""
        self.backend, self.problem, self.threads = backend, problem, threads
        cloud = self.cloud = problem.cost.cloud
        xp = self.xp = namespace(problem.rows.weight)
        rows, columns = softened(cloud, *cloud.coordinates(xp))
        most = min(LEVELS.most_groups, int((LEVELS.factor_work * pairs) ** (1 / 3)))
        found = []
        for points in (rows, columns[:, : problem.shape[1]].T):
            count = max(1, min(most, len(points) // LEVELS.least_in_group))
            found.append(grouping(points, count, 1 << (len(points) - 1).bit_length()))
        self.first = [host(x.first) for x in found]
        self.label = host(found[1].label)
        self.weights = [host(side.weight) for side in problem.sides]

    def sum_plan(self, log_u: F64, log_v: F64) -> None:
        """Find the plan's mass between groups, from some rows of each group."""
        problem = self.problem
        (m, n), (first, columns) = problem.shape, self.first
        count = np.diff(first, append=m)
        k = LEVELS.rows_of_group
        rows = np.unique(np.concatenate([first + count * (2 * i + 1) // (2 * k) for i in range(k)]))
        group = np.searchsorted(first, rows, side="right") - 1
        xp = self.xp
        alpha, beta = problem.exponents(xp.asarray(log_u), xp.asarray(log_v))
        some = self.backend.operator_of(self.cloud[rows], problem.reg, None, ALONE, self.threads)
        some.set_exponents(alpha[xp.asarray(rows)], beta)
        mass = np.zeros((len(columns), len(first)))
        step = max(1, LEVELS.block_entries // n)
        room = xp.empty((min(step, len(rows)), n), some.dtype)
        for i0 in range(0, len(rows), step):
            i1 = min(i0 + step, len(rows))
            block = some.plan(i0, i1, room[: i1 - i0])
            if xp is np:
                part = np.add.reduceat(block, columns, axis=1).T
            else:
                part = host(np.add.reduceat(block.T, xp.asarray(columns)))
            own = group[i0 : i0 + step]
            new = np.flatnonzero(np.diff(own, prepend=-1))
            mass[:, own[new]] += np.add.reduceat(part, new, axis=1)
        taken = np.bincount(group, self.weights[0][rows], len(first))
        mass *= np.add.reduceat(self.weights[0], first) / np.where(taken > 0, taken, 1.0)
        self.mass, self.logs = mass, (log_u, log_v)

    def form(self, log_u: F64, log_v: F64) -> None:
        """Form S between groups; the plan has changed by the mean changes of the potentials of each group."""
        changes = []
        for new, old, weight, first in zip((log_u, log_v), self.logs, self.weights, self.first, strict=True):
            used = np.isfinite(new) & np.isfinite(old)
            moved = np.where(used, new, 0.0) - np.where(used, old, 0.0)
            total = np.add.reduceat(weight * used, first)
            change = np.add.reduceat(weight * moved, first) / np.where(total > 0, total, 1.0)
            changes.append(np.exp(np.clip(change, -MOST_CHANGE, MOST_CHANGE)))
        roots = self.mass * changes[1][:, None]
        r = changes[0] * roots.sum(0)
        roots *= changes[0] / np.sqrt(np.where(r > 0, r, 1.0))
        if self.xp is np:
            S = dsyrk(-1.0, roots.T, trans=1, lower=1)
        else:
            there = self.xp.asarray(roots)
            S = -host(there @ there.T).T
        np.fill_diagonal(S, 0.0)
        np.fill_diagonal(S, -dsymv(1.0, S, np.ones(len(S)), lower=1))
        self.S = S

    def factor(self, added: F64, size: F64) -> None:
        """Factor S plus a diagonal; along constants, where S is singular, the mass of the columns is added."""
        own = np.bincount(self.label, size, len(self.S))
        shifted = dsyr(1.0 / float(own.sum()), own, a=self.S, lower=1)
        added = np.maximum(np.bincount(self.label, added, len(self.S)), LEVELS.least_shift * own)
        shifted.T.reshape(-1)[:: len(own) + 1] += added
        self.made = cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)

    def solve(self, left: F64) -> F64:
        """Return Z E^-1 Z^T of a vector over the columns."""
        sums = np.bincount(self.label, left, len(self.S))
        found: F64 = cho_solve(self.made, sums, check_finite=False)[self.label]
        return found
