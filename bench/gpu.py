"""One GPU: limits, one pass over K by storage against the usual ways, and whole solves against POT on torch arrays.

``python -m bench.gpu [--quick] [--only limits pass tiles solve] [--out DIR]`` needs CuPy and a GPU. Device events give
the times; "floor" is bytes(K) over the read bandwidth of the same run. Baselines, warmed up and repeated like ours:
POT's iteration on torch (two products a pass), the same in a CUDA graph, the four sweeps of arXiv 2412.11079's baseline
in CuPy, its in-place pass with carried scalings (plan_pass). tiles: how row_pass depends on its shape (its figure 8).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384), (32768, 32768),
         (65536, 1024), (1024, 65536)]  # fmt: skip
GRID = [(reg, reg_m) for reg in (0.1, 0.01) for reg_m in (0.1, 1.0, 10.0)]
ROWS, BOTH = 1, 3  # halves of a pass
POT_METHODS = ("sinkhorn", "sinkhorn_translation_invariant")


def elapsed(call: Any, repeat: int = 5) -> float:
    """Median seconds of call() on the device, after one that is not timed."""
    import cupy as cp

    call()
    times = []
    for _ in range(repeat):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def free_pools() -> None:
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
    try:
        import torch
    except ImportError:
        return
    torch.cuda.empty_cache()


def limits() -> dict[str, float]:
    """Bytes a second: reading and copying in memory, reading out of the L2 cache (24 MiB)."""
    import cupy as cp

    x, y, z = cp.zeros(1 << 29, np.float32), cp.empty(1 << 29, np.float32), cp.zeros(6 << 20, np.float32)

    def many() -> None:
        for _ in range(50):
            z.sum()

    return {
        "read": x.nbytes / elapsed(x.sum),
        "copy": 2 * x.nbytes / elapsed(lambda: cp.copyto(y, x)),
        "l2": 50 * z.nbytes / elapsed(many),
    }


def workspace(m: int, n: int, precision: str, in_place: bool = False) -> Any:
    import cupy as cp

    from mapuot.backends import Options, cuda
    from mapuot.problem import Problem

    M = cp.random.default_rng(0).random((m, n), dtype=np.float32)
    problem = Problem.from_arrays(M, np.full(m, 1 / m), np.full(n, 1 / n), 0.05, 1.0, "kl", "product", cuda)
    memory = 0 if in_place else 8
    made = cuda.Workspace(problem, Options(not in_place, memory, in_place, precision, -1.0, -1.0, None))
    made.state["finer"] = 0  # tol < 0: as many passes as asked for, in the storage and the sums asked for
    made.absorb(np.zeros(n))
    return made


def our_pass(m: int, n: int, precision: str, narrow: bool = True, bare: bool = False, in_place: bool = False) -> float:
    """Seconds a pass, in launches of many."""
    made = workspace(m, n, precision, in_place)
    run = made.launch.narrow if narrow and made.launch.narrow else made.launch.wide
    count = made.launch.most if m * n < 1 << 27 else 16
    made.progress["narrow"] = float(run is not None and run is made.launch.narrow)

    def call() -> None:
        made.send_progress()
        if run is None:
            made.launch(count, 0)
        else:
            run(made.state, 0, count, ROWS if bare else BOTH)

    return elapsed(call) / count


def pot_pass(m: int, n: int, graph: bool = False) -> float:
    """POT's iteration on torch: u = (a / K v)^fi, v = (b / K^T u)^fi."""
    import torch

    K = torch.rand(m, n, device="cuda")
    u, v = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")

    def call() -> None:
        for _ in range(10):
            u.copy_((1 / m / (K @ v)) ** 0.95)
            v.copy_((1 / n / (K.T @ u)) ** 0.95)

    run = call
    if graph:
        call()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            call()
        run = recorded.replay
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) / 10


def four_sweeps(m: int, n: int) -> float:
    import cupy as cp

    P = cp.random.default_rng(0).random((m, n), dtype=np.float32)

    def call() -> None:
        P.__imul__((np.float32(1 / m) / P.sum(1, keepdims=True)) ** np.float32(0.95))
        P.__imul__((np.float32(1 / n) / P.sum(0, keepdims=True)) ** np.float32(0.95))

    return elapsed(call)


def passes(sizes: list[tuple[int, int]], read: float) -> list[dict[str, Any]]:
    import cupy as cp

    cases: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "float32 bare": (our_pass, ("float32", True, True)),
        "float32": (our_pass, ("float32", True)),
        "float32, float64 sums, bare": (our_pass, ("float32", False, True)),
        "float32, float64 sums": (our_pass, ("float32", False)),
        "float64 bare": (our_pass, ("float64", False, True)),
        "bfloat16 bare": (our_pass, ("bfloat16", True, True)),
        "in place": (our_pass, ("float32", False, False, True)),
        "POT torch": (pot_pass, ()),
        "POT torch, graph": (pot_pass, (True,)),
        "four sweeps": (four_sweeps, ()),
    }
    rows = []
    for m, n in sizes:
        row: dict[str, Any] = {"m": m, "n": n, "floor": 4 * m * n / read}
        for name, (call, arguments) in cases.items():
            try:
                row[name] = call(m, n, *arguments)
            except (NotImplementedError, MemoryError, cp.cuda.memory.OutOfMemoryError, RuntimeError) as error:
                row[name] = str(error)[:60]
            free_pools()
        rows.append(row)
        shown = (f"{k} {v * 1e6:.1f}us" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("; ".join(shown), flush=True)
    return rows


def tiles(m: int, n: int) -> list[dict[str, Any]]:
    """row_pass on float32 K for every shape that covers a row, and every depth of its ring."""
    from mapuot.backends.cuda_kernels import NARROW_SHAPES
    from mapuot.backends.cuda_launch import Persistent

    made, found = workspace(m, n, "float32"), []
    shapes = [s for s in NARROW_SHAPES if n <= s.width <= 2 * n]
    for shape in {replace(s, R=rows) for s in shapes for rows in (1, 2, 4)}:
        run = Persistent(shape, m, made.ld, "float32", (True, True), True)
        for slots in range(2, run.slots + 1, 2) if run.parts else ():
            run.slots = slots
            seconds = elapsed(lambda run=run: run(made.state, 0, 20, ROWS), 3) / 20
            found.append({"GW": shape.GW, "CPT": shape.CPT, "R": shape.R, "CLUSTER": shape.CLUSTER, "slots": slots})
            found[-1]["seconds"] = seconds
    return sorted(found, key=lambda row: row["seconds"])


def problem(n: int) -> tuple[Any, Any, Any]:
    import cupy as cp

    rng = cp.random.default_rng(1)
    x, y = rng.random((n, 3)), rng.random((n, 3)) * 0.8
    M = cp.zeros((n, n))
    for k in range(3):
        M += (x[:, k, None] - y[None, :, k]) ** 2
    a, b = np.random.default_rng(2).random((2, n)) + 0.1
    M /= M.max()
    return M, a / a.sum(), 1.2 * b / b.sum()


def wall(call: Any, repeat: int) -> float:
    """Least seconds of call(), the first of several apart."""
    import cupy as cp

    times = []
    for _ in range(repeat):
        cp.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        cp.cuda.Device().synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def solve_ours(M: Any, a: Any, b: Any, reg: float, reg_m: float) -> Any:
    import mapuot

    result = mapuot.solve(M, a, b, reg, reg_m, backend="cuda")
    _ = result.plan
    return result


def solve_row(n: int, reg: float, reg_m: float, M: Any, a: Any, b: Any) -> dict[str, Any]:
    """Seconds to a certified 1e-6 with the plan on the device; POT with its default stop (1e-6 change, 1000 passes)."""
    import cupy as cp

    row: dict[str, Any] = {"n": n, "reg": reg, "reg_m": reg_m}
    result = solve_ours(M, a, b, reg, reg_m)
    row |= {"passes": result.n_passes, "error": result.error_bound}
    del result
    row["ours"] = wall(lambda: solve_ours(M, a, b, reg, reg_m), 3)
    row["ours peak"] = cp.get_default_memory_pool().total_bytes() - M.nbytes
    free_pools()
    try:
        import ot
        import torch
    except ImportError:
        return row
    weights, cost = [torch.as_tensor(x, device="cuda") for x in (a, b)], torch.from_dlpack(M)
    for method in POT_METHODS:

        def pot(most: int, method: str = method) -> Any:
            return ot.unbalanced.sinkhorn_unbalanced(
                *weights, cost, reg, reg_m, method=method, warn=False, numItermax=most
            )

        pot(3)
        torch.cuda.reset_peak_memory_stats()
        row[method] = wall(lambda pot=pot: pot(1000), 2 if n <= 2000 else 1)
        row[method + " peak"] = torch.cuda.max_memory_allocated()
        free_pools()
    return row


def solves(sizes: list[int], grid: list[tuple[float, float]]) -> list[dict[str, Any]]:
    rows = []
    for n in sizes:
        free_pools()
        data = problem(n)
        for reg, reg_m in grid:
            rows.append(solve_row(n, reg, reg_m, *data))
            print(rows[-1], flush=True)
        del data
    return rows


def run(args: Any) -> dict[str, Any]:
    import cupy as cp

    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    bounds = limits()
    print(device, {k: f"{v / 1e12:.2f} TB/s" for k, v in bounds.items()}, flush=True)
    free_pools()
    data: dict[str, Any] = {"device": device, "limits": bounds}
    if "pass" in args.only:
        data["pass"] = passes(SIZES[1:5:3] if args.quick else SIZES, bounds["read"])
    if "tiles" in args.only:
        data["tiles"] = tiles(8192, 8192)
        print(*data["tiles"][:5], sep="\n", flush=True)
        free_pools()
    if "solve" in args.only:
        data["solve"] = solves([2000] if args.quick else [2000, 8000, 20000], GRID[:3] if args.quick else GRID)
    return data


def report(data: dict[str, Any]) -> str:
    lines = [data["device"]]
    for method in POT_METHODS:
        ratios = [row[method] / row["ours"] for row in data.get("solve", []) if method in row]
        if ratios:
            lines.append(f"whole solve, geometric mean over POT {method}: {statistics.geometric_mean(ratios):.1f}x")
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    names = [f"{row['m']}x{row['n']}" for row in data["pass"]]
    for key in [key for key in data["pass"][0] if key not in ("m", "n")]:
        values = [row[key] * 1e6 if isinstance(row[key], float) else np.nan for row in data["pass"]]
        axes.plot(names, values, "o-", label=key)
    axes.set(yscale="log", ylabel="us a pass", title=data["device"])
    axes.tick_params(axis="x", rotation=45)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    top.add_argument("--quick", action="store_true")
    top.add_argument(
        "--only", nargs="+", default=["pass", "tiles", "solve"], choices=["limits", "pass", "tiles", "solve"]
    )
    top.add_argument("--out", type=Path, default=Path("bench/results"))
    args = top.parse_args()
    data = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(data, indent=1))
    print(report(data))
    if "pass" in data:
        plot(data, args.out / "gpu.png")


if __name__ == "__main__":
    main()
