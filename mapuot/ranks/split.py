"""Blocks of rows of M, one a rank: as even as whole rows allow; every rank has all columns."""

from __future__ import annotations


def own_rows(m: int, rank: int, size: int) -> tuple[int, int]:
    """Return the rows [i0, i1) of ``rank`` among ``size``, of m rows; empty ones where there are more ranks.

    Every process finds those of all others by itself. Ranks without rows idle: of few and very long rows give M.T.
    """
    return m * rank // size, m * (rank + 1) // size
