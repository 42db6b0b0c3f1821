"""loss: value and gradient of a debiased loss of two clouds, and the cost of its self term, beside GeomLoss and others.

Clustered points in 3-D (hard.py) in units of the deviation of their coordinates; `SamplesLoss` by p = 2 at each blur
and reach, float64 points (GeomLoss and, on a GPU, flash-sinkhorn: float32, which they are made for). Errors of values
and gradients are relative to a solve to 1e-8, to 1e-6 of clouds above MATRIX_SIZE. GeomLoss and flash-sinkhorn take
their own number of iterations, by their scaling, and certify nothing. GeomLoss's "tensorized" form stores the matrix,
of up to MATRIX_SIZE points; its other forms need KeOps. "self" is the problem of the first cloud with itself, "cross"
the problem between both. For MANY pairs of uniform clouds at once the error is of all gradients together; beside it
stand our single calls and, on a GPU, a batched torch loop of the same error. Each row is printed as it is measured.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mapuot

from . import common, hard, peers
from .device import wall
from .hard import timed

NEEDS = ("torch",)
SIZES = (1_000, 5_000)
GPU_SIZES = (1_000, 5_000, 100_000)
CASES = tuple((blur, reach) for blur in (0.05, 0.01) for reach in (0.3, None))
TOLS = (1e-3, 1e-6)
MATRIX_SIZE = 20_000  # most points of the matrices of peers
EXACT = 1e-8
MOST_PASSES = 10_000
MANY = tuple(((256, n, d), (0.05, 0.5)) for n, d in ((64, 3), (100, 3), (256, 3), (256, 64)))  # pairs of clouds at once
SOME, MOST_ROUNDS = 8, 2048  # pairs timed one by one on a GPU; most rounds of a torch loop
SCALINGS = (0.5, 0.9)  # GeomLoss's and flash-sinkhorn's default, and smaller steps, which end nearer


def step(loss: Callable[[Any, Any], Any], x: Any, y: Any) -> tuple[float, Any]:
    """Return the value, of many clouds their sum, and its gradient for x."""
    at = x.clone().requires_grad_()
    value = loss(at, y.clone())  # a new tensor: no answer of a fixed target
    value.sum().backward()
    return float(value.detach().sum()), at.grad.double()


def losses(n: int, tols: list[float], gpu: bool, **known: Any) -> dict[str, tuple[Callable[[Any, Any], Any], bool]]:
    """Return each loss by name, and whether it is given float32 points."""
    from mapuot.torch import SamplesLoss

    known |= {"p": 2}
    found: dict[str, tuple[Any, bool]] = {
        f"mapuot {common.short(tol)}": (SamplesLoss(tol=tol, max_passes=MOST_PASSES, **known), False) for tol in tols
    }
    for scaling in SCALINGS:
        if importlib.util.find_spec("geomloss") and n <= MATRIX_SIZE:
            more = {"backend": "tensorized", "scaling": scaling}
            theirs = importlib.import_module("geomloss").SamplesLoss("sinkhorn", **known, **more)
            found[f"GeomLoss {scaling}"] = theirs, True
        if gpu and importlib.util.find_spec("flash_sinkhorn") and (scaling == SCALINGS[0] or n <= MATRIX_SIZE):
            more = {"half_cost": True, "debias": True, "allow_tf32": False, "autotune": False, "scaling": scaling}
            theirs = importlib.import_module("flash_sinkhorn").SamplesLoss(**known, **more)
            found[f"flash-sinkhorn {scaling}"] = theirs, True
    return found


def one_by_one(loss: Callable[[Any, Any], Any], x: Any, y: Any) -> tuple[float, Any]:
    """Return the same of one pair of clouds after the other; on a GPU of SOME."""
    few = SOME if x.is_cuda else len(x)
    found = [step(loss, *pair) for pair in zip(x[:few], y[:few], strict=True)]
    return sum(value for value, _ in found), importlib.import_module("torch").stack([slope for _, slope in found])


def measured(p: int, n: int, d: int, blur: float, reach: float | None, gpu: bool) -> dict[str, Any]:
    """Return seconds and errors of all losses, and of one pair of clouds seconds and passes of both kinds of term."""
    import torch

    from mapuot.torch import SamplesLoss

    rng = np.random.default_rng(0)
    kind = {"dtype": torch.float64, "device": "cuda" if gpu else "cpu"}
    known = {"blur": blur, "reach": reach}
    if p == 1:
        clouds = hard.pair(n, 0)
    else:
        clouds = tuple(np.sqrt(3 / d) * rng.random((p, n, d)) for _ in range(2))
    x, y = (torch.tensor(points, **kind) for points in clouds)
    exact = TOLS[-1] if n > MATRIX_SIZE else EXACT
    tols = list(TOLS)
    row: dict[str, Any] = {"p": p, "n": n, "d": d, **known, "exact": exact, "losses": {}, "terms": {}}
    value, slope = step(SamplesLoss(p=2, tol=exact, max_passes=MOST_PASSES, **known), x, y)
    factor = 1.0  # GeomLoss's slopes are so many times ours
    if reach is not None:
        factor = (reach**2 + blur**2 / 2) / (reach**2 + blur**2)
    calls = {}
    for name, (loss, single) in losses(n, tols, gpu, **known).items():
        if p > 1 and name.startswith("flash"):
            way = one_by_one
        else:
            way = step
        calls[name] = partial(way, loss, *(z.float() if single else z for z in (x, y))), factor if single else 1.0
    if p > 1:
        calls["one by one"] = partial(one_by_one, SamplesLoss(p=2, **known), x, y), 1.0
    for name, (call, times) in calls.items():
        try:
            taken, (found, gradient) = timed(call, gpu)
        except Exception as error:  # a peer without this case
            row["losses"][name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        right = slope[: len(gradient)]
        part = len(gradient) / len(slope)
        row["losses"][name] = {
            "seconds": taken / part, "value_error": abs(found / value - 1) if part == 1 else None,
            "slope_error": float((gradient / times - right).norm() / right.norm()),
        }  # fmt: skip
        if p > 1 and gpu and name.startswith("mapuot"):
            row["losses"][f"torch as {name}"] = torch_loop(x, y, slope, row["losses"][name]["slope_error"], **known)
    reg = blur**2
    reg_m = np.inf if reach is None else reach**2
    for name, other in (("self", x), ("cross", y)) if p == 1 else ():
        call = partial(mapuot.solve, mapuot.PointCloud(x, other, scale=0.5), reg=reg, reg_m=reg_m, tol=tols[-1])
        taken, result = timed(partial(call, max_passes=MOST_PASSES), gpu)
        told = {"passes": result.n_passes, "status": result.status, "bound": result.error_bound, "how": result.how}
        row["terms"][name] = {"seconds": taken, **told}
    print(*cells(row, list(row["losses"])), sep=", ", flush=True)
    return row


def torch_loop(x: Any, y: Any, tight: Any, error: float, blur: float, reach: float) -> dict[str, Any]:
    """Return the seconds that a batched torch loop on logarithms takes to a gradient of at most this error.

    Its gradient is by the plans, without a graph; the self terms take a quarter of the rounds, by averaged steps. The
    rounds are doubled until the error is reached; float32 is taken where it can reach it.
    """
    import torch

    eps = blur**2
    fi = reach**2 / (reach**2 + blur**2)

    def plan(x: Any, y: Any, rounds: int, alone: bool) -> Any:
        log_k = -(torch.cdist(x, y) ** 2) / (2 * eps)
        log_w = torch.full_like(x[:, :, 0], -float(np.log(x.shape[1])))
        f, g = peers.torch_logs(log_k, log_w, log_w, fi, rounds, alone)
        P = torch.exp(log_k + (f + log_w)[:, :, None] + (g + log_w)[:, None, :])
        return P.sum(2, keepdim=True) * x - P @ y

    def gradient(rounds: int, dtype: Any) -> Any:
        at = x.to(dtype)
        to = y.to(dtype)
        return (plan(at, to, rounds, False) - plan(at, at, max(rounds // 4, 8), True)).double()

    for dtype in (torch.float32, torch.float64):
        rounds, reached = 16, np.inf
        while rounds <= MOST_ROUNDS and reached > error:
            rounds *= 2
            reached = float((gradient(rounds, dtype) - tight).norm() / tight.norm())
        if reached <= error:
            taken = wall(lambda: gradient(rounds, dtype))  # noqa: B023 - called here
            return {"seconds": taken, "rounds": rounds, "dtype": str(dtype), "slope_error": reached}
    return {"failed": f"not in {MOST_ROUNDS} rounds"}


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    if args.size:
        sizes = (args.size,)
    elif args.quick:
        sizes = (300,)
    elif gpu:
        sizes = GPU_SIZES
    else:
        sizes = SIZES
    if args.quick:
        many = [((16, 32, 3), MANY[0][1])]
    elif args.size:
        many = []
    else:
        many = MANY
    cases = [*(((1, n, 3), case) for n in sizes for case in CASES), *many]
    return {"rows": [measured(*size, *case, gpu) for size, case in cases]}


def cells(row: dict[str, Any], names: list[str]) -> list[Any]:
    """Return a line of the table, of these losses."""
    if row["p"] == 1:
        points = row["n"]
    else:
        points = f"{row['p']} x {row['n']}, {row['d']}-D"
    line = [points, row["blur"], row["reach"] or "balanced", common.short(row["exact"])]
    for one in (row["losses"].get(name, {}) for name in names):
        cell = ""
        if "seconds" in one:
            cell = f"{1e3 * one['seconds']:.3g} ({one['slope_error']:.0e})"
        line.append(cell)
    if not row["terms"]:
        return [*line, "", ""]
    own = row["terms"]["self"]
    cross = row["terms"]["cross"]
    return [*line, f"{own['passes']} of {cross['passes']}", f"{own['seconds'] / cross['seconds']:.2g}"]


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return milliseconds of each loss with its gradient's error, and the cost of self terms relative to cross ones."""
    names = list(dict.fromkeys(name for row in data["rows"] for name in row["losses"]))
    head = ["points", "blur", "reach", "exact to", *(f"{name}: ms" for name in names), "self passes of cross", "time"]
    lines = [cells(row, names) for row in data["rows"]]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
