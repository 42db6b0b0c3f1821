"""Numbers that decide in `backends/`, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ..processor import SERIAL_ENTRIES
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


@dataclass
class CoarseSettings(Settings):
    """When clusters of points correct the passes of a solve (coarse.py, marginals/coarse.py).

    cuda/coarse.py has other numbers for a device.
    """

    most_clusters: int = 128  # of all ranks; each costs a pass 2 rows of K; 64 take .07 more passes, 256 .06 fewer
    most_ranks: int = 512  # each rank has at least one cluster, and the matrix has ranks^2 entries
    least_entries: int = SERIAL_ENTRIES  # of K: for a smaller K clusters and matrices cost as much as the passes
    least_points: int = 4  # of a cluster, on average
    matrix_work: float = 5  # clusters^3 in entries of K, at most: factoring the matrix then costs a few passes
    step_work: float = 8  # clusters^2 in points, at most: applying the matrix is then a small part of a pass
    first: int = 2  # passes before the first matrix at a small reg: 1 takes as many passes, 3 to 6 take 2 to 10 % more
    sharp: float = 150.0  # range(M) / reg; up to here plain passes come first, as many as finding clusters costs
    # time that finding clusters takes, in entries of K that passes read meanwhile: for each row and column, and in all
    label_work: int = 3000
    call_work: int = 5_000_000
    every: int = 20  # passes from one matrix to the next; 40 are as good, 6 cost more than they save
    look: int = 10  # passes between two checks of the guard
    wait: int = 5  # passes that a dropped correction adds without one, up to most_waits times
    most_waits: int = 5


COARSE = CoarseSettings()


@dataclass
class CallSettings(Settings):
    """How long one call of the core lasts (cpu/native.py, cpu/core_solve.py)."""

    most_passes: int = 10_000  # of a whole solve in one call
    work: int = 1 << 28  # most multiply-adds of a thread: 30 ms, scalar .2 s; Ctrl-C waits for the call


CALLS = CallSettings()


@dataclass
class FactorSettings(Settings):
    """When Newton's steps with a factor begin, and how their matrices are made (factored.py, ascend/factored.py)."""

    most_patience: int = 1000  # passes before them for the smallest problem; STEP_ENTRIES tells it for others
    serial_unknowns: int = 1500  # equations up to here are solved by one thread: a factor takes 30 ms (cpu/factored.py)
    chunk_bytes: int = 1 << 32  # of matrices of the problems of a batch that are solved at once


FACTORS = FactorSettings()


@dataclass
class NarrowSettings(Settings):
    """When passes between points sum in float32 (narrow_points.py)."""

    most_error: float = 0.05  # largest estimated error of an entry: beyond it float32 passes are useless
    sample: int = 1 << 14  # coordinates of the sample of points for middles and sizes
    least_sample: int = 256  # points of this sample


NARROW = NarrowSettings()


@dataclass
class KernelSettings(Settings):
    """Where the sums of kernels of many marginals are (kernel.py)."""

    host_entries: int = 1 << 18  # up to so many column sums come from a GPU to the host together with the row sums


KERNELS = KernelSettings()
