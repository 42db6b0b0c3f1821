"""The distances within one space, as points, coordinates or a matrix, with the products that a step needs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ..errors import shown
from ..penalties import F64
from ..problem import validate
from ..problem.points import as_points
from ..problem.sparse import is_sparse
from ..problem.symmetry import as_symmetric
from ..problem.validate import check_kind
from .embedding import SAMPLED, GraphDistances, PointDistances, centred, factor
from .settings import SPACES

KINDS = ("sqeuclidean", "euclidean", "geodesic", "precomputed")
TINY, HUGE = 1e-150, 1e150  # bounds on distances; their squares, and sums of these, are within float64
MISFIT_ROUNDING = 2.0**-46  # relative rounding of the terms of a misfit
ONES = 1  # the column of phi that is 1 in every row


class Space:
    """The distances X (m, m) within one space, as points or as a matrix.

    Points have X = phi J phi^T: phi has the rows (|x|^2, 1, x), and J maps (q, 1, x) to (1, q, -2 x). A step then needs
    only the moments phi^T P of a plan P ("folded"). With a matrix, a step needs P itself. After `embed`, phi has the
    rows (q, 1, L) of embedding.py, and X is approximate; ``distances`` has the true ones.
    """

    phi: Any = None  # (m, d + 2) for points, None for a matrix
    matrix: Any = None
    distances: Any = None  # the true ones, if phi has coordinates of `factor`
    has_points = False  # whether phi has the user's points
    points: Any = None  # these, of a whole space
    axes: Any = None  # rows: directions in which `find_axes` turns the coordinates, of the space that it was called for

    def __init__(self, given: Any, kind: str, name: str, power: float = 1.0, backend: str = "auto") -> None:
        if kind in ("euclidean", "geodesic"):
            if kind == "euclidean":
                self.distances = PointDistances(given, name, power, backend)
            else:
                self.distances = GraphDistances(given, name, power)
            self.count = self.distances.count
            check_powers(self.distances.column(0), f"{name} must have points whose distances", "a square of a distance")
            return
        if kind == "sqeuclidean":
            self.has_points = True
            self.points = np.asarray(as_points(given, name), np.float64)
            self.count = len(self.points)
            self.centre(np.ones(self.count))
            check_powers(self.phi[:, 0], f"{name} must have points whose distances", "the fourth power of a length")
            return
        if is_sparse(given):
            A = given
        else:
            A = validate.as_array(given, name)
        check_kind(A, name)
        if A.ndim != 2 or A.shape[0] != A.shape[1] or 0 in A.shape:
            raise ValueError(f"{name} must be a square matrix of distances for metric 'precomputed', got {A.shape}")
        if is_sparse(A):
            A = A.tocsr()
        self.matrix = as_symmetric(A, name, " for metric 'precomputed'")
        self.count = A.shape[0]
        if is_sparse(A):
            distances = self.matrix.data
        else:
            distances = self.matrix
        check_powers(distances, f"{name} must have distances that", "a square")

    def centre(self, w: F64) -> None:
        """Compute the coordinates of points from their mean by the masses w, see `centred`."""
        if self.has_points:
            x = centred(self.points, w)
            with np.errstate(over="ignore"):
                self.phi = np.column_stack([(x**2).sum(1), np.ones(len(x)), x])
        elif self.is_bounded:
            self.distances.centre(w)

    def form(self) -> None:
        """Form the matrix of the distances, and keep nothing else."""
        if self.distances is not None:
            self.matrix = self.distances.matrix()
        elif self.phi is not None:
            self.matrix = np.maximum(self.rows(0, self.count), 0.0)
        elif is_sparse(self.matrix):
            self.matrix = self.matrix.toarray()
        self.distances = self.phi = None
        self.has_points = False

    def embed(self, w: F64, landmarks: int) -> None:
        """Find coordinates, given the masses w of the points; axes of others do not fit them."""
        self.axes = None
        q, L = factor(self.distances, w, landmarks)
        middle = w @ L / w.sum()
        self.phi = np.column_stack([q - 2 * L @ middle + middle @ middle, np.ones(self.count), L - middle])

    def find_axes(self, w: F64) -> None:
        """Find the principal axes of the coordinates by the masses w, each in its direction of positive third moments.

        Parts of this space keep these axes: those of few points would be rough.
        """
        if self.axes is not None or self.phi is None:
            return
        x = self.phi[:, 2:]
        x = x - w @ x / w.sum()
        axes = np.linalg.eigh(x.T @ (x * w[:, None]))[1].T[::-1]
        third = w @ (x @ axes.T) ** 3
        self.axes = axes * np.where(third < 0, -1.0, 1.0)[:, None]

    def finer(self, w: F64, times: int) -> Space:
        """Return the space with ``times`` as many landmarks, if they approximate distances within a bound."""
        if not self.is_bounded:
            return self
        found = copy.copy(self)
        found.embed(w, times * (self.phi.shape[1] - 1))
        return found

    @property
    def is_bounded(self) -> bool:
        """Whether phi approximates distances of negative type, and products with these are at hand."""
        return isinstance(self.distances, PointDistances)

    def misfit(self, w: F64) -> tuple[float, float]:
        """Return sum_ik w_i w_k (X_ik - D_ik)^2 and sum_ik w_i w_k D_ik^2 for the true D; from some rows of geodesics.

        The first sum is rounded up.
        """
        if self.distances is None:
            return 0.0, float(w @ self.square_means(w))
        if not self.is_bounded:
            chosen = np.random.default_rng(0).choice(self.count, SAMPLED, p=w / w.sum())
            true = self.distances.columns(chosen)
            X = self.phi[chosen] @ self.times(self.phi.T)
            means = [float(w.sum() * (z**2 @ w).mean()) for z in (X - true, true)]
            return means[0], means[1]
        products = self.distances.times(w[:, None] * self.phi)
        cross = float(w @ (self.times(self.phi.T).T * products).sum(1))
        own = float(w @ self.square_means(w))
        true = float(w @ self.distances.square_means(w))
        return max(0.0, own - 2 * cross + true) + MISFIT_ROUNDING * (own + 2 * abs(cross) + true), true

    def restrict(self, chosen: Any) -> Space:
        """Return the space of the chosen points; their coordinates are not computed again."""
        one = object.__new__(Space)
        one.count = len(chosen)
        one.has_points = self.has_points
        if self.matrix is None:
            one.phi = self.phi[chosen]
            one.axes = self.axes
        else:
            one.matrix = self.matrix[chosen][:, chosen]
        if self.is_bounded:
            one.distances = self.distances.restrict(chosen)
        return one

    def rows(self, i0: int, i1: int) -> F64:
        """Return the distances of the points i0 to i1 to all points."""
        if self.matrix is None:
            return np.asarray(self.times(self.phi[i0:i1].T).T @ self.phi.T)
        part = self.matrix[i0:i1]
        return np.asarray(part.toarray() if is_sparse(part) else part)

    def square_means(self, w: F64) -> F64:
        """Return sum_k X_ik^2 w_k for every i."""
        if self.matrix is not None:
            if is_sparse(self.matrix):
                return np.asarray(self.matrix.multiply(self.matrix) @ w)
            return np.asarray(np.einsum("ij,ij,j->i", self.matrix, self.matrix, w))
        q = self.phi[:, 0]
        x = self.phi[:, 2:]
        second = x.T @ (x * w[:, None])
        first = w @ x
        third = (w * q) @ x
        rest = w @ q**2 + 2 * q * (w @ q) - 4 * q * (x @ first) - 4 * (x @ third)
        return np.asarray(q**2 * w.sum() + rest + 4 * ((x @ second) * x).sum(1))

    def typical_sizes(self) -> F64:
        """Return the root mean square of each coordinate, 1 where all points have 0; (1,) ones for a matrix."""
        if self.phi is None:
            return np.ones(1)
        sizes = np.sqrt((self.phi**2).mean(0))
        return np.where(sizes > 0, sizes, 1.0)

    def times(self, Z: Any) -> Any:
        """Return X Z for a matrix; for points J Z, which the caller multiplies by phi: X = phi J phi^T."""
        if self.phi is None:
            return self.matrix @ Z
        return np.concatenate([Z[1:2], Z[:1], -2 * Z[2:]])

    def slope(self, other: Space, A: F64) -> F64:
        """Return sum_k D_ik (x_i - x_k) for every point i, where D = A J A^T with the J of ``other``."""
        W = other.times(A.T).T
        x = self.phi[:, 2:]
        return np.asarray(x * (W @ A.sum(0))[:, None] - W @ (A.T @ x))


def spaces_of(given: Any, metric: Any, power: Any, backend: str) -> list[Space]:
    """Check a metric, or a pair of them, and its power, and return both spaces."""
    kinds = metric if isinstance(metric, tuple) else (metric, metric)
    if len(kinds) != 2:
        raise ValueError(f"metric must be one of {[*KINDS]} or a pair of them, got {shown(metric)}")
    return [space_of(x, kind, power, name, backend) for x, kind, name in zip(given, kinds, "XY", strict=True)]


def space_of(given: Any, metric: Any, power: Any, name: str, backend: str = "auto") -> Space:
    """Check a metric and its power, and return the space of points, distances or a graph."""
    kind = validate.as_choice(metric, "metric", KINDS)
    power = validate.as_positive(power, "power")
    if power > 2:
        raise ValueError(f"power must be in (0, 2], got {shown(power)}")
    return Space(given, kind, name, power, backend)


def prepare(spaces: list[Space], masses: tuple[F64, F64], landmarks: int) -> None:
    """Centre points, and form the matrices of true distances; for more points find coordinates."""
    unformed = [space.count for space in spaces if space.distances is not None]
    embeds = max(unformed, default=0) > SPACES.formed_points and all(space.matrix is None for space in spaces)
    for space, w in zip(spaces, masses, strict=True):
        space.centre(w)
        if space.distances is None:
            continue
        if embeds:
            space.embed(w, landmarks)
        else:
            space.form()


def check_powers(distances: Any, what: str, unit: str) -> None:
    """Raise ValueError if the squares of distances, which enter the costs, overflow or underflow float64."""
    most = float(np.abs(distances).max(initial=0.0))
    if most == 0 or TINY < most < HUGE:
        return
    raise ValueError(f"{what} have squares within float64, got up to {most:.3g}: rescale them; reg goes with {unit}")
