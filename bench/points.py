"""points: costs made in every pass, against a stored matrix and flash-sinkhorn, on uniform clouds; others: zoo.

A pass: seconds of float32 and float64 ones, taken in turn with those over a stored float32 K where that fits; on a GPU
evaluations of pairs, two of each a pass ("last": of passes that end a solve to 1e-6), beside its rate of 2^x. n is
4,000 and 10,000, on a GPU 10,000 and 100,000, or --size.

On a GPU: solves to tol 1e-6. The error of their plans is measured on ROWS sampled rows, formed by SciPy in float64
outside of the library, against a solve to 1e-9. Beside it stand 100 iterations of flash-sinkhorn, and 1000 where these
take up to ten seconds. For a plan error of 1e-3 (100,000 points in 3-D, not --quick): our seconds to a certified one,
and flash-sinkhorn's with the fewest iterations, of doubled ones, that reach it, with TF32 and without. Balanced clouds
(not --quick) in a unit cube at a blur of .05: seconds to a certified 1e-6 and to the final marginal error of
flash-sinkhorn's multiscale solver, beside its seconds; the marginals of ROWS sampled rows and columns judge both.

Unbalanced ones (not --quick; on a GPU to 1e-6 at the blur .05 of half the squared distance, on a CPU to 1e-4 at
reg / range(M) 1e-3), with seconds and memory; one image pair as Grid and, up to 128 x 128 on a CPU, as PointCloud.
"""

import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist
from tqdm import tqdm

import mapuot
from mapuot.problem.problem import Problem
from mapuot.route.options import make_options

from . import common
from .device import elapsed, endless
from .sparse import row_pass

SIZES = (4_000, 10_000)
GPU_SIZES = (10_000, 100_000)
QUICK_SIZE = 1_500
DIMENSIONS = (2, 3, 10, 64)
REGS = (0.05, 0.01)
RHO = 1.0
SMALL, FEW = 1e-3, 3  # of costs of 1, in up to so many dimensions: where most pairs can be skipped
ROWS = 200
MOST_BYTES = 1 << 32  # of the matrices that a stored K or a peer needs
ITERATIONS = (100, 1000)  # a peer's counts
LONG = 10.0  # seconds; a slower call gets the first count only
PLAN_ERROR = 1e-3
ERROR_RHOS = (0.1, 1.0, 10.0)
LONGEST = 5.0  # seconds; a slower call ends the search for a number of iterations
LARGE = (100_000, 1_000_000)
LARGE_REG = 0.05**2
FLASH_TOL = 5e-3  # its default
FLASH_DIMENSIONS = (3,)  # in each it tries its kernels for two minutes before the first call ends


def clouds(n: int, d: int) -> tuple[Any, Any, Any, Any]:
    """(x, y, a, b); |x - y|^2 is about 1 at most."""
    rng = np.random.default_rng(d)
    x = rng.random((n, d)) / math.sqrt(d)
    y = (0.9 * rng.random((n, d)) + 0.1) / math.sqrt(d)
    return x, y, np.full(n, 1 / n), np.full(n, 1.2 / n)


# ---- one pass


def passes(n: int, d: int, threads: int) -> dict[str, Any]:
    """Time one row pass in each kind of sums, in turns with one over a stored K where that fits."""
    x, y, a, b = clouds(n, d)
    cloud = mapuot.PointCloud(x, y, truncate=None)
    kinds = {"float32": (cloud, "float32"), "float64": (cloud, "float64")}
    if 12 * n * n <= MOST_BYTES:
        kinds["stored float32"] = np.asarray(cloud), "float32"
    calls = {}
    for name, (M, storage) in kinds.items():
        workspace = endless(M, storage, a=a, b=b, threads=threads)
        workspace.progress.narrow = int(storage == "float32")
        calls[name] = row_pass(workspace)
    seconds = {name: min(samples) for name, samples in common.interleave(calls, 3.0).items()}
    return {"n": n, "d": d, "seconds": seconds, "pairs_a_second": {k: n * n / s for k, s in seconds.items()}}


EX2 = """extern "C" __global__ void ex2(float *out, int count)
{
    float x[8], sum = 0;
    for (int q = 0; q < 8; q++)
        x[q] = -1e-3f * threadIdx.x - q;
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int q = 0; q < 8; q++)
            asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[q]));
    for (int q = 0; q < 8; q++)
        sum += x[q];
    if (sum == 123.0f)
        out[0] = sum;
}"""


def ex2_limit() -> float:
    """2^x a second: no evaluation in float32 is faster."""
    import cupy as cp

    run = cp.RawKernel(EX2, "ex2")
    out = cp.zeros(1, np.float32)
    count = 1 << 14
    blocks = 4 * cp.cuda.Device().attributes["MultiProcessorCount"]
    seconds = elapsed(lambda: run((blocks,), (512,), (out, np.int32(count))))
    return float(8 * 512 * blocks * count / seconds)


def device_passes(n: int, d: int) -> dict[str, Any]:
    """Time both sums of a pass on the GPU, two evaluations of each pair: first and last ones of a solve, exact ones."""
    from mapuot.backends.cuda import backend as cuda

    x, y, a, b = clouds(n, d)
    seconds = {}
    limit = ex2_limit()
    for name, precision in (("float32", "mixed"), ("last", "mixed"), ("float64", "float64")):
        problem = Problem.from_arrays(mapuot.PointCloud(x, y, truncate=None), a, b, REGS[0], RHO, "kl", "product", cuda)
        workspace = cuda.workspace(problem, make_options("auto", precision, 1e-6, None, 1))
        if name == "last":
            workspace.progress["narrow"] = 0
            workspace.choose()
        workspace.absorb(np.zeros(n))
        seconds[name] = elapsed(workspace.launch.row_kernels)
    rates = {name: 2 * n * n / s for name, s in seconds.items()}
    return {"n": n, "d": d, "seconds": seconds, "pairs_a_second": rates, "of_ex2": rates["float32"] / limit}


# ---- a solve


def row(
    who: str, call: Callable[[], Any], missed: Callable[[Any], dict[str, float]] = lambda found: {}
) -> dict[str, Any]:
    """Return a call's seconds, MiB beyond the memory held before, its own figures, and its error by ``missed``."""
    before = common.forget_peak()
    begun = time.perf_counter()
    found = call()
    made = {"who": who, "seconds": time.perf_counter() - begun, "MiB": (common.status("VmHWM") - before) / 2**20}
    if isinstance(found, mapuot.Result):
        made |= {"bound": found.error_bound, "kept": 1.0}
        if found.skipped:
            made["kept"] = found.skipped.kept.share
    return made | {"iterations": found.n_passes, **missed(found)}


def plan_missed(cloud: Any, reg: float, exact: Any) -> Callable[[Any], dict[str, float]]:
    """Return a function that tells the error of an answer's plan, of sampled rows in float64."""
    x, y, a, b = cloud
    some = np.random.default_rng(0).choice(len(x), min(ROWS, len(x)), replace=False)

    def rows(found: Any) -> Any:
        with np.errstate(over="ignore"):
            exponent = found.log_u[some, None] + found.log_v - cdist(x[some], y, "sqeuclidean") / reg
            return a[some, None] * b * np.exp(exponent)

    truth = rows(exact)
    return lambda found: {"error": float(np.abs(rows(found) - truth).sum() / truth.sum())}


def solver(cloud: Any, reg: float, rho: float) -> Callable[..., Any]:
    """Return solves of these points on a GPU."""
    x, y, a, b = cloud
    known: dict[str, Any] = {"reg": reg, "reg_m": rho, "backend": "cuda", "max_passes": 2000}
    return lambda tol, **options: mapuot.solve(mapuot.PointCloud(x, y, **options), a, b, tol=tol, **known)


def flash(x: Any, y: Any, a: Any, b: Any, reg: float, rho: float, iterations: int = 0, **options: Any) -> Any:
    """Return flash-sinkhorn's answer after so many iterations, 0: by its multiscale solver.

    To tune its kernels (``autotune``) takes 94 s for each number of points (H200).
    """
    import torch
    from flash_sinkhorn import SamplesLoss

    known: dict[str, Any] = {"blur": math.sqrt(reg), "potentials": True}
    if iterations:
        known |= {"reach": math.sqrt(rho), "eps": reg, "n_iters": iterations, "normalize": False}
        known["use_epsilon_scaling"] = False
    loss = SamplesLoss(**known, **options)
    f, g = (z.double().cpu().numpy() / reg for z in loss(*(torch.from_numpy(z).float().cuda() for z in (a, x, b, y))))
    made = iterations or loss.last_multiscale_info.fine_updates
    return SimpleNamespace(log_u=f, log_v=g, n_passes=made)


def solves(n: int, d: int, reg: float) -> list[dict[str, Any]]:
    cloud = clouds(n, d)
    found = []
    solve = solver(cloud, reg, RHO)
    case = {"n": n, "d": d, "reg": reg}
    missed = plan_missed(cloud, reg, solve(1e-9, truncate=None))
    for truncate in (None, 1.0)[: 1 + (reg == SMALL)]:
        call = functools.partial(solve, 1e-6, truncate=truncate)
        call()  # compiles
        found.append(case | row("points" + ", truncated" * (truncate is not None), call, missed))
    has_flash = importlib.util.find_spec("flash_sinkhorn") and d in FLASH_DIMENSIONS
    for tf32 in (True, False) if has_flash else ():
        call = functools.partial(flash, *cloud, reg, RHO, allow_tf32=tf32)
        call(iterations=2)  # compiles
        for count in ITERATIONS:
            if count == ITERATIONS[0] or found[-1]["seconds"] * count / ITERATIONS[0] <= LONG:
                name = f"flash-sinkhorn, {'TF32' if tf32 else 'float32'}, {count} iterations"
                found.append(case | row(name, functools.partial(call, iterations=count), missed))
    return found


def to_error(n: int, reg: float, rho: float) -> dict[str, Any]:
    """Seconds to PLAN_ERROR; flash-sinkhorn's longest try counts where LONGEST or its floor comes first."""
    cloud = clouds(n, 3)
    solve = solver(cloud, reg, rho)
    tries = []
    missed = plan_missed(cloud, reg, solve(1e-9))
    solve(PLAN_ERROR)  # compiles
    ours = row("mapuot", lambda: solve(PLAN_ERROR), missed)
    for tf32 in (True, False) if importlib.util.find_spec("flash_sinkhorn") else ():
        flash(*cloud, reg, rho, 2, allow_tf32=tf32)  # compiles
        iterations = 8
        last = {"seconds": 0.0, "error": math.inf}
        while last["error"] > PLAN_ERROR and 2 * last["seconds"] < LONGEST:
            iterations *= 2
            call = functools.partial(flash, *cloud, reg, rho, iterations, allow_tf32=tf32)
            last = row("flash-sinkhorn", call, missed)
        tries.append({"TF32": tf32, "reached": last["error"] <= PLAN_ERROR, **last})
    found = {"n": n, "reg": reg, "rho": rho, **ours}
    if tries:
        found["flash"] = tries
    return found


# ---- large clouds


def large(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(n)
    w = np.full(n, 1 / n)
    cloud = x, y, *_ = rng.random((n, 3)), rng.random((n, 3)), w, w
    solve = solver(cloud, LARGE_REG, math.inf)
    calls: dict[str, Callable[[], Any]] = {
        f"mapuot, {tol:g}": functools.partial(solve, tol) for tol in (1e-6, FLASH_TOL)
    }
    if importlib.util.find_spec("flash_sinkhorn"):
        more = {"backend": "multiscale", "tol": FLASH_TOL}
        calls[f"flash-sinkhorn, multiscale, {FLASH_TOL:g}"] = functools.partial(flash, *cloud, LARGE_REG, RHO, **more)

    def missed(found: Any) -> dict[str, float]:
        pairs = (x, y, found.log_u, found.log_v), (y, x, found.log_v, found.log_u)
        return {"marginals": max(marginal_missed(*pair) for pair in pairs)}

    rows = []
    for name, call in calls.items():
        call()  # compiles
        rows.append({"n": n, **row(name, call, missed)})
    return rows


def marginal_missed(x: Any, y: Any, log_u: Any, log_v: Any) -> float:
    """The mean of |r_i / a_i - 1| over sampled rows, weights equal."""
    some = np.random.default_rng(0).choice(len(x), min(ROWS, len(x)), replace=False)
    sums = [np.exp(log_u[i] + log_v - ((x[i] - y) ** 2).sum(1) / LARGE_REG).mean() for i in some]
    return float(np.abs(np.array(sums) - 1).mean())


def unbalanced(n: int, threads: int, gpu: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x, y = (rng.random((n, 3), np.float32) for _ in range(2))
    a = np.full(n, 1 / n)
    b = np.full(n, 1.2 / n)
    if gpu:
        scale, reg, tol = 0.5, LARGE_REG, 1e-6
    else:
        scale, reg, tol = 1.0, 3e-3, 1e-4

    def solved() -> Any:
        cloud = mapuot.PointCloud(x, y, scale=scale)
        return mapuot.solve(cloud, a, b, reg=reg, reg_m=RHO, tol=tol, threads=threads, backend="cuda" if gpu else "cpu")

    if gpu:
        solved()  # compiles
    return [{"n": n, **row(f"mapuot, unbalanced, reg {reg:g}, {tol:g}", solved)}]


# ---- images


def images(side: int, threads: int, backend: str) -> list[dict[str, Any]]:
    """One pair of side x side pixels as a Grid and, up to 128 x 128 or on a GPU, as a PointCloud."""
    grid = mapuot.Grid((side, side), spacing=1 / side)
    points = grid.points()
    a, b = (np.exp(-((points - z) ** 2).sum(1) / 0.02) + 1e-2 for z in ((0.3, 0.3), (0.4, 0.7)))
    costs: dict[str, Any] = {"Grid": grid}
    if side <= 128 or backend == "cuda":
        costs["PointCloud"] = mapuot.PointCloud(points, points)
    known: dict[str, Any] = {"reg_m": RHO, "threads": threads, "backend": backend}
    solve = functools.partial(mapuot.solve, a=a / a.sum(), b=1.2 * b / b.sum(), **known)
    return [
        {"side": side, "reg": reg, **row(name, functools.partial(solve, cost, reg=reg))}
        for reg in REGS for name, cost in costs.items()
    ]  # fmt: skip


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    if args.size:
        sizes = (args.size,)
    elif args.quick:
        sizes = (QUICK_SIZE,)
    elif gpu:
        sizes = GPU_SIZES
    else:
        sizes = SIZES
    if args.quick:
        dimensions = DIMENSIONS[1:2]
    else:
        dimensions = DIMENSIONS
    backend = "cuda" if gpu else "cpu"
    cases = [(n, d, reg) for n in sizes for d in dimensions for reg in (*REGS, *[SMALL] * (d <= FEW))]
    parts: list[tuple[str, Callable[..., Any], list[Any]]] = [
        ("passes", device_passes if gpu else functools.partial(passes, threads=args.threads),
         [(n, d) for n in sizes for d in dimensions]),
        ("images", functools.partial(images, threads=args.threads, backend=backend),
         [(side,) for side in ((96,) if args.quick else (128, 1024))]),
    ]  # fmt: skip
    if gpu:
        parts.append(("solves", solves, cases))
    if not args.quick:
        parts.append(("large", functools.partial(unbalanced, threads=args.threads, gpu=gpu), [(LARGE[-1],)]))
    if gpu and not args.quick:
        parts += [("to_error", to_error, [(LARGE[0], reg, rho) for reg in REGS for rho in ERROR_RHOS]),
                  ("large", large, [(n,) for n in LARGE])]  # fmt: skip
    found: dict[str, Any] = {name: [] for name, _, _ in parts}
    found["n"] = max(sizes)
    with common.blas_threads(args.threads):
        for name, call, jobs in parts:
            for job in tqdm(jobs, desc=name, file=sys.stderr):
                rows = call(*job)
                found[name] += rows if isinstance(rows, list) else [rows]
    return found


@common.each
def tables(data: dict[str, Any]) -> str:
    """Passes over points, and solves beside peers as "seconds (error of the plan)"."""
    gpu = common.on_gpu(data)
    kinds = [k for k in ("float32", "last", "float64", "stored float32") if k in data["passes"][0]["seconds"]]
    rows = [
        [p["n"], p["d"], *(p["pairs_a_second"][k] / 1e9 if k in p["seconds"] else "" for k in kinds),
         *([common.short(p["of_ex2"])] if gpu else [])]
        for p in data["passes"]
    ]  # fmt: skip
    names = [f"{k}, 10^9 {'evaluations' if gpu else 'pairs'} a second" for k in kinds]
    head = ["points", "dimensions", *names, *(["float32, of 2^x"] if gpu else [])]
    text = [f"{common.machine_line(data)}:", common.table(head, rows)]
    if "solves" in data:
        text.append(solve_table(data["solves"]))
    if data.get("to_error"):
        head, cells, mean = error_rows(data["to_error"])
        text += [common.table(head, cells), f"The geometric mean is {mean:.3g} times ours."]
    return common.text_of(*text)


def solve_table(rows: list[dict[str, Any]]) -> str:
    """Whole solves, a line a problem: seconds and, in brackets, the error of the plan."""
    solves: dict[Any, dict[str, str]] = {}
    for s in rows:
        cell = f"{s['seconds']:.3g} ({s['error']:.0e})"
        solves.setdefault((s["n"], s["d"], common.short(s["reg"])), {})[s["who"]] = cell
    who = list(dict.fromkeys(s["who"] for s in rows))
    lines = [[*case, *(cells.get(name, "") for name in who)] for case, cells in solves.items()]
    return common.table(["points", "dimensions", "reg", *who], lines)


def error_rows(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]], float]:
    """(heads, cells, geometric mean) of flash-sinkhorn's time in units of our time.

    It is the faster of the ways that reach the error; where none does, its longest try is a lower bound.
    """
    cells = []
    ratios = []
    for row in rows:
        tries = row.get("flash", [])
        fast = min((t for t in tries if t["reached"]), key=lambda t: t["seconds"], default=None)
        if fast:
            least = fast["seconds"]
        else:
            least = max((t["seconds"] for t in tries), default=math.nan)
        ratios.append(least / row["seconds"])
        cells.append(
            [row["n"], row["reg"], row["rho"], row["iterations"], f"{row['seconds']:.3g}", f"{row['error']:.1e}",
             *(f"{t['iterations']}, {t['seconds']:.3g}, {t['error']:.1e}" for t in tries),
             f"{'' if fast else '> '}{ratios[-1]:.3g}"]
        )  # fmt: skip
    names = [
        f"flash-sinkhorn, {way}: iterations, s, error" for way in ("TF32", "float32")[: len(rows[0].get("flash", []))]
    ]
    head = ["points", "reg", "reg_m", "passes", f"s to {PLAN_ERROR:g}", "error", *names, "times ours"]
    return head, cells, common.geometric_mean(ratios)
