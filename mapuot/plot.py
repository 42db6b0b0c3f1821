"""Pictures of results: convergence, plan, maps in the plane, types, images, masses left behind, a path of regs.

Every function draws into ``ax``, by default axes of a new figure, and returns it. Colours come from the active style of
Matplotlib, so that dark styles work. Further keywords go to the Matplotlib function that draws the data. In place of a
Result, an object that holds one may be given: Tuned, Certificate, or Coupling of `mapuot.wot`. For a Coupling, labels
and points may be a column of ``obs``, a matrix of ``obsm``, or values of all cells. An object of another class raises a
TypeError that names it. Matplotlib is imported on first use. A plan is read block by block: no function holds the whole
plan.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from .annotations import Seed, SideName
from .answer.draw import as_generator
from .answer.result import Result
from .answer.tensors import taken
from .api.log_matmul import log_matmul
from .arrays import host
from .drawing import (
    Colours,
    add_title,
    as_axes,
    balance_map,
    colour_bar,
    colours_of,
    legend_below,
    masses_map,
    power_scale,
    shares_map,
    type_colours,
    with_norm,
)
from .penalties import F64
from .problem.grid import GridCosts
from .problem.labels import pair_of
from .problem.sparse import is_sparse
from .problem.validate import as_choice, as_count, as_numbers, as_share

__all__ = ["arrows", "convergence", "image", "links", "masses", "path", "plan", "transitions"]

MOST_SLICES = 1 << 24  # largest number of pairs of slices of a grid
MOST_CELLS = 400  # cells of a picture of the plan, along each side
LEAST_DRAWN = 1e-17  # smaller errors are drawn at this value
LEAST_MOVED = 0.01  # nodes of an image below this share of the largest moved mass have no displacement
ARROWS_OF_IMAGE = 16  # arrows along the longer side of an image
LEAST_REACH = 0.01  # the axis of sorted shares reaches this far from 1 at least: balanced shares differ by rounding
MANY_POINTS = 1000  # of a picture
SIZES = (20, 10)  # areas of points, up to so many points and above
NEARLY = 1e-3  # totals that differ by a smaller share are equal to a reader
PLANE = "points in the plane, shape ({}, 2)"
IMAGES = ("given", "received", "left behind", "displacement")
FIGURES_OF_TABLE = 144  # cells of a table of transitions that have room for their numbers


class Holder(Protocol):
    """Object that holds a Result: Tuned, Certificate, Coupling."""

    @property
    def result(self) -> Any: ...


Answer: TypeAlias = Result | Holder

# ---- checks


def as_result(value: Any, name: str) -> Any:
    """Return a Result with its tensors as arrays, or the Result that the object holds; TypeError for others."""
    found = taken(value, name)
    if isinstance(found, Result):
        return found
    held = getattr(found, "result", None)
    if isinstance(held, Result):  # of Tuned, Certificate, Coupling
        return taken(held, name)
    kind = type(found).__name__
    if kind == "BatchResult":
        cure = f": draw one of its answers, {name}[0]"
    elif kind == "BarycenterResult":
        cure = f": its image is {name}.q"
    elif hasattr(found, "coupling"):
        cure = f": draw a coupling, {name}.coupling(t0, t1)"
    else:
        cure = ""
    raise TypeError(f"{name} must be a Result, got {kind}{cure}")


def points_of(value: Any, name: str, count: int) -> F64:
    points = host(taken(value, name))
    shape = np.shape(points)
    if len(shape) == 2 and shape[0] == count and shape[1] > 2:
        cure = f"pass two coordinates, {name}[:, :2], or a projection such as UMAP"
        raise ValueError(f"{name} must be {PLANE.format(count)}, got shape {shape}: {cure}")
    return np.asarray(as_numbers(points, name, PLANE.format(count), (count, 2)))


def moved_share(result: Any) -> str:
    """Return a title: how much of the mass moves."""
    totals = [float(side.mass) for side in (result.problem.rows, result.problem.cols)]
    if abs(totals[0] - totals[1]) <= NEARLY * max(totals) and result.mass <= totals[0] * (1 + NEARLY):
        return f"{100 * result.mass / totals[0]:.3g} % of the mass moves"
    return f"mass {result.mass:.3g} moves, of {totals[0]:.3g} in rows and {totals[1]:.3g} in columns"


def of_sides(answer: Any, values: Any, name: str) -> Any:
    """Return (values of the rows, values of the columns); a Coupling knows names, and has values of all its cells."""
    if values is not None and hasattr(answer, "of_days"):
        return answer.of_days(values, name)
    return values


def both_points(answer: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the points of both sides; for a Coupling x may be the points of all cells, or their name, and y None."""
    if y is not None:
        return x, y
    if not hasattr(answer, "of_days"):
        raise TypeError("y must be given, the points of the columns")
    both: tuple[Any, Any] = answer.of_days(x, "x")
    return both


# ---- the certificate


def convergence(result: Answer, ax: Any = None, **style: Any) -> Any:
    """Draw the certified error and the relative gap after every pass, and the steps that the guard rejected.

    Above the dotted line at 1 the bound says nothing. A solve at a small reg may begin with larger regs; both lines
    rise at each change of reg.

    Parameters
    ----------
    result : Result
    ax : matplotlib Axes, optional
    **style
        Keywords of `matplotlib.axes.Axes.plot`, for both lines.

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
    solved = as_result(result, "result")
    (ax,) = as_axes(ax, 1)
    colours = colours_of(ax)
    passes = np.array([stat.n_pass for stat in solved.trace])
    error = np.array([stat.error for stat in solved.trace])
    gap = np.array([stat.gap / abs(stat.dual) if stat.dual else np.inf for stat in solved.trace])
    dropped = np.array([stat.rejected for stat in solved.trace], bool)
    lines = (error, colours.rows, "bound on the plan's error"), (gap, colours.given, "gap / |dual|")
    for values, colour, name in lines:
        drawn = np.where(np.isfinite(values), np.maximum(values, LEAST_DRAWN), np.nan)
        ax.plot(passes, drawn, **{"color": colour, "marker": ".", "label": name, **style})
    if dropped.any():
        at = np.where(np.isfinite(error[dropped]), np.maximum(error[dropped], LEAST_DRAWN), 1.0)
        ax.plot(passes[dropped], at, "x", color=colours.cols, label="step rejected")
    ax.set(xlabel="pass", yscale="log", title=f"{solved.status} after {solved.n_passes} passes")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.axhline(1.0, color=colours.given, lw=0.8, ls=":")
    ax.legend()
    return ax


# ---- the plan


def cells(length: int, most: int) -> Any:
    """Return the first points of at most ``most`` cells that together cover ``length`` points."""
    count = min(length, most)
    return (np.arange(count) * length) // count


def coarse_plan(result: Answer, most: int = MOST_CELLS, orders: Any = None) -> F64:
    """Add up the plan's mass between at most ``most`` runs of rows and of columns.

    ``orders``: the rows and the columns in the order of the picture; None for their own.
    """
    solved = as_result(result, "result")
    m, n = solved.problem.shape
    by_slices = isinstance(solved.problem.cost, GridCosts) and orders is None
    if by_slices and (sums := sums_of_slices(solved, most)) is not None:
        rows, cols = (cells(length, most) for length in sums.shape)
        return np.asarray(np.add.reduceat(np.add.reduceat(sums, rows, axis=0), cols, axis=1))
    solved.problem.cost.check_listed("plot.plan")
    firsts = cells(m, most), cells(n, most)
    cell = [np.searchsorted(first, np.arange(k), side="right") - 1 for first, k in zip(firsts, (m, n), strict=True)]
    if orders is not None:
        for places, order in zip(cell, orders, strict=True):
            places[order] = places.copy()
    out = np.zeros((len(firsts[0]), len(firsts[1])))
    for i0, block in solved._blocks():
        if is_sparse(block):
            pairs = host(block).tocoo()
            np.add.at(out, (cell[0][i0 + pairs.row], cell[1][pairs.col]), pairs.data.astype(np.float64))
            continue
        wide = np.asarray(host(block), np.float64)
        narrow = np.add.reduceat(wide if orders is None else wide[:, orders[1]], firsts[1], axis=1)
        np.add.at(out, cell[0][i0 : i0 + len(wide)], narrow)
    return out


def sums_of_slices(result: Result, most: int) -> F64 | None:
    """Add up the plan of a grid between its slices, by products along the other axes; None for too many slices.

    A slice holds the nodes with one position on the leading axes. The leading axes are as many as have at most ``most``
    positions, but at least one.
    """
    problem = result.problem
    cost = cast(GridCosts, result.problem.cost)
    log_a, log_b = problem.exponents(*result.own_logs)
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


def plan(result: Answer, ax: Any = None, most: int = MOST_CELLS, labels: Any = None, **style: Any) -> Any:
    """Draw the plan as a picture, with the given mass (grey) and the moved mass (coloured) of both sides beside it.

    Parameters
    ----------
    result : Result
    ax : matplotlib Axes, optional
        The marginals and the colour bar take parts of these axes.
    most : int
        Largest number of rows and columns of the picture; neighbours are added up.
    labels : pair of (m,) and (n,) arrays, optional
        Types of the rows and of the columns. The picture then has points of one type side by side.
    **style
        Keywords of `matplotlib.axes.Axes.imshow`. Without limits or a norm, colours follow the square root of the mass.

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    links : the pairs that hold most of the mass
    transitions : the mass between types

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.plan(result)
    """
    labels = of_sides(result, labels, "labels")
    solved = as_result(result, "result")
    m, n = solved.problem.shape
    most = as_count(most, "most")
    kinds: Any = None
    orders = None
    if labels is not None:
        kinds = pair_of(labels, [m, n])
        orders = [np.argsort(kind, kind="stable") for kind in kinds[0]]
    made = ax is None
    (ax,) = as_axes(ax, 1)
    colours = colours_of(ax)
    if not made and ax.figure.get_layout_engine() is None:  # make room within the given axes
        box = ax.get_position()
        ax.set_position([box.x0, box.y0, 0.65 * box.width, 0.8 * box.height])
    picture = coarse_plan(solved, most, orders)
    style = {"aspect": "auto", "cmap": masses_map(colours), "interpolation": "nearest", **style}
    drawn = ax.imshow(picture, extent=(0, n, m, 0), **with_norm(style, power_scale(float(picture.max(initial=0.0)))))
    ax.set(xlabel="column", ylabel="row")
    for place, along, limits, side, moved in (
        ([1.02, 0.0, 0.2, 1.0], "horizontal", {"ylim": (m, 0)}, solved.problem.rows, solved.row_marginal),
        ([0.0, 1.02, 1.0, 0.2], "vertical", {"xlim": (0, n)}, solved.problem.cols, solved.col_marginal),
    ):
        beside = ax.inset_axes(place)
        starts = cells(len(side.weight), most)
        edges = np.append(starts, len(side.weight))
        order = slice(None) if orders is None else orders[along == "vertical"]
        for values, colour, name in ((side.weight, colours.given, "given"), (moved, colours.rows, "moved")):
            height = np.add.reduceat(np.asarray(host(values), np.float64)[order], starts) / np.diff(edges)
            beside.stairs(height, edges, fill=True, alpha=0.7, color=colour, label=name, orientation=along)
        beside.set(xticks=[], yticks=[], **limits)
        beside.set_frame_on(False)
    if kinds is not None:
        name_types(ax, kinds, colours)
    if not ax.get_title():
        beside.set_title(moved_share(solved))
    beside.legend(loc="lower left", bbox_to_anchor=(1.0, 0.0), fontsize="small", frameon=False)
    if picture.shape == (m, n):
        unit = "mass of a pair"
    else:
        unit = f"mass of {m / len(picture):.3g} x {n / picture.shape[1]:.3g} pairs"
    if getattr(ax.figure.get_layout_engine(), "colorbar_gridspec", True):  # tight_layout, or none: it moves no bar
        colour_bar(drawn, ax, unit, cax=ax.inset_axes([1.32, 0.0, 0.04, 1.0]))
    else:
        colour_bar(drawn, ax, unit, pad=0.02)
    return ax


def name_types(ax: Any, kinds: Any, colours: Colours) -> None:
    """Draw lines between the types of the rows and of the columns of a plan, and name the types at the axes."""
    both, classes = kinds
    for axis, line, kind in ((ax.yaxis, ax.axhline, both[0]), (ax.xaxis, ax.axvline, both[1])):
        counts = np.array([(kind == one).sum() for one in classes])
        ends = np.cumsum(counts)
        there = counts > 0
        for end in ends[there][:-1]:
            line(end, color=colours.given, lw=0.8)
        axis.set_ticks((ends - counts / 2)[there], [str(one) for one in classes[there]])
    ax.tick_params(length=0)
    ax.tick_params(axis="x", rotation=30)
    ax.set(xlabel="type of the columns (to)", ylabel="type of the rows (from)")


def transitions(result: Answer, labels: Any, ax: Any = None, **style: Any) -> Any:
    """Draw a table of types: the share of each type's moved mass that arrives at each type of the columns.

    Each line of the table has sum 1. Beside the name of a type of the rows stands the share of its given mass that
    moves; it is above 100 % where mass is created.

    Parameters
    ----------
    result : Result, or Coupling
    labels : pair of (m,) and (n,) arrays
        Types of the rows and of the columns. For a Coupling also a column of ``obs``, or labels of all cells.
    ax : matplotlib Axes, optional
    **style
        Keywords of `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib Axes

    See Also
    --------
    plan : the plan with its rows and columns ordered by type
    mapuot.Result.push : the shares behind the table

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> x, y = np.random.rand(30, 2), np.random.rand(20, 2)
    >>> result = mapuot.solve_sample(x, y, reg=0.05, reg_m=1.0)
    >>> ax = mapuot.plot.transitions(result, (x[:, 0] > 0.5, y[:, 0] > 0.5))
    """
    labels = of_sides(result, labels, "labels")
    solved = as_result(result, "result")
    (kinds, arrived), _ = pair_of(labels, list(solved.problem.shape))
    (ax,) = as_axes(ax, 1)
    colours = colours_of(ax)
    table, starts, ends = table_of(solved, kinds, arrived)
    style = {"aspect": "auto", "cmap": shares_map(colours), **style}
    if not {"norm", "vmin", "vmax"} & set(style):
        style |= {"vmin": 0.0, "vmax": 1.0}
    drawn = ax.imshow(table, **style)
    moved = [f"{one}\n{100 * share:.0f} % moves" for one, share in starts.items()]
    ax.set_xticks(range(len(ends)), [str(one) for one in ends])
    ax.set_yticks(range(len(moved)), moved)
    ax.tick_params(length=0)
    if sum(len(str(one)) for one in ends) > 40:
        ax.tick_params(axis="x", rotation=45)
    ax.set(xlabel="type of the columns (to)", ylabel="type of the rows (from)")
    colour_bar(drawn, ax, "share of the moved mass")
    add_title(ax, moved_share(solved))
    if table.size <= FIGURES_OF_TABLE:
        write_shares(ax, drawn, table)
    return ax


def table_of(result: Any, kinds: Any, arrived: Any) -> tuple[F64, dict[Any, float], Any]:
    """Return the table, {type of the rows: share of its mass that moves}, and the types of the columns."""
    starts, shares = result.push(kinds)
    mass = np.asarray(host(shares)).T * np.asarray(result.col_marginal)
    ends, place = np.unique(arrived, return_inverse=True)
    table = np.zeros((len(starts), len(ends)))
    np.add.at(table.T, np.ravel(place), mass.T)
    sums = table.sum(1)
    given = np.array([result.problem.rows.weight[kinds == one].sum() for one in starts])
    with np.errstate(divide="ignore", invalid="ignore"):
        shown_shares = np.where(sums[:, None] > 0, table / sums[:, None], np.nan)
        moves = np.where(given > 0, sums / given, 0.0)
    return shown_shares, dict(zip(starts.tolist(), moves.tolist(), strict=True)), ends


def write_shares(ax: Any, drawn: Any, table: F64) -> None:
    """Write the numbers into the cells, in black or white, by the lightness of the cell."""
    for (i, j), share in np.ndenumerate(table):
        if not np.isfinite(share):
            continue
        red, green, blue, _ = drawn.cmap(drawn.norm(share))
        light = 0.299 * red + 0.587 * green + 0.114 * blue
        ax.text(j, i, f"{share:.2f}", ha="center", va="center", color="black" if light > 0.55 else "white")


# ---- points in the plane


def plane(x: F64, y: F64, ax: Any, labels: Any) -> None:
    """Draw both point sets: two colours, or with labels a colour for each type, dots for rows and rings for columns."""
    colours = colours_of(ax)
    ax.set_aspect("equal")
    if labels is None:
        size = SIZES[len(x) + len(y) > MANY_POINTS]
        ax.scatter(*x.T, s=size, color=colours.rows, alpha=0.7, linewidths=0, label="rows (from)", zorder=1.1)
        ax.scatter(*y.T, s=size, color=colours.cols, alpha=0.7, linewidths=0, label="columns (to)")
        return
    (first, second), classes = pair_of(labels, [len(x), len(y)])
    for one, colour in zip(classes, type_colours(len(classes), colours), strict=True):
        ends = y[second == one]
        starts = x[first == one]
        ax.scatter(*ends.T, s=22, facecolors="none", edgecolors=[colour], linewidths=0.9)
        ax.scatter(*starts.T, s=12, color=[colour], linewidths=0, label=str(one))
    ax.scatter([], [], s=12, color=[colours.given], linewidths=0, label="rows (from)")
    ax.scatter([], [], s=22, facecolors="none", edgecolors=[colours.given], label="columns (to)")


def arrows(
    result: Answer, x: ArrayLike, y: ArrayLike | None = None, ax: Any = None, most: int = 500, seed: Seed | None = 0,
    labels: Any = None, **style: Any,
) -> Any:  # fmt: skip
    """Draw points of the plane, and an arrow from each point of the rows to the mean of its targets.

    If there are more than ``most`` rows, a random sample of them has arrows, and the legend says "500 of 3000 arrows".
    An arrow is fainter the smaller the share of its row's mass that moves.

    Parameters
    ----------
    result : Result, or Coupling
    x, y : (m, 2), (n, 2) arrays
        The points of the rows and of the columns. For a Coupling, x may be a name such as "X_umap" and y None.
    ax : matplotlib Axes, optional
    most : int
        Largest number of arrows.
    seed : int, generator, optional
        Source of the random sample, as in `Result.sample`. None draws another sample each time.
    labels : pair of (m,) and (n,) arrays, optional
        Types of the points: each type has a colour.
    **style
        Keywords of `matplotlib.axes.Axes.quiver`.

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
    labels = of_sides(result, labels, "labels")
    solved = as_result(result, "result")
    m, n = solved.problem.shape
    x, y = both_points(result, x, y)
    start = points_of(x, "x", m)
    end = points_of(y, "y", n)
    most = as_count(most, "most")
    (ax,) = as_axes(ax, 1)
    plane(start, end, ax, labels)
    step = np.asarray(host(solved.barycentric_map(end))) - start
    moved = np.asarray(solved.row_marginal)
    rows = np.flatnonzero((moved > 0) & np.isfinite(step).all(1))
    count = len(rows)
    if count > most:
        rows = np.sort(as_generator(seed).choice(rows, most, replace=False))
    opacity = np.clip(moved[rows] / np.maximum(solved.problem.rows.weight[rows], 1e-300), 0.08, 1.0)
    style = {
        "angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.003, "color": colours_of(ax).text,
        "alpha": opacity, **style,
    }  # fmt: skip
    ax.quiver(*start[rows].T, *step[rows].T, **style)
    name = "arrows" if len(rows) == count else f"{len(rows)} of {count} arrows"
    ax.plot([], [], color=style["color"], marker=">", markersize=3, markevery=[1], lw=1, label=name)
    add_title(ax, moved_share(solved))
    legend_below(ax)
    return ax


def links(
    result: Answer, x: ArrayLike, y: ArrayLike | None = None, ax: Any = None, keep: float = 0.8, most: int = 5000,
    labels: Any = None, **style: Any,
) -> Any:  # fmt: skip
    """Draw points of the plane, and a line for each pair with much mass.

    Parameters
    ----------
    result : Result, or Coupling
    x, y : (m, 2), (n, 2) arrays
        The points of the rows and of the columns. For a Coupling, x may be a name such as "X_umap" and y None.
    ax : matplotlib Axes, optional
    keep : float
        Draw the fewest pairs that hold this share of the mass, in (0, 1].
    most : int
        Largest number of lines; pairs with the most mass come first. More mass gives a darker line.
    labels : pair of (m,) and (n,) arrays, optional
        Types of the points: each type has a colour.
    **style
        Keywords of `matplotlib.collections.LineCollection`.

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
    labels = of_sides(result, labels, "labels")
    solved = as_result(result, "result")
    solved.problem.cost.check_listed("plot.links")
    m, n = solved.problem.shape
    x, y = both_points(result, x, y)
    start = points_of(x, "x", m)
    end = points_of(y, "y", n)
    keep = as_share(keep, "keep")
    most = as_count(most, "most")
    (ax,) = as_axes(ax, 1)
    plane(start, end, ax, labels)
    from matplotlib.collections import LineCollection  # noqa: PLC0415 - on first use

    pairs = host(solved.sparse(keep=keep)).tocoo()
    order = np.argsort(-pairs.data, kind="stable")[:most]
    if len(order) == pairs.nnz:
        name = f"{100 * keep:.3g} % of the mass"
    else:
        name = f"{len(order)} of {pairs.nnz} pairs"
    ends = np.stack([start[pairs.row[order]], end[pairs.col[order]]], axis=1)
    opacity = np.clip(pairs.data[order] / pairs.data.max(initial=1e-300), 0.03, 1.0)
    style = {
        "colors": colours_of(ax).text, "alpha": opacity, "linewidths": 0.7, "zorder": 0,
        "label": name, **style,
    }  # fmt: skip
    ax.add_collection(LineCollection(list(ends), **style))
    add_title(ax, moved_share(solved))
    legend_below(ax)
    return ax


# ---- masses


def masses(
    result: Answer,
    x: ArrayLike | None = None,
    side: SideName = "rows",
    ax: Any = None,
    labels: Any = None,
    **style: Any,
) -> Any:
    """Draw the share of each point's mass that moves. Below 1 mass stays behind, above 1 mass is created.

    Parameters
    ----------
    result : Result
    x : (m, 2) array, optional
        Points of the side in the plane, coloured by their share; the colour bar begins at 0 and has 1 in its middle.
        Without x the shares are drawn in sorted order.
    side : {"rows", "cols"}
        The side to draw.
    ax : matplotlib Axes, optional
    labels : (m,) array, optional
        Types of the points of the side. Without x, each type has its own part of the axis.
    **style
        Keywords of `matplotlib.axes.Axes.scatter` with x, of `matplotlib.axes.Axes.fill_between` without.

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
    rows = as_choice(side, "side", ("rows", "cols")) == "rows"
    if hasattr(result, "of_days"):
        if x is not None:
            x = of_sides(result, x, "x")[not rows]
        if labels is not None:
            labels = of_sides(result, labels, "labels")[not rows]
    solved = as_result(result, "result")
    given = np.asarray(host(getattr(solved.problem, side).weight))
    moved = np.asarray(solved.marginals[not rows])
    share = np.divide(moved, given, out=np.full(len(given), np.nan), where=given > 0)
    points = None if x is None else points_of(x, "x", len(given))
    if labels is None:
        kinds = np.zeros(len(given), np.int64)
    else:
        kinds = pair_of((labels, labels), [len(given)] * 2)[0][0]
    (ax,) = as_axes(ax, 1)
    if points is not None:
        draw_shares(ax, points, share, style)
    else:
        point = ("column", "row")[rows]
        draw_sorted(ax, share, kinds, point, style)
        if labels is None:
            ax.set_xlabel(f"{point}s, sorted by share")
    left = float(np.maximum(given - moved, 0.0).sum())
    created = float(np.maximum(moved - given, 0.0).sum())
    title = f"{100 * left / given.sum():.2g} % left behind"
    if created > NEARLY * given.sum():
        title += f", {100 * created / given.sum():.2g} % created"
    add_title(ax, title)
    return ax


def draw_shares(ax: Any, points: F64, share: F64, style: dict[str, Any]) -> None:
    """Draw points coloured by their shares, from 0 with 1 in the middle; few much larger shares have an open end."""
    from matplotlib.colors import TwoSlopeNorm  # noqa: PLC0415 - on first use

    colours = colours_of(ax)
    finite = share[np.isfinite(share)]
    most = max(2.0, float(np.quantile(finite, 0.98))) if len(finite) else 2.0
    style = {"cmap": balance_map(colours), "s": 14, "edgecolors": [colours.given], "linewidths": 0.3, **style}
    if not {"c", "color"} & set(style):
        style = with_norm({"c": share, **style}, TwoSlopeNorm(1.0, 0.0, most))
    drawn = ax.scatter(*points.T, **style)
    ax.set_aspect("equal")
    if drawn.get_array() is not None:
        above = bool((finite > most).any()) and "norm" in style
        colour_bar(drawn, ax, "moved / given mass", extend="max" if above else "neither")


def draw_sorted(ax: Any, share: F64, kinds: Any, point: str, style: dict[str, Any]) -> None:
    """Draw the shares in sorted order, type after type, as areas from 1. The axis is as long as the shares need."""
    colours = colours_of(ax)
    at = 0
    places = []
    names = []
    drawn = set()
    for one in np.unique(kinds):
        order = np.sort(share[(kinds == one) & np.isfinite(share)])
        along = at + np.arange(len(order) + 1)
        steps = np.append(order, order[-1:])
        parts = (order.min(initial=1.0) < 1, np.minimum(steps, 1.0), colours.cols, "left behind")
        for some, height, colour, name in (
            parts, (order.max(initial=1.0) > 1, np.maximum(steps, 1.0), colours.rows, "created")
        ):  # fmt: skip
            if some:
                label = None if name in drawn else name
                drawn.add(name)
                area = {"color": colour, "alpha": 0.6, "label": label, "step": "post", "linewidth": 0, **style}
                ax.fill_between(along, height, 1.0, **area)
        places.append(at + len(order) / 2)
        names.append(str(one))
        at += len(order) + (max(1, len(share) // 50) if len(order) else 0)
    ax.axhline(1.0, color=colours.text, lw=0.8)
    ax.margins(x=0.01)
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 1 - LEAST_REACH), max(high, 1 + LEAST_REACH))
    ax.set_ylabel(f"moved / given mass of a {point}")
    if len(names) > 1:
        ax.set_xticks(places, names)
    if drawn:
        ax.legend()


def path(results: Iterable[Answer], ax: Any = None, **style: Any) -> Any:
    """Draw mass, cost and passes of several answers against their reg, or against reg_m if reg is the same for all.

    Parameters
    ----------
    results : iterable of Result
        Answers of `mapuot.path`, for example.
    ax : three matplotlib Axes, optional
        The panels of mass, cost and passes.
    **style
        Keywords of `matplotlib.axes.Axes.plot`.

    Returns
    -------
    (3,) array of matplotlib Axes

    See Also
    --------
    mapuot.path : makes the answers

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> answers = mapuot.path(np.random.rand(30, 20), regs=[0.1, 0.05, 0.02], reg_ms=1.0)
    >>> mass, cost, passes = mapuot.plot.path(answers)
    """
    given = taken(results, "results")
    if isinstance(given, Result):
        raise TypeError("results must be a list of Results, got one Result")
    if not isinstance(given, Iterable):
        raise TypeError(f"results must be a list of Results, got {type(given).__name__}")
    found = [as_result(one, f"results[{k}]") for k, one in enumerate(given)]
    if not found:
        raise ValueError("results must hold a Result at least")
    axes = as_axes(ax, 3, nrows=3, sharex=True, figsize=(6.4, 6.0))
    colours = colours_of(axes[0])
    regs = np.array([r.problem.reg for r in found])
    rhos = np.array([r.problem.rows.rho_range[0] for r in found])
    by_reg = len(set(regs)) > 1 or not np.isfinite(rhos).all()
    of_a = found[0].problem.rows.mass
    curves = (
        (f"moved mass, of {of_a:.3g}", [r.mass for r in found]), ("transport cost", [r.cost for r in found]),
        ("passes", [r.n_passes for r in found]),
    )  # fmt: skip
    for panel, (name, values) in zip(axes, curves, strict=True):
        panel.plot(regs if by_reg else rhos, values, **{"marker": "o", "color": colours.rows, **style})
        panel.set(xscale="log", ylabel=name)
        low = min(0.0, *values)
        high = max(0.0, *values)
        panel.set_ylim(low - 0.08 * (high - low) * (low < 0), high + 0.08 * (high - low) or 1.0)
    axes[-1].set_xlabel("reg" if by_reg else "reg_m")
    return np.array(axes)


# ---- images


def image(result: Answer, ax: Any = None, show: Any = IMAGES, **style: Any) -> Any:
    """Draw the answer of a Grid as images: the given mass, the received mass, the mass left behind, the displacement.

    Titles have the sums of the masses. "given" is a; arrows lead from pixels to the mean of their targets. "received"
    is the column marginal. "left behind" is the given less the moved mass; below 0 mass is created. "displacement" is
    the length of the way from a pixel to the mean of its targets; pixels that move less than 1 % of the largest moved
    mass have none.

    Parameters
    ----------
    result : Result
        Of a `Grid` with two axes.
    ax : matplotlib Axes, optional
        As many as ``show`` has names.
    show : str or sequence of str
        Images to draw: "given", "received", "left behind" and "displacement".
    **style
        Keywords of `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib Axes, or an array of them
        One Axes if ``show`` is one name.

    See Also
    --------
    mapuot.Grid : costs between pixels
    plan : the plan between the rows of both images

    Examples
    --------
    >>> import numpy as np, mapuot, matplotlib
    >>> matplotlib.use("agg")
    >>> a, b = np.random.default_rng(0).random((2, 8, 9))
    >>> result = mapuot.solve(mapuot.Grid((8, 9)), a, b, reg=1.0, reg_m=10.0)
    >>> len(mapuot.plot.image(result))
    4
    """
    if isinstance(ax, str):
        raise TypeError(f"ax must be Axes of Matplotlib, got the text {ax!r}: pass show={ax!r}")
    solved = as_result(result, "result")
    cost = solved.problem.cost
    if not isinstance(cost, GridCosts):
        raise TypeError(f"result must be the answer of a Grid, got one of {cost.kind}")
    if len(cost.spacing) != 2:
        raise ValueError(f"result must be the answer of a Grid with 2 axes, got {len(cost.spacing)}")
    names = [as_choice(name, "show", IMAGES) for name in ([show] if isinstance(show, str) else show)]
    if not names:
        raise ValueError(f"show must have one of {', '.join(IMAGES)} at least")
    columns = min(2, len(names))
    lines = -(-len(names) // columns)
    height = 2.0 * float(np.clip(np.divide(*map(np.multiply, cost.nodes[0], cost.spacing)), 0.4, 2.0))
    axes = as_axes(ax, len(names), nrows=lines, ncols=columns, figsize=(3.6 * columns, (height + 0.8) * lines))
    for panel, name in zip(axes, names, strict=False):
        draw_image(panel, solved, cost, name, dict(style))
    for panel in axes[len(names) :]:
        panel.set_axis_off()
    if isinstance(show, str):
        return axes[0]
    return np.array(axes[: len(names)])


def draw_image(ax: Any, result: Any, cost: GridCosts, name: str, style: dict[str, Any]) -> None:
    """Draw one of the images; both axes are in units of the grid's spacing."""
    from matplotlib.colors import Normalize, TwoSlopeNorm  # noqa: PLC0415 - on first use

    colours = colours_of(ax)
    nodes, other = cost.nodes
    h = cost.spacing
    start: Any = (0.0, 0.0)
    given = np.asarray(host(result.problem.rows.weight)).reshape(nodes)
    moved = np.asarray(result.row_marginal).reshape(nodes)
    steps: Any = displacements(result, cost, moved) if name in ("given", "displacement") else None
    label = "mass of a pixel"
    title = name
    if name == "given":
        values = given
        title = f"{name}: {given.sum():.3g}"
    elif name == "received":
        values = np.asarray(result.col_marginal).reshape(other)
        nodes = other
        start = cost.offset
        title = f"{name}: {values.sum():.3g}"
    elif name == "left behind":
        values = given - moved
        label = "given - moved mass"
        title = f"{name}: {np.maximum(values, 0.0).sum():.3g}"
    else:
        values = np.linalg.norm(steps, axis=-1)
        label = "length of the way"
    most = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    if name == "left behind":
        style = {"cmap": balance_map(colours).reversed(), **with_norm(style, TwoSlopeNorm(0.0, -most, most))}
    elif name == "displacement":
        style = {"cmap": shares_map(colours), **with_norm(style, Normalize(0.0, most))}
    else:
        style = {"cmap": masses_map(colours), **with_norm(style, power_scale(most))}
    left = start[1] - h[1] / 2
    top = start[0] - h[0] / 2
    extent = (left, left + h[1] * nodes[1], top + h[0] * nodes[0], top)
    drawn = ax.imshow(values, extent=extent, **style)
    add_title(ax, title)
    ax.set(xlabel="axis 1", ylabel="axis 0")
    if ax.figure.get_layout_engine() is None:  # the bar takes room from the axes
        colour_bar(drawn, ax, label)
    else:
        colour_bar(drawn, ax, label, cax=ax.inset_axes([1.04, 0.0, 0.06, 1.0]))
    if name == "given":
        draw_steps(ax, cost, steps, colours)


def displacements(result: Any, cost: GridCosts, moved: Any) -> Any:
    """Return the way from each node to the mean of its targets, (nodes, 2); NaN where next to nothing moves."""
    m, n = (np.stack(np.meshgrid(*map(np.arange, nodes), indexing="ij"), -1).reshape(-1, 2) for nodes in cost.nodes)
    here = m * np.asarray(cost.spacing)
    there = n * np.asarray(cost.spacing) + np.asarray(cost.offset)
    way = (np.asarray(result.barycentric_map(there)) - here).reshape(*cost.nodes[0], 2)
    way[moved <= LEAST_MOVED * moved.max(initial=0.0)] = np.nan
    return way


def draw_steps(ax: Any, cost: GridCosts, steps: F64, colours: Colours) -> None:
    """Draw arrows at every few nodes, within the limits of the image."""
    stride = max(1, -(-max(cost.nodes[0]) // ARROWS_OF_IMAGE))
    some = np.mgrid[stride // 2 : cost.nodes[0][0] : stride, stride // 2 : cost.nodes[0][1] : stride].reshape(2, -1)
    way = steps[some[0], some[1]]
    there = np.isfinite(way).all(1)
    y, x = some[:, there] * np.asarray(cost.spacing)[:, None]
    ax.quiver(
        x, y, way[there, 1], way[there, 0], angles="xy", scale_units="xy", scale=1, width=0.004, color=colours.cols
    )
