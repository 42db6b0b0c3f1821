"""Passes of a body that is no K between two sides: Anderson's step behind the guard, certified where that is due.

A body (a tree or an array of many marginals, the histograms of a barycenter) gives the plan of a state, what it is
worth, and the state that follows. A certificate may take products that a pass does not make: a guess by the last
change tells when it is worth them. The guard and the stopping rule are those of src_c/common/rules.h.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import Options, Stats, load
from ..backends.contract import LEAST_MASS, memory_of
from ..backends.kernel import StaleError, largest_of
from ..backends.rules import Judge, plan_error
from ..penalties import F64

DEPTH = 20  # of Anderson's differences
NARROW_FLOOR = 2e-6  # of the error that passes in float32 still tell
RATE_PASSES = 4  # by which it is told how many are left
WHOLE_PASSES = 25  # after so many a plan is certified, near or not
RATIO, LEAST_RATIO, MOST_RATIO = 0.75, 0.02, 30.0  # of a certified error to the guess before it: at first, and within


@dataclass
class PassCertificate:
    gap: float = math.inf
    error: float = math.inf
    dual: float = -math.inf  # a lower bound of the optimum
    moved: float = math.inf  # what rounding may have added to the dual value
    terms: float = math.inf  # the sizes of all terms of the dual value
    rounding: tuple[float, float] = (math.inf, math.inf)  # its part of the error; that of marginals, for Newton's step


class Body:
    """What makes the passes of a problem by its kernels; its plans have ``mass`` and ``whole``.

    Children add these words:

    start(state)               make ready for passes from a state, and return it
    find(state, narrow)        a pass: the plan of a state, translated; narrow: its sums may be in float32
    completed()                the last plan, made whole
    certified(found, allowed)  the `PassCertificate` of a plan, whose hard marginals may miss ``allowed`` of the mass;
                               of one that is not whole its dual value
    image(found, exact)        the state that follows; exact: it is found from a whole plan
    guess(residual, found)     (gap, what hard marginals miss) by the last change of the state
    metric(found)              weights of the state's entries, for Anderson's step
    newton()                   Newton's steps that certify what misses hard marginals, None where there are none
    """

    reg: float
    certifies = True  # else passes end when ``change`` is ``tol_change`` at most, and ``value_gap()`` is certified then
    ends: list[int]  # of the parts of a state
    alone = 0.0  # how much of Anderson's weights each of them has for itself, until the guard drops a step
    coarse: Any = None  # what corrects its steps, if anything does
    reads: str  # what its passes read
    narrow = False  # may its first passes sum in float32?
    rough = 0.0  # the largest rho / reg, by which the noise of such sums grows
    width: int  # points of its largest part
    xp: Any = np  # numpy, or CuPy, on whose device its states lie

    def changed(self, image: F64, state: F64) -> tuple[F64, float]:
        """Return what follows a state less that, and the largest size of it."""
        change = image - state
        return change, largest_of(change)


def passes_left(guesses: list[float], tol: float) -> float:
    """Estimate how many passes it takes to ``tol`` at the rate of the last ones; none while that is not known."""
    first, last = guesses[-min(len(guesses), 1 + RATE_PASSES)], guesses[-1]
    if len(guesses) <= RATE_PASSES or not tol < last < math.inf:
        return 0.0
    return math.log(last / tol) * RATE_PASSES / math.log(first / last) if last < first < math.inf else math.inf


class Ascent:
    """The passes of one body, as mapuot.ascend.loop.Run asks for them (backends.workspace.Workspace)."""

    estimates = False

    def __init__(self, body: Any, options: Options) -> None:
        self.body, self.options, self.reads, self.coarse, self.number = body, options, body.reads, body.coarse, 0
        self.history = load("cpu" if body.xp is np else "cuda").History(memory_of(DEPTH, body.width, 8), body.ends)
        floor = max(NARROW_FLOOR * math.sqrt(1 + body.rough), 10 * options.tol)
        self.judge = Judge(tol=options.tol, tol_gap=options.tol_gap, reg=body.reg, narrow_floor=floor)
        self.alone = body.alone
        self.exact = self.extrapolated = False  # exact: each pass is made whole before the next begins
        self.found: Any = None
        self.narrow, self.ratio, self.guessed, self.since_whole = body.narrow, RATIO, math.inf, 0
        self.guesses: list[float] = []
        self.residual = math.inf

    def absorb(self, log_v: F64 | None = None) -> None:
        """Make kernels around a state, from which passes go on."""
        xp = self.body.xp
        start = xp.asarray(np.zeros(1) if log_v is None else log_v)
        self.next_log_v = self.body.start(xp.broadcast_to(start, (self.body.ends[-1],)).copy())

    def iterate(self, count: int) -> list[Stats]:
        made: list[Stats] = []
        while len(made) < count and (not made or made[-1].status == "running"):
            made.append(self.one_pass())
        return made

    def restart(self, state: F64) -> None:
        """Go on from this state, which the guard may drop."""
        self.next_log_v, self.extrapolated = self.body.xp.asarray(state), True
        self.history.clear()

    def newton(self) -> Any:
        return self.body.newton()

    def potentials(self) -> tuple[Any, Body]:
        """Return the last plan, if there is one, and the body, which makes products of it."""
        return self.found, self.body

    def marginals(self) -> None:
        """Return None: the plan's marginals are made on request."""

    def close(self) -> None:
        """Do nothing: kernels of the next reg reuse the memory of these, and products of the plan need them."""

    def one_pass(self) -> Stats:
        """Make a pass: the plan of the state and what it is worth, and the state that follows, if the guard lets it."""
        body, narrow, progress = self.body, self.narrow, self.judge.progress
        self.number += 1
        try:
            found = body.find(self.next_log_v, narrow)
        except StaleError:  # in kernels made for this very state, too
            return self.failed(0.0)
        if not body.certifies:
            self.found, self.next_log_v = found, body.image(found, False)
            self.residual = body.change
            stat = self.told(PassCertificate(), found.mass)
            stat.status = "converged" if self.residual <= body.tol_change else "running"
            return stat
        least, most = (f(body.reg, 1.0) * found.mass for f in (min, max))
        if not LEAST_MASS <= least <= most < math.inf:  # gaps are measured by reg times the mass
            return self.failed(0.0 if least < LEAST_MASS else most)
        value = body.certified(found, self.options.allowed)
        progress.narrow, progress.extrapolated, self.judge.limits.dual_scale = narrow, 1, value.terms
        fallen = self.judge.settle(value.dual, found.mass)
        rejected = fallen and self.extrapolated
        if body.coarse:
            body.coarse.judge(rejected)
        if rejected:
            self.next_log_v = self.history.image
            self.history.clear()
            self.extrapolated, self.alone = False, 0.0
            return self.told(value, found.mass, True)
        if fallen:
            progress.best_dual = value.dual
            if not self.exact:  # late messages may lead away: from here on there are none
                self.exact = True
                self.history.clear()
        self.found = found
        return self.advanced(value)

    def advanced(self, value: PassCertificate) -> Stats:
        """Find the state that follows the last plan, certify that where it is due, and judge the pass."""
        if self.exact and not self.found.whole:
            value = self.completed()
        image = self.body.image(self.found, self.exact)
        change, self.residual = self.body.changed(image, self.next_log_v)
        if not math.isfinite(self.residual):
            return self.failed(math.nan)
        if (self.narrow or not self.found.whole) and self.is_due(value, change):
            value = value if self.found.whole else self.completed()
        self.next_log_v = self.extrapolate(change, image)
        stat, progress = self.told(value, self.found.mass), self.judge.progress
        progress.moved = value.moved
        stat.status = self.judge.judge(dataclasses.replace(stat, error=self.guessed) if self.narrow else stat)
        if self.narrow and not progress.narrow:  # guesses are compared with those of passes alike
            self.narrow, self.guesses = False, []
        return stat

    def told(self, value: PassCertificate, mass: float, rejected: bool = False) -> Stats:
        return Stats(self.number, value.gap, value.error, value.dual, mass, self.residual, rejected, "running")

    def is_due(self, value: PassCertificate, residual: F64) -> bool:
        """Tell whether a plan may be good enough to be certified, by the last changes; decide when passes turn wide."""
        (gap, hard), mass, options = self.body.guess(residual, self.found), self.found.mass, self.options
        self.guessed = plan_error(gap / mass / self.body.reg) + hard / mass
        self.since_whole += 1
        self.guesses = [*self.guesses[-RATE_PASSES:], self.guessed]
        if self.coarse:
            self.coarse.expects(passes_left(self.guesses, options.tol))
        if self.narrow:
            return False
        small = gap * self.ratio**2 <= options.tol_gap * abs(value.dual)
        good = self.guessed * self.ratio <= options.tol or small
        return good or self.since_whole >= WHOLE_PASSES

    def completed(self) -> PassCertificate:
        """Make the last plan whole and certify it; by its error the next guess is scaled."""
        self.found, self.since_whole = self.body.completed(), 0
        value: PassCertificate = self.body.certified(self.found, self.options.allowed)
        if 0 < self.guessed < math.inf and value.error < math.inf:
            self.ratio = min(MOST_RATIO, max(LEAST_RATIO, value.error / self.guessed))
        return value

    def conclude(self, stat: Stats) -> None:
        """Certify the last pass of a run, which may have left that out."""
        if self.body.certifies and self.found is not None and not self.found.whole:
            value = self.completed()
            stat.gap, stat.error, stat.dual = value.gap, value.error, value.dual
            self.judge.progress.moved = value.moved
        elif not self.body.certifies:
            stat.gap = self.body.value_gap()
            return
        if self.judge.again(stat, 0.0, 0.0, self.judge.progress.moved):
            stat.status = "converged"

    def failed(self, mass: float) -> Stats:
        self.found = self.found if self.found is not None and self.found.whole else None
        self.next_log_v = self.body.xp.zeros(self.body.ends[-1])
        self.residual = math.inf
        stat = self.told(PassCertificate(), mass)
        self.judge.judge(stat)
        return stat

    def extrapolate(self, residual: F64, image: F64) -> F64:
        """Return the next state: Anderson's, or the image where there is no past, and what clusters add to it."""
        self.extrapolated = self.history.add(residual, image)
        if self.extrapolated:
            image, residual = self.history.next(self.body.metric(self.found), self.alone)
        if self.coarse and self.coarse.on and not self.exact:
            self.extrapolated = True
            image = image + self.body.xp.asarray(self.coarse.step(residual))
        return image


class Engine:
    """Stand-in for a backend, of which `Run` gets workspaces.

    ``make(problem, before)`` makes a body; ``before`` is the body of another reg, whose memory it reuses, or None.
    """

    QUICK_ENTRIES, QUICK_PASSES = 0, 1

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self.make, self.body = make, None

    def Workspace(self, problem: Any, options: Options, skip: None = None) -> Ascent:  # noqa: N802 - a backend's word
        self.body = self.make(problem, self.body)
        return Ascent(self.body, options)
