"""The iterations behind POT's names in the C core: one foreign call makes all of them, but where K must be rebuilt.

C side: src_c/sinkhorn.c, src_c/barycenter.c. Oracles: `iterate.by_python`, and POT itself in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._core import ffi, lib
from ..backends import Stats
from ..backends.cpu.native import check, empty, leading_dimension, matrix, pointer, pool_for
from ..backends.records import STATS, STATUS, told
from ..penalties import F64

CALL_ENTRIES = 1 << 28  # of all K in one foreign call, some .2 s: Ctrl-C and the progress bar wait for it
CALL_ITERATIONS = 4096  # whose records a call holds


class Trace(Sequence[Stats]):
    """The passes of one problem as `Stats`, made when they are looked at."""

    def __init__(self, table: Any, seconds: Any) -> None:
        self.table, self.seconds = table, seconds

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        k = range(len(self))[k]
        (stat,) = told(self.table[k : k + 1], k + 1)
        stat.seconds = float(self.seconds[k])
        return stat


class SinkhornRun:
    """Iterations of problems of one shape that stop together; ``workspaces`` are those of the CPU backend."""

    def __init__(
        self, workspaces: list[Any], starts: list[tuple[F64, F64]], every: int, only_u: bool, stop: float
    ) -> None:
        self.workspaces, p = workspaces, len(workspaces)
        self.log_u, self.log_v = (np.array([start[k] for start in starts]) for k in (0, 1))
        self.next = np.empty_like(self.log_u), np.empty_like(self.log_v)
        self.flags = np.zeros((2, p), np.int32)
        self.err: list[float] = []
        self.states = ffi.new("mapuot_state *[]", [workspace.state for workspace in workspaces])
        self.most = most_iterations(p * max(1, workspaces[0].problem.cost.size))
        run = self.run = ffi.new("mapuot_sinkhorn_run *")
        run.every, run.only_u, run.stop = every, only_u, stop
        run.log_u, run.log_v = pointer(self.log_u), pointer(self.log_v)
        run.next_u, run.next_v = (pointer(x) for x in self.next)
        run.done, run.absorb = (pointer(x, "int32_t *") for x in self.flags)
        for workspace, start in zip(workspaces, starts, strict=True):
            self.absorb(workspace, start[1])

    def absorb(self, workspace: Any, log_v: F64 | None = None) -> None:
        """K of one problem around log v, by default its own next one; it is the first one's where they agree."""
        first, others = self.workspaces[0], [other for other in self.workspaces if other is not workspace]
        if any(other.K is workspace.K for other in others):
            workspace.K = empty(workspace.K.size, workspace.K.dtype)
            workspace.state.kernel = pointer(workspace.K, "void *")
        workspace.absorb(log_v)
        agree = workspace is not first and np.array_equal(workspace.alpha, first.alpha)
        if agree and np.array_equal(workspace.beta, first.beta):
            workspace.K, workspace.state.kernel = first.K, first.state.kernel

    def iterate(self, count: int) -> tuple[str, Any]:
        """At most ``count`` iterations: the status, and the passes' table, (made, p)."""
        run, p = self.run, len(self.workspaces)
        count, before = min(count, self.most), run.made
        table, err = np.empty((count, p), STATS), np.empty(1 + count // run.every)
        run.err, run.looks = pointer(err), 0
        run.stats = pointer(table, "mapuot_stats *")
        status = check(lib.mapuot_sinkhorn(self.workspaces[0].pool, p, self.states, run, count))
        for workspace, due in zip(self.workspaces, self.flags[1], strict=True):
            if due and status == lib.MAPUOT_ABSORB:
                self.absorb(workspace)
        self.flags[1] = 0
        self.err += err[: run.looks].tolist()
        return STATUS[status], table[: run.made - before]

    @property
    def made(self) -> int:
        return int(self.run.made)


def most_iterations(entries: int) -> int:
    """Iterations of one foreign call that read so many entries each."""
    return max(1, min(CALL_ITERATIONS, CALL_ENTRIES // entries))


def barycenter(
    A: F64,
    M: Any,
    reg: float,
    fi: float,
    weights: F64,
    start: float,
    every: int,
    least: int,
    max_iter: int,
    stop: float,
    safe: float,
    advanced: Callable[[int], Any] = lambda made: None,
) -> tuple[F64, F64, F64, list[float], int, bool]:
    """POT's iteration from log v = ``start``: q, log u and log v (k, n), err, iterations, whether err is below stop.

    A (k, n) and M (n, n) are finite float64 or float32 arrays that the core reads; ``safe`` is the largest exponent
    that a plain product may span.
    """
    (k, n), low = A.shape, float(M.min()) / reg
    pool, ld = pool_for(None, k * n * n), leading_dimension(n, 8)
    kernel, alpha, beta = empty(n * ld), np.full(n, low), np.zeros(n)
    check(
        lib.mapuot_build_kernel(
            pool, n, n, matrix(M), matrix(None), reg, pointer(alpha), pointer(beta), lib.MAPUOT_F64,
            pointer(kernel, "void *"), ld,
        )
    )  # fmt: skip
    A, weights = np.ascontiguousarray(A, np.float64), np.ascontiguousarray(weights, np.float64)
    log_u, log_v, q = np.empty((k, n)), np.full((k, n), start), np.full(n, np.exp(start))
    most, err = most_iterations(k * n * n), []
    looks = np.empty(1 + most // every)
    run = ffi.new("mapuot_barycenter_run *")
    run.n, run.k, run.ld, run.fi, run.low, run.safe = n, k, ld, fi, low, safe
    run.spread = float(M.max()) / reg - low
    run.kernel, run.A, run.weights = map(pointer, (kernel, A, weights))
    run.log_u, run.log_v, run.q, run.err = map(pointer, (log_u, log_v, q, looks))
    run.every, run.least, run.stop = every, least, stop
    status = lib.MAPUOT_RUNNING
    while run.made < max_iter and status == lib.MAPUOT_RUNNING:
        before, run.looks = run.made, 0
        status = check(lib.mapuot_barycenter(pool, run, min(most, max_iter - run.made)))
        advanced(run.made - before)
        err += looks[: run.looks].tolist()
        if status == lib.MAPUOT_ABSORB:
            log_kernel, status = np.divide(M, -reg, dtype=np.float64, order="C"), lib.MAPUOT_RUNNING
            run.log_kernel = pointer(log_kernel)
    return q, log_u, log_v, err, int(run.made), status == lib.MAPUOT_CONVERGED
