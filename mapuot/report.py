"""Page about a solve: the problem, the certificate, the trace, both marginals, pictures.

The page is complete in itself: pictures are in it, nothing is loaded, and a policy in its head forbids it. Whatever
was given (names of files, options) is escaped.
"""

import base64
import io
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

import numpy as np

from . import plot
from .answer.result import Result
from .answer.store import TRACE
from .answer.summary import number

__all__ = ["page"]

SHOWN_PASSES = 12  # of the trace, first and last
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #d9dee3; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } caption { display: none }
img { max-width: 100%; height: auto } .no { color: #a3290b } .yes { color: #116329 }
@media (prefers-color-scheme: dark) { body { background: #16191d; color: #dfe3e8 } img { background: #fff }
.no { color: #ff9b7d } .yes { color: #7ee2a0 } th, td { border-color: #3a4149 } }
"""


def page(result: Result, facts: str, title: str, given: Any, values: dict[str, Any], versions: Any) -> str:
    """Write the page as text; over ranks it has no pictures of the plan.

    ``facts`` is ``summary.as_table(result)`` and ``values`` is ``store.contents(result)``, for which all ranks meet;
    ``given`` is what the caller gave, and ``versions`` is for the foot.
    """
    state = "yes" if result.converged else "no"
    if result.converged:
        told = "converged"
    else:
        told = f"not converged: {result.status}"
    reached = f"Certified error and gap by pass: {number(result.error_bound)} and {number(result.gap)} at the end"
    pictures: list[tuple[str, str, Any]] = [("Convergence", reached, partial(plot.convergence, result))]
    if result.problem.ranks.size == 1:
        m, n = result.problem.shape
        drawn = f"Plan of {m} rows and {n} columns as an image, its marginals along the edges"
        pictures.append(("Plan and marginals", drawn, partial(plot.plan, result, most=200)))
        for side, name, length in (("row", "rows", m), ("column", "cols", n)):
            text = f"Share of its mass that each of the {length} {side}s moves, {number(result.mass)} together"
            pictures.append((f"Mass that each {side} moves", text, partial(plot.masses, result, None, name)))
    body = [
        f"<h1>{escape(title)}</h1><p class='{state}'>{escape(told)}</p>", facts,
        "<h2>Values</h2>", table({name: number(values[name]) for name in ("objective", "dual", "cost", "mass", "gap")}),
        "<h2>Marginals</h2>", marginals(values), *(figure(*each) for each in pictures),
        "<h2>Trace</h2>", trace(result), "<h2>Given</h2>", table(given), "<h2>Made by</h2>", table(versions),
    ]  # fmt: skip
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def figure(title: str, text: str, draw: Callable[..., Any]) -> str:
    """Draw a picture with its heading, and with a text in its place for readers who do not see it.

    It is drawn apart from pyplot: its windows are the caller's.
    """
    plot.pyplot()  # or what to install
    from matplotlib.figure import Figure  # noqa: PLC0415 - on first use

    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    data = io.BytesIO()
    draw(ax=drawing.subplots())
    drawing.savefig(data, format="png", metadata={"Software": None})
    image = base64.b64encode(data.getvalue()).decode()
    return f"<h2>{escape(title)}</h2><img alt='{escape(text)}' src='data:image/png;base64,{image}'>"


def table(rows: dict[str, Any]) -> str:
    cells = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{cells}</table>"


def marginals(values: dict[str, Any]) -> str:
    """Tabulate both sides: the given mass, the mass that moves, and the point that is missed most."""
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
    stats: list[Any] = list(result.trace)
    if len(stats) > 2 * SHOWN_PASSES:
        stats = [*stats[:SHOWN_PASSES], None, *stats[-SHOWN_PASSES:]]
    lines = []
    for stat in stats:
        if stat is None:
            values = ["..."] * len(TRACE)
        else:
            values = [getattr(stat, name) for name in TRACE]
        texts = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
        lines.append("".join(f"<td class='n'>{escape(text)}</td>" for text in texts))
    head = "".join(f"<th>{escape(name)}</th>" for name in TRACE)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{x}</tr>' for x in lines)}</table>"
