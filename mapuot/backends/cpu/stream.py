"""Streams over M on the CPU: its extrema, and the plan of given potentials, made from M in float64 block by block.

C side: src_c/streams.c. Twin: backends/cuda/stream.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._core import lib
from ...penalties import F64
from ...problem.points import Kept, PointCosts
from ...problem.problem import Problem
from ...problem.sparse import Sparse
from ..stream import StreamedPlan
from .native import DTYPES, call_bytes, check, empty, matrix, padded, pointer, pool_for, zeros


def asarray(x: Any) -> Any:
    return np.asarray(x)


to_numpy = asarray


def extrema(M: Any, threads: int | None = None) -> tuple[float, float, int, int]:
    out = np.empty(4)
    check(lib.mapuot_extrema(pool_for(threads, M.size), *M.shape, matrix(M), pointer(out)))
    low, high, bad, infinite = out.tolist()
    return (low, high, int(bad), int(infinite)) if math.isfinite(low) else (0.0, 0.0, int(bad), int(infinite))


def costs(cloud: PointCosts, threads: int | None = None) -> F64:
    """Form the matrix of points, in float64."""
    m, n = cloud.shape
    pool, out = pool_for(threads, cloud.size), np.empty((m, n))
    for i0, i1, part, _ in cloud.blocks(most=call_bytes(pool, cloud, cloud.dim)):
        check(lib.mapuot_costs(pool, i1 - i0, n, matrix(part), pointer(out[i0:i1])))
    return out


class PlanStream(StreamedPlan):
    """The plan of given potentials, made from M in float64, block by block."""

    def __init__(
        self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None, kept: Kept | None = None
    ) -> None:
        """``kept``: which pairs of points count, where some are skipped."""
        self.problem, self.dtype, self.kept = problem, problem.cost.dtype, kept
        self.alpha, self.beta = problem.exponents(log_u, log_v)
        self.pool = pool_for(threads, problem.cost.size)

    def blocks(self, i0: int, i1: int, d: int = 1) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """(k0, k1, first arguments of a stream over these rows) of the rows i0 to i1, for products with d columns."""
        for k0, k1, M, c in self.problem.blocks(i0, i1, call_bytes(self.pool, self.problem.cost, d)):
            alpha, beta = pointer(self.alpha[k0:k1]), pointer(self.beta)
            yield k0, k1, (self.pool, *M.shape, matrix(M, self.kept), matrix(c), self.problem.reg, alpha, beta)

    def rows_of_plan(self, count: int) -> Any:
        n = self.problem.shape[1]
        try:
            return empty(count * n, self.dtype).reshape(count, n)
        except MemoryError as error:
            size = f"{count * n * self.dtype.itemsize / 2**30:.3g} GiB"
            raise MemoryError(f"{count} rows of the plan need {size}: Result.rows makes fewer") from error

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        n, dtype = self.problem.shape[1], self.dtype
        if self.problem.cost.operator == "pairs":
            return self.pairs_of_plan(self.problem.cost.read(i0, i1), i0, i1)
        out = self.rows_of_plan(i1 - i0) if out is None else out
        for k0, k1, arguments in self.blocks(i0, i1):
            check(lib.mapuot_form_plan(*arguments, DTYPES[dtype.name], pointer(out[k0 - i0 : k1 - i0], "void *"), n))
        return out

    def pairs_of_plan(self, pairs: Sparse, i0: int, i1: int) -> Any:
        """Return rows of the plan as a CSR array, with an entry for every stored pair."""
        out = np.empty(pairs.size, self.dtype)
        for k0, k1, arguments in self.blocks(i0, i1):
            first, last = (int(pairs.start[k - i0] - pairs.start[0]) for k in (k0, k1))
            part = pointer(out[first:last], "void *")
            check(lib.mapuot_form_plan(*arguments, DTYPES[self.dtype.name], part, 0))
        return pairs.with_data(out)

    def product(self, X: Any, turned: bool) -> Any:
        m, n = self.problem.shape
        if turned:
            return self.product_turned(np.ascontiguousarray(X))
        out, Xt = np.empty((m, X.shape[1])), zeros(X.shape[1] * padded(n))
        Xt.reshape(X.shape[1], -1)[:, :n] = X.T
        for i0, i1, arguments in self.blocks(0, m, X.shape[1]):
            check(lib.mapuot_apply(*arguments, X.shape[1], pointer(Xt), pointer(out[i0:i1])))
        return out

    def product_turned(self, Y: F64) -> F64:
        m, n = self.problem.shape
        total, out = zeros(Y.shape[1] * padded(n)), empty(Y.shape[1] * padded(n))
        for i0, i1, arguments in self.blocks(0, m, Y.shape[1]):
            check(lib.mapuot_apply_transpose(*arguments, Y.shape[1], pointer(Y[i0:i1]), pointer(out)))
            total += out
        return np.ascontiguousarray(total.reshape(Y.shape[1], -1)[:, :n].T)

    def own_sums(self) -> tuple[float, F64, F64]:
        m, n = self.problem.shape
        cost, row_sum, total = 0.0, np.empty(m), np.zeros(n)
        out, col_sum = np.empty(2), np.empty(n)
        for i0, i1, arguments in self.blocks(0, m):
            check(lib.mapuot_plan_sums(*arguments, pointer(out), pointer(row_sum[i0:i1]), pointer(col_sum)))
            cost, total = cost + float(out[0]), total + col_sum
        return cost, row_sum, total
