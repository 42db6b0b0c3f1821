"""Conditional plans P_ij / sum_j P_ij and their largest entries, from exponents less the row's largest exponent.

The mass of a row far from all columns may underflow, but its conditional plan is still well defined. With exponents
x_ij = log P_ij + any row constant, ``P_ij / sum_j P_ij = exp(x_ij - max x_i) / sum_j exp(x_ij - max x_i)``.
A block of exponents is an array on the plan's device, or a CSR array with one exponent for each stored pair.
"""

from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..penalties import F64
from ..problem.sparse import is_sparse, top_of

LEAST, MOST = 1e-290, 1e300  # sums of a plan between these bounds have full precision


def scaled_rows(block: Any) -> tuple[Any, Any]:
    """Return (exp(x - top), top), top the largest exponent of each row; a row of -inf gives zeros and -inf."""
    if is_sparse(block):
        count = np.diff(block.indptr)
        start = block.indptr[:-1]
        top = np.full(len(count), -np.inf)
        used = count > 0
        top[used] = np.maximum.reduceat(block.data, start[used])
        shift = np.repeat(np.where(np.isfinite(top), top, 0.0), count)
        scaled = block.copy()
        scaled.data = np.exp(block.data - shift)
        return scaled, top
    xp = namespace(block)
    top = block.max(1)
    return xp.exp(block - xp.where(xp.isfinite(top), top, 0.0)[:, None]), top


def mean_of_rows(block: Any, X: Any) -> tuple[F64, F64]:
    """Return (the mean of the rows of X under each row's conditional plan, the largest exponents), on the host."""
    weights, top = scaled_rows(block)
    X = namespace(weights).asarray(X)
    with np.errstate(invalid="ignore"):  # 0 / 0 in a row without a pair
        moved = host(weights @ X)
        return moved[:, :-1] / moved[:, -1:], host(top)


def joined(top: F64, sums: F64, other: F64, more: F64) -> tuple[F64, F64]:
    """Add two sums of exponentials; each is scaled by the exponential of minus its largest exponent."""
    high = np.maximum(top, other)
    shift = np.where(np.isfinite(high), high, 0.0)
    with np.errstate(invalid="ignore"):
        return high, sums * np.exp(top - shift)[:, None] + more * np.exp(other - shift)[:, None]


def largest(block: Any, k: int) -> tuple[Any, Any]:
    """Return the k largest exponents of each row, largest first: (columns, exponents), both (rows, k).

    NumPy partitions rows with many equal numbers 15 times more slowly than other rows. So cut rows into runs of
    columns: the k runs with the largest maxima contain the k largest entries.
    """
    if is_sparse(block):
        return top_of(block, k)
    xp = namespace(block)
    m, n = block.shape
    if k == 1:
        index = block.argmax(1)[:, None]
    elif xp is not np:  # CuPy's partition is a sort
        index = xp.argsort(-block, axis=1)[:, :k]
    elif 4 * k * (width := int(np.sqrt(n / k))) < n:
        runs = first_of(np.maximum.reduceat(block, np.arange(0, n, width), axis=1), k)
        columns = (runs[:, :, None] * width + np.arange(width)).reshape(m, -1)
        entries = np.take_along_axis(block, np.minimum(columns, n - 1), 1)
        entries[columns >= n] = -np.inf
        index = np.take_along_axis(columns, first_of(entries, k), 1)
    else:
        index = first_of(block, k)
    return index, xp.take_along_axis(block, index, 1)


def first_of(values: F64, k: int) -> Any:
    """Return the places of the k largest values of each row, largest first."""
    n = values.shape[1]
    found = np.argpartition(values, n - k, axis=1)[:, n - k :]
    return np.take_along_axis(found, np.argsort(-np.take_along_axis(values, found, 1), axis=1), 1)
