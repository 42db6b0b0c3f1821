"""tensors: many marginals against other libraries, every answer checked by our certificate.

Arrays of three marginals: reads of the array to a certified 1e-6 by cyclic updates in numpy (one read a marginal, as
everybody writes them; with and without the translation), by OTT's MMSinkhorn (balanced, to its own 1e-3), and by us;
time of the calls themselves. The pass of ours against the read limit of its kernel. Triangles of three clouds. Chains
of ten populations against ten pair solves of the same sizes, in turns.

With --device gpu costs are CuPy's arrays, and cyclic updates and OTT run there, too.
"""

import functools
import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import mapuot
from mapuot.penalties import kl_divergence, plan_error

from . import common, device, peers
from .bandwidth import Buffer

CASES = ((0.05, 1.0), (0.05, 10.0), (0.01, 1.0), (0.05, math.inf), (0.01, math.inf))
SHAPES = ((64, 64, 64), (128, 128, 128), (256, 200, 300), (257, 199, 301), (400, 400, 400))  # of passes
MOST_READS, TOL, OTT_TOL = 1200, 1e-6, 1e-3
LONG = 10.0  # seconds of a call that is made once
COUNTED = 64  # largest size for a count of the reads of cyclic updates; larger sizes take the count of this one


def clouds(n: int, count: int, ratio: float = 1.1) -> tuple[list[Any], list[Any]]:
    """Points that drift by .4 from the first marginal to the last, and their masses."""
    rng = np.random.default_rng(n)
    points = [rng.random((n, 2)) * 0.6 + 0.4 * k / count for k in range(count)]
    return points, [rng.dirichlet(np.full(n, 3.0)) * ratio**k for k in range(count)]


def squares(x: Any, y: Any) -> Any:
    return ((x[:, None] - y) ** 2).sum(2)


def array_problem(n: int, rho: float) -> tuple[Any, list[Any], list[Any], float]:
    """(C, masses, points, the divisor of C): all three pairs count, and the largest entry is 1."""
    x, masses = clouds(n, 3, 1.0 if rho == math.inf else 1.1)
    C = squares(x[0], x[1])[:, :, None] + squares(x[1], x[2])[None] + squares(x[0], x[2])[:, None]
    scale = float(C.max())
    if rho == math.inf:
        masses = [w / w.sum() for w in masses]
    return C / scale, masses, x, scale


def xp_of(C: Any) -> Any:
    """Return the module that an array is of: numpy or cupy."""
    if isinstance(C, np.ndarray):
        return np
    return import_module("cupy")


class Cyclic:
    """One marginal after the other, a read of the kernel each."""

    def __init__(self, C: Any, masses: list[Any], reg: float, rho: float, translate: bool) -> None:
        xp = xp_of(C)
        self.masses, self.reg, self.rho, self.translate = masses, reg, rho, translate
        self.w = [xp.asarray(x) for x in masses]
        self.K = xp.exp(-C / reg)
        self.reads = 0

    def sums(self, k: int) -> Any:
        self.reads += 1
        W = self.K
        for m in (2, 1, 0):
            if m != k:
                W = xp_of(W).tensordot(W, self.w[m], axes=(m, 0))
        return W

    def cycle(self) -> float:
        """The certified error after it, which costs no read here."""
        for k, a in enumerate(self.masses):
            if self.rho == math.inf:
                fi = 1.0
            else:
                fi = self.rho / (self.rho + self.reg)
            self.w[k] = a * self.sums(k) ** -fi
        if self.translate and self.rho < math.inf:
            R = self.rho / self.reg
            logs = [R * math.log((a * (w / a) ** (-1 / R)).sum()) for a, w in zip(self.masses, self.w, strict=True)]
            self.w = [w * math.exp(x - sum(logs) / 3) for w, x in zip(self.w, logs, strict=True)]
        return self.error()

    def error(self) -> float:
        P = self.K * self.w[0][:, None, None] * self.w[1][:, None] * self.w[2]
        sums = P.sum((1, 2)), P.sum((0, 2)), P.sum((0, 1))
        mass = float(P.sum())
        gap = 0.0
        if self.rho == math.inf:
            return sum(float(np.abs(r - a).sum()) for r, a in zip(sums, self.masses, strict=True)) / mass
        for r, a, w in zip(sums, self.masses, self.w, strict=True):
            gap += self.rho * float(kl_divergence(r, a * (w / a) ** (-self.reg / self.rho)).sum())
        return plan_error(max(gap, 0.0) / (self.reg * mass))


@functools.cache
def cyclic_reads(n: int, reg: float, rho: float, translate: bool) -> int | None:
    """Reads to TOL; None: more than MOST_READS."""
    run = Cyclic(*array_problem(n, rho)[:2], reg, rho, translate)
    while run.reads < MOST_READS:
        if run.cycle() <= TOL:
            return run.reads
    return None


def read_seconds(C: Any, masses: list[Any], reg: float) -> float:
    """Return the seconds of one read by the updates, the best of some."""
    run = Cyclic(C, masses, reg, 1.0, False)
    if xp_of(C) is not np:
        sample = device.elapsed
    else:
        sample = functools.partial(common.sample, number=1)
    return min(sample(lambda k=k: run.sums(k)) for k in (0, 1, 2, 0, 1, 2))


def measured(call: Callable[[], Any], repeat: int = 2) -> tuple[Any, float]:
    """Return an answer and the least seconds of some calls."""
    return peers.quiet(call), min(common.sample(lambda: peers.quiet(call)) for _ in range(repeat))


def array_case(n: int, reg: float, rho: float, threads: int, xp: Any) -> dict[str, Any]:
    C, masses, points, scale = array_problem(n, rho)
    C = xp.asarray(C)
    if xp is np:
        repeat = 2
    else:
        repeat = 5
    solve = functools.partial(mapuot.multimarginal, C, masses, reg=reg, reg_m=rho, threads=threads)
    ours, seconds = measured(functools.partial(solve, tol=TOL), repeat)
    row: dict[str, Any] = {"n": n, "reg": reg, "rho": rho, "reads": ours.n_passes, "error": ours.error_bound}
    row |= {"seconds": seconds, "status": ours.status}
    each = read_seconds(C, masses, reg)
    for name, translate in (("cyclic", False), ("cyclic, translated", True)):
        reads = cyclic_reads(min(n, COUNTED), reg, rho, translate)
        row[name] = {"reads": reads, "least_seconds": each * (reads or MOST_READS)}
    if rho == math.inf:
        row["ott"] = ott_case(points, masses, reg * scale)
        row["loose_seconds"] = measured(functools.partial(solve, tol=OTT_TOL), repeat)[1]
    return row


def ott_case(points: list[Any], masses: list[Any], reg: float) -> dict[str, Any]:
    """MMSinkhorn compiled, to its own threshold; its sums of misses beside."""
    if find_spec("ott") is None:
        return {"skipped": "ott-jax is not installed"}
    import jax
    from ott.experimental import mmsinkhorn

    jax.config.update("jax_enable_x64", True)
    solver = mmsinkhorn.MMSinkhorn(threshold=OTT_TOL)
    clouds, weights = [tuple(jax.numpy.asarray(x) for x in given) for given in (points, masses)]

    @jax.jit
    def solve(clouds: Any, weights: Any) -> Any:
        out = solver(clouds, weights, epsilon=reg)
        return out.potentials, out.errors

    def call() -> Any:
        return jax.block_until_ready(solve(clouds, weights))

    seconds = common.sample(call, 1)
    errors = np.asarray(call()[1]).ravel()
    if seconds < LONG:  # else compiling is little of it
        seconds = min(common.sample(call, 1) for _ in range(2))
    found = errors[errors != -1]
    return {"seconds": seconds, "missed": float(found[-1]), "iterations": 10 * len(found)}


def pass_case(shape: tuple[int, ...], threads: int, xp: Any) -> dict[str, Any]:
    """Time the pass over an array, beside reading as many bytes; on a GPU without the host's time for a launch."""
    m = shape[0]
    n = math.prod(shape[1:])
    C = xp.random.default_rng(0).random(shape, np.float32)
    masses = [np.full(k, 1.0 / k) for k in shape]
    kernel = mapuot.multimarginal(C, masses, reg=0.05, reg_m=1.0, threads=threads)._body.kernel.kernel
    row = {"shape": shape, "threads": threads, "storage": kernel.dtype}
    operator = kernel.operator
    if xp is not np:
        swept = device.elapsed(lambda: operator.sweep(0.95))  # the last arguments that the solve sent
        best = {"read": operator.K.nbytes / device.limits()["read"], "pass": swept}
        return row | {"seconds": best, "of_limit": best["read"] / best["pass"]}
    buffer = Buffer(m * n * operator.K.itemsize, threads)
    way = buffer.best_read()
    v = np.ones(n)
    base = np.zeros(m)
    calls = {
        "read": lambda: buffer.read(*way),
        "pass": lambda: operator.fused(v, base, 0.95, True),
        "wide pass": lambda: operator.fused(v, base, 0.95, False),
    }
    best = {name: min(values) for name, values in common.interleave(calls, 6.0).items()}
    best["read"] /= buffer.repeats
    of = {"of_limit": best["read"] / best["pass"], "wide_of_limit": best["read"] / best["wide pass"]}
    return row | {"seconds": best, **of}


def triangle_case(n: int, reg: float, rho: float, threads: int, xp: Any) -> dict[str, Any]:
    points, masses = clouds(n, 3)
    costs = {(i, j): xp.asarray(squares(points[i], points[j])) for i, j in ((0, 1), (0, 2), (1, 2))}
    found, seconds = measured(
        functools.partial(mapuot.multimarginal, costs, masses, reg=reg, reg_m=rho, tol=TOL, threads=threads)
    )
    return {"n": n, "reg": reg, "rho": rho, "reads": found.n_passes, "error": found.error_bound, "seconds": seconds,
            "status": found.status}  # fmt: skip


def chain_case(n: int, reg: float, rho: float, threads: int, xp: Any) -> dict[str, Any]:
    """A chain of ten against ten solves of its pairs, the first of them twice."""
    points, masses = clouds(n, 10)
    costs = {(k, k + 1): squares(points[k], points[k + 1]) for k in range(9)}
    scale = max(float(M.max()) for M in costs.values())
    costs = {pair: xp.asarray(M / scale) for pair, M in costs.items()}
    pairs = [*costs.items(), ((0, 1), costs[0, 1])]

    def pair_solves() -> Any:
        return [mapuot.solve(M, masses[i], masses[j], reg=reg, reg_m=rho, threads=threads) for (i, j), M in pairs]

    def chain() -> Any:
        return mapuot.multimarginal(costs, masses, reg=reg, reg_m=rho, threads=threads)

    times = common.interleave({"chain": chain, "pairs": pair_solves}, 20.0, (2, 10))
    found = chain()
    row = {"n": n, "reg": reg, "rho": rho, "passes": found.n_passes, "error": found.error_bound}
    row["reads"] = found.n_passes + sum(math.isfinite(x.error) for x in found.trace)
    row["pair_passes"] = [x.n_passes for x in pair_solves()]
    return row | {"times": common.summaries(times), "ratio": common.ratio(times, "chain", "pairs")}


def run(args: Any) -> dict[str, Any]:
    if args.device == "gpu":
        xp = import_module("cupy")
    else:
        xp = np
    sizes = 64, 128, 256
    triangles = (1000,)
    chain_sizes = 200, 1000, 5000
    if xp is not np:
        sizes = 128, 256, 512
        triangles = 1000, 4096
    if args.quick:
        sizes = (32,)
        triangles = (200,)
        chain_sizes = (200,)
    shapes = [*SHAPES[: 2 if args.quick else None]]
    counts = sorted({1, args.threads})
    if xp is not np:
        shapes = shapes + [(512, 512, 512)] * (not args.quick)
        counts = [0]
    with common.blas_threads(args.threads), common.kept_memory():
        arrays = [array_case(n, reg, rho, args.threads, xp) for n in sizes for reg, rho in CASES]
        passes = [pass_case(shape, count or args.threads, xp) for count in counts for shape in shapes]
        threes = [triangle_case(n, reg, rho, args.threads, xp) for n in triangles for reg, rho in CASES[:3]]
        chains = [chain_case(n, reg, rho, args.threads, xp) for n in chain_sizes for reg, rho in CASES[:3]]
    return {"arrays": arrays, "passes": passes, "triangles": threes, "chains": chains, "most_reads": MOST_READS}


@common.each
def tables(data: dict[str, Any]) -> str:
    """Arrays of three marginals beside cyclic updates and OTT, passes over them, triangles, chains beside ten pairs."""
    gpu = common.on_gpu(data)
    arrays = []
    passes = []
    chains = []
    for r in data["arrays"]:
        ott = r.get("ott", {})
        arrays.append([f"{r['n']}^3", *words(r), r["reads"], f"{1e3 * r['seconds']:.3g}"])
        for way in (r["cyclic"], r["cyclic, translated"]):
            arrays[-1] += [way["reads"] or f"> {data['most_reads']}", f"{way['least_seconds'] / r['seconds']:.2g}"]
        if "seconds" in ott:
            times = f"{ott['seconds'] / r['loose_seconds']:.2g}"
        else:
            times = ""
        arrays[-1].append(times)
    for r in data["passes"]:
        parts = [f"{r[key]:.2f}".removeprefix("0") for key in ("of_limit", "wide_of_limit") if key in r]
        passes.append([" x ".join(map(str, r["shape"])), *([] if gpu else [r["threads"]]), r["storage"], *parts])
    triangles = [[r["n"], *words(r), r["reads"], common.three(1e3 * r["seconds"])] for r in data["triangles"]]
    for r in data["chains"]:
        cells = [r["n"], *words(r), r["reads"], max(r["pair_passes"])]
        chains.append([*cells, common.milliseconds(r["times"]["chain"]), f"{r['ratio']['of_minima']:.2f}"])
    cyclic = ["cyclic: reads", "x", "translated: reads", "x", "OTT to 1e-3: x"]
    each = ["K", "pass, of the read limit"]
    chain_head = ["chain of ten, points", "reg", "reg_m", "reads", "of a pair", "ms", "times ten pairs"]
    text = [
        f"{common.machine_line(data)}:",
        common.table(["array", "reg", "reg_m", "reads", "ms", *cyclic], arrays),
        common.table(["array", *each] if gpu else ["array", "threads", *each, "with float64 sums"], passes),
        common.table(["triangle, points", "reg", "reg_m", "reads", "ms"], triangles),
        common.table(chain_head, chains),
    ]
    return common.text_of(*text)


def words(row: dict[str, Any]) -> list[str]:
    return [common.short(row["reg"]), common.short(row["rho"])]
