"""Points by doors of their own: samples, losses of torch and JAX, the command line; refusals are named."""

import numpy as np
import pytest
from click.testing import CliRunner

import mapuot
from mapuot.cli import cli


def clouds(m=9, n=7, d=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((m, d)), rng.random((n, d)) + 0.1, rng.random(m) + 0.1, rng.random(n) + 0.1


def test_solve_sample_is_solve_of_the_cloud():
    x, y, a, b = clouds()
    want = mapuot.solve(mapuot.PointCloud(x, y, "euclidean", 2.0, [1.0, 3.0]), a, b, reg=0.1, reg_m=1.0)
    got = mapuot.solve_sample(x, y, a, b, reg=0.1, reg_m=1.0, metric="euclidean", scale=2.0, weights=[1.0, 3.0])
    np.testing.assert_array_equal(got.plan, want.plan)


def test_the_sum_of_the_plans_of_a_batch():
    x, y, _, b = clouds()
    A = np.random.default_rng(2).random((4, 9)) * (np.arange(9) != np.arange(4)[:, None])
    batch = mapuot.solve_batch(mapuot.PointCloud(x, y), A, b, reg=0.1, reg_m=1.0)
    np.testing.assert_allclose(batch.plan_sum(np.arange(4.0)), np.tensordot(np.arange(4.0), batch.plan, 1), atol=1e-12)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine"])
def test_the_torch_loss_by_points(metric):
    torch = pytest.importorskip("torch")
    from mapuot.torch import sample_loss, sinkhorn_loss

    tensors = [torch.tensor(z, requires_grad=True) for z in clouds(5, 4)]

    def loss(x, y, a, b):
        return sample_loss(x, y, a, b, reg=0.2, reg_m=(0.5, 1.0), metric=metric, scale=1.5, tol=1e-11)

    assert torch.autograd.gradcheck(loss, tensors, atol=1e-5)
    x, y, a, b = tensors
    if metric == "sqeuclidean":  # autograd through the matrix
        M = 1.5 * ((x[:, None] - y) ** 2).sum(2)
        value = sinkhorn_loss(M, a, b, reg=0.2, reg_m=(0.5, 1.0), tol=1e-11)
        assert float(loss(*tensors)) == pytest.approx(float(value), rel=1e-9)
        slopes = torch.autograd.grad(loss(*tensors), tensors)
        for got, want in zip(slopes, torch.autograd.grad(value, tensors), strict=True):
            torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-6)
    slope = torch.autograd.grad(loss(*tensors), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second"):
        slope.sum().backward()
    with pytest.raises(TypeError, match="sample_loss"):
        sinkhorn_loss(mapuot.PointCloud(x, y), a, b, reg=0.2, reg_m=1.0)
    assert sample_loss(x.detach().float(), y.detach().float(), reg=0.2, reg_m=1.0).dtype == torch.float32


def test_the_jax_loss_by_points():
    jax = pytest.importorskip("jax")
    from mapuot.jax import sample_loss, sinkhorn_loss

    x, y, a, b = clouds(5, 4)
    result = mapuot.solve_sample(x, y, a, b, reg=0.2, reg_m=1.0, tol=1e-10)
    loss = jax.jit(lambda *z: sample_loss(z[0], z[1], z[2], z[3], reg=0.2, reg_m=1.0, tol=1e-10))
    assert float(loss(x, y, a, b)) == pytest.approx(result.dual, rel=1e-5)
    for got, want in zip(jax.grad(loss, (0, 1, 2, 3))(x, y, a, b), result.gradient(), strict=False):
        np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(TypeError, match="sample_loss"):
        sinkhorn_loss(mapuot.PointCloud(x, y), a, b, reg=0.2, reg_m=1.0)


def test_the_command_line_takes_points(tmp_path):
    x, y, *_ = clouds(30, 20, 3)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    arguments = ["solve", "--points", str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), "--metric", "euclidean"]
    arguments += ["--reg", "0.1", "--reg-m", "1", "-o", str(tmp_path / "out.npz"), "--plan", "dense"]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 0, found.output
    want = mapuot.solve_sample(x, y, reg=0.1, reg_m=1.0, metric="euclidean")
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["plan"], want.plan, rtol=1e-6, atol=1e-12)
    for wrong in (["solve", "--reg", "1", "--reg-m", "1"], ["solve", "M.npy", *arguments[1:]]):
        assert CliRunner().invoke(cli, wrong).exit_code == 2
