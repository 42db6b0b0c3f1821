"""Many clouds at once: every problem of a batch is the answer of `solve` for its own points, whatever its company."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mapuot
from mapuot import PointCloud, solve, solve_batch

SIDES = [(1.0, 2.0), (np.inf, 1.0), (1.0, np.inf), np.inf]


def clouds(p, d=2, most=60, seed=0, alike=False):
    """(x, y, a, b) of p problems between clouds of 5 to ``most`` points, with masses of equal sums."""
    rng = np.random.default_rng(seed)
    sizes = np.full((2, p), most) if alike else rng.integers(5, most + 1, (2, p))
    points = [[rng.random((k, d)) for k in count] for count in sizes]
    masses = [[rng.random(k) + 0.1 for k in count] for count in sizes]
    return *points, *([w / w.sum() for w in side] for side in masses)


def assert_as_alone(result, x, y, a, b, which=None, **options):
    """The plans of a batch are those of single solves, within both bounds, and so is what is paid."""
    for i in range(len(result)) if which is None else which:
        metric = options.get("metric", "sqeuclidean")
        more = {k: v for k, v in options.items() if k not in ("metric", "tol")}
        one = solve(PointCloud(x[i], y[i], metric), a[i], b[i], tol=1e-8, **more)
        assert result[i].plan.shape == (len(x[i]), len(y[i]))
        assert np.abs(result[i].plan - one.plan).sum() / one.mass <= result.error_bound[i] + one.error_bound
        assert result.status[i] == result[i].status == "converged"
        assert_allclose(result[i].row_marginal, result.row_marginal[i][: len(x[i])])
        assert abs(result.dual[i] - one.dual) <= result.gap[i] + one.gap + 1e-9 * abs(one.dual)


@pytest.mark.parametrize(
    ("p", "d", "metric", "reg_m"),
    [*((p, d, "sqeuclidean", 1.0) for p in (1, 7, 256) for d in (2, 3, 64)),
     *((5, 3, metric, reg_m) for metric in ("sqeuclidean", "euclidean", "cosine", "wfr") for reg_m in SIDES)],
)  # fmt: skip
def test_clouds_of_many_sizes(p, d, metric, reg_m):
    x, y, a, b = clouds(p, d)
    reg = 0.05 * d / 2 if p != 5 else 0.02
    result = solve_batch(PointCloud(x, y, metric), a, b, reg=reg, reg_m=reg_m, threads=2)
    assert (result.error_bound <= 1e-6).all()
    assert_as_alone(result, x, y, a, b, range(0, p, 1 + p // 8), metric=metric, reg=reg, reg_m=reg_m)


def test_sizes_from_five_to_two_thousand():
    """What a core does not form in its own memory is solved by the same driver as any other problem."""
    x, y, a, b = clouds(4, 2, 40, seed=1)
    rng = np.random.default_rng(2)
    x[1], y[1] = rng.random((2000, 2)), rng.random((900, 2))
    a[1], b[1] = np.full(2000, 1 / 2000), np.full(900, 1 / 900)
    result = solve_batch(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    assert ["alone" in how for how in result.how] == [False, True, False, False]
    assert_as_alone(result, x, y, a, b, reg=0.05, reg_m=1.0)


def test_every_form_of_the_arguments():
    x, y, a, b = clouds(6, 3, 11, alike=True)
    want = solve_batch(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    tables = [np.stack(z) for z in (x, y, a, b)]
    starts = 11 * np.arange(7)
    flat = PointCloud(np.concatenate(x), np.concatenate(y), starts=starts)
    for M, A, B in (
        (PointCloud(*tables[:2]), *tables[2:]), (flat, np.concatenate(a), np.concatenate(b)), (flat, a, b),
        (PointCloud(tables[0], y, starts=None), tables[2], b),
    ):  # fmt: skip
        np.testing.assert_array_equal(solve_batch(M, A, B, reg=0.05, reg_m=1.0).log_u, want.log_u)
    assert (flat.shape, flat.ndim, len(flat), flat[2].shape) == ((6, 11, 11), 3, 6, (11, 11))
    assert want.plan.shape == (6, 11, 11)
    assert_allclose(np.asarray(flat)[3], np.asarray(PointCloud(x[3], y[3])))
    equal = solve_batch(flat, reg=0.05, reg_m=1.0)
    assert_allclose(equal.problem.A, 1 / 11)
    x[2] = x[2][:4]
    ragged = solve_batch(PointCloud(x, tables[1][0]), reg=0.05, reg_m=1.0)
    assert_as_alone(ragged, x, [y[0]] * 6, [np.full(len(z), 1 / len(z)) for z in x], [b[0] * 0 + 1 / 11] * 6,
                    reg=0.05, reg_m=1.0)  # fmt: skip
    assert [one.shape for one in ragged.plan] == [(len(z), 11) for z in x]
    assert ragged.log_u.shape == (6, 11)
    assert (ragged.log_u[2, 4:] == -np.inf).all()


@pytest.mark.parametrize("options", [{"form": None}, {"truncate": 40.0}], ids=str)
def test_matrices_that_must_not_be_formed(options):
    x, y, a, b = clouds(3, 2, 50)
    result = solve_batch(PointCloud(x, y, **options), a, b, reg=0.05, reg_m=1.0)
    assert not any("the matrix of the points" in how for how in result.how)
    assert_as_alone(result, x, y, a, b, reg=0.05, reg_m=1.0)


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5]], ids=str)
@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cosine"])
def test_gradients(metric, weights):
    x, y, a, b = clouds(6, 3, 30, seed=7)
    a[1][2], b[2][:3] = 0.0, 0.0
    more = {"reg": 0.05, "reg_m": (1.0, 2.0), "tol": 1e-10}
    found = solve_batch(PointCloud(x, y, metric, weights=weights), a, b, **more).gradient()
    for i in range(6):
        one = solve(PointCloud(x[i], y[i], metric, weights=weights), a[i], b[i], **more).gradient()
        for got, want in zip((part[i] for part in found[:4]), one[:4], strict=True):
            assert_allclose(got, want, atol=1e-8 * np.abs(want).max())
        assert found.error[i] < 1e-6
    same = solve_batch(PointCloud(np.stack([x[0]] * 3), y[0]), reg=0.05, reg_m=1.0).gradient()
    assert (same.x.shape, same.b.shape) == ((3, *x[0].shape), (3, len(y[0])))


def test_divergence_of_clouds():
    x, y, a, b = clouds(4, 2, 20)
    values = mapuot.sinkhorn_divergence(PointCloud(x, y), a, b, reg=0.05, reg_m=1.0)
    for i in range(4):
        want = mapuot.sinkhorn_divergence(PointCloud(x[i], y[i]), a[i], b[i], reg=0.05, reg_m=1.0)
        assert values[i] == pytest.approx(want, abs=1e-8)
    assert_allclose(mapuot.sinkhorn_divergence(PointCloud(x), a, a, reg=0.05, reg_m=1.0), 0.0, atol=1e-9)


def test_all_pairs():
    x, _, a, _ = clouds(7, 2, 30, seed=4)
    a[3] = 2 * a[3]
    x[6], a[6] = np.concatenate([x[6], x[5]]), np.concatenate([a[6], a[5]]) / 2  # the largest is no row
    D = mapuot.pairwise(x, a, reg=0.05, reg_m=1.0, metric="euclidean")
    assert (D == D.T).all()
    assert (np.diag(D) == 0).all()
    for i, j in ((0, 1), (2, 3), (6, 3), (5, 4)):
        M = PointCloud(x[i], x[j], "euclidean")
        want = mapuot.sinkhorn_divergence(M, a[i], a[j], reg=0.05, reg_m=1.0)
        assert D[i, j] == pytest.approx(want, abs=1e-8)
    equal = mapuot.pairwise(np.stack([z[:5] for z in x]), reg=0.05, reg_m=np.inf)
    assert (equal[~np.eye(7, dtype=bool)] > 0).all()
