"""The processes that share one problem: what they have to agree on, in the words of one process.

M is cut into blocks, one a rank: of rows, with the columns whole on every rank, or in a grid of R x C ranks, where
rank r C + c has the block (r, c). What a rank knows of its block only (a sum, a maximum, an error) becomes common
through these few words, which cost nothing where there is one process. Over MPI: backends/mpi.py, backends/grid.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


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
    if split == "rows":
        return size, 1
    if split == "grid":
        return next(pair for pair in pairs if pair[0] <= pair[1])
    if split == "auto":
        if shape is None:
            raise ValueError(
                "split='auto' needs M in a file: what each rank passes is cut already, so that split must be 'rows', "
                "'grid' or the pair of mapuot.ranks.process_grid('auto', size, (m, n))"
            )
        m, n = shape
        best = min((pair for pair in pairs if pair[1] <= n), key=lambda pair: pass_time(pair[0], pair[1], m, n))
        return best if pass_time(*best, m, n) < 0.9 * pass_time(size, 1, m, n) else (size, 1)
    if isinstance(split, (tuple, list)) and tuple(split) in pairs:
        return split[0], split[1]
    raise ValueError(f"split must be 'rows', 'grid', 'auto' or (R, C) with R * C = {size} ranks, got {split!r}")


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


class Ranks:
    """One process alone: every sum is its own."""

    rank, size = 0, 1

    @property
    def whole(self) -> Ranks:
        """All ranks of the problem."""
        return self

    @property
    def rows(self) -> Ranks:
        """Those with other rows of the same columns: who sums over rows meets these."""
        return self

    @property
    def cols(self) -> Ranks:
        """Those with other columns of the same rows."""
        return self

    def arrange(self, grid: tuple[int, int]) -> None:
        """Form R rows and C columns of ranks."""

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks in their order."""
        return [value]

    def sum(self, value: Any) -> Any:
        """The sum over the ranks of a number or an array, in an order that does not depend on timing."""
        return value

    def min(self, value: Any) -> Any:
        return value

    def max(self, value: Any) -> Any:
        return value

    def before(self, value: int) -> int:
        """The sum over the ranks before this one."""
        return 0

    def same(self, **values: Any) -> None:
        """Raise ValueError on every rank where a named value is not the same on all."""

    def threads(self, asked: int | None, entries: int) -> int | None:
        """The number of threads of each rank, the same on all; None leaves the choice to the backend."""
        return asked

    def place(self, backend: str, *arrays: Any) -> None:
        """Choose a GPU for each rank where ``backend`` needs one."""

    def fold(self, sums: Any, top: bool = False) -> None:
        """Sum a few numbers in place; the first one's maximum where ``top``."""

    def gather(self, block: Any, root: int, along: str = "rows") -> Any:
        """The blocks of all "rows", of all "cols" (stacked, too) or of "both", put together on ``root``; else None."""
        return block

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """The rows of all ranks, block by block in their order, for rank 0 to iterate over; the others give theirs."""
        yield from blocks

    @contextmanager
    def adding(self, sums: Any) -> Iterator[None]:
        """On leaving, ``sums`` holds the sum over the ranks, the same bits on all; its last entry must be 0."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """What raises inside on one rank raises on all of them."""
        yield


ALONE = Ranks()


def join(comm: Any) -> Ranks:
    """The ranks of a communicator of mpi4py; alone for None."""
    if comm is None:
        return ALONE
    if isinstance(comm, Ranks):
        return comm
    from .backends.mpi import MpiRanks  # noqa: PLC0415  starts MPI

    return MpiRanks(comm)
