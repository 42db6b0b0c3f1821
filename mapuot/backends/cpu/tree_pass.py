"""``mapuot_tree_pass``: the passes of messages along a tree whose kernels are in memory, in one call.

Twin: backends/cuda/tree_pass.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...penalties import F64
from ..kernel import FLUSH, LEAST, NARROW_SUMS, LogKernel
from .native import pointer

LARGE_ENTRIES = 1 << 24  # of a kernel whose product is a call of its own: Ctrl-C waits for the end of a call


class TreePass:
    """``mapuot_tree_pass`` over edges (child, parent, kernel, fi), each after those below it."""

    def __init__(self, edges: list[tuple[int, int, LogKernel, float]], problem: Any) -> None:
        """Fill the records; ``problem``: a `MultiProblem`. ``out``: the sums found."""
        points, log_weight = problem.starts.tolist(), problem.log_weight
        self.kernels = [kernel for _, _, kernel, _ in edges]
        self.builds, self.messages = [-1] * len(edges), ffi.new("mapuot_messages *")
        self.messages.flush, self.messages.noise = FLUSH, NARROW_SUMS
        self.log_weight, self.messages.log_weight = log_weight, pointer(log_weight)
        self.edges, ends = ffi.new("mapuot_edge[]", len(edges)), 0
        for edge, (child, parent, kernel, fi) in zip(self.edges, edges, strict=True):
            edge.pool, edge.fi, edge.base = kernel.operator.pool, fi, pointer(kernel.operator.rows["base"])
            edge.child, edge.parent, edge.message = points[child], points[parent], ends
            ends += kernel.cost.shape[1]
        self.out = {name: np.zeros(len(log_weight)) for name in ("near", "late", "log_u")} | {"up": np.zeros(ends)}
        for name, array in self.out.items():
            setattr(self.messages, name, pointer(array))

    def refresh(self) -> None:
        """Point at kernels that have been made since."""
        for k, (kernel, edge) in enumerate(zip(self.kernels, self.edges, strict=True)):
            if kernel.builds == self.builds[k]:
                continue
            self.builds[k], operator = kernel.builds, kernel.operator
            held = kernel.builds > 0 and kernel.dtype != "made" and kernel.cost.size <= LARGE_ENTRIES
            edge.state = operator.state if held else ffi.NULL
            edge.p, edge.q, edge.least = pointer(kernel.p), pointer(kernel.q), LEAST[kernel.dtype]
            edge.sizes = kernel.absorbed + kernel.largest
            edge.narrow = operator.narrow and kernel.dtype == "float32"
            operator.rows["fi"][:] = edge.fi

    def run(self, first: int, sent: F64, narrow: bool, close: Callable[[], Any]) -> list[float]:
        """Pass the edges from ``first`` on, up to one that is left to the caller; return what each rounds at most.

        ``close``: what is done after the last edge.
        """
        self.refresh()
        self.messages.sent, self.messages.narrow = pointer(sent), narrow
        end = int(lib.mapuot_tree_pass(first, len(self.kernels), self.edges, self.messages))
        if end == len(self.kernels):
            close()
        return [self.edges[k].error for k in range(first, end)]

    def back(self, out: F64) -> list[float]:
        """Make no messages from the root: the caller finds them edge by edge."""
        return []
