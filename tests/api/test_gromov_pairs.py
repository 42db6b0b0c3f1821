"""`gromov_pairwise` is `gromov` between each pair, for spaces of any sizes."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import mapuot
from mapuot.spaces.settings import SPACES


def shapes(sizes=(12, 9, 15, 12), seed=0):
    rng = np.random.default_rng(seed)
    clouds = [rng.normal(size=(n, 3)) * [3.0, 2.0, 1.0] for n in sizes]
    masses = [rng.dirichlet(np.ones(n)) for n in sizes]
    features = [rng.random((n, 2)) for n in sizes]
    return clouds, masses, features


@pytest.mark.parametrize("reg_m", [math.inf, (3.0, 2.0), (math.inf, 2.0)])
@pytest.mark.parametrize(
    ("metric", "reg"), [("sqeuclidean", 3.0), ("euclidean", 0.1), ("precomputed", 0.1), ("euclidean", 0.0)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_pairs_are_solved_as_one_by_one(metric, reg, reg_m, fused):
    clouds, masses, features = shapes()
    masses[0][2] = 0.0
    masses[0] /= masses[0].sum()
    given = clouds
    if metric == "precomputed":
        given = [cdist(x, x) for x in clouds]
    if metric == "sqeuclidean" and reg_m != math.inf:
        reg_m = tuple(30 * np.array(reg_m))
    options = {"reg": reg, "reg_m": reg_m, "tol": 1e-4, "inner_tol": 1e-8, "max_iter": 400, "metric": metric}
    shared = {"alpha": 0.8} if fused else {}
    found = mapuot.gromov_pairwise(
        given, masses, keep_plans=True, features=features if fused else None, **shared, **options
    )
    assert found.pairs.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert found.settled.all()
    assert found.error_bound.max() <= 1e-8
    if metric == "sqeuclidean":
        given = [cdist(x, x, "sqeuclidean") for x in clouds]
        options["metric"] = "precomputed"
    for k, (i, j) in enumerate(found.pairs):
        if fused:
            shared["features"] = features[i], features[j]
        start = {"init": found.plans[k] if reg else "rows"}
        alone = mapuot.gromov(given[i], given[j], masses[i], masses[j], **start, **shared, **options)
        assert found.value[k] == pytest.approx(alone.value, rel=1e-6 if reg else 2e-2)
        assert found.plans[k].shape == alone.plan.shape
        if reg:
            assert np.abs(found.plans[k] - alone.plan).sum() <= 1e-3 * alone.mass
        assert found.matrix()[i, j] == found.matrix()[j, i] == found.value[k]
    assert np.isnan(np.diag(found.matrix())).all()


def test_chosen_pairs_in_several_batches(using):
    clouds, _, _ = shapes()
    options = {"reg": 0.1, "reg_m": math.inf, "metric": "euclidean"}
    pairs = [[3, 0], [2, 1], [1, 1], [0, 3]]
    whole = mapuot.gromov_pairwise(clouds, pairs=pairs, **options)
    using(SPACES, plan_entries=150)
    apart = mapuot.gromov_pairwise(clouds, pairs=pairs, progress=True, **options)
    np.testing.assert_allclose(apart.value, whole.value, rtol=1e-5)
    assert whole.plans is None
    assert "4 pairs of 4 spaces, 4 settled" in repr(whole)
    assert len(whole) == 4


def test_of_several_starts_the_best_is_kept():
    clouds, _, _ = shapes()
    options = {"reg": 0.02, "reg_m": math.inf, "metric": "euclidean"}
    inits = "rows", "independent", "noise", ["rows", "independent", "noise"]
    *apart, best = (mapuot.gromov_pairwise(clouds, init=init, **options).value for init in inits)
    assert np.ptp(apart, axis=0).max() > 1e-3 * best.max()
    np.testing.assert_allclose(best, np.min(apart, axis=0), rtol=1e-9)


def test_a_ring_is_turned_from_its_independent_plan():
    cycle = np.abs(np.arange(12)[:, None] - np.arange(12))
    ring = np.minimum(cycle, 12 - cycle).astype(float)
    options = {"reg": 0.3, "reg_m": math.inf, "metric": "precomputed", "init": "independent"}
    found = mapuot.gromov_pairwise([ring, ring], **options)
    assert found.value[0] == pytest.approx(mapuot.gromov(ring, ring, **options).value, rel=1e-5)
    assert found.value[0] < 0.8 * mapuot.gromov(ring, ring, **options, max_iter=3).value


def test_pairs_that_do_not_settle_are_told():
    clouds, _, _ = shapes()
    options = {"reg": 0.1, "reg_m": math.inf, "metric": "euclidean"}
    with pytest.warns(mapuot.ConvergenceWarning, match="6 of 6 plans still change, by up to"):
        assert not mapuot.gromov_pairwise(clouds, max_iter=1, **options).settled.any()
    with pytest.warns(mapuot.ConvergenceWarning, match="last steps end above inner_tol"):
        mapuot.gromov_pairwise(clouds, max_iter=2, max_passes=1, **options)


@pytest.mark.parametrize(("wrong", "match"), [
    ({"masses": [np.ones(12)]}, "masses must be one vector for each of 4 spaces, got 1"),
    ({"features": []}, "features must be one array"),
    ({"features": [np.ones((12, 2))] * 2}, "features must be one array"),
    ({"init": []}, "init must be of"),
], ids=range(4))  # fmt: skip
def test_lists_that_are_too_short_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        mapuot.gromov_pairwise(shapes()[0], reg=0.1, reg_m=math.inf, **wrong)
