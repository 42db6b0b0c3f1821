"""zoo: the data that users have: passes, time a pair and POT on clouds of many kinds, with pairs stored, made, skipped.

Two draws of each set, masses 1 and 1.2, reg_m the median squared distance and reg shares of it, all solved to a
certified 1e-6: "points" make their costs in each pass, "truncated" skips pairs, "matrix" is formed first. A pair's time
is the call's time over passes and all pairs. On a CPU one thread works and its processor's clock counts, so that
neighbours cost little. POT is given the iterations that it needs (peers.py), between POT_SIZE points at most; its time
stands beside the time of "matrix" there. With --device gpu the host's clock counts. In place of POT stand peers that
certify nothing: 100 iterations of torch on logarithms over the matrix and of flash-sinkhorn, in float32 by untuned
kernels (tuning takes 94 s a shape), and GeomLoss's own number of iterations at scaling .9, each beside the path that
"auto" takes where no pair is skipped.
"""

import contextlib
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

import mapuot

from . import common, peers
from . import points as of_points
from .device import wall

SIZE, GPU_SIZE, QUICK_SIZE, POT_SIZE = 4_000, 20_000, 300, 1_000
REGS = (0.05, 0.005)
RHO = 1.0  # reg and reg_m are in units of the median cost
TOL = 1e-6
LARGE, FEW = 50, 500  # above LARGE dimensions a cloud has at most FEW points
SAMPLE = 500  # points of each cloud that tell the median
MADE_DIMENSIONS = 12  # up to 12 dimensions a GPU makes the costs in each pass, above 12 a matrix first
NATS = 1.0  # of "truncated": skip all that can be skipped
ITERATIONS = 100  # of torch and of flash-sinkhorn

Sets = dict[str, tuple[Callable[[Any, int, int], Any], tuple[int, ...]]]


def uniform(rng: Any, n: int, d: int) -> Any:
    return rng.random((n, d))


def clusters(rng: Any, n: int, d: int, heavy: bool = False) -> Any:
    """40 clusters of widths .01 to 1 and unequal sizes, the same in every draw."""
    same = np.random.default_rng(7)
    count = 40
    centres = 3 * same.random((count, d))
    widths = same.permutation(np.geomspace(0.01, 1, count))
    which = rng.choice(count, n, p=same.dirichlet(np.ones(count)))
    if heavy:
        noise = rng.standard_t(3, (n, d))
    else:
        noise = rng.normal(size=(n, d))
    return centres[which] + widths[which, None] * noise


def student(rng: Any, n: int, d: int) -> Any:
    return rng.standard_t(2, (n, d))


def outlier(rng: Any, n: int, d: int) -> Any:
    points = uniform(rng, n, d)
    points[0] = 100
    return points


def lattice(rng: Any, n: int, d: int) -> Any:
    """Whole numbers up to 8: neighbours are many kernel widths apart, and most points are there twice and more."""
    return np.rint(8 * uniform(rng, n, d))


def far(rng: Any, n: int, d: int) -> Any:
    return 1e6 + uniform(rng, n, d)


def spiral(rng: Any, n: int, d: int) -> Any:
    """A noisy spiral in two dimensions; in three the sheet over it."""
    angle = 3 * math.pi * np.sqrt(rng.random(n))
    points = np.column_stack([angle * np.cos(angle), angle * np.sin(angle), *rng.random((d - 2, n))])
    return points + 0.1 * rng.normal(size=(n, d))


def of_sklearn(name: str) -> Callable[[Any, int, int], Any]:
    """Return a maker of a draw, without replacement, of a data set that scikit-learn ships, its columns scaled."""

    def points(rng: Any, n: int, d: int) -> Any:
        from sklearn import datasets

        table = getattr(datasets, f"load_{name}")().data
        table = table / np.maximum(table.std(0), 1e-9)
        return table[rng.permutation(len(table))[: min(n, len(table) // 2)]]

    return points


def colours(rng: Any, n: int, d: int) -> Any:
    """Return colours of pixels of a photograph that scikit-image ships, another one for each cloud."""
    from skimage import data

    picture = (data.astronaut, data.coffee)[int(rng.integers(2))]()
    return picture.reshape(-1, d)[rng.choice(picture.size // d, n)] / 255.0


MADE: Sets = {
    "uniform": (uniform, (3, 1, 2, 10, 50, 300, 3000)), "normal": (lambda rng, n, d: rng.normal(size=(n, d)), (3,)),
    "clusters": (clusters, (3, 2, 10)), "clusters, heavy tails": (functools.partial(clusters, heavy=True), (3,)),
    "Student-t, 2 degrees": (student, (3, 10)), "one outlier": (outlier, (3,)), "lattice": (lattice, (3, 2)),
    "1e6 + uniform": (far, (3,)), "spiral and sheet": (spiral, (3, 2)), "unequal masses": (uniform, (3,)),
    "zero masses": (uniform, (3,)),
}  # fmt: skip
SHIPPED: Sets = {
    "digits": (of_sklearn("digits"), (64,)),
    "wine": (of_sklearn("wine"), (13,)),
    "breast cancer": (of_sklearn("breast_cancer"), (30,)),
    "colours of photographs": (colours, (3,)),
}
LIBRARIES = {"colours of photographs": "skimage"}  # the others: sklearn


def draw(name: str, n: int, d: int) -> tuple[Any, Any, Any, Any, float]:
    """Return (x, y, a, b, median cost) of a set."""
    maker = (MADE | SHIPPED)[name][0]
    rng = np.random.default_rng([n, d])
    x = maker(rng, n, d)
    y = maker(rng, n, d)
    a = np.ones(len(x))
    b = np.ones(len(y))
    if name == "unequal masses":
        a = rng.gamma(0.3, size=len(x))
        b = rng.gamma(0.3, size=len(y))
    if name == "zero masses":
        a[::10], b[::7] = 0, 0
    if d <= LARGE:
        some = x[rng.permutation(len(x))[:SAMPLE], None] - y[rng.permutation(len(y))[:SAMPLE]]
    else:
        some = None
    if some is not None:
        costs = (some**2).sum(-1)
    else:
        costs = np.asarray(mapuot.PointCloud(x, y))
    return x, y, a / a.sum(), 1.2 * b / b.sum(), float(np.median(costs))


def ways(x: Any, y: Any, gpu: bool) -> dict[str, Callable[[], Any]]:
    """Return how M is made; a GPU forms the matrix in its own memory, as the host takes 4 s for 20,000 x 20,000."""
    return {
        "points": lambda: mapuot.PointCloud(x, y, truncate=None, form=None),
        "truncated": lambda: mapuot.PointCloud(x, y, truncate=NATS),
        "matrix": lambda: (
            mapuot.PointCloud(x, y, truncate=None, form=2**40) if gpu else np.asarray(mapuot.PointCloud(x, y))
        ),
    }


def measured(name: str, n: int, d: int, share: float, gpu: bool) -> dict[str, Any]:
    x, y, a, b, median = draw(name, n, d)
    masses = a, b
    reg = share * median
    rho = RHO * median
    row: dict[str, Any] = {"set": name, "n": len(x), "d": x.shape[1], "reg": share, "ways": {}}
    for way, made in ways(x, y, gpu).items():
        result, seconds = solved(made, *masses, reg, rho, gpu)
        row["ways"][way] = {
            "passes": result.n_passes, "seconds": seconds, "bound": result.error_bound, "status": result.status,
            "ns_a_pair": 1e9 * seconds / max(1, result.n_passes) / len(x) / len(y), "how": result.how,
            "kept": result.skipped.kept.share if result.skipped else 1.0,
        }  # fmt: skip
    if gpu:
        row["peers"] = timed_peers(x, y, *masses, reg, rho)
    elif importlib.util.find_spec("ot"):
        x, y, *masses, median = draw(name, min(n, POT_SIZE), d)
        case = ways(x, y, False)["matrix"](), *masses, share * median, RHO * median
        row["POT"] = peers.pot_iterations("POT", case, TOL, 1, clock=time.process_time)
        row["POT"]["ours"] = solved(lambda: case[0], *masses, *case[3:], gpu)[1]
    return row


def solved(made: Callable[[], Any], a: Any, b: Any, reg: float, rho: float, gpu: bool) -> tuple[Any, float]:
    """Return an answer and its seconds: of the thread that works, on a GPU of the host, after a call that compiles."""
    if gpu:
        options: dict[str, Any] = {"backend": "cuda"}
    else:
        options = {"threads": 1}

    def call() -> Any:
        return peers.quiet(lambda: mapuot.solve(made(), a, b, reg=reg, reg_m=rho, tol=TOL, **options))

    if gpu:
        return call(), wall(call)
    begun = time.process_time()
    return call(), time.process_time() - begun


def timed_peers(x: Any, y: Any, a: Any, b: Any, reg: float, rho: float) -> dict[str, float | None]:
    """Return the seconds of each peer, None where it is not there or does not take these points."""
    calls = {
        "torch": lambda *case: torch_iterations(*case, reg, rho),
        "flash_sinkhorn": lambda *case: of_points.flash(*case, reg, rho, ITERATIONS, allow_tf32=False, autotune=False),
        "geomloss": lambda *case: geomloss(*case, reg, rho),
    }
    case = x, y, a, b
    found: dict[str, float | None] = dict.fromkeys(calls)
    for name, call in calls.items():
        if importlib.util.find_spec(name):
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # no kernel for so many dimensions
                call(*case)
                found[name] = wall(functools.partial(call, *case))
    return found


def torch_iterations(x: Any, y: Any, a: Any, b: Any, reg: float, rho: float) -> None:
    """Make ITERATIONS unbalanced iterations on logarithms, as programs write them, in float32 on the GPU."""
    import torch

    x, y, a, b = (torch.as_tensor(z, dtype=torch.float32, device="cuda") for z in (x, y, a, b))
    peers.torch_logs(-(torch.cdist(x, y) ** 2) / reg, torch.log(a), torch.log(b), rho / (rho + reg), ITERATIONS)


def geomloss(x: Any, y: Any, a: Any, b: Any, reg: float, rho: float) -> None:
    """Compute GeomLoss's value without its self terms; its costs are half the squared distances."""
    import torch
    from geomloss import SamplesLoss

    blur = math.sqrt(reg / 2)
    reach = math.sqrt(rho / 2)
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, reach=reach, debias=False, scaling=0.9, backend="tensorized")
    float(loss(*(torch.as_tensor(z, dtype=torch.float32, device="cuda") for z in (a, x, b, y))))


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    size = GPU_SIZE if gpu else SIZE
    if args.quick:
        size = QUICK_SIZE
    size = args.size or size
    shipped = {k: v for k, v in SHIPPED.items() if importlib.util.find_spec(LIBRARIES.get(k, "sklearn"))}
    cases = [
        (name, min(size, FEW) if d > LARGE else size, d, share)
        for name, (_, dimensions) in (MADE | shipped).items()
        for d in dimensions[: 1 if args.quick else None]
        for share in REGS
    ]
    with common.blas_threads(1):
        measured("uniform", QUICK_SIZE, 3, REGS[0], gpu)  # imported and compiled once
        found = [measured(*case, gpu) for case in tqdm(cases, file=sys.stderr)]
    return {"n": size, "rows": found}


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return passes and time a pair of every set relative to the uniform set, with the median and the worst."""
    rows = data["rows"]
    lines = []
    ratios = []
    beside = {r["reg"]: r["ways"]["points"]["passes"] for r in reversed(rows) if r["set"] == "uniform" and r["d"] == 3}
    for r in rows:
        points, cut, dense = (r["ways"][way] for way in ("points", "truncated", "matrix"))
        cells = [told(points), points["ns_a_pair"], told(cut), f"{100 * cut['kept']:.3g} %",
                 cut["ns_a_pair"] / cut["kept"], told(dense), dense["ns_a_pair"]]  # fmt: skip
        if theirs := r.get("POT"):
            times = theirs["seconds"] / theirs["ours"]
            ratios += [times] * theirs["reached"]
            known = theirs["reached"] or "carried_on" in theirs
            more = "" if theirs["reached"] else "> "
            if known:
                cells += [f"{more}{theirs['iterations']}", f"{more}{times:.3g}"]
            else:
                cells += ["fails", ""]
        for name, seconds in r.get("peers", {}).items():
            if r["d"] <= MADE_DIMENSIONS and r["n"] >= GPU_SIZE:
                own = points
            else:
                own = dense
            times = seconds / own["seconds"] if seconds else None
            cells.append(f"{times:.3g}" if times else "")
            ratios += [times] if times and name == "flash_sinkhorn" else []
        lines.append([r["set"], r["n"], r["d"], common.short(r["reg"]), *cells])
    gpu = common.on_gpu(data)
    if gpu:
        peer = "flash-sinkhorn"
        columns = [f"{x}: times ours" for x in ("torch", peer, "GeomLoss")]
    else:
        peer = "POT"
        columns = [f"{peer}: iterations", "times ours"]
    head = ["set", "points", "d", "reg", "points: passes", "ns a pair", "truncated: passes", "kept",
            "ns a kept pair", "matrix: passes", "ns a pair", *columns]  # fmt: skip
    ours = [(r["ways"]["points"]["passes"] / beside[r["reg"]], r["set"]) for r in rows if r["reg"] in beside]
    most = max(ours)
    text = [
        f"{common.machine_line(data)}:", common.table(head[: len(lines[0])], lines),
        f"Passes over those of uniform points in 3-D: {np.median([x for x, _ in ours]):.2g} in the median, "
        f"{most[0]:.2g} at most ({most[1]})."
        + (f" {peer} takes {np.median(ratios):.3g} times our seconds in the median, from {min(ratios):.3g} to "
           f"{max(ratios):.3g}." if ratios else ""),
        "Beside uniform points of as many dimensions, all pairs taken, these take more than twice the time a pair: "
        f"{exceptions(rows, 'ns_a_pair', 2.0)}; and these more than 1.5 times the passes: "
        f"{exceptions(rows, 'passes', 1.5)}.",
    ]  # fmt: skip
    return common.text_of(*text)


def exceptions(rows: list[dict[str, Any]], name: str, most: float) -> str:
    """Name the sets with a number more than ``most`` times the uniform points' number of their n, d and reg."""
    keys = [(r["n"], r["d"], r["reg"]) for r in rows]
    uniform = {key: r["ways"]["points"][name] for key, r in zip(keys, rows, strict=True) if r["set"] == "uniform"}
    found: dict[str, list[str]] = {}
    for key, r in zip(keys, rows, strict=True):
        if key in uniform and (times := r["ways"]["points"][name] / uniform[key]) > most:
            found.setdefault(f"{r['set']} in {key[1]}-D", []).append(f"{times:.2g} at {common.short(key[2])}")
    return ", ".join(f"{who} ({', '.join(times)})" for who, times in found.items()) or "none"


def told(way: dict[str, Any]) -> str:
    if way["status"] == "converged":
        return str(way["passes"])
    return f"> {way['passes']}"
