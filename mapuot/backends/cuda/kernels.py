"""The device code: one source string a kernel file, compiled once for its options, and the shape that fits a problem.

The text of the headers goes into the source, so that CuPy's cache sees every edit. Nothing here needs a GPU but
``module`` and what is built on it. Twin of src_c/dispatch.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .. import records
from ..contract import MEMORY, PAD, memory_of

SOURCE = records.SOURCE
STORES = {"float64": 0, "float32": 1, "bfloat16": 2}
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}
THREADS, MAX_SLOTS, SCALARS, BLOCKS = 512, 32, 7, 256
POSTS, CLUSTERS = 128, 64  # numbers that a block posts at most; clusters of a coarse correction
SOLO_COLUMNS = THREADS  # up to here every block does the whole finish_pass for itself
UNSET = 0xFFF4FFF400000000  # a number that no block has posted yet (common.cuh)

RECORDS = records.read("common/record.h", "state.cuh", "batch.cuh")
STATE, PROGRESS, TRACE = RECORDS["State"], RECORDS["Progress"], records.STATS
MASK = records.COMMON["mapuot_mask"]
VIEW = records.read("common/record.h", "stream.cu")["View"]


def memory_for(m: int, n: int, itemsize: int) -> int:
    """Anderson differences that the kernels have room for: 20, or 5 where a pass is short beside more of them."""
    return MEMORY[n > SOLO_COLUMNS and memory_of(MEMORY[1], m, itemsize) > MEMORY[0]]


def line(memory: int) -> int:
    """LINE of finish_column.cuh: columns that a block has in hand at once."""
    return THREADS * MEMORY[0] // memory


@dataclass(frozen=True)
class Shape:
    """How row_pass lies on the device: GW warps of a group own tiles of R rows, CPT columns a thread."""

    GW: int
    CPT: int
    R: int
    CLUSTER: int = 1

    @property
    def width(self) -> int:
        return 32 * self.GW * self.CPT * self.CLUSTER

    @property
    def groups(self) -> int:
        return 16 // self.GW

    def tile_bytes(self, ld: int, itemsize: int) -> int:
        columns = -(-(ld // PAD) // self.CLUSTER) * PAD
        return self.R * columns * itemsize


# the narrowest that covers a row is used; NARROW: float32 sums, which leave registers for more columns a thread
NARROW_SHAPES = (
    Shape(1, 4, 4), Shape(2, 4, 4), Shape(4, 4, 4), Shape(2, 8, 4), Shape(4, 8, 4), Shape(8, 8, 4), Shape(8, 12, 4),
    Shape(16, 8, 4), Shape(16, 12, 2), Shape(16, 16, 2), Shape(16, 20, 2), Shape(16, 12, 4, 2), Shape(16, 16, 2, 2),
    Shape(16, 20, 2, 2), Shape(16, 12, 4, 4), Shape(16, 16, 2, 4), Shape(16, 12, 4, 8), Shape(16, 16, 2, 8),
)  # fmt: skip
WIDE_SHAPES = (
    Shape(1, 4, 4), Shape(2, 4, 4), Shape(4, 4, 4), Shape(4, 8, 4), Shape(8, 8, 4), Shape(16, 8, 4), Shape(16, 12, 4),
    Shape(16, 8, 4, 2), Shape(16, 12, 4, 2), Shape(16, 8, 4, 4), Shape(16, 12, 4, 4), Shape(16, 8, 4, 8),
    Shape(16, 12, 4, 8), Shape(16, 16, 2, 8),
)  # fmt: skip
PORTABLE_SHAPES = (
    Shape(1, 4, 2), Shape(2, 4, 2), Shape(4, 4, 2), Shape(4, 8, 2), Shape(8, 8, 2), Shape(16, 8, 2), Shape(16, 12, 1),
    Shape(16, 16, 1),
)  # fmt: skip


def portable_shape(ld: int, dtype: str) -> Shape | None:
    """A block that covers a row; None where a row is too wide for it."""
    chunk = 16 // ITEMSIZE[dtype]
    return next((s for s in PORTABLE_SHAPES if s.width >= ld and s.CPT % chunk == 0), None)


def shape_for(ld: int, dtype: str, narrow: bool = False) -> Shape | None:
    """The narrowest shape that covers a row; None where no persistent kernel does."""
    chunk = 16 // ITEMSIZE[dtype]
    shapes = NARROW_SHAPES if narrow else WIDE_SHAPES
    fitting = [shape for shape in shapes if shape.width >= ld and shape.CPT % chunk == 0]
    if not fitting:
        return None
    shape = fitting[0]
    if dtype == "float64":
        return replace(shape, R=max(1, shape.R // 2))
    if dtype == "bfloat16" and narrow:  # a step takes as many bytes as in float32
        return replace(shape, R=4 if shape.width <= 1024 else 2 * shape.R)
    return shape


def shape_options(shape: Shape, dtype: str, kl: tuple[bool, bool], **more: int) -> dict[str, int]:
    """The compiler's -D options of row_pass and finish_pass."""
    lie = {"GW": shape.GW, "CPT": shape.CPT, "R": shape.R, "CLUSTER": shape.CLUSTER}
    return lie | {"STORE": STORES[dtype], "KL_ROWS": int(kl[0]), "KL_COLS": int(kl[1])} | more


def small_options(shape: tuple[int, int], narrow: bool) -> dict[str, int]:
    """How K lies in the registers of a block: 16 lanes share a row, GROUPS of them the rows."""
    m, n = shape
    columns = -(-n // 16)
    groups = 8 if narrow else next(g for g in (8, 16, 32) if -(-m // g) * columns <= 32 or g == 32)
    rows = -(-m // groups)
    entries = rows * columns
    resident = (3 if entries > 96 else 4 if entries > 48 else 6) if narrow else 32 // groups
    return {"GROUPS": groups, "RT": rows, "CT": columns, "RESIDENT": resident, "NARROW": 0, "STORE": 0}


@cache
def source(name: str) -> str:
    """A kernel file with the text of its headers in place of their first #include."""
    seen: set[str] = set()

    def text(match: re.Match[str]) -> str:
        header = match.group(1)
        if header in seen:
            return ""
        seen.add(header)
        return expand(header)

    def expand(file: str) -> str:
        whole = re.sub(r"#include <.*?>\n", "", (SOURCE / file).read_text())  # of C: CUDA has what they declare
        return re.sub(r'#include "(.*?)"', text, whole)

    return expand(name)


def by_value(record: Any) -> Any:
    """A view of a 0-d record to pass to a kernel: without its field names, each of which CuPy would read (80 us)."""
    return record.view(f"V{record.itemsize}")


@cache
def module(device: int, name: str, *options: tuple[str, int]) -> Any:
    """The compiled module of one file on one device (CuPy caches the binary on disk)."""
    import cupy  # noqa: PLC0415

    flags = ("-std=c++17", *(f"-D{key}={value}" for key, value in options))
    cooperative = name == "iterate.cu"
    return cupy.RawModule(code=source(name), options=flags, enable_cooperative_groups=cooperative)


@cache
def loaded(device: int, name: str, function: str, *options: tuple[str, int]) -> Any:
    return module(device, name, *options).get_function(function)


def kernel(name: str, function: str, **options: int) -> Any:
    import cupy  # noqa: PLC0415

    return loaded(cupy.cuda.runtime.getDevice(), name, function, *sorted(options.items()))
