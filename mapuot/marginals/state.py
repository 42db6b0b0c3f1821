"""What a pass finds, whatever the shape of the costs: potentials and, for each marginal, what the others send there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..penalties import F64
from .problem import Marginal, MultiProblem


@dataclass
class State:
    """r_k = masses_k exp(log_u_k + log_s_k) are the marginals of the plan of log_u."""

    log_u: list[F64]
    log_s: list[F64]
    rounding: float  # bound of the absolute error of every log_s, and of the exponents of the plan

    def marginal(self, problem: MultiProblem, k: int) -> F64:
        with np.errstate(over="ignore"):
            return np.exp(problem.marginals[k].log_weight + self.log_u[k] + self.log_s[k])

    def translated(self, lam: F64) -> State:
        """All log_u moved by their lam: the plan grows by e^(sum of lam)."""
        total = float(lam.sum())
        log_u = [x + y for x, y in zip(self.log_u, lam, strict=True)]
        log_s = [s + (total - y) for s, y in zip(self.log_s, lam, strict=True)]
        return State(log_u, log_s, self.rounding)


def prox(marginal: Marginal, log_s: F64, reg: float) -> F64:
    """log u = -fi log s, fi = rho / (rho + reg): 0 where free, -log s where hard."""
    if marginal.free:
        return np.zeros_like(log_s)
    return -log_s if marginal.hard else -log_s * (marginal.rho / (marginal.rho + reg))
