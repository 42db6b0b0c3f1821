"""Ranks with a GPU each, or with one that they share: the cases of cuda_ranks.py, in processes without MPI."""

import functools
import sys

import pytest
from launch import HERE

pytestmark = pytest.mark.gpu
CASES = [
    line[9:].partition("(")[0] for line in (HERE / "cuda" / "cuda_ranks.py").read_text().splitlines()
    if line.startswith("def case_")
]  # fmt: skip

cp = pytest.importorskip("cupy", reason="needs CuPy")
if not cp.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


@functools.cache
def found(size):
    """What failed in one job that runs all cases, and how the sums went."""
    sys.path.insert(0, str(HERE.parent))
    import cuda_ranks

    from bench.local import spawn

    return spawn(cuda_ranks.main, size, seconds=200)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_case(size, case):
    text = found(size)[0][case]
    assert not text, text


def test_gpus_of_their_own_meet_through_nccl():
    count = cp.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs")
    assert found(min(count, 4))[1] == "nccl"
    if count < 4:
        assert found(count + 1)[1] == "host"
