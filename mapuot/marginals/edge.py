"""The kernel of one pairwise cost, and its products on logarithms.

    log_dot(x, 1)_i = log sum_j exp(x_j - C_ij / reg),        log_dot(z, 0)_j = log sum_i exp(z_i - C_ij / reg)

K_ij = exp(p_i + q_j - C_ij / reg) <= 1 is kept in float64 with absorbed p and q, so that a product is one by BLAS.
Factors below FLUSH are zeros; a sum below LEAST may miss some of them, so K is then made anew around the vector at
hand, by its own maximum in each sum, and nothing is missed. The rounding of each product is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..penalties import F64

FLUSH = 1e-150  # of both factors of a product: none is subnormal, which would take a hundred times as long
LEAST = 1e-125  # of a sum: beside it what was flushed in 1e9 terms is 1e-16
UNIT = 2.0**-53
BLOCK_ENTRIES = 1 << 22


class Edge:
    """K of one cost (m, n), an array or a PointCloud."""

    def __init__(self, cost: Any, reg: float, largest: float) -> None:
        self.cost, self.reg, self.largest = cost, reg, largest / reg
        self.p: list[F64] = [np.zeros(n) for n in cost.shape]
        self.K: F64 | None = None

    def rows(self) -> Iterator[tuple[int, int, F64]]:
        """Blocks (i0, i1, C) of rows in float64."""
        m, n = self.cost.shape
        step = max(1, BLOCK_ENTRIES // n)
        for i0 in range(0, m, step):
            yield i0, min(i0 + step, m), np.asarray(self.cost[i0 : i0 + step], np.float64)

    def log_dot(self, x: F64, axis: int) -> tuple[F64, float]:
        """(logarithm of the sums along ``axis``, bound of their absolute rounding)."""
        out = None if self.K is None else self.product(x, axis)
        if out is None:
            self.absorb(x, axis)
            out = self.product(x, axis)
        assert out is not None  # each sum has a term 1 now
        sizes = sum(float(np.abs(y).max()) for y in (*self.p, x, out))
        return out, UNIT * (4 * (sizes + self.largest) + x.size + 8)

    def product(self, x: F64, axis: int) -> F64 | None:
        """The same by the K at hand; None where that is no longer good for it."""
        assert self.K is not None
        scaled = x - self.p[axis]
        top = scaled.max()
        factors = np.exp(scaled - top)
        factors[factors < FLUSH] = 0.0
        sums = self.K @ factors if axis else factors @ self.K
        if not sums.min() >= LEAST:
            return None
        return np.asarray(np.log(sums) + top - self.p[1 - axis])

    def absorb(self, x: F64, axis: int) -> None:
        """K around x: p of that axis is x, of the other what makes the largest term of each sum 1."""
        m, n = self.cost.shape
        top = np.full((m, n)[1 - axis], -np.inf)
        for i0, i1, C in self.rows():
            part = slice(i0, i1)
            if axis:
                top[part] = (x - C / self.reg).max(1)
            else:
                np.maximum(top, (x[part, None] - C / self.reg).max(0), out=top)
        if self.K is None:
            self.K = np.empty((m, n))
        self.p[axis], self.p[1 - axis] = x.copy(), -top
        p, q = self.p
        for i0, i1, C in self.rows():
            block = self.K[i0:i1]
            np.exp(p[i0:i1, None] + q - C / self.reg, out=block)
            block[block < FLUSH] = 0.0

    def coupling(self, x: F64, y: F64) -> Iterator[tuple[int, int, F64, F64]]:
        """Blocks (i0, i1, P, C) of rows of P_ij = exp(x_i + y_j - C_ij / reg)."""
        for i0, i1, C in self.rows():
            yield i0, i1, np.exp(x[i0:i1, None] + y - C / self.reg), C
