"""The unbalanced functions of POT (``ot.unbalanced``), its signatures and return types, running on mapuot.

``patch()``, ``unpatch()`` and ``with patched():`` make POT itself run on them.
"""

from .barycenter import (
    barycenter_unbalanced,
    barycenter_unbalanced_sinkhorn,
    barycenter_unbalanced_stabilized,
)
from .mm import mm_unbalanced, mm_unbalanced2
from .patching import patch, patched, unpatch
from .sinkhorn import (
    sinkhorn_knopp_unbalanced,
    sinkhorn_stabilized_unbalanced,
    sinkhorn_unbalanced,
    sinkhorn_unbalanced2,
    sinkhorn_unbalanced_translation_invariant,
)

__all__ = [
    "barycenter_unbalanced",
    "barycenter_unbalanced_sinkhorn",
    "barycenter_unbalanced_stabilized",
    "mm_unbalanced",
    "mm_unbalanced2",
    "patch",
    "patched",
    "sinkhorn_knopp_unbalanced",
    "sinkhorn_stabilized_unbalanced",
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "sinkhorn_unbalanced_translation_invariant",
    "unpatch",
]
