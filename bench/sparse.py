"""sparse: a pass over stored pairs, by density and pattern, beside the dense pass of that shape and SciPy's products.

Patterns of n x n pairs: "uniform", each pair with the same odds; "kNN", the neighbours of points in the plane in random
order; "banded", next to the diagonal; "power-law", rows with lengths that fall as 1 / rank. "SciPy" is POT's iteration
on a CSR array, K v and K^T u with K's transpose at hand. Columns are seconds of passes in turn and bytes of K and its
indices. A further row is a million points with 32 neighbours each, certified 1e-4: seconds and peak memory of a process
that makes and solves it. With --device gpu on the GPU that CuPy finds: whole passes, of a launch of many, beside the
dense ones of float32 sums. "mixed" is a float32 K.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse
from tqdm import tqdm

import mapuot

from . import common
from .device import REG, RHO, endless

SIZE, QUICK_SIZE = 20_000, 1_000
DENSITIES = (0.001, 0.01, 0.1, 0.5)
STORED = {"mixed": "float32", "float64": "float64"}
MOST_PAIRS = 5 * 10**7  # stored, of one case
MOST_BYTES = 1 << 31  # of a dense K
NEIGHBOURS, POINTS = 32, 1_000_000  # of a cloud that no dense K has room for


def lengths(pattern: str, n: int, density: float) -> Any:
    """Stored pairs of each row."""
    if pattern != "power-law":
        return np.full(n, max(1, round(density * n)))
    wanted = 1 / np.arange(1.0, n + 1)
    low = 0.0
    high = float(n * n)
    for _ in range(60):  # bisection: the lengths factor * wanted, cut at n, must sum to density n^2
        factor = (low + high) / 2
        if np.minimum(n, factor * wanted).sum() < density * n * n:
            low = factor
        else:
            high = factor
    return np.random.default_rng(0).permutation(np.maximum(1, np.minimum(n, high * wanted)).astype(int))


def pairs(pattern: str, n: int, density: float) -> Any:
    """A CSR array of n x n with costs in [0, 1)."""
    rng = np.random.default_rng(1)
    count = lengths(pattern, n, density)
    if pattern == "kNN":
        S = mapuot.knn_cost(rng.random((n, 2)), rng.random((n, 2)), int(count[0]), symmetric=False)
        S.data /= S.data.max()
        return S
    start = np.concatenate([[0], np.cumsum(count)])
    if pattern == "banded":
        column = (np.arange(n)[:, None] + np.arange(count[0])) % n
    else:
        column = np.concatenate([rng.choice(n, k, replace=False, shuffle=False) for k in count])
    S = sparse.csr_array((rng.random(start[-1]), np.ravel(column).astype(np.int32), start), shape=(n, n))
    S.sort_indices()
    return S


def products(S: Any) -> Callable[[], Any]:
    """POT's iteration: u = (a / K v)^fi, v = (b / K^T u)^fi."""
    K = S.astype(np.float64)
    n = S.shape[0]
    fi = RHO / (RHO + REG)
    K.data = np.exp(-K.data / REG) / n**2
    turned = sparse.csr_array(K.T)
    v = np.ones(n)

    def iteration() -> None:
        u = (1 / n / np.maximum(K @ v, 1e-300)) ** fi
        (1 / n / np.maximum(turned @ u, 1e-300)) ** fi

    return iteration


def row_pass(workspace: Any) -> Callable[[], Any]:
    """Return a call of one row pass from a workspace's state; the rest of a pass is the same for all."""
    from mapuot._core import lib

    return lambda: lib.mapuot_row_pass(workspace.pool, workspace.state)


def cpu_passes(S: Any, dense: Any, threads: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return (seconds of a row pass, bytes of K and indices) by storage, beside SciPy's and the dense pass."""
    made = {name: endless(S, stored, threads=threads) for name, stored in STORED.items()}
    calls = {name: row_pass(workspace) for name, workspace in made.items()} | {"SciPy": products(S)}
    if dense:
        calls["dense mixed"] = row_pass(dense)
    seconds = {name: min(samples) for name, samples in common.interleave(calls, 3.0).items()}
    held = {name: w.operator.K.nbytes + 4 * S.nnz + 8 * S.shape[0] for name, w in made.items()}
    if dense:
        held["dense mixed"] = dense.operator.K.nbytes
    return seconds, held


def gpu_passes(S: Any, dense: float | None) -> tuple[dict[str, float], dict[str, int]]:
    """Return (seconds of a whole pass, bytes of K and its indices) by storage."""
    from mapuot.backends.cuda.launch import GRAPH_PASSES

    from .device import elapsed

    if dense is None:
        seconds = {}
    else:
        seconds = {"dense mixed": dense}
    held = {}
    for name, stored in STORED.items():
        made = endless(S, stored, anderson_depth=20, gpu=True)
        launch = made.launch
        seconds[name] = elapsed(lambda launch=launch: launch(GRAPH_PASSES, 0), before=made.send_progress) / GRAPH_PASSES
        held[name] = 2 * (made.operator.K[0].nbytes + made.pairs.rows.index.nbytes)
        made.close()
    return seconds, held


def measured(pattern: str, n: int, density: float, passes: Callable[[Any], Any]) -> dict[str, Any]:
    S = pairs(pattern, n, density)
    seconds, held = passes(S)
    return {"pattern": pattern, "n": n, "density": S.nnz / n**2, "pairs": S.nnz, "seconds": seconds,
            "MiB": {name: size / 2**20 for name, size in held.items()}}  # fmt: skip


def large(backend: str, threads: int) -> dict[str, Any]:
    """Solve a million points to a certified 1e-4 in their own process, and report its peak memory."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    M = mapuot.knn_cost(rng.random((POINTS, 2)), rng.random((POINTS, 2)), NEIGHBOURS, threads=threads)
    M.data /= M.data.mean()
    made = time.perf_counter()
    r = mapuot.solve(M, None, None, reg=0.5, reg_m=5.0, tol=1e-4, backend=backend, threads=threads)
    solved = time.perf_counter() - made
    told = {"passes": r.n_passes, "error": r.error_bound}
    told |= {"n": POINTS, "k": NEIGHBOURS, "pairs": M.nnz, "peak": common.status("VmHWM")}
    return told | {"neighbours": made - start, "solve": solved}


def run(args: Any) -> dict[str, Any]:
    n = args.size or (QUICK_SIZE if args.quick else SIZE)
    gpu = args.device == "gpu"
    cases = [(pattern, n, density) for pattern in ("uniform", "kNN", "banded", "power-law")
             for density in DENSITIES if density * n * n <= MOST_PAIRS]  # fmt: skip
    passes: Callable[[Any], Any]
    if gpu:
        from .gpu import our_passes

        dense = our_passes(n, n, "float32", {True: "narrow"})["narrow"]
        passes = functools.partial(gpu_passes, dense=dense)
    else:
        if 4 * n * n <= MOST_BYTES:
            M = np.random.default_rng(2).random((n, n), dtype=np.float32)
        else:
            M = None
        if M is None:
            beside = None
        else:
            beside = endless(M, "float32", threads=args.threads)
        passes = functools.partial(cpu_passes, dense=beside, threads=args.threads)
    with common.blas_threads(args.threads):
        found = [measured(*case, passes) for case in tqdm(cases, file=sys.stderr)]
    if gpu and not args.quick:
        found.append(measured("kNN", POINTS, NEIGHBOURS / POINTS, functools.partial(gpu_passes, dense=None)))
    call = f"sparse.large({'cuda' if gpu else 'cpu'!r}, {args.threads})"
    if args.quick:
        whole = {}
    else:
        whole = {"large": common.alone(call)}
    return {"n": n, "threads": args.threads, "passes": found, **whole}


@common.each
def tables(data: dict[str, Any]) -> str:
    """Passes over stored pairs beside the dense pass, by pattern and share of the pairs."""
    rows: dict[str, list[str]] = {}
    shares = sorted({p["density"] for p in data["passes"] if p["pattern"] == "uniform"})
    for p in (p for p in data["passes"] if p["n"] == data["n"]):
        seconds = p["seconds"]
        if "dense mixed" in seconds:
            times = f" ({seconds['dense mixed'] / seconds['mixed']:.1f})"
        else:
            times = ""
        rows.setdefault(p["pattern"], []).append(f"{1e3 * seconds['mixed']:.3g}{times}")
    dense = [p["seconds"]["dense mixed"] for p in data["passes"] if "dense mixed" in p["seconds"]]
    if dense:
        beside = f", the dense pass {1e3 * min(dense):.3g} ms"
    else:
        beside = ""
    head = ["pairs", *(f"{100 * share:g} %" for share in shares)]
    text = ""
    if x := data.get("large"):
        text = (
            f"{x['n']:,} points with {x['k']} neighbours, {x['pairs']:,} pairs: certified {x['error']:.1e} "
            f"in {x['passes']} passes, {x['solve']:.1f} s, at most {x['peak'] / 2**30:.1f} GiB on the host."
        )
    passes = common.table(head, [[name, *cells] for name, cells in rows.items()])
    return common.text_of(f"{common.machine_line(data)}, n = {data['n']}{beside}:", passes, text)
