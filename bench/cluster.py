"""cluster: ranks of this machine against its threads, GPUs of one host, and the communication model to 4096 ranks.

``python -m bench cluster`` needs mpiexec: in one job, rank 0 alone with P threads and P ranks of one thread take turns,
while those who wait sleep; POT's iteration on one process stands beside them. ``python -m bench.cluster --gpus 1,2,4``
needs no MPI: one process a GPU, sums through NCCL. Model: T(P) = bytes(K) / (P BW) + alpha log2 P + beta n, BW from one
rank, alpha and beta from the sums alone; what it says beyond the ranks measured is a model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mapuot.backends import Options
from mapuot.penalties import F64
from mapuot.problem import Problem
from mapuot.ranks import ALONE, Ranks, own_rows

from . import common
from .local import spawn

REG, RHO = 0.05, 1.0
SUM_SIZES = [1 << k for k in range(10, 21, 2)]
MODEL_RANKS = [1 << k for k in range(13)]


def options(threads: int | None) -> Options:
    """Plain passes that never end: what is timed is the same work each time."""
    return Options(True, 5, False, "float32", 1e-30, -1.0, threads)


def workspace(M: Any, n: int, m: int, ranks: Ranks, backend: Any, threads: int | None) -> Any:
    a, b = np.full(M.shape[0], 1 / m), np.full(n, 1 / n)
    problem = Problem.from_arrays(M, a, b, REG, RHO, "kl", "product", backend, ranks)
    made = backend.Workspace(problem, options(threads))
    made.absorb(np.zeros(n))
    made.iterate(2)
    return made


def timed(made: Any, passes: int) -> float:
    """Seconds a pass; a workspace that has come to rest starts anew."""
    begin, count = time.perf_counter(), 0
    while count < passes:
        stats = made.iterate(passes - count)
        count += len(stats)
        if stats[-1].status != "running":
            made.absorb(np.zeros(made.problem.shape[1]))
    return (time.perf_counter() - begin) / passes


def costs(i0: int, i1: int, n: int, xp: Any = np) -> Any:
    """Rows of squared distances in the plane, in (0, 1), float32, made in blocks."""
    rng = np.random.default_rng(0)
    y = xp.asarray(rng.random((n, 2)), dtype=xp.float32)
    M = xp.empty((i1 - i0, n), xp.float32)
    for k in range(i0, i1, 512):
        x = xp.asarray(np.random.default_rng(k).random((min(512, i1 - k), 2)), dtype=xp.float32)
        M[k - i0 : k - i0 + len(x)] = ((x[:, :1] - y[:, 0]) ** 2 + (x[:, 1:] - y[:, 1]) ** 2) / 2
    return M


# ---- ranks of this machine ----


def turn(comm: Any, alone: Any) -> float:
    """Seconds that rank 0 needs by itself; the others sleep, since a waiting MPI call would take a core."""
    seconds = alone() if comm.rank == 0 else 0.0
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)
    return seconds


def together(comm: Any, made: Any, passes: int) -> float:
    comm.Barrier()
    return float(max(comm.allgather(timed(made, passes))))


def worker(shape: tuple[int, int], rounds: int, passes: int) -> dict[str, Any]:
    """In every process of a job: rank 0's threads, all ranks, one rank and POT's two products in turn."""
    from mpi4py import MPI

    from mapuot.backends import cpu
    from mapuot.ranks import join

    comm, (m, n) = MPI.COMM_WORLD, shape
    ranks = join(comm)
    i0, i1 = own_rows(m, ranks.rank, ranks.size)
    names = ["threads", "ranks", "weak one", "weak", "POT"]
    times: dict[str, list[float]] = {name: [] for name in names}
    strong = workspace(costs(i0, i1, n), n, m, ranks, cpu, 1)
    weak = workspace(costs(0, m, n), n, m * ranks.size, ranks, cpu, 1)
    whole, one, K = None, None, np.empty((0, 0))
    if comm.rank == 0:
        whole = workspace(costs(0, m, n), n, m, ALONE, cpu, ranks.size)
        one = workspace(costs(0, m, n), n, m, ALONE, cpu, 1)
        K = np.exp(-costs(0, m, n).astype(np.float64) / REG)
    u, v = np.ones(m), np.ones(n)

    def two_products() -> float:
        begin = time.perf_counter()
        K @ v
        K.T @ u
        return time.perf_counter() - begin

    for _ in range(rounds):
        times["threads"].append(turn(comm, lambda: timed(whole, passes)))
        times["ranks"].append(together(comm, strong, passes))
        times["weak one"].append(turn(comm, lambda: timed(one, passes)))
        times["weak"].append(together(comm, weak, passes))
        times["POT"].append(turn(comm, two_products))
    return {"times": times, "sums": sum_times(ranks, comm.Barrier, np)}


def sum_times(ranks: Any, barrier: Any, xp: Any) -> list[float]:
    """Seconds of one sum over the ranks by its length."""
    found = []
    for size in SUM_SIZES:
        total, best = xp.zeros(size), math.inf
        for _ in range(10):
            barrier()
            begin = time.perf_counter()
            for _ in range(5):
                with ranks.adding(total):
                    pass
            if xp is not np:
                xp.cuda.Device().synchronize()
            best = min(best, (time.perf_counter() - begin) / 5)
        found.append(max(ranks.exchange(best)))
    return found


def job(size: int, shape: tuple[int, int], rounds: int, passes: int) -> Any:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpiexec = shutil.which("mpiexec", path=path)
    if mpiexec is None:
        return None
    command = [mpiexec, "-n", str(size), sys.executable, "-m", "mpi4py", "-m", "bench.cluster", "--worker"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": str(size)}
    text = json.dumps([shape, rounds, passes])
    done = subprocess.run([*command, text], capture_output=True, text=True, env=env, cwd=common.ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def run(args: argparse.Namespace) -> dict[str, Any]:
    shape, rounds, passes = ((2048, 2048), 3, 5) if args.quick else ((8192, 8192), 9, 10)
    jobs = []
    for size in range(2, args.threads + 1):
        found = job(size, shape, rounds, passes)
        if found is None:
            return {"skipped": "needs mpiexec: pip install mpi4py mpich"}
        jobs.append(summed(found, size))
    if not jobs:
        return {"skipped": "one core only"}
    one = jobs[0]["seconds"]["weak one"]
    K = 4 * shape[0] * shape[1]
    return {"shape": shape, "jobs": jobs, "model": model(K, one, jobs[-1]["sums"], jobs[-1]["ranks"], shape[1])}


def summed(found: dict[str, Any], size: int) -> dict[str, Any]:
    times = found["times"]
    ratio = {
        "ranks over threads": np.array(times["threads"]) / np.array(times["ranks"]),
        "weak efficiency": np.array(times["weak one"]) / np.array(times["weak"]),
        "strong speed-up": np.array(times["weak one"]) / np.array(times["ranks"]),
        "over POT": np.array(times["POT"]) / np.array(times["ranks"]),
    }
    return {
        "ranks": size,
        "seconds": {name: min(values) for name, values in times.items()},
        "median": {name: float(np.median(values)) for name, values in ratio.items()},
        "quartiles": {name: np.percentile(values, [25, 75]).tolist() for name, values in ratio.items()},
        "sums": found["sums"],
    }


def model(K: int, one: float, sums: list[float], ranks: int, n: int) -> dict[str, Any]:
    """Parameters, and the speed-up that they say for 1 to 4096 ranks of this size each (weak) and in all (strong)."""
    lengths = np.array(SUM_SIZES, float)
    weight = 1 / np.array(sums)  # relative errors
    design = np.stack([np.ones_like(lengths), lengths], 1)
    alpha, beta = np.linalg.lstsq(design * weight[:, None], np.ones(len(sums)), rcond=None)[0]
    alpha = max(alpha, 0.0) / math.log2(ranks)
    P = np.array(MODEL_RANKS, float)
    meet = np.where(P > 1, alpha * np.log2(P) + beta * n, 0.0)
    return {
        "bandwidth": K / one, "alpha": alpha, "beta": beta, "n": n, "ranks": MODEL_RANKS,
        "strong": (one / (one / P + meet)).tolist(), "weak": (one / (one + meet)).tolist(),
    }  # fmt: skip


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return str(data["skipped"])
    lines = []
    for one in data["jobs"]:
        lines += [f"{one['ranks']} {data.get('unit', 'ranks')}, {data['shape'][0]} x {data['shape'][1]}, float32 K"]
        lines += [f"  {name:<20} {value:.3f}" for name, value in one["median"].items()]
        lines += [f"  {name:<20} {1e3 * value:.3f} ms a pass" for name, value in one["seconds"].items()]
    m = data["model"]
    lines += [
        f"model: BW {m['bandwidth'] / 1e9:.1f} GB/s, alpha {1e6 * m['alpha']:.1f} us, beta {1e9 * m['beta']:.2f} ns"
    ]
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    m = data["model"]
    with common.figure(path, columns=2) as axes:
        strong, weak = axes[0]
        for axis, name, key in ((strong, "strong", "strong speed-up"), (weak, "weak", "weak efficiency")):
            axis.plot(m["ranks"], m[name], "--", label="model")
            axis.plot(
                [one["ranks"] for one in data["jobs"]],
                [one["median"][key] for one in data["jobs"]],
                "o",
                label="measured",
            )
            axis.set(
                xscale="log", xlabel=data.get("unit", "ranks"), title=f"{name} scaling, {data['shape'][0]} x {m['n']}"
            )
            axis.legend()
        strong.set(yscale="log", ylabel="speed-up over one")
        weak.set(ylabel="efficiency", ylim=(0, 1.1))


# ---- GPUs of one host ----


def gpu_worker(ranks: Any, strong: int, weak: int, rounds: int, passes: int) -> dict[str, Any]:
    """On one GPU of several: weak and strong passes, the sums alone, and the answer against one process."""
    import cupy as cp

    import mapuot
    from mapuot.backends import cuda

    cp.cuda.Device(ranks.rank).use()
    found: dict[str, Any] = {"device": cp.cuda.runtime.getDeviceProperties(ranks.rank)["name"].decode()}
    for name, m, n in (("weak", weak * ranks.size, weak), ("strong", strong, strong)):
        i0, i1 = own_rows(m, ranks.rank, ranks.size)
        made = workspace(costs(i0, i1, n, cp), n, m, ranks, cuda, None)
        times = []
        for _ in range(rounds):
            ranks.exchange(None)
            times.append(max(ranks.exchange(timed(made, passes))))
        found[name] = times
        made.close()
        del made
        cp.get_default_memory_pool().free_all_blocks()
    small = 1500
    i0, i1 = own_rows(small, ranks.rank, ranks.size)
    M, b = costs(0, small, 1100), np.full(1100, 1 / 1100)
    a = np.full(small, 1 / small)
    exact: dict[str, Any] = {"precision": "float64", "tol": 1e-11}
    mine = mapuot.solve(cp.asarray(M[i0:i1]), a[i0:i1], b, REG, RHO, comm=ranks, **exact)
    one = mapuot.solve(M, a, b, REG, RHO, backend="cpu", **exact)
    found["error"] = distance(mine.log_v, one.log_v, mine.log_u, one.log_u[i0:i1])
    found["passes"] = [mine.n_passes, one.n_passes]
    if ranks.size > 1:
        found["sums"] = sum_times(ranks, lambda: ranks.exchange(None), cp)
        found["way"] = ranks.device_sum.way
    return found


def distance(log_v: F64, right_v: F64, log_u: F64, right_u: F64) -> float:
    return float(max(np.abs(log_v - right_v).max(), np.abs(log_u - right_u).max()))


def run_gpus(counts: list[int], quick: bool) -> dict[str, Any]:
    strong, weak, rounds, passes = (8192, 4096, 3, 20) if quick else (65536, 32768, 5, 50)
    found = {count: spawn(gpu_worker, count, strong, weak, rounds, passes) for count in counts}
    base = found[counts[0]][0]
    jobs = []
    for count in counts:
        one = found[count][0]
        best = {name: min(one[name]) for name in ("weak", "strong")}
        median = {
            "weak efficiency": min(base["weak"]) / best["weak"],
            "strong speed-up": counts[0] * min(base["strong"]) / best["strong"],
        }
        jobs.append({
            "ranks": count, "seconds": best, "median": median, "sums": one.get("sums"), "way": one.get("way"),
            "error": max(x["error"] for x in found[count]), "passes": one["passes"],
        })  # fmt: skip
    data = {
        "unit": "GPUs",
        "device": base["device"],
        "shape": [strong, strong],
        "weak shape": [weak, weak],
        "jobs": jobs,
    }
    last = jobs[-1]
    if last["sums"]:
        data["model"] = model(4 * strong**2, min(base["strong"]), last["sums"], last["ranks"], strong)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    if args.worker:
        found = worker(*json.loads(args.worker))
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(common.plain(found)))
        return
    data = common.plain(run_gpus([int(x) for x in args.gpus.split(",")], args.quick))
    path = common.save("cluster_gpu", data, args.out)
    for one in data["jobs"]:
        print(one)
    if "model" in data:
        print(report(data))
        plot(data, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
