"""The corpus and some mutations of it cause no finding; `make fuzz` tries many more."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
from launch import HERE

from fuzz import corpus, judge, trial

ROOT = HERE.parent
CHECKED = "-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize(("target", "runs"), [("readers", 1500), ("arguments", 300), ("core", 600)])
def test_python(target, runs):
    rng = np.random.default_rng(3)
    for data in corpus(target):
        judge(target, data)
    for _ in range(runs):
        trial(target, rng)


@pytest.mark.nightly
def test_core_under_sanitizers(tmp_path):
    """Return the scalar core, built with gcc's sanitizers."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is in use already")
    pytest.importorskip("setuptools", "77", "what builds the core reads pyproject.toml by setuptools 77 or newer")
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [run(["cc", f"-print-file-name=lib{x}.so"]).stdout.strip() for x in ("asan", "stdc++")]
    if not all(os.path.isabs(x) for x in found):  # noqa: PTH117
        pytest.skip("this compiler has no sanitizers")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path, "--build-lib", tmp_path / "lib"]
    done = run(build, env={**os.environ, "MAPUOT_ISAS": "scalar", "CFLAGS": CHECKED})
    assert done.returncode == 0, done.stderr
    paths = os.pathsep.join([str(tmp_path / "lib"), str(HERE)])
    more = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": paths}
    done = run([sys.executable, "-m", "soak", "--only", "core", "--minutes", "0.3"], env={**os.environ, **more})
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
