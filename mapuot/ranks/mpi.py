"""The ranks of an MPI communicator: row blocks, one sum of n column sums in each pass, errors that reach all ranks.

A pass is the local row_pass, ``adding`` (the sum over the ranks) and finish_pass, which every rank repeats on the same
numbers. Nothing else is exchanged, and all ranks stop in the same pass. So the sums must have the same bits everywhere.
MPI recommends this for Allreduce but does not guarantee it; here each entry is summed on one rank (Reduce_scatter) and
then copied (Allgatherv), with the same traffic. Rare collective operations send pickles and add in rank order. Errors:
each collective operation carries an error slot, so that a failed rank can join the operation in which the others wait.
Sums on GPUs have no slot: each rank exchanges errors with the others before it waits for its GPU.
"""

import hashlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from ..errors import cut, packed, unpacked
from ..processor import core_count, cores, default_threads, isa
from .alone import Ranks, own_rows
from .gather import gather, stream

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def launched() -> int:
    """Return the number of processes that a launcher reports; 1 without a launcher."""
    found = [os.environ.get(name, "") for name in LAUNCHERS]
    return max([int(text) for text in found if text.isdigit()], default=1)


def world() -> Any:
    """Return COMM_WORLD; raise RuntimeError if MPI is missing or does not see the launcher's processes."""
    try:
        from mpi4py import MPI  # noqa: PLC0415  importing starts MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"MPI is not usable: {error}; pip install mpi4py and an MPI library (mpich)") from error
    check_launcher(MPI)
    return MPI.COMM_WORLD


def check_launcher(MPI: Any) -> None:
    count = launched()
    if count > 1 and MPI.COMM_WORLD.size == 1:
        library = MPI.Get_library_version().split("\n")[0].strip()
        cure = f"mpiexec must be the one of the MPI library that mpi4py uses ({library})"
        raise RuntimeError(f"the launcher started {count} processes, but each sees only itself: {cure}")


class MpiRanks(Ranks):
    """The ranks of ``comm``, an intracommunicator of mpi4py."""

    def __init__(self, comm: Any) -> None:
        if not type(comm).__module__.startswith("mpi4py"):
            raise TypeError(f"comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
        from mpi4py import MPI  # noqa: PLC0415

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise TypeError(f"comm must be an intracommunicator of mpi4py, got {comm.name or type(comm).__name__}")
        check_launcher(MPI)
        self.MPI, self.comm = MPI, comm
        self.rank, self.size = comm.rank, comm.size
        self.start()

    def start(self) -> None:
        """Reset the state of a solve over these ranks."""
        self.agreed: BaseException | None = None  # the error that all ranks raise
        self.part: Any = np.empty(0)
        self.device_sum: Any = None
        self.kept = self.keep()  # cache for later solves over these ranks

    def keep(self) -> dict[str, Any]:
        """Return a dictionary that lives as long as the communicator."""
        kept: Any = self.comm.Get_attr(keyval(self.MPI))
        if kept is None:
            kept = {}
            self.comm.Set_attr(keyval(self.MPI), kept)
        assert isinstance(kept, dict)
        return kept

    def __reduce__(self) -> Any:
        raise TypeError("a Result over MPI holds rows of one rank: gather what is wanted, or solve without comm")

    def exchange(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Return the values of all ranks in their order; raise the errors of some ranks on all."""
        found = self.allgather((value, None if error is None else packed(error)))
        errors = [(rank, failed) for rank, (_, failed) in enumerate(found) if failed is not None]
        if not errors:
            return [value for value, _ in found]
        self.agreed = unpacked(errors, self.size)
        self.end_sums()
        raise self.agreed from error

    def end_sums(self) -> None:
        """Abort the sums that other GPUs may wait for: a failed rank never joins them."""
        waiting = self.device_sum is not None and self.device_sum.waiting
        if any(self.allgather(waiting)):
            from .device_sum import forget  # noqa: PLC0415  needs CuPy

            forget(self)

    def allgather(self, value: Any) -> list[Any]:
        found: list[Any] = self.comm.allgather(value)
        return found

    def all(self, value: Any) -> list[Any]:
        return self.exchange(value)

    @contextmanager
    def together(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            if error is self.agreed:
                raise
            if type(error).__module__.startswith("cupy_backends"):  # a failed GPU: the others wait for it in a sum
                self.abort()
            self.exchange(None, error)
        except BaseException:  # Ctrl-C on one rank: the others cannot know where it stopped
            self.abort()
        else:
            self.exchange(None)

    def abort(self) -> None:
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if interrupted:  # no traceback is needed
            report = f"rank {self.rank}: KeyboardInterrupt, the job ends\n"
        else:
            report = traceback.format_exc()
        sys.stderr.write(report)
        sys.stderr.flush()
        time.sleep(0.5)  # the launcher forwards the output first; Abort would cut it off
        self.comm.Abort(130 if interrupted else 1)

    def same(self, **values: Any) -> None:
        if self.size == 1:
            return
        found = self.all({name: digest(value) for name, value in values.items()})
        for name in values:
            first = found[0][name]
            rank = next((rank for rank, theirs in enumerate(found) if theirs[name] != first), None)
            if rank is not None:
                got = f"{cut(first)} on rank 0, {cut(found[rank][name])} on {rank}"
                raise self.raised(ValueError(f"{name} must be the same on every rank, got {got}"))

    def raised(self, error: Exception) -> Exception:
        """Mark an error that every rank finds by itself, so that no rank reports it to the others."""
        self.agreed = error
        return error

    def before(self, value: int) -> int:
        return int(sum(self.exchange(value)[: self.rank]))

    def sum(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self.exchange(None)
            total = np.array(value, dtype=np.float64).ravel()
            self.add(total)
            return total.reshape(value.shape)
        return sum(self.exchange(value))

    def min(self, value: Any) -> Any:
        return min(self.exchange(value))

    def max(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self.exchange(None)
            top = np.array(value, dtype=np.float64)
            self.maximum(top)
            return top
        return max(self.exchange(value))

    def threads(self, asked: int | None, entries: int) -> int | None:
        """Return the threads of each rank: as asked, or the cores of a host divided by its ranks, least over hosts.

        Raise if ranks use different instruction sets: these round differently, and ranks with different last bits might
        stop in different passes.
        """
        if self.size == 1:
            return asked
        self.same(**{"the instruction set (MAPUOT_ISA lowers it)": isa()})
        users = [theirs for _, theirs in self.neighbours()]
        share = sum(1 / sum(core in theirs for theirs in users) for core in cores())
        share *= core_count() / len(cores())  # the ranks of a host share its quota, too
        if asked is None:
            return int(self.min(default_threads(entries, share)))
        return int(self.min(asked))

    def neighbours(self) -> list[tuple[int, set[int]]]:
        """Return (rank, cores it may use) for each rank of this host."""
        found = self.exchange((platform.node(), cores()))
        return [(rank, theirs) for rank, (host, theirs) in enumerate(found) if host == platform.node()]

    def place(self, backend: str, *arrays: Any) -> None:
        """Choose a GPU for each rank of a host, unless the arrays lie on one already."""
        self.device_sum = None  # the last solve may have used another GPU
        if self.size == 1 or backend != "cuda":
            return
        found = [os.environ.get(name, "") for name in LOCAL_RANKS]
        numbers = [int(text) for text in found if text.isdigit()]
        numbers += [[rank for rank, _ in self.neighbours()].index(self.rank)]
        held = [part for x in arrays for part in (x, getattr(x, "data", None))]  # a sparse M has its numbers there
        if not any(hasattr(x, "__cuda_array_interface__") for x in held):
            from .device_sum import use_device  # noqa: PLC0415  needs CuPy

            use_device(numbers[0])

    def gather(self, block: Any, root: int) -> Any:
        return gather(self, block, root)

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        return stream(self, blocks)

    @contextmanager
    def adding(self, sums: Any) -> Iterator[None]:
        if hasattr(sums, "__cuda_array_interface__"):
            yield
            self.add_on_device(sums)
            return
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
            sums[:] = 0.0
            sums[-1] = 1.0
        self.add(sums)
        if sums[-1] != 0:
            self.exchange(None, failed)

    def add_on_device(self, total: Any) -> None:
        if self.device_sum is None:
            from .device_sum import DeviceSum  # noqa: PLC0415  needs CuPy

            self.device_sum = DeviceSum(self)
        self.device_sum(total)

    def maximum(self, top: Any) -> None:
        self.comm.Allreduce(self.MPI.IN_PLACE, top, op=self.MPI.MAX)

    def add(self, total: Any) -> None:
        """Add ``total`` (float64) up over the ranks in place; the rank that owns entry j sums it."""
        counts = [i1 - i0 for i0, i1 in (own_rows(len(total), rank, self.size) for rank in range(self.size))]
        if len(self.part) != counts[self.rank] or type(self.part) is not type(total):
            self.part = np.empty_like(total[: counts[self.rank]])
        self.comm.Reduce_scatter(total, self.part, counts, op=self.MPI.SUM)
        self.comm.Allgatherv(self.part, [total, counts])


@cache
def keyval(MPI: Any) -> int:
    return int(MPI.Comm.Create_keyval())


def digest(value: Any) -> str:
    """Return a short text that identifies a value; for arrays the shape and a hash."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return repr(value)
    try:
        array = np.ascontiguousarray(value.get() if hasattr(value, "get") else value)
        if array.dtype.kind in "fiub":
            if array.ndim == 0:
                return repr(array.item())
            data = array.astype(np.float64).tobytes()
            return f"array {array.shape} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    except (TypeError, ValueError):
        pass
    return repr(value)
