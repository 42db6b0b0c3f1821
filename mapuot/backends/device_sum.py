"""Sums over the ranks of vectors that lie on their GPUs: NCCL, MPI that reads device memory, or the host's way.

NCCL works on the current stream without waiting for it, and gives every rank the same bits: each entry is summed in one
place and copied. It is taken where every rank has CuPy with NCCL and a GPU of its own. MAPUOT_CUDA_MPI=1 passes device
addresses to MPI instead (a CUDA-aware library), MAPUOT_CUDA_MPI=0 goes through pinned host memory.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

if TYPE_CHECKING:
    from .mpi import MpiRanks


def use_device(local_rank: int) -> None:
    """The GPU of a rank: by its number on its host, where it sees several."""
    cp.cuda.Device(local_rank % max(1, cp.cuda.runtime.getDeviceCount())).use()


def own_gpus(ranks: MpiRanks) -> bool:
    """Whether no two ranks share a GPU, which NCCL refuses."""
    device = cp.cuda.Device()
    places = ranks.exchange((platform.node(), device.pci_bus_id))
    return len(set(places)) == ranks.size


class DeviceSum:
    """The way that all ranks take, and its state."""

    def __init__(self, ranks: MpiRanks) -> None:
        self.ranks = ranks
        wanted = os.environ.get("MAPUOT_CUDA_MPI")
        ranks.same(MAPUOT_CUDA_MPI=wanted)
        if wanted is not None:
            self.way = "mpi" if wanted == "1" else "host"
        else:
            able = bool(ranks.min(bool(cp.cuda.nccl.available)))
            self.way = "nccl" if able and own_gpus(ranks) else "host"
        if self.way == "nccl":
            nccl = cp.cuda.nccl
            key = ranks.exchange(nccl.get_unique_id() if ranks.rank == 0 else None)[0]
            self.nccl = nccl.NcclCommunicator(ranks.size, key, ranks.rank)
        self.pinned: Any = np.empty(0)

    def __call__(self, total: Any) -> None:
        """In place, float64, on the current stream."""
        stream = cp.cuda.get_current_stream()
        if self.way == "nccl":
            nccl, at = cp.cuda.nccl, total.data.ptr
            self.nccl.allReduce(at, at, total.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
        elif self.way == "mpi":
            stream.synchronize()
            self.ranks.add(total)
        else:
            if self.pinned.size != total.size:
                memory = cp.cuda.alloc_pinned_memory(total.nbytes)
                self.pinned = np.frombuffer(memory, np.float64, total.size)
            total.get(out=self.pinned, stream=stream)
            stream.synchronize()
            self.ranks.add(self.pinned)
            total.set(self.pinned, stream=stream)
