"""Blocks of all ranks on one of them: put together in its memory, or streamed through it in their order.

A rank sends its own block in messages of at most CHUNK_BYTES, and no other rank holds what is not its own. Every rank
must call the same function; an error of one reaches the others before, or in the place of, its block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from .mpi import MpiRanks

CHUNK_BYTES = 1 << 28  # of one message, so that the counts stay below 2^31


def holders(grid: tuple[int, int], root: int, along: str) -> list[list[int]]:
    """The ranks whose blocks make the whole, as they lie in it; of equal ones those nearest to root."""
    R, C = grid
    if along == "cols":
        return [[root // C * C + c] for c in range(C)]
    return [[r * C + c for c in range(C) if along == "both" or c == root % C] for r in range(R)]


def gather(ranks: MpiRanks, grid: tuple[int, int], block: Any, root: int, along: str) -> Any:
    """The blocks of all "rows", of all "cols" (stacked, too) or of "both", put together on ``root``; else None."""
    with ranks.together():
        if root not in range(ranks.size):
            raise ValueError(f"root must be a rank in 0..{ranks.size - 1}, got {root}")
        ranks.same(root=root)
        lines, shapes = holders(grid, root, along), ranks.exchange(np.shape(block))
        widths = {shapes[line[0]][1:] if len(line) == 1 else (sum(shapes[k][1] for k in line),) for line in lines}
        if len(widths) > 1:
            raise ranks.raised(ValueError(f"blocks must have as many columns on every rank, got {sorted(widths)}"))
        dtypes = [dtype for dtype, held in zip(ranks.exchange(block.dtype), shapes, strict=True) if held[0]]
        block = np.ascontiguousarray(block, np.result_type(*dtypes or [block.dtype]))
        shape = (sum(shapes[line[0]][0] for line in lines), *widths.pop())
        out = np.empty(shape, block.dtype) if ranks.rank == root else None
        ranks.exchange(None)  # all have the memory
        i = j = 0
        for line in lines:
            for rank in line:
                place, (height, *width) = None, shapes[rank]
                if out is not None:
                    place = out[i : i + height] if len(line) == 1 else out[i : i + height, j : j + width[0]]
                put(ranks, block, place, rank, root)
                j += width[0] if len(line) > 1 else 0
            i, j = i + height, 0
    return out


def put(ranks: MpiRanks, block: Any, place: Any, rank: int, root: int) -> None:
    """The block of ``rank`` into ``place`` on root."""
    if ranks.rank == rank == root:
        place[...] = block
    elif ranks.rank == rank:
        move(ranks, block, rank, root)
    elif ranks.rank == root and place.flags.c_contiguous:
        move(ranks, place, rank, root)
    elif ranks.rank == root:
        piece = np.empty_like(place, order="C")
        move(ranks, piece, rank, root)
        place[...] = piece


def stream(ranks: MpiRanks, grid: tuple[int, int], blocks: Iterable[Any]) -> Iterator[Any]:
    """The rows of all ranks for rank 0 to iterate over, block by block; the others give theirs.

    A rank that fails sends its error in the place of a block; it is raised when all have been heard.
    """
    if ranks.rank != 0:
        send(ranks, blocks)
        return
    failed: Exception | None = None
    for line in holders(grid, 0, "both"):
        lanes = [iter(blocks) if rank == 0 else receive(ranks, rank) for rank in line]
        try:
            yield from map(np.hstack, zip(*lanes, strict=True)) if len(lanes) > 1 else lanes[0]
        except Exception as error:
            failed = failed or error
        for lane in lanes:
            with suppress(Exception):
                deque(lane, maxlen=0)
    if failed is not None:
        raise failed


def send(ranks: MpiRanks, blocks: Iterable[Any]) -> None:
    """All own blocks to rank 0, each after its shape and dtype; at the end None, or the error."""
    end: Exception | None = None
    try:
        for block in blocks:
            rows = np.ascontiguousarray(block)
            ranks.comm.send((rows.shape, rows.dtype.str), 0)
            move(ranks, rows, ranks.rank, 0)
    except Exception as error:
        end = RuntimeError(f"rank {ranks.rank}: {error}")
    ranks.comm.send(end, 0)


def receive(ranks: MpiRanks, rank: int) -> Iterator[Any]:
    """What ``rank`` sends, on rank 0."""
    while isinstance(head := ranks.comm.recv(source=rank), tuple):
        block = np.empty(*head)
        move(ranks, block, rank, 0)
        yield block
    if head is not None:
        raise head


def move(ranks: MpiRanks, block: Any, rank: int, root: int) -> None:
    """The bytes of ``block`` from rank to root."""
    flat = block.reshape(-1).view(np.uint8)
    for k in range(0, flat.size, CHUNK_BYTES):
        if ranks.rank == root:
            ranks.comm.Recv(flat[k : k + CHUNK_BYTES], rank)
        else:
            ranks.comm.Send(flat[k : k + CHUNK_BYTES], root)
