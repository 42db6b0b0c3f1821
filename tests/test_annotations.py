"""The words in the types of arguments are the words that the checks of these arguments know."""

import typing

import pytest

from mapuot import annotations
from mapuot.answer.draw import DRAWS
from mapuot.backends import BACKENDS
from mapuot.penalties import PENALTIES
from mapuot.problem.metrics import METRICS
from mapuot.problem.scale import SCALES, WEIGHTED
from mapuot.route.options import METHODS, PRECISIONS, SCHEDULES

KNOWN = {
    "Method": METHODS, "Penalty": PENALTIES, "Precision": ("auto", *PRECISIONS), "BackendName": BACKENDS,
    "Schedule": SCHEDULES, "MetricName": METRICS, "DrawMethod": DRAWS, "Statistic": SCALES,
    "MassStatistic": (*SCALES, *WEIGHTED),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_types_have_the_words_that_are_accepted(name):
    parts = typing.get_args(getattr(annotations, name))
    words = [word for part in parts for word in (typing.get_args(part) or [part])]
    assert sorted(words) == sorted(KNOWN[name])
