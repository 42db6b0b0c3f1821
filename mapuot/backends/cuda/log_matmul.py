"""log_matmul on the GPU: src_cuda/many/log_matmul.cu, tile by tile, or cuBLAS on exponentials where this is faster.

Twin: backends/cpu/log_matmul.py.
"""

from typing import Any

import cupy as cp
import numpy as np

from .kernels import kernel
from .settings import DEVICE_LAUNCHES

LIBRARY_TERMS = {"float64": 1 << 27, "float32": 1 << 30}  # multiplications; from here on cuBLAS is faster


def product(A: Any, B: Any, exact: bool, threads: int | None) -> Any:
    """Return the (p, m, n) products of A (p, m, k) and B (p, k, n) or (k, n), in C order, of one dtype, not empty."""
    p, m, k = A.shape
    n = B.shape[-1]
    wide = A.dtype == np.float64
    shared = B.ndim == 2
    copies = 1 if shared else p
    if p * -(-m // 64) * -(-n // 64) >= DEVICE_LAUNCHES.few_tiles:
        tile = 64
    else:
        tile = 32
    room = cp.empty(p * m + copies * n, A.dtype)
    r = room[: p * m]
    c = room[p * m :]
    out = cp.empty((p, m, n), A.dtype)
    size = [np.int64(x) for x in (m, k, n)]

    def run(name: str, blocks: int, *arguments: Any) -> None:
        kernel("log_matmul.cu", name, WIDE=int(wide), TILE=tile)((blocks,), (256,), arguments)

    columns = copies * -(-n // 32)
    run("shifts", columns + -(-p * m // 8), A, B, *size, np.int64(p * m), np.int64(columns), r, c)
    lost = c
    mode = 1 if exact else 0
    if not exact and p * m * k * n >= LIBRARY_TERMS[A.dtype.name]:
        E = cp.empty_like(A)
        F = cp.empty_like(B)
        lost = cp.zeros(1, np.int32)
        mode = 2
        run("exponentials", p * m, A, r, E, size[1], size[0], np.int32(1))
        run("exponentials", copies * k, B, c, F, size[2], size[1], np.int32(0))
        cp.matmul(E, F, out=out)
        run("log_sums", p * m, out, r, c, *size, np.int64(0 if shared else n), lost)
    step = np.int64(0 if shared else k * n)
    run("log_tiles", p * -(-m // tile) * -(-n // tile), A, B, r, c, out, *size, step, np.int32(mode), lost)
    return out
