"""The data that users have takes no more work than it must: passes and pairs are counted, no time is asserted."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import cKDTree

import mapuot
from mapuot.backends.cpu import workspace
from mapuot.problem import points

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "bench").is_dir():
    pytest.skip("no benchmark beside an installed package", allow_module_level=True)
sys.path.append(str(ROOT))

from bench import zoo  # noqa: E402

N = 1000
EXACT = 3.0  # float32 passes that a float64 one counts as
EASY = ["uniform", "1e6 + uniform", "unequal masses", "zero masses", "spiral and sheet"]
HARD = ["normal", "clusters", "clusters, heavy tails", "Student-t, 2 degrees", "lattice"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def work(monkeypatch):
    """Return a function that solves a set, and tells its passes, float64 ones, and work in pairs."""
    passes, made = [], workspace.HostWorkspace.make_passes

    def counted(self, count):
        narrow, kept = self.progress.narrow > 0, self.truncation and self.truncation.kept
        stats = made(self, count)
        pairs = self.problem.size * (kept.share if kept else 1.0)
        passes.append((len(stats), not narrow, pairs))
        return stats

    monkeypatch.setattr(workspace.HostWorkspace, "make_passes", counted)

    def solve(name, share, tol=1e-6, truncate=None, d=3):
        x, y, a, b, median = zoo.draw(name, N, d)
        cloud = mapuot.PointCloud(x, y, truncate=truncate, form=None)
        passes.clear()
        result = mapuot.solve(cloud, a, b, reg=share * median, reg_m=median, tol=tol, threads=1)
        assert result.converged, (name, share, tol, truncate, result.error_bound)
        exact = sum(count for count, wide, _ in passes if wide)
        return result.n_passes, exact, sum(k * pairs * (EXACT if wide else 1.0) for k, wide, pairs in passes)

    return solve


@pytest.mark.parametrize("share", zoo.REGS)
def test_one_outlier_costs_a_tenth_of_the_passes(work, share):
    passes, exact, pairs = work("uniform", share)
    found = work("one outlier", share)
    assert found[0] <= math.ceil(1.1 * passes) + 1
    assert found[1] <= exact + 2
    assert found[2] <= 1.25 * pairs


@pytest.mark.parametrize("share", zoo.REGS)
@pytest.mark.parametrize("name", EASY[1:] + HARD)
def test_passes_are_those_of_the_uniform_cloud_where_points_have_partners(work, name, share):
    """Points whose nearest partner costs more than 4 reg exchange mass through few others: each is a slow mode."""
    x, y, _, _, median = zoo.draw(name, N, 3)
    alone = (cKDTree(y).query(x)[0] ** 2 > 4 * share * median).mean()
    assert work(name, share)[0] <= (1.5 + 8 * math.sqrt(alone)) * work("uniform", share)[0]
    assert (alone > 0.1) == (name in HARD and share < 0.01)


@pytest.mark.parametrize("truncate", [None, 1.0])
@pytest.mark.parametrize("name", ["one outlier", "clusters, heavy tails", "lattice"])
def test_a_looser_tol_and_a_larger_reg_take_no_more_work(work, name, truncate):
    by_tol = [work(name, 0.005, tol, truncate)[2] for tol in (1e-2, 1e-4, 1e-6)]
    assert by_tol == sorted(by_tol)
    assert work(name, 0.05, 1e-6, truncate)[2] <= by_tol[-1]


@pytest.mark.parametrize("share", [0.05, 0.01])
@pytest.mark.parametrize("name", ["uniform", "one outlier", "normal", "Student-t, 2 degrees"])
def test_auto_takes_no_more_work_than_all_pairs(work, name, share, monkeypatch):
    whole = work(name, share)[2]
    monkeypatch.setattr(points, "AUTO_ENTRIES", N * N)
    monkeypatch.setattr("mapuot.ascend.groups.GROUPS", N // 2)
    assert work(name, share, truncate="auto")[2] <= 1.1 * whole


def test_groups_are_as_wide_in_the_tails_as_elsewhere():
    """Groups of equally many points are hundreds of kernel widths wide there, and solves that begin there never end."""
    from mapuot.ascend import groups
    from mapuot.backends import boxes

    x = zoo.draw("Student-t, 2 degrees", 4096, 3)[0]
    x = x[boxes.order(x, 16)]
    found = groups.grouping(x, 1024, 16)
    count = np.bincount(found.label)
    assert len(count) <= 1024 + 5
    assert set(count) <= {1, 2, 4, 8, 16}
    np.testing.assert_allclose(found.sums(x), [x[found.label == k].sum(0) for k in range(len(count))], atol=1e-9)
    wide = [np.ptp(x[found.label == k], axis=0).max() for k in range(len(count))]
    even = np.ptp(x.reshape(-1, 4, 3), axis=1).max(1)
    assert max(wide) < 0.1 * even.max()
