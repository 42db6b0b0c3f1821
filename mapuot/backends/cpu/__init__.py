"""The CPU backend: numpy owns the memory, src_c does the work. The words are those of backends/contract.py."""

from typing import Any

from ...problem.points import FORM_BYTES
from ..contract import weigh
from . import stream, workspace
from .anderson import History
from .grid import GridStream, GridWorkspace
from .kernel import Kernel, TreePass
from .left import Left
from .marginals import Points
from .stream import asarray, costs, extrema, to_numpy
from .workspace import LEAST_BOX, ONE_POTENTIAL, QUICK_ENTRIES, QUICK_PASSES

MAKES_COSTS = True  # costs of points and grids, as they are needed


def form_bytes(cloud: Any) -> int:
    """Return how many bytes a formed matrix of points and its K may take where nobody says.

    It is as much for every cloud: a pass over a stored K takes less time than one that makes it.
    """
    return FORM_BYTES


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
    "ONE_POTENTIAL",
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
    "costs",
    "extrema",
    "form_bytes",
    "to_numpy",
    "weigh",
]
