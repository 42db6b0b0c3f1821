"""mapuot: entropic unbalanced optimal transport on dense costs, with a certificate on every answer."""

from importlib import import_module
from typing import Any

from . import pot
from .backends import Stats
from .barycenter import BarycenterResult, barycenter
from .batch import BatchResult, solve_batch
from .certify import Certificate, certify
from .divergence import sinkhorn_divergence
from .errors import ConvergenceWarning, InfeasibleError, ScalingWarning
from .grids import Grid
from .load import load
from .log_matmul import log_matmul, log_matmul_gradient
from .marginals import MultiResult, multimarginal
from .mask import SeededMask
from .neighbours import knn_cost
from .points import PointCloud
from .pot import sinkhorn_unbalanced, sinkhorn_unbalanced2
from .result import Result
from .sample import solve_sample
from .sequence import path
from .solve import solve

__version__ = "0.1.0"
__all__ = [
    "BarycenterResult",
    "BatchResult",
    "Certificate",
    "ConvergenceWarning",
    "Grid",
    "InfeasibleError",
    "MultiResult",
    "PointCloud",
    "Result",
    "ScalingWarning",
    "SeededMask",
    "Stats",
    "__version__",
    "barycenter",
    "certify",
    "da",
    "knn_cost",
    "load",
    "log_matmul",
    "log_matmul_gradient",
    "multimarginal",
    "path",
    "pot",
    "sinkhorn_divergence",
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "solve",
    "solve_batch",
    "solve_sample",
]


def __getattr__(name: str) -> Any:
    """The doors to other libraries, on first use: each imports its own."""
    if name == "da":
        return import_module(".da", __name__)
    if name == "jax":
        return import_module(".jax", __name__)
    if name == "plot":
        return import_module(".plot", __name__)
    if name == "torch":
        return import_module(".torch", __name__)
    if name == "wot":
        return import_module(".wot", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
