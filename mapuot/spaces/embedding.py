"""Distances in few coordinates: `PointDistances` and `GraphDistances` yield columns, `factor` makes coordinates.

Let point 0 be a base, q_i = D_i0 and K_ij = (q_i + q_j - D_ij) / 2. If D is of negative type, K is positive
semidefinite (Schoenberg). |x - y|^p is of negative type for 0 < p <= 2. A Cholesky factorization with pivots that ends
after k columns gives K = L L^T + R, with R positive semidefinite. Hence

    A_ij = q_i + q_j - 2 <L_i, L_j> = D_ij + 2 R_ij.

The pivots are drawn with probabilities R_ii w_i, so that few outliers do not use them up. Geodesics need not be of
negative type: A then approximates D without a bound. Several pivots are drawn at a time, and a pivot i is kept with the
probability (R_ii now) / (R_ii when it was drawn): pivots are distributed as if drawn one by one, and a product of
matrices subtracts earlier columns of L from all candidates at once. Sources: Chen, Epperly, Tropp, Webber: Randomly
pivoted Cholesky, 2024; Epperly, Tropp, Webber: Embrace rejection, 2024.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import even_parts, host, namespace
from ..backends import pick
from ..contract import Backend
from ..errors import shown
from ..penalties import F64
from ..problem.points import PointCosts, as_points
from ..problem.symmetry import as_symmetric
from ..problem.validate import check_kind
from .settings import SPACES

LEAST_PIVOT = 1e-13  # of the largest distance: below it, pivots are rounding
BLOCK = 1 << 16  # distances of a tile: 512 KiB, which stay in a core's cache
DRAWN = 16  # pivots drawn at a time: 383 columns of 50,000 points in 30-D take 2.0 s, one by one 5.8 (EPYC, one core)
SAMPLED = 32  # columns that measure the error of geodesics


class PointDistances:
    """The distances |x_i - x_k|^power between points (m, d); products with them form one tile at a time."""

    def __init__(self, given: Any, name: str, power: float, backend: str) -> None:
        self.points = np.asarray(as_points(given, name), np.float64)
        self.count = len(self.points)
        self.power = power
        self.backend = backend
        self.centre(np.ones(self.count))

    def centre(self, w: F64) -> None:
        """Compute the coordinates from the mean by the masses w; points without mass are moved there.

        No term of the objective has distances of these, and products would round all others if these are far.
        """
        self.x = np.where((w > 0)[:, None], centred(self.points, w), 0.0)
        with np.errstate(over="ignore"):
            self.squares = (self.x**2).sum(1)

    def restrict(self, chosen: Any) -> PointDistances:
        """Return the distances between the chosen points."""
        one = copy.copy(self)
        one.points, one.x, one.squares = self.points[chosen], self.x[chosen], self.squares[chosen]
        one.count = len(chosen)
        return one

    def column(self, k: int) -> F64:
        distances: F64 = self.rows(k, k + 1)[0]
        return distances

    def matrix(self) -> F64:
        return self.rows(0, self.count)

    def rows(self, i0: int, i1: int) -> F64:
        """Return the distances from the points i0 to i1, by differences of coordinates: products round to 1e-8."""
        from scipy.spatial.distance import cdist  # noqa: PLC0415 - on first use

        return np.asarray(cdist(self.x[i0:i1], self.x) ** self.power)

    @property
    def maker(self) -> Backend:
        """The backend that makes distances; the oracle makes no costs of points."""
        return pick("cuda" if self.backend == "cuda" else "cpu")

    def tiles(self) -> Iterator[tuple[slice, slice, Any]]:
        """Yield (rows, columns, their distances) of square tiles on and above the diagonal, on the backend's device."""
        x = self.maker.to_memory(self.x)
        if namespace(x) is np:
            most = BLOCK
        else:
            most = SPACES.device_entries
        parts = even_parts(self.count, math.isqrt(most))
        for k, rows in enumerate(parts):
            for columns in parts[k:]:
                tile = self.maker.costs(PointCosts(x[rows], x[columns], "euclidean"))
                if self.power != 1:
                    tile **= self.power
                yield rows, columns, tile

    def times(self, Z: Any) -> Any:
        """Return D Z, where Z lies."""
        out: Any = None
        for rows, columns, tile in self.tiles():
            if out is None:
                there = namespace(tile).ascontiguousarray(namespace(tile).asarray(Z))
                out = namespace(tile).zeros(Z.shape)
            out[rows] += tile @ there[columns]
            if rows != columns:
                out[columns] += tile.T @ there[rows]
        if namespace(Z) is np:
            return host(out)
        return out

    def square_means(self, w: F64) -> F64:
        """Return sum_k D_ik^2 w_k for every i."""
        if self.power == 1:
            first = w @ self.x
            return np.asarray(self.squares * w.sum() + w @ self.squares - 2 * self.x @ first)
        out: Any = None
        for rows, columns, tile in self.tiles():
            if out is None:
                there = namespace(tile).asarray(w)
                out = namespace(tile).zeros(self.count)
            squares = tile**2
            out[rows] += squares @ there[columns]
            if rows != columns:
                out[columns] += squares.T @ there[rows]
        return np.asarray(host(out))


class GraphDistances:
    """The lengths of shortest paths along the edges of a graph, to a power; ``graph``: lengths of edges, symmetric."""

    def __init__(self, given: Any, name: str, power: float) -> None:
        from scipy import sparse  # noqa: PLC0415 - on first use

        graph = sparse.csr_array(given)
        check_kind(graph, name)
        if graph.shape[0] != graph.shape[1] or 0 in graph.shape:
            raise ValueError(f"{name} must be a square matrix of lengths of edges, got shape {graph.shape}")
        self.graph = as_symmetric(graph, name, " for metric 'geodesic'")
        if self.graph.nnz and self.graph.data.min() < 0:
            raise ValueError(f"{name} must have lengths of edges >= 0, got {shown(float(self.graph.data.min()))}")
        self.count = graph.shape[0]
        self.power = power
        self.name = name

    def columns(self, chosen: Any) -> F64:
        """Return the distances from the chosen nodes, (chosen, m)."""
        from scipy.sparse.csgraph import dijkstra  # noqa: PLC0415 - on first use

        found = np.asarray(dijkstra(self.graph, directed=False, indices=chosen), np.float64)
        if not np.isfinite(found).all():
            raise ValueError(f"{self.name} must be a connected graph: between some nodes there is no path")
        return found**self.power

    def column(self, k: int) -> F64:
        return np.asarray(self.columns([k])[0])

    def matrix(self) -> F64:
        found = self.columns(range(self.count))
        return np.minimum(found, found.T)  # paths of equal length may round differently


def centred(points: F64, w: F64) -> F64:
    """Return points less their mean by the masses w: products of coordinates lose the digits of a common part."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(points - w @ points / w.sum())


def factor(distances: Any, w: F64, landmarks: int) -> tuple[F64, F64]:
    """Return q (m,) and L (m, landmarks - 1) of the module's docstring; columns beyond the rank of K are 0."""
    rng = np.random.default_rng(0)
    q = distances.column(0)
    rest = q.copy()  # the diagonal of R
    rows = np.zeros((landmarks - 1, distances.count))  # of L^T
    least = LEAST_PIVOT * float(q.max())
    count = 0
    while count < landmarks - 1:
        drawn_rest = np.where(rest > least, rest, 0.0)
        chance = drawn_rest * w
        if not chance.any():
            break
        pivots = rng.choice(len(q), DRAWN, p=chance / chance.sum())
        first = count
        products = rows[:first, pivots].T @ rows[:first]
        for k, product in zip(pivots, products, strict=True):
            is_kept = rng.random() * drawn_rest[k] < rest[k] and rest[k] > least
            if not is_kept or count == landmarks - 1:
                continue
            column = 0.5 * (q + q[k] - distances.column(k)) - product - rows[first:count, k] @ rows[first:count]
            rows[count] = column / np.sqrt(rest[k])
            rest -= rows[count] ** 2
            count += 1
    return q, np.ascontiguousarray(rows.T)
