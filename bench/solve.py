"""solve: time from the arrays to a plan whose error our certificate bounds by 1e-6, against POT on the same threads.

Every answer is certified before it is timed. POT runs exactly as many iterations as it needs, at most CAP; where these
do not suffice its time to CAP stands and the row is marked. "POT as called" is one call with POT's own defaults.
"""

import sys
from typing import Any

from tqdm import tqdm

from . import common, peers, problems

TOL = 1e-6
REGS, RHOS, SIZES, SMALL = (0.1, 0.01), (0.1, 1.0, 10.0), (2000, 5000), (100, 500)
LONG = 4.0  # seconds from which one run has to do


def time_case(n: int, reg: float, rho: float, threads: int, budget: float) -> dict[str, Any]:
    case = *problems.make("a", n, n, seed=3), reg, rho
    ours = peers.ours(case, TOL, threads=threads)
    error = peers.certify((ours.plan, ours.log_u, ours.log_v), case)
    assert error <= 1.01 * ours.error_bound + 1e-9, f"our bound {ours.error_bound} is not the judge's {error}"
    row: dict[str, Any] = {"n": n, "reg": reg, "rho": rho, "threads": threads, "passes": ours.n_passes, "error": error}
    # the thread count is left to the library where the machine's own is asked for: small problems run on one
    own = threads if n > 500 else None
    calls: dict[str, Any] = {
        "mapuot": lambda: peers.ours(case, TOL, threads=own).plan,
        "mapuot, no plan": lambda: peers.ours(case, TOL, threads=own),
    }
    seconds: dict[str, Any] = {}
    for name, method in peers.POT_METHODS.items():
        found = row[name] = peers.pot_iterations(name, case, TOL, threads)
        if found["seconds"] < LONG:
            calls[name] = lambda k=found["iterations"], method=method: peers.pot(case, k, method)
        else:
            seconds[name] = common.summary([found["seconds"]])
    row["POT as called"] = peers.pot_default(case)
    if n <= peers.OTT_UP_TO and (ott := peers.ott(case, TOL)):
        error = peers.certify(ott(), case)
        row["OTT-JAX"], calls["OTT-JAX"] = {"error": error, "reached": error <= TOL}, ott
    row["seconds"] = {**common.summaries(common.interleave(calls, budget, (3, 50))), **seconds}
    best, others = row["seconds"]["mapuot"], set(row["seconds"]) - {"mapuot", "mapuot, no plan"}
    row["speedup"] = {k: {key: row["seconds"][k][key] / best[key] for key in ("min", "median")} for k in others}
    return row


def run(args: Any) -> dict[str, Any]:
    sizes = (1000,) if args.quick else SIZES
    cases = [(n, reg, rho) for n in (*SMALL, *sizes) for reg in REGS for rho in RHOS]
    peers.pot_default((*problems.make("a", 9, 9, seed=3), 1.0, 1.0))  # its import takes seconds
    with common.blas_threads(args.threads):
        rows = [time_case(*case, args.threads, 0.3 if args.quick else 1.0) for case in tqdm(cases, file=sys.stderr)]
    means = {}
    for label, chosen in (("small", SMALL), ("large", sizes)):
        found = [row for row in rows if row["n"] in chosen]
        names = found[0]["speedup"]
        means[label] = {k: common.geometric_mean([r["speedup"][k]["min"] for r in found]) for k in names}
    return {"tol": TOL, "solves": rows, "geometric_mean_speedup": means}


def tables(data: dict[str, Any]) -> str:
    """Times to the certified answer, of the largest problems."""
    largest, rows = max(r["n"] for r in data["solves"]), []
    for r in (r for r in data["solves"] if r["n"] == largest):
        cells = [str(r["reg"]), str(r["rho"]), r["passes"], common.milliseconds(r["seconds"]["mapuot"])]
        for name in peers.POT_METHODS:
            mark = "" if r[name]["reached"] else " (not there)"
            cells += [f"{r[name]['iterations']}{mark}", common.milliseconds(r["seconds"][name])]
            cells.append(f"{r['speedup'][name]['min']:.1f}")
        rows.append(cells)
    header = ["reg", "reg_m", "passes", "ms", "POT: iterations", "ms", "x", "translation-invariant", "ms", "x"]
    means = []
    for size, found in data["geometric_mean_speedup"].items():
        sizes = sorted({r["n"] for r in data["solves"] if (r["n"] in SMALL) == (size == "small")})
        means.append(
            f"n = {' and '.join(map(str, sizes))}: {' and '.join(f'{found[k]:.1f}' for k in peers.POT_METHODS)}"
        )
    text = [f"{common.machine_line(data)}, n = {largest}:", common.table(header, rows)]
    return common.text_of(*text, f"Geometric means of the speed-up: {'; '.join(means)}.")
