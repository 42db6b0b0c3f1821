"""Carry a small plain problem (front.py) through one call of the C core; other members of a Result are made on demand.

The core carries out the same stages (ascend/stages.py) by the same passes and gives the same answer. A problem that the
core finds odd, cannot hold or cannot finish is solved by the stages, or refused by problem/validate.py.
"""

import functools
import math
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from ..answer.result import Result, holds_float32
from ..ascend.stages import FORMED, in_words, ladder, newton_words
from ..backends import Options, Stats, load
from ..backends.draw import columns_in
from ..backends.records import STATS, stats_of
from ..cached import cached_property
from ..contract import Backend
from ..problem.points import FormedCosts
from ..problem.problem import BatchProblem, Problem, constant_of
from ..problem.translation import common_translation, rate_of
from ..problem.validate import as_out, check_parts, evening_of_parts, is_sentinel, moves_little
from ..processor import SERIAL_ENTRIES
from .front import SINGLE, Call, PlainProblem, Start

# mapuot_status of one call
STATUS_OF = {0: "max_passes", 1: "converged", 3: "stalled"}


@functools.cache
def core() -> Any:
    """Return the module that calls the C core, which is imported on first use."""
    load("cpu")  # says how to build a missing core
    return import_module("..backends.cpu.core_solve", __package__)


def solve_in_core(call: Call, plain: PlainProblem) -> "PlainResult | Start":
    """Solve a plain problem by one call of the core; return the place where the stages begin if that is not enough.

    ``call.out``: an array for the plan, or True for a new array.
    """
    backend, cost, a, b, reg, rho, options, _ = plain
    m, n = cost.shape
    turns = options.anderson_depth > 0 and rho[0] < rho[1] == math.inf
    if options.threads not in (None, 1) or turns:
        return Start()
    begun = time.perf_counter()
    module = core()
    dtype = cost.dtype
    if cost.cloud:
        cost = FormedCosts(cost, backend.costs(cost, 1))
    out = call.out
    if out is not None:
        if out is True:
            out = np.empty((m, n), dtype)
        else:
            out = as_out(out, (m, n), dtype, cost.array)
    inside = out if dtype == cost.array.dtype else None  # costs of float32 points are float64

    def compare() -> bool:
        rows, cols = plain.sides
        parts = Problem(cost, rows, cols, reg, "product", 0.0, 0.0, True, 1.0).several_parts
        check_parts(rows, cols, parts)
        return evening_of_parts(rows, cols, parts) is None

    found = module.solve(cost, a, b, reg, rho, options, call.max_passes, ladder, inside, compare)
    if found is None:
        return Start()
    mass_a, mass_b = found.masses
    rate = rate_of(rho[0], reg, True) + rate_of(rho[1], reg, True)
    over_reg = (found.high - found.low) / reg
    if (
        (cost.cloud and found.forbidden) or (dtype == SINGLE and not holds_float32(found.mass, m * n))
        # or a ScalingWarning is due (odd_units in problem/validate.py)
        or is_sentinel(found.low, found.high, over_reg) or moves_little(found.mass, mass_a, mass_b)
        or (np.inf in rho and constant_of(found.low, found.high, reg))
        or common_translation(mass_a, mass_b, rate)
    ):  # fmt: skip
        return Start()
    if out is not inside:
        module.form_plan(cost.array, reg, found.numbers[2 * (m + n) :], out)
    result = PlainResult(plain._replace(cost=cost) if cost is not plain.cost else plain, found, begun, out)
    if result.status == "stalled":  # steps with a factor follow
        return Start((result.log_u, result.log_v), result.trace, result.status, result.products)
    return result


def as_it_is(result: Result, scale_cost: float = 1.0, scale_mass: float = 1.0) -> Result:
    """Return a result from a pickle, with its units set again."""
    result.scale_cost, result.scale_mass = scale_cost, scale_mass
    return result


def in_core(options: Options, n_larger: int, symmetric: bool, more: list[str], whose: str = "") -> str:
    """Return the text of `Result.how` for a problem that the core solved in one call."""
    if symmetric:
        more = [*more, "one potential"]
    return in_words(f"{options.precision} tiles", n_larger, *more, f"one call of the core{whose}")


def is_plain(task: BatchProblem) -> Any:
    """Return which problems of a batch the core can solve in one call: a mask, or one bool for all."""
    one_rho = None not in (task.rows.scalar_rho, task.cols.scalar_rho)
    if not one_rho or task.reference != "product":
        return False
    if task.several:
        return task.several.solved_whole
    return task.cost.operator == "tiles" and task.cost.size <= SERIAL_ENTRIES


def stats_of_call(records: bytes, seconds: float) -> list[Stats]:
    """Return the stats of the passes of one call that took ``seconds``."""
    passes = stats_of(np.frombuffer(records, STATS), 1)
    for stat in passes:
        stat.seconds = seconds
    return passes


class LazyResult(Result):
    """The `Result` of a problem that was solved in one call; members are computed on first use."""

    def __init__(self, backend: Backend, cost: Any, found: Any, options: Options, begun: float) -> None:
        """``found``: has ``numbers`` (log u, log v, r and s in one array), ``passes``, ``mass`` and ``products``."""
        self._backend, self._cost, self._found, self.options = backend, cost, found, options
        self._seconds = time.perf_counter() - begun
        self._threads = options.threads
        self.mass = found.mass

    def __reduce_ex__(self, protocol: Any) -> Any:
        potentials = self.own_logs
        marginals = (self.row_marginal, self.col_marginal)
        kept = potentials, marginals, self.trace, self.status, self._threads, self.how
        return as_it_is, (Result(self.problem, self._backend, *kept), self.scale_cost, self.scale_mass)

    def _part(self, k: int) -> Any:
        """Return part k of ``numbers``: log u, log v, r, s, or, if stored, the exponents of the plan."""
        m, n = self._cost.shape
        ends = 0, m, m + n, 2 * m + n, 2 * (m + n), 3 * (m + n)
        return self._found.numbers[ends[k] : ends[k + 1]]

    units: tuple[float, float, float, float, float]  # reg, rho_a, rho_b and both masses, for `odd_unit`
    mass: float = 0.0  # set for each object
    products = property(lambda self: self._found.products)
    own_logs = property(lambda self: (self._part(0), self._part(1)))
    row_marginal = property(lambda self: self._part(2))
    col_marginal = property(lambda self: self._part(3))

    @cached_property
    def trace(self) -> list[Stats]:  # type: ignore[override]
        return stats_of_call(self._found.passes, self._seconds)


class PlainResult(LazyResult):
    """The `Result` of a plain problem that the core solved; its plan is small enough to keep."""

    def __init__(self, plain: PlainProblem, found: Any, begun: float, plan: Any) -> None:
        super().__init__(plain.backend, plain.cost, found, plain.options, begun)
        self._plain = plain
        self.units = (plain.reg, *plain.rho, *found.masses)
        self.status = STATUS_OF[found.status]
        if plan is not None:
            self.plan = plan

    @cached_property
    def problem(self) -> Problem:  # type: ignore[override]
        plain, found = self._plain, self._found
        rows, cols = plain.sides
        mass = float(plain.a.sum() * plain.b.sum())
        return Problem(self._cost, rows, cols, plain.reg, "product", found.low, found.high, found.forbidden, mass)

    @cached_property
    def how(self) -> str:  # type: ignore[override]
        more = [FORMED] * isinstance(self._cost, FormedCosts) + newton_words(self._found.products)
        return in_core(self.options, self._found.n_larger, self._found.symmetric, more)

    def _blocks(self) -> Iterator[tuple[int, Any]]:
        yield 0, self.plan  # one block: the plan is small

    def _drawn(self, rows: Any, at: Any) -> tuple[Any, Any]:
        if self._holds(rows):
            return (rows, columns_in(self.plan, rows, at))
        return super()._drawn(rows, at)

    @cached_property
    def plan(self) -> Any:
        """The plan P, (m, n), in M's dtype; formed from M with float64 exponents on first use, then kept."""
        out = np.empty(self._cost.shape, self._cost.dtype)
        core().form_plan(self._cost.array, self._plain.reg, self._part(4), out)
        return out
