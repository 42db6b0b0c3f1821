"""A slice of the fuzzing: the corpus and some mutations of it. The whole: make fuzz."""

import os
import subprocess

import pytest
from launch import HERE

from fuzz.__main__ import at_random
from fuzz.targets import TARGETS

ROOT = HERE.parent
UNITS = ["dispatch", "pool", "solver", "finish", "coarse", "streams", "batch", "log_matmul", "sinkhorn", "barycenter"]
SCALAR = ["-std=c11", "-D_GNU_SOURCE", "-pthread", "-O0", "-g", "-DMAPUOT_NO_X86", "-Isrc_c", "-Itests/core"]
CHECKED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ISA = ["-DMAPUOT_ISA=scalar", "-DMAPUOT_ISA_SCALAR"]


@pytest.mark.parametrize(("target", "runs"), [("readers", 1500), ("arguments", 300)])
def test_python(target, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it leaves what it finds
    assert at_random(target, TARGETS[target], 0, runs, seed=3) == runs


def run(*command):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, check=False, **options)


@pytest.mark.slow
def test_core(tmp_path):
    """The scalar core under gcc's sanitizers, mutated without looking at coverage."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is in use already")
    compiler = [os.environ.get("CC", "cc"), *SCALAR, *CHECKED, "-c"]
    units = [(f"src_c/{name}.c", []) for name in UNITS if (ROOT / "src_c" / f"{name}.c").exists()]
    units += [(f"src_c/{name}.c", ISA) for name in ("stream_tmpl", "finish_tmpl", "coarse_tmpl", "barycenter_tmpl")]
    for name in ("f64", "f32", "bf16"):
        typed = [*ISA, f"-DMAPUOT_DTYPE={name}", f"-DMAPUOT_DTYPE_{name.upper()}"]
        kernels = ["kernels_tmpl", "batch_tmpl", *(["log_matmul_tmpl"] if name != "bf16" else [])]
        units += [(f"src_c/{unit}.c", typed) for unit in kernels]
    units += [("tests/fuzz/core.c", []), ("tests/fuzz/driver.c", [])]
    objects = []
    for k, (source, flags) in enumerate(units):
        objects.append(tmp_path / f"{k}.o")
        done = run(*compiler, *flags, source, "-o", objects[-1])
        if "fsanitize" in done.stderr:
            pytest.skip("this compiler has no sanitizers")
        assert done.returncode == 0, done.stderr
    done = run(*compiler[:-1], *objects, "-lm", "-o", tmp_path / "core")
    if done.returncode and "lasan" in done.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path / "core", "-runs=300", "tests/fuzz/corpus/core")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Done 300 runs" in done.stdout
