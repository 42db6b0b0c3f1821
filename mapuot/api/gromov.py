"""`gromov`: a plan between two spaces that share no coordinates, entropic, unbalanced or balanced, fused or not.

The steps are those of spaces/steps.py; the formulas stand in spaces/task.py.
"""

from __future__ import annotations

from typing import Any

from ..backends import pick
from ..errors import shown
from ..problem import validate
from ..problem.scale import scale_of
from ..problem.validate import as_positive
from ..spaces.distances import KINDS, Space
from ..spaces.starts import starts
from ..spaces.steps import GromovResult, best_of, descend
from ..spaces.task import Task, as_features
from ..status import Words, not_converged, warn_not_converged

OPTIONS = "threads", "backend", "precision", "max_passes"  # of `solve`, which a user may give


def gromov(
    X: Any, Y: Any, a: Any = None, b: Any = None, *, reg: float, reg_m: Any, scale_cost: str | None = None,
    metric: Any = "sqeuclidean", features: Any = None, alpha: float = 0.5, init: Any = "auto", max_iter: int = 100,
    tol: float = 1e-4, inner_tol: float = 1e-6, **options: Any,
) -> GromovResult:  # fmt: skip
    """Solve entropic Gromov-Wasserstein between two spaces, unbalanced, semi-relaxed or balanced, fused with features.

    The objective of a plan P, with X and Y the distances within the spaces and KL of products of measures, is

    ``alpha sum (X_ik - Y_jl)^2 P_ij P_kl + (1 - alpha) <F, P> + reg KL(P x P | ab x ab)
    + reg_m[0] KL(P1 x P1 | a x a) + reg_m[1] KL(P^T 1 x P^T 1 | b x b)``.

    It is not convex. Steps go down to a plan that answers its own step; several starts are tried, and the best kept.

    Parameters
    ----------
    X, Y : (m, d), (n, e) arrays, or (m, m), (n, n) arrays or matrices of scipy.sparse
        Points, whose distances are squared Euclidean ones and are never formed; for ``metric="precomputed"`` distances,
        symmetric but for the rounding of their dtype, where entries that a sparse matrix does not store are 0.
    a, b, reg_m
        As in `solve`; reg_m in units of reg, one number a side.
    reg : float
        Entropic regularisation, >= 0, in units of squared distances (of points: of the fourth power of a length). Half
        of ``epsilon`` of POT's balanced functions, and all of that of its unbalanced one. 0: no entropy, by proximal
        steps whose own reg falls from 1 / 20 of the median cost to 1e-4 of it, and each of which is certified.
    scale_cost : {"median", "mean", "max"}, optional
        Take reg and reg_m in units of this cost of the step from a b^T, ``sum (X_ik - Y_jl)^2 a_k b_l / (|a| |b|)`` and
        half of the features', which ``result.scale_cost`` tells.
    metric : {"sqeuclidean", "precomputed"} or a pair of them
    features : pair of (m, k) and (n, k) arrays, or (m, n) array, optional
        What both spaces share: points, whose costs F are squared distances, or F itself.
    alpha : float
        Share of the structures, in (0, 1], beside the features; 1 where there are none.
    init : {"auto", "independent", "axes", "rows", "noise", "coarse"}, (m, n) plan, Result, or a list of them
        Where to start: from a b^T; from points laid on each other by the principal axes of both clouds, the best
        of up to 8 directions of these after 5 steps; from partners whose sorted distances to all others are alike, with
        noise; from a b^T with noise, the same in every call; from the best answer between 500 points of each space,
        drawn by their masses; or from a plan. "auto" of points tries "independent" and "axes" up to 1000 points and
        takes "coarse" beyond. Of distances it tries "independent", "rows" and, up to 1000 points, "noise": a b^T is
        near a saddle where many points see the same distances.
    max_iter, tol : int, float
        Steps at most; stop when the plan changes by at most this share of its mass, see ``steps`` of the answer.
    inner_tol, **options
        ``tol`` of `solve` for the last steps, while those before follow the change of the plan; its ``threads``,
        ``backend``, ``precision`` and ``max_passes``.

    Returns
    -------
    GromovResult
        A `Result` of the last step's problem, with the value of the objective and the steps.

    Warns
    -----
    ConvergenceWarning
        ``max_iter`` steps did not settle the plan, or the last step's problem ended above its tolerance.

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
    kinds = metric if isinstance(metric, tuple) else (metric, metric)
    if len(kinds) != 2:
        raise ValueError(f"metric must be one of {[*KINDS]} or a pair of them, got {shown(metric)}")
    both = zip((X, Y), (validate.as_choice(kind, "metric", KINDS) for kind in kinds), "XY", strict=True)
    spaces = [Space(*each) for each in both]
    given = options.keys() - set(OPTIONS)
    if given:
        raise TypeError(f"options must be of {OPTIONS}, got {sorted(given)}")
    reg, tol = as_positive(reg, "reg", wanted=">= 0 and finite", least=0.0), as_positive(tol, "tol")
    max_iter = validate.as_count(max_iter, "max_iter")
    low, high = (validate.as_rho(x, f"reg_m[{k}]") for k, x in enumerate(validate.as_pair(reg_m, "reg_m")))
    a, b = (validate.as_weight(w, z.count, name, pick("cpu")) for w, z, name in zip((a, b), spaces, "ab", strict=True))
    features = as_features(features, spaces[0].count, spaces[1].count)
    alpha = 1.0 if features is None else validate.as_float(alpha, "alpha")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    task = Task(spaces[0], spaces[1], a, b, reg, (low, high), features, alpha)
    scale = 1.0
    if scale_cost is not None:
        scale = scale_of([task.usual_cost()], scale_cost)
        task = Task(spaces[0], spaces[1], a, b, scale * reg, (scale * low, scale * high), features, alpha)
    inner_tol = as_positive(inner_tol, "inner_tol")
    found = []
    for plan, some in starts(task, init, options):
        found.append(descend(task, plan, max_iter, tol, inner_tol, options, some is None))
        found[-1].coarse = some
    best = best_of(found)
    best.scale_cost = scale
    if not best.converged:
        warn_not_converged("gromov, the last step: " + not_converged(best, inner_tol, words=Words(tol="inner_tol")))
    if not best.settled:
        change = best.steps[-1].change
        warn_not_converged(f"gromov: the plan still changes by {change:.1e} after {max_iter} steps (tol {tol:.1e})")
    return best
