"""Standard errors of values between samples, from the derivatives by the masses.

Let the points of each side be independent draws with equal masses a_i = A / m, and A fixed. To first order the value
moves by sum_i phi_i (a_i - E a_i), phi = dW/da, and alike by psi = dW/db, so that

    se^2 = A^2 var(phi) / m + B^2 var(psi) / n

With masses that differ, sum_i a_i^2 (phi_i - mean)^2 m / (m - 1) takes the place of A^2 var(phi) / m; mean is weighted
by a. Sources: del Barrio, Gonzalez Sanz, Loubes, Niles-Weed, An improved central limit theorem and fast convergence
rates for entropic transportation costs, 2023; Goldfeld, Kato, Rioux, Sadhu, Limit theorems for entropic optimal
transport maps and the Sinkhorn divergence, 2024.
"""

from typing import Any

import numpy as np

from ..arrays import host, namespace
from ..errors import shown
from ..penalties import F64
from ..problem.problem import BatchProblem
from ..status import FAILED
from . import slopes


def standard_error(result: Any, draws: Any = None) -> Any:
    """Return the standard error of the value between two samples, from the derivatives by the masses.

    It belongs to ``objective`` if the points of each side were drawn independently, one mass for each draw, and the
    sums of a and b are known. It says nothing where the masses are no samples, as in images or after a choice of
    points. Both sides must be KL or balanced, with one reg_m each, and the reference a b^T. ``gap`` bounds the
    error of the solve.

    Parameters
    ----------
    draws : pair of integers >= 2, optional
        Numbers of draws behind a and b, for histograms: a_i is then the count of value i times sum(a) over the draws.
        By default each point with mass is one draw.

    Returns
    -------
    float, or (p,) array of a batch
        In units of the value; inf if a side has one draw only, or the solve failed.

    Raises
    ------
    ValueError
        If penalties or the reference are others, or ``draws`` is no such pair.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> result = mapuot.solve_sample(rng.normal(size=(400, 1)), rng.normal(size=(300, 1)) + 2, reg=0.5, reg_m=np.inf)
    >>> print(f"{result.objective:.2f} +- {result.standard_error():.2f}")
    4.78 +- 0.31
    """
    slopes.check_sides(result.problem)
    sides = sides_of(result)
    parts = (error_of_side(*side, n) for side, n in zip(sides, as_draws(draws), strict=True))
    error = np.where(np.isin(result.status, FAILED), np.inf, np.hypot(*parts))
    if isinstance(result.problem, BatchProblem):
        return error
    return float(error)


def sides_of(result: Any) -> list[tuple[F64, F64]]:
    """Return (masses, derivatives by them) of both sides, (m,) or (p, m) on the host; 0 where there is no mass."""
    p = result.problem
    found = []
    for rows in (True, False):
        if isinstance(p, BatchProblem):
            weight = host(p.A if rows else p.B)
        else:
            weight = host((p.rows if rows else p.cols).weight)
        slope = np.where(weight > 0, host(slope_with_mass(result, rows)), 0.0)
        found.append((weight, slope))
    return found


def slope_with_mass(result: Any, rows: bool) -> Any:
    """Return dW/da or dW/db, of many clouds padded; entries of points without mass are arbitrary."""
    p = result.problem
    if not isinstance(p, BatchProblem):
        return slopes.mass_slope(result, rows)
    if p.several is None or p.masked is not None:
        return slopes.marginal_gradient(result, "rows" if rows else "cols")
    weight, f = (p.A, result.f) if rows else (p.B, result.g)
    xp = namespace(weight)
    other = xp.asarray(p.masses[rows])[:, None]
    return slopes.mass_slope_of(p, xp.where(weight > 0, f, 0.0), rows, other)


def error_of_side(weight: F64, slope: F64, draws: float | None) -> Any:
    """Return the part of one side in se (squares of both parts add up to its square); inf for one draw."""
    total = weight.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = weight / total
        apart = total * (slope - (share * slope).sum(-1, keepdims=True))
        if draws is not None:
            return np.hypot.reduce(np.sqrt(share / (draws - 1)) * apart, axis=-1)  # its squares may leave float64
        n = (weight > 0).sum(-1)
        return np.where(n > 1, np.hypot.reduce(share * apart, axis=-1) * np.sqrt(n / (n - 1)), np.inf)


def self_slope(result: Any) -> F64:
    """Return half the derivative of OT(a, a) by a, of all problems of a batch, (p, n)."""
    (_, first), (_, second) = sides_of(result)
    return 0.5 * (first + second)


def error_of_divergence(ab: Any, slope_a: Any, slope_b: Any, draws: Any = None) -> F64:
    """Return standard errors (p,) of OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2; ``slope_a``, ``slope_b``: `self_slope`."""
    sides = zip(sides_of(ab), (slope_a, slope_b), as_draws(draws), strict=True)
    parts = (error_of_side(weight, slope - own[:, : slope.shape[1]], n) for (weight, slope), own, n in sides)
    return np.where(np.isin(ab.status, FAILED), np.inf, np.hypot(*parts))


def as_draws(draws: Any) -> tuple[int | None, int | None]:
    if draws is None:
        return None, None
    pair = tuple(draws) if isinstance(draws, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(n, (int, np.integer)) and n >= 2 for n in pair):
        raise ValueError(f"draws must be a pair of integers >= 2, got {shown(draws)}")
    return pair
