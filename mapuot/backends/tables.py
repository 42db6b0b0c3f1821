"""Tables of points, one row a coordinate, in another layout: by NumPy, or on a GPU by kernels that nothing compiles.

CuPy would compile one for each operation, type and layout, .08 s each: twenty of them before a first pass.
"""

from typing import Any

import numpy as np

from ..penalties import F64
from .contract import host, namespace


def laid(out: Any, x: Any, origin: Any = None, middle: Any = None, factor: float = 1.0) -> Any:
    """Fill a table (d, n) with factor (x - origin - middle), its last columns like x's last one, and return it."""
    if namespace(out) is not np:
        from .cuda.lay import lay  # noqa: PLC0415 - only for what lies on a GPU

        return lay(out, x, origin, middle, factor)
    own, n = out[:, : x.shape[1]], x.shape[1]
    if origin is None:
        own[:] = x
    else:  # in place: they may be large
        np.subtract(x, origin, out=own)
        own -= middle
        own *= factor
    out[:, n:] = own[:, n - 1 :]
    return out


def copied(x: Any) -> F64:
    """Return a float64 table, in whatever strides, on the host."""
    return np.asarray(host(x if namespace(x) is np else laid(namespace(x).empty(x.shape), x)))


def squares(x: Any, rounded: bool = False) -> Any:
    """Return the sum of squares of each column, in float64; ``rounded``: on a GPU of what float32 has of them."""
    if namespace(x) is not np:
        from .cuda import lay  # noqa: PLC0415

        return lay.squares(x, rounded)
    return np.square(x, dtype=np.float64).sum(0)
