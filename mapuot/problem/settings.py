"""Numbers that decide in `problem/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass
class PointSettings(Settings):
    """Where the costs and the vectors of points lie (points.py, problem.py)."""

    # "auto" forms the matrix of fewer pairs (2^30 bytes with its K), and skips some of more.
    auto_entries: int = 1 << 26
    stays_from: int = 1 << 15  # vectors stay on a GPU: 96 ms, not 122, at 10^5 points, but 22, not 9, at 2000 (H100)


POINTS = PointSettings()


@dataclass
class BlockSettings(Settings):
    """How much of M, or of the plan, is read or made at once."""

    cost_bytes: int = 1 << 26  # of rows that a function or a file gives (cost.py)
    stored_pairs: int = 1 << 22  # of a file: 50 MB of costs and 64-bit indices, and temporaries (files/pairs.py)
    plan_entries: int = 1 << 22  # of the plan, which streamed operations hold at once (backends/draw.py)


BLOCKS = BlockSettings()
