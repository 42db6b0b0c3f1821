"""Collect the blocks of all ranks on one rank: in its memory, or as a stream in their order.

A rank sends its block in messages of at most CHUNK_BYTES; only the root holds blocks of other ranks. Every rank must
call the same function; an error of one rank reaches the others before its block, or instead of it. ``ranks`` is an
`MpiRanks`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

CHUNK_BYTES = 1 << 28  # of one message, so that the counts stay below 2^31


def gather(ranks: Any, block: Any, root: int) -> Any:
    """Stack the blocks of all ranks on ``root``; None elsewhere."""
    with ranks.together():
        if root not in range(ranks.size):
            raise ValueError(f"root must be a rank in 0..{ranks.size - 1}, got {root}")
        ranks.same(root=root)
        shapes = ranks.exchange(np.shape(block))
        widths = {shape[1:] for shape in shapes}
        if len(widths) > 1:
            raise ranks.raised(ValueError(f"blocks must have as many columns on every rank, got {sorted(widths)}"))
        dtypes = [dtype for dtype, shape in zip(ranks.exchange(block.dtype), shapes, strict=True) if shape[0]]
        block = np.ascontiguousarray(block, np.result_type(*dtypes or [block.dtype]))
        shape = (sum(shape[0] for shape in shapes), *widths.pop())
        if ranks.rank == root:
            out = np.empty(shape, block.dtype)
        else:
            out = None
        ranks.exchange(None)  # all have the memory
        i = 0
        for rank, (height, *_) in enumerate(shapes):
            if out is not None and rank == root:
                out[i : i + height] = block
            elif ranks.rank in (rank, root):
                move(ranks, block if out is None else out[i : i + height], rank, root)
            i += height
    return out


def stream(ranks: Any, blocks: Iterable[Any]) -> Iterator[Any]:
    """Yield on rank 0 the rows of all ranks, block by block; the other ranks send their rows.

    A rank that fails sends its error instead of a block; rank 0 raises it after the blocks of all ranks.
    """
    if ranks.rank != 0:
        send(ranks, blocks)
        return
    failed: Exception | None = None
    for rank in range(ranks.size):
        if rank == 0:
            lane = iter(blocks)
        else:
            lane = receive(ranks, rank)
        try:
            yield from lane
        except Exception as error:
            failed = failed or error
        with suppress(Exception):
            deque(lane, maxlen=0)
    if failed is not None:
        raise failed


def send(ranks: Any, blocks: Iterable[Any]) -> None:
    """Send all own blocks to rank 0, each after its shape and dtype; at the end send None, or the error."""
    end: Exception | None = None
    try:
        for block in blocks:
            rows = np.ascontiguousarray(block)
            ranks.comm.send((rows.shape, rows.dtype.str), 0)
            move(ranks, rows, ranks.rank, 0)
    except Exception as error:
        end = RuntimeError(f"rank {ranks.rank}: {error}")
    ranks.comm.send(end, 0)


def receive(ranks: Any, rank: int) -> Iterator[Any]:
    while isinstance(head := ranks.comm.recv(source=rank), tuple):
        block = np.empty(*head)
        move(ranks, block, rank, 0)
        yield block
    if head is not None:
        raise head


def move(ranks: Any, block: Any, rank: int, root: int) -> None:
    flat = block.reshape(-1).view(np.uint8)
    for k in range(0, flat.size, CHUNK_BYTES):
        if ranks.rank == root:
            ranks.comm.Recv(flat[k : k + CHUNK_BYTES], rank)
        else:
            ranks.comm.Send(flat[k : k + CHUNK_BYTES], root)
