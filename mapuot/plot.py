"""Pictures of results: convergence, plan and marginals, maps in the plane, masses made and lost, a path of regs.

Every function draws into ``ax``, by default axes of a new figure, and returns it. Matplotlib is imported on first use.
A plan is read block by block: no function holds the whole plan.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from .answer.result import Result
from .answer.tensors import taken
from .api.log_matmul import log_matmul
from .arrays import host
from .penalties import F64
from .problem.grid import GridCosts
from .problem.sparse import is_sparse
from .problem.validate import as_choice, as_count, as_numbers, as_share

__all__ = ["arrows", "convergence", "links", "masses", "path", "plan"]

GIVEN, MOVED, LOST = "#9aa5b1", "#1f5fa8", "#c8502d"  # grey, blue, rust: safe for colour-blind readers
MOST_SLICES = 1 << 24  # largest number of pairs of slices of a grid
MOST_CELLS = 400  # cells of a picture of the plan, along each side
LEAST_DRAWN = 1e-17  # smaller errors are drawn at this value
PLANE = "points in the plane, shape ({}, 2)"


def pyplot() -> Any:
    """Import ``matplotlib.pyplot``, or raise an error with the install command."""
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415 - on first use
    except ImportError as error:
        raise ImportError("mapuot.plot needs matplotlib: pip install 'mapuot[plot]'") from error
    return plt


def axes(ax: Any) -> Any:
    if ax is None:
        return pyplot().subplots(constrained_layout=True)[1]
    return ax


def convergence(result: Result, ax: Any = None) -> Any:
    """Draw the certified error and the relative gap after every pass, and the steps that the guard rejected.

    A solve at a small reg may begin with larger regs; both lines rise at each change of reg.

    Parameters
    ----------
    result : Result
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    path : answers at several reg

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> result = mapuot.solve(np.random.rand(30, 20), reg=0.01, reg_m=1.0)
    >>> mapuot.plot.convergence(result).get_xlabel()
    'pass'
    """
    result = taken(result, "result")
    ax = axes(ax)
    passes = np.array([stat.n_pass for stat in result.trace])
    error = np.array([stat.error for stat in result.trace])
    gap = np.array([stat.gap / abs(stat.dual) if stat.dual else np.inf for stat in result.trace])
    dropped = np.array([stat.rejected for stat in result.trace], bool)
    for values, colour, name in ((error, MOVED, "bound of the plan's error"), (gap, GIVEN, "gap / |dual|")):
        drawn = np.where(np.isfinite(values), np.maximum(values, LEAST_DRAWN), np.nan)
        ax.plot(passes, drawn, color=colour, marker=".", label=name)
    if dropped.any():
        at = np.where(np.isfinite(error[dropped]), np.maximum(error[dropped], LEAST_DRAWN), 1.0)
        ax.plot(passes[dropped], at, "x", color=LOST, label="step dropped")
    ax.set(xlabel="pass", yscale="log", title=f"{result.status} after {result.n_passes} passes")
    ax.axhline(1.0, color=GIVEN, lw=0.8, ls=":")  # from here on the bound says something
    ax.legend()
    return ax


def cells(length: int, most: int) -> Any:
    """Return the first points of at most ``most`` cells that together cover ``length`` points."""
    count = min(length, most)
    return (np.arange(count) * length) // count


def coarse_plan(result: Result, most: int = MOST_CELLS) -> F64:
    """Add up the plan's mass between at most ``most`` runs of rows and of columns."""
    result = taken(result, "result")
    m, n = result.problem.shape
    if isinstance(result.problem.cost, GridCosts) and (sums := sums_of_slices(result, most)) is not None:
        rows, cols = (cells(length, most) for length in sums.shape)
        return np.asarray(np.add.reduceat(np.add.reduceat(sums, rows, axis=0), cols, axis=1))
    result.problem.cost.check_listed("plot.plan")
    rows = cells(m, most)
    cols = cells(n, most)
    out = np.zeros((len(rows), len(cols)))
    for i0, block in result._blocks():
        if is_sparse(block):
            pairs = block.tocoo()
            i, j = (np.searchsorted(x, y, side="right") - 1 for x, y in ((rows, i0 + pairs.row), (cols, pairs.col)))
            np.add.at(out, (i, j), pairs.data.astype(np.float64))
            continue
        narrow = np.add.reduceat(np.asarray(block, np.float64), cols, axis=1)
        np.add.at(out, np.searchsorted(rows, np.arange(i0, i0 + len(block)), side="right") - 1, narrow)
    return out


def sums_of_slices(result: Result, most: int) -> F64 | None:
    """Add up the plan of a grid between its slices, by products along the other axes; None for too many slices.

    A slice holds the nodes with one position on the leading axes. The leading axes are as many as have at most ``most``
    positions, but at least one.
    """
    problem = result.problem
    cost = cast(GridCosts, result.problem.cost)
    log_a, log_b = problem.exponents(result.log_u, result.log_v)
    few = [k for k in range(1, len(cost.axes)) if max(math.prod(nodes[: k + 1]) for nodes in cost.nodes) <= most]
    lead = 1 + len(few)
    counts = [math.prod(nodes[:lead]) for nodes in cost.nodes]
    if math.prod(counts) > MOST_SLICES:
        return None
    x = log_b.reshape(counts[1], *cost.nodes[1][lead:])
    for k, C in enumerate(cost.axes[lead:], 1):
        turned = x.swapaxes(0, k)
        found = log_matmul(C / -problem.reg, turned.reshape(len(turned), -1))
        x = found.reshape(-1, *turned.shape[1:]).swapaxes(0, k)
    sums = log_matmul(log_a.reshape(counts[0], -1), x.reshape(counts[1], -1).T)
    shape, target = (nodes[:lead] for nodes in cost.nodes)
    between = GridCosts(shape, cost.spacing[:lead], cost.scale, target=target, offset=cost.offset[:lead])
    return np.asarray(np.exp(sums - between.read(0, counts[0]) / problem.reg))


def plan(result: Result, ax: Any = None, most: int = MOST_CELLS) -> Any:
    """Draw the plan as a picture, with both marginals beside it: moved mass in colour, given mass in grey.

    Parameters
    ----------
    result : Result
    ax : matplotlib Axes, optional
        The marginals take parts of these axes.
    most : int
        Largest number of rows and columns of the picture; neighbours are added up.

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    links : the pairs that hold most of the mass

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.plan(result)
    """
    result = taken(result, "result")
    ax = axes(ax)
    m, n = result.problem.shape
    picture = coarse_plan(result, as_count(most, "most"))
    ax.imshow(picture, aspect="auto", cmap="Blues", extent=(0, n, m, 0), interpolation="nearest")
    ax.set(xlabel="column", ylabel="row")
    for place, along, limits, given, moved in (
        ([1.02, 0.0, 0.2, 1.0], "horizontal", {"ylim": (m, 0)}, result.problem.rows.weight, result.row_marginal),
        ([0.0, 1.02, 1.0, 0.2], "vertical", {"xlim": (0, n)}, result.problem.cols.weight, result.col_marginal),
    ):
        beside = ax.inset_axes(place)
        starts = cells(len(given), most)
        edges = np.append(starts, len(given))
        for values, colour, name in ((given, GIVEN, "given"), (moved, MOVED, "moved")):
            height = np.add.reduceat(np.asarray(values, np.float64), starts) / np.diff(edges)
            beside.stairs(height, edges, fill=True, alpha=0.7, color=colour, label=name, orientation=along)
        beside.set(xticks=[], yticks=[], **limits)
    beside.legend(fontsize="x-small")
    return ax


def plane(result: Result, x: Any, y: Any, ax: Any) -> tuple[F64, F64, Any]:
    m, n = result.problem.shape
    x, y = (as_numbers(z, name, PLANE.format(k), (k, 2)) for z, name, k in ((x, "x", m), (y, "y", n)))
    ax = axes(ax)
    ax.scatter(*y.T, s=8, color=LOST, alpha=0.5, label="columns")
    ax.scatter(*x.T, s=8, color=MOVED, alpha=0.5, label="rows")
    ax.set_aspect("equal")
    return x, y, ax


def arrows(result: Result, x: ArrayLike, y: ArrayLike, ax: Any = None, most: int = 500) -> Any:
    """Draw points of the plane, and an arrow from each point of the rows to the mean of its targets.

    Parameters
    ----------
    result : Result
    x, y : (m, 2), (n, 2) arrays
        The points of the rows and of the columns.
    ax : matplotlib Axes, optional
    most : int
        Largest number of arrows; rows that move the most mass come first. A larger moved share gives a darker arrow.

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    links : lines between pairs

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.arrows(result, x, y)
    """
    result = taken(result, "result")
    x, y, ax = plane(result, x, y, ax)
    image = host(result.barycentric_map(y))
    moved = np.asarray(result.row_marginal)
    order = np.argsort(-moved, kind="stable")[: as_count(most, "most")]
    order = order[moved[order] > 0]
    opacity = np.clip(moved[order] / np.maximum(result.problem.rows.weight[order], 1e-300), 0.05, 1.0)
    step = image[order] - x[order]
    ax.quiver(*x[order].T, *step.T, angles="xy", scale_units="xy", scale=1, width=0.003, color="black", alpha=opacity)
    ax.legend()
    return ax


def links(result: Result, x: ArrayLike, y: ArrayLike, ax: Any = None, keep: float = 0.8, most: int = 5000) -> Any:
    """Draw points of the plane, and a line for each pair with much mass.

    Parameters
    ----------
    result : Result
    x, y : (m, 2), (n, 2) arrays
        The points of the rows and of the columns.
    ax : matplotlib Axes, optional
    keep : float
        Draw the fewest pairs that hold this share of the mass, in (0, 1].
    most : int
        Largest number of lines. More mass gives a darker line.

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    arrows : one arrow for each point

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.links(result, x, y, keep=0.9)
    """
    result = taken(result, "result")
    result.problem.cost.check_listed("plot.links")
    x, y, ax = plane(result, x, y, ax)
    from matplotlib.collections import LineCollection  # noqa: PLC0415 - on first use

    pairs = result.sparse(keep=as_share(keep, "keep")).tocoo()
    order = np.argsort(-pairs.data, kind="stable")[: as_count(most, "most")]
    ends = np.stack([x[pairs.row[order]], y[pairs.col[order]]], axis=1)
    opacity = np.clip(pairs.data[order] / pairs.data.max(initial=1e-300), 0.03, 1.0)
    ax.add_collection(LineCollection(list(ends), colors="black", alpha=opacity, linewidths=0.7, zorder=0))
    ax.legend()
    return ax


def masses(result: Result, x: ArrayLike | None = None, side: str = "rows", ax: Any = None) -> Any:
    """Draw the share of each point's mass that moves. Below 1 mass stays behind, above 1 mass is created.

    Parameters
    ----------
    result : Result
    x : (m, 2) array, optional
        Points of the side in the plane, coloured by their share. Without x the shares are drawn in sorted order.
    side : {"rows", "cols"}
        The side to draw.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    plan : the plan between both marginals

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.masses(result, x)
    """
    result = taken(result, "result")
    rows = as_choice(side, "side", ("rows", "cols")) == "rows"
    given = getattr(result.problem, side).weight
    moved = np.asarray(result.row_marginal if rows else result.col_marginal)
    share = np.divide(moved, given, out=np.full(len(given), np.nan), where=given > 0)
    ax = axes(ax)
    if x is not None:
        points = as_numbers(x, "x", PLANE.format(len(given)), (len(given), 2))
        most = max(1.0, float(np.nanmax(np.abs(share - 1), initial=0.0)) + 1)
        drawn = ax.scatter(*points.T, c=share, cmap="RdBu", vmin=2 - most, vmax=most, s=12, edgecolors="grey", lw=0.2)
        ax.figure.colorbar(drawn, ax=ax, label="moved / given")
        ax.set_aspect("equal")
        return ax
    order = np.sort(share[np.isfinite(share)])
    for where, colour, name in ((order <= 1, LOST, "left behind"), (order >= 1, MOVED, "made")):
        ax.fill_between(np.arange(len(order)), order, 1.0, where=where, color=colour, alpha=0.6, label=name)
    ax.set(xlabel=f"{'rows' if side == 'rows' else 'columns'}, in order", ylabel="moved / given", ylim=(0, None))
    ax.legend()
    return ax


def path(results: Iterable[Result], ax: Any = None) -> Any:
    """Draw mass, cost and passes of several answers against their reg, or against reg_m if reg is the same for all.

    Parameters
    ----------
    results : iterable of Result
        Answers of `mapuot.path`, for example.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    mapuot.path : makes the answers

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> answers = mapuot.path(np.random.rand(30, 20), regs=[0.1, 0.05, 0.02], reg_ms=1.0)
    >>> ax = mapuot.plot.path(answers)
    """
    found = list(results)
    if not found:
        raise ValueError("results must hold a Result at least")
    ax = axes(ax)
    regs = np.array([r.problem.reg for r in found])
    rhos = np.array([r.problem.rows.rho_range[0] for r in found])
    by_reg = len(set(regs)) > 1 or not np.isfinite(rhos).all()
    at = regs if by_reg else rhos
    first = [found[0].problem.rows.mass, max(abs(r.cost) for r in found), max(r.n_passes for r in found)]
    curves = [r.mass for r in found], [r.cost for r in found], [r.n_passes for r in found]
    names = "mass / mass of a", f"cost / {first[1]:.3g}", f"passes / {first[2]}"
    for values, scale, name, colour in zip(curves, first, names, (MOVED, LOST, GIVEN), strict=True):
        ax.plot(at, np.array(values) / (scale or 1.0), marker="o", color=colour, label=name)
    ax.set(xscale="log", xlabel="reg" if by_reg else "reg_m", ylim=(0, None))
    ax.legend()
    return ax
