"""The problem: all validation happens here and never later.

    min_P  <P, M> + reg KL(P | c) + D1(P 1 | a) + D2(P^T 1 | b),     KL(p|q) = sum p log(p/q) - p + q

with P = diag(u) K diag(v), K = c exp(-M / reg), and log u, log v in POT's convention (a and b are not in them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from .errors import InfeasibleError
from .penalties import F64, KINDS, dual_term, project
from .ranks import ALONE, Ranks
from .rows import Rows, row_blocks

EXPONENT_ROUNDING = 2.0**-50  # 8 roundings of the terms of log u + log v - M / reg
MASS_TOLERANCE = 1e-6  # relative: float32 weights that were normalised differ by less


@dataclass(frozen=True)
class Side:
    """One marginal: the rows (a) or the columns (b); every array is float64 of length ``len(weight)``."""

    name: str  # "a" or "b", for messages
    weight: F64
    penalty: str
    rho: F64  # reg_m per point, inf = hard; "range": the lower factor
    upper: F64 | None = None  # "range": the upper factor
    ranks: Ranks = ALONE  # that share this side's points

    @cached_property
    def log_weight(self) -> F64:
        with np.errstate(divide="ignore"):
            return np.log(self.weight)

    @cached_property
    def scalar_rho(self) -> float | None:
        """The one rho of a KL or balanced side whose points share it, else None (no translation then)."""
        if self.penalty not in ("kl", "balanced"):
            return None
        low, high = (float(x) for x in self.rho_range)
        return low if low == high else None

    @cached_property
    def rho_range(self) -> tuple[float, float]:
        low, high = self.rho.min(initial=np.inf), self.rho.max(initial=0.0)
        return self.ranks.min(low), self.ranks.max(high)

    @cached_property
    def hard(self) -> Any:
        """Mask of the points with rho = inf."""
        return np.isinf(self.rho)

    @cached_property
    def soft_rho(self) -> F64:
        """rho, 0 where it is inf."""
        return np.where(self.hard, 0.0, self.rho)

    @cached_property
    def largest_soft_rho(self) -> float:
        return float(self.ranks.max(self.soft_rho.max(initial=0.0)))

    @cached_property
    def mass(self) -> float:
        return float(self.ranks.sum(self.weight.sum()))

    def dead_terms(self, dead: Any) -> float:
        """Dual terms of own points that no mass can reach: f = inf."""
        if self.penalty == "range" or not dead.any():
            return 0.0
        f = np.full(int(dead.sum()), np.inf)
        return float(dual_term(self.penalty, f, self.weight[dead], self.rho[dead], None).sum())


@dataclass(frozen=True)
class Problem:
    """One validated problem. ``M`` keeps the caller's memory (any strides) and dtype, float32 or float64."""

    M: Any  # or Rows, read block by block
    rows: Side
    cols: Side
    reg: float
    reference: Any  # "product", "uniform" or an (m, n) array c
    M_min: float
    M_max: float
    forbidden: bool  # some M_ij is inf
    c_mass: float

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.M.shape
        return m, n

    @property
    def ranks(self) -> Ranks:
        """All processes that hold parts of M; everything here is of the own part."""
        return self.rows.ranks.whole

    @property
    def turns(self) -> bool:
        """Whether the columns can be read as rows."""
        return self.ranks.size == 1 and not isinstance(self.M, Rows)

    @cached_property
    def left_out(self) -> tuple[Any, Any]:
        """Masks of the rows and columns whose scaling is 0: no reference mass, or a weight 0 that forbids any."""
        strict = ("kl", "balanced", "range")
        log_a, log_b = self.log_reference
        return (
            np.isneginf(log_a) | ((self.rows.weight == 0) & (self.rows.penalty in strict)),
            np.isneginf(log_b) | ((self.cols.weight == 0) & (self.cols.penalty in strict)),
        )

    def project(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """Potentials put back into the domain of the dual."""
        rows, cols = self.rows, self.cols
        return project(rows.penalty, log_u, rows.rho, self.reg), project(cols.penalty, log_v, cols.rho, self.reg)

    @cached_property
    def log_reference(self) -> tuple[F64, F64]:
        """(log a, log b) where c = a b^T, else zeros: the part of c that is a row and a column scaling."""
        if isinstance(self.reference, str) and self.reference == "product":
            return self.rows.log_weight, self.cols.log_weight
        return np.zeros(self.shape[0]), np.zeros(self.shape[1])

    @property
    def reference_matrix(self) -> Any | None:
        """c where the user gave a matrix, else None."""
        return None if isinstance(self.reference, str) else self.reference

    def transpose(self) -> Problem:
        """The same problem with rows and columns exchanged (a view of M, no copy)."""
        reference = self.reference if isinstance(self.reference, str) else self.reference.T
        return dataclasses.replace(self, M=self.M.T, rows=self.cols, cols=self.rows, reference=reference)

    def exponent_error(self, log_u: F64, log_v: F64) -> float:
        """Relative plan error by the rounding of log u + log v - M / reg, from its largest terms."""
        largest = (float(np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0)) for x in (log_u, log_v))
        return EXPONENT_ROUNDING * float((self.M_max - self.M_min) / self.reg + self.ranks.max(sum(largest)))

    def exponents(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """log u_i + log a_i and log v_j + log b_j, the exponent of the plan but for M and c; -inf where it is 0."""
        with np.errstate(invalid="ignore"):
            alpha, beta = (x + known for x, known in zip((log_u, log_v), self.log_reference, strict=True))
        alpha[~np.isfinite(alpha)] = beta[~np.isfinite(beta)] = -np.inf
        return alpha, beta

    def check_reachable(self, dead_rows: Any, dead_cols: Any) -> None:
        """Raise where mass must be transported from or to a point whose every pair is forbidden (the masks)."""
        for side, dead in ((self.rows, dead_rows), (self.cols, dead_cols)):
            needs = side.rho > 0 if side.penalty == "range" else side.hard
            hard = dead & (side.weight > 0) & needs
            if hard.any():
                point = f"{side.name}[{int(np.argmax(hard))}]"
                raise InfeasibleError(f"M forbids every pair of {point}, which must be transported")

    @classmethod
    def from_arrays(
        cls,
        M: Any,
        a: Any,
        b: Any,
        reg: Any,
        reg_m: Any,
        penalty: Any,
        reference: Any,
        backend: ModuleType,
        ranks: Ranks = ALONE,
        threads: int | None = None,
    ) -> Problem:
        M = as_cost(M, backend, ranks)
        reg = as_positive(reg, "reg")
        m, n = M.shape
        ranks.cols.same(**{"the number of rows of M": m})
        ranks.rows.same(**{"the number of columns of M": n})
        weight_a, weight_b = as_weight(a, m, "a", backend, ranks.rows), as_weight(b, n, "b", backend, ranks.cols)
        pair_m, pair_penalty = as_pair(reg_m, "reg_m"), as_penalties(penalty)
        rows = as_side("a", weight_a, pair_penalty[0], pair_m[0], "reg_m[0]", ranks.rows)
        cols = as_side("b", weight_b, pair_penalty[1], pair_m[1], "reg_m[1]", ranks.cols)
        if rows.penalty == cols.penalty == "balanced":
            check_equal_masses(rows.mass, cols.mass)
        low, high, infinite = cost_range(M, reg, backend, ranks, threads)
        reference, c_mass = as_reference(reference, M, weight_a, weight_b, backend, ranks, threads)
        return cls(M, rows, cols, reg, reference, low, high, infinite, c_mass)


def as_cost(M: Any, backend: ModuleType, ranks: Ranks = ALONE) -> Any:
    whole = getattr(backend, "WHOLE", False)
    if whole and ranks.size > 1:
        raise NotImplementedError(f"backend {backend.__name__.rpartition('.')[2]!r} runs in one process, without comm")
    M = M if isinstance(M, Rows) and not whole else as_array(M, "M", backend.asarray)
    if M.ndim != 2 or M.shape[1] == 0 or ranks.rows.sum(M.shape[0]) == 0:
        raise ValueError(f"M must be a non-empty matrix (m, n), got shape {M.shape}")
    if M.dtype.kind not in "fiu":
        raise TypeError(f"M must hold real numbers, got dtype {M.dtype}")
    return M if isinstance(M, Rows) else as_real(M)


def cost_range(
    M: Any, reg: float, backend: ModuleType, ranks: Ranks, threads: int | None = None
) -> tuple[float, float, bool]:
    """Smallest and largest finite cost, and whether some pair is forbidden."""
    low, high, bad, infinite = backend.extrema(M, threads)
    if bad:
        raise ValueError(f"M must not hold NaN or -inf, got {int(bad)} such entries (+inf forbids a pair)")
    if infinite == M.size:
        low, high = np.inf, -np.inf
    low, high, forbidden = ranks.min(low), ranks.max(high), ranks.max(bool(infinite))
    if not low <= high:
        raise InfeasibleError("M forbids every pair: all its entries are inf")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.array([low, high, high - low]) / reg).all():
            raise ValueError(f"reg must not be so small that M / reg overflows, got {reg} for M in [{low}, {high}]")
    return low, high, forbidden


def as_array(value: Any, name: str, convert: Callable[[Any], Any] = np.asarray) -> Any:
    """``convert(value)`` of a backend; what it would misread in silence, or refuse without the name, is told."""
    if np.ma.is_masked(value):
        raise ValueError(f"{name} must not be masked: fill the masked entries (in M, inf forbids a pair)")
    if hasattr(value, "toarray"):
        raise TypeError(f"{name} must be a dense array, got {type(value).__name__}: pass {name}.toarray()")
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error


def as_real(M: Any) -> Any:
    """M itself where the core can read it, else a copy: float32 or float64, native, aligned, whole strides."""
    if M.dtype.name not in ("float32", "float64"):
        return M.astype("float32" if M.dtype.name == "float16" else "float64")
    whole = all(s % M.itemsize == 0 for s in M.strides) and getattr(M.flags, "aligned", True)
    return M if whole and M.dtype.isnative else M.astype(M.dtype.newbyteorder("="), copy=True)


def as_float(value: Any) -> float:
    """float(value), but TypeError for text."""
    if isinstance(value, (str, bytes)):
        raise TypeError("a number must not be text")
    return float(value)


def as_positive(value: Any, name: str) -> float:
    try:
        number = as_float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a positive finite number, got {value!r}") from error
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive finite number, got {number}")
    return number


def as_vector(value: Any, length: int, name: str) -> F64:
    array = as_array(value, name)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if array.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), got {array.shape}")
    return np.array(array, dtype=np.float64)  # a copy: the caller may reuse his


def as_weight(value: Any, length: int, name: str, backend: ModuleType, ranks: Ranks = ALONE) -> F64:
    """A marginal: finite, >= 0, some mass; None or empty means uniform of mass 1, as in POT."""
    given = None if value is None else as_array(value, name, backend.to_numpy)
    uniform = given is None or given.shape == (0,)
    if ranks.max(length > 0 and uniform):
        ranks.same(**{name + " is None": uniform or length == 0})
        return np.full(length, 1.0 / ranks.sum(length))
    weight = np.zeros(0) if uniform else as_vector(given, length, name)
    if not np.all(np.isfinite(weight)):
        raise ValueError(f"{name} must be finite, got NaN or inf at index {int(np.argmin(np.isfinite(weight)))}")
    if np.any(weight < 0):
        raise ValueError(f"{name} must be >= 0, got {weight.min()} at index {int(np.argmin(weight))}")
    with np.errstate(over="ignore"):
        mass = ranks.sum(weight.sum())
    if not 0 < mass < np.inf:
        raise ValueError(f"{name} must have positive, finite mass, got {mass}")
    return weight


def check_equal_masses(a: float, b: float) -> None:
    if abs(a - b) > MASS_TOLERANCE * a:
        raise InfeasibleError(f"a and b must have equal masses if both sides are balanced, got {a} and {b}")


def as_pair(value: Any, name: str) -> tuple[Any, Any]:
    """A scalar or anything of length 1 or 2 (POT's rule); the members may be per-point vectors."""
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return value, value
    if len(value) not in (1, 2):
        raise ValueError(f"{name} must be a scalar or have length 1 or 2, got length {len(value)}")
    first, *rest = value  # not by index: that of a pandas Series is its own
    return first, rest[0] if rest else first


def as_penalties(value: Any) -> tuple[str, str]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or any(not isinstance(p, str) or p not in KINDS for p in pair):
        raise ValueError(f"penalty must be one of {sorted(KINDS)} or a pair of them, got {value!r}")
    return pair


def as_side(side: str, weight: F64, penalty: str, reg_m: Any, name: str, ranks: Ranks = ALONE) -> Side:
    """One side from its reg_m: a number or one per point; for "range" the slack d: (1 - d) t <= r <= (1 + d) t."""
    if penalty == "balanced":
        return Side(side, weight, penalty, np.full(len(weight), np.inf), ranks=ranks)
    if np.ndim(reg_m) == 0:
        try:
            rho = np.full(len(weight), as_float(reg_m))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a positive number, inf, or one per point, got {reg_m!r}") from error
    else:
        rho = as_vector(reg_m, len(weight), name)
    if penalty == "range":
        if not (np.all(rho >= 0) and np.all(np.isfinite(rho))):
            raise ValueError(f"{name} must be a slack >= 0 for penalty 'range', got {rho.min()}")
        return Side(side, weight, penalty, np.maximum(0.0, 1 - rho), 1 + rho, ranks)
    if not np.all(rho > 0):
        raise ValueError(f"{name} must be > 0 (inf = balanced), got {rho.min()}")
    if ranks.min(bool(np.all(np.isinf(rho)))):
        return Side(side, weight, "balanced", rho, ranks=ranks)
    if penalty in ("tv", "l2") and not np.all(np.isfinite(rho)):
        raise ValueError(f"{name} must be finite for penalty {penalty!r}; use 'balanced' or 'kl' for inf")
    return Side(side, weight, penalty, rho, ranks=ranks)


def as_reference(
    value: Any, M: Any, a: F64, b: F64, backend: ModuleType, ranks: Ranks = ALONE, threads: int | None = None
) -> tuple[Any, float]:
    """The reference measure c and its mass."""
    if isinstance(value, str):
        if value == "product":
            return value, float(ranks.rows.sum(a.sum())) * float(ranks.cols.sum(b.sum()))
        if value == "uniform":
            return value, float(ranks.rows.sum(M.shape[0]) * ranks.cols.sum(M.shape[1]))
        raise ValueError(f"reference must be 'product', 'uniform' or a matrix, got {value!r}")
    streamed = isinstance(value, Rows) and isinstance(M, Rows)
    c = value if streamed else as_array(value, "reference", backend.asarray)
    if c.dtype.kind not in "fiu":
        raise TypeError(f"reference must hold real numbers, got dtype {c.dtype}")
    if c.shape != M.shape:
        raise ValueError(f"reference must have M's shape {M.shape}, got {c.shape}")
    c = c if isinstance(c, Rows) else as_real(c)
    low, high, bad, infinite = backend.extrema(c, threads)
    odd = f" and {bad + infinite} entries that are not finite" if bad or infinite else ""
    if bad or infinite or low < 0 or not ranks.max(high) > 0:
        raise ValueError(f"reference must be finite, >= 0 and not all zero, got range [{low}, {high}]{odd}")
    return c, float(ranks.sum(sum(float(block.sum(dtype="float64")) for _, _, block, _ in row_blocks(c))))


def as_columns(X: Any, length: int, name: str) -> tuple[F64, bool]:
    """(length, d) float64, and whether it came as a vector."""
    X = as_array(X, name)
    if X.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold real numbers, got dtype {X.dtype}")
    X = X.astype(np.float64, copy=False)
    if X.ndim not in (1, 2) or X.shape[0] != length:
        raise ValueError(f"{name} must have shape ({length},) or ({length}, d), got {X.shape}")
    if X.ndim == 2 and X.shape[1] == 0:
        raise ValueError(f"{name} must have a column, got shape {X.shape}")
    return (X[:, None], True) if X.ndim == 1 else (X, False)
