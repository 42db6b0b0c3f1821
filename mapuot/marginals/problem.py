"""Validated problems of many marginals: the graph or the array of costs, masses, reg and reg_m.

A point without mass, or without a partner at finite cost, has no mass in any plan. This module removes these points, so
that all other modules see positive masses and at least one finite cost for each point. A free marginal (mass None) has
ones in the reference measure and no penalty.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import is_on_device
from ..backends import load, pick
from ..backends.kernel import NARROW_ENTRY, LogKernel, largest_of
from ..cached import cached_property
from ..errors import InfeasibleError, shown
from ..penalties import F64
from ..problem.cost import Cost, Dense, cost_of
from ..problem.sparse import Sparse, is_sparse
from ..problem.validate import EVEN, MASS_TOLERANCE, as_float, as_positive, as_real, as_weight, bad_costs, check_kind
from ..processor import free_memory
from .reach import Edges, check_parts, parts_of, path, reachable, walk
from .settings import TREES
from .slabs import Slabs, as_held

KERNEL_SHARE = 0.8  # share of free memory that kernels may take
LEAST_TOL_GAP = 1e-5  # least tol_gap for kernels in float32, since the gap includes their rounding


@dataclass(frozen=True)
class Marginal:
    """The points of one marginal that can hold mass."""

    name: str  # for error messages
    size: int  # number of given points
    kept: Any  # indices of the kept points
    unreached: Any  # indices of points with mass that are removed
    log_weight: F64  # log masses of the kept points; 0 for a free marginal
    rho: float  # reg_m; inf is hard, 0 free

    @property
    def free(self) -> bool:
        return self.rho == 0

    @property
    def hard(self) -> bool:
        return self.rho == math.inf

    @cached_property
    def weight(self) -> F64:
        return np.exp(self.log_weight)

    def to_all_points(self, values: F64, fill: float) -> F64:
        """Extend values of the kept points to all points, with ``fill`` at the others."""
        out = np.full(self.size, fill)
        out[self.kept] = values
        return out


@dataclass(frozen=True)
class MultiProblem:
    """Costs cut to the kept points: ``edges`` of a graph, or an ``array`` with one axis a marginal."""

    marginals: list[Marginal]
    edges: Edges
    array: Any
    reg: float
    constant: float  # penalty of unreached points: reg_m times their mass
    reference_mass: float  # mass of R over all points
    sizes: dict[Any, float]  # the largest finite |cost| of each edge, or of the array ("all")
    lows: dict[Any, float]  # the least cost of each
    cost_error: float  # bound on the rounding of costs between points, summed over the edges
    labels: list[Any] | None = None  # the part of each point, if finite pairs do not connect all points (reach.py)
    storage: str = "float64"  # type of stored kernels, or "made": rows are computed in each pass
    xp: Any = np  # numpy or CuPy: the module of the kernels
    threads: int | None = None

    @property
    def pairs_only(self) -> bool:
        return bool(self.edges) and all(x.operator == "pairs" for x in self.edges.values())

    @property
    def narrow(self) -> bool:
        """Whether the first passes may sum in float32; never for stored pairs or on a GPU."""
        return self.storage == "float32" and self.xp is np and not self.pairs_only

    @cached_property
    def parts(self) -> int:
        if self.labels is None:
            return 1
        return 1 + max(int(x.max()) for x in self.labels)

    @cached_property
    def log_sizes(self) -> float:
        return sum(largest_of(x.log_weight) for x in self.marginals)

    # ---- the points of all marginals, concatenated

    @cached_property
    def starts(self) -> Any:
        """Offsets of each marginal's points in vectors of all points."""
        return np.cumsum((0, *self.shape[:-1]))

    @cached_property
    def places(self) -> dict[int, slice]:
        return {k: slice(i, i + n) for k, (i, n) in enumerate(zip(self.starts.tolist(), self.shape, strict=True))}

    @cached_property
    def log_weight(self) -> F64:
        return np.concatenate([x.log_weight for x in self.marginals])

    @cached_property
    def weight(self) -> F64:
        return np.concatenate([x.weight for x in self.marginals])

    @cached_property
    def rho(self) -> F64:
        """Penalty of each marginal: 0 where it is free, inf where it is hard."""
        return np.array([x.rho for x in self.marginals])

    @cached_property
    def fi(self) -> list[float]:
        """rho / (rho + reg) of each marginal: 0 where it is free, 1 where hard."""
        return [1.0 if x.hard else x.rho / (x.rho + self.reg) for x in self.marginals]

    def prox(self, k: int, log_s: F64) -> F64:
        """Return log u = -fi log s of a marginal."""
        if self.fi[k]:
            return -self.fi[k] * log_s
        return np.zeros_like(log_s)

    @cached_property
    def soft(self) -> list[int]:
        """Indices of the marginals that are neither free nor hard."""
        return [k for k, x in enumerate(self.marginals) if not (x.free or x.hard)]

    @cached_property
    def hard(self) -> list[int]:
        return [k for k, x in enumerate(self.marginals) if x.hard]

    @cached_property
    def root(self) -> int:
        """The root of a tree of least height; a hard marginal, if there is one, since the plan meets the root."""

        def height(root: int) -> int:
            far: dict[int, int] = {-1: -1}
            for k, parent in walk(self.edges, root):
                far[k] = far[parent] + 1
            return max(far.values())

        return min(self.hard or range(len(self.marginals)), key=height)

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """Marginals of a tree and their parents, from the root outwards."""
        return walk(self.edges, self.root)

    @property
    def inner(self) -> list[tuple[int, int]]:
        """(marginal, parent) of a tree for all but the root, children before parents; empty for other costs."""
        if self.kind == "tree":
            return self.order[:0:-1]
        return []

    @cached_property
    def points(self) -> Any:
        """Sums over points, and over messages of a tree's edges, on the device of the vectors."""
        if self.kind == "tree" and self.xp is not np:
            engine = "cuda"
        else:
            engine = "cpu"
        found = load(engine).marginal_points(self.shape, self.log_weight, self.weight, self.rho, self.reg, self.inner)
        if self.labels is not None:
            marginal = np.repeat(np.arange(len(self.shape)), self.shape)
            found.set_parts(self.parts, marginal * self.parts + np.concatenate(self.labels))
        return found

    def kernel(self, cost: Cost, pair: Any) -> LogKernel:
        """Allocate the kernel of the cost of two neighbours (rows, columns), or of the array ("all")."""
        pair = pair if pair in self.sizes else pair[::-1]
        ends = self.lows[pair], self.sizes[pair]
        if self.xp is np:
            engine, threads = "cpu", self.threads
        else:
            engine, threads = "cuda", None
        operator = load(engine).operator_of(cost, self.reg, threads=threads)
        return LogKernel(operator, ends, self.storage)

    def stored_for(self, tol: float, tol_gap: float) -> "MultiProblem":
        """Choose float32 for large kernels if its rounding, summed over all costs, is well below tol.

        If the kernels still do not fit into memory, compute their rows in each pass. Kernels of stored pairs and
        kernels on a GPU are always stored.
        """
        if self.kind == "triangle":
            return self
        room = 1.5 * NARROW_ENTRY * max(1, len(self.edges)) <= tol and (tol_gap < 0 or tol_gap >= LEAST_TOL_GAP)
        if room and self.size > TREES.small_entries:
            storage = "float32"
        else:
            storage = "float64"
        needed = self.size * (4 if storage == "float32" else 8)
        made = self.xp is np and needed > KERNEL_SHARE * free_memory()
        return replace(self, storage="made" if made else storage)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(x.kept) for x in self.marginals)

    @cached_property
    def largest(self) -> float:
        return sum(self.sizes.values())

    M_min = 0.0

    @property
    def M_max(self) -> float:  # noqa: N802 - the largest M
        if self.array is not None:
            return self.largest
        return max(sum(x for pair, x in self.sizes.items() if k in pair) for k in range(len(self.marginals)))

    balanced = False  # larger regs end at the looser STAGES.coarse_tol

    @property
    def extent(self) -> float:
        return self.M_max

    @property
    def size(self) -> int:
        return sum(x.size for x in self.edges.values()) or math.prod(self.shape)

    @property
    def reads(self) -> str:
        """The form of the kernels, in the words of `MultiResult.how`."""
        if self.storage == "made":
            return "rows made from the costs"
        return f"{self.storage} {'products' if self.kind == 'triangle' else 'pairs' if self.pairs_only else 'tiles'}"

    @cached_property
    def kind(self) -> str:
        if self.array is not None:
            return "array"
        if len(self.edges) == len(self.marginals):
            return "triangle"
        return "tree"

    @classmethod
    def from_arguments(cls, costs: Any, masses: Any, reg: Any, reg_m: Any, xp: Any = np) -> "MultiProblem":
        reg = as_positive(reg, "reg")
        masses = as_masses(masses)
        rho = as_penalties(reg_m, masses)
        if isinstance(costs, dict):
            edges = as_edges(costs, len(masses), xp)
            array = None
            shape = sizes_of(edges, masses)
        else:
            edges = {}
            array = Slabs.of(costs, masses, xp)
            shape = list(array.shape)
        weights = even_hard([weight_of(k, n, x) for k, (n, x) in enumerate(zip(shape, masses, strict=True))], rho)
        ranges: dict[Any, tuple[float, float, bool]] = {
            (i, j): range_of(x, f"costs[{i}, {j}]") for (i, j), x in edges.items()
        }
        if array is not None:
            ranges["all"] = range_of(array.matrix(0), "costs")
        sizes, lows = ({pair: x[k] for pair, x in ranges.items()} for k in (0, 1))
        largest = max(sizes.values())
        if not math.isfinite(largest / reg):
            raise ValueError(f"reg must not be so small that costs / reg overflows, got {reg} for costs of {largest}")
        reference_mass = math.prod(float(w.sum()) for w in weights)
        if not 0 < reference_mass < math.inf:
            raise ValueError("masses must have a product that is positive and finite: rescale them")
        used = [w > 0 for w in weights]
        full = {pair for pair, (_, _, is_full) in ranges.items() if is_full}
        if len(full) < len(ranges):
            if array is None:
                used = reachable(edges, full, used)
            else:
                used = array.reachable(used)
        marginals, constant = as_marginals(weights, used, rho)
        if array is not None:
            array = array.cut([x.kept for x in marginals])
        cost_error = sum(x.error(sizes[pair]) for pair, x in edges.items() if x.operator == "points")
        edges = {(i, j): cut(C, [marginals[i].kept, marginals[j].kept]) for (i, j), C in edges.items()}
        labels = None
        if 0 < len(edges) < len(marginals):
            labels = parts_of(edges, full, [len(x.kept) for x in marginals])
        check_parts(marginals, edges, full)
        return cls(marginals, edges, array, reg, constant, reference_mass, sizes, lows, cost_error, labels, xp=xp)


def weight_of(k: int, count: int, mass: Any) -> F64:
    """Check the mass of marginal k; ones for a free marginal."""
    if mass is None:
        return np.ones(count)
    return as_weight(mass, count, f"masses[{k}]", pick("cuda" if is_on_device(mass) else "cpu"))


def as_marginals(weights: list[F64], used: list[Any], rho: list[float]) -> tuple[list[Marginal], float]:
    """Make the marginals from their ``used`` points; return also the price of the mass of all other points."""
    marginals = []
    constant = 0.0
    for k, (w, keep) in enumerate(zip(weights, used, strict=True)):
        lost = (w > 0) & ~keep
        if not keep.any():
            raise InfeasibleError(f"costs forbid every point of masses[{k}]")
        if lost.any():
            if rho[k] == math.inf:
                text = f"costs forbid every pair of masses[{k}][{int(np.argmax(lost))}], which must be transported"
                raise InfeasibleError(text)
            constant += rho[k] * float(w[lost].sum())
        kept = np.flatnonzero(keep)
        marginals.append(Marginal(f"masses[{k}]", len(w), kept, np.flatnonzero(lost), np.log(w[kept]), rho[k]))
    return marginals, constant


def as_masses(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
        raise TypeError(f"masses must be a list of arrays, None where a marginal is free, got {shown(value)}")
    masses = [*value]
    if len(masses) < 2:
        raise ValueError(f"masses must hold at least two marginals, got {len(masses)}")
    if all(x is None for x in masses):
        raise ValueError("masses must not all be None: at least one marginal is given")
    return masses


def as_penalties(reg_m: Any, masses: list[Any]) -> list[float]:
    """Return rho of each marginal; 0 for a free marginal, whatever reg_m is given."""
    count = len(masses)
    listed = isinstance(reg_m, (list, tuple)) or np.ndim(reg_m) > 0
    if listed:
        values = list(reg_m)
    else:
        values = [reg_m] * count
    if len(values) != count:
        raise ValueError(f"reg_m must be a number or one for each of {count} marginals, got {len(values)}")
    rho = []
    for k, (value, mass) in enumerate(zip(values, masses, strict=True)):
        if mass is None:
            rho.append(0.0)
            continue
        number = as_float(value, f"reg_m[{k}]", "a positive number or inf")
        if not number > 0:
            raise ValueError(f"reg_m[{k}] must be > 0 (inf = balanced), got {number}")
        rho.append(number)
    return rho


def even_hard(weights: list[F64], rho: list[float]) -> list[F64]:
    """Scale all balanced marginals to the mass of the first; raise if masses differ by more than rounding."""
    hard = {k: float(w.sum()) for k, (w, x) in enumerate(zip(weights, rho, strict=True)) if x == math.inf}
    if hard and max(hard.values()) - min(hard.values()) > MASS_TOLERANCE * max(hard.values()):
        raise InfeasibleError(f"masses must be equal where reg_m is inf, got {hard}: divide by their sums")
    wanted = next(iter(hard.values()), 1.0)
    factors = [wanted / hard[k] if k in hard and abs(wanted / hard[k] - 1) > EVEN else 1.0 for k in range(len(weights))]
    return [w if factor == 1 else w * factor for w, factor in zip(weights, factors, strict=True)]


def as_edges(costs: dict[Any, Any], count: int, xp: Any) -> Edges:
    """Return {(i, j): cost} of a tree, or of the triangle of three marginals."""
    edges: Edges = {}
    for key, value in costs.items():
        pair = key if isinstance(key, tuple) else ()
        if len(pair) != 2 or not all(isinstance(k, (int, np.integer)) and 0 <= k < count for k in pair):
            raise ValueError(f"costs must have pairs of marginals, 0 to {count - 1}, as keys, got {shown(key)}")
        i = int(pair[0])
        j = int(pair[1])
        if i == j or (i, j) in edges or (j, i) in edges:
            raise ValueError(f"costs must hold one matrix for two different marginals, got {shown(key)} again or twice")
        edges[i, j] = as_edge(value, f"costs[{i}, {j}]", xp)
    parent = dict(walk(edges, 0))
    if len(parent) < count:
        apart = [k for k in range(count) if k not in parent]
        raise ValueError(f"costs must connect all marginals, but none leads from 0 to {apart}")
    if len(edges) >= count and not count == len(edges) == 3:
        i, j = next((i, j) for i, j in edges if parent[i] != j and parent[j] != i)
        cycle = " - ".join(map(str, [*path([pair for pair in edges if pair != (i, j)], i, j), i]))
        raise ValueError(
            f"costs must be a tree or the triangle of three marginals, got the cycle {cycle}: leave one of its costs "
            "out, or add them up in one array"
        )
    stored = [pair for pair, x in edges.items() if x.operator == "pairs"]
    if stored and len(edges) == count:  # products of two kernels are full, as large as a dense kernel
        i, j = stored[0]
        m, n = edges[stored[0]].shape
        raise TypeError(
            f"costs[{i}, {j}] must be dense in a triangle, got a sparse matrix: fill in inf for what it does not "
            f"store, which takes {8 * m * n / 2**30:.3g} GiB, or leave out one of the three costs"
        )
    return edges


def as_edge(value: Any, name: str, xp: Any) -> Cost:
    given: Any = cost_of(value)
    if is_sparse(value):
        given = Sparse.of_matrix(value, name)
    elif getattr(given, "operator", "") != "points":
        given = as_held(value, name, xp)
        check_kind(given, name, "fiu")
    if len(given.shape) != 2 or 0 in given.shape:
        raise ValueError(f"{name} must be a non-empty matrix, got shape {given.shape}")
    if isinstance(given, Cost):
        return given
    return Dense(as_real(given))


def matrices_of(costs: Any, masses: Any, xp: Any) -> list[Cost]:
    """Return the pairwise costs as matrices, or the array of all marginals as one matrix."""
    masses = as_masses(masses)
    if isinstance(costs, dict):
        return [*as_edges(costs, len(masses), xp).values()]
    return [Slabs.of(costs, masses, xp).matrix(0)]


def range_of(cost: Cost, name: str) -> tuple[float, float, bool]:
    """Return (the largest finite |cost|, the least cost, whether all are finite)."""
    low, high, bad, infinite = cost.range(pick("auto", cost.array))
    if bad:
        raise ValueError(bad_costs(cost, name, bad))
    return max(abs(low), abs(high)), low, not infinite


def sizes_of(edges: Edges, masses: list[Any]) -> list[int]:
    """Return the number of points of each marginal; raise if its costs disagree."""
    sizes: dict[int, int] = {}
    for (i, j), cost in edges.items():
        for k, n in zip((i, j), cost.shape, strict=True):
            if sizes.setdefault(k, n) != n:
                raise ValueError(
                    f"costs must agree in the points of marginal {k}, got {sizes[k]} and {n} in ({i}, {j})"
                )
    return [sizes[k] for k in range(len(masses))]


def cut(cost: Cost, kept: list[Any]) -> Cost:
    """Return the cost of the kept points; the same object if all points are kept."""
    if tuple(map(len, kept)) == tuple(cost.shape):
        return cost
    if cost.operator == "points":
        found: Cost = cost.cloud[kept[0]].transpose()[kept[1]].transpose()
        return found
    if cost.operator == "pairs":
        return Sparse.of_matrix(cost.pairs.matrix()[kept[0]][:, kept[1]])
    return Dense(np.asarray(cost)[np.ix_(*kept)])
