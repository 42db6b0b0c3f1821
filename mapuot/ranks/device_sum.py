"""Sums over ranks of vectors on GPUs: by NCCL, by CUDA-aware MPI, or through the host.

NCCL works on the current stream without a synchronisation, and gives every rank the same bits: each entry is summed in
one place and copied. It is used if every rank has CuPy with NCCL and a GPU of its own. MAPUOT_CUDA_MPI=1 passes device
addresses to MPI instead (a CUDA-aware library); MAPUOT_CUDA_MPI=0 goes through pinned host memory. ``ranks`` is an
`MpiRanks`.

A sum cannot overlap its pass: every row contributes to every column sum, so all n numbers must travel after the last
row. For n = 65536 this takes two H200s 15 us, and the pass 2,490 us.
"""

import os
import platform
from functools import cache
from typing import Any

import cupy as cp
import numpy as np


def use_device(local_rank: int) -> None:
    """Use the GPU of a rank: if there are several, by the rank's number on its host."""
    cp.cuda.Device(local_rank % max(1, cp.cuda.runtime.getDeviceCount())).use()


@cache
def nccl() -> Any:
    """Return CuPy's binding of NCCL; None without the library (mapuot[nccl])."""
    try:
        from cupy.cuda import nccl as found  # noqa: PLC0415  loads the library
    except ImportError:
        return None
    return found if found.available else None


def communicator(ranks: Any, places: list[Any]) -> Any:
    """Return NCCL's communicator, cached while all ranks keep their GPUs: making one takes a second."""
    if ranks.kept.get("places") != places:
        library = nccl()
        if ranks.rank == 0:
            own_key = library.get_unique_id()
        else:
            own_key = None
        key = ranks.exchange(own_key)[0]
        ranks.kept.update(places=places, nccl=library.NcclCommunicator(ranks.size, key, ranks.rank))
    return ranks.kept["nccl"]


def forget(ranks: Any) -> None:
    """Abort NCCL's pending work on this GPU; the next sum makes a new communicator."""
    made = ranks.kept.pop("nccl", None)
    ranks.kept.pop("places", None)
    ranks.device_sum = None
    if made is not None:
        made.abort()


class DeviceSum:
    """Sum of a vector on GPUs over the ranks, by a method that all ranks support."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        device = cp.cuda.Device()
        properties = cp.cuda.runtime.getDeviceProperties(device.id)
        wanted = os.environ.get("MAPUOT_CUDA_MPI")
        kind = f"{properties['name'].decode()}, {properties['multiProcessorCount']} multiprocessors"
        ranks.same(**{"MAPUOT_CUDA_MPI": wanted, "the kind of GPU": kind})  # different GPUs would give different bits
        places = ranks.exchange((platform.node(), device.pci_bus_id))
        able = ranks.min(nccl() is not None) and len(set(places)) == ranks.size  # NCCL refuses to share a GPU
        self.way = {None: "nccl" if able else "host", "1": "mpi"}.get(wanted, "host")
        if self.way == "nccl":
            self.nccl = communicator(ranks, places)
        else:
            self.nccl = None
        self.pinned: Any = np.empty(0)

    @property
    def waiting(self) -> bool:
        """Tell whether the GPU still has a sum, or work after a sum, to finish."""
        return self.nccl is not None and not cp.cuda.get_current_stream().done

    def __call__(self, total: Any) -> None:
        """Add ``total`` (float64, on the GPU) up over the ranks in place, on the current stream."""
        stream = cp.cuda.get_current_stream()
        if self.nccl is None:
            self.ranks.exchange(None)  # a rank that failed meets the others here
        if self.nccl is not None:
            at = total.data.ptr
            library = nccl()
            self.nccl.allReduce(at, at, total.size, library.NCCL_FLOAT64, library.NCCL_SUM, stream.ptr)
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
