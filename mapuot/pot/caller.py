"""What the caller hears: warnings at the line of his program, in POT's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..answer.result import Result
from ..errors import MUTED, ConvergenceWarning, warn
from ..status import Words, not_converged

WORDS = Words("numItermax", "stopThr")
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


def warn_not_converged(result: Result, stop: float, words: Words) -> None:
    """Of a certified solve that is not within ``stop``; ``words``: the caller's for passes and stop."""
    if not (result.converged or result.error_bound <= stop):
        warn(not_converged(result, stop, words=words), ConvergenceWarning)
