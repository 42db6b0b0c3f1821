"""Compile ahead what first solves on this device would wait for (``mapuot warm-up``).

CuPy keeps compiled files on disk (CUPY_CACHE_DIR), by source, options and compiler, so that a machine compiles each
once. Taken are square problems of every shape of the row half, KL or balanced, costs in float32 and float64, and
squared distances of points in up to four dimensions; what else there is (other penalties, batches, other points,
skipped pairs, sparse costs) is compiled when it is needed.
"""

from types import SimpleNamespace

import cupy as cp
import numpy as np

from ...problem.metrics import METRICS
from ..contract import MEMORY
from ..narrow_points import FORMS
from . import coarse, plain
from .kernels import (
    MODULES,
    NARROW_SHAPES,
    PORTABLE_SHAPES,
    SPREAD_COLUMNS,
    STORES,
    WIDE_SHAPES,
    Job,
    memory_for,
    portable_jobs,
    portable_shape,
    shape_options,
    together,
)
from .launch import ROW_KERNELS, device_limits, persistent_jobs
from .points import DIM, ENDS, EXPANDED, sums_job
from .stream import stream_job

KL = (True, True)
DTYPES = ("float32", "float64")  # of K, and of M


def pass_jobs(n: int, dtype: str, persistent: bool) -> list[Job]:
    if persistent:
        return persistent_jobs(n, n, dtype, KL)
    shape = portable_shape(n, dtype)
    held = {"MEMORY": memory_for(n, n, 8)}
    return portable_jobs(shape_options(shape, dtype, KL, **held), *ROW_KERNELS[True], "gather_sums") if shape else []


def point_jobs(d: int, memory: int) -> list[Job]:
    """List first passes over squared distances, last ones, and what they are balanced by."""
    jobs = [sums_job(KL, memory, d, True, FORMS["squares"]), sums_job(KL, memory, d, False, EXPANDED, QUICK=1)]
    jobs.append(sums_job(KL, memory, d, False, METRICS["sqeuclidean"].number, TOPS=1))
    return [job for _, sums, options in jobs for job in portable_jobs(options, sums, *ENDS, "gather_sums")]


def jobs() -> list[Job]:
    """List each kernel with its options."""
    persistent = device_limits(cp.cuda.Device().id)[0] >= 90
    shapes = (*NARROW_SHAPES, *WIDE_SHAPES) if persistent else PORTABLE_SHAPES
    widths = sorted({min(shape.width, SPREAD_COLUMNS) for shape in shapes})
    widths += [1 << k for k in range(SPREAD_COLUMNS.bit_length(), 18)] if persistent else []  # those of clusters
    found = [job for n in widths for dtype in DTYPES for job in pass_jobs(n, dtype, persistent)]
    for dtype in DTYPES:
        M = SimpleNamespace(dtype=np.dtype(dtype))
        found += [stream_job("build_kernel", M, None, STORES[store]) for store in DTYPES]
        found += [stream_job(function, M, None) for function in ("extrema", "row_max", "plan_sums", "apply", "draw")]
        found += [job for store in DTYPES for job in plain.jobs(M.dtype, store)]
        found += [job for store in STORES.values() for job in coarse.jobs(store, int(dtype == "float32"))]
    found += [job for d in range(1, DIM + 1) for memory in MEMORY for job in point_jobs(d, memory)]
    found.append(("point_costs.cu", "point_costs", {"METRIC": METRICS["sqeuclidean"].number, "PLAN": 0, "STORE": 0}))
    return found


def warm_up() -> int:
    """Compile; how many parts of files."""
    together(jobs())
    return len(MODULES)
