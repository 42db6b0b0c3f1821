"""The problems of a batch: all validation happens here, as problem.py has it for one."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from .backends import host, namespace
from .errors import InfeasibleError
from .penalties import F64
from .problem import (
    MASS_TOLERANCE,
    Problem,
    Side,
    as_array,
    as_cost,
    as_pair,
    as_penalties,
    as_positive,
    as_reference,
    as_side,
    cost_range,
)
from .ranks import ALONE


@dataclasses.dataclass(frozen=True)
class BatchProblem:
    """p validated problems; ``rows`` and ``cols`` are the sides of the first (penalty and reg_m are common)."""

    M: Any  # (m, n), or (p, m, n)
    A: Any  # (p, m) float64, CuPy where one of M, A, B is on a GPU
    B: Any
    rows: Side
    cols: Side
    reg: float
    reference: Any
    M_min: float
    M_max: float
    forbidden: bool
    c_mass: F64

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.M.shape[-2:]
        return m, n

    @property
    def log_reference(self) -> tuple[Any, Any]:
        """(log A, log B) where c = a b^T, else zeros."""
        xp = namespace(self.A)
        if isinstance(self.reference, str) and self.reference == "product":
            with np.errstate(divide="ignore"):
                return xp.log(self.A), xp.log(self.B)
        return xp.zeros_like(self.A), xp.zeros_like(self.B)

    def __getitem__(self, i: int) -> Problem:
        rows, cols = (dataclasses.replace(s, weight=host(w[i])) for s, w in ((self.rows, self.A), (self.cols, self.B)))
        M = self.M if self.M.ndim == 2 else self.M[i]
        mass = float(self.c_mass[i])
        return Problem(M, rows, cols, self.reg, self.reference, self.M_min, self.M_max, self.forbidden, mass)

    def part(self, i0: int, i1: int) -> BatchProblem:
        M = self.M if self.M.ndim == 2 else self.M[i0:i1]
        return dataclasses.replace(self, M=M, A=self.A[i0:i1], B=self.B[i0:i1], c_mass=self.c_mass[i0:i1])

    def transpose(self) -> BatchProblem:
        c = self.reference if isinstance(self.reference, str) else self.reference.T
        return dataclasses.replace(
            self, M=self.M.swapaxes(-1, -2), A=self.B, B=self.A, rows=self.cols, cols=self.rows, reference=c
        )

    @classmethod
    def from_arrays(
        cls, M: Any, A: Any, B: Any, reg: Any, reg_m: Any, penalty: Any, reference: Any, module: ModuleType
    ) -> BatchProblem:
        M, reg = as_costs(M, module), as_positive(reg, "reg")
        (m, n), flat = M.shape[-2:], M.reshape(-1, M.shape[-1])
        A, B = (x if x is None else as_array(x, name, module.asarray) for x, name in ((A, "A"), (B, "B")))
        p, xp = batch_size(M, A, B), namespace(M, A, B)
        (A, mass_a), (B, mass_b) = as_weights(A, p, m, "A", xp), as_weights(B, p, n, "B", xp)
        first_a, first_b = host(A[0]), host(B[0])
        pair, kinds = as_pair(reg_m, "reg_m"), as_penalties(penalty)
        rows = as_side("a", first_a, kinds[0], pair[0], "reg_m[0]")
        cols = as_side("b", first_b, kinds[1], pair[1], "reg_m[1]")
        low, high, forbidden = cost_range(flat, reg, module, ALONE)
        reference, mass = as_reference(reference, flat[:m], first_a, first_b, module)
        if rows.penalty == cols.penalty == "balanced":
            uneven = abs(mass_a - mass_b) > MASS_TOLERANCE * mass_a
            if uneven.any():
                raise InfeasibleError(
                    f"A and B must have equal masses if both sides are balanced: problem {int(uneven.argmax())} has not"
                )
        product = isinstance(reference, str) and reference == "product"
        c_mass = mass_a * mass_b if product else np.full(p, mass)
        return cls(M, A, B, rows, cols, reg, reference, low, high, forbidden, c_mass)


def as_costs(M: Any, module: ModuleType) -> Any:
    """M as (m, n) or, with C-contiguous problems, (p, m, n), in a dtype that the core reads."""
    M = as_array(M, "M", module.asarray)
    if M.ndim != 3:
        if M.ndim != 2:
            raise ValueError(f"M must have shape (m, n) or (p, m, n), got {M.shape}")
        return as_cost(M, module)
    if 0 in M.shape:
        raise ValueError(f"M must not be empty, got shape {M.shape}")
    return as_cost(M.reshape(-1, M.shape[2]), module).reshape(M.shape)


def batch_size(M: Any, A: Any, B: Any) -> int:
    """p: the length of what has a batch dimension; 1 where nothing has."""
    sizes = {name: len(x) for name, x, ndim in (("M", M, 3), ("A", A, 2), ("B", B, 2)) if np.ndim(x) == ndim}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"M, A and B must hold equally many problems, got {sizes}")
    if 0 in sizes.values():
        raise ValueError(f"the batch must not be empty, got {sizes}")
    return next(iter(sizes.values()), 1)


def as_weights(array: Any, p: int, length: int, name: str, xp: Any) -> tuple[Any, F64]:
    """(p, length) float64 weights in xp's memory, and their (p,) masses; one vector serves all, None is uniform."""
    if array is None:
        return xp.full((p, length), 1.0 / length), np.ones(p)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if array.shape not in ((length,), (p, length)):
        raise ValueError(f"{name} must have shape ({p}, {length}) or ({length},), got {array.shape}")
    if xp is np:
        array = np.ascontiguousarray(np.broadcast_to(np.asarray(array, dtype=np.float64), (p, length)))
        with np.errstate(invalid="ignore", over="ignore"):
            mass, least = array.sum(1), array.min(1)
    else:
        from .backends.cuda.batch import weigh  # noqa: PLC0415 - only where arrays are CuPy's

        array, mass, least = weigh(xp.asarray(array), p)
    for wrong, text in ((~np.isfinite(mass), "finite"), (least < 0, ">= 0"), (~(mass > 0), "of positive mass")):
        if wrong.any():
            raise ValueError(f"{name} must be {text}, problem {int(wrong.argmax())} is not")
    return array, mass
