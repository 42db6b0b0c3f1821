"""The sampler of pairs for flows: torchcfm's interface, and pairs in proportion to the plan."""

import warnings

import numpy as np
import pytest
from conftest import CUDA
from scipy.stats import chisquare

import mapuot
from mapuot.flow import OTPlanSampler

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("device", ["cpu", *CUDA])
@pytest.mark.parametrize(("method", "reg_m"), [("sinkhorn", np.inf), ("unbalanced", 0.5)])
def test_pairs_come_in_proportion_to_the_plan(method, reg_m, device):
    x0, x1 = RNG.random((4000, 1)).round(), RNG.random((4000, 1)).round() + 0.5
    M = (x0 - x1.T) ** 2
    P = mapuot.solve(M, reg=0.5, reg_m=reg_m).plan
    left, right = (np.eye(2)[(x - x.min()).astype(int)[:, 0]] for x in (x0, x1))
    wanted = left.T @ P @ right / P.sum()
    if device == "cuda":
        x0, x1 = (pytest.importorskip("torch").tensor(x, device=device) for x in (x0, x1))
    found = OTPlanSampler(method, 0.5, reg_m, seed=1).sample_plan_with_labels(x0, x1, x0[:, 0], x1[:, 0])
    x, y, i, j = (z.cpu().numpy() if device == "cuda" else z for z in found)
    np.testing.assert_array_equal((x[:, 0], y[:, 0]), (i, j))
    seen = [[((i == k) & (j == m + 0.5)).sum() for m in (0, 1)] for k in (0, 1)]
    assert chisquare(np.ravel(seen), 4000 * wanted.ravel()).pvalue > 1e-3


def test_images_labels_and_normalised_costs():
    x0, x1 = RNG.random((16, 3, 4)), RNG.random((16, 3, 4))
    sampler = OTPlanSampler("unbalanced", 0.05, 1.0, normalize_cost=True, seed=0)
    M = ((x0.reshape(16, 1, -1) - x1.reshape(16, -1)) ** 2).sum(-1)
    P = sampler.get_map(x0, x1)
    np.testing.assert_allclose(P, mapuot.solve(M / M.max(), reg=0.05, reg_m=1.0).plan, atol=1e-6)
    x, y = sampler.sample_plan(x0, x1, replace=False)
    assert x.shape == y.shape == (16, 3, 4)
    assert len(np.unique(np.c_[x.reshape(16, -1), y.reshape(16, -1)], axis=0)) == 16
    i, j = sampler.sample_map(P, 8)
    assert len(i) == len(j) == 8


def test_trajectories_follow_the_plans():
    start = np.arange(12.0)[:, None]
    X = np.stack([start, RNG.permutation(start) + 0.1, RNG.permutation(start) + 0.2], 1)
    paths = OTPlanSampler("sinkhorn", 0.01, seed=0).sample_trajectory(X)
    np.testing.assert_allclose(paths[:, :, 0], start + np.array([0.0, 0.1, 0.2]), atol=1e-9)


@pytest.mark.gpu
def test_a_solve_that_goes_on_tells_what_is_wrong_when_it_is_asked():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, y = (torch.rand(300, 2, generator=torch.Generator().manual_seed(k)).cuda() for k in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = OTPlanSampler("unbalanced", 1e-3, 1.0, max_passes=3)
        late, bad = sampler.solved(x, y), sampler.solved(x, y * torch.nan)
    with pytest.warns(mapuot.ConvergenceWarning):
        assert late.status == "max_passes"
    assert late.sample(5)[0].is_cuda
    with pytest.raises(ValueError, match="M must"):
        bad.sample(5)
    with (
        pytest.raises(RuntimeError, match="a CUDA graph cannot hold a solve"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sampler.solved(x, y)
    assert len(OTPlanSampler("unbalanced", 0.1, 1.0).solved(x, y).sample(7, 0)[1]) == 7
