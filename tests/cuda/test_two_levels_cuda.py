"""Newton's steps with two levels on a GPU take as many products as on a CPU, and reach the same plan."""

import numpy as np
import pytest

import mapuot
from mapuot.arrays import namespace
from mapuot.ascend import two_levels
from mapuot.ascend.settings import LEVELS
from mapuot.backends.cpu import HostBackend
from mapuot.backends.cuda import DeviceBackend
from mapuot.backends.cuda.points import PointWorkspace
from mapuot.backends.cuda.settings import DEVICE_LAUNCHES
from mapuot.problem.settings import POINTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("truncate", "stays_from"),
    [(1.0, 0), (None, 0), (None, 1000)],
    ids=["kept pairs", "all pairs", "vectors on the host"],
)
def test_two_levels_as_on_a_cpu(monkeypatch, truncate, stays_from):
    for kind in DeviceBackend, HostBackend:
        monkeypatch.setattr(kind, "most_factored", 0)  # as for clouds too large for a factor
    rng = np.random.default_rng(3)
    centres = rng.random((6, 2))
    x, y = (centres[k] + 0.05 * rng.standard_t(3, (200, 2)) for k in (rng.integers(0, 6, 200), rng.integers(0, 6, 200)))
    cloud = mapuot.PointCloud(x, y, truncate=truncate, form=None)
    known = {"reg": 0.01, "reg_m": np.inf, "tol": 1e-6, "precision": "float64"}
    restart = PointWorkspace.restart

    def restarted(workspace, log_v, *given):
        assert namespace(log_v) is namespace(workspace.absorbed[0])  # CuPy does not convert, the emulation would
        restart(workspace, log_v, *given)

    monkeypatch.setattr(PointWorkspace, "restart", restarted)
    with POINTS.using(stays_from=stays_from):
        here, there = (mapuot.solve(cloud, backend=name, **known) for name in ("cpu", "cuda"))
    assert here.converged
    assert there.converged
    assert np.abs(here.plan - there.plan).sum() <= here.error_bound + there.error_bound
    assert here.how.split("steps by")[1] == there.how.split("steps by")[1]


def test_each_pass_of_such_steps_is_in_float64(monkeypatch, using):
    """A trial that follows another without a product between them was a float32 pass, which must not be the last."""
    monkeypatch.setattr(DeviceBackend, "most_factored", 0)
    using(LEVELS, far_behind=0.0)  # each trial makes two passes
    using(DEVICE_LAUNCHES, least_corrected=1)
    within: list[bool] = []
    make_pass, read = two_levels.PassPlans.make_pass, PointWorkspace.read

    def made(plans, log_v):
        with monkeypatch.context() as during:
            during.setattr(PointWorkspace, "read", seen)
            return make_pass(plans, log_v)

    def seen(workspace):
        within.append(workspace.estimates)
        return read(workspace)

    monkeypatch.setattr(two_levels.PassPlans, "make_pass", made)
    rng = np.random.default_rng(3)
    centres = rng.random((4, 6))
    x, y = (centres[rng.integers(0, 4, 60)] + 0.05 * rng.standard_t(3, (60, 6)) for _ in "xy")
    cloud = mapuot.PointCloud(x, y, truncate=None, form=None)
    found = mapuot.solve(cloud, reg=0.02, reg_m=np.inf, tol=1e-6, backend="cuda")
    assert found.converged
    assert len(within) > 2
    assert not any(within)
