"""The results of one call in POT's shapes: plan or costs, and the log."""

from typing import Any

import numpy as np

from ..answer.result import LEAST_FLOAT32, MOST_FLOAT32, Result
from .arrays import give


class Answers:
    """The results of one call in POT's shapes and in the array library of its cost matrix.

    ``growth``: log of the factor on a for each result, if the reference measure is a b^T.
    """

    def __init__(self, results: list[Result], err: list[float], several: bool, like: Any, growth: Any) -> None:
        self.results, self.err, self.several, self.like, self.growth = results, err, several, like, growth
        self.dtype = np.dtype(self.results[0].problem.M.dtype.name)

    def plan(self, log: bool) -> Any:
        """Return the plan, or the linear costs of several targets, and on request the log."""
        if self.several:
            return self.cost("linear", log)
        value = give(self.results[0].plan, self.like)
        if log:
            return value, self.log()
        return value

    def cost(self, kind: str, log: bool) -> Any:
        if log:
            return self.costs(kind), self.log()
        return self.costs(kind)

    def costs(self, kind: str) -> Any:
        values = [r.cost if kind == "linear" else total(r, t) for r, t in zip(self.results, self.growth, strict=True)]
        return give(self.narrowed(np.array(values if self.several else values[0]), LEAST_FLOAT32)[()], self.like)

    def narrowed(self, x: Any, least: float = 0.0) -> Any:
        """Return ``x`` in M's dtype, or in float64 if float32 would overflow, or numbers but 0 are below ``least``."""
        held = ((np.abs(x) <= MOST_FLOAT32) & (np.abs(x) >= least)) | (x == 0) | ~np.isfinite(x)
        if held.all():
            return x.astype(self.dtype)
        return x

    def log(self) -> dict[str, Any]:
        logu = self.vectors([r.log_u + t for r, t in zip(self.results, self.growth, strict=True)])
        logv = self.vectors([r.log_v for r in self.results])
        costs = {"cost": self.costs("linear"), "total_cost": self.costs("total")}
        return {"err": self.err, "logu": logu, "logv": logv} | costs

    def vectors(self, values: list[Any]) -> Any:
        table = [*map(self.results[0]._backend.to_numpy, values)]
        return give(self.narrowed(np.stack(table, axis=1) if self.several else table[0]), self.like)


def total(result: Result, growth: float) -> float:
    """Return the objective for the reference a b^T; the result was solved for the reference e^growth a b^T."""
    if growth:
        more = growth * result.mass + np.expm1(-growth) * result.problem.c_mass
    else:
        more = 0.0
    return float(result.objective + result.problem.reg * more)
