"""Newton's steps with two levels between hard sides of clouds too large for a factor: passes and conjugate gradients.

A pass is a trial of a step; one pass with factors is a product with S. The entropic plan is smooth: potentials within
the reach of the kernel converge in a few products, and all others vary between groups of points. The preconditioner is
therefore the diagonal plus a coarse level, S between groups of columns (additive Schwarz with two levels: Toselli,
Widlund 2005):

    M^-1 = D^-1 + Z E^-1 Z^T,     E = Z^T D Z - T^T diag(1 / r) T,     T: the plan's mass between groups,

where Z labels the group of each column. E is the Schur complement of the Laplacian of the groups. Any groups are
correct; wide ones take more products. backends/factored.py decides the steps. They certify nothing; the pass that
follows does. All vectors and matrices lie on the device of the backend, whether passes take vectors there or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import any_of, formula, host, largest, namespace
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
from .stages import levels_serve
from .truncation import in_boxes

MOST_CHANGE = 100.0  # nats of a group's potential since the plan was summed
ONLY = np.zeros(1, np.int64)  # the place of the one problem


def serves(workspace: Any, problem: Any, options: Options, backend: Backend, skips: bool) -> bool:
    """Tell whether steps with two levels serve: between hard sides, by a workspace that makes products with S."""
    if not isinstance(problem, Problem) or options.symmetric or not options.tol > 0:
        return False
    return levels_serve(problem, backend, skips) and bool(workspace.makes_products)


def approach(run: Any, workspace: Any, problem: Problem, options: Options, tol: float) -> None:
    """Make steps from the last pass until a pass can certify its plan with an error of ``tol``, or no step gains."""
    allowed = factored.allowed_miss(tol, problem.shape, both_hard=True)
    work = PassPlans(run, workspace, problem, options)
    factored.descend(work, ONLY, np.array([allowed]), LEVELS.most_steps)


@formula
def moved_along(log_v: F64, y: F64, length: float) -> F64:
    """Return log v after a step of this length; a point left out stays where it is."""
    return np.where(np.isfinite(log_v), log_v + length * y, log_v)


@formula
def behind(b: F64, s: F64) -> tuple[F64, F64]:
    """Return how far the marginal s of each column is behind its mass b, in nats, and the size of that."""
    found = np.where((b > 0) & (s > 0), np.log(b / s), 0.0)
    return found, np.abs(found)


@formula
def met(log_v: F64, nats: F64, far: float) -> F64:
    """Return log v after columns that are more than ``far`` behind meet their mass by themselves."""
    return np.where(np.abs(nats) > far, log_v + nats, log_v)


@formula
def gained(weight: F64, old: F64, new: F64) -> tuple[F64, F64, F64]:
    """Return the terms of a gain of the dual value, their sizes, and the size of the new potential."""
    term = weight * np.where(np.isfinite(old), new - old, 0.0)
    return term, np.abs(term), np.where(np.isfinite(new), np.abs(new), 0.0)


@formula
def equations(b: F64, s: F64) -> tuple[F64, F64, F64]:
    """Return the size of the shift, the right side b - s and the diagonal of S's positive part.

    A column that gets nothing moves little.
    """
    used = s > 0
    return np.where(used, np.maximum(s, b), 1.0), np.where(used, b - s, 0.0), np.where(used, s, 1.0)


@formula
def preconditioned(left: F64, diagonal: F64, coarse: F64) -> tuple[F64, F64]:
    """Return z = M^-1 left from the part of the coarse level, and the terms of <left, z>."""
    z = left / diagonal + coarse
    return z, left * z


@formula
def multiplied(d: F64, diagonal: F64, product: F64) -> tuple[F64, F64]:
    """Return S d, and the terms of <d, S d>."""
    t = diagonal * d - product
    return t, d * t


@formula
def advanced(y: F64, left: F64, d: F64, t: F64, step: float) -> tuple[F64, F64, F64]:
    """Return the next solution, its residual and the size of that."""
    left = left - step * t
    return y + step * d, left, np.abs(left)


def plain(x: Any) -> Any:
    """Return a matrix, or a vector to multiply it by, without the arithmetic for vectors, which is slow on matrices."""
    return x.view(namespace(x).ndarray)


def inner(x: F64, y: F64) -> float:
    return float((x * y).sum())


class PassPlans:
    """A `SteppedPlans` of backends/factored.py for one problem, by passes of its workspace."""

    def __init__(self, run: Any, workspace: Any, problem: Problem, options: Options) -> None:
        self.run, self.workspace, self.options = run, workspace, options
        self.stays = namespace(problem.rows.weight) is not np  # passes take and give vectors on the device
        self.problem = run.backend.to_device(problem)
        self.a, self.b = (side.weight for side in self.problem.sides)
        self.mass = float(self.a.sum())
        self.y = namespace(self.b).zeros(problem.shape[1])
        self.groups: CoarseLevel | None = None
        self.own = self.next = self.read()

    def read(self) -> tuple[F64, F64, F64]:
        """Return log u, log v and the column marginal of the last pass."""
        xp = namespace(self.b)
        log_u, log_v = map(xp.asarray, self.workspace.potentials())
        return log_u, log_v, xp.asarray(self.workspace.marginals()[1])

    def meet_columns(self, places: Any) -> None:
        """Do nothing: a trial does it for columns that are far from their mass."""

    def trial(self, places: Any, lengths: F64) -> TrialNumbers:
        none = np.full(1, np.inf)
        if self.run.is_spent or self.run.is_cancelled:
            return TrialNumbers(none, -none, none, none, none)
        length = float(lengths[0])
        status = self.make_pass(moved_along(self.own[1], self.y, length))
        self.next = self.read()
        nats, sizes = behind(self.b, self.next[2])
        if largest(sizes) > LEVELS.far_behind and status not in FAILED:
            status = self.make_pass(met(self.next[1], nats, LEVELS.far_behind))
            self.next = self.read()
        gain = size = reach = 0.0
        for weight, old, new in zip((self.a, self.b), self.own[:2], self.next[:2], strict=True):
            term, term_size, potential = gained(weight, old, new)
            gain += float(term.sum())
            size += float(term_size.sum())
            reach += largest(potential)
        missed = float(np.abs(self.b - self.next[2]).sum()) / self.mass
        if status in FAILED or not np.isfinite(missed):
            return TrialNumbers(none, -none, none, none, none)
        noise = GAIN_ROUNDING * (size + self.mass) + EXPONENT_ROUNDING * reach * self.mass
        rounding = factored.LEAST_MISS + EXPONENT_ROUNDING * reach
        promise = length * inner(self.y, self.b - self.own[2])
        return TrialNumbers(*(np.array([x]) for x in (missed, gain, noise, rounding, promise)))

    def make_pass(self, log_v: F64) -> str:
        """Make a pass from log v; if K or the mask of pairs is to be made anew, make it, and another pass."""
        workspace = self.workspace
        if not self.stays:
            log_v = host(log_v)
        self.take_float64()
        workspace.restart(log_v)
        status = self.run.record(workspace.iterate(1)).status
        if status == "absorb":
            workspace.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
            self.take_float64()
            status = self.run.record(workspace.iterate(1)).status
        return str(status)

    def take_float64(self) -> None:
        """Make the next pass in float64: it may be the last one, and on a GPU float32 ones may follow a float64 one."""
        if self.workspace.estimates:
            self.workspace.widen()

    def accept(self, places: Any) -> None:
        self.own = self.next

    def form_equations(self, places: Any) -> None:
        log_u, log_v, s = self.own
        self.size, right, self.diagonal = equations(self.b, s)
        self.s, self.total = s, float(s.sum())
        self.right = right - s * (float(right.sum()) / self.total)
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
        left = self.right
        diagonal = self.diagonal + shift * self.size
        enough = LEVELS.residual * float(np.abs(left).sum())
        d = y = 0.0 * left
        before = 0.0
        is_solved = enough == 0
        for _ in range(LEVELS.most_products):
            z, terms = preconditioned(left, diagonal, self.groups.solve(left))
            along = float(terms.sum())
            d = z + (along / before if before else 0.0) * d
            before = along
            t, terms = multiplied(d, diagonal, self.product(d))
            self.run.products += 1
            curved = float(terms.sum())
            if not curved > 0:
                break
            is_solved = True
            y, left, sizes = advanced(y, left, d, t, along / curved)
            if not float(sizes.sum()) > enough:
                break
        self.y = y - inner(self.s, y) / self.total
        is_solved = is_solved and not any_of(~np.isfinite(self.y))
        return StepNumbers(np.array([is_solved]), np.array([largest(np.abs(self.y))]))


class CoarseLevel:
    """The groups of both sides, and the equations between groups of columns."""

    def __init__(self, backend: Backend, problem: Problem, pairs: float, threads: int | None) -> None:
        """``pairs``: of a pass; a factor takes as long as a few products."""
        self.backend, self.threads = backend, threads
        self.order: tuple[Any, Any] | None = None  # of points that are not sorted into boxes
        if not problem.cost.cloud.unit:
            problem, found = in_boxes(problem, False, LEVELS.least_in_group, threads)
            self.order = found.order
        self.problem = problem = backend.to_device(problem)
        cloud = self.cloud = problem.cost.cloud
        xp = self.xp = namespace(problem.rows.weight)
        rows, columns = softened(cloud, *cloud.coordinates(xp))
        most = min(LEVELS.most_groups, int((LEVELS.factor_work * pairs) ** (1 / 3)))
        groups = []
        for points in (rows, columns[:, : problem.shape[1]].T):
            count = max(1, min(most, len(points) // LEVELS.least_in_group))
            groups.append(grouping(points, count, 1 << (len(points) - 1).bit_length()))
        self.rows, self.cols = groups
        self.label = self.cols.label
        if self.order:  # the group of each column, in the order of the problem
            self.label = xp.zeros(len(self.label), np.int64)
            self.label[self.order[1]] = self.cols.label
        self.weights = [side.weight for side in problem.sides]

    def sorted(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """Return potentials in the order of the groups."""
        if self.order is None:
            return log_u, log_v
        return log_u[self.order[0]], log_v[self.order[1]]

    def sums(self, x: F64) -> F64:
        """Add up a vector over the columns of each group."""
        found: F64 = self.cols.sums(x if self.order is None else x[self.order[1]])
        return found

    def sum_plan(self, log_u: F64, log_v: F64) -> None:
        """Find the plan's mass between groups, from some rows of each group."""
        problem, xp = self.problem, self.xp
        log_u, log_v = self.sorted(log_u, log_v)
        n = problem.shape[1]
        first, columns = host(self.rows.first), self.cols.first
        count = np.diff(first, append=problem.shape[0])
        k = LEVELS.rows_of_group
        rows = np.unique(np.concatenate([first + count * (2 * i + 1) // (2 * k) for i in range(k)]))
        group = np.searchsorted(first, rows, side="right") - 1
        alpha, beta = problem.exponents(log_u, log_v)
        some = self.backend.operator_of(self.cloud[rows], problem.reg, None, ALONE, self.threads)
        some.set_exponents(alpha[xp.asarray(rows)], beta)
        mass = plain(xp.zeros((len(first), len(columns))))
        step = max(1, LEVELS.block_entries // n)
        room = xp.empty((min(step, len(rows)), n), some.dtype)
        for i0 in range(0, len(rows), step):
            i1 = min(i0 + step, len(rows))
            block = some.plan(i0, i1, room[: i1 - i0])
            if xp is np:
                part = np.add.reduceat(block, columns, axis=1)
            else:
                part = np.add.reduceat(block.T, columns).T
            own = group[i0:i1]
            starts = np.flatnonzero(np.diff(own, prepend=-1))
            mass[own[0] : own[-1] + 1] += plain(np.add.reduceat(part, xp.asarray(starts)))
        a = self.weights[0]
        taken = np.add.reduceat(a[xp.asarray(rows)], xp.asarray(np.flatnonzero(np.diff(group, prepend=-1))))
        mass *= plain(self.rows.sums(a) / np.where(taken > 0, taken, 1.0))[:, None]
        self.mass, self.logs = mass, (log_u, log_v)

    def form(self, log_u: F64, log_v: F64) -> None:
        """Form S between groups; the plan has changed by the mean changes of the potentials of each group."""
        changes = []
        groups = self.rows, self.cols
        for new, old, weight, own in zip(self.sorted(log_u, log_v), self.logs, self.weights, groups, strict=True):
            used, moved = map(own.sums, changed(weight, old, new))
            changes.append(grown(used, moved))
        own, other = map(plain, changes)
        r = changes[0] * (self.mass @ other)
        roots = self.mass * other
        roots *= plain(own / np.sqrt(np.where(r > 0, r, 1.0)))[:, None]
        self.equations = equations_of(roots)

    def factor(self, added: F64, size: F64) -> None:
        """Factor S plus a diagonal; along constants, where S is singular, the mass of the columns is added."""
        own = self.sums(size)
        added = np.maximum(self.sums(added), LEVELS.least_shift * own)
        self.inverse = self.equations.inverse(added, own)

    def solve(self, left: F64) -> F64:
        """Return Z E^-1 Z^T of a vector over the columns."""
        found: F64 = self.inverse(self.sums(left))[self.label]
        return found


def equations_of(roots: Any) -> Any:
    """Return S = diag(sums) - roots^T roots with its `inverse`, where ``roots`` lies."""
    if namespace(roots) is np:
        from ..backends.cpu.factored import HostLaplacian  # noqa: PLC0415 - loads the C core

        return HostLaplacian(roots)
    from ..backends.cuda.factored import DeviceLaplacian  # noqa: PLC0415 - needs CuPy

    return DeviceLaplacian(roots)


@formula
def changed(weight: F64, old: F64, new: F64) -> tuple[F64, F64]:
    """Return the masses of the points with finite potentials, and these masses times the change of the potentials."""
    used = np.isfinite(old) & np.isfinite(new)
    return np.where(used, weight, 0.0), np.where(used, weight * (new - old), 0.0)


@formula
def grown(used: F64, moved: F64) -> F64:
    """Return e^(mean change of a group's potentials)."""
    change = moved / np.where(used > 0, used, 1.0)
    return np.exp(np.minimum(np.maximum(change, -MOST_CHANGE), MOST_CHANGE))
