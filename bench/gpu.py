"""One GPU: limits, one pass over K by storage against the usual ways, tile shapes, whole solves against POT and OTT.

Needs CuPy and a GPU; torch, POT and ott-jax are measured where they can be imported. Device events give the times of a
pass, a busy device before them so that no launch is waited for; "limit" is bytes(K) in float32 over the read bandwidth
of the same run. Baselines: POT's iteration on torch (two products a pass), the same in a CUDA graph and on CuPy arrays,
the four sweeps of arXiv 2412.11079's baseline in CuPy, its design (plan_rows and plan_columns, with carried scalings)
and one kernel in place (plan_pass). "bare" is row_pass alone; without it the pass has all of finish_pass. tiles: how
the paper's two kernels and row_pass depend on their shapes (its figure 8); its figures 14 and 15 are bytes a second and
peak memory.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from . import common
from .gpu_solves import GRID, OURS, SOLVED, TOL, free_pools, solves

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384), (32768, 32768),
         (65536, 1024), (1024, 65536)]  # fmt: skip
STORES = [("float32", True), ("float32", False), ("float64", False), ("bfloat16", True), ("bfloat16", False)]
ROWS, BOTH = 1, 3  # halves of a pass
KL = (True, True)
DRAWN = ["limit", "float32 bare", "float32", "float64", "bfloat16", "in place", "paper's design", "POT torch",
         "POT torch, graph", "four sweeps"]  # fmt: skip


def elapsed(call: Callable[[], Any], repeat: int = 5, before: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of call() on the device, after one that is not timed."""
    import cupy as cp

    call()
    times, pad = [], cp.empty(1 << 29, np.uint8)
    for _ in range(repeat):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        before()
        pad.fill(1)  # 0.2 ms, in which the host gets ahead
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def limits() -> dict[str, float]:
    """Bytes a second: reading and copying in memory."""
    import cupy as cp

    x, y = cp.zeros(1 << 29, np.float32), cp.empty(1 << 29, np.float32)
    return {"read": x.nbytes / elapsed(x.sum), "copy": 2 * x.nbytes / elapsed(lambda: cp.copyto(y, x))}


# ---- one pass


def paper_shapes() -> list[Any]:
    """Blocks of the paper's two kernels: threads, and rows a thread holds at once."""
    from mapuot.backends.cuda.kernels import Shape

    return [Shape(GW, 8, R) for GW in (2, 4, 8, 16) for R in (1, 2, 4, 8)]


def row_shapes(n: int) -> list[Any]:
    from mapuot.backends.cuda.kernels import NARROW_SHAPES

    return [replace(s, R=R) for s in NARROW_SHAPES if s.CLUSTER == 1 and n <= s.width <= 2 * n for R in (1, 2, 4)]


def compile_all(sizes: Iterable[tuple[int, int]], tiles: int) -> None:
    """Every kernel at once, on all cores, into CuPy's cache."""
    import cupy as cp

    from mapuot.backends.cuda.kernels import ITEMSIZE, kernel, memory_for, portable_shape, shape_for, shape_options

    held = {"MEMORY": memory_for(tiles, tiles, 4)}
    jobs = [("portable.cu", shape_options(shape, "float32", KL, **held)) for shape in paper_shapes() if tiles]
    shapes = [(s, "float32", True, held) for s in (row_shapes(tiles) if tiles else ())]
    for m, n in sizes:
        for store, narrow in STORES:
            held = {"MEMORY": memory_for(m, n, ITEMSIZE[store])}
            shapes.append((shape_for(n, store, narrow), store, narrow, held))
        held = {"MEMORY": memory_for(m, n, 4)}
        shape = portable_shape(n, "float32")
        jobs += [("portable.cu", shape_options(shape, "float32", KL, **held))] if shape else []
    common_words = {"ORDERED": 0, "RACECHECK": 0}
    jobs += [("iterate.cu", shape_options(s, d, KL, NARROW=int(w), **h, **common_words)) for s, d, w, h in shapes if s]
    unique = {(name, tuple(sorted(options.items()))) for name, options in jobs}

    def make(job: tuple[str, tuple[tuple[str, int], ...]]) -> None:
        with cp.cuda.Device(0):
            kernel(job[0], "gather_sums", **dict(job[1]))

    with ThreadPoolExecutor() as pool:
        list(pool.map(make, unique))


def workspace(m: int, n: int, precision: str, in_place: bool = False) -> Any:
    import cupy as cp

    from mapuot.backends import Options, cuda
    from mapuot.problem import Problem

    M = cp.random.default_rng(0).random((m, n), dtype=np.float32)
    problem = Problem.from_arrays(M, np.full(m, 1 / m), np.full(n, 1 / n), 0.05, 1.0, "kl", "product", cuda)
    memory = 0 if in_place else 5
    made = cuda.Workspace(problem, Options(not in_place, memory, in_place, precision, -1.0, -1.0, None))
    made.state["limits"]["finer"] = 0  # tol < 0: as many passes as asked for, in the storage and the sums asked for
    made.absorb(np.zeros(n))
    return made


def our_passes(m: int, n: int, precision: str, names: dict[bool, str]) -> dict[str, float]:
    """Seconds a pass of a launch of many; names: of the kernels with float32 sums (True) and float64 sums (False)."""
    made, found = workspace(m, n, precision), {}
    count = 256 if m * n < 1 << 27 else 64 if m * n < 1 << 29 else 16
    for narrow, name in names.items():
        run = made.launch.narrow if narrow else made.launch.wide
        made.progress["narrow"] = float(narrow)
        for half, suffix in ((ROWS, " bare"), (BOTH, "")):
            call = lambda run=run, half=half: run(made.state, 0, count, half)  # noqa: E731
            found[name + suffix] = elapsed(call, before=made.send_progress) / count
    return found


def in_place_pass(m: int, n: int, shape: Any = None) -> float:
    """plan_pass where a row fits a block; the paper's two kernels in ``shape``."""
    made = workspace(m, n, "float32", True)
    if shape is not None:
        made.launch.take_shape(shape, False, made.ld, "float32", KL)
    return elapsed(lambda: made.launch(made.launch.most, 0), before=made.send_progress) / made.launch.most


def pot_pass(m: int, n: int, way: str) -> float:
    """POT's iteration: u = (a / K v)^fi, v = (b / K^T u)^fi; on "torch", in a "graph" of it, on "cupy" arrays."""
    import cupy as cp

    steps, made = 10, cp.random.default_rng(0).random((m, n), dtype=np.float32)
    if way == "cupy":
        state = [cp.ones(m, np.float32), cp.ones(n, np.float32)]

        def cupy_call() -> None:
            for _ in range(steps):
                state[0] = (1 / m / made.dot(state[1])) ** 0.95
                state[1] = (1 / n / made.T.dot(state[0])) ** 0.95

        return elapsed(cupy_call) / steps
    import torch

    K = torch.from_dlpack(made)
    u, v = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")

    def call() -> None:
        for _ in range(steps):
            u.copy_((1 / m / (K @ v)) ** 0.95)
            v.copy_((1 / n / (K.T @ u)) ** 0.95)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cp.cuda.ExternalStream(stream.cuda_stream):
        call()
        if way == "torch":
            return elapsed(call) / steps
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=stream):
            call()
        return elapsed(recorded.replay) / steps


def four_sweeps(m: int, n: int) -> float:
    import cupy as cp

    P = cp.random.default_rng(0).random((m, n), dtype=np.float32)

    def call() -> None:
        P.__imul__((np.float32(1 / m) / P.sum(1, keepdims=True)) ** np.float32(0.95))
        P.__imul__((np.float32(1 / n) / P.sum(0, keepdims=True)) ** np.float32(0.95))

    return elapsed(call)


def passes(sizes: list[tuple[int, int]], read: float) -> list[dict[str, Any]]:
    import cupy as cp

    from mapuot.backends.cuda.kernels import Shape

    sums = {True: "float32", False: "float32, float64 sums"}
    cases: list[tuple[str, Callable[[int, int], Any]]] = [
        ("float32", lambda m, n: our_passes(m, n, "float32", sums)),
        ("float64", lambda m, n: our_passes(m, n, "float64", {False: "float64"})),
        ("bfloat16", lambda m, n: our_passes(m, n, "bfloat16", {True: "bfloat16"})),
        ("in place", in_place_pass),
        ("paper's design", lambda m, n: in_place_pass(m, n, Shape(8, 8, 4))),
        ("POT torch", lambda m, n: pot_pass(m, n, "torch")),
        ("POT torch, graph", lambda m, n: pot_pass(m, n, "graph")),
        ("POT cupy", lambda m, n: pot_pass(m, n, "cupy")),
        ("four sweeps", four_sweeps),
    ]
    rows = []
    for m, n in sizes:
        row: dict[str, Any] = {"m": m, "n": n, "limit": 4 * m * n / read}
        for name, case in cases:
            try:
                found = case(m, n)
                row |= found if isinstance(found, dict) else {name: found}
            except (MemoryError, ImportError, cp.cuda.memory.OutOfMemoryError, RuntimeError) as error:
                row[name] = str(error)[:60]
            free_pools()
        rows.append(row)
        print(f"{m} x {n}: float32 {row['float32 bare']:.3g} s bare, {row['float32']:.3g} s", flush=True)
    return rows


def tile_sweeps(n: int) -> dict[str, list[dict[str, Any]]]:
    """Seconds of the row half on n x n float32: the paper's two kernels by shape, row_pass by shape and tiles kept."""
    from mapuot.backends.cuda.kernels import memory_for
    from mapuot.backends.cuda.launch import Persistent

    found: dict[str, list[dict[str, Any]]] = {"two kernels": [], "row_pass": []}
    made = workspace(n, n, "float32", True)
    for shape in paper_shapes():
        made.launch.take_shape(shape, False, made.ld, "float32", KL)
        seconds = elapsed(made.launch.row_kernels, 3, made.send_progress)
        found["two kernels"].append({"threads": 32 * shape.GW, "rows": shape.R, "seconds": seconds})
    made = workspace(n, n, "float32")
    for shape in row_shapes(n):
        run = Persistent(shape, n, made.ld, "float32", KL, True, memory_for(n, n, 4))
        for kept in range(max(1, run.slots - 1)) if run.parts else ():
            run.kept = kept
            seconds = elapsed(lambda run=run: run(made.state, 0, 20, ROWS), 3, made.send_progress) / 20
            lie = {"GW": shape.GW, "CPT": shape.CPT, "rows": shape.R, "slots": run.slots, "kept": kept}
            found["row_pass"].append(lie | {"seconds": seconds})
    return {name: sorted(rows, key=lambda row: row["seconds"]) for name, rows in found.items()}


# ---- the part


def run(args: Any) -> dict[str, Any]:
    try:
        import cupy as cp

        if not cp.cuda.is_available():
            return {"skipped": "no GPU"}
    except ImportError as error:
        return {"skipped": str(error)}
    device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    data: dict[str, Any] = {"device": device, "file": "gpu-" + re.sub(r"\W+", "-", device.lower())}
    sizes, tiles = (SIZES[1:5:3], 2048) if args.quick else (SIZES, 8192)
    begin = time.perf_counter()
    compile_all(sizes, tiles)
    print(f"{device}, kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    data |= {"limits": limits(), "solves": []}
    data["passes"] = passes(sizes, data["limits"]["read"])
    data["tiles"] = tile_sweeps(tiles)
    for n, grid in [(500, GRID[::2])] if args.quick else [(n, GRID) for n in SOLVED]:
        common.save(data["file"], data, args.out)  # what there is, should the rest be cut off
        data["solves"] += solves(n, grid)
        print("\n".join(map(solve_line, data["solves"][-len(grid) :])), flush=True)
        print(f"solves of n = {n} after {time.perf_counter() - begin:.1f} s", flush=True)
    data["geometric_mean_speedup"] = speedups(data["solves"])
    return data


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return f"skipped: {data['skipped']}"
    cells = [[row[k] * 1e6 if isinstance(row.get(k), float) else "-" for k in DRAWN] for row in data["passes"]]
    names = [f"{row['m']} x {row['n']}" for row in data["passes"]]
    lines = [
        f"{data['device']}: us a pass",
        common.table(["size", *DRAWN], [[a, *b] for a, b in zip(names, cells, strict=True)]),
    ]
    lines += [
        f"best tiles, {kind}: {rows[0]}; worst: {rows[-1]['seconds']:.3g} s" for kind, rows in data["tiles"].items()
    ]
    lines += [solve_line(row) for row in data["solves"]]
    means = ", ".join(f"{name} {value:.1f}x" for name, value in data.get("geometric_mean_speedup", {}).items())
    return "\n".join([*lines, f"to a certified {TOL:g}, geometric mean speed-up: {means}"])


def solve_line(row: dict[str, Any]) -> str:
    parts = [f"n {row['n']}, reg {row['reg']:g}, reg_m {row['reg_m']:g}:"]
    for name, found in row.items():
        if isinstance(found, dict):
            count = found.get("passes", found.get("iterations", "-"))
            star = "*" if found.get("carried on") else "" if found.get("reached", True) else "!"
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


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, columns=2, rows=2, width=7.5) as axes:
        names = [f"{row['m']}\nx {row['n']}" for row in data["passes"]]
        size = np.array([4 * row["m"] * row["n"] for row in data["passes"]])
        for key in DRAWN:
            values = np.array([row[key] if isinstance(row.get(key), float) else np.nan for row in data["passes"]])
            style = "k--" if key == "limit" else "o-"
            axes[0, 0].semilogy(names, values * 1e6, style, label=key, markersize=3)
            axes[0, 1].semilogy(names, size / values / 1e9, style, label=key, markersize=3)
        axes[0, 0].set(ylabel="us a pass", title=data["device"])
        axes[0, 1].set(ylabel="GB of float32 K a second and pass")
        axes[0, 1].legend(fontsize=7, loc="lower right")
        for rows in (1, 2, 4, 8):
            points = sorted(
                (r["threads"], r["seconds"] * 1e6) for r in data["tiles"]["two kernels"] if r["rows"] == rows
            )
            axes[1, 0].semilogx(*zip(*points, strict=True), "o-", label=f"{rows} rows", base=2)
        axes[1, 0].set(xlabel="threads of a block", ylabel="us, the paper's two kernels")
        axes[1, 0].legend(fontsize=7)
        plot_peaks(axes[1, 1], data["solves"])


def plot_peaks(axis: Any, rows: list[dict[str, Any]]) -> None:
    found = {name: value for name, value in (rows or [{}])[0].items() if isinstance(value, dict) and "peak" in value}
    for name in found:
        peaks = {n: max(r[name]["peak"] for r in rows if r["n"] == n) for n in {r["n"] for r in rows}}
        sizes = sorted(peaks)
        axis.semilogx(sizes, [peaks[n] / (8 * n * n) for n in sizes], "o-", label=name, markersize=4)
    axis.set(xlabel="n", ylabel="peak beyond M, multiples of M (float64)")
    axis.set_visible(bool(rows))
    axis.legend(fontsize=7)
