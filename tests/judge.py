"""Judge whether a claim of the library is true: every number of it against the independent answer.

The allowances are roundings only: ROUNDINGS units of float64 of the sum of the sizes of all terms for values, and
storage rounding where the documentation allows it (marginals, mass, objective); none for the certified error of the
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
from oracle import LONG
from scipy import sparse

from mapuot.arrays import host
from mapuot.status import has_tiny_masses, lost_digits

UNIT = 2.0**-53
ROUNDINGS = 64
STORAGE = {"float64": 0.0, "auto": 2.0**-23, "mixed": 2.0**-23}
FALSE = (
    "plan error", "float32 plan", "dual above", "gap untrue", "violation", "nan", "negative gap", "not met", "slopes",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """``size``: the error relative to the claim; 1 is the edge."""

    kind: str
    size: float
    text: str


@dataclass(frozen=True)
class Claim:
    """The library's claims about one problem; None where a function makes none."""

    converged: bool
    status: str
    plan: Any = None
    log_u: Any = None
    log_v: Any = None
    gap: Any = None
    error_bound: Any = None
    dual: Any = None
    objective: Any = None
    mass: Any = None
    row_marginal: Any = None
    col_marginal: Any = None
    pass_dual: Any = None  # the last pass's, in the trace
    kept: Any = None  # of a solve that skipped pairs: the pairs that its plan is not 0 on
    bounds: bool = True  # the plan's error where both sides are hard, too
    how: str = ""
    constant: float = 0.0  # in M
    translation: float = 0.0  # log u is the first of own_logs less this, log v the second and this, M's constant aside
    own_logs: Any = None  # log scalings with more digits
    lost: float = 0.0  # error of the plan below which rounding of its exponents allows nothing, as warnings say


@dataclass(frozen=True)
class LossClaim:
    """The claims of a loss between points: a value, and slopes by the points of rows."""

    converged: bool  # no warning says otherwise
    value: float
    slopes: Any
    unit: float  # rounding, the least and the largest number of the dtype of the slopes
    tiny: float
    most: float
    status: str = "loss"
    lost: float = 0.0


def claim_of(result: Any) -> Claim:
    numbers = (float(getattr(result, name)) for name in ("gap", "error_bound", "dual", "objective", "mass"))
    vectors = result.row_marginal, result.col_marginal
    plan = host(result.plan)
    if sparse.issparse(plan):
        plan = plan.toarray()
    else:
        plan = np.asarray(plan)
    if result.status != "cancelled":
        last = float(result.trace[-1].dual)
    else:
        last = None
    if result.skipped is not None:
        kept = plan > 0
    else:
        kept = None
    return Claim(
        bool(result.converged), str(result.status), plan, result.log_u, result.log_v, *numbers, *vectors, last, kept,
        how=str(result.how), constant=result.problem.constant, own_logs=result.own_logs,
        translation=result.problem.translation,
        lost=np.inf if has_tiny_masses(result.problem) else lost_digits(result),
    )  # fmt: skip


def claim_over_ranks(result: Any, rank: int) -> Claim | None:
    """Return the claim of all ranks together, on rank 0; None on the others."""
    plan = result.gather_plan(0)
    log_u, own_u, row_marginal = (result.gather(x, 0) for x in (result.log_u, result.own_logs[0], result.row_marginal))
    if rank:
        return None
    if sparse.issparse(plan):
        plan = plan.toarray()
    else:
        plan = host(plan)
    if result.skipped is not None:
        kept = plan > 0
    else:
        kept = None
    own = own_u, result.own_logs[1]
    return replace(claim_of(result), plan=plan, log_u=log_u, row_marginal=row_marginal, kept=kept, own_logs=own)


def is_false(kind: str) -> bool:
    """Return whether a failure of this kind is a false certificate, whatever its cause ("kind, cause")."""
    return kind.partition(",")[0] in FALSE


@dataclass(frozen=True)
class Measure:
    """A pair of potentials, every term from its definition in long double."""

    plan: Any
    primal: float
    dual: float
    scale: float  # the sum of the sizes of all terms
    steep: float  # growth of the primal value by a relative change x of the marginals: steep x + stiff x^2
    stiff: float
    exponent: float  # relative rounding of an entry of the plan
    violation: float
    priced: float  # marginal errors of the hard constraints times their potentials: no gap counts them

    def moved(self, x: float) -> float:
        """Return how far the primal value may move if exponents move by x; inf if they have no digit left."""
        if not x <= 1:
            return np.inf
        return x * (self.scale + self.steep) + x * x * self.stiff


def reference_measure(problem: Any) -> Any:
    c = problem.reference
    if isinstance(c, str):
        a = np.asarray(problem.a, LONG)
        b = np.asarray(problem.b, LONG)
        if c == "product":
            return np.outer(a, b)
        return np.ones(problem.shape, LONG)
    return np.asarray(c, LONG)


def plan_of(problem: Any, log_u: Any, log_v: Any) -> Any:
    """Return diag(u) c exp(-M / reg) diag(v); an infinite u or v stands before zeros only."""
    u, v = (np.where(np.isposinf(x), -np.inf, np.asarray(x, LONG)) for x in (log_u, log_v))
    with np.errstate(all="ignore"):
        P = np.exp(u[:, None] + v - np.asarray(problem.M, LONG) / problem.reg + np.log(reference_measure(problem)))
    return np.where(np.isnan(P), 0, P)


def divergence(kind: str, r: Any, t: Any, rho: Any) -> Any:
    soft = np.where(np.isinf(rho) | (kind == "range"), 0.0, rho)
    if kind == "kl":
        used = (r > 0) & (t > 0)
        x = np.log(np.where(used, r, 1) / np.where(used, t, 1))
        near = np.where(used & (np.abs(x) < 1e-2), np.log1p((r - t) / np.where(used, t, 1)), 0)
        small = np.abs(x) < 1e-3
        series = near**2 * (0.5 + near * (1 / LONG(3) + near * (0.125 + near * (1 / LONG(30) + near / 144))))
        return soft * np.where(used & small, t * series, np.where(used, r * x, 0) - r + t)
    if kind == "tv":
        return soft * np.abs(r - t)
    return 0.5 * soft * (r - t) ** 2


def dual_term(kind: str, f: Any, t: Any, rho: Any) -> Any:
    """Return min over r >= 0 of D(r | t) + f r."""
    if kind == "kl":
        value = np.where(np.isinf(rho), f * t, -rho * t * np.expm1(-f / rho))
    elif kind == "tv":
        value = np.where(f < -rho * (1 + 1e-15), -np.inf, np.minimum(f, rho) * t)
    elif kind == "l2":
        value = np.where(f < rho * t, f * t - f * f / (2 * rho), rho * t * t / 2)
    else:
        value = np.where(f > 0, np.where(rho < 1, f, 0) * np.maximum(0, 1 - rho) * t, f * (1 + rho) * t)
    return np.where((t == 0) & np.isneginf(f), 0.0, value)


def missed(kind: str, r: Any, t: Any, rho: Any) -> Any:
    if kind == "range":
        return np.maximum(0, np.maximum(np.maximum(0, 1 - rho) * t - r, r - (1 + rho) * t))
    return np.where(np.isinf(rho), np.abs(r - t), 0)


def measure(problem: Any, log_u: Any, log_v: Any, kept: Any = None, translation: float = 0.0) -> Measure:
    """``kept``: the pairs that count; None: all. ``translation``: log u is less by this, log v more."""
    with np.errstate(all="ignore"):
        P = plan_of(problem, log_u, log_v)
        reg = LONG(problem.reg)
        if kept is not None:
            P = np.where(kept, P, 0)
        mass = P.sum()
        c = reference_measure(problem)
        primal = dual = reg * (c.sum() - mass)
        M = np.where(P > 0, np.abs(np.asarray(problem.M, LONG)), 0)
        scale = reg * (c.sum() + mass) + (P * M).sum()
        hard = 0
        steep = 0
        stiff = 0
        priced = 0
        logs = [size_of(x) for x in (log_u, log_v)]
        # POT's functions give M's dtype
        if np.asarray(log_u).dtype == np.float32:
            unit = 2.0**-24
        else:
            unit = UNIT
        if isinstance(problem.reference, str) and problem.reference == "product":
            logs += [largest_log(problem.side(k)[1]) for k in (0, 1)]  # exponents hold log a and log b
        exponent = 4 * unit * (8 + sum(logs) + float(M.max() / reg))
        for k, x in enumerate((log_u, log_v)):
            kind, weight, rho = problem.side(k)
            t = np.asarray(weight, LONG)
            rho = np.asarray(rho, LONG)
            r = P.sum(1 - k)
            f = reg * np.asarray(x, LONG)
            finite = np.where(np.isfinite(f), f, 0)
            whole = f + reg * LONG(translation if k else -translation)
            paid = divergence(kind, r, t, rho)
            price = dual_term(kind, whole, t, rho)
            primal += (finite * r).sum() + paid.sum()
            dual += price.sum()
            scale += (np.abs(finite) * (r + t) + np.abs(paid) + np.abs(np.where(np.isinf(price), 0, price))).sum()
            finite_rho = np.where(np.isinf(rho) | (kind == "range"), 0, rho)
            slope = {"kl": np.log(np.where((r > 0) & (t > 0), r / t, 1)), "l2": r - t}.get(kind, 1)  # D'(r) / rho
            steep += (finite_rho * (np.abs(slope) * r + t * (kind == "tv"))).sum()
            stiff += (finite_rho * (r * r + t * t if kind == "l2" else r + t)).sum()
            hard += missed(kind, r, t, rho).sum()
            priced += (np.abs(np.where(np.isfinite(whole), whole, 0)) * missed(kind, r, t, rho)).sum()
    if mass > 0:
        violation = float(hard / mass)
    else:
        violation = 0.0
    return Measure(P, *map(float, (primal, dual, scale, steep, stiff, exponent)), violation, float(priced))


def judge(
    problem: Any, claim: Claim, options: dict[str, Any], best: Any = None
) -> tuple[list[Failure], dict[str, float]]:
    """Return the false claims, and figures: whether a reference was found, how far below the bound the error is.

    ``best``: the oracle's answer, where it is known.
    """
    found = finite_failures(claim, options)
    best = best or oracle.answer(problem)
    if best is None and claim.converged and not np.isnan(claim.log_v).any():
        best = oracle.answer(problem, claim.log_v)
    if best is None:
        return found, {"no reference": 1}
    if any(np.isnan(x).any() for x in (claim.plan, claim.log_u, claim.log_v)):
        return found, {}
    if claim.translation and not claim.constant:  # log scalings of 1e11 are rounded by 1e-5: a plan has more digits
        mine = measure(problem, *claim.own_logs, claim.kept, claim.translation)
    else:
        mine = measure(problem, claim.log_u, claim.log_v, claim.kept)
    figures: dict[str, float] = {
        "converged": claim.converged,
        "truncated": claim.kept is not None,
        "kept": "pairs kept" in claim.how,
    }
    storage = STORAGE[options.get("precision", "auto")]
    found += met_failures(claim, options)
    found += value_failures(problem, claim, best, mine, storage)
    if claim.constant:  # the plan is from the scalings for M less this
        less = problem.replace(M=problem.M - claim.constant)
        mine = measure(less, *claim.own_logs, claim.kept, claim.translation)
    found += error_failures(problem, claim, best, mine, storage, figures)
    found += marginal_failures(problem, claim, mine, storage)
    return found, figures


def judge_loss(
    problem: Any, claim: LossClaim, options: dict[str, Any]
) -> tuple[list[Failure], dict[str, float]]:  # fmt: skip
    """Return the false claims of a loss: a lower bound up to rounding, and the slopes of a plan within ``tol``.

    The slope by x_i is sum_j P_ij dM_ij / dx_i: plans that differ by ``tol`` of their mass have slopes that differ by
    at most tol times the mass and the largest |dM_ij / dx_i|_1. Slopes are compared where M is smooth, and where a
    side is soft: between hard sides the masses differ from the given ones.
    """
    best = oracle.answer(problem)
    if best is None:
        return [], {"no reference": 1}
    found = []
    stored = 4 * STORAGE[options.get("precision", "auto")]
    rounding = (ROUNDINGS * UNIT + stored) * best.scale + best.gap + problem.cost_rounding * best.mass
    if np.isnan(claim.value) or (claim.converged and np.isinf(claim.value)):  # -inf is a bound, of a failed solve
        found.append(Failure("nan" if claim.converged else "failed with nan", 1.0, f"value {claim.value}"))
    elif claim.value > best.dual + rounding:
        over = float(claim.value - best.dual)
        found.append(Failure("dual above", over / rounding, f"value {claim.value!r} above the optimum {best.dual!r}"))
    if not claim.converged or (problem.hard(0) and problem.hard(1)):
        return found, {"converged": claim.converged}
    x, y, metric, scale = problem.points
    x, y = (np.asarray(z, LONG) for z in (x, y))
    if metric == "sqeuclidean":
        each = 2 * LONG(scale) * (x[:, None] - y)
    elif metric == "inner":
        each = np.broadcast_to(-LONG(scale) * y, (*problem.shape, y.shape[1]))
    else:
        return found, {"converged": claim.converged}
    right = (best.plan[..., None] * each).sum(1)
    largest = float(np.abs(each).sum(2).max())
    far = LONG(scale) * max(float(np.abs(z).max()) for z in (x, y)) * y.shape[1]
    allowed = (options["tol"] + best.error) * best.mass * largest + 2 * claim.unit * float(np.abs(right).sum())
    allowed += float(64 * UNIT * best.mass * far)
    allowed += right.size * claim.tiny
    off = float(np.abs(np.asarray(claim.slopes, LONG) - right).sum())
    if off > allowed and np.abs(right).max() < claim.most:
        text = f"slopes differ by {off:.3e} of {np.abs(right).sum():.3e}, {allowed:.3e} are allowed"
        found.append(Failure("slopes", off / allowed, text))
    return found, {"converged": claim.converged, "error / bound": off / allowed if allowed else 0.0}


def finite_failures(claim: Claim, options: dict[str, Any]) -> list[Failure]:
    """No NaN anywhere; in a converged answer only the potentials of points without mass are infinite.

    A gap is inf while hard columns miss too much; a solve that `tol_gap` ended may know no bound of the plan's error.
    """
    found = []
    infinite = {"gap", *(["error_bound"] if options.get("tol_gap") is not None else [])}
    for name in (
        "plan", "log_u", "log_v", "gap", "error_bound", "dual", "objective", "mass", "row_marginal", "col_marginal",
    ):  # fmt: skip
        value = getattr(claim, name)
        if value is None:
            continue
        if claim.converged:
            kind = "nan"
        else:
            kind = "failed with nan"
        if np.isnan(value).any():
            found.append(Failure(kind, 1.0, f"{name} holds NaN ({claim.status})"))
        elif claim.converged and not name.startswith("log") and name not in infinite and not np.isfinite(value).all():
            found.append(Failure("nan", 1.0, f"{name} is not finite: {value} ({claim.status})"))
    return found


def met_failures(claim: Claim, options: dict[str, Any]) -> list[Failure]:
    if not claim.converged or claim.error_bound is None or "tol" not in options:
        return []
    gap_met = options.get("tol_gap") is not None and claim.gap <= options["tol_gap"] * abs(claim.dual) * (1 + 1e-9)
    if claim.error_bound <= options["tol"] * (1 + 1e-9) or gap_met:
        return []
    return [Failure("not met", 1.0, f"converged with error_bound {claim.error_bound:.2e} > tol {options['tol']:.2e}")]


def error_failures(
    problem: Any, claim: Claim, best: Any, mine: Measure, storage: float, figures: dict[str, float]
) -> list[Failure]:
    unbounded = not claim.bounds and problem.hard(0) and problem.hard(1)
    if unbounded or claim.error_bound is None or not np.isfinite(claim.error_bound):
        return []
    bound = float(claim.error_bound)
    single = claim.plan.dtype == np.float32
    plan = np.asarray(claim.plan, LONG)
    rounding = 2.0**-24 if single else 8 * UNIT
    error = relative(plan, best.plan)
    coarse = claim.own_logs is None or np.asarray(claim.log_u).dtype == np.float32  # then the plan has more digits
    shown = plan if coarse else mine.plan  # the plan of the returned potentials in long double
    hidden = relative(shown, best.plan) - rounding * coarse
    judged = f"(mass {best.mass:.3g}, {claim.status})"
    if bound > 0:
        figures["error / bound"] = hidden / bound
    else:
        figures["error / bound"] = 0.0
    allowed = bound * (1 + 1e-9) + best.error + 32 * UNIT
    if hidden > allowed:
        kind = "plan error" + ", by exponents" * bool(hidden <= allowed + 2 * mine.exponent)
        return [Failure(kind, hidden / allowed, f"plan error {hidden:.3e} > error_bound {bound:.3e} {judged}")]
    if error > allowed + rounding:
        if single:
            kind = "float32 plan"
        else:
            kind = "plan error, by exponents"
        return [Failure(kind, error / allowed, f"error of the returned plan {error:.3e} > {bound:.3e} {judged}")]
    return []


def value_failures(problem: Any, claim: Claim, best: Any, mine: Measure, storage: float) -> list[Failure]:
    found: list[Failure] = []
    if not np.isfinite(best.dual):
        return found
    if claim.converged:
        scale = best.scale
    else:
        scale = max(best.scale, mine.scale)
    rounding = ROUNDINGS * UNIT * scale + best.gap + best.violation * best.scale
    stored = 4 * storage  # beyond the rounding of K a value is wrong for the rounded problem, too
    for name, dual in (("dual", claim.dual), ("trace[-1].dual", claim.pass_dual)):
        if dual is not None and dual > best.dual + rounding:
            over = float(dual - best.dual)
            kind = "dual above" + ", of a pass" * (name != "dual") + ", by storage" * (over <= stored * scale)
            text = f"{name} {dual!r} above the optimum {best.dual!r} by {over:.2e}, {over / scale:.1e} of all terms"
            found.append(Failure(kind, over / rounding, f"{text} ({claim.status})"))
    if claim.gap is not None and np.isfinite(claim.gap):
        over = float(mine.primal - best.dual - claim.gap)
        loose = rounding + mine.moved(mine.exponent)
        hidden = stored * np.sqrt(max(0.0, mine.primal - best.dual) * mine.stiff) + stored**2 * mine.stiff
        hidden += stored * (mine.steep + scale * (problem.hard(0) or problem.hard(1)))
        if claim.gap < -rounding:
            text = f"gap {claim.gap:.3e} < 0 ({claim.status})"
            found.append(Failure("negative gap", float(-claim.gap / rounding), text))
        elif over > loose + mine.priced:
            kind = "gap untrue" + ", by storage" * bool(over <= loose + 2 * hidden)
            text = f"objective above the optimum by {mine.primal - best.dual:.3e} > gap {claim.gap:.3e}"
            text += f", beyond it {over / scale:.1e} of all terms"
            found.append(Failure(kind, over / loose, f"{text} ({claim.status})"))
    if claim.objective is not None and np.isfinite(claim.objective):
        exponent = mine.exponent + stored + problem.cost_rounding / problem.reg
        loose = rounding + mine.moved(exponent) + problem.cost_rounding * abs(float(mine.plan.sum()))
        off = float(abs(claim.objective - mine.primal))
        if off > loose:
            text = f"objective {claim.objective!r} of a plan whose objective is {mine.primal!r}"
            found.append(Failure("objective", off / loose, f"{text} ({claim.status})"))
    return found


def marginal_failures(problem: Any, claim: Claim, mine: Measure, storage: float) -> list[Failure]:
    """Mass and marginals equal the plan's: up to the storage's rounding, or up to the certificate."""
    found = []
    if claim.error_bound is not None and np.isfinite(claim.error_bound):
        bound = claim.error_bound
    else:
        bound = None
    mass = float(mine.plan.sum())
    if bound is None or not 0 < mass < np.inf:
        return found
    exponents = sum(float(size_of(x)) for x in (claim.log_u, claim.log_v))
    rounding = 4 * storage + 16 * UNIT * (8 + exponents)
    for name, axis in (("row_marginal", 1), ("col_marginal", 0), ("mass", None)):
        given = getattr(claim, name)
        if given is None:
            continue
        off = float(np.abs(np.asarray(given, LONG) - mine.plan.sum(axis)).sum()) / mass
        if off > rounding + bound:
            text = f"{name} differs from the plan's by {off:.2e} of the mass, error_bound {bound:.2e}"
            found.append(Failure(name, off / (rounding + bound), f"{text} ({claim.status})"))
    return found


def largest_log(weight: Any) -> float:
    """Return the largest |log| of the masses, without masses below 1e-20 of the largest, which round nothing."""
    heavy = weight[weight > 1e-20 * np.max(weight, initial=0.0)]
    return float(np.abs(np.log(heavy)).max(initial=0.0))


def size_of(x: Any) -> Any:
    x = np.asarray(x)
    return np.abs(x[np.isfinite(x)]).max(initial=0)


def relative(P: Any, Q: Any) -> float:
    """Return |P - Q|_1 / |P|_1; 0 for two empty plans."""
    size = P.sum()
    off = np.abs(P - Q).sum()
    if size > 0:
        return float(off / size)
    if off == 0:
        return 0.0
    return np.inf
