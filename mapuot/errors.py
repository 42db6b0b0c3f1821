"""Warnings and errors of mapuot. Bad arguments raise plain ValueError or TypeError that name the argument."""

import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

OURS = ("mapuot", "ot", "torch", "jax")  # a warning goes to the first caller outside these packages
MOST_SHOWN = 80  # characters of a value in a message
OF_BATCH = {"A": "a", "B": "b"}  # names in `solve_batch`: names in functions that take one problem, too

# set where the caller of a solve tells of what did not converge himself, in his own words
MUTED: ContextVar[bool] = ContextVar("MUTED", default=False)
FOR_VALUE: ContextVar[bool] = ContextVar("FOR_VALUE", default=False)
PROBLEM_NAME: ContextVar[Callable[[int], str]] = ContextVar("PROBLEM_NAME", default="problem {}".format)


class ConvergenceWarning(UserWarning):
    """Warning that a solve ended above its tolerance; the text has the error reached, and a cure.

    See Also
    --------
    solve : warns of it

    Examples
    --------
    >>> import numpy as np, mapuot, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     result = mapuot.solve(np.random.rand(30, 30), reg=0.01, reg_m=1.0, max_passes=2)
    >>> caught[0].category.__name__, result.status
    ('ConvergenceWarning', 'max_passes')
    """


class ScalingWarning(UserWarning):
    """Warning that an answer is right but units look wrong: almost no mass moves, or finite costs stand for inf.

    See Also
    --------
    solve : warns of it

    Examples
    --------
    >>> import numpy as np, mapuot, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     result = mapuot.solve(np.full((3, 3), 100.0), reg=0.1, reg_m=1.0)
    >>> caught[0].category.__name__, result.mass < 1e-4
    ('ScalingWarning', True)
    """


class InfeasibleError(ValueError):
    """Error for a problem without a feasible plan, for example if every pair of a balanced point is forbidden.

    See Also
    --------
    solve : raises it

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> mapuot.solve([[np.inf, np.inf], [0.0, 1.0]], reg=0.1, reg_m=np.inf)
    Traceback (most recent call last):
    mapuot.errors.InfeasibleError: ...
    """


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called mapuot, or that called POT, which called mapuot."""
    level = 1
    frame = sys._getframe(0)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)


@contextmanager
def muted() -> Iterator[None]:
    """Mute warnings of solves in this context, because their caller reports them. Other threads still warn."""
    before = MUTED.set(True)
    try:
        yield
    finally:
        MUTED.reset(before)


@contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """Replace argument names, {ours: the caller's}, in messages that begin with ours."""
    try:
        yield
    except (TypeError, ValueError) as error:
        begin = re.match(r"\w*(,? (and )?\w\b)*", str(error))  # "A", or "M, A and B"
        if begin:
            told = re.findall(r"\w+", begin[0])
        else:
            told = []
        if type(error) not in (TypeError, ValueError, InfeasibleError) or names.keys().isdisjoint(told):
            raise
        raise type(error)(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))) from error


@contextmanager
def for_value(names: dict[str, str]) -> Iterator[None]:
    """Make warnings of solves in this context those of a loss, which returns a value and no plan; see `renamed`."""
    before = FOR_VALUE.set(True)
    try:
        with renamed(names):
            yield
    finally:
        FOR_VALUE.reset(before)


@contextmanager
def problems_named(name: Callable[[int], str]) -> Iterator[None]:
    """Call the problems of batches in this context by these names, in messages."""
    before = PROBLEM_NAME.set(name)
    try:
        yield
    finally:
        PROBLEM_NAME.reset(before)


def name_of_problem(k: int) -> str:
    """Return the name of the k-th problem of a batch, for a message."""
    return PROBLEM_NAME.get()(k)


def shown(value: Any) -> str:
    """Return repr(value) for a message, one short line; its type if repr fails (an int of 5000 digits)."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return cut(" ".join(text.split()))


def cut(text: str) -> str:
    if len(text) <= MOST_SHOWN:
        return text
    return text[: MOST_SHOWN - 3] + "..."


def packed(error: BaseException) -> tuple[bytes, str]:
    """Pack an exception for another process: its text and its class, or the nearest base that takes one text."""
    kinds = type(error).__mro__
    for kind in kinds[: kinds.index(Exception) if Exception in kinds else 0]:
        try:
            kind(str(error))
            return pickle.dumps(kind), str(error)
        except Exception:
            continue
    return pickle.dumps(RuntimeError), f"{kinds[0].__name__}: {error}"


def unpacked(errors: list[tuple[int, tuple[bytes, str]]], size: int) -> Exception:
    """Return the error of the first rank; name the rank unless all ``size`` ranks have the same error."""
    rank, (kind, text) = errors[0]
    if len(errors) < size or any(failed != (kind, text) for _, failed in errors):
        if len(errors) > 1:
            more = f" (and {len(errors) - 1} more)"
        else:
            more = ""
        text = f"rank {rank}{more}: {text}"
    try:
        error = pickle.loads(kind)(text)
    except Exception:  # only that rank knows the class
        error = None
    if isinstance(error, Exception):
        return error
    return RuntimeError(text)
