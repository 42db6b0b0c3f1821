"""Animate a cloud of points that flows down the unbalanced Sinkhorn divergence to a target shape.

    python examples/gradient_flow.py [--points 300] [--steps 60] [--reg 0.01] [--reg-m 0.3] [--out FOLDER]

Points x_i of mass a_i move by -grad_x S / a_i and change their mass by a_i <- a_i exp(-rate dS/da_i): transport where
the target is near, growth and decay where it is not. The gradients come from the potentials (mapuot.torch), through the
three squared-distance matrices. Writes gradient_flow.gif and gradient_flow.png to build/demo; needs PyTorch
and Matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import animation
from matplotlib import pyplot as plt
from tqdm import tqdm

from mapuot.torch import sinkhorn_divergence

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
PICTURED = (0.0, 0.1, 0.3, 1.0)  # shares of the flow in the still picture


def clouds(count: int, seed: int = 0) -> tuple[Any, Any]:
    """(a disc, two moons): the start and the target."""
    rng = np.random.default_rng(seed)
    angle, radius = rng.uniform(0, 2 * np.pi, count), np.sqrt(rng.uniform(0, 0.02, count))
    x = np.stack([0.2 + radius * np.cos(angle), 0.25 + radius * np.sin(angle)], 1)
    t, upper = rng.uniform(0, np.pi, count), rng.random(count) < 0.5
    y = np.stack([np.where(upper, np.cos(t), 1 - np.cos(t)), np.where(upper, np.sin(t), 0.5 - np.sin(t))], 1)
    y = (y + np.array([1.0, 0.5])) / 3 + rng.normal(scale=0.015, size=y.shape)
    return torch.tensor(x), torch.tensor(y)


def squared_distances(x: Any, y: Any) -> Any:
    return ((x[:, None] - y[None]) ** 2).sum(2)


def flow(x: Any, y: Any, steps: int, reg: float, reg_m: float) -> list[tuple[Any, Any, float]]:
    """(points, masses, divergence) at every step."""
    a, b = torch.full((len(x),), 1 / len(x), dtype=x.dtype), torch.full((len(y),), 1 / len(y), dtype=y.dtype)
    M_b, frames = squared_distances(y, y), []
    for _ in tqdm(range(steps + 1), desc="flow", unit="step"):
        x, a = x.detach().requires_grad_(), a.detach().requires_grad_()
        costs = squared_distances(x, y), squared_distances(x, x)
        value = sinkhorn_divergence(costs[0], a, b, reg=reg, reg_m=reg_m, M_a=costs[1], M_b=M_b, tol=1e-5)
        step_x, step_a = torch.autograd.grad(value, (x, a))
        frames.append((x.detach().numpy(), a.detach().numpy(), float(value.detach())))
        x, a = x - 0.2 * step_x / a[:, None], a * torch.exp(-0.3 / reg_m * step_a)
    return frames


def draw(axis: Any, frame: Any, y: Any) -> Any:
    x, a, value = frame
    axis.scatter(*y.T, s=6, c="0.8")
    dots = axis.scatter(*x.T, s=8 * a * len(a), c="tab:red", alpha=0.7, lw=0)
    axis.set(
        xlim=(-0.05, 1.05),
        ylim=(-0.08, 0.6),
        xticks=[],
        yticks=[],
        aspect="equal",
    )
    axis.set_title(f"divergence {value:.1e}, mass {a.sum():.2f}", fontsize=13)
    return dots


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--points", type=int, default=300)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--reg", type=float, default=0.01)
    options.add_argument("--reg-m", type=float, default=0.3)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x, y = clouds(args.points)
    frames = flow(x, y, args.steps, args.reg, args.reg_m)
    fig, axes = plt.subplots(2, 2, figsize=(8, 5.6))
    for axis, share in zip(axes.flat, PICTURED, strict=True):
        draw(axis, frames[round(share * args.steps)], y)
    fig.tight_layout()
    fig.savefig(args.out / "gradient_flow.png", dpi=90)
    fig, axis = plt.subplots(figsize=(5, 3.9))

    def show(frame: Any) -> Any:
        axis.clear()
        return (draw(axis, frame, y),)

    film = animation.FuncAnimation(fig, show, frames)
    film.save(args.out / "gradient_flow.gif", animation.PillowWriter(fps=12), dpi=70)
    print(f"divergence {frames[0][2]:.4f} -> {frames[-1][2]:.6f} in {args.steps} steps")


if __name__ == "__main__":
    main()
