"""Limits that passes are measured by: how fast this machine reads an array, and reads and writes it back.

bench/src/bandwidth.c is compiled for this machine into build/bench by the first part that needs it,
and loaded by ctypes. It has thread pools of its own. Arrays are float64, aligned to 64 bytes (``native.empty``).
"""

import ctypes
import functools
import os
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

from mapuot.backends.cpu import native

from . import common

SOURCE = common.ROOT / "bench" / "src" / "bandwidth.c"
CORE = common.ROOT / "src_c"
WAYS = [(streams, ahead) for streams in (1, 4, 8) for ahead in (0, 32)]  # a prefetch so many lines ahead


def built() -> Path:
    """Return the library, compiled where it is missing or older than a source."""
    library = common.OUT / "libbench.so"
    sources = [SOURCE, CORE / "pool.c"]
    newest = max(path.stat().st_mtime for path in (*sources, *CORE.rglob("*.h"), common.ROOT / "setup.py"))
    if not library.exists() or library.stat().st_mtime < newest:
        library.parent.mkdir(parents=True, exist_ok=True)
        rules = runpy.run_path(str(common.ROOT / "setup.py"))  # it has the flags that the core is compiled with
        flags = [*rules["FLAGS"], *rules["PLAIN"], "-march=native", "-Wno-psabi"]
        flags += [f"-I{common.ROOT / folder}" for folder in rules["INCLUDES"]]
        flags += shlex.split(os.environ.get("CFLAGS", ""))
        command = [os.environ.get("CC", "cc"), *flags, "-shared", *map(str, sources), "-o", str(library), "-lm"]
        subprocess.run(command, check=True)
    return library


@functools.cache
def loaded() -> Any:
    library = ctypes.CDLL(str(built()))
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bench_pool.argtypes = [number]
    library.bench_pool.restype = pointer
    library.bench_fill.argtypes = [pointer, pointer, whole]
    library.bench_read.argtypes = [pointer, pointer, whole, number, whole, whole, pointer]
    library.bench_scale.argtypes = [pointer, pointer, whole, whole]
    return library


@functools.cache
def pool(threads: int) -> int:
    made: int | None = loaded().bench_pool(threads)
    if made is None:
        raise MemoryError(f"a pool of {threads} threads")
    return made


class Buffer:
    """An array of ``size`` bytes, first touched by its threads; one call runs through a small one several times."""

    def __init__(self, size: int, threads: int, repeats: int | None = None) -> None:
        self.length = max(64 * threads, size // 8)
        self.pool = pool(threads)
        self.array = native.empty(self.length)
        self.out = native.empty(8 * threads)
        self.repeats = repeats or max(1, int(1e7 / (8 * self.length)))  # 100 us at 100 GB/s
        loaded().bench_fill(self.pool, self.array.ctypes.data, self.length)

    def read(self, streams: int, ahead: int) -> None:
        """Sum the array by 1, 4 or 8 streams."""
        where = self.array.ctypes.data, self.length
        loaded().bench_read(self.pool, *where, streams, ahead, self.repeats, self.out.ctypes.data)

    def scale(self) -> None:
        """Negate the array: the same lines are read and written."""
        loaded().bench_scale(self.pool, self.array.ctypes.data, self.length, self.repeats)

    def best_read(self, seconds: float = 0.3) -> tuple[int, int]:
        """Return the fastest way to read; each is checked to see all entries."""
        for way in WAYS:
            self.read(*way)
            total = self.out[::8].sum()
            assert total == self.repeats * self.length, (way, total, self.length)
        times = common.interleave({way: functools.partial(self.read, *way) for way in WAYS}, seconds, (3, 50))
        return min(WAYS, key=lambda way: min(times[way]))
