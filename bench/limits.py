"""limits: read, copy and in-place bandwidth of this machine, by working set and threads, with our own kernels in C.

The read limit of a size is the best of several ways to read (1, 4 or 8 streams, with and without software prefetch);
copy counts the bytes read and written; "scale" reads and writes the same lines, as the in-place pass does.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from mapuot.backends.cpu import native

from . import common, library

WAYS = [(streams, ahead) for streams in (1, 4, 8) for ahead in (0, 32)]
LEVELS = ("L1", "L2", "L3")


class Buffer:
    """``count`` arrays of ``size`` bytes, first touched by the threads that use them."""

    def __init__(self, size: int, threads: int, count: int = 1) -> None:
        self.length = max(64 * threads, size // 8)
        self.size, self.threads = 8 * self.length, threads
        self.arrays = [native.empty(self.length) for _ in range(count)]
        self.out = native.empty(8 * threads)
        for array in self.arrays:
            library.fill(threads, array)
        # small sets are run several times in one call: 100 us at 100 GB/s
        self.repeats = max(1, int(1e7 / self.size))

    def read(self, streams: int, ahead: int) -> None:
        library.read(self.threads, self.arrays[0], streams, ahead, self.repeats, self.out)

    def copy(self, nontemporal: bool) -> None:
        library.copy(self.threads, *self.arrays, nontemporal, self.repeats)

    def scale(self) -> None:
        library.scale(self.threads, self.arrays[0], self.repeats)

    def seconds(self, time: float) -> float:
        """Of one run over the buffer, from the time of one call."""
        return time / self.repeats

    def best_read(self, seconds: float = 0.3) -> tuple[int, int]:
        """The way to read that is fastest here."""
        calls = {way: (lambda way=way: self.read(*way)) for way in WAYS}
        times = common.interleave(calls, seconds, (3, 50))
        return min(WAYS, key=lambda way: min(times[way]))


def check_read(size: int, threads: int) -> None:
    """Every way to read sees every entry: the sum of ones is their number."""
    buffer = Buffer(size, threads)
    for way in WAYS:
        buffer.read(*way)
        total = buffer.out.reshape(threads, 8)[:, 0].sum()
        assert total == buffer.repeats * buffer.length, (way, total, buffer.length)


def sizes() -> dict[str, int]:
    """Bytes by name: inside each cache of one core, and memory."""
    caches = common.caches()
    found = {level: caches[level] // 2 for level in LEVELS if level in caches}
    if "L3" in found:
        found["L3"] = max(caches.get("L2", 0) * 4, caches["L3"] // 4)
    found["memory"] = 4 * max(caches.values())
    return found


def measure(size: int, threads: int, budget: float) -> dict[str, Any]:
    """GB/s of each operation on arrays that take ``size`` bytes together."""
    one, two = Buffer(size, threads), Buffer(size // 2, threads, 2)
    way = one.best_read(budget / 2)
    calls = {
        "read": lambda: one.read(*way),
        "copy": lambda: two.copy(False),
        "copy, non-temporal": lambda: two.copy(True),
        "scale": one.scale,
    }
    times = common.interleave(calls, budget, (5, 300))
    result: dict[str, Any] = {"bytes": size, "threads": threads, "streams": way[0], "prefetch_lines": way[1]}
    for name in calls:
        buffer, factor = (two, 2) if name.startswith("copy") else (one, 2 if name == "scale" else 1)
        rate = [factor * buffer.size / buffer.seconds(t) / 1e9 for t in times[name]]
        result[name] = {key if key != "min" else "max": v for key, v in common.summary(rate).items()}
        result[name]["max"] = max(rate)
    return result


def run(args: Any) -> dict[str, Any]:
    budget = 0.3 if args.quick else 2.0
    counts = range(1, args.threads + 1) if args.threads <= 8 else sorted({1, 2, args.threads // 2, args.threads})
    for threads in counts:
        check_read(2**20, threads)
    rows = []
    for threads, (level, size) in itertools.product(counts, sizes().items()):
        total = size * threads if level in ("L1", "L2") else size  # these belong to one core
        rows.append({"level": level, **measure(total, threads, budget)})
    return {"bandwidth": rows}


def report(data: dict[str, Any]) -> str:
    names = ["read", "copy", "copy, non-temporal", "scale"]
    rows = [
        [r["level"], r["threads"], r["bytes"] // 1024, f"{r['streams']}/{r['prefetch_lines']}"]
        + [f"{r[name]['max']:.0f} ({r[name]['median']:.0f})" for name in names]
        for r in data["bandwidth"]
    ]
    title = "GB/s, best (median)\n"
    return title + common.table(["level", "threads", "KiB", "streams/prefetch", *names], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["bandwidth"]
    levels = list(dict.fromkeys(r["level"] for r in rows))
    counts = sorted({r["threads"] for r in rows})
    with common.figure(path, columns=len(counts)) as axes:
        for axis, threads in zip(axes[0], counts, strict=True):
            for k, name in enumerate(["read", "copy", "copy, non-temporal", "scale"]):
                values = [r[name]["max"] for r in rows if r["threads"] == threads]
                axis.bar([x + 0.2 * (k - 1.5) for x in range(len(levels))], values, 0.2, label=name)
            axis.set_xticks(range(len(levels)), levels)
            axis.set(ylabel="GB/s", title=f"{threads} thread{'s' * (threads > 1)}", yscale="log")
        axes[0][0].legend()
