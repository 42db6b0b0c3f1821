"""passes: how often each method reads K to a certified error; and whether a certificate ever lies.

Passes of whole calls, those at larger regs included, for four families of problems, counted on one thread: the same on
every machine. A call that fails counts as CAP. The second half solves 240 problems down to reg 1e-4 by the default call
and compares the certified error with the true one, |P - P*|_1 / mass(P), by Newton's method (the oracle of the tests),
which starts at the potentials of that call.
"""

import sys
from importlib import import_module
from typing import Any

import numpy as np
from tqdm import tqdm

from . import common, peers, problems

CAP = 10_000
REGS = (0.1, 0.01, 0.001)
RHOS = (0.1, 1.0, 10.0, 100.0)
SIZES = (300, 1000)
METHODS = {  # name: (method, storage of K)
    "plain": ("sinkhorn", "float64"),
    "translation-invariant": ("translation_invariant", "float64"),
    "auto": ("auto", "float64"),
    "auto, float32 K": ("auto", "mixed"),
}
TOLS = (1e-6, 1e-9)
HARD_REGS = (0.1, 0.01, 0.001, 0.0002, 0.0001)
HARD_MASSES = (1.0, 3.0, 0.01)
HARD_SHAPE = (110, 130)
ROUNDING = 1e-9  # allowance for Newton's answer and the forming of two plans in a true error


def count(case: peers.Case, name: str, tol: float) -> int:
    """Return the passes of one call, CAP where it fails."""
    method, precision = METHODS[name]
    found = peers.ours(case, tol, method=method, precision=precision, threads=1, max_passes=CAP)
    if found.converged:
        return int(found.n_passes)
    return CAP


def grid(quick: bool) -> list[dict[str, Any]]:
    names = list(METHODS)[1 if quick else 0 :]
    cases = [
        (f, n, reg, rho) for n in SIZES[: 1 if quick else 2] for f in problems.FAMILIES for reg in REGS for rho in RHOS
    ]
    rows = []
    for family, n, reg, rho in tqdm(cases, desc="passes", file=sys.stderr):
        case = *problems.make(family, n, n, seed=1), reg, rho
        passes = {name: {f"{tol:g}": count(case, name, tol) for tol in TOLS} for name in names}
        rows.append({"family": family, "n": n, "reg": reg, "rho": rho, "passes": passes})
    return rows


def hard_case(family: str, reg: float, rho: float, mass: float) -> dict[str, Any]:
    """Solve by the default call; compare the certified with the true plan error."""
    oracle = import_module("problems")
    M, a, b = problems.make(family, *HARD_SHAPE, seed=2, mass=mass)
    result = peers.ours((M, a, b, reg, rho), 1e-6, threads=1)
    case = oracle.Case(M, a, b, reg, rho)
    best = oracle.optimum(case).plan
    true = float(np.abs(result.plan - best).sum() / result.plan.sum())
    return {"family": family, "reg": reg, "rho": rho, "mass": mass, "status": result.status, "passes": result.n_passes,
            "bound": result.error_bound, "true": true, "lies": not true <= result.error_bound + ROUNDING}  # fmt: skip


def run(args: Any) -> dict[str, Any]:
    if args.quick:
        masses = HARD_MASSES[:1]
    else:
        masses = HARD_MASSES
    cases = [(f, reg, rho, mass) for f in problems.FAMILIES for reg in HARD_REGS for rho in RHOS for mass in masses]
    with common.blas_threads(1):  # Newton's matrices are small
        rows = grid(args.quick)
        harder = [hard_case(*case) for case in tqdm(cases, desc="harder", file=sys.stderr)]
    totals = {}
    for name in rows[0]["passes"]:
        for tol in rows[0]["passes"][name]:
            found = [row["passes"][name][tol] for row in rows]
            totals[f"{name}, {tol}"] = {"geometric_mean": common.geometric_mean(found), "worst": max(found),
                                        "failed": sum(k >= CAP for k in found), "of": len(found)}  # fmt: skip
    summary = {
        "problems": len(harder),
        "not_converged": sum(row["status"] != "converged" for row in harder),
        "false_certificates": sum(row["lies"] for row in harder),
        "worst_passes": max(row["passes"] for row in harder),
        "largest_true_over_bound": max(row["true"] / max(row["bound"], 1e-300) for row in harder),
    }
    return {"totals": totals, "harder": summary, "grid": rows, "harder_cases": harder}


def tables(data: dict[str, Any]) -> str:
    rows = [[name, *(t[k] for k in ("geometric_mean", "worst", "failed", "of"))] for name, t in data["totals"].items()]
    wrong = [str(row) for row in data["harder_cases"] if row["status"] != "converged" or row["lies"]]
    counts = common.table(["method, certified error", "geometric mean of the passes", "worst", "failed", "of"], rows)
    harder = common.table(["harder problems", ""], [[key, value] for key, value in data["harder"].items()])
    return common.text_of(counts, harder, *wrong)
