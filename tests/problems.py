"""Problems whose answer is known, and one verifier that derives every claim of a Result again.

Nothing here calls mapuot but ``Case.solve``: the penalties, the plan and the duality gap are written once
more, from their definitions, in float64 numpy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import rel_entr

import mapuot

EPS = 2.0**-53
STORAGE = {"float64": 2e-15, "mixed": 2.0**-23}  # relative error of r and s


@dataclass(frozen=True)
class Case:
    """The arguments of one solve; ``log_u``, ``log_v`` hold the exact answer where it is known."""

    M: Any
    a: Any
    b: Any
    reg: float
    reg_m: Any
    penalty: Any = "kl"
    reference: Any = "product"
    log_u: Any = None
    log_v: Any = None

    def solve(self, **options: Any) -> mapuot.Result:
        return mapuot.solve(
            self.M, self.a, self.b, reg=self.reg, reg_m=self.reg_m,
            penalty=self.penalty, reference=self.reference, **options,
        )  # fmt: skip

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def transposed(self) -> Case:
        def swap(x: Any) -> Any:
            return (x[1], x[0]) if isinstance(x, tuple) else x

        c = self.reference if isinstance(self.reference, str) else self.reference.T
        reg_m, penalty = swap(self.reg_m), swap(self.penalty)
        return Case(self.M.T, self.b, self.a, self.reg, reg_m, penalty, c, self.log_v, self.log_u)

    @property
    def c(self) -> Any:
        if isinstance(self.reference, str):
            return np.outer(self.a, self.b) if self.reference == "product" else np.ones(self.M.shape)
        return np.asarray(self.reference, float)

    @property
    def sides(self) -> tuple[tuple[str, Any, Any], tuple[str, Any, Any]]:
        """(penalty, weight, reg_m per point) of the rows and of the columns."""
        reg_m = self.reg_m if isinstance(self.reg_m, tuple) else (self.reg_m, self.reg_m)
        kinds = self.penalty if isinstance(self.penalty, tuple) else (self.penalty, self.penalty)
        out = []
        for kind, weight, value in zip(kinds, (self.a, self.b), reg_m, strict=True):
            rho = np.full(np.shape(weight), np.inf if kind == "balanced" else value, float)
            out.append((kind, np.asarray(weight, float), rho))
        return out[0], out[1]


def clouds(m: int, n: int, reg: float = 0.05, reg_m: Any = 1.0, ratio: float = 1.0, seed: int = 0, **more: Any) -> Case:
    """Two clouds of points in the plane, the second shifted; max M = 1; masses 1 and ratio, not uniform."""
    rng = np.random.default_rng([seed, m, n])
    x, y = rng.random((m, 2)), rng.random((n, 2)) * [1.0, 0.7] + [0.3, 0.1]
    M = ((x[:, None] - y[None]) ** 2).sum(2)
    a, b = rng.uniform(0.2, 1.0, m), rng.uniform(0.2, 1.0, n)
    return Case(M / M.max(), a / a.sum(), ratio * b / b.sum(), reg, reg_m, **more)


def arrays(m: int = 13, n: int = 17, seed: int = 0, dtype: type = float) -> list[Any]:
    """a, b, M and a reference, all at random: masses not 1."""
    rng = np.random.default_rng(seed)
    M, c = rng.random((m, n)), rng.random((m, n)) + 0.1
    return [x.astype(dtype) for x in (rng.random(m) + 0.1, rng.random(n) + 0.2, M, c)]


def with_zeros(case: Case, every: int = 3) -> Case:
    """The same problem with every third mass of both sides 0."""
    a, b = case.a.copy(), case.b.copy()
    a[1::every] = 0.0
    b[2::every] = 0.0
    return case.replace(a=a, b=b)


def with_forbidden(case: Case, share: float = 0.3, seed: int = 0) -> Case:
    """The same problem with some pairs forbidden (M = inf); the diagonal stays: every point is reached."""
    M = case.M.copy()
    M[np.random.default_rng(seed).random(M.shape) < share] = np.inf
    k = np.arange(max(M.shape))
    M[k % M.shape[0], k % M.shape[1]] = case.M[k % M.shape[0], k % M.shape[1]]
    return case.replace(M=M)


def manufactured(m: int, n: int, reg: float, reg_m: Any, seed: int = 0, uniform: bool = True) -> Case:
    """Choose u, v and K with c independent of a and b; then a = u^(1/fi1) (K v) and b = v^(1/fi2) (K^T u)."""
    rng = np.random.default_rng([seed, m, n])
    M, c = rng.random((m, n)), "uniform" if uniform else rng.uniform(0.0, 2.0, (m, n)) + np.eye(m, n)
    log_u, log_v = rng.uniform(-1, 1, m), rng.uniform(-1, 1, n)
    K = np.exp(-M / reg) * (1.0 if uniform else c)
    rho = reg_m if isinstance(reg_m, tuple) else (reg_m, reg_m)
    slope = [1.0 + reg / r for r in rho]
    a, b = np.exp(slope[0] * log_u) * (K @ np.exp(log_v)), np.exp(slope[1] * log_v) * (K.T @ np.exp(log_u))
    return Case(M, a, b, reg, reg_m, reference=c, log_u=log_u, log_v=log_v)


def plan_of(case: Case, log_u: Any, log_v: Any) -> Any:
    """P = diag(u) c exp(-M / reg) diag(v) in float64; an infinite u or v stands before zeros only."""
    exponent = np.where(np.isposinf(log_u), -np.inf, log_u)[:, None] - np.asarray(case.M, float) / case.reg
    P = np.exp(exponent + np.where(np.isposinf(log_v), -np.inf, log_v)[None, :])
    return np.where(case.c > 0, P * case.c, 0.0)


def divergence(kind: str, r: Any, t: Any, rho: Any) -> Any:
    """D(r | t) per point; a hard constraint counts 0."""
    soft = np.where(np.isinf(rho), 0.0, rho)
    if kind in ("kl", "balanced"):
        with np.errstate(invalid="ignore"):
            return np.where(soft > 0, soft * (rel_entr(r, t) - r + t), 0.0)
    if kind == "tv":
        return soft * np.abs(r - t)
    return 0.5 * soft * (r - t) ** 2 if kind == "l2" else np.zeros_like(r)


def conjugate(kind: str, f: Any, t: Any, rho: Any) -> Any:
    """min over r >= 0 of D(r | t) + f r, per point: what it adds to the dual value."""
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in ("kl", "balanced"):
            value = np.where(np.isinf(rho), f * t, -rho * t * np.expm1(-f / rho))
        elif kind == "tv":
            value = np.where(f < -rho * (1 + 1e-12), -np.inf, np.minimum(f, rho) * t)
        elif kind == "l2":
            r = np.maximum(0.0, t - f / rho)
            value = 0.5 * rho * (r - t) ** 2 + np.where(r > 0, f * r, 0.0)
        else:
            value = np.where(f > 0, f * np.maximum(0.0, 1 - rho) * t, f * (1 + rho) * t)
    return np.where(t == 0, 0.0, value)


def violation(kind: str, r: Any, t: Any, rho: Any) -> Any:
    """How far r is from what a hard constraint allows."""
    if kind == "range":
        return np.maximum(0.0, np.maximum((1 - rho) * t - r, r - (1 + rho) * t))
    return np.where(np.isinf(rho), np.abs(r - t), 0.0)


@dataclass(frozen=True)
class Report:
    """What ``verify`` found: the float64 plan, its objective and dual value, the true relative plan error."""

    plan: Any
    objective: float
    dual: float
    scale: float
    violation: float
    error: float


def measure(case: Case, log_u: Any, log_v: Any) -> Report:
    """Objective and dual value of potentials, every term from its definition."""
    P = plan_of(case, log_u, log_v)
    M, c = np.asarray(case.M, float), case.c
    entropy = rel_entr(P, c).sum() - P.sum() + c.sum()
    linear = P[P > 0] @ M[P > 0]
    objective, dual, hard = linear + case.reg * entropy, case.reg * (c.sum() - P.sum()), 0.0
    scale = P[P > 0] @ np.abs(M[P > 0]) + case.reg * (c.sum() + P.sum())
    for (kind, t, rho), r, x in zip(case.sides, (P.sum(1), P.sum(0)), (log_u, log_v), strict=True):
        f = case.reg * np.asarray(x)
        term, price = divergence(kind, r, t, rho), conjugate(kind, f, t, rho)
        used = np.isfinite(f)
        objective, dual = objective + term.sum(), dual + price.sum()
        hard += violation(kind, r, t, rho).sum()
        scale += np.abs(term).sum() + np.abs(price).sum() + np.abs(f[used]) @ (r + t)[used]
    return Report(P, objective, dual, scale, hard / P.sum(), np.nan)


def verify(result: mapuot.Result, case: Case, precision: str = "float64", best: Any = None) -> Report:
    """Assert that the numbers of a Result are those of its potentials, and its certificate true.

    ``best``: the exact (log_u, log_v), else ``newton`` finds them where the penalties allow it.
    """
    report = measure(case, result.log_u, result.log_v)
    P, mass, storage = report.plan, report.plan.sum(), STORAGE[precision]
    if precision == "mixed" and not result.converged:
        storage *= 8  # stopped among the float32 runs: only a pass in float64 certifies
    finite = np.asarray(case.M)[np.isfinite(case.M)]
    logs = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in (result.log_u, result.log_v)]
    rounding = 8 * EPS * (8 + sum(logs) + np.abs(finite).max(initial=0.0) / case.reg)  # of an entry of P
    fine = rounding if result.plan.dtype == np.float64 else 2e-7
    close(result.plan, P, fine, 1e-30 * mass)
    for mine, given in ((P.sum(1), result.row_marginal), (P.sum(0), result.col_marginal)):
        close(given, mine, storage + rounding, (storage + rounding) * 1e-3 * mass)
    close(result.mass, mass, storage + rounding)
    cost = P[P > 0] @ np.asarray(case.M, float)[P > 0]
    close(result.cost, cost, rounding, rounding * mass * np.abs(finite).max())
    loose = (storage + rounding) * report.scale
    close(result.objective, report.objective, 0.0, 4 * loose)
    close(result.dual, report.dual, 0.0, 4 * loose)
    gap = report.objective - report.dual
    noise = 4 * rounding * report.scale
    if report.violation == 0.0:
        assert gap >= -noise, f"objective below the dual value: {gap}"
        stiff = sum(rho[np.isfinite(rho)].max(initial=0.0) for _, _, rho in case.sides) * mass * max(1.0, mass)
        stiff += report.scale
        hidden = 4 * (storage + rounding) * np.sqrt(max(gap, 0.0) * stiff) + (storage + rounding) ** 2 * stiff
        if any(kind in ("tv", "range") or np.isinf(rho).any() for kind, _, rho in case.sides):  # of first order
            hidden += 4 * storage * report.scale
        assert gap - noise <= result.gap <= gap + noise + hidden, f"gap {result.gap} of a state that has {gap}"
    noise = 2 * (storage + rounding) * (1 + report.violation)
    assert result.error_bound >= report.violation - noise
    best = best if best is not None else newton(case, result.log_u, result.log_v)
    if best is None:
        return report
    error = float(np.abs(P - plan_of(case, *best)).sum() / mass)
    if not any(np.isinf(rho).any() for _, _, rho in case.sides):
        assert error <= result.error_bound + 4 * rounding, f"true error {error} > bound {result.error_bound}"
    return dataclasses.replace(report, error=error)


def close(given: Any, right: Any, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(given, right, rtol=rtol, atol=atol)


def newton(case: Case, log_u: Any, log_v: Any) -> Any:
    """The exact potentials by damped Newton on the dual; None unless both sides are KL or balanced.

    Gradient: a e^(-f / rho) - r = 0 (and the columns alike). Points without mass or partner stay as given.
    """
    if any(kind not in ("kl", "balanced") for kind, _, _ in case.sides):
        return None
    (_, a, rho1), (_, b, rho2) = case.sides
    i, j = np.isfinite(log_u), np.isfinite(log_v)
    k = np.concatenate([case.reg / rho1[i], case.reg / rho2[j]])
    weight = np.concatenate([a[i], b[j]])
    M, c = np.asarray(case.M, float)[np.ix_(i, j)], case.c[np.ix_(i, j)]
    part = case.replace(M=M, a=a[i], b=b[j], reference=c)
    x, cut = np.concatenate([log_u[i], log_v[j]]), int(i.sum())

    def slope(x: Any) -> tuple[Any, Any, Any, float]:
        """P, the marginals that the penalties want, the gradient, and the dual value over reg."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            P = plan_of(part, x[:cut], x[cut:])
            target = weight * np.exp(-k * x)
            gain = np.where(k > 0, -weight * np.expm1(-k * x) / k, weight * x).sum() - P.sum()
            return P, target, target - np.concatenate([P.sum(1), P.sum(0)]), gain

    P, target, gradient, value = slope(x)
    for _ in range(300):
        H = np.diag(target * k + np.concatenate([P.sum(1), P.sum(0)]))
        H[:cut, cut:], H[cut:, :cut] = P, P.T
        scale = 1 / np.sqrt(np.diag(H))
        H = H * scale[:, None] * scale
        if (k == 0).all():  # both balanced: f + c, g - c is as good
            step = scale * np.linalg.lstsq(H, scale * gradient, rcond=1e-15)[0]
        else:
            step = scale * np.linalg.solve(H, scale * gradient)
        size = np.abs(step).max()
        if size < 1e-14:
            break
        if gradient @ step > 1e-12 * abs(value):  # below, rounding hides the ascent
            while not slope(x + step)[3] > value and np.abs(step).max() > 1e-12:
                step = step / 2
        else:
            step = step / max(1.0, size)
        x = x + step
        P, target, gradient, value = slope(x)
    assert np.abs(gradient).sum() <= 1e-12 * P.sum() * (1 + np.abs(x).max()), "the oracle did not converge"
    best_u, best_v = log_u.copy(), log_v.copy()
    best_u[i], best_v[j] = x[:cut], x[cut:]
    return best_u, best_v


def dual_by_lbfgs(case: Case) -> tuple[float, Any]:
    """(optimal value, plan) by SciPy's L-BFGS-B on the dual; a range side is split so that it is smooth."""
    m, n = case.M.shape
    parts = []  # per variable block: (side, sign, bounds), potential = sum of sign * variable
    for side, (kind, _, rho) in enumerate(case.sides):
        if kind == "range":
            parts += [(side, 1.0, [(0, None)] * len(rho)), (side, -1.0, [(0, None)] * len(rho))]
        elif kind == "tv":
            parts += [(side, 1.0, [(-x, x) for x in rho])]
        else:
            parts += [(side, 1.0, [(None, None)] * len(rho))]
    sizes = [m if side == 0 else n for side, _, _ in parts]

    def potentials(z: Any) -> list[Any]:
        out = [np.zeros(m), np.zeros(n)]
        for (side, sign, _), block in zip(parts, np.split(z, np.cumsum(sizes)[:-1]), strict=True):
            out[side] = out[side] + sign * block
        return out

    def negative(z: Any) -> tuple[float, Any]:
        pair = potentials(z)
        P = plan_of(case, pair[0] / case.reg, pair[1] / case.reg)
        value, slopes = case.reg * (case.c.sum() - P.sum()), []
        for (side, sign, _), block in zip(parts, np.split(z, np.cumsum(sizes)[:-1]), strict=True):
            kind, t, rho = case.sides[side]
            value += conjugate(kind, sign * block, t, rho).sum()
            slopes.append(sign * (marginal_wanted(kind, sign, block, t, rho) - P.sum(1 - side)))
        return -value, -np.concatenate(slopes)

    bounds = [bound for _, _, block in parts for bound in block]
    z, value = np.zeros(len(bounds)), np.inf
    options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 0.0, "gtol": 1e-13, "maxcor": 30, "maxls": 60}
    for _ in range(20):  # a line search that gave up may go on with a fresh memory
        with np.errstate(over="ignore", invalid="ignore"):
            found = minimize(negative, z, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        z, gain, value = found.x, value - found.fun, found.fun
        if gain < 1e-14:
            break
    f, g = potentials(found.x)
    return -found.fun, plan_of(case, f / case.reg, g / case.reg)


def marginal_wanted(kind: str, sign: float, f: Any, t: Any, rho: Any) -> Any:
    """The derivative of ``conjugate``: the marginal that a point wants at the price f."""
    if kind in ("kl", "balanced"):
        return t * np.exp(-f / rho)
    if kind == "l2":
        return np.maximum(0.0, t - f / rho)
    if kind == "range":
        return t * (np.maximum(0.0, 1 - rho) if sign > 0 else 1 + rho)
    return t


def relative_error(P: Any, Q: Any) -> float:
    """|P - Q|_1 / |Q|_1."""
    return float(np.abs(np.asarray(P, float) - Q).sum() / np.abs(Q).sum())


def pairs(m: int, n: int, density: float, seed: int = 0, parts: int = 1, dtype: Any = float) -> tuple[Any, ...]:
    """(CSR, the same with inf elsewhere, a, b); a chain of pairs holds each of the parts together."""
    rng = np.random.default_rng([seed, m, n])
    stored = rng.random((m, n)) < density
    i = np.arange(max(m, n))
    stored[i % m, i % n] = stored[i % m, (i + 1) % n] = True
    stored &= (np.arange(m) * parts // m)[:, None] == np.arange(n) * parts // n
    M = np.where(stored, rng.random((m, n)).astype(dtype), np.inf).astype(dtype)
    return csr_of(M), M, rng.random(m) + 0.1, rng.random(n) + 0.1


def csr_of(M: Any) -> Any:
    """The finite entries of an array."""
    i, j = np.nonzero(np.isfinite(M))
    return sparse.csr_array((M[i, j], (i, j)), shape=M.shape)
