"""drift: batches as a training step and as a screen, on a CPU or a GPU.

A drift step moves generated points towards data and away from each other, as one-step generators do: G groups of N
points, M data points for each, four temperatures, plan times points less the plan of the points with themselves. It is
certified to 1e-3, beside 20 float32 iterations of torch for each temperature.

A screen compares all pairs of groups of cells in 50 dimensions: balanced, debiased, reg .05 of the standard deviation
of each pair's costs, certified to 1e-3. Beside it are padded batches in torch as screens of perturbations run them
(float32, stored costs, until potentials change by less than 1e-4 of reg), and a torch loop over the pairs with smaller
changes, until its error is no larger than ours. Errors are against tol 1e-8 on some of the pairs. Peers are timed on
these pairs, and the time of all pairs follows from their number.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot
from mapuot import groups

from . import common

NEEDS = ("torch",)
TOL = 1e-3
EXACT = 1e-8
ITERATIONS = 20
TEMPERATURES = (0.05, 0.1, 0.2, 0.5)  # of the mean squared distance
SHARE = 0.05  # reg of a screen, of the standard deviation of the costs
TOGETHER = 50  # pairs of one padded batch in torch: 200 MB of costs at 1000 x 1000
LOOPED = 20  # pairs of the loop in torch
MOST = 5000  # iterations in torch
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
    x = here(rng.normal(size=(groups, n, d)), args)
    y = here(rng.normal(size=(groups, m, d)) + 1, args)
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


class Balanced:
    """Balanced problems with padded costs (q, m, n) in torch, q = 1 for a loop over pairs.

    f_i = -log sum_j exp(g_j - M_ij / reg) / n_j and the same for g, in units of reg, until the largest change of f in
    an iteration is below ``change``; it is read in every tenth iteration, because a read waits for the GPU.
    """

    def __init__(self, x: Any, y: Any, counts: Any, regs: Any) -> None:
        import torch

        self.logs = torch.cdist(x, y).square_() / -regs[:, None, None]
        self.weights = [
            torch.where(torch.arange(z.shape[1], device=z.device) < k[:, None], -k[:, None].log(), -torch.inf)
            for z, k in zip((x, y), counts, strict=True)
        ]
        self.regs = regs

    def values(self, change: float) -> Any:
        """Return the values (q,) when all problems have ended, or after MOST iterations."""
        import torch

        rows, cols = self.weights
        g = torch.zeros_like(cols)
        f = torch.zeros_like(rows)
        for k in range(MOST):
            before = f
            f = -torch.logsumexp(self.logs + (g + cols)[:, None], 2)
            g = -torch.logsumexp(self.logs + (f + rows)[:, :, None], 1)
            if k % 10 == 9 and float(torch.where(rows > -torch.inf, f - before, 0.0).abs().max()) < change:
                break
        sums = [torch.where(w > -torch.inf, w.exp() * z, 0.0).sum(1) for w, z in ((rows, f), (cols, g))]
        return self.regs * (sums[0] + sums[1])


def torch_divergences(clouds: list[Any], pairs: Any, change: float, together: int, dtype: str) -> Any:
    """Return the debiased values of pairs of clouds, so many pairs in one padded batch."""
    import torch

    number = getattr(torch, dtype)
    found = []
    for part in np.array_split(pairs, -(-len(pairs) // together)):
        sides = [[clouds[k].to(number) for k in part[:, side].tolist()] for side in (0, 1)]
        counts = [torch.tensor([len(z) for z in side], dtype=number, device=clouds[0].device) for side in sides]
        regs = torch.stack([SHARE * (torch.cdist(x, y) ** 2).std(correction=0) for x, y in zip(*sides, strict=True)])
        x, y = (torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in sides)
        both = Balanced(x, y, counts, regs).values(change)
        selves = [Balanced(z, z, (k, k), regs).values(change) for z, k in ((x, counts[0]), (y, counts[1]))]
        found.append(both - 0.5 * (selves[0] + selves[1]))
    return torch.cat(found).double().cpu().numpy()


def exact_divergences(clouds: list[Any], pairs: Any, given: dict[str, Any]) -> Any:
    """Return the divergences of pairs to tol 1e-8, by the CPU."""
    cells = np.concatenate([np.asarray(z.cpu(), np.float64) for z in clouds])
    label = np.repeat(np.arange(len(clouds)), [len(z) for z in clouds])
    task = groups.contrasts(cells, label, pairs.tolist(), tol=EXACT, tol_gap=EXACT, backend="cpu", **given)
    return task.divergence.to_numpy()


def screen_rows(args: Any) -> list[dict[str, Any]]:
    count, least, most, d, some = sizes_of(args)["screen"]
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(least, most + 1, count)
    clouds = [here(rng.normal(size=(k, d)) + rng.normal(size=d) * rng.random(), args) for k in sizes]
    given = {"reg": SHARE, "reg_m": np.inf, "scale_cost": "std", "scale_each": True}
    pairs = np.stack(np.triu_indices(count, 1), 1)
    chosen = pairs[np.random.default_rng(1).permutation(len(pairs))[:some]]
    chosen = chosen[np.argsort(-sizes[chosen].prod(1), kind="stable")]  # like sizes together, in padded batches
    exact = exact_divergences(clouds, chosen, given)

    def row(name: str, found: Any, seconds: float, of: int) -> dict[str, Any]:
        errors = np.abs(found - exact[: len(found)]) / np.abs(exact[: len(found)])
        seconds *= len(pairs) / of
        return {"name": name, "pairs": len(pairs), "seconds": seconds, "error": float(errors.max()), "timed": of}

    mapuot.pairwise(clouds[:3], tol=TOL, standard_error=True, **given)  # compiles
    (table, errors), whole = timed(lambda: mapuot.pairwise(clouds, tol=TOL, standard_error=True, **given), args)
    table, errors = (np.asarray(z.cpu() if hasattr(z, "cpu") else z) for z in (table, errors))
    rows = [row("mapuot", table[tuple(chosen.T)], whole, len(pairs))]
    rows[0]["standard_error"] = float(np.median(errors[tuple(pairs.T)] / table[tuple(pairs.T)]))

    def theirs(name: str, which: Any, *how: Any) -> None:
        found, seconds = timed(lambda: torch_divergences(clouds, which, *how), args)
        rows.append(row(name, found, seconds, len(which)))

    torch_divergences(clouds, chosen[:2], 1e-2, 1, "float32")  # loads its kernels
    theirs("torch, batches, float32, change 1e-4", chosen, 1e-4, TOGETHER, "float32")
    part = chosen[:: max(1, len(chosen) // LOOPED)]
    exact = exact[:: max(1, len(chosen) // LOOPED)]
    for dtype, change in (("float32", 1e-4), ("float64", 1e-4), ("float64", 1e-5), ("float64", 1e-6)):
        theirs(f"torch, a loop, {dtype}, change {change:.0e}", part, change, 1, dtype)
        if rows[-1]["error"] <= rows[0]["error"]:
            break
    return rows


def run(args: Any) -> dict[str, Any]:
    return {"drift": drift_rows(args), "screen": screen_rows(args)}


def tables(data: dict[str, Any]) -> str:
    drift = [[row["name"], common.three(1e3 * row["seconds"]), common.short(row["error"])] for row in data["drift"]]
    screen = [
        [row["name"], row["pairs"], row["timed"], common.three(row["seconds"]), common.short(row["error"])]
        for row in data["screen"]
    ]
    return common.text_of(
        f"{common.machine_line(data)}:", common.table(["drift step", "ms", "relative error"], drift),
        common.table(["screen", "pairs", "timed", "s", "largest relative error"], screen),
    )  # fmt: skip
