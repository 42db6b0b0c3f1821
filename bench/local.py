"""Ranks without MPI: processes of one host that meet through pipes, for GPUs that sum by NCCL anyway."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from mapuot.ranks.mpi import MpiRanks


class LocalRanks(MpiRanks):
    """A star of pipes around rank 0: ``pipes`` holds all of them on rank 0, and the one to rank 0 elsewhere."""

    def __init__(self, rank: int, size: int, pipes: list[Any]) -> None:
        self.rank, self.size, self.pipes = rank, size, pipes
        self.start()

    def keep(self) -> dict[str, Any]:
        return {}

    def allgather(self, value: Any) -> list[Any]:
        if self.rank > 0:
            self.pipes[0].send(value)
            return list(self.pipes[0].recv())
        found = [value, *(pipe.recv() for pipe in self.pipes)]
        for pipe in self.pipes:
            pipe.send(found)
        return found

    def add(self, total: Any) -> None:
        total[:] = np.sum(self.allgather(total.copy()), axis=0)

    def maximum(self, top: Any) -> None:
        top[:] = np.max(self.allgather(top.copy()), axis=0)

    def gather(self, rows: Any, root: int) -> Any:
        found = self.exchange(rows)
        if self.rank == root:
            return np.concatenate(found)
        return None

    def abort(self) -> None:
        traceback.print_exc()
        os._exit(1)


def work(function: Callable[..., Any], rank: int, size: int, pipes: list[Any], arguments: Any) -> tuple[int, Any]:
    return rank, function(LocalRanks(rank, size, pipes), *arguments)


def spawn(function: Callable[..., Any], size: int, *arguments: Any, seconds: float = 500.0) -> list[Any]:
    """``function(ranks, *arguments)`` in ``size`` new processes; their answers in rank order, or the first error."""
    context = multiprocessing.get_context("spawn")
    links = [context.Pipe() for _ in range(size - 1)]
    pipes = [[one for one, _ in links], *([other] for _, other in links)]
    with context.Pool(size) as pool:
        started = multiprocessing.active_children()  # a pool would replace one that is gone, and wait for its answer
        answers = [pool.apply_async(work, (function, k, size, pipes[k], arguments)) for k in range(size)]
        found = {}
        until = time.monotonic() + seconds
        while len(found) < size and time.monotonic() < until:
            found |= dict(answer.get() for answer in answers if answer.ready())
            if any(process.exitcode is not None for process in started):
                raise RuntimeError("a process died without an answer")
            time.sleep(0.01)
    if len(found) < size:
        raise TimeoutError(f"{size} processes gave no answer in {seconds} s")
    return [found[rank] for rank in range(size)]
