"""`path`: problems that differ in reg and reg_m, one after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..annotations import CostLike
from ..errors import shown
from ..problem.cost import Cost, cost_of
from ..problem.sparse import is_list_of_pairs
from ..status import FAILED
from ..synonyms import hinted
from .batch import solve_batch
from .solve import solve


@hinted
def path(
    M: CostLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    *,
    regs: Sequence[float],
    reg_ms: ArrayLike,
    **options: Any,
) -> Iterator[Any]:
    """Solve one problem for a list of reg and reg_m, each started from the previous answer.

    Parameters
    ----------
    M, a, b
        As in `solve`, or a batch as in `solve_batch`: (p, m, n) costs, many clouds, a list of sparse matrices, or one
        cost with (p, m) or (p, n) masses.
    regs : sequence of float
        Entropic regularisations, in units of M, in the order in which to solve; from large to small is quickest.
    reg_ms : sequence, or one value for all
        Marginal penalties, in units of M. A list, or a tuple or array of as many numbers as ``regs`` has, gives one
        reg_m for each reg. A number, a pair (rows, columns) or a pair of per-point vectors serves all regs. For two
        regs, write a list of two pairs: a plain pair would be ambiguous.
    **options
        Further arguments of `solve`, or of `solve_batch` for a batch; ``warm_start`` serves the first reg.

    Yields
    ------
    Result or BatchResult
        One for each reg, as soon as it is solved.

    See Also
    --------
    tune, mapuot.plot.path

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = (np.linspace(0, 1, 40)[:, None] - np.linspace(0.5, 1.5, 40)) ** 2
    >>> answers = mapuot.path(M, regs=[0.01] * 3, reg_ms=[0.1, 1.0, 10.0])
    >>> [round(result.mass, 3) for result in answers]
    [0.651, 0.902, 0.987]
    """
    if isinstance(regs, (str, bytes)) or not hasattr(regs, "__iter__") or getattr(regs, "ndim", 1) == 0:
        raise TypeError(f"regs must be a sequence of numbers, got {shown(regs)}")
    regs = list(regs)
    reg_ms = as_sequence(reg_ms, len(regs))
    warm_start = options.pop("warm_start", None)
    if is_batch(M, a, b):
        solver: Any = solve_batch
    else:
        solver = solve
    for reg, reg_m in zip(regs, reg_ms, strict=True):
        result = solver(M, a, b, reg=reg, reg_m=reg_m, warm_start=warm_start, **options)
        if not np.isin(result.status, FAILED).all():
            warm_start = result
        yield result


def is_batch(M: Any, a: Any, b: Any) -> bool:
    if is_list_of_pairs(M) or np.ndim(M) == 3:
        return True
    if isinstance(cost_of(M), Cost):  # masses may have the shape of a grid
        return False
    return any(np.ndim(x) == 2 and np.shape(x)[1] > 1 for x in (a, b))  # else a column of a table


def as_sequence(reg_ms: Any, count: int) -> list[Any]:
    members = reg_ms
    if not isinstance(reg_ms, list):
        if not isinstance(reg_ms, tuple) and np.ndim(reg_ms) == 0:
            return [reg_ms] * count
        members = list(reg_ms)
        if len(members) != count and len(members) <= 2:
            return [reg_ms] * count
        if len(members) == count == 2 and any(isinstance(x, list | tuple) or np.ndim(x) > 0 for x in members):
            hint = "[x, y] is one for each reg, [(x, y)] * 2 rows and columns of both"
            wanted = "a list where two regs have two vectors or pairs"
            raise ValueError(f"reg_ms must be {wanted}, got {shown(reg_ms)}: {hint}")
    if len(members) != count:
        raise ValueError(f"reg_ms must have the length of regs, {count}, got {len(members)}")
    return list(members)
