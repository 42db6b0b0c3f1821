"""The records that Python shares with the kernels, as numpy dtypes that are read from the kernels' source text.

Every member is 8 bytes wide (a double, an int64_t, a pointer or a record of these), so that no compiler adds padding.
Sources: src_c/common/record.h, which cffi reads too, and src_cuda/.
"""

import functools
import re
from functools import cache
from typing import Any

import numpy as np

from ..contract import Stats
from ..enums import source_path
from ..status import STATUSES

WIDTHS = {"double": np.float64, "int64_t": np.int64}
RECORD = re.compile(r"struct\s*(\w*)\s*(?::\s*(\w+)\s*)?\{([^{}]*)\}\s*(\w*)\s*;")


@cache
def read(*files: str) -> dict[str, np.dtype[Any]]:
    """Read the records of these files in order, by name; a record may contain records declared before it."""
    text = "".join(source_path(file).read_text(encoding="utf-8") for file in files)
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    sizes = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)\s", text)}
    found: dict[str, np.dtype[Any]] = {}
    for name, base, body, alias in RECORD.findall(text):
        if base:
            fields: Any = found[base].fields
        else:
            fields = {}
        members = [(key, field[0]) for key, field in fields.items()]
        try:
            members += [member for line in body.split(";") if line.strip() for member in declared(line, found, sizes)]
        except (KeyError, ValueError):
            continue  # a record for the device only, with members of other types
        found[name or alias] = np.dtype(members)
    return found


def declared(line: str, found: dict[str, np.dtype[Any]], sizes: dict[str, int]) -> list[tuple[Any, ...]]:
    """Return the members of one declaration: (name, dtype) or, for an array, (name, dtype, length)."""
    kind, declarators = re.fullmatch(r"\s*(?:const\s+)?((?:struct\s+)?\w+)\s*(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
    members: list[tuple[Any, ...]] = []
    for declarator in declarators.split(","):
        star, name, length = re.fullmatch(r"\s*(\*?)\s*(\w+)\s*(?:\[(.*)\])?\s*", declarator).groups()  # type: ignore[union-attr]
        if star:
            dtype: Any = np.uint64
        elif kind in WIDTHS:
            dtype = WIDTHS[kind]
        else:
            dtype = found[kind]
        count = 1
        for factor in (length or "").split("*") if length else ():
            count *= sizes[factor.strip()] if factor.strip() in sizes else int(factor)
        members.append((name, dtype, count) if length else (name, dtype))
    return members


COMMON = read("common/record.h")
STATS = COMMON["mapuot_stats"]

# the values of mapuot_status, in order
STATUS = (*STATUSES[:6], "running")
ABSORB, COARSE = 2, 6  # values that a workspace handles itself; passes go on after COARSE
RUNNING, CONVERGED, STALLED = 0, 1, 3  # at CONVERGED and STALLED a GPU's kernels make no more passes


def stats_of(table: Any, first: int) -> list[Stats]:
    """Convert records of passes to `Stats`; ``first`` is the number of the first pass."""
    return [
        Stats(i, gap, error, dual, mass, residual, rejected > 0, STATUS[int(status)])
        for i, (gap, error, dual, mass, residual, _, _, rejected, status) in enumerate(table.tolist(), first)
    ]


def put(record: Any, values: dict[str, Any]) -> None:
    """Set named members of a cffi or NumPy record: a device array gives its address, None gives a null pointer."""
    if isinstance(record, (np.ndarray, np.void)):
        store = record.__setitem__
    else:
        store = functools.partial(setattr, record)
    for name, value in values.items():
        store(name, 0 if value is None else getattr(getattr(value, "data", None), "ptr", value))
