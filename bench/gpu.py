"""One GPU: limits, one pass over K by storage against the usual ways, and whole solves against POT on torch arrays.

``python -m bench.gpu [--quick] [--out DIR]`` needs CuPy and a GPU, nothing of the C core. Device events give the times;
"floor" is bytes(K) over the read bandwidth of the same run. Baselines: POT's iteration on torch (two products a pass),
the four sweeps of arXiv 2412.11079's baseline in CuPy, its in-place pass with carried scalings (plan_pass).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384), (32768, 32768),
         (65536, 1024), (1024, 65536)]  # fmt: skip
GRID = [(reg, reg_m) for reg in (0.1, 0.01) for reg_m in (0.1, 1.0, 10.0)]


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


def limits() -> dict[str, float]:
    """Bytes a second: reading (the bare persistent pass cannot beat it out of memory), copying."""
    import cupy as cp

    x, y = cp.zeros(1 << 29, np.float32), cp.empty(1 << 29, np.float32)
    return {"read": x.nbytes / elapsed(x.sum), "copy": 2 * x.nbytes / elapsed(lambda: cp.copyto(y, x))}


def workspace(m: int, n: int, precision: str, in_place: bool = False) -> Any:
    import cupy as cp

    from mapuot.backends import Options, cuda
    from mapuot.problem import Problem

    M = cp.random.default_rng(0).random((m, n), dtype=np.float32)
    problem = Problem.from_arrays(M, np.full(m, 1 / m), np.full(n, 1 / n), 0.05, 1.0, "kl", "product", cuda)
    made = cuda.Workspace(problem, Options(not in_place, 0 if in_place else 5, in_place, precision, 1e-9, -1.0, None))
    made.absorb(np.zeros(n))
    return made


def our_pass(m: int, n: int, precision: str, bare: bool = False, in_place: bool = False) -> float:
    """Seconds a pass, in launches of many; the status is put back to running between them."""
    made = workspace(m, n, precision, in_place)
    made.state["tol"] = -1.0
    count = made.launch.most if m * n < 1 << 27 else 16

    def call() -> None:
        made.send_progress()
        made.launch(count, bare)

    return elapsed(call) / count


def pot_pass(m: int, n: int) -> float:
    """POT's iteration on torch: u = (a / K v)^fi, v = (b / K^T u)^fi."""
    import torch

    K = torch.rand(m, n, device="cuda")
    u, v = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")

    def call() -> None:
        nonlocal u, v
        for _ in range(10):
            u = (1 / m / (K @ v)) ** 0.95
            v = (1 / n / (K.T @ u)) ** 0.95
        torch.cuda.synchronize()

    call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) / 10


def four_sweeps(m: int, n: int) -> float:
    import cupy as cp

    P = cp.random.default_rng(0).random((m, n), dtype=np.float32)

    def call() -> None:
        P.__imul__((np.float32(1 / m) / P.sum(1, keepdims=True)) ** np.float32(0.95))
        P.__imul__((np.float32(1 / n) / P.sum(0, keepdims=True)) ** np.float32(0.95))

    return elapsed(call)


def passes(sizes: list[tuple[int, int]], read: float) -> list[dict[str, Any]]:
    import cupy as cp

    rows = []
    for m, n in sizes:
        row: dict[str, Any] = {"m": m, "n": n, "floor": 4 * m * n / read}
        cases = {
            f"{p}{' bare' * b}": (our_pass, (m, n, p, b)) for p in ("float32", "float64", "bfloat16") for b in (0, 1)
        }
        cases["in place"] = our_pass, (m, n, "float32", False, True)
        cases |= {"POT torch": (pot_pass, (m, n)), "four sweeps": (four_sweeps, (m, n))}
        for name, (call, arguments) in cases.items():
            try:
                row[name] = call(*arguments)
            except (NotImplementedError, MemoryError, cp.cuda.memory.OutOfMemoryError) as error:
                row[name] = str(error)[:60]
            cp.get_default_memory_pool().free_all_blocks()
        rows.append(row)
        print(
            " ".join(f"{k} {v * 1e6:.1f}us" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
        )
    return rows


def problem(n: int) -> tuple[Any, Any, Any]:
    import cupy as cp

    rng = cp.random.default_rng(1)
    x, y = rng.random((n, 3)), rng.random((n, 3)) * 0.8
    M = sum((x[:, k, None] - y[None, :, k]) ** 2 for k in range(3))
    a, b = np.random.default_rng(2).random((2, n)) + 0.1
    M /= M.max()
    return M, a / a.sum(), 1.2 * b / b.sum()


def solves(sizes: list[int]) -> list[dict[str, Any]]:
    """Seconds to a certified 1e-6 with the plan on the device; POT with its default stop (1e-6 change, 1000 passes)."""
    import cupy as cp

    import mapuot

    try:
        import ot
        import torch
    except ImportError:
        ot = None
    rows = []
    for n in sizes:
        M, a, b = problem(n)
        for reg, reg_m in GRID:

            def ours() -> Any:
                result = mapuot.solve(M, a, b, reg, reg_m, backend="cuda")
                plan = result.plan
                cp.cuda.Device().synchronize()
                del plan
                return result

            row: dict[str, Any] = {"n": n, "reg": reg, "reg_m": reg_m}
            result = ours()
            begin = time.perf_counter()
            ours()
            row |= {"ours": time.perf_counter() - begin, "passes": result.n_passes, "error": result.error_bound}
            cp.get_default_memory_pool().free_all_blocks()
            for method in ("sinkhorn", "sinkhorn_translation_invariant") if ot else ():
                t = [torch.as_tensor(x, device="cuda") for x in (a, b)]
                Mt = torch.from_dlpack(M)
                begin = time.perf_counter()
                ot.unbalanced.sinkhorn_unbalanced(*t, Mt, reg, reg_m, method=method, warn=False)
                torch.cuda.synchronize()
                row[method] = time.perf_counter() - begin
            rows.append(row)
            print(row, flush=True)
        del M
        cp.get_default_memory_pool().free_all_blocks()
    return rows


def run(args: Any) -> dict[str, Any]:
    import cupy as cp

    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    bounds = limits()
    print(device, {k: f"{v / 1e12:.2f} TB/s" for k, v in bounds.items()}, flush=True)
    cp.get_default_memory_pool().free_all_blocks()
    sizes = SIZES[1:5:3] if args.quick else SIZES
    data = {"device": device, "limits": bounds, "pass": passes(sizes, bounds["read"])}
    return data | {"solve": solves([2000] if args.quick else [2000, 8000, 16000])}


def report(data: dict[str, Any]) -> str:
    lines = [data["device"]]
    for method in ("sinkhorn", "sinkhorn_translation_invariant"):
        ratios = [row[method] / row["ours"] for row in data["solve"] if method in row]
        if ratios:
            lines.append(f"whole solve, geometric mean over POT {method}: {statistics.geometric_mean(ratios):.1f}x")
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    names = [f"{row['m']}x{row['n']}" for row in data["pass"]]
    for key in ("float32", "float32 bare", "bfloat16", "in place", "POT torch", "four sweeps", "floor"):
        values = [row[key] * 1e6 if isinstance(row[key], float) else np.nan for row in data["pass"]]
        axes.plot(names, values, "o-", label=key)
    axes.set(yscale="log", ylabel="us a pass", title=data["device"])
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    top.add_argument("--quick", action="store_true")
    top.add_argument("--out", type=Path, default=Path("bench/results"))
    args = top.parse_args()
    data = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(data, indent=1))
    print(report(data))
    plot(data, args.out / "gpu.png")


if __name__ == "__main__":
    main()
