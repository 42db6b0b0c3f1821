"""A backend of moscot: after ``import mapuot.moscot`` its problems take ``solve(backend="mapuot")``.

moscot's own code computes the costs, their scale, epsilon and tau from its arguments. mapuot solves the problem, and
pushes and pulls through the plan of a certified `Result`, ``problem[...].solution.result``. For points with squared
distances no matrix is formed. wot.py has a separate model for time courses.
"""

from operator import attrgetter
from typing import Any

import numpy as np

from .answer.result import Result
from .api.solve import solve
from .penalties import F64
from .problem.clouds import PointCloud

try:
    from moscot.backends.ott.solver import SinkhornSolver
    from moscot.backends.utils import register_solver
    from moscot.base.output import BaseDiscreteSolverOutput
    from ott.geometry import costs, geodesic, pointcloud
    from ott.solvers.linear.sinkhorn import compute_kl_reg_cost
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.moscot needs moscot: pip install moscot") from error

__all__ = ["Solution", "Solver", "solver_of"]

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


class Solver(SinkhornSolver):
    """Solver of linear problems: moscot prepares them, `mapuot.solve` solves them with ``options``."""

    def __init__(self, rank: int = -1, epsilon: Any = None, **options: Any) -> None:
        if rank > -1:
            raise NotImplementedError("rank must be -1: mapuot solves with the full plan, and need not form it")
        super().__init__()
        self.options = {name: x for name, x in options.items() if name not in TAKEN}

    def _solve(self, prob: Any, **kwargs: Any) -> Solution:
        geom = prob.geom
        if isinstance(geom, geodesic.Geodesic):
            raise NotImplementedError("backend 'mapuot' takes points, costs and kernels, no graphs")
        if type(geom) is pointcloud.PointCloud and type(geom.cost_fn) is costs.SqEuclidean:
            x, y = (np.asarray(z, np.float64) for z in (geom.x, geom.y))
            M: Any = PointCloud(x, y, scale=float(geom.inv_scale_cost))
        else:
            M = np.asarray(geom.cost_matrix)
        reg = float(geom.epsilon)
        taus = float(prob.tau_a), float(prob.tau_b)
        a, b = (np.asarray(z, np.float64) for z in (prob.a, prob.b))
        if taus == (1.0, 1.0):
            b = b * (a.sum() / b.sum())  # the totals differ by float32 rounding only
        reg_m = tuple(np.inf if tau == 1 else reg * tau / (1 - tau) for tau in taus)
        return Solution(solve(M, a, b, reg=reg, reg_m=reg_m, reference="uniform", **self.options), prob)


@register_solver("mapuot")
def solver_of(problem_kind: str) -> type[Solver]:
    """Return the solver for linear problems, the only kind here."""
    if problem_kind != "linear":
        raise NotImplementedError(f"backend 'mapuot' solves linear problems, not {problem_kind!r} ones")
    return Solver
