"""Products with the second derivative of the optimal objective of a PointCloud by the points of the rows.

The slope of row i is sum_j P_ij c'_ij with c'_ij = dc(x_i, y_j)/dx_i. If the points move in a direction w, the plan
changes by dP_ij = P_ij (df_i + dg_j - h_ij) / reg with h_ij = c'_ij . w_i, and

    (H w)_i = sum_j P_ij c''_ij w_i + sum_j dP_ij c'_ij.

The changes df, dg of the potentials preserve r = a e^(-f / rho1) and s = b e^(-g / rho2):

    (1 + reg / rho1) r df + P dg = sum_j P_ij h_ij,        P^T df + (1 + reg / rho2) s dg = sum_i P_ij h_ij

The matrix of this system is symmetric and, unless both sides are balanced, strictly diagonally dominant. dg is
eliminated: conjugate gradients on the rows take half as many steps as on both sides; a step takes one product by P and
one by P^T. Where clusters hardly exchange mass, they would need thousands of steps: a Cholesky factor of the matrix on
the smaller side follows once they have taken as long.

If a cloud is transported to itself and both sides move, P is symmetric, h_ij = c'_ij . (w_i - w_j) and df = dg. One
system remains: (1 + reg / rho) r df + P df = sum_j P_ij h_ij. Divided by r, its eigenvalues lie within [1, 2] for a
positive kernel, so that some ten products by P are enough at every reg.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import host, namespace
from ..errors import ConvergenceWarning, warn
from ..penalties import F64
from ..problem.validate import as_count, as_numbers, as_positive
from .settings import CURVATURE
from .slopes import UNIT, check, rho_of, smooth_slope, with_ones

CONSTANT = 1e-3  # of the mean diagonal, along constants, which balanced sides leave undetermined
LEAST_SHIFT, SHIFT_GROWS = 1e-14, 20.0  # of the diagonal, where rounding leaves the matrix without a factor


def hvp(result: Any, w: ArrayLike, tol: float = 1e-6, max_steps: int = 1000, both: bool = False) -> F64:
    """Return the second derivative of the objective by the row points of a `PointCloud`, times w.

    Newton's method and trust regions use this product. The metric must be "sqeuclidean", and both sides must be KL or
    balanced with one reg_m each. No matrix is formed: each step of conjugate gradients on the system of the potentials
    takes two products with the plan. If they are slow, and the smaller side has at most 4096 points, a Cholesky factor
    solves the system, in the memory of two plans.

    Parameters
    ----------
    w : (m, d) array
        A direction: the move of each point x.
    tol : float
        Relative residual where the conjugate gradients stop.
    max_steps : int
        Most steps; a warning is given if neither they nor the factor reach ``tol``.
    both : bool
        For a cloud with itself, with equal masses and reg_m: move the points of both sides by w, as self terms of a
        debiased loss need. A step then takes one product.

    Returns
    -------
    (m, d) array
        In units of mass times cost over length squared, times w, to within tol and the error of the plan.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.random.default_rng(0).random((40, 2))
    >>> result = mapuot.solve(mapuot.PointCloud(x, x + 0.1), reg=0.05, reg_m=1.0)
    >>> shift = np.ones((40, 2))  # of all points together, along which the slope of the objective grows by
    >>> float((shift * result.hvp(shift)).sum().round(1))
    2.9
    """
    cloud = check(result)
    if not cloud.core[0].square or cloud.core[0].unit:
        raise NotImplementedError(f"hvp is for metric 'sqeuclidean', got {cloud.metric!r}")
    tol = as_positive(tol, "tol")
    max_steps = as_count(max_steps, "max_steps")
    if both and (unlike := result.problem.unlike(result._backend)):
        raise ValueError(f"both must be False: rows and columns are not the same problem, see {unlike}")
    weights = as_numbers(w, "w", f"finite, of the shape {cloud.x.shape} of x", cloud.x.shape)
    if cloud.weights is None:
        factor = 1.0
    else:
        factor = np.sqrt(cloud.weights)
    numeric = slice(0, cloud.dim - cloud.bits)
    centre = cloud.rows[:, numeric].mean(0)
    x = cloud.rows[:, numeric] - centre
    y = cloud.targets[:, numeric] - centre
    moved = product(result, x, y, 2 * cloud.core[1], factor * weights.astype(np.float64), bool(both), tol, max_steps)
    return np.asarray(factor * moved)


def product(result: Any, x: F64, y: F64, slope: float, w: F64, both: bool, tol: float, max_steps: int) -> F64:
    """Return H w for costs slope / 2 |x - y|^2; ``both``: y is x and moves with x, and P is symmetric."""
    reg = result.problem.reg
    r = result.row_marginal
    along = (x * w).sum(1)
    gradient = host(smooth_slope(result, result.problem.cost.cloud, True))
    moved = result.apply_transpose(np.column_stack([w, along]))
    rows = (gradient * w).sum(1)
    cols = slope * (moved[:, -1] - (y * moved[:, :-1]).sum(1))
    df, dg = potentials_moved(result, rows, cols, both, tol, max_steps)
    image = result.apply(with_ones(y) * dg[:, None])
    out = slope * (r[:, None] * w - (moved[:, :-1] if both else 0.0))
    out += (df[:, None] * gradient + slope * (image[:, -1:] * x - image[:, :-1])) / reg
    for i0, P in result._wide_blocks():
        here = slice(i0, i0 + len(P))
        turned = along[here, None] - w[here] @ y.T  # (x_i - y_j) . w_i
        turned = P * (turned + along - x[here] @ w.T if both else turned)
        out[here] -= slope**2 / reg * (turned.sum(1)[:, None] * x[here] - turned @ y)
    return np.asarray(2 * out if both else out)


def potentials_moved(
    result: Any, rows: F64, cols: F64, both: bool, tol: float, max_steps: int, name: str = "hvp"
) -> tuple[F64, F64]:  # fmt: skip
    """Return (df, dg) of the equations with these right sides; ``both``: one cloud on both sides, df = dg.

    ``name``: the caller's result, for a warning where the equations are not solved to ``tol``.
    """
    mass = result.mass  # divide by the mass: squares of masses of 1e-160 would be 0
    on_rows = diagonal(result, "rows", result.row_marginal)
    on_cols = diagonal(result, "cols", result.col_marginal)
    rows = rows / mass
    cols = cols / mass

    def image(step: F64) -> F64:
        if both:
            return np.asarray(on_rows * step + result.apply(step) / mass)
        of_cols = result.apply_transpose(step) / mass / on_cols
        return np.asarray(on_rows * step - result.apply(of_cols) / mass)

    if both:
        left = rows + cols
        size = float((left**2 / on_rows).sum())
    else:
        left = rows - result.apply(cols / on_cols) / mass
        size = float((rows**2 / on_rows).sum() + (cols**2 / on_cols).sum())
    allowed = max(tol, 2 * UNIT) ** 2 * size
    m, n = result.problem.shape
    may_factor = not both and min(m, n) <= CURVATURE.most_factored and m * n <= CURVATURE.most_pairs
    most = max_steps
    if may_factor and result._backend.name != "cuda":  # products on a GPU are quicker than the host's factor
        most = min(max_steps, CURVATURE.first_steps + int(CURVATURE.steps_a_point * min(m, n)))
    df, rest = conjugate_gradients(image, left, on_rows, allowed, most)
    if may_factor and not rest <= allowed:
        df, dg, rest = moved_by_factor(result, rows, cols)
    elif both:
        dg = df
    else:
        dg = (cols - result.apply_transpose(df) / mass) / on_cols
    if not rest <= allowed:
        if name == "hvp":
            cure = "raise max_steps or tol"
        else:
            cure = "raise reg"
        warn(f"{name} not converged after {max_steps} steps: {cure}", ConvergenceWarning)
    return df, dg


def moved_by_factor(result: Any, rows: F64, cols: F64) -> tuple[F64, F64, float]:
    """Return (df, dg) by a Cholesky factor of the equations of the smaller side, and the square of their residual."""
    m, n = result.problem.shape
    xp = namespace(result.plan)
    share = xp.asarray(result.plan, np.float64) / result.mass
    rates = [result.problem.reg / rho_of(side) for side in (result.problem.rows, result.problem.cols)]
    rows, cols = map(xp.asarray, (rows, cols))
    turned = m > n
    if turned:
        share = xp.ascontiguousarray(share.T)
        rates = rates[::-1]
        rows, cols = cols, rows
    sums = share.sum(1), share.sum(0)  # not the last pass's marginals, which differ by its error
    on_rows, on_cols = (xp.where(x > 0, (1 + k) * x, 1.0) for k, x in zip(rates, sums, strict=True))
    matrix = share @ (share / on_cols).T
    matrix *= -1.0
    xp.fill_diagonal(matrix, 0.0)
    # a sum of positive terms: on_rows less the diagonal of the product would cancel
    own = (rates[0] + rates[1] / (1 + rates[1])) * sums[0] - matrix.sum(1)
    own = xp.where(sums[0] > 0, own, 1.0)
    xp.fill_diagonal(matrix, own)
    if max(rates) == 0:
        matrix += CONSTANT * float(own.mean()) / len(own)
    left = rows - share @ (cols / on_cols)
    df = solution(xp, matrix, on_rows, left)
    dg = (cols - df @ share) / on_cols
    rest = rows - on_rows * df - share @ dg
    residual = float((rest**2 / on_rows).sum())
    df = host(df)
    dg = host(dg)
    if turned:
        return (dg, df, residual)
    return (df, dg, residual)


def solution(xp: Any, matrix: Any, scale: Any, left: Any) -> Any:
    """Solve positive definite equations, with the least shift along ``scale`` that leaves a factor, and refine once."""
    shift = 0.0
    for _ in range(12):
        if shift:
            shifted = matrix + xp.diag(shift * scale)
        else:
            shifted = matrix
        found = solved(xp, shifted, left)
        if bool(xp.isfinite(found).all()):
            return found + solved(xp, shifted, left - matrix @ found)
        shift = max(LEAST_SHIFT, SHIFT_GROWS * shift)
    return found


def solved(xp: Any, matrix: Any, left: Any) -> Any:
    """Return the solution by LAPACK or cuSOLVER; NaN if the matrix is not positive definite."""
    if xp is not np:
        from cupyx.lapack import posv  # noqa: PLC0415 - loads cuSOLVER

        return posv(matrix, left)
    from scipy.linalg.lapack import dposv  # noqa: PLC0415 - on first use

    _, found, failed = dposv(matrix.T, left, lower=True)
    if failed:
        return np.full(len(left), np.nan)
    return found


def diagonal(result: Any, name: str, marginal: F64) -> F64:
    rho = rho_of(getattr(result.problem, name))
    return np.where(marginal > 0, (1 + result.problem.reg / rho) * (marginal / result.mass), 1.0)


def conjugate_gradients(
    product: Callable[[F64], F64], left: F64, on: F64, allowed: float, max_steps: int
) -> tuple[F64, float]:  # fmt: skip
    """Solve ``product(d) = left`` with the diagonal preconditioner ``on``.

    Return d and the square of its residual, sum rest_i^2 / on_i; steps end once it is at most ``allowed``.
    """
    found = np.zeros(len(left))
    z = left / on
    step = z
    now = float(left @ z)
    for _ in range(max_steps):
        if now <= allowed:
            break
        image = product(step)
        along = float(step @ image)
        if not along > 0:  # balanced sides leave a common shift undetermined: the residual is rounding
            return found, allowed
        length = now / along
        found = found + length * step
        left = left - length * image
        z = left / on
        before = now
        now = float(left @ z)
        step = z + now / before * step
    return found, now
