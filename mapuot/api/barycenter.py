"""Entropic barycenters of histograms on common points: unbalanced or balanced, debiased or not, many at once.

ascend/barycenters.py has the passes; this file has the problem, its products with K = exp(-M / reg) and the answer.
Sources: Chizat, Peyre, Schmitzer, Vialard 2018 (scaling algorithms); Janati, Cuturi, Gramfort 2020 (debiased,
balanced: d <- sqrt(d (q / K d)^fi), the scaling of OT(q, q), takes the blur of width sqrt(reg) from q; the unbalanced d
follows from q's optimality, sum_s w_s v_s^(-reg / reg_m) = d^(-reg / reg_m)). All scalings are logarithms. For a sparse
M, K has entries at stored pairs only; scalings are 0 at points without mass, and at points that no pair reaches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike, Statistic
from ..answer.tensors import taken
from ..arrays import host
from ..ascend.barycenters import Barycenter, DebiasedBarycenter, fits_one_call
from ..ascend.loop import Run
from ..ascend.passes import Engine
from ..backends import Options, Stats, load, pick
from ..contract import Backend
from ..errors import InfeasibleError, shown
from ..outcome import after_few_passes
from ..penalties import F64
from ..problem import validate
from ..problem.cost import cost_of
from ..problem.kinds import as_cost, as_costs, as_whole_cost, stores_pairs
from ..problem.scale import matrices_of
from ..problem.symmetry import as_symmetric
from ..route.options import make_options
from ..status import FAILED, LEAST_UNIT, MASSES_TOO_SMALL, describe_bound, describe_miss, warn_not_converged
from ..synonyms import REQUIRED, AnswerHints, hinted
from .entry import entry

FIRST = 1000  # passes of one call
MOST = 10_000  # passes, unless the caller gives a number
# Passes sharpen the finest detail of a debiased q last, ever more slowly: more than 1,000 passes seldom help.
MOST_DEBIASED = 1000


@dataclass(frozen=True)
class BarycenterResult(AnswerHints):
    """Answer of `barycenter`: one barycenter q, or r of them for r vectors of weights.

    For images (H, W), every n below stands for H, W.

    Attributes
    ----------
    q : (n,) or (r, n) float64 array
        The barycenters, in units of mass.
    log_u, log_v : (p, n) or (r, p, n) float64 arrays
        Log scalings of the plan between each histogram (rows) and q (columns).
    error_bound : float
        Certified bound on ``|q - q*|_1 / |q|_1``, and without debiasing on the mean error of the plans. With debiasing
        the value hardly depends on the finest detail of q. The bound is inf unless q is balanced and K = exp(-M / reg)
        is well conditioned: reg is at most about the squared distance of neighbours.
    gap : float
        Certified bound on the value less the optimum, in units of the objective. inf if it is not known: for debiased
        barycenters if K is not positive definite, if they are balanced over a sparse M, or if a sparse M has more than
        4096 points.
    change : float
        Relative change of q in the last pass, in L1. Debiased, it is at least the share of the mass by which the row
        sums miss the histograms.
    status : str
        "converged", "max_passes", "stalled", "cancelled", "underflow" (the plans' mass, times reg where reg is below 1,
        is less than 1e-290) or "not finite".
    n_passes, reg, scale_cost, how, shape
        Number of passes, the reg and its unit, the data that passes read, and the shape of a histogram.

    See Also
    --------
    barycenter : returns it

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> t = np.linspace(0, 1, 21)
    >>> A = np.exp(-((t - np.array([[0.3], [0.7]])) ** 2) / 0.01)
    >>> found = mapuot.barycenter((t[:, None] - t) ** 2, A, reg=0.01, reg_m=1.0)
    >>> found.q.shape, found.log_u.shape, found.error_bound <= 1e-6
    ((21,), (2, 21), True)
    """

    q: F64  # P_s = diag(u_s) exp(-M / reg) diag(v_s), rows A_s, columns q
    log_u: F64
    log_v: F64
    reg: float
    n_passes: int
    change: float  # the largest of several barycenters
    gap: float
    error_bound: float  # of sum_s w_s |P_s - P_s*|_1 / |q|_1, and so of |q - q*|_1 / |q|_1
    status: str
    how: str  # "dense K", "pairs" or "products"
    shape: tuple[int, ...]  # (n,), or (H, W) of an image
    scale_cost: float = 1.0
    _there: ClassVar[dict[str, Any]] = {}  # numbers that lie on a device: none

    @property
    def converged(self) -> bool:
        """Whether tol, or tol_gap, was reached."""
        return self.status == "converged"

    @property
    def potentials(self) -> tuple[F64, F64]:
        """Potentials (f, g) of each histogram with q, ``reg * log_u`` and ``reg * log_v``, in units of M."""
        return self.reg * self.log_u, self.reg * self.log_v

    def __repr__(self) -> str:
        axes = len(self.shape)
        p = self.log_u.shape[-1 - axes]
        n = math.prod(self.shape)
        if self.q.ndim > axes:
            several = f"{len(self.q)} barycenters"
        else:
            several = "barycenter"
        if self.converged:
            state = "converged"
        else:
            state = "not converged"
        mass = self.q.sum(tuple(range(-axes, 0)))
        if mass.ndim == 0:
            masses = f"mass {mass:.6g}"
        else:
            masses = f"masses {mass.min():.6g} to {mass.max():.6g}"
        bound = describe_bound(self.error_bound)
        if self.error_bound == np.inf > self.gap:
            bound = f"gap {self.gap:.1e}"
        ended = f"{state} after {self.n_passes} passes, {bound}, last change {self.change:.1e}"
        return f"<mapuot.BarycenterResult {several} of {p} histograms on {n} points, {ended}, {masses}>"


def costs_of(given: dict[str, Any]) -> tuple[list[Any], None]:
    """Return the costs of the arguments of `barycenter`, for their statistic; its columns have no given masses."""
    return matrices_of(as_costs(given["M"], pick("auto", given["M"]))), None


@hinted
@entry("M", "A", "weights", costs=costs_of)
def barycenter(
    M: CostLike,
    A: ArrayLike,
    reg: float = REQUIRED,
    reg_m: float = np.inf,
    *,
    scale_cost: Statistic | None = None,
    weights: ArrayLike | None = None,
    debiased: bool = False,
    tol: float = 1e-6,
    tol_change: float = 1e-6,
    max_passes: int | None = None,
    warm_start: BarycenterResult | None = None,
    callback: Callable[[Stats], Any] | None = None,
    progress: bool = False,
) -> BarycenterResult:
    """Find the barycenter of p histograms: the q with the least weighted transport cost to all of them.

    Parameters
    ----------
    M : (n, n) array, a matrix of scipy.sparse, or a Grid
        Costs, finite. A sparse matrix stores the costs of the allowed pairs. A `Grid` forms no matrix; images of a
        million nodes take a few seconds. A debiased barycenter needs a symmetric M. Its value has a bound only if
        exp(-M / reg) is positive definite, for example for squared distances. If a dense M lies on a GPU, or images on
        a Grid do, that GPU makes the products of large problems; the answer is NumPy's.
    A : (p, n) array, or p images (p, H, W) of the shape of the Grid
        Histograms in rows, >= 0, zeros allowed.
    reg : float
        Entropic regularisation, > 0, in units of M (reference measure: ones).
    reg_m : float or inf
        Marginal penalty, in units of M, on both sides of every plan. inf is the balanced barycenter, for histograms of
        equal masses; if they differ, each is scaled to their geometric mean, the mass of q.
    weights : (p,) or (r, p) array, optional
        Weights of the histograms, >= 0, scaled to sum 1; r vectors give r barycenters at once. Default: equal weights.
    debiased : bool
        Subtract OT(q, q) / 2, which sharpens q. With one histogram, q is that histogram.
    tol : float
        Stop when ``error_bound`` is at most this, without debiasing.
    tol_change : float
        With debiasing, stop when the relative change of every q in a pass is at most this, in L1, and the plans miss at
        most this share of the histograms' mass. This is no bound on the error; ``gap`` bounds the value, and
        ``error_bound`` bounds q where it is known.
    max_passes : int, optional
        At most this many passes. Default: 10,000, or 1,000 with debiasing.
    warm_start : BarycenterResult, optional
        Start from the potentials of this answer, which must have as many histograms and points; its reg may differ.
    scale_cost, callback, progress
        As in `solve`. In the `Stats` of a pass the dual value lacks a constant, and gap and error are inf if the pass
        was not certified. With debiasing the residual is the change of q. If balanced, the error of a pass is the share
        of the histograms' mass that its plans miss; a step of Newton's method certifies ``error_bound`` at the end.

    Returns
    -------
    BarycenterResult
        If M, A or the weights are PyTorch tensors, its arrays are tensors.

    Raises
    ------
    InfeasibleError
        A balanced barycenter over a sparse M does not exist: a point with mass reaches no point that all histograms
        reach, or the histograms have different shares of their mass in a part that no pair connects with the rest.

    Warns
    -----
    ConvergenceWarning
        tol, or tol_change, was not reached.

    See Also
    --------
    multimarginal, mapuot.pot.barycenter_unbalanced

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> t = np.linspace(0, 1, 101)
    >>> A = np.exp(-((t - np.array([[0.2], [0.6]])) ** 2) / 0.002)
    >>> A /= A.sum(1, keepdims=True)
    >>> found = mapuot.barycenter((t[:, None] - t) ** 2, A, reg=1e-3, debiased=True)
    >>> found.converged, round(float(t[found.q.argmax()]), 2)
    (True, 0.4)
    """
    histograms = as_histograms(A, M)
    few = MOST_DEBIASED if debiased else MOST
    max_passes = validate.as_passes(few if max_passes is None else max_passes)
    tol = validate.as_positive(tol, "tol")
    tol_change = validate.as_positive(tol_change, "tol_change")
    images = histograms.shape[1:]
    if images == getattr(cost_of(M), "nodes", (None,))[0]:
        histograms = histograms.reshape(len(histograms), -1)
    if histograms.ndim != 2 or 0 in histograms.shape:
        raise ValueError(f"A must be a non-empty (p, n) array, got shape {histograms.shape}")
    table = as_weights(weights, len(histograms))
    engine = engine_for(M, A, histograms.size)
    histograms, cost, reg, rho = checked(histograms, M, reg, reg_m, engine)
    if debiased and not cost.symmetric(engine):
        if cost.operator == "pairs":
            raise ValueError("M must be symmetric, to the last bit, for a debiased barycenter: take (M + M.T) / 2")
        cost = as_cost(engine.asarray(as_symmetric(host(cost.array), "M", " for a debiased barycenter")), engine)
    operator = engine.operator_of(cost, reg)
    options = make_options("auto", "float64", tol, None, None)
    found = []
    callback = validate.as_callback(callback)
    weightings = np.atleast_2d(table / table.sum(-1, keepdims=True))
    for w, start in zip(weightings, starts_of(warm_start, histograms, reg, len(weightings)), strict=True):
        if rho == np.inf:
            levelled = of_equal_masses(cost, histograms, w)
        else:
            levelled = histograms
        body = (
            DebiasedBarycenter(levelled, operator, rho, w, tol_change)
            if debiased
            else Barycenter(levelled, operator, rho, w)
        )
        found.append(Run(Engine(lambda body, before: body), max_passes, callback, progress))
        with found[-1].shown():
            make_passes(found[-1], body, options, start)
        if found[-1].outcome.status == "cancelled":
            break
    worst = max(
        found, key=lambda run: (run.outcome.status != "converged", run.trace[-1].error, run.potentials[1].change)
    )
    if worst.outcome.status not in ("converged", "cancelled"):
        n_passes = max(run.n_passes for run in found)
        why = why_not(worst, tol)
        warn_not_converged(f"barycenter not converged ({worst.outcome.status}) after {n_passes} passes: {why}")
    are_several = weights is not None and np.ndim(weights) == 2
    return together(found, worst.outcome.status, images, are_several)


def make_passes(run: Run, body: Barycenter, options: Options, log_v: F64) -> None:
    """Make the passes of one barycenter; the first ones in one call, where nobody asks about each of them."""
    if not run.callback and not run.bar and body.certifies:
        log_v, last = body.few_passes(log_v, options, min(run.max_passes, FIRST))
        if last:
            run.trace.append(last)
            run.n_passes = last.n_pass
            run.potentials = body.accepted, body
            run.outcome = after_few_passes(last, last.error <= options.tol, run.is_spent)
    if run.outcome.status == "running":
        run.run(body, options, log_v.ravel())


def as_histograms(A: Any, M: Any) -> Any:
    """Read histograms or images; if their shape does not fit, name the right shape."""
    if isinstance(A, (list, tuple)) and all(hasattr(x, "shape") for x in A):
        shapes = sorted({tuple(x.shape) for x in A})
        if len(shapes) > 1:
            told = " and ".join(map(str, shapes[:2]))
            raise ValueError(f"A must hold histograms of the same length, each on the n points of M, got shapes {told}")
    A = validate.as_array(A, "A")
    nodes = getattr(cost_of(M), "nodes", (None,))[0]
    if nodes is not None and A.shape[1:] not in (nodes, (math.prod(nodes),)):
        wanted = ", ".join(map(str, nodes))
        cure = {nodes: ": pass A[None]", (*nodes, *A.shape[-1:]): ": pass np.moveaxis(A, -1, 0)"}.get(A.shape, "")
        raise ValueError(f"A must be images (p, {wanted}) on the Grid, their number first, got shape {A.shape}{cure}")
    return A


def starts_of(warm_start: Any, A: F64, reg: float, count: int) -> F64:
    """Return the initial log v of each weighting: zeros, or log v of another answer, rescaled to this reg."""
    if warm_start is None:
        return np.zeros((count, A.size))
    warm_start = taken(warm_start, "warm_start")
    if not isinstance(warm_start, BarycenterResult):
        raise TypeError(f"warm_start must be a BarycenterResult, got {shown(warm_start)}")
    log_v = warm_start.log_v * (warm_start.reg / reg)
    if log_v.size not in (A.size, count * A.size):
        raise ValueError(f"warm_start must be of {len(A)} histograms on {A.shape[1]} points, got {warm_start}")
    log_v = np.where(np.isfinite(log_v), log_v, 0.0).reshape(-1, A.size)
    return np.broadcast_to(log_v, (count, A.size))


def why_not(run: Run, tol: float) -> str:
    plans, body = run.potentials
    if run.outcome.status in FAILED:
        masses = (body.A.sum(1) * min(1.0, body.reg))[body.weights > 0]
        if masses.min() < LEAST_UNIT:
            return f"{MASSES_TOO_SMALL}: multiply A by a large number"
        return "the plans, or their scalings, leave float64: raise reg or reg_m, bring the masses of A nearer 1"
    if body.certifies:
        few = ""
        if body.hard and body.reads == "pairs" and plans and plans.is_complete:
            with np.errstate(all="ignore"):
                missed = body.apart(plans.log_u, plans.log_kv)[2] / plans.mass
            few = f", plans miss {missed:.1e} of the mass, where M may connect too few points" * (missed > tol)
        cure = "rounding allows no better: raise tol" * (run.outcome.status == "stalled" and not few)
        return f"{describe_miss(run.trace[-1].error, tol)}{few}; {cure or 'raise max_passes, reg or tol'}"
    gap = run.trace[-1].gap
    changed = f"last change {body.change:.2e} > tol_change {body.tol_change:.2e}"
    value = f"; the value is at most {gap:.1e} above the optimum" * math.isfinite(gap)
    return f"{changed}{value}; raise max_passes, reg or tol_change"


def together(found: list[Run], status: str, nodes: tuple[int, ...], several: bool) -> BarycenterResult:
    """Join barycenters in the shape of the histograms; error, gap, change and passes are the largest."""
    bodies = [run.potentials[1] for run in found]
    last = [run.trace[-1] for run in found]
    plans = [run.potentials[0] or run.potentials[1].last for run in found]
    q, log_u, log_v = (np.stack([getattr(x, k) for x in plans]) for k in ("q", "log_u", "log_v"))
    q, log_u, log_v = (x.reshape(*x.shape[:-1], *nodes) for x in (q, log_u, log_v))
    if not several:
        q = q[0]
        log_u = log_u[0]
        log_v = log_v[0]
    change = max(x.change for x in bodies)
    gap = max(x.gap for x in last)
    error = max(x.error for x in last)
    n_passes = max(x.n_pass for x in last)
    reg = bodies[0].reg
    how = bodies[0].reads
    return BarycenterResult(q, log_u, log_v, reg, n_passes, change, gap, error, status, how, nodes)


def of_equal_masses(M: Any, A: F64, weights: F64) -> F64:
    """Return the histograms, each scaled to the geometric mean of their masses, in each part of a sparse M."""
    if M.operator == "pairs":
        nobody = np.zeros(len(M), bool)
        parts = M.parts_between(nobody, nobody)
        label = parts.rows
        count = parts.count + 1
    else:
        label = np.zeros(A.shape[1], int)
        count = 1
    held = np.stack([np.bincount(label, a, count) for a in A])
    used = weights > 0
    check_shares(held / A.sum(1, keepdims=True), used, label)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.exp(weights[used] @ np.log(held[used]))
        return np.asarray(A * np.where((held > 0) & (wanted > 0), wanted / held, 1.0)[:, label])


def check_shares(shares: F64, used: Any, label: Any) -> None:
    """Raise if balanced histograms have different shares (p, parts) of their mass in a part of M."""
    some = shares[used]
    wrong = np.ptp(some, axis=0) > validate.MASS_TOLERANCE
    if wrong.any():
        k = int(wrong.argmax())
        s, t = np.flatnonzero(used)[[some[:, k].argmax(), some[:, k].argmin()]]
        points = validate.name_points(f"A[{s}]", label == k)
        held = f"{shares[s, k]:.6g} of A[{s}], but {shares[t, k]:.6g} of A[{t}]"
        raise InfeasibleError(f"M connects {points} with no other points, and there is {held}")


def engine_for(M: Any, A: Any, count: int) -> Backend:
    """Return the backend of the products: a GPU for a large dense M that lies there, or a large Grid if A does.

    ``count``: numbers in A. One call of the C core makes the first passes of a small problem (`Barycenter.few_passes`).
    """
    cost = cost_of(M)
    if stores_pairs(cost) or not (hasattr(cost, "nodes") or hasattr(cost, "dtype")):
        return load("cpu")
    if fits_one_call(count, cost.shape[-1]):
        return load("cpu")
    return pick("auto", cost, A)


def checked(A: Any, M: Any, reg: Any, reg_m: Any, engine: Backend) -> tuple[Any, Any, float, float]:
    """Return (A, M, reg, reg_m): p histograms, a finite square cost and two numbers, all checked."""
    M = cost_of(M)
    if not hasattr(M, "nodes"):
        if stores_pairs(M):
            M = as_cost(host(M), engine)
        elif engine.name == "cpu":
            M = as_whole_cost(host(M), pick("reference"))
        else:
            M = as_cost(M, engine)
    if A.shape[1] != M.shape[0] or M.shape[0] != M.shape[1]:
        raise ValueError(f"A must be (p, n) and M (n, n), got {A.shape} and {M.shape}")
    A = validate.as_numbers(A, "A", "finite and >= 0", A.shape, least=0.0)
    empty = np.flatnonzero(A.sum(1) == 0)
    if len(empty):
        raise ValueError(f"A must have positive mass in each histogram, got none in A[{empty[0]}]")
    if not M.size:
        raise ValueError("M must store a pair, got a sparse matrix with none")
    if any(M.finite_range(engine)[2:4]):
        i, j = M.first(lambda costs: ~np.isfinite(costs))
        raise ValueError(f"M must be finite, got NaN or inf at [{i}, {j}]: a sparse M forbids the pairs it lacks")
    return A, M, validate.as_positive(reg, "reg"), validate.as_rho(reg_m, "reg_m")


def as_weights(value: Any, count: int) -> F64:
    """Return the weights, (count,) or (r, count); None stands for equal weights of sum 1."""
    if value is None:
        weights = np.full(count, 1.0 / count)
    else:
        weights = validate.as_array(value, "weights")
    wanted = f"({count},) or (r, {count}), finite, >= 0 and not all zero"
    shapes = ((count,), (*weights.shape[:1], count))
    if not validate.as_numbers(weights, "weights", wanted, *shapes, least=0.0).any(-1).all() or not weights.size:
        raise ValueError(f"weights must be {wanted}, got {shown(value)}")
    return np.asarray(weights, np.float64)
