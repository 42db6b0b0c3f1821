"""drift: batches as a training step and as a screen, and pairs drawn within jax.jit, on a CPU or a GPU.

A drift step moves generated points towards data and away from each other, as one-step generators do: G groups of N
points, M data points for each, four temperatures, plan times points less the plan of the points with themselves. It is
certified to 1e-3, beside 20 float32 iterations of torch for each temperature.

A screen compares all pairs of groups of cells in 50 dimensions: balanced, debiased, reg .05 of the standard deviation
of each pair's costs, certified to 1e-3. Beside it are padded batches in torch as screens of perturbations run them
(float32, stored costs, until potentials change by less than 1e-4 of reg), and a torch loop over the pairs with smaller
changes, until its error is no larger than ours. Errors are against tol 1e-8 on some of the pairs. Peers are timed on
these pairs, and the time of all pairs follows from their number.

A match draws n pairs from the plan between n and n points in the plane, within jax.jit: `mapuot.jax.match` to tol 1e-2
beside iterations on logarithms in float32 as OTT makes them, until the marginals of the rows miss less than 1e-2, and
pairs drawn from the plan in memory. Errors are distances of the plans from one certified to 1e-8, over its mass.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
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
MOST = 5000  # iterations of a peer
MATCH_TOL = 1e-2
PENALTIES = {"soft": 1.0, "balanced": np.inf}  # reg_m of a match, in units of the mean squared distance
SEED = 0


def sizes_of(args: Any) -> dict[str, Any]:
    if args.quick:
        return {"drift": (8, 16, 64, 2), "screen": (8, 20, 60, 10, 6), "match": (64,)}
    return {"drift": (128, 64, 512, 2), "screen": (200, 50, 1000, 50, 100), "match": (256, 1024, 4096)}


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


# ---- pairs within jax.jit


def jax_plan(x: Any, y: Any, reg: float, reg_m: float) -> Any:
    """Return the plan of iterations on logarithms, with a test in every tenth, and how many were made."""
    import jax
    import jax.numpy as jnp

    n = len(x)
    if np.isinf(reg_m):
        fi = 1.0
    else:
        fi = reg_m / (reg_m + reg)
    logs = ((x[:, None] - y[None]) ** 2).sum(-1) / -reg - 2 * np.log(n)

    def iterate(f: Any, g: Any) -> tuple[Any, Any]:
        f = -fi * (jax.nn.logsumexp(logs + g[None], 1) + np.log(n))
        return f, -fi * (jax.nn.logsumexp(logs + f[:, None], 0) + np.log(n))

    def ten(state: Any) -> Any:
        f, g, _, made = state
        for _ in range(9):
            f, g = iterate(f, g)
        new, g = iterate(f, g)
        # the rows have e^(f - new / fi) / n, and their penalty asks for e^(-k f) / n, k = 1 / fi - 1
        missed = jnp.abs(jnp.exp(f - new / fi) - jnp.exp(f * (1 - 1 / fi))).sum() / n
        return new, g, missed, made + 10

    zeros = jnp.zeros(n, x.dtype)
    f, g, _, made = jax.lax.while_loop(
        lambda state: (state[2] > MATCH_TOL) & (state[3] < MOST), ten, (zeros, zeros, jnp.asarray(jnp.inf, x.dtype), 0)
    )
    return jnp.exp(logs + f[:, None] + g[None]), made


def jax_match(x: Any, y: Any, key: Any, reg: float, reg_m: float) -> Any:
    """Draw pairs from the flattened plan."""
    import jax

    plan, _ = jax_plan(x, y, reg, reg_m)
    drawn = jax.random.choice(key, plan.size, (len(x),), p=plan.ravel() / plan.sum())
    return drawn // len(y), drawn % len(y)


def match_rows(args: Any) -> list[dict[str, Any]]:
    import jax

    from mapuot.jax import match

    device = jax.devices("gpu" if args.device == "gpu" else "cpu")[0]
    rows = []
    for n in sizes_of(args)["match"]:
        rng = np.random.default_rng(SEED)
        points = rng.normal(size=(n, 2)), rng.normal(size=(n, 2)) + 1
        unit = float(((points[0][:, None] - points[1]) ** 2).sum(-1).mean())
        x, y = (jax.device_put(np.asarray(z, np.float32), device) for z in points)
        key = jax.device_put(jax.random.key(0), device)
        for name, share in PENALTIES.items():
            given = {"reg": SHARE * unit, "reg_m": share * unit}
            ours = jax.jit(partial(match, tol=MATCH_TOL, **given))
            theirs = jax.jit(partial(jax_match, **given))
            for call, whose in ((ours, "mapuot"), (theirs, "jax")):
                jax.block_until_ready(call(x, y, key))  # compiles
                times = []
                for _ in range(5 if args.quick else 30):
                    begin = time.perf_counter()
                    jax.block_until_ready(call(x, y, key))
                    times.append(time.perf_counter() - begin)
                rows.append({"name": whose, "n": n, "penalty": name, "seconds": float(np.median(times))})
            cost = mapuot.PointCloud(*(np.asarray(z, np.float64) for z in (x, y)))
            exact = mapuot.solve(cost, tol=EXACT, backend="cpu", **given).plan
            plan, made = jax.jit(partial(jax_plan, **given))(x, y)
            rows[-1] |= {"iterations": int(made), "error": relative(np.asarray(plan, np.float64), exact)}
            rows[-2] |= {"error": relative(mapuot.solve(cost, tol=MATCH_TOL, **given).plan, exact)}
    return rows


def relative(plan: Any, exact: Any) -> float:
    """Return the distance of two plans over the mass of the second."""
    return float(np.abs(plan - exact).sum() / exact.sum())


def run(args: Any) -> dict[str, Any]:
    found = {"drift": drift_rows(args), "screen": screen_rows(args)}
    if find_spec("jax"):
        found["match"] = match_rows(args)
    return found


def tables(data: dict[str, Any]) -> str:
    drift = [[row["name"], common.three(1e3 * row["seconds"]), common.short(row["error"])] for row in data["drift"]]
    screen = [
        [row["name"], row["pairs"], row["timed"], common.three(row["seconds"]), common.short(row["error"])]
        for row in data["screen"]
    ]
    match = [
        [row["name"], row["penalty"], row["n"], common.three(1e3 * row["seconds"]), common.short(row["error"]),
         row.get("iterations", "")] for row in data.get("match", ())
    ]  # fmt: skip
    return common.text_of(
        f"{common.machine_line(data)}:", common.table(["drift step", "ms", "relative error"], drift),
        common.table(["screen", "pairs", "timed", "s", "largest relative error"], screen),
        common.table(["pairs within jax.jit", "reg_m", "points", "ms", "plan error", "iterations"], match),
    )  # fmt: skip
