"""The table of changes is true of the tree: each text stands once in its file, and each test that it names exists."""

import subprocess
import sys

import pytest
from launch import HERE, environment

from mutants.__main__ import ROOT, broken_entries, entries, paths
from mutants.draw import FUNCTIONS, bodies


def test_texts_stand_once():
    assert not broken_entries()


def test_functions_of_the_rule_exist():
    for file, (_, names) in FUNCTIONS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name in names if not bodies(text, (name,), file.endswith(".py"))] == []


@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["core", "kernels"])
def test_named_tests_exist(emulated):
    words = dict.fromkeys(" ".join({tests for *_, tests, _ in entries() if tests}).split())
    named = paths(" ".join(word for word in words if ("cuda" in word) == emulated))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *named]
    if emulated:
        stand_in = {"PYTHONPATH": str(HERE / "cuda" / "cuda_on_cpu")}
    else:
        stand_in = {}
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment(**stand_in), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
