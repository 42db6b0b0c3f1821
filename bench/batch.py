"""batch: log-semiring products, many problems at once, and the gradient of the loss, against other libraries.

log_matmul against ``torch.logsumexp`` over the broadcast sum and against exponentials with row and column maxima by a
matrix product (right only while nothing underflows): time, and the peak of memory beyond the answer. Batches of
histograms on one cost against POT's function and `solve`, problem by problem, with the plan errors reached. Loss and
gradient at 100 points, 512 histograms, against autograd through 100 torch iterations, on logarithms and by matrix
products in the scaling form. Divergences between all pairs of clouds, against POT's solves of some of them. On a CPU
log_matmul runs on one thread, in float64 and float32, the rest in float64.

With --device gpu (device events; float32): instead of POT, passes of 1024 problems of 128 x 128 (translation, Anderson
and an error estimate in float32, or the certificate in float64) against torch.bmm's unbalanced iteration, which does
none of it, plain and as a CUDA graph, and a solve to a certified 1e-6 against as many iterations of torch's as bring
the plan within 1e-5.
"""

import dataclasses
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import mapuot

from . import common, device, peers

NEEDS = ("torch",)
SIZES = (64, 128, 256, 512)
BROADCAST = 256  # the largest n of a broadcast
SECONDS = 2.0
GPU_SIZES = (64, 128, 256, 512, 1024, 2048)
GPU_BROADCAST = 512
ERRORS = {"float64": 1e-13, "float32": 2e-5}  # of log_matmul, absolute
REG, RHO, POINTS, BATCH, STEPS = 0.05, 1.0, 100, 512, 100
PROBLEMS, SIZE = 1024, 128
SAMPLE = 8  # pairs of clouds that POT solves
CLOSE = 1e-5  # plan error that torch's iterations are counted to: float32 does not reach ours
FIRST, LAST = 4, 20  # passes: their difference leaves the launch and the making of K out

Calls = dict[str, Callable[[], Any]]


def clouds(p: int, m: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(M, A, B): squared distances of two clouds, max 1, and p pairs of histograms of masses about 1 and 1.3."""
    rng = np.random.default_rng(seed)
    x = rng.random((m, 2))
    y = rng.random((m, 2))
    M = ((x[:, None] - y) ** 2).sum(2)
    A = rng.random((p, m)) + 0.1
    B = rng.random((p, m)) + 0.1
    return M / M.max(), A / A.sum(1, keepdims=True), 1.3 * B / B.sum(1, keepdims=True)


def timed(calls: Calls, gpu: bool) -> dict[str, float]:
    """Return the median seconds of each call, in turns, on the device or on the host."""
    if gpu:
        return {name: device.elapsed(call, 7, count=20) for name, call in calls.items()}
    return {name: float(np.median(times)) for name, times in common.interleave(calls, SECONDS).items()}


# ---- products


def product(dtype: str, p: int, n: int, gpu: bool) -> dict[str, Any]:
    torch = import_module("torch")
    A, B = np.random.default_rng(0).normal(size=(2, p, n, n)).astype(dtype)
    if gpu:
        A, B = map(import_module("cupy").asarray, (A, B))
    a = torch.from_dlpack(A)
    b = torch.from_dlpack(B)
    if gpu:
        options = {}
    else:
        options = {"threads": 1}

    def shifted() -> Any:
        r = a.amax(2, keepdim=True)
        c = b.amax(1, keepdim=True)
        return torch.log(torch.exp(a - r) @ torch.exp(b - c)) + r + c

    calls: Calls = {
        "mapuot": lambda: mapuot.log_matmul(A, B, **options),
        "exact": lambda: mapuot.log_matmul(A, B, exact=True, **options),
        "shifted": shifted,
        "broadcast": lambda: torch.logsumexp(a[:, :, :, None] + b[:, None], 2),
    }
    if p * n**3 > (GPU_BROADCAST if gpu else BROADCAST) ** 3:
        del calls["broadcast"]
    right = torch.logsumexp(a[0, :64, :, None].double() + b[0, None].double(), 1)
    for name, call in calls.items():
        error = float((torch.from_dlpack(call())[0, :64].double() - right).abs().max())
        assert error < ERRORS[dtype], (name, n, error)
    row: dict[str, Any] = {"dtype": dtype, "p": p, "n": n, "times": timed(calls, gpu)}
    if gpu:
        row["mib"] = {name: device.peak(call) - A.nbytes / 2**20 for name, call in calls.items()}
    elif dtype == "float64" and n <= BROADCAST:
        row["mib"] = {kind: common.alone(f"batch.memory({n}, {kind!r})") for kind in ("mapuot", "broadcast")}
    return row


def memory(n: int, kind: str) -> float:
    """Return the MiB that one product takes beyond its answer, in a process of its own."""
    torch = import_module("torch")
    A, B = np.random.default_rng(0).normal(size=(2, n, n))
    a = torch.from_numpy(A)
    b = torch.from_numpy(B)
    mapuot.log_matmul(A[:8, :8], B[:8, :8], threads=2)
    torch.logsumexp(torch.zeros(8, 8, 8), 1)
    before = common.forget_peak()
    if kind == "mapuot":
        out = mapuot.log_matmul(A, B)
    else:
        out = torch.logsumexp(a[:, :, None] + b[None], 1)
    return max(common.status("VmHWM") - before - out.nbytes, 0.0) / 2**20


# ---- batches


def batch(p: int, m: int, threads: int) -> dict[str, Any]:
    """Times and the worst plan errors; POT (its default stop) and single solves run on 16 problems and are scaled."""
    M, A, B = clouds(p, m)
    count = min(p, 16)
    calls: Calls = {
        "mapuot": lambda: mapuot.solve_batch(M, A, B, reg=REG, reg_m=RHO, threads=threads),
        "solve": lambda: [mapuot.solve(M, A[i], B[i], reg=REG, reg_m=RHO, threads=threads) for i in range(count)],
        "POT": lambda: [peers.pot((M, A[i], B[i], REG, RHO), None) for i in range(count)],
    }
    times = {name: t * (1.0 if name == "mapuot" else p / count) for name, t in timed(calls, False).items()}
    exact = mapuot.solve_batch(M, A[:count], B[:count], reg=REG, reg_m=RHO, tol=1e-11)
    found = calls["mapuot"]()
    plans = {"mapuot": [found[i].plan for i in range(count)], "POT": calls["POT"]()}
    errors = {
        name: max(np.abs(P - exact[i].plan).sum() / exact.mass[i] for i, P in enumerate(made))
        for name, made in plans.items()
    }
    return {"p": p, "n": m, "times": times, "errors": errors}


def gpu_batch(own: bool) -> dict[str, Any]:
    """Time a pass and a solve of many problems against torch's iteration; ``own``: a cost for each problem."""
    cp = import_module("cupy")
    M, A, B = (cp.asarray(x, dtype=np.float32) for x in clouds(PROBLEMS, SIZE))
    if own:
        M = M * cp.linspace(0.5, 1, PROBLEMS, dtype=np.float32)[:, None, None]

    def solve(tol: float = 1e-6) -> Any:
        return mapuot.solve_batch(M, A, B, reg=REG, reg_m=RHO, tol=tol)

    result = solve()
    tight = solve(1e-10)
    needed = 0
    theirs = np.inf
    error = plan_error(lambda i: result[i].plan, tight)
    assert result.converged.all()
    assert error < 2e-6, error  # the plans are formed in float32
    iterate, plan = torch_problem(M, A, B)
    while theirs > CLOSE and needed < 1000:
        iterate(10)
        needed = needed + 10
        theirs = plan_error(plan, tight)
    graph = device.elapsed(device.in_a_graph(lambda: iterate(10)), 7) / 10
    return {
        "p": PROBLEMS, "n": SIZE, "own": own, "passes": float(result.n_passes.mean()), "error": error,
        "pass": seconds_a_pass(M, A, B, "mixed"), "float64 pass": seconds_a_pass(M, A, B, "float64"),
        "torch": device.elapsed(lambda: iterate(10), 7) / 10, "torch graph": graph, "solve": device.elapsed(solve, 7),
        "torch iterations": needed, "torch error": theirs, "torch solve": needed * graph,
    }  # fmt: skip


def seconds_a_pass(M: Any, A: Any, B: Any, precision: str) -> float:
    """Return the seconds of a pass of the whole batch, translation, extrapolation and certificate included."""
    from mapuot.backends.cuda import backend as cuda
    from mapuot.problem.problem import BatchProblem
    from mapuot.route.options import make_options

    task = BatchProblem.from_arrays(M, A, B, REG, RHO, "kl", "product", cuda)
    options = dataclasses.replace(make_options("auto", precision, 1e-6, None, None), tol=-1.0)
    workspace = cuda.batches().workspace(task, options, None)
    narrow = precision == "mixed"
    record = workspace.record(options, REG)
    record["limits"]["narrow_floor"] = -1.0

    def passes(count: int) -> None:
        workspace.arrays["report"].fill(0)
        workspace.x.fill(0)
        record["count"] = count + narrow
        workspace.launch(record, narrow)

    first, last = (device.elapsed(lambda count=count: passes(count), 7, count=20) for count in (FIRST, LAST))
    workspace.read()
    assert (workspace.stats["passes"] == LAST).all()
    return (last - first) / (LAST - FIRST)


def torch_problem(M: Any, A: Any, B: Any) -> tuple[Any, Any]:
    """(iterate(k), plan(i)) in torch, float32, from u = v = 1."""
    torch = import_module("torch")
    M, a, b = (torch.from_dlpack(x) for x in (M, A, B))
    K = torch.exp(-M / REG)
    u = torch.ones_like(a)
    v = torch.ones_like(b)

    def iterate(count: int) -> None:
        for x, new in zip((u, v), peers.torch_scalings(K, a, b, RHO / (RHO + REG), count, u, v), strict=True):
            x.copy_(new)

    def plan(i: int) -> Any:
        return (a * u)[i, :, None] * (K[i] if K.ndim == 3 else K) * (b * v)[i]

    return iterate, plan


def plan_error(plan: Any, tight: Any) -> float:
    """Return the largest error of some problems' plans, relative to the mass."""
    cp = import_module("cupy")
    some = range(0, PROBLEMS, 64)
    return max(float(abs(cp.from_dlpack(plan(i)) - tight[i].plan).sum()) / tight.mass[i] for i in some)


# ---- loss and gradient


def unrolled(torch: Any, a: Any, b: Any, M: Any) -> Any:
    """The loss by autograd: plain unbalanced iterations on logarithms, then the dual value."""
    log_a = torch.log(a)
    log_b = torch.log(b)
    f, g = peers.torch_logs(-M / REG, log_a, log_b, RHO / (RHO + REG), STEPS)
    mass = torch.exp(-M / REG + (f + log_a)[:, :, None] + (g + log_b)[:, None, :]).sum((1, 2))
    return dual(torch, a, b, torch.exp(f), torch.exp(g), mass)


def shared_steps(torch: Any, a: Any, b: Any, M: Any) -> Any:
    """Make the loss by matrix products in the scaling form: the quickest that torch can do; right at this reg only."""
    K = torch.exp(-M / REG)
    u, v = peers.torch_scalings(K, a, b, RHO / (RHO + REG), STEPS, torch.ones_like(a), torch.ones_like(b))
    return dual(torch, a, b, u, v, (((u * a) @ K) * v * b).sum(1))


def dual(torch: Any, a: Any, b: Any, u: Any, v: Any, mass: Any) -> Any:
    sides = [RHO * (t * (1 - x ** (-REG / RHO))).sum(1) for t, x in ((a, u), (b, v))]
    return sides[0] + sides[1] + REG * (a.sum(1) * b.sum(1) - mass)


def histograms_loss(p: int, threads: int, gpu: bool) -> dict[str, Any]:
    """Time value and gradient by a; on a CPU the log-domain graph, 20 GiB for all, is timed on some and scaled."""
    from mapuot.torch import sinkhorn_loss

    torch = import_module("torch")
    if gpu:
        kind = {"dtype": torch.float32, "device": "cuda"}
    else:
        kind = {"dtype": torch.float64}
    M, A, B = (torch.tensor(x, **kind) for x in clouds(p, POINTS))
    if gpu:
        few = p
        options = {}
    else:
        few = max(p // 16, 1)
        options = {"threads": threads}

    def gradient(value: Any, count: int = p) -> Any:
        a = A[:count].clone().requires_grad_()
        value(a).sum().backward()
        return a.grad

    def ours(tol: float = 1e-6) -> Any:
        return gradient(lambda a: sinkhorn_loss(M, a, B, reg=REG, reg_m=RHO, tol=tol, **options))

    calls: Calls = {
        "mapuot": ours,
        "log domain": lambda: gradient(lambda a: unrolled(torch, a, B[:few], M), few),
        "products": lambda: gradient(lambda a: shared_steps(torch, a, B, M)),
    }
    times = timed(calls, gpu)
    times["log domain"] *= p / few
    tight = ours(1e-11)
    slopes = {name: call() for name, call in calls.items()}
    errors = {name: float((x - tight[: len(x)]).abs().max() / tight.abs().max()) for name, x in slopes.items()}
    assert errors["mapuot"] < 1e-5, errors
    row = {"p": p, "points": POINTS, "steps": STEPS, "times": times, "errors": errors}
    if gpu:
        row["mib"] = {name: device.peak(call) for name, call in calls.items()}
    return row


# ---- all pairs of clouds


def all_pairs(k: int, threads: int | None) -> dict[str, Any]:
    """Time all divergences between k clouds of 200 to 800 points, and POT's solves of some pairs for all of them.

    Omit ``threads`` on a GPU; POT's matrices are moved there.
    """
    if find_spec("ot"):
        ot = import_module("ot")
    else:
        ot = None
    rng = np.random.default_rng(0)
    points = [rng.random((size, 3)) + 0.3 * rng.random(3) for size in rng.integers(200, 801, k)]
    reg = 0.05**2
    pairs = [rng.choice(k, 2, replace=False) for _ in range(SAMPLE)]
    if threads:
        options: dict[str, Any] = {"threads": threads}
    else:
        options = {"backend": "cuda"}

    def theirs() -> None:
        for i, j in pairs:
            a = ot.unif(len(points[i]))
            b = ot.unif(len(points[j]))
            M = ot.dist(points[i], points[j])
            if not threads:
                a, b, M = (import_module("torch").tensor(z, device="cuda") for z in (a, b, M))
            ot.unbalanced.sinkhorn_stabilized_unbalanced(a, b, M, reg, 1.0, stopThr=1e-6)

    def ours() -> Any:
        return mapuot.pairwise(points, reg=reg, reg_m=1.0, **options)

    count = k * (k - 1) // 2
    if threads:
        seconds = common.sample(ours)
    else:
        seconds = device.wall(ours)
    row = {"clouds": k, "mapuot": seconds, "pairs": count}
    if ot is None:
        return row
    if threads:
        taken = common.sample(theirs)
    else:
        taken = device.wall(theirs)
    return row | {"POT": taken * (count + k) / SAMPLE}


# ---- the part


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    torch = import_module("torch")
    if gpu:
        sizes = GPU_SIZES
    else:
        sizes = SIZES
    if args.quick:
        sizes = sizes[:2]
        n_clouds = 10
        n_losses = 8
        shapes = ((16, 50),)
    else:
        n_clouds = 200
        n_losses = BATCH
        shapes = (16, 50), (64, 100), (64, 400), (512, 100)
    cases = [(dtype, 1, n) for dtype in ("float64", "float32") for n in sizes]
    cases += [(dtype, 512, 128) for dtype in ("float64", "float32") if gpu]
    torch.set_num_threads(1)
    with common.blas_threads(1):
        data: dict[str, Any] = {"products": [product(*case, gpu) for case in cases]}
    torch.set_num_threads(args.threads)
    with common.blas_threads(args.threads):
        if gpu:
            data["batches"] = [gpu_batch(own) for own in (True, False)]
            data["pairs"] = all_pairs(n_clouds, None)
        else:
            data["batches"] = [batch(*x, args.threads) for x in shapes]
            data["pairs"] = all_pairs(n_clouds, args.threads)
        data["losses"] = histograms_loss(n_losses, args.threads, gpu)
    return data


def tables(data: dict[str, Any]) -> str:
    ways = "mapuot", "exact", "shifted", "broadcast"
    loss = data["losses"]
    products = [
        [f"{r['dtype']} {r['p']} x {r['n']}^3", *(1e6 * r["times"][k] if k in r["times"] else "" for k in ways),
         *(r.get("mib", {}).get(k, "") for k in ways)] for r in data["products"]
    ]  # fmt: skip
    head = ["log_matmul", *(f"{k}, us" for k in ways), *(f"{k}, MiB" for k in ways)]
    text = [f"{common.machine_line(data)}, medians:", common.table(head, products)]
    if common.on_gpu(data):
        keys = ("pass", "float64 pass", "torch", "torch graph")
        rows = [
            [f"{r['p']} x {r['n']}^2 {'own' if r['own'] else 'one'} M", *(1e6 * r[k] for k in keys), 1e3 * r["solve"],
             r["passes"], r["error"], r["torch iterations"], r["torch error"], 1e3 * r["torch solve"]]
            for r in data["batches"]
        ]  # fmt: skip
        head = ["batch", *(f"{k}, us" for k in keys), "solve to 1e-6, ms", "passes", "error", "iterations of torch"]
        text.append(common.table([*head, "their error", "in a graph, ms"], rows))
    else:
        keys = ("mapuot", "solve", "POT")
        rows = [[f"{r['p']} x {r['n']}^2", *(1e3 * r["times"][k] for k in keys),
                 *(f"{r['errors'][k]:.1e}" for k in ("mapuot", "POT"))] for r in data["batches"]]  # fmt: skip
        text.append(common.table(["batch", *(f"{k}, ms" for k in keys), "error", "POT's"], rows))
    if "pairs" in data:
        r = data["pairs"]
        head = [f"all {r['pairs']} pairs of {r['clouds']} clouds", "mapuot, s", "POT, by some pairs, s"]
        text.append(common.table(head, [["200 to 800 points, d = 3", r["mapuot"], r.get("POT", "")]]))
    rows = [[k, 1e3 * t, t / loss["times"]["mapuot"], f"{loss['errors'][k]:.1e}", loss.get("mib", {}).get(k, "")]
            for k, t in loss["times"].items()]  # fmt: skip
    title = f"loss and gradient, {loss['p']} x {loss['points']}^2, {loss['steps']} iterations of torch"
    return common.text_of(*text, common.table([title, "ms", "times ours", "gradient error", "MiB"], rows))
