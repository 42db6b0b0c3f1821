"""Batches of problems, each verified on its own; of the CPU's and the GPU's tests."""

import numpy as np
import problems


def histograms(p=5, m=37, n=53, ratio=1.5, seed=0, zeros=True):
    """(M, A, B): p pairs of histograms on two clouds; every third weight of the first problem 0."""
    case = problems.clouds(m, n, seed=seed)
    rng = np.random.default_rng(seed)
    A, B = rng.uniform(0.2, 1, (p, m)), rng.uniform(0.2, 1, (p, n))
    if zeros:
        A[0, 1::3] = B[0, 2::3] = 0.0
    return case.M, A, ratio * B * (A.sum(1) / B.sum(1))[:, None]


def case_of(M, A, B, reg, reg_m, i, **more):
    return problems.Case(M if M.ndim == 2 else M[i], A[i], B[i], reg, reg_m, **more)


def assert_solved(result, M, A, B, reg, reg_m, tol=1e-6, **more):
    assert result.converged.all()
    assert (result.error_bound <= tol).all()
    for i in range(len(result)):
        problems.verify(result[i], case_of(M, A, B, reg, reg_m, i, **more))
