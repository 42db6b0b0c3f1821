"""The pass of messages along a tree, on a device: all vectors stay there from the first edge to the last.

One copy takes the state there, one brings what was found back, and the host waits once; between them are open_pass,
and fused_pass and close_edge of each edge (src_cuda/tree_pass.cu). Then the host judges each edge by the rule of
`LogKernel`, up to the first whose sums are not sound: that one and those after it are left to the caller. Twin of
mapuot/backends/cpu/kernel.py (TreePass).
"""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from .. import records
from ..kernel import FLUSH, LEAST, StaleError, check_sums
from .arrays import on_device
from .kernel import Kernel
from .kernels import by_value, kernel

RECORDS = records.read("tree_pass.cu")
EDGE, MESSAGES, LARGEST = (RECORDS[name] for name in ("Edge", "Messages", "Largest"))
WORDS = LARGEST.names or ()
OWN = WORDS.index("own")
THREADS, WHOLE = 256, 1024  # of a block of close_edge; of one that has an edge for itself


class TreePass:
    """Passes over edges (child, parent, kernel, fi), each after those below it."""

    def __init__(self, edges: list[tuple[int, int, Kernel, float]], points: list[int], log_weight: F64) -> None:
        """``points``: where those of each marginal begin; log_weight: the log masses of all."""
        self.kernels, self.log_weight = [kernel for _, _, kernel, _ in edges], log_weight
        self.builds, self.vectors = [-1] * len(edges), dict[int, Any]()
        self.edges = np.zeros(len(edges), EDGE)
        ends, count = 0, len(log_weight)
        for k, (child, parent, owner, fi) in enumerate(edges):
            above = next((j for j, edge in enumerate(edges) if edge[0] == parent), -1)
            last = max(j for j, edge in enumerate(edges) if edge[1] == parent)
            known = owner.m, owner.n, owner.ld, points[child], points[parent], ends, above if last == k else -1, fi
            for name, value in zip(("m", "n", "ld", "child", "parent", "message", "above", "fi"), known, strict=True):
                self.edges[k][name] = value
            ends += owner.n
        self.places = [(slice(e["child"], e["child"] + e["m"]), slice(e["parent"], e["parent"] + e["n"]),
                        slice(e["message"], e["message"] + e["n"])) for e in self.edges]  # fmt: skip
        words = len(edges) * len(WORDS)
        self.sizes = {"log_weight": count, "near": count, "sent": ends, "late": count, "log_u": count, "up": ends}
        self.sizes["largest"] = words
        total = sum(self.sizes.values())
        self.room, self.there = cp.empty(total), cp.empty((len(edges), EDGE.itemsize), np.uint8)
        self.host = np.frombuffer(cp.cuda.alloc_pinned_memory(8 * total), np.float64, total)
        starts = dict(zip(self.sizes, np.cumsum((0, *self.sizes.values())).tolist(), strict=False))
        self.at = {name: slice(starts[name], starts[name] + size) for name, size in self.sizes.items()}
        self.room[self.at["log_weight"]].set(log_weight)
        self.taken = slice(starts["near"], starts["late"])
        self.found = slice(starts["late"], total)
        self.messages = np.zeros((), MESSAGES)
        self.messages["flush"] = FLUSH
        for name in ("log_weight", "near", "sent", "late", "log_u", "up"):
            self.messages[name] = self.room[self.at[name]].data.ptr
        self.largest = self.room[self.at["largest"]]
        self.open, self.close = (kernel("tree_pass.cu", name, STORE=0) for name in ("open_pass", "close_edge"))
        self.sums: Any = None

    def refresh(self, first: int, sent: F64) -> int:
        """Point at kernels that have been made since, the first time here; up to which edge all can be gone by."""
        changed = False
        for k, owner in enumerate(self.kernels[first:], first):
            _, parent, message = self.places[k]
            if not owner.builds:
                owner.absorb(self.log_weight[parent] + sent[message], False)
            if owner.one_read is None or owner.labels is not None:
                break
            if owner.builds == self.builds[k]:
                continue
            self.builds[k], changed, one = owner.builds, True, owner.one_read
            self.vectors[k] = p, q = on_device(owner.p, owner.q)  # held here
            edge = self.edges[k]
            for name, array in (("p", p), ("q", q), ("v", one.v), ("base", one.ends), ("s", one.ends[owner.m :])):
                edge[name] = array.data.ptr
            edge["streams"] = one.shape.streams
        else:
            k = len(self.kernels)
        if changed:
            self.there.set(self.edges.view(np.uint8).reshape(self.there.shape))
            most = max(e["streams"] * e["ld"] for e in self.edges)
            if self.sums is None or self.sums.size < most:
                self.sums = cp.empty(int(most))
                self.messages["sums"] = self.sums.data.ptr
        return k

    def run(self, first: int, sent: F64, narrow: bool, **out: F64) -> list[float]:
        """The edges from ``first`` on, up to one that is left to the caller: what each of them rounds at most."""
        end = self.refresh(first, sent)
        if end == first:
            return []
        host = self.host
        host[self.at["near"]], host[self.at["sent"]] = out["near"], sent
        self.room[self.taken].set(host[self.taken])
        messages = by_value(self.messages)
        self.open((end - first,), (WHOLE,), (messages, self.there, self.largest, np.int32(first)))
        for k in range(first, end):
            one, edge = self.kernels[k].one_read, self.edges[k]
            assert one is not None
            one.record["own"], one.record["fi"] = self.largest.data.ptr + k * LARGEST.itemsize + 8 * OWN, edge["fi"]
            one.launch(self.sums)
            blocks = -(-int(edge["m"]) // THREADS) + -(-int(edge["n"]) // THREADS)
            self.close((blocks,), (THREADS,), (messages, self.there, self.largest, np.int32(k)))
        self.room[self.found].get(out=host[self.found])
        return self.judged(first, end, narrow, out)

    def judged(self, first: int, end: int, narrow: bool, out: dict[str, F64]) -> list[float]:
        """What is sound of the edges read, into ``out``."""
        late, log_u, up = (self.host[self.at[name]] for name in ("late", "log_u", "up"))
        errors: list[float] = []
        for k, found in enumerate(numbers(self.host[self.at["largest"]])[first:end], first):
            owner = self.kernels[k]
            try:
                errors.append(error_of(owner, dict(zip(WORDS, found.tolist(), strict=True)), narrow))
            except StaleError:
                break
            child, parent, message = self.places[k]
            out["late"][child], out["log_u"][child] = late[child], log_u[child]
            out["up"][message] = up[message]
            out["near"][parent] += up[message]
        return errors


def numbers(ranks: F64) -> F64:
    """What the integers of rank_of (common.cuh) are the ranks of, a row for each edge."""
    bits = ranks.view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF))).view(np.float64).reshape(-1, len(WORDS))


def error_of(owner: Kernel, found: dict[str, float], narrow: bool) -> float:
    """Bound of the rounding of an edge's messages; StaleError where its sums are not sound."""
    if not (np.isfinite(found["top"]) and np.isfinite(found["own"])):
        raise StaleError
    owner.check_rows(-found["low_s"])
    check_sums(-found["low_sum"], found["high_sum"], LEAST[owner.dtype] * found["u"])
    return owner.rounding_through(found["y"], found["a"], found["late"], found["out"], narrow)
