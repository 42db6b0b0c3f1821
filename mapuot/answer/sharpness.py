"""Sharpness of a plan: normalised mutual information between the points of both sides, from 0 to 1.

    sharpness = I / min(H(r), H(s)),   I = sum p log(p / (r s)) = H(r) + H(s) - H(p)

with p = P / mass, its marginals r and s, and the entropy H. For n equal masses on both sides, sharpness is
2 - H(p) / log n: one minus the normalised entropy of Zhang, Mousavi-Hosseini, Klein and Cuturi, On fitting flow models
with large Sinkhorn couplings, 2025.
"""

from typing import Any

import numpy as np

from ..arrays import host
from ..penalties import kl_divergence
from ..problem.sparse import is_sparse
from ..ranks import ALONE, Ranks

CLEAR = 0.05  # a plan of less sharpness is nearly the independent plan
ROUNDING = 1e-14  # rounding of sums, relative to the sum of their absolute terms
SHARP = 1e-4  # a sharpness with a larger error is summed over all entries
NEAR = 1e-12  # relative rounding of products of the marginals
QUICK_PAIRS = 1 << 24  # a summary computes sharpness for at most so many pairs: some .1 s


def x_log_x(x: Any) -> Any:
    return x * np.log(np.where(x > 0, x, 1.0))


def sharpness(result: Any) -> float:
    """Sharpness of the plan, from 0 (every point goes everywhere) to 1 (every point has one partner).

    It is ``1 - (H - L) / (I - L)``: H is the entropy of the plan, I the entropy of the independent plan with the same
    marginals, and L the larger entropy of the two marginals, a lower bound on H. Sharpness falls as reg grows;
    `mapuot.tune` finds the reg for a given sharpness. M is read once. A plan without mass has NaN.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = (np.arange(9.0)[:, None] - np.arange(9.0)) ** 2
    >>> [round(mapuot.solve(M, reg=reg, reg_m=9.0).sharpness, 2) for reg in (0.1, 1.0, 10.0, 100.0)]
    [1.0, 0.56, 0.14, 0.0]
    """
    p = result.problem
    mass, ((_, _, _, r), (_, _, _, s)) = result._values()
    if not 0 < mass < np.inf:
        return float("nan")
    rows = entropy(r / mass, p.rows.ranks)
    cols = entropy(s / mass, ALONE)
    if not min(rows, cols) > 0:
        return 1.0
    plan, size = plan_information(result, mass)
    information = plan + rows + cols
    listed = p.cost.operator != "products"
    if listed and ROUNDING * size > SHARP * min(rows, cols):  # rounding is too large relative to the information
        information = information_by_entries(result, mass, host(r), host(s))
    return float(min(1.0, max(0.0, information / min(rows, cols))))


def entropy(shares: Any, ranks: Ranks) -> float:
    """Return -sum x log x of shares with sum 1; for a share x > 1/2, log x is log1p of minus the sum of the others."""
    shares = host(shares)
    large = shares > 0.5
    rest = float(ranks.sum(shares[~large].sum()))
    total = -float(x_log_x(shares[~large]).sum())
    if large.any():
        total -= (1 - rest) * float(np.log1p(-rest))
    return float(ranks.sum(total))


def information_by_entries(result: Any, mass: float, r: Any, s: Any) -> float:
    """Return the information as a sum of terms p log(p / q) - p + q >= 0 with q = r s; all ranks must call it."""
    total = 0.0
    s = s / mass
    for i0, block in result._wide_blocks():
        if is_sparse(block):
            P = block.toarray()
        else:
            P = block
        independent = r[i0 : i0 + len(P), None] / mass * s
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = kl_divergence(P / mass, independent)
        terms[np.abs(P / mass - independent) <= NEAR * independent] = 0.0  # rounding
        total += float(np.nan_to_num(terms).sum())
    return float(result.problem.ranks.sum(total))


def plan_information(result: Any, mass: float) -> tuple[float, float]:
    """Return sum p log p and the sum of its absolute terms, which may cancel; every rank must call it."""
    p = result.problem
    if p.c is None:  # <P, log P> from log P = log u + log v + log c - M / reg: sums over marginals, and the cost
        total = -result._sums[0] / p.reg
        size = abs(total)
        marginals = (result._values()[1][k][3] for k in (0, 1))
        sides = zip(result.own_logs, marginals, strict=True)
        for k, ((log_x, moved), log_w) in enumerate(zip(sides, p.log_reference, strict=True)):
            with np.errstate(invalid="ignore"):
                part = float(np.where(moved > 0, moved * (host(log_x) + host(log_w)), 0.0).sum())
            if k == 0:
                part = float(p.rows.ranks.sum(part))
            total += part
            size += abs(part)
    else:
        blocks = ((b.data if is_sparse(b) else b) for _, b in result._wide_blocks())
        total = float(p.ranks.sum(sum(float(x_log_x(b).sum()) for b in blocks)))
        size = abs(total)
    return float(total / mass - np.log(mass)), float(size / mass + abs(np.log(mass)))


def describe_sharpness(result: Any) -> dict[str, str]:
    """Return the summary's line on sharpness; none if M is large or not at hand. Every rank must call this."""
    p = result.problem
    pairs = int(p.ranks.sum(p.cost.size))
    if result.status != "converged" or pairs > QUICK_PAIRS or not p.cost.at_hand:
        return {}
    value = result.sharpness
    hint = ": nearly the independent plan, in which every point goes everywhere; a smaller reg is sharper"
    return {"sharpness": f"{value:.3g} of 1" + hint * (value < CLEAR)}
