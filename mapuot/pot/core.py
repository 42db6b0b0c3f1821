"""POT's iteration for barycenters in the C core: one foreign call makes many of them.

C side: src_c/barycenter.c. Oracle: tests/api/test_barycenter.py, which has POT itself beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._core import ffi, lib
from ..backends.cpu.native import check, empty, leading_dimension, matrix, pointer, pool_for
from ..penalties import F64

CALL_ENTRIES = 1 << 28  # of all K in one foreign call, some .2 s: Ctrl-C and the progress bar wait for it
CALL_ITERATIONS = 4096  # whose records a call holds


def most_iterations(entries: int) -> int:
    """Iterations of one foreign call that read so many entries each."""
    return max(1, min(CALL_ITERATIONS, CALL_ENTRIES // entries))


def barycenter(
    A: F64,
    M: Any,
    reg: float,
    fi: float,
    weights: F64,
    start: float,
    every: int,
    least: int,
    max_iter: int,
    stop: float,
    safe: float,
    advanced: Callable[[int], Any] = lambda made: None,
) -> tuple[F64, F64, F64, list[float], int, bool]:
    """POT's iteration from log v = ``start``: q, log u and log v (k, n), err, iterations, whether err is below stop.

    A (k, n) and M (n, n) are finite float64 or float32 arrays that the core reads; ``safe`` is the largest exponent
    that a plain product may span.
    """
    (k, n), low = A.shape, float(M.min()) / reg
    pool, ld = pool_for(None, k * n * n), leading_dimension(n, 8)
    kernel, alpha, beta = empty(n * ld), np.full(n, low), np.zeros(n)
    check(
        lib.mapuot_build_kernel(
            pool, n, n, matrix(M), matrix(None), reg, pointer(alpha), pointer(beta), lib.MAPUOT_F64,
            pointer(kernel, "void *"), ld,
        )
    )  # fmt: skip
    A, weights = np.ascontiguousarray(A, np.float64), np.ascontiguousarray(weights, np.float64)
    log_u, log_v, q = np.empty((k, n)), np.full((k, n), start), np.full(n, np.exp(start))
    most, err = most_iterations(k * n * n), []
    looks = np.empty(1 + most // every)
    run = ffi.new("mapuot_barycenter_run *")
    run.n, run.k, run.ld, run.fi, run.low, run.safe = n, k, ld, fi, low, safe
    run.spread = float(M.max()) / reg - low
    run.kernel, run.A, run.weights = map(pointer, (kernel, A, weights))
    run.log_u, run.log_v, run.q, run.err = map(pointer, (log_u, log_v, q, looks))
    run.every, run.least, run.stop = every, least, stop
    status = lib.MAPUOT_RUNNING
    while run.made < max_iter and status == lib.MAPUOT_RUNNING:
        before, run.looks = run.made, 0
        status = check(lib.mapuot_barycenter(pool, run, min(most, max_iter - run.made)))
        advanced(run.made - before)
        err += looks[: run.looks].tolist()
        if status == lib.MAPUOT_ABSORB:
            log_kernel, status = np.divide(M, -reg, dtype=np.float64, order="C"), lib.MAPUOT_RUNNING
            run.log_kernel = pointer(log_kernel)
    return q, log_u, log_v, err, int(run.made), status == lib.MAPUOT_CONVERGED
