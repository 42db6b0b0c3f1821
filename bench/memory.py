"""memory: the most memory held beyond M (float64) during one call, each in a process of its own.

The process makes M, a and b, runs the solver once on a small problem, resets the kernel's high-water mark of resident
memory, makes the call and reads the mark again. Given as a multiple of the bytes of M.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import common

OURS, POT = "mapuot.solve(M, a, b, reg=0.05, reg_m=1.0", "ot.unbalanced.sinkhorn_unbalanced(a, b, M, 0.05, 1.0"
CALLS = {  # name: what the child runs
    "mapuot, no plan": f"{OURS})",
    "mapuot, plan": f"{OURS}).plan",
    "mapuot, float64 K, plan": f"{OURS}, precision='float64').plan",
    "mapuot, map-uot, plan": f"{OURS}, method='map-uot', max_passes=20).plan",
    "POT": f"{POT}, numItermax=20)",
    "POT, translation-invariant": f"{POT}, method='sinkhorn_translation_invariant', numItermax=20)",
}
LIMITS = {"mapuot, no plan": 0.55, "mapuot, plan": 1.6}
CHILD = """
import warnings
import numpy as np
warnings.simplefilter("ignore")
import ot, mapuot
from bench.common import forget_peak, status

def call(M, a, b):
    return {call}

call(np.random.default_rng(0).random((300, 300)), np.full(300, 1 / 300), np.full(300, 1 / 300))
M = np.empty(({n}, {n}))
for i in range({n}):
    M[i] = np.random.default_rng(i).random({n})
a = b = np.full({n}, 1 / {n})
before = forget_peak()
result = call(M, a, b)
print((status("VmHWM") - before) / M.nbytes)
"""


def measure(name: str, n: int) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD.format(call=CALLS[name], n=n)]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=common.ROOT)
    return {"name": name, "n": n, "beyond_M": json.loads(child.stdout)}


def run(args: Any) -> dict[str, Any]:
    if not Path("/proc/self/clear_refs").exists():
        return {"skipped": "the peak of resident memory can be reset on Linux only"}
    sizes = (2000,) if args.quick else (2000, 5000)
    return {"memory": [measure(name, n) for n in sizes for name in CALLS], "limits": LIMITS}


def tables(data: dict[str, Any]) -> str:
    rows = [[r["name"], r["n"], f"{r['beyond_M']:.2f}", LIMITS.get(r["name"], "")] for r in data["memory"]]
    return common.table(["call", "n", "peak beyond M, in M", "limit"], rows)
