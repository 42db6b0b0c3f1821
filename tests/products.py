"""Factors of log_matmul with zeros and odd values, and what their product must be; of the CPU's and the GPU's tests."""

import numpy as np
from numpy.testing import assert_allclose
from scipy.special import logsumexp

EPS = {"float64": 2.0**-53, "float32": 2.0**-24}
SHAPES = [(1, 1, 1), (3, 5, 9), (7, 1, 130), (33, 300, 50), (40, 70, 65), (65, 17, 3)]


def log_matmul_reference(A, B):
    """The definition, (p, m, k, n) entries in float64."""
    with np.errstate(invalid="ignore"):
        return logsumexp(A.astype(float)[..., :, :, None] + B.astype(float)[..., None, :, :], axis=-2)


def factors(m, k, n, dtype="float64", scale=1.0, p=2, zeros=0.1, seed=0):
    rng = np.random.default_rng([seed, m, k, n])
    A, B = rng.normal(size=(p, m, k)) * scale, rng.normal(size=(p, k, n)) * scale
    for x in (A, B):
        x[rng.random(x.shape) < zeros] = -np.inf
    A[0, 0] = B[-1, :, -1] = -np.inf
    return A.astype(dtype), B.astype(dtype)


def assert_right(out, A, B):
    right = log_matmul_reference(A, B)
    assert out.dtype == A.dtype
    assert (np.isneginf(out) == np.isneginf(right)).all()
    finite = np.isfinite(right)
    size = np.abs(np.where(np.isfinite(A), A, 0)).max() + np.abs(np.where(np.isfinite(B), B, 0)).max()
    assert_allclose(out[finite], right[finite], rtol=0, atol=(8 + size) * 4 * EPS[out.dtype.name])
