"""Contents of an answer's file: all data of a Result except M and the plan, so that `mapuot.load` can restore it.

The command line writes the same contents, so that `mapuot.load` reads its answers, too. Every number, text and array
has a name of its own. The trace is a table with one row for each pass and the columns `TRACE`; the status is stored as
an index into `STATUSES`.
"""

import dataclasses
from typing import Any

import numpy as np

from ..arrays import host
from ..contract import Stats
from ..status import STATUSES

# file versions: plain, with a mask, with scalings for M less a constant or without their translation; old readers must
# refuse the later two
FORMAT, MASKED, LOWERED = 1, 2, 3
TRACE = tuple(field.name for field in dataclasses.fields(Stats))
VECTORS = ("log_u", "log_v", "row_marginal", "col_marginal", "a", "b", "rho_a", "rho_b")
NUMBERS = ("cost", "objective", "dual", "mass", "reg", "M_min", "M_max", "c_mass")
TEXTS = ("status", "penalty_a", "penalty_b", "reference", "dtype")


def contents(result: Any) -> dict[str, Any]:
    """Return {name: array, number or text}. Every rank must call it; vectors are whole on rank 0 and None elsewhere."""
    p = result.problem

    def own(x: Any) -> Any:
        """Return a vector of the columns on rank 0, None elsewhere; every rank holds the whole vector."""
        return host(x) if p.ranks.rank == 0 else None

    values: dict[str, Any] = {
        "log_u": result.gather(result.own_logs[0]), "log_v": own(result.own_logs[1]),
        "row_marginal": result.gather(result.row_marginal),
        "col_marginal": own(result.col_marginal),
        "cost": result.cost, "objective": result.objective, "dual": result.dual, "gap": result.gap,
        "error_bound": result.error_bound, "mass": result.mass, "reg": float(p.reg),
        "n_passes": result.n_passes, "status": result.status, "how": result.how, "format": FORMAT,
        "M_min": float(p.M_min), "M_max": float(p.M_max), "forbidden": int(p.forbidden), "c_mass": float(p.c_mass),
        "dtype": p.cost.dtype.name, "reference": p.unmasked if isinstance(p.unmasked, str) else "matrix",
        "trace": trace_table(result.trace),
    }  # fmt: skip
    if p.masked is not None:
        mask = p.masked.mask
        values |= {"format": MASKED, "keep": mask.keep, "seed": str(mask.seed), "turned": int(mask.turned)}
    if p.constant or p.translation:
        values |= {"format": LOWERED, "constant": p.constant, "translation": p.translation}
    for side, whole in ((p.rows, result.gather), (p.cols, own)):
        values[side.name] = whole(side.weight)
        values["rho_" + side.name] = whole(side.rho)
        values["penalty_" + side.name] = side.penalty
        if side.upper is not None:
            values["upper_" + side.name] = whole(side.upper)
    return values


def trace_table(trace: list[Stats]) -> Any:
    rows = [[STATUSES.index(s.status) if name == "status" else getattr(s, name) for name in TRACE] for s in trace]
    return np.array(rows, np.float64).reshape(len(rows), len(TRACE))


def trace_of(table: Any) -> list[Stats]:
    if table.ndim != 2 or table.shape[1] != len(TRACE):
        raise ValueError(f"trace must have {len(TRACE)} columns, got shape {table.shape}")
    found = []
    for row in table.tolist():
        stat = Stats(**dict(zip(TRACE, row, strict=True)))
        stat.n_pass = int(stat.n_pass)
        stat.rejected = bool(stat.rejected)
        stat.status = STATUSES[int(row[7])]
        found.append(stat)
    return found
