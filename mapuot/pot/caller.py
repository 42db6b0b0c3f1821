"""What the caller hears: warnings at the line of his program, in POT's words."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MUTED, ConvergenceWarning
from ..result import Result, not_converged

OURS = ("mapuot", "ot")  # POT's classes call our functions: their callers are meant
WORDS = ("numItermax", "stopThr")  # for max_passes and tol
NAMES = {"reference": "c", "warm_start": "warmstart", "A": "a", "B": "b"}  # ours, POT's


@contextmanager
def names_of_pot() -> Iterator[None]:
    """What `mapuot` says of an argument, said of POT's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        if name not in NAMES or type(error) not in (TypeError, ValueError):
            raise
        raise type(error)(f"{NAMES[name]} {rest.replace(name + '.', NAMES[name] + '.')}") from error


@contextmanager
def muted() -> Iterator[None]:
    """Solves tell nothing of what did not converge: their caller here does."""
    before = MUTED.set(True)
    try:
        yield
    finally:
        MUTED.reset(before)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line that called into mapuot, or into the part of POT that did."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def warn_not_converged(result: Result, stop: float, words: tuple[str, str]) -> None:
    """Of a certified solve that is not within ``stop``; ``words``: the caller's for passes and stop."""
    if not (result.converged or result.error_bound <= stop):
        warn(not_converged(result, stop, "float64", words), ConvergenceWarning)


def warn_not_stopped(what: str, count: int, err: float, stop: float, words: tuple[str, str], cure: str = "") -> None:
    """Of an iteration whose last change is not below ``stop``."""
    warn(
        f"{what} not converged after {count} iterations: last change {err:.2e} >= {words[1]} {stop:.2e}; "
        f"{cure}raise {words[0]}, reg or {words[1]}",
        ConvergenceWarning,
    )
