"""One rank of a torch.distributed job that draws pairs from one plan: RANK SIZE FOLDER METHOD."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mapuot.flow import OTPlanSampler


def batch_of(rank, n=12):
    """Return x0, x1 and labels of x0, which number its points over all ranks."""
    rng = torch.Generator().manual_seed(rank)
    x0, x1 = torch.randn(n, 2, generator=rng), torch.randn(n, 2, generator=rng) + 1
    return x0, x1, torch.arange(rank * n, (rank + 1) * n)


def main(rank, size, folder, method):
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    x0, x1, y0 = batch_of(rank)
    sampler = OTPlanSampler(method, reg=0.05, seed=rank)
    found = sampler.sample_plan_over_ranks(x0, x1, y0, replace=method != "exact")
    assert found[3] is None
    with pytest.raises(ValueError, match="equally many points"):
        sampler.sample_plan_over_ranks(x0[: 12 - rank], x1)
    conditions = y0 % 3, (y0 + rank) % 3
    within = OTPlanSampler(method, across=np.inf, seed=rank).sample_plan_over_ranks(x0, x1, *conditions)
    assert within[2].equal(within[3])
    np.savez(Path(folder) / f"{rank}.npz", *(x.numpy() for x in found[:3]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
