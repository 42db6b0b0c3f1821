"""The problem between groups of points: the start of a solve that skips pairs, and a coarse correction of its passes.

A group is a set of neighbours in the order of boxes. It lies at the mean of its points and has their mass. A group has
many points where the points are dense, and few in the tails of a cloud, so that all groups are about equally wide.

The correction is a full approximation scheme (FAS). The groups get masses for which their fixed-point equations have
the same residual as the fixed-point equations of the points in the last pass,

    A'' = A e^(LU' + fi LS),   LS_I = log sum_J B_J e^(LV_J - M_IJ / reg),

where LV and LU' are the means, by mass, of log v and of the next log u over a group; B'' is defined alike. The problem
of the groups is solved. The change from LV' to its solution is added to the next log v of every point, interpolated
along the slopes of the groups. A pass smooths the error within groups, so that each corrected pass reduces the error by
10 to 100. The correction serves KL and balanced sides, groups well within the width of the kernel, and problems where
it costs at most ``BOXES.correction_passes`` passes. A bad correction costs time only, since the next pass has a
certificate of its own. Formulas: docs/mathematics.md.
"""

import dataclasses
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from ..arrays import formula, host, namespace
from ..backends.boxes import PassState
from ..backends.settings import BOXES
from ..contract import Backend, Options
from ..penalties import F64
from ..problem.points import PointCosts, softened
from ..problem.problem import Problem
from ..problem.side import Side
from ..ranks import ALONE
from .settings import GROUPS


class Grouping(NamedTuple):
    """The groups of one side, in the order of the points: each is a node of a binary tree that halves a box."""

    label: Any  # the group of each point
    first: Any  # the first point of each group

    def sums(self, x: Any) -> Any:
        """Add up a vector (k,) or a table (k, d) over each group."""
        return np.add.reduceat(x, self.first)


def grouping(points: Any, most: int, unit: int) -> Grouping:
    """Put sorted points (k, d) into about ``most`` groups of at most ``unit`` neighbours, a power of 2.

    Start with one point a group. Each merge of two halves leaves one group less, so merge the k - most narrowest
    blocks, and all blocks as wide as the last of these. A block is never narrower than its halves.
    """
    xp = namespace(points)
    k = len(points)
    low = high = points
    widths = []
    for _ in range(unit.bit_length() - 1):
        low, high = (merged(ufunc, x) for ufunc, x in ((np.minimum, low), (np.maximum, high)))
        widths.append(np.square(high - low).sum(1))
    inside = xp.zeros(k, bool)  # whether a point belongs to a group and is not its first point
    if k > most and widths:
        each = xp.sort(np.concatenate(widths))
        limit = float(each[min(k - most, len(each)) - 1])
        for level, width in enumerate(widths):  # the second half of a merged block starts inside the group
            half = inside[1 << level :: 2 << level]
            half[:] = (width <= limit)[: len(half)]
    return Grouping(np.cumsum((~inside).astype(np.int64)) - 1, np.flatnonzero(~inside))


def merged(ufunc: Any, x: Any) -> Any:
    """Merge the rows of a table in pairs; the last row of an odd number stays unchanged."""
    found = x[::2].copy()
    second = x[1::2]
    ufunc(found[: len(second)], second, out=found[: len(second)])
    return found


class Level(NamedTuple):
    """One side and its groups."""

    side: Side  # the side of the points
    mean: Side  # the side of the groups, on the host
    groups: Grouping
    offset: F64  # of each point from the mean of its group, (d, k)
    points: F64  # the means, (groups, d), on the host

    def mean_log(self, log: F64) -> F64:
        """Return the mean of ``log`` over each group by mass, on the host; 0 for a group without mass."""
        used, terms = map(self.groups.sums, weighted(self.side.weight, log))
        with np.errstate(divide="ignore", invalid="ignore"):
            found: F64 = finite_or_zero(host(terms) / host(used))
        return found

    def to_points(self, log: F64, steep: F64) -> F64:
        """Return ``log`` at each point: the number of its group plus offset times the group's slope."""
        xp = namespace(self.offset)
        label = self.groups.label
        out: F64 = xp.asarray(log)[label]
        for along, slope in zip(self.offset, xp.asarray(steep).T, strict=True):
            out += along * slope[label]
        return out


@formula
def weighted(weight: F64, log: F64) -> tuple[F64, F64]:
    """Return the masses of the points with a finite ``log``, and these masses times ``log``."""
    used = np.where(np.isfinite(log), weight, 0.0)
    return used, np.where(np.isfinite(log), weight * log, 0.0)


@formula
def finite_or_zero(log: F64) -> F64:
    """Return ``log`` with every non-finite number replaced by 0."""
    return np.where(np.isfinite(log), log, 0.0)


def units_of(shape: tuple[int, int]) -> list[int]:
    """Return the mean number of points in a group of the rows and of the columns, rounded up to powers of 2."""
    least = [max(-(-k // GROUPS.most_groups), min(GROUPS.least_in_group, -(-k // GROUPS.usual_groups))) for k in shape]
    return [1 << (k - 1).bit_length() for k in least]


class Groups:
    """The groups of one problem with sorted points.

    ``solve(problem, options, start, most)`` solves another problem in at most ``most`` passes.
    """

    def __init__(
        self, problem: Problem, units: list[int], options: Options, solve: Any, backend: Backend
    ) -> None:  # fmt: skip
        self.problem, self.options, self.solve, self.backend = problem, options, solve, backend
        cloud = problem.cost.cloud
        xp = namespace(problem.rows.weight)
        rows, columns = softened(cloud, *cloud.coordinates(xp))
        points = self.points = rows, columns[:, : problem.shape[1]].T
        groups = [grouping(x, -(-len(x) // unit), max(unit, cloud.unit)) for x, unit in zip(points, units, strict=True)]
        self.units, self.small, self.levels = units, problem_of_groups(problem, points, groups), list[Level]()
        means = self.small.cost.cloud
        coarse = (self.small.rows, means.rows), (self.small.cols, means.targets)
        for side, (mean, middle), fine, own in zip((problem.rows, problem.cols), coarse, points, groups, strict=True):
            self.levels.append(Level(side, mean, own, (fine - xp.asarray(middle)[own.label]).T, middle))
        metric, scale = cloud.core
        square = metric.square  # only then is the slope of a potential known
        if square:
            self.factor = 2 * scale / problem.reg
        else:
            self.factor = 0.0
        ranks, (one, other) = problem.rows.ranks, self.levels
        squares = float(ranks.sum(float(np.square(one.offset).sum()))) + float(np.square(other.offset).sum())
        count = float(problem.rows.n_points + problem.cols.n_points)
        self.wide = squares / count * (scale / problem.reg) ** (1 if square else 2)
        self.pairs = GROUPS.cost_in_passes * float(ranks.sum(len(one.points))) * len(other.points)

    @property
    def correct(self) -> Any:
        """The method ``corrected``; None where it does not help: other penalties, no extrapolation, too wide groups."""
        sides = self.problem.rows, self.problem.cols
        serves = self.options.anderson_depth > 0 and max(self.units) > 1 and self.wide <= GROUPS.most_spread
        if serves and all(side.logarithmic for side in sides):
            return self.corrected
        return None

    def start(self) -> tuple[F64, F64]:
        """Solve the problem of the groups roughly; return potentials (log u, log v) of the points."""
        rough = dataclasses.replace(
            self.options, tol=max(self.options.tol, BOXES.rough_error), tol_gap=-1.0, last=False
        )
        result = self.solve(self.small, rough)
        logs = finite_or_zero(result.log_u), finite_or_zero(result.log_v)
        if self.units == [1, 1]:
            return logs
        return self.reached(0, logs[1]), self.same_on_ranks(self.reached(1, logs[0]))

    def same_on_ranks(self, log_v: F64) -> F64:
        """Make log v the same on all ranks: the last bits of GPUs differ, and no rank may stop alone."""
        found: F64 = self.problem.ranks.max(log_v)
        return found

    def reached(self, axis: int, log: F64) -> F64:
        """Return log u (``axis`` 0) or log v of the points by half a pass from ``log`` of the other side's groups.

        Linear interpolation within groups would ignore curvature: it is off by 160 nats in the tails of a cloud at
        reg / median 0.005, where half a pass is off by 6.
        """
        problem = self.problem
        small = self.small
        ranks = self.problem.ranks
        xp = namespace(self.problem.rows.weight)
        means = small.cost.cloud
        points = self.points[axis]
        side, other, middles = problem.rows, small.cols, means.targets
        if axis:  # the groups of rows of all ranks
            side = problem.cols
            other = together(small.rows)
            log, middles = (np.concatenate(ranks.all(x)) for x in (log, means.rows))
        some = points if len(points) else middles[:1]  # a rank without rows needs one point for the cost
        cost = PointCosts(some, middles, means.metric, means.scale, truncate=None)[: len(points)]
        task = dataclasses.replace(small, cost=cost, rows=side, cols=other, M_min=0.0)
        # with several ranks, vectors stay on the host
        if xp is not np:
            task = self.backend.to_device(task)
        with closing(self.backend.workspace(task, dataclasses.replace(self.options, symmetric=False))) as workspace:
            workspace.absorb(xp.asarray(log))
            workspace.iterate(1)
            found: F64 = finite_or_zero(workspace.potentials()[0])
            return found

    def plan(self, problem: Problem, logs: tuple[F64, F64]) -> Any:
        return self.backend.plan_of(problem, *logs, self.options.threads)

    def moved(self, plan: Any, axis: int) -> tuple[F64, F64]:
        """Return the marginal of a plan on the groups of a side, and each group's mean minus the mean of its partners.

        ``axis``: 0 for the rows, 1 for the columns.
        """
        own, other = self.levels[axis].points, self.levels[1 - axis].points
        table = np.column_stack([other, np.ones(len(other))])
        found = np.asarray(plan.apply_transpose(table) if axis else plan.apply(table))
        with np.errstate(divide="ignore", invalid="ignore"):
            image = found[:, :-1] / found[:, -1:]
        return found[:, -1], np.where(np.isfinite(image), own - image, 0.0)

    def corrected(self, state: PassState, error: float) -> F64:
        """Return the corrected next log v, in place of the image of a state with this error."""
        reg, small = self.problem.reg, self.small
        pairs = (state.log_u, state.r), (state.log_v, state.s)
        sides = [level.side for level in self.levels]
        images = [image(*pair, x.log_weight, x.rho, reg) for x, pair in zip(sides, pairs, strict=True)]
        logs = [level.mean_log(log) for level, (log, _) in zip(self.levels, pairs, strict=True)]
        nexts = [level.mean_log(log) for level, log in zip(self.levels, images, strict=True)]
        plan = self.plan(small, (logs[0], logs[1]))
        row_sums = np.asarray(plan.apply(np.ones(small.shape[1])))
        col_sums, before = self.moved(plan, 1)
        shifts = []  # log(A'' / A) and log(B'' / B)
        for level, log, later, sums in zip(self.levels, logs, nexts, (row_sums, col_sums), strict=True):
            with np.errstate(divide="ignore", invalid="ignore"):
                shifts.append(
                    finite_or_zero(later + rate(level.mean, reg) * (np.log(sums) - level.mean.log_weight - log))
                )
        rows, cols = (
            dataclasses.replace(level.mean, weight=level.mean.weight * np.exp(shift))
            for level, shift in zip(self.levels, shifts, strict=True)
        )
        if rows.scalar_rho == cols.scalar_rho == np.inf:  # both sides hard: give b the mass of a
            cols = dataclasses.replace(cols, weight=cols.weight * (rows.mass / cols.mass))
        task = dataclasses.replace(small, rows=rows, cols=cols)
        tol = max(GROUPS.relative_tol * min(error, 1.0), GROUPS.least_tol)
        options = dataclasses.replace(self.options, tol=tol, tol_gap=-1.0, last=False)
        found = self.solve(task, options, (nexts[0] - shifts[0], nexts[1] - shifts[1]), GROUPS.most_passes)
        after = self.moved(self.plan(task, (found.log_u, found.log_v)), 1)[1]
        steep = self.factor * rate(cols, reg)[:, None] * (after - before)
        step = self.levels[1].to_points(finite_or_zero(found.log_v + shifts[1] - nexts[1]), steep)
        return self.same_on_ranks(finite_or_zero(images[1]) + step)


def together(side: Side) -> Side:
    """Return one side with the points of all ranks."""
    ranks = side.ranks
    weight, rho = (np.concatenate(ranks.all(x)) for x in (side.weight, side.rho))
    if side.upper is None:
        upper = None
    else:
        upper = np.concatenate(ranks.all(side.upper))
    return dataclasses.replace(side, weight=weight, rho=rho, upper=upper, ranks=ALONE)


def rate(side: Side, reg: float) -> F64:
    """Return fi = rho / (rho + reg), the exponent of the KL step."""
    return 1 / (1 + reg / side.rho)


@formula
def image(log: F64, marginal: F64, log_weight: F64, rho: F64, reg: float) -> F64:
    """Return the next log scalings, -fi log (K v)_i, from log u and the plan's marginal a u K v."""
    return (log_weight + log - np.log(marginal)) / (1 + reg / rho)


def problem_of_groups(problem: Problem, points: tuple[Any, Any], groups: list[Grouping]) -> Problem:
    """Return the problem between the means of the groups; it skips no pairs."""
    cloud = problem.cost.cloud
    sides = []
    means = []
    for side, fine, own in zip((problem.rows, problem.cols), points, groups, strict=True):
        weight = own.sums(side.weight)
        share = side.weight + (weight <= 0)[own.label]  # groups without mass: unweighted means
        means.append(host(own.sums(fine * share[:, None]) / own.sums(share)[:, None]))
        count = np.diff(host(own.first), append=len(fine))
        rho = host(own.sums(side.rho)) / count
        rho = rho / count ** (side.kind.degree - 1)
        if side.upper is None:
            upper = None
        else:
            upper = host(own.sums(side.upper)) / count
        sides.append(dataclasses.replace(side, weight=host(weight), rho=rho, upper=upper))
    some = means[0] if len(means[0]) else means[1][:1]  # a rank without rows needs one point for the cost
    (metric, scale), name = cloud.core, cloud.metric
    name = "sqeuclidean" if metric.unit else name  # the mean of unit vectors may be 0
    small = PointCosts(some, means[1], name, scale, truncate=None)[: len(means[0])]
    return dataclasses.replace(problem, cost=small, rows=sides[0], cols=sides[1])
