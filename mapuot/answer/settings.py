"""Numbers that decide in `answer/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..processor import SERIAL_ENTRIES
from ..settings import Settings


@dataclass
class CurvatureSettings(Settings):
    """How the equations of second derivatives are solved (curvature.py)."""

    most_factored: int = 4096  # points of the smaller side; the equations of so many take 4 s on two cores
    # Steps of conjugate gradients before a factor: so many, and more for each point of the smaller side, which take as
    # long as its equations.
    first_steps: int = 30
    steps_a_point: float = 0.05
    most_pairs: int = 1 << 25  # of a plan that is formed for the factor: .25 GB


CURVATURE = CurvatureSettings()


@dataclass
class BatchPlanSettings(Settings):
    """Which plans of a batch are made together on a CPU (batch_plan.py)."""

    block_entries: int = 1 << 18  # of a block: 2 MiB stay in a cache
    largest_entries: int = SERIAL_ENTRIES  # of a plan in a block; a larger one is made alone


BATCH_PLANS = BatchPlanSettings()
