"""Ranks: the processes that share one problem, and their collective operations.

``alone`` has the interface and the split of M into rows, ``mpi`` the collective operations of a communicator,
``gather`` the collection of blocks on one rank, ``device_sum`` the sums on GPUs. mpi4py and CuPy are imported on first
use.
"""

from typing import Any

from .alone import ALONE, Ranks, own_rows
from .mpi import MpiRanks


def join(comm: Any) -> Ranks:
    """Return the ranks of a communicator of mpi4py; `ALONE` for None."""
    if comm is None:
        return ALONE
    if isinstance(comm, Ranks):
        return comm
    return MpiRanks(comm)
