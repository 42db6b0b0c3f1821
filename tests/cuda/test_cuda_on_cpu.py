"""The CUDA kernels without a GPU: compiled as C++ and run on the CPU, the tests of the cuda backend on them.

Each part is a pytest of its own, because CuPy's stand-in (cuda_on_cpu/cupy) must be found before CuPy; two at a time.
"""

import functools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from launch import HERE, environment

PARTS = {
    "regimes": ["core/test_regimes.py", "core/test_penalties.py", "-k", "cuda and not (float64 or rounding)"],
    "persistent": ["cuda/test_cuda.py", "-k", "persistent and not (shape5 or shape7 or same_plan)"],
    "solve": ["cuda/test_cuda.py", "-k", "not (persistent or portable or ordered or from_the_host)"],
    "batch": ["cuda/test_batch_cuda.py", "-k", "not (100 or 150 or 128 or 400)"],
    "portable": ["cuda/test_cuda.py", "-k", "portable and not (shape5 or shape7 or same_plan)"],
}
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="fibers by ucontext"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def run(part):
    files = [HERE / word if word.endswith(".py") else word for word in PARTS[part]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    path = {"PYTHONPATH": str(HERE / "cuda" / "cuda_on_cpu")}
    return subprocess.run(
        command, env=environment(**path), cwd=HERE.parent, capture_output=True, text=True, check=False
    )


@functools.cache
def started(parts):
    pool = ThreadPoolExecutor(2)
    return {part: pool.submit(run, part) for part in parts}


@pytest.mark.parametrize("part", PARTS)
def test_part(part, request):
    asked = [item for item in request.session.items if getattr(item, "originalname", "") == "test_part"]
    done = started(tuple(item.callspec.params["part"] for item in asked))[part].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-300:]
