"""The tests of the CUDA backend run without a GPU: kernels compiled as C++, CuPy replaced by cuda_on_cpu.

Each part is a pytest of its own, which finds the emulation before CuPy. ``make test`` takes a few cases of each test,
which together have every value of every parameter; ``make test-all`` takes every case.
"""

import shutil
import subprocess
import sys

import pytest
from launch import HERE, environment

MISSING = {"a system with fibers by ucontext": sys.platform == "linux", "g++": shutil.which("g++") is not None}
MISSING = [name for name, found in MISSING.items() if not found]
PARTS = {"regimes": ["core/test_regimes.py", "core/test_penalties.py", "hostile/test_examples.py"],
         "matrix": ["test_matrix.py"],
         "one problem": ["cuda/test_cuda.py", "core/test_one_potential.py", "api/test_constant.py"],
         "batch": ["cuda/test_batch_cuda.py", "cuda/test_batch_answers_cuda.py", "cuda/test_factored_cuda.py",
                   "core/test_log_matmul.py", "core/test_kept.py"],
         "points": ["cuda/test_points_cuda.py", "api/test_points.py", "api/test_conditional.py",
                    "api/test_masks.py", "api/test_truncation.py", "hostile/test_hostile.py"],
         "marginals": ["cuda/test_marginals_cuda.py", "api/test_marginals.py"], "sparse": ["cuda/test_sparse_cuda.py"],
         "ranks": ["cuda/test_cuda_ranks.py", "-k", "nccl"]}  # fmt: skip
NIGHTLY = "regimes", "ranks"  # the matrix covers these regimes in another form; only several GPUs need these ranks
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.nightly if part in NIGHTLY else ()) for part in PARTS]
)
def test_part(part, pytestconfig):
    few = "not nightly" in pytestconfig.option.markexpr
    files = [str(HERE / word) if word.endswith(".py") else word for word in PARTS[part]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "gpu and not slow and not nightly" if few else "gpu and not slow"]
    stand_in = environment(PYTHONPATH=str(HERE / "cuda" / "cuda_on_cpu"), EMULATED_GPUS="2")
    done = subprocess.run(
        [*command, *files], cwd=HERE.parent, env=stand_in, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-300:]
