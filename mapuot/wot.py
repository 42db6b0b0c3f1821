"""Populations over time: couplings between days, with growth, under the names of wot and of moscot.

The problem between days t0 and t1 is wot's, in its own scale. Row i has the mass ``G_i = growth_i ** (t1 - t0)``, every
column the mass ``sum(G) / n``; the reference is 1/n for each pair, and lambda1 and lambda2 are the penalties. A row of
the coupling sums to about G_i, and a growth iteration takes these sums as the next G. moscot's tau is
``lambda / (lambda + epsilon)``. Its masses add up to 1 and its reference is 1 for each pair, which gives the same plan
up to a factor (1 / sum(G) where a side is hard).
Sources: Schiebinger et al., Optimal-transport analysis of single-cell gene expression, 2019; Klein et al., Mapping
cells through time and space with moscot, 2025.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from .answer.result import Result
from .api.solve import solve
from .errors import shown
from .penalties import F64
from .problem.clouds import PointCloud
from .problem.labels import as_labels
from .problem.points import MOST_ENTRIES
from .problem.scale import SCALES
from .problem.validate import as_array, as_choice, as_count, as_float, as_numbers, as_positive, as_rho

SAMPLED = 1 << 20  # pairs that the scale of a cost is taken from where it is not formed


class Coupling:
    """Coupling between the cells of two days; its methods never form the matrix.

    Attributes
    ----------
    t0, t1, result : float, float, mapuot.Result
        The days, and the answer, with the cells of day t0 as rows and those of t1 as columns: wot's transport map.
    growths : list of (m,) arrays
        Growth per day with which each iteration began, and at the end the growth that the last one found.

    See Also
    --------
    OTModel : makes it

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot.wot import OTModel
    >>> rng = np.random.default_rng(0)
    >>> coupling = OTModel(rng.normal(size=(50, 3)), days=np.repeat([0, 1], [20, 30])).coupling(0, 1)
    >>> coupling.shape, coupling.push_forward(np.ones(20)).shape
    ((20, 30), (30,))
    """

    def __init__(self, t0: float, t1: float, result: Result, growths: list[F64]) -> None:
        self.t0, self.t1, self.result, self.growths = t0, t1, result, growths

    def __repr__(self) -> str:
        return f"<mapuot.wot.Coupling day {self.t0:g} to {self.t1:g}: {self.result!r}>"

    @property
    def growth(self) -> F64:
        """Growth per day of each cell of day t0, (m,), as the last iteration found it."""
        return self.growths[-1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.result.problem.shape

    def push_forward(self, p: Any) -> F64:
        """Return ``p @ coupling``: where the mass p, (m,) or (m, k), of day t0 goes, not normalised."""
        return np.asarray(self.result.apply_transpose(p))

    def pull_back(self, q: Any) -> F64:
        """Return ``coupling @ q``: where the mass q, (n,) or (n, k), of day t1 came from, not normalised."""
        return np.asarray(self.result.apply(q))

    def fates(self, labels: Any) -> tuple[Any, F64]:
        """Return (classes, shares) of the labels that the descendants of each cell of day t0 have on day t1."""
        return self.result.pull(labels)

    def transition_table(self, labels0: Any, labels1: Any) -> tuple[Any, Any, F64]:
        """Return (classes on t0, classes on t1, mass that goes from one to the other)."""
        m, n = self.shape
        y0, y1 = as_labels(labels0, m, "labels0"), as_labels(labels1, n, "labels1")
        (c0, i0), (c1, i1) = (np.unique(y, return_inverse=True) for y in (y0, y1))
        return c0, c1, np.eye(len(c0))[i0].T @ self.pull_back(np.eye(len(c1))[i1])

    def sparse(self, keep: float = 0.99) -> Any:
        """Return the fewest entries that hold this share of the mass, a SciPy CSR array."""
        return self.result.sparse(keep=keep)


class OTModel:
    """Model of a time course of cells: couplings between its days, each solved when it is first asked for.

    Parameters
    ----------
    data, days : AnnData, or (cells, features) array; (cells,) array, optional
        The cells of all days, and the day of each; by default ``data.obs[day_field]``.
    growth : (cells,) array, or a pair of gene sets, optional
        Growth of each cell per day. Default: ``data.obs[cell_growth_rate_field]`` if it exists, else 1. A pair (birth,
        death), each (cells,) scores or a list of names of genes in ``data.var_names``, gives the growth
        ``exp(beta - delta)`` with wot's rates of birth and death: logistic curves of the scores from .3 to 1.7 per day,
        with the middle at scores of .25 and .1. The score of a list is the mean of its genes' z-scores, cut at 5.
    day_field, cell_growth_rate_field : str
        wot's names of the columns of ``data.obs``.
    representation : str, optional
        Name in ``data.obsm`` of the coordinates to use as they are, in place of ``data.X``.
    local_pca : int
        Number of principal components, found for both days of a coupling together. 0, or more than there are features,
        uses the features themselves.
    epsilon, lambda1, lambda2 : float > 0; float or inf
        Entropic regularisation, and penalties of the rows (growth) and of the columns, in units of the scaled cost.
    tau_a, tau_b : float in (0, 1], optional
        moscot's form of the penalties: ``lambda = epsilon tau / (1 - tau)``; 1 is balanced.
    growth_iters : int
        How often a coupling is solved, each time with the growth that the solve before it found.
    scale_cost : {"median", "mean", "max"} or float
        What squared distances are divided by. wot uses the median, moscot the mean.
    reference : {"uniform", "product"}
        Reference measure of the entropy: constant, as in wot and (up to a factor) in moscot, or a b^T.
    **options
        Whatever else `mapuot.solve` takes: tol, threads, backend and so on.

    See Also
    --------
    Coupling, mapuot.multimarginal

    Examples
    --------
    >>> import numpy as np
    >>> from mapuot.wot import OTModel
    >>> rng = np.random.default_rng(0)
    >>> kind = np.repeat([0, 1, 0, 1], [100, 100, 120, 60])
    >>> X = kind[:, None] * 5.0 + rng.normal(size=(380, 2))
    >>> model = OTModel(X, days=np.repeat([0.0, 1.0], [200, 180]), growth_iters=10)
    >>> growth = model.coupling(0, 1).growth
    >>> print(round(growth[:100].mean() / growth[100:].mean(), 1))
    2.0
    >>> bool(model.descendants(kind[:200] == 0, 0, 1)[:120].sum() > 0.99)
    True
    """

    def __init__(
        self, data: Any, days: Any = None, growth: Any = None, *, day_field: str = "day",
        cell_growth_rate_field: str = "cell_growth_rate", representation: str | None = None, local_pca: int = 30,
        epsilon: float = 0.05, lambda1: float = 1.0, lambda2: float = 50.0, tau_a: float | None = None,
        tau_b: float | None = None, growth_iters: int = 1, scale_cost: Any = "median", reference: str = "uniform",
        **options: Any,
    ) -> None:  # fmt: skip
        self.local_pca = as_count(local_pca, "local_pca", least=0)
        self.epsilon = as_positive(epsilon, "epsilon")
        self.lambda1 = as_lambda(lambda1, tau_a, self.epsilon, ("lambda1", "tau_a"))
        self.lambda2 = as_lambda(lambda2, tau_b, self.epsilon, ("lambda2", "tau_b"))
        self.growth_iters = as_count(growth_iters, "growth_iters")
        self.scale_cost: Any = as_choice(scale_cost, "scale_cost", SCALES) if isinstance(scale_cost, str) else None
        self.scale_cost = self.scale_cost or as_positive(scale_cost, "scale_cost")
        self.reference, self.options = as_choice(reference, "reference", ("uniform", "product")), options
        self.X = getattr(data, "X", data) if representation is None else data.obsm[representation]
        if representation is not None:
            self.local_pca = 0
        count = self.X.shape[0] if hasattr(self.X, "shape") else len(self.X)
        self.days = column(data, days, day_field, count, "days")
        if self.days is None:
            raise ValueError(f"days must be given, or data must be an AnnData with obs[{day_field!r}]")
        if isinstance(growth, tuple):
            growth = growth_of(data, growth, count)
        found = column(data, growth, cell_growth_rate_field, count, "growth")
        self.growth = np.ones(count) if found is None else found
        if not (np.isfinite(self.growth) & (self.growth > 0)).all():
            raise ValueError("growth must be finite and > 0")
        self.timepoints = [float(t) for t in np.unique(self.days[~np.isnan(self.days)])]
        self.couplings: dict[tuple[float, float], Coupling] = {}

    def coupling(self, t0: float, t1: float) -> Coupling:
        """Return the coupling of day t0 with day t1, solved on first use and kept."""
        key = as_float(t0, "t0"), as_float(t1, "t1")
        for name, t in zip(("t0", "t1"), key, strict=True):
            if t not in self.timepoints:
                raise ValueError(f"{name} must be one of the days {self.timepoints}, got {t:g}")
        if not key[0] < key[1]:
            raise ValueError(f"t0 must be before t1, got {t0:g} and {t1:g}")
        if key not in self.couplings:
            self.couplings[key] = self._solved(*key)
        return self.couplings[key]

    def _solved(self, t0: float, t1: float) -> Coupling:
        here, there = self.days == t0, self.days == t1
        cost = self._cost(dense(self.X[here]), dense(self.X[there]))
        m, n = cost.shape
        step, mass = t1 - t0, self.growth[here] ** (t1 - t0)
        growths, result = [self.growth[here]], None
        for _ in range(self.growth_iters):
            b = np.full(n, mass.sum() / n)
            c: Any = "product" if self.reference == "product" else np.broadcast_to(1.0 / n, (m, n))
            reg_m = self.lambda1, self.lambda2
            result = solve(cost, mass, b, reg=self.epsilon, reg_m=reg_m, reference=c, warm_start=result, **self.options)
            mass = np.asarray(result.row_marginal)
            growths.append(mass ** (1.0 / step))
        assert result is not None
        return Coupling(t0, t1, result, growths)

    def _cost(self, x: F64, y: F64) -> Any:
        if 0 < self.local_pca <= x.shape[1]:
            x, y = components(x, y, self.local_pca)
        cloud = PointCloud(x, y)
        if len(x) * len(y) <= MOST_ENTRIES:
            M = np.asarray(cloud)
            return M / self._scale_of(M)
        rng = np.random.default_rng(0)
        i, j = rng.integers(0, len(x), SAMPLED), rng.integers(0, len(y), SAMPLED)
        return PointCloud(x, y, scale=1.0 / self._scale_of(((x[i] - y[j]) ** 2).sum(1)))

    def _scale_of(self, costs: F64) -> float:
        if not isinstance(self.scale_cost, str):
            return float(self.scale_cost)
        return as_positive(SCALES[self.scale_cost](costs), f"the {self.scale_cost} of the costs")

    def _steps(self, t0: float, t1: float) -> list[tuple[float, float]]:
        """Return the pairs of days that follow each other, from t0 to t1."""
        if not {t0, t1} <= {*self.timepoints} or not t0 < t1:
            raise ValueError(f"t0 and t1 must be two of the days {self.timepoints}, t0 first, got {t0:g}, {t1:g}")
        return [*pairwise(t for t in self.timepoints if t0 <= t <= t1)]

    def descendants(self, population: Any, t0: float, t1: float) -> F64:
        """Return the shares (sum 1) of day t1's cells among the descendants of cells of day t0 (weights or a mask)."""
        return self._followed(population, t0, self._steps(t0, t1), Coupling.push_forward)

    def ancestors(self, population: Any, t1: float, t0: float) -> F64:
        """Return the shares (sum 1) of day t0's cells among the ancestors of cells of day t1 (weights or a mask)."""
        return self._followed(population, t1, self._steps(t0, t1)[::-1], Coupling.pull_back)

    def _followed(self, population: Any, day: float, steps: Any, move: Callable[[Coupling, F64], F64]) -> F64:
        """Follow cells of a day through couplings, one after the other, in shares of what moves."""
        count = int((self.days == day).sum())
        wanted = f"{count} weights >= 0 or a mask with a cell in it"
        p: F64 = np.asarray(as_numbers(population, "population", wanted, (count,), least=0.0), np.float64)
        if not p.sum() > 0:
            raise ValueError(f"population must be {wanted}, got {shown(population)}")
        p = p / p.sum()
        for pair in steps:
            p = move(self.coupling(*pair), p)
            if not p.sum() > 0:
                raise ValueError("population must have mass that moves: all of it is left behind")
            p = p / p.sum()
        return p


def as_lambda(value: Any, tau: Any, epsilon: float, names: tuple[str, str]) -> float:
    if tau is None:
        return as_rho(value, names[0])
    share = as_float(tau, names[1])
    if not 0 < share <= 1:
        raise ValueError(f"{names[1]} must be in (0, 1], got {share}")
    return math.inf if share == 1 else epsilon * share / (1 - share)


def growth_of(data: Any, pair: tuple[Any, ...], count: int) -> F64:
    """Return the growth of each cell in a day by the scores of a birth and a death signature."""
    if len(pair) != 2:
        raise ValueError(f"growth must be (cells,) numbers or a pair (birth, death), got {len(pair)} of them")
    birth, death = (score(data, genes, count, f"growth[{k}]") for k, genes in enumerate(pair))
    rates = ((birth, 0.25, 0.5), (death, 0.1, 0.2))  # score, centre and width of a logistic curve
    with np.errstate(over="ignore"):
        beta, delta = (0.3 + 1.4 / (1 + np.exp(-4 / width * (p - centre))) for p, centre, width in rates)
    return np.asarray(np.exp(beta - delta))


def score(data: Any, genes: Any, count: int, name: str) -> F64:
    """Return scores as given, or the mean over genes of their z-scores, cut at 5 as in wot."""
    genes = as_array(genes, name)
    if genes.dtype.kind not in "UTO":
        return np.asarray(column(data, genes, "", count, name))
    known = {gene: k for k, gene in enumerate(getattr(data, "var_names", ()))}
    if missing := [gene for gene in genes if gene not in known]:
        raise ValueError(f"{name} must be names of genes in data.var_names, got {shown(missing[0])}")
    X = dense(data.X[:, [known[gene] for gene in genes]])
    spread = X.std(0)
    return np.asarray(np.clip((X - X.mean(0)) / np.where(spread > 0, spread, 1.0), -5, 5).mean(1))


def column(data: Any, given: Any, field: str, count: int, name: str) -> Any:
    """Return the given values, or a column of ``data.obs``, as (cells,) numbers; None where there is neither."""
    if given is None:
        obs = getattr(data, "obs", None)
        if obs is None or field not in obs:
            return None
        given = obs[field]
    values = np.asarray(as_array(given, name), np.float64)
    if values.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got {values.shape}")
    return values


def dense(X: Any) -> F64:
    X = X.toarray() if hasattr(X, "toarray") else X
    return np.asarray(as_array(X, "data"), np.float64)


def components(x: F64, y: F64, count: int) -> tuple[F64, F64]:
    """Project both days onto their common principal components; each cell is centred first, as in wot."""
    both = np.vstack([x, y])
    both = both - both.mean(0)
    both -= both.mean(1, keepdims=True)
    u, s, _ = np.linalg.svd(both, full_matrices=False)
    scores = u[:, :count] * s[:count]
    return scores[: len(x)], scores[len(x) :]
