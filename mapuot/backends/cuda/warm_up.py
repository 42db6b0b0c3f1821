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
from . import plain
from .kernels import (
    NARROW_SHAPES,
    PORTABLE_SHAPES,
    SPREAD_COLUMNS,
    STORES,
    WIDE_SHAPES,
    Job,
    finish_job,
    memory_for,
    portable_shape,
    shape_options,
    together,
)
from .launch import device_limits, persistent_jobs
from .points import DIM, EXPANDED, sums_job
from .stream import stream_job

KL = (True, True)
DTYPES = ("float32", "float64")  # of K, and of M


def pass_jobs(n: int, dtype: str, persistent: bool) -> list[Job]:
    if persistent:
        return persistent_jobs(n, n, dtype, KL)
    shape = portable_shape(n, dtype)
    held = {"MEMORY": memory_for(n, n, 8)}
    return both_halves("gather_sums", shape_options(shape, dtype, KL, **held)) if shape else []


def both_halves(function: str, options: dict[str, int]) -> list[Job]:
    return [("portable.cu", function, options), finish_job(options)]


def point_jobs(d: int, memory: int) -> list[Job]:
    """List first passes over squared distances, last ones, and what they are balanced by."""
    jobs = [sums_job(KL, memory, d, True, FORMS["squares"]), sums_job(KL, memory, d, False, EXPANDED, QUICK=1)]
    jobs.append(sums_job(KL, memory, d, False, METRICS["sqeuclidean"].number, TOPS=1))
    return [job for _, function, options in jobs for job in both_halves(function, options)]


def jobs() -> list[Job]:
    """List each file with its options, once."""
    persistent = device_limits(cp.cuda.Device().id)[0] >= 90
    shapes = (*NARROW_SHAPES, *WIDE_SHAPES) if persistent else PORTABLE_SHAPES
    widths = sorted({min(shape.width, SPREAD_COLUMNS) for shape in shapes})
    widths += [1 << k for k in range(SPREAD_COLUMNS.bit_length(), 18)] if persistent else []  # those of clusters
    found = [job for n in widths for dtype in DTYPES for job in pass_jobs(n, dtype, persistent)]
    for dtype in DTYPES:
        M = SimpleNamespace(dtype=np.dtype(dtype))
        found += [stream_job("build_kernel", M, None, STORES[store]) for store in DTYPES]
        found += [job for store in DTYPES for job in plain.jobs(M.dtype, store)]
        found += [
            ("coarse.cu", "nearest", {"STORE": STORES[store], "COST": int(dtype == "float32")}) for store in DTYPES
        ]
    found += [job for d in range(1, DIM + 1) for memory in MEMORY for job in point_jobs(d, memory)]
    found.append(("point_costs.cu", "point_costs", {"METRIC": METRICS["sqeuclidean"].number, "PLAN": 0, "STORE": 0}))
    return list({(file, tuple(sorted(options.items()))): (file, f, options) for file, f, options in found}.values())


def warm_up() -> int:
    """Compile; how many files."""
    found = jobs()
    together(found)
    return len(found)
