"""Chains, stars and all other trees of pairwise costs: a pass reads the kernel of each cost once.

With w_k = masses_k u_k, and messages m between neighbours k, l along the kernel of their cost,

    m_{k -> l} = K_lk (w_k prod_{i near k, i != l} m_{i -> k}),    s_k = prod_{i near k} m_{i -> k},    r_k = w_k s_k.

A pass goes from the leaves to the root. At the edge of k and its parent l it takes in m_{l -> k}, made of what l had
in the pass before, sets u_k = prox(s_k), and passes m_{k -> l} on: row_pass as it is, the points of k as rows. Then
all messages to the root are those of the new u, and so is the mass of their plan, while those from the root are a
pass old for each edge between; a step forgets all but reg / (rho + reg) of them at each edge, so that this takes few
passes, fewer with a root in the middle.
What l sends, w_l times all but m_{k -> l}, is the whole state: what is extrapolated, and all that a pass needs.
``complete`` reads each kernel once more and finds the messages from the root of the same u, hence all marginals, and
the certificate, of one plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.kernel import NARROW_ENTRY, LogKernel, log_sum
from ..penalties import F64
from .problem import MultiProblem, walk
from .reach import oriented
from .state import Messages, State, prox


class Tree:
    """The sweeps of a problem whose costs are a tree; ``before``: those of another reg, whose kernels make room."""

    def __init__(self, problem: MultiProblem, before: Tree | None = None) -> None:
        self.problem = problem
        self.root = root_of(problem)
        self.order = walk(problem.edges, self.root)[1]
        self.parent = dict(self.order)
        self.children: dict[int, list[int]] = {k: [] for k in self.parent}
        for k, parent in self.order[1:]:
            self.children[parent].append(k)
        self.inner = self.order[1:]  # all but the root
        self.kernels: dict[int, LogKernel] = (
            before.kernels
            if before
            else {k: problem.kernel(oriented(problem.edges, k, parent), (k, parent)) for k, parent in self.inner}
        )
        for kernel in self.kernels.values():
            kernel.start(problem.reg)
        self.ends: list[int] = np.cumsum([problem.shape[parent] for _, parent in self.inner]).tolist()
        # What passes from one edge to the next at each marginal is reg / (rho + reg). On chains of three and of ten,
        # reg .01 to .05, rho .05 to 10, Anderson's weights of each edge for itself saved a tenth to a third of the
        # passes while these were small together, and cost as many again where they were not.
        self.alone = max(0.0, 1 - 2 * sum(1 - x.fi(problem.reg) for x in problem.marginals))

    def start(self, state: F64 | None = None) -> F64:
        """Where to begin: u and messages 1, or those of a larger reg, whose logarithms are given times the ratio."""
        return np.zeros(self.ends[-1]) if state is None else state

    def split(self, state: F64) -> Messages:
        return {k: x for (k, _), x in zip(self.inner, np.split(state, self.ends[:-1]), strict=True)}

    def sweep(self, state: F64, narrow: bool = False) -> State:
        """The pass of a state: log u_l and all messages to l but that from k, for each k and its parent l."""
        problem, sent = self.problem, self.split(state)
        count = len(problem.marginals)
        log_u, near, self.late = [np.zeros(0)] * count, [np.zeros(0)] * count, {}
        self.errors: dict[int, float] = {}
        up: Messages = {}
        for k, parent in reversed(self.order):
            x = problem.marginals[k]
            near[k] = sum((up[i] for i in self.children[k]), np.zeros(problem.shape[k]))
            if parent >= 0:
                fi, y = x.fi(problem.reg), problem.marginals[parent].log_weight + sent[k]
                a = x.log_weight + (1 - fi) * near[k]
                self.late[k], up[k], self.errors[k] = self.kernels[k].through(y, a, fi, narrow)
            log_u[k] = prox(x, near[k] + self.late.get(k, 0.0), problem.reg)
        self.parts: dict[int, F64] = {}  # of the mass at each point, by marginal
        self.near, self.builds = near, {k: x.builds for k, x in self.kernels.items()}
        masses = problem.log_sums(
            self.root, problem.marginals[self.root].log_weight + log_u[self.root] + near[self.root]
        )
        return State(log_u, [], log_sum(masses), sum(self.errors.values()), self.storage, up, by_part=masses)

    @property
    def storage(self) -> float:
        return sum(x.storage for x in self.kernels.values())

    def complete(self, found: State) -> None:
        """The messages from the root, for the u and the messages to the root of the last pass."""
        problem, errors = self.problem, self.errors  # a marginal is made of one product of each edge: the worse one
        log_s = [np.zeros(0)] * len(self.order)
        for k, _ in self.order:
            log_s[k] = self.near[k] + found.back.get(k, 0.0)
            for i in self.children[k]:
                belief = problem.marginals[k].log_weight + found.log_u[k] + log_s[k] - found.up[i]
                found.back[i], error = self.kernels[i].into_rows(belief)
                anew = self.kernels[i].builds > self.builds[i]  # stored in float32, its rounding is another one now
                errors[i] = max(errors[i], error) + (2 * NARROW_ENTRY if anew and found.storage else 0.0)
        found.log_s, found.rounding, found.storage = log_s, sum(errors.values()), max(found.storage, self.storage)

    def shares(self, lam: F64) -> F64:
        """What each message to the root takes of the translation: that of all u that it holds."""
        below = lam.copy()
        for k, parent in reversed(self.inner):
            below[parent] += below[k]
        return below

    def translated(self, state: State, lam: F64) -> State:
        each, below, total = self.problem.each, self.shares(lam), lam.sum(0)
        moved = state.translated(self.problem, lam)
        moved.up = {k: x + each(self.parent[k], below[k]) for k, x in state.up.items()}
        moved.back = {k: x + each(k, total - below[k]) for k, x in state.back.items()}
        return moved

    def image(self, found: State, lam: F64, exact: bool) -> F64:
        """What each parent sends next, from the plan found, which ``lam`` has moved; exact: as its u are."""
        each, below, total = self.problem.each, self.shares(lam), lam.sum(0)
        late = found.back if exact else {k: x + each(k, total - below[k]) for k, x in self.late.items()}
        arrived = {k: sum((found.up[i] for i in self.children[k]), np.zeros(1)) for k, _ in self.order}
        return np.concatenate([found.log_u[p] + late.get(p, 0.0) + (arrived[p] - found.up[k]) for k, p in self.inner])

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        """(gap, what hard marginals miss) if marginals were off by what their parents' messages have changed."""
        gap, hard, problem = 0.0, 0.0, self.problem
        for (k, p), change in zip(self.inner, np.split(residual, self.ends[:-1]), strict=True):
            x, weight = problem.marginals[k], self.mass_at(p, found)
            if x.hard:
                hard += float(weight @ np.abs(change))
            else:
                gap += 0.5 * x.rho * float(weight @ np.square(change))
        return gap, hard

    def mass_at(self, k: int, found: State) -> F64:
        """The marginal of the plan of the last pass, by messages from the root that are late."""
        if k not in self.parts:
            raw = self.problem.marginals[k].log_weight + found.log_u[k] + self.near[k] + self.late.get(k, 0.0)
            with np.errstate(over="ignore", invalid="ignore"):
                part = np.exp(raw - raw.max())
            self.parts[k] = part / part.sum()
        return found.mass * self.parts[k]

    def metric(self, found: State) -> F64:
        """Weights of the state's entries in the norm of the extrapolation: the mass at their points."""
        return np.concatenate([self.mass_at(p, found) for _, p in self.inner])

    # ---- products of a whole state's plan ----

    def apply(self, i: int, j: int, Y: F64, state: State) -> F64:
        """P_ij Y, along the path from j to i: what a marginal expects of Y is what its neighbour expects."""
        path = dict(walk(self.problem.edges, j)[1])
        steps = [i]
        while steps[-1] != j:
            steps.append(path[steps[-1]])
        for near, k in zip(steps[::-1], steps[-2::-1], strict=False):
            child = k if self.parent[k] == near else near
            Y = self.kernels[child].plan_apply(*self.beliefs(child, state), Y, int(child == k))
            if k != i:
                r = state.marginal(self.problem, k)[:, None]
                Y = np.divide(Y, r, out=np.zeros_like(Y), where=r > 0)
        return Y

    def stored_pair(self, i: int, j: int, state: State) -> Any:
        """P_ij of two neighbours whose cost is a sparse one, as a CSR array."""
        child = i if self.parent[i] == j else j
        (x, y), kernel = self.beliefs(child, state), self.kernels[child]
        cost: Any = kernel.cost
        P = cost.with_data(np.exp(x[cost.row_numbers()] + y[cost.column] + kernel.stored_logarithms()))
        return P if child == i else P.T.tocsr()

    def beliefs(self, child: int, state: State) -> tuple[F64, F64]:
        """x, y of the coupling exp(x_i + y_j - C_ij / reg) of a marginal and its parent."""
        parent = self.parent[child]
        both = ((child, state.back[child]), (parent, state.up[child]))
        x, y = (self.problem.marginals[k].log_weight + state.log_u[k] + state.log_s[k] - z for k, z in both)
        return x, y

    def cost(self, state: State) -> float:
        return sum(kernel.plan_cost(*self.beliefs(k, state)) for k, kernel in self.kernels.items())


def root_of(problem: MultiProblem) -> int:
    """The marginal nearest to the farthest one, of the hard ones where there are some: the certified plan meets it."""
    hard = [k for k, x in enumerate(problem.marginals) if x.hard]

    def height(root: int) -> int:
        far: dict[int, int] = {-1: -1}
        for k, parent in walk(problem.edges, root)[1]:
            far[k] = far[parent] + 1
        return max(far.values())

    return min(hard or range(len(problem.marginals)), key=height)
