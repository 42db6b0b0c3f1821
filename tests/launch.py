"""Run programs under mpiexec from pytest: the launcher of this environment, with a time-out."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@functools.cache
def launcher():
    """Return the command of mpiexec with the options for many ranks as root; skips without MPI."""
    if "LD_PRELOAD" in os.environ:
        pytest.skip("no MPI under a sanitizer")
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py mpich")
    path = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if path is None:
        pytest.skip("needs mpiexec: pip install mpich")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        open_mpi = ["--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", "sh"]  # machines without ssh
    else:
        open_mpi = []
    return (path, *open_mpi)


def environment(**more):
    """Return the environment of a job: this folder's modules can be imported, and each rank has one BLAS thread."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "SLURM_", "MPI_LOCALNRANKS"))}
    paths = os.pathsep.join(filter(None, [str(HERE), clean.get("PYTHONPATH")]))
    return {**clean, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **more}


def start(ranks, *command, **options):
    return subprocess.Popen(
        [*launcher(), "-n", str(ranks), sys.executable, *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=HERE.parent, **options,
    )  # fmt: skip


def finish(job, seconds=120):
    """Return (exit code, output, errors); a job that hangs is killed and fails the test."""
    try:
        out, err = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.kill()
        out, err = job.communicate()
        pytest.fail(f"the job hangs after {seconds} s\n{out[-2000:]}\n{err[-2000:]}")
    return job.returncode, out, err


def run(ranks, *command, seconds=120):
    return finish(start(ranks, *command), seconds)
