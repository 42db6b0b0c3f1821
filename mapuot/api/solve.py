"""`solve`: reads the arguments of one problem, has it solved, and warns where the answer fell short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..answer.result import Result
from ..answer.tensors import answered, tensor_among
from ..ascend.carry_out import carry_out, start_potentials
from ..ascend.loop import Run
from ..backends import Options, Stats, host, pick
from ..errors import MUTED, ScalingWarning, shown, warn
from ..problem.clouds import PointCloud
from ..problem.cut import check_cut
from ..problem.kinds import formed, own_cost
from ..problem.problem import Problem
from ..problem.scale import scaled
from ..problem.validate import as_callback, as_choice, as_count, as_out, as_threads, odd_scale
from ..progress import bar as progress_bar
from ..ranks import join
from ..route import on_device
from ..route.on_device import posed
from ..route.options import METHODS, PRECISIONS, SCHEDULES, make_options, one_potential
from ..route.plain import LazyResult, attempt
from ..status import FAILED, UNREACHED, not_converged, warn_not_converged


def solve(
    M: Any,
    a: Any = None,
    b: Any = None,
    *,
    reg: float,
    reg_m: Any,
    scale_cost: str | None = None,
    method: str = "auto",
    penalty: Any = "kl",
    reference: Any = "product",
    mask: Any = None,
    tol: float = 1e-6,
    tol_gap: float | None = None,
    max_passes: int = 10_000,
    precision: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    schedule: str = "auto",
    symmetric: bool | None = None,
    warm_start: Any = None,
    callback: Callable[[Stats], Any] | None = None,
    progress: bool = False,
    comm: Any = None,
    checkpoint: Any = None,
    out: Any = None,
) -> Result:
    """Solve entropic unbalanced optimal transport, with a certificate.

    ``min_P <P, M> + reg KL(P | c) + reg_m[0] D(P 1 | a) + reg_m[1] D(P^T 1 | b)``

    Parameters
    ----------
    M : (m, n) array, matrix of scipy.sparse or cupyx.scipy.sparse, PointCloud, Grid, function or path
        Costs; float32 or float64 in any memory layout (others are converted); +inf forbids a pair. A function
        ``M(i0, i1)`` of rows or a file (.npy, .npz, HDF5, Zarr) is read block by block and never held; with
        ``backend="cuda"`` a function may make its rows on the device, where they stay.
        Of a :class:`mapuot.PointCloud` each pass makes the costs, or the matrix is formed where that is quicker and
        small (its ``form``); that of images and volumes, a :class:`mapuot.Grid`, never is.
        Of a matrix of scipy.sparse (any format; duplicates add up) the stored entries are costs, explicit zeros, too
        (in BSR and DIA format, which pad with zeros, these are refused); all other pairs are forbidden and never
        visited, and the plan is a CSR array with its entries in the same places, of cupyx.scipy.sparse where M is.
        Points that no pair connects are parts of their own, each with its own translation. A sparse CSR tensor of
        PyTorch on the CPU is read as such a matrix.
    a, b : (m,), (n,) arrays, optional
        Masses, >= 0; left out, None or empty: equal masses of sum 1. With a `Grid` also of the shape of its nodes.
    reg : float
        Entropic regularisation, > 0, in units of M.
    reg_m : float, inf, or a pair of them or of per-point vectors
        Marginal penalty, in units of M; inf is the balanced constraint. ``penalty="range"``: the relative slack.
        It has no default, since no number fits all units of M: 1 is a good one where M has a median of 1.
    scale_cost : {"median", "mean", "max"}, optional
        Take reg and reg_m (but of a "range") in units of this finite cost, ``result.scale_cost``. M stays as it is, and
        so do the units of values and potentials. Of more than 2^22 costs it is that of some rows, drawn with one seed;
        of a sparse M that of the stored ones; over ranks that of the whole M.
    method : {"auto", "translation_invariant", "sinkhorn", "map-uot"}
        "auto" is the translation-invariant iteration with guarded Anderson acceleration (memory 5 to 20), "sinkhorn"
        makes POT's iterates, "map-uot" rescales one buffer in place (arXiv 2412.11079) and carries the scalings.
    penalty : {"kl", "balanced", "tv", "l2", "range"} or a pair of them
    reference : {"product", "uniform"} or (m, n) array
        c: a b^T, ones, or the given matrix (zeros forbid pairs), of a sparse M also a sparse one. The objective counts
        the mass of all of c, that of forbidden pairs, too.
    mask : SeededMask, optional
        Keep random pairs only, ``1 / keep`` times the reference each: the problem is that of this reference measure,
        which is made from the seed wherever it is needed and never stored.
    tol : float
        Stop when the certified relative plan error ``|P - P*|_1 / mass`` is at most this, whatever the penalties.
    tol_gap : float, optional
        Stop also when ``gap <= tol_gap * |dual|`` and hard columns (balanced, range) miss at most ``tol_gap * mass``.
        The value is certified then; ``error_bound`` says what is known of the plan, and is inf where nothing is.
    max_passes : int
        Reads of K at most (and one more where the last was an extrapolation that the guard dropped, or in place).
    precision : {"auto", "float64", "mixed"}
        Storage of K. Sums and potentials are float64 always; "auto" is "mixed" (float32 K) for tol >= 5e-7, but
        "float64" for method "map-uot", whose plan is rounded in every pass: in float32 the bound grows by 2e-7 each.
        A K that a GPU has no room for is stored in a coarser one, and made anew in every pass, some rows at once, where
        that certifies too little or does not fit either.
    backend : {"auto", "cpu", "cuda", "reference"}
    threads : int, optional
        CPU threads; default: the cores this process may use, one for small problems.
    schedule : {"auto", "static"}
        How threads share the rows of K: "static" is evenly, which gives the same bits whenever the number of threads is
        the same; "auto" the same until one is 5 % behind the others (efficiency cores, another program), then by their
        speed in the passes before, which changes the order of sums, and so the last digits, from one run to the next.
    symmetric : bool, optional
        Whether rows and columns are the same problem: equal masses and penalties, and M (and a reference that is a
        matrix) symmetric, of a `PointCloud` without y, say. Method "auto" then passes with one potential, log u =
        log v, which takes some 2 to 12 passes at any reg. None finds out, by one look that ends at the first
        difference, and over ranks of a `PointCloud` whose rows lie in order in y; True raises where they are not,
        False makes ordinary passes.
    warm_start : Result or (log_u, log_v), optional
        Where to start; left after one pass where reg is small and that pass certifies nothing.
    callback : callable, optional
        ``callback(stats)`` after every pass; a true return value stops the solve.
    progress : bool
        Show a progress bar on standard error.
    comm : mpi4py communicator, optional
        Solve over its ranks, each with its own rows of M, a, reg_m[0] and reference (none, too); b whole on all. A
        function or file M is that of the whole matrix; the Result is distributed as M is. What fails here on one rank
        raises on all; of programs that start as ``mpiexec -n P python -m mpi4py program.py`` what fails elsewhere ends
        the job, too. On GPUs each rank has one, that of its arrays or, by its number on the host, of those it sees; the
        column sums go through NCCL (``mapuot[nccl]``), else through the host; environment MAPUOT_CUDA_MPI=1: through a
        CUDA-aware MPI. A problem with balanced columns only, which one process solves transposed, is solved as given
        over ranks and from a streamed M: the same plan, in more passes.
    checkpoint : path, optional
        Write the potentials to this file every minute (see :func:`mapuot.files.load_checkpoint`).
    out : (m, n) array, optional
        Memory for the plan, in M's dtype and C order, where M lies (a file's: numpy); it is filled before `solve`
        returns and is ``result.plan``. Over ranks that of the own block.

    Returns
    -------
    Result
        Where M, a or b is a PyTorch tensor, tensors are read where they lie, those that require grad as data (with a
        warning: `mapuot.torch.sinkhorn_loss` has the gradient), and all arrays of the Result are tensors there.

    Raises
    ------
    InfeasibleError
        A balanced point cannot be reached; no plan has marginals that both sides, balanced or ranges, allow; or pairs
        that M or the reference forbids leave such points with partners of less mass only. Of an M that is not sparse
        the last of these is found after the passes, where they have not converged.

    Warns
    -----
    ConvergenceWarning
        The certified error reached is above tol.
    ScalingWarning
        Less than 1e-4 of the mass moves, or range(M) / reg is above 1e8: finite costs that stand for inf.

    Examples
    --------
    A thousand points onto 1200 others that weigh half as much again; what is far stays where it is:

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

    Balanced rows, soft columns, and a pair that is forbidden:

    >>> M[0, 0] = np.inf
    >>> result = mapuot.solve(M, a, b, reg=0.01, reg_m=(np.inf, 1.0))
    >>> float(result.plan[0, 0]), bool(np.allclose(result.row_marginal, a))
    (0.0, True)
    """
    if (like := tensor_among(M, a, b)) is not None:
        given = locals()
        return answered(solve, given.pop("like"), given)  # type: ignore[no-any-return]
    if scale_cost is not None:
        given, ranks = locals(), join(comm)
        with ranks.together():
            cost = own_cost(M, a, b, 1.0, "product", pick(backend, M, a, b), ranks, scale_cost=scale_cost)[0]
            return scaled(solve, given, [cost], ranks)  # type: ignore[no-any-return]
    words = method, penalty, reference, tol, tol_gap, max_passes, precision, backend, threads
    free = warm_start is mask is callback is comm is checkpoint is symmetric is None and not progress
    free = free and isinstance(schedule, str) and schedule in SCHEDULES
    plain: LazyResult | None = attempt(M, a, b, reg, reg_m, words, out) if free else None
    known = posed(M, a, b, reg, reg_m, words) if free and plain is None and out is None else None
    plain = on_device.attempt(known, max_passes) if known else plain
    if plain is not None:
        if not plain.converged:
            check_met(plain)
            warn_not_converged(not_converged(plain, tol, may_be_finer(plain.options, precision)))
        return plain
    ranks = join(comm)
    with ranks.together():
        if known and (found := on_device.plain_problem(known)) is not None:
            module, problem, options = known.backend, found, known.options
        else:
            check_words(method, precision, schedule)
            callback = as_callback(callback)
            module = pick(backend, M, a, b)
            alike = {"method": method, "penalty": penalty, "tol": tol, "tol_gap": tol_gap, "max_passes": max_passes}
            alike |= {"precision": precision, "reg": reg, "mask": repr(mask)}
            cost, a, b, reg_m = own_cost(M, a, b, reg_m, reference, module, ranks, **alike)
            check_whole(cost, method, out)
            threads = ranks.threads(as_threads(threads), cost.size)
            cost = formed(cost, module, ranks, threads)
            with first_read(cost, progress and ranks.rank == 0) as tell:
                problem = Problem.from_cost(
                    cost, a, b, reg, reg_m, penalty, reference, module, ranks, threads, mask, tell
                )
            out = out if out is None else as_out(out, cost.shape, cost.dtype, cost.array)
            options = make_options(method, precision, tol, tol_gap, threads, schedule, made=cost.remade)
        options = one_potential(options, problem, symmetric, module)
        start = start_potentials(warm_start, problem)
        ranks.same(warm_start=start[1])
        run = Run(module, as_count(max_passes, "max_passes"), callback, progress, ranks, checkpoint)
        result = carry_out(run, problem, options, start, escalate=precision == "auto")
        check_met(result)
        odd = odd_scale(problem.spread, problem.M_max, run.trace[-1].mass, problem.rows.mass, problem.cols.mass)
    if odd and ranks.rank == 0 and not MUTED.get() and result.status not in FAILED:
        warn(odd, ScalingWarning)
    if out is not None:
        with ranks.together():
            result._form_plan(out)
    if not result.converged and result.status != "cancelled" and ranks.rank == 0:
        warn_not_converged(not_converged(result, tol, may_be_finer(options, precision)))
    return result


def solve_sample(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    reg: float,
    reg_m: Any,
    metric: str = "sqeuclidean",
    scale: float = 1.0,
    weights: Any = None,
    truncate: Any = "auto",
    form: Any = "auto",
    labels: Any = None,
    across: Any = None,
    **options: Any,
) -> Result:
    """Solve entropic unbalanced optimal transport between two clouds of points.

    Points, ``metric``, ``scale``, ``weights``, ``truncate``, ``form``, ``labels`` and ``across`` are those of a
    :class:`PointCloud`, whose cost is ``scale * metric(x_i, y_j)``; masses, ``reg`` and ``reg_m``, in units of the
    cost, and all options are those of :func:`solve`.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> result = mapuot.solve_sample(rng.random((300, 2)), rng.random((200, 2)), reg=0.05, reg_m=1.0)
    >>> result.converged
    True

    Points of two kinds, which it costs 0.2 to exchange:

    >>> x, y, kinds = rng.random((300, 2)), rng.random((200, 2)), np.arange(300) % 2
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0, labels=(kinds, kinds[:200]), across=0.2)
    >>> shares = result.push(kinds)[1]
    >>> print(f"{shares[kinds[:200] == 0, 0].mean():.2f} of what comes to kind 0 is of kind 0")
    0.97 of what comes to kind 0 is of kind 0
    """
    cloud = PointCloud(x, y, metric, scale, weights, truncate, form, labels=labels, across=across)
    return solve(cloud, a, b, reg=reg, reg_m=reg_m, **options)


def check_met(result: Result, which: str = "") -> None:
    """Raise where passes met no certificate since forbidden pairs leave no plan; ``which`` one of a batch it is."""
    if result.status in UNREACHED:
        check_cut(result.problem, host(result.log_u), host(result.log_v), which)


def check_words(method: Any, precision: Any, schedule: Any) -> None:
    """Raise where one of these is no word of `solve`."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"Unknown method {shown(method)}: must be one of {sorted(METHODS)}")
    as_choice(precision, "precision", ("auto", *PRECISIONS))
    as_choice(schedule, "schedule", SCHEDULES)


def check_whole(cost: Any, method: str, out: Any) -> None:
    """Refuse what needs a K or a plan of all pairs where M is points or sparse."""
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
    """Show a bar over the rows of a function or a file, whose first read may take as long as the solve."""
    if not progress or cost.held:
        yield None
        return
    with progress_bar(True, total=cost.shape[0], desc="mapuot: reading M", unit="row") as bar:
        yield bar.update


def may_be_finer(options: Options, precision: str) -> bool:
    """Tell whether a warning should name float64; "auto" has tried it already."""
    return precision not in ("auto", "float64") and options.precision != "float64"
