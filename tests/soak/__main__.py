"""``python -m soak --minutes 60``: trials of all kinds in random order; counts, memory, and the seed of what failed.

    --minutes N    how long (60)        --seed N    of the first trial; trial k of a run has seed + k
    --only KIND    one kind             --once      one trial of each kind

Exit code 1 where a trial failed, or where the memory of this process grew by more than GROWTH after the first tenth.
"""

import argparse
import os
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from .trials import KINDS

GROWTH = 16.0  # MiB: what malloc keeps varies by some
WEIGHTS = {"calls": 8, "threads": 4, "ranks": 1}  # how often of each kind, the others 2: a job of ranks takes seconds


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def trial(kind, seed):
    """Whether it went well."""
    try:
        KINDS[kind](np.random.default_rng(seed))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        print(f"FAILED: {kind}, seed {seed}\n{traceback.format_exc()}", flush=True)
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*KINDS])
    parser.add_argument("--once", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = [given.only] if given.only else [*KINDS]
    weights = np.array([WEIGHTS.get(kind, 2) for kind in kinds], float)
    order, begun, seconds = np.random.default_rng(given.seed), time.monotonic(), 60 * given.minutes
    made, failed, took, first, seed = Counter(), Counter(), Counter(), None, given.seed
    while (len(made) < len(kinds)) if given.once else (time.monotonic() - begun < seconds):
        kind = kinds[seed - given.seed] if given.once else str(order.choice(kinds, p=weights / weights.sum()))
        start = time.monotonic()
        failed[kind] += not trial(kind, seed)
        made[kind], took[kind], seed = made[kind] + 1, took[kind] + time.monotonic() - start, seed + 1
        if first is None and time.monotonic() - begun > seconds / 10:
            first = resident()
    last = resident()
    first = last if first is None else first
    print(f"{'kind':<10} {'trials':>8} {'failed':>8} {'seconds':>9}")
    for kind in kinds:
        print(f"{kind:<10} {made[kind]:>8} {failed[kind]:>8} {took[kind]:>9.0f}")
    minutes = (time.monotonic() - begun) / 60
    print(f"{sum(made.values())} trials in {minutes:.1f} min, seeds {given.seed} to {seed - 1}")
    print(f"memory after a tenth of the time {first:.1f} MiB, at the end {last:.1f} MiB")
    sys.exit(bool(failed.total() or last - first > GROWTH))


if __name__ == "__main__":
    main()
