"""Products with one kernel on a GPU: K on the device, vectors of the rows on the host.

From sm_90 on src_cuda/fused_pass.cu reads K once a pass, in float32 where that is asked for; elsewhere, and where rows
are too wide for all multiprocessors together, K is in float64 and CuPy's products read it twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy as cp
import numpy as np

from ...cached import cached_property
from ...penalties import F64
from ...problem.cost import Cost
from ..coarse import Labels
from ..contract import PAD, host
from ..kernel import BLOCK_BYTES, HOST_ENTRIES, LogKernel, Product
from ..workspace import STORAGE
from .arrays import Stage, free_memory
from .kernels import ITEMSIZE, PASS, STORES, UNSET, Strips, by_value, kernel, ring_offset, row_bytes, strips_for
from .launch import device_limits
from .room import Room
from .stream import fill_rows, reduce_rows

TINY = float(np.finfo(float).tiny)


class Kernel(LogKernel):
    """K on the current device; its rows are padded with zeros."""

    def __init__(self, cost: Cost, reg: float, ends: tuple[float, float], dtype: str = "float64") -> None:
        self.m, self.n = cost.shape
        self.ld = -(-self.n // PAD) * PAD
        self.K: Any = cp.empty((0, 0))
        self.labels: Labels | None = None
        super().__init__(cost, reg, ends, dtype if self.strips(dtype) else "float64")

    def strips(self, dtype: str) -> Strips | None:
        """Return how one read of K lies on the device; None where it has no bulk copies, or rows are too wide."""
        capability, processors, shared = device_limits(cp.cuda.Device().id)
        return strips_for(self.m, self.ld, ITEMSIZE[dtype], processors, shared) if capability >= 90 else None

    def blocks(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        """Blocks (i0, i1, C) of a cost on the device, all of it at once where it lies there."""
        stage, there = Stage(), cost.held and isinstance(cost.array, cp.ndarray)
        for i0, i1, C, _ in cost.blocks(most=None if there else BLOCK_BYTES):
            yield i0, i1, stage(C)

    def logarithms(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        for i0, i1, C in self.blocks(cost):
            for k0 in range(i0, i1, rows := max(1, BLOCK_BYTES // (8 * cost.shape[1]))):
                k1 = min(k0 + rows, i1)
                yield k0, k1, cp.asarray(C[k0 - i0 : k1 - i0], np.float64) / -self.reg

    @property
    def matrix(self) -> Any:
        return self.K[:, : self.n]

    @cached_property
    def one_read(self) -> OneRead | None:
        """The pass over K as it lies; None where the device has none of that kind."""
        shape = self.strips(self.dtype)
        return OneRead(self, shape) if shape else None

    def balance(self, y: F64) -> F64:
        beta, top = cp.asarray(y), cp.full(self.n, -np.inf)
        for i0, i1, C in self.blocks(self.cost):
            (largest,) = reduce_rows("row_max", C, None, cp.zeros(i1 - i0), beta, self.reg, 1)
            self.p[i0:i1] = -host(largest)
            cp.maximum(top, reduce_rows("row_max", C.T, None, beta, -largest, self.reg, 1)[0], out=top)
        return np.asarray(host(top))

    def build(self) -> None:
        q = cp.asarray(self.q) if self.q.any() else cp.zeros(self.n)
        if not self.K.size or self.K.dtype != STORAGE[self.dtype]:
            vars(self).pop("one_read", None)  # the one before goes first
            self.K = None
            self.need_memory(self.m * self.ld * ITEMSIZE[self.dtype])
            self.K = cp.zeros((self.m, self.ld), STORAGE[self.dtype])
        for i0, i1, C in self.blocks(self.cost):
            fill_rows(self.K[i0:i1], self.dtype, C, None, cp.asarray(self.p[i0:i1]), q, self.reg)

    def need_memory(self, needed: int) -> None:
        free = free_memory(needed)
        if needed > free:
            told = f"{needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free"
            raise MemoryError(f"the kernel of {self.m} x {self.n} costs needs {told}: use backend='cpu'")

    def fused(self, v: F64 | Product, base: F64, fi: float, narrow: bool) -> tuple[F64, Any, float]:
        s, sums = self.one_read(v, base, fi) if self.one_read else (self.dots(v), None)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            log_s = np.log(s)
            u = np.exp(base - fi * log_s)
        if self.labels and 0 < u.max() < np.inf:
            self.told = self.exchange(self.labels, u / u.max(), self.vector(v))
        if sums is None:
            sums = cp.asarray(u) @ self.matrix
        return log_s, host(sums) if self.n <= HOST_ENTRIES else sums, float(u.max())

    def vector(self, v: F64 | Product) -> Any:
        return v.vector(cp) if isinstance(v, Product) else cp.asarray(v)

    def label(self, labels: Labels | None) -> None:
        self.labels = labels
        if labels:  # nothing, should no pass be as it is wanted
            self.told = np.zeros(labels.clusters), cp.zeros((labels.clusters, self.n), np.float32)

    def exchange(self, labels: Labels, u: F64, v: Any) -> tuple[F64, Any]:
        """A product of the clusters with K more, which counts as no pass."""
        members = cp.zeros((labels.clusters, self.m), self.K.dtype)
        members[cp.asarray(labels.label), cp.arange(self.m)] = cp.asarray(u.astype(self.K.dtype))
        blocks = (members @ self.matrix) * v
        mass = blocks.sum(1)
        shares = (blocks / cp.maximum(mass, TINY)[:, None]).astype(np.float32)
        return host(mass), shares

    def exchanged(self) -> tuple[F64, Any]:
        return self.told

    def dots(self, v: F64 | Product) -> F64:
        if self.one_read:
            return self.one_read(v, np.zeros(self.m), 0.0)[0]
        return np.asarray(host(self.matrix @ self.vector(v)))

    def plan_apply(self, x: F64, y: F64, Y: F64, axis: int) -> F64:
        out = cp.zeros((self.cost.shape[1 - axis], Y.shape[1]))
        x, y, Y = cp.asarray(x), cp.asarray(y), cp.asarray(Y)
        for i0, i1, L in self.logarithms(self.cost):
            P = cp.exp(L + x[i0:i1, None] + y)
            if axis:
                out[i0:i1] = P @ Y
            else:
                out += P.T @ Y[i0:i1]
        return np.asarray(host(out))

    def plan_cost(self, x: F64, y: F64) -> float:
        total = 0.0
        x, y = cp.asarray(x), cp.asarray(y)
        for i0, i1, L in self.logarithms(self.cost):
            P = cp.exp(L + x[i0:i1, None] + y)
            total -= self.reg * float((P * cp.where(P > 0, L, 0.0)).sum())
        return total


class OneRead:
    """src_cuda/fused_pass.cu over the K of a `Kernel`."""

    def __init__(self, owner: Kernel, shape: Strips) -> None:
        m, ld = owner.m, owner.ld
        self.m, self.n, self.ld = m, owner.n, ld  # not the owner: a circle would keep its K
        self.shape, self.back = shape, 0
        options = {"STORE": STORES[owner.dtype], **shape.options}
        self.run, self.join = (kernel("fused_pass.cu", name, **options) for name in ("fused_pass", "join_streams"))
        row = row_bytes(shape.slice, owner.K.itemsize, shape.THREADS)
        self.shared = ring_offset("fused_pass.cu", **options) + shape.slots * shape.R * row
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)
        rows = -(-m // shape.R) * shape.R
        self.blocks = shape.streams * shape.strips
        self.v, self.ends = cp.zeros(ld), cp.empty(2 * m)  # base, and s
        self.part, self.scale = (cp.empty((2, count)) for count in (rows * shape.strips, rows))
        for posts in (self.part, self.scale):
            posts.view(np.uint64).fill(UNSET)
        self.records = np.zeros(2, PASS)  # posts take turns
        for back, record in enumerate(self.records):
            for name in ("strips", "slice", "slots", "lag"):
                record[name] = getattr(shape, name)
            record["m"], record["ld"], record["kernel"] = m, ld, owner.K.data.ptr
            record["v"], record["s"] = (x.data.ptr for x in (self.v, self.ends[m:]))
            for name, posts in (("part", self.part), ("scale", self.scale)):
                record[name], record[f"old_{name}"] = posts[back].data.ptr, posts[1 - back].data.ptr
        self.own, self.size = self.records, [0]  # the same of calls, by factors of such sizes

    def open(self, v: Product) -> None:
        """Room for what calls send and bring, and for their sums, which go back with s where they are few."""
        self.size, self.starts = v.size.tolist(), np.cumsum([0, *v.size]).view(np.float64)  # which go along
        few = self.ld if self.n <= HOST_ENTRIES else 0
        sizes = {"starts": len(self.starts), "factors": len(v.factors), "base": self.m, "s": self.m}
        self.room = Room({**sizes, "sums": few})
        self.sums = cp.empty(0 if few and self.shape.streams == 1 else self.shape.streams * self.ld)
        self.own = self.records.copy()
        self.out = self.room.there[self.room.at["sums"]] if few else self.sums[: self.ld]
        address = self.room.address
        known = {"v": address("factors"), "s": address("s"), "starts": address("starts"), "axes": len(self.size)}
        for name, value in {**known, "flush": v.flush}.items():
            self.own[name] = value

    def __call__(self, v: F64 | Product, base: F64, fi: float) -> tuple[F64, Any]:
        """(s = K v, K^T u), u = e^base s^-fi, until the next call: a copy there, a launch or two, and a copy back."""
        v = v if isinstance(v, Product) else Product(v, np.array([len(v)]), 0.0)
        if v.size.tolist() != self.size:
            self.open(v)
        room, few = self.room, self.n <= HOST_ENTRIES
        room.send(starts=self.starts, factors=v.factors, base=base)
        self.sweep(fi)
        room.bring("s", *["sums"] * few)
        return room["s"], room["sums"][: self.n] if few else self.out[: self.n]

    def sweep(self, fi: float) -> None:
        """Launch a read of K with the vectors that were sent last."""
        sums, streams = self.sums if self.sums.size else self.out, self.shape.streams
        self.launch(sums, self.room.address("base"), 0, fi, self.own)
        if streams > 1:
            grid = (min(-(-self.ld // 256), self.blocks),)
            self.join(grid, (256,), (sums, self.out, np.int64(self.ld), np.int32(streams)))

    def launch(self, sums: Any, base: int, own: int, fi: float, records: Any = None) -> None:
        """The pass of what ``v`` and the address ``base`` hold, less the number at ``own``; a row of sums a stream."""
        back = self.back
        records = self.records if records is None else records
        record, threads = records[back : back + 1].reshape(()), self.shape.THREADS + 64
        record["sums"], record["base"], record["own"], record["fi"] = sums.data.ptr, base, own, fi
        self.run((self.blocks,), (threads,), (by_value(record), np.int32(back)), shared_mem=self.shared)
        self.back = 1 - back
