"""The log-semiring matrix product, out_ij = log sum_k exp(a_ik + b_kj).

A step of Sinkhorn's algorithm on logarithms is such a product. The kernels exponentiate the factors once and multiply;
src_c/log_matmul.h has the bound that decides if this is exact. Memory is O(m k + k n) beyond the answer. Arrays on a
GPU (CuPy, or objects with the CUDA array interface) stay there.
"""

from typing import Any

import numpy as np

from ..arrays import namespace
from ..contract import Backend
from ..problem.validate import as_array, check_kind
from . import pick


def multiply(A: Any, B: Any, threads: int | None = None, exact: bool = False) -> Any:
    """Check the factors of `log_matmul`, and multiply them where they lie."""
    backend = pick("auto", A, B)
    A, B = as_factors(A, B, backend)
    xp = namespace(A)
    if A.ndim == 3:
        batch = A.shape[:1]
    elif B.ndim == 3:
        batch = B.shape[:1]
    else:
        batch = ()
    shape = (*batch, A.shape[-2], B.shape[-1])
    p = batch[0] if batch else 1
    if 0 in (*A.shape, *B.shape):
        return xp.full(shape, -np.inf, A.dtype)
    if A.ndim == 2 and p == 1:
        whole = A[None]
    elif A.ndim == 3:
        whole = A
    else:
        whole = xp.broadcast_to(A, (p, *A.shape))
    found = backend.log_product(xp.ascontiguousarray(whole), xp.ascontiguousarray(B), exact, threads)
    return found.reshape(shape)


def as_factors(A: Any, B: Any, backend: Backend) -> tuple[Any, Any]:
    pair = []
    for value, name in ((A, "A"), (B, "B")):
        array = as_array(value, name, backend.asarray)
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
