"""passes: how often each method reads K to reach a given error in the potentials; and whether a certificate ever lies.

The error of an iterate against Newton's answer is, named "log", the larger of max_i |log u_i - log u*_i| and
max_j |log v_j - log v*_j| and, named "cost", reg times that: the error of the potentials f and g, in units of range(M).
"certified" is the error bound that stops a solve. To each tolerance three times Newton's last step is added, the
rounding of the answer itself (1e-9 at rho / reg = 1e5). Counts are exact up to 100 passes and rounded up by at most 1 %
beyond; a run that stalls or makes CAP passes has failed and counts as CAP. The second half solves 240 problems down to
reg 1e-4 by the default call and compares the true with the certified error.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import mapuot
from mapuot.ascend.loop import Run
from mapuot.backends import Stats, cpu
from mapuot.problem.problem import Problem
from mapuot.route import strategy

from . import common, newton, problems

CAP = 10_000
GOALS = {"log 1e-6": 1e-6, "log 1e-9": 1e-9, "cost 1e-6": 1e-6, "certified 1e-6": 1e-6}
REGS, RHOS, SIZES = (0.1, 0.01, 0.001), (0.1, 1.0, 10.0, 100.0), (300, 1000)
METHODS = {  # name: (method, storage of K)
    "plain": ("sinkhorn", "float64"),
    "translation-invariant": ("translation_invariant", "float64"),
    "auto": ("auto", "float64"),
    "auto, float32 K": ("auto", "mixed"),
}
HARD_REGS, HARD_MASSES, HARD_SHAPE = (0.1, 0.01, 0.001, 0.0002, 0.0001), (1.0, 3.0, 0.01), (110, 130)
ROUNDING = 1e-9  # what Newton's answer and the forming of two plans may add to a true error


class Reached(Exception):  # noqa: N818
    """The last tolerance is reached: no need to go on."""


def errors(stats: Stats, potentials: Any, answer: Any, reg: float) -> dict[str, float]:
    floor = 3 * answer.step
    pairs = zip(potentials, (answer.log_u, answer.log_v), strict=True)
    error = max(np.abs(x - y).max() for x, y in pairs) - floor
    return {"log": error, "cost": reg * error, "certified": stats.error}


def watched(answer: Any, reg: float, goals: dict[str, float]) -> tuple[Any, dict[str, int]]:
    """A backend module whose workspace notes at which pass the iterate first meets each goal."""
    reached: dict[str, int] = {}
    made = 0

    class Watched(cpu.workspace.Workspace):
        def iterate(self, count: int) -> list[Stats]:
            nonlocal made
            stats = super().iterate(min(count, max(1, made // 100)))
            made += len(stats)
            if self.problem.reg == reg:
                found = errors(stats[-1], self.potentials(), answer, reg)
                for goal, tol in goals.items():
                    if found[goal.split()[0]] <= tol:
                        reached.setdefault(goal, made)
                if len(reached) == len(goals):
                    raise Reached
            return stats

    words = {name: getattr(cpu, name) for name in cpu.__all__}
    return types.SimpleNamespace(**{**words, "Workspace": Watched}), reached


def count_passes(arrays: Any, reg: float, rho: float, name: str, answer: Any) -> dict[str, Any]:
    """Passes of the library's own loop to each goal; CAP where it is not reached."""
    method, precision = METHODS[name]
    goals = {goal: tol for goal, tol in GOALS.items() if precision == "float64" or tol >= 1e-6}
    problem = Problem.from_arrays(*arrays, reg, rho, "kl", "product", cpu)
    options = strategy.make_options(method, precision, 1e-6, None, 1)
    options = dataclasses.replace(options, tol=-1.0, tol_gap=-1.0)  # never stop by itself
    module, reached = watched(answer, reg, goals)
    run = Run(module, CAP)
    m, n = problem.shape
    try:
        result = strategy.carry_out(run, problem, options, (np.zeros(m), np.zeros(n)), escalate=False)
        ended = result.status
    except Reached:
        ended = "reached"
    rejected = sum(stat.rejected for stat in run.trace)
    passes = {goal: reached.get(goal, CAP) for goal in goals}
    return {"passes": passes, "ended": ended, "rejected": rejected}


def grid(quick: bool) -> list[dict[str, Any]]:
    sizes = SIZES[:1] if quick else SIZES
    cases = [(f, n, reg, rho) for n in sizes for f in problems.FAMILIES for reg in REGS for rho in RHOS]
    rows = []
    for family, n, reg, rho in tqdm(cases, desc="passes", file=sys.stderr):
        arrays = problems.make(family, n, n, seed=1)
        answer = newton.solve(*arrays, reg, rho)
        row = {"family": family, "n": n, "reg": reg, "rho": rho, "newton_step": answer.step}
        for name in METHODS:
            if not (quick and name == "plain"):
                row[name] = count_passes(arrays, reg, rho, name, answer)
        rows.append(row)
    return rows


def aggregate(rows: list[dict[str, Any]], name: str, goal: str) -> dict[str, Any]:
    found = [row[name]["passes"][goal] for row in rows if goal in row.get(name, {}).get("passes", {})]
    if not found:
        return {}
    failed = sum(count >= CAP for count in found)
    worst = max(found)
    return {"geometric_mean": common.geometric_mean(found), "worst": worst, "failed": failed, "of": len(found)}


def hard_case(family: str, reg: float, rho: float, mass: float) -> dict[str, Any]:
    """Solve by the default call; true and certified relative plan error, |P - P*|_1 / mass(P)."""
    M, a, b = problems.make(family, *HARD_SHAPE, seed=2, mass=mass)
    row = {"family": family, "reg": reg, "rho": rho, "mass": mass}
    answer = newton.solve(M, a, b, reg, rho)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mapuot.solve(M, a, b, reg, rho, threads=1)
    plan = result.plan
    true = float(np.abs(plan - answer.P).sum() / plan.sum())
    return {
        **row,
        "newton_step": answer.step,
        "status": result.status,
        "passes": result.n_passes,
        "bound": result.error_bound,
        "true": true,
        "finite": bool(np.isfinite(plan).all()),
        "lies": not true <= result.error_bound + ROUNDING,
        "warned": [str(w.message) for w in caught],
    }


def hard(quick: bool) -> list[dict[str, Any]]:
    masses = HARD_MASSES[:1] if quick else HARD_MASSES
    cases = [(f, reg, rho, mass) for f in problems.FAMILIES for reg in HARD_REGS for rho in RHOS for mass in masses]
    return [hard_case(*case) for case in tqdm(cases, desc="harder", file=sys.stderr)]


def run(args: Any) -> dict[str, Any]:
    with common.blas_threads(1):  # Newton's Cholesky is small
        rows, harder = grid(args.quick), hard(args.quick)
    totals = {name: {goal: found for goal in GOALS if (found := aggregate(rows, name, goal))} for name in METHODS}
    worst = max(harder, key=lambda row: row["true"] / max(row["bound"], 1e-300))
    summary = {
        "problems": len(harder),
        "not_converged": sum(row["status"] != "converged" for row in harder),
        "not_finite": sum(not row["finite"] for row in harder),
        "false_certificates": sum(row["lies"] for row in harder),
        "worst_passes": max(row["passes"] for row in harder),
        "largest_true_over_bound": worst["true"] / worst["bound"],
    }
    return {"totals": totals, "harder": summary, "grid": rows, "harder_cases": harder}


def report(data: dict[str, Any]) -> str:
    rows = [
        [name, goal, t["geometric_mean"], t["worst"], f"{t['failed']} of {t['of']}"]
        for name, goals in data["totals"].items()
        for goal, t in goals.items()
    ]
    lines = [common.table(["method", "goal", "geometric mean", "worst", "failed"], rows), "", "harder problems:"]
    lines += [f"  {key}: {common.cell(value)}" for key, value in data["harder"].items()]
    for row in data["harder_cases"]:
        if row["status"] != "converged" or row["lies"] or not row["finite"]:
            lines.append(f"  !! {row}")
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, columns=2) as axes:
        left, right = axes[0]
        for name in METHODS:
            counts = sorted(row[name]["passes"]["log 1e-6"] for row in data["grid"] if name in row)
            if counts:
                left.step(counts, np.arange(1, len(counts) + 1) / len(counts), where="post", label=name)
        left.set(xscale="log", xlabel="passes over K to 1e-6 in the potentials", ylabel="share of the problems")
        left.legend()
        cases = data["harder_cases"]
        right.loglog([c["bound"] for c in cases], [max(c["true"], 1e-16) for c in cases], ".")
        ends = [min(c["bound"] for c in cases), max(c["bound"] for c in cases)]
        right.loglog(ends, ends, "k--", lw=1, label="true = certified")
        right.set(xlabel="certified plan error", ylabel="true plan error", title=f"{len(cases)} harder problems")
        right.legend()
