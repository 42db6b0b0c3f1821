"""Random barycenters, and their answers by Newton's method on the dual, on logarithms in long double.

    python -m barycenters --count 2000 --seed 0       in tests/: each claim beside the truth

The unknowns are log u of all histograms; q, log v and the rows follow from them. Nothing here calls the library but
``trial``.
"""

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from tqdm import tqdm

import mapuot

LONG = np.longdouble
KINDS = "dense", "grid", "pairs"
MOST_STEPS = 60
PASSES = 300  # of a value of transport
EMPTY = 1e-13  # eigenvalues of a scaled Hessian below it are rounding


@dataclass
class Problem:
    M: np.ndarray  # inf where no pair is stored
    A: np.ndarray
    reg: float
    rho: float
    weights: np.ndarray
    given: object  # M as the library gets it
    shape: tuple
    tol: float


def log_sum(x, axis):
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isneginf(top), LONG(0), top)
    with np.errstate(divide="ignore"):
        return np.squeeze(np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top, axis)


def draw(rng, largest=10):
    kind = str(rng.choice(KINDS))
    n = int(rng.integers(1, largest + 1))
    p = int(rng.integers(1, 5))
    shape = (n,)
    if kind == "grid":
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 5)))
        n = shape[0] * shape[1]
        given = mapuot.Grid(shape, spacing=float(10 ** rng.uniform(-1, 1)))
        M = np.asarray(given)
    elif rng.random() < 0.6:
        x = rng.standard_t(rng.choice([1, 3, 30]), size=(n, 2))
        M = ((x[:, None] - x) ** 2).sum(2)
    else:
        M = rng.random((n, n)) ** rng.choice([1, 4])
    M = np.array(M, float)
    spread = float(np.ptp(M)) or 1.0
    A = rng.random((p, n)) ** rng.choice([1, 3, 12])
    if rng.random() < 0.3:
        A *= rng.random((p, n)) < 0.7
        A[:, 0] += 0.1
    rho_of_reg = float(rng.choice([np.inf, 10 ** rng.uniform(-2, 3), 10 ** rng.uniform(3, 16)], p=[0.5, 0.3, 0.2]))
    A *= 10 ** rng.uniform(-1, 1, (p, 1)) if rho_of_reg < 1e3 else 1 / A.sum(1, keepdims=True)
    A *= 10.0 ** rng.choice([0.0, rng.uniform(-12, 12), rng.uniform(-120, 120)])
    if kind == "pairs":
        M[(rng.random((n, n)) < rng.uniform(0, 0.6)) & ~np.eye(n, dtype=bool)] = np.inf
        at = np.isfinite(M).nonzero()
        given = sparse.csr_array((M[at], at), shape=M.shape)
    elif kind == "dense":
        given = M
    if rng.random() < 0.7:
        weights = rng.dirichlet(np.full(p, 0.7))
    else:
        weights = np.full(p, 1.0 / p)
    if p > 1 and rng.random() < 0.1:
        weights[0] = 0.0
    reg = spread * 10 ** rng.uniform(-4, 1)
    tol = float(10 ** rng.uniform(-9, -1))
    return Problem(M, A, reg, rho_of_reg * reg, weights / weights.sum(), given, shape, tol)


class Dual:
    """Return the dual value's gradient and Hessian by log u of the rows in use, in long double."""

    def __init__(self, problem):
        self.w = problem.weights[problem.weights > 0].astype(LONG)
        self.A = problem.A[problem.weights > 0].astype(LONG)
        self.L = -problem.M.astype(LONG) / LONG(problem.reg)
        self.hard, self.rate = np.isinf(problem.rho), LONG(problem.reg) / LONG(problem.rho)
        with np.errstate(divide="ignore"):
            self.log_a = np.log(self.A)
        if self.hard:  # of equal masses in each part: all of them are scaled to the geometric mean
            _, part = sparse.csgraph.connected_components(np.isfinite(problem.M), directed=False)
            for k in range(part.max() + 1):
                held = self.A[:, part == k].sum(1)
                if (held > 0).all():
                    self.A[:, part == k] *= (np.exp(self.w @ np.log(held)) / held)[:, None]
            with np.errstate(divide="ignore"):
                self.log_a = np.log(self.A)

    def at(self, x):
        """Return (plans, q, wanted less actual row sums, diagonal, column sums, factor of h) at log u = x."""
        fi = 1 / (1 + self.rate)
        power = self.rate / (1 + self.rate)
        log_s = log_sum(self.L[None] + x[:, :, None], 1)
        if self.hard:
            log_q = self.w @ log_s
        else:
            top = log_s.max(0)
            top = np.where(np.isneginf(top), LONG(0), top)
            log_q = top + np.log1p(self.w @ np.expm1(power * (log_s - top))) / power
        with np.errstate(invalid="ignore"):
            y = np.where(np.isneginf(log_s) | np.isneginf(log_q), -np.inf, fi * (log_q - log_s))
            P = np.exp(self.L[None] + x[:, :, None] + y[:, None])
            asked = np.where(self.A > 0, self.A * np.exp(-self.rate * np.where(self.A > 0, x, LONG(0))), LONG(0))
        r = P.sum(2)
        columns = P.sum(1)
        duals = np.exp(-self.rate * np.where(columns > 0, y, LONG(0)))
        return P, np.exp(log_q), asked - r, r + self.rate * asked, columns, duals

    def hessian(self, P, diagonal, columns, duals):
        p, n = self.A.shape
        fi = float(1 / (1 + self.rate))
        P = P.astype(float)
        columns = columns.astype(float)
        w = self.w.astype(float)
        S = np.zeros((p, n, p, n))
        over = np.divide(fi, columns, out=np.zeros_like(columns), where=columns > 0)
        for s in range(p):
            S[s, :, s, :] += np.diag(w[s] * diagonal[s].astype(float)) - w[s] * (P[s] * over[s]) @ P[s].T
            for t in range(p):
                S[s, :, t, :] += w[s] * w[t] * (P[s] * over[s] * duals[s].astype(float)) @ P[t].T
        return S.reshape(p * n, p * n)


def solve(problem, log_u):
    """Return (plans (p, n, n), q, the error left relative to the mass) from log u; None if Newton's method fails."""
    dual = Dual(problem)
    x = np.where(dual.A > 0, log_u[problem.weights > 0], -np.inf).astype(LONG)
    if not np.isfinite(x[dual.A > 0]).all():
        return None
    with np.errstate(all="ignore"):
        return climb(dual, x)


def climb(dual, x):
    best = None
    for _ in range(MOST_STEPS):
        P, q, left, diagonal, columns, duals = dual.at(x)
        mass = q.sum()
        if not (np.isfinite(mass) and mass > 0 and np.isfinite(left).all() and np.isfinite(diagonal).all()):
            break
        g = (dual.w[:, None] * left / mass).ravel()
        scale = np.sqrt((dual.w[:, None] * diagonal / mass).ravel())
        used = scale > 0
        H = dual.hessian(P / mass, diagonal / mass, columns / mass, duals)[np.ix_(used, used)]
        scaled = H / np.outer(scale[used], scale[used]).astype(float)
        if not np.isfinite(scaled).all():
            break
        ends, vectors = np.linalg.eigh(scaled)
        along = vectors.T @ (g[used] / scale[used]).astype(float)
        seen = ends > EMPTY
        energy = float((along[seen] ** 2 / ends[seen]).sum())
        unseen = float((along[~seen] ** 2).sum())
        left_over = np.sqrt(2 * energy + unseen / EMPTY**0.5)
        if best is None or left_over < best[2]:
            best = P, q, left_over
        elif left_over < 1e-7 or left_over > 4 * best[2]:
            break
        step = np.zeros(len(g), LONG)
        step[used] = (vectors[:, seen] @ (along[seen] / ends[seen])) / scale[used]
        step = step.reshape(x.shape)
        x = x + step * min(1, 1 / max(float(np.abs(step).max()), 1e-300))
    return best


def transport(problem, a, q, log_u):
    """Return bounds (low, high) of OT(a, q) with the entropy sum P (log P - 1), and log u, by long double passes."""
    reg = LONG(problem.reg)
    rate = LONG(problem.reg) / LONG(problem.rho)
    fi = 1 / (1 + rate)
    L = -problem.M.astype(LONG) / reg
    log_a = np.log(a.astype(LONG))
    log_q = np.log(q.astype(LONG))
    for _ in range(PASSES):
        log_v = fi * (log_q - log_sum(L + log_u[:, None], 0))
        log_v = np.where(np.isfinite(log_v), log_v, -np.inf)
        log_u = fi * (log_a - log_sum(L + log_v, 1))
        log_u = np.where(np.isfinite(log_u), log_u, -np.inf)
    P = np.exp(log_u[:, None] + L + log_v)
    sides = ((a, P.sum(1), log_u), (q, P.sum(0), log_v))
    if rate == 0:
        missed = abs(P.sum(1) - a).sum() + abs(P.sum(0) - q).sum()
        low = reg * (sum(float(x[x > 0] @ log[x > 0]) for x, _, log in sides) - P.sum())
        return low, low + missed * np.ptp(problem.M), log_u
    used = [(x[x > 0], r[x > 0], log[x > 0]) for x, r, log in sides]
    low = -LONG(problem.rho) * sum(x @ np.expm1(-rate * log) for x, _, log in used) - reg * P.sum()
    kl = [(r * np.log(np.where(r > 0, r / x, 1)) - r + x).sum() for x, r, _ in used]
    inside = P > 0
    entropy = P[inside] @ (np.log(P[inside]) - 1)
    return low, (P[inside] @ problem.M[inside]) + reg * entropy + LONG(problem.rho) * sum(kl), log_u


def debiased_value(problem, q):
    """Return bounds (low, high) of sum_s w_s OT(A_s, q) - OT(q, q) / 2."""
    mass = q.sum()
    own = transport(problem, q, q, np.zeros(len(q), LONG))
    low = -own[1] / 2
    high = -own[0] / 2
    for w, a in zip(problem.weights, problem.A, strict=True):
        if w > 0:
            if np.isinf(problem.rho):
                level = mass / a.sum()
            else:
                level = 1.0
            some = transport(problem, level * a, q, np.zeros(len(q), LONG))
            low = low + w * some[0]
            high = high + w * some[1]
    return low, high


def debiased_trial(problem, rng):
    """Return (kind of failure or "", counts): better q, by more passes and at random, against gap and error_bound."""
    A = problem.A.reshape(-1, *problem.shape)
    call = {"reg": problem.reg, "reg_m": problem.rho, "debiased": True}
    call |= {"weights": problem.weights, "tol_change": problem.tol}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mapuot.ConvergenceWarning)
        try:
            found = mapuot.barycenter(problem.given, A, max_passes=int(rng.integers(1, 200)), **call)
            later = mapuot.barycenter(
                problem.given, A, max_passes=2000, warm_start=found, **call | {"tol_change": 1e-14}
            )
        except mapuot.InfeasibleError:
            return "", Counter(refused=1)
    figures = Counter(known=int(found.gap < np.inf), located=int(found.error_bound < np.inf))
    if not found.gap < np.inf:
        return "", figures
    q = found.q.ravel()
    mass = found.q.sum()
    others = [later.q.ravel()]
    for size in (1e-3, 0.1, 1.0):
        step = q * np.exp(size * rng.normal(size=len(q)))
        others.append(step * mass / step.sum() if np.isinf(problem.rho) else step)
    with np.errstate(all="ignore"):
        own = debiased_value(problem, q)
        best = min(debiased_value(problem, x)[1] for x in others)
    figures["judged"] = 1
    if own[0] - best > found.gap:
        return f"FALSE: a value {own[0] - best:.3g} less for a gap of {found.gap:.3g}", figures
    apart = np.abs(q - others[0]).sum() / mass
    if apart > found.error_bound + later.error_bound:
        return f"FALSE: {apart:.3g} apart for {found.error_bound:.3g} + {later.error_bound:.3g}", figures
    figures["ratio"] = float(max(apart / found.error_bound, (own[0] - best) / found.gap))
    return "", figures


def draw_symmetric(rng, largest):
    """Draw a problem with a symmetric M, as debiasing needs, often with an indefinite K, and masses near 1."""
    while True:
        problem = draw(rng, largest)
        M = problem.M = np.maximum(problem.M, problem.M.T)
        if sparse.issparse(problem.given):
            at = np.isfinite(M).nonzero()
            problem.given = sparse.csr_array((M[at], at), shape=M.shape)
        elif isinstance(problem.given, np.ndarray):
            problem.given = M
        if 1e-3 < problem.A.max() < 1e3 and not 1e6 < problem.rho / problem.reg < np.inf:
            return problem


def trial(problem):
    """Return (kind of failure or "", counts with the ratio of error to bound, the answer or None)."""
    A = problem.A.reshape(-1, *problem.shape)
    call = {
        "reg": problem.reg,
        "reg_m": problem.rho,
        "weights": problem.weights,
        "tol": problem.tol,
        "max_passes": 1000,
    }
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = mapuot.barycenter(problem.given, A, **call)
        except mapuot.InfeasibleError:
            return "", Counter(refused=1), None
    loud = any(issubclass(w.category, mapuot.ConvergenceWarning) for w in heard)
    others = [w for w in heard if not issubclass(w.category, mapuot.ConvergenceWarning)]
    figures = Counter(converged=found.converged)
    why = ""
    if others:
        why = f"warned: {others[0].message}"
    elif found.converged == loud or found.converged > (found.error_bound <= problem.tol):
        why = "converged without a bound, or silent"
    elif found.error_bound < np.inf:
        why = compared(problem, found, figures)
    return why, figures, found


def compared(problem, found, figures):
    """Compare the bound with the truth, where that is known well enough; return the failure."""
    used = problem.weights > 0
    p = len(problem.A)
    log_u, log_v = (x.reshape(p, -1) for x in (found.log_u, found.log_v))
    truth = solve(problem, log_u)
    if truth is None or not truth[2] <= max(1e-2 * found.error_bound, 1e-13):
        figures["unjudged"] += 1
        return ""
    P, q, _ = truth
    with np.errstate(invalid="ignore"):
        own = np.exp(log_u[:, :, None].astype(LONG) - problem.M / LONG(problem.reg) + log_v[:, None])[used]
    mass, figures["judged"] = found.q.sum(), 1
    plans = float(problem.weights[used] @ np.abs(own - P).sum((1, 2)) / mass)
    error = max(plans, float(np.abs(found.q.ravel() - q).sum() / mass))
    figures["ratio"] = error / found.error_bound
    if error > found.error_bound:
        return f"FALSE: {error:.3g} for {found.error_bound:.3g}"
    return ""


def run(seed, count, first=0, largest=10, debiased=False):
    """Return (totals, failures) of random barycenters."""
    totals = Counter()
    failures = []
    worst = 0.0
    for index in tqdm(range(first, first + count), disable=None):
        rng = np.random.default_rng([seed, index])
        found = None
        if debiased:
            why, figures = debiased_trial(draw_symmetric(rng, largest), rng)
        else:
            why, figures, found = trial(draw(rng, largest))
        worst = max(worst, figures.pop("ratio", 0.0))
        totals.update(figures)
        if why:
            failures.append((index, why, found))
            tqdm.write(f"{index}: {why}, {found}")
    totals["worst"] = worst
    return totals, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="barycenters", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=10)
    parser.add_argument("--debiased", action="store_true")
    words = parser.parse_args()
    totals, failures = run(words.seed, words.count, words.first, words.largest, words.debiased)
    print(dict(totals))
    sys.exit(bool(failures))
