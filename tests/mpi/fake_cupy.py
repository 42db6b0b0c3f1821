"""What ranks/device_sum.py takes of CuPy, over numpy and MPI, so that its choices are tested without a GPU."""

import contextlib
import ctypes
import sys
import types

import numpy as np


class OnDevice(np.ndarray):
    """A vector that says it is on a GPU."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": "<f8", "data": (self.ctypes.data, False), "version": 3}

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self, out, stream):
        out[:] = self

    def set(self, values, stream):
        self[:] = values


class Stream:
    ptr = 0
    before = None  # sums that the device waits for

    @property
    def done(self):
        return not Stream.before

    def synchronize(self):
        assert self.done, "the host waits for ever"


@contextlib.contextmanager
def installed(comm, with_nccl=True, device=0, never=False):
    """The fake in the place of CuPy; yields the list of NCCL communicators made. never: some rank comes to no sum."""
    from mpi4py import MPI

    made = []

    class NcclCommunicator:
        def __init__(self, size, key, rank):
            assert (size, key, rank) == (comm.size, "key of rank 0", comm.rank)
            made.append(self)

        def allReduce(self, source, target, count, dtype, operation, stream):  # noqa: N802
            assert (source, dtype, operation, stream) == (target, "float64", "sum", 0)
            if never:
                Stream.before.append(self)
                return
            values = np.ctypeslib.as_array((ctypes.c_double * count).from_address(source))
            values[:] = comm.allreduce(values.copy(), op=MPI.SUM)

        def abort(self):
            Stream.before.clear()

    Stream.before = []
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NCCL_FLOAT64, nccl.NCCL_SUM = with_nccl, "float64", "sum"
    nccl.get_unique_id, nccl.NcclCommunicator = lambda: f"key of rank {comm.rank}", NcclCommunicator
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.cuda, cuda.nccl = cuda, nccl
    cuda.Device = lambda: types.SimpleNamespace(id=device, pci_bus_id=f"bus {device}")
    properties = {"name": b"a GPU", "multiProcessorCount": 132}
    cuda.runtime = types.SimpleNamespace(getDeviceProperties=lambda device: properties)
    cuda.get_current_stream, cuda.alloc_pinned_memory = Stream, bytearray
    fakes = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
    before = {name: sys.modules.pop(name, None) for name in (*fakes, "mapuot.ranks.device_sum")}
    sys.modules.update(fakes)
    try:
        yield made
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
