"""mapuot: entropic unbalanced optimal transport on dense costs, with a certificate on every answer."""

from . import pot
from .backends import Stats
from .errors import ConvergenceWarning, InfeasibleError
from .pot import sinkhorn_unbalanced, sinkhorn_unbalanced2
from .result import Result
from .solve import solve

__version__ = "0.1.0"
__all__ = [
    "ConvergenceWarning",
    "InfeasibleError",
    "Result",
    "Stats",
    "__version__",
    "pot",
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "solve",
]
