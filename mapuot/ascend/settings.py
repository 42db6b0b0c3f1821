"""Numbers that decide in `ascend/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..processor import SERIAL_ENTRIES
from ..settings import Settings


@dataclass
class StageSettings(Settings):
    """Which stages a solve has (stages.py)."""

    # Larger regs come first if reg / range(M) is below this, each 1 / scaling_step of the one before.
    scaling_below: float = 3e-3
    scaling_step: float = 4.0
    most_rungs: int = 40  # larger regs, up to 1e24 times the requested reg
    # Certified error that ends a stage at a larger reg. Between two balanced sides far points find their potentials in
    # few passes there, so that more passes pay.
    coarse_tol: float = 0.5
    balanced_tol: float = 0.1
    warm_error: float = 1.0  # a start with a larger certified error at its first pass is dropped for larger regs
    # Passes over kept pairs are tried if reg / range(M) is below this, and K has more entries than that.
    kept_below: float = 5e-4
    kept_entries: int = SERIAL_ENTRIES
    most_together: int = 60  # passes of one potential before ordinary ones; where it works, 2 to 12 are enough
    least_patience: int = 250  # passes at least before Newton's steps with a factor, of a small max_passes
    inner_share: float = 0.6  # of tol, for the kept pairs; the rest is for the skipped pairs
    # Up to this size of the smaller side a GPU makes no products between hard sides: at 5000 points a step with a
    # factor takes 11 ms, a product .4 ms (H200), and the ratio grows as the size.
    most_without_products: int = 8192
    far_median: float = 30.0  # "auto" skips no pairs if median cost / reg is below this: most pairs matter


STAGES = StageSettings()


@dataclass
class PairSettings(Settings):
    """Which pairs of a dense M, or of points, passes at a small reg keep (kept.py)."""

    # Nats below the largest exponent of row and column; each dropped pair has at most e^-25 of their mass. After a
    # change of reg, potentials move: more nats.
    nats: float = 25.0
    moved_nats: float = 20.0
    most_share: float = 0.03  # of all pairs; passes over more pairs take as long as passes over all
    selection_passes: int = 10  # between two selections of pairs
    most_passes: int = 1000  # of a stage; stages that converged took at most 450
    rung_tol: float = 0.1  # certified error, over the kept pairs, that ends a stage at a larger reg
    start_tol: float = 1.0  # certified error that ends passes that skip boxes of points; kept pairs then take over
    rounds: int = 3  # certifying passes over all pairs; each may start another search


PAIRS = PairSettings()


@dataclass
class GroupSettings(Settings):
    """When a problem between groups of points corrects passes that skip pairs (groups.py)."""

    # Groups of a side, between which all pairs are read: 8192 save passes, but took 1.1 to 2.2 times as long. More
    # groups, up to most_groups, if each has least_in_group points.
    usual_groups: int = 4096
    most_groups: int = 32768
    least_in_group: int = 16
    relative_tol: float = 0.01  # tolerance of a correction, relative to the error of its pass
    least_tol: float = 1e-9  # least tolerance of a correction
    most_passes: int = 200  # of a correction; with hard points it may have no solution, and not converge
    most_spread: float = 0.25  # mean of |x - centre of its group|^2 / reg; up to here groups help
    cost_in_passes: int = 15  # of a correction, over all pairs of groups: it makes 6 to 12 passes and some sums


GROUPS = GroupSettings()


@dataclass
class LevelSettings(Settings):
    """Newton's steps with two levels, between hard sides of large clouds (two_levels.py)."""

    most_groups: int = 4096  # of a side: their factor takes 1 s on one core
    least_in_group: int = 4  # points, on average
    factor_work: float = 300.0  # groups^3 in kept pairs: a factor then takes as long as a few products
    rows_of_group: int = 4  # rows at most that stand for a group of rows
    residual: float = 0.1  # of the equations, relative to their right side
    most_products: int = 100  # of one solve of the equations
    most_steps: int = 20  # before a pass is judged
    far_behind: float = 1.0  # nats from the marginal of a column to its mass: Newton's step takes a nat at a time
    rounds: int = 5  # of such steps in a run of passes; then steps by products with the plan go on
    least_shift: float = 1e-12  # of the diagonal between groups
    block_entries: int = 1 << 25  # of the plan that are made at once, for masses between groups


LEVELS = LevelSettings()
