"""Parts of M: sets of points that no allowed pair connects with other points; each part is a separate problem."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays import host, namespace

PackedParts = tuple[int, Any, Any]  # number of parts, columns that belong to a part, part of each


class Parts:
    """The parts of M: their number, and the part of each row and column, ``count`` for points without a partner."""

    def __init__(self, count: int, rows: Any, cols: Any) -> None:
        self.count, self.rows, self.cols = count, rows, cols

    @property
    def packed(self) -> PackedParts:
        """Return the data for other ranks: 8 bytes for each column with a partner."""
        used = np.flatnonzero(self.cols < self.count).astype(np.int32)
        return self.count, used, self.cols[used]


def joined(blocks: list[PackedParts], n: int) -> tuple[int, list[Any], Any]:
    """Join the parts of blocks of rows: return their number, each block's new numbers, and each column's part."""
    from scipy import sparse  # noqa: PLC0415 - on first use
    from scipy.sparse import csgraph  # noqa: PLC0415

    counts, columns, numbers = zip(*blocks, strict=True)
    first = np.cumsum([0, *counts])  # number of each block's first part among all parts
    part = np.concatenate([k + number for k, number in zip(first[:-1], numbers, strict=True)])
    total = int(first[-1])
    column = np.concatenate(columns)
    graph = sparse.coo_array((np.ones(len(part), np.int8), (part, total + column)), shape=(total + n, total + n))
    _, label = csgraph.connected_components(graph.tocsr(), directed=False)
    present, number = np.unique(label[:total], return_inverse=True)
    count = len(present)
    whole = np.full(int(label.max(initial=0)) + 1, count, np.int32)  # ``count``: a column without a partner
    whole[present] = np.arange(count)
    new = [np.append(number[k0:k1], count).astype(np.int32) for k0, k1 in itertools.pairwise(first)]
    return count, new, whole[label[total:]]


def allowed_pairs(M: Any, c: Any) -> Any:
    """Return a mask, on the host, of the pairs that neither M nor the reference c (or None) forbids."""
    if namespace(M) is np:
        M = np.asarray(M)
    allowed = host(np.isfinite(M))
    if c is None:
        return allowed
    return allowed & (np.asarray(host(c)) > 0)


def parts_of_masks(masks: Iterable[Any], n: int) -> Parts:
    """Find the parts that allowed pairs connect; ``masks``: blocks of rows, (k, n) bool on the host, perhaps none."""
    found = [parts_of_mask(mask) for mask in masks]
    if len(found) < 2:  # importing SciPy's graphs takes 0.1 s
        if found:
            return found[0]
        return parts_of_mask(np.zeros((0, n), bool))
    count, new, cols = joined([part.packed for part in found], n)
    rows = [x[part.rows] for x, part in zip(new, found, strict=True)]
    return Parts(count, np.concatenate(rows), cols)


def parts_of_mask(mask: Any) -> Parts:
    """Find the parts of one block by breadth-first search, which reads each row and each column once."""
    rows, cols = (np.full(k, -1, np.int32) for k in mask.shape)
    count = 0
    for first in np.flatnonzero(mask.any(1)):
        if rows[first] >= 0:
            continue
        new = np.array([first])
        while len(new):
            rows[new] = count
            reached = np.flatnonzero(mask[new].any(0) & (cols < 0))
            cols[reached] = count
            new = np.flatnonzero(mask[:, reached].any(1) & (rows < 0))
        count += 1
    return Parts(count, *(np.where(x < 0, count, x) for x in (rows, cols)))
