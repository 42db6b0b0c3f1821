"""Many clouds on the device: the range of all costs, and derivatives by the points of all problems.

Device side: src_cuda/batch/clouds.cu and point_costs.cu. Twin of the slopes: backends/cpu/core_solve.py.
"""

from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ...problem.problem import BatchProblem
from .arrays import clouds_tables
from .kernels import kernel

CHUNK_BYTES = 1 << 30  # of the plans that are formed at once


def launch(function: str, clouds: Any, room: int, *more: Any) -> None:
    """Launch a kernel with one block for each problem, and ``room`` bytes of shared memory for each coordinate."""
    whole = clouds.whole
    run = kernel("clouds.cu", function, NORM=int(whole.core[0].norm), STORE=0)
    run.max_dynamic_shared_size_bytes = max(run.max_dynamic_shared_size_bytes, room * whole.dim)
    x, y = (cp.ascontiguousarray(z) for z in (whole.rows, clouds.targets))
    arguments = x, y, clouds.places_there, np.int64(whole.dim)
    run((len(clouds),), (128,), (*arguments, *more), shared_mem=room * whole.dim)


def ranges_of_clouds(clouds: Any) -> F64:
    """Return bounds on the costs of each problem, (2, p); raise ValueError if they are not finite."""
    metric, scale = clouds.whole.core
    distances = cp.empty((2, len(clouds)))
    launch("cloud_ranges", clouds, 32, distances)
    with np.errstate(over="ignore", invalid="ignore"):
        found: F64 = scale * distances.get() ** metric.degree
    bad = ~np.isfinite(found[1])
    if bad.any():
        which = int(bad.argmax())
        raise ValueError(f"x and y must be finite and so near each other that their costs are, problem {which} is not")
    return found


def slopes(task: BatchProblem, exponents: Any, wanted: Any) -> list[Any]:
    """Return derivatives by x and by y for all problems, one problem behind the other; None if not wanted.

    ``exponents``: log u + log a and log v + log b, (p, m) and (p, n); the metric must be a squared distance. For points
    centred at the mean of x, the derivative by x is 2 scale (P 1 x - P y), by products with formed plans; the
    derivative by y uses P^T.
    """
    clouds, d = task.several, task.several.whole.dim
    counts = [places.count for places in clouds.places]
    out = [cp.empty((int(count.sum()), d)) if want else None for count, want in zip(counts, wanted, strict=True)]
    where = cp.asarray(np.stack([x for count in counts for x in (np.cumsum(count) - count, count)]))
    step = max(1, CHUNK_BYTES // (8 * task.shape[0] * task.shape[1]))
    regs = cp.asarray(np.broadcast_to(task.regs, (len(task),)))
    for i0 in range(0, len(task), step):
        some = slice(i0, min(i0 + step, len(task)))
        here = clouds.of(some)
        m, n = here.shape
        p = len(here)
        alpha, beta = (cp.ascontiguousarray(x[some, :k]) for x, k in zip(exponents, here.shape, strict=True))
        P = clouds_tables(here, (alpha, beta, regs[some]))
        tables = cp.empty((p, m, d + 1)), cp.empty((p, n, d + 1))
        launch("cloud_tables", here, 8, np.int64(m), np.int64(n), *tables)
        run = kernel("clouds.cu", "cloud_slopes", NORM=2, STORE=0)
        for k, to in enumerate(out):
            if to is not None:
                moved = cp.matmul(P.swapaxes(1, 2) if k else P, tables[1 - k])
                places = where[2 * k : 2 * k + 2, some]
                sizes = np.int64(d), np.int64(here.shape[k])
                factor = np.float64(2 * clouds.whole.core[1])
                run((p,), (128,), (tables[k], moved, places[0], places[1], *sizes, factor, to))
    return out
