"""`gromov_pairwise`: Gromov-Wasserstein between all pairs of many small spaces, solved together.

spaces/together.py has the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import MarginalPenalty
from ..backends import pick
from ..penalties import F64
from ..problem import validate
from ..problem.points import as_points
from ..problem.validate import as_positive
from ..progress import bar as progress_bar
from ..spaces.answer import LastStep
from ..spaces.distances import Space, space_of
from ..spaces.settings import SPACES
from ..spaces.starts import by_noise, sorted_rows
from ..spaces.steps import FirstPlan, Limits
from ..spaces.task import Task
from ..spaces.together import descend_together, starts_by_rows
from ..status import warn_not_converged
from ..synonyms import hinted

OPTIONS = "threads", "backend", "precision", "max_passes", "method"  # options of `solve_batch` that a user may give
STARTS = "rows", "independent", "noise"
DEVICE_TOGETHER = 1 << 25


class GromovPairs:
    """Answers of `gromov_pairwise`: arrays with one entry for each of p pairs of spaces.

    Attributes
    ----------
    pairs : (p, 2) array
        The indices of both spaces.
    value : (p,) array
        Objective of `gromov` at the best plan.
    change, error_bound, settled, n_steps : (p,) arrays
        Of the last step: the change of the plan, the certificate of its problem; whether the change is at most ``tol``;
        number of steps.
    plans : list of (m, n) arrays, or None
        The plans, if ``keep_plans`` asks for them.

    See Also
    --------
    gromov_pairwise : Makes it.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> shapes = [np.eye(4)[:, :2], np.eye(5)[:, :2], np.eye(6)]
    >>> found = mapuot.gromov_pairwise(shapes, reg=0.1, reg_m=np.inf)
    >>> found.pairs.tolist(), found.matrix().shape
    ([[0, 1], [0, 2], [1, 2]], (3, 3))
    """

    def __init__(self, pairs: Any, count: int, keep_plans: bool) -> None:
        p = len(pairs)
        self.pairs = pairs
        self.value, self.change, self.error_bound = np.full((3, p), np.nan)
        self.settled = np.zeros(p, bool)
        self.n_steps = np.zeros(p, np.int64)
        self.plans: Any = [None] * p if keep_plans else None
        self._count = count

    def keep_pair(self, k: int, end: LastStep) -> None:
        """Keep the numbers of a pair, and its plan if plans are kept."""
        self.value[k] = sum(end.parts)
        self.change[k] = end.steps[-1].change
        self.error_bound[k] = end.steps[-1].error_bound
        self.settled[k] = end.settled
        self.n_steps[k] = len(end.steps)
        if self.plans is not None:
            self.plans[k] = end.plan.cross

    def matrix(self) -> F64:
        """Return the values as a symmetric (k, k) array; NaN for pairs that were not solved."""
        found = np.full((self._count, self._count), np.nan)
        i, j = self.pairs.T
        found[i, j] = found[j, i] = self.value
        return found

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return f"<mapuot.GromovPairs {len(self)} pairs of {self._count} spaces, {int(self.settled.sum())} settled>"


@hinted
def gromov_pairwise(
    spaces: Any,
    masses: Any = None,
    *,
    reg: float,
    reg_m: MarginalPenalty,
    pairs: ArrayLike | None = None,
    metric: str = "sqeuclidean",
    power: float = 1.0,
    features: Any = None,
    alpha: float = 0.5,
    init: Any = "rows",
    max_iter: int = 100,
    tol: float = 1e-3,
    inner_tol: float = 1e-5,
    keep_plans: bool = False,
    progress: bool = False,
    **options: Any,
) -> GromovPairs:
    """Solve `gromov` between all pairs of k small spaces, many pairs at a time.

    Parameters
    ----------
    spaces : list of k arrays (n_i, d_i) or (n_i, n_i)
        Points, distances or graphs, by ``metric``, of any numbers of points. Distances are formed as matrices.
    masses : list of k vectors (n_i,), optional
        Default: equal masses that add up to 1 in each space.
    reg, reg_m, metric, power, alpha, max_iter
        As in `gromov`, the same for all pairs.
    pairs : (p, 2) integers, optional
        Indices of the spaces of each pair. Default: all pairs i < j.
    features : list of k arrays (n_i, d), optional
        Features that all spaces share.
    init : {"rows", "independent", "noise"} or a list of them
        Where to start, as in `gromov`; of several starts the best answer is kept.
    tol, inner_tol : float
        As in `gromov`: the change of a plan that ends its steps, and ``tol`` of `solve_batch` for the last steps.
    keep_plans : bool
        Keep all plans.
    progress : bool
        Show a bar with the number of solved pairs.
    **options
        threads, backend, precision, max_passes and method of `solve_batch`.

    Returns
    -------
    GromovPairs

    Raises
    ------
    ValueError
        An argument is out of range; or two spaces have unlike masses and reg_m is so large that rounding keeps the
        change of a step above ``tol``.

    Warns
    -----
    ConvergenceWarning
        Some plans still change by more than ``tol``, or the last steps of some pairs did not reach ``inner_tol``.

    See Also
    --------
    gromov : one pair
    pairwise : divergences between clouds in one space

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> flat, long = rng.random((20, 3)), rng.random((25, 3)) * [3.0, 1.0, 1.0]
    >>> turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    >>> D = mapuot.gromov_pairwise([flat, flat @ turn, long], reg=0.01, reg_m=np.inf).matrix()
    >>> bool(D[0, 1] < 0.2 * D[0, 2])
    True
    """
    given = options.keys() - set(OPTIONS)
    if given:
        raise TypeError(f"options must be of {OPTIONS}, got {sorted(given)}")
    measured = [space_of(x, metric, power, f"spaces[{k}]") for k, x in enumerate(spaces)]
    limits = Limits(
        validate.as_count(max_iter, "max_iter"), as_positive(tol, "tol"), as_positive(inner_tol, "inner_tol")
    )
    sides = enumerate(validate.as_pair(reg_m, "reg_m"))
    reg_m = tuple(validate.as_rho(x, f"reg_m[{k}]") for k, x in sides)
    reg = as_positive(reg, "reg", wanted=">= 0 and finite", least=0.0)
    names = [validate.as_choice(name, "init", STARTS) for name in (init if isinstance(init, list) else [init])]
    if not names:
        raise ValueError(f"init must be of {STARTS}, got an empty list")
    chosen = as_pairs(pairs, len(measured))
    problems = SmallSpaces(measured, masses, features, alpha, reg, reg_m)
    if "rows" in names:
        problems.sort_rows()
    found = GromovPairs(chosen, len(measured), keep_plans)
    with progress_bar(progress, total=len(chosen), desc="mapuot", unit="pair") as bar:
        for some in problems.batches(chosen, options.get("backend") == "cuda"):
            tasks = [problems.task(i, j) for i, j in chosen[some]]
            for task in tasks:
                task.check_settles(limits.tol, limits.max_iter)
            for k, end in zip(some, best_of_starts(tasks, names, problems.rows, limits, options), strict=True):
                found.keep_pair(k, end)
            bar.update(len(some))
    report(found, limits)
    return found


class SmallSpaces:
    """The spaces with their masses, and the parameters that the problems between all pairs share."""

    def __init__(
        self, spaces: list[Space], masses: Any, features: Any, alpha: Any, reg: float, reg_m: tuple[float, ...]
    ) -> None:
        self.spaces = spaces
        if masses is None:
            masses = [None] * len(spaces)
        if len(masses) != len(spaces):
            raise ValueError(f"masses must be one vector for each of {len(spaces)} spaces, got {len(masses)}")
        pairs = enumerate(zip(masses, spaces, strict=True))
        self.masses = [validate.as_weight(w, space.count, f"masses[{k}]", pick("cpu")) for k, (w, space) in pairs]
        for space, w in zip(spaces, self.masses, strict=True):
            space.centre(w)
            space.form()
        self.features = as_shared(features, spaces)
        self.alpha = 1.0
        if features is not None:
            self.alpha = validate.as_float(alpha, "alpha")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        self.reg = reg
        self.reg_m = reg_m
        self.rows: dict[int, F64] = {}

    def sort_rows(self) -> None:
        """Sort the distances from each point, once for all pairs of its space."""
        both = zip(self.spaces, self.masses, strict=True)
        self.rows = {id(space): sorted_rows(space, w) for space, w in both}

    def task(self, i: int, j: int) -> Task:
        """Return the problem between two spaces."""
        X, Y = self.spaces[i], self.spaces[j]
        features = self.features and (self.features[i], self.features[j])
        return Task(X, Y, self.masses[i], self.masses[j], self.reg, self.reg_m, features, self.alpha)

    def batches(self, pairs: Any, on_device: bool) -> Iterator[list[int]]:
        """Yield the indices of pairs that are solved together, with plans of like sizes."""
        sizes = np.array([space.count for space in self.spaces])[pairs].prod(1)
        order = np.argsort(-sizes, kind="stable").tolist()
        most = SPACES.plan_entries
        if on_device:
            most = DEVICE_TOGETHER
        while order:
            count = max(1, most // int(sizes[order[0]]))
            yield order[:count]
            order = order[count:]


def best_of_starts(
    tasks: list[Task], names: list[str], rows: dict[int, F64], limits: Limits, options: dict[str, Any]
) -> list[LastStep]:
    """Return the best descent of each problem over the starts."""
    best: list[LastStep | None] = [None] * len(tasks)
    for name in names:
        begins = [FirstPlan(task.independent(), is_symmetric=True) for task in tasks]
        if name == "rows":
            plans = starts_by_rows(tasks, rows, options)
            begins = [FirstPlan(own[0]) if own else start for own, start in zip(plans, begins, strict=True)]
        elif name == "noise":
            begins = [FirstPlan(by_noise(task, options)[0]) for task in tasks]
        for k, end in enumerate(descend_together(tasks, begins, limits, options)):
            so_far = best[k]
            if so_far is None or sum(end.parts) < sum(so_far.parts):
                best[k] = end
    return [end for end in best if end is not None]


def as_shared(features: Any, spaces: list[Space]) -> list[F64] | None:
    """Check the features of all spaces."""
    if features is None:
        return None
    found = [np.asarray(as_points(x, f"features[{k}]"), np.float64) for k, x in enumerate(features)]
    width = found[0].shape[1] if found else 0
    if [x.shape for x in found] != [(space.count, width) for space in spaces]:
        raise ValueError(f"features must be one array (n_i, d) for each space, got {[x.shape for x in found]}")
    return found


def as_pairs(pairs: Any, count: int) -> Any:
    """Check pairs of indices, or return all pairs i < j."""
    if pairs is None:
        return np.stack(np.triu_indices(count, 1), 1)
    found = np.asarray(pairs)
    if found.ndim != 2 or found.shape[1] != 2 or found.dtype.kind not in "iu":
        raise ValueError(f"pairs must be a (p, 2) array of integers, got shape {found.shape} of {found.dtype}")
    if not ((found >= 0) & (found < count)).all():
        raise ValueError(f"pairs must have indices from 0 to {count - 1}, got {found.min()} to {found.max()}")
    return found


def report(found: GromovPairs, limits: Limits) -> None:
    """Warn of plans that still change, and of last steps that are not certified."""
    moving = int((~found.settled).sum())
    if moving:
        most = float(found.change.max())
        warn_not_converged(f"gromov_pairwise: {moving} of {len(found)} plans still change, by up to {most:.1e}")
    loose = int((found.error_bound > limits.inner_tol).sum())
    if loose:
        most = float(found.error_bound.max())
        warn_not_converged(f"gromov_pairwise: {loose} of {len(found)} last steps end above inner_tol, up to {most:.1e}")
