"""A JAX loss on mapuot: a custom_vjp whose gradient comes from the potentials; solved on the CPU by a callback.

Works under jit, grad and vmap; the formulas are those of gradients.py. Twin: torch.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .batch import solve_batch
from .gradients import dual_value, marginal_gradient
from .validate import as_float, as_pair, as_positive

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.jax needs JAX: pip install jax") from error

__all__ = ["sinkhorn_loss"]


def sinkhorn_loss(a: Any, b: Any, M: Any, reg: float, reg_m: Any, **options: Any) -> Any:
    """Unbalanced entropic transport cost, differentiable once in a, b and M.

    Parameters
    ----------
    a, b, M, reg, reg_m
        As in `mapuot.torch.sinkhorn_loss`, but JAX arrays; reg and reg_m are numbers, known when jit traces.
    **options
        tol, max_passes, precision, threads of `solve_batch`.

    Returns
    -------
    value : scalar or (p,) array
        The dual value, in units of M times mass.

    Raises
    ------
    ValueError, TypeError
        Bad argument; the message names it. From within jit it comes as JAX's error of the callback.
    """
    if not set(options) <= {"tol", "max_passes", "precision", "threads"}:
        raise TypeError(f"options may be tol, max_passes, precision and threads, got {sorted(options)}")
    rhos = tuple(as_float(x, "reg_m") for x in as_pair(reg_m, "reg_m"))
    settings = (as_positive(reg, "reg"), rhos, tuple(sorted(options.items())))
    for x, name in ((a, "a"), (b, "b"), (M, "M")):
        if jnp.iscomplexobj(x):
            raise TypeError(f"{name} must hold real numbers, got dtype {jnp.result_type(x)}")
    a, b, M = (jnp.asarray(x, dtype=jnp.result_type(float)) for x in (a, b, M))
    p = next((len(x) for x, ndim in ((M, 3), (a, 2), (b, 2)) if x.ndim == ndim), None)
    rows, cols = (x if x.ndim == 2 else jnp.broadcast_to(x, (p or 1, *x.shape)) for x in (a, b))
    values = _loss(rows, cols, M, settings)
    return values if p else values[0]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(a: Any, b: Any, M: Any, settings: Any) -> Any:
    return _forward(a, b, M, settings)[0]


def _forward(a: Any, b: Any, M: Any, settings: Any) -> tuple[Any, Any]:
    """The dual values, and for backward: dW/da, dW/db, log u and log v of each problem."""
    reg, reg_m, options = settings

    def solved(a: Any, b: Any, M: Any) -> tuple[Any, ...]:
        result = solve_batch(np.asarray(M), np.asarray(a), np.asarray(b), reg, reg_m, **dict(options))
        slopes = marginal_gradient(result, "rows"), marginal_gradient(result, "cols")
        return tuple(np.asarray(x, dtype=M.dtype) for x in (dual_value(result), *slopes, result.log_u, result.log_v))

    shapes, kind = (a.shape[:1], a.shape, b.shape, a.shape, b.shape), partial[Any](jax.ShapeDtypeStruct, dtype=M.dtype)
    kinds = tuple(map(kind, shapes))
    value, *found = jax.pure_callback(solved, kinds, a, b, M, vmap_method="sequential")
    return value, (a, b, M, *found)


def _backward(settings: Any, kept: Any, grad: Any) -> tuple[Any, Any, Any]:
    a, b, M, slope_a, slope_b, log_u, log_v = kept

    def plan(a: Any, b: Any, M: Any, log_u: Any, log_v: Any, weight: Any) -> Any:
        return weight * a[:, None] * b * jnp.exp(log_u[:, None] + log_v - M / settings[0])

    parts = (a, b, log_u, log_v, grad)
    if M.ndim == 3:
        dM = jax.vmap(lambda M, a, b, u, v, w: plan(a, b, M, u, v, w))(M, *parts)
    else:
        dM = jax.lax.scan(lambda s, x: (s + plan(x[0], x[1], M, *x[2:]), None), jnp.zeros_like(M), parts)[0]
    return grad[:, None] * slope_a, grad[:, None] * slope_b, dM


_loss.defvjp(_forward, _backward)
