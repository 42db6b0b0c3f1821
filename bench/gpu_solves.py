"""Whole solves on one GPU to a certified error, plan on the device, against POT on torch and CuPy arrays and OTT.

Every answer is certified by our gap. POT makes as many iterations as our equal iterates need (in float64, at most CAP;
where these do not suffice its time to CAP stands). What would last longer than LONG seconds is timed over FEW and MANY
iterations and carried on to that number; its error is then that of our equal iterates. "as called" is one call with
POT's own stop. OTT has the loosest threshold that certifies, up to OTT_UP_TO points. Peaks are bytes beyond M.
"""

from __future__ import annotations

import functools
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import common, peers, problems
from .peers import CAP, OUR_TWIN, POT_METHODS

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # POT imports JAX, which would take most memory
TOL = 1e-6
GRID = [(reg, reg_m) for reg in (0.1, 0.01) for reg_m in (0.1, 1.0, 10.0)]
SOLVED = (2000, 8000, 20000)
LONG, FEW, MANY = 1.0, 10, 60
ENOUGH, MOST_CALLS = 0.1, 20
OTT_UP_TO = 2000
OURS = {"mapuot": "mixed", "mapuot, float64 K": "float64"}

Case = tuple[Any, Any, Any, float, float]  # M on the device, a, b, reg, reg_m


def free_pools() -> None:
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
    try:
        import torch
    except ImportError:
        return
    torch.cuda.empty_cache()


def make(n: int) -> tuple[Any, Any, Any]:
    """Clouds in the plane, range(M) = 1, masses 1 and 1.2."""
    import cupy as cp

    rng = np.random.default_rng(n)
    M = problems.squared_distances(*(cp.asarray(rng.random((n, 2))) for _ in range(2)))
    a, b = 0.2 + rng.random((2, n))
    M /= M.max()
    return M, a / a.sum(), 1.2 * b / b.sum()


def wall(call: Callable[[], Any], repeat: int = 1) -> float:
    """Least seconds of call(), of so many calls or, if these are short, of those in ENOUGH seconds."""
    import cupy as cp

    times: list[float] = []
    while len(times) < repeat or (sum(times) < ENOUGH and len(times) < MOST_CALLS):
        cp.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        cp.cuda.Device().synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def on_host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x.cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)


def certified(plan: Any, log_u: Any, log_v: Any, case: Case) -> float:
    _, *rest = case
    return peers.certify_marginals(*map(on_host, (plan.sum(1), plan.sum(0), log_u, log_v)), *rest)


def solve(case: Case, **options: Any) -> Any:
    import mapuot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mapuot.solve(*case, backend="cuda", tol=TOL, **options)


def our_case(case: Case, precision: str) -> dict[str, Any]:
    import cupy as cp

    free_pools()
    before = cp.get_default_memory_pool().total_bytes()
    result = solve(case, precision=precision)
    error = certified(result.plan, result.log_u, result.log_v, case)
    found = {"passes": result.n_passes, "bound": result.error_bound, "error": error}
    found["peak"] = cp.get_default_memory_pool().total_bytes() - before
    del result
    return found | {"seconds": wall(lambda: solve(case, precision=precision).plan, 3)}


def pot_call(arrays: list[Any], reg: float, reg_m: float, method: str, iterations: int, log: bool = False) -> Any:
    import ot

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        options = {"numItermax": iterations, "stopThr": 0.0, "log": log, "warn": False}
        return ot.unbalanced.sinkhorn_unbalanced(*arrays, reg, reg_m, method=method, **options)


def pot_case(arrays: list[Any], case: Case, name: str, twin: dict[str, Any]) -> dict[str, Any]:
    import torch

    call = functools.partial(pot_call, arrays, *case[3:], POT_METHODS[name])
    call(3)
    free_pools()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    few, many = (wall(lambda k=k: call(k), 2) for k in (FEW, MANY))
    found = {"peak": torch.cuda.max_memory_allocated() - before, "carried on": False} | twin
    seconds = few + (twin["iterations"] - FEW) * (many - few) / (MANY - FEW)
    if seconds > LONG:
        return found | {"seconds": seconds, "carried on": True}
    while True:
        plan, log = call(found["iterations"], log=True)
        found["error"] = certified(plan, log["logu"], log["logv"], case)
        if found["error"] <= TOL or found["iterations"] >= CAP:
            break
        found["iterations"] = min(CAP, found["iterations"] + found["iterations"] // 32 + 1)
    del plan, log
    return found | {"seconds": wall(lambda: call(found["iterations"]), 2), "reached": found["error"] <= TOL}


def pot_cases(case: Case) -> dict[str, Any]:
    import cupy as cp
    import ot
    import torch

    on_cupy = [*map(cp.asarray, case[1:3]), case[0]]
    on_torch = [torch.from_dlpack(x) for x in on_cupy]
    row: dict[str, Any] = {}
    for name, method in OUR_TWIN.items():
        result = solve(case, method=method, precision="float64", max_passes=CAP)
        twin = {"iterations": result.n_passes, "error": result.error_bound, "reached": result.error_bound <= TOL}
        row[name] = pot_case(on_torch, case, name, twin)
        if name == "POT":
            row["POT, CuPy arrays"] = pot_case(on_cupy, case, name, twin)
            del row["POT, CuPy arrays"]["peak"]  # torch counts its own
    answer = functools.partial(ot.unbalanced.sinkhorn_unbalanced, *on_torch, *case[3:], warn=False)
    plan, log = answer(log=True)
    called = {"iterations": len(log["err"]), "error": certified(plan, log["logu"], log["logv"], case)}
    del plan, log
    row["POT as called"] = called | {"seconds": wall(answer)}
    free_pools()
    return row


def ott_case(case: Case) -> dict[str, Any]:
    """OTT's reference measure is uniform: c = a b^T goes into the cost."""
    import jax
    from ott.geometry.geometry import Geometry
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn

    jax.config.update("jax_enable_x64", True)
    M, a, b, reg, reg_m = case
    tau = reg_m / (reg_m + reg)
    cost = jax.device_put(M.get() - reg * (np.log(a)[:, None] + np.log(b)))

    @functools.partial(jax.jit, static_argnames="threshold")
    def run(cost: Any, a: Any, b: Any, threshold: float) -> Any:
        solver = Sinkhorn(threshold=threshold, max_iterations=CAP)
        out = solver(LinearProblem(Geometry(cost, epsilon=reg), a, b, tau_a=tau, tau_b=tau))
        return out.matrix, out.f, out.g

    for threshold in (TOL, TOL / 10, TOL / 100, TOL / 1000):
        plan, f, g = run(cost, a, b, threshold)
        error = certified(plan, np.asarray(f) / reg, np.asarray(g) / reg, case)
        if error <= TOL:
            break
    seconds = wall(lambda: jax.block_until_ready(run(cost, a, b, threshold)), 2)
    return {"OTT": {"threshold": threshold, "error": error, "reached": error <= TOL, "seconds": seconds}}


def solves(n: int, grid: list[tuple[float, float]]) -> list[dict[str, Any]]:
    free_pools()
    data, rows = make(n), []
    for reg, reg_m in grid:
        case = (*data, reg, reg_m)
        row: dict[str, Any] = {"n": n, "reg": reg, "reg_m": reg_m}
        row |= {name: our_case(case, precision) for name, precision in OURS.items()}
        for peer in (pot_cases, ott_case) if n <= OTT_UP_TO else (pot_cases,):
            try:
                row |= peer(case)
            except ImportError as error:
                row[peer.__name__] = str(error)
        rows.append(row)
    return rows


# ---- the part


def device_name() -> str:
    import cupy as cp

    return str(cp.cuda.runtime.getDeviceProperties(0)["name"].decode())


def missing() -> str:
    """Why nothing can be measured here; empty where there is a GPU."""
    try:
        import cupy as cp
    except ImportError as error:
        return str(error)
    return "" if cp.cuda.is_available() else "no GPU"


def run(args: Any) -> dict[str, Any]:
    if reason := missing():
        return {"skipped": reason}
    device, begin = device_name(), time.perf_counter()
    file = "gpu-solves-" + re.sub(r"\W+", "-", device.lower())
    data: dict[str, Any] = {"device": device, "file": file, "solves": []}
    for n, grid in [(500, GRID[::2])] if args.quick else [(n, GRID) for n in SOLVED]:
        data["solves"] += solves(n, grid)
        print("\n".join(map(solve_line, data["solves"][-len(grid) :])), flush=True)
        print(f"solves of n = {n} after {time.perf_counter() - begin:.1f} s", flush=True)
        common.save(file, common.plain(data), args.out)  # what there is, should the rest be cut off
    data["geometric_mean_speedup"] = speedups(data["solves"])
    return data


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return f"skipped: {data['skipped']}"
    lines = [solve_line(row) for row in data["solves"]]
    means = ", ".join(f"{name} {value:.1f}x" for name, value in data["geometric_mean_speedup"].items())
    return "\n".join([*lines, f"to a certified {TOL:g}, geometric mean speed-up: {means}"])


def solve_line(row: dict[str, Any]) -> str:
    parts = [f"n {row['n']}, reg {row['reg']:g}, reg_m {row['reg_m']:g}:"]
    for name, found in row.items():
        if isinstance(found, dict):
            count = found.get("passes", found.get("iterations", "-"))
            star = "*" if found.get("carried on") else "" if found.get("reached", True) else "!"
            parts.append(f"{name} {found['seconds'] * 1e3:.4g} ms{star} ({count}, {found['error']:.1e})")
    return " ".join(parts)


def speedups(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of the seconds of each peer over ours."""
    first = next(iter(OURS))
    names = [name for name in rows[0] if isinstance(rows[0][name], dict) and name not in OURS] if rows else []
    return {
        name: common.geometric_mean([row[name]["seconds"] / row[first]["seconds"] for row in rows if name in row])
        for name in names
    }


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path) as axes:
        plot_peaks(axes[0, 0], data["solves"])


def plot_peaks(axis: Any, rows: list[dict[str, Any]]) -> None:
    found = {name: value for name, value in (rows or [{}])[0].items() if isinstance(value, dict) and "peak" in value}
    for name in found:
        peaks = {n: max(r[name]["peak"] for r in rows if r["n"] == n) for n in {r["n"] for r in rows}}
        sizes = sorted(peaks)
        axis.semilogx(sizes, [peaks[n] / (8 * n * n) for n in sizes], "o-", label=name, markersize=4)
    axis.set(xlabel="n", ylabel="peak beyond M, multiples of M (float64)")
    axis.set_visible(bool(rows))
    axis.legend(fontsize=7)
