"""The device code: one source string for each kernel file, compiled once for its options; and the shapes of kernels.

The text of the headers is inlined into the source, so that CuPy's cache sees every edit. Compile time is nearly all for
code that is emitted, so long or rarely used kernels are compiled ``ALONE``: the range of a matrix takes .14 s, the
whole file .8 s. Only `kernel` and its callers need a GPU. Twin of src_c/dispatch.c.
"""

import contextlib
import hashlib
import math
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...arrays import PAD
from ...contract import ANDERSON_DEPTHS
from ...enums import SOURCE, source_path
from .. import records
from ..workspace import anderson_depth_of
from .settings import DEVICE_LAUNCHES

AHEAD = SOURCE.parent / "_ahead"  # binaries in a wheel: src_cuda/ahead.py

COOPERATIVE = ("plain.cu", "iterate.cu", "fused_pass.cu", "finish.cu")  # blocks of these kernels wait for each other
ALONE = {
    "stream.cu": {"build_kernel", "row_max", "plan_sums", "apply", "draw", "extrema", "kept_pairs"},
    "portable.cu": {"point_sums", "tile_sums", "product_sums", "wide_product_sums"},
}
STORES = {"float64": 0, "float32": 1}
ITEMSIZE = {"float64": 8, "float32": 4}
THREADS, SCALARS, BLOCKS = 512, 7, 256
# options of points.cuh for kernels that read no coordinates
ANY_POINTS = {"FORM": 0, "DIM": 1, "KEPT": 0, "QUICK": 0, "TOPS": 0, "MASKED": 0, "SPLIT": 1, "POINT_BLOCKS": 1}
ANY_POINTS |= {"HALVED": 1}  # adds the kernel of a pass over half of the pairs
ANY_SIDES = {
    "KL_ROWS": 1,
    "KL_COLS": 1,
    "ANDERSON_DEPTH": ANDERSON_DEPTHS[0],
}  # sums between points do not depend on penalties
MAX_SLOTS, MAIL = 32, 16  # most slots of a ring; for spread rows, the steps that a mailbox holds
POSTS, CLUSTERS = 128, 64  # most numbers that a block posts; clusters of a coarse correction
FULL_STRIPS = 8192  # wider rows of 15/16 to 1 times a power of 2 are spread, too: their strips are nearly full
TILE_BYTES = 190_000  # shared memory for the rings of a block
SOLO_COLUMNS = 128  # up to here every block does the whole finish_pass itself
SHALLOW_COLUMNS = 512  # up to here more than 5 differences would dominate the time of a pass
SLOTS_WANTED = 6  # least tiles of a ring, if a tile has several rows: u follows some steps after its products
STEPS_BEFORE = 4  # steps of a sweep before the first u
TILE_WANTED = 14_000  # bytes of a tile: a step lasts at least .46 us
JOIN_ENTRIES = 500  # entries that a block reads in the time that one more stream costs, without joining its sums
RING_BEFORE = 4096  # bound on the bytes of shared memory before the ring of fused_pass
BESIDE = 96  # threads of a block of fused_pass that do not sweep
UNSET = 0xFFF4FFF400000000  # marks a number that no block has posted yet (common.cuh)

BATCH_DEPTH = 12  # of batch.cuh: Anderson differences of a float64 pass of a batch
BATCH_KINDS = 10 + 2 * BATCH_DEPTH  # words for each column

RECORDS = records.read("common/record.h", "state.cuh", "batch.cuh")
STATE = RECORDS["State"]
PROGRESS = RECORDS["Progress"]
TRACE = records.STATS
MASK = records.COMMON["mapuot_mask"]
VIEW = records.read("common/record.h", "stream.cu")["View"]
PASS = records.read("fused_pass.cu")["Pass"]
PLAIN = records.read("plain.cu")["Plain"]


def anderson_depth_for(m: int, n: int, itemsize: int) -> int:
    """Return the Anderson differences that kernels are compiled for: 20, or 5 where more would dominate a pass."""
    return ANDERSON_DEPTHS[
        n > SHALLOW_COLUMNS and anderson_depth_of(ANDERSON_DEPTHS[1], m, itemsize) > ANDERSON_DEPTHS[0]
    ]


def line(depth: int) -> int:
    """Return LINE of finish_column.cuh: columns that a block works on at once."""
    return THREADS * ANDERSON_DEPTHS[0] // depth


Job = tuple[str, str, dict[str, int]]  # file, function, options


@dataclass(frozen=True)
class Shape:
    """Shape of row_pass on the device: GW warps of a group own tiles of R rows, CPT columns a thread.

    ``SPREAD``: a row is spread over the warps of a cluster (spread_pass.cuh).
    """

    GW: int
    CPT: int
    R: int
    CLUSTER: int = 1
    SPREAD: int = 0

    @property
    def width(self) -> int:
        return 32 * self.GW * self.CPT * self.CLUSTER * (self.groups if self.SPREAD else 1)

    @property
    def groups(self) -> int:
        return 16 // self.GW

    def tile_bytes(self, ld: int, itemsize: int) -> int:
        columns = -(-(ld // PAD) // self.CLUSTER) * PAD
        return self.R * columns * itemsize

    def spread(self, m: int, ld: int, itemsize: int, blocks: int) -> tuple[int, int, int]:
        """Twin of row_layout in spread_pass.cuh: (streams, strips, columns of a strip)."""
        each = min(32 * self.CPT, ld * itemsize // 16 // self.CLUSTER * 16 // itemsize)
        return min(blocks // self.CLUSTER, -(-m // self.R)), -(-ld // each), each


# the narrowest shape that covers a row is used; NARROW: float32 sums leave registers for more columns a thread
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
    """Return the shape of a block that covers a row; None if a row is too wide."""
    chunk = 16 // ITEMSIZE[dtype]
    return next((s for s in PORTABLE_SHAPES if s.width >= ld and s.CPT % chunk == 0), None)


def spread_shape(ld: int, dtype: str) -> Shape | None:
    """Return the shape with the smallest cluster that fits a row, then the fewest columns a thread; None if none fits.

    A tile has two rows if three such tiles of each warp (five in the largest clusters) fit into shared memory.
    """
    chunk = 16 // ITEMSIZE[dtype]
    for cluster in DEVICE_LAUNCHES.spread_clusters:
        tiles = 3 if cluster < DEVICE_LAUNCHES.spread_clusters[-1] else 5
        if 2 * tiles * ITEMSIZE[dtype] * ld // cluster <= TILE_BYTES:
            rows = 2
        else:
            rows = 1
        for columns in (8, 12, 16):
            if columns % chunk == 0 and ld <= THREADS * columns * cluster:
                return Shape(1, columns, rows, cluster, 1)
    return None


@cache
def fitting(narrow: bool, ld: int, chunk: int) -> Shape | None:
    """Return the narrowest shape of narrow or wide passes that covers a row; None if none does."""
    if narrow:
        shapes: tuple[Shape, ...] = NARROW_SHAPES
    else:
        shapes = WIDE_SHAPES
    return next((shape for shape in shapes if shape.width >= ld and shape.CPT % chunk == 0), None)


def shape_for(ld: int, dtype: str, narrow: bool = False) -> Shape | None:
    """Return the narrowest shape that covers a row; None if no persistent kernel does."""
    chunk = 16 // ITEMSIZE[dtype]
    if ld > DEVICE_LAUNCHES.spread_columns:
        return spread_shape(ld, dtype)
    if dtype == "float32" and ld > FULL_STRIPS and ld > (1 << (ld - 1).bit_length()) * 15 // 16:
        cluster = (1 << (ld - 1).bit_length()) // FULL_STRIPS
        if narrow:
            return Shape(1, 16, 1, cluster, 1)
        return Shape(1, 8, 2, 2 * cluster, 1)
    shape = fitting(narrow, ld, chunk)
    if shape is None:
        return None
    if dtype == "float64":
        return replace(shape, R=max(1, shape.R // 2))
    return shape


@dataclass(frozen=True)
class Strips:
    """Shape of fused_pass on the device: ``streams`` share the rows, the ``strips`` of a stream share the columns."""

    THREADS: int
    CPT: int
    R: int
    strips: int
    slice: int  # columns of a strip
    streams: int
    slots: int  # tiles of a block's ring

    @property
    def options(self) -> dict[str, int]:
        return {"THREADS": self.THREADS, "CPT": self.CPT, "R": self.R, "RESIDENT": THREADS // self.THREADS}

    @property
    def lag(self) -> int:
        return (self.slots * 2 + 1) // 3

    def bytes(self, itemsize: int) -> int:
        """Return the bytes of the ring, of the products with v, and of the reads beyond the last row."""
        behind = (self.THREADS * self.CPT - self.slice) * itemsize
        return self.slots * self.R * row_bytes(self.slice, itemsize, self.THREADS) + behind


def strips_for(m: int, ld: int, itemsize: int, processors: int, shared: int) -> Strips | None:
    """Return the shape with the least work of a block and its threads; None if a row is too wide for all blocks."""
    threads = next((t for t in (128, 256) if ld <= 4 * t), THREADS)
    blocks = processors * THREADS // threads
    room = shared * threads // THREADS - RING_BEFORE
    best, least = None, math.inf
    for most in (16, 8, 4):
        fewest = -(-ld // (threads * most))
        streams = min(m, blocks // fewest)
        if streams == 0:
            continue
        width = -(-ld // (PAD * max(fewest, blocks // streams))) * PAD
        columns = next(c for c in (4, 8, 16) if width <= threads * c)
        strips = -(-ld // width)
        rows = -(-m // streams)
        held = (room - (threads * columns - width) * itemsize) // row_bytes(width, itemsize, threads)  # rows of a ring
        most_rows = min(held, rows) // SLOTS_WANTED
        least_bytes = TILE_WANTED * threads // THREADS
        R = next((r for r in (1, 2, 4) if 2 * r > most_rows or r * width * itemsize >= least_bytes), 8)
        swept = max(width, 0.8 * threads * columns)  # threads without columns take time, too
        work = (rows + STEPS_BEFORE * R) * swept + streams * (JOIN_ENTRIES + 16 // itemsize * ld // blocks)
        if held >= 3 and work < least:
            best = Strips(threads, columns, R, strips, width, streams, min(MAX_SLOTS, held // R))
            least = work
    return best


def row_bytes(width: int, itemsize: int, threads: int) -> int:
    """Return the bytes of a row in a ring and of its products with v, one for each warp."""
    return width * itemsize + threads // 32 * 8


def shape_options(shape: Shape, dtype: str, kl: tuple[bool, bool], **more: int) -> dict[str, int]:
    """Return the compiler's -D options for row_pass and finish_pass."""
    words = {"GW": shape.GW, "CPT": shape.CPT, "R": shape.R, "CLUSTER": shape.CLUSTER}
    if shape.SPREAD:
        words |= {"SPREAD": 1}
    return words | {"STORE": STORES[dtype], "KL_ROWS": int(kl[0]), "KL_COLS": int(kl[1])} | more


def finish_job(options: dict[str, int]) -> Job:
    """Return the job of the column half that belongs to row halves of portable.cu with these options."""
    names = "STORE", "KL_COLS", "ANDERSON_DEPTH", "POINTS", "POINTS_NARROW", "SPARSE"
    return "finish.cu", "finish", {name: options[name] for name in names if name in options}


def portable_jobs(options: dict[str, int], sums: str, *others: str) -> list[Job]:
    """List the kernels of portable.cu with these options, and the finish of their passes.

    Between points, only ``sums`` depends on the metric, the dimension and the pairs, and it does not depend on the
    penalties. So ``sums`` is compiled once for all penalties, and the other kernels once for all kinds of points.
    """
    own = every = options
    if "POINTS" in options:
        own = options | ANY_SIDES
        of_sums = "DEPTH", "STEPS", "PRODUCTS", "WIDE_CHUNKS"
        every = {k: x for k, x in options.items() if k not in of_sums} | ANY_POINTS
    finish = finish_job(options)
    jobs = [("portable.cu", sums, own), *(("portable.cu", name, every) for name in others)]
    return [*jobs, finish, (finish[0], "ring_offset", finish[2])]  # ring_offset: shared memory before its ring


def small_options(shape: tuple[int, int], narrow: bool) -> dict[str, int]:
    """Return the options for a K in a block's registers: 16 lanes share a row, and GROUPS groups of lanes the rows."""
    m, n = shape
    columns = -(-n // 16)
    if narrow:
        groups = 8
    else:
        groups = next(g for g in (8, 16, 32) if -(-m // g) * columns <= 32 or g == 32)
    rows = -(-m // groups)
    entries = rows * columns
    if narrow:
        if entries > 96:
            resident = 3
        elif entries > 48:
            resident = 4
        else:
            resident = 6
    else:
        resident = 32 // groups
    return {"GROUPS": groups, "RT": rows, "CT": columns, "RESIDENT": resident, "NARROW": 0, "STORE": 0}


def point_blocks(options: dict[str, int]) -> int:
    """Return the blocks on a multiprocessor for sums between points with these options (src_cuda/points/points.cuh)."""
    if "STEPS" in options:
        if options["STEPS"] <= 2 and options.get("PRODUCTS") == 1:
            return 3
        return 1 if 4 < options["STEPS"] <= 8 else 2  # coordinates of 32 points of a warp fill the registers
    if "WIDE_CHUNKS" in options:
        return 1 if 4 < options["WIDE_CHUNKS"] <= 8 else 2  # likewise
    if "DEPTH" in options:
        return 1 + options["POINTS_NARROW"]
    if options["MASKED"]:
        return 1
    return 2 + (options["POINTS_NARROW"] and options["DIM"] > 0 and not options["KEPT"])


@cache
def source(name: str) -> str:
    """Return a kernel file with each header inlined at its first #include, so that headers need no guards.

    "#pragma option NAME VALUE" declares an option with a default value.
    """
    seen: set[str] = set()

    def text(match: re.Match[str]) -> str:
        header = match.group(1)
        if header in seen:
            return ""
        seen.add(header)
        return expand(header)

    def expand(file: str) -> str:
        whole = re.sub(r"#include <.*?>\n|#pragma once\n", "", source_path(file).read_text())  # predeclared in CUDA
        whole = re.sub(r"#pragma option (\w+) (.*)", r"#ifndef \1\n#define \1 \2\n#endif", whole)
        return re.sub(r'#include "(.*?)"', text, whole)

    return expand(name)


ENTRY = re.compile(r'extern "C" (__global__ void(?:\s+__launch_bounds__\([^)]*\)|\s+SHAPE)?\s+(\w+)\()')


@cache
def source_of(name: str, part: str) -> str:
    """Return a kernel file that emits only the function ``part``, or, if it is "", all functions not in ``ALONE``.

    The other functions become templates without an instance.
    """
    alone = ALONE.get(name, set())

    def entry(match: re.Match[str]) -> str:
        function = match.group(2)
        if part:
            emitted = function == part
        else:
            emitted = function not in alone
        if emitted:
            return match.group()
        return "template <int> " + match.group(1)

    return ENTRY.sub(entry, source(name))


def by_value(record: Any) -> Any:
    """Return a view of a 0-d record, to pass it to a kernel; CuPy would take 80 us to read its field names."""
    return record.view(f"V{record.itemsize}")


LOADED: dict[tuple[Any, ...], Any] = {}  # functions by device, file, name and options
MODULES: dict[tuple[Any, ...], Future[Any]] = {}  # by device, file, part and options


def kernel(name: str, function: str, **options: int) -> Any:
    """Return the compiled function for the current device."""
    import cupy  # noqa: PLC0415

    key = cupy.cuda.runtime.getDevice(), name, function, *sorted(options.items())
    if key not in LOADED:
        begin([(name, function, options)])
        LOADED[key] = MODULES[module_key(*key)].result().get_function(function)
    return LOADED[key]


def module_key(device: int, name: str, function: str, *options: tuple[str, int]) -> tuple[Any, ...]:
    return device, name, function if function in ALONE.get(name, ()) else "", *options


def flags_of(options: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return the compiler's flags, without the flags that CuPy adds."""
    return "-std=c++17", *(f"-D{word}={value}" for word, value in options)


def key_of(name: str, part: str, options: Iterable[tuple[str, int]]) -> str:
    """Return the name of a binary: a hash of its flags and source."""
    return hashlib.sha256("\0".join([*flags_of(options), source_of(name, part)]).encode()).hexdigest()


def ahead(capability: int, name: str, part: str, options: Iterable[tuple[str, int]]) -> bytes | None:
    """Return the binary from the wheel, for the device's architecture or an older one with the same major number.

    Return None if there is none, or if its archive cannot be read, for example by a Python without lzma.
    """
    for folder in AHEAD.glob(f"sm_{capability // 10}?"):
        path = folder / f"{name}.{part}.tar.xz"
        if int(folder.name[3:]) <= capability and path.exists():
            key = key_of(name, part, options)
            with contextlib.suppress(tarfile.TarError, OSError, EOFError), tarfile.open(path) as archive:
                member = next((member for member in archive if member.name == key), None)
                if member:
                    file = archive.extractfile(member)
                else:
                    file = None
                if file:
                    return file.read()
    return None


def loaded(binary: bytes, cooperative: bool) -> Any:
    """Load a binary as a module; return None if the driver is too old for it."""
    import cupy  # noqa: PLC0415

    with tempfile.NamedTemporaryFile(prefix=hashlib.sha256(binary).hexdigest()) as file:
        file.write(binary)
        file.flush()
        found = cupy.RawModule(path=file.name, enable_cooperative_groups=cooperative)
        try:
            _ = found.module
        except cupy.cuda.driver.CUDADriverError:
            return None
    return found


def compiled(device: int, name: str, part: str, *options: tuple[str, int]) -> Any:
    """Get a part of a file for a device: from the wheel, from CuPy's cache on disk, or by the compiler."""
    import cupy  # noqa: PLC0415

    cooperative = name in COOPERATIVE
    with cupy.cuda.Device(device) as here:
        if AHEAD.exists():
            binary = ahead(int(here.compute_capability), name, part, options)
        else:
            binary = None
        if binary:
            found = loaded(binary, cooperative)
        else:
            found = None
        if found is None:
            code = source_of(name, part)
            flags = flags_of(options)
            found = cupy.RawModule(code=code, options=flags, enable_cooperative_groups=cooperative)
            _ = found.module  # compiles it, and loads it on this device
    return found


@cache
def ring_offset(name: str, **options: int) -> int:
    """Return the shared memory before the ring of tiles: sizeof(Shared) of the file ``name``."""
    import cupy  # noqa: PLC0415

    out = cupy.zeros(1, "int32")
    kernel(name, "ring_offset", **options)((1,), (1,), (out,))
    return int(out[0])


def begin(jobs: Iterable[Job]) -> None:
    """Start to compile these functions in parallel, as NVRTC releases the GIL; `kernel` waits for its function."""
    import cupy  # noqa: PLC0415

    device = cupy.cuda.runtime.getDevice()
    keys = {module_key(device, name, function, *sorted(options.items())): None for name, function, options in jobs}
    missing = [key for key in keys if key not in MODULES or (MODULES[key].done() and MODULES[key].exception())]
    if missing:
        pool = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1))
        MODULES.update({key: pool.submit(compiled, *key) for key in missing})
        pool.shutdown(wait=False)


def together(jobs: Iterable[Job]) -> None:
    """Load these functions; compile the missing ones in parallel."""
    jobs = list(jobs)
    begin(jobs)
    for name, function, options in jobs:
        kernel(name, function, **options)
