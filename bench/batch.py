"""batch: log-semiring products, many problems on one cost, and the gradient of the loss, against what else there is.

log_matmul, on one thread, against ``torch.logsumexp`` over the broadcast sum and against exponentials with row and
column maxima by a matrix product (right only while nothing underflows): time, and the peak of memory beyond the answer
in a process of its own. Batches of histograms against POT's function and `solve`, problem by problem, with the plan
errors reached. Loss and gradient at 100 points, 512 histograms, against autograd through 100 torch iterations, on
logarithms and by matrix products in the scaling form. float64 everywhere but for log_matmul, which is timed in both.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mapuot

from . import common

SIZES, BROADCAST, SECONDS = (64, 128, 256, 512), 256, 2.0  # broadcast: the largest n of it
REG, RHO, POINTS, BATCH, STEPS = 0.05, 1.0, 100, 512, 100
MEMORY = """
import re, sys
import numpy as np
import torch, mapuot
def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024
n, kind = int(sys.argv[1]), sys.argv[2]
A, B = np.random.default_rng(0).normal(size=(2, n, n))
a, b = torch.from_numpy(A), torch.from_numpy(B)
mapuot.log_matmul(A[:8, :8], B[:8, :8], threads=2)
torch.logsumexp(torch.zeros(8, 8, 8), 1)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
out = mapuot.log_matmul(A, B) if kind == "mapuot" else torch.logsumexp(a[:, :, None] + b[None], 1)
print(max(resident("VmHWM") - before - A.nbytes / 2**20, 0.0))
"""


def clouds(p: int, m: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(M, A, B): squared distances of two clouds, max 1, and p pairs of histograms of masses about 1 and 1.3."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((m, 2)), rng.random((m, 2))
    M = ((x[:, None] - y) ** 2).sum(2)
    A, B = rng.random((p, m)) + 0.1, rng.random((p, m)) + 0.1
    return M / M.max(), A / A.sum(1, keepdims=True), 1.3 * B / B.sum(1, keepdims=True)


def products(args: Any, torch: Any) -> list[dict[str, Any]]:
    sizes = SIZES[:2] if args.quick else SIZES
    return [product(dtype, n, torch) for dtype in ("float64", "float32") for n in sizes]


def product(dtype: str, n: int, torch: Any) -> dict[str, Any]:
    A, B = np.random.default_rng(0).normal(size=(2, n, n)).astype(dtype)
    a, b = torch.from_numpy(A), torch.from_numpy(B)

    def shifted() -> Any:
        r, c = a.amax(1, keepdim=True), b.amax(0, keepdim=True)
        return torch.log(torch.exp(a - r) @ torch.exp(b - c)) + r + c

    candidates = {
        "mapuot": lambda: mapuot.log_matmul(A, B, threads=1),
        "exact": lambda: mapuot.log_matmul(A, B, threads=1, exact=True),
        "shifted": shifted,
        "broadcast": lambda: torch.logsumexp(a[:, :, None] + b[None], 1),
    }
    if n > BROADCAST:
        del candidates["broadcast"]
    times = common.interleave(candidates, SECONDS)
    row = {"dtype": dtype, "n": n, "times": common.summaries(times)}
    row["over"] = {name: common.ratio(times, name, "mapuot")["median"] for name in candidates}
    if dtype == "float64" and n <= BROADCAST:
        row["mib"] = {kind: memory(n, kind) for kind in ("mapuot", "broadcast")}
    return row


def memory(n: int, kind: str) -> float:
    command = [sys.executable, "-c", MEMORY, str(n), kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def batches(args: Any) -> list[dict[str, Any]]:
    cases = ((16, 50),) if args.quick else ((16, 50), (64, 100), (64, 400), (512, 100))
    return [batch(p, m, args.threads) for p, m in cases]


def batch(p: int, m: int, threads: int) -> dict[str, Any]:
    """Times and the worst plan errors; POT (its default stop) and single solves run on 16 problems and are scaled."""
    import ot

    M, A, B = clouds(p, m)
    count = min(p, 16)
    candidates = {
        "mapuot": lambda: mapuot.solve_batch(M, A, B, REG, RHO, threads=threads),
        "solve": lambda: [mapuot.solve(M, A[i], B[i], REG, RHO, threads=threads) for i in range(count)],
        "POT": lambda: [ot.sinkhorn_unbalanced(A[i], B[i], M, REG, RHO) for i in range(count)],
    }
    times = common.interleave(candidates, SECONDS)
    scaled = {name: [t * (1.0 if name == "mapuot" else p / count) for t in values] for name, values in times.items()}
    exact = mapuot.solve_batch(M, A[:count], B[:count], REG, RHO, tol=1e-11)
    ours = candidates["mapuot"]()
    plans = {"mapuot": [ours.plan(i) for i in range(count)], "POT": candidates["POT"]()}
    errors = {
        name: max(np.abs(P - exact.plan(i)).sum() / exact.mass[i] for i, P in enumerate(found))
        for name, found in plans.items()
    }
    over = {name: common.ratio(scaled, name, "mapuot")["median"] for name in candidates}
    return {"p": p, "m": m, "times": common.summaries(scaled), "over": over, "errors": errors}


def unrolled(torch: Any, a: Any, b: Any, M: Any, steps: int) -> Any:
    """The loss by autograd: plain unbalanced iterations on logarithms, then the dual value."""
    fi, log_k = RHO / (RHO + REG), -M / REG
    log_a, log_b = torch.log(a), torch.log(b)
    f, g = torch.zeros_like(a), torch.zeros_like(b)  # log u, log v
    for _ in range(steps):
        f = -fi * torch.logsumexp(log_k + (g + log_b)[:, None, :], 2)
        g = -fi * torch.logsumexp(log_k.T + (f + log_a)[:, None, :], 2)
    mass = torch.exp(log_k + (f + log_a)[:, :, None] + (g + log_b)[:, None, :]).sum((1, 2))
    sides = [RHO * (t * (1 - torch.exp(-REG / RHO * x))).sum(1) for t, x in ((a, f), (b, g))]
    return sides[0] + sides[1] + REG * (a.sum(1) * b.sum(1) - mass)


def shared_steps(torch: Any, a: Any, b: Any, M: Any, steps: int) -> Any:
    """The same loss by matrix products in the scaling form: the quickest that torch can do; right at this reg only."""
    fi, K = RHO / (RHO + REG), torch.exp(-M / REG)
    u, v = torch.ones_like(a), torch.ones_like(b)
    for _ in range(steps):
        u = ((v * b) @ K.T) ** -fi
        v = ((u * a) @ K) ** -fi
    mass = (((u * a) @ K) * v * b).sum(1)
    sides = [RHO * (t * (1 - x ** (-REG / RHO))).sum(1) for t, x in ((a, u), (b, v))]
    return sides[0] + sides[1] + REG * (a.sum(1) * b.sum(1) - mass)


def losses(args: Any, torch: Any) -> dict[str, Any]:
    from mapuot.torch import sinkhorn_loss

    p = 8 if args.quick else BATCH
    M, A, B = (torch.from_numpy(x) for x in clouds(p, POINTS))

    few = max(p // 16, 1)  # the log-domain graph of all would take 20 GiB: timed on so many, and scaled

    def gradient(value: Any, count: int = p) -> Any:
        a = A[:count].clone().requires_grad_()
        value(a).sum().backward()
        return a.grad

    candidates = {
        "mapuot": lambda: gradient(lambda a: sinkhorn_loss(a, B, M, REG, RHO, threads=args.threads)),
        "log domain": lambda: gradient(lambda a: unrolled(torch, a, B[:few], M, STEPS), few),
        "products": lambda: gradient(lambda a: shared_steps(torch, a, B, M, STEPS)),
    }
    times = common.interleave(candidates, SECONDS)
    times["log domain"] = [t * p / few for t in times["log domain"]]
    tight = gradient(lambda a: sinkhorn_loss(a, B, M, REG, RHO, tol=1e-11))
    slopes = {name: call() for name, call in candidates.items()}
    errors = {name: float((x - tight[: len(x)]).abs().max() / tight.abs().max()) for name, x in slopes.items()}
    over = {name: common.ratio(times, name, "mapuot")["median"] for name in candidates}
    return {"p": p, "points": POINTS, "steps": STEPS, "times": common.summaries(times), "over": over, "errors": errors}


def run(args: Any) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"skipped": "torch is not installed"}
    torch.set_num_threads(1)
    with common.blas_threads(1):
        data: dict[str, Any] = {"products": products(args, torch)}
    torch.set_num_threads(args.threads)
    with common.blas_threads(args.threads):
        return {**data, "batches": batches(args), "losses": losses(args, torch)}


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return f"skipped: {data['skipped']}"
    names = ("mapuot", "exact", "shifted", "broadcast")
    lines = ["log_matmul n^3, one thread: median ms; MiB beyond the answer", common.table(
        ["dtype, n", *names, "MiB", "MiB broadcast"],
        [[f"{r['dtype']} {r['n']}", *(1e3 * r["times"][k]["median"] if k in r["times"] else "-" for k in names),
          *(r.get("mib", {}).get(k, "-") for k in ("mapuot", "broadcast"))] for r in data["products"]])]  # fmt: skip
    lines += ["", "batches: median ms; worst relative plan error", common.table(
        ["p x m^2", "solve_batch", "solve", "POT", "POT / ours", "error", "POT's"],
        [[f"{r['p']} x {r['m']}^2", *(1e3 * r["times"][k]["median"] for k in ("mapuot", "solve", "POT")),
          r["over"]["POT"], r["errors"]["mapuot"], r["errors"]["POT"]] for r in data["batches"]])]  # fmt: skip
    loss = data["losses"]
    title = (
        f"loss and gradient, {loss['p']} problems of {loss['points']}^2, against {loss['steps']} iterations in torch"
    )
    lines += ["", title, common.table(
        ["", "ms", "times ours", "gradient error"],
        [[k, 1e3 * t["median"], loss["over"][k], loss["errors"][k]] for k, t in loss["times"].items()])]  # fmt: skip
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, columns=2) as axes:
        left, right = axes[0]
        for name in ("mapuot", "exact", "shifted", "broadcast"):
            rows = [r for r in data["products"] if name in r["times"] and r["dtype"] == "float64"]
            left.loglog([r["n"] for r in rows], [r["times"][name]["median"] for r in rows], "o-", label=name)
        left.set(xlabel="n of an n x n x n product, float64", ylabel="seconds")
        left.legend()
        loss = data["losses"]
        right.bar(list(loss["times"]), [loss["times"][k]["median"] for k in loss["times"]])
        right.set(yscale="log", ylabel="seconds, loss and gradient")
