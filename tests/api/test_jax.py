"""mapuot.jax against mapuot's own values and finite differences; under jit, grad and vmap."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mapuot

jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)

from jax.test_util import check_grads  # noqa: E402

from mapuot.jax import sinkhorn_loss  # noqa: E402

OPTIONS = {"tol": 1e-11}


def inputs(p=3, m=5, n=6):
    rng = np.random.default_rng(0)
    return rng.uniform(0.3, 1.0, (p, m)), rng.uniform(0.4, 1.2, (p, n)), rng.random((m, n))


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
@pytest.mark.parametrize("reg_m", [1.0, (0.5, 2.0), (1.0, np.inf)], ids=str)
def test_value_and_gradient(reg_m, own):
    a, b, M = inputs()
    M = M * np.linspace(0.5, 1, 3)[:, None, None] if own else M

    def loss(a, b, M):
        return sinkhorn_loss(M, a, b, reg=0.1, reg_m=reg_m, **OPTIONS)

    assert_allclose(loss(a, b, M), mapuot.solve_batch(M, a, b, reg=0.1, reg_m=reg_m, **OPTIONS).dual, rtol=1e-12)
    check_grads(loss, (a, b, M), order=1, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
def test_the_gradient_holds_the_scale_of_the_costs(own):
    a, b, M = inputs()
    M = 7 * M * np.linspace(0.5, 1, 3)[:, None, None] if own else 7 * M
    scale = np.median(M)
    for wrapped in (lambda x: x, jax.jit):
        found, wanted = (
            wrapped(jax.grad(lambda M: sinkhorn_loss(M, a, b, **how, **OPTIONS).sum()))(M)  # noqa: B023 - called here
            for how in ({"reg": 0.1, "reg_m": 1.0, "scale_cost": "median"}, {"reg": 0.1 * scale, "reg_m": scale})
        )
        assert_allclose(found, wanted, rtol=1e-9)


def test_jit_vmap_and_a_zero_weight():
    a, b, M = inputs()
    a[0, 2] = 0.0
    one = jax.jit(jax.grad(lambda a, b: sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, **OPTIONS)))
    together = jax.grad(lambda a: sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, **OPTIONS).sum())(a)
    assert np.isfinite(together).all()
    assert_allclose(jax.vmap(one)(a, b), together, rtol=1e-7)


@pytest.mark.parametrize(
    ("sign", "options", "error", "text"),
    [(1, {"penalty": "tv"}, TypeError, "options may be"), (-1, {}, ValueError, "A must be")],
)
def test_what_is_told(sign, options, error, text):
    a, b, M = inputs()
    with pytest.raises(error, match=text):
        sinkhorn_loss(M, sign * a, b, reg=0.1, reg_m=1.0, **options)


def device(platform):
    """The first device of this kind, or no test."""
    try:
        found = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {platform}")
    if platform == "gpu":
        pytest.importorskip("cupy")
    return found


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_arrays_are_read_where_they_lie(platform, monkeypatch):
    """No callback, and not a copy: the solver is given the memory of JAX's own arrays."""
    there = device(platform)
    a, b, M = (jax.device_put(x, there) for x in inputs())
    right = sinkhorn_loss(M, a, b, reg=0.1, reg_m=1.0, **OPTIONS)
    traced = jax.grad(jax.jit(lambda *y: sinkhorn_loss(*y, reg=0.1, reg_m=1.0, **OPTIONS).sum()), (0, 1, 2))(M, a, b)
    given = []

    def seen(*arguments, **options):
        given.extend(arguments[:3])
        return mapuot.solve_batch(*arguments, **options)

    def never(*arguments, **options):
        raise AssertionError("a callback")

    monkeypatch.setattr("mapuot.jax.solve_batch", seen)
    monkeypatch.setattr(jax, "pure_callback", never)
    value, slopes = jax.value_and_grad(lambda *x: sinkhorn_loss(*x, reg=0.1, reg_m=1.0, **OPTIONS).sum(), (0, 1, 2))(
        M, a, b
    )
    for array, x in zip(given, (M, a, b), strict=True):
        where = array.__array_interface__["data"][0] if platform == "cpu" else array.data.ptr
        assert where == x.unsafe_buffer_pointer()
    assert_allclose(value, right.sum(), rtol=1e-10)
    for slope, other in zip(slopes, traced, strict=True):
        assert slope.devices() == {there}
        assert_allclose(slope, other, rtol=1e-6, atol=1e-9)
