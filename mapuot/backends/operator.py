"""CostOperator: what the operators of all backends and costs do alike; a child says how products are made."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..penalties import F64
from ..problem.cost import Cost
from ..problem.problem import Problem
from ..ranks import ALONE, Ranks
from .contract import host
from .draw import Drawn

BLOCK_BYTES = 1 << 25  # of M that is turned into logarithms at once


class CostOperator(Drawn):
    """The matrix c_ij exp(alpha_i + beta_j - M_ij / reg) of one cost; over ranks, the rows of this rank."""

    alpha: Any
    beta: Any

    def __init__(self, cost: Cost, reg: float, c: Cost | None = None, ranks: Ranks = ALONE) -> None:
        self.cost, self.reg, self.c, self.ranks = cost, reg, c, ranks
        self.shape, self.dtype = cost.shape, cost.dtype  # of rows of the plan

    def take(self, alpha: Any, beta: Any) -> Any:
        """Be the matrix with these exponents, and return it."""
        self.alpha, self.beta = alpha, beta
        return self

    def apply(self, X: Any, name: str = "X") -> Any:
        """Return P X, of a vector or of columns."""
        X, flat = self.as_columns(X, self.shape[1], name)
        return self.told(self.product(X, False), flat)

    def apply_transpose(self, Y: Any) -> Any:
        """Return P^T Y, summed over the ranks."""
        Y, flat = self.as_columns(Y, self.shape[0], "Y")
        return self.told(self.over_ranks(self.product(Y, True)), flat)

    def weighed(self, into: Any) -> Callable[[F64], F64]:
        """Return d -> P^T (into * P d), from the host to the host: the product that Newton's step asks for."""
        return lambda d: np.asarray(host(self.apply_transpose(into * self.apply(d))))

    def told(self, out: Any, flat: bool) -> Any:
        out = self.back(out)
        return out[:, 0] if flat else out

    def sums(self) -> tuple[float, F64, F64]:
        """Return (cost, row sums, column sums): the row sums of this rank, all else of all ranks."""
        cost, row, col = self.own_sums()
        return float(self.ranks.sum(cost)), row, self.ranks.sum(col)

    def logarithms(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        """Yield blocks (i0, i1, -M / reg) of this cost or of its transpose, in float64, where K lies."""
        for i0, i1, M, _ in cost.blocks(most=BLOCK_BYTES):
            yield i0, i1, np.asarray(host(M), np.float64) / -self.reg

    # ---- what a backend adds: see `Operator` in contract.py

    def product(self, X: Any, turned: bool) -> Any:
        raise NotImplementedError

    def own_sums(self) -> tuple[float, F64, F64]:
        raise NotImplementedError

    def back(self, x: Any) -> Any:
        """Bring an array to where the caller has M."""
        return x

    def over_ranks(self, x: Any) -> Any:
        return self.ranks.sum(x)


def parts_of(problem: Problem) -> tuple[Cost, float, Cost | None, Ranks]:
    """Return what an operator is made of."""
    return problem.cost, problem.reg, problem.c, problem.ranks
