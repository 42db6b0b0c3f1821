"""log_matmul matches the float64 sum: values, zeros, NaN, all paths, every instruction set, on a GPU, too."""

import numpy as np
import pytest
from conftest import CUDA
from numpy.testing import assert_allclose
from scipy.special import logsumexp

from mapuot import log_matmul
from mapuot.arrays import host
from mapuot.backends.cuda.settings import DEVICE_LAUNCHES

EPS = {"float64": 2.0**-53, "float32": 2.0**-24}
SHAPES = [(1, 1, 1), (3, 5, 9), (7, 1, 130), (33, 300, 50), (40, 70, 65), (65, 17, 3), (130, 70, 150)]
PATHS = ["cpu", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("tiles of 32", "tiles of 64", "cuBLAS") if CUDA)]
FAR = [pytest.param(scale, marks=pytest.mark.slow) for scale in (400.0, 1e4)]  # most entries leave the fast path


def right_of(A, B):
    """Return the definition's value by (p, m, k, n) entries in float64."""
    with np.errstate(invalid="ignore"):
        return logsumexp(A.astype(float)[..., :, :, None] + B.astype(float)[..., None, :, :], axis=-2)


def factors(m, k, n, dtype="float64", scale=1.0, p=2, zeros=0.1, seed=0):
    rng = np.random.default_rng([seed, m, k, n])
    A = rng.normal(size=(p, m, k)) * scale
    B = rng.normal(size=(p, k, n)) * scale
    for x in (A, B):
        x[rng.random(x.shape) < zeros] = -np.inf
    A[0, 0] = B[-1, :, -1] = -np.inf
    return A.astype(dtype), B.astype(dtype)


def assert_right(out, A, B):
    right = right_of(A, B)
    assert out.dtype == A.dtype
    assert (np.isneginf(out) == np.isneginf(right)).all()
    finite = np.isfinite(right)
    size = np.abs(np.where(np.isfinite(A), A, 0)).max() + np.abs(np.where(np.isfinite(B), B, 0)).max()
    assert_allclose(out[finite], right[finite], rtol=0, atol=(8 + size) * 4 * EPS[out.dtype.name])


@pytest.fixture(params=PATHS)
def array(request, monkeypatch, using):
    if request.param == "cpu":
        return np.asarray
    import cupy

    from mapuot.backends.cuda import log_matmul as on_gpu

    for dtype in EPS:
        monkeypatch.setitem(on_gpu.LIBRARY_TERMS, dtype, 0 if request.param == "cuBLAS" else 1 << 60)
    using(DEVICE_LAUNCHES, few_tiles=1 << 60 if request.param == "tiles of 32" else 0)
    return cupy.asarray


@pytest.mark.parametrize("scale", [1.0, 30.0, *FAR])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_shape_and_range(dtype, scale, array):
    """Scales 1 and 30 take the fast path; at 400 most, at 1e4 nearly all entries fall back."""
    for shape in SHAPES:
        A, B = factors(*shape, dtype, scale)
        for exact in (False, True):
            out = log_matmul(array(A), array(B), exact=exact)
            assert type(out) is type(array(A))
            assert_right(host(out), A, B)
        assert_right(host(log_matmul(array(A), array(B[1]))), A, np.broadcast_to(B[1], B.shape))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_isa(isa, dtype):
    for scale in (1.0, 300.0):
        A, B = factors(13, 41, 37, dtype, scale)
        assert_right(log_matmul(A, B), A, B)


def test_threads_agree_bit_for_bit(threads):
    A, B = factors(70, 50, 60, scale=100.0, p=5)
    assert (log_matmul(A, B, threads=threads) == log_matmul(A, B, threads=1)).all()


def test_guard_is_sharp():
    """Where row and column maxima never meet, the fast path would lose all of the sum."""
    for gap in (100.0, 335.0, 336.0, 370.0, 1000.0):
        A = np.array([[0.0, -gap]])
        B = np.array([[-gap], [0.0]])
        assert_allclose(log_matmul(A, B), [[-gap + np.log(2)]], rtol=1e-15)


def test_shared_factor_and_strides():
    A, B = factors(9, 20, 11, p=4)
    right = right_of(A, np.broadcast_to(B[1], B.shape))
    assert_allclose(log_matmul(A, B[1]), right, rtol=1e-14)
    assert_allclose(log_matmul(A[2], B), right_of(np.broadcast_to(A[2], A.shape), B), rtol=1e-14)
    assert_allclose(log_matmul(A[2], B[1]), right_of(A[2], B[1]), rtol=1e-14)
    turned = np.asfortranarray(B[1])[:, ::-1]
    assert_allclose(log_matmul(A[::2], turned), right_of(A[::2], np.broadcast_to(turned, (2, 20, 11))))


def test_infinite_and_nan(array):
    A, B = factors(5, 6, 20, zeros=0)
    A[0, 1, 2], A[0, 2, 3], B[1, 4, 5] = np.inf, np.nan, np.inf
    B[0, 2, 3] = -np.inf
    out = host(log_matmul(array(A), array(B)))
    assert np.isposinf(np.delete(out[0, 1], [3])).all()
    assert np.isnan(out[0, 1, 3])  # inf - inf
    assert np.isnan(out[0, 2]).all()
    assert np.isposinf(out[1, :, 5]).all()
    assert np.isfinite(out[0, 3:]).all()
    assert np.isneginf(host(log_matmul(array(np.zeros((2, 0))), array(np.zeros((0, 3)))))).all()
