"""Costs between the nodes of grids: the answers of the matrix, one axis after the other; what is refused is named."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mapuot
from mapuot.backends.cpu.grid import GridOperator

GRIDS = {"line": mapuot.Grid(17, 0.1, 2.0, target=23, offset=0.45), "image": mapuot.Grid((6, 7), (0.2, 0.15)),
         "volume": mapuot.Grid((3, 4, 5), 0.3, target=(4, 2, 3), offset=(0.1, -0.4, 0.2))}  # fmt: skip


@pytest.fixture(params=GRIDS)
def grid(request):
    return GRIDS[request.param]


def masses(grid, ratio=1.3, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.random(nodes) + 0.1 for nodes in grid.nodes)
    return a / a.sum(), ratio * b / b.sum()


@pytest.mark.parametrize("reg", [1.0, 1e-2, 1e-5])
def test_sums_are_within_their_bound(grid, reg):
    """Of weights over 1e-300 to 1, against sums of logarithms over all pairs in long double."""
    rng = np.random.default_rng(0)
    t = rng.uniform(-690, 0, grid.shape[1])
    products = GridOperator(grid._cost, reg, threads=1)
    terms = t.astype(np.longdouble) - np.asarray(grid).astype(np.longdouble) / np.longdouble(reg)
    top = terms.max(1)
    want = top + np.log(np.exp(terms - top[:, None]).sum(1))
    exponents = 2.0**-50 * (float(np.asarray(grid).max()) / reg + 690) + grid._cost.error(np.asarray(grid).max()) / reg
    assert np.abs(products.log_dot(t) - want).max() <= products.apart(exponents)
    assert_allclose(products.log_dot(t, 0), np.log((np.exp(terms - top[:, None]) * grid._cost.axes[0][
        np.unravel_index(np.arange(grid.shape[0]), grid.nodes[0])[0]
    ][:, np.unravel_index(np.arange(grid.shape[1]), grid.nodes[1])[0]]).sum(1)) + top, rtol=1e-9)  # fmt: skip


def test_what_rounding_hides_is_no_certificate():
    """Sums of the rows and columns that round apart: below their bound no tol is reached, and soon told so."""
    grid = mapuot.Grid((6, 7), 0.2)
    a, b = masses(grid)
    with pytest.warns(mapuot.ConvergenceWarning, match="rounding"):
        result = mapuot.solve(grid, a, b, reg=1e-3, reg_m=1e3, tol=1e-13)
    assert (result.status, result.converged) == ("stalled", False)
    assert 1e-13 < result.error_bound < 1e-6
    assert result.n_passes < 400
    known = mapuot.solve(grid, a, b, reg=1e-3, reg_m=1e3, tol=1e-13, tol_gap=1e-9)
    assert known.converged
    assert known.gap <= 1e-9 * abs(known.dual)


def test_a_divergence_of_images():
    grid = mapuot.Grid((6, 5), 0.2)
    a, b = masses(grid)
    M = np.asarray(grid)
    want = mapuot.sinkhorn_divergence(M, np.stack([a.ravel(), b.ravel()]), b.ravel(), reg=0.05, reg_m=1.0)
    assert mapuot.sinkhorn_divergence(grid, a, b, reg=0.05, reg_m=1.0) == pytest.approx(want[0], rel=1e-6)
    assert_allclose(
        mapuot.sinkhorn_divergence(grid, np.stack([a, b]), b, reg=0.05, reg_m=1.0), want, rtol=1e-6, atol=1e-12
    )


def test_what_is_too_large_is_refused_before_it_is_made():
    grid = mapuot.Grid((100, 100, 100))
    result = mapuot.solve(grid, reg=1e4, reg_m=1e4, tol=1.0)
    for call in (lambda: result.plan, lambda: result.top_k(1), lambda: result.sparse(0.0)):
        with pytest.raises(MemoryError, match="barycentric_map"):
            call()
    assert result.rows(5, 7).shape == (2, 1_000_000)
    assert result.sample(2, 0)[1].shape == (2,)  # of two rows
