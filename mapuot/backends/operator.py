"""Operator: all products with the matrix of one cost, of whatever kind and backend; its children say how they are made.

Those that hold a K have these words as well:

    balance(alpha, x)   set alpha_i = -max_j (x_j - M_ij / reg), and return max_i (alpha_i + x_j - M_ij / reg) of each
                        column; rows whose alpha is -inf do not count and keep it, rows without a finite entry get +inf
    store(dtype)        make room for K in this storage, "float64", "float32" or "made", another one given back first;
                        ``stored`` is its name, "" while there is none
    build(alpha, beta)  make K of these exponents
    matrix              K where it lies: as a matrix, of stored pairs as a CSR array
    open(dtype)         make ready for ``fused`` and ``dots``, and return the storage that K can have for these
    fused(v, base, fi, narrow, sizes) -> (log s of s = K v, the sums K^T u, the largest u), u = exp(base) s^-fi, by one
                        read of K; the sums hold until the next read, and stay on a GPU if they are many
    dots(v, sizes)      K v; ``sizes``: v holds factors of so many points each, one behind the other, whose product over
                        all pairs, triples and so on is the vector, 0 below FLUSH_PRODUCT of kernel.py
    label(labels)       let passes from here on tell what clusters of rows exchange with columns; None: no longer
    exchanged()         what the last such pass told: each cluster's mass but for a factor; its shares of the columns
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..penalties import F64
from ..problem.cost import Cost
from ..problem.problem import Problem
from ..problem.validate import as_columns
from ..ranks import ALONE, Ranks
from .contract import host, namespace
from .draw import columns_in, runs

BLOCK_BYTES = 1 << 25  # of M that is turned into logarithms at once


class Operator:
    """The matrix c_ij exp(alpha_i + beta_j - M_ij / reg) of one cost; over ranks, the rows of this rank.

    Built, it is the K of passes; with the exponents of potentials (``take``) it is their plan, from M in float64.
    """

    alpha: Any
    beta: Any
    as_columns = staticmethod(as_columns)  # (length, d) factors in the memory of this backend, and whether one vector

    def __init__(self, cost: Cost, reg: float, c: Cost | None = None, ranks: Ranks = ALONE) -> None:
        self.cost, self.reg, self.c, self.ranks = cost, reg, c, ranks
        self.shape, self.dtype = cost.shape, cost.dtype  # of rows of the plan

    def take(self, alpha: Any, beta: Any) -> Any:
        """Be the matrix with these exponents, and return it."""
        self.alpha, self.beta = alpha, beta
        return self

    def apply(self, X: Any, name: str = "X") -> Any:
        """Return P X, of a vector or of columns; ``name`` is the caller's word for X in errors."""
        X, flat = self.as_columns(X, self.shape[1], name)
        return self.told(self.product(X, False), flat)

    def apply_transpose(self, Y: Any) -> Any:
        """Return P^T Y, summed over the ranks."""
        Y, flat = self.as_columns(Y, self.shape[0], "Y")
        return self.told(self.over_ranks(self.product(Y, True)), flat)

    def images(self, Y: Any) -> Any:
        """Return (P Y) / (P 1), both from one product; NaN where there is no mass."""
        Y, flat = self.as_columns(Y, self.shape[1], "Y")
        moved = self.apply(namespace(Y).concatenate([Y, namespace(Y).ones((len(Y), 1))], axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            image = moved[:, :-1] / moved[:, -1:]
        return image[:, 0] if flat else image

    def draw(self, rows: Any, at: F64) -> tuple[Any, Any]:
        """Return (rows, columns), where the caller has M: each row's column at which its mass passes the share ``at``.

        Pairs are drawn from the rows that `plan` makes.
        """
        order, found = np.argsort(rows, kind="stable"), np.empty(len(rows), np.int64)
        ordered, xp = rows[order], self.cost.xp
        for i0, i1 in runs(np.unique(rows), self.shape[1]):
            some = slice(*np.searchsorted(ordered, (i0, i1)))
            if some.start < some.stop:
                block = host(self.plan(i0, i1))
                found[order[some]] = columns_in(block, ordered[some] - i0, at[order[some]])
        return xp.asarray(rows), xp.asarray(found)

    def weighed(self, into: Any) -> Callable[[F64], F64]:
        """Return d -> P^T (into * P d), from the host to the host: the product that Newton's step asks for."""
        return lambda d: np.asarray(host(self.apply_transpose(into * self.apply(d))))

    def told(self, out: Any, flat: bool) -> Any:
        out = self.back(out)
        return out[:, 0] if flat else out

    def sums(self) -> tuple[float, F64, F64]:
        """Return (<P, M>, row sums, column sums), from M in float64: the row sums of this rank, all else of all."""
        cost, row, col = self.own_sums()
        return float(self.ranks.sum(cost)), row, self.ranks.sum(col)

    def logarithms(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        """Yield blocks (i0, i1, -M / reg) of this cost or of its transpose, in float64, where K lies."""
        for i0, i1, M, _ in cost.blocks(most=BLOCK_BYTES):
            yield i0, i1, np.asarray(host(M), np.float64) / -self.reg

    # ---- what a child adds

    plan: Callable[..., Any]  # (i0, i1, out): rows of it in ``dtype``, in ``out`` if given; of a sparse M a CSR array
    product: Callable[[Any, bool], Any]  # (X, turned): P X or, of the rows of this rank, P^T X, (length, d)
    own_sums: Callable[[], tuple[float, F64, F64]]  # `sums` of the rows of this rank

    def back(self, x: Any) -> Any:
        """Bring an array to where the caller has M."""
        return x

    def over_ranks(self, x: Any) -> Any:
        return self.ranks.sum(x)


def parts_of(problem: Problem) -> tuple[Cost, float, Cost | None, Ranks]:
    return problem.cost, problem.reg, problem.c, problem.ranks
