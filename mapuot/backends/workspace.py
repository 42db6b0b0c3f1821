"""The code that the workspaces of cpu/ and cuda/ share: choose the potentials that K absorbs, and read passes' results.

    K_ij = c_ij exp(alpha_i + beta_j - M_ij / reg),   u_i = e^(log u_i - d_i),   v_j = e^(log v_j - e_j)

with d = alpha - log a, e = beta - log b (log a and log b only if c = a b^T). A point that is left out has the scaling
0. A dead point has only partners that are left out or forbidden, and the scaling +inf. For both alpha or beta is -inf,
so that K is 0 there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import any_of, formula, host, largest, median, namespace
from ..contract import ANDERSON_DEPTHS, Options, Stats
from ..outcome import request_kernel
from ..penalties import F64
from ..problem.problem import Idle, Problem
from .boxes import PassState
from .coarse import Coarse
from .newton import ColumnsNewton
from .pairs import AllPairs
from .records import put

STORAGE = {"float64": np.float64, "float32": np.float32}
FARTHEST = 1e300  # larger |log v| of a start is set to 0: only M and the reference tell unreachable points
FORGOTTEN = dict.fromkeys(("depth", "head", "have", "extrapolated"), 0) | {"since_absorb": 1}  # reset by a restart
LEAST_LOG = 80.0  # a float32 v holds e^-80
LARGEST_LOG = 85.0  # a kernel clips v at e^85
NARROW_LOG = 46.0  # float32 passes between points end at a v of 1e20, NARROW_LIMIT of rules.h
ROUNDING_PART = 0.1  # share of tol; if exponents round by more, look for idle points
BEYOND = 2.0**40  # nats, which round by 1e-3: K leaves out idle points with a larger alpha or beta
FAR_LOG = 100.0  # for a larger |log v| a common shift is kept out of v, and K absorbs the rest


def anderson_depth_of(most: int, m: int, itemsize: int) -> int:
    """Choose the depth of Anderson's step for a K of m rows.

    d differences move 16 d bytes a column, at most a tenth of the bytes of K.
    """
    least, deepest = ANDERSON_DEPTHS
    return min(most, max(least, min(deepest, m * itemsize // 160)))


def shifted(problem: Problem, log_v: F64, symmetric: bool = False) -> tuple[F64, float]:
    """Return (log v + shift, shift), with 0 where log v is not finite; without the shift, e^(log v) could overflow.

    With one potential the shift is 0, since it would separate log u from log v: K absorbs all of log v.
    """
    used = np.isfinite(log_v) & ~problem.left_out[1]
    if any_of(used & (log_v != 0)):
        centre = median(log_v[used])
    else:
        centre = 0.0
    if abs(centre) > FAR_LOG and not symmetric:
        shift = -centre
    else:
        shift = 0.0
    return np.where(used, log_v + shift, 0.0), shift


@formula
def started(x: F64, out: Any, log_b: F64) -> tuple[F64, F64, F64]:
    """Return log v, log v + log b (-inf where left out), and |log v|.

    Replace NaN and values beyond ``FARTHEST`` by 0, since such a point would look unreachable. Any start is valid.
    """
    x = np.where(np.abs(x) < FARTHEST, x, 0.0)
    return x, np.where(out, -np.inf, x + log_b), np.abs(x)


@formula
def absorbed(alpha: F64, out: Any, log_a: F64) -> tuple[Any, Any, F64, F64]:
    """Return the mask of the dead points, and the mask ``off`` of points that are dead or left out.

    Return alpha, -inf at points ``off``, and the part of the log scalings that K absorbs, inf there.
    """
    dead = (alpha == np.inf) & ~out
    off = out | dead
    return dead, off, np.where(off, -np.inf, alpha), np.where(off, np.inf, alpha - log_a)


@formula
def with_shift(log: F64, off: Any, shift: float) -> F64:
    """Return log scalings plus their shift, 0 at points without mass and where they are not finite."""
    return np.where(off | ~np.isfinite(log), 0.0, log + shift)


@formula
def for_users(log: F64, out: Any, dead: Any) -> F64:
    """Return log scalings with -inf at points left out and +inf at dead points."""
    return np.where(out, -np.inf, np.where(dead, np.inf, log))


class Workspace:
    """One solve with its K: the setup that backends share; each backend supplies the members at the end of the class.

    Potentials are float64 vectors, on the host or a device, in POT's convention.
    """

    problem: Problem
    options: Options
    dtype: str  # storage of K
    policy: AllPairs  # which pairs passes read; the driver owns the state of skipped pairs
    coarse: Coarse  # the coarse correction of its passes (coarse.py)
    progress: Any  # mapuot_progress
    operator: Any  # the backend's `Operator`, which holds K
    safe_range: float  # largest range(M) / reg + max |log v| of a K that absorbs only the minimum of M
    dead: tuple[Any, Any]  # masks of the rows and columns that no mass can reach
    absorbed: tuple[F64, Any]  # the part of log v that K absorbs, and a mask of columns without mass
    narrow_points: Any = None  # points of float32 passes that make their rows (narrow_points.py)
    makes_products = False  # makes the products of Newton's step (newton.py); False: these come from the plan
    leaps_within = False  # a call of several passes makes the steps of ``leap`` between them
    idle: Idle | None = None  # points without influence: the rounding of their exponents is ignored
    refuted = False  # did a point that was thought idle have influence?
    narrow_pass = False  # whether the last pass used float32
    compared = False  # whether the last pass with an error for comparison used float32

    @property
    def reads(self) -> str:
        """Name the matrix that passes read now, in the terms of `Result.how`: "float32 tiles"."""
        return f"{self.dtype} {self.problem.cost.operator}"

    @property
    def has_exact_marginals(self) -> bool:
        """Tell whether a pass and its plan, of all pairs, have the same marginals, up to the rounding of float64."""
        return self.dtype == "float64" and not self.policy.skips and not self.options.symmetric

    def absorb(self, log_v: F64 | None = None) -> None:
        """Build K around log v (default: the next log v), with entries of at most 1."""
        problem = self.problem
        self.policy.choose(self)
        cold = log_v is not None and not any_of(log_v != 0)
        symmetric = self.options.symmetric
        if log_v is None:
            x = self.shifted_log_v()
            shift = None
        elif cold:
            x = np.zeros_like(log_v)
            shift = 0.0
        else:
            x, shift = shifted(problem, log_v, symmetric)
        out_u, out_v = problem.left_out
        la, lb = problem.log_reference
        x, plan_v, size = started(x, out_v, lb)
        with np.errstate(invalid="ignore"):
            alpha, beta, error = self.exponents(x, plan_v, float(size.max()), shift)
            if symmetric:  # the mean of alpha and beta makes K symmetric, and its entries stay <= 1
                beta = 0.5 * (np.concatenate(problem.ranks.all(alpha)) + beta)
                if problem.ranks.size == 1:
                    alpha = beta
                else:
                    alpha = beta[problem.own]
            dead_u, off_u, alpha, d = absorbed(alpha, out_u, la)
            dead_v, off_v, beta, e = absorbed(beta, out_v, lb)
            self.dead = dead_u, dead_v
            if self.narrow_points is not None:
                alpha, beta = self.fitted(alpha, beta)
                d = np.where(off_u, np.inf, alpha - la)
                e = np.where(off_v, np.inf, beta - lb)
        if cold and self.narrow_points and problem.cols.logarithmic:
            x = np.where(e - x > LEAST_LOG, e, x)  # else v of columns far from all rows would be 0 in float32
        if error is None or symmetric or self.narrow_points is not None:
            error = problem.exponent_error(alpha, beta, self.idle)
        self.build(alpha, beta, error)
        self.set_rows(d, off_u)
        self.absorbed = e, off_v
        self.set_cols(e, off_v, np.where(off_v, 0.0, x), shift)

    def exponents(self, x: F64, plan_v: F64, reach: float, shift: float | None) -> tuple[F64, F64, float | None]:
        """Choose the exponents alpha and beta of K for log v + shift = ``x``; return their error, if it is known.

        ``plan_v``: x plus log b; ``reach``: the largest |x|; ``shift``: None for the shift of the passes.
        """
        problem = self.problem
        out_u = problem.left_out[0]
        la, lb = problem.log_reference
        safe = reach <= FAR_LOG and problem.range_over_reg + reach <= self.safe_range
        if safe and not problem.forbidden and problem.c is None:
            return np.zeros_like(la) + problem.M_min / problem.reg, np.zeros_like(lb), None
        if self.policy.has_marginals:
            d, e = self.policy.absorbed(x, self.progress_of("shift") if shift is None else shift)
            return d + la, e + lb, None
        alpha, beta = self.balance(out_u, plan_v)
        error = None
        if self.idle is None and not self.options.symmetric and not self.refuted:
            error = problem.exponent_error(alpha, beta)
            # points without influence: their rounding, if it could keep passes from reaching tol, does not count
            if error > ROUNDING_PART * self.options.tol:
                self.idle = problem.idle_points(alpha, beta)
        if self.idle is None:
            return alpha, beta, error
        if not self.policy.skips:
            alpha, beta = self.balance_without_lost(alpha, beta, self.idle, out_u, plan_v)
        return alpha, beta, None

    def balance_without_lost(self, alpha: F64, beta: F64, idle: Idle, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """Balance again without the idle points that are too far for any K; these get inf."""
        rows, cols = idle.masks
        lost_u = rows & (alpha > BEYOND)
        lost_v = cols & (beta > BEYOND)
        if not self.problem.ranks.max(any_of(lost_u) or any_of(lost_v)):
            return alpha, beta
        alpha, beta = self.balance(out_u | lost_u, np.where(lost_v, -np.inf, plan_v))
        return np.where(lost_u, np.inf, alpha), np.where(lost_v, np.inf, beta)

    def check_idle(self, idle: Idle, stats: list[Stats]) -> None:
        """If a point that was thought idle may have influence, void the passes' certificates and request a new K."""
        if not idle.holds(self.potentials(), self.marginals(), self.problem.ranks):
            self.idle = None
            self.refuted = True
            request_kernel(stats[-1])
            for stat in stats:
                stat.gap = stat.error = np.inf
                stat.dual = -np.inf

    def restart(self, log_v: F64, guarded: bool = False) -> None:
        """Continue from this log v on the same K; rebuild K if passes overwrite it or if v would outgrow it.

        ``guarded``: the guard may drop the step to this log v.
        """
        e, off_v = self.absorbed
        log_v = namespace(e).asarray(log_v)
        x = with_shift(log_v, off_v, self.progress_of("shift"))
        if self.estimates:
            most = NARROW_LOG
        else:
            most = LARGEST_LOG
        if self.options.in_place or not largest(x - e) <= most:
            self.absorb(np.where(np.isfinite(log_v), log_v, 0.0))
            return
        self.set_cols(e, off_v, x, None)
        put(self.progress, FORGOTTEN | {"extrapolated": int(guarded)})
        self.send_progress()

    @property
    def next_log_v(self) -> F64:
        """Return log v at the start of a next pass, in POT's order (u_k, v_k)."""
        with np.errstate(invalid="ignore"):  # a start may have overflowed
            log_v = self.shifted_log_v() - self.progress_of("shift")
        found: F64 = for_users(log_v, self.problem.left_out[1], self.dead[1])
        return found

    def iterate(self, count: int) -> list[Stats]:
        """Make at most ``count`` passes; stop after a pass with a status other than "running"."""
        stats = self.policy.settle(self, count)
        if self.idle:
            self.check_idle(self.idle, stats)
        return stats

    @property
    def estimates(self) -> bool:
        """Tell whether passes are float32 passes between points: their errors are estimates, and none may be last."""
        return self.narrow_points is not None and self.progress_of("narrow") > 0

    def widen(self) -> None:
        """Make float64 passes from here on. The guard must not drop the first, which may be the last and certify."""
        put(self.progress, {"narrow": 0, "best_dual": -np.inf})
        self.take_float64()

    def conclude(self, stat: Stats) -> None:
        """Complete the numbers of the last pass of a run."""
        self.policy.conclude(self, stat)

    def iterate_state(self) -> PassState:
        return PassState(*self.potentials(), *self.marginals())

    def balance(self, out_u: Any, plan_v: F64) -> tuple[F64, F64]:
        """Return alpha_i = -max_j(log v_j - M_ij / reg), beta_j = log v_j - max_i(alpha_i + log v_j - M_ij / reg).

        Both are +inf in rows and columns without a finite entry.
        """
        xp = namespace(plan_v)
        x = host(plan_v)
        alpha = np.where(host(out_u), -np.inf, 0.0)
        top = self.problem.ranks.max(self.operator.balance(alpha, x))
        return xp.asarray(alpha), xp.asarray(np.where(top == -np.inf, np.inf, x - top))

    def dual_constants(self) -> tuple[float, float]:
        """Return the constant part of the dual value (reg |c| and terms of dead points), and the size of its terms."""
        problem = self.problem
        total = problem.reg * problem.c_mass
        scale = 0.0
        some_dead = any_of(self.dead[0]), any_of(self.dead[1])
        if any(some_dead):
            problem.check_reachable(*self.dead)
        for side, dead, is_some in zip(problem.sides, self.dead, some_dead, strict=True):
            total += side.ranks.sum(side.dead_terms(dead) if is_some else 0.0)
            scale += side.dual_scale
        return total, scale

    def newton(self) -> Any:
        """Return Newton's steps (newton.py), which certify plans that miss hard marginals; None if passes meet all."""
        if self.problem.misses:
            return ColumnsNewton(self.problem)
        return None

    # ---- supplied by each backend

    progress_of: Callable[[str], float]  # a member of mapuot_progress
    correcting: Any  # property: are steps corrected by clusters?
    potentials: Callable[[], tuple[F64, F64]]  # (log u, log v) of the last certified iterate
    marginals: Callable[[], tuple[F64, F64]]  # (r, s) of the last certified iterate
    close: Callable[[], None]  # free the memory of K
    make_passes: Callable[[int], list[Stats]]  # make at most this many passes, without a new cluster correction
    shifted_log_v: Callable[[], F64]  # the next log v + shift
    build: Callable[[F64, F64, float], None]  # build K (alpha, beta, plan error by the rounding of exponents)
    # set the row vectors of a pass, and the terms of the dual value that no pass changes (d, mask of rows without mass)
    set_rows: Callable[[F64, Any], None]
    set_cols: Callable[[F64, Any, F64, float | None], None]  # (e, no mass, log v + shift, shift; None: keep the shift)
    newton_product: Callable[[], Callable[[F64], F64]]  # product for Newton's step, from the last pass
    take_mask: Callable[[Any], None]  # choose a new mask, and give it to the kernels
    fitted: Callable[[F64, F64], tuple[F64, F64]]  # the nearest scalings that float32 points can represent
    # leap(stat, on): continue from a rough Newton's step after the last pass, if one is due; the guard may drop it.
    # Make no step if ``on`` is False. Return the number of products of the step; with ``leaps_within``, the number
    # since the last call.
    leap: Callable[[Stats, bool], int]

    def take_float64(self) -> None:
        """Switch to float64 where passes make their rows."""

    def send_progress(self) -> None:
        """Send progress to where the kernels read it."""
