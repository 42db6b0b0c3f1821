"""Arrays of the host and of a GPU: where an array lies, its library, copies to the host, and formulas over vectors.

No library of a GPU is imported with this module. `backends` registers the module that computes with vectors on a GPU.
"""

import functools
import itertools
import math
import os
import re
import sys
from importlib import import_module
from typing import Any

import numpy as np

from .errors import shown
from .penalties import F64

PAD = 16  # rows of K and vectors of the columns are padded to a multiple of this many entries
FILE_NAME = re.compile(r"[/\\]|\.[A-Za-z]\w+(:|$)")  # a folder, or an ending
_on_gpu: list[str] = []  # the module that computes with vectors on a GPU, once it is registered


def namespace(*arrays: Any) -> Any:
    """Return CuPy if one of the arrays is CuPy's (backends/cuda/vectors.py if it is a `Vector`), else NumPy."""
    for x in arrays:
        if type(x).__module__.partition(".")[0] == "cupy":
            return getattr(x, "xp", None) or sys.modules["cupy"]
    return np


def host(x: Any) -> Any:
    """Copy an array or sparse matrix from a GPU to NumPy or SciPy; return others as they are."""
    if type(x).__module__.partition(".")[0] in ("cupy", "cupyx"):
        return x.get()
    return x


def is_data_set(x: Any) -> bool:
    """Tell whether x is an AnnData or another holder of arrays, which NumPy would read cell by cell, for minutes."""
    return hasattr(x, "obsm")


def refuse_other(x: Any, name: str) -> None:
    """Raise a TypeError if x is the name of a file, or x or the first member of a list x a data set, and no array."""
    if isinstance(x, os.PathLike) or (isinstance(x, str) and FILE_NAME.search(x)):
        cure = "numpy.load or pandas.read_csv reads one, and mapuot.solve takes the name of a file of costs"
        raise TypeError(f"{name} must be an array, got {shown(x)}: {cure}")
    if isinstance(x, (list, tuple)) and x:
        x = x[0]
        name += "[0]"
    if is_data_set(x):
        arrays = f"{name}.obsm['X_pca'] (points), {name}.obsp['distances'] (costs) or {name}.obs['mass'] (masses)"
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: pass one of its arrays, as {arrays}")


def import_cupy() -> Any:
    """Import CuPy; an error names the extras that bring it."""
    try:
        return import_module("cupy")
    except ImportError as error:
        extras = "pip install 'mapuot[gpu]', for CUDA 12 'mapuot[gpu12]'"
        raise ImportError(f"arrays on a GPU need CuPy: {extras}; or pass arrays in host memory") from error


def is_on_device(x: Any) -> bool:
    """Tell whether an array, a sparse matrix, a tensor or a cost lies on a GPU, without importing any library."""
    said = any(getattr(x, name, False) is True for name in ("on_device", "is_cuda"))
    return said or hasattr(x, "__cuda_array_interface__") or type(x).__module__.startswith("cupyx.")


def register_arithmetic(module: str) -> None:
    """Set the module that `arithmetic` returns for vectors on a GPU; it is imported on first use."""
    _on_gpu[:] = [module]


def arithmetic(*arrays: Any) -> Any:
    """Return NumPy, or the registered module (backends/cuda/vectors.py) where one of the arrays lies on a GPU."""
    if namespace(*arrays) is np:
        return np
    return import_module(_on_gpu[0])


def formula(function: Any) -> Any:
    """Decorate a function of vectors and numbers so that all its operations are one launch on a GPU.

    ``into``: arrays for its results.
    """

    @functools.wraps(function)
    def found(*inputs: Any, into: Any = ()) -> Any:
        if namespace(*inputs) is not np:
            return arithmetic(*inputs).evaluated(function, inputs, into)
        with np.errstate(all="ignore"):
            results = function(*inputs)
        for out, x in zip(into, results, strict=False):
            out[...] = x
        return results

    return found


def largest(x: Any, least: float = 0.0) -> float:
    """Return the maximum of ``least`` and all numbers of x, which may be empty or lie on a GPU; NaN if one is NaN."""
    if x.size:
        return max(float(x.max()), least)
    return least


def any_of(mask: Any) -> bool:
    """Tell whether a mask on the host or a GPU is true somewhere; CuPy's own ``any`` takes 4 seconds to compile."""
    return bool(mask.any() if isinstance(mask, np.ndarray) else mask.size and mask.view(np.uint8).max())


def median(x: Any) -> float:
    """Return the median of a non-empty vector; on a GPU by sorting, as CuPy's median takes 3 seconds to compile."""
    if isinstance(x, np.ndarray):
        return float(np.median(x))
    ordered = namespace(x).sort(x)
    half = len(x) // 2
    return float(host(ordered[half - 1 + len(x) % 2 : half + 1]).mean())


def even_parts(count: int, most: int) -> list[slice]:
    """Return slices of nearly equal lengths, ``most`` or less, that cover ``count`` places."""
    parts = max(1, -(-count // most))
    ends = [count * k // parts for k in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


# ---- tables of points, a coordinate in each row


def laid(out: Any, x: Any, origin: Any = None, middle: Any = None, factor: float = 1.0) -> Any:
    """Fill a table (d, n padded) with factor (x - origin - middle), repeat its last column, and return it."""
    xp = arithmetic(out)
    n = x.shape[1]
    whole = xp.asarray(out)
    x = x if x.dtype.char in "fd" else x.astype(np.float64)
    own = whole[:, :n]
    if origin is None:
        own[...] = x
    else:  # in place: tables may be large
        np.subtract(x, origin, out=own)
        own -= xp.asarray(middle)
        own *= factor
    whole[:, n:] = own[:, n - 1 :]
    return out


def taken(x: Any, at: Any, xp: Any) -> Any:
    """Return the rows ``at`` of a table; ``xp``: NumPy or backends/cuda/vectors.py."""
    return xp.asarray(x)[xp.asarray(at)]


def copied(x: Any) -> F64:
    """Copy a float64 table with any strides to the host."""
    if namespace(x) is not np:
        x = laid(namespace(x).empty(x.shape), x)
    return np.asarray(host(x))


def squares(x: Any, rounded: bool = False) -> Any:
    """Return the sum of squares of each column in float64; ``rounded``: on a GPU, round the points to float32 first."""
    xp = arithmetic(x)
    if xp is not np:
        if rounded:
            x = xp.asarray(x).astype(np.float32)
        return xp.merged(np.add, x, each=np.square)[0]
    return np.square(x, dtype=np.float64).sum(0)


def longest(points: Any) -> float:
    """Return the largest length of points (d, m); 0 without points."""
    if points.shape[1] == 0:
        return 0.0
    return math.sqrt(float(squares(points).max()))
