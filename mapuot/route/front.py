"""The front of `solve`: its arguments as a `Call`, and the reader that finds whether they need any conversion.

A problem is plain if M is a matrix in memory or on a GPU, or points with a formed matrix; the masses are
floating-point arrays or absent; each side is KL or balanced with one reg_m; and c = a b^T. `read` then makes a
`PlainProblem` without reading M. Its carriers solve it in one call: plain.py by the C core, on_device.py on a GPU. A
problem that is too large for one call, or that needs another, becomes a `Problem` by one read of M (`problem_of`). All
other arguments, and wrong ones, go through problem/validate.py, which names them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import host, namespace
from ..backends import Options, Stats, load
from ..contract import Backend
from ..outcome import RUNNING
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.points import FORM_BYTES, FormedCosts
from ..problem.problem import Problem
from ..problem.side import Side
from ..problem.validate import EVEN, MASS_TOLERANCE, MOST_PASSES, as_count, as_range, evening
from ..processor import SERIAL_ENTRIES
from .options import METHODS, SCHEDULES, make_options

SINGLE = np.dtype(np.float32)
DOUBLE = np.dtype(np.float64)
NUMBER_TYPES = {float, int, np.float64, np.float32, np.int64, np.int32}
FEW_POINTS = 1 << 14  # of a side that is cached for later calls; with more points the solve dominates


class Call(NamedTuple):
    """The arguments of `solve`, as they were given."""

    M: Any
    a: Any = None
    b: Any = None
    reg: Any = None
    reg_m: Any = None
    method: Any = "auto"
    penalty: Any = "kl"
    reference: Any = "product"
    mask: Any = None
    tol: Any = 1e-6
    tol_gap: Any = None
    max_passes: Any = 10_000
    precision: Any = "auto"
    backend: Any = "auto"
    threads: Any = None
    schedule: Any = "auto"
    symmetric: Any = None
    warm_start: Any = None
    callback: Callable[[Stats], Any] | None = None
    progress: bool = False
    comm: Any = None
    checkpoint: Any = None
    out: Any = None

    @property
    def is_quiet(self) -> bool:
        """Tell whether the problem starts from zeros and nothing watches its passes, as a single call needs."""
        return self.warm_start is self.callback is self.checkpoint is self.symmetric is None and not self.progress


class Start(NamedTuple):
    """The place where the stages of a solve begin: zeros, or the state that a single call reached."""

    potentials: Any = None  # (log u, log v) or a Result; None: zeros
    trace: Any = ()  # the stats of the passes so far
    status: str = RUNNING.status
    products: int = 0  # products of Newton's steps so far


class PlainProblem(NamedTuple):
    """A problem whose arguments need no conversion. M has not been read, and the masses may still be odd."""

    backend: Backend
    cost: Any  # `Dense`, or on the CPU points, to form their matrix
    a: Any  # (m,) and (n,), float64, on the host
    b: Any
    reg: float
    rho: tuple[float, float]  # of the rows and of the columns; inf: balanced
    options: Options
    shared_sides: tuple[Side, Side] | None = None  # on a GPU: sides that other calls share

    @property
    def is_on_device(self) -> bool:
        """Tell whether M or the points lie on a GPU, which solves the problem."""
        return self.shared_sides is not None

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sides of the rows and of the columns."""
        return self.shared_sides or (side_of("a", self.a, self.rho[0]), side_of("b", self.b, self.rho[1]))

    @property
    def hard(self) -> tuple[bool, bool]:
        """Tell for the rows and for the columns whether their marginal is prescribed."""
        return self.rho[0] == math.inf, self.rho[1] == math.inf


def read(call: Call) -> PlainProblem | None:
    """Read the arguments of a plain problem; return None if one needs a conversion, or a check that names it."""
    place = place_of(call.M)
    reg = as_number(call.reg)
    rho = penalties_of(call.reg_m)
    if place is None or rho is None or not 0 < reg < math.inf or not call.mask is call.comm is None:
        return None
    if call.callback is not None and not callable(call.callback):
        return None
    try:
        options = plain_options(
            call.method, call.penalty, call.reference, call.tol, call.tol_gap, call.max_passes, call.precision,
            call.backend, call.threads, call.schedule, place,
        )  # fmt: skip
    except TypeError:  # an argument is not hashable
        return None
    if options is None:
        return None
    if place == "cpu":
        read_rest = read_on_host
    else:
        read_rest = read_on_device
    return read_rest(call, reg, rho, options)


def read_on_host(call: Call, reg: float, rho: tuple[float, float], options: Options) -> PlainProblem | None:
    """Read the rest of a plain problem with M or points in memory."""
    a = as_masses(call.a, call.M.shape[0])
    b = as_masses(call.b, call.M.shape[1])
    if a is None or b is None:
        return None
    if rho[0] == rho[1] == math.inf:
        factor = factor_between(a.sum(), b.sum())
        if factor is None:
            return None
        b *= factor
    if type(call.M) is np.ndarray:
        cost = Dense(call.M)
    else:
        cost = cost_of(call.M)
    return PlainProblem(load("cpu"), cost, a, b, reg, rho, options)


def read_on_device(call: Call, reg: float, rho: tuple[float, float], options: Options) -> PlainProblem | None:
    """Read the rest of a plain problem with M or points on a GPU; form the matrix of the points."""
    M = call.M
    backend = load("cuda")
    rows = given_side("a", call.a, M.shape[0], rho[0])
    cols = given_side("b", call.b, M.shape[1], rho[1])
    if rows is None or cols is None:
        return None
    if rho[0] == rho[1] == math.inf:
        factor = factor_between(rows.mass, cols.mass)
        if factor is None:
            return None
        if factor != 1:
            cols = dataclasses.replace(cols, weight=cols.weight * factor)
    if type(M) is PointCloud:
        cost: Any = FormedCosts(cost_of(M), *backend.formed(cost_of(M)))  # `place_of` found that it may be formed
        if cost.cloud.alone and options.anderson_depth and rows.alike(cols):
            options = dataclasses.replace(options, symmetric=True)
    else:
        cost = Dense(backend.asarray(M))
    return PlainProblem(backend, cost, rows.weight, cols.weight, reg, rho, options, (rows, cols))


def place_of(M: Any) -> str | None:
    """Return the backend that reads M as it is: a matrix, or points with a formed matrix; None if none does."""
    if type(M) is np.ndarray:
        is_read = M.ndim == 2 and M.dtype in (DOUBLE, SINGLE) and M.flags.c_contiguous and M.flags.aligned
        return "cpu" if is_read and M.size > 0 else None
    if type(M) is not PointCloud:
        on_device = namespace(M) is not np and M.ndim == 2
        return "cuda" if on_device and M.dtype.char in "fd" and M.flags.c_contiguous and M.size > 0 else None
    cloud = cost_of(M)
    if M.ndim != 2 or M.size == 0:
        return None
    if not cloud.on_device:
        return "cpu" if M.size <= SERIAL_ENTRIES and cloud.forms(FORM_BYTES) else None
    # the bound on the rounding of a cost must be linear in the cost
    is_linear = cloud.here and cloud.has_given_coordinates and cloud.core[0].degree > 0
    return "cuda" if is_linear and cloud.forms(load("cuda").form_bytes(cloud)) else None


@functools.lru_cache(maxsize=64, typed=True)
def plain_options(
    method: str, penalty: str, reference: str, tol: Any, tol_gap: Any, max_passes: int, precision: str, backend: str,
    threads: int | None, schedule: str, place: str,
) -> Options | None:  # fmt: skip
    """Return the options of a plain call; None if an argument is not plain, is wrong, or asks for another backend."""
    if penalty != "kl" or reference != "product" or backend not in ("auto", place) or schedule not in SCHEDULES:
        return None
    if method not in METHODS or METHODS[method][2]:
        return None
    try:
        as_count(max_passes, "max_passes", MOST_PASSES)
        return make_options(method, precision, tol, tol_gap, threads, schedule)
    except (TypeError, ValueError, KeyError):
        return None


def as_number(value: Any) -> float:
    """Return a plain number as a float; 0, which no argument allows, for any other object."""
    try:
        if type(value) in NUMBER_TYPES:
            return float(value)
        return 0.0
    except OverflowError:
        return 0.0


def penalties_of(reg_m: Any) -> tuple[float, float] | None:
    """Return the rho of both sides; None if one of them is not a number > 0."""
    if type(reg_m) in (tuple, list) and len(reg_m) == 2:
        first = as_number(reg_m[0])
        second = as_number(reg_m[1])
    else:
        first = second = as_number(reg_m)
    if first > 0 and second > 0:
        return (first, second)
    return None


def as_masses(weight: Any, length: int) -> Any:
    """Return a float64 copy of the masses; None if problem/validate.py must convert or refuse the masses."""
    if weight is None:
        return np.full(length, 1.0 / length)
    if type(weight) is np.ndarray and weight.shape == (length,) and weight.dtype.kind == "f":
        return weight.astype(DOUBLE)
    return None


def factor_between(mass_a: float, mass_b: float) -> float | None:
    """Return the factor that scales b to the mass of a, for two hard sides; None if the masses differ too much."""
    if abs(mass_a - mass_b) > MASS_TOLERANCE * mass_a:
        return None
    if abs(mass_a - mass_b) <= EVEN * mass_a:
        return 1.0
    return float(evening(mass_a, mass_b))


def side_of(name: str, weight: Any, rho: float) -> Side:
    """Make a side from checked masses, and make the masses read-only."""
    rhos = np.full(len(weight), rho)
    weight.flags.writeable = rhos.flags.writeable = False
    return Side(name, weight, "kl" if rho < np.inf else "balanced", rhos)


@functools.lru_cache(maxsize=64)
def known_side(name: str, weight: bytes | int, rho: float) -> Side | None:
    """Return the side with these float64 masses, or with ``weight`` equal masses; its cached properties are kept.

    Calls may share the side, and a workspace with it, since nothing writes to a side.
    """
    if isinstance(weight, int):
        weights = np.full(weight, 1.0 / weight)
    else:
        weights = np.frombuffer(weight).copy()
    if weights.min() > 0 and weights.sum() < math.inf:
        return side_of(name, weights, rho)
    return None


def given_side(name: str, weight: Any, length: int, rho: float) -> Side | None:
    """Return a side, or None if its masses must be converted or refused, which problem/validate.py does."""
    if weight is None:
        return known_side(name, length, rho)
    if not hasattr(weight, "dtype") or weight.shape != (length,) or weight.dtype.kind != "f":
        return None
    if length <= FEW_POINTS:
        make_side: Callable[..., Side | None] = known_side
    else:
        make_side = known_side.__wrapped__
    return make_side(name, np.asarray(host(weight), np.float64).tobytes(), rho)


def problem_of(plain: PlainProblem) -> Problem | None:
    """Make the Problem of a plain problem, by one read of M; None if problem/validate.py must look at its masses."""
    rows, cols = plain.sides
    least = min(rows.weight.min(), cols.weight.min())
    if plain.cost.remade or not (least >= 0 and 0 < rows.mass < math.inf and 0 < cols.mass < math.inf):
        return None
    low, high, forbidden = as_range(plain.cost, plain.reg, plain.backend, threads=plain.options.threads)
    mass = rows.mass * cols.mass
    if not mass < math.inf or (forbidden and plain.rho[0] == plain.rho[1] == math.inf):
        return None  # parts that no pair connects may have unequal masses
    return Problem(plain.cost, rows, cols, plain.reg, "product", low, high, forbidden, mass).lowered()
