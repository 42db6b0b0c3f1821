"""Anderson's step of many marginals (src_c/differences.c) against least squares, part by part and of all parts."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mapuot.backends.cpu.marginals import History


def weights(residual, dF, weight):
    """argmin |residual - sum gamma_i dF_i| in the norm of ``weight``."""
    root = np.sqrt(weight)
    return np.linalg.lstsq(root[:, None] * dF.T, root * residual, rcond=None)[0]


@pytest.mark.parametrize("ends", [[1], [37], [1500], [7, 300, 340, 2900]])
@pytest.mark.parametrize("alone", [0.0, 0.3])
def test_steps_are_least_squares(isa, ends, alone):
    """More differences than are held, and after a start anew."""
    rng, depth, past = np.random.default_rng(0), min(4, ends[0]), []
    history = History(depth, ends)
    for number in range(9):
        residual, image, weight = rng.normal(size=ends[-1]), rng.normal(size=ends[-1]), rng.random(ends[-1]) + 0.1
        if number == 7:
            history.clear()
            past = []
        assert history.add(residual, image) == bool(past)
        past = [*past[-depth:], (residual, image)]
        if len(past) == 1:
            continue
        dF, dG = (np.diff([x[k] for x in past], axis=0) for k in (0, 1))
        shared = weights(residual, dF, weight)
        want = [image.copy(), residual.copy()]
        for part in history.parts:
            own = weights(residual[part], dF[:, part], weight[part])
            gamma = shared if len(ends) == 1 else alone * own + (1 - alone) * shared
            want[0][part] -= gamma @ dG[:, part]
            want[1][part] -= gamma @ dF[:, part]
        for got, right in zip(history.next(weight, alone), want, strict=True):
            assert_allclose(got, right, rtol=0, atol=1e-7 * np.abs(right).max() + 1e-7 * np.abs(image).max())
