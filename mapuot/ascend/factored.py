"""Newton's steps with a factorised matrix, for one problem or a batch: prepare the arrays of backends/factored.py."""

from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..backends import factored
from ..backends.factored import LevelStart, Margin
from ..backends.operator import parts_of
from ..backends.settings import FACTORS
from ..contract import Backend, Options
from ..penalties import F64, PENALTIES
from ..problem.problem import BatchProblem, Common, Problem
from ..processor import default_threads

FEW_NUMBERS = 1 << 14  # of masses on the host: their vectors are made there, and sent at once
MATRICES = 8  # m x n matrices that one problem needs: exponents, plans, equations, and their copies


def factored_start(backend: Backend, task: Problem, options: Options, starts: list[LevelStart]) -> tuple[F64, int]:
    """Improve the potentials of passes until a pass can certify their plan; return log v and the number of factors.

    On a GPU all arrays stay on the device.
    """
    exponents = exponents_of(backend, task, options.threads)
    starts = [LevelStart(level, *(host(x)[None] for x in logs)) for level, *logs in starts]
    log_v, factors = improved(task, exponents, task.rows.weight, task.cols.weight, starts, options)
    return host(log_v[0]), factors


def factored_batch(task: BatchProblem, which: Any, exponents: Any, starts: list[LevelStart], options: Options) -> Any:
    """Improve log v (q, n) of q problems of a batch like `factored_start`; ``exponents(some)``: -M / reg of some."""
    (m, n) = task.shape
    found = list[Any]()
    step = max(1, FACTORS.chunk_bytes // (8 * MATRICES * m * n))
    for i0 in range(0, len(which), step):
        part = which[i0 : i0 + step]
        costs = exponents(part)
        at = namespace(costs).asarray(part)
        own = [LevelStart(level, log_u[at], log_v[at]) for level, log_u, log_v in starts]
        a, b = (x[namespace(x).asarray(part)] for x in (task.A, task.B))
        found.append(improved(task, costs, a, b, own, options)[0])
    return namespace(found[0]).concatenate(found)


def improved(
    task: Common, exponents: Any, a: Any, b: Any, starts: list[LevelStart], options: Options
) -> tuple[Any, int]:  # fmt: skip
    """Improve potentials until a pass can certify the plans; return log v (p, n) and the number of factorisations.

    ``exponents``: -M / reg plus the logarithms of a reference matrix, (p, m, n). log v is 0 at points left out.
    """
    p, m, n = exponents.shape
    if namespace(a) is np and p * (m + n) <= FEW_NUMBERS:
        xp: Any = np
    else:
        xp = namespace(exponents)
    a, b = (xp.broadcast_to(xp.asarray(x), (p, size)) for x, size in ((a, m), (b, n)))
    both_hard = all(bool(side.hard.all()) for side in task.sides)
    allowed = np.full(p, factored.allowed_miss(options.tol, (m, n), both_hard))
    costs = -exponents
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = unit_masses(xp, task.sides, a, b)
        rows, cols = (margin_of(xp, side, x, task.reg, units) for side, x in zip(task.sides, (a, b), strict=True))
        if task.unmasked == "product":
            log_c = (xp.log(a) - xp.log(units), xp.log(b))
        else:
            log_c = (xp.zeros((p, m)) - xp.log(units), xp.zeros((p, n)))
        zeros = [xp.where(left_out, -np.inf, 0.0) for left_out in map(is_left_out, (rows, cols), log_c)]
        turned = m < n
        if turned:  # steps are made for the smaller side
            costs = namespace(costs).ascontiguousarray(costs.swapaxes(1, 2))
            rows, cols = cols, rows
            log_c = log_c[::-1]
            zeros = zeros[::-1]
            starts = [LevelStart(level, log_v, log_u) for level, log_u, log_v in starts]
        work = plans_of(options.threads, costs, log_c, (rows, cols), *zeros)
        with work.working():
            factors = factored.improve(work, allowed, starts, task.range_over_reg)
    found = work.best[0 if turned else 1]
    return np.where(np.isfinite(found), found, 0.0), factors


def unit_masses(xp: Any, sides: Any, a: Any, b: Any) -> Any:
    """Return powers of 2 near the masses of the plans, (p, 1), as units of mass: squares of 1e-160 are 0."""
    sums = [xp.log2(x.sum(1, keepdims=True)) for x in (a, b)]
    hard = [x for x, side in zip(sums, sides, strict=True) if side.demands] or sums
    return xp.exp2(xp.rint(sum(hard) / len(hard)))


def margin_of(xp: Any, side: Any, weight: Any, reg: float, units: Any) -> Margin:
    """Return a side of the plans, in units of mass."""
    rho = xp.broadcast_to(xp.asarray(side.rho), weight.shape)
    if side.penalty != "range":
        return Margin(side.penalty, weight / units, reg / (rho * units ** (side.kind.degree - 1)))
    low, high = (weight * xp.asarray(factor) / units for factor in (side.rho, side.upper))
    return Margin(side.penalty, weight / units, xp.zeros(weight.shape), low, high)


def is_left_out(margin: Margin, log_c: Any) -> Any:
    """Return a mask of the points with the scaling 0: no reference mass, or a weight of 0 that forbids mass."""
    return (log_c == -np.inf) | ((margin.weight == 0) & PENALTIES[margin.penalty].strict)


def plans_of(threads: int | None, costs: Any, log_c: Any, sides: Any, log_u: Any, log_v: Any) -> Any:
    """Return a `FactoredPlans` where the costs lie; ``threads``: of BLAS, on a CPU."""
    if namespace(costs) is np:
        from ..backends.cpu.factored import HostPlans  # noqa: PLC0415 - loads the C core

        return HostPlans(costs, log_c, sides, log_u, log_v, threads or default_threads(costs.size))
    from ..backends.cuda.factored import DeviceArrayPlans, DevicePlans  # noqa: PLC0415 - needs CuPy

    if all(side.penalty in ("kl", "balanced") for side in sides):
        return DevicePlans(costs, log_c, sides, log_u, log_v)
    xp = namespace(costs)
    sides = [Margin(side.penalty, *(x if x is None else xp.asarray(x) for x in side[1:])) for side in sides]
    log_c = xp.asarray(log_c[0]), xp.asarray(log_c[1])
    return DeviceArrayPlans(costs, log_c, sides, xp.asarray(log_u), xp.asarray(log_v))


def exponents_of(backend: Backend, task: Problem, threads: int | None) -> Any:
    """Return -M / reg plus the logarithms of a reference matrix, (1, m, n), on the device of K."""
    if task.cost.operator == "pairs":
        exponents = np.asarray(task.cost, np.float64) / -task.reg
    else:
        operator = backend.operator_of(*parts_of(task), threads)
        blocks = [x for _, _, x in operator.logarithms(task.cost)]
        if len(blocks) == 1:
            exponents = blocks[0]
        else:
            exponents = namespace(blocks[0]).concatenate(blocks)
    if task.c is not None:
        xp = namespace(exponents)
        with np.errstate(divide="ignore"):
            log_c = xp.log(xp.asarray(np.asarray(task.c), np.float64))  # inf where a sparse c stores no pair
            exponents = xp.where(xp.isneginf(exponents), -np.inf, exponents + log_c)
    return exponents[None]
