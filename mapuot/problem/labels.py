"""Labels of points: checks, classes, and coordinates for costs between labels."""

import math
import sys
from typing import Any

import numpy as np

from ..arrays import any_of, host, namespace, refuse_other
from ..errors import shown
from ..ranks import ALONE, Ranks


def as_labels(y: Any, length: int, name: str, may_lack: bool = False) -> Any:
    """Check labels, (length,), of any kind that can be sorted; numbers may lie on a device.

    ``may_lack``: the caller treats missing labels (`is_missing`) as unknown. Otherwise they are refused.
    """
    refuse_other(y, name)
    if namespace(y) is np:
        y = np.asarray(y)
    if y.shape != (length,):
        cure = f": {name}.ravel() has one for each node, in their order" if y.ndim > 1 and y.size == length else ""
        raise ValueError(f"{name} must have shape ({length},), got {y.shape}{cure}")
    missing = None if may_lack else is_missing(y)
    if missing is not None and any_of(missing):
        first = int(np.argmax(host(missing)))
        cure = "give them a name of their own, as pandas' fillna('unknown') does"
        raise ValueError(f"{name} must not lack labels, got {int(missing.sum())} None or NaN, first at {first}: {cure}")
    return y


def is_missing(y: Any) -> Any:
    """Tell which labels are missing: NaN, NaT, None or pandas' NA."""
    xp = namespace(y)
    if y.dtype.kind in "mM":
        return np.isnat(y)
    if y.dtype.kind != "O":
        if y.dtype.kind in "fc":
            return xp.isnan(y)
        return xp.zeros(y.shape, bool)
    pandas = sys.modules.get("pandas")  # without pandas there is no NA
    if pandas:
        return pandas.isna(y)
    return np.array([x is None or (isinstance(x, (float, np.floating)) and math.isnan(x)) for x in y], bool)


def classes_of(labels: Any, ranks: Ranks, name: str) -> Any:
    xp = namespace(labels)
    try:
        return xp.unique(xp.concatenate(ranks.all(xp.unique(labels))))
    except TypeError as error:
        raise TypeError(f"{name} must be labels of one kind, which can be sorted: {error}") from error


def one_hot(y: Any, classes: Any) -> Any:
    xp = namespace(y)
    table = xp.zeros((len(y), len(classes)))
    table[xp.arange(len(y)), xp.searchsorted(classes, y)] = 1.0
    return table


def pair_of(
    labels: Any, sizes: list[int], names: tuple[str, str] = ("labels[0]", "labels[1]")
) -> tuple[list[Any], Any]:  # fmt: skip
    """Check the labels of the points of x and y, ``names`` in messages; return both, and all classes in order."""
    if isinstance(labels, (tuple, list)):
        pair = labels
    else:
        pair = ()
    if len(pair) != 2:
        raise ValueError(f"labels must be a pair, of the points of x and of those of y, got {shown(labels)}")
    both = [as_labels(host(y), k, name) for y, k, name in zip(pair, sizes, names, strict=True)]
    classes = np.unique(np.concatenate([classes_of(y, ALONE, name) for y, name in zip(both, names, strict=True)]))
    return both, classes


def coordinates(labels: Any, sizes: list[int], size: float) -> list[Any]:
    """Return columns that put different labels sqrt(2) size apart in the 2-norm, 2 size in the 1-norm."""
    both, classes = pair_of(labels, sizes)
    first, second = (size * one_hot(y, classes) for y in both)
    return [first, first if np.array_equal(first, second) else second]


def signs(labels: Any, sizes: list[int]) -> list[Any]:
    """Return columns of -1 and 1, the binary digits of each label's number."""
    both, classes = pair_of(labels, sizes)
    digits = np.arange((len(classes) - 1).bit_length())
    return [2.0 * (np.searchsorted(classes, y)[:, None] >> digits & 1) - 1 for y in both]
