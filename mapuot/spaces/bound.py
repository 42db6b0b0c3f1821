"""A lower bound on the global minimum of balanced Gromov-Wasserstein between points in few dimensions.

For squared distances between points x and y, centred, with the mass w on each side, the objective is min_G F(G),

    F(G) = k + 8 alpha |G|^2 + V(G),    V(G) = min_P <C(G), P> + 2 w reg KL(P | a b^T),
    C(G)_ij = -alpha (4 w |x_i|^2 |y_j|^2 + 16 x_i^T G y_j) + (1 - alpha) F_ij,

since -8 |G_P|^2 = min_G 8 |G|^2 - 16 <G, G_P> for G_P = sum_ij P_ij x_i y_j^T. V is a minimum of affine functions of G.
Hence it is concave: an affine function below V at the corners of a box lies below V within the box. The dual values of
`solve` are certified lower bounds of V at the corners. Boxes of G are split, the box with the least bound first, until
the bound is close to the value of a plan, or the solves are used up. In three dimensions a box has 2^9 corners: 12
points have a gap of 48 % after 1,920 solves and of 26 % after 4,032, where 437 reach 1 % in the plane.

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

MOST_COORDINATES = 4  # of G: a box has 2^4 corners, and a bound of 1 % takes some thousand solves
MOST_SOLVES = 10_000
CORNER_TOL = 1e-2  # tol of a solve; its dual value, which counts, is closer by orders of magnitude
TOGETHER = 1 << 23  # entries of the costs of the corners that are solved in one batch
UNITS = 1 << 40  # corners are integers in units of the first box's width over this
ROUNDING = 1e-12  # of the terms of a bound


class Corner(NamedTuple):
    """A matrix G, flat, and the solution of its problem."""

    G: F64
    least: float  # certified lower bound of V(G)
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
        self.corners: dict[tuple[int, ...], Corner] = {}

    def run(self, value: float, rtol: float) -> float:
        """Return a lower bound of the objective, at most rtol below ``value`` if MOST_SOLVES are enough."""
        order = itertools.count()
        whole = (0,) * len(self.reach), (UNITS,) * len(self.reach)
        self.solve(self.corners_of(whole))
        heap = [(self.bound(whole), next(order), whole)]
        together = max(1, self.count_together // 2 ** (len(self.reach) - 1))
        while heap[0][0] < value - rtol * abs(value) and len(self.corners) < MOST_SOLVES:
            parts: list[Any] = []
            while heap and len(parts) < 2 * together and heap[0][0] < value - rtol * abs(value):
                parts += self.split(heapq.heappop(heap)[2])
            self.solve([at for box in parts for at in self.corners_of(box)])
            for box in parts:
                heapq.heappush(heap, (self.bound(box), next(order), box))
            reached = self.constant + self.best.reached
            value = min(value, reached + CORNER_TOL * abs(reached))  # rough plans may miss the marginals
        return heap[0][0]

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

    @staticmethod
    def corners_of(box: Any) -> list[tuple[int, ...]]:
        return list(itertools.product(*zip(*box, strict=True)))

    def split(self, box: Any) -> list[Any]:
        """Return the halves of a box across its widest side."""
        low, high = box
        widths = self.reach * (np.array(high) - np.array(low))
        k = int(np.argmax(widths))
        middle = (low[k] + high[k]) // 2
        return [(low, (*high[:k], middle, *high[k + 1 :])), ((*low[:k], middle, *low[k + 1 :]), high)]

    def solve(self, wanted: list[tuple[int, ...]]) -> None:
        """Solve the problems of new corners, each from the answer of the nearest corner that is known."""
        new = [at for at in dict.fromkeys(wanted) if at not in self.corners]
        step = self.count_together
        for k in range(0, len(new), step):
            self.solve_some(new[k : k + step])

    def solve_some(self, new: list[tuple[int, ...]]) -> None:
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
            self.corners[at] = Corner(own, found.dual - ROUNDING * size, reached, found.own_logs)

    def largest_cost(self, G: F64) -> float:
        """Bound the terms that add up to an entry of C(G)."""
        terms = [*self.addends]
        turned = 16 * self.task.alpha * self.x @ G.reshape(self.shape)
        pairs = (self.left, self.right), (turned, self.y)
        largest = sum(float(np.abs(left).max(0, initial=0) @ np.abs(right).max(0, initial=0)) for left, right in pairs)
        if self.task.F is not None:
            terms.append(self.task.F)
        return largest + sum(float(np.abs(z).max()) for z in terms)

    def bound(self, box: Any) -> float:
        """Return a lower bound of F within a box: 8 alpha |G|^2 plus an affine function below V at its corners."""
        ends = self.matrix_at(box[0]), self.matrix_at(box[1])
        corners = [self.corners[at] for at in self.corners_of(box)]
        G = np.array([corner.G for corner in corners])
        V = np.array([corner.least for corner in corners])
        middle = 0.5 * (ends[0] + ends[1])
        slope = ((G - middle) * V[:, None]).sum(0) / ((G - middle) ** 2).sum(0)  # least squares at the corners
        best = -math.inf
        for s in (slope, 0.0 * slope):
            level = float((V - G @ s).min())
            curve = 8 * self.task.alpha
            inner = np.clip(-s / (2 * curve), *ends)
            best = max(best, level + float((curve * inner**2 + s * inner).sum()))
        return self.constant + best - ROUNDING * (abs(self.constant) + abs(best))


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
