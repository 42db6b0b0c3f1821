"""Many clouds on the device: between which costs those of each problem lie, and derivatives by the points of all.

Device side: src_cuda/clouds.cu and point_costs.cu. Twin of the slopes: backends/cpu/plain.py.
"""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from ...problem.problem import BatchProblem
from .arrays import clouds_tables
from .kernels import kernel

CHUNK_BYTES = 1 << 30  # of the plans that are formed at once


def range_of_clouds(clouds: Any) -> tuple[float, float]:
    """Return bounds on the costs of all problems; raises ValueError where they are not finite."""
    whole, p, (metric, scale) = clouds.whole, len(clouds), clouds.whole.core
    run = kernel("clouds.cu", "cloud_ranges", NORM=int(metric.norm), STORE=0)
    x, y = (cp.ascontiguousarray(z) for z in (whole.rows, clouds.targets))
    found = cp.empty((2, p))
    room = 4 * 8 * whole.dim
    run.max_dynamic_shared_size_bytes = max(run.max_dynamic_shared_size_bytes, room)
    run((p,), (128,), (x, y, clouds.places_there, np.int64(whole.dim), found), shared_mem=room)
    least, most = found.get()
    with np.errstate(over="ignore"):
        low, high = scale * least.min() ** metric.degree, scale * most.max() ** metric.degree
    if not np.isfinite(high):
        bad = int(np.argmax(~np.isfinite(scale * most**metric.degree)))
        raise ValueError(f"x and y must be finite and so near each other that their costs are, problem {bad} is not")
    return float(low), float(high)


def slopes(task: BatchProblem, exponents: Any, wanted: Any) -> list[Any]:
    """Derivatives by x and by y of all problems, one behind the other; None of what is not wanted.

    ``exponents``: log u + log a and log v + log b, (p, m) and (p, n); the metric is a squared distance. Of points
    around the mean of x they are 2 scale (P 1 x - P y), and alike of the columns, by products with formed plans.
    """
    clouds, (m, n) = task.several, task.shape
    parts: list[list[Any]] = [[], []]
    step = max(1, CHUNK_BYTES // (8 * m * n))
    for i0 in range(0, len(task), step):
        some = slice(i0, i0 + step)
        here = clouds.of(some)
        alpha, beta = (cp.ascontiguousarray(x[some, :k]) for x, k in zip(exponents, here.shape, strict=True))
        P = clouds_tables(here, (alpha, beta, task.reg))
        x, y = (points_of(here, axis) for axis in (0, 1))
        middle = x.mean(1, keepdims=True)
        if here.ragged:
            middle = cp.matmul(cp.asarray(here.inside(0) / here.places[0].count[:, None])[:, None], x)
        x, y = (with_ones(z - middle) for z in (x, y))
        for k, (these, others) in enumerate(((x, y), (y, x))):
            if wanted[k]:
                moved = cp.matmul(P.swapaxes(-1, -2) if k else P, others)
                slope = 2 * clouds.whole.core[1] * (moved[:, :, -1:] * these[:, :, :-1] - moved[:, :, :-1])
                parts[k].append(here.flat_of(slope, k))
    return [(cp.concatenate(part) if len(part) > 1 else part[0]) if part else None for part in parts]


def points_of(clouds: Any, axis: int) -> Any:
    """Return the points of the rows or of the columns of all problems, (p, m, d); behind a smaller cloud any others."""
    points, places, most = (clouds.targets if axis else clouds.whole.rows), clouds.places[axis], clouds.shape[axis]
    first = places.first
    if (first == first[0]).all():
        return cp.broadcast_to(points[first[0] : first[0] + most], (len(clouds), most, points.shape[1]))
    if (places.count == most).all() and (np.diff(first) == most).all():
        return points[first[0] : first[0] + len(clouds) * most].reshape(len(clouds), most, -1)
    at = cp.minimum(cp.asarray(first)[:, None] + cp.arange(most)[None], len(points) - 1)
    return points[at]


def with_ones(points: Any) -> Any:
    """Return the points with a column of ones, whose product is the marginal."""
    table = cp.empty((*points.shape[:2], points.shape[2] + 1))
    table[:, :, :-1] = points
    table[:, :, -1] = 1.0
    return table
