"""Tables of points, a coordinate in each row, and formulas over vectors, by NumPy or on a GPU by cuda/vectors.py."""

import functools
from typing import Any

import numpy as np

from ..penalties import F64
from .contract import host, namespace


def laid(out: Any, x: Any, origin: Any = None, middle: Any = None, factor: float = 1.0) -> Any:
    """Fill a table (d, n padded) with factor (x - origin - middle), repeat its last column, and return it."""
    xp, n = arithmetic(out), x.shape[1]
    whole, x = xp.asarray(out), x if x.dtype.char in "fd" else x.astype(np.float64)
    own = whole[:, :n]
    if origin is None:
        own[...] = x
    else:  # in place: tables may be large
        np.subtract(x, origin, out=own)
        own -= xp.asarray(middle)
        own *= factor
    whole[:, n:] = own[:, n - 1 :]
    return out


def formula(function: Any) -> Any:
    """Decorate a function of vectors and numbers so that all its operations are one launch on a GPU.

    ``into``: arrays for its results.
    """

    @functools.wraps(function)
    def found(*inputs: Any, into: Any = ()) -> Any:
        if (xp := arithmetic(*inputs)) is not np:
            return xp.evaluated(function, inputs, into)
        with np.errstate(all="ignore"):
            results = function(*inputs)
        for out, x in zip(into, results, strict=False):
            out[...] = x
        return results

    return found


def arithmetic(*arrays: Any) -> Any:
    """Return NumPy, or cuda/vectors.py where one of the arrays lies on a GPU."""
    if namespace(*arrays) is np:
        return np
    from .cuda import vectors  # noqa: PLC0415 - only for arrays on a GPU

    return vectors


def taken(x: Any, at: Any, xp: Any) -> Any:
    """Return the rows ``at`` of a table; ``xp``: NumPy or cuda/vectors.py."""
    return xp.asarray(x)[xp.asarray(at)]


def copied(x: Any) -> F64:
    """Copy a float64 table with any strides to the host."""
    return np.asarray(host(x if namespace(x) is np else laid(namespace(x).empty(x.shape), x)))


def squares(x: Any, rounded: bool = False) -> Any:
    """Return the sum of squares of each column in float64; ``rounded``: on a GPU, round the points to float32 first."""
    xp = arithmetic(x)
    if xp is not np:
        x = xp.asarray(x).astype(np.float32) if rounded else x
        return xp.merged(np.add, x, each=np.square)[0]
    return np.square(x, dtype=np.float64).sum(0)
