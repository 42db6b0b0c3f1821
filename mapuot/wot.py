"""Populations over time: couplings between days, with growth, under the names of wot and of moscot.

The problem between days t0 and t1 is wot's, with wot's scale of masses. Row i has the mass ``G_i = growth_i ** (t1 -
t0)``, every column the mass ``sum(G) / n``; the reference is 1/n for each pair, and lambda1 and lambda2 are the
penalties. A row of the coupling sums to about G_i, and a growth iteration takes these sums as the next G. moscot's tau
is ``lambda / (lambda + epsilon)``. Its masses add up to 1 and its reference is 1 for each pair, which gives the same
plan up to a factor (1 / sum(G) where a side is hard). Sources: Schiebinger et al., Optimal-transport analysis of
single-cell gene expression, 2019; Klein et al., Mapping cells through time and space with moscot, 2025.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse.linalg import ArpackError, LinearOperator, svds
from scipy.special import logsumexp

from .annotations import Statistic
from .answer.result import Result
from .api.solve import solve
from .arrays import host
from .errors import shown, warn
from .penalties import F64
from .problem.clouds import PointCloud
from .problem.labels import as_labels, is_missing
from .problem.scale import SCALES
from .problem.settings import POINTS
from .problem.sparse import is_sparse
from .problem.validate import as_array, as_choice, as_count, as_float, as_numbers, as_positive, as_rho, check_kind
from .synonyms import Hints, hinted_onward

__all__ = ["Coupling", "OTModel"]

SAMPLED = 1 << 20  # sampled pairs for the scale of a cost without a matrix
LEAST_MOVED = 1e-290  # less mass is counted by logarithms: float64 loses digits below
FEW_COMPONENTS = 5  # up to 1 / 5 of all components ARPACK is faster than a full decomposition


def shares_by_exponents(result: Result, p: F64, turned: bool) -> F64:
    """Return P p, or P^T p, over its largest entry; from the plan's logarithms, where P or its products underflow."""
    operator = result._stream
    alpha = host(operator.alpha)
    logs = np.full(operator.shape[int(turned)], -np.inf)
    with np.errstate(divide="ignore"):
        log_p = np.log(p)
    for i0, i1 in operator.pieces():
        block = host(operator.exponents(i0, i1)) + alpha[i0:i1, None]
        if turned:
            logs = np.logaddexp(logs, logsumexp(block + log_p[i0:i1, None], axis=0))
        else:
            logs[i0:i1] = logsumexp(block + log_p, axis=1)
    top = logs.max()
    if top == -np.inf:
        return np.zeros(len(logs))
    return np.asarray(np.exp(logs - top))


class Coupling(Hints):
    """Coupling between the cells of two days; its methods never form the matrix.

    Attributes
    ----------
    model, t0, t1, result : OTModel, float, float, mapuot.Result
        The model, the days, and the answer: wot's transport map, with cells of day t0 as rows and cells of day t1 as
        columns.
    growths : list of (m,) arrays
        Growth per day at the start of each iteration, then the growth found by the last one.

    Notes
    -----
    If the model was made from an AnnData, per-cell numbers are a pandas Series or DataFrame with the names of the
    cells. Labels are an array, for the day's cells or for all cells of the model, or a column of ``obs``.

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

    _parts: ClassVar = {"result": Result}

    def __init__(self, model: "OTModel", t0: float, t1: float, result: Result, growths: list[F64]) -> None:
        self.model, self.t0, self.t1, self.result, self.growths = model, t0, t1, result, growths

    def __repr__(self) -> str:
        return f"<mapuot.wot.Coupling day {self.t0:g} to {self.t1:g}: {self.result!r}>"

    @property
    def growth(self) -> Any:
        """Growth per day of each cell of day t0, (m,), from the last iteration."""
        return self.model._named(self.growths[-1], self.t0)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.result.problem.shape

    def of_days(self, values: Any, name: str = "values") -> tuple[Any, Any]:
        """Return (values of day t0's cells, values of day t1's cells), for pictures of the coupling.

        ``values``: the name of a column of ``obs`` or of a matrix of ``obsm``, an array for all cells of the model, or
        a pair of arrays, which is returned as it is.
        """
        model = self.model
        if isinstance(values, (tuple, list)) and len(values) == 2:
            return values[0], values[1]
        if isinstance(values, str):
            if model.obsm is not None and values in model.obsm:
                values = model.obsm[values]
            else:
                values = obs_column(model.obs, values, name)
        values = np.asarray(values)
        count = len(model.days)
        if values.ndim == 0 or len(values) != count:
            raise ValueError(f"{name} must be a pair, or values of all {count} cells, got shape {values.shape}")
        return values[model.days == self.t0], values[model.days == self.t1]

    def push_forward(self, p: ArrayLike) -> Any:
        """Return ``p @ coupling``: where the mass p, (m,) or (m, k), of day t0 goes, not normalised."""
        found = self.result.apply_transpose(self.model._of_day(p, self.t0, "p"))
        return self.model._named(np.asarray(found), self.t1)

    def pull_back(self, q: ArrayLike) -> Any:
        """Return ``coupling @ q``: where the mass q, (n,) or (n, k), of day t1 came from, not normalised."""
        found = self.result.apply(self.model._of_day(q, self.t1, "q"))
        return self.model._named(np.asarray(found), self.t0)

    def fates(self, labels: ArrayLike) -> tuple[Any, Any]:
        """Return (classes, shares): the shares (m, classes) of day t1's labels among each cell's descendants."""
        classes, shares = self.result.pull(self.model._labels(labels, self.t1, "labels"))
        return classes, self.model._named(shares, self.t0, classes)

    def transition_table(self, labels0: ArrayLike, labels1: ArrayLike | None = None) -> tuple[Any, Any, Any]:
        """Return (classes on t0, classes on t1, mass moved from each to each); labels1 is labels0 by default.

        The mass is a DataFrame if the model was made from an AnnData.
        """
        y0 = self.model._labels(labels0, self.t0, "labels0")
        y1 = self.model._labels(labels0 if labels1 is None else labels1, self.t1, "labels1")
        (c0, i0), (c1, i1) = (np.unique(y, return_inverse=True) for y in (y0, y1))
        mass = np.eye(len(c0))[i0].T @ np.asarray(self.result.apply(np.eye(len(c1))[i1]))
        return c0, c1, self.model._framed(mass, c0, c1)

    def to_anndata(self, keep: float | None = None) -> Any:
        """Return the coupling in wot's form: an AnnData with cells of day t0 as obs and cells of day t1 as var.

        ``keep``: store the fewest entries that hold this share of the mass. Default: all.
        """
        try:
            from anndata import AnnData  # noqa: PLC0415 - optional
        except ImportError as error:
            raise ImportError("to_anndata needs anndata: pip install anndata") from error
        if keep is None:
            plan = np.asarray(self.result.plan)
        else:
            plan = sparse.csr_matrix(self.sparse(keep))
        obs, var = (self.model._cells(t) for t in (self.t0, self.t1))
        return AnnData(plan, obs=obs, var=var)

    def sparse(self, keep: float = 0.99) -> Any:
        """Return the fewest entries that hold this share of the mass, a SciPy CSR array."""
        return self.result.sparse(keep=keep)


class OTModel(Hints):
    """Model of a time course of cells: couplings between its days, each solved on first use.

    Parameters
    ----------
    data, days : AnnData, or (cells, features) array; (cells,) array or name of a column of obs, optional
        The cells of all days, and the day of each; by default ``data.obs[day_field]``. Days are numbers, or time
        differences (timedelta), read as days. Cells with day NaN are left out.
    growth : (cells,) array, name of a column of obs, or a pair of gene sets, optional
        Growth of each cell per day, >= 0; a cell of growth 0 dies. Default: ``data.obs[cell_growth_rate_field]`` if it
        exists, else 1. A pair (birth, death) gives the growth ``exp(beta - delta)`` with wot's rates of birth and
        death. Each member is (cells,) scores, the name of a column of obs, or a list of genes of ``data.var_names``.
        The rates are logistic curves of the scores, from .3 to 1.7 per day, with the middle at scores of .25 and .1.
        The score of a list is the mean of its genes' z-scores, cut at 5; missing genes are left out, with a warning.
    day_field, cell_growth_rate_field : str
        wot's names of the columns of ``data.obs``.
    representation : str, optional
        Name in ``data.obsm`` of coordinates to use without PCA, instead of ``data.X``.
    local_pca : int
        Number of principal components, computed for both days of a coupling together. 0, or more than the number of
        features, uses the features themselves.
    epsilon, lambda1, lambda2 : float > 0; float or inf
        Entropic regularisation, and penalties of the rows (growth) and of the columns, in units of the scaled cost.
    tau_a, tau_b : float in (0, 1], optional
        moscot's form of the penalties: ``lambda = epsilon tau / (1 - tau)``; 1 is balanced.
    growth_iters : int
        Number of solves of a coupling; each uses the growth found by the previous one.
    scale_cost : {"median", "mean", "max"} or float
        The divisor of squared distances. wot uses the median, moscot the mean.
    reference : {"uniform", "product"}
        Reference measure of the entropy: constant, as in wot and (up to a factor) in moscot, or a b^T.
    **options
        Further arguments of `mapuot.solve`: tol, threads, backend and so on.

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

    @hinted_onward(solve)
    def __init__(
        self,
        data: Any,
        days: ArrayLike | None = None,
        growth: ArrayLike | None = None,
        *,
        day_field: str = "day",
        cell_growth_rate_field: str = "cell_growth_rate",
        representation: str | None = None,
        local_pca: int = 30,
        epsilon: float = 0.05,
        lambda1: float = 1.0,
        lambda2: float = 50.0,
        tau_a: float | None = None,
        tau_b: float | None = None,
        growth_iters: int = 1,
        scale_cost: Statistic | None = "median",
        reference: str = "uniform",
        **options: Any,
    ) -> None:
        self.local_pca = as_count(local_pca, "local_pca", least=0)
        self.epsilon = as_positive(epsilon, "epsilon")
        self.lambda1 = as_lambda(lambda1, tau_a, self.epsilon, ("lambda1", "tau_a"))
        self.lambda2 = as_lambda(lambda2, tau_b, self.epsilon, ("lambda2", "tau_b"))
        self.growth_iters = as_count(growth_iters, "growth_iters")
        if isinstance(scale_cost, str):
            self.scale_cost: Any = as_choice(scale_cost, "scale_cost", SCALES)
        else:
            self.scale_cost = None
        self.scale_cost = self.scale_cost or as_positive(scale_cost, "scale_cost")
        self.reference = as_choice(reference, "reference", ("uniform", "product"))
        self.options = options
        self.X = coordinates_of(data, representation)
        if representation is not None:
            self.local_pca = 0
        count = self.X.shape[0]
        names = getattr(data, "obs_names", None)
        self.obs = getattr(data, "obs", None)
        self.obsm = getattr(data, "obsm", None)
        self.names = names if hasattr(names, "isin") else None
        given_days = column(data, days, day_field, count, "days")
        if given_days is None:
            text = f"days must be given, or data must be an AnnData with obs[{day_field!r}]"
            if self.obs is not None:
                text += f": pass days= the name of one of its columns, {shown([*self.obs])}"
            raise ValueError(text)
        self.days = as_days(*given_days)
        if np.isinf(self.days).any():
            raise ValueError(f"days must be finite, or NaN, got {self.days[np.isinf(self.days)][0]:g}")
        if isinstance(growth, tuple):
            growth = growth_of(data, growth, count)
        given_growth = column(data, growth, cell_growth_rate_field, count, "growth")
        if given_growth is None:
            self.growth = np.ones(count)
        else:
            self.growth = as_column(*given_growth)
        has_day = ~np.isnan(self.days)
        wrong = has_day & ~(np.isfinite(self.growth) & (self.growth >= 0))
        if wrong.any():
            k = int(np.argmax(wrong))
            raise ValueError(f"growth must be finite and >= 0, got {self.growth[k]:g} for {self._cell(k)}")
        _, first = np.unique(self.days[has_day], return_index=True)
        self.timepoints = [float(t) for t in self.days[has_day][first]]
        self.given_days = list(np.asarray(given_days[0])[has_day][first])  # keys of CellRank's couplings
        self.couplings: dict[tuple[float, float], Coupling] = {}

    _parts: ClassVar = {"coupling(t0, t1)": Coupling, "coupling(t0, t1).result": Result}

    def __repr__(self) -> str:
        days = ", ".join(f"{t:g} ({int((self.days == t).sum())} cells)" for t in self.timepoints)
        penalties = f"lambda1 {self.lambda1:g}, lambda2 {self.lambda2:g}"
        return f"<mapuot.wot.OTModel days {days}, epsilon {self.epsilon:g}, {penalties}>"

    def coupling(self, t0: float, t1: float) -> Coupling:
        """Return the coupling of day t0 with day t1, solved on first use and cached."""
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
        here = self.days == t0
        cost = self._cost(self._points(t0), self._points(t1))
        m, n = cost.shape
        step = t1 - t0
        with np.errstate(over="ignore"):
            mass = self.growth[here] ** step
        if not np.isfinite(mass.sum()):
            raise ValueError(f"growth must be so small that cells have finite masses after {step:g} days")
        if not mass.sum() > 0:
            raise ValueError(f"growth must be > 0 for some cell of day {t0:g}: all of them die")
        growths = [self.growth[here]]
        result = None
        for _ in range(self.growth_iters):
            b = np.full(n, mass.sum() / n)
            if self.reference == "product":
                c: Any = "product"
            else:
                c = np.broadcast_to(1.0 / n, (m, n))
            reg_m = self.lambda1, self.lambda2
            result = solve(cost, mass, b, reg=self.epsilon, reg_m=reg_m, reference=c, warm_start=result, **self.options)
            mass = np.asarray(result.row_marginal)
            growths.append(mass ** (1.0 / step))
        assert result is not None
        return Coupling(self, t0, t1, result, growths)

    def _points(self, day: float) -> Any:
        """Return the coordinates of the cells of a day, in float64; sparse if the data is sparse."""
        index = np.flatnonzero(self.days == day)
        X: Any = self.X[index]
        if is_sparse(X):
            X = X.astype(np.float64)
        else:
            X = as_column(X, "data")
        finite = np.isfinite(X.data if is_sparse(X) else X)
        if not finite.all():
            if is_sparse(X):
                wrong = X.tocoo().row[~np.isfinite(X.tocoo().data)]
            else:
                wrong = np.flatnonzero(~finite.all(1))
            cell = self._cell(index[wrong[0]])
            raise ValueError(
                f"data must not hold NaN or inf, got some in {len({*wrong})} cells of day {day:g}, first {cell}"
            )
        return X

    def _cost(self, x: Any, y: Any) -> Any:
        if 0 < self.local_pca <= x.shape[1]:
            x, y = components(x, y, self.local_pca)
        x, y = (z.toarray() if is_sparse(z) else z for z in (x, y))
        cloud = PointCloud(x, y)
        if len(x) * len(y) <= POINTS.most_formed:
            M = np.asarray(cloud)
            return M / self._scale_of(M)
        rng = np.random.default_rng(0)
        i = rng.integers(0, len(x), SAMPLED)
        j = rng.integers(0, len(y), SAMPLED)
        return PointCloud(x, y, scale=1.0 / self._scale_of(((x[i] - y[j]) ** 2).sum(1)))

    def _scale_of(self, costs: F64) -> float:
        if not isinstance(self.scale_cost, str):
            return float(self.scale_cost)
        return as_positive(SCALES[self.scale_cost](costs), f"the {self.scale_cost} of the costs")

    def _steps(self, t0: float, t1: float) -> list[tuple[float, float]]:
        """Return the pairs of consecutive days from t0 to t1."""
        for name, t in (("t0", t0), ("t1", t1)):
            if as_float(t, name) not in self.timepoints:
                raise ValueError(f"{name} must be one of the days {self.timepoints}, got {t:g}")
        if t0 == t1:
            raise ValueError(f"t0 and t1 must be two days, got {t0:g} twice")
        return [*pairwise(t for t in self.timepoints if t0 <= t <= t1)]

    def descendants(self, population: ArrayLike, t0: float, t1: float) -> Any:
        """Return the shares (sum 1) of day t1's cells among the descendants of cells of day t0.

        ``population``: weights or a mask for the cells of day t0 or for all cells (other days are ignored), or names of
        cells. The shares have the names of the cells if the model was made from an AnnData.
        """
        steps = self._steps(t0, t1)
        if t0 > t1:
            raise ValueError(f"t1 must be after t0: descendants(population, {t1:g}, {t0:g}) goes from {t1:g} to {t0:g}")
        return self._named(self._followed(population, t0, steps, Result.apply_transpose), t1)

    def ancestors(self, population: ArrayLike, t1: float, t0: float) -> Any:
        """Return the shares (sum 1) of day t0's cells among the ancestors of cells of day t1, as `descendants` does."""
        steps = self._steps(t0, t1)[::-1]
        if t0 > t1:
            raise ValueError(
                f"t1, the later day, comes first: ancestors(population, {t0:g}, {t1:g}) goes from {t0:g} back to {t1:g}"
            )
        return self._named(self._followed(population, t1, steps, Result.apply), t0)

    def transition_table(self, labels: ArrayLike, t0: float, t1: float) -> tuple[Any, Any, Any]:
        """Return (classes on t0, classes on t1, shares) of labels: each class of day t0 followed to day t1.

        ``labels``: the name of a column of obs, or (cells,) labels of all cells. A row has the shares of the classes
        among the `descendants` of one class; its sum is 1. It is a DataFrame for a model made from an AnnData.
        """
        y0, y1 = (self._labels(labels, t, "labels") for t in (t0, t1))
        (c0, _), (c1, place) = (np.unique(y, return_inverse=True) for y in (y0, y1))
        shares = [np.bincount(place, np.asarray(self.descendants(y0 == c, t0, t1)), len(c1)) for c in c0]
        return c0, c1, self._framed(np.array(shares), c0, c1)

    def to_cellrank(self, keep: float | None = None) -> dict[tuple[Any, Any], Any]:
        """Return {(day, next day): coupling}, the ``couplings`` of CellRank's ``RealTimeKernel``.

        The days are as in the column of ``obs``; `Coupling.to_anndata` makes the couplings with ``keep``.
        """
        days = dict(zip(self.timepoints, self.given_days, strict=True))
        return {(days[s], days[t]): self.coupling(s, t).to_anndata(keep) for s, t in pairwise(self.timepoints)}

    def _followed(self, population: Any, day: float, steps: Any, move: Callable[[Result, F64], Any]) -> F64:
        """Follow cells of a day through consecutive couplings, in shares of the moved mass."""
        weights = self._of_day(population, day, "population")
        count = int((self.days == day).sum())
        wanted = f"{count} weights >= 0 or a mask of the cells of day {day:g}, with a cell in it"
        p: F64 = np.asarray(as_numbers(weights, "population", wanted, (count,), least=0.0), np.float64)
        if not p.any():
            raise ValueError(f"population must be {wanted}, got {shown(population)}")
        p = p / p.max()  # sums of 1e308 are inf
        p = p / p.sum()
        for pair in steps:
            result = self.coupling(*pair).result
            moved = np.asarray(move(result, p))
            p = moved if moved.sum() > LEAST_MOVED else shares_by_exponents(result, p, move is Result.apply_transpose)
            if not p.sum() > 0:
                raise ValueError("population must have mass that moves: all of it is left behind")
            p = p / p.sum()
        return p

    def _of_day(self, given: Any, day: float, name: str) -> Any:
        """Return weights of a day's cells, from weights of these or of all cells, by place or name, or from names."""
        here = self.days == day
        if hasattr(given, "obs_names"):  # an AnnData of these cells
            given = given.obs_names
        array = np.atleast_1d(as_array(given, name))
        is_table = hasattr(given, "reindex") and hasattr(given, "index")
        if self.names is not None and is_table and given.index.isin(self.names).all() and array.dtype.kind in "fiub":
            place = given.index.get_indexer(self.names[here])
            return np.where((place >= 0).reshape(-1, *[1] * (array.ndim - 1)), array[place], 0)
        if array.dtype.kind in "OUT":
            if self.names is None:
                raise TypeError(f"{name} must be numbers: the data has no names of cells, got {shown(given)}")
            unknown = [x for x in array if x not in self.names]
            if unknown:
                raise ValueError(f"{name} must be names of cells, got {str(unknown[0])!r}{self._mask_of(unknown[0])}")
            return np.asarray(self.names[here].isin(array), np.float64)
        if len(array) == len(here):
            return array[here]
        return array

    def _mask_of(self, label: Any) -> str:
        """Return the end of a message: the mask of the cells whose label was given in place of a cell's name."""
        columns = [] if self.obs is None else [name for name in self.obs if (self.obs[name] == label).any()]
        if not columns:
            return ""
        return f": for the cells of a label pass the mask obs[{columns[0]!r}] == {str(label)!r}"

    def _labels(self, labels: Any, day: float, name: str) -> Any:
        """Return the labels of a day's cells, from a column of obs, or from labels of these or of all cells."""
        here = self.days == day
        if isinstance(labels, str):
            labels = obs_column(self.obs, labels, name)
        labels = np.asarray(labels)
        if labels.shape == here.shape:
            labels = labels[here]
        return as_labels(labels, int(here.sum()), name)

    def _cell(self, k: int) -> str:
        if self.names is None:
            return f"cell {k}"
        return f"cell {self.names[k]!r}"

    def _cells(self, day: float) -> Any:
        """Return the rows of ``obs`` of a day; None if the data has no names."""
        if self.names is None or self.obs is None:
            return None
        return self.obs[self.days == day]

    def _named(self, values: F64, day: float, columns: Any = None) -> Any:
        """Attach the names of a day's cells to per-cell numbers, if the data has names."""
        if self.names is None:
            return values
        from pandas import DataFrame, Series  # noqa: PLC0415 - AnnData needs it

        index = self.names[self.days == day]
        if values.ndim == 1:
            return Series(values, index)
        return DataFrame(values, index, columns)

    def _framed(self, table: F64, rows: Any, columns: Any) -> Any:
        if self.names is None:
            return table
        from pandas import DataFrame  # noqa: PLC0415 - AnnData needs it

        return DataFrame(table, rows, columns)


def as_lambda(value: Any, tau: Any, epsilon: float, names: tuple[str, str]) -> float:
    if tau is None:
        return as_rho(value, names[0])
    share = as_float(tau, names[1])
    if not 0 < share <= 1:
        raise ValueError(f"{names[1]} must be in (0, 1], got {share}")
    if share == 1:
        return math.inf
    return epsilon * share / (1 - share)


def growth_of(data: Any, pair: tuple[Any, ...], count: int) -> F64:
    """Return the growth of each cell per day, from the scores of a birth and a death signature."""
    if len(pair) != 2:
        raise ValueError(f"growth must be (cells,) numbers or a pair (birth, death), got {len(pair)} of them")
    birth, death = (score(data, genes, count, f"growth[{k}]") for k, genes in enumerate(pair))
    rates = ((birth, 0.25, 0.5), (death, 0.1, 0.2))  # score, centre and width of a logistic curve
    with np.errstate(over="ignore"):
        beta, delta = (0.3 + 1.4 / (1 + np.exp(-4 / width * (p - centre))) for p, centre, width in rates)
    return np.asarray(np.exp(beta - delta))


def score(data: Any, genes: Any, count: int, name: str) -> F64:
    """Return given scores, or the mean over genes of their z-scores, cut at 5 as in wot."""
    if isinstance(genes, str) or as_array(genes, name).dtype.kind not in "UTO":
        return as_column(*column(data, genes, "", count, name))
    column_of = {gene: k for k, gene in enumerate(getattr(data, "var_names", ()))}
    there = [column_of[gene] for gene in genes if gene in column_of]
    missing = [str(gene) for gene in genes if gene not in column_of]
    if not there:
        raise ValueError(f"{name} must be names of genes in data.var_names, got {shown(missing)}")
    if missing:
        warn(
            f"{name}: {len(missing)} of {len(genes)} genes are not in data.var_names and are left out: {shown(missing)}"
        )
    X = data.X[:, there]
    X = as_column(X.toarray() if is_sparse(X) else X, "data")
    deviation = X.std(0)
    return np.asarray(np.clip((X - X.mean(0)) / np.where(deviation > 0, deviation, 1.0), -5, 5).mean(1))


def coordinates_of(data: Any, representation: str | None) -> Any:
    """Return the (cells, features) matrix of the data: X, the data itself, or a matrix of obsm."""
    if representation is None:
        X = getattr(data, "X", data)
        if X is None:
            raise ValueError("data must have X, or representation must name a matrix of data.obsm")
        if is_sparse(X) or (hasattr(X, "shape") and not hasattr(X, "iloc")):
            return X
        return as_array(X, "data")
    keys = [*getattr(data, "obsm", ())]
    if representation not in keys:
        raise ValueError(f"representation must be a matrix of data.obsm, {shown(keys)}, got {representation!r}")
    return as_array(data.obsm[representation], f"obsm[{representation!r}]")


def obs_column(obs: Any, field: str, name: str) -> Any:
    if obs is None or field not in obs:
        if obs is not None:
            choices = shown([*obs])
        else:
            choices = "which the data has not"
        raise ValueError(f"{name} must be (cells,) values or a column of obs, {choices}, got {field!r}")
    return obs[field]


def column(data: Any, given: Any, field: str, count: int, name: str) -> Any:
    """Return (values, their name), given or from a column of ``data.obs``; None if there is neither."""
    obs = getattr(data, "obs", None)
    if given is None:
        if obs is None or field not in obs:
            return None
        given = field
    if isinstance(given, str):
        given, name = obs_column(obs, given, name), f"{name} (obs[{given!r}])"
    values = as_array(given, name)
    if values.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got {values.shape}")
    return values, name


def as_column(values: Any, name: str) -> F64:
    values = as_array(values, name)
    if values.dtype.kind in "OUT" and values.size:
        raise TypeError(f"{name} must hold numbers, got {str(values.flat[0])!r}")
    check_kind(values, name)
    return np.asarray(values, np.float64)


def as_days(values: Any, name: str) -> F64:
    """Return days as numbers; texts are read as numbers, time differences in days."""
    if values.dtype.kind == "m":
        return np.asarray(values / np.timedelta64(1, "D"), np.float64)
    if values.dtype.kind == "M":
        raise TypeError(f"{name} must be numbers of days, got dates: subtract the first of them")
    if values.dtype.kind not in "OUT":
        return as_column(values, name)
    days = np.full(len(values), np.nan)
    missing = is_missing(values)
    for k in np.flatnonzero(~missing):
        try:
            days[k] = float(values[k])
        except (TypeError, ValueError) as error:
            word = str(values[k])
            cure = number_of_text(values[~missing], word)
            raise ValueError(f"{name} must be numbers of days, got {word!r}: {cure}") from error
    return days


def number_of_text(values: Any, word: str) -> str:
    """Return how to make numbers of texts such as 'E8.5' and 'E9.5': by their common beginning, or one by one."""
    words = sorted({str(value) for value in values})
    start = re.split(r"[\d.+-]", words[0], maxsplit=1)[0]
    if start and all(re.fullmatch(re.escape(start) + r"\d+(\.\d*)?", one) for one in words):
        return f"pass .astype(str).str.removeprefix({start!r}).astype(float) of the column"
    return f"give each its number, as .map({{{word!r}: ...}}) of pandas does"


def components(x: Any, y: Any, count: int) -> tuple[F64, F64]:
    """Project both days onto their common principal components; each cell is centred first, as in wot.

    The first components are found by products with the data, which may be sparse, and is not copied to be centred.
    """
    if is_sparse(x):
        both: Any = sparse.vstack([x, y], "csr")
    else:
        both = np.vstack([x, y])
    mean = np.asarray(both.mean(0)).ravel()
    level = np.asarray(both.mean(1)).ravel() - mean.mean()
    found = None
    if count * FEW_COMPONENTS <= min(both.shape):
        centred = LinearOperator(
            both.shape, dtype=np.float64, matvec=lambda v: both @ v.ravel() - mean @ v.ravel() - level * v.sum(),
            rmatvec=lambda w: both.T @ w.ravel() - mean * w.sum() - level @ w.ravel(),
        )  # fmt: skip
        with suppress(ArpackError):  # for example if all cells are equal
            found = svds(centred, count, v0=np.random.default_rng(0).normal(size=min(both.shape)))
    if found is None:
        if is_sparse(both):
            both = both.toarray()
        found = np.linalg.svd(both - mean - level[:, None], full_matrices=False)
    u, s, _ = found
    order = np.argsort(-s)[:count]
    scores = u[:, order] * s[order]
    return scores[: x.shape[0]], scores[x.shape[0] :]
