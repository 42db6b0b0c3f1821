"""A trial of one solve over the ranks of a job: each gives its own block, the root gathers what is claimed."""

from __future__ import annotations

from typing import Any

import numpy as np
from judge import Claim, claim_over_ranks
from scipy import sparse

import mapuot
from mapuot.ranks import own_rows

from .trial import Trial, stored


def call_over_ranks(trial: Trial, comm: Any) -> list[Claim]:
    """The claims, on rank 0; the other ranks return an empty list."""
    problem, options = trial.problems[0], {"backend": "cpu", **trial.options}
    i0, i1 = own_rows(problem.shape[0], comm.Get_rank(), comm.Get_size())
    part = lambda x, lo, hi: np.ascontiguousarray(x[lo:hi]) if np.ndim(x) else x  # noqa: E731
    pairs = trial.how == "sparse ranks"
    form = stored if pairs else np.asarray
    c = problem.reference if isinstance(problem.reference, str) else problem.reference[i0:i1]
    c = c if isinstance(c, str) or not pairs else sparse.csr_array(c)
    reg_m = part(problem.reg_m[0], i0, i1), problem.reg_m[1]
    start = trial.start
    if start is not None:
        start = part(start[0], i0, i1), start[1]
    result = mapuot.solve(
        form(problem.M[i0:i1]), problem.a[i0:i1], problem.b, reg=problem.reg, reg_m=reg_m, penalty=problem.penalty,
        reference=c, comm=comm, warm_start=start, **options,
    )  # fmt: skip
    claim = claim_over_ranks(result, comm)
    return [] if claim is None else [claim]
