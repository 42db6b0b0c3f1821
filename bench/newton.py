"""The independent answer: damped Newton on the reduced semi-dual, numpy, float64, log domain, dense Cholesky.

With x = log v and u = (a / K v)^fi1 put in (the best f for this g), the dual of KL-unbalanced transport is

    D(x) = rho1 sum(a - r) + rho2 sum(b - q) + reg (|c| - mass P),  q = b e^(-reg x / rho2),  r = P 1, s = P^T 1
    dD/dx = reg (q - s),   -d2D/dx2 = reg (diag(s + k2 q) - fi1 P^T diag(1/r) P),   k2 = reg / rho2

strictly concave, so its maximum is the answer whatever the path. The best common translation of x is known,
log(sum q / sum r) / (1 - fi1 + k2), and comes before every step: with unequal masses it can be 1e6. No code is
shared with mapuot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

MAX_STEPS = 200
LARGEST_STEP = 20.0  # of log v in one Newton step


@dataclass
class Point:
    """The semi-dual and what Newton needs at one x."""

    x: Any
    log_u: Any
    P: Any
    r: Any
    s: Any
    q: Any
    value: float


@dataclass
class Answer:
    log_u: Any
    log_v: Any
    P: Any
    step: float  # the last Newton step, max |change of log v|: an estimate of the error left


class SemiDual:
    def __init__(self, M: Any, a: Any, b: Any, reg: float, rho: tuple[float, float]) -> None:
        self.a, self.b, self.reg, self.rho = a, b, reg, rho
        self.fi, self.k2 = rho[0] / (rho[0] + reg), reg / rho[1]
        self.log_a = np.log(a)
        self.log_k = self.log_a[:, None] + np.log(b) - M / reg
        self.scale = rho[0] * a.sum() + rho[1] * b.sum()

    def at(self, x: Any) -> Point:
        z = self.log_k + x
        top = z.max(1)
        z -= top[:, None]
        np.exp(z, out=z)
        log_s = top + np.log(z.sum(1))
        log_u = self.fi * (self.log_a - log_s)
        z *= np.exp(log_u + top)[:, None]
        r, s = z.sum(1), z.sum(0)
        with np.errstate(over="ignore"):
            q = self.b * np.exp(-self.k2 * x)
        value = self.rho[0] * np.sum(self.a - r) + self.rho[1] * np.sum(self.b - q) - self.reg * r.sum()
        return Point(x, log_u, z, r, s, q, float(value))

    def noise(self, p: Point) -> float:
        """Rounding of D: its terms, and exponents as large as x."""
        return float(self.scale * (1e-13 + 1e-16 * np.abs(p.x).max()))

    def translated(self, x: Any) -> Point:
        """The point of the line x + constant where D is largest."""
        p = self.at(x)
        shift = np.log(p.q.sum() / p.r.sum()) / (1 - self.fi + self.k2)
        return self.at(x + shift) if abs(shift) > 1e-3 else p

    def newton_step(self, p: Point) -> Any:
        """Solve (diag(s + k2 q) - fi P^T diag(1/r) P) dx = q - s, scaled to a unit diagonal first."""
        diagonal = p.s + self.k2 * p.q
        scale = 1 / np.sqrt(diagonal)
        half = p.P * np.sqrt(self.fi / p.r)[:, None]
        half *= scale
        H = -(half.T @ half)
        H[np.diag_indices_from(H)] += 1.0
        return scale * cho_solve(cho_factor(H, overwrite_a=True), scale * (p.q - p.s))

    def climb(self, x: Any) -> tuple[Point, float]:
        """Newton with backtracking until the step is at rounding level; the best point of the last steps."""
        p, tail = self.translated(x), []
        for _ in range(MAX_STEPS):
            dx = self.newton_step(p)
            step = float(np.abs(dx).max())
            slope = self.reg * float((p.q - p.s) @ dx)
            t = min(1.0, LARGEST_STEP / step)
            if step < 1e-4 or slope < self.noise(p):  # D itself no longer resolves the progress
                p = self.at(p.x + t * dx)
                tail.append((step, p))
                if step < 1e-13 or (step < 1e-4 and len(tail) > 3 and step > 0.1 * min(s for s, _ in tail[:-1])):
                    break
            else:
                p = self.search(p, dx, t, slope)
        if not tail:
            raise RuntimeError(f"Newton did not converge: last step {step:.1e}")
        return min(tail, key=lambda pair: pair[0])[::-1]

    def search(self, p: Point, dx: Any, t: float, slope: float) -> Point:
        """Backtrack from t until D rises (Armijo)."""
        while t > 1e-12:
            trial = self.translated(p.x + t * dx)
            if trial.value >= p.value + 1e-4 * t * slope - 0.01 * self.noise(p):
                return trial
            t *= 0.5
        raise RuntimeError("Newton: no ascent")


def solve(M: Any, a: Any, b: Any, reg: float, reg_m: Any) -> Answer:
    """The optimal potentials and plan, reg lowered in steps of 4 from 0.1 range(M)."""
    rho = (float(reg_m),) * 2 if np.ndim(reg_m) == 0 else tuple(float(r) for r in reg_m)
    spread = float(M.max() - M.min())
    levels = [reg]
    while levels[-1] * 4 < 0.1 * spread:
        levels.append(levels[-1] * 4)
    g, p, step = np.zeros(len(b)), None, np.inf
    for level in reversed(levels):
        semi = SemiDual(M, a, b, level, rho)
        p, step = semi.climb(g / level)
        g = level * p.x
    assert p is not None
    if not step < 1e-4:
        raise RuntimeError(f"Newton did not converge: last step {step:.1e}")
    return Answer(p.log_u, p.x, p.P, step)
