"""readme: writes the tables of README.md and docs/ between their markers, from the JSON of their parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .common import RESULTS, ROOT, geometric_mean
from .peers import POT_METHODS
from .solve import SMALL

SIZES = [(1024, 1024), (2048, 2048), (8192, 8192), (10240, 10240), (65536, 1024)]


def load(folder: Path, part: str) -> dict[str, Any]:
    """The part's data; what ``bench all`` leaves out may lie in the record alone."""
    path = folder / f"{part}.json"
    data: dict[str, Any] = json.loads((path if path.exists() else RESULTS / path.name).read_text())
    return data


def machine(data: dict[str, Any]) -> str:
    found = data["machine"]
    return f"{found['cpu']}, {found['isa'].upper()}, {found['cores']} cores"


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def pass_table(data: dict[str, Any]) -> str:
    """Fractions of the limit: of minima in one run."""
    rows = []
    for r in data["passes"]:
        if (r["m"], r["n"]) not in SIZES:
            continue
        part = {name: f"{found['of_minima']:.2f}".removeprefix("0") for name, found in r["fraction"].items()}
        over = [f"{r[key]['fused']['of_minima']:.1f}" for key in ("speedup", "over_four_sweeps")]
        rows.append([f"{r['m']} x {r['n']}", r["dtype"], r["threads"], f"{r['read_GBps']:.0f}", part["fused"],
                     part.get("narrow", ""), part["full"], part["in place"], part["POT"], *over])  # fmt: skip
    names = "size,K,threads,read GB/s,pass,narrow,full,in place,POT,x POT,x four sweeps"
    return f"{machine(data)}:\n\n" + table(names.split(","), rows)


def milliseconds(seconds: dict[str, float]) -> str:
    return f"{1e3 * seconds['min']:,.{0 if seconds['min'] >= 0.1 else 1}f}"


def solve_table(data: dict[str, Any]) -> str:
    """Times to the certified answer, of the largest problems; the picture has all."""
    largest, rows = max(r["n"] for r in data["solves"]), []
    for r in data["solves"]:
        if r["n"] != largest:
            continue
        cells = [r["reg"], r["rho"], r["passes"], milliseconds(r["seconds"]["mapuot"])]
        for name in POT_METHODS:
            mark = "" if r[name]["reached"] else " (not there)"
            cells += [f"{r[name]['iterations']}{mark}", milliseconds(r["seconds"][name])]
            cells.append(f"{r['speedup'][name]['min']:.1f}")
        rows.append(cells)
    header = ["reg", "reg_m", "passes", "ms", "POT: iterations", "ms", "x", "translation-invariant", "ms", "x"]
    text = [f"{machine(data)}, n = {largest}:", table(header, rows), "Geometric means of the speed-up:"]
    for size, found in data["geometric_mean_speedup"].items():
        sizes = sorted({r["n"] for r in data["solves"] if (r["n"] in SMALL) == (size == "small")})
        text[-1] += f" n = {' and '.join(map(str, sizes))}: {' and '.join(f'{found[k]:.1f}' for k in POT_METHODS)};"
    text[-1] = text[-1][:-1] + "."
    return "\n\n".join(text)


def small_reg_table(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """Passes before and now, on the CPU and on a GPU: geometric mean (worst), ratio (largest of one problem)."""
    rows = []
    for n in sorted({r["n"] for r in cpu["rows"]}):
        for reg in sorted({r["reg"] for r in cpu["rows"]}, reverse=True):
            cells = [n, f"{reg:g}".removeprefix("0")]
            for data in (cpu, gpu):
                found = [r for r in data["rows"] if (r["n"], r["reg"]) == (n, reg)]
                for passes in ([r["before"] for r in found], [r["passes"] for r in found]):
                    mean = geometric_mean(passes)
                    cells.append(f"{mean:.{1 if mean < 10 else 0}f} ({max(passes)})")
                ratios = [r["passes"] / r["before"] for r in found]
                cells.append(f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})")
            rows.append(cells)
    header = ["n", "eps / range(M)", *(f"{where}{what}" for where in ("CPU: ", f"{gpu['device']}: ")
              for what in ("before", "now", "ratio"))]  # fmt: skip
    return table(header, rows)


def tensors_table(data: dict[str, Any]) -> str:
    """Reads and seconds of arrays of three marginals; chains of ten against ten pair solves; passes."""
    rows = []
    for r in data["arrays"]:
        cells = [
            f"{r['n']}^3",
            f"{r['reg']:g}".removeprefix("0"),
            f"{float(r['rho']):g}",
            r["reads"],
            milliseconds_of(r["seconds"]),
        ]
        for way in ("cyclic", "cyclic, translated"):
            many = r[way]["reads"]
            cells += [many or f"> {data['most_reads']}", f"{r[way]['least_seconds'] / r['seconds']:.1f}"]
        rows.append(
            [*cells, f"{r['ott']['seconds'] / r['loose_seconds']:.1f}" if "seconds" in r.get("ott", {}) else ""]
        )
    head = ["array", "reg", "reg_m", "reads", "ms", "cyclic reads", "x", "translated reads", "x", "x OTT to 1e-3"]
    text = [f"{machine(data)}:", table(head, rows)]
    rows = [[" x ".join(map(str, r["shape"])), r["threads"], r["storage"],
             *(f"{r[key]:.2f}".removeprefix("0") for key in ("of_limit", "wide_of_limit"))]
            for r in data["passes"]]  # fmt: skip
    text.append(table(["array", "threads", "K", "pass of the read limit", "float64 sums"], rows))
    rows = [[f"10 x {r['n']}", f"{r['reg']:g}".removeprefix("0"), f"{float(r['rho']):g}", r["reads"], max(r["pair_passes"]),
             milliseconds(r["times"]["chain"]), f"{r['ratio']['of_minima']:.2f}"] for r in data["chains"]]  # fmt: skip
    text.append(table(["chain", "reg", "reg_m", "reads", "of a pair", "ms", "in times of ten pairs"], rows))
    return "\n\n".join(text)


def milliseconds_of(seconds: float) -> str:
    return milliseconds({"min": seconds})


def run(folder: Path) -> str:
    made = (
        ("pass", pass_table, ["pass"], "docs/speed.md"),
        ("solve", solve_table, ["solve"], "README.md"),
        ("tensors", tensors_table, ["tensors"], "docs/speed.md"),
        ("small-reg", small_reg_table, ["small-reg", "small-reg-gpu"], "docs/mathematics.md"),
    )
    for part, make, sources, name in made:
        path = ROOT / name
        body = f"<!-- {part} -->\n{make(*(load(folder, source) for source in sources))}\n<!-- /{part} -->"
        text, count = re.subn(
            rf"<!-- {part} -->.*?<!-- /{part} -->", lambda _, body=body: body, path.read_text(), flags=re.S
        )
        if count != 1:
            raise ValueError(f"{name} must have one pair of markers <!-- {part} -->, found {count}")
        path.write_text(text)
    return f"{', '.join(name for *_, name in made)} written from {folder}"
