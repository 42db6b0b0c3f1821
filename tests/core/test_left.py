"""src_c/left.c against einsum: sums over all axes, permuted axes, products of factors, and overflow."""

import functools

import numpy as np
import pytest
from mapuot._core import ffi, lib
from numpy.testing import assert_allclose

from mapuot.backends.cpu.marginals import RemainingMarginals
from mapuot.backends.cpu.native import pointer
from mapuot.backends.kernel import FLUSH_PRODUCT, StaleError

SIZES = [(1,), (7,), (1, 1), (5, 3), (33, 17), (8, 64), (1, 9), (9, 1), (7, 5, 3), (16, 4, 11), (4, 3, 5, 7), (2, 1, 3)]
LARGE = 300, 500  # two threads share it
LETTERS = "abcd"


def made(sizes, free=()):
    """Return a random W, the state beside it, and each marginal's own numbers."""
    rng = np.random.default_rng(list(sizes))
    n = sum(sizes)
    fi = [0.0 if k in free else 0.5 + 0.1 * k for k in range(len(sizes))]
    left = RemainingMarginals(list(sizes), rng.normal(size=n), fi, 1 + (sizes == LARGE))
    left.around([3 * rng.normal(size=size) for size in sizes])
    return left, rng.random(sizes) + 1e-3, rng.normal(size=n)


def log_sums(left, W, base, log_u):
    """Return log s of all axes, from potentials."""
    x = left.log_weight + log_u - left.shift
    out = []
    axes = LETTERS[: W.ndim]
    for k, letter in enumerate(axes):
        others = [m for m in range(W.ndim) if m != k]
        call = ",".join([axes, *(axes[m] for m in others)]) + "->" + letter
        sums = np.einsum(call, W, *(np.exp(x[left.parts[m]]) for m in others))
        out.append(np.log(sums) - left.shift[left.parts[k]] + base)
    return out


@pytest.mark.parametrize("sizes", [*SIZES, LARGE])
def test_sums_and_turns(isa, sizes):
    free = (1,) if len(sizes) > 2 else ()
    left, W, log_u = made(sizes, free)
    left.factors(log_u)
    left.read(W.ravel(), 0.3, 1e-75)
    assert_allclose(left.log_s, np.concatenate(log_sums(left, W, 0.3, log_u)), rtol=0, atol=2e-14)
    v = np.empty(W.size)
    lib.mapuot_product(W.ndim, ffi.from_buffer("int64_t *", left.size), pointer(left.factor), FLUSH_PRODUCT, pointer(v))
    found = functools.reduce(np.multiply.outer, (left.factor[part] for part in left.parts)).ravel()
    assert_allclose(v, np.where(found < FLUSH_PRODUCT, 0.0, found), rtol=1e-15)
    shifts = np.linspace(-1, 2, 1 + W.ndim)
    base = 0.3
    left.move(shifts)
    base = base + shifts[0]
    log_u = log_u + np.repeat(shifts[1:], sizes)
    for given in (True, False):
        left.turn(given)
        for k, part in enumerate(left.parts):
            if k not in free:
                log_s = log_sums(left, W, base, log_u)[k]
                log_u[part] = -left.fi[k] * log_s
                log_mass = np.logaddexp.reduce(left.log_weight[part] + log_u[part] + log_s)
        assert_allclose(left.log_u, log_u, rtol=0, atol=1e-13)
        assert left.log_mass == pytest.approx(log_mass, abs=1e-13)


@pytest.mark.parametrize("bad", [0.0, 1e-80, np.nan, np.inf])
def test_sums_that_tell_nothing_are_told(isa, bad):
    left, W, log_u = made((5, 9))
    left.factors(log_u)
    left.read(W.ravel(), 0.0, 1e-75)
    W[3] = bad
    with pytest.raises(StaleError):
        left.read(W.ravel(), 0.0, 1e-75)
    before = left.log_u.copy()
    with pytest.raises(StaleError):
        left.turn(False)
    assert_allclose(left.log_u[left.parts[1]], before[left.parts[1]], rtol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 6, 13])
def test_states_that_are_not_finite_are_told(isa, bad, at):
    left, _, log_u = made((5, 9))
    log_u[at] = bad
    with pytest.raises(StaleError):
        left.factors(log_u)


def test_products_below_flush_are_zero(isa):
    factors = np.array([1.0, 1e-60, 1.0, 1e-50, 1e-30])
    size = np.array([2, 3])
    v = np.empty(6)
    lib.mapuot_product(2, ffi.from_buffer("int64_t *", size), pointer(factors), FLUSH_PRODUCT, pointer(v))
    found = np.outer(factors[:2], factors[2:]).ravel()
    assert (v == np.where(found < FLUSH_PRODUCT, 0.0, found)).all()
    assert (v == 0).tolist() == [False, False, False, False, True, False]
