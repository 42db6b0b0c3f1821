"""flow: a training step of flow matching (noise, pairs, loss, gradient, Adam) by where its pairs come from; on a GPU.

Pairs are drawn by our `OTPlanSampler`, at once or ("ahead") from a plan of a solve that began one step earlier, or from
a plan of 100 float32 iterations in torch, which certify nothing. The networks are the perceptron of torchcfm's examples
in the plane, three layers of 64, and four layers of 1024 in 50 dimensions, as for single cells. reg is .05 and reg_m 1
in units of the mean squared distance.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mapuot.flow import OTPlanSampler

from . import common, peers

NEEDS = ("torch",)
TOL = 1e-4
RNG = np.random.default_rng(0)
NETWORKS = (2, 64, 3), (50, 1024, 4)  # dimensions, width and layers
BATCHES = (256, 1024)
STEPS = 20
ROUNDS = 15
ITERATIONS = 100


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


def sampler_for(x: Any) -> OTPlanSampler:
    return OTPlanSampler("unbalanced", 0.05 * unit_of(x), unit_of(x), seed=RNG, tol=TOL)


def our_pairs(batches: Batches) -> Batches:
    x0, x1 = next(batches)
    sampler = sampler_for(x0)
    return (sampler.sample_plan(*batch) for batch in itertools.chain([(x0, x1)], batches))


def our_pairs_ahead(batches: Batches) -> Batches:
    x0, x1 = next(batches)
    sampler = sampler_for(x0)
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

    K = torch.exp(torch.cdist(x0, x1) ** 2 / (-0.05 * unit_of(x0)))
    ones = torch.ones(len(x0), device=x0.device)
    n = len(x0)
    a = ones / len(x0)
    u, v = peers.torch_scalings(K, a, a, 1.0 / (1.0 + 0.05), ITERATIONS, ones, ones)
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


def run(args: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    rows = []
    if args.quick:
        batches = BATCHES[:1]
        networks = NETWORKS[:1]
        rounds = 2
    else:
        batches = BATCHES
        networks = NETWORKS
        rounds = ROUNDS
    for n in batches:
        for shape in networks:
            calls = {name: training(n, *shape, pairs) for name, pairs in PAIRS.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(1 + rounds):
                for name, call in calls.items():
                    begun = time.perf_counter()
                    call()
                    if turn:  # the first compiles
                        times[name].append((time.perf_counter() - begun) / STEPS)
            best = {name: min(x) for name, x in times.items()}
            rows.append({"n": n, "network": shape, "seconds": best})
    return {"steps": rows}


def tables(data: dict[str, Any]) -> str:
    others = [*PAIRS][1:]
    header = ["batch", "network", *(f"{x}, ms a step" for x in PAIRS), *(f"{x} / random" for x in others)]
    steps = [
        [row["n"], "{} x {}, {}-D".format(*row["network"][:0:-1], row["network"][0]),
         *(common.three(1e3 * x) for x in row["seconds"].values()),
         *(f"{row['seconds'][name] / row['seconds']['random']:.2f}" for name in others)]
        for row in data["steps"]
    ]  # fmt: skip
    return f"{data['device']}\n\n" + common.table(header, steps)
