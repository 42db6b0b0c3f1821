"""Peers of the benchmark, and the judge of their answers: our own certificate, in NumPy, from marginals and potentials.

POT gets every help: the least number of iterations that certifies (found from our own equal iterates, then checked on
POT's answer), so that neither its loose nor its strict default stop is timed. OTT has the loosest threshold
that certifies; its reference measure is uniform, so that c = a b^T goes into its cost.
"""

import functools
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import mapuot
from mapuot import penalties

from . import common
from .device import on_host

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # POT imports JAX, which would take most memory
CAP = 5000
SAMPLE, PATIENCE = 500, 20.0
POT_METHODS = {"POT": "sinkhorn", "POT, translation-invariant": "sinkhorn_translation_invariant"}
OUR_TWIN = {"POT": "sinkhorn", "POT, translation-invariant": "translation_invariant"}

Case = tuple[Any, Any, Any, float, float]  # M, a, b, reg, reg_m
Answer = tuple[Any, Any, Any]  # plan, log u, log v


def quiet(call: Callable[[], Any]) -> Any:
    """Call without the warnings of whoever underflows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return call()


def certify(answer: Answer, case: Case) -> float:
    """Return the certified relative plan error, d / 3 + sqrt(2 d + d^2 / 9), d = gap / (reg mass); inf for NaN."""
    plan, log_u, log_v = answer
    _, a, b, reg, rho = case
    r, s = (on_host(plan.sum(axis)) for axis in (1, 0))
    mass = float(r.sum())
    if not math.isfinite(mass):
        return math.inf
    gap = 0.0
    for t, marginal, log_x in ((a, r, on_host(log_u)), (b, s, on_host(log_v))):
        used = t > 0
        terms = penalties.gap_term("kl", reg * log_x[used], marginal[used], t[used], np.full(used.sum(), rho), None)
        gap += float(terms.sum())
    return penalties.plan_error(max(gap, 0.0) / (reg * mass))


def ours(case: Case, tol: float, **options: Any) -> Any:
    M, a, b, reg, reg_m = case
    return quiet(lambda: mapuot.solve(M, a, b, reg=reg, reg_m=reg_m, tol=tol, **options))


def pot(case: Case, iterations: int | None, method: str = "sinkhorn", log: bool = False) -> Any:
    """Return POT's plan, or (plan, log u, log v, iterations) where ``log``; ``iterations`` None: POT's own stop."""
    import ot

    M, a, b, reg, rho = case
    if iterations is None:
        options = {}
    else:
        options = {"numItermax": iterations, "stopThr": 0.0}
    solve = functools.partial(ot.unbalanced.sinkhorn_unbalanced, a, b, M, reg, rho, method=method, log=log, **options)
    found = quiet(solve)
    if log:
        return found[0], found[1]["logu"], found[1]["logv"], len(found[1]["err"])
    return found


def pot_iterations(
    name: str, case: Case, tol: float, threads: int | None, given: Case | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Return how many iterations POT needs for a certified error of tol, CAP where they do not suffice, and seconds.

    ``given`` is the case with POT's arrays. A run longer than PATIENCE is extrapolated from SAMPLE iterations.
    """
    given = given or case
    if given is not case:
        options = {"backend": "cuda"}
    else:
        options = {"threads": threads}
    twin = ours(case, tol, method=OUR_TWIN[name], precision="float64", max_passes=CAP, **options)
    iterations = twin.n_passes
    method = POT_METHODS[name]
    if iterations >= CAP and not twin.converged:
        one, many = (common.sample(lambda k=k: pot(given, k, method), clock=clock) for k in (1, 1 + SAMPLE))
        seconds = one + (CAP - 1) * (many - one) / SAMPLE
        if seconds > PATIENCE:
            error = twin.error_bound
            return {"iterations": CAP, "error": error, "seconds": seconds, "reached": False, "carried_on": SAMPLE}
    while True:
        begin = clock()
        *answer, _ = pot(given, iterations, method, log=True)
        seconds = clock() - begin
        error = certify(tuple(answer), case)
        if error <= tol or iterations >= CAP:
            return {"iterations": iterations, "error": error, "seconds": seconds, "reached": error <= tol}
        iterations = min(CAP, math.ceil(1.03 * iterations) + 1)


def pot_default(case: Case, given: Case | None = None) -> dict[str, Any]:
    """Call POT with nothing but the problem: where its own stop leaves the answer."""
    begin = time.perf_counter()
    *answer, iterations = pot(given or case, None, log=True)
    seconds = time.perf_counter() - begin
    return {"iterations": iterations, "error": certify(tuple(answer), case), "seconds": seconds}


def torch_logs(log_k: Any, log_a: Any, log_b: Any, fi: float, rounds: int, alone: bool = False) -> tuple[Any, Any]:
    """Return log u and log v after so many unbalanced iterations in torch; ``alone``: of points with themselves."""
    import torch

    f = torch.zeros_like(log_a)
    g = torch.zeros_like(log_b)
    for _ in range(rounds):
        new = -fi * torch.logsumexp(log_k + (g + log_b)[..., None, :], -1)
        if alone:
            f = 0.5 * (f + new)
            g = f
        else:
            f = new
            g = -fi * torch.logsumexp(log_k + (f + log_a)[..., :, None], -2)
    return f, g


def torch_scalings(K: Any, a: Any, b: Any, fi: float, rounds: int, u: Any, v: Any) -> tuple[Any, Any]:
    """Return u and v after so many iterations as POT makes them, in torch; K of one or of each of many problems."""

    def product(K: Any, x: Any) -> Any:
        if K.ndim == 2:
            return x @ K.mT
        return (K @ x[..., None])[..., 0]

    for _ in range(rounds):
        u = product(K, b * v) ** -fi
        v = product(K.mT, a * u) ** -fi
    return u, v


def ott(case: Case, tol: float) -> Callable[[], Answer] | None:
    """Return a call of OTT-JAX, compiled, on the device that JAX finds; None where it is not installed."""
    try:
        import jax
        from ott.geometry import geometry
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    M, a, b, reg, rho = case
    fi = rho / (rho + reg)
    cost = jax.device_put(on_host(M) - reg * (np.log(a)[:, None] + np.log(b)))

    @functools.partial(jax.jit, static_argnames="threshold")
    def run(cost: Any, a: Any, b: Any, threshold: float) -> Any:
        solver = sinkhorn.Sinkhorn(threshold=threshold, max_iterations=CAP)
        out = solver(linear_problem.LinearProblem(geometry.Geometry(cost, epsilon=reg), a, b, tau_a=fi, tau_b=fi))
        return out.matrix, out.f / reg, out.g / reg

    for threshold in (tol, tol / 10, tol / 100, tol / 1000):
        if certify(tuple(map(np.asarray, run(cost, a, b, threshold))), case) <= tol:
            break
    return lambda: jax.block_until_ready(run(cost, a, b, threshold))
