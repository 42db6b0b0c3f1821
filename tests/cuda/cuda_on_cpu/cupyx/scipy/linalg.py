"""Stand-in for cupyx.scipy.linalg: triangular equations by SciPy."""

import cupy as cp
import scipy.linalg


def solve_triangular(a, b, lower=False):
    return cp.asarray(scipy.linalg.solve_triangular(a.get(), b.get(), lower=lower, check_finite=False))
