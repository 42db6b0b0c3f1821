"""Derivatives of the optimal objective by masses and costs, or by points; and potentials away from the points.

By the envelope theorem the change of the plan does not contribute: dW/dx_i = sum_j P_ij dc(x_i, y_j)/dx_i. For the
derivatives by the masses (`mapuot.torch` and `mapuot.jax` use the same formulas), let W(a, b, M) be the dual optimum of
`solve` with the reference a b^T, potentials f and g and plan P; |.| is the mass. If rho = inf, e^(-f / rho) is 1 and
rho (1 - e^(-f / rho)) is f:

    dW/da_i = rho1 (1 - e^(-f_i / rho1)) + reg (|b| - e^(-f_i / rho1)),    dW/db alike,    dW/dM = P

The second term comes from the reference: c = a b^T contains a_i, and sum_j P_ij / a_i = e^(-f_i / rho1). Where a_i = 0
the fixed-point equation defines the potential: f_i = -reg fi1 log sum_j b_j e^((g_j - M_ij) / reg). A masked problem
has the reference a_i b_j w_ij; then sum_j w_ij b_j replaces |b|, and w_ij b_j replaces b_j.
Sources: Feydy et al. 2019, Sejourne et al. 2019.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import penalties
from ..arrays import any_of, host, namespace
from ..backends import pick
from ..backends.kernel import UNIT
from ..backends.log_matmul import multiply
from ..backends.operator import Operator
from ..penalties import F64
from ..problem.mask import MaskedReference
from ..problem.points import PointCosts, as_points, size_of
from ..problem.problem import BatchProblem
from ..problem.side import Side
from ..problem.sparse import log_sums
from ..problem.validate import as_choice, as_columns


class Gradient(NamedTuple):
    """Derivatives of the objective: x (m, d), y (n, d), a (m,), b (n,), M (m, n).

    A `PointCloud` gives x and y, and M is None; of an array or a sparse M the derivative by M is the plan, and x
    and y are None. A batch has (p, m, d) and so on, or lists if clouds have several sizes.
    ``error`` bounds ``sum_i |x_i - true|``, and the same sum over y, by the certificate: the error of the plan times
    the largest slope of the cost, plus the rounding of the sums. Where M is known it bounds ``sum_ij |M_ij - true|``,
    without the rounding of M's dtype. Where two points coincide, "euclidean" and "cityblock" have no derivative, and 0
    is used.
    """

    x: Any
    y: Any
    a: Any
    b: Any
    error: Any
    M: Any = None


def gradient(result: Any) -> Gradient:
    """Return the derivatives of the objective by the masses, and by the points of a `PointCloud` or by any other M.

    Since the plan is optimal, its change does not contribute (envelope theorem; Feydy et al. 2019). Both sides must be
    KL or balanced, with one reg_m each, and the reference a b^T. The units of ``scale_cost`` and ``scale_mass`` are
    held fixed; with ``scale_mass`` the masses are those in this unit.

    Returns
    -------
    Gradient
        ``a`` (m,), ``b`` (n,), of a `PointCloud` ``x`` (m, d) and ``y`` (n, d), of an array or a sparse M ``M`` (m, n),
        the plan; and ``error``, a bound on the summed error of x, of y, or of M. Derivatives by other costs are None.

    Raises
    ------
    ValueError, NotImplementedError
        If penalties, reference or metric are others, or several ranks share the problem.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> M = np.abs(np.arange(4.0)[:, None] - np.arange(3.0))
    >>> a = np.full(4, 0.25)
    >>> slope = mapuot.solve(M, a, reg=0.1, reg_m=1.0, tol=1e-9).gradient()
    >>> more = mapuot.solve(M, a + [1e-4, 0, 0, 0], reg=0.1, reg_m=1.0, tol=1e-9).objective
    >>> less = mapuot.solve(M, a - [1e-4, 0, 0, 0], reg=0.1, reg_m=1.0, tol=1e-9).objective
    >>> slope.M.shape, bool(abs((more - less) / 2e-4 - slope.a[0]) < 1e-6)
    ((4, 3), True)
    """
    if isinstance(result.problem, BatchProblem) and result.problem.several is None:
        return gradient_of_costs(result)
    if result.problem.cost.cloud is None and getattr(result.problem, "several", None) is None:
        return gradient_of_costs(result)
    clouds = getattr(result.problem, "several", None)
    if clouds is not None:
        errors = [slope_error(clouds.of(i), result.error_bound[i], result.problem.M_max) for i in range(len(result))]
        x, y = point_slopes(result)
        a = mass_slope(result, True)
        b = mass_slope(result, False)
        x, y, a, b = (clouds.split(flat, axis) for flat, axis in ((x, 0), (y, 1), (a, 0), (b, 1)))
        return Gradient(x, y, a, b, np.array(errors) * result.mass)
    cloud = check(result)
    if result.problem.unlike(result._backend) is None:  # the optimal plan is symmetric
        x = host(point_slope(result, True))
        y = x.copy()
    else:
        x, y = (host(z) for z in point_slopes(result))
    error = slope_error(cloud, result.error_bound, result.problem.M_max) * result.mass
    return Gradient(x, y, mass_slope(result, True), mass_slope(result, False), error)


def gradient_of_costs(result: Any) -> Gradient:
    """Return the derivatives by masses and by costs that are no points."""
    p = result.problem
    check_sides(p)
    if isinstance(p, BatchProblem):
        a, b = (marginal_gradient(result, name) for name in ("rows", "cols"))
    elif p.ranks.size > 1:
        raise NotImplementedError("gradient is for one process: comm must be None")
    else:
        a, b = (mass_slope(result, rows) for rows in (True, False))
    has_stored_plan = p.cost.held or p.cost.operator == "pairs"
    return Gradient(None, None, a, b, result.error_bound * result.mass, result.plan if has_stored_plan else None)


def cloud_of(result: Any) -> PointCosts:
    p, cloud = result.problem, result.problem.cost.cloud
    if not isinstance(cloud, PointCosts):
        raise TypeError(f"this needs M to be a PointCloud, got {p.cost.kind}")
    if p.ranks.size > 1:
        raise NotImplementedError("this is for one process: comm must be None")
    return cloud


def check(result: Any) -> PointCosts:
    cloud = cloud_of(result)
    check_problem(result.problem, cloud)
    return cloud


def check_problem(p: Any, cloud: PointCosts) -> None:
    """Raise if the formulas of the derivatives do not hold for the problem."""
    metric = cloud.core[0]
    if metric.norm == np.inf or (metric.unit and not metric.square):
        raise NotImplementedError(f"slopes by the points are not known for metric {cloud.metric!r}")
    check_sides(p)


def check_sides(p: Any) -> None:
    for side, name in ((p.rows, "reg_m[0]"), (p.cols, "reg_m[1]")):
        if side.scalar_rho is None:
            raise ValueError(f"{name} must be one number, of penalty 'kl' or 'balanced'")
    if p.unmasked != "product":
        raise ValueError("reference must be 'product'")


def rho_of(side: Side) -> float:
    """Return the reg_m of a side; ``check`` has refused sides with several values."""
    assert side.scalar_rho is not None
    return side.scalar_rho


def point_slope(result: Any, rows: bool) -> Any:
    """Return the derivative by x alone, or by y alone; for squared distances this is half the work of both."""
    return point_slopes(result, (rows, not rows))[not rows]


def point_slopes(result: Any, wanted: tuple[bool, bool] = (True, True)) -> list[Any]:
    """Return the derivatives by x and by y, None if not wanted; the points of many clouds are concatenated."""
    if getattr(result.problem, "several", None) is not None:
        return slopes_of_all(result, wanted)
    cloud = check(result)
    product = cloud.core[0].product
    if not product and not cloud.core[0].square:
        return [slope if want else None for slope, want in zip(block_slopes(result, cloud), wanted, strict=True)]
    w = 1.0 if cloud.weights is None else cloud.weights

    def of_side(rows: bool) -> Any:
        if not product:
            return chained(cloud, smooth_slope(result, cloud, rows), rows)
        if rows:
            moved = result.apply(cloud.y)
        else:
            moved = result.apply_transpose(cloud.x)
        return np.asarray(
            product * cloud.scale * w * host(moved)
        )  # "inner": d/dx_i of scale (r_i + c_j - <x_i, y_j>), weighted by P, is -scale P y

    return [of_side(rows) if want else None for rows, want in zip((True, False), wanted, strict=True)]


def slopes_of_all(result: Any, wanted: tuple[bool, bool]) -> list[Any]:
    """Return the derivatives for many clouds; for squared distances one call of the core computes all of them."""
    p, clouds = result.problem, result.problem.several
    check_problem(p, clouds.whole)
    smooth = clouds.whole.core[0].square and p.masked is None
    xp = namespace(clouds.whole.x)
    if smooth and clouds.whole.has_given_coordinates and xp is not np:
        there = namespace(result.log_u) is xp and p.each is None
        exponents = result._closed[1:] if there else [xp.asarray(z) for z in plan_exponents(p, result)]
        found = result._backend.slopes(p, None, [*exponents], wanted, None)
        return list(found) if namespace(result.log_u) is xp else [x if x is None else host(x) for x in found]
    core = clouds.solved_whole & smooth & (not clouds.whole.bits)
    sizes = [(int(places.count.sum()), clouds.whole.dim - clouds.whole.bits) for places in clouds.places]
    out = [np.empty(size) if want else None for size, want in zip(sizes, wanted, strict=True)]
    if core.any():
        exponents = [host(z) for z in plan_exponents(p, result)]
        found = pick("cpu").slopes(p.on_host(), np.flatnonzero(core), exponents, wanted, result._threads)
        for table, slope, places in zip(out, found, clouds.places, strict=True):
            if table is not None:
                table[np.repeat(core, places.count)] = slope
    if core.all() and clouds.whole.has_given_coordinates:
        return out
    ends = np.cumsum([places.count for places in clouds.places], 1)
    for i in range(len(result)):
        one = [None, None] if core[i] else point_slopes(result[i], wanted)
        for table, slope, end, places, rows in zip(out, one, ends, clouds.places, (True, False), strict=True):
            if table is not None:
                part = table[end[i] - places.count[i] : end[i]]
                part[:] = chained(clouds.of(i), part, rows) if slope is None else host(slope)
    return out


def plan_exponents(p: Any, result: Any) -> list[Any]:
    """Return log u + log a and log v + log b of a batch, -inf where the plan is 0."""
    sides = ((result.log_u, p.A), (result.log_v, p.B))
    xp = namespace(result.log_u)
    with np.errstate(invalid="ignore", divide="ignore"):
        return [xp.where(xp.isfinite(x), x + xp.log(w), -np.inf) for x, w in sides]


def smooth_slope(result: Any, cloud: PointCosts, rows: bool) -> Any:
    """Return the derivatives of scale |x - y|^2 by the core's coordinates, on their device: 2 scale (r x - P y)."""
    x, y = centred(cloud)
    if rows:
        here, there = x, y
    else:
        here, there = y, x
    moved = result._stream.moved(with_ones(there), not rows)
    xp = namespace(here)
    moved = host(moved) if xp is np else xp.asarray(moved)
    return 2 * cloud.core[1] * (moved[:, -1:] * here - moved[:, :-1])


def centred(cloud: PointCosts) -> tuple[Any, Any]:
    """Return both clouds in the core's coordinates, centred: far from the origin r x - P y would lose digits."""
    if cloud.core[0].unit:
        numeric = slice(0, cloud.dim - cloud.bits)
        return cloud.rows[:, numeric], cloud.targets[:, numeric]
    if cloud.here:
        rows, columns = cloud.here
        centre = rows.mean(0)
        return rows - centre, columns[:, : cloud.shape[1]].T - centre
    centre = cloud.x.mean(0)
    factor = 1.0 if cloud.weights is None else np.sqrt(cloud.weights)
    return (cloud.x - centre) * factor, (cloud.y - centre) * factor


def with_ones(points: Any) -> Any:
    """Add a column of ones to the points, so that one product with the plan gives its marginal, too."""
    xp = namespace(points)
    n = len(points)
    return xp.concatenate([points, xp.ones((n, 1))], axis=1)


def block_slopes(result: Any, cloud: PointCosts) -> tuple[F64, F64]:
    """Return the derivatives for any other metric from rows of the plan, by the caller's coordinates (exactly)."""
    metric, scale = cloud.core
    d = cloud.x.shape[1]
    y = cloud.y
    p = metric.norm
    factor = metric.weighted(np.ones(d) if cloud.weights is None else cloud.weights)
    gx = np.zeros_like(cloud.x)
    gy = np.zeros_like(y)
    size = max(float(np.abs(z * factor).max()) for z in (cloud.x, y)) or 1.0  # scale of the numbers that have powers
    for i0, P in result._wide_blocks():
        x = cloud.x[i0 : i0 + len(P)]
        apart = [factor[k] / size * (x[:, k, None] - y[:, k]) for k in range(d)]
        distance: Any = sum(np.abs(t) ** p for t in apart) ** (1 / p)
        weight = np.where((distance > 0) & (P > 0), P * (scale * metric.slopes(size * distance, cloud.metric)), 0.0)
        distance[weight == 0] = 1.0
        for k, t in enumerate(apart):  # d distance / d x_k = factor_k sign(t_k) (|t_k| / distance)^(p - 1)
            part = weight * (factor[k] * np.sign(t) * (np.abs(t) / distance) ** (p - 1))
            gx[i0 : i0 + len(P), k] = part.sum(1)
            gy[:, k] -= part.sum(0)
    return gx, gy


def chained(cloud: PointCosts, slope: F64, rows: bool) -> F64:
    """Convert a derivative of squared distances by the core's coordinates to the caller's coordinates."""
    if cloud.has_given_coordinates:
        return slope
    if rows:
        points, scaled = (cloud.x, cloud.rows)
    else:
        points, scaled = (cloud.y, cloud.columns[:, : len(slope)].T)
    scaled = scaled[:, : cloud.dim - cloud.bits]
    if cloud.weights is None:
        factor = 1.0
    else:
        factor = np.sqrt(cloud.weights)
    if cloud.core[0].unit:
        length = lengths(points, factor)
        with np.errstate(divide="ignore", invalid="ignore"):  # lengths may underflow
            slope = (slope - (slope * scaled).sum(1, keepdims=True) * scaled) / length
    return np.asarray(slope * factor)


def lengths(points: F64, factor: Any) -> F64:
    size = size_of(points)
    return np.asarray(size * np.sqrt(((points / size * factor) ** 2).sum(1, keepdims=True)))


def slope_error(cloud: PointCosts, bound: float, largest: float) -> float:
    """Return a bound on the error of the derivatives for a plan of mass 1 with this error bound and largest cost.

    The bound is the plan's error times the largest |dc/dx| (``steep``), plus the rounding of sums of m or n terms;
    ``sizes`` bounds their size before cancellation.
    """
    metric = cloud.core[0]
    scale = cloud.scale
    if cloud.weights is None:
        w = np.ones(cloud.dim - cloud.apart - cloud.bits)
    else:
        w = cloud.weights
    rounding = (sum(cloud.shape) + 2 * cloud.dim + 16) * UNIT
    factor = metric.weighted(w)
    root = float(factor.max() if metric.norm >= 2 else np.sqrt((factor**2).sum()))  # most of |d distance / d x|
    if metric.product:
        most = max(float(np.sqrt(((p * w) ** 2).sum(1).max())) for p in (cloud.x, cloud.y))
        steep = sizes = scale * abs(metric.product) * most
    elif not metric.square:
        bounds = metric.up_to(largest / scale)
        steep = scale * root * bounds.slope
        sizes = scale * root * bounds.sizes
    elif metric.unit:
        shortest = min(float(lengths(p, np.sqrt(w)).min()) for p in (cloud.x, cloud.y))
        if shortest > 0:
            steep = scale * root / shortest
        else:
            steep = np.inf
        sizes = 2 * steep
    else:
        reach = sum(float(np.sqrt((p * p).sum(1).max())) for p in centred(cloud))
        steep = 2 * root * float(np.sqrt(scale) * np.sqrt(largest))
        sizes = 2 * scale * root * reach
    if bound < np.inf:
        return bound * steep + rounding * sizes
    return np.inf


def mass_slope(result: Any, rows: bool) -> Any:
    """Return dW/da or dW/db; for many clouds the derivatives of all problems, concatenated."""
    clouds = getattr(result.problem, "several", None)
    if clouds is not None:
        return mass_slopes(result, rows)
    p = result.problem
    if p.cost.cloud is not None:
        check(result)
    if rows:
        side, other, f = (p.rows, p.cols, result.f)
    else:
        side, other, f = (p.cols, p.rows, result.g)
    if not (side.weight > 0).all():
        f = np.where(side.weight > 0, f, own_fixed_point(result, rows))
    if p.masked is None:
        mass = other.weight.sum()
    else:
        mass = p.shares(result._backend, other.weight, rows)
    return np.asarray(penalties.mass_slope(f, rho_of(side), p.reg, mass))


def mass_slopes(result: Any, rows: bool) -> Any:
    """Return the derivatives by the masses of many clouds, concatenated over the problems."""
    p = result.problem
    clouds = result.problem.several
    xp = namespace(result.log_u)
    if rows:
        weight, f = (p.A, result.f)
    else:
        weight, f = (p.B, result.g)
    inside = clouds.inside(not rows)
    other = p.masses[rows]
    slope = mass_slope_of(p, xp.where(weight > 0, f, 0.0), rows, xp.asarray(other)[:, None])
    if clouds.ragged:
        without = ~(weight > 0) & xp.asarray(inside)
    else:
        without = ~(weight > 0)
    if p.masked is not None or any_of(without):
        for i in np.flatnonzero(host(without.any(1)) | (p.masked is not None)):
            slope[i, xp.asarray(inside[i])] = xp.asarray(mass_slope(result[i], rows))
    return clouds.flat_of(slope, int(not rows))


def potential(result: Any, points: ArrayLike, side: str = "rows") -> F64:
    """Return the potential f (with ``side="cols"``: g) at other points (k, d), in units of M.

    ``f(x) = -reg fi log sum_j b_j exp((g_j - c(x, y_j)) / reg)``, ``fi = reg_m / (reg_m + reg)``.
    """
    rows = as_choice(side, "side", ("rows", "cols")) == "rows"
    if result.problem.masked:
        raise ValueError("mask: a masked problem has no potential away from its points, whose pairs alone it names")
    cloud = check(result)
    if not rows:
        cloud = cloud.transpose()
    return fixed_point(result, others(cloud, points), rows)


def map(result: Any, points: ArrayLike, values: ArrayLike | None = None, side: str = "rows") -> F64:
    """Return the image of any point: the mean of the targets that the point would have (the entropic map).

    ``T(x) = sum_j w_j(x) y_j``, where the weights ``b_j exp((g_j - c(x, y_j)) / reg)`` are scaled to sum 1. At the
    points of the rows T is the ``barycentric_map`` of the targets. For squared distances T(x) is
    ``x - (reg_m + reg) / (2 scale reg_m)`` times the gradient of ``potential``. M must be a `PointCloud`.

    Parameters
    ----------
    points : (k, d) array
        Points in the space of the rows.
    values : (n,) or (n, p) array, optional
        Values at the targets that are averaged instead of the points: expressions, or labels as 0 and 1.
    side : {"rows", "cols"}
        "cols" maps points in the space of the columns to the rows.

    Returns
    -------
    (k, d) array, or (k,) or (k, p) for values
        NaN where all targets with mass have an infinite cost.

    References
    ----------
    Pooladian, Niles-Weed, Entropic estimation of optimal transport maps, 2021.

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> x = np.stack(np.meshgrid(*[np.linspace(0, 1, 11)] * 2), -1).reshape(-1, 2)
    >>> result = mapuot.solve_sample(x, x + [1.0, 0.0], reg=0.01, reg_m=np.inf)
    >>> result.map([[0.5, 0.5], [0.24, 0.64]]).round(1)
    array([[1.5, 0.5],
           [1.2, 0.6]])
    """
    rows = as_choice(side, "side", ("rows", "cols")) == "rows"
    p = result.problem
    if p.masked or not isinstance(p.unmasked, str):
        raise ValueError("a map needs reference 'product' or 'uniform', which tells of new points, too, and no mask")
    cloud = cloud_of(result)
    if not rows:
        cloud = cloud.transpose()
    values, flat = as_columns(cloud.y if values is None else values, cloud.shape[1], "values")
    image: F64 = host(row_operator(result, others(cloud, points), rows).images(values))
    return image[:, 0] if flat else image


def others(cloud: PointCosts, points: Any) -> PointCosts:
    """Return the costs of other points to the columns of a cloud."""
    return cloud.beside(np.asarray(as_points(points, "points"), np.float64), "points")


def row_operator(result: Any, here: Any, rows: bool, masked: MaskedReference | None = None) -> Operator:
    """Return the operator v_j c_j w_kj exp(-M_kj / reg) of costs from points k to columns j; largest entries are 1.

    ``here``: these costs, less the constant of the problem; ``masked`` holds the weights w of a mask. A row without an
    entry has alpha -inf.
    """
    p = result.problem
    other = p.cols
    log_v = result.own_logs[1]
    log_c = p.log_reference[1]
    if not rows:
        other = p.rows
        log_v = result.own_logs[0]
        log_c = p.log_reference[0]
    with np.errstate(invalid="ignore"):
        beta = np.where(other.weight > 0, host(log_v) + log_c, -np.inf)
    operator: Any = result._backend.operator_of(here, p.reg, masked, threads=result._threads)
    alpha = np.zeros(here.shape[0])
    operator.balance(alpha, beta)
    found: Operator = operator.set_exponents(np.where(np.isfinite(alpha), alpha, -np.inf), beta)
    return found


def own_fixed_point(result: Any, rows: bool) -> F64:
    """Return the potential at the points of one side, points without mass among them."""
    p = result.problem
    cost = p.cost if p.cost.cloud is None else p.cost.cloud
    if rows:
        return fixed_point(result, cost, True, p.masked)
    return fixed_point(result, cost.transpose(), False, None if p.masked is None else p.masked.T)


def fixed_point(result: Any, here: Any, rows: bool, masked: MaskedReference | None = None) -> F64:
    """Return the potential of one side by its fixed-point equation at the points of the costs ``here``."""
    p = result.problem
    fi = 1 / (1 + p.reg / rho_of(p.rows if rows else p.cols))
    operator = row_operator(result, here, rows, masked)
    alpha = host(operator.alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_sum = np.log(host(operator.apply(np.ones(operator.shape[1])))) - alpha
    log_sum = np.where(alpha > -np.inf, log_sum, -np.inf) + p.translations[rows]
    return np.asarray(p.cost_constants[not rows] - p.reg * fi * log_sum)


def dual_value(result: Any) -> Any:
    """Return the dual values, (p,) or one, without the rounding bound of `Result.dual`, which is not continuous."""
    problem = result.problem
    xp = namespace(result.log_u)
    if isinstance(problem, BatchProblem):
        A, B = (problem.A, problem.B)
    else:
        A, B = (problem.rows.weight, problem.cols.weight)
    own = getattr(problem, "each", None)
    if xp is not np and own is None and isinstance(problem, BatchProblem) and isinstance(problem.reference, str):
        return problem.reg * (problem.c_mass - result.mass) + result._closed[0]
    if own is None:
        reg = problem.reg
    else:
        reg = xp.asarray(own.reg)
    total = reg * (xp.asarray(problem.c_mass) - xp.asarray(result.mass))
    for rows, weight, f in ((True, A, result.f), (False, B, result.g)):
        rho, hard = columns_of(problem, rows, xp)
        with np.errstate(over="ignore", invalid="ignore"):
            term = xp.where(hard, weight * f, -rho * (weight * xp.expm1(-f / rho)))
        total = total + xp.where(weight > 0, term, 0.0).sum(-1)
    return total


def marginal_gradient(result: Any, name: str) -> Any:
    """Return dW/da ("rows") or dW/db ("cols") of a batch, (p, m) or (p, n), or of one Result with masses > 0."""
    rows = name == "rows"
    if not isinstance(result.problem, BatchProblem):
        one = result.problem
        if rows:
            own, across = one.sides
        else:
            own, across = one.sides[::-1]
        return penalties.mass_slope(result.f if rows else result.g, float(own.rho[0]), one.reg, across.mass)
    problem = result.problem
    other = problem.B if rows else problem.A
    if problem.masked is None:
        mass = other.sum(1)[:, None]
    else:
        mass = problem.shares(result._backend, other.T, rows).T
    return mass_slope_of(problem, continued(result, rows), rows, mass)


def columns_of(problem: Any, rows: bool, xp: Any) -> tuple[Any, Any]:
    """Return reg_m of a side, 1 where it is hard, and whether it is; (p, 1) where problems have their own."""
    if getattr(problem, "each", None) is None:
        own = None
    else:
        own = problem.each[2 - rows]
    if own is None:
        rho = np.asarray(float((problem.rows if rows else problem.cols).rho[0]))
    else:
        rho = np.asarray(own[:, None])
    hard = np.isinf(rho)
    return xp.asarray(np.where(hard, 1.0, rho)), xp.asarray(hard)


def mass_slope_of(p: Any, f: Any, rows: bool, mass: Any) -> Any:
    """Return `penalties.mass_slope` of all problems of a batch."""
    if p.each is None:
        return penalties.mass_slope(f, p.rhos(rows), p.reg, mass)
    xp = namespace(f)
    reg = xp.asarray(p.each.reg)[:, None]
    rho, hard = columns_of(p, rows, xp)
    return xp.where(hard, penalties.mass_slope(f, np.inf, reg, mass), penalties.mass_slope(f, rho, reg, mass))


def continued(result: Any, rows: bool) -> Any:
    """Return f (or g) at every point; where the weight is 0, compute it by the fixed-point equation."""
    p = result.problem
    f, weight = (result.f, p.A) if rows else (result.g, p.B)
    log_v, other = (result.own_logs[1], p.B) if rows else (result.own_logs[0], p.A)
    if (weight > 0).all():
        return f
    xp = namespace(weight)
    rho, hard = columns_of(p, rows, xp)
    reg = p.reg if p.each is None else xp.asarray(p.each.reg)[:, None]
    fi = xp.where(hard, 1.0, 1 / (1 + reg / rho))
    constant = xp.asarray(np.reshape(p.cost_constants[not rows], (-1, 1)))
    log_v = log_v + xp.asarray(np.reshape(p.translations[rows], (-1, 1)))
    with np.errstate(divide="ignore"):
        log_w = xp.where(other > 0, log_v + xp.log(other), -np.inf)
    if p.cost.operator == "pairs":
        costs = p.cost if rows else p.cost.transpose()
        regs = np.broadcast_to(p.regs, (len(p),))
        log_s = np.stack([log_sums(costs.of(i), x, float(regs[i])) for i, x in enumerate(log_w)])
        return np.where(weight > 0, f, constant - reg * fi * log_s)
    cost = xp.asarray(p.M if rows else p.M.swapaxes(-1, -2), dtype=np.float64)
    cost = cost / -(p.reg if p.each is None else reg[:, :, None])
    if p.masked is not None:
        with np.errstate(divide="ignore"):
            cost = cost + xp.asarray(np.log(np.asarray(p.masked if rows else p.masked.T)))
    log_s = multiply(cost, log_w.T).T if cost.ndim == 2 else multiply(cost, log_w[:, :, None])[:, :, 0]
    return xp.where(weight > 0, f, constant - reg * fi * log_s)
