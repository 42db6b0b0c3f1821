"""Numbers that decide are set for the time of a block, and no test patches one of them by its name."""

import dataclasses

import pytest

from mapuot.answer.settings import CURVATURE
from mapuot.ascend.settings import GROUPS, PAIRS, STAGES
from mapuot.backends.settings import BOXES, CALLS, COARSE
from mapuot.marginals.settings import TREES
from mapuot.problem.settings import BLOCKS, POINTS

ALL = STAGES, PAIRS, GROUPS, BOXES, CALLS, COARSE, CURVATURE, TREES, POINTS, BLOCKS


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
