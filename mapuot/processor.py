"""What a process has to work with: cores, how many threads are worth starting on them, and the instruction set."""

from __future__ import annotations

import os

SERIAL_ENTRIES = 640 * 640  # problems up to this size run on one thread: a pass takes less than waking another


def cores() -> set[int]:
    """The numbers of the cores that this process may use."""
    return os.sched_getaffinity(0)


def default_threads(entries: int, share: float | None = None) -> int:
    """Threads for K of so many entries, where ``share`` of the host's cores (default: all of ``cores``) is free."""
    if entries <= SERIAL_ENTRIES:
        return 1
    return max(1, int((len(cores()) if share is None else share) + 1e-9))  # a share is a sum of fractions


def isa() -> str:
    """The instruction set in use: "scalar", "avx2", "avx512" or "neon"."""
    from ._core import ffi, lib  # noqa: PLC0415  the reference runs without the C library

    return str(ffi.string(lib.mapuot_isa()).decode())
