"""Threads of the BLAS libraries of NumPy and SciPy, which do not hear ``threads=``.

OpenBLAS takes all cores, and its threads wait for each other by spinning: with other programs on the cores, factors of
800 points took three to ten times as long on two threads as on one.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMITS = threading.Lock()  # held by the solve whose limit counts


@functools.cache
def libraries() -> Any:
    """Return the controller of the loaded BLAS libraries."""
    import scipy.linalg.blas  # noqa: F401, PLC0415 - its library must be loaded to be found
    from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - on first use

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Let BLAS use so many threads; of solves at the same time the first decides.

    The thread that set a limit removes it: threadpoolctl 3.8 drops what another thread asks for, without a word.
    """
    if not LIMITS.acquire(blocking=False):
        yield
        return
    try:
        with libraries().limit(limits=threads):
            yield
    finally:
        LIMITS.release()
