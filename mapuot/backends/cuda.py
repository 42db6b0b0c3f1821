"""The CUDA backend: CuPy owns the memory, src_cuda does the work; matrices stay where the caller has them.

CuPy arrays (and what speaks DLPack) are used in place; a numpy M goes to the device in row blocks, so that only K has
to fit. Vectors come back as numpy, plans and products as what M is. Everything runs on the current device and stream;
``iterate`` is one launch and one read of a few numbers for up to TRACE_PASSES passes. Twin: backends/cpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

try:
    import cupy as cp
except ImportError as error:  # pragma: no cover
    raise ImportError("backend 'cuda' needs CuPy: pip install cupy-cuda13x (or cupy-cuda12x)") from error

from .. import penalties
from ..errors import InfeasibleError
from ..penalties import F64
from ..problem import Problem, Side
from . import Options, Stats
from .cuda_kernels import (
    ITEMSIZE, PAD, PROGRESS, ROW_SCALARS, STATE, STORES, TRACE, VALUES, VIEW, kernel,
)  # fmt: skip
from .cuda_launch import TRACE_PASSES, Iterate

STORAGE = {"float64": np.float64, "float32": np.float32, "bfloat16": np.uint16}
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9}
FLUSH_LOG = {"float64": -708.0, "float32": -87.3, "bfloat16": -87.3}  # entries of K below e^this are zero
SAFE_SPREAD = 40.0  # range(M) / reg that K holds unbalanced: the scalings stay below e^85
BLOCK_BYTES = 1 << 28  # of a numpy M on the device at once
STATUS = ("running", "converged", "absorb", "stalled", "not finite")


def need_device() -> None:
    """A driverless machine gets one clear sentence."""
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"backend 'cuda' needs a GPU and its driver, found none ({error})") from error
    if count == 0:
        raise RuntimeError("backend 'cuda' needs a GPU, found none")


def need_memory(needed: int, precision: str) -> None:
    """Count before taking: CuPy's pool and the device together must have room."""
    free = cp.cuda.runtime.memGetInfo()[0] + cp.get_default_memory_pool().free_bytes()
    if needed <= free:
        return
    smaller = [p for p in STORES if needed * ITEMSIZE[p] / ITEMSIZE[precision] <= free]
    names = {"float64": "float64", "float32": "mixed", "bfloat16": "bfloat16"}
    advice = f"; precision {names[smaller[0]]!r} would fit" if smaller else "; no precision of K fits"
    raise MemoryError(f"K needs {needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free{advice}")


def asarray(x: Any) -> Any:
    """numpy stays numpy; device arrays and DLPack tensors become CuPy arrays without a copy."""
    need_device()
    if isinstance(x, cp.ndarray):
        array = x
    elif hasattr(x, "__cuda_array_interface__"):
        array = cp.asarray(x)
    elif hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] == 2:
        array = cp.from_dlpack(x)
    else:
        return np.asarray(x)
    if array.device != cp.cuda.Device():
        raise ValueError(f"arrays must be on the current device {cp.cuda.Device().id}, got one on {array.device.id}")
    return array


def to_numpy(x: Any) -> Any:
    x = asarray(x)
    return x.get() if isinstance(x, cp.ndarray) else x


def row_blocks(M: Any) -> Iterator[tuple[int, int, Any]]:
    """(i0, i1, rows on the device): all at once where M is there, else block by block."""
    m, n = M.shape
    if isinstance(M, cp.ndarray):
        yield 0, m, M
        return
    step = max(1, BLOCK_BYTES // (n * M.itemsize))
    for i0 in range(0, m, step):
        yield i0, min(i0 + step, m), cp.asarray(np.ascontiguousarray(M[i0 : i0 + step]))


def view_of(M: Any, c: Any, alpha: Any, beta: Any, reg: float) -> Any:
    """The View record of stream.cu."""
    view = np.zeros((), VIEW)
    view["m"], view["n"] = M.shape
    for name, array in (("M", M), ("c", c)):
        if array is not None:
            view[name] = array.data.ptr
            view[name + "_row"], view[name + "_col"] = (s // array.itemsize for s in array.strides)
    if alpha is not None:
        view["alpha"], view["beta"] = alpha.data.ptr, beta.data.ptr
    view["inv_reg"] = 1 / reg
    return view


def stream(function: str, M: Any, store: int = 0) -> Any:
    return kernel("stream.cu", function, STORE=store, COST=int(M.dtype == np.float32))


def parts(rows: int, columns: int) -> tuple[int, int]:
    """Grid of a stream: blocks of 32 rows, and enough parts of the columns to fill the device."""
    blocks = -(-rows // 32)
    return blocks, max(1, min(-(-columns // 32), 2048 // blocks))


def extrema(M: Any) -> tuple[float, float, int, int]:
    found = []
    for _, _, block in row_blocks(M):
        grid = parts(*block.shape)
        out = cp.empty((grid[0] * grid[1], 4))
        stream("extrema", block)(grid, (256,), (view_of(block, None, None, None, 1.0), out))
        found.append(out)
    out = cp.concatenate(found)
    low, high = float(out[:, 0].min()), float(out[:, 1].max())
    low, high = (low, high) if math.isfinite(low) else (0.0, 0.0)
    return low, high, int(out[:, 2].sum()), int(out[:, 3].sum())


def reduce_rows(function: str, M: Any, c: Any, alpha: Any, beta: Any, reg: float, outputs: int) -> list[Any]:
    """row_max or plan_sums over the rows of device matrices."""
    grid = parts(*M.shape)
    out = [cp.empty((grid[1], M.shape[0])) for _ in range(outputs)]
    stream(function, M)(grid, (256,), (view_of(M, c, alpha, beta, reg), *out))
    return [x.max(0) if function == "row_max" else x.sum(0) for x in out]


class Workspace:
    """One solve: K, the two sides, the column sums, Anderson's history, and the State record that points at them."""

    def __init__(self, problem: Problem, options: Options) -> None:
        m, n = problem.shape
        self.problem, self.options, self.dtype = problem, options, options.precision
        self.ld = -(-n // PAD) * PAD
        self.log_reference = problem.log_reference
        size = m * self.ld * ITEMSIZE[self.dtype]
        block = 0 if isinstance(problem.M, cp.ndarray) else BLOCK_BYTES
        need_memory(size + block + 8 * (8 * m + (12 + 2 * options.memory) * self.ld), self.dtype)
        self.K = cp.empty(m * self.ld, STORAGE[self.dtype])
        kl = problem.rows.penalty in ("kl", "balanced"), problem.cols.penalty in ("kl", "balanced")
        self.kl_rows = kl[0]
        self.state = np.zeros((), STATE)
        self.arrays: dict[str, Any] = {}
        self.launch = Iterate(self.state, m, self.ld, self.dtype, kl, options.in_place)
        self.allocate(m, n)
        self.constants()
        self.start()

    def take(self, name: str, count: int, dtype: Any = np.float64) -> Any:
        """A zeroed device vector, its address in the state."""
        array = self.arrays[name] = cp.zeros(count, dtype)
        self.state[name] = array.data.ptr
        return array

    def allocate(self, m: int, n: int) -> None:
        ld, memory, blocks = self.ld, max(1, self.options.memory), self.launch.parts
        self.state["kernel"] = self.K.data.ptr
        self.take("point", 4 * m)
        for name in ("u_log", "u_scale", "r"):
            self.take(name, m)
        for name in ("x_next", "x", "v_scale", "s", "sums", "image", "residual"):
            self.take(name, ld)
        self.take("work", 2 * ld)
        if self.options.in_place:
            self.take("ratio", ld)
        self.take("dF", memory * ld)
        self.take("dG", memory * ld)
        self.take("row_scalars", 2 * ROW_SCALARS)
        self.take("partial", blocks * VALUES)
        self.take("next", 4 * blocks)
        self.take("barrier", 1, np.uint32)
        report = self.arrays["report"] = cp.zeros(2 * PROGRESS.itemsize + TRACE_PASSES * TRACE.itemsize, np.uint8)
        self.state["progress"] = report.data.ptr
        self.state["trace"] = report.data.ptr + 2 * PROGRESS.itemsize
        for side, count in (("rows", m), ("cols", ld)):
            for name in ("weight", "log_weight", "rho", "upper", "absorbed", "fi", "rate"):
                array = self.arrays[f"{side}.{name}"] = cp.zeros(count)
                self.state[side][name] = array.data.ptr

    def constants(self) -> None:
        problem, options, state = self.problem, self.options, self.state
        rates = problem.rows.scalar_rho, problem.cols.scalar_rho
        state["m"], state["n"], state["ld"] = *problem.shape, self.ld
        state["parts"], state["memory"], state["reg"] = self.launch.parts, options.memory, problem.reg
        k1, k2 = (0.0 if rho is None else problem.reg / rho for rho in rates)
        translate = options.translate and None not in rates and k1 + k2 > 0
        fi1, fi2 = 1 / (1 + k1), 1 / (1 + k2)
        state["fi_rows"], state["rate_cols"] = fi1, k2
        state["lam_rate"] = 1 / (fi1 * k1 + k2) if translate else 0.0
        state["mu_rate"] = fi2 / (k1 + fi2 * k2) if translate else 0.0
        state["tol"], state["tol_gap"] = options.tol, options.tol_gap
        state["storage_error"] = ROUNDING[self.dtype]
        state["flush"], state["flush_tol"] = math.exp(FLUSH_LOG[self.dtype]), min(1e-8, options.tol / 100)
        for name, side in (("rows", problem.rows), ("cols", problem.cols)):
            state[name]["kind"] = penalties.KINDS[side.penalty]

    def start(self) -> None:
        """Progress before the first pass."""
        self.progress = np.zeros((), PROGRESS)
        self.progress["best_dual"], self.progress["best_error"] = -math.inf, math.inf
        self.progress["kappa"] = 1.0

    def put(self, name: str, values: F64) -> None:
        self.arrays[name][: len(values)] = cp.asarray(values)

    def absorb(self, log_v: F64) -> None:
        """Choose alpha and beta so that K is at most 1 and every row and column in use has an entry 1; build K."""
        problem = self.problem
        la, lb = self.log_reference
        out_u, out_v = left_out(problem.rows, la), left_out(problem.cols, lb)
        with np.errstate(invalid="ignore"):
            plan_v = np.where(out_v, -np.inf, log_v + lb)
        safe = (problem.M_max - problem.M_min) / problem.reg <= SAFE_SPREAD
        if safe and not problem.forbidden and problem.reference_matrix is None:
            alpha, beta = np.full(len(la), problem.M_min / problem.reg), np.zeros(len(lb))
        else:
            alpha, beta = self.balance(out_u, plan_v)
        dead_u, dead_v = np.isposinf(alpha) & ~out_u, np.isposinf(beta) & ~out_v
        alpha, beta = np.where(out_u | dead_u, -np.inf, alpha), np.where(out_v | dead_v, -np.inf, beta)
        self.build(alpha, beta)
        with np.errstate(invalid="ignore"):
            self.d = np.where(out_u | dead_u, np.inf, alpha - la)
            e = np.where(out_v | dead_v, np.inf, beta - lb)
        self.dead_u, self.dead_v = dead_u, dead_v
        self.set_constants()
        self.set_rows()
        self.set_cols(e, log_v)

    def matrices(self) -> Iterator[tuple[int, int, Any, Any]]:
        """(i0, i1, M, c) of row blocks on the device, c None without a reference matrix."""
        c = self.problem.reference_matrix
        for i0, i1, M in row_blocks(self.problem.M):
            yield i0, i1, M, None if c is None else cp.asarray(c[i0:i1])

    def build(self, alpha: F64, beta: F64) -> None:
        beta_on, alpha_on, problem = cp.asarray(beta), cp.asarray(alpha), self.problem
        for i0, i1, M, c in self.matrices():
            out, view = self.K[i0 * self.ld :], view_of(M, c, alpha_on[i0:i1], beta_on, problem.reg)
            flush = np.float64(self.state["flush"])
            run = stream("build_kernel", M, STORES[self.dtype])
            run(parts(i1 - i0, self.ld), (256,), (view, out, np.int64(self.ld), flush))

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """alpha_i = -max_j(log v_j - M_ij / reg), beta_j = -max_i(alpha_i - M_ij / reg); +inf where there is none."""
        reg, beta = self.problem.reg, cp.asarray(plan_v)
        alpha = cp.where(cp.asarray(out_u), -cp.inf, 0.0)
        top = cp.full(len(plan_v), -cp.inf)
        for i0, i1, M, c in self.matrices():
            zero = cp.zeros(i1 - i0)
            (high,) = reduce_rows("row_max", M, c, zero, beta, reg, 1)
            alpha[i0:i1] = cp.where(cp.isneginf(alpha[i0:i1]), cp.inf, -high)
            used = cp.where(cp.isposinf(alpha[i0:i1]), -cp.inf, alpha[i0:i1])
            (high,) = reduce_rows("row_max", M.T, None if c is None else c.T, beta, used, reg, 1)
            top = cp.maximum(top, high)
        col_max = top.get()
        with np.errstate(invalid="ignore"):
            return alpha.get(), np.where(np.isneginf(col_max), np.inf, plan_v - col_max)

    def set_constants(self) -> None:
        """Dual terms that no pass changes: reg |c|, the points that no mass can reach, and rho a of KL rows."""
        problem = self.problem
        total, scale = problem.reg * problem.c_mass, 0.0
        for name, side, dead in (("a", problem.rows, self.dead_u), ("b", problem.cols, self.dead_v)):
            hard = dead & (side.weight > 0) & (np.isinf(side.rho) if side.penalty != "range" else side.rho > 0)
            if hard.any():
                raise InfeasibleError(f"M forbids every pair of {name}[{int(np.argmax(hard))}], which must be transported")
            f = np.full(int(dead.sum()), np.inf)
            upper = None if side.upper is None else side.upper[dead]
            if side.penalty != "range":
                total += float(penalties.dual_term(side.penalty, f, side.weight[dead], side.rho[dead], upper).sum())
            soft = np.isfinite(side.rho)
            scale += float(side.rho[soft] @ side.weight[soft])
        used, rows = np.isfinite(self.d), problem.rows
        soft = used & np.isfinite(rows.rho)
        if self.kl_rows:
            total += float(rows.rho[soft] @ rows.weight[soft])
        hard = used & np.isinf(rows.rho) & self.kl_rows
        total += problem.reg * float(rows.weight[hard] @ self.d[hard])  # the device adds reg a (log u - d)
        self.state["hard_weight"] = float(rows.weight[hard].sum())
        self.state["dual_constant"], self.state["dual_scale"] = total, scale

    def set_rows(self) -> None:
        """What the prox of a row needs, four numbers a row: see row_prox in row_pass.cuh."""
        side, reg = self.problem.rows, self.problem.reg
        out = np.isinf(self.d)
        t, rho = np.where(out, 0.0, side.weight), side.rho
        point = np.zeros((len(t), 4))
        if self.kl_rows:
            hard = np.isinf(rho)
            finite = np.where(hard, 1.0, rho)
            fi = np.where(hard, 1.0, finite / (finite + reg))
            with np.errstate(divide="ignore", invalid="ignore"):
                point[:, 0] = np.where(out, -np.inf, fi * np.log(t) - (1 - fi) * self.d)
            point[:, 1] = fi
            point[:, 2] = np.where(hard, 0.0, -finite)
            point[:, 3] = np.where(hard, reg * t, 0.0)
        else:
            point[:, 0], point[:, 1], point[:, 2] = self.d, t, rho
            point[:, 3] = 0.0 if side.upper is None else side.upper
        self.put("point", point.ravel())

    def set_cols(self, e: F64, log_v: F64) -> None:
        side, n, reg = self.problem.cols, self.problem.shape[1], self.problem.reg
        out = np.isinf(e)
        weight = np.where(out, 0.0, side.weight)
        x = np.where(out, 0.0, log_v)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            rate = reg / side.rho
            v = np.where(out, 0.0, np.exp(np.minimum(x - e, 85.0)))
            fi = np.where(np.isinf(side.rho), 1.0, side.rho / (side.rho + reg))
            self.put("cols.log_weight", np.where(out, 0.0, np.log(weight)))
        self.arrays["cols.absorbed"].fill(np.inf)
        for name, values in (("absorbed", e), ("weight", weight), ("rho", side.rho), ("fi", fi), ("rate", rate)):
            self.put("cols." + name, values)
        if side.upper is not None:
            self.put("cols.upper", side.upper)
        self.put("x_next", x)
        self.put("v_scale", v)
        if self.options.in_place:  # the plan starts as K: u = v = 1
            self.put("ratio", v)
            self.arrays["u_scale"].fill(1)
        for name in ("sums", "row_scalars", "next"):
            self.arrays[name].fill(0)
        k2 = float(self.state["rate_cols"])
        half = self.launch.parity * 2 * self.launch.parts
        self.arrays["next"][half : half + 2] = cp.asarray([float((weight * np.exp(-k2 * x)).sum()), float(v.sum())])
        assert len(x) == n
        self.progress["shift"] = self.progress["since_absorb"] = 0.0
        self.progress["status"] = 0.0
        self.send_progress()

    def send_progress(self) -> None:
        record = np.frombuffer(self.progress.tobytes() * 2, np.uint8)
        self.arrays["report"][: len(record)] = cp.asarray(record)

    def iterate(self, count: int) -> list[Stats]:
        done: list[Stats] = []
        while len(done) < count and (not done or done[-1].status == "running"):
            self.launch(min(count - len(done), self.launch.most))
            done += self.read()
        return done

    def read(self) -> list[Stats]:
        """The one read of a launch: progress and trace."""
        report, size = self.arrays["report"].get(), PROGRESS.itemsize
        before, half = int(self.progress["passes"]), self.launch.parity
        self.progress = report[half * size : (half + 1) * size].view(PROGRESS)[0].copy()
        made = int(self.progress["passes"]) - before
        trace = report[2 * size :].view(TRACE)[:made]
        return [
            Stats(
                before + i, *(float(t[key]) for key in ("gap", "error", "dual", "mass", "residual")),
                bool(t["rejected"]), STATUS[int(t["status"])],
            )
            for i, t in enumerate(trace, 1)
        ]  # fmt: skip

    @property
    def next_log_v(self) -> F64:
        return self.full_log_v("x_next")

    def full_log_v(self, name: str) -> F64:
        x = self.arrays[name][: self.problem.shape[1]].get()
        return np.where(self.problem.cols.weight == 0, -np.inf, np.where(self.dead_v, np.inf, x))

    def potentials(self) -> tuple[F64, F64]:
        with np.errstate(invalid="ignore"):
            log_u = self.arrays["u_log"].get() + self.d + float(self.progress["shift"])
        out = left_out(self.problem.rows, self.log_reference[0])
        log_u = np.where(out, -np.inf, np.where(self.dead_u, np.inf, log_u))
        return log_u, self.full_log_v("x")

    def marginals(self) -> tuple[F64, F64]:
        r = self.arrays["r"].get() * float(self.progress["kappa"])
        return r, self.arrays["s"][: self.problem.shape[1]].get()

    def close(self) -> None:
        """Give K back at once; the potentials stay."""
        del self.K
        self.state["kernel"] = 0


def left_out(side: Side, log_reference: F64) -> Any:
    """Points whose scaling is exactly 0: no reference mass, or no weight where the penalty then allows none."""
    strict = side.penalty in ("kl", "balanced", "range")
    return np.isneginf(log_reference) | ((side.weight == 0) & strict)


class PlanStream:
    """The plan of given potentials, made from M in float64, block by block; numpy where M is numpy, else CuPy."""

    def __init__(self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None) -> None:
        la, lb = problem.log_reference
        self.problem = problem
        self.alpha = cp.asarray(np.where(np.isfinite(log_u), log_u, -np.inf) + np.where(np.isfinite(la), la, 0.0))
        self.beta = cp.asarray(np.where(np.isfinite(log_v), log_v, -np.inf) + np.where(np.isfinite(lb), lb, 0.0))

    def blocks(self, i0: int, i1: int) -> Iterator[tuple[int, int, Any, Any]]:
        p, c = self.problem, self.problem.reference_matrix
        for k0, k1, M in row_blocks(p.M[i0:i1]):
            yield i0 + k0, i0 + k1, M, None if c is None else cp.asarray(c[i0 + k0 : i0 + k1])

    def back(self, x: Any) -> Any:
        return x if isinstance(self.problem.M, cp.ndarray) else x.get()

    def plan(self, i0: int, i1: int) -> Any:
        n, p = self.problem.shape[1], self.problem
        on_device = isinstance(p.M, cp.ndarray)
        out = (cp if on_device else np).empty((i1 - i0, n), p.M.dtype)
        for k0, k1, M, c in self.blocks(i0, i1) if i1 > i0 else ():
            block = out[k0 - i0 : k1 - i0] if on_device else cp.empty((k1 - k0, n), p.M.dtype)
            run = stream("build_kernel", M, STORES[p.M.dtype.name])
            view = view_of(M, c, self.alpha[k0:k1], self.beta, p.reg)
            run(parts(k1 - k0, n), (256,), (view, block, np.int64(n), np.float64(0.0)))
            if not on_device:
                block.get(out=out[k0 - i0 : k1 - i0])
        return out

    def product(self, M: Any, c: Any, alpha: Any, beta: Any, X: Any) -> Any:
        (m, n), d = M.shape, X.shape[1]
        grid = parts(m, n)
        out, view = cp.empty((grid[1], m, d)), view_of(M, c, alpha, beta, self.problem.reg)
        for x0 in range(0, d, 4):
            stream("apply", M)(grid, (256,), (view, X, np.int64(d), np.int64(x0), out))
        return out.sum(0)

    def apply(self, X: Any) -> Any:
        X, flat = as_columns(X, self.problem.shape[1], "X")
        rows = [
            self.product(M, c, self.alpha[i0:i1], self.beta, X) for i0, i1, M, c in self.blocks(0, self.problem.shape[0])
        ]
        out = self.back(cp.concatenate(rows))
        return out[:, 0] if flat else out

    def apply_transpose(self, Y: Any) -> Any:
        m, n = self.problem.shape
        Y, flat = as_columns(Y, m, "Y")
        out = cp.zeros((n, Y.shape[1]))
        for i0, i1, M, c in self.blocks(0, m):
            out += self.product(M.T, None if c is None else c.T, self.beta, self.alpha[i0:i1], Y[i0:i1])
        out = self.back(out)
        return out[:, 0] if flat else out

    def sums(self) -> tuple[float, F64, F64]:
        (m, n), reg = self.problem.shape, self.problem.reg
        row, col, cost = cp.empty(m), cp.zeros(n), 0.0
        for i0, i1, M, c in self.blocks(0, m):
            row[i0:i1], paid = reduce_rows("plan_sums", M, c, self.alpha[i0:i1], self.beta, reg, 2)
            turned = None if c is None else c.T
            col += reduce_rows("plan_sums", M.T, turned, self.beta, self.alpha[i0:i1], reg, 2)[0]
            cost += float(paid.sum())
        return cost, row.get(), col.get()


def as_columns(X: Any, length: int, name: str) -> tuple[Any, bool]:
    """(length, d) float64 on the device, C order, and whether it came as a vector."""
    X = cp.asarray(asarray(X), dtype=np.float64)
    if X.ndim not in (1, 2) or X.shape[0] != length:
        raise ValueError(f"{name} must have shape ({length},) or ({length}, d), got {X.shape}")
    return cp.ascontiguousarray(X[:, None] if X.ndim == 1 else X), X.ndim == 1
