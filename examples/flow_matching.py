"""Train a flow from Gaussian noise to eight blobs, with the pairs of each minibatch drawn from an unbalanced plan.

    python examples/flow_matching.py [--steps 2000] [--batch 128] [--reg 0.5] [--reg-m 4] [--seed 0] [--out FOLDER]

Flow matching regresses a velocity v(x, t) on x1 - x0 at x = (1 - t) x0 + t x1. Pairs (x0, x1) at random cross each
other, and the paths that v integrates to are curved; pairs drawn from the plan between the two halves of a minibatch
do not, and few steps of Euler's method are enough. One in 20 of the data is an outlier far away: an unbalanced plan
(cost |x0 - x1|^2, reg and reg_m in its units) need not send mass there. The minibatches come from a torch DataLoader,
and mapuot answers its tensors with tensors. Both ways are trained alike; printed are the time of the pairs, how
straight the paths are (their length beyond the distance of their ends), and how many samples are off the blobs.
Writes flow_matching.png to build/demo; needs PyTorch and Matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mapuot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
Pairs = Callable[[Any, Any], tuple[Any, Any]]
RADIUS, WIDTH, FAR = 4.0, 0.25, 12.0  # of the circle of blobs, of a blob; distance of the outliers
EULER_STEPS = 8


def data(count: int, seed: int) -> Any:
    """Eight blobs on a circle, and outliers to the right."""
    rng = np.random.default_rng(seed)
    angle = rng.integers(8, size=count) * (np.pi / 4)
    x = RADIUS * np.stack([np.cos(angle), np.sin(angle)], 1)
    outlier = rng.random(count) < 0.05
    x[outlier] = FAR, 0.0
    return torch.tensor(x + rng.normal(scale=WIDTH, size=x.shape), dtype=torch.float32)


def at_random(x0: Any, x1: Any) -> tuple[Any, Any]:
    return x0, x1


def from_plan(reg: float, reg_m: float, seed: int) -> Pairs:
    """As many pairs as there are points, drawn from the unbalanced plan between them."""
    rng = np.random.default_rng(seed)

    def pairs(x0: Any, x1: Any) -> tuple[Any, Any]:
        M = torch.cdist(x0, x1) ** 2
        i, j = mapuot.solve(M, reg=reg, reg_m=reg_m, tol=1e-3).sample(len(x0), rng)
        return x0[i], x1[j]

    return pairs


def network(width: int = 96) -> Any:
    layers: list[Any] = [torch.nn.Linear(3, width), torch.nn.SiLU()]
    for _ in range(2):
        layers += [torch.nn.Linear(width, width), torch.nn.SiLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 2))


def train(target: Any, pairs: Pairs, steps: int, batch: int, seed: int, name: str) -> tuple[Any, float]:
    """(the velocity, seconds that the pairs took)."""
    torch.manual_seed(seed)
    velocity, seconds = network(), 0.0
    adam = torch.optim.Adam(velocity.parameters(), lr=2e-3)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    loader = DataLoader(TensorDataset(target), batch_size=batch, shuffle=True, drop_last=True)
    minibatches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
    for (drawn,) in tqdm(minibatches, desc=name, total=steps, unit="step"):
        begun = time.perf_counter()
        x0, x1 = pairs(torch.randn_like(drawn), drawn)
        seconds += time.perf_counter() - begun
        t = torch.rand(len(x0), 1)
        loss = ((velocity(torch.cat([(1 - t) * x0 + t * x1, t], 1)) - (x1 - x0)) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        slower.step()
    return velocity, seconds


@torch.no_grad()
def paths(velocity: Any, x: Any, steps: int) -> Any:
    """Euler's method from noise at t = 0 to t = 1, (steps + 1, count, 2)."""
    found = [x]
    for k in range(steps):
        t = torch.full((len(x), 1), k / steps)
        found.append(found[-1] + velocity(torch.cat([found[-1], t], 1)) / steps)
    return torch.stack(found)


def judge(way: Any) -> dict[str, float]:
    """Mean length of the paths beyond their ends' distance, and the shares of ends far out and between the blobs."""
    ends, length = way[-1], (way[1:] - way[:-1]).norm(dim=2).sum(0)
    angle = torch.arange(8) * (torch.pi / 4)
    centres = RADIUS * torch.stack([angle.cos(), angle.sin()], 1)
    off = torch.cdist(ends, centres).amin(1) > 4 * WIDTH
    far = ends[:, 0] > (RADIUS + FAR) / 2
    beyond = (length / (ends - way[0]).norm(dim=1)).mean() - 1
    return {"beyond": float(beyond), "far": float(far.float().mean()), "between": float((off & ~far).float().mean())}


def draw(axis: Any, way: Any, target: Any, title: str) -> None:
    axis.scatter(*target[:1000].T, s=4, c="0.8", lw=0)
    axis.plot(*way[:, :200].permute(2, 0, 1), c="tab:blue", lw=0.4, alpha=0.6)
    axis.scatter(*way[-1].T, s=4, c="tab:red", lw=0)
    axis.set(xlim=(-6, 14), ylim=(-6, 6), xticks=[], yticks=[], aspect="equal", title=title)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--reg", type=float, default=0.5)
    options.add_argument("--reg-m", type=float, default=4.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the picture")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target = data(128 * args.batch, args.seed)
    ways = {"pairs at random": at_random, "pairs from the plan": from_plan(args.reg, args.reg_m, args.seed)}
    fig, axes = plt.subplots(1, len(ways), figsize=(11, 3.9))
    for axis, (name, pairs) in zip(axes, ways.items(), strict=True):
        velocity, seconds = train(target, pairs, args.steps, args.batch, args.seed, name)
        way = paths(velocity, torch.randn(1000, 2, generator=torch.manual_seed(args.seed)), EULER_STEPS)
        found = judge(way)
        draw(axis, way, target, f"{name}: {100 * found['beyond']:.0f} % longer than straight")
        print(
            f"{name}: {1e3 * seconds / args.steps:.2f} ms a minibatch, paths {100 * found['beyond']:.1f} % longer than "
            f"straight, {100 * found['far']:.1f} % of the samples at the outliers, {100 * found['between']:.1f} % "
            f"between the blobs, {EULER_STEPS} steps of Euler's method"
        )
    fig.tight_layout()
    fig.savefig(args.out / "flow_matching.png", dpi=90)


if __name__ == "__main__":
    main()
