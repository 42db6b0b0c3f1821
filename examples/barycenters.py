"""Interpolate between two pictures by entropic Wasserstein barycenters, blurred and debiased.

    python examples/barycenters.py [--size 48] [--reg 0.0008] [--steps 7] [--out FOLDER]

Each picture, a photographed object of scikit-image made a shape, is a histogram on a grid. mapuot.barycenter finds the
answers of several weights (1 - t, t) at once: balanced, debiased, and unbalanced. Writes barycenters.png to build/demo.
Needs Matplotlib and scikit-image.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from skimage import data, transform

import mapuot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"


def shape(image: Any, size: int) -> Any:
    """A picture as a (size^2,) histogram of mass 1, dark on light ground as mass."""
    small = transform.resize(image.astype(float), (size - 8, size - 8), anti_aliasing=True)
    mass = np.pad(1 - small / small.max(), 4)
    mass[mass < 0.2] = 0
    return (mass / mass.sum()).ravel()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--size", type=int, default=48)
    options.add_argument("--reg", type=float, default=0.0008)
    options.add_argument("--steps", type=int, default=7)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    A = np.stack([shape(data.horse(), args.size), shape(~np.rot90(data.binary_blobs(64, 0.4, rng=1)), args.size)])
    M = mapuot.Grid((args.size, args.size), spacing=1 / (args.size - 1))  # squared distances between pixels
    t = np.linspace(0, 1, args.steps)[:, None]
    rows = {
        "balanced": {"reg_m": np.inf},
        "debiased": {"reg_m": np.inf, "debiased": True},
        "unbalanced, debiased": {"reg_m": 0.05, "debiased": True},
    }
    fig, axes = plt.subplots(len(rows), args.steps, figsize=(1.6 * args.steps, 1.8 * len(rows)))
    for line, (name, kind) in zip(axes, rows.items(), strict=True):
        print(f"{name}: {args.steps} barycenters of {args.size} x {args.size} pixels ...", flush=True)
        begin = time.perf_counter()
        found = mapuot.barycenter(M, A, reg=args.reg, weights=np.hstack([1 - t, t]), tol_change=1e-3, **kind)
        print(f"{name}: {found.n_passes} passes, {time.perf_counter() - begin:.1f} s")
        for axis, q in zip(line, found.q, strict=True):
            axis.imshow(q.reshape(args.size, args.size), cmap="gray_r")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name.replace(", ", ",\n"), fontsize=13)
    for axis, share in zip(axes[0], t[:, 0], strict=True):
        axis.set_title(f"t = {share:.2f}", fontsize=14)
    fig.tight_layout()
    fig.savefig(args.out / "barycenters.png", dpi=80)


if __name__ == "__main__":
    main()
