"""Ranks: the processes that share one problem, and what they have to agree on.

``alone`` has the words and says how M is cut, ``mpi`` the meetings of a communicator, ``gather`` what is put
together on one rank, ``device_sum`` the sums on GPUs; mpi4py and CuPy are imported on first use.
"""

from typing import Any

from .alone import ALONE, Ranks, own_rows
from .mpi import MpiRanks


def join(comm: Any) -> Ranks:
    """Return the ranks of a communicator of mpi4py; `ALONE` for None."""
    if comm is None:
        return ALONE
    return comm if isinstance(comm, Ranks) else MpiRanks(comm)
