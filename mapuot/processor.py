"""Processor: the cores that a process may use, how many threads are worth starting, and the instruction set."""

import os
from pathlib import Path

SERIAL_ENTRIES = 640 * 640  # problems up to this size run on one thread: a pass takes less than waking another


def cores() -> set[int]:
    """The numbers of the cores that this process may run on: by its affinity, or all where the system has none."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def core_count() -> int:
    """Return how many threads this process may keep busy: its cores, or its container's CPU quota if that is less."""
    try:
        from ._core import lib  # noqa: PLC0415  the reference runs without the C library
    except ImportError:
        return len(cores())
    return int(lib.mapuot_cores())


def default_threads(entries: int, share: float | None = None) -> int:
    """Threads for K of so many entries, where ``share`` of the host's cores (default: ``core_count``) is free."""
    if entries <= SERIAL_ENTRIES:
        return 1
    return max(1, int((core_count() if share is None else share) + 1e-9))  # a share is a sum of fractions


def free_memory() -> float:
    """Bytes that can be had without swapping, inf where the system does not tell."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as told:
            return 1024.0 * next(int(line.split()[1]) for line in told if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def isa() -> str:
    """The instruction set in use: "scalar", "avx2", "avx512" or "neon"."""
    from ._core import ffi, lib  # noqa: PLC0415  the reference runs without the C library

    return str(ffi.string(lib.mapuot_isa()).decode())
