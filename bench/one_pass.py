"""pass: one pass over K by each method, as a fraction of the read limit measured in the same rounds.

    pass         row_pass: K is read once, float64 sums (the O(mn) part)
    narrow       row_pass in float32 arithmetic, as a solve's first passes run (float32 K only)
    full         row_pass and finish_pass of the default method
    in place     the paper's single pass with carried scalings; its limit is to read and write K
    POT          its two products in numpy, same dtype
    four sweeps  the paper's baseline, numpy on the plan

Every method's result is checked against numpy before it is timed.
"""

from functools import partial
from typing import Any

import numpy as np
from mapuot._core import ffi, lib

from mapuot.backends.cpu import native

from . import common
from .bandwidth import Buffer
from .device import endless

SHAPES = [(s, s) for s in (512, 1024, 2048, 4096, 8192, 10240)] + [(1024, 65536), (65536, 1024)]
SHOWN = [(1024, 1024), (2048, 2048), (8192, 8192), (10240, 10240), (65536, 1024)]
QUICK = [(512, 512), (1024, 1024), (256, 16384)]
PARITY = {"float32": 2e-5, "float64": 1e-11}
REG, RHO = 0.5, 1.0


class Case:
    """One shape and dtype: two workspaces, numpy's K and plan, and the calls to be timed."""

    def __init__(self, m: int, n: int, dtype: str, threads: int) -> None:
        rng = np.random.default_rng([m, n])
        self.M = rng.random((m, n), np.float32)
        words = {"a": (0.5 + rng.random(m)) / m, "b": (0.5 + rng.random(n)) / n, "threads": threads, "reg": REG}
        self.fused = endless(self.M, dtype, **words)
        self.in_place = endless(self.M, dtype, in_place=True, **words)
        self.stats = ffi.new("mapuot_stats *")
        self.made = ffi.new("int64_t *")
        self.rates = self.fused.limits.lam_rate, self.fused.limits.mu_rate
        self.K = self.fused.operator.matrix.copy()
        self.fi = self.K.dtype.type(RHO / (RHO + REG))
        # base = fi log w: the state's u is (w / K v)^fi, and w contains K's absorbed scaling, as POT's a and b do
        sides = (self.fused.row_side, m), (self.fused.col_side, n)
        self.weights = [np.exp(side["base"][:k] / side["fi"][:k]).astype(dtype) for side, k in sides]
        self.v = self.fused.col_side["scale"][:n].astype(dtype)
        self.P = self.K * self.v
        self.auto(False)

    def auto(self, on: bool) -> None:
        """Turn translation and extrapolation on or off."""
        limits, progress = self.fused.limits, self.fused.progress
        if on:
            limits.lam_rate, limits.mu_rate = self.rates
        else:
            limits.lam_rate, limits.mu_rate = (0.0, 0.0)
        if on:
            limits.anderson_depth = 5
        else:
            limits.anderson_depth = 0
        progress.have, progress.head, progress.depth, progress.extrapolated = 0, 0, 0, 0

    def row_pass(self, pool: Any) -> None:
        self.fused.progress.passes += 1  # the direction of the sweep alternates
        lib.mapuot_row_pass(pool, self.fused.state)

    def narrow_pass(self, pool: Any) -> None:
        self.fused.progress.narrow = 1
        self.row_pass(pool)
        self.fused.progress.narrow = 0

    def full_pass(self, pool: Any, workspace: Any) -> None:
        lib.mapuot_iterate(pool, workspace.state, 1, self.stats, self.made)

    def pot(self) -> None:
        self.u = np.power(self.weights[0] / np.dot(self.K, self.v), self.fi)
        self.v = np.power(self.weights[1] / np.dot(self.K.T, self.u), self.fi)

    def four_sweeps(self) -> None:
        """Four reads and two writes of the plan."""
        self.P *= np.power(self.weights[0] / self.P.sum(1), self.fi)[:, None]
        self.P *= np.power(self.weights[1] / self.P.sum(0), self.fi)

    def check(self, pool: Any) -> dict[str, float]:
        """Compare each method with numpy in float64, after three passes: the largest relative difference."""
        K = self.K.astype(np.float64)
        n = self.M.shape[1]
        fi = RHO / (RHO + REG)
        v = self.fused.col_side["scale"][:n].copy()
        for _ in range(3):
            u = (self.weights[0].astype(float) / (K @ v)) ** fi
            sums = K.T @ u
            last = v
            v = (self.weights[1].astype(float) / sums) ** fi
            self.pot()
            for workspace in (self.fused, self.in_place):
                self.full_pass(pool, workspace)
        found = {"POT": relative(self.v, v)}
        for name, workspace in (("full", self.fused), ("in place", self.in_place)):
            found[name] = relative(workspace.col_side["scale"][:n], v)
        self.fused.col_side["scale"][:n] = last
        calls = {"pass": self.row_pass}
        if self.K.dtype == np.float32:
            self.fused.operator.narrow_v[:n] = last
            calls["narrow"] = self.narrow_pass
        for name, call in calls.items():
            call(pool)
            found[name] = max(relative(self.fused.row_side["scale"], u), relative(self.fused.sums[:n], sums))
        bound = PARITY[self.K.dtype.name]
        wrong = {name: error for name, error in found.items() if not error < bound}
        assert not wrong, f"parity: {wrong} against {bound} at {self.M.shape} {self.K.dtype}"
        return found


def relative(x: Any, y: Any) -> float:
    return float(np.max(np.abs(x - y) / np.abs(y)))


def time_case(m: int, n: int, dtype: str, threads: int, budget: float) -> dict[str, Any]:
    case = Case(m, n, dtype, threads)
    pool = native.pool_for(threads, 0)
    parity = case.check(pool)
    buffer = Buffer(case.K.nbytes, threads, 1)
    way = buffer.best_read(budget / 4)
    case.auto(True)
    calls = {
        "read": lambda: buffer.read(*way),
        "pass": partial(case.row_pass, pool),
        "narrow": partial(case.narrow_pass, pool),
        "full": partial(case.full_pass, pool, case.fused),
        "scale": buffer.scale,
        "in place": partial(case.full_pass, pool, case.in_place),
        "POT": case.pot,
        "four sweeps": case.four_sweeps,  # one thread: BLAS's threads beside it, which spin for 30 ms, fall asleep
    }
    if dtype != "float32":
        del calls["narrow"]
    with common.blas_threads(threads), np.errstate(all="ignore"):
        times = common.interleave(calls, budget, (3, 200))
    passes = [name for name in calls if name not in ("read", "scale")]
    return {
        "m": m, "n": n, "dtype": dtype, "threads": threads, "bytes": case.K.nbytes, "parity": parity,
        "read_GBps": case.K.nbytes / min(times["read"]) / 1e9,
        "fraction": {k: common.ratio(times, "scale" if k == "in place" else "read", k) for k in passes},
        "speedup": common.ratio(times, "POT", "pass"), "over_four_sweeps": common.ratio(times, "four sweeps", "pass"),
        "seconds": common.summaries(times),
    }  # fmt: skip


def run(args: Any) -> dict[str, Any]:
    if args.quick:
        shapes, budget = QUICK, 0.5
    else:
        shapes, budget = SHAPES, 1.5
    cases = [(*shape, dtype, k) for shape in shapes for dtype in PARITY for k in sorted({1, args.threads})]
    return {"passes": [time_case(*case, budget) for case in cases]}


def tables(data: dict[str, Any]) -> str:
    """Fractions of the limit: of minima in one run."""
    rows = []
    for r in (r for r in data["passes"] if (r["m"], r["n"]) in SHOWN):
        part = {name: f"{found['of_minima']:.2f}".removeprefix("0") for name, found in r["fraction"].items()}
        over = [f"{r[key]['of_minima']:.1f}" for key in ("speedup", "over_four_sweeps")]
        shares = [part.get(name, "") for name in ("pass", "narrow", "full", "in place", "POT")]
        rows.append([f"{r['m']} x {r['n']}", r["dtype"], r["threads"], f"{r['read_GBps']:.0f}", *shares, *over])
    names = "size,K,threads,read GB/s,pass,narrow,full,in place,POT,x POT,x four sweeps"
    return common.text_of(f"{common.machine_line(data)}:", common.table(names.split(","), rows))
