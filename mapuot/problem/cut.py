"""Infeasible masses under forbidden pairs: find a proof, a set of points with too little mass in its partners."""

import numpy as np

from ..errors import InfeasibleError
from ..penalties import F64
from .parts import allowed_pairs
from .problem import BLOCK_BYTES, Problem
from .validate import MASS_TOLERANCE, told_points


def check_cut(problem: Problem, log_u: F64, log_v: F64, which: str = "") -> None:
    """Raise if a set of points must receive more mass than all its partners may have.

    If no plan meets the hard marginals, some set of points proves it (Hall's condition), and the potentials of these
    points grow without end. So the candidates are the sets of points with potentials above a threshold, and their
    partners are all points of allowed pairs. A set that is found is a proof; after too few passes none may be found.
    ``which`` names the problem of a batch in the message.
    """
    rows, cols, ranks = problem.rows, problem.cols, problem.ranks
    if not ranks.max(rows.demands or cols.demands) or not (problem.forbidden or problem.c is not None):
        return
    of_rows, of_cols = best_partners(problem, log_u, log_v)
    of_rows, log_u, *limits = (np.concatenate(ranks.all(x)) for x in (of_rows, log_u, *rows.limits))
    for side, potential, (least, _), other, best, (_, most) in (
        (cols, log_v, cols.limits, rows, of_rows, limits),
        (rows, log_u, limits, cols, of_cols, cols.limits),
    ):
        points = np.flatnonzero((least > 0) & np.isfinite(potential))
        points = points[np.argsort(-potential[points])]
        partners = np.argsort(-best)
        count = np.searchsorted(-best[partners], -potential[points], side="right")
        needed = np.cumsum(least[points])
        may = np.cumsum(np.append(0.0, most[partners]))[count]
        wrong = np.flatnonzero(needed > may * (1 + MASS_TOLERANCE))
        if len(wrong):
            k = wrong[np.argmax(needed[wrong] - may[wrong])]
            one = told_points(side.name, np.isin(np.arange(len(least)), points[: k + 1]))
            two = told_points(other.name, (best >= potential[points[k]]) & (most > 0)) or "no points"
            if problem.c is None:
                by = f"{which}M connects"
            else:
                by = f"{which}M and the reference connect"
            amounts = f"{needed[k]:.6g} must be transported and {may[k]:.6g} may be"
            raise InfeasibleError(f"{by} {one} with {two} only, where {amounts}")


def best_partners(problem: Problem, log_u: F64, log_v: F64) -> tuple[F64, F64]:
    """Return the largest log v among the partners of each row, and log u for each column; -inf without a partner."""
    of_rows = np.full(len(log_u), -np.inf)
    of_cols = np.full(len(log_v), -np.inf)
    for i0, i1, M, c in problem.blocks(most=BLOCK_BYTES):
        if problem.cost.operator == "pairs":
            row = M.row_numbers()
            column = M.column
            allowed = allowed_pairs(M.data, None if c is None else c.data)
            row = row[allowed]
            column = column[allowed]
            np.maximum.at(of_rows[i0:i1], row, log_v[column])
            np.maximum.at(of_cols, column, log_u[i0 + row])
        else:
            allowed = allowed_pairs(M, c)
            of_rows[i0:i1] = np.where(allowed, log_v, -np.inf).max(1)
            of_cols = np.maximum(of_cols, np.where(allowed, log_u[i0:i1, None], -np.inf).max(0))
    return of_rows, np.max(problem.ranks.all(of_cols), 0)
