"""Pairs drawn from a plan: rows by the row sums first, then a column of each of these rows, which alone are made."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..penalties import F64

METHODS = ("independent", "systematic", "rows")


def as_generator(seed: Any) -> np.random.Generator:
    """Return NumPy's generator for a seed, a generator of NumPy or of PyTorch, or a key of JAX."""
    if type(seed).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        seed = int(torch.randint(1 << 62, (), generator=seed, device=seed.device))
    elif str(getattr(seed, "dtype", "")).startswith("key<"):  # of jax.random.key
        seed = sys.modules["jax"].random.key_data(seed)
    return np.random.default_rng(np.asarray(seed) if hasattr(seed, "dtype") else seed)


def draw_rows(r: F64, size: int, rng: np.random.Generator, method: str) -> Any:
    """Draw ``size`` rows: with probabilities r / sum r, by equal steps along r, or all with mass equally often."""
    if method == "rows":
        used = np.flatnonzero(r > 0)
        return used[((np.arange(size) + rng.random()) * (len(used) / size)).astype(np.int64) % len(used)]
    ends = np.cumsum(r)
    steps = rng.random(size) if method == "independent" else (rng.permutation(size) + rng.random()) / size
    return np.searchsorted(ends, np.minimum(steps * ends[-1], np.nextafter(ends[-1], 0.0)), side="right")
