"""`multimarginal`: check the arguments, solve a problem of many marginals, and warn if it did not converge."""

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from ..annotations import BackendName, MarginalPenalty, Statistic
from ..api.entry import entry
from ..ascend.carry_out import all_stages
from ..ascend.loop import Run
from ..ascend.passes import Engine
from ..ascend.stages import UNDONE, Route, Stage, climb, in_words, newton_words
from ..backends import Stats, pick
from ..errors import shown
from ..problem.sparse import is_sparse
from ..problem.validate import as_callback, as_passes
from ..route.options import make_options
from ..status import not_converged, warn_not_converged
from ..synonyms import REQUIRED, hinted
from .blocks import JointBlocks
from .problem import MultiProblem, matrices_of
from .result import MultiResult
from .tree import Tree


def costs_of(given: dict[str, Any]) -> tuple[list[Any], None]:
    """Return the costs of the arguments of `multimarginal`, for their statistic; a free marginal has no masses."""
    return matrices_of(given["costs"], given["masses"], as_backend(given["backend"], given["costs"])), None


@hinted
@entry(costs=costs_of)
def multimarginal(
    costs: Any, masses: Any, reg: float = REQUIRED, reg_m: MarginalPenalty = REQUIRED, *,
    scale_cost: Statistic | None = None, tol: float = 1e-6, tol_gap: float | None = None, max_passes: int = 10_000,
    backend: BackendName = "auto", threads: int | None = None, callback: Callable[[Stats], Any] | None = None,
    progress: bool = False,
) -> MultiResult:  # fmt: skip
    """Solve entropic unbalanced transport between many marginals at once, with a certificate.

    ``min_P <P, C> + reg KL(P | R) + sum_k reg_m[k] KL(P_k | masses[k])``

    Parameters
    ----------
    costs : dict, (n_0, n_1, ...) array, path or callable
        Either ``{(0, 1): M01, (1, 2): M12, ...}``: pairwise costs; C is their sum, and no array over all marginals is
        formed. Each is an array, a `PointCloud` or a matrix of scipy.sparse; a sparse matrix forbids the pairs that it
        does not store. The pairs form a tree (for example a chain or a star), or the triangle of three marginals. A
        triangle takes no sparse costs, since products of their kernels are full.

        Or C itself, with one axis for each marginal: an array (a memory map, or a dataset of h5py or zarr, is read slab
        by slab), the path of an .npy file, or a ``function(i0, i1)`` that returns the slabs i0 to i1,
        (i1 - i0, n_1, ...).

        +inf forbids a pair or an entry.
    masses : list of (n_k,) arrays or None
        Masses, >= 0, of any totals, on the CPU or a GPU. None leaves a marginal free: it has no penalty, and ones in R.
    reg : float
        Entropic regularisation, > 0, in units of the costs; the reference measure R is the product of the masses.
    reg_m : float, inf, or one for each marginal
        Marginal penalty, in units of the costs; inf is the balanced constraint. A free marginal ignores it.
    scale_cost : {"median", "mean", "max"}, optional
        Take reg and reg_m in units of this statistic of all finite costs; ``result.scale_cost`` is its value.
    tol : float
        Stop when the certified relative plan error ``|P - P*|_1 / mass`` is at most this.
    tol_gap : float, optional
        Stop once the objective is known to this relative accuracy: ``gap <= tol_gap * |dual|``, and hard marginals miss
        at most ``tol_gap * mass``. The plan may be less exact.
    max_passes : int
        Limit on the passes; one more is made if the guard rejects the last extrapolation.
    backend : str
        "cpu"; "cuda" stores the kernels on a GPU; "auto" uses the GPU if the costs are on a GPU.
    threads : int, optional
        Threads of passes on the CPU; NumPy's BLAS chooses its own threads for the products of a triangle. Default: the
        cores that this process may use, and one for small problems.
    callback : callable, optional
        ``callback(stats)`` is called after every pass with its `Stats`; a true return value ends the solve.
    progress : bool
        Show a progress bar on standard error.

    Returns
    -------
    MultiResult

    Raises
    ------
    InfeasibleError
        A balanced point has no finite cost, or the masses of balanced marginals differ, in total or in a part of a tree
        that finite costs connect.
    NotImplementedError
        A sparse cost with a GPU backend.

    Warns
    -----
    ConvergenceWarning
        The certified error is above tol.

    See Also
    --------
    solve : two marginals
    barycenter : the mean of histograms without its couplings

    Notes
    -----
    The solve runs in one process. A tree stores the kernel of each cost, in float32 if kernels are large and tol allows
    it. A triangle stores three kernels in float64 and two products of their size; an array stores one kernel of its
    size. Kernels of trees and arrays that do not fit into memory are computed again in each pass. On a GPU all kernels
    must fit; a pass reads them once with compute capability 9.0 or later, else twice, in float64.

    Examples
    --------
    A population grows by a tenth from one time to the next, while the plan has the same mass at all times:

    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> clouds = [rng.random((40, 2)) + [t / 4, 0] for t in range(4)]
    >>> costs = {(t, t + 1): mapuot.PointCloud(clouds[t], clouds[t + 1]) for t in range(3)}
    >>> result = mapuot.multimarginal(costs, [np.full(40, 1.1**t / 40) for t in range(4)], reg=0.02, reg_m=1.0)
    >>> result.converged, [round(float(result.marginal(t).sum()), 3) for t in (0, 3)]
    (True, [1.047, 1.047])
    >>> result.pair(0, 3).shape
    (40, 40)
    """
    xp = as_backend(backend, costs)
    options = make_options("auto", "auto", tol, tol_gap, threads)
    most = as_passes(max_passes)
    problem = MultiProblem.from_arguments(costs, masses, reg, reg_m, xp)
    problem = dataclasses.replace(problem, threads=options.threads).stored_for(options.tol, options.tol_gap)
    own = Stage(problem.reg, options.tol, options.precision, options.anderson_depth, most, UNDONE)
    route = Route(False, False, None, options, (*climb(problem, options, most // 2), own))
    engine = Engine(lambda problem, before: (Tree if problem.kind == "tree" else JointBlocks)(problem, before))
    run = Run(engine, most, as_callback(callback), progress)
    with run.shown():
        done, _ = all_stages(run, problem, route, np.zeros(1))
    if run.clusters:
        clusters = [f"corrected by {run.clusters} clusters"]
    else:
        clusters = []
    how = in_words(run.reads, len(done) - 1, *clusters, *newton_words(run.products))
    state, body = run.potentials
    result = MultiResult(problem, state and state.brought(), body, run.trace, run.outcome.status, how)
    if not result.converged and result.status != "cancelled":
        warn_not_converged(not_converged(result, tol))
    return result


def as_backend(backend: Any, costs: Any) -> Any:
    """Return NumPy, or CuPy for a GPU."""
    if isinstance(backend, str) and backend == "reference":
        raise ValueError("backend must be 'auto', 'cpu' or 'cuda' for many marginals, got 'reference'")
    chosen = pick(backend, *(costs.values() if isinstance(costs, dict) else [costs])).name
    if chosen == "cpu":
        return np
    if isinstance(costs, dict):
        stored = [pair for pair, x in costs.items() if is_sparse(x)]
    else:
        stored = []
    if stored:
        if isinstance(stored[0], tuple):
            text = ", ".join(map(str, stored[0]))
        else:
            text = shown(stored[0])
        raise NotImplementedError(f"backend {chosen!r} takes no sparse costs[{text}]: use backend='cpu'")
    arrays = import_module("..backends.cuda.arrays", __package__)
    arrays.need_device()
    return arrays.cp
