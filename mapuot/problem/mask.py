"""Random masks computed from a seed: `SeededMask`; `MaskedReference`, the reference with 0 for dropped pairs.

    c'_ij = c_ij / keep  where Philox4x32-10 (key: the seed, counter: (i, j)) < keep 2^64,  else 0

The mask is recomputed for every entry of K or of the plan, and never stored. The integer code below is the reference of
src_c/common/mask.h. Source: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike
from ..errors import shown
from .cost import Cost, Dense
from .validate import as_float

BLOCK_ENTRIES = 1 << 15  # in one block of the NumPy code: its ten vectors stay in cache
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


def philox(key: int, i: Any, j: Any) -> tuple[Any, ...]:
    """Return the four words of Philox4x32-10 for the counter words (i, i >> 32, j, j >> 32), as uint64 arrays."""
    a = i & LOW
    b = i >> HALF
    c = j & LOW
    d = j >> HALF
    for step in range(10):
        low, high = ((half + step * weyl) % 2**32 for half, weyl in ((key, 0x9E3779B9), (key >> 32, 0xBB67AE85)))
        x = a * np.uint64(0xD2511F53)
        y = c * np.uint64(0xCD9E8D57)
        a = (y >> HALF) ^ b ^ np.uint64(low)
        b = y & LOW
        c = (x >> HALF) ^ d ^ np.uint64(high)
        d = x & LOW
    return a, b, c, d


@dataclass(frozen=True)
class SeededMask:
    """Random mask of the pairs of a problem, for ``mask=`` of the solvers. Only a seed is stored.

    Each pair (i, j) is kept with probability ``keep``, independently of the others. Kept pairs count ``1 / keep``
    times, so that sums over the kernel stay the same on average. The masked problem has the reference measure ``c /
    keep`` on the kept pairs and 0 elsewhere; all numbers of its Result belong to the masked problem.

    Parameters
    ----------
    keep, seed : float, int
        Share of kept pairs, 2^-64 <= keep <= 1, and seed, 0 <= seed < 2^64.
    turned : bool
        Whether pair (i, j) takes the random bits of (j, i); see ``T``.

    See Also
    --------
    solve : takes it as ``mask=``

    Notes
    -----
    The 64 random bits of a pair are the first two words of Philox4x32-10 with the key ``seed`` and the counter (i, j),
    in the numbering of the whole matrix. They are the same in every backend and instruction set, in any order, and for
    any number of threads and ranks. A pair costs some 3 ns (AVX-512) each time: a few times in a solve that stores K,
    and once in every pass if M is a PointCloud.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.abs(np.linspace(0, 1, 300)[:, None] - np.linspace(0, 1, 400))
    >>> mask = mapuot.SeededMask(keep=0.1, seed=7)
    >>> result = mapuot.solve(M, reg=0.05, reg_m=1.0, mask=mask)
    >>> result.converged, bool((result.plan > 0)[~mask.kept(*np.ogrid[:300, :400])].any())
    (True, False)
    >>> mask.sample(M).nnz
    12011
    """

    keep: float
    seed: int
    turned: bool = False

    def __post_init__(self) -> None:
        keep = as_float(self.keep, "keep")
        if not 2.0**-64 <= keep <= 1:
            raise ValueError(f"keep must be in 2^-64 ... 1, got {shown(self.keep)}")
        try:
            seed = operator.index(self.seed)
        except TypeError as error:
            raise TypeError(f"seed must be an integer, got {shown(self.seed)}") from error
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in 0 ... 2^64 - 1, got {shown(self.seed)}")
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "turned", bool(self.turned))

    @property
    def T(self) -> "SeededMask":  # noqa: N802 - numpy's word
        """Mask of the transposed matrix: ``mask.T`` with M.T is the problem of ``mask`` with M."""
        return replace(self, turned=not self.turned)

    @property
    def _weight(self) -> float:
        return 1 / self.keep

    @property
    def _limit(self) -> int:
        """Largest 64-bit number for which a pair is kept."""
        return math.ceil(Fraction(self.keep) * 2**64) - 1

    def kept(self, i: ArrayLike, j: ArrayLike) -> Any:
        """Tell which pairs of rows i and columns j, 0 <= i, j < 2^63, are kept; shapes broadcast."""
        i, j = (np.asarray(x).astype(np.uint64) for x in (i, j))
        first, second, *_ = philox(self.seed, *((j, i) if self.turned else (i, j)))
        return first + (second << HALF) <= np.uint64(self._limit)

    def sample(self, M: CostLike) -> Any:
        """Return the kept pairs of the costs M, (m, n), as a scipy.sparse.csr_array; zeros of M are stored, too.

        To solve the masked problem without the mask, multiply the reference by ``1 / keep`` on these entries, or add
        ``reg * log(keep)`` to their costs, which changes the objective by a constant.
        """
        from scipy.sparse import csr_array  # noqa: PLC0415 - on first use

        M = np.asarray(M)
        if M.ndim != 2 or M.dtype.kind not in "fiub":
            raise ValueError(f"M must be a matrix of real numbers, got shape {M.shape}, dtype {M.dtype}")
        columns = []
        values = []
        ends = np.zeros(len(M) + 1, np.int64)
        whole = MaskedReference("uniform", self, M.shape)
        for i0, weights in whole.weights():
            rows, cols = np.nonzero(weights)
            ends[i0 + 1 : i0 + 1 + len(weights)] = np.bincount(rows, minlength=len(weights))
            columns.append(cols)
            values.append(M[i0 + rows, cols])
        empty = [np.zeros(0, np.int64)], [np.zeros(0, M.dtype)]
        found = np.concatenate(values or empty[1]), np.concatenate(columns or empty[0])
        return csr_array((*found, ends.cumsum()), shape=M.shape)


class MaskedReference(Cost):
    """The reference measure of a masked problem, or some rows of it: ``base`` times the weights of the mask.

    ``base`` is "product" or "uniform", both a factor of 1, or the user's Dense or Streamed matrix. ``row`` and ``col``
    are the first row and column of the block in the whole matrix.
    """

    kind = "a masked reference"

    def __init__(self, base: str | Cost, mask: SeededMask, shape: tuple[int, int], row: int = 0, col: int = 0) -> None:
        self.base, self.mask, self.shape, self.row, self.col = base, mask, shape, row, col
        if isinstance(base, str):
            self.dtype = np.dtype(np.float64)
        else:
            self.dtype = base.dtype

    @property
    def given(self) -> Any:
        if isinstance(self.base, str):
            return None
        return self.base.array

    def changed(self, change: Callable[[Cost], Cost]) -> str | Cost:
        if isinstance(self.base, str):
            return self.base
        return change(self.base)

    def read(self, i0: int, i1: int) -> "MaskedReference":
        base = self.changed(lambda c: Dense(c.read(i0, i1)))
        return MaskedReference(base, self.mask, (i1 - i0, self.shape[1]), self.row + i0, self.col)

    def with_given(self, move: Callable[[Any], Any]) -> "MaskedReference":
        """Return the reference with ``move(given)`` instead of the user's numbers."""
        base = self.changed(lambda c: Dense(move(c.array)))
        return MaskedReference(base, self.mask, self.shape, self.row, self.col)

    def transpose(self) -> "MaskedReference":
        base = self.changed(lambda c: c.transpose())
        return MaskedReference(base, self.mask.T, self.shape[::-1], self.col, self.row)

    @property
    def T(self) -> "MaskedReference":  # noqa: N802 - as for an array
        return self.transpose()

    def weights(self) -> Any:
        """Yield (i0, 0 or 1 / keep of the rows from i0 on), block by block, in NumPy."""
        m, n = self.shape
        step = max(1, BLOCK_ENTRIES // max(1, n))
        columns = self.col + np.arange(n)
        for i0 in range(0, m, step):
            rows = self.row + np.arange(i0, min(i0 + step, m))
            yield i0, np.where(self.mask.kept(rows[:, None], columns), self.mask._weight, 0.0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Form c' without its factor a b^T, in NumPy."""
        out = np.empty(self.shape)
        for i0, weights in self.weights():
            out[i0 : i0 + len(weights)] = weights
        if self.given is not None:
            out *= np.asarray(self.given)
        return out.astype(dtype or out.dtype, copy=False)

    def words(self) -> dict[str, int | float]:
        """Members of a mapuot_mask record, with signed 64-bit numbers."""
        mask = self.mask
        key, limit = ((x ^ 2**63) - 2**63 for x in (mask.seed, mask._limit))
        row, col = self.row, self.col
        return {"key": key, "limit": limit, "weight": mask._weight, "row": row, "col": col, "turned": int(mask.turned)}


def as_mask(value: Any, cost: Cost) -> SeededMask:
    if not isinstance(value, SeededMask):
        chosen = hasattr(value, "shape") or isinstance(value, (list, tuple))
        if chosen:
            cure = ": to forbid pairs of your choice, set M to inf there, or reference= to 0"
        else:
            cure = ""
        raise TypeError(f"mask must be a mapuot.SeededMask, got {shown(value)}{cure}")
    if cost.operator == "pairs":
        raise NotImplementedError("mask is for costs of all pairs: a sparse M has the pairs that it keeps")
    return value
