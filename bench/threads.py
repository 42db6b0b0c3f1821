"""threads: how the pass scales over threads, and what writing to shared cache lines would cost.

All thread counts are timed in the same rounds. "own lines" and "false sharing" are one and the same row-by-row kernel;
the threads' column sums lie in one array, side by side in pieces of 8 doubles (a cache line each) or of 4 (two threads
write every line). Threads beyond the cores of this machine are not started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mapuot.backends.cpu import native

from . import common, library
from .limits import Buffer
from .one_pass import DTYPES, Case, relative

SHAPES = [(1024, 1024), (2048, 2048), (8192, 8192)]
NAMES = ("read", "fused", "full", "own lines", "false sharing", "POT")


class Team:
    """The calls of one case on one number of threads."""

    def __init__(self, case: Case, threads: int) -> None:
        self.case, self.threads = case, threads
        self.pool = native.pool_for(threads, 0)
        self.sums = native.zeros(native.padded(case.M.shape[1]) * threads)
        self.buffer = Buffer(case.size, threads)
        self.buffer.repeats = 1
        self.check()

    def shared_sums(self, chunk: int) -> None:
        library.shared_sums(self.threads, self.case.fused.state, chunk, self.sums)

    def check(self) -> None:
        """Both layouts hold the column sums of row_pass."""
        n = self.case.M.shape[1]
        self.case.row_pass(self.pool)
        right = self.case.fused.sums[:n].copy()
        for chunk in (4, 8):
            self.shared_sums(chunk)
            found = self.sums.reshape(-1, self.threads, chunk).sum(1).ravel()[:n]
            error = relative(found, right)
            assert error < 1e-9, f"parity of {chunk} doubles apart: {error}"

    def pot(self) -> None:
        with common.blas_threads(self.threads):
            self.case.pot()

    def calls(self) -> dict[str, Callable[[], Any]]:
        way = self.buffer.best_read(0.2)
        case = self.case
        return {
            "read": lambda: self.buffer.read(*way),
            "fused": lambda: case.row_pass(self.pool),
            "full": lambda: case.full_pass(self.pool, case.fused),
            "own lines": lambda: self.shared_sums(8),
            "false sharing": lambda: self.shared_sums(4),
            "POT": self.pot,
        }


def time_case(case: Case, counts: list[int], budget: float) -> list[dict[str, Any]]:
    case.start()
    case.weights()
    teams = [Team(case, threads) for threads in counts]
    case.auto(True)
    calls = {(name, team.threads): call for team in teams for name, call in team.calls().items()}
    order = sorted(calls, key=lambda key: NAMES.index(key[0]))  # one form on all counts, then the next
    with np.errstate(all="ignore"):
        times = common.interleave({key: calls[key] for key in order}, budget, (5, 300))
    rows = []
    m, n = case.M.shape
    for threads in counts:
        mine = {name: times[name, threads] for name in NAMES}
        pairs = {name: {"slow": times[name, 1], "fast": mine[name]} for name in NAMES}
        rows.append({
            "m": m, "n": n, "dtype": case.K.dtype.name, "threads": threads, "seconds": common.summaries(mine),
            "speedup": {name: common.ratio(pair, "slow", "fast") for name, pair in pairs.items()},
            "false_sharing_costs": common.ratio(mine, "false sharing", "own lines"),
        })  # fmt: skip
    return rows


def run(args: Any) -> dict[str, Any]:
    shapes, budget = (SHAPES[:1], 0.5) if args.quick else (SHAPES, 3.0)
    rows = []
    for (m, n), dtype in [(shape, dtype) for shape in shapes for dtype in DTYPES]:
        rows += time_case(Case(m, n, dtype, args.threads), list(range(1, args.threads + 1)), budget)
    return {"scaling": rows}


def report(data: dict[str, Any]) -> str:
    rows = [
        [f"{r['m']}x{r['n']}", r["dtype"], r["threads"], *(f"{r['speedup'][k]['of_minima']:.2f}" for k in NAMES),
         f"{r['speedup']['fused']['median']:.2f}", f"{r['false_sharing_costs']['of_minima']:.2f}"]
        for r in data["scaling"]
    ]  # fmt: skip
    header = ["size", "K", "threads", *NAMES, "fused (median)", "sharing costs"]
    return "speed over one thread, of minima\n" + common.table(header, rows)


def plot(data: dict[str, Any], path: Path) -> None:
    sizes = list(dict.fromkeys((r["m"], r["n"]) for r in data["scaling"]))
    with common.figure(path, columns=len(sizes), rows=len(DTYPES)) as axes:
        for line, dtype in zip(axes, DTYPES, strict=True):
            for axis, size in zip(line, sizes, strict=True):
                rows = [r for r in data["scaling"] if (r["m"], r["n"], r["dtype"]) == (*size, dtype)]
                counts = [r["threads"] for r in rows]
                for name in NAMES:
                    axis.plot(counts, [r["speedup"][name]["of_minima"] for r in rows], "o-", label=name)
                axis.plot(counts, counts, "k:", lw=1)
                axis.set(title=f"{size[0]} x {size[1]}, {dtype}", xlabel="threads", ylabel="speed over one thread")
                axis.set_xticks(counts)
        axes[0][0].legend()
