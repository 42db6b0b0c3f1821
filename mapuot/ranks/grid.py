"""A grid of R x C MPI ranks: rank r C + c holds the block (r, c) of K, u of its rows and v of its columns.

A pass meets twice for vectors and four times for scalars: s = K v is summed over the ranks of a row of the grid, then
K^T u over those of a column, both m / R and n / C numbers; then the O(n) half runs on the own columns, and what its
sweeps sum over the columns is summed over the row. u depends on the sum s, so that the tile of K in cache cannot wait
for it: K is read twice. What is rare goes through the meeting of all ranks, where a rank that failed meets the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .alone import ALONE, Ranks
from .gather import gather, stream
from .mpi import MpiRanks


class Grid(MpiRanks):
    """All ranks of a problem, in R rows and C columns; to begin with in one column: C = 1, whole rows on each."""

    def start(self) -> None:
        super().start()
        self.failing = False  # an error of some rank is on its way through the grid
        self.failed: Exception | None = None  # the own one
        self.grid = self.size, 1
        self.parts: tuple[Ranks, Ranks] = self, ALONE

    @property
    def rows(self) -> Ranks:
        return self.parts[0]

    @property
    def cols(self) -> Ranks:
        return self.parts[1]

    def arrange(self, grid: tuple[int, int]) -> None:
        self.same(split=repr(grid))
        self.grid = grid
        self.parts = parts(self, *grid) if grid[1] > 1 else (self, ALONE)

    def gather(self, block: Any, root: int, along: str = "rows") -> Any:
        return gather(self, self.grid, block, root, along)

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        return stream(self, self.grid, blocks)


class Part(MpiRanks):
    """The ranks of one column or one row of the grid; ``groups`` are the ranks of all of them."""

    def __init__(self, whole: Grid, comm: Any, groups: list[list[int]]) -> None:
        self.MPI, self.comm, self.all_ranks = whole.MPI, comm, whole
        self.rank, self.size = comm.rank, comm.size
        self.start()
        self.groups = groups
        self.message = np.empty(0)

    @property
    def whole(self) -> Grid:
        return self.all_ranks

    def exchange(self, value: Any, error: BaseException | None = None) -> list[Any]:
        self.whole.exchange(None, error)
        return self.allgather(value)

    def together(self) -> Any:
        return self.whole.together()

    def raised(self, error: Exception) -> Exception:
        return self.whole.raised(error)

    @contextmanager
    def adding(self, sums: Any) -> Iterator[None]:
        """An error travels along with the sums, to all ranks in a row and a column; then ``fold`` raises it."""
        whole = self.whole
        try:
            yield
        except Exception as error:
            whole.failing, whole.failed = True, error
            sums[:] = 0.0
        if len(self.message) != len(sums) + 1:
            self.message = np.empty(len(sums) + 1)
        self.message[:-1] = sums
        self.message[-1] = whole.failing
        self.add(self.message)
        sums[:] = self.message[:-1]
        whole.failing = bool(self.message[-1])

    def fold(self, sums: Any, top: bool = False) -> None:
        """Sum a few numbers in place (the first one's maximum where ``top``) in rank order: the same bits on all."""
        mine = np.append(sums, self.whole.failing)
        table = np.empty((self.size, len(mine)))
        self.comm.Allgather(mine, table)
        if table[:, -1].any():
            self.whole.exchange(None, self.whole.failed)
        sums[:] = table[:, :-1].sum(0)
        if top:
            sums[0] = table[:, 0].max()


def parts(whole: Grid, R: int, C: int) -> tuple[Ranks, Ranks]:
    """(ranks of the own column, which share its rows, ranks of the own row); made once for a communicator."""
    r, c = divmod(whole.rank, C)
    grids = whole.kept.setdefault("grids", {})
    if (R, C) not in grids:
        grids[R, C] = whole.comm.Split(c, r), whole.comm.Split(r, c)
    column, row = grids[R, C]
    down = [[r * C + c for r in range(R)] for c in range(C)]
    across = [[r * C + c for c in range(C)] for r in range(R)]
    return Part(whole, column, down), Part(whole, row, across)
