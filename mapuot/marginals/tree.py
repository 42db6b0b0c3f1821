"""Chains, stars and all other trees of pairwise costs: one pass is a sweep of messages to the root and one back.

With w_k = masses_k u_k, and messages m between neighbours k, l along the kernel of their cost,

    m_{k -> l} = K_lk (w_k prod_{i near k, i != l} m_{i -> k}),    s_k = prod_{i near k} m_{i -> k},    r_k = w_k s_k.

The sweep to the root takes the messages from it, m_{parent -> k}, of the pass before and sets u_k = prox(s_k) on its
way; the sweep back leaves all u as they are, so that it gives the marginals, and the certificate, of one plan. Each
reads each kernel once. The messages from the root are the whole state: what is extrapolated, and all that a pass needs.
Without branches each step is the best one with all other potentials held; children of one marginal move at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..penalties import F64
from .edge import Edge
from .problem import MultiProblem, neighbours, walk
from .state import State, prox


class Tree:
    """The sweeps of a problem whose costs are a tree."""

    def __init__(self, problem: MultiProblem) -> None:
        self.problem = problem
        self.kernels = {pair: Edge(cost, problem.reg, problem.sizes[pair]) for pair, cost in problem.edges.items()}
        self.root = root_of(problem)
        self.order = walk(problem.edges, self.root)[1]
        self.parent = dict(self.order)
        self.children: dict[int, list[int]] = {k: [] for k in self.parent}
        for k, parent in self.order[1:]:
            self.children[parent].append(k)
        self.sizes = [problem.shape[k] for k, _ in self.order[1:]]

    def start(self, state: F64 | None = None) -> F64:
        """Where to begin: all messages 1, or those of a larger reg, whose logarithms are given times the ratio."""
        return np.zeros(sum(self.sizes)) if state is None else state

    def message(self, source: int, target: int, x: F64) -> tuple[F64, float]:
        """Logarithm of K x from one marginal to its neighbour."""
        if (target, source) in self.kernels:
            return self.kernels[target, source].log_dot(x, 1)
        return self.kernels[source, target].log_dot(x, 0)

    def split(self, state: F64) -> dict[int, F64]:
        parts = np.split(state, np.cumsum(self.sizes)[:-1])
        return {k: part for (k, _), part in zip(self.order[1:], parts, strict=True)}

    def sweep(self, state: F64) -> State:
        """Potentials and marginals of the next plan, and the messages from the root that follow."""
        problem, count = self.problem, len(self.parent)
        down, errors = self.split(state), np.zeros(count)
        up: dict[int, F64] = {}
        back: dict[int, F64] = {}
        log_u, near = [np.zeros(0)] * count, [np.zeros(0)] * count
        for k, parent in reversed(self.order):
            near[k] = sum((up[i] for i in self.children[k]), np.zeros(problem.shape[k]))
            log_u[k] = prox(problem.marginals[k], near[k] + down.get(k, 0.0), problem.reg)
            if parent >= 0:
                up[k], errors[k] = self.message(k, parent, problem.marginals[k].log_weight + log_u[k] + near[k])
        log_s = [np.zeros(0)] * count
        for k, _ in self.order:
            log_s[k] = near[k] + back.get(k, 0.0)
            for i in self.children[k]:
                belief = problem.marginals[k].log_weight + log_u[k] + log_s[k] - up[i]
                back[i], error = self.message(k, i, belief)
                errors[i] = max(errors[i], error)
        self.up, self.back = up, back
        return State(log_u, log_s, float(errors.sum()))

    def image(self, state: State, lam: F64) -> F64:
        """The messages from the root after the translation ``lam``, which each takes from the u that it holds."""
        below, total = lam.copy(), float(lam.sum())
        for k, parent in reversed(self.order[1:]):
            below[parent] += below[k]
        for k, _ in self.order[1:]:
            self.up[k] = self.up[k] + below[k]
            self.back[k] = self.back[k] + (total - below[k])
        return np.concatenate([self.back[k] for k, _ in self.order[1:]])

    def metric(self, state: State) -> F64:
        """Weights of the state's entries in the norm of the extrapolation: the mass at their points."""
        return np.concatenate([state.marginal(self.problem, k) for k, _ in self.order[1:]])

    # ---- products of the plan of the last pass ----

    def apply(self, i: int, j: int, Y: F64, state: State) -> F64:
        """P_ij Y, along the path from j to i: what a marginal expects of Y is what its neighbour expects."""
        path = dict(walk(self.problem.edges, j)[1])
        steps = [i]
        while steps[-1] != j:
            steps.append(path[steps[-1]])
        for near, k in zip(steps[::-1], steps[-2::-1], strict=False):
            Y = self.along(k, near, Y, state)
            if k != i:
                r = state.marginal(self.problem, k)[:, None]
                Y = np.divide(Y, r, out=np.zeros_like(Y), where=r > 0)
        return Y

    def along(self, k: int, near: int, Y: F64, state: State) -> F64:
        """P Y for the coupling P of two neighbours."""
        if (k, near) in self.kernels:
            return np.concatenate([P @ Y for _, _, P, _ in self.couplings(k, near, state)])
        return sum((P.T @ Y[i0:i1] for i0, i1, P, _ in self.couplings(near, k, state)), np.zeros(()))

    def couplings(self, i: int, j: int, state: State) -> Iterator[tuple[int, int, F64, F64]]:
        """Blocks (i0, i1, P, C) of rows of the coupling of two marginals with a cost (i, j)."""
        child, parent = (i, j) if self.parent[i] == j else (j, i)
        belief = {k: self.problem.marginals[k].log_weight + state.log_u[k] + state.log_s[k] for k in (i, j)}
        belief[child], belief[parent] = belief[child] - self.back[child], belief[parent] - self.up[child]
        return self.kernels[i, j].coupling(belief[i], belief[j])

    def cost(self, state: State) -> float:
        total = 0.0
        for i, j in self.kernels:
            for _, _, P, C in self.couplings(i, j, state):
                total += float((P[P > 0] * C[P > 0]).sum())
        return total


def root_of(problem: MultiProblem) -> int:
    """A hard marginal, which the certified plan then meets, else an end of a longest path."""
    hard = [k for k, x in enumerate(problem.marginals) if x.hard]
    ends = [k for k, near in neighbours(problem.edges).items() if len(near) == 1]
    return next((k for k in [*ends, *hard] if k in hard), ends[0]) if hard else walk(problem.edges, ends[0])[1][-1][0]
