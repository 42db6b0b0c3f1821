"""Problems built backwards from their optimum: chosen potentials say plan and masses, so that nothing has to be solved.

    python -m hostile.backwards --count 20000 --seed 7      (in tests/)

Every path, method and penalty, most sides hard; each answer, converged or not, is held to its error_bound.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np
from scipy.sparse import csr_array

import mapuot

PENALTIES = ("kl", "balanced", "tv", "l2", "range")
ODDS = (0.2, 0.45, 0.08, 0.07, 0.2)
HOWS = ("dense", "float32", "points", "grid", "sparse", "batch", "stream")
METHODS = ("auto", "auto", "auto", "translation_invariant", "sinkhorn", "map-uot")


def costs(rng: Any, how: str) -> tuple[Any, Any]:
    """Return (the cost as it is given, as an array)."""
    kind = rng.integers(4)
    if how == "grid":
        nodes, target = tuple(rng.integers(2, 6, 2)), tuple(rng.integers(2, 6, 2))
        cost = mapuot.Grid(nodes, scale=10.0 ** rng.uniform(-2, 1), target=target)
        return cost, np.asarray(mapuot.problem.kinds.cost_of(cost).read(0, cost.shape[0]))
    if how == "points" or kind == 0:  # heavy tails
        (m, n), d = rng.integers(2, 30, 2), int(rng.choice([1, 2, 3, 8]))
        x, y = rng.standard_t(2, (m, d)), rng.standard_t(2, (n, d))
        scale = 10.0 ** rng.uniform(0.5, 4) / ((x[:, None] - y) ** 2).sum(-1).max()
        cloud = mapuot.PointCloud(x, y, scale=scale, form=None if rng.random() < 0.5 else "auto")
        return (cloud if how == "points" else np.asarray(cloud)), np.asarray(cloud)
    if kind == 1:  # blocks that hardly exchange mass
        rows, cols = (np.repeat(np.arange(k), rng.integers(1, 9, k)) for k in [int(rng.integers(2, 5))] * 2)
        M = rng.random((len(rows), len(cols))) * rng.choice([1, 5, 20])
        apart = np.abs(rows[:, None] - cols) if rng.random() < 0.5 else rows[:, None] != cols
        return (M := M + apart * rng.uniform(4, 30)), M
    n = int(rng.integers(5, 40))  # a chain
    x, y = np.sort(rng.random(n)), np.sort(rng.random(n))
    return (M := (x[:, None] - y) ** 2 / 10 ** rng.uniform(-4.5, -2)), M


def side(rng: Any, kind: str, log_u: Any, r: Any, rho: float) -> tuple[Any, Any]:
    """Return (the masses for which r is optimal beside log u, reg_m), at reg 1, log u in its domain."""
    if kind == "kl":
        return r * np.exp(log_u / rho), rho
    if kind == "tv":
        return r * np.where(log_u >= rho, 1.5, np.where(log_u <= -rho, 0.5, 1.0)), rho
    if kind == "l2":
        return r + log_u / rho, rho
    if kind == "range":
        return r / np.where(log_u > 0, 1 - rho, np.where(log_u < 0, 1 + rho, rng.uniform(1 - rho, 1 + rho))), rho
    return r, np.inf


def potential(rng: Any, kind: str, length: int) -> tuple[Any, float]:
    """Return (log u, reg_m), log u in the domain of the penalty; a part of those with kinks are there."""
    log_u = rng.normal(size=length) * rng.choice([0, 0.3, 3])
    rho = float(rng.uniform(0.01, 0.9) if kind == "range" else 10.0 ** rng.uniform(-1, 2))
    if kind == "range":
        log_u = np.where(rng.random(length) < 0.4, 0.0, log_u)
    return (np.clip(log_u, -rho, rho) if kind == "tv" else log_u), rho


def posed(rng: Any) -> tuple[Any, dict[str, Any], Any, str] | None:
    """Return (cost, arguments, the optimal plan, how); None where the potentials drawn leave float64."""
    how = str(rng.choice(HOWS))
    given, M = costs(rng, how)
    if how == "float32":
        M = (given := np.asarray(M, np.float32)).astype(float)
    kinds = [str(rng.choice(PENALTIES, p=ODDS)) for _ in range(2)]
    if how == "grid":
        kinds = [x if x == "kl" else "balanced" for x in kinds]
    (log_u, rho), (log_v, rho_v) = (potential(rng, kind, k) for kind, k in zip(kinds, M.shape, strict=True))
    P = np.exp((log_u[:, None] + log_v - M).astype(np.longdouble))
    (a, reg_m), (b, reg_n) = side(rng, kinds[0], log_u, P.sum(1), rho), side(rng, kinds[1], log_v, P.sum(0), rho_v)
    a, b = np.asarray(a, float), np.asarray(b, float)
    if not (min(a.min(), b.min()) > 1e-250 and np.isfinite(a.sum() + b.sum())):
        return None
    if kinds == ["balanced", "balanced"]:
        b *= a.sum() / b.sum()
    call: dict[str, Any] = {"a": a, "b": b, "reg": 1.0, "reg_m": (reg_m, reg_n), "penalty": tuple(kinds)}
    call |= {"reference": "uniform", "tol": float(10.0 ** rng.uniform(-8, -0.5)), "method": str(rng.choice(METHODS))}
    call["max_passes"] = int(rng.choice([3, 10, 40, 3000]))
    if rng.random() < 0.3:
        call["precision"] = str(rng.choice(["mixed", "float64"]))
    if rng.random() < 0.3:  # near the optimum, but for a half of the columns
        call["warm_start"] = log_u, log_v + (rng.random(len(b)) < 0.5) * 10.0 ** rng.uniform(-6, 0)
    return given, call, P, how


def answer(given: Any, call: dict[str, Any], how: str) -> Any:
    """Return the result of the call, by the path ``how``."""
    if how in ("points", "grid", "sparse", "stream", "batch") and call["method"] == "map-uot":
        call["method"] = "auto"
    if how == "grid":
        call.pop("precision", None)
    if how == "sparse":
        given = csr_array(given + 1e-300)
    if how == "stream":
        whole = given
        given = lambda i0, i1: whole[i0:i1]  # noqa: E731
    if how == "batch":
        two = {name: np.stack([call.pop(name)] * 2) for name in ("a", "b")}
        call.pop("warm_start", None)
        return mapuot.solve_batch(given, two["a"], two["b"], **call)[1]
    return mapuot.solve(given, **call)


def trial(seed: int) -> tuple[str, float, str] | None:
    """Return (the status, the true error over its bound, what it was); None where nothing was posed."""
    rng = np.random.default_rng([36, seed])
    drawn = posed(rng)
    if drawn is None:
        return None
    given, call, P, how = drawn
    words = f"{how} {call['penalty']} {call['method']} tol {call['tol']:.1e} {P.shape}"
    try:
        result = answer(given, call, how)
    except (ValueError, NotImplementedError) as error:
        return "refused", 0.0, f"{words}: {error}"
    plan = result.plan.toarray() if how == "sparse" else np.asarray(result.plan)
    mass = float(plan.sum())
    rounding = 1e-12 if plan.dtype == np.float64 else 2.0**-24
    error = float(np.abs(plan - P).sum()) / mass - rounding if mass > 0 else 0.0
    words += f": {result.how}, {result.n_passes} passes"
    return str(result.status), error / max(result.error_bound, 1e-300), words


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hostile.backwards", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; each has the next one")
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")
    counts, worst, false = Counter[str](), 0.0, 0
    for seed in range(args.seed, args.seed + args.count):
        if (found := trial(seed)) is None:
            continue
        status, ratio, text = found
        counts[status] += 1
        worst, false = max(worst, ratio), false + (ratio > 1)
        if ratio > 1 or status in ("stalled", "not finite", "underflow"):
            print(f"{'FALSE' if ratio > 1 else status} {seed}: {ratio:.3g} of the bound, {text}", flush=True)
    print(f"{sum(counts.values())} problems, {false} false, error / bound {worst:.3f} at most, {dict(counts)}")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
