"""Turns of all marginals but one of an array or a triangle, on what that one leaves of the kernel: src_c/left.c.

Of a W that lies on a device the sums are made there, and the rest here.
"""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...penalties import F64
from ..contract import host, namespace
from ..kernel import FLUSH_PRODUCT, StaleError, largest_of
from . import native
from .native import check, empty, pointer


class Left:
    """W e^(base - shift_1 - shift_2 ...), and the state: log u of the marginals of its axes, one behind the other."""

    W: Any = None

    def __init__(self, sizes: list[int], log_weight: F64, fi: list[float], threads: int | None = 1) -> None:
        ends, axes = [0, *accumulate(sizes)], len(sizes)
        self.parts = [slice(*part) for part in pairwise(ends)]
        self.size, self.fi, self.top = np.array(sizes, np.int64), np.array(fi, float), np.zeros(axes)
        self.log_weight, rest = log_weight, int(np.prod(self.size[:-1]))
        names = "log_u", "log_s", "sums", "factor", "shift"
        vectors = dict(zip(names, native.vectors(*[ends[-1]] * len(names)), strict=True))
        self.log_u, self.log_s, self.sums, self.factor, self.shift = vectors.values()
        pool = self.pool = native.pool_for(threads, rest * sizes[-1])
        vectors |= {"work": empty(2 * rest), "partial": empty(lib.mapuot_pool_threads(pool) * max(sizes))}
        core = self.core = ffi.new("mapuot_left *")
        core.pool, core.axes, core.size = pool, axes, pointer(self.size, "int64_t *")
        for name, x in {**vectors, "log_weight": log_weight, "fi": self.fi, "top": self.top}.items():
            setattr(core, name, pointer(x))
        core.flush, self.held = FLUSH_PRODUCT, vectors
        self.shift_size = 0.0

    def around(self, shift: list[F64]) -> None:
        np.concatenate(shift, out=self.shift)
        self.shift_size = sum(largest_of(x) for x in shift)

    def factors(self, log_u: F64) -> None:
        """Copy log_u here and make the factors of it."""
        self.log_u[:] = log_u
        settle(lib.mapuot_left_factors(self.core))

    def read(self, W: Any, base: float, least: float) -> None:
        """Find log s of all axes on W e^base; StaleError where a sum is below ``least``."""
        core, self.W, self.there = self.core, W, namespace(W) is not np
        core.W = ffi.NULL if self.there else pointer(W)
        core.base, core.least = base, least
        if self.there:
            for k in range(len(self.parts)):
                self.contract(k)
        settle(lib.mapuot_left_read(core))

    def move(self, shifts: F64) -> None:
        """Move log u by common shifts, that of the marginal set apart first."""
        self.core.base += shifts[0]
        self.top += shifts[1:]
        self.log_u += np.repeat(shifts[1:], self.size)

    def turn(self, given: bool) -> None:
        """Make the axes in turn best for the others; given: the sums of the first axis are at hand."""
        if not self.there:
            settle(lib.mapuot_left_turn(self.core, 0, len(self.parts), given))
            return
        for k in np.flatnonzero(self.fi).tolist():
            if not given:
                self.contract(k)
            given = False
            settle(lib.mapuot_left_turn(self.core, k, k + 1, True))

    @property
    def log_mass(self) -> float:
        """Return the log mass of the plan, after a read and after the last turn."""
        return float(self.core.log_mass)

    def contract(self, k: int) -> None:
        """Sum W over all axes but k, each weighted by its factors."""
        W, xp = self.W.reshape(self.size.tolist()), namespace(self.W)
        factors = [self.factor[part] for part in self.parts]
        for x in factors[:k:-1]:
            W = W @ xp.asarray(x)
        for x in factors[:k]:
            W = (xp.asarray(x) @ W.reshape(len(x), -1)).reshape(W.shape[1:])
        self.sums[self.parts[k]] = host(W)


def settle(status: int) -> None:
    if check(status) == lib.MAPUOT_ABSORB:
        raise StaleError
