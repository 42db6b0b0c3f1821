"""Divergences between all pairs of many clouds, of which each is solved with itself once."""

from typing import Any

import numpy as np

from ..backends import host
from ..penalties import F64
from ..problem.clouds import Clouds, Places, PointCloud
from ..problem.scale import scaled
from ..progress import bar as progress_bar
from ..ranks import join
from .batch import solve_batch
from .divergence import check_options

CHUNK_BYTES = 1 << 26  # of the vectors of the problems that are solved at once


def pairwise(
    clouds: Any, masses: Any = None, *, reg: float, reg_m: float, scale_cost: str | None = None,
    metric: str = "sqeuclidean", scale: float = 1.0, weights: Any = None, comm: Any = None,
    progress: bool = False, **options: Any,
) -> F64:  # fmt: skip
    """Compute the debiased Sinkhorn divergences between all pairs of k clouds of points.

    Parameters
    ----------
    clouds : (k, n, d) array, or list of k arrays (n_i, d)
        Points, one in a row; clouds may have any sizes.
    masses : (k, n) array, or list of k vectors, optional
        Masses of the points, >= 0. Default: equal masses that add up to 1 in each cloud.
    reg, reg_m, scale_cost : float; float or inf; {"median", "mean", "max"}, optional
        As in `sinkhorn_divergence`; in units of the cost, or of this one between the points of all clouds.
    metric, scale, weights
        The cost, as in `PointCloud`.
    comm : mpi4py communicator, optional
        Its ranks share the pairs. Each rank gives all clouds and gets all divergences.
    progress : bool
        Show how many pairs are solved.
    **options
        tol, max_passes, precision, threads and backend, as in `solve_batch`.

    Returns
    -------
    divergence : (k, k) array
        Symmetric, with zeros on its diagonal; in units of the cost times mass.

    See Also
    --------
    sinkhorn_divergence, solve_batch

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> clouds = [rng.random((n, 2)) + shift for n, shift in ((30, 0.0), (40, 0.0), (50, 2.0))]
    >>> D = mapuot.pairwise(clouds, reg=0.01, reg_m=1.0)
    >>> bool(D[0, 1] < 0.05 < D[0, 2])
    True
    """
    check_options(options, reg_m)
    ranks = join(comm)
    cloud = PointCloud(clouds, metric=metric, scale=scale, weights=weights)
    if cloud.ndim != 3:
        raise ValueError(f"clouds must hold several clouds of points, got one of shape {cloud.shape}")
    if scale_cost is not None:
        given = {name: x for name, x in locals().items() if name not in ("ranks", "cloud")}
        return scaled(pairwise, given, [cloud._cost.whole])  # type: ignore[no-any-return]
    known = {"reg": reg, "reg_m": reg_m} | options
    table, k = cloud._cost.flattened(masses, None, None)[0], len(cloud)
    table = np.full(cloud.shape[:2], 1.0 / cloud.shape[1]) if table is None else host(np.asarray(table, np.float64))
    value, total = np.zeros((k, k)), table.sum(1)
    pairs = np.stack(np.triu_indices(k, 1), 1)
    pairs = pairs[np.argsort(-cloud._cost.places[0].count[pairs].prod(1), kind="stable")]  # like sizes together
    own, alone = pairs[ranks.rank :: ranks.size], np.arange(k)[ranks.rank :: ranks.size]
    step = max(1, CHUNK_BYTES // (16 * 8 * cloud.shape[1]))
    shown = progress_bar(progress and ranks.rank == 0, total=len(own), desc="mapuot", unit="pair")
    with ranks.together(), shown as bar:
        for these, told in ((np.stack([alone, alone], 1), 0), (own, 1)):
            for i0 in range(0, len(these), step):
                i, j = these[i0 : i0 + step].T
                both = between(cloud, i, j)
                m, n = both._cost.shape
                found = solve_batch(both, table[i, :m], table[j, :n], **known)
                value[i, j] = found.dual
                bar.update(told * len(i))
    value = np.asarray(ranks.sum(value))
    selves = np.diag(value)
    value = value - 0.5 * (selves[:, None] + selves) + 0.5 * reg * (total[:, None] - total) ** 2
    upper: F64 = np.triu(value, 1)
    return upper + upper.T


def between(cloud: PointCloud, i: Any, j: Any) -> PointCloud:
    """Return the costs of problems between clouds i and clouds j; their points are not copied."""
    places = (Places(*(x[which] for x in cloud._cost.places[0])) for which in (i, j))
    found: PointCloud = cloud._of(object.__new__(Clouds)._hold(cloud._cost.whole, *places))
    return found
