"""Answers of POT's functions for PyTorch tensors that require a gradient: derivatives of the solution itself."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..answer.implicit import plan_slopes, value_slopes
from ..answer.tensors import array_of, tensor_of
from ..arrays import host
from ..torch import Loss, equal, torch, value_by
from .answers import Answers


class TrackedAnswers(Answers):
    """The results of one call; plans and costs are tensors with gradients by a, b and M.

    The scalings in the log have none.
    """

    def __init__(self, answers: Answers, a: Any, b: Any, M: Any) -> None:
        super().__init__(answers.results, answers.err, answers.several, answers.like, answers.growth)
        a, b = (x if len(x) else equal(k, M) for x, k in zip((a, b), M.shape, strict=True))
        B = b.T if self.several else b[None]
        self.mass = B.sum(1)
        if self.growth.any():
            self.grown = self.mass / a.sum()
        else:
            self.grown = torch.ones_like(self.mass)
        self.tensors = self.grown[:, None] * a, B, M

    def plans(self) -> Any:
        """Return the plans of all targets, (k, m, n)."""

        def slopes(grad: Any) -> list[Any]:
            weights = host(array_of(grad)).astype(np.float64)
            return [plan_slopes(result, w) for result, w in zip(self.results, weights, strict=True)]

        return self.value(np.stack([host(result.plan) for result in self.results]), slopes)

    def costs(self, kind: str) -> Any:
        if kind == "linear":
            M = self.tensors[2]
            values = (self.plans() * M.where(M.isfinite(), torch.zeros_like(M))).sum((1, 2))
        else:
            values = self.totals()
        if self.several:
            return values
        return values[0]

    def totals(self) -> Any:
        """Return the objectives; if a was scaled, for its original reference, see `answers.total`."""

        def slopes(grad: Any) -> list[Any]:
            weights = host(array_of(grad)).astype(np.float64)
            found = zip(self.results, weights, strict=True)
            return [tuple(w * slope for slope in value_slopes(result)) for result, w in found]

        value = self.value(np.array([result.objective for result in self.results]), slopes)
        if not self.growth.any():
            return value
        growth = self.grown.log() * (torch.as_tensor(self.growth, device=value.device) != 0)
        return value + self.results[0].problem.reg * self.mass * (growth + torch.expm1(-growth) * self.mass)

    def plan(self, log: bool) -> Any:
        if self.several:
            return self.cost("linear", log)
        value = self.plans()[0]
        if log:
            return value, self.log()
        return value

    def value(self, found: Any, slopes: Callable[[Any], list[Any]]) -> Any:
        """Return numbers of the results as a tensor in M's dtype; ``slopes``: (by a, by b, by M) of each result."""

        def backward(_: Any, needed: Any, grad: Any, *inputs: Any) -> list[Any]:
            by_a, by_b, by_cost = (np.stack(x) for x in zip(*slopes(grad), strict=True))
            return [tensor_of(x, grad.device) for x in (by_a, by_b, by_cost.sum(0))]

        task = Loss(lambda *_: (found, None), backward)
        return value_by(task, *self.tensors).to(self.tensors[2].dtype)
