"""The CPU backend: numpy owns the memory, src_c does the work. The words are those of backends/contract.py."""

from typing import Any

from ...problem.grid import Grid
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


def Workspace(problem: Any, options: Any) -> Any:  # noqa: N802 - the word of the contract
    """One solve, of a K or of rows that are made, or on a grid."""
    return (GridWorkspace if isinstance(problem.cost, Grid) else workspace.Workspace)(problem, options)


def PlanStream(problem: Any, log_u: Any, log_v: Any, threads: int | None = None) -> Any:  # noqa: N802
    """The plan of given potentials."""
    kind = GridStream if isinstance(problem.cost, Grid) else stream.PlanStream
    return kind(problem, log_u, log_v, threads)


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
