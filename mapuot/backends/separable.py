"""Products with the kernel of a `Grid`, exp(-M / reg), made on logarithms along one axis after the other.

    log sum_j exp(-M_ij / reg + t_j) = L_1 L_2 ... L_d t,    L_k: log_matmul with -C_k / reg along axis k

so that nothing under- or overflows, however small reg is: what a plain product of exponentials would lose, log_matmul
makes again by its own maximum (src_c/log_matmul.h). The arrays are those of the engine, NumPy's or CuPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ..penalties import F64
from ..problem.grid import GridCosts
from .contract import host, namespace

UNIT = 2.0**-53
RUN = 256  # products that a sum of log_matmul takes one after the other
LOGS = 400.0  # of scalings in a K, which are below 1e150, and of their sums


class Separable:
    """The products of one grid at one reg; vectors come and go as NumPy arrays, flat."""

    def __init__(
        self, grid: GridCosts, reg: float, engine: ModuleType, asarray: Callable[[Any], Any], threads: int | None
    ):
        self.grid, self.reg, self.engine, self.asarray, self.threads = grid, reg, engine, asarray, threads
        logs = [C / -reg for C in grid.axes]
        self.logs, self.turned = map(self.factors, (logs, [L.T for L in logs]))

    def factors(self, matrices: list[F64]) -> list[Any]:
        return [self.asarray(np.ascontiguousarray(L)) for L in matrices]

    def log_dot(self, t: F64, weighted: int | None = None) -> F64:
        """log sum_j exp(t_j - M_ij / reg) for the rows i; ``weighted``: each term times the cost of this axis."""
        logs = self.logs
        if weighted is not None:
            C = self.grid.axes[weighted]
            with np.errstate(divide="ignore"):
                logs = [*logs[:weighted], *self.factors([np.log(C) - C / self.reg]), *logs[weighted + 1 :]]
        return self.along(logs, t, self.grid.nodes[1])

    def log_dot_transpose(self, t: F64) -> F64:
        """Return the logarithms of the products with the columns."""
        return self.along(self.turned, t, self.grid.nodes[0])

    def along(self, factors: list[Any], t: F64, nodes: tuple[int, ...]) -> F64:
        x = self.asarray(t).reshape(nodes)
        for k, L in enumerate(factors):
            turned = x.swapaxes(0, k)
            flat = namespace(x).ascontiguousarray(turned.reshape(turned.shape[0], -1))
            found = self.engine.product(L[None], flat, False, self.threads)[0]
            x = found.reshape(-1, *turned.shape[1:]).swapaxes(0, k)
        return np.asarray(host(namespace(x).ascontiguousarray(x))).reshape(-1)

    def error(self, exponents: float) -> float:
        """Bound on the relative error of a sum beside that of its exponents, whose own counts ``exponents``.

        On each axis exponents are added to and taken off four times, as are the logarithms of what came before, and
        sums have runs of RUN products and then one of the runs; two exponentials and a logarithm round by 4 units each.
        """
        terms = (max(sizes) for sizes in zip(*self.grid.nodes, strict=True))
        sums = UNIT * sum(RUN + n / RUN + 12 for n in terms)
        return len(self.logs) * (exponents + 8 * UNIT * LOGS) + sums
