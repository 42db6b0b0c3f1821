"""Kernels of many marginals: a K and products with it, on logarithms.

    through(y, a, fi):   R_i = log sum_j exp(y_j - C_ij / reg),   x = a - fi R,   log sum_i exp(x_i - C_ij / reg)

K_ij = exp(p_i + q_j - C_ij / reg) holds absorbed p and q, so that no entry is above 1 and each row and each column
has an entry 1. Sums below ``LEAST`` may miss entries that were flushed: K is then made anew around the y at hand,
next in float64, and where that is not enough, the sums are made from the costs, entry by entry. A bound of what all of
this rounds is told beside the sums. An operator holds K: cpu/operator.py, cuda/operator.py.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..penalties import F64
from ..problem.cost import Cost
from ..problem.sparse import log_sums
from .contract import host, namespace

T = TypeVar("T")
UNIT, TINY = 2.0**-53, float(np.finfo(float).tiny)
FLUSH = 1e-150  # of factors, the largest of which is 1
LEAST = {"float32": 1e-21, "float64": 1e-125, "made": 1e-125}  # of sums: what is flushed is then n UNIT at most
FLUSH_PRODUCT, LEAST_PRODUCT = 1e-100, 1e-75  # as FLUSH and LEAST, for products of three factors in float64
HOST_ENTRIES = 1 << 18  # sums on a GPU up to so many come to the host together with those of the rows
SAFE_SPREAD = {"float32": 60.0, "float64": 500.0, "made": 500.0}  # 2 |C| / reg that K holds with nothing absorbed
NARROW_ENTRY = 2.0**-24 + 3e-9  # rounded to float32, from an exponential that is good for that
NARROW_SUMS = 70 * 2.0**-24  # of up to 32 terms, and 64 rows, in float32, beside the rounding of the factors


class StaleError(ArithmeticError):
    """Sums are so small that some of their terms may have been flushed."""


def sound(product: Callable[[], T], absorb: Callable[[], Any], finer: Callable[[], bool], fresh: bool) -> T:
    """Find a product with K as it is, with K made around the state at hand, or with K of a finer kind.

    ``fresh``: K is that of the state already. StaleError where no finer kind is left.
    """
    while True:
        try:
            return product()
        except StaleError:
            if fresh and not finer():
                raise
        absorb()
        fresh = True


class LogKernel:
    """K of a cost (m, n), rows first, which an operator holds."""

    builds = 0  # how often K was made for this reg
    absorbed = 0.0  # the largest of p and of q

    def __init__(self, operator: Any, ends: tuple[float, float], dtype: str = "float64") -> None:
        """Hold no K yet; ``ends``: the least entry of the cost, and the largest in size; dtype: storage, or "made"."""
        self.asked, self.ends = operator.open(dtype), ends
        self.operator: Any = operator
        self.cost: Cost = operator.cost
        self.p, self.q = np.zeros(self.cost.shape[0]), np.zeros(self.cost.shape[1])
        self.start(operator.reg)

    def start(self, reg: float) -> None:
        """Begin anew with this reg, in the memory of another."""
        self.reg, self.largest, self.dtype = reg, self.ends[1] / reg, self.asked
        self.operator.reg = reg
        self.builds, self.absorbed = 0, 0.0

    @property
    def storage(self) -> float:
        """Relative rounding of an entry where it is stored, beside that of its exponent in float64."""
        return NARROW_ENTRY if self.dtype == "float32" else 0.0

    def absorb(self, y: F64, balanced: bool = True, folded: Callable[[F64], F64] | None = None) -> bool:
        """Make K around the columns' y: p from the largest term of each row, q from those of each column beside p.

        Not balanced, where its storage holds all entries, it is e^(-C / reg) but for a factor. Returned is whether it
        is balanced. ``folded``: what q takes from the columns' largest terms, if not all of it.
        """
        balanced = balanced or 2 * self.largest > SAFE_SPREAD[self.dtype]
        if balanced:
            self.p[:] = 0.0
            top = self.operator.balance(self.p, y)
            self.q = y - (folded(top) if folded else top)
        else:  # above 1, entries would bring back what is flushed of vectors
            self.p[:], self.q = self.ends[0] / self.reg, np.zeros(len(y))
        self.absorbed = largest_of(self.p) + largest_of(self.q)
        if self.operator.stored != self.dtype:
            self.operator.store(self.dtype)
        self.operator.build(self.p, self.q)
        self.builds += 1
        return balanced

    def begin(self) -> None:
        """Make a first K with nothing absorbed, where its storage holds that: it needs no y."""
        if not self.builds and 2 * self.largest <= SAFE_SPREAD[self.dtype]:
            self.absorb(self.q, False)

    def finer(self) -> bool:
        """Go over to float64, if K is in float32."""
        narrow: bool = self.dtype == "float32"
        self.dtype = "float64" if narrow else self.dtype
        return narrow

    def sound(self, y: F64, product: Callable[[], T]) -> T:
        """Find a product with a K that holds the columns' y."""
        fresh = not self.builds and self.absorb(y, False)
        return sound(product, lambda: self.absorb(y), self.finer, fresh)

    def through(self, y: F64, a: F64, fi: float, narrow: bool = False) -> tuple[F64, F64, float]:
        """Return R, what leaves by the columns, and a bound of the rounding of both; narrow: sums in float32."""
        try:
            R, out = self.sound(y, lambda: self.read(y, a, fi, narrow))
        except StaleError:
            R, narrow = self.log_sums(self.cost, y), False
            out = self.log_sums(self.cost.transpose(), a - fi * R)
        sizes = largest_of(y), largest_of(a), largest_of(R), largest_of(out)
        return R, out, self.rounding_through(*sizes, narrow)

    def into_rows(self, y: F64) -> tuple[F64, float]:
        """Return R and a bound of its rounding."""
        try:
            R = self.sound(y, lambda: self.row_sums(y))
        except StaleError:
            R = self.log_sums(self.cost, y)
        return R, self.rounding(largest_of(y) + largest_of(R))

    def rounding_through(self, y: float, a: float, R: float, out: float, narrow: bool) -> float:
        """Bound the rounding of what ``through`` returns, by the largest sizes of what it takes and returns."""
        return self.rounding(max(y, a + out) + R) + (NARROW_SUMS if narrow else 0.0)

    def rounding(self, sizes: float) -> float:
        """Bound the rounding of sums between vectors whose largest sizes add up to ``sizes``."""
        return UNIT * (4 * (self.absorbed + sizes + self.largest) + sum(self.cost.shape) + 16)

    def read(self, y: F64, a: F64, fi: float, narrow: bool) -> tuple[F64, F64]:
        """Return R and what leaves by the columns, by one read of K as it is; StaleError where K does not hold y."""
        v, top = self.factors(y)
        R, sums, own, least = self.read_factors(v, top, a, fi, narrow)
        sums = checked(host(sums), least)
        return R, np.log(sums) + (own - self.q)

    def read_factors(
        self, v: F64, top: float, a: F64, fi: float, narrow: bool, sizes: Any = None
    ) -> tuple[F64, Any, float, float]:
        """Return (R, sums, their log scale beside q, the least that they may be) of columns e^(q + top) v.

        ``sizes``: v holds factors of such sizes, see `Operator`.
        """
        base = a - (1 - fi) * self.p
        own = float(base.max())
        log_s, sums, largest = self.operator.fused(v, base - own, fi, narrow, sizes)
        self.check_rows(log_s.min())
        return log_s + (top - self.p), sums, own - fi * top, LEAST[self.dtype] * largest

    def check_rows(self, lowest: float) -> None:
        """Raise StaleError where the lowest log s is so low."""
        if not lowest >= math.log(LEAST[self.dtype]):
            raise StaleError

    def row_sums(self, y: F64) -> F64:
        """Return R with K as it is; StaleError where K does not hold y."""
        v, top = self.factors(y)
        with np.errstate(divide="ignore"):
            log_s = np.log(self.operator.dots(v))
        self.check_rows(log_s.min())
        return np.asarray(log_s + (top - self.p))

    def factors(self, y: F64) -> tuple[F64, float]:
        """Return (v, top) with y = q + top + log v, v at most 1."""
        return scaled(y - self.q, FLUSH)

    def plan_cost(self, x: F64, y: F64) -> float:
        """Return <P, C> of the plan P_ij = exp(x_i + y_j - C_ij / reg)."""
        return float(self.operator.take(x, y).own_sums()[0])

    def log_sums(self, cost: Cost, x: F64) -> F64:
        """Return log sum_j exp(x_j - C_ij / reg) of the rows of this cost, or of its transpose, entry by entry."""
        if cost.operator == "pairs":
            return log_sums(cost.pairs, x, self.reg)
        out = np.empty(cost.shape[0])
        for i0, i1, L in self.operator.logarithms(cost):
            xp = namespace(L)
            terms = L + xp.asarray(x)
            top = terms.max(1)
            out[i0:i1] = host(top + xp.log(xp.exp(terms - top[:, None]).sum(1)))
        return out


def scaled(x: F64, flush: float = FLUSH_PRODUCT) -> tuple[F64, float]:
    """Return e^(x - top), what lies below ``flush`` as 0, and top, the largest x."""
    top = float(x.max())
    v = np.exp(x - top)
    v[v < flush] = 0.0
    return v, top


def check_sums(lowest: float, highest: float, least: float) -> None:
    """Raise StaleError where sums of columns are not all within what they may be."""
    if not (lowest >= least > 0 and highest < math.inf):
        raise StaleError


def checked(sums: F64, least: float) -> F64:
    """Return sums of columns that are all ``least`` at least; else raise StaleError."""
    check_sums(sums.min(), sums.max(), least)
    return sums


def largest_of(x: F64) -> float:
    return max(float(x.max()), -float(x.min()))


def log_sum(x: F64) -> float:
    top = float(x.max())
    return top + math.log(float(np.exp(x - top).sum())) if math.isfinite(top) else top


def log_sums_by(label: Any, count: int, x: F64) -> F64:
    """Return log sum e^x of the numbers with each of the labels 0 ... count - 1, which all occur."""
    top = np.full(count, -np.inf)
    np.maximum.at(top, label, x)
    return np.asarray(top + np.log(np.bincount(label, np.exp(x - top[label]), count)))
