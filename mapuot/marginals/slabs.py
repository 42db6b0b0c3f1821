"""A cost with one axis for each marginal, read in slabs along the first axis: an array, a file, or a function of slabs.

``matrix`` is the cost of a kernel: one marginal as rows, all others together as columns.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..errors import shown
from ..penalties import F64
from ..problem.cost import Cost, Dense, Streamed
from ..problem.validate import as_array, as_real, check_kind

SLAB_ENTRIES = 1 << 20  # entries of a slab


class Slabs:
    """A cost (n_0, n_1, ...): a function that returns the slabs i0 to i1, or ``held``, an array in memory."""

    def __init__(self, function: Callable[[int, int], Any] | None, shape: tuple[int, ...], held: Any = None) -> None:
        self.function, self.shape, self.held = function, shape, held

    @classmethod
    def of(cls, costs: Any, masses: list[Any], xp: Any = np) -> "Slabs":
        """Check the costs given to `multimarginal`; masses give the shape of a function; keep arrays of ``xp``."""
        if callable(costs) and not hasattr(costs, "shape"):
            if any(x is None for x in masses):
                raise ValueError("masses must be given, ones where free is meant, where costs is a function of slabs")
            return cls(costs, tuple(np.size(x) for x in masses))
        if isinstance(costs, (str, os.PathLike)):
            costs = mapped(costs)
        is_lazy_array = type(costs).__module__.partition(".")[0] in LAZY and hasattr(costs, "ndim")
        lazy = is_lazy_array or isinstance(costs, np.memmap)
        if lazy:
            array = costs
        else:
            array = as_held(costs, "costs", xp)
        check_kind(array, "costs", "fiu")
        if array.ndim < 2 or array.ndim != len(masses) or 0 in array.shape:
            raise ValueError(
                f"costs must be a graph {{(0, 1): M, ...}} or a non-empty array with an axis for each of {len(masses)} "
                f"masses, got shape {array.shape}"
            )
        if lazy:
            return cls(lambda i0, i1: array[i0:i1], array.shape)
        array = as_real(array)
        return cls(None, array.shape, array)

    def read(self, i0: int, i1: int) -> Any:
        if self.function:
            given = self.function(i0, i1)
        else:
            given = self.held[i0:i1]
        block = np.asarray(host(given))
        shape = (i1 - i0, *self.shape[1:])
        if block.shape != shape:
            raise ValueError(f"costs must give shape {shape} for slabs {i0} to {i1}, got {block.shape}")
        if block.dtype.kind not in "fiu":
            raise TypeError(f"costs must hold real numbers, got dtype {block.dtype}")
        return block

    def blocks(self) -> Iterator[tuple[int, int, F64]]:
        """Yield all slabs as (i0, i1, C), with C in float64."""
        step = max(1, SLAB_ENTRIES // math.prod(self.shape[1:]))
        for i0 in range(0, self.shape[0], step):
            i1 = min(i0 + step, self.shape[0])
            yield i0, i1, np.asarray(self.read(i0, i1), np.float64)

    def matrix(self, apart: int) -> Cost:
        """Return the cost as a matrix (n_apart, all others) in the order of the axes; ``apart`` is 0 unless held."""
        if self.held is not None:
            moved = namespace(self.held).moveaxis(self.held, apart, 0)
            return Dense(moved.reshape(len(moved), -1))
        m = self.shape[0]
        n = math.prod(self.shape[1:])
        return Streamed(lambda i0, i1: self.read(i0, i1).reshape(i1 - i0, n), (m, n), self.read(0, 1).dtype)

    def cut(self, kept: list[Any]) -> "Slabs":
        """Return the cost of the kept points of each marginal."""
        shape = tuple(map(len, kept))
        if shape == self.shape:
            return self
        if self.held is not None:
            part = self.held
            xp = namespace(self.held)
            for k, points in enumerate(kept):
                part = part.take(xp.asarray(points), k)
            return Slabs(None, shape, part)

        def function(i0: int, i1: int) -> Any:
            first = int(kept[0][i0])
            block = self.read(first, int(kept[0][i1 - 1]) + 1)
            return block[np.ix_(kept[0][i0:i1] - first, *kept[1:])]

        return Slabs(function, shape)

    def reachable(self, used: list[Any]) -> list[Any]:
        """Find the points of all finite entries between used points."""
        found = [np.zeros(n, bool) for n in self.shape]
        for i0, i1, C in self.blocks():
            open_ = np.isfinite(C)
            for k, mask in enumerate([used[0][i0:i1], *used[1:]]):
                open_ &= mask.reshape([-1 if m == k else 1 for m in range(C.ndim)])
            for k, mask in enumerate(found):
                if k == 0:
                    part = mask[i0:i1]
                else:
                    part = mask
                part |= open_.any(tuple(m for m in range(C.ndim) if m != k))
        return found


def mapped(path: Any) -> Any:
    """Map the array of an .npy file into memory."""
    try:
        found = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"costs must be the path of an .npy file, got {shown(path)}: {error}") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"costs must be the path of an .npy file, got {shown(path)}")
    return found


def as_held(value: Any, name: str, xp: Any) -> Any:
    """Check an array; keep it on its device if it is an array of ``xp``, else copy it to the host."""
    if namespace(value) is not xp:
        value = host(value)
    return as_array(value, name, namespace(value).asarray)


LAZY = ("h5py", "zarr")  # libraries with arrays that read a slab when sliced
