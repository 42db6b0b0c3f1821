"""Whole solves on one GPU, against POT on torch and CuPy arrays and against OTT; see gpu.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

GRID = [(reg, reg_m) for reg in (0.1, 0.01) for reg_m in (0.1, 1.0, 10.0)]
SOLVES = [(2000, GRID), (8000, GRID[::2]), (20000, GRID[1:2])]
POT_METHODS = ("sinkhorn", "sinkhorn_translation_invariant")


def free_pools() -> None:
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
    try:
        import torch
    except ImportError:
        return
    torch.cuda.empty_cache()


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


def wall(call: Callable[[], Any], repeat: int) -> float:
    """Least seconds of call()."""
    import cupy as cp

    times = []
    for _ in range(repeat):
        cp.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        cp.cuda.Device().synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def our_solve(M: Any, a: Any, b: Any, reg: float, reg_m: float, row: dict[str, Any]) -> None:
    """Seconds to a certified 1e-6 with the plan on the device, by precision, and peak bytes beyond M."""
    import cupy as cp

    import mapuot

    def solve(precision: str) -> Any:
        result = mapuot.solve(M, a, b, reg, reg_m, backend="cuda", precision=precision)
        _ = result.plan
        return result

    for precision, name in (("mixed", "ours"), ("float64", "ours float64"), ("bfloat16", "ours bfloat16")):
        free_pools()
        result = solve(precision)
        row |= {name + " passes": result.n_passes, name + " error": result.error_bound}
        row[name + " peak"] = cp.get_default_memory_pool().total_bytes() - M.nbytes
        del result
        row[name] = wall(lambda precision=precision: solve(precision), 3 if name == "ours" else 1)
    free_pools()


def pot_solve(M: Any, a: Any, b: Any, reg: float, reg_m: float, row: dict[str, Any]) -> None:
    """POT with its default stop (a change of 1e-6, 1000 passes), on torch and on CuPy arrays."""
    import cupy as cp
    import ot
    import torch

    on_torch = [torch.from_dlpack(cp.asarray(x)) for x in (a, b, M)]
    on_cupy = [cp.asarray(a), cp.asarray(b), M]
    for name, arrays, method in [(m, on_torch, m) for m in POT_METHODS] + [("cupy sinkhorn", on_cupy, "sinkhorn")]:

        def call(most: int, arrays: list[Any] = arrays, method: str = method) -> None:
            ot.unbalanced.sinkhorn_unbalanced(*arrays, reg, reg_m, method=method, warn=False, numItermax=most)

        call(3)
        torch.cuda.reset_peak_memory_stats()
        row[name] = wall(lambda call=call: call(1000), 1)
        if arrays is on_torch:
            row[name + " peak"] = torch.cuda.max_memory_allocated()
        free_pools()


def ott_solve(M: Any, a: Any, b: Any, reg: float, reg_m: float, row: dict[str, Any]) -> None:
    """OTT's Sinkhorn on logarithms, its default threshold, compiled before."""
    import jax
    from ott.geometry.geometry import Geometry
    from ott.problems.linear.linear_problem import LinearProblem
    from ott.solvers.linear.sinkhorn import Sinkhorn

    tau = reg_m / (reg_m + reg)
    cost = jax.device_put(M.get().astype(np.float32))
    run = jax.jit(lambda C, x, y: Sinkhorn()(LinearProblem(Geometry(C, epsilon=reg), x, y, tau_a=tau, tau_b=tau)).f)
    run(cost, a, b).block_until_ready()
    row["ott"] = wall(lambda: run(cost, a, b).block_until_ready(), 1)


def solves(n: int, grid: list[tuple[float, float]]) -> list[dict[str, Any]]:
    free_pools()
    data, rows = problem(n), []
    for reg, reg_m in grid:
        row: dict[str, Any] = {"n": n, "reg": reg, "reg_m": reg_m}
        for solve in (our_solve, pot_solve, ott_solve):
            try:
                solve(*data, reg, reg_m, row)
            except ImportError as error:
                row[solve.__name__] = str(error)
        rows.append(row)
    return rows
