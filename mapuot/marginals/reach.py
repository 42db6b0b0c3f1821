"""Reach of a graph of costs: the points that a plan can use, and the parts of a tree that no finite pair connects.

An edge has a mask of its finite pairs (`Dense`) or stored pairs (`Sparse`); an edge with finite pairs only needs no
mask. Parts are independent problems with a common objective, the sum. Each part has its own translation (state.py),
and in each part the balanced marginals must have equal masses.
"""

from typing import Any

import numpy as np

from ..errors import InfeasibleError
from ..problem.cost import Cost
from ..problem.parts import parts_of_mask
from ..problem.validate import MASS_TOLERANCE, name_points

Edges = dict[tuple[int, int], Any]


def reachable(edges: Edges, full: set[tuple[int, int]], used: list[Any]) -> list[Any]:
    """Find the points through which some plan can go; ``used``: points with mass, ``full``: edges without inf."""
    if len(edges) == len(used):
        return in_triangle({pair: np.isfinite(np.asarray(cost)) for pair, cost in edges.items()}, used)
    masks = {pair: None if pair in full else finite_pairs(cost) for pair, cost in edges.items()}
    changed = True
    used = [x.copy() for x in used]
    while changed:  # a point needs a partner along each of its edges; in a tree this is sufficient
        changed = False
        for (i, j), mask in masks.items():
            for k, near in ((i, partners(mask, used[j])), (j, partners(mask, used[i], True))):
                changed |= bool((used[k] & ~near).any())
                used[k] &= near
    return used


def finite_pairs(cost: Any) -> Any:
    """Return a mask of the finite pairs, or a CSR array with ones at the finite pairs."""
    if cost.operator == "pairs":
        return cost.with_data(np.isfinite(cost.data).astype(np.int8))
    return np.isfinite(np.asarray(cost))


def partners(mask: Any, used: Any, transposed: bool = False) -> Any:
    """Find the points that have a finite pair with a used point."""
    if mask is None:
        return used.any()
    if not isinstance(mask, np.ndarray):
        used = used.astype(np.int32)  # sums of int8 would overflow
    return ((mask.T if transposed else mask) @ used) > 0


def in_triangle(masks: Edges, used: list[Any]) -> list[Any]:
    """Find the points of a triangle that some plan can use: (i, j) is usable if some k has finite costs to both."""
    open_01, open_02, open_12 = (oriented(masks, *pair) for pair in ((0, 1), (0, 2), (1, 2)))
    pairs = open_01 & used[0][:, None] & used[1] & ((open_02 * used[2]).astype(float) @ open_12.T > 0)
    third = open_12 & used[2] & ((pairs.T.astype(float) @ open_02) > 0)
    return [pairs.any(1), pairs.any(0), third.any(0)]


def walk(edges: Any, root: int) -> list[tuple[int, int]]:
    """List (marginal, parent) for all marginals connected to the root, outwards; the root's parent is -1."""
    order = [(root, -1)]
    seen = {root}
    for k, _ in order:
        for other in [sum(pair) - k for pair in edges if k in pair]:
            if other not in seen:
                seen.add(other)
                order.append((other, k))
    return order


def path(edges: Any, i: int, j: int) -> list[int]:
    parent = dict(walk(edges, j))
    found = [i]
    while found[-1] != j:
        found.append(parent[found[-1]])
    return found


def oriented(edges: Any, i: int, j: int) -> Any:
    if (i, j) in edges:
        return edges[i, j]
    return edges[j, i].transpose()


def parts_of(edges: Edges, full: set[tuple[int, int]], sizes: list[int]) -> list[Any] | None:
    """Find the part of each point of each marginal of a tree; None if there is only one part.

    All points are reachable. Hence an edge without inf connects all points: its own directly, all others through them.
    """
    if full:
        return None
    from scipy import sparse  # noqa: PLC0415 - on first use
    from scipy.sparse import csgraph  # noqa: PLC0415

    start = np.cumsum([0, *sizes])
    point = []
    other = []
    count = int(start[-1])
    for (i, j), cost in edges.items():  # graph nodes: all points, and each part of an edge
        groups, rows, cols = parts_between(cost)
        point += [np.arange(start[i], start[i + 1]), np.arange(start[j], start[j + 1])]
        other += [count + rows, count + cols]
        count += groups
    ends = np.concatenate(point), np.concatenate(other)
    graph = sparse.coo_array((np.ones(len(ends[0]), np.int8), ends), shape=(count, count))
    _, label = csgraph.connected_components(graph.tocsr(), directed=False)
    _, label = np.unique(label[: start[-1]], return_inverse=True)
    if label.max():
        return np.split(label, start[1:-1])
    return None


def parts_between(cost: Cost) -> tuple[int, Any, Any]:
    """Return (number of parts, parts of the rows, parts of the columns) of a cost; all its points have partners."""
    m, n = cost.shape
    if cost.operator == "pairs":
        parts = cost.parts_between(np.zeros(m, bool), np.zeros(n, bool))
    else:
        parts = parts_of_mask(np.isfinite(np.asarray(cost)))
    return parts.count, parts.rows, parts.cols


def check_parts(marginals: list[Any], edges: Edges, full: set[tuple[int, int]]) -> None:
    """Raise `InfeasibleError` where the masses of hard marginals differ in a part of a group of edges."""
    sizes = [len(x.kept) for x in marginals]
    for group in groups_of(edges, {k for k, x in enumerate(marginals) if x.hard}):
        hard = sorted(k for k in {k for pair in group for k in pair} if marginals[k].hard)
        labels = None
        if len(hard) > 1:
            labels = parts_of({pair: edges[pair] for pair in group}, full & {*group}, sizes)
        if labels:
            compare_masses([marginals[k] for k in hard], [labels[k] for k in hard])


def groups_of(edges: Edges, hard: set[int]) -> list[list[tuple[int, int]]]:
    """Return the edges in groups that share marginals of free mass; the hard marginals must agree in each group.

    A hard marginal has its masses in all its edges. Hence edges that only it joins have plans independently.
    """
    groups: list[list[tuple[int, int]]] = []
    for pair in edges:
        ends = {*pair} - hard
        near = [group for group in groups if any(ends & {*other} for other in group)]
        groups = [group for group in groups if group not in near] + [[pair, *(other for x in near for other in x)]]
    return groups


def compare_masses(marginals: list[Any], labels: list[Any]) -> None:
    """Raise `InfeasibleError` where a marginal has another mass than the first in a part; ``labels``: their parts."""
    count = 1 + max(int(x.max()) for x in labels)
    masses = [np.bincount(label, x.weight, count) for label, x in zip(labels, marginals, strict=True)]
    for k, mass in enumerate(masses):
        wrong = np.abs(mass - masses[0]) > MASS_TOLERANCE * np.maximum(mass, masses[0])
        if wrong.any():
            part = int(np.argmax(wrong))
            inside = {m: marginals[m].to_all_points(labels[m] == part, 0.0) > 0 for m in (0, k)}
            one, two = (name_points(marginals[m].name, inside[m]) for m in (0, k))
            amounts = f"{masses[0][part]:.6g} and {mass[part]:.6g} must be transported"
            raise InfeasibleError(f"costs connect {one} with {two} only, where {amounts}")
