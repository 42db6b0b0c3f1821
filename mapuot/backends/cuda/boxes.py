"""Bounds between boxes of points on the device, and lists of the kept pairs of boxes: src_cuda/points/boxes.cu.

backends/boxes.py chooses the pairs, as on the CPU. The memory is one bit for each pair of boxes.
"""

from typing import Any

import cupy as cp
import numpy as np

from ...arrays import namespace
from ...penalties import F64
from ...problem.points import KeptBoxes
from ...problem.problem import Problem
from ..boxes import BoxedSide, Boxes, PassState, TiltedSide
from ..records import put, read
from ..settings import BOXES
from . import vectors
from .arrays import need_memory
from .kernels import by_value, kernel

BITS, ROWS = 32, 64  # boxes of y in a word; boxes of x for a block of box_masses


def as_words(boxes: int) -> int:
    """Return the words for the bits of ``boxes`` boxes; at least one bit of 0 follows."""
    return boxes // BITS + 1


class DeviceBoxes(Boxes):
    arrays = vectors
    lists: tuple[Any, ...]  # for rows and for columns: (first run of each box, runs, boxes by width, points of a box)

    def __init__(self, problem: Problem, pool: Any, symmetric: bool = False) -> None:
        super().__init__(problem, pool, symmetric)
        m, n = self.rows.boxes, self.cols.padded
        need_memory(8 * m * as_words(n) + 8 * (4 * len(self.cols.mid[0]) + 8) * (m + n), "float64")
        self.bits = cp.empty((m, as_words(n)), np.uint32)
        self.record = np.zeros((), read("boxes.cu")["Boxes"])

    def call(self, name: str, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        if all(grid):  # a rank without rows has nothing to do
            kernel("boxes.cu", name, METRIC=self.metric)(grid, (threads,), arguments)

    def tilt(self, state: PassState) -> tuple[TiltedSide, TiltedSide, dict[str, Any]]:
        *sides, arrays = super().tilt(state)
        return sides[0], sides[1], {name: cp.asarray(array) for name, array in arrays.items()}

    def tilted(self, boxed: BoxedSide, log_scale: F64, log: F64) -> TiltedSide:
        count, d = boxed.mid.shape
        x = boxed.points
        sizes = cp.zeros(2, np.uint64)
        flat = cp.asarray(log), cp.asarray(log_scale)
        log_mass = cp.empty(count)
        shares = vectors.empty((count, boxed.unit))
        slope = cp.zeros((count, d))
        fit = np.int32(self.smooth and d <= BOXES.most_slopes)
        points = x, *(np.int64(step // 8) for step in x.strides), *map(cp.asarray, (boxed.first, boxed.mid))
        numbers = np.float64(boxed.factor), np.int64(boxed.count), np.int64(boxed.unit), np.int64(d), fit
        self.call("box_tilt", (count,), 32, *points, *numbers, *flat, slope, log_mass, shares, sizes)
        largest = float(sizes.get().view(np.float64).sum())
        return TiltedSide(slope.get(), log_mass.get(), shares if namespace(log) is not np else shares.get(), largest)

    def sweep(self, arrays: dict[str, Any], kept: KeptBoxes | None = None) -> tuple[Any, F64, F64]:
        on = {name: cp.asarray(array) for name, array in arrays.items()}
        m, words = self.bits.shape
        n = len(on["y_log_mass"])
        put(self.record, {**on, "m": m, "n": n, "d": self.rows.mid.shape[1], "metric": self.metric})
        row_mass = cp.zeros(m)
        col_mass = cp.zeros(n)
        self.call(
            "box_masses", (-(-words * BITS // 256), -(-m // ROWS)), 256, by_value(self.record),
            np.int32(kept is not None), self.bits, np.int64(words), row_mass, col_mass,
        )  # fmt: skip
        width = self.counted(self.bits)[1]
        return width.get(), row_mass.get(), self.ranks.sum(col_mass.get())

    def counted(self, bits: Any) -> tuple[Any, Any]:
        """Return the numbers of runs and of boxes in each row of bits."""
        none = np.uint64(0)
        m, words = bits.shape
        count = cp.empty(m, np.int64)
        width = cp.empty(m, np.int64)
        sizes = np.int32(1), np.int32(0)
        self.call("box_runs", (m,), 32, bits, np.int64(words), none, count, width, none, *sizes)
        return count, width

    def listed(self, bits: Any, count: Any, limit: int) -> tuple[Any, Any]:
        """Return (first, run) of `KeptBoxes` for these bits."""
        m, words = bits.shape
        first = vectors.zeros(m + 1, np.int64)
        first[1:] = cp.cumsum(vectors.asarray(count))
        run = cp.zeros(2 * max(1, int(first[-1])), np.int32)
        sizes = np.int32(self.unit), np.int32(limit)
        none = np.uint64(0)
        self.call("box_runs", (m,), 32, bits, np.int64(words), first, none, none, run, *sizes)
        return first, run

    def runs(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        (m, words), n = self.bits.shape, self.cols.boxes
        turned = cp.zeros((n, as_words(m)), np.uint32)
        sizes = np.int64(words), np.int64(m), turned, np.int64(as_words(m)), np.int64(n)
        self.call("box_turn", (-(-m // BITS), words), 32, self.bits, *sizes)
        found = []
        for bits, limit in ((self.bits, self.limit), (turned, m * self.unit)):
            count, width = self.counted(bits)
            order = np.argsort(-width.get(), kind="stable").astype(np.int32)
            found.append((*self.listed(bits, count, limit), cp.asarray(order), self.unit))
        self.lists = tuple(found)
        first, run = found[0][:2]
        return first.get(), run.get()
