"""A slice of the fuzzing: the corpus and some mutations of it. The whole: make fuzz."""

import itertools
import os
import subprocess
import sys

import pytest
from launch import HERE

from fuzz import inputs, judge
from fuzz.targets import TARGETS

ROOT = HERE.parent
CHECKED = "-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize(("target", "runs"), [("readers", 1500), ("arguments", 300)])
def test_python(target, runs):
    for data in itertools.islice(inputs(target, seed=3), runs):
        judge(TARGETS[target], data)


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
    paths = [tmp_path / f"input{k}" for k in range(300)]
    for path, data in zip(paths, inputs("core", seed=1), strict=False):
        path.write_bytes(data)
    done = run(tmp_path / "fuzz", *paths)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
