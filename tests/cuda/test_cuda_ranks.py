"""Ranks with a GPU each, or with a shared one, pass the cases of cuda_ranks.py, in processes without MPI.

Without a GPU the cases with nccl in their names run on the emulation, with a few parameters.
"""

import functools
import os
import sys

import cupy as cp
import pytest
from launch import HERE
from over_ranks import named

pytestmark = pytest.mark.gpu
CASES = named(HERE / "over_ranks.py", HERE / "cuda" / "cuda_ranks.py")


if "EMULATED_GPUS" in os.environ:
    FEW = (
        "callbacks errors_reach_everyone where_rows_lie a_kernel_that_one_rank_has_no_room_for "
        "stored_pairs pairs_from_the_device truncated_points points_in_many_dimensions"
    )
else:
    FEW = ""


@functools.cache
def found(size, only=""):
    """Return the failures of one job over all cases, or the named ones, and the transport of the sums."""
    sys.path.insert(0, str(HERE.parent))
    import cuda_ranks

    from bench.local import spawn

    return spawn(cuda_ranks.main, size, only, seconds=600)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_case(size, case):
    text = found(size)[0][case]
    assert not text, text


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_gpus_of_their_own_meet_through_nccl_and_shared_ones_without(way):
    count = cp.cuda.runtime.getDeviceCount()
    shared = way == "host"
    if count > 3 if shared else count < 2:
        pytest.skip("needs two GPUs" if not shared else "needs fewer than four GPUs")
    if shared:
        case = (count + 1, FEW and "an_error_before_a_sum")
    else:
        case = (min(count, 4), FEW)
    failures, told = found(*case)
    assert (told, [text for text in failures.values() if text]) == (way, [])
