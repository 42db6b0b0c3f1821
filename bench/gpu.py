"""One GPU: limits, one pass over K by storage against the usual ways, tile shapes, and solves of dense points.

Needs CuPy and a GPU; torch and POT are measured where they can be imported. Device events give the times of a
pass, a busy device before them so that no launch is waited for; "limit" is bytes(K) in float32 over the read bandwidth
of the same run. Baselines: POT's iteration on torch (two products a pass), the same in a CUDA graph,
the four sweeps of arXiv 2412.11079's baseline in CuPy, its design (row_sums and column_sums in place, with carried
scalings) and one kernel in place (row_pass). "bare" is row_pass alone; without it the pass has all of finish_pass.
tiles: how the paper's two kernels depend on their shapes (its figure 8); its figure 14 is bytes a second.
points: a whole solve, plan not formed, of squared distances in 3-D that lie on the device as a float32 M, or that
a function makes there.
"""

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import common, peers
from .device import device_name, elapsed, endless, free_pools, in_a_graph, limits, wall

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384), (32768, 32768),
         (50000, 50000), (65536, 1024), (1024, 65536), (16384, 49152), (10000, 50000), (10000, 65536), (6000, 100000),
         (5000, 131072), (300, 1000003)]  # fmt: skip
POINTS = [(32768, "array"), (50000, "array"), (100000, "array"), (131072, "function")]
REGS = (0.05, 0.005)
TOL = 1e-6
ROWS, BOTH = 1, 3  # halves of a pass
KL = (True, True)
SHARES = ["float32 bare", "float32", "float32, float64 sums bare", "float32, float64 sums"]
DRAWN = ["limit", *SHARES, "float64", "in place", "paper's design", "POT torch",
         "POT torch, graph", "four sweeps"]  # fmt: skip


# ---- one pass


def paper_shapes() -> list[Any]:
    """Blocks of the paper's two kernels: threads, and rows a thread holds at once."""
    from mapuot.backends.cuda.kernels import Shape

    return [Shape(GW, 8, R) for GW in (2, 4, 8, 16) for R in (1, 2, 4, 8)]


def compile_all(sizes: Iterable[tuple[int, int]], tiles: int) -> None:
    """Every kernel at once, on all cores, into CuPy's cache."""
    import cupy as cp

    from mapuot.backends.cuda.kernels import ITEMSIZE, Shape, anderson_depth_for, kernel, portable_shape, shape_options
    from mapuot.backends.cuda.launch import persistent_jobs

    depth = anderson_depth_for(tiles, tiles, 4)
    jobs = [("portable.cu", shape_options(shape, "float32", KL, ANDERSON_DEPTH=depth)) for shape in paper_shapes()]
    for m, n in [laid(*size) for size in sizes]:
        for store in ITEMSIZE:
            jobs += [(file, options) for file, _, options in persistent_jobs(m, n, store, KL)]
        shape = portable_shape(n, "float32") or Shape(8, 8, 4)
        jobs.append(("portable.cu", shape_options(shape, "float32", KL, ANDERSON_DEPTH=anderson_depth_for(m, n, 4))))
    unique = {(name, tuple(sorted(options.items()))) for name, options in jobs}

    def make(job: tuple[str, tuple[tuple[str, int], ...]]) -> None:
        with cp.cuda.Device(0):
            kernel(job[0], "gather_sums", **dict(job[1]))

    with ThreadPoolExecutor() as pool:
        list(pool.map(make, unique))


def laid(m: int, n: int) -> tuple[int, int]:
    """The shape as a solve lays it on the device: long rows are read as columns."""
    from mapuot.backends.cuda import backend

    if n > max(m, backend.long_rows):
        return (n, m)
    return (m, n)


def workspace(m: int, n: int, precision: str, in_place: bool = False) -> Any:
    """Return the workspace of a problem as it is solved; by the method of the paper, as it is given."""
    import cupy as cp

    if not in_place:
        m, n = laid(m, n)
    return endless(cp.random.default_rng(0).random((m, n), dtype=np.float32), precision, in_place=in_place, gpu=True)


def our_passes(m: int, n: int, precision: str, names: dict[bool, str]) -> dict[str, float]:
    """Seconds a pass of a launch of many; names: of the kernels with float32 sums (True) and float64 sums (False).

    Rows wider than a cluster have one kernel, which has float64 sums.
    """
    made = workspace(m, n, precision)
    found = {}
    if not made.launch.persistent:
        rows = elapsed(made.launch.row_kernels, before=made.send_progress)
        whole = elapsed(lambda: made.launch(made.launch.most, 0), before=made.send_progress) / made.launch.most
        return {name + suffix: x for name in names.values() for suffix, x in ((" bare", rows), ("", whole))}
    if m * n < 1 << 27:
        count = 256
    elif m * n < 1 << 29:
        count = 64
    else:
        count = 16
    for narrow, name in names.items():
        if narrow and made.launch.narrow:
            run = made.launch.narrow
        else:
            run = made.launch.wide
        made.progress["narrow"] = float(run is made.launch.narrow)
        for half, suffix in ((ROWS, " bare"), (BOTH, "")):
            call = lambda run=run, half=half: run(made.state, 0, count, half)  # noqa: E731
            found[name + suffix] = elapsed(call, before=made.send_progress) / count
    return found


def in_place_pass(m: int, n: int, shape: Any = None) -> float:
    """One read and write of the plan where a row fits a block; the paper's two kernels in ``shape``."""
    made = workspace(m, n, "float32", True)
    if shape is not None:
        made.launch.take_shape(shape, False, made.ld, "float32", KL)
    return elapsed(lambda: made.launch(made.launch.most, 0), before=made.send_progress) / made.launch.most


def pot_pass(m: int, n: int, way: Callable[[Callable[[], Any]], Callable[[], Any]]) -> float:
    """POT's iteration on torch: u = (a / K v)^fi, v = (b / K^T u)^fi, called as ``way`` makes it."""
    import torch

    steps = 10
    K = torch.rand(m, n, device="cuda")
    u = torch.ones(m, device="cuda")
    v = torch.ones(n, device="cuda")
    return elapsed(way(lambda: peers.torch_scalings(K, u / m, v / n, 0.95, steps, u, v))) / steps


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
        ("float64", lambda m, n: our_passes(m, n, "float64", {False: "float64"})), ("in place", in_place_pass),
        ("paper's design", lambda m, n: in_place_pass(m, n, Shape(8, 8, 4))),
        ("POT torch", lambda m, n: pot_pass(m, n, lambda call: call)),
        ("POT torch, graph", lambda m, n: pot_pass(m, n, in_a_graph)), ("four sweeps", four_sweeps),
    ]  # fmt: skip
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
        print(f"{m} x {n}: {', '.join(f'{key} {share(row, key):.3f}' for key in SHARES)} of the limit", flush=True)
    return rows


def share(row: dict[str, Any], key: str) -> float:
    """Return the limit over the seconds of a pass; NaN where it was not measured."""
    if isinstance(row.get(key), float):
        return float(row["limit"] / row[key])
    return np.nan


def tile_sweep(n: int) -> list[dict[str, Any]]:
    """Seconds of the row half of the paper's two kernels on n x n float32 by shape, the best first."""
    made = workspace(n, n, "float32", True)
    found = []
    for shape in paper_shapes():
        made.launch.take_shape(shape, False, made.ld, "float32", KL)
        seconds = elapsed(made.launch.row_kernels, 3, made.send_progress)
        found.append({"threads": 32 * shape.GW, "rows": shape.R, "seconds": seconds})
    return sorted(found, key=lambda row: row["seconds"])


# ---- whole solves of dense points


def point_rows(n: int) -> Callable[[int, int], Any]:
    """A function that makes rows of the squared distances of n points in 3-D on the device, float32."""
    import cupy as cp

    squared = cp.ElementwiseKernel(
        "float32 a, float32 b, float32 c, float32 x, float32 y, float32 z", "float32 d",
        "d = (a - x) * (a - x) + (b - y) * (b - y) + (c - z) * (c - z)", "squared",
    )  # fmt: skip
    x, y = cp.asarray(np.random.default_rng(n).random((2, 3, n), dtype=np.float32))
    return lambda i0, i1: squared(*x[:, i0:i1, None], *y)


def dense_points(sizes: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Solves of them, M as an array on the device or as the function."""
    import cupy as cp

    found = []
    for n, form in sizes:
        M: Any = point_rows(n)
        if form == "array":
            rows = M
            M = cp.empty((n, n), np.float32)
            for i in range(0, n, 1000):
                M[i : i + 1000] = rows(i, min(i + 1000, n))
        for reg in REGS:
            free_pools()
            found.append({"n": n, "M": form, **timed_solve(M, n, reg)})
            print(point_line(found[-1]), flush=True)
        del M
    free_pools()
    return found


def timed_solve(M: Any, n: int, reg: float) -> dict[str, Any]:
    """Passes, certified error and least seconds of a call; reg_m 1, uniform masses."""
    import mapuot

    w = np.full(n, 1 / n)
    call = functools.partial(mapuot.solve, M, w, w, reg=reg, reg_m=1.0, tol=TOL, backend="cuda")
    answer = call()
    found = {"reg": reg, "passes": answer.n_passes, "error_bound": answer.error_bound, "status": answer.status}
    return found | {"seconds": wall(call, 3)}


def point_line(row: dict[str, Any]) -> str:
    solved = f"{row['passes']} passes, {row['seconds'] * 1e3:.4g} ms, {row['status']}, error at most"
    return f"{row['n']} x {row['n']} points, {row['M']}, reg {row['reg']:g}: {solved} {row['error_bound']:.1e}"


# ---- the part


def run(args: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"device": device_name()}
    if args.quick:
        sizes = SIZES[1:5:3]
        tiles = 2048
    else:
        sizes, tiles = SIZES, 8192
    begin = time.perf_counter()
    compile_all(sizes, tiles)
    print(f"{data['device']}, kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    data["limits"] = limits()
    if args.quick:
        cases = [(3000, "array"), (3000, "function")]
    else:
        cases = POINTS
    data["points"] = dense_points(cases)
    print(f"after {time.perf_counter() - begin:.1f} s", flush=True)
    data["passes"] = passes(sizes, data["limits"]["read"])
    print(f"after {time.perf_counter() - begin:.1f} s", flush=True)
    common.save("gpu", data, args.out)  # partial results, should the rest be cut off
    data["tiles"] = {"two kernels": tile_sweep(tiles)}
    return data


def tables(data: dict[str, Any]) -> str:
    """Microseconds a pass, and in brackets fractions of the limit; the best tiles; solves of points."""
    rows = []
    for row in data["passes"]:
        cells = [f"{row['m']} x {row['n']}"]
        for key in DRAWN:
            found = row.get(key)
            if key in SHARES:
                of = f" ({share(row, key):.2f})"
            else:
                of = ""
            if isinstance(found, float):
                cells.append(f"{common.three(1e6 * found)}{of}")
            else:
                cells.append("")
        rows.append(cells)
    best = [
        f"best tiles, {kind}: {rows[0]}; worst: {rows[-1]['seconds']:.3g} s" for kind, rows in data["tiles"].items()
    ]
    text = [f"{common.machine_line(data)}, us a pass:", common.table(["size", *DRAWN], rows)]
    return common.text_of(*text, *best, *map(point_line, data["points"]))
