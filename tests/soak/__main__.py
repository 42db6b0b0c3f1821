"""``python -m soak --minutes 60``: trials of all kinds in random order; counts, memory, and seeds of failures.

    --minutes N    how long (60)        --seed N    of the first trial; trial k of a run has seed + k
    --only KIND    one kind: readers, arguments and core as in `make fuzz`

SIGTERM and Ctrl-C end it after the present trial. Exit code 1 where a trial failed, or where the memory of this process
grew by more than GROWTH after the first tenth. Under a sanitizer, which keeps freed memory, memory is not checked.
"""

import argparse
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from .trials import KINDS, counts

GROWTH = 16.0  # MiB: the memory that malloc keeps varies by some
WEIGHTS = {"calls": 8, "threads": 4, "ranks": 1}  # how often of each kind, the others 2: a job of ranks takes seconds


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*KINDS])
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told = []
    made = Counter()
    failed = Counter()
    took = Counter()
    seed = given.seed
    first = None
    for number in (signal.SIGINT, signal.SIGTERM):  # the children of this process may have got it, too
        signal.signal(number, lambda *_: told.append(True))
    if given.only:
        kinds = [given.only]
    else:
        kinds = [*KINDS]
    order = np.random.default_rng(given.seed)
    begun = time.monotonic()
    seconds = 60 * given.minutes
    while not told and kinds and (after := time.monotonic() - begun) < seconds:
        if first is None and after > seconds / 10:
            first = resident()
        weights = np.array([WEIGHTS.get(kind, 2) for kind in kinds], float)
        kind = str(order.choice(kinds, p=weights / weights.sum()))
        trial = time.monotonic()
        try:
            KINDS[kind](np.random.default_rng(seed))
        except pytest.skip.Exception as reason:
            print(f"{kind}: skipped, {reason}", flush=True)
            kinds.remove(kind)
            continue
        except BaseException:
            if told:
                break
            failed[kind] += 1
            print(f"FAILED: {kind}, seed {seed}\n{traceback.format_exc()}", flush=True)
        made[kind], took[kind], seed = made[kind] + 1, took[kind] + time.monotonic() - trial, seed + 1
    for kind, count in made.items():
        print(f"{kind:<10} {count:>8} trials {failed[kind]:>8} failed {took[kind]:>9.0f} s")
    if "LD_PRELOAD" in os.environ:
        grown = 0.0
    else:
        grown = resident() - (first or resident())
    print(f"seeds {given.seed} to {seed - 1}, {dict(counts)}, {grown:.1f} MiB more than after a tenth of the time")
    sys.exit(bool(failed.total() or grown > GROWTH))


if __name__ == "__main__":
    main()
