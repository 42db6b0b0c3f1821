"""A problem with true distances between many points: first-order corrections of the distances of an embedding.

With D, G the true distances and their approximations A = Phi J Phi^T, B = Psi J Psi^T by coordinates,

    D P G = A P G + (D - A) P B + (D - A) P (G - B).

The first two terms are products of few columns, Phi J (G P^T Phi)^T and ((D - A) P Psi) J Psi^T. Products of D and G
with these columns form one block of distances at a time. Without the last term the steps solve a problem with a larger
objective, by 2 alpha <P, (D - A) P (G - B)>. For distances of negative type D - A and G - B are negative semidefinite.
Hence this excess is not negative, and with
T = diag(r)^-1/2 P diag(s)^-1/2, which has no singular value above 1, it is at most 2 alpha times the product of the
norms |diag(r)^1/2 (D - A) diag(r)^1/2| and |diag(s)^1/2 (G - B) diag(s)^1/2| (Frobenius).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..answer.result import Result
from ..arrays import host, namespace
from ..contract import Backend
from ..penalties import F64
from .answer import GromovResult
from .distances import Space
from .task import Plan, Task

FINER = 8  # factor of the number of landmarks for the value, whose error falls faster than their number rises


class TrueTask(Task):
    """A `Task` with the true distances of one or both spaces, which have coordinates, too.

    ``cross`` and ``moved`` of a `Plan` have the rows P Psi and then P^T Phi, for the spaces X and Y with true
    distances, and beside them the rows of the products with these distances.
    """

    @property
    def rows_of_x(self) -> int:
        """Number of the rows of ``cross`` and ``moved`` that belong to X."""
        if self.X.is_bounded:
            return len(self.a)
        return 0

    @property
    def maker(self) -> Backend:
        """The backend that makes the true distances."""
        maker: Backend = next(space.distances for space in (self.X, self.Y) if space.is_bounded).maker
        return maker

    @functools.cached_property
    def coordinates(self) -> tuple[Any, Any]:
        """The coordinates of both spaces, where the true distances are made."""
        return self.maker.to_memory(self.X.phi), self.maker.to_memory(self.Y.phi)

    def answer(self, result: Result) -> Plan:
        _, *products = result._sums_and_products(*self.columns)
        return self.plan_of_products(result, products, *self.sums_of(result))

    def plan(self, P: Any, r: F64, s: F64, terms: Any) -> Plan:
        to_rows, to_columns = map(host, self.columns)
        return self.plan_of_products(P, [P.apply(to_rows), P.apply_transpose(to_columns)], r, s, terms)

    @property
    def columns(self) -> tuple[Any, Any]:
        """Columns that a plan and its transpose are multiplied with."""
        phi, psi = self.coordinates
        if not self.g.size:
            return psi, phi
        xp = namespace(psi)
        return xp.hstack([xp.asarray(self.g), psi]), phi

    def plan_of_products(self, P: Any, products: list[Any], r: F64, s: F64, terms: Any) -> Plan:
        """Return the `Plan` of P, given its products with `columns`; the list is emptied, which frees their memory."""
        count = self.g.shape[1]
        xp = namespace(self.coordinates[0])
        Z, V = map(xp.asarray, products)
        products.clear()
        whole = None if self.F is None else P.plan
        features = self.feature_cost(r, s, host(Z[:, :count]), whole)
        parts = []
        if self.X.is_bounded:
            parts.append(Z[:, count:])
        if self.Y.is_bounded:
            parts.append(V)
        cross = xp.concatenate(parts)
        del Z, V, parts
        return self.plan_of_moments(r, s, cross, features, *zip(*terms, strict=True))

    def plan_of_moments(self, r: F64, s: F64, cross: Any, features: float, *terms: Any) -> Plan:
        X, Y = self.X, self.Y
        phi, _ = self.coordinates
        m = self.rows_of_x
        moved = namespace(cross).empty_like(cross)
        if X.is_bounded:
            product = X.distances.times(cross[:m])
            if Y.is_bounded:
                product -= phi @ X.times(phi.T @ cross[:m])
            moved[:m] = Y.times(product.T).T
            del product
        if Y.is_bounded:
            moved[m:] = X.times(Y.distances.times(cross[m:]).T).T
        return Plan(r, s, true_square_means(X, r), true_square_means(Y, s), cross, moved, features, *terms)

    def lifted(self, plan: Plan, rows: Any, cols: Any) -> Plan:
        places = []
        if self.X.is_bounded:
            places.append(rows)
        if self.Y.is_bounded:
            places.append(self.rows_of_x + cols)
        r = np.zeros(self.X.count)
        s = np.zeros(self.Y.count)
        r[rows], s[cols] = plan.r, plan.s
        xp = namespace(plan.cross)
        cross = xp.zeros((self.rows_of_x + self.Y.is_bounded * self.Y.count, plan.cross.shape[1]))
        cross[xp.asarray(np.concatenate(places))] = plan.cross
        return self.plan_of_moments(r, s, cross, plan.features, *plan[-3:])

    def factors(self, plan: Plan) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        X, Y = self.X, self.Y
        phi, psi = self.coordinates
        xp = namespace(phi)
        m = self.rows_of_x
        B = U = xp.empty((X.count, 0))
        C = V = xp.empty((Y.count, 0))
        if X.is_bounded:
            C = psi
            U = plan.moved[:m]
        if Y.is_bounded:
            B = phi
            V = plan.moved[m:]
        return (B, C), (V, U)

    def vector(self, plan: Plan) -> F64:
        phi, psi = self.coordinates
        if self.X.is_bounded:
            folded = phi.T @ plan.cross[: self.X.count]
        else:
            folded = plan.cross.T @ psi
        rows, cols = self.sizes
        return np.asarray(host(folded) / rows / cols).ravel()


def task_of(*problem: Any) -> Task:
    """Return the `Task` of both spaces and the arguments that follow; a `TrueTask` if distances are approximate."""
    X, Y, *_ = problem
    if X.is_bounded or Y.is_bounded:
        return TrueTask(*problem)
    return Task(*problem)


def assess(result: GromovResult) -> None:
    """Set ``value`` and ``parts``, by finer coordinates where distances are true, ``value_error`` and ``misfit``."""
    task = result._task
    spaces = task.X, task.Y
    plan = result._plan
    if isinstance(task, TrueTask):
        maker = task.maker
        spaces = spaces[0].finer(plan.r, FINER), spaces[1].finer(plan.s, FINER)
        task = task.between(*spaces)
        maker.free_unused()
        plan = task.answer(result)
        result.parts = task.parts(plan)
        result.value = sum(result.parts)
    found = [space.misfit(w) for space, w in zip(spaces, (plan.r, plan.s), strict=True)]
    ratios = [math.sqrt(misfit / whole) if whole else 0.0 for misfit, whole in found]
    result.misfit = ratios[0], ratios[1]
    if all(space.distances is None or space.is_bounded for space in spaces):
        result.value_error = 2 * task.alpha * math.sqrt(found[0][0] * found[1][0])
    else:
        result.value_error = math.inf


def true_square_means(space: Space, w: F64) -> F64:
    """Return sum_k D_ik^2 w_k for every i."""
    if space.is_bounded:
        return np.asarray(space.distances.square_means(w))
    return space.square_means(w)
