"""One trial of each kind passes; `make soak` makes many."""

import os
import zlib

import numpy as np
import pytest

from soak.trials import KINDS

QUICK = "threads", "forks", "signals"


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="ThreadSanitizer forbids threads after fork")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.nightly) for kind in KINDS]
)
def test_one_trial(kind):
    KINDS[kind](np.random.default_rng(zlib.crc32(kind.encode())))
