"""`log_matmul`: the product of matrices of logarithms, checked by backends/log_matmul.py, which multiplies."""

from typing import Any

from numpy.typing import ArrayLike

from ..backends.log_matmul import multiply
from ..problem.validate import as_threads
from ..synonyms import hinted


@hinted
def log_matmul(A: ArrayLike, B: ArrayLike, *, threads: int | None = None, exact: bool = False) -> Any:
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
    return multiply(A, B, as_threads(threads), exact)
