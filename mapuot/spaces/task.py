"""A problem of `gromov`, the linear functions of a plan that its steps need, and the cost of a step.

With the plan Q of the previous step, the next plan P solves an unbalanced problem with the cost

    C_ij = alpha sum_kl (X_ik - Y_jl)^2 Q_kl + (1 - alpha) F_ij / 2 + k,
    k = rho_1 <Q 1, log(Q 1 / a)> + rho_2 <Q^T 1, log(Q^T 1 / b)> + reg <Q, log(Q / a b^T)>,

and with reg and reg_m multiplied by the mass of Q. If the entropy is of the plan, instead of its product with itself
("independent"), reg is not multiplied, and k has no term of reg. P is then multiplied by sqrt(mass Q / mass P), unless
a side is hard. Source: Sejourne, Vialard, Peyre 2021, algorithm 1. The sum is
(X^2 Q 1)_i + (Y^2 Q^T 1)_j - 2 (X Q Y^T)_ij, with entrywise squares. For squared distances between points, X = L R^T
and L has the rows (|x|^2, 1, x). Then the first two terms need moments only, and the last term is an inner product with
two coordinates more than the smaller space has. No matrix of pairs is formed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..arrays import host, namespace
from ..errors import shown
from ..penalties import F64, kl_divergence
from ..problem import validate
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.points import as_points
from ..problem.scale import scale_of
from ..problem.sparse import is_sparse
from ..problem.validate import EVEN
from .distances import HUGE, ONES, Space
from .settings import SPACES

ROUNDING = 2.0**-50  # relative rounding of the terms of a value
STEP, FALL, LAST = 0.05, 0.7, 1e-4  # reg of proximal steps in median costs: first, factor a step, least
AS_HARD = 1e12  # rho / (reg + costs): above it a marginal equals a hard side's in float64
FIRM = 1e6  # rho / reg: above it float32's squared rounding, (1e-8)^2, would cost over 1e-10 reg


class Terms(NamedTuple):
    """Terms of the objective, in its units: structure, features, both marginals and entropy."""

    structure: float
    features: float
    rows: float
    columns: float
    entropy: float


class Plan(NamedTuple):
    """The numbers of a plan P that a step needs; all but ``logs`` and ``apart`` are linear in P."""

    r: F64  # marginals of P
    s: F64
    rows: F64  # sum_k X_ik^2 r_k
    cols: F64
    cross: Any  # phi_X^T P phi_Y, without phi on a side given as a matrix
    moved: Any  # X P Y by `Space.times`: J instead of X or Y on a side given as points
    features: float  # <P, F>
    logs: tuple[float, float, float]  # <r, log(r / a)>, <s, log(s / b)>, <P, log(P / a b^T)>
    apart: tuple[float, float, float]  # KL(r | a), KL(s | b), KL(P | a b^T)
    over: tuple[float, float, float]  # mass of P less the masses of a, b and a b^T, free of cancellation

    @property
    def mass(self) -> float:
        return float(self.r.sum())

    @property
    def structure(self) -> float:
        """Return sum (X_ik - Y_jl)^2 P_ij P_kl."""
        return float(self.r @ self.rows + self.s @ self.cols) - 2 * float((self.cross * self.moved).sum())

    def mixed(self, others: list[Plan], shares: F64) -> Plan:
        """Return this plan plus shares times (other - this plan); logs and KL are combined linearly, too."""
        found: dict[str, Any] = {}
        for name in self._fields:
            own, *theirs = (getattr(plan, name) for plan in (self, *others))
            if isinstance(own, tuple):
                own, *theirs = map(np.asarray, (own, *theirs))
            found[name] = own - sum(share * (own - one) for one, share in zip(theirs, shares, strict=True))
        found |= {name: tuple(found[name].tolist()) for name in self._fields[-3:]}
        return self._replace(**found | {"features": float(found["features"])})

    def scaled(self, log: float) -> Plan:
        """Return this plan times f = exp(log).

        KL(f p | q) = f KL(p | q) + (f - 1) (|p| - |q|) + |p| (f log f - f + 1).
        """
        f = math.exp(log)
        more = math.expm1(log)
        mass = self.mass
        found: dict[str, Any] = {name: f * getattr(self, name) for name in self._fields[:-3]}
        found["logs"] = tuple(f * (z + mass * log) for z in self.logs)
        terms = zip(self.apart, self.over, strict=True)
        found["apart"] = tuple(max(0.0, f * kl + more * over + mass * (f * log - more)) for kl, over in terms)
        found["over"] = tuple(over + mass * more for over in self.over)
        return self._replace(**found)


class Factors:
    """A plan as a product of matrices, with the methods of a `Result` that `Task.plan` calls."""

    def __init__(self, *matrices: F64) -> None:
        self.matrices = matrices

    def apply(self, Z: F64) -> F64:
        return functools.reduce(lambda Z, A: A @ Z, reversed(self.matrices), Z)

    def apply_transpose(self, Z: F64) -> F64:
        return functools.reduce(lambda Z, A: A.T @ Z, self.matrices, Z)

    @property
    def plan(self) -> F64:
        return functools.reduce(np.matmul, self.matrices)


class Task:
    """A problem of `gromov`: both spaces, masses and penalties, and the costs of a step."""

    def __init__(
        self, X: Space, Y: Space, a: F64, b: F64, reg: float, rho: Any, features: Any, alpha: float,
        is_joint: bool = True,
    ) -> None:  # fmt: skip
        self.is_joint = is_joint
        self.X, self.Y, self.a, self.b, self.reg, self.rho, self.alpha = X, Y, a, b, reg, rho, alpha
        self.hard = math.inf in rho
        if isinstance(features, tuple):
            self.F = None
            f, g = features
        else:
            self.F = features
            f = np.empty((X.count, 0))
            g = np.empty((Y.count, 0))
        if f.size:
            self.f = f - f.mean(0)
            self.g = g - f.mean(0)
        else:
            self.f, self.g = f, g
        sizes = float(a.sum()), float(b.sum())
        whole = sizes[0] * sizes[1]
        if not 0 < whole * whole < math.inf:  # KL terms are between products of measures
            raise ValueError(f"a and b must have masses whose product has a square within float64, got {sizes}")
        self.prices = [*zip((*rho, reg), (*sizes, whole), strict=True)]
        if AS_HARD * reg < max(p for p in (*rho, 0.0) if p < math.inf):
            self.rho = self.hardened(sizes)
            self.hard = math.inf in self.rho
            self.prices = [*zip((*self.rho, reg), (*sizes, whole), strict=True)]

    def hardened(self, sizes: tuple[float, float]) -> tuple[float, ...]:
        """Return reg_m with inf for each side that float64 cannot tell from a hard one.

        The log of a marginal over its masses is a cost over reg_m, plus the log of the ratio of both masses where the
        other reg_m is as large.
        """
        unit = self.step_reg(0) + self.median_cost
        apart = abs(math.log(sizes[0] / sizes[1]))
        if apart <= EVEN:
            apart = 0.0
        pulls = [apart and rho * apart for rho in self.rho[::-1]]  # of the other side
        rho = tuple(math.inf if p >= AS_HARD * (unit + pull) else p for p, pull in zip(self.rho, pulls, strict=True))
        if any(AS_HARD * unit <= p < math.inf for p in rho):
            raise ValueError(
                f"reg_m must be less than {AS_HARD:g} times the costs or inf where a and b have unlike masses, got "
                f"{shown(self.rho)} and {sizes}: divide a and b by their sums"
            )
        return rho

    def check_settles(self, tol: float, max_iter: int) -> None:
        """Raise if rounding keeps the measured change of a plan (`distance`) above ``tol``.

        Between unlike masses the terms of the change, potentials and k, are as large as the smaller reg_m times the log
        of the masses' ratio, while the change is a difference of them, in units of reg.
        """
        unlike = abs(math.log(self.prices[0][1] / self.prices[1][1]))
        if min(self.rho) == math.inf or unlike <= EVEN:
            return
        smaller = 1 / sum(1 / rho for rho in self.rho)
        most = tol**2 * self.step_reg(max_iter) / (4 * ROUNDING * unlike)
        if smaller > most:
            raise ValueError(
                f"reg_m must be less than {2 * most:.2g}, or inf, where a and b have unlike masses and tol is {tol:g}, "
                f"got {shown(self.rho)} and masses {self.prices[0][1]:.6g} and {self.prices[1][1]:.6g}: divide a and b "
                "by their sums (without features the plan is the same but for its mass), or raise tol"
            )

    def restrict(self, rows: tuple[Any, F64], cols: tuple[Any, F64]) -> Task:
        """Return the problem between chosen points of both spaces, with the given masses."""
        (i, a), (j, b) = rows, cols
        if self.F is not None:
            features = self.F[i][:, j]
        elif self.f.size:
            features = self.f[i], self.g[j]
        else:
            features = None
        X = self.X.restrict(i)
        Y = self.Y.restrict(j)
        return type(self)(X, Y, a, b, self.reg, self.rho, features, self.alpha, self.is_joint)

    def between(self, X: Space, Y: Space) -> Task:
        """Return the same problem with other coordinates of the same points."""
        return type(self)(X, Y, self.a, self.b, self.reg, self.rho, self.features, self.alpha, self.is_joint)

    def priced(self, reg: float, rho: Any) -> Task:
        """Return the same problem with another reg and other reg_m."""
        return type(self)(self.X, self.Y, self.a, self.b, reg, rho, self.features, self.alpha, self.is_joint)

    @property
    def features(self) -> Any:
        """Features as the constructor takes them: a pair of points, the costs, or None."""
        if self.F is None and self.f.size:
            return self.f, self.g
        return self.F

    def plan_of_moments(self, r: F64, s: F64, cross: Any, features: float, *terms: Any) -> Plan:
        moved = self.Y.times(self.X.times(cross).T).T
        return Plan(r, s, self.X.square_means(r), self.Y.square_means(s), cross, moved, features, *terms)

    def plan(self, P: Any, r: F64, s: F64, terms: Any) -> Plan:
        """Return the `Plan` of a `Factors` or a `Result`, by one product with it.

        ``terms``: `divergence_terms` of both marginals and of the plan.
        """
        X, Y, f, g = self.X, self.Y, self.f, self.g
        is_whole = self.F is not None or (X.phi is None and Y.phi is None)
        whole = P.plan if is_whole else None
        if Y.phi is not None:
            Z = P.apply(np.hstack([g, Y.phi]))
            cross = Z[:, g.shape[1] :]
            shared = Z[:, : g.shape[1]]
            if X.phi is not None:
                cross = X.phi.T @ cross
        elif X.phi is not None:
            Z = P.apply_transpose(np.hstack([X.phi, f]))
            cross = Z[:, : X.phi.shape[1]].T
            shared = P.apply(g) if g.size else f
        else:
            cross = np.asarray(whole, np.float64)
            shared = P.apply(g) if g.size else f
        features = self.feature_cost(r, s, shared, whole)
        return self.plan_of_moments(r, s, cross, features, *zip(*terms, strict=True))

    def feature_cost(self, r: F64, s: F64, shared: F64, plan: Any) -> float:
        """Return <P, F>; ``shared``: P g; ``plan``: P if the features are given as a matrix F."""
        f, g = self.f, self.g
        if self.F is not None:
            return float((plan * self.F).sum())
        return float(r @ (f**2).sum(1) + s @ (g**2).sum(1) - 2 * (f * shared).sum())

    @property
    def usual_mass(self) -> float:
        """Return the mass of a hard side, or the geometric mean of both."""
        (low, A), (high, B), (_, whole) = self.prices
        if low == math.inf:
            return A
        if high == math.inf:
            return B
        return math.sqrt(whole)

    def independent(self) -> Plan:
        """Return the plan a b^T, scaled to `usual_mass`."""
        mass = self.usual_mass
        (_, A), (_, B), (_, whole) = self.prices
        r = self.a * (mass / A)
        s = self.b * (mass / B)
        terms = [divergence_terms(np.array([mass]), np.array([size])) for size in (A, B, whole)]
        return self.plan(Factors(r[:, None], self.b[None] / B), r, s, terms)

    @functools.cached_property
    def median_cost(self) -> float:
        return scale_of([self.usual_cost()], "median")

    def step_reg(self, k: int, mass: float = 1.0) -> float:
        """Return reg of step k from a plan of this mass."""
        if self.reg and not self.is_joint:
            return self.reg
        return mass * (self.reg or max(STEP * FALL**k, LAST) * self.median_cost)

    def usual_cost(self) -> Any:
        """Return the cost of the step from a b^T of mass 1, without the constant k."""
        plan = self.independent()
        posed = self.cost(plan.scaled(-math.log(plan.mass))._replace(logs=(0.0, 0.0, 0.0))).posed()
        if isinstance(posed, np.ndarray):
            return Dense(posed)
        return cost_of(posed)

    def feature_costs(self) -> F64:
        """Return the costs F of the features, (m, n)."""
        if self.F is not None:
            return np.asarray(self.F)
        squares = [(z**2).sum(1) for z in (self.f, self.g)]
        return np.asarray(squares[0][:, None] + squares[1] - 2 * self.f @ self.g.T)

    def check_mass(self, mass: float) -> None:
        if 0 < mass * mass < math.inf:
            return
        median = f"{self.median_cost:.3g}"
        raise ValueError(
            f"reg and reg_m must leave a plan with mass, got {shown(self.reg)} and {shown(self.rho)}, where the median "
            f"cost of a step is {median}: give reg_m of this size, or scale_cost='median' to give both in units of it"
        )

    def given(self, P: Any) -> Plan:
        """Check a plan (m, n) that a user gives, and return its `Plan`, scaled by `fitted`."""
        P = P.plan if isinstance(P, Result) else P
        shape = self.X.count, self.Y.count
        wanted = f"a plan {shape} of finite numbers >= 0, not all 0"
        P = validate.as_numbers(P.toarray() if is_sparse(P) else P, "init", wanted, shape, least=0.0)
        P = np.asarray(P, np.float64)
        c = np.outer(self.a, self.b)
        if (P[c == 0] > 0).any() or not P.any():
            raise ValueError(f"init must be {wanted}, and have no mass where a or b has none")
        if not 1e-100 < P.max() < 1e100:  # squares of its mass may leave float64
            P = P / P.max()
        r = P.sum(1)
        s = P.sum(0)
        pairs = (r, self.a), (s, self.b), (P.ravel(), c.ravel())
        plan = self.plan(Factors(P), r, s, [divergence_terms(*pair) for pair in pairs])
        return self.fitted(plan)

    def answer(self, result: Result) -> Plan:
        """Return the `Plan` of an answer."""
        return self.plan(result, *self.sums_of(result))

    def sums_of(self, result: Result) -> tuple[F64, F64, Any]:
        """Return marginals and terms of an answer; <P, log(P / a b^T)> comes from its potentials and its cost."""
        cost, *sums = result._sums  # sums of the plan itself: marginals of the last pass may lag behind
        r, s = (np.asarray(z, np.float64) for z in sums)
        logs = [np.where(w > 0, z, 0.0) for w, z in zip((r, s), result.own_logs, strict=True)]
        entropy = float(r @ logs[0] + s @ logs[1]) - cost / result.problem.reg
        problem = result.problem
        more = float(r.sum()) - self.prices[2][1]
        rows = divergence_terms(r, self.a, result.f, problem.rows.scalar_rho, problem.reg)
        cols = divergence_terms(s, self.b, result.g, problem.cols.scalar_rho, problem.reg)
        return r, s, [rows, cols, (entropy, entropy - more, more)]

    @property
    def is_firm(self) -> bool:
        """Whether rho is so large that a change of the mass in the fourth digit would swamp the costs."""
        return not self.hard and max(self.rho) > FIRM * self.step_reg(0)

    def fitted(self, plan: Plan) -> Plan:
        """Scale the plan: to the mass of a hard side, or to k = 0 if rho is so large that k would swamp the costs."""
        if self.hard:
            return plan.scaled(math.log(self.usual_mass / plan.mass))
        if not self.is_firm:
            return plan
        shares = [price / max(self.rho) for price, _ in self.prices]
        return plan.scaled(-float(np.dot(shares, plan.logs)) / (plan.mass * sum(shares)))

    def lifted(self, plan: Plan, rows: Any, cols: Any) -> Plan:
        """Return a plan between chosen points as a `Plan` of this problem: all other points have mass 0."""
        r = np.zeros(self.X.count)
        s = np.zeros(self.Y.count)
        r[rows], s[cols] = plan.r, plan.s
        m, n = plan.cross.shape
        at_rows: Any = range(m)
        at_cols: Any = range(n)
        if self.X.phi is None:  # then ``cross`` has all points of this side
            m = len(r)
            at_rows = rows
        if self.Y.phi is None:
            n = len(s)
            at_cols = cols
        cross = np.zeros((m, n))
        cross[np.ix_(at_rows, at_cols)] = plan.cross
        return self.plan_of_moments(r, s, cross, plan.features, *plan[-3:])

    @property
    def depth(self) -> int:
        """Number of previous steps for an extrapolation: fewer with a matrix, since plans then take much memory."""
        if self.X.phi is None or self.Y.phi is None:
            return 2
        return 5

    @functools.cached_property
    def sizes(self) -> tuple[Any, Any]:
        """Typical sizes of the rows and the columns of ``cross``; 1 on a side given as a matrix."""
        return self.X.typical_sizes()[:, None], self.Y.typical_sizes()

    def vector(self, plan: Plan) -> F64:
        rows, cols = self.sizes
        return np.asarray(plan.cross / rows / cols).ravel()

    @property
    def left_varies(self) -> bool:
        """Whether the left factors of a cost depend on the plan (Y has fewer coordinates), or the right factors."""
        X, Y = self.X.phi, self.Y.phi
        return Y is not None and (X is None or X.shape[1] > Y.shape[1])

    def factors(self, plan: Plan) -> tuple[tuple[F64, F64], tuple[F64, F64]]:
        """Return (B, C) and (V, U) with X P Y = B V^T + U C^T; B and C are the same for all plans.

        Return no columns if both spaces are given as matrices: `cost` then takes X P Y itself.
        """
        X, Y, G = self.X.phi, self.Y.phi, plan.moved
        left = np.empty((self.X.count, 0))
        right = np.empty((self.Y.count, 0))
        if X is None and Y is None:
            return (left, right), (right, left)
        if self.left_varies:
            return (left, Y), (right, G if X is None else X @ G)
        return (X, right), (G.T if Y is None else Y @ G.T, left)

    def cost(self, plan: Plan) -> StepCost:
        alpha = self.alpha
        f, g = self.f, self.g
        half = 0.5 * (1 - alpha)
        M = None if self.F is None else half * self.F
        if self.X.phi is None and self.Y.phi is None:
            structure = -2 * alpha * plan.moved
            M = structure if M is None else M + structure
        (B, C), (V, U) = self.factors(plan)
        r = alpha * plan.rows + self.constant(plan) + half * (f**2).sum(1)
        c = alpha * plan.cols + half * (g**2).sum(1)
        if B.size:
            B, V, ones = without_ones(B, V)
            c = c - 2 * alpha * host(ones)
        if C.size:
            C, U, ones = without_ones(C, U)
            r = r - 2 * alpha * host(ones)
        xp = namespace(V, U)
        fixed = xp.hstack([2 * alpha * B, xp.asarray(2 * half * f)]), C
        moving = xp.hstack([V, xp.asarray(g)]), 2 * alpha * U
        return StepCost(r, c, fixed, moving, M)

    def constant(self, plan: Plan) -> float:
        """Return the constant k of a plan's cost; 0 if a hard side fixes the mass.

        The entropy of one plan, instead of a product, adds nothing to k.
        """
        if self.hard:
            return 0.0
        terms = [rho * z for (rho, _), z in zip(self.prices, plan.logs, strict=True)]
        if not self.is_joint:
            terms.pop()
        return float(sum(terms))

    def divergences(self, plan: Plan) -> list[tuple[float, float, float]]:
        """Return (price, KL, difference of the masses) of both marginals and of the plan; a hard side has price 0."""
        terms = zip(self.prices, plan.apart, plan.over, strict=True)
        return [(0.0 if rho == math.inf else rho, kl, over) for (rho, _), kl, over in terms]

    def log_ratio(self, one: Plan, other: Plan) -> float:
        """Return log(|one| / |other|), near the masses of a and b by ``over``: prices may be 1e16 times reg."""
        sizes = [whole for _, whole in self.prices[:2]]
        logs = [[over / whole for over, whole in zip(plan.over[:2], sizes, strict=True)] for plan in (one, other)]
        if min(map(min, logs)) < -0.5:
            return math.log(one.mass / other.mass)
        most = max(self.rho)
        weights = [rho / most * whole for rho, whole in self.prices[:2]]
        return float(np.average(np.log1p(logs[0]) - np.log1p(logs[1]), weights=weights))

    def parts(self, plan: Plan) -> Terms:
        """Return the terms of the objective at a plan: KL(p x p | q x q) = 2 |p| KL(p | q) + (|p| - |q|)^2."""
        paid = [rho * (2 * plan.mass * z + apart * apart) for rho, z, apart in self.divergences(plan)]
        if not self.is_joint:
            paid[2] = 2 * self.reg * plan.apart[2]
        return Terms(self.alpha * plan.structure, (1 - self.alpha) * plan.features, *paid)

    def distance(self, plan: Plan, cost: StepCost, result: Result, mass: float, proximal: bool) -> float:
        """Bound |Q - P|_1 for the plan Q before a step and the exact answer P of the step.

        The potentials (f, g) of the result define the plan P' = a b^T exp((f + g - C) / reg) of mass ``mass``, and

            reg KL(Q | P') = <Q, C - f - g> + reg <Q, log(Q / a b^T)> + reg (|P'| - |Q|).

        A ``proximal`` step has the cost C - reg log(Q / a b^T), which cancels the second term.
        Pinsker's inequality, for measures of any mass, bounds |Q - P'|; the certificate of the result bounds |P' - P|.
        """
        whole, reg = plan.mass, result.problem.reg
        terms = [self.alpha * plan.structure, 0.5 * (1 - self.alpha) * plan.features, whole * self.constant(plan)]
        terms += [-float(w[w > 0] @ f[w > 0]) for w, f in zip((plan.r, plan.s), result.potentials, strict=True)]
        terms += [0.0 if proximal else reg * plan.logs[2], reg * (mass - whole)]
        size = float(np.abs(cost.r) @ plan.r + np.abs(cost.c) @ plan.s) + sum(map(abs, terms))
        apart = (max(0.0, sum(terms)) + ROUNDING * size) / reg
        return math.sqrt((2 * whole + 4 * mass) / 3 * apart) + result.error_bound * mass


def divergence_terms(p: F64, w: F64, f: Any = None, rho: Any = 0.0, reg: float = 1.0) -> tuple[float, float, float]:
    """Return <p, log(p / w)>, KL(p | w) and |p| - |w| of a marginal p; p is 0 wherever w is 0.

    For large rho / reg the three are computed from the optimal marginal w exp(-f / rho) instead of p, since rho would
    magnify the rounding of p.
    """
    used = w > 0
    p = p[used]
    w = w[used]
    firm = FIRM * reg < rho < math.inf
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if firm:
            logs = -f[used] / rho
        else:
            logs = np.where(p > 0, np.log(p) - np.log(w), 0.0)
        if firm and np.isfinite(total := float(w @ np.expm1(logs))):
            p = w * np.exp(logs)
            over = total
        else:
            over = float((p - w).sum())
        return float(p @ logs), float(kl_divergence(p, w).sum()), over


def without_ones(phi: F64, other: F64) -> tuple[F64, F64, F64]:
    """Return both factors of phi other^T without the column of ones in phi, and the column of ``other`` beside it."""
    xp = namespace(phi)
    kept = (xp.concatenate([z[:, :ONES], z[:, ONES + 1 :]], axis=1) for z in (phi, other))
    return *kept, other[:, ONES]


class StepCost(NamedTuple):
    """The cost of a step: r_i + c_j - <B_i, V_j> - <U_i, C_j> + M_ij; B and C are the same in all steps."""

    r: F64
    c: F64
    fixed: tuple[F64, F64]  # B, C
    moving: tuple[F64, F64]  # V, U
    M: Any

    def plus(self, other: StepCost, share: float) -> StepCost:
        """Return this cost plus ``share`` times the cost of another step."""
        if self.M is None:
            M = None
        else:
            M = self.M + share * other.M
        V, U = (own + share * theirs for own, theirs in zip(self.moving, other.moving, strict=True))
        return StepCost(self.r + share * other.r, self.c + share * other.c, self.fixed, (V, U), M)

    def of_plan(self, result: Result, log: float) -> StepCost:
        """Return -reg log(P / a b^T) for P = exp(log) times the answer; infinite potentials count as 0."""
        f, g = (np.where(np.isfinite(z), z, 0.0) for z in result.potentials)
        return self._replace(r=self.r - f - result.problem.reg * log, c=self.c - g)

    def posed(self) -> Any:
        """Return M for `solve`: a PointCloud, where the factors lie, or an array if the cost has a matrix part."""
        xp = namespace(*self.moving)
        left = xp.hstack([self.fixed[0], self.moving[1]])
        right = xp.hstack([self.moving[0], self.fixed[1]])
        if self.M is not None:
            return self.r[:, None] + self.c + self.M - host(left @ right.T)
        size = [np.sqrt(host((z**2).mean(0))) for z in (left, right)]
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.sqrt(size[1] / size[0])
        factor = xp.asarray(np.where(np.isfinite(factor) & (factor > 0), factor, 1.0))
        form: Any = "auto"
        if len(left) * len(right) > SPACES.most_formed:
            form = None
        return PointCloud(left * factor, right / factor, "inner", form=form, addends=(self.r, self.c))


def as_features(value: Any, m: int, n: int) -> Any:
    """Check the features of both spaces: a pair of point arrays with the same columns, or a matrix of costs."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        f, g = (np.asarray(as_points(z, f"features[{k}]"), np.float64) for k, z in enumerate(value))
        if (len(f), len(g)) != (m, n) or f.shape[1] != g.shape[1]:
            raise ValueError(f"features must be ({m}, k) and ({n}, k) arrays, got shapes {f.shape} and {g.shape}")
        if max(np.abs(f).max(), np.abs(g).max()) >= HUGE:
            raise ValueError("features must be points whose squared distances are within float64: rescale them")
        return f, g
    F = validate.as_numbers(value, "features", f"a pair of arrays or a finite matrix ({m}, {n})", (m, n), kinds="fiu")
    return np.asarray(F, np.float64)
