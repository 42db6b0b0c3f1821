"""Starts the CUDA kernels' run on the CPU where its tests are among those collected, and ends it with them."""

import pytest
from emulated import MISSING, Runs

RUNS = pytest.StashKey()


def pytest_collection_finish(session):
    parts = [item.callspec.params["part"] for item in session.items if getattr(item, "originalname", "") == "test_part"]
    if parts and not MISSING and not session.config.option.collectonly:
        session.config.stash[RUNS] = Runs(parts)


def pytest_sessionfinish(session):
    if RUNS in session.config.stash:
        session.config.stash[RUNS].stop()


@pytest.fixture
def runs(request):
    return request.config.stash[RUNS]
