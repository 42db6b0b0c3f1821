"""Operator: all products with the matrix of one cost of any kind; subclasses make the products for their backend.

An operator that holds a K has these members as well:

    balance(alpha, x)   set alpha_i = -max_j (x_j - M_ij / reg), and return max_i (alpha_i + x_j - M_ij / reg) for each
                        column; a row with alpha = -inf keeps it and does not count; a row without a finite entry gets
                        +inf
    store(dtype)        allocate K in this storage, "float64", "float32" or "made", after freeing the old one;
                        ``stored`` is the storage, "" before the first
    build(alpha, beta)  make K with these exponents
    matrix              K on its device: a matrix, or a CSR array for stored pairs
    open(dtype)         prepare ``fused`` and ``dots``, and return the storage that K can have for these
    fused(v, base, fi, narrow, sizes) -> (log s of s = K v, the sums K^T u, the largest u), u = exp(base) s^-fi, by one
                        read of K; the sums are valid until the next read, and stay on a GPU if they are many
    dots(v, sizes)      K v; ``sizes``: v holds factors of these lengths, one behind the other; the vector is their
                        outer product, with values below FLUSH_PRODUCT of kernel.py set to 0
    log_matmul          the backend's function of this name
    arrays              the Backend that finds the range of M
    label(labels)       make later passes find the mass between clusters of rows and columns; None: stop this
    exchanged()         results of the last labelled pass: each cluster's mass times a common factor, and the shares of
                        the columns in it
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..cached import cached_property
from ..contract import Backend
from ..penalties import F64
from ..problem.cost import Cost
from ..problem.problem import Problem
from ..problem.sparse import is_sparse, log_sums
from ..problem.validate import as_columns
from ..ranks import ALONE, Ranks
from .conditional import LEAST, MOST, joined, largest, mean_of_rows, scaled_rows
from .draw import columns_in, runs
from .kernel import UNIT

BLOCK_BYTES = 1 << 25  # bytes of M that are turned into logarithms at once
MOST_DENSE = 4096  # stored pairs of more points are not copied into a dense K, to look at its eigenvalues
LEAST_SUM = 1e-250  # terms below the range of float64 are no part of such a sum
SAFE = 600.0  # a float64 product of exponentials does not underflow if exponents differ by fewer nats


class Operator:
    """The matrix c_ij exp(alpha_i + beta_j - M_ij / reg) of one cost; over ranks, the rows of this rank.

    `build` stores it as the K of passes. `set_exponents` with the exponents of potentials makes it their plan: float64,
    from M.
    """

    alpha: Any
    beta: Any
    PIECE = 1 << 18  # exponents of a block, which fits into a cache
    as_columns = staticmethod(as_columns)  # (length, d) factors in this backend's memory; was the input one vector?

    def __init__(self, cost: Cost, reg: float, c: Cost | None = None, ranks: Ranks = ALONE) -> None:
        self.cost, self.reg, self.c, self.ranks = cost, reg, c, ranks
        self.shape, self.dtype = cost.shape, cost.dtype  # dtype: of the plan's rows

    def set_exponents(self, alpha: Any, beta: Any) -> Any:
        """Set the exponents, and return this operator."""
        self.alpha, self.beta = alpha, beta
        return self

    def apply(self, X: Any, name: str = "X") -> Any:
        """Return P X for a vector or columns X; ``name`` is the caller's name of X in error messages."""
        X, flat = self.as_columns(X, self.shape[1], name)
        return self.to_caller(self.product(X, False), flat)

    def apply_transpose(self, Y: Any) -> Any:
        """Return P^T Y, summed over the ranks."""
        Y, flat = self.as_columns(Y, self.shape[0], "Y")
        return self.to_caller(self.over_ranks(self.product(Y, True)), flat)

    def moved(self, X: Any, turned: bool) -> Any:
        """Return P X or P^T X for columns X, in this backend's memory."""
        X, _ = self.as_columns(X, self.shape[not turned], "X")
        found = self.product(X, turned)
        if turned:
            return self.over_ranks(found)
        return found

    def images(self, X: Any, turned: bool = False, stays: bool = False) -> Any:
        """Return the mean of X under the conditional plan of each row: (P X) / (P 1), both from one product.

        If the sums of a row (a column, if ``turned``) underflow, average by its exponents. ``stays``: a row whose plan
        underflows to 0 moves no mass instead. The result is NaN where no mass moves.
        """
        X, flat = self.as_columns(X, self.shape[not turned], "Y")
        X = namespace(X).concatenate([X, namespace(X).ones((len(X), 1))], axis=1)
        if turned:
            moved = self.apply_transpose(X)
        else:
            moved = self.apply(X)
        with np.errstate(invalid="ignore", divide="ignore"):
            image = moved[:, :-1] / moved[:, -1:]
            mass = host(moved[:, -1])
        lost = ~((mass > LEAST) & (mass < MOST)) & (host(self.beta if turned else self.alpha) > -np.inf)
        some = np.flatnonzero(lost & (mass > 0) if stays else lost)
        if len(some):
            xp = namespace(image)
            if turned:
                means = self.columns_by_exponents(some, host(X))
            else:
                means = self.rows_by_exponents(some, host(X))
            image[xp.asarray(some)] = xp.asarray(means)
        if flat:
            return image[:, 0]
        return image

    def rows_by_exponents(self, rows: Any, X: F64) -> F64:
        """Return the means of X[:, :-1] under the conditional plans of these sorted rows; X[:, -1] is 1."""
        out = np.empty((len(rows), X.shape[1] - 1))
        for some, block in self.exponents_of(rows):
            out[some], _ = mean_of_rows(block, X)
        return out

    def exponents_of(self, rows: Any) -> Iterator[tuple[slice, Any]]:
        """Yield (places in the sorted ``rows``, their exponents), block by block."""
        for i0, i1 in runs(np.unique(rows), self.shape[1]):
            some = slice(*np.searchsorted(rows, (i0, i1)))
            if some.start < some.stop:
                block = self.exponents(i0, i1)
                yield some, block[(np if is_sparse(block) else namespace(block)).asarray(rows[some] - i0)]

    def columns_by_exponents(self, columns: Any, X: F64) -> F64:
        """Return the means of X[:, :-1] under the conditional plans of these columns, over all ranks."""
        top = np.full(len(columns), -np.inf)
        sums = np.zeros((len(columns), X.shape[1]))
        alpha = host(self.alpha)
        for i0, i1 in self.pieces():
            block = self.exponents(i0, i1)
            if is_sparse(block):
                block.data += np.repeat(alpha[i0:i1], np.diff(block.indptr))
                block = block[:, columns].T.tocsr()
            else:
                block = (host(block[:, namespace(block).asarray(columns)]) + alpha[i0:i1, None]).T
            block, high = scaled_rows(block)
            top, sums = joined(top, sums, high, block @ X[i0:i1])
        high = np.asarray(self.ranks.max(top))
        sums = np.asarray(self.ranks.sum(joined(high, np.zeros_like(sums), top, sums)[1]))
        with np.errstate(invalid="ignore"):
            return np.asarray(sums[:, :-1] / sums[:, -1:])

    def top_k(self, k: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield (first row, columns, log P) of the k largest entries of each row, block by block; -inf where P is 0."""
        for i0, i1 in self.pieces():
            block = self.exponents(i0, i1)
            index, log = largest(block, k)
            alpha = host(self.alpha[i0:i1])
            with np.errstate(invalid="ignore"):  # inf - inf in rows of a failed solve
                yield i0, index, log + namespace(log).asarray(alpha)[:, None]

    def draw(self, rows: Any, at: F64) -> tuple[Any, Any]:
        """Return (rows, columns) on M's device: the first column where a row's cumulated mass exceeds the share ``at``.

        The masses come from the rows that `plan` makes.
        """
        order = np.argsort(rows, kind="stable")
        found = np.empty(len(rows), np.int64)
        ordered = rows[order]
        xp = self.cost.xp
        for i0, i1 in runs(np.unique(rows), self.shape[1]):
            some = slice(*np.searchsorted(ordered, (i0, i1)))
            if some.start < some.stop:
                block = host(self.plan(i0, i1))
                found[order[some]] = columns_in(block, ordered[some] - i0, at[order[some]])
        return xp.asarray(rows), xp.asarray(found)

    def draw_by_exponents(self, rows: Any, at: F64) -> tuple[Any, Any]:
        """Do the same as `draw` from exponents, which also serves rows with a mass outside the range of float64."""
        order = np.argsort(rows, kind="stable")
        found = np.empty(len(rows), np.int64)
        ordered = rows[order]
        xp = self.cost.xp
        for some, block in self.exponents_of(ordered):
            weights = host(scaled_rows(block)[0])
            found[order[some]] = columns_in(weights, np.arange(weights.shape[0]), at[order[some]])
        return xp.asarray(rows), xp.asarray(found)

    def weighed(self, into: Any) -> Callable[[F64], F64]:
        """Return d -> P^T (into * P d) with d and the result on the host: the product that Newton's step needs."""
        return lambda d: np.asarray(host(self.apply_transpose(into * self.apply(d))))

    def to_caller(self, out: Any, flat: bool) -> Any:
        out = self.back(out)
        if flat:
            return out[:, 0]
        return out

    def sums(self) -> tuple[float, F64, F64]:
        """Return (<P, M>, row sums, column sums) from M in float64; row sums are this rank's, the others global."""
        cost, row, col = self.own_sums()
        return float(self.ranks.sum(cost)), row, self.ranks.sum(col)

    def sums_and_products(self, X: Any, Y: Any) -> tuple[tuple[float, F64, F64], Any, Any]:
        """Return `sums`, P X and P^T Y for columns X and Y; both products are in this backend's memory."""
        return self.sums(), self.moved(X, False), self.moved(Y, True)

    def logarithms(self, cost: Cost) -> Iterator[tuple[int, int, Any]]:
        """Yield blocks (i0, i1, -M / reg) of ``cost`` (the cost or its transpose), in float64, on K's device."""
        for i0, i1, M, _ in cost.blocks(most=BLOCK_BYTES):
            yield i0, i1, np.asarray(host(M), np.float64) / -self.reg

    def exponents(self, i0: int, i1: int) -> Any:
        """Return beta_j + log c_ij - M_ij / reg of these rows: log P_ij less alpha_i, in float64; -inf where P is 0.

        The result is a new array (i1 - i0, n), or a CSR array for stored pairs.
        """
        n = self.shape[1]
        beta = host(self.beta)
        pairs = self.cost.operator == "pairs"
        x = np.empty(self.cost.place(i1, n) - self.cost.place(i0, n))
        for k0, k1, M, c in self.cost.blocks(self.c, i0, i1):
            part = x[slice(*(self.cost.place(k, n) - self.cost.place(i0, n) for k in (k0, k1)))]
            if pairs:
                costs = host(M.data)  # M may be float32: its products would lose digits
            else:
                part = part.reshape(-1, n)
                costs = self.costs_of(M)
            np.multiply(costs, -1.0 / self.reg, out=part, dtype=np.float64)
            part += beta[M.column] if pairs else beta
            if c is not None:
                with np.errstate(divide="ignore"):
                    part += np.log(c.data if pairs else np.asarray(host(c)), dtype=np.float64)
        if pairs:
            return self.cost.read(i0, i1).with_data(x)
        return x.reshape(-1, n)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield row ranges (i0, i1) with about PIECE exponents each."""
        if self.cost.operator == "pairs":
            return ((i0, i1) for i0, i1, *_ in self.cost.blocks(most=self.PIECE * self.cost.dtype.itemsize))
        m = self.shape[0]
        step = max(1, self.PIECE // self.shape[1])
        return ((i0, min(i0 + step, m)) for i0 in range(0, m, step))

    def costs_of(self, M: Any) -> Any:
        """Return rows of M as an array of the host."""
        return host(M)

    # ---- products on logarithms, for barycenters

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The smallest M / reg, and the distance from it to the largest."""
        low, high = self.cost.finite_range(self.arrays)[:2]
        return low / self.reg, (high - low) / self.reg

    @cached_property
    def unabsorbed(self) -> Any:
        """K that absorbs only a constant, so that its largest entry is 1."""
        self.open("float64")
        self.store("float64")
        self.build(np.full(self.shape[0], self.ends[0]), np.zeros(self.shape[1]))
        return self.matrix

    def times(self, x: F64, turned: bool) -> F64:
        """Return x K^T, or x K if ``turned``, for vectors x (p, n) on the host, where the product lies again."""
        if turned:
            K = self.unabsorbed
        else:
            K = self.unabsorbed.T
        return np.asarray(host(namespace(K).asarray(x) @ K))

    @cached_property
    def both_ways(self) -> tuple[Any, Any]:
        """The costs by row and by column; for a dense cost -M / reg instead."""
        if self.cost.operator == "pairs":
            costs: Any = self.cost
        else:
            blocks = [L for _, _, L in self.logarithms(self.cost)]
            costs = namespace(blocks[0]).concatenate(blocks)
        return costs, costs.transpose()

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """A lower bound on the least eigenvalue of the symmetric K, and its least diagonal entry; largest entry 1.

        The bound is -inf unless K is positive definite up to rounding, and for more than MOST_DENSE points of stored
        pairs.
        """
        pairs = self.cost.operator == "pairs"
        if pairs and self.shape[0] > MOST_DENSE:
            return -math.inf, 0.0
        if pairs:
            K = self.unabsorbed.toarray()
        else:
            K = host(self.unabsorbed)
        return least_eigenvalue(K, UNIT * (4 * sum(map(abs, self.ends)) + 4)), float(K.diagonal().min())

    def log_products(self, x: F64, turned: bool = False) -> F64:
        """Return log(K e^x) or log(K^T e^x) for vectors x (p, n), K = exp(-M / reg); -inf at points without a pair.

        Use one product with K; where a sum is so small that terms may have underflowed, take out maxima.
        """
        top = x.max(axis=1, keepdims=True)
        least = x.min(axis=1, keepdims=True)
        if least.min() == -np.inf:
            top = np.where(np.isneginf(top), 0.0, top)
            least = np.where(np.isneginf(x), top, x).min(axis=1, keepdims=True)
        sums = self.times(np.exp(x - top), turned)
        if (top - least).max() + self.ends[1] < SAFE or sums.min() > LEAST_SUM:
            return np.asarray(np.log(sums) + (top - self.ends[0]))
        if self.cost.operator == "pairs":
            return np.stack([log_sums(self.both_ways[turned], one, self.reg) for one in x])
        L = self.both_ways[turned]
        xp = namespace(L)
        logs = xp.ascontiguousarray(L[None])
        columns = xp.asarray(np.ascontiguousarray(x.T))
        return np.ascontiguousarray(host(self.log_matmul(logs, columns, False, None)[0]).T)

    def apart(self, error: float) -> float:
        """Bound how far row and column sums are from the sums of one K, from the ``error`` of its exponents."""
        return 0.0

    # ---- supplied by subclasses

    plan: Callable[..., Any]  # (i0, i1, out) -> the plan's rows in ``dtype``, in ``out`` if given; sparse: CSR
    product: Callable[[Any, bool], Any]  # (X, turned) -> P X, or this rank's part of P^T X; (length, d)
    own_sums: Callable[[], tuple[float, F64, F64]]  # `sums` over the rows of this rank
    open: Callable[[str], str]
    store: Callable[[str], None]
    build: Callable[[F64, F64], None]
    log_matmul: Callable[..., Any]
    arrays: Backend
    matrix: Any

    def back(self, x: Any) -> Any:
        """Move an array to the device of M."""
        return x

    def over_ranks(self, x: Any) -> Any:
        return self.ranks.sum(x)


def parts_of(problem: Problem) -> tuple[Cost, float, Cost | None, Ranks]:
    return problem.cost, problem.reg, problem.c, problem.ranks


def least_eigenvalue(K: F64, error: float) -> float:
    """Return a lower bound on the least eigenvalue of a matrix with these entries, of relative error ``error``.

    A Cholesky factor of K - s proves that the eigenvalues are at least s, up to rounding: n (n + 2) units of the
    largest diagonal entry (Higham, Accuracy and Stability, Theorem 10.3). Without a factor return -inf.
    """
    from scipy.linalg import cho_solve  # noqa: PLC0415 - on first use

    n = len(K)
    rounding = 4 * UNIT * n * (n + 2) * float(K.diagonal().max()) + error * float(K.sum(1).max())
    if factor_of(K, rounding) is None:
        return -math.inf
    factor = factor_of(K, -2 * rounding)
    if factor is None:
        return -2 * rounding
    x = np.random.default_rng(0).normal(size=n)
    for _ in range(30):  # inverse iteration
        x = cho_solve(factor, x / np.linalg.norm(x), check_finite=False)
    estimate = 1 / float(np.linalg.norm(x))
    shifts = (s for s in (0.9 * estimate, 0.5 * estimate, 0.1 * estimate) if factor_of(K, -s - 2 * rounding))
    return next(shifts, 0.0) + rounding


def factor_of(K: F64, shift: float) -> Any:
    """Return the Cholesky factor of K + shift, for `cho_solve`; None if there is none."""
    from scipy.linalg import cho_factor  # noqa: PLC0415 - on first use

    shifted = K.copy()
    shifted[np.diag_indices(len(K))] += shift
    try:
        return cho_factor(shifted, overwrite_a=True, check_finite=False)
    except np.linalg.LinAlgError:
        return None
