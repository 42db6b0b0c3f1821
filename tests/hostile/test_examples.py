"""Small problems on which a claim was once false, on every backend, alone and as a batch: the judge finds nothing now.

Most were shrunk by ``make hostile``; each stands for the rounding or the saturation that its comment names.
"""

import numpy as np
import pytest

from .judge import judge
from .newton import compiler
from .problem import Problem
from .trial import Trial, call

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler and a long double longer than double")
INF = np.inf


def problem(M, a, b, reg, reg_m, penalty=("kl", "kl"), reference="product"):
    M, a, b = (np.asarray(x, float) for x in (M, a, b))
    return Problem(M, a, b, reg, reg_m, penalty, reference)


EXAMPLES = {
    # K in float32: the values of the plan differ by reg mass 2^-24, the gap of total variation by rho r 2^-24
    "total variation": (problem([[0, 0.2]], [1], [1, 1], 0.2, (0.5, 3e7), ("kl", "tv")), {"precision": "mixed"}),
    "steep": (problem([[0, 0], [0, 1]], [1, 1], [1, 1], 3e6, (7e7, 3e9), ("tv", "kl")), {"precision": "mixed"}),
    "dual value": (problem([[1, 2], [2, 1.5]], [1, 1], [1, 1], 0.5, (1e3, 0.3)), {"precision": "mixed"}),
    "range": (problem([[-80.4, -80, -79.9]], [0.38], [1, 0.6, 0.5], 0.6, (3.0, 3.0), ("range", "range")), {}),
    # r log(r / t) - r + t and rho (a - r) at a rho of 1e7 and more
    "divergence": (problem([[1]], [1], [1], 0.3, (0.3, 3e7)), {"precision": "float64"}),
    "marginals": (problem([[1]], [1], [1], 9.5, (2e7, 50.0)), {"precision": "float64"}),
    "far": (problem([[0.6, 3], [2, 1]], [1, 0.5], [0.5, 1], 2e-3, (9e6, 9e6)), {"precision": "mixed", "tol": 1e-3}),
    # log u and log v of 1e4: the rounding of the exponents
    "exponents": (problem([[1e3, 2e3]], [1], [1, 2], 0.1, (5.0, 5.0)), {"precision": "float64", "tol": 1e-10}),
    "offset": (problem([[0, -2.0773, -2.036]], [0.3], [1, 1, 1], 2e-4, (1e-4, 9e-3)), {"tol_gap": 4e-4}),
}


def failures(trial, backend):
    options = {"tol": 1e-6, **trial.options}
    return [f for p, c in zip(trial.problems, call(trial, backend), strict=True) for f in judge(p, c, options)[0]]


@pytest.mark.filterwarnings("ignore::mapuot.ConvergenceWarning")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("how", ["cold", "stream", "batch"])
def test_every_claim_is_true(how, name, backend):
    example, options = EXAMPLES[name]
    assert failures(Trial(how, (example,), {"max_passes": 3000, **options}), backend) == []
