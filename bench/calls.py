"""calls: POT's functions as programs call them on minibatches, and ours in their place.

Costs are squared distances between points of the plane, as they are or divided by their largest; masses are uniform.
Errors are defined as in `words`, which also times the calls. Where POT breaks off (exp(-M / reg) underflows), its time
is the time to the failure, and the row counts for no mean.
"""

from functools import partial
from itertools import product
from typing import Any

import numpy as np

import mapuot
from mapuot import pot
from mapuot.pot import patching

from . import common, problems, words

SIZES = (64, 128, 256, 500, 2000)
REGS = (0.05, 0.1, 0.01)
RHOS = (0.5, 1.0)
NAMES = ("sinkhorn_knopp_unbalanced", "sinkhorn_unbalanced_translation_invariant")
BROKEN = 0.5  # an error of POT from here on counts as failure


def rows(n: int) -> list[words.Row]:
    rng = np.random.default_rng([n, 7])
    a = np.full(n, 1.0 / n)
    found = []
    M = problems.squared_distances(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)) + 0.5)
    for scaled, reg, rho in product((True, False), REGS, RHOS):
        if scaled:
            C = M / M.max()
        else:
            C = M
        exact = mapuot.solve(C, a, a, reg=reg, reg_m=rho, tol=1e-11).plan
        for name in NAMES:
            calls = (partial(function, a, a, C, reg, rho) for function in patching.installed[name])
            title = f"{name}, {n} points{', scaled' * scaled}, reg {reg:g}, reg_m {rho:g}"
            found.append((title, *calls, exact))
    return found


def run(args: Any) -> dict[str, Any]:
    if args.size:
        sizes = (args.size,)
    else:
        sizes = SIZES[: 2 if args.quick else None]
    if args.quick:
        budget = 0.1
    else:
        budget = 0.5
    with common.blas_threads(args.threads), pot.patched():
        found = [words.timed(*row, budget) for n in sizes for row in rows(n)]
    return {"threads": args.threads, "words": found}


def tables(data: dict[str, Any]) -> str:
    means = []
    for name in NAMES:
        some = [r for r in data["words"] if r["call"].startswith(name) and r["error"]["before"] < BROKEN]
        times = [r["seconds"]["before"] / r["seconds"]["after"] for r in some]
        means.append([name, common.geometric_mean(times), min(times), len(times)])
    head = ["call", "geometric mean of before / after", "least", "problems"]
    return common.text_of(words.tables(data), common.table(head, means))
