"""How M is cut into blocks, one a rank: of rows, with the columns whole on every rank, or in a grid.

In a grid of R x C ranks, rank r C + c has the block (r, c). Both cuts are as even as whole rows and columns allow, and
every process finds those of all others by itself.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ..errors import shown


def own_rows(m: int, rank: int, size: int) -> tuple[int, int]:
    """Rows [i0, i1) of ``rank`` among ``size``: the even split of m rows, empty where there are more ranks."""
    return m * rank // size, m * (rank + 1) // size


def own_block(m: int, n: int, rank: int, size: int, split: Any = "rows") -> tuple[int, int, int, int]:
    """Rows [i0, i1) and columns [j0, j1) of an m x n matrix that ``rank`` among ``size`` holds; split as in solve."""
    R, C = process_grid(split, size, (m, n))
    return *own_rows(m, rank // C, R), *own_rows(n, rank % C, C)


def process_grid(split: Any, size: int, shape: tuple[int, int] | None = None) -> tuple[int, int]:
    """(R, C), R C = size, for split="rows", "grid" (as square as it can be, R <= C), "auto" or a pair of its own.

    "auto" takes the least time of a pass by ``pass_time``, rows unless a grid saves 10 %, and needs the shape of the
    whole matrix.
    """
    pairs = [(size // C, C) for C in range(1, size + 1) if size % C == 0]
    word = split if isinstance(split, str) else None
    if word == "rows":
        return size, 1
    if word == "grid":
        return next(pair for pair in pairs if pair[0] <= pair[1])
    if word == "auto":
        if shape is None:
            raise ValueError(
                "split='auto' needs M in a file: what each rank passes is cut already, so that split must be 'rows', "
                "'grid' or the pair of mapuot.ranks.process_grid('auto', size, (m, n))"
            )
        m, n = shape
        best = min((pair for pair in pairs if pair[1] <= n), key=lambda pair: pass_time(pair[0], pair[1], m, n))
        return best if pass_time(*best, m, n) < 0.9 * pass_time(size, 1, m, n) else (size, 1)
    whole = isinstance(split, (tuple, list)) and all(isinstance(x, Integral) for x in split)
    if whole and tuple(split) in pairs:
        return split[0], split[1]
    raise ValueError(f"split must be 'rows', 'grid', 'auto' or (R, C) with R * C = {size} ranks, got {shown(split)}")


def pass_time(R: int, C: int, m: int, n: int) -> float:
    """Nanoseconds of a pass, roughly: enough to choose between rows and grids.

    A rank reads its block of K at 10 GB/s (float32: 0.4 ns an entry), twice in a grid, where the sums of a row wait for
    other ranks, and beyond 65536 columns, where a tile of 4 rows outgrows the cache. The O(n) half takes 15 ns a column
    (measured: 12 to 20), a sum over ranks 3 ns a number (5 GB/s), a meeting 5 us. Rows are quicker from some 40 rows a
    rank on. Two ranks of a Xeon, rows and grid: 8 x 400,000 in 7.4 and 4.2 ms (by the model 8.5 and 4.9),
    400 x 40,000 in 4.1 and 4.4 ms (3.9 and 6.8).
    """
    rows, cols = -(-m // R), -(-n // C)
    reads, meetings = (1, 2) if C == 1 else (2, 8)
    reads = 2 if cols > 65536 else reads
    return 0.4 * reads * rows * cols + (15.0 + 3.0) * cols + 3.0 * rows * (C > 1) + 5e3 * meetings
