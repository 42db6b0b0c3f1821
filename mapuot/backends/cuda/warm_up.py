"""Compile kernels in advance, so that first solves on this device do not wait (``mapuot warm-up``).

CuPy keeps compiled files on disk (CUPY_CACHE_DIR), by source, options and compiler, so that a machine compiles each
once. The wheels for Linux bring them for most GPUs (src_cuda/ahead.py). This module compiles kernels for: square
problems of every shape of the row half, KL or balanced, with costs in float32 and float64; squared distances of points,
over all or kept pairs; batches of some sizes; sparse costs; trees. Other penalties, metrics and sizes of a batch are
compiled on first use.
"""

from types import SimpleNamespace

import cupy as cp
import numpy as np

from ...contract import ANDERSON_DEPTHS
from ...problem.metrics import METRICS
from ..narrow_points import FORMS
from . import coarse, factored, graph_solve, marginals
from .batch import small_job, step_options
from .kernels import (
    ALONE,
    ITEMSIZE,
    MODULES,
    NARROW_SHAPES,
    PORTABLE_SHAPES,
    STORES,
    WIDE_SHAPES,
    Job,
    anderson_depth_for,
    portable_jobs,
    portable_shape,
    shape_options,
    strips_for,
    together,
)
from .launch import BULK, ROW_KERNELS, device_limits, persistent_jobs
from .points import DIM, EXPANDED, STEP, WIDE_PIECE, WIDE_PRODUCTS, depth_of, ends_of, sizes_of, sums_job
from .settings import DEVICE_LAUNCHES
from .sparse import CLUSTER, OWN, pair_options
from .stream import PLAIN, stream_job

KL = (True, True)
DTYPES = ("float32", "float64")  # of K, and of M
DEEP = 8, 10, 30, 50, 64  # dimensions; their tiles serve most other dimensions, too
BATCHED = 32, 64, 128  # points of a side of small problems
PLACES = 2, 3  # dimensions of the points of batches of clouds; in more than 12 dimensions their costs are formed
BOXES = 32, 64  # points of a box, where pairs are skipped
PROCESSORS, SHARED, LONG = 132, 227 << 10, (256, 768, 1280, 1792, 4096, 8192, 12288, 16384)  # of an H200; columns of K


def point_jobs(d: int, depth: int, wide: bool) -> list[Job]:
    """List float32, float64 and balancing kernels of squared distances, over all, half or kept pairs."""
    few, number, jobs = d <= DIM, METRICS["sqeuclidean"].number, list[Job]()
    kinds: list[tuple[str, int, dict[str, int]]] = [("float32", FORMS["squares" if few else "products"], {})]
    kinds += [("float64", EXPANDED, {"QUICK": quick}) for quick in (1, 2)]
    if few:
        variants = [{}, {"HALVED": 1}, *({"KEPT": unit} for unit in BOXES)]
        tops = [("float64", number, {"TOPS": 1})]
    else:
        variants = [{}]
        kinds.append(("float32", FORMS["products"], {"PRODUCTS": 1}))
        tops = [("float32", FORMS["products"], {"TOPS": 1} | more) for more in ({}, {"PRODUCTS": 1})]
    for variant in variants:
        for dtype, form, more in [*kinds, *([] if "HALVED" in variant else tops)]:
            if "KEPT" in variant and more.get("QUICK") == 2:
                continue
            narrow, part = dtype == "float32", variant if few else {"DEPTH": depth_of(d, dtype)}
            if narrow and not few:
                part = {"STEPS": -(-d // STEP)}
            elif wide and form == EXPANDED and not few:
                part = {"WIDE_CHUNKS": -(-d // WIDE_PIECE)}
            if unit := variant.get("KEPT"):
                part = {"KEPT": 1, "SPLIT": 32 * sizes_of(d, narrow, False, True)[0] // unit}
            jobs.append(sums_job(KL, depth, d, narrow, form, **more, **part))
    return [job for _, sums, options in jobs for job in portable_jobs(options, sums, *ends_of(options), "gather_sums")]


def tree_jobs(bulk: bool) -> list[Job]:
    """List the kernels of passes over a tree, and of single reads of K in the shapes of an H200."""
    files = ("tree_pass.cu", "open_pass"), ("differences.cu", "products")
    found = [*marginals.JOBS, *((*file, {"STORE": 0}) for file in files)]
    for dtype in DTYPES if bulk else ():
        shapes = (strips_for(n, n, ITEMSIZE[dtype], PROCESSORS, SHARED) for n in LONG)
        found += [("fused_pass.cu", "fused_pass", {"STORE": STORES[dtype], **x.options}) for x in shapes if x]
    return found


def pair_jobs(depth: int, bulk: bool) -> list[Job]:
    """List the kernels of passes over stored pairs with fewer than 65536 rows and columns."""
    options = [pair_options("float32", KL, depth, own, held=held) for own in OWN[depth] for held in (False, True)]
    if bulk and depth == ANDERSON_DEPTHS[0]:  # pairs that may carry mass in a dense M
        variants = (1, False), (1, True), (CLUSTER, False)
        options += [pair_options("float64", KL, depth, depth, held=h, CLUSTER=c, LEAPS=1) for c, h in variants]
    return [("iterate.cu", "iterate_pairs", each) for each in options]


def batch_jobs() -> list[Job]:
    """List the kernels of batches of costs and of clouds, by two potentials and by one, as debiased losses need."""
    found = [small_job((n, n), narrow, dtype, one)
             for dtype in DTYPES for n in BATCHED for narrow in (True, False) for one in (False, True)]  # fmt: skip
    square = METRICS["sqeuclidean"]
    points = {"METRIC": square.number, "FORM": FORMS["squares"]}
    for dim in (0, *PLACES):
        own = points if dim else {"METRIC": 0, "FORM": 0}
        for cost in (0, 1) if dim == 0 else (0,):
            macros = {"DIM": dim, **own, "COST": cost, "NARROW": 0, "STORE": 0}
            found += [("batch_made.cu", "batch_made", macros | more) for more in ({}, {"ONE_POTENTIAL": 1})]
    return [*found, ("clouds.cu", "cloud_slopes", {"NORM": 2, "STORE": 0})]


def jobs(capability: int) -> list[Job]:
    """List all kernels with their options."""
    widths = sorted({min(shape.width, DEVICE_LAUNCHES.spread_columns) for shape in (*NARROW_SHAPES, *WIDE_SHAPES)})
    widths += [1 << k for k in range(DEVICE_LAUNCHES.spread_columns.bit_length(), 18)]  # widths of spread rows
    bulk = capability >= BULK
    found = [job for n in widths for dtype in DTYPES for job in persistent_jobs(n, n, dtype, KL, bulk)]
    for shape in PORTABLE_SHAPES:  # passes of one potential
        if found_shape := portable_shape(shape.width, "float32"):
            held = anderson_depth_for(shape.width, shape.width, 4)
            options = shape_options(found_shape, "float32", KL, ANDERSON_DEPTH=held)
            found += portable_jobs(options, *ROW_KERNELS[True], "gather_sums")
    for dtype in DTYPES:
        M, cost = SimpleNamespace(dtype=np.dtype(dtype)), int(dtype == "float32")
        found += [stream_job("build_kernel", M, None, STORES[store]) for store in DTYPES]
        found += [stream_job(function, M, None) for function in sorted(ALONE["stream.cu"] - {"build_kernel"})]
        found += [job for store in DTYPES for job in graph_solve.jobs(M.dtype, store)]
        found += [job for store in STORES.values() for job in coarse.jobs(store, cost)]
        found.append(("batch_products.cu", "weigh", step_options(dtype)))
        stored = {"COST": cost, "SHORT_INDEX": 1}
        found += [("sparse_stream.cu", "sparse_sums", stored | {"STORE": store}) for store in STORES.values()]
    for depth in ANDERSON_DEPTHS:
        found += pair_jobs(depth, bulk)
        found += [job for d in (*range(1, DIM + 1), *DEEP) for job in point_jobs(d, depth, capability >= WIDE_PRODUCTS)]
    metric = {"METRIC": METRICS["sqeuclidean"].number}
    found += [("point_costs.cu", "point_costs", metric | {"PLAN": 0, "STORE": 0}), ("boxes.cu", "box_runs", metric)]
    tables = [("point_tables.cu", "take_points", {"STORE": 0, "COST": cost}) for cost in (0, 1)]
    found += [factored.JOB, *tables, *batch_jobs()]
    return [*found, *tree_jobs(bulk), ("vectors.cu", "evaluate", {"STORE": 0}), ("stream.cu", "join_parts", PLAIN)]


def warm_up() -> int:
    """Compile all kernels; return the number of compiled modules, several for one file of sources."""
    together(jobs(device_limits(cp.cuda.Device().id)[0]))
    return len(MODULES)
