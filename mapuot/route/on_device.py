"""Carry a plain problem (front.py) that lies on a GPU through one call, which the host need not wait for.

`begin` launches the solve of a problem that needs a single stage (ascend/stages.py), by the same passes. If the call
cannot finish, or finds the problem not plain, the stages solve it: from zeros or, if passes are left, from the
potentials that the call reached. Twin: route/plain.py.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..answer.draw import row_shares, seed_of
from ..arrays import host, is_on_device
from ..ascend.settings import STAGES
from ..ascend.stages import FORMED, has_long_rows, in_words, newton_words
from ..backends import Options, load
from ..backends.newton import HOLDS, ColumnsNewton
from ..backends.operator import parts_of
from ..backends.records import ABSORB, RUNNING
from ..cached import cached_property
from ..outcome import after_one_call
from ..penalties import F64
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.problem import Problem
from ..problem.validate import moves_little, moves_much
from .front import Call, PlainProblem, Start, read
from .plain import LazyResult, stats_of_call

MOST_RANGE = 1e3  # largest range(M) / reg without larger regs: they cost 4 ms here, and save up to 10 passes of .03 ms
MET = 0.3  # of tol: how closely one potential meets hard columns before Newton's step, made only once
MOST_BETWEEN = 1 << 22  # most pairs of points for an answer that keeps costs and K: 50 MB
FEW_PRODUCTS = 30  # of Newton's step, .15 ms each; factorising 1000 points takes 4 ms (H200)
BOTH_MET = 0.03  # MET for two hard sides on a float64 K: 30 of 30 problems converged, 24 with .3, 16 with 1
OPTION_NAMES = frozenset(Call._fields[3:])  # the arguments of `solve` other than M and the masses
COARSEST = 1e-3  # largest tol that BOTH_MET is a part of: at 1e-2 a step from a worse pass failed, 14 ms for 4.5 (H200)


@functools.cache
def solver() -> Any:
    """Return the module that solves a problem by one CUDA graph; it is imported on first use."""
    load("cuda")  # says which packages are missing
    return import_module("..backends.cuda.graph_solve", __package__)


class CallLimits(NamedTuple):
    """The options of a problem that one call may solve, and the limits of this call."""

    options: Options  # of the answer
    passes: Options  # of the passes: Newton's step may follow them
    most: int  # passes at most
    most_range: float  # largest range(M) / reg; above it larger regs come first


@functools.lru_cache(maxsize=64)
def limits(options: Options, hard_rows: bool, hard_cols: bool, most: int) -> CallLimits | None:
    """Return the limits of one call for such problems; None if one call cannot solve them."""
    both_hard = hard_cols and not options.symmetric
    if (both_hard and not hard_rows) or not options.anderson_depth:
        return None  # soft rows and hard columns: `choose_route` exchanges the sides
    if both_hard:
        options = dataclasses.replace(options, precision="float64")
        tol = BOTH_MET * min(options.tol, COARSEST)
    elif hard_cols:
        tol = MET * options.tol
    else:
        tol = options.tol
    passes = dataclasses.replace(options, tol=tol)
    if options.symmetric:
        return CallLimits(options, passes, min(most, STAGES.most_together), math.inf)
    return CallLimits(options, passes, most, MOST_RANGE)


class PendingSolve:
    """A solve that runs on a GPU; its members wait for the end."""

    def __init__(self, problem: PlainProblem, launched: Any) -> None:
        """``problem``: with the options of the answer, not of the passes."""
        self.problem, self.launched, self.since = problem, launched, time.perf_counter()

    @property
    def solved(self) -> bool:
        """Wait; return whether there is a plan with enough mass that no ScalingWarning is due."""
        mass, (rows, cols) = self.launched.mass, self.problem.sides
        odd = moves_little(mass, rows.mass, cols.mass) or moves_much(mass, rows.mass, cols.mass)
        return mass >= 0 and not odd

    @property
    def certain(self) -> bool:
        """Wait; return whether the plan is certified without Newton's step (columns that are not hard)."""
        return not self.problem.hard[1] and self.solved

    def result(self) -> "DeviceResult | None":
        """Wait; return the result, or None if the problem needs more than one call."""
        if not self.solved:
            return None
        result = DeviceResult(self.problem, self.launched.answer(), self.since)
        is_certified = self.certain or result.meets(self.problem.cost.array)
        result.status = after_one_call(is_certified).status
        return result

    def unfinished(self, most: int) -> Start:
        """Wait; return the state that the solve has reached; zeros if it has failed, or has made ``most`` passes."""
        if self.launched.status not in (RUNNING, ABSORB):
            return Start()
        m, n = self.problem.cost.shape
        found = self.launched.answer()
        trace = stats_of_call(found.passes, time.perf_counter() - self.since)
        if len(trace) < most:
            return Start((np.zeros(m), found.numbers[m : m + n]), trace)
        return Start()


def solve_on_device(call: Call, problem: PlainProblem) -> "DeviceResult | Start":
    """Solve a plain problem by one call of a GPU; return the place where the stages begin if that is not enough."""
    pending = begin(call, problem)
    if pending is None:
        return Start()
    result = pending.result()
    if result is None:
        return pending.unfinished(call.max_passes)
    if result.status == "stalled":
        return Start((result.log_u, result.log_v), result.trace, result.status, result.products)
    return result


def begin(call: Call, problem: PlainProblem) -> PendingSolve | None:
    """Launch a solve; return None if the problem needs more than one call."""
    found = limits_of(call, problem)
    if found is None:
        return None
    rows, cols = problem.sides
    cost = problem.cost
    own = cost.cloud or cost
    least = own.error(0.0)
    rounding = own.error(1.0) - least, least, cost.rounding
    launched = solver().begin(cost.array, rows, cols, problem.reg, found.passes, found.most, found.most_range, rounding)
    if launched is None:
        return None
    return PendingSolve(problem._replace(options=found.options), launched)


def limits_of(call: Call, problem: PlainProblem) -> CallLimits | None:
    """Return `limits` of a problem; None if one call cannot solve it."""
    if call.out is not None or has_long_rows(problem.cost, problem.backend):
        return None
    if all(problem.hard) and call.precision == "mixed":  # two hard sides are solved on a float64 K only
        return None
    return limits(problem.options, *problem.hard, call.max_passes)


class CapturedSolve(NamedTuple):
    """A prepared solve between points, launched without waiting; all but the coordinates is known."""

    problem: PlainProblem  # without costs
    prepared: Any
    words: int  # length of the buffer of a solve on the device

    def begin(self, *places: Any) -> PendingSolve:
        """Launch a solve and, after it, a draw of pairs; ``places``: the arguments of `SolveLaunches.between`."""
        return PendingSolve(self.problem, self.prepared.between(*places))

    def result(self, pending: PendingSolve, buffer: Any) -> "tuple[DeviceResult | None, Any]":
        """Wait for a solve; return its result or None, and the costs M, a view of its ``buffer``."""
        M, exponents = self.prepared.views(buffer)
        pending.problem = pending.problem._replace(cost=Dense(M))
        pending.launched = pending.launched.copied(self.prepared, exponents)
        return pending.result(), M


def capture(
    here: tuple[Any, ...], m: int, n: int, d: int, itemsize: int, words: dict[str, Any]
) -> CapturedSolve | None:  # fmt: skip
    """Return the solves that `between` prepares; None for ``words`` that are no options, or that have no hash."""
    if not words.keys() <= OPTION_NAMES:
        return None
    try:
        hash(tuple(words.values()))
    except TypeError:
        return None
    return between(here, m, n, d, itemsize, **words)


@functools.lru_cache(maxsize=8, typed=True)
def between(
    here: tuple[Any, ...], m: int, n: int, d: int, itemsize: int, reg: Any, reg_m: Any, **words: Any
) -> CapturedSolve | None:  # fmt: skip
    """Prepare solves between m and n points in d dimensions, with m pairs drawn from each plan.

    Return None if one call cannot solve such problems. ``here``: the current device and stream, and the text of
    MAPUOT_CUDA (parts of the cache's key); ``itemsize``: bytes of a coordinate; ``words``: options of `one_call`.
    """
    if not 0 < m * n <= MOST_BETWEEN:
        return None
    module = solver()
    call = Call(module.zeros(m, n), None, None, reg, reg_m, **words)
    problem = read(call)
    if problem and call.is_quiet:
        found = limits_of(call, problem)
    else:
        found = None
    if not problem or not found:
        return None
    points = module.PointInputs(d, "f" if itemsize == 4 else "d", m)
    given = found.passes, found.most, found.most_range, points
    prepared = module.SolveLaunches(problem.cost.array, *problem.sides, problem.reg, *given)
    if not prepared.fits or not prepared.workspace.launch.persistent:
        return None
    cloud = cost_of(PointCloud(np.zeros((1, d)), np.zeros((1, d))))
    least = cloud.error(0.0)
    prepared.set_rounding(cloud.error(1.0) - least, least, 0.0)
    unread = problem._replace(cost=None, options=found.options)
    return CapturedSolve(unread, prepared, prepared.buffer_ends[-1])


def distances(x: Any, y: Any) -> Any:
    """Return the matrix of squared distances of points on the current device."""
    return solver().distances(*map(load("cuda").asarray, (x, y)))


def draw_between(into: Any, x: Any, y: Any, shares: Any, reg: Any, reg_m: Any, **words: Any) -> bool:
    """Solve between points (m, d) and (n, d) of equal masses, and draw m pairs, by one graph of the device.

    Return False if the problem needs more than one call. ``into``: the int32 rows and columns of the pairs, (m,)
    each; ``shares``: (2, m) in the type of the points, the shares of cumulated mass that name rows and columns;
    ``words``: options of `solve`.
    """
    fits = x.ndim == 2 and x.shape[1:] == y.shape[1:] and x.dtype == y.dtype == shares.dtype and x.dtype.char in "fd"
    if not (fits and all(z.flags.c_contiguous for z in (x, y, shares, *into))):
        return False
    m, d = x.shape
    module = solver()
    here = *module.current(), os.environ.get("MAPUOT_CUDA")
    found = capture(here, m, len(y), d, x.itemsize, {"reg": reg, "reg_m": reg_m, **words})
    if found is None:
        return False
    buffer, on_stream = module.buffer_of(found.words)
    points, pairs = (tuple(z.data.ptr for z in both) for both in ((x, y), into))
    at = shares.data.ptr
    places = at, at + m * shares.itemsize
    kinds = module.NARROW_PAIRS + module.NARROW_SHARES * (shares.itemsize == 4)
    pending = found.begin(points, buffer.data.ptr, pairs, m, 0, on_stream, places, kinds)
    if pending.certain:
        return True
    result = found.result(pending, buffer)[0]
    return result is not None and result.status == "converged"


def no_result() -> None:
    """Return None: the problem needs more than one call."""


def one_call(M: Any, a: Any, b: Any, reg: Any, reg_m: Any, **words: Any) -> "Callable[[], DeviceResult | None]":
    """Launch a solve of a plain problem on a device; return a function that waits for its result.

    The function returns None if the problem is not plain or needs more than one call. ``words``: options of `solve`.
    """
    if not words.keys() <= OPTION_NAMES:  # `solve` names the argument
        return no_result
    call = Call(M, a, b, reg, reg_m, **words)
    if is_on_device(cost_of(M)) and call.is_quiet:
        problem = read(call)
    else:
        problem = None
    if problem and problem.is_on_device:
        pending = begin(call, problem)
    else:
        pending = None
    if pending:
        return pending.result
    return no_result


class DeviceResult(LazyResult):
    """The `Result` of a problem that one call solved on a device; the exponents of its plan stay there."""

    products = 0  # number of products of Newton's step

    def __init__(self, problem: PlainProblem, found: Any, begun: float) -> None:
        cost = problem.cost.cloud or problem.cost  # values are sums over the points, without the rounding of M
        super().__init__(problem.backend, cost, found, problem.options, begun)
        self._plain = problem
        rows, cols = problem.sides
        self.units = (problem.reg, *problem.rho, rows.mass, cols.mass)

    def meets(self, M: Any) -> bool:
        """Certify a plan that misses hard columns by Newton's step; return whether the error is within tol."""
        newton = ColumnsNewton(dataclasses.replace(self.problem, cost=Dense(M)))
        newton.record.budget = FEW_PRODUCTS
        verdict = newton.step_from(self.own_logs, self.options, self._backend, self.trace[-1], self.options.tol)
        self.products = newton.products
        return verdict == HOLDS

    @cached_property
    def problem(self) -> Problem:  # type: ignore[override]
        (rows, cols), (low, high) = self._plain.sides, self._found.range
        return Problem(self._cost, rows, cols, self._plain.reg, "product", low, high, False, rows.mass * cols.mass)

    @cached_property
    def how(self) -> str:  # type: ignore[override]
        reads = f"{self.options.precision} tiles on a GPU"
        one = self.options.symmetric
        more = [FORMED] * (self._cost.cloud is not None) + ["one potential"] * one + newton_words(self.products)
        return in_words(f"{reads}, {'portable' if one else 'persistent'}", 0, *more)

    def _pairs(self, size: int, rng: np.random.Generator, method: str) -> tuple[Any, Any]:
        if method == "rows":
            return super()._pairs(size, rng, method)
        given = self._found.exponents
        if method == "independent":  # the device draws from a seed: no transfer of random numbers
            pairs = self._found.prepared.draw_pairs(self._plain.cost.array, given, size, seed_of(rng))
        else:
            shares = row_shares(size, rng, method), rng.random(size)
            pairs = self._new_stream().draw_by(given[sum(self._cost.shape) :], *shares)
        if self._cost.cloud:  # the answers of points lie on the host
            pairs = host(pairs)
        return pairs[0], pairs[1]

    def pairs_at(self, shares: Any) -> tuple[Any, Any]:
        self._check_mass()
        pairs = self._new_stream().draw_by(self._found.exponents[sum(self._cost.shape) :], *shares)
        if not is_on_device(shares):
            pairs = host(pairs)
        return pairs[0], pairs[1]

    def _new_stream(self) -> Any:
        return self._operator(self._plain.cost.array)

    @property
    def _exact_stream(self) -> Any:
        return self._operator()

    def _checked_sums(self, cost: float, *marginals: F64) -> tuple[float, F64, F64]:
        return cost, marginals[0], marginals[1]

    def _operator(self, formed: Any = None) -> Any:
        """Return the operator of the plan; for points it reads their matrix ``formed``, or makes their costs."""
        m, n = self._cost.shape
        alpha = self._found.exponents[:m]
        beta = self._found.exponents[m : m + n]
        found = self._backend.operator_of(self._cost, *parts_of(self.problem)[1:], self._threads)
        found.formed = formed
        return found.set_exponents(alpha, beta)
