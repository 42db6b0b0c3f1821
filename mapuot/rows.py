"""A matrix that is read block by block: the rows of a file, or of a function that makes them.

Everything that reads M streams over ``row_blocks``; an array is one block of its own, and only ``Rows`` are copied,
BLOCK_BYTES at a time, so that a matrix larger than memory costs as much memory as its K.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .ranks import Ranks, own_rows

BLOCK_BYTES = 1 << 26


class Rows:
    """Rows ``start`` to ``start + m`` of a matrix; slices are as lazy, ``numpy.asarray`` reads them.

    ``read(i0, i1)`` returns rows of the whole matrix, (i1 - i0, n), in any real dtype.
    """

    ndim = 2

    def __init__(self, read: Callable[[int, int], Any], shape: tuple[int, int], dtype: Any, start: int = 0) -> None:
        self.read, self.shape, self.start = read, shape, start
        self.dtype = np.dtype(np.float32 if np.dtype(dtype).name in ("float32", "float16") else np.float64)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Rows:
        i0, i1, _ = rows.indices(self.shape[0])
        return Rows(self.read, (max(0, i1 - i0), self.shape[1]), self.dtype, self.start + i0)

    def astype(self, dtype: Any, copy: bool = False) -> Rows:
        return Rows(self.read, self.shape, dtype, self.start)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        i0, i1 = self.start, self.start + self.shape[0]
        block = np.asarray(self.read(i0, i1))
        if block.shape != self.shape:
            raise ValueError(f"M must give shape {self.shape} for rows {i0} to {i1}, got {block.shape}")
        if block.dtype.kind not in "fiu":
            raise TypeError(f"M must hold real numbers, got dtype {block.dtype}")
        return np.ascontiguousarray(block, dtype=dtype or self.dtype)


def row_blocks(M: Any, c: Any = None) -> Iterator[tuple[int, int, Any, Any]]:
    """(i0, i1, rows of M, rows of c or None): an array whole, ``Rows`` block by block."""
    m, n = M.shape
    step = max(1, BLOCK_BYTES // (n * M.itemsize)) if isinstance(M, Rows) else max(1, m)
    for i0 in range(0, m, step):
        i1 = min(i0 + step, m)
        if isinstance(M, Rows):
            yield i0, i1, np.asarray(M[i0:i1]), None if c is None else np.asarray(c[i0:i1])
        else:
            yield i0, i1, M, c


def rows_of(source: Any, a: Any, b: Any, ranks: Ranks) -> Any:
    """The own block of a file, of a function or of whole ``Rows``; an array is that block already."""
    from .files import open_matrix  # noqa: PLC0415  which opens Rows

    if isinstance(source, (str, os.PathLike)):
        source = open_matrix(source)
    if not isinstance(source, Rows) and not callable(source):
        return source
    given = None if a is None or np.size(a) == 0 else len(a)
    if isinstance(source, Rows):
        m = source.shape[0]
        i0, i1 = own_rows(m, ranks.rank, ranks.size)
        if ranks.max(given is not None):
            i0, count = ranks.before(given or 0), ranks.sum(given or 0)
            if count != m:
                raise ValueError(f"M has {m} rows, but the blocks of a have {count}")
            i1 = i0 + (given or 0)
        return source[i0:i1]
    if b is None or np.size(b) == 0:
        raise ValueError("b must be given where M is a function: it tells the number of columns")
    if not ranks.sum(given or 0):
        raise ValueError("a must be given where M is a function: it tells the number of rows")
    count, i0 = given or 0, ranks.before(given or 0)
    probe = np.asarray(source(i0, i0 + min(1, count)))
    return Rows(source, (count, len(b)), probe.dtype, i0)
