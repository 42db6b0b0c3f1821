"""The parts of a pass along a tree beside the products with its kernels, on the device of the vectors.

    DevicePoints    O(n) work; only numbers of marginals and edges come to the host (many/marginals.cu)
    DeviceTreePass  a pass is open_pass, then fused_pass and close_edge for each edge (many/tree_pass.cu). The host
                    waits for ten numbers of each edge, and checks the edges by the rule of `LogKernel`. The first edge
                    with unsound sums and all later edges are left to the caller. Messages from the root go the same way
    DeviceHistory   Anderson's differences: the host reads their products and sends the weights
                    (many/differences.cu). For 20 differences of 45,000 numbers the host takes 3 ms, this a tenth

Twin of mapuot/backends/cpu/marginals.py.
"""

import math
from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from .. import records
from ..cpu import marginals
from ..kernel import FLUSH, LEAST, LogKernel, StaleError, check_sums
from .arrays import Room, on_device
from .kernels import Job, begin, by_value, kernel

MARGINALS = records.read("marginals.cu")["Marginals"]
NAMES = (
    "log_amounts", "close_root", "translation", "worth", "moved", "at_edges", "mass_shares", "change_sums"
)  # fmt: skip
JOBS: list[Job] = [("marginals.cu", name, {"STORE": 0}) for name in NAMES]
THREADS, WHOLE = 256, 1024  # threads of a block; of a block that makes a whole sum
TURNS = 8  # buffers for numbers sent to the device: as many may be on their way before a read
NONE = np.uint64(0)
EDGE, MESSAGES, LARGEST = map(records.read("tree_pass.cu").__getitem__, ("Edge", "Messages", "Largest"))
WORDS = LARGEST.names or ()  # numbers of an edge; one read brings them with the numbers of points
OWN = WORDS.index("own")
LARGEST_OF = namedtuple("LARGEST_OF", WORDS)  # type: ignore[misc]
PAST = records.read("differences.cu")["Past"]


class DevicePoints(marginals.Points):
    def __init__(
        self, shape: tuple[int, ...], log_weight: F64, weight: F64, rho: F64, reg: float, edges: Any = ()
    ) -> None:
        super().__init__(shape, log_weight, weight, rho, reg, edges)
        self.closes = False  # are the results of `close` still to be read?
        self.record = np.zeros((), MARGINALS)
        self.there = list[Any]()
        self.turn = 0
        numbers = {"count": len(shape), "edges": len(self.edges), "hard": [*self.hard, -1][0], "reg": reg}
        records.put(self.record, numbers)
        begin(JOBS)
        self.functions = {name: kernel(file, name, **options) for file, name, options in JOBS}
        self.put(log_weight=log_weight, weight=weight, rho=rho, child=self.children, parent=self.parents)
        self.put(start=self.start, message=self.message)
        self.blocks = -(-max(shape) // THREADS)
        self.set_parts(1, np.repeat(np.arange(len(shape)), shape))

    def put(self, **vectors: Any) -> None:
        """Send vectors of 8-byte numbers to the device, and point the record at them."""
        found = on_device(*(x.view(np.float64) for x in vectors.values()))
        self.there += found
        records.put(self.record, dict(zip(vectors, found, strict=True)))

    def set_parts(self, parts: int, cells: Any) -> None:
        super().set_parts(parts, cells)
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
        if isinstance(blocks, tuple):
            grid = blocks
        else:
            grid = (blocks,)
        self.functions[name](grid, (threads,), arguments)

    def sum_of(self, name: str, blocks: int, *arguments: Any) -> None:
        """Launch a kernel with blocks that make one sum each."""
        self.launch(name, blocks, WHOLE, by_value(self.record), *arguments)

    def read_numbers(self, name: str, columns: int) -> F64:
        """Read numbers of this name from the device, and with them all results of a pass that was closed."""
        self.room.bring(*(("largest", "changes") if self.closes else (name,)))
        self.closes = False
        return self.room[name].reshape(-1, columns).copy()

    def address_of(self, by: Any) -> Any:
        """Return the device address of numbers of cells: send them from the host, or look up their name."""
        if isinstance(by, str):
            return self.at[by]
        self.turn = (self.turn + 1) % TURNS
        name = f"by{self.turn}"
        self.room.send(**{name: by.ravel()})
        return self.at[name]

    def close(self, root: int, fi: float, out: dict[str, Any], state: Any) -> None:
        near = out["near"]
        late = out["late"]
        parts = self.amounts[1]
        self.sum_of("close_root", parts, np.int32(root), np.float64(fi), near, out["log_u"], self.at["masses"])
        self.sum_of("log_amounts", self.amounts[0] * parts, out["log_u"], self.at["amounts"])
        arguments = (self.at[name] for name in ("masses", "amounts", "lam", "below", "rest"))
        self.launch("translation", -(-parts // THREADS), THREADS, by_value(self.record), *arguments)
        log_u = self.moved(out["log_u"], "lam")
        up = self.moved_messages(out["up"], "below")
        self.sum_of("worth", self.amounts[0], log_u, NONE, self.at["worth"])
        sent = self.at_edges(log_u, late, near, "rest", up)
        change = sent - state
        shares = self.mass_shares(log_u, near, late)
        self.sum_of("change_sums", len(self.edges), shares, change, self.at["changes"])
        late_ones = dict.fromkeys(("masses", "lam", "worth", "largest", "sums"))
        vectors = {"log_u": log_u, "up": up, "sent": sent, "change": change, "shares": shares}
        self.closed = marginals.ClosedPass(**late_ones, **vectors)  # type: ignore[arg-type]
        self.closes = True

    def read(self) -> marginals.ClosedPass:
        if self.closes:
            self.read_numbers("changes", 3)
        masses, lam, worth, changes = (self.room[name].copy() for name in ("masses", "lam", "worth", "changes"))
        found = self.closed
        changes = changes.reshape(-1, 3)
        found.masses = masses
        found.lam = lam.reshape(self.amounts)
        found.worth = worth.reshape(-1, marginals.WORTHS).T
        found.sums = changes[:, :2]
        found.largest = float(changes[:, 2].max())
        return found

    def log_amounts(self, log_u: Any) -> F64:
        self.sum_of("log_amounts", self.amounts[0] * self.amounts[1], log_u, self.at["amounts"])
        return self.read_numbers("amounts", self.amounts[1])

    def worth(self, log_u: Any, log_s: Any) -> F64:
        self.sum_of("worth", self.amounts[0], log_u, NONE if log_s is None else log_s, self.at["worth"])
        return self.read_numbers("worth", marginals.WORTHS).T

    def moved(self, x: Any, by: Any) -> Any:
        return self.shifted("cell", x, by)

    def moved_messages(self, x: Any, by: Any) -> Any:
        return self.shifted("message_cell", x, by)

    def shifted(self, cells: str, x: Any, by: Any) -> Any:  # type: ignore[override]
        out = cp.empty(len(x))
        count = len(x)
        vectors = self.record[cells], self.address_of(by), x, out
        self.launch("moved", -(-count // THREADS), THREADS, np.int64(count), *vectors)
        return out

    def at_edges(self, log_u: Any, back: Any, near: Any, by: Any, up: Any) -> Any:
        out = cp.empty(int(self.message[-1]))
        vectors = by_value(self.record), log_u, back, near, self.address_of(by), up, out
        self.launch("at_edges", (self.blocks, len(self.edges)), THREADS, *vectors)
        return out

    def mass_shares(self, log_u: Any, near: Any, late: Any) -> Any:
        out = cp.empty(int(self.message[-1]))
        self.sum_of("mass_shares", len(self.edges), log_u, near, late, out)
        return out

    def change_sums(self, weight: Any, change: Any) -> F64:
        self.sum_of("change_sums", len(self.edges), weight, change, self.at["changes"])
        return self.read_numbers("changes", 3)[:, :2]


class DeviceTreePass:
    """Passes over edges (child, parent, kernel, fi); each edge comes after all edges below it."""

    def __init__(self, edges: list[tuple[int, int, LogKernel, float]], problem: Any) -> None:
        """``problem``: a `MultiProblem`. The attribute ``out`` has the sums of a pass."""
        points = problem.starts.tolist()
        log_weight = problem.log_weight
        self.kernels = [edge[2] for edge in edges]
        self.log_weight = log_weight
        self.shapes = [owner.cost.shape for owner in self.kernels]
        self.builds = [-1] * len(edges)
        self.vectors = dict[int, Any]()
        self.edges = np.zeros(len(edges), EDGE)
        self.there = cp.empty(len(edges) * EDGE.itemsize, np.uint8)
        self.places = list[tuple[slice, slice, slice]]()  # for each edge: the child's points, the parent's, the message
        children = [edge[0] for edge in edges]
        parents = [edge[1] for edge in edges]
        messages = [0, *accumulate(n for _, n in self.shapes)]
        for k, (child, parent, owner, fi) in enumerate(edges):
            last = parent not in parents[k + 1 :] and parent in children
            if last:
                above = children.index(parent)
            else:
                above = -1
            m, n = self.shapes[k]
            numbers = {"m": m, "n": n, "ld": owner.operator.ld, "message": messages[k], "above": above, "fi": fi}
            records.put(self.edges[k], {**numbers, "child": points[child], "parent": points[parent]})
            starts = (points[child], m), (points[parent], n), (messages[k], n)
            self.places.append(tuple(slice(i, i + size) for i, size in starts))  # type: ignore[arg-type]
        sizes = dict.fromkeys(("near", "late", "log_u"), len(log_weight)) | {"up": messages[-1]}
        self.out = {name: cp.zeros(size) for name, size in sizes.items()}
        self.messages = np.zeros((), MESSAGES)
        self.weight = cp.asarray(log_weight)
        records.put(self.messages, {**self.out, "log_weight": self.weight, "flush": FLUSH})
        self.points = problem.points
        self.sums = cp.empty(0)
        self.largest = self.points.room.address("largest")
        self.zeros = cp.zeros(max(m for m, _ in self.shapes))
        self.fi = [edge[3] for edge in edges]
        names = "open_pass", "close_edge", "open_back", "close_back"
        self.functions = {name: kernel("tree_pass.cu", name, STORE=0) for name in names}

    def serves_edge(self, k: int) -> bool:
        """Tell whether the device can do an edge; update the pointers if its kernel has been rebuilt."""
        owner = self.kernels[k]
        edge = self.edges[k]
        m, _ = self.shapes[k]
        one = owner.operator
        if not owner.builds or one.strips is None or one.labels is not None:
            return False
        if owner.builds != self.builds[k]:
            self.builds[k] = owner.builds
            self.vectors[k] = p, q = on_device(owner.p, owner.q)
            vectors = {"p": p, "q": q, "v": one.v, "base": one.ends, "s": one.ends[m:]}
            records.put(edge, {**vectors, "streams": one.strips.streams})
            if self.sums.size < one.strips.streams * one.ld:
                self.sums = cp.empty(one.strips.streams * one.ld)
                self.messages["sums"] = self.sums.data.ptr
            self.there.set(self.edges.view(np.uint8))
        return True

    def launch(self, name: str, blocks: int, threads: int, *edges: int) -> None:
        arguments = by_value(self.messages), self.there, np.uint64(self.largest), *map(np.int32, edges)
        self.functions[name]((blocks,), (threads,), arguments)

    def run(self, first: int, sent: Any, narrow: bool, close: Callable[[], Any]) -> list[float]:
        """Send messages along the edges from ``first`` on, and return a bound on the rounding of each.

        Stop before an edge that the device cannot do: the caller does it. ``close`` launches further kernels after the
        last edge, before the host waits.
        """
        end = first
        for k, owner in enumerate(self.kernels[first:], first):
            if not owner.builds:  # build K first, as LogKernel does
                _, parent, message = self.places[k]
                owner.absorb(self.log_weight[parent] + sent[message].get(), False)
        while end < len(self.kernels) and self.serves_edge(end):
            end += 1
        if end == first:
            return []
        if first:
            before = self.out["near"].copy()
        else:
            before = 0.0
        self.messages["sent"] = sent.data.ptr
        self.launch("open_pass", end - first, WHOLE, first)
        for k in range(first, end):
            m, n = self.shapes[k]
            own = self.largest + k * LARGEST.itemsize + 8 * OWN
            one = self.kernels[k].operator
            one.launch_read(self.sums, one.ends.data.ptr, own, self.fi[k])
            self.launch("close_edge", -(-m // THREADS) - (-n // THREADS), THREADS, k, end)
        if end == len(self.kernels):
            close()
        errors = self.judged(range(first, end), partial(through_error, narrow=narrow))
        if len(errors) < end - first:  # keep the messages of sound edges only
            self.out["near"][:] = before
            for _, parent, message in self.places[first : first + len(errors)]:
                self.out["near"][parent] += self.out["up"][message]
        return errors

    def back(self, out: Any) -> list[float]:
        """Send messages from the root of the last pass to ``out``, the last edge first; bound the rounding of each.

        Stop at an edge that the device cannot do, or with unsound sums.
        """
        order = [*takewhile(self.serves_edge, [*range(len(self.kernels))][::-1])]
        self.messages["back"] = out.data.ptr
        for k in order:
            self.launch("open_back", 1, WHOLE, k)
            self.kernels[k].operator.launch_read(self.sums, self.zeros.data.ptr, 0, 0.0)
            self.launch("close_back", -(-self.shapes[k][0] // THREADS), THREADS, k)
        errors = self.judged(order, back_error)
        for k in order[len(errors) :]:
            out[self.places[k][0]] = 0.0
        return errors

    def judged(self, edges: Iterable[int], error: Callable[..., float]) -> list[float]:
        """Return the errors of edges up to the first edge with unsound sums."""
        found = numbers(self.points.read_numbers("largest", len(WORDS))).tolist()
        errors = list[float]()
        for k in edges:
            try:
                errors.append(error(self.kernels[k], LARGEST_OF(*found[k])))
            except StaleError:
                break
        return errors


def numbers(ranks: F64) -> F64:
    """Invert rank_of of common.cuh: map ordered integers back to float64."""
    bits = ranks.view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))).view(np.float64)


def through_error(owner: LogKernel, x: Any, narrow: bool) -> float:
    """Bound the rounding of an edge's messages; raise StaleError if its sums are not sound."""
    if not (math.isfinite(x.top) and math.isfinite(x.own)):
        raise StaleError
    owner.check_rows(-x.low_s)
    check_sums(-x.low_sum, x.high_sum, LEAST[owner.dtype] * x.u)
    return owner.rounding_through(x.y, x.a, x.late, x.out, narrow)


def back_error(owner: LogKernel, x: Any) -> float:
    """Bound the rounding of an edge's message from the root; raise StaleError if its sums are not sound."""
    if not math.isfinite(x.top):
        raise StaleError
    owner.check_rows(-x.low_s)
    return owner.rounding(x.y + x.late)


class DeviceHistory(marginals.History):
    def open(self, ends: list[int]) -> None:
        size = ends[-1]
        parts = len(ends)
        depth = self.depth
        self.widest = max(part.stop - part.start for part in self.parts)
        self.room = Room({"gamma": parts * depth, "sums": parts * depth * (depth + 1)})
        self.differences = cp.empty((2, depth, size))
        self.ends = cp.asarray(np.array(ends, np.int64))
        past = self.past = np.zeros((), PAST)
        dF, dG = self.differences
        numbers = {"size": size, "ends": self.ends, "dF": dF, "dG": dG}
        records.put(past, {**numbers, **{name: self.room.address(name) for name in ("gamma", "sums")}})
        names = "add_difference", "products", "combine"
        self.functions = {name: kernel("differences.cu", name, STORE=0) for name in names}

    def launch(self, name: str, grid: tuple[int, ...], *arguments: np.int32) -> None:
        self.functions[name](grid, (THREADS,), (by_value(self.past), *arguments))

    def store_difference(self, residual: Any, image: Any, slot: int | None) -> None:
        records.put(self.past, {"residual": residual, "image": image})
        if slot is not None:
            records.put(self.past, {"residual_before": self.residual, "image_before": self.image})
            self.launch("add_difference", (-(-len(image) // THREADS),), np.int32(slot))

    def products(self, weight: Any) -> tuple[F64, F64]:
        parts = len(self.parts)
        count = self.count
        self.past["count"], self.past["weight"] = count, weight.data.ptr
        self.launch("products", (count * (count + 1) // 2 + count, parts))
        self.room.bring("sums")
        sums = self.room["sums"][: parts * count * (count + 1)].reshape(parts, count, count + 1)
        return sums[:, :, :count], sums[:, :, count]

    def combined(self, gammas: F64) -> tuple[Any, Any]:
        self.room.send(gamma=gammas.ravel())
        step = cp.empty_like(self.image)
        left = cp.empty_like(self.image)
        self.past["step"], self.past["left"] = step.data.ptr, left.data.ptr
        self.launch("combine", (-(-self.widest // THREADS), len(self.parts)))
        return step, left
