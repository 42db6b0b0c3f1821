"""Every cell of the matrix on every backend: it converges, and no number that it claims is untrue."""

import oracle
import pytest
from matrix import CELLS, TOLS, check

pytestmark = pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler and a long double of its own")


@pytest.mark.parametrize("precision", TOLS)
@pytest.mark.parametrize(("kind", "door", "pair"), CELLS, ids=["-".join([k, d, *p]) for k, d, p in CELLS])
def test_cell(kind, door, pair, backend, precision):
    if (door, backend) == ("marginals", "reference"):
        pytest.skip("many marginals have no oracle of their own")
    check(kind, door, pair, precision, backend)
