"""compare: the numbers that two result files of one part have in common, as ratios B / A."""

from collections.abc import Iterator
from typing import Any

from . import common

SKIPPED = {"machine", "samples", "q1", "q3"}
LABELS = ("m", "n", "dtype", "threads", "family", "reg", "rho", "level", "K", "name")  # they name a row of a list


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) of every number; rows of a list are named by their labels."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in SKIPPED:
                yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            named = isinstance(item, dict) and [f"{k}={item[k]}" for k in LABELS if k in item]
            yield from leaves(item, (*path, ",".join(named) if named else str(index)))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def compare(a: dict[str, Any], b: dict[str, Any]) -> str:
    if a.get("part") != b.get("part"):
        raise SystemExit(f"the files hold different parts: {a.get('part')} and {b.get('part')}")
    lines = []
    for name, data in (("A", a), ("B", b)):
        machine = data["machine"]
        lines.append(f"{name}: {machine['commit']}  {machine['cpu']}  {machine['isa']}  {machine['cores']} cores")
    left = dict(leaves(a))
    right = dict(leaves(b))
    rows = [
        [" / ".join(path), left[path], right[path], f"{right[path] / left[path]:.3f}"]
        for path in left
        if path in right and left[path] and path[-1] not in LABELS
    ]
    return "\n".join([*lines, common.table(["number", "A", "B", "B / A"], rows)])
