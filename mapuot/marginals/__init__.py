"""Transport between many marginals at once: `multimarginal` and what it returns.

    min_P  <P, C> + reg KL(P | R) + sum_k reg_m[k] KL(P_k | masses[k]),     R the product of the masses

From the outside in: `solve` (the call), `result`, `certificate`, `tree` and
`blocks` (what one pass does for a shape of C), `state`, `problem` (all checks, once), `reach` (which points and parts a
graph connects), `slabs` (an array of all marginals).
"""

from .result import MultiResult
from .solve import multimarginal

__all__ = ["MultiResult", "multimarginal"]
