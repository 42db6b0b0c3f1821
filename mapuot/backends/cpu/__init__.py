"""The CPU backend: numpy owns the memory, src_c does the work; `HostBackend` has the methods of ../../contract.py."""

from typing import Any

from ...contract import BatchEngine, Options
from ...problem.points import FORM_BYTES
from ...processor import memory_bytes
from ..operator import parts_of
from . import core_solve, log_matmul, marginals
from .batch import HostBatches
from .grid import GridOperator, grid_workspace
from .operator import MANY, HostArrays, HostOperator
from .workspace import HostWorkspace


class HostBackend(HostArrays):
    """The C core on arrays in memory."""

    makes_costs = True
    has_one_potential = True
    ranks_share_one_potential = True
    skips_with_one_potential = True
    least_box = 16  # vectors are padded to 16 columns; a tile has 8 rows
    most_factored = 8192  # points: a factor of that size takes 2 GB and 30 s (one core)
    quick_entries = 1 << 20  # a pass over so many entries takes 1 ms
    quick_passes = 16

    def workspace(self, problem: Any, options: Options, skip: Any = None) -> Any:
        """Make the workspace of a solve: with a stored K, with rows that passes make, or on a grid."""
        if problem.cost.operator == "products":
            return grid_workspace(problem, options)
        return HostWorkspace(problem, options, skip)

    def operator_of(self, cost: Any, *parts: Any, **more: Any) -> Any:
        """Make the operator of a cost; ``kept``: restrict it to these pairs of points."""
        if cost.operator == "products":
            kind: type[HostOperator] = GridOperator
        else:
            kind = HostOperator
        return kind(cost, *parts, **more)

    def plan_of(self, problem: Any, log_u: Any, log_v: Any, threads: int | None = None, kept: Any = None) -> Any:
        """Make the plan of given potentials; ``kept``: restrict it to these pairs of points."""
        if kept is None:
            more = {}
        else:
            more = {"kept": kept}
        operator = self.operator_of(*parts_of(problem), threads, **more)
        return operator.set_exponents(*problem.exponents(log_u, log_v))

    def keeps_pairs(self, problem: Any) -> bool:
        return True

    def form_bytes(self, cloud: Any) -> int:
        """Return how many bytes a formed matrix of points and its K may take if the caller sets no limit.

        A pass over a stored K is faster than a pass that makes K. In few dimensions the gain does not pay for forming a
        large K: for 4000 points at reg .05 of the range, passes that make K take .6 and .7 of the time in 2 and 3
        dimensions, 1.4 in 20. In many dimensions a stored K may take a quarter of the memory: 8300 points in 300
        dimensions take 1/10 of the time.
        """
        if cloud.dim >= MANY:
            return max(FORM_BYTES, memory_bytes() // 4)
        return min(FORM_BYTES, 16 << (17 + 2 * min(cloud.dim, 5)))

    def slopes(self, task: Any, which: Any, exponents: Any, wanted: Any, threads: int | None) -> list[Any]:
        return core_solve.slopes(task, which, exponents, wanted, threads)

    def batches(self) -> BatchEngine:
        return HostBatches()

    def log_product(self, A: Any, B: Any, exact: bool, threads: int | None) -> Any:
        return log_matmul.product(A, B, exact, threads)

    def tree_pass(self, edges: Any, problem: Any) -> Any:
        return marginals.TreePass(edges, problem)

    def marginal_points(self, *sizes: Any) -> Any:
        return marginals.Points(*sizes)

    def remaining_marginals(self, *sizes: Any) -> Any:
        return marginals.RemainingMarginals(*sizes)

    def history(self, depth: int, ends: Any) -> Any:
        return marginals.History(depth, ends)


backend = HostBackend()
