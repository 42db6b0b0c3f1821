"""A backend of moscot: after ``import mapuot.moscot`` its problems take ``solve(backend="mapuot")``.

moscot's own code computes the costs, their scale, epsilon and tau from its arguments. mapuot solves the problem, and
pushes and pulls through the plan of a certified `Result`, ``problem[...].solution.result``. For points with squared
distances no matrix is formed. wot.py has a separate model for time courses.

A step of OTT's quadratic problem has the cost ``sum_kl (X_ik - Y_jl)^2 P_kl + penalty M_ij`` and the entropy epsilon.
That of `mapuot.gromov` has ``alpha`` times this cost, with alpha = 1 / (1 + penalty), features 2 M, and reg = alpha
epsilon. alpha is moscot's own. With tau < 1 OTT's entropy is relative to uniform masses, and its correction for the
mass of the plan minimises no objective. mapuot solves the problem of Sejourne, Vialard, Peyre 2021, with the same tau.
"""

from operator import attrgetter
from typing import Any

import numpy as np

from .answer.result import Result
from .api.gromov import GromovResult, gromov
from .api.solve import solve
from .penalties import F64
from .problem.clouds import PointCloud

try:
    from moscot.backends.ott.solver import GWSolver, SinkhornSolver
    from moscot.backends.utils import register_solver
    from moscot.base.output import BaseDiscreteSolverOutput
    from ott.geometry import costs, geodesic, pointcloud
    from ott.solvers.linear.sinkhorn import compute_kl_reg_cost
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.moscot needs moscot: pip install moscot") from error

__all__ = ["QuadraticSolution", "QuadraticSolver", "Solution", "Solver", "solver_of"]

TAKEN = {"jit", "initializer", "initializer_kwargs", "threshold", "lse_mode", "min_iterations", "max_iterations"}


class Solution(BaseDiscreteSolverOutput):
    """The output that moscot's problems work with; ``result`` is the certified answer."""

    is_linear = True
    rank = -1

    def __init__(self, result: Result, prob: Any) -> None:
        super().__init__()
        self.result, self.prob = result, prob

    def _apply(self, x: Any, *, forward: bool) -> F64:
        x = np.asarray(x, np.float64)
        if forward:
            return np.asarray(self.result.apply_transpose(x))
        return np.asarray(self.result.apply(x))

    def _apply_forward(self, x: Any) -> F64:
        return self._apply(x, forward=True)

    def _row_materializer(self) -> Any:
        return lambda rows: np.concatenate([self.result.rows(int(i), int(i) + 1) for i in rows])

    def _ones(self, n: int) -> F64:
        return np.ones(n)

    transport_matrix = property(attrgetter("result.plan"))
    shape = property(attrgetter("result.problem.shape"))
    converged = property(attrgetter("result.converged"))
    potentials = property(attrgetter("result.potentials"))

    @property
    def cost(self) -> float:
        """Value of the potentials by the formula of moscot's own backend, without constants."""
        return float(compute_kl_reg_cost(self.result.f, self.result.g, self.prob, lse_mode=True))

    def to(self, device: Any = None) -> "Solution":
        """Return the answer unchanged: mapuot solves on the device of the cost."""
        return self


class QuadraticSolution(Solution):
    """The output of quadratic problems; ``result`` is a `GromovResult`."""

    is_linear = False
    potentials = None
    result: GromovResult

    def __init__(self, result: GromovResult, prob: Any, alpha: float) -> None:
        super().__init__(result, prob)
        self.alpha = alpha

    @property
    def cost(self) -> float:
        """Objective of `mapuot.gromov` over alpha: the quadratic term has the weight 1."""
        return self.result.value / self.alpha

    @property
    def converged(self) -> bool:
        """Whether the plan settled, and the last step is certified."""
        return bool(self.result.settled and self.result.converged)


class Solver(SinkhornSolver):
    """Solver of linear problems: moscot prepares them, `mapuot.solve` solves them with ``options``."""

    def __init__(self, rank: int = -1, epsilon: Any = None, **options: Any) -> None:
        if rank > -1:
            raise NotImplementedError("rank must be -1: mapuot solves with the full plan, and need not form it")
        super().__init__()
        self.options = {name: x for name, x in options.items() if name not in TAKEN}

    def _solve(self, prob: Any, **kwargs: Any) -> Solution:
        geom = prob.geom
        if are_squares(geom):
            x, y = (np.asarray(z, np.float64) for z in (geom.x, geom.y))
            M: Any = PointCloud(x, y, scale=float(geom.inv_scale_cost))
        else:
            M = costs_of(geom)
        reg = float(geom.epsilon)
        a, b, reg_m = sides_of(prob, reg)
        return Solution(solve(M, a, b, reg=reg, reg_m=reg_m, reference="uniform", **self.options), prob)


class QuadraticSolver(GWSolver):
    """Solver of quadratic problems: moscot prepares them, `mapuot.gromov` solves them with ``options``.

    Options are those of `mapuot.gromov`: init, max_iter, tol, inner_tol, threads, backend, precision, max_passes.
    """

    def __init__(self, rank: int = -1, epsilon: Any = None, **options: Any) -> None:
        if rank > -1:
            raise NotImplementedError("rank must be -1: mapuot solves with the full plan, and need not form it")
        if not epsilon or isinstance(epsilon, str):
            raise NotImplementedError(f"epsilon must be a positive number, got {epsilon!r}")
        super().__init__()
        self.epsilon = float(epsilon)
        self.options = {name: x for name, x in options.items() if name not in (*TAKEN, "linear_solver_kwargs")}

    def _solve(self, prob: Any, **kwargs: Any) -> QuadraticSolution:
        alpha = 1 / (1 + float(prob.fused_penalty)) if prob.is_fused else 1.0
        fused: dict[str, Any] = {}
        if prob.is_fused:
            fused = {"features": features_of(prob.geom_xy), "alpha": alpha}
        X, Y = spaces = [space_of(geom) for geom in (prob.geom_xx, prob.geom_yy)]
        reg = alpha * self.epsilon
        a, b, reg_m = sides_of(prob, reg)
        result = gromov(
            X[0], Y[0], a, b, reg=reg, reg_m=reg_m, metric=tuple(kind for _, kind in spaces), **fused, **self.options
        )
        return QuadraticSolution(result, prob, alpha)


def are_squares(geom: Any) -> bool:
    return type(geom) is pointcloud.PointCloud and type(geom.cost_fn) is costs.SqEuclidean


def costs_of(geom: Any) -> F64:
    if isinstance(geom, geodesic.Geodesic):
        raise NotImplementedError("backend 'mapuot' takes points, costs and kernels, no graphs")
    return np.asarray(geom.cost_matrix)


def space_of(geom: Any) -> tuple[F64, str]:
    """Return the points of a space, scaled as OTT scales its costs, or its matrix; and the metric of `gromov`."""
    if are_squares(geom):
        return np.asarray(geom.x, np.float64) * np.sqrt(float(geom.inv_scale_cost)), "sqeuclidean"
    return costs_of(geom), "precomputed"


def features_of(geom: Any) -> Any:
    """Return twice the costs of the linear term, as points if they are squared distances."""
    if are_squares(geom):
        factor = np.sqrt(2 * float(geom.inv_scale_cost))
        return tuple(factor * np.asarray(z, np.float64) for z in (geom.x, geom.y))
    return 2 * np.asarray(costs_of(geom), np.float64)


def sides_of(prob: Any, reg: float) -> tuple[F64, F64, tuple[float, ...]]:
    """Return the masses and reg_m of a problem, by its tau."""
    taus = float(prob.tau_a), float(prob.tau_b)
    a, b = (np.asarray(z, np.float64) for z in (prob.a, prob.b))
    if taus == (1.0, 1.0):
        b = b * (a.sum() / b.sum())  # the totals differ by float32 rounding only
    return a, b, tuple(np.inf if tau == 1 else reg * tau / (1 - tau) for tau in taus)


@register_solver("mapuot")
def solver_of(problem_kind: str) -> type[Solver] | type[QuadraticSolver]:
    """Return the solver for linear or for quadratic problems."""
    if problem_kind == "quadratic":
        return QuadraticSolver
    return Solver
