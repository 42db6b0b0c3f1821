"""readme: writes the tables of README.md and docs/ between their markers, from the records of their parts."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import brief, picture
from .__main__ import module_of
from .common import RESULTS, ROOT

RAW = "docs/speed_tables.md"
TABLES = {  # marker: (where its table stands, the records that it is of)
    "front": (("README.md", "docs/index.md"), ["solve", "words", "gromov", "loss-nvidia-h200"]),
    "gromov": (("docs/guide/spaces.md",), ["gromov", "gromov-nvidia-h200"]),
    "shapes": (("docs/guide/spaces.md",), ["shapes"]),
    "bound": (("docs/guide/spaces.md",), ["bound", "bound-nvidia-h200"]),
    "solve": (("docs/speed.md",), ["solve"]),
    "brief-pass": (("docs/speed.md",), ["pass"]),
    "brief-gpu": (("docs/speed.md",), ["gpu-nvidia-h200"]),
    "brief-points": (("docs/speed.md",), ["points-nvidia-h200"]),
    "brief-hard": (("docs/speed.md",), ["hard-nvidia-h200"]),
    "brief-zoo": (("docs/speed.md",), ["zoo"]),
    "brief-tensors": (("docs/speed.md",), ["tensors"]),
    "all-solve": ((RAW,), ["solve"]),
    "pass": ((RAW,), ["pass"]),
    "tensors": ((RAW,), ["tensors-nvidia-h200", "tensors"]),
    "zoo": ((RAW,), ["zoo-nvidia-h200", "zoo", "zoo-intel"]),
    "hard": ((RAW,), ["hard-nvidia-h200", "hard"]),
    "loss": ((RAW,), ["loss-nvidia-h200"]),
    "points": ((RAW,), ["points-nvidia-h200", "points"]),
    "sparse": ((RAW,), ["sparse-nvidia-h200", "sparse"]),
    "kept": ((RAW,), ["kept"]),
    "words": (("docs/coming_from/words.md",), ["words"]),
    "scaling": (("docs/coming_from/geomloss.md",), ["scaling"]),
    "small-reg": (("docs/mathematics.md",), ["small-reg", "small-reg-nvidia-h200"]),
}


def found(marker: str, folder: Path) -> str:
    """Return the text between the two comments of this name, from the records of a folder."""
    make = brief.TABLES.get(marker) or module_of(marker.removeprefix("all-")).tables
    return str(make(*(load(folder, record) for record in TABLES[marker][1])))


def load(folder: Path, record: str) -> dict[str, Any]:
    """Return a record of this folder; records that ``bench all`` leaves out may lie in bench/results alone."""
    path = folder / f"{record}.json"
    data: dict[str, Any] = json.loads((path if path.exists() else RESULTS / path.name).read_text())
    return data


def run(folder: Path) -> str:
    for marker, (pages, _) in TABLES.items():
        body = f"<!-- {marker} -->\n{found(marker, folder)}\n<!-- /{marker} -->"
        for page in pages:
            path = ROOT / page
            pattern = rf"<!-- {marker} -->.*?<!-- /{marker} -->"
            text, count = re.subn(pattern, lambda _, body=body: body, path.read_text(), flags=re.S)
            if count != 1:
                raise ValueError(f"{page} must have one pair of markers <!-- {marker} -->, found {count}")
            path.write_text(text)
    if find_spec("matplotlib"):
        picture.draw(folder / "solve.json", ROOT / "docs" / "speed.png")
    return f"{', '.join(sorted({page for pages, _ in TABLES.values() for page in pages}))} written from {folder}"
