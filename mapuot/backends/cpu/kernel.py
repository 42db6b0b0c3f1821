"""One kernel and products with it on logarithms, both ways in one read: what a pass over many marginals is made of.

    through(y, a, fi):   R_i = log sum_j exp(y_j - C_ij / reg),   x = a - fi R,   log sum_i exp(x_i - C_ij / reg)

K_ij = exp(p_i + q_j - C_ij / reg), with p and q absorbed so that no entry is above 1 and each row and column has an
entry 1, is stored in float32 or float64; ``through`` is ``mapuot_row_pass`` over it, with ``a`` in the place of what
a prox adds. Sums below ``least`` may miss entries that were flushed: K is then made anew around the y at hand, next
in float64, and where that is not enough, the sums are made entry by entry. What all of this rounds is told beside
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._core import ffi, lib
from ...cost import Cost
from ...penalties import F64
from ...processor import SERIAL_ENTRIES
from ..workspace import STORAGE
from . import native
from .native import check, empty, matrix, padded, pointer

UNIT = 2.0**-53
SAFE_SPREAD = {"float32": 60.0, "float64": 500.0}  # twice the largest |C| / reg that K holds with nothing absorbed
FLUSH = 1e-150  # of factors, the largest of which is 1
LEAST = {"float32": 1e-21, "float64": 1e-125}  # n entries of K below 1.2e-38, or factors below FLUSH, are n UNIT of it
NARROW_ENTRY = 2.0**-24 + 3e-9  # rounded to float32, from an exponential that is good for that
NARROW_SUMS = 70 * 2.0**-24  # of up to 32 terms, and 64 rows, in float32, beside the rounding of the factors
BLOCK_ENTRIES = 1 << 22


class StaleError(ArithmeticError):
    """Sums are so small that some of their terms may have been flushed."""


class Kernel:
    """K of a cost (m, n), rows first; ``largest``: its largest finite entry, in size."""

    def __init__(self, cost: Cost, reg: float, largest: float, dtype: str, threads: int | None = None) -> None:
        self.cost, self.reg, self.largest, self.dtype = cost, reg, largest / reg, dtype
        m, n = cost.shape
        self.pool = native.pool_for(threads, m * n)
        self.p, self.q, self.K = np.zeros(m), np.zeros(n), None
        size, count = padded(n) + native.SCALARS, lib.mapuot_pool_threads(self.pool)
        names = ("weight", "rho", "absorbed", "fi", "base", "log_scale", "scale", "marginal")
        self.sums, self.v, *rows = native.vectors(size, padded(n), *[m] * len(names))
        self.rows = dict(zip(names, rows, strict=True))
        self.partial = empty(size * count if count > 1 else 1)
        self.narrow_v, self.run = empty(padded(n), np.float32), empty(padded(n) * count, np.float32)
        self.run.fill(0)
        self.rows["weight"][:] = self.rows["rho"][:] = 1.0
        state = self.state = ffi.new("mapuot_state *")
        state.m, state.n, state.rows.len, state.rows.penalty = m, n, m, lib.MAPUOT_KL
        state.limits.reg = state.limits.inv_reg = 1.0
        state.sums, state.partial, state.cols.scale = pointer(self.sums), pointer(self.partial), pointer(self.v)
        state.narrow_v, state.run = pointer(self.narrow_v, "float *"), pointer(self.run, "float *")
        state.piped = -1 if m * n > SERIAL_ENTRIES else 0
        for name, array in self.rows.items():
            setattr(state.rows, name, pointer(array))

    @property
    def storage(self) -> float:
        """Relative rounding of an entry where it is stored, beside that of its exponent in float64."""
        return NARROW_ENTRY if self.dtype == "float32" else 0.0

    # ---- K ----

    def absorb(self, y: F64, balanced: bool = True) -> None:
        """K around the columns' y: p from the largest term of each row, q from those of each column beside p."""
        n = self.cost.shape[1]
        if not balanced and 2 * self.largest <= SAFE_SPREAD[self.dtype]:  # it holds all entries as they are
            self.p[:], self.q[:] = 0.0, 0.0
            self.build()
            return
        y, top, part = np.ascontiguousarray(y), np.full(n, -np.inf), np.empty(n)
        self.p[:] = 0.0
        for i0, i1, call in self.blocks():
            check(lib.mapuot_balance(*call, pointer(y), pointer(self.p[i0:i1]), pointer(part)))
            np.maximum(top, part, out=top)
        self.q = y - self.folded(top)
        self.build()

    def folded(self, top: F64) -> F64:
        """What q takes from the columns' largest terms: all of it."""
        return top

    def build(self) -> None:
        m, n = self.cost.shape
        itemsize, state = np.dtype(STORAGE[self.dtype]).itemsize, self.state
        state.ld, state.dtype = native.leading_dimension(n, itemsize), native.DTYPES[self.dtype]
        if self.K is None or self.K.dtype != STORAGE[self.dtype]:
            self.K = None  # the one before goes first
            self.K = empty(m * state.ld, STORAGE[self.dtype])
            state.kernel = pointer(self.K, "void *")
        for i0, i1, call in self.blocks():
            to = ffi.cast("char *", state.kernel) + i0 * state.ld * itemsize
            p, q = pointer(self.p[i0:i1]), pointer(self.q)
            check(lib.mapuot_build_kernel(*call, p, q, state.dtype, to, state.ld))

    def blocks(self) -> Any:
        """(i0, i1, the first arguments of a stream over these rows of the cost)."""
        for i0, i1, C, _ in self.cost.blocks(most=native.call_bytes(self.pool, self.cost)):
            yield i0, i1, (self.pool, *C.shape, matrix(C), matrix(None), self.reg)

    # ---- products ----

    def through(self, y: F64, a: F64, fi: float, narrow: bool = False) -> tuple[F64, F64, float]:
        """(R, what leaves by the columns, bound of the rounding of both); narrow: sums in float32."""
        found = self.tried(y, lambda: self.row_pass(y, a, fi, narrow))
        R, out = found or self.entry_by_entry(y, a, fi)
        return R, out, self.rounding(y, a, R, out) + (NARROW_SUMS if found and narrow else 0.0)

    def into_rows(self, y: F64) -> tuple[F64, float]:
        """(R, bound of its rounding)."""
        found = self.tried(y, lambda: (self.row_dots(y),))
        (R,) = found or (self.log_sums(y),)
        return R, self.rounding(y, R)

    def tried(self, y: F64, product: Any) -> Any:
        """What ``product`` finds with K as it is, made around y, or made in float64; None: with none of them."""
        for remade in (False, True, True):
            try:
                if remade or self.K is None:
                    self.absorb(y, remade)
                return product()
            except StaleError:
                if remade and self.dtype == "float64":
                    return None
                if remade:
                    self.dtype = "float64"
        return None

    def rounding(self, *vectors: F64) -> float:
        sizes = sum(float(np.abs(x).max()) for x in (self.p, self.q, *vectors))
        return UNIT * (4 * (sizes + self.largest) + sum(self.cost.shape) + 16)

    def row_pass(self, y: F64, a: F64, fi: float, narrow: bool) -> tuple[F64, F64]:
        """One read: log scale = base - fi log s, the scales relative to K and to e^own."""
        rows, least, n = self.rows, LEAST[self.dtype], self.cost.shape[1]
        top = self.set_columns(y)
        base = a - (1 - fi) * self.p
        own = float(base.max())
        np.subtract(base, own, out=rows["base"])
        rows["fi"][:] = fi
        self.state.progress.narrow = narrow and self.dtype == "float32"
        self.state.progress.passes ^= 1  # the rows read last come first
        check(lib.mapuot_row_pass(self.pool, self.state))
        sums, scale, r = self.sums[:n], rows["scale"], rows["marginal"]
        if not (r.min() > 1e-280 and r.max() < 1e280):
            R = self.row_dots(y)
        else:
            log_s = np.log(r) - rows["log_scale"]
            if not log_s.min() >= np.log(least):
                raise StaleError
            R = log_s + (top - self.p)
        if not (sums.min() >= least * scale.max() > 0 and sums.max() < np.inf):
            raise StaleError
        return R, np.log(sums) + (own - fi * top - self.q)

    def row_dots(self, y: F64) -> F64:
        top = self.set_columns(y)
        check(lib.mapuot_row_dots(self.pool, self.state))
        s = self.rows["marginal"]
        if not s.min() >= LEAST[self.dtype]:
            raise StaleError
        return np.asarray(np.log(s) + (top - self.p))

    def set_columns(self, y: F64) -> float:
        """v = exp(y - q - top), at most 1."""
        x, n = y - self.q, len(y)
        top = float(x.max())
        np.exp(x - top, out=self.v[:n])
        self.v[:n][self.v[:n] < FLUSH] = 0.0
        return top

    def entry_by_entry(self, y: F64, a: F64, fi: float) -> tuple[F64, F64]:
        R = self.log_sums(y)
        x, total = a - fi * R, np.full(self.cost.shape[1], -np.inf)
        for i0, i1, L in self.logarithms():
            terms = L + x[i0:i1, None]
            top = np.maximum(terms.max(0), -1e300)
            with np.errstate(divide="ignore"):  # of columns that this block does not reach
                np.logaddexp(total, top + np.log(np.exp(terms - top).sum(0)), out=total)
        return R, total

    def log_sums(self, y: F64) -> F64:
        out = np.empty(self.cost.shape[0])
        for i0, i1, L in self.logarithms():
            terms = L + y
            top = terms.max(1)
            out[i0:i1] = top + np.log(np.exp(terms - top[:, None]).sum(1))
        return out

    def logarithms(self) -> Any:
        """Blocks (i0, i1, -C / reg) in float64."""
        m, n = self.cost.shape
        step = max(1, BLOCK_ENTRIES // n)
        for i0 in range(0, m, step):
            i1 = min(i0 + step, m)
            yield i0, i1, np.asarray(self.cost.read(i0, i1), np.float64) / -self.reg

    # ---- the plan ----

    def plan_apply(self, x: F64, y: F64, Y: F64, axis: int) -> F64:
        """P Y (axis 1) or P^T Y (axis 0), P_ij = exp(x_i + y_j - C_ij / reg) from C in float64."""
        m, n = self.cost.shape
        d, x, y = Y.shape[1], np.ascontiguousarray(x), np.ascontiguousarray(y)
        columns = native.zeros(d * padded(n)).reshape(d, -1)
        if axis:
            columns[:, :n] = Y.T
        out, part, Y = np.empty((m, d)), native.zeros(d * padded(n)), np.ascontiguousarray(Y)
        for i0, i1, call in self.blocks():
            arguments = (*call, pointer(x[i0:i1]), pointer(y), d)
            if axis:
                check(lib.mapuot_apply(*arguments, pointer(columns), pointer(out[i0:i1])))
            else:
                check(lib.mapuot_apply_transpose(*arguments, pointer(Y[i0:i1]), pointer(part)))
                columns += part.reshape(d, -1)
        return out if axis else np.ascontiguousarray(columns[:, :n].T)

    def plan_cost(self, x: F64, y: F64) -> float:
        """<P, C> of the same P."""
        total, out = 0.0, np.empty(2)
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        for i0, i1, call in self.blocks():
            check(lib.mapuot_plan_sums(*call, pointer(x[i0:i1]), pointer(y), pointer(out), ffi.NULL, ffi.NULL))
            total += float(out[0])
        return total
