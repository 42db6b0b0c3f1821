"""log_matmul against the sum in float64, term by term: values, zeros, NaN, both paths, every ISA."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from products import SHAPES, assert_right, factors, log_matmul_reference

from mapuot import log_matmul


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0, 400.0, 1e4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_shape_and_range(dtype, scale, exact):
    """Scales 1 and 30 are the fast path's; at 400 most, at 1e4 nearly all entries fall back."""
    for shape in SHAPES:
        A, B = factors(*shape, dtype, scale)
        assert_right(log_matmul(A, B, exact=exact), A, B)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_isa(isa, dtype):
    for scale in (1.0, 300.0):
        A, B = factors(13, 41, 37, dtype, scale)
        assert_right(log_matmul(A, B), A, B)


def test_threads_agree_bit_for_bit(threads):
    A, B = factors(70, 50, 60, scale=100.0, p=5)
    assert (log_matmul(A, B, threads=threads) == log_matmul(A, B, threads=1)).all()


def test_guard_is_sharp():
    """Row and column maxima that never meet: the fast path would lose all of the sum."""
    for gap in (100.0, 335.0, 336.0, 370.0, 1000.0):
        A, B = np.array([[0.0, -gap]]), np.array([[-gap], [0.0]])
        assert_allclose(log_matmul(A, B), [[-gap + np.log(2)]], rtol=1e-15)


def test_shared_factor_and_strides():
    A, B = factors(9, 20, 11, p=4)
    right = log_matmul_reference(A, np.broadcast_to(B[1], B.shape))
    assert_allclose(log_matmul(A, B[1]), right, rtol=1e-14)
    assert_allclose(log_matmul(A[2], B), log_matmul_reference(np.broadcast_to(A[2], A.shape), B), rtol=1e-14)
    assert_allclose(log_matmul(A[2], B[1]), log_matmul_reference(A[2], B[1]), rtol=1e-14)
    turned = np.asfortranarray(B[1])[:, ::-1]
    assert_allclose(log_matmul(A[::2], turned), log_matmul_reference(A[::2], np.broadcast_to(turned, (2, 20, 11))))


def test_infinite_and_nan():
    A, B = factors(5, 6, 20, zeros=0)
    A[0, 1, 2], A[0, 2, 3], B[1, 4, 5] = np.inf, np.nan, np.inf
    B[0, 2, 3] = -np.inf
    out = log_matmul(A, B)
    assert np.isposinf(np.delete(out[0, 1], [3])).all()
    assert np.isnan(out[0, 1, 3])  # inf - inf
    assert np.isnan(out[0, 2]).all()
    assert np.isposinf(out[1, :, 5]).all()
    assert np.isfinite(out[0, 3:]).all()
    assert np.isneginf(log_matmul(np.zeros((2, 0)), np.zeros((0, 3)))).all()
