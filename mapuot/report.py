"""Page about a solve: the problem, its values, the marginals, pictures, the trace, and a part for bug reports.

The page is complete in itself: pictures are in it, nothing is loaded, and a policy in its head forbids it. Names of
files, options and the title are escaped.
"""

import base64
import io
import platform
import sys
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from . import plot
from .annotations import FilePath, SideName
from .answer.result import Result
from .answer.store import contents
from .answer.summary import facts, number
from .drawing import pyplot
from .files import complete
from .problem.grid import GridCosts
from .spaces.answer import GromovResult

__all__ = ["write_report"]

LEAST_DIFFERENCE = 1e-3  # shares of a side nearer to 1 than this have no picture: all mass of this side moves
SHOWN_PASSES = 12  # of the trace, first and last
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #d9dee3; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } .no { color: #a3290b } .yes { color: #116329 }
@media (prefers-color-scheme: dark) { body { background: #16191d; color: #dfe3e8 } img { background: #fff }
.no { color: #ff9b7d } .yes { color: #7ee2a0 } th, td { border-color: #3a4149 } }
"""
VALUES = {
    "objective": "cost of this plan with the penalties and the entropy",
    "dual": "no plan has a smaller objective",
    "gap": "at most this much above the smallest objective",
    "cost": "sum of plan times costs, without penalties and entropy",
}
COLUMNS = {
    "n_pass": "pass", "gap": "gap", "error": "bound on the plan's error", "dual": "lower bound on the objective",
    "mass": "moved mass", "residual": "largest change of log v", "rejected": "step rejected", "seconds": "seconds",
}  # fmt: skip


def write_report(
    result: Result, path: FilePath, title: str | None = None, given: dict[str, Any] | None = None,
    values: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the page of `Result.report`. All ranks must call it; rank 0 writes.

    Parameters
    ----------
    result : Result
    path : str or path
    title : str, optional
    given : dict, optional
        Arguments of the call, for a table of their own. A value of None is left out.
    values : dict, optional
        ``store.contents(result)``, where the caller has it.

    See Also
    --------
    mapuot.Result.report : the same for a call

    Examples
    --------
    >>> import numpy as np, mapuot
    >>> from mapuot.report import write_report
    >>> result = mapuot.solve(np.random.default_rng(0).random((30, 20)), reg=0.05, reg_m=1.0)
    >>> write_report(result, "answer.html", "A first answer", {"reg": 0.05, "reg_m": 1.0})
    """
    pyplot()  # or an error with the install command
    ranks = result.problem.ranks
    with ranks.together():
        described = facts(result)
        if values is None:
            values = contents(result)
        if ranks.rank == 0:
            m = len(values["row_marginal"])
            text = page(result, described, title or f"Transport plan of {m} x {result.problem.shape[1]}", given, values)
            with complete(Path(path)) as part:
                part.write_text(text, encoding="utf-8")


def page(result: Result, described: dict[str, str], title: str, given: Any, values: dict[str, Any]) -> str:
    """Return the page as text; over ranks it has no pictures of the plan."""
    described = dict(described)
    kind = ("no", "yes")[result.converged]
    state = f"<p class='{kind}'>{escape(described.pop('solve'))}</p>"
    meanings = {**VALUES, "error_bound": described.pop("accuracy")}
    meaning = [(name, number(float(values[name])), text) for name, text in meanings.items()]
    if isinstance(result, GromovResult):
        heading = f"Values of the last step, after which the objective is {number(result.value)}"
    else:
        heading = "Values"
    parts = [
        f"<h1>{escape(title)}</h1>", state, table(described.items()), f"<h2>{heading}</h2>", table(meaning),
 "<h2>Marginals</h2>", marginals(values),
        *(figure(*each) for each in pictures(result)), "<h2>Passes</h2>", trace(result),
    ]  # fmt: skip
    if given:
        parts += ["<h2>Given</h2>", table((name, value) for name, value in given.items() if value is not None)]
    mapuot = sys.modules[__package__]
    made = {
        "solver": result.how, "mapuot": mapuot.__version__, "numpy": np.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    parts += ["<h2>For bug reports</h2>", table(made.items())]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def pictures(result: Result) -> list[tuple[str, str, Callable[..., Any], int]]:
    """Return (heading, text for readers who do not see it, function that draws, number of axes) of each picture."""
    error = number(result.error_bound)
    reached = f"Bound on the plan's error and relative gap after each pass; at the end the bound is {error}"
    found: list[tuple[str, str, Callable[..., Any], int]] = [
        ("Convergence", reached, partial(plot.convergence, result), 1)
    ]
    if result.problem.ranks.size > 1:
        return found
    cost = result.problem.cost
    if isinstance(cost, GridCosts) and len(cost.spacing) == 2:
        told = "Four images: the given mass, the received mass, the mass left behind, and the length of the way"
        return [*found, ("Images", told, partial(plot.image, result), len(plot.IMAGES))]
    m, n = result.problem.shape
    told = f"Plan of {m} rows and {n} columns as an image, with the given and the moved mass of both sides beside it"
    found.append(("Plan and marginals", told, partial(plot.plan, result, most=200), 1))
    sides: list[tuple[str, SideName, Any, Any]] = [
        ("row", "rows", result.row_marginal, result.problem.rows.weight),
        ("column", "cols", result.col_marginal, result.problem.cols.weight),
    ]
    for side, name, moved, given in sides:
        some = given > 0
        share = np.asarray(moved[some] / given[some])
        least, most = (number(x) for x in (share.min(initial=np.inf), share.max(initial=0.0)))
        if np.abs(share - 1.0).max(initial=0.0) < LEAST_DIFFERENCE:
            continue
        told = f"Moved mass of each {side} as a share of its given mass, in sorted order, from {least} to {most}"
        found.append((f"Mass that each {side} moves", told, partial(plot.masses, result, None, name), 1))
    return found


def figure(title: str, text: str, draw: Callable[..., Any], count: int) -> str:
    """Draw a picture with its heading, and with a text in its place for readers who do not see it.

    It is drawn apart from pyplot: its windows are the caller's.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - on first use

    if count == 1:
        drawing = Figure(figsize=(7, 4.5), layout="constrained")
        ax = drawing.subplots()
    else:
        drawing = Figure(figsize=(8, 6), layout="constrained")
        ax = drawing.subplots(-(-count // 2), 2)
    data = io.BytesIO()
    draw(ax=ax)
    drawing.savefig(data, format="png", metadata={"Software": None})
    image = base64.b64encode(data.getvalue()).decode()
    return f"<h2>{escape(title)}</h2><img alt='{escape(text)}' src='data:image/png;base64,{image}'>"


def table(rows: Any) -> str:
    """Return a table of (name, text, ...) with the names as heads of the rows."""
    lines = []
    for name, *texts in rows:
        cells = "".join(f"<td>{escape(str(text))}</td>" for text in texts)
        lines.append(f"<tr><th>{escape(str(name))}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def marginals(values: dict[str, Any]) -> str:
    """Tabulate both sides: the given mass, the moved mass, and the point with the largest difference of masses."""
    lines = []
    for side, given, moved in (("rows", "a", "row_marginal"), ("columns", "b", "col_marginal")):
        weight = np.asarray(values[given])
        r = np.asarray(values[moved])
        worst = int(np.argmax(np.abs(r - weight)))
        cells = side, number(weight.sum()), number(r.sum()), number(np.abs(r - weight).sum())
        text = f"{given}[{worst}]: {number(weight[worst])} given, {number(r[worst])} moved"
        lines.append("".join(f"<td>{escape(x)}</td>" for x in (*cells, text)))
    head = "".join(f"<th>{x}</th>" for x in ("side", "given", "moved", "sum of |moved - given|", "largest difference"))
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{x}</tr>' for x in lines)}</table>"


def trace(result: Result) -> str:
    """Tabulate the first and the last passes."""
    stats: list[Any] = list(result.trace)
    if len(stats) > 2 * SHOWN_PASSES:
        stats = [*stats[:SHOWN_PASSES], None, *stats[-SHOWN_PASSES:]]
    lines = []
    for stat in stats:
        if stat is None:
            values = ["..."] * len(COLUMNS)
        else:
            values = [getattr(stat, name) for name in COLUMNS]
        lines.append("".join(f"<td class='n'>{escape(shown_number(value))}</td>" for value in values))
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS.values())
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{x}</tr>' for x in lines)}</table>"


def shown_number(value: Any) -> str:
    if isinstance(value, bool):
        return ("no", "yes")[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
