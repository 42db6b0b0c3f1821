"""Ranks: the processes that share one problem, and what they have to agree on.

``split`` says how M is cut, ``alone`` has the words, ``mpi`` the meetings of a communicator, ``gather`` what is put
together on one rank, ``device_sum`` the sums on GPUs; mpi4py and CuPy are imported on first use.
"""

from __future__ import annotations

from typing import Any

from .alone import ALONE, Ranks
from .mpi import MpiRanks
from .split import own_rows


def join(comm: Any) -> Ranks:
    """Return the ranks of a communicator of mpi4py; `ALONE` for None."""
    if comm is None:
        return ALONE
    return comm if isinstance(comm, Ranks) else MpiRanks(comm)
