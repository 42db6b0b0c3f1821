"""Passes of every kind of CUDA kernel, to be run under compute-sanitizer (make sanitize-gpu).

The rows are as many as give every group of warps the same number of tiles on this device, as MAPUOT_CUDA=racecheck asks
for, and more tiles than shared memory holds.
"""

import math

import cupy as cp
import numpy as np

from mapuot.backends import Options, cuda
from mapuot.backends.cuda_launch import switches
from mapuot.problem import Problem

COLUMNS = (200, 528, 2040, 4100, 9000)


def passes(m: int, n: int, narrow: bool, in_place: bool = False) -> None:
    M = cp.random.default_rng(0).random((m, n), dtype=np.float32)
    problem = Problem.from_arrays(M, np.full(m, 1 / m), np.full(n, 1.2 / n), 0.1, 1.0, "kl", "product", cuda)
    memory = 0 if in_place else 5
    workspace = cuda.Workspace(problem, Options(True, memory, in_place, "float32", 1e-13, -1.0, None))
    workspace.state["finer"] = 0
    workspace.progress["narrow"] *= narrow
    workspace.absorb(np.zeros(n))
    stats = workspace.iterate(3)
    assert all(math.isfinite(one.dual) for one in stats), stats
    print(m, n, "narrow" if narrow else "wide", len(stats), flush=True)


if __name__ == "__main__":
    processors, racecheck = cp.cuda.Device().attributes["MultiProcessorCount"], "racecheck" in switches()
    for n in COLUMNS:
        for narrow in (True, False):
            if not racecheck or n <= 8192:  # beyond it, the meetings of clusters cannot be followed
                passes(processors * 64 * max(1, 1024 // n), n, narrow)
    if not racecheck:
        passes(300, 1030, False, True)
