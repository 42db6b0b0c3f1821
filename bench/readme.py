"""readme: writes the tables of README.md and docs/ between their markers, from the records of their parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .__main__ import module_of
from .common import RESULTS, ROOT

TABLES = {  # part: (where its table stands, the records that it is of)
    "pass": ("docs/speed.md", ["pass"]),
    "solve": ("README.md", ["solve"]),
    "tensors": ("docs/speed.md", ["tensors-nvidia-h200", "tensors"]),
    "zoo": ("docs/speed.md", ["zoo-nvidia-h200", "zoo"]),
    "points": ("docs/speed.md", ["points-nvidia-h200", "points"]),
    "sparse": ("docs/speed.md", ["sparse-nvidia-h200", "sparse"]),
    "words": ("docs/coming_from/words.md", ["words"]),
    "small-reg": ("docs/mathematics.md", ["small-reg", "small-reg-nvidia-h200"]),
}


def load(folder: Path, record: str) -> dict[str, Any]:
    """Return a record of this folder; what ``bench all`` leaves out may lie in bench/results alone."""
    path = folder / f"{record}.json"
    data: dict[str, Any] = json.loads((path if path.exists() else RESULTS / path.name).read_text())
    return data


def run(folder: Path) -> str:
    for part, (page, records) in TABLES.items():
        found = module_of(part).tables(*(load(folder, record) for record in records))
        body, path = f"<!-- {part} -->\n{found}\n<!-- /{part} -->", ROOT / page
        pattern = rf"<!-- {part} -->.*?<!-- /{part} -->"
        text, count = re.subn(pattern, lambda _, body=body: body, path.read_text(), flags=re.S)
        if count != 1:
            raise ValueError(f"{page} must have one pair of markers <!-- {part} -->, found {count}")
        path.write_text(text)
    return f"{', '.join(sorted({page for page, _ in TABLES.values()}))} written from {folder}"
