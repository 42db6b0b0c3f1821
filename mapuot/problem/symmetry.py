"""Matrices that a caller must give symmetric: how far rounding may have moved them, and where one is not.

A matrix of distances that was computed in float32, or by products of coordinates, differs from its transpose by
rounding: D_ij^2 = |x_i|^2 + |x_j|^2 - 2 <x_i, x_j> by some eps max D^2, hence D_ij by so much over D_ij. A difference
counts where

    |D_ij - D_ji| > SHARE (|D_ij| + |D_ji|)   and   |D_ij - D_ji| (|D_ij| + |D_ji|) > ROUNDINGS eps max D^2,

with the eps of the dtype. Numbers of float64 that float32 holds exactly are taken for float32's.
"""

from typing import Any

import numpy as np

from .sparse import is_sparse

SHARE = 1e-5  # of float32 in either dtype, whatever it was multiplied with
ROUNDINGS = 64  # ot.dist of 700 points in float32 differs by 1, torch.cdist of 80 by 2; a directed graph by 1e6


def epsilon(values: Any) -> float:
    """Return the rounding of the numbers of an array or a tensor."""
    name = str(values.dtype).rpartition(".")[2]
    if name == "float64" and isinstance(values, np.ndarray):
        with np.errstate(over="ignore", under="ignore"):
            name = "float32" if np.array_equal(values, values.astype(np.float32), equal_nan=True) else name
    return float(np.finfo(name if name in ("float16", "float32") else "float64").eps)


def differs(values: Any, turned: Any) -> Any:
    """Tell which entries of a matrix, or of each of a batch, differ from the transpose by more than rounding.

    Equal infs are alike; a NaN differs from nothing.
    """
    size = abs(values)
    finite = size[size < np.inf]
    most = float(finite.max()) if len(finite) else 0.0
    return far(abs(values - turned), size + abs(turned), most, values)


def far(apart: Any, size: Any, most: float, values: Any) -> Any:
    """Tell where |D_ij - D_ji| is more than the rounding of ``values``, by |D_ij| + |D_ji| and max |D|."""
    apparent = (apart > SHARE * size) | (apart == np.inf)
    return apparent & (apart * (size / (most or 1.0)) > ROUNDINGS * epsilon(values) * most)


def as_symmetric(matrix: Any, name: str, where: str = "") -> Any:
    """Return a matrix of NumPy or SciPy in float64, the mean of itself and its transpose where they differ by rounding.

    ``where`` follows "must be finite" and "must be symmetric" in the messages, which name the first wrong entry.
    """
    exact = matrix.astype(np.float64)
    entries = exact.tocoo() if is_sparse(exact) else None
    numbers = exact if entries is None else entries.data
    if not np.isfinite(numbers).all():
        i, j = place_of(~np.isfinite(numbers), entries)
        cure = "" if np.isnan(exact[i, j]) else ": give points that nothing connects a large distance"
        value = "NaN" if np.isnan(exact[i, j]) else str(exact[i, j])
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
    i, j = np.unravel_index(first, wrong.shape) if entries is None else (entries.row[first], entries.col[first])
    return int(i), int(j)
