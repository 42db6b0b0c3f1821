"""Problems of many marginals, and their judge: Newton's method on the dual of the whole array."""

import math
import re
import types

import numpy as np
import pytest
import scipy.sparse
from problems import csr_of

import mapuot
from mapuot.marginals.tree import Tree

SHAPES = ["chain", "star", "tree", "triangle", "array"]


def edges_of(shape, count, rng):
    if shape == "chain":
        return [(k, k + 1) for k in range(count - 1)]
    if shape == "star":
        return [(0, k) for k in range(1, count)]
    if shape == "triangle":
        return [(0, 1), (2, 1), (0, 2)]
    pairs = [(int(rng.integers(k)), k) for k in range(1, count)]
    return [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]


def array_of(costs, sizes):
    total = np.zeros(sizes)
    for (i, j), M in costs.items():
        if i < j:
            ordered = np.asarray(M)
        else:
            ordered = np.asarray(M).T
        total = total + ordered.reshape([n if k in (i, j) else 1 for k, n in enumerate(sizes)])
    return total


def problem(shape, count, sizes=6, seed=0, ratio=1.2):
    """Return (costs, masses): clouds that drift apart, masses of unequal totals; the largest cost is 1."""
    rng = np.random.default_rng([seed, count])
    sizes = [sizes + k % 2 for k in range(count)]
    clouds = [rng.random((n, 2)) * 0.6 + 0.4 * k / count for k, n in enumerate(sizes)]
    masses = [rng.dirichlet(np.full(n, 3.0)) * ratio ** (k / count) for k, n in enumerate(sizes)]
    if shape == "array":
        M = rng.random(sizes)
        return M / M.max(), masses
    pairs = edges_of(shape, count, rng)
    costs = {(i, j): ((clouds[i][:, None] - clouds[j]) ** 2).sum(2) for i, j in pairs}
    top = max(M.max() for M in costs.values())
    return {pair: M / top for pair, M in costs.items()}, masses


def drifting(reg_m, n=300, count=8):
    """Return (costs, masses) of a chain of n-point clouds that drift; eight of 300 are large enough for clusters."""
    rng = np.random.default_rng(0)
    clouds = [rng.random((n, 2)) * 0.6 + 0.04 * k for k in range(count)]
    costs = {(k, k + 1): ((clouds[k][:, None] - clouds[k + 1]) ** 2).sum(2) for k in range(count - 1)}
    return costs, [rng.dirichlet(np.full(n, 3.0)) * (1.0 if reg_m == np.inf else 1.1**k) for k in range(count)]


def whole(costs, masses, sizes=None):
    sizes = sizes or [len(x) for x in masses]
    if isinstance(costs, dict):
        return array_of(costs, sizes)
    return costs


def axes_but(P, k):
    return tuple(m for m in range(P.ndim) if m != k)


def plan_of(C, masses, reg, log_u):
    """Return R exp(sum log_u - C / reg), log_u = 0 and masses = 1 where a marginal is free."""
    exponent = -C / reg
    with np.errstate(divide="ignore", invalid="ignore"):
        for k, x in enumerate(log_u):
            w = np.log(np.ones(len(x)) if masses[k] is None else masses[k])
            one = np.where(np.isneginf(w) | np.isinf(x), -np.inf, w + np.where(np.isinf(x), 0.0, x))
            exponent = exponent + one.reshape([-1 if m == k else 1 for m in range(C.ndim)])
    return np.exp(exponent)


def newton(C, masses, reg, rho, log_u):
    """Return (plan, dual value) by damped Newton on the dual, all potentials at once, from log_u on."""
    count = C.ndim
    given = [k for k in range(count) if masses[k] is not None]
    open_ = np.isfinite(C)
    for k in given:
        open_ &= (masses[k] > 0).reshape([-1 if m == k else 1 for m in range(count)])
    used = [open_.any(axes_but(C, k)) for k in range(count)]
    full = [np.ones(n) if m is None else np.asarray(m, float) for n, m in zip(C.shape, masses, strict=True)]
    constant = sum(rho[k] * full[k][~used[k]].sum() for k in given if not np.isinf(rho[k]))
    constant += reg * math.prod(x.sum() for x in full)
    a = [x[keep] for x, keep in zip(full, used, strict=True)]
    start = [x[keep] for x, keep in zip(log_u, used, strict=True)]
    plan = np.zeros(C.shape)
    plan[np.ix_(*used)], value = climb(C[np.ix_(*used)], a, reg, rho, given, start)
    return plan, value + constant


def hessian(P, given, diagonal):
    """Return the Hessian of the negative dual value over reg: its diagonal, and couplings of pairs."""
    ends = np.cumsum([0] + [P.shape[k] for k in given])
    H = np.diag(diagonal)
    for i, k in enumerate(given):
        for j, m in enumerate(given[:i]):
            pair = P.sum(tuple(z for z in range(P.ndim) if z not in (k, m)))
            H[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = pair
            H[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = pair.T
    return H


class UnsolvedError(AssertionError):
    """Newton's method has met its rounding."""


def climb(C, a, reg, rho, given, log_u):
    """Return (plan, dual value up to constants) of points that all have mass."""
    ends = np.cumsum([len(a[k]) for k in given])[:-1]
    rate = np.concatenate([np.full(len(a[k]), reg / rho[k]) for k in given])
    weight, x = (np.concatenate([y[k] for k in given]) for y in (a, log_u))

    def slope(x):
        part = dict(zip(given, np.split(x, ends), strict=True))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            P = plan_of(C, a, reg, [part.get(k, np.zeros(n)) for k, n in enumerate(C.shape)])
            target = weight * np.exp(-rate * x)
            value = np.where(rate > 0, -weight * np.expm1(-rate * x) / rate, weight * x).sum() - P.sum()
        return P, target, np.concatenate([P.sum(axes_but(P, k)) for k in given]), value

    for _ in range(500):
        P, target, r, value = slope(x)
        diagonal = target * rate + r
        scale = 1 / np.sqrt(diagonal)
        H = hessian(P, given, diagonal) * scale[:, None] * scale
        if not np.isfinite(H).all():
            raise UnsolvedError("the oracle left float64")
        step = scale * np.linalg.lstsq(H, scale * (target - r), rcond=1e-14)[0]
        if np.abs(step).max() < 1e-13:
            break
        if (target - r) @ step > 1e-13 * (abs(value) + r.sum()):  # a smaller ascent would be rounding
            while not slope(x + step)[3] > value and np.abs(step).max() > 1e-13:
                step = step / 2
        else:
            step = step / max(1.0, np.abs(step).max())
        x = x + step
    P, target, r, value = slope(x)
    if not np.abs(target - r).sum() <= 1e-10 * (r.sum() + target.sum()):
        raise UnsolvedError("the oracle did not converge")
    return P, reg * value


STORED = 2.0**-24 + 3e-9  # relative rounding of an entry of a kernel in float32
SUMMED = 1e-7  # relative rounding of float32 sums; a pass with them may end a solve where tol allows


def check(result, costs, masses, reg, rho, sizes=None, storage=0.0):
    """Assert that a result's numbers fit its potentials and that its certificate is true; return the plan's error.

    ``storage``: allowed difference between its marginals and the plan's, since kernels are stored and summed in
    float32.
    """
    C = whole(costs, masses, sizes)
    P = plan_of(C, masses, reg, result.log_u)
    best, value = newton(C, masses, reg, rho, result.log_u)
    logs = sum(np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in result.log_u)
    rounding = 1e-15 * (20 + 4 * logs + 4 * np.abs(C[np.isfinite(C)]).max() / reg) * C.ndim
    mass = P.sum()
    near = rounding + 1.01 * storage
    np.testing.assert_allclose(result.mass, mass, rtol=near)
    for k in range(C.ndim):
        np.testing.assert_allclose(result.marginal(k), P.sum(axes_but(P, k)), rtol=near, atol=1e-30 * mass)
    i = 0
    j = C.ndim - 1
    pair = P.sum(tuple(k for k in range(C.ndim) if k not in (i, j)))
    found = result.pair(i, j)
    if scipy.sparse.issparse(found):
        found = found.toarray()
    np.testing.assert_allclose(found, pair, rtol=4 * near, atol=1e-20 * mass)
    terms = reg * (mass + math.prod(1.0 * n if m is None else m.sum() for n, m in zip(C.shape, masses, strict=True)))
    terms += sum(abs(reg * x[np.isfinite(x)]).max() for x in result.log_u if np.isfinite(x).any()) * mass
    terms += sum(z * (m.sum() + mass) for z, m in zip(rho, masses, strict=True) if m is not None and z < np.inf)
    assert result.dual <= value + 1e-12 * terms
    hard = [k for k in range(C.ndim) if masses[k] is not None and rho[k] == np.inf]
    error = float(np.abs(P - best).sum() / mass)
    floor = 1e-12 * math.sqrt(1 + max((z / reg for z in rho if z < np.inf), default=0.0)) + 10 * rounding
    assert error <= result.error_bound + floor, f"true error {error}, bound {result.error_bound}"
    if len(hard) < 2:
        # both plans meet the hard constraints to rounding
        prices = {k: reg * np.abs(x[np.isfinite(x)]).max() for k, x in enumerate(result.log_u) if k in hard}
        missed = sum(np.abs(Q.sum(axes_but(Q, k)) - masses[k]).sum() * prices[k] for k in hard for Q in (P, best))
        missed += storage * reg * mass
        assert result.objective >= value - 1e-11 * terms - missed
        assert result.objective - result.dual <= result.gap + 1e-11 * terms
    return error


def random_problem(rng):
    count = int(rng.integers(2, 6))
    shape = str(rng.choice(SHAPES))
    count = 3 if shape == "triangle" else count
    sizes = rng.integers(1, {2: 9, 3: 7, 4: 5, 5: 4}[count], count)
    if shape == "array":
        pairs = None
    else:
        pairs = edges_of(shape, count, rng)
    draw = (
        (lambda *n: rng.random(n) * rng.choice([1.0, 10.0])) if rng.random() < 0.5 else (lambda *n: rng.normal(size=n))
    )
    if pairs is None:
        costs = draw(*sizes)
    else:
        costs = {(i, j): draw(sizes[i], sizes[j]) for i, j in pairs}
    masses = [rng.random(n) * 10 ** rng.uniform(-2, 2) for n in sizes]
    rho = [10 ** rng.uniform(-1.5, 3) for _ in sizes]
    if rng.random() < 0.3:
        rho[int(rng.integers(count))] = np.inf
    if rng.random() < 0.2:
        masses[int(rng.integers(count))] = None
    if rng.random() < 0.2:
        for x in masses:
            if x is not None and len(x) > 2:
                x[0] = 0.0
    reg = float(10 ** rng.uniform(-2, 0.5))
    return costs, masses, reg, rho, [int(n) for n in sizes], float(10 ** rng.uniform(-7, -1))


def hardened(masses, rho, rng):
    """Return the problem with two hard marginals or more, of one mass."""
    given = rng.permutation([k for k, x in enumerate(masses) if x is not None])
    hard = {*given[: int(rng.integers(2, len(masses) + 1))], *np.flatnonzero(np.isinf(rho))}
    rho = [np.inf if k in hard else x for k, x in enumerate(rho)]
    return [x / x.sum() if k in hard and x is not None else x for k, x in enumerate(masses)], rho


def as_stored(costs):
    return {pair: csr_of(M) for pair, M in costs.items()}


def one_random(seed, narrow=False, kind="any", backend="cpu"):
    """Return (whether it converged, true error / bound) for a problem of this seed; check its certificate.

    ``kind``: "hard" has two hard marginals or more; "stored pairs" is a tree of them, some edges of it dense, with the
    plan of inf everywhere else. None where no plan exists, as both say in the same words, or Newton has no digit left.
    """
    stored = kind == "stored pairs"
    hard = kind == "hard"
    rng = np.random.default_rng([seed, 7] if stored else seed)
    costs, masses, reg, rho, sizes, tol = random_problem(rng)
    while stored and (not isinstance(costs, dict) or len(costs) == len(sizes) or all(x is None for x in masses)):
        costs, masses, reg, rho, sizes, tol = random_problem(rng)
    if hard:
        masses, rho = hardened(masses, rho, rng)
    if all(x is None for x in masses):
        return True, 0.0
    if stored:
        density = rng.choice([0.3, 0.6, 0.9])
        costs = {pair: np.where(rng.random(M.shape) < density, M, np.inf) for pair, M in costs.items()}
        dtype = rng.choice([np.float32, np.float64])
        costs = {pair: M.astype(dtype).astype(np.float64) for pair, M in costs.items()}
        given = {pair: S.astype(dtype) if rng.random() < 0.8 else costs[pair] for pair, S in as_stored(costs).items()}
    options = {"reg": reg, "reg_m": rho, "tol": max(tol, 2e-6 * narrow), "max_passes": 2000, "backend": backend}
    try:
        dense = mapuot.multimarginal(costs, masses, **options)
    except mapuot.InfeasibleError as error:
        if not stored:
            raise
        with pytest.raises(mapuot.InfeasibleError, match=re.escape(str(error))):
            mapuot.multimarginal(given, masses, **options)
        return None
    if stored:
        result = mapuot.multimarginal(given, masses, **options)
    else:
        result = dense
    storage = (STORED * (len(sizes) - 1) + SUMMED) * narrow
    try:
        ratio = check(result, costs, masses, reg, rho, sizes, storage) / result.error_bound
    except UnsolvedError:
        if not (hard or (stored and max(np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in result.log_u) > 1e3)):
            raise
        return None
    apart = sum(np.abs(result.marginal(k) - dense.marginal(k)).sum() for k in range(len(sizes)))
    assert apart <= len(sizes) * (1.1 * result.error_bound + 1.1 * dense.error_bound + 1e-9) * result.mass
    return result.converged, ratio


def edge_by_edge(monkeypatch):
    """Leave all edges of trees to their kernels."""
    begin = Tree.__init__

    def made(self, *given):
        begin(self, *given)
        out = self.whole_pass.out
        self.whole_pass = types.SimpleNamespace(out=out, run=lambda *given: [], back=lambda *given: [])

    monkeypatch.setattr(Tree, "__init__", made)
