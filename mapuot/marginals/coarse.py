"""Steps along a tree corrected by what clusters of points exchange, as those of two marginals are, on messages.

In a labelled pass each kernel tells the plan's mass between clusters of a marginal's points and the points of its
parent. With every cluster taken for one point the derivative of a pass is made of small matrices along the tree, so
that Newton's step for the clusters comes from the leaves and goes back from the root, as messages do. What it adds to
the next state is found at each point by the clusters that the point gets its mass from. Any clusters are right, and so
is any step, which the guard may drop; good ones are quick. Formulas: docs/mathematics.md.
For two marginals: src_c/coarse_tmpl.c.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..backends.coarse import EVERY, FIRST, Labels, clusters_of, features, find, rest
from ..backends.contract import host
from ..backends.kernel import TINY
from ..cached import cached_property
from ..penalties import F64
from ..processor import SERIAL_ENTRIES
from .problem import MultiProblem
from .reach import oriented

Vectors = dict[int, F64]
SMALLER = 10  # clusters^3 at most half the entries of an edge, for five times as many of a pair: ten times its products
MATRICES, LABEL_READS = 2.0, 2800  # clusters take as long as 2 passes and 2800 reads of all rows and columns
DEVICE = 25.0  # passes that clusters take on a GPU: 20 (of 10 x 1000 points) to 50 (5000)
CHEAP, SHARP_COST, WORTH = 3.0, 0.06, 2.2  # clusters are found at once where they take 3 passes, or .06 costs / reg,
# at most, and else where 2.2 times as many passes are left: they save .45 of these
DAMPED = 1 - 1e-10  # of what clusters exchange: what exchanges nothing else moves by 1e10 of its residual at most


def clustered(problem: MultiProblem) -> list[Labels]:
    from ..backends.cpu.native import split  # noqa: PLC0415 - pick says where it is not built

    found = []
    for k, points in enumerate(problem.shape):
        pairs = [pair for pair in problem.edges if k in pair]
        tables = [features(oriented(problem.edges, k, sum(pair) - k), problem.sizes[pair]) for pair in pairs]
        entries = min(problem.edges[pair].size for pair in pairs)
        found.append(find(np.concatenate(tables, 1), split, clusters_of(points, entries // SMALLER)))
    return found


def serves(problem: MultiProblem) -> bool:
    """Tell whether steps can be corrected, and passes take long enough for it to pay."""
    at_hand = problem.storage != "made" and problem.labels is None
    at_hand = at_hand and all(x.held and x.operator in ("tiles", "points") for x in problem.edges.values())
    return at_hand and sum(x.size for x in problem.edges.values()) > SERIAL_ENTRIES


class TreeCoarse:
    """The correction of one `Tree` at one reg, and in which passes it is made; ``before``: that of a larger reg."""

    def __init__(self, tree: Any, before: "TreeCoarse | None") -> None:
        self.tree = weakref.proxy(tree)  # the tree holds this: a circle would keep kernels until it is collected
        self.on, self.passes, self.dropped, self.labelled = False, 0, 0, False
        self.corrected = False  # have steps been corrected?
        self.found: list[Labels] | None = before.found if before else None
        problem = tree.problem
        self.fi = problem.fi
        self.upwards = [k for k, _ in tree.order[::-1]]
        labels = 0.0 if self.found else LABEL_READS * sum(problem.shape) / sum(x.size for x in problem.edges.values())
        passes = MATRICES + labels if problem.xp is np else DEVICE
        cheap = max(CHEAP, SHARP_COST * max(problem.sizes.values()) / problem.reg)
        self.worth, self.due = WORTH * passes, FIRST if passes <= cheap else math.inf

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
        """Matrices of each parent, where its kernels lie: ones where a point is in a cluster."""
        parents, there = {parent: self.labels[parent] for _, parent in self.tree.inner}, self.tree.problem.xp.asarray
        return {k: there(np.eye(x.clusters, dtype=np.float32)[x.label]) for k, x in parents.items()}

    def expects(self, left: float) -> None:
        """Take up how many passes are left without correction."""
        if self.due == math.inf and left > self.worth:
            self.due = self.passes + 1

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Surround a pass, which is labelled where matrices are due."""
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
        """Make matrices of a labelled pass, or plain steps for some passes where the guard has dropped one."""
        if rejected and self.on:
            self.on, self.dropped = False, self.dropped + 1
            self.due = self.passes + rest(self.dropped)
        elif self.labelled and not rejected:
            self.due = self.passes + EVERY
            try:
                self.make()
            except np.linalg.LinAlgError:
                self.on = False

    def make(self) -> None:
        """Make matrices of what the kernels have told, from the leaves to the root.

        ``down`` takes a cluster to the mean of its parent's, ``up`` the other way, both less the mean of all: what is
        common to all is left to the translation. ``eased`` and ``solved`` solve for a marginal and for an edge.
        """
        tree, labels = self.tree, self.labels
        self.places, self.cells = self.numbered()
        self.weight = np.empty(tree.ends[-1])
        self.shares: dict[int, Any] = {}
        self.mass: Vectors = {}
        self.down, self.up, self.eased, self.solved = ({}, {}, {}, {})  # type: tuple[Vectors, Vectors, Vectors, Vectors]
        for k in self.upwards:
            kept, rest, children = np.eye(labels[k].clusters), 1 - self.fi[k], tree.children[k]
            inner = kept + rest * sum(self.solved[i] - kept for i in children)
            self.eased[k] = np.asarray(np.linalg.inv(inner)) if children else kept
            if k == tree.root:
                continue
            r, shares = tree.kernels[k].operator.exchanged()
            r, self.shares[k] = r / r.sum(), shares
            self.mass[k], self.weight[tree.edges[k]] = r, host(tree.problem.xp.asarray(r) @ shares)
            P = r[:, None] * host(shares @ self.members[tree.parent[k]])
            s, rows = P.sum(0), P.sum(1)  # not r: of float32 shares, which add up to 1 but for their rounding
            self.down[k] = DAMPED * (P / np.maximum(rows, TINY)[:, None] - s)
            self.up[k] = DAMPED * (P.T / np.maximum(s, TINY)[:, None] - rows)
            answer = self.up[k] @ (rest * self.eased[k] - kept) @ self.down[k]
            self.solved[k] = np.asarray(np.linalg.inv(np.eye(len(answer)) + answer))
        self.masses = np.maximum(np.bincount(self.cells, self.weight), TINY)
        self.on = all(np.isfinite(x).all() for x in [*self.solved.values(), self.eased[tree.root]])

    def numbered(self) -> tuple[dict[int, slice], Any]:
        """Number the clusters of all edges' parents, one edge behind the other, and find that of each state's entry."""
        places, cells, end = {}, [], 0
        for k, parent in self.tree.inner:
            places[k] = slice(end, end + self.labels[parent].clusters)
            cells.append(self.labels[parent].label + end)
            end = places[k].stop
        return places, np.concatenate(cells)

    def step(self, residual: F64) -> F64:
        """Return J (I - J)^-1 F: what Newton's step for the clusters adds to the image, at all entries of the state."""
        self.corrected = True
        tree, means = self.tree, np.bincount(self.cells, self.weight * host(residual)) / self.masses
        F = {k: means[part] for k, part in self.places.items()}
        own: Vectors = {}  # what goes up whatever comes down
        met: Vectors = {}  # what of that stays at each marginal
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
        """Return the image of clusters' steps at parents' points, by the clusters that each gets its mass from."""
        tree, labels = self.tree, self.labels
        out, arrived = np.empty(tree.ends[-1]), dict.fromkeys(self.eased, np.zeros(1))
        there = tree.problem.xp.asarray
        for k, parent in tree.inner:
            z = self.mass[k] * ((1 - self.fi[k]) * found[k] - late[k])
            edge = tree.edges[k]
            at_columns = host(there(z.astype(np.float32)) @ self.shares[k])
            out[edge] = at_columns / np.maximum(self.weight[edge], TINY) - z.sum()
            arrived[parent] = arrived[parent] + out[edge]
        for k, parent in tree.inner:
            at_parent = late[parent] if parent == tree.root else late[parent][labels[parent].label]
            out[tree.edges[k]] = (1 - self.fi[parent]) * (arrived[parent] + at_parent) - out[tree.edges[k]]
        return out
