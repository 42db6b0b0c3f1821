"""The numbers that Python shares with C and CUDA, read from the enums of src_c/common/record.h, which both compile."""

import re
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "_cuda_src"  # the texts that CUDA and C compile


@cache
def source_path(name: str) -> Path:
    """Return the path of a source of CUDA by its name, which no other folder of src_cuda has, or by its path there."""
    if (SOURCE / name).exists():
        return SOURCE / name
    return next(SOURCE.glob(f"*/{name}"))


@cache
def members(enum: str) -> dict[str, int]:
    """Return {name: number} of an enum whose members count from 0; MAPUOT_TV is "tv"."""
    text = re.sub(r"/\*.*?\*/", "", (SOURCE / "common" / "record.h").read_text(encoding="utf-8"), flags=re.DOTALL)
    body = re.search(rf"typedef enum \{{([^}}]*)\}} {enum};", text)
    assert body is not None, enum
    names = [name.strip() for name in body[1].split(",")]
    return {name.removeprefix("MAPUOT_").lower(): number for number, name in enumerate(names)}
