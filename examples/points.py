"""Match two shapes of many points without a cost matrix, and say how far the matching is from the optimum.

    python examples/points.py [--points 20000] [--reg 0.0005] [--reg-m 0.05] [--out FOLDER]

A spiral of points is matched to a ring and a far blob that has no counterpart. As a matrix the costs of 20,000 points
would take 3.2 GB; made in every pass they take none. Unbalanced transport leaves the blob alone: its mass is not worth
the way. Writes points.png to build/demo: the shapes, coloured by where each point goes, and the share of mass that
moves; and front.png: 60 points and 70 others, 15 of them far away, by balanced and by unbalanced transport; and
arrows.png, of the first steps. Needs Matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

import mapuot
import mapuot.plot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
SHOWN = 3000  # points of a scatter plot


def shapes(count: int, seed: int = 0) -> tuple[Any, Any]:
    """(a spiral, a ring with a far blob beside it)."""
    rng = np.random.default_rng(seed)
    t = np.sqrt(rng.uniform(0.05, 1, count)) * 3 * np.pi
    spiral = np.stack([t * np.cos(t), t * np.sin(t)], 1) / (6 * np.pi) + rng.normal(scale=0.01, size=(count, 2))
    angle, far = rng.uniform(0, 2 * np.pi, count), rng.random(count) < 0.15
    ring = np.stack([np.cos(angle), np.sin(angle)], 1) * rng.normal(0.4, 0.03, (count, 1))
    blob = rng.normal([1.5, 0.6], 0.08, (count, 2))
    return spiral, np.where(far[:, None], blob, ring)


def draw(path: Path, x: Any, y: Any, result: Any) -> None:
    """The shapes, the image of the first, and how much of each point's mass moves."""
    hue = np.arctan2(x[:, 1], x[:, 0])
    image, moved = result.barycentric_map(y), result.col_marginal * len(y)
    figure, axes = plt.subplots(3, 1, figsize=(6, 12), layout="constrained")
    for axis, points, colour, title in (
        (axes[0], x, hue, "from here"), (axes[1], image, hue, "to here: the mean target of each point"),
        (axes[2], y, moved, "share of the target's mass that is reached"),
    ):  # fmt: skip
        some = np.random.default_rng(1).choice(len(points), min(SHOWN, len(points)), replace=False)
        dots = axis.scatter(*points[some].T, s=4, c=colour[some], cmap="viridis" if axis is axes[2] else "hsv", lw=0)
        axis.set(xlim=(-0.7, 1.8), ylim=(-0.7, 0.9), xticks=[], yticks=[], aspect="equal")
        axis.set_title(title, fontsize=15)
    figure.colorbar(dots, ax=axes[2], shrink=0.8, location="bottom")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def draw_both(path: Path, count: int = 60, strays: int = 15) -> None:
    """Links between two small clouds, the second with strays: where all mass has to move, and where it need not."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(count, 2)) * [0.35, 0.5]
    y = np.vstack([rng.normal(size=(count - 5, 2)) * [0.35, 0.5] + [1.6, 0.2], rng.normal(size=(strays, 2)) * 0.15])
    y[count - 5 :] += [3.6, 1.6]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for axis, reg_m, title in (
        (axes[0], np.inf, "balanced:\nall mass moves"),
        (axes[1], 1.0, "unbalanced:\nstrays are left alone"),
    ):
        result = mapuot.solve_sample(x, y, reg=0.02, reg_m=reg_m)
        mapuot.plot.links(result, x, y, ax=axis, keep=0.9).get_legend().remove()
        for points, colour, name in ((x, "tab:blue", "from"), (y, "tab:orange", "to")):
            axis.scatter(*points.T, s=28, color=colour, zorder=2, label=name)
        axis.set(xticks=[], yticks=[], aspect="auto")
        axis.set_title(title, fontsize=18)
    handles, names = axis.get_legend_handles_labels()
    figure.legend(
        handles[-2:], names[-2:], loc="outside lower center", ncols=2, fontsize=15, frameon=False, borderpad=0
    )
    figure.savefig(path, dpi=110)


def draw_arrows(path: Path) -> None:
    """Draw the picture of docs/first_steps.md, with the program of this page."""
    rng = np.random.default_rng(0)
    x, y = rng.random((100, 2)), rng.random((80, 2)) + np.array([0.3, 0])
    result = mapuot.solve(mapuot.PointCloud(x, y), reg=0.005, reg_m=0.2)
    mapuot.plot.arrows(result, x, y).figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--reg", type=float, default=5e-4)
    parser.add_argument("--reg-m", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    x, y = shapes(args.points)
    result = mapuot.solve_sample(x, y, reg=args.reg, reg_m=args.reg_m, tol=1e-4)
    print(f"{result}\nmass that moves: {result.mass:.3f}; the plan is within {result.error_bound:.1e} of the optimum")
    draw(args.out / "points.png", x, y, result)
    draw_both(args.out / "front.png")
    draw_arrows(args.out / "arrows.png")
    print(args.out / "points.png", args.out / "front.png", args.out / "arrows.png")


if __name__ == "__main__":
    main()
