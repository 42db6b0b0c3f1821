"""The kernel losses of GeomLoss, half the squared norm of a - b for a kernel k, with their exact derivatives.

    L = sum_kl w_k w_l k(z_k, z_l) / 2,   z: the points x and y together,   w = (a, -b)
    dL/dw_k = sum_l w_l k(z_k, z_l),   dL/dz_k = w_k sum_l w_l (k'(r_kl) / r_kl) (z_k - z_l),   r_kl = |z_k - z_l|

One sweep over the pairs computes each distance once, in float64, for the value and the derivatives. The derivative of
|z_k - z_l| is 0 where two points coincide. Source of the definitions: Feydy et al. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .settings import Settings


@dataclass
class DistanceSettings(Settings):
    """How many distances a sweep holds."""

    pairs: int = 1 << 22  # of all problems, for one buffer of distances: 32 MiB


DISTANCES = DistanceSettings()


def energy(r: Any, blur: float) -> tuple[Any, Any]:
    """Return k(r) = -r and k'(r) / r."""
    return -r, -reciprocal(r)


def gaussian(r: Any, blur: float) -> tuple[Any, Any]:
    """Return k(r) = exp(-r^2 / (2 blur^2)) and k'(r) / r."""
    k = torch.exp(-0.5 * (r / blur) ** 2)
    return k, -k / blur**2


def laplacian(r: Any, blur: float) -> tuple[Any, Any]:
    """Return k(r) = exp(-r / blur) and k'(r) / r."""
    k = torch.exp(-r / blur)
    return k, -k / blur * reciprocal(r)


KERNELS = {"energy": energy, "gaussian": gaussian, "laplacian": laplacian}


def reciprocal(r: Any) -> Any:
    return torch.where(r > 0, 1 / r, 0.0)


class KernelSums(NamedTuple):
    """Sums over the pairs of p problems: K w (p, k), and the derivative of L by the points, (p, k, d) or None."""

    potential: Any
    slope: Any


def kernel_sums(name: str, blur: float, z: Any, w: Any, needs_slope: bool) -> KernelSums:
    """Sum over all pairs of the points z (p, k, d) with signed masses w (p, k)."""
    z = z.detach().double()
    w = w.detach().double()
    z = z - z.mean(1, keepdim=True)  # products below lose the digits of a common part
    p, k, _ = z.shape
    kernel = KERNELS[name]
    potential = torch.zeros_like(w)
    turns = torch.zeros_like(w)  # sum_l w_l k'(r_kl) / r_kl
    moved = torch.zeros_like(z)  # sum_l w_l k'(r_kl) / r_kl z_l
    wz = w[:, :, None] * z
    step = max(1, DISTANCES.pairs // (p * k))
    for i0 in range(0, k, step):  # these points with themselves and with all later ones
        i1 = min(i0 + step, k)
        r = torch.cdist(z[:, i0:i1], z[:, i0:], compute_mode="donot_use_mm_for_euclid_dist")
        value, factor = kernel(r, blur)
        later = value[:, :, i1 - i0 :]
        potential[:, i0:i1] += product(value, w[:, i0:])
        potential[:, i1:] += product(later.mT, w[:, i0:i1])
        if needs_slope:
            later = factor[:, :, i1 - i0 :].mT
            turns[:, i0:i1] += product(factor, w[:, i0:])
            turns[:, i1:] += product(later, w[:, i0:i1])
            moved[:, i0:i1] += factor @ wz[:, i0:]
            moved[:, i1:] += later @ wz[:, i0:i1]
    slope = w[:, :, None] * (turns[:, :, None] * z - moved) if needs_slope else None
    return KernelSums(potential, slope)


def product(matrix: Any, vector: Any) -> Any:
    return (matrix @ vector[:, :, None])[:, :, 0]


def check_finite(**given: Any) -> None:
    """Raise ValueError if an argument holds NaN or inf."""
    for name, z in given.items():
        if not z.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or inf")


class KernelAnswer(NamedTuple):
    """Value (p,) and derivatives of a kernel loss by x, y, a and b; derivatives of all problems are concatenated."""

    value: Any
    slopes: tuple[Any, Any, Any, Any]


def kernel_answer(name: str, blur: float, sides: Any, needs_slope: bool) -> KernelAnswer:
    """Compute a loss; ``sides``: (points, masses) of x and of y, lists of one tensor for each problem."""
    (x, a), (y, b) = sides
    sizes = {(len(one), len(other)) for one, other in zip(x, y, strict=True)}
    if len(sizes) == 1:
        groups = [(torch.stack([*x]), torch.stack([*a]), torch.stack([*y]), torch.stack([*b]))]
    else:
        groups = [tuple(z[None] for z in one) for one in zip(x, a, y, b, strict=True)]
    found = []
    for x_, a_, y_, b_ in groups:
        m = x_.shape[1]
        if not (x_.numel() and y_.numel()):
            raise ValueError(f"{'y' if x_.numel() else 'x'} must be a non-empty matrix of points (m, d)")
        w = torch.cat([a_, -b_], 1)
        sums = kernel_sums(name, blur, torch.cat([x_, y_], 1), w, needs_slope)
        value = 0.5 * (w.detach().double() * sums.potential).sum(1)
        by_masses = sums.potential[:, :m], -sums.potential[:, m:]
        by_points = (sums.slope[:, :m], sums.slope[:, m:]) if needs_slope else (None, None)
        if not value.isfinite().all():
            check_finite(x=x_, y=y_, a=a_, b=b_)
        found.append((value, *by_points, *by_masses))
    value, *slopes = zip(*found, strict=True)
    parts = (None if z[0] is None else torch.cat([one.flatten(0, 1) for one in z]) for z in slopes)
    return KernelAnswer(torch.cat(value), tuple(parts))  # type: ignore[arg-type]
