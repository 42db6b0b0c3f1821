"""Whole solves on one GPU to a certified error, plan on the device, against POT on torch and CuPy arrays and OTT.

Every answer is certified by our gap; peers.py tells how many iterations POT and OTT make, OTT up to OTT_UP_TO points.
"as called" is one call with POT's own stop. Peaks are bytes beyond M.
"""

import os
import time
from typing import Any

import numpy as np

from . import common, peers, problems
from .device import device_name, free_pools, wall

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # POT imports JAX, which would take most memory
TOL = 1e-6
GRID = [(reg, reg_m) for reg in (0.1, 0.01) for reg_m in (0.1, 1.0, 10.0)]
SOLVED = (2000, 8000, 20000)
LONG = 1.0  # seconds from which one call has to do
OTT_UP_TO = 2000
OURS = {"mapuot": "mixed", "mapuot, float64 K": "float64"}


def solve(case: peers.Case, **options: Any) -> Any:
    return peers.ours(case, TOL, backend="cuda", **options)


def our_case(case: peers.Case, precision: str) -> dict[str, Any]:
    import cupy as cp

    free_pools()
    before = cp.get_default_memory_pool().total_bytes()
    result = solve(case, precision=precision)
    error = peers.certify((result.plan, result.log_u, result.log_v), case)
    found = {"passes": result.n_passes, "bound": result.error_bound, "error": error}
    found["peak"] = cp.get_default_memory_pool().total_bytes() - before
    del result
    return found | {"seconds": wall(lambda: solve(case, precision=precision).plan, 3)}


def pot_case(given: peers.Case, case: peers.Case, name: str) -> dict[str, Any]:
    import torch

    peers.pot(given, 3, peers.POT_METHODS[name])
    free_pools()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = peers.pot_iterations(name, case, TOL, None, given)
    found["peak"] = torch.cuda.max_memory_allocated() - before
    if found["seconds"] < LONG:
        found["seconds"] = wall(lambda: peers.pot(given, found["iterations"], peers.POT_METHODS[name]), 2)
    return found


def pot_cases(case: peers.Case) -> dict[str, Any]:
    import cupy as cp
    import torch

    M, a, b, reg, reg_m = case
    on_cupy = M, cp.asarray(a), cp.asarray(b), reg, reg_m
    on_torch = (*map(torch.from_dlpack, on_cupy[:3]), reg, reg_m)
    row: dict[str, Any] = {name: pot_case(on_torch, case, name) for name in peers.POT_METHODS}
    row["POT, CuPy arrays"] = pot_case(on_cupy, case, "POT")
    del row["POT, CuPy arrays"]["peak"]  # torch counts its own
    row["POT as called"] = peers.pot_default(case, on_torch)
    row["POT as called"]["seconds"] = wall(lambda: peers.pot(on_torch, None))
    free_pools()
    return row


def ott_case(case: peers.Case) -> dict[str, Any]:
    call = peers.ott(case, TOL)
    if call is None:
        return {}
    error = peers.certify(tuple(map(np.asarray, call())), case)
    return {"OTT": {"error": error, "reached": error <= TOL, "seconds": wall(call, 2)}}


def solves(n: int, grid: list[tuple[float, float]]) -> list[dict[str, Any]]:
    import cupy as cp

    free_pools()
    (M, a, b), rows = problems.make("a", n, n, seed=3, mass=1.2), []
    M = cp.asarray(M)
    for reg, reg_m in grid:
        case = (M, a, b, reg, reg_m)
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


def run(args: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    data: dict[str, Any] = {"device": device_name(), "solves": []}
    for n, grid in [(500, GRID[::2])] if args.quick else [(n, GRID) for n in SOLVED]:
        data["solves"] += solves(n, grid)
        print("\n".join(map(solve_line, data["solves"][-len(grid) :])), flush=True)
        print(f"solves of n = {n} after {time.perf_counter() - begin:.1f} s", flush=True)
        common.save("gpu-solves", data, args.out)  # what there is, should the rest be cut off
    data["geometric_mean_speedup"] = speedups(data["solves"])
    return data


def tables(data: dict[str, Any]) -> str:
    means = ", ".join(f"{name} {value:.1f}x" for name, value in data["geometric_mean_speedup"].items())
    lines = map(solve_line, data["solves"])
    return common.text_of("\n".join(lines), f"to a certified {TOL:g}, geometric mean speed-up: {means}")


def solve_line(row: dict[str, Any]) -> str:
    parts = [f"n {row['n']}, reg {row['reg']:g}, reg_m {row['reg_m']:g}:"]
    for name, found in row.items():
        if isinstance(found, dict):
            count = found.get("passes", found.get("iterations", "-"))
            star = "*" if found.get("carried_on") else "" if found.get("reached", True) else "!"
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
