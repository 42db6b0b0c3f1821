"""The benchmark's own C (bench/src): compiled with the flags of setup.py into build/bench, loaded by ctypes.

It is no part of the package: the first part of the benchmark that needs it builds it, and again where a source is
newer. It has thread pools of its own, and takes the states of the core by address: both have the same headers.
Arrays are float64, aligned to 64 bytes (``native.empty``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mapuot._core import ffi

from mapuot.backends.cpu import native

from . import common

SOURCES, CORE = common.ROOT / "bench" / "src", common.ROOT / "src_c"
FOLDER = common.ROOT / "build" / "bench"
DTYPES = ("f64", "f32")


def flags(isa: str | None = None, dtype: str | None = None) -> list[str]:
    """Of the compiler, for a file of its own or for a template in one variant."""
    rules = common.build_rules()
    variant = rules.isa_flags(isa) + rules.dtype_flags(dtype) if isa and dtype else rules.PLAIN
    includes = [f"-I{common.ROOT / folder}" for folder in rules.INCLUDES]
    return [*rules.FLAGS, *variant, *includes, *shlex.split(os.environ.get("CFLAGS", ""))]


def compile_c(arguments: list[Any]) -> None:
    subprocess.run([os.environ.get("CC", "cc"), *map(str, arguments)], check=True)


def built() -> Path:
    """The library, compiled where it is missing or older than a source."""
    library = FOLDER / "libbench.so"
    read = [*SOURCES.glob("*.c"), *CORE.rglob("*.h"), CORE / "pool.c", CORE / "machine.c", common.ROOT / "setup.py"]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in read):
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    units = [
        (path, FOLDER / f"{path.stem}.o", flags())
        for path in (SOURCES / "bandwidth.c", CORE / "pool.c", CORE / "machine.c")
    ]
    for isa in common.build_rules().ISAS:
        for dtype in DTYPES:
            units.append((SOURCES / "bandwidth_tmpl.c", FOLDER / f"{isa}_{dtype}.o", flags(isa, dtype)))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda unit: compile_c([*unit[2], "-c", unit[0], "-o", unit[1]]), units))
    compile_c(["-shared", "-pthread", *(unit[1] for unit in units), "-o", library, "-lm"])
    return library


@functools.cache
def loaded() -> Any:
    library = ctypes.CDLL(str(built()))
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bench_isa.argtypes = [ctypes.c_char_p]
    library.bench_pool.argtypes, library.bench_pool.restype = [number], pointer
    library.bench_fill.argtypes = [pointer, pointer, whole]
    library.bench_read.argtypes = [pointer, pointer, whole, number, whole, whole, pointer]
    library.bench_copy.argtypes = [pointer, pointer, pointer, whole, number, whole]
    library.bench_scale.argtypes = [pointer, pointer, whole, whole]
    library.bench_two_sweeps.argtypes = [pointer, pointer]
    library.bench_shared_sums.argtypes = [pointer, pointer, number, pointer]
    native.check(library.bench_isa(native.isa().encode()))
    return library


@functools.cache
def pool(threads: int) -> int:
    made: int | None = loaded().bench_pool(threads)
    if made is None:
        raise MemoryError(f"a pool of {threads} threads")
    return made


def address(state: Any) -> int:
    return int(ffi.cast("uintptr_t", state))


# ---- bandwidth of arrays: each call makes ``repeats`` runs over its arrays, shared among the threads ----


def fill(threads: int, x: Any) -> None:
    """x = 1, by the threads that will use it."""
    native.check(loaded().bench_fill(pool(threads), x.ctypes.data, x.size))


def read(threads: int, x: Any, streams: int, ahead: int, repeats: int, out: Any) -> None:
    """The sum of x by 1, 4 or 8 streams; out: one sum a thread, 8 entries apart."""
    native.check(loaded().bench_read(pool(threads), x.ctypes.data, x.size, streams, ahead, repeats, out.ctypes.data))


def copy(threads: int, x: Any, y: Any, nontemporal: bool, repeats: int) -> None:
    native.check(loaded().bench_copy(pool(threads), x.ctypes.data, y.ctypes.data, x.size, nontemporal, repeats))


def scale(threads: int, x: Any, repeats: int) -> None:
    """x = -x: reads and writes the same lines."""
    native.check(loaded().bench_scale(pool(threads), x.ctypes.data, x.size, repeats))


# ---- baselines of the pass, on a state of the core: KL rows, K in float64 or float32 ----


def two_sweeps(threads: int, state: Any) -> None:
    """u = prox(K v), then K^T u: K is read twice."""
    native.check(loaded().bench_two_sweeps(pool(threads), address(state)))


def shared_sums(threads: int, state: Any, chunk: int, sums: Any) -> None:
    """Row by row, the threads' column sums side by side in pieces of ``chunk`` entries, 4 or 8."""
    native.check(loaded().bench_shared_sums(pool(threads), address(state), chunk, sums.ctypes.data))
