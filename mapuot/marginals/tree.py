"""Chains, stars and all other trees of pairwise costs: a pass reads the kernel of each cost once.

With w_k = masses_k u_k, and messages m between neighbours k, l along the kernel of their cost,

    m_{k -> l} = K_lk (w_k prod_{i near k, i != l} m_{i -> k}),    s_k = prod_{i near k} m_{i -> k},    r_k = w_k s_k.

A pass goes from the leaves to the root. At the edge from k to its parent l it computes m_{l -> k} from the state of l
after the previous pass, sets u_k = prox(s_k), and sends m_{k -> l}. This is row_pass with the points of k as rows.
After the pass, all messages to the root and the mass of the plan belong to the new u. Messages from the root are one
pass old for each edge between. A step keeps only reg / (rho + reg) of an old message at each edge, so that the delay
costs few passes, and fewer with a root in the middle. On the CPU a pass is one call of src_c/tree.c; Python handles the
edges with kernels that must be rebuilt or do not serve this state. On a GPU Python handles all edges.
The state of an edge is w_l times all messages to l except m_{k -> l}: a pass needs nothing else, and Anderson's step
extrapolates it. ``complete`` reads each kernel once more and finds the messages from the root for the same u; they give
all marginals, and the certificate, of one plan.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from ..arrays import host
from ..backends import load
from ..backends.kernel import NARROW_ENTRY, LogKernel, largest_of, log_sum
from ..penalties import F64
from .certificate import CertifiedBody
from .coarse import TreeCoarse, serves
from .problem import MultiProblem
from .reach import oriented, path
from .state import PerPoint, State


class Tree(CertifiedBody):
    """Passes over a tree of costs; ``before``: the passes at another reg, to reuse their kernels' memory."""

    def __init__(self, problem: MultiProblem, before: "Tree | None" = None) -> None:
        super().__init__(problem)
        self.xp, self.root, self.order, self.inner = problem.xp, problem.root, problem.order, problem.inner
        self.parent = dict(self.order)
        self.children: dict[int, list[int]] = {k: [] for k in self.parent}
        for k, parent in self.order[1:]:
            self.children[parent].append(k)
        if before:
            self.kernels: dict[int, LogKernel] = before.kernels
        else:
            self.kernels = {
                k: problem.kernel(oriented(problem.edges, k, parent), (k, parent)) for k, parent in self.inner
            }
        for kernel in self.kernels.values():
            kernel.start(problem.reg)
        edges = [(k, parent, self.kernels[k], problem.fi[k]) for k, parent in self.inner]
        engine = load("cpu" if problem.xp is np else "cuda")
        self.whole_pass = engine.tree_pass(edges, problem)
        self.points = problem.points
        self.below = [k for k, _ in self.inner]
        starts = self.points.message.tolist()
        self.ends: list[int] = starts[1:]
        self.edges = {k: slice(i, j) for k, i, j in zip(self.below, starts, self.ends, strict=False)}
        if serves(problem):
            self.coarse: TreeCoarse | None = TreeCoarse(self, before.coarse if before else None)
        else:
            self.coarse = None
        # A marginal transmits reg / (rho + reg) of a change from one edge to the next. On chains of three and of ten
        # marginals, reg .01 to .05, rho .05 to 10, separate Anderson weights for each edge saved a tenth to a third of
        # the passes if the sum of these factors was small, and cost as many more passes if it was not.
        self.alone = max(0.0, 1 - 2 * sum(1 - fi for fi in problem.fi))

    def start(self, state: F64) -> F64:
        return state

    def sweep(self, state: F64, narrow: bool = False) -> State:
        """Make a pass from a state: for each k and parent l, log u_l plus the log messages to l from all but k.

        The next pass overwrites the vectors of the returned state; a translated state has its own vectors.
        """
        with self.coarse.one_pass() if self.coarse else nullcontext():
            return self.swept(state, narrow)

    def swept(self, state: F64, narrow: bool) -> State:
        problem = self.problem
        sent = PerPoint(state, self.edges)
        places = self.problem.places
        out = self.whole_pass.out
        log_u, self.near, self.late = (PerPoint(out[name], places) for name in ("log_u", "near", "late"))
        self.errors: dict[int, float] = {}
        up = PerPoint(out["up"], self.edges)
        done = 0
        self.near.flat.fill(0.0)
        for kernel in self.kernels.values():
            kernel.begin()
        close = partial(self.points.close, self.root, problem.fi[self.root], out, state)
        while done < len(self.inner):
            errors = self.whole_pass.run(done, state, narrow, close)
            self.errors |= {k: x for (k, _), x in zip(self.inner[done:], errors, strict=False)}
            done += len(errors)
            if done < len(self.inner):
                self.through(*self.inner[done], sent, log_u, up, narrow)
                done += 1
                if done == len(self.inner):
                    close()
        self.builds = {k: x.builds for k, x in self.kernels.items()}
        self.closed: Any = self.points.read()
        masses = self.closed.masses
        rounding = sum(self.errors.values())
        return State(log_u, None, log_sum(masses), rounding, self.storage, {"up": up}, masses)

    def through(self, k: int, parent: int, sent: PerPoint, log_u: PerPoint, up: PerPoint, narrow: bool) -> None:
        """Compute the messages of one edge; rebuild its kernel if necessary."""
        x = self.problem.marginals[k]
        near = host(self.near[k])
        problem = self.problem
        fi = problem.fi[k]
        y = problem.marginals[parent].log_weight + host(sent[k])
        a = x.log_weight + (1 - fi) * near
        late, up[k], self.errors[k] = self.kernels[k].through(y, a, fi, narrow)
        self.late[k] = late
        log_u[k] = problem.prox(k, near + late)
        self.near[parent] += up[k]

    @property
    def storage(self) -> float:
        return sum(x.storage for x in self.kernels.values())

    def complete(self, found: State) -> None:
        """Find the messages from the root for the u of the last pass, and with them all marginals."""
        problem, errors = self.problem, self.errors  # a marginal takes one product of each edge: count the worse error
        back = PerPoint(np.zeros_like(self.near.flat), problem.places)
        up = found.messages["up"]
        made = self.whole_pass.back(back.flat)
        log_s = PerPoint(self.near.flat + back.flat, problem.places)
        for (i, k), given in zip_longest(self.order[1:], made):
            error = given
            if given is None:
                belief = problem.marginals[k].log_weight + host(found.log_u[k] + log_s[k] - up[i])
                back[i], error = self.kernels[i].into_rows(belief)
                log_s[i] += back[i]
            anew = self.kernels[i].builds > self.builds[i]  # a rebuilt float32 kernel has new rounding errors
            errors[i] = max(errors[i], error) + (2 * NARROW_ENTRY if anew and found.storage else 0.0)
        found.messages["back"] = back
        found.log_s = log_s
        found.rounding = sum(errors.values())
        found.storage = max(found.storage, self.storage)

    def find(self, state: F64, narrow: bool) -> State:
        self.last = self.sweep(state, narrow)
        closed, self.lam = self.closed, self.closed.lam
        masses = closed.masses + self.lam.sum(0)
        up = PerPoint(closed.up, self.edges)
        log_u = PerPoint(closed.log_u, self.problem.places)
        worth = closed.worth
        return replace(
            self.last, log_u=log_u, log_mass=log_sum(masses), by_part=masses, messages={"up": up}, worth=worth
        )

    def translated(self, state: State, lam: F64) -> State:
        below = self.points.below(lam)
        points = self.points
        moved = state.translated(self.problem, lam)
        messages = state.messages
        moved.messages = {"up": messages["up"].moved(points.moved_messages, below)}
        if "back" in messages:
            moved.messages["back"] = messages["back"].moved(points.moved, lam.sum(0) - below)
        return moved

    def image(self, found: State, exact: bool) -> F64:
        """Return the next state from a translated plan; exact: from messages that all belong to the same u."""
        following: F64 = self.closed.sent
        if exact:
            moved = self.points.below(self.lam) - self.lam
            messages = found.messages  # near moves without its own lam
            vectors = found.log_u.flat, messages["back"].flat, self.near.flat, moved, messages["up"].flat
            following = self.points.at_edges(*vectors)
        return following

    def changed(self, image: F64, state: F64) -> tuple[F64, float]:
        closed = self.closed
        if image is closed.sent:
            return closed.change, closed.largest
        return super().changed(image, state)

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        """Guess (gap, missed mass of hard marginals) from the change of the messages of their parents."""
        closed = self.closed
        if residual is closed.change:
            found_sums = closed.sums
        else:
            found_sums = self.points.change_sums(self.metric(found), residual)
        sums = dict(zip(self.below, found_sums.tolist(), strict=True))
        gap = sum(self.problem.rho[k] * sums[k][0] for k in self.problem.soft if k in sums)
        return 0.5 * found.mass * gap, found.mass * sum(sums[k][1] for k in self.problem.hard if k in sums)

    def metric(self, found: State) -> F64:
        """Return weights of the state's entries: shares of the mass at their points, estimated with old messages."""
        shares: F64 = self.closed.shares
        return shares

    # ---- products with the plan of a complete state ----

    def tangent(self, found: State) -> Callable[[F64], F64]:
        r = found.marginals(self.problem)

        def product(d: F64) -> F64:
            return r * (self.spread_out(found, d)[0].flat - d)

        return product

    def spread_out(self, found: State, d: F64) -> tuple[PerPoint, dict[int, F64]]:
        """Return at each point the conditional mean of sum d over all marginals, and over marginals below each edge."""
        near = PerPoint(d.copy(), self.problem.places)
        below = {}
        for k, parent in self.inner:
            below[k] = self.expected(found, k, near[k], turned=True)
            near[parent] += below[k]
        for k, parent in self.order[1:]:
            near[k] += self.expected(found, k, near[parent] - below[k], turned=False)
        return near, below

    def expected(self, found: State, k: int, z: F64, turned: bool) -> F64:
        """Average z, given at the parent's points, under the coupling of edge k, for each point of its child.

        ``turned``: z is given at the child's points, and averaged for each point of the parent.
        """
        x, y = self.beliefs(k, found)
        c = 2 * largest_of(z)  # shift z: products on logarithms need z + c > 0
        if c == 0:
            return np.zeros(len(y if turned else x))
        log_z = np.log(z + c)
        up, back = (found.messages[way][k] for way in ("up", "back"))
        fi = self.problem.fi[k]
        if turned:  # in this pass R is back: the row factors are e^(x + log z)
            return np.asarray(np.exp(self.kernels[k].through(y, x + log_z + fi * back, fi)[1] - up) - c)
        return np.asarray(np.exp(self.kernels[k].into_rows(y + log_z)[0] - back) - c)

    def stepped(self, found: State, y: F64) -> F64:
        near, below = self.spread_out(found, y)
        out = np.empty(self.ends[-1])
        for k, parent in self.inner:
            sent = self.beliefs(k, found)[1] - self.problem.marginals[parent].log_weight
            out[self.edges[k]] = sent + near[parent] - below[k]
        return out

    def apply(self, i: int, j: int, Y: F64, state: State) -> F64:
        """Return P_ij Y: pass conditional means of Y along the path from j to i (the plan is a Markov chain on it)."""
        for near, k in pairwise(path(self.problem.edges, j, i)):
            child = k if self.parent[k] == near else near
            plan = self.kernels[child].operator.set_exponents(*self.beliefs(child, state))
            Y = np.asarray(host(plan.apply(Y) if child == k else plan.apply_transpose(Y)))
            if k != i:
                r = state.marginal(self.problem, k)[:, None]
                Y = np.divide(Y, r, out=np.zeros_like(Y), where=r > 0)
        return Y

    def stored_pair(self, i: int, j: int, state: State) -> Any:
        child = i if self.parent[i] == j else j
        x, y = self.beliefs(child, state)
        kernel = self.kernels[child]
        cost: Any = kernel.cost
        P = cost.with_data(np.exp(x[cost.row_numbers()] + y[cost.column] - cost.data.astype(np.float64) / kernel.reg))
        if child == i:
            return P
        return P.T.tocsr()

    def beliefs(self, child: int, state: State) -> tuple[F64, F64]:
        """Return x and y of the coupling exp(x_i + y_j - C_ij / reg) between a marginal and its parent."""
        parent = self.parent[child]
        assert state.log_s is not None
        both = ((child, state.messages["back"][child]), (parent, state.messages["up"][child]))
        x, y = (self.problem.marginals[k].log_weight + state.log_u[k] + state.log_s[k] - z for k, z in both)
        return x, y

    def cost(self, state: State) -> float:
        return sum(kernel.plan_cost(*self.beliefs(k, state)) for k, kernel in self.kernels.items())
