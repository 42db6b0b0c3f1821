"""brief: short tables of one message each, for pages that are read on a phone, from the records of the other parts.

A table has at most five columns; ``docs/speed_tables.md`` has all columns of the same records.
"""

from typing import Any

from . import common

PASSES = [(1024, 1024), (8192, 8192), (65536, 1024)]  # in cache, square, long
GPU_PASSES = [(1024, 1024), (4096, 4096), (16384, 16384), (32768, 32768), (10000, 65536)]
CUBE = 128
MATRIX = 20_000  # most points of a matrix of GeomLoss's
LOSSES = ("GeomLoss 0.9", "mapuot .001")


def span(seconds: float) -> str:
    """Return a time with the unit that it is read in."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def off(error: float) -> str:
    if error >= 0.01:
        return f"{100 * error:.0f} % off"
    return f"{error:.0e} off"


def front(solve: dict[str, Any], words: dict[str, Any], gromov: dict[str, Any], loss: dict[str, Any]) -> str:
    """Return five figures: a plan beside POT, losses beside GeomLoss, cells beside moscot, two spaces beside POT."""
    most = max(row["n"] for row in solve["solves"])
    row = next(r for r in solve["solves"] if (r["n"], r["reg"], r["rho"]) == (most, 0.01, 1.0))
    lines = [
        ["POT", f"plan of {most} x {most}, reg 0.01, reg_m 1"]
        + [f"{span(row['seconds'][who]['min'])}, {off(row[who]['error'] if who in row else row['error'])}"
           for who in ("POT", "mapuot")]
    ]  # fmt: skip
    for name, task, call in (
        ("GeomLoss", "loss and gradient of 1000 points", "SamplesLoss"),
        ("moscot", "coupling of 1000 with 1000 cells", "TemporalProblem"),
    ):
        found = next(r for r in words["words"] if call in r["call"])
        cells = [f"{span(found['seconds'][who])}, {off(found['error'][who])}" for who in ("before", "after")]
        lines.append([name, task, *cells])
    found = next(r for r in reversed(gromov["rows"]) if r["POT"]["settled"])  # from one start, to one value
    own = [f"{span(found[who]['cpu'])} of CPU" for who in ("POT", "mapuot, start a b^T")]
    lines.append(["POT", f"unbalanced Gromov-Wasserstein of {found['n']} points", *own])
    most = max(row["n"] for row in loss["rows"] if row["n"] <= MATRIX)
    row = next(r for r in loss["rows"] if (r["n"], r["blur"], r["reach"]) == (most, 0.05, None))
    cells = [f"{span(x['seconds'])}, {off(x['slope_error'])}" for x in (row["losses"][name] for name in LOSSES)]
    lines.append(["GeomLoss", f"balanced loss and gradient of {most} clustered points, on a GPU", *cells])
    mean = solve["geometric_mean_speedup"]["large"]
    return common.text_of(
        common.table(["instead of", "for", "it takes", "mapuot takes"], lines),
        f"Row 1: {common.machine_line(solve)}; rows 2 to 4: {common.machine_line(words)}; row 5: "
        f"{common.machine_line(loss)}, GeomLoss at scaling .9. Over twelve problems of "
        f"2000 and 5000 points POT's default method takes {mean['POT']:.0f} times as long as mapuot, its "
        f"translation-invariant method {mean['POT, translation-invariant']:.0f} times (geometric means).",
    )


def solves(data: dict[str, Any]) -> str:
    """Return times to the certified answer, of the largest problems."""
    most = max(r["n"] for r in data["solves"])
    names = "mapuot", "POT", "POT, translation-invariant"
    rows = []
    for row in data["solves"]:
        if row["n"] == most:
            cells = [row["reg"], row["rho"]]
            for name in names:
                was_stopped = not row.get(name, row).get("reached", True)
                cells.append(span(row["seconds"][name]["min"]) + " (stopped)" * was_stopped)
            rows.append(cells)
    return common.text_of(f"{common.machine_line(data)}, n = {most}:", common.table(["reg", "reg_m", *names], rows))


def passes(data: dict[str, Any]) -> str:
    """Return how near to the read bandwidth a pass of all threads comes, beside POT's iteration."""
    threads = max(r["threads"] for r in data["passes"])
    rows = [
        [f"{r['m']} x {r['n']}", r["dtype"], *(f"{r['fraction'][k]['of_minima']:.2f}" for k in ("full", "POT"))]
        for r in data["passes"] if (r["m"], r["n"]) in PASSES and r["threads"] == threads
    ]  # fmt: skip
    return common.text_of(
        f"{common.machine_line(data)}, {threads} threads; 1 is the speed at which K can be read from memory:",
        common.table(["size", "K", "pass of mapuot", "iteration of POT"], rows),
    )


def passes_gpu(data: dict[str, Any]) -> str:
    """Return microseconds a pass on a GPU."""
    found = {(r["m"], r["n"]): r for r in data["passes"]}
    keys = ("limit", "float32", "POT torch, graph")
    rows = [[f"{m} x {n}", *(1e6 * found[m, n][k] for k in keys)] for m, n in GPU_PASSES if (m, n) in found]
    head = ["size", "read of K, us", "pass, us", "POT's products, us"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, rows))


def to_error(data: dict[str, Any]) -> str:
    """Return seconds to a plan error of 1e-3 between points, beside flash-sinkhorn."""
    rows = []
    times = []
    for r in data["to_error"]:
        fast = min(t["seconds"] for t in r["flash"] if t["reached"])
        times.append(fast / r["seconds"])
        rows.append([common.short(r["reg"]), common.short(r["rho"]), span(r["seconds"]), span(fast)])
    n = data["to_error"][0]["n"]
    return common.text_of(
        f"{common.machine_line(data)}, {n} points in three dimensions:",
        common.table(["reg", "reg_m", "mapuot", "flash-sinkhorn"], rows),
        f"flash-sinkhorn takes {common.geometric_mean(times):.2g} times as long (geometric mean).",
    )


def sets(data: dict[str, Any]) -> str:
    """Return passes on the sets in three dimensions and on real data, beside POT's time."""
    rows: dict[tuple[str, int], list[str]] = {}
    for r in data["rows"]:
        if r["d"] != 3 and r["set"] not in ("digits", "wine", "breast cancer"):
            continue
        pot = r["POT"]
        if pot["reached"]:
            cell = f"{pot['seconds'] / pot['ours']:.0f} x"
        else:
            cell = "fails"
        rows.setdefault((r["set"], r["d"]), []).extend([str(r["ways"]["points"]["passes"]), cell])
    head = ["set", "passes at reg .05", "POT at .05", "passes at reg .005", "POT at .005"]
    lines = [[f"{name}, {d}-D" if d != 3 else name, *cells] for (name, d), cells in rows.items()]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))


def marginals(data: dict[str, Any]) -> str:
    """Return milliseconds of arrays of three marginals, and how many times as long cyclic updates take."""
    rows = [
        [f"{r['n']}^3", common.short(r["reg"]), common.short(r["rho"]), f"{1e3 * r['seconds']:.3g}",
         f"{r['cyclic']['least_seconds'] / r['seconds']:.2g} x"]
        for r in data["arrays"] if r["n"] == CUBE
    ]  # fmt: skip
    head = ["array", "reg", "reg_m", "mapuot, ms", "cyclic updates"]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, rows))


def hard_sides(data: dict[str, Any]) -> str:
    """Return times of balanced problems to a certified 1e-6, beside a Newton path and Sinkhorn's iterations."""
    rows = []
    for r in data["rows"]:
        if r["p"] == 1:
            points = f"{r['n']} points"
        else:
            points = f"{r['p']} problems of {r['n']} points"
        cells = [span(r["mapuot 1e-06"]["seconds"])]
        if "Sinkhorn" in r:
            other = r["Sinkhorn"]
            cells += [span(r["Newton path 1e-06"]["seconds"])]
            cells += [f"{span(other['seconds'])}, {100 * other['missed']:.2g} % missed"]
        else:
            cells += ["", ""]
        rows.append([points + ", uniform" * r["uniform"], f"{r['spread']:.0e}", *cells])
    head = ["clustered clouds", "range / reg", "mapuot", "Newton path", "1000 iterations of Sinkhorn"]
    return common.text_of(
        f"{common.machine_line(data)}, both marginals prescribed, equal masses:", common.table(head, rows)
    )


def scalings(data: dict[str, Any]) -> str:
    """Return the error of GeomLoss's value at each scaling, and the time of both at that error."""
    text = []
    for case in data["cases"]:
        if case["reach"] is None:
            reach = "balanced"
        else:
            reach = f"reach {case['reach']:g}"
        rows = [[f"{r['scaling']:g}", off(r["error"]), span(r["seconds"]), span(r["ours"])] for r in case["rows"]]
        text += [
            f"{data['n']} points in 3-D, blur {case['blur']:g}, {reach}:",
            common.table(["scaling", "GeomLoss's value", "its time", "mapuot, as near"], rows),
        ]
    return common.text_of(f"{common.machine_line(data)}, both on CPU, value and gradient.", *text)


TABLES = {
    "front": front, "solve": solves, "brief-pass": passes, "brief-gpu": passes_gpu, "brief-points": to_error,
    "brief-zoo": sets, "brief-tensors": marginals, "scaling": scalings,
    "brief-hard": hard_sides,
}  # fmt: skip
