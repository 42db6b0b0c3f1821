"""Solve a plain problem on a GPU by one call of the backend, or make its Problem with few checks.

A problem is plain if M is an array on the device, or points there and their matrix is formed; the masses are floating
point arrays or absent; each side is KL or balanced with one reg_m; and c = a b^T. Any other problem goes through
problem/validate.py, which also names wrong arguments.
`begin` launches the solve of a problem that needs a single stage (ascend/stages.py), by the same passes; the host does
not wait. If the call finds the problem not plain, or cannot finish, the problem becomes a Problem (`plain_problem`) and
is solved by all stages. The stages start from zeros or, if passes are left, from the potentials that the call reached.
Twin: route/plain.py.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..answer.draw import row_shares, seed_of
from ..arrays import host, namespace
from ..ascend.stages import FORMED, TOGETHER, in_words, newton_words
from ..backends import Options, Stats, pick
from ..backends.newton import HOLDS, ColumnsNewton
from ..backends.operator import parts_of
from ..backends.records import ABSORB, RUNNING
from ..cached import cached_property
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.kinds import formed
from ..problem.problem import Problem
from ..problem.side import Side
from ..problem.validate import MASS_TOLERANCE, evening, moves_little
from .plain import LazyResult, number, penalties_of, settings, side_of, told_passes

MOST_SPREAD = 1e3  # largest range(M) / reg without larger regs: they cost 4 ms here, and save up to 10 passes of .03 ms
MET = 0.3  # of tol: how closely one potential meets hard columns before Newton's step, made only once
MOST_BETWEEN = 1 << 22  # most pairs of points for an answer that keeps costs and K: 50 MB
BOTH_MET = 0.03  # MET for two hard sides on a float64 K: 30 of 30 problems converged, 24 with .3, 16 with 1


class Posed(NamedTuple):
    """A plain problem on a device; M has not been read yet."""

    backend: ModuleType
    cost: Dense
    rows: Side
    cols: Side
    reg: float
    options: Options


@functools.cache
def whole() -> tuple[ModuleType, Any]:
    """Return the CUDA backend and its module that solves a problem in one call."""
    backend = pick("cuda")
    return backend, import_module(backend.__name__ + ".plain")


def posed(M: Any, a: Any, b: Any, reg: Any, reg_m: Any, arguments: tuple[Any, ...]) -> Posed | None:
    """Return a plain problem on a device, or None if the problem is not plain.

    ``arguments``: the positional arguments of `settings` in plain.py.
    """
    reg, rho = number(reg), penalties_of(reg_m)
    if rho is None or not 0 < reg < math.inf or not is_readable(M):
        return None
    try:
        options = settings(*arguments, where=("auto", "cuda"))
    except TypeError:  # an argument is not hashable
        return None
    rows, cols = (given_side(*x) for x in (("a", a, M.shape[0], rho[0]), ("b", b, M.shape[1], rho[1])))
    if options is None or rows is None or cols is None:
        return None
    if rho[0] == rho[1] == math.inf:
        if arguments[6] == "mixed" or abs(rows.mass - cols.mass) > MASS_TOLERANCE * rows.mass:
            return None  # `begin` solves two hard sides on a float64 K only
        even = float(evening(rows.mass, cols.mass))
        cols = cols if even == 1 else dataclasses.replace(cols, weight=cols.weight * even)
    backend = whole()[0]
    if type(M) is not PointCloud:
        return Posed(backend, Dense(backend.asarray(M)), rows, cols, reg, options)
    cost = formed(cost_of(M), backend)
    if cost.cloud.alone and options.memory and rows.alike(cols):
        options = dataclasses.replace(options, symmetric=True)
    return Posed(backend, cost, rows, cols, reg, options)


def is_readable(M: Any) -> bool:
    """Return whether M is an array on a device, or points there to be formed, with a cost error linear in the cost."""
    if type(M) is not PointCloud:
        return namespace(M) is not np and M.ndim == 2 and M.dtype.char in "fd" and M.flags.c_contiguous and M.size > 0
    cloud = cost_of(M)
    plain = M.ndim == 2 and cloud.here and cloud.plain and cloud.core[0].degree > 0
    return bool(plain and cloud.forms(whole()[0].form_bytes(cloud)))


@functools.lru_cache(maxsize=64)
def limits(options: Options, hard_rows: bool, hard_cols: bool, most: int) -> tuple[Options, Options, int, float] | None:
    """Return the options of the answer, the options of the passes, the most passes, and the largest range(M) / reg.

    Return None if one call cannot solve such problems. Above this range(M) / reg the problem needs larger regs.
    """
    one = options.symmetric
    both = hard_cols and not one
    if (both and not hard_rows) or not options.memory:
        return None  # hard columns alone are solved as rows of the transpose
    if both:
        options = dataclasses.replace(options, precision="float64")
    part = (BOTH_MET if both else MET) if hard_cols else 1.0
    passes = dataclasses.replace(options, tol=part * options.tol)
    return (options, passes, min(most, TOGETHER), math.inf) if one else (options, passes, most, MOST_SPREAD)


class Begun:
    """A launched solve. A call waits for it, and returns its result, or None if the problem needs more calls."""

    def __init__(self, problem: Posed, sent: Any) -> None:
        """``problem``: with the options of the answer, not of the passes."""
        self.problem, self.sent, self.since = problem, sent, time.perf_counter()

    @property
    def solved(self) -> bool:
        """Wait; return whether there is a plan with enough mass that no ScalingWarning is due."""
        mass, (_, _, rows, cols, *_) = self.sent.mass, self.problem
        return mass >= 0 and not moves_little(mass, rows.mass, cols.mass)

    @property
    def certain(self) -> bool:
        """Wait; return whether the plan is certified without Newton's step (columns that are not hard)."""
        return self.problem.cols.penalty != "balanced" and self.solved

    def __call__(self) -> "DeviceResult | None":
        if not self.solved:
            return None
        result = DeviceResult(self.problem, self.sent.told(), self.since)
        if not self.certain and not result.meets(self.problem.cost.array):
            result.status = "stalled"
        return result

    def left(self, most: int) -> tuple[tuple[Any, Any] | None, list[Stats]]:
        """Wait; return the potentials of an unfinished solve, and the stats of its passes.

        Return None and no passes if the solve has failed, or has made ``most`` passes.
        """
        if self.sent.status not in (RUNNING, ABSORB):
            return None, []
        (m, n), found = self.problem.cost.shape, self.sent.told()
        trace = told_passes(found.passes, time.perf_counter() - self.since)
        return ((np.zeros(m), found.numbers[m : m + n]), trace) if len(trace) < most else (None, [])


def begin(problem: Posed, most: int) -> Begun | None:
    """Launch a solve of at most ``most`` passes; return None if the problem needs more than one call."""
    backend, cost, rows, cols, reg, _ = problem
    found = limits(problem.options, rows.penalty == "balanced", cols.penalty == "balanced", most)
    if found is None or backend.quicker_turned(cost):
        return None
    options, *given = found
    least = cost.error(0.0)
    sent = whole()[1].begin(cost.array, rows, cols, reg, *given, (cost.error(1.0) - least, least))
    return None if sent is None else Begun(problem._replace(options=options), sent)


class Turn(NamedTuple):
    """A prepared solve between points, launched without waiting; all but the coordinates is known."""

    problem: Posed  # without costs
    prepared: Any
    room: int  # size of a solve's buffer on the device, in words

    def begin(self, *places: Any) -> Begun:
        """Launch a solve and, after it, a draw of pairs; ``places``: the arguments of `Prepared.between`."""
        return Begun(self.problem, self.prepared.between(*places))

    def told(self, begun: Begun, room: Any) -> "tuple[DeviceResult | None, Any]":
        """Wait for a solve; return its result or None, and the costs M, a view of its buffer ``room``."""
        M, exponents = self.prepared.parts(room)
        begun.problem, begun.sent = begun.problem._replace(cost=Dense(M)), begun.sent.apart(self.prepared, exponents)
        return begun(), M


@functools.lru_cache(maxsize=8, typed=True)
def between(
    here: tuple[Any, ...], m: int, n: int, d: int, itemsize: int, reg: Any, reg_m: Any, **words: Any
) -> Turn | None:  # fmt: skip
    """Prepare solves between m and n points in d dimensions, with m pairs drawn from each plan.

    Return None if one call cannot solve such problems. ``here``: the current device and stream, and the text of
    MAPUOT_CUDA (parts of the cache's key); ``itemsize``: bytes of a coordinate; ``words``: options of `one_call`.
    """
    if not 0 < m * n <= MOST_BETWEEN:
        return None
    backend, module = whole()
    problem, most = one_posed(module.zeros(m, n), None, None, reg, reg_m, **words)
    found = problem and limits(problem.options, *(side.penalty == "balanced" for side in problem[2:4]), most)
    if not problem or not found or backend.quicker_turned(problem.cost):
        return None
    options, *given = found
    prepared = module.Prepared(problem.cost.array, *problem[2:5], *given, (d, "f" if itemsize == 4 else "d", m))
    if not prepared.fits or not prepared.workspace.launch.persistent:
        return None
    return Turn(problem._replace(cost=None, options=options), prepared, prepared.room[-1])  # type: ignore[arg-type]


def distances(x: Any, y: Any) -> Any:
    """Return the matrix of squared distances of points on the current device."""
    return whole()[1].distances(*map(whole()[0].asarray, (x, y)))


def nothing() -> None:
    """Return None: the problem needs more than one call."""


def one_call(M: Any, a: Any, b: Any, reg: Any, reg_m: Any, **words: Any) -> "Callable[[], DeviceResult | None]":
    """Launch a solve of a plain problem on a device; return a function that waits for its result.

    The function returns None if the problem is not plain or needs more than one call. ``words``: options of `solve`.
    """
    problem, most = one_posed(M, a, b, reg, reg_m, **words)
    return (problem and begin(problem, most)) or nothing


def one_posed(
    M: Any, a: Any, b: Any, reg: Any, reg_m: Any, tol: Any = 1e-6, max_passes: Any = 10_000, precision: str = "auto",
    backend: str = "auto", threads: Any = None, **others: Any,
) -> tuple[Posed | None, Any]:  # fmt: skip
    """Return the plain problem, or None, and the most passes; a problem with options in ``others`` is not plain."""
    words = "auto", "kl", "product", tol, None, max_passes, precision, backend, threads
    return None if others else posed(M, a, b, reg, reg_m, words), max_passes


def plain_problem(given: Posed) -> Problem | None:
    """Return the Problem after one read of M; None if M or the units are odd (NaN, inf, overflow)."""
    backend, cost, rows, cols, reg, _ = given
    mass = rows.mass * cols.mass
    low, high, bad, infinite = cost.range(backend)
    if bad or infinite or not all(map(math.isfinite, (low / reg, high / reg, (high - low) / reg, mass))):
        return None
    return Problem(cost, rows, cols, reg, "product", low, high, False, mass).lowered()


class DeviceResult(LazyResult):
    """The `Result` of a problem that one call solved on a device; the exponents of its plan stay there."""

    status = "converged"
    products = 0  # number of products of Newton's step

    def __init__(self, problem: Posed, found: Any, begun: float) -> None:
        cost = problem.cost.cloud or problem.cost  # with points, the plan is computed from the points
        super().__init__(problem.backend, cost, found, problem.options, begun)
        self._posed = problem if cost is problem.cost else problem._replace(cost=cost)
        rho_a, rho_b = (side.scalar_rho or math.inf for side in (problem.rows, problem.cols))
        self.units = problem.reg, rho_a, rho_b, problem.rows.mass, problem.cols.mass

    def meets(self, M: Any) -> bool:
        """Certify a plan that misses hard columns by Newton's step; return whether the error is within tol."""
        newton = ColumnsNewton(dataclasses.replace(self.problem, cost=Dense(M)))
        newton.record.budget = FEW_PRODUCTS
        verdict = newton.step_from(self.own_logs, self.options, self._backend, self.trace[-1], self.options.tol)
        self.products = newton.products
        return verdict == HOLDS

    @cached_property
    def problem(self) -> Problem:  # type: ignore[override]
        (_, cost, rows, cols, reg, _), (low, high) = self._posed, self._found.range
        return Problem(cost, rows, cols, reg, "product", low, high, False, rows.mass * cols.mass)

    @cached_property
    def how(self) -> str:  # type: ignore[override]
        reads, one = f"{self.options.precision} tiles on a GPU", self.options.symmetric
        more = [FORMED] * (self._cost.cloud is not None) + ["one potential"] * one + newton_words(self.products)
        return in_words(f"{reads}, {'portable' if one else 'persistent'}", 0, *more)

    def _pairs(self, size: int, rng: np.random.Generator, method: str) -> tuple[Any, Any]:
        if method == "rows" or self._cost.cloud is not None:
            return super()._pairs(size, rng, method)
        given = self._found.exponents
        if method == "independent":  # the device draws from a seed: no transfer of random numbers
            return self._found.prepared.drawn(self._cost.array, given, size, seed_of(rng))  # type: ignore[no-any-return]
        shares = row_shares(size, rng, method), rng.random(size)
        return self._new_stream().draw_by(given[sum(self._cost.shape) :], *shares)  # type: ignore[no-any-return]

    def _new_stream(self) -> Any:
        m, n = self._cost.shape
        alpha, beta = self._found.exponents[:m], self._found.exponents[m : m + n]
        return self._backend.operator_of(self._cost, *parts_of(self.problem)[1:], self._threads).take(alpha, beta)


FEW_PRODUCTS = 30  # of Newton's step, .15 ms each; factorising 1000 points takes 4 ms (H200)
FEW_POINTS = 1 << 14  # of a side that is cached for later calls; with more points the solve dominates


@functools.lru_cache(maxsize=64)
def known_side(name: str, weight: bytes | int, rho: float) -> Side | None:
    """Return the side with these float64 masses, or with ``weight`` equal masses; its cached properties are kept.

    Calls may share the side, and a workspace with it, since nothing writes to a side.
    """
    weights = np.full(weight, 1.0 / weight) if isinstance(weight, int) else np.frombuffer(weight).copy()
    return side_of(name, weights, rho) if weights.min() > 0 and weights.sum() < math.inf else None


def given_side(name: str, weight: Any, length: int, rho: float) -> Side | None:
    """Return a side, or None if its masses must be converted or refused, which problem/validate.py does."""
    if weight is None:
        return known_side(name, length, rho)
    if not hasattr(weight, "dtype") or weight.shape != (length,) or weight.dtype.kind != "f":
        return None
    known = known_side if length <= FEW_POINTS else known_side.__wrapped__
    return known(name, np.asarray(host(weight), np.float64).tobytes(), rho)
