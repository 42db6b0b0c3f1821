"""Costs between the nodes of grids: the answers of the matrix, one axis after the other; what is refused is named."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.distance import cdist

import mapuot
from mapuot.backends import cpu
from mapuot.backends.cpu.grid import GridOperator
from mapuot.problem.problem import Problem
from mapuot.route.options import make_options

GRIDS = {
    "line": mapuot.Grid(17, 0.1, 2.0, target=23, offset=0.45),
    "image": mapuot.Grid((6, 7), (0.2, 0.15)),
    "volume": mapuot.Grid((3, 4, 5), 0.3, target=(4, 2, 3), offset=(0.1, -0.4, 0.2)),
}
REG_M = [1.0, (0.3, 5.0), np.inf, (np.inf, 0.5), (0.5, np.inf)]


@pytest.fixture(params=GRIDS)
def grid(request):
    return GRIDS[request.param]


def masses(grid, ratio=1.3, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.random(nodes) + 0.1 for nodes in grid.nodes)
    return a / a.sum(), ratio * b / b.sum()


def test_costs_are_squared_distances_of_the_nodes(grid):
    M = grid.scale * cdist(grid.points(), grid.points("cols"), "sqeuclidean")
    assert_allclose(np.asarray(grid), M, atol=1e-14)
    assert_allclose(grid._cost.read(2, 5), M[2:5], atol=1e-14)
    assert_allclose(np.asarray(grid.transpose()), M.T, atol=1e-14)
    low, high, *odd = grid._cost.range(cpu)
    assert_allclose((low, high, *odd), (M.min(), M.max(), 0, 0), atol=1e-14)
    assert grid.shape == M.shape


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


@pytest.mark.parametrize("reg_m", REG_M, ids=str)
@pytest.mark.parametrize("reg", [0.05, 1e-3])
def test_answers_are_those_of_the_matrix(grid, reg, reg_m):
    a, b = masses(grid, 1.0 if reg_m is np.inf else 1.3)
    reg = max(reg, 3e-3) if reg_m is np.inf else reg  # below, 450 to 10,000 passes as the machine's BLAS rounds
    want = mapuot.solve(np.asarray(grid), a.ravel(), b.ravel(), reg=reg, reg_m=reg_m, tol=1e-9)
    got = mapuot.solve(grid, a, b, reg=reg, reg_m=reg_m, tol=1e-7)
    assert got.converged
    hard = 12.0 if np.isinf(reg_m).any() else 1.0  # of a hard side the bound is its violation
    assert np.abs(got.plan - want.plan).sum() <= hard * (got.error_bound + want.error_bound) * want.mass
    assert got.dual <= want.dual + max(want.gap, 1e-12)
    for name in ("cost", "objective", "mass"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6)
    X, Y = np.random.default_rng(1).normal(size=(grid.shape[1], 2)), np.ones(grid.shape[0])
    assert_allclose(got.apply(X), got.plan @ X, atol=1e-12)
    assert_allclose(got.apply_transpose(Y), got.col_marginal, rtol=1e-6)
    assert_allclose(got.barycentric_map(grid.points("cols")), want.barycentric_map(grid.points("cols")), atol=1e-5)


@pytest.mark.parametrize("precision", ["mixed", "float64"])
@pytest.mark.parametrize("method", ["auto", "translation_invariant", "sinkhorn"])
def test_passes_are_those_of_the_matrix(grid, method, precision):
    """The iterates of float64 passes over K, whatever storage is asked for."""
    a, b = masses(grid)
    found = []
    for cost in (grid, np.asarray(grid)):
        problem = Problem.from_arrays(cost, a.ravel(), b.ravel(), 0.05, (1.0, 2.0), "kl", "product", cpu)
        storage = precision if cost is grid else "float64"
        workspace = cpu.Workspace(problem, make_options(method, storage, 1e-12, None, 1))
        workspace.absorb(np.linspace(-1, 1, grid.shape[1]))
        stats = workspace.iterate(5)
        found.append((stats, *workspace.potentials(), *workspace.marginals()))
    for left, right in zip(*(x[1:] for x in found), strict=True):
        assert_allclose(left, right, rtol=1e-9, atol=1e-10)
    for left, right in zip(found[0][0], found[1][0], strict=True):
        assert (left.status, left.rejected) == (right.status, right.rejected)
        assert_allclose([left.mass, left.dual], [right.mass, right.dual], rtol=1e-9)


def test_zeros_masses_far_apart_and_a_reg_for_each_node():
    grid = mapuot.Grid((8, 9), 0.1)
    a, b = masses(grid)
    a[:3], b[5:, 2:] = 0.0, 0.0
    a[5, 5] = 1e-250
    rho = np.random.default_rng(2).uniform(0.1, 2.0, a.shape)
    for reg in (0.02, 1e-4):
        want = mapuot.solve(np.asarray(grid), a.ravel(), b.ravel(), reg=reg, reg_m=(rho.ravel(), 1.0), tol=1e-9)
        got = mapuot.solve(grid, a, b, reg=reg, reg_m=(rho, 1.0), tol=1e-7)
        assert got.converged
        assert np.abs(got.plan - want.plan).sum() <= (got.error_bound + want.error_bound) * want.mass
        assert (got.row_marginal.reshape(a.shape)[:3] == 0).all()


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


def test_other_doors_and_products(tmp_path):
    grid = mapuot.Grid((6, 5), 0.2)
    a, b = masses(grid)
    want = mapuot.solve(grid, a, b, reg=0.05, reg_m=1.0, tol=1e-9)
    A = np.stack([a, 2 * a])
    batch = mapuot.solve_batch(grid, A, b, reg=0.05, reg_m=1.0, tol=1e-9)
    assert_allclose(batch[0].plan, want.plan, atol=1e-9)
    assert_allclose(batch.cost[0], want.cost, rtol=1e-7)
    _, value = want.top_k(2)
    assert_allclose(value[:, 0], want.plan.max(1))
    assert_allclose(want.sparse(0.0).toarray(), want.plan)
    assert_allclose(want.rows(3, 5), want.plan[3:5])
    _, shares = want.push(np.arange(30) % 2)
    assert_allclose(shares, np.stack([want.plan[k::2].sum(0) / want.plan.sum(0) for k in (0, 1)], 1))
    assert len(want.sample(5, seed=0)[0]) == 5
    want.save(tmp_path / "answer.npz")
    assert_allclose(mapuot.load(tmp_path / "answer.npz", grid).plan, want.plan)
    assert "grid" in grid._cost.kind
    assert want._repr_html_()


def test_a_divergence_of_images():
    grid = mapuot.Grid((6, 5), 0.2)
    a, b = masses(grid)
    M = np.asarray(grid)
    want = mapuot.sinkhorn_divergence(M, np.stack([a.ravel(), b.ravel()]), b.ravel(), reg=0.05, reg_m=1.0)
    assert mapuot.sinkhorn_divergence(grid, a, b, reg=0.05, reg_m=1.0) == pytest.approx(want[0], rel=1e-6)
    assert_allclose(
        mapuot.sinkhorn_divergence(grid, np.stack([a, b]), b, reg=0.05, reg_m=1.0), want, rtol=1e-6, atol=1e-12
    )
    for other in (mapuot.Grid((6, 5), target=(5, 6)), mapuot.Grid((6, 5), offset=1.0)):
        with pytest.raises(ValueError, match="M_a and M_b"):
            mapuot.sinkhorn_divergence(other, a, b, reg=0.05, reg_m=1.0)


def test_tensors():
    torch = pytest.importorskip("torch")
    grid = mapuot.Grid((6, 5), 0.2)
    a, b = map(torch.tensor, masses(grid))
    found = mapuot.solve(grid, a, b, reg=0.05, reg_m=1.0)
    assert isinstance(found.log_u, torch.Tensor)
    assert found.converged


def test_what_is_too_large_is_refused_before_it_is_made():
    grid = mapuot.Grid((100, 100, 100))
    result = mapuot.solve(grid, reg=1e4, reg_m=1e4, tol=1.0)
    for call in (lambda: result.plan, lambda: result.top_k(1), lambda: result.sparse(0.0)):
        with pytest.raises(MemoryError, match="barycentric_map"):
            call()
    assert result.rows(5, 7).shape == (2, 1_000_000)
    assert result.sample(2, 0)[1].shape == (2,)  # of two rows


def test_refusals():
    grid = mapuot.Grid((6, 5), 0.2)
    a, b = masses(grid)
    for wrong, error, match in (
        ({"shape": ()}, ValueError, "shape"), ({"shape": (3, 0)}, ValueError, r"shape\[1\]"),
        ({"shape": (3, 2), "spacing": (1, 2, 3)}, ValueError, "spacing"),
        ({"shape": 3, "scale": -1}, ValueError, "scale"),
        ({"shape": 3, "spacing": 0}, ValueError, "spacing"), ({"shape": (3, 2), "target": 3}, ValueError, "target"),
        ({"shape": 3, "offset": np.inf}, ValueError, "offset"), ({"shape": 3, "spacing": 1e200}, ValueError, "finite"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            mapuot.Grid(**wrong)
    for options, match in (({"penalty": "tv"}, "penalty"), ({"reference": np.ones((30, 30))}, "reference")):
        with pytest.raises(NotImplementedError, match=match):
            mapuot.solve(grid, a, b, reg=0.1, reg_m=1.0, **options)
    with pytest.raises(ValueError, match="map-uot"):
        mapuot.solve(grid, a, b, reg=0.1, reg_m=1.0, method="map-uot")
    with pytest.raises(ValueError, match="a must have shape"):
        mapuot.solve(grid, a.T, b, reg=0.1, reg_m=1.0)
    with pytest.raises(TypeError, match="PointCloud"):
        mapuot.solve(grid, a, b, reg=0.1, reg_m=1.0).gradient()
