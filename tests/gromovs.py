"""Random small problems of `gromov`, and each claim beside the truth.

    python -m gromovs --count 1000 --seed 0 --jobs 8       in tests/

The value is the objective by its definition, in long double. The last step's certificate is judged by the oracle. From
the same start the value is compared with POT's, and a global bound with the values that 200 random starts reach.
"""

import argparse
import contextlib
import functools
import math
import multiprocessing
import sys
import warnings
from collections import Counter

import judge
import numpy as np
import ot
from problems import Case
from scipy.spatial.distance import cdist
from tqdm import tqdm

import mapuot

LONG = np.longdouble
LIMITS = {"max_iter": 500, "tol": 1e-5, "inner_tol": 1e-9}
ABOVE = 1e-5  # relative difference of values that counts: plans settle to LIMITS["tol"] only


def draw(rng, largest=10):
    """Return the arguments of `gromov`, and the distances within both spaces."""
    m, n = rng.integers(2, largest + 1, 2)
    metric = str(rng.choice(["sqeuclidean", "sqeuclidean", "euclidean", "precomputed"]))
    tails = float(rng.choice([1.5, 3, 30]))
    x, y = (rng.standard_t(tails, (k, int(rng.integers(1, 4)))) for k in (m, n))
    A, B = (cdist(z, z, "sqeuclidean") if metric == "sqeuclidean" else cdist(z, z) for z in (x, y))
    if metric == "precomputed":
        A, B = (np.sqrt(D) * (1 + 0.3 * np.triu(rng.random(D.shape), 1)) for D in (A, B))
        A, B = x, y = A + np.triu(A, 1).T - np.tril(A, -1), B + np.triu(B, 1).T - np.tril(B, -1)
    scale = float((A**2).mean() + (B**2).mean()) or 1.0
    a, b = (rng.dirichlet(np.full(k, 2.0)) if rng.random() < 0.7 else np.full(k, 1 / k) for k in (m, n))
    reg = scale * 10 ** rng.uniform(-2.5, 0)
    reg_m = (math.inf, math.inf)
    if rng.random() < 0.5:
        reg_m = tuple((scale * 10 ** rng.uniform(-0.5, 2, 2)).tolist())
    given = {"X": x, "Y": y, "a": a, "b": b, "reg": reg, "reg_m": reg_m, "metric": metric}
    if rng.random() < 0.3:
        given |= {"features": scale * rng.random((m, n)), "alpha": float(rng.uniform(0.3, 0.9))}
    return given, A, B


def objective(given, A, B, P):
    """Return the objective by its definition."""
    P, a, b = (np.asarray(z, LONG) for z in (P, given["a"], given["b"]))
    r = P.sum(1)
    s = P.sum(0)
    mass = P.sum()
    alpha = given.get("alpha", 1.0)

    def kl(p, q):
        return 2 * mass * judge.divergence("kl", p, q, 1.0).sum() + (p.sum() - q.sum()) ** 2

    structure = np.einsum("ijkl,ij,kl", (A[:, None, :, None] - B[None, :, None, :]).astype(LONG) ** 2, P, P)
    value = alpha * structure + given["reg"] * kl(P, np.outer(a, b))
    if "features" in given:
        value += (1 - alpha) * (P * given["features"]).sum()
    return value + sum(
        rho * kl(p, q) for rho, p, q in zip(given["reg_m"], (r, s), (a, b), strict=True) if rho < math.inf
    )


def pots(given, A, B):
    """Return POT's plan from a b^T, by its function for balanced or for unbalanced sides."""
    alpha = given.get("alpha", 1.0)
    F = given.get("features")
    a = given["a"]
    b = given["b"]
    reg = given["reg"]
    if math.inf in given["reg_m"]:
        more = {"epsilon": 2 * reg, "max_iter": 2000, "tol": 1e-9, "numItermax": 2000, "stopThr": 1e-11}
        if F is None:
            return ot.gromov.entropic_gromov_wasserstein(A, B, a, b, **more)
        return ot.gromov.entropic_fused_gromov_wasserstein(F, A, B, a, b, alpha=alpha, **more)
    return ot.gromov.fused_unbalanced_gromov_wasserstein(
        A, B, a, b, reg_marginals=[rho / alpha for rho in given["reg_m"]], epsilon=reg / alpha, M=F,
        alpha=(1 - alpha) / alpha, unbalanced_solver="sinkhorn_log", max_iter=500, tol=1e-8, max_iter_ot=2000,
        tol_ot=1e-10,
    )[0]  # fmt: skip


def feasible(given, P):
    """Return plans (..., m, n) that meet hard sides, by Altschuler, Weed and Rigollet 2017: POT's miss them by 1e-3.

    A plan that misses them may have a lower objective than every plan that meets them.
    """
    is_hard = [rho == math.inf for rho in given["reg_m"]]
    if not any(is_hard):
        return P
    with np.errstate(divide="ignore", invalid="ignore"):
        if is_hard[0]:
            P = P * np.fmin(1, given["a"] / P.sum(-1))[..., None]
        if is_hard[1]:
            P = P * np.fmin(1, given["b"] / P.sum(-2))[..., None, :]
    rows, cols = (
        np.maximum(w - p, 0) if hard else np.broadcast_to(w, p.shape)
        for hard, w, p in zip(is_hard, (given["a"], given["b"]), (P.sum(-1), P.sum(-2)), strict=True)
    )
    sums = [z.sum(-1)[..., None, None] for z in (rows, cols)]
    lacks = sums[0] if is_hard[0] else sums[1]
    return P + rows[..., None] * cols[..., None, :] * lacks / np.maximum(sums[0] * sums[1], 1e-300)


def has_bound(given):
    if given["metric"] != "sqeuclidean" or given["reg_m"] != (math.inf, math.inf):
        return False
    return given["X"].shape[1] * given["Y"].shape[1] <= 4


def values_of_starts(rng, given, A, B, count, steps=40, scalings=20):
    """Return the values of balanced plans that plain steps reach from random plans, all at a time.

    A step is solved by some scalings in the log domain. The last plans are made feasible, so that the bound applies.
    """
    alpha = given.get("alpha", 1.0)
    F = given.get("features", 0.0)
    log_a = np.log(given["a"])[:, None]
    log_b = np.log(given["b"])
    P = rng.dirichlet(np.full(A.shape[0] * B.shape[0], 0.3), count).reshape(count, len(A), len(B))
    g = np.zeros((count, 1, len(B)))
    for _ in range(steps):
        exponents = (4 * alpha * A @ P @ B - (1 - alpha) * F) / (2 * given["reg"])
        for _ in range(scalings):
            f = -log_sum(exponents + g + log_b, -1)
            g = -log_sum(exponents + f + log_a, -2)
        P = np.exp(exponents + f + g + log_a + log_b)
    P = feasible(given, P)
    r = P.sum(-1)
    s = P.sum(-2)
    structure = (r @ A**2 * r).sum(-1) + (s @ B**2 * s).sum(-1) - 2 * (A @ P @ B * P).sum((-1, -2))
    entropy = 2 * (P * (np.log(np.maximum(P, 1e-300)) - log_a - log_b)).sum((-1, -2))
    return alpha * structure + (1 - alpha) * (P * F).sum((-1, -2)) + given["reg"] * entropy


def log_sum(z, axis):
    """Return log sum exp(z) along an axis, which stays."""
    top = z.max(axis, keepdims=True)
    return top + np.log(np.exp(z - top).sum(axis, keepdims=True))


def trial(rng, largest=10, starts=200, with_pot=True):
    """Return (failure or "", figures) of one random problem."""
    given, A, B = draw(rng, largest)
    figures = Counter(problems=1)
    found = mapuot.gromov(**given, init="independent", **LIMITS)
    if not found.settled:
        figures["not settled"] += 1
    right = objective(given, A, B, found.plan)
    if not abs(found.value - right) <= 1e-9 * sum(map(abs, found.parts)):
        return f"value {found.value}, by definition {right}", figures
    M = np.asarray(found.problem.M) + found.problem.constant
    reg_m = tuple(rho * found.problem.reg / given["reg"] for rho in given["reg_m"])
    case = Case(M, given["a"], given["b"], found.problem.reg, reg_m)
    failures, judged = judge.judge(case, judge.claim_of(found), {})
    figures["certificates judged"] += "no reference" not in judged
    if any(judge.is_false(failure.kind) for failure in failures):
        return f"FALSE: {failures}", figures
    if with_pot:
        try:
            plan = pots(given, A, B)
        except ValueError:  # "There is NaN in coupling"
            figures["POT ended in NaN"] += 1
            plan = np.full((len(A), len(B)), math.nan)
        theirs = objective(given, A, B, feasible(given, plan))
        figures["compared with POT"] += bool(np.isfinite(theirs))
        figures["below POT"] += bool(found.value < theirs * (1 - ABOVE))
        if found.value > theirs * (1 + ABOVE):
            figures["above POT"] += 1
            best = mapuot.gromov(**given, **LIMITS)
            figures["above POT from all starts"] += bool(best.value > theirs * (1 + ABOVE))
    if has_bound(given):
        bounded = mapuot.gromov(**given, bound_tol=0.05, **LIMITS)
        figures["bounds"] += 1
        values = [bounded.value, *values_of_starts(rng, given, A, B, starts)]
        figures["random starts"] += starts
        figures["starts below the value by 5 %"] += sum(value < 0.95 * bounded.value for value in values)
        if bounded.lower_bound > min(values) + 1e-9 * abs(min(values)):
            return f"FALSE: bound {bounded.lower_bound} above a value {min(values)}", figures
    return "", figures


def numbered_trial(index, seed, largest, starts):
    """Return (index, failure or "", figures) of the problem of this number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return index, *trial(np.random.default_rng([seed, index]), largest, starts)


def run(seed, count, first=0, largest=10, starts=200, jobs=1):
    """Return (totals, failures) of random problems, in ``jobs`` processes."""
    totals = Counter()
    failures = []
    one = functools.partial(numbered_trial, seed=seed, largest=largest, starts=starts)
    numbers = range(first, first + count)
    with contextlib.ExitStack() as stack:
        if jobs == 1:
            found = map(one, numbers)
        else:
            found = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs)).imap_unordered(one, numbers)
        for index, why, figures in tqdm(found, total=count, disable=None):
            totals.update(figures)
            if why:
                failures.append((index, why))
                tqdm.write(f"{index}: {why}")
    return totals, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gromovs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=10)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    words = parser.parse_args()
    totals, failures = run(words.seed, words.count, words.first, words.largest, words.starts, words.jobs)
    print(dict(totals))
    sys.exit(bool(failures))
