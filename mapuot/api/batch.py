"""`solve_batch`: many histograms with one cost, or many small problems with a cost each, every one certified.

Problems with one cost share K, and a pass reads K once for many of them. Each problem has its own translation,
certificate, guarded Anderson acceleration and end. A problem with a range beyond the shared K is solved alone; on the
CPU the core still does so if the problem is plain (route/plain.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import (
    BackendName,
    CostLike,
    MarginalPenalty,
    MassStatistic,
    Method,
    Penalties,
    Precision,
    Reference,
)
from ..answer.batch import BatchResult, column, with_constants
from ..arrays import host, namespace
from ..ascend.carry_out import less_constant
from ..ascend.stages import one_potential, turned
from ..backends import pick
from ..errors import FOR_VALUE, MUTED, InfeasibleError, ScalingWarning, muted, name_of_problem, warn
from ..penalties import F64
from ..problem.clouds import Clouds
from ..problem.cost import as_vectors, cost_of
from ..problem.kinds import as_costs
from ..problem.mask import SeededMask
from ..problem.problem import BatchProblem, Own
from ..problem.scale import (
    is_weighted,
    masses_scaled,
    matrices_of,
    problems_of,
    scaled,
    scaled_by,
    scales_of,
    with_masses,
)
from ..problem.sparse import is_list_of_pairs
from ..problem.validate import (
    as_array,
    as_choice,
    as_pair,
    as_passes,
    as_penalties,
    as_start,
    check_kind,
    odd_units,
    own_numbers,
)
from ..progress import bar as progress_bar
from ..route.batch import BatchRun
from ..route.options import METHODS, make_options, nearer_options
from ..status import not_converged, warn_not_converged
from ..synonyms import REQUIRED, hinted
from .entry import entry
from .solve import check_feasible, unit_cure


def in_units(solve: Callable[..., BatchResult], given: dict[str, Any]) -> BatchResult:
    """Solve in the units that ``scale_mass`` and ``scale_cost`` ask for; each problem has its own unit of mass."""
    M: Any = given["M"]
    chosen = pick(given["backend"], *(M if is_list_of_pairs(M) else [M]), given["A"], given["B"])
    if given["scale_mass"] is False:
        costs = as_costs(M, chosen)
        if given["scale_each"] and isinstance(costs, Clouds) and costs.on_device and len(costs) > 1:
            masses = both_masses(M, costs.shape, given["A"], given["B"])
            return scaled_by(solve, given, scales_of(costs, given["scale_cost"], chosen.tables, masses))  # type: ignore[no-any-return]
        read, weights = of_problems(costs, given, given["A"], given["B"])
        return scaled(solve, given, read, masses=weights)  # type: ignore[no-any-return]
    A, B, _ = as_vectors(M, given["A"], given["B"], given["reg_m"])
    shape = as_costs(M, chosen).shape
    alike = A is B and shape[0] == shape[1]
    A, B = (
        np.full(k, 1 / k) if x is None else as_array(x, name, chosen.asarray)
        for x, name, k in zip((A, B), "AB", shape, strict=True)
    )
    return masses_scaled(solve, given, A, A if alike else B)  # type: ignore[no-any-return]


def both_masses(M: Any, shape: Any, A: Any, B: Any) -> tuple[Any, Any]:
    """Return the masses of a batch in the shapes that the solver reads, equal ones where none are given."""
    A, B, _ = as_vectors(M, A, B, None)
    A, B = (as_table(x, k, name) for x, k, name in zip((A, B), shape, "AB", strict=True))
    return A, B


def as_table(masses: Any, count: int, name: str) -> F64:
    """Return the masses of one side of a batch on the host, (p, count) or (count,), for its scale."""
    if masses is None:
        return np.full(count, 1 / count)
    table = as_array(masses, name)
    check_kind(table, name)
    if table.ndim not in (1, 2) or table.shape[-1] != count:
        raise ValueError(f"{name} must have shape (p, {count}) or ({count},), got {table.shape}")
    rows = np.atleast_2d(table.astype(np.float64))
    for wrong, text in ((~np.isfinite(rows), "finite"), (rows < 0, ">= 0")):
        if wrong.any():
            raise ValueError(f"{name} must be {text}, problem {int(wrong.any(1).argmax())} is not")
    return np.asarray(table, np.float64)


def of_problems(costs: Any, given: dict[str, Any], A: Any, B: Any) -> tuple[list[Any], Any]:
    """Return (costs, masses) for the scale of a batch; masses are None where the scale does not weigh the costs.

    The costs are matrices; with ``scale_each`` or weights, one for each problem, or one that all share.
    """
    if is_weighted(given["scale_cost"]):
        return with_masses(costs, *both_masses(given["M"], costs.shape, A, B))
    if not given["scale_each"] or costs.array.ndim < 3:
        return matrices_of(costs), None
    return problems_of(costs), None


@hinted
@entry("M", "A", "B", units=in_units)
def solve_batch(
    M: CostLike,
    A: ArrayLike | None = None,
    B: ArrayLike | None = None,
    reg: ArrayLike = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: MassStatistic | None = None,
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
) -> BatchResult:
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
    scale_cost, scale_each : {"median", "mean", "std", "max", "weighted_median", "weighted_mean"}, optional; bool
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
        return with_empty(functools.partial(again, M, reg=reg, reg_m=reg_m, warm_start=warm_start), M, *tables)
    own, first = own_of(M, A, B, reg, reg_m, penalty)
    options = make_options(method, precision, tol, tol_gap, threads)
    nearer = nearer_options(options, precision, method)
    if own is not None and len(set(own.patterns.tolist())) > 1:
        with muted():  # the parts number their own problems
            result = of_patterns(again, (M, A, B), warm_start, own, first)
        warn_of(result, tol, nearer)
        return result
    if own is not None:
        reg = float(own.reg.min())
    problem = BatchProblem.from_arrays(M, A, B, reg, first, penalty, reference, chosen, mask, own)
    options = one_potential(options, problem, symmetric, chosen)
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
    for i in np.flatnonzero(~result.converged) if problem.forbidden or problem.c is not None else ():
        check_feasible(result[i], f"{name_of_problem(int(i))}: ")
    warn_of(result, tol, nearer)
    return result


def warn_of(result: BatchResult, tol: float, nearer: str) -> None:
    """Warn of odd units, and of problems that have not converged."""
    if MUTED.get():
        return
    problem = result.problem
    mass_a, mass_b = problem.masses
    odd = odd_units(problem, result.last_pass.mass, mass_a, mass_b, unit_cure())
    if odd:
        warn(odd, ScalingWarning)
    if not result.converged.all():
        warn_of_farthest(result, tol, nearer)


def warn_of_farthest(result: BatchResult, tol: float, nearer: str) -> None:
    """Warn of the problems that have not converged; for a loss, of the problems without a known value."""
    told = ~result.converged
    if FOR_VALUE.get():
        told &= ~((result.status == "underflow") & (result.gap < np.inf))
    if told.any():
        worst = int(np.where(told, result.error_bound, -1.0).argmax())
        why = not_converged(result[worst], tol, nearer)
        text = f"{told.sum()} of {len(result)} problems not converged; {name_of_problem(worst)}, the farthest: {why}"
        warn_not_converged(text)


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
    rhos = [
        np.full_like(rho, np.inf) if kind == "balanced" and rho is not None else rho
        for kind, rho in zip(kinds, found[1], strict=True)
    ]
    first = tuple(x if rho is None else float(rho[0]) for x, rho in zip(shared, rhos, strict=True))
    return Own(found[0], *rhos), first


def of_patterns(again: Callable[..., Any], arrays: Any, start: Any, own: Own, reg_m: Any) -> BatchResult:
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
    xp = namespace(parts[0].last_pass.log_u)
    order = np.argsort(np.concatenate(at))

    def joined(values: list[Any], width: int | None = None, left_out: float = 0.0) -> Any:
        if width is None:
            return np.concatenate(values)[order]
        out = xp.full((len(patterns), width), left_out)
        for which, value in zip(at, values, strict=True):
            out[xp.asarray(which), : value.shape[1]] = xp.asarray(value)
        return out

    m, n = cost.shape
    A = joined([p.A for p in problems], m)
    B = joined([p.B for p in problems], n)
    members = {"A": A, "B": B, "masses": (host(A.sum(1)), host(B.sum(1)))}
    members |= {"c_mass": joined([p.c_mass for p in problems])}
    members |= {"M_min": min(p.M_min for p in problems), "M_max": max(p.M_max for p in problems)}
    members |= {"forbidden": any(p.forbidden for p in problems), "reg": float(own.reg.min())}
    constant = joined([np.broadcast_to(p.constant, len(p)) for p in problems])
    if constant.any():
        members |= {"cost": cost.less_each(constant), "constant": constant}
    translation = joined([np.broadcast_to(p.translation, len(p)) for p in problems])
    if translation.any():
        members |= {"translation": translation}
    problem = dataclasses.replace(problems[0], **{"cost": cost, "each": own, **members})
    last = [x.last_pass for x in parts]
    logs = joined([x.log_u for x in last], m, -np.inf), joined([x.log_v for x in last], n, -np.inf)
    marginals = joined([x.r for x in last], m), joined([x.s for x in last], n)
    numbers = (joined([getattr(x, name) for x in last]) for name in ("gap", "error", "dual", "mass"))
    told = *numbers, *(joined([getattr(x, name) for x in parts]) for name in ("n_passes", "status", "how"))
    return BatchResult(problem, parts[0]._backend, logs, marginals, told, parts[0]._threads)


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
    arguments = {"M": cost, "A": tables[0], "B": tables[1], "reg": mine.reg, "reg_m": rhos}
    return arguments | ({"warm_start": (tables[2], tables[3])} if start else {})


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


def with_empty(solve: Callable[..., BatchResult], M: Any, A: F64, B: F64) -> BatchResult:
    """Solve the problems with mass on both sides; the plan of all other problems is 0.

    During the solve, equal masses take the place of the empty ones.
    """
    empty: Any = ~(A.any(1) & B.any(1))
    cost = cost_of(M)
    inside = [np.ones_like(x) for x in (A, B)]
    if isinstance(cost, Clouds):  # tables of smaller clouds end in zeros
        inside = [np.asarray(host(cost.inside(axis)), np.float64) for axis in (0, 1)]
    places = [
        np.where(empty[:, None], own / own.sum(1, keepdims=True), x) for own, x in zip(inside, (A, B), strict=True)
    ]
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


def plan_sum(M: Any, A: Any, B: Any, log_u: Any, log_v: Any, constants: Any, reg: float, weights: Any) -> Any:
    """Return `BatchResult.plan_sum` for known `own_logs`, for M less ``constants`` (p,), with the reference a b^T."""
    chosen = pick("auto", M, A, B)
    if constants.any():
        M = M.astype(np.float64) - (constants[0] if M.ndim == 2 else constants[:, None, None])
    problem = BatchProblem.from_arrays(M, A, B, reg, 1.0, "kl", "product", chosen, None)
    marginals = tuple(namespace(x).zeros_like(x) for x in (log_u, log_v))
    p = len(problem)
    ends = *np.zeros((4, p)), np.zeros(p, np.int64), np.full(p, "converged"), np.full(p, "")
    return BatchResult(problem, chosen, (log_u, log_v), marginals, ends, None).plan_sum(weights)


def starts(warm_start: Any, problem: BatchProblem) -> tuple[Any, Any]:
    """Return the initial (log u, log v) of all problems, on the device of A; (None, None) for zeros."""
    if warm_start is None:
        return None, None
    is_result = isinstance(warm_start, BatchResult)
    if is_result:
        logs = tuple(map(with_constants, warm_start.own_logs, warm_start.problem.translations))
        scale = column(warm_start.problem.regs / problem.regs, namespace(logs[0]))
        warm_start = tuple(scale * x for x in logs)
    given = as_start(warm_start, (problem.A.shape, problem.B.shape), namespace(problem.A).asarray, "a BatchResult")
    if is_result:
        return given
    return less_constant(given, problem)
