"""Make POT itself run on mapuot: every module of ``ot`` that holds one of its functions gets ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import stand_in

OWN_METHOD = {  # of the functions of one method; the others are told it
    "sinkhorn_unbalanced": None,
    "sinkhorn_unbalanced2": None,
    "sinkhorn_knopp_unbalanced": "sinkhorn",
    "sinkhorn_stabilized_unbalanced": "sinkhorn_stabilized",
    "sinkhorn_unbalanced_translation_invariant": "sinkhorn_translation_invariant",
    "barycenter_unbalanced": None,
    "barycenter_unbalanced_sinkhorn": "sinkhorn",
    "barycenter_unbalanced_stabilized": "sinkhorn_stabilized",
}

installed: dict[str, tuple[Any, Any]] = {}  # name: (POT's function, the one in its place)


def patch() -> None:
    """Put mapuot's functions in the place of POT's, wherever a module of ``ot`` holds them.

    After it ``ot.sinkhorn_unbalanced``, ``ot.unbalanced``, ``ot.da.UnbalancedSinkhornTransport`` and
    ``ot.solve(..., unbalanced=...)`` run on mapuot. Names that a program imported from ``ot`` before the call keep
    POT's functions. ImportError is raised where POT is not installed.
    """
    if installed:
        return
    import ot  # noqa: PLC0415 - an optional dependency

    for name, own in OWN_METHOD.items():
        kind = stand_in.of_barycenter if name.startswith("bary") else stand_in.of_sinkhorn
        theirs = getattr(ot.unbalanced, name)
        installed[name] = theirs, kind(theirs, own)
    exchange({id(theirs): ours for theirs, ours in installed.values()})


def unpatch() -> None:
    """Undo `patch`; does nothing where POT is not patched."""
    exchange({id(ours): theirs for theirs, ours in installed.values()})
    installed.clear()
    stand_in.told.clear()


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
