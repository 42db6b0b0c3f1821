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
from .answer import GromovResult, best_of
from .settings import SPACES
from .steps import FirstPlan, Limits, descend
from .task import Task

# Most coordinates of G: a bound of 1 % takes some hundred solves. In 3-D, with 9, the search from 512 simplices around
# 0 was 16 % below the value of 50 points after 107 CPU s, 2,086 solves and 156,237 simplices (AMD EPYC).
MOST_COORDINATES = 4
GAP = 0.05  # of the distance that is asked for between bound and value: left between a corner's dual and its optimum
LEAST_TOL, MOST_TOL = 1e-6, 0.03  # tol of a corner's solve; 0.01 and 0.1 took more CPU time (500 points, reg .05)
CLOSE_TOL = 1e-3  # tol of a solve whose plan may be a better start: a rougher plan misses the masses, and costs less
GAIN = 0.5  # of the distance that is asked for: descents from plans that are better by less would not end the search
TOGETHER = 1 << 23  # entries of the costs of the corners that are solved in one batch
MOST_TOGETHER = 16  # corners of a batch: of more, some would not be needed
TERM_ROUNDING = 1e-12  # relative, of the terms of a bound
LEAST_WEIGHT = 1e-3  # of an edge: edges far from the least point become shorter, too
LEAST_BEND = 1e-6  # of V along an edge, over the square of its length
MOST_MOVES, PRECISE = 200, 1e-6  # in the search for the least point of a simplex; its relative error

Place = tuple[int, ...]  # integer coordinates of a corner
Simplex = tuple[Place, ...]
Edge = tuple[Place, Place]


class Corner(NamedTuple):
    """A matrix G, flat, and the solution of its problem."""

    G: F64
    least: float  # certified lower bound of V(G)
    slope: F64  # of V at G
    reached: float  # the objective of the plan, less the constant k
    logs: tuple[F64, F64]


class GlobalBound:
    """Branch and bound for a balanced `Task` between points; ``limits``: of descents; ``options``: of `solve`.

    ``found`` has the answers of the descents from corners' plans.
    """

    def __init__(self, task: Task, limits: Limits, options: dict[str, Any]) -> None:
        self.task = task
        self.limits = limits
        self.options = options
        self.found: list[GromovResult] = []
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
        self.tried: set[Place] = set()  # corners that a descent may have started from
        self.tol = MOST_TOL

    def run(self, value: float, rtol: float) -> float:
        """Return a lower bound of the objective; ``found`` then has the answers from better plans than ``value``.

        The bound is at most rtol below the least value if SPACES.most_corners are enough.
        """
        self.tol = self.tol_for(rtol * abs(value))
        order = itertools.count()
        heap: list[tuple[float, int, Simplex, Edge]] = []
        parts = first_simplices(len(self.reach))
        self.solve([*dict.fromkeys(at for part in parts for at in part)])
        while True:
            for part, bound, edge in zip(parts, *self.bounds(parts), strict=True):
                heapq.heappush(heap, (bound, next(order), part, edge))
            better = self.better_corner(value - GAIN * rtol * abs(value))
            if better is not None:
                value = min(value, self.descend_from(better))
            parts = []
            if len(self.corners) < SPACES.most_corners:
                parts, new = self.halve_some(heap, value - rtol * abs(value))
            if not parts:
                best = None if self.found else self.better_corner(math.inf)
                if best is not None:
                    self.descend_from(best)
                return heap[0][0]
            self.solve(new)

    def halve_some(self, heap: list[Any], enough: float) -> tuple[list[Simplex], list[Place]]:
        """Take simplices with the least bounds below ``enough``; return their halves, and the new corners.

        Return nothing if the bound suffices, or rests on a simplex whose edge has no middle among the places.
        """
        parts: list[Simplex] = []
        new: dict[Place, None] = {}  # a set in order
        while heap and heap[0][0] < enough and len(new) < min(self.count_together, MOST_TOGETHER):
            _, _, simplex, edge = heap[0]
            middle = middle_of(edge)
            if middle is None:
                break
            heapq.heappop(heap)
            if middle not in self.corners:
                new[middle] = None
            parts += [tuple(middle if at == end else at for at in simplex) for end in edge]
        return parts, list(new)

    def tol_for(self, slack: float) -> float:
        """Return the tol of a solve: from a plan with the relative error tol, the gap is near reg mass tol^2."""
        return min(MOST_TOL, max(LEAST_TOL, math.sqrt(GAP * slack / (self.reg * self.mass))))

    def better_corner(self, value: float) -> Corner | None:
        """Return a corner whose plan has an objective below ``value``, or None. No corner is returned twice.

        Corners are solved again, more closely, until one is: their rough plans miss the masses.
        """
        while left := [at for at in self.corners if at not in self.tried]:
            at = min(left, key=lambda at: self.corners[at].reached)
            if not self.constant + self.corners[at].reached < value:
                return None
            self.tried.add(at)
            self.solve_some([at], min(self.tol, CLOSE_TOL))
            if self.constant + self.corners[at].reached < value:
                return self.corners[at]
        return None

    def descend_from(self, corner: Corner) -> float:
        """Take steps from the corner's plan, and return the value that they end at."""
        (solved,) = self.answers(corner.G[None], [corner.logs], CLOSE_TOL)
        plan = self.task.fitted(self.task.answer(solved))
        self.found.append(descend(self.task, FirstPlan(plan), self.limits, self.options))
        return self.found[-1].value

    @property
    def count_together(self) -> int:
        """Number of corners that are solved in one batch."""
        if self.base is None:
            return 1
        size: int = self.base.size
        return max(1, TOGETHER // size)

    @property
    def reg(self) -> float:
        return 2 * self.mass * self.task.reg

    def answers(self, G: F64, starts: list[Any], tol: float) -> list[Result]:
        """Solve the problems with the costs C(G) for a stack of matrices, each flat, from (log u, log v) of each."""
        task = self.task
        options = {"reg": self.reg, "reg_m": math.inf, "tol": tol, **self.options}
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
        return self.reach * (2.0 * np.asarray(at, np.float64) / SPACES.box_units - 1.0)

    def solve(self, new: list[Place]) -> None:
        """Solve the problems of new corners, each from the answer of the nearest corner that is known."""
        step = self.count_together
        for k in range(0, len(new), step):
            self.solve_some(new[k : k + step], self.tol)

    def solve_some(self, new: list[Place], tol: float) -> None:
        alpha = self.task.alpha
        G = np.array([self.matrix_at(at) for at in new])
        starts = []
        if self.corners:
            solved = list(self.corners.values())
            apart = ((G[:, None] - np.array([corner.G for corner in solved])) ** 2).sum(-1)
            starts = [solved[k].logs for k in apart.argmin(1)]
        for at, own, found in zip(new, G, self.answers(G, starts, tol), strict=True):
            moments = (self.x.T @ found.apply(self.y)).ravel()
            reached = found.objective + 16 * alpha * float(own @ moments) - 8 * alpha * float(moments @ moments)
            size = abs(found.dual) + self.largest_cost(own) * self.mass
            least = found.dual - TERM_ROUNDING * size
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

    def bounds(self, simplices: list[Simplex]) -> tuple[list[float], list[Edge]]:
        """Return a lower bound of F within each simplex, and the edge to halve."""
        corners = [[self.corners[at] for at in simplex] for simplex in simplices]
        G = np.array([[corner.G for corner in own] for own in corners])
        V = np.array([[corner.least for corner in own] for own in corners])
        slopes = np.array([[corner.slope for corner in own] for own in corners])
        bounds, shares = least_within(G, V, 8 * self.task.alpha)
        bounds += self.constant
        bounds -= TERM_ROUNDING * (abs(self.constant) + np.abs(bounds))
        apart = G[:, None] - G[:, :, None]
        bends = ((slopes[:, :, None] - slopes[:, None]) * apart).sum(-1)  # 8 V(middle) - 4 (V_i + V_j) if quadratic
        bends = np.maximum(bends, LEAST_BEND * (apart**2).sum(-1))
        weights = (shares[:, :, None] * shares[:, None] + LEAST_WEIGHT) * bends
        edges = []
        for simplex, own in zip(simplices, weights, strict=True):
            i, j = divmod(int(np.argmax(own)), len(own))
            if i == j:  # all corners have the same G
                i, j = 0, -1
            edges.append((simplex[i], simplex[j]))
        return bounds.tolist(), edges


def first_simplices(d: int) -> list[Simplex]:
    """Return d! simplices that cover the box of all G: paths along its edges from one end to the other (Kuhn)."""
    found = []
    for axes in itertools.permutations(range(d)):
        path = [(0,) * d]
        for axis in axes:
            path.append((*path[-1][:axis], SPACES.box_units, *path[-1][axis + 1 :]))
        found.append(tuple(path))
    return found


def middle_of(edge: Edge) -> Place | None:
    """Return the middle of an edge, or None if no place is there: halves by another place would leave a gap."""
    sums = [i + j for i, j in zip(*edge, strict=True)]
    if any(z % 2 for z in sums):
        return None
    return tuple(z // 2 for z in sums)


def least_within(G: F64, V: F64, curve: float) -> tuple[F64, F64]:
    """Bound curve |x|^2 + sum_k p_k V_k from below, for points x = sum_k p_k G_k with shares p; return shares, too.

    ``G`` (count, corners, d) and ``V`` (count, corners) have many simplices. Pairwise Frank-Wolfe steps move the shares
    to the least point. Each step has a bound by the tangent at its point g,
    curve |x|^2 >= 2 curve <g, x> - curve |g|^2, and the best of these bounds is returned.
    """
    best = np.full(len(V), -np.inf)
    shares = np.zeros(V.shape)
    shares[np.arange(len(V)), np.argmin(V + curve * (G**2).sum(-1), 1)] = 1.0
    left = np.arange(len(V))  # simplices that are not done
    for _ in range(MOST_MOVES):
        p = shares[left]
        rows = np.arange(len(left))
        g = (p[:, :, None] * G[left]).sum(1)
        squares = curve * (g**2).sum(1)
        tangent = V[left] + 2 * curve * (G[left] @ g[:, :, None])[..., 0]
        low = np.argmin(tangent, 1)
        best[left] = np.maximum(best[left], tangent[rows, low] - squares)
        values = (p * V[left]).sum(1) + squares
        high = np.argmax(np.where(p > 0, tangent, -np.inf), 1)
        bend = 2 * curve * ((G[left, high] - G[left, low]) ** 2).sum(1)
        fall = tangent[rows, high] - tangent[rows, low]
        most = p[rows, high]
        moved = np.where(fall < bend * most, fall / np.where(bend > 0, bend, 1.0), most)
        far = values - best[left] > PRECISE * np.abs(values)
        left, moved, low, high = left[far], moved[far], low[far], high[far]
        if not len(left):
            break
        shares[left, low] += moved
        shares[left, high] -= moved
    return best, shares


def bounded(task: Task, best: GromovResult, bound_tol: float, limits: Limits, options: dict[str, Any]) -> GromovResult:
    """Return the best of an answer and the answers from better plans that the search meets, with ``lower_bound``."""
    search = GlobalBound(task, limits, options)
    bound = search.run(best.value, bound_tol)
    values = [*best.values, *(one.value for one in search.found)]
    best = best_of([best, *search.found])
    best.values = values
    best.lower_bound = bound
    if bound < best.value - bound_tol * abs(best.value):
        share = (best.value - bound) / abs(best.value)
        warn_not_converged(
            f"gromov: lower_bound is {100 * share:.2g} % below the value after {len(search.corners)} solves"
        )
    return best


def check_bound_applies(task: Task) -> None:
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
            f"bound_tol is for points whose numbers of coordinates have a product up to {MOST_COORDINATES}, got "
            f"{count}: with more the search takes hours; reduce both to 2 by their principal axes"
        )


def along_axes(x: F64, w: F64) -> F64:
    """Return the coordinates along the principal axes, from the mean by the masses w."""
    x = x - w @ x / w.sum()
    axes = np.linalg.svd(x * np.sqrt(w)[:, None], full_matrices=False)[2]
    return np.asarray(x @ axes.T)
