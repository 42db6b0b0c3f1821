"""State after a pass, for every shape of costs: potentials and, at each point, the log sum over all other marginals.

The points of all marginals are concatenated in one vector. The work of a pass beside its products then takes a few
calls, however many marginals there are: a call of numpy takes 1 us, as long as 1000 points. If the kernels of a tree
are on a device, its vectors are there, too, until the solve ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..backends.kernel import log_sum
from ..penalties import F64
from .problem import MultiProblem


class PerPoint:
    """Numbers of all points; ``row[k]`` is a view of the numbers of marginal or edge k."""

    def __init__(self, flat: F64, places: dict[int, slice]) -> None:
        self.flat, self.places = flat, places

    def __getitem__(self, k: int) -> F64:
        return self.flat[self.places[k]]

    def __setitem__(self, k: int, values: Any) -> None:
        self.flat[self.places[k]] = namespace(self.flat).asarray(values)

    def moved(self, move: Callable[..., F64], *by: Any) -> "PerPoint":
        return PerPoint(move(self.flat, *by), self.places)


@dataclass
class State:
    """Potentials and sums: the plan of log_u has the marginals r_k = masses_k exp(log_u_k + log_s_k).

    Stored kernels may give the plan's entries a relative error ``storage``, the same in all sums. A pass along a tree
    may omit ``log_s``; then only the mass of the plan is known.
    """

    log_u: PerPoint
    log_s: PerPoint | None
    log_mass: float
    rounding: float  # bound on the float64 rounding of every log_s and of the plan's exponents
    storage: float = 0.0
    messages: dict[str, PerPoint] = field(default_factory=dict)  # along a tree: "up" to the root, "back" from it
    by_part: F64 | None = None  # log_mass of each part if there are several parts
    worth: Any = None  # after a pass along a tree: sums over its plan for the certificate

    @property
    def is_complete(self) -> bool:
        return self.log_s is not None

    @property
    def log_masses(self) -> F64:
        if self.by_part is None:
            return np.array([self.log_mass])
        return self.by_part

    @property
    def mass(self) -> float:
        if self.log_mass < 709:
            return float(np.exp(self.log_mass))
        return np.inf

    def marginals(self, problem: MultiProblem) -> F64:
        assert self.log_s is not None
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(problem.log_weight + self.log_u.flat + self.log_s.flat))

    def marginal(self, problem: MultiProblem, k: int) -> F64:
        return self.marginals(problem)[problem.places[k]]

    def brought(self) -> "State":
        messages = {name: x.moved(host) for name, x in self.messages.items()}
        if self.log_s is None:
            log_s = None
        else:
            log_s = self.log_s.moved(host)
        return replace(self, log_u=self.log_u.moved(host), log_s=log_s, messages=messages)

    def translated(self, problem: MultiProblem, lam: F64) -> "State":
        """Add lam (marginals, parts) to log_u; the mass of a part grows by e^(sum of lam over marginals)."""
        total = lam.sum(0)
        log_u = self.log_u.moved(problem.points.moved, lam)
        log_s = self.log_s
        if log_s is not None:
            log_s = log_s.moved(problem.points.moved, total - lam)
        masses = self.log_masses + total
        return replace(self, log_u=log_u, log_s=log_s, log_mass=log_sum(masses), by_part=masses)
