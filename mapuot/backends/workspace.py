"""Workspaces of cpu/ and cuda/ around their kernels: choose what K absorbs, and read what passes leave.

    K_ij = c_ij exp(alpha_i + beta_j - M_ij / reg),   u_i = e^(log u_i - d_i),   v_j = e^(log v_j - e_j)

with d = alpha - log a, e = beta - log b (log a, log b where c = a b^T). A point that is left out has the scaling 0, a
dead one, whose every partner is left out or forbidden, +inf; both have alpha or beta -inf, so that K is 0 there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..penalties import F64
from ..problem.problem import Idle, Problem
from .boxes import Iterated, Truncation
from .coarse import Coarse
from .contract import Options, Stats, any_of, host, largest, median, namespace
from .newton import ColumnsNewton, misses
from .records import put
from .tables import formula

STORAGE = {"float64": np.float64, "float32": np.float32}
FARTHEST = 1e300  # log v beyond it is no number: only M and the reference say which points are unreachable
FORGOTTEN = dict.fromkeys(("depth", "head", "have", "extrapolated"), 0) | {"since_absorb": 1}  # in a restart
LEAST_LOG = 80.0  # nats below 1 that a float32 v may lie
LARGEST_LOG = 85.0  # and above it: beyond e^85 a kernel's v is not the one asked for
ROUNDING_PART = 0.1  # of tol that the rounding of exponents may take before points far from all others are looked for
BEYOND = 2.0**40  # nats, which round by 1e-3: points that take no part and lie so far are left out of K
FAR_LOG = 100.0  # log v beyond it: a common part is kept out of v, and K takes in the rest


def shifted(problem: Problem, log_v: F64, symmetric: bool = False) -> tuple[F64, float]:
    """Return (log v + shift, shift), 0 where log v is not finite; a common part of thousands would overflow in v.

    One potential takes no shift, which would part log u from log v: K absorbs all of it.
    """
    if not any_of(log_v != 0):  # a cold start
        return np.zeros_like(log_v), 0.0
    used = np.isfinite(log_v) & ~problem.left_out[1]
    centre = median(log_v[used]) if any_of(used & (log_v != 0)) else 0.0
    shift = -centre if abs(centre) > FAR_LOG and not symmetric else 0.0
    return np.where(used, log_v + shift, 0.0), shift


@formula
def started(x: F64, out: Any, log_b: F64) -> tuple[F64, F64, F64]:
    """Return log v, the exponents of the plan that it makes, and its size: any start will do.

    Beyond ``FARTHEST``, or NaN, a point would look unreachable.
    """
    x = np.where(np.abs(x) < FARTHEST, x, 0.0)
    return x, np.where(out, -np.inf, x + log_b), np.abs(x)


@formula
def unreached(alpha: F64, out: Any) -> tuple[Any, Any]:
    """Return masks of the dead points, and of these and those that are left out."""
    dead = (alpha == np.inf) & ~out
    return dead, out | dead


@formula
def absorbed(alpha: F64, off: Any, log_a: F64) -> F64:
    """Return the part of log scalings that K absorbs, inf at points without mass."""
    return np.where(off, np.inf, alpha - log_a)


@formula
def with_shift(log: F64, off: Any, shift: float) -> F64:
    """Return log scalings and their shift as one, 0 at points without mass and where they are no numbers."""
    return np.where(off | ~np.isfinite(log), 0.0, log + shift)


@formula
def for_users(log: F64, out: Any, dead: Any) -> F64:
    """Return log scalings that are -inf at points left out, and inf at dead ones."""
    return np.where(out, -np.inf, np.where(dead, np.inf, log))


class Workspace:
    """One solve that holds K: its setting up, shared by the backends, over their words at the end of the class.

    Potentials are float64 vectors, on the host or a device, in POT's convention.
    """

    coarse: Coarse  # the coarse correction of its passes (coarse.py)
    progress: Any  # mapuot_progress
    operator: Any  # the `Operator` that holds K, of the backend
    safe_spread: float  # range(M) / reg, and the reach of log v, that K holds with nothing absorbed but M's minimum
    dead: tuple[Any, Any]  # masks of the rows and columns that no mass can reach
    absorbed: tuple[F64, Any]  # what K holds of log v, and which columns are left out
    narrow_points: Any = None  # of float32 passes that make their rows (narrow_points.py)
    makes_products = False  # for Newton's step (newton.py), which else takes those of the plan
    leaps_within = False  # a call that makes several passes makes the steps of ``leap`` between them
    idle: Idle | None = None  # points whose exponents' rounding does not count
    refuted = False  # did points that were thought idle turn out to take part?
    narrow_pass = compared = False  # was the last pass a float32 one, and the last whose error was compared?

    def __init__(self, problem: Problem, options: Options, skip: Truncation | None = None) -> None:
        """Hold no K before `absorb`; ``skip``: the state of the pairs of points to skip, which the driver owns."""
        self.problem, self.options, self.dtype = problem, options, options.precision
        self.truncation = skip

    @property
    def reads(self) -> str:
        """Name what passes read now, in the words of `Result.how`: "float32 tiles"."""
        return f"{self.dtype} {self.problem.cost.operator}"

    def absorb(self, log_v: F64 | None = None) -> None:
        """(Re)build K around log v, by default the next one: at most 1, with a 1 in each row and column in use."""
        problem = self.problem
        if self.truncation:
            self.take_mask(self.truncation)
        cold = log_v is not None and not any_of(log_v != 0)
        symmetric = self.options.symmetric
        x, shift = (self.shifted_log_v(), None) if log_v is None else shifted(problem, log_v, symmetric)
        out_u, out_v = problem.left_out
        la, lb = problem.log_reference
        x, plan_v, size = started(x, out_v, lb)
        with np.errstate(invalid="ignore"):
            reach = float(size.max())
            safe = reach <= FAR_LOG and problem.spread + reach <= self.safe_spread
            if safe and not problem.forbidden and problem.c is None:
                alpha, beta = np.zeros_like(la) + problem.M_min / problem.reg, np.zeros_like(lb)
            elif self.truncation and self.truncation.known:
                d, e = self.truncation.absorbed(x, self.progress_of("shift") if shift is None else shift)
                alpha, beta = d + la, e + lb
            else:
                alpha, beta = self.balance(out_u, plan_v)
                if self.idle is None and not symmetric:
                    self.idle = self.may_idle(alpha, beta)
                if self.idle and not self.truncation:
                    rows, cols = self.idle.masks
                    lost_u, lost_v = rows & (alpha > BEYOND), cols & (beta > BEYOND)
                    if problem.ranks.max(any_of(lost_u) or any_of(lost_v)):  # no K holds them
                        alpha, beta = self.balance(out_u | lost_u, np.where(lost_v, -np.inf, plan_v))
                        alpha, beta = np.where(lost_u, np.inf, alpha), np.where(lost_v, np.inf, beta)
            if symmetric:  # K is at most 1 as well with the mean of both, and symmetric
                alpha = beta = 0.5 * (np.concatenate(problem.ranks.all(alpha)) + beta)
                alpha = beta if problem.ranks.size == 1 else beta[problem.own]
            (dead_u, off_u), (dead_v, off_v) = unreached(alpha, out_u), unreached(beta, out_v)
            self.dead = dead_u, dead_v
            alpha[off_u] = beta[off_v] = -np.inf
            alpha, beta = self.fitted(alpha, beta)
        d, e = absorbed(alpha, off_u, la), absorbed(beta, off_v, lb)
        if cold and self.narrow_points and problem.cols.logarithmic:
            x = np.where(e - x > LEAST_LOG, e, x)  # of columns far from all rows v would be 0 in float32
        self.build(alpha, beta, problem.exponent_error(alpha, beta, self.idle))
        self.set_dual_constants(d, off_u)
        self.set_rows(d, off_u)
        self.absorbed = e, off_v
        self.set_cols(e, off_v, np.where(off_v, 0.0, x), shift)

    def may_idle(self, alpha: F64, beta: F64) -> Idle | None:
        """Find points that take no part, where the rounding of exponents, theirs among them, keeps passes from tol."""
        problem, least = self.problem, ROUNDING_PART * self.options.tol
        if self.refuted or not problem.exponent_error(alpha, beta) > least:
            return None
        return problem.idle_points(alpha, beta)

    def check_idle(self, stats: list[Stats]) -> None:
        """Take back what passes claim, and let K be built anew, if some point that was thought idle may take part."""
        if self.idle and not self.idle.holds(self.potentials(), self.marginals(), self.problem.ranks):
            self.idle, self.refuted, stats[-1].status = None, True, "absorb"
            for stat in stats:
                stat.gap = stat.error = np.inf
                stat.dual = -np.inf

    def corrected(self, stat: Stats) -> F64 | None:
        """Return the log v to go on from after a pass of a solve that skips pairs; None: the next one of the pass."""
        truncation, narrow = self.truncation, self.narrow_pass
        if not truncation or not truncation.correct:
            return None
        floor = 3 * self.narrow_points.error if narrow else 0.0
        comparable, self.compared = narrow == self.compared, narrow
        return truncation.corrected(self, stat, floor, comparable)

    def restart(self, log_v: F64, guarded: bool = False) -> None:
        """Go on from this log v on the same K; one that passes overwrite, or that v outgrows, is built anew.

        ``guarded``: the guard may drop the step to it.
        """
        e, off_v = self.absorbed
        log_v = namespace(e).asarray(log_v)
        x = with_shift(log_v, off_v, self.progress_of("shift"))
        if self.options.in_place or not largest(x - e) <= LARGEST_LOG:
            self.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
            return
        self.set_cols(e, off_v, x, None)
        put(self.progress, FORGOTTEN | {"extrapolated": int(guarded)})
        self.send_progress()

    @property
    def next_log_v(self) -> F64:
        """Return log v after the last pass, from which the next one would start, in POT's order (u_k, v_k)."""
        with np.errstate(invalid="ignore"):  # of a start that overflowed
            return self.limited(self.shifted_log_v() - self.progress_of("shift"), 1)

    @property
    def correcting(self) -> bool:
        """Tell whether steps are corrected by clusters."""
        return bool(self.progress_of("coarse"))

    def iterate(self, count: int) -> list[Stats]:
        """Make at most ``count`` passes, fewer if the status of the last is not "running".

        Where pairs are skipped it makes one, whose numbers are those of the problem between all points. A float32 one
        certifies nothing and is looked at only where it is the last: ``conclude``.
        """
        if not self.truncation:
            stats = self.coarse.iterate(count)
            self.check_idle(stats)
            return stats
        narrow = self.narrow_pass = self.progress_of("narrow") > 0
        stats = self.make_passes(1) if self.truncation.correct else self.coarse.iterate(1)
        if narrow:
            self.truncation.look(stats[-1], self.iterate_state)
        else:
            self.truncation.settle(stats[-1], self.iterate_state(), self.progress_of("moved"))
        if self.progress_of("dead") > 0 and self.truncation.known:
            self.truncation.known, stats[-1].status = False, "absorb"
        self.check_idle(stats)
        return stats

    @property
    def estimates(self) -> bool:
        """Tell whether passes are float32 ones between points, whose errors are estimates: none may be last."""
        return self.narrow_points is not None and self.progress_of("narrow") > 0

    def widen(self) -> None:
        """Make float64 passes from here on. No guard drops the first: it may be the last of all, which certifies."""
        put(self.progress, {"narrow": 0, "best_dual": -np.inf})
        self.take_float64()

    def conclude(self, stat: Stats) -> None:
        """Complete the numbers of the last pass of a run."""
        if self.truncation:
            self.truncation.settle(stat, self.iterate_state(), self.progress_of("moved"))

    def iterate_state(self) -> Iterated:
        return Iterated(*self.potentials(), *self.marginals())

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """Return alpha_i = -max_j(log v_j - M_ij / reg), beta_j = log v_j - max_i(alpha_i + log v_j - M_ij / reg).

        Where there is no finite entry they are +inf.
        """
        xp, x = namespace(plan_v), host(plan_v)
        alpha = np.where(host(out_u), -np.inf, 0.0)
        top = self.problem.ranks.max(self.operator.balance(alpha, x))
        return xp.asarray(alpha), xp.asarray(np.where(top == -np.inf, np.inf, x - top))

    def dual_constants(self) -> tuple[float, float]:
        """Return the dual value's constant part, reg |c| and the dead points' terms, and the size of all its terms."""
        problem = self.problem
        total, scale = problem.reg * problem.c_mass, 0.0
        if any_of(self.dead[0]) or any_of(self.dead[1]):
            problem.check_reachable(*self.dead)
        for side, dead in zip((problem.rows, problem.cols), self.dead, strict=True):
            total += side.ranks.sum(side.dead_terms(dead))
            scale += side.dual_scale
        return total, scale

    def limited(self, log_x: F64, side: int) -> F64:
        """Return log scalings of the rows (0) or columns (1) for users: -inf where left out, +inf where dead."""
        found: F64 = for_users(log_x, self.problem.left_out[side], self.dead[side])
        return found

    def newton(self) -> Any:
        """Return Newton's steps (newton.py) that certify what misses hard marginals, None where passes meet all."""
        return ColumnsNewton(self.problem) if misses(self.problem) else None

    # ---- what a backend adds

    progress_of: Callable[[str], float]  # a member of mapuot_progress
    potentials: Callable[[], tuple[F64, F64]]  # (log u, log v) of the last certified iterate
    marginals: Callable[[], tuple[F64, F64]]  # (r, s) of that
    close: Callable[[], None]  # give K's memory back
    make_passes: Callable[[int], list[Stats]]  # at most so many, which clusters do not correct anew
    shifted_log_v: Callable[[], F64]  # the next log v + shift
    build: Callable[[F64, F64, float], None]  # K of alpha and beta; the error that their rounding makes in a plan
    set_dual_constants: Callable[[F64, Any], None]  # ``dual_constants``, and what else no pass changes of the dual
    set_rows: Callable[[F64, Any], None]  # what a pass needs of the rows, by d; which have no mass
    set_cols: Callable[[F64, Any, F64, float | None], None]  # by e, x = log v + shift; None: the shift stays
    newton_product: Callable[[], Callable[[F64], F64]]  # of the last pass, where ``makes_products``
    take_mask: Callable[[Truncation], None]  # make the mask anew, and tell it to the kernels
    # Go on from a rough Newton's step from the last pass, which the guard may drop, where one is due; False: no step
    # follows this pass. The products that it took, or, with ``leaps_within``, those since this was asked last.
    leap: Callable[[Stats, bool], int]

    def take_float64(self) -> None:
        """Let rows that passes make be float64 ones."""

    def send_progress(self) -> None:
        """Send progress to where the kernels read it."""

    def fitted(self, alpha: F64, beta: F64) -> tuple[F64, F64]:
        """Return the scalings nearest to these that the backend can hold."""
        return alpha, beta
