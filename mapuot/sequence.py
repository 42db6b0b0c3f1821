"""Problems that differ in reg and reg_m, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .backends.contract import FAILED
from .result import Result
from .solve import solve


def path(M: Any, a: Any, b: Any, *, regs: Sequence[float], reg_ms: Any, **options: Any) -> Iterator[Result]:
    """Solve a sequence of problems that differ in reg and reg_m, each started from the last answer before it.

    Parameters
    ----------
    M, a, b
        As for :func:`solve`.
    regs : sequence of float
        Entropic regularisations in the order to solve; from large to small is the quick way.
    reg_ms : list, or one value for all
        A list holds one reg_m for each of ``regs``; anything else is the reg_m of all.
    **options
        Whatever else :func:`solve` takes; ``warm_start`` is that of the first problem.

    Yields
    ------
    Result
        One for each reg, as soon as it is solved.

    Raises
    ------
    ValueError
        ``reg_ms`` is a list of another length than ``regs``.
    TypeError
        ``regs`` is no sequence.
    """
    if not hasattr(regs, "__iter__"):
        raise TypeError(f"regs must be a sequence of numbers, got {regs!r}")
    regs = list(regs)
    if not isinstance(reg_ms, list):
        reg_ms = [reg_ms] * len(regs)
    if len(reg_ms) != len(regs):
        raise ValueError(f"reg_ms must have the length of regs, {len(regs)}, got {len(reg_ms)}")
    warm_start = options.pop("warm_start", None)
    for reg, reg_m in zip(regs, reg_ms, strict=True):
        result = solve(M, a, b, reg, reg_m, warm_start=warm_start, **options)
        warm_start = warm_start if result.status in FAILED else result
        yield result
