"""threads: how the pass scales over threads, and what writing to shared cache lines would cost.

All thread counts are timed in the same rounds. "own lines" and "false sharing" are one and the same row-by-row kernel;
the threads' column sums lie in one array, side by side in pieces of 8 doubles (a cache line each) or of 4 (two threads
write every line). Threads beyond the cores of this machine are not started.

"unequal": one worker of all makes its rows 1, 2 or 4 times over, with rows shared evenly ("static") and by speed
("auto"), in times of the ideal: the pass that static makes of equal workers, times T / (T - 1 + 1 / slowness).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mapuot._core import ffi, lib

from mapuot.backends import Options, cpu
from mapuot.backends.cpu import native
from mapuot.problem.problem import Problem

from . import common, library
from .limits import Buffer
from .one_pass import DTYPES, Case, relative

SHAPES = [(1024, 1024), (2048, 2048), (8192, 8192)]
SLOWNESS = (1, 2, 4)
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


def time_unequal(m: int, n: int, threads: int, budget: float) -> list[dict[str, Any]]:
    """row_pass on a float32 K, as a solve runs it, with a slow last worker; each schedule keeps its own paces."""
    rng = np.random.default_rng([m, n])
    problem = Problem.from_arrays(rng.random((m, n), np.float32), None, None, 0.5, 1.0, "kl", "product", cpu)
    workspace = cpu.Workspace(problem, Options(True, 5, False, "float32", -1.0, -1.0, threads))
    workspace.absorb(np.zeros(n))
    workspace.progress.narrow = 0
    shares = {slow: ffi.new("mapuot_share[]", threads) for slow in SLOWNESS}

    def passing(schedule: str, slow: int) -> Callable[[], None]:
        mine = shares[slow] if schedule == "auto" else ffi.NULL

        def one_pass() -> None:
            lib.mapuot_pool_slow(workspace.pool, threads - 1, slow)
            workspace.state.shares = mine
            workspace.progress.passes += 1
            lib.mapuot_row_pass(workspace.pool, workspace.state)

        return one_pass

    calls = {(schedule, slow): passing(schedule, slow) for slow in SLOWNESS for schedule in ("static", "auto")}
    times = common.interleave(calls, budget, (10, 1000))
    lib.mapuot_pool_slow(workspace.pool, threads - 1, 1)
    rows = []
    for slow in SLOWNESS:
        ideal = threads / (threads - 1 + 1 / slow)
        over = {name: common.ratio(times, (name, slow), ("static", 1)) for name in ("static", "auto")}
        over = {name: {key: value / ideal for key, value in found.items()} for name, found in over.items()}
        rows.append({
            "m": m, "n": n, "threads": threads, "slow": slow, "over_ideal": over,
            "part_of_the_slow": shares[slow][threads - 1].rows / m * threads,
            "seconds": common.summaries({name: times[name, slow] for name in over}),
        })  # fmt: skip
    return rows


def run(args: Any) -> dict[str, Any]:
    shapes, budget = (SHAPES[:1], 0.5) if args.quick else (SHAPES, 3.0)
    rows = []
    for (m, n), dtype in [(shape, dtype) for shape in shapes for dtype in DTYPES]:
        rows += time_case(Case(m, n, dtype, args.threads), list(range(1, args.threads + 1)), budget)
    unequal = []
    for m, n in shapes if args.threads > 1 else []:
        unequal += time_unequal(m, n, args.threads, 2 * budget)
    return {"scaling": rows, "unequal": unequal}


def report(data: dict[str, Any]) -> str:
    rows = [
        [f"{r['m']}x{r['n']}", r["dtype"], r["threads"], *(f"{r['speedup'][k]['of_minima']:.2f}" for k in NAMES),
         f"{r['speedup']['fused']['median']:.2f}", f"{r['false_sharing_costs']['of_minima']:.2f}"]
        for r in data["scaling"]
    ]  # fmt: skip
    header = ["size", "K", "threads", *NAMES, "fused (median)", "sharing costs"]
    text = "speed over one thread, of minima\n" + common.table(header, rows)
    rows = [
        [f"{r['m']}x{r['n']}", r["threads"], r["slow"], *(f"{r['over_ideal'][name][of]:.3f}"
         for name in ("static", "auto") for of in ("of_minima", "median")), f"{r['part_of_the_slow']:.2f}"]
        for r in data["unequal"]
    ]  # fmt: skip
    header = ["size", "threads", "slow", "static", "(median)", "auto", "(median)", "rows of the slow"]
    return text + "\n\na worker that is slow, in times of the ideal\n" + common.table(header, rows)


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
