"""Points in boxes: choose the pairs of boxes that a solve between clouds skips, and add their mass to the certificate.

    t_i = sum over skipped j of the bound on P_ij,   tau = sum t_i:   marginals lie in [r, r + t],
    error <= (error' + plan_error(min(reg tau, gap(r + t) - gap(r)) / (reg mass))) (1 + tau / mass) + tau / mass

error' and gap are computed from the kept pairs alone; gap(r + t) - gap(r), for KL sides only, is of second order in t.
Bounds between boxes: src_c/boxes_tmpl.c. Derivation: docs/mathematics.md.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import PAD, any_of, copied, formula, host, namespace
from ..cached import cached_property
from ..contract import LEAST_MASS, Stats
from ..outcome import request_kernel
from ..penalties import F64
from ..problem.points import KeptBoxes, softened
from ..problem.problem import Problem
from ..problem.side import Side
from ..problem.validate import as_columns
from .operator import Operator
from .pairs import AllPairs
from .rules import Judge, plan_error
from .settings import BOXES


def unit_of(shape: tuple[int, int], least: int = 16) -> int:
    """Return how many points a box has: a multiple of ``least``, the ``least_box`` of the backend."""
    return max(least, *(unit for unit, points in BOXES.units if max(shape) >= points))


class BoxedSide:
    """The points of one side in boxes of ``unit`` points, scaled to factor (x - first), so that a cost of reg is 1.

    Arrays over the points are where the points are, on the host or a device; arrays over the boxes are numpy's.
    """

    def __init__(self, points: F64, first: F64, factor: float, unit: int, pad: int) -> None:
        """``points``: (count, d)."""
        self.points, self.first, self.factor, self.count, self.unit = points, first, factor, len(points), unit
        self.boxes = -(-len(points) // unit)
        self.padded = -(-self.boxes // pad) * pad
        ends = (self.merged(each, points) for each in (np.minimum, np.maximum))
        low, high = (factor * (x - first) for x in ends)  # scaling is monotone, and so is its rounding
        self.mid = 0.5 * (low + high)
        self.half = np.maximum(high - self.mid, self.mid - low) * (1 + 2.0**-50)

    def merged(self, merge: Any, x: F64) -> F64:
        """Reduce the numbers of the points of each box by ``merge``; the result is on the host."""
        found: F64 = host(merge.reduceat(x, namespace(x).asarray(np.arange(0, self.count, self.unit))))
        return found

    @cached_property
    def offset(self) -> F64:
        """Points less the middle of their box, (boxes, unit, d), on the host; the last point fills up its box."""
        whole = self.factor * (self.points - self.first)
        if self.count:
            whole = np.pad(whole, ((0, self.boxes * self.unit - self.count), (0, 0)), "edge")
        moved: F64 = whole.reshape(self.boxes, self.unit, self.points.shape[1]) - self.mid[:, None]
        return moved

    def split(self, vector: F64, rest: float) -> F64:
        """Return a vector over the points as a table (boxes, unit), padded with ``rest``."""
        return np.pad(vector, (0, self.boxes * self.unit - self.count), constant_values=rest).reshape(
            self.boxes, self.unit
        )

    def sums(self, vector: F64) -> F64:
        return self.merged(np.add, vector)

    def slopes(self, log: F64) -> F64:
        """Fit ``log`` by a linear function in each box. Any slopes give a valid bound, good slopes a sharp bound."""
        d = self.offset.shape[2]
        if d > BOXES.most_slopes:
            return np.zeros_like(self.mid)
        y = self.split(log, np.nan)
        used = np.isfinite(y)
        count = np.maximum(used.sum(1), 1)[:, None]
        y = np.where(used, y - (np.where(used, y, 0.0).sum(1, keepdims=True) / count), 0.0)
        X = self.offset * used[:, :, None]
        X = (X - X.sum(1, keepdims=True) / count[:, None]) * used[:, :, None]
        A = X.swapaxes(1, 2) @ X
        ridge = 1e-6 * np.trace(A, axis1=1, axis2=2) + 1e-300
        slope = np.linalg.solve(A + ridge[:, None, None] * np.eye(d), X.swapaxes(1, 2) @ y[:, :, None])[:, :, 0]
        return np.where(np.isfinite(slope), slope, 0.0)

    def share_out(self, mass: F64, shares: F64) -> F64:
        """Distribute a mass of each box over its points by their shares."""
        bound: F64 = mass_of_shares(namespace(shares).asarray(mass[: self.boxes, None]), shares).reshape(-1)[
            : self.count
        ]
        return bound


class TiltedSide(NamedTuple):
    """The log scalings of one side in the form that bounds between boxes need: f~ is f less the slopes."""

    slope: F64  # (boxes, d)
    log_mass: F64  # (boxes,): log sum e^f~
    shares: F64  # (boxes, unit): e^f~ of a point, divided by the sum over its box
    largest: float  # size of the terms added, for a bound on their rounding


class PassState(NamedTuple):
    """Iterate of a solve: log scalings, and marginals of the pairs that are kept."""

    log_u: F64
    log_v: F64
    r: F64
    s: F64


Growths = Sequence[Callable[[F64], float]]  # for rows and columns: (bounds on each box's skipped mass) -> growth of KL


class Share(NamedTuple):
    """Share of skipped pairs in a certificate: a bound on their mass, and the plan error that they cause."""

    mass: float = 0.0
    error: float = 0.0


class Boxes:
    """The boxes of a problem with sorted points, and bounds on the plan between boxes.

    Each rank has the boxes of its own rows and of all columns. Only sums over rows are summed over ranks, and all ranks
    take the same decisions.
    """

    arrays: ModuleType = np  # library of the points' arrays: numpy or cuda/vectors.py

    def __init__(self, problem: Problem, pool: Any, symmetric: bool = False) -> None:
        """``symmetric``: rows and columns are the same, so bounds and pairs must agree bit for bit."""
        cloud = problem.cost.cloud
        self.problem, self.pool, self.ranks, self.symmetric = problem, pool, problem.rows.ranks, symmetric
        metric, scale = cloud.core
        self.metric, self.unit = metric.number, cloud.unit
        n = problem.shape[1]
        rows, columns = softened(cloud, *cloud.coordinates(self.arrays))
        self.limit = -(-n // PAD) * PAD  # where the last run of columns may end
        factor = metric.scaled(scale / problem.reg)
        self.smooth = metric.square
        first = copied(columns[:, :1]).T
        self.rows = BoxedSide(rows, first, factor, self.unit, 1)
        self.cols = BoxedSide(columns[:, :n].T, first, factor, self.unit, PAD)
        reach = [np.abs(boxed.mid).max(initial=0.0) + boxed.half.max(initial=0.0) for boxed in (self.rows, self.cols)]
        self.reach = float(sum(reach)) * (float(sum(reach)) if self.smooth else 1.0) * columns.shape[0]

    def tilt(self, state: PassState) -> tuple[TiltedSide, TiltedSide, dict[str, F64]]:
        """Return both sides as `TiltedSide`, and the arrays of both sides for the kernels."""
        alpha, beta = self.problem.exponents(state.log_u, state.log_v)
        logs = (self.rows, state.log_u, alpha), (self.cols, state.log_v, beta)
        sides = [self.tilted(boxed, log_scale, log) for boxed, log_scale, log in logs[: 2 - self.symmetric]]
        sides *= 1 + self.symmetric
        rounding = 2.0**-48 * (sum(side.largest for side in sides) + self.reach)
        if not rounding < 1:
            rounding = math.inf
        total = float(self.ranks.sum(state.r.sum()))
        self.mass = total if 0 < total < math.inf else 1.0
        n = self.cols.boxes
        behind = self.cols.padded - self.cols.boxes
        more = rounding - math.log(self.mass), 0.0
        x_log, y_log = (side.log_mass + k for side, k in zip(sides, self.shared(*more), strict=True))
        y_log = np.pad(y_log, (0, behind), constant_values=-np.inf)
        arrays = {
            "x_mid": self.rows.mid, "x_half": self.rows.half, "x_slope": sides[0].slope, "x_log_mass": x_log,
            "y_log_mass": y_log, "x_cut": np.full(len(x_log), np.inf), "y_cut": np.zeros(n + behind),
        }  # fmt: skip
        for name, table in (("mid", self.cols.mid), ("half", self.cols.half), ("slope", sides[1].slope)):
            arrays["y_" + name] = np.pad(table.T, ((0, 0), (0, behind)))
        return sides[0], sides[1], {k: np.ascontiguousarray(x, np.float64) for k, x in arrays.items()}

    def shared(self, row: float, column: float) -> tuple[float, float]:
        """Return the terms of both sides; if rows and columns are the same, each gets half of the sum."""
        if self.symmetric:
            return (0.5 * (row + column),) * 2
        return (row, column)

    def tilted(self, boxed: BoxedSide, log_scale: F64, log: F64) -> TiltedSide:
        """Subtract slopes from ``log``, the exponent of the plan without the cost.

        The slopes are fitted to ``log_scale``, the exponent without masses, because it is smooth.
        """
        if self.smooth:
            slope = boxed.slopes(np.where(np.isneginf(log), np.nan, log_scale))
        else:
            slope = np.zeros_like(boxed.mid)
        off = (boxed.offset * slope[:, None]).sum(2)
        flat = boxed.split(log, -np.inf) - off
        top = flat.max(1)
        is_finite = np.isfinite(top)
        shares = np.exp(flat - np.where(is_finite, top, 0.0)[:, None])
        total = shares.sum(1)
        with np.errstate(divide="ignore"):
            log_mass = np.where(is_finite, top, 0.0) + np.log(total)
        shares = shares / np.where(total > 0, total, 1.0)[:, None]
        finite = np.abs(log[np.isfinite(log)]).max(initial=0.0)
        return TiltedSide(slope, log_mass, shares, float(finite + np.abs(off).max(initial=0.0)))

    def sweep(self, arrays: dict[str, Any], kept: KeptBoxes | None = None) -> tuple[Any, F64, F64]:
        """Return how many boxes each box of rows keeps, and bounds on the skipped mass by rows and by columns.

        Keep the pairs in ``kept``; if it is None, keep the pairs above the cuts in ``arrays``.
        """
        if kept is None:
            runs = (None, None)
        else:
            runs = (kept.first, kept.run)
        self.count, width, row_mass, col_mass = self._pairs(arrays, *runs)
        return width, row_mass, self.ranks.sum(col_mass)

    def runs(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Return (first, run) of `KeptBoxes` for the cuts of the last sweep."""
        first = np.concatenate([[0], np.cumsum(self.count)])
        run = np.zeros(2 * max(1, int(first[-1])), np.int32)
        self._pairs(arrays, first, run, write=True)
        return first, np.minimum(run, self.limit, out=run)

    def _pairs(self, arrays: dict[str, Any], first: Any, run: Any, write: bool = False) -> tuple[Any, Any, F64, F64]:
        """Call mapuot_box_pairs; return the number of runs and of boxes that each box of rows keeps, and the bounds."""
        from .._core import ffi, lib  # noqa: PLC0415 - pick reports a missing C library

        m = len(arrays["x_log_mass"])
        n = len(arrays["y_log_mass"])
        record = ffi.new("mapuot_boxes *", {"m": m, "n": n, "d": self.rows.mid.shape[1], "metric": self.metric})
        for name, array in arrays.items():
            setattr(record, name, ffi.from_buffer("double *", array))
        count = np.zeros(m, np.int64)
        width = np.zeros(m, np.int64)
        if first is None:
            out = ffi.NULL
        else:
            out = ffi.from_buffer("int64_t *", first)
        if run is None:
            runs = ffi.NULL
        else:
            runs = ffi.from_buffer("int32_t *", run)
        row_mass = np.zeros(m)
        col_mass = np.zeros(n)
        status = lib.mapuot_box_pairs(
            self.pool, record, self.unit, out, runs, write, ffi.from_buffer("int64_t *", count),
            ffi.from_buffer("int64_t *", width), ffi.from_buffer("double *", row_mass),
            ffi.from_buffer("double *", col_mass),
        )  # fmt: skip
        if status < 0:
            raise MemoryError("truncate: no memory for the sums of a thread")
        return count, width, row_mass, col_mass

    def share(self, row_mass: F64, col_mass: F64, growths: Growths) -> Share:
        """Return the share in a state's certificate of skipped pairs with these bounds on their mass."""
        tau = float(self.ranks.sum(row_mass.sum())) * (1 + 1e-9) + 1e-290
        if not tau < 1:
            return Share(math.inf, math.inf)
        least, problem = tau, self.problem
        if growths and problem.reg * self.mass >= LEAST_MASS:  # for less mass a growth may underflow to 0
            sides = zip((problem.rows, problem.cols), growths, (row_mass, col_mass), strict=True)
            paid = sum(float(side.ranks.sum(growth(bound))) for side, growth, bound in sides)
            least = min(least, paid / (problem.reg * self.mass))
        return Share(tau * self.mass, plan_error(least * (1 + 1e-9)))

    def growths(self, state: PassState, sides: tuple[TiltedSide, TiltedSide], near: float | None = None) -> Growths:
        """Return functions that bound how much the mass skipped in its boxes raises the KL term of each side.

        Return none unless both sides are KL. ``near``: estimate the growth at a state of this certified error instead.
        """
        problem, mass = self.problem, self.mass
        found: list[Callable[[F64], float]] = []
        boxed_sides = (problem.rows, self.rows, state.log_u, state.r), (problem.cols, self.cols, state.log_v, state.s)
        if not all(side.penalty == "kl" and not side.ranks.max(any_of(side.hard)) for side, *_ in boxed_sides):
            return []
        for (side, boxed, log, r), tilt in zip(boxed_sides, sides, strict=True):
            if near is None:
                found.append(functools.partial(grown, side, boxed, problem.reg * log, r, mass * tilt.shares))
            else:
                found.append(
                    functools.partial(grown_near, boxed, *near_terms(boxed, side, problem.reg, r, tilt, near), mass)
                )
        return found

    def skipped(self, state: PassState, kept: KeptBoxes | None) -> Share:
        """Return the share of the pairs skipped by a mask in the certificate of a state."""
        if kept is None:
            return Share()
        *sides, arrays = self.tilt(state)
        _, row_mass, col_mass = self.sweep(arrays, kept)
        return self.share(row_mass, col_mass, self.growths(state, (sides[0], sides[1])))

    def make(self, state: PassState, goal: float, nats: float, near: float | None = None) -> KeptBoxes | None:
        """Choose the pairs to keep, so that skipped pairs cost at most ``goal`` at the state, or at an error ``near``.

        Skip a pair of boxes if its bound is below e^-nats times (mass of box i) (mass of box j) / (whole mass). The
        masses are capped at the sums of the bounds, so that each box with mass keeps at least one pair.
        Return None to keep all pairs.
        """
        *sides, arrays = self.tilt(state)
        _, *totals = self.sweep(arrays)
        masses = [self.rows.sums(state.r), np.pad(self.cols.sums(state.s), (0, self.cols.padded - self.cols.boxes))]
        with np.errstate(divide="ignore"):
            logs = [np.log(np.minimum(x / self.mass, y)) for x, y in zip(masses, totals, strict=True)]
        if self.symmetric:
            logs[1][: len(logs[0])] = logs[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            over_sums = [np.fmax.reduce(np.log(y) - np.log(x / self.mass), initial=-np.inf)
                         for x, y in zip(masses, totals, strict=True)]  # fmt: skip
        low = [x[np.isfinite(x)].min(initial=0.0) for x in logs]
        rows = self.ranks
        self.wild = float(max(rows.max(over_sums[0]), over_sums[1]) - min(rows.min(low[0]), low[1]))
        over = max(float(rows.sum(np.exp(logs[0]).sum())), float(np.exp(logs[1]).sum()))
        pairs = float(rows.sum(self.rows.boxes)) * self.cols.boxes
        if 0 < over < math.inf:
            log_over = math.log(over)
        else:
            log_over = math.inf
        growths = self.growths(state, (sides[0], sides[1]), near)
        for _ in range(BOXES.trials):
            off = self.shared(nats + log_over, 0.0)
            arrays["x_cut"], arrays["y_cut"] = (log - k for log, k in zip(logs, off, strict=True))
            width, row_mass, col_mass = self.sweep(arrays)
            share = self.share(row_mass, col_mass, growths)
            part = float(rows.sum(width.sum())) / pairs
            if part > BOXES.most_kept_share:
                return None
            missed = share.error + 2 * share.mass / self.mass
            if missed <= goal:
                break
            more = 6.0
            if missed < math.inf:
                more = min(more, max(1.0, 0.8 * math.log(missed / goal)))
            nats += more
        else:
            return None
        first, run = self.runs(arrays)
        return KeptBoxes(self.unit, first, run, int(width.max(initial=1)) * self.unit, nats, part)


@formula
def mass_of_shares(mass: F64, shares: F64) -> F64:
    return np.where(shares > 0, mass * shares, 0.0)


@formula
def growth(t: F64, f: F64, r: F64, log_weight: F64, rho: F64) -> F64:
    """Bound the growth of `grown` at each point."""
    log_q = log_weight - f / rho
    inner = np.where(r > 0, r * np.log1p(t / r), 0.0)
    value = inner + t * (np.log(r + t) - log_q) - t
    return np.where(t > 0, rho * np.maximum(value, 0.0), 0.0)


@formula
def near_growth(shares: F64, r: F64, rho: F64, reg: float, near: float) -> tuple[F64, F64]:
    """Return both terms of `near_terms` at each point."""
    square = np.where(shares > 0, rho * np.square(shares) / (2 * r), 0.0)
    return square, near * np.sqrt(reg * rho) * shares


def grown(side: Side, boxed: BoxedSide, f: F64, r: F64, shares: F64, bound: F64) -> float:
    """Bound rho (KL(r + x | q) - KL(r | q)) over 0 <= x <= t, with q = weight e^(-f / rho); it is convex in x."""
    total = float(growth(boxed.share_out(bound, shares), f, r, side.log_weight, side.rho).sum())
    return math.inf if math.isnan(total) else total  # all terms are >= 0: the sum is NaN only if a term is


def near_terms(boxed: BoxedSide, side: Side, reg: float, r: F64, tilt: TiltedSide, near: float) -> tuple[F64, F64]:
    """Return each box's sums of rho t^2 / (2 r) and rho t log(r / q) at t = 1; log(r / q) = near sqrt(reg / rho)."""
    square, linear = near_growth(tilt.shares.reshape(-1)[: boxed.count], r, side.rho, reg, near)
    return boxed.sums(square), boxed.sums(linear)


def grown_near(boxed: BoxedSide, square: F64, linear: F64, mass: float, bound: F64) -> float:
    t = mass * bound[: boxed.boxes]
    with np.errstate(invalid="ignore", over="ignore"):
        value = np.where(t > 0, t * (t * square + linear), 0.0)
    total = float(value.sum())  # all terms are >= 0: the sum is NaN only if a term is
    return math.inf if math.isnan(total) else total


class Truncation(AllPairs):
    """The pairs that one solve skips (the mask): choose them again when needed, and add their mass to each certificate.

    The driver (ascend/carry_out.py) owns this object and passes it to each workspace.
    """

    skips = True

    def __init__(
        self, problem: Problem, start: PassState, tol: float, tol_gap: float, nats: float, rough: bool,
        correct: Any = None, correction_pairs: float = 0.0, symmetric: bool = False,
    ) -> None:  # fmt: skip
        """Make the first mask from the state ``start``; ``rough``: the state comes from another problem.

        ``correct(state, error)`` returns the log v that follows a pass, and costs as much as a pass over
        ``correction_pairs`` pairs. ``symmetric``: rows and columns are the same, solved by one potential.
        """
        self.problem, self.state = problem, start
        self.correct = correct
        self.correction_pairs = correction_pairs
        self.symmetric = symmetric
        self.last_error = math.inf  # of the pass before the last correction
        self.corrections = 0  # number of corrections made
        self.uncorrected: F64 | None = None  # log v that would have followed the pass before without a correction
        self.nats, self.rough = nats, rough
        self.settled: Stats | None = None
        self.aim(tol, tol_gap)
        self.hidden = 0.0  # bound on the mass that the last settled pass skipped
        sums = float(problem.rows.ranks.sum(start.r.sum())), float(start.s.sum())
        self.has_marginals = all(0 < x < math.inf for x in sums)  # good enough to scale K; else K is balanced
        self.boxes: Boxes | None = None
        self.kept: KeptBoxes | None = None

    def aim(self, tol: float, tol_gap: float) -> None:
        """Set the tolerances of the certificate, and the share of it that skipped pairs may take."""
        self.tol = tol
        self.tol_gap = tol_gap
        self.goal = BOXES.goal_share * tol
        self.judge = Judge(tol=tol, tol_gap=tol_gap)

    def renew(self, pool: Any, kind: type[Boxes] = Boxes, nats: float = 0.0) -> KeptBoxes | None:
        """Choose a new mask, for the last state that the guard did not drop.

        ``kind``: the class of the backend's boxes; ``nats``: least distance of a skipped pair below its share.
        """
        self.boxes = self.boxes or kind(self.problem, pool, self.symmetric)
        goal = self.goal
        least = math.log(1 / self.tol) - 2
        if self.rough:
            goal = max(self.goal, 0.1 * BOXES.rough_error)
            least = 2.0
        self.kept = self.boxes.make(self.state, goal, max(self.nats, least, nats), self.tol)
        self.has_marginals = self.has_marginals and self.boxes.wild <= BOXES.most_excess
        whole = float(self.problem.rows.n_points) * self.problem.cols.n_points
        if self.correction_pairs > BOXES.correction_passes * whole * (self.kept.share if self.kept else 1.0):
            self.correct = self.uncorrected = None
        return self.kept

    def choose(self, workspace: Any) -> None:
        """Choose a new mask, and give it to the kernels."""
        workspace.take_mask(self)

    def settle(self, workspace: Any, count: int) -> list[Stats]:
        """Make one pass over the kept pairs, and count the skipped pairs in its numbers.

        A float32 pass certifies nothing: its numbers are completed by `conclude`, only if it is the last.
        """
        narrow = workspace.narrow_pass = workspace.progress_of("narrow") > 0
        if self.correct:
            stats: list[Stats] = workspace.make_passes(1)
        else:
            stats = workspace.coarse.iterate(1)
        if narrow:
            self.look(stats[-1], workspace.iterate_state)
        else:
            self.count_skipped(stats[-1], workspace.iterate_state(), workspace.progress_of("moved"))
        if workspace.progress_of("dead") > 0 and self.has_marginals:
            self.has_marginals = False
            request_kernel(stats[-1])
        return stats

    def go_on(self, workspace: Any, stat: Stats) -> F64 | None:
        """Return the log v that follows a pass after a correction by groups; None: the pass's own next log v."""
        if not self.correct:
            return None
        narrow = workspace.narrow_pass
        if narrow:
            floor = 3 * workspace.narrow_points.error
        else:
            floor = 0.0
        comparable = narrow == workspace.compared
        workspace.compared = narrow
        return self.corrected(workspace, stat, floor, comparable)

    def conclude(self, workspace: Any, stat: Stats) -> None:
        """Count the skipped pairs in the numbers of the last pass."""
        self.count_skipped(stat, workspace.iterate_state(), workspace.progress_of("moved"))

    def count_skipped(self, stat: Stats, state: PassState, moved: float) -> None:
        """Add the skipped pairs to the numbers of a pass, once; request another mask if they cost too much.

        ``moved``: mapuot_progress.moved of the pass.
        """
        assert self.boxes
        if self.settled is stat:
            return
        self.settled = stat
        share = self.boxes.skipped(state, self.kept)
        self.hidden = share.mass
        found = stat.error
        part = share.mass / stat.mass if stat.mass > 0 else math.inf
        more = 0.0
        if share.mass:  # (found + share.error) (1 + part) + part - found
            more = share.error * (1 + part) + part * (1 + found)
        enough = self.judge.again(stat, more, self.problem.reg * share.mass, moved)
        self.keep_state(stat, state, found)
        most = max(BOXES.old_share * self.tol, 0.5 * found)
        costly = stat.status == "running" and not stat.rejected and share.error > most
        if costly or (stat.status == "converged" and not enough):
            self.goal = self.goal / 4
            self.rough = False
            request_kernel(stat)

    def look(self, stat: Stats, state: Any) -> None:
        """Request another mask after a float32 pass if one is due; ``state``: a function that returns the state."""
        if stat.status == "absorb" or (stat.status == "running" and self.rough and stat.error <= BOXES.rough_error):
            self.keep_state(stat, state(), stat.error)

    def keep_state(self, stat: Stats, state: PassState, error: float) -> None:
        """Keep the state for the next mask; once the error is small, request a mask to replace the rough one."""
        if stat.rejected or not error < 1:
            return
        self.state, self.has_marginals = state, True
        if self.rough and error <= BOXES.rough_error and stat.status == "running":
            self.rough = False
            request_kernel(stat)

    def corrected(self, workspace: Any, stat: Stats, floor: float, comparable: bool) -> F64 | None:
        """Return the log v that follows a pass after a correction; None: the pass's own next log v.

        ``floor``: error of the pass by rounding; ``comparable``: the pass before had the same precision.
        Corrections end after one that did not halve the error; if it raised the error, undo it.
        """
        error = stat.error - floor
        made = self.uncorrected is not None
        if not self.correct or (stat.rejected and not made):
            return None
        if made and (stat.rejected or (comparable and not error <= 0.5 * self.last_error)):
            uncorrected, self.correct, self.uncorrected = self.uncorrected, None, None
            if stat.rejected or not error <= self.last_error:
                return uncorrected
            following: F64 = workspace.next_log_v
            return following
        if not error <= BOXES.most_corrected_error or error <= BOXES.enough_share * self.tol:
            self.uncorrected = None
            return None
        self.last_error = error
        self.uncorrected = workspace.next_log_v
        self.corrections = self.corrections + 1
        found: F64 = self.correct(workspace.iterate_state(), error)
        return found

    def absorbed(self, x: F64, shift: float) -> tuple[F64, F64]:
        """Return the parts of log u and log v that K absorbs, so that K_ij = P_ij / (r_i s_j) times a constant."""
        log_u, _, r, s = self.state
        share = float(self.problem.rows.ranks.sum(r.sum())) / len(s)
        return without(log_u, shift, r, len(s)), without(x, 0.0, s, share)


@formula
def without(log_scale: F64, shift: float, marginal: F64, share: float) -> F64:
    """Return log scalings less a shift and, where there is mass, less log(marginal / share)."""
    moved = log_scale - shift
    return np.where(marginal > 0, moved - np.log(marginal / share), moved)


def expected(side: Side, log_scale: F64, reg: float) -> F64:
    """Estimate the marginal at a potential, if no pass has computed it."""
    if side.penalty != "kl":
        return side.weight
    with np.errstate(over="ignore", invalid="ignore"):
        marginal = side.weight * np.exp(np.minimum(-reg * log_scale / side.rho, 700.0))
    return np.where(np.isfinite(marginal), marginal, 0.0)


def order(points: F64, unit: int, threads: int | None = None) -> Any:
    """Sort points so that each run of ``unit`` points is close together, by halving along the widest coordinate."""
    from .._core import ffi, lib  # noqa: PLC0415 - as above
    from .cpu.native import pool_for  # noqa: PLC0415 - as above

    found = np.empty(len(points), np.int64)
    points = np.ascontiguousarray(points)
    pool = pool_for(threads, len(points) * BOXES.sort_entries)
    buffers = ffi.from_buffer("double *", points), unit, ffi.from_buffer("int64_t *", found)
    lib.mapuot_order(pool, *points.shape, *buffers)
    return found


class SortedPoints(NamedTuple):
    """The order of a solve's points, box by box, and the pairs that it skipped."""

    order: tuple[Any, Any]  # permutations of rows and columns, on the device of the solve's vectors
    unit: int  # points of a box
    turned: bool  # the solve's rows are the columns of the problem asked for
    kept: KeptBoxes | None = None  # the pairs kept at the end; None: all pairs
    hidden: float = 0.0  # bound on the mass of the skipped pairs

    def __reduce__(self) -> Any:
        return SortedPoints, (tuple(map(host, self.order)), *self[1:])

    def problem(self, problem: Problem) -> Problem:
        """Return a problem, turned already, with its points in this order."""
        rows, cols = (side.ordered(at) for side, at in zip(problem.sides, self.order, strict=True))
        cost = problem.cost.cloud.sorted(*self.order)
        cost.unit = self.unit
        return dataclasses.replace(problem, cost=cost, rows=rows, cols=cols)

    def back(self, tables: Any) -> tuple[F64, F64]:
        """Return vectors over the solve's rows and columns in the caller's order of the points."""
        out = tuple(namespace(x).empty(len(x)) for x in tables)
        for whole, at, x in zip(out, self.order, tables, strict=True):
            whole[at] = x
        return out[0], out[1]


class KeptPlan(Operator):
    """The plan of the kept pairs: rows come from the full plan with skipped pairs at 0, products from sorted points."""

    def __init__(
        self, problem: Problem, found: SortedPoints, plan_of: Any, full: Operator, logs: tuple[F64, F64], threads: Any
    ) -> None:  # fmt: skip
        """``full``: the plan of all pairs; ``plan_of``: the CPU's function, since its products can skip pairs."""
        super().__init__(full.cost, full.reg, full.c, full.ranks)
        self.found = found = found._replace(order=tuple(map(host, found.order)))
        self.full, (problem, logs) = full, (problem.transpose(), logs[::-1]) if found.turned else (problem, logs)
        sorted_logs = (x[at] for x, at in zip(logs, found.order, strict=True))
        self.own = plan_of(found.problem(problem), *sorted_logs, threads, found.kept)
        self.set_exponents(full.alpha, full.beta)

    @cached_property
    def skips(self) -> tuple[Any, Any, Any]:
        """(skipped, rows, cols): mask of skipped pairs of boxes; box of each row and column, in the order given."""
        kept = self.found.kept
        m, n = map(len, self.found.order)
        assert kept
        skipped = np.ones((len(kept.first) - 1, -(-n // kept.unit)), bool)
        for i, (k0, k1) in enumerate(zip(kept.first, kept.first[1:], strict=False)):
            for start, stop in kept.run[2 * k0 : 2 * k1].reshape(-1, 2):
                skipped[i, start // kept.unit : -(-stop // kept.unit)] = False
        box = [np.empty(k, np.int64) for k in (m, n)]
        for numbers, at in zip(box, self.found.order, strict=True):
            numbers[at] = np.arange(len(at)) // kept.unit
        if self.found.turned:
            return (skipped.T, box[1], box[0])
        return (skipped, box[0], box[1])

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        self.full.dtype = self.dtype
        out = self.full.plan(i0, i1, out)
        skipped, rows, cols = self.skips
        for i in range(i0, i1):
            out[i - i0][namespace(out).asarray(skipped[rows[i]][cols])] = 0
        return out

    def exponents(self, i0: int, i1: int) -> Any:
        """Return exponents, -inf for skipped pairs, except in rows and columns that keep no pair."""
        x = self.full.exponents(i0, i1)
        skipped, rows, cols = self.skips
        lonely = skipped.all(1)[:, None] | skipped.all(0)
        absent = np.take((skipped & ~lonely)[rows[i0:i1]], cols, axis=1)
        namespace(x).copyto(x, -np.inf, where=namespace(x).asarray(absent))
        return x

    @staticmethod
    def as_columns(X: Any, length: int, name: str) -> tuple[F64, bool]:
        return as_columns(host(X), length, name)

    def product(self, X: F64, turned: bool) -> F64:
        forth = turned == self.found.turned
        if forth:
            to, come = self.found.order
        else:
            to, come = self.found.order[::-1]
        found = self.own.product(X[come], not forth)
        out: F64 = np.empty_like(found)
        out[to] = found
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        cost, *sums = self.own.own_sums()
        rows, cols = self.found.back(sums)
        if self.found.turned:
            return (cost, cols, rows)
        return (cost, rows, cols)
