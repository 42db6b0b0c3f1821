"""Numbers that decide on a GPU, each with its unit and the reason or the measurement behind it."""

from dataclasses import dataclass

from ...settings import Settings


@dataclass
class DevicePairSettings(Settings):
    """When passes keep pairs of a matrix on the device, and how passes over stored pairs are launched (sparse.py)."""

    least_entries: int = 1 << 22  # of M; with fewer, passes over all pairs are faster
    most_reg: float = 5e-6  # reg / range(M); with a larger one, passes over all pairs are faster
    cluster_pairs: int = 1 << 15  # most stored pairs for a step by the blocks of one cluster; more take long to read


DEVICE_PAIRS = DevicePairSettings()
