"""Every cell of the matrix converges on every backend, and no number that it claims is untrue.

``make test`` solves every second cell in float64 on the CPU, the others as "auto" does.
"""

import itertools

import oracle
import pytest
from conftest import CUDA
from matrix import PLAIN, POINTS, TOLS, TRAITS, Cell, allowed, cells, check

from mapuot.problem.settings import BLOCKS

pytestmark = pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler and a long double of its own")


NIGHTLY = pytest.mark.nightly
RUNS = [
    run
    for k, cell in enumerate(cells())
    for run in (
        *(pytest.param(cell, "cpu", tol, marks=() if k % 2 == at else NIGHTLY) for at, tol in enumerate(TOLS)),
        pytest.param(cell, "reference", "float64", marks=NIGHTLY),
        *(pytest.param(cell, *param.values, tol, marks=param.marks) for param in CUDA for tol in TOLS),
    )
]


@pytest.mark.parametrize(("cell", "backend", "precision"), RUNS, ids=str)
def test_cell(cell, backend, precision, using):
    kind, door, _, traits = cell
    if backend == "reference" and door == "marginals":
        pytest.skip("the reference knows no marginals")
    if (backend, door, traits.pairs) == ("reference", "in_place", "apart"):
        pytest.skip("the reference certifies no plan in place where columns have no partner")
    if backend == "cuda" and kind in POINTS and traits.reference == "given":
        pytest.skip("a GPU takes no matrix as the reference of points")
    if (backend, kind, door) == ("cuda", "pairs", "marginals"):
        pytest.skip("a GPU takes no pairs between many marginals")
    using(BLOCKS, plan_entries=60)  # a few rows of the plan at once
    check(cell, precision, backend)


def test_every_two_values_meet():
    """Any two values of two traits meet in some cell of each kind, door and pair."""
    met = set().union(*(cell.meetings() for cell in cells()))
    for kind, door, pair, _ in cells():
        plain = PLAIN._replace(**{"pairs": {"pairs": "forbidden"}, "boxes": {"shape": "boxes"}}.get(kind, {}))
        for one, other in itertools.combinations(TRAITS, 2):
            for x, y in itertools.product(TRAITS[one], TRAITS[other]):
                cell = Cell(kind, door, pair, plain._replace(**{one: x, other: y}))
                assert not allowed(*cell) or cell.meetings() <= met, cell
