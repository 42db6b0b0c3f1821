"""Ctrl-C ends a long computation at once, not when it is finished.

No test looks at a clock: each counts the steps after the interrupt, or would run for hours without it.
"""

import _thread
import dis
import functools
import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from problems import clouds, csr_of, with_forbidden
from scipy.sparse import issparse
from soak.trials import Child

import mapuot
from mapuot.ascend.loop import Run
from mapuot.backends.cpu import native, operator
from mapuot.backends.settings import CALLS

CASE = clouds(48, 40)


@pytest.fixture
def small_calls(using):
    """Make calls of the core end after a few rows."""
    using(CALLS, work=1 << 12)


def interrupt_after(count, function):
    """Wrap ``function`` so that Ctrl-C comes after so many calls; return it and the list of calls."""
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
    monkeypatch.setattr(operator, "check", counted)
    right = read()
    for name in ("plan", "cost", "_sums"):
        vars(result).pop(name, None)
    whole = len(calls)
    assert whole > 2
    counted, calls = interrupt_after(2, native.check)
    monkeypatch.setattr(operator, "check", counted)
    with pytest.raises(KeyboardInterrupt):
        read()
    assert len(calls) == 2
    monkeypatch.undo()
    np.testing.assert_allclose(read(), right, rtol=1e-14)


def test_calls_of_few_rows_change_nothing(using):
    """Ctrl-C ends K, plans and products made block by block, of every layout, of pairs, and with a reference."""
    forbidden = with_forbidden(clouds(30, 50))
    turned = CASE.replace(M=CASE.M.T.copy().T, reference=CASE.M + 0.1)
    for case in (CASE, forbidden, turned, forbidden.replace(M=csr_of(forbidden.M))):
        found = []
        for work in (1 << 28, 1):
            using(CALLS, work=work)
            result = case.replace(reg=0.004).solve(precision="float64", tol=1e-10)
            if issparse(result.plan):
                plan = result.plan.toarray()
            else:
                plan = result.plan
            found.append((result.log_u, plan, result.apply(np.ones(case.M.shape[1]))))
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("penalty", ["kl", "tv"])
def test_problems_of_a_batch_that_are_solved_alone(monkeypatch, penalty):
    """Worker threads get no Ctrl-C: each makes one more call of the core at most."""
    made = []
    interrupted = threading.Event()
    others = _thread._count()
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
    A = np.tile(CASE.a, (60, 1))
    B = np.tile(CASE.b, (60, 1))
    arguments = {"penalty": penalty, "method": "sinkhorn", "tol": 1e-13, "max_passes": 10**6, "threads": 2}
    with pytest.raises(KeyboardInterrupt):
        mapuot.solve_batch(CASE.M, A, B, reg=2e-4, reg_m=10.0, reference=np.ones_like(CASE.M), **arguments)
    assert threads_end(others)
    assert len(made) < 60


def threads_end(count, seconds=60):
    """Return whether soon no more than ``count`` threads of Python are left."""
    until = time.monotonic() + seconds
    while _thread._count() > count and time.monotonic() < until:
        time.sleep(0.01)
    return _thread._count() <= count


@functools.cache
def looks(code):
    """Return the places where CPython looks for signals: at a function's begin and behind calls."""
    names = [(x.offset, x.opname) for x in dis.get_instructions(code) if x.opname != "CACHE"]
    behind = [at for (_, name), (at, _) in itertools.pairwise(names) if name.startswith(("CALL", "RESUME"))]
    return {names[0][0], *behind}


class Interrupt:
    """Raise KeyboardInterrupt at the k-th place of this thread where one may fall, in modules that wait for threads."""

    PLACES = (
        "mapuot/route/batch.py", "mapuot/threads.py", "cpu/native.py", "/threading.py", "/concurrent/futures/",
        "/queue.py", "/weakref.py", "/_weakrefset.py",
    )  # fmt: skip

    def __init__(self, k):
        self.k, self.count = k, 0

    def __call__(self, frame, event, _):
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if any(place in frame.f_code.co_filename for place in self.PLACES):
                return self
            return None
        if event == "opcode" and frame.f_lasti in looks(frame.f_code):
            self.count += 1
            if self.count == self.k:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted_everywhere(call):
    """Return the number of places; RuntimeError where one dropped the interrupt or replaced it by another exception."""
    sys.settrace(Interrupt(0))  # Python 3.13 tells of opcodes from a function's second traced call on
    call()
    sys.settrace(None)
    k = 0
    while True:
        k += 1
        interrupt = Interrupt(k)
        try:
            sys.settrace(interrupt)
            call()
        except KeyboardInterrupt:
            continue
        except BaseException as error:
            raise RuntimeError(f"another exception, {interrupt.place}") from error
        finally:
            sys.settrace(None)
        if interrupt.count < k:
            return k - 1
        raise RuntimeError(f"dropped: {interrupt.place}")


@pytest.mark.parametrize("what", ["a call in the other thread", "problems that are solved alone"])
def test_ctrl_c_wherever_python_looks_for_it(what):
    """No interrupt is dropped or leaves a thread waiting for ever, and the next call has the same bits."""
    A = np.tile(CASE.a, (6, 1))

    def batch():
        options = {"penalty": ("kl", "tv"), "reference": np.ones_like(CASE.M), "threads": 2}
        return mapuot.solve_batch(CASE.M, A, CASE.b, reg=0.05, reg_m=1.0, **options).log_u

    call = batch if "alone" in what else lambda: native.interruptible(lambda stop: time.sleep(0.001) or 0, 1 << 40)

    def child(say):
        right = call()
        threads = _thread._count()
        assert interrupted_everywhere(call) > 12  # 17 on Python 3.13
        np.testing.assert_array_equal(call(), right)
        assert threads_end(threads)

    code, said = Child(child).end()
    assert code == 0, said.decode()


@pytest.mark.parametrize("exact", [True, False])
def test_log_matmul(monkeypatch, exact):
    """Ctrl-C ends 7e10 exponentials, which take minutes; the default computes them if its products lose digits."""
    A = np.zeros((6000, 2000))
    B = np.zeros((2000, 6000))
    kept = []
    A[:, ::2], B[1::2] = -3000.0, -3000.0  # every term is e^-3000 of a row's and a column's largest
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def empty(shape, dtype):
        """Return the buffer that the core fills in its next call."""
        kept.append(np.full(shape, np.nan, dtype))
        timer.start()
        return kept[-1]

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(KeyboardInterrupt):
        mapuot.log_matmul(A, B, exact=exact, threads=2)
    assert np.isnan(kept[0]).any()
    timer.join()
