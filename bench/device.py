"""Shared by the parts on a GPU: device events, limits of the device, memory, and workspaces that never converge."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from mapuot.backends import Options
from mapuot.problem.problem import Problem
from mapuot.ranks import ALONE

from . import common

ENOUGH, MOST_CALLS = 0.1, 20
REG, RHO = 0.05, 1.0


def missing() -> str:
    """Say why nothing can be measured here; "" where there is a GPU."""
    try:
        import cupy as cp
    except ImportError as error:
        return str(error)
    if cp.cuda.is_available():
        return ""
    return "no GPU"


def device_name(number: int = 0) -> str:
    import cupy as cp

    return str(cp.cuda.runtime.getDeviceProperties(number)["name"].decode())


def free_pools() -> None:
    """Give the memory that CuPy and torch keep back to the device."""
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
    try:
        import torch
    except ImportError:
        return
    torch.cuda.empty_cache()


def on_host(x: Any) -> Any:
    if hasattr(x, "get"):
        return x.get()
    if hasattr(x, "cpu"):
        return x.cpu().numpy()
    return np.asarray(x)


def elapsed(
    call: Callable[[], Any], repeat: int = 5, before: Callable[[], Any] = lambda: None, count: int = 1
) -> float:
    """Return the median seconds of a call on the device: of ``count`` in a row, after one that is not timed."""
    import cupy as cp

    call()
    times = []
    pad = cp.zeros(1 << 28, np.float32)
    for _ in range(repeat):
        begin = cp.cuda.Event()
        end = cp.cuda.Event()
        before()
        pad.max()  # takes .2 ms; meanwhile the host gets ahead. A fill would leave dirty lines that cost 14 us
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3 / count)
    return statistics.median(times)


def wall(call: Callable[[], Any], repeat: int = 1) -> float:
    """Return the least seconds of so many calls by the host's clock, of short ones of those in ENOUGH seconds."""
    import cupy as cp

    times: list[float] = []
    while len(times) < repeat or (sum(times) < ENOUGH and len(times) < MOST_CALLS):
        cp.cuda.Device().synchronize()
        times.append(common.sample(waited(call)))
    return min(times)


def in_a_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that replays torch's work of ``call`` as one CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    return recorded.replay


def waited(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a call that ends when the device has done its work."""
    import cupy as cp

    def whole() -> None:
        call()
        cp.cuda.Device().synchronize()

    return whole


def limits() -> dict[str, float]:
    """Return the bytes a second of reading and of copying in the device's memory."""
    import cupy as cp

    x = cp.zeros(1 << 29, np.float32)
    y = cp.empty(1 << 29, np.float32)
    return {"read": x.nbytes / elapsed(x.sum), "copy": 2 * x.nbytes / elapsed(lambda: cp.copyto(y, x))}


def peak(call: Callable[[], Any]) -> float:
    """Return the MiB that one call takes at most from CuPy and torch together, its answer included."""
    import cupy as cp
    import torch

    pool = cp.cuda.MemoryPool()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with cp.cuda.using_allocator(pool.malloc):
        made = call()
        cp.cuda.Device().synchronize()
    size = pool.total_bytes() + torch.cuda.max_memory_allocated() - before
    del made
    return float(size / 2**20)


def endless(
    M: Any, precision: str, *, a: Any = None, b: Any = None, in_place: bool = False, anderson_depth: int = 5,
    threads: int | None = None, ranks: Any = ALONE, reg: float = REG, gpu: bool = False,
) -> Any:  # fmt: skip
    """Return a workspace around v = 1, in the storage and the sums asked for; its passes never end.

    a and b are uniform where they are left out; ``in_place``: the paper's method, which has no extrapolation.
    """
    if gpu:
        from mapuot.backends.cuda import backend
    else:
        from mapuot.backends.cpu import backend
    m, n = M.shape
    a, b = (np.full(k, 1 / k) if x is None else x for k, x in ((m, a), (n, b)))
    problem = Problem.from_arrays(M, a, b, reg, RHO, "kl", "product", backend, ranks)
    options = Options(not in_place, 0 if in_place else anderson_depth, in_place, precision, -1.0, -1.0, threads)
    made = backend.workspace(problem, options)
    if gpu:
        made.state["limits"]["finer"] = 0
    else:
        made.limits.finer = 0
    made.absorb(np.zeros(n))
    if not gpu:
        made.progress.narrow = 0
    return made
