"""The passes of messages along a tree, on a device: all vectors stay there from the first edge to the last.

One copy takes the state there, one brings what was found back, and the host waits once; between them are open_pass,
and fused_pass and close_edge of each edge (src_cuda/tree_pass.cu). Then the host judges each edge by the rule of
`LogKernel`, up to the first whose sums are not sound: that one and those after it are left to the caller. Twin of
backends/cpu/tree_pass.py, and goes the way back from the root, too.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from .. import records
from ..kernel import FLUSH, LEAST, LogKernel, StaleError, check_sums
from .arrays import on_device
from .kernels import by_value, kernel
from .one_read import OneRead
from .room import Room

RECORDS = records.read("tree_pass.cu")
EDGE, MESSAGES, LARGEST = (RECORDS[name] for name in ("Edge", "Messages", "Largest"))
WORDS = LARGEST.names or ()
OWN = WORDS.index("own")
THREADS, WHOLE = 256, 1024  # of a block; of one that has an edge for itself


class DeviceTreePass:
    """Passes over edges (child, parent, kernel, fi), each after those below it."""

    def __init__(self, edges: list[tuple[int, int, LogKernel, float]], points: list[int], log_weight: F64) -> None:
        """``points``: where those of each marginal begin; log_weight: the log masses of all; ``out``: what is found."""
        self.kernels, self.log_weight = [edge[2] for edge in edges], log_weight
        self.shapes = [owner.cost.shape for owner in self.kernels]
        self.builds, self.vectors = [-1] * len(edges), dict[int, Any]()
        self.passes = dict[int, OneRead]()
        self.edges, self.there = np.zeros(len(edges), EDGE), cp.empty(len(edges) * EDGE.itemsize, np.uint8)
        self.places = list[tuple[slice, slice, slice]]()  # of a child's and its parent's points, and their message
        children, parents = [edge[0] for edge in edges], [edge[1] for edge in edges]
        messages = [0, *accumulate(n for _, n in self.shapes)]
        for k, (child, parent, owner, fi) in enumerate(edges):
            last = parent not in parents[k + 1 :] and parent in children
            above = children.index(parent) if last else -1
            m, n = self.shapes[k]
            known = {"m": m, "n": n, "ld": owner.operator.ld, "message": messages[k], "above": above, "fi": fi}
            for name, value in {**known, "child": points[child], "parent": points[parent]}.items():
                self.edges[k][name] = value
            starts = (points[child], m), (points[parent], n), (messages[k], n)
            self.places.append(tuple(slice(i, i + size) for i, size in starts))  # type: ignore[arg-type]
        count, ends = len(log_weight), messages[-1]
        sizes = {"log_weight": count, "sent": ends, "near": count, "late": count, "log_u": count, "up": ends}
        self.room = Room({**sizes, "largest": len(edges) * len(WORDS), "back": count})
        self.room.send(log_weight=log_weight)
        self.out = {name: self.room[name] for name in ("near", "late", "log_u", "up")}
        for x in self.out.values():
            x.fill(0.0)
        self.messages = np.zeros((), MESSAGES)
        self.messages["flush"] = FLUSH
        for name in (*sizes, "back"):
            self.messages[name] = self.room.address(name)
        self.largest, self.sums = self.room.address("largest"), cp.empty(0)
        self.zeros, self.fi = cp.zeros(max(m for m, _ in self.shapes)), [edge[3] for edge in edges]
        names = "open_pass", "close_edge", "open_back", "close_back"
        self.functions = {name: kernel("tree_pass.cu", name, STORE=0) for name in names}

    def held(self, k: int) -> bool:
        """Tell whether the device can pass an edge; renew the pointers to a kernel that has been made since."""
        owner, edge, (m, _) = self.kernels[k], self.edges[k], self.shapes[k]
        one = owner.operator.one_read if owner.builds else None
        if one is None or owner.operator.labels is not None:
            return False
        if owner.builds != self.builds[k]:
            self.builds[k], self.passes[k] = owner.builds, one
            self.vectors[k] = p, q = on_device(owner.p, owner.q)
            for name, x in {"p": p, "q": q, "v": one.v, "base": one.ends, "s": one.ends[m:]}.items():
                edge[name] = x.data.ptr
            edge["streams"] = one.shape.streams
            if self.sums.size < one.shape.streams * one.ld:
                self.sums = cp.empty(one.shape.streams * one.ld)
                self.messages["sums"] = self.sums.data.ptr
            self.there.set(self.edges.view(np.uint8))
        return True

    def launch(self, name: str, blocks: int, threads: int, *edges: int) -> None:
        arguments = by_value(self.messages), self.there, np.uint64(self.largest), *map(np.int32, edges)
        self.functions[name]((blocks,), (threads,), arguments)

    def run(self, first: int, sent: F64, narrow: bool) -> list[float]:
        """The edges from ``first`` on, up to one that is left to the caller: what each of them rounds at most."""
        room, end = self.room, first
        for k, owner in enumerate(self.kernels[first:], first):
            if not owner.builds:  # as LogKernel does where it finds none
                _, parent, message = self.places[k]
                owner.absorb(self.log_weight[parent] + sent[message], False)
        while end < len(self.kernels) and self.held(end):
            end += 1
        if end == first:
            return []
        before = self.out["near"].copy() if first else 0.0
        room.send(sent=sent)
        if first:  # with what the caller has found of the edges before
            room.send(**self.out)
        else:
            room.there[room.at["near"]].fill(0)
        self.launch("open_pass", end - first, WHOLE, first)
        for k in range(first, end):
            (m, n), own = self.shapes[k], self.largest + k * LARGEST.itemsize + 8 * OWN
            one = self.passes[k]
            one.launch(self.sums, one.ends.data.ptr, own, self.fi[k])
            self.launch("close_edge", -(-m // THREADS) - (-n // THREADS), THREADS, k, end)
        room.bring("near", "late", "log_u", "up", "largest")
        errors = self.judged(range(first, end), partial(through_error, narrow=narrow))
        if len(errors) < end - first:  # that of sound edges alone
            self.out["near"][:] = before
            for _, parent, message in self.places[first : first + len(errors)]:
                self.out["near"][parent] += self.out["up"][message]
        return errors

    def back(self, near: F64, log_u: F64, up: F64, out: F64) -> list[float]:
        """Messages from the root, the last edge first, up to one that is left: what each of them rounds at most."""
        room, order = self.room, [*range(len(self.kernels))][::-1]
        order = [*takewhile(self.held, order)]
        if not order:
            return []
        room.send(near=near)
        room.send(log_u=log_u, up=up)
        for k in order:
            self.launch("open_back", 1, WHOLE, k)
            self.passes[k].launch(self.sums, self.zeros.data.ptr, 0, 0.0)
            self.launch("close_back", -(-self.shapes[k][0] // THREADS), THREADS, k)
        room.bring("largest", "back")
        errors = self.judged(order, back_error)
        for k in order[: len(errors)]:
            child, _, _ = self.places[k]
            out[child] = room["back"][child]
        return errors

    def judged(self, edges: Iterable[int], error: Callable[..., float]) -> list[float]:
        """Judge the sums of edges, up to the first edge whose sums are not sound."""
        found, errors = numbers(self.room["largest"]), list[float]()
        for k in edges:
            try:
                errors.append(error(self.kernels[k], **dict(zip(WORDS, found[k].tolist(), strict=True))))
            except StaleError:
                break
        return errors


def numbers(ranks: F64) -> F64:
    """Return the numbers whose ranks rank_of (common.cuh) gives as integers, a row for each edge."""
    bits = ranks.view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))).view(np.float64).reshape(-1, len(WORDS))


def through_error(owner: LogKernel, narrow: bool, **x: float) -> float:
    """Bound of the rounding of an edge's messages; StaleError where its sums are not sound."""
    if not (np.isfinite(x["top"]) and np.isfinite(x["own"])):
        raise StaleError
    owner.check_rows(-x["low_s"])
    check_sums(-x["low_sum"], x["high_sum"], LEAST[owner.dtype] * x["u"])
    return owner.rounding_through(x["y"], x["a"], x["late"], x["out"], narrow)


def back_error(owner: LogKernel, **x: float) -> float:
    """Return the error of an edge's sums on the way back from the root."""
    if not np.isfinite(x["top"]):
        raise StaleError
    owner.check_rows(-x["low_s"])
    return owner.rounding(x["y"] + x["late"])
