"""`gromov`: a plan between two spaces that share no coordinates, entropic, unbalanced or balanced, fused or not.

spaces/steps.py has the steps, spaces/task.py the formulas, spaces/answer.py the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import MarginalPenalty, MassStatistic
from ..arrays import host
from ..backends import pick
from ..errors import shown
from ..problem import validate
from ..problem.scale import scale_of
from ..problem.validate import as_positive
from ..spaces.answer import GromovResult
from ..spaces.bound import bounded, check_bound_applies
from ..spaces.distances import prepare, spaces_of
from ..spaces.starts import best_answer
from ..spaces.steps import FirstPlan, Limits
from ..spaces.task import Task, as_features
from ..spaces.true import assess, task_of
from ..status import Words, not_converged, warn_not_converged
from ..synonyms import hinted_onward
from .solve import solve
from .tune import Search, tuned

OPTIONS = "threads", "backend", "precision", "max_passes"  # options of `solve` that a user may give


@hinted_onward(solve)
def gromov(
    X: ArrayLike,
    Y: ArrayLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    *,
    reg: float | None = None,
    reg_m: MarginalPenalty | None = None,
    mass: float | None = None,
    sharpness: float | None = None,
    scale_cost: MassStatistic | None = None,
    reg_mode: str = "joint",
    metric: Any = "sqeuclidean",
    power: float = 1.0,
    landmarks: int = 48,
    features: ArrayLike | None = None,
    alpha: float = 0.5,
    init: Any = "auto",
    max_iter: int = 100,
    tol: float = 1e-4,
    inner_tol: float = 1e-6,
    bound_tol: float | None = None,
    **options: Any,
) -> GromovResult:
    """Solve entropic Gromov-Wasserstein between two spaces, unbalanced, semi-relaxed or balanced, fused with features.

    The objective of a plan P, with X and Y the distances within the spaces and KL of products of measures, is

    ``alpha sum (X_ik - Y_jl)^2 P_ij P_kl + (1 - alpha) <F, P> + reg KL(P x P | ab x ab)
    + reg_m[0] KL(P1 x P1 | a x a) + reg_m[1] KL(P^T 1 x P^T 1 | b x b)``.

    It is not convex. Steps from each start descend to a local optimum; the best of several starts is kept.

    Parameters
    ----------
    X, Y : (m, d), (n, e) arrays, or (m, m), (n, n) arrays or matrices of scipy.sparse
        Points, distances or graphs, by ``metric``.
    a, b, reg_m
        As in `solve`; reg_m in units of reg, one number for each side.
    reg : float
        Entropic regularisation, >= 0, in units of squared distances (of points: of the fourth power of a length). It
        is half of ``epsilon`` of POT's balanced functions, and equals ``epsilon`` of POT's unbalanced function. With 0
        there is no entropy: proximal steps, each certified, lower a reg of their own from 1 / 20 of the median cost to
        1e-4 of it.
    mass, sharpness : float, optional
        In place of reg_m and of reg: the share of the mass that the plan should move, with the same reg_m on both
        sides, and the sharpness that it should have (`Result.sharpness`), both in (0, 1). ``reg`` and ``reg_m`` of the
        answer are searched for as by `tune`, over some ten answers, each started from the previous one.
    scale_cost : {"median", "mean", "std", "max", "weighted_median", "weighted_mean"}, optional
        Take reg and reg_m in units of this statistic of the first step's costs, as in `solve`. They are
        ``sum (X_ik - Y_jl)^2 a_k b_l / (|a| |b|)`` and half of the features' costs. ``result.scale_cost`` has the
        value.
    reg_mode : {"joint", "independent"}
        "independent": the entropy is ``2 reg KL(P | ab)``, as in unbalanced co-optimal transport, instead of that of
        the product P x P. Between balanced plans of mass 1 both are equal.
    metric : {"sqeuclidean", "euclidean", "geodesic", "precomputed"} or a pair of them
        - "sqeuclidean": X has points; their squared distances are never formed as a matrix.
        - "euclidean": X has points with the distances ``|x_i - x_k|^power``.
        - "geodesic": X has the lengths of the edges of a connected graph, and the distances are the lengths of shortest
          paths to this power. Pairs that a sparse matrix does not store, or zeros of a dense one, are no edges.
        - "precomputed": X has distances, symmetric up to the rounding of their dtype; entries that a sparse matrix does
          not store are 0.
    power : float
        For "euclidean" and "geodesic", in (0, 2].
    landmarks : int
        For "euclidean" and "geodesic" between more than 2000 points: number of points with distances to all others.
        They give ``landmarks - 1`` coordinates and approximate distances. For "euclidean" each step corrects them by
        products of the true distances, which form a block at a time; ``value_error`` of the answer bounds the error
        that remains in its value. Up to 2000 points, or beside "precomputed", all distances are formed.
    features : pair of (m, k) and (n, k) arrays, or (m, n) array, optional
        Features that both spaces share: points (F is their squared distances), or the costs F.
    alpha : float
        Weight of the distances beside the features, in (0, 1]; 1 without features.
    init : {"auto", "independent", "axes", "rows", "noise", "coarse"}, (m, n) plan, Result, or a list of them
        Where to start. "independent": a b^T, and then the settled plan, tilted, since it may be a saddle. "axes": both
        clouds are aligned by their principal axes; the best of up to 8 directions of the axes after 5 steps is kept.
        "rows": points with similar sorted distances to all others are partners, with noise. "noise": a b^T with noise,
        the same in every call. "coarse": the best answer between some points of each space, drawn by mass: a fourth of
        them, and 500 at least. It starts in the same way between still fewer points. A plan is itself the start. For
        points, "auto" tries "independent" and "axes" up to 1000 points, and takes "coarse" above. For distances it
        tries "independent", "rows" and, up to 1000 points, "noise".
    max_iter, tol : int, float
        At most this many steps; stop when a step changes the plan by at most this share of its mass. ``steps`` of the
        answer has the changes.
    inner_tol, **options
        ``tol`` of `solve` for the last steps; earlier steps are solved only as accurately as the plan changes. Options
        are ``threads``, ``backend``, ``precision`` and ``max_passes`` of `solve`.
    bound_tol : float, optional
        Bound the global minimum from below, until ``lower_bound`` of the answer is within this share of its value: by
        branch and bound, which also starts again from better plans that it meets. For balanced sides and points with
        two coordinates each (or one and up to four). 1 % takes some hundred solves. In 3-D it would take hours.

    Returns
    -------
    GromovResult
        A `Result` of the last step's problem, with the value of the objective and the steps.

    Raises
    ------
    ValueError
        An argument is out of range; or a and b have unlike masses and reg_m is so large that rounding keeps the change
        of a step above ``tol``; or no plan with this ``mass`` and ``sharpness`` was found: the message has the nearest.

    Warns
    -----
    ConvergenceWarning
        The plan still changes by more than ``tol`` after ``max_iter`` steps, or the problem of the last step did not
        reach ``inner_tol``, or the bound did not reach ``bound_tol`` in 10,000 solves.

    References
    ----------
    Sejourne, Vialard, Peyre: The unbalanced Gromov Wasserstein distance, 2021. Thual et al.: Aligning individual brains
    with fused unbalanced Gromov Wasserstein, 2022.

    See Also
    --------
    solve : One step's problem.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(60, 3)) * [3.0, 2.0, 1.0]
    >>> turn, order = np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.permutation(60)
    >>> result = mapuot.gromov(x, (x @ turn)[order], reg=0.5, reg_m=np.inf)
    >>> result.settled, bool((order[result.top_k(1)[0][:, 0]] == np.arange(60)).mean() > 0.95)
    (True, True)
    """
    given = options.keys() - set(OPTIONS)
    if given:
        raise TypeError(f"options must be of {OPTIONS}, got {sorted(given)}")
    check_one_of(reg=reg, sharpness=sharpness)
    check_one_of(reg_m=reg_m, mass=mass)
    spaces = spaces_of((X, Y), metric, power, options.get("backend", "auto"))
    if reg is not None:
        reg = as_positive(reg, "reg", wanted=">= 0 and finite", least=0.0)
    tol, inner_tol = as_positive(tol, "tol"), as_positive(inner_tol, "inner_tol")
    limits = Limits(validate.as_count(max_iter, "max_iter"), tol, inner_tol)
    rho = None
    if reg_m is not None:
        rho = tuple(validate.as_rho(x, f"reg_m[{k}]") for k, x in enumerate(validate.as_pair(reg_m, "reg_m")))
    a, b = (validate.as_weight(w, z.count, name, pick("cpu")) for w, z, name in zip((a, b), spaces, "ab", strict=True))
    prepare(spaces, (a, b), validate.as_count(landmarks, "landmarks", least=2))
    features = as_features(features, spaces[0].count, spaces[1].count)
    alpha = 1.0 if features is None else validate.as_float(alpha, "alpha")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    is_joint = validate.as_choice(reg_mode, "reg_mode", ("joint", "independent")) == "joint"
    task = task_of(*spaces, a, b, 1.0, (1.0, 1.0), features, alpha, is_joint)
    scale = 1.0
    if scale_cost is not None:
        scale = scale_of([task.usual_cost()], scale_cost, masses=[(np.asarray(host(a)), np.asarray(host(b)))])
    if bound_tol is not None:
        bound_tol = as_positive(bound_tol, "bound_tol")
        check_bound_applies(task.priced(1.0 if reg is None else reg, rho or (1.0, 1.0)))
    search = AnswerSearch(task, scale, reg, rho, init, limits, options)
    best = search.best(mass, sharpness)
    if not (spaces[0].distances is None and spaces[1].distances is None):
        assess(best)
    if bound_tol is not None:
        best = search.bounded(best, bound_tol)
    warn_unsettled(best, limits)
    return best


def warn_unsettled(best: GromovResult, limits: Limits) -> None:
    """Warn if the last step has not converged, or the plan has not settled."""
    if not best.converged:
        why = not_converged(best, limits.inner_tol, words=Words(tol="inner_tol"))
        warn_not_converged(f"gromov, the last step: {why}")
    if not best.settled:
        change = f"{best.steps[-1].change:.1e} after {limits.max_iter} steps (tol {limits.tol:.1e})"
        warn_not_converged(f"gromov: the plan still changes by {change}")


def check_one_of(**given: Any) -> None:
    """Raise TypeError unless one of two arguments is given."""
    if sum(value is not None for value in given.values()) != 1:
        one, other = given
        raise TypeError(f"gromov() takes one of {one} and {other}, got {shown(given)}")


class AnswerSearch(Search):
    """Answers of one problem of `gromov` for `tune`, each started from the previous answer.

    ``reg`` and ``rho`` are the reg and reg_m of all answers, or None to search for them, in units of ``scale``.
    """

    def __init__(
        self, task: Task, scale: float, reg: float | None, rho: Any, init: Any, limits: Limits, options: dict[str, Any]
    ) -> None:
        self.task, self.scale, self.reg, self.rho = task, scale, reg, rho
        self.init, self.limits, self.options = init, limits, options
        self.results = {}
        self.last = None

    def best(self, mass: float | None, sharpness: float | None) -> GromovResult:
        """Return the answer with this mass and sharpness; None: a given reg_m or reg sets it."""
        if mass is None and sharpness is None:
            return self.answer(0.0, 0.0)
        self.usual = self.task.median_cost / self.scale
        given = None if self.rho is None else 1.0  # any number stands for rho
        if mass is None:
            mass = 0.5  # not asked for
        if sharpness is None:
            sharpness = 0.5
        found = tuned(self, mass, sharpness, self.reg, given).result
        assert isinstance(found, GromovResult)
        return found

    def answer(self, reg: float, reg_m: float) -> GromovResult:
        """Return the answer at reg and reg_m, of which a given ``self.reg`` or ``self.rho`` takes the place."""
        reg = reg if self.reg is None else self.reg
        rho = self.rho or (reg_m, reg_m)
        task = self.task.priced(self.scale * reg, tuple(self.scale * price for price in rho))
        task.check_settles(self.limits.tol, self.limits.max_iter)
        init = self.init
        if self.last is not None:
            init = FirstPlan(task.fitted(task.answer(self.last)))
        found = best_answer(task, init, self.limits, self.options)
        found.reg, found.reg_m, found.scale_cost = reg, rho, self.scale
        return found

    def bounded(self, best: GromovResult, bound_tol: float) -> GromovResult:
        """Return the answer with its ``lower_bound``, or a better one that the search for the bound meets."""
        found = bounded(best._task, best, bound_tol, self.limits, self.options)
        found.reg, found.reg_m, found.scale_cost = best.reg, best.reg_m, best.scale_cost
        return found
