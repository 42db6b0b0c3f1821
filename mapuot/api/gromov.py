"""`gromov`: a plan between two spaces that share no coordinates, entropic, unbalanced or balanced, fused or not.

With the plan Q of the step before, the next plan P solves an unbalanced problem of its own, whose cost is

    C_ij = alpha sum_kl (X_ik - Y_jl)^2 Q_kl + (1 - alpha) F_ij / 2 + k,
    k = rho_1 <Q 1, log(Q 1 / a)> + rho_2 <Q^T 1, log(Q^T 1 / b)> + reg <Q, log(Q / a b^T)>,

and whose reg and reg_m are multiplied by the mass of Q; P is then multiplied by sqrt(mass Q / mass P), unless a side is
hard. Source: Sejourne, Vialard, Peyre 2021, algorithm 1. The sum is (X^2 Q 1)_i + (Y^2 Q^T 1)_j - 2 (X Q Y^T)_ij. Of
squared distances between points X = L R^T with the rows (|x|^2, 1, x) of L: its squares are moments, and the last term
is an inner product of as many coordinates as the smaller space has, and two more. No matrix of pairs is then formed.
What a step needs of a plan is linear in it, so that every other step may begin at Anderson's extrapolation of the plans
before it (Pratapa, Suryanarayana, Pask 2016), which is left where the objective rises.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..answer.slopes import Gradient, mass_slope
from ..backends import pick
from ..errors import muted, shown
from ..penalties import F64, kl_divergence
from ..problem import validate
from ..problem.clouds import PointCloud
from ..problem.cost import Dense, cost_of
from ..problem.points import as_points
from ..problem.scale import scale_of
from ..problem.sparse import is_sparse
from ..problem.symmetry import as_symmetric
from ..problem.validate import as_positive, check_kind
from ..status import Words, not_converged, warn_not_converged
from .solve import solve

KINDS = "sqeuclidean", "precomputed"
STARTS = "independent", "axes", "coarse"
LOOSE = 1e-2  # tol of the first inner solve; later ones follow the change of the plan, by SHARE of it
SHARE = 0.1
FAR, REST = 2.0, 5  # steps that an extrapolation saves, and steps after one that led nowhere
AHEAD = 0.5  # share of the mass that it moves at most
SOME = 500  # points of each space that a coarse start is found between
COARSE = 40, 1e-2, 1e-3  # steps there at most, tol, inner_tol
FIRST = 5, 1e-2, 1e-2  # steps from each direction of the axes, tol, inner_tol
SIGNS = 8  # directions of the axes that are tried
ROUNDING = 2.0**-50  # of the terms of a value
TINY, HUGE = 1e-150, 1e150  # distances whose squares, and sums of them, are within float64
FIRM = 1e6  # times reg: a larger rho makes more than 1e-10 reg of the square of float32's rounding, 1e-8
OPTIONS = "threads", "backend", "precision", "max_passes"  # of `solve`, which a user may give


class Step(NamedTuple):
    """One step: how far the plan before it lay from its answer, the objective, the mass, the inner certificate."""

    change: float
    objective: float
    mass: float
    error_bound: float
    n_passes: int


class Terms(NamedTuple):
    """Terms of the objective, in its units: of the structures, the features, both marginals and the entropy."""

    structure: float
    features: float
    rows: float
    columns: float
    entropy: float


class GromovResult(Result):
    """Answer of `gromov`: a `Result` of the last inner problem, and what is known of the outer one.

    Whatever a `Result` tells (``plan``, ``apply``, ``top_k``, ``sparse``, ``sample``, ``barycentric_map``, ``save``) is
    told of the plan; ``error_bound``, ``gap``, ``dual``, ``objective`` and ``cost`` are those of the last inner
    problem, which is convex and whose certificate is true. The outer problem is not convex: no number bounds how far
    the plan is from its best one.

    Attributes
    ----------
    value, parts : float, Terms
        Objective of `gromov` at the plan, and the terms whose sum it is: ``structure``, ``features``, ``rows``,
        ``columns``, ``entropy``.
    steps : list of Step
        One entry a step of the start that was kept: ``change``, ``objective``, ``mass``, and of the inner solve
        ``error_bound`` and ``n_passes``. ``change`` bounds ``|Q - P|_1 / mass`` for the plan Q before and the exact
        answer P of the step, so that it counts ``error_bound``. It is inf where the step began at an extrapolation of
        the plans before it, or at one lifted from some of the points.
    values : list of float
        Objectives that all starts came to, by which the best was kept.
    settled : bool
        Whether the last change was at most ``tol``.
    coarse : GromovResult or None
        The answer between some of the points where this one began with it; its ``values`` tell what the starts that
        were tried there came to.

    See Also
    --------
    gromov : Makes it.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    >>> result = mapuot.gromov(x, x[:, ::-1], reg=0.5, reg_m=np.inf)
    >>> result.plan.argmax(1)
    array([0, 1, 2])
    >>> result.settled, bool(abs(sum(result.parts) - result.value) < 1e-12)
    (True, True)
    """

    value: float
    parts: Terms
    steps: list[Step]
    values: list[float]
    settled: bool
    coarse: GromovResult | None = None
    _task: Task
    _plan: Plan

    def gradient(self) -> Gradient:
        """Return the derivatives of ``value`` by the points and masses, at a plan that answers its own step.

        The envelope theorem: there the plan's own change does not count. Both spaces must be of points. Where both
        sides are hard, derivatives by masses are known up to a constant.

        Returns
        -------
        Gradient
            ``x`` (m, d), ``y`` (n, e), ``a`` (m,), ``b`` (n,); ``error`` is inf, as nothing bounds how far the plan is
            from one that answers its own step.
        """
        task, plan, (X, Y) = self._task, self._plan, (self._task.X, self._task.Y)
        if X.phi is None or Y.phi is None:
            raise NotImplementedError("gradient is for metric 'sqeuclidean' on both sides: distances have no points")
        sides = (X, Y, plan.r, self.apply(Y.phi)), (Y, X, plan.s, self.apply_transpose(X.phi))
        x, y = (own.slope(own, w[:, None] * own.phi) - own.slope(other, Z) for own, other, w, Z in sides)
        (low, A), (high, B), (reg, whole) = task.prices
        mass, paid = plan.mass, zip(task.prices, plan.logs, strict=True)
        more = sum(rho * z for (rho, _), z in paid if rho < math.inf)  # what one more unit of mass costs, by the logs
        rows = reg * B * (whole - mass) + (more if low == math.inf else -low * plan.over[0])
        cols = reg * A * (whole - mass) + (more if high == math.inf else -high * plan.over[1])
        a, b = mass_slope(self, True) + rows, mass_slope(self, False) + cols
        return Gradient(8 * task.alpha * x, 8 * task.alpha * y, 2 * a, 2 * b, math.inf)

    def __repr__(self) -> str:
        (m, n), state = self.problem.shape, "settled" if self.settled else "not settled"
        return f"<mapuot.GromovResult {m}x{n} {state} after {len(self.steps)} steps, value {self.value:.6g}>"


class Space:
    """The distances within one space, as points or as a matrix, and what a step asks of them.

    Points have X = phi J phi^T with the rows (|x|^2, 1, x) of phi, and J turns (q, 1, x) into (1, q, -2 x). A plan is
    then known by its moments phi^T P; beside a matrix by its rows.
    """

    phi: Any = None  # (m, d + 2), of points
    matrix: Any = None

    def __init__(self, given: Any, kind: str, name: str) -> None:
        if kind == "sqeuclidean":
            points = np.asarray(as_points(given, name), np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                x = points - points.mean(0)
                self.phi = np.column_stack([(x**2).sum(1), np.ones(len(x)), x])
            self.count = len(x)
            check_powers(self.phi[:, 0], f"{name} must have points whose distances", "the fourth power of a length")
            return
        A = given if is_sparse(given) else validate.as_array(given, name)
        check_kind(A, name)
        if A.ndim != 2 or A.shape[0] != A.shape[1] or 0 in A.shape:
            raise ValueError(f"{name} must be a square matrix of distances for metric 'precomputed', got {A.shape}")
        self.matrix = as_symmetric(A.tocsr() if is_sparse(A) else A, name, " for metric 'precomputed'")
        self.count = A.shape[0]
        check_powers(self.matrix.data if is_sparse(A) else self.matrix, f"{name} must have distances that", "a square")

    def part(self, chosen: Any) -> Space:
        """Return the space of some of the points, whose coordinates stay as they are."""
        one = object.__new__(Space)
        one.count = len(chosen)
        if self.matrix is None:
            one.phi = self.phi[chosen]
        else:
            one.matrix = self.matrix[chosen][:, chosen]
        return one

    def square_means(self, w: F64) -> F64:
        """Return sum_k X_ik^2 w_k of every i."""
        if self.matrix is not None:
            return np.asarray((self.matrix.multiply(self.matrix) if is_sparse(self.matrix) else self.matrix**2) @ w)
        q, x = self.phi[:, 0], self.phi[:, 2:]
        second, first, third = x.T @ (x * w[:, None]), w @ x, (w * q) @ x
        rest = w @ q**2 + 2 * q * (w @ q) - 4 * q * (x @ first) - 4 * (x @ third)
        return np.asarray(q**2 * w.sum() + rest + 4 * ((x @ second) * x).sum(1))

    def times(self, Z: Any) -> Any:
        """Return what X does to folded columns: X Z, folded back for a matrix and not yet for points."""
        return self.matrix @ Z if self.phi is None else np.concatenate([Z[1:2], Z[:1], -2 * Z[2:]])

    def slope(self, other: Space, A: F64) -> F64:
        """Return sum_k D_ik (x_i - x_k) of every point i, for D = A J A^T with the J of a space."""
        W, x = other.times(A.T).T, self.phi[:, 2:]
        return np.asarray(x * (W @ A.sum(0))[:, None] - W @ (A.T @ x))


def check_powers(distances: Any, what: str, unit: str) -> None:
    """Raise where the squares of distances, which costs are made of, are beyond float64."""
    most = float(np.abs(distances).max(initial=0.0))
    if most == 0 or TINY < most < HUGE:
        return
    raise ValueError(f"{what} have squares within float64, got up to {most:.3g}: rescale them; reg goes with {unit}")


class Plan(NamedTuple):
    """What a step needs of a plan P; everything but the logarithms is linear in it."""

    r: F64  # marginals
    s: F64
    rows: F64  # sum_k X_ik^2 r_k
    cols: F64
    cross: Any  # P, folded by both spaces
    moved: Any  # X P Y, as `Space.times` leaves it
    features: float  # <P, F>
    logs: tuple[float, float, float]  # <r, log(r / a)>, <s, log(s / b)>, <P, log(P / a b^T)>
    apart: tuple[float, float, float]  # KL(r | a), KL(s | b), KL(P | a b^T)
    over: tuple[float, float, float]  # mass of P less the masses of a, b and a b^T, with more digits than `mass` has

    @property
    def mass(self) -> float:
        return float(self.r.sum())

    @property
    def structure(self) -> float:
        """Return sum (X_ik - Y_jl)^2 P_ij P_kl."""
        return float(self.r @ self.rows + self.s @ self.cols) - 2 * float((self.cross * self.moved).sum())

    def mixed(self, others: list[Plan], shares: F64) -> Plan:
        """Return this plan with shares of others in its place, by what a step needs of each: linear, KL too."""
        found: dict[str, Any] = {}
        for name in self._fields:
            own, *theirs = (np.asarray(getattr(plan, name)) for plan in (self, *others))
            found[name] = own - sum(share * (own - one) for one, share in zip(theirs, shares, strict=True))
        found |= {name: tuple(found[name].tolist()) for name in self._fields[-3:]}
        return self._replace(**found | {"features": float(found["features"])})

    def scaled(self, log: float) -> Plan:
        """Return the plan times f = exp(log).

        KL(f p | q) = f KL(p | q) + (f - 1) (|p| - |q|) + |p| (f log f - f + 1).
        """
        f, more, mass = math.exp(log), math.expm1(log), self.mass
        found: dict[str, Any] = {name: f * getattr(self, name) for name in self._fields[:-3]}
        found["logs"] = tuple(f * (z + mass * log) for z in self.logs)
        known = zip(self.apart, self.over, strict=True)
        found["apart"] = tuple(max(0.0, f * kl + more * over + mass * (f * log - more)) for kl, over in known)
        found["over"] = tuple(over + mass * more for over in self.over)
        return self._replace(**found)


class Factors:
    """A plan as a product of matrices, which tells what a `Result` tells."""

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

    def __init__(self, X: Space, Y: Space, a: F64, b: F64, reg: float, rho: Any, features: Any, alpha: float) -> None:
        self.X, self.Y, self.a, self.b, self.reg, self.rho, self.alpha = X, Y, a, b, reg, rho, alpha
        self.hard = math.inf in rho
        self.F = None if isinstance(features, tuple) else features
        f, g = features if isinstance(features, tuple) else (np.empty((X.count, 0)), np.empty((Y.count, 0)))
        self.f, self.g = (f - f.mean(0), g - f.mean(0)) if f.size else (f, g)
        sizes = float(a.sum()), float(b.sum())
        whole = sizes[0] * sizes[1]
        if not 0 < whole * whole < math.inf:  # KL is of products of measures
            raise ValueError(f"a and b must have masses whose product has a square within float64, got {sizes}")
        self.prices = [*zip((*rho, reg), (*sizes, whole), strict=True)]

    def part(self, rows: tuple[Any, F64], cols: tuple[Any, F64]) -> Task:
        """Return the problem of some points of both spaces, which have these masses."""
        (i, a), (j, b) = rows, cols
        features = self.F[i][:, j] if self.F is not None else (self.f[i], self.g[j]) if self.f.size else None
        return Task(self.X.part(i), self.Y.part(j), a, b, self.reg, self.rho, features, self.alpha)

    def known(self, r: F64, s: F64, cross: Any, features: float, *told: Any) -> Plan:
        moved = self.Y.times(self.X.times(cross).T).T
        return Plan(r, s, self.X.square_means(r), self.Y.square_means(s), cross, moved, features, *told)

    def plan(self, P: Any, r: F64, s: F64, told: Any) -> Plan:
        """Return what a step needs of a `Factors` or a `Result`, by one product with it.

        ``told``: (log, KL, difference of the masses) of both marginals and of the plan, as `told_by` returns them.
        """
        X, Y, f, g = self.X, self.Y, self.f, self.g
        whole = P.plan if self.F is not None or (X.phi is None and Y.phi is None) else None
        if Y.phi is not None:
            Z = P.apply(np.hstack([g, Y.phi]))
            cross, shared = Z[:, g.shape[1] :], Z[:, : g.shape[1]]
            cross = cross if X.phi is None else X.phi.T @ cross
        elif X.phi is not None:
            Z = P.apply_transpose(np.hstack([X.phi, f]))
            cross, shared = Z[:, : X.phi.shape[1]].T, P.apply(g) if g.size else f
        else:
            cross, shared = np.asarray(whole, np.float64), P.apply(g) if g.size else f
        features = float(r @ (f**2).sum(1) + s @ (g**2).sum(1) - 2 * (f * shared).sum())
        features += float((whole * self.F).sum()) if self.F is not None else 0.0
        return self.known(r, s, cross, features, *zip(*told, strict=True))

    @property
    def usual_mass(self) -> float:
        """Return the mass of a hard side, or the geometric mean of both."""
        (low, A), (high, B), (_, whole) = self.prices
        return A if low == math.inf else B if high == math.inf else math.sqrt(whole)

    def independent(self) -> Plan:
        """Return the plan a b^T times a number, with the usual mass."""
        mass = self.usual_mass
        (_, A), (_, B), (_, whole) = self.prices
        r, s = self.a * (mass / A), self.b * (mass / B)
        told = [told_by(np.array([mass]), np.array([size])) for size in (A, B, whole)]
        return self.plan(Factors(r[:, None], self.b[None] / B), r, s, told)

    def usual_cost(self) -> Any:
        """Return the cost of the step from a b^T of mass 1, but for k."""
        plan = self.independent()
        posed = self.cost(plan.scaled(-math.log(plan.mass))._replace(logs=(0.0, 0.0, 0.0))).posed()
        return Dense(posed) if isinstance(posed, np.ndarray) else cost_of(posed)

    def check_mass(self, mass: float) -> None:
        if mass > 0 and math.isfinite(mass):
            return
        median = f"{scale_of([self.usual_cost()], 'median'):.3g}"
        raise ValueError(
            f"reg and reg_m must leave a plan with mass, got {shown(self.reg)} and {shown(self.rho)}, where the median "
            f"cost of a step is {median}: give reg_m of this size, or scale_cost='median' to give both in units of it"
        )

    def given(self, P: Any) -> Plan:
        """Return what a step needs of a plan, (m, n)."""
        P = P.plan if isinstance(P, Result) else P
        shape = self.X.count, self.Y.count
        wanted = f"a plan {shape} of finite numbers >= 0, not all 0"
        P = validate.as_numbers(P.toarray() if is_sparse(P) else P, "init", wanted, shape, least=0.0)
        P, c = np.asarray(P, np.float64), np.outer(self.a, self.b)
        if (P[c == 0] > 0).any() or not P.any():
            raise ValueError(f"init must be {wanted}, and have no mass where a or b has none")
        r, s = P.sum(1), P.sum(0)
        pairs = (r, self.a), (s, self.b), (P.ravel(), c.ravel())
        plan = self.plan(Factors(P), r, s, [told_by(*pair) for pair in pairs])
        return self.fitted(plan)

    def answer(self, result: Result) -> Plan:
        """Return what a step needs of an answer; <P, log(P / a b^T)> is that of its potentials and its cost."""
        cost, *sums = result._sums  # of the plan itself: marginals of the last pass may lag behind it
        r, s = (np.asarray(z, np.float64) for z in sums)
        logs = [np.where(w > 0, z, 0.0) for w, z in ((r, result.log_u), (s, result.log_v))]
        entropy = float(r @ logs[0] + s @ logs[1]) - cost / result.problem.reg
        problem, more = result.problem, float(r.sum()) - self.prices[2][1]
        rows = told_by(r, self.a, result.f, problem.rows.scalar_rho, problem.reg)
        cols = told_by(s, self.b, result.g, problem.cols.scalar_rho, problem.reg)
        return self.plan(result, r, s, [rows, cols, (entropy, entropy - more, more)])

    def fitted(self, plan: Plan) -> Plan:
        """Return the plan with the mass of hard sides, or, where rho is so large that k hides all costs, with k = 0."""
        if self.hard:
            return plan.scaled(math.log(self.usual_mass / plan.mass))
        if max(self.rho) <= FIRM * self.reg:
            return plan
        shares = [price / max(self.rho) for price, _ in self.prices]
        return plan.scaled(-float(np.dot(shares, plan.logs)) / (plan.mass * sum(shares)))

    def lifted(self, plan: Plan, rows: Any, cols: Any) -> Plan:
        """Return what a step needs of a plan between these points, of which no other has any mass."""
        r, s = np.zeros(self.X.count), np.zeros(self.Y.count)
        r[rows], s[cols] = plan.r, plan.s
        in_rows, in_cols = self.X.phi is None, self.Y.phi is None  # beside a matrix: among all of its points
        shape = len(r) if in_rows else plan.cross.shape[0], len(s) if in_cols else plan.cross.shape[1]
        cross = np.zeros(shape)
        cross[np.ix_(rows if in_rows else range(shape[0]), cols if in_cols else range(shape[1]))] = plan.cross
        return self.known(r, s, cross, plan.features, *plan[-3:])

    @property
    def depth(self) -> int:
        """Steps that an extrapolation looks back at; a plan beside a matrix has as many numbers as this."""
        return 5 if self.X.phi is not None and self.Y.phi is not None else 2

    @functools.cached_property
    def sizes(self) -> tuple[Any, Any]:
        """Sizes of the rows and of the columns of a folded plan; beside a matrix all count alike."""
        rows, cols = (np.ones(1) if z.phi is None else np.sqrt((z.phi**2).mean(0)) for z in (self.X, self.Y))
        rows, cols = (np.where(z > 0, z, 1.0) for z in (rows, cols))  # of a coordinate that all points share: 0
        return rows[:, None], cols

    def vector(self, plan: Plan) -> F64:
        rows, cols = self.sizes
        return np.asarray(plan.cross / rows / cols).ravel()

    def cost(self, plan: Plan) -> StepCost:
        X, Y, alpha, G = self.X, self.Y, self.alpha, plan.moved
        r, c, M = alpha * plan.rows + self.constant(plan), alpha * plan.cols, self.F
        M = None if M is None else 0.5 * (1 - alpha) * M
        if X.phi is None and Y.phi is None:
            M = -2 * alpha * G if M is None else M - 2 * alpha * G
            left, right = np.empty((X.count, 0)), np.empty((Y.count, 0))
        elif Y.phi is None or (X.phi is not None and X.phi.shape[1] <= Y.phi.shape[1]):
            left, right = X.phi, G.T if Y.phi is None else Y.phi @ G.T
        else:
            left, right = G if X.phi is None else X.phi @ G, Y.phi
        half, f, g = 0.5 * (1 - alpha), self.f, self.g
        left, right = np.hstack([2 * alpha * left, 2 * half * f]), np.hstack([right, g])
        return StepCost(r + half * (f**2).sum(1), c + half * (g**2).sum(1), left, right, M)

    def constant(self, plan: Plan) -> float:
        """Return k of a plan, 0 where a hard side fixes the mass."""
        return 0.0 if self.hard else sum(rho * z for (rho, _), z in zip(self.prices, plan.logs, strict=True))

    def divergences(self, plan: Plan) -> list[tuple[float, float, float]]:
        """Return (price, KL, difference of the masses) of both marginals and of the plan; a hard side has price 0."""
        known = zip(self.prices, plan.apart, plan.over, strict=True)
        return [(0.0 if rho == math.inf else rho, kl, over) for (rho, _), kl, over in known]

    def log_ratio(self, one: Plan, other: Plan) -> float:
        """Return log(|one| / |other|): near the masses of a and b by `over`, as prices may be 1e16 times reg."""
        sizes = [whole for _, whole in self.prices[:2]]
        logs = [[over / whole for over, whole in zip(plan.over[:2], sizes, strict=True)] for plan in (one, other)]
        if min(map(min, logs)) < -0.5:
            return math.log(one.mass / other.mass)
        most = max(self.rho)
        weights = [rho / most * whole for rho, whole in self.prices[:2]]
        return float(np.average(np.log1p(logs[0]) - np.log1p(logs[1]), weights=weights))

    def parts(self, plan: Plan) -> Terms:
        """Return the terms of the objective at a plan: KL(p x p | q x q) = 2 |p| KL(p | q) + (|p| - |q|)^2."""
        paid = (rho * (2 * plan.mass * z + apart**2) for rho, z, apart in self.divergences(plan))
        return Terms(self.alpha * plan.structure, (1 - self.alpha) * plan.features, *paid)

    def distance(self, plan: Plan, cost: StepCost, result: Result, mass: float) -> float:
        """Bound |Q - P|_1 for the plan Q that has led to a step and the exact answer P of the step.

        The potentials (f, g) of the result have the plan P' = a b^T exp((f + g - C) / reg) of this mass, and

            reg KL(Q | P') = <Q, C - f - g> + reg <Q, log(Q / a b^T)> + reg (|P'| - |Q|).

        Pinsker's inequality, for measures of any mass, bounds |Q - P'|; the certificate of the result bounds |P' - P|.
        """
        whole, reg = plan.mass, result.problem.reg
        terms = [self.alpha * plan.structure, 0.5 * (1 - self.alpha) * plan.features, whole * self.constant(plan)]
        terms += [-float(w[w > 0] @ f[w > 0]) for w, f in zip((plan.r, plan.s), result.potentials, strict=True)]
        terms += [reg * plan.logs[2], reg * (mass - whole)]
        size = float(np.abs(cost.r) @ plan.r + np.abs(cost.c) @ plan.s) + sum(map(abs, terms))
        apart = (max(0.0, sum(terms)) + ROUNDING * size) / reg
        return math.sqrt((2 * whole + 4 * mass) / 3 * apart) + result.error_bound * mass


def told_by(p: F64, w: F64, f: Any = None, rho: Any = 0.0, reg: float = 1.0) -> tuple[float, float, float]:
    """Return <p, log(p / w)>, KL(p | w) and |p| - |w| of a marginal p, which is 0 wherever w is.

    An optimal one is w exp(-f / rho), which tells all three where rho would make much of the rounding of p.
    """
    used = w > 0
    p, w = p[used], w[used]
    firm = FIRM * reg < rho < math.inf
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = -f[used] / rho if firm else np.where(p > 0, np.log(p) - np.log(w), 0.0)
        if firm and np.isfinite(total := float(w @ np.expm1(logs))):
            p, over = w * np.exp(logs), total
        else:
            over = float((p - w).sum())
        return float(p @ logs), float(kl_divergence(p, w).sum()), over


class StepCost(NamedTuple):
    """The cost of a step: r_i + c_j - <left_i, right_j> + M_ij."""

    r: F64
    c: F64
    left: F64
    right: F64
    M: Any

    def posed(self) -> Any:
        """Return M for `solve`: points, or an array where a part of it is one."""
        if self.M is not None:
            return self.r[:, None] + self.c + self.M - self.left @ self.right.T
        size = [np.sqrt((z**2).mean(0)) for z in (self.left, self.right)]
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.sqrt(size[1] / size[0])
        factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
        return PointCloud(self.left * factor, self.right / factor, "inner", addends=(self.r, self.c))


def gromov(
    X: Any, Y: Any, a: Any = None, b: Any = None, *, reg: float, reg_m: Any, scale_cost: str | None = None,
    metric: Any = "sqeuclidean", features: Any = None, alpha: float = 0.5, init: Any = "auto", max_iter: int = 100,
    tol: float = 1e-4, inner_tol: float = 1e-6, **options: Any,
) -> GromovResult:  # fmt: skip
    """Solve entropic Gromov-Wasserstein between two spaces, unbalanced, semi-relaxed or balanced, fused with features.

    The objective of a plan P, with X and Y the distances within the spaces and KL of products of measures, is

    ``alpha sum (X_ik - Y_jl)^2 P_ij P_kl + (1 - alpha) <F, P> + reg KL(P x P | ab x ab)
    + reg_m[0] KL(P1 x P1 | a x a) + reg_m[1] KL(P^T 1 x P^T 1 | b x b)``.

    It is not convex. Steps go down to a plan that answers its own step; several starts are tried, and the best kept.

    Parameters
    ----------
    X, Y : (m, d), (n, e) arrays, or (m, m), (n, n) arrays or matrices of scipy.sparse
        Points, whose distances are squared Euclidean ones and are never formed; for ``metric="precomputed"`` distances,
        symmetric but for the rounding of their dtype, where entries that a sparse matrix does not store are 0.
    a, b, reg_m
        As in `solve`; reg_m in units of reg, one number a side.
    reg : float
        Entropic regularisation, > 0, in units of squared distances (of points: of the fourth power of a length). Half
        of ``epsilon`` of POT's balanced functions, and all of that of its unbalanced one.
    scale_cost : {"median", "mean", "max"}, optional
        Take reg and reg_m in units of this cost of the step from a b^T, ``sum (X_ik - Y_jl)^2 a_k b_l / (|a| |b|)`` and
        half of the features', which ``result.scale_cost`` tells.
    metric : {"sqeuclidean", "precomputed"} or a pair of them
    features : pair of (m, k) and (n, k) arrays, or (m, n) array, optional
        What both spaces share: points, whose costs F are squared distances, or F itself.
    alpha : float
        Share of the structures, in (0, 1], beside the features; 1 where there are none.
    init : {"auto", "independent", "axes", "coarse"}, (m, n) plan, Result, or a list of them
        Where to start: from a b^T, from points laid on each other by the principal axes of both clouds, the best
        of up to 8 directions of these after 5 steps, from the best answer between 500 points of each space, drawn by
        their masses, or from a plan. "auto" of points tries the first two up to 1000 points and takes "coarse" beyond;
        else it takes the first.
    max_iter, tol : int, float
        Steps at most; stop when the plan changes by at most this share of its mass, see ``steps`` of the answer.
    inner_tol, **options
        ``tol`` of `solve` for the last steps, while those before follow the change of the plan; its ``threads``,
        ``backend``, ``precision`` and ``max_passes``.

    Returns
    -------
    GromovResult
        A `Result` of the last step's problem, with the value of the objective and the steps.

    Warns
    -----
    ConvergenceWarning
        ``max_iter`` steps did not settle the plan, or the last step's problem ended above its tolerance.

    References
    ----------
    Sejourne, Vialard, Peyre: The unbalanced Gromov Wasserstein distance, 2021. Thual et al.: Aligning individual brains
    with fused unbalanced Gromov Wasserstein, 2022.

    See Also
    --------
    solve : One step's problem.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(60, 3)) * [3.0, 2.0, 1.0]
    >>> turn, order = np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.permutation(60)
    >>> result = mapuot.gromov(x, (x @ turn)[order], reg=0.5, reg_m=np.inf)
    >>> result.settled, bool((order[result.top_k(1)[0][:, 0]] == np.arange(60)).mean() > 0.95)
    (True, True)
    """
    kinds = metric if isinstance(metric, tuple) else (metric, metric)
    if len(kinds) != 2:
        raise ValueError(f"metric must be one of {[*KINDS]} or a pair of them, got {shown(metric)}")
    both = zip((X, Y), (validate.as_choice(kind, "metric", KINDS) for kind in kinds), "XY", strict=True)
    spaces = [Space(*each) for each in both]
    given = options.keys() - set(OPTIONS)
    if given:
        raise TypeError(f"options must be of {OPTIONS}, got {sorted(given)}")
    reg, tol, max_iter = as_positive(reg, "reg"), as_positive(tol, "tol"), validate.as_count(max_iter, "max_iter")
    low, high = (validate.as_rho(x, f"reg_m[{k}]") for k, x in enumerate(validate.as_pair(reg_m, "reg_m")))
    a, b = (validate.as_weight(w, z.count, name, pick("cpu")) for w, z, name in zip((a, b), spaces, "ab", strict=True))
    features = as_features(features, spaces[0].count, spaces[1].count)
    alpha = 1.0 if features is None else validate.as_float(alpha, "alpha")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    task = Task(spaces[0], spaces[1], a, b, reg, (low, high), features, alpha)
    scale = 1.0
    if scale_cost is not None:
        scale = scale_of([task.usual_cost()], scale_cost)
        task = Task(spaces[0], spaces[1], a, b, scale * reg, (scale * low, scale * high), features, alpha)
    inner_tol = as_positive(inner_tol, "inner_tol")
    found = []
    for plan, some in starts(task, init, options):
        found.append(descend(task, plan, max_iter, tol, inner_tol, options, some is None))
        found[-1].coarse = some
    best = best_of(found)
    best.scale_cost = scale
    if not best.converged:
        warn_not_converged("gromov, the last step: " + not_converged(best, inner_tol, words=Words(tol="inner_tol")))
    if not best.settled:
        change = best.steps[-1].change
        warn_not_converged(f"gromov: the plan still changes by {change:.1e} after {max_iter} steps (tol {tol:.1e})")
    return best


def descend(
    task: Task, plan: Plan, max_iter: int, tol: float, inner_tol: float, options: dict[str, Any], known: bool = True
) -> GromovResult:
    """Take steps from a plan until it changes no more; not ``known``: it is lifted, and none between all points."""
    steps: list[Step] = []
    trail: list[tuple[Plan, Plan]] = []  # the last steps: from which plan to which
    start: Any = None
    left: Plan | None = None  # the plan that an extrapolated one was made of
    close, parts, least, rest, settled = LOOSE, Terms(*[math.nan] * 5), math.inf, 0, False
    while len(steps) < max_iter and not settled:
        weight, cost = plan.mass, task.cost(plan)
        reg, reg_m = task.reg * weight, tuple(rho * weight for rho in task.rho)
        start = start and (start[0] / reg, start[1] / reg)
        with muted():  # each step has its certificate, and only the last one counts
            result = solve(cost.posed(), task.a, task.b, reg=reg, reg_m=reg_m, tol=close, warm_start=start, **options)
        task.check_mass(result.mass)
        start = result.potentials  # in units of costs, as reg follows the mass
        begun, plan = plan, task.answer(result)
        moved = task.distance(begun, cost, result, plan.mass) if known and left is None else math.inf
        change, parts, known = moved / plan.mass, task.parts(plan), True
        steps.append(Step(change, sum(parts), plan.mass, result.error_bound, result.n_passes))
        settled = change <= tol and close <= inner_tol
        close = inner_tol if change <= tol else max(inner_tol, min(close, SHARE * change))
        plan = plan if task.hard else plan.scaled(0.5 * task.log_ratio(begun, plan))
        trail, last = [*trail[-task.depth :], (begun, plan)], plan
        if left is not None and not sum(parts) <= least:  # it led nowhere: back to where it left
            plan, trail, rest = left, [], REST
        plain, left, least, rest = left is None, None, sum(parts), rest - 1
        if plain and rest < 0 and not settled and (far := ahead(task, trail, change)) is not None:
            left, plan = plan, far
    potentials, marginals = (result.log_u, result.log_v), (result.row_marginal, result.col_marginal)
    own = result.problem, result._backend, potentials, marginals, result.trace, result.status, result._threads
    found = GromovResult(*own, result.how, result.skipped)  # made whole of one that makes members when asked for them
    vars(found).update(vars(result) | vars(found))
    found.value, found.parts, found.steps, found.settled, found.values = sum(parts), parts, steps, settled, []
    found._task, found._plan = task, last
    return found


def ahead(task: Task, trail: list[tuple[Plan, Plan]], change: float) -> Plan | None:
    """Return where steps lead, by Anderson's extrapolation of what a step needs; None where that is not far.

    The last step changed the plan by ``change`` of its mass; AHEAD of the mass is moved at most.
    """
    left = [task.vector(after) - task.vector(before) for before, after in trail]
    if len(left) < 3:
        return None
    moves = np.stack([left[-1] - one for one in left[:-1]], 1)
    share: Any = np.linalg.lstsq(moves, left[-1], rcond=1e-2)[0]
    plans = [after for _, after in trail]
    found = plans[-1].mixed(plans[:-1], share)
    far = float(np.linalg.norm(task.vector(found) - task.vector(plans[-1])) / np.linalg.norm(left[-1]))
    if not far > 0:
        return None
    found = plans[-1].mixed(plans[:-1], share * min(1.0, AHEAD / change / far))
    return found if far >= FAR and found.mass > AHEAD * plans[-1].mass else None


def best_of(found: list[GromovResult]) -> GromovResult:
    """Return the answer with the least objective, which is told all of them."""
    best = min(found, key=lambda one: one.value if math.isfinite(one.value) else math.inf)
    best.values = [one.value for one in found]
    return best


def starts(task: Task, init: Any, options: dict[str, Any]) -> list[tuple[Plan, GromovResult | None]]:
    """Return the plans to start from, with the answer between some of the points where a plan is lifted from there."""
    points, many = task.X.phi is not None and task.Y.phi is not None, max(task.X.count, task.Y.count) > 2 * SOME
    if isinstance(init, str) and validate.as_choice(init, "init", ("auto", *STARTS)) == "auto":
        init = ["independent"] if not points else ["coarse"] if many else ["independent", "axes"]
    found: list[tuple[Plan, GromovResult | None]] = []
    for one in init if isinstance(init, list) else [init]:
        if not isinstance(one, str):
            found.append((task.given(one), None))
        elif validate.as_choice(one, "init", STARTS) == "independent":
            found.append((task.independent(), None))
        elif one == "coarse":
            (rows, a), (cols, b) = drawn(task.a), drawn(task.b)  # the best plan between some of the points, lifted
            part = task.part((rows, a), (cols, b))
            best = best_of([descend(part, plan, *COARSE, options) for plan, _ in starts(part, "auto", options)])
            found.append((task.lifted(best._plan, rows, cols), best))
        elif points:
            found += [(plan, None) for plan in by_axes(task, options)]
        else:
            raise ValueError("init must not be 'axes' where a metric is 'precomputed': there are no axes")
    if not found:
        if init == []:
            raise ValueError("init must name a start, got []")
        task.check_mass(0.0)
    return found


def drawn(mass: F64) -> tuple[Any, F64]:
    """Draw SOME points by their masses, the same in every call, and return their numbers and masses."""
    order = np.random.default_rng(0).permutation(len(mass))
    ends, total = np.cumsum(mass[order]), float(mass.sum())
    if len(mass) <= SOME:
        return np.flatnonzero(mass), mass[mass > 0]
    at = np.searchsorted(ends, (np.arange(SOME) + 0.5) / SOME * ends[-1])
    chosen, count = np.unique(order[at], return_counts=True)
    return chosen, np.asarray(count * (total / SOME), np.float64)


def by_axes(task: Task, options: dict[str, Any]) -> list[Plan]:
    """Return the best plan after a few steps from points on the principal axes of both clouds, in several directions.

    Before these steps the objectives tell little: outliers turn the axes.
    """
    clouds = []
    for space, w in ((task.X, task.a), (task.Y, task.b)):
        x = space.phi[:, 2:]
        x = x - w @ x / w.sum()
        axes = np.linalg.svd(x * np.sqrt(w)[:, None], full_matrices=False)[2]
        z = x @ axes.T
        third = np.sign(w @ z**3)
        clouds.append(z * np.where(third == 0, 1.0, third))
    k = min(z.shape[1] for z in clouds)
    x, y = (z[:, :k] for z in clouds)
    scale = float(task.a @ (x**2).sum(1) / task.a.sum()) or 1.0  # all mass lies in one point
    rho = tuple(np.inf if p == math.inf else scale for p in task.rho)
    found = []
    for flips in range(min(SIGNS, 2**k)):
        signs = np.where((flips >> np.arange(k)) & 1, -1.0, 1.0)
        with muted():
            result = solve(PointCloud(x * signs, y), task.a, task.b, reg=0.05 * scale, reg_m=rho, tol=LOOSE, **options)
        if result.mass > 0:
            found.append(descend(task, task.fitted(task.answer(result)), *FIRST, options))
    return [best_of(found)._plan] if found else []


def as_features(value: Any, m: int, n: int) -> Any:
    """Check what both spaces share: a pair of points with equally many columns, or a matrix of costs."""
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
