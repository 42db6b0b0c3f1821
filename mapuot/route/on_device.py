"""Make the Problem of a plain call on a GPU with the few checks that such arguments need.

Plain: an array on the device, masses in floating point or none, KL or balanced sides of one reg_m each, c = a b^T. What
is odd goes through problem/validate.py, which names what is wrong. From the Problem on, the way is the same.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import numpy as np

from ..backends import Options, host, namespace, pick
from ..problem.cost import Dense
from ..problem.problem import Problem
from ..problem.side import Side
from .plain import number, penalties_of, settings, side_of


def plain_problem(
    M: Any, a: Any, b: Any, reg: Any, reg_m: Any, arguments: tuple[Any, ...]
) -> tuple[ModuleType, Problem, Options] | None:  # fmt: skip
    """Return (backend, problem, options) of a plain problem on a device, None where it is another one.

    ``arguments``: what `settings` in plain.py takes.
    """
    reg, rho = number(reg), penalties_of(reg_m)
    if namespace(M) is np or rho is None or not 0 < reg < math.inf or rho[0] == rho[1] == math.inf:
        return None
    if M.ndim != 2 or M.dtype.char not in "fd" or not (M.flags.c_contiguous and M.size):
        return None
    try:
        options = settings(*arguments, where=("auto", "cuda"))
    except TypeError:  # something that is not hashable
        return None
    rows, cols = (given_side(*x) for x in (("a", a, M.shape[0], rho[0]), ("b", b, M.shape[1], rho[1])))
    if options is None or rows is None or cols is None:
        return None
    backend, mass = pick("cuda"), rows.mass * cols.mass
    cost = Dense(backend.asarray(M))
    low, high, bad, infinite = cost.range(backend)
    if bad or infinite or not all(map(math.isfinite, (low / reg, high / reg, (high - low) / reg, mass))):
        return None
    return backend, Problem(cost, rows, cols, reg, "product", low, high, False, mass), options


FEW_POINTS = 1 << 14  # of a side that is kept for later calls: with more points a solve takes long anyway


@functools.lru_cache(maxsize=64)
def known_side(name: str, weight: bytes | int, rho: float) -> Side | None:
    """Return a side of these float64 masses, or of so many equal ones, with all that was asked of it.

    Calls may share it, since nothing writes into a side, and with it a workspace.
    """
    weights = np.full(weight, 1.0 / weight) if isinstance(weight, int) else np.frombuffer(weight).copy()
    return side_of(name, weights, rho) if weights.min() > 0 and weights.sum() < math.inf else None


def given_side(name: str, weight: Any, length: int, rho: float) -> Side | None:
    """Return a side, None where its masses have to be converted or refused, which is done on the ordinary way."""
    if weight is None:
        return known_side(name, length, rho)
    if not hasattr(weight, "dtype") or weight.shape != (length,) or weight.dtype.kind != "f":
        return None
    known = known_side if length <= FEW_POINTS else known_side.__wrapped__
    return known(name, np.asarray(host(weight), np.float64).tobytes(), rho)
