"""``python -m mutants``: change one rule at a time in a copy of the tree, and tell which changes no test notices.

    make mutants                             all of table.py: each with the tests that are named beside it
    make mutants ARGS="--only plan_error"    changes with this word in file, text or test
    make mutants ARGS="--drawn 100 --seed 3" 100 changes drawn by the rule of draw.py

A change is noticed when a test fails, or hangs. Exit code 1 where a change survives without a reason in the table, 2
where the table is wrong: a text that is not there once, a change that does not compile, a test that fails without it.
"""

import argparse
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
from concurrent.futures import ThreadPoolExecutor
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


class Copy:
    """The files of the tree that git tracks or would add, as they are now, and a core built from them."""

    def __init__(self, folder):
        # stale: the core has been built with a change, or not at all
        self.folder = Path(folder)
        self.stale = True
        command = ["git", "ls-files", "-zco", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):  # not one that is deleted, but a link to a folder
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)

    def run(self, command, seconds, emulated=False, **more):
        """Return (exit code, output); None where it took longer, and its processes are gone."""
        tests = self.folder / "tests"
        paths = os.pathsep.join(map(str, (self.folder, *[tests / "cuda" / "cuda_on_cpu"] * emulated, tests)))
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


def seconds_without(tests):
    """Return how long the tests take on the unchanged tree, where they must pass; tests of kernels apart."""
    with tempfile.TemporaryDirectory(prefix="mapuot-mutants-") as folder:
        copy = Copy(folder)
        copy.build()
        begun = time.monotonic()
        for some in ([x for x in tests if ("cuda" in x) == emulated] for emulated in (False, True)):
            if some and (told := copy.tried(" ".join(some), 3600)):
                raise WrongError(f"without a change: {told}")
        return time.monotonic() - begun


def try_drawn(count, seed, only):
    """Try changes that `draw` draws, one after another; report the changes that no test notices."""
    changes = [change for change in draw.drawn(ROOT, 10**9, seed) if only in change.file + change.tests][:count]
    counts = Counter()
    begun = time.monotonic()
    seconds = {tests: 60 + PATIENCE * seconds_without(tests.split()) for tests in {change.tests for change in changes}}
    with tempfile.TemporaryDirectory(prefix="mapuot-mutants-") as folder:
        copy = Copy(folder)
        for change in changes:
            text = (copy.folder / change.file).read_text()
            after = text[: change.first] + change.new + text[change.last :]
            try:
                told = copy.changed(change.file, after, change.tests, seconds[change.tests]) or "SURVIVES"
            except WrongError as error:
                told = f"no program: {str(error).splitlines()[-1]}"
            counts[told.partition(":")[0] if told.startswith(("SURVIVES", "no program")) else "noticed"] += 1
            print(f"{time.monotonic() - begun:5.0f} s  {change.told(text)}\n    {told}", flush=True)
    print(f"\n{len(changes)} drawn of {len(draw.all_changes(ROOT))}: {dict(counts)}")
    return counts["SURVIVES"] > 0


def main(words):
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="changes with this word in their file, text or test")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="changes at once")
    parser.add_argument("--drawn", type=int, default=0, help="try so many drawn changes instead of the table's")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    given = parser.parse_args(words)
    if given.drawn:
        return try_drawn(given.drawn, given.seed, given.only)
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
