"""The oracle: numpy, float64, log domain, two reads of the cost a pass; tests compare every backend with it.

The iteration is the iteration of src_c/finish_tmpl.c on logarithms. Sources: Sejourne, Vialard, Peyre 2022 (translation
invariance); Walker, Ni 2011 (Anderson acceleration).
"""

import math
from collections import deque
from typing import Any

import numpy as np
from scipy.special import logsumexp

from .. import penalties
from ..contract import LEAST_MASS, Backend, Options, Stats
from ..penalties import F64
from ..problem.cost import Cost
from ..problem.problem import EXPONENT_ROUNDING, Problem
from ..problem.side import Side
from ..status import FAILED
from . import load
from .coarse import Coarse, Labels
from .newton import ColumnsNewton
from .operator import Operator, parts_of
from .workspace import anderson_depth_of

STALL_PASSES = 250
MOST_DROPPED = 2  # a solve by one potential has stalled after this many dropped steps
TINY = np.finfo(np.float64).tiny


def log_kernel(problem: Problem) -> F64:
    log_a, log_b = problem.log_reference
    log_k = log_a[:, None] + log_b[None, :] - dense_costs(problem.cost, np.inf) / problem.reg
    c = problem.c
    with np.errstate(divide="ignore"):
        if c is not None:
            log_k = log_k + np.log(dense_costs(c, 0.0))
        return np.asarray(log_k)


def dense_costs(cost: Cost, absent: float) -> F64:
    """Return the matrix in float64, with ``absent`` where a sparse matrix stores no entry."""
    M = np.asarray(cost.array, np.float64)
    if cost.operator == "pairs":
        return np.where(np.inf > M, M, absent)
    return M


def log_sum(x: F64, axis: int) -> F64:
    with np.errstate(divide="ignore"):
        return np.asarray(logsumexp(x, axis=axis))


def side_prox(side: Side, log_s: F64, reg: float, left_out: Any) -> F64:
    """Return the prox of log s: -inf at points that are left out, +inf at points without a partner (s = 0)."""
    log_u = penalties.prox(side.penalty, log_s, side.weight, side.rho, side.upper, reg)
    return np.where(left_out, -np.inf, np.where(np.isneginf(log_s), np.inf, log_u))


def scaled(log_u: F64, log_v: F64, log_k: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.exp(unreached(log_u)[:, None] + log_k + unreached(log_v)[None, :])


def unreached(log_x: F64) -> F64:
    """Replace scalings of +inf by 0: they multiply only zeros."""
    return np.where(np.isposinf(log_x), -np.inf, log_x)


def split(X: F64, count: int) -> Any:
    """Label the rows of X by ``count`` clusters: first up to four of few far rows each, then halves along columns."""
    label = np.zeros(len(X), np.int64)
    rest = np.arange(len(X))
    first = 0
    while first < min(4, count - 1) and len(rest) > 1:
        x = X[rest, np.ptp(X[rest], axis=0).argmax()]
        before = x <= 0.5 * x.min() + 0.5 * x.max()
        if 2 * before.sum() < len(rest):
            few = before
        else:
            few = ~before
        if not x.min() < x.max() or few.sum() * (count - first) * 8 > len(rest):
            break
        label[rest[few]] = first
        rest = rest[~few]
        first = first + 1
    label[rest] = first + halves(X[rest], count - first)
    return label


def halves(X: F64, count: int) -> Any:
    """Label points by splits into halves along the widest column; all clusters have about the same size."""
    label = np.zeros(len(X), np.int64)
    half = count // 2
    if count > 1 and len(X) > 1:
        low, high = np.split(np.argsort(X[:, np.ptp(X, axis=0).argmax()], kind="stable"), [len(X) * half // count])
        label[low] = halves(X[low], half)
        label[high] = half + halves(X[high], count - half)
    return label


class ReferenceWorkspace:
    reads = "float64 logarithms"

    makes_products = False  # Newton's step takes products with the plan
    has_exact_marginals = True
    estimates = False

    def __init__(self, problem: Problem, options: Options, skip: None = None) -> None:
        self.problem, self.options = problem, options
        self.log_k = log_kernel(problem)
        out_u, out_v = problem.left_out
        possible = np.isfinite(self.log_k)
        problem.check_reachable(~possible[:, ~out_v].any(1) & ~out_u, ~possible[~out_u].any(0) & ~out_v)
        plain = not options.last or not problem.cols.demands or problem.misses
        if plain:
            self.edges = 1  # longest path of a unit of missed mass
        else:
            self.edges = 2 * min(problem.shape)
        self.passes = 0
        self.best_dual = -np.inf
        self.progress_dual = -np.inf
        self.best_error = np.inf
        self.since_best = 0
        itemsize = {"float64": 8, "float32": 4}[options.precision]
        depth = anderson_depth_of(options.anderson_depth, problem.shape[0], itemsize)
        self.history: deque[tuple[F64, F64]] = deque(maxlen=depth + 1)
        self.coarse = Coarse(self, problem, depth)
        self.matrix: F64 | None = None  # matrix of the coarse correction
        self.extrapolated, self.dropped = False, 0
        if options.symmetric:
            self.parts = None
        else:
            self.parts = problem.parts
        self.rates = tuple(
            None if rho is None or options.symmetric else (0.0 if np.isinf(rho) else problem.reg / rho)
            for rho in (problem.rows.scalar_rho, problem.cols.scalar_rho)
        )

    def absorb(self, log_v: F64 | None = None) -> None:
        if log_v is None:
            return
        self.next_log_v = np.where(self.problem.left_out[1], -np.inf, log_v)

    def iterate(self, count: int) -> list[Stats]:
        return self.coarse.iterate(count)

    def conclude(self, stat: Stats) -> None:
        """Do nothing: every pass is certified."""

    split = staticmethod(split)

    @property
    def correcting(self) -> bool:
        return self.matrix is not None

    def labelled_pass(self, labels: Labels) -> list[Stats]:
        row_label = np.empty(len(labels.order), np.int64)
        row_label[labels.order] = np.repeat(np.arange(labels.clusters), np.diff(labels.first))
        if labels.label is None:
            columns = np.arange(self.problem.shape[1])
        else:
            columns = labels.label
        self.members = np.eye(labels.clusters)[row_label], np.eye(columns.max() + 1)[columns]
        return self.make_passes(1)

    def correct(self, fi: float) -> None:
        """Keep (I - J + fi 1 w^T)^-1 - I, J = fi diag(1 / s) P_IJ^T diag(1 / r) P_IJ; fi = fi1 fi2, w = s / |s|."""
        rows, cols = self.members
        P = rows.T @ self.P @ cols
        r, s = (np.where(x > 0, x, 1.0) for x in (P.sum(1), P.sum(0)))
        J = fi * (P.T / s[:, None]) @ (P / r[:, None])
        eye = np.eye(len(s))
        self.matrix = np.linalg.inv(eye - J + fi * P.sum(0) / P.sum()) - eye
        self.means = (cols * self.s[:, None]).T / np.maximum(cols.T @ self.s, TINY)[:, None]

    def make_passes(self, count: int) -> list[Stats]:
        done: list[Stats] = []
        while len(done) < count and (not done or done[-1].status == "running"):
            done.append(self.one_pass())
        return done

    def one_pass(self) -> Stats:
        problem, reg = self.problem, self.problem.reg
        rows, cols = problem.rows, problem.cols
        log_v = self.next_log_v
        out_u, out_v = problem.left_out
        together = self.options.symmetric  # log u = log v: gap, missed mass and misfit of both sides are equal
        log_u = side_prox(rows, log_sum(self.log_k + unreached(log_v)[None, :], 1), reg, out_u)
        log_u, log_v = self.translate_rows(log_v if together else log_u, log_v)
        self.P = P = scaled(log_u, log_v, self.log_k)
        r = P.sum(1)
        s = P.sum(0)
        mass = s.sum()
        dual = self.dual(log_u, log_v, mass)
        gap = self.fenchel_young(cols, log_v, s)
        hard = penalties.violation(cols.penalty, s, cols.weight, cols.rho, cols.upper).sum()
        rounding = problem.exponent_error(log_u, log_v) + EXPONENT_ROUNDING * abs(self.lam)
        if rounding <= 1:
            rounding = float(np.expm1(rounding))
        else:
            rounding = math.inf
        if cols.kind.kinks:
            misfit = self.misfit(log_v, s)
        else:
            misfit = math.inf
        both = 1 + together
        moved, gap, error = self.certify(dual, mass, both * gap, both * hard, both * misfit, rounding)
        image = side_prox(cols, log_sum(self.log_k + unreached(log_u)[:, None], 0), reg, out_v)
        if together:
            image = self.towards(image, log_v)
        else:
            image = self.translate_cols(image, mass)
        self.log_u, self.log_v, self.r, self.s = log_u, log_v, r, s
        self.passes += 1
        rejected, residual = self.advance(log_v, image, dual)
        if rejected:
            status = "running"
        else:
            status = self.status(error, gap, dual, moved, mass)
        if rejected and together and self.dropped >= MOST_DROPPED:
            status = "stalled"
        if status in FAILED:
            error, gap, moved = math.inf, math.inf, math.inf
        if moved < math.inf:
            lower = dual - moved
        else:
            lower = -math.inf
        return Stats(self.passes, gap, error, lower, float(mass), residual, rejected, status)

    def certify(
        self, dual: float, mass: float, gap: float, hard: float, misfit: float, rounding: float
    ) -> tuple[float, float, float]:
        """Return (bound on the rounding of the dual value, gap, error); ``rounding``: error of the plan's entries."""
        problem = self.problem
        reg = self.problem.reg
        sides = self.problem.rows, self.problem.cols
        kl, tv, l2 = (sum(x.largest_soft_rho for x in sides if x.kind.rounds == kind) for kind in ("kl", "tv", "l2"))
        hard_sides = sum(x.penalty == "range" or bool(x.hard.any()) for x in sides)
        prices = hard_sides * reg * rounding / EXPONENT_ROUNDING  # bounds the potentials of hard sides
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            terms = sum(x.dual_scale for x in sides) + reg * problem.c_mass + abs(dual) + prices * (mass + hard)
            moved = mass * (reg + kl / 4) * rounding + 1e-15 * terms  # 2 of the 8 roundings lie between u and r
            noise = 1e-13 * float(mass) * (reg + kl)  # size of a negative gap that rounding explains
            safe_gap = (noise if gap < 0 else gap) + 1e-316 * (1 + kl)
            error = penalties.plan_error(safe_gap / mass / reg)  # >= KL(P* | P) / mass
            if self.edges > 1:
                error += self.edges * float(hard / mass + 2**-51)
            else:
                error += float(hard / mass)
            error = min(error, 2 * min(problem.shape) * float(misfit / mass + 2**-51))
            error += rounding * (1 + 2 * error)
            root = np.sqrt(safe_gap) + rounding * np.sqrt(mass * (kl + l2 * mass / 2))
            rounded = float(root**2 + rounding * mass * (2 * tv + prices))
        sound = np.isfinite(dual) and gap >= -noise and error < math.inf
        if not sound or not moved < math.inf:
            return math.inf, math.inf, math.inf
        if hard > self.options.allowed * mass:
            rounded = math.inf
        return float(moved), rounded, error

    def translate_rows(self, log_u: F64, log_v: F64) -> tuple[F64, F64]:
        """Translate: lam = (log A - log B) / (fi1 reg/rho1 + reg/rho2);  u *= e^(fi1 lam), v *= e^(-lam)."""
        k1, k2 = self.rates
        self.lam = 0.0
        if not self.options.translate or k1 is None or k2 is None or k1 + k2 == 0 or self.parts:
            return log_u, log_v
        fi1 = 1 / (1 + k1)
        mass = scaled(log_u, log_v, self.log_k).sum()
        if not 0 < mass < np.inf:
            return log_u, log_v
        A = np.log(mass)
        log_b = self.problem.cols.log_weight
        with np.errstate(invalid="ignore"):
            B = log_sum(np.where(log_b > -np.inf, log_b - k2 * log_v, -np.inf), 0)
        self.lam = lam = float((A - B) / (fi1 * k1 + k2))
        return log_u + fi1 * lam, log_v - lam

    def translate_cols(self, image: F64, mass: float) -> F64:
        """Translate: mu = (log B' - log A') / (reg/rho1 + fi2 reg/rho2);  v' *= e^(fi2 mu)."""
        k1, k2 = self.rates
        if not self.options.translate or k1 is None or k2 is None or k1 + k2 == 0 or not 0 < mass < np.inf:
            return image
        fi2 = 1 / (1 + k2)
        log_b, parts = self.problem.cols.log_weight, self.parts
        with np.errstate(invalid="ignore", divide="ignore"):
            terms = np.where(log_b > -np.inf, log_b - k2 * image, -np.inf)
            s = self.P.sum(0)
            if parts is None:
                columns: list[Any] = [slice(None)]
            else:
                columns = [parts.cols == k for k in range(parts.count)]
            for part in columns:
                mu = float((log_sum(terms[part], 0) - np.log(s[part].sum())) / (k1 + fi2 * k2))
                if math.isfinite(mu):
                    image[part] += fi2 * mu
        return image

    def towards(self, image: F64, log_v: F64) -> F64:
        """Return x + (prox - x) / (1 + fi / 2) for one potential x."""
        side = self.problem.cols
        fi: Any = 1.0
        if side.penalty in ("kl", "balanced"):
            fi = 1 / (1 + self.problem.reg / side.rho)
        part = 1 / (1 + 0.5 * fi)
        return np.asarray((1 - part) * log_v + part * image)

    def fenchel_young(self, side: Side, log_x: F64, marginal: F64) -> float:
        used = np.isfinite(log_x)  # unreachable points, log x = inf, contribute no gap
        f = np.where(used, self.problem.reg * log_x, 0.0)
        term = penalties.gap_term(side.penalty, f, marginal, side.weight, side.rho, side.upper)
        return float(term[used].sum())

    def misfit(self, log_v: F64, s: F64) -> float:
        side = self.problem.cols
        used = ~np.isneginf(log_v)
        f = np.where(used, self.problem.reg * log_v, 0.0)
        return float(penalties.misfit(side.penalty, f, s, side.weight, side.rho, side.upper)[used].sum())

    def dual(self, log_u: F64, log_v: F64, mass: float) -> float:
        problem = self.problem
        total = problem.reg * (problem.c_mass - mass)
        for side, log_x in ((problem.rows, log_u), (problem.cols, log_v)):
            f = problem.reg * log_x
            total += penalties.dual_term(side.penalty, f, side.weight, side.rho, side.upper).sum()
        return float(total)

    def advance(self, x: F64, image: F64, dual: float) -> tuple[bool, float]:
        """Find the next log v by guarded Anderson acceleration of the images G(x) with residuals F = G(x) - x."""
        active = np.isfinite(image) & np.isfinite(x)
        residual = np.where(active, image, 0.0) - np.where(active, x, 0.0)
        size = float(np.abs(residual).max(initial=0.0))
        slack = 1e-13 * abs(self.best_dual) + 1e-15 * self.problem.rows.weight.sum()
        if self.extrapolated and not dual >= self.best_dual - slack:
            self.next_log_v = self.history[-1][1]
            self.history.clear()
            self.extrapolated, self.matrix = False, None
            self.dropped += 1
            return True, size
        if self.extrapolated:
            self.best_dual = max(self.best_dual, dual)
        else:
            self.best_dual = dual
        self.history.append((residual, image))
        self.next_log_v, self.extrapolated, left = image, False, residual
        if self.options.anderson_depth and len(self.history) > 1:
            self.next_log_v, left = self.extrapolate(active)
            self.extrapolated = True
        if self.matrix is not None:
            step = self.members[1] @ (self.matrix @ (self.means @ left))
            self.next_log_v = self.next_log_v + step
            self.extrapolated = True
        return False, size

    def extrapolate(self, active: Any) -> tuple[F64, F64]:
        """Return G - sum gamma_i dG_i and F - sum gamma_i dF_i, gamma = argmin |F - sum gamma_i dF_i| weighted by b."""
        F = np.array([f for f, _ in self.history])
        G = np.array([np.where(active, g, 0.0) for _, g in self.history])
        dF = np.diff(F, axis=0)
        dG = np.diff(G, axis=0)
        w = self.problem.cols.weight
        gram = (dF * w) @ dF.T
        scale = 1 / np.sqrt(np.maximum(np.diag(gram), TINY))
        system = gram * scale[:, None] * scale[None, :] + 1e-10 * np.eye(len(dF))
        gamma = scale * np.linalg.solve(system, scale * ((dF * w) @ F[-1]))
        cols = self.problem.cols
        x = penalties.project(cols.penalty, G[-1] - gamma @ dG, cols.rho, self.problem.reg)
        return np.where(active, x, self.history[-1][1]), F[-1] - gamma @ dF

    def status(self, error: float, gap: float, dual: float, moved: float, mass: float) -> str:
        if mass < LEAST_MASS:
            return "underflow"
        if not np.isfinite(mass) or not np.isfinite(dual):
            return "not finite"
        least = max(dual - moved, -dual - 2 * moved)  # lower bound on the size of the optimum
        small = self.options.tol_gap >= 0 and gap < np.inf and gap <= self.options.tol_gap * least
        if error <= self.options.tol or small:
            return "converged"
        self.since_best += 1
        if error < self.best_error * (1 - 1e-3) or dual > self.progress_dual + 1e-9 * abs(dual):
            self.best_error = min(self.best_error, error)
            self.progress_dual = max(self.progress_dual, dual)
            self.since_best = 0
        if self.since_best >= STALL_PASSES:
            return "stalled"
        return "running"

    def newton(self) -> Any:
        if self.problem.misses:
            return ColumnsNewton(self.problem)
        return None

    def restart(self, log_v: F64) -> None:
        self.next_log_v, self.extrapolated, self.matrix = log_v, False, None
        self.history.clear()

    def potentials(self) -> tuple[F64, F64]:
        return self.log_u, self.log_v

    def marginals(self) -> tuple[F64, F64]:
        return self.r, self.s

    def close(self) -> None:
        del self.log_k, self.P


class ReferencePlan(Operator):
    def __init__(self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None) -> None:
        super().__init__(*parts_of(problem))
        self.M = dense_costs(problem.cost, np.inf)
        self.P = scaled(log_u, log_v, log_kernel(problem))
        self.set_exponents(*problem.exponents(log_u, log_v))

    def plan(self, i0: int, i1: int, out: Any = None) -> Any:
        block = self.P[i0:i1].astype(self.dtype)
        if self.cost.operator == "pairs":
            pairs: Any = self.cost.read(i0, i1)
            return pairs.with_data(block[pairs.row_numbers(), pairs.column])
        if out is None:
            return block
        out[:] = block
        return out

    def product(self, X: Any, turned: bool) -> Any:
        return (self.P.T if turned else self.P) @ X

    def own_sums(self) -> tuple[float, F64, F64]:
        with np.errstate(over="ignore", invalid="ignore"):  # an unconverged plan may hold inf
            cost = np.where(self.P > 0, self.M, 0.0) * self.P
            return float(cost.sum()), self.P.sum(1), self.P.sum(0)


class ReferenceBackend(Backend):
    """The oracle on arrays of numpy, in one process."""

    name = "reference"
    in_one_process = True
    has_one_potential = True
    quick_entries = 1 << 20
    quick_passes = 16

    def asarray(self, x: Any) -> Any:
        return np.asarray(x)

    def to_numpy(self, x: Any) -> Any:
        return np.asarray(x)

    def is_symmetric(self, M: Any) -> bool:
        return bool(np.array_equal(M, M.T))

    def extrema(self, M: Any, threads: int | None = None) -> tuple[float, float, int, int]:
        finite = M[np.isfinite(M)]
        low = high = 0.0
        if finite.size:
            low = finite.min()
            high = finite.max()
        n_bad = np.sum(np.isnan(M) | np.isneginf(M))
        return float(low), float(high), int(n_bad), int(np.sum(np.isposinf(M)))

    def workspace(self, problem: Problem, options: Options, skip: None = None) -> ReferenceWorkspace:
        return ReferenceWorkspace(problem, options, skip)

    def operator_of(self, cost: Any, *parts: Any, **more: Any) -> Any:
        """Make the CPU's operator of a cost: derivatives are not part of the oracle."""
        return load("cpu").operator_of(cost, *parts, **more)

    def plan_of(self, problem: Problem, log_u: F64, log_v: F64, threads: int | None = None) -> ReferencePlan:
        return ReferencePlan(problem, log_u, log_v, threads)


backend = ReferenceBackend()
