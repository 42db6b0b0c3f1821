"""Contract of the backends: what each supplies, and what it is given.

A backend is a module (or package) with

    asarray(x), to_numpy(x), extrema(M, threads) -> (min, max, number of NaN or -inf, number of +inf); a GPU's
                                        also tells how many pairs on both sides of the diagonal it saw that differ
    is_symmetric(M) -> whether a square matrix is its transpose
    weigh(table, p) -> ((p, length) float64 weights, their masses, their minima)
    Workspace(problem, options, skip)   one solve (workspace.py): K, the potentials, the iteration; skip: the state of
                                        the pairs of points that it skips (boxes.Truncation), or None
    operator_of(cost, reg, c, ranks, threads)   the `Operator` (operator.py) of a cost
    plan_of(problem, log_u, log_v, threads)     the operator that has taken these potentials: their plan, from M
    LEAST_BOX   points of a box where pairs of points are skipped (boxes.py), at least
    ONE_POTENTIAL   True where passes can be those of one potential, log u = log v (Options.symmetric)
    QUICK_ENTRIES, QUICK_PASSES   K up to so large makes so many passes before the first is timed

and, where it has them,

    RANKS_TOGETHER  True where ranks that share the rows can make such passes
    SKIPS_TOGETHER  True where passes of one potential can skip pairs of points
    SKIPS_FROM  pairs from which a cloud that says "auto" skips some, where those are more than it says itself
    quicker_turned(cost)    whether a solve of the transpose takes less time
    costs(cloud, threads)   the matrix of points
    formed(cloud, threads)  the same, and a bound on the rounding that it has beside, where products make it sooner
    form_bytes(cloud)       how many bytes that matrix and K may take where nobody says
    held(problem)           a problem between points with the vectors of its sides, and points that are sorted, where
                            they are best worked on

    MOST_FACTORED           points of the smaller side of problems that factored.py serves;
                            PRODUCT_PASSES: how many passes a product of Newton's step takes beside them

and for a batch ``api/batch.py`` with storage, bytes_each, CHUNK_BYTES and batch_of.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ..penalties import F64

LEAST_MASS = 1e-290  # of a plan: below it the marginals lose their digits at the smallest float64
SECONDS_A_CALL = 0.1  # how long a core may keep control: Ctrl-C and the progress bar wait for it
MEMORY = 5, 20  # Anderson differences where they cost time beside a pass, and where they do not
PAD = 16  # rows of K and vectors of the columns are padded to a multiple of this many entries
SMALL_ENTRIES = 1 << 20  # a float64 K up to this size stays in a CPU's cache


def memory_of(most: int, m: int, itemsize: int) -> int:
    """Return how many Anderson differences serve a K of m rows: d of them move 16 d bytes a column, a tenth of K's."""
    least, deepest = MEMORY
    return min(most, max(least, min(deepest, m * itemsize // 160)))


@dataclass(frozen=True)
class Options:
    """Options of a workspace, beside the problem."""

    translate: bool
    memory: int  # Anderson memory, 0 = none
    in_place: bool  # the paper's form: K is overwritten by the plan
    precision: str  # storage of K: "float64" or "float32"
    tol: float
    tol_gap: float  # < 0: none
    threads: int | None
    schedule: str = "auto"  # of rows over threads: evenly ("static"), or by their speed
    symmetric: bool = False  # rows and columns are the same problem: passes of one potential, log u = log v
    last: bool = True  # at the reg asked for, where errors are certified
    leaps: bool = False  # Newton's steps, which prove nothing, between passes

    @property
    def allowed(self) -> float:
        """Return the share of the mass that hard columns may miss while a gap still tells something."""
        return self.tol_gap if self.tol_gap >= 0 else max(self.tol, 0.0)

    def has_value(self, stat: "Stats") -> bool:
        """Tell whether a pass knows the value to ``tol_gap``; its gap is inf while hard columns miss more than that."""
        return self.tol_gap >= 0 and stat.gap < np.inf and stat.gap <= self.tol_gap * abs(stat.dual)


@dataclass(slots=True)
class Stats:
    """Numbers of one pass, which the callback gets and ``Result.trace`` keeps.

    See Also
    --------
    Result : ``result.trace`` is a list of them

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> result = mapuot.solve(np.eye(3), reg=0.1, reg_m=1.0)
    >>> last = result.trace[-1]
    >>> last.n_pass == result.n_passes, last.error <= 1e-6
    (True, True)
    """

    n_pass: int
    gap: float  # primal - dual, in units of the objective
    error: float  # certified relative plan error
    dual: float
    mass: float
    residual: float  # max |change of log v|
    rejected: bool  # the guard dropped an extrapolated step
    status: str  # one of status.STATUSES
    seconds: float = 0.0  # since the solve began


def name_of(backend: ModuleType) -> str:
    """Return the name of a backend module, as ``pick`` takes it."""
    return backend.__name__.rpartition(".")[2]


def namespace(*arrays: Any) -> Any:
    """Return NumPy, or CuPy where one of the arrays is CuPy's, of whose vectors cuda/vectors.py."""
    there = [x for x in arrays if type(x).__module__.partition(".")[0] == "cupy"]
    return getattr(there[0], "xp", None) or sys.modules["cupy"] if there else np


def host(x: Any) -> Any:
    """Return an array or a sparse matrix that may lie on a GPU as NumPy and SciPy have it."""
    return x.get() if type(x).__module__.partition(".")[0] in ("cupy", "cupyx") else x


def is_on_device(x: Any) -> bool:
    """Tell whether an array, a sparse matrix, a tensor or a cost lies on a GPU; no library is loaded to find out."""
    said = any(getattr(x, name, False) is True for name in ("on_device", "is_cuda"))
    return said or hasattr(x, "__cuda_array_interface__") or type(x).__module__.startswith("cupyx.")


def largest(x: Any, least: float = 0.0) -> float:
    """Return the largest number of x, which may be empty or lie on a GPU, but at least ``least``; NaN if one is."""
    return max(float(x.max()), least) if x.size else least


def any_of(mask: Any) -> bool:
    """Tell whether a mask, which may lie on a GPU, is true somewhere; CuPy compiles its own ``any`` for 4 seconds."""
    return bool(mask.any() if isinstance(mask, np.ndarray) else mask.size and mask.view(np.uint8).max())


def median(x: Any) -> float:
    """Return the median of a vector that is not empty; on a GPU from its order, as CuPy compiles for 3 seconds."""
    if isinstance(x, np.ndarray):
        return float(np.median(x))
    ordered, half = namespace(x).sort(x), len(x) // 2
    return float(host(ordered[half - 1 + len(x) % 2 : half + 1]).mean())


def weigh(table: Any, p: int) -> tuple[Any, F64, F64]:
    """Return (p, length) float64 weights, their masses and minima; one vector serves all problems."""
    weights = np.ascontiguousarray(np.broadcast_to(np.asarray(table, dtype=np.float64), (p, table.shape[-1])))
    with np.errstate(invalid="ignore", over="ignore"):
        return weights, weights.sum(1), weights.min(1)
