"""The iterations that POT names, with POT's meaning of numItermax, stopThr and err.

After k iterations POT holds (u_k, v_k): our row state and the next log v. Sources: Chizat, Peyre, Schmitzer,
Vialard 2018 (scaling algorithm); Sejourne, Vialard, Peyre 2022 (translation invariance).
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from ..backends import Options, Stats, Workspace, closing
from ..errors import ConvergenceWarning
from ..penalties import F64
from ..problem import Problem
from ..result import Result

NAMED = {  # name: (translation, iterations between two looks at err, err of u alone)
    "sinkhorn": (False, 1, False),
    "sinkhorn_stabilized": (False, 10, True),
    "sinkhorn_translation_invariant": (True, 1, False),
}
TINY = float(np.finfo(np.float64).tiny)


def iterate(
    problem: Problem,
    module: ModuleType,
    method: str,
    start: tuple[F64, F64],
    max_iter: int,
    stop: float,
    progress: bool,
) -> tuple[Result, list[float]]:
    """Run the named iteration from ``start``; the Result of (u_k, v_k) and POT's err at every look."""
    translate, every, only_u = NAMED[method]
    precision = "float32" if problem.M.dtype.name == "float32" else "float64"
    options = Options(translate, 0, False, precision, TINY, -1.0, None)
    state, err, trace, status = start, [], [], "max_passes"
    begun = time.perf_counter()
    bar = tqdm(total=max_iter, desc=method, unit="pass", disable=not progress)
    with bar, closing(module.Workspace(problem, options)) as workspace:
        workspace.absorb(start[1])
        for k in range(max_iter):
            stat, new = one_iteration(problem, module, workspace, translate)
            if stat.status == "not finite":
                status = stat.status
                warnings.warn(f"Numerical errors at iteration {k}", stacklevel=5)
                break
            trace.append(dataclasses.replace(stat, n_pass=k + 1, seconds=time.perf_counter() - begun))
            bar.update()
            if k % every == 0:
                changes = [relative_change(*pair) for pair in zip(new, state, strict=True)]
                err.append(changes[0] if only_u else 0.5 * sum(changes))
            state = new
            if err[-1] < stop:
                status = "converged"
                break
    if status == "max_passes" and stop > 0:
        warn_not_converged(method, max_iter, err[-1], stop)
    return Result(problem, module, state, None, trace, status, None), err


def one_iteration(
    problem: Problem, module: ModuleType, workspace: Workspace, translate: bool
) -> tuple[Stats, tuple[F64, F64]]:
    """One pass and POT's state after it: (log u_k, log v_k)."""
    stat = workspace.iterate(1)[-1]
    log_u, old_log_v = (module.to_numpy(x) for x in workspace.potentials())
    log_v = np.array(module.to_numpy(workspace.next_log_v))
    if translate:
        log_u = log_u - row_shift(problem, old_log_v, log_v, module.to_numpy(workspace.marginals()[1]))
    if stat.status == "absorb":
        workspace.absorb()
    return stat, (np.array(log_u), log_v)


def row_shift(problem: Problem, old_log_v: F64, log_v: F64, col_marginal: F64) -> float:
    """mu of log v = fi2 (log b - log K^T u) + fi2 mu: the translated pair is (u e^(-mu), v).

    Here log K^T u = log(col marginal) - old log v, so that no pass is needed.
    """
    rho, b = problem.cols.scalar_rho, problem.cols.weight
    fi = 1.0 if rho is None or np.isinf(rho) else rho / (rho + problem.reg)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = log_v / fi - (np.log(b) - np.log(col_marginal) + old_log_v)
    used = np.isfinite(mu)
    return float(np.average(mu[used], weights=b[used])) if used.any() else 0.0


def relative_change(log_new: F64, log_old: F64) -> float:
    """max|x - x'| / max(max x, max x', 1) of x = exp(log_new), x' = exp(log_old), without overflow."""
    both = np.concatenate([log_new, log_old, [0.0]])
    top = both[~np.isposinf(both)].max()
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.abs(np.exp(log_new - top) - np.exp(log_old - top))
    return float(change[np.isfinite(change)].max(initial=0.0))


def warn_not_converged(method: str, max_iter: int, err: float, stop: Any) -> None:
    warnings.warn(
        f"method {method!r} not converged after {max_iter} iterations: last change {err:.2e} >= stopThr "
        f"{stop:.2e}; name no method for the accelerated one, or raise numItermax, reg or stopThr",
        ConvergenceWarning,
        stacklevel=6,
    )
