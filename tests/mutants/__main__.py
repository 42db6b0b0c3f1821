"""``python -m mutants``: change one rule at a time in a copy of the tree, and tell which changes no test notices.

    make mutants                             all of table.py: each with the tests that are named beside it
    make mutants ARGS="--only plan_error"    changes with this word in file, text or test
    make mutants ARGS="--drawn 100 --seed 3" 100 changes drawn by the rule of draw.py
    make mutants ARGS="--drawn 50 --first 100 --only rules.h" those after the first 100 of one file

Kernels run on a GPU where there is one, else on the CPU through tests/cuda/cuda_on_cpu. A change is noticed
when a test fails, or hangs. Exit code 1 where a change survives without a reason in the table, 2
where the table is wrong: a text that is not there once, a change that does not compile, a test that fails without it.
"""

import argparse
import functools
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from . import draw
from .table import EXPLAINED, TABLE

ROOT = Path(__file__).resolve().parents[2]
CORE = "src_c/"  # the compiled sources
OWN_BUILD = "core/test_rules.py"  # compiles the changed headers itself, in a second: no core is built for it
PATIENCE = 5  # times that tests take without a change, and a minute: a change may slow them down
BUILT = {"MAPUOT_ISAS": "scalar", "CFLAGS": "-O0"}  # every rule is in it; the vectors of others are checked against it
if shutil.which("ccache"):
    BUILT |= {"CC": "ccache gcc", "CCACHE_NOHASHDIR": "1"}
CHANGE = re.compile(r"\{\{(.*?)(?:~>(.*?))?\}\}", re.DOTALL)


class WrongError(Exception):
    """The table or the tree does not meet a trial's conditions."""


@functools.cache
def gpu_count():
    """Return how many GPUs this machine has: kernels are run by the CPU if none."""
    counted = "import cupy; print(cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True, check=False)
    if done.returncode:  # without CuPy
        return 0
    return int(done.stdout)


def entries():
    """Return (file, text, instead, the tests that notice, "" or the reason why none can) of the whole table."""
    table = [(file, change, tests, "") for file, (tests, changes) in TABLE.items() for change in changes]
    for file, change, tests, reason in table + [(*key, "", reason) for key, reason in EXPLAINED.items()]:
        before, old, new, after = CHANGE.split(change)
        yield file, before + old + after, before + (new or "") + after, tests, reason


def broken_entries():
    """Return the table's texts that do not stand exactly once in their files."""
    told = {(file, text): (ROOT / file).read_text().count(text) for file, text, *_ in entries()}
    return [f"{file} has {count} times, not once: {text}" for (file, text), count in told.items() if count != 1]


def paths(tests):
    return [f"tests/{word}" for word in tests.split()]


def listed_files():
    """Return the files that git tracks or would add; in a tree without git, all but hidden ones."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-zco", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        return list(filter(None, listed.split("\0")))
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_symlink() or path.is_file()]
    return [str(path) for path in found if not any(part.startswith(".") for part in path.parts)]


class Copy:
    """The files of the tree, as they are now, and a core built from them."""

    numbers = itertools.count()

    def __init__(self, folder):
        # stale: the core has been built with a change, or not at all
        self.folder = Path(folder)
        self.stale = True
        self.number = next(self.numbers)
        for name in listed_files():
            if os.path.lexists(ROOT / name):  # not one that is deleted, but a link to a folder
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)

    def run(self, command, seconds, kernels=False, **more):
        """Return (exit code, output); None where it took longer, and its processes are gone."""
        tests = self.folder / "tests"
        folders = [self.folder, tests, *filter(None, [os.environ.get("PYTHONPATH")])]
        if kernels and gpu_count():
            more["CUDA_VISIBLE_DEVICES"] = str(self.number % gpu_count())
        elif kernels:
            folders.insert(1, tests / "cuda" / "cuda_on_cpu")
        paths = os.pathsep.join(map(str, folders))
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, env={**os.environ, "PYTHONPATH": paths, **threads, **more},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
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

    def build(self):
        for old in (self.folder / "mapuot").glob("_core*.so"):
            old.unlink()
        command = ["setup.py", "-q", "build_ext", "--inplace"]
        code, out = self.run(command, 1200, CCACHE_BASEDIR=str(self.folder), **BUILT)
        if code != 0:
            raise WrongError(f"does not compile:\n{out[-2000:]}")

    def tried(self, tests, seconds):
        """Return "" where all tests pass, else the first failure."""
        command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths(tests)]
        code, out = self.run(command, seconds, "cuda" in tests)
        if code is None:
            return f"no end after {seconds:.0f} s"
        if code in (0, 1, 2):  # 2: an import of a test raises
            told = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if code == 0:
                return ""
            return (told or ["failed"])[0].split(" - ")[0]
        if code < 0:
            return f"signal {-code}"
        raise WrongError(f"pytest ends with {code}:\n{out[-2000:]}")

    def trial(self, file, text, instead, tests, seconds):
        """Replace a text that occurs once in a file; return the first test that fails, and restore the file."""
        before = (self.folder / file).read_text()
        if before.count(text) != 1:
            raise WrongError(f"{file} has {before.count(text)} times, not once: {text}")
        return self.changed(file, before.replace(text, instead), tests, seconds)

    def changed(self, file, after, tests, seconds):
        """Write a changed file; return the first test that fails, and restore the file."""
        path = self.folder / file
        before = path.read_text()
        compiled = file.startswith(CORE) and tests != OWN_BUILD
        if self.stale and not compiled:
            self.build()
        self.stale = compiled
        path.write_text(after)
        try:
            if compiled:
                self.build()
            return self.tried(tests, seconds)
        finally:
            path.write_text(before)


def seconds_without(tests, most=3600):
    """Return how long the tests take on the unchanged tree, where they must pass; tests of kernels apart."""
    with tempfile.TemporaryDirectory(prefix="mapuot-mutants-") as folder:
        copy = Copy(folder)
        copy.build()
        begun = time.monotonic()
        for some in ([x for x in tests if ("cuda" in x) == emulated] for emulated in (False, True)):
            if some and (told := copy.tried(" ".join(some), most)):
                raise WrongError(f"without a change: {told}")
        return time.monotonic() - begun


class Trials:
    """Trials of drawn changes, several at once, each thread in a copy of its own."""

    def __init__(self, folders, seconds):
        self.folders = folders
        self.begun = time.monotonic()
        self.until = self.begun + seconds
        self.here = threading.local()

    def left(self):
        return max(0.0, self.until - time.monotonic())

    def patience(self, tests):
        """Return the most seconds that tests may take: by their time on the unchanged tree, where they must pass."""
        return 60 + PATIENCE * seconds_without(tests.split(), min(self.left(), 3600))

    def attempt(self, change, patience):
        """Tell whether a test notices the change, and return a word for the count."""
        left = self.left()
        if not left:
            return "out of time"
        if not hasattr(self.here, "copy"):
            self.here.copy = Copy(self.folders.enter_context(tempfile.TemporaryDirectory(prefix="mapuot-mutants-")))
        text = (ROOT / change.file).read_text()
        after = text[: change.first] + change.new + text[change.last :]
        try:
            told = self.here.copy.changed(change.file, after, change.tests, min(patience, left))
            word = "noticed" if told else "SURVIVES"
        except WrongError as error:
            told = str(error).splitlines()[-1]
            word = "no program"
        if told.startswith("no end") and left < patience:
            return "out of time"
        print(f"{time.monotonic() - self.begun:5.0f} s  {change.told(text)}\n    {word} {told}", flush=True)
        return word


def try_drawn(given):
    """Try changes that `draw` draws, several at once; report the changes that no test notices."""
    words = given.only.split(",")
    changes = [x for x in draw.drawn(ROOT, 10**9, given.seed) if any(word in x.file + x.tests for word in words)]
    changes = changes[given.first :][: given.drawn]
    groups = list(dict.fromkeys(change.tests for change in changes))
    counts = Counter()
    with ExitStack() as folders, ThreadPoolExecutor(given.jobs) as workers, ThreadPoolExecutor(given.jobs) as unchanged:
        trials = Trials(folders, given.seconds)
        patience = {unchanged.submit(trials.patience, tests): tests for tests in groups}
        tasks = []
        for done in as_completed(patience):
            some = [change for change in changes if change.tests == patience[done]]
            try:
                tasks += [workers.submit(trials.attempt, change, done.result()) for change in some]
            except WrongError as error:
                counts["WRONG"] += len(some)
                print(f"{patience[done]}\n    {error}", flush=True)
        counts.update(task.result() for task in tasks)
    print(f"\n{len(changes)} drawn of {len(draw.all_changes(ROOT))}: {dict(counts)}", flush=True)
    if counts["WRONG"]:
        return 2
    return int(counts["SURVIVES"] > 0)


def main(words):
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", default="", help="changes with this word in their file, text or test; drawn: or words"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="changes at once")
    parser.add_argument("--drawn", type=int, default=0, help="try so many drawn changes instead of the table's")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the drawn changes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end trials of drawn changes after so long")
    given = parser.parse_args(words)
    if given.drawn:
        return try_drawn(given)
    chosen = [entry for entry in entries() if given.only in " ".join((entry[0], entry[1], entry[3]))]
    counts = Counter()
    survivors = []
    wrong = []
    begun = time.monotonic()
    here = threading.local()

    def attempt(entry):
        *change, tests, reason = entry
        if not tests:  # nothing can notice it
            return f"explained: {reason}"
        if not hasattr(here, "copy"):
            here.copy = Copy(folders.enter_context(tempfile.TemporaryDirectory(prefix="mapuot-mutants-")))
        try:
            return here.copy.trial(*change, tests, seconds) or "SURVIVES"
        except WrongError as error:
            return f"WRONG: {error}"

    with ExitStack() as folders, ThreadPoolExecutor(given.jobs) as workers:
        everything = list(dict.fromkeys(word for entry in chosen for word in entry[3].split()))
        if everything:
            seconds = 60 + PATIENCE * seconds_without(everything)
        else:
            seconds = 60
        for (file, text, instead, _, reason), told in zip(chosen, workers.map(attempt, chosen), strict=True):
            line = f"{file}: {text}  ->  {instead}"
            counts["explained" if reason else "noticed"] += not told.startswith(("SURVIVES", "WRONG")) or bool(reason)
            survivors += [line] * (told == "SURVIVES")
            wrong += [f"{line}\n    {told}"] * told.startswith("WRONG")
            print(f"{time.monotonic() - begun:5.0f} s  {line}\n    {told}", flush=True)
    told = f"{counts['noticed']} noticed, {counts['explained']} explained, {len(survivors)} that no test notices"
    print(f"\n{len(chosen)} changes: {told}", *survivors, *wrong, sep="\n")
    if wrong:
        return 2
    if survivors:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
