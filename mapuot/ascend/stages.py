"""The solution strategy of a problem, as data: `choose_route` decides, the driver (ascend/carry_out.py) carries out.

    turned?    swap rows and columns if only the columns are balanced, or if columns are quicker to read
    skipped?   leave out pairs of points that are far from each other and provably negligible
    stages     larger regs first if reg is small; then fallbacks, each for certain statuses of the stages before it

src_c/solve.c carries out the stages of a plain problem, and marginals/solve.py the stages of many marginals. The larger
regs of all problems, batches too, are defined here. The backend decides how a pass reads K (tiles, points, on a GPU).
"""

import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..backends.factored import START_TOL, STIFF, patience
from ..contract import Backend, Options
from ..errors import shown
from ..problem.cost import Cost
from ..problem.problem import Common, Problem
from ..status import FAILED
from .settings import STAGES

UNDONE = ("running", *FAILED)  # statuses of a solve that has no answer yet
STALLED = ("stalled",)
FORMED = "the matrix of the points"  # the form of K in `Result.how`
NO_ANSWER = (*STALLED, *FAILED)  # statuses of a solve that ended without a converged answer


class Stage(NamedTuple):
    """A run of passes at one reg. After a stage at a larger reg the status is "running"."""

    reg: float
    tol: float  # certified error that ends it
    storage: str  # type of K's entries
    anderson_depth: int  # most differences of Anderson's step
    most: int  # limit on the passes of the whole solve at the end of this stage
    after: tuple[str, ...]  # statuses that start this stage
    from_zeros: bool = False  # start cold, over all pairs; False: from given potentials, or those of the last stage
    leave_above: float = math.inf  # the stage ends if its first pass has a larger certified error
    symmetric: bool = False  # whether log u = log v (one potential)
    on_kept_pairs: bool = False  # whether passes read only pairs that may carry mass, if few
    patience: int = sys.maxsize  # most passes of this stage; after them the solve counts as stalled
    products: int = 0  # most products of Newton's step in the solve so far; 0: as many as `patience`
    with_factors: bool = False  # whether Newton's steps with a factor come first
    certifies: bool = True  # whether Newton's step certifies hard columns; False: steps with a factor follow

    def options(self, asked: Options) -> Options:
        """Return the options that the workspace of this stage reads."""
        return dataclasses.replace(
            asked, tol=self.tol, precision=self.storage, anderson_depth=self.anderson_depth, symmetric=self.symmetric,
            last=self.certifies,
        )  # fmt: skip


class Route(NamedTuple):
    """The decisions about one problem."""

    turned: bool  # rows and columns are exchanged
    warm: bool  # the solve starts from given potentials
    nats: float | None  # skip pairs that lie at least so far below their share; None: skip no pair
    options: Options  # the options that all stages share
    stages: tuple[Stage, ...]  # Newton's steps with a factor, if any, are last


def choose_route(
    problem: Problem, options: Options, most: int, backend: Backend, *,
    given: tuple[bool, bool] = (False, False), escalate: bool = False, saves: bool = False,
) -> Route:  # fmt: skip
    """Decide the route of a problem; all ranks must call this.

    ``most``: limit on the passes; ``given``: whether the user gives a log u, and a log v; ``escalate``: K may be stored
    in a finer type than the options name; ``saves``: a checkpoint is written.
    """
    turns = turned(problem, options)
    if has_long_rows(problem.cost, backend):
        turns = turns or may_turn(problem, options, given)
    turns = turns and not options.symmetric and problem.turns
    nats = None
    if problem.cost.operator == "points" and (backend.skips_with_one_potential or not options.symmetric):
        nats = nats_of(problem, saves, backend.skips_from)
    warm = given[0] if turns else given[1]  # ranks share log v, and exchange no sides
    if nats is not None:
        options = inner(options)
    found = stages(problem, options, most, backend, warm=warm, skips=nats is not None, escalate=escalate)
    return Route(turns, warm, nats, options, found)


def one_potential(options: Options, problem: Common, symmetric: Any, backend: Backend) -> Options:
    """Return the options with ``symmetric`` set where rows and columns are the same problem.

    ``symmetric``: the user's argument; True raises if they are not, None tests whether they are, False skips the test.
    """
    if symmetric not in (None, True, False):
        raise TypeError(f"symmetric must be True, False or None, got {shown(symmetric)}")
    if symmetric is False or (symmetric is None and not options.anderson_depth):
        return options
    m, n = problem.shape
    if symmetric is None and problem.rows.ranks.size == 1 and (m != n or problem.cost.lopsided):
        return options  # at once: no vectors are compared
    if not backend.has_one_potential:
        serves: str | None = "backend"
    else:
        serves = None if options.anderson_depth else "method"
    unlike = serves or problem.unlike(backend)
    if unlike and symmetric:
        raise ValueError(f"symmetric must be None: rows and columns are not the same problem, see {unlike}")
    if unlike:
        return options
    return dataclasses.replace(options, symmetric=True)


def inner(options: Options) -> Options:
    """Return the options for the kept pairs; they leave a part of tol to the skipped pairs."""
    if options.tol_gap >= 0:
        tol_gap = options.tol_gap * STAGES.inner_share
    else:
        tol_gap = options.tol_gap
    return dataclasses.replace(options, tol=STAGES.inner_share * options.tol, tol_gap=tol_gap)


def keeps_pairs(problem: Problem, options: Options, backend: Backend) -> bool:
    """Return whether passes over kept pairs apply to this problem, and pay."""
    cost = problem.cost
    if cost.operator not in ("tiles", "points") or not cost.held:
        return False
    if problem.ranks.size > 1 or problem.masked is not None:
        return False
    if options.anderson_depth == 0 or options.symmetric:
        return False
    if not (problem.rows.logarithmic and problem.cols.logarithmic):
        return False
    if problem.balanced:  # kept pairs may form separate parts with unequal masses
        return False
    return cost.size > STAGES.kept_entries and backend.keeps_pairs(problem)


def stages(
    problem: Problem, options: Options, most: int, backend: Backend, *, warm: bool, skips: bool, escalate: bool
) -> tuple[Stage, ...]:
    """List the stages in order; ``warm``: potentials are given, ``skips``: pairs of points are skipped.

    Where Newton's steps with a factor may follow, passes and products are few, and kinks are left to the steps; other
    stalled passes over kinks are made again without extrapolation, which kinks mislead. On a GPU there are no products
    between hard sides of up to `STAGES.most_without_products` points, and passes certify nothing.
    """
    own = Stage(
        problem.reg, options.tol, options.precision, options.anderson_depth, most, UNDONE, certifies=options.last
    )
    found = before_levels(climb(problem, options, most // 2), problem, options, backend, skips)
    is_first = not found
    if found:
        found[0] = found[0]._replace(from_zeros=True)
    leave_above = math.inf if skips or is_first else STAGES.warm_error
    from_start = own._replace(leave_above=leave_above)  # passes from potentials that are given, or from a rough solve
    factors = factors_serve(problem, options, backend)
    small = STAGES.kept_below * (problem.M_max - problem.M_min)
    on_kept_pairs: list[Stage] = []
    if found and problem.reg < small and keeps_pairs(problem, options, backend):
        found = [stage._replace(on_kept_pairs=stage.reg < small) for stage in found]
        on_kept_pairs = [own._replace(most=most // 2, on_kept_pairs=True)]
    found += [*on_kept_pairs, own._replace(from_zeros=is_first)]
    if options.symmetric:
        together = own._replace(most=min(most, STAGES.most_together), symmetric=True)
        found = [together, from_start, *found]
    elif skips and not warm:
        found = [*on_kept_pairs, from_start, *found]
    elif warm:
        found = [from_start, *found]
    plain = own._replace(anderson_depth=0, after=STALLED)  # without extrapolation
    has_kinks = problem.rows.kind.kinks or problem.cols.kind.kinks
    repeats_plainly = own.anderson_depth > 0 and not factors and has_kinks
    if repeats_plainly:
        found.append(plain)
    wider = escalate and own.storage == "float32" and not problem.cost.wide
    if wider:
        after = FAILED if repeats_plainly or factors else NO_ANSWER
        found.append(own._replace(storage="float64", after=after))
        if repeats_plainly:
            found.append(plain._replace(storage="float64"))
    if factors:
        found = before_steps(found, problem, options, most, backend)
        finest = "float64" if wider else own.storage
        demands = any(side.demands and side.rho_range[1] > 0 for side in problem.sides)
        vanished: tuple[str, ...] = FAILED if demands else ()  # else a plan may have less mass than float64 holds
        steps = own._replace(storage=finest, after=(*STALLED, *vanished), with_factors=True)
        found.append(steps._replace(patience=found[-1].patience))
    return tuple(found)


def before_levels(
    found: list[Stage], problem: Problem, options: Options, backend: Backend, skips: bool
) -> list[Stage]:  # fmt: skip
    """Prepare larger regs for steps with two levels at the requested reg.

    3000 clustered points took 148 products to 1e-6, and 183 from regs that ended at `STAGES.balanced_tol`.
    """
    if options.symmetric or not levels_serve(problem, backend, skips):
        return found
    return [without_steps(stage, options) for stage in found]


def without_steps(stage: Stage, options: Options) -> Stage:
    """Return a stage at a larger reg that ends where Newton's steps may begin, and makes none."""
    return stage._replace(tol=max(options.tol, START_TOL), certifies=False)


def before_steps(
    found: list[Stage], problem: Problem, options: Options, most: int, backend: Backend
) -> list[Stage]:  # fmt: skip
    """Return the stages with few passes and products, since Newton's steps with a factor follow."""
    hurries = backend.few_passes > 0 and problem.balanced
    hurries = hurries and not options.symmetric  # one potential needs few products
    leaves = hurries and min(problem.shape) <= STAGES.most_without_products
    passes = min(patience(problem.shape, problem.balanced), max(most // 4, STAGES.least_patience))
    if leaves:
        passes = backend.few_passes
    found = [x._replace(patience=passes, products=backend.few_products, certifies=not leaves) for x in found]
    if hurries:  # steps may begin where a larger reg has ended
        found = [x if x.reg == problem.reg else without_steps(x, options) for x in found]
    return found


def factors_serve(problem: Problem, options: Options, backend: Backend) -> bool:
    """Return whether Newton's steps with a factor may follow stalled passes."""
    is_possible = problem.cost.operator in ("tiles", "points", "pairs", "products") and problem.ranks.size == 1
    is_possible = is_possible and options.anderson_depth > 0 and options.last
    if not is_possible or not fits_factor(problem, backend):
        return False
    if not (problem.rows.logarithmic and problem.cols.logarithmic):
        return True
    return max(problem.rows.rho_range[1], problem.cols.rho_range[1]) >= STIFF * problem.reg


def fits_factor(problem: Problem, backend: Backend) -> bool:
    """Return whether the backend factors equations between so many points."""
    most = backend.most_factored
    return bool(min(problem.shape) <= most and problem.cost.size <= most**2)


def levels_serve(problem: Problem, backend: Backend, skips: bool) -> bool:
    """Return whether Newton's steps with two levels (two_levels.py) serve: a cloud with hard sides, without a factor.

    ``skips``: pairs of points are skipped, so that no factor is made.
    """
    if not problem.balanced or problem.ranks.size > 1 or problem.cost.operator != "points":
        return False
    return skips or not fits_factor(problem, backend)


def climb(problem: Any, options: Options, most: int) -> list[Stage]:
    """List the stages at larger regs, for a problem of any kind; methods without extrapolation have none.

    With one potential, the range of M stands in for its extent: larger regs are seldom needed then, and computing the
    extent takes a tenth of a solve.
    """
    if not options.anderson_depth:
        return []
    regs = larger_regs(problem.M_max - problem.M_min, problem.reg)
    if regs and not options.symmetric:
        regs = larger_regs(problem.extent, problem.reg)
    if not regs:
        return []
    tol = max(options.tol, STAGES.balanced_tol if problem.balanced else STAGES.coarse_tol)
    return [Stage(reg, tol, options.precision, options.anderson_depth, most, UNDONE) for reg in regs]


def larger_regs(cost_range: float, reg: float) -> list[float]:
    """List the larger regs, largest first, that come before a ``reg`` far below M's extent ``cost_range``."""
    return [reg * factor for factor, least in rungs() if cost_range / reg > least]


@functools.cache
def rungs() -> tuple[tuple[float, float], ...]:
    """List all larger regs in units of reg, largest first, each with the least range(M) / reg that needs it."""
    step, least = STAGES.scaling_step, STAGES.scaling_below
    return tuple((step**k, step ** (k - 1) / least) for k in range(STAGES.most_rungs, 0, -1))


def ladder(options: Options, most: int) -> list[tuple[float, float, float, float, int, bool]]:
    """List the stages of a plain problem for every range of M: records that src_c/solve.c reads, see mapuot.h."""
    coarse, balanced = (max(options.tol, tol) for tol in (STAGES.coarse_tol, STAGES.balanced_tol))
    own = (1.0, options.tol, options.tol, -math.inf, most, False)
    if not options.anderson_depth:
        return [own]
    together = (1.0, options.tol, options.tol, math.inf, min(most, STAGES.most_together), True)
    return [together, *((reg, coarse, balanced, least, most // 2, False) for reg, least in rungs()), own]


def in_words(reads: str, n_larger: int, *more: str) -> str:
    """Return the text of `Result.how`: the form of K, the number of larger regs, and more words."""
    if n_larger:
        reads += f", {n_larger} larger reg" + "s" * (n_larger > 1)
    return ", ".join((reads, *more))


def newton_words(products: int, factors: int = 0) -> list[str]:
    """Say how many products with the plan, and how many Cholesky factors, Newton's steps took."""
    if not products and not factors:
        return []
    counts = (products, "product"), (factors, "factor")
    words = [f"{count} {name}" + "s" * (count > 1) for count, name in counts if count]
    return [f"Newton's steps by {' and '.join(words)}"]


def turned(problem: Common, options: Options) -> bool:
    """Return whether to swap rows and columns because only the columns are balanced.

    Every pass meets the row marginal exactly, so that after the swap the gap alone certifies the plan.
    """
    return options.anderson_depth > 0 and problem.cols.penalty == "balanced" != problem.rows.penalty


def has_long_rows(cost: Cost, backend: Backend) -> bool:
    """Return whether the rows of a matrix on a device are so long that passes over its transpose take less time."""
    m, n = cost.shape
    return n > max(m, backend.long_rows) and cost.held and cost.operator == "tiles" and cost.xp is not np


def may_turn(problem: Problem, options: Options, given: tuple[bool, bool]) -> bool:
    """Return whether a swap of rows and columns changes nothing but the time that a pass takes.

    Hard rows stay rows, since only the row marginal is exact. A start of log v alone (a checkpoint) is not swapped.
    """
    return options.anderson_depth > 0 and not problem.rows.demands and (given[0] or not given[1])


def nats_of(problem: Problem, saves: bool, least: int) -> float | None:
    """Return how many nats below its share a pair of points of a cloud must lie to be skipped; None: skip no pair."""
    cloud, ranks = problem.cost.cloud, problem.ranks
    ranks.same(truncate=repr(cloud.truncate))
    pairs = problem.rows.n_points * problem.cols.n_points
    if not cloud.truncates(pairs) or (cloud.truncate == "auto" and pairs < least):
        return None
    found = {
        f"metric {cloud.metric!r}": not cloud.core[0].skips,
        "a reference other than 'product'": problem.reference != "product",
        "checkpoint": saves,
    }
    reasons = [word for word, is_so in found.items() if is_so]
    if cloud.truncate != "auto":
        if reasons:
            raise NotImplementedError(f"truncate is not for {reasons[0]}: give truncate=None")
        return float(cloud.truncate)
    if reasons or problem.usual < STAGES.far_median * problem.reg:
        return None
    return 0.0
