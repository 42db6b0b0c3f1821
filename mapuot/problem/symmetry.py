"""Check that matrices are symmetric up to rounding, and find the first entry that is not.

A distance matrix computed in float32, or by products of coordinates, differs from its transpose by rounding: the error
of D_ij^2 = |x_i|^2 + |x_j|^2 - 2 <x_i, x_j> is some eps max D^2, and the error of D_ij is this over D_ij. A difference
is more than rounding if

    |D_ij - D_ji| > SHARE (|D_ij| + |D_ji|)   and   |D_ij - D_ji| (|D_ij| + |D_ji|) > ROUNDINGS eps max D^2,

with the eps of the dtype. float64 numbers that float32 represents exactly count as float32.
"""

from typing import Any

import numpy as np

from .sparse import is_sparse

SHARE = 1e-5  # relative rounding of scaled float32 numbers, in either dtype
ROUNDINGS = 64  # ot.dist of 700 points in float32 differs by 1, torch.cdist of 80 by 2; a directed graph by 1e6


def epsilon(values: Any) -> float:
    """Return the rounding of the numbers of an array or a tensor."""
    name = str(values.dtype).rpartition(".")[2]
    if name == "float64" and isinstance(values, np.ndarray):
        with np.errstate(over="ignore", under="ignore"):
            if np.array_equal(values, values.astype(np.float32), equal_nan=True):
                name = "float32"
    if name not in ("float16", "float32"):
        name = "float64"
    return float(np.finfo(name).eps)


def differs(values: Any, turned: Any) -> Any:
    """Tell which entries of a matrix, or of each matrix of a batch, differ from the transpose by more than rounding.

    Equal infs count as equal; so does NaN with any number.
    """
    size = abs(values)
    finite = size[size < np.inf]
    if len(finite):
        most = float(finite.max())
    else:
        most = 0.0
    return far(abs(values - turned), size + abs(turned), most, values)


def far(apart: Any, size: Any, most: float, values: Any) -> Any:
    """Tell where |D_ij - D_ji| exceeds the rounding of ``values``, given |D_ij| + |D_ji| and max |D|."""
    apparent = (apart > SHARE * size) | (apart == np.inf)
    return apparent & (apart * (size / (most or 1.0)) > ROUNDINGS * epsilon(values) * most)


def as_symmetric(matrix: Any, name: str, where: str = "") -> Any:
    """Return a NumPy or SciPy matrix in float64; if it differs from its transpose by rounding, the mean of both.

    ``where`` follows "must be finite" and "must be symmetric" in the messages, which name the first wrong entry.
    """
    exact = matrix.astype(np.float64)
    entries = None
    numbers = exact
    if is_sparse(exact):
        entries = exact.tocoo()
        numbers = entries.data
    if not np.isfinite(numbers).all():
        i, j = place_of(~np.isfinite(numbers), entries)
        if np.isnan(exact[i, j]):
            cure = ""
            value = "NaN"
        else:
            cure = ": give points that nothing connects a large distance"
            value = str(exact[i, j])
        raise ValueError(f"{name} must be finite{where}, got {value} at [{i}, {j}]{cure}")
    if entries is None:
        if (exact == exact.T).all():
            return exact
        wrong = differs(matrix, matrix.T)
    else:
        entries = abs(exact - exact.T).tocoo()
        size = (abs(exact) + abs(exact.T)).tocsr()[entries.row, entries.col]
        wrong = far(entries.data, np.ravel(size), float(abs(exact).max()), matrix.data)
    if wrong.any():
        i, j = place_of(wrong, entries)
        raise ValueError(
            f"{name} must be symmetric{where}, got {exact[i, j]} at [{i}, {j}] and {exact[j, i]} at [{j}, {i}]: "
            f"pass ({name} + {name}.T) / 2"
        )
    return 0.5 * exact + 0.5 * exact.T


def place_of(wrong: Any, entries: Any) -> tuple[int, int]:
    """Return the row and the column of the first wrong entry, of a matrix or of these entries of a sparse one."""
    first = int(np.argmax(wrong))
    if entries is None:
        i, j = np.unravel_index(first, wrong.shape)
    else:
        i = entries.row[first]
        j = entries.col[first]
    return int(i), int(j)
