"""Ranks of one process: the functions by which ranks agree, for a process that is alone.

What a rank knows of its block only (a sum, a maximum, an error) becomes common through these few functions, which
cost nothing where there is one process. Over MPI: mpi.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Ranks:
    """Interface of the ranks of a problem, and its form for one process: every sum is over that alone."""

    rank, size = 0, 1

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order."""
        return [value]

    def sum(self, value: Any) -> Any:
        """Sum a number or an array over the ranks, in an order that does not depend on timing."""
        return value

    def min(self, value: Any) -> Any:
        return value

    def max(self, value: Any) -> Any:
        return value

    def before(self, value: int) -> int:
        """Sum a value over the ranks before this one."""
        return 0

    def same(self, **values: Any) -> None:
        """Raise ValueError on every rank where a named value is not the same on all."""

    def threads(self, asked: int | None, entries: int) -> int | None:
        """Return the number of threads of each rank, the same on all; None leaves the choice to the backend."""
        return asked

    def place(self, backend: str, *arrays: Any) -> None:
        """Choose a GPU for each rank where ``backend`` needs one."""

    def gather(self, block: Any, root: int) -> Any:
        """Return the blocks of all ranks, stacked, on ``root``; None elsewhere."""
        return block

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """Yield on rank 0 the rows of all ranks, block by block in their order; the other ranks hand over theirs."""
        yield from blocks

    @contextmanager
    def adding(self, sums: Any) -> Iterator[None]:
        """Add ``sums`` up over the ranks on leaving, to the same bits on all; its last entry must be 0."""
        yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks what one of them raises inside."""
        yield


ALONE = Ranks()


def own_rows(m: int, rank: int, size: int) -> tuple[int, int]:
    """Return (i0, i1): of m rows, rank ``rank`` of ``size`` has the rows i0 to i1 - 1.

    Any process can ask for the rows of any rank. If there are more ranks than rows, some have none and idle; if M has
    few, very long rows, give ``M.T`` instead.

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
