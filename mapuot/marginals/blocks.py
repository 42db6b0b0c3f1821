"""Costs that tie all marginals at once: an array with one axis each, or the triangle of three pairwise costs.

One marginal is set apart, the others are solved on what it leaves of the kernel. With w_k = masses_k u_k,

    s_0 = <T_i, w_1 w_2 ...>,     u_0 = prox(s_0),     W = sum_i w_0i T_i,     then u_1, u_2, ... on W until they rest.

An array T is read once for both s_0 and W, slab by slab (`Tensor`); a triangle T_ijk = K01_ij K02_ik K12_jk is never
formed, s_0 and W are a matrix product each (`Triangle`). W has one axis less than T. The state is log u_1, log u_2,
...; the plan of u_0 and the state before is certified, whose marginals are sums of W. Kernels are T_ijk e^(shift_0i +
shift_1j + ...), so that products stay within float64; log w less the shifts is what multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..log_matmul import log_matmul
from ..penalties import F64
from .ascend import UNIT, UnderflowError, log_sum, translation
from .problem import MultiProblem, oriented
from .state import State, prox

FLUSH, LEAST = 1e-100, 1e-75  # as in edge.py, for products of three factors
SLAB_ENTRIES = 1 << 17  # of an array, 1 MB: read for s_0, it is still in cache for W
INNER, RESTED = 30, 1e-2  # steps on W at most, and the share of the first change at which they end
FAR = 100.0  # the scale of w_0 by which a slab is folded may be off by so much, as a logarithm

Step = Callable[[int, int, F64], F64]  # logarithms of the sums of rows i0 to i1 -> those of what multiplies these rows


class StaleError(ArithmeticError):
    """Sums of the kernels at hand are too small: some of their terms may have been flushed."""


def contract(W: F64, factors: list[F64], k: int) -> F64:
    """W summed over all axes but k, each weighted by its factors."""
    for x in factors[:k:-1]:
        W = W @ x
    for x in factors[:k]:
        W = (x @ W.reshape(len(x), -1)).reshape(W.shape[1:])
    return W


@dataclass
class Left:
    """What one marginal leaves of the kernel, W e^(base - shift_1 - shift_2 ...)."""

    W: F64
    base: float
    shift: list[F64]  # of each axis

    def log_sums(self, factors: list[F64], tops: list[float], m: int) -> F64:
        """log s of the marginal of axis m - 1, from the others' factors, which are scaled by e^tops."""
        sums = checked(contract(self.W, factors, m - 1))
        return np.asarray(np.log(sums) - self.shift[m - 1] + (self.base + sum(tops) - tops[m - 1]))


def checked(sums: F64) -> F64:
    if not (sums.min() >= LEAST and sums.max() < np.inf):
        raise StaleError
    return sums


def scaled(log_x: F64) -> tuple[F64, float]:
    """(e^(log_x - top), top), what lies below FLUSH as 0."""
    top = float(log_x.max())
    x = np.exp(log_x - top)
    x[x < FLUSH] = 0.0
    return x, top


class Blocks:
    """The passes; ``order`` puts the marginal that is set apart first: a hard one, which the plan then meets."""

    def __init__(self, problem: MultiProblem) -> None:
        self.problem = problem
        hard = [k for k, x in enumerate(problem.marginals) if x.hard]
        apart = hard[0] if hard else next(k for k, x in enumerate(problem.marginals) if not x.free)
        self.order = [apart, *(k for k in range(len(problem.marginals)) if k != apart)]
        self.sizes = [problem.shape[k] for k in self.order]
        self.ends, self.alone = [sum(self.sizes[1:])], 0.0
        self.kernel = (Tensor if problem.array is not None else Triangle)(problem, self.order)

    def start(self, state: F64 | None = None) -> F64:
        """Where to begin: potentials 0, or those of a larger reg, whose logarithms are given times the ratio."""
        state = np.zeros(sum(self.sizes[1:])) if state is None else state
        self.kernel.absorb([np.zeros(self.sizes[0]), *self.split(state)])
        return state

    def split(self, state: F64) -> list[F64]:
        return np.split(state, np.cumsum(self.sizes[1:])[:-1])

    def log_w(self, log_u: list[F64], m: int) -> F64:
        return np.asarray(self.problem.marginals[self.order[m]].log_weight + log_u[m])

    def sweep(self, state: F64, narrow: bool) -> State:
        log_u = [np.zeros(self.sizes[0]), *self.split(state)]
        while True:
            try:
                return self.read(log_u)
            except StaleError:
                self.kernel.absorb(log_u)

    def read(self, log_u: list[F64]) -> State:
        first, reg = self.problem.marginals[self.order[0]], self.problem.reg
        log_s = [np.empty(n) for n in self.sizes]
        log_u = [np.empty(self.sizes[0]), *log_u[1:]]

        def step(i0: int, i1: int, sums: F64) -> F64:
            log_s[0][i0:i1] = sums
            log_u[0][i0:i1] = prox(first, sums, reg)
            return np.asarray(first.log_weight[i0:i1] + log_u[0][i0:i1])

        self.left = self.kernel.read([self.log_w(log_u, m) for m in range(1, len(log_u))], step)
        factors, tops = self.factors(log_u)
        for m in range(1, len(log_u)):
            log_s[m] = self.left.log_sums(factors, tops, m)
        terms = sum(float(np.abs(x).max()) for x in (*self.kernel.shift, *self.left.shift, *log_u, *log_s))
        rounding = UNIT * (8 * (terms + self.problem.largest / reg) + self.kernel.terms + sum(self.sizes) + 32)
        log_mass = log_sum(self.log_w(log_u, 0) + log_s[0])
        found = State([np.zeros(0)] * len(log_u), [np.zeros(0)] * len(log_u), log_mass, rounding)
        for m, k in enumerate(self.order):
            found.log_u[k], found.log_s[k] = log_u[m], log_s[m]
        return found

    def complete(self, found: State) -> None:
        """It is whole."""

    def guess(self, residual: F64, found: State) -> tuple[float, float]:
        raise NotImplementedError  # of whole ones nothing is guessed

    def translated(self, state: State, lam: F64) -> State:
        return state.translated(lam)

    def factors(self, log_u: list[F64]) -> tuple[list[F64], list[float]]:
        """What multiplies W along its axes, and the logarithms that it is scaled by."""
        pairs = [scaled(self.log_w(log_u, m) - self.left.shift[m - 1]) for m in range(1, len(log_u))]
        return [x for x, _ in pairs], [top for _, top in pairs]

    def image(self, state: State, lam: F64, exact: bool) -> F64:
        """The potentials of all marginals but the first, best for its u: each in turn on W, and all translated."""
        problem = self.problem
        log_u = [state.log_u[k] for k in self.order]
        self.left.base += float(lam[self.order[0]])
        (factors, tops), first, log_mass = self.factors(log_u), 0.0, -np.inf
        try:
            for _ in range(INNER):
                change = 0.0
                for m in range(1, len(log_u)):
                    marginal = problem.marginals[self.order[m]]
                    if marginal.free:
                        continue
                    log_s = self.left.log_sums(factors, tops, m)
                    new = prox(marginal, log_s, problem.reg)
                    log_mass = log_sum(marginal.log_weight + new + log_s)
                    change, log_u[m] = max(change, float(np.abs(new - log_u[m]).max())), new
                    factors[m - 1], tops[m - 1] = scaled(self.log_w(log_u, m) - self.left.shift[m - 1])
                if not change > RESTED * first or len(log_u) == 2:
                    break
                first = first or change
                by_marginal = State([log_u[self.order.index(k)] for k in range(len(log_u))], [], log_mass, 0.0)
                shifts = translation(problem, by_marginal)
                log_u = [x + shifts[k] for x, k in zip(log_u, self.order, strict=True)]
                tops = [top + shifts[k] for top, k in zip(tops, self.order[1:], strict=True)]
                self.left.base += float(shifts[self.order[0]])
        except StaleError:
            pass  # what it came to is as good a state as any
        return np.concatenate(log_u[1:])

    def metric(self, state: State) -> F64:
        return np.concatenate([state.marginal(self.problem, k) for k in self.order[1:]])

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
    """The kernel of an array in float64: at most 1, and 1 somewhere in each slice of each axis."""

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.problem, self.reg = problem, problem.reg
        self.C = problem.array.transpose(order)
        self.K = np.empty(self.C.shape)
        self.terms = self.K[0].size
        self.step = max(1, SLAB_ENTRIES // self.terms)
        self.fresh = False

    def absorb(self, log_u: list[F64]) -> None:
        """K around potentials: their plan without the masses, each slice divided by its largest entry, axis by axis."""
        if self.fresh:
            raise UnderflowError
        K, axes = self.K, range(self.C.ndim)
        np.divide(self.C, -self.reg, out=K)
        for m in axes[1:]:
            K += spread(log_u[m], m, K.ndim)
        self.shift, self.fresh = [], True
        self.base: float | None = None  # the scale of w_0 in the read before
        for m in axes:
            top = K.max(tuple(k for k in axes if k != m))
            K -= spread(top, m, K.ndim)
            self.shift.append((log_u[m] if m else 0.0) - top)
        for _, _, slab in self.slabs():
            np.exp(slab, out=slab)
            slab[slab < FLUSH] = 0.0

    def slabs(self) -> Iterator[tuple[int, int, F64]]:
        for i0 in range(0, len(self.K), self.step):
            i1 = min(i0 + self.step, len(self.K))
            yield i0, i1, self.K[i0:i1].reshape(i1 - i0, -1)

    def read(self, log_w: list[F64], step: Step) -> Left:
        """One read; a second one where the scale of w_0, which a slab needs before the others are read, was far off."""
        pairs = [scaled(x - y) for x, y in zip(log_w, self.shift[1:], strict=True)]
        y, top = outer([x for x, _ in pairs]), sum(x for _, x in pairs)
        W, log_w0 = np.zeros(self.terms), np.empty(len(self.K))
        for i0, i1, slab in self.slabs():
            shift = self.shift[0][i0:i1]
            log_w0[i0:i1] = step(i0, i1, np.log(checked(slab @ y)) - shift + top) - shift
            if self.base is not None:
                W += np.exp(np.minimum(log_w0[i0:i1] - self.base, 2 * FAR)) @ slab
        base, self.base = self.base, float(log_w0.max())
        if base is None or not abs(self.base - base) <= FAR:
            w, base = scaled(log_w0)
            W = sum((w[i0:i1] @ slab for i0, i1, slab in self.slabs()), np.zeros(self.terms))
        self.fresh = False
        return Left(W.reshape(self.K.shape[1:]), base, self.shift[1:])

    def plan(self, log_w: list[F64]) -> Iterator[tuple[int, int, F64, F64]]:
        """Slabs (i0, i1, P, C) of the plan along the first axis as given, from C in float64."""
        C = self.problem.array
        rest = sum(spread(log_w[k], k, C.ndim) for k in range(1, C.ndim))
        step = max(1, SLAB_ENTRIES // C[0].size)
        for i0 in range(0, len(C), step):
            block = np.asarray(C[i0 : i0 + step], np.float64)
            first = spread(log_w[0][i0 : i0 + step], 0, C.ndim)
            yield i0, i0 + len(block), np.exp(first + rest - block / self.reg), block

    def pair(self, i: int, j: int, log_w: list[F64]) -> F64:
        shape, others = self.problem.shape, tuple(k for k in range(self.C.ndim) if k not in (i, j))
        out = np.zeros((shape[min(i, j)], shape[max(i, j)]))
        for i0, i1, P, _ in self.plan(log_w):
            part = P.sum(others)
            if 0 in (i, j):
                out[i0:i1] = part
            else:
                out += part
        return out if i < j else out.T

    def cost(self, log_w: list[F64]) -> float:
        return float(sum((P[P > 0] * C[P > 0]).sum() for _, _, P, C in self.plan(log_w)))


def spread(x: F64, axis: int, ndim: int) -> F64:
    """A vector along one axis of so many."""
    return x.reshape([-1 if k == axis else 1 for k in range(ndim)])


def outer(factors: list[F64]) -> F64:
    """The product of all factors as one vector, zeros where it is below FLUSH."""
    y = factors[0].copy()
    for x in factors[1:]:
        y = np.multiply.outer(y, x).ravel()
    y[y < FLUSH] = 0.0
    return y


PAIRS = ((0, 1), (0, 2), (1, 2))


class Triangle:
    """Three pairwise kernels, at most 1, and 1 somewhere in each row and column; each has half of its two potentials.

    Where their products leave float64 in kernels made anew, the products are made on logarithms (`log_matmul`).
    """

    def __init__(self, problem: MultiProblem, order: list[int]) -> None:
        self.problem, self.order, self.reg = problem, order, problem.reg
        self.edges = {pair: np.asarray(C) for pair, C in problem.edges.items()}
        self.C = [oriented(self.edges, order[k], order[m]) for k, m in PAIRS]
        self.terms = sum(problem.shape)
        self.fresh = self.on_logs = False

    def absorb(self, log_u: list[F64]) -> None:
        if self.on_logs:
            raise UnderflowError
        self.on_logs, self.fresh = self.fresh, True
        self.shift, self.K = [np.zeros(len(x)) for x in log_u], []
        for C, (k, m) in zip(self.C, PAIRS, strict=True):
            K = np.divide(C, -self.reg)
            if not self.on_logs:
                K += 0.5 * log_u[k][:, None] + 0.5 * log_u[m]
                rows = K.max(1)
                K -= rows[:, None]
                cols = K.max(0)
                K -= cols
                np.exp(K, out=K)
                K[K < FLUSH] = 0.0
                self.shift[k] += 0.5 * log_u[k] - rows
                self.shift[m] += 0.5 * log_u[m] - cols
            self.K.append(K)

    def read(self, log_w: list[F64], step: Step) -> Left:
        K01, K02, K12 = self.K
        if self.on_logs:
            return self.read_logs(log_w, step)
        (x1, top1), (x2, top2) = (scaled(x - y) for x, y in zip(log_w, self.shift[1:], strict=True))
        product = (K02 * x2) @ K12.T
        product *= K01
        sums = np.log(checked(product @ x1)) - self.shift[0] + (top1 + top2)
        w, base = scaled(step(0, len(K01), sums) - self.shift[0])
        W = (K01 * w[:, None]).T @ K02
        W *= K12
        self.fresh = False
        return Left(W, base, self.shift[1:])

    def read_logs(self, log_w: list[F64], step: Step) -> Left:
        """The same; W is the plan of two marginals, divided by its largest entries by rows, then by columns."""
        L01, L02, L12 = self.K
        product = log_matmul(L02 + log_w[1], L12.T) + L01 + log_w[0]
        top = product.max(1)
        log_w0 = step(0, len(L01), top + np.log(np.exp(product - top[:, None]).sum(1)))
        W = log_matmul((L01 + log_w0[:, None]).T, L02) + L12 + log_w[0][:, None] + log_w[1]
        rows = W.max(1)
        W -= rows[:, None]
        cols = W.max(0)
        W -= cols
        return Left(np.exp(W, out=W), 0.0, [log_w[0] - rows, log_w[1] - cols])

    def pair(self, i: int, j: int, log_w: list[F64]) -> F64:
        """The third marginal summed over by a product on logarithms."""
        L = {pair: np.divide(C, -self.reg) for pair, C in self.edges.items()}
        third = 3 - i - j
        log_pair = log_matmul(oriented(L, i, third) + log_w[third], oriented(L, third, j)) + oriented(L, i, j)
        return np.asarray(np.exp(log_pair + log_w[i][:, None] + log_w[j]))

    def cost(self, log_w: list[F64]) -> float:
        total = 0.0
        for (i, j), C in self.edges.items():
            P = self.pair(i, j, log_w)
            total += float((P[P > 0] * C[P > 0]).sum())
        return total
