"""readme: writes the tables of README.md and docs/ between their markers, from the JSON of their parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .common import RESULTS, ROOT, geometric_mean
from .peers import POT_METHODS
from .points import error_rows
from .solve import SMALL

SIZES = [(1024, 1024), (2048, 2048), (8192, 8192), (10240, 10240), (65536, 1024)]


def load(folder: Path, part: str) -> dict[str, Any]:
    """The part's data; what ``bench all`` leaves out may lie in the record alone."""
    path = folder / f"{part}.json"
    data: dict[str, Any] = json.loads((path if path.exists() else RESULTS / path.name).read_text())
    return data


def recorded(folder: Path, part: str) -> bool:
    return any((where / f"{part}.json").exists() for where in (folder, RESULTS))


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


def short(x: Any) -> str:
    """.05 for 0.05, inf for what JSON has as a word."""
    return f"{float(x):.3g}".removeprefix("0") if float(x) else "0"


def three(x: float) -> str:
    """Three digits, or a whole number."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def tensors_table(*found: dict[str, Any]) -> str:
    """Arrays of three marginals beside cyclic updates and OTT, passes over them, triangles, chains beside ten pairs."""
    text = []
    for data in found:
        gpu = data.get("device") == "gpu"
        arrays, passes, chains = [], [], []
        for r in data["arrays"]:
            ott = r.get("ott", {})
            arrays.append([f"{r['n']}^3", short(r["reg"]), short(r["rho"]), r["reads"], f"{1e3 * r['seconds']:.3g}"])
            for way in (r["cyclic"], r["cyclic, translated"]):
                arrays[-1] += [way["reads"] or f"> {data['most_reads']}", f"{way['least_seconds'] / r['seconds']:.2g}"]
            arrays[-1].append(f"{ott['seconds'] / r['loose_seconds']:.2g}" if "seconds" in ott else "")
        for r in data["passes"]:
            parts = [f"{r[key]:.2f}".removeprefix("0") for key in ("of_limit", "wide_of_limit") if key in r]
            passes.append([" x ".join(map(str, r["shape"])), *([] if gpu else [r["threads"]]), r["storage"], *parts])
        triangles = [
            [r["n"], short(r["reg"]), short(r["rho"]), r["reads"], three(1e3 * r["seconds"])]
            for r in data.get("triangles", [])
        ]
        for r in data["chains"]:
            cells = [r["n"], short(r["reg"]), short(r["rho"]), r["reads"], max(r["pair_passes"])]
            chains.append([*cells, milliseconds(r["times"]["chain"]), f"{r['ratio']['of_minima']:.2f}"])
        head = [
            "array",
            "reg",
            "reg_m",
            "reads",
            "ms",
            "cyclic: reads",
            "x",
            "translated: reads",
            "x",
            "OTT to 1e-3: x",
        ]
        each = ["K", "pass, of the read limit"]
        text += [
            f"{'One NVIDIA H200' if gpu else machine(data)}:",
            table(head, arrays),
            table(["array", *each] if gpu else ["array", "threads", *each, "with float64 sums"], passes),
            table(["triangle, points", "reg", "reg_m", "reads", "ms"], triangles),
            table(["chain of ten, points", "reg", "reg_m", "reads", "of a pair", "ms", "times ten pairs"], chains),
        ]
    return "\n\n".join(text)


def points_table(*found: dict[str, Any]) -> str:
    """Passes over points, and solves beside peers as "seconds (error of the plan)"; a paragraph a machine."""
    text = []
    for data in found:
        gpu = "of_ex2" in data["passes"][0]
        text.append(f"{'One NVIDIA H200' if gpu else machine(data)}:")
        kinds = [k for k in ("float32", "last", "float64", "stored float32") if k in data["passes"][0]["seconds"]]
        rows = [
            [p["n"], p["d"], *(three(p["pairs_a_second"][k] / 1e9) if k in p["seconds"] else "" for k in kinds),
             *([short(p["of_ex2"])] if gpu else [])]
            for p in data["passes"]
        ]  # fmt: skip
        names = [f"{k}, 10^9 {'evaluations' if gpu else 'pairs'} a second" for k in kinds]
        text.append(table(["points", "dimensions", *names, *(["float32, of 2^x"] if gpu else [])], rows))
        solves: dict[Any, dict[str, str]] = {}
        for s in data["solves"]:
            cell = f"{s['seconds']:.3g} ({s['error']:.0e})"
            solves.setdefault((s["n"], s["d"], short(s["reg"])), {})[s["who"]] = cell
        who = list(dict.fromkeys(s["who"] for s in data["solves"]))
        rows = [[*case, *(cells.get(name, "") for name in who)] for case, cells in solves.items()]
        text.append(table(["points", "dimensions", "reg", *who], rows))
        if data["to_error"]:
            head, cells, mean = error_rows(data["to_error"])
            text.append(f"{table(head, cells)}\n\nThe geometric mean is {mean:.3g} times ours.")
    return "\n\n".join(text)


def sparse_table(*found: dict[str, Any]) -> str:
    """Passes over stored pairs beside the dense pass, by pattern and share of the pairs; a paragraph a machine."""
    text = []
    for data in found:
        rows: dict[str, list[str]] = {}
        shares = sorted({p["density"] for p in data["passes"] if p["pattern"] == "uniform"})
        for p in (p for p in data["passes"] if p["n"] == data["n"]):
            seconds = p["seconds"]
            times = seconds["dense mixed"] / seconds["mixed"] if "dense mixed" in seconds else 0
            cell = f"{1e3 * seconds['mixed']:.3g}" + (f" ({times:.1f})" if times else "")
            rows.setdefault(p["pattern"], []).append(cell)
        where = "One NVIDIA H200" if data.get("device") == "gpu" else machine(data)
        dense = [p["seconds"]["dense mixed"] for p in data["passes"] if "dense mixed" in p["seconds"]]
        beside = f", the dense pass {1e3 * min(dense):.3g} ms" if dense else ""
        text.append(f"{where}, n = {data['n']}{beside}:")
        text.append(table(["pairs", *(f"{100 * share:g} %" for share in shares)], [[k, *v] for k, v in rows.items()]))
        if x := data.get("large"):
            text.append(
                f"{x['n']:,} points with {x['k']} neighbours, {x['pairs']:,} pairs: certified {x['error']:.1e} "
                f"in {x['passes']} passes, {x['solve']:.1f} s, at most {x['peak'] / 2**30:.1f} GiB on the host."
            )
    return "\n\n".join(text)


def run(folder: Path) -> str:
    pairs = [name for name in ("sparse_gpu", "sparse") if recorded(folder, name)]
    made = (
        ("pass", pass_table, ["pass"], "docs/speed.md"),
        ("solve", solve_table, ["solve"], "README.md"),
        (
            "tensors",
            tensors_table,
            [name for name in ("tensors_gpu", "tensors") if recorded(folder, name)],
            "docs/speed.md",
        ),
        (
            "points",
            points_table,
            [name for name in ("points_gpu", "points") if recorded(folder, name)],
            "docs/speed.md",
        ),
        ("small-reg", small_reg_table, ["small-reg", "small-reg-gpu"], "docs/mathematics.md"),
        ("sparse", sparse_table, pairs, "docs/speed.md"),
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
