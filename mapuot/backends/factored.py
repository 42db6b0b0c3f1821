"""Newton's method for hard sides by a factor of its matrix, where passes and conjugate gradients stall.

Rows are always met, as u is their prox. The dual value is then a concave function of log v with the gradient q - s, and

    S = diag(s + k2 q) - P^T diag(fi1 / r) P,    k = reg / rho (0 where hard),  fi = 1 / (1 + k),  q = b e^(-k2 log v)

is minus its Hessian. A step solves (S + shift diag(s + k2 q)) y = q - s by Cholesky (Levenberg-Marquardt). Groups
of points that hardly exchange mass give S eigenvalues below its rounding: a larger shift bounds the step between
groups and changes nothing within them. A line search on the dual value halves the step, or doubles one between groups.

A start far away is left for a path of regs, each half of the one before: two steps at each are usual. Steps certify
nothing; the pass that follows does (newton.c). All arrays have a leading axis for the problems of a batch, and lie on
the host or on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import namespace

LEAST_SHIFT = 1e-14  # of the diagonal: the rounding of Cholesky's method
MOST_SHIFT = 0.1  # from which on a step is cut instead
SHIFT_GROWS = 20.0  # factor of a shift that is too small, at least
SHIFT_FALLS = 1e-3  # factor of the shift from one step to the next
LONGEST = 30.0  # nats that a step may move a potential: 10 take up to twice the steps, 100 more line searches
FARTHEST = 1e7  # nats that a doubled step may move a potential: without a plan the dual value has no bound
BETWEEN_GROUPS = 3.0  # nats of a step from which on twice its length is tried
CONSTANT = 1e-3  # of the mean diagonal, along constants, where S is singular if all points are hard
RESIDUAL = 1e-3  # of the equations' right side, above which the factor was not positive definite
ARMIJO = 1e-4  # of the slope: gain that a step must bring
GAIN_ROUNDING = 1e-15  # of the terms of a gain, and of the mass: changes of log u are logarithms of sums
SHORTEST = 1e-6  # part of a step that is tried at last
NEAR = 1e-2  # of the mass: a start that misses less needs no larger reg
LEVEL_MISS = 1e-2  # of the mass: where a larger reg has done its work
FIRST_LEVEL = 30.0  # range of the costs over the largest reg
LEAST_MISS = 1e-14  # of the mass: rounding of sums
STIFF = 1e3  # rho / reg from which on passes may crawl
STEP_ENTRIES = 40_000_000  # entries of K that passes read in 10 ms, which small problems need for all their steps
MOST_PATIENCE = 2000  # passes of the smallest
SOFT_PATIENCE = 4  # times as many where a side is soft: such passes come nearer
MOST_STEPS = 60  # at one reg: clustered points took 20 at most, lattices 30


class Sides(NamedTuple):
    """Masses and k = reg / rho, 0 where hard, of the rows (p, m) and of the columns (p, n)."""

    a: Any
    b: Any
    k_rows: Any
    k_cols: Any

    def of(self, which: Any) -> Sides:
        return Sides(*(x[which] for x in self))


class SemiDualPoint(NamedTuple):
    """Plans that meet their rows: potentials, marginals r and s, and the marginal q that log v asks for."""

    plan: Any
    log_u: Any
    log_v: Any
    r: Any
    s: Any
    q: Any

    @property
    def missed(self) -> Any:
        """The distance of s from q, as a share of each plan's mass, (p,)."""
        return abs(self.q - self.s).sum(1) / self.r.sum(1)

    def of(self, which: Any) -> SemiDualPoint:
        return SemiDualPoint(*(x[which] for x in self))

    def put(self, which: Any, other: SemiDualPoint) -> None:
        for x, y in zip(self, other, strict=True):
            x[which] = y


class RegLevel:
    """Problems at one reg: plans ``exp(exponents + log u_i + log v_j)`` with exponents (p, m, n)."""

    def __init__(self, xp: Any, exponents: Any, sides: Sides) -> None:
        self.xp, self.exponents, self.sides = xp, exponents, sides
        self.fi = 1.0 / (1.0 + sides.k_rows)
        self.all_hard = not bool((sides.k_rows > 0).any() | (sides.k_cols > 0).any())
        self.factors = 0

    def meet_rows(self, log_u: Any, log_v: Any, which: Any = slice(None)) -> SemiDualPoint:
        """Return the plans of these log v that meet their rows, by the change of log u that the prox asks for."""
        xp = self.xp
        a, b, k_rows, k_cols = self.sides.of(which)
        plan = self.exponents[which] + log_v[:, None, :]
        plan += log_u[:, :, None]
        top = plan.max(2)
        top = xp.where(xp.isfinite(top), top, 0.0)
        plan -= top[:, :, None]
        xp.exp(plan, out=plan)
        sums = plan.sum(2)
        change = self.fi[which] * (xp.log(a) - k_rows * log_u - xp.log(sums) - top)
        change = xp.where((a > 0) & (sums > 0), change, 0.0)
        scale = xp.exp(top + change)
        plan *= scale[:, :, None]
        q = xp.where(b > 0, b * xp.exp(-k_cols * log_v), 0.0)
        return SemiDualPoint(plan, log_u + change, log_v, sums * scale, plan.sum(1), q)

    def descend(self, log_u: Any, log_v: Any, allowed: Any, most: int = MOST_STEPS) -> SemiDualPoint:
        """Make steps until columns miss at most ``allowed``, (p,), of the mass, or no step gains."""
        xp = self.xp
        here = self.meet_rows(log_u, log_v)
        shift = xp.zeros(len(log_v))
        moves = xp.ones(len(log_v), bool)
        for _ in range(most):
            left = xp.flatnonzero(moves & ~(here.missed <= allowed))
            if not len(left):
                break
            which = slice(None) if len(left) == len(log_v) else left
            part = here.of(which)
            y, shift[which] = self.direction(part, which, SHIFT_FALLS * shift[which])
            found, moves[which] = self.search(part, y, which)
            here.put(which, found)
        return here

    def direction(self, here: SemiDualPoint, which: Any, shift: Any) -> tuple[Any, Any]:
        """Return the step y of log v, at most LONGEST, and the shift of the diagonal that keeps it so short."""
        xp = self.xp
        fi, k_cols = self.fi[which], self.sides.k_cols[which]
        n = here.s.shape[1]
        weighed = here.plan * xp.sqrt(xp.where(here.r > 0, fi / here.r, 0.0))[:, :, None]
        S = xp.matmul(weighed.swapaxes(1, 2), weighed)
        S *= -1.0
        diagonal_of(S)[:] = 0.0
        own = -S.sum(2) + k_cols * here.q  # a sum of positive terms: s - P^2 / r would cancel
        if not self.all_hard:
            own += xp.matmul((1.0 - fi)[:, None, :], here.plan)[:, 0]
        size = here.s + k_cols * here.q
        used = size > 0
        diagonal_of(S)[:] = xp.where(used, own, 1.0)
        if self.all_hard:
            S += (CONSTANT / n) * size.mean(1)[:, None, None]
        size = xp.where(used, size, 1.0)
        right = xp.where(used, here.q - here.s, 0.0)
        y, shift = xp.zeros_like(right), xp.maximum(shift, LEAST_SHIFT)
        todo = xp.arange(len(right))
        while len(todo):
            some = slice(None) if len(todo) == len(right) else todo
            shifted = S[some].copy()
            diagonal_of(shifted)[:] += shift[some, None] * size[some]
            found = solve_equations(shifted, right[some])
            self.factors += len(todo)
            rest = right[some] - xp.matmul(S[some], found[:, :, None])[:, :, 0] - shift[some, None] * size[some] * found
            far = abs(found).max(1)
            solved = (rest**2).sum(1) <= RESIDUAL**2 * (right[some] ** 2).sum(1)
            good = solved & ((far <= LONGEST) | (shift[some] >= MOST_SHIFT))
            y[some] = xp.where(good[:, None], found * xp.minimum(1.0, LONGEST / far)[:, None], 0.0)
            grown = xp.maximum(xp.where(solved, 1.5 * far / LONGEST, 0.0), SHIFT_GROWS)
            shift[some] = xp.where(good, shift[some], shift[some] * grown)
            todo = todo[~good & (shift[some] <= grown)]
        return y, shift

    def search(self, here: SemiDualPoint, y: Any, which: Any) -> tuple[SemiDualPoint, Any]:
        """Return the iterates along y, and which of them gain."""
        xp = self.xp
        slope = (y * (here.q - here.s)).sum(1)
        length = xp.ones(len(y))
        found = self.meet_rows(here.log_u, here.log_v + y, which)
        gain, noise = self.gain(here, found, which)
        short = xp.flatnonzero(~(gain >= ARMIJO * slope - noise))
        while len(short):
            length[short] *= 0.5
            self.try_length(here, y, which, found, length, short, gain, noise)
            bad = ~(gain[short] >= ARMIJO * length[short] * slope[short] - noise[short])
            short = short[bad & (length[short] > SHORTEST)]
        best = gain.copy()
        long = xp.flatnonzero((length == 1.0) & (abs(y).max(1) > BETWEEN_GROUPS))
        while len(long):
            before = found.of(long)
            length[long] *= 2.0
            self.try_length(here, y, which, found, length, long, gain, noise)
            better = gain[long] > best[long] + noise[long]
            worse = xp.flatnonzero(~better)
            found.put(long[worse], before.of(worse))
            long = long[better & (length[long] * abs(y[long]).max(1) < FARTHEST)]
            best[long] = gain[long]
        return found, best >= -noise

    def try_length(
        self,
        here: SemiDualPoint,
        y: Any,
        which: Any,
        found: SemiDualPoint,
        length: Any,
        some: Any,
        gain: Any,
        noise: Any,
    ) -> None:
        """Put iterates that are so far along y, and their gains, in the places ``some``."""
        places = some if isinstance(which, slice) else which[some]
        start = here.of(some)
        trial = self.meet_rows(start.log_u, start.log_v + length[some, None] * y[some], places)
        found.put(some, trial)
        gain[some], noise[some] = self.gain(start, trial, places)

    def gain(self, here: SemiDualPoint, there: SemiDualPoint, which: Any) -> tuple[Any, Any]:
        """Return by how much the dual value grows, over reg, and the rounding of that."""
        xp = self.xp
        _, _, k_rows, k_cols = self.sides.of(which)
        rows = gain_of(xp, here.r, k_rows, difference(xp, there.log_u, here.log_u), 1.0)
        cols = gain_of(xp, here.q, k_cols, difference(xp, there.log_v, here.log_v), 0.0)
        size = abs(rows).sum(1) + abs(cols).sum(1) + here.r.sum(1)
        return rows.sum(1) + cols.sum(1), GAIN_ROUNDING * size


def diagonal_of(S: Any) -> Any:
    """Return the diagonals of contiguous matrices (p, n, n) as a view (p, n)."""
    p, n, _ = S.shape
    return S.reshape(p, n * n)[:, :: n + 1]


def difference(xp: Any, x: Any, y: Any) -> Any:
    """Return x - y, 0 at points that are left out, where both are -inf."""
    return xp.where(xp.isfinite(y), x - y, 0.0)


def gain_of(xp: Any, marginal: Any, k: Any, change: Any, mass: float) -> Any:
    """Return what each point adds to the dual value over reg: rho q (1 - e^(-k change)) / reg, of hard ones q change.

    ``mass``: 1.0 where the plan's mass changes with the side, which then counts against it.
    """
    soft = k > 0
    grown = -xp.expm1(-k * change)
    return marginal * xp.where(soft, grown * (1.0 / xp.where(soft, k, 1.0) + mass), change)


def solve(
    xp: Any, costs: Any, log_c: Any, sides: Sides, log_u: Any, log_v: Any, allowed: Any
) -> tuple[Any, Any, int]:  # fmt: skip
    """Return (log u, log v) whose columns miss at most ``allowed`` of the mass, and how many factors were made.

    Parameters
    ----------
    xp : module
        NumPy or CuPy, of all arrays.
    costs : (p, m, n) array
        M / reg; inf forbids a pair.
    log_c : array that broadcasts to (p, m, n)
        Logarithms of the reference.
    sides : Sides
    log_u, log_v : (p, m), (p, n) arrays
        Where to start; -inf at points that are left out.
    allowed : (p,) array
        See `allowed_miss`.
    """
    turned = costs.shape[1] < costs.shape[2]
    start = RegLevel(xp, log_c - costs, sides).meet_rows(log_u, log_v)
    if turned:  # the smaller side is stepped on
        costs, log_c = costs.swapaxes(1, 2), log_c.swapaxes(1, 2)
        sides = Sides(sides.b, sides.a, sides.k_cols, sides.k_rows)
        start = RegLevel(xp, log_c - costs, sides).meet_rows(start.log_v, start.log_u)
    search = PathSearch(xp, costs, log_c, sides, start, allowed)
    search.run()
    log_u, log_v = search.best[::-1] if turned else search.best
    return log_u, log_v, search.factors


class PathSearch:
    """The search of `solve`: first from a near start, then along a path of regs; the best potentials are kept."""

    def __init__(
        self, xp: Any, costs: Any, log_c: Any, sides: Sides, start: SemiDualPoint, allowed: Any
    ) -> None:  # fmt: skip
        self.xp, self.costs, self.log_c, self.sides = xp, costs, log_c, sides
        self.allowed, self.missed = allowed, start.missed
        self.best = start.log_u, start.log_v
        self.factors = 0

    def run(self) -> None:
        xp = self.xp
        near = xp.flatnonzero((self.missed <= NEAR) & ~(self.missed <= self.allowed))
        if len(near):
            self.descend(near, *(x[near] for x in self.best))
        far = xp.flatnonzero(~(self.missed <= self.allowed))
        if len(far):
            self.descend(far, *self.lower_reg(far))

    def at(self, level: float, some: Any) -> RegLevel:
        """Return the problems ``some`` at ``level`` times their reg."""
        log_c = self.log_c if len(self.log_c) == 1 else self.log_c[some]
        a, b, k_rows, k_cols = self.sides.of(some)
        sides = Sides(a, b, level * k_rows, level * k_cols)
        return RegLevel(self.xp, log_c - self.costs[some] / level, sides)

    def descend(self, some: Any, log_u: Any, log_v: Any) -> None:
        """Make steps at the reg asked for, and keep potentials that are better than those before."""
        level = self.at(1.0, some)
        found = level.descend(log_u, log_v, self.allowed[some])
        self.factors += level.factors
        better = self.xp.flatnonzero(found.missed < self.missed[some])
        self.missed[some[better]] = found.missed[better]
        for best, own in zip(self.best, (found.log_u, found.log_v), strict=True):
            best[some[better]] = own[better]

    def lower_reg(self, some: Any) -> tuple[Any, Any]:
        """Return potentials for the reg asked for, from larger ones that halve."""
        xp, costs = self.xp, self.costs[some]
        finite = xp.isfinite(costs)
        spread = float(xp.where(finite, costs, -np.inf).max() - xp.where(finite, costs, np.inf).min())
        level = max(1.0, spread / FIRST_LEVEL)
        log_u, log_v = (xp.where(xp.isfinite(x[some]), 0.0, -np.inf) for x in self.best)
        while level > 1.0:
            rung = self.at(level, some)
            found = rung.descend(log_u, log_v, xp.full(len(some), LEVEL_MISS))
            self.factors += rung.factors
            lower = max(1.0, level / 2)
            log_u, log_v = found.log_u * (level / lower), found.log_v * (level / lower)
            level = lower
        return log_u, log_v


def allowed_miss(tol: float, shape: tuple[int, int], both_hard: bool) -> float:
    """Return the share of the mass that columns may miss for a pass to certify ``tol``, and half as much for rounding.

    A plan that is optimal for other masses lies at most min(m, n) times their distance away, where one side is soft
    twice that (docs/mathematics.md, "Hard marginals").
    """
    paths = (1 if both_hard else 2) * min(shape)
    return max(0.5 * tol / paths, LEAST_MISS)


def patience(shape: tuple[int, int], both_hard: bool) -> int:
    """Return how many passes are made before steps with a factor follow, some six times as long as one such step.

    On one core a pass takes .3 ns a pair; a step takes .05 ns m n min(m, n), and a millisecond whatever the size.
    """
    m, n = shape
    return (1 if both_hard else SOFT_PATIENCE) * (min(shape) // 2 + min(MOST_PATIENCE, STEP_ENTRIES // (m * n)))


def is_stiff(reg: float, rho: float) -> bool:
    """Tell whether passes may crawl, as the largest rho is far above reg or a side is hard."""
    return rho >= STIFF * reg


def solve_equations(S: Any, x: Any) -> Any:
    """Solve positive definite equations (p, n, n), (p, n), whose matrix may be overwritten, by LAPACK or cuSOLVER.

    NaN, or any numbers, are returned where a matrix is not positive definite.
    """
    if namespace(S) is not np:
        from cupyx.lapack import posv  # noqa: PLC0415 - loads cuSOLVER

        return posv(S, x) if len(S) > 1 else posv(S[0], x[0])[None]
    from scipy.linalg.lapack import dposv  # noqa: PLC0415 - on first use

    found = np.full(x.shape, np.nan)
    for i, matrix in enumerate(S):
        _, y, failed = dposv(matrix.T, x[i], lower=True, overwrite_a=True)
        if not failed:
            found[i] = y
    return found
