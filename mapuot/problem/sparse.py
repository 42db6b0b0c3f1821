"""Sparse costs: `Sparse` holds an M of SciPy or CuPy as CSR; pairs that are not stored are forbidden.

The code visits stored pairs only: K, the plan and all products have entries in the same places. Parts of M that no pair
connects are separate problems (``parts_between``). C side: src_c/sparse.h.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import host, is_on_device, namespace
from ..contract import Backend
from ..penalties import F64
from ..ranks import ALONE, Ranks
from .cost import Blocks, Cost, Range, Tell, held_type, joint_range, own_part
from .parts import Parts, joined
from .settings import BLOCKS

MOST_COLUMNS = 2**31 - 1  # indices have 32 bits
PADDED = ("bsr", "dia")  # formats that pad blocks or diagonals with zeros


class Sparse(Cost):
    """Stored costs, row by row: row i is ``data[start[i] - start[0] : start[i + 1] - start[0]]``."""

    held, operator = True, "pairs"  # pairs that are not stored are forbidden
    kind = "a sparse matrix"

    @property
    def xp(self) -> Any:
        if self.on_device:
            return sys.modules["cupy"]
        return np

    def __init__(
        self, data: Any, column: Any, start: Any, shape: tuple[int, int], cached: dict[str, Any] | None = None,
        on_device: bool = False,
    ) -> None:  # fmt: skip
        """Hold the arrays of CSR rows on the host; ``on_device``: M came from a GPU, and the plan goes there."""
        self.data, self.column, self.start, self.shape, self.dtype = data, column, start, shape, data.dtype
        self.cached = {} if cached is None else cached  # facts about the places that do not depend on the numbers
        self.on_device = on_device

    @classmethod
    def of_matrix(cls, M: Any, name: str = "M") -> "Sparse":
        """Make the cost of a SciPy matrix: duplicates are added up, explicit zeros kept; a CSR matrix is not copied.

        Zeros in blocks and in diagonals are refused: they may be padding. A matrix of cupyx.scipy.sparse is copied to
        the host, which checks its indices and finds its parts.
        """
        on_device = is_on_device(M)
        M = host(M)
        if M.ndim != 2:
            raise ValueError(f"{name} must be a matrix (m, n), got shape {M.shape}")
        if M.dtype.kind not in "fiu":
            raise TypeError(f"{name} must hold real numbers, got dtype {M.dtype}")
        if M.shape[1] > MOST_COLUMNS:
            raise ValueError(f"{name} must have at most {MOST_COLUMNS} columns where it is sparse, got {M.shape[1]}")
        check_padding(M, name)
        csr = M.tocsr()
        try:
            csr.check_format(full_check=True)  # the core trusts its indices
        except ValueError as error:
            raise ValueError(f"{name} is no valid sparse matrix: {error}") from error
        if not csr.has_canonical_format:
            csr = csr.copy() if csr is M else csr
            csr.sum_duplicates()
        start = np.ascontiguousarray(csr.indptr, np.int64)
        m, n = M.shape
        data = csr.data[: start[-1]]
        column = csr.indices[: start[-1]]
        column = np.ascontiguousarray(column, np.int32)
        data = np.ascontiguousarray(data, held_type(csr.dtype))
        return cls(data, column, start, (int(m), int(n)), on_device=on_device)

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def pairs(self) -> "Sparse":
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "Sparse":
        i0, i1, _ = rows.indices(self.shape[0])
        start = self.start[i0 : max(i0, i1) + 1]
        k0, k1 = (int(start[i] - self.start[0]) for i in (0, -1))
        shape = len(start) - 1, self.shape[1]
        return Sparse(self.data[k0:k1], self.column[k0:k1], start, shape, on_device=self.on_device)

    def read(self, i0: int, i1: int) -> "Sparse":
        if i1 - i0 == self.shape[0]:
            return self
        return self[i0:i1]

    def place(self, i: int, ld: int) -> int:
        return int(self.start[i] - self.start[0])

    def less_each(self, constants: F64) -> "SparseCosts":
        return SparseCosts([self.data - c for c in constants.astype(self.dtype)], self)

    def less(self, constant: float) -> "Sparse":
        return Sparse(self.data - constant, self.column, self.start, self.shape, self.cached, self.on_device)

    def with_data(self, data: Any) -> Any:
        """Return a CSR array with other numbers in these places; it has its own indices, on the device of ``data``."""
        from scipy import sparse  # noqa: PLC0415 - on first use

        start = self.start - self.start[0]
        index = np.int32 if start[-1] <= MOST_COLUMNS else np.int64
        column = self.column.astype(index)
        start = start.astype(index)
        if namespace(data) is np:
            return sparse.csr_array((data, column, start), shape=self.shape)
        import cupy  # noqa: PLC0415 - of an M from a GPU
        from cupyx.scipy.sparse import csr_matrix  # noqa: PLC0415

        return csr_matrix((data, cupy.asarray(column), cupy.asarray(start)), shape=self.shape)

    def matrix(self) -> Any:
        return self.with_data(self.data)

    def symmetric(self, backend: Backend) -> bool:
        m, n = self.shape
        if m != n or not (
            self.on_device or np.array_equal(np.bincount(self.column, minlength=m), np.diff(self.start))
        ):  # faster than a comparison with the transpose
            return False
        turned = self.transpose()
        pairs = (self.start - self.start[0], turned.start), (self.column, turned.column), (self.data, turned.data)
        return all(np.array_equal(x, y) for x, y in pairs)

    def transpose(self) -> "Sparse":
        turned = Sparse.of_matrix(self.matrix().T.tocsr())
        turned.on_device = self.on_device
        return turned

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the matrix (m, n), with inf for pairs that are not stored."""
        whole = np.full(self.shape, np.inf, dtype or self.dtype)
        whole[self.row_numbers(), self.column] = self.data
        return whole

    def blocks(self, c: Cost | None = None, i0: int = 0, i1: int | None = None, most: int | None = None) -> Blocks:
        """Yield blocks as every cost does, of ``most`` bytes of stored numbers, but at least one row."""
        if i1 is None:
            i1 = self.shape[0]
        if most is None:
            most = sys.maxsize
        else:
            most = max(1, most // self.dtype.itemsize)
        while i0 < i1:
            end = int(np.searchsorted(self.start, min(int(self.start[i0]) + most, sys.maxsize), side="right")) - 1
            k1 = min(max(end, i0 + 1), i1)
            yield i0, k1, self.read(i0, k1), None if c is None else c.read(i0, k1)
            i0 = k1

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        """Return the range as every cost does; pairs that are not stored count as +inf."""
        absent = self.shape[0] * self.shape[1] - self.size
        if not self.size:
            return 0.0, 0.0, 0, absent
        low, high, bad, infinite, *_ = backend.extrema(self.data[None], threads)
        return low, high, bad, infinite + absent

    def finite_range(self, backend: Backend, threads: int | None = None) -> Range:
        low, high, bad, infinite = self.range(backend, threads)
        return low, high, bad, infinite - (self.all_pairs - self.size)

    def first(self, is_wrong: Callable[[Any], Any]) -> tuple[int, ...]:
        k = int(np.argmax(is_wrong(self.data)))
        return int(self.row_numbers()[k]), int(self.column[k])

    def own_block(self, a: Any, b: Any, ranks: Ranks) -> "Sparse":
        return self[slice(*own_part(a, self.shape[0], ranks))]

    def sum(self) -> float:
        with np.errstate(over="ignore"):
            return float(self.data.sum(dtype=np.float64))

    def row_numbers(self) -> Any:
        return np.repeat(np.arange(self.shape[0]), np.diff(self.start))

    def at(self, row: Any, column: Any) -> Any:
        """Return these entries, with 0 for pairs that are not stored."""
        if not self.size:
            return np.zeros(len(row))
        mine = row * self.shape[1] + column
        theirs = self.row_numbers() * self.shape[1] + self.column
        place = np.minimum(np.searchsorted(theirs, mine), self.size - 1)
        return np.where(theirs[place] == mine, self.data[place], 0)

    def taken_from(self, other: Any) -> "Sparse":
        data = other.at(self.row_numbers(), self.column)
        return Sparse(np.ascontiguousarray(data, np.float64), self.column, self.start, self.shape)

    def parts_between(self, out_rows: Any, out_cols: Any, ranks: Ranks = ALONE) -> Parts:
        """Return the parts that finite pairs of all ranks connect, without the points of the masks.

        All costs in these places share a cache of the last result; several threads may call this.
        """
        finite = np.isfinite(self.data)
        key = out_rows.tobytes(), out_cols.tobytes(), b"" if finite.all() else finite.tobytes()
        kept: tuple[Any, Parts] | None = self.cached.get("parts")
        if not ranks.min(kept is not None and kept[0] == key) or kept is None:
            own = self._parts_between(finite, out_rows, out_cols)
            if ranks.size > 1:
                count, new, cols = joined(ranks.all(own.packed), self.shape[1])
                own = Parts(count, new[ranks.rank][own.rows], cols)
            kept = self.cached["parts"] = key, own
        return kept[1]

    def _parts_between(self, finite: Any, out_rows: Any, out_cols: Any) -> Parts:
        found = []
        for i0, i1, block, _ in self.blocks(most=BLOCKS.searched_pairs * self.dtype.itemsize):
            k = int(self.start[i0] - self.start[0])
            own: Parts = block.parts_at_once(finite[k : k + block.size], out_rows[i0:i1], out_cols)
            if i1 - i0 == self.shape[0]:
                return own
            found.append((own.rows, own.packed))
        if not found:
            return self.parts_at_once(finite, out_rows, out_cols)
        count, new, cols = joined([told for _, told in found], self.shape[1])
        return Parts(count, np.concatenate([x[rows] for x, (rows, _) in zip(new, found, strict=True)]), cols)

    def parts_at_once(self, finite: Any, out_rows: Any, out_cols: Any) -> Parts:
        """Find the parts by SciPy, which takes 43 bytes for each pair."""
        from scipy import sparse  # noqa: PLC0415 - on first use
        from scipy.sparse import csgraph  # noqa: PLC0415

        m, n = self.shape
        row = self.row_numbers()
        used = finite & ~out_rows[row] & ~out_cols[self.column]
        row = row[used]
        column = self.column[used]
        start = np.zeros(m + n + 1, np.int64)
        start[1 : m + 1] = np.cumsum(np.bincount(row, minlength=m))
        start[m + 1 :] = start[m]
        ones = np.ones(len(column), np.int8)
        index = np.int32 if max(len(column), m + n) <= MOST_COLUMNS else np.int64
        graph = sparse.csr_array((ones, column.astype(index) + index(m), start.astype(index)), shape=(m + n, m + n))
        _, label = csgraph.connected_components(graph, directed=False)
        size = np.bincount(label)
        number = np.full(len(size), -1, np.int64)
        number[size > 1] = np.arange(int((size > 1).sum()))
        count = int((size > 1).sum())
        label = np.where(number[label] < 0, count, number[label]).astype(np.int32)
        return Parts(count, label[:m], label[m:])


class SparseCosts(Cost):
    """Costs of a batch that store the same pairs, (p, m, n); facts about the places are computed once."""

    operator = "pairs"
    kind, ndim = "sparse matrices", 3

    def __init__(self, data: list[Any], places: Sparse) -> None:
        self.data, self.places = data, places
        self.shape, self.dtype = places.shape, data[0].dtype

    @classmethod
    def of_matrices(cls, matrices: Any) -> "SparseCosts":
        """Make the costs of a batch from matrices; SciPy CSR matrices with equal indices are not copied."""
        for i, M in enumerate(matrices):
            if not is_sparse(M):
                raise TypeError(f"M[{i}] must be a sparse matrix as the others are, got {type(M).__name__}")
        on_device = any(map(is_on_device, matrices))
        matrices = [*map(host, matrices)]
        dtype = np.result_type(*(held_type(M.dtype) for M in matrices))
        first = Sparse.of_matrix(matrices[0], "M[0]")
        first.on_device = on_device
        data = [first.data]
        example = matrices[0]
        in_order = example.format == "csr" and example.has_canonical_format
        for i, M in enumerate(matrices[1:], 1):
            alike = in_order and M.format == "csr" and M.shape == example.shape and M.dtype.kind in "fiu"
            if alike and all(map(np.array_equal, (M.indptr, M.indices), (example.indptr, example.indices))):
                data.append(M.data[: first.size])
                continue
            one = Sparse.of_matrix(M, f"M[{i}]")
            places = (one.start, one.column), (first.start, first.column)
            if one.shape != first.shape or not all(map(np.array_equal, *places)):
                raise ValueError(f"M[{i}] must store the same pairs as M[0]: solve those that differ one by one")
            data.append(one.data)
        return cls([np.ascontiguousarray(x, dtype) for x in data], first)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def size(self) -> int:
        return self.places.size

    @property
    def all_pairs(self) -> int:
        return len(self) * super().all_pairs

    def symmetric(self, backend: Backend) -> bool:
        return all(self.of(i).symmetric(backend) for i in range(len(self)))

    def of(self, i: Any) -> "Sparse | SparseCosts":
        if isinstance(i, slice):
            return SparseCosts(self.data[i], self.places)
        if isinstance(i, np.ndarray):
            return SparseCosts([self.data[k] for k in i], self.places)
        places = self.places
        return Sparse(self.data[i], places.column, places.start, places.shape, places.cached, places.on_device)

    def first(self, is_wrong: Callable[[Any], Any]) -> tuple[int, ...]:
        problem = next(i for i, x in enumerate(self.data) if is_wrong(x).any())
        return problem, *self.of(problem).first(is_wrong)

    def less(self, constant: float) -> "SparseCosts":
        return SparseCosts([x - constant for x in self.data], self.places)

    def ranges(self) -> tuple[F64, F64]:
        low, high = (np.array([float(f(x)) for x in self.data]) for f in (np.min, np.max))
        return low, high

    def less_each(self, constants: F64) -> "SparseCosts":
        return SparseCosts([x - c for x, c in zip(self.data, constants.astype(self.dtype), strict=True)], self.places)

    def transpose(self) -> "SparseCosts":
        turned = Sparse(np.arange(float(self.size)), self.places.column, self.places.start, self.shape).transpose()
        order = turned.data.astype(np.int64)
        turned.on_device = self.places.on_device
        return SparseCosts([x[order] for x in self.data], turned)

    def range(self, backend: Backend, threads: int | None = None, tell: Tell = None) -> Range:
        return joint_range((self.of(i).range(backend, threads), self.places.all_pairs) for i in range(len(self)))


def log_sums(pairs: Sparse, x: F64, reg: float) -> F64:
    """Return log sum_j exp(x_j - M_ij / reg) over the pairs of each row; -inf for a row without pairs."""
    start = pairs.start - pairs.start[0]
    count = np.diff(pairs.start)
    used = count > 0
    out = np.full(pairs.shape[0], -np.inf)
    terms = x[pairs.column] - pairs.data.astype(np.float64) / reg
    top = np.maximum.reduceat(terms, start[:-1][used])
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        out[used] = top + np.log(np.add.reduceat(np.exp(terms - np.repeat(top, count[used])), start[:-1][used]))
    return out


def is_sparse(value: Any) -> bool:
    """Tell whether x is a matrix of scipy.sparse or cupyx.scipy.sparse, without importing them."""
    sparse = sys.modules.get("scipy.sparse")
    there = type(value).__module__.startswith("cupyx.scipy.sparse")
    return there or (sparse is not None and sparse.issparse(value))


def check_padding(M: Any, name: str) -> None:
    """Refuse blocks (BSR) and diagonals (DIA) with zeros: a cost of 0 allows its pair, but padding must not."""
    if M.format in PADDED and getattr(M, "blocksize", None) != (1, 1) and M.count_nonzero() < M.nnz:
        why = "where it holds zeros, which may be costs or padding"
        cure = f"pass a CSR matrix; of {name}.tocsr() eliminate_zeros() forbids these pairs"
        raise ValueError(f"{name} must not be in {M.format.upper()} format {why}: {cure}")


def is_list_of_pairs(value: Any) -> bool:
    """Tell whether x holds the costs of a batch, as `SparseCosts.of_matrices` takes them."""
    return isinstance(value, (list, tuple)) and any(map(is_sparse, value))


def entries(block: Any, wanted: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return (number in each row, columns, values) of the wanted nonzero entries of some rows of a plan."""
    if is_sparse(block):
        kept = wanted(block.data) & (block.data != 0)
        before = np.concatenate([[0], np.cumsum(kept)])
        return np.diff(before[block.indptr]), block.indices[kept], block.data[kept]
    kept = wanted(block) & (block != 0)
    return kept.sum(1), kept.nonzero()[1], block[kept]


def gathered(rows: Any, ranks: Ranks, root: int) -> Any:
    """Stack the CSR rows of all ranks into one array on rank ``root``; return None elsewhere."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    counts = ranks.gather(np.diff(rows.indptr).astype(np.int64), root)
    column = ranks.gather(rows.indices.astype(np.int64), root)
    data = ranks.gather(rows.data, root)
    if counts is None:
        return None
    start = np.concatenate([[0], np.cumsum(counts)])
    return sparse.csr_array((data, column, start), shape=(len(counts), rows.shape[1]))


def top_of(rows: Any, k: int) -> tuple[Any, F64]:
    """Find the k largest entries of each row of a CSR array; shorter rows are padded with -1 and -inf."""
    m = rows.shape[0]
    index = np.full((m, k), -1, np.int64)
    value = np.full((m, k), -np.inf)
    row = np.repeat(np.arange(m), np.diff(rows.indptr))
    order = np.lexsort((rows.indices, -rows.data, row))
    place = np.arange(len(order)) - rows.indptr[row]
    kept = place < k
    index[row[kept], place[kept]] = rows.indices[order[kept]]
    value[row[kept], place[kept]] = rows.data[order[kept]]
    return index, value
