"""What a pass finds, whatever the shape of the costs: potentials and, for each marginal, what the others send there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..backends.kernel import log_sum
from ..penalties import F64
from .problem import Marginal, MultiProblem

Messages = dict[int, F64]


@dataclass
class State:
    """r_k = masses_k exp(log_u_k + log_s_k) are the marginals of the plan of log_u.

    Kernels may be stored with a relative error ``storage`` of the plan's entries, the same in all sums. A pass along a
    tree may leave ``log_s`` empty: of such a state only the mass is known.
    """

    log_u: list[F64]
    log_s: list[F64]
    log_mass: float
    rounding: float  # bound of the absolute error of every log_s, and of the exponents of the plan, by float64
    storage: float = 0.0
    up: Messages = field(default_factory=dict)  # along a tree: to the root, and from it
    back: Messages = field(default_factory=dict)
    by_part: F64 | None = None  # log_mass of each part, where there are several

    @property
    def whole(self) -> bool:
        return bool(self.log_s)

    @property
    def log_masses(self) -> F64:
        return np.array([self.log_mass]) if self.by_part is None else self.by_part

    @property
    def mass(self) -> float:
        return float(np.exp(self.log_mass)) if self.log_mass < 709 else np.inf

    def marginal(self, problem: MultiProblem, k: int) -> F64:
        with np.errstate(over="ignore"):
            return np.exp(problem.marginals[k].log_weight + self.log_u[k] + self.log_s[k])

    def translated(self, problem: MultiProblem, lam: F64) -> State:
        """All log_u moved by lam, one for each marginal and part: their mass grows by e^(sum of lam over marginals)."""
        total = lam.sum(0)
        log_u = [x + problem.each(k, lam[k]) for k, x in enumerate(self.log_u)]
        log_s = [x + problem.each(k, total - lam[k]) for k, x in enumerate(self.log_s)]
        masses = self.log_masses + total
        return replace(self, log_u=log_u, log_s=log_s, log_mass=log_sum(masses), by_part=masses)


def prox(marginal: Marginal, log_s: F64, reg: float) -> F64:
    """log u = -fi log s."""
    return np.zeros_like(log_s) if marginal.free else -marginal.fi(reg) * log_s
