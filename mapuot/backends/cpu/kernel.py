"""Products with one kernel by the C core: ``mapuot_row_pass`` over it, with other numbers in the place of a prox's.

A storage "made" holds no K: its rows are made from the cost in float64, tile by tile, in each pass; of a cost that
comes in blocks, block by block. K of stored pairs has their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...penalties import F64
from ...problem.cost import Cost
from ...problem.sparse import Sparse
from ...processor import SERIAL_ENTRIES
from ..coarse import Labels
from ..kernel import FLUSH, LEAST, NARROW_SUMS, LogKernel, Product
from ..workspace import STORAGE
from . import native
from .native import check, empty, matrix, padded, pointer

LARGE_ENTRIES = 1 << 24  # of a kernel whose product is a call of its own: Ctrl-C waits for the end of a call
ROWS = ("weight", "rho", "absorbed", "fi", "base", "log_scale", "scale", "marginal")


class Kernel(LogKernel):
    """K in memory, rows padded to 64 bytes, and the state of its passes."""

    def __init__(
        self, cost: Cost, reg: float, ends: tuple[float, float], dtype: str, threads: int | None = None
    ) -> None:
        super().__init__(cost, reg, ends, dtype)
        m, n = cost.shape
        self.pool, self.K = native.pool_for(threads, cost.size), empty(0)
        self.pairs = cost if isinstance(cost, Sparse) else None
        size, count = padded(n) + native.SCALARS, lib.mapuot_pool_threads(self.pool)
        self.sums, self.v, *rows = native.vectors(size, padded(n), *[m] * len(ROWS))
        self.rows = dict(zip(ROWS, rows, strict=True))
        self.partial = empty(size * count if count > 1 else 1)
        self.narrow = narrow = dtype == "float32" and not self.pairs
        self.narrow_v = empty(padded(n) if narrow else 1, np.float32)
        self.run = empty(padded(n) * count if narrow else 1, np.float32)
        self.run.fill(0)
        self.rows["weight"][:] = self.rows["rho"][:] = 1.0
        state = self.state = ffi.new("mapuot_state *")
        state.m, state.n, state.rows.len, state.rows.penalty = m, n, m, lib.MAPUOT_KL
        state.sums, state.partial, state.cols.scale = pointer(self.sums), pointer(self.partial), pointer(self.v)
        state.narrow_v, state.run = pointer(self.narrow_v, "float *"), pointer(self.run, "float *")
        state.piped = -1 if m * n > SERIAL_ENTRIES and not self.pairs else 0
        if self.pairs:
            state.M = self.places = matrix(cost)
        self.point_at_rows(state, slice(None))

    def point_at_rows(self, state: Any, part: slice) -> None:
        for name, array in self.rows.items():
            setattr(state.rows, name, pointer(array[part]))

    def blocks(self) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """(i0, i1, the first arguments of a stream over these rows of the cost)."""
        for i0, i1, C, _ in self.cost.blocks(most=native.call_bytes(self.pool, self.cost)):
            yield i0, i1, (self.pool, *C.shape, matrix(C), matrix(None), self.reg)

    def balance(self, y: F64) -> F64:
        top, part = np.full(len(y), -np.inf), np.empty(len(y))
        self.p[:] = 0.0
        for i0, i1, call in self.blocks():
            check(lib.mapuot_balance(*call, pointer(y), pointer(self.p[i0:i1]), pointer(part)))
            np.maximum(top, part, out=top)
        return top

    def build(self) -> None:
        m, n = self.cost.shape
        state, made = self.state, self.dtype == "made"
        state.limits.reg, state.limits.inv_reg = self.reg, 1.0 / self.reg
        state.exact, dtype = made, "float64" if made else self.dtype
        itemsize = np.dtype(STORAGE[dtype]).itemsize
        state.ld = 0 if self.pairs else native.leading_dimension(n, itemsize)
        state.dtype = native.DTYPES[dtype]
        state.beta = pointer(self.q)
        if made:
            self.tile = empty(lib.mapuot_pool_threads(self.pool) * native.TILE * state.ld)
            state.tile = pointer(self.tile)
            return
        if self.K.dtype != STORAGE[dtype] or not self.K.size:
            self.K = empty(0)  # the one before goes first
            self.K = empty(self.pairs.size if self.pairs else m * state.ld, STORAGE[dtype])
            state.kernel = pointer(self.K, "void *")
        for i0, i1, call in self.blocks():
            first = int(self.pairs.start[i0] - self.pairs.start[0]) if self.pairs else i0 * state.ld
            to = ffi.cast("char *", state.kernel) + first * itemsize
            p, q = pointer(self.p[i0:i1]), pointer(self.q)
            check(lib.mapuot_build_kernel(*call, p, q, state.dtype, to, state.ld))

    @property
    def matrix(self) -> F64:
        return np.asarray(self.K.reshape(len(self.p), -1)[:, : len(self.q)])

    def run_pass(self, call: Any) -> None:
        """Make a pass over all rows; where they are made of a cost that is not held, block by block."""
        state = self.state
        if not state.exact:
            check(call(self.pool, state))
            return
        total = np.zeros_like(self.sums)
        for i0, i1, (_, _, _, M, c, _) in self.blocks():
            part = ffi.new("mapuot_state *", state[0])
            part.m = part.rows.len = i1 - i0
            part.M, part.c, part.alpha = M, c, pointer(self.p[i0:i1])
            self.point_at_rows(part, slice(i0, i1))
            check(call(self.pool, part))
            total += self.sums
        self.sums[:] = total

    def fused(self, v: F64 | Product, base: F64, fi: float, narrow: bool) -> tuple[F64, Any, float]:
        rows = self.rows
        self.take(v)
        rows["base"][:], rows["fi"][:] = base, fi
        self.state.progress.narrow = narrow and self.narrow and self.dtype == "float32"
        self.state.progress.passes ^= 1  # the rows read last come first
        self.run_pass(lib.mapuot_row_pass)
        r = rows["marginal"]
        plain = r.min() > 1e-280 and r.max() < 1e280
        sums, largest = self.sums[: self.cost.shape[1]], float(rows["scale"].max())
        with np.errstate(divide="ignore", invalid="ignore"):
            log_s = np.log(r) - rows["log_scale"] if plain else np.log(self.dots(v))
        return log_s, sums, largest

    def take(self, v: F64 | Product) -> None:
        """Take v of the next pass."""
        if isinstance(v, Product):
            size, factors = pointer(v.size, "int64_t *"), pointer(v.factors)
            lib.mapuot_product(len(v.size), size, factors, v.flush, pointer(self.v))
        else:
            self.v[: len(v)] = v

    def label(self, labels: Labels | None) -> None:
        coarse = self.state.coarse
        coarse.labelled = labels is not None
        if labels is None or coarse.own:
            return
        size, threads = padded(self.cost.shape[1]), lib.mapuot_pool_threads(self.pool)
        self.labels, self.cluster_mass = labels, np.zeros(labels.clusters)
        self.shares = empty(labels.clusters * size, np.float32).reshape(-1, size)
        self.shares.fill(0)
        self.cluster_sums = empty(threads * len(self.sums))
        coarse.own, coarse.sums = labels.clusters, pointer(self.cluster_sums)
        coarse.order, coarse.first = (pointer(x, "int64_t *") for x in (labels.order, labels.first))
        coarse.own_blocks, coarse.own_mass = pointer(self.shares, "float *"), pointer(self.cluster_mass)

    def exchanged(self) -> tuple[F64, Any]:
        return self.cluster_mass, self.shares[:, : self.cost.shape[1]]

    def dots(self, v: F64 | Product) -> F64:
        self.take(v)
        sums = self.sums.copy()
        self.run_pass(lib.mapuot_row_dots)
        self.sums[:] = sums
        return self.rows["marginal"]

    def plan_apply(self, x: F64, y: F64, Y: F64, axis: int) -> F64:
        m, n = self.cost.shape
        d, x, y = Y.shape[1], np.ascontiguousarray(x), np.ascontiguousarray(y)
        columns = native.zeros(d * padded(n)).reshape(d, -1)
        if axis:
            columns[:, :n] = Y.T
        out, part, Y = np.empty((m, d)), native.zeros(d * padded(n)), np.ascontiguousarray(Y)
        for i0, i1, call in self.blocks():
            arguments = (*call, pointer(x[i0:i1]), pointer(y), d)
            if axis:
                check(lib.mapuot_apply(*arguments, pointer(columns), pointer(out[i0:i1])))
            else:
                check(lib.mapuot_apply_transpose(*arguments, pointer(Y[i0:i1]), pointer(part)))
                columns += part.reshape(d, -1)
        return out if axis else np.ascontiguousarray(columns[:, :n].T)

    def plan_cost(self, x: F64, y: F64) -> float:
        total, out = 0.0, np.empty(2)
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        for i0, i1, call in self.blocks():
            check(lib.mapuot_plan_sums(*call, pointer(x[i0:i1]), pointer(y), pointer(out), ffi.NULL, ffi.NULL))
            total += float(out[0])
        return total


class TreePass:
    """``mapuot_tree_pass`` over edges (child, parent, kernel, fi), each after those below it."""

    def __init__(self, edges: list[tuple[int, int, Kernel, float]], points: list[int], log_weight: F64) -> None:
        """``points``: where those of each marginal begin; log_weight: log masses of all; ``out``: what a pass finds."""
        self.kernels = [kernel for _, _, kernel, _ in edges]
        self.builds, self.messages = [-1] * len(edges), ffi.new("mapuot_messages *")
        self.messages.flush, self.messages.noise = FLUSH, NARROW_SUMS
        self.log_weight, self.messages.log_weight = log_weight, pointer(log_weight)
        self.edges, ends = ffi.new("mapuot_edge[]", len(edges)), 0
        for edge, (child, parent, kernel, fi) in zip(self.edges, edges, strict=True):
            edge.pool, edge.fi, edge.base = kernel.pool, fi, pointer(kernel.rows["base"])
            edge.child, edge.parent, edge.message = points[child], points[parent], ends
            ends += kernel.cost.shape[1]
        self.out = {name: np.zeros(len(log_weight)) for name in ("near", "late", "log_u")} | {"up": np.zeros(ends)}
        for name, array in self.out.items():
            setattr(self.messages, name, pointer(array))

    def refresh(self) -> None:
        """Point at kernels that have been made since."""
        for k, (kernel, edge) in enumerate(zip(self.kernels, self.edges, strict=True)):
            if kernel.builds == self.builds[k]:
                continue
            self.builds[k] = kernel.builds
            held = kernel.builds > 0 and kernel.dtype != "made" and kernel.cost.size <= LARGE_ENTRIES
            edge.state = kernel.state if held else ffi.NULL
            edge.p, edge.q, edge.least = pointer(kernel.p), pointer(kernel.q), LEAST[kernel.dtype]
            edge.sizes = kernel.absorbed + kernel.largest
            edge.narrow = kernel.narrow and kernel.dtype == "float32"
            kernel.rows["fi"][:] = edge.fi

    def run(self, first: int, sent: F64, narrow: bool) -> list[float]:
        """Go by the edges from ``first`` on, up to one that is left to the caller; what each of them rounds at most."""
        self.refresh()
        self.messages.sent, self.messages.narrow = pointer(sent), narrow
        end = int(lib.mapuot_tree_pass(first, len(self.kernels), self.edges, self.messages))
        return [self.edges[k].error for k in range(first, end)]

    def back(self, near: F64, log_u: F64, up: F64, out: F64) -> list[float]:
        """Leave the messages from the root to the caller, edge by edge."""
        return []
