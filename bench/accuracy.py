"""accuracy: what the storage of K costs, against Newton's answer in float64 on 24 problems (reg .1 and .01).

For each storage the plain fixed point of the stored K is reached first, so that nothing but rounding is left; the plan
is then formed from M in float64 as always. "default call" and "tol 1e-9" are whole calls, their error that of the stop.
Errors: |P - P*|_1 / mass(P*), and |objective - objective*| / |objective*|.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import mapuot
from mapuot.answer.result import Result
from mapuot.backends import Options, cpu
from mapuot.problem.problem import Problem

from . import common, newton, problems

REGS, RHOS, SHAPE = (0.1, 0.01), (0.1, 1.0, 10.0), (300, 330)
STORAGE = ("float64", "float32", "bfloat16")
CALLS = {
    "default call": {"tol": 1e-6},
    "tol 1e-9": {"tol": 1e-9},
    "bfloat16 call": {"tol": 1e-3, "precision": "bfloat16"},
}
LIMIT = {"float32": 1e-7}  # of the plan's L1 error
PASSES = 600


def stored(problem: Problem, storage: str) -> tuple[Any, Any]:
    """(log u, log v) of the fixed point of K as stored, with vectors and sums in float64."""
    options = Options(translate=True, memory=5, in_place=False, precision=storage, tol=-1.0, tol_gap=-1.0, threads=1)
    workspace = cpu.Workspace(problem, options)
    workspace.absorb(np.zeros(problem.shape[1]))
    # neither the float32 passes that come first nor the exact ones that come last
    workspace.progress.narrow, workspace.limits.finer = 0, 0
    made = 0
    while made < PASSES:
        stats = workspace.iterate(PASSES - made)
        made += len(stats)
        if stats[-1].status == "absorb":
            workspace.absorb()
        elif stats[-1].status != "running":
            break
    potentials: tuple[Any, Any] = workspace.potentials()
    workspace.close()
    return potentials


def case(family: str, reg: float, rho: float) -> dict[str, Any]:
    M, a, b = problems.make(family, *SHAPE, seed=4)
    problem = Problem.from_arrays(M, a, b, reg, rho, "kl", "product", cpu)
    answer = newton.solve(M, a, b, reg, rho)
    row: dict[str, Any] = {"family": family, "reg": reg, "rho": rho, "newton_step": answer.step}
    objective = primal(problem, (answer.log_u, answer.log_v))
    candidates = {storage: stored(problem, storage) for storage in STORAGE}
    for name, options in CALLS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", mapuot.ConvergenceWarning)
            result = mapuot.solve(M, a, b, reg, rho, threads=1, **options)
        candidates[name] = (result.log_u, result.log_v)
    for name, potentials in candidates.items():
        plan = cpu.PlanStream(problem, *potentials, 1).plan(0, SHAPE[0])
        row[name] = {
            "plan": float(np.abs(plan - answer.P).sum() / answer.P.sum()),
            "objective": abs(primal(problem, potentials) - objective) / abs(objective),
        }
    return row


def primal(problem: Problem, potentials: tuple[Any, Any]) -> float:
    return Result(problem, cpu, potentials, None, [], "converged", 1).objective


def run(args: Any) -> dict[str, Any]:
    regs = REGS[:1] if args.quick else REGS
    cases = [(family, reg, rho) for family in problems.FAMILIES for reg in regs for rho in RHOS]
    with common.blas_threads(1):
        rows = [case(*each) for each in tqdm(cases, desc="accuracy", file=sys.stderr)]
    totals = {
        name: {f"{key}_{kind}": f([row[name][key] for row in rows])
               for key in ("plan", "objective") for kind, f in (("max", max), ("mean", common.mean))}
        for name in (*STORAGE, *CALLS)
    }  # fmt: skip
    return {"totals": totals, "limit": LIMIT, "cases": rows}


def report(data: dict[str, Any]) -> str:
    keys = ["plan_max", "plan_mean", "objective_max", "objective_mean"]
    rows = [[name, *(f"{t[key]:.1e}" for key in keys), LIMIT.get(name, "")] for name, t in data["totals"].items()]
    return common.table(["K", *keys, "limit"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    with common.figure(path, width=8) as axes:
        axis = axes[0][0]
        for k, name in enumerate(data["totals"]):
            errors = [max(row[name]["plan"], 1e-17) for row in data["cases"]]
            axis.semilogy([k] * len(errors), errors, ".", alpha=0.6)
        axis.set_xticks(range(len(data["totals"])), list(data["totals"]))
        axis.set(ylabel="relative L1 error of the plan", xlabel="storage of K; whole calls")
