"""The scale of costs, in units of which reg and reg_m may be given: their median, mean or largest."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..backends.contract import host
from ..files import opened
from ..penalties import F64
from .kinds import as_cost
from .validate import as_choice, as_pair, as_penalties, as_positive

SCALES: dict[str, Any] = {"median": np.median, "mean": np.mean, "max": np.max}
ALL, ROWS = 1 << 22, 16  # costs of which all are read, of more those of some rows: ROWS at least


def some_costs(M: Any, a: Any, b: Any, backend: ModuleType) -> F64:
    """Return the finite costs of M where they are few or stored, else those of some rows, drawn with one seed."""
    cost = as_cost(opened(M), backend, a=a, b=b)
    m, n = cost.shape
    if cost.operator == "pairs":
        found = np.asarray(host(cost.data), np.float64)
    elif cost.size <= ALL:
        found = np.ravel(np.asarray(host(cost.read(0, m)), np.float64))
    else:
        rows = np.sort(np.random.default_rng(0).choice(m, min(m, max(ROWS, ALL // n)), replace=False)).tolist()
        found = np.concatenate([np.ravel(np.asarray(host(cost.read(i, i + 1)), np.float64)) for i in rows])
    return found[np.isfinite(found)]


def scale_of(M: Any, a: Any, b: Any, how: Any, backend: ModuleType) -> float:
    """Return the scale that ``how`` names."""
    costs, name = some_costs(M, a, b, backend), as_choice(how, "scale_cost", SCALES)
    return as_positive(float(SCALES[name](costs)) if costs.size else 0.0, f"the {name} of the costs")


def in_units(scale: float, reg: Any, reg_m: Any, penalty: Any) -> tuple[float, Any]:
    """Return reg and reg_m in units of M; a "range" has none."""
    pairs = zip(as_pair(reg_m, "reg_m"), as_penalties(penalty), strict=True)
    found = tuple(x if kind == "range" else scale * np.asarray(x, np.float64) for x, kind in pairs)
    return scale * as_positive(reg, "reg"), tuple(float(x) if np.ndim(x) == 0 else x for x in found)
