"""PyTorch losses on mapuot: the gradient comes from the potentials, so no graph goes through the iterations.

The value is the dual optimum W(a, b, M) of `solve` with the reference a b^T; answer/slopes.py has the
formulas. Tensors are read in place, on the CPU or (through CuPy) on the GPU. All work on GPU tensors is done on that
GPU, on torch's current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .annotations import MarginalPenalty, MetricName
from .answer.batch import BatchResult
from .answer.result import Result
from .answer.slopes import dual_value, marginal_gradient, mass_slope, point_slope, point_slopes
from .answer.tensors import array_of, check_csr, is_csr, stream_of, tensor_of
from .api.batch import of_problems, solve_batch
from .api.divergence import MASS_CURE, check_options, self_costs
from .api.gromov import gromov
from .api.solve import solve
from .arrays import any_of, host, is_on_device, namespace
from .backends import pick
from .errors import OF_BATCH, for_value, renamed
from .penalties import F64
from .problem.clouds import PointCloud
from .problem.kinds import as_costs
from .problem.scale import scaled, scaled_each, scales_one_by_one
from .problem.sparse import Sparse
from .problem.validate import as_choice, as_flag, as_pair, as_positive, refuse_two_clouds
from .route.on_device import one_call
from .route.options import options_of_value
from .synonyms import hinted, hinted_onward

try:
    import torch
    from torch.autograd.function import once_differentiable
    from torch.utils.weak import WeakTensorKeyDictionary

    from .compiled import compilable
    from .torch_kernels import KERNELS, kernel_answer
except ImportError as error:  # pragma: no cover
    raise ImportError("mapuot.torch needs PyTorch: pip install 'mapuot[torch]'") from error

Tensor: TypeAlias = torch.Tensor
__all__ = [
    "SamplesLoss",
    "SinkhornDivergence",
    "SinkhornLoss",
    "gromov_loss",
    "sample_loss",
    "sinkhorn_divergence",
    "sinkhorn_loss",
]

METRICS = {1: ("euclidean", 1.0), 2: ("sqeuclidean", 0.5)}  # of SamplesLoss, by p
FORMULAS = {"Norm2(X-Y)": 1, "(SqDist(X,Y) / IntCst(2))": 2}  # GeomLoss's own words for these two costs
BACKENDS = ("auto", "tensorized", "online", "multiscale")
SECOND_TOL = 1e-9  # of the movement of the potentials, beside the error of the plan


class Measure(NamedTuple):
    """The points of one side with their masses: one cloud, or concatenated clouds with offsets ``starts``."""

    points: Any
    masses: Any
    given: Any  # the user's tensor of these points
    starts: Any = None  # (p + 1,) int64
    shared: int = 0  # number of points of a cloud that serves all p problems and is stored p times

    def once(self) -> Measure:
        """Return one copy of a cloud that serves all problems."""
        k = self.shared
        if k:
            return Measure(self.points[:k], self.masses[:k], self.given)
        return self

    def parts(self) -> tuple[Any, Any]:
        sizes = np.diff(self.starts).tolist()
        return torch.split(self.masses, sizes), torch.split(self.points, sizes)


class SelfSolve(NamedTuple):
    """The last solve of a cloud with itself."""

    loss: Any  # key of the loss that made the result
    points: F64
    masses: F64
    starts: Any
    result: Any


ALONE: Any = WeakTensorKeyDictionary()  # live tensor of points: its last `SelfSolve`


@compilable(M=2, a=1, b=1)
@hinted_onward(solve_batch)
def sinkhorn_loss(
    M: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    reg: float,
    reg_m: MarginalPenalty,
    values: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute the optimal value of unbalanced entropic transport, differentiable once in a, b and M.

    Parameters
    ----------
    M : (m, n) or (p, m, n) tensor
        Costs; +inf forbids a pair. It may be a sparse CSR tensor (m, n) on the CPU: pairs that it does not store are
        forbidden, and its gradient is a CSR tensor with the same indices.
    a, b : (m,), (n,) or (p, m), (p, n) tensors, optional
        Masses, >= 0; one vector serves all problems of a batch. Default: equal masses that add up to 1.
    reg, reg_m : float > 0; float, inf, or a pair of them
        Entropic regularisation and marginal penalty, in units of M. inf is the balanced constraint; the gradients by a
        and b then hold for changes that keep both totals equal, and are known up to a constant.
    values : (nnz,) tensor, optional
        Costs of the stored pairs of a sparse M, instead of M's own values; the gradient has this shape. A CSR tensor
        made from values that require a gradient works, too, but PyTorch's backward pass then makes a dense matrix.
    **options
        scale_cost and scale_each (the gradient holds the units fixed), tol, tol_gap, max_passes, precision, threads,
        backend, progress and mask of `solve_batch`. With a mask, value and gradient belong to the masked problem. If
        both sides are balanced, ``tol_gap`` is 1e-5 by default, or 10 tol if that is less: value and gradient then
        belong to masses that differ from b by at most this share. The plan is not certified, because that takes far
        longer.

    Returns
    -------
    value : scalar or (p,) tensor
        The dual value, a lower bound of the optimum up to rounding, within the certified gap, in units of M times mass.
        float64 if an argument is float64, else float32; half precision is solved in float32, also under
        torch.autocast. Gradients have the dtype of their input.

    Raises
    ------
    RuntimeError
        A second derivative is requested.

    See Also
    --------
    SinkhornLoss, sample_loss, sinkhorn_divergence, mapuot.solve

    Notes
    -----
    ``torch.vmap`` over problems with a dense M is one batch. ``torch.func.grad`` and ``jacrev`` give the gradient of
    ``backward()``. ``torch.compile`` treats a loss of dense tensors as one operator, without a graph break. A CUDA
    graph cannot capture a loss, because a solve ends only when the host has read the certificate.

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> M, a = torch.rand(5, 4), torch.full((5,), 0.2, requires_grad=True)
    >>> mapuot.torch.sinkhorn_loss(M, a, reg=0.1, reg_m=1.0).backward()
    >>> a.grad.shape
    torch.Size([5])
    """
    check_loss(options, reg_m)
    if isinstance(M, PointCloud):
        raise TypeError("M must be a tensor, got a PointCloud: mapuot.torch.sample_loss(x, y, ...) takes points")
    refuse_two_clouds(M, a, "mapuot.torch.sample_loss")
    return solved(M, a, b, values, reg, reg_m, options)


@compilable(x=2, y=2)
@hinted_onward(solve_batch)
def sample_loss(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    reg: float,
    reg_m: MarginalPenalty,
    metric: MetricName = "sqeuclidean",
    scale: float = 1.0,
    **options: Any,
) -> Any:
    """Compute the value of unbalanced transport between clouds of points, differentiable once in x, y, a and b.

    The cost matrix is never formed. The loss is differentiable twice if the metric is "sqeuclidean" and only x, of one
    pair of clouds, requires a gradient: `mapuot.Result.hvp` computes products with the Hessian.

    Parameters
    ----------
    x, y : (m, d), (n, d) tensors
        Points; or many clouds in the forms of `SamplesLoss`, solved as one batch.
    a, b, reg, reg_m, **options
        As in `sinkhorn_loss`, for the cost ``scale * metric(x_i, y_j)``.
    metric, scale
        As in `mapuot.PointCloud`.

    Returns
    -------
    value : scalar or (p,) tensor

    See Also
    --------
    SamplesLoss, sinkhorn_loss

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> x, y = torch.rand(30, 2, requires_grad=True), torch.rand(20, 2)
    >>> mapuot.torch.sample_loss(x, y, reg=0.05, reg_m=1.0).backward()
    >>> x.grad.shape
    torch.Size([30, 2])
    """
    check_loss(options, reg_m)
    return value_of(CrossTerms(reg, reg_m, (metric, scale), options), *both_clouds(a, x, b, y))


@compilable(M=2, a=1, b=1)
@hinted_onward(solve_batch)
def sinkhorn_divergence(
    M: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    reg: float,
    reg_m: MarginalPenalty,
    M_a: Tensor | None = None,
    M_b: Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute the debiased Sinkhorn divergence, differentiable once.

    Parameters
    ----------
    M, a, b, reg, **options
        As in `sinkhorn_loss`.
    reg_m : float or inf
        Marginal penalty, the same on both sides, in units of M.
    M_a, M_b : (m, m), (n, n) or (p, m, m), (p, n, n) tensors, optional
        Costs between the points of a, and between the points of b. Default: M for both, which must be symmetric.

    Returns
    -------
    value : scalar or (p,) tensor
        In units of M times mass; 0 for a = b. `mapuot.sinkhorn_divergence` has the formula.

    See Also
    --------
    mapuot.sinkhorn_divergence, SamplesLoss

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> t = torch.linspace(0, 1, 20)
    >>> M, a = (t[:, None] - t) ** 2, torch.full((20,), 0.05, requires_grad=True)
    >>> value = mapuot.torch.sinkhorn_divergence(M, a, torch.softmax(t, 0), reg=0.01, reg_m=1.0)
    >>> value.backward()
    >>> bool(value > 0), a.grad.shape
    (True, torch.Size([20]))
    """
    check_options(options, reg_m)
    if M_a is None:
        refuse_two_clouds(M, a, "mapuot.torch.SamplesLoss")
    M, a, b, M_a, M_b = map(widened, (M, a, b, M_a, M_b))
    if options.get("scale_cost") is not None:
        numbers = array_of(M)
        each = as_flag(options.pop("scale_each", False), "scale_each")
        words = {"M": numbers, "scale_cost": options["scale_cost"], "scale_each": each}
        masses = (None if w is None else array_of(w) for w in (a, b))
        with renamed(OF_BATCH):
            costs, weights = of_problems(as_costs(numbers, pick("auto", numbers)), words, *masses)
        if each and len(costs) > 1:
            units = scales_one_by_one(costs, options.pop("scale_cost"), weights)
            regs, rhos = scaled_each(reg, reg_m, units)
            return debiased(M, a, b, M_a, M_b, regs, rhos, options)
        given = {"M": M, "a": a, "b": b, "reg": reg, "reg_m": reg_m, "M_a": M_a, "M_b": M_b, **options}
        return scaled(sinkhorn_divergence, given, costs, masses=weights)
    return debiased(M, a, b, M_a, M_b, reg, reg_m, options)


def debiased(M: Any, a: Any, b: Any, M_a: Any, M_b: Any, reg: Any, reg_m: Any, options: dict[str, Any]) -> Any:
    """Return the divergence; reg and reg_m are those of all problems, or of each, (p,) and (p, 1)."""
    a, b = (equal(k, M) if x is None else x for x, k in zip((a, b), np.shape(M)[-2:], strict=False))
    M_a, M_b = self_costs(M, M_a, M_b)
    three = (M, a, b), (M_a, a, a), (M_b, b, b)
    if np.ndim(reg):
        ab, aa, bb = (solved(*one, None, reg, reg_m, options) for one in three)
        reg = torch.as_tensor(reg, dtype=ab.dtype, device=ab.device)
    else:
        ab, aa, bb = (sinkhorn_loss(*one, reg=reg, reg_m=reg_m, **options) for one in three)
    return ab - 0.5 * (aa + bb) + 0.5 * reg * (a.sum(-1) - b.sum(-1)) ** 2


def equal(size: int, like: Any) -> Any:
    return torch.full((size,), 1 / max(1, size), dtype=like.dtype, device=like.device)


def as_masses(w: Any, name: str, size: int, like: Any) -> Any:
    if w is None:
        return equal(size, like)
    return as_tensor(w, name)


def widened(x: Any) -> Any:
    """Return a half-precision tensor as float32, so that slopes add up in float32; return other values unchanged."""
    if getattr(x, "dtype", None) in (torch.float16, torch.bfloat16):
        return x.float()
    return x


def widest(*tensors: Any) -> Any:
    if any(x.dtype == torch.float64 for x in tensors):
        return torch.float64
    return torch.float32


def check_loss(options: dict[str, Any], reg_m: Any) -> None:
    if "reference" in options or "penalty" in options or "warm_start" in options:
        raise TypeError("reference, penalty and warm_start are not options of the loss: c = a b^T, penalty KL")
    if "scale_mass" in options:
        raise TypeError(f"scale_mass is not an option of the loss: {MASS_CURE}")
    if any(np.ndim(rho) for rho in as_pair(reg_m, "reg_m")):
        raise ValueError(f"reg_m must be a number or a pair of numbers for the loss, got {reg_m!r}")


class SinkhornLoss(torch.nn.Module):
    """Module that computes `sinkhorn_loss`: ``SinkhornLoss(reg=..., reg_m=...)(M, a, b)``.

    Parameters
    ----------
    reg, reg_m, **options
        As in `sinkhorn_loss`.
    reduction : {"mean", "sum", "none"}
        How the values of a batch are combined.

    See Also
    --------
    sinkhorn_loss, SinkhornDivergence

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> loss = mapuot.torch.SinkhornLoss(reg=0.1, reg_m=1.0)
    >>> a = torch.full((8, 5), 0.2, requires_grad=True)
    >>> loss(torch.rand(5, 4), a).backward()
    >>> a.grad.shape
    torch.Size([8, 5])
    """

    loss = staticmethod(sinkhorn_loss)

    @hinted_onward(solve_batch)
    def __init__(self, *, reg: float, reg_m: MarginalPenalty, reduction: str = "mean", **options: Any) -> None:
        super().__init__()
        self.reg = as_positive(reg, "reg")
        self.reg_m: Any = reg_m
        self.options = options
        self.reduction = as_choice(reduction, "reduction", ("mean", "sum", "none"))

    def forward(self, M: Tensor, a: Tensor | None = None, b: Tensor | None = None, **more: Any) -> Any:
        """Return the value. ``more`` are further arguments of the function: ``values``, or ``M_a`` and ``M_b``."""
        values = self.loss(M, a, b, reg=self.reg, reg_m=self.reg_m, **more, **self.options)
        if self.reduction == "none":
            return values
        return getattr(values, self.reduction)()

    def extra_repr(self) -> str:
        return f"reg={self.reg}, reg_m={self.reg_m}, reduction={self.reduction!r}"


class SinkhornDivergence(SinkhornLoss):
    """Module that computes `sinkhorn_divergence`: ``SinkhornDivergence(reg=..., reg_m=...)(M, a, b)``.

    It takes the parameters of `SinkhornLoss`; costs ``M_a`` and ``M_b`` may follow b.

    See Also
    --------
    sinkhorn_divergence

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> t = torch.linspace(0, 1, 20, dtype=torch.float64)
    >>> loss = mapuot.torch.SinkhornDivergence(reg=0.01, reg_m=1.0)
    >>> bool(abs(loss((t[:, None] - t) ** 2)) < 1e-9)  # equal masses on both sides
    True
    """

    loss = staticmethod(sinkhorn_divergence)


class SamplesLoss(torch.nn.Module):
    """Module with the arguments of GeomLoss's ``SamplesLoss``; "sinkhorn" is certified to ``tol``.

    With eps = blur^p, rho = reach^p, and OT the value of `sinkhorn_loss` for the cost ``|x - y|^2 / 2`` (p = 2) or
    ``|x - y|`` (p = 1)::

        debias        OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2 + eps / 2 (|a| - |b|)^2
        without it    OT(a, b) - eps |a| |b| + eps / 2 (|a| + |b|)

    The kernel losses are half the squared norm of a - b, ``sum_kl w_k w_l k(z_k, z_l) / 2`` over the points z of both
    clouds with w = (a, -b): k is ``-|x - y|`` ("energy"), ``exp(-|x - y|^2 / (2 blur^2))`` ("gaussian") or
    ``exp(-|x - y| / blur)`` ("laplacian"). They take blur and potentials, and ignore the other arguments of a solve.

    Parameters
    ----------
    loss : {"sinkhorn", "energy", "gaussian", "laplacian"}
        GeomLoss's "hausdorff" raises a NotImplementedError.
    p, blur, reach : {1, 2}; float; float, optional
        Exponent of the distance; blur and reach are > 0, in units of the coordinates. Without reach, transport is
        balanced and needs equal masses.
    debias, potentials : bool
        debias: subtract the self terms. potentials: return potentials (F, G) instead of the value, in the shapes of the
        weights and without a gradient: f and g, with ``debias`` minus the potentials of OT(a, a) and OT(b, b).
    cost : function, optional
        ``cost(x, y)`` takes (1, n, d) and (1, m, d) tensors and returns the (1, n, m) costs. The matrix is formed, and
        the gradient goes through the function.
    static_y : bool
        Leave OT(b, b) out of a debiased value. OT(b, b) does not depend on x and a, so the derivatives by x and a stay
        correct, with two solves instead of three. The derivatives by y and b are of the returned, incomplete value.
    reach_x, reach_y : float, optional
        Reach of each side, instead of ``reach``. If they differ, the debiased value of equal clouds is not 0.
    diameter, scaling, truncate, kernel, cluster_scale, verbose, backend, **options
        GeomLoss's options (diameter to backend) are accepted and ignored: a solve stops at ``tol`` or ``tol_gap``. tol,
        tol_gap, max_passes, precision and threads are as in `sinkhorn_loss`.

    See Also
    --------
    sample_loss, mapuot.pairwise

    Notes
    -----
    ``forward`` takes ``(x, y)``, ``(a, x, b, y)`` or ``(labels_x, a, x, labels_y, b, y)``; labels are ignored. For one
    value the points are (n, d) and (m, d), with weights (n,) and (m,). For p values, solved as one batch, they are
    (p, n, d), (p, m, d), (p, n), (p, m). Clouds of several sizes, and their weights, are lists of p tensors or nested
    tensors. One (m, d) cloud may serve all p. Tensors on a GPU are solved there. The self term of a cloud has one
    potential, and is solved again only if its tensor or the numbers in it change; a fixed target is solved once.
    Gradients are the derivatives of the returned value by all four arguments; for a finite reach GeomLoss returns
    (rho + eps / 2) / (rho + eps) of them. Second derivatives exist as in `sample_loss`.

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> loss = mapuot.torch.SamplesLoss("sinkhorn", p=2, blur=0.1, reach=0.5)
    >>> x = torch.rand(200, 3, requires_grad=True)
    >>> loss(x, torch.rand(100, 3)).backward()
    >>> x.grad.shape
    torch.Size([200, 3])
    """

    @hinted
    def __init__(
        self, loss: str = "sinkhorn", p: int = 2, blur: float = 0.05, reach: float | None = None, diameter: Any = None,
        scaling: Any = 0.5, truncate: Any = 5, cost: Any = None, kernel: Any = None, cluster_scale: Any = None,
        debias: bool = True, potentials: bool = False, verbose: Any = False, backend: str = "auto", *,
        reach_x: float | None = None, reach_y: float | None = None, static_y: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        words = {"loss": loss, "p": p, "blur": blur, "reach": reach, "debias": debias, "static_y": static_y}
        self.words = words | {"reach_x": reach_x, "reach_y": reach_y} | options  # all arguments that change the value
        if loss not in ("sinkhorn", *KERNELS):
            raise NotImplementedError(f"loss must be 'sinkhorn' or one of {[*KERNELS]}, got {loss!r}")
        if loss != "sinkhorn" and (kernel is not None or static_y):
            raise NotImplementedError(f"kernel and static_y are not for loss {loss!r}: its kernel and terms are fixed")
        if p not in METRICS:
            raise ValueError(f"p must be 1 or 2, got {p!r}")
        if isinstance(cost, str) and FORMULAS.get(cost) != p:
            raise NotImplementedError(f"cost must be a function of points or one of {[*FORMULAS]}, got {cost!r}")
        as_choice(backend, "backend", BACKENDS)
        if unknown := options.keys() - {"tol", "tol_gap", "max_passes", "precision", "threads"}:
            raise TypeError(f"SamplesLoss has no argument {sorted(unknown)[0]!r}")
        self.loss, self.p, self.blur, self.reach = loss, int(p), as_positive(blur, "blur"), reach
        reaches = {"reach_x": reach if reach_x is None else reach_x, "reach_y": reach if reach_y is None else reach_y}
        self.eps = self.blur**self.p
        named = (("reach" if r is reach else k, r) for k, r in reaches.items())
        self.rho = tuple(np.inf if r is None else as_positive(r, name) ** p for name, r in named)
        self.cost: Any = cost if callable(cost) else None
        self.debias, self.potentials, self.options = bool(debias), bool(potentials), options
        self.static_y = bool(static_y)

    def forward(self, *args: Any) -> Any:
        """Return the value, or the potentials, of clouds in the forms of the Notes; lists give lists of potentials."""
        if torch.compiler.is_compiling() and self.cost is None and not self.potentials and len(args) in (2, 4):
            if len(args) == 4:
                a, x, b, y = args
            else:
                a, x, b, y = (None, args[0], None, args[1])
            return samples_value(x, y, a, b, **self.words)
        return self.called(*args)

    @torch.compiler.disable
    def called(self, *args: Any) -> Any:
        """Do the work of ``forward``, outside a compiled program."""
        if len(args) not in (2, 4, 6):
            raise ValueError(f"SamplesLoss takes (x, y), (a, x, b, y) or (l_x, a, x, l_y, b, y), got {len(args)}")
        *first, x = args[: len(args) // 2]
        *second, y = args[len(args) // 2 :]
        rows, cols = both_clouds(first[-1] if first else None, x, second[-1] if second else None, y)
        if self.loss != "sinkhorn":
            return kernel_potentials(self, rows, cols) if self.potentials else kernel_value(self, rows, cols)
        if self.potentials:
            with torch.no_grad():
                return self.dual_pair(rows, cols)
        if self.cost is None:
            return value_of(self, rows, cols)
        if rows.starts is None:
            return self.formed(rows.masses, rows.points, cols.masses, cols.points)
        return torch.stack([self.formed(*one) for one in zip(*rows.parts(), *cols.parts(), strict=True)])

    def formed(self, a: Any, x: Any, b: Any, y: Any) -> Any:
        """Return the value of one pair of clouds if the cost is a function."""
        rho_x, rho_y = self.rho
        value = self.dense(a, x, b, y, self.rho)
        if self.debias:
            value = value - 0.5 * self.dense(a, x, a, x, (rho_x, rho_x))
        if self.debias and not self.static_y:
            value = value - 0.5 * self.dense(b, y, b, y, (rho_y, rho_y))
        return value + self.constant(a.sum(), b.sum())

    def constant(self, a: Any, b: Any) -> Any:
        """Return the mass terms that the loss adds to OT(a, b), or to the debiased sum."""
        return 0.5 * self.eps * ((a - b) ** 2 if self.debias else a + b - 2 * a * b)

    def dense(self, a: Any, x: Any, b: Any, y: Any, rho: Any) -> Any:
        """Return OT for a cost that is a function of points: form the matrix and solve."""
        return sinkhorn_loss(self.cost(x[None], y[None])[0], a, b, reg=self.eps, reg_m=rho, **self.options)

    def solved(self, rows: Measure, cols: Measure) -> list[Any]:
        """Solve the problem of a and b, and with ``debias`` also of a and a, and of b and b."""
        if is_on_device(rows.points):
            backend = "cuda"
        else:
            backend = "cpu"
        found = [self.solve(rows, cols, self.rho, backend)]
        if self.debias:
            sides = [*zip((rows, cols), self.rho, strict=True)][: 2 - self.static_y]
            found += [self.alone(side, rho, backend) for side, rho in sides]
        return found

    def alone(self, side: Measure, rho: float, backend: str) -> Any:
        """Solve the problem of a cloud with itself; reuse the last answer while the numbers are unchanged."""
        side = side.once()
        if self.cost is not None:
            return self.solve(side, side, (rho, rho), backend)
        loss = (self.p, self.eps, rho, backend, repr(self.options))
        points = read(side.points).astype(np.float64)
        masses = read(side.masses)
        held = ALONE.get(side.given)
        same = held is not None and held.loss == loss and np.array_equal(held.starts, side.starts)
        if same and are_equal(held.points, points) and are_equal(held.masses, masses):
            return held.result
        result = self.solve(side, side, (rho, rho), backend)
        if np.all(result.converged):
            ALONE[side.given] = SelfSolve(loss, points, masses.copy(), side.starts, result)
        return result

    def solve(self, rows: Measure, cols: Measure, rho: Any, backend: str) -> Any:
        more = {"reg": self.eps, "reg_m": rho, "backend": backend} | options_of_value(self.options, rho)
        if self.cost is None:
            return solved_between(rows, cols, METRICS[self.p], more)
        M = array_of(self.cost(rows.points[None], cols.points[None])[0])
        with for_value({}):
            return solve(M, *masses_of(rows, cols), **more)

    def dual_pair(self, rows: Measure, cols: Measure) -> Any:
        """Return (F, G); the two potentials of a self term differ by a constant if it is balanced."""
        if self.cost is not None and rows.starts is not None:
            pairs = zip(*rows.parts(), *cols.parts(), strict=True)
            found = [self.dual_pair(Measure(x, a, x), Measure(y, b, y)) for a, x, b, y in pairs]
            return tuple(map(torch.stack, zip(*found, strict=True)))
        ab, *alone = self.solved(rows, cols)
        pair = [ab.f, ab.g]
        xp = namespace(ab.f)
        if alone:
            with np.errstate(invalid="ignore"):  # of points without mass
                both = (xp.asarray(x.f) + xp.asarray(x.g) for x in alone)
                pair[: len(alone)] = [f - 0.5 * x for f, x in zip(pair, both, strict=False)]
        out = []
        for side, f in zip((rows, cols), pair, strict=True):
            found = tensor_of(f, side.points.device).to(side.points.dtype)
            if side.starts is None:
                sizes: Any = ()
            else:
                sizes = np.diff(side.starts)
            ragged = len(set(sizes)) > 1
            if ragged:
                out.append([row[:k] for row, k in zip(found, sizes, strict=True)])
            else:
                out.append(found)
        return tuple(out)

    def extra_repr(self) -> str:
        return f"loss={self.loss!r}, p={self.p}, blur={self.blur}, reach={self.reach}, debias={self.debias}"


@compilable(x=2, y=2)
def samples_value(x: Any, y: Any, a: Any, b: Any, **words: Any) -> Any:
    return SamplesLoss(**words)(*((x, y) if a is b is None else (a, x, b, y)))


def read(x: Any) -> Any:
    """Return a tensor as an array, or an array as it is."""
    if isinstance(x, torch.Tensor):
        return array_of(x)
    return x


def are_equal(x: Any, y: Any) -> bool:
    return x.shape == y.shape and type(x) is type(y) and not any_of(x != y)


def as_tensor(x: Any, name: str, csr: bool = False) -> Any:
    """Return ``x`` where it is float32 or float64, else in float32; with ``csr`` it may be sparse by rows."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"mapuot.torch takes tensors, got {type(x).__name__} for {name}")
    if x.is_complex() or x.is_meta or not (x.layout == torch.strided or (csr and is_csr(x))):
        what = f"{x.dtype}, {x.layout}, device {x.device}"
        or_csr = f" or {name}.to_sparse_csr()" * csr
        raise TypeError(f"{name} must be a dense tensor of real numbers in memory{or_csr}, got {what}")
    check_csr(x, name)
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.to(torch.float32)


@dataclass(eq=False)
class Loss:
    """The problem of a loss, as functions of its tensors."""

    solve: Callable[..., Any]  # (*tensors) -> the value as an array, and the answer
    slopes: Callable[..., Any]  # (answer, needed, grad, *tensors) -> grad times each slope, None where not needed
    second: Callable[..., Any] | None = None  # (answer, grad) -> the second derivative by the first tensor, or None
    vmap: bool = False  # whether problems of torch.vmap are one batch


class _Loss(torch.autograd.Function):
    """Value of a task at its tensors; the second output is the answer, which the backward pass needs."""

    @staticmethod
    def forward(task: Loss, *tensors: Any) -> Any:
        device = tensors[0].device
        with stream_of(device):
            value, answer = task.solve(*tensors)
            return tensor_of(value, device).to(widest(*tensors)), answer

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.slopes = inputs[0].slopes
        ctx.second = inputs[0].second
        ctx.answer = output[1]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        answer = ctx.answer
        needed = tuple(ctx.needs_input_grad[1:])

        def slopes(grad: Any, *inputs: Any) -> list[Any]:
            with stream_of(grad.device):
                found = zip(ctx.slopes(answer, needed, grad, *inputs), inputs, strict=True)
            return [(grad.new_zeros(()) if slope is None else slope).to(z.dtype) for slope, z in found]

        if ctx.second and needed == (True, *[False] * (len(needed) - 1)):
            slopes.second = ctx.second(answer, grad.detach())  # type: ignore[attr-defined]
        found = _FirstDerivative.apply(slopes, grad, *ctx.saved_tensors)
        return None, *(x if need else None for x, need in zip(found, needed, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, task: Loss, *tensors: Any) -> Any:
        """Solve the problems of torch.vmap as one batch; each result is one value."""
        dims = in_dims[1:]
        several = (x.ndim - (at is not None) > k for x, at, k in zip(tensors, dims, (1, 1, 2), strict=False))
        if not task.vmap or any(several):
            raise NotImplementedError(
                "torch.vmap goes over single problems with a dense M, and not over batches of them"
            )
        moved = [x if at is None else x.movedim(at, 0) for x, at in zip(tensors, dims, strict=True)]
        values, result = _Loss.apply(task, *moved)
        return (values[:, None], result), (0, None)


def value_by(task: Loss, *tensors: Any) -> Any:
    """Return the value of a task with its gradient by the tensors."""
    return _Loss.apply(task, *tensors)[0]


class CrossTerms:
    """Terms of a value between clouds: the value of `sample_loss` is the dual value alone."""

    eps, debias = 0.0, False

    def __init__(
        self, reg: float, reg_m: MarginalPenalty, how: tuple[MetricName, float], options: dict[str, Any]
    ) -> None:
        self.how, self.given = how, {"reg": reg, "reg_m": reg_m} | options
        self.options = self.given | options_of_value(options, reg_m)

    def solved(self, rows: Measure, cols: Measure) -> list[Any]:
        cloud = cloud_of(rows, cols, self.how)
        masses = masses_of(rows, cols)
        if rows.starts is None:
            one = one_call(cloud, *masses, **self.given)()  # for a plain problem on a GPU
            if one is not None and one.converged:
                return [one]
        with for_value(OF_BATCH):
            found = solve_batch(cloud, *masses, **self.options)
        return [found[0] if rows.starts is None else found]

    def constant(self, a: Any, b: Any) -> Any:
        """Return 0: nothing is added."""
        return 0.0 * a


def cloud_of(rows: Measure, cols: Measure, how: tuple[MetricName, float]) -> PointCloud:
    starts = None if rows.starts is None else (rows.starts, cols.starts)
    metric, scale = how
    return PointCloud(rows.points, None if cols is rows else cols.points, metric, scale, starts=starts)


def masses_of(rows: Measure, cols: Measure) -> tuple[Any, Any]:
    a = read(rows.masses)
    if cols is rows:
        b = a
    else:
        b = read(cols.masses)
    if rows.starts is None:
        return (host(a), host(b))
    return (a, b)


def solved_between(rows: Measure, cols: Measure, how: Any, more: dict[str, Any]) -> Any:
    given = cloud_of(rows, cols, how), *masses_of(rows, cols)
    with for_value(OF_BATCH):
        return (solve if rows.starts is None else solve_batch)(*given, **more)


def both_clouds(a: Any, x: Any, b: Any, y: Any) -> tuple[Measure, Measure]:
    """Read points and masses of both sides: one cloud each, p clouds each, or p and one that serves all of them."""
    rows = points_of(x, a, "x", "a")
    cols = points_of(y, b, "y", "b")
    counts = {len(side.starts) - 1 for side in (rows, cols) if side.starts is not None}
    if len(counts) > 1:
        raise ValueError(f"y must hold as many clouds as x, got {sorted(counts)}")
    if rows.points.shape[-1] != cols.points.shape[-1]:
        raise ValueError(f"y must have {rows.points.shape[-1]} columns, as x has, got {cols.points.shape[-1]}")
    rows, cols = (repeated(side, counts.pop()) if counts and side.starts is None else side for side in (rows, cols))
    return rows, cols


def repeated(side: Measure, p: int) -> Measure:
    """Repeat a cloud that serves p problems: p copies, one behind the other."""
    n, d = side.points.shape
    points = side.points.expand(p, n, d).reshape(-1, d)
    masses = side.masses.expand(p, n).reshape(-1)
    return Measure(points, masses, side.given, n * np.arange(p + 1), n)


def points_of(z: Any, w: Any, name: str, weights: str) -> Measure:
    """Read the points of one side and their masses, equal ones of sum 1 where ``w`` is None."""
    given: Any = z
    starts: Any = None
    listed, masses = parts_of(z), parts_of(w)
    if listed is not None:
        z = [as_tensor(one, f"{name}[{i}]") for i, one in enumerate(listed)]
        given = given[0] if isinstance(given, (list, tuple)) else given
        if not z or any(one.ndim != 2 or one.shape[1:] != z[0].shape[1:] for one in z):
            raise ValueError(f"{name} must hold tensors of shape (n, d), one for each cloud")
        if empty := [i for i, one in enumerate(z) if len(one) == 0]:
            text = f"{name}[{empty[0]}] has no points, and a cloud must have one"
            raise ValueError(f"{text}: leave that problem out, its value is that of a plan that moves nothing")
        starts, z = np.cumsum([0, *map(len, z)]), torch.cat(z)
    else:
        z = given = as_tensor(z, name)
        if z.ndim not in (2, 3):
            raise ValueError(f"{name} must have shape (n, d) or (p, n, d), got {tuple(z.shape)}")
        starts = None if z.ndim == 2 else z.shape[1] * np.arange(len(z) + 1)
    wanted = z.shape[:-1]
    if masses is not None:
        w = torch.cat([as_tensor(one, f"{weights}[{i}]").reshape(-1) for i, one in enumerate(masses)])
    if w is None and listed is not None:
        w = torch.cat([equal(int(k), z) for k in np.diff(starts)])
    elif w is None:
        w = equal(wanted[-1], z).expand(wanted)
    w = as_tensor(w, weights)
    if any(map(torch._C._functorch.is_batchedtensor, (z, w))):  # each stands for others
        raise NotImplementedError(f"{name} must hold all clouds, as (p, n, d) or a list: torch.vmap goes over none")
    if w.shape not in (wanted, (*wanted, 1)):
        raise ValueError(f"{weights} must have shape {tuple(wanted)}, one a point, got {tuple(w.shape)}")
    return Measure(z.reshape(-1, z.shape[-1]), w.reshape(-1), given, starts)


def parts_of(value: Any) -> Any:
    """Return the tensors of a list or of a nested tensor, None for anything else."""
    if getattr(value, "is_nested", False):
        return value.unbind()
    if isinstance(value, (list, tuple)):
        return value
    return None


def value_of(loss: Any, rows: Measure, cols: Measure) -> Any:
    """Return the value of a loss between clouds, one for each problem; slopes by points need a product per plan."""
    # The backward pass keeps these alone: with the points it would keep their graph, too.
    starts = rows.starts, cols.starts

    def solve(x: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
        sides = [rows._replace(points=x, masses=a), cols._replace(points=y, masses=b)]
        if x.is_cuda:  # read once, for all three problems; of one the masses are the host's
            there = array_of if rows.starts is not None else lambda z: host(array_of(z))
            sides = [z._replace(points=array_of(z.points), masses=there(z.masses)) for z in sides]
        solved = loss.solved(*sides)
        value, *alone = (host(dual_value(result)) for result in solved)
        return np.asarray(value + loss.constant(*total_masses(solved[0])) - 0.5 * sum(alone)), solved

    def slopes(solved: list[Any], needed: Any, grad: Any, *inputs: Any) -> list[Any]:
        found = sample_slopes(solved, loss, needed)
        weights = [grad if z is None else repeat_each(grad, np.diff(z)) for z in starts] * 2
        shaped = (w.reshape(-1, *[1] * (z.ndim - 1)) for w, z in zip(weights, inputs, strict=True))
        pairs = zip(found, shaped, strict=True)
        return [None if slope is None else w * tensor_of(slope, grad.device) for slope, w in pairs]

    def second(solved: list[Any], grad: Any) -> Any:
        metric = solved[0].problem.cost.cloud.core[0]
        is_squared = metric.square and not metric.unit
        if is_squared:
            return functools.partial(second_derivative, solved, grad)
        return None

    task = Loss(solve, slopes, second if rows.starts is None else None)
    return value_by(task, rows.points, cols.points, rows.masses, cols.masses)


def kernel_value(loss: Any, rows: Measure, cols: Measure) -> Any:
    """Return the value of a kernel loss, one for each problem; all derivatives come from the same sweep."""

    def solve(x: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
        sides = clouds_of(rows, x, a), clouds_of(cols, y, b)
        needs_slope = any(z.requires_grad for z in (rows.points, cols.points))
        answer = kernel_answer(loss.loss, loss.blur, sides, needs_slope)
        return answer.value[0] if rows.starts is None else answer.value, answer

    def slopes(answer: Any, needed: Any, grad: Any, *inputs: Any) -> list[Any]:
        weights = [grad if z.starts is None else repeat_each(grad, np.diff(z.starts)) for z in (rows, cols)] * 2
        shaped = (w.reshape(-1, *[1] * (z.ndim - 1)) for w, z in zip(weights, inputs, strict=True))
        if answer.slopes[0] is None and any(needed[:2]):  # a transform has asked for them
            x, y, a, b = inputs
            answer = kernel_answer(loss.loss, loss.blur, (clouds_of(rows, x, a), clouds_of(cols, y, b)), True)
        found = zip(answer.slopes, shaped, needed, strict=True)
        return [w * slope if need else None for slope, w, need in found]

    return value_by(Loss(solve, slopes), rows.points, cols.points, rows.masses, cols.masses)


def kernel_potentials(loss: Any, rows: Measure, cols: Measure) -> Any:
    """Return (F, G) of a kernel loss in the shapes of the weights: F its derivative by a, G by b."""
    sides = clouds_of(rows, rows.points, rows.masses), clouds_of(cols, cols.points, cols.masses)
    found = kernel_answer(loss.loss, loss.blur, sides, False).slopes[2:]
    out = []
    for side, slope in zip((rows, cols), found, strict=True):
        f = slope.to(side.points.dtype)
        if side.starts is None:
            out.append(f)
            continue
        parts = [*torch.split(f, np.diff(side.starts).tolist())]
        out.append(torch.stack(parts) if len({len(z) for z in parts}) == 1 else parts)
    return tuple(out)


def clouds_of(side: Measure, points: Any, masses: Any) -> tuple[Any, Any]:
    """Return the points and the masses of one side, a list with a tensor for each problem."""
    if side.starts is None:
        return [points], [masses]
    masses, points = side._replace(points=points, masses=masses).parts()
    return points, masses


def repeat_each(grad: Any, sizes: Any) -> Any:
    if (sizes == sizes[0]).all():
        even: Any = int(sizes[0])
    else:
        even = torch.as_tensor(sizes, device=grad.device)
    return grad.repeat_interleave(even)


def second_derivative(solved: list[Any], grad: Any, move: Any, *_: Any) -> tuple[Any, ...]:
    """Return the derivatives of <move, grad dW/dx> by grad and by x; None for y, a and b."""
    (ab, *alone) = solved
    w = host(array_of(move)).astype(np.float64)
    with stream_of(grad.device):
        slope = host(point_slopes(ab, (True, False))[0])
        moved = ab.hvp(w, SECOND_TOL)
        for aa in alone[:1]:
            slope = slope - host(point_slope(aa, True))
            moved = moved - 0.5 * aa.hvp(w, SECOND_TOL, both=True)
    by_x = grad * tensor_of(moved, grad.device)
    return grad.new_tensor((w * slope).sum()), by_x.to(move.dtype), None, None, None


def total_masses(result: Any) -> Any:
    p = result.problem
    if isinstance(result, BatchResult):
        return p.masses
    return (p.rows.mass, p.cols.mass)


def sample_slopes(solved: list[Any], loss: Any, needed: Any) -> list[Any]:
    """Return the derivatives of a loss by x, y, a and b, concatenated over clouds; None if not needed.

    Both sides of OT(a, a) move with a point, and its plan is symmetric: half of the sum is the slope of one side.
    """
    ab = solved[0]
    alone = solved[1:]
    masses = total_masses(ab)
    slopes = [*(point_slopes(ab, needed[:2]) if any(needed[:2]) else (None, None)), None, None]
    for k in (0, 1):
        if needed[k] and k < len(alone):
            slopes[k] = slopes[k] - for_all(point_slope(alone[k], True), slopes[k])
        if not needed[2 + k]:
            continue
        slope = mass_slope(ab, k == 0)
        if k < len(alone):
            slope = slope - for_all(0.5 * (mass_slope(alone[k], True) + mass_slope(alone[k], False)), slope)
        own = masses[k]
        other = masses[1 - k]
        constant = loss.eps * (own - other if loss.debias else 0.5 - other)
        if isinstance(ab, BatchResult):
            several = ab.problem.several
        else:
            several = None
        if several is not None:
            table = namespace(slope).asarray(constant)[:, None]
            constant = several.flat_of(namespace(slope).broadcast_to(table, (len(several), several.shape[k])), k)
        slopes[2 + k] = slope + constant
    return slopes


def for_all(slope: Any, like: Any) -> Any:
    """Repeat the slopes of a cloud that serves all problems p times, beside the slopes of the problems."""
    xp = namespace(like)
    if xp is np:
        slope = xp.asarray(host(slope))
    else:
        slope = xp.asarray(slope)
    if len(slope) == len(like):
        return slope
    return xp.concatenate([slope] * (len(like) // len(slope)))


@hinted
def gromov_loss(
    X: Tensor,
    Y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    reg: float,
    reg_m: MarginalPenalty,
    **options: Any,
) -> Any:
    """Compute the objective of `mapuot.gromov` between two clouds, differentiable once in X, Y, a and b.

    The slopes hold for a plan that its own step returns: if the plan still changes after ``steps``, they lack the rest
    of this change.

    Parameters
    ----------
    X, Y : (m, d), (n, e) tensors
        Points of two spaces that share no coordinates.
    a, b : (m,), (n,) tensors, optional
        Masses, >= 0. Default: equal masses that add up to 1.
    reg, reg_m, **options
        As in `mapuot.gromov`; the gradient holds scale_cost fixed. Where both sides are inf, slopes by masses are known
        up to a constant.

    Returns
    -------
    value : scalar tensor
        float64 where an argument is, else float32.

    See Also
    --------
    sample_loss, mapuot.gromov

    Examples
    --------
    >>> import torch, mapuot.torch
    >>> x, y = torch.rand(20, 2, requires_grad=True), torch.rand(15, 3)
    >>> mapuot.torch.gromov_loss(x, y, reg=0.05, reg_m=1.0).backward()
    >>> x.grad.shape
    torch.Size([20, 2])
    """
    X = as_tensor(X, "X")
    Y = as_tensor(Y, "Y")
    masses = (as_masses(w, name, len(z), z) for w, name, z in ((a, "a", X), (b, "b", Y)))
    options = {"reg": reg, "reg_m": reg_m} | ({"backend": "cuda"} if X.is_cuda else {}) | options

    def solve(*tensors: Any) -> tuple[Any, Any]:
        result = gromov(*(z.detach().cpu().numpy() for z in tensors), **options)
        return np.asarray(result.value), result

    def slopes(result: Any, _: Any, grad: Any, *inputs: Any) -> list[Any]:
        return [grad * torch.as_tensor(slope, device=grad.device) for slope in result.gradient()[:4]]

    return value_by(Loss(solve, slopes), X, Y, *masses)


class _FirstDerivative(torch.autograd.Function):
    """Slopes as a function of all their inputs, so that a second derivative cannot be zero by mistake."""

    @staticmethod
    def forward(slopes: Any, *depend: Any) -> Any:
        return tuple(slopes(*depend))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.second = getattr(inputs[0], "second", None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, slopes: Any, grad: Any, *depend: Any) -> Any:
        """Slopes of the problems of a batch with varying inputs, or of one answer for several weights."""
        _, at, *places = in_dims
        if at is None:
            weights = grad.expand(info.batch_size, *grad.shape)
        else:
            weights = grad.movedim(at, 0)
        depend = tuple(x if k is None else x.movedim(k, 0) for x, k in zip(depend, places, strict=True))
        batch = any(k is not None for k in places)
        if batch and None not in places:
            out = _FirstDerivative.apply(slopes, weights[:, 0], *depend)
            return tuple(x if x.ndim else x.expand(info.batch_size) for x in out), (0,) * len(out)
        # the weight of each problem in shared slopes
        if batch:
            weights = torch.diag(weights[:, 0])
        found = [_FirstDerivative.apply(slopes, w, *depend) for w in weights]
        own = ([x[i] if k is not None and x.ndim else x for x, k in zip(row, places, strict=True)]
               for i, row in enumerate(found))  # fmt: skip
        return tuple(map(torch.stack, zip(*own, strict=True))), (0,) * len(depend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.second is None:
            raise RuntimeError("mapuot.torch has no second derivatives but of squared distances of clouds, by x alone")
        return None, *ctx.second(*grads)


def solved(M: Any, a: Any, b: Any, values: Any, reg: float, reg_m: Any, options: dict[str, Any]) -> Any:
    M = as_tensor(M, "M", csr=True)
    places = None
    a, b = (as_masses(w, name, k, M) for w, name, k in zip((a, b), "ab", M.shape[-2:], strict=False))
    several = M.ndim == 3 or a.ndim == 2 or b.ndim == 2
    if values is not None:
        if not is_csr(M):
            raise TypeError("values must be None where M is dense: they are costs in the places of a sparse M")
        values = as_tensor(values, "values")
        places = array_of(M)
        if values.shape != places.data.shape or values.device != M.device:
            wanted = f"one for each of the {len(places.data)} stored costs of M, on its device"
            raise ValueError(f"values must be {wanted}, got shape {tuple(values.shape)} on {values.device}")

    def solve(a: Any, b: Any, M: Any) -> tuple[Any, Any]:
        costs, A, B = map(array_of, (M, a, b))
        if places is not None:
            costs = type(places)((costs, *places_of(places)), shape=places.shape)
        one = None
        with for_value(OF_BATCH):
            if places is None and costs.ndim == 2 and A.ndim == B.ndim == 1:
                one = one_call(costs, A, B, reg, reg_m, **options)()  # for a plain problem on a GPU
            more = options_of_value(options, reg_m)
            if one is not None and one.converged:
                result: Any = one
            else:
                result = solve_batch(costs, A, B, reg=reg, reg_m=reg_m, **more)
        return np.atleast_1d(dual_value(result)), result

    task = Loss(solve, functools.partial(first_derivatives, places), vmap=places is None)
    found = value_by(task, a, b, M if values is None else values)
    return found if several else found[0]


def first_derivatives(places: Any, result: BatchResult | Result, needed: Any, grad: Any, *inputs: Any) -> list[Any]:
    """Return grad times dW/da, dW/db, dW/dM, each in the form and on the device of its input."""
    weights = array_of(grad).astype(np.float64)
    out = []
    for tensor, need, name in zip(inputs, needed, ("rows", "cols", "plan"), strict=True):
        csr = need and is_csr(tensor)
        slope = None
        found = None
        if need and name == "plan":
            if isinstance(result, Result):
                slope = weights * result.plan
            else:
                slope = result.plan_sum(weights)
            if csr or places is not None:
                slope = in_places_of(array_of(tensor) if csr else places, slope)
        elif need:
            slope = weights[:, None] * namespace(weights).asarray(marginal_gradient(result, name))
            slope = slope.sum(0) if tensor.ndim == 1 else slope
        if slope is not None:
            found = tensor_of(slope, tensor.device)
        if csr and found is not None:
            found = torch.sparse_csr_tensor(tensor.crow_indices(), tensor.col_indices(), found, tensor.shape)
        out.append(found)
    return out


def places_of(matrix: Any) -> tuple[Any, Any]:
    return matrix.indices, matrix.indptr


def in_places_of(matrix: Any, total: Any) -> Any:
    """Return the numbers of a CSR array at the places of another, which may be unsorted or have duplicates."""
    if all(map(np.array_equal, places_of(matrix), places_of(total))):
        return total.data
    places = Sparse(matrix.data, matrix.indices, np.asarray(matrix.indptr, np.int64), matrix.shape)
    return places.taken_from(Sparse.of_matrix(total)).data
