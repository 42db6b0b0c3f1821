"""mapuot: entropic unbalanced optimal transport on dense costs, with a certificate on every answer."""

from importlib import import_module
from typing import Any

from . import pot
from .backends import Stats
from .barycenter import BarycenterResult, barycenter
from .batch import BatchResult, solve_batch
from .divergence import sinkhorn_divergence
from .errors import ConvergenceWarning, InfeasibleError, ScalingWarning
from .log_matmul import log_matmul, log_matmul_gradient
from .points import PointCloud
from .pot import sinkhorn_unbalanced, sinkhorn_unbalanced2
from .result import Result
from .sequence import path
from .solve import solve

__version__ = "0.1.0"
__all__ = [
    "BarycenterResult",
    "BatchResult",
    "ConvergenceWarning",
    "InfeasibleError",
    "PointCloud",
    "Result",
    "ScalingWarning",
    "Stats",
    "__version__",
    "barycenter",
    "da",
    "log_matmul",
    "log_matmul_gradient",
    "path",
    "pot",
    "sinkhorn_divergence",
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "solve",
    "solve_batch",
]


def __getattr__(name: str) -> Any:
    """``mapuot.da`` on first use: it looks for scikit-learn."""
    if name == "da":
        return import_module(".da", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
