"""Ranks of one process: the collective operations, for a process that is alone.

These few functions combine local values (a sum, a maximum, an error) over all ranks. They cost nothing for one process.
Over MPI: mpi.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Ranks:
    """Interface of the ranks of a problem, implemented for one process: every sum has one term."""

    rank, size = 0, 1

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order."""
        return [value]

    def sum(self, value: Any) -> Any:
        """Sum a number or an array over the ranks, in an order that does not depend on timing."""
        return value

    min = max = sum  # one rank's value is the sum, the least and the largest of all

    def before(self, value: int) -> int:
        """Sum a value over the ranks before this one."""
        return 0

    def same(self, **values: Any) -> None:
        """Raise ValueError on every rank if a named value differs between ranks."""

    def threads(self, asked: int | None, entries: int) -> int | None:
        """Return the number of threads of each rank, the same on all; None leaves the choice to the backend."""
        return asked

    def place(self, backend: str, *arrays: Any) -> None:
        """Choose a GPU for each rank if ``backend`` needs one."""

    def gather(self, block: Any, root: int) -> Any:
        """Return the blocks of all ranks, stacked, on ``root``; None elsewhere."""
        return block

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """Yield on rank 0 the rows of all ranks, block by block in order; the other ranks send their rows."""
        yield from blocks

    @contextmanager
    def adding(self, sums: Any) -> Iterator[None]:
        """On exit add ``sums`` up over the ranks, to the same bits on all; its last entry must be 0."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one rank on all ranks."""
        yield


ALONE = Ranks()


def own_rows(m: int, rank: int, size: int) -> tuple[int, int]:
    """Return (i0, i1): of m rows, rank ``rank`` of ``size`` has the rows i0 to i1 - 1.

    Any process can ask for the rows of any rank. If there are more ranks than rows, some ranks are idle. Ranks exchange
    one number per column; if M is wide, pass ``M.T``.

    See Also
    --------
    mapuot.solve : takes a rank's rows, with ``comm=``

    Examples
    --------
    >>> import mapuot.ranks
    >>> [mapuot.ranks.own_rows(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return m * rank // size, m * (rank + 1) // size
