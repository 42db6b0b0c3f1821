"""`solve`: check the arguments of one problem, solve it, and warn if the answer fell short."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from numpy.typing import ArrayLike

from ..annotations import (
    BackendName,
    CostLike,
    FilePath,
    MarginalPenalty,
    MassStatistic,
    Method,
    MetricName,
    Penalties,
    Precision,
    Reference,
    Schedule,
)
from ..answer.result import Result
from ..arrays import host
from ..ascend.carry_out import carry_out, start_potentials
from ..ascend.loop import Run
from ..ascend.stages import one_potential
from ..backends import Options, Stats, pick
from ..contract import Backend
from ..errors import FOR_VALUE, MUTED, ScalingWarning, shown, warn
from ..files import opened
from ..outcome import OUTCOMES
from ..problem.clouds import PointCloud
from ..problem.cut import check_cut
from ..problem.kinds import formed, own_cost
from ..problem.mask import SeededMask
from ..problem.problem import Problem
from ..problem.scale import mass_scaled, scaled
from ..problem.validate import (
    LITTLE_SHARE,
    MOST_PASSES,
    as_callback,
    as_choice,
    as_out,
    as_passes,
    as_threads,
    as_weight,
    moves_little,
    odd_share,
    odd_unit,
    odd_units,
)  # fmt: skip
from ..processor import SERIAL_ENTRIES
from ..progress import bar as progress_bar
from ..ranks import ALONE, Ranks, join
from ..route import on_device
from ..route import plain as carrier
from ..route.front import Call, PlainProblem, Start, problem_of, read
from ..route.options import METHODS, PRECISIONS, SCHEDULES, make_options, nearer_options
from ..route.plain import LazyResult
from ..status import FAILED, UNREACHED, is_told, not_converged, warn_not_converged
from ..synonyms import REQUIRED, hinted
from .entry import entry

UNIT_CURE = "pass scale_mass=True, or "  # where the call takes it: losses do not


def in_units(solve: Callable[..., Result], given: dict[str, Any]) -> Result:
    """Solve in the units that ``scale_mass`` and ``scale_cost`` ask for."""
    M = given["M"]
    a = given["a"]
    b = given["b"]
    ranks = join(given["comm"])
    with ranks.together():
        backend = pick(given["backend"], M, a, b)
        words = {name: given[name] for name in ("scale_cost", "scale_mass")}
        cost, a, b, _ = own_cost(opened(M), a, b, 1.0, "product", backend, ranks, **words)
        a = as_weight(a, cost.shape[0], "a", backend, ranks)
        b = as_weight(b, cost.shape[1], "b", backend)
        if given["scale_mass"] is False:
            return scaled(solve, given, [cost], ranks, [(a, b)])  # type: ignore[no-any-return]
        return mass_scaled(solve, given, a, b, ranks)  # type: ignore[no-any-return]


@hinted
@entry("M", "a", "b", units=in_units)
def solve(
    M: CostLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    reg: float = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    scale_cost: MassStatistic | None = None,
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
    schedule: Schedule = "auto",
    symmetric: bool | None = None,
    warm_start: Any = None,
    callback: Callable[[Stats], Any] | None = None,
    progress: bool = False,
    comm: Any = None,
    checkpoint: FilePath | None = None,
    out: Any = None,
) -> Result:
    """Solve entropic unbalanced optimal transport, with a certificate.

    ``min_P <P, M> + reg KL(P | c) + reg_m[0] D(P 1 | a) + reg_m[1] D(P^T 1 | b)``

    Parameters
    ----------
    M : (m, n) array, matrix of scipy.sparse or cupyx.scipy.sparse, PointCloud, Grid, function or path
        Costs of moving a unit of mass from each row to each column; +inf forbids a pair.

        - An array is float32 or float64, in any memory layout; other types are converted. A pandas table is read as an
          array: ``pandas.DataFrame(result.plan, M.index, M.columns)`` has its labels again.
        - A `PointCloud` computes its costs from points; a `Grid` computes the costs between the nodes of images or
          volumes.
        - A sparse matrix, in any format, stores the costs of the allowed pairs, explicit zeros included; duplicates
          add up, and all other pairs are forbidden. The plan is a CSR array with entries in the same places. A sparse
          CSR tensor of PyTorch on the CPU is read in the same way. BSR and DIA matrices, which pad with zeros, are
          refused where they hold zeros.
        - A function ``M(i0, i1)`` returns the rows i0 to i1, and a file is .npy, .npz, HDF5 or Zarr. Both are read
          block by block and are never in memory as a whole. With ``backend="cuda"`` a function may make its rows on
          the device.
    a, b : (m,), (n,) arrays, optional
        Masses, >= 0. If they are left out, None or empty, all masses are equal and add up to 1. With a `Grid` they may
        have the shape of its nodes. The unit of mass changes the answer, because KL(P | a b^T) compares a mass with a
        mass squared: a unit 1000 times smaller lowers each cost by ``reg log 1000``, and more mass moves. If both
        sides are balanced and their totals differ by rounding, 1e-6 at most, b is scaled to the total of a.
    reg, reg_m : float > 0; float, inf, or a pair of them or of per-point vectors
        Entropic regularisation, and marginal penalty of the rows and of the columns, in units of M; inf is the balanced
        constraint. With ``penalty="range"`` reg_m is the relative slack of the marginals. There is no default, because
        no number suits all units of M; 1 is a good reg_m where the median of M is 1.
    scale_cost : {"median", "mean", "std", "max", "weighted_median", "weighted_mean"}, optional
        Take reg and reg_m (but not the slack of a "range") in units of this statistic of the finite costs; its value is
        ``result.scale_cost``. M, values and potentials keep their units. In a weighted statistic the pair (i, j) counts
        a_i b_j, so that merging equal points changes nothing; in the others every pair counts once. For more
        than 2^22 costs the statistic comes from some rows, drawn with one seed; for a sparse M from the stored costs;
        over ranks from the whole M.
    scale_mass : bool
        Divide a and b by ``sqrt(sum(a) sum(b))``, so that the unit of mass does not change the answer. The plan, its
        marginals and the values are in the new unit: multiply them by the divisor, ``result.scale_mass``.
    method : {"auto", "translation_invariant", "sinkhorn", "map-uot"}
        "auto" is the translation-invariant iteration with guarded Anderson acceleration of depth 5 to 20. "sinkhorn"
        repeats POT's iterates. "map-uot" rescales one buffer in place (arXiv 2412.11079) and keeps the scalings, too.
    penalty : {"kl", "balanced", "tv", "l2", "range"} or a pair of them
        The divergence D of both sides, or one for the rows and one for the columns.
    reference : {"product", "uniform"}, (m, n) array or LowRankReference
        The measure c of the entropy: a b^T, ones, or a matrix, where zeros forbid pairs; for a sparse M it may be
        sparse. A `LowRankReference` makes it from factors or labels. The objective counts the whole mass of c,
        including the mass of forbidden pairs.
    mask : SeededMask, optional
        Keep random pairs only, and count each of them ``1 / keep`` times in the reference. The seed determines the
        pairs; nothing is stored.
    tol : float
        Stop when the certified error of the plan, ``|P - P*|_1 / mass``, is at most this.
    tol_gap : float, optional
        Stop once the objective is known to this relative accuracy: ``gap <= tol_gap * |dual|``, and hard columns
        (balanced, range) miss at most ``tol_gap * mass``. The plan may be less exact: ``error_bound`` bounds its error,
        and is inf if nothing is known.
    max_passes : int
        At most this many passes, rarely one more: if the guard rejects the last extrapolation, and for "map-uot".
    precision : {"auto", "float64", "mixed"}
        Storage of K; sums and potentials are always float64. "mixed" is a float32 K. "auto" is "mixed" for tol >= 5e-7,
        except for method "map-uot": its plan is rounded in every pass, by 2e-7 in float32. If a GPU has no room for
        K, K is stored in a coarser type, or each pass makes it block by block.
    backend : {"auto", "cpu", "cuda", "reference"}
        "auto" solves where the arrays are. "cuda" sends NumPy arrays to the GPU. "reference" is the slow oracle.
    threads : int, optional
        CPU threads. Default: the cores that this process may use, at most ``OMP_NUM_THREADS`` or the limit that
        threadpoolctl sets, and one for small problems.
    schedule : {"auto", "static"}
        How threads share the rows of K. "static" shares them evenly, and runs with the same number of threads then have
        the same bits. "auto" does so until one thread is 5 % behind the others (efficiency cores, another program).
        From then on faster threads take more rows, which changes the order of sums and so the last digits.
    symmetric : bool, optional
        Whether rows and columns are the same problem: equal masses and penalties, and a symmetric M (and a symmetric
        reference, if it is a matrix), for example a `PointCloud` without y. Method "auto" then makes passes with one
        potential, log u = log v; 2 to 12 such passes suffice at any reg. None checks M for symmetry and stops at the
        first difference. True raises an error if the problem is not symmetric. False makes ordinary passes.
    warm_start : Result or (log_u, log_v), optional
        Where to start. If the start does not help, the solver starts anew.
    callback, progress : callable, optional; bool
        ``callback(stats)`` is called after every pass with its `Stats`, and a true return value ends the solve.
        ``progress`` shows a bar on standard error.
    comm : mpi4py communicator, optional
        Solve over its ranks. Each rank gives its own rows of M, a, reg_m[0] and reference (possibly none), and all of
        b; a function or a file covers the whole matrix. The Result is distributed like M. An error on one rank is
        raised on all; ``mpiexec -n P python -m mpi4py program.py`` also ends the job if a rank fails elsewhere. Each
        rank uses one GPU: the GPU of its arrays, or else the GPU with the number of the rank on its host. Column sums
        go through NCCL (``mapuot[nccl]``), else through the host; with the environment variable MAPUOT_CUDA_MPI=1
        through a CUDA-aware MPI. If only the columns are balanced, one process solves the transposed problem; ranks and
        a streamed M keep the given order, and reach the same plan in more passes.
    checkpoint : path, optional
        Write the potentials to this file every minute; `mapuot.files.load_checkpoint` reads them.
    out : (m, n) array, optional
        Memory for the plan, in M's dtype and in C order, on the device of M (NumPy for a file). It is filled before
        `solve` returns, and is ``result.plan``. Over ranks it has the shape of the rank's block.

    Returns
    -------
    Result
        If M, a or b is a PyTorch tensor, all arrays of the Result are tensors on its device. `solve` passes on no
        gradient, and warns if a tensor requires one: `mapuot.torch.sinkhorn_loss` has the gradient. For JAX arrays the
        arrays of the Result are NumPy arrays, or CuPy arrays on a GPU: JAX would round float64 to float32 by default.

    Raises
    ------
    InfeasibleError
        No plan has the marginals that both sides allow: a balanced point has no allowed partner, the totals of two
        balanced sides differ, or the allowed partners of some balanced points have too little mass together. Unless M
        is sparse, the last of these is found only if the passes do not converge.

    Warns
    -----
    ConvergenceWarning, ScalingWarning
        ConvergenceWarning: the certified error is above tol. ScalingWarning: less than 5 % of the mass moves; or
        range(M) / reg is above 1e8, for example because finite costs stand for inf; or totals of 1 would change the
        moved share by more than 10 %.

    See Also
    --------
    solve_batch : many problems in one call
    solve_sample : the costs between two clouds of points
    path : one problem for many reg or reg_m
    tune : find reg and reg_m from the mass that should move
    multimarginal : more than two marginals
    mapuot.torch.sinkhorn_loss : the value with its gradient

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((1000, 2)), rng.random((1200, 2))
    >>> M = ((x[:, None] - y) ** 2).sum(-1)
    >>> a, b = np.full(1000, 1 / 1000), np.full(1200, 1.5 / 1200)
    >>> result = mapuot.solve(M, a, b, reg=0.01, reg_m=1.0)
    >>> result.converged, result.error_bound <= 1e-6
    (True, True)
    >>> print(f"{result.mass:.4f} moves at a cost of {result.cost:.4f}")
    1.2037 moves at a cost of 0.0122
    >>> result.plan.shape
    (1000, 1200)
    """
    call = Call(
        M, a, b, reg, reg_m, method, penalty, reference, mask, tol, tol_gap, max_passes, precision, backend, threads,
        schedule, symmetric, warm_start, callback, progress, comm, checkpoint, out,
    )  # fmt: skip
    plain = read(call)
    found = in_one_call(call, plain)
    if isinstance(found, LazyResult):
        warn_of_plain(found, call)
        return found
    return solve_by_stages(call, plain, found)


def in_one_call(call: Call, plain: PlainProblem | None) -> LazyResult | Start:
    """Solve a plain problem by one call of the core or of a GPU; else return the place where the stages begin."""
    if plain is None or not call.is_quiet:
        return Start(call.warm_start)
    if plain.is_on_device:
        return on_device.solve_on_device(call, plain)
    if plain.cost.size > SERIAL_ENTRIES:
        return Start()
    return carrier.solve_in_core(call, plain)


def solve_by_stages(call: Call, plain: PlainProblem | None, begin: Start) -> Result:
    """Make the problem, carry out its stages, and warn the user if the answer fell short."""
    ranks = ALONE if plain else join(call.comm)
    with ranks.together():
        problem = plain and problem_of(plain)
        if plain and problem:
            backend, options = plain.backend, plain.options
        else:
            backend, problem, options = check_call(call, ranks)
        options = one_potential(options, problem, call.symmetric, backend)
        out = None
        if call.out is not None:
            out = as_out(call.out, problem.shape, problem.cost.dtype, problem.cost.array)
        start = start_potentials(begin.potentials, problem)
        most = min(int(call.max_passes), MOST_PASSES)
        run = Run(backend, most, call.callback, call.progress, ranks, call.checkpoint, list(begin.trace))
        ranks.same(warm_start=start[1])
        run.outcome = OUTCOMES[begin.status]
        run.products = begin.products
        result = carry_out(run, problem, options, start, escalate=call.precision == "auto")
        if result.status in UNREACHED:
            check_feasible(result)
        odd = None
        if result.status not in FAILED and not MUTED.get():
            odd = odd_units(problem, result.trace[-1].mass, problem.rows.mass, problem.cols.mass, unit_cure())
    if odd and ranks.rank == 0:
        warn(odd, ScalingWarning)
    if out is not None:
        with ranks.together():
            result._form_plan(out)
    if result.status not in ("converged", "cancelled") and ranks.rank == 0 and is_told(result):
        warn_not_converged(not_converged(result, call.tol, nearer_options(options, call.precision, call.method)))
    return result


def check_call(call: Call, ranks: Ranks) -> tuple[Backend, Problem, Options]:
    """Check all arguments of a call, and name the wrong one; return the backend, the problem and the options."""
    check_words(call.method, call.precision, call.schedule)
    as_passes(call.max_passes)
    as_callback(call.callback)
    backend = pick(call.backend, call.M, call.a, call.b)
    alike = {"method": call.method, "penalty": call.penalty, "tol": call.tol, "tol_gap": call.tol_gap}
    alike |= {"max_passes": call.max_passes, "precision": call.precision, "reg": call.reg, "mask": repr(call.mask)}
    cost, a, b, reg_m = own_cost(opened(call.M), call.a, call.b, call.reg_m, call.reference, backend, ranks, **alike)
    check_whole(cost, call.method, call.out)
    threads = ranks.threads(as_threads(call.threads), cost.size)
    cost = formed(cost, backend, ranks, threads)
    with first_read(cost, call.progress and ranks.rank == 0) as tell:
        problem = Problem.from_cost(
            cost, a, b, call.reg, reg_m, call.penalty, call.reference, backend, ranks, threads, call.mask, tell
        )
    made = make_options(call.method, call.precision, call.tol, call.tol_gap, threads, call.schedule, made=cost.remade)
    return backend, problem, made


@hinted
@entry("x", "y", "a", "b")
def solve_sample(
    x: ArrayLike,
    y: ArrayLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    reg: float = REQUIRED,
    reg_m: MarginalPenalty = REQUIRED,
    *,
    metric: MetricName = "sqeuclidean",
    scale: float = 1.0,
    weights: ArrayLike | None = None,
    truncate: float | Literal["auto"] | None = "auto",
    form: float | Literal["auto"] | None = "auto",
    labels: ArrayLike | None = None,
    across: float | None = None,
    **options: Any,
) -> Result:
    """Solve entropic unbalanced optimal transport between two clouds of points.

    This is ``solve(PointCloud(x, y, metric, ...), a, b, reg=reg, reg_m=reg_m, ...)``.

    Parameters
    ----------
    x, y : (m, d), (n, d) arrays
        Points, one in a row.
    a, b, reg, reg_m, **options
        As in `solve`, in units of the cost ``scale * metric(x_i, y_j)``.
    metric, scale, weights, truncate, form, labels, across
        As in `PointCloud`.

    Returns
    -------
    Result
        If x, y, a or b is a PyTorch tensor, all arrays of the Result are tensors on its device.

    See Also
    --------
    solve : any cost
    PointCloud : the cost between two clouds
    pairwise : divergences between all pairs of many clouds

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> result = mapuot.solve_sample(rng.random((300, 2)), rng.random((200, 2)), reg=0.05, reg_m=1.0)
    >>> result.converged
    True
    """
    cloud = PointCloud(x, y, metric, scale, weights, truncate, form, labels=labels, across=across)
    return solve(cloud, a, b, reg=reg, reg_m=reg_m, **options)


def unit_cure() -> str:
    """Return the begin of the advice about the unit of mass."""
    if FOR_VALUE.get():
        return ""
    return UNIT_CURE


def warn_of_plain(result: LazyResult, call: Call) -> None:
    """Warn if a plain problem has not converged, or if its unit of mass changes the answer."""
    if result.status != "converged":
        check_feasible(result)
        if is_told(result):
            nearer = nearer_options(result.options, call.precision, call.method)
            warn_not_converged(not_converged(result, call.tol, nearer))
    mass, mass_a, mass_b = result.mass, *result.units[3:]
    if moves_little(mass, mass_a, mass_b, LITTLE_SHARE):
        text = odd_share(mass, mass_a, mass_b)
    else:
        text = None
    text = text or odd_unit(*result.units, cure=unit_cure())
    if text and not MUTED.get():
        warn(text, ScalingWarning)


def check_feasible(result: Result, which: str = "") -> None:
    """Raise if forbidden pairs leave no plan, once passes have failed; ``which`` names the problem of a batch."""
    check_cut(result.problem, host(result.log_u), host(result.log_v), which)


def check_words(method: Any, precision: Any, schedule: Any) -> None:
    """Raise if one of these words is unknown to `solve`."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"Unknown method {shown(method)}: must be one of {sorted(METHODS)}")
    as_choice(precision, "precision", ("auto", *PRECISIONS))
    as_choice(schedule, "schedule", SCHEDULES)


def check_whole(cost: Any, method: str, out: Any) -> None:
    """Refuse methods and outputs that need a dense K or plan if M is points or sparse."""
    if cost.remade and METHODS[method][2]:
        raise ValueError(f"method 'map-uot' overwrites K, which is never formed for {cost.kind}")
    if cost.operator != "pairs":
        return
    if METHODS[method][2]:
        raise NotImplementedError(f"method {method!r} takes no sparse M: use 'auto'")
    if out is not None:
        raise ValueError("out must be None where M is sparse: the plan is a CSR array")


@contextmanager
def first_read(cost: Any, progress: bool) -> Iterator[Callable[[int], Any] | None]:
    """Show a bar over the rows of a function or a file: the first read may take as long as the solve."""
    if not progress or cost.held:
        yield None
        return
    with progress_bar(True, total=cost.shape[0], desc="mapuot: reading M", unit="row") as bar:
        yield bar.update
