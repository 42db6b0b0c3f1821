"""Shared by every part of the benchmark: the machine's description, timing in turns, and the writer of results.

A part is a module with ``run(args) -> dict`` (JSON-ready) and ``tables(data) -> str``: the tables, in Markdown, that
are printed and that ``bench readme`` puts between the markers of README.md and docs/. Times are seconds. ``interleave``
takes one sample of every candidate in turn, so that a busy neighbour slows all of them alike; calls that are not timed
come first, for 40 ms (a cache that others have filled takes that long to turn over), so that each candidate finds its
own data in the caches, as it does in a solver's loop. Minimum, median and quartiles are kept; ratios are formed from
samples of the same round, and of minima.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mapuot.processor import core_count

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "bench"
RESULTS = ROOT / "bench" / "results"  # the record that README.md and docs/ quote
SAMPLE = 2e-3  # seconds that one sample lasts at least
WARM = 4e-2  # seconds of untimed calls before a sample, one call at least: threads of OpenBLAS spin on for 30 ms

Timings = dict[Any, list[float]]
sys.path.append(str(ROOT / "tests"))  # where the oracle lies


# ---- the machine ----


def machine() -> dict[str, Any]:
    """Return the facts that a reader needs to repeat a run."""
    from mapuot.backends.cpu import native

    told = output([sys.executable, "-m", "mapuot", "info"])  # versions of libraries, caches, GPUs, MPI
    return {
        "cpu": cpu_model(), "isa": native.isa(), "cores": core_count(), "load": os.getloadavg()[0],
        "info": re.sub(r" in /\S*", "", told).splitlines(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "compiler": output(["cc", "--version"]).partition("\n")[0], "blas": blas(), "commit": commit(),
    }  # fmt: skip


def on_gpu(data: dict[str, Any]) -> bool:
    """Whether a record is of a GPU: "device" has its name."""
    return data.get("device") not in (None, "cpu")


def machine_line(data: dict[str, Any]) -> str:
    """Name the machine of a record, as the tables of README.md and docs/ do."""
    found = data["machine"]
    if on_gpu(data):
        return f"One {data['device']}"
    return f"{found['cpu']}, {found['isa'].upper()}, {found['cores']} cores"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
    else:
        text = ""
    fields = {key: re.search(rf"^{key}\s*: (.*)$", text, re.M) for key in ("model name", "cpu family", "model")}
    named = {key: match.group(1) for key, match in fields.items() if match}
    if not named:
        return platform.processor() or platform.machine()
    return f"{named.get('model name')} (family {named.get('cpu family')}, model {named.get('model')})"


def blas() -> list[str]:
    from threadpoolctl import threadpool_info

    return [f"{p['internal_api']} {p['version']} {p.get('architecture')} {p['num_threads']}" for p in threadpool_info()]


def commit() -> str:
    """Return the commit of the sources, "-dirty" if they were edited since; results of parts before do not count."""
    git = ["git", "-C", str(ROOT)]
    others = [".", ":!bench/results", ":!README.md"]
    changed = output([*git, "status", "--porcelain", "--untracked-files=no", "--", *others])
    found = output([*git, "rev-parse", "--short=12", "HEAD"]).strip() or "unknown"
    if changed:
        found += "-dirty"
    return found


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    except OSError:
        return ""


def alone(expression: str, most: float | None = None) -> Any:
    """Return the value of an expression of this package's modules from a process that may take ``most`` seconds."""
    code = f"import json, warnings; warnings.simplefilter('ignore'); from bench import {expression.partition('.')[0]}; "
    command = [sys.executable, "-c", f"{code} print(json.dumps({expression}))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=most)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def status(key: str) -> int:
    """Return an entry of /proc/self/status in bytes; "VmHWM" is the most memory held since ``forget_peak``."""
    match = re.search(rf"^{key}:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
    if match:
        return 1024 * int(match.group(1))
    return 0


def forget_peak() -> int:
    """Reset the kernel's peak of memory, and return the present memory in bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed arrays with the process for reuse: a virtual machine may take pages back.

    Fresh pages then cost .5 to 1.2 s for 100 MB, ten times the time of writing them, in any program.
    """
    mmap_max = -4
    trim_threshold = -1
    set_to = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    set_to(mmap_max, 0)
    set_to(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:  # glibc's initial values
        set_to(mmap_max, 1 << 16)
        set_to(trim_threshold, 1 << 17)


def blas_threads(count: int) -> Any:
    """Pin the threads of OpenBLAS and OpenMP, which numpy and POT run on, in a context."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=count)


# ---- timing ----


def interleave(
    candidates: dict[Any, Callable[[], Any]], seconds: float, rounds: tuple[int, int] = (3, 1000)
) -> Timings:
    """Time one call of each candidate, in turns; ``seconds`` is for all, ``rounds`` the least and most turns."""
    lengths = {name: length_of(call) for name, call in candidates.items()}
    times: Timings = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for count in range(rounds[1]):
            if count >= rounds[0] and time.perf_counter() > end:
                break
            for name, call in candidates.items():
                sample(call, math.ceil(WARM / lengths[name]))
                times[name].append(sample(call, math.ceil(SAMPLE / lengths[name])))
    finally:
        gc.enable()
    return times


def length_of(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, of a short one the best of three after a first one."""
    first = sample(call, 1)
    if first > 0.1:
        return first
    return min(sample(call, 1) for _ in range(3))


def sample(call: Callable[[], Any], number: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the mean seconds of so many calls."""
    begin = clock()
    for _ in range(number):
        call()
    return (clock() - begin) / number


def summary(times: list[float]) -> dict[str, float]:
    q1, median, q3 = np.percentile(times, [25, 50, 75])
    return {"min": min(times), "median": median, "q1": q1, "q3": q3, "samples": len(times)}


def summaries(times: Timings) -> dict[str, dict[str, float]]:
    return {name: summary(values) for name, values in times.items()}


def ratio(times: Timings, slow: Any, fast: Any) -> dict[str, float]:
    """How many times faster ``fast`` is: median over the rounds, and the ratio of the minima."""
    rounds = np.array(times[slow]) / np.array(times[fast])
    return {"median": float(np.median(rounds)), "of_minima": min(times[slow]) / min(times[fast])}


def geometric_mean(values: Any) -> float:
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=float)))))


# ---- results ----


def save(name: str, data: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(plain(data), indent=1) + "\n")
    return path


def plain(value: Any) -> Any:
    """Return a value JSON-ready: numpy scalars and arrays unpacked, floats to 5 digits, NaN and inf as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.5g}") if math.isfinite(value) else str(float(value))
    if isinstance(value, np.integer):
        return int(value)
    return value


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown; floats have three digits, and a table without rows is empty."""
    lines = [header, ["---"] * len(header), *([three(x) if isinstance(x, float) else x for x in row] for row in rows)]
    if rows:
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return ""


def each(tables: Callable[[dict[str, Any]], str]) -> Callable[..., str]:
    """Return a function of several records that writes the ``tables`` of each, one below the other."""
    return lambda *found: text_of(*map(tables, found))


def aligned(text: str) -> str:
    """Return a text with its Markdown tables padded to equal column widths, for a screen."""

    def block(found: re.Match[str]) -> str:
        rows = [
            [x.strip() for x in line.strip("|").split(" | ")] for line in found[0].splitlines() if "---" not in line
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{x:>{w}}" for x, w in zip(row, widths, strict=True)) for row in rows) + "\n"

    return re.sub(r"(^\|.*\n)+", block, text + "\n", flags=re.M).rstrip()


def text_of(*parts: str) -> str:
    """Join paragraphs and tables, leaving out empty ones."""
    return "\n\n".join(filter(None, parts))


def short(x: Any) -> str:
    """.05 for 0.05; inf for the word that JSON has for it."""
    if float(x):
        return f"{float(x):.3g}".removeprefix("0")
    return "0"


def three(x: float) -> str:
    """Three digits, or a whole number."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.3g}"


def milliseconds(seconds: dict[str, float]) -> str:
    least = seconds["min"]
    if least >= 0.1:
        return f"{1e3 * least:,.0f}"
    return f"{1e3 * least:,.1f}"
