"""``python -m fuzz TARGET --seconds S``: atheris (guided by coverage) where it is installed, else random mutations.

    TARGET         readers or arguments
    --seconds S    how long (60)          --seed N        of the mutations
    --input F      one input from a file  --keep FOLDER   atheris: where inputs that reach new code are kept

The corpus is corpus/TARGET. The exit code is not 0 where an input finds something: atheris writes it to crash-* in the
present folder, the mutations print its bytes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from . import CORPUS, inputs, judge


def guided(atheris, target, given):
    with atheris.instrument_imports(include=["mapuot", "zipfile", "numpy.lib"]):
        from .targets import TARGETS
    keep = given.keep or Path(tempfile.mkdtemp())  # atheris writes into the first folder
    keep.mkdir(parents=True, exist_ok=True)
    options = ["-max_len=4096", "-rss_limit_mb=4096", "-timeout=60", "-print_final_stats=1"]
    options += [f"-max_total_time={given.seconds}", f"-seed={given.seed}", str(keep), str(CORPUS / target)]
    atheris.Setup([sys.argv[0], *options], TARGETS[target])
    atheris.Fuzz()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["readers", "arguments"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris and not given.input:
        guided(atheris, given.target, given)
        return
    from .targets import TARGETS

    if given.input:
        TARGETS[given.target](given.input.read_bytes())
        return
    end, made = time.monotonic() + given.seconds, 0
    for data in inputs(given.target, given.seed):
        if time.monotonic() > end:
            break
        judge(TARGETS[given.target], data)
        made += 1
    print(f"done, {given.target}: {made} inputs")


if __name__ == "__main__":
    main()
