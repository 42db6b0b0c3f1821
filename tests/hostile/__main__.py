"""Run hostile trials in processes, tell the counts, and show a trial of each kind of failure.

    make hostile                                          every path, in minutes
    make hostile ARGS="--count 20000 --seed 7 --only warm"
    make hostile ARGS="--numbers extreme"                 masses of 1e-300 and the like in every trial
    make hostile ARGS="--largest 3"                       smaller problems: a small one that fails, too
    make hostile ARGS="--only cuda --seconds 480 --block 20"   as many trials as fit, of every path alike
    make hostile ARGS="--only ranks --index 1234"         one trial again

Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
from conftest import ISAS, available, has_gpu
from judge import is_false
from tqdm import tqdm

from mapuot.processor import core_count

from .problem import ODDS
from .trial import OVER_RANKS, PATHS
from .worker import STALLS, trial_of

TESTS = Path(__file__).resolve().parent.parent
LONGEST = 3600  # seconds of one process: ranks that wait for each other never end


@dataclass(frozen=True)
class Lane:
    """A path, on a backend, in an environment; ``share`` of the count that it gets."""

    name: str
    how: str
    backend: str = "cpu"
    isa: str = ""
    ranks: int = 0
    emulated: bool = False
    share: float = 1.0

    def command(self, *words: Any) -> list[str]:
        worker = ["hostile.worker", self.how, self.backend, *map(str, words)]
        if self.ranks:
            return [*launch.launcher(), "-n", str(self.ranks), sys.executable, "-m", "mpi4py", "-m", *worker]
        return [sys.executable, "-m", *worker]

    def environment(self) -> dict[str, str]:
        found = launch.environment(PYTHONWARNINGS="ignore", **({"MAPUOT_ISA": self.isa} if self.isa else {}))
        if self.emulated:
            found["PYTHONPATH"] = f"{TESTS / 'cuda' / 'cuda_on_cpu'}{os.pathsep}{found['PYTHONPATH']}"
        return found


def lanes() -> list[Lane]:
    """Return all paths that this machine can run."""
    few = ("cold", "warm", "batch")
    found = [Lane(how, how) for how in PATHS]
    found += [Lane(f"{how} {isa}", how, isa=isa, share=0.3) for isa in ISAS if available(isa) for how in few]
    found += [Lane(f"{how} reference", how, "reference", share=0.2) for how in few]
    with contextlib.suppress(pytest.skip.Exception):
        found += [Lane(f"{how} {count}", how, ranks=count, share=0.3) for how in OVER_RANKS for count in (2, 3)
                  if launch.launcher()]  # fmt: skip
    if has_gpu():
        on_gpu = ("", 1.0)
    else:
        on_gpu = (" on cpu", 0.02)
    there = ("cold", "warm", "batch", "path", "sparse", "points", "truncated", "kept", "self", "embeddings", "boxes",
             "own batch", "ragged")  # fmt: skip
    for how in there:
        found.append(Lane(f"{how} cuda{on_gpu[0]}", how, "cuda", emulated=bool(on_gpu[0]), share=on_gpu[1]))
    return found


def run(lane: Lane, *words: Any, seconds: float = math.inf) -> list[dict[str, Any]]:
    """Return the lines of one worker, one for each trial; a worker that dies, or outlives LONGEST, is a failure too."""
    how = {"env": lane.environment(), "cwd": TESTS, "capture_output": True, "timeout": min(seconds, LONGEST)}
    failed = ""
    try:
        done = subprocess.run(lane.command(*words), check=False, **how)
        output = done.stdout
        if done.returncode != 0:
            failed = f"worker ended with {done.returncode}: {done.stderr.decode()[-600:]}"
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        if seconds > LONGEST:
            failed = f"no end after {LONGEST} s"
    *lines, _ = output.decode().split("\n")  # a worker that was stopped may not have written its last line whole
    found = [dict(json.loads(line)) for line in lines if line.startswith("{")]
    if not failed and len(found) < words[2] and seconds > LONGEST:
        failed = f"worker ended after {len(found)} of {words[2]} trials"
    if failed:
        found.append({"failures": [{"index": words[1], "kind": "died", "size": 1.0, "text": failed}]})
    return found


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="trials of each path (parts of it for some backends)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of paths, or words in them, with commas")
    parser.add_argument("--jobs", type=int, default=core_count(), help="processes at once")
    parser.add_argument("--largest", type=int, default=12, help="points of a side, most of the time")
    parser.add_argument("--sides", choices=("all", "hard"), default="all", help="hard: most are balanced or ranges")
    parser.add_argument("--numbers", choices=("all", "usual", "extreme"), default="all", help="of every trial")
    parser.add_argument("--block", type=int, default=100, help="trials of one process")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--index", type=int, help="this trial of each path only")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    args = arguments(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and its children
    names = {lane.name for lane in lanes()}
    only = args.only.split(",")
    begun = time.perf_counter()
    chosen = [x for x in lanes() if any(x.name == word if word in names else word in x.name for word in only)]
    counts = [max(1, round(args.count * lane.share)) for lane in chosen]
    jobs = [(lane, first, min(args.block, count - first)) for lane, count in zip(chosen, counts, strict=True)
            for first in range(0, count, args.block)]  # fmt: skip
    jobs.sort(key=lambda job: job[1])  # all paths in turn, so that each has its part where the seconds end
    if args.index is not None:
        jobs = [(lane, args.index, 1) for lane in chosen]
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    failures: dict[tuple[str, Lane], list[dict[str, Any]]] = defaultdict(list)

    def in_time(*job: Any) -> list[dict[str, Any]]:
        left = args.seconds - (time.perf_counter() - begun)
        if left > 0:
            return run(*job, seconds=left)
        return []

    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), unit="block", disable=None) as bar:
        sizes = args.largest, args.sides, args.numbers
        tasks = {pool.submit(in_time, lane, args.seed, first, count, *sizes): lane for lane, first, count in jobs}
        for task in as_completed(tasks):
            lane = tasks[task]
            for answer in task.result():
                totals[lane.name].update(answer.get("totals", {}))
                for name, value in answer.get("worst", {}).items():
                    worst[lane.name][name] = max(worst[lane.name].get(name, 0.0), value)
                for failure in answer["failures"]:
                    failures[failure["kind"], lane].append(failure)
            bar.update()
        tell(chosen, totals, worst, failures)
        wrong = sum(len(found) for (kind, _), found in failures.items() if is_false(kind))
        print(
            f"\nseed {args.seed}: {sum(t['problems'] for t in totals.values())} problems, of them "
            f"{sum(t['judged'] for t in totals.values())} compared with an independent answer, {wrong} false claims, "
            f"{sum(map(len, failures.values())) - wrong} other failures, {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
    show(failures, args)
    return 1 if failures else 0


def tell(chosen: list[Lane], totals: Any, worst: Any, failures: Any) -> None:
    names = (
        "trials", "problems", "judged", "without reference", "converged", "tol >= 1e-7", *STALLS, "truncated",
        "refused", "raised",
    )  # fmt: skip
    print(f"{'path':22}" + "".join(f"{name:>19}" for name in names) + f"{'error / bound':>19}")
    for lane in chosen:
        counted = "".join(f"{totals[lane.name][n]:>19}" for n in names)
        print(f"{lane.name:22}{counted}{worst[lane.name].get('error / bound', 0):>19.3g}")
    for (kind, lane), found in sorted(failures.items(), key=lambda item: (not is_false(item[0][0]), -len(item[1]))):
        top = max(found, key=lambda f: f["size"])
        mark = "FALSE " if is_false(kind) else ""
        worst_one = f"worst {top['size']:.3g} times, trial {top['index']}: {top['text']}"
        print(f"{mark}{kind}: {lane.name}: {len(found)} ({worst_one})")


def show(failures: Any, args: argparse.Namespace) -> None:
    """Print the worst trial of each kind and path, in digits that give its numbers back."""
    for (kind, lane), found in failures.items():
        if kind == "died":
            continue
        top = max(found, key=lambda f: f["size"])
        ODDS["all"] = ODDS[args.sides]
        with np.printoptions(floatmode="unique", threshold=sys.maxsize):
            trial = repr(trial_of(lane.how, args.seed, top["index"], args.largest, args.numbers))
        print(f"\n# {kind}: {lane.name}, seed {args.seed}, trial {top['index']}\n# {top['text']}\n{trial}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
