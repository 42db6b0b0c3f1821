"""A JAX loss on mapuot: a custom_vjp with the gradient from the potentials.

Concrete arrays are read in place, on a GPU through CuPy, without a copy. Under jit and vmap arrays are traced, and JAX
calls back: on a CPU with host memory; on an NVIDIA GPU with the buffers and the stream of the device
(jax.experimental.buffer_callback), which CuPy reads and writes in place. Without CuPy, or in a JAX without such calls,
JAX copies the arrays of a GPU to the host and back. answer/slopes.py has the formulas. Twin: torch.py.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from .annotations import MarginalPenalty, MetricName
from .answer.slopes import dual_value, marginal_gradient
from .api.batch import plan_sum, solve_batch
from .api.solve import solve
from .arrays import host, namespace
from .errors import OF_BATCH, for_value, renamed, shown
from .problem.clouds import PointCloud
from .problem.validate import as_array, as_count, as_float, as_pair, as_positive, refuse_two_clouds
from .route.on_device import draw_between
from .route.options import options_of_value
from .synonyms import hinted

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.jax needs JAX: pip install jax") from error


def callback_with_buffers() -> Any:
    """Return JAX's `buffer_callback`; None for a JAX before 0.6."""
    try:
        from jax.experimental.buffer_callback import buffer_callback  # noqa: PLC0415 - may be missing
    except ImportError:
        return None
    return buffer_callback


buffer_callback = callback_with_buffers()

__all__ = ["match", "sample_loss", "sinkhorn_loss", "solve_batch"]


ON_DEVICE = "cuda"  # the platform of JAX whose buffers CuPy reads
OPTIONS = {"scale_cost", "tol", "tol_gap", "max_passes", "precision", "threads"}


@hinted
def sinkhorn_loss(
    M: jax.Array, a: jax.Array | None = None, b: jax.Array | None = None, *, reg: float, reg_m: MarginalPenalty,
    **options: Any,
) -> Any:  # fmt: skip
    """Compute the optimal value of unbalanced entropic transport, differentiable once in a, b and M.

    Parameters
    ----------
    M : (m, n) or (p, m, n) array
        Costs; +inf forbids a pair.
    a, b : (m,), (n,) or (p, m), (p, n) arrays, optional
        Masses, >= 0. Default: equal masses that add up to 1.
    reg, reg_m : float > 0; float, inf, or a pair of them
        Entropic regularisation and marginal penalty, in units of M: numbers known when ``jax.jit`` traces.
    **options
        scale_cost (the gradient holds it fixed), tol, tol_gap, max_passes, precision and threads, as in
        `mapuot.solve_batch`; tol_gap has the default of `mapuot.sinkhorn_divergence`.

    Returns
    -------
    value : scalar or (p,) array
        The dual value, a lower bound of the optimum within the certified gap, in units of M times mass.

    See Also
    --------
    sample_loss, mapuot.torch.sinkhorn_loss

    Notes
    -----
    If CuPy is installed, value and gradient of arrays on one NVIDIA GPU are computed there without a copy, under
    ``jax.jit`` and ``jax.vmap``, too; other arrays are solved on the CPU. Under ``jit`` and ``vmap`` JAX raises errors
    of the solve as its own error of the callback. ``vmap`` of any depth solves all problems as one batch; with
    scale_cost it solves them one by one.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, mapuot.jax
    >>> M = jnp.abs(jnp.linspace(0, 1, 5)[:, None] - jnp.linspace(0, 1, 4))
    >>> slope = jax.grad(lambda a: mapuot.jax.sinkhorn_loss(M, a, reg=0.1, reg_m=1.0))(jnp.full(5, 0.2))
    >>> slope.shape
    (5,)
    """
    settings = as_settings(reg, reg_m, options)
    if isinstance(M, PointCloud):
        raise TypeError("M must be an array, got a PointCloud: mapuot.jax.sample_loss(x, y, ...) takes points")
    refuse_two_clouds(M, a, "mapuot.jax.sample_loss")
    M, a, b = (untabled(x, name) for x, name in ((M, "M"), (a, "a"), (b, "b")))
    for x, name in ((a, "a"), (b, "b"), (M, "M")):
        if x is not None and jnp.iscomplexobj(x):
            raise TypeError(f"{name} must hold real numbers, got dtype {jnp.result_type(x)}")
    M = as_jax(M)
    a, b = (equal(k, M) if x is None else as_jax(x) for x, k in zip((a, b), M.shape[-2:], strict=False))
    p = next((len(x) for x, ndim in ((M, 3), (a, 2), (b, 2)) if x.ndim == ndim), None)
    rows, cols = (x if x.ndim == 2 else jnp.broadcast_to(x, (p or 1, *x.shape)) for x in (a, b))
    values = _loss(rows, cols, M, settings)
    if p:
        return values
    return values[0]


@hinted
def sample_loss(
    x: jax.Array, y: jax.Array, a: jax.Array | None = None, b: jax.Array | None = None, *, reg: float,
    reg_m: MarginalPenalty, metric: MetricName = "sqeuclidean", scale: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """Compute the value of unbalanced transport between two clouds of points, differentiable once in x, y, a and b.

    The cost matrix is not kept.

    Parameters
    ----------
    x, y : (m, d), (n, d) arrays
        Points.
    a, b, reg, reg_m, **options
        As in `sinkhorn_loss`, for the cost ``scale * metric(x_i, y_j)``.
    metric, scale
        As in `mapuot.PointCloud`; they must be known when ``jax.jit`` traces.

    Returns
    -------
    value : scalar
        ``jax.vmap`` solves one batch of clouds.

    See Also
    --------
    sinkhorn_loss

    Examples
    --------
    >>> import jax, jax.numpy as jnp, mapuot.jax
    >>> x, y = jnp.linspace(0, 1, 5)[:, None], jnp.linspace(0.2, 1.2, 4)[:, None]
    >>> jax.grad(lambda x: mapuot.jax.sample_loss(x, y, reg=0.05, reg_m=1.0))(x).shape
    (5, 1)
    """
    settings = (*as_settings(reg, reg_m, options), metric, scale)
    x, y, a, b = (untabled(z, name) for z, name in ((x, "x"), (y, "y"), (a, "a"), (b, "b")))
    x = jnp.asarray(x, dtype=jnp.result_type(float))
    y = jnp.asarray(y, dtype=jnp.result_type(float))
    a, b = (equal(len(z), z) if w is None else jnp.asarray(w, dtype=z.dtype)
            for w, z in ((a, x), (b, y)))  # fmt: skip
    return _sample_loss(x, y, a, b, settings)


@hinted
def match(
    x: jax.Array, y: jax.Array, key: Any, a: jax.Array | None = None, b: jax.Array | None = None, *, reg: float,
    reg_m: MarginalPenalty = np.inf, size: int | None = None, metric: MetricName = "sqeuclidean", scale: float = 1.0,
    **options: Any,
) -> Any:  # fmt: skip
    """Draw pairs (i, j) of points from the plan between two clouds; also within ``jax.jit``.

    A training step takes ``x[i]`` and ``y[j]``. No gradient goes through the plan.

    Parameters
    ----------
    x, y : (m, d), (n, d) arrays
        Points.
    key : key of jax.random
        Source of the random numbers.
    a, b, reg, reg_m, metric, scale, **options
        As in `sample_loss`; reg_m is balanced by default.
    size : int, optional
        Number of pairs, by default m.

    Returns
    -------
    i, j : (size,) int32 arrays
        Rows and columns, each pair with probability P_ij / mass, independently. ``jax.vmap`` of any depth solves one
        batch, and several keys for one pair of clouds take one solve.

    Raises
    ------
    TypeError, ValueError
        As in `sample_loss`. Under ``jax.jit`` JAX raises errors of the solve as its own error of the callback.

    See Also
    --------
    sample_loss, mapuot.flow.OTPlanSampler

    Notes
    -----
    Arrays on a GPU are solved and drawn from there if CuPy is installed, within ``jax.jit``, too. A key draws the same
    pairs within and without ``jit`` and ``vmap``, apart from ties at the solve's tolerance.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, mapuot.jax
    >>> x = jnp.arange(6.0)[:, None]
    >>> step = jax.jit(lambda x, y, key: mapuot.jax.match(x, y, key, reg=0.01))
    >>> i, j = step(x, x[::-1] + 0.1, jax.random.key(0))
    >>> bool((i + j == 5).all())
    True
    """
    reg, reg_m, settings = as_settings(reg, reg_m, options)
    is_equal = a is None, b is None
    x, y, a, b = (untabled(z, name) for z, name in ((x, "x"), (y, "y"), (a, "a"), (b, "b")))
    x, y = (jax.lax.stop_gradient(as_jax(z)) for z in (x, y))
    masses = [jax.lax.stop_gradient(as_jax(w)) for w in (a, b) if w is not None]
    size = len(x) if size is None else as_count(size, "size")
    places = jax.random.uniform(key, (2, size), x.dtype)
    draws_at_once = all(is_equal) and (metric, scale) == ("sqeuclidean", 1.0) and size == len(x)

    def both(given: Any) -> Any:
        """Return the masses of both sides on the host; None stands for equal masses."""
        left = iter(given)
        return tuple(None if alike else host(next(left)) for alike in is_equal)

    def drawn(x: Any, y: Any, masses: Any, places: Any) -> Any:
        with renamed(OF_BATCH):
            a, b = both(masses)
            result = solve_batch(PointCloud(x, y, metric, scale), a, b, reg=reg, reg_m=reg_m, **dict(settings))
        return result.pairs_at(places)

    def all_drawn(*arrays: Any) -> tuple[Any, ...]:
        ndims = 2, 2, *[1] * len(masses)
        lead, (x, *rest) = together(arrays[:-1], ndims)
        places = np.asarray(host(arrays[-1]), np.float64)
        whole = np.broadcast_shapes(lead, places.shape[:-2])
        places = np.broadcast_to(places, (*whole, 2, size))
        if len(x) > 1 and whole != lead:  # keys of an axis that the clouds lack
            _, (x, *rest, places) = together((*arrays[:-1], places), (*ndims, 2))
        at = np.moveaxis(places.reshape(len(x), -1, 2, size), 2, 0).reshape(2, len(x), -1)
        y, *given = (z[0] if len(z) == 1 else z for z in rest)
        pairs = drawn(x, y, given, at)
        return tuple(z.astype(np.int32).reshape(*whole, size) for z in pairs)

    def drawn_into(pairs: Any, x: Any, y: Any, *given: Any) -> bool:
        return draws_at_once and draw_between(pairs, x, y, given[-1], reg, reg_m, **dict(settings))

    def drawn_once(x: Any, y: Any, *given: Any) -> tuple[Any, ...]:
        *masses, places = given
        if namespace(x) is np:
            pairs = drawn(x[None], y, masses, np.asarray(places, np.float64)[:, None])
            return tuple(z[0].astype(np.int32) for z in pairs)
        a, b = both(masses)
        result = solve(PointCloud(x, y, metric, scale), a, b, reg=reg, reg_m=reg_m, **dict(settings))
        return result.pairs_at(places.astype(np.float64))

    kinds = kinds_of(np.int32, (size,), (size,))
    return tuple(found(drawn_once, all_drawn, kinds, (x, y, *masses, places), settings, drawn_into))


def equal(size: int, like: Any) -> Any:
    return jnp.full(size, 1 / max(1, size), dtype=like.dtype)


def untabled(x: Any, name: str) -> Any:
    """Convert a pandas table or column to an array: JAX cannot read nullable columns."""
    if hasattr(x, "to_numpy"):
        return as_array(x, name)
    return x


def as_jax(x: Any) -> Any:
    """Return a JAX array of the default precision; x itself if possible: jnp.asarray copies within jax.grad."""
    dtype = jnp.result_type(float)
    if isinstance(x, jax.Array) and x.dtype == dtype:
        return x
    return jnp.asarray(x, dtype=dtype)


def as_settings(reg: float, reg_m: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """Check reg, reg_m and the options, and return them in a form that jit can hash."""
    if not set(options) <= OPTIONS:
        raise TypeError(f"options may be {', '.join(sorted(OPTIONS))}, got {sorted(options)}")
    for x, name in ((reg, "reg"), (reg_m, "reg_m"), *((options[name], name) for name in options)):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(x)):
            text = f"{name} must be known when JAX traces, got {shown(x)}"
            raise TypeError(f"{text}: make it a static argument (static_argnums or static_argnames of jax.jit)")
    rhos = tuple(as_float(x, "reg_m") for x in as_pair(reg_m, "reg_m"))
    return as_positive(reg, "reg"), rhos, tuple(sorted(options_of_value(options, rhos).items()))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sample_loss(x: Any, y: Any, a: Any, b: Any, settings: Any) -> Any:
    return _sample_forward(x, y, a, b, settings)[0]


def _sample_forward(x: Any, y: Any, a: Any, b: Any, settings: Any) -> tuple[Any, Any]:
    """Return the dual value, and for the backward pass the slopes by points and masses."""
    reg, reg_m, options, metric, scale = settings

    def answer(x: Any, y: Any, a: Any, b: Any) -> Any:
        with for_value(OF_BATCH):
            cloud = PointCloud(x, y, metric, scale)
            return solve_batch(cloud, host(a), host(b), reg=reg, reg_m=reg_m, **dict(options))

    def solved(x: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
        lead, (x, y, a, b) = together((x, y, a, b), (2, 2, 1, 1))
        result = answer(x, *(z[0] if len(z) == 1 else z for z in (y, a, b)))
        xp = namespace(x)
        tables = dual_value(result), *result.gradient()[:4]
        return tuple(xp.asarray(z, dtype=x.dtype).reshape((*lead, *z.shape[1:])) for z in tables)

    def solved_once(x: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
        xp = namespace(x)
        result = answer(x, y, a, b)[0]
        return tuple(xp.asarray(z, dtype=x.dtype) for z in (dual_value(result), *result.gradient()[:4]))

    kinds = kinds_of(x.dtype, (), x.shape, y.shape, a.shape, b.shape)
    value, *slopes = found(solved_once, solved, kinds, (x, y, a, b), options)
    return value, slopes


def kinds_of(dtype: Any, *shapes: Any) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def found(here: Any, back: Any, kinds: Any, arrays: Any, options: Any, fills: Any = None) -> Any:
    """Call ``here`` on concrete arrays; of traced arrays let JAX call ``back``, once for all of vmap or for each scale.

    On a GPU both get CuPy arrays. ``fills(answers, *arrays)`` is tried there before ``here``: it writes to the arrays
    ``answers`` of these ``kinds``, or returns False.
    """
    if not any(isinstance(z, jax.core.Tracer) for z in arrays):
        return solved_there(here, kinds, fills, *arrays)
    if dict(options).get("scale_cost"):
        way = "sequential"
    else:
        way = "expand_dims"
    ndims = [z.ndim for z in arrays]

    def fill(context: Any, places: Any, *buffers: Any) -> None:
        if [z.ndim for z in buffers] == ndims:
            fill_on_device(here, fills, context, places, buffers)
        else:
            fill_on_device(back, None, context, places, buffers)

    def on_host(*arrays: Any) -> Any:
        return jax.pure_callback(back, kinds, *arrays, vmap_method=way)

    def on_device(*arrays: Any) -> Any:
        return buffer_callback(fill, kinds, vmap_method=way)(*arrays)

    def called(*arrays: Any) -> Any:
        if buffer_callback is None or find_spec("cupy") is None:
            return on_host(*arrays)
        return jax.lax.platform_dependent(*arrays, default=on_host, **{ON_DEVICE: on_device})

    call = jax.custom_jvp(called)
    call.defjvp(refuse)
    return call(*arrays)


class DeviceStream(NamedTuple):
    """The stream of a call from JAX, in the form that CuPy takes."""

    context: Any

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.context.stream


def fill_on_device(solved: Any, fills: Any, context: Any, places: Any, buffers: Any) -> None:
    """Call ``solved`` on the buffers of a GPU, on JAX's stream, and copy its answers to ``places``, or let it fill."""
    import cupy  # noqa: PLC0415 - only where it is installed

    arrays = [cupy.asarray(x) for x in buffers]
    answers = [cupy.asarray(x) for x in places]
    with arrays[0].device, cupy.cuda.Stream.from_external(DeviceStream(context)):
        if fills and fills(answers, *arrays):
            return
        for place, answer in zip(answers, solved(*arrays), strict=True):
            place[...] = cupy.asarray(answer)


def refuse(*_: Any) -> Any:
    """Raise, because JAX would treat a slope as a constant."""
    raise NotImplementedError("mapuot.jax has first derivatives only, in reverse mode: jax.grad, jax.vjp or jax.jacrev")


def together(arrays: Any, ndims: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the axes that vmap added in front of each array, and the arrays with these axes merged into one.

    The merged axis has length 1 if all problems share an array; the first array always has the full length.
    """
    arrays = [np.asarray(x) if namespace(x) is np else x for x in arrays]
    leads = [x.shape[: x.ndim - k] for x, k in zip(arrays, ndims, strict=True)]
    lead = np.broadcast_shapes(*leads)
    out = []
    for i, (x, k, own) in enumerate(zip(arrays, ndims, leads, strict=True)):
        kept = x.shape[x.ndim - k :]
        shared = i > 0 and all(size == 1 for size in own)
        if shared:
            out.append(x.reshape(1, *kept))
        else:
            out.append(spread_over(x, lead, k).reshape(-1, *kept))
    return lead, out


def spread_over(x: Any, lead: tuple[int, ...], ndim: int) -> Any:
    """Return an array with the axes ``lead`` in front of its last ``ndim`` axes."""
    return namespace(x).broadcast_to(x, (*lead, *x.shape[x.ndim - ndim :]))


_sample_loss.defvjp(_sample_forward, lambda settings, slopes, grad: tuple(grad * slope for slope in slopes))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(a: Any, b: Any, M: Any, settings: Any) -> Any:
    return _forward(a, b, M, settings)[0]


def _forward(a: Any, b: Any, M: Any, settings: Any) -> tuple[Any, Any]:
    """Return the dual values, and for the backward pass dW/da, dW/db and the bits of own_logs, constants and reg."""
    reg, reg_m, options = settings

    def solved(a: Any, b: Any, M: Any) -> tuple[Any, ...]:
        with for_value(OF_BATCH):
            result = solve_batch(M, a, b, reg=reg, reg_m=reg_m, **dict(options))
        slopes = marginal_gradient(result, "rows"), marginal_gradient(result, "cols")
        xp = namespace(result.log_u)
        problem = result.problem
        constants = np.broadcast_to(problem.constant, len(result))
        bits = (as_bits(xp.asarray(x)) for x in (*result.own_logs, constants, problem.reg))
        return *(xp.asarray(x, dtype=M.dtype) for x in (dual_value(result), *slopes)), *bits

    p = len(a)
    ndim = M.ndim

    def all_solved(*arrays: Any) -> tuple[Any, ...]:
        lead, (a, b, M) = together(arrays, (2, 2, ndim))
        xp = namespace(a)
        a, b = (xp.broadcast_to(x, (len(a), *x.shape[1:])).reshape(-1, x.shape[-1]) for x in (a, b))
        *told, scale = solved(a, b, M[0] if len(M) == 1 and (ndim == 2 or p == len(a)) else repeated(M, len(a), p))
        tables = (x.reshape((*lead, p, *x.shape[1:])) for x in told)
        return *tables, xp.broadcast_to(scale, (*lead, 2))

    kinds = (
        *kinds_of(M.dtype, a.shape[:1], a.shape, b.shape),
        *kinds_of(np.uint32, (*a.shape, 2), (*b.shape, 2), (p, 2), (2,)),
    )
    value, *kept = found(solved, all_solved, kinds, (a, b, M), options)
    return value, (a, b, M, *kept)


def as_bits(x: Any) -> Any:
    """Return float64 numbers as pairs of uint32: without its 64-bit mode JAX would round them."""
    xp = namespace(x)
    return xp.ascontiguousarray(x, dtype=np.float64).reshape((*x.shape, 1)).view(np.uint32)


def of_bits(x: Any) -> Any:
    return namespace(x).ascontiguousarray(x).view(np.float64)[..., 0]


def repeated(M: Any, count: int, p: int) -> Any:
    """Return the costs of ``count`` problems; each group of p problems shares one cost of vmap."""
    M = M[:, None] if M.ndim == 3 else M
    return namespace(M).broadcast_to(M, (count // p, p, *M.shape[-2:])).reshape(-1, *M.shape[-2:])


def solved_there(solved: Any, kinds: Any, fills: Any, *arrays: Any) -> list[Any]:
    """Call ``solved(*arrays)`` on the memory of concrete arrays; return its answers on the same device.

    ``kinds``, ``fills``: see `found`.
    """
    arrays = tuple(x if hasattr(x, "devices") else jax.device_put(x) for x in arrays)  # constants are NumPy arrays
    device, *more = set().union(*(x.devices() for x in arrays))
    if more or device.platform == "cpu" or find_spec("cupy") is None:
        return [jax.device_put(x, None if more else device) for x in solved(*map(np.asarray, arrays))]
    import cupy  # noqa: PLC0415 - only for arrays on a GPU

    with cupy.cuda.Device(device.local_hardware_id):
        given = [*map(cupy.from_dlpack, arrays)]
        answers = [cupy.empty(kind.shape, kind.dtype) for kind in kinds] if fills else []
        if fills and fills(answers, *given):
            found = answers
        else:
            found = [x.copy() for x in solved(*given)]  # views may lack JAX's 16-byte alignment
        cupy.cuda.get_current_stream().synchronize()  # JAX has streams of its own
        return [jnp.from_dlpack(x) for x in found]


def _backward(settings: Any, kept: Any, grad: Any) -> tuple[Any, Any, Any]:
    """Return the slopes by a, b and M; the slope by M is the sum of the plans, weighted by ``grad``.

    Plans are made by the core: an exponent in float32 would be off by 1e-7 M / reg.
    """
    a, b, M, slope_a, slope_b, *bits = kept
    p = len(a)
    ndim = M.ndim

    def summed(M: Any, a: Any, b: Any, log_u: Any, log_v: Any, constants: Any, reg: Any, grad: Any) -> tuple[Any]:
        given = M, a, b, of_bits(log_u), of_bits(log_v), of_bits(constants), float(of_bits(reg))
        return (namespace(M).asarray(plan_sum(*given, grad), dtype=M.dtype),)

    def all_summed(*arrays: Any) -> tuple[Any]:
        lead, (M, a, b, log_u, log_v, constants, reg, grad) = together(arrays, (ndim, 2, 2, 3, 3, 2, 1, 1))
        xp = namespace(M)
        parts = [xp.broadcast_to(x, (len(M), *x.shape[1:])) for x in (a, b, log_u, log_v, constants, reg, grad)]
        if (parts[5] == parts[5][0]).all() and len(M) > 1:  # the problems of vmap are one batch
            a, b, log_u, log_v, constants, grad = (x.reshape(-1, *x.shape[2:]) for x in (*parts[:5], parts[6]))
            total = summed(repeated(M, len(a), p), a, b, log_u, log_v, constants, reg[0], grad)[0]
            if ndim != 3:
                total = total.reshape(-1, p, *total.shape[1:]).sum(1)
        else:
            total = xp.stack([summed(*[x[i] for x in (M, *parts)])[0] for i in range(len(M))])
        return (total.reshape((*lead, *M.shape[1:])),)

    (by_cost,) = found(summed, all_summed, kinds_of(M.dtype, M.shape), (M, a, b, *bits, grad), settings[2])
    return grad[:, None] * slope_a, grad[:, None] * slope_b, by_cost


_loss.defvjp(_forward, _backward)
