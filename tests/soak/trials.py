"""One trial of each kind: an action on mapuot, and the properties that must hold after it. A failed trial raises.

A child process (`Child`) takes each action that may kill or spoil a process. Leaks show in the memory of the parent,
which makes the plain calls and forks all the others.
"""

import contextlib
import faulthandler
import functools
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz
import numpy as np
import pytest
from hostile.trial import PATHS, draw_trial
from hostile.worker import Runner
from judge import is_false
from launch import environment, launcher
from problems import clouds

import mapuot
from mapuot import files

PATIENCE = 120.0  # seconds; a child that takes longer counts as hanging
RANKS_END = 10.0  # seconds that ranks have, after one of them died
MIB = 1 << 20
EVEN = {"threads": 2, "schedule": "static"}  # the same bits, however busy the cores are
counts = Counter()  # of actions in all trials, beyond the number of trials


class Child:
    """Run ``function(say)`` in a forked process; its messages, and its last exception, come through a pipe.

    In the child signals have Python's default handlers, whatever the parent's are.
    """

    def __init__(self, function):
        counts["children"] += 1
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        os.close(self.reading)
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            code = 1
            with contextlib.suppress(BaseException):
                faulthandler.register(signal.SIGUSR2, pipe)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    function(lambda word: pipe.write(word.encode()))
                    code = 0
                except BaseException:
                    pipe.write(traceback.format_exc().encode())
            os._exit(code)

    def kill(self, number):
        os.kill(self.pid, number)

    def hear(self):
        """Return the child's next letter; AssertionError where it sends nothing."""
        return self.read(1, PATIENCE)

    def read(self, size, patience):
        ready, _, _ = select.select([self.reading], [], [], max(0.0, patience))
        if ready:
            return os.read(self.reading, size)
        self.kill(signal.SIGUSR2)
        time.sleep(1)
        self.kill(signal.SIGKILL)
        _, said = self.end()
        raise AssertionError(f"a child hangs after {PATIENCE} s: {said.decode(errors='replace')}")

    def end(self):
        """Return (exit code or -signal, messages); AssertionError where the child hangs."""
        said = b""
        until = time.monotonic() + PATIENCE
        while part := self.read(65536, until - time.monotonic()):
            said += part
        os.close(self.reading)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), said


def a_case(rng, most=60):
    m, n = rng.integers(2, most, 2)
    penalty = str(rng.choice(["kl", "kl", "balanced", "tv", "l2"]))
    reg = float(rng.choice([0.5, 0.1, 0.03]))
    return clouds(int(m), int(n), seed=int(rng.integers(1 << 30)), reg=reg, penalty=(penalty, "kl"))


# ---- in this process ----


def calls(rng):
    """Trials of `make hostile`, judged one after the other, hold in one process."""
    path = str(rng.choice(PATHS))
    _, failures, _ = Runner("cpu", over_ranks=False).verdict(draw_trial(path, rng, 12))
    assert not [failure for failure in failures if is_false(failure.kind)], failures
    A = rng.normal(size=(20, 30))
    assert np.isfinite(mapuot.log_matmul(A, A.T, exact=bool(rng.integers(2)))).all()


def threads(rng):
    """Four threads at once, over one pool or each in one call, have the bits of a single thread."""
    cases = [a_case(rng) for _ in range(6)]
    options = [EVEN, {}, EVEN] * 2
    alone = [case.solve(**more) for case, more in zip(cases, options, strict=True)]
    one = np.ones(cases[0].shape[1])
    product = alone[0].apply(one)
    with ThreadPoolExecutor(4) as pool:
        every = pool.map(lambda case, more: case.solve(**more), cases * 3, options * 3)
        for found, right in zip(every, alone * 3, strict=True):
            np.testing.assert_array_equal(found.log_u, right.log_u)
            assert found.converged
        for found in pool.map(lambda _: alone[0].apply(one), range(8)):  # one plan, many callers
            np.testing.assert_array_equal(found, product)


# ---- children ----


def forks(rng):
    """A child of a process with pools in use solves to equal bits, and so does its child; their plans are equal."""
    case = a_case(rng)
    right = case.solve(**EVEN)
    one = np.ones(case.shape[1])
    product = right.apply(one)  # the pool of products has its threads

    def grandchild(say):
        np.testing.assert_array_equal(case.solve(**EVEN).log_u, right.log_u)
        np.testing.assert_array_equal(right.apply(one), product)

    def child(say):
        grandchild(say)
        code, said = Child(grandchild).end()
        assert code == 0, said

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: [case.solve(**EVEN) for _ in range(5)])
        code, said = Child(child).end()
        busy.result()
    assert code == 0, said


def signals(rng):
    """Ctrl-C at any time is a KeyboardInterrupt; afterwards the process solves to equal bits."""
    case = clouds(300, 200, reg=0.002, seed=int(rng.integers(1 << 30)))
    A = rng.random((40, 300)) + 0.1
    right = case.solve(**EVEN)

    def child(say):
        for _ in range(4):
            try:
                say("R")
                while True:
                    case.solve(tol=1e-9, **EVEN)
                    mapuot.solve_batch(
                        case.M, A, case.b, reg=0.002, reg_m=1.0, reference=np.ones_like(case.M), threads=2
                    )
            except KeyboardInterrupt:
                np.testing.assert_array_equal(case.solve(**EVEN).log_u, right.log_u)

    job = Child(child)
    for _ in range(4):
        job.hear()
        time.sleep(float(rng.uniform(0, 0.3)))
        job.kill(signal.SIGINT)
        counts["interrupts"] += 1
    code, said = job.end()
    assert code == 0, said


def kills(rng):
    """After kill -9 at any time the checkpoint is whole, a solve resumes from it, and no partial file stays."""
    case = clouds(150, 120, reg=0.001, seed=int(rng.integers(1 << 30)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"

        def child(say):
            os.environ["MAPUOT_CHECKPOINT_SECONDS"] = "0"
            say("R")
            while True:
                case.solve(checkpoint=path, tol=1e-12, precision="float64", callback=lambda stats: False)

        for _ in range(4):
            job = Child(child)
            job.hear()
            time.sleep(float(rng.uniform(0, 0.2)))
            job.kill(signal.SIGKILL)
            counts["kill -9"] += 1
            code, said = job.end()
            assert code == -signal.SIGKILL, said
            if path.exists():
                start = files.load_checkpoint(path, 150, 120, case.reg)
            else:
                start = None
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                assert case.solve(warm_start=start, checkpoint=path).converged
            assert [x.name for x in Path(folder).iterdir()] == ["state.npz"]


def memory(rng):
    """With hardly any memory left a solve is right or a MemoryError, and the process goes on."""
    small = a_case(rng)
    right = small.solve(threads=1)

    def child(say):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(rng.integers(1, 64)) * MIB,) * 2)
        try:
            M = np.ones((int(rng.integers(500, 2500)), 1500), dtype=np.float32)
            result = mapuot.solve(M, reg=0.5, reg_m=1.0, threads=int(rng.integers(1, 3)))
            assert result.converged
            say("solved")
            assert result.plan.shape == M.shape
        except MemoryError:
            say("refused")
        M = result = None
        np.testing.assert_array_equal(small.solve(threads=1).log_u, right.log_u)

    code, said = Child(child).end()
    assert code == 0, said


def disks(rng):
    """A disk that fills up gives an error or a warning, keeps the old file, and leaves no partial file."""
    case = clouds(60, 50, seed=int(rng.integers(1 << 30)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.npz"
        limit = int(rng.integers(0, 20_000))
        files.write(path, {"x": np.arange(4.0)})
        files.Checkpoint(Path(folder) / "state.npz").save("b", np.ones(50), 1.0, 1)

        def child(say):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            result = case.solve()
            try:
                files.write(path, {"plan": files.Blocks(result.plan.shape, "f8", iter([result.plan]))})
            except OSError:
                say("no room")
            os.environ["MAPUOT_CHECKPOINT_SECONDS"] = "0"
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                assert case.solve(checkpoint=Path(folder) / "state.npz").converged

        code, said = Child(child).end()
        assert code == 0, said
        assert b"no room" in said, "the plan has 24000 bytes"
        np.testing.assert_array_equal(files.read_vector(path, "x"), np.arange(4.0))
        files.load_checkpoint(Path(folder) / "state.npz", 60, 50, 1.0)
        assert sorted(x.name for x in Path(folder).iterdir()) == ["out.npz", "state.npz"]


# ---- ranks ----

RANK = """
import os, resource, signal, sys, time
import numpy as np
from mpi4py import MPI
import mapuot
comm, end, when, m = MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2]), 40
M = np.random.default_rng(0).random((m * comm.size, 30))
def callback(stats):
    if comm.rank == 1 and stats.n_pass == when:
        print("dying", flush=True)
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if end == "interrupt" else MemoryError("no memory for this rank")
try:
    mapuot.solve(M[m * comm.rank : m * (comm.rank + 1)], np.full(m, 1 / m / comm.size), np.full(30, 1 / 30), reg=.02,
                 reg_m=1., tol=1e-13, precision="mixed", comm=comm, callback=callback)
except MemoryError as error:
    sys.stdout.write(f"told {type(error).__name__} {error}\\n")
    sys.stdout.flush()
    time.sleep(1)  # the first whose exception ends it ends the others, who are to be heard
    raise
print("survived", flush=True)
"""
ENDS = {"raise": "told MemoryError rank 1: no memory", "interrupt": "KeyboardInterrupt", "kill": "signal 9"}


def rank_ends(end, when, *runner, seconds=RANKS_END):
    """If a rank ends in the middle of a solve, all ranks end soon after it, and say why."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        output = Path(folder) / "output"
        program.write_text(RANK)
        command = [*launcher(), "-n", "3", sys.executable, *runner, program, end, str(when)]
        with output.open("w") as file:
            job = subprocess.Popen(command, stdout=file, stderr=file, env=environment(), start_new_session=True)
        until = time.monotonic() + PATIENCE
        died = False
        while job.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
            if not died and "dying" in output.read_text():
                until = time.monotonic() + seconds
                died = True
        said = output.read_text()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            raise AssertionError(f"{end}: the ranks go on {seconds} s after one died: {said}")
    assert job.returncode != 0, said
    assert "survived" not in said, said
    assert ENDS[end] in said, (end, said)
    if end == "raise":
        assert said.count(ENDS[end]) == 3, "every rank is told: " + said


def ranks(rng):
    rank_ends(str(rng.choice([*ENDS])), rng.integers(1, 6), "-m", "mpi4py")


# ---- a GPU ----

LOST = """
import sys
import numpy as np
try:
    import cupy as cp
    assert cp.cuda.is_available()
except (ImportError, AssertionError):
    sys.exit("no GPU")
import mapuot
when, rng = sys.argv[1], np.random.default_rng(int(sys.argv[2]))
(m, n), seen = rng.integers(20, 900, 2), [0]
M, a, b = rng.random((m, n)), rng.random(m) + .1, rng.random(n) + .1
G, A = cp.asarray(M), a * (rng.random((5, m)) + .5)
bad = cp.RawKernel('extern "C" __global__ void bad(double *x) { x[1ll << 44] = 1; }', "bad")

def lose():
    bad((1,), (1,), (G,))

def callback(stats):
    seen[0] += 1
    if seen[0] == 3:
        lose()

def solve(M, **more):
    return mapuot.solve(M, a, b, reg=.02, reg_m=1., tol=1e-8, **more)

def refused(call):
    try:
        answer = call()
    except (RuntimeError, MemoryError) as error:
        assert "IllegalAddress" in str(error) or "ILLEGAL_ADDRESS" in str(error), repr(error)
    else:
        raise AssertionError(f"an answer from a lost context: {answer!r}")

right, known = solve(M, threads=1), None
if when != "before":
    known = solve(G)
    assert known.converged
    np.testing.assert_allclose(known.mass, right.mass, rtol=1e-7)
if when == "callback":
    refused(lambda: solve(G, callback=callback).plan)
elif when != "never":
    lose()
calls = {
    "solve": lambda: solve(G), "batch": lambda: mapuot.solve_batch(G, A, b, reg=.02, reg_m=1.),
    "path": lambda: [*mapuot.path(G, a, b, regs=[.5, .02], reg_ms=1.)], "logarithms": lambda: mapuot.log_matmul(G, G.T),
}
if known is not None:
    calls |= {"plan": lambda: known.plan, "apply": lambda: known.apply(np.ones(n)), "cost": lambda: known.cost}
if when != "never":
    for name in rng.permutation([*calls]):
        refused(calls[name])
if known is not None:  # what was an answer is one
    np.testing.assert_allclose(known.log_u, right.log_u, rtol=0, atol=1e-5)
again = solve(M, threads=1)
np.testing.assert_array_equal(again.log_u, right.log_u)
np.testing.assert_array_equal(again.plan, right.plan)
print("unharmed", flush=True)
"""
LOSSES = "before", "between", "callback"


def contexts(rng):
    """After other code loses a GPU's context, every call on it says so; the CPU and later processes are unharmed."""
    for when in (str(rng.choice(LOSSES)), "never"):
        command = [sys.executable, "-c", LOST, when, str(rng.integers(1 << 30))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=False)
        if "no GPU" in done.stderr:
            pytest.skip("needs a GPU and CuPy")
        counts["contexts lost"] += when != "never"
        assert done.returncode == 0, (when, done.stderr)
        assert "unharmed" in done.stdout, (when, done.stdout, done.stderr)


KINDS = {
    "calls": calls, "threads": threads, "forks": forks, "signals": signals, "kills": kills, "memory": memory,
    "disks": disks, "ranks": ranks, "contexts": contexts, **{x: functools.partial(fuzz.trial, x) for x in fuzz.TARGETS},
}  # fmt: skip
