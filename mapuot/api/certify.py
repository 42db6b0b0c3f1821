"""`certify`: bound the distance between the plan of a sparse solve and the optimal plan of the dense problem.

`knn_cost`: the costs of a `PointCloud` between near points, as a sparse matrix; SciPy's k-d trees find the neighbours.

With v of the sparse solve, one pass over the dense M gives u = prox(K v), a plan P of all pairs, its bound on |P - P*|
and a lower bound D of the optimum. The sparse plan P_S is a plan of the dense problem, too, with no mass in pairs that
are not stored. So two bounds hold, and the smaller one is returned:

    |P_S - P*| <= |P_S - P| + |P - P*|
    reg KL(P_S | P*) <= F(P_S) - F(P*) <= F(P_S) - D
    |P_S - P*| <= |P_S| (2 d / 3 + sqrt(4 d^2 / 9 + 2 d)),   d = (F(P_S) - D) / (reg |P_S|)

The second holds for soft sides, by |p - q|^2 <= (2/3 |p| + 4/3 |q|) KL(p | q).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import BackendName, CostLike, MetricName
from ..answer.result import ROUNDING, Result
from ..arrays import host
from ..ascend.carry_out import carry_out
from ..ascend.loop import Run
from ..backends import pick
from ..backends.conditional import largest
from ..backends.kernel import UNIT
from ..backends.rules import plan_error
from ..cached import cached_property
from ..contract import Backend
from ..files import opened
from ..penalties import F64
from ..problem.cost import lowered
from ..problem.kinds import as_whole_cost, formed
from ..problem.metrics import METRICS
from ..problem.points import PointCosts
from ..problem.problem import Problem
from ..problem.settings import BLOCKS
from ..problem.sparse import Sparse
from ..problem.translation import without_translation
from ..problem.validate import as_array, as_count, as_positive, as_range, as_threads
from ..processor import default_threads
from ..route.options import make_options
from ..status import describe_bound, describe_miss, warn_not_converged
from ..synonyms import AnswerHints, hinted

if TYPE_CHECKING:
    from scipy.sparse import csr_array

COORDINATES = 1 << 22  # coordinates gathered in one block of pairs
TREE_DIMENSIONS = 15  # a k-d tree prunes well up to this dimension
ALIKE = 1e-8  # squared distances with a smaller relative difference count as equal
LITTLE = 0.1  # mass of all pairs too small to be added, in units of tol
PASSES = 10_000  # of one solve
# When `certify` solves M itself, in passes over all pairs. Measured on one core (EPYC, 3000 x 2500 points, AVX2): a
# sweep takes 33 passes; a pass over stored pairs takes 2 to 4 times as long a pair as a pass over float64 or float32 K.
SWEEP_PASSES = 30
STORED_PASSES = 3
DENSE_PAIRS = 1 << 20, 1 << 27  # fewer pairs take no time; the plan of more pairs exceeds 1 GiB
BINS = 2200  # powers of 2 of float64 numbers


@dataclass(frozen=True)
class Certificate(AnswerHints):
    """Answer of `certify`.

    Attributes
    ----------
    error_bound : float
        Bound on ``|P_S - P*|_1 / mass`` for the sparse plan P_S and the optimal plan P* of the dense problem.
    objective, dual : float
        Objective of the sparse plan, and a lower bound of the dense optimum, both for the dense costs.
    missing : float
        Share of the mass that the dense plan of the same potentials has in pairs that are not stored.
    pairs : (i, j, mass)
        The missing pairs with the most mass, largest first: add these first.
    result : Result
        The answer that the bound is for: the sparse one, with ``refine`` the last one, or the answer of M itself.
    rounds, converged : int, bool
        How often pairs were added, and whether error_bound is at most tol.

    See Also
    --------
    certify : returns it

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x, y = np.arange(6.0)[:, None], np.arange(6.0)[:, None] + 0.2
    >>> result = mapuot.solve(mapuot.knn_cost(x, y, 1), reg=0.2, reg_m=9.0)
    >>> found = mapuot.certify(result, mapuot.PointCloud(x, y))
    >>> found.converged, f"{found.missing:.3f} of the mass is missing", len(found.pairs[0])
    (False, '0.040 of the mass is missing', 10)
    """

    error_bound: float
    objective: float
    dual: float
    missing: float
    pairs: tuple[Any, ...]
    result: Result
    rounds: int
    converged: bool

    def __repr__(self) -> str:
        told = describe_bound(self.error_bound, "error_bound")
        stored = self.result.problem.cost.size
        status = "" if self.converged else "not "
        missing = f"{self.missing:.2g} of the mass missing in other pairs"
        return f"<mapuot.Certificate {status}converged after {self.rounds} rounds, {told}, {stored} pairs, {missing}>"

    @property
    def gap(self) -> float:
        """How much more the sparse plan may cost than the dense optimum, in units of the objective."""
        return self.objective - self.dual


@hinted
def certify(
    result: Result, M: CostLike, *, refine: bool = False, tol: float = 1e-2, rounds: int = 10, pairs: int = 1000,
    backend: BackendName = "auto", threads: int | None = None,
) -> Certificate:  # fmt: skip
    """Bound the distance between a sparse plan and the optimal dense plan, by one pass over all costs.

    Parameters
    ----------
    result : Result
        Answer of `solve` for a sparse M and the reference "product" or "uniform".
    M : (m, n) array, PointCloud, function or path
        Costs of all pairs. An array needs memory for a float64 K, a `PointCloud` needs none.
    refine : bool
        Add the missing pairs with the most mass, and solve again, until the bound is at most tol. Each round at most
        doubles the number of stored pairs. A ConvergenceWarning tells if tol is not reached. If so many pairs matter
        that a solve of M is faster than more rounds, and its plan needs at most 1 GiB, M itself is solved:
        ``result.plan`` is then a dense array.
    tol : float
        The error_bound to reach, > 0. The dense plan has mass in all pairs; mass in pairs that are not stored counts as
        error.
    rounds, pairs : int
        Largest number of refinement rounds, and number of missing pairs to return.
    backend, threads
        For the passes over M, as in `solve`.

    Returns
    -------
    Certificate

    See Also
    --------
    knn_cost : the sparse cost of nearest neighbours

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((500, 2)), rng.random((400, 2))
    >>> result = mapuot.solve(mapuot.knn_cost(x, y, 4), reg=0.001, reg_m=1.0)
    >>> cloud = mapuot.PointCloud(x, y)
    >>> mapuot.certify(result, cloud).converged
    False
    >>> better = mapuot.certify(result, cloud, refine=True)
    >>> better.converged, better.result.plan.nnz < 40_000
    (True, True)
    """
    problem = checked(result)
    tol = as_positive(tol, "tol")
    rounds = as_count(rounds, "rounds")
    pairs = as_count(pairs, "pairs")
    threads = as_threads(threads)
    chosen = pick(backend, M)
    cost = as_whole_cost(opened(M), chosen, problem.rows.weight, problem.cols.weight)
    if cost.shape != problem.shape:
        raise ValueError(f"M must have the shape {problem.shape} of the sparse one, got {cost.shape}")
    cost = lowered(cost, problem.constant)
    low, high, forbidden = as_range(cost, problem.reg, chosen, threads=threads)
    dense = dataclasses.replace(problem, cost=cost, M_min=low, M_max=high, forbidden=forbidden)
    done = 0
    while True:
        near = one_pass(dense, chosen, result, threads)
        wanted = max(pairs, result.problem.cost.size if refine else 0)
        seen = Sweep(result, near, tol, wanted)
        bound = seen.bound()
        if bound <= tol or not refine or done == rounds or not len(seen.mass):
            order = np.argsort(-seen.mass, kind="stable")[:pairs]
            missing = seen.outside / near.mass if near.mass > 0 else math.inf
            most = (seen.i, seen.j, seen.mass)
            worst = tuple(x[order] for x in most)
            found = Certificate(bound, seen.objective, near.dual, missing, worst, result, done, bound <= tol)
            if refine and not found.converged:
                warn_not_converged(f"certify not converged: {not_certified(found, tol)}")
            return found
        done += 1
        if is_quicker_dense(result, seen.needed(tol)):
            return solved_whole(dense, chosen, near, tol, done)
        result = solved_again(result, seen, near, cost, tol)


def is_quicker_dense(result: Result, needed: int) -> bool:
    """Tell whether one dense solve reads fewer pairs than the rounds that would store ``needed`` pairs."""
    stored, pairs = result.problem.cost.size, math.prod(result.problem.shape)
    if not DENSE_PAIRS[0] <= pairs <= DENSE_PAIRS[1]:
        return False
    rounds = max(1, math.ceil(math.log2(needed / stored)))
    return result.n_passes < rounds * SWEEP_PASSES + result.n_passes * STORED_PASSES * needed / pairs


def solved_whole(dense: Problem, backend: Backend, near: Result, tol: float, done: int) -> Certificate:
    """Solve the dense problem from the potentials of a pass, and return its answer with its own bound."""
    cost = formed(dense.cost, backend, dense.ranks, near._threads)
    options = make_options("auto", "auto", 0.1 * tol, None, near._threads)
    start = dense.project(*(np.where(np.isfinite(x), x, 0.0) for x in near.own_logs))
    task = dataclasses.replace(dense, cost=cost)
    result = carry_out(Run(backend, PASSES), task, options, start, escalate=True)
    bound = result.error_bound
    none = np.zeros(0, np.int64)
    found = Certificate(
        bound, result.objective, result.dual, 0.0, (none, none, np.zeros(0)), result, done, bound <= tol
    )
    if not found.converged:
        warn_not_converged(f"certify not converged: {not_certified(found, tol)}")
    return found


def not_certified(found: Certificate, tol: float) -> str:
    """Say why the refinement did not reach tol, and name a cure."""
    if found.result.status != "converged":
        why = f"the solve of round {found.rounds} ended {found.result.status!r}; raise reg or reg_m"
    elif not len(found.pairs[0]):
        why = "no missing pair has mass that counts; raise tol or reg"
    else:
        why = f"{found.missing:.2g} of the mass is in pairs that are not stored; raise rounds, begin with more pairs"
    told = describe_miss(found.error_bound, tol)
    return f"after {found.rounds} rounds, with {found.result.problem.cost.size} pairs, {told}: {why}, or solve M itself"


def checked(result: Any) -> Problem:
    if not isinstance(result, Result) or result.problem.cost.operator != "pairs":
        raise TypeError("result must be that of a solve with a sparse M")
    if result.problem.c is not None:
        raise ValueError("reference must be 'product' or 'uniform': a matrix is known at stored pairs only")
    if result.problem.ranks.size > 1:
        raise NotImplementedError("result must be of one process: solve with comm=None what is to be certified")
    return result.problem


def one_pass(dense: Problem, backend: Backend, result: Result, threads: int | None) -> Result:
    """Make one pass of the dense problem from v of the sparse solve, with its certificate.

    Columns without a stored pair have no v yet: one more pass finds it.
    """
    options = make_options("translation_invariant", "float64", 1e-300, None, threads)
    log_v = result.own_logs[1]
    is_finite = np.isfinite(log_v)
    lonely = ~is_finite & (dense.cols.weight > 0)
    run = Run(backend, 1 + bool(lonely.any()))
    start = np.where(is_finite, log_v, np.min(log_v, where=is_finite, initial=0.0))
    translated = without_translation(dense)
    with np.errstate(all="ignore"):
        _, start = translated.to_task((np.zeros(dense.shape[0]), start), dense.translation)
        run.run(translated.task, options, start)
    potentials = translated.to_problem(run.potentials)
    return Result(translated.problem, backend, potentials, run.marginals, run.trace, "max_passes", threads, run.reads)


class Sweep:
    """Comparison of the dense and the sparse plan, block by block: their distance, and the mass of missing pairs."""

    def __init__(self, result: Result, near: Result, tol: float, most: int) -> None:
        self.result, self.near, self.most = result, near, most
        m, n = result.problem.shape
        self.i, self.j, self.mass = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        stream = near._stream
        stream.dtype = np.dtype(np.float64)
        floor = LITTLE * tol * near.mass / (m * n)
        step = max(1, BLOCKS.plan_entries // n)
        self.apart = self.outside = 0.0
        self.counts, self.masses = np.zeros(BINS), np.zeros(BINS)  # of missing pairs, by the power of 2 of their mass
        for i0 in range(0, m, step):
            block = host(stream.plan(i0, min(i0 + step, m)))
            stored = result.rows(i0, min(i0 + step, m))
            row = np.repeat(np.arange(len(block)), np.diff(stored.indptr))
            self.apart += float(np.abs(block[row, stored.indices] - stored.data).sum(dtype=np.float64))
            block[row, stored.indices] = 0.0
            self.outside += float(block.sum())
            i, j = np.nonzero(block > floor)
            mass = block[i, j]
            power = np.frexp(mass)[1] + BINS // 2
            self.counts += np.bincount(power, minlength=BINS)
            self.masses += np.bincount(power, mass, BINS)
            self.i = np.r_[self.i, i + i0]
            self.j = np.r_[self.j, j]
            self.mass = np.r_[self.mass, mass]
            if len(self.mass) > 2 * most:
                self.choose(most)

    def needed(self, tol: float) -> int:
        """Return how many pairs to store so that at most tol / 2 of the mass is missing, to a factor of 2."""
        left = self.outside - np.cumsum(self.masses[::-1])
        many = np.count_nonzero(left > 0.5 * tol * self.near.mass)
        return int(self.result.problem.cost.size + self.counts[::-1][: many + 1].sum())

    def choose(self, count: int) -> None:
        if len(self.mass) > count:
            order = np.argpartition(-self.mass, count - 1)[:count]
            self.i = self.i[order]
            self.j = self.j[order]
            self.mass = self.mass[order]

    @cached_property
    def objective(self) -> float:
        """Value the sparse plan by the dense costs, which may have more digits than the stored ones."""
        P, pairs = self.result.plan.data, self.result.problem.cost.pairs
        more = costs_of(self.near.problem.cost, pairs.row_numbers(), pairs.column) - pairs.data
        return self.result.objective + float(np.where(P > 0, more, 0.0) @ P)

    def bound(self) -> float:
        """Return the smaller of the two bounds at the head of this file."""
        result, near = self.result, self.near
        p = result.problem
        mass = float(result._sums[1].sum())
        with np.errstate(all="ignore"):
            rounding = 1e-12 * self.near.mass  # rounding of exponents in the sums of entries
            by_plans = (self.apart + self.outside + rounding + near.error_bound * near.mass) / mass
            gap = self.objective - near.dual
            gap += ROUNDING * (abs(self.objective) + p.reg * p.c_mass + p.rows.dual_scale + p.cols.dual_scale)
            by_values = plan_error(gap / p.reg / mass)
        hard = p.rows.demands or p.cols.demands
        if hard:
            found = [by_plans]
        else:
            found = [by_plans, by_values]
        return float(min((x for x in found if not math.isnan(x)), default=math.inf))


def solved_again(result: Result, seen: Sweep, near: Result, cost: Any, tol: float) -> Result:
    """Solve the sparse problem with the missing pairs of most mass added, from the potentials of the dense pass."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    problem = result.problem
    seen.choose(seen.most)
    new = sparse.coo_array((costs_of(cost, seen.i, seen.j), (seen.i, seen.j)), shape=problem.shape)
    old = problem.cost.pairs.matrix().tocoo()
    row = np.r_[old.row, new.row]
    column = np.r_[old.col, new.col]
    wide = Sparse.of_matrix(sparse.coo_array((np.r_[old.data, new.data], (row, column)), shape=problem.shape))
    low, high = (f(wide.data[np.isfinite(wide.data)]) for f in (np.min, np.max))
    wider = dataclasses.replace(problem, cost=wide, M_min=float(low), M_max=float(high))
    options = make_options("auto", "auto", 0.1 * tol, None, result._threads)
    start = wider.project(*(np.where(np.isfinite(x), x, 0.0) for x in near.own_logs))
    return carry_out(Run(pick(result._backend.name), PASSES), wider, options, start, escalate=True)


def costs_of(cost: Any, i: Any, j: Any) -> F64:
    if cost.operator == "points":
        return pair_costs(cost, cost.rows, cost.columns.T, i, j)
    data = np.empty(len(i))
    order = np.argsort(i, kind="stable")
    for i0, i1, M, _ in cost.blocks():
        here = order[slice(*np.searchsorted(i, (i0, i1), sorter=order))]
        data[here] = host(M[i[here] - i0, j[here]])
    return data


@hinted
def knn_cost(
    x: ArrayLike,
    y: ArrayLike,
    k: int | None = None,
    *,
    neighbours: Any = None,
    radius: float | None = None,
    metric: MetricName = "sqeuclidean",
    scale: float = 1.0,
    weights: ArrayLike | None = None,
    symmetric: bool = True,
    threads: int | None = None,
) -> "csr_array":
    """Make the sparse cost of near pairs of two clouds; all other pairs are forbidden.

    The pairs are each point's ``k`` nearest neighbours in the other cloud, given ``neighbours``, or all pairs within
    ``radius``: one of the three is given. A k-d tree finds near points in up to 15 dimensions. In more dimensions all
    distances are computed in blocks, Euclidean distances as matrix products by the BLAS. Points count as equally near
    if the relative difference of their squared distances is below 1e-8.

    Parameters
    ----------
    x, y, metric, scale, weights
        As in `PointCloud`.
    k : int
        Number of neighbours of a point; at most the size of the other cloud.
    neighbours : (m, k) integer array, or (m, n) sparse matrix
        Pairs that another library found: points of y for each point of x, -1 where there are fewer, as FAISS, hnswlib
        and PyNNDescent return them; or the stored pairs of a matrix, as scikit-learn's ``kneighbors_graph``. Their
        costs are computed anew.
    radius : float
        Store all pairs that cost at most this, in units of the cost; for any metric but "wfr".
    symmetric : bool
        Store the k points of x nearest to each point of y as well, so that every point has partners. False stores only
        the k points of y nearest to each point of x. For ``k`` only.
    threads : int, optional
        Default: the cores that this process may use.

    Returns
    -------
    (m, n) csr_array, float64
        Sorted, with at most k (m + n) entries for ``k``; costs of 0 are stored, too.

    Raises
    ------
    ValueError
        If not one of k, neighbours and radius is given, or it is out of range.

    See Also
    --------
    certify, solve

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((2000, 2)), rng.random((1500, 2))
    >>> S = mapuot.knn_cost(x, y, 10)
    >>> result = mapuot.solve(S, reg=0.0005, reg_m=1.0)
    >>> result.converged, result.plan.nnz == S.nnz < 35000
    (True, True)
    """
    from scipy import sparse  # noqa: PLC0415 - on first use

    cloud = PointCosts(x, y, metric, scale, weights)
    if sum(z is not None for z in (k, neighbours, radius)) != 1:
        raise ValueError("k, neighbours or radius must be given, one of the three")
    if cloud.core[0].product:
        raise ValueError(f"metric must be a distance: near points then have the least costs, got {metric!r}")
    shape = cloud.shape
    threads = as_threads(threads)
    rows = cloud.rows
    columns = np.ascontiguousarray(cloud.targets)
    if neighbours is not None:
        return stored_pairs(cloud, pattern_of(neighbours, shape))
    if radius is not None:
        found = stored_pairs(cloud, within(cloud, as_positive(radius, "radius")))
        far = np.flatnonzero(found.data > radius)  # pairs at the edge, by rounding
        return stored_pairs(cloud, without(found, far)) if len(far) else found
    k = as_count(k, "k")
    most = min(shape) if symmetric else shape[1]
    if k > most:
        raise ValueError(f"k must be at most {most}, the points of the smaller cloud, got {k}")
    if threads is None:
        workers = default_threads(k * sum(shape))
    else:
        workers = threads
    places = pattern(nearest(columns, rows, k, metric, workers), shape)
    if symmetric:
        places = sparse.csr_array(places + pattern(nearest(rows, columns, k, metric, workers), shape[::-1]).T.tocsr())
    return stored_pairs(cloud, places)


def stored_pairs(cloud: PointCosts, places: Any) -> "csr_array":
    """Return the costs of the stored pairs of a CSR pattern."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    places.sort_indices()
    row = np.repeat(np.arange(cloud.shape[0]), np.diff(places.indptr))
    data = pair_costs(cloud, cloud.rows, np.ascontiguousarray(cloud.targets), row, places.indices)
    return sparse.csr_array((data, places.indices, places.indptr), shape=cloud.shape)


def pattern_of(neighbours: Any, shape: tuple[int, int]) -> Any:
    """Return the CSR pattern of neighbours that another library found; each pair is stored once."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    m, n = shape
    if hasattr(neighbours, "tocoo"):
        pairs = host(neighbours).tocoo()
        if pairs.shape != shape:
            raise ValueError(f"neighbours must have shape {shape}, got {pairs.shape}")
        row, column = pairs.row, pairs.col
    else:
        index = as_array(neighbours, "neighbours", lambda z: np.asarray(host(z)))
        if index.ndim != 2 or len(index) != m or index.dtype.kind not in "iu":
            raise ValueError(f"neighbours must be integers ({m}, k), got {index.dtype} of shape {index.shape}")
        if index.size and not -1 <= index.min() <= index.max() < n:
            raise ValueError(
                f"neighbours must be points of y, in 0..{n - 1}, or -1, got {index.min()} to {index.max()}"
            )
        row, place = np.nonzero(index >= 0)
        column = index[row, place]
    found = sparse.csr_array((np.ones(len(row), np.int8), (row, column)), shape=shape)
    found.sum_duplicates()
    return found


def within(cloud: PointCosts, radius: float) -> Any:
    """Return the CSR pattern of the pairs that cost at most ``radius``, and of few that cost a little more."""
    from scipy import sparse  # noqa: PLC0415 - on first use
    from scipy.spatial import cKDTree  # noqa: PLC0415
    from scipy.spatial.distance import cdist  # noqa: PLC0415

    metric, scale = cloud.core
    if not metric.degree:
        raise ValueError(f"radius must be for a metric that is a power of a distance, got {cloud.metric!r}")
    reach = (radius / scale) ** (1 / metric.degree) * (1 + 1e-9)
    columns = np.ascontiguousarray(cloud.targets)
    if cloud.rows.shape[1] <= TREE_DIMENSIONS:
        found = cKDTree(columns).query_ball_point(cloud.rows, reach, p=metric.norm)
        start = np.cumsum([0, *map(len, found)])
        column = np.concatenate([np.empty(0, np.int64), *(np.asarray(z, np.int64) for z in found)])
        return sparse.csr_array((np.ones(len(column), np.int8), column, start), shape=cloud.shape)
    name, power = scipy_norm(metric.norm)
    if name == "sqeuclidean":
        reach = reach * reach
    step = max(1, BLOCKS.distances // len(columns))
    parts = [
        sparse.csr_array(cdist(cloud.rows[i : i + step], columns, name, **power) <= reach)
        for i in range(0, len(cloud.rows), step)
    ]
    return sparse.csr_array(sparse.vstack(parts)).astype(np.int8)


def without(matrix: Any, entries: Any) -> Any:
    """Return the pattern of a CSR array without some of its entries."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    row, column = (np.delete(z, entries) for z in (row, matrix.indices))
    return sparse.csr_array((np.ones(len(row), np.int8), (row, column)), shape=matrix.shape)


def scipy_norm(norm: float) -> tuple[str, dict[str, float]]:
    """Return the name of a norm's distance in SciPy's ``cdist``, squared for the Euclidean one, and its power."""
    name = {1: "cityblock", 2: "sqeuclidean", np.inf: "chebyshev"}.get(norm, "minkowski")
    return name, {"p": norm} if name == "minkowski" else {}


def nearest(points: Any, queries: Any, k: int, metric: str, workers: int) -> Any:
    """Return the k nearest points of each query, (queries, k) indices, by the norm that the metric grows with."""
    from scipy.spatial import cKDTree  # noqa: PLC0415 - on first use
    from scipy.spatial.distance import cdist  # noqa: PLC0415

    norm, (n, d) = METRICS[metric].norm, points.shape
    if d <= TREE_DIMENSIONS:
        return cKDTree(points).query(queries, k, p=norm, workers=workers)[1].reshape(len(queries), k)
    name, power = scipy_norm(norm)
    index = np.empty((len(queries), k), np.int64)
    centre = points.mean(0)
    moved = points - centre
    half = 0.5 * (moved * moved).sum(1)
    for i in range(0, len(queries), step := max(1, BLOCKS.distances // n)):
        rows = queries[i : i + step]
        unsure: Any = slice(None)
        if norm == 2:
            x = rows - centre
            product = x @ moved.T
            product -= half
            found, value = largest(product, k)
            index[i : i + step] = found
            sizes = (x * x).sum(1)
            rounding = (d + 4) * UNIT * 2 * (sizes + half.max())
            unsure = np.flatnonzero(rounding > ALIKE * (sizes - 2 * value[:, -1]))
        if len(rows[unsure]):
            index[np.arange(i, i + len(rows))[unsure]] = largest(-cdist(rows[unsure], points, name, **power), k)[0]
    return index


def pattern(index: Any, shape: tuple[int, int]) -> Any:
    """Return a CSR array with ones in the given columns of each row."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    start = np.arange(0, index.size + 1, index.shape[1])
    return sparse.csr_array((np.ones(index.size, np.int8), index.ravel(), start), shape=shape)


def pair_costs(cloud: PointCosts, rows: Any, columns: Any, i: Any, j: Any) -> F64:
    """Return the costs of the pairs (i, j) of points in the core's coordinates."""
    metric, scale = cloud.core
    out = np.empty(len(i))
    step = max(1, COORDINATES // rows.shape[1])
    for k in range(0, len(i), step):
        part = slice(k, k + step)
        out[part] = scale * metric.between(rows[i[part]], columns[j[part]])
    return out
