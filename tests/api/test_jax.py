"""mapuot.jax against mapuot's own values and finite differences; under jit, grad and vmap."""

import functools

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mapuot

jax = pytest.importorskip("jax")
jnp = jax.numpy
jax.config.update("jax_enable_x64", True)

from jax.test_util import check_grads  # noqa: E402

from mapuot.jax import match, sample_loss, sinkhorn_loss  # noqa: E402

OPTIONS = {"tol": 1e-11}


def inputs(p=3, m=5, n=6):
    rng = np.random.default_rng(0)
    return rng.uniform(0.3, 1.0, (p, m)), rng.uniform(0.4, 1.2, (p, n)), rng.random((m, n))


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
@pytest.mark.parametrize("reg_m", [1.0, (0.5, 2.0), (1.0, np.inf)], ids=str)
def test_value_and_gradient(reg_m, own):
    a, b, M = inputs()
    if own:
        M = M * np.linspace(0.5, 1, 3)[:, None, None]

    def loss(a, b, M):
        return sinkhorn_loss(M, a, b, reg=0.1, reg_m=reg_m, **OPTIONS)

    assert_allclose(loss(a, b, M), mapuot.solve_batch(M, a, b, reg=0.1, reg_m=reg_m, **OPTIONS).dual, rtol=1e-12)
    check_grads(loss, (a, b, M), order=1, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
@pytest.mark.parametrize("lift", [0.0, 1e6])
def test_a_large_translation_costs_the_slopes_no_digit(lift, own):
    """At log u of 1e12 the slope by M was off by 2e-4: it came from rounded log scalings."""
    a, b, M = inputs()
    M = M + lift
    if own:
        M = np.stack([M, M, M])
    call = {"reg": 0.1, "reg_m": (1e11, np.inf), "tol": 1e-7}
    right = mapuot.solve_batch(M, a, 3 * b, **call)
    assert (abs(right.problem.translation) > 1e10).all()
    assert (np.asarray(right.problem.constant) > 0).all() == (lift > 0)
    slope = jax.grad(lambda M: sinkhorn_loss(M, a, 3 * b, **call).sum())(M)
    assert_allclose(slope, right.plan if own else right.plan.sum(0), atol=1e-9)


def test_nullable_tables_are_arrays():
    pandas = pytest.importorskip("pandas")
    a, b, M = inputs()
    table = pandas.DataFrame(M).astype("Float64")
    masses = pandas.Series(a[0]).astype("Float64")
    assert sinkhorn_loss(table, masses, b[0], reg=0.1, reg_m=1.0) == sinkhorn_loss(M, a[0], b[0], reg=0.1, reg_m=1.0)
    assert sample_loss(table, table, reg=0.1, reg_m=1.0) == sample_loss(M, M, reg=0.1, reg_m=1.0)


@pytest.mark.parametrize("own", [False, True], ids=["one cost", "own costs"])
def test_the_gradient_holds_the_scale_of_the_costs(own):
    a, b, M = inputs()
    if own:
        M = 7 * M * np.linspace(0.5, 1, 3)[:, None, None]
    else:
        M = 7 * M
    scale = np.median(M)
    for wrapped in (lambda x: x, jax.jit):
        found, wanted = (
            wrapped(jax.grad(lambda M: sinkhorn_loss(M, a, b, **how, **OPTIONS).sum()))(M)  # noqa: B023 - called here
            for how in ({"reg": 0.1, "reg_m": 1.0, "scale_cost": "median"}, {"reg": 0.1 * scale, "reg_m": scale})
        )
        assert_allclose(found, wanted, rtol=1e-9)


@pytest.fixture
def calls(monkeypatch):
    found = []
    solve = mapuot.jax.solve_batch
    monkeypatch.setattr(mapuot.jax, "solve_batch", lambda *args, **more: found.append(args) or solve(*args, **more))
    return found


def test_vmap_between_points_is_one_batch(calls):
    """Batched over both clouds, one cloud, and twice, values and derivatives equal each pair's own."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.random((4, 3, k, 2))) for k in (12, 15))
    one = functools.partial(sample_loss, reg=0.05, reg_m=1.0, **OPTIONS)
    slope = jax.grad(one, argnums=(0, 1))
    found = jax.vmap(jax.vmap(one))(x, y)
    assert len(calls) == 1
    assert_allclose(found, [[one(x[i, j], y[i, j]) for j in range(3)] for i in range(4)], rtol=1e-7)
    alone = mapuot.solve_sample(*map(np.asarray, (x[0, 0], y[0, 0])), reg=0.05, reg_m=1.0, **OPTIONS)
    assert_allclose(found[0, 0], alone.dual, rtol=1e-7)
    for ours, right in zip(slope(x[0, 0], y[0, 0]), alone.gradient()[:2], strict=True):
        assert_allclose(ours, right, atol=1e-6)
    with pytest.raises(TypeError, match="sample_loss"):
        sinkhorn_loss(mapuot.PointCloud(x[0, 0], y[0, 0]), reg=0.2, reg_m=1.0)
    for axes in ((0, 0), (0, None), (None, 0)):
        given = [z[0] if axis == 0 else z[0, 0] for z, axis in zip((x, y), axes, strict=True)]
        calls.clear()
        found = jax.jit(jax.vmap(slope, in_axes=axes))(*given)
        assert len(calls) == 1
        for i in range(3):
            alone = slope(*(z[i] if axis == 0 else z for z, axis in zip(given, axes, strict=True)))
            for ours, right in zip(found, alone, strict=True):
                assert_allclose(ours[i], right, atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 0, 0), (0, None, 0), (0, None, None), (None, 0, None)])
@pytest.mark.parametrize("lead", [(), (2,), (2, "own")], ids=str)
def test_vmap_between_matrices_is_one_batch(axes, lead, calls):
    """vmap over problems, and over batches of two, is one batch, with one cost or one each."""
    rng = np.random.default_rng(0)
    each = lead[:1]
    both = [jnp.asarray(rng.random((5, *z))) for z in ((*(each * ("own" in lead)), 12, 15), (*each, 12), (*each, 15))]
    both[1] = both[1].at[..., 2].set(0.0)  # a point without mass
    given = [z if axis == 0 else z[0] for z, axis in zip(both, axes, strict=True)]
    loss = functools.partial(sinkhorn_loss, reg=0.1, reg_m=1.0, **OPTIONS)
    slope = jax.value_and_grad(lambda *x: loss(*x).sum(), argnums=(0, 1, 2))
    found, slopes = jax.jit(jax.vmap(slope, in_axes=axes))(*given)
    assert len(calls) == 1
    for i in range(5):
        value, right = slope(*(z[i] if axis == 0 else z for z, axis in zip(given, axes, strict=True)))
        assert_allclose(found[i], value, rtol=1e-6)
        for ours, other in zip(slopes, right, strict=True):
            assert_allclose(ours[i], other, atol=1e-6)


def test_vmap_keeps_the_scale_of_each_cost(calls):
    a, _, M = inputs()
    M = jnp.stack([M, 3 * M])
    loss = functools.partial(sinkhorn_loss, reg=0.1, reg_m=1.0, scale_cost="max", **OPTIONS)
    found = jax.vmap(loss, in_axes=(0, None))(M, a)
    assert len(calls) == 2
    assert_allclose(found[1], 3 * found[0], rtol=1e-6)


def device(platform):
    try:
        found = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {platform}")
    if platform == "gpu":
        pytest.importorskip("cupy")
    return found


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_arrays_are_read_where_they_lie(platform, monkeypatch):
    """The solver reads the memory of JAX's own arrays: no callback, no copy."""
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
        if platform == "cpu":
            where = array.__array_interface__["data"][0]
        else:
            where = array.data.ptr
        assert where == x.unsafe_buffer_pointer()
    assert_allclose(value, right.sum(), rtol=1e-10)
    for slope, other in zip(slopes, traced, strict=True):
        assert slope.devices() == {there}
        assert_allclose(slope, other, rtol=1e-6, atol=1e-9)


def forbidden(m=5, n=6):
    """Return costs without an allowed pair in row 1 and column 2."""
    M = np.random.default_rng(1).random((m, n))
    M[1], M[:, 2] = np.inf, np.inf
    return M


@pytest.mark.parametrize("wrapped", [lambda x: x, jax.jit], ids=["eager", "jit"])
def test_points_without_an_allowed_pair_have_slopes_of_zero(wrapped):
    """log u of points without an allowed pair is inf; inf - inf in an exponent once made all slopes of that row NaN."""
    M = forbidden()
    a = np.full((3, 5), 0.2) * np.linspace(1, 2, 3)[:, None]
    plans = mapuot.solve_batch(M, a, reg=0.1, reg_m=1.0, **OPTIONS).plan
    known = {"reg": 0.1, "reg_m": 1.0} | OPTIONS
    one = wrapped(jax.grad(lambda M: sinkhorn_loss(M, a[0], **known)))(M)
    assert_allclose(one, plans[0], atol=1e-12)
    shared = wrapped(jax.grad(lambda M: sinkhorn_loss(M, a, **known).sum()))(M)
    assert_allclose(shared, plans.sum(0), atol=1e-12)
    own = wrapped(jax.grad(lambda M: sinkhorn_loss(M, a, **known).sum()))(np.stack([M] * 3))
    assert_allclose(own, plans, atol=1e-12)
    mapped = wrapped(jax.vmap(jax.grad(lambda M, a: sinkhorn_loss(M, a, **known)), (None, 0)))(M, a)
    assert_allclose(mapped, plans, atol=1e-12)
    each = wrapped(jax.vmap(jax.grad(lambda M, a: 2 * sinkhorn_loss(M, a, **known))))(np.stack([M] * 3), a)
    assert_allclose(each, 2 * plans, atol=1e-12)
    pairs = wrapped(jax.vmap(jax.grad(lambda M, a: sinkhorn_loss(M, a, **known).sum())))(
        np.stack([M, M]), a[None, :2].repeat(2, 0)
    )
    assert_allclose(pairs, np.stack([plans[:2].sum(0)] * 2), atol=1e-12)


@pytest.mark.parametrize("wrapped", [lambda x: x, jax.jit], ids=["eager", "jit"])
def test_slopes_by_costs_in_float32_keep_their_digits(wrapped):
    """Slopes keep their digits in float32 costs, although exponents of 1e4 have only three digits left there."""
    rng = np.random.default_rng(0)
    M = rng.random((30, 40)).astype(np.float32)
    known = {"reg": 1e-4, "reg_m": 1.0, "tol": 1e-7, "precision": "float64"}
    jax.config.update("jax_enable_x64", False)
    try:
        found = np.asarray(wrapped(jax.grad(lambda M: sinkhorn_loss(M, **known)))(jnp.asarray(M)))
    finally:
        jax.config.update("jax_enable_x64", True)
    assert found.dtype == np.float32
    assert np.abs(found - mapuot.solve(M, **known).plan).sum() <= 1e-6


def test_a_second_derivative_is_refused():
    """A second derivative is refused: it would take the slopes of a solve for constants."""
    a, _, M = inputs()
    value = functools.partial(sinkhorn_loss, reg=0.1, reg_m=1.0)
    x = np.random.default_rng(0).random((5, 2))
    for function, at in (
        (value, M),
        (lambda a: value(M, a), a[0]),
        (lambda x: sample_loss(x, x[:3], reg=0.1, reg_m=1.0), x),
    ):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.hessian(function)(at)


def test_a_traced_penalty_is_told_to_be_static():
    _, _, M = inputs()
    given = {"reg": 0.1, "reg_m": 0.5}
    for name in given:
        with pytest.raises(TypeError, match=f"{name} must be known when JAX traces.*static_argnames"):
            jax.jit(lambda x: sinkhorn_loss(M, **given | {name: x}))(0.5)  # noqa: B023 - called here
    static = jax.jit(lambda M, reg_m: sinkhorn_loss(M, reg=0.1, reg_m=reg_m), static_argnums=1)
    assert_allclose(static(M, 0.5), sinkhorn_loss(M, **given), rtol=1e-12)


# ---- pairs within a jitted step


def clouds_of(count, n=20, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], (count, n, 2)), jax.random.normal(keys[1], (count, n + 5, 2)) + 1


def pairs(x, y, key):
    return match(x, y, key, reg=0.2)


def test_pairs_come_in_proportion_to_the_plan():
    x, y = (z[0] for z in clouds_of(1, n=4))
    a = jnp.array([1.0, 2.0, 0.0, 1.0])
    i, j = jax.jit(lambda key: match(x, y, key, a, reg=0.5, reg_m=1.0, size=20_000))(jax.random.key(1))
    assert i.dtype == j.dtype == jnp.int32
    plan = mapuot.solve(mapuot.PointCloud(np.asarray(x), np.asarray(y)), np.asarray(a), reg=0.5, reg_m=1.0).plan
    found = np.zeros(plan.shape)
    np.add.at(found, (np.asarray(i), np.asarray(j)), 1 / 20_000)
    assert np.abs(found - plan / plan.sum()).max() < 5 * np.sqrt(0.25 / 20_000)
    assert not found[2].any()


def test_pairs_of_a_key_are_the_same_under_jit_and_vmap(monkeypatch):
    """Clouds and keys of vmap are one batch, in any nesting; keys alone take one solve."""
    x, y = clouds_of(3)
    keys = jax.random.split(jax.random.key(3), 4)
    want = [[pairs(x[p], y[p], k) for k in keys] for p in range(3)]
    calls = []
    solve = mapuot.jax.solve_batch

    def counted(*args, **options):
        found = solve(*args, **options)
        calls.append(len(found))
        return found

    monkeypatch.setattr(mapuot.jax, "solve_batch", counted)
    by_keys = jax.vmap(pairs, (None, None, 0))
    cases = {
        "jit": (jax.jit(pairs)(x[1], y[1], keys[2]), lambda p, k: (p, k) == (1, 2), 1),
        "clouds": (jax.jit(jax.vmap(pairs))(x, y, keys[:3]), lambda p, k: p == k, 3),
        "keys": (by_keys(x[2], y[2], keys), lambda p, k: p == 2, 1),
        "keys of clouds": (jax.vmap(by_keys, (0, 0, None))(x, y, keys), lambda p, k: True, 12),
        "clouds of keys": (jax.vmap(jax.vmap(pairs, (0, 0, None)), (None, None, 0))(x, y, keys), lambda p, k: True, 12),
    }
    assert [case[2] for case in cases.values()] == calls
    for name, (found, chosen, _) in cases.items():
        wanted = np.array([want[p][k] for p in range(3) for k in range(4) if chosen(p, k)])
        got = np.stack([np.asarray(z) for z in found], -2)
        if name == "clouds of keys":
            got = got.swapaxes(0, 1)
        np.testing.assert_array_equal(got.reshape(wanted.shape), wanted, name)


def test_a_step_has_no_gradient_through_the_pairs():
    x, y = (z[0] for z in clouds_of(1))

    def loss(x):
        i, j = match(x, y, jax.random.key(0), reg=0.2)
        return ((x[i] - y[j]) ** 2).sum()

    i, j = match(x, y, jax.random.key(0), reg=0.2)
    want = np.zeros(x.shape)
    np.add.at(want, np.asarray(i), 2 * np.asarray(x[i] - y[j]))
    for found in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)):
        assert_allclose(found, want)
    with pytest.raises(ValueError, match="size must be an integer"):
        match(x, y, jax.random.key(0), reg=0.2, size=0)
    with pytest.raises(TypeError, match="options may be"):
        match(x, y, jax.random.key(0), reg=0.2, penalty="tv")
