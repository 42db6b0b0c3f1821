"""Labels that move with the mass of a plan: what share of the mass at a point has which label."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..penalties import F64
from ..ranks import Ranks


def as_labels(y: Any, length: int, name: str) -> Any:
    """(length,) labels of any kind that can be sorted."""
    y = np.asarray(y)
    if y.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), got {y.shape}")
    return y


def classes_of(labels: Any, ranks: Ranks, name: str) -> Any:
    """The sorted labels that occur on some rank."""
    try:
        return np.unique(np.concatenate(ranks.all(np.unique(labels))))
    except TypeError as error:
        raise TypeError(f"{name} must be labels of one kind, which can be sorted: {error}") from error


def one_hot(y: Any, classes: Any) -> F64:
    """(len(y), len(classes)), 1 where a label is the class."""
    table = np.zeros((len(y), len(classes)))
    table[np.arange(len(y)), np.searchsorted(classes, y)] = 1.0
    return table


def shares(mass: F64) -> F64:
    """Rows divided by their sums; zeros where there is no mass."""
    total = mass.sum(axis=1, keepdims=True)
    out = np.zeros_like(mass)
    np.divide(mass, total, out=out, where=total > 0)
    return out
