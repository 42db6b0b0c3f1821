"""Products with one kernel on a GPU, by CuPy: K in float64 on the device, vectors of both sides on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cost import Cost
from ...penalties import F64
from ..kernel import BLOCK_BYTES, LogKernel


class Kernel(LogKernel):
    """K on the device of ``xp``, numpy or CuPy, read twice a pass."""

    def __init__(self, cost: Cost, reg: float, ends: tuple[float, float], xp: Any) -> None:
        super().__init__(cost, reg, ends, "float64")
        self.xp, self.K = xp, xp.empty(cost.shape)

    def logs(self) -> Any:
        """Blocks (i0, i1, -C / reg) in float64 on the device."""
        for i0, i1, C, _ in self.cost.blocks(most=BLOCK_BYTES):
            yield i0, i1, self.xp.asarray(np.asarray(C), np.float64) / -self.reg

    def host(self, x: Any) -> F64:
        return np.asarray(x.get() if hasattr(x, "get") else x)

    def balance(self, y: F64) -> F64:
        xp, y = self.xp, self.xp.asarray(y)
        top = xp.full(len(y), -np.inf)
        for i0, i1, L in self.logs():
            terms = L + y
            largest = terms.max(1)
            self.p[i0:i1] = -self.host(largest)
            xp.maximum(top, (terms - largest[:, None]).max(0), out=top)
        return self.host(top)

    def build(self) -> None:
        xp, q = self.xp, self.xp.asarray(self.q)
        for i0, i1, L in self.logs():
            xp.exp(L + xp.asarray(self.p[i0:i1])[:, None] + q, out=self.K[i0:i1])

    def fused(self, v: Any, base: F64, fi: float, narrow: bool) -> tuple[F64, Any, float]:
        with np.errstate(divide="ignore", over="ignore"):
            log_s = np.log(self.dots(v))
            u = np.exp(base - fi * log_s)
        sums = self.xp.asarray(u) @ self.K
        return log_s, sums, float(u.max())

    def dots(self, v: Any) -> F64:
        return self.host(self.K @ self.xp.asarray(v))

    def plan_apply(self, x: F64, y: F64, Y: F64, axis: int) -> F64:
        xp = self.xp
        out = xp.zeros((self.cost.shape[1 - axis], Y.shape[1]))
        x, y, Y = xp.asarray(x), xp.asarray(y), xp.asarray(Y)
        for i0, i1, L in self.logs():
            P = xp.exp(L + x[i0:i1, None] + y)
            if axis:
                out[i0:i1] = P @ Y
            else:
                out += P.T @ Y[i0:i1]
        return self.host(out)

    def plan_cost(self, x: F64, y: F64) -> float:
        xp, total = self.xp, 0.0
        x, y = xp.asarray(x), xp.asarray(y)
        for i0, i1, L in self.logs():
            P = xp.exp(L + x[i0:i1, None] + y)
            total -= self.reg * float((P * xp.where(P > 0, L, 0.0)).sum())
        return total
