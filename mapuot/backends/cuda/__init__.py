"""The CUDA backend: CuPy owns the memory, src_cuda does the work. backends/contract.py lists the functions.

Modules load on first use, so that kernels.py can be used without CuPy.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from ...arrays import namespace
from ..cpu.grid import GridOperator, grid_workspace
from ..operator import parts_of

name = "cuda"
PLACES = dict.fromkeys(("asarray", "to_numpy", "costs", "formed", "form_bytes", "held", "keeps_K"), "arrays")
PLACES |= {"extrema": "stream", "is_symmetric": "stream", "weigh": "batch", "closed": "batch"}
PLACES |= {"keeps_pairs": "sparse", "range_of_clouds": "clouds", "slopes": "clouds"}
PLACES |= dict.fromkeys(("QUICK_ENTRIES", "QUICK_PASSES"), "workspace")
CLASSES = {"TreePass": "DeviceTreePass", "History": "DeviceHistory", "Points": "DevicePoints"}
PLACES |= dict.fromkeys(CLASSES, "marginals")
WORKSPACES = {
    "tiles": ("workspace", "workspace_of"), "points": ("points", "PointWorkspace"),
    "pairs": ("sparse", "SparseWorkspace"),
}  # fmt: skip
LEAST_BOX = 32  # a warp of points.cuh has at least 32 points, and sums over the runs of one box
SKIPS_FROM = 1 << 30  # pairs: skipping some of 2^28.6 took 1.7 to 3.2 times as long, .1 s of it on the host (H200)
FEW_PASSES = 150  # .02 ms each; a product of Newton's step takes .4 ms, a step with a factor 1 to 2 (H200)
MOST_FACTORED = 1 << 14  # points of the smaller side: some 10 GB
MAKES_COSTS = True  # this backend makes the costs of points itself
ONE_POTENTIAL = True  # passes can have log u = log v
LONG_ROWS = 8192  # columns; a longer row does not fit one block, and is slower to read than many short rows


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{PLACES[name]}"), CLASSES.get(name, name))
    return value


def quicker_turned(cost: Any) -> bool:
    """Tell whether passes over the transpose of a matrix on the device would take less time."""
    m, n = cost.shape
    return cost.held and cost.operator == "tiles" and cost.xp is not np and n > max(m, LONG_ROWS)


def Workspace(problem: Any, options: Any, skip: Any = None) -> Any:  # noqa: N802 - the word of the contract
    """Make the workspace of a solve: with a K of all pairs or of stored pairs, between points, or on a grid."""
    if problem.cost.operator == "products":
        return grid_workspace(problem, options, *engine())
    operator = problem.cost.operator
    vectors = skip is not None or namespace(problem.rows.weight) is not np  # vectors on the device: no K is stored then
    if operator == "points" and not vectors and import_module(f"{__name__}.arrays").keeps_K(problem, options):
        operator = "tiles"
    return maker(operator)(problem, options, skip)


@cache
def maker(operator: str) -> Any:
    """Return the workspace class, or the function that makes a workspace, for this kind of operator."""
    place, name = WORKSPACES[operator]
    return getattr(import_module(f"{__name__}.{place}"), name)


def operator_of(cost: Any, *parts: Any, **more: Any) -> Any:
    if cost.operator == "products":
        product, asarray = engine()
        return partial(GridOperator, engine=product, asarray=asarray)(cost, *parts, **more)
    if cost.operator == "pairs":
        place, name = "pairs", "PairOperator"
    else:
        place, name = "operator", "DeviceOperator"
    return getattr(import_module(f"{__name__}.{place}"), name)(cost, *parts, **more)


def plan_of(problem: Any, log_u: Any, log_v: Any, threads: int | None = None) -> Any:
    return operator_of(*parts_of(problem), threads).take(*problem.exponents(log_u, log_v))


def engine() -> tuple[Any, Any]:
    """Return the module that makes the products of a grid on the device, and CuPy's ``asarray``."""
    return import_module(f"{__name__}.log_matmul"), import_module("cupy").asarray
