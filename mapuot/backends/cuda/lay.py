"""Tables in another layout or type on the device: src_cuda/lay.cu. Twin: backends/tables.py."""

from typing import Any

import cupy as cp
import numpy as np

from .kernels import kernel

MOST_BLOCKS = 4096


def lay(
    out: Any, x: Any = None, origin: Any = None, middle: Any = None, factor: float = 1.0, rest: float | None = None,
    finite: bool = False,
) -> Any:  # fmt: skip
    """Fill a table (d, room), or (runs, d, points of a run), with factor (x - origin - middle), and return it.

    Beyond x is ``rest``, or its last column again. ``finite``: an infinity becomes the rest.
    """
    *runs, d, at_once = out.shape
    place = (0, *(s // out.itemsize for s in out.strides))[-3:]
    room, none = at_once * (runs[0] if runs else 1), np.uint64(0)
    x = cp.empty((0, at_once)) if x is None else x if x.dtype.char in "fd" else x.astype(np.float64)
    lie = map(np.int64, (*(s // x.itemsize for s in x.strides), *x.shape))
    first = (none, np.int64(0)) if origin is None else (origin, np.int64(origin.strides[0] // 8))
    moved = none if middle is None else cp.asarray(middle.ravel()), np.float64(factor), np.float64(rest or 0.0)
    if d * room:
        kernel("lay.cu", "lay", STORE=0)((min(-(-d * room // 256), MOST_BLOCKS),), (256,), (
            x, np.int32(x.itemsize == 4), *lie, *first, *moved, np.int32(rest is None), np.int32(finite),
            out, np.int32(out.itemsize == 4), *map(np.int64, (*place, at_once, d, room)),
        ))  # fmt: skip
    return out


def fill(x: Any, bits: int) -> None:
    """Fill a vector with these 8 bytes."""
    lay(x.view(np.float64)[None], rest=np.uint64(bits).view(np.float64))


def squares(x: Any, rounded: bool) -> Any:
    """Return the sums of squares along the columns of a table (d, n); ``rounded``: of what float32 has of it."""
    out, lie = cp.empty(x.shape[1]), map(np.int64, (*(s // x.itemsize for s in x.strides), *x.shape))
    if len(out):
        grid = (-(-len(out) // 256),)
        kernel("lay.cu", "squares", STORE=0)(grid, (256,), (x, np.int32(x.itemsize == 4), *lie, np.int32(rounded), out))
    return out
