"""kept: whole calls at a small reg with kept pairs and with all, beside exact solvers and Newton's method elsewhere.

The clouds of small-reg; reg over the range of M 1e-3 to 2e-6. Both sides are KL of reg_m 1, or balanced (masses alike).
Seconds of the processor on one thread, MOST passes at most, the least of two calls up to ALONE points; of more points,
where no other solver ends, of one call, and from MANY on of the clouds in 3 dimensions. Beside balanced ones: POT's
`emd`, and Newton's method on a sparse Hessian after Sinkhorn's iterations (SNS: Tang, Shavsky, Zhang, Chen, Ying 2024),
as long as it takes to a marginal error of 1e-6. Beside KL: `mm_unbalanced` of POT, as long as it takes to our upper
bound on the value without entropy, MOST_TIMES as long as we at most. ``error`` is how far that value may be from ours,
by our bounds or `emd`.
"""

import time
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

import mapuot
from bench import common, small_reg
from mapuot.ascend.settings import STAGES

REGS = (1e-3, 2e-4, 2e-5, 2e-6)
MOST = 1500
MOST_TIMES = 20
ALONE = 700
MANY = 10_000
NEEDS = ("ot",)


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    found = call()
    return time.process_time() - begun, found


def sns(M: Any, a: Any, b: Any, reg: float, most: float) -> float:
    """Seconds to a marginal error of 1e-6, inf where it takes more than ``most``."""
    begun = time.process_time()
    f = np.zeros(len(a))
    g = np.zeros(len(b))
    for k in range(10_000):
        P = np.exp((f[:, None] + g - M) / reg)
        left = np.concatenate([a - P.sum(1), b - P.sum(0)])
        if np.abs(left).sum() < 1e-6:
            return time.process_time() - begun
        if time.process_time() - begun > most or not np.isfinite(left).all():
            break
        if k < 20:  # in logarithms
            for x, y, w, axis in ((f, g, a, 1), (g, f, b, 0)):
                z = ((y if axis else y[:, None]) - M) / reg
                top = z.max(axis, keepdims=True)
                x[:] = reg * (np.log(w) - np.log(np.exp(z - top).sum(axis)) - top.squeeze(axis))
            continue
        kept = sparse.csr_array(np.where(np.quantile(P, 1 - 10 / len(b)) < P, P, 0.0))
        H = sparse.block_array([[sparse.diags_array(P.sum(1)), kept], [kept.T, sparse.diags_array(P.sum(0))]])
        step = splu((H + 1e-12 * sparse.eye_array(sum(M.shape))).tocsc()).solve(left)
        step *= reg * min(1.0, 3 / np.abs(step).max())
        f, g = f + step[: len(f)], g + step[len(f) :]
    return np.inf


def mm(M: Any, a: Any, b: Any, goal: float, most: float) -> float:
    """Seconds of `mm_unbalanced` down to a value, inf where it takes more than ``most``."""
    import ot

    P, seconds = None, 0.0
    while seconds < most:
        call = lambda P=P: ot.unbalanced.mm_unbalanced(a, b, M, 1.0, div="kl", G0=P, numItermax=100, stopThr=0)  # noqa: E731
        more, P = clock(call)
        seconds += more
        r = P.sum(1)
        s = P.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            kl = sum(np.where(x > 0, x * np.log(x / w), 0.0).sum() - x.sum() + w.sum() for x, w in ((r, a), (s, b)))
        if (P * M).sum() + kl <= goal:
            return seconds
    return np.inf


def one(M: Any, a: Any, b: Any, reg: float, rho: float) -> dict[str, Any]:
    import ot

    calls = lambda: mapuot.solve(M, a, b, reg=reg, reg_m=rho, threads=1, max_passes=MOST)  # noqa: E731
    times: dict[float, list[float]] = {STAGES.kept_below: [], 0.0: []}
    answers: dict[float, Any] = {}
    for below in (0.0, *times, *times) if len(a) <= ALONE else times:  # in turns; the first call fills the caches
        with STAGES.using(kept_below=below):
            more, answers[below] = clock(calls)
            times[below].append(more)
    found, other = (answers[x] for x in times)
    seconds, whole = map(min, times.values())
    row = {"seconds": seconds, "all": whole, "passes": found.n_passes, "status": found.status, "how": found.how}
    row |= {"status_all": other.status, "passes_all": other.n_passes}
    low, high = found.unregularised_bounds()
    if len(a) > ALONE:
        if np.isfinite(rho):
            row["error"] = high / low - 1
        return row
    if np.isfinite(rho):
        return row | {"error": high / low - 1, "mm": mm(M, a, b, high, MOST_TIMES * seconds)}
    row["emd"], cost = clock(lambda: ot.emd2(a, b, M, numItermax=10_000_000))
    return row | {"error": found.cost / cost - 1, "sns": sns(M, a, b, reg, MOST_TIMES * seconds)}


def run(args: Any) -> dict[str, Any]:
    rows = []
    n = args.size or 700
    warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
    if n < MANY:
        dimensions = (1, 2, 3, 10)
    else:
        dimensions = (3,)
    if args.quick:
        dimensions = (2,)
    for d, clustered in product(dimensions, (False, True)):
        M, a, b = small_reg.clouds(d, clustered, n)
        mapuot.solve(M, a, b, reg=0.1, reg_m=1.0, threads=1)  # memory is new to the first call
        for reg, rho in product(REGS, (1.0, np.inf)):
            row = one(M, a, b / 1.2 if np.isinf(rho) else b, reg, rho)
            rows.append({"n": n, "d": d, "clustered": clustered, "reg": reg, "rho": rho, **row})
            print(rows[-1], flush=True)
    return {"rows": rows}


def tables(data: dict[str, Any]) -> str:
    """Geometric means over the clouds; in brackets the largest ratio, and how many of the others ended in time."""
    header = ["n", "reg_m", "reg / range(M)", "s", "of all pairs", "unconverged, of all pairs"]
    header += ["value off by", "exact / ours", "SNS / ours"]
    rows = []
    every = [{k: np.inf if x == "inf" else x for k, x in row.items()} for row in data["rows"]]
    for n, rho, reg in sorted({(r["n"], r["rho"], r["reg"]) for r in every}, key=lambda key: (*key[:2], -key[2])):
        some = [r for r in every if (r["n"], r["rho"], r["reg"]) == (n, rho, reg)]
        ratios = [r["seconds"] / r["all"] for r in some]
        open_ones = [sum(r[key] != "converged" for r in some) for key in ("status", "status_all")]
        cells = [n, "hard" if rho == np.inf else rho, common.short(reg)]
        cells.append(common.three(common.geometric_mean([r["seconds"] for r in some])))
        cells.append(f"{common.geometric_mean(ratios):.2f} ({max(ratios):.2f})")
        off = max((abs(r["error"]) for r in some if "error" in r), default=None)
        cells += [f"{open_ones[0]}, {open_ones[1]} of {len(some)}", "-" if off is None else f"{off:.0e}"]
        for key in ("emd" if rho == np.inf else "mm", "sns"):
            times = [r[key] / r["seconds"] for r in some if r.get(key, np.inf) < np.inf]
            cells.append(f"{common.geometric_mean(times):.2g} ({len(times)})" if times else "-")
        rows.append(cells)
    return common.table(header, rows)
