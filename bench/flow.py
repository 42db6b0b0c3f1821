"""flow: the minibatches of flow matching, 1000 of 128 through a torch DataLoader, coupled by us and by POT.

Each loop takes points from the loader and as much noise, forms squared distances, solves, and draws 128 pairs from the
plan. POT's is the one that programs have: ``ot.unbalanced.sinkhorn_knopp_unbalanced`` on numpy arrays, then
``Generator.choice`` over the entries of the plan; "patched" is the same program after ``mapuot.pot.patch()``; "mapuot"
is ``solve(...).sample(...)`` on the tensors. The loops take turns of 20 minibatches, the same ones. Judged on some of
them against a solve to 1e-10: the plan's error, that of its marginals (both relative, L1) and the mean squared distance
of the pairs that were drawn, in times that of the exact plan.

With --device gpu: a training step (noise, pairs, loss, gradient, Adam) with pairs drawn by our `OTPlanSampler`, at once
or ("ahead") from a plan whose solve began before the step before, beside one with random pairs and one whose plan is
that of 100 float32 iterations in torch, which certify nothing. The networks are the perceptron of torchcfm's examples
in the plane, three layers of 64, and four layers of 1024 in 50 dimensions, as for single cells. reg is .05 and reg_m 1
in units of the mean squared distance.
"""

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mapuot
from mapuot import pot
from mapuot.flow import OTPlanSampler

from . import common

NEEDS = ("torch",)
SIZE, COUNT, QUICK_COUNT, TURN = 128, 1000, 60, 20
CASES = ((0.05, 1.0), (0.5, 1.0), (0.5, 4.0))  # reg, reg_m; squared distances as they are, up to some 40
JUDGED = 50
TOL = 1e-4
RNG = np.random.default_rng(0)
NETWORKS = (2, 64, 3), (50, 1024, 4)  # dimensions, width and layers
BATCHES, STEPS, ROUNDS, ITERATIONS = (256, 1024), 20, 15, 100  # of a GPU


def data(count: int) -> Any:
    """Eight blobs on a circle of radius 4, as many points as all minibatches take."""
    import torch

    generator = torch.Generator().manual_seed(0)
    angle = torch.randint(8, (count,), generator=generator) * (torch.pi / 4)
    return 4 * torch.stack([angle.cos(), angle.sin()], 1) + 0.25 * torch.randn(count, 2, generator=generator)


def minibatches(count: int) -> Any:
    """(x0, x1) from a DataLoader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    for (x1,) in DataLoader(TensorDataset(data(count * SIZE)), batch_size=SIZE, shuffle=True, drop_last=True):
        yield torch.randn_like(x1), x1


def costs(x0: Any, x1: Any) -> Any:
    import torch

    return torch.cdist(x0, x1) ** 2


def by_mapuot(reg: float, reg_m: float, rng: Any, x0: Any, x1: Any) -> tuple[Any, Any, Any]:
    result = mapuot.solve(costs(x0, x1), reg=reg, reg_m=reg_m, tol=TOL)
    return (result, *result.sample(SIZE, rng))


def by_pot(reg: float, reg_m: float, rng: Any, x0: Any, x1: Any) -> tuple[Any, Any, Any]:
    import ot

    a = np.full(SIZE, 1.0 / SIZE)
    plan = ot.unbalanced.sinkhorn_knopp_unbalanced(a, a, costs(x0, x1).numpy(), reg, reg_m)
    share = plan.ravel().astype(np.float64)
    return (plan, *np.divmod(rng.choice(share.size, p=share / share.sum(), size=SIZE), SIZE))


WAYS = {"POT": by_pot, "patched": by_pot, "mapuot": by_mapuot}


def judge(found: dict[str, list[Any]], exact: Any, M: Any) -> None:
    """Errors of each way's plan and pairs on one minibatch are added to ``found[name]``."""
    marginals = (exact.sum(1), exact.sum(0))
    best = (exact * M).sum() / exact.sum()
    for answers in found.values():
        plan, i, j = answers[-1]
        plan = np.asarray(plan.plan if isinstance(plan, mapuot.Result) else plan, dtype=np.float64)
        off = np.abs(plan.sum(1) - marginals[0]).sum() + np.abs(plan.sum(0) - marginals[1]).sum()
        answers[-1] = np.abs(plan - exact).sum() / exact.sum(), off / exact.sum(), M[i, j].mean() / best


def time_case(reg: float, reg_m: float, count: int) -> dict[str, Any]:
    ways = {name: functools.partial(way, reg, reg_m, np.random.default_rng(0)) for name, way in WAYS.items()}
    seconds, found = dict.fromkeys(["loader", *ways], 0.0), {name: [] for name in ways}  # type: ignore[var-annotated]
    source, left = minibatches(count), count
    while left:
        begun = time.perf_counter()
        batches = [next(source) for _ in range(min(TURN, left))]
        seconds["loader"] += time.perf_counter() - begun
        for name, way in ways.items():
            with pot.patched() if name == "patched" else contextlib.nullcontext():
                way(*batches[0])
                begun = time.perf_counter()
                answers = [way(*batch) for batch in batches]
                seconds[name] += time.perf_counter() - begun
            found[name].append(answers[0])
        if len(found["POT"]) <= JUDGED:
            M = costs(*batches[0]).numpy()
            a = np.full(SIZE, 1.0 / SIZE)
            exact = mapuot.solve(M.astype(np.float64), a, a, reg=reg, reg_m=reg_m, tol=1e-10).plan
            judge(found, exact, M.astype(np.float64))
        left -= len(batches)
    quality = {
        name: dict(zip(("plan", "marginals", "pairs"), np.mean(answers[:JUDGED], axis=0).tolist(), strict=True))
        for name, answers in found.items()
    }
    speedup = {name: seconds["POT"] / seconds[name] for name in ways}
    return {"reg": reg, "reg_m": reg_m, "count": count, "seconds": seconds, "speedup": speedup, "quality": quality}


def network(d: int, width: int, layers: int) -> Any:
    """Return a perceptron of points and a time."""
    from torch import nn

    sizes = [d + 1, *[width] * layers]
    inner = [x for k in range(layers) for x in (nn.Linear(sizes[k], sizes[k + 1]), nn.SELU())]
    return nn.Sequential(*inner, nn.Linear(width, d)).cuda()


Batches = Iterator[tuple[Any, Any]]


def unit_of(x: Any) -> float:
    """Return the mean squared distance."""
    return 20.0 + x.shape[1]


def random_pairs(batches: Batches) -> Batches:
    return batches


def our_pairs(batches: Batches) -> Batches:
    for x0, x1 in batches:
        yield OTPlanSampler("unbalanced", 0.05 * unit_of(x0), unit_of(x0), seed=RNG, tol=TOL).sample_plan(x0, x1)


def our_pairs_ahead(batches: Batches) -> Batches:
    x0, x1 = next(batches)
    sampler = OTPlanSampler("unbalanced", 0.05 * unit_of(x0), unit_of(x0), seed=RNG, tol=TOL)
    result = sampler.solved(x0, x1)
    for following in batches:
        begun = sampler.solved(*following)
        i, j = result.sample(len(x0), sampler.rng)
        yield x0[i], x1[j]
        (x0, x1), result = following, begun


def pairs_of_torch(batches: Batches) -> Batches:
    return (iterated(*batch) for batch in batches)


def iterated(x0: Any, x1: Any) -> tuple[Any, Any]:
    """Draw pairs after ITERATIONS unbalanced steps between equal masses."""
    import torch

    M, unit = costs(x0, x1), unit_of(x0)
    n, fi = len(M), 1.0 / (1.0 + 0.05)
    K = torch.exp(M / (-0.05 * unit)) / n**2
    v = torch.ones(n, device=M.device)
    for _ in range(ITERATIONS):
        u = (K @ v * n) ** -fi
        v = (u @ K * n) ** -fi
    drawn = torch.multinomial((u[:, None] * K * v).ravel(), n, replacement=True)
    return x0[drawn // n], x1[drawn % n]


PAIRS = {"random": random_pairs, "mapuot": our_pairs, "ahead": our_pairs_ahead, "torch": pairs_of_torch}


def training(n: int, d: int, width: int, layers: int, pairs: Callable[[Batches], Batches]) -> Any:
    """Return STEPS steps of flow matching between noise and points on two halves of a sphere."""
    import torch

    net = network(d, width, layers)
    adam = torch.optim.Adam(net.parameters(), 1e-4)
    data = torch.randn(50 * n, d, device="cuda")
    data = 4 * data / data.norm(dim=1, keepdim=True) + 2 * data[:, :1].sign()

    def batches() -> Batches:
        while True:
            x1 = data[torch.randint(len(data), (n,), device="cuda")]
            yield torch.randn_like(x1), x1

    coupled = pairs(batches())

    def steps() -> None:
        for x0, x1 in itertools.islice(coupled, STEPS):
            t = torch.rand(n, 1, device="cuda")
            loss = ((net(torch.cat([(1 - t) * x0 + t * x1, t], 1)) - (x1 - x0)) ** 2).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        torch.cuda.synchronize()

    return steps


def steps_on_gpu(args: Any) -> dict[str, Any]:
    rows = []
    for n in BATCHES[: 1 if args.quick else None]:
        for shape in NETWORKS[: 1 if args.quick else None]:
            calls = {name: training(n, *shape, pairs) for name, pairs in PAIRS.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(1 + (2 if args.quick else ROUNDS)):
                for name, call in calls.items():
                    begun = time.perf_counter()
                    call()
                    if turn:  # the first compiles
                        times[name].append((time.perf_counter() - begun) / STEPS)
            best = {name: min(x) for name, x in times.items()}
            rows.append({"n": n, "network": shape, "seconds": best})
    return {"steps": rows}


def run(args: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    if args.device == "gpu":
        return steps_on_gpu(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with common.blas_threads(args.threads), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # POT's, where exp(-M / reg) underflows
            rows = [time_case(*case, QUICK_COUNT if args.quick else COUNT) for case in CASES]
    finally:
        torch.set_num_threads(threads)
    return {"threads": args.threads, "size": SIZE, "flow": rows}


def tables(data: dict[str, Any]) -> str:
    if common.on_gpu(data):
        others = [*PAIRS][1:]
        header = ["batch", "network", *(f"{x}, ms a step" for x in PAIRS), *(f"{x} / random" for x in others)]
        steps = [
            [row["n"], "{} x {}, {}-D".format(*row["network"][:0:-1], row["network"][0]),
             *(common.three(1e3 * x) for x in row["seconds"].values()),
             *(f"{row['seconds'][name] / row['seconds']['random']:.2f}" for name in others)]
            for row in data["steps"]
        ]  # fmt: skip
        return f"{data['device']}\n\n" + common.table(header, steps)
    header = ["reg", "reg_m", "way", "ms each", "x POT", "plan's error", "marginals'", "pairs' distance"]
    rows = [
        [r["reg"], r["reg_m"], name, common.three(1e3 * r["seconds"][name] / r["count"]), f"{r['speedup'][name]:.1f}",
         *(f"{r['quality'][name][k]:.1e}" for k in ("plan", "marginals")), f"{r['quality'][name]['pairs']:.3f}"]
        for r in data["flow"] for name in WAYS
    ]  # fmt: skip
    return f"{data['flow'][0]['count']} minibatches of {data['size']}\n\n" + common.table(header, rows)
