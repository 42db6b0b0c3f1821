"""roofline: arithmetic per byte of memory traffic and speed of each form of the pass (the paper's figure 3).

Work: 4 m n floating-point operations a pass in every form. Traffic, in visits of the matrix: fused reads it once, POT's
two products and the two sweeps twice, in place reads and writes it once, four sweeps do two of each. The roofs are the
bandwidths of reading and of reading and writing, measured in the same rounds, and the speed of numpy's matrix product,
the fastest arithmetic that this machine shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import common
from .one_pass import Case, time_case

# visits that read, and visits that read and write
VISITS = {
    "fused": (1, 0), "full": (1, 0), "two sweeps": (2, 0), "POT": (2, 0), "in place": (0, 1), "four sweeps": (2, 2)
}  # fmt: skip


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
    best = {name: found["min"] for name, found in row["seconds"].items()}
    peak = product_speed(threads, row["dtype"]) / 1e9
    points = {}
    for name, (reads, updates) in VISITS.items():
        roof = work / (reads * best["read"] + updates * best["scale"]) / 1e9
        points[name] = {"intensity": work / ((reads + 2 * updates) * size), "gflops": work / best[name] / 1e9,
                        "roof": min(peak, roof)}  # fmt: skip
    bandwidth = {"read": row["read_GBps"], "read and write": 2 * size / best["scale"] / 1e9}
    return {"dtype": row["dtype"], "threads": threads, "n": row["n"], "bandwidth": bandwidth, "peak": peak,
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
            rows.append([name, r["dtype"], r["threads"], f"{point['intensity']:.3f}", f"{point['gflops']:.1f}",
                         f"{point['roof']:.1f}", f"{point['gflops'] / point['roof']:.2f}"])  # fmt: skip
    return common.table(["pass", "K", "threads", "flop/byte", "Gflop/s", "roof", "of the roof"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["rooflines"]
    with common.figure(path, columns=2, rows=-(-len(rows) // 2)) as axes:
        for axis, r in zip(axes.flat, rows, strict=False):
            x = np.logspace(-1.5, 1.5, 100)
            for (name, bandwidth), style in zip(r["bandwidth"].items(), ("k-", "k--"), strict=True):
                axis.loglog(x, np.minimum(r["peak"], x * bandwidth), style, label=name)
            for name, point in r["points"].items():
                axis.loglog(point["intensity"], point["gflops"], "o", label=name)
            axis.set(
                title=f"K {r['dtype']}, {r['threads']} thread{'s' * (r['threads'] > 1)}, n = {r['n']}",
                xlabel="flop / byte",
                ylabel="Gflop/s",
            )
        axes[0][0].legend(fontsize=8)
