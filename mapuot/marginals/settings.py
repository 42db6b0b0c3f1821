"""Numbers that decide in `marginals/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..contract import SMALL_ENTRIES
from ..processor import SERIAL_ENTRIES
from ..settings import Settings


@dataclass
class TreeSettings(Settings):
    """How kernels along a tree are stored (problem.py), and when clusters correct its steps (coarse.py)."""

    small_entries: int = SMALL_ENTRIES  # of all K together; more are stored in float32 if tol allows
    corrected_entries: int = SERIAL_ENTRIES  # of all costs together; for fewer, clusters cost as much as the passes
    smaller: int = 10  # clusters^3 <= entries / 2 of an edge (two marginals: 5 entries), for ten times the products
    # Clusters cost 2 passes, and 2800 reads of all rows and columns; on a GPU as much as 20 passes (10 x 1000 points)
    # to 50 (5000).
    matrix_passes: float = 2.0
    label_reads: int = 2800
    device_passes: float = 25.0
    # Find clusters at once if they cost at most 3 passes, or .06 max |C| / reg passes. Else find them once the passes
    # left are 2.2 times their cost: they save .45 of the passes left.
    cheap: float = 3.0
    sharp_cost: float = 0.06
    worth: float = 2.2


TREES = TreeSettings()
