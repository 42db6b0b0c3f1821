"""memory: the most memory held beyond M (float64) during one call, each in a process of its own.

The process makes M, a and b, runs the solver once on a small problem, resets the kernel's high-water mark of resident
memory (/proc/self/clear_refs), makes the call and reads the mark again. Given as a multiple of the bytes of M.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import common

CALLS = {  # name: what the child runs
    "mapuot, no plan": "mapuot.solve(M, a, b, 0.05, 1.0)",
    "mapuot, plan": "mapuot.solve(M, a, b, 0.05, 1.0).plan",
    "mapuot, float64 K, plan": "mapuot.solve(M, a, b, 0.05, 1.0, precision='float64').plan",
    "mapuot, map-uot, plan": "mapuot.solve(M, a, b, 0.05, 1.0, method='map-uot', max_passes=20).plan",
    "POT": "ot.unbalanced.sinkhorn_unbalanced(a, b, M, 0.05, 1.0, numItermax=20)",
    "POT, translation-invariant": (
        "ot.unbalanced.sinkhorn_unbalanced(a, b, M, 0.05, 1.0, method='sinkhorn_translation_invariant', numItermax=20)"
    ),
}
LIMITS = {"mapuot, no plan": 0.55, "mapuot, plan": 1.6}

CHILD = """
import json, re, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import ot, mapuot

def status(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"^{{key}}:\\s*(\\d+)", file.read(), re.M).group(1))

def call(M, a, b):
    return {call}

n = {n}
small = np.random.default_rng(0).random((300, 300))
call(small, np.full(300, 1 / 300), np.full(300, 1 / 300))
M = np.empty((n, n))
for i in range(n):
    M[i] = np.random.default_rng(i).random(n)
a = b = np.full(n, 1 / n)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
result = call(M, a, b)
print(json.dumps({{"before": before, "peak": status("VmHWM"), "M": M.nbytes}}))
"""


def measure(name: str, n: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(call=CALLS[name], n=n)],
        capture_output=True, text=True, check=False, cwd=common.ROOT,
    )  # fmt: skip
    if child.returncode:
        return {"name": name, "n": n, "failed": child.stderr.strip().splitlines()[-1]}
    found = json.loads(child.stdout)
    return {"name": name, "n": n, **found, "beyond_M": (found["peak"] - found["before"]) / found["M"]}


def run(args: Any) -> dict[str, Any]:
    if not Path("/proc/self/clear_refs").exists():
        return {"skipped": "the peak of resident memory can be reset on Linux only"}
    sizes = (2000,) if args.quick else (2000, 5000)
    return {"memory": [measure(name, n) for n in sizes for name in CALLS], "limits": LIMITS}


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return f"skipped: {data['skipped']}"
    rows = [
        [r["name"], r["n"], f"{r['beyond_M']:.2f}" if "beyond_M" in r else r["failed"], LIMITS.get(r["name"], "")]
        for r in data["memory"]
    ]
    return common.table(["call", "n", "peak beyond M, in M", "limit"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    n = max(r["n"] for r in data["memory"])
    rows = [r for r in data["memory"] if r["n"] == n and "beyond_M" in r]
    with common.figure(path, width=8) as axes:
        axis = axes[0][0]
        axis.barh([r["name"] for r in rows], [r["beyond_M"] for r in rows])
        axis.invert_yaxis()
        axis.set(xlabel=f"peak resident memory beyond M, in bytes of M (n = {n})")
