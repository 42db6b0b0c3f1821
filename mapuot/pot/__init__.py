"""The unbalanced functions of POT (``ot.unbalanced``), its signatures and return types, running on mapuot.

``patch()``, ``unpatch()`` and ``with patched():`` make POT itself run on mapuot.

The certified solver answers every call, whatever the method's name. ``stopThr`` is POT's: the plan or cost comes at
least as near to the solution as this stop would leave POT's method. 0 or less counts as a certified error of 1e-10, and
so does what asks for less. A call that asks for few iterations is answered to the same stop: it may take 1000 passes,
or ``numItermax``, if that is more. A function called by its own name with no method,
``mapuot.pot.sinkhorn_unbalanced(...)``, reads ``stopThr`` as the certified relative plan error and ``numItermax`` as
the most passes; a patched function has POT's default method.

What gains from the patch, and what does not:

- ``ot.solve(M, a, b, reg=..., unbalanced=...)`` gains where it names no method. Without reg, or with penalties other
  than "kl", it runs what it always did: POT's ``mm_unbalanced`` and L-BFGS are left as they are. By its own name
  ``mapuot.pot.mm_unbalanced`` is transport without entropy, with a certified gap.
- ``ot.da.UnbalancedSinkhornTransport`` asks for ten iterations by default and gets a certified answer.
- Barycenters are accelerated and certified, too: 20 to 70 passes where POT makes 300 to 3000.

Where the answers differ from POT's:

- Right where POT is not: zeros in a or b, small reg, unequal reg_m in the translation-invariant method.
- Where both sides are balanced and no plan has both marginals, `mapuot.InfeasibleError` is raised; POT iterates.
- What has not converged gives a ConvergenceWarning at the caller's line; POT is silent.
- ``total_cost`` in the log, ``returnCost="total"`` and so ``ot.solve(...).value`` have the mass terms ``sum q - sum
  p``: they are the objective. POT leaves them out and reports 0 at every optimum.
- The log's err holds certified relative plan errors, one a pass, and not the changes of u and v.
- M of scipy.sparse, which POT refuses: pairs that it does not store are forbidden, and the plan is a CSR array, of
  `ot.solve`, too.
- Several b (2-D) have the reference that ``reg_type`` names, a b^T by default, where POT always takes ones (patched,
  an unnamed reg_type is "entropy"), and honour c and returnCost.
- ``reg_m=0``, ``numItermax=0``, NaN and negative masses are errors.
- POT swallows unknown keywords. Patched functions take them with one warning a name; called by their own names the
  functions refuse them, as they do tau where the method has none.
- Gradients. A patched call in which a PyTorch tensor requires grad (or is a JAX tracer) is left to POT's own
  function, which differentiates its iterations; ``sinkhorn_unbalanced2(..., returnCost="total")`` of tensors, without
  log, c and warmstart, gives the objective with its exact gradient (`mapuot.torch.sinkhorn_loss`). By its own name a
  function gives the latter and refuses the rest. Tensors of TensorFlow come back without a gradient.
"""

from .barycenter import barycenter_unbalanced
from .mm import mm_unbalanced
from .patching import patch, patched, unpatch
from .sinkhorn import (
    sinkhorn_knopp_unbalanced,
    sinkhorn_stabilized_unbalanced,
    sinkhorn_unbalanced,
    sinkhorn_unbalanced2,
    sinkhorn_unbalanced_translation_invariant,
)
