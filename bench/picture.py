"""docs/speed.png: seconds to a plan within 1e-6 against n, of the records in bench/results/solve.json."""

import json
from pathlib import Path

REG, RHO = 0.01, 1.0
LINES = {  # name in the records: (name in the picture, colour, marker)
    "POT": ("POT, default", "#c8502d", "s"),
    "POT, translation-invariant": ("POT, translation-invariant", "#e0a030", "^"),
    "OTT-JAX": ("OTT-JAX", "#4f9d69", "D"),
    "mapuot": ("mapuot", "#1f5fa8", "o"),
}


def lines_of(record: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return {name: (n, median seconds)}, without solves that did not come within 1e-6."""
    solves = json.loads(record.read_text())["solves"]
    found = {}
    for name in LINES:
        at = [one for one in solves if (one["reg"], one["rho"]) == (REG, RHO) and name in one["seconds"]]
        at = [one for one in at if name == "mapuot" or one[name]["reached"]]
        found[name] = [one["n"] for one in at], [one["seconds"][name]["median"] for one in at]
    return found


def draw(record: Path, path: Path) -> None:
    """Draw the lines of all libraries, each named at its end."""
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")
    fig, ax = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for key, (n, seconds) in lines_of(record).items():
        name, colour, marker = LINES[key]
        ax.loglog(n, seconds, color=colour, marker=marker, linewidth=2)
        ax.annotate(name, (n[-1], seconds[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    ax.set(xlabel="points of each side, n", ylabel="seconds", xlim=(80, 40_000))
    ax.set_xticks([100, 1000, 10_000], ["100", "1000", "10,000"])
    ax.set_yticks([1e-3, 1e-2, 1e-1, 1, 10], ["1 ms", "10 ms", "0.1 s", "1 s", "10 s"])
    ax.set_title(f"A plan within 1e-6 of the optimal one, reg {REG}, reg_m {RHO:g}")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=160)
    plt.close(fig)
