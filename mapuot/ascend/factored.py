"""Newton's steps with a factorised matrix, for one problem or a batch: prepare the arrays of backends/factored.py."""

from types import ModuleType
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..backends import factored
from ..backends.contract import Options
from ..backends.newton import HOLDS, ColumnsNewton
from ..backends.operator import parts_of
from ..penalties import F64
from ..problem.problem import BatchProblem, Common, Problem

CHUNK_BYTES = 1 << 32  # of matrices of the problems of a batch that are solved at once
MATRICES = 8  # m x n matrices that one problem needs: exponents, plans, equations, and their copies


def factored_start(module: ModuleType, task: Problem, options: Options, log_v: F64) -> tuple[F64, int]:
    """Improve log v until a pass can certify its plan; return log v and the number of factorisations.

    On a GPU all arrays stay on the device.
    """
    exponents = exponents_of(module, task, options.threads)
    xp = namespace(exponents)
    found, factors = improved(
        xp, task, exponents, task.rows.weight, task.cols.weight, np.asarray(host(log_v)), options.tol
    )
    return host(found[0]), factors


def factored_batch(task: BatchProblem, exponents: Any, log_v: Any, tol: float) -> Any:
    """Improve log v (p, n) of all problems of a batch like `factored_start`; ``exponents(i0, i1)``: -M / reg."""
    xp, (m, n) = namespace(log_v), task.shape
    found = xp.empty(log_v.shape)
    step = max(1, CHUNK_BYTES // (8 * MATRICES * m * n))
    for i0 in range(0, len(task), step):
        part = slice(i0, min(i0 + step, len(task)))
        costs = exponents(part.start, part.stop)
        found[part] = improved(xp, task, costs, task.A[part], task.B[part], log_v[part], tol)[0]
    return found


def improved(xp: Any, task: Common, exponents: Any, a: Any, b: Any, log_v: Any, tol: float) -> tuple[Any, int]:
    """Improve log v (p, n) until a pass can certify the plans; return it and the number of factorisations.

    ``exponents``: -M / reg plus the logarithms of a reference matrix, (p, m, n). log v is 0 at points left out.
    """
    p, m, n = exponents.shape
    a, b = (xp.broadcast_to(xp.asarray(x), (p, size)) for x, size in ((a, m), (b, n)))
    k_rows, k_cols = (xp.broadcast_to(xp.asarray(task.reg / side.rho), (p, len(side.rho))) for side in task.sides)
    start_u = xp.where(a > 0, 0.0, -np.inf)
    start_v = xp.where(b > 0, xp.where(xp.isfinite(xp.asarray(log_v)), xp.asarray(log_v), 0.0), -np.inf)
    both_hard = all(bool(side.hard.all()) for side in task.sides)
    allowed = np.full(p, factored.allowed_miss(tol, (m, n), both_hard))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_c = (xp.log(a), xp.log(b)) if task.unmasked == "product" else (xp.zeros((p, m)), xp.zeros((p, n)))
        work = plans_of(-exponents, log_c, factored.Sides(a, b, k_rows, k_cols), start_u, start_v)
        turned = m < n
        if turned:  # steps are made for the smaller side
            factored.begin(work, np.arange(p))
            sides = factored.Sides(b, a, k_cols, k_rows)
            costs = xp.ascontiguousarray(-exponents.swapaxes(1, 2))
            work = plans_of(costs, log_c[::-1], sides, work.log_v, work.log_u)
        factors = factored.improve(work, allowed)
    found = work.best[0 if turned else 1]
    return xp.where(xp.isfinite(found), found, 0.0), factors


def plans_of(costs: Any, *known: Any) -> Any:
    """Return a `FactoredPlans` where the costs lie."""
    if namespace(costs) is np:
        from ..backends.cpu.factored import HostPlans  # noqa: PLC0415 - loads the C core

        return HostPlans(costs, *known)
    from ..backends.cuda.factored import DevicePlans  # noqa: PLC0415 - needs CuPy

    return DevicePlans(costs, *known)


def exponents_of(module: ModuleType, task: Problem, threads: int | None) -> Any:
    """Return -M / reg plus the logarithms of a reference matrix, (1, m, n), on the device of K."""
    if task.cost.operator == "pairs":
        exponents = np.asarray(task.cost, np.float64) / -task.reg
    else:
        operator = module.operator_of(*parts_of(task), threads)
        blocks = [x for _, _, x in operator.logarithms(task.cost)]
        exponents = blocks[0] if len(blocks) == 1 else namespace(blocks[0]).concatenate(blocks)
    if task.c is not None:
        xp = namespace(exponents)
        with np.errstate(divide="ignore"):
            log_c = xp.log(xp.asarray(np.asarray(task.c), np.float64))  # inf where a sparse c stores no pair
            exponents = xp.where(xp.isneginf(exponents), -np.inf, exponents + log_c)
    return exponents[None]


def certified(problem: Problem, stat: Any, log_v: F64, marginal: F64, tol: float) -> bool:
    """Certify a pass that nearly meets its hard columns, without products; write the bound to ``stat``."""
    newton = ColumnsNewton(problem)
    newton.record.budget = newton.record.all_products = 1  # the budget is used up: no products

    def product(d: F64) -> F64:
        raise AssertionError("no product follows a budget that is spent")

    verdict = newton.solve(stat["error"], tol, log_v, marginal, product)
    stat["error"] = newton.record.error
    return verdict == HOLDS
