"""Infeasible masks under forbidden pairs: find a proof, a set of points with too little mass in its partners."""

from typing import Any

import numpy as np

from ..arrays import host
from ..errors import InfeasibleError
from ..penalties import F64
from .parts import allowed_pairs
from .problem import BLOCK_BYTES, Problem
from .side import Side
from .validate import MASS_TOLERANCE, name_points

FLOW_PAIRS = 1 << 20  # most pairs of a problem for a largest flow, which takes up to 0.1 s
WHOLE = (1 << 31) - 2  # integer that stands for the larger total mass in a flow


def check_cut(problem: Problem, log_u: F64, log_v: F64, which: str = "") -> None:
    """Raise if `find_cut` finds a proof that no plan exists; ``which`` names the problem of a batch in the message."""
    found = find_cut(problem, log_u, log_v)
    if found is not None:
        raise InfeasibleError(which + found)


def find_cut(problem: Problem, log_u: F64, log_v: F64) -> str | None:
    """Name a set of points that must receive more mass than all its partners may have; None if none is found.

    If no plan meets the hard marginals, some set of points proves it (Hall's condition). The potentials of these points
    grow without end, which shows them after some passes. In small problems a largest flow shows them whatever the
    potentials are.
    """
    rows, cols, ranks = problem.rows, problem.cols, problem.ranks
    if not ranks.max(rows.demands or cols.demands) or not (problem.forbidden or problem.c is not None):
        return None
    found = cut_of_potentials(problem, log_u, log_v)
    if found is None and ranks.size == 1 and problem.size <= FLOW_PAIRS:
        found = cut_of_flow(problem)
    return found


def cut_of_potentials(problem: Problem, log_u: F64, log_v: F64) -> str | None:
    """Try the sets of points with potentials above a threshold; their partners are all points of allowed pairs."""
    rows, cols, ranks = problem.rows, problem.cols, problem.ranks
    of_rows, of_cols = best_partners(problem, log_u, log_v)
    of_rows, log_u, *limits = (np.concatenate(ranks.all(x)) for x in (of_rows, log_u, *host_limits(rows)))
    of_sides = limits, host_limits(cols)
    for side, potential, (least, _), other, best, (_, most) in (
        (cols, log_v, of_sides[1], rows, of_rows, of_sides[0]),
        (rows, log_u, of_sides[0], cols, of_cols, of_sides[1]),
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
            chosen = np.isin(np.arange(len(least)), points[: k + 1])
            reached = (best >= potential[points[k]]) & (most > 0)
            return in_words(problem, (side, chosen), (other, reached), needed[k], may[k])
    return None


def host_limits(side: Side) -> tuple[F64, F64]:
    """Return the least and the largest mass of each point of a side, whose vectors may lie on a device."""
    least, most = side.limits
    return host(least), host(most)


def cut_of_flow(problem: Problem) -> str | None:
    """Send as much mass from one side to the other as its points must have, and return the cut that limits the flow."""
    from scipy import sparse  # noqa: PLC0415 - on first use
    from scipy.sparse import csgraph  # noqa: PLC0415

    m, n = problem.shape
    rows, cols = problem.sides
    row, column = allowed_indices(problem)
    for (side, source, k), (other, target, count) in (
        ((cols, column, n), (rows, row, m)),
        ((rows, row, m), (cols, column, n)),
    ):
        least = host_limits(side)[0]
        most = host_limits(other)[1]
        total = least.sum()
        if not 0 < total < np.inf:
            continue
        wanted = np.floor(WHOLE * (least / total)).astype(np.int32)
        allowed = np.ceil(WHOLE * (np.minimum(most, total) / total)).astype(np.int32)
        first = 0
        last = 1 + k + count
        points = 1 + np.arange(k)
        partners = 1 + k + np.arange(count)
        tails = np.concatenate([np.full(k, first), points[source], partners])
        heads = np.concatenate([points, partners[target], np.full(count, last)])
        capacities = np.concatenate([wanted, wanted[source], allowed])
        graph = sparse.csr_array((capacities, (tails, heads)), shape=(last + 1, last + 1), dtype=np.int32)
        rest = graph - csgraph.maximum_flow(graph, first, last).flow
        rest.eliminate_zeros()
        reached = np.zeros(last + 1, bool)
        reached[csgraph.breadth_first_order(rest, first, return_predecessors=False)] = True
        chosen = reached[points] & (least > 0)
        met = np.zeros(count, bool)
        met[target[chosen[source]]] = True
        needed = least[chosen].sum()
        may = most[met].sum()
        if needed > may * (1 + MASS_TOLERANCE):
            return in_words(problem, (side, chosen), (other, met & (most > 0)), needed, may)
    return None


def in_words(problem: Problem, points: tuple[Side, Any], partners: tuple[Side, Any], needed: float, may: float) -> str:
    """Name the points of one side, ``(side, mask)``, their partners, and the masses needed and available."""
    one = name_points(points[0].name, points[1])
    two = name_points(partners[0].name, partners[1]) or "no points"
    if problem.c is None:
        by = "M connects"
    else:
        by = "M and the reference connect"
    return f"{by} {one} with {two} only, where {needed:.6g} must be transported and {may:.6g} may be"


def allowed_indices(problem: Problem) -> tuple[Any, Any]:
    """Return the row and the column of each allowed pair."""
    rows = []
    columns = []
    for i0, _, M, c in problem.blocks(most=BLOCK_BYTES):
        if problem.cost.operator == "pairs":
            allowed = allowed_pairs(M.data, None if c is None else c.data)
            row = M.row_numbers()[allowed]
            column = M.column[allowed]
        else:
            row, column = np.nonzero(allowed_pairs(M, c))
        rows.append(i0 + row)
        columns.append(column)
    return np.concatenate(rows), np.concatenate(columns)


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
