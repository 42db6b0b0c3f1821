"""Peers of the benchmark and the judge of their answers: our own certificate, in numpy, from a plan and its potentials.

POT is given every help: it is told the number of iterations after which its answer certifies (found from our own equal
iterates, then checked on POT's answer), so that neither its loose nor its strict default stop is timed.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot
from mapuot import penalties

from . import common

CAP = 5000
SAMPLE, PATIENCE = 500, 20.0
OTHERS_UP_TO = 500  # points a side
POT_METHODS = {"POT": "sinkhorn", "POT, translation-invariant": "sinkhorn_translation_invariant"}
OUR_TWIN = {"POT": "sinkhorn", "POT, translation-invariant": "translation_invariant"}


def certify(plan: Any, log_u: Any, log_v: Any, a: Any, b: Any, reg: float, rho: float) -> float:
    return certify_marginals(plan.sum(1), plan.sum(0), log_u, log_v, a, b, reg, rho)


def certify_marginals(r: Any, s: Any, log_u: Any, log_v: Any, a: Any, b: Any, reg: float, rho: float) -> float:
    """The certified relative plan error: d / 3 + sqrt(2 d + d^2 / 9), d = gap / (reg mass); inf for a plan with NaN."""
    mass = float(r.sum())
    if not math.isfinite(mass):
        return math.inf
    gap = 0.0
    for t, marginal, log_x in ((a, r, log_u), (b, s, log_v)):
        gap += float(penalties.gap_term("kl", reg * log_x, marginal, t, np.full(len(t), rho), None).sum())
    d = max(gap, 0.0) / (reg * mass)
    return d / 3 + math.sqrt(2 * d + d * d / 9)


def pot_solve(name: str, problem: tuple[Any, ...], iterations: int, log: bool = False) -> Any:
    import ot

    M, a, b, reg, rho = problem
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return ot.unbalanced.sinkhorn_unbalanced(
            a, b, M, reg, rho, method=POT_METHODS[name], numItermax=iterations, stopThr=0.0, log=log
        )


def our_solve(problem: tuple[Any, ...], tol: float, threads: int, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mapuot.solve(*problem, tol=tol, threads=threads, **options)


def pot_iterations(name: str, problem: tuple[Any, ...], tol: float, threads: int) -> dict[str, Any]:
    """How many iterations POT needs for a certified error of tol; CAP where they do not suffice.

    There, and where these would take longer than PATIENCE, the time is carried on from SAMPLE iterations.
    """
    twin = our_solve(problem, tol, threads, method=OUR_TWIN[name], precision="float64", max_passes=CAP)
    iterations = twin.n_passes
    _, a, b, reg, rho = problem
    if iterations == CAP and not twin.converged:
        one, many = (common.sample(lambda k=k: pot_solve(name, problem, k), 1) for k in (1, 1 + SAMPLE))
        seconds = one + (CAP - 1) * (many - one) / SAMPLE
        if seconds > PATIENCE:
            error = twin.error_bound
            return {"iterations": CAP, "error": error, "seconds": seconds, "reached": False, "carried_on": SAMPLE}
    while True:
        begin = time.perf_counter()
        plan, log = pot_solve(name, problem, iterations, log=True)
        seconds = time.perf_counter() - begin
        error = certify(plan, log["logu"], log["logv"], a, b, reg, rho)
        if error <= tol or iterations >= CAP:
            return {"iterations": iterations, "error": error, "seconds": seconds, "reached": error <= tol}
        iterations = min(CAP, math.ceil(1.03 * iterations) + 1)


def pot_default(problem: tuple[Any, ...]) -> dict[str, Any]:
    """POT called with nothing but the problem: where its own stop leaves the answer."""
    import ot

    M, a, b, reg, rho = problem
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        plan, log = ot.unbalanced.sinkhorn_unbalanced(a, b, M, reg, rho, log=True)
        seconds = time.perf_counter() - begin
    error = certify(plan, log["logu"], log["logv"], a, b, reg, rho)
    return {"iterations": len(log["err"]), "error": error, "seconds": seconds}


def other_peers(problem: tuple[Any, ...], tol: float) -> dict[str, Callable[[], Any]]:
    """OTT-JAX on the CPU, where it is installed: a call that returns (plan, log u, log v).

    The loosest of its thresholds whose answer certifies; small problems only, since it takes seconds at n = 500.
    """
    try:
        import jax
        from ott.geometry import geometry
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn
    except ImportError:
        return {}
    jax.config.update("jax_enable_x64", True)
    M, a, b, reg, rho = problem
    fi = rho / (rho + reg)
    if len(a) > OTHERS_UP_TO:
        return {}

    @functools.partial(jax.jit, static_argnames="threshold")
    def run(M: Any, a: Any, b: Any, threshold: float) -> Any:
        solver = sinkhorn.Sinkhorn(threshold=threshold, max_iterations=CAP)
        # OTT's reference measure is uniform: c = a b^T goes into the cost
        cost = M - reg * (jax.numpy.log(a)[:, None] + jax.numpy.log(b))
        out = solver(linear_problem.LinearProblem(geometry.Geometry(cost, epsilon=reg), a, b, tau_a=fi, tau_b=fi))
        return out.matrix, out.f, out.g

    def call(threshold: float) -> Any:
        plan, f, g = (np.asarray(x) for x in run(M, a, b, threshold))
        return plan, f / reg, g / reg

    for threshold in (tol, tol / 10, tol / 100, tol / 1000):
        if certify(*call(threshold), a, b, reg, rho) <= tol:
            break
    return {"OTT-JAX": functools.partial(call, threshold)}
