"""The log-semiring matrix product, out_ij = log sum_k exp(a_ik + b_kj), and its gradient.

What a step of Sinkhorn's algorithm on logarithms is made of. The C kernels exponentiate the factors once and multiply
(src_c/log_matmul.h has the bound that tells where this is exact); memory is O(m k + k n) beyond the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._core import lib
from .backends.native import DTYPES, check, new_pool, pointer
from .solve import as_count

PAIR_ENTRIES = 1 << 20  # entries that the exact gradient holds at once
LOST_LOG = {"float64": -671.0, "float32": -70.5}  # log (S / k) below it: the factors may have underflowed


def log_matmul(A: Any, B: Any, *, threads: int | None = None, exact: bool = False) -> Any:
    """Log-semiring matrix product, ``out_ij = log sum_k exp(A_ik + B_kj)``, batched.

    Parameters
    ----------
    A : (m, k) or (p, m, k) array
        float32 or float64; -inf is an exact zero.
    B : (k, n) or (p, k, n) array
        One for all products, or one each.
    threads : int, optional
        Default: the cores this process may use, one for small products.
    exact : bool
        Take k exponentials for every entry, by its own maximum over k. The default does so only where the
        product of exponentials could lose more than its rounding, and is some twenty times faster elsewhere.

    Returns
    -------
    out : (m, n) or (p, m, n) array
        -inf where every term is zero; NaN and +inf as in ``log(sum(exp(.)))``. float32 where both factors are.

    Raises
    ------
    ValueError, TypeError
        Shapes do not fit, or entries are not real.
    """
    A, B = as_factors(A, B)
    A, B = np.ascontiguousarray(A), np.ascontiguousarray(B)
    batched, shared = A.ndim == 3 or B.ndim == 3, B.ndim == 2
    p = (A if A.ndim == 3 else B).shape[0] if batched else 1
    (m, k), n = A.shape[-2:], B.shape[-1]
    if A.ndim == 2 and B.ndim == 3:
        A = np.ascontiguousarray(np.broadcast_to(A, (p, m, k)))
    out = np.full((p, m, n), -np.inf, A.dtype) if k == 0 else np.empty((p, m, n), A.dtype)
    if out.size and k:
        pool = new_pool(None if threads is None else as_count(threads, "threads"), p * max(m * n, m * k, k * n))
        check(
            lib.mapuot_log_matmul(
                pool, p, m, k, n, DTYPES[A.dtype.name], pointer(A, "void *"), pointer(B, "void *"),
                shared, exact, pointer(out, "void *"),
            )
        )  # fmt: skip
    return out if batched else out[0]


def as_factors(A: Any, B: Any) -> tuple[Any, Any]:
    """Both as float32 or both as float64, with shapes that fit."""
    pair = []
    for value, name in ((A, "A"), (B, "B")):
        array = np.asarray(value)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
        if array.ndim not in (2, 3):
            raise ValueError(f"{name} must have 2 or 3 dimensions, got shape {array.shape}")
        pair.append(array)
    A, B = pair
    if A.shape[-1] != B.shape[-2]:
        raise ValueError(f"A (.., m, k) and B (.., k, n) must share k, got shapes {A.shape} and {B.shape}")
    if A.ndim == B.ndim == 3 and len(A) != len(B):
        raise ValueError(f"A and B must hold equally many products, got {len(A)} and {len(B)}")
    narrow = all(x.dtype.name in ("float32", "float16") for x in pair)
    dtype = np.dtype(np.float32 if narrow else np.float64)
    return A.astype(dtype, copy=False), B.astype(dtype, copy=False)


def log_matmul_gradient(A: Any, B: Any, out: Any, G: Any) -> tuple[Any, Any]:
    """Gradient of ``sum(G * log_matmul(A, B))``: the softmax-weighted sums of G.

    ``dA_ik = sum_j G_ij w_ijk`` and ``dB_kj = sum_i G_ij w_ijk`` with ``w_ijk = exp(A_ik + B_kj - out_ij)``.

    Parameters
    ----------
    A, B : arrays
        As in `log_matmul`.
    out : array
        ``log_matmul(A, B)``.
    G : array
        The gradient with respect to ``out``, of its shape.

    Returns
    -------
    dA, dB : arrays of the shapes of A and B
        An entry ``out_ij`` that is not finite passes nothing on.

    Raises
    ------
    ValueError, TypeError
        Shapes do not fit, or entries are not real.
    """
    A, B = as_factors(A, B)
    out, G = np.asarray(out, dtype=A.dtype), np.asarray(G, dtype=A.dtype)
    shape = (*(A.shape[:1] if A.ndim == 3 else B.shape[:1] if B.ndim == 3 else ()), A.shape[-2], B.shape[-1])
    for value, name in ((out, "out"), (G, "G")):
        if value.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
    dA, dB = np.zeros_like(A), np.zeros_like(B)
    for q in range(shape[0] if len(shape) == 3 else 1):
        parts = [x[q] if x.ndim == 3 else x for x in (A, B, out, G, dA, dB)]
        add_gradient(*parts)
    return dA, dB


def add_gradient(A: Any, B: Any, out: Any, G: Any, dA: Any, dB: Any) -> None:
    """One product. With E = exp(A - r), F = exp(B - c), W = G / S:  dA = E * (W F^T),  dB = F * (E^T W)."""
    rows, cols = shift(A, 1), shift(B, 0)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        E, F = np.exp(A - rows), np.exp(B - cols)
        log_s = out - rows - cols
        used = np.isfinite(log_s)
        fast = used & (log_s > LOST_LOG[A.dtype.name] + np.log(max(len(B), 1)))
        W = np.where(fast, G * np.exp(-np.where(fast, log_s, 0)), 0)
        E[~np.isfinite(E)] = F[~np.isfinite(F)] = 0
        dA += E * (W @ F.T)
        dB += F * (E.T @ W)
        for i, j in pairs(used & ~fast & (G != 0), len(B)):
            w = G[i, j, None] * np.exp(A[i] + B.T[j] - out[i, j, None])
            np.add.at(dA, i, w)
            np.add.at(dB.T, j, w)


def shift(X: Any, axis: int) -> Any:
    """The maximum along the axis; 0 where it is -inf (a row of zeros)."""
    top = X.max(axis=axis, keepdims=True) if X.shape[axis] else np.zeros_like(X, shape=(1, 1))
    return np.where(np.isneginf(top), 0, top).astype(X.dtype, copy=False)


def pairs(mask: Any, k: int) -> Iterator[tuple[Any, Any]]:
    """The (i, j) of a mask, so many at a time that PAIR_ENTRIES hold k numbers for each."""
    i, j = np.nonzero(mask)
    step = max(1, PAIR_ENTRIES // max(k, 1))
    for start in range(0, len(i), step):
        yield i[start : start + step], j[start : start + step]
