"""Products with the kernel of a `Grid`, exp(-M / reg), made on logarithms along one axis after the other.

    log sum_j exp(-M_ij / reg + t_j) = L_1 L_2 ... L_d t,    L_k: log_matmul with -C_k / reg along axis k

so that nothing under- or overflows, however small reg is: where a plain product of exponentials would underflow,
log_matmul repeats the sum with its own maximum taken out (src_c/log_matmul.h). An engine makes the products, in C or
on a GPU. The host holds the vectors and computes the prox of the rows and the O(n) half of a pass.
"""

import dataclasses
import math
import os
from types import ModuleType
from typing import Any

import numpy as np

from ..._core import lib
from ...arrays import host, namespace
from ...cached import cached_property
from ...contract import Options
from ...penalties import F64
from ...problem.cost import Cost
from ...problem.problem import Problem
from ...ranks import ALONE, Ranks
from ..kernel import UNIT
from ..operator import parts_of
from . import log_matmul
from .native import check
from .operator import HostOperator
from .workspace import HostWorkspace

TERMS = 256  # products that a sum of log_matmul takes one after the other
PAGES = os.sysconf("SC_PHYS_PAGES")  # of memory
MOST_C = 40.0  # from this cost of neighbours in units of reg on, K is the identity up to rounding
LOGS = 400.0  # bounds the logarithms of scalings beside K, which are below 1e150, and the logarithms of their sums


def grid_workspace(problem: Problem, options: Options, *engine: Any) -> HostWorkspace:
    kinds = {problem.rows.penalty, problem.cols.penalty}
    if not kinds <= {"kl", "balanced"} or problem.c is not None:
        what = f"penalty must be 'kl' or 'balanced', got {sorted(kinds)}"
        if problem.c is not None:
            what = "reference must be 'product' or 'uniform'"
        raise NotImplementedError(f"{what}, for {problem.cost.kind}")
    operator = GridOperator(*parts_of(problem), options.threads, *engine)
    return HostWorkspace(problem, dataclasses.replace(options, precision="float64"), operator=operator)


class GridOperator(HostOperator):
    """Products on one grid: store the exponents of each axis instead of K, and make entries of K on request."""

    summed = True

    def __init__(
        self, cost: Any, reg: float, c: Cost | None = None, ranks: Ranks = ALONE, threads: int | None = None,
        engine: ModuleType = log_matmul, asarray: Any = np.asarray,
    ) -> None:  # fmt: skip
        super().__init__(cost, reg, c, ranks, threads)
        self.engine, self.asarray, self.threads = engine, asarray, threads
        self.grid = cost
        logs = [C / -reg for C in self.grid.axes]
        self.logs, self.turned = map(self.factors, (logs, [L.T for L in logs]))

    def factors(self, matrices: list[F64]) -> list[Any]:
        return [self.asarray(np.ascontiguousarray(L)) for L in matrices]

    def log_dot(self, t: F64, weighted: int | None = None) -> F64:
        """Return log sum_j exp(t_j - M_ij / reg) of the rows i; ``weighted``: each term times the cost of this axis."""
        logs = self.logs
        if weighted is not None:
            C = self.grid.axes[weighted]
            with np.errstate(divide="ignore"):
                logs = [*logs[:weighted], *self.factors([np.log(C) - C / self.reg]), *logs[weighted + 1 :]]
        return self.along(logs, t, self.grid.nodes[1])

    def log_dot_transpose(self, t: F64) -> F64:
        return self.along(self.turned, t, self.grid.nodes[0])

    def log_products(self, x: F64, turned: bool = False) -> F64:
        return np.stack([*map(self.log_dot_transpose if turned else self.log_dot, x)])

    def along(self, factors: list[Any], t: F64, nodes: tuple[int, ...]) -> F64:
        x = self.asarray(t).reshape(nodes)
        for k, L in enumerate(factors):
            turned = x.swapaxes(0, k)
            flat = namespace(x).ascontiguousarray(turned.reshape(turned.shape[0], -1))
            found = self.engine.product(L[None], flat, False, self.threads)[0]
            x = found.reshape(-1, *turned.shape[1:]).swapaxes(0, k)
        return np.asarray(host(namespace(x).ascontiguousarray(x))).reshape(-1)

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """A lower bound on the least eigenvalue of K, and its diagonal entry, 1: exp(-c k^2) is positive definite.

        Along an axis K is a Toeplitz matrix. No eigenvalue lies below the least value of its Fourier series,
        sum_k (-1)^k exp(-c k^2) = 2 sqrt(pi / c) sum_(k >= 0) exp(-(2 k + 1)^2 pi^2 / (4 c)). All terms are positive.
        """
        least = 1.0
        for count, h in zip(self.grid.nodes[0], self.grid.spacing, strict=True):
            c = self.grid.scale * h**2 / self.reg
            if count > 1 and c < MOST_C:
                odd = 2 * np.arange(int(math.sqrt(c)) + 2) + 1
                least *= 2 * math.sqrt(math.pi / c) * float(np.exp(-((math.pi * odd) ** 2) / (4 * c)).sum())
            elif count > 1:
                least *= 1 - 2.1 * math.exp(-MOST_C)
        return least * (1 - 1e-12), 1.0

    def apart(self, error: float) -> float:
        """Bound the relative error of a sum; its exponents contribute ``error`` on each axis.

        On each axis four additions round the exponents, and four round the logarithms from the axis before. A sum adds
        runs of TERMS products, then adds the runs. Two exponentials and a logarithm round by 4 units each.
        """
        terms = (max(sizes) for sizes in zip(*self.grid.nodes, strict=True))
        sums = UNIT * sum(TERMS + n / TERMS + 12 for n in terms)
        return len(self.logs) * (error + 8 * UNIT * LOGS) + sums

    # ---- passes

    def store(self, dtype: str, made: bool = False) -> None:
        """Do nothing: there is no K to make room for."""

    def balance(self, alpha: F64, x: F64) -> F64:
        """Balance by sums instead of maxima: no entry and no column sum of K is then above 1."""
        np.copyto(alpha, -self.log_dot(x), where=alpha > -np.inf)
        return x + self.log_dot_transpose(alpha)

    def build(self, alpha: F64, beta: F64) -> None:
        self.set_exponents(alpha, beta)

    def row_pass(self, rows: dict[str, F64], cols: dict[str, F64] | None = None, call: Any = None) -> None:
        """Compute s_i = exp(alpha_i + log_dot(beta + log v)_i), the core's prox of s, and likewise the column sums."""
        assert cols
        m, n = self.shape
        with np.errstate(divide="ignore", over="ignore"):
            log_v = self.beta + np.log(cols["scale"][:n])
            s = np.exp(self.alpha + self.log_dot(log_v))
            if self.state.limits.symmetric:  # K^T u is K v
                self.col_sums[:n] = s
                return
            rows["marginal"][:m] = s
            check(lib.mapuot_row_prox(self.pool, self.state))
            log_u = self.alpha + np.log(rows["scale"][:m])
            self.col_sums[:n] = np.exp(self.beta + self.log_dot_transpose(log_u))

    # ---- the plan

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        needed = (i1 - i0) * self.shape[1] * self.dtype.itemsize
        there = os.sysconf("SC_PAGE_SIZE") * PAGES
        if out is None and needed > there:
            raise MemoryError(
                f"{i1 - i0} rows of the plan need {needed / 2**30:.3g} GiB of {there / 2**30:.3g}: Result.rows makes "
                "fewer, apply and barycentric_map none"
            )
        return super().plan(i0, i1, out)

    def halves(self, turned: bool) -> tuple[F64, F64, Any]:
        """Return the exponents of the output side, the exponents of the summed side, and the product from it."""
        if turned:
            return self.beta, self.alpha, self.log_dot_transpose
        return self.alpha, self.beta, self.log_dot

    def product(self, X: Any, turned: bool) -> Any:
        return self.sums_of(X, turned, self.halves(turned)[0])

    def sums_of(self, X: Any, turned: bool, own: F64) -> F64:
        """Return exp(own) K (exp(other) X): multiply the positive and the negative part of X separately."""
        _, other, log_dot = self.halves(turned)
        out = np.zeros((len(own), X.shape[1]))
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            for k, x in enumerate(X.T):
                for sign in (1.0, -1.0):
                    if (sign * x > 0).any():
                        log_x = np.log(np.maximum(sign * x, 0.0))
                        out[:, k] += sign * np.exp(own + log_dot(other + log_x))
        return out

    def images(self, X: Any, turned: bool = False, stays: bool = False) -> Any:
        X, flat = self.as_columns(X, self.shape[not turned], "Y")
        own, other, log_dot = self.halves(turned)
        log_mass = log_dot(other)
        out = self.sums_of(X, turned, -log_mass)
        with np.errstate(under="ignore", invalid="ignore"):
            if stays:
                moves = np.exp(own + log_mass) > 0
            else:
                moves = (own > -np.inf) & (log_mass > -np.inf)
        out[~moves] = np.nan
        if flat:
            return out[:, 0]
        return out

    def own_sums(self) -> tuple[float, F64, F64]:
        """Return (cost, row sums, column sums); add up the costs of the axes, with no subtraction."""
        with np.errstate(over="ignore"):
            row, col = (np.exp(own + log_dot(other)) for own, other, log_dot in map(self.halves, (False, True)))
            parts = (np.exp(self.alpha + self.log_dot(self.beta, k)) for k in range(len(self.logs)))
            return float(sum(part.sum() for part in parts)), row, col
