"""Problems, and one verifier that derives every claim of a Result again.

Nothing here calls mapuot but ``Case.solve``: judge.py gives the plan, the penalties and the duality gap, oracle.py the
optimum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import judge
import numpy as np
import oracle
from judge import measure
from scipy import sparse

import mapuot

EPS = 2.0**-53


@dataclass(frozen=True)
class Case:
    """The arguments of one solve."""

    M: Any
    a: Any
    b: Any
    reg: float
    reg_m: Any
    penalty: Any = "kl"
    reference: Any = "product"

    def solve(self, **options: Any) -> mapuot.Result:
        return mapuot.solve(
            self.M, self.a, self.b, reg=self.reg, reg_m=self.reg_m,
            penalty=self.penalty, reference=self.reference, **options,
        )  # fmt: skip

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def c(self) -> Any:
        if isinstance(self.reference, str):
            if self.reference == "product":
                return np.outer(self.a, self.b)
            return np.ones(self.M.shape)
        return np.asarray(self.reference, float)

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.M.shape
        return m, n

    def side(self, k: int) -> tuple[str, Any, Any]:
        """Return (penalty, weight, reg_m per point) of the rows (0) or the columns (1); "balanced" is "kl" with inf."""
        if isinstance(self.penalty, str):
            kind = self.penalty
        else:
            kind = self.penalty[k]
        if isinstance(self.reg_m, tuple):
            rho = self.reg_m[k]
        else:
            rho = self.reg_m
        weight = np.asarray((self.a, self.b)[k], float)
        rho = np.broadcast_to(np.inf if kind == "balanced" else rho, weight.shape)
        return "kl" if kind == "balanced" else kind, weight, np.ascontiguousarray(rho, float)

    def hard(self, k: int) -> bool:
        """Return whether the side has a constraint that no finite price pays for."""
        kind, _, rho = self.side(k)
        return kind == "range" or bool(np.isinf(rho).any())

    def exactly_balanced(self, k: int) -> bool:
        """Return whether every point of the side is hard; the library calls this balanced."""
        kind, _, rho = self.side(k)
        return kind == "kl" and bool(np.isinf(rho).all())

    @property
    def cost_rounding(self) -> float:
        """Return the rounding of a cost, where it is not given as a number."""
        return 0.0


def clouds(m: int, n: int, reg: float = 0.05, reg_m: Any = 1.0, ratio: float = 1.0, seed: int = 0, **more: Any) -> Case:
    """Return two clouds of points in the plane, the second shifted; max M = 1; masses 1 and ratio, not uniform."""
    rng = np.random.default_rng([seed, m, n])
    x = rng.random((m, 2))
    y = rng.random((n, 2)) * [1.0, 0.7] + [0.3, 0.1]
    M = ((x[:, None] - y[None]) ** 2).sum(2)
    a = rng.uniform(0.2, 1.0, m)
    b = rng.uniform(0.2, 1.0, n)
    return Case(M / M.max(), a / a.sum(), ratio * b / b.sum(), reg, reg_m, **more)


def totals_far_apart(seed: int, rho_b: float) -> Case:
    """Return a problem of up to 4 x 4 points with equal masses a side, where a has 1e12 to 1e40 times the mass of b."""
    rng = np.random.default_rng(seed)
    m, n = (int(k) for k in rng.integers(1, 5, 2))
    M = rng.random((m, n))
    reg = 10 ** rng.uniform(-4, -2)
    rho = 10 ** rng.uniform(0, 3)
    ratio = 10 ** rng.uniform(12, 40)
    size = 10 ** rng.uniform(-60, 0)
    return Case(M, np.full(m, 1 / m) * size * ratio, np.full(n, 1 / n) * size, reg, (rho, rho_b))


def arrays(m: int = 13, n: int = 17, seed: int = 0, dtype: type = float) -> list[Any]:
    """Return a, b, M and a reference, all at random: masses not 1."""
    rng = np.random.default_rng(seed)
    M = rng.random((m, n))
    c = rng.random((m, n)) + 0.1
    return [x.astype(dtype) for x in (rng.random(m) + 0.1, rng.random(n) + 0.2, M, c)]


def histograms(
    p: int = 5, m: int = 37, n: int = 53, ratio: float = 1.5, seed: int = 0, zeros: bool = True
) -> tuple[Any, ...]:
    """Return (M, A, B): p pairs of histograms on two clouds; every third weight of the first problem 0."""
    case = clouds(m, n, seed=seed)
    rng = np.random.default_rng(seed)
    A = rng.uniform(0.2, 1, (p, m))
    B = rng.uniform(0.2, 1, (p, n))
    if zeros:
        A[0, 1::3] = B[0, 2::3] = 0.0
    return case.M, A, ratio * B * (A.sum(1) / B.sum(1))[:, None]


def with_zeros(case: Case, every: int = 3) -> Case:
    """Return the problem with every third mass of both sides 0."""
    a = case.a.copy()
    b = case.b.copy()
    a[1::every] = 0.0
    b[2::every] = 0.0
    return case.replace(a=a, b=b)


def with_forbidden(case: Case, share: float = 0.3, seed: int = 0) -> Case:
    """Return the problem with some pairs forbidden (M = inf); the diagonal stays: every point is reached."""
    M = case.M.copy()
    M[np.random.default_rng(seed).random(M.shape) < share] = np.inf
    k = np.arange(max(M.shape))
    M[k % M.shape[0], k % M.shape[1]] = case.M[k % M.shape[0], k % M.shape[1]]
    return case.replace(M=M)


def plan_of(case: Case, log_u: Any, log_v: Any) -> Any:
    """Return P = diag(u) c exp(-M / reg) diag(v) in float64."""
    return judge.plan_of(case, log_u, log_v).astype(float)


def verify(result: mapuot.Result, case: Case, precision: str = "float64") -> float:
    """Assert that a Result's numbers belong to its potentials and its certificate is true; return the plan's error."""
    claim = judge.claim_of(result)
    best = oracle.answer(case) or oracle.answer(case, result.log_v)
    assert best is not None, "the oracle did not converge"
    failures, _ = judge.judge(case, claim, {"precision": precision}, best)
    assert not failures, failures
    found = measure(case, result.log_u, result.log_v)
    P = found.plan.astype(float)
    M = np.asarray(case.M, float)
    dearest = np.abs(M[np.isfinite(M)]).max(initial=0.0)
    near = np.testing.assert_allclose
    rounding = 2 * found.exponent + 8 * EPS * dearest / case.reg  # of an entry of P
    near(claim.plan, P, rtol=rounding if claim.plan.dtype == np.float64 else 2e-7, atol=1e-30 * P.sum())
    near(result.cost, P[P > 0] @ M[P > 0], rtol=rounding, atol=rounding * P.sum() * dearest)
    return judge.relative(found.plan, best.plan)


def optimum(case: Case) -> Any:
    """The oracle's answer: log_u, log_v, plan, dual value."""
    best = oracle.answer(case)
    assert best is not None, "the oracle did not converge"
    return best


def relative_error(P: Any, Q: Any) -> float:
    """Return |P - Q|_1 / |Q|_1."""
    return float(np.abs(np.asarray(P, float) - Q).sum() / np.abs(Q).sum())


def pairs(m: int, n: int, density: float, seed: int = 0, parts: int = 1, dtype: Any = float) -> tuple[Any, ...]:
    """Return (CSR, the same with inf elsewhere, a, b); a chain of pairs holds each of the parts together."""
    rng = np.random.default_rng([seed, m, n])
    stored = rng.random((m, n)) < density
    i = np.arange(max(m, n))
    stored[i % m, i % n] = stored[i % m, (i + 1) % n] = True
    stored &= (np.arange(m) * parts // m)[:, None] == np.arange(n) * parts // n
    M = np.where(stored, rng.random((m, n)).astype(dtype), np.inf).astype(dtype)
    return csr_of(M), M, rng.random(m) + 0.1, rng.random(n) + 0.1


def csr_of(M: Any) -> Any:
    """Return the finite entries of an array."""
    i, j = np.nonzero(np.isfinite(M))
    return sparse.csr_array((M[i, j], (i, j)), shape=M.shape)
