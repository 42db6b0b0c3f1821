"""drift: batches as a training step and as a screen, on a CPU or a GPU.

A drift step moves generated points towards data and away from each other, as one-step generators do: G groups of N
points, M data points for each, four temperatures, plan times points less the plan of the points with themselves. It is
certified to 1e-3, beside 20 float32 iterations of torch for each temperature.

A screen compares all pairs of groups of cells in 50 dimensions: balanced, debiased, reg .05 of the standard deviation
of each pair's costs, certified to 1e-3, beside a torch loop over the pairs (float32, stored costs, until potentials
change by less than 1e-4 of reg, as screens of perturbations run). Errors are against tol 1e-8 on some of the pairs.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot

from . import common

NEEDS = ("torch",)
TOL = 1e-3
EXACT = 1e-8
ITERATIONS = 20
TEMPERATURES = (0.05, 0.1, 0.2, 0.5)  # of the mean squared distance
MOST = 2000  # iterations of a torch pair
SEED = 0


def sizes_of(args: Any) -> dict[str, Any]:
    if args.quick:
        return {"drift": (8, 16, 64, 2), "screen": (8, 20, 60, 10, 6)}
    return {"drift": (128, 64, 512, 2), "screen": (200, 50, 1000, 50, 100)}


def here(x: Any, args: Any) -> Any:
    """Return an array as a tensor of the device."""
    import torch

    return torch.as_tensor(x, dtype=torch.float32, device="cuda" if args.device == "gpu" else "cpu")


def timed(call: Callable[[], Any], args: Any) -> tuple[Any, float]:
    """Return the answer of a call, and the seconds until the device has done its work."""
    import torch

    begin = time.perf_counter()
    found = call()
    if args.device == "gpu":
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


# ---- the drift step


def our_drift(x: Any, y: Any, regs: list[float], tol: float) -> Any:
    """Return the sum of the drifts over the temperatures, (G, N, d); all problems of a kind are one batch."""
    groups = len(x)
    total = 0.0
    for points, sign in ((y, 1.0), (x, -1.0)):
        rows, columns = (z.repeat(len(regs), 1, 1) for z in (x, points))
        cloud = mapuot.PointCloud(rows, columns)
        masses = rows.new_full(rows.shape[:2], 1 / rows.shape[1])  # a tensor, so that answers are tensors
        batch = mapuot.solve_batch(cloud, masses, reg=np.repeat(regs, groups), reg_m=np.inf, tol=tol)
        assert bool(batch.converged.all())
        images = batch.barycentric_map(columns)
        total = total + sign * images.reshape(len(regs), *x.shape).sum(0)
    return total


def torch_drift(x: Any, y: Any, regs: list[float]) -> Any:
    """Return the same after ITERATIONS balanced iterations on logarithms in float32."""
    import torch

    total = 0.0
    for points, sign in ((y, 1.0), (x, -1.0)):
        costs = torch.cdist(x, points) ** 2
        for reg in regs:
            logs = costs / -reg
            f = torch.zeros_like(logs[:, :, 0])
            g = torch.zeros_like(logs[:, 0])
            for _ in range(ITERATIONS):
                f = -torch.logsumexp(logs + g[:, None], 2)
                g = -torch.logsumexp(logs + f[:, :, None], 1)
            plan = torch.softmax(logs + g[:, None], 2)
            total = total + sign * (plan @ points)
    return total


def drift_rows(args: Any) -> list[dict[str, Any]]:
    groups, n, m, d = sizes_of(args)["drift"]
    rng = np.random.default_rng(SEED)
    x, y = here(rng.normal(size=(groups, n, d)), args), here(rng.normal(size=(groups, m, d)) + 1, args)
    regs = [share * float(((x[0, :, None] - y[0]) ** 2).sum(-1).mean()) for share in TEMPERATURES]
    exact = our_drift(x.double(), y.double(), regs, EXACT)
    calls = {"mapuot": lambda: our_drift(x, y, regs, TOL), "torch": lambda: torch_drift(x, y, regs)}
    rows = []
    for name, call in calls.items():
        timed(call, args)  # compiles
        times = [timed(call, args) for _ in range(3 if args.quick else 20)]
        error = float((times[-1][0].double() - exact).norm() / exact.norm())
        rows.append({"name": name, "seconds": float(np.median([t for _, t in times])), "error": error})
    return rows


# ---- the screen


def torch_value(x: Any, y: Any, share: float, same: bool = False) -> tuple[float, float]:
    """Return a balanced value of two clouds after torch's iterations, and its reg."""
    import torch

    costs = torch.cdist(x, y) ** 2
    reg = share * float(costs.std())
    return value_of(costs, reg), reg


def value_of(costs: Any, reg: float) -> float:
    import torch

    logs = costs / -reg
    f = torch.zeros_like(logs[:, 0])
    g = torch.zeros_like(logs[0])
    log_m, log_n = float(np.log(len(f))), float(np.log(len(g)))
    for _ in range(MOST):
        before = f
        f = -torch.logsumexp(logs + g - log_n, 1)
        g = -torch.logsumexp(logs + f[:, None] - log_m, 0)
        if float((f - before).abs().max()) < 1e-4:
            break
    return reg * float(f.mean() + g.mean())


def torch_pair(x: Any, y: Any, share: float) -> float:
    import torch

    value, reg = torch_value(x, y, share)
    return value - 0.5 * sum(value_of(torch.cdist(z, z) ** 2, reg) for z in (x, y))


def screen_rows(args: Any) -> list[dict[str, Any]]:
    count, least, most, d, some = sizes_of(args)["screen"]
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(least, most + 1, count)
    clouds = [here(rng.normal(size=(k, d)) + rng.normal(size=d) * rng.random(), args) for k in sizes]
    given = {"reg": 0.05, "reg_m": np.inf, "scale_cost": "std", "scale_each": True}
    pairs = np.stack(np.triu_indices(count, 1), 1)
    chosen = pairs[np.random.default_rng(1).permutation(len(pairs))[:some]]
    exact = [exact_pair(clouds[i], clouds[j], given) for i, j in chosen.tolist()]
    mapuot.pairwise(clouds[:3], tol=TOL, **given)  # compiles
    (table, errors), whole = timed(lambda: mapuot.pairwise(clouds, tol=TOL, standard_error=True, **given), args)
    table, errors = (np.asarray(z.cpu() if hasattr(z, "cpu") else z) for z in (table, errors))
    theirs, part = timed(lambda: [torch_pair(clouds[i], clouds[j], 0.05) for i, j in chosen.tolist()], args)
    apart = [np.abs(z - np.array(exact)) / np.abs(exact) for z in (table[tuple(chosen.T)], np.array(theirs))]
    return [
        {"name": "mapuot", "seconds": whole, "pairs": len(pairs), "error": float(apart[0].max()),
         "standard_error": float(np.median(errors[tuple(pairs.T)] / table[tuple(pairs.T)]))},
        {"name": "torch", "seconds": part * len(pairs) / len(chosen), "pairs": len(pairs),
         "error": float(apart[1].max()), "timed": len(chosen)},
    ]  # fmt: skip


def exact_pair(x: Any, y: Any, given: dict[str, Any]) -> float:
    """Return the divergence of one pair to tol 1e-8, in the unit of its costs, by the CPU."""
    x, y = (np.asarray(z.cpu(), np.float64) for z in (x, y))
    found = mapuot.pairwise([x, y], tol=EXACT, tol_gap=EXACT, **given)
    return float(found[0, 1])


def run(args: Any) -> dict[str, Any]:
    return {"drift": drift_rows(args), "screen": screen_rows(args)}


def tables(data: dict[str, Any]) -> str:
    drift = [[row["name"], common.three(1e3 * row["seconds"]), common.short(row["error"])] for row in data["drift"]]
    screen = [
        [row["name"], row["pairs"], common.three(row["seconds"]), common.short(row["error"])] for row in data["screen"]
    ]
    return common.text_of(
        f"{common.machine_line(data)}:", common.table(["drift step", "ms", "relative error"], drift),
        common.table(["screen", "pairs", "s", "largest relative error"], screen),
    )  # fmt: skip
