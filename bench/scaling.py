"""scaling: GeomLoss's loss at several values of its ``scaling``, and ours at the same error of the value.

Uniform points in 3-D, the second cloud moved by .2; both losses are debiased, with their gradient, of float64 points on
the CPU. GeomLoss stops after a number of steps that ``scaling`` sets (.5 by default) and knows no error. Errors of the
value are relative to our solve to 1e-9. Our time is for the largest of TOLS with a value as near as GeomLoss's.
"""

from functools import partial
from typing import Any

import numpy as np

from . import brief, common
from .loss import step

NEEDS = ("torch", "geomloss")
SIZE = 600
CASES = (0.05, 0.3), (0.05, None)
SCALINGS = (0.5, 0.7, 0.9, 0.99)
TOLS = (1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-6)
EXACT = 1e-9


def case(n: int, blur: float, reach: float | None, budget: float) -> dict[str, Any]:
    """Return the value, and of each scaling its error and the least seconds of both losses, which take turns."""
    import geomloss
    import torch

    from mapuot.torch import SamplesLoss

    rng = np.random.default_rng(0)
    words = {"p": 2, "blur": blur, "reach": reach}
    x = torch.tensor(rng.random((n, 3)))
    y = torch.tensor(rng.random((n, 3)) + 0.2)
    value = step(SamplesLoss("sinkhorn", **words, tol=EXACT, max_passes=100_000), x, y)[0]
    ours = {tol: SamplesLoss("sinkhorn", **words, tol=tol) for tol in TOLS}
    errors = {tol: abs(step(loss, x, y)[0] / value - 1) for tol, loss in ours.items()}
    rows: list[dict[str, Any]] = []
    for scaling in SCALINGS:
        theirs = geomloss.SamplesLoss("sinkhorn", **words, scaling=scaling, backend="tensorized")
        found = step(theirs, x, y)[0]
        error = abs(found / value - 1)
        tol = next((tol for tol in TOLS if errors[tol] <= error), TOLS[-1])
        times = common.interleave(
            {"theirs": partial(step, theirs, x, y), "ours": partial(step, ours[tol], x, y)}, budget, (3, 20)
        )
        rows.append({
            "scaling": scaling, "value": found, "error": error, "seconds": min(times["theirs"]),
            "ours": min(times["ours"]), "tol": tol, "our_error": errors[tol],
        })  # fmt: skip
    return {"blur": blur, "reach": reach, "value": value, "rows": rows}


def run(args: Any) -> dict[str, Any]:
    if args.quick:
        n = 60
        budget = 0.2
    else:
        n = args.size or SIZE
        budget = 2.0
    return {"n": n, "cases": [case(n, *one, budget) for one in CASES]}


tables = brief.scalings
