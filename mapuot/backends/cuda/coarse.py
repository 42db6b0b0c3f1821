"""The coarse correction on a device: scheduled by backends/coarse.py; coarse.cu finds clusters and makes the matrix.

No read of the host comes in between: a pass, the kernels that make the matrix from its state, and further passes are
enqueued at once.
"""

import math
from typing import Any

import cupy as cp
import numpy as np

from ...arrays import host
from ...contract import Stats
from ...problem.cost import LANDMARKS, some_of
from ..coarse import FOUND, Coarse, Labels, clusters_of, serves
from ..records import put
from ..settings import CoarseSettings
from .kernels import CLUSTERS, STORES, Job, begin, by_value, kernel
from .launch import TRACE_PASSES

TEAMS = 512  # threads of a block: 8 for each cluster
MOST_DEPTH = 20


def words_of(n: int, ld: int) -> dict[str, int]:
    words = {"share": n, "matrix": CLUSTERS * (CLUSTERS + 1), "mean": CLUSTERS, "mean_dF": MOST_DEPTH * CLUSTERS}
    return words | {"sums": CLUSTERS * ld, "blocks": CLUSTERS * CLUSTERS}


def words_of_clusters(m: int, n: int, ld: int) -> int:
    """Bound the memory of the correction: its arrays and labels, and the rows and columns of M that give the labels."""
    return sum(words_of(n, ld).values()) + 2 * m + n + LANDMARKS * max(m, n)


def jobs(store: int, cost: int) -> list[Job]:
    """List the kernels of a correction; ``cost``: type of the table for finding clusters, 1 for float32."""
    names = "order_rows", "cluster_rows", "cluster_blocks", "cluster_products", "cluster_means", "cluster_matrix"
    nearest = "coarse.cu", "nearest", {"STORE": store, "COST": cost}
    return [nearest, *(("coarse.cu", name, {"STORE": store, "COST": 0}) for name in names)]


DEVICE_COARSE = CoarseSettings(
    most_clusters=CLUSTERS,
    step_work=math.inf,  # a block has 8 threads for each cluster: fewer clusters save no time
    # 5000 columns: a matrix costs 1.4 ms and saves a third; most solves take 20 to 40 passes of .03 ms
    sharp=math.inf,
    # labels and a matrix take 1 ms of launches at any size, as long as 16 passes of 8000 columns
    label_work=80000,
    every=40,
    look=TRACE_PASSES,  # a launch ends by itself when the guard drops a step
)


class DeviceCoarse(Coarse):
    settings = DEVICE_COARSE

    def renewed(self, count: int) -> list[Stats]:
        workspace = self.workspace
        if not hasattr(self, "arrays"):
            self.open()
        workspace.passes(1)
        self.make_matrix()
        if count > 1:
            workspace.passes(min(count - 1, self.settings.every), 1)
        stats: list[Stats] = workspace.read()
        self.corrected = self.corrected or serves(stats[0])
        return stats

    def open(self) -> None:
        cost = self.problem.cost
        state = self.workspace.state
        n = self.problem.shape[1]
        ld = self.workspace.ld
        begin(jobs(STORES[self.workspace.dtype], int(self.problem.M.dtype == np.float32)))
        if cost not in FOUND:
            FOUND[cost] = self.find()
        self.arrays = FOUND[cost]._asdict() | {name: cp.zeros(count) for name, count in words_of(n, ld).items()}
        put(state["coarse"], self.arrays)
        self.workspace.launch.graphs.clear()  # graphs contain a copy of the old state

    def find(self) -> Labels:
        """Find the cluster of each column, the same on all ranks, and this rank's rows by cluster."""
        M, ranks = self.problem.M, self.problem.rows.ranks
        m, n = M.shape
        rows, cols = (clusters_of(k, self.problem.rows.n_points * n, self.settings.most_clusters) for k in (m, n))
        own = np.random.default_rng(2)
        common = np.random.default_rng(1)  # ranks share the columns
        marks = own.choice(m, min(m, rows), replace=False), common.choice(n, min(n, cols), replace=False)
        if isinstance(M, cp.ndarray) and ranks.size == 1:
            along, across = (stride // M.itemsize for stride in M.strides)
            some = some_of((m, n))
            col_label = self.nearest(M, along, across, some[0], marks[1], n)
            row_label = self.nearest(M, across, along, some[1], marks[0], m)
        else:
            some_rows, some_columns = self.problem.cost.landmarks()
            X = np.vstack(ranks.all(host(some_rows[: -(-LANDMARKS // ranks.size)])))[:LANDMARKS]
            Y = np.ascontiguousarray(host(some_columns).T)
            col_label = self.nearest(cp.asarray(X), n, 1, np.arange(len(X)), marks[1], n)
            row_label = self.nearest(cp.asarray(Y), m, 1, np.arange(len(Y)), marks[0], m)
        order = cp.empty(m, np.int64)
        first = cp.empty(CLUSTERS + 1, np.int64)
        self.kernel("order_rows")((1,), (TEAMS,), (row_label, np.int64(m), order, first))
        return Labels(order, first, col_label)

    def nearest(self, X: Any, across: int, along: int, sample: Any, mark: Any, points: int) -> Any:
        """Label each point i, with coordinates X[sample across + i along], by the nearest point in ``mark``."""
        label = cp.empty(points, np.int64)
        indices = cp.asarray(np.concatenate([sample, mark]))
        few = np.int32(len(sample))
        words = np.int64(points), indices[few:], np.int32(len(mark)), np.float64(self.problem.M_max), label
        X_at = X, np.int64(across), np.int64(along), indices[:few], few
        self.kernel("nearest", X.dtype)((-(-points // 256),), (256,), (*X_at, *words))
        return label

    def make_matrix(self) -> None:
        """Make the matrix from the state after the last pass, unless the guard dropped a step there."""
        workspace, ranks = self.workspace, self.problem.ranks
        state = by_value(workspace.state)
        parity = np.int32(workspace.launch.parity)
        chunk = 256 * 16 // workspace.operator.K.itemsize
        self.kernel("cluster_rows")((-(-workspace.ld // chunk), CLUSTERS), (256,), (state, parity))
        for name in ("cluster_blocks", "cluster_products"):
            self.kernel(name)((CLUSTERS,), (TEAMS,), (state, parity))
        if ranks.size > 1:
            with ranks.adding(self.arrays["matrix"]):
                pass
        self.kernel("cluster_means")((MOST_DEPTH + 1,), (TEAMS,), (state, parity))
        self.kernel("cluster_matrix")((1,), (TEAMS,), (state, parity, np.float64(self.fi)))

    def kernel(self, name: str, cost: Any = np.float64) -> Any:
        return kernel("coarse.cu", name, STORE=STORES[self.workspace.dtype], COST=int(cost == np.float32))
