"""Recolour one photograph with the palette of another, by unbalanced and by balanced optimal transport.

    python examples/color_transfer.py [--pair sklearn|skimage] [--pixels 5000] [--reg 0.02] [--reg-m 1] [--out FOLDER]

Colours sampled from both photographs are matched by entropic transport on squared distances in RGB, the largest scaled
to 1; every pixel x then moves to the mean of the palette colours y_j, weighted by b_j v_j exp(-cost(x, y_j) / reg).
Balanced transport must use the whole palette in its proportions; unbalanced transport leaves out what fits badly.
Prints the time and the error of the solve, beside those of POT where it is installed, and writes color_transfer.png
and color_transfer_gap.png to build/demo. `make demo` installs what it needs: matplotlib, and scikit-learn for its
photographs.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import mapuot
from mapuot.processor import core_count

mpl.use("Agg")
OUT = Path(__file__).resolve().parent.parent / "build" / "demo"
TOL = 1e-6  # certified relative plan error
PICTURED = (np.inf, 0.1)  # reg_m of the pictures; inf is balanced
RIVALS = (
    {"POT, default": "sinkhorn", "POT, translation-invariant": "sinkhorn_translation_invariant"}
    if find_spec("ot")
    else {}
)
STEPS = 7 + 2 * len(RIVALS)  # of the progress bar: a solve and a map of each, 2 pictures, 3 traces


def photographs(pair: str) -> tuple[Any, Any]:
    """(photograph, palette) as float RGB in [0, 1]; both ship inside PyPI packages."""
    if pair == "sklearn":
        from sklearn.datasets import load_sample_image  # noqa: PLC0415

        images = load_sample_image("china.jpg"), load_sample_image("flower.jpg")
    else:
        from skimage import data  # noqa: PLC0415

        images = data.chelsea(), data.coffee()
    return tuple(image[..., :3] / 255.0 for image in images)


def sample(image: Any, count: int, rng: Any) -> Any:
    pixels = image.reshape(-1, 3)
    return pixels[rng.choice(len(pixels), count, replace=False)]


def squared_distances(x: Any, y: Any) -> Any:
    return np.maximum((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T, 0)


class Palette:
    """The map from log v: T(x) = sum_j w_j(x) y_j / sum_j w_j(x), log w_j(x) = log v_j - |x - y_j|^2 / reg."""

    def __init__(self, y: Any, log_v: Any, reg: float, dtype: Any = np.float32) -> None:
        # |x|^2 is common to all j: one product [x, 1] @ lift gives every exponent of a block
        offset = log_v - (y * y).sum(1) / reg
        self.lift = np.vstack([2 / reg * y.T, offset - offset.max()]).astype(dtype)
        self.targets = np.hstack([y, np.ones((len(y), 1))]).astype(dtype)

    def __call__(self, x: Any, block: int = 2000) -> Any:
        image = np.empty((len(x), 3), self.lift.dtype)
        for i in range(0, len(x), block):
            part = x[i : i + block]
            weight = np.hstack([part, np.ones((len(part), 1))]).astype(self.lift.dtype) @ self.lift
            weight -= weight.max(1, keepdims=True)
            np.exp(weight, out=weight)
            moved = weight @ self.targets
            image[i : i + block] = moved[:, :3] / moved[:, 3:]
        return image

    def recolour(self, image: Any) -> Any:
        """Every pixel moved; each colour that occurs is computed once."""
        levels = np.rint(image.reshape(-1, 3) * 255).astype(np.int64) @ [1 << 16, 1 << 8, 1]
        codes, index = np.unique(levels, return_inverse=True)
        colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1) / 255
        return self(colours)[index].reshape(image.shape)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the median time of up to three calls (one if it takes longer than two seconds)."""
    times: list[float] = []
    while not times or (len(times) < 3 and sum(times) < 2):
        begin = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - begin)
    return result, float(np.median(times))


class Transfer:
    """One pair of photographs: the sampled problem, its solutions, its pictures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.threads = args, args.threads
        self.photo, self.palette = photographs(args.pair)
        rng = np.random.default_rng(args.seed)
        self.x, self.y = sample(self.photo, args.pixels, rng), sample(self.palette, args.pixels, rng)
        self.M = squared_distances(self.x, self.y)
        self.scale = self.M.max()
        self.M /= self.scale
        self.a = self.b = np.full(args.pixels, 1 / args.pixels)
        self.problem = self.M, self.a, self.b, args.reg
        self.bar = tqdm(total=STEPS, unit="step")

    def step(self, text: str) -> None:
        self.bar.set_description(f"{text:<32}")
        self.bar.refresh()

    def solve(self, reg_m: float, **options: Any) -> mapuot.Result:
        M, a, b, reg = self.problem
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
            return mapuot.solve(M, a, b, reg=reg, reg_m=reg_m, threads=self.threads, **options)

    def map(self, log_v: Any, dtype: Any = np.float32) -> Palette:
        return Palette(self.y, log_v, self.args.reg * self.scale, dtype)

    def certified_error(self, log_u: Any, log_v: Any) -> float:
        """Our certificate of POT's plan (u, v): one pass on the transposed problem starts from u and finds this v."""
        M, a, b, reg = self.problem
        one = mapuot.solve(
            M.T, b, a, reg=reg, reg_m=self.args.reg_m, method="sinkhorn", precision="float64", max_passes=1,
            tol=1e9, warm_start=(log_v, log_u),
        )  # fmt: skip
        return one.error_bound

    def run_pot(self, name: str, method: str) -> dict[str, Any]:
        self.step(name)
        M, a, b, reg = self.problem

        def call() -> Any:
            import ot  # noqa: PLC0415  not needed for the rest

            return ot.unbalanced.sinkhorn_unbalanced(a, b, M, reg, self.args.reg_m, method=method, log=True)

        (_, log), seconds = timed(call)
        error = self.certified_error(log["logu"], log["logv"])
        self.bar.update()
        return {"name": name, "seconds": seconds, "passes": len(log["err"]), "error": error, "log_v": log["logv"]}

    def run_mapuot(self) -> dict[str, Any]:
        self.step("mapuot")

        def call() -> mapuot.Result:
            result = self.solve(self.args.reg_m, tol=TOL)
            result.plan  # noqa: B018  POT returns the plan, so it is formed here as well
            return result

        result, seconds = timed(call)
        self.bar.update()
        return {"name": "mapuot", "seconds": seconds, "passes": result.n_passes, "error": result.error_bound,
                "log_v": result.log_v}  # fmt: skip

    def compare(self) -> list[dict[str, Any]]:
        """POT's two methods, where it is installed, and ours on the same threads; the largest error in 8-bit levels."""
        with threadpool_limits(self.threads), np.errstate(all="ignore"):
            rows = [*(self.run_pot(name, method) for name, method in RIVALS.items()), self.run_mapuot()]
        self.step("maps")
        self.exact = self.map(self.solve(self.args.reg_m, tol=1e-10).log_v, np.float64)(self.x)
        for row in rows:
            row["levels"] = self.levels(row["log_v"])
            self.bar.update()
        return rows

    def levels(self, log_v: Any) -> float:
        return float(np.abs(self.map(log_v, np.float64)(self.x) - self.exact).max() * 255)

    def passes_to_half_a_level(self) -> int:
        """Passes of the default method after which no sampled pixel is further than half an 8-bit level off."""
        for passes in range(1, 200):
            if self.levels(self.solve(self.args.reg_m, max_passes=passes).log_v) <= 0.5:
                return passes
        return 200

    def draw_pictures(self, path: Path) -> None:
        shown = [("photograph", self.photo), ("palette", self.palette)]
        for reg_m in PICTURED:
            self.step(f"picture, reg_m {reg_m:g}")
            moved = self.map(self.solve(reg_m, tol=1e-4).log_v).recolour(self.photo)
            balanced = "balanced: the whole palette"
            shown.append((balanced if np.isinf(reg_m) else f"unbalanced, reg_m = {reg_m:g}", moved))
            self.bar.update()
        fig, axes = plt.subplots(2, 2, figsize=(9, 6.6))
        for axis, (title, image) in zip(axes.flat, shown, strict=True):
            axis.imshow(np.clip(image, 0, 1))
            axis.set_title(title, fontsize=16)
            axis.axis("off")
        fig.tight_layout()
        fig.savefig(path, dpi=80)
        plt.close(fig)

    def draw_gap(self, path: Path) -> None:
        fig, axes = plt.subplots(1, 2, figsize=(8, 4), sharey=True)
        for method in ("sinkhorn", "translation_invariant", "auto"):
            self.step(f"trace of {method}")
            # with a callback the core returns, and the clock is read, after every pass
            options = {"method": method, "tol": 1e-9, "max_passes": 3000, "callback": lambda stat: False}
            trace = self.solve(self.args.reg_m, **options).trace
            for axis, x in zip(axes, ("n_pass", "seconds"), strict=True):
                axis.loglog([getattr(stat, x) for stat in trace], [stat.error for stat in trace], label=method)
            self.bar.update()
        axes[0].set(xlabel="passes over the matrix", ylabel="certified relative plan error")
        axes[1].set(xlabel=f"seconds, {self.threads} threads")
        for axis in axes:
            axis.axhline(TOL, color="gray", lw=0.8, ls="--")
            axis.grid(alpha=0.3)
        axes[0].legend()
        fig.tight_layout()
        fig.savefig(path, dpi=100)
        plt.close(fig)


def print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]["seconds"]
    print(f"{'':28}{'seconds':>9}{'speed-up':>10}{'passes':>8}{'certified error':>17}{'colour error':>14}")
    for row in rows:
        print(
            f"{row['name']:28}{row['seconds']:9.3f}{first / row['seconds']:9.1f}x{row['passes']:8d}"
            f"{row['error']:17.1e}{row['levels']:14.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", choices=["sklearn", "skimage"], default="sklearn")
    parser.add_argument("--pixels", type=int, default=5000, help="sampled on each side")
    parser.add_argument("--reg", type=float, default=0.02, help="in units of the largest cost")
    parser.add_argument("--reg-m", type=float, default=1.0, help="in units of the largest cost")
    parser.add_argument("--threads", type=int, default=core_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the two pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    suffix = "" if args.pair == "sklearn" else f"_{args.pair}"
    pictures = [args.out / f"color_transfer{suffix}.png", args.out / f"color_transfer{suffix}_gap.png"]

    transfer = Transfer(args)
    rows = transfer.compare()
    transfer.draw_pictures(pictures[0])
    transfer.draw_gap(pictures[1])
    half = transfer.passes_to_half_a_level()
    transfer.step("done")
    transfer.bar.close()

    m, n = transfer.M.shape
    print(f"\n{m} x {n} colours, float64 costs, reg {args.reg:g}, reg_m {args.reg_m:g} (largest cost 1), "
          f"{args.threads} threads, plan returned")  # fmt: skip
    print_table(rows)
    if not RIVALS:
        print("pip install pot, and this table compares with POT's two methods (which takes longer)")
    print("colour error: largest difference from the exact map, in 8-bit levels, over the sampled pixels")
    print(f"within half a level after {half} passes")
    print("pictures:", *(os.path.relpath(picture) for picture in pictures))


if __name__ == "__main__":
    main()
