"""bound: a lower bound on the global minimum of Gromov-Wasserstein, until it is within 1 % of the value.

Points of the plane with squared distances and balanced sides: two normal clouds, one of them skewed. ``gap`` is the
share of the value between bound and value. Seconds include the plan itself. Each call has its own process.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from . import common, gromov
from .device import device_name, missing

CASES = ((500, 0.3), (500, 0.05))  # numbers of points, and reg
GPU_CASES = ((500, 0.3), (10_000, 0.3))
TOL = 0.01
LONGEST = 600.0  # seconds until a call is ended


def problem(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2)) * [1.0, 0.6]
    y = rng.normal(size=(n, 2)) * [0.9, 0.7] + 0.3 * rng.exponential(size=(n, 2))
    return x, y


def ours(n: int, reg: float, **options: Any) -> dict[str, Any]:
    import mapuot

    given = {"reg_m": np.inf, "bound_tol": TOL} | options
    x, y = problem(60)  # compile the GPU code
    mapuot.gromov(x, y, reg=reg, **given)
    x, y = problem(n)
    before = gromov.peak_of(options, start=True)
    begun = gromov.clocks()
    result = mapuot.gromov(x, y, reg=reg, **given)
    taken = gromov.clocks() - begun
    gap = (result.value - result.lower_bound) / result.value
    return {
        "seconds": taken[0], "cpu": taken[1], "memory": gromov.peak_of(options) - before, "value": result.value,
        "bound": result.lower_bound, "gap": gap, "settled": result.settled,
    }  # fmt: skip


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    if gpu and (why := missing()):
        return {"skipped": why}
    if gpu:
        cases = GPU_CASES
        options = "backend='cuda'"
    else:
        cases = CASES
        options = f"threads={args.threads}"
    if args.size or args.quick:
        cases = ((args.size or 60, 0.3),)
    rows = []
    for n, reg in cases:
        row = {"n": n, "reg": reg, **gromov.measured(f"bound.ours({n}, {reg}, {options})", LONGEST)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    data: dict[str, Any] = {"rows": rows, "tol": TOL}
    if gpu:
        data["device"] = device_name()
    return data


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return seconds, by the clock and of all threads, memory, the value and its bound."""
    lines = []
    for row in data["rows"]:
        cells = [row.get("failed", "")] + [""] * 5
        if "failed" not in row:
            cells = [*(row[key] for key in ("seconds", "cpu", "memory", "value", "bound")), f"{100 * row['gap']:.2f} %"]
        lines.append([f"{row['n']:,}", common.short(row["reg"]), *cells])
    head = ["points", "reg", "seconds", "CPU s", "MiB", "value", "lower bound", "gap"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
