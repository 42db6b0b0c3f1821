"""hard: balanced problems of clustered clouds with equal masses, by the default call, beside a Newton path in torch.

Two clouds of as many points in 3-D: 40 clusters of widths .01 to .5, Student-t tails, masses 1 / n, costs half the
squared distances in units of the standard deviation of all coordinates, reg the square of the blur. These are the
defaults of GeomLoss without reach, of minibatch losses and of `ot.sinkhorn` on clouds. M is a float64 matrix that is
formed before, on the GPU with --device gpu. "Newton path" halves reg from range(M) / 10 down and solves the equations
of each step by a Cholesky factor, until the row marginals miss tol in total; it certifies nothing. "Sinkhorn" makes
ROUNDS iterations on logarithms; the share of the mass that its rows miss stands beside it. Uniform clouds, where passes
converge, are measured as well. Small problems come first, untimed, to load and compile. On a GPU each shape has an
untimed first call of its own, too: without the binaries of a wheel, kernels are compiled for some ranges of n. Each row
is printed as it is measured; on a GPU rows and peers that need more than SECONDS are left out.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mapuot

from . import common
from .device import free_pools, wall
from .problems import squared_distances

NEEDS = ("torch",)
TOLS = (1e-3, 1e-6)
# (problems, points, blur, whether the clouds are uniform)
CPU_CASES = ((1, 400, 0.05, False), (1, 800, 0.05, False), (1, 1500, 0.05, False), (1, 3000, 0.05, False),
             (1, 400, 0.01, False), (1, 1500, 0.05, True), (16, 256, 0.05, False))  # fmt: skip
GPU_CASES = ((1, 256, 0.05, False), (1, 1000, 0.05, False), (1, 1000, 0.01, False), (1, 2000, 0.05, False),
             (64, 1000, 0.05, False), (256, 256, 0.05, False), (1, 2000, 0.05, True), (1, 5000, 0.05, False),
             (1, 5000, 0.01, False), (1, 10_000, 0.05, False))  # fmt: skip
QUICK_CASES = ((1, 60, 0.05, False), (3, 40, 0.05, False))
SECONDS = 115.0  # of the part on a GPU: a run there is cut after 130 s
PEER_SECONDS = 25.0  # that the peers of the longest row take
CLUSTERS = 40
ROUNDS = 1000
LONGEST_MOVE = 10.0  # of a potential in one Newton step, in units of reg
LEVELS_FROM = 10.0  # range of the costs over the first reg of the Newton path
LEVEL_MISS = 1e-2  # of the mass: where the next reg of the path begins
MOST_STEPS = 100  # of the Newton path at one reg
MOST_BYTES = 60 << 30  # of the arrays of a peer
SINKHORN_ENTRIES = 1 << 20  # of a matrix, for its iterations on a CPU
LONGEST = 2.0  # seconds; a longer call is not repeated


def cloud(n: int, seed: int) -> Any:
    """Return clustered points; the clouds of a pair have different seeds."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLUSTERS, 3))
    widths = 10 ** rng.uniform(-2, np.log10(0.5), CLUSTERS)
    of = rng.choice(CLUSTERS, n, p=rng.dirichlet(np.ones(CLUSTERS)))
    return centres[of] + widths[of, None] * rng.standard_t(4, size=(n, 3))


def pair(n: int, seed: int, uniform: bool = False) -> tuple[Any, Any]:
    """Return two clouds, clustered or uniform, in units of the deviation of their coordinates."""
    if uniform:
        rng = np.random.default_rng(seed)
        x = rng.random((n, 3))
        y = rng.random((n, 3)) + 0.1
    else:
        x = cloud(n, 2 * seed + 1)
        y = cloud(n, 2 * seed + 2)
    size = np.concatenate([x, y]).std()
    return x / size, y / size


def costs(n: int, seed: int, uniform: bool) -> Any:
    """Return half the squared distances of two clouds."""
    return 0.5 * squared_distances(*pair(n, seed, uniform))


def shift_until_positive(S: Any, r: Any) -> Any:
    """Return Cholesky factors of S with its diagonal shifted by a share of r as small as they need."""
    import torch

    shift = torch.full_like(r[:, :1], 1e-14)
    while True:
        L, failed = torch.linalg.cholesky_ex(S + torch.diag_embed(shift * r))
        wrong = (failed != 0) | ~torch.isfinite(L.diagonal(dim1=1, dim2=2)).all(1)
        if not wrong.any():
            return L
        shift = torch.where(wrong[:, None], 100 * shift, shift)


def newton_path(C: Any, reg: float, tol: float) -> tuple[float, int]:
    """Solve balanced problems (p, n, n) with equal masses; return the largest miss of the rows, and the steps."""
    import torch

    n = C.shape[1]
    log_w = -float(np.log(n))
    f = torch.zeros_like(C[:, :, 0])
    level = float(C.max() - C.min()) / LEVELS_FROM
    steps = 0

    def potential(f: Any) -> Any:
        return -level * torch.logsumexp((f[:, :, None] - C) / level + log_w, 1)

    def value(f: Any) -> Any:
        return (f + potential(f)).mean(1)

    while True:
        level = max(level, reg)
        for _ in range(MOST_STEPS):
            P = torch.exp((f[:, :, None] + potential(f)[:, None, :] - C) / level + 2 * log_w)
            r = P.sum(2)
            missed = float((r - 1 / n).abs().sum(1).max())
            if missed < (tol if level == reg else LEVEL_MISS):
                break
            S = -n * (P @ P.transpose(1, 2))
            S.diagonal(dim1=1, dim2=2).zero_()
            S.diagonal(dim1=1, dim2=2).copy_(-S.sum(2))
            S += 1e-3 * r.mean(1)[:, None, None] / n  # along constants S is singular
            rest = 1 / n - r
            y = torch.cholesky_solve(rest[:, :, None], shift_until_positive(S, r))[:, :, 0]
            y = y.clamp(-LONGEST_MOVE, LONGEST_MOVE) * level
            before = value(f)
            slope = (y * rest).sum(1)
            length = torch.ones_like(before)
            while True:
                short = value(f + length[:, None] * y) < before + 1e-4 * length * slope - 1e-14 * before.abs()
                short &= length > 1e-6
                if not short.any():
                    break
                length = torch.where(short, length / 2, length)
            f = f + length[:, None] * y
            steps += 1
        if level == reg:
            return missed, steps
        level /= 2


def sinkhorn(C: Any, reg: float) -> float:
    """Make ROUNDS iterations on logarithms; return the share of the mass that the rows miss at most."""
    import torch

    log_k = -C / reg
    log_w = -float(np.log(C.shape[1]))
    log_v = torch.zeros_like(C[:, 0])
    for _ in range(ROUNDS):
        log_u = -torch.logsumexp(log_k + log_v[:, None, :] + log_w, 2)
        log_v = -torch.logsumexp(log_k + log_u[:, :, None] + log_w, 1)
    r = torch.exp(log_k + log_u[:, :, None] + log_v[:, None, :] + 2 * log_w).sum(2)
    return float((r - 1 / C.shape[1]).abs().sum(1).max())


def timed(call: Callable[[], Any], gpu: bool, compiles: bool = False) -> tuple[float, Any]:
    """Return the least seconds of three calls after a first one, of a long one of the first; and the answer.

    ``compiles``: the first call may compile kernels for its shape, and does not count.
    """
    if gpu:
        clock = wall
    else:
        clock = common.sample
    answer = None

    def keep() -> None:
        nonlocal answer
        answer = call()

    if compiles:
        keep()
    first = clock(keep)
    if first > LONGEST:
        return first, answer
    return min(clock(call) for _ in range(3)), answer


def measured(
    p: int, n: int, blur: float, uniform: bool, gpu: bool, threads: int, end: float = np.inf
) -> dict[str, Any]:  # fmt: skip
    """Return seconds of the default call by tol, and of the peers where enough seconds are left until ``end``."""
    import torch

    reg = blur**2
    M = np.stack([costs(n, seed, uniform) for seed in range(p)])
    row: dict[str, Any] = {"p": p, "n": n, "blur": blur, "uniform": uniform, "spread": float(np.ptp(M) / reg)}
    C = torch.tensor(M, device="cuda" if gpu else "cpu")
    for tol in TOLS:
        known = {"reg": reg, "reg_m": np.inf, "tol": tol}
        if not gpu:
            known["threads"] = threads
        if p == 1:
            call = partial(mapuot.solve, C[0] if gpu else M[0], **known)
        else:
            call = partial(mapuot.solve_batch, C if gpu else M, **known)
        seconds, found = timed(call, gpu, compiles=gpu)
        if p == 1:
            results = [found]
        else:
            results = list(found)
        told = {"seconds": seconds, "bound": max(x.error_bound for x in results), "how": results[0].how}
        told |= {"passes": max(x.n_passes for x in results), "converged": all(x.converged for x in results)}
        row[f"mapuot {common.short(tol)}"] = told
    if 8 * C.nbytes < MOST_BYTES and time.perf_counter() + PEER_SECONDS < end:
        for tol in TOLS:
            seconds, (missed, steps) = timed(partial(newton_path, C, reg, tol), gpu)
            row[f"Newton path {common.short(tol)}"] = {"seconds": seconds, "missed": missed, "steps": steps}
        if gpu or C.numel() <= SINKHORN_ENTRIES:
            seconds, missed = timed(partial(sinkhorn, C, reg), gpu)
            row["Sinkhorn"] = {"seconds": seconds, "missed": missed}
    del C
    if gpu:
        free_pools()
    return row


def run(args: Any) -> dict[str, Any]:
    import torch

    gpu = args.device == "gpu"
    torch.set_num_threads(args.threads)
    if args.quick:
        cases = QUICK_CASES
    elif gpu:
        cases = GPU_CASES
    else:
        cases = CPU_CASES
    if args.size:
        cases = tuple(case for case in cases if case[1] == args.size)
    if gpu:
        end = time.perf_counter() + SECONDS
    else:
        end = np.inf
    rows = []
    with common.blas_threads(args.threads):
        for case in QUICK_CASES:
            measured(*case, gpu, args.threads)
        for case in cases:
            if time.perf_counter() > end:
                break
            rows.append(measured(*case, gpu, args.threads, end))
            print(*cells(rows[-1]), sep=", ", flush=True)
    return {"rows": rows, "threads": args.threads}


def cells(row: dict[str, Any]) -> list[Any]:
    """Return a line of the table."""
    if row["p"] == 1:
        points = str(row["n"])
    else:
        points = f"{row['p']} x {row['n']}"
    line = [points + ", uniform" * row["uniform"], row["blur"], f"{row['spread']:.1e}"]
    for tol in map(common.short, TOLS):
        own = row[f"mapuot {tol}"]
        line.append(f"{1e3 * own['seconds']:.3g} ({own['bound']:.0e})" + " not converged" * (not own["converged"]))
    for name in (*(f"Newton path {common.short(tol)}" for tol in TOLS), "Sinkhorn"):
        other = row.get(name)
        line.append(f"{1e3 * other['seconds']:.3g} ({other['missed']:.0e})" if other else "")
    return line


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return milliseconds of each, with our bounds on the plan's error, and the misses of the peers' rows."""
    tols = [common.short(tol) for tol in TOLS]
    head = ["points a side", "blur", "range / reg", *(f"mapuot, tol {tol}: ms (bound)" for tol in tols)]
    head += [f"Newton path, {tol}: ms (rows miss)" for tol in tols]
    head.append(f"Sinkhorn, {ROUNDS} iterations: ms (rows miss)")
    lines = [cells(row) for row in data["rows"]]
    return f"{common.machine_line(data)}:\n\n{common.table(head, lines)}"
