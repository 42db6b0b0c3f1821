"""Backends: each has one `backend`, an object of class `Backend` (../contract.py), for its own arrays.

``reference`` is the oracle: numpy, float64, log domain, slow and obvious. ``cpu`` calls src_c, ``cuda`` calls src_cuda.
workspace.py has the code that both share. No backend depends on the loop that calls it.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..arrays import is_on_device, register_arithmetic
from ..contract import Backend, Options, Stats
from ..errors import shown
from ..problem.cost import cost_of

BACKENDS = ("auto", "cpu", "cuda", "reference")
register_arithmetic(f"{__name__}.cuda.vectors")


def pick(backend: str, *arrays: Any) -> Backend:
    """Return the backend by name; "auto" picks "cuda" only if some array or cloud lies on a GPU."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {shown(backend)}")
    if backend == "auto":
        if any(is_on_device(cost_of(x)) for x in arrays):
            backend = "cuda"
        else:
            backend = "cpu"
    return load(backend)


@cache
def load(backend: str) -> Backend:
    """Import a backend; a failed import raises its error again at each call."""
    try:
        found: Backend = import_module(f"{__name__}.{backend}").backend
    except ModuleNotFoundError as error:
        if error.name != "mapuot._core":
            raise
        raise ImportError(
            f"mapuot's C library is not built in {Path(__file__).parent.parent}: if mapuot is installed elsewhere, "
            "start Python in another folder; else run pip install -e . there"
        ) from error
    return found
