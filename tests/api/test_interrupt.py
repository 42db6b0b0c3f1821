"""Ctrl-C in the middle of what takes long: the work ends where it is, not when it would have been done.

No test looks at a clock: each counts what was done after the interrupt, or would run for hours without it.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
from problems import clouds, with_forbidden

import mapuot
from mapuot.backends.cpu import native, stream
from mapuot.loop import Run

CASE = clouds(48, 40)


@pytest.fixture
def small_calls(monkeypatch):
    """Calls of the core that end after a few rows."""
    monkeypatch.setattr(native, "CALL_WORK", 1 << 12)


def interrupt_after(count, function):
    """``function``, but Ctrl-C comes after so many calls; and the list of calls."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    return counted, calls


@pytest.mark.parametrize("product", ["apply", "apply_transpose", "plan", "cost"])
def test_products_of_a_plan(monkeypatch, small_calls, product):
    result = CASE.solve(threads=2)  # small problems are one call
    read = {
        "apply": lambda: result.apply(np.ones((40, 9))),
        "apply_transpose": lambda: result.apply_transpose(np.ones((48, 9))),
        "plan": lambda: result.plan, "cost": lambda: result.cost,
    }[product]  # fmt: skip
    counted, calls = interrupt_after(10**9, native.check)
    monkeypatch.setattr(stream, "check", counted)
    right = read()
    for name in ("plan", "cost", "_sums"):
        vars(result).pop(name, None)
    whole = len(calls)
    assert whole > 2
    counted, calls = interrupt_after(2, native.check)
    monkeypatch.setattr(stream, "check", counted)
    with pytest.raises(KeyboardInterrupt):
        read()
    assert len(calls) == 2
    monkeypatch.undo()
    np.testing.assert_allclose(read(), right, rtol=1e-14)


def test_calls_of_few_rows_change_nothing(monkeypatch):
    """K, plan and products made block by block, of every layout, with and without a reference."""
    for case in (CASE, with_forbidden(clouds(30, 50)), CASE.replace(M=CASE.M.T.copy().T, reference=CASE.M + 0.1)):
        found = []
        for work in (1 << 28, 1 << 12):
            monkeypatch.setattr(native, "CALL_WORK", work)
            result = case.replace(reg=0.004).solve(precision="float64", tol=1e-10)
            found.append((result.log_u, result.plan, result.apply(np.ones(case.M.shape[1]))))
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("penalty", ["kl", "tv"])
def test_problems_of_a_batch_that_are_solved_alone(monkeypatch, penalty):
    """In threads, which know nothing of Ctrl-C: each makes one more call of the core at most."""
    made, interrupted, others = [], threading.Event(), set(threading.enumerate())
    record = Run.record

    def counted(run, stats):
        made.append(len(stats))
        if len(made) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.set()
        if interrupted.is_set():
            time.sleep(0.05)  # the main thread gets its turn
        return record(run, stats)

    monkeypatch.setattr(Run, "record", counted)
    A, B = np.tile(CASE.a, (60, 1)), np.tile(CASE.b, (60, 1))
    arguments = {"penalty": penalty, "method": "sinkhorn", "tol": 1e-13, "max_passes": 10**6, "threads": 2}
    with pytest.raises(KeyboardInterrupt):
        mapuot.solve_batch(CASE.M, A, B, 2e-4, 10.0, reference=np.ones_like(CASE.M), **arguments)
    for thread in set(threading.enumerate()) - others:
        if "Pool" in thread.name:  # one that was just starting is known to nobody
            thread.join(60)
            assert not thread.is_alive()
    assert len(made) < 60


@pytest.mark.parametrize("exact", [True, False])
def test_log_matmul(monkeypatch, exact):
    """7e10 exponentials take minutes, and as many where the products of the default lose too much."""
    A, B, kept = np.zeros((6000, 2000)), np.zeros((2000, 6000)), []
    A[:, ::2], B[1::2] = -3000.0, -3000.0  # every term is e^-3000 of a row's and a column's largest
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def empty(shape, dtype):
        """What the core is to fill; its call is next."""
        kept.append(np.full(shape, np.nan, dtype))
        timer.start()
        return kept[-1]

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(KeyboardInterrupt):
        mapuot.log_matmul(A, B, exact=exact, threads=2)
    assert np.isnan(kept[0]).any()
    timer.join()


def test_a_chunk_of_a_batch(monkeypatch):
    """The passes of a call come down to what fits it, and the answers are those of any other number."""
    from mapuot.backends.cpu import batch

    A = np.random.default_rng(0).random((30, 48))
    right = mapuot.solve_batch(CASE.M, A, CASE.b, 0.01, 1.0, tol=1e-9)
    monkeypatch.setattr(batch, "SECONDS_A_CALL", 0.0)
    monkeypatch.setattr(native, "CALL_WORK", 1)
    counts = []
    iterate = batch.BatchWorkspace.iterate
    monkeypatch.setattr(
        batch.BatchWorkspace, "iterate", lambda self, passes: (iterate(self, passes), counts.append(self.count))[0]
    )
    found = mapuot.solve_batch(CASE.M, A, CASE.b, 0.01, 1.0, tol=1e-9)
    assert set(counts) == {1}
    np.testing.assert_array_equal(found.log_u, right.log_u)
    np.testing.assert_array_equal(found.n_passes, right.n_passes)
