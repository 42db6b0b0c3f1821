"""Anderson's differences of a state on the device; their sums come to the host, which sends the weights.

On the host their sums take 3 ms for 20 differences of 45,000 numbers, and here all of it a tenth. Device side:
src_cuda/differences.cu. Twin of mapuot/backends/cpu/anderson.py.
"""

from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from .. import records
from ..cpu import anderson
from .kernels import by_value, kernel
from .room import Room

PAST = records.read("differences.cu")["Past"]
THREADS = 256


class DeviceHistory(anderson.History):
    def open(self, ends: list[int]) -> None:
        size, parts, depth = ends[-1], len(ends), self.depth
        self.widest = max(part.stop - part.start for part in self.parts)
        self.room = Room({"gamma": parts * depth, "sums": parts * depth * (depth + 1)})
        self.differences, self.ends = cp.empty((2, depth, size)), cp.asarray(np.array(ends, np.int64))
        past = self.past = np.zeros((), PAST)
        past["size"], past["ends"] = size, self.ends.data.ptr
        past["dF"], past["dG"] = (x.data.ptr for x in self.differences)
        past["gamma"], past["sums"] = map(self.room.address, ("gamma", "sums"))
        names = "add_difference", "products", "combine"
        self.functions = {name: kernel("differences.cu", name, STORE=0) for name in names}

    def launch(self, name: str, grid: tuple[int, ...], *arguments: np.int32) -> None:
        self.functions[name](grid, (THREADS,), (by_value(self.past), *arguments))

    def take(self, residual: Any, image: Any, slot: int | None) -> None:
        self.past["residual"], self.past["image"] = residual.data.ptr, image.data.ptr
        if slot is not None:
            before: tuple[Any, Any] = self.residual, self.image
            self.past["residual_before"], self.past["image_before"] = (x.data.ptr for x in before)
            self.launch("add_difference", (-(-len(image) // THREADS),), np.int32(slot))

    def products(self, weight: Any) -> tuple[F64, F64]:
        parts, count = len(self.parts), self.count
        self.past["count"], self.past["weight"] = count, weight.data.ptr
        self.launch("products", (count * (count + 1) // 2 + count, parts))
        self.room.bring("sums")
        sums = self.room["sums"][: parts * count * (count + 1)].reshape(parts, count, count + 1)
        return sums[:, :, :count], sums[:, :, count]

    def combined(self, gammas: F64) -> tuple[Any, Any]:
        self.room.send(gamma=gammas.ravel())
        step, left = cp.empty_like(self.image), cp.empty_like(self.image)
        self.past["step"], self.past["left"] = step.data.ptr, left.data.ptr
        self.launch("combine", (-(-self.widest // THREADS), len(self.parts)))
        return step, left
