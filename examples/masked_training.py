"""Train a map of one cloud of points onto another with a loss that sees a random tenth of the pairs in every step.

    python examples/masked_training.py [--points 200] [--steps 400] [--reg 0.002] [--reg-m 1] [--out FOLDER]

A small network f bends an upright bar of points x_i into an S of points y_j; some of the y_j are outliers far away. The
loss is the unbalanced transport cost with the costs |f(x_i) - y_j|^2. With mask=SeededMask(keep, seed=step) value and
gradient use a random part of the pairs, another one in each step, like dropout; kept pairs weigh 1 / keep. Only the
seed of a mask is stored. The program prints the loss over all pairs after training with each share of them. Writes
masked_training.png to build/demo; needs PyTorch and Matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from tqdm import tqdm

import mapuot
from mapuot.torch import sinkhorn_loss

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
SHARES = (1.0, 0.3, 0.1)


def clouds(count: int, seed: int = 0) -> tuple[Any, Any]:
    """(an upright bar, an S with an outlying blob): the start and the target."""
    rng = np.random.default_rng(seed)
    x = 0.5 + np.stack([rng.uniform(-0.02, 0.02, count), rng.uniform(-0.4, 0.4, count)], 1)
    t = rng.uniform(-1, 1, count)
    y = np.stack([0.5 + 0.25 * np.sin(np.pi * t), 0.5 + 0.4 * t], 1) + rng.normal(scale=0.02, size=(count, 2))
    y[: count // 20] = [2.5, 2.5]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def train(x: Any, y: Any, keep: float, steps: int, reg: float, reg_m: float) -> tuple[Any, float]:
    """(the points where the network puts them, the loss over all pairs)."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 2)
    moved = torch.nn.Sequential(*layers)
    adam = torch.optim.Adam(moved.parameters(), lr=2e-2)
    a, b = (torch.full((len(z),), 1 / len(z)) for z in (x, y))
    for step in tqdm(range(steps), desc=f"keep {keep:g}", unit="step"):
        M = torch.cdist(x + moved(x), y) ** 2
        loss = sinkhorn_loss(M, a, b, reg=reg, reg_m=reg_m, tol=1e-3, mask=mapuot.SeededMask(keep, seed=step))
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        z = x + moved(x)
        return z.numpy(), float(sinkhorn_loss(torch.cdist(z, y) ** 2, a, b, reg=reg, reg_m=reg_m, tol=1e-3))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, default=200)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--reg", type=float, default=0.002)
    options.add_argument("--reg-m", type=float, default=1.0)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the picture")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x, y = clouds(args.points)
    fig, axes = plt.subplots(1, len(SHARES), figsize=(4 * len(SHARES), 3.8))
    for axis, keep in zip(axes, SHARES, strict=True):
        z, loss = train(x, y, keep, args.steps, args.reg, args.reg_m)
        axis.scatter(*y.T, s=6, c="0.8")
        axis.scatter(*z.T, s=6, c="tab:red", alpha=0.7)
        title = f"{keep:.0%} of the pairs, loss {loss:.4f}"
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal", title=title)
        print(f"trained with {keep:.0%} of the pairs: loss over all of them {loss:.4f}")
    fig.tight_layout()
    fig.savefig(args.out / "masked_training.png", dpi=90)


if __name__ == "__main__":
    main()
