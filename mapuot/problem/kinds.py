"""Make a `Cost` from the user's M: an array, points, stored pairs, a function or a file of rows."""

import os
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ..arrays import host, is_on_device
from ..contract import Backend
from ..ranks import ALONE, Ranks
from .clouds import Clouds
from .cost import Cost, Dense, Streamed, as_vectors, cost_of
from .points import FormedCosts
from .sparse import Sparse, SparseCosts, is_list_of_pairs, is_sparse
from .validate import as_array, as_pair, as_real, check_kind


def own_cost(
    M: Any, a: Any, b: Any, reg_m: Any, reference: Any, backend: Backend, ranks: Ranks, **common: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return (cost, a, b, reg_m) of this rank; raise if ranks differ in ``common``, b, reg_m or the kind of M."""
    ranks.place(backend.name, M, a, b)
    source = cost_of(M)
    a, b, reg_m = as_vectors(source, a, b, reg_m)
    if ranks.size > 1:
        if not isinstance(reference, str):
            reference = kind_of(reference)
        ranks.same(backend=backend.name, M=kind_of(source), reference=reference, **common)
        rho_a, rho_b = as_pair(reg_m, "reg_m")
        ranks.same(b=b, **{"reg_m[0]": "one a row" if np.ndim(rho_a) else rho_a, "reg_m[1]": rho_b})
    return as_cost(source, backend, ranks, a, b), a, b, reg_m


def kind_of(source: Any) -> str:
    """Name the kind of source of a matrix, which must be the same on all ranks."""
    source = cost_of(source)
    if isinstance(source, Cost):
        return source.kind
    if is_sparse(source):
        return Sparse.kind
    if callable(source):
        return "a function"
    return Dense.kind


def as_cost(source: Any, backend: Backend, ranks: Ranks = ALONE, a: Any = None, b: Any = None) -> Any:
    """Make the cost of M, or over ranks of this rank's block; ``a`` and ``b``, as given, locate the block."""
    source = cost_of(source)
    in_one_process = backend.in_one_process
    if in_one_process and ranks.size > 1:
        raise NotImplementedError(f"backend {backend.name!r} runs in one process, without comm")
    if stores_pairs(source):
        return as_pairs(source, backend, ranks, a, b)
    cost = source if isinstance(source, Cost) else None
    if cost is not None and cost.remade and not (in_one_process or backend.makes_costs):
        name = backend.name
        raise NotImplementedError(f"backend {name!r} takes no {cost.kind}: use backend='cpu' or numpy.asarray(M)")
    if cost is not None or callable(source):
        check_no_names(a, b)
        convert = partial(as_array, name="M", convert=backend.asarray)
        if cost is None:
            cost = Streamed.made(source, a, b, ranks, convert)
        else:
            cost = cost.own_block(a, b, ranks)
        if in_one_process:
            M = np.asarray(cost)
        else:
            M = cost.array
    else:
        M = as_array(source, "M", backend.asarray)
    check_shape(M, ranks)
    check_kind(M, "M", "fiu")
    if cost is not None and not in_one_process:
        return cost
    return Dense(as_real(M))


def formed(cost: Any, backend: Backend, ranks: Ranks = ALONE, threads: int | None = None) -> Any:
    """Return the formed matrix of a cloud, if allowed and faster for the backend; else ``cost``."""
    cloud = cost.cloud
    if cloud is cost is not None and ranks.size == 1 and cloud.forms(backend.form_bytes(cloud)):
        return FormedCosts(cloud, *backend.formed(cloud, threads))
    return cost


def check_no_names(a: Any, b: Any) -> None:
    for name, weight in (("a", a), ("b", b)):
        if isinstance(weight, (str, os.PathLike)):
            text = f"{name} must be an array, got {weight!r}: mapuot.files.read_vector reads one from a file"
            raise TypeError(text)


def check_shape(M: Any, ranks: Ranks) -> None:
    if M.ndim != 2 or M.shape[1] == 0 or ranks.sum(M.shape[0]) == 0:
        hints = {
            1: ": the order is M, a, b (in mapuot.pot, as in POT: a, b, M)",
            3: ": mapuot.solve_batch takes costs (p, m, n) of p problems",
        }
        raise ValueError(f"M must be a non-empty matrix (m, n), got shape {M.shape}{hints.get(M.ndim, '')}")


def stores_pairs(source: Any) -> bool:
    """Tell whether M stores some pairs only and forbids all others."""
    return is_sparse(source) or (isinstance(source, Cost) and source.operator == "pairs")


def as_pairs(source: Any, backend: Backend, ranks: Ranks, a: Any, b: Any) -> Sparse:
    """Make a sparse cost; over ranks, from this rank's rows, given or read from a file."""
    name = backend.name
    if name != "cuda" and is_on_device(source):
        raise TypeError(f"M must not lie on a GPU for backend {name!r}: pass M.get(), or use backend='cuda'")
    if isinstance(source, Cost):
        check_no_names(a, b)
        cost: Sparse = source.own_block(a, b, ranks)
    else:
        cost = Sparse.of_matrix(source)
    check_shape(cost, ranks)
    return cost


def as_whole_cost(source: Any, backend: Backend, a: Any = None, b: Any = None) -> Any:
    """Make the cost of M for callers that need every pair."""
    if stores_pairs(source):
        if is_sparse(source):
            what = type(source).__name__
        else:
            what = source.kind
        raise TypeError(f"M must be a dense array, got {what}: fill in what it does not store")
    return as_cost(source, backend, a=a, b=b)


def as_costs(M: Any, backend: Backend) -> Any:
    """Make the cost of a batch: points, or M as (m, n) or (p, m, n), in a dtype that the core reads."""
    M = cost_of(M)
    if isinstance(M, Clouds):
        if not backend.in_one_process:
            return M.placed(import_module("cupy") if backend.name == "cuda" else np)
        M = np.asarray(M)
    if isinstance(M, Cost) and M.remade:
        cost = formed(as_cost(M, backend), backend)
        if isinstance(cost, FormedCosts):
            return FormedCosts(cost.cloud, host(cost.array), cost.rounding)  # answers lie on the device of M
        return cost
    if stores_pairs(M):
        return as_pairs(M, backend, ALONE, None, None)
    if is_list_of_pairs(M):
        costs = SparseCosts.of_matrices(M)
        as_pairs(costs.places, backend, ALONE, None, None)
        return costs
    return as_dense_costs(as_array(M, "M", backend.asarray), backend)


def as_dense_costs(M: Any, backend: Backend) -> Any:
    """Make the cost of a batch from one matrix, or from a matrix for each problem."""
    if M.ndim not in (2, 3):
        raise ValueError(f"M must have shape (m, n) or (p, m, n), got {M.shape}")
    if M.ndim == 3 and 0 in M.shape:
        raise ValueError(f"M must not be empty, got shape {M.shape}")
    if M.ndim == 2:
        return as_cost(M, backend)
    flat = as_cost(M.reshape(-1, M.shape[-1]), backend)
    return Dense(flat.array.reshape(M.shape))
