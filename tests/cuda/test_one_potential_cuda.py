"""One potential on a GPU: the answers are those of the CPU, whatever M is, in as few passes."""

import numpy as np
import pytest
from problems import csr_of, relative_error

import mapuot
from mapuot.backends import cuda
from mapuot.route import on_device

cp = pytest.importorskip("cupy", reason="needs CuPy")
if not cp.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


def costs(kind):
    """M between 70 points and themselves, and options of a solve."""
    rng = np.random.default_rng(0)
    x = rng.random((70, 13 if kind == "points in 13 dimensions" else 2))
    M = ((x[:, None] - x) ** 2).sum(-1)
    if kind == "float64":
        return M, {"precision": "float64"}
    if kind.startswith("points"):
        return mapuot.PointCloud(x, form=None), {}
    if kind == "grid":
        return mapuot.Grid((10, 7), spacing=0.1), {}
    near = np.sort(M, 1)[:, 8:9] >= M
    if kind in ("pairs", "forbidden"):
        some = np.where(near | near.T, M, np.inf)
        return (csr_of(some) if kind == "pairs" else some), {}
    return M, {} if kind == "array" else {"penalty": kind}


def dense(plan):
    return plan.toarray() if hasattr(plan, "toarray") else np.asarray(plan)


KINDS = ["array", "float64", "forbidden", "points", "points in 13 dimensions", "pairs", "grid", "tv", "l2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reg", [0.1, 1e-3])
def test_answers_are_those_of_the_cpu(kind, reg):
    a = np.random.default_rng(1).random(70) + 0.01
    a[3] = 0.0
    M, options = costs(kind)
    for reg_m in (0.3,) if "penalty" in options else (0.3, np.inf):
        found = mapuot.solve(M, a, a, reg=reg, reg_m=reg_m, backend="cuda", **options)
        right = mapuot.solve(M, a, a, reg=reg, reg_m=reg_m, tol=1e-8, **options)
        assert found.converged
        assert "one potential" in found.how
        assert found.n_passes <= (12 if "penalty" not in options else 25)
        np.testing.assert_allclose(found.log_u, found.log_v, rtol=1e-9, atol=1e-9)
        assert relative_error(dense(found.plan), dense(right.plan)) <= found.error_bound + right.error_bound
        assert found.dual == pytest.approx(right.dual, rel=1e-6)


@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
@pytest.mark.parametrize(("reg", "reg_m"), [(2.0, 0.3), (1e-3, 0.3), (0.01, np.inf)])
def test_points_on_the_device_are_solved_in_one_call(monkeypatch, dim, tol, reg, reg_m):
    """With themselves, and with others as long as no larger reg is worth it; a call that ends too soon is made anew."""
    plain = cuda.import_module("mapuot.backends.cuda.plain")
    monkeypatch.setattr(plain, "ONCE", False)
    rng = np.random.default_rng(3)
    x, y, a = rng.random((60, dim)), rng.random((50, dim)), rng.random(60) + 0.1
    given, solved = {"reg": reg, "reg_m": reg_m, "tol": tol}, on_device.attempt
    whole = []
    monkeypatch.setattr(on_device, "attempt", lambda *words: whole.append(solved(*words)) or whole[-1])
    for z, b in ((None, a), (y, a[:50] * a.sum() / a[:50].sum())):
        there = None if z is None else cp.asarray(z)
        found = mapuot.solve(mapuot.PointCloud(cp.asarray(x), there), a, b, **given)
        right = mapuot.solve(mapuot.PointCloud(x, z), a, b, **given | {"tol": 1e-10}, precision="float64")
        assert found.converged
        assert ("one potential" in found.how) == (z is None)
        bound = found.error_bound + right.error_bound
        assert relative_error(dense(found.plan), dense(right.plan)) <= bound <= 2 * tol
        for own, other in zip(found.gradient()[:2], right.gradient()[:2], strict=True):
            assert np.abs(own - other).sum() <= found.gradient().error + right.gradient().error
    assert whole[0] is not None
    assert (whole[1] is not None) == (reg == 2.0)
    for count in (2, 9):  # the second look is after fewer passes than the first
        few = mapuot.solve(mapuot.PointCloud(cp.asarray(x)), a, a, **given | {"max_passes": count, "tol": 1e-17})
        assert (few.n_passes, few.status) == (count, "max_passes")


@pytest.mark.parametrize("path", ["persistent", "portable"])
@pytest.mark.parametrize("penalty", ["kl", "tv", "range"])
def test_certificates_are_those_of_the_oracle(penalty, path, monkeypatch):
    """Both sides are as far from their optimum: the last of a few passes, far from converged, counts them twice."""
    if path == "portable":
        monkeypatch.setenv("MAPUOT_CUDA", "portable")
    rng = np.random.default_rng(2)
    x, a = rng.random((60, 2)), rng.random(60) + 0.1
    M = ((x[:, None] - x) ** 2).sum(-1)
    options = {"reg": 0.05, "reg_m": 0.3, "penalty": penalty, "precision": "float64", "tol": 1e-14, "max_passes": 4}
    found, right = (mapuot.solve(M, a, a, backend=backend, **options) for backend in ("cuda", "reference"))
    assert "one potential" in found.how
    for one, other in zip(found.trace[-1:], right.trace[-1:], strict=True):
        assert one.error == pytest.approx(other.error, rel=1e-3)
        assert one.gap == pytest.approx(other.gap, rel=1e-3)


@pytest.mark.parametrize("n", [40, 130])
@pytest.mark.parametrize("reg", [0.1, 1e-3])
@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
def test_a_batch_of_problems_of_clouds_with_themselves(n, reg, own):
    """Blocks in both precisions, products; one random M has a kernel that is not positive, and is left."""
    rng = np.random.default_rng(0)
    x = rng.random((3, n, 2))
    M = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
    if own:
        M[2] = rng.random((n, n))
        M[2] += M[2].T
    M, A = (M if own else M[0]), rng.random((3, n)) + 0.01
    A[1, 3] = 0.0
    for options in ({}, {"precision": "float64"}):
        found = mapuot.solve_batch(M, A, A, reg=reg, reg_m=0.3, backend="cuda", **options)
        right = mapuot.solve_batch(M, A, A, reg=reg, reg_m=0.3, tol=1e-9, symmetric=False, backend="cpu")
        assert found.converged.all()
        assert all("one potential" in how for how in found.how)
        assert (found.n_passes[:2] <= 12).all()
        for i in range(3):
            error = relative_error(dense(found[i].plan), dense(right[i].plan))
            assert error <= found.error_bound[i] + right.error_bound[i]
        used = A[:2] > 0
        np.testing.assert_allclose(found.log_u[:2][used], found.log_v[:2][used], rtol=1e-9, atol=1e-9)
