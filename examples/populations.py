"""Follow a growing, branching population through ten samples of it, all at once and two by two.

    python examples/populations.py [--cells 300] [--reg 0.02] [--reg-m 0.5] [--out FOLDER]

Cells move along a stem that parts into two branches of equal mass, and double in mass on the way. One sample in the
middle has lost four fifths of one branch. mapuot.multimarginal joins all ten samples in one chain, where what came
before and after speaks against the loss, or overrules it where the mass of that sample is left free; beside it each
sample is joined with the next by mapuot.solve, and the couplings are followed one after the other, which carries the
loss on. Writes populations.png to build/demo; needs Matplotlib.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

import mapuot

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
TIMES, LOST = 10, 6  # samples, and the one that has lost most of its upper branch


def samples(cells: int, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """(clouds, masses): points of each time in the plane, and what each stands for; the mass doubles in all."""
    rng, clouds, masses = np.random.default_rng(seed), [], []
    for t in range(TIMES):
        upper = np.arange(cells) % 2 == 0
        apart = 0.12 * max(0, t - 2)
        cloud = np.c_[np.full(cells, 0.2 * t), np.where(upper, apart, -apart)] + rng.normal(0, 0.08, (cells, 2))
        if t == LOST:
            cloud = cloud[~upper | (rng.random(cells) < 0.2)]
        clouds.append(cloud)
        masses.append(np.full(len(cloud), 2 ** (t / (TIMES - 1)) / len(cloud)))
    return clouds, masses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cells", type=int, default=300)
    options.add_argument("--reg", type=float, default=0.02)
    options.add_argument("--reg-m", type=float, default=1.0)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the picture")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clouds, masses = samples(args.cells)
    costs = {(t, t + 1): mapuot.PointCloud(clouds[t], clouds[t + 1]) for t in range(TIMES - 1)}
    unsure: list[Any] = [None if t == LOST else mass for t, mass in enumerate(masses)]
    chains = {}
    for name, given in (("one chain", masses), (f"one chain, sample {LOST} free", unsure)):
        begin = time.perf_counter()
        chains[name] = mapuot.multimarginal(costs, given, reg=args.reg, reg_m=args.reg_m)
        print(f"{name}: {chains[name].n_passes} passes in {time.perf_counter() - begin:.1f} s")
    upper = [cloud[:, 1] > 0 for cloud in clouds]
    shares = {"sampled": [float(up.mean()) for up in upper]}
    for name, chain in chains.items():
        shares[name] = [float(chain.marginal(t)[upper[t]].sum() / chain.mass) for t in range(TIMES)]
    moved = masses[0] / masses[0].sum()
    shares["pair after pair"] = [float(moved[upper[0]].sum())]
    begin = time.perf_counter()
    for t in range(TIMES - 1):
        pair = mapuot.solve(costs[t, t + 1], masses[t], masses[t + 1], reg=args.reg, reg_m=args.reg_m)
        moved = pair.apply_transpose(moved / pair.row_marginal)
        shares["pair after pair"].append(float(moved[upper[t + 1]].sum()))
    print(f"pairs: {TIMES - 1} solves in {time.perf_counter() - begin:.1f} s")
    for name, values in shares.items():
        print(f"{name:24s} share of the upper branch: {' '.join(f'{x:.2f}' for x in values)}")
    draw(clouds, chains["one chain"], shares, args.out / "populations.png")


def draw(clouds: list[Any], chain: mapuot.MultiResult, shares: dict[str, list[float]], path: Path) -> None:
    """Draw the cells by where their mass ends, and below them the share of one branch over time."""
    fig, (upper, lower) = plt.subplots(2, 1, figsize=(6.6, 7.2), height_ratios=[1.3, 1], layout="constrained")
    last = TIMES - 1
    end = clouds[last][:, 1] > 0
    for t, cloud in enumerate(clouds):
        fate = end.astype(float) if t == last else chain.apply(t, last, end) / chain.marginal(t)
        dots = upper.scatter(*cloud.T, c=fate, s=5, cmap="coolwarm", vmin=0, vmax=1)
    fig.colorbar(dots, ax=upper, label="share that ends in the upper branch")
    upper.set(title="Ten samples, one plan", xticks=[], yticks=[])
    for (name, values), style in zip(shares.items(), ("k.", "C0o-", "C2s-", "C3x--"), strict=True):
        lower.plot(values, style, label=name)
    lower.axhline(0.5, color="0.8", zorder=0)
    lower.set(title=f"Left free, the damaged sample {LOST} does no harm", xlabel="sample")
    lower.set(ylabel="mass in the upper branch (true: half)", ylim=(0, 0.7))
    lower.legend(loc="lower left")
    fig.savefig(path, dpi=100)
    plt.close(fig)


if __name__ == "__main__":
    main()
