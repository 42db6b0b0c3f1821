"""``python -m fuzz TARGET --seconds S``: the corpus of a target (readers, arguments, core), then mutations of it.

    --seconds S    how long (60)          --seed N    of the mutations

The exit code is not 0 where an input finds something: its bytes are told.
"""

import argparse
import time

from . import inputs, judge
from .targets import TARGETS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("target", choices=[*TARGETS])
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--seed", type=int, default=1)
given = parser.parse_args()
end, made = time.monotonic() + given.seconds, 0
for data in inputs(given.target, given.seed):
    if time.monotonic() > end:
        break
    judge(TARGETS[given.target], data)
    made += 1
print(f"done, {given.target}: {made} inputs")
