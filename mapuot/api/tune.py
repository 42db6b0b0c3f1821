"""`tune`: find reg and reg_m for a wanted moved mass and a wanted sharpness of the plan."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike
from ..answer.result import Result
from ..backends import pick
from ..errors import ScalingWarning, shown
from ..files import opened
from ..problem.kinds import as_cost
from ..problem.scale import scale_of
from ..problem.validate import as_positive
from ..status import FAILED
from ..synonyms import hinted
from .solve import solve

FIRST_REG = 0.05  # of the median cost
# first step of the search, and its reach
LOG_STEP = math.log(2.0)
RANGE = math.log(1e4)
CLOSE = 1e-3  # the search ends at this change of log reg, and at this difference of log odds
WITHIN = 1e-2  # largest error of the log odds, log(x / (1 - x)), in an answer
NARROW = 1e-9  # the share counts as jumping if a bracket in log reg is narrower
# of secants: steps, longest step, singular determinant
MOST_STEPS = 12
LONGEST = 3 * LOG_STEP
FLAT = 1e-6


class Tuned(NamedTuple):
    """Answer of `tune`: reg and reg_m, their Result, and all Results of the search.

    Attributes
    ----------
    reg, reg_m, result : float, float, Result
        reg and reg_m in units of M, or of the cost that ``scale_cost`` names; the answer at this reg and reg_m.
    curve : list of Result
        All answers of the search, in order of reg and reg_m.

    See Also
    --------
    tune : returns it

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = (np.linspace(0, 1, 30)[:, None] - np.linspace(0.2, 1.4, 20)) ** 2
    >>> tuned = mapuot.tune(M, mass=0.9, sharpness=0.5)
    >>> round(tuned.result.mass, 2), tuned.result in tuned.curve
    (0.9, True)
    """

    reg: float
    reg_m: float
    result: Result
    curve: list[Result]

    if not TYPE_CHECKING:  # type: ignore[misc]  # so that checkers of types find unknown attributes

        def __getattr__(self, name: str) -> Any:
            text = f"Tuned has no {name}"
            if not name.startswith("__") and hasattr(Result, name):
                text += f": did you mean result.{name}?"
            raise AttributeError(text, name=name, obj=self)


@hinted
def tune(
    M: CostLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    *,
    mass: float = 0.9,
    sharpness: float = 0.8,
    reg: float | None = None,
    reg_m: float | None = None,
    **options: Any,
) -> Tuned:
    """Find the reg and reg_m for which the plan moves a given share of the mass and has a given sharpness.

    Both numbers are found together by secants, in some ten certified solves, each started from the previous answer. If
    the secants do not converge, or if one of the numbers is given, bisection takes their place: the mass grows with
    reg_m, and the sharpness falls as reg grows. The odds x / (1 - x) of the share and of the sharpness are within 1 %
    of the odds asked for.

    Parameters
    ----------
    M, a, b
        As in `solve`, in one process.
    mass : float
        Share of the mass that should move, in (0, 1). If a and b have different totals, it is the share of their
        geometric mean.
    sharpness : float
        Sharpness that the plan should have, in (0, 1); see `Result.sharpness`.
    reg, reg_m : float, optional
        One of them may be fixed, in units of M; then only the other is searched for.
    **options
        Further arguments of `solve`, without the penalties "balanced" and "range".

    Returns
    -------
    Tuned
        ``reg`` and ``reg_m``, their ``result``, and ``curve``, all answers of the search.

    Raises
    ------
    ValueError
        No such plan was found; the message has the nearest ones. The search covers a factor of 1e4 around reg = .05 and
        reg_m = 1 median costs. The share may jump as reg_m grows, for example with "tv", and the largest possible
        sharpness may be below 1.

    See Also
    --------
    path, Result.sharpness

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> M = ((rng.random((60, 1, 2)) - rng.random((70, 2))) ** 2).sum(-1)
    >>> reg, reg_m, result, _ = mapuot.tune(M, mass=0.9, sharpness=0.6)
    >>> round(result.mass, 2), round(result.sharpness, 2)
    (0.9, 0.6)
    """
    return tuned(Search(M, a, b, options), mass, sharpness, reg, reg_m)


def tuned(search: Search, mass: float, sharpness: float, reg: float | None, reg_m: float | None) -> Tuned:
    """Find the reg and reg_m that are None, and return their answer; see `tune`."""
    inside = 1 - 1e-9, "a share in (0, 1)"
    share, sharp = (as_positive(x, name, *inside) for x, name in ((mass, "mass"), (sharpness, "sharpness")))
    log_reg = math.log(as_positive(reg, "reg") if reg is not None else FIRST_REG * search.usual)
    log_reg_m = math.log(as_positive(reg_m, "reg_m") if reg_m is not None else search.usual)
    nearby = [log_reg_m]  # start of the search for reg_m

    @functools.cache  # a second search would end at another point within the tolerance
    def beside(log_reg: float) -> float:
        """Return the log reg_m that moves the wanted share at this reg, or the nearest one if reg is searched for."""
        if reg_m is None:
            name = f"mass must be a share that some reg_m moves with reg {math.exp(log_reg):.6g}"
            first = min(max(nearby[0], log_reg_m - RANGE), log_reg_m + RANGE)
            nearby[0] = root(lambda x: search.share(log_reg, x), share, first, 1, name, "reg_m", reg is not None)
        return nearby[0]

    both = None
    if reg is None and reg_m is None:
        both = secants(lambda x: search.apart(x[0], x[1], share, sharp), (log_reg, log_reg_m))
    if both is not None:
        log_reg, log_reg_m = both
    else:
        if reg is None:
            name = "sharpness must be one that some reg gives this plan"
            log_reg = root(lambda x: search.solve(x, beside(x)).sharpness, sharp, log_reg, -1, name, "reg")
        log_reg_m = beside(log_reg)
    result = search.solve(log_reg, log_reg_m)
    off = search.apart(log_reg, log_reg_m, share, sharp)
    asked = np.array([reg is None, reg_m is None])
    if result.status in FAILED or abs(off[asked]).max(initial=0.0) > WITHIN:
        told = f"mass {search.share(log_reg, log_reg_m):.6g} and sharpness {result.sharpness:.6g}"
        at = f"reg {math.exp(log_reg):.6g} and reg_m {math.exp(log_reg_m):.6g}"
        wanted = f"mass and sharpness must be those of a plan of this problem, got {shown(mass)} and {shown(sharpness)}"
        raise ValueError(f"{wanted}: the nearest that was found has {told}, at {at}, and ended {result.status!r}")
    curve = sorted(search.results.values(), key=lambda one: (one.problem.reg, one.problem.rows.rho_range[0]))
    return Tuned(math.exp(log_reg), math.exp(log_reg_m), result, curve)


class Search:
    """Solves of one problem at many regs, each started from the previous answer."""

    def __init__(self, M: Any, a: Any, b: Any, options: dict[str, Any]) -> None:
        self.arguments = (M, a, b)
        self.options = options
        self.results: dict[tuple[float, float], Result] = {}
        self.last: Any = options.pop("warm_start", None)
        backend = pick(options.get("backend", "auto"), M, a, b)
        if options.get("scale_cost"):
            self.usual = 1.0
        else:
            self.usual = scale_of([as_cost(opened(M), backend, a=a, b=b)], "median")

    def solve(self, log_reg: float, log_reg_m: float) -> Result:
        key = log_reg, log_reg_m
        if key not in self.results:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScalingWarning)  # little mass moves where the search asks for it
                self.last = self.answer(*map(math.exp, key))
            self.results[key] = self.last
        return self.results[key]

    def answer(self, reg: float, reg_m: float) -> Result:
        """Return the answer at reg and reg_m, started from the previous answer."""
        return solve(*self.arguments, reg=reg, reg_m=reg_m, warm_start=self.last, **self.options)

    def share(self, log_reg: float, log_reg_m: float) -> float:
        result = self.solve(log_reg, log_reg_m)
        return float(result.mass) / math.sqrt(result.problem.rows.mass * result.problem.cols.mass)

    def apart(self, log_reg: float, log_reg_m: float, share: float, sharp: float) -> Any:
        """Return the errors of the log odds of the sharpness and of the share."""
        found = self.solve(log_reg, log_reg_m).sharpness, self.share(log_reg, log_reg_m)
        return np.array([logit(x) - logit(wanted) for x, wanted in zip(found, (sharp, share), strict=True)])


def secants(function: Callable[[Any], Any], first: tuple[float, float]) -> tuple[float, float] | None:
    """Find a zero of two functions of two numbers by Broyden's method; None if a few steps do not converge."""
    x = np.array(first)
    f = function(tuple(x))
    slopes = np.stack([(function(tuple(x + LOG_STEP * e)) - f) / LOG_STEP for e in np.eye(2)], 1)
    for _ in range(MOST_STEPS):
        if not abs(np.linalg.det(slopes)) > FLAT:
            return None
        step = -np.linalg.solve(slopes, f)
        step *= min(1.0, LONGEST / float(abs(step).max()))
        x = x + step
        before = f
        if abs(x - first).max() > RANGE:
            return None
        f = function(tuple(x))
        if abs(step).max() < CLOSE and abs(f).max() < WITHIN:
            return float(x[0]), float(x[1])
        slopes += np.outer(f - before - slopes @ step, step) / (step @ step)
    return None


def root(
    function: Callable[[float], float], wanted: float, first: float, sign: int, what: str, name: str,
    must_meet: bool = True,
) -> float:  # fmt: skip
    """Find x at which a share, monotone in ``sign`` x, has the wanted value; a bracket widens from ``first``.

    ``what`` and ``name``: the words of an error message for the share and for exp(x). Without ``must_meet`` return the
    x of the nearest share instead of an error.
    """
    from scipy.optimize import brentq  # noqa: PLC0415 - on first use

    shares: dict[float, float] = {}

    def apart(x: float) -> float:
        """Return the difference of the log odds, or 0 if it is small, which ends the search."""
        if x not in shares:
            shares[x] = function(x)
        difference = sign * (logit(shares[x]) - logit(wanted))
        return difference if abs(difference) > CLOSE else 0.0

    low = high = first
    while apart(low) > 0 and first - low < RANGE:
        low, high = low - LOG_STEP, low
    while apart(high) < 0 and high - first < RANGE:
        low = high
        high = high + LOG_STEP
    if low < high and apart(low) <= 0 <= apart(high):
        brentq(apart, low, high, xtol=NARROW)
    best = min(shares, key=lambda x: abs(apart(x)))
    if must_meet and abs(apart(best)) > WITHIN:
        if min(map(apart, shares)) < 0:
            ends = [max(x for x in shares if apart(x) < 0)]
        else:
            ends = []
        if max(map(apart, shares)) > 0:
            ends.append(min(x for x in shares if apart(x) > 0))
        nearest = " and ".join(f"{shares[x]:.6g} (at {name} {math.exp(x):.9g})" for x in ends)
        raise ValueError(f"{what}, got {wanted:.6g}: the nearest found are {nearest}")
    return best


def logit(share: float) -> float:
    """Return log(share / (1 - share)), bounded; it separates shares near 0 and near 1."""
    share = min(1 - 1e-12, max(1e-12, share))
    return math.log(share / (1 - share))
