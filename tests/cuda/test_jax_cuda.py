"""mapuot.jax within jax.jit on a GPU: solves read JAX's buffers there, and equal the answers outside of jit.

On the emulation JAX has no GPU: its buffers of the CPU stand for the device's, through the same calls.
"""

from functools import partial

import cupy as cp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mapuot

jax = pytest.importorskip("jax")
jnp = jax.numpy

from mapuot import jax as ours  # noqa: E402
from mapuot.arrays import host, is_on_device  # noqa: E402

pytestmark = pytest.mark.gpu
EMULATED = "cuda_on_cpu" in cp.__file__


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """Put arrays on the GPU, and fail if JAX copies them to the host."""
    if ours.buffer_callback is None:
        pytest.skip("this JAX has no calls with buffers")
    if EMULATED:
        monkeypatch.setattr(ours, "ON_DEVICE", "cpu")
        monkeypatch.setattr(ours.DeviceStream, "__cuda_stream__", lambda self: (0, 0))
        monkeypatch.setattr(ours, "solved_there", through_cupy)
        where = jax.devices("cpu")[0]
    else:
        try:
            where = jax.devices("gpu")[0]
        except RuntimeError:
            pytest.skip("JAX has no GPU")
    x64 = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(where):
        yield
    jax.config.update("jax_enable_x64", x64)


def through_cupy(solved, kinds, fills, *arrays):
    given = [cp.asarray(np.asarray(z)) for z in arrays]
    answers = [cp.empty(kind.shape, kind.dtype) for kind in kinds]
    if not (fills and fills(answers, *given)):
        answers = solved(*given)
    return [jnp.asarray(np.asarray(x)) for x in answers]


def clouds(count=3, n=40, m=50):
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (count, n, 2)), jax.random.normal(keys[1], (count, m, 2)) + 1


@pytest.fixture
def on_host(monkeypatch):
    """Return a list of the costs that solves get from the host."""
    found = []
    solve = mapuot.solve
    solve_batch = mapuot.solve_batch

    def looked(call):
        def looking(M, *args, **options):
            if not is_on_device(getattr(M, "_cost", M)):
                found.append(M)
            return call(M, *args, **options)

        return looking

    monkeypatch.setattr(ours, "solve", looked(solve))
    monkeypatch.setattr(ours, "solve_batch", looked(solve_batch))
    return found


@pytest.mark.parametrize("reg_m", [1.0, np.inf], ids=str)
def test_pairs_are_drawn_on_the_device(reg_m, on_host):
    """The pairs of a key are the same within jit, without it, and of a batch."""
    x, y = clouds()
    keys = jax.random.split(jax.random.key(1), 3)

    def step(x, y, key):
        return ours.match(x, y, key, reg=0.3, reg_m=reg_m, tol=1e-8)

    want = [step(x[k], y[k], keys[k]) for k in range(3)]
    alone = [jax.jit(step)(x[k], y[k], keys[k]) for k in range(3)]
    assert_array_equal(np.array(alone), np.array(want))
    together = jax.jit(jax.vmap(step))(x, y, keys)
    assert_array_equal(np.stack(together, 1), np.array(want))
    many = jax.jit(jax.vmap(jax.vmap(step, (None, None, 0)), (0, 0, None)))(x, y, keys)
    for k in range(3):
        assert_array_equal(many[0][k, k], want[k][0])
    assert not on_host


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_equal_masses_take_one_graph(monkeypatch, x64):
    """The launches that solve draw the pairs, too; they are the pairs of a tight solve at the same places."""
    monkeypatch.setattr(ours, "solve", None)
    jax.config.update("jax_enable_x64", x64)
    x, y = (z[0] for z in clouds(1, 60, 50))
    assert x.dtype == (np.float64 if x64 else np.float32)
    key = jax.random.key(2)
    step = partial(ours.match, reg=0.5, reg_m=2.0, tol=1e-6)
    found = jax.jit(step)(x, y, key)
    for mine, other in zip(found, step(x, y, key), strict=True):
        np.testing.assert_array_equal(mine, other)
    exact = mapuot.solve(mapuot.PointCloud(np.asarray(x), np.asarray(y)), reg=0.5, reg_m=2.0, tol=1e-9, backend="cpu")
    places = np.asarray(jax.random.uniform(key, (2, 60), x.dtype))
    for mine, right in zip(found, exact.pairs_at(places), strict=True):
        assert (np.asarray(mine) == right).mean() > 0.9  # ties at the tolerance


@pytest.mark.parametrize("sizes", [(40, 70), (3, 1200), (1200, 3)], ids=str)
def test_pairs_at_places_are_those_of_the_host(sizes):
    """A place names the row, and the column in it, where cumulated masses pass it: on every device the same."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(k, 2)) for k in sizes)
    a = rng.random(len(x))
    a[1] = 0.0
    at = rng.random((2, 300))
    known = {"reg": 0.5, "reg_m": 1.0, "tol": 1e-9}
    right = mapuot.solve(mapuot.PointCloud(x, y), a, **known).pairs_at(at)
    found = mapuot.solve(mapuot.PointCloud(cp.asarray(x), cp.asarray(y)), a, **known)
    for places in (at, cp.asarray(at)):
        for mine, other in zip(found.pairs_at(places), right, strict=True):
            assert (np.asarray(host(mine)) == other).mean() > 0.99  # ties at the tolerance


def test_pairs_come_in_proportion_to_the_plan():
    x, y = (z[0] for z in clouds(1, 4, 5))
    a = jnp.array([1.0, 2.0, 0.0, 1.0])
    i, j = jax.jit(lambda key: ours.match(x, y, key, a, reg=0.5, reg_m=1.0, size=20_000))(jax.random.key(1))
    plan = mapuot.solve(mapuot.PointCloud(np.asarray(x), np.asarray(y)), np.asarray(a), reg=0.5, reg_m=1.0).plan
    found = np.zeros(plan.shape)
    np.add.at(found, (np.asarray(i), np.asarray(j)), 1 / 20_000)
    assert np.abs(found - plan / plan.sum()).max() < 5 * np.sqrt(0.25 / 20_000)


def test_values_and_slopes_between_points(on_host):
    x, y = clouds()

    def loss(x, y):
        return ours.sample_loss(x, y, reg=0.3, reg_m=1.0, tol=1e-9)

    want = [mapuot.solve(mapuot.PointCloud(np.asarray(p), np.asarray(q)), reg=0.3, reg_m=1.0, tol=1e-9)
            for p, q in zip(x, y, strict=True)]  # fmt: skip
    value, slope = jax.jit(jax.value_and_grad(loss))(x[0], y[0])
    assert_allclose(value, want[0].dual, rtol=1e-8)
    assert_allclose(slope, want[0].gradient().x, atol=1e-7)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(loss)))(x, y)
    assert_allclose(values, [one.dual for one in want], rtol=1e-8)
    assert_allclose(slopes, [one.gradient().x for one in want], atol=1e-7)
    assert not on_host


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_values_and_slopes_of_matrices(lead, on_host):
    rng = np.random.default_rng(0)
    M = jnp.asarray(rng.random((*lead, 7, 9)))
    a = jnp.asarray(rng.random((*lead, 7)))

    def loss(M, a):
        return ours.sinkhorn_loss(M, a, reg=0.2, reg_m=1.0, tol=1e-9)

    wrapped = jax.value_and_grad(loss, (0, 1))
    if lead:
        wrapped = jax.vmap(wrapped)
    value, slopes = jax.jit(wrapped)(M, a)
    assert not on_host
    for k in np.ndindex(*lead):
        want = mapuot.solve(np.asarray(M[k]), np.asarray(a[k]), reg=0.2, reg_m=1.0, tol=1e-9)
        assert_allclose(value[k], want.dual, rtol=1e-8)
        assert_allclose(slopes[0][k], want.plan, atol=1e-8)
        assert_allclose(slopes[1][k], want.gradient().a, atol=1e-7)


def test_errors_of_a_solve_reach_the_caller():
    x, y = (z[0] for z in clouds(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="finite"):
        jax.block_until_ready(jax.jit(lambda x: ours.match(x, y, jax.random.key(0), reg=0.3))(x.at[0].set(jnp.nan)))
