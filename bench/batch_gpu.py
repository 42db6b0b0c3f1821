"""batch on a GPU: log-semiring products, many small problems, loss and gradient, against torch on the same GPU.

Device events around many calls (so what the host adds counts), medians of several rounds; parity against float64 comes
before every timing. log_matmul against ``torch.logsumexp`` over the broadcast sum and against exponentials with row and
column maxima by a matrix product; the memory is the peak beyond the factors and the answer. Passes of 1024 problems of
128 x 128 (translation, Anderson and an error estimate in float32, or the certificate in float64) against torch.bmm's
unbalanced iteration, which does none of it, plain and as a CUDA graph; a solve to a certified 1e-6 against as many
iterations of torch's as bring the plan within 1e-5. Loss and its
gradient at 100 points, 512 histograms, float32, against autograd through 100 torch iterations.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import mapuot

from . import common
from .batch import BATCH, POINTS, REG, RHO, STEPS, clouds, shared_steps, unrolled

SIZES, BROADCAST = (64, 128, 256, 512, 1024, 2048), 512  # broadcast: the largest n of it
ERRORS = {"float64": 1e-13, "float32": 2e-5}  # of log_matmul, absolute
PROBLEMS, SIZE, ROUNDS, SAMPLE = 1024, 128, 7, 3e-3  # rounds of calls that last SAMPLE seconds
CLOSE = 1e-5  # plan error that torch's iterations are counted to: float32 does not reach ours
FIRST, LAST = 4, 20  # passes: their difference leaves the launch and the making of K out


def elapsed(candidates: dict[str, Any]) -> dict[str, float]:
    """Median seconds a call of each, in turn; every sample is of calls for SAMPLE seconds."""
    import cupy as cp

    def sample(call: Any, count: int) -> float:
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return cp.cuda.get_elapsed_time(begin, end) / 1e3 / count

    counts = {}
    for name, call in candidates.items():
        sample(call, 3)
        counts[name] = max(1, min(200, int(SAMPLE / sample(call, 2))))
    rounds = [{name: sample(call, counts[name]) for name, call in candidates.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(r[name] for r in rounds) for name in candidates}


def peak(call: Any) -> float:
    """MiB that one call takes at most from CuPy and torch together, its answer included."""
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
    return size / 2**20


def products(args: Any) -> list[dict[str, Any]]:
    sizes = SIZES[:3] if args.quick else SIZES
    cases = [(1, n) for n in sizes] + [(512, 128)]
    return [product(dtype, p, n) for dtype in ("float32", "float64") for p, n in cases]


def product(dtype: str, p: int, n: int) -> dict[str, Any]:
    import cupy as cp
    import torch

    A, B = np.random.default_rng(0).normal(size=(2, p, n, n)).astype(dtype)
    A, B = cp.asarray(A), cp.asarray(B)
    a, b = torch.from_dlpack(A), torch.from_dlpack(B)

    def shifted() -> Any:
        r, c = a.amax(2, keepdim=True), b.amax(1, keepdim=True)
        return torch.log(torch.exp(a - r) @ torch.exp(b - c)) + r + c

    candidates = {
        "mapuot": lambda: mapuot.log_matmul(A, B),
        "exact": lambda: mapuot.log_matmul(A, B, exact=True),
        "shifted": shifted,
        "broadcast": lambda: torch.logsumexp(a[:, :, :, None] + b[:, None], 2),
    }
    if p * n**3 > BROADCAST**3:
        del candidates["broadcast"]
    right = torch.logsumexp(a[0, :64, :, None].double() + b[0, None].double(), 1)
    for name, call in candidates.items():
        out = call()
        out = torch.from_dlpack(out) if name in ("mapuot", "exact") else out
        error = float((out[0, :64].double() - right).abs().max())
        assert error < ERRORS[dtype], (name, n, error)
    answer = A.nbytes / 2**20
    mib = {name: peak(call) - answer for name, call in candidates.items()}
    return {"dtype": dtype, "p": p, "n": n, "times": elapsed(candidates), "mib": mib}


def problems(own: bool) -> tuple[Any, Any, Any]:
    import cupy as cp

    M, A, B = (cp.asarray(x, dtype=np.float32) for x in clouds(PROBLEMS, SIZE))
    return (M * cp.linspace(0.5, 1, PROBLEMS, dtype=np.float32)[:, None, None] if own else M), A, B


def seconds_a_pass(M: Any, A: Any, B: Any, precision: str) -> float:
    """Of the whole batch, translation, extrapolation and certificate included."""
    from mapuot.backends import cuda
    from mapuot.backends.cuda import batch as cuda_batch
    from mapuot.problem.problem import BatchProblem
    from mapuot.route.strategy import make_options

    task = BatchProblem.from_arrays(M, A, B, REG, RHO, "kl", "product", cuda)
    options = dataclasses.replace(make_options("auto", precision, 1e-6, None, None), tol=-1.0)
    workspace = cuda_batch.BatchWorkspace(task, options, None)
    narrow = precision == "mixed"
    record = workspace.record(options, REG)
    record["limits"]["narrow_floor"] = -1.0

    def passes(count: int) -> Any:
        def call() -> None:
            workspace.arrays["report"].fill(0)
            workspace.x.fill(0)
            record["count"] = count + narrow
            workspace.launch(record, narrow)

        return call

    times = elapsed({"first": passes(FIRST), "last": passes(LAST)})
    workspace.read()
    assert (workspace.stats["passes"] == LAST).all()
    return (times["last"] - times["first"]) / (LAST - FIRST)


def torch_problem(M: Any, A: Any, B: Any) -> tuple[Any, Any]:
    """(iterate(k), plan(i)): u = (a / K v)^fi, v = (b / K^T u)^fi in torch, float32, from u = v = 1."""
    import torch

    M, a, b = (torch.from_dlpack(x) for x in (M, A, B))
    K = torch.exp(-M / REG) * a[:, :, None] * b[:, None] if M.ndim == 3 else torch.exp(-M / REG)
    u, v, fi = torch.ones_like(a), torch.ones_like(b), RHO / (RHO + REG)

    def iterate(count: int) -> None:
        for _ in range(count):
            if K.ndim == 3:
                u.copy_((a / torch.bmm(K, v[:, :, None])[:, :, 0]) ** fi)
                v.copy_((b / torch.bmm(u[:, None], K)[:, 0]) ** fi)
            else:
                u.copy_((1 / ((b * v) @ K.T)) ** fi)
                v.copy_((1 / ((a * u) @ K)) ** fi)

    def plan(i: int) -> Any:
        P = u[i, :, None] * (K[i] if K.ndim == 3 else K) * v[i]
        return P if K.ndim == 3 else a[i, :, None] * P * b[i]

    return iterate, plan


def seconds_an_iteration(iterate: Any, graph: bool) -> float:
    import torch

    if not graph:
        return elapsed({"call": lambda: iterate(10)})["call"] / 10
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        iterate(10)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        iterate(10)
    return elapsed({"call": recorded.replay})["call"] / 10


def plan_error(plan: Any, tight: Any) -> float:
    """The largest of some problems, relative to the mass."""
    import cupy as cp

    some = range(0, PROBLEMS, 64)
    return max(float(abs(cp.from_dlpack(plan(i)) - tight.plan(i)).sum()) / tight.mass[i] for i in some)


def batches() -> list[dict[str, Any]]:
    rows = []
    for own in (True, False):
        M, A, B = problems(own)
        result = mapuot.solve_batch(M, A, B, REG, RHO)
        tight = mapuot.solve_batch(M, A, B, REG, RHO, tol=1e-10)
        error, needed, theirs = plan_error(result.plan, tight), 0, np.inf
        assert result.converged.all()
        assert error < 2e-6, error  # the plans are formed in float32
        iterate, plan = torch_problem(M, A, B)
        while theirs > CLOSE and needed < 1000:
            iterate(10)
            needed, theirs = needed + 10, plan_error(plan, tight)
        row = {
            "p": PROBLEMS, "n": SIZE, "own": own, "passes": float(result.n_passes.mean()), "error": error,
            "pass": seconds_a_pass(M, A, B, "mixed"), "float64 pass": seconds_a_pass(M, A, B, "float64"),
            "torch": seconds_an_iteration(iterate, False), "torch graph": seconds_an_iteration(iterate, True),
            "solve": elapsed({"call": lambda M=M, A=A, B=B: mapuot.solve_batch(M, A, B, REG, RHO)})["call"],
            "torch iterations": needed, "torch error": theirs,
        }  # fmt: skip
        rows.append({**row, "torch solve": needed * row["torch graph"]})
    return rows


def losses(args: Any) -> dict[str, Any]:
    import torch

    from mapuot.torch import sinkhorn_loss

    p = 64 if args.quick else BATCH
    M, A, B = (torch.tensor(x, dtype=torch.float32, device="cuda") for x in clouds(p, POINTS))

    def gradient(value: Any) -> Any:
        a = A.clone().requires_grad_()
        value(a).sum().backward()
        return a.grad

    candidates = {
        "mapuot": lambda: gradient(lambda a: sinkhorn_loss(a, B, M, REG, RHO)),
        "log domain": lambda: gradient(lambda a: unrolled(torch, a, B, M, STEPS)),
        "products": lambda: gradient(lambda a: shared_steps(torch, a, B, M, STEPS)),
    }
    tight = gradient(lambda a: sinkhorn_loss(a, B, M, REG, RHO, tol=1e-11))
    errors = {k: float((call() - tight).abs().max() / tight.abs().max()) for k, call in candidates.items()}
    assert errors["mapuot"] < 1e-5, errors
    mib = {name: peak(call) for name, call in candidates.items()}
    passes = {tol: peak(lambda tol=tol: gradient(lambda a: sinkhorn_loss(a, B, M, REG, RHO, tol=tol)))
              for tol in (1e-2, 1e-10)}  # fmt: skip
    times = elapsed(candidates)
    return {"p": p, "points": POINTS, "steps": STEPS, "times": times, "errors": errors, "mib": mib, "by_tol": passes}


def run(args: Any) -> dict[str, Any]:
    import cupy as cp

    device = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
    file = "batch-gpu-" + re.sub(r"\W+", "-", device.lower())
    return {"device": device, "file": file, "products": products(args), "batches": batches(), "losses": losses(args)}


def report(data: dict[str, Any]) -> str:
    names = ("mapuot", "exact", "shifted", "broadcast")
    lines = [f"{data['device']}: log_matmul p x n^3, median us; MiB beyond the answer", common.table(
        ["dtype, p x n", *names, *(f"MiB {k}" for k in names)],
        [[f"{r['dtype']} {r['p']} x {r['n']}", *(1e6 * r["times"][k] if k in r["times"] else "-" for k in names),
          *(r["mib"].get(k, "-") for k in names)] for r in data["products"]])]  # fmt: skip
    lines += ["", "batches: us of a pass or iteration of the whole batch; ms of a solve to 1e-6", common.table(
        ["p x n^2", "pass", "float64 pass", "torch", "torch graph", "torch / pass", "solve", "passes", "error",
         "torch iterations", "their error", "ms in a graph"],
        [[f"{r['p']} x {r['n']}^2 {'own' if r['own'] else 'one'} M",
          *(1e6 * r[k] for k in ("pass", "float64 pass", "torch", "torch graph")), r["torch"] / r["pass"],
          1e3 * r["solve"], r["passes"], r["error"], r["torch iterations"], r["torch error"], 1e3 * r["torch solve"]]
         for r in data["batches"]])]  # fmt: skip
    loss = data["losses"]
    title = f"loss and gradient, {loss['p']} x {loss['points']}^2, {loss['steps']} iterations in torch"
    lines += ["", title, common.table(
        ["", "ms", "times ours", "gradient error", "MiB"],
        [[k, 1e3 * t, t / loss["times"]["mapuot"], loss["errors"][k], loss["mib"][k]]
         for k, t in loss["times"].items()])]  # fmt: skip
    lines += [f"MiB by tol: {loss['by_tol']}"]
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, columns=3) as axes:
        left, middle, right = axes[0]
        for name in ("mapuot", "exact", "shifted", "broadcast"):
            rows = [r for r in data["products"] if name in r["times"] and r["dtype"] == "float32" and r["p"] == 1]
            left.loglog([r["n"] for r in rows], [1e6 * r["times"][name] for r in rows], "o-", label=name)
        left.set(xlabel="n of an n x n x n product, float32", ylabel="us", title=data["device"])
        left.legend()
        names = ("pass", "float64 pass", "torch graph", "torch")
        middle.bar(names, [1e6 * data["batches"][0][k] for k in names])
        middle.set(yscale="log", ylabel="us a pass of 1024 problems of 128 x 128, own costs")
        loss = data["losses"]["times"]
        right.bar(list(loss), [1e3 * loss[k] for k in loss])
        right.set(yscale="log", ylabel="ms, loss and gradient, 512 x 100 points")
