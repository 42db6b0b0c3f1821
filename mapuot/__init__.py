"""Entropic unbalanced optimal transport, with a certificate on every answer.

`solve` solves one problem, `solve_batch` many at once, `path` one problem for a list of penalties. `tune` finds reg and
reg_m, `solve_sample` takes clouds of points, `multimarginal` many marginals. `barycenter`, `sinkhorn_divergence` and
`pairwise` combine such problems. Modules for users of other libraries are imported on first use:

- ``mapuot.pot``: POT's unbalanced functions, and ``patched()``, within which POT itself runs on mapuot
- ``mapuot.da``: domain adaptation, an estimator of scikit-learn
- ``mapuot.groups``: distances between groups of cells, AnnData in and tables out
- ``mapuot.fugw``: an estimator that aligns two spaces, under the names of fugw
- ``mapuot.wot``: populations over time, under the names of wot and moscot
- ``mapuot.moscot``: a backend of moscot: its problems then take ``solve(backend="mapuot")``
- ``mapuot.flow``: training pairs for flows, under torchcfm's names
- ``mapuot.torch``, ``mapuot.jax``: losses with gradients for PyTorch and JAX
- ``mapuot.plot``: pictures of results, by Matplotlib

Every function raises ValueError or TypeError if an argument is out of range or of the wrong kind; the message names the
argument.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import threadpoolctl

from . import pot
from .answer.batch import BatchResult
from .answer.load import load
from .answer.result import Result
from .api.barycenter import BarycenterResult, barycenter
from .api.batch import solve_batch
from .api.certify import Certificate, certify, knn_cost
from .api.divergence import sinkhorn_divergence
from .api.gromov import GromovResult, gromov
from .api.gromov_pairs import GromovPairs, gromov_pairwise
from .api.log_matmul import log_matmul
from .api.pairwise import pairwise
from .api.path import path
from .api.solve import solve, solve_sample
from .api.tune import Tuned, tune
from .backends import Stats
from .errors import ConvergenceWarning, InfeasibleError, ScalingWarning
from .marginals import MultiResult, multimarginal
from .problem.clouds import PointCloud
from .problem.grid import Grid
from .problem.low_rank import LowRankReference
from .problem.mask import SeededMask
from .synonyms import no_such_name
from .threadpool import ThreadLimit

__version__ = "1.0.0"
__all__ = [
    "BarycenterResult", "BatchResult", "Certificate", "ConvergenceWarning", "Grid", "GromovPairs", "GromovResult",
    "InfeasibleError", "LowRankReference", "MultiResult", "PointCloud", "Result", "ScalingWarning", "SeededMask",
    "Stats", "Tuned", "__version__", "barycenter", "certify", "da", "flow", "fugw", "gromov", "gromov_pairwise",
    "knn_cost", "load", "log_matmul", "multimarginal", "pairwise", "path", "pot", "sinkhorn_divergence", "solve",
    "solve_batch", "solve_sample", "tune", "wot",
]  # fmt: skip
threadpoolctl.register(ThreadLimit)
# imported on first use; doors in __all__ need no extra
DOORS = "da", "flow", "fugw", "groups", "jax", "moscot", "plot", "torch", "wot"


if TYPE_CHECKING:  # so that checkers of types find unknown names
    from . import da, flow, fugw, wot
    from . import groups as groups
    from . import jax as jax
    from . import moscot as moscot
    from . import plot as plot
    from . import torch as torch
else:

    def __getattr__(name: str) -> Any:
        """Import a door on first use; say where the things of other libraries are."""
        if name in DOORS:
            return import_module("." + name, __name__)
        raise no_such_name(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *DOORS})
