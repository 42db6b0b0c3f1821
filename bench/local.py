"""Ranks without MPI: processes of one host that meet through pipes, for GPUs whose sums NCCL makes anyway."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from mapuot.ranks.mpi import MpiRanks


class LocalRanks(MpiRanks):
    """A star of pipes around rank 0: ``pipes`` are those of all others there, and the one to it elsewhere."""

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
        return np.concatenate(found) if self.rank == root else None

    def abort(self) -> None:
        traceback.print_exc()
        os._exit(1)


def work(function: Callable[..., Any], rank: int, size: int, pipes: list[Any], answer: Any, arguments: Any) -> None:
    """One process: its answer, or its error as text, goes to the parent."""
    try:
        answer.send((True, function(LocalRanks(rank, size, pipes), *arguments)))
    except BaseException:
        answer.send((False, f"rank {rank}: {traceback.format_exc()}"))


def spawn(function: Callable[..., Any], size: int, *arguments: Any, seconds: float = 500.0) -> list[Any]:
    """``function(ranks, *arguments)`` in ``size`` new processes; their answers in rank order."""
    context = multiprocessing.get_context("spawn")
    links = [context.Pipe() for _ in range(size - 1)]
    answers = [context.Pipe(duplex=False) for _ in range(size)]
    processes = []
    for rank in range(size):
        pipes = [a for a, _ in links] if rank == 0 else [links[rank - 1][1]]
        target = (function, rank, size, pipes, answers[rank][1], arguments)
        processes.append(context.Process(target=work, args=target, daemon=True))
        processes[-1].start()
        answers[rank][1].close()
    waiting, found = [receive for receive, _ in answers], {}
    try:
        while waiting:
            ready = wait(waiting, seconds)
            if not ready:
                raise TimeoutError(f"{size} processes gave no answer in {seconds} s")
            for receive in ready:
                try:
                    good, value = receive.recv()
                except EOFError:
                    raise RuntimeError("a process died without an answer") from None
                if not good:
                    raise RuntimeError(value)
                found[receive] = value
                waiting.remove(receive)
    finally:
        for process in processes:
            process.join(0.0 if waiting else 5.0)
            process.kill()
    return [found[receive] for receive, _ in answers]
