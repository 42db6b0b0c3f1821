"""How many passes run on the device: the persistent cooperative kernel on sm_90 and later, else the portable one.

The persistent kernel keeps K in flight through shared memory and never comes back to the host between passes; the
portable one is three launches a pass. Both leave the same record. Twin of src_c/solver.c (mapuot_iterate).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import cupy as cp
import numpy as np

from .cuda_kernels import ITEMSIZE, STORES, THREADS, MAX_SLOTS, Shape, kernel, shape_for

TRACE_PASSES = 256  # passes that the record of one launch holds
GRAPH_PASSES = 16  # passes of a captured graph, an even number
TILES_A_GROUP = 1  # tiles that a group should have before another block is worth its share of the meeting


@cache
def device_limits(device: int) -> tuple[int, int, int]:
    """(compute capability, multiprocessors, shared memory of a block)."""
    major, minor, processors, shared = (cp.cuda.runtime.deviceGetAttribute(a, device) for a in (75, 76, 16, 97))
    return 10 * major + minor, processors, shared


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


def resident_clusters(function: Any, cluster: int, blocks: int, shared: int) -> int:
    """Clusters that the device holds at once, from the driver."""
    attribute = (ctypes.c_uint * 18)(4, 0, cluster, 1, 1)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    config = LaunchConfig(blocks, 1, 1, THREADS, 1, 1, shared, None, ctypes.addressof(attribute), 1)
    count = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(function.kernel.ptr)
    status = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), handle, ctypes.byref(config))
    return count.value if status == 0 else 0


class Iterate:
    """Calls that make passes on the state they were built for."""

    def __init__(self, state: Any, m: int, ld: int, dtype: str, kl: tuple[bool, bool], in_place: bool = False) -> None:
        self.state, self.parity, self.most = state, 0, TRACE_PASSES
        shape, self.in_place = shape_for(ld, dtype), in_place
        capability, self.processors, shared = device_limits(cp.cuda.Device().id)
        self.persistent = capability >= 90 and shape is not None and not in_place
        self.persistent = self.persistent and os.environ.get("MAPUOT_CUDA") != "portable"
        if self.persistent:
            assert shape is not None
            self.persistent = self.fit(shape, m, ld, dtype, kl, shared)
        if not self.persistent:
            self.fit_portable(m, ld, dtype, kl)

    def fit(self, shape: Shape, m: int, ld: int, dtype: str, kl: tuple[bool, bool], shared: int) -> bool:
        """Blocks, ring and shared memory of the persistent kernel; False where not even two tiles fit."""
        options = dict(GW=shape.GW, CPT=shape.CPT, R=shape.R, CLUSTER=shape.CLUSTER, STORE=STORES[dtype], KL_ROWS=int(kl[0]))
        options["KL_COLS"] = int(kl[1])
        self.shape, self.run = shape, kernel("iterate.cu", "iterate", **options)
        offset = ring_offset(tuple(sorted(options.items())), cp.cuda.Device().id)
        tile, tiles = shape.tile_bytes(ld, ITEMSIZE[dtype]), -(-m // shape.R)
        want = max(1, -(-tiles // (TILES_A_GROUP * shape.groups)))
        self.parts = min(self.processors, want * shape.CLUSTER) // shape.CLUSTER * shape.CLUSTER
        self.slots = min(MAX_SLOTS, (shared - offset) // (shape.groups * tile))
        if self.slots < 2 or self.parts < 1:
            return False
        each = -(-tiles // (self.parts // shape.CLUSTER * shape.groups))
        self.slots = max(2, min(self.slots, each))
        self.shared = offset + shape.groups * self.slots * tile
        self.run.max_dynamic_shared_size_bytes = self.shared
        if shape.CLUSTER > 1:
            fits = resident_clusters(self.run, shape.CLUSTER, self.parts, self.shared)
            self.parts = min(self.parts, fits * shape.CLUSTER)
        return self.parts > 0

    def __call__(self, count: int, bare: bool = False) -> None:
        if self.persistent:
            arguments = (self.state, np.int32(self.slots), np.int32(count), np.int32(bare))
            self.run((self.parts,), (THREADS,), arguments, shared_mem=self.shared)
        else:
            self.portable(count)

    def fit_portable(self, m: int, ld: int, dtype: str, kl: tuple[bool, bool]) -> None:
        """One read of K where a block covers a row, else two."""
        shape = shape_for(ld, dtype)
        self.fused = shape is not None and shape.CLUSTER == 1
        self.shape = shape = Shape(shape.GW, shape.CPT, 1 if shape.CPT > 8 else 2) if self.fused and shape else Shape(8, 8, 4)
        if self.in_place and not self.fused:
            raise NotImplementedError(f"method 'map-uot' on the GPU holds rows of at most 8192 columns, got {ld}")
        options = dict(GW=shape.GW, CPT=shape.CPT, R=shape.R, CLUSTER=1, STORE=STORES[dtype], KL_ROWS=int(kl[0]))
        options["KL_COLS"] = int(kl[1])
        self.kernels = {
            name: kernel("portable.cu", name, **options)
            for name in ("row_pass", "plan_pass", "row_sums", "column_sums", "finish_first", "finish_second")
        }
        self.parts = max(1, min(self.processors, -(-ld // 64)))
        self.blocks = min(self.processors * shape.groups, -(-m // shape.R))
        chunk = 32 * shape.GW * (16 // ITEMSIZE[dtype])
        self.slabs = -(-ld // chunk), max(1, min(m, 8 * self.processors // -(-ld // chunk)))
        self.slots, self.most = 0, GRAPH_PASSES
        self.graphs: dict[int, Any] = {}

    def one_pass(self, index: int, half: int) -> None:
        threads, parity = (32 * self.shape.GW,), np.int32(half)
        k = self.kernels
        if self.fused:
            k["plan_pass" if self.in_place else "row_pass"]((self.blocks,), threads, (self.state, parity))
        else:
            k["row_sums"]((self.blocks,), threads, (self.state, parity))
            k["column_sums"](self.slabs, threads, (self.state, parity))
        k["finish_first"]((self.parts,), (256,), (self.state, parity))
        k["finish_second"]((self.parts,), (256,), (self.state, parity, np.int32(index)))

    def portable(self, count: int) -> None:
        """Launches alternate between the halves of the records; GRAPH_PASSES of them are one captured graph."""
        if count < GRAPH_PASSES:
            self.passes(count)
        else:
            if self.parity not in self.graphs:
                with cp.cuda.Stream(non_blocking=True) as stream:
                    stream.begin_capture()
                    self.passes(GRAPH_PASSES)
                    self.graphs[self.parity] = stream.end_capture()
            self.graphs[self.parity].launch(cp.cuda.get_current_stream())
        self.parity = (self.parity + count) % 2

    def passes(self, count: int) -> None:
        for index in range(count):
            self.one_pass(index, (index + self.parity) % 2)

@cache
def ring_offset(options: tuple[tuple[str, int], ...], device: int) -> int:
    out = cp.zeros(1, np.int32)
    kernel("iterate.cu", "iterate_sizes", **dict(options))((1,), (1,), (out,))
    return int(out[0])
