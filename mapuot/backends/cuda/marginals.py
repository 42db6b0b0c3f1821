"""The O(n) work of a pass along a tree on a device, where its vectors lie: numbers of marginals and edges come back.

Device side: src_cuda/marginals.cu. Twin of mapuot/backends/cpu/marginals.py.
"""

from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from .. import records
from ..cpu import marginals
from .arrays import on_device
from .kernels import Job, begin, by_value, kernel
from .room import Room

MARGINALS = records.read("marginals.cu")["Marginals"]
NAMES = (
    "log_amounts", "close_root", "translation", "worth", "moved", "at_edges", "mass_shares", "change_sums"
)  # fmt: skip
JOBS: list[Job] = [("marginals.cu", name, {"STORE": 0}) for name in NAMES]
THREADS, WHOLE = 256, 1024  # of a block; of one that makes a sum
TURNS = 8  # numbers of marginals that may be on their way at once: until some come back
NONE = np.uint64(0)
WORDS = records.read("tree_pass.cu")["Largest"].names or ()  # of an edge, which come back together with those of points


class DevicePoints(marginals.Points):
    def __init__(
        self, shape: tuple[int, ...], log_weight: F64, weight: F64, rho: F64, reg: float, edges: Any = ()
    ) -> None:
        super().__init__(shape, log_weight, weight, rho, reg, edges)
        self.closes = False  # is what a pass has found on its way?
        self.record, self.there, self.turn = np.zeros((), MARGINALS), list[Any](), 0
        hard = np.flatnonzero(np.isinf(rho))
        numbers = {"count": len(shape), "edges": len(self.edges), "hard": hard[0] if len(hard) else -1, "reg": reg}
        for name, value in numbers.items():
            self.record[name] = value
        begin(JOBS)
        self.functions = {name: kernel(file, name, **options) for file, name, options in JOBS}
        self.put(log_weight=log_weight, weight=weight, rho=rho, child=self.children, parent=self.parents)
        self.put(start=self.start, message=self.message)
        self.blocks = -(-max(shape) // THREADS)
        self.part(1, np.repeat(np.arange(len(shape)), shape))

    def put(self, **vectors: Any) -> None:
        """Send vectors of 8 bytes that the record points at."""
        found = on_device(*(x.view(np.float64) for x in vectors.values()))
        self.there += found
        for name, x in zip(vectors, found, strict=True):
            self.record[name] = x.data.ptr

    def part(self, parts: int, cells: Any) -> None:
        super().part(parts, cells)
        cell, message_cell = self.labels
        self.record["parts"], count = parts, self.amounts[0] * parts
        first = np.searchsorted(np.sort(cell), np.arange(count + 1))
        self.put(cell=cell, message_cell=message_cell, order=np.argsort(cell, kind="stable"), first=first)
        sizes = {**{f"by{k}": count for k in range(TURNS)}, "below": count, "rest": count, "amounts": count}
        told = {"largest": len(WORDS) * len(self.edges), "masses": parts, "lam": count}
        told |= {"worth": self.amounts[0] * marginals.WORTHS, "changes": 3 * len(self.edges)}
        self.room = Room({**sizes, **told})
        self.at = {name: np.uint64(self.room.address(name)) for name in self.room.at}

    def launch(self, name: str, blocks: Any, threads: int, *arguments: Any) -> None:
        grid = blocks if isinstance(blocks, tuple) else (blocks,)
        self.functions[name](grid, (threads,), arguments)

    def sum_of(self, name: str, blocks: int, *arguments: Any) -> None:
        """Launch a kernel whose blocks make a sum each."""
        self.launch(name, blocks, WHOLE, by_value(self.record), *arguments)

    def told(self, name: str, columns: int) -> F64:
        """Return numbers that kernels have found, and bring those of a pass that they close."""
        self.room.bring(*(("largest", "changes") if self.closes else (name,)))
        self.closes = False
        return self.room[name].reshape(-1, columns).copy()

    def sent(self, by: Any) -> Any:
        """Return the address of numbers of cells, of the host or known by a name."""
        if isinstance(by, str):
            return self.at[by]
        self.turn = (self.turn + 1) % TURNS
        name = f"by{self.turn}"
        self.room.send(**{name: by.ravel()})
        return self.at[name]

    def close(self, root: int, fi: float, out: dict[str, Any], state: Any) -> None:
        near, late, parts = out["near"], out["late"], self.amounts[1]
        self.sum_of("close_root", parts, np.int32(root), np.float64(fi), near, out["log_u"], self.at["masses"])
        self.sum_of("log_amounts", self.amounts[0] * parts, out["log_u"], self.at["amounts"])
        known = (self.at[name] for name in ("masses", "amounts", "lam", "below", "rest"))
        self.launch("translation", -(-parts // THREADS), THREADS, by_value(self.record), *known)
        log_u, up = self.moved(out["log_u"], "lam"), self.moved_messages(out["up"], "below")
        self.sum_of("worth", self.amounts[0], log_u, NONE, self.at["worth"])
        sent = self.at_edges(log_u, late, near, "rest", up)
        change, shares = sent - state, self.mass_shares(log_u, near, late)
        self.sum_of("change_sums", len(self.edges), shares, change, self.at["changes"])
        vectors = {"log_u": log_u, "up": up, "sent": sent, "change": change, "shares": shares}
        self.closed, self.closes = marginals.Closed(np.empty(0), **vectors), True

    def read(self) -> marginals.Closed:
        if self.closes:
            self.told("changes", 3)
        masses, lam, worth, changes = (self.room[name].copy() for name in ("masses", "lam", "worth", "changes"))
        found, changes = self.closed, changes.reshape(-1, 3)
        found.masses, found.lam, found.worth = masses, lam.reshape(self.amounts), worth.reshape(-1, marginals.WORTHS).T
        found.sums, found.largest = changes[:, :2], float(changes[:, 2].max())
        return found

    def log_amounts(self, log_u: Any) -> F64:
        self.sum_of("log_amounts", self.amounts[0] * self.amounts[1], log_u, self.at["amounts"])
        return self.told("amounts", self.amounts[1])

    def worth(self, log_u: Any, log_s: Any) -> F64:
        self.sum_of("worth", self.amounts[0], log_u, NONE if log_s is None else log_s, self.at["worth"])
        return self.told("worth", marginals.WORTHS).T

    def moved(self, x: Any, by: Any) -> Any:
        return self.shifted("cell", x, by)

    def moved_messages(self, x: Any, by: Any) -> Any:
        return self.shifted("message_cell", x, by)

    def shifted(self, cells: str, x: Any, by: Any) -> Any:  # type: ignore[override]
        out, count = cp.empty(len(x)), len(x)
        vectors = self.record[cells], self.sent(by), x, out
        self.launch("moved", -(-count // THREADS), THREADS, np.int64(count), *vectors)
        return out

    def at_edges(self, log_u: Any, back: Any, near: Any, by: Any, up: Any) -> Any:
        out = cp.empty(int(self.message[-1]))
        vectors = by_value(self.record), log_u, back, near, self.sent(by), up, out
        self.launch("at_edges", (self.blocks, len(self.edges)), THREADS, *vectors)
        return out

    def mass_shares(self, log_u: Any, near: Any, late: Any) -> Any:
        out = cp.empty(int(self.message[-1]))
        self.sum_of("mass_shares", len(self.edges), log_u, near, late, out)
        return out

    def change_sums(self, weight: Any, change: Any) -> F64:
        self.sum_of("change_sums", len(self.edges), weight, change, self.at["changes"])
        return self.told("changes", 3)[:, :2]
