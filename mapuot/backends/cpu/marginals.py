"""The parts of a pass over many marginals beside the products with their kernels, by the C core.

    Points     O(n) work: all points lie one behind the other, as a call of numpy takes 1 us and a pass would make a
               hundred (src_c/marginals.c)
    TreePass   ``mapuot_tree_pass``: messages along a tree with kernels in memory, in one call (src_c/tree.c)
    Left       turns of all marginals but one of an array or a triangle, on W, the kernel contracted with the remaining
               marginal (src_c/left.c); if W lies on a device, sums are made there and the rest here
    History    Anderson's differences of a state, and the step made of them: docs/mathematics.md
               (src_c/differences.c; for two marginals src_c/finish_tmpl.c)

For an array or a triangle vectors stay on the host, wherever the kernels are. Twin for trees:
backends/cuda/marginals.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...arrays import host, namespace
from ...penalties import F64
from ..kernel import (
    FLUSH,
    FLUSH_PRODUCT,
    LEAST,
    NARROW_SUMS,
    LogKernel,
    StaleError,
    largest_of,
    log_sum,
    log_sums_by,
)
from . import native
from .native import check, empty, pointer

WORTHS = len(ffi.typeof("mapuot_worth").fields)
LARGE_ENTRIES = 1 << 24  # a larger kernel gets a call of its own for each product: Ctrl-C waits for the end of a call


@dataclass
class ClosedPass:
    """Results of closing a pass along a tree: the log mass of each part, and the numbers that follow from it.

    Messages back from the root are one pass old.
    """

    masses: F64
    lam: Any  # the translation; log_u and up (the messages to the root) are translated by it
    log_u: Any
    up: Any
    worth: Any  # numbers of the translated plan, see `Points.worth`
    sent: Any  # the next state, its change, and the largest change in size
    change: Any
    largest: float
    shares: Any  # `Points.mass_shares`, and `Points.change_sums` weighted by them
    sums: Any


class Points:
    """Points of all marginals, and messages of a tree's edges (child, parent); a message has the parent's points.

    ``cells``: marginal * parts + part for each point, where the problem falls into parts. rho: 0 for a free marginal,
    inf for a hard one.
    """

    def __init__(
        self, shape: tuple[int, ...], log_weight: F64, weight: F64, rho: F64, reg: float, edges: Any = ()
    ) -> None:
        self.start = np.array([0, *accumulate(shape)], np.int64)
        self.edges = np.array(edges, np.int64).reshape(-1, 2)
        self.children, self.parents = np.ascontiguousarray(self.edges.T)
        self.message = np.array([0, *accumulate(shape[k] for k in self.parents)], np.int64)
        self.amounts = len(shape), 1
        self.held = log_weight, weight, rho  # kept alive, since the record points at them
        self.hard = np.flatnonzero(np.isinf(rho))
        self.ratios = np.where(np.isinf(rho), 0.0, rho / reg)[:, None]
        core = self.core = ffi.new("mapuot_marginals *")
        core.count = len(shape)
        core.parts = 1
        core.edges = len(edges)
        core.reg = reg
        for name in ("start", "message"):
            setattr(core, name, ffi.from_buffer("int64_t *", getattr(self, name)))
        core.parent = ffi.from_buffer("int64_t *", self.parents)
        core.log_weight, core.weight, core.rho = map(pointer, self.held)
        self.cells, self.message_cells = ffi.NULL, ffi.NULL

    def set_parts(self, parts: int, cells: Any) -> None:
        """Assign points to parts; a message is translated like the points of its child."""
        self.amounts = len(self.start) - 1, parts
        places = [slice(self.start[k], self.start[k + 1]) for k in self.parents]
        sent = [cells[place] % parts + k * parts for place, k in zip(places, self.children, strict=True)]
        self.labels = np.ascontiguousarray(cells, np.int64), np.concatenate([*sent, np.zeros(0, np.int64)])
        self.cells, self.message_cells = (ffi.from_buffer("int64_t *", x) for x in self.labels)
        self.core.parts, self.core.cell = parts, self.cells

    def log_amounts(self, log_u: F64) -> F64:
        """Return log sum a u^(-reg / rho), with a row for each marginal and a column for each part."""
        room = np.empty(self.amounts)
        out = np.empty(self.amounts)
        lib.mapuot_log_amounts(self.core, pointer(log_u), pointer(room), pointer(out))
        return out

    def close(self, k: int, fi: float, out: dict[str, F64], state: F64) -> None:
        """Close a pass from a state: find log u of the root k, and fill the `ClosedPass` that `read` returns."""
        root = slice(self.start[k], self.start[k + 1])
        parts = self.amounts[1]
        near = out["near"]
        late = out["late"]
        log_u = out["log_u"]
        if fi:
            log_u[root] = -fi * near[root]
        else:
            log_u[root] = 0.0
        x = self.held[0][root] + log_u[root] + near[root]
        if parts == 1:
            masses = np.array([log_sum(x)])
        else:
            masses = log_sums_by(self.labels[0][root] - k * parts, parts, x)
        lam = self.translation(masses, log_u)
        log_u = self.moved(log_u, lam)
        up = self.moved_messages(out["up"], self.below(lam))
        sent = self.at_edges(log_u, late, near, lam.sum(0) - lam, up)
        change = sent - state
        shares = self.mass_shares(log_u, near, late)
        numbers = masses, lam, log_u, up, self.worth(log_u, None), sent, change, largest_of(change), shares
        self.closed = ClosedPass(*numbers, self.change_sums(shares, change))

    def translation(self, log_masses: F64, log_u: F64) -> F64:
        """Find the best common shifts lam of log u: A_k e^(-lam_k reg / rho_k) = c for all k, c the mass of the plan.

        A_k = sum a_k u_k^(-reg / rho_k). With R_k = rho_k / reg, log c = (log mass + sum R_k log A_k) / (1 + sum R_k);
        if a marginal is hard, c is its mass. lam has a row for each marginal and a column for each part.
        """
        R = self.ratios
        hard = self.hard.tolist()
        log_A = self.log_amounts(log_u)
        if hard:
            log_c = log_A[hard[0]]
        else:
            log_c = (log_masses + (R * log_A).sum(0)) / (1 + R.sum())
        lam: F64 = R * (log_A - log_c)
        if hard:
            lam[hard[0]] = log_c - log_masses - lam.sum(0)
        if np.isfinite(lam).all():
            return lam
        return np.where(np.isfinite(lam).all(0), lam, 0.0)

    def below(self, lam: F64) -> F64:
        """Return the shift of each message to the root: the sum of the shifts of all u that the message contains."""
        below = lam.copy()
        for k, parent in self.edges.tolist():
            below[parent] += below[k]
        return below

    def read(self) -> ClosedPass:
        return self.closed

    def worth(self, log_u: F64, log_s: F64 | None) -> F64:
        out = np.empty((self.amounts[0], WORTHS))
        if log_s is None:
            at_points = ffi.NULL
        else:
            at_points = pointer(log_s)
        lib.mapuot_worth_of(self.core, pointer(log_u), at_points, ffi.from_buffer("mapuot_worth *", out))
        return out.T

    def moved(self, x: F64, by: F64) -> F64:
        """Add to all points of each marginal and part its number in ``by``."""
        return self.shifted(self.start, self.cells, x, by)

    def moved_messages(self, x: F64, by: F64) -> F64:
        """Add to each message the number of the child that sends it."""
        return self.shifted(self.message, self.message_cells, x, by[self.children] if self.cells == ffi.NULL else by)

    def shifted(self, start: Any, cells: Any, x: F64, by: F64) -> F64:
        """Add to each entry of x the number of its stretch or, where there are cells, of its cell."""
        out = np.empty(start[-1])
        by = np.ascontiguousarray(by)
        lib.mapuot_moved(
            len(start) - 1, ffi.from_buffer("int64_t *", start), cells, pointer(by), pointer(x), pointer(out)
        )
        return out

    def at_edges(self, log_u: F64, back: F64, near: F64, by: F64, up: F64) -> F64:
        """Return log u + back + near + by at the parents' points, less ``up``, the edge's own message."""
        out = np.empty(self.message[-1])
        by = np.ascontiguousarray(by)
        lib.mapuot_at_edges(self.core, *map(pointer, (log_u, back, near, by, up, out)))
        return out

    def mass_shares(self, log_u: F64, near: F64, late: F64) -> F64:
        """Return the share of each parent's point in the mass a e^(log u + near + late) of the parent marginal."""
        room = np.empty(self.start[-1])
        out = np.empty(self.message[-1])
        lib.mapuot_mass_shares(self.core, *map(pointer, (log_u, near, late, room, out)))
        return out

    def change_sums(self, weight: F64, change: F64) -> F64:
        """Return the sums of weight change^2 and of weight |change|, with a row for each edge."""
        out = np.empty((len(self.parents), 2))
        lib.mapuot_change_sums(self.core, *map(pointer, (weight, change, out)))
        return out


class TreePass:
    """``mapuot_tree_pass`` over edges (child, parent, kernel, fi); each edge comes after all edges below it."""

    def __init__(self, edges: list[tuple[int, int, LogKernel, float]], problem: Any) -> None:
        """Fill the records; ``problem``: a `MultiProblem`. ``out``: the sums found."""
        points = problem.starts.tolist()
        log_weight = problem.log_weight
        self.kernels = [kernel for _, _, kernel, _ in edges]
        self.builds = [-1] * len(edges)
        self.messages = ffi.new("mapuot_messages *")
        self.messages.flush, self.messages.noise = FLUSH, NARROW_SUMS
        self.log_weight = log_weight
        self.messages.log_weight = pointer(log_weight)
        self.edges = ffi.new("mapuot_edge[]", len(edges))
        ends = 0
        for edge, (child, parent, kernel, fi) in zip(self.edges, edges, strict=True):
            edge.pool = kernel.operator.pool
            edge.fi = fi
            edge.base = pointer(kernel.operator.rows["base"])
            edge.child = points[child]
            edge.parent = points[parent]
            edge.message = ends
            ends += kernel.cost.shape[1]
        self.out = {name: np.zeros(len(log_weight)) for name in ("near", "late", "log_u")} | {"up": np.zeros(ends)}
        for name, array in self.out.items():
            setattr(self.messages, name, pointer(array))

    def refresh(self) -> None:
        for k, (kernel, edge) in enumerate(zip(self.kernels, self.edges, strict=True)):
            if kernel.builds == self.builds[k]:
                continue
            self.builds[k], operator = kernel.builds, kernel.operator
            held = kernel.builds > 0 and kernel.dtype != "made" and kernel.cost.size <= LARGE_ENTRIES
            if held:
                edge.state = operator.state
            else:
                edge.state = ffi.NULL
            edge.p = pointer(kernel.p)
            edge.q = pointer(kernel.q)
            edge.least = LEAST[kernel.dtype]
            edge.sizes = kernel.absorbed + kernel.largest
            edge.narrow = operator.narrow and kernel.dtype == "float32"
            operator.rows["fi"][:] = edge.fi

    def run(self, first: int, sent: F64, narrow: bool, close: Callable[[], Any]) -> list[float]:
        """Send messages along the edges from ``first`` on, and return a bound on the rounding of each.

        Stop before an edge that the core cannot do: the caller does it. ``close`` is called after the last edge.
        """
        self.refresh()
        self.messages.sent = pointer(sent)
        self.messages.narrow = narrow
        end = int(lib.mapuot_tree_pass(first, len(self.kernels), self.edges, self.messages))
        if end == len(self.kernels):
            close()
        return [self.edges[k].error for k in range(first, end)]

    def back(self, out: F64) -> list[float]:
        """Make no messages from the root: the caller makes them edge by edge."""
        return []


class RemainingMarginals:
    """W e^(base - shift_1 - shift_2 ...), and the state: log u of the marginals of W's axes, one behind the other."""

    W: Any = None

    def __init__(self, sizes: list[int], log_weight: F64, fi: list[float], threads: int | None = 1) -> None:
        ends = [0, *accumulate(sizes)]
        axes = len(sizes)
        self.parts = [slice(*part) for part in pairwise(ends)]
        self.size = np.array(sizes, np.int64)
        self.fi = np.array(fi, float)
        self.top = np.zeros(axes)
        self.log_weight = log_weight
        rest = int(np.prod(self.size[:-1]))
        names = "log_u", "log_s", "sums", "factor", "shift"
        vectors = dict(zip(names, native.vectors(*[ends[-1]] * len(names)), strict=True))
        self.log_u, self.log_s, self.sums, self.factor, self.shift = vectors.values()
        pool = self.pool = native.pool_for(threads, rest * sizes[-1])
        vectors |= {"work": empty(2 * rest), "partial": empty(lib.mapuot_pool_threads(pool) * max(sizes))}
        core = self.core = ffi.new("mapuot_left *")
        core.pool = pool
        core.axes = axes
        core.size = ffi.from_buffer("int64_t *", self.size)
        for name, x in {**vectors, "log_weight": log_weight, "fi": self.fi, "top": self.top}.items():
            setattr(core, name, pointer(x))
        core.flush, self.held = FLUSH_PRODUCT, vectors
        self.shift_size = 0.0

    def around(self, shift: list[F64]) -> None:
        np.concatenate(shift, out=self.shift)
        self.shift_size = sum(largest_of(x) for x in shift)

    def factors(self, log_u: F64) -> None:
        """Copy log_u and make its factors."""
        self.log_u[:] = log_u
        settle(lib.mapuot_left_factors(self.core))

    def read(self, W: Any, base: float, least: float) -> None:
        """Find log s of all axes on W e^base; StaleError where a sum is below ``least``."""
        core = self.core
        self.W = W
        self.there = namespace(W) is not np
        core.W = ffi.NULL if self.there else pointer(W)
        core.base, core.least = base, least
        if self.there:
            for k in range(len(self.parts)):
                self.contract(k)
        settle(lib.mapuot_left_read(core))

    def move(self, shifts: F64) -> None:
        """Move log u by common shifts; the first shift belongs to the marginal that W has no axis for."""
        self.core.base += shifts[0]
        self.top += shifts[1:]
        self.log_u += np.repeat(shifts[1:], self.size)

    def turn(self, given: bool) -> None:
        """Optimise the axes one after the other; given: the sums of the first axis are known already."""
        if not self.there:
            settle(lib.mapuot_left_turn(self.core, 0, len(self.parts), given))
            return
        for k in np.flatnonzero(self.fi).tolist():
            if not given:
                self.contract(k)
            given = False
            settle(lib.mapuot_left_turn(self.core, k, k + 1, True))

    @property
    def log_mass(self) -> float:
        return float(self.core.log_mass)

    def contract(self, k: int) -> None:
        W = self.W.reshape(self.size.tolist())
        xp = namespace(self.W)
        factors = [self.factor[part] for part in self.parts]
        for x in factors[:k:-1]:
            W = W @ xp.asarray(x)
        for x in factors[:k]:
            W = (xp.asarray(x) @ W.reshape(len(x), -1)).reshape(W.shape[1:])
        self.sums[self.parts[k]] = host(W)


def settle(status: int) -> None:
    if check(status) == lib.MAPUOT_ABSORB:
        raise StaleError


class History:
    """At most ``depth`` differences of a state; its parts end at ``ends``."""

    def __init__(self, depth: int, ends: list[int]) -> None:
        self.parts = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
        self.depth = depth
        self.residual = self.image = np.zeros(0)
        self.clear()
        self.open(ends)

    def clear(self) -> None:
        self.made, self.begun = 0, False

    @property
    def count(self) -> int:
        return min(self.made, self.depth)

    def add(self, residual: F64, image: F64) -> bool:
        """Add a pass; tell whether there is a difference to extrapolate with."""
        self.store_difference(residual, image, self.made % self.depth if self.begun else None)
        self.made += self.begun
        self.residual, self.image, self.begun = residual, image, True
        return self.made > 0

    def next(self, weight: F64, alone: float) -> tuple[F64, F64]:
        """Return (G - sum gamma_i dG_i, F - sum gamma_i dF_i) with the gamma that minimises |F - sum gamma_i dF_i|.

        The norm is weighted by ``weight``; G and F are the last image and residual. Each part uses ``alone`` times its
        own gamma plus 1 - ``alone`` times the common one; 1 suits parts that hardly depend on each other.
        """
        grams, rights = self.products(weight)
        gram = grams.sum(0)
        right = rights.sum(0)  # the sums over all parts
        if not alone or len(self.parts) == 1:
            gamma = weights_of(gram[None], right[None])
            return self.combined(np.repeat(gamma, len(self.parts), 0))
        found = weights_of(np.concatenate([grams, gram[None]]), np.concatenate([rights, right[None]]))
        return self.combined(alone * found[:-1] + (1 - alone) * found[-1])

    # ---- where the differences are held

    def open(self, ends: list[int]) -> None:
        self.ends: Any = np.array(ends, np.int64)
        self.dF = np.empty((self.depth, ends[-1]))
        self.dG = np.empty((self.depth, ends[-1]))

    def store_difference(self, residual: F64, image: F64, slot: int | None) -> None:
        """Store the difference from the pass before in this slot; None: there was no pass before."""
        if slot is not None:
            np.subtract(residual, self.residual, out=self.dF[slot])
            np.subtract(image, self.image, out=self.dG[slot])

    def products(self, weight: F64) -> tuple[F64, F64]:
        """Return sum w dF_i dF_j and sum w dF_i F for each part."""
        parts = len(self.parts)
        count = self.count
        grams = np.empty((parts, count, count))
        rights = np.empty((parts, count))
        vectors = self.dF, self.residual, weight, grams, rights
        lib.mapuot_anderson_products(parts, ffi.from_buffer("int64_t *", self.ends), count, *map(pointer, vectors))
        return grams, rights

    def combined(self, gammas: F64) -> tuple[F64, F64]:
        """Return (G - sum gamma_i dG_i, F - sum gamma_i dF_i); ``gammas`` has a row for each part."""
        image = np.empty_like(self.image)
        residual = np.empty_like(self.residual)
        ends = ffi.from_buffer("int64_t *", self.ends)
        vectors = np.ascontiguousarray(gammas), self.dF, self.dG, self.residual, self.image, image, residual
        lib.mapuot_anderson_combined(len(self.parts), ends, self.count, *map(pointer, vectors))
        return image, residual


def weights_of(grams: F64, rights: F64) -> F64:
    """Find gamma with the least |F - sum gamma_i dF_i|, by normal equations with normalised columns."""
    grams = np.ascontiguousarray(grams)
    gammas = np.empty(rights.shape)
    vectors = grams, np.ascontiguousarray(rights), gammas
    lib.mapuot_anderson_weights(*rights.shape, *map(pointer, vectors))
    return gammas
