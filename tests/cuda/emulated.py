"""The tests of the cuda backend without a GPU, in parts: each a pytest of its own, that finds CuPy's stand-in first.

They start when the tests are collected (conftest.py), one after the other, beside all other tests; what has not started
when its turn comes runs at once.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from launch import HERE, environment

PARTS = {
    "regimes": ["core/test_regimes.py", "core/test_penalties.py", "hostile/test_examples.py"],
    "persistent": ["cuda/test_cuda.py", "-k", "persistent"],
    "spread": ["cuda/test_cuda.py", "-k", "spread"],
    "solve": ["cuda/test_cuda.py", "-k", "not (persistent or spread or portable)"],
    "batch": ["cuda/test_batch_cuda.py"],
    "portable": ["cuda/test_cuda.py", "-k", "portable"],
    "ranks": ["cuda/test_cuda_ranks.py", "-k", "nccl"],
    "points": ["cuda/test_points_cuda.py", "cuda/test_masks_cuda.py"],
    "marginals": ["cuda/test_marginals_cuda.py"],
    "sparse": ["cuda/test_sparse_cuda.py"],
}
MISSING = {"a system with fibers by ucontext": sys.platform == "linux", "g++": shutil.which("g++") is not None}
MISSING = [name for name, found in MISSING.items() if not found]


class Runs:
    """The parts asked for, the last of them first, while the tests ask for the first of them first."""

    def __init__(self, parts):
        self.jobs = []
        self.pool = ThreadPoolExecutor(1)
        self.made = {part: self.pool.submit(self.run, part) for part in reversed(parts)}

    def run(self, part):
        """(exit code, output, errors)."""
        files = [str(HERE / word) if word.endswith(".py") else word for word in PARTS[part]]
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu and not slow"]
        job = subprocess.Popen(
            [*pytest, *files], cwd=HERE.parent, text=True,
            env=environment(PYTHONPATH=str(HERE / "cuda" / "cuda_on_cpu"), EMULATED_GPUS="2"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.jobs.append(job)
        out, err = job.communicate()
        return job.returncode, out, err

    def result(self, part):
        waiting = self.made[part].cancel()
        return self.run(part) if waiting else self.made[part].result()

    def stop(self):
        self.pool.shutdown(wait=False, cancel_futures=True)
        for job in self.jobs:
            job.kill()
