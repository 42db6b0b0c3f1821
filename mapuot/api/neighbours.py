"""`knn_cost`: the costs between near points of two clouds, as a sparse matrix; the neighbours are SciPy's k-d trees'.

The costs are those of a `PointCloud`, from differences of coordinates: `certify` compares a solve of the one with the
other.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from ..problem.metrics import METRICS
from ..problem.points import PointCosts
from ..problem.validate import as_count, as_threads
from ..processor import default_threads

if TYPE_CHECKING:
    from scipy.sparse import csr_array

BLOCK = 1 << 20  # pairs whose coordinates are gathered at once


def knn_cost(
    x: Any, y: Any, k: int, *, metric: str = "sqeuclidean", scale: float = 1.0, weights: Any = None,
    symmetric: bool = True, threads: int | None = None,
) -> "csr_array":  # fmt: skip
    """Make the sparse cost of each point's k nearest neighbours in the other cloud; all other pairs are forbidden.

    A k-d tree finds the neighbours. It is quick in few dimensions; beyond some 15 it looks at most of the points.

    Parameters
    ----------
    x, y, metric, scale, weights
        As in `PointCloud`.
    k : int
        Neighbours of a point, at most as many as the other cloud has points.
    symmetric : bool
        Store the k points of x nearest to each point of y as well, so that every point has partners. False stores only
        the k points of y nearest to each point of x.
    threads : int, optional
        Default: the cores that this process may use.

    Returns
    -------
    (m, n) csr_array, float64
        Sorted, with at most k (m + n) entries; costs of 0 are stored, too.

    See Also
    --------
    certify, solve

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.random((2000, 2)), rng.random((1500, 2))
    >>> S = mapuot.knn_cost(x, y, 10)
    >>> result = mapuot.solve(S, reg=0.0005, reg_m=1.0)
    >>> result.converged, result.plan.nnz == S.nnz < 35000
    (True, True)
    """
    from scipy import sparse  # noqa: PLC0415 - on first use

    cloud, k = PointCosts(x, y, metric, scale, weights), as_count(k, "k")
    if cloud.core[0].inner:
        raise ValueError("metric must be a distance, whose least costs are those of near points, got 'inner'")
    shape, threads = cloud.shape, as_threads(threads)
    most = min(shape) if symmetric else shape[1]
    if k > most:
        raise ValueError(f"k must be at most {most}, the points of the smaller cloud, got {k}")
    workers = default_threads(k * sum(shape)) if threads is None else threads
    rows, columns = cloud.rows, np.ascontiguousarray(cloud.targets)
    places = pattern(nearest(columns, rows, k, metric, workers), shape)
    if symmetric:
        places = sparse.csr_array(places + pattern(nearest(rows, columns, k, metric, workers), shape[::-1]).T.tocsr())
    places.sort_indices()
    data = np.empty(places.nnz)
    row = np.repeat(np.arange(shape[0]), np.diff(places.indptr))
    for i in range(0, places.nnz, BLOCK):
        part = slice(i, i + BLOCK)
        data[part] = pair_costs(cloud, rows[row[part]], columns[places.indices[part]])
    return sparse.csr_array((data, places.indices, places.indptr), shape=shape)


def nearest(points: Any, queries: Any, k: int, metric: str, workers: int) -> Any:
    """(number of queries, k) indices of points: a metric grows with the distance in its norm."""
    from scipy.spatial import cKDTree  # noqa: PLC0415 - on first use

    _, index = cKDTree(points).query(queries, k, p=METRICS[metric].norm, workers=workers)
    return index.reshape(len(queries), k)


def pattern(index: Any, shape: tuple[int, int]) -> Any:
    """A CSR array with a one for each of these columns in each row."""
    from scipy import sparse  # noqa: PLC0415 - on first use

    start = np.arange(0, index.size + 1, index.shape[1])
    return sparse.csr_array((np.ones(index.size, np.int8), index.ravel(), start), shape=shape)


def pair_costs(cloud: PointCosts, x: Any, y: Any) -> Any:
    """The costs of pairs by the coordinates of their points, as the core makes them."""
    metric, scale = cloud.core
    return scale * metric.between(x, y)
