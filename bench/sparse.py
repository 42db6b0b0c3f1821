"""sparse: a pass over stored pairs, by density and pattern, beside the dense pass of that shape and SciPy's products.

Patterns of n x n pairs: "uniform", each pair with the same odds; "kNN", the neighbours of points in the plane in random
order; "banded", next to the diagonal; "power-law", rows whose lengths fall as 1 / rank. "SciPy" is POT's iteration on a
CSR array, K v and K^T u with K's transpose at hand. Seconds of passes in turn; bytes that K and its indices take.
Whole solves: eight clouds that no pair connects against each of them alone, in passes, and a million points with 32
neighbours each, certified 1e-4, in seconds and the most memory of a process that makes and solves it.
With --device gpu on the GPU that CuPy finds: whole passes, of a launch of many, beside the dense ones of float32 sums.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from tqdm import tqdm

import mapuot
from mapuot.backends import cpu
from mapuot.problem.problem import Problem
from mapuot.route.strategy import make_options

from . import common
from .points import one_pass

SIZE, QUICK_SIZE = 20_000, 1_000
DENSITIES = (0.001, 0.01, 0.1, 0.5)
REG, RHO = 0.05, 1.0
MOST_PAIRS = 5 * 10**7  # stored, of one case
MOST_BYTES = 1 << 31  # of a dense K
NEIGHBOURS, POINTS = 32, 1_000_000  # of a cloud that no dense K has room for
PARTS, PART = 8, 1_000  # clouds that no pair connects, points of each

LARGE = """
import json, re, time
import numpy as np
import mapuot

rng = np.random.default_rng(0)
start = time.perf_counter()
M = mapuot.knn_cost(rng.random(({n}, 2)), rng.random(({n}, 2)), {k}, threads={threads})
M.data /= M.data.mean()
made = time.perf_counter()
r = mapuot.solve(M, None, None, 0.5, 5.0, tol=1e-4, backend={backend!r}, threads={threads})
end = time.perf_counter()
with open("/proc/self/status") as file:
    peak = 1024 * int(re.search(r"^VmHWM:\\s*(\\d+)", file.read(), re.M).group(1))
told = {{"neighbours": made - start, "solve": end - made, "passes": r.n_passes, "error": r.error_bound, "peak": peak}}
print(json.dumps({{"n": {n}, "k": {k}, "pairs": M.nnz, **told}}))
"""


def lengths(pattern: str, n: int, density: float) -> Any:
    """Stored pairs of each row."""
    if pattern != "power-law":
        return np.full(n, max(1, round(density * n)))
    wanted = 1 / np.arange(1.0, n + 1)
    low, high = 0.0, float(n * n)
    for _ in range(60):  # the factor whose lengths, cut at n, add up
        factor = (low + high) / 2
        low, high = (factor, high) if np.minimum(n, factor * wanted).sum() < density * n * n else (low, factor)
    return np.random.default_rng(0).permutation(np.maximum(1, np.minimum(n, high * wanted)).astype(int))


def pairs(pattern: str, n: int, density: float) -> Any:
    """A CSR array of n x n with costs in [0, 1)."""
    rng, count = np.random.default_rng(1), lengths(pattern, n, density)
    if pattern == "kNN":
        S = mapuot.knn_cost(rng.random((n, 2)), rng.random((n, 2)), int(count[0]), symmetric=False)
        S.data /= S.data.max()
        return S
    start = np.concatenate([[0], np.cumsum(count)])
    if pattern == "banded":
        column = (np.arange(n)[:, None] + np.arange(count[0])) % n
    else:
        column = np.concatenate([rng.choice(n, k, replace=False, shuffle=False) for k in count])
    S = sparse.csr_array((rng.random(start[-1]), np.ravel(column).astype(np.int32), start), shape=(n, n))
    S.sort_indices()
    return S


def workspace_of(M: Any, n: int, precision: str, threads: int) -> Any:
    """A workspace that makes passes of the certified kind, its row pass in float64 sums."""
    problem = Problem.from_arrays(M, None, None, REG, RHO, "kl", "product", cpu)
    workspace = cpu.Workspace(problem, make_options("auto", precision, 1e-6, None, threads))
    workspace.absorb(np.zeros(n))
    return workspace


def products(S: Any) -> Callable[[], Any]:
    """POT's iteration: u = (a / K v)^fi, v = (b / K^T u)^fi."""
    K, n, fi = S.astype(np.float64), S.shape[0], RHO / (RHO + REG)
    K.data = np.exp(-K.data / REG) / n**2
    turned, v = sparse.csr_array(K.T), np.ones(n)

    def iteration() -> None:
        u = (1 / n / np.maximum(K @ v, 1e-300)) ** fi
        (1 / n / np.maximum(turned @ u, 1e-300)) ** fi

    return iteration


def measured(pattern: str, n: int, density: float, threads: int, dense: Any) -> dict[str, Any]:
    S = pairs(pattern, n, density)
    held = {name: workspace_of(S, n, name, threads) for name in ("mixed", "float64")}
    calls = {name: one_pass(workspace) for name, workspace in held.items()}
    calls["SciPy"] = products(S)
    calls |= {f"dense {name}": one_pass(workspace) for name, workspace in dense.items()}
    seconds = {name: min(samples) for name, samples in common.interleave(calls, 3.0).items()}
    return {
        "pattern": pattern, "n": n, "density": S.nnz / n**2, "pairs": S.nnz, "seconds": seconds,
        "MiB": {name: (w.K.nbytes + 4 * S.nnz + 8 * n) / 2**20 for name, w in held.items()}
        | {f"dense {name}": w.K.nbytes / 2**20 for name, w in dense.items()},
    }  # fmt: skip


def passes_of_parts(backend: str) -> list[dict[str, Any]]:
    """Passes of the clouds together and of each alone, masses up to a hundred times another's."""
    rng, clouds, masses = np.random.default_rng(3), [], []
    for _ in range(PARTS):
        S = mapuot.knn_cost(rng.random((PART, 2)), rng.random((PART, 2)), NEIGHBOURS)
        S.data /= S.data.mean()
        clouds.append(S)
        masses.append([10.0 ** rng.uniform(-1, 1) / PART * (0.1 + rng.random(PART)) for _ in range(2)])
    together, (a, b) = sparse.csr_array(sparse.block_diag(clouds)), np.concatenate(masses, axis=1)
    found = []
    for reg_m in (0.5, 5.0, 50.0):

        def passes(M: Any, a: Any, b: Any, reg_m: float = reg_m) -> int:
            return mapuot.solve(M, a, b, 0.1, reg_m, reference="uniform", backend=backend).n_passes

        alone = [passes(S, *one) for S, one in zip(clouds, masses, strict=True)]
        found.append({"reg_m": reg_m, "together": passes(together, a, b), "alone": alone})
    return found


def large(backend: str, threads: int) -> dict[str, Any]:
    """What a process of its own tells of the certified solve of a million points."""
    code = LARGE.format(n=POINTS, k=NEIGHBOURS, backend=backend, threads=threads)
    command = [sys.executable, "-W", "ignore", "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=common.ROOT)
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def device_pass(S: Any, precision: str) -> tuple[float, int]:
    """(seconds of a whole pass, bytes of K and its indices) on the device."""
    from mapuot.backends import Options, cuda
    from mapuot.backends.cuda.launch import GRAPH_PASSES

    from .gpu import elapsed

    (m, n), endless = S.shape, {"tol": -1.0, "tol_gap": -1.0, "threads": None}
    problem = Problem.from_arrays(S, np.full(m, 1 / m), np.full(n, 1 / n), REG, RHO, "kl", "product", cuda)
    made = cuda.Workspace(problem, Options(True, 20, False, precision, **endless))
    made.state["limits"]["finer"] = 0
    made.absorb(np.zeros(n))
    seconds = elapsed(lambda: made.launch(GRAPH_PASSES, 0), before=made.send_progress) / GRAPH_PASSES
    held = 2 * (made.K[0].nbytes + made.pairs.rows.index.nbytes)
    made.close()
    return seconds, held


def device_case(pattern: str, n: int, density: float, dense: float | None) -> dict[str, Any]:
    S = pairs(pattern, n, density)
    found = {name: device_pass(S, stored) for name, stored in (("mixed", "float32"), ("float64", "float64"))}
    seconds = {name: one for name, (one, _) in found.items()} | ({} if dense is None else {"dense mixed": dense})
    return {
        "pattern": pattern, "n": n, "density": S.nnz / n**2, "pairs": S.nnz, "seconds": seconds,
        "MiB": {name: held / 2**20 for name, (_, held) in found.items()},
    }  # fmt: skip


def run_on_device(n: int, quick: bool) -> dict[str, Any]:
    from .gpu import our_passes

    dense = our_passes(n, n, "float32", {True: "narrow"})["narrow"]
    cases = [(pattern, n, density, dense) for pattern in ("uniform", "kNN", "banded", "power-law")
             for density in DENSITIES if density * n * n <= MOST_PAIRS]  # fmt: skip
    cases += [] if quick else [("kNN", POINTS, NEIGHBOURS / POINTS, None)]
    found = [device_case(*case) for case in tqdm(cases, file=sys.stderr)]
    return {"n": n, "device": "gpu", "passes": found, "file": "sparse_gpu"} | solves("cuda", 1, quick)


def solves(backend: str, threads: int, quick: bool) -> dict[str, Any]:
    return {"parts": passes_of_parts(backend)} | ({} if quick else {"large": large(backend, threads)})


def run(args: Any) -> dict[str, Any]:
    n = args.size or (QUICK_SIZE if args.quick else SIZE)
    if args.device == "gpu":
        return run_on_device(n, args.quick)
    dense = {}
    if 4 * n * n <= MOST_BYTES:
        M = np.random.default_rng(2).random((n, n), dtype=np.float32)
        dense["mixed"] = workspace_of(M, n, "mixed", args.threads)
        del M
        gc.collect()
    cases = [
        (pattern, density)
        for pattern in ("uniform", "kNN", "banded", "power-law") for density in DENSITIES
        if density * n * n <= MOST_PAIRS
    ]  # fmt: skip
    with common.blas_threads(args.threads):
        found = [measured(*case[:1], n, case[1], args.threads, dense) for case in tqdm(cases, file=sys.stderr)]
    dense.clear()
    return {"n": n, "threads": args.threads, "passes": found} | solves("cpu", args.threads, args.quick)


def report(data: dict[str, Any]) -> str:
    names = ("mixed", "float64", "SciPy", "dense mixed")
    rows = []
    for p in data["passes"]:
        s = p["seconds"]
        cells = [f"{1e3 * s[k]:.3g}" if k in s else "" for k in names]
        faster = f"{s['dense mixed'] / s['mixed']:.3g}" if "dense mixed" in s else ""
        each = f"{1e9 * s['mixed'] / p['pairs']:.2f}"
        rows.append([p["pattern"], p["n"], f"{p['density']:.2g}", *cells, faster, each, f"{p['MiB']['mixed']:.3g}"])
    header = ["pattern", "n", "density", *(f"{k}, ms" for k in names), "dense / mixed", "ns a pair", "K, MiB"]
    where = "one GPU" if data.get("device") == "gpu" else f"{data['threads']} threads"
    lines = [f"{where}\n\n{common.table(header, rows)}"]
    for one in data["parts"]:
        worst = one["together"] / max(one["alone"])
        lines.append(f"{PARTS} parts, reg_m {one['reg_m']:g}: {one['together']} passes, {worst:.2f} of the most of one")
    if x := data.get("large"):
        lines.append(
            f"{x['n']:,} points, {x['k']} neighbours ({x['pairs']:,} pairs): found in {x['neighbours']:.0f} s, "
            f"solved to {x['error']:.1e} in {x['passes']} passes, {x['solve']:.1f} s; {x['peak'] / 2**30:.2f} GiB"
        )
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, width=7) as axes:
        axis = axes[0][0]
        for pattern in dict.fromkeys(p["pattern"] for p in data["passes"]):
            mine = [p for p in data["passes"] if p["pattern"] == pattern and p["n"] == data["n"]]
            axis.loglog([p["density"] for p in mine], [p["seconds"]["mixed"] for p in mine], "o-", label=pattern)
        if dense := [p["seconds"]["dense mixed"] for p in data["passes"] if "dense mixed" in p["seconds"]]:
            axis.axhline(min(dense), color="gray", label="dense")
        axis.set(xlabel="stored share of the pairs", ylabel="seconds a pass")
        axis.legend()
