"""mapuot: entropic unbalanced optimal transport on dense costs, with a certificate on every answer."""

from importlib import import_module
from typing import Any

from . import pot
from .answer.load import load
from .answer.result import Result
from .api.barycenter import BarycenterResult, barycenter
from .api.batch import BatchResult, solve_batch
from .api.certify import Certificate, certify
from .api.divergence import sinkhorn_divergence
from .api.log_matmul import log_matmul, log_matmul_gradient
from .api.neighbours import knn_cost
from .api.path import path
from .api.solve import solve
from .api.solve_sample import solve_sample
from .backends import Stats
from .errors import ConvergenceWarning, InfeasibleError, ScalingWarning
from .marginals import MultiResult, multimarginal
from .problem.grid import Grid
from .problem.mask import SeededMask
from .problem.points import PointCloud

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
