"""The log-semiring matrix product, out_ij = log sum_k exp(a_ik + b_kj), and its gradient.

What a step of Sinkhorn's algorithm on logarithms is made of. The kernels exponentiate the factors once and multiply
(src_c/log_matmul.h has the bound that tells where this is exact); memory is O(m k + k n) beyond the answer. Arrays on a
GPU (CuPy, or what has its array interface) stay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ..backends import namespace, pick
from ..problem.validate import as_array, as_threads, check_kind

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

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> A, B = np.log([[0.5, 0.5], [0.25, 0.75]]), np.log([[2.0], [4.0]])
    >>> np.exp(mapuot.log_matmul(A, B)).round(12)
    array([[3. ],
           [3.5]])
    """
    count = as_threads(threads)
    module = pick("auto", A, B)
    A, B = as_factors(A, B, module)
    xp, shape = namespace(A), out_shape(A, B)
    p = shape[0] if len(shape) == 3 else 1
    if 0 in (*A.shape, *B.shape):
        return xp.full(shape, -np.inf, A.dtype)
    whole = A[None] if A.ndim == 2 and p == 1 else A if A.ndim == 3 else xp.broadcast_to(A, (p, *A.shape))
    engine = import_module(module.__name__ + ".log_matmul")
    return engine.product(xp.ascontiguousarray(whole), xp.ascontiguousarray(B), exact, count).reshape(shape)


def out_shape(A: Any, B: Any) -> tuple[int, ...]:
    """(m, n), or (p, m, n) where a factor is batched."""
    batch = A.shape[:1] if A.ndim == 3 else B.shape[:1] if B.ndim == 3 else ()
    return (*batch, A.shape[-2], B.shape[-1])


def as_factors(A: Any, B: Any, module: ModuleType) -> tuple[Any, Any]:
    """Return both factors in float32 or both in float64, in one place, and check that their shapes fit."""
    pair = []
    for value, name in ((A, "A"), (B, "B")):
        array = as_array(value, name, module.asarray)
        check_kind(array, name, "fiu")
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
    xp = namespace(A, B)
    return xp.asarray(A, dtype=dtype), xp.asarray(B, dtype=dtype)


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

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> A, B = np.zeros((1, 2)), np.log([[1.0], [3.0]])
    >>> mapuot.log_matmul_gradient(A, B, mapuot.log_matmul(A, B), np.ones((1, 1)))[0]
    array([[0.25, 0.75]])
    """
    A, B = as_factors(A, B, pick("auto", A, B))
    xp, shape = namespace(A), out_shape(A, B)
    pair = []
    for value, name in ((out, "out"), (G, "G")):
        array = as_array(value, name, xp.asarray)
        check_kind(array, name, "fiu")
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        pair.append(array.astype(A.dtype, copy=False))
    out, G = pair
    p = shape[0] if len(shape) == 3 else 1
    whole = (xp.broadcast_to(x, (p, *x.shape[-2:])) for x in (A, B, out, G))
    slopes = gradients(*whole)
    return tuple(
        slope if x.ndim == 3 else slope.sum(0) if len(shape) == 3 else slope[0]
        for slope, x in zip(slopes, (A, B), strict=True)
    )


def gradients(A: Any, B: Any, out: Any, G: Any) -> tuple[Any, Any]:
    """p products. With E = exp(A - r), F = exp(B - c), W = G / S:  dA = E * (W F^T),  dB = F * (E^T W)."""
    xp, k = namespace(A), A.shape[2]
    rows, cols = shift(A, 2), shift(B, 1)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        E, F = xp.exp(A - rows), xp.exp(B - cols)
        log_s = out - rows - cols
        used = xp.isfinite(log_s)
        fast = used & (log_s > LOST_LOG[A.dtype.name] + np.log(max(k, 1)))
        W = xp.where(fast, G * xp.exp(-xp.where(fast, log_s, 0)), 0)
        E, F = xp.where(xp.isfinite(E), E, 0), xp.where(xp.isfinite(F), F, 0)
        dA, dB = E * (W @ F.swapaxes(1, 2)), F * (E.swapaxes(1, 2) @ W)
        for q, i, j in entries(used & ~fast & (G != 0), k):
            w = G[q, i, j, None] * xp.exp(A[q, i] + B[q, :, j] - out[q, i, j, None])
            xp.add.at(dA, (q, i), w)
            xp.add.at(dB.swapaxes(1, 2), (q, j), w)
    return dA, dB


def shift(X: Any, axis: int) -> Any:
    """The maximum along the axis; 0 where it is -inf (a row of zeros)."""
    xp = namespace(X)
    if not X.shape[axis]:
        return xp.zeros_like(X, shape=(1, 1, 1))
    top = X.max(axis=axis, keepdims=True)
    return xp.where(xp.isneginf(top), 0, top).astype(X.dtype, copy=False)


def entries(mask: Any, k: int) -> Iterator[tuple[Any, Any, Any]]:
    """The (q, i, j) of a mask, so many at a time that PAIR_ENTRIES hold k numbers for each."""
    places = mask.nonzero()
    step = max(1, PAIR_ENTRIES // max(k, 1))
    for start in range(0, len(places[0]), step):
        q, i, j = (x[start : start + step] for x in places)
        yield q, i, j
