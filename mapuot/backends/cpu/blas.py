"""Threads of the BLAS libraries of NumPy and SciPy, which do not hear ``threads=``.

OpenBLAS takes all cores, and its threads wait for each other by spinning: with other programs on the cores, factors of
800 points took three to ten times as long on two threads as on one.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

SERIAL_UNKNOWNS = 1500  # equations up to here are solved by one thread: a factor takes 30 ms
NAMES = (  # of the functions that set and return the number of threads
    ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_num_threads64_"),
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("openblas_set_num_threads64_", "openblas_get_num_threads64_"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
)
LOCK = threading.Lock()
USERS = list[list[int]]()  # of each solve under way: the numbers of threads to restore after the last one

Control = tuple[Callable[[int], object], Callable[[], int]]


@functools.cache
def controls() -> tuple[Control, ...]:
    """Return the functions that set and return the threads of each BLAS library; none of a library without them.

    A symbol of an extension module is searched in the libraries that the module was linked to, too.
    """
    from scipy.linalg import _fblas, _flapack  # noqa: PLC0415 - on first use

    found = list[Control]()
    for file in dict.fromkeys((np.linalg._umath_linalg.__file__, _fblas.__file__, _flapack.__file__)):
        library = ctypes.CDLL(file)
        known = [pair for pair in NAMES if all(hasattr(library, name) for name in pair)]
        found += [(getattr(library, setter), getattr(library, getter)) for setter, getter in known[:1]]
    return tuple(found)


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Let BLAS use so many threads; of solves at the same time the first decides, and the last restores."""
    with LOCK:
        if USERS:
            before = USERS[0]
        else:
            before = [getter() for _, getter in controls()]
            for setter, _ in controls():
                setter(threads)
        USERS.append(before)
    try:
        yield
    finally:
        with LOCK:
            USERS.pop()
            if not USERS:
                for (setter, _), count in zip(controls(), before, strict=True):
                    setter(count)
