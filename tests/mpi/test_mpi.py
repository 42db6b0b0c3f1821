"""Ranks of MPI, each job a process of its own: the cases of tests/mpi, and jobs that must die."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launch import HERE, environment, finish, launcher, run, start
from problems import clouds, csr_of
from scipy import sparse
from soak.trials import ENDS, rank_ends

import mapuot
from mapuot import files
from mapuot.ranks import own_rows

pytestmark = pytest.mark.mpi
NIGHTLY = pytest.mark.nightly
JOBS = [(2, ""), *(pytest.param(size, "", marks=NIGHTLY) for size in (1, 3, 4)),
        pytest.param(7, "shapes one_bad_block", marks=NIGHTLY)]  # fmt: skip


@pytest.mark.parametrize(("size", "only"), JOBS)
def test_cases(size, only):
    """One job runs all cases, or the named ones, and reports the failure of each."""
    code, out, err = run(size, "-m", "mpi4py", HERE / "mpi" / "cases.py", *only.split(), seconds=600)
    last = out.strip().rpartition("\n")[2]
    assert last.startswith("{"), f"exit code {code} in {last}\n{err[-3000:]}"
    data = json.loads(last)
    assert data["size"] == size, "mpiexec and mpi4py do not belong together"
    failed = [f"{case}: {text}" for case, text in data["failures"].items() if text]
    assert data["failures"]
    assert not failed, "\n".join(failed)


def test_every_row_has_one_rank():
    for m, size in [(5, 1), (5, 6), (11, 3), (7, 7)]:
        ends = [own_rows(m, rank, size) for rank in range(size)]
        assert (ends[0][0], ends[-1][1]) == (0, m)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))


@pytest.mark.parametrize("end", ["raise", *(pytest.param(end, marks=NIGHTLY) for end in ENDS if end != "raise")])
def test_a_rank_that_ends_ends_the_job(end):
    """A rank that ends by an exception, Ctrl-C or a signal ends the job; under mpi4py's runner: a trial of ../soak."""
    rank_ends(end, 3, seconds=50.0)


def test_the_wrong_launcher_is_told():
    launcher()
    code = "from mpi4py import MPI; import mapuot; mapuot.solve([[1.]], reg=1, reg_m=1, comm=MPI.COMM_WORLD)"
    env = environment(OMPI_COMM_WORLD_SIZE="4")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the launcher started 4 processes, but each sees only itself" in done.stderr


# ---- the command line under mpiexec ----


def make_problem(path, m=61, n=47, reg=0.02, **more):
    case = clouds(m, n, reg=reg, **more)
    np.savez(path, M=case.M, a=case.a, b=case.b)
    return case


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=NIGHTLY)])
@pytest.mark.parametrize("kind", [".npz", ".h5", pytest.param(".zarr", marks=NIGHTLY), "pairs", "points"])
def test_command_line(tmp_path, size, kind):
    """Each process has its rows; the plan comes back as one array or CSR matrix; with points a rank may have no row."""
    pytest.importorskip("h5py")
    pytest.importorskip("zarr")
    case = make_problem(tmp_path / "in.npz")
    out = tmp_path / f"out{kind if kind[0] == '.' else '.npz'}"
    words = [tmp_path / "in.npz", "--plan", "dense"]
    M = case.M
    if kind == "pairs":
        M = csr_of(np.where(np.median(case.M) > case.M, case.M, np.inf))
        sparse.save_npz(tmp_path / "S.npz", M)
        words = [tmp_path / "S.npz", "--plan", "sparse:0", "--report", tmp_path / "page.html"]
    if kind == "points":
        rng = np.random.default_rng(0)
        points = (rng.random((2, 3)), rng.random((5, 3)))
        case = case.replace(a=np.ones(2), b=np.ones(5))
        M = mapuot.PointCloud(*points)
        words = ["--points", tmp_path / "x.npy", tmp_path / "y.npy", "--plan", "dense"]
        for name, values in zip("xy", points, strict=True):
            np.save(tmp_path / f"{name}.npy", values)
    if kind[0] != ".":
        words += ["--a", tmp_path / "a.npy", "--b", tmp_path / "b.npy"]
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", getattr(case, name))
    words += ["-o", out, "--reg", 0.02, "--reg-m", 1, "--precision", "float64", "--tol", 1e-11]
    code, text, err = run(size, "-m", "mapuot.cli", "solve", *words)
    assert (code, err) == (0, "")
    assert text.count("converged") == 1, "one rank speaks"
    one = mapuot.solve(M, case.a, case.b, reg=0.02, reg_m=1.0, precision="float64", tol=1e-11)
    for name in ("log_u", "log_v"):
        np.testing.assert_allclose(files.read_vector(out, name), getattr(one, name), atol=1e-9)
    if kind == "pairs":
        data, indices, indptr = (files.read_vector(out, f"plan_{name}") for name in ("data", "indices", "indptr"))
        assert abs(sparse.csr_array((data, indices, indptr), shape=M.shape) - one.plan).max() <= 1e-10 * one.plan.max()
    else:
        np.testing.assert_allclose(np.asarray(files.open_matrix(out, "plan")), one.plan, atol=1e-10)


def test_command_line_errors_are_said_once(tmp_path):
    case = make_problem(tmp_path / "in.npz")
    case.M[-1, -1] = np.nan
    np.savez(tmp_path / "in.npz", M=case.M, a=case.a, b=case.b)
    code, _, err = run(3, "-m", "mapuot.cli", "solve", tmp_path / "in.npz", "--reg", 0.1, "--reg-m", 1)
    assert code == 1
    assert err.count("rank 2: M must not hold NaN") == 1


def test_command_line_says_not_converged(tmp_path):
    make_problem(tmp_path / "in.npz")
    command = ["solve", tmp_path / "in.npz", "--reg", 0.02, "--reg-m", 1, "--max-passes", 2]
    code, out, err = run(2, "-m", "mapuot.cli", *command)
    assert code == 3
    assert "max_passes" in out
    assert err.count("not converged") == 1


@pytest.mark.parametrize("size", [pytest.param(1, marks=NIGHTLY), 2])
def test_killed_job_goes_on_from_its_checkpoint(tmp_path, size, monkeypatch):
    """After SIGKILL in the middle of a slow method the resumed job certifies the answer of an uninterrupted one."""
    case = make_problem(tmp_path / "in.npz", 200, 180, reg=5e-3, reg_m=500.0)
    saved = tmp_path / "state.npz"
    out = tmp_path / "out.npz"
    command = ["solve", tmp_path / "in.npz", "-o", out, "--reg", case.reg, "--reg-m", 500, "--checkpoint", saved]
    monkeypatch.setenv("MAPUOT_CHECKPOINT_SECONDS", "0.05")
    slow = ["--method", "sinkhorn", "--max-passes", 10**8, "--tol", 1e-9]
    first = start(size, "-m", "mapuot.cli", *command, *slow, start_new_session=True)
    end = time.monotonic() + 60
    while not saved.exists() and time.monotonic() < end and first.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3)
    assert first.poll() is None, finish(first)
    os.killpg(first.pid, signal.SIGKILL)
    finish(first)
    assert int(np.load(saved)["n_pass"]) > 0
    assert not out.exists()
    code, text, err = run(size, "-m", "mapuot.cli", *command, "--resume", "--tol", 1e-8)
    assert code == 0, err
    assert "converged" in text
    one = case.solve(tol=1e-8)
    with np.load(out) as found:
        assert found["error_bound"] <= 1e-8
        np.testing.assert_allclose(found["objective"], one.objective, rtol=1e-9)
        np.testing.assert_allclose(found["row_marginal"], one.row_marginal, rtol=1e-6)
