"""The coarse correction: which points form clusters, and in which passes the matrix between them is made.

The formulas stand in docs/mathematics.md, the arithmetic in src_c/coarse_tmpl.c and, for the oracle, in reference.py.
Clusters come from some columns of M, without coordinates; any clusters are right, good ones are quick.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..problem.cost import Cost
from ..problem.points import softened
from ..problem.problem import Problem
from ..processor import SERIAL_ENTRIES
from .contract import Stats, host

MOST_CLUSTERS = 128  # of all ranks; each costs a pass 2 rows of K; 64 take .07 more passes in the mean, 256 .06 fewer
MOST_RANKS = 512  # each has a cluster of its own at least, and the matrix all of them squared
LEAST_ENTRIES = SERIAL_ENTRIES  # of K: passes over fewer take no longer than clusters and matrices
LEAST_POINTS = 4  # of a cluster, in the mean
MATRIX = 5  # clusters^3 at most this times the entries of K: to factor the matrix then takes some passes
STEP = 8  # clusters^2 at most this times the points: to apply the matrix is then a small part of a pass
FIRST = 2  # passes before the first matrix where reg is small: 1 makes as many, 3 to 6 make 2 to 10 % more
SHARP = 150.0  # range(M) / reg beyond which reg is small; else passes come first, for as long as clusters take to find
LABELS = 3000  # passes that take as long as to find clusters: so many times rows and columns of K ...
CALLS = 5_000_000  # ... and so many entries of K for the calls of it
EVERY = 20  # passes from one matrix to the next; 40 are as good, 6 cost more than they bring
LOOK = 10  # passes from one look at the guard to the next
WAIT, MOST_WAITS = 5, 5  # passes to wait after a correction that was dropped, and the most of such waits together


class Labels(NamedTuple):
    """Own rows by clusters, where each cluster begins, and the columns' clusters; None: each column is its own."""

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
    """Return the table by whose rows points are put into clusters: coordinates, or some entries of M."""
    if cost.cloud is not None:
        return softened(cost.cloud, cost.cloud.rows, cost.cloud.columns)[0]
    columns = host(cost.landmarks()[1])
    return np.where(np.isfinite(columns), columns, largest).astype(np.float64)


def find(table: Any, split: Callable[[Any, int], Any], count: int) -> Labels:
    """Find so many clusters of the rows of a table; ``split`` labels them."""
    label = split(table, count)
    order = np.argsort(label, kind="stable")
    return Labels(order, np.searchsorted(label[order], np.arange(count + 1)), label)


def serves(stat: Stats) -> bool:
    """Tell whether a matrix can be made from a pass, which the guard must not have dropped."""
    return not stat.rejected and stat.status == "running"


def rest(dropped: int) -> int:
    """Return how many passes are made without a correction, once the guard has dropped so many."""
    return WAIT * min(dropped, MOST_WAITS)


class Coarse:
    """The passes of one workspace, plain ones and, where that is possible, corrected ones.

    The workspace supplies ``make_passes(count)``; ``labelled_pass(labels)``, one that finds the plan's mass between
    clusters and columns; ``correct(fi)``, the matrix made of it; ``correcting``, False once the guard has dropped a
    step; and ``split(X, count)``.
    """

    step: float = STEP
    most, labels, every, look, sharp = MOST_CLUSTERS, LABELS, EVERY, LOOK, SHARP  # a device has others: cuda/coarse.py

    def __init__(self, workspace: Any, problem: Problem, memory: int) -> None:
        self.workspace, self.problem = weakref.proxy(workspace), problem  # in a cycle M would stay until it is found
        self.passes, self.dropped = 0, 0
        self.corrected = False  # have passes been corrected?
        self.found: Labels | None = None  # the core points at these, whatever other solves of the cost find
        rhos = problem.rows.scalar_rho, problem.cols.scalar_rho
        at_hand = problem.cost.operator in ("tiles", "points")
        self.wanted = memory > 0 and None not in rhos and at_hand and not workspace.options.symmetric
        if self.wanted:
            m, n = problem.shape
            total = int(problem.rows.ranks.sum(m))
            entries, size = total * n, problem.rows.ranks.size
            self.count = clusters_of(m, entries, max(1, int(min(self.most, math.sqrt(self.step * total))) // size))
            cost = 0 if problem.spread > self.sharp else self.labels * (total + n) + CALLS
            self.due = max(FIRST, cost // max(1, entries))
            self.fi = 1 / math.prod(1 + problem.reg / rho for rho in rhos if rho is not None)
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
        """Make passes up to the next look, by when the guard may have ended the correction, or a new matrix be due."""
        was_on = self.workspace.correcting
        if self.passes >= self.due:
            stats = self.renewed(count)
            if stats:
                self.due = self.passes + 1 + self.every
                was_on = was_on or serves(stats[0])
        else:
            stats = self.workspace.make_passes(min(count, self.due - self.passes, self.look if was_on else count))
        self.passes += len(stats)
        if was_on and not self.workspace.correcting:
            self.dropped += 1
            last = max((i for i, stat in enumerate(stats) if stat.rejected), default=0)
            self.due = self.passes - len(stats) + last + 1 + rest(self.dropped)
        return stats

    def renewed(self, count: int) -> list[Stats]:
        """Make a labelled pass, the matrix that it gives, and the passes that follow at once; ``count`` at most."""
        if self.found is None:
            cost = self.problem.cost if self.problem.cost.cloud is None else self.problem.cost.cloud
            self.found = FOUND.get(cost)  # by an earlier solve of this cost
            if self.found is None or self.found.clusters != self.count:
                table = features(self.problem.cost, self.problem.M_max)
                self.found = FOUND[cost] = find(table, self.workspace.split, self.count)._replace(label=None)
        stats: list[Stats] = self.workspace.labelled_pass(self.found)
        if serves(stats[0]):
            self.workspace.correct(self.fi)
            self.corrected = True
        return stats
