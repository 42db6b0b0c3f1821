"""Transport between many marginals at once: `multimarginal` and `MultiResult`.

    min_P  <P, C> + reg KL(P | R) + sum_k reg_m[k] KL(P_k | masses[k]),     R the product of the masses

Modules from the outside in: `solve` (the call), `result`, `certificate`, `tree` and `blocks` (one pass, for each shape
of C), `state`, `problem` (all checks, once), `reach` (the points and parts that a graph connects), `slabs` (an array
over all marginals).
"""

from .result import MultiResult
from .solve import multimarginal

__all__ = ["MultiResult", "multimarginal"]
