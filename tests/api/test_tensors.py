"""Torch in, torch out: the answers of tensors are those of arrays, as tensors; a gradient that is lost is told."""

import pickle
import warnings

import numpy as np
import pytest
from problems import clouds

torch = pytest.importorskip("torch")

import mapuot  # noqa: E402

CASE = clouds(30, 40, reg=0.05)


def tensors(dtype=torch.float64, **more):
    return [torch.tensor(x, dtype=dtype, **more) for x in (CASE.M, CASE.a, CASE.b)]


def assert_same(tensor, array):
    assert isinstance(tensor, torch.Tensor)
    assert tensor.device.type == "cpu"
    assert not tensor.requires_grad
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype


@pytest.mark.parametrize(
    "options", [{}, {"progress": False, "callback": lambda stats: None}], ids=["short", "ordinary"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_result_of_tensors(dtype, options):
    M, a, b = tensors(dtype)
    found = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0, **options)
    wide = [x.float().numpy() if dtype == torch.float16 else x.numpy() for x in (M, a, b)]
    right = mapuot.solve(*wide, reg=CASE.reg, reg_m=1.0, **options)
    for name in ("plan", "log_u", "log_v", "f", "g", "row_marginal", "col_marginal"):
        assert_same(getattr(found, name), getattr(right, name))
    X = np.random.default_rng(0).random((40, 3))
    assert_same(found.apply(torch.tensor(X)), right.apply(X))
    assert_same(found.barycentric_map(torch.tensor(X)), right.barycentric_map(X))
    assert_same(found.apply_transpose(wide[1]), right.apply_transpose(wide[1]))
    assert_same(found.rows(3, 7), right.rows(3, 7))
    for one, other in ((found.top_k(3), right.top_k(3)), (found.sample(50, seed=1), right.sample(50, seed=1))):
        for x, y in zip(one, other, strict=True):
            assert_same(x, y)
    first, again = (found.sample(50, torch.Generator().manual_seed(3), method="systematic") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert isinstance(found, mapuot.Result)
    assert found.error_bound == right.error_bound
    assert found.converged is True
    assert repr(found) == repr(right)
    assert_same(pickle.loads(pickle.dumps(found)).plan, right.plan)
    assert found.sparse(1e-4).nnz == right.sparse(1e-4).nnz


def test_other_arguments_of_tensors():
    """Penalties of points, reference, start and memory of the plan; a tensor among arrays is enough."""
    M, a, b = tensors()
    rho, c = torch.linspace(0.5, 2.0, 30), torch.rand(30, 40, dtype=torch.float64)
    out = torch.zeros_like(M)
    found = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=(rho, 1.0), reference=c, out=out)
    right = mapuot.solve(CASE.M, CASE.a, CASE.b, reg=CASE.reg, reg_m=(rho.numpy(), 1.0), reference=c.numpy())
    assert_same(out, right.plan)
    assert found.plan.data_ptr() == out.data_ptr()
    for start in (found, (found.log_u, found.log_v), found.arrays):
        for M_again in (M, CASE.M):
            again = mapuot.solve(M_again, a, b, reg=CASE.reg, reg_m=(rho, 1.0), reference=c, warm_start=start)
            assert again.n_passes <= 2
    assert mapuot.solve(CASE.M, CASE.a, CASE.b, reg=CASE.reg, reg_m=1.0, warm_start=found).converged
    assert_same(mapuot.solve(CASE.M, a, CASE.b, reg=0.1, reg_m=1.0).plan,
                mapuot.solve(CASE.M, CASE.a, CASE.b, reg=0.1, reg_m=1.0).plan)  # fmt: skip
    regs = [0.5, 0.1]
    paths = (mapuot.path(*three, regs=regs, reg_ms=1.0) for three in ((M, a, b), (CASE.M, CASE.a, CASE.b)))
    for x, y in zip(*paths, strict=True):
        assert_same(x.plan, y.plan)


def test_a_batch_of_tensors():
    M, a, b = tensors()
    A = torch.stack([a, a.flip(0)])
    found, right = (mapuot.solve_batch(M, A, b, reg=0.1, reg_m=1.0),
                    mapuot.solve_batch(CASE.M, A.numpy(), CASE.b, reg=0.1, reg_m=1.0))  # fmt: skip
    for name in ("log_u", "row_marginal", "gap", "error_bound", "cost", "n_passes", "converged"):
        assert_same(getattr(found, name), getattr(right, name))
    assert_same(found.plan, right.plan)
    assert_same(found[1].plan, right[1].plan)
    assert_same(found.plan_sum(torch.tensor([0.5, 2.0])), right.plan_sum(np.array([0.5, 2.0])))
    assert found.status.tolist() == ["converged"] * 2
    assert len(found) == 2
    for one in (found[1], list(found)[1], found[-1:][0]):
        assert_same(one.plan, right[1].plan)
    again = mapuot.solve_batch(M, A, b, reg=0.1, reg_m=1.0, warm_start=found)
    assert again.n_passes.max() <= 2


def test_a_gradient_that_is_lost_is_told_at_the_callers_line():
    M, a, b = tensors()
    right = mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0).plan
    M.requires_grad_()
    for call in (
        lambda: mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0).plan,
        lambda: mapuot.solve_batch(M, a[None], b, reg=CASE.reg, reg_m=1.0, tol=1e-9)[0].plan,
        lambda: next(mapuot.path(M, a, b, regs=[CASE.reg], reg_ms=1.0)).plan,
    ):
        with pytest.warns(UserWarning, match="^M requires grad .*mapuot.torch.sinkhorn_loss") as told:
            plan = call()
        assert [one.filename for one in told] == [__file__]
        assert not plan.requires_grad
        torch.testing.assert_close(plan, right, atol=1e-8, rtol=1e-5)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0)
    with pytest.warns(mapuot.ConvergenceWarning) as told, torch.no_grad():
        mapuot.solve(M, a, b, reg=CASE.reg, reg_m=1.0, max_passes=1)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_csr_tensor_is_solved_as_its_pairs():
    """The plan is such a tensor, too, in the same places; indices of 32 and 64 bits, half precision in float32."""
    from scipy import sparse

    rng = np.random.default_rng(0)
    S = sparse.random_array((30, 20), density=0.4, rng=rng, format="csr")
    a, b = rng.random(30) + 0.1, rng.random(20) + 0.1
    right = mapuot.solve(S, a, b, reg=0.1, reg_m=1.0, tol=1e-9)
    for index in (torch.int32, torch.int64):
        places = torch.tensor(S.indptr, dtype=index), torch.tensor(S.indices, dtype=index)
        M = torch.sparse_csr_tensor(*places, torch.tensor(S.data), S.shape)
        found = mapuot.solve(M, a, torch.tensor(b), reg=0.1, reg_m=1.0, tol=1e-9)
        assert found.plan.layout == torch.sparse_csr
        np.testing.assert_array_equal(found.plan.col_indices(), S.indices)
        np.testing.assert_allclose(found.plan.values(), right.plan.data, rtol=1e-9)
        assert isinstance(found.log_u, torch.Tensor)
        assert found.sparse(keep=0.5).layout == torch.sparse_csr
        batch = mapuot.solve_batch(M, torch.tensor(np.stack([a, 2 * a])), reg=0.1, reg_m=1.0)
        assert batch[1].plan.layout == torch.sparse_csr
        again = mapuot.pot.sinkhorn_unbalanced(torch.tensor(a), torch.tensor(b), M, 0.1, 1.0, stopThr=1e-9)
        np.testing.assert_allclose(again.values(), right.plan.data, rtol=1e-6)
    half = mapuot.solve(M.to(torch.bfloat16), a, b, reg=0.1, reg_m=1.0)
    assert half.plan.dtype == torch.float32
    with pytest.raises((TypeError, ValueError), match="M cannot be read as an array"):
        mapuot.solve(M.to_sparse_coo(), a, b, reg=0.1, reg_m=1.0)
