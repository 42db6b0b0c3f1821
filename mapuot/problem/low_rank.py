"""`LowRankReference`: a reference measure as a product of two thin factors, or by labels; no m x n matrix is stored."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import host
from ..penalties import F64
from ..synonyms import hinted
from .cost import Streamed, UserCost
from .labels import pair_of
from .validate import as_array, check_kind


def rows_of(U: F64, V: F64, i0: int, i1: int) -> F64:
    """Return the rows i0 to i1 of U V^T."""
    return np.asarray(U[i0:i1] @ V.T)


class LowRankRows(Streamed):
    """The `Cost` of U V^T, rows of which are multiplied when they are read."""

    def __init__(self, U: F64, V: F64) -> None:
        super().__init__(partial(rows_of, U, V), (len(U), len(V)), np.float64)
        self.factors = U, V

    def transpose(self) -> "LowRankRows":
        return LowRankRows(*self.factors[::-1])


class LowRankReference(UserCost):
    """Reference measure ``c = U V^T``, for the argument ``reference`` of `solve`; rows are made when they are read.

    An array M is read beside an array of c, which is then formed; beside points or a file no (m, n) matrix is stored.

    Parameters
    ----------
    U, V : (m, r), (n, r) arrays
        Factors, finite and >= 0; zeros of the product forbid pairs.

    Raises
    ------
    ValueError
        If the factors are no matrices with equally many columns, or an entry is below 0 or not finite.

    See Also
    --------
    solve, PointCloud, SeededMask

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((60, 2)), rng.random((50, 2))
    >>> kinds, others = np.arange(60) % 2, np.arange(50) % 3
    >>> prior = mapuot.LowRankReference.of_labels(kinds, others, [[1.0, 0.1, 0.0], [0.1, 1.0, 1.0]])
    >>> result = mapuot.solve(mapuot.PointCloud(x, y), reg=0.1, reg_m=1.0, reference=prior)
    >>> bool(result.plan[kinds == 0][:, others == 2].any())
    False
    """

    @hinted
    def __init__(self, U: ArrayLike, V: ArrayLike) -> None:
        factors = [as_factor(x, name) for x, name in ((U, "U"), (V, "V"))]
        if factors[0].shape[1] != factors[1].shape[1]:
            raise ValueError(f"V must have {factors[0].shape[1]} columns, as U has, got {factors[1].shape[1]}")
        super().__init__(LowRankRows(*factors))

    @classmethod
    def of_labels(cls, x: ArrayLike, y: ArrayLike, table: ArrayLike) -> "LowRankReference":
        """Make the reference ``c_ij = table[label of x_i, label of y_j]``, as a prior of transitions between types.

        Parameters
        ----------
        x, y : (m,), (n,) arrays
            Labels of any sortable type.
        table : (k, l) array
            One row for each label of x, one column for each label of y, both sorted; entries >= 0.

        Raises
        ------
        ValueError
            If the table has another shape, or a label is missing.
        """
        labels, _ = pair_of((host(x), host(y)), [np.size(x), np.size(y)])
        classes = [np.unique(z, return_inverse=True) for z in labels]
        weights = as_factor(table, "table")
        shape = tuple(len(names) for names, _ in classes)
        if weights.shape != shape:
            raise ValueError(f"table must have shape {shape}, a row and a column for each label, got {weights.shape}")
        return cls(weights[np.ravel(classes[0][1])], np.eye(shape[1])[np.ravel(classes[1][1])])


def as_factor(value: Any, name: str) -> F64:
    factor = as_array(value, name, lambda x: np.asarray(host(x)))
    check_kind(factor, name)
    factor = factor.astype(np.float64)
    if factor.ndim != 2 or 0 in factor.shape:
        raise ValueError(f"{name} must be a non-empty matrix, got shape {factor.shape}")
    if not (np.isfinite(factor) & (factor >= 0)).all():
        raise ValueError(f"{name} must be finite and >= 0")
    return np.asarray(factor)
