"""The CPU backend: numpy owns the memory, src_c does the work. The words are those of backends/contract.py."""

from typing import Any

from ..contract import weigh
from . import stream, workspace
from .anderson import History
from .grid import GridStream, GridWorkspace
from .kernel import Kernel, TreePass
from .left import Left
from .marginals import Points
from .stream import asarray, extrema, to_numpy
from .workspace import LEAST_BOX, QUICK_ENTRIES, QUICK_PASSES

MAKES_COSTS = True  # costs of points and grids, as they are needed


def Workspace(problem: Any, options: Any, skip: Any = None) -> Any:  # noqa: N802 - the word of the contract
    """Make the workspace of a solve: of a K, of rows that passes make, or of a grid."""
    if problem.cost.operator == "products":
        return GridWorkspace(problem, options)
    return workspace.Workspace(problem, options, skip)


def PlanStream(problem: Any, log_u: Any, log_v: Any, threads: int | None = None, kept: Any = None) -> Any:  # noqa: N802
    """The plan of given potentials."""
    if problem.cost.operator == "products":
        return GridStream(problem, log_u, log_v, threads)
    return stream.PlanStream(problem, log_u, log_v, threads, kept)


__all__ = [
    "LEAST_BOX",
    "MAKES_COSTS",
    "QUICK_ENTRIES",
    "QUICK_PASSES",
    "History",
    "Kernel",
    "Left",
    "PlanStream",
    "Points",
    "TreePass",
    "Workspace",
    "asarray",
    "extrema",
    "to_numpy",
    "weigh",
]
