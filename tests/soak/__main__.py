"""``python -m soak --minutes 60``: trials of all kinds in random order; counts, memory, and the seed of what failed.

    --minutes N    how long (60)        --seed N    of the first trial; trial k of a run has seed + k
    --only KIND    one kind             --tell N    minutes between two tables (5)

SIGTERM and Ctrl-C end it after the present trial. Exit code 1 where a trial failed, or where the memory of this process
grew by more than GROWTH after the first tenth.
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

GROWTH = 16.0  # MiB: what malloc keeps varies by some
WEIGHTS = {"calls": 8, "threads": 4, "ranks": 1}  # how often of each kind, the others 2: a job of ranks takes seconds


def resident():
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class Soak:
    """A run: its counts, and whether it was told to end."""

    def __init__(self, kinds, seed):
        self.kinds, self.first_seed, self.seed, self.begun = kinds, seed, seed, time.monotonic()
        self.made, self.failed, self.took = Counter(), Counter(), Counter()
        self.first = None  # MiB after a tenth of the time
        self.told = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.tell)

    def tell(self, number, frame):
        """The end, as a signal has it; the children of this process may have got it, too."""
        self.told = True

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def trial(self, kind):
        begun = time.monotonic()
        try:
            KINDS[kind](np.random.default_rng(self.seed))
        except pytest.skip.Exception as reason:
            print(f"{kind}: skipped, {reason}", flush=True)
            self.kinds.remove(kind)
            return
        except BaseException:
            if self.told:
                return
            self.failed[kind] += 1
            print(f"FAILED: {kind}, seed {self.seed}\n{traceback.format_exc()}", flush=True)
        self.made[kind], self.took[kind] = self.made[kind] + 1, self.took[kind] + time.monotonic() - begun
        self.seed += 1

    def table(self):
        print(f"{'kind':<10} {'trials':>8} {'failed':>8} {'seconds':>9}")
        for kind in self.kinds:
            print(f"{kind:<10} {self.made[kind]:>8} {self.failed[kind]:>8} {self.took[kind]:>9.0f}")
        seeds = f"seeds {self.first_seed} to {self.seed - 1}"
        more = "".join(f", {count} {what}" for what, count in sorted(counts.items()))
        print(f"{self.made.total()} trials in {self.seconds / 60:.1f} min, {seeds}{more}")
        print(f"MiB after a tenth of the time and now: {self.first or 0:.1f}, {resident():.1f}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tell", type=float, default=5)
    parser.add_argument("--only", choices=[*KINDS])
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    soak = Soak([given.only] if given.only else [*KINDS], given.seed)
    order, seconds, next_table = np.random.default_rng(given.seed), 60 * given.minutes, 60 * given.tell
    while not soak.told and soak.kinds and soak.seconds < seconds:
        weights = np.array([WEIGHTS.get(kind, 2) for kind in soak.kinds], float)
        soak.trial(str(order.choice(soak.kinds, p=weights / weights.sum())))
        if soak.first is None and soak.seconds > seconds / 10:
            soak.first = resident()
        if soak.seconds > next_table:
            soak.table()
            next_table += 60 * given.tell
    soak.table()
    sys.exit(bool(soak.failed.total() or (soak.first and resident() - soak.first > GROWTH)))


if __name__ == "__main__":
    main()
