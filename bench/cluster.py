"""cluster: ranks of this machine against its threads, and GPUs of one host.

``python -m bench cluster`` needs mpiexec. In one job, rank 0 alone with P threads and P ranks of one thread take turns,
while the waiting ranks sleep; beside them stand POT's two products on one process with P threads. ``--gpus 1,2,4``
needs no MPI: one process a GPU, sums through NCCL. With ``--size N`` it also solves N x N points in 3-D; each GPU makes
its own rows.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mapuot.ranks import ALONE, own_rows

from . import common
from .device import REG, RHO, endless
from .gpu import REGS, point_rows
from .local import spawn


def shared(M: Any, m: int, ranks: Any, threads: int | None, gpu: bool = False) -> Any:
    """Return a workspace of a rank's rows of M, of m in all; its passes never end."""
    return endless(M, "float32", a=np.full(M.shape[0], 1 / m), threads=threads, ranks=ranks, gpu=gpu)


def timed(made: Any, passes: int) -> float:
    """Return the seconds of a float32 pass, the pass that most of a solve consists of, whatever the reached error."""
    made.progress.narrow, made.progress.since_best = 1, 0  # tol < 0: float32 passes go on
    begin = time.perf_counter()
    stats = made.iterate(passes)
    seconds = (time.perf_counter() - begin) / passes
    assert len(stats) == passes
    assert made.progress.narrow
    return seconds


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
    if comm.rank == 0:
        seconds = alone()
    else:
        seconds = 0.0
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)
    return seconds


def together(comm: Any, made: Any, passes: int) -> float:
    comm.Barrier()
    return float(max(comm.allgather(timed(made, passes))))


def worker(shape: tuple[int, int], rounds: int, passes: int) -> dict[str, list[float]]:
    """Time in every process of a job rank 0's threads, all ranks, one rank and POT's two products in turn."""
    from mpi4py import MPI

    from mapuot.ranks import join

    comm, (m, n) = MPI.COMM_WORLD, shape
    ranks = join(comm)
    i0, i1 = own_rows(m, ranks.rank, ranks.size)
    names = ["threads", "ranks", "weak one", "weak", "POT"]
    times: dict[str, list[float]] = {name: [] for name in names}
    strong = shared(costs(i0, i1, n), m, ranks, 1)
    weak = shared(costs(0, m, n), m * ranks.size, ranks, 1)
    whole = None
    one = None
    K = np.empty((0, 0))
    if comm.rank == 0:
        whole = shared(costs(0, m, n), m, ALONE, ranks.size)
        one = shared(costs(0, m, n), m, ALONE, 1)
        K = np.exp(-costs(0, m, n).astype(np.float64) / REG)
    u = np.ones(m)
    v = np.ones(n)

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
        time.sleep(0.05)  # until the threads of BLAS, which spin for 30 ms, are asleep
    if comm.rank == 0:
        return times
    return {}


def job(size: int, shape: tuple[int, int], rounds: int, passes: int) -> Any:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpiexec = shutil.which("mpiexec", path=path)
    if mpiexec is None:
        return None
    command = [mpiexec, "-n", str(size), sys.executable, "-m", "mpi4py", "-m", "bench.cluster"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": str(size)}
    text = json.dumps([shape, rounds, passes])
    done = subprocess.run([*command, text], capture_output=True, text=True, env=env, cwd=common.ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def run(args: Any) -> dict[str, Any]:
    if counts := [int(x) for x in args.gpus.split(",") if x]:
        if args.size:
            return run_large(counts, args.size)
        return run_gpus(counts, args.quick)
    if args.quick:
        shape = 2048, 2048
        rounds = 3
        passes = 5
    else:
        shape = 8192, 8192
        rounds = 9
        passes = 10
    jobs = []
    for size in range(2, args.threads + 1):
        times = job(size, shape, rounds, passes)
        if times is None:
            return {"skipped": "needs mpiexec: pip install mpi4py mpich"}
        pairs = {
            "ranks over threads": ("threads", "ranks"), "weak efficiency": ("weak one", "weak"),
            "strong speed-up": ("weak one", "ranks"), "over POT": ("POT", "ranks"),
        }  # fmt: skip
        jobs.append({
            "ranks": size, "seconds": {name: min(values) for name, values in times.items()},
            "median": {name: common.ratio(times, *pair)["median"] for name, pair in pairs.items()},
        })  # fmt: skip
    if jobs:
        return {"shape": shape, "weak shape": shape, "jobs": jobs}
    return {"skipped": "one core only"}


def tables(data: dict[str, Any]) -> str:
    jobs = data["jobs"]
    if "n" in data:
        return "\n".join(map(str, jobs.items()))
    shapes = (" x ".join(map(str, data[name])) for name in ("shape", "weak shape"))
    rows = [[one["ranks"], *(1e3 * x for x in one["seconds"].values()), *one["median"].values()] for one in jobs]
    head = [data.get("unit", "ranks"), *(f"{k}, ms a pass" for k in jobs[0]["seconds"]), *jobs[0]["median"]]
    told = "{}: strong {}, weak {} each, float32 K".format(common.machine_line(data), *shapes)
    return common.text_of(told, common.table(head, rows))


# ---- GPUs of one host ----


def gpu_times(ranks: Any, m: int, n: int, rounds: int, passes: int, M: Any = None) -> dict[str, Any]:
    """Seconds a pass as a solve makes them, by the clock of the slowest rank; and of its parts, by device events."""
    import cupy as cp

    if M is None:
        M = costs(*own_rows(m, ranks.rank, ranks.size), n, cp)
    made = shared(M, m, ranks, None, True)
    times = []
    made.iterate(16)
    for _ in range(rounds):
        made.progress["since_best"] = 0  # or it would stall after 250 passes
        made.send_progress()
        ranks.exchange(None)
        begin = time.perf_counter()
        assert len(made.iterate(passes)) == passes
        times.append(max(ranks.exchange((time.perf_counter() - begin) / passes)))
    found: dict[str, Any] = {"seconds": times}
    if ranks.size > 1:
        found["parts"] = gpu_parts(ranks, made, passes)
    made.close()
    del made
    cp.get_default_memory_pool().free_all_blocks()
    return found


def gpu_parts(ranks: Any, made: Any, passes: int) -> dict[str, float]:
    """Median seconds of the parts of a pass on this GPU; in the sum it waits for the others."""
    import cupy as cp

    steps = {"row_pass": made.row_pass, "sum": lambda: ranks.device_sum(made.sums), "finish_pass": made.finish_pass}
    split = []
    for _ in range(passes):
        marks = [cp.cuda.Event() for _ in range(4)]
        marks[0].record()
        for step, mark in zip(steps.values(), marks[1:], strict=True):
            step()
            mark.record()
        split.append(marks)
    cp.cuda.Device().synchronize()
    seconds = [[cp.cuda.get_elapsed_time(x, y) / 1e3 for x, y in itertools.pairwise(marks)] for marks in split]
    return dict(zip(steps, np.median(seconds, axis=0).tolist(), strict=True))


def gpu_worker(ranks: Any, strong: int, weak: int, rounds: int, passes: int) -> dict[str, Any]:
    """Time weak and strong passes on a GPU of several; tests/cuda/test_cuda_ranks.py has the answers."""
    import cupy as cp

    cp.cuda.Device(ranks.rank).use()
    found: dict[str, Any] = {"weak": gpu_times(ranks, weak * ranks.size, weak, rounds, passes)}
    found["strong"] = gpu_times(ranks, strong, strong, rounds, passes)
    if ranks.size > 1:
        found["way"] = ranks.device_sum.way
    return found


def run_gpus(counts: list[int], quick: bool) -> dict[str, Any]:
    if quick:
        strong, weak, rounds, passes = 8192, 4096, 3, 24
    else:
        strong, weak, rounds, passes = 65536, 32768, 7, 48
    jobs: list[dict[str, Any]] = []
    for count in counts:
        one = spawn(gpu_worker, count, strong, weak, rounds, passes)[0]
        own = {name: float(np.median(one[name]["seconds"])) for name in ("weak", "strong")}
        if jobs:
            first = jobs[0]
        else:
            first = {"ranks": count, "seconds": own}
        alone = first["seconds"]
        ratios = {"weak efficiency": alone["weak"] / own["weak"],
                  "strong speed-up": first["ranks"] * alone["strong"] / own["strong"]}  # fmt: skip
        told = {"parts": {name: one[name].get("parts") for name in own}, "way": one.get("way")}
        jobs.append({"ranks": count, "seconds": own, "median": ratios, **told})
    return {"unit": "GPUs", "shape": [strong, strong], "weak shape": [weak, weak], "jobs": jobs}


def large_worker(ranks: Any, n: int, rounds: int, passes: int) -> dict[str, Any]:
    """Return, on one GPU of several, seconds of the slowest call to a certified 1e-6, memory taken, and of a pass."""
    import cupy as cp

    import mapuot

    cp.cuda.Device(ranks.rank).use()
    pool = cp.get_default_memory_pool()
    rows = point_rows(n)
    weight = np.full(n, 1 / n)
    found: dict[str, Any] = {"solves": []}
    for reg in REGS:
        times = []
        if ranks.size > 1:
            comm = ranks
        else:
            comm = None
        own = weight[slice(*own_rows(n, ranks.rank, ranks.size))]
        for _ in range(3):
            ranks.exchange(None)
            begin = time.perf_counter()
            answer = mapuot.solve(rows, own, weight, reg=reg, reg_m=RHO, tol=1e-6, backend="cuda", comm=comm)
            times.append(max(ranks.exchange(time.perf_counter() - begin)))
        ranks.same(log_v=answer.log_v, n_passes=answer.n_passes)
        row = {"reg": reg, "seconds": min(times), "first": times[0], "passes": answer.n_passes, "status": answer.status}
        row |= {"error_bound": answer.error_bound, "objective": answer.objective}
        found["solves"].append(row | {"GiB": max(ranks.exchange(pool.total_bytes() / 2**30))})
        if ranks.rank == 0:
            print(row, flush=True)
        pool.free_all_blocks()
    return found | {"pass": gpu_times(ranks, n, n, rounds, passes, rows)}


def run_large(counts: list[int], n: int) -> dict[str, Any]:
    jobs = {count: spawn(large_worker, count, n, 5, 24)[0] for count in counts}
    return {"n": n, "jobs": jobs}


if __name__ == "__main__":  # a rank of ``job``
    answer = worker(*json.loads(sys.argv[1]))
    if answer:
        print(json.dumps(common.plain(answer)))
