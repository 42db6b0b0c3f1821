"""Register a shape onto another: Newton steps for the affine part, a gradient flow for the rest.

    python examples/registration.py [--points 2000] [--reg 0.003] [--reach 0.5] [--out FOLDER]

A flower is turned, stretched and bent, and loses a petal. The six numbers of an affine map are found by Newton's method
on the transport cost, whose gradient is `Result.gradient` and whose Hessian takes six products `Result.hvp`; steepest
descent with the same line search is drawn beside it. Then each point rolls down the debiased loss
`mapuot.torch.SamplesLoss` by itself, whose smaller reach draws the petal without a counterpart to its neighbours as far
as it goes. Writes registration.png to build/demo. Needs PyTorch and Matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt

import mapuot
from mapuot.torch import SamplesLoss

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
NEWTON, DESCENT, FLOW = 12, 25, 12  # steps


def shapes(count: int, seed: int = 0) -> tuple[Any, Any]:
    """(a flower, the same turned, stretched, bent, with a petal missing)."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = np.sqrt(rng.uniform(0.15, 1, count)) * (0.6 + 0.25 * np.cos(5 * angle))
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    kept = ~((angle > 0.9) & (angle < 1.6))
    turn = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    y = (x[kept] * [1.0, 0.75]) @ turn.T + [0.35, 0.2]
    return x, y + 0.05 * np.sin(4 * y[:, ::-1]) + rng.normal(scale=0.004, size=y.shape)


class Affine:
    """The cost of transport as a function of the six numbers of an affine map of x."""

    def __init__(self, x: Any, y: Any, reg: float, reg_m: float) -> None:
        self.x, self.y, self.reg, self.reg_m = x, y, reg, reg_m
        self.basis = np.stack([np.outer(z, e) for z in (x[:, 0], x[:, 1], np.ones(len(x))) for e in np.eye(2)])
        self.masses = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(x))  # the petal is missing, not spread

    def moved(self, numbers: Any) -> Any:
        return np.tensordot(numbers, self.basis, 1)

    def solved(self, numbers: Any) -> Any:
        cloud = mapuot.PointCloud(self.moved(numbers), self.y, scale=0.5)
        return mapuot.solve(cloud, *self.masses, reg=self.reg, reg_m=self.reg_m, tol=1e-5)

    def slope(self, result: Any) -> Any:
        return np.tensordot(self.basis, result.gradient().x, 2)

    def curvature(self, result: Any) -> Any:
        return np.array([np.tensordot(self.basis, result.hvp(w, tol=1e-4), 2) for w in self.basis])


def descend(cost: Affine, steps: int, newton: bool) -> tuple[Any, list[float]]:
    """(numbers, value after each step): a step is halved until the value falls."""
    numbers, length = np.array([1.0, 0, 0, 1, 0, 0]), 1.0
    result = cost.solved(numbers)
    values = [result.dual]
    for _ in range(steps):
        step = cost.slope(result)
        if newton:  # the directions of negative curvature count as those of positive
            size, axes = np.linalg.eigh(cost.curvature(result))
            step = axes @ ((axes.T @ step) / np.maximum(np.abs(size), 1e-2 * np.abs(size).max()))
            length = 1.0
        for _ in range(12):
            there = cost.solved(numbers - length * step)
            if there.dual < values[-1]:
                numbers, result, length = numbers - length * step, there, 1.5 * length
                break
            length /= 2
        else:
            break
        values.append(result.dual)
        if values[-2] - values[-1] < 1e-9 * values[-1]:
            break
    return numbers, values


def flow(x: Any, y: Any, blur: float, reach: float, steps: int) -> Any:
    """Points that follow minus their slope of the debiased loss, which is 0 where the clouds agree."""
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, reach=reach, tol=1e-4)
    points, there = torch.tensor(x, requires_grad=True), torch.tensor(y)
    a, b = (torch.full((len(z),), 1 / len(x), dtype=torch.float64) for z in (x, y))
    for _ in range(steps):
        (slope,) = torch.autograd.grad(loss(a, points, b, there), points)
        points = (points - 0.7 * len(x) * slope).detach().requires_grad_()  # each point has mass 1 / n
    return points.detach().numpy()


def draw(path: Path, x: Any, y: Any, stages: Any, curves: Any) -> None:
    hue = np.arctan2(x[:, 1], x[:, 0])
    figure, axes = plt.subplots(2, 2, figsize=(7.5, 8), layout="constrained")
    axes = axes.ravel()
    for axis, (title, points) in zip(axes, stages.items(), strict=False):
        axis.scatter(*y.T, s=3, c="lightgrey", lw=0)
        axis.scatter(*points.T, s=3, c=hue, cmap="hsv", lw=0)
        axis.set(title=title, xticks=[], yticks=[], xlim=(-0.95, 1.25), ylim=(-0.95, 1.0), aspect="equal")
    for name, values in curves.items():
        least = min(map(min, curves.values()))
        axes[3].semilogy(np.array(values) - least + 1e-9, "o-", ms=3, label=name)
    axes[3].set(title="value above the least, affine part", xlabel="step")
    axes[3].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--reg", type=float, default=0.003)
    parser.add_argument("--reach", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    x, y = shapes(args.points)
    cost = Affine(x, y, args.reg, args.reach**2)
    numbers, by_newton = descend(cost, NEWTON, newton=True)
    _, by_descent = descend(cost, DESCENT, newton=False)
    for name, values in (("Newton", by_newton), ("descent", by_descent)):
        print(f"{name}: {values[-1]:.7f} after {len(values) - 1} steps")
    affine = cost.moved(numbers)
    last = flow(affine, y, np.sqrt(args.reg), args.reach / 6, FLOW)
    stages = {"start": x, "affine, by Newton's method": affine, "each point by itself": last}
    draw(args.out / "registration.png", x, y, stages, {"Newton, by hvp": by_newton, "steepest descent": by_descent})
    print(args.out / "registration.png")


if __name__ == "__main__":
    main()
