"""A summary of a Result in words and numbers, for notebooks and reports."""

from html import escape
from typing import Any

import numpy as np

from ..arrays import any_of
from .sharpness import describe_sharpness

REFERENCES = {"product": "a b^T", "uniform": "ones"}


def number(value: float) -> str:
    return f"{value:.6g}"


def in_unit(value: float, unit: float) -> str:
    """Return a reg or reg_m in the unit that ``scale_cost`` gave it, and in the units of M."""
    if unit == 1 or not np.isfinite(value):
        return number(value)
    return f"{number(value / unit)} x scale_cost = {number(value)}"


def side_words(side: Any, unit: float) -> str:
    """Name the penalty of a side and its reg_m, given the answer's ``scale_cost``; every rank must call it."""
    low, high = (float(x) for x in side.rho_range)
    if side.penalty == "balanced":
        return "balanced"
    if side.penalty == "range":
        high = float(side.ranks.max(np.max(side.upper, initial=0.0)))
        return f"between {number(low)} and {number(high)} of each mass"
    if low == high:
        one = in_unit(low, unit)
    else:
        one = f"{in_unit(low, unit)} to {in_unit(high, unit)}"
    return f"{side.kind.words}, reg_m {one}"


def accuracy_words(result: Any) -> str:
    """Say how far the plan may be from the optimal plan; every rank must call it."""
    if not result.error_bound < 1:
        return "nothing is certified yet"
    optimal = "the optimal plan"
    if hasattr(result, "settled"):  # of gromov: the problem of a step is convex, the whole is not
        optimal += " of its last step"
    text = f"the plan differs from {optimal} by at most {result.error_bound:.1e} of its mass"
    if any(side.ranks.max(any_of(side.hard)) or side.penalty == "range" for side in result.problem.sides):
        text += ", the mismatch of the balanced marginals included"
    return text


def facts(result: Any) -> dict[str, str]:
    """Return {name: text} that describes the problem, its answer and the accuracy; every rank must call this."""
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
    reg = in_unit(p.reg, result.scale_cost)
    if p.range_over_reg > 0:
        reg += f", 1/{number(p.range_over_reg)} of the range of the costs"
    n_steps = len(getattr(result, "steps", ()))
    described = {
        "solve": f"{result.status} after {result.n_passes} passes" + f" of step {n_steps}" * bool(n_steps),
        "costs": f"{m} x {n}, {p.cost.kind}, from {low} to {high}" + ", some inf" * bool(p.forbidden),
        "reg": reg, "rows": f"mass {number(p.rows.mass)}, {side_words(p.rows, result.scale_cost)}",
        "columns": f"mass {number(p.cols.mass)}, {side_words(p.cols, result.scale_cost)}", "reference": reference,
        "moved mass": f"{number(result.mass)}: {' and '.join(moved)}", "accuracy": accuracy_words(result),
        **describe_sharpness(result),
    }  # fmt: skip
    if reference == REFERENCES["product"]:
        del described["reference"]
    return described


def as_table(result: Any) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts(result).items())
    return f"<table class='mapuot'><caption>mapuot.Result</caption>{rows}</table>"
