"""The device code: one source string a kernel file, compiled once for its options, and the shape that fits a problem.

The text of the headers goes into the source, so that CuPy's cache sees every edit. A compiler takes nearly all its time
for code that it emits, so that kernels which are long, or seldom needed, are compiled ``ALONE``: the range of a matrix
takes .14 s, its whole file .8. Nothing here needs a GPU but ``kernel`` and what is built on it. Twin of
src_c/dispatch.c.
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

from ...enums import SOURCE
from .. import records
from ..contract import MEMORY, PAD, memory_of

AHEAD = SOURCE.parent / "_ahead"  # binaries that a wheel brings: src_cuda/ahead.py

COOPERATIVE = ("plain.cu", "iterate.cu", "fused_pass.cu", "finish.cu")  # files whose blocks wait for each other
ALONE = {
    "stream.cu": {"build_kernel", "row_max", "plan_sums", "apply", "draw", "extrema", "near_pairs"},
    "portable.cu": {"point_sums", "tile_sums"},
}
STORES = {"float64": 0, "float32": 1}
ITEMSIZE = {"float64": 8, "float32": 4}
THREADS, SCALARS, BLOCKS = 512, 7, 256
# options of points.cuh for kernels that look at no coordinates
ANY_POINTS = {"FORM": 0, "DIM": 1, "KEPT": 0, "QUICK": 0, "TOPS": 0, "MASKED": 0, "SPLIT": 1, "POINT_BLOCKS": 1}
ANY_POINTS |= {"HALVED": 1}  # one kernel more, of a pass over half of the pairs
ANY_SIDES = {"KL_ROWS": 1, "KL_COLS": 1, "MEMORY": MEMORY[0]}  # and for sums between points, which know no penalty
MAX_SLOTS, MAIL = 32, 16  # slots of a ring; where rows are spread, as many as steps that a mailbox holds
POSTS, CLUSTERS = 128, 64  # numbers that a block posts at most; clusters of a coarse correction
SPREAD_COLUMNS = 32768  # rows wider than this are spread
SPREAD_CLUSTERS = (2, 4, 8, 16)  # blocks that share a row, while it fits
FULL_STRIPS = 8192  # and those from 15/16 of a power of 2 to it above this: fewer columns take a worker as long
TILE_BYTES = 190_000  # of shared memory, for the rings of a block
SOLO_COLUMNS = 128  # up to here every block does the whole finish_pass for itself
SHALLOW_COLUMNS = 512  # up to here a pass is short beside more than 5 differences
SLOTS_WANTED = 6  # tiles of a ring at least, where they are of several rows: u comes some steps after its products
STEPS_BEFORE = 4  # that a sweep takes before the first u
TILE_WANTED = 14_000  # bytes of a tile: a step lasts .46 us, however few
JOIN_ENTRIES = 500  # that a block reads while one more stream begins; its sums are written and read, too
RING_BEFORE = 4096  # bytes of shared memory before the ring of fused_pass, at most
BESIDE = 96  # its threads beside those that sweep
UNSET = 0xFFF4FFF400000000  # a number that no block has posted yet (common.cuh)

BATCH_MEMORY = 12  # of batch.cuh: Anderson differences of a float64 pass of a batch
BATCH_KINDS = 10 + 2 * BATCH_MEMORY  # and words a column

RECORDS = records.read("common/record.h", "state.cuh", "batch.cuh")
STATE, PROGRESS, TRACE = RECORDS["State"], RECORDS["Progress"], records.STATS
MASK = records.COMMON["mapuot_mask"]
VIEW = records.read("common/record.h", "stream.cu")["View"]
PASS = records.read("fused_pass.cu")["Pass"]
PLAIN = records.read("plain.cu")["Plain"]


def memory_for(m: int, n: int, itemsize: int) -> int:
    """Anderson differences that the kernels have room for: 20, or 5 where a pass is short beside more of them."""
    return MEMORY[n > SHALLOW_COLUMNS and memory_of(MEMORY[1], m, itemsize) > MEMORY[0]]


def line(memory: int) -> int:
    """LINE of finish_column.cuh: columns that a block has in hand at once."""
    return THREADS * MEMORY[0] // memory


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
        """Twin of lie_of in spread_pass.cuh: (streams, strips, columns of a strip)."""
        each = min(32 * self.CPT, ld * itemsize // 16 // self.CLUSTER * 16 // itemsize)
        return min(blocks // self.CLUSTER, -(-m // self.R)), -(-ld // each), each


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


def spread_shape(ld: int, dtype: str) -> Shape | None:
    """The smallest cluster that has room for a row, and the fewest columns a thread; None where there is none.

    Two rows at once, where three such tiles of each warp fit into shared memory, five in the largest clusters.
    """
    chunk = 16 // ITEMSIZE[dtype]
    for cluster in SPREAD_CLUSTERS:
        tiles = 3 if cluster < SPREAD_CLUSTERS[-1] else 5
        rows = 2 if 2 * tiles * ITEMSIZE[dtype] * ld // cluster <= TILE_BYTES else 1
        for columns in (8, 12, 16):
            if columns % chunk == 0 and ld <= THREADS * columns * cluster:
                return Shape(1, columns, rows, cluster, 1)
    return None


@cache
def fitting(narrow: bool, ld: int, chunk: int) -> Shape | None:
    """The narrowest shape of such passes that covers a row."""
    shapes = NARROW_SHAPES if narrow else WIDE_SHAPES
    return next((shape for shape in shapes if shape.width >= ld and shape.CPT % chunk == 0), None)


def shape_for(ld: int, dtype: str, narrow: bool = False) -> Shape | None:
    """The narrowest shape that covers a row; None where no persistent kernel does."""
    chunk = 16 // ITEMSIZE[dtype]
    if ld > SPREAD_COLUMNS:
        return spread_shape(ld, dtype)
    if dtype == "float32" and ld > FULL_STRIPS and ld > (1 << (ld - 1).bit_length()) * 15 // 16:
        cluster = (1 << (ld - 1).bit_length()) // FULL_STRIPS
        return Shape(1, 16, 1, cluster, 1) if narrow else Shape(1, 8, 2, 2 * cluster, 1)
    shape = fitting(narrow, ld, chunk)
    if shape is None:
        return None
    return replace(shape, R=max(1, shape.R // 2)) if dtype == "float64" else shape


@dataclass(frozen=True)
class Strips:
    """Shape of fused_pass on the device: ``streams`` of blocks share the rows, the ``strips`` of one the columns."""

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
        """Return the bytes of the ring, of products with v, and of what is read behind the last row."""
        behind = (self.THREADS * self.CPT - self.slice) * itemsize
        return self.slots * self.R * row_bytes(self.slice, itemsize, self.THREADS) + behind


def strips_for(m: int, ld: int, itemsize: int, processors: int, shared: int) -> Strips | None:
    """The least work of a block, and of its threads; None where a row is too wide for all blocks together."""
    threads = next((t for t in (128, 256) if ld <= 4 * t), THREADS)
    blocks, room = processors * THREADS // threads, shared * threads // THREADS - RING_BEFORE
    best, least = None, math.inf
    for most in (16, 8, 4):
        fewest = -(-ld // (threads * most))
        streams = min(m, blocks // fewest)
        if streams == 0:
            continue
        width = -(-ld // (PAD * max(fewest, blocks // streams))) * PAD
        columns = next(c for c in (4, 8, 16) if width <= threads * c)
        strips, rows = -(-ld // width), -(-m // streams)
        held = (room - (threads * columns - width) * itemsize) // row_bytes(width, itemsize, threads)  # rows of a ring
        most_rows, least_bytes = min(held, rows) // SLOTS_WANTED, TILE_WANTED * threads // THREADS
        R = next((r for r in (1, 2, 4) if 2 * r > most_rows or r * width * itemsize >= least_bytes), 8)
        swept = max(width, 0.8 * threads * columns)  # threads without columns take as long
        work = (rows + STEPS_BEFORE * R) * swept + streams * (JOIN_ENTRIES + 16 // itemsize * ld // blocks)
        if held >= 3 and work < least:
            best, least = Strips(threads, columns, R, strips, width, streams, min(MAX_SLOTS, held // R)), work
    return best


def row_bytes(width: int, itemsize: int, threads: int) -> int:
    """Return the bytes of a row in a ring, and of its products with v, one a warp."""
    return width * itemsize + threads // 32 * 8


def shape_options(shape: Shape, dtype: str, kl: tuple[bool, bool], **more: int) -> dict[str, int]:
    """The compiler's -D options of row_pass and finish_pass."""
    lie = {"GW": shape.GW, "CPT": shape.CPT, "R": shape.R, "CLUSTER": shape.CLUSTER}
    if shape.SPREAD:
        lie |= {"SPREAD": 1}
    return lie | {"STORE": STORES[dtype], "KL_ROWS": int(kl[0]), "KL_COLS": int(kl[1])} | more


def finish_job(options: dict[str, int]) -> Job:
    """The column half beside row halves of portable.cu with these options."""
    names = "STORE", "KL_COLS", "MEMORY", "POINTS", "POINTS_NARROW", "SPARSE"
    return "finish.cu", "finish", {name: options[name] for name in names if name in options}


def portable_jobs(options: dict[str, int], sums: str, *others: str) -> list[Job]:
    """The kernels of portable.cu with these options, and the finish of their passes.

    Between points ``sums`` alone depends on the metric, the dimension and the pairs, and not on the penalties: it is
    compiled for all of these, and the others for all of those.
    """
    own = every = options
    if "POINTS" in options:
        own, every = options | ANY_SIDES, {k: x for k, x in options.items() if k != "DEPTH"} | ANY_POINTS
    finish = finish_job(options)
    jobs = [("portable.cu", sums, own), *(("portable.cu", name, every) for name in others)]
    return [*jobs, finish, (finish[0], "ring_offset", finish[2])]  # what tells the shared memory before its ring


def small_options(shape: tuple[int, int], narrow: bool) -> dict[str, int]:
    """Return the options by which K lies in a block's registers: 16 lanes share a row, GROUPS of them the rows."""
    m, n = shape
    columns = -(-n // 16)
    groups = 8 if narrow else next(g for g in (8, 16, 32) if -(-m // g) * columns <= 32 or g == 32)
    rows = -(-m // groups)
    entries = rows * columns
    resident = (3 if entries > 96 else 4 if entries > 48 else 6) if narrow else 32 // groups
    return {"GROUPS": groups, "RT": rows, "CT": columns, "RESIDENT": resident, "NARROW": 0, "STORE": 0}


def point_blocks(options: dict[str, int]) -> int:
    """Blocks that a multiprocessor holds of the sums between points of these options (src_cuda/points.cuh)."""
    if "DEPTH" in options:
        return 1 + options["POINTS_NARROW"]
    if options["MASKED"]:
        return 1
    return 2 + (options["POINTS_NARROW"] and options["DIM"] > 0 and not options["KEPT"])


@cache
def source(name: str) -> str:
    """A kernel file with the text of its headers in place of their first #include: they need no guards.

    "#pragma option NAME VALUE" is an option that has this value where it is not given.
    """
    seen: set[str] = set()

    def text(match: re.Match[str]) -> str:
        header = match.group(1)
        if header in seen:
            return ""
        seen.add(header)
        return expand(header)

    def expand(file: str) -> str:
        whole = re.sub(r"#include <.*?>\n|#pragma once\n", "", (SOURCE / file).read_text())  # CUDA has what C declares
        whole = re.sub(r"#pragma option (\w+) (.*)", r"#ifndef \1\n#define \1 \2\n#endif", whole)
        return re.sub(r'#include "(.*?)"', text, whole)

    return expand(name)


ENTRY = re.compile(r'extern "C" (__global__ void(?:\s+__launch_bounds__\([^)]*\)|\s+SHAPE)?\s+(\w+)\()')


@cache
def source_of(name: str, part: str) -> str:
    """A kernel file of which one function is emitted, or, where ``part`` is "", all but those that are ``ALONE``.

    The others are templates that nothing instantiates.
    """
    alone = ALONE.get(name, set())

    def entry(match: re.Match[str]) -> str:
        function = match.group(2)
        emitted = function == part if part else function not in alone
        return match.group() if emitted else "template <int> " + match.group(1)

    return ENTRY.sub(entry, source(name))


def by_value(record: Any) -> Any:
    """A view of a 0-d record to pass to a kernel: without its field names, each of which CuPy would read (80 us)."""
    return record.view(f"V{record.itemsize}")


LOADED: dict[tuple[Any, ...], Any] = {}  # functions by device, file, name and options
MODULES: dict[tuple[Any, ...], Future[Any]] = {}  # by device, file, part and options


def kernel(name: str, function: str, **options: int) -> Any:
    """The compiled function on the current device."""
    import cupy  # noqa: PLC0415

    key = cupy.cuda.runtime.getDevice(), name, function, *sorted(options.items())
    if key not in LOADED:
        begin([(name, function, options)])
        LOADED[key] = MODULES[module_key(*key)].result().get_function(function)
    return LOADED[key]


def module_key(device: int, name: str, function: str, *options: tuple[str, int]) -> tuple[Any, ...]:
    return device, name, function if function in ALONE.get(name, ()) else "", *options


def flags_of(options: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Flags of the compiler, but for those that CuPy adds."""
    return "-std=c++17", *(f"-D{word}={value}" for word, value in options)


def key_of(name: str, part: str, options: Iterable[tuple[str, int]]) -> str:
    """Name a binary by all that it is made of, so that no other is ever taken for it."""
    return hashlib.sha256("\0".join([*flags_of(options), source_of(name, part)]).encode()).hexdigest()


def ahead(capability: int, name: str, part: str, options: Iterable[tuple[str, int]]) -> bytes | None:
    """The binary that the wheel brings, of the device's architecture or of an older one with its major number.

    None where an archive cannot be read, as by a Python without lzma, too.
    """
    for folder in AHEAD.glob(f"sm_{capability // 10}?"):
        path = folder / f"{name}.{part}.tar.xz"
        if int(folder.name[3:]) <= capability and path.exists():
            key = key_of(name, part, options)
            with contextlib.suppress(tarfile.TarError, OSError, EOFError), tarfile.open(path) as archive:
                member = next((member for member in archive if member.name == key), None)
                file = archive.extractfile(member) if member else None
                if file:
                    return file.read()
    return None


def loaded(binary: bytes, cooperative: bool) -> Any:
    """A module of a binary; None where the driver is too old for it."""
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
    """Take a part of a file for a device from the wheel, or from the disk, where CuPy keeps it, or compile it."""
    import cupy  # noqa: PLC0415

    cooperative = name in COOPERATIVE
    with cupy.cuda.Device(device) as here:
        binary = ahead(int(here.compute_capability), name, part, options) if AHEAD.exists() else None
        found = loaded(binary, cooperative) if binary else None
        if found is None:
            code, flags = source_of(name, part), flags_of(options)
            found = cupy.RawModule(code=code, options=flags, enable_cooperative_groups=cooperative)
            _ = found.module  # compiled, and loaded there
    return found


@cache
def ring_offset(name: str, **options: int) -> int:
    """Shared memory before the ring of tiles: sizeof(Shared) of that file."""
    import cupy  # noqa: PLC0415

    out = cupy.zeros(1, "int32")
    kernel(name, "ring_offset", **options)((1,), (1,), (out,))
    return int(out[0])


def begin(jobs: Iterable[Job]) -> None:
    """Let these functions be compiled, all at once, as NVRTC leaves the GIL; `kernel` waits for the one it is asked."""
    import cupy  # noqa: PLC0415

    device = cupy.cuda.runtime.getDevice()
    keys = {module_key(device, name, function, *sorted(options.items())): None for name, function, options in jobs}
    missing = [key for key in keys if key not in MODULES or (MODULES[key].done() and MODULES[key].exception())]
    if missing:
        pool = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1))
        MODULES.update({key: pool.submit(compiled, *key) for key in missing})
        pool.shutdown(wait=False)


def together(jobs: Iterable[Job]) -> None:
    """Load these functions, of which those that must be compiled are so at once."""
    jobs = list(jobs)
    begin(jobs)
    for name, function, options in jobs:
        kernel(name, function, **options)
