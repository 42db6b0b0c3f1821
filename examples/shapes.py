"""Place handwritten digits by the divergences between all pairs of them.

    python examples/shapes.py [--each 12] [--reg 0.01] [--out FOLDER]

Every digit of scikit-learn's 8 x 8 pictures is a cloud of the pixels that have ink, which is their mass; clouds have
different numbers of points. mapuot.pairwise compares all pairs, and classical scaling of the divergences places the
digits in the plane. Writes shapes.png to build/demo; needs Matplotlib and scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.offsetbox
import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import mapuot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
DIGITS = (0, 1, 3, 4, 6, 7)


def cloud(image: Any) -> tuple[Any, Any]:
    """Return the pixels of a picture that have ink, and how much, of mass 1."""
    at = np.argwhere(image > 0)
    ink = image[image > 0]
    return at / 8.0, ink / ink.sum()


def placed(divergence: Any) -> Any:
    """Return points of the plane whose squared distances are near the divergences: classical scaling."""
    centred = divergence - divergence.mean(0) - divergence.mean(1)[:, None] + divergence.mean()
    values, vectors = np.linalg.eigh(-0.5 * centred)
    return vectors[:, -2:] * np.sqrt(values[-2:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--each", type=int, default=12, help="pictures of each digit")
    options.add_argument("--reg", type=float, default=0.01)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the picture")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    chosen = np.concatenate([np.flatnonzero(labels == digit)[: args.each] for digit in DIGITS])
    pictures = images[chosen].reshape(-1, 8, 8)
    points, ink = zip(*map(cloud, pictures), strict=True)
    begin = time.perf_counter()
    divergence = mapuot.pairwise(list(points), list(ink), reg=args.reg, reg_m=1.0)
    pairs, seconds = len(points) * (len(points) - 1) // 2, time.perf_counter() - begin
    apart = divergence + np.diag(np.full(len(points), np.inf))
    right = (labels[chosen][apart.argmin(1)] == labels[chosen]).mean()
    print(f"{pairs} pairs in {seconds:.1f} s; the nearest picture is of the same digit for {right:.0%}")
    fig, axis = plt.subplots(figsize=(7, 6))
    at = placed(divergence)
    axis.scatter(*at.T, s=0)
    for where, image, label in zip(at, pictures, labels[chosen], strict=True):
        shown = mpl.offsetbox.OffsetImage(np.ma.masked_equal(image, 0), zoom=3, cmap=f"{COLOURS[DIGITS.index(label)]}s")
        axis.add_artist(mpl.offsetbox.AnnotationBbox(shown, where, frameon=False))
    axis.set(xticks=[], yticks=[], title="digits, placed by the divergences between all pairs")
    fig.tight_layout()
    fig.savefig(args.out / "shapes.png", dpi=80)


COLOURS = "Blue", "Orange", "Green", "Red", "Purple", "Grey"

if __name__ == "__main__":
    main()
