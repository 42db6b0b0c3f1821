"""Solves on a `Grid`: a pass whose two products with K are separable, and the plan of given potentials without entries.

Of K only alpha and beta are there, s_i = exp(alpha_i + log_dot(beta + log v)_i), the column sums alike; the prox of the
rows and the O(n) half of a pass are the core's. An engine makes the products: log_matmul in C, or on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import os
from types import ModuleType
from typing import Any

import numpy as np

from ..._core import lib
from ...penalties import F64
from ...problem.problem import Problem
from ..contract import Options
from ..separable import Separable
from . import log_matmul, stream
from .native import check
from .workspace import Workspace


def separable(problem: Problem, threads: int | None, engine: ModuleType, asarray: Any) -> Separable:
    grid: Any = problem.cost
    return Separable(grid, problem.reg, engine, asarray, threads)


class GridWorkspace(Workspace):
    """Workspace of a solve on a grid."""

    summed = True
    reads = "float64 products"

    def __init__(
        self, problem: Problem, options: Options, engine: ModuleType = log_matmul, asarray: Any = np.asarray
    ) -> None:
        kinds = {problem.rows.penalty, problem.cols.penalty}
        if not kinds <= {"kl", "balanced"} or problem.c is not None:
            what = f"penalty must be 'kl' or 'balanced', got {sorted(kinds)}"
            what = what if problem.c is None else "reference must be 'product' or 'uniform'"
            raise NotImplementedError(f"{what}, for {problem.cost.kind}")
        super().__init__(problem, dataclasses.replace(options, precision="float64"))
        self.products = separable(problem, options.threads, engine, asarray)

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """Choose what K absorbs by sums instead of maxima: no entry and no column sum of K is then above 1."""
        alpha = np.where(out_u, -np.inf, -self.products.log_dot(plan_v))
        return alpha, self.column_scaling(plan_v, plan_v + self.products.log_dot_transpose(alpha))

    def build(self, alpha: F64, beta: F64, error: float) -> None:
        """Sums of the rows and of the columns are of two kernels that are each within ``apart`` of K.

        The marginals r that a pass finds are off by ``apart`` r, so that sqrt(gap) of the plan may be larger by up to
        apart sqrt(rho mass / 2), rho of both sides, and the error by apart sqrt(rho / reg), which is extra_error.
        """
        self.alpha, self.beta = alpha, beta
        apart = self.products.error(error)
        self.limits.exponent_error = error + 3 * apart
        self.limits.extra_error = 1.1 * apart * math.sqrt(self.limits.rho_kl / self.problem.reg)

    def row_pass(self) -> None:
        """s, the core's prox of it, and the column sums."""
        m, n = self.problem.shape
        with np.errstate(divide="ignore", over="ignore"):
            log_v = self.beta + np.log(self.col_side["scale"][:n])
            s = np.exp(self.alpha + self.products.log_dot(log_v))
            if self.options.symmetric:
                self.sums[:n] = s
                return
            self.row_side["marginal"][:m] = s
            check(lib.mapuot_row_prox(self.pool, self.state))
            log_u = self.alpha + np.log(self.row_side["scale"][:m])
            self.sums[:n] = np.exp(self.beta + self.products.log_dot_transpose(log_u))


def memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class GridStream(stream.PlanStream):
    """The plan on a grid: products by the axes, entries only where they are asked for."""

    def __init__(
        self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None,
        engine: ModuleType = log_matmul, asarray: Any = np.asarray,
    ) -> None:  # fmt: skip
        super().__init__(problem, log_u, log_v, threads)
        self.products = separable(problem, threads, engine, asarray)

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        needed, there = (i1 - i0) * self.problem.shape[1] * self.dtype.itemsize, memory()
        if out is None and needed > there:
            raise MemoryError(
                f"{i1 - i0} rows of the plan need {needed / 2**30:.3g} GiB of {there / 2**30:.3g}: Result.rows makes "
                "fewer, apply and barycentric_map none"
            )
        return super().plan(i0, i1, out)

    def halves(self, turned: bool) -> tuple[F64, F64, Any]:
        """Exponents of the points that get sums and of those summed over, and the product between them."""
        if turned:
            return self.beta, self.alpha, self.products.log_dot_transpose
        return self.alpha, self.beta, self.products.log_dot

    def product(self, X: Any, turned: bool) -> Any:
        """exp(own) K (exp(other) X), of positive and of negative entries apart."""
        own, other, log_dot = self.halves(turned)
        out = np.zeros((len(own), X.shape[1]))
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            for k, x in enumerate(X.T):
                for sign in (1.0, -1.0):
                    if (sign * x > 0).any():
                        log_x = np.log(np.maximum(sign * x, 0.0))
                        out[:, k] += sign * np.exp(own + log_dot(other + log_x))
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        """The cost is summed axis by axis, without differences."""
        with np.errstate(over="ignore"):
            row, col = (np.exp(own + log_dot(other)) for own, other, log_dot in map(self.halves, (False, True)))
            parts = (np.exp(self.alpha + self.products.log_dot(self.beta, k)) for k in range(len(self.products.logs)))
            return float(sum(part.sum() for part in parts)), row, col
