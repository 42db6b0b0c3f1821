"""Axes, colours, colour bars and legends of `mapuot.plot`. Colours come from the style in which the axes were made."""

from typing import Any, NamedTuple

import numpy as np

from .errors import shown

LEAST_APART = 3**0.5 / 3  # distance in RGB of two colours for rows and columns: a third of that from black to white


def pyplot() -> Any:
    """Import ``matplotlib.pyplot``, or raise an error with the install command."""
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415 - on first use
    except ImportError as error:
        raise ImportError("mapuot.plot needs matplotlib: pip install 'mapuot[plot]'") from error
    return plt


def as_axes(ax: Any, count: int, **figure: Any) -> list[Any]:
    """Return a list of ``count`` axes: the given ones, or the axes of a new figure."""
    if ax is None:
        made = pyplot().subplots(**{"layout": "constrained", **figure})[1]
        return list(np.ravel(made))
    found = list(np.ravel(np.asarray(ax, object)))
    if len(found) != count:
        wanted = "one Axes" if count == 1 else f"{count} Axes"
        raise ValueError(f"ax must be {wanted}, got {len(found)}")
    for one in found:
        if not hasattr(one, "transAxes"):
            raise TypeError(f"ax must be an Axes of Matplotlib, got {shown(one)}")
    return found


class Colours(NamedTuple):
    """Colours of one Axes. ``rows`` is the first of the style's cycle, ``cols`` the next that is far from it."""

    rows: Any  # also: mass that moves, mass that is created
    cols: Any  # also: mass that is left behind
    given: Any  # a grey between text and background
    text: Any
    background: Any
    cycle: tuple[Any, ...]


def colours_of(ax: Any) -> Colours:
    from matplotlib import colors, rcParams  # noqa: PLC0415 - on first use

    text = np.array(colors.to_rgb(ax.xaxis.label.get_color()))
    background = colors.to_rgba(ax.get_facecolor())
    if background[3] == 0:  # a transparent Axes shows its figure
        background = colors.to_rgba(ax.figure.get_facecolor())
    paper = np.array(background[:3])
    cycle = tuple(rcParams["axes.prop_cycle"].by_key().get("color", ("C0",)))
    rows = cycle[0]
    apart = [np.linalg.norm(np.subtract(colors.to_rgb(one), colors.to_rgb(rows))) for one in cycle]
    far = [one for one, distance in zip(cycle, apart, strict=True) if distance > LEAST_APART]
    cols = (far or (cycle * 2)[1:])[0]
    return Colours(rows, cols, 0.45 * text + 0.55 * paper, text, paper, cycle)


def masses_map(colours: Colours) -> Any:
    """Return a colour map from the background through the style's first colour nearly to the text's colour."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb  # noqa: PLC0415 - on first use

    last = 0.8 * colours.text + 0.2 * np.array(to_rgb(colours.rows))
    return LinearSegmentedColormap.from_list("mass", [colours.background, colours.rows, last])


def shares_map(colours: Colours) -> Any:
    """Return a colour map from the background to the style's first colour."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - on first use

    return LinearSegmentedColormap.from_list("share", [colours.background, colours.rows])


def balance_map(colours: Colours) -> Any:
    """Return a colour map with grey in its middle: left behind below it, created above it."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - on first use

    middle = 0.2 * colours.text + 0.8 * colours.background
    return LinearSegmentedColormap.from_list("balance", [colours.cols, middle, colours.rows])


def with_norm(style: dict[str, Any], norm: Any) -> dict[str, Any]:
    """Add a norm to the keywords, unless the caller gave limits or a norm."""
    if {"norm", "vmin", "vmax"} & set(style):
        return style
    return {"norm": norm, **style}


def power_scale(largest: float) -> Any:
    """Return a scale by square roots from 0, which shows masses of 1 % of the largest as 10 %."""
    from matplotlib.colors import PowerNorm  # noqa: PLC0415 - on first use

    return PowerNorm(0.5, vmin=0.0, vmax=largest or 1.0)


def colour_bar(drawn: Any, ax: Any, label: str, **place: Any) -> Any:
    if "cax" not in place:
        place["ax"] = ax
    bar = ax.figure.colorbar(drawn, **place)
    bar.set_label(label)
    if hasattr(bar.formatter, "set_powerlimits"):
        bar.formatter.set_powerlimits((-2, 4))
    return bar


def add_title(ax: Any, text: str) -> None:
    """Give the axes a title, unless they have one."""
    if not ax.get_title():
        ax.set_title(text)


def legend_below(ax: Any) -> None:
    """Put the legend below the labels of the ticks, where it covers no point, in as many columns as find room."""
    from matplotlib import rcParams  # noqa: PLC0415 - on first use
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415 - on first use

    names = ax.get_legend_handles_labels()[1]
    size = rcParams["font.size"]
    room = 72 * ax.get_position().width * ax.figure.get_figwidth()  # points
    columns = int(room / (size * (0.55 * max(map(len, names)) + 3)))  # a letter is .55 of the size wide
    below = ax.transAxes + ScaledTranslation(0, -26 / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=min(max(columns, 1), 4),
        frameon=False, columnspacing=1.2, handletextpad=0.4, borderaxespad=0.0, markerscale=1.6,
    )  # fmt: skip


def type_colours(count: int, colours: Colours) -> Any:
    """Return one colour for each type, from the style's cycle, or from a colour map where the cycle is too short."""
    if count <= len(colours.cycle):
        return colours.cycle[:count]
    return pyplot().get_cmap("turbo")(np.linspace(0.05, 0.95, count))
