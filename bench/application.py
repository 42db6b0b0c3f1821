"""application: two whole programs, and the share of unbalanced transport in them, with POT and with mapuot.

colour  the colour transfer of examples/color_transfer.py: read, sample, costs, transport, map of all pixels
digits  domain adaptation on scikit-learn's digits: the target images are faint and noisy, and rare in five classes; the
        source moves onto them by the barycentric map and trains a nearest-neighbour classifier, judged on the target
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import common, peers

COLOUR, DIGITS = (0.02, 1.0), (0.01, 0.02)  # reg, rho


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now


def transport(solver: str, problem: tuple[Any, ...], threads: int) -> tuple[Any, Any]:
    """(plan, log v): mapuot's default call, or POT's."""
    if solver == "mapuot":
        result = peers.our_solve(problem, 1e-6, threads)
        return result.plan, result.log_v
    import ot

    M, a, b, reg, rho = problem
    plan, log = ot.unbalanced.sinkhorn_unbalanced(a, b, M, reg, rho, log=True)
    return plan, log["logv"]


def colour(solver: str, args: argparse.Namespace) -> dict[str, Any]:
    demo, rng, clock = common.module_at("examples/color_transfer.py"), np.random.default_rng(0), Clock()
    photo, palette = demo.photographs("sklearn")
    clock.lap("read")
    count = 1000 if args.quick else 5000
    x, y = demo.sample(photo, count, rng), demo.sample(palette, count, rng)
    M = demo.squared_distances(x, y)
    scale = M.max()
    M /= scale
    weights = np.full(count, 1 / count)
    clock.lap("costs")
    _, log_v = transport(solver, (M, weights, weights, *COLOUR), args.threads)
    clock.lap("transport")
    image = demo.Palette(y, log_v, COLOUR[0] * scale).recolour(photo)
    clock.lap("map")
    return {"seconds": clock.seconds, "result": float(np.abs(image - photo).mean())}


def digits_domains() -> tuple[Any, ...]:
    """Source images and labels; target images, faint and noisy, with classes 5 to 9 at a quarter of their number."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = data.images / 16.0, data.target
    source, target = np.arange(0, len(labels), 2), np.arange(1, len(labels), 2)
    target = target[(labels[target] < 5) | (target % 8 == 1)]
    faint = 0.3 * images[target] + 0.2 * np.random.default_rng(0).random(images[target].shape)
    flat = [block.reshape(len(block), -1) for block in (images[source], faint)]
    return flat[0], labels[source], flat[1], labels[target]


def nearest(train: Any, labels: Any, test: Any) -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(1).fit(train, labels).predict(test)


def digits(solver: str, args: argparse.Namespace) -> dict[str, Any]:
    from scipy.spatial.distance import cdist

    clock = Clock()
    source, labels, target, truth = digits_domains()
    clock.lap("read")
    M = cdist(source, target, "sqeuclidean")
    M /= M.max()
    a, b = np.full(len(source), 1 / len(source)), np.full(len(target), 1 / len(target))
    clock.lap("costs")
    plan, _ = transport(solver, (M, a, b, *DIGITS), args.threads)
    clock.lap("transport")
    moved = plan @ target / plan.sum(1)[:, None]
    clock.lap("map")
    accuracy = float(np.mean(nearest(moved, labels, target) == truth))
    clock.lap("classify")
    balanced = peers.our_solve((M, a, b, DIGITS[0], np.inf), 1e-3, args.threads).barycentric_map(target)
    others = {"untransported": source, "balanced": balanced}
    found = {name: float(np.mean(nearest(train, labels, target) == truth)) for name, train in others.items()}
    return {"seconds": clock.seconds, "result": accuracy, **found}


PROGRAMS = {"colour": colour, "digits": digits}


def run(args: Any) -> dict[str, Any]:
    rows = []
    with common.blas_threads(args.threads), np.errstate(all="ignore"):
        for name, program in PROGRAMS.items():
            for solver in ("POT", "mapuot"):
                program(solver, args)  # imports, first touch
                repeats = [program(solver, args) for _ in range(1 if args.quick else 3)]
                best = min(repeats, key=lambda r: sum(r["seconds"].values()))
                total = sum(best["seconds"].values())
                share = best["seconds"]["transport"] / total
                rows.append({"name": name, "solver": solver, "total": total, "share": share, **best})
    check(rows)
    return {"applications": rows}


def check(rows: list[dict[str, Any]]) -> None:
    """Both solvers lead to the same result."""
    for name in PROGRAMS:
        results = [r["result"] for r in rows if r["name"] == name]
        assert max(results) - min(results) < 5e-3, f"{name}: {results}"


def report(data: dict[str, Any]) -> str:
    rows = [
        [r["name"], r["solver"], f"{r['total']:.3f}", f"{r['seconds']['transport']:.3f}", f"{100 * r['share']:.0f} %",
         f"{r['result']:.4f}", *(f"{r[key]:.4f}" if key in r else "" for key in ("untransported", "balanced"))]
        for r in data["applications"]
    ]  # fmt: skip
    text = common.table(
        ["program", "solver", "seconds", "transport", "share", "result", "untransported", "balanced"], rows
    )
    for name in PROGRAMS:
        pot, ours = (r for r in data["applications"] if r["name"] == name)
        text += f"\n{name}: whole program {pot['total'] / ours['total']:.1f}x faster"
    return text


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["applications"]
    with common.figure(path, width=8) as axes:
        axis, left = axes[0][0], np.zeros(len(rows))
        names = [f"{r['name']}, {r['solver']}: {r['total']:.2g} s" for r in rows]
        for stage in ("read", "costs", "transport", "map", "classify"):
            values = np.array([100 * r["seconds"].get(stage, 0.0) / r["total"] for r in rows])
            axis.barh(names, values, left=left, label=stage)
            left += values
        axis.invert_yaxis()
        axis.set(xlabel="share of the program's time, %")
        axis.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
