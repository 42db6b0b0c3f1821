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

    ``read(i0, i1)`` returns rows of the whole matrix, (i1 - i0, n), in any real dtype; ``columns`` (j0, j1), where only
    these are wanted, are its further arguments.
    """

    ndim = 2

    def __init__(
        self, read: Callable[..., Any], shape: tuple[int, int], dtype: Any, start: int = 0, columns: Any = ()
    ) -> None:
        self.read, self.shape, self.start, self.columns = read, shape, start, columns
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
        return Rows(self.read, (max(0, i1 - i0), self.shape[1]), self.dtype, self.start + i0, self.columns)

    def only(self, j0: int, j1: int) -> Rows:
        """These columns of all columns."""
        return Rows(self.read, (self.shape[0], j1 - j0), self.dtype, self.start, (j0, j1))

    def astype(self, dtype: Any, copy: bool = False) -> Rows:
        return Rows(self.read, self.shape, dtype, self.start, self.columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        i0, i1 = self.start, self.start + self.shape[0]
        block = np.asarray(self.read(i0, i1, *self.columns))
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


def opened(source: Any) -> Any:
    """The rows of a file; whatever else M may be as it is."""
    from .files import open_matrix  # noqa: PLC0415  which opens Rows

    return open_matrix(source) if isinstance(source, (str, os.PathLike)) else source


def kind_of(source: Any) -> str:
    """What a matrix comes from, the same on all ranks."""
    if isinstance(source, Rows):
        return f"a file of {source.shape}"
    return "a function" if callable(source) else "an array"


def rows_of(source: Any, a: Any, b: Any, ranks: Ranks) -> Any:
    """The own block of whole ``Rows`` or of a function; an array is that block already."""
    if not isinstance(source, Rows) and not callable(source):
        return source
    for name, weight in (("a", a), ("b", b)):
        if isinstance(weight, (str, os.PathLike)):
            raise TypeError(f"{name} must be an array, got {weight!r}: mapuot.files.read_vector reads one from a file")
    in_grid = ranks.cols.size > 1
    if isinstance(source, Rows):
        i0, i1 = own_part(a, source.shape[0], ranks.rows, "rows", "a")
        block = source[i0:i1]
        return block.only(*own_part(b, source.shape[1], ranks.cols, "columns", "b")) if in_grid else block
    if b is None or np.size(b) == 0:
        raise ValueError("b must be given where M is a function: it tells the number of columns")
    count = 0 if a is None else len(a)
    if not ranks.rows.sum(count):
        raise ValueError("a must be given where M is a function: it tells the number of rows")
    i0, j0 = ranks.rows.before(count), ranks.cols.before(len(b))
    columns = (j0, j0 + len(b)) if in_grid else ()
    probe = np.asarray(source(i0, i0 + min(1, count), *columns))
    return Rows(source, (count, len(b)), probe.dtype, i0, columns)


def own_part(weight: Any, total: int, ranks: Ranks, what: str, name: str) -> tuple[int, int]:
    """The own rows or columns: the even split, or as the blocks of a or b lie."""
    given = None if weight is None or np.size(weight) == 0 else len(weight)
    if not ranks.max(given is not None):
        return own_rows(total, ranks.rank, ranks.size)
    start, count = ranks.before(given or 0), ranks.sum(given or 0)
    if count != total:
        raise ValueError(f"M has {total} {what}, but the blocks of {name} have {count}")
    return start, start + (given or 0)
