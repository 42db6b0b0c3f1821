"""PyTorch losses on mapuot: the gradient comes from the potentials, so no graph goes through the iterations.

The value is the dual optimum W(a, b, M) of `solve` with the reference a b^T; gradients.py has the
formulas. Tensors are read where they lie, on the CPU or (through CuPy) on the GPU, where all of the work is then done,
on torch's current stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .backends import host
from .batch import BatchResult, solve_batch
from .divergence import check_options, self_costs
from .gradients import dual_value, marginal_gradient
from .points import PointCloud
from .tensors import array_of, stream_of, tensor_of
from .validate import as_choice, as_pair, as_positive

try:
    import torch
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.torch needs PyTorch: pip install torch") from error

__all__ = ["SinkhornDivergence", "SinkhornLoss", "sample_loss", "sinkhorn_divergence", "sinkhorn_loss"]


def sinkhorn_loss(a: Any, b: Any, M: Any, reg: float, reg_m: Any, **options: Any) -> Any:
    """Unbalanced entropic transport cost, differentiable once in a, b and M.

    Parameters
    ----------
    a, b : (m,), (n,) or (p, m), (p, n) tensors
        Masses, >= 0, zeros allowed; one vector serves all problems of a batch.
    M : (m, n) or (p, m, n) tensor
        Costs; +inf forbids a pair.
    reg : float
        Entropic regularisation, > 0, in units of M.
    reg_m : float, inf, or a pair of them
        Marginal penalty, in units of M; inf is the balanced constraint (the gradient is then determined up to a
        constant: it is right for changes that keep the masses equal).
    **options
        tol, max_passes, precision, threads, backend, progress and mask of `solve_batch`. Of a
        `mapuot.SeededMask` value and gradient are those of the masked problem, the same pairs in both.

    Returns
    -------
    value : scalar or (p,) tensor
        The dual value, a lower bound of the optimum within the certified gap, in units of M times mass. float64
        where an argument is, else float32, in which half precision is solved, under torch.autocast, too; gradients
        have their input's dtype.

    Raises
    ------
    ValueError, TypeError
        Bad argument; the message names it.
    RuntimeError
        A second derivative is asked for: mapuot gives the first only.
    """
    check_loss(options, reg_m)
    if isinstance(M, PointCloud):
        raise TypeError("M must be a tensor, got a PointCloud: mapuot.torch.sample_loss(x, y, ...) takes points")
    values = solved(a, b, M, reg, reg_m, options)
    batched = M.ndim == 3 or a.ndim == 2 or b.ndim == 2
    return values if batched else values[0]


def sample_loss(
    x: Any, y: Any, reg: float, reg_m: Any, a: Any = None, b: Any = None, metric: str = "sqeuclidean",
    scale: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """The same between two clouds of points, whose costs are never formed; differentiable once in x, y, a and b.

    Parameters
    ----------
    x, y : (m, d), (n, d) tensors
        Points.
    reg, reg_m
        As in `sinkhorn_loss`.
    a, b : (m,), (n,) tensors, optional
        Masses, >= 0; None means uniform with mass 1.
    metric, scale
        As of `mapuot.PointCloud`.
    **options
        As in `sinkhorn_loss`. The work is done on the CPU.

    Returns
    -------
    value : scalar tensor
        As of `sinkhorn_loss`.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As in `sinkhorn_loss`.
    """
    check_loss(options, reg_m)
    x, y = as_tensor(x, "x"), as_tensor(y, "y")
    a, b = (z.new_full((len(z),), 1 / max(1, len(z))) if w is None else as_tensor(w, name)
            for w, z, name in ((a, x, "a"), (b, y, "b")))  # fmt: skip
    return _SampleLoss.apply(x, y, a, b, reg, reg_m, (metric, scale), options)


def sinkhorn_divergence(
    a: Any, b: Any, M: Any, reg: float, reg_m: Any, *, M_a: Any = None, M_b: Any = None, **options: Any
) -> Any:
    """Debiased unbalanced Sinkhorn divergence, differentiable once; `mapuot.sinkhorn_divergence` has the formula.

    Parameters
    ----------
    a, b, M, reg
        As in `sinkhorn_loss`.
    reg_m : float or inf
        The same on both sides.
    M_a, M_b : (m, m), (n, n) tensors, or (p, m, m), (p, n, n), optional
        Costs within the points of a and within those of b; without both, M must be symmetric and serves for them.
    **options
        As in `sinkhorn_loss`.

    Returns
    -------
    value : scalar or (p,) tensor

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As in `sinkhorn_loss`.
    """
    check_options(options, reg_m)
    a, b, M, M_a, M_b = map(widened, (a, b, M, M_a, M_b))
    M_a, M_b = self_costs(M, M_a, M_b)
    ab, aa, bb = (sinkhorn_loss(*three, reg, reg_m, **options) for three in ((a, b, M), (a, a, M_a), (b, b, M_b)))
    return ab - 0.5 * (aa + bb) + 0.5 * reg * (a.sum(-1) - b.sum(-1)) ** 2


def widened(x: Any) -> Any:
    """A tensor of half precision in float32, in which the slopes of its uses are then added up; else ``x`` itself."""
    return x.float() if getattr(x, "dtype", None) in (torch.float16, torch.bfloat16) else x


def check_loss(options: dict[str, Any], reg_m: Any) -> None:
    if "reference" in options or "penalty" in options or "warm_start" in options:
        raise TypeError("reference, penalty and warm_start are not options of the loss: c = a b^T, penalty KL")
    if any(np.ndim(rho) for rho in as_pair(reg_m, "reg_m")):
        raise ValueError(f"reg_m must be a number or a pair of numbers for the loss, got {reg_m!r}")


class SinkhornLoss(torch.nn.Module):
    """`sinkhorn_loss` as a module: ``SinkhornLoss(reg, reg_m)(a, b, M)``.

    Parameters
    ----------
    reg, reg_m, **options
        As in `sinkhorn_loss`.
    reduction : {"mean", "sum", "none"}
        Of the values of a batch.

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> loss = mapuot.torch.SinkhornLoss(reg=0.1, reg_m=1.0)
    >>> a = torch.full((8, 5), 0.2, requires_grad=True)
    >>> loss(a, torch.full((4,), 0.25), torch.rand(5, 4)).backward()
    >>> a.grad.shape
    torch.Size([8, 5])
    """

    def __init__(self, reg: float, reg_m: Any, *, reduction: str = "mean", **options: Any) -> None:
        super().__init__()
        self.reg, self.reg_m, self.options = as_positive(reg, "reg"), reg_m, options
        self.reduction = as_choice(reduction, "reduction", ("mean", "sum", "none"))

    def forward(self, a: Any, b: Any, M: Any, **more: Any) -> Any:
        values = self.values(a, b, M, **more)
        return values if self.reduction == "none" else getattr(values, self.reduction)()

    def values(self, a: Any, b: Any, M: Any) -> Any:
        """One value, or one a problem."""
        return sinkhorn_loss(a, b, M, self.reg, self.reg_m, **self.options)

    def extra_repr(self) -> str:
        return f"reg={self.reg}, reg_m={self.reg_m}, reduction={self.reduction!r}"


class SinkhornDivergence(SinkhornLoss):
    """`sinkhorn_divergence` as a module: ``SinkhornDivergence(reg, reg_m)(a, b, M, M_a=None, M_b=None)``.

    Parameters as in `SinkhornLoss`, those of ``forward`` as in `sinkhorn_divergence`.
    """

    def values(self, a: Any, b: Any, M: Any, M_a: Any = None, M_b: Any = None) -> Any:
        """One value, or one a problem."""
        return sinkhorn_divergence(a, b, M, self.reg, self.reg_m, M_a=M_a, M_b=M_b, **self.options)


def is_transformed(x: Any) -> bool:
    """Whether a tensor stands for others within torch.vmap or torch.func.grad."""
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and bool(functorch.is_functorch_wrapped_tensor(x))


def as_tensor(x: Any, name: str) -> Any:
    """``x`` itself in float32 or float64, half precision as float32."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"mapuot.torch takes tensors, got {type(x).__name__} for {name}")
    if is_transformed(x):
        raise NotImplementedError(
            "mapuot.torch works neither within torch.vmap nor within torch.func.grad: give a batch as the first "
            "dimension of a, b or M, and call backward() on the loss"
        )
    if x.is_complex() or x.layout != torch.strided or x.is_meta:
        what = f"{x.dtype}, {x.layout}, device {x.device}"
        raise TypeError(f"{name} must be a dense tensor of real numbers in memory, got {what}")
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


class _SinkhornLoss(torch.autograd.Function):
    """(p,) dual values; what backward needs is in the BatchResult."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, M: Any, reg: float, reg_m: Any, options: dict[str, Any]) -> Any:
        with stream_of(M.device):
            costs, A, B = map(array_of, (M, a, b))
            ctx.result = solve_batch(costs, A, B, reg, reg_m, **options)
        ctx.save_for_backward(a, b, M)
        wide = torch.float64 in (a.dtype, b.dtype, M.dtype)
        return tensor_of(dual_value(ctx.result), M.device).to(torch.float64 if wide else torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        with stream_of(grad.device):
            slopes = first_derivatives(ctx.result, inputs, needed, array_of(grad))
        if torch.is_grad_enabled():  # create_graph=True
            slopes = _FirstDerivative.apply(*slopes, *inputs, grad)
        return (*(x if need else None for x, need in zip(slopes, needed, strict=True)), None, None, None)


class _SampleLoss(torch.autograd.Function):
    """The dual value; slopes are those of ``Result.gradient``."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, y: Any, a: Any, b: Any, reg: float, reg_m: Any, cost: Any, options: dict[str, Any]
    ) -> Any:
        ctx.save_for_backward(x, y, a, b)
        A, B = (host(array_of(w)) for w in (a, b))
        ctx.result = solve_batch(PointCloud(x, y, *cost), A, B, reg, reg_m, **options)
        wide = torch.float64 in (x.dtype, y.dtype, a.dtype, b.dtype)
        return tensor_of(dual_value(ctx.result), x.device).to(torch.float64 if wide else torch.float32)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inputs, found = ctx.saved_tensors, ctx.result[0].gradient()[:4]
        slopes = [grad * tensor_of(s, z.device).to(z.dtype) for s, z in zip(found, inputs, strict=True)]
        if torch.is_grad_enabled():  # create_graph=True
            slopes = _FirstDerivative.apply(*slopes, *inputs, grad)
        return (*slopes, None, None, None, None)


class _FirstDerivative(torch.autograd.Function):
    """The slopes as they are, tied to what they depend on, so that a second derivative cannot pass for zero."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        return tuple(x.clone() for x in tensors[: len(tensors) // 2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("mapuot.torch has no second derivatives: the loss can be differentiated once")


@torch.compiler.disable
def solved(a: Any, b: Any, M: Any, *more: Any) -> Any:
    """(p,) values: to torch.compile a break of the graph, since what happens here is no code of torch."""
    tensors = (as_tensor(x, name) for x, name in ((a, "a"), (b, "b"), (M, "M")))
    return _SinkhornLoss.apply(*tensors, *more)


def first_derivatives(result: BatchResult, inputs: Any, needed: Any, grad: Any) -> list[Any]:
    """grad times dW/da, dW/db, dW/dM, each in shape, dtype and on the device of its input; zeros where not needed."""
    weights, out = grad.astype(np.float64), []
    for tensor, need, name in zip(inputs, needed, ("rows", "cols", "plan"), strict=True):
        if not need:
            out.append(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
            continue
        if name == "plan":
            slope = result.plan_sum(weights)
        else:
            slope = weights[:, None] * marginal_gradient(result, name)
            slope = slope.sum(0) if tensor.ndim == 1 else slope
        out.append(tensor_of(slope, tensor.device).to(tensor.dtype))
    return out
