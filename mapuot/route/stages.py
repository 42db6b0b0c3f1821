"""The way of a problem to its answer, as data: `route` decides, the driver (ascend/carry_out.py) carries out.

    turned?    columns that alone are balanced, or are quicker to read, become the rows
    skipped?   between points far from each other, pairs that are provably negligible
    stages     larger regs first where reg is small; what is tried next where a stage ends in a status that calls for it

A plain problem's stages are carried out by src_c/solve.c, those of many marginals by marginals/solve.py; the larger
regs of all of them, and of batches, are stated here. How a pass reads K (tiles, points, on a GPU) its backend decides.
"""

import dataclasses
import functools
import math
import sys
from types import ModuleType
from typing import Any, NamedTuple

from ..backends.contract import Options
from ..backends.factored import is_stiff, patience
from ..problem.problem import Common, Problem
from ..processor import SERIAL_ENTRIES
from ..status import FAILED

SCALING_BELOW = 3e-3  # reg / range(M) under which reg is lowered in steps
SCALING_STEP = 4.0
MOST_RUNGS = 40  # larger regs, up to 1e24 times the one asked for
COARSE_TOL = 0.5  # certified error at which a larger reg has done its work
BALANCED_TOL = 0.1  # the same where both sides are: a point far away finds its potential at larger regs in few passes
WARM_ERROR = 1.0  # of a first pass: a warm start above it is left, where a cold one goes by way of larger regs
KEPT_BELOW = 5e-4  # reg / range(M) under which passes over the pairs that may carry mass are tried
TOGETHER = 60  # passes of one potential, after which ordinary ones go on: where they serve, 2 to 12 are enough
INNER = 0.6  # of tol: for the pairs that are kept; the rest is for what is skipped
FAR_MEDIAN = 30.0  # median cost / reg below which "auto" skips nothing: most pairs count
UNDONE = ("running", *FAILED)  # statuses of a solve that has no answer yet
STALLED = ("stalled",)
FORMED = "the matrix of the points"  # what passes read, in `Result.how`
NO_ANSWER = (*STALLED, *FAILED)  # statuses of a solve that ended without the answer asked for


class Stage(NamedTuple):
    """A run of passes at one reg. After one at a larger reg than the one asked for the status is "running"."""

    reg: float
    tol: float  # certified error that ends it
    storage: str  # of K
    memory: int  # Anderson's differences, at most
    most: int  # passes of the whole solve at its end
    after: tuple[str, ...]  # statuses in which it is carried out
    begin: str  # "start": as given; "zeros": cold, and all pairs count; "here": where the last stage ended
    leave: float = math.inf  # certified error above which its first pass is the only one
    symmetric: bool = False  # passes of one potential, log u = log v
    kept: bool = False  # passes over the pairs that may carry mass, where these are few
    patience: int = sys.maxsize  # passes that it makes at most, after which the solve counts as stalled
    factored: bool = False  # Newton's steps with a factor come first

    def options(self, asked: Options) -> Options:
        """Return the options that the workspace of this stage reads."""
        own = self.tol, self.storage, self.memory, self.symmetric
        if own == (asked.tol, asked.precision, asked.memory, asked.symmetric):
            return asked
        tol, storage, memory, symmetric = own
        return dataclasses.replace(asked, tol=tol, precision=storage, memory=memory, symmetric=symmetric)


class Route(NamedTuple):
    """The decisions about one problem."""

    turned: bool  # rows and columns are exchanged
    warm: bool  # it begins at potentials that are given
    nats: float | None  # how far below its share a pair is at least that is skipped; None: all pairs count
    options: Options  # what the stages have in common
    stages: tuple[Stage, ...]


def route(
    problem: Problem, options: Options, most: int, backend: ModuleType | None = None, *,
    given: tuple[bool, bool] = (False, False), escalate: bool = False, saves: bool = False,
) -> Route:  # fmt: skip
    """Decide which way a problem goes; over ranks all must call it.

    ``most``: passes; ``backend``: says whether it would rather read the columns as rows (``quicker_turned``), whether
    it skips pairs in passes of one potential, too (``SKIPS_TOGETHER``), how many pairs there must be where nobody says
    that some are to be skipped (``SKIPS_FROM``), and whether to find pairs that may carry mass pays (``keeps_pairs``);
    ``given``: whether it starts from a log u and from a log v; ``escalate``: K may be stored in a finer type than that
    of the options; ``saves``: a checkpoint is written.
    """
    turns = turned(problem, options) or quicker(problem, options, given, getattr(backend, "quicker_turned", None))
    turns = problem.turns and turns and not options.symmetric
    skips = getattr(backend, "SKIPS_TOGETHER", False) or not options.symmetric
    nats = nats_of(problem, saves, getattr(backend, "SKIPS_FROM", 0)) if skips else None
    warm = bool(problem.ranks.max(given[0] if turns else given[1]))
    options = options if nats is None else inner(options)
    pays = getattr(backend, "keeps_pairs", None)
    keeps = pays is not None and keeps_pairs(problem, options) and pays(problem)
    most_factored = getattr(backend, "MOST_FACTORED", 0)
    found = stages(problem, options, most, warm, nats is not None, escalate, keeps, most_factored)
    return Route(turns, warm, nats, options, found)


def inner(options: Options) -> Options:
    """Return the options for the pairs that are kept, which leave a part of tol to the others."""
    tol_gap = options.tol_gap * INNER if options.tol_gap >= 0 else options.tol_gap
    return dataclasses.replace(options, tol=INNER * options.tol, tol_gap=tol_gap)


def keeps_pairs(problem: Problem, options: Options) -> bool:
    """Tell whether passes over the pairs that may carry mass can serve."""
    cost = problem.cost
    whole = cost.operator in ("tiles", "points") and cost.held and problem.ranks.size == 1 and problem.masked is None
    quick = problem.rows.logarithmic and problem.cols.logarithmic and options.memory > 0 and not options.symmetric
    quick = quick and not problem.balanced  # these pairs fall apart into parts whose masses differ
    return whole and quick and cost.size > SERIAL_ENTRIES


def stages(
    problem: Problem, options: Options, most: int, warm: bool, skips: bool, escalate: bool, keeps: bool = False,
    most_factored: int = 0,
) -> tuple[Stage, ...]:  # fmt: skip
    """List the runs of passes that are tried, in order; ``most_factored``: points of a side that a factor may have."""
    reg, tol, storage, memory = problem.reg, options.tol, options.precision, options.memory
    found = climb(problem, options, most // 2)
    begin, leave = "zeros", math.inf
    if found:
        found[0], begin, leave = found[0]._replace(begin="zeros"), "here", math.inf if skips else WARM_ERROR
    factors = factors_serve(problem, options, most_factored)
    small = KEPT_BELOW * (problem.M_max - problem.M_min)
    found = [stage._replace(kept=keeps and stage.reg < small) for stage in found]
    keeps = keeps and bool(found) and reg < small
    own = [Stage(reg, tol, storage, memory, most // 2, UNDONE, "here", kept=True)] * keeps
    found += [*own, Stage(reg, tol, storage, memory, most, UNDONE, begin)]
    if options.symmetric:
        found.insert(0, Stage(reg, tol, storage, memory, most, UNDONE, "here", leave))
        found.insert(0, Stage(reg, tol, storage, memory, min(most, TOGETHER), UNDONE, "start", symmetric=True))
    elif warm or skips:
        found.insert(0, Stage(reg, tol, storage, memory, most, UNDONE, "start", leave))
        found[:0] = own * (skips and not warm)
    kinks = memory > 0 and (problem.rows.kind.kinks or problem.cols.kind.kinks)
    if kinks:
        found.append(Stage(reg, tol, storage, 0, most, STALLED, "here"))
    wider = escalate and storage == "float32" and not problem.cost.wide
    if wider:
        after = FAILED if kinks or factors else NO_ANSWER
        found.append(Stage(reg, tol, "float64", memory, most, after, "here"))
        if kinks:
            found.append(Stage(reg, tol, "float64", 0, most, STALLED, "here"))
    if factors:
        passes = patience(problem.shape, problem.balanced)
        found = [stage._replace(patience=passes) for stage in found]
        finest = "float64" if wider else storage
        found.append(Stage(reg, tol, finest, memory, most, STALLED, "here", patience=passes, factored=True))
    return tuple(found)


def factors_serve(problem: Problem, options: Options, most: int) -> bool:
    """Tell whether Newton's steps with a factor may follow passes that stall; ``most``: points of the smaller side."""
    cost = problem.cost
    known = cost.operator in ("tiles", "points", "pairs") and problem.ranks.size == 1 and options.memory > 0
    if not (known and problem.rows.logarithmic and problem.cols.logarithmic and min(problem.shape) <= most):
        return False
    return is_stiff(problem.reg, max(side.rho_range[1] for side in problem.sides))


def climb(problem: Any, options: Options, most: int) -> list[Stage]:
    """List the stages at larger regs of a problem of any kind; the named methods have none.

    After one potential, which seldom needs them, they are those of the range of M: to find its extent takes a tenth of
    a solve.
    """
    whole = larger_regs(problem.M_max - problem.M_min, problem.reg) if options.memory else []
    regs = whole if options.symmetric else larger_regs(problem.extent, problem.reg) if whole else []
    tol = max(options.tol, BALANCED_TOL if problem.balanced else COARSE_TOL)
    return [Stage(reg, tol, options.precision, options.memory, most, UNDONE, "here") for reg in regs]


def larger_regs(spread: float, reg: float) -> list[float]:
    """List the regs to pass through before ``reg``, largest first, where it is small beside ``spread``, M's extent."""
    return [reg * larger for larger, least in rungs() if spread / reg > least]


@functools.cache
def rungs() -> tuple[tuple[float, float], ...]:
    """List larger regs in units of reg, largest first, each with the range(M) / reg above which it comes before reg."""
    return tuple((SCALING_STEP**k, SCALING_STEP ** (k - 1) / SCALING_BELOW) for k in range(MOST_RUNGS, 0, -1))


def ladder(options: Options, most: int) -> list[tuple[float, float, float, float, int, bool]]:
    """List the stages of a plain problem of any range of M, as src_c/solve.c takes them (mapuot_stage)."""
    coarse, balanced = (max(options.tol, tol) for tol in (COARSE_TOL, BALANCED_TOL))
    own = (1.0, options.tol, options.tol, -math.inf, most, False)
    if not options.memory:
        return [own]
    together = (1.0, options.tol, options.tol, math.inf, min(most, TOGETHER), True)
    return [together, *((reg, coarse, balanced, least, most // 2, False) for reg, least in rungs()), own]


def in_words(reads: str, larger: int, *more: str) -> str:
    """Put together `Result.how`: what passes read, how many larger regs came first, and more words."""
    if larger:
        reads += f", {larger} larger reg" + "s" * (larger > 1)
    return ", ".join((reads, *more))


def newton_words(products: int, factors: int = 0) -> list[str]:
    """Say how many products with the plan, and how many Cholesky factors, Newton's steps took."""
    counts = (products, "product"), (factors, "factor")
    words = [f"{count} {name}" + "s" * (count > 1) for count, name in counts if count]
    return [f"Newton's steps by {' and '.join(words)}"] if words else []


def turned(problem: Common, options: Options) -> bool:
    """Tell whether the columns shall be read as rows, because they alone are balanced.

    The row side is exact in every pass, so that the gap of the free side then certifies the plan.
    """
    return turned_sides(problem.rows.penalty == "balanced", problem.cols.penalty == "balanced", options)


def turned_sides(balanced_rows: bool, balanced_cols: bool, options: Options) -> bool:
    return balanced_cols and not balanced_rows and options.memory > 0


def quicker(problem: Problem, options: Options, given: tuple[bool, bool], prefers: Any) -> bool:
    """Tell whether the backend would rather read the columns as rows, and nothing but time is at stake.

    Rows that must be met stay rows, whose marginal is exact. A start of log v alone (a checkpoint's) stays one.
    """
    free = options.memory > 0 and not problem.rows.demands and (given[0] or not given[1])
    return bool(free and prefers and prefers(problem.cost))


def nats_of(problem: Problem, saves: bool, least: int) -> float | None:
    """Return how far below its share, in nats, a pair of points must lie to be skipped; None: none is."""
    cloud, ranks = problem.cost.cloud, problem.ranks
    if problem.cost.operator != "points":
        return None
    ranks.same(truncate=repr(cloud.truncate))
    pairs = ranks.sum(cloud.size)
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
    return None if reasons or problem.usual < FAR_MEDIAN * problem.reg else 0.0
