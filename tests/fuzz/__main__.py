"""``python -m fuzz TARGET --seconds S``: atheris (guided by coverage) where it is installed, else random mutations.

    TARGET         readers or arguments
    --seconds S    how long (60)          --runs N     or how many inputs
    --seed N       of the mutations       --input F    one input from a file, and what it raises
    --keep FOLDER  atheris: where inputs that reach new code are kept

The corpus is corpus/TARGET. An input that finds something is written to crash-* in the present folder, and the exit
code is not 0. SIGTERM and Ctrl-C end the mutations before their time. Counts are told every minute, and at the end.
"""

import argparse
import hashlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parent / "corpus"
ENDED = []  # signals that asked for an end


def seeds(target):
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutated(data, other, rng):
    """A few bytes exchanged, put in, taken out, or taken from another input."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 9)):
        at, kind = int(rng.integers(len(data) + 1)), rng.integers(6)
        if kind == 0:
            data[at : at + int(rng.integers(1, 20))] = b""
        elif kind == 1:
            data[at:at] = rng.bytes(int(rng.integers(1, 5)))
        elif kind == 2:
            data[at : at + 20] = other[at : at + 20]
        elif at < len(data):
            data[at] = rng.integers(256)
    return bytes(data)


def at_random(name, function, seconds, runs, seed):
    """Mutations of the corpus; how many."""
    rng, known, begun, made, told = np.random.default_rng(seed), seeds(name), time.monotonic(), 0, 0
    for data in known:
        function(data)
    while made < runs if runs else time.monotonic() - begun < seconds and not ENDED:
        data = mutated(known[rng.integers(len(known))], known[rng.integers(len(known))], rng)
        try:
            function(data)
        except BaseException:
            path = Path("crash-" + hashlib.sha1(data, usedforsecurity=False).hexdigest())
            path.write_bytes(data)
            print(f"{path}: input {made} of seed {seed}")
            raise
        made += 1
        if time.monotonic() - begun > 60 * (told + 1):
            told += 1
            tell(name, made)
    return made


def tell(name, made):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {made} runs of {len(seeds(name))} seeds, memory at most {peak:.0f} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["readers", "arguments"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris and not given.input:
        with atheris.instrument_imports(include=["mapuot", "zipfile", "numpy.lib"]):
            from .targets import TARGETS
        limits = [f"-runs={given.runs}" if given.runs else f"-max_total_time={given.seconds}", f"-seed={given.seed}"]
        keep = given.keep or Path(tempfile.mkdtemp())  # atheris writes into the first folder
        keep.mkdir(parents=True, exist_ok=True)
        options = ["-max_len=4096", "-rss_limit_mb=4096", "-timeout=60", "-print_final_stats=1", *limits]
        atheris.Setup([sys.argv[0], *options, str(keep), str(CORPUS / given.target)], TARGETS[given.target])
        atheris.Fuzz()
        return
    from .targets import TARGETS

    function = TARGETS[given.target]
    if given.input:
        function(given.input.read_bytes())
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ENDED.append(number))
    try:
        made = at_random(given.target, function, given.seconds, given.runs, given.seed)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    print("done, ", end="")
    tell(given.target, made)


if __name__ == "__main__":
    main()
