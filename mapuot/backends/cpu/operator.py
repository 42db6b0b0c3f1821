"""All products with one cost by the C core: K, stored or made by passes as they read it, and the plan of potentials.

``mapuot_row_pass`` reads K; a prox follows (workspace.py), or given ``base`` and ``fi`` replace the prox (``fused``).
The plan is made from M in float64, block by block. C side: src_c/solver.c, streams.c. Twin: backends/cuda/operator.py.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...contract import Backend
from ...penalties import F64
from ...problem.cost import Cost
from ...problem.points import KeptBoxes, PointCosts
from ...problem.sparse import Sparse
from ...processor import SERIAL_ENTRIES
from ...ranks import ALONE, Ranks
from ..coarse import Labels
from ..kernel import FLUSH_PRODUCT
from ..operator import Operator
from ..workspace import STORAGE
from . import log_matmul, native
from .native import DTYPES, call_bytes, check, empty, matrix, padded, pointer, pool_for, zeros

ROWS = ("weight", "rho", "absorbed", "fi", "base", "log_scale", "scale", "marginal")
MANY = 32  # dimensions; from here on a matrix product forms costs faster than differences do
ROUNDED = 1e-11  # allowed rounding of a cost made by a matrix product, relative to the mean cost
MIRRORED = 1024  # rows of a symmetric matrix that are mirrored at once


class HostArrays(Backend):
    """Matrices and points in memory: their range, their symmetry, and the costs of points."""

    name = "cpu"

    def asarray(self, x: Any) -> Any:
        return np.asarray(x)

    def to_numpy(self, x: Any) -> Any:
        return np.asarray(x)

    def is_symmetric(self, M: Any) -> bool:
        return bool(lib.mapuot_is_symmetric(pool_for(None, M.size), len(M), matrix(M)))

    def extrema(self, M: Any, threads: int | None = None) -> tuple[float, float, int, int]:
        out = np.empty(4)
        check(lib.mapuot_extrema(pool_for(threads, M.size), *M.shape, matrix(M), pointer(out)))
        low, high, bad, infinite = out.tolist()
        if math.isfinite(low):
            return low, high, int(bad), int(infinite)
        return 0.0, 0.0, int(bad), int(infinite)

    def costs(self, cloud: PointCosts, threads: int | None = None) -> F64:
        m, n = cloud.shape
        pool = pool_for(threads, cloud.size)
        out = np.empty((m, n))
        for i0, i1, part, _ in cloud.blocks(most=call_bytes(pool, cloud, cloud.dim)):
            check(lib.mapuot_costs(pool, i1 - i0, n, matrix(part), pointer(out[i0:i1])))
        return out

    def formed(self, cloud: PointCosts, threads: int | None = None) -> tuple[F64, float]:
        """Form the cost matrix of points; return it and a bound on its rounding in excess of the rounding of `costs`.

        In many dimensions one BLAS product makes squared distances |x|^2 + |y|^2 - 2 <x, y>, centred at the mean of
        y, and inner products. Let u = 2^-53 and s = max |x|^2 + max |y|^2. A sum of d + 2 terms of size 2 s errs by
        (d + 2) u 2 s; the squares err by (d + 1) u s; coordinates are rounded once, which moves the distance by 4 u s.
        If this rounding is too large beside the mean cost, `costs` makes the matrix by differences.
        """
        (metric, scale), d, (m, n) = cloud.core, cloud.dim, cloud.shape
        if d < MANY or not (metric.product or metric.square):
            return self.costs(cloud, threads), 0.0
        if metric.product:
            return np.matmul(metric.product * scale * cloud.rows, cloud.columns[:, :n]), 0.0
        y = cloud.columns[:, :n]
        centre = y.mean(1)
        x = cloud.rows - centre
        y = y - centre[:, None]
        left = np.empty((m, d + 2))
        right = np.empty((d + 2, n))
        sizes = scale * np.einsum("ij,ij->i", x, x), scale * np.einsum("ij,ij->j", y, y)
        np.multiply(x, -2.0 * scale, out=left[:, :d])
        left[:, d] = sizes[0]
        left[:, d + 1] = 1.0
        right[:d] = y
        right[d] = 1.0
        right[d + 1] = sizes[1]
        rounding = 2.0**-53 * (3 * d + 40) * float(sum(size.max() for size in sizes))
        mean = float(sizes[0].mean() + sizes[1].mean() - 2 * scale * x.mean(0) @ y.mean(1))
        if not rounding <= ROUNDED * mean:
            return self.costs(cloud, threads), 0.0
        out = np.matmul(left, right)
        np.maximum(out, 0.0, out=out)
        if cloud.symmetric(self):
            for i0 in range(0, m, MIRRORED):
                i1 = i0 + MIRRORED
                own = out[i0:i1, i0:i1]
                own[:] = 0.5 * (own + own.T)
                out[i0:i1, i1:] = out[i1:, i0:i1].T
        return out, rounding


ARRAYS = HostArrays()


class HostOperator(Operator):
    """K in memory, its rows padded to 64 bytes, the record of passes over it, and the plan.

    The storage "made" holds no K: each pass makes its rows in float64, tile by tile, or block by block for a cost that
    comes in blocks. For stored pairs, K has one entry for each pair, in the same order.
    """

    arrays = ARRAYS
    log_matmul = staticmethod(log_matmul.product)
    summed = False  # True: products are made outside the core, which does the rest of a pass
    narrow = False  # passes have buffers for sums in float32

    def __init__(
        self, cost: Cost, reg: float, c: Cost | None = None, ranks: Ranks = ALONE, threads: int | None = None,
        kept: KeptBoxes | None = None,
    ) -> None:  # fmt: skip
        """Hold no K yet; ``kept``: the pairs of points that count, where some are skipped."""
        super().__init__(cost, reg, c, ranks)
        self.pool = pool_for(threads, cost.size)
        self.kept = kept
        self.K: Any = None
        self.pairs = cost.operator == "pairs"
        self.stored = ""

    def blocks(self, i0: int = 0, i1: int | None = None, d: int = 1) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield (k0, k1, first arguments of a streaming call) for blocks of the rows i0 to i1 and d vectors at once."""
        for k0, k1, M, c in self.cost.blocks(self.c, i0, i1, call_bytes(self.pool, self.cost, d)):
            yield k0, k1, (self.pool, *M.shape, matrix(M, self.kept), matrix(c), self.reg)

    def formed(self, i0: int, i1: int, d: int = 1) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield ``blocks`` with the exponents alpha and beta added to the arguments."""
        for k0, k1, call in self.blocks(i0, i1, d):
            yield k0, k1, (*call, pointer(self.alpha[k0:k1]), pointer(self.beta))

    # ---- the plan

    def rows_of_plan(self, count: int) -> Any:
        n = self.shape[1]
        try:
            return empty(count * n, self.dtype).reshape(count, n)
        except MemoryError as error:
            size = f"{count * n * self.dtype.itemsize / 2**30:.3g} GiB"
            raise MemoryError(f"{count} rows of the plan need {size}: Result.rows makes fewer") from error

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        """Form the rows i0 to i1; for stored pairs a CSR array with an entry for each pair."""
        n = self.shape[1]
        if self.pairs:
            n = 0
            part: Any = self.cost.read(i0, i1)
            out = np.empty(part.size, self.dtype)
        if out is None:
            out = self.rows_of_plan(i1 - i0)
        for k0, k1, arguments in self.formed(i0, i1):
            rows = slice(k0 - i0, k1 - i0)
            if self.pairs:
                before = self.cost.place(i0, 0)
                rows = slice(self.cost.place(k0, 0) - before, self.cost.place(k1, 0) - before)
            check(lib.mapuot_form_plan(*arguments, DTYPES[self.dtype.name], ffi.from_buffer("void *", out[rows]), n))
        if self.pairs:
            return part.with_data(out)
        return out

    def costs_of(self, M: Any) -> Any:
        if self.cost.operator == "points":
            return ARRAYS.costs(M, lib.mapuot_pool_threads(self.pool))
        return M

    def product(self, X: Any, turned: bool) -> Any:
        m, n = self.shape
        d = X.shape[1]
        X = np.ascontiguousarray(X)
        columns = zeros(d * padded(n))
        if not turned:
            out = np.empty((m, d))
            columns.reshape(d, -1)[:, :n] = X.T
            for i0, i1, arguments in self.formed(0, m, d):
                check(lib.mapuot_apply(*arguments, d, pointer(columns), pointer(out[i0:i1])))
            return out
        part = empty(d * padded(n))
        for i0, i1, arguments in self.formed(0, m, d):
            check(lib.mapuot_apply_transpose(*arguments, d, pointer(X[i0:i1]), pointer(part)))
            columns += part
        return np.ascontiguousarray(columns.reshape(d, -1)[:, :n].T)

    def own_sums(self) -> tuple[float, F64, F64]:
        m, n = self.shape
        cost = 0.0
        row_sum = np.empty(m)
        total = np.zeros(n)
        out = np.empty(2)
        col_sum = np.empty(n)
        for i0, i1, arguments in self.formed(0, m):
            check(lib.mapuot_plan_sums(*arguments, pointer(out), pointer(row_sum[i0:i1]), pointer(col_sum)))
            cost = cost + float(out[0])
            total = total + col_sum
        return cost, row_sum, total

    # ---- K

    def balance(self, alpha: F64, x: F64) -> F64:
        top = np.full(len(x), -np.inf)
        part = np.empty(len(x))
        x = np.ascontiguousarray(x)
        for i0, i1, call in self.blocks():
            check(lib.mapuot_balance(*call, pointer(x), pointer(alpha[i0:i1]), pointer(part)))
            np.maximum(top, part, out=top)
        return top

    def kept_pairs(self, alpha: F64, beta: F64, nats: float, most: int) -> Sparse | None:
        """Return the pairs with exponents of -``nats`` or more; None if there are more than ``most`` pairs."""
        if self.cost.operator == "tiles":
            down, across = map(abs, self.cost.array.strides)
        else:
            down, across = 1, 1
        if down < across:  # the rows of the transpose are contiguous
            turned = HostOperator(self.cost.transpose(), self.reg, self.c and self.c.transpose())
            turned.pool = self.pool
            pairs = turned.kept_pairs(beta, alpha, nats, most)
            if pairs is None:
                return None
            return pairs.transpose()
        m, n = self.shape
        threads = lib.mapuot_pool_threads(self.pool)
        busy = min(threads, -(-m // native.TILE))
        room = n + min(most, 4 * most // busy)  # entries of a thread; pages that no thread writes take no memory
        start = np.zeros(m + 1, np.int64)
        found = np.zeros(threads, np.int64)
        parts = []
        for i0, i1, call in self.blocks():
            column = np.empty((threads, room), np.int32)
            data = np.empty((threads, room))
            counts = (ffi.from_buffer("int64_t *", x) for x in (start[i0 + 1 : i1 + 1], found))
            to = -nats, room, *counts, ffi.from_buffer("int32_t *", column), pointer(data)
            if check(lib.mapuot_kept_pairs(*call, pointer(alpha[i0:i1]), pointer(beta), *to)) == lib.MAPUOT_ABSORB:
                return None
            parts += [(column[t, :count], data[t, :count]) for t, count in enumerate(found.tolist())]
        columns, costs = (np.concatenate(x) for x in zip(*parts, strict=True))
        if len(costs) <= most:
            return Sparse(costs, columns, np.cumsum(start), self.shape)
        return None

    def passes(self, narrow: bool, sums: F64) -> Any:
        """Make the record of passes, with column sums in ``sums``; narrow: some passes sum in float32."""
        m, n = self.shape
        threads = lib.mapuot_pool_threads(self.pool)
        size = padded(n)
        self.narrow, self.col_sums = narrow, sums
        self.partial = empty(len(sums) * threads if threads > 1 else 1)
        self.narrow_v = empty(size if narrow else 1, np.float32)
        self.run = empty(size * threads if narrow else 1, np.float32)
        self.run.fill(0)
        state = self.state = ffi.new("mapuot_state *")
        state.m, state.n = m, n
        state.sums = pointer(sums)
        state.partial = pointer(self.partial)
        state.narrow_v = ffi.from_buffer("float *", self.narrow_v)
        state.run = ffi.from_buffer("float *", self.run)
        if m * n > SERIAL_ENTRIES and not self.pairs:
            state.piped = -1
        else:
            state.piped = 0
        return state

    def store(self, dtype: str, made: bool = False) -> None:
        """Allocate K; ``made``: passes make its rows instead, in this storage or, for exact passes, in float64."""
        state = self.state
        kind = "float64" if dtype == "made" else dtype
        self.stored = dtype
        self.made = made or dtype == "made"
        state.exact = dtype == "made"
        state.ld = lib.mapuot_leading(self.shape[1], np.dtype(STORAGE[kind]).itemsize)
        state.dtype = DTYPES[kind]
        entries = 0 if self.made else self.cost.place(self.shape[0], state.ld)
        self.K = None  # free the old K before allocating the new one
        self.K = empty(entries, STORAGE[kind])
        state.kernel = ffi.from_buffer("void *", self.K)
        if self.made:
            self.open_tile()

    def open_tile(self) -> None:
        self.tile = empty(lib.mapuot_pool_threads(self.pool) * native.TILE * self.state.ld)
        self.state.tile = pointer(self.tile)

    def build(self, alpha: F64, beta: F64) -> None:
        state = self.state
        self.alpha, self.beta = alpha, beta
        self.absorbed = alpha, beta  # kept alive: the record points at them
        state.limits.reg = self.reg
        state.limits.inv_reg = 1.0 / self.reg
        state.alpha = pointer(alpha)
        state.beta = pointer(beta)
        if self.made:
            return
        for i0, _, call in self.formed(0, self.shape[0]):
            to = ffi.cast("char *", state.kernel) + self.cost.place(i0, state.ld) * self.K.itemsize
            if state.limits.symmetric and state.m == state.n:
                across = self.shape[1] - i0
            else:
                across = 0
            check(lib.mapuot_build_kernel(*call, across, state.dtype, to, 0 if self.pairs else state.ld))

    def keep(self, kept: KeptBoxes | None) -> None:
        """Restrict passes to these pairs of points."""
        state, self.kept, itemsize = self.state, kept, self.K.itemsize
        state.M = matrix(self.cost, kept)
        state.c = matrix(None)
        state.ld = lib.mapuot_leading(kept.width if kept else self.shape[1], itemsize)
        self.open_tile()

    def row_pass(
        self, rows: dict[str, F64], cols: dict[str, F64] | None = None, call: Any = lib.mapuot_row_pass
    ) -> None:
        """Make the O(mn) half of a pass; go block by block where M is needed and is not in the core's reach."""
        state = self.state
        if not state.exact or state.M.data or state.M.points.x:
            check(call(self.pool, state))
            return
        total = np.zeros_like(self.col_sums)
        for i0, i1, (_, _, _, M, c, _) in self.blocks():
            part = ffi.new("mapuot_state *", state[0])
            part.m = part.rows.len = i1 - i0
            part.M = M
            part.c = c
            part.alpha = pointer(self.absorbed[0][i0:i1])
            point_at(part.rows, rows, slice(i0, i1))
            check(call(self.pool, part))
            total += self.col_sums
        self.col_sums[:] = total

    def close(self) -> None:
        del self.K
        self.state.kernel = ffi.NULL

    @property
    def matrix(self) -> Any:
        cost: Any = self.cost
        if self.pairs:
            return cost.with_data(self.K)
        return self.K.reshape(self.shape[0], -1)[:, : self.shape[1]]

    # ---- passes with given ``base`` and ``fi`` instead of a prox

    def open(self, dtype: str) -> str:
        m, n = self.shape
        sums, self.v, *rows = native.vectors(padded(n) + native.SCALARS, padded(n), *[m] * len(ROWS))
        self.rows = dict(zip(ROWS, rows, strict=True))
        self.rows["weight"][:] = self.rows["rho"][:] = 1.0
        state = self.passes(dtype == "float32" and not self.pairs, sums)
        state.rows.len = m
        state.rows.penalty = lib.MAPUOT_KL
        state.cols.scale = pointer(self.v)
        if self.pairs:
            state.M = matrix(self.cost)
        point_at(state.rows, self.rows, slice(None))
        if dtype == "made" and self.pairs:
            return "float64"
        return dtype

    def fused(self, v: F64, base: F64, fi: float, narrow: bool, sizes: Any = None) -> tuple[F64, Any, float]:
        rows = self.rows
        self.take_vector(v, sizes)
        rows["base"][:], rows["fi"][:] = base, fi
        self.state.progress.narrow = narrow and self.narrow and self.stored == "float32"
        self.state.progress.passes ^= 1  # alternate the direction: start with the rows read last, still in cache
        self.row_pass(rows)
        r = rows["marginal"]
        plain = r.min() > 1e-280 and r.max() < 1e280
        sums = self.col_sums[: self.shape[1]]
        largest = float(rows["scale"].max())
        with np.errstate(divide="ignore", invalid="ignore"):
            if plain:
                log_s = np.log(r) - rows["log_scale"]
            else:
                log_s = np.log(self.dots(v, sizes))
        return log_s, sums, largest

    # ---- passes of barycenters

    def barycenter_passes(
        self, weights: F64, A: F64, log_a: F64, rho: float, log_v: F64, most: int, tol: float
    ) -> Any:  # fmt: skip
        """Make passes of a soft barycenter in one call; return their record and the logs of u, v, K^T u, K v and q.

        The result is None if a sum leaves the range of K. src_c/mapuot.h, mapuot_barycenter, explains the numbers.
        """
        p, n = log_a.shape
        K = self.unabsorbed
        A = np.ascontiguousarray(A)
        log_a = np.ascontiguousarray(log_a)
        log_v = log_v.reshape(p, n).copy()
        found = [np.empty((p, n)), log_v, np.empty((p, n)), np.empty((p, n)), np.empty(n)]
        record = ffi.new("mapuot_barycenter *")
        record.p = p
        record.n = n
        record.ld = K.strides[0] // K.itemsize
        record.most = most
        record.reg = self.reg
        record.rho = rho
        record.low = self.ends[0]
        record.tol = tol
        record.weight, record.mass, record.log_mass = pointer(weights), pointer(A), pointer(log_a)
        record.kernel = ffi.cast("double *", self.state.kernel)
        record.log_u, record.log_v, record.log_s, record.log_kv, record.log_q = map(pointer, found)
        room = empty(lib.mapuot_barycenter_room(record))
        if check(lib.mapuot_barycenter_passes(record, pointer(room))) == lib.MAPUOT_ABSORB:
            return None
        return record, found

    def take_vector(self, v: F64, sizes: Any) -> None:
        if sizes is None:
            self.v[: len(v)] = v
        else:
            lib.mapuot_product(
                len(sizes), ffi.from_buffer("int64_t *", sizes), pointer(v), FLUSH_PRODUCT, pointer(self.v)
            )

    def dots(self, v: F64, sizes: Any = None) -> F64:
        self.take_vector(v, sizes)
        sums = self.col_sums.copy()
        self.row_pass(self.rows, call=lib.mapuot_row_dots)
        self.col_sums[:] = sums
        return self.rows["marginal"]

    def label(self, labels: Labels | None) -> None:
        coarse = self.state.coarse
        coarse.labelled = labels is not None
        if labels is None or coarse.own:
            return
        size = padded(self.shape[1])
        threads = lib.mapuot_pool_threads(self.pool)
        self.labels = labels
        self.cluster_mass = np.zeros(labels.clusters)
        self.shares = empty(labels.clusters * size, np.float32).reshape(-1, size)
        self.shares.fill(0)
        self.cluster_sums = empty(threads * len(self.col_sums))
        coarse.own = labels.clusters
        coarse.sums = pointer(self.cluster_sums)
        coarse.order, coarse.first = (ffi.from_buffer("int64_t *", x) for x in (labels.order, labels.first))
        coarse.own_blocks = ffi.from_buffer("float *", self.shares)
        coarse.own_mass = pointer(self.cluster_mass)

    def exchanged(self) -> tuple[F64, Any]:
        return self.cluster_mass, self.shares[:, : self.shape[1]]


def point_at(side: Any, arrays: dict[str, F64], part: slice) -> None:
    """Set the pointers in the record of a side to a part of its arrays."""
    for name, array in arrays.items():
        setattr(side, name, pointer(array[part]))
