"""Products with stored pairs on a GPU. M and K are stored twice: row by row, and column by column.

So every sum runs along contiguous entries in a fixed order: no atomic additions, and reproducible bits. A pair takes
4 or 8 bytes of M, as many of K, and an index of 2 bytes (4 above 65536 rows or columns), all of it twice. Passes over
pairs: sparse.py. Device side: src_cuda/sparse/sparse_stream.cu.
"""

import weakref
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ...problem.parts import Parts
from ...problem.sparse import Sparse
from .. import records
from ..operator import Operator
from ..records import put
from ..workspace import STORAGE
from .arrays import on_device
from .kernels import ITEMSIZE, STORES, by_value, kernel
from .operator import DeviceOperator
from .settings import DEVICE_PAIRS

RUNS = records.read("common/record.h", "sparse.cuh")["Runs"]
PAIRS = records.read("common/record.h", "sparse_stream.cu")["Pairs"]
THREADS = 256  # RUN_THREADS of sparse.cuh
EACH = 8  # mean entries of a row that one thread adds; equals AHEAD of sparse.cuh
LONG = 64  # most entries that one thread adds; a longer row gets a block
OF_BYTES = {size: name for name, size in ITEMSIZE.items()}


class Runs:
    """The stored pairs of M or of its transpose, row by row: ``Runs`` of sparse.cuh for all rows or for some."""

    def __init__(self, start: Any, index: Any, M: Any, c: Any) -> None:
        self.start, self.index, self.M, self.c = start, index, M, c
        self.count = len(start) - 1
        mean = len(index) / max(1, self.count)
        self.lanes = min(32, 1 << max(0, int(np.ceil(np.log2(max(1.0, mean / EACH))))))  # threads of a row
        self.most = LONG * self.lanes
        self.long = cp.flatnonzero(cp.diff(start) > self.most).astype(np.int64)

    def records(self, i0: int = 0, i1: int | None = None, threads: int = THREADS) -> list[tuple[Any, Any]]:
        """Return (record, list or None) for the short rows of [i0, i1), and for the long rows if there are any.

        ``threads``: threads of a block; a block works on one long row.
        """
        long = self.long
        if i1 is None:
            i1 = self.count
        elif len(long):
            long = long[(long >= i0) & (long < i1)] - i0
        found = []
        for count, lanes, rows in ((i1 - i0, self.lanes, None), (len(long), threads, long)):
            record = np.zeros((), RUNS)
            put(record, {"count": count, "lanes": lanes, "most": self.most})
            put(record, {"index": self.index, "start": self.start[i0:], "list": rows})
            found.append((record, rows))
        if len(long):
            return found
        return found[:1]

    def launch(
        self, function: str, exponents: tuple[Any, Any, float], *arguments: Any, i0: int = 0, i1: int | None = None
    ) -> None:
        """Launch a kernel over the rows [i0, i1); ``exponents``: (alpha from row i0 on, beta, reg)."""
        alpha, beta, reg = exponents
        pairs = np.zeros((), PAIRS)
        put(pairs, {"M": self.M, "c": self.c, "inv_reg": 1 / reg, "alpha": alpha, "beta": beta})
        if function != "sparse_entries":
            store = "float64"
        else:
            store = OF_BYTES[arguments[0].itemsize]
        kinds = {"COST": int(self.M.dtype == np.float32), "SHORT_INDEX": int(self.index.itemsize == 2)}
        run = kernel("sparse_stream.cu", function, STORE=STORES[store], **kinds)
        for record, _ in self.records(i0, i1):
            run((blocks_for(record),), (THREADS,), (by_value(pairs), by_value(record), *arguments))


def index_bytes(shape: tuple[int, int]) -> int:
    return 2 if max(shape) <= DEVICE_PAIRS.short_points else 4


def blocks_for(record: Any, most: int = 1 << 20) -> int:
    return max(1, min(most, -(-int(record["count"]) // (THREADS // int(record["lanes"])))))


class DevicePairs:
    """A sparse M on the device, and c at its stored pairs: ``rows`` and ``cols``."""

    def __init__(self, cost: Sparse, c: Sparse | None) -> None:
        m, n = cost.shape
        start = cp.asarray(cost.start - cost.start[0])
        column = cp.asarray(cost.column)
        M = cp.asarray(cost.data)
        if c is None:
            shares = None
        else:
            shares = cp.asarray(c.data)
        index = np.uint16 if index_bytes(cost.shape) == 2 else np.int32
        self.rows = Runs(start, column.astype(index, copy=False), M, shares)
        row = cp.searchsorted(start, cp.arange(cost.size), side="right") - 1
        key = column.astype(np.int64) * m + row  # keys are distinct: any sort gives this order
        order = cp.argsort(key)
        turned = cp.searchsorted(key[order], cp.arange(n + 1) * m).astype(np.int64)
        self.cols = Runs(turned, row[order].astype(index), M[order], None if shares is None else shares[order])

    def parts(self) -> Parts | None:
        """Find the parts of M that no pair connects with each other; None if M is connected."""
        m, n = self.rows.count, self.cols.count
        end = cp.arange(m + n, dtype=np.int32)
        options = {"STORE": 0, "COST": 0, "SHORT_INDEX": int(self.rows.index.itemsize == 2)}
        run = kernel("sparse_stream.cu", "join_parts_of", **options)
        for record, _ in self.rows.records():
            run((blocks_for(record),), (THREADS,), (by_value(record), end, np.int32(m)))
        kernel("sparse_stream.cu", "end_parts", **options)(
            (-(-len(end) // THREADS),), (THREADS,), (end, np.int32(m + n))
        )
        label = end[m:].get()
        number = np.cumsum(np.isin(np.arange(m), label))  # of a part; its label is a row
        count = int(number[-1])
        cols = np.where(label < m, number[np.minimum(label, m - 1)] - 1, count)
        if count > 1:
            return Parts(count, None, cols.astype(np.int32))
        return None


LAST: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by cost: (weak reference to c, device, the
# pairs used last), for solves at one reg after another


def pairs_of(cost: Any, c: Any) -> DevicePairs:
    """Return the pairs of a cost and of c; they stay on the device until other pairs are requested."""
    device = cp.cuda.Device().id
    known_c, known_device, pairs = LAST.get(cost, (None, None, None))
    if known_device == device and (known_c is c if known_c is None else known_c() is c is not None):
        return pairs  # type: ignore[no-any-return]
    pairs = None
    LAST.clear()  # free the memory of the old pairs first
    pairs = DevicePairs(cost, c)
    LAST[cost] = None if c is None else weakref.ref(c), device, pairs
    return pairs


class PairOperator(DeviceOperator):
    """K of stored pairs, and the plan on them; CuPy where M is CuPy's, else numpy."""

    cost: Sparse

    draw, exponents = Operator.draw, Operator.exponents  # draw from rows that `plan` makes; make exponents on the host

    @property
    def pairs(self) -> DevicePairs:
        return pairs_of(self.cost, self.c)

    def along(self, rows: bool) -> tuple[Runs, Any, Any]:
        """Return the pairs by rows or by columns, the exponents of that side, and the exponents of the other side."""
        if rows:
            return self.pairs.rows, self.alpha, self.beta
        return self.pairs.cols, self.beta, self.alpha

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        """Form the rows i0 to i1 as a CSR array with an entry for each stored pair."""
        runs, alpha, beta = self.along(True)
        before, end = (int(self.cost.start[i] - self.cost.start[0]) for i in (i0, i1))
        values = cp.empty(end - before, self.dtype)
        if end > before:
            made = alpha[i0:], beta, self.reg
            runs.launch("sparse_entries", made, values, np.int64(before), np.float64(0.0), i0=i0, i1=i1)
        return self.cost.read(i0, i1).with_data(self.back(values))

    def product(self, X: Any, turned: bool) -> Any:
        runs, own, other = self.along(not turned)
        d = X.shape[1]
        out = cp.empty((runs.count, d))
        for x0 in range(0, d, 4):
            runs.launch("sparse_apply", (own, other, self.reg), X, np.int64(d), np.int64(x0), out)
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        found = []
        for rows in (True, False):
            runs, own, other = self.along(rows)
            out = cp.empty(runs.count)
            paid = cp.empty(runs.count)
            runs.launch("sparse_sums", (own, other, self.reg), out, paid)
            found.append((out.get(), float(paid.sum())))
        (row, cost), (col, _) = found
        return cost, row, col

    def balance(self, alpha: F64, x: F64) -> F64:
        np.copyto(alpha, -self.tops(self.pairs.rows, np.zeros(len(alpha)), x), where=alpha > -np.inf)
        return self.tops(self.pairs.cols, x, np.where(np.isposinf(alpha), -np.inf, alpha))

    def tops(self, runs: Runs, own: F64, other: F64) -> F64:
        """Return the logarithm of the largest entry of each row."""
        out = cp.empty(runs.count)
        alpha, beta = on_device(own, other)
        runs.launch("sparse_max", (alpha, beta, self.reg), out)
        found: F64 = out.get()
        return found

    def store(self, dtype: str, rows: int | None = None) -> None:
        self.K = tuple(cp.empty(self.cost.size, STORAGE[dtype]) for _ in range(2))

    def build(self, alpha: F64, beta: F64, flush: float = 0.0, held: bool = True) -> None:
        """Make the entries of K in both orders."""
        self.set_exponents(alpha, beta)
        for rows, K in zip((True, False), self.K, strict=True):
            runs, own, other = self.along(rows)
            runs.launch("sparse_entries", (own, other, self.reg), K, np.int64(0), np.float64(flush))
