"""src_c/marginals.c matches plain numpy, for sizes around vector lengths and at the limits of float64."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mapuot.backends.cpu.marginals import History, Points
from mapuot.penalties import kl_divergence

SHAPE = (1, 7, 8, 33, 130)
RHO = (2.0, np.inf, 0.0, 0.3, 50.0)
REG = 0.05
EDGES = [(0, 2), (1, 2), (3, 4), (2, 4)]  # of children and parents


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(params=[1, 3], ids=lambda parts: f"parts{parts}")
def labelled(request, rng):
    """Return (points, marginal of each, cell of each, log weights)."""
    owner = np.repeat(np.arange(len(SHAPE)), SHAPE)
    parts = request.param
    log_weight = np.where(owner == 2, 0.0, rng.normal(size=len(owner)) * 3)
    points = Points(SHAPE, log_weight, np.exp(log_weight), np.array(RHO), REG, EDGES)
    cell = owner * parts + rng.integers(parts, size=len(owner))
    for k, start in enumerate(points.start[:-1]):  # every part of every marginal that has as many points
        cell[start : start + min(parts, SHAPE[k])] = k * parts + np.arange(min(parts, SHAPE[k]))
    if parts > 1:
        points.set_parts(parts, cell)
    return points, owner, cell, log_weight


def rate_at(owner):
    return np.array([REG / x if 0 < x < np.inf else 0.0 for x in RHO])[owner]


@pytest.mark.parametrize("spread", [1e-6, 0.1, 30.0])
def test_worth(isa, labelled, rng, spread):
    points, owner, _, log_weight = labelled
    weight = np.exp(log_weight)
    start = points.start[:-1]
    n = len(owner)
    log_u = rng.normal(size=n) * spread
    rate = rate_at(owner)
    rho = np.array(RHO)[owner]
    log_s = -(1 + rate) * log_u + rng.normal(size=n) * min(spread, 1.0)
    hard = np.isinf(rho)
    soft = rate > 0
    r = np.exp(log_weight + log_u + log_s)
    q = weight * np.exp(-rate * log_u)
    with np.errstate(invalid="ignore"):
        value = np.where(hard, weight * REG * log_u, np.where(soft, -rho * weight * np.expm1(-rate * log_u), 0.0))
    want = [value, np.abs(value), q, kl_divergence(r, q), r + q, np.abs(r - weight)]
    found = points.worth(log_u, log_s)
    np.testing.assert_array_equal(found[0], np.maximum.reduceat(np.abs(log_u), start))
    scale = np.add.reduceat(np.abs(value) + r + q, start)
    for x, y in zip(found[1:], want, strict=True):
        np.testing.assert_allclose(x, np.add.reduceat(y, start), rtol=1e-12, atol=1e-14 * scale.max())
    np.testing.assert_array_equal(points.worth(log_u, None)[:4], found[:4])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e5])
@pytest.mark.parametrize("which", ["log_u", "log_s"])
def test_no_worth_where_numbers_leave_float64(isa, labelled, which, value):
    """Numbers beyond float64 at any place of a vector give no value; so does -1e5, where e^(log_s) may be 0."""
    points, owner, _, _ = labelled
    for i in np.flatnonzero(owner == 3):
        x = {"log_u": np.zeros(len(owner)), "log_s": np.zeros(len(owner))}
        x[which][i] = value
        told = points.worth(x["log_u"], x["log_s"])[0]
        finite = np.isfinite(value) and which == "log_s"
        assert np.isfinite(told[3]) == finite
        assert np.isfinite(np.delete(told, 3)).all()


def test_a_large_mass_is_not_lost_where_its_slope_is_steep(isa):
    """q = 9 e^(690 - 712) is a mass, although e^-712 alone is below the range of the vectors; r = e^.2 q."""
    log_u = np.full(9, 712.0)
    log_weight = np.full(9, 690.0)
    q = 9 * np.exp(-22.0)
    points = Points((9,), log_weight, np.exp(log_weight), np.ones(1), 1.0)
    _, _, _, amount, gap, both, _ = points.worth(log_u, 0.2 - 2 * log_u).ravel()
    want = q, q * (0.2 * np.exp(0.2) - np.exp(0.2) + 1), q * (1 + np.exp(0.2))
    np.testing.assert_allclose((amount, gap, both), want, rtol=1e-12)


def test_shares_and_changes(isa, labelled, rng):
    points, owner, _, log_weight = labelled
    x, y, z = rng.normal(size=(3, len(owner))) * 100
    terms = log_weight + x + y + z
    want = [np.exp(terms[owner == k] - terms[owner == k].max()) for k in range(len(SHAPE))]
    want = np.concatenate([want[parent] / want[parent].sum() for _, parent in EDGES])
    shares = points.mass_shares(x, y, z)
    np.testing.assert_allclose(shares, want, rtol=1e-11, atol=1e-300)
    change = rng.normal(size=len(shares))
    starts = points.message[:-1]
    found = points.change_sums(shares, change).T
    np.testing.assert_allclose(found[0], np.add.reduceat(shares * change**2, starts), rtol=1e-13)
    np.testing.assert_allclose(found[1], np.add.reduceat(shares * np.abs(change), starts), rtol=1e-13)


# ---- Anderson's step: src_c/differences.c against least squares, part by part and of all parts ----


def weights(residual, dF, weight):
    """Return argmin |residual - sum gamma_i dF_i| in the norm of ``weight``."""
    root = np.sqrt(weight)
    return np.linalg.lstsq(root[:, None] * dF.T, root * residual, rcond=None)[0]


@pytest.mark.parametrize("ends", [[1], [37], [1500], [7, 300, 340, 2900]])
@pytest.mark.parametrize("alone", [0.0, 0.3])
def test_steps_are_least_squares(isa, ends, alone):
    """Weights are right with more differences than the history holds, and after a new start."""
    rng = np.random.default_rng(0)
    depth = min(4, ends[0])
    past = []
    history = History(depth, ends)
    for number in range(9):
        residual = rng.normal(size=ends[-1])
        image = rng.normal(size=ends[-1])
        weight = rng.random(ends[-1]) + 0.1
        if number == 7:
            history.clear()
            past = []
        assert history.add(residual, image) == bool(past)
        past = [*past[-depth:], (residual, image)]
        if len(past) == 1:
            continue
        dF, dG = (np.diff([x[k] for x in past], axis=0) for k in (0, 1))
        shared = weights(residual, dF, weight)
        want = [image.copy(), residual.copy()]
        for part in history.parts:
            own = weights(residual[part], dF[:, part], weight[part])
            if len(ends) == 1:
                gamma = shared
            else:
                gamma = alone * own + (1 - alone) * shared
            want[0][part] -= gamma @ dG[:, part]
            want[1][part] -= gamma @ dF[:, part]
        for got, right in zip(history.next(weight, alone), want, strict=True):
            assert_allclose(got, right, rtol=0, atol=1e-7 * np.abs(right).max() + 1e-7 * np.abs(image).max())
