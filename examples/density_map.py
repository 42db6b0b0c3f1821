"""Map one density onto another on a megapixel grid, and stop halfway.

    python examples/density_map.py [--size 1024] [--reg 0.0005] [--reg-m 0.3] [--out FOLDER]

Two skies of clouds of size x size pixels each. As a matrix the costs between a million pixels and a million others
would take 8 TB; `mapuot.Grid` multiplies along the axes and holds vectors alone. The picture halfway moves what each
pixel sends by half of its way, to the mean of where it goes; what the unbalanced plan leaves unmoved fades in place.
Writes density_map.png to build/demo. Needs Matplotlib.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from scipy.ndimage import gaussian_filter

import mapuot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"


def sky(size: int, seed: int, *clouds: tuple[float, float, float]) -> Any:
    """Clouds at (row, column, radius), frayed by noise of several scales; mass 1."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:size, :size] / size
    noise = sum(
        2.0**-k * gaussian_filter(rng.standard_normal((size, size)), s := size / 8 / 2**k, mode="wrap") * s
        for k in range(5)
    )
    shape = sum(np.exp(-((row - r) ** 2 + (column - c) ** 2) / (2 * w * w)) for r, c, w in clouds)
    density = shape * np.exp(2.5 * noise / np.abs(noise).max()) + 1e-3
    return density / density.sum()


def halfway(grid: Any, result: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """(the density at half of the way, how far each pixel goes)."""
    here, shape = grid.points(), grid.nodes[0]
    way = result.barycentric_map(here) - here
    there = (here + way / 2).T / np.array(grid.spacing)[:, None]
    moved, first = np.zeros(shape), np.minimum(there.astype(int), np.array(shape)[:, None] - 2)
    for corner in np.ndindex(2, 2):  # each mass to the four pixels around its place, by how near they are
        near = np.prod(1 - np.abs(first + np.array(corner)[:, None] - there), axis=0)
        np.add.at(moved, tuple(first + np.array(corner)[:, None]), near * result.row_marginal)
    left = a - result.row_marginal.reshape(shape), b - result.col_marginal.reshape(shape)
    density = gaussian_filter(moved, 1.0) + 0.5 * np.maximum(left[0], 0) + 0.5 * np.maximum(left[1], 0)
    return density, np.hypot(*way.T).reshape(shape)


def draw(path: Path, grid: Any, result: Any, a: Any, b: Any) -> None:
    middle, length = halfway(grid, result, a, b)
    share = result.row_marginal.reshape(a.shape) / a  # above 1 where mass is created
    figure, axes = plt.subplots(2, 3, figsize=(10.8, 7.2), layout="constrained")
    axes = axes.ravel()
    axes[5].axis("off")
    for axis, image, title, colours in (
        (axes[0], a, "from here", "Blues_r"), (axes[1], middle, "halfway", "Blues_r"),
        (axes[2], b, "to here", "Blues_r"), (axes[3], length, "length of each pixel's way", "viridis"),
        (axes[4], share, "moved / given mass", "coolwarm"),
    ):  # fmt: skip
        most = {"Blues_r": max(a.max(), b.max()) * 0.7, "coolwarm": 2.0}.get(colours)
        shown = axis.imshow(image, cmap=colours, vmin=0, vmax=most)
        axis.set(xticks=[], yticks=[])
        axis.set_title(title, fontsize=15)
        if axis in axes[3:]:
            figure.colorbar(shown, ax=axis, shrink=0.8, extend="max" if colours == "coolwarm" else "neither")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--reg", type=float, default=5e-4)
    parser.add_argument("--reg-m", type=float, default=0.3)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    grid = mapuot.Grid((args.size, args.size), spacing=1 / args.size)
    a = sky(args.size, 0, (0.3, 0.25, 0.1), (0.7, 0.3, 0.06))
    b = sky(args.size, 1, (0.35, 0.6, 0.09), (0.75, 0.8, 0.07), (0.15, 0.9, 0.05))
    print(f"solving between {a.size} pixels and {b.size} others ...", flush=True)
    begun = time.perf_counter()
    result = mapuot.solve(grid, a, b, reg=args.reg, reg_m=args.reg_m, tol=1e-4, backend=args.backend, progress=True)
    print(f"{result}, {time.perf_counter() - begun:.0f} s")
    draw(args.out / "density_map.png", grid, result, a, b)
    print(args.out / "density_map.png")


if __name__ == "__main__":
    main()
