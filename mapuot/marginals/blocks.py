"""Costs that tie all marginals at once: an array with one axis each, or the triangle of three pairwise costs.

One marginal is set apart, the others are solved on what it leaves of the kernel. With w_k = masses_k u_k,

    s_0 = <T_i, w_1 w_2 ...>,     u_0 = prox(s_0),     W = sum_i w_0i T_i,     then u_1, u_2, ... on W, each in turn.

An array is a matrix with one row for each point of the marginal set apart, which a pass reads once for both s_0 and
W, as row_pass does (`Tensor`); a triangle T_ijk = K01_ij K02_ik K12_jk is never formed, s_0 and W are a matrix
product each (`Triangle`). W has one axis less than T. The state is log u_1, log u_2, ...; the plan of u_0 and the
state before is certified, whose marginals are sums of W. Kernels are T_ijk e^(shift_0i + shift_1j + ...), so that
products stay within float64; log w less the shifts is what multiplies them. Matrices lie where ``problem.xp`` has
them, vectors on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.log_matmul import log_matmul
from ..backends import load
from ..backends.contract import host, namespace
from ..backends.kernel import (
    FLUSH_PRODUCT,
    HOST_ENTRIES,
    LEAST,
    LEAST_PRODUCT,
    NARROW_SUMS,
    LogKernel,
    StaleError,
    check_sums,
    largest_of,
)
from ..penalties import F64
from .ascend import UNIT, UnderflowError, translation
from .coarse import Coarse
from .problem import MultiProblem
from .reach import oriented
from .state import PerPoint, State, prox

if TYPE_CHECKING:
    from ..backends.cpu.left import Left

STEPS = 2  # on W a pass: as many each time, since Anderson's differences are those of one map


def checked(sums: F64, least: float) -> F64:
    check_sums(sums.min(), sums.max(), least)
    return sums


def scaled(log_x: F64) -> tuple[F64, float]:
    """(e^(log_x - top), top), what lies below FLUSH_PRODUCT as 0."""
    top = float(log_x.max())
    x = np.exp(log_x - top)
    x[x < FLUSH_PRODUCT] = 0.0
    return x, top


class Blocks:
    """The passes; ``order`` puts the marginal that is set apart first: a hard one, which the plan then meets.

    ``before``: those of another reg, whose kernels make room.
    """

    coarse: Coarse | None = None  # marginals are solved on W together

    def __init__(self, problem: MultiProblem, before: Blocks | None = None) -> None:
        self.problem = problem
        hard = [k for k, x in enumerate(problem.marginals) if x.hard]
        apart = hard[0] if hard else next(k for k, x in enumerate(problem.marginals) if not x.free)
        self.first = first = problem.marginals[apart]
        self.order = [apart, *(k for k in range(len(problem.marginals)) if k != apart)]
        others, self.hole = [problem.marginals[k] for k in self.order[1:]], problem.places[apart]
        self.sizes = [len(first.kept), *(len(x.kept) for x in others)]
        self.ends, self.alone = [sum(self.sizes[1:])], 0.0
        fi, threads = [x.fi(problem.reg) for x in others], problem.threads if problem.xp is np else 1
        self.left: Left = load("cpu").Left(self.sizes[1:], self.others(problem.log_weight), fi, threads)
        soft, self.hard = (self.others(np.repeat(kind, problem.shape)) for kind in problem.kinds)
        self.rhos = np.where(soft, self.others(np.repeat(problem.rho, problem.shape)), 0.0)
        self.steps = STEPS if np.count_nonzero(fi) > 1 else 1
        if before:
            before.kernel.start(problem.reg)
        kind = Tensor if problem.array is not None else Triangle
        self.kernel: Tensor | Triangle = before.kernel if before else kind(problem, self.order)

    def start(self, state: F64 | None = None) -> F64:
        """Where to begin: potentials 0, or those of a larger reg, whose logarithms are given times the ratio."""
        state = np.zeros(self.ends[-1]) if state is None else state
        self.absorb(state)
        return state

    def absorb(self, state: F64) -> None:
        self.kernel.absorb([np.zeros(self.sizes[0]), *(state[part] for part in self.left.parts)])
        self.left.around(self.kernel.shift[1:])
        self.shift_size = sum(map(largest_of, self.kernel.shift))

    def sweep(self, state: F64, narrow: bool) -> State:
        while True:
            try:
                return self.read(state, narrow)
            except StaleError:
                self.absorb(state)

    def read(self, state: F64, narrow: bool) -> State:
        first, left, problem, kernel = self.first, self.left, self.problem, self.kernel
        left.factors(state)
        R, W, base, least = kernel.read(left, first.log_weight, first.fi(problem.reg), narrow)
        left.read(W, base, least)
        log_u0 = prox(first, R, problem.reg)
        log_u, log_s = self.in_order(log_u0, left.log_u), self.in_order(R, left.log_s)
        kernel.fresh = False
        terms = self.shift_size + left.shift_size
        terms += sum(float(np.maximum.reduceat(np.abs(x.flat), problem.starts).sum()) for x in (log_u, log_s))
        rounding = UNIT * (8 * (terms + problem.largest / problem.reg) + kernel.terms + sum(self.sizes) + 32)
        rounding += NARROW_SUMS if narrow else 0.0
        return State(log_u, log_s, left.log_mass, rounding, kernel.storage)

    def in_order(self, first: F64, others: F64) -> PerPoint:
        """Numbers of the points of the marginals as they are numbered."""
        at = self.hole.start
        return PerPoint(np.concatenate((others[:at], first, others[at:])), self.problem.places)

    def others(self, flat: F64) -> F64:
        """Of all marginals but the one set apart."""
        return np.concatenate((flat[: self.hole.start], flat[self.hole.stop :]))

    def complete(self, found: State) -> None:
        """It is whole."""

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        """(gap, what hard marginals miss) if marginals were off by the change of their potentials."""
        r = self.metric(found)
        return 0.5 * float(self.rhos * r @ np.square(residual)), float(self.hard * r @ np.abs(residual))

    def translated(self, state: State, lam: F64) -> State:
        return state.translated(self.problem, lam)

    def image(self, state: State, lam: F64, exact: bool) -> F64:
        """The potentials of all marginals but the first, best for its u: each in turn on W, and all translated."""
        left, log_u0 = self.left, state.log_u[self.order[0]]
        left.move(lam[self.order, 0])
        try:
            left.turn(given=True)
            for _ in range(1, self.steps):
                moved = State(self.in_order(log_u0, left.log_u), None, left.log_mass, 0.0)
                shifts = translation(self.problem, moved)[self.order, 0]
                log_u0 = log_u0 + shifts[0]
                left.move(shifts)
                left.turn(given=False)
        except StaleError:
            pass  # what it came to is as good a state as any
        return left.log_u.copy()

    def metric(self, state: State) -> F64:
        assert state.log_s is not None
        with np.errstate(over="ignore"):
            return self.others(np.exp(self.problem.log_weight + state.log_u.flat + state.log_s.flat))

    # ---- products of the plan of a state ----

    def apply(self, i: int, j: int, Y: F64, state: State) -> F64:
        return self.pair(i, j, state) @ Y

    def pair(self, i: int, j: int, state: State) -> F64:
        log_w = [x.log_weight + u for x, u in zip(self.problem.marginals, state.log_u, strict=True)]
        return self.kernel.pair(i, j, log_w)

    def cost(self, state: State) -> float:
        log_w = [x.log_weight + u for x, u in zip(self.problem.marginals, state.log_u, strict=True)]
        return self.kernel.cost(log_w)


class Tensor:
    """The kernel of an array: at most 1, and 1 somewhere in each slice of each axis."""

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.problem, self.reg, self.shape = problem, problem.reg, [problem.shape[k] for k in order]
        self.kernel: LogKernel = problem.kernel(problem.array.matrix(order[0]), "all")
        self.terms = self.kernel.cost.shape[1]
        self.fresh = False

    def start(self, reg: float) -> None:
        self.reg, self.fresh = reg, False
        self.kernel.start(reg)

    @property
    def storage(self) -> float:
        return self.kernel.storage

    def absorb(self, log_u: list[F64]) -> None:
        """K around potentials: their plan without the masses, each slice divided by its largest entry, axis by axis."""
        if self.fresh:
            if self.kernel.dtype != "float32":
                raise UnderflowError
            self.kernel.dtype = "float64"
        y = sum(spread(x, m, len(self.shape) - 1) for m, x in enumerate(log_u[1:]))
        self.tops = log_u[1:]  # of a K that holds e^(-C / reg) but for a factor: a read less, .8 to .96 of a solve
        y = np.ascontiguousarray(np.broadcast_to(y, self.shape[1:])).ravel()
        self.fresh = self.kernel.absorb(y, self.kernel.builds > 0, self.folded)
        self.shift = [self.kernel.p, *(x - top for x, top in zip(log_u[1:], self.tops, strict=True))]

    def folded(self, top: F64) -> F64:
        """The largest terms of the slices of each axis, one axis after the other."""
        rest, self.tops = top.reshape(self.shape[1:]), []
        total = np.zeros(rest.shape)
        for m in range(rest.ndim):
            self.tops.append(rest.max(tuple(k for k in range(rest.ndim) if k != m)))
            rest = rest - spread(self.tops[m], m, rest.ndim)
            total += spread(self.tops[m], m, rest.ndim)
        return total.ravel()

    def read(self, left: Left, log_weight: F64, fi: float, narrow: bool) -> tuple[F64, Any, float, float]:
        """(log s_0, W, its base, the least of its sums) in one read, for log u_0 = -fi log s_0."""
        R, W, base, least = self.kernel.read_factors(left.product, float(left.top.sum()), log_weight, fi, narrow)
        if self.kernel.dtype != "float32":
            least *= LEAST_PRODUCT / LEAST["float64"]
        return R, W, base, least

    def pair(self, i: int, j: int, log_w: list[F64]) -> F64:
        shape, others = self.problem.shape, tuple(k for k in range(len(self.shape)) if k not in (i, j))
        out = np.zeros((shape[min(i, j)], shape[max(i, j)]))
        for i0, i1, P, _ in self.plan(log_w):
            part = P.sum(others)
            if 0 in (i, j):
                out[i0:i1] = part
            else:
                out += part
        return out if i < j else out.T

    def plan(self, log_w: list[F64]) -> Any:
        """Slabs (i0, i1, P, C) of the plan along the first axis as given, from C in float64."""
        rest = sum(spread(log_w[k], k, len(log_w)) for k in range(1, len(log_w)))
        for i0, i1, C in self.problem.array.blocks():
            yield i0, i1, np.exp(spread(log_w[0][i0:i1], 0, C.ndim) + rest - C / self.reg), C

    def cost(self, log_w: list[F64]) -> float:
        return float(sum((P[P > 0] * C[P > 0]).sum() for _, _, P, C in self.plan(log_w)))


def spread(x: F64, axis: int, ndim: int) -> F64:
    """A vector along one axis of so many."""
    return x.reshape([-1 if k == axis else 1 for k in range(ndim)])


def few_here(W: Any) -> Any:
    """W on the host if its entries are few."""
    return host(W) if W.size <= HOST_ENTRIES else W


PAIRS = ((0, 1), (0, 2), (1, 2))


class Triangle:
    """Three pairwise kernels, at most 1, and 1 somewhere in each row and column; each has half of its two potentials.

    Where their products leave float64 in kernels made anew, the products are made on logarithms (`log_matmul`).
    """

    storage = 0.0

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.problem, self.order, self.reg, self.xp = problem, order, problem.reg, problem.xp
        self.edges = {pair: self.on_device(C) for pair, C in problem.edges.items()}
        self.C = [oriented(self.edges, order[k], order[m]) for k, m in PAIRS]
        self.terms = sum(problem.shape)
        self.fresh = self.on_logs = False

    def on_device(self, cost: Any) -> Any:
        return cost.array if namespace(cost.array) is self.xp else self.xp.asarray(np.asarray(cost))

    def start(self, reg: float) -> None:
        self.reg, self.fresh, self.on_logs = reg, False, False

    def absorb(self, log_u: list[F64]) -> None:
        if self.on_logs:
            raise UnderflowError
        xp = self.xp
        self.on_logs, self.fresh = self.fresh, True
        self.shift, self.K = [np.zeros(len(x)) for x in log_u], []
        for C, (k, m) in zip(self.C, PAIRS, strict=True):
            K = xp.asarray(C, np.float64) / -self.reg
            if not self.on_logs:
                K += xp.asarray(0.5 * log_u[k])[:, None]
                K += xp.asarray(0.5 * log_u[m])
                rows = K.max(1)
                K -= rows[:, None]
                cols = K.max(0)
                K -= cols
                xp.exp(K, out=K)
                K *= K >= FLUSH_PRODUCT
                self.shift[k] += 0.5 * log_u[k] - host(rows)
                self.shift[m] += 0.5 * log_u[m] - host(cols)
            self.K.append(K)

    def read(self, left: Left, log_weight: F64, fi: float, narrow: bool) -> tuple[F64, Any, float, float]:
        """(log s_0, W, its base, the least of its sums) in two matrix products, for log u_0 = -fi log s_0."""
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

    def read_logs(self, left: Left, log_weight: F64, fi: float) -> tuple[F64, Any, float, float]:
        """The same; W is the plan of two marginals, divided by its largest entries by rows, then by columns."""
        (L01, L02, L12), xp = self.K, self.xp
        log_w = left.log_weight + left.log_u
        x1, x2 = (xp.asarray(log_w[part]) for part in left.parts)
        product = log_matmul(L02 + x2, L12.T) + L01 + x1
        top = product.max(1)
        R = host(top + xp.log(xp.exp(product - top[:, None]).sum(1)))
        W = log_matmul((L01 + xp.asarray(log_weight - fi * R)[:, None]).T, L02) + L12 + x1[:, None] + x2
        rows = W.max(1)
        W -= rows[:, None]
        cols = W.max(0)
        W -= cols
        left.around([host(x1 - rows), host(x2 - cols)])
        left.factors(left.log_u)
        return R, few_here(xp.exp(W, out=W)), 0.0, LEAST_PRODUCT

    def pair(self, i: int, j: int, log_w: list[F64]) -> F64:
        found: F64 = host(self.coupling(i, j, log_w))
        return found

    def coupling(self, i: int, j: int, log_w: list[F64]) -> Any:
        """The third marginal summed over by a product on logarithms."""
        L = {pair: self.xp.asarray(C, np.float64) / -self.reg for pair, C in self.edges.items()}
        third, x = 3 - i - j, [self.xp.asarray(w) for w in log_w]
        log_pair = log_matmul(oriented(L, i, third) + x[third], oriented(L, third, j)) + oriented(L, i, j)
        return self.xp.exp(log_pair + x[i][:, None] + x[j])

    def cost(self, log_w: list[F64]) -> float:
        total = 0.0
        for (i, j), C in self.edges.items():
            P = self.coupling(i, j, log_w)
            total += float((P * self.xp.where(P > 0, C, 0.0)).sum())
        return total
