"""Pairs of minibatches from one plan over the ranks of a torch.distributed job."""

import subprocess
import sys
from pathlib import Path

import launch
import numpy as np
import pytest

from mapuot.flow import OTPlanSampler

torch = pytest.importorskip("torch")
TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("method", ["sinkhorn", "exact"])
def test_pairs_come_from_one_plan(method, tmp_path):
    """Two ranks together draw the pairs of one process with both batches and rank 0's generator."""
    from over_torch_ranks import batch_of

    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    words = [sys.executable, "over_torch_ranks.py"]
    jobs = [subprocess.Popen([*words, str(rank), "2", str(tmp_path), method], cwd=TESTS, env=launch.environment())
            for rank in (0, 1)]  # fmt: skip
    assert [job.wait(120) for job in jobs] == [0, 0]
    found = [np.load(tmp_path / f"{rank}.npz") for rank in (0, 1)]
    x0, x1, y0 = (np.concatenate([found[0][name], found[1][name]]) for name in ("arr_0", "arr_1", "arr_2"))
    X0, X1, Y0 = (torch.cat(parts) for parts in zip(batch_of(0), batch_of(1), strict=True))
    np.testing.assert_array_equal(x0, X0[y0].numpy())
    source = OTPlanSampler(method, reg=0.05, seed=0)
    seed = int(source.rng.random() * 2.0**53)
    alone = OTPlanSampler(method, reg=0.05, seed=seed).sample_plan_with_labels(X0, X1, Y0, replace=method != "exact")
    for mine, want in zip((x0, x1, y0), alone[:3], strict=True):
        np.testing.assert_array_equal(mine, want.numpy())
    if method == "exact":
        assert sorted(y0.tolist()) == list(range(24))
