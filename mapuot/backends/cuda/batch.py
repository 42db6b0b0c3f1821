"""The GPU's batch: a block a problem, every pass inside one launch; many histograms on one large cost as products.

A small problem (m, n <= 128) holds K in registers, in float32 until its sums can tell no more, then in float64, which
certifies. A larger one with a cost of its own makes K in every pass, of its points where these are few numbers, else
of its costs: float32 passes first, then float64 ones. Problems larger than that on one cost make their passes by two
matrix products in float64, all of them together. Costs of clouds are formed here, a chunk of problems at a time. Twin:
backends/cpu/batch.py; device side: src_cuda/batch/batch_narrow.cu, batch.cu, batch_made.cu, batch_products.cu.
"""

import math
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np

from ...contract import BatchEngine, Options
from ...contract import weigh as weigh_on_host
from ...penalties import F64
from ...problem.problem import EXPONENT_ROUNDING, BatchProblem
from ..factored import LevelStart
from ..limits import limits_of
from ..narrow_points import FORMS as NARROW_FORMS
from ..records import STALLED, STATUS, put
from . import backend
from .arrays import FEW, clouds_tables
from .kernels import BATCH_DEPTH, BATCH_KINDS, RECORDS, Job, by_value, kernel, small_options
from .settings import DEVICE_BATCHES

MOST = 128  # rows and columns of a small problem
SAFE_RANGE = 40.0  # most range(M) / reg for a float32 K without absorbed potentials at the start
PRODUCT_RANGE = 500.0  # most range(M) / reg for a float64 K that never absorbs potentials
NARROW_NOISE = 1e-6  # a float64 pass takes as long as ten; at 3e-7 float32 ones crept, 1.3 times as many at reg .001
LEAST_PART = 1024  # of batch_made.cu: sums that parts of the rows have
LONE = 1 << 19  # pairs of a problem: fewer than LONE_PROBLEMS of this size are quicker one by one
LONE_PROBLEMS = 16
CHECK_PASSES = 8  # products between two looks at what still runs
VECTORS = ["columns", "row_absorbed", "v", "u", "row_sums", "sums", "row_scalar", "standing"]
BATCH, REPORT, STANDING = (RECORDS[name] for name in ("Batch", "Report", "Standing"))
STATUS_AT = list(REPORT.fields or ()).index("status")
SCALES = {"scale_limit": 1e100, "most_scale": math.inf}  # float64 all through; a scale beyond it: K is made again


def is_small(task: BatchProblem) -> bool:
    """Tell whether a block keeps K of a problem in registers; K is then made from a matrix."""
    return max(task.shape) <= MOST and (not task.several or forms(task))


def forms(task: BatchProblem) -> bool:
    """Tell whether the matrices of many clouds may be formed."""
    return bool(task.several.may_form.all())


def made_of(task: BatchProblem) -> int | None:
    """Return the dimension of the points from which each pass makes K; 0: from costs, None: a block has no room."""
    clouds = task.several
    dims = [0] if not clouds or forms(task) else []
    if clouds and clouds.whole.dim <= FEW and clouds.whole.core[0].form:
        dims.insert(0, clouds.whole.dim)
    return next((d for d in dims if made_room(task.shape, d) <= DEVICE_BATCHES.room), None)


def made_room(shape: tuple[int, int], dim: int) -> int:
    """Return the bytes of shared memory that a problem takes; twin: room_of of src_cuda/batch/batch_made.cu."""
    m, n = shape
    return 8 * (n + m + max(n, LEAST_PART) + (dim + 2) * (m + n))


def constants(task: BatchProblem, options: Options, reg: float) -> Any:
    record = np.zeros((), BATCH)
    record["m"], record["n"] = task.shape
    limits = limits_of(task, options, "float64", NARROW_NOISE, reg)
    limits["narrow_floor"] *= limits["missed"]
    # log v + log K^T u - log b, of terms as large as M / reg, is what the gap squares and multiplies with rho
    rounding = EXPONENT_ROUNDING * (3 * (task.M_max - task.M_min) + abs(task.M_min)) / reg
    rounding += task.cost.error(task.M_max) / reg
    grows = 1 + math.sqrt((limits["rho_rows"] + limits["rho_cols"]) / reg)
    limits["exponent_error"] = grows * rounding
    record["rounding"] = 2 * grows * EXPONENT_ROUNDING  # of log u, too
    put(limits, SCALES | {"anderson_depth": min(options.anderson_depth, BATCH_DEPTH), "flush": 0.0})
    record["limits"] = limits
    record["k1"] = reg / float(task.rows.rho[0])
    record["fi2"] = 1 / (1 + limits["rate_cols"])
    record["product"] = task.reference == "product"
    record["low"] = task.M_min / reg
    record["safe"] = (task.M_max - task.M_min) / reg <= SAFE_RANGE
    return record


def small_job(shape: tuple[int, int], narrow: bool, cost: str, symmetric: bool = False) -> Job:
    options = {"COST": int(cost == "float32"), **({"ONE_POTENTIAL": 1} if symmetric else {})}
    if narrow:
        file, function = "batch_narrow.cu", "batch_narrow"
    else:
        file, function = "batch.cu", "batch_solve"
    return file, function, small_options(shape, narrow) | options


def step_options(cost: str, symmetric: bool = False) -> dict[str, int]:
    return {"COST": int(cost == "float32"), "NARROW": 0, "STORE": 0} | ({"ONE_POTENTIAL": 1} if symmetric else {})


def step_kernel(function: str, cost: str, symmetric: bool = False) -> Any:
    return kernel("batch_products.cu", function, **step_options(cost, symmetric))


def weigh(table: Any, p: int) -> tuple[Any, F64, F64]:
    """(p, length) float64 weights where ``table`` lies, their masses and minima on the host; one vector serves all."""
    if not isinstance(table, cp.ndarray):
        return weigh_on_host(table, p)
    if table.dtype not in (np.float32, np.float64):
        table = table.astype(np.float64)
    given = cp.ascontiguousarray(table)
    length = given.shape[-1]
    weights = cp.empty((p, length))
    found = cp.empty((2, p))
    run = step_kernel("weigh", given.dtype.name)
    run((p,), (128,), (given, np.int64(length * (given.ndim == 2)), np.int64(length), weights, found[0], found[1]))
    mass, least = found.get()
    return weights, mass, least


def dual_terms(task: BatchProblem, log_u: Any, log_v: Any) -> tuple[F64, Any, Any]:
    """Return the potentials' terms of the dual values, (p,) on the host, and log u + log a, log v + log b."""
    p = len(task)
    m, n = task.shape
    rho = (0.0 if side.penalty == "balanced" else side.scalar_rho for side in task.sides)
    alpha = cp.empty((p, m))
    beta = cp.empty((p, n))
    dual = cp.empty(p)
    tables = (cp.ascontiguousarray(x) for x in (task.A, task.B, log_u, log_v))
    numbers = np.int64(m), np.int64(n), *map(np.float64, (task.reg, *rho))
    step_kernel("close_problems", "float64")((p,), (128,), (*tables, *numbers, alpha, beta, dual))
    return dual.get(), alpha, beta


class DeviceBatch:
    """The arrays of p problems on the device, one row a problem, and the record that points at them.

    ``source``: K lies in a block's "registers", or it is "made" by a block in every pass, of costs or points of each
    problem's own, or one K makes "products" for all.
    """

    meets = False  # Newton's step does not follow passes: `BatchRun.factor` makes steps of many problems at once
    dim = 0  # of points: every pass makes K from them
    started = False  # at a larger reg
    places: Any = None
    factors: Any = None  # of the costs of each problem
    order: Any = None  # the largest first
    points: tuple[Any, Any] = (None, None)
    narrow: Any = None  # M less its smallest entry, in float32

    def __init__(self, task: BatchProblem, options: Options, log_v: Any) -> None:
        if is_small(task):
            self.source = "registers"
        elif task.one_cost:
            self.source = "products"
        else:
            self.source = "made"
        self.M, self.task = self.costs(task)
        m, n = task.shape
        p = len(task)
        self.options, self.p = options, p
        self.A, self.B = (cp.ascontiguousarray(cp.asarray(x)) for x in (task.A, task.B))
        sizes = {"x": n, "log_u": m, "r": m, "log_v": n, "s": n, "report": REPORT.itemsize // 8} | self.vectors(m, n)
        block = cp.zeros(p * sum(sizes.values()))
        at = 0
        self.arrays = {}
        for name, size in sizes.items():
            self.arrays[name] = block[at : at + p * size].reshape(p, size)
            at += p * size
        self.x = self.arrays["x"]
        if log_v is not None:
            if isinstance(log_v, np.ndarray):
                self.x.set(log_v)
            else:
                cp.copyto(self.x, log_v)
        self.stats = np.zeros(p, REPORT)
        self.passes = 0

    def costs(self, task: BatchProblem) -> tuple[Any, BatchProblem]:
        """Return the costs that kernels read, and the problem with their range."""
        clouds = task.several
        made = self.source == "made"
        if made and clouds:
            self.dim = made_of(task) or 0
            self.places = clouds.places_there
            if self.dim and clouds.factors is not None:
                self.factors = cp.asarray(clouds.factors)
            if clouds.ragged:
                self.order = cp.asarray(np.argsort(-clouds.pairs_of_each, kind="stable").astype(np.int64))
        if self.dim:
            self.points = tuple(cp.ascontiguousarray(z) for z in (clouds.whole.rows, clouds.targets))
            return None, task
        if clouds:
            M = clouds_tables(clouds)
        else:
            M = cp.asarray(task.M)
        if not made:
            return M, task
        low = float(M.min())
        high = float(M.max())
        self.narrow = cp.empty(M.shape, np.float32)
        cp.subtract(M, low, out=self.narrow, casting="same_kind")
        return M, replace(task, M_min=low, M_max=high)

    def vectors(self, m: int, n: int) -> dict[str, int]:
        """Return {name: length} of the vectors that a problem needs in addition to the vectors of all kernels."""
        if self.source == "products":
            lengths = BATCH_KINDS * n, m, n, m, m, n, 1, STANDING.itemsize // 8
            return dict(zip(VECTORS, lengths, strict=True))
        if self.source == "registers":
            return {}
        self.room = made_room((m, n), self.dim)
        columns = 8 * BATCH_KINDS * n
        held = self.room + columns <= DEVICE_BATCHES.shared_room
        self.room += held * columns
        sizes = {"row_absorbed": m}
        if not held:
            sizes["columns"] = BATCH_KINDS * n
        return sizes

    def climb(self, reg: float, options: Options, count: int) -> None:
        """Make passes at a larger reg, which only give a start; convert their log v to the requested reg."""
        made = self.source == "made"  # passes with a made K improve the start
        if self.started or not made:
            self.x *= self.task.reg / reg
        self.started = True
        if made:
            record = self.record(options, reg, count)
            record["coarse"] = 1
            self.advance(record)
            return
        self.advance(self.record(options, reg, self.passes + count))
        self.go_on(slice(None), reg / self.task.reg)

    def leave(self) -> Any:
        """Switch the problems that one potential has not solved to ordinary passes; return which they are."""
        self.options = replace(self.options, symmetric=False)
        left = np.isin(self.stats["status"], (0, STALLED))
        if left.any():
            self.go_on(np.flatnonzero(left), 1.0)
        return left

    def go_on(self, which: Any, ratio: float) -> None:
        """Continue these problems, which have ended, from log v times ``ratio``."""
        if isinstance(which, slice):
            there = which
        else:
            there = cp.asarray(which)
        log_v = self.arrays["log_v"][there]
        self.x[there] = cp.where(cp.isfinite(log_v), log_v, 0.0) * ratio
        self.passes = int(self.stats["passes"].max())
        self.arrays["report"][there, STATUS_AT] = 0.0
        self.stats["status"][which] = 0.0

    def reached(self, level: float) -> LevelStart:
        """Return the potentials of the last passes, which were made at ``level`` times the requested reg."""
        return LevelStart(level, *(x.copy() for x in self.potentials()))

    def begin_at(self, which: Any, log_v: Any) -> None:
        """Continue these problems from this log v, in float64."""
        self.options = replace(self.options, precision="float64", symmetric=False)
        self.arrays["log_v"][cp.asarray(which)] = log_v
        self.go_on(which, 1.0)

    def exponents(self, which: Any) -> Any:
        """Return -M / reg of some problems, (number of them, m, n)."""
        clouds = self.task.several
        if clouds:
            M = clouds_tables(clouds.of(which), shape=self.task.shape)
        elif self.M.ndim == 2:
            M = self.M
        else:
            M = self.M[cp.asarray(which)]
        return cp.broadcast_to(cp.asarray(M, np.float64), (len(which), *self.task.shape)) / -self.task.reg

    def record(self, options: Options, reg: float, count: int = 0) -> Any:
        """Return the record of a call that makes passes of each problem at this reg.

        ``count``: passes of this call if K is made, else of this call and all earlier ones. The kernels of a made K
        read the ``ratio`` of reg to the requested one.
        """
        record = constants(self.task, options, reg)
        M = self.M
        x, y = self.points
        if M is not None:
            strides = [s // M.itemsize for s in M.strides]
            last = {"M_row": strides[-2], "M_col": strides[-1], "M_problem": strides[0] if M.ndim == 3 else 0}
            put(record, {"M": M, **last})
        put(record, {"A": self.A, "B": self.B, "count": count, **self.arrays})
        if self.source == "made":
            numbers = {"narrow": options.precision == "float32", "ratio": reg / self.task.reg, "dim": self.dim}
            put(record, {**numbers, "scale": self.task.several.whole.core[1] if self.dim else 1.0})
            put(record, {"points_x": x, "points_y": y, "M_narrow": self.narrow})
            put(record, {"places": self.places, "order": self.order, "factors": self.factors})
        return record

    def iterate(self, passes: int) -> int:
        """Make at most so many passes of each problem that still runs; return how many problems run afterwards."""
        self.passes += passes
        if self.source == "made":
            count = passes
        else:
            count = self.passes
        self.advance(self.record(self.options, self.task.reg, count))
        return int((self.stats["status"] == 0).sum())

    def advance(self, record: Any) -> None:
        {"registers": self.in_registers, "products": self.multiply, "made": self.make}[self.source](record)
        self.read()

    def in_registers(self, record: Any) -> None:
        """Launch one block for each problem: float32 passes, then float64 passes."""
        for narrow in (True, False) if self.options.precision == "float32" else (False,):
            shape, cost, symmetric = self.task.shape, self.M.dtype.name, self.options.symmetric
            file, function, options = small_job(shape, narrow, cost, symmetric)
            run = kernel(file, function, **options)
            shared = 0
            if not narrow:
                run.max_dynamic_shared_size_bytes = shared = 8 * BATCH_KINDS * 16 * options["CT"]
            run((self.p,), (16 * options["GROUPS"],), (by_value(record),), shared_mem=shared)

    def make(self, record: Any) -> None:
        """Make at most so many further passes of each problem; passes at a larger reg only improve the start."""
        macros = {"DIM": self.dim, "METRIC": 0, "FORM": 0, "COST": 0, "NARROW": 0, "STORE": 0}
        if self.dim:
            metric = self.task.several.whole.core[0]
            macros |= {"METRIC": metric.number, "FORM": NARROW_FORMS[metric.form]}
        else:
            macros["COST"] = int(self.M.dtype == np.float32)
        macros |= {"ONE_POTENTIAL": 1} if self.options.symmetric else {}
        run = kernel("batch_made.cu", "batch_made", **macros)
        run.max_dynamic_shared_size_bytes = max(run.max_dynamic_shared_size_bytes, self.room)
        run((self.p,), (256,), (by_value(record),), shared_mem=self.room)

    def multiply(self, record: Any) -> None:
        """Make passes of all problems by products: S = V K^T, U = prox(S), T = U K; with one potential T is S."""
        symmetric = self.options.symmetric
        arrays = self.arrays
        status = self.stats["status"]
        made = 0
        record["safe"], count = 1.0, int(record["count"])
        if symmetric:
            record["sums"] = record["row_sums"]
        names = ("open_problems", "prox_rows", "finish_problems")
        steps = {name: step_kernel(name, self.M.dtype.name, symmetric) for name in names}
        argument = (by_value(record),)
        K = cp.exp((self.task.M_min - self.M.astype(np.float64)) / float(record["limits"]["reg"]))
        steps["open_problems"]((self.p,), (128,), argument)
        while (status == 0).any() and (made := int(self.stats["passes"][status == 0].max())) < count:
            for _ in range(min(CHECK_PASSES, count - made)):
                cp.matmul(arrays["v"], K.T, out=arrays["row_sums"])
                steps["prox_rows"]((self.p,), (128,), argument)
                if not symmetric:
                    cp.matmul(arrays["u"], K, out=arrays["sums"])
                steps["finish_problems"]((self.p,), (128,), argument)
            self.read()
            status = self.stats["status"]

    def read(self) -> None:
        self.stats = self.arrays["report"].get().view(REPORT)[:, 0]

    def status(self) -> Any:
        return np.array(STATUS)[self.stats["status"].astype(np.int64)]

    def field(self, name: str) -> Any:
        return self.stats[name].astype(np.int64)

    def potentials(self) -> tuple[Any, Any]:
        """(log u, log v) of the last certified iterates, (p, m) and (p, n); -inf where left out."""
        return self.arrays["log_u"], self.arrays["log_v"]

    def marginals(self) -> tuple[Any, Any]:
        return self.arrays["r"], self.arrays["s"]


class DeviceBatches(BatchEngine):
    """Batches of the CUDA core."""

    chunk_bytes = 1 << 32
    climbs = True
    has_one_potential = True
    leaves_one_potential = True
    forms_clouds = True
    patience = 60  # passes: .4 ms each for 64 problems of 1000 x 1000, a step takes 9 ms (H200)

    def storage(self, task: BatchProblem, asked: str | None, tol: float, reach: float) -> str | None:
        """Return the precision of the first passes; None: problems are solved alone. ``reach`` is the largest log v."""
        if task.rows.scalar_rho is None or task.cols.scalar_rho is None:
            return None
        if not (is_small(task) or task.one_cost):
            lone = task.size > LONE and len(task) < LONE_PROBLEMS
            if lone or made_of(task) is None:
                return None
        elif not is_small(task):
            if task.range_over_reg + reach <= PRODUCT_RANGE:
                return "float64"
            return None
        if asked == "float64":
            return "float64"
        return "float32"

    def factors(self, task: BatchProblem) -> bool:
        """Tell whether Newton's steps with a factor serve these problems."""
        return min(task.shape) <= backend.most_factored and (not task.several or forms(task))

    def bytes_each(self, task: BatchProblem, depth: int, precision: str) -> int:
        """Return the bytes that one problem takes on the device, with its own formed cost if there is one."""
        m, n = task.shape
        small = is_small(task)
        if small or task.one_cost:
            made = None
        else:
            made = made_of(task)
        if small:
            formed = 1.0
        elif made:
            formed = 0.0
        else:
            formed = 1.5
        if task.one_cost:
            own = 0
        else:
            own = int(formed * m * n)
        if small:
            vectors = 0
        else:
            vectors = (BATCH_KINDS + 2) * n + 3 * m + STANDING.itemsize // 8
        return 8 * (own + 3 * (m + n) + vectors)

    def workspace(self, task: BatchProblem, options: Options, log_v: Any) -> DeviceBatch:
        return DeviceBatch(task, options, log_v)
