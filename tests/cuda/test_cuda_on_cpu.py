"""The CUDA kernels without a GPU: compiled as C++ and run on the CPU, the tests of the cuda backend on them."""

import pytest
from emulated import MISSING, PARTS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")]


@pytest.mark.parametrize("part", PARTS)
def test_part(part, runs):
    code, out, err = runs.result(part)
    assert code == 0, out[-6000:] + err[-2000:]
    assert " passed" in out.splitlines()[-1], out[-300:]
