"""Costs that couple all marginals: an array with one axis for each marginal, or the triangle of three pairwise costs.

One marginal (index 0) is eliminated in each pass. The others are solved on W, the kernel summed over its points. With
the kernel T and w_k = masses_k u_k,

    s_0 = <T_i, w_1 w_2 ...>,     u_0 = prox(s_0),     W = sum_i w_0i T_i,     then u_1, u_2, ... on W, each in turn.

W has one axis less than T. An array is a matrix with one row for each point of marginal 0; a pass reads it once for
both s_0 and W, like row_pass (`Tensor`). A triangle T_ijk = K01_ij K02_ik K12_jk is never formed; s_0 and W take one
matrix product each (`Triangle`). The state is log u_1, log u_2, ... A pass certifies the plan of u_0 and the given
state; the marginals of this plan are sums of W. Stored kernels are T_ijk e^(shift_0i + shift_1j + ...), multiplied by
w e^(-shift), so that products stay within float64. Matrices lie on the device of ``problem.xp``, vectors on the host.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import host, namespace
from ..backends import load
from ..backends.kernel import (
    FLUSH_PRODUCT,
    LEAST,
    LEAST_PRODUCT,
    NARROW_SUMS,
    UNIT,
    LogKernel,
    StaleError,
    checked,
    largest_of,
    scaled,
    sound,
)
from ..backends.log_matmul import multiply
from ..backends.settings import KERNELS
from ..penalties import F64
from .certificate import CertifiedBody
from .problem import MultiProblem
from .reach import oriented
from .state import PerPoint, State

if TYPE_CHECKING:
    from ..backends.cpu.marginals import RemainingMarginals

STEPS = 2  # sweeps on W in a pass; constant, since Anderson's step needs the same map in every pass


class JointBlocks(CertifiedBody):
    """Passes over a cost of all marginals; ``before``: the passes at another reg, to reuse the memory of their kernels.

    ``order`` lists the eliminated marginal first: a hard marginal, if there is one, since the plan meets it exactly.
    """

    def __init__(self, problem: MultiProblem, before: "JointBlocks | None" = None) -> None:
        super().__init__(problem)
        hard = [k for k, x in enumerate(problem.marginals) if x.hard]
        if hard:
            apart = hard[0]
        else:
            apart = next(k for k, x in enumerate(problem.marginals) if not x.free)
        self.first = first = problem.marginals[apart]
        self.order = [apart, *(k for k in range(len(problem.marginals)) if k != apart)]
        others = [problem.marginals[k] for k in self.order[1:]]
        self.hole = problem.places[apart]
        self.sizes = [len(first.kept), *(len(x.kept) for x in others)]
        self.ends = [sum(self.sizes[1:])]
        fi = [problem.fi[k] for k in self.order[1:]]
        if problem.xp is np:
            threads = problem.threads
        else:
            threads = 1
        self.left: RemainingMarginals = load("cpu").remaining_marginals(
            self.sizes[1:], self.others(problem.log_weight), fi, threads
        )
        rhos = self.others(np.repeat(problem.rho, problem.shape))
        self.hard = np.isinf(rhos)
        self.rhos = np.where(self.hard, 0.0, rhos)
        self.steps = STEPS if np.count_nonzero(fi) > 1 else 1
        if before:
            before.kernel.start(problem.reg)
        if problem.array is not None:
            kind: Any = Tensor
        else:
            kind = Triangle
        if before:
            self.kernel: Tensor | Triangle = before.kernel
        else:
            self.kernel = kind(problem, self.order)
        self.fresh = False  # whether the kernel was built around the state of the next pass

    def start(self, state: F64) -> F64:
        """Build the kernel around a state, and return the state."""
        self.absorb(state)
        return state

    def absorb(self, state: F64) -> None:
        """Build the kernel around a state."""
        self.fresh = self.kernel.absorb([np.zeros(self.sizes[0]), *(state[part] for part in self.left.parts)])
        self.left.around(self.kernel.shift[1:])
        self.shift_size = sum(map(largest_of, self.kernel.shift))

    def sweep(self, state: F64, narrow: bool) -> State:
        """Make a pass; narrow: sums may be in float32."""
        found = sound(lambda: self.read(state, narrow), lambda: self.absorb(state), self.kernel.finer, self.fresh)
        self.fresh = False
        return found

    def read(self, state: F64, narrow: bool) -> State:
        first, left, problem, kernel = self.first, self.left, self.problem, self.kernel
        left.factors(state)
        R, W, base, least = kernel.read(left, first.log_weight, problem.fi[self.order[0]], narrow)
        left.read(W, base, least)
        log_u0 = problem.prox(self.order[0], R)
        log_u = self.in_order(log_u0, left.log_u)
        log_s = self.in_order(R, left.log_s)
        terms = self.shift_size + left.shift_size
        terms += sum(float(np.maximum.reduceat(np.abs(x.flat), problem.starts).sum()) for x in (log_u, log_s))
        rounding = UNIT * (8 * (terms + problem.largest / problem.reg) + kernel.terms + sum(self.sizes) + 32)
        rounding += NARROW_SUMS if narrow else 0.0
        return State(log_u, log_s, left.log_mass, rounding, kernel.storage)

    def in_order(self, first: F64, others: F64) -> PerPoint:
        """Join numbers of the eliminated marginal's points and of all other points in the order of the marginals."""
        at = self.hole.start
        return PerPoint(np.concatenate((others[:at], first, others[at:])), self.problem.places)

    def others(self, flat: F64) -> F64:
        """Return the numbers of all marginals except the eliminated one."""
        return np.concatenate((flat[: self.hole.start], flat[self.hole.stop :]))

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        """Estimate (gap, missed mass of hard marginals) from the change of the potentials in this pass."""
        r = self.metric(found)
        return 0.5 * float(self.rhos * r @ np.square(residual)), float(self.hard * r @ np.abs(residual))

    def image(self, state: State, exact: bool) -> F64:
        """Return the next state: optimise the other potentials in turn on W for the new u_0, and translate all."""
        left = self.left
        log_u0 = state.log_u[self.order[0]]
        left.move(self.lam[self.order, 0])
        try:
            left.turn(given=True)
            for _ in range(1, self.steps):
                moved = State(self.in_order(log_u0, left.log_u), None, left.log_mass, 0.0)
                shifts = self.problem.points.translation(moved.log_masses, moved.log_u.flat)[self.order, 0]
                log_u0 = log_u0 + shifts[0]
                left.move(shifts)
                left.turn(given=False)
        except StaleError:
            pass  # keep the potentials reached so far
        return left.log_u.copy()

    def metric(self, state: State) -> F64:
        """Return weights of the state's entries for Anderson's step: the mass at their points."""
        return self.others(state.marginals(self.problem))

    # ---- products with the plan of a state ----

    def tangent(self, found: State) -> Callable[[F64], F64]:
        product = self.kernel.tangent(self.log_w(found))
        places = [self.problem.places[k] for k in self.order]

        def at_points(d: F64) -> F64:
            first, *others = product([d[place] for place in places])
            return self.in_order(first, np.concatenate(others)).flat

        return at_points

    def stepped(self, found: State, y: F64) -> F64:
        return self.others(found.log_u.flat + y)

    def apply(self, i: int, j: int, Y: F64, state: State) -> F64:
        """Return P_ij Y."""
        P: F64 = host(self.kernel.pair(self.order.index(i), self.order.index(j), self.log_w(state)))
        return P @ Y

    def cost(self, state: State) -> float:
        """Return <P, C>."""
        return self.kernel.plan_cost(self.log_w(state))

    def log_w(self, state: State) -> list[F64]:
        """Return log w, in the order of the kernel."""
        return [self.problem.marginals[k].log_weight + state.log_u[k] for k in self.order]


class Tensor:
    """The kernel of an array: entries are at most 1; a balanced kernel has an entry 1 in each slice of each axis."""

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.shape = [problem.shape[k] for k in order]
        self.kernel: LogKernel = problem.kernel(problem.array.matrix(order[0]), "all")
        self.start, self.finer = self.kernel.start, self.kernel.finer
        self.terms = self.kernel.cost.shape[1]

    @property
    def storage(self) -> float:
        return self.kernel.storage

    def absorb(self, log_u: list[F64]) -> bool:
        """Build K around potentials: the plan without masses, with each slice divided by its largest entry."""
        # unless `folded` is called, K is e^(-C / reg) up to a factor: one read less, .8 to .96 of a solve's time
        self.tops = log_u[1:]
        balanced = self.kernel.absorb(self.sum_of(log_u[1:]), self.kernel.builds > 0, self.folded)
        self.shift = [self.kernel.p, *(x - top for x, top in zip(log_u[1:], self.tops, strict=True))]
        return balanced

    def sum_of(self, log_x: list[F64]) -> F64:
        """Add up numbers of all marginals except the first: one sum for each column."""
        total = sum(along_axis(x, m, len(log_x)) for m, x in enumerate(log_x))
        return np.ascontiguousarray(np.broadcast_to(total, self.shape[1:])).ravel()

    def folded(self, top: F64) -> F64:
        """Return the sums of the slices' largest terms, found along one axis after the other."""
        rest = top.reshape(self.shape[1:])
        self.tops = []
        total = np.zeros(rest.shape)
        for m in range(rest.ndim):
            self.tops.append(rest.max(tuple(k for k in range(rest.ndim) if k != m)))
            rest = rest - along_axis(self.tops[m], m, rest.ndim)
            total += along_axis(self.tops[m], m, rest.ndim)
        return total.ravel()

    def read(
        self, left: "RemainingMarginals", log_weight: F64, fi: float, narrow: bool
    ) -> tuple[F64, Any, float, float]:
        """Return (log s_0, W, log scale of W, least valid sum) by one read, with log u_0 = -fi log s_0."""
        terms = left.factor, float(left.top.sum()), log_weight, fi, narrow
        R, W, base, least = self.kernel.read_factors(*terms, left.size)
        if self.kernel.dtype != "float32":
            least *= LEAST_PRODUCT / LEAST["float64"]
        return R, W, base, least

    def pair(self, i: int, j: int, log_w: list[F64]) -> Any:
        """Return the coupling of two axes, added up over blocks of rows."""
        others = tuple(k for k in range(len(self.shape)) if k not in (i, j))
        out = np.zeros((self.shape[min(i, j)], self.shape[max(i, j)]))
        rest = self.sum_of(log_w[1:])
        for i0, i1, L in self.kernel.operator.logarithms(self.kernel.cost):
            xp = namespace(L)
            P = xp.exp(L + xp.asarray(rest) + xp.asarray(log_w[0][i0:i1, None]))
            out[slice(i0, i1) if 0 in (i, j) else slice(None)] += host(P.reshape(-1, *self.shape[1:]).sum(others))
        return out if i < j else out.T

    def tangent(self, log_w: list[F64]) -> Callable[[list[F64]], list[F64]]:
        """Return a function d -> sum_l P_kl d_l for each axis k, made of products of the plan with vectors."""
        plan = self.kernel.operator.set_exponents(log_w[0], self.sum_of(log_w[1:]))
        ndim = len(self.shape) - 1
        others = host(plan.apply_transpose(np.ones(self.shape[0]))).reshape(self.shape[1:])  # their joint marginal

        def product(d: list[F64]) -> list[F64]:
            x = self.sum_of(d[1:])
            sums = host(plan.apply_transpose(d[0])).reshape(self.shape[1:]) + others * x.reshape(self.shape[1:])
            own = [(sums - others * along_axis(z, m, ndim)) for m, z in enumerate(d[1:])]
            rest = [z.sum(tuple(k for k in range(ndim) if k != m)) for m, z in enumerate(own)]
            return [host(plan.apply(x)), *rest]

        return product

    def plan_cost(self, log_w: list[F64]) -> float:
        return self.kernel.plan_cost(log_w[0], self.sum_of(log_w[1:]))


def along_axis(x: F64, axis: int, ndim: int) -> F64:
    """Reshape a vector to lie along one of ``ndim`` axes."""
    return x.reshape([-1 if k == axis else 1 for k in range(ndim)])


PAIRS = ((0, 1), (0, 2), (1, 2))


class Triangle:
    """Three pairwise kernels; each absorbs half of the potentials of its two marginals.

    If products leave float64 even with fresh kernels, products on logarithms replace them (`log_matmul`).
    """

    storage = 0.0

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.order = order
        self.xp = problem.xp
        self.terms = sum(problem.shape)
        self.on_logs = False
        self.kernels: dict[tuple[int, int], LogKernel] = {}
        for pair in PAIRS:
            i, j = (order[k] for k in pair)
            self.kernels[pair] = problem.kernel(oriented(problem.edges, i, j), (i, j))

    def start(self, reg: float) -> None:
        self.on_logs = False
        for kernel in self.kernels.values():
            kernel.start(reg)

    def finer(self) -> bool:
        """Switch to products on logarithms; return whether this is a change."""
        before, self.on_logs = self.on_logs, True
        return not before

    def absorb(self, log_u: list[F64]) -> bool:
        """Build the kernels around the columns' potentials; each row is divided by its largest entry."""
        self.shift = [np.zeros(len(x)) for x in log_u]
        if self.on_logs:
            self.K = [self.logarithms(*pair) for pair in PAIRS]
            return True
        for (k, m), kernel in self.kernels.items():
            kernel.absorb(0.5 * log_u[m])
            self.shift[k] += kernel.p
            self.shift[m] += kernel.q
        self.K = [kernel.operator.matrix for kernel in self.kernels.values()]
        for K in self.K:
            K[K < FLUSH_PRODUCT] = 0.0
        return True

    def logarithms(self, i: int, j: int) -> Any:
        """Return -C / reg of two marginals, with marginal i as rows."""
        kernel = self.kernels[min(i, j), max(i, j)]
        L = self.xp.concatenate([block for _, _, block in kernel.operator.logarithms(kernel.cost)])
        return L if i < j else L.T

    def read(
        self, left: "RemainingMarginals", log_weight: F64, fi: float, narrow: bool
    ) -> tuple[F64, Any, float, float]:
        """Return (log s_0, W, log scale of W, least valid sum) by two products, with log u_0 = -fi log s_0."""
        (K01, K02, K12), xp = self.K, self.xp
        if self.on_logs:
            return self.read_logs(left, log_weight, fi)
        x1, x2 = (xp.asarray(left.factor[part]) for part in left.parts)
        product = (K02 * x2) @ K12.T
        product *= K01
        sums = checked(host(product @ x1), LEAST_PRODUCT)
        R = np.log(sums) - self.shift[0] + left.top.sum()
        w, base = scaled(log_weight - fi * R - self.shift[0])
        W = (K01 * xp.asarray(w)[:, None]).T @ K02
        W *= K12
        return R, few_here(W), base, LEAST_PRODUCT

    def read_logs(self, left: "RemainingMarginals", log_weight: F64, fi: float) -> tuple[F64, Any, float, float]:
        """Do the work of `read` on logarithms; W is a plan, with each row and column divided by its largest entry."""
        (L01, L02, L12), xp = self.K, self.xp
        log_w = left.log_weight + left.log_u
        x1, x2 = (xp.asarray(log_w[part]) for part in left.parts)
        product = multiply(L02 + x2, L12.T) + L01 + x1
        top = product.max(1)
        R = host(top + xp.log(xp.exp(product - top[:, None]).sum(1)))
        W = multiply((L01 + xp.asarray(log_weight - fi * R)[:, None]).T, L02) + L12 + x1[:, None] + x2
        rows = W.max(1)
        W -= rows[:, None]
        cols = W.max(0)
        W -= cols
        left.around([host(x1 - rows), host(x2 - cols)])
        left.factors(left.log_u)
        return R, few_here(xp.exp(W, out=W)), 0.0, LEAST_PRODUCT

    def pair(self, i: int, j: int, log_w: list[F64]) -> Any:
        """Return the coupling of two marginals; a product on logarithms sums over the third marginal."""
        third = 3 - i - j
        x = [self.xp.asarray(w) for w in log_w]
        through = multiply(self.logarithms(i, third) + x[third], self.logarithms(third, j))
        return self.xp.exp(through + self.logarithms(i, j) + x[i][:, None] + x[j])

    def tangent(self, log_w: list[F64]) -> Callable[[list[F64]], list[F64]]:
        """Return a function d -> sum_l P_kl d_l for each marginal k, with the couplings P_kl formed."""
        P01, P02, P12 = (np.asarray(host(self.pair(*pair, log_w))) for pair in PAIRS)
        return lambda d: [P01 @ d[1] + P02 @ d[2], P01.T @ d[0] + P12 @ d[2], P02.T @ d[0] + P12.T @ d[1]]

    def plan_cost(self, log_w: list[F64]) -> float:
        total = 0.0
        for (i, j), kernel in self.kernels.items():
            P = self.pair(i, j, log_w)
            L = self.logarithms(i, j)
            total -= kernel.reg * float((P * self.xp.where(P > 0, L, 0.0)).sum())
        return total


def few_here(W: Any) -> Any:
    """Copy W to the host if it is small."""
    return host(W) if W.size <= KERNELS.host_entries else W
