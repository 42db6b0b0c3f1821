"""small-reg: passes to a certified 1e-6 where reg is small, by the default call, now and (--before) elsewhere.

192 problems: clouds in 1, 2, 3 and 10 dimensions, uniform and in five clusters, masses 1 and 1.2 from a Dirichlet
distribution, squared distances of range 1; reg .1, .01, 1e-3, 2e-4, reg_m .05, 1, 20, 700 x 600 and 3000 x 2571. A
pass is one read of K; one thread, or with --device gpu the GPU that CuPy finds, K and M on it. --before is another
checkout. Times are of the same calls, the two checkouts in turns.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench import common

REGS = (0.1, 0.01, 1e-3, 2e-4)
RHOS = (0.05, 1.0, 20.0)
SIZES = (700, 3000)
CHILD = "import sys, runpy; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])['answer'](*sys.argv[3:])"


def clouds(d: int, clustered: bool, m: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(9000 + 10 * d + clustered)
    n = m * 6 // 7
    x = rng.random((m, d))
    y = rng.random((n, d)) * 0.9 + 0.2
    if clustered:
        centres = rng.normal(size=(5, d))
        x = centres[rng.integers(5, size=m)] + 0.2 * rng.normal(size=(m, d))
        y = centres[rng.integers(5, size=n)] + 0.3 * rng.normal(size=(n, d))
    M = (x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T
    M -= M.min()
    return M / M.max(), rng.dirichlet(np.ones(m)), 1.2 * rng.dirichlet(np.ones(n))


def counts(sizes: tuple[int, ...], device: str) -> Iterator[dict[str, Any]]:
    """One row a problem, solved by the mapuot that the path finds first."""
    import mapuot

    for n, d, clustered in product(sizes, (1, 2, 3, 10), (False, True)):
        M, a, b = clouds(d, clustered, n)
        if device == "gpu":
            M = import_module("cupy").asarray(M)
            mapuot.solve(M, a, b, reg=REGS[-1], reg_m=1.0)  # compiles the kernels of this size
        for reg, rho in product(REGS, RHOS):
            begun = time.perf_counter()
            result = mapuot.solve(M, a, b, reg=reg, reg_m=rho, threads=1)
            row = {"n": n, "d": d, "clustered": clustered, "reg": reg, "rho": rho, "passes": result.n_passes}
            yield {**row, "seconds": time.perf_counter() - begun, "status": result.status}


def answer(sizes: str, device: str) -> None:
    """A row on stdout for every line on stdin."""
    rows = counts(SIZES[: int(sizes)], device)
    for _ in sys.stdin:
        print(json.dumps(next(rows)), flush=True)


def both(sizes: int, device: str, before: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", CHILD, str(before.resolve()), __file__, str(sizes), device]
    rows = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as child:
        assert child.stdin
        assert child.stdout
        for row in counts(SIZES[:sizes], device):
            print(file=child.stdin, flush=True)
            other = json.loads(child.stdout.readline())
            rows.append({**row, "before": other["passes"], "seconds_before": other["seconds"]})
        child.stdin.close()
    return rows


def run(args: Any) -> dict[str, Any]:
    if args.quick:
        sizes = 1
    else:
        sizes = len(SIZES)
    device = args.device
    if args.before:
        rows = both(sizes, device, args.before)
    else:
        rows = list(counts(SIZES[:sizes], device))
    return {"rows": rows}


def tables(*found: dict[str, Any]) -> str:
    """Passes, before where they were counted, by machine: geometric mean (worst), ratio (largest of one problem)."""
    rows = []
    header = ["n", "eps / range(M)"]
    for data in found:
        if common.on_gpu(data):
            where = f"{data['device']}: "
        else:
            where = "CPU: "
        if "before" in data["rows"][0]:
            words = ("before", "now", "ratio")
        else:
            words = ("now",)
        header += [where + word for word in words]
    for n in sorted({r["n"] for r in found[0]["rows"]}):
        for reg in sorted({r["reg"] for r in found[0]["rows"]}, reverse=True):
            cells = [n, common.short(reg)]
            for data in found:
                some = [r for r in data["rows"] if (r["n"], r["reg"]) == (n, reg)]
                for key in ("before", "passes"):
                    passes = [r[key] for r in some if key in r]
                    if passes:
                        mean = common.geometric_mean(passes)
                        cells.append(f"{mean:.{1 if mean < 10 else 0}f} ({max(passes)})")
                if ratios := [r["passes"] / r["before"] for r in some if "before" in r]:
                    cells.append(f"{common.geometric_mean(ratios):.2f} ({max(ratios):.2f})")
            rows.append(cells)
    return common.table(header, rows)
