"""log_matmul on the GPU: src_cuda/log_matmul.cu, tile by tile, or exponentials multiplied by cuBLAS where those win.

Twin: cpu_log_matmul.py.
"""

from __future__ import annotations

import math
from typing import Any

import cupy as cp
import numpy as np

from .cuda_kernels import kernel

LIBRARY_TERMS = {"float64": 1 << 24, "float32": 1 << 27}  # of one product: from here on cuBLAS multiplies faster
FEW_TILES = 264  # two a multiprocessor: with fewer, smaller tiles fill the device better


def run(name: str, wide: bool, tile: int, blocks: int, *arguments: Any) -> None:
    kernel("log_matmul.cu", name, WIDE=int(wide), TILE=tile)((blocks,), (256,), arguments)


def product(A: Any, B: Any, exact: bool, threads: int | None) -> Any:
    """A (p, m, k), B (p, k, n) or (k, n), C order and one dtype -> (p, m, n); no dimension is 0."""
    (p, m, k), n = A.shape, B.shape[-1]
    wide, shared = A.dtype == np.float64, B.ndim == 2
    r, c = cp.empty((p, m), A.dtype), cp.empty((1 if shared else p, n), A.dtype)
    out = cp.empty((p, m, n), A.dtype)
    size = [np.int64(x) for x in (m, k, n)]
    run("row_shifts", wide, 64, -(-p * m // 8), A, np.int64(p * m), size[1], r)
    run("column_shifts", wide, 64, len(c) * -(-n // 32), B, size[1], size[2], c)
    if not exact and m * k * n >= LIBRARY_TERMS[A.dtype.name] and by_library(A, B, r, c, out):
        return out
    tile = 64 if p * -(-m // 64) * -(-n // 64) >= FEW_TILES else 32
    step = np.int64(0 if shared else k * n)
    tiles = p * -(-m // tile) * -(-n // tile)
    run("log_tiles", wide, tile, tiles, A, B, r, c, out, *size, step, np.int32(exact))
    return out


def by_library(A: Any, B: Any, r: Any, c: Any, out: Any) -> bool:
    """S = E F with E = exp(A - r), F = exp(B - c), then its logarithms; False where an entry needs its own maximum."""
    (_, m, k), n = A.shape, B.shape[-1]
    wide, shared = A.dtype == np.float64, B.ndim == 2
    E, F, lost = cp.empty_like(A), cp.empty_like(B), cp.zeros(1, np.int32)
    for X, shift, Y, by_rows in ((A, r, E, 1), (B, c, F, 0)):
        size = [np.int64(x) for x in (X.size, X.shape[-1], X.shape[-2])]
        run("exponentials", wide, 64, grid(X.size), X, shift, Y, *size, np.int32(by_rows))
    cp.matmul(E, F, out=out)
    size = [np.int64(x) for x in (out.size, m, k, n, 0 if shared else n)]
    run("log_sums", wide, 64, grid(out.size), out, r, c, *size, lost)
    return not int(lost[0])


def grid(entries: int) -> int:
    return min(math.ceil(entries / 256), 4096)
