"""Contract of the backends: class `Backend`, the options of a solve, and the numbers of a pass.

A backend computes with its own arrays; every room above and below calls it by the methods of `Backend`. A default
belongs to a backend that does not offer the feature, so that callers ask no backend what it has.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import host
from .penalties import F64

LEAST_MASS = 1e-290  # of a plan: below it marginals lose digits to float64's underflow
SECONDS_A_CALL = 0.1  # longest call of a core: Ctrl-C and the progress bar wait for it
ANDERSON_DEPTHS = (5, 20)  # Anderson differences where their cost matters beside a pass, and where it does not
SMALL_ENTRIES = 1 << 20  # a float64 K up to this size stays in a CPU's cache


@dataclass(frozen=True)
class Options:
    """Options of a workspace."""

    translate: bool
    anderson_depth: int  # most differences of Anderson's step; 0: no extrapolation
    in_place: bool  # the paper's form: K is overwritten by the plan
    precision: str  # storage of K: "float64" or "float32"
    tol: float
    tol_gap: float  # < 0: none
    threads: int | None
    schedule: str = "auto"  # divide rows over threads evenly ("static") or by the threads' speed ("auto")
    symmetric: bool = False  # rows and columns are the same problem: passes of one potential, log u = log v
    last: bool = True  # this stage certifies what hard columns miss; rough stages at larger regs do not
    by_paths: bool = False  # passes of a batch certify what hard columns miss; else Newton's step does
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


class Backend:
    """A backend: the operations that the other packages need where passes are computed.

    Required are `name`, `asarray`, `to_numpy`, `extrema`, `is_symmetric`, `workspace` and `plan_of`. All other methods
    and attributes have defaults, for a backend that does without them.
    """

    name: str = ""  # the word by which `pick` finds it
    in_one_process = False  # one process holds all of M
    makes_costs = False  # makes the costs of points and grids itself, instead of reading a matrix
    reads_vectors_on_device = False  # passes between points read the vectors of the sides on a device
    has_one_potential = False  # has passes of one potential, log u = log v (Options.symmetric)
    ranks_share_one_potential = False  # such passes work where ranks share the rows
    skips_with_one_potential = False  # such passes can skip pairs of points
    skips_from = 0  # pairs of a cloud from which "auto" skips some; the limit of the cloud itself holds, too
    least_box = 1  # least number of points of a box, where pairs of points are skipped (backends/boxes.py)
    most_factored = 0  # points of the smaller side of problems that factored Newton steps solve (ascend/factored.py)
    few_passes = 0  # passes at each reg between hard sides before such steps; 0: as many as the size tells
    few_products = 0  # products of Newton's step before such steps; 0: as many as passes
    quick_entries = 0  # a K with up to this many entries makes `quick_passes` passes before any is timed
    quick_passes = 1
    long_rows: float = math.inf  # columns of a stored M; longer rows take more time to read than as many columns

    # ---- arrays

    def asarray(self, x: Any) -> Any:
        """Return x as an array where it lies."""
        raise self.lacks("asarray")

    def to_numpy(self, x: Any) -> Any:
        """Return x as a numpy array."""
        raise self.lacks("to_numpy")

    def to_memory(self, x: Any) -> Any:
        """Move an array to the memory where this backend computes."""
        return np.asarray(host(x))

    def free_unused(self) -> None:
        """Free memory that the backend keeps for later arrays: large ones may not fit where small ones were."""

    def extrema(self, M: Any, threads: int | None = None) -> tuple[Any, ...]:
        """Return (min, max, number of NaN or -inf, number of +inf) of a matrix.

        A GPU adds the number of differing pairs M_ij, M_ji that it saw.
        """
        raise self.lacks("extrema")

    def is_symmetric(self, M: Any) -> bool:
        """Tell whether a square matrix equals its transpose."""
        raise self.lacks("is_symmetric")

    def weigh(self, table: Any, p: int) -> tuple[Any, F64, F64]:
        """Return (p, length) float64 weights, their masses and their minima; a single vector is repeated p times."""
        return weigh(table, p)

    # ---- one solve

    def workspace(self, problem: Any, options: Options, skip: Any = None) -> Any:
        """Make the workspace of one solve: K, the potentials and the iteration (backends/workspace.py).

        ``skip``: the state of the pairs of points that it skips (`boxes.Truncation`), or None.
        """
        raise self.lacks("workspace")

    def operator_of(self, cost: Any, *parts: Any, **more: Any) -> Any:
        """Make the `Operator` (backends/operator.py) of a cost; ``parts``: reg, reference, ranks, threads."""
        raise self.lacks("operator_of")

    def plan_of(self, problem: Any, log_u: Any, log_v: Any, threads: int | None = None) -> Any:
        """Make the operator of the plan of given potentials, from M."""
        raise self.lacks("plan_of")

    def keeps_pairs(self, problem: Any) -> bool:
        """Tell whether passes over kept pairs pay."""
        return False

    def stores_kernel(self, problem: Any, options: Options) -> bool:
        """Tell whether passes between points read a stored K, though the cost matrix is not formed."""
        return False

    def to_device(self, problem: Any) -> Any:
        """Return the problem with the vectors of its sides, and its sorted points, where passes work on them."""
        return problem

    # ---- points

    def form_bytes(self, cloud: Any) -> int:
        """Return how many bytes the cost matrix of points and K may take if the caller sets no limit."""
        return 0

    def costs(self, cloud: Any, threads: int | None = None) -> Any:
        """Form the cost matrix of points."""
        raise self.lacks("costs")

    def formed(self, cloud: Any, threads: int | None = None) -> tuple[Any, Any]:
        """Form the cost matrix by the fastest way; return it and a bound on its rounding beyond the errors of `costs`.

        The bound is a number, or an object that becomes one by ``float``.
        """
        return self.costs(cloud, threads), 0.0

    def ranges_of_clouds(self, clouds: Any) -> F64:
        """Return bounds on the costs of each problem of many clouds, (2, p), without the factors of problems."""
        raise self.lacks("ranges_of_clouds")

    def tables(self, clouds: Any, plan: Any = None) -> Any:
        """Form the costs of many clouds, (p, m, n); the padding of a smaller cloud has any finite numbers.

        ``plan``: exponents of the rows (p, m) and of the columns (p, n), and regs (p,); form the plans instead.
        """
        out = np.zeros((len(clouds), *clouds.shape))
        for i in range(len(clouds)):
            one = clouds.of(i)
            out[i, : one.shape[0], : one.shape[1]] = self.costs(one, 1)
        if plan is None:
            return out
        alpha, beta, regs = plan
        out /= -regs[:, None, None]
        out += beta[:, None]
        out += alpha[:, :, None]
        return np.exp(out, out=out)

    def slopes(self, task: Any, which: Any, exponents: Any, wanted: Any, threads: int | None) -> list[Any]:
        """Return derivatives by the points of the problems ``which`` of a batch, x and y; None if not wanted."""
        raise self.lacks("slopes")

    # ---- batches and many marginals

    def batches(self) -> "BatchEngine | None":
        """Return the engine that solves the problems of a batch together; None: they are solved one by one."""
        return None

    def dual_terms(self, task: Any, log_u: Any, log_v: Any) -> tuple[F64, Any, Any]:
        """Return what the potentials of a batch add to dual values, and log u + log a and log v + log b."""
        raise self.lacks("dual_terms")

    def log_product(self, A: Any, B: Any, exact: bool, threads: int | None) -> Any:
        """Multiply (p, m, k) by (k, n) or (p, k, n) factors in the log semiring."""
        raise self.lacks("log_product")

    def tree_pass(self, edges: Any, problem: Any) -> Any:
        """Make the passes of messages along a tree of marginals (backends/cpu/marginals.py)."""
        raise self.lacks("tree_pass")

    def marginal_points(self, *sizes: Any) -> Any:
        """Make the O(n) work of the points of all marginals."""
        raise self.lacks("marginal_points")

    def remaining_marginals(self, *sizes: Any) -> Any:
        """Make the turns of all marginals but one, on a kernel that is contracted with the others."""
        raise self.lacks("remaining_marginals")

    def history(self, depth: int, ends: Any) -> Any:
        """Make the Anderson history of a state of many marginals."""
        raise self.lacks("history")

    def lacks(self, method: str) -> NotImplementedError:
        """Return the error of a method that this backend has not."""
        return NotImplementedError(f"backend {self.name!r} has no {method}")


class BatchEngine:
    """Solver of the problems of a batch together; route/batch.py calls it."""

    chunk_bytes = 1 << 26  # bytes of the arrays of one chunk of problems
    climbs = False  # has stages at larger regs
    has_one_potential = False  # has passes of one potential
    leaves_one_potential = False  # such a batch can go on by ordinary passes
    forms_clouds = False  # takes the matrices of many clouds
    patience = 0  # passes at each reg between hard sides before Newton's steps with a factor

    def storage(self, task: Any, asked: str | None, tol: float, reach: float) -> str | None:
        """Choose the storage of K; None: problems are solved alone. ``reach``: the largest |log v| of the start."""
        raise NotImplementedError

    def bytes_each(self, task: Any, depth: int, precision: str) -> int:
        """Return the bytes of memory that one problem takes."""
        raise NotImplementedError

    def factors(self, task: Any) -> bool:
        """Tell whether Newton's steps with a factor serve these problems."""
        return False

    def workspace(self, task: Any, options: Options, log_v: Any) -> Any:
        """Make the workspace of some problems, which start at ``log_v`` (None: at zeros)."""
        raise NotImplementedError
