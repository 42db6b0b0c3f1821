"""The CPU backend: numpy owns the memory, src_c does the work. backends/contract.py lists the functions."""

from typing import Any

from ...problem.points import FORM_BYTES
from ...processor import memory_bytes
from ..contract import weigh
from ..operator import parts_of
from .grid import GridOperator, grid_workspace
from .marginals import History, Left, Points, TreePass
from .operator import MANY, HostOperator, asarray, costs, extrema, formed, is_symmetric, to_numpy
from .plain import slopes
from .workspace import (
    LEAST_BOX,
    ONE_POTENTIAL,
    QUICK_ENTRIES,
    QUICK_PASSES,
    RANKS_TOGETHER,
    SKIPS_TOGETHER,
    HostWorkspace,
)

name = "cpu"
MOST_FACTORED = 8192  # points of the smaller side: a factor takes 2 GB and 30 s there (one core)
MAKES_COSTS = True  # this backend makes the costs of points and grids itself


def form_bytes(cloud: Any) -> int:
    """Return how many bytes a formed matrix of points and its K may take if the caller sets no limit.

    A pass over a stored K is faster than a pass that makes K. In few dimensions the gain does not pay for forming a
    large K: for 4000 points at reg .05 of the range, passes that make K take .6 and .7 of the time in 2 and 3
    dimensions, 1.4 in 20. In many dimensions a stored K may take a quarter of the memory: 8300 points in 300
    dimensions take 1/10 of the time.
    """
    if cloud.dim >= MANY:
        return max(FORM_BYTES, memory_bytes() // 4)
    return min(FORM_BYTES, 16 << (17 + 2 * min(cloud.dim, 5)))


def keeps_pairs(problem: Any) -> bool:
    return True


def Workspace(problem: Any, options: Any, skip: Any = None) -> Any:  # noqa: N802 - the word of the contract
    """Make the workspace of a solve: with a stored K, with rows that passes make, or on a grid."""
    if problem.cost.operator == "products":
        return grid_workspace(problem, options)
    return HostWorkspace(problem, options, skip)


def operator_of(cost: Any, *parts: Any, **more: Any) -> Any:
    return (GridOperator if cost.operator == "products" else HostOperator)(cost, *parts, **more)


def plan_of(problem: Any, log_u: Any, log_v: Any, threads: int | None = None, kept: Any = None) -> Any:
    """Make the plan of given potentials; ``kept``: restrict it to these pairs of points."""
    more = {} if kept is None else {"kept": kept}
    return operator_of(*parts_of(problem), threads, **more).take(*problem.exponents(log_u, log_v))
