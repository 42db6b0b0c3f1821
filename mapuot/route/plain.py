"""Solve small plain problems by one call of the C core; the other members of a Result are computed on demand.

A problem is plain if M is an array in memory, or points and their matrix is formed; the masses are floating point
arrays; each side is KL or balanced with one reg_m; c = a b^T; and there is no callback, progress bar, checkpoint or
other rank. The core carries out the same stages (ascend/stages.py) by the same passes and gives the same answer. A
problem that the core finds odd, cannot hold or cannot finish starts again on the ordinary path, which solves or refuses
it.
"""

import functools
import time
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from ..answer.result import Result, holds_float32
from ..ascend.stages import FORMED, in_words, ladder, newton_words, turned_sides
from ..backends import Options, Stats, pick
from ..backends.draw import columns_in
from ..backends.records import STATS, told
from ..cached import cached_property
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.points import FORM_BYTES, Formed
from ..problem.problem import BatchProblem, Problem, constant_of
from ..problem.side import Side
from ..problem.validate import (
    EVEN,
    MOST_PASSES,
    as_count,
    as_out,
    check_parts,
    evening,
    evening_of_parts,
    is_sentinel,
    moves_little,
)
from ..processor import SERIAL_ENTRIES
from .options import METHODS, make_options

# mapuot_status of one call; a stalled solve goes on from its potentials on the ordinary path
STATUS_OF = {0: "max_passes", 1: "converged", 3: "stalled"}
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
NUMBER_TYPES = {float, int, np.float64, np.float32, np.int64, np.int32}


@functools.lru_cache(maxsize=64, typed=True)
def settings(
    method: str, penalty: str, reference: str, tol: Any, tol_gap: Any, max_passes: int, precision: str, backend: str,
    threads: int | None, where: tuple[str, ...] = ("auto", "cpu"),
) -> Options | None:  # fmt: skip
    """Return the options of a plain call; None if the call is not plain or has a wrong argument.

    ``where``: the values of ``backend`` that the caller can serve.
    """
    if penalty != "kl" or reference != "product" or backend not in where or threads not in (None, 1):
        return None
    if method not in METHODS or METHODS[method][2]:
        return None
    try:
        as_count(max_passes, "max_passes", MOST_PASSES)
        return make_options(method, precision, tol, tol_gap, threads)
    except (TypeError, ValueError, KeyError):
        return None


@functools.cache
def core() -> tuple[ModuleType, Any]:
    backend = pick("cpu")
    return backend, import_module(backend.__name__ + ".plain")


def number(value: Any) -> float:
    """Return a plain number as a float; 0, valid for no argument here, for any other object."""
    try:
        return float(value) if type(value) in NUMBER_TYPES else 0.0
    except OverflowError:
        return 0.0


def penalties_of(reg_m: Any) -> tuple[float, float] | None:
    """Return the rho of both sides; None if one of them is not a number > 0."""
    pair = reg_m if type(reg_m) in (tuple, list) and len(reg_m) == 2 else (reg_m, reg_m)
    first, second = map(number, pair)
    return (first, second) if first > 0 and second > 0 else None


def masses(weight: Any, length: int) -> Any:
    """Return a float64 copy of the masses; None if the ordinary path must convert or refuse the masses."""
    if weight is None:
        return np.full(length, 1.0 / length)
    if type(weight) is np.ndarray and weight.shape == (length,) and weight.dtype.kind == "f":
        return weight.astype(DOUBLE)
    return None


def side_of(name: str, weight: Any, rho: float) -> Side:
    """Make a side from checked masses, and make the masses read-only."""
    rhos = np.full(len(weight), rho)
    weight.flags.writeable = rhos.flags.writeable = False
    return Side(name, weight, "kl" if rho < np.inf else "balanced", rhos)


def readable(M: Any) -> Any:
    """Return the dtype of M if M is an array that the core can read, or points to be formed; else None."""
    if type(M) is np.ndarray:
        known = M.ndim == 2 and M.dtype in (DOUBLE, SINGLE) and M.flags.c_contiguous and M.flags.aligned
    else:
        known = type(M) is PointCloud and M.ndim == 2 and cost_of(M).forms(FORM_BYTES) and not cost_of(M).on_device
    return M.dtype if known and 0 < M.size <= SERIAL_ENTRIES else None


def attempt(
    M: Any, a: Any, b: Any, reg: Any, reg_m: Any, arguments: tuple[Any, ...], plan: Any = None
) -> "PlainResult | None":  # fmt: skip
    """Solve a plain problem; return None if the problem is not plain or the core cannot finish it.

    ``arguments``: the positional arguments of `settings`; ``plan``: an array for the plan, or True for a new array.
    """
    dtype, reg, rho = readable(M), number(reg), penalties_of(reg_m)
    if dtype is None or rho is None or not reg > 0:
        return None
    try:
        options = settings(*arguments)
    except TypeError:  # an argument is not hashable
        return None
    if options is None or turned_sides(rho[0] == np.inf, rho[1] == np.inf, options) or reg == np.inf:
        return None
    begun = time.perf_counter()
    m, n = M.shape
    a, b = masses(a, m), masses(b, n)
    if a is None or b is None:
        return None
    if rho[0] == rho[1] == np.inf and abs(a.sum() - b.sum()) > EVEN * a.sum():
        b *= evening(a.sum(), b.sum())
    backend, whole = core()
    cost = Dense(M) if type(M) is np.ndarray else Formed(cost_of(M), backend.costs(cost_of(M), 1))
    out = np.empty((m, n), dtype) if plan is True else plan if plan is None else as_out(plan, (m, n), dtype, cost.array)
    inside = out if dtype == cost.array.dtype else None  # costs of float32 points are float64

    def compare() -> bool:
        sides = side_of("a", a, rho[0]), side_of("b", b, rho[1])
        parts = Problem(cost, *sides, reg, "product", 0.0, 0.0, True, 1.0).several_parts
        check_parts(*sides, parts)
        return evening_of_parts(*sides, parts) is None

    found = whole.solve(cost, a, b, reg, rho, options, arguments[5], ladder, inside, compare)
    if (
        found is None or (cost.cloud and found.forbidden) or (dtype == SINGLE and not holds_float32(found.mass, M.size))
        # or a ScalingWarning is due (odd_scale in problem/validate.py)
        or is_sentinel((found.high - found.low) / reg) or moves_little(found.mass, *found.masses)
        or (np.inf in rho and constant_of(found.low, found.high, reg))
    ):  # fmt: skip
        return None
    if out is not inside:
        whole.form_plan(cost.array, reg, found.numbers[2 * (m + n) :], out)
    return PlainResult(backend, cost, a, b, reg, rho, found, options, begun, out)


def as_it_is(result: Result, scale_cost: float = 1.0, scale_mass: float = 1.0) -> Result:
    result.scale_cost, result.scale_mass = scale_cost, scale_mass
    return result


def in_core(options: Options, larger: int, symmetric: bool, more: list[str], whose: str = "") -> str:
    """Return the text of `Result.how` for a problem that the core solved in one call."""
    more = [*more, "one potential"] if symmetric else more
    return in_words(f"{options.precision} tiles", larger, *more, f"one call of the core{whose}")


def is_plain(task: BatchProblem) -> Any:
    """Return which problems of a batch the core can solve in one call: a mask, or one bool for all."""
    one_rho = None not in (task.rows.scalar_rho, task.cols.scalar_rho)
    if not one_rho or task.reference != "product":
        return False
    if task.several:
        return task.several.solved_whole
    return task.cost.operator == "tiles" and task.cost.size <= SERIAL_ENTRIES


def told_passes(records: bytes, seconds: float) -> list[Stats]:
    """Return the stats of the passes of one call that took ``seconds``."""
    passes = told(np.frombuffer(records, STATS), 1)
    for stat in passes:
        stat.seconds = seconds
    return passes


class LazyResult(Result):
    """The `Result` of a problem that was solved in one call; members are computed on first use."""

    def __init__(self, backend: ModuleType, cost: Dense, found: Any, options: Options, begun: float) -> None:
        """``found``: has ``numbers`` (log u, log v, r and s in one array), ``passes``, ``mass`` and ``products``."""
        self._backend, self._cost, self._found, self.options = backend, cost, found, options
        self._seconds, self._threads = time.perf_counter() - begun, options.threads

    def __reduce_ex__(self, protocol: Any) -> Any:
        potentials, marginals = self.own_logs, (self.row_marginal, self.col_marginal)
        kept = potentials, marginals, self.trace, self.status, self._threads, self.how
        return as_it_is, (Result(self.problem, self._backend, *kept), self.scale_cost, self.scale_mass)

    def _part(self, k: int) -> Any:
        """Return part k of ``numbers``: log u, log v, r, s, or, if stored, the exponents of the plan."""
        m, n = self._cost.shape
        ends = 0, m, m + n, 2 * m + n, 2 * (m + n), 3 * (m + n)
        return self._found.numbers[ends[k] : ends[k + 1]]

    units: tuple[float, float, float, float, float]  # reg, rho_a, rho_b and both masses, for `odd_unit`
    mass = property(lambda self: self._found.mass)
    products = property(lambda self: self._found.products)
    own_logs = property(lambda self: (self._part(0), self._part(1)))
    row_marginal = property(lambda self: self._part(2))
    col_marginal = property(lambda self: self._part(3))

    @cached_property
    def trace(self) -> list[Stats]:  # type: ignore[override]
        return told_passes(self._found.passes, self._seconds)


class PlainResult(LazyResult):
    """The `Result` of a plain problem that the core solved; its plan is small enough to keep."""

    def __init__(
        self, backend: ModuleType, cost: Dense, a: Any, b: Any, reg: float, rho: Any, found: Any, options: Options,
        begun: float, plan: Any,
    ) -> None:  # fmt: skip
        super().__init__(backend, cost, found, options, begun)
        self._a, self._b, self._reg, self._rho = a, b, reg, rho
        self.units = (reg, *rho, *found.masses)
        self.status = STATUS_OF[found.status]
        if plan is not None:
            self.plan = plan

    @cached_property
    def problem(self) -> Problem:  # type: ignore[override]
        found, (rho_a, rho_b) = self._found, self._rho
        rows, cols, mass = side_of("a", self._a, rho_a), side_of("b", self._b, rho_b), self._a.sum() * self._b.sum()
        range_ = found.low, found.high, found.forbidden
        return Problem(self._cost, rows, cols, self._reg, "product", *range_, float(mass))

    @cached_property
    def how(self) -> str:  # type: ignore[override]
        more = [FORMED] * isinstance(self._cost, Formed) + newton_words(self._found.products)
        return in_core(self.options, self._found.larger, self._found.symmetric, more)

    def _blocks(self) -> Iterator[tuple[int, Any]]:
        yield 0, self.plan  # one block: the plan is small

    def _drawn(self, rows: Any, at: Any) -> tuple[Any, Any]:
        return (rows, columns_in(self.plan, rows, at)) if self._holds(rows) else super()._drawn(rows, at)

    @cached_property
    def plan(self) -> Any:
        """The plan P, (m, n), in M's dtype; formed from M with float64 exponents on first use, then kept."""
        out = np.empty(self._cost.shape, self._cost.dtype)
        core()[1].form_plan(self._cost.array, self._reg, self._part(4), out)
        return out
