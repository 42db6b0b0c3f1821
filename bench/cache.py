"""cache: simulated misses of the first and of the last cache, by cachegrind, for each form of the pass (figures 4, 11).

bench/src/cache.c runs each form 1 and 3 times on a float32 matrix twice the size of the simulated last cache; half of
the difference is one pass. Misses are given per cache line of the matrix: reading it once from memory is 1.0. The
simulator knows no prefetch: these are the lines that a pass must have, not the time it waits for them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import common, library

FORMS = ("fused", "in-place", "two-sweeps", "four-sweeps")
SIMULATED = {  # what the simulator is told, and the size of the matrix
    False: (["--D1=49152,12,64", "--LL=33554432,16,64"], 4096),
    True: (["--D1=49152,12,64", "--LL=1048576,16,64"], 1024),
}


def build(folder: str) -> str:
    """The program: its main, and the kernels of the pass and of the baselines for float32 in AVX2."""
    program = str(Path(folder) / "cache")
    kernels = (library.CORE / "kernels_tmpl.c", library.SOURCES / "bandwidth_tmpl.c")
    library.compile_c([*library.flags("avx2", "f32"), library.SOURCES / "cache.c", *kernels, "-o", program, "-lm"])
    return program


def counts(program: str, form: str, n: int, passes: int, options: list[str]) -> dict[str, int]:
    """Data references and misses of a whole run."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", *options]
    child = subprocess.run(
        [*command, program, form, str(n), str(passes)], capture_output=True, text=True, check=True
    )  # fmt: skip
    found = {}
    for key, pattern in (("refs", r"D\s+refs:"), ("D1", r"D1\s+misses:"), ("LL", r"LLd\s+misses:")):
        match = re.search(pattern + r"\s+([\d,]+)", child.stderr)
        if not match:
            raise RuntimeError(f"cachegrind said: {child.stderr[-500:]}")
        found[key] = int(match.group(1).replace(",", ""))
    return found


def measure(program: str, form: str, n: int, options: list[str]) -> dict[str, Any]:
    one, three = (counts(program, form, n, passes, options) for passes in (1, 3))
    a_pass = {key: (three[key] - one[key]) / 2 for key in one}
    lines = n * n * 4 / 64
    return {
        "name": form, "n": n, "refs_per_entry": a_pass["refs"] / n**2,
        "D1_miss_rate": a_pass["D1"] / a_pass["refs"], "LL_miss_rate": a_pass["LL"] / a_pass["refs"],
        "D1_misses_per_line": a_pass["D1"] / lines, "LL_misses_per_line": a_pass["LL"] / lines,
    }  # fmt: skip


def missing() -> str | None:
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the simulated kernels are AVX2"
    absent = [tool for tool in ("valgrind", "cc") if not shutil.which(tool)]
    return f"not installed: {', '.join(absent)}" if absent else None


def run(args: Any) -> dict[str, Any]:
    reason = missing()
    if reason:
        return {"skipped": reason}
    options, n = SIMULATED[args.quick]
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        return {"options": options, "misses": [measure(program, form, n, options) for form in FORMS]}


def report(data: dict[str, Any]) -> str:
    if "skipped" in data:
        return f"skipped: {data['skipped']}"
    rows = [
        [r["name"], f"{r['refs_per_entry']:.2f}",
         f"{100 * r['D1_miss_rate']:.1f} %", f"{100 * r['LL_miss_rate']:.1f} %",
         f"{r['D1_misses_per_line']:.2f}", f"{r['LL_misses_per_line']:.2f}"]
        for r in data["misses"]
    ]  # fmt: skip
    header = ["pass", "references an entry", "L1 miss rate", "last miss rate", "L1 misses a line", "last misses a line"]
    return f"cachegrind {' '.join(data['options'])}\n" + common.table(header, rows)


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["misses"]
    with common.figure(path, columns=2) as axes:
        for axis, key, title in zip(axes[0], ("D1", "LL"), ("first cache", "last cache"), strict=True):
            axis.bar([r["name"] for r in rows], [r[f"{key}_misses_per_line"] for r in rows])
            axis.set(title=title, ylabel="misses a pass, per cache line of the matrix")
