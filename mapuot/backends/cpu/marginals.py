"""The O(n) work of a pass over many marginals, whose points lie one behind the other, by src_c/marginals.c.

A call of numpy on a vector takes 1 us and more, and a pass would make a hundred. Of an array or a triangle vectors are
the host's, wherever the kernels are. Twin for trees: mapuot/backends/cuda/marginals.py.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...penalties import F64
from ..kernel import log_sum, log_sums_by
from .native import pointer

WORTHS = len(ffi.typeof("mapuot_worth").fields)


@dataclass
class Closed:
    """The log mass of a pass along a tree, by part; on a device all else that follows, by messages that are late."""

    masses: F64
    lam: Any = None  # the translation, and what it makes of log u and of the messages to the root
    log_u: Any = None
    up: Any = None
    worth: Any = None  # numbers of that plan, as `Points.worth` gives them
    sent: Any = None  # the state that follows, its change and the largest of that
    change: Any = None
    largest: float = 0.0
    shares: Any = None  # of mass, and `Points.change_sums` with them
    sums: Any = None


class Points:
    """Points of all marginals, and messages of a tree's edges (child, parent), each with the points of the parent.

    ``cells``: of each point its marginal times parts, and its part, where the problem falls apart; rho: 0 of a free
    marginal, inf of a hard one.
    """

    def __init__(
        self, shape: tuple[int, ...], log_weight: F64, weight: F64, rho: F64, reg: float, edges: Any = ()
    ) -> None:
        self.start, self.edges = np.array([0, *accumulate(shape)], np.int64), np.array(edges, np.int64).reshape(-1, 2)
        self.children, self.parents = np.ascontiguousarray(self.edges.T)
        self.message = np.array([0, *accumulate(shape[k] for k in self.parents)], np.int64)
        self.amounts = len(shape), 1
        self.held = log_weight, weight, rho  # which the record points at
        core = self.core = ffi.new("mapuot_marginals *")
        core.count, core.parts, core.edges, core.reg = len(shape), 1, len(edges), reg
        for name in ("start", "message"):
            setattr(core, name, pointer(getattr(self, name), "int64_t *"))
        core.parent = pointer(self.parents, "int64_t *")
        core.log_weight, core.weight, core.rho = map(pointer, self.held)
        self.cells, self.message_cells = ffi.NULL, ffi.NULL

    def part(self, parts: int, cells: Any) -> None:
        """Let points belong to parts; each message is translated as its child's points are."""
        self.amounts = len(self.start) - 1, parts
        places = [slice(self.start[k], self.start[k + 1]) for k in self.parents]
        sent = [cells[place] % parts + k * parts for place, k in zip(places, self.children, strict=True)]
        self.labels = np.ascontiguousarray(cells, np.int64), np.concatenate([*sent, np.zeros(0, np.int64)])
        self.cells, self.message_cells = (pointer(x, "int64_t *") for x in self.labels)
        self.core.parts, self.core.cell = parts, self.cells

    def log_amounts(self, log_u: F64) -> F64:
        """Return log sum a u^(-reg / rho), a row for each marginal, a column for each part."""
        room, out = np.empty(self.amounts), np.empty(self.amounts)
        lib.mapuot_log_amounts(self.core, pointer(log_u), pointer(room), pointer(out))
        return out

    def close(self, k: int, fi: float, out: dict[str, F64], state: F64) -> None:
        """Close a pass from a state: find log u of the root k, and what `read` tells then."""
        root, parts = slice(self.start[k], self.start[k + 1]), self.amounts[1]
        near, log_u = out["near"][root], out["log_u"][root]
        log_u[:] = -fi * near if fi else 0.0
        x = self.held[0][root] + log_u + near
        self.closed = Closed(
            np.array([log_sum(x)]) if parts == 1 else log_sums_by(self.labels[0][root] - k * parts, parts, x)
        )

    def read(self) -> Closed:
        """Return what is known of the pass that was closed last."""
        return self.closed

    def worth(self, log_u: F64, log_s: F64 | None) -> F64:
        """Return the numbers of a mapuot_worth, a row each, of all marginals."""
        out = np.empty((self.amounts[0], WORTHS))
        at_points = ffi.NULL if log_s is None else pointer(log_s)
        lib.mapuot_worth_of(self.core, pointer(log_u), at_points, pointer(out, "mapuot_worth *"))
        return out.T

    def moved(self, x: F64, by: F64) -> F64:
        """Add one number for each marginal and part at all its points."""
        return self.shifted(self.start, self.cells, x, by)

    def moved_messages(self, x: F64, by: F64) -> F64:
        """Add to each message the number of the child that sends it."""
        return self.shifted(self.message, self.message_cells, x, by[self.children] if self.cells == ffi.NULL else by)

    def shifted(self, start: Any, cells: Any, x: F64, by: F64) -> F64:
        """Add to each number that of its stretch or, where there are cells, of its cell."""
        out, by = np.empty(start[-1]), np.ascontiguousarray(by)
        lib.mapuot_moved(len(start) - 1, pointer(start, "int64_t *"), cells, pointer(by), pointer(x), pointer(out))
        return out

    def at_edges(self, log_u: F64, back: F64, near: F64, by: F64, up: F64) -> F64:
        """Return log u + back + near + by at the parents' points, less what they have from the edge itself."""
        out, by = np.empty(self.message[-1]), np.ascontiguousarray(by)
        lib.mapuot_at_edges(self.core, *map(pointer, (log_u, back, near, by, up, out)))
        return out

    def mass_shares(self, log_u: F64, near: F64, late: F64) -> F64:
        """Return the share of each parent's point in the mass a e^(log u + near + late) of that marginal."""
        room, out = np.empty(self.start[-1]), np.empty(self.message[-1])
        lib.mapuot_mass_shares(self.core, *map(pointer, (log_u, near, late, room, out)))
        return out

    def change_sums(self, weight: F64, change: F64) -> F64:
        """Return the sums of weight change^2 and of weight |change|, a row for each edge."""
        out = np.empty((len(self.parents), 2))
        lib.mapuot_change_sums(self.core, *map(pointer, (weight, change, out)))
        return out
