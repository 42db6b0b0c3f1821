"""Kernels of many marginals: a K and products with it, on logarithms.

    through(y, a, fi):   R_i = log sum_j exp(y_j - C_ij / reg),   x = a - fi R,   log sum_i exp(x_i - C_ij / reg)

K_ij = exp(p_i + q_j - C_ij / reg) absorbs p and q, so that no entry is above 1 and each row and each column has an
entry 1. Sums below ``LEAST`` may miss entries that were flushed to 0. K is then rebuilt around the current y, next in
float64; if that does not suffice, the sums are made from the costs, entry by entry. Each sum comes with a bound on its
rounding. An operator holds K: cpu/operator.py, cuda/operator.py.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..arrays import host, namespace
from ..penalties import F64
from ..problem.cost import Cost
from ..problem.sparse import log_sums

T = TypeVar("T")
UNIT = 2.0**-53
TINY = float(np.finfo(float).tiny)
FLUSH = 1e-150  # factors below it become 0; the largest factor is 1
LEAST = {"float32": 1e-21, "float64": 1e-125, "made": 1e-125}  # least sum: flushed terms are at most n UNIT of it
FLUSH_PRODUCT, LEAST_PRODUCT = 1e-100, 1e-75  # FLUSH and LEAST for products of three factors in float64
SAFE_RANGE = {"float32": 60.0, "float64": 500.0, "made": 500.0}  # largest 2 |C| / reg of a K that absorbs nothing
NARROW_ENTRY = 2.0**-24 + 3e-9  # relative error of an entry in float32: its rounding, and the exponential's error
NARROW_SUMS = 70 * 2.0**-24  # float32 sums of up to 32 terms, and over 64 rows, and the rounding of the factors


class StaleError(ArithmeticError):
    """Sums are so small that some of their terms may have been flushed to 0."""


def sound(product: Callable[[], T], absorb: Callable[[], Any], finer: Callable[[], bool], fresh: bool) -> T:
    """Try a product with the current K, then with K rebuilt around the current state, then with K in a finer storage.

    ``fresh``: K was built around this state already. Raise StaleError if no finer storage is left.
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
    """K of a cost (m, n), held by an operator."""

    builds = 0  # how often K was built for this reg
    absorbed = 0.0  # max |p| + max |q|

    def __init__(self, operator: Any, ends: tuple[float, float], dtype: str = "float64") -> None:
        """Hold no K yet; ``ends``: smallest entry and largest |entry| of the cost; dtype: storage, or "made"."""
        self.asked = operator.open(dtype)
        self.ends = ends
        self.operator: Any = operator
        self.cost: Cost = operator.cost
        self.p = np.zeros(self.cost.shape[0])
        self.q = np.zeros(self.cost.shape[1])
        self.start(operator.reg)

    def start(self, reg: float) -> None:
        """Start again with this reg, in the same memory."""
        self.reg = reg
        self.largest = self.ends[1] / reg
        self.dtype = self.asked
        self.operator.reg = reg
        self.builds, self.absorbed = 0, 0.0

    @property
    def storage(self) -> float:
        """Relative error of an entry by its storage, without the error of its float64 exponent."""
        if self.dtype == "float32":
            return NARROW_ENTRY
        return 0.0

    def absorb(self, y: F64, balanced: bool = True, folded: Callable[[F64], F64] | None = None) -> bool:
        """Build K around the columns' y: p balances the largest term of each row, then q of each column.

        Without ``balanced``, if the storage holds all entries, K is e^(-C / reg) times a constant. Return whether K is
        balanced. ``folded``: maps the columns' largest terms to the part that q absorbs; by default all.
        """
        balanced = balanced or 2 * self.largest > SAFE_RANGE[self.dtype]
        if balanced:
            self.p[:] = 0.0
            top = self.operator.balance(self.p, y)
            self.q = y - (folded(top) if folded else top)
        else:  # entries stay <= 1: larger ones would magnify the terms that FLUSH drops from vectors
            self.p[:] = self.ends[0] / self.reg
            self.q = np.zeros(len(y))
        self.absorbed = largest_of(self.p) + largest_of(self.q)
        if self.operator.stored != self.dtype:
            self.operator.store(self.dtype)
        self.operator.build(self.p, self.q)
        self.builds += 1
        return balanced

    def begin(self) -> None:
        """Build a first K that absorbs nothing, if its storage holds it: no y is needed."""
        if not self.builds and 2 * self.largest <= SAFE_RANGE[self.dtype]:
            self.absorb(self.q, False)

    def finer(self) -> bool:
        """Switch K from float32 to float64; tell whether it was in float32."""
        narrow: bool = self.dtype == "float32"
        self.dtype = "float64" if narrow else self.dtype
        return narrow

    def sound(self, y: F64, product: Callable[[], T]) -> T:
        """Compute a product with a K that suits the columns' y."""
        fresh = not self.builds and self.absorb(y, False)
        return sound(product, lambda: self.absorb(y), self.finer, fresh)

    def through(self, y: F64, a: F64, fi: float, narrow: bool = False) -> tuple[F64, F64, float]:
        """Return R, the columns' log sums, and a bound on the rounding of both; narrow: sum in float32."""
        try:
            R, out = self.sound(y, lambda: self.read(y, a, fi, narrow))
        except StaleError:
            R = self.log_sums(self.cost, y)
            narrow = False
            out = self.log_sums(self.cost.transpose(), a - fi * R)
        sizes = largest_of(y), largest_of(a), largest_of(R), largest_of(out)
        return R, out, self.rounding_through(*sizes, narrow)

    def into_rows(self, y: F64) -> tuple[F64, float]:
        """Return R and a bound on its rounding."""
        try:
            R = self.sound(y, lambda: self.row_sums(y))
        except StaleError:
            R = self.log_sums(self.cost, y)
        return R, self.rounding(largest_of(y) + largest_of(R))

    def rounding_through(self, y: float, a: float, R: float, out: float, narrow: bool) -> float:
        """Bound the rounding of `through` by the largest sizes of its arguments y, a and results R, out."""
        return self.rounding(max(y, a + out) + R) + (NARROW_SUMS if narrow else 0.0)

    def rounding(self, sizes: float) -> float:
        """Bound the rounding of log sums; ``sizes``: the largest sizes of the vectors involved, added up."""
        return UNIT * (4 * (self.absorbed + sizes + self.largest) + sum(self.cost.shape) + 16)

    def read(self, y: F64, a: F64, fi: float, narrow: bool) -> tuple[F64, F64]:
        """Return R and the columns' log sums by one read of the current K; raise StaleError if K does not suit y."""
        v, top = self.factors(y)
        R, sums, own, least = self.read_factors(v, top, a, fi, narrow)
        sums = checked(host(sums), least)
        return R, np.log(sums) + (own - self.q)

    def read_factors(
        self, v: F64, top: float, a: F64, fi: float, narrow: bool, sizes: Any = None
    ) -> tuple[F64, Any, float, float]:
        """Return (R, column sums, their log scale without q, the least valid sum) for y = q + top + log v.

        ``sizes``: v holds factors of these sizes, see `Operator`.
        """
        base = a - (1 - fi) * self.p
        own = float(base.max())
        log_s, sums, largest = self.operator.fused(v, base - own, fi, narrow, sizes)
        self.check_rows(log_s.min())
        return log_s + (top - self.p), sums, own - fi * top, LEAST[self.dtype] * largest

    def check_rows(self, lowest: float) -> None:
        """Raise StaleError if the lowest log s is below log LEAST."""
        if not lowest >= math.log(LEAST[self.dtype]):
            raise StaleError

    def row_sums(self, y: F64) -> F64:
        """Return R with the current K; raise StaleError if K does not suit y."""
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
        return float(self.operator.set_exponents(x, y).own_sums()[0])

    def log_sums(self, cost: Cost, x: F64) -> F64:
        """Return log sum_j exp(x_j - C_ij / reg) for each row of ``cost`` (the cost or its transpose), from entries."""
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
    """Return e^(x - top), with values below ``flush`` set to 0, and top = max x."""
    top = float(x.max())
    v = np.exp(x - top)
    v[v < flush] = 0.0
    return v, top


def check_sums(lowest: float, highest: float, least: float) -> None:
    """Raise StaleError unless all column sums are finite and at least ``least`` > 0."""
    if not (lowest >= least > 0 and highest < math.inf):
        raise StaleError


def checked(sums: F64, least: float) -> F64:
    """Return the column sums; raise StaleError unless all are finite and at least ``least``."""
    check_sums(sums.min(), sums.max(), least)
    return sums


def largest_of(x: F64) -> float:
    return max(float(x.max()), -float(x.min()))


def log_sum(x: F64) -> float:
    top = float(x.max())
    if math.isfinite(top):
        return top + math.log(float(np.exp(x - top).sum()))
    return top


def log_sums_by(label: Any, count: int, x: F64) -> F64:
    """Return log sum e^x over the numbers of each label 0 ... count - 1; every label must occur."""
    top = np.full(count, -np.inf)
    np.maximum.at(top, label, x)
    return np.asarray(top + np.log(np.bincount(label, np.exp(x - top[label]), count)))
