"""Numbers that decide are set for the time of a block, and no test patches one of them by its name."""

import dataclasses
import re
from pathlib import Path

import pytest

from mapuot.answer.settings import BATCH_PLANS, CURVATURE
from mapuot.ascend.settings import GROUPS, LEVELS, PAIRS, STAGES
from mapuot.backends.cuda.settings import (
    DEVICE_ARRAYS,
    DEVICE_BATCHES,
    DEVICE_CALLS,
    DEVICE_LAUNCHES,
    DEVICE_PAIRS,
)
from mapuot.backends.settings import BOXES, CALLS, COARSE, FACTORS, KERNELS, NARROW
from mapuot.marginals.settings import TREES
from mapuot.problem.settings import BLOCKS, EXTENT, POINTS, STATISTICS
from mapuot.spaces.settings import SPACES

ALL = (
    STAGES, PAIRS, GROUPS, LEVELS, BOXES, CALLS, COARSE, FACTORS, KERNELS, NARROW, CURVATURE, BATCH_PLANS, TREES,
    POINTS, BLOCKS, STATISTICS, EXTENT, SPACES, DEVICE_ARRAYS, DEVICE_BATCHES, DEVICE_CALLS, DEVICE_LAUNCHES,
    DEVICE_PAIRS,
)  # fmt: skip
# Names that tests patch although they are in capitals: caches, places of files, words, and a number of batch.cuh.
NO_NUMBERS = {"AHEAD", "LOADED", "MODULES", "READY", "BACKEND", "FAILED", "ON_DEVICE", "BATCH_DEPTH"}


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: type(settings).__name__)
def test_a_block_sets_numbers_and_brings_them_back(settings):
    before = dataclasses.asdict(settings)
    name = next(iter(before))
    with settings.using(**{name: 7}):
        assert getattr(settings, name) == 7
    assert dataclasses.asdict(settings) == before == dataclasses.asdict(type(settings)())


def test_an_unknown_number_is_refused():
    with pytest.raises(AttributeError, match="no_number"), STAGES.using(no_number=1):
        pass


def test_no_number_is_patched_by_its_name():
    files = sorted(Path(__file__).parent.rglob("*.py"))
    calls = [
        call
        for file in files
        for call in re.findall(r"setattr\(([^()]*(?:\([^()]*\))?[^()]*)", file.read_text("utf-8"))
    ]
    assert len(calls) > 50
    patched = {name for call in calls for name in re.findall(r"[\".]([A-Z][A-Z_]+)\"", call)}
    assert patched - NO_NUMBERS == set()
