"""The unbalanced functions of POT (``ot.unbalanced``), its signatures and return types, running on mapuot.

``patch()``, ``unpatch()`` and ``with patched():`` make POT itself run on them. Where the functions here differ from
POT's: the default method is the certified one, and warns where it does not get there; several b (2-D) have the
reference that ``reg_type`` names, a b^T by default, where POT always takes ones (patched, they do, too); ``reg_m=0``
and ``numItermax=0`` are errors; ``total_cost`` has its mass terms.
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
