"""A lower bound on the global minimum of balanced Gromov-Wasserstein between points in few dimensions.

For squared distances between points x and y, centred, with the mass w on each side, the objective is min_G F(G),

    F(G) = k + 8 alpha |G|^2 + V(G),    V(G) = min_P <C(G), P> + 2 w reg KL(P | a b^T),
    C(G)_ij = -alpha (4 w |x_i|^2 |y_j|^2 + 16 x_i^T G y_j) + (1 - alpha) F_ij,

since -8 |G_P|^2 = min_G 8 |G|^2 - 16 <G, G_P> for G_P = sum_ij P_ij x_i y_j^T. V is a minimum of affine functions of G.
Hence it is concave, and within a simplex it lies above the affine function through lower bounds of V at the corners,
such as the certified dual values of `solve`. Simplices that cover all G_P are halved, the simplex with the least bound
first, until the bound is close to the value of a plan, or the solves are used up. Each half needs one more solve at
most. The edge to halve raises the bound most at its middle, if V is quadratic.

Source: branch and bound over G after Ryner, Kronqvist, Karlsson: Globally solving the Gromov-Wasserstein problem for
point clouds in low dimensional Euclidean spaces, 2023.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from ..answer.result import Result
from ..api.batch import solve_batch
from ..api.solve import solve
from ..errors import muted
from ..penalties import F64
from ..problem.clouds import PointCloud
from ..status import warn_not_converged
from .settings import SPACES
from .steps import FirstPlan, GromovResult, Limits, best_of, descend
from .task import Plan, Task

MOST_COORDINATES = 4  # of G: 4! simplices with 2^4 corners cover a box, and a bound of 1 % takes some hundred solves
MOST_SOLVES = 10_000
CORNER_TOL = 1e-2  # tol of a solve; its dual value, which counts, is closer by orders of magnitude
TOGETHER = 1 << 23  # entries of the costs of the corners that are solved in one batch
MOST_TOGETHER = 16  # corners of a batch: of more, some would not be needed
UNITS = 1 << 40  # corners are integers in units of the first box's width over this
ROUNDING = 1e-12  # of the terms of a bound


LEAST_WEIGHT = 1e-3  # of an edge: edges far from the least point become shorter, too
LEAST_BEND = 1e-6  # of V along an edge, over the square of its length
MOST_MOVES, PRECISE = 200, 1e-6  # in the search for the least point of a simplex; its relative error

Place = tuple[int, ...]  # integer coordinates of a corner
Simplex = tuple[Place, ...]


class Corner(NamedTuple):
    """A matrix G, flat, and the solution of its problem."""

    G: F64
    least: float  # certified lower bound of V(G)
    slope: F64  # of V at G
    reached: float  # the objective of the plan, less the constant k
    logs: tuple[F64, F64]


class GlobalBound:
    """Branch and bound for a balanced `Task` between points; ``options``: of `solve`."""

    def __init__(self, task: Task, options: dict[str, Any]) -> None:
        check(task)
        self.task = task
        self.options = options
        self.mass = float(task.a.sum())
        self.x = along_axes(task.X.phi[:, 2:], task.a)
        self.y = along_axes(task.Y.phi[:, 2:], task.b)
        moments = [np.sqrt(w @ z**2) for w, z in ((task.a, self.x), (task.b, self.y))]
        self.shape = len(moments[0]), len(moments[1])
        self.reach = np.outer(*moments).ravel()  # no plan has a larger G (Cauchy and Schwarz)
        squares = [(z**2).sum(1) for z in (self.x, self.y)]
        variance = task.a @ task.X.square_means(task.a) + task.b @ task.Y.square_means(task.b)
        means = float(task.a @ squares[0]) * float(task.b @ squares[1])
        self.constant = task.alpha * float(variance - 4 * means) + task.reg * (self.mass - self.mass**2) ** 2
        fixed = 4 * task.alpha * self.mass * squares[0][:, None], squares[1][:, None]
        share = 1 - task.alpha
        self.left = np.hstack([fixed[0], 2 * share * task.f])
        self.right = np.hstack([fixed[1], task.g])
        self.addends = share * (task.f**2).sum(1), share * (task.g**2).sum(1)
        self.base = None
        if task.F is not None or task.X.count * task.Y.count <= SPACES.corner_entries:
            self.base = share * task.feature_costs() - fixed[0] @ fixed[1].T
        self.corners: dict[Place, Corner] = {}

    def run(self, value: float, rtol: float) -> float:
        """Return a lower bound of the objective, at most rtol below ``value`` if MOST_SOLVES are enough."""
        order = itertools.count()
        heap: list[tuple[float, int, Simplex, Simplex]] = []
        parts = first_simplices(len(self.reach))
        while True:
            self.solve([at for part in parts for at in part])
            for part in parts:
                bound, edge = self.bound(part)
                heapq.heappush(heap, (bound, next(order), part, edge))
            reached = self.constant + self.best.reached
            value = min(value, reached + CORNER_TOL * abs(reached))  # rough plans may miss the marginals
            enough = value - rtol * abs(value)
            if heap[0][0] >= enough or len(self.corners) >= MOST_SOLVES:
                return heap[0][0]
            parts = []
            new: set[Place] = set()
            while heap and heap[0][0] < enough and len(new) < min(self.count_together, MOST_TOGETHER):
                _, _, simplex, edge = heapq.heappop(heap)
                middle = middle_of(*edge)
                if middle not in self.corners:
                    new.add(middle)
                parts += [tuple(middle if at == end else at for at in simplex) for end in edge]

    @property
    def best(self) -> Corner:
        """The corner with the plan of least objective."""
        return min(self.corners.values(), key=lambda corner: corner.reached)

    @property
    def count_together(self) -> int:
        """Number of corners that are solved in one batch."""
        if self.base is None:
            return 1
        size: int = self.base.size
        return max(1, TOGETHER // size)

    def best_plan(self) -> Plan:
        """Return the plan of the best corner."""
        (found,) = self.answers(self.best.G[None], [self.best.logs])
        return self.task.fitted(self.task.answer(found))

    @property
    def reg(self) -> float:
        return 2 * self.mass * self.task.reg

    def answers(self, G: F64, starts: list[Any]) -> list[Result]:
        """Solve the problems with the costs C(G) for a stack of matrices, each flat, from (log u, log v) of each."""
        task = self.task
        options = {"reg": self.reg, "reg_m": math.inf, "tol": CORNER_TOL, **self.options}
        turned = 16 * task.alpha * np.einsum("id,pde->pie", self.x, G.reshape(-1, *self.shape))
        with muted():
            if self.base is not None:
                M = self.base - turned @ self.y.T
                logs = None
                if starts:
                    logs = tuple(np.stack(own) for own in zip(*starts, strict=True))
                return [*solve_batch(M, task.a, task.b, warm_start=logs, **options)]
            found = []
            right = np.hstack([self.right, self.y])
            for left, start in itertools.zip_longest(turned, starts):
                cloud = PointCloud(np.hstack([self.left, left]), right, "inner", addends=self.addends)
                found.append(solve(cloud, task.a, task.b, warm_start=start, **options))
        return found

    def matrix_at(self, at: Any) -> F64:
        return self.reach * (2.0 * np.asarray(at, np.float64) / UNITS - 1.0)

    def solve(self, wanted: list[Place]) -> None:
        """Solve the problems of new corners, each from the answer of the nearest corner that is known."""
        new = [at for at in dict.fromkeys(wanted) if at not in self.corners]
        step = self.count_together
        for k in range(0, len(new), step):
            self.solve_some(new[k : k + step])

    def solve_some(self, new: list[Place]) -> None:
        alpha = self.task.alpha
        G = np.array([self.matrix_at(at) for at in new])
        starts = []
        if self.corners:
            solved = list(self.corners.values())
            apart = ((G[:, None] - np.array([corner.G for corner in solved])) ** 2).sum(-1)
            starts = [solved[k].logs for k in apart.argmin(1)]
        for at, own, found in zip(new, G, self.answers(G, starts), strict=True):
            moments = (self.x.T @ found.apply(self.y)).ravel()
            reached = found.objective + 16 * alpha * float(own @ moments) - 8 * alpha * float(moments @ moments)
            size = abs(found.dual) + self.largest_cost(own) * self.mass
            least = found.dual - ROUNDING * size
            self.corners[at] = Corner(own, least, -16 * alpha * moments, reached, found.own_logs)

    def largest_cost(self, G: F64) -> float:
        """Bound the terms that add up to an entry of C(G)."""
        terms = [*self.addends]
        turned = 16 * self.task.alpha * self.x @ G.reshape(self.shape)
        pairs = (self.left, self.right), (turned, self.y)
        largest = sum(float(np.abs(left).max(0, initial=0) @ np.abs(right).max(0, initial=0)) for left, right in pairs)
        if self.task.F is not None:
            terms.append(self.task.F)
        return largest + sum(float(np.abs(z).max()) for z in terms)

    def bound(self, simplex: Simplex) -> tuple[float, Simplex]:
        """Return a lower bound of F within a simplex, and the edge to halve."""
        corners = [self.corners[at] for at in simplex]
        G = np.array([corner.G for corner in corners])
        V = np.array([corner.least for corner in corners])
        slopes = np.array([corner.slope for corner in corners])
        bound, shares = least_within(G, V, 8 * self.task.alpha)
        bound += self.constant
        apart = G - G[:, None]
        bends = np.einsum("ijk,ijk->ij", slopes[:, None] - slopes, apart)  # 8 V(middle) - 4 (V_i + V_j) if quadratic
        bends = np.maximum(bends, LEAST_BEND * (apart**2).sum(-1))
        weights = (np.outer(shares, shares) + LEAST_WEIGHT) * bends
        i, j = divmod(int(np.argmax(weights)), len(weights))
        if i == j:  # all corners have the same G
            i, j = 0, -1
        return bound - ROUNDING * (abs(self.constant) + abs(bound)), (simplex[i], simplex[j])


def first_simplices(d: int) -> list[Simplex]:
    """Return d! simplices that cover the box of all G: paths along its edges from one end to the other (Kuhn)."""
    found = []
    for axes in itertools.permutations(range(d)):
        path = [(0,) * d]
        for axis in axes:
            path.append((*path[-1][:axis], UNITS, *path[-1][axis + 1 :]))
        found.append(tuple(path))
    return found


def middle_of(one: Place, other: Place) -> Place:
    return tuple((i + j) // 2 for i, j in zip(one, other, strict=True))


def least_within(G: F64, V: F64, curve: float) -> tuple[float, F64]:
    """Bound curve |x|^2 + sum_k p_k V_k from below, for points x = sum_k p_k G_k with shares p; return shares, too.

    Pairwise Frank-Wolfe steps move the shares to the least point. Each step has a bound by the tangent at its point g,
    curve |x|^2 >= 2 curve <g, x> - curve |g|^2, and the best of these bounds is returned.
    """
    shares = np.zeros(len(V))
    shares[int(np.argmin(V + curve * (G**2).sum(1)))] = 1.0
    best = -math.inf
    for _ in range(MOST_MOVES):
        g = shares @ G
        tangent = V + 2 * curve * G @ g
        low = int(np.argmin(tangent))
        best = max(best, float(tangent[low] - curve * g @ g))
        value = float(shares @ V + curve * g @ g)
        if value - best <= PRECISE * abs(value):
            break
        high = int(np.argmax(np.where(shares > 0, tangent, -np.inf)))
        bend = 2 * curve * float(((G[high] - G[low]) ** 2).sum())
        fall = float(tangent[high] - tangent[low])
        moved = shares[high]
        if fall < bend * moved:
            moved = fall / bend
        shares[low] += moved
        shares[high] -= moved
    return best, shares


def bounded(task: Task, best: GromovResult, bound_tol: float, limits: Limits, options: dict[str, Any]) -> GromovResult:
    """Return the better of an answer and the answer from the search's best plan, with ``lower_bound``."""
    search = GlobalBound(task, options)
    bound = search.run(best.value, bound_tol)
    other = descend(task, FirstPlan(search.best_plan()), limits, options)
    values = [*best.values, other.value]
    best = best_of([best, other])
    best.values = values
    best.lower_bound = bound
    if bound < best.value - bound_tol * abs(best.value):
        share = (best.value - bound) / abs(best.value)
        warn_not_converged(f"gromov: lower_bound is {100 * share:.2g} % below the value after {MOST_SOLVES} solves")
    return best


def check(task: Task) -> None:
    """Raise unless the bound applies to the problem."""
    if not (task.X.has_points and task.Y.has_points):
        raise NotImplementedError("bound_tol is for metric 'sqeuclidean' on both sides")
    if any(rho < math.inf for rho in task.rho) or not task.reg:
        raise NotImplementedError("bound_tol is for reg_m = inf on both sides, and a positive reg")
    if not task.is_joint:
        raise NotImplementedError("bound_tol is for reg_mode 'joint'; of balanced plans of mass 1 both modes are equal")
    count = (task.X.phi.shape[1] - 2) * (task.Y.phi.shape[1] - 2)
    if count > MOST_COORDINATES:
        raise NotImplementedError(
            "bound_tol is for points whose numbers of coordinates have a "
            f"product up to {MOST_COORDINATES}, got {count}: reduce both to 2 by their principal axes"
        )


def along_axes(x: F64, w: F64) -> F64:
    """Return the coordinates along the principal axes, from the mean by the masses w."""
    x = x - w @ x / w.sum()
    axes = np.linalg.svd(x * np.sqrt(w)[:, None], full_matrices=False)[2]
    return np.asarray(x @ axes.T)
