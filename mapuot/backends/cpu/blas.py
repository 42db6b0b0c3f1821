"""Threads of the BLAS libraries of NumPy and SciPy, which do not hear ``threads=``.

OpenBLAS takes all cores, and its threads wait for each other by spinning: with other programs on the cores, factors of
800 points took three to ten times as long on two threads as on one.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

LOCK = threading.Lock()
USERS = list[ExitStack]()  # of each solve under way; the first one's holds the limit of all


@functools.cache
def libraries() -> Any:
    """Return the controller of the loaded BLAS libraries."""
    import scipy.linalg.blas  # noqa: F401, PLC0415 - its library must be loaded to be found
    from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - on first use

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Let BLAS use so many threads; of solves at the same time the first decides, and the last restores."""
    limit = ExitStack()
    with LOCK:
        if USERS:
            limit = USERS[0]
        else:
            limit.enter_context(libraries().limit(limits=threads))
        USERS.append(limit)
    try:
        yield
    finally:
        with LOCK:
            USERS.pop()
            if not USERS:
                limit.close()
