"""The CUDA backend: CuPy owns the memory, src_cuda does the work; `DeviceBackend` has the methods of ../../contract.py.

Modules load on first use, so that kernels.py can be used without CuPy.
"""

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from ...arrays import namespace
from ...contract import Backend, BatchEngine, Options
from ...penalties import F64
from ..cpu.grid import GridOperator, grid_workspace
from ..operator import parts_of

WORKSPACES = {
    "tiles": ("workspace", "workspace_of"), "points": ("points", "PointWorkspace"),
    "pairs": ("sparse", "SparseWorkspace"),
}  # fmt: skip

MOST_NARROW_MASS = 1e30  # beside a float32 K: scale_limit of workspace.SCALES


@cache
def module_of(name: str) -> Any:
    """Import a module of this folder on first use."""
    return import_module(f"{__name__}.{name}")


@cache
def maker(operator: str) -> Any:
    """Return the workspace class, or the function that makes a workspace, for this kind of operator."""
    place, name = WORKSPACES[operator]
    return getattr(module_of(place), name)


def products_of_grids() -> tuple[Any, Any]:
    """Return the module that makes the products of a grid on the device, and CuPy's ``asarray``."""
    return module_of("log_matmul"), import_module("cupy").asarray


class DeviceBackend(Backend):
    """The CUDA core on arrays of CuPy."""

    name = "cuda"
    makes_costs = True
    reads_vectors_on_device = True
    has_one_potential = True
    skips_from = 1 << 30  # pairs: skipping some of 2^28.6 took 1.7 to 3.2 times as long, .1 s of it on the host (H200)
    least_box = 32  # a warp of points.cuh has at least 32 points, and sums over the runs of one box
    most_factored = 1 << 14  # points: a factor of that size takes some 10 GB
    few_products = 100  # as long as a step or two with a factor of 10,000 points
    few_passes = 150  # .02 ms each; a product of Newton's step takes .4 ms, a step with a factor 1 to 2 (H200)
    quick_entries = 1 << 30  # a pass over so many entries takes 2 ms
    quick_passes = 64
    long_rows = 8192  # columns; a longer row does not fit one block, and is slower to read than many short rows

    def asarray(self, x: Any) -> Any:
        return module_of("arrays").asarray(x)

    def to_numpy(self, x: Any) -> Any:
        return module_of("arrays").to_numpy(x)

    def to_memory(self, x: Any) -> Any:
        return import_module("cupy").asarray(x)

    def free_unused(self) -> None:
        import_module("cupy").get_default_memory_pool().free_all_blocks()

    def extrema(self, M: Any, threads: int | None = None) -> tuple[Any, ...]:
        found: tuple[Any, ...] = module_of("stream").extrema(M, threads)
        return found

    def is_symmetric(self, M: Any) -> bool:
        return bool(module_of("stream").is_symmetric(M))

    def weigh(self, table: Any, p: int) -> tuple[Any, F64, F64]:
        found: tuple[Any, F64, F64] = module_of("batch").weigh(table, p)
        return found

    def workspace(self, problem: Any, options: Options, skip: Any = None) -> Any:
        """Make the workspace of a solve: with a K of all pairs or of stored pairs, between points, or on a grid.

        The scalings beside a float32 K end at e^85, and K <= 1: it holds no plan of more mass.
        """
        if options.precision == "float32" and max(side.mass for side in problem.sides) > MOST_NARROW_MASS:
            options = replace(options, precision="float64")
        if problem.cost.operator == "products":
            return grid_workspace(problem, options, *products_of_grids())
        operator = problem.cost.operator
        on_device = skip is not None or namespace(problem.rows.weight) is not np  # no K is stored then
        if operator == "points" and not on_device and self.stores_kernel(problem, options):
            operator = "tiles"
        return maker(operator)(problem, options, skip)

    def operator_of(self, cost: Any, *parts: Any, **more: Any) -> Any:
        if cost.operator == "products":
            product, asarray = products_of_grids()
            return partial(GridOperator, engine=product, asarray=asarray)(cost, *parts, **more)
        if cost.operator == "pairs":
            return module_of("pairs").PairOperator(cost, *parts, **more)
        return module_of("operator").DeviceOperator(cost, *parts, **more)

    def plan_of(self, problem: Any, log_u: Any, log_v: Any, threads: int | None = None) -> Any:
        return self.operator_of(*parts_of(problem), threads).set_exponents(*problem.exponents(log_u, log_v))

    def keeps_pairs(self, problem: Any) -> bool:
        return bool(module_of("sparse").keeps_pairs(problem))

    def stores_kernel(self, problem: Any, options: Options) -> bool:
        return bool(module_of("points").stores_kernel(problem, options))

    def to_device(self, problem: Any) -> Any:
        return module_of("arrays").to_device(problem)

    def form_bytes(self, cloud: Any) -> int:
        return int(module_of("arrays").form_bytes(cloud))

    def costs(self, cloud: Any, threads: int | None = None) -> Any:
        return module_of("arrays").costs(cloud, threads)

    def formed(self, cloud: Any, threads: int | None = None) -> tuple[Any, Any]:
        found: tuple[Any, Any] = module_of("arrays").formed(cloud, threads)
        return found

    def ranges_of_clouds(self, clouds: Any) -> F64:
        found: F64 = module_of("clouds").ranges_of_clouds(clouds)
        return found

    def tables(self, clouds: Any, plan: Any = None) -> Any:
        return module_of("arrays").clouds_tables(clouds, plan)

    def slopes(self, task: Any, which: Any, exponents: Any, wanted: Any, threads: int | None) -> list[Any]:
        """Return the derivatives of all problems of a batch, whatever ``which`` names."""
        return list(module_of("clouds").slopes(task, exponents, wanted))

    def batches(self) -> BatchEngine:
        engine: BatchEngine = module_of("batch").DeviceBatches()
        return engine

    def dual_terms(self, task: Any, log_u: Any, log_v: Any) -> tuple[F64, Any, Any]:
        found: tuple[F64, Any, Any] = module_of("batch").dual_terms(task, log_u, log_v)
        return found

    def log_product(self, A: Any, B: Any, exact: bool, threads: int | None) -> Any:
        return module_of("log_matmul").product(A, B, exact, threads)

    def tree_pass(self, edges: Any, problem: Any) -> Any:
        return module_of("marginals").DeviceTreePass(edges, problem)

    def marginal_points(self, *sizes: Any) -> Any:
        return module_of("marginals").DevicePoints(*sizes)

    def history(self, depth: int, ends: Any) -> Any:
        return module_of("marginals").DeviceHistory(depth, ends)


backend = DeviceBackend()
