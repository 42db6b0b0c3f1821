"""`solve_batch`: many histograms with one cost, or many small problems with a cost each, every one certified.

Problems with one cost share K, and a pass reads K once for many of them. Each problem has its own translation,
certificate, guarded Anderson acceleration and end. A problem whose range exceeds the shared K is solved alone; on the
CPU the core still does so if the problem is plain (route/plain.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import outcome as outcomes
from ..annotations import BackendName, CostLike, MarginalPenalty, Method, Penalties, Precision, Reference
from ..answer import slopes
from ..answer.result import Answer, Result, numbers, primal_value, with_constant
from ..answer.slopes import Gradient
from ..arrays import host, namespace
from ..ascend.carry_out import carry_out, less_constant
from ..ascend.factored import certify_passes, factored_batch
from ..ascend.loop import Run
from ..ascend.settings import STAGES
from ..ascend.stages import FORMED, Stage, climb, in_words, ladder, turned
from ..backends import Options, Stats, pick
from ..backends.factored import START_TOL, Reached
from ..backends.newton import misses
from ..backends.workspace import FAR_LOG, ROUNDING_PART
from ..cached import cached_property
from ..contract import Backend, BatchEngine
from ..errors import MUTED, InfeasibleError, ScalingWarning, warn
from ..outcome import CONVERGED, of_status
from ..penalties import F64
from ..problem.clouds import Clouds
from ..problem.cost import as_vectors, cost_of
from ..problem.kinds import as_costs
from ..problem.mask import SeededMask
from ..problem.problem import EXPONENT_ROUNDING, FAR_APART, BatchProblem, Own
from ..problem.scale import masses_scaled, matrices_of, problems_of, scaled
from ..problem.sparse import is_list_of_pairs
from ..problem.validate import (
    as_array,
    as_choice,
    as_pair,
    as_passes,
    as_penalties,
    as_start,
    odd_scale,
    odd_unit_of,
    own_numbers,
)
from ..processor import core_count
from ..progress import bar as progress_bar
from ..route.options import METHODS, PRECISIONS, make_options, may_be_finer, one_potential, options_alone
from ..route.plain import core, in_core, is_plain
from ..status import FAILED, not_converged, warn_not_converged
from ..synonyms import REQUIRED, hinted
from ..threads import each
from .entry import entry
from .solve import UNIT_CURE, check_met

PRODUCT_SPREAD = 600.0  # largest range of exponents for a product of exponentials
PRODUCT_TOP = 600.0  # largest logarithm of its scale: float64 ends at 709
COARSE_PASSES = 200  # at most, at each larger reg


def costs_of(given: dict[str, Any]) -> list[Any]:
    """Return the costs of the arguments of `solve_batch`, for their statistic."""
    M = given["M"]
    chosen = pick(given["backend"], *(M if is_list_of_pairs(M) else [M]), given["A"], given["B"])
    return of_problems(as_costs(M, chosen), given["scale_each"])


def in_units(solve: Callable[..., "BatchResult"], given: dict[str, Any]) -> "BatchResult":
    """Solve in the units that ``scale_mass`` and ``scale_cost`` ask for: of mass, each problem in its own."""
    if given["scale_mass"] is False:
        return scaled(solve, given, costs_of(given))  # type: ignore[no-any-return]
    M: Any = given["M"]
    chosen = pick(given["backend"], *(M if is_list_of_pairs(M) else [M]), given["A"], given["B"])
    A, B, _ = as_vectors(M, given["A"], given["B"], given["reg_m"])
    shape = as_costs(M, chosen).shape
    alike = A is B and shape[0] == shape[1]
    A, B = (
        np.full(k, 1 / k) if x is None else as_array(x, name, chosen.asarray)
        for x, name, k in zip((A, B), "AB", shape, strict=True)
    )
    return masses_scaled(solve, given, A, A if alike else B)  # type: ignore[no-any-return]


def of_problems(costs: Any, each: bool) -> list[Any]:
    """Return the matrices of a batch's costs; for ``each``, the costs of each problem, or the one that all share."""
    if not each or costs.array.ndim < 3:
        return matrices_of(costs)
    return problems_of(costs)


@hinted
@entry("M", "A", "B", units=in_units)
def solve_batch(
    M: CostLike,
    A: ArrayLike | None = None,
    B: ArrayLike | None = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: str | None = None,
    scale_each: bool = False,
    scale_mass: bool = False,
    method: Method = "auto",
    penalty: Penalties = "kl",
    reference: Reference = "product",
    mask: SeededMask | None = None,
    tol: float = 1e-6,
    tol_gap: float | None = None,
    max_passes: int = 10_000,
    precision: Precision = "auto",
    backend: BackendName = "auto",
    threads: int | None = None,
    symmetric: bool | None = None,
    warm_start: Any = None,
    progress: bool = False,
) -> "BatchResult":
    """Solve p unbalanced optimal transport problems, each to its own certificate.

    Parameters
    ----------
    M : (m, n) or (p, m, n) array, matrix of scipy.sparse or cupyx.scipy.sparse, list of them, PointCloud or Grid
        One cost for all problems, or one for each; float32 or float64; +inf forbids a pair.

        - A `PointCloud` may have different points, and different numbers of points, for each problem. On the CPU each
          core solves one problem at a time; on a GPU all are solved together, one thread block each.
        - A sparse matrix serves all problems; a list of p sparse matrices must store the same pairs. CSR matrices
          with the same index arrays share them. Problems on sparse matrices or a `Grid` are solved one by one.
    A, B : (p, m) and (p, n) arrays, optional
        Masses, >= 0; one vector serves all problems. Default: equal masses that add up to 1. For clouds of several
        sizes: lists of p vectors, or one vector with the masses of all clouds in order.
    reg : float, or (p,) array
        As in `solve`, for all problems or for each. With one M, A and B it may have any length: several temperatures.
    reg_m : as in `solve`; (p,) or (p, 1) array; (p, 2) array, one column for each side; or a pair with (p, 1) arrays
        For all problems or for each. One number or pair for each of two problems is (2, 1) or (2, 2). A tuple is a pair
        of sides: in ``([1.0], [2.0])`` each side has one point.
    scale_cost, scale_each : {"median", "mean", "std", "max"}, optional; bool
        As in `solve`: the unit of reg and reg_m is taken from the costs of all problems. With ``scale_each`` each
        problem has the unit of its own costs.
    scale_mass : bool
        As in `solve`: divide the masses of each problem by the geometric mean of their totals, ``batch.scale_mass``.
    method, penalty, reference, mask, tol, tol_gap, max_passes, symmetric, progress
        As in `solve`, the same for all problems; each problem stops by itself. Method "map-uot" is not for batches. A
        reference matrix is (m, n). Masked problems are solved one by one.
    precision : {"auto", "float64", "mixed"}
        Storage of K. "auto" takes float32 only if a float64 K would not stay in cache and tol allows it. On a GPU the
        first passes are float32, except for "float64"; passes that certify are float64.
    backend : {"auto", "cpu", "cuda", "reference"}
        "auto" is "cuda" where M, A or B is on a GPU.
    threads, warm_start : int; BatchResult or (log_u, log_v) of shapes (p, m), (p, n), optional
        As in `solve`.

    Returns
    -------
    BatchResult
        If clouds have several sizes, its tables have one column for each point of the largest cloud. Smaller clouds are
        padded: log scalings with -inf, marginals with 0; ``result[i]`` has no padding. If M, A or B is a PyTorch
        tensor, all arrays are tensors.

    Raises
    ------
    InfeasibleError
        As in `solve`.

    Warns
    -----
    ConvergenceWarning, ScalingWarning
        As in `solve`, once for all problems.

    See Also
    --------
    solve : one problem
    pairwise : divergences between all pairs of many clouds
    mapuot.torch.sinkhorn_loss : losses of a batch, with gradients

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> M = np.abs(np.linspace(0, 1, 50)[:, None] - np.linspace(0, 1, 60))
    >>> batch = mapuot.solve_batch(M, rng.random((8, 50)), rng.random((8, 60)), reg=0.02, reg_m=1.0)
    >>> batch.cost.shape, bool(batch.converged.all())
    ((8,), True)
    >>> batch[3].plan.shape
    (50, 60)
    """
    as_choice(method, "method", (name for name in METHODS if name != "map-uot"))
    as_choice(precision, "precision", ("auto", "float64", "mixed"))
    source: Any = M
    chosen = pick(backend, *(source if is_list_of_pairs(M) else [M]), A, B)
    if scale_each:
        raise ValueError("scale_each needs scale_cost, the unit of each problem's costs")
    A, B, reg_m = as_vectors(M, A, B, reg_m)
    again = functools.partial(
        solve_batch, method=method, penalty=penalty, reference=reference, mask=mask, tol=tol, tol_gap=tol_gap,
        max_passes=max_passes, precision=precision, backend=backend, threads=threads, symmetric=symmetric,
        progress=progress,
    )  # fmt: skip
    is_word = isinstance(reference, str)
    moves_nothing = is_word and (reference == "product" or as_penalties(penalty) == ("kl", "kl"))
    if moves_nothing and (tables := tables_with_empty(M, A, B)) is not None:
        return with_empty(functools.partial(again, M, reg=reg, reg_m=reg_m, warm_start=warm_start), *tables)
    own, first = own_of(M, A, B, reg, reg_m, penalty)
    if own is not None and len(set(own.patterns.tolist())) > 1:
        return of_patterns(again, (M, A, B), warm_start, own, first)
    if own is not None:
        reg = float(own.reg.min())
    problem = BatchProblem.from_arrays(M, A, B, reg, first, penalty, reference, chosen, mask, own)
    options = one_potential(make_options(method, precision, tol, tol_gap, threads), problem, symmetric, chosen)
    start = starts(warm_start, problem)
    turns = turned(problem, options)
    if turns:
        task, log_v = (problem.transpose(), start[0])
    else:
        task, log_v = (problem, start[1])
    run = BatchRun(chosen, task, options, precision, as_passes(max_passes))
    with progress_bar(progress, total=len(problem), desc="mapuot", unit="problem") as bar:
        run.solve(log_v, bar)
    result = run.result(problem, turns)
    odd = odd_scale(problem.spread, problem.M_max, result.mass, *problem.masses)
    mass_a, mass_b = map(host, problem.masses)
    odd = odd or odd_unit_of(problem, mass_a, mass_b, UNIT_CURE)
    if odd and not MUTED.get():
        warn(odd, ScalingWarning)
    if not result.converged.all():
        for i in np.flatnonzero(~result.converged) if problem.forbidden or problem.c is not None else ():
            check_met(result[i], f"problem {i}: ")
        count = (~result.converged).sum()
        worst = int(np.where(result.converged, -1.0, result.error_bound).argmax())
        why = not_converged(result[worst], tol, may_be_finer(options, precision))
        warn_not_converged(f"{count} of {len(result)} problems not converged; problem {worst}, the farthest: {why}")
    return result


def own_of(M: Any, A: Any, B: Any, reg: Any, reg_m: Any, penalty: Any) -> tuple[Own | None, Any]:
    """Return reg and reg_m of each problem, None where all share them; and reg_m of the first problem."""
    pair = isinstance(reg_m, (tuple, list)) and len(reg_m) <= 2
    vectors = [reg, *([] if pair else [reg_m])]
    columns = [x for x in (reg_m if pair else ()) if np.ndim(x) == 2 or np.shape(x) == (1,)]
    if not columns and all(np.ndim(x) == 0 for x in vectors):
        return None, reg_m
    counts = [len(M)] if is_list_of_pairs(M) else []
    counts += [x.shape[0] for x, ndim in ((M, 3), (A, 2), (B, 2)) if getattr(x, "ndim", 0) == ndim]
    counts += [len(x) for x in vectors if np.ndim(x) > 0] + [len(x) for x in columns if np.ndim(x) == 2]
    found = own_numbers(reg, reg_m, counts[0] if counts else 1)
    if found is None:
        return None, reg_m
    kinds = as_penalties(penalty)
    if any(kind == "range" and rho is not None for kind, rho in zip(kinds, found[1], strict=True)):
        raise NotImplementedError("reg_m must be the same for all problems where the penalty is 'range'")
    if any(x is None for x in found[1]):
        shared = as_pair(reg_m, "reg_m")
    else:
        shared = (None, None)
    rhos = [np.full_like(rho, np.inf) if kind == "balanced" else rho for kind, rho in zip(kinds, found[1], strict=True)]
    first = tuple(x if rho is None else float(rho[0]) for x, rho in zip(shared, rhos, strict=True))
    return Own(found[0], *rhos), first


def of_patterns(again: Callable[..., Any], arrays: Any, start: Any, own: Own, reg_m: Any) -> "BatchResult":
    """Solve problems with their own reg_m by the patterns of their hard sides, and put the answers together.

    ``again``: `solve_batch` with all options; ``arrays``: M, A and B; ``reg_m``: of the sides that share one.
    """
    M, A, B = arrays
    patterns = own.patterns
    if isinstance(start, BatchResult):
        ratio = column(start.problem.regs, np) / own.reg[:, None]
        start = start.log_u * ratio, start.log_v * ratio
    at = [np.flatnonzero(patterns == k) for k in np.unique(patterns)]
    parts = [again(**part_of(M, A, B, start, own, reg_m, which)) for which in at]
    problems = [part.problem for part in parts]
    cost = as_costs(M, parts[0]._backend)
    xp = namespace(parts[0].log_u)

    def joined(owners: Any, name: str, width: int | None = None, left_out: float = 0.0) -> Any:
        values = [getattr(owner, name) for owner in owners]
        if width is None:
            order = np.argsort(np.concatenate(at))
            return np.concatenate(values)[order]
        out = xp.full((len(patterns), width), left_out)
        for which, value in zip(at, values, strict=True):
            out[xp.asarray(which), : value.shape[1]] = xp.asarray(value)
        return out

    m, n = cost.shape
    ends = ("gap", "error_bound", "dual", "mass", "n_passes", "status", "how")
    A = joined(problems, "A", m)
    B = joined(problems, "B", n)
    known = {"A": A, "B": B, "masses": (host(A.sum(1)), host(B.sum(1))), "c_mass": joined(problems, "c_mass")}
    known |= {"M_min": min(p.M_min for p in problems), "M_max": max(p.M_max for p in problems)}
    known |= {"forbidden": any(p.forbidden for p in problems), "reg": float(own.reg.min())}
    problem = dataclasses.replace(problems[0], cost=cost, each=own, **known)
    logs = joined(parts, "log_u", m, -np.inf), joined(parts, "log_v", n, -np.inf)
    marginals = joined(parts, "row_marginal", m), joined(parts, "col_marginal", n)
    told = tuple(joined(parts, name) for name in ends)
    far = [which[list(part._far)] for which, part in zip(at, parts, strict=True)]
    return BatchResult(problem, parts[0]._backend, logs, marginals, told, parts[0]._threads, np.concatenate(far))


def part_of(M: Any, A: Any, B: Any, start: Any, own: Own, reg_m: Any, which: Any) -> dict[str, Any]:
    """Return the arguments of `solve_batch` for some problems."""
    cost = M
    shape = (None, None)
    if isinstance(cost_of(M), Clouds):
        cost = M._of(cost_of(M).of(which))
        shape = cost.shape[1:]
    elif is_list_of_pairs(M):
        cost = [M[k] for k in which]
    elif np.ndim(M) == 3:
        cost = M[namespace(M).asarray(which)]
    tables = [
        x[namespace(x).asarray(which)][:, :k] if np.ndim(x) == 2 else x
        for x, k in zip((A, B, *(start or (None, None))), shape * 2, strict=True)
    ]
    mine = own.of(which)
    rhos = tuple(x if rho is None else rho[:, None] for x, rho in zip(reg_m, mine[1:], strict=True))
    known = {"M": cost, "A": tables[0], "B": tables[1], "reg": mine.reg, "reg_m": rhos}
    return known | ({"warm_start": (tables[2], tables[3])} if start else {})


def column(x: Any, xp: Any) -> Any:
    """Return one number, or (p, 1) of one for each problem, to multiply tables by."""
    if np.ndim(x):
        return xp.asarray(x)[:, None]
    return x


def scaled_by(regs: Any, table: Any) -> Any:
    """Multiply the rows of a table by one number, or each by its own."""
    return column(regs, namespace(table)) * table


def tables_with_empty(M: Any, A: Any, B: Any) -> tuple[F64, F64] | None:
    """Return the masses of all problems, (p, m) and (p, n), if a problem has a side of zeros; else None."""
    if is_list_of_pairs(M) or not all(x is None or isinstance(x, np.ndarray) for x in (A, B)):
        return None
    given = [x for x in (A, B) if x is not None]
    if not any(x.ndim in (1, 2) and x.dtype.kind in "fiub" and x.size and not x.any(-1).all() for x in given):
        return None
    shape = np.shape(M)
    p = next((len(x) for x, ndim in ((M, 3), *((x, 2) for x in given)) if np.ndim(x) == ndim), 1)
    a, b = (np.full(k, 1 / k) if x is None else x for x, k in zip((A, B), shape[-2:], strict=True))
    if a.shape[-1:] + b.shape[-1:] != shape[-2:] or any(x.ndim == 2 and len(x) != p for x in (a, b)):
        return None
    tables = tuple(np.array(np.broadcast_to(x, (p, x.shape[-1])), np.float64) for x in (a, b))
    return tables if all(np.isfinite(x).all() and (x >= 0).all() for x in tables) else None  # type: ignore[return-value]


def with_empty(solve: Callable[..., "BatchResult"], A: F64, B: F64) -> "BatchResult":
    """Solve the problems with mass on both sides; the plan of all other problems is 0.

    During the solve, equal masses take the place of the empty ones.
    """
    empty: Any = ~(A.any(1) & B.any(1))
    places = [np.where(empty[:, None], 1 / x.shape[1], x) for x in (A, B)]
    result = solve(A=places[0], B=places[1])
    problem = result.problem
    product = result.problem.unmasked == "product"
    for side, table, name in ((problem.rows, A, "A"), (problem.cols, B, "B")):
        if side.penalty == "range":
            needs = side.rho > 0
        else:
            needs = side.hard
        wrong = empty & np.any(table * needs > 0, axis=1)
        if wrong.any():
            i = int(wrong.argmax())
            raise InfeasibleError(f"problem {i}: {name}[{i}] must be transported, and the other side has no mass")
    c_mass = np.where(empty & product, 0.0, problem.c_mass)
    result.problem = dataclasses.replace(problem, A=A, B=B, masses=(A.sum(1), B.sum(1)), c_mass=c_mass)
    result.empty(empty)
    return result


def plan_sum(M: Any, A: Any, B: Any, log_u: Any, log_v: Any, reg: float, weights: Any) -> Any:
    """Return `BatchResult.plan_sum` for known potentials, with the reference a b^T."""
    chosen = pick("auto", M, A, B)
    problem = BatchProblem.from_arrays(M, A, B, reg, 1.0, "kl", "product", chosen, None)
    marginals = tuple(namespace(x).zeros_like(x) for x in (log_u, log_v))
    p = len(problem)
    ends = *np.zeros((4, p)), np.zeros(p, np.int64), np.full(p, "converged"), np.full(p, "")
    return BatchResult(problem, chosen, (log_u, log_v), marginals, ends, None).plan_sum(weights)


def starts(warm_start: Any, problem: BatchProblem) -> tuple[Any, Any]:
    """Return the initial (log u, log v) of all problems, on the device of A; (None, None) for zeros."""
    if warm_start is None:
        return None, None
    known = isinstance(warm_start, BatchResult)
    if known:
        logs = warm_start.own_logs
        scale = column(warm_start.problem.regs / problem.regs, namespace(logs[0]))
        warm_start = tuple(scale * x for x in logs)
    given = as_start(warm_start, (problem.A.shape, problem.B.shape), namespace(problem.A).asarray, "a BatchResult")
    if known:
        return given
    return less_constant(given, problem)


class BatchRun:
    """A running batch solve; answers are filled in chunk by chunk and problem by problem."""

    def __init__(self, backend: Backend, task: BatchProblem, options: Options, precision: str, max_passes: int) -> None:
        self.backend, self.task, self.options, self.precision = backend, task, options, precision
        self.max_passes, self.stopped = max_passes, False
        p = len(task)
        self.tables: Any = None  # log u, log v, r, s
        self.ends = {name: np.empty(p) for name in ("gap", "error", "dual", "mass")}
        self.n_passes = np.zeros(p, np.int64)
        self.status, self.how = outcomes.unsolved(p), np.full(p, "", dtype=object)
        self.far: Any = ()  # problems solved alone from a distant start: K has the rounding of large exponents

    def solve(self, log_v: Any, bar: Any) -> None:
        engine = self.backend.batches()
        if engine:
            if self.task.each is None:
                self.together(engine, log_v, bar)
            else:
                self.by_groups(engine, log_v, bar)
        if self.tables is None:
            self.tables = self.empty_tables()
        left = np.flatnonzero((self.status != "converged") & (self.status != "max_passes"))
        if not len(left):
            return
        if log_v is not None and not float(abs(log_v).max()) <= FAR_LOG:
            self.far = left
        if engine:  # a problem alone takes 4 ms on a GPU, at any size
            plain = np.broadcast_to(is_plain(self.task), len(self.task))[left]
            left = np.concatenate([self.plainly(left[plain], log_v, bar), left[~plain]])
        on_cpu = self.backend.name != "cuda"
        threads = (self.options.threads or core_count()) if on_cpu else 1
        of_each = max(1, threads // max(1, len(left))) if self.task.several else 1
        each(lambda i: self.alone(i, log_v, of_each), left, self.stop, threads=threads, report=bar.update)

    def stop(self) -> None:
        """Make each solve in a thread end after its current call of the core."""
        self.stopped = True

    def empty_tables(self) -> Any:
        xp = namespace(self.task.A)
        shapes = [x.shape for x in (self.task.A, self.task.B)]
        return tuple(xp.full(shape, left_out) for left_out in (-np.inf, 0.0) for shape in shapes)

    def together(self, engine: BatchEngine, log_v: Any, bar: Any) -> None:
        task = self.task
        far = task.spread > FAR_APART and EXPONENT_ROUNDING * task.spread > ROUNDING_PART * self.options.tol
        if far and task.rows.largest_soft_rho + task.cols.largest_soft_rho > 0:
            return  # distant points alone may keep the rounding above tol: each problem decides for itself
        if task.forbidden or task.c is not None or not (task.cost.operator == "tiles" or self.forms(engine)):
            return
        reach = 0.0 if log_v is None else float(abs(log_v).max())
        dtype = engine.storage(task, PRECISIONS.get(self.precision), self.options.tol, reach)
        if dtype is None:
            return
        symmetric = self.options.symmetric and engine.has_one_potential
        options = dataclasses.replace(self.options, precision=dtype, symmetric=symmetric)
        leaves = symmetric and engine.leaves_one_potential
        most = min(self.max_passes, STAGES.most_together) if symmetric and not leaves else self.max_passes
        step = max(1, engine.chunk_bytes // engine.bytes_each(task, options.memory, dtype))
        for i0 in range(0, len(task), step):
            i1 = min(i0 + step, len(task))
            start = None if log_v is None else log_v[i0:i1]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # status reports failures
                workspace = engine.workspace(task.problems(i0, i1), options, start)
                cold = start is None or not bool((start != 0).any())
                climbs = engine.climbs and cold and not options.symmetric
                stages = climb(workspace.task, options, COARSE_PASSES) if climbs else []
                left = np.zeros(i1 - i0, bool)
                follows = misses(task) and not workspace.meets and engine.factors(workspace.task)
                if follows and not options.symmetric:  # steps part log u from log v
                    self.factor(workspace, stages, i0, i1, min(most, engine.patience), bar)
                else:
                    for stage in stages:
                        workspace.climb(stage.reg, stage.options(options), stage.most)
                    if leaves:
                        workspace.iterate(min(most, STAGES.most_together))
                        left = workspace.leave()
                    self.chunk(workspace, i0, i1, most, bar)
            more = [FORMED] * bool(task.several) + ["one potential"] * bool(options.symmetric)
            reads, count = f"{dtype} tiles", f"{i1 - i0} problems together"
            self.how[i0:i1] = in_words(reads, len(stages), *more, count)
            self.how[i0:i1][left] = in_words(reads, 0, "one potential left", count)

    def by_groups(self, engine: BatchEngine, log_v: Any, bar: Any) -> None:
        """Solve problems that share reg and reg_m, in units of their own, together."""
        task = self.task
        on_cpu = self.backend.name == "cpu"
        if on_cpu and (task.several or not task.one_cost):
            return  # the core solves each of them by one thread
        self.tables, xp = self.empty_tables(), namespace(task.A)
        for which, some, factor in task.groups(self.backend, not on_cpu):
            if len(which) == 1 and on_cpu:
                continue
            run = BatchRun(self.backend, some, self.options, self.precision, self.max_passes)
            run.together(engine, None if log_v is None else log_v[xp.asarray(which)], bar)
            if run.tables is None:
                continue
            for table, values in zip(self.tables, run.tables, strict=True):
                table[xp.asarray(which), : values.shape[1]] = values
            for name, values in run.ends.items():
                self.ends[name][which] = values * (factor if name in ("gap", "dual") else 1.0)
            self.n_passes[which], self.status[which], self.how[which] = run.n_passes, run.status, run.how

    def forms(self, engine: BatchEngine) -> bool:
        """Tell whether the engine solves many clouds together; smaller clouds are padded."""
        several = self.task.several
        if several is None or not engine.forms_clouds or isinstance(several.whole.truncate, float):
            return False
        return self.task.reference == "product" or not several.ragged

    def chunk(self, workspace: Any, i0: int, i1: int, most: int, bar: Any) -> None:
        running = int((workspace.stats["status"] == 0).sum())
        if self.options.symmetric:
            passes = int(workspace.field("passes").max())
        else:
            passes = 0
        bar.update(i1 - i0 - running)
        while running and passes < most:
            now = workspace.iterate(most - passes)
            passes = int(workspace.field("passes").max())
            bar.update(running - now)
            running = now
        self.read(workspace, i0, i1)
        status = workspace.status()
        certifies = workspace.meets or not misses(self.task)  # else the problems are solved alone
        self.status[i0:i1] = outcomes.after_passes_together(status, most == self.max_passes, certifies)

    def read(self, workspace: Any, i0: int, i1: int) -> None:
        """Copy the last potentials, marginals and statistics of problems i0 to i1 into the tables."""
        part = slice(i0, i1)
        found = (*workspace.potentials(), *workspace.marginals())
        if namespace(self.task.A) is np:
            found = tuple(map(host, found))
        if i1 - i0 == len(self.task):
            self.tables = found
        else:
            self.tables = self.tables or self.empty_tables()
            for table, values in zip(self.tables, found, strict=True):
                table[part, : values.shape[1]] = values
        for name, values in self.ends.items():
            values[part] = workspace.stats[name]
        self.n_passes[part] = workspace.field("passes")

    def factor(self, workspace: Any, stages: list[Stage], i0: int, i1: int, most: int, bar: Any) -> None:
        """Solve problems i0 to i1, with hard columns, by factored Newton steps from what a few passes have reached.

        At each reg at most ``most`` passes are made, which certify nothing; a last pass does.
        """
        task, options = workspace.task, workspace.options
        starts = list[Reached]()
        rough = dataclasses.replace(options, tol=max(options.tol, START_TOL))
        for reg, own in (*((stage.reg, rough) for stage in stages), (task.reg, options)):
            left = self.max_passes - 1 - int(workspace.field("passes").max())  # the last pass certifies
            if left > 0:
                workspace.climb(reg, own, min(most, left))
                starts.insert(0, workspace.reached(reg / task.reg))
        workspace.begin_at(factored_batch(task, workspace.exponents, starts, options.tol))
        workspace.iterate(1)
        log_v, marginals = (host(x) for x in (workspace.potentials()[1], workspace.marginals()[1]))
        holds = certify_passes(task, workspace.stats, log_v, marginals, options.tol)
        holds &= np.isin(workspace.status(), ("converged", "running"))
        self.read(workspace, i0, i1)
        self.status[i0:i1][holds] = CONVERGED.status
        bar.update(int(holds.sum()))

    def plainly(self, left: Any, log_v: Any, bar: Any) -> Any:
        """Solve problems one by one in the C core, and return the problems that it left unsolved."""
        if not len(left):
            return left
        most = self.task.cost.size
        if self.task.several:  # largest first, so that one call gets problems of similar size
            sizes = self.task.several.pairs_of_each[left]
            left = left[np.argsort(-sizes, kind="stable")]
            most = int(sizes.max())
        whole = core()
        task = self.task.on_host()
        options = options_alone(self.options, self.precision, most)
        options = dataclasses.replace(options, threads=self.options.threads)
        xp = namespace(self.tables[0])
        spent = self.n_passes[left]
        starts = self.begin(left, log_v, task.B)
        for part, records, found in whole.solve_many(task, left, starts, spent, options, self.max_passes, ladder):
            stalled = (records["status"] == whole.STALLED) & (records["hard_passes"] > 0)
            done = np.isin(records["status"], (whole.CONVERGED, whole.OUT_OF_PASSES)) | stalled
            where = part[done]
            for table, values in zip(self.tables, found, strict=True):
                table[xp.asarray(where), : values.shape[1]] = xp.asarray(values[done])
            for name, values in self.ends.items():
                values[where] = records["last"][name][done]
            self.n_passes[where] = records["made"][done]
            ways = zip(records["larger"][done], records["symmetric"][done], strict=True)
            whose = " for some problems"
            more = [FORMED] * bool(task.several)
            self.how[where] = [in_core(options, int(larger), bool(one), more, whose) for larger, one in ways]
            converged = records["status"][done] == whole.CONVERGED
            self.status[where] = outcomes.after_core_calls(converged, stalled[done])
            bar.update(len(where) - int(stalled.sum()))
        return left[~np.isin(self.status[left], ("converged", "max_passes"))]

    def begin(self, which: Any, log_v: Any, B: Any) -> F64:
        """Return the initial log v of problems solved alone, one row each: from the batch if it is finite."""
        begin = np.zeros((len(which), self.task.shape[1]))
        if log_v is not None:
            begin[:] = host(log_v[which])
        tried = self.n_passes[which] > 0
        if tried.any():
            reached = host(self.tables[1][which])
            good = tried & (np.isfinite(reached) | (host(B[which]) <= 0)).all(1)
            begin[good] = reached[good]
        return begin

    def alone(self, i: int, log_v: Any, threads: int = 1) -> None:
        """Solve problem i as `solve` does, from the last log v of the batch."""
        problem = self.task.alone(i, self.backend, threads)
        spent = int(self.n_passes[i])
        begin = self.begin(np.array([i]), log_v, self.task.B)[0, : problem.shape[1]]
        log_u = np.zeros(problem.shape[0])
        if self.status[i] == "stalled":  # in one call of the core; factored steps follow
            log_u = host(self.tables[0][i])[: problem.shape[0]]
        start = problem.project(*(np.where(np.isfinite(x), x, 0.0) for x in (log_u, begin)))
        options = options_alone(self.options, self.precision, problem.cost.size)
        options = dataclasses.replace(options, symmetric=options.symmetric and spent == 0, threads=threads)
        run = Run(self.backend, max(1, self.max_passes - spent))
        run.stopped = lambda: self.stopped
        if self.status[i] == "stalled":
            run.outcome = of_status("stalled")
        result = carry_out(run, problem, options, start, escalate=self.precision == "auto")
        vectors = *result.own_logs, result.row_marginal, result.col_marginal
        for table, vector in zip(self.tables, vectors, strict=True):
            table[i, : len(vector)] = namespace(table).asarray(vector)
        end = result.gap, result.error_bound, result.dual - problem.least_lift, result.mass  # `result` adds it to all
        for values, value in zip(self.ends.values(), end, strict=True):
            values[i] = value
        self.n_passes[i], self.status[i] = spent + result.n_passes, result.status
        self.how[i] = f"{result.how}, alone"

    def result(self, problem: BatchProblem, turns: bool) -> "BatchResult":
        potentials = self.tables[:2]
        marginals = self.tables[2:]
        if turns:
            potentials = potentials[::-1]
            marginals = marginals[::-1]
        self.ends["dual"] = self.ends["dual"] + problem.least_lift
        ends = (*self.ends.values(), self.n_passes, self.status, self.how)
        return BatchResult(problem, self.backend, potentials, marginals, ends, self.options.threads, self.far)


class BatchResult(Answer, Sequence[Result]):
    """Answers of `solve_batch`: arrays with one row, or one entry, for each of p problems.

    ``batch[i]`` is the `Result` of problem i, and ``for result in batch`` goes through all of them.

    Attributes
    ----------
    log_u, log_v : (p, m), (p, n) float64 arrays
        Log scalings in POT's convention; -inf where the mass of a point is 0. They are CuPy arrays if M, A or B is on a
        GPU (with a sparse M: if A or B is).
    row_marginal, col_marginal : (p, m), (p, n) float64 arrays
        ``P 1`` and ``P^T 1``, in units of mass; on the device of log_u.
    gap, error_bound, dual, mass, n_passes, status, how : (p,) arrays
        One entry for each problem, as in `Result`.
    scale_cost : float, or (p,) array
        The unit of reg and reg_m, in units of M; 1 without ``scale_cost``.
    scale_mass : float, or (p,) array
        The divisor of each problem's masses; 1 without ``scale_mass``.

    See Also
    --------
    solve_batch : returns it
    Result : the answer of one problem

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.abs(np.linspace(0, 1, 5)[:, None] - np.linspace(0, 1, 6))
    >>> batch = mapuot.solve_batch(M, np.full((3, 5), 0.2), reg=0.1, reg_m=1.0)
    >>> len(batch), batch.row_marginal.shape, batch[0].plan.shape
    (3, (3, 5), (5, 6))
    """

    scale_cost: Any = 1.0
    scale_mass: Any = 1.0

    def __init__(
        self, problem: BatchProblem, backend: Backend, potentials: Any, marginals: Any, ends: Any,
        threads: int | None, far: Any = (),
    ) -> None:  # fmt: skip
        self.problem, self._backend, self._threads, self._far = problem, backend, threads, far
        failed = bool(np.isin(ends[-2], FAILED).any())
        if failed:
            potentials = numbers(potentials, -np.inf)
            marginals = numbers(marginals, np.inf)
        self.own_logs = potentials
        self.row_marginal, self.col_marginal = marginals
        self.gap, self.error_bound, self.dual, self.mass, self.n_passes, self.status, self.how = ends

    def empty(self, which: Any) -> None:
        """Set the plans of problems with an empty side to 0; potentials of points with mass are inf."""
        p = self.problem
        zero = (self.gap, self.error_bound, self.mass, self.n_passes)
        left = (np.where(weight > 0, np.inf, -np.inf) for weight in (p.A, p.B))
        self.own_logs = tuple(np.where(which[:, None], x, y) for x, y in zip(left, self.own_logs, strict=True))
        self.row_marginal, self.col_marginal = (
            np.where(which[:, None], 0.0, x) for x in (self.row_marginal, self.col_marginal)
        )
        for values in zero:
            values[which] = 0
        self.status[which], self.how[which] = CONVERGED.status, "a side has no mass"
        self.dual[which] = self.objective[which]

    def __repr__(self) -> str:
        m, n = self.problem.shape
        worst = self.error_bound.max()
        if worst < 1:
            told = f"error_bound <= {worst:.1e}"
        else:
            told = "of some nothing certified yet"
        return f"<mapuot.BatchResult {len(self)} problems {m}x{n}, {int(self.converged.sum())} converged, {told}>"

    def __len__(self) -> int:
        return len(self.own_logs[0])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"problem {i} of {len(self)}")
        i %= len(self)
        gap, error, dual, mass = (float(x[i]) for x in (self.gap, self.error_bound, self.dual, self.mass))
        end = Stats(int(self.n_passes[i]), gap, error, dual, mass, np.nan, False, str(self.status[i]))
        one = self.problem[i]
        m, n = one.shape
        potentials = host(self.own_logs[0][i])[:m], host(self.own_logs[1][i])[:n]
        marginals = host(self.row_marginal[i])[:m], host(self.col_marginal[i])[:n]
        result = Result(one, self._backend, potentials, marginals, [end], end.status, self._threads, self.how[i])
        for name in ("scale_cost", "scale_mass"):
            setattr(result, name, float(np.broadcast_to(getattr(self, name), (len(self),))[i]))
        if "cost" in vars(self):  # known already: no need to read M again
            vars(result)["cost"] = float(self.cost[i])
        return result

    @property
    def converged(self) -> Any:
        """Tell which problems converged, (p,) bool."""
        return self.status == "converged"

    @property
    def f(self) -> Any:
        """Dual potentials of the rows, (p, m), in units of M."""
        with np.errstate(over="ignore"):
            return with_constant(scaled_by(self.problem.regs, self.own_logs[0]), self.problem.constants[0])

    @property
    def g(self) -> Any:
        """Dual potentials of the columns, (p, n), in units of M."""
        with np.errstate(over="ignore"):
            return with_constant(scaled_by(self.problem.regs, self.own_logs[1]), self.problem.constants[1])

    def _rho(self, rows: bool) -> Any:
        """Return reg_m of one side for each problem, (p, 1); None where all share that of the side."""
        own = self.problem.each
        rho = None if own is None else own[2 - rows]
        return None if rho is None else rho[:, None]

    @cached_property
    def _closed(self) -> tuple[F64, Any, Any]:
        """Dual terms of the potentials, and the exponents of the plans without M; for CuPy arrays."""
        found: tuple[F64, Any, Any] = self._backend.dual_terms(self.problem, *self.own_logs)
        return found

    @cached_property
    def objective(self) -> F64:
        """The primal values with every mass term, (p,) (hard constraints count 0); inf for a failed problem."""
        p = self.problem
        with np.errstate(over="ignore"):
            f, g = (scaled_by(p.regs, x) for x in self.own_logs)
        sides = (p.rows, p.A, f, self.row_marginal), (p.cols, p.B, g, self.col_marginal)
        rhos = (self._rho(True), self._rho(False))
        values = primal_value(p, self.mass, [(side, *map(host, tables)) for side, *tables in sides], rhos)
        values = values + p.lift_of(self.mass, self.status == "converged")
        for i in self._far:  # exponents of 1e5 leave errors of 1e-11 in marginals: recompute from M
            values[i] = self[int(i)].objective
        return np.where(np.isin(self.status, FAILED), np.inf, values)

    @cached_property
    def cost(self) -> F64:
        """Linear transport costs ``<P, M>``, (p,), without forming a plan."""
        factors = self._factors()
        if factors is None:
            return np.array([self[i].cost for i in range(len(self))])
        U, K, V, scale = factors
        xp = namespace(K)
        MK = K * (xp.asarray(self.problem.M, dtype=np.float64) + self.problem.constant)
        U *= scale[:, None]
        shared = MK.ndim == 2
        if shared:
            return np.asarray(host(((U @ MK) * V).sum(1)))
        return np.asarray(host(xp.einsum("pi,pij,pj->p", U, MK, V, optimize=True)))

    @cached_property
    def plan(self) -> Any:
        """All plans as one array, (p, m, n), in M's dtype, formed on first use; a list of CSR arrays for a sparse M."""
        p = self.problem
        xp = namespace(self.problem.M)
        if p.cost.operator == "pairs" or p.ragged:
            return [one.plan for one in self]
        out = xp.empty((len(self), *p.shape), p.cost.dtype)
        for i in range(len(self)):
            self[i]._form_plan(out[i])
        return out

    def gradient(self) -> Gradient:
        """Derivatives of the optimal objectives of a `PointCloud` of many clouds by points and masses.

        They are ``x`` (p, m, d), ``y`` (p, n, d), ``a`` (p, m) and ``b`` (p, n), or lists of one array for each problem
        if clouds have several sizes. ``error`` has (p,) bounds, as in `Result.gradient`.
        """
        if self.problem.several is None:
            raise TypeError("gradient needs M to be a PointCloud of many clouds; that of one problem is result[i]'s")
        return slopes.gradient(self)

    def plan_sum(self, weights: ArrayLike) -> Any:
        """Return ``sum_q weights_q P_q``, (m, n) float64; with a cost for each problem, ``weights_q P_q``, (p, m, n).

        For a sparse M it is a CSR array with the same places, and with a sparse M for each problem a list of them.
        """
        if np.shape(weights) != (len(self),):
            raise ValueError(f"weights must have shape ({len(self)},), got {np.shape(weights)}")
        factors = self._factors()
        xp = namespace(self.problem.M)
        if factors is not None:
            U, K, V, scale = factors
            U *= (scale * namespace(K).asarray(weights, dtype=np.float64))[:, None]
            if K.ndim == 2:
                return K * (U.T @ V)
            return U[:, :, None] * K * V[:, None, :]
        pairs = self.problem.cost.operator == "pairs"
        each = zip(host(weights), self, strict=True)
        plans = (float(w) * (one.plan.astype(np.float64) if pairs else one.plan) for w, one in each)
        if self.problem.M.ndim == 3:
            if pairs:
                return list(plans)
            return xp.stack([*plans]).astype(np.float64)
        if pairs:
            total = next(plans)
        else:
            total = xp.zeros(self.problem.shape)
        for plan in plans:
            if pairs:  # all store their entries, zeros included, in the same places
                total.data += plan.data
            else:
                total += plan
        return total

    def _factors(self) -> tuple[Any, Any, Any, Any] | None:
        """Return (U, K, V, scale) with P_q = scale_q diag(U_q) K diag(V_q).

        None if float64 would lose digits, or could not hold a scale.
        """
        p = self.problem
        xp = namespace(self.own_logs[0])
        spread = p.spread
        if p.forbidden or p.c is not None or p.cost.operator != "tiles" or (p.each is not None and p.one_cost):
            return None
        if p.each is None:
            reg = p.regs
        else:
            reg = xp.asarray(p.regs)[:, None, None]
        tops = []
        parts = []
        for log_x, log_w in zip(self.own_logs, p.log_reference, strict=True):
            with np.errstate(invalid="ignore"):
                x = xp.where(xp.isfinite(log_x), log_x + log_w, -np.inf)
            most = x.max(1)
            tops.append(xp.where(xp.isneginf(most), 0.0, most))  # -inf if nothing moves in this problem
            parts.append(xp.exp(x - tops[-1][:, None]))
            low = xp.where(xp.isneginf(x), np.inf, x).min(1)
            spread = spread + float((tops[-1] - low).max())
        top = tops[0] + tops[1] - p.M_min / xp.asarray(p.regs)
        if not (spread < PRODUCT_SPREAD and float(top.max()) < PRODUCT_TOP):
            return None
        K = xp.exp((p.M_min - xp.asarray(p.M, dtype=np.float64)) / reg)
        return parts[0], K, parts[1], xp.exp(top)
