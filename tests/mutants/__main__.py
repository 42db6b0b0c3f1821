"""``python -m mutants``: change one rule at a time in a copy of the tree, and tell which changes no test notices.

    make mutants                             all of table.py, an hour and more on two cores
    make mutants ARGS="--only plan_error"    those whose file or text has this word in it

A change is noticed when a test fails, or hangs. Exit code 1 where a change survives without a reason in the table, 2
where the table is wrong: a text that is not there once, a change that does not compile, a test that fails without it.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .table import AREAS

ROOT = Path(__file__).resolve().parents[2]
CORE = "src_c"  # what is compiled
PATIENCE = 5  # times that the tests of an area take without a change, and a minute: a change may slow them down
BUILT = {"MAPUOT_ISAS": "scalar"}  # every rule is in it; the vectors of others are checked against it
if shutil.which("ccache"):
    BUILT |= {"CC": "ccache gcc", "CCACHE_NOHASHDIR": "1"}


class WrongError(Exception):
    """The table or the tree is not what a trial needs."""


def copied(folder):
    """The files of the tree that git knows or would add, as they are now."""
    names = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        if os.path.lexists(ROOT / name):  # not one that is deleted, but a link to a folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run(folder, command, seconds, **more):
    """(exit code, output); None where it took longer, and its processes are gone."""
    paths = os.pathsep.join(map(str, (folder, folder / "tests")))
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env={**os.environ, "PYTHONPATH": paths, **threads, **more}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # after Ctrl-C, too
        if job.returncode is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    return job.returncode, out


def build(folder):
    """Compile the core of the copy."""
    for old in (folder / "mapuot").glob("_core*.so"):
        old.unlink()
    code, out = run(folder, ["setup.py", "-q", "build_ext", "--inplace"], 1200, CCACHE_BASEDIR=str(folder), **BUILT)
    if code != 0:
        raise WrongError(f"does not compile:\n{out[-2000:]}")


def tried(folder, tests, seconds):
    """What the tests of an area say: "" where all of them pass, else the first that does not."""
    files = [f"tests/{word}" if ".py" in word else word for word in tests.split()]
    code, out = run(folder, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files], seconds)
    if code is None:
        return f"no end after {seconds:.0f} s"
    if code in (0, 1, 2):  # 2: what a test imports raises
        told = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "" if code == 0 else (told or ["failed"])[0].split(" - ")[0]
    if code < 0:
        return f"signal {-code}"
    raise WrongError(f"pytest ends with {code}:\n{out[-2000:]}")


def trial(folder, file, text, instead, tests, seconds):
    """What notices one change; the file is as it was afterwards."""
    path = folder / file
    before = path.read_text()
    if before.count(text) != 1:
        raise WrongError(f"{file} has {before.count(text)} times, not once: {text}")
    path.write_text(before.replace(text, instead))
    try:
        if file.startswith(CORE):
            build(folder)
        return tried(folder, tests, seconds)
    finally:
        path.write_text(before)


def main(words):
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="changes with this word in their file or text")
    given = parser.parse_args(words)
    survivors, wrong, count = [], [], 0
    with tempfile.TemporaryDirectory(prefix="mapuot-mutants-") as name:
        folder, stale = Path(name), True  # stale: the core in the copy is that of a change, or none
        copied(folder)
        for tests, changes in AREAS:
            chosen = [(file, *x) for file, some in changes.items() for x in some if given.only in f"{file} {x[0]}"]
            seconds = None
            for file, text, instead, *reason in chosen:
                try:
                    if stale and (seconds is None or not file.startswith(CORE)):
                        build(folder)
                        stale = False
                    if seconds is None:
                        begun = time.monotonic()
                        if told := tried(folder, tests, 1800):
                            raise WrongError(f"without a change: {told}")
                        seconds = 60 + PATIENCE * (time.monotonic() - begun)
                    stale = stale or file.startswith(CORE)
                    told = trial(folder, file, text, instead, tests, seconds)
                except WrongError as error:
                    wrong.append(told := f"WRONG: {error}")
                    if seconds is None:
                        break
                if not told and not reason:
                    survivors.append(f"{file}: {text}  ->  {instead}")
                count += 1
                print(f"{file}: {text}  ->  {instead}\n    {told or ' '.join(['SURVIVES', *reason])}", flush=True)
    print(f"\n{count} changes, {len(survivors)} that no test notices", *survivors, *wrong, sep="\n")
    return 2 if wrong else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
