"""Numbers that decide in `problem/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass
class PointSettings(Settings):
    """Where the costs and the vectors of points lie (points.py, problem.py)."""

    # "auto" forms the matrix of fewer pairs (2^30 bytes with its K), and skips some of more.
    auto_entries: int = 1 << 26
    stays_from: int = 1 << 15  # vectors stay on a GPU: 96 ms, not 122, at 10^5 points, but 22, not 9, at 2000 (H100)
    most_formed: int = 1 << 27  # entries of a matrix that da.py and wot.py form although points would do: 1 GiB


POINTS = PointSettings()


@dataclass
class BlockSettings(Settings):
    """How much of M, or of the plan, is read or made at once."""

    cost_bytes: int = 1 << 26  # of rows that a function or a file gives (cost.py)
    stored_pairs: int = 1 << 22  # of a file: 50 MB of costs and 64-bit indices, and temporaries (files/pairs.py)
    distances: int = 1 << 20  # of a block in the search for neighbours (api/certify.py)
    searched_pairs: int = 1 << 22  # in one search for parts: 180 MB (sparse.py)
    plan_entries: int = 1 << 22  # of the plan, which streamed operations hold at once (backends/draw.py)


BLOCKS = BlockSettings()


@dataclass
class StatisticSettings(Settings):
    """How many costs give the unit of ``scale_cost`` (scale.py)."""

    all_costs: int = 1 << 22  # up to so many are all read
    costs_at_once: int = 1 << 26  # that are formed at once on a device: 512 MiB


STATISTICS = StatisticSettings()


@dataclass
class ExtentSettings(Settings):
    """How the extent of M is found (problem.py); twin: src_c/solve.c."""

    lines: int = 16  # points of the other side, of equal shares of its mass, for the distances of a point
    most_far: int = 4096  # points of a side whose distances are taken
    tail: float = 2.0  # times the distance of the farthest points except a few outliers: a longer range is cut there


EXTENT = ExtentSettings()
