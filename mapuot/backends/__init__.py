"""Backends: each supplies the words of contract.py over its own arrays.

``reference`` is the oracle: numpy, float64, log domain, slow and obvious. ``cpu`` stands on src_c, ``cuda`` on
src_cuda. What the two share is in workspace.py; none of them knows of the loop that uses it.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import shown
from ..problem.cost import cost_of
from .contract import Options, Stats, host, is_on_device, name_of, namespace

BACKENDS = ("auto", "cpu", "cuda", "reference")


def pick(backend: str, *arrays: Any) -> ModuleType:
    """The backend module by name; "auto" asks where arrays and points lie, and never wakes a GPU for numpy ones."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {shown(backend)}")
    if backend == "auto":
        backend = "cuda" if any(is_on_device(cost_of(x)) for x in arrays) else "cpu"
    return load(backend)


@cache
def load(backend: str) -> ModuleType:
    """The module itself; a failure is told again at the next call."""
    try:
        return import_module(f"{__name__}.{backend}")
    except ModuleNotFoundError as error:
        if error.name != "mapuot._core":
            raise
        raise ImportError(
            f"mapuot's C library is not built in {Path(__file__).parent.parent}: if mapuot is installed elsewhere, "
            "start Python in another folder; else run pip install -e . there"
        ) from error
