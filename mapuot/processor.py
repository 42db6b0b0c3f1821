"""Processor: the cores that a process may use, how many threads it starts, and the instruction set."""

import functools
import math
import os
from pathlib import Path, PurePosixPath

SERIAL_ENTRIES = 640 * 640  # up to this size one thread is used: a pass takes less time than waking another thread


def cores() -> set[int]:
    """Return the numbers of the cores that this process may use: by its affinity, or all if there is none."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def core_count() -> int:
    """Return the number of useful threads: this process's cores, or its container's CPU quota if that is less."""
    count = len(cores())
    most = quota()
    if most < count:
        return max(1, int(most + 0.5))
    return count


_limits: list[int] = []  # the limit that threadpoolctl has set, if any


def set_thread_limit(count: int | None) -> None:
    """Let calls without ``threads`` use at most so many threads; None, or as many as without a limit: no limit."""
    _limits.clear()
    if count is not None and count < thread_count():
        _limits.append(max(1, int(count)))


def thread_count(share: float | None = None) -> int:
    """Return the number of threads of a large call without ``threads``.

    It is the number of ``share`` free cores (default: ``core_count``), at most as many as OMP_NUM_THREADS and
    `set_thread_limit` allow.
    """
    if share is None:
        count = core_count()
    else:
        count = max(1, int(share + 1e-9))  # a share is a sum of fractions
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    asked = [int(told)] if told.isdecimal() and int(told) > 0 else []
    return min([count, *_limits, *asked])


@functools.cache
def memory_bytes(root: str = "") -> int:
    """Return the memory of this machine in bytes, or of its container (version 2 of cgroups) if that is less."""
    told = lines(f"{root}/sys/fs/cgroup/memory.max")
    if told and told[0].isdigit():
        most = [int(told[0])]
    else:
        most = []
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *most])


@functools.cache
def quota(root: str = "") -> float:
    """Return the least CPU quota of the cgroups of this process, in cores; ``root``: before the names of the files.

    Quotas bind a cgroup and all below it; version 1 has them in two files, version 2 in one. Which cgroup: proc(5).
    """
    own: dict[str, str] = {}  # cgroup path for each controller, "" for version 2
    for line in lines(f"{root}/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own = dict.fromkeys(controllers.split(","), path) | own
    found = [math.inf]
    for line in lines(f"{root}/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mounted, at = before.split(" ")[3:5]
        kind, _, options = after.split(" ")[:3]  # a source may be empty
        controller = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if controller in own and controller in ("", *options.split(",")):
            if controller:
                names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            else:
                names = ["cpu.max"]
            # a container may see its cgroup's path on the host, or one outside of its namespace, but only mount its own
            place = PurePosixPath(own[controller])
            seen = place.is_relative_to(mounted) and ".." not in place.parts
            if seen:
                below = place.relative_to(mounted).parts
            else:
                below = ()
            folders = (Path(root + at, *below[:k]) for k in range(len(below) + 1))
            found += [quota_of([word for name in names for word in lines(folder / name)]) for folder in folders]
    return min(found)


def quota_of(told: list[str]) -> float:
    """Return the quota of one cgroup, CPU time per period; inf without a quota."""
    try:
        time, period = map(float, " ".join(told).split())
    except ValueError:
        return math.inf
    if min(time, period) > 0:
        return time / period
    return math.inf


def lines(path: str | Path) -> list[str]:
    """Return the lines of a system file, none if it cannot be read; names in it may have any bytes."""
    try:
        return [line for line in os.fsdecode(Path(path).read_bytes()).split("\n") if line]
    except OSError:
        return []


def default_threads(entries: int, share: float | None = None) -> int:
    """Return the threads for a K of ``entries`` entries and ``share`` free cores (default: ``core_count``)."""
    if entries <= SERIAL_ENTRIES:
        return 1
    return thread_count(share)


def free_memory() -> float:
    """Return the bytes available without swapping; inf if the system does not report them."""
    told = (int(line.split()[1]) for line in lines("/proc/meminfo") if line.startswith("MemAvailable"))
    return 1024.0 * next(told, math.inf)


def isa() -> str:
    """Return the instruction set in use: "scalar", "avx2", "avx512" or "neon"."""
    from ._core import ffi, lib  # noqa: PLC0415  the reference runs without the C library

    return str(ffi.string(lib.mapuot_isa()).decode())
