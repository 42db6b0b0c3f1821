"""gromov: spaces without common coordinates, beside POT's and OTT's Gromov-Wasserstein.

Skewed points in 30 dimensions and their copy: rotated, shuffled, with a little noise, and with outliers in the place of
a fifth of them. ``matched`` is the share of the points with a true partner that have it as their heaviest one. POT and
mapuot solve the unbalanced problem from the same start a b^T, with POT's own limits; at 5000 points POT makes one step.
Distances are squared; on a GPU there are rows of Euclidean distances, which are not squared, too.
OTT solves the balanced problem, also by plans of low rank. Each call has its own process. Its memory is the peak above
the points' memory; on a GPU it is the size of CuPy's pool. ``cpu`` is the time of all threads, which a busy machine
does not change.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from typing import Any

import numpy as np

from . import common
from .device import device_name, missing

SIZES = (1000, 2000, 5000)
GPU_SIZES = (2000, 20_000, 100_000)
DIMENSIONS, NOISE, OUTLIERS = 30, 0.02, 0.2
REG, RHO = 0.03, 0.3  # in units of the squared variance of the points, or of the variance for Euclidean distances
SHARP = 0.003  # reg between Euclidean distances
POT_STEPS = {5000: 1}  # of POT, by the number of points; 100 elsewhere
RANK, RANKED = 100, 20_000  # rank of OTT's low-rank plans, and numbers of points that they are timed at
LONGEST, GPU_LONGEST = 1800.0, 45.0  # seconds until a call is ended; OTT's on a GPU


def problem(n: int) -> tuple[Any, Any, Any, float]:
    """Return both clouds, for each point of the first ones its copy's number or -1, and the squared variance."""
    rng = np.random.default_rng(0)
    size = 2 * 0.85 ** np.arange(DIMENSIONS)
    kept = round(n * (1 - OUTLIERS))
    x = (rng.normal(size=(n, DIMENSIONS)) + rng.exponential(size=(n, DIMENSIONS)) - 1) * size
    turn = np.linalg.qr(rng.normal(size=(DIMENSIONS, DIMENSIONS)))[0]
    order = rng.permutation(n)[:kept]
    copy = x[order] + NOISE * rng.normal(size=(kept, DIMENSIONS))
    y = np.vstack([copy, 2 * size * rng.normal(size=(n - kept, DIMENSIONS))]) @ turn
    partner = np.full(n, -1)
    partner[order] = np.arange(kept)
    return x, y, partner, float(x.var(0).sum() ** 2)


def share(found: Any, partner: Any) -> float:
    return float((np.asarray(found) == partner)[partner >= 0].mean())


def clocks() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


def ours(n: int, init: str, **options: Any) -> dict[str, Any]:
    """Return the seconds and the known figures of the answer."""
    import mapuot

    x, y, partner, unit = problem(n)
    reg = REG
    if options.get("metric") == "euclidean":
        unit = unit**0.5
        reg = SHARP
    mapuot.gromov(x, y, reg=unit, reg_m=unit, max_iter=1, tol=99.0, init="independent", **options)  # compiles GPU code
    before = peak_of(options, start=True)
    begun = clocks()
    result = mapuot.gromov(x, y, reg=reg * unit, reg_m=RHO * unit, init=init, **options)
    taken = clocks() - begun
    return {
        "seconds": taken[0], "cpu": taken[1], "memory": peak_of(options) - before, "value": result.value / unit,
        "settled": result.settled,
        "steps": len(result.steps), "change": result.steps[-1].change, "bound": result.error_bound,
        "passes": sum(step.n_passes for step in result.steps), "matched": share(result.top_k(1)[0][:, 0], partner),
    }  # fmt: skip


def pot(n: int, steps: int) -> dict[str, Any]:
    """Return the same of POT's unbalanced function."""
    import ot

    x, y, partner, unit = problem(n)
    before = peak_of({}, start=True)
    begun = clocks()
    X = ot.dist(x, x)
    Y = ot.dist(y, y)
    plan, _, log = ot.gromov.fused_unbalanced_gromov_wasserstein(
        X, Y, reg_marginals=RHO * unit, epsilon=REG * unit, max_iter=steps, log=True
    )
    taken = clocks() - begun
    return {
        "seconds": taken[0], "cpu": taken[1], "memory": peak_of({}) - before, "value": float(log["fugw_cost"]) / unit,
        "settled": len(log["error"]) < steps, "matched": share(plan.argmax(1), partner),
    }  # fmt: skip


def ott(n: int, rank: int) -> dict[str, Any]:
    """Return the same of OTT's balanced problem; its epsilon is our reg."""
    import jax

    jax.config.update("jax_enable_x64", rank < 0)
    from ott.geometry.pointcloud import PointCloud
    from ott.problems.quadratic.quadratic_problem import QuadraticProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn
    from ott.solvers.quadratic import gromov_wasserstein as dense
    from ott.solvers.quadratic import gromov_wasserstein_lr as low

    x, y, partner, unit = problem(n)
    given = QuadraticProblem(PointCloud(x), PointCloud(y))
    if rank < 0:
        solver: Any = dense.GromovWasserstein(linear_solver=Sinkhorn(), epsilon=REG * unit, relative_epsilon=None)
    else:
        solver = low.LRGromovWasserstein(rank=rank, epsilon=0.0)
    jax.block_until_ready(solver(given))  # compiles
    before = peak_of({}, start=True)
    begun = clocks()
    found = jax.block_until_ready(solver(given))
    taken = clocks() - begun
    return {
        "seconds": taken[0], "cpu": taken[1], "memory": peak_of({}) - before, "settled": bool(found.converged),
        "matched": share(np.asarray(found.matrix).argmax(1), partner) if n <= max(SIZES) else None,
    }  # fmt: skip


def peak_of(options: dict[str, Any], start: bool = False) -> float:
    """Return the peak in MiB so far; ``start``: reset the peak."""
    if options.get("backend") == "cuda":
        import cupy as cp

        pool = cp.get_default_memory_pool()
        if start:
            pool.free_all_blocks()
        return float(pool.total_bytes() / 2**20)
    return float(common.forget_peak() if start else common.status("VmHWM")) / 2**20


def measured(call: str, most: float = LONGEST) -> dict[str, Any]:
    """Return the value of a call of this module in its own process, which has ``most`` seconds."""
    try:
        return dict(common.alone(call, most))
    except subprocess.TimeoutExpired:
        return {"failed": f"not in {most:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"failed": error.stderr.strip()[-200:]}


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    if gpu and (why := missing()):
        return {"skipped": why}
    if gpu:
        sizes = GPU_SIZES
    else:
        sizes = SIZES
    if args.size or args.quick:
        sizes = (args.size or 300,)
    rows = []
    if gpu:
        options = "backend='cuda'"
        most = GPU_LONGEST
    else:
        options = f"threads={args.threads}"
        most = LONGEST
    for n in sizes:
        row: dict[str, Any] = {"n": n, "mapuot": measured(f"gromov.ours({n}, 'auto', {options})")}
        if gpu:
            call = f"gromov.ours({n}, 'auto', metric='euclidean', {options})"
            row["mapuot, Euclidean distances"] = measured(call, 90.0)
        else:
            row["mapuot, start a b^T"] = measured(f"gromov.ours({n}, 'independent', {options})")
            row["POT"] = measured(f"gromov.pot({n}, {POT_STEPS.get(n, 100)})")
        if importlib.util.find_spec("ott") and n <= RANKED:
            if n <= max(SIZES):
                row["OTT, balanced"] = measured(f"gromov.ott({n}, -1)", most)
            row[f"OTT, balanced, rank {RANK}"] = measured(f"gromov.ott({n}, {RANK})", most)
        rows.append(row)
        print(json.dumps(row), flush=True)
    data = {"rows": rows, "reg": REG, "rho": RHO}
    if gpu:
        data["device"] = device_name()
    return data


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return seconds, by the clock and of all threads, memory and the share that is matched."""
    lines = []
    if common.on_gpu(data):
        clock = ["seconds"]
    else:
        clock = ["seconds", "cpu"]
    for row in data["rows"]:
        for name, one in [*row.items()][1:]:
            *own, matched = (one.get(key, "") for key in (*clock, "memory", "matched"))
            cells = [*own, "" if matched in ("", None) else f"{100 * matched:.1f} %"]
            if one.get("settled", True):
                stopped = ""
            else:
                stopped = ", stopped"
            if "failed" in one:
                cells = [one["failed"], *cells[1:]]
            lines.append([f"{row['n']:,}", name + stopped, *cells])
    head = ["points", "", "seconds", *(["CPU s"] if len(clock) > 1 else []), "MiB", "matched"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
