"""POT's unbalanced functions (``ot.unbalanced``) on mapuot: the same signatures and return types, certified answers.

``patch()`` makes POT itself run on mapuot, ``unpatch()`` undoes it, and ``with patched():`` does so for a block.

The certified solver answers every call, for any method. ``stopThr`` has POT's meaning: the answer is at least as near
to the solution as POT's method would be when it stops. The smallest certified error is 1e-10, which ``stopThr=0`` asks
for. A call may take 1000 passes, or ``numItermax`` if that is more. A function called from ``mapuot.pot`` without a
method reads ``stopThr`` as the certified relative error of the plan, and ``numItermax`` as the largest number of
passes.

What the patch changes:

- ``ot.solve(M, a, b, reg=..., unbalanced=...)`` runs on mapuot if it names no method. Without reg, or with penalties
  other than "kl", it runs POT's own ``mm_unbalanced`` or L-BFGS. `mapuot.pot.mm_unbalanced`, called by its own name, is
  transport without entropy with a certified gap.
- ``ot.da.UnbalancedSinkhornTransport`` gets a converged answer, although it asks for ten iterations by default.
- ``ot.gromov``'s entropic functions, balanced, fused and unbalanced, run on `mapuot.gromov` for symmetric
  similarities, the square loss and a positive epsilon, from several starts unless one is given. POT answers all other
  calls of these functions.
- Barycenters take 20 to 70 certified passes where POT makes 300 to 3000 iterations.

Where answers differ from POT's:

- mapuot is right where POT is wrong: with zeros in a or b, at small reg, and for two different reg_m in the
  translation-invariant method.
- If both sides are balanced and forbidden pairs leave no plan, an `mapuot.InfeasibleError` is raised; POT iterates on.
  If the totals of balanced sides differ, the plan is the limit of POT's iteration: it meets b, with rows in proportion
  to a, and one ConvergenceWarning says so.
- An answer that has not converged gives a ConvergenceWarning at the caller's line; POT is silent.
- ``total_cost`` in the log, ``returnCost="total"``, and therefore ``ot.solve(...).value``, are the objective with its
  mass terms ``sum q - sum p``. POT omits these terms, and reports 0 at every optimum.
- ``err`` in the log holds the certified relative error of the plan after each pass, not the change of u and v.
- M may be a matrix of scipy.sparse, which POT refuses. Pairs that it does not store are forbidden, and the plan is a
  CSR array.
- For several b (2-D) ``reg_type`` names the reference, by default a b^T; POT always takes ones. c and returnCost are
  used. A patched call without reg_type takes "entropy", as POT does.
- ``reg_m=0``, ``numItermax=0``, NaN and negative masses are errors.
- Unknown keywords, which POT ignores, are errors. Patched functions ignore them, too, with one warning for each name.
- Gradients: if a, b and M are dense PyTorch tensors, ``reg_type`` is "kl" and c is None, plans and costs have the
  derivatives of the solution by each of a, b and M that requires a gradient. POT's own function answers any other
  patched call that needs a gradient (by reg_m or c, or for a JAX tracer), by differentiating its iterations; the first
  such call warns. The functions of ``mapuot.pot`` refuse such calls. TensorFlow tensors come back without a gradient.
"""

from .barycenter import barycenter_unbalanced
from .gromov import (
    entropic_fused_gromov_wasserstein,
    entropic_fused_gromov_wasserstein2,
    entropic_gromov_wasserstein,
    entropic_gromov_wasserstein2,
    fused_unbalanced_gromov_wasserstein,
    fused_unbalanced_gromov_wasserstein2,
)
from .mm import mm_unbalanced
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
    "entropic_fused_gromov_wasserstein",
    "entropic_fused_gromov_wasserstein2",
    "entropic_gromov_wasserstein",
    "entropic_gromov_wasserstein2",
    "fused_unbalanced_gromov_wasserstein",
    "fused_unbalanced_gromov_wasserstein2",
    "mm_unbalanced",
    "patch",
    "patched",
    "sinkhorn_knopp_unbalanced",
    "sinkhorn_stabilized_unbalanced",
    "sinkhorn_unbalanced",
    "sinkhorn_unbalanced2",
    "sinkhorn_unbalanced_translation_invariant",
    "unpatch",
]
