"""Use the installed package as a newcomer does: `make check-wheel` runs this file in clean environments.

    python installed.py README.md FOLDER

It runs the first block of the README, solves a problem in a CSV file through the command line, loads its answer, and
checks the instruction set in use and the output of `python -m mapuot info`.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import mapuot
from mapuot.processor import isa


def best_isa() -> str:
    """Return the instruction set that Linux's own list of features allows; elsewhere the machine type decides."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    try:
        features = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return isa()
    if {"avx512f", "avx512dq", "avx512vl", "avx512bw"} <= features:
        return "avx512"
    if {"avx2", "fma"} <= features:
        return "avx2"
    return "scalar"


def main(readme: Path, folder: Path) -> None:
    """Fail where a command fails."""
    if "site-packages" not in mapuot.__file__:
        sys.exit(f"mapuot comes from the sources, {mapuot.__file__}")
    code = re.search(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.M | re.S)
    assert code
    exec(compile(code[1], str(readme), "exec"), {})
    table = folder / "costs.csv"
    answer = folder / "answer.npz"
    M = np.abs(np.arange(30.0)[:, None] - np.arange(20.0))
    np.savetxt(table, M, delimiter=",")
    arguments = ["solve", str(table), "--reg", "0.5", "--reg-m", "5", "-o", str(answer)]
    subprocess.run([sys.executable, "-m", "mapuot", *arguments], check=True, timeout=120)
    assert abs(mapuot.load(answer, M).plan.sum() - mapuot.load(answer).mass) < 1e-6
    if isa() != best_isa():
        sys.exit(f"this machine has {best_isa()} instructions, and those of {isa()} are used")
    subprocess.run([sys.executable, "-m", "mapuot", "info"], check=True, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
