"""The CPU backend: numpy owns the memory, src_c does the work. The words are those of backends/contract.py."""

from ..contract import weigh
from .kernel import Kernel
from .stream import PlanStream, asarray, extrema, to_numpy
from .workspace import LEAST_BOX, QUICK_ENTRIES, QUICK_PASSES, Workspace

MAKES_COSTS = True  # costs of points, as they are needed
PAIRS = True  # a K of stored pairs
__all__ = [
    "LEAST_BOX",
    "MAKES_COSTS",
    "PAIRS",
    "QUICK_ENTRIES",
    "QUICK_PASSES",
    "Kernel",
    "PlanStream",
    "Workspace",
    "asarray",
    "extrema",
    "to_numpy",
    "weigh",
]
