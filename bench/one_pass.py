"""pass: one pass over K by each method, as a fraction of the read limit measured in the same rounds.

    fused        row_pass: K is read once, float64 sums (the O(mn) part)
    full         row_pass and finish_pass of the default method
    narrow       row_pass in float32 arithmetic, as the solver's first passes run (float32 K only)
    in place     the paper's single pass with carried scalings
    two sweeps   K v, then K^T u, our arithmetic in C
    POT          its two products in numpy, same dtype
    four sweeps  the paper's baseline, numpy on the plan
    read, scale  the limits: reading as many bytes, reading and writing them back

Every method's result is checked against numpy before it is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mapuot._core import ffi, lib

from mapuot.backends import Options, cpu
from mapuot.backends.cpu import native
from mapuot.problem.problem import Problem

from . import common, library
from .limits import Buffer

SHAPES = [(s, s) for s in (512, 1024, 2048, 4096, 8192, 10240)] + [(1024, 65536), (65536, 1024)]
QUICK = [(512, 512), (2048, 2048), (256, 16384)]
DTYPES = ("float32", "float64")
PARITY = {"float32": 2e-5, "float64": 1e-11}
OURS = ("fused", "narrow", "full", "in place", "two sweeps")
REG, RHO = 0.5, 1.0


class Case:
    """One shape and dtype: two workspaces, numpy's K and plan, and the calls to be timed."""

    def __init__(self, m: int, n: int, dtype: str, threads: int) -> None:
        rng = np.random.default_rng([m, n])
        self.M = rng.random((m, n), np.float32)
        self.a, self.b = np.full(m, 1 / m) * (0.5 + rng.random(m)), np.full(n, 1 / n) * (0.5 + rng.random(n))
        problem = Problem.from_arrays(self.M, self.a, self.b, REG, RHO, "kl", "product", cpu)
        options = {"precision": dtype, "tol": -1.0, "tol_gap": -1.0, "threads": threads}
        self.fused = cpu.Workspace(problem, Options(translate=True, memory=5, in_place=False, **options))
        self.in_place = cpu.Workspace(problem, Options(translate=False, memory=0, in_place=True, **options))
        self.size = m * n * np.dtype(dtype).itemsize
        self.stats, self.made = ffi.new("mapuot_stats *"), ffi.new("int64_t *")
        self.fi = np.dtype(dtype).type(RHO / (RHO + REG))
        self.K = np.empty((m, n), dtype)
        self.P = np.empty((m, n), dtype)
        self.rates = self.fused.limits.lam_rate, self.fused.limits.mu_rate
        self.start()

    def start(self) -> None:
        """All states at v = 1, plain iteration."""
        m, n = self.M.shape
        for workspace in (self.fused, self.in_place):
            workspace.absorb(np.zeros(n))
            workspace.progress.narrow, workspace.limits.finer = 0, 0  # K as stored
        self.auto(False)
        self.K[:] = self.fused.K.reshape(m, -1)[:, :n]
        # K v = prod of the absorbed scalings: numpy's v starts where the state's scale does
        self.v = self.fused.col_side["scale"][:n].astype(self.K.dtype)
        self.P[:] = self.K * self.v
        self.u = np.ones(m, self.K.dtype)

    def auto(self, on: bool) -> None:
        limits, progress = self.fused.limits, self.fused.progress
        limits.lam_rate, limits.mu_rate = self.rates if on else (0.0, 0.0)
        limits.memory = 5 if on else 0
        progress.have, progress.head, progress.depth, progress.extrapolated = 0, 0, 0, 0

    # ---- the calls ----

    def row_pass(self, pool: Any) -> None:
        self.fused.progress.passes += 1  # the direction of the sweep alternates
        lib.mapuot_row_pass(pool, self.fused.state)

    def narrow_pass(self, pool: Any) -> None:
        self.fused.progress.narrow = 1
        self.row_pass(pool)
        self.fused.progress.narrow = 0

    def two_sweeps(self, pool: Any) -> None:
        library.two_sweeps(lib.mapuot_pool_threads(pool), self.fused.state)

    def full_pass(self, pool: Any, workspace: Any) -> None:
        lib.mapuot_iterate(pool, workspace.state, 1, self.stats, self.made)

    def pot(self) -> None:
        """POT's iteration in the scaling of K; w holds what K absorbed, as POT's a and b do."""
        self.u = np.power(self.row_weight / np.dot(self.K, self.v), self.fi)
        self.v = np.power(self.col_weight / np.dot(self.K.T, self.u), self.fi)

    def four_sweeps(self) -> None:
        """The paper's baseline: four reads and two writes of the plan."""
        rows = self.P.sum(1)
        self.P *= np.power(self.row_weight / rows, self.fi)[:, None]
        columns = self.P.sum(0)
        self.P *= np.power(self.col_weight / columns, self.fi)

    def weights(self) -> None:
        """base = fi log w: u = (w / K v)^fi is the prox of the state."""
        for name, side, count in (("row_weight", self.fused.row_side, len(self.a)),
                                  ("col_weight", self.fused.col_side, len(self.b))):  # fmt: skip
            weight = np.exp(side["base"][:count] / side["fi"][:count])
            setattr(self, name, weight.astype(self.K.dtype))

    # ---- parity ----

    def check(self, pool: Any) -> dict[str, float]:
        """Largest relative difference of each method from numpy in float64, after three passes."""
        self.start()
        self.weights()
        K, fi = self.K.astype(np.float64), RHO / (RHO + REG)
        v = self.fused.col_side["scale"][: len(self.b)].copy()
        for _ in range(3):
            u = (self.row_weight.astype(float) / (K @ v)) ** fi
            sums = K.T @ u
            last, v = v, (self.col_weight.astype(float) / sums) ** fi
        found = {}
        for name, workspace in (("fused", self.fused), ("in place", self.in_place)):
            for _ in range(3):
                self.full_pass(pool, workspace)
            found[name] = relative(workspace.col_side["scale"][: len(v)], v)
        for _ in range(3):
            self.pot()
        found["POT"] = relative(self.v, v)
        self.fused.col_side["scale"][: len(v)] = last
        calls = {"row_pass": self.row_pass, "two sweeps": self.two_sweeps}
        if self.K.dtype == np.float32:
            self.fused.narrow_v[: len(v)] = last
            calls["narrow"] = self.narrow_pass
        for name, call in calls.items():
            call(pool)
            found[name] = max(relative(self.fused.row_side["scale"], u), relative(self.fused.sums[: len(v)], sums))
        bound = PARITY[self.K.dtype.name]
        wrong = {name: error for name, error in found.items() if not error < bound}
        assert not wrong, f"parity: {wrong} against {bound} at {self.M.shape} {self.K.dtype}"
        return found


def relative(x: Any, y: Any) -> float:
    return float(np.max(np.abs(x - y) / np.abs(y)))


def variants(case: Case, pool: Any) -> dict[str, Any]:
    """Variants of row_pass: in float32 arithmetic, and in the instruction set below the active one."""
    calls: dict[str, Any] = {}
    if case.K.dtype == np.float32:
        calls["narrow"] = lambda: case.narrow_pass(pool)
    if native.isa() != "avx512":
        return calls

    def avx2() -> None:
        native.set_isa("avx2")
        case.row_pass(pool)
        native.set_isa("auto")

    return {**calls, "fused, avx2": avx2}


def time_case(case: Case, threads: int, budget: float) -> dict[str, Any]:
    m, n = case.M.shape
    pool = native.pool_for(threads, 0)
    parity = case.check(pool)
    buffer = Buffer(case.size, threads)
    buffer.repeats = 1
    way = buffer.best_read(budget / 4)
    case.auto(True)
    calls = {
        "read": lambda: buffer.read(*way),
        "fused": lambda: case.row_pass(pool),
        **variants(case, pool),
        "full": lambda: case.full_pass(pool, case.fused),
        "two sweeps": lambda: case.two_sweeps(pool),
        "scale": buffer.scale,
        "in place": lambda: case.full_pass(pool, case.in_place),
        "POT": case.pot,
        "four sweeps": case.four_sweeps,  # one thread: beside it those of BLAS, which spin for 30 ms, fall asleep
    }
    with common.blas_threads(threads), np.errstate(all="ignore"):
        times = common.interleave(calls, budget, (3, 200))
    best = {name: min(values) for name, values in times.items()}
    return {
        "m": m, "n": n, "dtype": case.K.dtype.name, "threads": threads, "bytes": case.size, "parity": parity,
        "read_GBps": case.size / best["read"] / 1e9,
        "fraction": {k: fraction(times, k) for k in times if k != "read"},
        "speedup": {k: common.ratio(times, "POT", k) for k in OURS if k in times},
        "over_four_sweeps": {k: common.ratio(times, "four sweeps", k) for k in OURS if k in times},
        "finish_share": 1 - best["fused"] / best["full"],
        "seconds": common.summaries(times),
    }  # fmt: skip


def fraction(times: common.Timings, name: str) -> dict[str, float]:
    """The part of the limit reached: the time to read (in place: to read and write) K over the time of the pass."""
    return common.ratio(times, "scale" if name == "in place" else "read", name)


def run(args: Any) -> dict[str, Any]:
    shapes, budget = (QUICK, 0.5) if args.quick else (SHAPES, 1.5)
    counts = sorted({1, args.threads})
    rows = []
    for m, n in shapes:
        for dtype in DTYPES:
            case = Case(m, n, dtype, max(counts))
            rows += [time_case(case, threads, budget) for threads in counts]
            print(*("  ".join(map(str, cells(row))) for row in rows[-len(counts) :]), sep="\n", flush=True)
            del case
    return {"passes": rows}


RATIOS = [("speedup", "fused"), ("speedup", "narrow"), ("speedup", "full"), ("over_four_sweeps", "fused"),
          ("over_four_sweeps", "narrow"), ("over_four_sweeps", "in place")]  # fmt: skip
HEADER = ["size", "K", "threads", "read GB/s", "fused", "(median)", "avx2", "narrow", "full", "two sweeps", "POT",
          "in place", "POT/fused", "POT/narrow", "POT/full", "4sw/fused", "4sw/narrow", "4sw/in place",
          "O(n) %"]  # fmt: skip


def of_minima(found: dict[str, Any], name: str) -> str:
    return f"{found[name]['of_minima']:.2f}" if name in found else "-"


def cells(r: dict[str, Any]) -> list[Any]:
    part = r["fraction"]
    return [
        f"{r['m']}x{r['n']}", r["dtype"], r["threads"], f"{r['read_GBps']:.0f}", of_minima(part, "fused"),
        f"{part['fused']['median']:.2f}",
        *(of_minima(part, name) for name in ("fused, avx2", "narrow", "full", "two sweeps", "POT", "in place")),
        *(of_minima(r[over], name) for over, name in RATIOS), f"{100 * r['finish_share']:.0f}",
    ]  # fmt: skip


def report(data: dict[str, Any]) -> str:
    text = "fractions of the limit and ratios, of minima (in place: of reading and writing)\n"
    return text + common.table(HEADER, [cells(r) for r in data["passes"]])


def plot(data: dict[str, Any], path: Path) -> None:
    counts = sorted({r["threads"] for r in data["passes"]})
    names = ["fused", "full", "two sweeps", "POT", "four sweeps"]
    with common.figure(path, columns=len(DTYPES), rows=len(counts), width=7) as axes:
        for row, threads in zip(axes, counts, strict=True):
            for axis, dtype in zip(row, DTYPES, strict=True):
                rows = [r for r in data["passes"] if r["threads"] == threads and r["dtype"] == dtype]
                for k, name in enumerate(names):
                    values = [r["fraction"][name]["of_minima"] for r in rows]
                    axis.bar([x + 0.16 * (k - 2) for x in range(len(rows))], values, 0.16, label=name)
                axis.axhline(1, color="k", lw=1)
                axis.set_xticks(range(len(rows)), [f"{r['m']}x{r['n']}" for r in rows], rotation=30)
                axis.set(ylabel="fraction of the read limit", title=f"K {dtype}, {threads} thread{'s' * (threads > 1)}")
        axes[0][0].legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.06), fontsize=8)
