"""The part of NCCL that mapuot uses, over sockets: rank 0 adds all ranks' data in rank order and sends out the sum.

A sum waits for the others at once, as kernels run at once here; tests/mpi/cases.py tests over MPI that NCCL waits on
the device only.
"""

import ctypes
import sys
import tempfile
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np

available = True
NCCL_FLOAT64, NCCL_SUM = 8, 0
LISTENERS = {}


def current_device():
    return sys.modules["cupy.cuda"].runtime.getDevice()


def get_unique_id():
    """Return the address of rank 0's socket."""
    key = str(Path(tempfile.mkdtemp(prefix="mapuot-nccl-"), "socket"))
    LISTENERS[key] = Listener(key)
    return key


class NcclCommunicator:
    def __init__(self, size, key, rank):
        self.rank, self.device = rank, current_device()
        if rank == 0:
            with LISTENERS.pop(key) as listener:
                found = [listener.accept() for _ in range(size - 1)]
            ranks = [link.recv() for link in found]
            self.links = [found[ranks.index(other)] for other in range(1, size)]
        else:
            self.links = [Client(key)]
            self.links[0].send(rank)

    def allReduce(self, source, target, count, dtype, operation, stream):  # noqa: N802
        assert (source, dtype, operation) == (target, NCCL_FLOAT64, NCCL_SUM)
        assert current_device() == self.device, "an illegal address: the memory of another GPU"
        values = np.ctypeslib.as_array((ctypes.c_double * count).from_address(source))
        if self.rank == 0:
            for link in self.links:
                values += link.recv()
            for link in self.links:
                link.send(values)
        else:
            self.links[0].send(values)
            values[:] = self.links[0].recv()

    def abort(self):
        for link in self.links:
            link.close()
