"""threads: how the pass scales over threads, and what writing to shared cache lines would cost.

"own lines" and "false sharing" are one and the same row-by-row kernel; the threads' column sums lie in one array, side
by side in pieces of 8 doubles (a cache line each) or of 4 (two threads write every line). Threads beyond the cores of
this machine are not started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mapuot._core import lib

from mapuot.backends import cpu

from . import common
from .limits import Buffer
from .one_pass import Case, relative

SHAPES = [(1024, 1024), (2048, 2048), (8192, 8192)]
NAMES = ("read", "fused", "full", "own lines", "false sharing", "POT")


def shared_sums(case: Case, pool: Any, chunk: int, sums: Any) -> None:
    lib.mapuot_bench_shared_sums(pool, case.fused.state, chunk, cpu.pointer(sums))


def check(case: Case, pool: Any, threads: int) -> None:
    """Both layouts hold the column sums of row_pass."""
    n = case.M.shape[1]
    padded = cpu.padded(n)
    sums = cpu.filled([], padded * threads)
    case.row_pass(pool)
    right = case.fused.sums[:n].copy()
    for chunk in (4, 8):
        shared_sums(case, pool, chunk, sums)
        found = sums.reshape(-1, threads, chunk).sum(1).ravel()[:n]
        error = relative(found, right)
        assert error < 1e-9, f"parity of {chunk} doubles apart: {error}"


def time_case(case: Case, threads: int, budget: float) -> dict[str, Any]:
    pool = cpu.new_pool(threads, 0)
    case.start()
    case.weights()
    check(case, pool, threads)
    case.auto(True)
    sums = cpu.filled([], cpu.padded(case.M.shape[1]) * threads)
    buffer = Buffer(case.size, threads)
    buffer.repeats = 1
    way = buffer.best_read(budget / 4)
    calls = {
        "read": lambda: buffer.read(*way),
        "fused": lambda: case.row_pass(pool),
        "full": lambda: case.full_pass(pool, case.fused),
        "own lines": lambda: shared_sums(case, pool, 8, sums),
        "false sharing": lambda: shared_sums(case, pool, 4, sums),
        "POT": case.pot,
    }
    with common.blas_threads(threads), np.errstate(all="ignore"):
        times = common.interleave(calls, budget, (5, 300))
    m, n = case.M.shape
    slower = common.ratio(times, "false sharing", "own lines")
    return {"m": m, "n": n, "threads": threads, "seconds": common.summaries(times), "false_sharing_costs": slower}


def run(args: Any) -> dict[str, Any]:
    shapes, budget = (SHAPES[:1], 0.5) if args.quick else (SHAPES, 2.0)
    rows = []
    for m, n in shapes:
        case = Case(m, n, "float32", args.threads)
        rows += [time_case(case, threads, budget) for threads in range(1, args.threads + 1)]
    for row in rows:
        one = next(r for r in rows if r["threads"] == 1 and r["m"] == row["m"])
        row["speedup"] = {k: one["seconds"][k]["min"] / row["seconds"][k]["min"] for k in NAMES}
    return {"scaling": rows}


def report(data: dict[str, Any]) -> str:
    rows = [
        [f"{r['m']}x{r['n']}", r["threads"], *(f"{r['speedup'][k]:.2f}" for k in NAMES),
         f"{r['false_sharing_costs']['of_minima']:.2f}"]
        for r in data["scaling"]
    ]  # fmt: skip
    return "speed over one thread (minima)\n" + common.table(["size", "threads", *NAMES, "sharing costs"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    sizes = list(dict.fromkeys((r["m"], r["n"]) for r in data["scaling"]))
    with common.figure(path, columns=len(sizes)) as axes:
        for axis, size in zip(axes[0], sizes, strict=True):
            rows = [r for r in data["scaling"] if (r["m"], r["n"]) == size]
            counts = [r["threads"] for r in rows]
            for name in NAMES:
                axis.plot(counts, [r["speedup"][name] for r in rows], "o-", label=name)
            axis.plot(counts, counts, "k:", lw=1)
            axis.set(title=f"{size[0]} x {size[1]}, float32", xlabel="threads", ylabel="speed over one thread")
            axis.set_xticks(counts)
        axes[0][0].legend()
