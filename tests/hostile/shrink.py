"""A failing trial made small: fewer problems, points and options, rounder numbers, while the same kind of claim fails.

Nothing is random here, so that ranks which share a trial shrink it in step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .problem import Problem
from .trial import BATCHES, Trial

TRIES = 400
DEFAULTS = ("threads", "method", "precision", "tol_gap", "max_passes", "tol", "numItermax", "stopThr")


def shrunk(trial: Trial, fails: Callable[[Trial], bool], tries: int = TRIES) -> Trial:
    """The smallest trial found for which ``fails`` still holds."""
    changed = True
    while changed and tries > 0:
        changed = False
        for step in STEPS:
            again = True
            while again and tries > 0:
                again = False
                for candidate in step(trial):
                    tries -= 1
                    if tries <= 0:
                        break
                    if fails(candidate):
                        trial, changed, again = candidate, True, True
                        break
    return trial


def each(trial: Trial, change: Callable[[Problem], Problem]) -> Trial:
    """The same change made to every problem, the one that a warm start comes from, too."""
    start = change(trial.start) if isinstance(trial.start, Problem) else trial.start
    return trial.replace(problems=tuple(map(change, trial.problems)), start=start)


def fewer_problems(trial: Trial) -> Iterator[Trial]:
    for k in range(len(trial.problems) if len(trial.problems) > 1 else 0):
        start = trial.start
        if trial.how in BATCHES and isinstance(start, tuple):
            start = tuple(np.delete(x, k, 0) for x in start)
        yield trial.replace(problems=trial.problems[:k] + trial.problems[k + 1 :], start=start)


def fewer_options(trial: Trial) -> Iterator[Trial]:
    for name in DEFAULTS:
        if name in trial.options:
            yield trial.replace(options={k: v for k, v in trial.options.items() if k != name})


def cut(x: Any, i: int, axis: int = 0) -> Any:
    return np.delete(x, i, axis) if isinstance(x, np.ndarray) and x.ndim > axis else x


def without(trial: Trial, k: int, i: int) -> Trial:
    def change(p: Problem) -> Problem:
        rho = tuple(cut(r, i) if side == k else r for side, r in enumerate(p.reg_m))
        weights = {"a": cut(p.a, i)} if k == 0 else {"b": cut(p.b, i)}
        points = p.points and tuple(cut(z, i) if side == k else z for side, z in enumerate(p.points))
        return p.replace(M=cut(p.M, i, k), points=points, reg_m=rho, reference=cut(p.reference, i, k), **weights)

    less = each(trial, change)
    if isinstance(trial.start, tuple):
        pair = list(trial.start)
        pair[k] = np.delete(pair[k], i, -1)
        less = less.replace(start=tuple(pair))
    return less


def fewer_points(trial: Trial) -> Iterator[Trial]:
    for k, size in enumerate(trial.problems[0].shape):
        for i in range(size - 1, -1, -1) if size > 1 else ():
            yield without(trial, k, i)


def plainer(trial: Trial) -> Iterator[Trial]:
    """The usual penalty, reference, dtype, scalar reg_m, unit masses."""
    first = trial.problems[0]
    if not isinstance(first.reference, str):
        yield each(trial, lambda p: p.replace(reference="uniform"))
    if not isinstance(first.reference, str) or first.reference == "uniform":
        yield each(trial, lambda p: p.replace(reference="product"))
    if first.M.dtype == np.float32:
        yield each(trial, lambda p: p.replace(M=p.M.astype(float)))
    for k in (0, 1):
        if np.ndim(first.reg_m[k]):
            yield each(trial, lambda p, k=k: with_rho(p, k, float(np.max(p.reg_m[k]))))
            yield each(trial, lambda p, k=k: with_rho(p, k, float(np.min(p.reg_m[k]))))
        if first.penalty[k] != "kl":
            yield each(trial, lambda p, k=k: with_kl(p, k))
    for name in ("a", "b"):
        if any((getattr(p, name) != 1).any() for p in trial.problems):
            yield each(trial, lambda p, name=name: p.replace(**{name: np.ones_like(getattr(p, name))}))
    yield from plainer_start(trial)


def plainer_start(trial: Trial) -> Iterator[Trial]:
    if trial.start is None:
        return
    yield trial.replace(start=None, how={"warm": "cold"}.get(trial.how, trial.how))
    if isinstance(trial.start, tuple):
        for k in (0, 1):
            for value in (0.0, float(np.max(trial.start[k])), float(np.min(trial.start[k]))):
                pair = list(trial.start)
                pair[k] = np.full_like(pair[k], value)
                if not np.array_equal(pair[k], trial.start[k]):
                    yield trial.replace(start=tuple(pair))


def with_rho(p: Problem, k: int, rho: float) -> Problem:
    return p.replace(reg_m=tuple(rho if side == k else r for side, r in enumerate(p.reg_m)))


def with_kl(p: Problem, k: int) -> Problem:
    rho = p.reg_m[k] if p.penalty[k] != "range" else p.reg
    changed = p.replace(penalty=tuple("kl" if side == k else x for side, x in enumerate(p.penalty)))
    return with_rho(changed, k, np.inf if p.penalty[k] == "balanced" else rho)


def round_to(x: Any, digits: int) -> Any:
    """So many significant digits."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        size = 10.0 ** (np.floor(np.log10(np.abs(np.where(np.isfinite(x) & (x != 0), x, 1)))) - digits + 1)
        rounded = np.where(np.isfinite(x) & (x != 0), np.round(x / size) * size, x)
    rounded = np.vectorize(lambda v: float(f"{v:.{digits}g}"), otypes=[float])(rounded) if rounded.size else rounded
    return rounded.astype(x.dtype) if x.ndim else float(rounded)


def rounder(trial: Trial) -> Iterator[Trial]:
    for digits in (1, 2, 3):
        for name in ("M", "a", "b", "reg", "reference"):
            yield from differing(trial, lambda p, d=digits, name=name: rounded(p, name, d))
        for k in (0, 1):
            yield from differing(trial, lambda p, d=digits, k=k: rounded_rho(p, k, d))
        for k in (0, 1) if isinstance(trial.start, tuple) else ():
            pair = list(trial.start)
            pair[k] = round_to(pair[k], digits)
            if not np.array_equal(pair[k], trial.start[k]):
                yield trial.replace(start=tuple(pair))
        for name in ("tol", "tol_gap", "stopThr"):
            value = trial.options.get(name)
            if value is not None and round_to(value, digits) != value:
                yield trial.replace(options={**trial.options, name: round_to(value, digits)})
    yield from differing(trial, lambda p: p.replace(M=p.M - p.M.min()))


def rounded(p: Problem, name: str, digits: int) -> Problem:
    value = getattr(p, name)
    return p if isinstance(value, str) else p.replace(**{name: round_to(value, digits)})


def rounded_rho(p: Problem, k: int, digits: int) -> Problem:
    return p.replace(reg_m=tuple(round_to(r, digits) if side == k else r for side, r in enumerate(p.reg_m)))


def differing(trial: Trial, change: Callable[[Problem], Problem]) -> Iterator[Trial]:
    """The changed trial, if anything differs."""
    changed = each(trial, change)
    pairs = zip(trial.problems, changed.problems, strict=True)
    names = [f.name for f in dataclasses.fields(Problem)]

    def flat(p: Problem) -> list[Any]:
        return [np.asarray(y).tolist() for name in names for y in _parts(getattr(p, name))]

    if any(flat(p) != flat(q) for p, q in pairs):
        yield changed


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def rounder_entries(trial: Trial) -> Iterator[Trial]:
    """Single entries of M, a and b: 0 or 1."""
    if trial.problems[0].M.size > 36:
        return
    for name, values in (("M", (0.0, 1.0)), ("a", (1.0,)), ("b", (1.0,))):
        for at in np.ndindex(np.shape(getattr(trial.problems[0], name))):
            here = float(getattr(trial.problems[0], name)[at])
            for value in values if here not in values else ():

                def change(p: Problem, name: str = name, at: Any = at, value: float = value) -> Problem:
                    x = getattr(p, name).copy()
                    x[at] = value
                    return p.replace(**{name: x})

                yield each(trial, change)


STEPS = (fewer_problems, fewer_options, fewer_points, plainer, rounder, rounder_entries)
