"""The log-semiring matrix product, out_ij = log sum_k exp(a_ik + b_kj).

A step of Sinkhorn's algorithm on logarithms is such a product. The kernels exponentiate the factors once and multiply;
src_c/log_matmul.h has the bound that decides if this is exact. Memory is O(m k + k n) beyond the answer. Arrays on a
GPU (CuPy, or objects with the CUDA array interface) stay there.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ..backends import namespace, pick
from ..problem.validate import as_array, as_threads, check_kind
from ..synonyms import hinted


@hinted
def log_matmul(A: Any, B: Any, *, threads: int | None = None, exact: bool = False) -> Any:
    """Multiply matrices of logarithms: ``out_ij = log sum_k exp(A_ik + B_kj)``.

    Parameters
    ----------
    A : (m, k) or (p, m, k) array
        float32 or float64; -inf is an exact zero.
    B : (k, n) or (p, k, n) array
        One matrix for all p products, or one for each.
    threads : int, optional
        As in `solve`.
    exact : bool
        Take k exponentials for every entry, relative to its own maximum over k. The default does so only
        where a product of exponentials could lose accuracy; elsewhere it is some twenty times faster.

    Returns
    -------
    out : (m, n) or (p, m, n) array
        -inf where every term is zero; NaN and +inf as in ``log(sum(exp(.)))``. float32 if both factors are.

    Raises
    ------
    ValueError, TypeError
        Shapes do not fit, or entries are not real.

    See Also
    --------
    Grid : the cost between images, solved by such products

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
    xp, batch = namespace(A), A.shape[:1] if A.ndim == 3 else B.shape[:1] if B.ndim == 3 else ()
    shape, p = (*batch, A.shape[-2], B.shape[-1]), batch[0] if batch else 1
    if 0 in (*A.shape, *B.shape):
        return xp.full(shape, -np.inf, A.dtype)
    whole = A[None] if A.ndim == 2 and p == 1 else A if A.ndim == 3 else xp.broadcast_to(A, (p, *A.shape))
    engine = import_module(module.__name__ + ".log_matmul")
    return engine.product(xp.ascontiguousarray(whole), xp.ascontiguousarray(B), exact, count).reshape(shape)


def as_factors(A: Any, B: Any, module: ModuleType) -> tuple[Any, Any]:
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
