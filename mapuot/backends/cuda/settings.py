"""Numbers that decide on a GPU, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ...settings import Settings


@dataclass
class DevicePairSettings(Settings):
    """When passes keep pairs of a matrix on the device, and how passes over stored pairs are launched (sparse.py)."""

    least_entries: int = 1 << 22  # of M; with fewer, passes over all pairs are faster
    most_reg: float = 5e-6  # reg / range(M); with a larger one, passes over all pairs are faster
    held_entries: int = 64  # mean of a row; with more, the vector that they multiply is kept in shared memory
    short_points: int = 1 << 16  # up to so many rows and columns an index has 16 bits; a test may only lower it
    cluster_pairs: int = 1 << 15  # most stored pairs for a step by the blocks of one cluster; more take long to read


DEVICE_PAIRS = DevicePairSettings()


@dataclass
class DeviceArraySettings(Settings):
    """How matrices reach a GPU (arrays.py)."""

    block_bytes: int = 1 << 28  # of a NumPy M that are on the device at once
    many_terms: int = 1 << 29  # coordinates of pairs: by differences in .15 ms, by a product in .17 (H200, 64 dims)


DEVICE_ARRAYS = DeviceArraySettings()


@dataclass
class DeviceCallSettings(Settings):
    """Which plain problems a GPU solves in one call (graph_solve.py)."""

    most_entries: int = 1 << 28  # of M: for a larger M the host's work before and after does not matter
    sees_masses_first: bool = True  # new masses take the ordinary solve: `SolveLaunches` costs as much as such a solve


DEVICE_CALLS = DeviceCallSettings()


@dataclass
class DeviceLaunchSettings(Settings):
    """How the work of a pass is laid over the blocks of a GPU (kernels.py, launch.py, log_matmul.py, points.py)."""

    most_blocks: int = 256  # of a launch; memory is laid out for so many (BLOCKS of kernels.py): a test may lower it
    spread_columns: int = 32768  # wider rows are spread over several blocks
    spread_clusters: tuple[int, ...] = (2, 4, 8, 16)  # blocks that may share a spread row; the fewest that fit are used
    most_parts: int = 64  # of a sum between points (points.py)
    least_corrected: int = 1 << 29  # pairs of points: with fewer, float64 passes take no longer than to correct sums
    # of float32 passes on tensor cores: largest error of an entry for which the first ones round points to float16
    rounded_worth: float = 0.02
    least_tops: int = 1 << 13  # columns of points; with more, rows find the scalings of K from some of the columns
    # tiles of log_matmul, two a multiprocessor: if there are fewer, smaller tiles fill the device better
    few_tiles: int = 264


DEVICE_LAUNCHES = DeviceLaunchSettings()


@dataclass
class DeviceBatchSettings(Settings):
    """How much shared memory a block of a batch takes, in bytes (batch.py)."""

    room: int = 208 << 10  # that a block of batch_made.cu may ask for
    shared_room: int = 96 << 10  # of a block, for two blocks on a multiprocessor, with the column vectors


DEVICE_BATCHES = DeviceBatchSettings()
