"""The passes of messages along a tree, on a device, where all vectors lie.

A pass is open_pass, and fused_pass and close_edge of each edge (src_cuda/tree_pass.cu). Then the host waits for ten
numbers of each edge, and judges it by the rule of `LogKernel`, up to the first whose sums are not sound: that one and
those after it are left to the caller. Twin of backends/cpu/tree_pass.py, and goes the way back from the root, too.
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
from ..kernel import FLUSH, LEAST, LogKernel, StaleError, check_sums
from .arrays import on_device
from .kernels import by_value, kernel
from .marginals import WORDS
from .one_read import OneRead

RECORDS = records.read("tree_pass.cu")
EDGE, MESSAGES, LARGEST = (RECORDS[name] for name in ("Edge", "Messages", "Largest"))
OWN, LARGEST_OF = WORDS.index("own"), namedtuple("LARGEST_OF", WORDS)
THREADS, WHOLE = 256, 1024  # of a block; of one that has an edge for itself


class DeviceTreePass:
    """Passes over edges (child, parent, kernel, fi), each after those below it."""

    def __init__(self, edges: list[tuple[int, int, LogKernel, float]], problem: Any) -> None:
        """``problem``: a `MultiProblem`; ``out``: what is found."""
        points, log_weight = problem.starts.tolist(), problem.log_weight
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
        sizes = dict.fromkeys(("near", "late", "log_u"), len(log_weight)) | {"up": messages[-1]}
        self.out = {name: cp.zeros(size) for name, size in sizes.items()}
        self.messages, self.weight = np.zeros((), MESSAGES), cp.asarray(log_weight)
        self.messages["flush"] = FLUSH
        for name, x in {**self.out, "log_weight": self.weight}.items():
            self.messages[name] = x.data.ptr
        self.points, self.sums = problem.points, cp.empty(0)
        self.largest = self.points.room.address("largest")
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

    def run(self, first: int, sent: Any, narrow: bool, close: Callable[[], Any]) -> list[float]:
        """The edges from ``first`` on, up to one that is left to the caller: what each of them rounds at most.

        ``close``: what is launched after the last edge, before the host waits.
        """
        end = first
        for k, owner in enumerate(self.kernels[first:], first):
            if not owner.builds:  # as LogKernel does where it finds none
                _, parent, message = self.places[k]
                owner.absorb(self.log_weight[parent] + sent[message].get(), False)
        while end < len(self.kernels) and self.held(end):
            end += 1
        if end == first:
            return []
        before, self.messages["sent"] = self.out["near"].copy() if first else 0.0, sent.data.ptr
        self.launch("open_pass", end - first, WHOLE, first)
        for k in range(first, end):
            (m, n), own = self.shapes[k], self.largest + k * LARGEST.itemsize + 8 * OWN
            one = self.passes[k]
            one.launch(self.sums, one.ends.data.ptr, own, self.fi[k])
            self.launch("close_edge", -(-m // THREADS) - (-n // THREADS), THREADS, k, end)
        if end == len(self.kernels):
            close()
        errors = self.judged(range(first, end), partial(through_error, narrow=narrow))
        if len(errors) < end - first:  # that of sound edges alone
            self.out["near"][:] = before
            for _, parent, message in self.places[first : first + len(errors)]:
                self.out["near"][parent] += self.out["up"][message]
        return errors

    def back(self, out: Any) -> list[float]:
        """Messages from the root of the last pass into ``out``, the last edge first, up to one that is left.

        Returned is what each of them rounds at most.
        """
        order = [*takewhile(self.held, [*range(len(self.kernels))][::-1])]
        self.messages["back"] = out.data.ptr
        for k in order:
            self.launch("open_back", 1, WHOLE, k)
            self.passes[k].launch(self.sums, self.zeros.data.ptr, 0, 0.0)
            self.launch("close_back", -(-self.shapes[k][0] // THREADS), THREADS, k)
        errors = self.judged(order, back_error)
        for k in order[len(errors) :]:
            out[self.places[k][0]] = 0.0
        return errors

    def judged(self, edges: Iterable[int], error: Callable[..., float]) -> list[float]:
        """Judge the sums of edges, up to the first edge whose sums are not sound."""
        found, errors = numbers(self.points.told("largest", len(WORDS))).tolist(), list[float]()
        for k in edges:
            try:
                errors.append(error(self.kernels[k], LARGEST_OF(*found[k])))
            except StaleError:
                break
        return errors


def numbers(ranks: F64) -> F64:
    """Return the numbers whose ranks rank_of (common.cuh) gives as integers."""
    bits = ranks.view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))).view(np.float64)


def through_error(owner: LogKernel, x: Any, narrow: bool) -> float:
    """Bound of the rounding of an edge's messages; StaleError where its sums are not sound."""
    if not (math.isfinite(x.top) and math.isfinite(x.own)):
        raise StaleError
    owner.check_rows(-x.low_s)
    check_sums(-x.low_sum, x.high_sum, LEAST[owner.dtype] * x.u)
    return owner.rounding_through(x.y, x.a, x.late, x.out, narrow)


def back_error(owner: LogKernel, x: Any) -> float:
    """Return the error of an edge's sums on the way back from the root."""
    if not math.isfinite(x.top):
        raise StaleError
    owner.check_rows(-x.low_s)
    return owner.rounding(x.y + x.late)
