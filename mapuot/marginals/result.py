"""Results of `multimarginal`: potentials, marginals and certificate; couplings are computed on request."""

import dataclasses
import math
from importlib import import_module
from typing import Any

import numpy as np

from ..answer.result import CertifiedAnswer
from ..backends import Stats
from ..cached import cached_property
from ..errors import shown
from ..penalties import F64, kl_divergence
from ..problem.sparse import is_sparse
from ..problem.validate import as_columns
from ..status import FAILED, describe_bound
from ..synonyms import AnswerHints
from .blocks import JointBlocks
from .problem import MultiProblem
from .state import State
from .tree import Tree


class MultiResult(CertifiedAnswer, AnswerHints):
    """Answer of `multimarginal`: potentials, marginals and certificate; couplings on request.

    Attributes
    ----------
    log_u : list of (n_k,) float64 arrays
        Log scalings: ``P = R exp(sum_k log_u[k] - C / reg)``; 0 for a free marginal, -inf where the mass is 0, inf
        where every cost of a point with mass is inf.
    gap : float
        Bound on the objective of this plan less the optimum, without the cost of mass that hard marginals miss. inf
        while they miss more than tol_gap (without tol_gap: tol) times the mass.
    error_bound : float
        Certified bound on ``|P - P*|_1 / mass``. With two or more hard marginals it comes from a step of Newton's
        method, and one of its factors, the least eigenvalue of the step's equations, is an estimate.
    converged : bool
        Whether tol (or tol_gap) was reached.
    status : str
        "converged", "max_passes", "stalled", "cancelled", "not finite" or "underflow".
    how : str
        A line that describes the solve, for example "float32 tiles, 2 larger regs, corrected by 64 clusters".
    n_passes : int
        Number of passes; each reads every kernel once. On a tree each certificate takes one more read.
    trace : list of Stats
        One entry for each pass, larger regs first: gap, error, dual, mass, residual, seconds. On a tree, passes without
        a certificate have gap and error inf.
    scale_cost : float
        The cost that was the unit of reg and reg_m in the call; 1 if they were in units of the costs.

    See Also
    --------
    multimarginal : returns a MultiResult
    Result : the answer for two marginals

    Notes
    -----
    The certificate holds for the plan of ``log_u``. If the kernels of a tree are stored in float32, ``marginals`` and
    ``mass`` may differ from the plan's own by 6.3e-8, relative, for each cost.

    Couplings are computed from the costs on request; do not change the costs before.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.linspace(0, 1, 20)
    >>> M = (x[:, None] - x) ** 2
    >>> costs, masses = {(0, 1): M, (1, 2): M}, [np.ones(20), None, np.full(20, 1.5)]
    >>> result = mapuot.multimarginal(costs, masses, reg=0.05, reg_m=1.0)
    >>> result.converged, result.pair(0, 2).shape
    (True, (20, 20))
    >>> bool(np.allclose(result.pair(0, 2).sum(0), result.marginal(2)))
    True
    """

    def __init__(
        self, problem: MultiProblem, state: State | None, body: Tree | JointBlocks, trace: list[Stats], status: str,
        how: str,
    ) -> None:  # fmt: skip
        self.problem, self.trace, self.status, self.how = problem, trace, status, how
        self._body, self._state = body, state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: without kernels, and with the backend by name."""
        problem = dataclasses.replace(self.problem, xp=self.problem.xp.__name__)
        return {**vars(self), "problem": problem, "_body": type(self._body)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        problem = dataclasses.replace(state["problem"], xp=import_module(state["problem"].xp))
        vars(self).update(state, problem=problem, _body=state["_body"](problem))

    def __repr__(self) -> str:
        sizes = " x ".join(str(x.size) for x in self.problem.marginals)
        told = describe_bound(self.error_bound, "error_bound")
        return (
            f"<mapuot.MultiResult {self.problem.kind} of {sizes}, {self.status} after {self.n_passes} passes, {told}, "
            f"mass {self.mass:.6g}>"
        )

    @property
    def dual(self) -> float:
        """Dual value minus a bound on its rounding: a lower bound on the optimum; -inf if the solve failed."""
        return self.trace[-1].dual

    @cached_property
    def log_u(self) -> list[F64]:
        """Log scalings of each marginal."""
        out = []
        for k, x in enumerate(self.problem.marginals):
            values = x.to_all_points(self._found.log_u[k], -np.inf)
            values[x.unreached] = np.inf
            out.append(values)
        return out

    @cached_property
    def potentials(self) -> list[F64]:
        """Dual potentials ``f_k = reg log_u[k]``, in units of the costs."""
        return [self.problem.reg * x for x in self.log_u]

    @property
    def mass(self) -> float:
        """Mass of the plan, ``sum P``; NaN if no plan was found."""
        if self._state is None:
            return math.nan
        return self._state.mass

    @property
    def _found(self) -> State:
        if self._state is None:
            raise ValueError(f"no plan was found: {self.status}")
        return self._state

    def _number(self, k: Any, name: str) -> int:
        count = len(self.problem.marginals)
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 <= k < count:
            raise ValueError(f"{name} must be the number of a marginal, 0 to {count - 1}, got {shown(k)}")
        return int(k)

    def _two(self, i: Any, j: Any) -> tuple[int, int]:
        i = self._number(i, "i")
        j = self._number(j, "j")
        if i == j:
            raise ValueError(f"i and j must be two marginals, got {i} twice")
        return i, j

    @cached_property
    def marginals(self) -> list[F64]:
        """Marginals of the plan, (n_k,) each, in units of mass."""
        return [self.marginal(k) for k in range(len(self.problem.marginals))]

    def marginal(self, k: int) -> F64:
        """Return the marginal k of the plan, (n_k,), in units of mass."""
        k = self._number(k, "k")
        return self.problem.marginals[k].to_all_points(self._found.marginal(self.problem, k), 0.0)

    def pair(self, i: int, j: int) -> Any:
        """Return the coupling of two marginals, (n_i, n_j): the plan summed over all other marginals.

        The coupling is computed at each call. If the two have a sparse cost, the coupling is a CSR array with entries
        in the same places.
        """
        i, j = self._two(i, j)
        edges = self.problem.edges
        cost = edges.get((i, j), edges.get((j, i)))
        if isinstance(self._body, Tree) and cost is not None and cost.operator == "pairs":
            P = self._body.stored_pair(i, j, self._found).tocoo()
            rows = self.problem.marginals[i]
            cols = self.problem.marginals[j]
            places = rows.kept[P.row], cols.kept[P.col]
            return type(P)((P.data, places), shape=(rows.size, cols.size)).tocsr()
        return self.apply(i, j, np.eye(self.problem.marginals[j].size))

    def conditional(self, i: int, j: int) -> Any:
        """Return the coupling of i and j with rows scaled to sum 1, (n_i, n_j); NaN for points of i without mass."""
        P = self.pair(i, j)
        r = self.marginal(i)
        with np.errstate(invalid="ignore", divide="ignore"):
            if not is_sparse(P):
                return P / r[:, None]
            P.data /= np.repeat(r, np.diff(P.indptr))
        return P

    def apply(self, i: int, j: int, X: Any) -> F64:
        """Return ``pair(i, j) @ X`` for X of shape (n_j,) or (n_j, d); for a tree no coupling is formed."""
        i, j = self._two(i, j)
        rows = self.problem.marginals[i]
        cols = self.problem.marginals[j]
        X, flat = as_columns(X, cols.size, "X")
        out = np.zeros((rows.size, X.shape[1]))
        out[rows.kept] = self._body.apply(i, j, X[cols.kept], self._found)
        if flat:
            return out[:, 0]
        return out

    @cached_property
    def cost(self) -> float:
        """Linear transport cost ``<P, C>``; NaN if no plan was found."""
        if self._state is None:
            return math.nan
        return self._body.cost(self._found)

    @cached_property
    def objective(self) -> float:
        """Value of the plan, with all mass terms; hard marginals count 0. inf if the solve failed."""
        if self.status in FAILED:
            return np.inf
        problem, state = self.problem, self._found
        total = problem.reg * (problem.reference_mass - self.mass) + problem.constant
        for k, x in enumerate(problem.marginals):
            r = state.marginal(problem, k)
            total += problem.reg * float(state.log_u[k] @ r)
            if not (x.free or x.hard):
                with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                    total += x.rho * float(kl_divergence(r, x.weight).sum())
        return total
