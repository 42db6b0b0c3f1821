"""Contract of the backends: the functions and constants that each supplies, and their arguments.

A backend is a module (or package) with

    name        the word by which `pick` finds it
    asarray(x), to_numpy(x), extrema(M, threads) -> (min, max, number of NaN or -inf, number of +inf); on a GPU also
                                        the number of differing pairs M_ij, M_ji that it saw
    is_symmetric(M) -> whether a square matrix equals its transpose
    weigh(table, p) -> ((p, length) float64 weights, their masses, their minima)
    Workspace(problem, options, skip)   one solve (workspace.py): K, the potentials, the iteration; skip: the state of
                                        the pairs of points that it skips (boxes.Truncation), or None
    operator_of(cost, reg, c, ranks, threads)   the `Operator` (operator.py) of a cost
    plan_of(problem, log_u, log_v, threads)     the operator with these potentials: their plan, made from M
    LEAST_BOX   least number of points of a box, where pairs of points are skipped (boxes.py)
    ONE_POTENTIAL   True if the backend has passes of one potential, log u = log v (Options.symmetric)
    QUICK_ENTRIES, QUICK_PASSES   a K with up to QUICK_ENTRIES entries makes QUICK_PASSES passes before any is timed

and optionally

    RANKS_TOGETHER  True if passes of one potential work where ranks share the rows
    SKIPS_TOGETHER  True if passes of one potential can skip pairs of points
    SKIPS_FROM  a cloud with "auto" skips pairs only if it has at least this many; the cloud's own limit holds, too
    quicker_turned(cost)    whether a solve of the transpose takes less time
    costs(cloud, threads)   the cost matrix of points
    formed(cloud, threads)  the cost matrix by the faster way, and a bound on the extra rounding if products made it
    form_bytes(cloud)       how many bytes the cost matrix and K may take if the caller sets no limit
    held(problem)           the problem between points with the vectors of its sides, and its sorted points, in the
                            memory where passes work on them

    MOST_FACTORED           most points of the smaller side of problems that factored.py solves
    FEW_PASSES              passes at each reg between hard sides before such steps; absent: as many as the size tells,
                            and as many products of Newton's step

and for a batch ``api/batch.py`` with storage, bytes_each, CHUNK_BYTES and batch_of.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..penalties import F64

LEAST_MASS = 1e-290  # of a plan: below it marginals lose digits to float64's underflow
SECONDS_A_CALL = 0.1  # longest call of a core: Ctrl-C and the progress bar wait for it
MEMORY = (5, 20)  # Anderson differences where their cost matters beside a pass, and where it does not
SMALL_ENTRIES = 1 << 20  # a float64 K up to this size stays in a CPU's cache


def memory_of(most: int, m: int, itemsize: int) -> int:
    """Choose the Anderson memory for a K of m rows: d differences move 16 d bytes a column, at most a tenth of K's."""
    least, deepest = MEMORY
    return min(most, max(least, min(deepest, m * itemsize // 160)))


@dataclass(frozen=True)
class Options:
    """Options of a workspace."""

    translate: bool
    memory: int  # Anderson memory, 0 = none
    in_place: bool  # the paper's form: K is overwritten by the plan
    precision: str  # storage of K: "float64" or "float32"
    tol: float
    tol_gap: float  # < 0: none
    threads: int | None
    schedule: str = "auto"  # divide rows over threads evenly ("static") or by the threads' speed ("auto")
    symmetric: bool = False  # rows and columns are the same problem: passes of one potential, log u = log v
    last: bool = True  # the last stage: at the reg asked for, where errors are certified
    leaps: bool = False  # rough Newton's steps between passes; they certify nothing

    @property
    def allowed(self) -> float:
        """Return the share of the mass that hard columns may miss while the gap is still meaningful."""
        if self.tol_gap >= 0:
            return self.tol_gap
        return max(self.tol, 0.0)

    def has_value(self, stat: "Stats") -> bool:
        """Tell whether a pass meets ``tol_gap``; its gap is inf while hard columns miss more mass than `allowed`."""
        return self.tol_gap >= 0 and stat.gap < np.inf and stat.gap <= self.tol_gap * abs(stat.dual)


@dataclass(slots=True)
class Stats:
    """Numbers of one pass: the argument of the callback, and an element of ``Result.trace``.

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


def weigh(table: Any, p: int) -> tuple[Any, F64, F64]:
    """Return (p, length) float64 weights, their masses and their minima; a single vector is repeated p times."""
    weights = np.ascontiguousarray(np.broadcast_to(np.asarray(table, dtype=np.float64), (p, table.shape[-1])))
    with np.errstate(invalid="ignore", over="ignore"):
        return weights, weights.sum(1), weights.min(1)
