"""The coarse correction: clusters, matrix and steps equal the oracle's, and the guard protects it."""

import weakref

import numpy as np
import pytest
from problems import clouds, with_forbidden, with_zeros
from test_kernels import DTYPES, compare_passes, make_problem, options

import mapuot
from mapuot.backends import coarse
from mapuot.backends.cpu import backend as cpu
from mapuot.backends.cpu import native
from mapuot.backends.reference import backend as reference
from mapuot.backends.reference import split
from mapuot.backends.settings import COARSE
from mapuot.problem.settings import BLOCKS

PASSES = COARSE.first + 4  # the last three are corrected


@pytest.fixture(autouse=True)
def at_once(using):
    """Build a first matrix after ``COARSE.first`` passes at any reg, of any K."""
    with COARSE.using(sharp=0.0, least_entries=0):
        yield


@pytest.mark.parametrize("points", [1, 2, 7, 64, 333])
@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_split(points, count):
    """Every point has a label, near points share one, and no cluster has more than its share."""
    X = np.random.default_rng(points).normal(size=(points, 3))
    label = native.split(X, count)
    np.testing.assert_array_equal(label, split(X, count))
    assert label.min() >= 0
    assert label.max() < count
    assert np.bincount(label).max() <= -(-points // max(1, count - 4)) + 1
    line = np.sort(np.round(X[:, :1], 1), axis=0)  # with ties
    assert np.bincount(native.split(line, count)).max() <= -(-points // max(1, count - 4)) + 1


def test_points_far_from_all_others_are_clusters_of_their_own():
    """Far points get their own cluster, as another one would move them along; many outliers leave the others theirs."""
    X = np.random.default_rng(1).normal(size=(1000, 3))
    X[[17, 500]] += [[100], [-300]]
    X[600:602, 1] += 1000
    label = native.split(X, 16)
    np.testing.assert_array_equal(label, split(X, 16))
    for alone in ([17], [500], [600, 601]):
        np.testing.assert_array_equal(np.flatnonzero(label == label[alone[0]]), alone)
    X = X[:400] * 2.0 ** np.arange(400)[:, None]
    label = native.split(X, 16)
    np.testing.assert_array_equal(label, split(X, 16))
    assert np.bincount(label).max() <= -(-400 // 12)


SIDES = {"kl": ((0.8, 2.5), 1.3), "rows balanced": ((np.inf, 2.5), 1.3), "balanced": ((np.inf, np.inf), 1.0)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sides", SIDES)
def test_corrected_passes(isa, threads, dtype, sides, using):
    """Corrected passes equal the oracle's, with zeros, forbidden pairs and blocks of rows that end within a tile.

    The second labelled pass is itself corrected by the first one's matrix.
    """
    using(COARSE, every=1)
    reg_m, ratio = SIDES[sides]
    for k, shape in enumerate([(9, 8), (33, 70), (97, 45)]):
        case = clouds(*shape, reg=0.2, reg_m=reg_m, ratio=ratio)
        case = (case, with_zeros(case), with_forbidden(case))[k if sides == "kl" else 0]
        compare_passes(case, PASSES, 100 * DTYPES[dtype], dtype=dtype, threads=threads)


@pytest.mark.parametrize("sides", SIDES)
def test_corrected_steps(isa, sides, using):
    """Corrected steps equal the oracle's far from the answer: by one matrix, and next to a labelled pass by two."""
    using(COARSE, every=1)
    reg_m, ratio = SIDES[sides]
    problem = make_problem(clouds(97, 90, reg=0.002, reg_m=reg_m, ratio=ratio))
    given = [module.workspace(problem, options(dtype="float64", threads=1)) for module in (cpu, reference)]
    for workspace in given:
        workspace.absorb(np.zeros(90))
    for k in range(COARSE.first + 4):
        ours, right = (workspace.iterate(1)[0] for workspace in given)
        assert (ours.rejected, given[0].correcting) == (right.rejected, given[1].correcting)
        steps = [workspace.next_log_v - workspace.next_log_v.mean() for workspace in given]
        if k == COARSE.first + 1:
            oracle = given[1]
            gained = oracle.matrix @ oracle.history[-1][0]
            assert np.abs(gained - gained.mean()).max() > 0.01
        np.testing.assert_allclose(*steps, rtol=0, atol=1e-5)


def corrected(**keywords):
    workspace = cpu.workspace(make_problem(clouds(60, 50, reg=0.02, reg_m=3.0, ratio=1.4)), options(**keywords))
    workspace.absorb(np.zeros(50))
    for _ in range(PASSES):
        workspace.iterate(1)
    assert workspace.correcting
    return workspace


def test_blocks_are_the_plan_between_clusters(isa):
    """A labelled pass returns P_Ij as shares of a cluster's mass and otherwise equals an unlabelled pass."""
    workspace = corrected(dtype="float64", threads=2)
    plain = corrected(dtype="float64", threads=2)
    labels = coarse.FOUND[workspace.problem.cost]
    found = workspace.labelled_pass(labels)[0]
    expected = plain.make_passes(1)[0]
    for name in ("gap", "dual", "mass", "residual"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-15)
    log_u, log_v = workspace.potentials()
    problem = workspace.problem
    alpha, beta = problem.exponents(log_u, log_v)
    P = np.exp(alpha[:, None] + beta[None, :] - problem.M / problem.reg)
    rows = np.empty(60, int)
    rows[labels.order] = np.repeat(np.arange(labels.clusters), np.diff(labels.first))
    wanted = np.eye(labels.clusters)[rows].T @ P
    mass, blocks = (workspace.coarse_arrays[name] for name in ("mass", "blocks"))
    np.testing.assert_allclose(mass / mass.sum(), wanted.sum(1) / wanted.sum(), rtol=1e-10)
    np.testing.assert_allclose(blocks[:, :50], wanted / wanted.sum(1, keepdims=True), rtol=1e-6, atol=1e-20)
    assert not blocks[:, 50:].any()


def test_a_wrong_correction_is_dropped():
    """The guard returns to the previous image, and no step is corrected until a new matrix is built."""
    workspace = corrected(dtype="float64")
    workspace.coarse_arrays["matrix"][:: workspace.coarse.count + 1] *= 0.3
    workspace.iterate(1)
    image = workspace.history[len(workspace.sums) - 8 :][:50].copy()
    dropped = workspace.iterate(1)[0]
    assert dropped.rejected
    assert not workspace.correcting
    np.testing.assert_array_equal(workspace.col_side["log_scale"][:50], image)
    assert not any(stat.rejected for stat in workspace.iterate(COARSE.wait - 1))
    assert not workspace.correcting
    workspace.iterate(3)
    assert workspace.correcting


def test_clusters_stay_while_the_core_points_at_them():
    """A solve keeps its clusters while another solve of the cost, in another thread, may replace the stored ones."""
    workspace = corrected()
    alive = [weakref.ref(array) for array in coarse.FOUND[workspace.problem.cost][:2]]
    coarse.FOUND.pop(workspace.problem.cost)
    assert all(x() is not None for x in alive)
    workspace.iterate(COARSE.every + PASSES)
    workspace.close()
    del workspace
    assert not any(x() is not None for x in alive)


def test_a_cloud_comes_again_in_other_clusters(using):
    """A cloud has more clusters over ranks than alone; labels of more clusters once wrote behind the sums of 16."""
    rng = np.random.default_rng(0)
    x = rng.random((660, 3))
    y = rng.random((640, 3))
    cloud = mapuot.PointCloud(x, y, form=None)
    one = mapuot.PointCloud(x, y, form=None)
    mapuot.solve(cloud, reg=0.002, reg_m=1.0, threads=1)
    assert coarse.FOUND[cloud._cost].clusters == 64
    using(COARSE, most_clusters=16)
    found, right = (mapuot.solve(z, reg=0.002, reg_m=1.0, threads=1) for z in (cloud, one))
    assert coarse.FOUND[cloud._cost].clusters == 16
    np.testing.assert_array_equal(found.log_u, right.log_u)


def test_rows_of_a_function_have_the_clusters_of_their_matrix(using):
    """Rows of a function keep landmarks in the sweep for the range: equal steps, and no further read of M."""
    case = clouds(90, 110, reg=0.02)
    reads = []

    def rows(i0, i1):
        reads.append(i1 - i0)
        return case.M[i0:i1]

    using(BLOCKS, cost_bytes=110 * 8 * 25)  # four blocks
    whole = case.solve(threads=1, callback=lambda stats: None)  # not the short way of small arrays
    got = case.replace(M=rows).solve(threads=1)
    np.testing.assert_array_equal(got.log_u, whole.log_u)
    assert got.n_passes == whole.n_passes
    assert sum(reads) <= 3 * 90 + 1, reads  # the range, K, the certificate
    cost = got.problem.cost
    marks, cost.noted = cost.noted, None
    for seen, read in zip(marks, cost.landmarks(), strict=True):
        np.testing.assert_array_equal(seen, read)
