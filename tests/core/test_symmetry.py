"""A symmetric cost may differ from its transpose by the rounding of its dtype, at any scale."""

import numpy as np
import pytest

import mapuot

RNG = np.random.default_rng(0)
T = np.arange(20.0)
M = (T[:, None] - T) ** 2
MASSES = RNG.dirichlet(np.ones(20), 2)
NOISE = np.triu(RNG.random((20, 20)))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rounding_is_no_asymmetry(scale):
    noise = scale * M * (1 + 3e-7 * NOISE)
    given = {"reg": scale, "reg_m": 9 * scale}
    right = mapuot.sinkhorn_divergence(scale * M, *MASSES, **given)
    q = mapuot.barycenter(scale * M, MASSES, debiased=True, **given).q
    for cost, tol in ((scale * M * (1 + 1e-15 * NOISE), 1e-9), (noise.astype(np.float32), 1e-5), (noise, 1e-5)):
        assert (cost != cost.T).any()
        assert mapuot.sinkhorn_divergence(cost, *MASSES, **given) == pytest.approx(right, rel=tol)
        np.testing.assert_allclose(mapuot.barycenter(cost, MASSES, debiased=True, **given).q, q, atol=tol)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_an_asymmetric_cost_is_refused_with_its_place(scale):
    wrong = M.copy()
    wrong[3, 4] = 1.001
    given = {"reg": scale, "reg_m": 9 * scale}
    with pytest.raises(ValueError, match=r"M is not symmetric, got .* at \[3, 4\]"):
        mapuot.sinkhorn_divergence(scale * wrong, *MASSES, **given)
    with pytest.raises(ValueError, match=r"M is not symmetric, got .* at \[1, 3, 4\]"):
        mapuot.sinkhorn_divergence(np.stack([scale * M, scale * wrong]), *[MASSES] * 2, **given)
    with pytest.raises(ValueError, match=r"M must be symmetric for a debiased barycenter, got .* at \[3, 4\]"):
        mapuot.barycenter(scale * wrong, MASSES, debiased=True, **given)


def test_forbidden_pairs_are_symmetric_where_both_are_forbidden():
    cost = np.where(M > 150, np.inf, M)
    assert mapuot.sinkhorn_divergence(cost, *MASSES, reg=1.0, reg_m=9.0) > 0
    cost[0, -1] = 300.0
    with pytest.raises(ValueError, match="M is not symmetric"):
        mapuot.sinkhorn_divergence(cost, *MASSES, reg=1.0, reg_m=9.0)
