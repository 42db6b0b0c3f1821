"""Anderson's differences on the device: what the host has of a state goes there, sums and the next state come back.

On the host their sums take 3 ms for 20 differences of 45,000 numbers, and here all of it a tenth. Device side:
src_cuda/differences.cu. Twin of mapuot/backends/cpu/anderson.py.
"""

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
        vectors = dict.fromkeys(("image0", "residual0", "image1", "residual1", "weight"), size)
        sums = {"gamma": parts * depth, "sums": parts * depth * (depth + 1)}
        self.room = Room({**vectors, **sums, "step": size, "left": size})
        self.differences, self.ends = cp.empty((2, depth, size)), cp.asarray(np.array(ends, np.int64))
        past = self.past = np.zeros((), PAST)
        past["size"], past["ends"] = size, self.ends.data.ptr
        past["dF"], past["dG"] = (x.data.ptr for x in self.differences)
        for name in ("weight", "gamma", "sums", "step", "left"):
            past[name] = self.room.address(name)
        self.turn = 0
        names = "add_difference", "products", "combine"
        self.functions = {name: kernel("differences.cu", name, STORE=0) for name in names}

    def launch(self, name: str, grid: tuple[int, ...], *arguments: np.int32) -> None:
        self.functions[name](grid, (THREADS,), (by_value(self.past), *arguments))

    def take(self, residual: F64, image: F64, slot: int | None) -> None:
        self.turn, before = 1 - self.turn, self.turn
        self.room.send(**{f"image{self.turn}": image, f"residual{self.turn}": residual})
        for name in ("image", "residual"):
            self.past[name] = self.room.address(f"{name}{self.turn}")
            self.past[f"{name}_before"] = self.room.address(f"{name}{before}")
        if slot is not None:
            self.launch("add_difference", (-(-len(image) // THREADS),), np.int32(slot))

    def products(self, weight: F64) -> tuple[F64, F64]:
        parts, count = len(self.parts), self.count
        self.room.send(weight=weight)
        self.past["count"] = count
        self.launch("products", (count * (count + 1) // 2 + count, parts))
        self.room.bring("sums")
        sums = self.room["sums"][: parts * count * (count + 1)].reshape(parts, count, count + 1)
        return sums[:, :, :count], sums[:, :, count]

    def combined(self, gammas: F64) -> tuple[F64, F64]:
        self.room.send(gamma=gammas.ravel())
        self.launch("combine", (-(-self.widest // THREADS), len(self.parts)))
        self.room.bring("step", "left")
        return self.room["step"].copy(), self.room["left"].copy()
