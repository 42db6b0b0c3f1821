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
from .settings import COARSE, CoarseSettings


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


def clusters_of(points: int, entries: int, most: int = COARSE.most_clusters) -> int:
    """Return the number of clusters, a power of 2; ``entries``: of K."""
    most = min(most, points // COARSE.least_points, int((COARSE.matrix_work * entries) ** (1 / 3)))
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
    return COARSE.wait * min(dropped, COARSE.most_waits)


class Coarse:
    """The passes of one workspace, with corrections where these are possible.

    The workspace supplies ``make_passes(count)``; ``labelled_pass(labels)``, a pass that finds the plan's mass between
    clusters and columns; ``correct(fi)``, which makes the matrix from that pass; ``correcting``, False once the guard
    has dropped a step; and ``split(X, count)``.
    """

    settings: CoarseSettings = COARSE

    def __init__(self, workspace: Any, problem: Problem, depth: int) -> None:
        self.workspace = weakref.proxy(workspace)  # a cycle would keep M until it is collected
        self.problem = problem
        self.passes, self.dropped = 0, 0
        self.corrected = False  # have passes been corrected?
        self.found: Labels | None = None  # kept alive: the core points at these arrays
        rho_a = problem.rows.scalar_rho
        rho_b = problem.cols.scalar_rho
        at_hand = problem.cost.operator in ("tiles", "points")
        self.wanted = depth > 0 and at_hand and not workspace.options.symmetric
        if rho_a is None or rho_b is None:
            self.wanted = False
        elif self.wanted:
            own = self.settings
            m, n = problem.shape
            total = problem.rows.n_points
            entries = total * n
            size = problem.rows.ranks.size
            most = int(min(own.most_clusters, math.sqrt(own.step_work * total)))
            self.count = clusters_of(m, entries, max(1, most // size))
            if problem.range_over_reg > own.sharp:
                cost = 0
            else:
                cost = own.label_work * (total + n) + own.call_work
            self.due = max(own.first, cost // max(1, entries))
            self.fi = 1 / ((1 + problem.reg / rho_a) * (1 + problem.reg / rho_b))
            of_columns = clusters_of(n, entries, own.most_clusters)
            few = min(problem.rows.ranks.sum(self.count), of_columns)
            self.wanted = entries > own.least_entries and few > 1 and size <= own.most_ranks

    def iterate(self, count: int) -> list[Stats]:
        if not self.wanted:
            only: list[Stats] = self.workspace.make_passes(count)
            return only
        stats: list[Stats] = []
        while len(stats) < count and (not stats or stats[-1].status == "running"):
            stats += self.some_passes(count - len(stats))
        return stats

    def some_passes(self, count: int) -> list[Stats]:
        """Make passes up to the next check: the guard may then have ended the correction, or a matrix may be due."""
        was_on = self.corrected and self.workspace.correcting
        if self.passes >= self.due:
            stats = self.renewed(count)
            if stats:
                self.due = self.passes + 1 + self.settings.every
                was_on = was_on or serves(stats[0])
        else:
            if was_on:
                count = min(count, self.settings.look)
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
