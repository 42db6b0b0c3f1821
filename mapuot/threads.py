"""Threads whose work no Ctrl-C can leave waiting for ever.

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
LOOK_SECONDS = 0.1  # seconds between two looks for a Ctrl-C, which the system may have told to another thread


def new_thread(work: Work) -> None:
    start_new_thread(work, ())


def kept_thread(work: Work) -> None:
    """Run work in a thread that is kept: a new one takes up to a millisecond to start where the cores are busy."""
    helper().put(work)


def each(
    function: Callable[[Any], Any], items: Iterable[Any], stop: Work, *, threads: int = 1,
    start: Callable[[Work], None] = new_thread, told: Work = lambda: None,
) -> None:  # fmt: skip
    """Call ``function(item)`` for all items in other threads, at most so many, and ``told()`` here after each.

    The first exception of a call is raised, or one of this thread, Ctrl-C above all, when ``stop()`` has been called
    and the calls under way have ended.
    """
    waiting, answers = list(items), SimpleQueue[Any]()
    share, count = iter(waiting), len(waiting)
    begun, ended = list[None](), list[None]()

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
            told()
    except BaseException:
        waiting.clear()  # who begins later finds nothing to do
        stop()
        error = None  # whose traceback has this frame
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
    """Return the queue of a thread that does its work one after the other; work must not raise."""
    tasks = SimpleQueue[Work]()

    def serve() -> None:
        while True:
            tasks.get()()  # without a name: what is done is not kept

    new_thread(serve)
    return tasks


os.register_at_fork(after_in_child=helper.cache_clear)  # a child has none of the threads
