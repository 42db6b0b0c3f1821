"""self: passes of a problem of points with themselves, which one potential solves, to a certified 1e-6.

The clouds of small-reg, 700 and 3000 points, costs of range 1: as an array, as points, to 32 neighbours (sparse), as
masses on a grid of as many nodes, and as a batch of four; reg .1 to 1e-5, reg_m .1, 1 and balanced. Of a batch the
most passes count. One thread.
"""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

import mapuot

from . import common
from .small_reg import points_of

REGS, RHOS = (0.1, 0.01, 1e-3, 1e-4, 1e-5), (0.1, 1.0, np.inf)
SIZES = {700: (28, 25), 3000: (60, 50)}  # of a cloud, and nodes of its grid


def costs(x: Any, nodes: tuple[int, int]) -> dict[str, Any]:
    """Return the costs of a cloud with itself by name, each of range 1."""
    M = (x * x).sum(1)[:, None] + (x * x).sum(1) - 2 * x @ x.T
    M = np.maximum(0.5 * (M + M.T), 0.0)
    scale = float(1 / M.max())
    near = mapuot.knn_cost(x, x, 32, scale=scale)
    grid = mapuot.Grid(nodes, scale=1 / sum((k - 1.0) ** 2 for k in nodes))
    points = mapuot.PointCloud(x, scale=scale, form=None)
    return {"array": M * scale, "points": points, "sparse": near, "grid": grid, "batch": M * scale}


def solved(kind: str, M: Any, A: Any, reg: float, rho: float) -> dict[str, Any]:
    """Return what became of one problem, or of the four of a batch."""
    begun = time.perf_counter()
    if kind == "batch":
        found: Any = mapuot.solve_batch(M, A, A, reg=reg, reg_m=rho, threads=1)
    else:
        found = mapuot.solve(M, A[0], A[0], reg=reg, reg_m=rho, threads=1)
    seconds, words = time.perf_counter() - begun, [found.how] if isinstance(found.how, str) else found.how
    together = all("one potential" in how and "potential left" not in how for how in words)
    passes, converged = int(np.max(found.n_passes)), bool(np.all(found.converged))
    return {"passes": passes, "converged": converged, "together": together, "seconds": seconds}


def rows(sizes: list[int]) -> Iterator[dict[str, Any]]:
    for n, d, clustered in product(sizes, (1, 2, 3, 10), (False, True)):
        x, _, rng = points_of(d, clustered, n)
        masses = rng.dirichlet(np.ones(n), 4)
        for (kind, M), reg, rho in product(costs(x, SIZES[n]).items(), REGS, RHOS):
            where = {"n": n, "d": d, "clustered": clustered, "kind": kind, "reg": reg, "rho": rho}
            yield where | solved(kind, M, masses, reg, rho)


def run(args: Any) -> dict[str, Any]:
    return {"rows": list(rows(list(SIZES)[: 1 if args.quick else None]))}


def tables(found: dict[str, Any]) -> str:
    """Return passes by kind and reg: geometric mean (most), and how many were not solved by one potential."""
    lines = []
    for n in sorted({r["n"] for r in found["rows"]}):
        for kind in dict.fromkeys(r["kind"] for r in found["rows"]):
            cells = [n, kind]
            for reg in REGS:
                some = [r for r in found["rows"] if (r["n"], r["kind"], r["reg"]) == (n, kind, reg)]
                passes, left = [r["passes"] for r in some], sum(not (r["together"] and r["converged"]) for r in some)
                cells.append(f"{common.geometric_mean(passes):.1f} ({max(passes)})" + f", {left} left" * bool(left))
            lines.append(cells)
    return common.table(["n", "costs", *(f"reg {common.short(reg)}" for reg in REGS)], lines)
