"""loss: value and gradient of a debiased loss of two clouds, and what its self term costs, beside GeomLoss and others.

Uniform points in 3-D, the second cloud moved by .2; `SamplesLoss` by p = 2 at each blur and reach, float64 points
(GeomLoss and, on a GPU, flash-sinkhorn: float32, which they are made for). Errors of values and gradients are relative
to a solve to 1e-9, to 1e-6 of clouds above MATRIX_SIZE; balanced at the smaller blur, where rounding ends the cross
term at a bound of 2e-5 to 1e-4, to 1e-4 and 1e-3. GeomLoss and flash-sinkhorn take their own number of iterations, by
their scaling, and certify nothing; GeomLoss's "tensorized" form stores the matrix, of up to MATRIX_SIZE points, and its
other forms need KeOps. "self" is the problem of the first cloud with itself, "cross" that of both. Rows are told as
they are measured.
"""

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mapuot

from . import common
from .device import wall

NEEDS = ("torch",)
SIZES, GPU_SIZES = (1_000, 5_000), (1_000, 5_000, 100_000)
CASES = tuple((blur, reach) for blur in (0.05, 0.01) for reach in (0.3, None))
TOLS = (1e-3, 1e-6)
MATRIX_SIZE, LONGEST = 20_000, 2.0  # points of which peers form a matrix; seconds after which a call is not repeated
EXACT, HARD, MOST_PASSES = 1e-9, (1e-4, 1e-3), 10_000  # HARD: of balanced clouds at the smaller blur, small and large
SCALINGS = (0.5, 0.9)  # of GeomLoss and flash-sinkhorn: their default, and steps with which they are nearer


def step(loss: Callable[[Any, Any], Any], x: Any, y: Any) -> tuple[float, Any]:
    """Return the value, of many clouds their sum, and its gradient for x."""
    at = x.clone().requires_grad_()
    value = loss(at, y.clone())  # a new tensor: no answer of a fixed target
    value.sum().backward()
    return float(value.detach().sum()), at.grad.double()


def losses(n: int, tols: list[float], gpu: bool, **known: Any) -> dict[str, tuple[Callable[[Any, Any], Any], bool]]:
    """Return each loss by name, and whether it is given float32 points."""
    from mapuot.torch import SamplesLoss

    known |= {"p": 2}
    found: dict[str, tuple[Any, bool]] = {
        f"mapuot {common.short(tol)}": (SamplesLoss(tol=tol, max_passes=MOST_PASSES, **known), False) for tol in tols
    }
    for scaling in SCALINGS:
        if importlib.util.find_spec("geomloss") and n <= MATRIX_SIZE:
            more = {"backend": "tensorized", "scaling": scaling}
            theirs = importlib.import_module("geomloss").SamplesLoss("sinkhorn", **known, **more)
            found[f"GeomLoss {scaling}"] = theirs, True
        if gpu and importlib.util.find_spec("flash_sinkhorn") and (scaling == SCALINGS[0] or n <= MATRIX_SIZE):
            more = {"half_cost": True, "debias": True, "allow_tf32": False, "autotune": False, "scaling": scaling}
            theirs = importlib.import_module("flash_sinkhorn").SamplesLoss(**known, **more)
            found[f"flash-sinkhorn {scaling}"] = theirs, True
    return found


def timed(call: Callable[[], Any], gpu: bool) -> tuple[float, Any]:
    """Return the least seconds of some calls, of a long one of one, after one that compiles; and its answer."""
    call()
    begun = time.perf_counter()
    answer = call()
    if (taken := time.perf_counter() - begun) < LONGEST:
        taken = min(wall(call) if gpu else common.sample(call) for _ in range(3))
    return taken, answer


def measured(n: int, blur: float, reach: float | None, gpu: bool) -> dict[str, Any]:
    """Return seconds and errors of all losses, and seconds and passes of the two kinds of term."""
    import torch

    from mapuot.torch import SamplesLoss

    rng, kind = np.random.default_rng(0), {"dtype": torch.float64, "device": "cuda" if gpu else "cpu"}
    x, y = torch.tensor(rng.random((n, 3)), **kind), torch.tensor(rng.random((n, 3)) + 0.2, **kind)
    large, hard = n > MATRIX_SIZE, reach is None and blur == min(blur for blur, _ in CASES)
    exact = HARD[large] if hard else TOLS[-1] if large else EXACT
    tols = [tol for tol in TOLS if tol >= exact]
    row: dict[str, Any] = {"n": n, "blur": blur, "reach": reach, "exact": exact, "losses": {}, "terms": {}}
    value, slope = step(SamplesLoss(p=2, blur=blur, reach=reach, tol=exact, max_passes=MOST_PASSES), x, y)
    factor = 1.0 if reach is None else (reach**2 + blur**2 / 2) / (reach**2 + blur**2)  # GeomLoss's slopes are so much
    for name, (loss, single) in losses(n, tols, gpu, blur=blur, reach=reach).items():
        points = [z.float() if single else z for z in (x, y)]
        try:
            taken, (found, gradient) = timed(partial(step, loss, *points), gpu)
        except Exception as error:  # a peer without this case
            row["losses"][name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        gradient = gradient / factor if single else gradient
        row["losses"][name] = {
            "seconds": taken, "value_error": abs(found / value - 1),
            "slope_error": float((gradient - slope).norm() / slope.norm()),
        }  # fmt: skip
    reg, reg_m = blur**2, np.inf if reach is None else reach**2
    for name, other in (("self", x), ("cross", y)):
        cost = mapuot.PointCloud(x, other, scale=0.5)
        taken, result = timed(
            partial(mapuot.solve, cost, reg=reg, reg_m=reg_m, tol=tols[-1], max_passes=MOST_PASSES), gpu
        )
        row["terms"][name] = {
            "seconds": taken, "passes": result.n_passes, "status": result.status, "bound": result.error_bound,
            "how": result.how,
        }  # fmt: skip
    print(*cells(row, list(row["losses"])), sep=", ", flush=True)
    return row


def run(args: Any) -> dict[str, Any]:
    gpu = args.device == "gpu"
    sizes = (300,) if args.quick else GPU_SIZES if gpu else SIZES
    if args.size:
        sizes = (args.size,)
    return {"rows": [measured(n, *case, gpu) for n in sizes for case in CASES]}


def cells(row: dict[str, Any], names: list[str]) -> list[Any]:
    """Return a line of the table, of these losses."""
    own, cross = row["terms"]["self"], row["terms"]["cross"]
    line = [row["n"], row["blur"], row["reach"] or "balanced", common.short(row["exact"])]
    for one in (row["losses"].get(name, {}) for name in names):
        line.append(f"{1e3 * one['seconds']:.3g} ({one['slope_error']:.0e})" if "seconds" in one else "")
    return [*line, f"{own['passes']} of {cross['passes']}", f"{own['seconds'] / cross['seconds']:.2g}"]


@common.each
def tables(data: dict[str, Any]) -> str:
    """Return milliseconds of each loss with the error of its gradient, and what self terms cost of cross terms."""
    names = list(dict.fromkeys(name for row in data["rows"] for name in row["losses"]))
    head = ["points", "blur", "reach", "exact to", *(f"{name}: ms" for name in names), "self passes of cross", "time"]
    lines = [cells(row, names) for row in data["rows"]]
    return common.text_of(f"{common.machine_line(data)}:", common.table(head, lines))
