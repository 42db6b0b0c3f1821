"""Types of arguments that users give: words, masses, penalties and costs."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

Method = Literal["auto", "translation_invariant", "sinkhorn", "map-uot"]
Penalty = Literal["kl", "balanced", "tv", "l2", "range"]
Precision = Literal["auto", "float64", "mixed"]
BackendName = Literal["auto", "cpu", "cuda", "reference"]
Schedule = Literal["auto", "static"]
Penalties = Penalty | tuple[Penalty, Penalty]  # of both sides, or (rows, columns)
MetricName = Literal["sqeuclidean", "euclidean", "cityblock", "cosine", "wfr", "inner"]
SideName = Literal["rows", "cols"]
DrawMethod = Literal["independent", "systematic", "rows"]
Statistic = Literal["median", "mean", "std", "max"]  # unit of reg and reg_m
MassStatistic = Statistic | Literal["weighted_median", "weighted_mean"]  # of one problem: masses may weigh the costs
MarginalPenalty = ArrayLike | tuple[ArrayLike, ArrayLike]  # one for both sides, or (rows, columns); a number or (m,)


class SparseMatrix(Protocol):
    """A matrix of scipy.sparse or cupyx.scipy.sparse."""

    def tocsr(self, *args: Any, **named: Any) -> Any:
        """Return the matrix by rows."""


FilePath = str | os.PathLike[str]
Seed = int | np.random.Generator | None
Reference = ArrayLike | SparseMatrix | Callable[[int, int], Any] | Literal["product", "uniform"]
# An array, a `PointCloud` or `Grid` (both convert to an array), stored pairs, rows on request, or a file.
CostLike = ArrayLike | SparseMatrix | Callable[[int, int], Any] | FilePath
Costs = CostLike | Sequence[CostLike]  # of a batch
