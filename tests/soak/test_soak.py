"""A short slice of the soak: one trial of each kind. The whole: make soak."""

import zlib

import numpy as np
import pytest

from soak.trials import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_trial(kind):
    KINDS[kind](np.random.default_rng(zlib.crc32(kind.encode())))
