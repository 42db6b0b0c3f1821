"""Run work in threads so that no Ctrl-C leaves it waiting for ever.

`threading` and `concurrent.futures` wait in Python code: a Ctrl-C that falls between the taking of a lock and the
`with` that gives it back leaves a worker, or the next call, waiting for ever, and one in a callback of a weak reference
is dropped. Here threads share only what C does as one step: an iterator, lists, queues.
"""

import functools
import os
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any

Work = Callable[[], Any]
LOOK_SECONDS = 0.1  # seconds between two checks for Ctrl-C, which another thread may have received


def new_thread(work: Work) -> None:
    start_new_thread(work, ())


def kept_thread(work: Work) -> None:
    """Run work in a persistent thread: a new one takes up to a millisecond to start on busy cores."""
    helper().put(work)


def each(
    function: Callable[[Any], Any], items: Iterable[Any], stop: Work, *, threads: int = 1,
    start: Callable[[Work], None] = new_thread, report: Work = lambda: None,
) -> None:  # fmt: skip
    """Call ``function(item)`` for all items in up to ``threads`` other threads, and ``report()`` here after each.

    The first exception of a call is raised, or one of this thread, Ctrl-C above all, when ``stop()`` has been called
    and the calls under way have ended.
    """
    waiting = list(items)
    answers = SimpleQueue[Any]()
    share = iter(waiting)
    count = len(waiting)
    begun = list[None]()
    ended = list[None]()

    def work() -> None:
        begun.append(None)
        try:
            for item in share:
                function(item)
                answers.put(None)
        except BaseException as error:
            answers.put(error)
        finally:
            ended.append(None)

    try:
        for _ in range(min(threads, count)):
            start(work)
        for _ in range(count):
            error = next_of(answers)
            if error:
                raise error
            report()
    except BaseException:
        waiting.clear()  # threads that begin later find nothing to do
        stop()
        error = None  # its traceback would hold this frame
        while len(ended) < len(begun):
            time.sleep(LOOK_SECONDS / 100)
        raise


def next_of(answers: SimpleQueue[Any]) -> Any:
    while True:
        try:
            return answers.get(timeout=LOOK_SECONDS)
        except Empty:
            pass


@functools.cache
def helper() -> SimpleQueue[Work]:
    """Return the work queue of a thread; it runs one item after the other, and items must not raise."""
    tasks = SimpleQueue[Work]()

    def serve() -> None:
        while True:
            tasks.get()()  # without a name, so that finished work is freed

    new_thread(serve)
    return tasks


os.register_at_fork(after_in_child=helper.cache_clear)  # a child process has no threads
