"""The table of changes is true of the tree: each text stands once in its file, and each test that it names exists."""

import subprocess
import sys

from launch import HERE

from mutants.__main__ import broken_entries, entries, paths


def test_texts_stand_once():
    assert not broken_entries()


def test_named_tests_exist():
    named = paths(" ".join({tests for *_, tests, _ in entries() if tests}))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *dict.fromkeys(named)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
