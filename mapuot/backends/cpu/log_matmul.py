"""log_matmul in C: src_c/log_matmul.c over the thread pool. Twin: backends/cuda/log_matmul.py."""

from typing import Any

import numpy as np

from ..._core import ffi, lib
from .native import DTYPES, EXP_WORK, interruptible, pool_for


def product(A: Any, B: Any, exact: bool, threads: int | None) -> Any:
    """Return the (p, m, n) products of A (p, m, k) and B (p, k, n) or (k, n), in C order, of one dtype, not empty."""
    p, m, k = A.shape
    n = B.shape[-1]
    out = np.empty((p, m, n), A.dtype)
    pool = pool_for(threads, p * max(m * n, m * k, k * n))
    arguments = (
        pool, p, m, k, n, DTYPES[A.dtype.name], ffi.from_buffer("void *", A), ffi.from_buffer("void *", B), B.ndim == 2,
        exact, ffi.from_buffer("void *", out),
    )  # fmt: skip
    work = p * m * n * k * (EXP_WORK if exact else 2)  # 2: some entries of a plain product may need exponentials
    interruptible(lambda stop: lib.mapuot_log_matmul(*arguments, stop), work)
    return out
