"""The distances within one space, as points or as a matrix, with the products that a Gromov-Wasserstein step needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..penalties import F64
from ..problem import validate
from ..problem.points import as_points
from ..problem.sparse import is_sparse
from ..problem.symmetry import as_symmetric
from ..problem.validate import check_kind

KINDS = ("sqeuclidean", "precomputed")
TINY, HUGE = 1e-150, 1e150  # bounds on distances; their squares, and sums of these, are within float64


class Space:
    """The distances X (m, m) within one space, as points or as a matrix.

    Points have X = phi J phi^T: phi has the rows (|x|^2, 1, x), and J maps (q, 1, x) to (1, q, -2 x). A step then needs
    only the moments phi^T P of a plan P ("folded"). With a matrix, a step needs P itself.
    """

    phi: Any = None  # (m, d + 2) for points, None for a matrix
    matrix: Any = None

    def __init__(self, given: Any, kind: str, name: str) -> None:
        if kind == "sqeuclidean":
            points = np.asarray(as_points(given, name), np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                x = points - points.mean(0)
                self.phi = np.column_stack([(x**2).sum(1), np.ones(len(x)), x])
            self.count = len(x)
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

    def restrict(self, chosen: Any) -> Space:
        """Return the space of the chosen points; their coordinates are not centred again."""
        one = object.__new__(Space)
        one.count = len(chosen)
        if self.matrix is None:
            one.phi = self.phi[chosen]
        else:
            one.matrix = self.matrix[chosen][:, chosen]
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
                squares = self.matrix.multiply(self.matrix)
            else:
                squares = self.matrix**2
            return np.asarray(squares @ w)
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
        """Return X Z for a matrix; for points J Z, with Z folded, so that the caller multiplies by phi."""
        if self.phi is None:
            return self.matrix @ Z
        return np.concatenate([Z[1:2], Z[:1], -2 * Z[2:]])

    def slope(self, other: Space, A: F64) -> F64:
        """Return sum_k D_ik (x_i - x_k) for every point i, where D = A J A^T with the J of ``other``."""
        W = other.times(A.T).T
        x = self.phi[:, 2:]
        return np.asarray(x * (W @ A.sum(0))[:, None] - W @ (A.T @ x))


def check_powers(distances: Any, what: str, unit: str) -> None:
    """Raise ValueError if the squares of distances, which enter the costs, overflow or underflow float64."""
    most = float(np.abs(distances).max(initial=0.0))
    if most == 0 or TINY < most < HUGE:
        return
    raise ValueError(f"{what} have squares within float64, got up to {most:.3g}: rescale them; reg goes with {unit}")
