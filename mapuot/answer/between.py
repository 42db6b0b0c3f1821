"""Points and masses on the way from the rows of a `PointCloud` to its columns, by the semi-couplings of a plan.

With metric "wfr", a pair at distance d with masses m0 and m1 moves on the geodesic of the cone over the points:

    m(t) = (1 - t)^2 m0 + t^2 m1 + 2 t (1 - t) sqrt(m0 m1) cos d,   tan theta(t) = q sin d / (p + q cos d)

with p = (1 - t) sqrt m0, q = t sqrt m1 and theta the distance from x. Source: Chizat, Peyre, Schmitzer, Vialard 2018.
"""

from typing import Any, NamedTuple

import numpy as np

from ..penalties import F64
from ..problem.grid import GridCosts
from ..problem.metrics import METRICS
from ..problem.validate import as_float, as_share
from .slopes import cloud_of


class Way(NamedTuple):
    """Points and masses at one time, with their velocities and growth rates."""

    points: F64
    masses: F64
    velocity: F64
    growth: F64


def interpolate(result: Any, t: float, keep: float = 0.99) -> Way:
    """Return points and masses at time t between the rows (t = 0) and the columns (t = 1).

    In each pair (i, j), point i sends ``a_i P_ij / r_i`` and point j receives ``b_j P_ij / s_j`` (the semi-couplings).
    Destroyed mass therefore shrinks over time, and created mass grows. Points move on straight lines and masses change
    linearly; with metric "wfr" both follow the Wasserstein-Fisher-Rao geodesic. A point that sends or receives nothing
    stays at its place. At t = 0 and t = 1 the masses add up to the given masses. The cost must be a `PointCloud`, or a
    `Grid`: then the points lie between its nodes.

    Parameters
    ----------
    t : float
        Time, from 0 to 1.
    keep : float
        Use the fewest pairs that hold this share of the mass, in (0, 1].

    Returns
    -------
    Way
        ``points`` (k, d), ``masses`` (k,), ``velocity`` (k, d) and ``growth`` (k,). Velocity is the derivative of the
        points by t, and growth the derivative of the logarithms of the masses by t. Unbalanced flow matching learns
        both.

    References
    ----------
    Chizat, Peyre, Schmitzer, Vialard, Unbalanced optimal transport: dynamic and Kantorovich formulations, 2018.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> result = mapuot.solve_sample([[0.0], [5.0]], [[1.0], [6.0]], reg=0.01, reg_m=1e3)
    >>> result.interpolate(0.5).points.round(2).T
    array([[0.5, 5.5]])
    """
    t = as_float(t, "t")
    keep = as_share(keep, "keep")
    if not 0 <= t <= 1:
        raise ValueError(f"t must be in [0, 1], got {t}")
    cost = result.problem.cost
    if isinstance(cost, GridCosts):
        return straight(result, t, keep, (cost.points(cols=False), cost.points(cols=True)))
    cloud = cloud_of(result)
    if cloud.core[0].unit:
        raise NotImplementedError("interpolate goes straight or along the geodesics of 'wfr', not on a sphere")
    if cloud.core[0].product:
        raise NotImplementedError(f"interpolate is between points of a metric that is a distance, got {cloud.metric!r}")
    geodesics = cloud.core[0] is METRICS["wfr"]
    if not (cloud.core[0].degree or geodesics):
        raise NotImplementedError(f"interpolate goes straight by powers of a distance, got metric {cloud.metric!r}")
    if not geodesics:
        return straight(result, t, keep, (cloud.x, cloud.y))
    x, y, m0, m1 = ends(result, keep, (cloud.x, cloud.y))
    if cloud.weights is None:
        factor = 1.0
    else:
        factor = np.sqrt(cloud.weights)
    return geodesic(x, y, m0, m1, t, np.sqrt((((y - x) * factor) ** 2).sum(1)))


def straight(result: Any, t: float, keep: float, points: tuple[F64, F64]) -> Way:
    """Move the points of both sides on straight lines, and change masses linearly."""
    x, y, m0, m1 = ends(result, keep, points)
    masses = (1 - t) * m0 + t * m1
    return Way((1 - t) * x + t * y, masses, y - x, over(m1 - m0, masses))


def ends(result: Any, keep: float, points: tuple[F64, F64]) -> tuple[F64, F64, F64, F64]:
    """Return where each pair and each lone point begins and ends, and its masses there: x, y, m0, m1."""
    pairs = result.sparse(keep=keep).tocoo()
    i = pairs.row
    j = pairs.col
    P = pairs.data.astype(np.float64)
    (a, m0, lone0), (b, m1, lone1) = (semi(side, k, P) for side, k in zip(result.problem.sides, (i, j), strict=True))
    rows, cols = points
    x = np.concatenate([rows[i], rows[lone0], cols[lone1]])
    y = np.concatenate([cols[j], rows[lone0], cols[lone1]])
    m0 = np.concatenate([m0, a[lone0], np.zeros(len(lone1))])
    m1 = np.concatenate([m1, np.zeros(len(lone0)), b[lone1]])
    return x, y, m0, m1


def semi(side: Any, index: Any, P: F64) -> tuple[F64, F64, Any]:
    """Return the masses of one side, the mass that each pair takes from its point, and the points without a pair."""
    total = np.bincount(index, P, len(side.weight))
    weight = np.asarray(side.weight)
    return weight, P / total[index] * weight[index], np.flatnonzero((total <= 0) & (weight > 0))


def over(x: F64, y: F64) -> F64:
    """Return x / y, and 0 where y is 0."""
    return np.divide(x, y, out=np.zeros_like(y), where=y > 0)


def geodesic(x: F64, y: F64, m0: F64, m1: F64, t: float, d: F64) -> Way:
    """Return the state of pairs at distances d on the geodesics of "wfr"."""
    p = (1 - t) * np.sqrt(m0)
    q = t * np.sqrt(m1)
    masses = p * p + q * q + 2 * p * q * np.cos(d)
    theta = np.arctan2(q * np.sin(d), p + q * np.cos(d))
    along = over(1.0 * (y - x), np.broadcast_to(d[:, None], x.shape).copy())
    speed = over(np.sqrt(m0 * m1) * np.sin(d), masses)  # m theta' is constant in t, as in Kepler's second law
    slope = 2 * (t * m1 - (1 - t) * m0 + (1 - 2 * t) * np.sqrt(m0 * m1) * np.cos(d))
    return Way(x + theta[:, None] * along, masses, speed[:, None] * along, over(slope, masses))
