"""Numbers that decide in `backends/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass
class BoxSettings(Settings):
    """Which pairs of boxes of points a solve skips (boxes.py)."""

    # (points of a box, least points of the solve): bounds between boxes must cost less than passes.
    units: tuple[tuple[int, int], ...] = ((16, 0), (32, 50_000), (64, 400_000))
    most_slopes: int = 16  # dimensions; up to here potentials are fitted by linear functions in a box
    most_kept_share: float = 0.6  # of all pairs; if more are kept, none is skipped
    rough_error: float = 0.03  # certified error; from here on a new mask replaces the mask of rough potentials
    # Shares of tol, in the final certificate: the aim of a new mask, and the most that an old mask may take.
    goal_share: float = 0.2
    old_share: float = 0.35
    enough_share: float = 0.3  # of tol: from this error on the next pass certifies without a correction
    correction_passes: float = 2  # over the kept pairs, that a correction may cost at most; it saves two or three
    # Largest error of a pass that is corrected: beyond it potentials are off by more than a reg.
    most_corrected_error: float = 1.0
    most_excess: float = 60.0  # nats of an entry of K above the prediction by the potentials: float32 holds 88
    sort_entries: int = 64  # entries of a matrix that take as long as sorting one point
    trials: int = 16  # thresholds tried for a mask


BOXES = BoxSettings()
