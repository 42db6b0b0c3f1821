"""The processes that share one problem's rows: what they have to agree on, in the words of one process.

Rows are cut into blocks, one a rank; columns are whole on every rank. What a rank knows of its rows only (a sum over
them, a maximum, an error) becomes common through these few words, which cost nothing where there is one process.
The MPI form is backends/mpi.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def own_rows(m: int, rank: int, size: int) -> tuple[int, int]:
    """Rows [i0, i1) of ``rank`` among ``size``: the even split of m rows, empty where there are more ranks."""
    return m * rank // size, m * (rank + 1) // size


class Ranks:
    """One process alone: every sum is its own."""

    rank, size = 0, 1

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

    def gather(self, rows: Any, root: int) -> Any:
        """Row blocks of all ranks, stacked on ``root``; None elsewhere."""
        return rows

    def stream(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """The row blocks of all ranks in their order, for rank 0 to iterate over; the others give theirs."""
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
