"""Train a classifier of handwritten digits with the unbalanced Wasserstein loss against cross-entropy.

    python examples/label_smoothing.py [--epochs 60] [--reg 0.02] [--reg-m 0.1] [--out FOLDER]

The loss compares the softmax of the network with the one-hot label under a cost between classes: here the squared
distance of the classes' mean images, so that a 3 taken for an 8 costs less than a 3 taken for a 0. Transport smooths
the label towards classes that look alike, as label smoothing does evenly. reg_m well below the costs keeps the gradient
of a class without mass large, as in cross-entropy; at reg_m 1 training stops at merged classes. Reports accuracy and
the mean class cost of the mistakes that remain; writes label_smoothing.png to build/demo. Needs PyTorch, scikit-learn
and Matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from mapuot.torch import sinkhorn_loss

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"


def class_cost(X: Any, y: Any) -> Any:
    """Squared distances of the class means, largest 1."""
    means = np.stack([X[y == c].mean(0) for c in range(10)])
    M = ((means[:, None] - means) ** 2).sum(2)
    return torch.tensor(M / M.max(), dtype=torch.float32)


def train(loss: Any, data: Any, epochs: int, seed: int, bar: Any) -> tuple[Any, list[float]]:
    """(network, mean training loss of each epoch)."""
    torch.manual_seed(seed)
    X, y = data
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    curve = []
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(X)).split(128):
            optimiser.zero_grad()
            value = loss(torch.softmax(net(X[index]), 1), y[index])
            value.backward()
            optimiser.step()
            total += float(value.detach()) * len(index)
        curve.append(total / len(X))
        bar.update()
    return net, curve


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=60)
    options.add_argument("--reg", type=float, default=0.02)
    options.add_argument("--reg-m", type=float, default=0.1)
    options.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    split = train_test_split(digits.data / 16, digits.target, test_size=0.4, random_state=0, stratify=digits.target)
    X, X_test = (torch.tensor(x, dtype=torch.float32) for x in split[:2])
    y, y_test = (torch.tensor(x) for x in split[2:])
    M, labels = class_cost(split[0], split[2]), torch.eye(10)
    losses = {
        "cross-entropy": lambda p, y: -torch.log(p[range(len(y)), y] + 1e-12).mean(),
        "Wasserstein": lambda p, y: sinkhorn_loss(M, p, labels[y], reg=args.reg, reg_m=args.reg_m, tol=1e-4).mean(),
    }
    curves = {}
    with tqdm(total=len(losses) * args.epochs, desc="training", unit="epoch") as bar:
        for name, loss in losses.items():
            net, curves[name] = train(loss, (X, y), args.epochs, 0, bar)
            with torch.no_grad():
                guess = net(X_test).argmax(1)
            wrong = guess != y_test
            cost = float(M[guess, y_test][wrong].mean()) if wrong.any() else 0.0
            accuracy, count = 100 * float((~wrong).float().mean()), int(wrong.sum())
            bar.write(
                f"{name:>14}: loss {curves[name][0]:.4f} -> {curves[name][-1]:.4f}, accuracy on {len(y_test)} digits "
                f"{accuracy:.1f} %, mean class cost of its {count} mistakes {cost:.3f}"
            )
    fig, axis = plt.subplots(figsize=(6, 4))
    for name, curve in curves.items():
        axis.semilogy(np.array(curve) / curve[0], label=name)
    axis.set(xlabel="epoch", ylabel="training loss, relative to the first epoch")
    axis.legend()
    fig.tight_layout()
    fig.savefig(args.out / "label_smoothing.png", dpi=110)


if __name__ == "__main__":
    main()
