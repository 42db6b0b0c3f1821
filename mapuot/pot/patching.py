"""Make POT itself run on mapuot: every module of ``ot`` that holds one of its functions gets ours."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import barycenter, mm, sinkhorn

installed: dict[str, tuple[Any, Any]] = {}  # name: (POT's function, the one in its place)


def patch() -> None:
    """Put mapuot's functions in the place of POT's, wherever a module of ``ot`` holds them.

    After it ``ot.sinkhorn_unbalanced``, ``ot.unbalanced``, ``ot.da.UnbalancedSinkhornTransport`` and
    ``ot.solve(..., unbalanced=...)`` run on mapuot. Names that a program imported from ``ot`` before the call
    keep POT's functions. Where POT's meaning depends on an argument that the caller left out, the patched
    function keeps it: for several b an unnamed reg_type is "entropy". Calling it twice does nothing more.

    Raises
    ------
    ImportError
        POT is not installed.
    """
    if installed:
        return
    import ot  # noqa: PLC0415 - an optional dependency

    for name, function in replacements().items():
        installed[name] = (getattr(ot.unbalanced, name), function)
    exchange({id(theirs): ours for theirs, ours in installed.values()})


def unpatch() -> None:
    """Undo `patch`; does nothing where POT is not patched."""
    exchange({id(ours): theirs for theirs, ours in installed.values()})
    installed.clear()


@contextmanager
def patched() -> Iterator[None]:
    """``with patched():`` - POT runs on mapuot inside; an earlier `patch` stays in force afterwards."""
    before = bool(installed)
    patch()
    try:
        yield
    finally:
        if not before:
            unpatch()


def exchange(new_of: dict[int, Any]) -> None:
    """Replace each function, told by its id, in every loaded module of POT."""
    for name, module in list(sys.modules.items()):
        if name == "ot" or name.startswith("ot."):
            for key, value in list(vars(module).items()):
                if id(value) in new_of:
                    setattr(module, key, new_of[id(value)])


def replacements() -> dict[str, Callable[..., Any]]:
    ours: dict[str, Callable[..., Any]] = {
        name: pots_default(getattr(sinkhorn, name))
        for name in (
            "sinkhorn_unbalanced",
            "sinkhorn_unbalanced2",
            "sinkhorn_stabilized_unbalanced",
            "sinkhorn_unbalanced_translation_invariant",
        )
    }
    ours["sinkhorn_knopp_unbalanced"] = pots_default(knopp_with_method)
    for name in (
        "barycenter_unbalanced",
        "barycenter_unbalanced_sinkhorn",
        "barycenter_unbalanced_stabilized",
    ):
        ours[name] = getattr(barycenter, name)
    ours["mm_unbalanced"], ours["mm_unbalanced2"] = mm.mm_unbalanced, mm.mm_unbalanced2
    return ours


def pots_default(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with POT's rule for several b: an unnamed reg_type means "entropy" (with our warning)."""
    names = list(inspect.signature(function).parameters)[5:]

    @functools.wraps(function)
    def call(a: Any, b: Any, M: Any, reg: Any, reg_m: Any, *args: Any, **kwargs: Any) -> Any:
        if np.ndim(b) == 2 and "reg_type" not in {*names[: len(args)], *kwargs}:
            kwargs["reg_type"] = "entropy"
        return function(a, b, M, reg, reg_m, *args, **kwargs)

    return call


@functools.wraps(sinkhorn.sinkhorn_knopp_unbalanced)
def knopp_with_method(*args: Any, method: str | None = "sinkhorn", **kwargs: Any) -> Any:
    """``ot.solve`` hands its ``method`` on to this function: with None there is no method named."""
    if method is None:
        kwargs = inspect.signature(sinkhorn.sinkhorn_knopp_unbalanced).bind(*args, **kwargs).arguments
        return sinkhorn.sinkhorn_unbalanced(**kwargs)
    return sinkhorn.sinkhorn_knopp_unbalanced(*args, **kwargs)
