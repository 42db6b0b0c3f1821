"""Passes of every kind of CUDA kernel, to be run under compute-sanitizer (make sanitize-gpu).

A few blocks and short rings make small problems go round them several times. For MAPUOT_CUDA=racecheck, the row counts
give every group of warps the same number of tiles.
"""

import math
import warnings

import cupy as cp
import numpy as np

from mapuot import ConvergenceWarning, PointCloud, log_matmul, solve, solve_batch
from mapuot.backends import Options
from mapuot.backends.cuda import backend as cuda
from mapuot.backends.cuda import launch as cuda_launch
from mapuot.backends.cuda import log_matmul as cuda_log_matmul
from mapuot.backends.cuda.coarse import DEVICE_COARSE
from mapuot.backends.cuda.launch import switches
from mapuot.backends.cuda.settings import DEVICE_LAUNCHES
from mapuot.problem.problem import Problem

COLUMNS = (200, 528, 1030, 2040, 4100, 9000, 20000)


def passes(n: int, precision: str, narrow: bool, in_place: bool = False) -> None:
    rows = 2 * 16 * 4 * (7 if n <= 1024 else 3)  # of blocks, warps and rows of a tile
    M = cp.random.default_rng(0).random((rows, n), dtype=np.float32)
    problem = Problem.from_arrays(M, np.full(rows, 1 / rows), np.full(n, 1.2 / n), 0.1, 1.0, "kl", "product", cuda)
    anderson_depth = 0 if in_place else 5
    workspace = cuda.workspace(problem, Options(True, anderson_depth, in_place, precision, 1e-13, -1.0, None))
    workspace.state["limits"]["finer"] = 0
    workspace.progress["narrow"] *= narrow
    workspace.absorb(np.zeros(n))
    stats = workspace.iterate(4)
    assert all(math.isfinite(one.dual) for one in stats), stats
    print(rows, n, precision, "narrow" if narrow else "wide", len(stats), flush=True)


def batches() -> None:
    """Solve small problems in blocks of every width, larger ones as products, and log_matmul by tiles and by cuBLAS."""
    rng = np.random.default_rng(0)
    for m, n in ((100, 100), (40, 50), (3, 17), (150, 140)):
        M = rng.random((m, n), np.float32)
        A = rng.random((4, m))
        B = rng.random((4, n))
        for reg in (0.1, 0.005):
            assert solve_batch(cp.asarray(M), A, 1.5 * B, reg=reg, reg_m=1.0).converged.all()
    print("batches", flush=True)
    for terms in (0, 1 << 60):
        cuda_log_matmul.LIBRARY_TERMS["float32"] = terms
        out = log_matmul(*(cp.asarray(rng.normal(size=s), np.float32) for s in ((2, 70, 40), (2, 40, 90))))
        assert bool(cp.isfinite(out).all())
    print("log_matmul", flush=True)


def whole() -> None:
    """Solve plain problems in one call, balanced first or not, and draw pairs from their plans."""
    for m, n, dtype in ((100, 90, np.float32), (77, 515, np.float64), (640, 640, np.float32)):
        M = cp.random.default_rng(0).random((m, n), dtype=dtype)
        for reg in (0.1, 0.01):
            assert len(solve(M, reg=reg, reg_m=1.0).sample(50)[0]) == 50
    print("plain problems", flush=True)


def corrected() -> None:
    """Run with 20 differences and the correction by clusters; its matrix is built and renewed on the way."""
    rng = np.random.default_rng(0)
    x = rng.random((256, 2))
    y = rng.random((530, 2))
    M = cp.asarray(((x[:, None] - y) ** 2).sum(-1).astype(np.float32))
    with DEVICE_COARSE.using(least_entries=0, sharp=0.0, every=8):
        result = solve(M, reg=0.02, reg_m=1.0, tol=1e-13, max_passes=24)
    assert result.n_passes == 24, result
    print("corrected", flush=True)


def points() -> None:
    rng = np.random.default_rng(0)
    for d in (3, 13):
        cloud = PointCloud(rng.random((150, d)), rng.random((170, d)), form=None)
        assert solve(cloud, reg=0.1, reg_m=1.0, backend="cuda").converged
    print("points", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ConvergenceWarning)
    batches()
    points()
    whole()
    corrected()
    cuda_launch.MAX_SLOTS, cuda_launch.RING_BYTES = 4, 0
    for n in COLUMNS:
        if n <= 8192:
            DEVICE_LAUNCHES.most_blocks = 2
        else:
            DEVICE_LAUNCHES.most_blocks = 8
        if n > 8192 and "racecheck" in switches():
            break  # it does not follow writes between the blocks of a cluster
        for narrow in (True, False):
            passes(n, "float32", narrow)
    if "racecheck" not in switches():
        passes(1030, "float64", False)
        passes(1030, "float32", False, True)
        processors = cuda_launch.device_limits(0)[1]
        cuda_launch.device_limits = lambda device: (86, processors, 99 << 10)  # without bulk copies and clusters
        for narrow in (True, False):
            passes(4096, "float32", narrow)
