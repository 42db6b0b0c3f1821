"""Coarse correction of passes along a tree: Newton's step for clusters of points, applied to the messages.

In a labelled pass each kernel returns the plan's mass between clusters of a marginal's points and the points of its
parent. If every cluster is treated as one point, the derivative of a pass consists of small matrices along the tree.
Newton's step for the clusters is then solved from the leaves to the root and back, like messages. The correction of a
point's state is the mean over the clusters that send mass to the point. Clusters and steps need not be exact, since
the guard may reject a step; good ones save passes. Formulas: docs/mathematics.md.
For two marginals: src_c/coarse_tmpl.c.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..arrays import host
from ..backends.coarse import Labels, clusters_of, features, find, rest
from ..backends.kernel import TINY
from ..backends.settings import COARSE
from ..cached import cached_property
from ..penalties import F64
from .problem import MultiProblem
from .reach import oriented
from .settings import TREES

Vectors = dict[int, F64]
DAMPED = 1 - 1e-10  # factor of the exchange matrices: isolated clusters then move by at most 1e10 times their residual


def clustered(problem: MultiProblem) -> list[Labels]:
    from ..backends.cpu.native import split  # noqa: PLC0415 - pick says where it is not built

    found = []
    for k, points in enumerate(problem.shape):
        pairs = [pair for pair in problem.edges if k in pair]
        tables = [features(oriented(problem.edges, k, sum(pair) - k), problem.sizes[pair]) for pair in pairs]
        entries = min(problem.edges[pair].size for pair in pairs)
        found.append(find(np.concatenate(tables, 1), split, clusters_of(points, entries // TREES.smaller)))
    return found


def serves(problem: MultiProblem) -> bool:
    """Return whether passes can be corrected, and take long enough for corrections to pay."""
    at_hand = problem.storage != "made" and problem.labels is None
    at_hand = at_hand and all(x.held and x.operator in ("tiles", "points") for x in problem.edges.values())
    return at_hand and sum(x.size for x in problem.edges.values()) > TREES.corrected_entries


class TreeCoarse:
    """The correction of one `Tree` at one reg, with its schedule; ``before``: the correction at a larger reg."""

    def __init__(self, tree: Any, before: "TreeCoarse | None") -> None:
        self.tree = weakref.proxy(tree)  # weak: the tree refers to this object, and a cycle would keep kernels alive
        self.on, self.passes, self.dropped, self.labelled = False, 0, 0, False
        self.corrected = False  # whether a pass has been corrected
        self.found: list[Labels] | None = before.found if before else None
        problem = tree.problem
        self.fi = problem.fi
        self.upwards = [k for k, _ in tree.order[::-1]]
        if self.found:
            labels = 0.0
        else:
            labels = TREES.label_reads * sum(problem.shape) / sum(x.size for x in problem.edges.values())
        if problem.xp is np:
            passes = TREES.matrix_passes + labels
        else:
            passes = TREES.device_passes
        cheap = max(TREES.cheap, TREES.sharp_cost * max(problem.sizes.values()) / problem.reg)
        self.worth = TREES.worth * passes
        self.due = COARSE.first if passes <= cheap else math.inf

    @cached_property
    def labels(self) -> list[Labels]:
        if self.found is None:
            self.found = clustered(self.tree.problem)
        return self.found

    @property
    def count(self) -> int:
        return max(x.clusters for x in self.labels)

    @cached_property
    def members(self) -> dict[int, Any]:
        """Membership matrix (points, clusters) of 0 and 1 for each parent, on the device of the kernels."""
        parents = {parent: self.labels[parent] for _, parent in self.tree.inner}
        there = self.tree.problem.xp.asarray
        return {k: there(np.eye(x.clusters, dtype=np.float32)[x.label]) for k, x in parents.items()}

    def expects(self, left: float) -> None:
        """Schedule a labelled pass if the estimated passes left make a correction pay."""
        if self.due == math.inf and left > self.worth:
            self.due = self.passes + 1

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Context of one pass; label the kernels if new matrices are due."""
        self.passes += 1
        self.labelled = self.passes >= self.due
        try:
            if self.labelled:
                for k, kernel in self.tree.kernels.items():
                    kernel.operator.label(self.labels[k])
            yield
        finally:
            for kernel in self.tree.kernels.values() if self.labelled else ():
                kernel.operator.label(None)

    def judge(self, rejected: bool) -> None:
        """After a labelled pass make its matrices; after a rejected correction make plain passes for a while."""
        if rejected and self.on:
            self.on = False
            self.dropped += 1
            self.due = self.passes + rest(self.dropped)
        elif self.labelled and not rejected:
            self.due = self.passes + COARSE.every
            try:
                self.make()
            except np.linalg.LinAlgError:
                self.on = False

    def make(self) -> None:
        """Make the matrices of the correction from the cluster masses of the kernels, from the leaves to the root.

        ``down`` maps numbers of the parent's clusters to means at each cluster; ``up`` is the reverse. Both subtract
        the mean over all clusters, since the translation handles common shifts. ``eased`` and ``solved`` are the
        inverse matrices for a marginal and for an edge.
        """
        tree, labels = self.tree, self.labels
        self.places, self.cells = self.numbered()
        self.weight = np.empty(tree.ends[-1])
        self.shares: dict[int, Any] = {}
        self.mass: Vectors = {}
        self.down: Vectors = {}
        self.up: Vectors = {}
        self.eased: Vectors = {}
        self.solved: Vectors = {}
        for k in self.upwards:
            kept = np.eye(labels[k].clusters)
            rest = 1 - self.fi[k]
            children = tree.children[k]
            inner = kept + rest * sum(self.solved[i] - kept for i in children)
            if children:
                self.eased[k] = np.asarray(np.linalg.inv(inner))
            else:
                self.eased[k] = kept
            if k == tree.root:
                continue
            r, shares = tree.kernels[k].operator.exchanged()
            r = r / r.sum()
            self.shares[k] = shares
            self.mass[k] = r
            self.weight[tree.edges[k]] = host(tree.problem.xp.asarray(r) @ shares)
            P = r[:, None] * host(shares @ self.members[tree.parent[k]])
            s = P.sum(0)
            rows = P.sum(1)  # not r: float32 shares add up to 1 up to rounding only
            self.down[k] = DAMPED * (P / np.maximum(rows, TINY)[:, None] - s)
            self.up[k] = DAMPED * (P.T / np.maximum(s, TINY)[:, None] - rows)
            answer = self.up[k] @ (rest * self.eased[k] - kept) @ self.down[k]
            self.solved[k] = np.asarray(np.linalg.inv(np.eye(len(answer)) + answer))
        self.masses = np.maximum(np.bincount(self.cells, self.weight), TINY)
        self.on = all(np.isfinite(x).all() for x in [*self.solved.values(), self.eased[tree.root]])

    def numbered(self) -> tuple[dict[int, slice], Any]:
        """Number the clusters of the parents of all edges; return the range of each edge, and each entry's cluster."""
        places = {}
        cells = []
        end = 0
        for k, parent in self.tree.inner:
            places[k] = slice(end, end + self.labels[parent].clusters)
            cells.append(self.labels[parent].label + end)
            end = places[k].stop
        return places, np.concatenate(cells)

    def step(self, residual: F64) -> F64:
        """Return J (I - J)^-1 F, the correction of the image by Newton's step for the clusters, for the whole state."""
        self.corrected = True
        tree = self.tree
        means = np.bincount(self.cells, self.weight * host(residual)) / self.masses
        F = {k: means[part] for k, part in self.places.items()}
        own: Vectors = {}  # part of the upward message that does not depend on the downward one
        met: Vectors = {}  # sum of such parts at each marginal
        found: Vectors = {}
        late: Vectors = {tree.root: np.zeros(1)}
        for k in self.upwards:
            met[k] = np.zeros(len(self.eased[k]))
            for i in tree.children[k]:
                met[k] += F[i] - self.solved[i] @ (F[i] - own[i])
            if k != tree.root:
                own[k] = self.up[k] @ ((1 - self.fi[k]) * (self.eased[k] @ met[k]))
        for k, _ in tree.order:
            found[k] = self.eased[k] @ (late[k] + met[k])
            for i in tree.children[k]:
                late[i] = self.down[i] @ (self.solved[i] @ ((1 - self.fi[k]) * found[k] - own[i] + F[i]))
        return self.at_points(found, late)

    def at_points(self, found: Vectors, late: Vectors) -> F64:
        """Interpolate the clusters' steps to the parents' points: the mean over clusters by the mass that they send."""
        tree, labels = self.tree, self.labels
        out = np.empty(tree.ends[-1])
        arrived = dict.fromkeys(self.eased, np.zeros(1))
        there = tree.problem.xp.asarray
        for k, parent in tree.inner:
            z = self.mass[k] * ((1 - self.fi[k]) * found[k] - late[k])
            edge = tree.edges[k]
            at_columns = host(there(z.astype(np.float32)) @ self.shares[k])
            out[edge] = at_columns / np.maximum(self.weight[edge], TINY) - z.sum()
            arrived[parent] = arrived[parent] + out[edge]
        for k, parent in tree.inner:
            if parent == tree.root:
                at_parent = late[parent]
            else:
                at_parent = late[parent][labels[parent].label]
            out[tree.edges[k]] = (1 - self.fi[parent]) * (arrived[parent] + at_parent) - out[tree.edges[k]]
        return out
