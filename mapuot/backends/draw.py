"""Draw pairs from a plan, from the rows of the plan that contain them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..penalties import F64
from ..problem.settings import BLOCKS
from ..problem.sparse import is_sparse

APART = 1 << 13  # entries of unwanted rows between two wanted rows that cost less than a second call
RUN, FEW = 16, 64  # search the sums of runs of 16 columns first, then one run; up to 64 columns search directly


def runs(rows: Any, n: int) -> Iterator[tuple[int, int]]:
    """Yield row ranges (i0, i1) of a block each that cover these sorted rows of n columns and few others."""
    step = max(1, BLOCKS.plan_entries // n)
    for part in np.split(rows, np.flatnonzero(np.diff(rows) > max(1, APART // n)) + 1):
        for i0 in range(int(part[0]), int(part[-1]) + 1, step):
            yield i0, min(i0 + step, int(part[-1]) + 1)


def columns_in(block: Any, rows: Any, at: F64) -> Any:
    """Find in each of these rows of a plan the first column where the cumulated mass exceeds the share ``at``."""
    if is_sparse(block):
        return columns_of_pairs(block, rows, at)
    n = block.shape[1]
    if n <= FEW:
        sums = block
    else:
        sums = np.add.reduceat(block, np.arange(0, n, RUN), axis=1, dtype=np.float64)
    ends = np.cumsum(sums, axis=1, dtype=np.float64)[rows]
    run, left = passed(ends, at * ends[:, -1])
    if n <= FEW:
        return run
    column = np.minimum(RUN * run[:, None] + np.arange(RUN), n - 1)
    place, _ = passed(np.cumsum(block[rows[:, None], column], axis=1, dtype=np.float64), left)
    return column[np.arange(len(rows)), place]


def passed(ends: F64, wanted: F64) -> tuple[Any, F64]:
    """Return where each row of ``ends`` first exceeds ``wanted``, and ``wanted`` less the end before."""
    wanted = np.minimum(wanted, np.nextafter(ends[:, -1], 0.0))
    place = (ends > wanted[:, None]).argmax(1)
    return place, wanted - np.where(place > 0, ends[np.arange(len(ends)), place - 1], 0.0)


def columns_of_pairs(block: Any, rows: Any, at: F64) -> Any:
    """Do the search of `columns_in` in a CSR array: scale its rows to mass 1 and cumulate all in one sweep."""
    start = block.indptr[:-1].astype(np.int64)
    count = np.diff(block.indptr)
    row = np.repeat(np.arange(len(count)), count)
    data = block.data.astype(np.float64)
    mass = np.bincount(row, data, len(count))
    ends = np.concatenate([[0.0], np.cumsum(data / np.where(mass > 0, mass, 1.0)[row])])  # ``rows`` all have mass
    here = start[rows]
    beyond = start[rows] + count[rows]
    place = np.searchsorted(ends, ends[here] + at, side="right") - 1
    last = np.searchsorted(ends, ends[beyond], side="left") - 1  # the last entry with mass
    return block.indices[np.clip(place, here, np.minimum(last, beyond - 1))]
