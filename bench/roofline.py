"""roofline: arithmetic per byte of memory traffic and speed of each form of the pass (the paper's figure 3).

Work: 4 m n floating-point operations a pass in every form. Traffic, in sizes of the matrix: fused 1, POT's two products
and the two sweeps 2, in place 2 (read and write), four sweeps 6 (four reads, two writes). The roofs are the bandwidth
measured in the same rounds, and the speed of numpy's matrix product, the fastest arithmetic that this machine shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import common
from .one_pass import Case, time_case

TRAFFIC = {"fused": 1, "full": 1, "two sweeps": 2, "POT": 2, "in place": 2, "four sweeps": 6}


def product_speed(threads: int, dtype: str) -> float:
    """Operations a second of a matrix product."""
    n = 1024
    A = np.random.default_rng(0).random((n, n)).astype(dtype)
    with common.blas_threads(threads):
        times = common.interleave({"product": lambda: A @ A}, 0.5, (3, 50))
    return 2 * n**3 / min(times["product"])


def measure(case: Case, threads: int, budget: float) -> dict[str, Any]:
    row = time_case(case, threads, budget)
    work, size = 4 * row["m"] * row["n"], row["bytes"]
    points = {
        name: {"intensity": work / (factor * size), "gflops": work / row["seconds"][name]["min"] / 1e9}
        for name, factor in TRAFFIC.items()
    }
    peak = product_speed(threads, "float64" if row["dtype"] == "float64" else "float32") / 1e9
    return {"dtype": row["dtype"], "threads": threads, "n": row["n"], "bandwidth": row["read_GBps"], "peak": peak,
            "points": points}  # fmt: skip


def run(args: Any) -> dict[str, Any]:
    n = 2048 if args.quick else 8192
    rows = []
    for dtype in ("float32", "float64"):
        case = Case(n, n, dtype, args.threads)
        rows += [measure(case, threads, 0.5 if args.quick else 2.0) for threads in sorted({1, args.threads})]
    return {"rooflines": rows}


def report(data: dict[str, Any]) -> str:
    rows = []
    for r in data["rooflines"]:
        for name, point in r["points"].items():
            roof = min(r["peak"], point["intensity"] * r["bandwidth"])
            rows.append([name, r["dtype"], r["threads"], f"{point['intensity']:.3f}", f"{point['gflops']:.1f}",
                         f"{roof:.1f}", f"{point['gflops'] / roof:.2f}"])  # fmt: skip
    return common.table(["pass", "K", "threads", "flop/byte", "Gflop/s", "roof", "of the roof"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["rooflines"]
    with common.figure(path, columns=2, rows=-(-len(rows) // 2)) as axes:
        for axis, r in zip(axes.flat, rows, strict=False):
            x = np.logspace(-1.5, 1.5, 100)
            axis.loglog(x, np.minimum(r["peak"], x * r["bandwidth"]), "k")
            for name, point in r["points"].items():
                axis.loglog(point["intensity"], point["gflops"], "o", label=name)
            axis.set(
                title=f"{r['dtype']}, {r['threads']} threads, n = {r['n']}", xlabel="flop / byte", ylabel="Gflop/s"
            )
        axes[0][0].legend(fontsize=8)
