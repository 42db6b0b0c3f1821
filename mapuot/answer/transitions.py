"""Mass that moves between labels, shares of it and growth, with standard errors from one linear solve each.

The mass from label k of the rows to label l of the columns is T = sum_ij L_ik P_ij R_jl. Its derivatives by the masses
follow from one solve of the system of implicit.py, with the right sides L (P R) and R (P^T L). For points that are
independent draws, standard_error.py turns derivatives into standard errors; of a quotient T / D the derivative is
(dT - T / D dD) / D.
"""

from typing import Any, NamedTuple

import numpy as np

from ..arrays import host
from ..penalties import F64
from ..problem.labels import as_labels, classes_of, one_hot
from ..ranks import ALONE
from ..status import FAILED
from . import slopes
from .curvature import potentials_moved
from .implicit import MOST_STEPS, TOL
from .standard_error import as_draws, error_of_side


class Estimate(NamedTuple):
    """Values and their standard errors, arrays of one shape."""

    value: F64
    error: F64


class Transitions(NamedTuple):
    """Masses that move between labels.

    ``rows`` (k,) and ``cols`` (l,) are the sorted labels; ``mass`` and ``shares`` are (k, l), ``growth`` is (k,). A row
    of ``shares`` has the sum 1: the fates of a label's mass. ``growth`` is the mass that leaves a label over the mass
    that it was given.
    """

    rows: Any
    cols: Any
    mass: Estimate
    shares: Estimate
    growth: Estimate


class MassSlopes(NamedTuple):
    """Derivatives of numbers by a and by b, (numbers, m) and (numbers, n)."""

    a: F64
    b: F64

    def over(self, quotient: F64, other: "MassSlopes", total: F64) -> "MassSlopes":
        """Return the derivatives of the quotients of these numbers and others with the value ``total``."""
        return MassSlopes(*((x - quotient[:, None] * y) / total[:, None] for x, y in zip(self, other, strict=True)))


def transitions(result: Any, row_labels: Any, col_labels: Any, draws: Any = None) -> Transitions:
    """Return the mass that moves between labels, the shares of it and the growth, with standard errors.

    The errors belong to samples: the points of each side, with their labels, were drawn independently, and the sums of
    a and b are known. They say nothing where the masses are no samples. Both sides must be KL or balanced, with one
    reg_m each, and the reference a b^T. Each pair of labels takes one linear solve, as `Result.hvp` does.

    Parameters
    ----------
    row_labels, col_labels : (m,), (n,) arrays
        A label for each row and each column, of any sortable type.
    draws : pair of integers >= 2, optional
        Numbers of draws behind a and b, as in `Result.standard_error`.

    Returns
    -------
    Transitions
        ``rows``, ``cols``, and ``mass``, ``shares`` and ``growth``, each a pair (value, error). Labels that send
        nothing have NaN as shares.

    Raises
    ------
    ValueError
        If penalties or the reference are others, or the labels do not fit.
    NotImplementedError
        Over several ranks.

    See Also
    --------
    Result.push, Result.pull : shares of each point
    Result.standard_error : of the value

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(200, 2)), rng.normal(size=(150, 2)) + [0.5, 0.0]
    >>> result = mapuot.solve_sample(x, y, reg=0.5, reg_m=10.0)
    >>> found = result.transitions(x[:, 0] > 0, y[:, 0] > 0)
    >>> found.shares.value.round(2)
    array([[0.65, 0.35],
           [0.04, 0.96]])
    >>> found.shares.error.round(2)
    array([[0.06, 0.06],
           [0.02, 0.02]])
    """
    p = result.problem
    if p.ranks.size > 1:
        raise NotImplementedError("transitions needs the whole plan in one process, without comm")
    slopes.check_sides(p)
    sides = [
        as_labels(host(given), size, name)
        for given, size, name in zip((row_labels, col_labels), p.shape, ("row_labels", "col_labels"), strict=True)
    ]
    classes = [classes_of(x, ALONE, name) for x, name in zip(sides, ("row_labels", "col_labels"), strict=True)]
    L, R = (np.asarray(one_hot(x, names), np.float64) for x, names in zip(sides, classes, strict=True))
    to_labels = np.asarray(host(result.apply(R)))  # (m, l)
    from_labels = np.asarray(host(result.apply_transpose(L)))  # (n, k)
    mass = L.T @ to_labels
    k, count = mass.shape
    by_mass = slopes_of_masses(result, L, R, to_labels, from_labels)
    by_total = MassSlopes(*(x.reshape(k, count, -1).sum(1) for x in by_mass))
    total = mass.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = mass / total[:, None]
        whole = MassSlopes(*(np.repeat(x, count, 0) for x in by_total))
        by_share = by_mass.over(shares.ravel(), whole, np.repeat(total, count))
        given = L.T @ host(p.rows.weight)
        growth = total / given
        by_growth = by_total.over(growth, MassSlopes(L.T, np.zeros((k, p.shape[1]))), given)
    pair = as_draws(draws)
    estimates = [
        Estimate(value, np.reshape(errors_of(result, slopes_of_value, pair), value.shape))
        for value, slopes_of_value in ((mass, by_mass), (shares, by_share), (growth, by_growth))
    ]
    return Transitions(classes[0], classes[1], *estimates)


def slopes_of_masses(result: Any, L: F64, R: F64, to_labels: F64, from_labels: F64) -> MassSlopes:
    """Return the derivatives of the mass from each label to each, (k l, m) and (k l, n); 0 at points without mass."""
    found: tuple[list[F64], list[F64]] = ([], [])
    p = result.problem
    factors = [mass_factor(p, side, x) for side, x in ((p.rows, result.f), (p.cols, result.g))]
    for k in range(L.shape[1]):
        for j in range(R.shape[1]):
            right = L[:, k] * to_labels[:, j], R[:, j] * from_labels[:, k]
            moved = potentials_moved(result, *right, False, TOL, MOST_STEPS, "transitions")
            for slopes_of_side, factor, x in zip(found, factors, moved, strict=True):
                slopes_of_side.append(np.where(factor > 0, factor * host(x), 0.0))
    return MassSlopes(*map(np.stack, found))


def mass_factor(problem: Any, side: Any, potential: Any) -> F64:
    """Return (1 + reg / rho) e^(-f / rho), and 0 at points without mass (implicit.py)."""
    rho = slopes.rho_of(side)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = (1 + problem.reg / rho) * np.exp(-host(potential) / rho)
    return np.asarray(np.where(host(side.weight) > 0, factor, 0.0))


def errors_of(result: Any, by_masses: MassSlopes, draws: tuple[int | None, int | None]) -> F64:
    """Return the standard errors of the numbers with these derivatives; inf if the solve failed."""
    if result.status in FAILED:
        return np.full(len(by_masses.a), np.inf)
    sides = zip(result.problem.sides, by_masses, draws, strict=True)
    parts = (error_of_side(np.broadcast_to(host(side.weight), slope.shape), slope, n) for side, slope, n in sides)
    return np.asarray(np.hypot(*parts))
