"""Numbers that decide in `spaces/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass
class SpaceSettings(Settings):
    """Which points and distances of two spaces a step of `gromov` reads."""

    start_points: int = 500  # of each space, in the smallest problem of a coarse start (starts.py)
    fewer: int = 4  # times fewer points in each problem of a coarse start: together they take a tenth of the time
    formed_points: int = 2000  # up to so many, "euclidean" and "geodesic" form their matrix (distances.py)
    # most pairs of points for a step that stores costs and K, 12 bytes each on a GPU: 5 GB at 20,000 points (task.py)
    most_formed: int = 1 << 29
    device_entries: int = 1 << 25  # distances of a block on a GPU: 256 MiB (embedding.py)
    corner_entries: int = 1 << 21  # most costs that are formed once; more costs are made in each solve (bound.py)
    most_corners: int = 10_000  # solves until the search for a lower bound is given up (bound.py)
    box_units: int = 1 << 40  # width of the box of the search, in units of the corners' integer coordinates (bound.py)
    plan_entries: int = 1 << 20  # of the plans of pairs that are solved together: 8 MiB (api/gromov_pairs.py)


SPACES = SpaceSettings()
