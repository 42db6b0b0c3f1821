"""Marginal penalties D(r | t): prox, conjugate and Fenchel-Young gap, in float64 NumPy; the plan error of a gap.

One entry is ``reg * KL``-regularised: with s = (K v)_i the total kernel seen by the point, the solver needs
log u = prox(log s), the dual term -D*(-f) with f = reg * log u, and the gap D(r|t) + D*(-f) + f r.
The C twin is src_c/common/penalty.h. Sources: Chizat, Peyre, Schmitzer, Vialard 2018 (scaling algorithms, KL, TV,
range); the L2 prox through the Wright omega function follows from its optimality condition.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .enums import members

F64 = NDArray[np.float64]

NUMBERS = members("mapuot_penalty")


@dataclass(frozen=True)
class Penalty:
    """Properties of a penalty; the functions below have its formulas."""

    number: int  # mapuot_penalty
    words: str  # for users
    strict: bool  # a weight 0 forbids any mass there
    rounds: str | None  # rounding rule of its terms: "kl", "tv" or "l2" (src_c/common/rules.h)
    finite: bool = False  # whether reg_m must be finite: there is no hard limit
    kinks: bool = False  # D has kinks: they mislead extrapolation, and a potential has several optimal marginals
    degree: int = 1  # D(k r | k t) = k^degree D(r | t)


PENALTIES = {
    "kl": Penalty(NUMBERS["kl"], "KL", True, "kl"),
    "balanced": Penalty(NUMBERS["balanced"], "balanced", True, "kl"),
    "tv": Penalty(NUMBERS["tv"], "total variation", False, "tv", finite=True, kinks=True),
    "l2": Penalty(NUMBERS["l2"], "squares", False, "l2", finite=True, degree=2),
    "range": Penalty(NUMBERS["range"], "range", True, None, kinks=True),
}


def prox(kind: str, log_s: F64, t: F64, rho: F64, upper: F64 | None, reg: float) -> F64:
    """Return the log u that maximises the dual at one point, given log s; -inf if the point carries no mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        balanced: F64 = np.log(t) - log_s  # r = t
        if kind in ("kl", "balanced"):
            fi = np.where(np.isinf(rho), 1.0, rho / (rho + reg))
            return np.asarray(fi * balanced)
        if kind == "tv":  # r = t while |f| <= rho
            return np.asarray(np.clip(balanced, -rho / reg, rho / reg))
        if kind == "l2":  # log u = rho t / reg - omega(z) = log omega(z) - x, z = x + rho t / reg (less cancellation)
            from scipy.special import wrightomega  # noqa: PLC0415 - 180 ms on import, and few penalties are L2

            x = np.log(rho / reg) + log_s
            most = rho * t / reg
            omega = np.real(wrightomega(x + most))
            return np.asarray(np.where(most < np.abs(x), most - omega, np.log(omega) - x))
        assert upper is not None
        low = np.log(rho) + balanced
        high = np.log(upper) + balanced
        return np.asarray(np.clip(0.0, low, high))


def project(kind: str, log_x: F64, rho: F64, reg: float) -> F64:
    """Project potentials onto the domain of the dual: |f| <= rho for total variation, no bound for the others."""
    if kind != "tv":
        return log_x
    return np.where(np.isfinite(log_x), np.clip(log_x, -rho / reg, rho / reg), log_x)


def kl_divergence(r: F64, t: F64) -> F64:
    """r log(r / t) - r + t = t sum (k - 1) x^k / k! with x = log(r / t), without the cancellation where r is near t."""
    x = np.where(np.abs(r - t) < 0.5 * t, np.log1p((r - t) / t), np.log(r) - np.log(t))
    near = t * x * x * (1 / 2 + x * (1 / 3 + x * (1 / 8 + x * (1 / 30 + x / 144))))
    return np.where(r > 0, np.where(np.abs(x) < 1e-2, near, r * x - r + t), t)


def divergence(kind: str, r: F64, t: F64, rho: F64, upper: F64 | None) -> F64:
    """Return D(r | t) per point; 0 for hard constraints (rho = inf, balanced, range), see `violation`."""
    finite = np.where(np.isinf(rho), 0.0, rho)
    if kind in ("kl", "balanced"):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return finite * np.where(finite > 0, kl_divergence(r, t), 0.0)
    if kind == "tv":
        return finite * np.abs(r - t)
    if kind == "l2":
        return 0.5 * finite * (r - t) * (r - t)  # not squared first: the square of 1e-160 is 0
    return np.zeros_like(r)


def dual_term(kind: str, f: F64, t: F64, rho: F64, upper: F64 | None) -> F64:
    """Return -D*(-f) per point, its term of the dual value (0 where t = 0 and u = 0).

    Of total variation it is -inf beneath -rho, but for rounding.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind in ("kl", "balanced"):
            soft = -rho * (t * np.expm1(-f / rho))  # rho t may underflow where the mass does not
            value = np.where(np.isinf(rho), f * t, soft)
        elif kind == "tv":
            value = np.where(f < -rho * (1 + 1e-9), -np.inf, np.clip(f, -rho, rho) * t)
        elif kind == "l2":
            value = np.where(f < rho * t, f * t - f * (f / (2 * rho)), rho * t * t / 2)
        else:
            assert upper is not None
            value = np.where(f < 0, f * upper * t, np.where(rho > 0, f * rho * t, 0.0))  # f may be inf, rho 0
    return np.where((t == 0) & (f == -np.inf), 0.0, value)


def mass_slope(f: Any, rho: float, reg: float, other: Any) -> Any:
    """dW/da of KL or balanced rows, c = a b^T and |b| = ``other`` (answer/slopes.py: formula); NumPy or CuPy."""
    if np.ndim(rho) == 0 and np.isinf(rho):
        return f + reg * (other - 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(-f / rho)  # share of the mass that leaves the point
        return reg * (other - ratio) - rho * np.expm1(-f / rho)


def violation(kind: str, r: F64, t: F64, rho: F64, upper: F64 | None) -> F64:
    """Return the distance of r from the set that the penalty allows; 0 for soft penalties."""
    if kind == "range":
        assert upper is not None
        return np.maximum(0.0, np.maximum(rho * t - r, r - upper * t))
    if kind in ("kl", "balanced"):
        return np.where(np.isinf(rho), np.abs(r - t), 0.0)
    return np.zeros_like(r)


def misfit(kind: str, f: F64, r: F64, t: F64, rho: F64, upper: F64 | None) -> F64:
    """Return the distance of r from the marginals that f makes optimal, for penalties with kinks: tv, range."""
    if kind == "tv":
        edge = np.isclose(np.abs(f), rho, rtol=1e-15, atol=0.0)
        low = np.where(edge & (f > 0) | (f > rho), 0.0, t)
        high = np.where(edge & (f < 0), np.inf, np.where(~edge & (f > rho), 0.0, t))
        return np.where(~edge & (f < -rho), np.inf, np.maximum(0.0, np.maximum(low - r, r - high)))
    assert upper is not None
    low = np.where(f < 0, upper * t, rho * t)
    high = np.where(f > 0, rho * t, upper * t)
    return np.maximum(0.0, np.maximum(low - r, r - high))


def gap_term(kind: str, f: F64, r: F64, t: F64, rho: F64, upper: F64 | None) -> F64:
    """Fenchel-Young gap D(r|t) + D*(-f) + f r of the soft part, >= 0 (range: at r clipped into the range)."""
    if kind in ("kl", "balanced"):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            q = t * np.exp(-f / rho)
            x = np.log(r) - np.log(q)
            near = q * x * x * (0.5 + x / 3)
            far = np.where(r > 0, r * x - r + q, q)
            value = rho * np.where(np.abs(x) < 1e-4, near, far)
        return np.where(np.isinf(rho) | (t == 0), 0.0, value)
    if kind == "l2":
        low = f >= rho * t  # here the best r is 0
        e = r - t + f / rho
        return np.where(low, r * (f - rho * t) + 0.5 * rho * r * r, 0.5 * rho * e * e)
    if kind == "tv":  # products: the mass may be far below t; f within rounding of the bound counts as the bound
        at = np.where(np.abs(f) >= rho * (1 - 1e-15), np.copysign(rho, f), f)
        gap = np.where(r < t, (rho - at) * (t - r), (rho + at) * (r - t)) + np.maximum(f - rho, 0.0) * r
        return np.where(f < -rho * (1 + 1e-9), np.inf, gap)
    assert upper is not None
    r = np.clip(r, rho * t, upper * t)
    return np.maximum(0.0, np.where(r > 0, f * r, 0.0) - dual_term(kind, f, t, rho, upper))  # < 0 by rounding only


def plan_error(d: float) -> float:
    """|P - P*|_1 / mass from d >= KL(P* | P) / mass: docs/mathematics.md (10). Twin: src_c/common/rules.h."""
    if d >= 0:
        return d / 3 + math.sqrt(2 * d + d * d / 9)  # subadditive in d
    return math.inf
