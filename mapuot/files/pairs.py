"""A sparse matrix in a file, by compressed rows or columns: `PairsFile` holds their offsets, and reads rows.

It reads blocks straight into the arrays of the solver. Memory: 12 bytes for each pair (8 for float32 costs), one block,
and 8 bytes for each row or column of the file. Compressed columns are read twice, first for the length of each row.
Rows that are unsorted, or have duplicates, are repaired in place.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..problem.cost import Cost, held_type, own_part
from ..problem.settings import BLOCKS
from ..problem.sparse import MOST_COLUMNS, Sparse
from ..ranks import Ranks


class PairsFile(Cost):
    """A CSR or CSC matrix as three arrays of a file; ``naming`` is a context that names the file in errors."""

    operator = "pairs"
    kind = Sparse.kind

    def __init__(self, arrays: Any, form: str, shape: Any, naming: Callable[[], AbstractContextManager[None]]) -> None:
        m, n = (int(k) for k in shape)
        self.form = form
        self.naming = naming
        self.data = arrays["data"]
        self.indices = arrays["indices"]
        if self.data.dtype.kind not in "fiu":
            raise TypeError(f"data must hold real numbers, got dtype {self.data.dtype}")
        self.shape = (m, n)
        self.dtype = held_type(self.data.dtype)
        self.bounds = as_bounds(arrays["indptr"], m if form == "csr" else n)
        sizes = [x.shape[0] for x in (self.data, self.indices)]
        if min(sizes) < self.bounds[-1]:
            raise ValueError(f"indptr must end at most at the {min(sizes)} stored costs, got {self.bounds[-1]}")
        if n > MOST_COLUMNS:
            raise ValueError(f"a sparse M must have at most {MOST_COLUMNS} columns, got {n}")

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> Sparse:
        return self.read(*own_part(a, self.shape[0], ranks))

    def read(self, i0: int, i1: int) -> Sparse:
        with self.naming():
            if self.form == "csr":
                return self.by_rows(i0, i1)
            return self.by_columns(i0, i1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.read(0, self.shape[0]), dtype)

    def by_rows(self, i0: int, i1: int) -> Sparse:
        start = self.bounds[i0 : i1 + 1] - self.bounds[i0]
        data = np.empty(start[-1], self.dtype)
        column = np.empty(start[-1], np.int32)
        for k0, k1 in steps(self.bounds[i0], self.bounds[i1]):
            place = slice(k0 - self.bounds[i0], k1 - self.bounds[i0])
            data[place] = self.data[k0:k1]
            column[place] = self.checked(k0, k1, self.shape[1])
        return in_order(data, column, start, (i1 - i0, self.shape[1]))

    def by_columns(self, i0: int, i1: int) -> Sparse:
        """Read the rows i0 to i1 from compressed columns: first the row lengths, then each pair into its row."""
        count = np.zeros(i1 - i0, np.int64)
        last = self.bounds[-1]
        for k0, k1 in steps(0, last):
            row = self.checked(k0, k1, self.shape[0])
            count += np.bincount(row[(i0 <= row) & (row < i1)] - i0, minlength=i1 - i0)
        start = np.concatenate([[0], np.cumsum(count)])
        data = np.empty(start[-1], self.dtype)
        column = np.empty(start[-1], np.int32)
        free = start[:-1].copy()
        for k0, k1 in steps(0, last):
            row = self.checked(k0, k1, self.shape[0])
            order = np.argsort(row, kind="stable")
            order = order[slice(*np.searchsorted(row[order], [i0, i1]))]
            row = row[order] - i0
            first = np.flatnonzero(np.diff(row, prepend=-1))  # first entry of each row in this block
            length = np.diff(first, append=len(row))
            place = free[row] + np.arange(len(row)) - np.repeat(first, length)
            free[row[first]] += length
            data[place] = np.asarray(self.data[k0:k1])[order]
            column[place] = np.searchsorted(self.bounds, k0 + order, side="right") - 1
        return in_order(data, column, start, (i1 - i0, self.shape[1]))

    def checked(self, k0: int, k1: int, limit: int) -> Any:
        """Read some indices of rows or of columns, and check that they are below ``limit``."""
        found = np.asarray(self.indices[k0:k1])
        if found.dtype.kind not in "iu":
            raise ValueError(f"indices must be integers, got dtype {found.dtype}")
        if found.size and not 0 <= found.min() <= found.max() < limit:
            raise ValueError(f"indices must be in 0..{limit - 1}, got {found.min()} and {found.max()}")
        return found.astype(np.int64, copy=False)


def as_bounds(indptr: Any, count: int) -> Any:
    """Check the offsets of the rows or columns; all other code trusts them."""
    found = np.asarray(indptr[0 : indptr.shape[0]])
    if found.dtype.kind not in "iu" or found.shape != (count + 1,):
        raise ValueError(f"indptr must be {count + 1} integers, got shape {found.shape} of dtype {found.dtype}")
    found = found.astype(np.int64, copy=False)
    if found[0] != 0 or (np.diff(found) < 0).any():
        raise ValueError("indptr must begin at 0 and never fall")
    return found


def steps(k0: int, k1: int) -> Iterator[tuple[int, int]]:
    for k in range(int(k0), int(k1), BLOCKS.stored_pairs):
        yield k, min(k + BLOCKS.stored_pairs, int(k1))


def in_order(data: Any, column: Any, start: Any, shape: tuple[int, int]) -> Sparse:
    """Return a cost with sorted columns in each row; copy only if there are duplicates."""
    falls = np.zeros(len(column) + 1, bool)
    falls[1:-1] = column[1:] <= column[:-1]
    falls[start] = False  # a row begins here
    if falls.any():
        from scipy import sparse  # noqa: PLC0415 - on first use

        csr = sparse.csr_array((data, column, start), shape=shape)
        csr.has_canonical_format = csr.has_sorted_indices = False
        csr.sum_duplicates()
        data = csr.data
        column = csr.indices.astype(np.int32, copy=False)
        start = csr.indptr.astype(np.int64, copy=False)
    return Sparse(data, column, start, shape)
