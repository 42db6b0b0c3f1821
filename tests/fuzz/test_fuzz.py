"""A slice of the fuzzing: the corpus and some mutations of it. The whole: make fuzz."""

import os
import subprocess
import sys

import pytest
from launch import HERE

from fuzz.__main__ import at_random
from fuzz.targets import TARGETS

ROOT = HERE.parent
CHECKED = "-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize(("target", "runs"), [("readers", 1500), ("arguments", 300)])
def test_python(target, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it leaves what it finds
    assert at_random(target, TARGETS[target], 0, runs, seed=3) == runs


def run(*command, **environment):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **environment}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, check=False, **options)


@pytest.mark.nightly
def test_core(tmp_path):
    """The scalar core under gcc's sanitizers, mutated without looking at coverage."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is in use already")
    pytest.importorskip("setuptools", "77", "what builds the core reads pyproject.toml by setuptools 77 or newer")
    compiler = [os.environ.get("CC", "cc"), *CHECKED.split()]
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    if run(*compiler, tmp_path / "empty.c", "-o", tmp_path / "empty").returncode != 0:
        pytest.skip("this compiler has no sanitizers")
    build = sys.executable, "setup.py", "-q", "build_ext", "--core", "--build-temp", tmp_path / "core"
    done = run(*build, MAPUOT_ISAS="scalar", CFLAGS=CHECKED)
    assert done.returncode == 0, done.stderr
    sources = "-Isrc_c", "-Itests/core", "tests/fuzz/core.c", "tests/fuzz/driver.c", *(tmp_path / "core").rglob("*.o")
    done = run(
        *compiler, "-std=c11", "-D_GNU_SOURCE", "-pthread", *sources, "-lm", "-o", tmp_path / "fuzz"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = run(tmp_path / "fuzz", "-runs=300", "tests/fuzz/corpus/core")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Done 300 runs" in done.stdout
