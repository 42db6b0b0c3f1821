"""The GPU's batch: small problems one block each, every pass inside one launch; larger ones with one cost as products.

A small problem (m, n <= 128) holds K in registers, in float32 until its sums can tell no more, then in float64, which
certifies; K is made again around the potentials where they leave its range, so that every reg works. Larger problems on
one cost, or one each, make their passes by two matrix products in float64, all of them together; a K of its own is made
around the potentials of its problem. Costs of clouds are formed here, a chunk at a time. Twin: backends/cpu/batch.py;
device side: src_cuda/batch_narrow.cu, batch.cu, batch_products.cu.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np

from ...penalties import F64
from ...problem.problem import EXPONENT_ROUNDING, BatchProblem
from ..contract import Options
from ..contract import weigh as weigh_on_host
from ..limits import limits_of
from ..records import ABSORB, STALLED, STATUS, put
from .arrays import clouds_costs
from .kernels import BATCH_KINDS, BATCH_MEMORY, RECORDS, by_value, kernel, small_options

MOST = 128  # rows and columns of a small problem
SAFE_SPREAD = 40.0  # range(M) / reg up to which a float32 K needs no absorbed potentials at the start
PRODUCT_SPREAD = 500.0  # and up to which a float64 K never does
NARROW_NOISE = 1e-6  # a float64 pass takes as long as ten; at 3e-7 float32 ones crept, 1.3 times as many at reg .001
OWN_SPREAD = 5000.0  # and up to which each has one of its own; at 1.3e4 16 cores of the host took .9 of the time
CHUNK_BYTES = 1 << 32  # of the arrays of the problems in hand at once
CLIMBS = True  # by way of larger regs, where reg is small
ONE_POTENTIAL = LEAVES = True  # passes can have log u = log v, and be left for ordinary ones
FORMS = True  # the matrices of many clouds
CHECK_PASSES = 8  # products between two looks at what still runs
ABSORBED = 2  # of the kinds of column vectors in batch.cuh: what K holds of log v
VECTORS = ["columns", "row_absorbed", "v", "u", "row_sums", "sums", "row_scalar", "standing"]
BATCH, REPORT, STANDING = (RECORDS[name] for name in ("Batch", "Report", "Standing"))
STATUS_AT = list(REPORT.fields or ()).index("status")
SCALES = {"scale_limit": 1e100, "most_scale": math.inf}  # float64 all through; a scale beyond it: K is made again


def storage(task: BatchProblem, asked: str | None, tol: float, reach: float) -> str | None:
    """Return the precision of the first passes; None: problems are solved alone. ``reach`` is the largest log v."""
    if task.rows.scalar_rho is None or task.cols.scalar_rho is None:
        return None
    if max(task.shape) <= MOST:
        return "float64" if asked == "float64" else "float32"
    most = PRODUCT_SPREAD if task.one_cost else OWN_SPREAD
    return "float64" if task.spread + reach <= most else None


def bytes_each(shape: tuple[int, int], memory: int, shared: bool, precision: str) -> int:
    """Memory of one problem of a batch on the device; not ``shared``: with a cost, a K and what K is made of."""
    m, n = shape
    small = max(shape) <= MOST
    own = 0 if shared else (1 if small else 4) * m * n
    return 8 * (own + 3 * (m + n) + (0 if small else (BATCH_KINDS + 2) * n + 3 * m + STANDING.itemsize // 8))


def constants(task: BatchProblem, options: Options, reg: float) -> Any:
    """The BATCH record without its addresses."""
    record = np.zeros((), BATCH)
    record["m"], record["n"] = task.shape
    known = limits_of(task, options, "float64", NARROW_NOISE, reg)
    # log v + log K^T u - log b, of terms as large as M / reg, is what the gap squares and multiplies with rho
    rounding = EXPONENT_ROUNDING * (3 * (task.M_max - task.M_min) + abs(task.M_min)) / reg
    rounding += task.cost.error(task.M_max) / reg
    known["exponent_error"] = rounding * (1 + math.sqrt((known["rho_rows"] + known["rho_cols"]) / reg))
    put(known, SCALES | {"memory": min(options.memory, BATCH_MEMORY), "flush": 0.0})
    record["limits"] = known
    record["k1"], record["fi2"] = reg / float(task.rows.rho[0]), 1 / (1 + known["rate_cols"])
    record["product"] = task.reference == "product"
    record["low"], record["safe"] = task.M_min / reg, (task.M_max - task.M_min) / reg <= SAFE_SPREAD
    return record


def small_kernel(shape: tuple[int, int], narrow: bool, cost: str, symmetric: bool = False) -> tuple[Any, int, int]:
    """batch_narrow or batch_solve for that shape, its threads a block and the shared memory that the launch brings."""
    options = small_options(shape, narrow) | ({"ONE_POTENTIAL": 1} if symmetric else {})
    file, function = ("batch_narrow.cu", "batch_narrow") if narrow else ("batch.cu", "batch_solve")
    run, shared = kernel(file, function, COST=int(cost == "float32"), **options), 0
    if not narrow:
        run.max_dynamic_shared_size_bytes = shared = 8 * BATCH_KINDS * 16 * options["CT"]
    return run, 16 * options["GROUPS"], shared


def step_kernel(function: str, cost: str, symmetric: bool = False) -> Any:
    known = {"COST": int(cost == "float32"), "NARROW": 0, "STORE": 0} | ({"ONE_POTENTIAL": 1} if symmetric else {})
    return kernel("batch_products.cu", function, **known)


def weigh(table: Any, p: int) -> tuple[Any, F64, F64]:
    """(p, length) float64 weights where ``table`` lies, their masses and minima on the host; one vector serves all."""
    if not isinstance(table, cp.ndarray):
        return weigh_on_host(table, p)
    given = cp.ascontiguousarray(table if table.dtype in (np.float32, np.float64) else table.astype(np.float64))
    length = given.shape[-1]
    weights, found = cp.empty((p, length)), cp.empty((2, p))
    run = step_kernel("weigh", given.dtype.name)
    run((p,), (128,), (given, np.int64(length * (given.ndim == 2)), np.int64(length), weights, found[0], found[1]))
    mass, least = found.get()
    return weights, mass, least


class DeviceBatch:
    """The arrays of p problems on the device, one row a problem, and the record that points at them."""

    def __init__(self, task: BatchProblem, options: Options, log_v: Any) -> None:
        (m, n), p = task.shape, len(task)
        self.task, self.options, self.p = task, options, p
        self.M = clouds_costs(task.cost) if task.several else cp.asarray(task.M)
        self.A, self.B = (cp.ascontiguousarray(cp.asarray(x)) for x in (task.A, task.B))
        sizes = {"x": n, "log_u": m, "r": m, "log_v": n, "s": n, "report": REPORT.itemsize // 8}
        self.small = max(m, n) <= MOST
        if not self.small:
            lengths = (BATCH_KINDS * n, m, n, m, m, n, 1, STANDING.itemsize // 8)
            sizes |= dict(zip(VECTORS, lengths, strict=True))
        block, at = cp.zeros(p * sum(sizes.values())), 0
        self.arrays = {}
        for name, size in sizes.items():
            self.arrays[name] = block[at : at + p * size].reshape(p, size)
            at += p * size
        self.x = self.arrays["x"]
        if log_v is not None:
            self.x.set(log_v) if isinstance(log_v, np.ndarray) else cp.copyto(self.x, log_v)
        self.stats = np.zeros(p, REPORT)
        self.passes = 0

    def climb(self, reg: float, options: Options, count: int) -> None:
        """A larger reg first: log v of its answer, in the units of the reg asked for, is a better start."""
        self.x *= self.task.reg / reg
        self.advance(self.record(options, reg), self.passes + count)
        self.go_on(slice(None), reg / self.task.reg)

    def leave(self) -> Any:
        """Make ordinary passes from here on of the problems that one potential has not served; tell which."""
        self.options = replace(self.options, symmetric=False)
        left = np.isin(self.stats["status"], (0, STALLED))
        if left.any():
            self.go_on(np.flatnonzero(left), 1.0)
        return left

    def go_on(self, which: Any, ratio: float) -> None:
        """Let these problems, which have ended, go on from log v times ``ratio``."""
        there = which if isinstance(which, slice) else cp.asarray(which)
        log_v = self.arrays["log_v"][there]
        self.x[there] = cp.where(cp.isfinite(log_v), log_v, 0.0) * ratio
        self.passes = int(self.stats["passes"].max())
        self.arrays["report"][there, STATUS_AT] = 0.0
        self.stats["status"][which] = 0.0

    def record(self, options: Options, reg: float) -> Any:
        record, M = constants(self.task, options, reg), self.M
        strides = [s // M.itemsize for s in M.strides]
        record["M"], record["M_row"], record["M_col"] = M.data.ptr, strides[-2], strides[-1]
        record["M_problem"] = strides[0] if M.ndim == 3 else 0
        for name, array in (("A", self.A), ("B", self.B), *self.arrays.items()):
            record[name] = array.data.ptr
        return record

    def iterate(self, passes: int) -> int:
        """Make at most so many passes of each problem that still runs; return how many run then."""
        self.passes += passes
        self.advance(self.record(self.options, self.task.reg), self.passes)
        return int((self.stats["status"] == 0).sum())

    def advance(self, record: Any, count: int) -> None:
        (self.blocks if self.small else self.products)(record, count)

    def blocks(self, record: Any, count: int) -> None:
        """A block a problem: float32 passes, then float64 ones."""
        record["count"] = count
        if self.options.precision == "float32":
            self.launch(record, True)
        self.launch(record, False)
        self.read()

    def launch(self, record: Any, narrow: bool) -> None:
        run, threads, shared = small_kernel(self.task.shape, narrow, self.M.dtype.name, self.options.symmetric)
        run((self.p,), (threads,), (by_value(record),), shared_mem=shared)

    def products(self, record: Any, count: int) -> None:
        """S = V K^T, U = prox(S), then U K, which S is of one potential, for all problems at once.

        Problems that outgrow a K of their own go on, on a new one, when the others have ended.
        """
        symmetric, arrays, status = self.options.symmetric, self.arrays, self.stats["status"]
        own = self.M.ndim == 3
        record["count"], record["safe"] = count, float(not own)
        if symmetric:
            record["sums"] = record["row_sums"]
        names = ("open_problems", "prox_rows", "finish_problems")
        steps = {name: step_kernel(name, self.M.dtype.name, symmetric) for name in names}
        argument = (by_value(record),)
        while (status == 0).any() and (made := self.made()) < count:
            reg = float(record["limits"]["reg"])
            K = self.around(reg) if own else cp.exp((self.task.M_min - self.M.astype(np.float64)) / reg)
            steps["open_problems"]((self.p,), (128,), argument)
            while (status == 0).any() and made < count:
                for _ in range(min(CHECK_PASSES, count - made)):
                    self.times(K, arrays["v"], arrays["row_sums"], True)
                    steps["prox_rows"]((self.p,), (128,), argument)
                    if not symmetric:
                        self.times(K, arrays["u"], arrays["sums"], False)
                    steps["finish_problems"]((self.p,), (128,), argument)
                self.read()
                status = self.stats["status"]
                made = self.made()
            if own and (status == ABSORB).any():
                self.go_on(np.flatnonzero(status == ABSORB), 1.0)

    def made(self) -> int:
        """Return the most passes of a problem that still runs."""
        return int(self.stats["passes"][self.stats["status"] == 0].max(initial=0))

    def times(self, K: Any, x: Any, out: Any, turned: bool) -> None:
        """Multiply the rows of x by K, or by its transpose; each has a K of its own, or all have one."""
        if K.ndim == 2:
            cp.matmul(x, K.T if turned else K, out=out)
        elif turned:
            cp.matmul(K, x[:, :, None], out=out[:, :, None])
        else:
            cp.matmul(x[:, None, :], K, out=out[:, None, :])

    def around(self, reg: float) -> Any:
        """Make every K around its log v: at most 1, with an entry 1 in every row and column in use."""
        A, B, n, product = self.A, self.B, self.task.shape[1], self.task.reference == "product"
        log_a, log_b = (cp.log(cp.where(w > 0, w, 1.0)) * product for w in (A, B))
        K = self.M.astype(np.float64) / -reg
        alpha = -(K + cp.where(B > 0, self.x + log_b, -np.inf)[:, None, :]).max(2)
        K += (alpha + cp.where(A > 0, 0.0, -np.inf))[:, :, None]
        beta = -K.max(1)
        if self.options.symmetric:  # the mean of both serves as well, and keeps K symmetric
            mean = 0.5 * (alpha + beta)
            K += (mean - alpha)[:, :, None]
            alpha = beta = mean
        K += beta[:, None, :]
        cp.exp(K, out=K)
        K *= (B > 0)[:, None, :]
        self.arrays["row_absorbed"][:] = cp.where(A > 0, alpha - log_a, 0.0)
        self.arrays["columns"].reshape(self.p, BATCH_KINDS, n)[:, ABSORBED] = cp.where(B > 0, beta - log_b, 0.0)
        return K

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


batch_of = DeviceBatch  # the word of api/batch.py
