"""calls: POT's functions as programs call them, patched and as they are, on the problems of minibatches.

Squared distances between points of the plane, as they are or divided by their largest, uniform masses. Both answers are
compared with a solve to 1e-11 before anything is timed; the calls of a row are timed in turn. Where POT breaks off
(exp(-M / reg) underflows) its time is that of the failure, and the row counts for no mean.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

import mapuot
from mapuot import pot
from mapuot.pot import patching

from . import common, peers, problems

SIZES, REGS, RHOS = (64, 128, 256, 500), (0.05, 0.1, 0.01), (0.5, 1.0)
QUICK_SIZES = (64, 128)
EXACT, WRONG = 1e-11, 1e-4  # tol of the reference; error of ours that stops the benchmark
BROKEN = 0.5  # POT's error from which it counts as having failed

Call = Callable[[], Any]
Row = dict[str, Any]


def minibatch(n: int, scaled: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng([n, 7])
    M = problems.squared_distances(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)) + 0.5)
    return M / M.max() if scaled else M, np.full(n, 1.0 / n)


class Switch:
    """POT with its own functions or with ours, back and forth: what calls other functions of POT must find its own."""

    def __init__(self) -> None:
        functions = list(patching.installed.values())
        ours_of = {id(ours): (theirs, ours) for theirs, ours in functions}
        self.holders = [
            (module, key, *ours_of[id(value)])
            for name, module in list(sys.modules.items())
            if name == "ot" or name.startswith("ot.")
            for key, value in list(vars(module).items())
            if id(value) in ours_of
        ]

    def calls(self, call: Call) -> tuple[Call, Call]:
        """(call with POT's functions, call with ours)."""
        return partial(self.run, call, 2), partial(self.run, call, 3)

    def run(self, call: Call, which: int) -> Any:
        for holder in self.holders:
            setattr(holder[0], holder[1], holder[which])
        return call()


# ---- what is called, with POT's functions and with ours; each call returns the plan or what stands for it ----


def plans(name: str, M: Any, a: Any, reg: float, rho: float) -> tuple[Call, Call]:
    theirs, ours = (partial(function, a, a, M, reg, rho) for function in patching.installed[name])
    return theirs, ours


def barycenters(reg: float) -> tuple[tuple[Call, Call], Any]:
    """The calls, and the barycenter to a certified 1e-10."""
    import ot

    x = np.linspace(0, 1, 200)
    A = np.exp(-((x[:, None] - np.array([0.2, 0.4, 0.6, 0.8])) ** 2) / 0.01) + 1e-3
    M = (x[:, None] - x) ** 2
    exact = mapuot.barycenter(M, A.T, reg=reg, reg_m=1.0, tol=1e-10).q
    return Switch().calls(lambda: ot.unbalanced.barycenter_unbalanced(A, M, reg, 1.0)), exact


def adaptation(n: int, max_iter: int, budget: float) -> Row:
    import ot

    from mapuot.da import UnbalancedSinkhornTransport

    rng = np.random.default_rng(n)
    xs, xt = rng.normal(size=(n, 2)), rng.normal(size=(n, 2)) + 0.5

    def fit() -> Any:
        estimator = ot.da.UnbalancedSinkhornTransport(reg_e=0.1, reg_m=1.0, max_iter=max_iter, norm="max")
        return estimator.fit(Xs=xs, Xt=xt).coupling_

    exact = UnbalancedSinkhornTransport(reg_e=0.1, reg_m=1.0, norm="max", tol=EXACT).fit(xs, Xt=xt).coupling_
    return row_of(f"da, max_iter {max_iter}", Switch().calls(fit), exact, budget, n=n, reg=0.1)


def solves(n: int) -> tuple[Call, Call]:
    import ot

    M, a = minibatch(n, True)
    return Switch().calls(lambda: ot.solve(M, a, a, reg=0.1, unbalanced=1.0).plan)


# ---- a row ----


def error(found: Any, exact: Any) -> float:
    size = float(np.abs(found - exact).sum() / np.abs(exact).sum())
    return size if np.isfinite(size) else np.inf


def row_of(label: str, calls: tuple[Call, Call], exact: Any, budget: float, **words: Any) -> Row:
    """Parity, then times; ``exact`` None: POT's answer is the reference."""
    theirs, ours = (peers.quiet(call) for call in calls)
    errors = {"POT": error(theirs, theirs if exact is None else exact)}
    errors["mapuot"] = error(ours, theirs if exact is None else exact)
    if not errors["mapuot"] < WRONG:
        raise RuntimeError(f"{label} {words}: mapuot's answer is off by {errors['mapuot']}")
    times = peers.quiet(lambda: common.interleave(dict(zip(("POT", "mapuot"), calls, strict=True)), budget, (3, 200)))
    row = {"call": label, **words, "error": errors, "seconds": common.summaries(times)}
    return row | {
        "speedup": min(times["POT"]) / min(times["mapuot"]),
        "broken": errors["POT"] > BROKEN,
        "judged": exact is not None,
    }


def cases(sizes: tuple[int, ...]) -> list[Callable[[float], Row]]:
    made: list[Callable[[float], Row]] = []

    def plan_row(name: str, n: int, scaled: bool, reg: float, rho: float, budget: float) -> Row:
        M, a = minibatch(n, scaled)
        exact = mapuot.solve(M, a, a, reg=reg, reg_m=rho, tol=EXACT).plan
        words = {"n": n, "scaled": scaled, "reg": reg, "rho": rho}
        return row_of(name, plans(name, M, a, reg, rho), exact, budget, **words)

    for name in ("sinkhorn_knopp_unbalanced", "sinkhorn_unbalanced_translation_invariant"):
        shapes = [(n, scaled, reg, rho) for n in sizes for scaled in (True, False) for reg in REGS for rho in RHOS]
        made += [partial(plan_row, name, *shape) for shape in shapes]
    for reg in (0.01, 0.05):
        made.append(lambda budget, reg=reg: row_of("barycenter_unbalanced", *barycenters(reg), budget, reg=reg))
    for n in (64, 256):
        for count in (10, 1000):
            made.append(partial(adaptation, n, count))
        made.append(lambda budget, n=n: row_of("ot.solve", solves(n), None, budget, n=n))
    return made


def run(args: Any) -> dict[str, Any]:
    sizes = QUICK_SIZES if args.quick else SIZES
    with common.blas_threads(args.threads), pot.patched():
        rows = [case(0.1 if args.quick else 0.5) for case in tqdm(cases(sizes), file=sys.stderr)]
    means = {}
    for label in dict.fromkeys(row["call"] for row in rows):
        found = [row for row in rows if row["call"] == label and not row["broken"]]
        speed = [row["speedup"] for row in found]
        judged = [row["error"] for row in found if row["judged"]]
        worse = sum(error["mapuot"] > max(error["POT"], 10 * EXACT) for error in judged)
        means[label] = {"mean": common.geometric_mean(speed), "least": min(speed), "rows": len(found), "worse": worse}
    return {"threads": args.threads, "calls": rows, "by_call": means}


def tables(data: dict[str, Any]) -> str:
    """Minima of one call; errors are relative L1, without a reference those of mapuot to POT's answer."""
    header = ["call", "n", "scaled", "reg", "reg_m", "POT us", "ours us", "x", "POT's error", "ours"]
    rows = [
        [r["call"], *(r.get(key, "") for key in ("n", "scaled", "reg", "rho")),
         *(f"{1e6 * r['seconds'][k]['min']:.0f}" for k in ("POT", "mapuot")),
         f"{r['speedup']:.1f}" + " POT fails" * r["broken"], *(f"{r['error'][k]:.1e}" for k in ("POT", "mapuot"))]
        for r in data["calls"]
    ]  # fmt: skip
    means = [
        [label, *(mean[key] for key in ("mean", "least", "rows", "worse"))] for label, mean in data["by_call"].items()
    ]
    total = common.table(["call", "geometric mean of x", "least", "problems", "mapuot's error is the larger"], means)
    return common.text_of(common.table(header, rows), total)
