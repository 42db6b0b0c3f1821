"""A summary of a Result in words and numbers, for notebooks and reports."""

from html import escape
from typing import Any

import numpy as np

from ..arrays import any_of
from .sharpness import describe_sharpness

REFERENCES = {"product": "a b^T", "uniform": "ones"}


def number(value: float) -> str:
    return f"{value:.6g}"


def side_words(side: Any) -> str:
    """Name the penalty of a side and its reg_m; every rank must call it."""
    low, high = (float(x) for x in side.rho_range)
    if side.penalty == "balanced":
        return "balanced"
    if side.penalty == "range":
        high = float(side.ranks.max(np.max(side.upper, initial=0.0)))
        return f"between {number(low)} and {number(high)} of each mass"
    if low == high:
        one = number(low)
    else:
        one = f"{number(low)} to {number(high)}"
    return f"{side.kind.words}, reg_m {one}"


def certificate_words(result: Any) -> str:
    if not result.error_bound < 1:
        told = "nothing is certified yet"
    elif any(side.ranks.max(any_of(side.hard)) or side.penalty == "range" for side in result.problem.sides):
        told = f"error_bound {result.error_bound:.1e} counts what hard marginals miss, relative to the mass"
    else:
        told = f"the plan is within {result.error_bound:.1e} of the optimal one, in L1 and relative to its mass"
    return f"{result.status} after {result.n_passes} passes; {told}"


def facts(result: Any) -> dict[str, str]:
    """Return {name: text} that describes the problem, its answer and the certificate; every rank must call this."""
    p = result.problem
    m = int(p.ranks.sum(p.shape[0]))
    n = p.shape[1]
    if isinstance(p.unmasked, str):
        reference = REFERENCES[p.unmasked]
    else:
        reference = "a matrix"
    if p.masked is not None:
        reference += f", {number(100 * p.masked.mask.keep)} % of its pairs kept, seed {p.masked.mask.seed}"
    moved = [f"{100 * result.mass / side.mass:.4g} % of {side.name}" for side in (p.rows, p.cols) if side.mass > 0]
    low, high = (number(p.constant + x) for x in (p.M_min, p.M_max))
    return {
        "problem": f"{m} x {n}, costs from {low} to {high}" + ", some inf" * bool(p.forbidden),
        "reg": f"{number(p.reg)} (1/{number(p.spread)} of the range of M)" if p.spread > 0 else number(p.reg),
        "rows": f"mass {number(p.rows.mass)}, {side_words(p.rows)}",
        "columns": f"mass {number(p.cols.mass)}, {side_words(p.cols)}", "reference": reference,
        "certificate": certificate_words(result),
        "error_bound": f"{result.error_bound:.2e}" if result.error_bound < 1 else "none yet",
        "gap": f"{result.gap:.2e}", "mass": f"{number(result.mass)}: {' and '.join(moved)}", "how": result.how,
        **describe_sharpness(result),
    }  # fmt: skip


def as_table(result: Any) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts(result).items())
    return f"<table class='mapuot'><caption>mapuot.Result</caption>{rows}</table>"
