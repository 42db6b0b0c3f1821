"""The coarse correction: find clusters of points, and decide when passes make the matrix between clusters.

docs/mathematics.md has the formulas, src_c/coarse_tmpl.c the arithmetic, reference.py the oracle. Clusters come from
coordinates or, without them, from some columns of M. Any clusters are correct; good clusters save passes.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import host
from ..contract import Stats
from ..problem.cost import Cost
from ..problem.points import softened
from ..problem.problem import Problem
from ..processor import SERIAL_ENTRIES

MOST_CLUSTERS = 128  # of all ranks; each costs a pass 2 rows of K; 64 take .07 more passes on average, 256 .06 fewer
MOST_RANKS = 512  # each rank has at least one cluster, and the matrix has ranks^2 entries
LEAST_ENTRIES = SERIAL_ENTRIES  # of K: for a smaller K clusters and matrices cost as much as the passes
LEAST_POINTS = 4  # of a cluster, on average
MATRIX = 5  # clusters^3 <= MATRIX entries of K: factoring the matrix then costs a few passes
STEP = 8  # clusters^2 <= STEP points: applying the matrix is then a small part of a pass
FIRST = 2  # passes before the first matrix where reg is small: 1 takes as many passes, 3 to 6 take 2 to 10 % more
SHARP = 150.0  # reg is small if range(M) / reg is larger; else plain passes come first: see LABELS and CALLS
LABELS = 3000  # cost of finding clusters, in entries of K that passes read in this time, for each row and column, ...
CALLS = 5_000_000  # ... and the fixed cost, in entries of K
EVERY = 20  # passes from one matrix to the next; 40 are as good, 6 cost more than they save
LOOK = 10  # passes between two checks of the guard
WAIT, MOST_WAITS = 5, 5  # a dropped correction adds 5 passes without one, up to 5 times 5


class Labels(NamedTuple):
    """Rows of this rank sorted by cluster, the start of each cluster, and each column's cluster.

    ``label`` is None where each column is a cluster of its own.
    """

    order: Any
    first: Any
    label: Any = None

    @property
    def clusters(self) -> int:
        return len(self.first) - 1


FOUND: weakref.WeakKeyDictionary[Cost, Labels] = weakref.WeakKeyDictionary()  # clusters of a cost, for its next solve


def clusters_of(points: int, entries: int, most: int = MOST_CLUSTERS) -> int:
    most = min(most, points // LEAST_POINTS, int((MATRIX * entries) ** (1 / 3)))
    return 1 << max(0, most.bit_length() - 1)


def features(cost: Cost, largest: float) -> Any:
    """Return a table with a row for each point to cluster: its coordinates, or some of its entries of M."""
    if cost.cloud is not None:
        return softened(cost.cloud, cost.cloud.rows, cost.cloud.columns)[0]
    columns = host(cost.landmarks()[1])
    return np.where(np.isfinite(columns), columns, largest).astype(np.float64)


def find(table: Any, split: Callable[[Any, int], Any], count: int) -> Labels:
    """Find ``count`` clusters of the rows of a table; ``split`` labels the rows."""
    label = split(table, count)
    order = np.argsort(label, kind="stable")
    return Labels(order, np.searchsorted(label[order], np.arange(count + 1)), label)


def serves(stat: Stats) -> bool:
    """Tell whether a pass can give a matrix: the guard must not have dropped it."""
    return not stat.rejected and stat.status == "running"


def rest(dropped: int) -> int:
    """Return how many passes go without a correction after the guard has dropped ``dropped`` corrections."""
    return WAIT * min(dropped, MOST_WAITS)


class Coarse:
    """The passes of one workspace, with corrections where these are possible.

    The workspace supplies ``make_passes(count)``; ``labelled_pass(labels)``, a pass that finds the plan's mass between
    clusters and columns; ``correct(fi)``, which makes the matrix from that pass; ``correcting``, False once the guard
    has dropped a step; and ``split(X, count)``.
    """

    step: float = STEP
    most, labels, every, look, sharp = MOST_CLUSTERS, LABELS, EVERY, LOOK, SHARP  # a device has others: cuda/coarse.py

    def __init__(self, workspace: Any, problem: Problem, memory: int) -> None:
        self.workspace = weakref.proxy(workspace)  # a cycle would keep M until it is collected
        self.problem = problem
        self.passes, self.dropped = 0, 0
        self.corrected = False  # have passes been corrected?
        self.found: Labels | None = None  # kept alive: the core points at these arrays
        rho_a = problem.rows.scalar_rho
        rho_b = problem.cols.scalar_rho
        at_hand = problem.cost.operator in ("tiles", "points")
        self.wanted = memory > 0 and at_hand and not workspace.options.symmetric
        if rho_a is None or rho_b is None:
            self.wanted = False
        elif self.wanted:
            m, n = problem.shape
            total = int(problem.rows.ranks.sum(m))
            entries = total * n
            size = problem.rows.ranks.size
            self.count = clusters_of(m, entries, max(1, int(min(self.most, math.sqrt(self.step * total))) // size))
            if problem.spread > self.sharp:
                cost = 0
            else:
                cost = self.labels * (total + n) + CALLS
            self.due = max(FIRST, cost // max(1, entries))
            self.fi = 1 / ((1 + problem.reg / rho_a) * (1 + problem.reg / rho_b))
            few = min(problem.rows.ranks.sum(self.count), clusters_of(n, entries, self.most))
            self.wanted = entries > LEAST_ENTRIES and few > 1 and size <= MOST_RANKS

    def iterate(self, count: int) -> list[Stats]:
        if not self.wanted:
            only: list[Stats] = self.workspace.make_passes(count)
            return only
        stats: list[Stats] = []
        while len(stats) < count and (not stats or stats[-1].status == "running"):
            stats += self.some(count - len(stats))
        return stats

    def some(self, count: int) -> list[Stats]:
        """Make passes up to the next check: the guard may then have ended the correction, or a matrix may be due."""
        was_on = self.workspace.correcting
        if self.passes >= self.due:
            stats = self.renewed(count)
            if stats:
                self.due = self.passes + 1 + self.every
                was_on = was_on or serves(stats[0])
        else:
            if was_on:
                count = min(count, self.look)
            stats = self.workspace.make_passes(min(count, self.due - self.passes))
        self.passes += len(stats)
        if was_on and not self.workspace.correcting:
            self.dropped += 1
            last = max((i for i, stat in enumerate(stats) if stat.rejected), default=0)
            self.due = self.passes - len(stats) + last + 1 + rest(self.dropped)
        return stats

    def renewed(self, count: int) -> list[Stats]:
        """Make a labelled pass and its matrix; a device makes further passes at once, ``count`` in all at most."""
        if self.found is None:
            if self.problem.cost.cloud is None:
                cost = self.problem.cost
            else:
                cost = self.problem.cost.cloud
            self.found = FOUND.get(cost)  # by an earlier solve of this cost
            if self.found is None or self.found.clusters != self.count:
                table = features(self.problem.cost, self.problem.M_max)
                self.found = FOUND[cost] = find(table, self.workspace.split, self.count)._replace(label=None)
        stats: list[Stats] = self.workspace.labelled_pass(self.found)
        if serves(stats[0]):
            self.workspace.correct(self.fi)
            self.corrected = True
        return stats
