"""One read of a K on the device: src_cuda/fused_pass.cu, from sm_90 on, and the vectors that go there and back."""

from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ..kernel import FLUSH_PRODUCT, HOST_ENTRIES
from .arrays import Room
from .kernels import PASS, STORES, UNSET, Strips, by_value, kernel, ring_offset, row_bytes
from .lay import fill


class OneRead:
    """src_cuda/fused_pass.cu over the K of a `DeviceOperator`."""

    def __init__(self, owner: Any, shape: Strips) -> None:
        (m, self.n), ld = owner.shape, owner.ld
        self.m, self.ld = m, ld  # not the owner: a circle would keep its K
        self.shape, self.back = shape, 0
        options = {"STORE": STORES[owner.stored], **shape.options}
        self.run, self.join = (kernel("fused_pass.cu", name, **options) for name in ("fused_pass", "join_streams"))
        row = row_bytes(shape.slice, owner.K.itemsize, shape.THREADS)
        self.shared = ring_offset("fused_pass.cu", **options) + shape.slots * shape.R * row
        self.run.max_dynamic_shared_size_bytes = max(self.shared, self.run.max_dynamic_shared_size_bytes)
        rows = -(-m // shape.R) * shape.R
        self.blocks = shape.streams * shape.strips
        self.v, self.ends = cp.zeros(ld), cp.empty(2 * m)  # base, and s
        self.part, self.scale = (cp.empty((2, count)) for count in (rows * shape.strips, rows))
        for posts in (self.part, self.scale):
            fill(posts.ravel(), UNSET)
        self.records = np.zeros(2, PASS)  # posts take turns
        for back, record in enumerate(self.records):
            for name in ("strips", "slice", "slots", "lag"):
                record[name] = getattr(shape, name)
            record["m"], record["ld"], record["kernel"] = m, ld, owner.K.data.ptr
            record["v"], record["s"] = (x.data.ptr for x in (self.v, self.ends[m:]))
            for name, posts in (("part", self.part), ("scale", self.scale)):
                record[name], record[f"old_{name}"] = posts[back].data.ptr, posts[1 - back].data.ptr
        self.own, self.size = self.records, [0]  # the same of calls, by factors of such sizes

    def open(self, size: list[int], flush: float) -> None:
        """Room for what calls send and bring, and for their sums, which go back with s where they are few."""
        self.size, self.starts = size, np.cumsum([0, *size]).view(np.float64)  # which go along
        few = self.ld if self.n <= HOST_ENTRIES else 0
        sizes = {"starts": len(self.starts), "factors": sum(size), "base": self.m, "s": self.m}
        self.room = Room({**sizes, "sums": few})
        self.sums = cp.empty(0 if few and self.shape.streams == 1 else self.shape.streams * self.ld)
        self.own = self.records.copy()
        self.out = self.room.there[self.room.at["sums"]] if few else self.sums[: self.ld]
        address = self.room.address
        known = {"v": address("factors"), "s": address("s"), "starts": address("starts"), "axes": len(self.size)}
        for name, value in {**known, "flush": flush}.items():
            self.own[name] = value

    def __call__(self, v: F64, base: F64, fi: float, sizes: Any) -> tuple[F64, Any]:
        """(s = K v, K^T u), u = e^base s^-fi, until the next call: a copy there, a launch or two, and a copy back."""
        size = [len(v)] if sizes is None else sizes.tolist()
        if size != self.size:
            self.open(size, 0.0 if sizes is None else FLUSH_PRODUCT)
        room, few = self.room, self.n <= HOST_ENTRIES
        room.send(starts=self.starts, factors=v, base=base)
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
